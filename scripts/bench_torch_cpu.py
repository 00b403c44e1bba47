#!/usr/bin/env python3
"""Milliseconds per training step of the same pre-LN PatchTST in PyTorch on the CPU, to stand beside `bench --device cpu`.

    python3 scripts/bench_torch_cpu.py [seed28k,etth1] [threads]

Eager PyTorch (Debian's python3-torch is enough), AdamW, dropout on; the median of 5 runs of 5 steps is printed.
"""
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

SHAPES = {
    "seed28k": dict(B=64, C=20, L=24, H=1, P=8, S=4, d=64, h=4, ff=256, layers=2, p=0.0, pad=0),
    "etth1": dict(B=128, C=7, L=336, H=96, P=16, S=8, d=16, h=4, ff=128, layers=3, p=0.3, pad=1),
}


class Layer(nn.Module):
    def __init__(self, s):
        super().__init__()
        d, self.h, self.p = s["d"], s["h"], s["p"]
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.f1, self.f2 = nn.Linear(d, s["ff"]), nn.Linear(s["ff"], d)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, n, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        a = torch.softmax(q @ k.transpose(-1, -2) * (d // self.h) ** -0.5, -1) @ v
        x = x + F.dropout(self.o(a.transpose(1, 2).reshape(b, n, d)), self.p)
        f = F.dropout(F.gelu(self.f1(self.n2(x)), approximate="tanh"), self.p)
        return x + F.dropout(self.f2(f), self.p)


class PatchTST(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.s, self.n = s, (s["L"] - s["P"]) // s["S"] + 1 + s["pad"]
        self.emb, self.pos = nn.Linear(s["P"], s["d"]), nn.Parameter(torch.randn(self.n, s["d"]) * 0.02)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s["layers"]))
        self.head = nn.Linear(self.n * s["d"], s["H"])

    def forward(self, x):
        s, (b, c, l) = self.s, x.shape
        mean, std = x.mean(-1, keepdim=True), (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        z = (x - mean) / std
        if s["pad"]:
            z = F.pad(z, (0, s["S"]), mode="replicate")
        z = F.dropout(self.emb(z.unfold(-1, s["P"], s["S"]).reshape(b * c, self.n, -1)) + self.pos, s["p"])
        for layer in self.layers:
            z = layer(z)
        return self.head(z.reshape(b, c, -1)) * std + mean


def main(names, threads):
    torch.set_num_threads(threads)
    for name in names:
        s = SHAPES[name]
        model = PatchTST(s)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        x, y = torch.randn(s["B"], s["C"], s["L"]), torch.randn(s["B"], s["C"], s["H"])
        ms = []
        for run in range(6):
            begin = time.perf_counter()
            for _ in range(5):
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
            ms.append((time.perf_counter() - begin) / 5 * 1e3)
        ms = sorted(ms[1:])  # the first run warms up
        print(f"torch {torch.__version__} cpu, {threads} threads, {name}: {ms[2]:.1f} ms/step (min {ms[0]:.1f} max {ms[-1]:.1f})", flush=True)


if __name__ == "__main__":
    main(sys.argv[1].split(",") if len(sys.argv) > 1 else list(SHAPES), int(sys.argv[2]) if len(sys.argv) > 2 else 2)
