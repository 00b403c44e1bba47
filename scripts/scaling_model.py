#!/usr/bin/env python3
"""A model of a training step that GPUs share, and its table for docs/scaling.md.

    python3 scripts/scaling_model.py [GPUS]...     else 2 8 64 512

A step of N GPUs that each have b windows takes

    t(N, b) = fixed + (one - fixed) b / B + update + exchange(N, bytes of the gradient) + norms x exchange(N, 2 d floats)

one: a single GPU's step with B windows (docs/benchmarks.md); fixed: what of it does not shrink with the windows, the kernels' chain;
update: AdamW's pass where one GPU has it inside backward; norms: exchanges of BatchNorm's statistics, 4 a layer. An exchange is NCCL's
ring over N GPUs on H hosts: 2 (N - 1)/N of the bytes through the slowest link, and 2 (N - 1) hops, of which 2 H cross hosts
(where H > 1); or its trees: 2 log2(H) hops across hosts and 2 (n - 1) within one of n. Gradients are fp32, and nothing overlaps.
"""
import math
import sys

HOST = 8            # GPUs a host
INSIDE = 360e9      # bytes/s a GPU, NVLink of an H100 or H200: 450e9, of which NCCL reaches about 0.8
ACROSS = 45e9       # bytes/s a GPU, one adapter of 400 Gbit/s each: 50e9, of which about 0.9
HOP_INSIDE = 1.5e-6   # s, NCCL's protocol for short messages, a hop within a host
HOP_ACROSS = 5e-6     # s, a hop between hosts
LAUNCH = 8e-6         # s, an exchange's kernel and its start
MEMORY = 4.2e12       # bytes/s, an H200 as measured
UPDATE_BYTES = 40     # AdamW, a parameter: gradient, m, v and parameter, read and written

# one, fixed: ms. fixed is weather's step with one window (in tf32); of the last two it is a guess. fused: AdamW happens inside backward.
SHAPES = {
    "weather": dict(B=128, C=21, L=336, P=16, S=8, pad=1, out=96, d=128, f=256, layers=3, one=1.695, fixed=0.305, fused=1,
                    source="1.695 ms at batch 128, bf16, level layer"),
    "electricity": dict(B=32, C=321, L=336, P=16, S=8, pad=1, out=96, d=128, f=256, layers=3, one=6.197, fixed=0.305, fused=1,
                        source="6.197 ms at batch 32, bf16, level layer"),
    "traffic": dict(B=24, C=862, L=336, P=16, S=8, pad=1, out=96, d=128, f=256, layers=3, norms=12,
                    one=12.86 * 862 * 24 / (321 * 32), fixed=0.6,
                    source="electricity_paper's 12.86 ms, bf16, times the sequences: 25.9 ms at batch 24; BatchNorm over all ranks"),
    "pre-training, d_model 1,024": dict(B=32, C=8, L=512, P=8, S=8, pad=0, out=None, d=1024, f=4096, layers=8, one=24.6, fixed=1.0,
                                        source="large-1024's 24.6 ms at batch 32, bf16, level gemm, whose head is larger"),
}


def parameters(s):
    patches = (s["L"] - s["P"]) // s["S"] + 1 + s["pad"]
    d, f = s["d"], s["f"]
    head = s["P"] * (d + 1) if s["out"] is None else s["out"] * (patches * d + 1)
    return s["P"] * d + d + patches * d + s["layers"] * (4 * d * d + 2 * d * f + 9 * d + f) + head


def exchange(n, size, tree=False):
    hosts, inside = math.ceil(n / HOST), min(n, HOST)
    if n == 1:
        return 0.0
    across = 2 * hosts if hosts > 1 else 0
    latency = 2 * math.ceil(math.log2(hosts)) * HOP_ACROSS + 2 * (inside - 1) * HOP_INSIDE if tree else \
        across * HOP_ACROSS + (2 * (n - 1) - across) * HOP_INSIDE
    return LAUNCH + latency + 2 * (n - 1) / n * size / (ACROSS if hosts > 1 else INSIDE)


def step(s, n, windows, tree=False):
    """(computing, exchanging) in s."""
    count = parameters(s)
    compute = 1e-3 * (s["fixed"] + (s["one"] - s["fixed"]) * windows / s["B"])
    if n > 1 and s.get("fused"):
        compute += LAUNCH + count * UPDATE_BYTES / MEMORY
    return compute, exchange(n, 4 * count, tree) + s.get("norms", 0) * exchange(n, 8 * s["d"], tree)


def main():
    gpus = [int(word) for word in sys.argv[1:]] or [2, 8, 64, 512]
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
