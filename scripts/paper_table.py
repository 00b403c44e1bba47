#!/usr/bin/env python3
"""What scripts/paper_table.sh prints of its runs: a run's scores, and the table of all beside the paper's.

    python3 scripts/paper_table.py run RUN
    python3 scripts/paper_table.py table RUNS "SEEDS" DATASET_HORIZON...

A run is a folder RUNS/DATASET_HORIZON_SEED with train's test.json and seconds.txt, the seconds of each time that it was run.
"""
import json
import pathlib
import sys

# Nie et al. 2023, table 3, PatchTST/42: MSE and MAE.
PAPER = {
    "weather": {96: (0.152, 0.199), 192: (0.197, 0.243), 336: (0.249, 0.283), 720: (0.320, 0.335)},
    "traffic": {96: (0.367, 0.251), 192: (0.385, 0.259), 336: (0.398, 0.265), 720: (0.434, 0.287)},
    "electricity": {96: (0.130, 0.222), 192: (0.148, 0.240), 336: (0.167, 0.261), 720: (0.202, 0.291)},
    "national_illness": {24: (1.522, 0.814), 36: (1.430, 0.834), 48: (1.673, 0.854), 60: (1.529, 0.862)},
    "ETTh1": {96: (0.375, 0.399), 192: (0.414, 0.421), 336: (0.431, 0.436), 720: (0.449, 0.466)},
    "ETTh2": {96: (0.274, 0.336), 192: (0.339, 0.379), 336: (0.331, 0.380), 720: (0.379, 0.422)},
    "ETTm1": {96: (0.290, 0.342), 192: (0.332, 0.369), 336: (0.366, 0.392), 720: (0.420, 0.424)},
    "ETTm2": {96: (0.165, 0.255), 192: (0.220, 0.292), 336: (0.278, 0.329), 720: (0.367, 0.385)},
}


def scores(run):
    """(MSE, MAE, epoch, seconds) of a run that is done, else None; MSE and MAE None where no batch is full."""
    try:
        test = json.loads((run / "test.json").read_text())
    except FileNotFoundError:
        return None
    full = test["full_batches"] or {}
    return full.get("mse"), full.get("mae"), test["epoch"], sum(map(float, (run / "seconds.txt").read_text().split()))


def number(value, digits=4):
    return "-" if value is None else f"{value:.{digits}f}"


def mean(values):
    return sum(values) / len(values) if values else None


def row(runs, seeds, name):
    """The line of a data set's horizon, its runs and their seconds."""
    dataset, horizon = name.rsplit("_", 1)
    found = [s for s in (scores(runs / f"{name}_{seed}") for seed in seeds) if s]
    mses, maes = ([s[i] for s in found if s[i] is not None] for i in range(2))
    mse, mae = PAPER.get(dataset, {}).get(int(horizon), (None, None))
    ours = mean(mses)
    seconds = [s[3] for s in found]
    spread = f"{min(mses):.4f} to {max(mses):.4f}" if len(mses) > 1 else "-"
    cells = [dataset, horizon, str(len(found)), number(ours), spread, number(mean(maes)), number(mse, 3), number(mae, 3),
             number(ours / mse if ours and mse else None, 3), number(mean(seconds), 1)]
    return cells, seconds


def table(runs, seeds, names):
    head = ["data set", "horizon", "seeds", "MSE", "of the seeds", "MAE", "paper's MSE", "paper's MAE", "MSE / paper's", "s a run"]
    rows = [row(runs, seeds, name) for name in names]
    lines = [head] + [cells for cells, _ in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for i, line in enumerate(lines):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |")
        if i == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    seconds = [s for _, more in rows for s in more]
    print(f"{len(seconds)} of {len(names) * len(seeds)} runs, {sum(seconds):.1f} s in all")


def main(arguments):
    if len(arguments) == 2 and arguments[0] == "run":
        mse, mae, epoch, seconds = scores(pathlib.Path(arguments[1]))
        print(f"MSE {number(mse)}, MAE {number(mae)}, weights of epoch {epoch}, {seconds:.1f} s")
    elif len(arguments) > 3 and arguments[0] == "table":
        table(pathlib.Path(arguments[1]), arguments[2].split(), arguments[3:])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
