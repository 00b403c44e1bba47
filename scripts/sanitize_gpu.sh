#!/usr/bin/env bash
# Runs the suites that reach the GPU's kernels under compute-sanitizer, small cases, every tool; before that it looks, without a
# tool, whether these cases launch every kernel that the library has for this GPU.
# usage: scripts/sanitize_gpu.sh [reached] [TOOL...]     tools: memcheck, racecheck, synccheck, initcheck; else all of these
# PS_BUILD: the folder of the build, build/auto if unset. PS_LOGS: a folder that keeps what the tools print. PS_JOBS: processes at
# once, else as many as there are processors.
# PS_PARTS: a pattern (grep -E) of the parts to run, such as 'every|layer bf16'; else all of them.
# Exit 0: no tool found anything, no suite failed, and every kernel was reached but those of the largest sizes, which are counted.
# What racecheck says of cuBLASLt's own kernels (nvjet) is counted, not held against us.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${PS_BUILD:-build/auto} tools=("$@") jobs=${PS_JOBS:-$(nproc)}
[ ${#tools[@]} -gt 0 ] || tools=(reached memcheck racecheck synccheck initcheck)
for tool in "${tools[@]}"; do
    case $tool in
        reached | memcheck | racecheck | synccheck | initcheck) ;;
        *) echo "sanitize_gpu: $tool: unknown: reached, memcheck, racecheck, synccheck or initcheck" >&2; exit 2 ;;
    esac
done
for command in compute-sanitizer cuobjdump; do
    command -v $command >/dev/null || { echo "sanitize_gpu: $command is missing: it comes with the CUDA Toolkit" >&2; exit 2; }
done
logs=${PS_LOGS:-$(mktemp -d)}
[ -n "${PS_LOGS:-}" ] || trap 'rm -rf "$logs"' EXIT
export PS_TEST_SMALL=1 OMP_WAIT_POLICY=passive PS_PROGRAMS=$build

# A suite, one of its cases (CK_RUN_CASE), or a share of a case (PS_TEST_SHARD) is a process of its own: the tools are slow on the
# host's side.
parts=(test_optim test_session test_kernels:calls test_model:differences "test_model:layer halves")
for precision in tf32 fp16 bf16; do
    parts+=("test_model:every $precision" "test_model:step $precision")
done

shards=8
for ((i = 0; i < shards; i++)); do
    parts+=("test_kernels:parity:$i/$shards")
done
# These reach every kernel, which is enough for what lies within a block. What is read and written beside a tensor also hangs on the
# sizes: memcheck takes these cases too.
beside=(test_random test_model:model "test_model:layer shifted")
for precision in tf32 fp16 bf16; do
    beside+=("test_model:layer $precision")
done

# tool: its parts, a line each
parts_of() {
    local all=("${parts[@]}")
    [ "$1" != memcheck ] || all+=("${beside[@]}")
    printf '%s\n' "${all[@]}" | grep -E "${PS_PARTS:-}"
}
for tool in "${tools[@]}"; do
    parts_of "$tool" >/dev/null || { echo "sanitize_gpu: PS_PARTS: $PS_PARTS: no such part of $tool" >&2; exit 2; }
done

# tool, part: its log's name
log_of() {
    local name=$1.$2
    echo "$logs/${name//[: \/]/_}"
}

# tool, part: a line that says how it ended; fails unless it was clean
report() {
    local log summary checks theirs
    log=$(log_of "$1" "$2")
    summary=$(sed -n 's/^=* *\(.*SUMMARY.*\)/\1/p' "$log" | tail -1)
    checks=$(sed -n '/Checks:/p' "$log" | tail -1)
    theirs=$(grep -c 'Race reported between .* at nvjet_' "$log" || true)
    if grep -q "no CUDA device" "$log"; then
        echo "$1 $2: skipped: no CUDA device"
        return 1
    elif [ "$theirs" -gt 0 ] && [ "$3" = 9 ] && [[ $checks == 100%* ]] &&
        [[ $summary =~ \ $theirs\ hazards?\ displayed\ \($theirs\ errors?, ]]; then
        echo "$1 $2: clean but for $theirs hazard(s) within cuBLASLt's kernels; $checks"
    elif [ "$3" != 0 ] || [[ ! $checks =~ ^100%:\ Checks:\ [1-9] ]]; then # a suite that ran nothing found nothing
        echo "$1 $2: exit $3; ${checks:-no result}; ${summary:-no summary}"
        sed -n '/^=========     at/p' "$log" | sort | uniq -c | sort -rn | awk 'NR <= 10'
        return 1
    else
        echo "$1 $2: clean; $checks"
    fi
}

# tool, part
run() {
    local log suite case shard status=0
    log=$(log_of "$1" "$2")
    IFS=: read -r suite case shard <<<"$2"
    [ -z "$case" ] || export CK_RUN_CASE=$case
    [ -z "$shard" ] || export PS_TEST_SHARD=$shard
    if [ "$1" = reached ]; then
        CUDA_INJECTION64_PATH=$build/tests/libkernel_recorder.so PS_KERNELS_LAUNCHED=$log.kernels \
            "$build/tests/$suite" >"$log" 2>&1 || status=$?
    else
        compute-sanitizer --tool "$1" --error-exitcode 9 --print-limit 10000 "$build/tests/$suite" >"$log" 2>&1 || status=$?
    fi
    report "$1" "$2" $status || touch "$logs/found"
}

rm -f "$logs/found" "$logs"/reached.*.kernels
for tool in "${tools[@]}"; do
    while read -r part; do
        while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do
            wait -n || true
        done
        run "$tool" "$part" </dev/null &
    done < <(parts_of "$tool")
done
wait

result=0
[ ! -e "$logs/found" ] || result=1
if [[ " ${tools[*]} " == *" reached "* ]]; then
    sort -u "$logs"/reached.*.kernels >"$logs/launched"
    cuobjdump -symbols "$build/libpatchstep.so" | awk '/[ _]ENTRY / { print $NF }' | sort -u >"$logs/kernels"
    comm -23 "$logs/kernels" "$logs/launched" >"$logs/unreached"
    # What serves more than 2^31 elements, and sums of more than 32,768 rows by level gemm's products: no small case can.
    beyond='elementwise<[0-9]+, [0-9]+, true,|map_(single|quads|octets)<true,|sum_up<true>'
    c++filt <"$logs/unreached" | sed 's/^void //' >"$logs/unreached.names"
    echo "kernels reached: $(comm -12 "$logs/kernels" "$logs/launched" | wc -l) of $(wc -l <"$logs/kernels");" \
        "for larger sizes alone: $(grep -cE "$beyond" "$logs/unreached.names" || true)"
    if grep -vE "$beyond" "$logs/unreached.names" | sed 's/^/not reached: /'; then
        result=1
    fi
fi
exit $result
