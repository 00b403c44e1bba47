#!/usr/bin/env bash
# Runs the suites that reach the GPU's kernels under compute-sanitizer, small cases, every tool.
# usage: scripts/sanitize_gpu.sh [TOOL...]     tools: memcheck, racecheck, synccheck, initcheck; else all
# PS_TESTS: the folder of the suites, build/auto/tests if unset. PS_LOGS: a folder that keeps what the tools print.
# Exit 0: no tool found anything and no suite failed. What racecheck says of cuBLASLt's own kernels (nvjet) is counted, not held
# against us.
set -euo pipefail
cd "$(dirname "$0")/.."
tests=${PS_TESTS:-build/auto/tests} tools=("$@")
[ ${#tools[@]} -gt 0 ] || tools=(memcheck racecheck synccheck initcheck)
command -v compute-sanitizer >/dev/null || { echo "sanitize_gpu: compute-sanitizer is missing: it comes with the CUDA Toolkit" >&2; exit 2; }
logs=${PS_LOGS:-$(mktemp -d)}
[ -n "${PS_LOGS:-}" ] || trap 'rm -rf "$logs"' EXIT
export PS_TEST_SMALL=1 OMP_WAIT_POLICY=passive

# A tool's suites follow one another; the tools, slow on the host's side, run side by side.
for tool in "${tools[@]}"; do
    for suite in test_optim test_model test_session test_kernels; do
        log=$logs/$tool.$suite
        compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 10000 "$tests/$suite" >"$log" 2>&1 && rm -f "$log.failed" ||
            echo $? >"$log.failed"
    done &
done
wait
result=0
for tool in "${tools[@]}"; do
    for suite in test_optim test_model test_session test_kernels; do
        log=$logs/$tool.$suite
        summary=$(sed -n 's/^=* *\(.*SUMMARY.*\)/\1/p' "$log" | tail -1)
        checks=$(sed -n '/Checks:/p' "$log" | tail -1)
        theirs=$(grep -c 'Race reported between .* at nvjet_' "$log" || true)
        if grep -q "no CUDA device" "$log"; then
            echo "$tool $suite: skipped: no CUDA device"
            result=1
        elif [ "$theirs" -gt 0 ] && [ "$(cat "$log.failed")" = 9 ] && [[ $checks == 100%* ]] &&
            [[ $summary =~ \ $theirs\ hazards?\ displayed\ \($theirs\ errors?, ]]; then
            echo "$tool $suite: clean but for $theirs hazard(s) within cuBLASLt's kernels; $checks"
        elif [ -e "$log.failed" ]; then
            echo "$tool $suite: exit $(cat "$log.failed"); ${checks:-no result}; ${summary:-no summary}"
            sed -n '/^=========     at/p' "$log" | sort | uniq -c | sort -rn | awk 'NR <= 10'
            result=1
        else
            echo "$tool $suite: clean; $checks"
        fi
    done
done
exit $result
