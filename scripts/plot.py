#!/usr/bin/env python3
"""A run as one picture: its losses, and forecasts beside what came true, with their errors by step and by channel. Or several runs'
losses. Or what forecast wrote, with its intervals, behind the rows before it.

usage: plot.py RUN [RUN2 ...] [--forecasts FILE.h5] [--out FILE.png]
       plot.py --ahead FILE.h5 --data DATA.h5 [--out FILE.png]
RUN is a folder that train wrote, or is writing; --forecasts is what evaluate --save-forecasts wrote, of one run. --ahead is what forecast
--out FILE.h5 wrote, of the series or the panel in DATA.h5; of a panel a few of its series are drawn.
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


def finish_losses(axes, runs, title):
    """Errors of pre-training are of masked patches, in RevIN's units; where both kinds are drawn, the legend tells them apart."""
    masked = sum(run.masked() for run in runs)
    unit = "MSE, standardised units" if not masked else "MSE of masked patches" if masked == len(runs) else "MSE"
    axes.set(xlabel="epoch", ylabel=unit, title=title)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()


def draw_losses(axes, run):
    epoch = [e["epoch"] for e in run.epochs]
    axes.plot(epoch, [number(e["train_loss"]) for e in run.epochs], color=PAST, marker="o", ms=4, label="training loss (dropout on)")
    axes.plot(epoch, [number(e["val_mse"]) for e in run.epochs], color=FORECAST, marker="o", ms=4, label="validation MSE")
    if best := run.best():
        axes.axvline(best["epoch"], color=TRUTH, lw=0.8, ls=":", label=f"best weights, epoch {best['epoch']}")
    finish_losses(axes, [run], "Loss")


def draw_several(axes, runs):
    for run in runs:
        epoch = [e["epoch"] for e in run.epochs]
        line, = axes.plot(epoch, [number(e["val_mse"]) for e in run.epochs], marker="o", ms=3,
                          label=run.name + (", masked patches" if run.masked() else ""))
        axes.plot(epoch, [number(e["train_loss"]) for e in run.epochs], color=line.get_color(), lw=0.9, ls="--")
    finish_losses(axes, runs, "Validation MSE (dashed: training loss, dropout on)")


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
        names = texts(file["forecasts"].attrs.get("channels", [f"channel {c}" for c in range(channels)]))
        for i, axes in enumerate((grid[0, 1], grid[1, 0], grid[1, 1])):
            window, channel = (2 * i + 1) * windows // 6, i * (channels - 1) // 2
            draw_forecast(axes, window, names[channel],
                          *(file[name][window, channel] for name in ("inputs", "targets", "forecasts")))
        grid[0, 1].legend(ncols=2)
        draw_errors(grid[0, 2], grid[1, 2], file, names)
    except (OSError, KeyError, ValueError):
        sys.exit(f"plot.py: {path}: not a file of evaluate --save-forecasts")


def draw_future(axes, title, past, truth, ahead, between):
    """past: the rows before the forecast; truth: those that came, if any; ahead [steps]; between: lower and upper ends, or None."""
    steps = len(ahead)
    axes.axvspan(0, steps + 0.5, color="#f3f4f6", zorder=0)
    axes.plot(range(1 - len(past), 1), past, color=PAST, lw=1.2, label="data")
    if len(truth):
        axes.plot(range(len(truth) + 1), [past[-1], *truth], color=TRUTH, lw=1.4, label="what came")
    step = range(1, steps + 1)
    if between:
        axes.fill_between(step, *between, color=FORECAST, alpha=0.2, lw=0, label="interval")
    axes.plot(step, ahead, color=FORECAST, lw=1.8, label="forecast")
    axes.set(xlabel="rows after the last that is known", title=title)
    axes.set_xlim(1 - len(past), steps + 0.5)


def texts(values):
    return [value if isinstance(value, str) else value.decode(errors="replace") for value in values]


def shown(steps):
    """How many rows before a forecast are drawn."""
    return max(2 * steps, 48)


def series_ahead(ahead, data):
    """The last origin's forecasts of a few channels, for draw_future."""
    import numpy
    steps, channels = ahead["forecasts"].shape[1:]
    names, theirs = (texts(values.attrs.get("channels", [])) for values in (ahead["forecasts"], data["series"]))
    origin = int(ahead["origin"][-1])
    if "time" in ahead:
        origin = int(numpy.searchsorted(data["time"][:], origin))
    first = max(0, origin + 1 - shown(steps))
    for c in spread(channels):
        name = names[c] if names else theirs[c] if theirs else f"channel {c}"
        rows = data["series"][first:origin + 1 + steps, theirs.index(name) if theirs else c]
        between = [ahead[end][-1, :, c] for end in ("lower", "upper")] if "lower" in ahead else None
        if "quantiles" in ahead and (ends := quantile_ends(ahead["quantiles"].attrs["levels"])):
            between = [ahead["quantiles"][-1, :, c, q] for q in ends]
        yield name, rows[:origin + 1 - first], rows[origin + 1 - first:], ahead["forecasts"][-1, :, c], between


def quantile_ends(levels):
    """The places of the lowest and the highest of several quantiles, between which a forecast is drawn."""
    return (0, len(levels) - 1) if len(levels) > 1 else None


def rows_between(start, time, frequency):
    """Rows from one time of a series to a later one."""
    import datetime
    count = int("".join(c for c in frequency if c.isdigit()))
    unit = frequency.lstrip("0123456789")
    if unit in ("mo", "y"):
        a, b = (datetime.datetime.fromtimestamp(t, datetime.timezone.utc) for t in (start, time))
        return (12 * (b.year - a.year) + b.month - a.month) // (count * (12 if unit == "y" else 1))
    return (time - start) // (count * {"s": 1, "min": 60, "h": 3600, "d": 86400}[unit])


def panel_ahead(ahead, data):
    """Of a few series, the same."""
    names, theirs = texts(ahead["ids"][:]), {name: i for i, name in enumerate(texts(data["ids"][:]))}
    frequency, = texts([ahead["values"].attrs["frequency"]])
    for i in spread(len(names)):
        begin, end = (int(at) for at in ahead["offsets"][i:i + 2])
        k = theirs[names[i]]
        first, last = (int(at) for at in data["offsets"][k:k + 2])
        origin = first + rows_between(int(data["start"][k]), int(ahead["start"][i]), frequency)
        past = data["values"][max(first, origin - shown(end - begin)):origin]
        truth = data["values"][origin:min(last, origin + end - begin)]
        between = [ahead[side][begin:end] for side in ("lower", "upper")] if "lower" in ahead else None
        levels = sorted((name for name in ahead if name[0] == "q"), key=lambda name: float(name[1:]))
        if ends := quantile_ends(levels):
            between = [ahead[levels[q]][begin:end] for q in ends]
        yield names[i], past, truth, ahead["values"][begin:end], between


def spread(count):
    """At most four of them, from the first to the last."""
    return sorted({i * (count - 1) // 3 for i in range(4)})


def picture_ahead(arguments):
    try:
        import h5py
    except ImportError:
        sys.exit("plot.py: h5py is not installed: scripts/setup.sh --plots")
    if not arguments.data:
        sys.exit("plot.py: --ahead needs --data, the series that was forecast")
    try:
        ahead, data = h5py.File(arguments.ahead), h5py.File(arguments.data)
        futures = list(panel_ahead(ahead, data) if "offsets" in ahead else series_ahead(ahead, data))
        figure, grid = plt.subplots(len(futures), 1, figsize=(11, 1 + 2.4 * len(futures)), constrained_layout=True, squeeze=False)
        for axes, future in zip(grid[:, 0], futures):
            draw_future(axes, *future)
        grid[0, 0].legend(ncols=2)
    except (OSError, KeyError, ValueError, IndexError):
        sys.exit(f"plot.py: {arguments.ahead}, {arguments.data}: not a file of forecast --out and the series that it forecast")
    out = arguments.out or arguments.ahead.with_suffix(".png")
    try:
        figure.savefig(out, dpi=130)
    except OSError as error:
        sys.exit(f"plot.py: {out}: {error.strerror}")
    print(f"picture: {out}")


def tell(run):
    """What has come of a run so far, in a few words."""
    best = run.best()
    if run.test and run.test["mse"] is not None:
        return f"test MSE {run.test['mse']:.4f}" + (
            " of masked patches" if run.masked() else f", repeat-last {run.test['repeat_last']['mse']:.4f}")
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
    if len(runs) == 1 and run.test and run.test["mse"] is not None and not run.masked():
        print(f"{tell(run)}: {run.test['mse'] / run.test['repeat_last']['mse']:.2f} of it; picture: {out}")
    else:
        print(f"{run.name}: {tell(run)}; picture: {out}")


if __name__ == "__main__":
    main()
