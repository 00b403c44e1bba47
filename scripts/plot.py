#!/usr/bin/env python3
"""A run as one picture: its losses, and forecasts beside what came true, with their errors by step and by channel. Or several runs'
losses. Or what forecast wrote, with its intervals, behind the rows before it.

usage: plot.py RUN [RUN2 ...] [--forecasts FILE.h5] [--out FILE.png]
       plot.py --ahead FILE.h5 --data DATA.h5 [--out FILE.png]
RUN is a folder that train wrote, or is writing; --forecasts is what evaluate --save-forecasts wrote, of one run. --ahead is what forecast
--out FILE.h5 wrote, of the series in DATA.h5.
"""
import argparse
import pathlib
import sys

try:
    import matplotlib
except ImportError:
    sys.exit("plot.py: matplotlib is not installed: scripts/setup.sh --plots")

from runs import Run, Unreadable, number

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

PAST, TRUTH, FORECAST, NAIVE = "#8a8f98", "#1f2933", "#d1495b", "#4a90c2"
BLOCK = 64 << 20  # bytes of forecasts in memory at a time


def finish_losses(axes, title):
    axes.set(xlabel="epoch", ylabel="MSE, standardised units", title=title)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()


def draw_losses(axes, run):
    epoch = [e["epoch"] for e in run.epochs]
    axes.plot(epoch, [number(e["train_loss"]) for e in run.epochs], color=PAST, marker="o", ms=4, label="training loss (dropout on)")
    axes.plot(epoch, [number(e["val_mse"]) for e in run.epochs], color=FORECAST, marker="o", ms=4, label="validation MSE")
    if best := run.best():
        axes.axvline(best["epoch"], color=TRUTH, lw=0.8, ls=":", label=f"best weights, epoch {best['epoch']}")
    finish_losses(axes, "Loss")


def draw_several(axes, runs):
    for run in runs:
        epoch = [e["epoch"] for e in run.epochs]
        line, = axes.plot(epoch, [number(e["val_mse"]) for e in run.epochs], marker="o", ms=3, label=run.name)
        axes.plot(epoch, [number(e["train_loss"]) for e in run.epochs], color=line.get_color(), lw=0.9, ls="--")
    finish_losses(axes, "Validation MSE (dashed: training loss, dropout on)")


def draw_forecast(axes, window, channel, inputs, target, forecast):
    """inputs [L], target and forecast [H]; as much of the past is shown as two horizons, at least 48 rows."""
    horizon = len(target)
    past = inputs[-max(2 * horizon, 48):]
    ahead = range(1, horizon + 1)
    axes.axvspan(0, horizon + 0.5, color="#f3f4f6", zorder=0)
    axes.plot(range(1 - len(past), 1), past, color=PAST, lw=1.2, label="input")
    # Drawn from the last input on, so that the lines join.
    axes.plot([0, *ahead], [past[-1], *target], color=TRUTH, lw=1.4, label="target")
    axes.plot([0, *ahead], [past[-1]] * (horizon + 1), color=NAIVE, lw=1.2, ls="--", label="repeat-last")
    axes.plot(ahead, forecast, color=FORECAST, lw=1.8, label="forecast")
    axes.set(xlabel="rows after the forecast is made", title=f"Window {window}, {channel}")
    axes.set_xlim(1 - len(past), horizon + 0.5)


def squared_errors(file):
    """Mean squares [C, H] over the windows, of the forecasts and of repeat-last; and the targets' variance [C]."""
    windows, channels, horizon = file["targets"].shape
    block = max(1, BLOCK // (8 * channels * (2 * horizon + file["inputs"].shape[2])))
    ours = naive = sums = squares = 0
    for first in range(0, windows, block):
        part = slice(first, first + block)
        target = file["targets"][part].astype("float64")
        ours = ours + ((file["forecasts"][part] - target) ** 2).sum(axis=0)
        naive = naive + ((file["inputs"][part, :, -1:] - target) ** 2).sum(axis=0)
        sums = sums + target.sum(axis=(0, 2))
        squares = squares + (target ** 2).sum(axis=(0, 2))
    count = windows * horizon
    return ours / windows, naive / windows, (squares / count - (sums / count) ** 2).clip(min=0)


def draw_errors(by_step, by_channel, file, names):
    """In units in which channels can be averaged: standardised ones, or each channel's variance in these windows."""
    ours, naive, variance = squared_errors(file)
    unit = "MSE, standardised units"
    if file["forecasts"].attrs.get("units", "original") != "standardised":
        unit = "MSE / variance of targets"
        variance[variance == 0] = 1  # a constant channel, whose errors are taken as they are
        ours, naive = ours / variance[:, None], naive / variance[:, None]
    step = range(1, ours.shape[1] + 1)
    by_step.plot(step, naive.mean(axis=0), color=NAIVE, lw=1.2, ls="--", label="repeat-last")
    by_step.plot(step, ours.mean(axis=0), color=FORECAST, lw=1.8, label="forecast")
    by_step.set(xlabel="step of the horizon", ylabel=unit, title="Error by step")
    by_step.set_ylim(bottom=0)
    by_step.xaxis.set_major_locator(MaxNLocator(integer=True))
    by_step.legend()
    place = range(len(names))
    by_channel.bar(place, ours.mean(axis=1), color=FORECAST, width=0.8)
    by_channel.set(ylabel=unit, title="Error by channel")
    if len(names) <= 24:
        by_channel.set_xticks(place, names, rotation=45 if max(map(len, names)) > 3 else 0, ha="right")
    else:
        by_channel.set_xlabel("channel, counted from 0")


def draw_forecasts(grid, path):
    try:
        import h5py
    except ImportError:
        sys.exit("plot.py: h5py is not installed: scripts/setup.sh --plots")
    try:
        file = h5py.File(path)
        windows, channels, _ = file["targets"].shape
        names = [name if isinstance(name, str) else name.decode(errors="replace")
                 for name in file["forecasts"].attrs.get("channels", [f"channel {c}" for c in range(channels)])]
        for i, axes in enumerate((grid[0, 1], grid[1, 0], grid[1, 1])):
            window, channel = (2 * i + 1) * windows // 6, i * (channels - 1) // 2
            draw_forecast(axes, window, names[channel],
                          *(file[name][window, channel] for name in ("inputs", "targets", "forecasts")))
        grid[0, 1].legend(ncols=2)
        draw_errors(grid[0, 2], grid[1, 2], file, names)
    except (OSError, KeyError, ValueError):
        sys.exit(f"plot.py: {path}: not a file of evaluate --save-forecasts")


def draw_ahead(grid, ahead, data):
    """The last origin's forecasts of a few channels, the rows before it, and what came true where the data go on."""
    import numpy
    names = [name if isinstance(name, str) else name.decode(errors="replace")
             for name in ahead["forecasts"].attrs.get("channels", [f"channel {c}" for c in range(ahead["forecasts"].shape[2])])]
    theirs = [name if isinstance(name, str) else name.decode(errors="replace") for name in data["series"].attrs.get("channels", names)]
    steps, channels = ahead["forecasts"].shape[1:]
    origin = int(ahead["origin"][-1])
    if "time" in ahead:
        origin = int(numpy.searchsorted(data["time"][:], origin))
    first, step = max(0, origin + 1 - max(2 * steps, 48)), range(1, steps + 1)
    for i, axes in enumerate(grid):
        c = i * (channels - 1) // max(1, len(grid) - 1)
        rows = data["series"][first:origin + 1 + steps, theirs.index(names[c])]
        past, truth = rows[:origin + 1 - first], rows[origin + 1 - first:]
        axes.axvspan(0, steps + 0.5, color="#f3f4f6", zorder=0)
        axes.plot(range(1 - len(past), 1), past, color=PAST, lw=1.2, label="data")
        if len(truth):
            axes.plot(range(len(truth) + 1), [past[-1], *truth], color=TRUTH, lw=1.4, label="what came")
        if "lower" in ahead:
            axes.fill_between(step, ahead["lower"][-1, :, c], ahead["upper"][-1, :, c], color=FORECAST, alpha=0.2, lw=0, label="interval")
        axes.plot(step, ahead["forecasts"][-1, :, c], color=FORECAST, lw=1.8, label="forecast")
        axes.set(xlabel="rows after the last that is known", title=names[c])
        axes.set_xlim(1 - len(past), steps + 0.5)
    grid[0].legend(ncols=2)


def picture_ahead(arguments):
    try:
        import h5py
    except ImportError:
        sys.exit("plot.py: h5py is not installed: scripts/setup.sh --plots")
    if not arguments.data:
        sys.exit("plot.py: --ahead needs --data, the series that was forecast")
    try:
        ahead, data = h5py.File(arguments.ahead), h5py.File(arguments.data)
        count = min(4, ahead["forecasts"].shape[2])
        figure, grid = plt.subplots(count, 1, figsize=(11, 1 + 2.4 * count), constrained_layout=True, squeeze=False)
        draw_ahead(grid[:, 0], ahead, data)
    except (OSError, KeyError, ValueError, IndexError):
        sys.exit(f"plot.py: {arguments.ahead}, {arguments.data}: not a file of forecast --out and the series that it forecast")
    out = arguments.out or arguments.ahead.with_suffix(".png")
    figure.savefig(out, dpi=130)
    print(f"picture: {out}")


def tell(run):
    """What has come of a run so far, in a few words."""
    best = run.best()
    if run.test and run.test["mse"] is not None:
        return f"test MSE {run.test['mse']:.4f}, repeat-last {run.test['repeat_last']['mse']:.4f}"
    return f"best validation MSE {best['val_mse']:.4f}, epoch {best['epoch']}, not tested yet" if best else "no finite validation MSE"


def main():
    parser = argparse.ArgumentParser(description="Draw runs' losses, and a few of one run's forecasts with their errors.")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="folder of a run")
    parser.add_argument("--ahead", type=pathlib.Path, help="file of forecast --out FILE.h5")
    parser.add_argument("--data", type=pathlib.Path, help="with --ahead: the series, HDF5")
    parser.add_argument("--forecasts", type=pathlib.Path, help="file of evaluate --save-forecasts")
    parser.add_argument("--out", type=pathlib.Path, help="PNG to write (default: RUN/forecasts.png, without --forecasts losses.png)")
    arguments = parser.parse_args()
    plt.rcParams.update({"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False,
                         "legend.frameon": False, "legend.fontsize": 8})
    if arguments.ahead and not arguments.runs:
        return picture_ahead(arguments)
    if arguments.ahead or not arguments.runs:
        sys.exit("plot.py: name a run, or --ahead FILE.h5 without one")
    if arguments.forecasts and len(arguments.runs) > 1:
        sys.exit("plot.py: --forecasts: are of one run: name that run alone")
    try:
        runs = [Run(name) for name in arguments.runs]
    except Unreadable as error:
        sys.exit(f"plot.py: {error}")
    for run in runs:
        if not run.epochs:
            sys.exit(f"plot.py: {run.name}: no epoch is done yet")
    run = runs[0]

    if arguments.forecasts:
        figure, grid = plt.subplots(2, 3, figsize=(15.5, 6.4), constrained_layout=True)
        draw_losses(grid[0, 0], run)
        draw_forecasts(grid, arguments.forecasts)
    else:
        figure, axes = plt.subplots(figsize=(9, 5.5), constrained_layout=True)
        draw_losses(axes, run) if len(runs) == 1 else draw_several(axes, runs)
    if len(runs) == 1:
        figure.suptitle(f"{run.folder.name}: {tell(run)}", fontsize=12)
    out = arguments.out or run.folder / ("forecasts.png" if arguments.forecasts else "losses.png")
    figure.savefig(out, dpi=130)
    for other in runs[1:]:
        print(f"{other.name}: {tell(other)}")
    if len(runs) == 1 and run.test and run.test["mse"] is not None:
        print(f"{tell(run)}: {run.test['mse'] / run.test['repeat_last']['mse']:.2f} of it; picture: {out}")
    else:
        print(f"{run.name}: {tell(run)}; picture: {out}")


if __name__ == "__main__":
    main()
