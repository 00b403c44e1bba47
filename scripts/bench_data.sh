#!/usr/bin/env bash
# The series that configs/ name beside the quickstart's: generated ones of the field's sizes, and ETTh1 from its CSV.
# usage: scripts/bench_data.sh [ETTh1.csv]   files that are there already are kept
# PS_PROGRAMS: the folder of the programs, build/auto if unset.
set -euo pipefail
[ $# -le 1 ] || { echo "bench_data: one CSV at most: scripts/bench_data.sh [ETTh1.csv]" >&2; exit 2; }
csv=${1:+$(realpath -- "$1")}
cd "$(dirname "$0")/.."
build=${PS_PROGRAMS:-build/auto}

[ -x "$build/sample_series" ] || { echo "bench_data: $build/sample_series is missing: build first with scripts/build.sh" >&2; exit 2; }
mkdir -p runs
[ -e runs/weather.h5 ] || "$build/sample_series" runs/weather.h5 --hours 52696 --channels 21
[ -e runs/electricity.h5 ] || "$build/sample_series" runs/electricity.h5 --hours 26304 --channels 321
[ -e runs/seed28k.h5 ] || "$build/sample_series" runs/seed28k.h5 --windows 28000 --channels 20 --seq-len 24 --pred-len 1
if [ -n "$csv" ] && [ ! -e runs/ETTh1.h5 ]; then
    "$build/import_csv" "$csv" runs/ETTh1.h5
fi
