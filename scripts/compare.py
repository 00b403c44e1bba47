#!/usr/bin/env python3
"""Runs side by side: a table sorted by validation error, and their validation curves as a picture.

usage: compare.py RUN... [--out FILE.png]
RUN is a folder that train wrote, such as runs/*; files beside them are left out. The picture (default: compare.png beside the first
run) needs matplotlib and is left out where that is not installed. Runs are to be chosen by validation MSE: test figures of many runs
say which one fits the test part best. Errors of pre-training (train.objective: masked) are of masked patches: such runs stand last.
"""
import argparse
import pathlib
import sys

from runs import Run, Unreadable, number

# Keys that say how a run is computed, kept or told, and not what it learns.
APART = {"data.placement", "data.season", "train.checkpoint_every", "train.keep_last", "train.keep_best", "runtime.device",
         "runtime.backend", "runtime.fusion", "runtime.attention", "runtime.epilogue", "runtime.merge_qkv", "runtime.tiny_gemm",
         "runtime.tuning", "runtime.threads", "runtime.exchange"}


def differences(runs):
    """The keys that are not the same in all runs and may change what is learnt."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    return [key for key in keys if key not in APART and len({run.config.get(key) for run in runs}) > 1]


def figure(value):
    return "-" if value is None else f"{value:.5f}"


def row(run, keys):
    best, test = run.best(), run.test or {}
    seconds = sum(e["seconds"] or 0 for e in run.epochs)
    epoch = f"{best['epoch']}/{run.config.get('train.epochs', '?')}" if best else "-"
    return [run.name, *(run.config.get(key, "-") for key in keys), epoch, figure(best and best["val_mse"]), figure(test.get("mse")),
            figure(test.get("mae")), f"{seconds:.1f}"]


def print_table(runs):
    keys = differences(runs)
    lines = [["run", *keys, "best epoch", "validation MSE", "test MSE", "test MAE", "seconds"], *(row(run, keys) for run in runs)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
    if any(run.masked() for run in runs):
        print("train.objective masked: errors of masked patches, not of forecasts")


def draw(runs, out):
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    canvas, axes = plt.subplots(figsize=(9, 5.5), constrained_layout=True)
    for run in runs:
        line, = axes.plot([e["epoch"] for e in run.epochs], [number(e["val_mse"]) for e in run.epochs], marker="o", ms=3,
                          label=run.name + (", masked patches" if run.masked() else ""))
        if best := run.best():
            axes.plot(best["epoch"], number(best["val_mse"]), marker="*", ms=11, color=line.get_color())
    axes.set(xlabel="epoch", ylabel="validation MSE", title="Validation (stars: best weights)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=8, frameon=False)
    canvas.savefig(out, dpi=130)
    print(f"picture: {out}")


def main():
    parser = argparse.ArgumentParser(description="Compare runs by their validation errors.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=pathlib.Path, help="PNG to write (default: compare.png beside the first run)")
    arguments = parser.parse_args()
    runs, refused = [], 0
    for name in arguments.runs:
        if pathlib.Path(name).is_file():
            continue
        try:
            runs.append(Run(name))
        except Unreadable as error:
            print(f"compare.py: {error}", file=sys.stderr)
            refused = 2
    out = arguments.out or pathlib.Path(arguments.runs[0]).parent / "compare.png"
    runs.sort(key=lambda run: (run.masked(), number((run.best() or {"val_mse": None})["val_mse"])))
    if not runs:
        if not refused:
            print(f"compare.py: no folder of a run among {', '.join(arguments.runs)}", file=sys.stderr)
        return 2
    print_table(runs)
    draw(runs, out)
    return refused


if __name__ == "__main__":
    sys.exit(main())
