#!/usr/bin/env bash
# Builds and runs the quick tests. Options go to ctest: scripts/test.sh -R test_config
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/auto

scripts/setup.sh
scripts/build.sh
result=0
ctest --test-dir "$build" --label-regex quick --output-on-failure --no-tests=error "$@" || result=$?
# What a suite could not check here it says itself; a passing suite's output is in ctest's log alone.
awk '/^[0-9]+\/[0-9]+ Testing: / { suite = $3 } /^skipped: / && !seen[suite $0]++ { print suite ": " $0 }' \
    "$build/Testing/Temporary/LastTest.log"
exit "$result"
