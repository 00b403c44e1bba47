#!/usr/bin/env python3
"""The table of scripts/bench_peers.sh.

    python3 scripts/peers/table.py RESULTS                      the table of a file of its lines
    python3 scripts/peers/table.py ours SHAPE PRECISION FILE    the line that `bench --json`, written into FILE, makes

A line is "WHO SHAPE PRECISION WAY.. X ms/step (min Y max Z)", or "WHO SHAPE PRECISION no figure: WHY".
"""
import json
import pathlib
import sys

from shapes import report

# Those of the peers that stand beside one of ours: bf16 beside all, the others beside what is no less exact than tf32.
RIVALS = {"bf16": ("bf16", "tf32", "fp32")}


def read(path):
    """{(who, shape, precision): (ms, way) or, without a figure, why}, in the lines' order."""
    found = {}
    for line in path.read_text().splitlines():
        before, timed, _ = line.partition(" ms/step")
        words = before.split()
        if line.startswith("#") or len(words) < 4:
            continue
        who, shape, precision, *rest = words
        if timed:
            found[who, shape, precision] = float(rest[-1]), " ".join(rest[:-1])
        else:
            found[who, shape, precision] = line.partition("no figure: ")[2]
    return found


def of_peer(found, who, shape, precision):
    """Its fastest of the precisions that stand beside ours: (ms, "ms precision"); or what it says instead."""
    rivals = [(p, found[who, shape, p]) for p in RIVALS.get(precision, ("tf32", "fp32")) if (who, shape, p) in found]
    timed = [(value[0], f"{value[0]:.4f} {p}") for p, value in rivals if isinstance(value, tuple)]
    return min(timed) if timed else (float("inf"), rivals[0][1][:24] if rivals else "-")


def main(path):
    found = read(path)
    print(f"{'shape':17} {'ours':12} {'ms/step':>9}   {'JAX':>24} {'PyTorch':>24} {'ratio':>6}")
    for (who, shape, precision), value in found.items():
        if who != "ours":
            continue
        jax, torch = (of_peer(found, peer, shape, precision) for peer in ("jax", "torch"))
        if isinstance(value, tuple):
            ms, way = value
            best = min(jax[0], torch[0])
            ratio = f"{best / ms:.2f}" if best < float("inf") else "-"
            ours = f"{precision + ' ' + way:12} {ms:9.4f}"
        else:
            ratio, ours = "-", f"{precision:12} {'-':>9}"
        print(f"{shape:17} {ours}   {jax[1]:>24} {torch[1]:>24} {ratio:>6}{'' if isinstance(value, tuple) else '  ours: ' + value}")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(pathlib.Path(sys.argv[1]))
    elif len(sys.argv) == 5 and sys.argv[1] == "ours":
        result = json.loads(pathlib.Path(sys.argv[4]).read_text())
        report("ours", sys.argv[2], sys.argv[3], result["level"], [result["ms_per_step"][key] for key in ("min", "median", "max")])
    else:
        raise SystemExit(__doc__)
