#!/usr/bin/env bash
# Installs the Debian packages that PatchStep needs and this machine lacks.
# usage: scripts/setup.sh [--plots] [--fuzz] [--mpi]   --plots: also what scripts/plot.py needs; --fuzz: what scripts/fuzz.sh needs;
#                                                      --mpi: what training by several processes needs
set -euo pipefail

packages=(build-essential cmake ninja-build pkg-config libhdf5-dev zlib1g-dev libopenblas-openmp-dev libcyaml-dev libyaml-dev
          librandom123-dev libjansson-dev libssl-dev check)
commands=(cc cmake ninja pkg-config)
modules=(zlib openblas libcyaml yaml-0.1 jansson libcrypto check)
for option in "$@"; do
    case "$option" in
        --plots) packages+=(python3-matplotlib python3-h5py); commands+=(python3) ;;
        --fuzz) packages+=(clang libclang-rt-dev libomp-dev); commands+=(clang) ;;
        --mpi) packages+=(libopenmpi-dev openmpi-bin); commands+=(mpirun mpicc) ;;
        *) echo "setup: $option: unknown option: --plots, --fuzz, --mpi or nothing" >&2; exit 2 ;;
    esac
done

missing=()
if command -v dpkg-query >/dev/null && command -v apt-get >/dev/null; then
    for package in "${packages[@]}"; do
        case "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)" in
            installed) ;;
            *) missing+=("$package") ;;
        esac
    done
    [ ${#missing[@]} -gt 0 ] || exit 0
    root=()
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || { echo "setup: missing packages and no sudo; as root: apt-get install ${missing[*]}" >&2; exit 2; }
        root=(sudo)
    fi
    echo "setup: installing ${missing[*]}"
    "${root[@]}" apt-get update -qq
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
else
    for command in "${commands[@]}"; do
        command -v "$command" >/dev/null || missing+=("$command")
    done
    for module in "${modules[@]}"; do
        pkg-config --exists "$module" 2>/dev/null || missing+=("$module")
    done
    if [ ${#missing[@]} -gt 0 ]; then
        echo "setup: not Debian or Ubuntu, and missing here: ${missing[*]}: install what Debian calls ${packages[*]}" >&2
        exit 2
    fi
fi
