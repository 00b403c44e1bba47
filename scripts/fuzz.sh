#!/usr/bin/env bash
# Fuzzes what reads files from outside, from the inputs in tests/fuzz/corpus on.
# usage: scripts/fuzz.sh [--seconds N] [--jobs N] [--merge] [--build DIR] [TARGET...]
#   TARGET     config, csv, series, checkpoint, weights; else all
#   --seconds  of each target; else 20
#   --jobs     how many targets at once; else one a core
#   --merge    new inputs that reach something new are added to tests/fuzz/corpus
#   --build    a build folder with the targets, such as build/fuzz-hdf5 (scripts/fuzz_hdf5.sh); else build/fuzz, which is built first
# Exit 0: nothing was found. 1: a finding, whose input is kept in DIR/findings. libhdf5 has faults of its own: an input that crashes
# it alone, and harms no process that looks at it through a child (data/probe.h), is told and kept in DIR/contained.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=20 jobs=$(nproc) merge= build= targets=()
while [ $# -gt 0 ]; do
    case "$1" in
        --seconds) seconds=${2:?--seconds needs a number}; shift ;;
        --jobs) jobs=${2:?--jobs needs a number}; shift ;;
        --merge) merge=1 ;;
        --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit ;;
        --build) build=${2:?--build needs a folder}; shift ;;
        config | csv | series | checkpoint | weights) targets+=("$1") ;;
        *) echo "fuzz: $1: unknown: see the head of scripts/fuzz.sh" >&2; exit 2 ;;
    esac
    shift
done
[[ "$jobs" =~ ^[1-9][0-9]*$ ]] || { echo "fuzz: --jobs $jobs: a number from 1 on" >&2; exit 2; }
[ ${#targets[@]} -gt 0 ] || targets=(series checkpoint config csv weights) # the longest first: what crashes libhdf5 is run again
if [ -z "$build" ]; then
    build=build/fuzz
    cmake --preset fuzz --log-level=WARNING >/dev/null
    cmake --build --preset fuzz
fi

PS_FUZZ_FOLDER=$(mktemp -d "$([ -w /dev/shm ] && echo /dev/shm || echo /tmp)/patchstep-fuzz-XXXXXX")
export PS_FUZZ_FOLDER UBSAN_OPTIONS=print_stacktrace=1 OMP_NUM_THREADS=1
trap 'rm -rf "$PS_FUZZ_FOLDER"' EXIT
limits=(-timeout=5 -rss_limit_mb=2048 -malloc_limit_mb=1024)

# Whether the first frame that is libhdf5's or ours, of the report on stdin, is ours; also when there is none.
is_ours() {
    awk -v root="$PWD/" '/^ *#[0-9]+ 0x/ && !/tests\/fuzz\// {
            if (/libhdf5|\/hdf5\/src\// || / in H5/) { lib = 1; exit }
            if (index($0, root)) { exit }
        }
        END { exit lib }'
}

# Fuzzes a target and tells what came of it; 1: a finding, or no search.
fuzz_target() {
    local target=$1
    local program=$build/tests/fuzz/fuzz_$target corpus=tests/fuzz/corpus/$target work=$build/work/$target
    local found=$build/findings/$target kept=$build/contained/$target
    local dict=tests/fuzz/$target.dict
    [ -f "$dict" ] || dict=tests/fuzz/hdf5.dict
    mkdir -p "$found" "$kept" "$work"
    local log=$build/$target.log runs took report input contained=0 findings=0
    # In its own process each time, and on: what crashes libhdf5 must not end the search.
    "$program" -fork=1 -ignore_crashes=1 -ignore_ooms=1 -ignore_timeouts=1 -max_total_time="$seconds" "${limits[@]}" -dict="$dict" \
        -artifact_prefix="$found/" "$work" "$corpus" >"$log" 2>&1 || true
    runs=$(grep -oE '^#[0-9]+: cov: [0-9]+ ft: [0-9]+ corp: [0-9]+' "$log" | tail -1)
    took=$(grep -oE '^INFO: exiting: .* time: [0-9]+' "$log" | grep -oE '[0-9]+$') || took=
    for input in "$found"/*; do
        [ -f "$input" ] || continue
        report=$("$program" "${limits[@]}" "$input" 2>&1) && { rm "$input"; continue; } # what no longer happens
        if [[ "$target" == @(series|checkpoint) ]] && ! is_ours <<<"$report" &&
            PS_FUZZ_CONTAINED=1 "$program" -timeout=300 "$input" >/dev/null 2>&1; then
            contained=$((contained + 1))
            mv "$input" "$kept/"
        else
            findings=$((findings + 1))
            echo "fuzz: $target: FINDING: $input"
            grep -E 'SUMMARY|not so|runtime error' <<<"$report" | head -3
        fi
    done
    echo "fuzz: $target: $([ -n "$took" ] && echo "$took s" || echo "ended before its $seconds s, see $log"), ${runs:-no runs: see $log}: $findings findings$(
        [ "$contained" -eq 0 ] || echo ", $contained inputs that crash libhdf5 alone, contained")"
    if [ -n "$merge" ]; then
        "$program" -set_cover_merge=1 "${limits[@]}" "$corpus" "$work" 2>&1 | grep -E 'MERGE-OUTER: .* new' || true
    fi
    [ "$findings" -eq 0 ] && [ -n "$runs" ] && [ -n "$took" ]
}

# The next target begins when one ends.
running=0 status=0
for target in "${targets[@]}"; do
    if [ "$running" -lt "$jobs" ]; then
        running=$((running + 1))
    else
        wait -n || status=1
    fi
    (fuzz_target "$target" || exit 1) &
done
while [ "$running" -gt 0 ]; do
    wait -n || status=1
    running=$((running - 1))
done
exit "$status"
