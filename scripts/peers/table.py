#!/usr/bin/env python3
"""The table of scripts/bench_peers.sh: ours from NAME.json (`bench --compare --json`), the peers' lines from peers.txt.

    python3 scripts/peers/table.py FOLDER [shape,shape,...]

Without shapes: those that have a NAME.json. One that is missing, empty or damaged is named, and the rest is shown.
"""
import json
import pathlib
import sys


def ours(path):
    """The fastest level of each precision: {precision: (ms, level)}."""
    best = {}
    for row in json.loads(path.read_text())["levels"]:
        if "median" in row and row["median"] < best.get(row["precision"], (float("inf"),))[0]:
            best[row["precision"]] = row["median"], row["level"]
    return best


def theirs(path):
    """{shape: [(ms, "peer precision way")]}."""
    found = {}
    for line in path.read_text().splitlines():
        before, _, after = line.partition(" ms/step")
        words = before.split()
        if after and len(words) >= 5:
            found.setdefault(words[1], []).append((float(words[-1]), " ".join([words[0], *words[2:-1]])))
    return found


def main(folder, shapes):
    lines = folder / "peers.txt"
    peers = theirs(lines) if lines.exists() else {}
    print(f"{'shape':12} {'ours':12} {'ms/step':>9}   {'best peer':34} {'ms/step':>9} {'ratio':>6}")
    for path in [folder / f"{shape}.json" for shape in shapes] or sorted(folder.glob("*.json")):
        try:
            found = ours(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = "missing" if not path.exists() else "empty" if path.stat().st_size == 0 else f"damaged: {error}"
            print(f"{path.stem:12} no figures of ours: {path.name} is {what}")
            continue
        for precision, (ms, level) in found.items():
            # bf16 stands beside any precision of theirs; fp32 and tf32 beside what is no less exact than their tf32.
            rivals = [p for p in peers.get(path.stem, []) if precision == "bf16" or " bf16 " not in f" {p[1]} "]
            peer_ms, peer = min(rivals, default=(float("nan"), "none was timed"))
            print(f"{path.stem:12} {precision + ' ' + level:12} {ms:9.4f}   {peer:34} {peer_ms:9.4f} {peer_ms / ms:6.2f}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2].split(",") if len(sys.argv) > 2 else [])
