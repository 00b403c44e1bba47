#!/usr/bin/env bash
# This project's training step beside those of PyTorch and JAX, of the same model and sizes on the same device, in one go.
# usage: scripts/bench_peers.sh [cuda|cpu] [shape,shape,...]   shapes: seed28k, etth1, weather, electricity; on the CPU the first two
# PS_PROGRAMS: the folder of the programs, build/auto if unset. The data comes from scripts/bench_data.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
device=${1:-cuda} programs=${PS_PROGRAMS:-build/auto}
case $device in
    cuda) shapes=${2:-seed28k,etth1,weather,electricity} ;;
    cpu) shapes=${2:-seed28k,etth1} ;;
    *) echo "bench_peers: $device: cuda or cpu" >&2; exit 2 ;;
esac
[ -x "$programs/bench" ] || { echo "bench_peers: $programs/bench is missing: build first with scripts/build.sh" >&2; exit 2; }
found=$(mktemp -d)
trap 'rm -rf "$found"' EXIT

for shape in ${shapes//,/ }; do
    echo "== bench configs/$shape.yaml --compare --device $device"
    "$programs/bench" "configs/$shape.yaml" --compare --json --steps 60 --device "$device" >"$found/$shape.json" ||
        echo "bench_peers: $shape: no figures of ours" >&2
done
touch "$found/peers.txt"
peer() { # a peer that is not installed is named and left out
    if ! python3 -c "import $2" 2>/dev/null; then
        echo "== $1 is not installed for $(command -v python3): left out"
        return
    fi
    echo "== $3"
    shift 2
    OMP_WAIT_POLICY=passive python3 "$@" | tee -a "$found/peers.txt"
}
if [ "$device" = cuda ]; then
    peer JAX "jax, optax" scripts/peers/jax_step.py "$shapes"
fi
peer PyTorch torch scripts/peers/torch_step.py --device "$device" "$shapes"
echo
python3 scripts/peers/table.py "$found" "$shapes"
