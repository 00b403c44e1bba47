#!/usr/bin/env bash
# This project's training step beside those of PyTorch and JAX: the same model and sizes on the same device, in turns.
# usage: scripts/bench_peers.sh [cuda|cpu] [SHAPES] [PRECISIONS] [option]...
#   SHAPES              names and groups of scripts/peers/shapes.py, separated by commas: base, paper, sweep, all, and
#                       draw-1, draw-2 and so on for sizes drawn at random; else base,paper; on the CPU seed28k,etth1,etth1_paper
#   PRECISIONS          of ours: bf16, tf32, fp16 and fp32, separated by commas; else bf16,tf32; on the CPU fp32. The peers are timed
#                       in bf16 beside ours, and in tf32 beside our three others
#   --results FILE      where the lines of all measurements are kept; else runs/peers.txt. scripts/peers/table.py FILE makes the
#                       table of them again
#   --limit SECONDS     the longest that a peer may compile, and again that it may be timed; else 300
#   --ahead SHAPES      of how many shapes the peers compile side by side, before they are timed one after the other; else 1
# PS_PROGRAMS: the folder of the programs, build/auto if unset. The peers run by python3. Each measurement is a process of its own
# and a line; one that runs out of memory, out of time or fails is named in the table, and the others go on.
set -euo pipefail
shopt -s inherit_errexit

fail() {
    echo "bench_peers: $1" >&2
    exit 2
}
words=() results='' limit=300 ahead=1
while [ $# -gt 0 ]; do
    case $1 in
        --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit ;;
        --results | --limit | --ahead)
            [ $# -ge 2 ] || fail "$1 needs a value (--help)"
            case $1 in
                --results) results=$(realpath -m -- "$2") ;;
                --limit) limit=$2 ;;
                --ahead) ahead=$2 ;;
            esac
            shift ;;
        -*) fail "$1: unknown (--help)" ;;
        *) words+=("$1") ;;
    esac
    shift
done
[ ${#words[@]} -le 3 ] || fail "${words[3]}: a device, shapes and precisions at most (--help)"
[[ $limit =~ ^[1-9][0-9]{0,5}$ ]] || fail "--limit: $limit: whole seconds"
[[ $ahead =~ ^[1-9][0-9]?$ ]] || fail "--ahead: $ahead: shapes, 1 to 99"
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

# run NAME LIMIT COMMAND...: its output, errors and exit code in files of that name
run() {
    local code=0
    OMP_WAIT_POLICY=passive timeout --kill-after=10 "$2" "${@:3}" >"$work/$1.out" 2>"$work/$1.err" &
    echo $! >"$work/$1.pid"
    wait $! || code=$?
    echo $code >"$work/$1.code"
}

# result WHO SHAPE PRECISION: the line of what has run, the last that it printed, into the results
result() {
    local name=$1.$2.$3 code why
    code=$(<"$work/$name.code")
    if [ "$code" -eq 0 ]; then
        tail -n 1 "$work/$name.out" | tee -a "$results"
        return
    elif [ "$code" -eq 124 ] || [ "$code" -eq 143 ]; then
        why="not within $limit s"
    elif grep -qiE 'out of memory|RESOURCE_EXHAUSTED|MemoryError' "$work/$name.err"; then
        why="out of memory"
    else
        why="exit code $code: $({ grep -v '^[[:space:]]*$' "$work/$name.err" || true; } | tail -n 1 | cut -c 1-200)"
    fi
    printf '%-5s %-17s %-4s no figure: %s\n' "$1" "$2" "$3" "$why" | tee -a "$results"
}

ours() {
    "$programs/bench" "$work/config.yaml" --json --epochs 0 --steps 100 --device "$device" --set "runtime.precision=$2" >"$work/json"
    python3 scripts/peers/table.py ours "$1" "$2" "$work/json"
}
export -f ours
export programs work device

# The precisions that the peers are timed in.
rivals=''
for precision in ${precisions//,/ }; do
    [ "$device" = cpu ] || [ "$precision" = bf16 ] || precision=tf32
    [[ " $rivals " == *" $precision "* ]] || rivals+=" $precision"
done

# Peers wait for their turn with what they have compiled (shapes.py: wait_for_turn); memory is theirs by need alone.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
mapfile -t shapes <<<"$shapes"
for ((first = 0; first < ${#shapes[@]}; first += ahead)); do
    names=() begun=$SECONDS
    for shape in "${shapes[@]:first:ahead}"; do
        for precision in $rivals; do
            for peer in "${peers[@]}"; do
                names+=("$peer.$shape.$precision")
                PS_TURN=$work/${names[-1]} run "${names[-1]}" $((limit * (ahead + 1))) \
                    python3 "scripts/peers/${peer}_step.py" --device "$device" "$shape" "$precision" &
            done
        done
    done
    for name in "${names[@]}"; do
        until [ -e "$work/$name.ready" ] || [ -e "$work/$name.code" ] || [ $SECONDS -gt $((begun + limit)) ]; do sleep 0.1; done
        [ -e "$work/$name.ready" ] || [ -e "$work/$name.code" ] || kill "$(<"$work/$name.pid")"
    done
    for shape in "${shapes[@]:first:ahead}"; do
        mapfile -t sample < <(python3 scripts/peers/shapes.py sample "$shape")
        if [ ! -e "$work/${sample[0]}" ]; then
            "$programs/sample_series" "$work/${sample[0]}" "${sample[@]:1}" >/dev/null
        fi
        python3 scripts/peers/shapes.py config "$shape" "$work/${sample[0]}" >"$work/config.yaml"
        for precision in ${precisions//,/ }; do
            run "ours.$shape.$precision" "$limit" bash -ec 'ours "$@"' ours "$shape" "$precision"
            result ours "$shape" "$precision"
        done
        for precision in $rivals; do
            for peer in "${peers[@]}"; do
                touch "$work/$peer.$shape.$precision.go"
                until [ -e "$work/$peer.$shape.$precision.code" ]; do sleep 0.1; done
                result "$peer" "$shape" "$precision"
            done
        done
    done
    wait
done
echo
python3 scripts/peers/table.py "$results"
