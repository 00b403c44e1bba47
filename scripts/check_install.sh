#!/usr/bin/env bash
# Installs a build into a folder, moves it, and builds and runs the examples against it: both must forecast what `forecast` does.
# usage: scripts/check_install.sh [BUILD]   default: build/auto, which must have been built
set -euo pipefail
cd "$(dirname "$0")/.."
build=$(realpath "${1:-build/auto}") examples=$PWD/examples
folder=$(mktemp -d "${TMPDIR:-/tmp}/patchstep-install-XXXXXX")
trap 'rm -rf "$folder"' EXIT
fail() { echo "check_install: $*" >&2; exit 1; }

cmake --install "$build" --prefix "$folder/first" >/dev/null
mv "$folder/first" "$folder/prefix"
prefix=$folder/prefix
bin=$prefix/bin
library=$(find "$prefix" -name 'libpatchstep.so')
[ -n "$library" ] || fail "no libpatchstep.so in what was installed"
lib=$(dirname "$library")
export PKG_CONFIG_PATH=$lib/pkgconfig PATH=$bin:$PATH
cd "$folder"
if grep -rIl "$folder/first" "$prefix" >&2; then
    fail "these name the folder that they were installed into"
fi
exported=$(nm -D --defined-only --with-symbol-versions "$library" | awk '$2 != "A" { print $3 }')
if wrong=$(grep -vE '^(patchstep_[a-z_]+@@PATCHSTEP_[0-9]+\.[0-9]+|ps_[a-z0-9_]+@@PATCHSTEP_PRIVATE)$' <<<"$exported"); then
    fail "exports what is neither patchstep_* nor ps_*, or without a version: $wrong"
fi
# shellcheck disable=SC2013 # names have no blanks
for name in $(sed -n 's/^[a-z].*[ *]\(patchstep_[a-z_]*\)(.*/\1/p' "$prefix/include/patchstep.h"); do
    grep -q "^$name@@PATCHSTEP_[0-9]" <<<"$exported" || fail "$name is in the header and not in the library"
done
for program in "$bin"/*; do
    "$program" --help >/dev/null
    [ -s "$prefix/share/man/man1/${program##*/}.1" ] || fail "no manual page of ${program##*/}"
done

# A series with seasons, and a model that has seen it once.
awk 'BEGIN {
    print "load,wind,price"
    for (t = 0; t < 400; t++) {
        printf "%.4f,%.4f,%.4f\n", 100 + 9 * sin(t * 0.26) + t % 7, 3 * cos(t * 0.13) + t % 5, 40 + 5 * sin(t * 0.5) + t % 3
    }
}' >series.csv
import_csv series.csv series.h5 >/dev/null
cat >config.yaml <<'END'
data: {path: series.h5}
model: {seq_len: 48, pred_len: 12, patch_len: 8, stride: 4, d_model: 16, n_heads: 4, d_ff: 32, n_layers: 2}
train: {epochs: 1, batch_size: 16}
END
train config.yaml --run-dir run >/dev/null
best=run/checkpoints/best.h5
forecast "$best" --data series.csv | cut -d, -f2- >expected # without the column of rows

# The same header and numbers: the first writes the shortest decimals, the examples nine digits.
same() {
    awk -F, -v name="$1" '
        function fail(what) { print "check_install: " name ": " what > "/dev/stderr"; failed = 1; exit 1 }
        NR == FNR { line[FNR] = $0; lines = FNR; next }
        FNR == 1 { if ($0 != line[1]) fail("header " $0 ", not " line[1]); next }
        {
            n = split(line[FNR], wanted)
            if (n != NF) fail("line " FNR " has " NF " numbers, not " n)
            for (i = 1; i <= n; i++) {
                d = $i - wanted[i]
                if (d < 0) d = -d
                if (d > 1e-6 * (wanted[i] < 0 ? -wanted[i] : wanted[i])) fail("line " FNR ": " $i ", not " wanted[i])
            }
        }
        END { if (!failed && (FNR != lines || lines < 2)) fail(FNR " lines, not " lines) }' expected "$2"
    echo "$1: the same $(($(wc -l <"$2") - 1)) rows as forecast"
}

# shellcheck disable=SC2046 # options, one a word
cc -std=c17 -D_GNU_SOURCE -Wall -Wextra -Werror "$examples/forecast.c" -o with_pkg_config $(pkg-config --cflags --libs patchstep)
LD_LIBRARY_PATH=$lib ./with_pkg_config "$best" series.csv >found
same "forecast.c by pkg-config" found
cmake -S "$examples" -B with_cmake -DCMAKE_PREFIX_PATH="$prefix" >cmake.log 2>&1 || { cat cmake.log >&2; exit 1; }
cmake --build with_cmake >cmake.log 2>&1 || { cat cmake.log >&2; exit 1; }
with_cmake/forecast "$best" series.csv 200 >found
same "forecast.c by CMake" found

python=
for candidate in python3 /usr/bin/python3; do # the system's too, for which the packages are, when another stands before it
    if [ -z "$python" ] && "$candidate" -c 'import numpy' 2>/dev/null; then
        python=$candidate
    fi
done
if [ -n "$python" ]; then
    PATCHSTEP_LIBRARY=$lib/libpatchstep.so.0.1 "$python" "$examples/forecast.py" "$best" series.csv >found
    same "forecast.py" found
else
    echo "skipped: forecast.py: no python3 with numpy"
fi
