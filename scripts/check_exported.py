#!/usr/bin/env python3
"""Checks that a checkpoint's exported weights are its model: transformers forecasts the same, and they come back to the bit.

    python3 scripts/check_exported.py CHECKPOINT [--data FILE] [--device D] [--windows N] [--bound X]

export_weights writes the checkpoint's weights, PatchTSTForPrediction.from_pretrained loads them on the CPU in fp32 and forecasts N windows
of the test split (16), spread over it; import_weights takes them back. The forecasts are compared with those of `evaluate`: of the
checkpoint, in its run's precision, and of the weights that came back, in fp32. Exit code 1 when fp32's differ by more than the bound
(1e-5), or when a dataset that came back has other bits. --data: the HDF5 file to evaluate on; else the run's.
Needs torch, transformers 5, h5py, and the programs (PS_PROGRAMS: their folder, build/auto if unset).
"""
import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

import h5py
import numpy as np
import torch
from transformers import PatchTSTForPrediction

PROGRAMS = pathlib.Path(os.environ.get("PS_PROGRAMS", pathlib.Path(__file__).parent.parent / "build/auto"))


def run(program, *arguments):
    done = subprocess.run([PROGRAMS / program, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"check_exported: {done.stderr.strip()}")


def datasets(path):
    """{name: bits} of parameters and statistics."""
    found = {}
    with h5py.File(path, "r") as file:
        for group in ("parameters", "statistics"):
            if group in file:
                file[group].visititems(lambda name, d: found.update({d.name: d[()]}) if isinstance(d, h5py.Dataset) else None)
    return found


def setting(path, key):
    """Of the config that the checkpoint keeps, a key that stands in one section alone."""
    with h5py.File(path, "r") as file:
        text = file.attrs["config"]
    text = text.decode() if isinstance(text, bytes) else text
    line = next(line for line in text.splitlines() if line.strip().startswith(f"{key}: "))
    return line.partition(": ")[2].strip().strip("\"'")


def forecast(model, folder, checkpoint, arguments):
    """The largest absolute difference of ours and theirs, the largest forecast, and the number of windows."""
    out = folder / "forecasts.h5"
    run("evaluate", checkpoint, "--save-forecasts", out, "--overwrite", "--device", arguments.device, "--data", arguments.data)
    with h5py.File(out, "r") as file:
        count = len(file["inputs"])
        at = np.unique(np.linspace(0, count - 1, min(arguments.windows, count)).astype(int))
        inputs, ours = file["inputs"][at], file["forecasts"][at]
    with torch.no_grad():
        theirs = model(past_values=torch.from_numpy(inputs).transpose(1, 2)).prediction_outputs.transpose(1, 2).numpy()
    return np.abs(ours - theirs).max(), np.abs(theirs).max(), len(at)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--data")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--bound", type=float, default=1e-5)
    arguments = parser.parse_args()
    arguments.data = arguments.data or setting(arguments.checkpoint, "path")
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        exported, back = folder / "hf", folder / "back.h5"
        run("export_weights", arguments.checkpoint, exported)
        model, loading = PatchTSTForPrediction.from_pretrained(exported, output_loading_info=True)
        model.eval()
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if loading[what]:
                sys.exit(f"check_exported: from_pretrained: {what}: {', '.join(map(str, loading[what]))}")
        run("import_weights", exported, back, "--data", arguments.data)

        before, after = datasets(arguments.checkpoint), datasets(back)
        other = sorted(name for name in before.keys() | after.keys()
                       if name not in before or name not in after or before[name].tobytes() != after[name].tobytes())
        failed |= bool(other)
        print(f"{len(before)} datasets out and back: {'the same bits' if not other else 'other bits: ' + ', '.join(other)}")

        for path, label in ((arguments.checkpoint, setting(arguments.checkpoint, "precision")), (back, "fp32, imported")):
            worst, largest, windows = forecast(model, folder, path, arguments)
            bad = label.startswith("fp32") and not worst <= arguments.bound
            failed |= bad
            print(f"{label}: {windows} windows, forecasts up to {largest:.3g} differ by at most {worst:.2e}"
                  f"{f', above {arguments.bound:g}' if bad else ''}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
