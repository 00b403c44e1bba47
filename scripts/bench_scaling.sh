#!/usr/bin/env bash
# How a training step grows with the ranks that share it: a table, of one process, of ranks that share its batch (strong) and of
# ranks that each have as large a one (weak). bench times each in turns, and the least of the turns counts. Where python3 has torch,
# and CONFIG is named as a shape of scripts/peers/shapes.py, PyTorch's DistributedDataParallel is timed in the same turns.
# usage: scripts/bench_scaling.sh cpu|cuda CONFIG [option]... [-- option of bench]...
#   --ranks N,N...      else 2
#   --batch N           one process's train.batch_size; else the config's
#   --threads N         on the CPU: a rank's runtime.threads; else 1. One process of as many threads as all ranks have is timed too
#   --turns N           else 3
#   --steps N           else 200
#   --mpirun COMMAND    what starts ranks; else: mpirun --oversubscribe --bind-to none
#   --no-torch          leaves PyTorch out
#   --results FILE      where the JSON of all measurements is kept, an object a line; else runs/scaling.jsonl
# PS_PROGRAMS: the folder of the programs, build/auto if unset.
set -euo pipefail
shopt -s inherit_errexit

fail() {
    echo "bench_scaling: $1" >&2
    exit 2
}
words=() more=() ranks=2 batch='' threads=1 turns=3 steps=200 mpirun='mpirun --oversubscribe --bind-to none' results='' torch=1
while [ $# -gt 0 ]; do
    case $1 in
        --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit ;;
        --) shift; more=("$@"); break ;;
        --no-torch) torch='' ;;
        --ranks | --batch | --threads | --turns | --steps | --mpirun | --results)
            [ $# -ge 2 ] || fail "$1 needs a value (--help)"
            printf -v "${1#--}" %s "$2"
            shift ;;
        -*) fail "$1: unknown (--help)" ;;
        *) words+=("$1") ;;
    esac
    shift
done
[ ${#words[@]} -eq 2 ] || fail 'cpu or cuda, and a config (--help)'
device=${words[0]} config=${words[1]}
[[ $device = cpu || $device = cuda ]] || fail "$device: cpu or cuda"
[ -r "$config" ] || fail "$config: cannot be read"
for number in ${ranks//,/ } ${batch:-1} "$threads" "$turns" "$steps"; do
    [[ $number =~ ^[1-9][0-9]{0,6}$ ]] || fail "$number: a whole number of at least 1"
done
programs=${PS_PROGRAMS:-build/auto} results=${results:-runs/scaling.jsonl}
[ -x "$programs/bench" ] || fail "$programs/bench is missing: build first with scripts/build.sh"
mkdir -p "$(dirname "$results")"
: >"$results"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
read -ra launcher <<<"$mpirun"

# measure WHAT RANKS BATCH THREADS: a line of JSON
measure() {
    local what=$1 n=$2 windows=$3 each=$4 start=() set=() json
    [ "$n" -eq 1 ] || start=("${launcher[@]}" -n "$n")
    [ -z "$windows" ] || set+=(--set "train.batch_size=$windows")
    [ "$device" = cuda ] || set+=(--set "runtime.threads=$each")
    json=$("${start[@]}" "$programs/bench" "$config" --device "$device" --epochs 0 --steps "$steps" --json "${set[@]}" "${more[@]}")
    python3 -c 'import json, sys
run = json.loads(sys.argv[4])
run.pop("parts")
print(json.dumps({"what": sys.argv[1], "n": int(sys.argv[2]), "threads": int(sys.argv[3]), **run}))' \
        "$what" "$n" "$each" "$json" >>"$results"
}

# The peer, where it can be had.
peers=$(dirname "$0")/peers shape=$(basename "$config" .yaml)
if [ -n "$torch" ]; then
    if ! python3 -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then
        torch=''
    elif ! python3 "$peers/shapes.py" names "$shape" >/dev/null 2>&1; then
        echo "bench_scaling: $shape is no shape of $peers/shapes.py: PyTorch is left out" >&2
        torch=''
    fi
fi

# measure_torch WHAT RANKS BATCH: the same of PyTorch, on a GPU as one graph where that can be captured. What fails is said, and not
# timed again
measure_torch() {
    local what=$1 n=$2 windows=$3 start=(python3) precision=fp32 ways=('') way output errors=$results.torch
    [ -n "$torch" ] || return 0
    [ "$n" -eq 1 ] || start=(python3 -m torch.distributed.run --nproc-per-node "$n")
    if [ "$device" = cuda ]; then
        precision=$(python3 -c 'import json, sys
print("bf16" if json.loads(open(sys.argv[1]).readline())["precision"] == "bf16" else "tf32")' "$results")
        ways+=(--no-graph)
    fi
    for way in "${ways[@]}"; do
        if output=$(OMP_NUM_THREADS=$threads timeout 900 "${start[@]}" "$peers/torch_step.py" --device "$device" \
            --threads "$threads" --batch "$windows" ${way:+"$way"} "$shape" "$precision" 2>"$errors"); then
            rm -f "$errors"
            python3 -c 'import json, re, sys
ms, least = map(float, re.search(r"(\S+) ms/step \(min (\S+)", sys.argv[3]).groups())
print(json.dumps({"what": "torch " + sys.argv[1], "n": int(sys.argv[2]), "ms_per_step": {"median": ms, "min": least}}))' \
                "$what" "$n" "$output" >>"$results"
            return 0
        fi
    done
    echo "bench_scaling: PyTorch is left out: $({ grep '^torch_step: ' "$errors" || grep -v '^[[:space:]]*$' "$errors" ||
        echo 'not within 900 s'; } | tail -n 1 | cut -c 1-200)" >&2
    rm -f "$errors"
    torch=''
}

[ -n "$batch" ] || { measure one 1 '' "$threads"; batch=$(python3 -c 'import json, sys
print(json.loads(open(sys.argv[1]).readline())["batch"])' "$results"); }
for ((turn = 0; turn < turns; turn++)); do
    measure one 1 "$batch" "$threads"
    measure_torch one 1 "$batch"
    for n in ${ranks//,/ }; do
        measure strong "$n" "$batch" "$threads"
        measure weak "$n" $((batch * n)) "$threads"
        measure_torch strong "$n" "$batch"
        measure_torch weak "$n" $((batch * n))
        [ "$device" = cuda ] || measure threads 1 "$batch" $((threads * n))
    done
done
python3 - "$results" <<'PYTHON'
import json
import sys

runs = [json.loads(line) for line in open(sys.argv[1])]


def least(what, key, value):
    return min((r for r in runs if r["what"] == what and r[key] == value), key=lambda r: r["ms_per_step"]["min"], default=None)


one = least("one", "n", 1)
cpu, each = one["backend"] == "cpu", one["threads"]
print(f'{one["device"]}, {one["precision"]}, {one["kernels"]}; batch {one["batch"]}; least of groups of steps in turns')
head = ["ranks", "strong ms", "speedup", "efficiency", "weak ms", "efficiency", "exchange ms", "of a strong step"]
head += ["one process of as many threads, ms", "ranks against it"] if cpu else []
alone = least("torch one", "n", 1)
peers = {n for n in {r["n"] for r in runs} if alone and least("torch strong", "n", n) and least("torch weak", "n", n)}
head += ["PyTorch strong ms", "speedup", "weak ms", "efficiency", "ours, times as fast (strong)"] if peers else []
print("| " + " | ".join(head) + " |")
print("|" + "---:|" * len(head))


def row(n, *cells):
    print(f"| {n} | " + " | ".join(cells + ("",) * (len(head) - 1 - len(cells))) + " |")


t1 = one["ms_per_step"]["min"]
first = [f"{t1:.4f}", "1.00", "1.00", f"{t1:.4f}", "1.00", "", ""] + ["", ""] * cpu
if peers:
    p1 = alone["ms_per_step"]["min"]
    first += [f"{p1:.4f}", "1.00", f"{p1:.4f}", "1.00", f"{p1 / t1:.2f}"]
row(1, *first)
for n in sorted({r["n"] for r in runs if r["n"] > 1}):
    strong, weak = (least(what, "n", n) for what in ("strong", "weak"))
    s, w, e = strong["ms_per_step"]["min"], weak["ms_per_step"]["min"], strong["ranks"]["exchange_ms"]
    cells = [f"{s:.4f}", f"{t1 / s:.2f}", f"{t1 / s / n:.2f}", f"{w:.4f}", f"{t1 / w:.2f}", f"{e:.4f}", f"{100 * e / s:.1f} %"]
    if cpu:
        t = least("threads", "threads", each * n)["ms_per_step"]["min"]
        cells += [f"{t:.4f}", f"{t / s:.2f}"]
    if n in peers:
        ps, pw = (least(what, "n", n)["ms_per_step"]["min"] for what in ("torch strong", "torch weak"))
        cells += [f"{ps:.4f}", f"{p1 / ps:.2f}", f"{pw:.4f}", f"{p1 / pw:.2f}", f"{ps / s:.2f}"]
    row(n, *cells)
PYTHON
