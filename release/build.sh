#!/usr/bin/env bash
# Makes what users download, from the commit that is checked out: bash release/build.sh [PART...]
#
#   natives   the library, shared and static, and the command, with every GPU kernel embedded; debug symbols in files of their own
#   archives  nvfp4-VERSION-linux-ARCH.tar.xz of those, and SHA256SUMS
#   wheels    nvfp4-VERSION-py3-none-manylinux_2_28_ARCH.whl, the Python package with the library in it
#   nuget     LibNVFP4.VERSION.nupkg for .NET with the libraries in it, LibNVFP4.FSharp.VERSION.nupkg, and .snupkg with their symbols
#   check     builds the natives again in other folders, packs them, and compares each byte
#   licences  release/THIRD-PARTY.txt again, after a change of dependencies, in the checkout itself
#
# Without a part: natives, archives, wheels and nuget. A part takes what earlier ones left. Everything is for Linux with glibc 2.28 or later, on x86-64
# and AArch64; NVFP4_RELEASE_ARCHES="x86_64" makes one of them alone, and NVFP4_RELEASE_KERNELS a list of architectures, as in
# NVFP4_EMBED_KERNELS, or 0. Results, tools and caches are in $NVFP4_RELEASE (the folder `distribution` of cargo's target folder if
# unset): the artifacts in its folder `dist`.
#
# Needs rustup's cargo, python3 with venv, cmake, git, xz and readelf; the rest is installed into that folder. docs/release.md says more.
set -euo pipefail
cd "$(dirname "$0")/.."
source release/common.sh

readonly PARTS=(natives archives wheels nuget check licences) USUAL=(natives archives wheels nuget)

for part in "$@"; do
    [[ " ${PARTS[*]} " == *" $part "* ]] || usage "there is no part '$part': the parts are ${PARTS[*]}"
done
for arch in $ARCHES; do
    [[ " ${KNOWN_ARCHES[*]} " == *" $arch "* ]] || usage "NVFP4_RELEASE_ARCHES names '$arch': it takes ${KNOWN_ARCHES[*]}"
done
check_kernels
[ $# -gt 0 ] || set -- "${USUAL[@]}"
need git git
need cargo "Rust, by rustup (https://rustup.rs)"
mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd)

for part in "$@"; do
    # shellcheck disable=SC1090 # Every part is a file there.
    source "release/parts/$part.sh"
    start=$SECONDS
    say "part $part"
    "part_$part"
    say "part $part took $((SECONDS - start)) s"
done
