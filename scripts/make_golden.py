#!/usr/bin/env python3
"""Writes tests/fixtures/golden.h5: what PyTorch computes for a small model with dropout 0, to compare the engine with.

    python3 scripts/make_golden.py tests/fixtures/golden.h5

Forecasts and gradients of the first batch, and the losses of 20 AdamW steps, in double, from float32 parameters and data. The layers
are torch.nn's own (LayerNorm, Linear, MultiheadAttention's scaled_dot_product written out), so nothing is shared with the engine but
the equations. Needs torch and h5py.
"""
import sys

import h5py
import numpy
import torch
import torch.nn as nn
import torch.nn.functional as F

SHAPE = dict(channels=3, seq_len=40, pred_len=6, patch_len=8, stride=4, pad_end=1, d_model=16, n_heads=4, d_ff=24, n_layers=2)
BATCH, BATCHES, STEPS = 4, 3, 20
ADAMW = dict(lr=2e-3, betas=(0.9, 0.999), eps=1e-8)
WEIGHT_DECAY = 0.05


class Layer(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.h = h
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.one, self.two = nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, u):
        s, n, d = u.shape
        q, k, v = (t.view(s, n, self.h, d // self.h).transpose(1, 2) for t in self.qkv(self.ln1(u)).chunk(3, -1))
        a = torch.softmax(q @ k.transpose(-1, -2) / (d // self.h) ** 0.5, -1)
        r = u + self.o((a @ v).transpose(1, 2).reshape(s, n, d))
        return r + self.two(F.gelu(self.one(self.ln2(r)), approximate="tanh"))


class PatchTST(nn.Module):
    def __init__(self):
        super().__init__()
        s = SHAPE
        self.patches = (s["seq_len"] - s["patch_len"]) // s["stride"] + 1 + s["pad_end"]
        self.embed = nn.Linear(s["patch_len"], s["d_model"])
        self.position = nn.Parameter(torch.empty(self.patches, s["d_model"]).uniform_(-0.02, 0.02))
        self.layers = nn.ModuleList(Layer(s["d_model"], s["n_heads"], s["d_ff"]) for _ in range(s["n_layers"]))
        self.head = nn.Linear(self.patches * s["d_model"], s["pred_len"])

    def forward(self, x):
        b, c, _ = x.shape
        mean, std = x.mean(-1, keepdim=True), (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        z = F.pad(((x - mean) / std), (0, SHAPE["stride"]), mode="replicate")
        z = z.unfold(-1, SHAPE["patch_len"], SHAPE["stride"]).reshape(b * c, self.patches, -1)
        z = self.embed(z) + self.position
        for layer in self.layers:
            z = layer(z)
        return self.head(z.reshape(b, c, -1)) * std + mean

    def named(self):
        """(name in the engine, tensor, transposed?)"""
        yield "w_p", self.embed.weight, True
        yield "b_p", self.embed.bias, False
        yield "w_pos", self.position, False
        for i, l in enumerate(self.layers):
            for name, linear in (("qkv", l.qkv), ("o", l.o), ("1", l.one), ("2", l.two)):
                yield f"layers.{i}.w_{name}", linear.weight, True
                yield f"layers.{i}.b_{name}", linear.bias, False
            for name, norm in (("ln1", l.ln1), ("ln2", l.ln2)):
                yield f"layers.{i}.{name}_gamma", norm.weight, False
                yield f"layers.{i}.{name}_beta", norm.bias, False
        yield "w_h", self.head.weight, True
        yield "b_h", self.head.bias, False


def main(path):
    torch.manual_seed(20)
    model = PatchTST()
    with torch.no_grad():
        for _, tensor, _ in model.named():
            tensor.add_(0.05 * torch.randn_like(tensor))
    x = torch.randn(BATCH * BATCHES, SHAPE["channels"], SHAPE["seq_len"]).cumsum(-1) * 0.3
    y = torch.randn(BATCH * BATCHES, SHAPE["channels"], SHAPE["pred_len"])
    model, x, y = model.double(), x.double(), y.double()  # the same float32 numbers, computed in double

    def batch(i):
        at = (i % BATCHES) * BATCH
        return x[at:at + BATCH], y[at:at + BATCH]

    def numbers(tensor, transposed):
        t = tensor.detach()
        return (t.T if transposed else t).contiguous().numpy().astype(numpy.float32)

    with h5py.File(path, "w") as f:
        f.attrs.update(SHAPE)
        f.attrs.update(dict(batch=BATCH, batches=BATCHES, steps=STEPS, lr=ADAMW["lr"], weight_decay=WEIGHT_DECAY))
        f["inputs"], f["targets"] = x.numpy().astype(numpy.float32), y.numpy().astype(numpy.float32)
        forecast = model(batch(0)[0])
        f["forecasts"] = forecast.detach().numpy().astype(numpy.float32)
        F.mse_loss(forecast, batch(0)[1]).backward()
        for name, tensor, transposed in model.named():
            f[f"parameters/{name}"] = numbers(tensor, transposed)
            f[f"gradients/{name}"] = numbers(tensor.grad, transposed)
        decayed = [t for name, t, _ in model.named() if name.split(".")[-1].startswith("w_") and name != "w_pos"]
        rest = [t for name, t, _ in model.named() if not any(t is d for d in decayed)]
        optimizer = torch.optim.AdamW([dict(params=decayed, weight_decay=WEIGHT_DECAY), dict(params=rest, weight_decay=0)], **ADAMW)
        losses = []
        for i in range(STEPS):
            optimizer.zero_grad()
            loss = F.mse_loss(model(batch(i)[0]), batch(i)[1])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        f["losses"] = numpy.array(losses)


if __name__ == "__main__":
    main(sys.argv[1])
