#!/usr/bin/env python3
"""Milliseconds per training step (forward, backward, AdamW) of the same pre-LN PatchTST in PyTorch, to stand beside `bench`.

    python3 scripts/peers/torch_step.py [--device cuda|cpu] [--threads N] [shape,shape,...]

On a GPU: the step compiled and captured whole as one CUDA graph, and torch.compile's own "reduce-overhead", in tf32 and under bf16
autocast, the median of 5 loops of 20 steps on data already there. On the CPU: eager in fp32, the median of 5 loops of 5 steps.
"""
import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

from shapes import SHAPES, chosen, report


class Layer(nn.Module):
    def __init__(self, s):
        super().__init__()
        d, self.h, self.p = s["d"], s["h"], s["p"]
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.f1, self.f2 = nn.Linear(d, s["f"]), nn.Linear(s["f"], d)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, n, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        if hasattr(F, "scaled_dot_product_attention"):
            a = F.scaled_dot_product_attention(q, k, v)
        else:
            a = torch.softmax(q @ k.transpose(-1, -2) * (d // self.h) ** -0.5, -1) @ v
        x = x + F.dropout(self.o(a.transpose(1, 2).reshape(b, n, d)), self.p)
        f = F.dropout(F.gelu(self.f1(self.n2(x)), approximate="tanh"), self.p)
        return x + F.dropout(self.f2(f), self.p)


class PatchTST(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.s = s
        self.emb, self.pos = nn.Linear(s["P"], s["d"]), nn.Parameter(torch.randn(s["N"], s["d"]) * 0.02)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s["layers"]))
        self.head = nn.Linear(s["N"] * s["d"], s["H"])

    def forward(self, x):
        s, (b, c, _) = self.s, x.shape
        mean, std = x.mean(-1, keepdim=True), (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        z = (x - mean) / std
        if s["pad"]:
            z = F.pad(z, (0, s["S"]), mode="replicate")
        z = F.dropout(self.emb(z.unfold(-1, s["P"], s["S"]).reshape(b * c, s["N"], -1)) + self.pos, s["p"])
        for layer in self.layers:
            z = layer(z)
        return self.head(z.reshape(b, c, -1)) * std + mean


def batches(s, device):
    return [(torch.randn(s["B"], s["C"], s["L"], device=device), torch.randn(s["B"], s["C"], s["H"], device=device)) for _ in range(4)]


def cpu(name, s):
    model = PatchTST(s)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x, y = batches(s, "cpu")[0]
    ms = []
    for _ in range(6):
        begin = time.perf_counter()
        for _ in range(5):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        ms.append((time.perf_counter() - begin) / 5 * 1e3)
    report("torch", name, "fp32", f"eager, {torch.get_num_threads()} thr", ms[1:])  # the first loop warms up


def whole_graph(body):
    """body captured as one CUDA graph, after five rounds that warm up."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(5):
            body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def gpu(name, s, whole, bf16):
    torch._dynamo.reset()
    torch.backends.cuda.matmul.allow_tf32 = True
    model = PatchTST(s).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    data = batches(s, "cuda")

    def loss(x, y):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
            forecast = model(x)
        return F.mse_loss(forecast.float(), y)

    compiled = torch.compile(loss) if whole else torch.compile(loss, mode="reduce-overhead")

    def train(x, y):
        compiled(x, y).backward()
        optimizer.step()
        if whole:  # gradients keep their place in the graph
            for parameter in model.parameters():
                parameter.grad.zero_()
        else:
            optimizer.zero_grad()

    step = train
    if whole:
        x, y = (t.clone() for t in data[0])
        graph = whole_graph(lambda: train(x, y))

        def step(new_x, new_y):
            x.copy_(new_x)
            y.copy_(new_y)
            graph.replay()

    ms = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for i in range(20):
            step(*data[i % 4])
        end.record()
        torch.cuda.synchronize()
        ms.append(begin.elapsed_time(end) / 20)
    report("torch", name, "bf16" if bf16 else "tf32", "whole graph" if whole else "reduce-overhead", ms[2:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="?")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch_step: no CUDA device: use --device cpu")
    torch.set_num_threads(arguments.threads)
    for name in chosen(arguments.shapes):
        if arguments.device == "cpu":
            cpu(name, SHAPES[name])
        else:
            for whole, bf16 in ((True, False), (True, True), (False, True)):
                gpu(name, SHAPES[name], whole, bf16)
