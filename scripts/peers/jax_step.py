#!/usr/bin/env python3
"""Milliseconds per training step (forward, backward, AdamW) of the same PatchTST in JAX, to stand beside `bench`.

    python3 scripts/peers/jax_step.py [--device cuda|cpu] [--once] SHAPES [PRECISIONS]

SHAPES and PRECISIONS are separated by commas; precisions are bf16 and tf32, on the CPU fp32 alone. 20 steps (CPU: 5) are one jitted loop
over data already on the device; the median of 5 such loops. --once prints parameters, and the loss before the first step, instead.
"""
import argparse
import functools
import os
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
import jax
import jax.numpy as jnp
import optax

from shapes import SHAPES, chosen, report, wait_for_turn


def parameters(key, s):
    d, f = s["d"], s["f"]
    sizes = {"qkv": (d, 3 * d), "o": (d, d), "f1": (d, f), "f2": (f, d)}

    def dense(key, m, n):
        return {"w": jax.random.normal(key, (m, n)) * 0.02, "b": jnp.zeros(n)}

    def layer(key):
        keys = jax.random.split(key, len(sizes))
        norms = {name: {"gamma": jnp.ones(d), "beta": jnp.zeros(d)} for name in ("n1", "n2")}
        return norms | {name: dense(k, *sizes[name]) for k, name in zip(keys, sizes)}

    embedding, position, head, *layers = jax.random.split(key, 3 + s["layers"])
    return {
        "emb": dense(embedding, s["P"], d),
        "pos": jax.random.normal(position, (s["N"], d)) * 0.02,
        "layers": [layer(k) for k in layers],
        "head": dense(head, s["N"] * d, s["H"]),
    }


def initial_statistics(s):
    """BatchNorm's running ones of each layer's two norms; nothing of LayerNorm."""
    def norm():
        return {"mean": jnp.zeros(s["d"]), "var": jnp.ones(s["d"])}

    return [[norm(), norm()] for _ in range(s["layers"])] if s["paper"] else []


def layernorm(a, w):
    a = a.astype(jnp.float32)
    centred = a - a.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w["gamma"] + w["beta"]


def batchnorm(a, w):
    """What it makes of all rows, and what the running statistics move to."""
    rows = a.astype(jnp.float32).reshape(-1, a.shape[-1])
    mean = rows.mean(0)
    var = (rows**2).mean(0) - mean**2
    normed = (rows - mean) * jax.lax.rsqrt(var + 1e-5) * w["gamma"] + w["beta"]
    return normed.reshape(a.shape).astype(a.dtype), {"mean": mean, "var": var * (len(rows) / (len(rows) - 1))}


def forecast(w, x, key, s, real):
    B, C, _ = x.shape
    N, d, h = s["N"], s["d"], s["h"]
    keys = iter(jax.random.split(key, 1 + 3 * s["layers"]))

    def product(a, w):
        return a.astype(real) @ w["w"].astype(real) + w["b"].astype(real)

    def drop(a, p):
        key = next(keys)
        return jnp.where(jax.random.bernoulli(key, 1 - p, a.shape), a / (1 - p), 0) if p else a

    def attention(u, layer, before):
        q, k, v = jnp.moveaxis(product(u, layer["qkv"]).reshape(B * C, N, 3, h, d // h), 2, 0)
        scores = jnp.einsum("snhe,smhe->shnm", q, k).astype(jnp.float32) * (d // h) ** -0.5 + before
        merged = jnp.einsum("shnm,smhe->snhe", jax.nn.softmax(scores).astype(real), v).reshape(B * C, N, d)
        return drop(product(merged, layer["o"]), s["p_attention"]), scores

    def feed_forward(u, layer):
        hidden = jax.nn.gelu(product(u, layer["f1"]), approximate=not s["paper"])
        return drop(product(drop(hidden, s["p"]), layer["f2"]), s["p"])

    mean, std = x.mean(-1, keepdims=True), jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    z = (x - mean) / std
    if s["pad"]:
        z = jnp.concatenate([z, jnp.repeat(z[..., -1:], s["S"], -1)], -1)
    rows = jnp.arange(N)[:, None] * s["S"] + jnp.arange(s["P"])
    u = drop(product(z[..., rows].reshape(B * C, N, -1), w["emb"]) + w["pos"].astype(real), s["p"])
    scores, statistics = 0, []
    for layer in w["layers"]:
        if s["paper"]:
            branch, scores = attention(u, layer, scores)
            u, first = batchnorm(u + branch, layer["n1"])
            u, second = batchnorm(u + feed_forward(u, layer), layer["n2"])
            statistics.append([first, second])
        else:
            u = u + attention(layernorm(u, layer["n1"]), layer, 0)[0]
            u = u + feed_forward(layernorm(u, layer["n2"]), layer)
    return product(u.reshape(B, C, -1), w["head"]).astype(jnp.float32) * std + mean, statistics


def loss(w, x, y, key, s, real):
    """And the statistics of the batch."""
    yhat, statistics = forecast(w, x, key, s, real)
    return jnp.mean((yhat - y) ** 2), statistics


def batches(s):
    x = jax.random.normal(jax.random.key(1), (4, s["B"], s["C"], s["L"]))
    return x, jax.random.normal(jax.random.key(2), (4, s["B"], s["C"], s["H"]))


def print_once(name, s):
    w = parameters(jax.random.key(0, impl="rbg"), s)
    x, y = batches(s)
    first, _ = jax.jit(functools.partial(loss, s=s, real=jnp.float32))(w, x[0], y[0], jax.random.key(3, impl="rbg"))
    print(f"{name}: {sum(t.size for t in jax.tree.leaves(w))} parameters, loss {float(first):.4f}", flush=True)


def time_shape(name, s, precision, loop):
    adamw = optax.adamw(1e-4)
    real = jnp.bfloat16 if precision == "bf16" else jnp.float32
    w = parameters(jax.random.key(0, impl="rbg"), s)
    moments, running = adamw.init(w), initial_statistics(s)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def steps(w, moments, running, x, y, key):
        def step(i, carry):
            w, moments, running = carry
            gradient, statistics = jax.grad(loss, has_aux=True)(w, x[i % 4], y[i % 4], jax.random.fold_in(key, i), s, real)
            update, moments = adamw.update(gradient, moments, w)
            running = jax.tree.map(lambda old, new: old + 0.1 * (new - old), running, statistics)
            return optax.apply_updates(w, update), moments, running

        return jax.lax.fori_loop(0, loop, step, (w, moments, running))

    x, y = batches(s)
    key = jax.random.key(3, impl="rbg")
    ms = []
    for i in range(7):
        if i == 1:
            wait_for_turn()
        begin = time.perf_counter()
        w, moments, running = steps(w, moments, running, x, y, key)
        jax.block_until_ready(w)
        ms.append((time.perf_counter() - begin) / loop * 1e3)
    report("jax", name, precision, "jitted loop", ms[2:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", type=chosen)
    parser.add_argument("precisions", nargs="?", type=lambda text: text.split(","))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--once", action="store_true")
    arguments = parser.parse_args()
    on_cpu = arguments.device == "cpu"
    known = ["fp32"] if on_cpu else ["bf16", "tf32"]
    jax.config.update("jax_platforms", arguments.device)
    for shape in arguments.shapes:
        if arguments.once:
            print_once(shape, SHAPES[shape])
            continue
        for precision in arguments.precisions or known:
            if precision not in known:
                parser.error(f"{precision}: on {arguments.device} not one of {', '.join(known)}")
            time_shape(shape, SHAPES[shape], precision, 5 if on_cpu else 20)
