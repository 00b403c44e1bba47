#!/usr/bin/env bash
# Builds Debian's libhdf5 with libFuzzer's coverage and AddressSanitizer into build/hdf5, and the fuzz targets with it into
# build/fuzz-hdf5, for searches that see into libhdf5: scripts/fuzz.sh --build build/fuzz-hdf5. Takes minutes; needs Debian or Ubuntu
# and dpkg-dev. The system's own list of sources stays as it is.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh --fuzz
root=$PWD/build/hdf5
mkdir -p "$root/lists/partial" "$root/source"
. /etc/os-release
case "$ID" in
    debian) line="http://deb.debian.org/debian $VERSION_CODENAME main" ;;
    ubuntu) line="http://archive.ubuntu.com/ubuntu $VERSION_CODENAME main universe" ;;
    *) echo "fuzz_hdf5: $ID: neither Debian nor Ubuntu" >&2; exit 2 ;;
esac
echo "deb-src [signed-by=/usr/share/keyrings/$ID-archive-keyring.gpg] $line" >"$root/sources.list"
apt=(apt-get -qq -o Dir::Etc::sourcelist="$root/sources.list" -o Dir::Etc::sourceparts=/dev/null -o Dir::State::lists="$root/lists"
     -o APT::Sandbox::User=root)
if [ ! -d "$root/source/hdf5" ]; then
    "${apt[@]}" update
    (cd "$root/source" && "${apt[@]}" source --download-only hdf5 && dpkg-source -x ./hdf5_*.dsc hdf5 >/dev/null)
fi

mkdir -p "$root/build"
( # libhdf5's checks write where they run
    cd "$root/build"
    CC=clang CFLAGS="-O1 -g -fsanitize=fuzzer-no-link,address -fno-omit-frame-pointer" cmake -G Ninja "$root/source/hdf5" \
        --log-level=ERROR -DCMAKE_BUILD_TYPE=None -DCMAKE_INSTALL_PREFIX="$root" -DBUILD_SHARED_LIBS=OFF -DBUILD_TESTING=OFF \
        -DHDF5_BUILD_TOOLS=OFF -DHDF5_BUILD_UTILS=OFF -DHDF5_BUILD_EXAMPLES=OFF -DHDF5_BUILD_CPP_LIB=OFF -DHDF5_BUILD_FORTRAN=OFF \
        -DHDF5_BUILD_HL_LIB=OFF -DHDF5_ENABLE_Z_LIB_SUPPORT=ON -DHDF5_ENABLE_SZIP_SUPPORT=OFF >/dev/null
    ninja install >log 2>&1 || { tail -20 log >&2; exit 1; }
)
cmake --preset fuzz -B build/fuzz-hdf5 --log-level=WARNING -DHDF5_ROOT="$root" -DHDF5_USE_STATIC_LIBRARIES=ON \
    -DHDF5_NO_FIND_PACKAGE_CONFIG_FILE=ON >/dev/null
cmake --build build/fuzz-hdf5 --target fuzz
