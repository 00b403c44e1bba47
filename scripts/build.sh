#!/usr/bin/env bash
# Builds into build/auto: for the CPU, and with CUDA for the GPUs of this machine.
# usage: scripts/build.sh [--all] [--programs] [-DOPTION=VALUE...]   options go to CMake
#   --all       CUDA for every GPU; later builds keep to that until -DPS_CUDA=AUTO
#   --programs  without the tests
set -euo pipefail
cd "$(dirname "$0")/.."

options=() target=all
for option in "$@"; do
    case "$option" in
        --all) options+=(-DPS_CUDA=ON) ;;
        --programs) target=programs ;;
        *) options+=("$option") ;;
    esac
done
cmake --preset auto --log-level=NOTICE "${options[@]}"
cmake --build --preset auto --target "$target"
