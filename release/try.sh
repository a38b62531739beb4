#!/usr/bin/env bash
# Tries the archives, the wheels and the NuGet packages in systems that have nothing of ours: bash release/try.sh [ARCH...]
#
# For x86_64 that is Debian 11, for aarch64 Debian 12 under qemu-user: each a root that debootstrap makes, with gcc, make, cmake,
# pkg-config and Python, and without a network. There the archive is unpacked (try-inside.sh); the C example is built as the archive's
# README.md says, and by CMake; both answer with the model of tests/data, and so does the command, word for word; the command prints its
# help, a manual page and what it finds. The wheel is installed into a virtual environment, and answers too (try-wheel.sh). So do
# new programs in C# and F# that add the packages (try-nuget.sh), by an SDK that is put there with libssl 1.1, as Debian has none. Needs root,
# and Debian packages that it names where they are missing. Roots are kept in $NVFP4_RELEASE/roots.
set -euo pipefail
cd "$(dirname "$0")/.."
source release/common.sh
source release/parts/wheels.sh
source release/parts/nuget.sh

# The kernel runs programs for AArch64 with qemu, also those that a program in the root starts.
emulate_aarch64() {
    local registry=/proc/sys/fs/binfmt_misc qemu magic mask
    [ "$(uname -m)" != aarch64 ] || return 0
    [ -e $registry/register ] || mount -t binfmt_misc binfmt_misc $registry || fail "binfmt_misc cannot be mounted, which qemu needs"
    [ ! -e $registry/qemu-aarch64 ] || return 0
    need qemu-aarch64-static qemu-user-static
    qemu=$(command -v qemu-aarch64-static)
    # An ELF file of 64 bits, little-endian, a program or a shared one, for machine 183. F: the interpreter is opened now, outside the root.
    magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
    mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
    printf '%s' ":qemu-aarch64:M::$magic:$mask:$qemu:F" >$registry/register
}

# What the roots have beside a minimal Debian.
readonly PACKAGES=gcc,libc6-dev,make,cmake,pkg-config,xz-utils,python3-venv

# make_root ARCH FOLDER: again, if the one that is there was made with other packages.
make_root() {
    local arch=$1 root=$2 suite debian
    ! cmp -s "$root/whole" - <<<"$PACKAGES" || return 0
    case $arch in
        x86_64) suite=bullseye debian=amd64 ;;
        aarch64) suite=bookworm debian=arm64 ;;
    esac
    say "a root of Debian $suite for $debian"
    rm -rf "$root" && mkdir -p "$root"
    debootstrap --arch="$debian" --variant=minbase --include="$PACKAGES" "$suite" "$root" \
        >"$root.log" || { tail -5 "$root.log"; fail "debootstrap could not make $root"; }
    echo "$PACKAGES" >"$root/whole"
}

# inside ROOT COMMAND...: without a network, of which there is not even an address.
inside() {
    # shellcheck disable=SC2016 # It is the inner shell that expands them.
    unshare --net --mount bash -c 'mount -t proc proc "$1/proc" && exec chroot "$1" /usr/bin/env -i PATH=/usr/bin:/bin HOME=/root LC_ALL=C.UTF-8 "${@:2}"' \
        inside "$@"
}

try() {
    local arch=$1 root=$OUT/roots/$1 archive=nvfp4-$VERSION-linux-$1.tar.xz wheel artifact sdk
    wheel=$(wheel_name "$arch")
    sdk=$(dotnet_sdk "$arch")
    for artifact in "$archive" "$wheel" "${DOTNET_PACKAGES[@]/%/.$VERSION.nupkg}"; do
        [ -e "$OUT/dist/$artifact" ] || fail "$OUT/dist/$artifact is missing: run 'bash release/build.sh'"
    done
    [ "$arch" != aarch64 ] || emulate_aarch64
    make_root "$arch" "$root"
    rm -rf "$root/try" && mkdir "$root/try"
    cp -rL "$OUT/dist/$archive" "$OUT/dist/$wheel" tests/data/verse-10m release/try-{inside,wheel,nuget}.sh "$root/try"
    give_packages "$OUT/dist" "$sdk" "$root/try/packages"
    cp -r "$sdk" "$root/try/dotnet"
    say "trying $archive"
    inside "$root" bash /try/try-inside.sh "${archive%.tar.xz}" || fail "$archive failed in $root"
    say "trying $wheel"
    inside "$root" bash /try/try-wheel.sh "$wheel" || fail "$wheel failed in $root"
    say "trying the NuGet packages"
    inside "$root" bash /try/try-nuget.sh "$VERSION" || fail "the NuGet packages failed in $root"
    rm -r "$root/try/dotnet"
    say "$arch: all of it worked"
}

for arch in "$@"; do
    [[ " ${KNOWN_ARCHES[*]} " == *" $arch "* ]] || usage "there is no architecture '$arch': it takes ${KNOWN_ARCHES[*]}"
done
[ -d "$OUT/dist" ] || fail "there is nothing to try in $OUT: run 'bash release/build.sh'"
OUT=$(cd "$OUT" && pwd)
[ "$(id -u)" -eq 0 ] || fail "chroot needs root"
need debootstrap debootstrap
read -ra arches <<<"$ARCHES"
for arch in "${@:-${arches[@]}}"; do
    try "$arch"
done
