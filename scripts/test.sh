#!/usr/bin/env bash
# Builds and runs the quick tests, on a machine without a GPU one more at once than there are cores (some suites mostly wait); a GPU
# they would share. Options go to ctest: scripts/test.sh -R test_config --parallel 1
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/auto

scripts/setup.sh
scripts/build.sh
parallel=$(($(nproc) < 7 ? $(nproc) + 1 : 8))
[ ! -e /dev/nvidiactl ] || parallel=1
result=0
ctest --test-dir "$build" --label-regex quick --parallel "$parallel" --output-on-failure --no-tests=error "$@" || result=$?
# What a suite could not check here it says itself; a passing suite's output is in ctest's log alone.
awk '/^[0-9]+\/[0-9]+ Testing: / { suite = $3 } /^skipped: / && !seen[suite $0]++ { print suite ": " $0 }' \
    "$build/Testing/Temporary/LastTest.log"
exit "$result"
