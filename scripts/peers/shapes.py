#!/usr/bin/env python3
"""The sizes that training steps are timed on, ours and the peers', and the config that makes ours of them.

    python3 scripts/peers/shapes.py names LIST          the names in LIST, one a line: names and groups, separated by commas
    python3 scripts/peers/shapes.py sample NAME         the name of the shape's data file, and sample_series' arguments for it
    python3 scripts/peers/shapes.py config NAME DATA    a config of that shape on the file DATA

B windows a batch, C channels, L seq_len, H pred_len, P patch_len, S stride, d d_model, h n_heads, f d_ff, p dropout; pad: the last value
repeated S times. paper: BatchNorm behind each residual and attention's scores added up over the layers; else LayerNorm before each branch.
Besides those listed here draw-1, draw-2 and so on are names, of sizes drawn at random.
"""
import json
import os
import pathlib
import random
import re
import sys
import time

BASE = {  # configs/NAME.yaml
    "seed28k": dict(B=64, C=20, L=24, H=1, P=8, S=4, d=64, h=4, f=256, layers=2, p=0.0, pad=False),
    "etth1": dict(B=128, C=7, L=336, H=96, P=16, S=8, d=16, h=4, f=128, layers=3, p=0.3, pad=True),
    "weather": dict(B=128, C=21, L=336, H=96, P=16, S=8, d=128, h=16, f=256, layers=3, p=0.2, pad=True),
    "electricity": dict(B=32, C=321, L=336, H=96, P=16, S=8, d=128, h=16, f=256, layers=3, p=0.2, pad=True),
}
PAPER = {f"{name}_paper": BASE[name] | {"paper": True} for name in ("etth1", "weather", "electricity")}  # configs/NAME.yaml
SWEEP = {
    # PatchTST/64 of the paper, on the two sizes that its authors use, and their pre-training's encoder
    "etth-64": BASE["etth1"] | dict(L=512),
    "ettm-64": BASE["weather"] | dict(C=7, L=512),
    "ssl": dict(B=64, C=7, L=512, H=96, P=12, S=12, d=128, h=16, f=512, layers=3, p=0.2, pad=False),
    # presets of other implementations: neuralforecast, transformers (at this width), the Time-Series-Library on electricity
    "univariate": BASE["weather"] | dict(B=1024, C=1, L=96),
    "hf-d128": dict(B=64, C=21, L=512, H=96, P=16, S=16, d=128, h=4, f=512, layers=3, p=0.2, pad=False),
    "tslib-ecl": dict(B=16, C=321, L=96, H=96, P=16, S=8, d=512, h=8, f=2048, layers=2, p=0.1, pad=True),
    # widths between and beyond
    "d32": BASE["weather"] | dict(d=32, h=4, f=128),
    "d96": BASE["weather"] | dict(B=64, d=96, h=6, f=192),
    "d192": BASE["weather"] | dict(B=64, d=192, h=6, f=384, layers=4),
    "base-384": dict(B=64, C=8, L=512, H=96, P=16, S=16, d=384, h=6, f=1536, layers=6, p=0.1, pad=False),
    "large-1024": dict(B=32, C=8, L=512, H=96, P=8, S=8, d=1024, h=16, f=4096, layers=8, p=0.1, pad=False),
    # many patches: 360 and 1,024
    "long-360": BASE["weather"] | dict(B=16, C=7, L=2880),
    "long-1024": BASE["weather"] | dict(B=4, C=7, L=8192, d=64, h=4),
}
GROUPS = {"base": BASE, "paper": PAPER, "sweep": SWEEP, "all": BASE | PAPER | SWEEP}


def whole(shape):
    """What follows from a shape's sizes."""
    shape.setdefault("paper", False)
    shape["N"] = (shape["L"] - shape["P"]) // shape["S"] + 1 + shape["pad"]
    # The authors drop attention's output out twice, one after the other.
    shape["p_attention"] = round(1 - (1 - shape["p"]) ** 2, 4) if shape["paper"] else shape["p"]
    return shape


def drawn(seed):
    """Up to 128 columns and patches, the paper's layer, many patches, or wide, with as many windows as take some ms a step."""
    r = random.Random(seed)
    kind = r.choices(["narrow", "paper", "long", "wide"], [45, 20, 15, 20])[0]
    d = {"narrow": lambda: 8 * r.randint(2, 16), "paper": lambda: r.choice([16, 16, 32, 64, 128]),
         "long": lambda: r.choice([16, 32, 64, 96, 128]), "wide": lambda: r.choice([144, 160, 192, 224, 256, 320, 384, 512, 768])}[kind]()
    h = r.choice([h for h in range(1, 17) if d % h == 0 and 4 <= d // h <= 64] or [d // 64])
    P = r.choice([8, 12, 16, 16, 24, 32])
    S, pad = r.choice([P, P // 2]), r.random() < 0.6
    N = r.randint(129, 1000) if kind == "long" else r.choice([r.randint(5, 64), 42, r.randint(65, 128)])
    C = r.choice([1, 2, 4, 7, 7, 8, 12, 21])
    rows = {"narrow": 60000, "paper": 60000, "long": 20000, "wide": 12000}[kind] * r.uniform(0.2, 1.5)
    return dict(B=min(1024, max(1, round(rows / (N * C)))), C=C, L=(N - 1 - pad) * S + P, H=r.choice([24, 96, 96]), P=P, S=S, d=d, h=h,
                f=d * r.choice([1, 2, 2, 4]), layers=r.choice([2, 3, 3, 4]), p=r.choice([0.0, 0.1, 0.2, 0.3]), pad=pad, paper=kind == "paper")


class Shapes(dict):
    def __missing__(self, name):
        if not re.fullmatch(r"draw-[1-9][0-9]{0,8}", name):
            raise SystemExit(f"{name}: not a shape: {', '.join([*self, *GROUPS])}, draw-1, draw-2 ..")
        return self.setdefault(name, whole(drawn(int(name[5:]))))


SHAPES = Shapes({name: whole(shape) for name, shape in GROUPS["all"].items()})

ROWS = 32768  # of each generated series: at least 20 batches of every shape are training windows


def chosen(argument):
    """The names in "a,b", where a group stands for all of its names."""
    names = {}
    for word in argument.split(","):
        if word not in GROUPS:
            SHAPES[word]  # says what is no shape
        names |= dict.fromkeys(GROUPS.get(word, [word]))
    return list(names)


def sample(name):
    """Ready-made windows where the config of that name has them."""
    s = SHAPES[name]
    if name == "seed28k":
        return ["windows.h5", "--windows", "28000", "--channels", str(s["C"]), "--seq-len", str(s["L"]), "--pred-len", str(s["H"])]
    return [f"series-{s['C']}.h5", "--hours", str(ROWS), "--channels", str(s["C"])]


def config(name, data):
    """JSON, which YAML takes."""
    s = SHAPES[name]
    model = {"seq_len": s["L"], "pred_len": s["H"], "patch_len": s["P"], "stride": s["S"], "padding": "end" if s["pad"] else "none",
             "d_model": s["d"], "n_heads": s["h"], "d_ff": s["f"], "n_layers": s["layers"], "dropout": s["p"]}
    if s["paper"]:
        model |= {"norm": "batch", "norm_place": "post", "residual_attention": True, "activation": "gelu",
                  "dropout_attention": s["p_attention"]}
    return json.dumps({"data": {"path": os.path.abspath(data)}, "model": model, "train": {"batch_size": s["B"]}}, indent=2)


def wait_for_turn():
    """Compiled, a peer says so by the file $PS_TURN.ready, and is timed when $PS_TURN.go is there: nothing else runs then."""
    if turn := os.environ.get("PS_TURN"):
        pathlib.Path(turn + ".ready").touch()
        while not os.path.exists(turn + ".go"):
            if not os.path.exists(turn + ".ready"):
                raise SystemExit("the bench script is gone")
            time.sleep(0.05)


def report(who, name, precision, way, ms):
    """One line: the median of several timings, in milliseconds a step."""
    ms = sorted(ms)
    print(f"{who:5} {name:17} {precision:4} {way:14} {ms[len(ms) // 2]:9.4f} ms/step (min {ms[0]:.4f} max {ms[-1]:.4f})", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "names":
        print("\n".join(chosen(sys.argv[2])))
    elif len(sys.argv) == 3 and sys.argv[1] == "sample":
        print("\n".join(sample(sys.argv[2])))
    elif len(sys.argv) == 4 and sys.argv[1] == "config":
        print(config(*sys.argv[2:]))
    else:
        raise SystemExit(__doc__)
