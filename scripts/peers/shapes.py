"""The sizes of configs/*.yaml that the peers' steps are timed on, and the channels of the data those configs name.

B windows a batch, C channels, L seq_len, H pred_len, P patch_len, S stride, d d_model, h n_heads, f d_ff, p dropout; pad: the last value
repeated S times.
"""
SHAPES = {
    "seed28k": dict(B=64, C=20, L=24, H=1, P=8, S=4, d=64, h=4, f=256, layers=2, p=0.0, pad=False),
    "etth1": dict(B=128, C=7, L=336, H=96, P=16, S=8, d=16, h=4, f=128, layers=3, p=0.3, pad=True),
    "weather": dict(B=128, C=21, L=336, H=96, P=16, S=8, d=128, h=16, f=256, layers=3, p=0.2, pad=True),
    "electricity": dict(B=32, C=321, L=336, H=96, P=16, S=8, d=128, h=16, f=256, layers=3, p=0.2, pad=True),
}
for shape in SHAPES.values():
    shape["N"] = (shape["L"] - shape["P"]) // shape["S"] + 1 + shape["pad"]


def chosen(argument):
    """The names in "a,b", or all of them."""
    names = argument.split(",") if argument else list(SHAPES)
    unknown = [name for name in names if name not in SHAPES]
    if unknown:
        raise SystemExit(f"{unknown[0]}: not a shape: {', '.join(SHAPES)}")
    return names


def report(peer, name, precision, way, ms):
    """One line: the median of several loops, in milliseconds a step."""
    ms = sorted(ms)
    print(f"{peer:6} {name:12} {precision:5} {way:16} {ms[len(ms) // 2]:9.4f} ms/step (min {ms[0]:.4f} max {ms[-1]:.4f})", flush=True)
