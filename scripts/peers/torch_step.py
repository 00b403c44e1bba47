#!/usr/bin/env python3
"""Milliseconds per training step (forward, backward, AdamW) of the same PatchTST in PyTorch, to stand beside `bench`.

    python3 scripts/peers/torch_step.py [option]... SHAPES [PRECISIONS]
    torchrun --nproc-per-node N scripts/peers/torch_step.py [option]... SHAPES [PRECISIONS]

    --device cuda|cpu, --threads N, --batch N, --no-graph, --once, --check

SHAPES and PRECISIONS are separated by commas; precisions are bf16 (autocast) and tf32, on the CPU fp32 alone. On a GPU the step is
compiled and captured whole as one CUDA graph, and timed in 5 loops of 20 steps on data already there; on the CPU it is eager, in 5
loops of 5 steps. --batch is in place of the shape's windows a step; --no-graph compiles, and captures nothing. --once prints
parameters, and the loss before the first step, instead.

Under torchrun N ranks share the batch, which must be a multiple of N, by DistributedDataParallel: NCCL between GPUs, one a rank, and
gloo on the CPU. BatchNorm is over all ranks' rows, which PyTorch has on GPUs alone. Rank 0 prints.
--check trains 5 steps without dropout on one batch that a seed draws, and prints the loss before each: those of N ranks are one
process's (torch 2.15, CPU, etth1, batch 128, 2 ranks of gloo, 2026-11-24: to 2e-7). On GPUs ranks were timed, not checked.
"""
import argparse
import os
import time

import torch
import torch.distributed as distributed
import torch.nn as nn
import torch.nn.functional as F

from shapes import SHAPES, chosen, report, wait_for_turn

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun's


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


def shared(model):
    """The model with its gradients summed over the ranks, where there are several."""
    if RANKS == 1:
        return model
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def timed(name, precision, way, ms):
    if RANK == 0:
        report("torch", name, precision, f"ddp {RANKS}, {way}" if RANKS > 1 else way, ms)


def batches(s, device):
    return [(torch.randn(s["B"], s["C"], s["L"], device=device), torch.randn(s["B"], s["C"], s["H"], device=device)) for _ in range(4)]


def print_once(name, s):
    model = PatchTST(s)
    x, y = batches(s, "cpu")[0]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{name}: {parameters} parameters, loss {F.mse_loss(model(x), y).item():.4f}", flush=True)


def check(name, s, device):
    """The losses of a few steps: of the whole batch, of which each rank has its share."""
    torch.manual_seed(1)
    model = PatchTST(s | {"p": 0.0, "p_attention": 0.0}).to(device)
    x, y = (t.chunk(RANKS)[RANK] for t in batches(s | {"B": s["B"] * RANKS}, device)[0])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    model, losses = shared(model), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(5):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if RANKS > 1:
            distributed.all_reduce(mean)
        losses.append(mean.item() / RANKS)
    if RANK == 0:
        print(f"{name}: {parameters} parameters, losses {' '.join(f'{loss:.8f}' for loss in losses)}", flush=True)


def cpu(name, s):
    model = shared(PatchTST(s))
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
    timed(name, "fp32", f"{'eager, ' if RANKS == 1 else ''}{torch.get_num_threads()} thr", ms[1:])  # the first loop warms up


def whole_graph(body):
    """body captured as one CUDA graph, after rounds that warm up, eleven of DistributedDataParallel's."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(5 if RANKS == 1 else 11):
            body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def gpu(name, s, precision, captured):
    torch._dynamo.reset()
    torch.backends.cuda.matmul.allow_tf32 = True
    model = PatchTST(s).cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # so that what it does can be captured
        model = shared(model)
    torch.cuda.synchronize()
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
    step = whole_graph(train).replay if captured else train
    wait_for_turn()
    ms = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for i in range(20):
            x.copy_(data[i % 4][0])
            y.copy_(data[i % 4][1])
            step()
        end.record()
        torch.cuda.synchronize()
        ms.append(begin.elapsed_time(end) / 20)
    timed(name, precision, "whole graph" if captured else "compiled", ms[2:])


def sizes(name, batch):
    """The shape with a rank's windows; why it cannot be, in one line."""
    s = SHAPES[name] | ({"B": batch} if batch else {})
    if s["B"] % RANKS:
        raise SystemExit(f"torch_step: {name}: {s['B']} windows are no multiple of {RANKS} ranks: give --batch")
    if s["paper"] and RANKS > 1 and arguments.device == "cpu":
        raise SystemExit(f"torch_step: {name}: PyTorch has no BatchNorm over several ranks on the CPU")
    return s | {"B": s["B"] // RANKS}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", type=chosen)
    parser.add_argument("precisions", nargs="?", type=lambda text: text.split(","))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--no-graph", action="store_true")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    on_cpu = arguments.device == "cpu"
    known = ["fp32"] if on_cpu else ["bf16", "tf32"]
    if not on_cpu and not torch.cuda.is_available():
        raise SystemExit("torch_step: no CUDA device: use --device cpu")
    torch.set_num_threads(arguments.threads)
    if RANKS > 1:
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # or its watcher disturbs the capture
        if not on_cpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("gloo" if on_cpu else "nccl")
    for shape in arguments.shapes:
        s = sizes(shape, arguments.batch)
        if arguments.check:
            check(shape, s, arguments.device)
            continue
        if arguments.once:
            if RANK == 0:
                print_once(shape, s)
            continue
        for precision in arguments.precisions or known:
            if precision not in known:
                parser.error(f"{precision}: on {arguments.device} not one of {', '.join(known)}")
            if on_cpu:
                cpu(shape, s)
            else:
                gpu(shape, s, precision, not arguments.no_graph)
    if RANKS > 1:
        distributed.destroy_process_group()
