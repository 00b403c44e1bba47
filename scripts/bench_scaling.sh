#!/usr/bin/env bash
# How a training step grows with the ranks that share it: a table, of one process, of ranks that share its batch (strong) and of ranks
# that each have as large a one (weak). bench times each in turns, and the least of the turns counts.
# usage: scripts/bench_scaling.sh cpu|cuda CONFIG [option]... [-- option of bench]...
#   --ranks N,N...      else 2
#   --batch N           one process's train.batch_size; else the config's
#   --threads N         on the CPU: a rank's runtime.threads; else 1. One process of as many threads as all ranks have is timed too
#   --turns N           else 3
#   --steps N           else 200
#   --mpirun COMMAND    what starts ranks; else: mpirun --oversubscribe --bind-to none
#   --results FILE      where the JSON of all measurements is kept, an object a line; else runs/scaling.jsonl
# PS_PROGRAMS: the folder of the programs, build/auto if unset.
set -euo pipefail
shopt -s inherit_errexit

fail() {
    echo "bench_scaling: $1" >&2
    exit 2
}
words=() more=() ranks=2 batch='' threads=1 turns=3 steps=200 mpirun='mpirun --oversubscribe --bind-to none' results=''
while [ $# -gt 0 ]; do
    case $1 in
        --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit ;;
        --) shift; more=("$@"); break ;;
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

[ -n "$batch" ] || { measure one 1 '' "$threads"; batch=$(python3 -c 'import json, sys
print(json.loads(open(sys.argv[1]).readline())["batch"])' "$results"); }
for ((turn = 0; turn < turns; turn++)); do
    measure one 1 "$batch" "$threads"
    for n in ${ranks//,/ }; do
        measure strong "$n" "$batch" "$threads"
        measure weak "$n" $((batch * n)) "$threads"
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
print("| " + " | ".join(head + (["one process of as many threads, ms", "ranks against it"] if cpu else [])) + " |")
print("|" + "---:|" * (len(head) + 2 * cpu))
t1 = one["ms_per_step"]["min"]
print(f"| 1 | {t1:.4f} | 1.00 | 1.00 | {t1:.4f} | 1.00 | | |" + (" | |" if cpu else ""))
for n in sorted({r["n"] for r in runs if r["n"] > 1}):
    strong, weak = (least(what, "n", n) for what in ("strong", "weak"))
    s, w, e = strong["ms_per_step"]["min"], weak["ms_per_step"]["min"], strong["ranks"]["exchange_ms"]
    line = f"| {n} | {s:.4f} | {t1 / s:.2f} | {t1 / s / n:.2f} | {w:.4f} | {t1 / w:.2f} | {e:.4f} | {100 * e / s:.1f} % |"
    if cpu:
        t = least("threads", "threads", each * n)["ms_per_step"]["min"]
        line += f" {t:.4f} | {t / s:.2f} |"
    print(line)
PYTHON
