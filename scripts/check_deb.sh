#!/usr/bin/env bash
# Makes the Debian package and tries it on a bare Debian 12: installs it with what it depends on and nothing else, trains, evaluates
# and forecasts a sample there, and removes it. Takes some minutes, and needs the network for Debian's packages, mmdebstrap, and root
# or user namespaces.
# usage: scripts/check_deb.sh [MIRROR]   default: http://deb.debian.org/debian
set -euo pipefail
cd "$(dirname "$0")/.."
mirror=${1:-http://deb.debian.org/debian}
command -v mmdebstrap >/dev/null || { echo "check_deb: needs mmdebstrap: apt-get install mmdebstrap" >&2; exit 2; }

cmake --workflow --preset package >/dev/null
packages=(build/package/patchstep_*.deb)
[ ${#packages[@]} -eq 1 ] || { echo "check_deb: not one package: ${packages[*]}: remove the older" >&2; exit 2; }
package=$(realpath "${packages[0]}")
dpkg-deb --field "$package" Package Version Architecture Depends

folder=$(mktemp -d "${TMPDIR:-/tmp}/patchstep-deb-XXXXXX")
trap 'rm -rf "$folder"' EXIT
cat >"$folder/try.sh" <<'END'
set -eu
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
before=$(dpkg-query -f '.' -W | wc -c)
apt-get install -y -qq --no-install-recommends /patchstep.deb >/dev/null 2>&1 || apt-get install -y --no-install-recommends /patchstep.deb
echo "== installed, with $(($(dpkg-query -f '.' -W | wc -c) - before - 1)) packages that it depends on"
cd "$(mktemp -d)"
for program in $(dpkg -L patchstep | sed -n 's|^/usr/bin/||p'); do
    "$program" --help >help
    head -n 1 help
    [ -s "/usr/share/man/man1/$program.1" ]
done
echo "== a quick training"
sample_series sample.h5
train /usr/share/doc/patchstep/configs/quickstart.yaml --set data.path="$PWD/sample.h5" --set train.epochs=1 --run-dir run
evaluate run/checkpoints/best.h5
forecast run/checkpoints/best.h5 --out forecast.csv
echo "== $(($(wc -l <forecast.csv) - 1)) rows of forecast"
[ "$(wc -l <forecast.csv)" -eq 25 ]
ldd /usr/lib/*/libpatchstep.so | grep openblas-openmp >/dev/null # the one that it was tested with
apt-get purge -y -qq patchstep >/dev/null 2>&1
left=$(find / -xdev \( -name '*patchstep*' -o -name 'PatchStep*' \) ! -name patchstep.deb ! -path '/proc/*')
[ -z "$left" ] || { echo "left behind: $left"; exit 1; }
echo "== removed"
END
# shellcheck disable=SC2016 # "$1" is the hooks' own: the folder of the new system
mmdebstrap --quiet --variant=minbase --format=null \
    --customize-hook='cp "'"$package"'" "$1/patchstep.deb"' \
    --customize-hook='cp "'"$folder/try.sh"'" "$1/try.sh"' \
    --customize-hook='chroot "$1" sh /try.sh' \
    bookworm - "$mirror"
echo "check_deb: ${package##*/} installs and works on Debian 12"
