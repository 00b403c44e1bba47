#!/usr/bin/env python3
"""Writes a fixture of test_golden: what PyTorch computes for a small model with dropout 0, to compare the engine with.

    python3 scripts/make_golden.py plain tests/fixtures/golden.h5
    python3 scripts/make_golden.py paper tests/fixtures/golden_paper.h5
    python3 scripts/make_golden.py masked tests/fixtures/golden_masked.h5

plain: LayerNorm before each branch. paper: the layer of Nie et al.'s own code, with BatchNorm behind each branch and residual
attention (He et al. 2021), and gelu by erf. Forecasts and gradients of the first batch, and the losses of 20 AdamW steps, in double,
from float32 parameters and data; of paper also the parameters and BatchNorm's running statistics after the steps, and forecasts of
evaluation with them. masked: plain's layers before a head that reconstructs masked patches; the masks are drawn by a Philox4x32-10
written here, from Salmon et al. 2011. The layers are torch.nn's own (LayerNorm, BatchNorm1d, Linear, scaled dot products written out), so nothing is
shared with the engine but the equations. Needs torch and h5py.
"""
import sys

import h5py
import numpy
import torch
import torch.nn as nn
import torch.nn.functional as F

SHAPE = dict(channels=3, seq_len=40, pred_len=6, patch_len=8, stride=4, pad_end=1, d_model=16, n_heads=4, d_ff=24, n_layers=2)
BATCH, BATCHES, STEPS = 4, 3, 20
MASKED = dict(SHAPE, stride=SHAPE["patch_len"], pad_end=0)
SEED, MASK_SITE, MASK_RATIO = 5, 0x70000000, 0.4


def attention(q, k, v, heads, below):
    """softmax(q k' / sqrt(e) + below) v of each head, and the scores; q, k, v [S, N, d]."""
    s, n, d = q.shape
    q, k, v = (t.view(s, n, heads, d // heads).transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(-1, -2) / (d // heads) ** 0.5 + below
    return (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(s, n, d), scores


class Layer(nn.Module):
    norms = "ln"

    def __init__(self, d, h, f):
        super().__init__()
        self.h = h
        self.norm1, self.norm2 = self.norm(d), self.norm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.one, self.two = nn.Linear(d, f), nn.Linear(f, d)

    def norm(self, d):
        return nn.LayerNorm(d)

    def forward(self, u, below):
        a, _ = attention(*self.qkv(self.norm1(u)).chunk(3, -1), self.h, 0)
        r = u + self.o(a)
        return r + self.two(F.gelu(self.one(self.norm2(r)), approximate="tanh")), below


class PaperLayer(Layer):
    norms = "bn"

    def norm(self, d):
        return nn.BatchNorm1d(d)

    def forward(self, u, below):
        a, scores = attention(*self.qkv(u).chunk(3, -1), self.h, below)
        r = self.norm1((u + self.o(a)).transpose(1, 2)).transpose(1, 2)
        y = r + self.two(F.gelu(self.one(r)))
        return self.norm2(y.transpose(1, 2)).transpose(1, 2), scores


class PatchTST(nn.Module):
    head_name = "h"

    def __init__(self, layer, shape):
        super().__init__()
        self.shape = s = shape
        self.patches = (s["seq_len"] - s["patch_len"]) // s["stride"] + 1 + s["pad_end"]
        self.embed = nn.Linear(s["patch_len"], s["d_model"])
        self.position = nn.Parameter(torch.empty(self.patches, s["d_model"]).uniform_(-0.02, 0.02))
        self.layers = nn.ModuleList(layer(s["d_model"], s["n_heads"], s["d_ff"]) for _ in range(s["n_layers"]))
        self.head = self.make_head()

    def make_head(self):
        return nn.Linear(self.patches * self.shape["d_model"], self.shape["pred_len"])

    def normalised(self, x):
        """Patches [B C, N, P], mean and std."""
        s, (b, c, _) = self.shape, x.shape
        mean, std = x.mean(-1, keepdim=True), (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        z = F.pad(((x - mean) / std), (0, s["stride"] if s["pad_end"] else 0), mode="replicate")
        return z.unfold(-1, s["patch_len"], s["stride"]).reshape(b * c, self.patches, -1), mean, std

    def encode(self, z):
        z, scores = self.embed(z) + self.position, 0
        for layer in self.layers:
            z, scores = layer(z, scores)
        return z

    def forward(self, x):
        b, c, _ = x.shape
        z, mean, std = self.normalised(x)
        return self.head(self.encode(z).reshape(b, c, -1)) * std + mean

    def loss(self, i, x, y):
        return F.mse_loss(self(x), y)

    def first(self, x):
        """What training's first forward pass gives."""
        return self(x)

    def named(self):
        """(name in the engine, tensor, transposed?)"""
        yield "w_p", self.embed.weight, True
        yield "b_p", self.embed.bias, False
        yield "w_pos", self.position, False
        for i, l in enumerate(self.layers):
            for name, linear in (("qkv", l.qkv), ("o", l.o), ("1", l.one), ("2", l.two)):
                yield f"layers.{i}.w_{name}", linear.weight, True
                yield f"layers.{i}.b_{name}", linear.bias, False
            for j, norm in ((1, l.norm1), (2, l.norm2)):
                yield f"layers.{i}.{l.norms}{j}_gamma", norm.weight, False
                yield f"layers.{i}.{l.norms}{j}_beta", norm.bias, False
        yield f"w_{self.head_name}", self.head.weight, True
        yield f"b_{self.head_name}", self.head.bias, False

    def running(self):
        """(name in the engine, BatchNorm's running statistic)"""
        for i, l in enumerate(self.layers):
            for j, norm in ((1, l.norm1), (2, l.norm2)):
                if l.norms == "bn":
                    yield f"layers.{i}.bn{j}_mean", norm.running_mean
                    yield f"layers.{i}.bn{j}_var", norm.running_var


def philox(counter, key):
    """The four words of each counter [n, 4] after the ten rounds of Philox4x32."""
    c = [counter[:, i].astype(numpy.uint64) for i in range(4)]
    k = [numpy.uint64(key & 0xffffffff), numpy.uint64(key >> 32)]
    low, shift = numpy.uint64(0xffffffff), numpy.uint64(32)
    for _ in range(10):
        a, b = numpy.uint64(0xD2511F53) * c[0], numpy.uint64(0xCD9E8D57) * c[2]
        c = [(b >> shift) ^ c[1] ^ k[0], b & low, (a >> shift) ^ c[3] ^ k[1], a & low]
        k = [(k[0] + numpy.uint64(0x9E3779B9)) & low, (k[1] + numpy.uint64(0xBB67AE85)) & low]
    return numpy.stack(c, 1)


def masks(step, cursor, sequences, patches):
    """[sequences, patches]: True where a patch is masked. Those with the smallest words stay."""
    place = cursor * sequences // BATCH * patches + numpy.arange(sequences * patches)
    counter = numpy.stack([place // 4, numpy.full_like(place, MASK_SITE), numpy.full_like(place, step), 0 * place], 1)
    words = philox(counter, SEED)[numpy.arange(len(place)), place % 4].reshape(sequences, patches)
    rank = words.argsort(1, kind="stable").argsort(1, kind="stable")
    return torch.from_numpy(rank >= int(patches * (1 - MASK_RATIO)))


class Masked(PatchTST):
    head_name = "r"

    def make_head(self):
        return nn.Linear(self.shape["d_model"], self.shape["patch_len"])

    def forward(self, x, mask):
        z, _, _ = self.normalised(x)
        return self.head(self.encode(z.masked_fill(mask[:, :, None], 0))), z

    def mask(self, i, x):
        return masks(i, i * BATCH, len(x) * self.shape["channels"], self.patches)

    def loss(self, i, x, y):
        mask = self.mask(i, x)
        out, z = self(x, mask)
        return F.mse_loss(out[mask], z[mask])

    def first(self, x):
        return self(x, self.mask(0, x))[0]


# The paper's b_k, b_o and b_2 have a gradient of 0: softmax and BatchNorm take what they add away again. Its rounding must not move
# them, so AdamW's epsilon is well above that.
KINDS = dict(
    plain=dict(model=PatchTST, shape=SHAPE, layer=Layer, lr=2e-3, epsilon=1e-8, weight_decay=0.05, stored=numpy.float32),
    paper=dict(model=PatchTST, shape=SHAPE, layer=PaperLayer, lr=2e-3, epsilon=1e-3, weight_decay=0.05, stored=numpy.float64),
    masked=dict(model=Masked, shape=MASKED, layer=Layer, lr=2e-3, epsilon=1e-8, weight_decay=0.05, stored=numpy.float64),
)


def main(kind, path):
    kind = KINDS[kind]
    torch.manual_seed(20)
    torch.set_num_threads(1)
    model = kind["model"](kind["layer"], kind["shape"])
    with torch.no_grad():
        for _, tensor, _ in model.named():
            tensor.add_(0.05 * torch.randn_like(tensor))
        for name, tensor in model.running():
            tensor.add_(0.3 * torch.rand_like(tensor))
    x = torch.randn(BATCH * BATCHES, SHAPE["channels"], SHAPE["seq_len"]).cumsum(-1) * 0.3
    y = torch.randn(BATCH * BATCHES, SHAPE["channels"], SHAPE["pred_len"])
    model, x, y = model.double(), x.double(), y.double()  # the same float32 numbers, computed in double

    def batch(i):
        at = (i % BATCHES) * BATCH
        return x[at:at + BATCH], y[at:at + BATCH]

    def numbers(tensor, transposed=False, stored=numpy.float32):
        t = tensor.detach()
        return (t.T if transposed else t).contiguous().numpy().astype(stored)

    with h5py.File(path, "w") as f:
        f.attrs.update(kind["shape"])
        f.attrs.update(dict(batch=BATCH, batches=BATCHES, steps=STEPS))
        f.attrs.update({name: kind[name] for name in ("lr", "epsilon", "weight_decay")})
        f["inputs"], f["targets"] = x.numpy().astype(numpy.float32), y.numpy().astype(numpy.float32)
        for name, tensor, transposed in model.named():
            f[f"parameters/{name}"] = numbers(tensor, transposed)
        for name, tensor in model.running():
            f[f"parameters/{name}"] = numbers(tensor)
        start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        f["forecasts"] = numbers(model.first(batch(0)[0]), stored=kind["stored"])
        model.load_state_dict(start)  # running statistics without that pass
        model.loss(0, *batch(0)).backward()
        for name, tensor, transposed in model.named():
            f[f"gradients/{name}"] = numbers(tensor.grad, transposed, kind["stored"])
        model.load_state_dict(start)  # running statistics without the first batch
        decayed = [t for name, t, _ in model.named() if name.split(".")[-1].startswith("w_") and name != "w_pos"]
        rest = [t for name, t, _ in model.named() if not any(t is d for d in decayed)]
        optimizer = torch.optim.AdamW([dict(params=decayed, weight_decay=kind["weight_decay"]), dict(params=rest, weight_decay=0)],
                                      lr=kind["lr"], betas=(0.9, 0.999), eps=kind["epsilon"])
        losses = []
        for i in range(STEPS):
            optimizer.zero_grad()
            loss = model.loss(i, *batch(i))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        f["losses"] = numpy.array(losses)
        if list(model.running()):
            for name, tensor, transposed in model.named():
                f[f"end/{name}"] = numbers(tensor, transposed, kind["stored"])
            for name, tensor in model.running():
                f[f"end/{name}"] = numbers(tensor, stored=kind["stored"])
            model.eval()
            f["evaluated"] = numbers(model(batch(0)[0]), stored=kind["stored"])


if __name__ == "__main__":
    main(*sys.argv[1:])
