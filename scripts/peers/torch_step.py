#!/usr/bin/env python3
"""Milliseconds per training step (forward, backward, AdamW) of the same PatchTST in PyTorch, to stand beside `bench`.

    python3 scripts/peers/torch_step.py [--device cuda|cpu] [--threads N] [--once] SHAPES [PRECISIONS]

SHAPES and PRECISIONS are separated by commas; precisions are bf16 (autocast) and tf32, on the CPU fp32 alone. On a GPU the step is compiled
and captured whole as one CUDA graph, and timed in 5 loops of 20 steps on data already there; on the CPU it is eager, in 5 loops of 5 steps.
--once prints parameters, and the loss before the first step, instead.
"""
import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

from shapes import SHAPES, chosen, report, wait_for_turn


class Layer(nn.Module):
    def __init__(self, s):
        super().__init__()
        d, self.s = s["d"], s
        norm = nn.BatchNorm1d if s["paper"] else nn.LayerNorm
        self.n1, self.n2 = norm(d), norm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.f1, self.f2 = nn.Linear(d, s["f"]), nn.Linear(s["f"], d)

    def attention(self, x, before):
        b, n, d = x.shape
        h = self.s["h"]
        q, k, v = self.qkv(x).view(b, n, 3, h, d // h).permute(2, 0, 3, 1, 4)
        scores = None
        if self.s["paper"] or not hasattr(F, "scaled_dot_product_attention"):
            scores = q @ k.transpose(-1, -2) * (d // h) ** -0.5
            scores = scores if before is None else scores + before
            a = torch.softmax(scores, -1).to(v.dtype) @ v
        else:
            a = F.scaled_dot_product_attention(q, k, v)
        return F.dropout(self.o(a.transpose(1, 2).reshape(b, n, d)), self.s["p_attention"]), scores

    def feed_forward(self, x):
        hidden = F.gelu(self.f1(x), approximate="none" if self.s["paper"] else "tanh")
        return F.dropout(self.f2(F.dropout(hidden, self.s["p"])), self.s["p"])

    def forward(self, x, scores):
        """And the scores for the layer above, of the paper's layer."""
        if not self.s["paper"]:
            x = x + self.attention(self.n1(x), None)[0]
            return x + self.feed_forward(self.n2(x)), None
        a, scores = self.attention(x, scores)
        x = self.n1((x + a).flatten(0, 1)).view_as(x)
        return self.n2((x + self.feed_forward(x)).flatten(0, 1)).view_as(x), scores


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
        scores = None
        for layer in self.layers:
            z, scores = layer(z, scores)
        return self.head(z.reshape(b, c, -1)) * std + mean


def batches(s, device):
    return [(torch.randn(s["B"], s["C"], s["L"], device=device), torch.randn(s["B"], s["C"], s["H"], device=device)) for _ in range(4)]


def print_once(name, s):
    model = PatchTST(s)
    x, y = batches(s, "cpu")[0]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{name}: {parameters} parameters, loss {F.mse_loss(model(x), y).item():.4f}", flush=True)


def cpu(name, s):
    model = PatchTST(s)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x, y = batches(s, "cpu")[0]
    ms = []
    for i in range(6):
        if i == 1:
            wait_for_turn()
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


def gpu(name, s, precision):
    torch._dynamo.reset()
    torch.backends.cuda.matmul.allow_tf32 = True
    model = PatchTST(s).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    data = batches(s, "cuda")

    @torch.compile
    def loss(x, y):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bf16"):
            forecast = model(x)
        return F.mse_loss(forecast.float(), y)

    def train():
        loss(x, y).backward()
        optimizer.step()
        for parameter in model.parameters():  # gradients keep their place in the graph
            parameter.grad.zero_()

    x, y = (t.clone() for t in data[0])
    graph = whole_graph(train)
    wait_for_turn()
    ms = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for i in range(20):
            x.copy_(data[i % 4][0])
            y.copy_(data[i % 4][1])
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        ms.append(begin.elapsed_time(end) / 20)
    report("torch", name, precision, "whole graph", ms[2:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", type=chosen)
    parser.add_argument("precisions", nargs="?", type=lambda text: text.split(","))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--once", action="store_true")
    arguments = parser.parse_args()
    on_cpu = arguments.device == "cpu"
    known = ["fp32"] if on_cpu else ["bf16", "tf32"]
    if not on_cpu and not torch.cuda.is_available():
        raise SystemExit("torch_step: no CUDA device: use --device cpu")
    torch.set_num_threads(arguments.threads)
    for shape in arguments.shapes:
        if arguments.once:
            print_once(shape, SHAPES[shape])
            continue
        for precision in arguments.precisions or known:
            if precision not in known:
                parser.error(f"{precision}: on {arguments.device} not one of {', '.join(known)}")
            if on_cpu:
                cpu(shape, SHAPES[shape])
            else:
                gpu(shape, SHAPES[shape], precision)
