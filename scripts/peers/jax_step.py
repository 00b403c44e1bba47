#!/usr/bin/env python3
"""Milliseconds per training step (forward, backward, AdamW) of the same pre-LN PatchTST in JAX, to stand beside `bench`.

    python3 scripts/peers/jax_step.py [shape,shape,...]

20 steps are one jitted loop over data already on the device; the median of 5 such loops, in bf16 and in tf32.
"""
import functools
import os
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
import jax
import jax.numpy as jnp
import optax

from shapes import SHAPES, chosen, report

STEPS = 20


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


def forecast(w, x, key, s, real):
    B, C, _ = x.shape
    N, d, h, p = s["N"], s["d"], s["h"], s["p"]
    keys = iter(jax.random.split(key, 1 + 3 * s["layers"]))

    def product(a, w):
        return a.astype(real) @ w["w"].astype(real) + w["b"].astype(real)

    def norm(a, w):
        a = a.astype(jnp.float32)
        centred = a - a.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w["gamma"] + w["beta"]

    def drop(a):
        key = next(keys)
        return jnp.where(jax.random.bernoulli(key, 1 - p, a.shape), a / (1 - p), 0) if p else a

    mean, std = x.mean(-1, keepdims=True), jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    z = (x - mean) / std
    if s["pad"]:
        z = jnp.concatenate([z, jnp.repeat(z[..., -1:], s["S"], -1)], -1)
    rows = jnp.arange(N)[:, None] * s["S"] + jnp.arange(s["P"])
    u = drop(product(z[..., rows].reshape(B * C, N, -1), w["emb"]) + w["pos"].astype(real))
    for layer in w["layers"]:
        q, k, v = jnp.moveaxis(product(norm(u, layer["n1"]), layer["qkv"]).reshape(B * C, N, 3, h, d // h), 2, 0)
        logits = jnp.einsum("snhe,smhe->shnm", q, k).astype(jnp.float32) * (d // h) ** -0.5
        merged = jnp.einsum("shnm,smhe->snhe", jax.nn.softmax(logits).astype(real), v).reshape(B * C, N, d)
        u = u + drop(product(merged, layer["o"]))
        u = u + drop(product(drop(jax.nn.gelu(product(norm(u, layer["n2"]), layer["f1"]), approximate=True)), layer["f2"]))
    return product(u.reshape(B, C, -1), w["head"]).astype(jnp.float32) * std + mean


def time_shape(name, s, real, precision):
    adamw = optax.adamw(1e-4)
    w = parameters(jax.random.key(0, impl="rbg"), s)
    moments = adamw.init(w)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def steps(w, moments, x, y, key):
        def step(i, carry):
            w, moments = carry
            key_i = jax.random.fold_in(key, i)
            gradient = jax.grad(lambda w: jnp.mean((forecast(w, x[i % 4], key_i, s, real) - y[i % 4]) ** 2))(w)
            update, moments = adamw.update(gradient, moments, w)
            return optax.apply_updates(w, update), moments

        return jax.lax.fori_loop(0, STEPS, step, (w, moments))

    x = jax.random.normal(jax.random.key(1), (4, s["B"], s["C"], s["L"]))
    y = jax.random.normal(jax.random.key(2), (4, s["B"], s["C"], s["H"]))
    key = jax.random.key(3, impl="rbg")
    ms = []
    for _ in range(7):
        begin = time.perf_counter()
        w, moments = steps(w, moments, x, y, key)
        jax.block_until_ready(w)
        ms.append((time.perf_counter() - begin) / STEPS * 1e3)
    report("jax", name, precision, "jitted loop", ms[2:])


if __name__ == "__main__":
    for shape in chosen(sys.argv[1] if len(sys.argv) > 1 else None):
        time_shape(shape, SHAPES[shape], jnp.bfloat16, "bf16")
        time_shape(shape, SHAPES[shape], jnp.float32, "tf32")
