#!/usr/bin/env python3
"""A model of a training step that GPUs share, and its table for docs/scaling.md.

    python3 scripts/scaling_model.py [GPUS]...     else 2 4 8 64 512

A step of N GPUs that each have b windows takes

    t(N, b) = (fixed + (one - fixed) r(b) / r(B)) (1 + behind) + (1 - beside) exchange(N, bytes of the gradient) + norms hops(N)

one: a single GPU's step with B windows; fixed: what of it does not shrink with the windows; r(b): b, or where a kernel's tiles have 3
sequences each the rounds in which 132 multiprocessors take them. behind: how far the slowest of several GPUs is behind one that computes
alone; beside: the part of the sum that backward hides; norms: exchanges of BatchNorm's statistics, 4 a layer, half of them gatherings
(N - 1 hops) and half sums (twice that). An exchange is NCCL's ring over N GPUs on H hosts, by the faster of two protocols: 2 (N - 1)/N
of the bytes through the slowest link, and 2 (N - 1) hops, of which 2 H cross hosts (where H > 1); or its trees: 2 log2(H) hops across
hosts and 2 (n - 1) within one of n. Gradients are fp32.
"""
import math
import sys

HOST = 8           # GPUs a host
ACROSS = 45e9      # bytes/s a GPU, one adapter of 400 Gbit/s each: 50e9, of which about 0.9; a guess
HOP_ACROSS = 5e-6  # s, a hop between hosts; a guess
# As measured between two H100s: what a sum takes beside its hops and bytes; a hop within a host and bytes/s a GPU, of NCCL's protocols
# for short sums and for long ones.
LAUNCH = 9.2e-6
INSIDE = ((1.0e-6, 168e9), (6.4e-6, 311e9))
MULTIPROCESSORS, TILE = 132, 3

WEATHER = dict(L=336, P=16, S=8, pad=1, out=96, d=128, f=256, layers=3)
# Of H100s (docs/benchmarks.md, Several GPUs). one, fixed: ms; fixed from a step with two batches, or with half of one. behind, beside: what
# two GPUs left to explain.
SHAPES = {
    "etth1": WEATHER | dict(B=128, C=7, d=16, f=128, one=0.1082, fixed=0.1082),
    "weather": WEATHER | dict(B=128, C=21, one=1.9394, fixed=0.1175, tiles=1, behind=0.015),
    "electricity": WEATHER | dict(B=32, C=321, one=7.1943, fixed=0.023, tiles=1, behind=0.015),
    # weather_paper's step times the sequences: not measured itself
    "traffic": WEATHER | dict(B=24, C=862, norms=12, one=3.6997 * 862 * 24 / (21 * 128), fixed=0.298),
    # large-1024's step, whose head is larger
    "pre-training, d_model 1,024": dict(B=32, C=8, L=512, P=8, S=8, pad=0, out=None, d=1024, f=4096, layers=8, one=22.81, fixed=2.31,
                                        behind=0.031, beside=0.19),
}


def parameters(s):
    patches = (s["L"] - s["P"]) // s["S"] + 1 + s["pad"]
    d, f = s["d"], s["f"]
    head = s["P"] * (d + 1) if s["out"] is None else s["out"] * (patches * d + 1)
    return s["P"] * d + d + patches * d + s["layers"] * (4 * d * d + 2 * d * f + 9 * d + f) + head


def hops(n, hop, tree=False):
    """s, of a sum."""
    hosts, inside = math.ceil(n / HOST), min(n, HOST)
    across = 2 * hosts if hosts > 1 else 0
    return 2 * math.ceil(math.log2(hosts)) * HOP_ACROSS + 2 * (inside - 1) * hop if tree else \
        across * HOP_ACROSS + (2 * (n - 1) - across) * hop


def exchange(n, size, tree=False):
    if n == 1:
        return 0.0
    slowest = ACROSS if n > HOST else math.inf
    return LAUNCH + min(hops(n, hop, tree) + 2 * (n - 1) / n * size / min(rate, slowest) for hop, rate in INSIDE)


def step(s, n, windows, tree=False):
    """(computing, exchanging) in s."""
    def rounds(b):
        return math.ceil(b * s["C"] / (TILE * MULTIPROCESSORS)) if s.get("tiles") else b
    compute = 1e-3 * (s["fixed"] + (s["one"] - s["fixed"]) * rounds(windows) / rounds(s["B"]))
    if n > 1:
        compute *= 1 + s.get("behind", 0)
    return compute, (1 - s.get("beside", 0)) * exchange(n, 4 * parameters(s), tree) + \
        s.get("norms", 0) * 0.75 * hops(n, INSIDE[0][0], tree)


def main():
    gpus = [int(word) for word in sys.argv[1:]] or [2, 4, 8, 64, 512]
    if any(n < 1 for n in gpus):
        raise SystemExit("GPUs: at least 1 each")
    print("| shape | gradient, MB | GPUs | exchange, ms (trees) | weak: step, ms | efficiency (trees) | strong: step, ms | speed-up |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, s in SHAPES.items():
        for n in gpus:
            compute, ring = step(s, n, s["B"])
            tree = step(s, n, s["B"], True)[1]
            weak, one = 1e3 * (compute + ring), s["one"]
            strong, gain = "batch too small", ""
            if n <= s["B"]:
                ms = 1e3 * sum(step(s, n, math.ceil(s["B"] / n)))
                strong, gain = f"{ms:.3f}", f"{one / ms:.2f}"
            print(f"| {name} | {4e-6 * parameters(s):.1f} | {n} | {1e3 * ring:.3f} ({1e3 * tree:.3f}) | {weak:.3f} | "
                  f"{one / weak:.2f} ({one / (1e3 * (compute + tree)):.2f}) | {strong} | {gain} |")


main()
