#!/usr/bin/env bash
# Builds everything into build/auto, CUDA included where it is there. Options go to CMake: scripts/build.sh -DPS_CUDA=ON
set -euo pipefail
cd "$(dirname "$0")/.."

cmake --preset auto --log-level=WARNING "$@"
cmake --build --preset auto
