#!/usr/bin/env bash
# This project's training step beside those of PyTorch and JAX: the same model and sizes on the same device, in turns.
# usage: scripts/bench_peers.sh [cuda|cpu] [SHAPES] [PRECISIONS] [option]...
#   SHAPES              names and groups of scripts/peers/shapes.py, separated by commas: base, paper, sweep, all; else base,paper;
#                       on the CPU seed28k,etth1,etth1_paper
#   PRECISIONS          of ours: bf16, tf32, fp16 and fp32, separated by commas; else bf16,tf32; on the CPU fp32. The peers are timed
#                       in bf16 beside ours, and in tf32 beside our three others
#   --results FILE      where the lines of all measurements are kept; else runs/peers.txt. scripts/peers/table.py FILE makes the
#                       table of them again
#   --limit SECONDS     the longest that one measurement may take, compiling included; else 300
# PS_PROGRAMS: the folder of the programs, build/auto if unset. The peers run by python3. Each measurement is a process of its own
# and a line; one that runs out of memory, out of time or fails is named in the table, and the others go on.
set -euo pipefail
shopt -s inherit_errexit

fail() {
    echo "bench_peers: $1" >&2
    exit 2
}
words=() results='' limit=300
while [ $# -gt 0 ]; do
    case $1 in
        --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit ;;
        --results | --limit)
            [ $# -ge 2 ] || fail "$1 needs a value (--help)"
            if [ "$1" = --results ]; then results=$(realpath -m -- "$2"); else limit=$2; fi
            shift ;;
        -*) fail "$1: unknown (--help)" ;;
        *) words+=("$1") ;;
    esac
    shift
done
[ ${#words[@]} -le 3 ] || fail "${words[3]}: a device, shapes and precisions at most (--help)"
[[ $limit =~ ^[1-9][0-9]{0,5}$ ]] || fail "--limit: $limit: whole seconds"
cd "$(dirname "$0")/.."
programs=${PS_PROGRAMS:-build/auto} results=${results:-$PWD/runs/peers.txt} device=${words[0]:-cuda}
case $device in
    cuda) known='bf16 tf32 fp16 fp32' precisions=${words[2]:-bf16,tf32} wanted=${words[1]:-base,paper} ;;
    cpu) known=fp32 precisions=${words[2]:-fp32} wanted=${words[1]:-seed28k,etth1,etth1_paper} ;;
    *) fail "$device: cuda or cpu" ;;
esac
for precision in ${precisions//,/ }; do
    [[ " $known " == *" $precision "* ]] || fail "$precision: on $device not one of $known"
done
for program in bench sample_series; do
    [ -x "$programs/$program" ] || fail "$programs/$program is missing: build first with scripts/build.sh"
done
command -v python3 >/dev/null || fail "python3 is missing"
shapes=$(python3 scripts/peers/shapes.py names "$wanted") || exit 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$(dirname "$results")"

# The peers that are installed, with their versions in the results.
gpu=''
[ "$device" = cpu ] || gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1) || true
echo "# $(date -u +%F), $device${gpu:+, $gpu}" | tee "$results"
peers=()
for peer in jax torch; do
    if version=$(python3 -c "from importlib.metadata import version as v; print('$peer', v('$peer'))" 2>/dev/null); then
        peers+=("$peer")
        echo "# $version" | tee -a "$results"
    else
        echo "# $peer is not installed for $(command -v python3): left out" | tee -a "$results"
    fi
done

# measure WHO SHAPE PRECISION COMMAND...: its line, the last of what the command prints, into the results
measure() {
    local who=$1 shape=$2 precision=$3 code=0 why
    shift 3
    OMP_WAIT_POLICY=passive timeout --kill-after=10 "$limit" "$@" >"$work/out" 2>"$work/err" || code=$?
    if [ $code -eq 0 ]; then
        tail -n 1 "$work/out" | tee -a "$results"
        return
    elif [ $code -eq 124 ]; then
        why="not within $limit s"
    elif grep -qiE 'out of memory|RESOURCE_EXHAUSTED|MemoryError' "$work/err"; then
        why="out of memory"
    else
        why="exit code $code: $({ grep -v '^[[:space:]]*$' "$work/err" || true; } | tail -n 1 | cut -c 1-200)"
    fi
    printf '%-5s %-17s %-4s no figure: %s\n' "$who" "$shape" "$precision" "$why" | tee -a "$results"
}

ours() {
    "$programs/bench" "$work/config.yaml" --json --epochs 0 --steps 100 --device "$device" --set "runtime.precision=$2" >"$work/json"
    python3 scripts/peers/table.py ours "$1" "$2" "$work/json"
}
export -f ours
export programs work device

for shape in $shapes; do
    mapfile -t sample < <(python3 scripts/peers/shapes.py sample "$shape")
    if [ ! -e "$work/${sample[0]}" ]; then
        "$programs/sample_series" "$work/${sample[0]}" "${sample[@]:1}" >/dev/null
    fi
    python3 scripts/peers/shapes.py config "$shape" "$work/${sample[0]}" >"$work/config.yaml"
    timed=' '
    for precision in ${precisions//,/ }; do
        measure ours "$shape" "$precision" bash -ec 'ours "$@"' ours "$shape" "$precision"
        theirs=$precision
        [ "$device" = cpu ] || [ "$precision" = bf16 ] || theirs=tf32
        [[ $timed != *" $theirs "* ]] || continue
        timed+="$theirs "
        for peer in "${peers[@]}"; do
            measure "$peer" "$shape" "$theirs" python3 "scripts/peers/${peer}_step.py" --device "$device" "$shape" "$theirs"
        done
    done
done
echo
python3 scripts/peers/table.py "$results"
