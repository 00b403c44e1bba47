#!/usr/bin/env python3
"""A run as one picture: its losses, and forecasts beside what came true.

usage: plot.py RUN --forecasts FILE.h5 [--out FILE.png]
RUN is a folder that train wrote; FILE.h5 is what evaluate --save-forecasts wrote.
"""
import argparse
import json
import pathlib

import h5py
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

PAST, TRUTH, FORECAST, NAIVE = "#8a8f98", "#1f2933", "#d1495b", "#4a90c2"


def draw_losses(axes, epochs, test):
    number = [e["epoch"] for e in epochs]
    axes.plot(number, [e["train_loss"] for e in epochs], color=PAST, marker="o", ms=4, label="training loss (dropout on)")
    axes.plot(number, [e["val_mse"] for e in epochs], color=FORECAST, marker="o", ms=4, label="validation MSE")
    axes.axvline(test["epoch"], color=TRUTH, lw=0.8, ls=":", label=f"best weights, epoch {test['epoch']}")
    axes.set(xlabel="epoch", ylabel="MSE, standardised units", title="Loss")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()


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
    axes.set(xlabel="rows after the forecast is made", title=f"Test window {window}, channel {channel}")
    axes.set_xlim(1 - len(past), horizon + 0.5)


def main():
    parser = argparse.ArgumentParser(description="Draw a run's losses and a few of its forecasts.")
    parser.add_argument("run", type=pathlib.Path, help="folder of the run")
    parser.add_argument("--forecasts", type=pathlib.Path, required=True, help="file of evaluate --save-forecasts")
    parser.add_argument("--out", type=pathlib.Path, help="PNG to write (default: RUN/forecasts.png)")
    arguments = parser.parse_args()
    out = arguments.out or arguments.run / "forecasts.png"

    epochs = [json.loads(line) for line in (arguments.run / "metrics.jsonl").read_text().splitlines()]
    test = json.loads((arguments.run / "test.json").read_text())
    mse, naive = test["mse"], test["repeat_last"]["mse"]

    plt.rcParams.update({"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False,
                         "legend.frameon": False, "legend.fontsize": 8})
    figure, grid = plt.subplots(2, 2, figsize=(11, 6.4), constrained_layout=True)
    figure.suptitle(f"{arguments.run.name}: test MSE {mse:.4f}, repeat-last {naive:.4f}", fontsize=12)
    draw_losses(grid[0, 0], epochs, test)
    with h5py.File(arguments.forecasts) as file:
        windows, channels, _ = file["targets"].shape
        for i, axes in enumerate((grid[0, 1], grid[1, 0], grid[1, 1])):
            window, channel = (2 * i + 1) * windows // 6, i * (channels - 1) // 2
            draw_forecast(axes, window, channel + 1, *(file[name][window, channel] for name in ("inputs", "targets", "forecasts")))
    grid[0, 1].legend(ncols=2)
    figure.savefig(out, dpi=130)
    print(f"test MSE {mse:.4f}, repeat-last {naive:.4f}: {mse / naive:.2f} of it; picture: {out}")


if __name__ == "__main__":
    main()
