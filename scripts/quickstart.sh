#!/usr/bin/env bash
# From a bare Debian to a trained, tested and plotted model. Options go to train: scripts/quickstart.sh --device cpu
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/auto run=runs/quickstart

scripts/setup.sh --plots
scripts/build.sh --programs
mkdir -p runs
[ -e runs/sample.h5 ] || "$build/sample_series" runs/sample.h5
"$build/train" configs/quickstart.yaml --run-dir "$run" --overwrite "$@"
"$build/evaluate" "$run/checkpoints/best.h5" --save-forecasts "$run/forecasts.h5" --original-units --overwrite
python=python3 # or the system's, for which the packages are, when another stands before it
"$python" -c 'import h5py, matplotlib' 2>/dev/null || python=/usr/bin/python3
"$python" scripts/plot.py "$run" --forecasts "$run/forecasts.h5" --out "$run/quickstart.png"
