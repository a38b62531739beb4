# What the parts of a release share: where things are, and the tools that they take. Sourced from the repository's root.
# shellcheck shell=bash

# The versions that decide the bytes of the natives, beside rustc's.
readonly ZIG=ziglang==0.17.1 ZIGBUILD=cargo-zigbuild==0.24.1 NVRTC=nvidia-cuda-nvrtc==13.0.88
readonly CYCLONEDX=0.5.9 ABOUT=0.9.3
# The tools that pack and inspect the wheels.
readonly SETUPTOOLS=setuptools==84.2.1 BUILD=build==1.6.1 AUDITWHEEL=auditwheel==6.8.2
readonly GLIBC=2.28
readonly KNOWN_ARCHES=(x86_64 aarch64)

ARCHES=${NVFP4_RELEASE_ARCHES:-${KNOWN_ARCHES[*]}}
KERNELS=${NVFP4_RELEASE_KERNELS:-1}
OUT=${NVFP4_RELEASE:-${CARGO_TARGET_DIR:-target}/distribution}
VERSION=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
readonly ARCHES KERNELS VERSION

say() { printf '== %s\n' "$*"; }
fail() { printf 'release: %s\n' "$*" >&2; exit 1; }
usage() { printf 'release: %s\n' "$*" >&2; exit 2; }

# need COMMAND WHAT: ends with one line unless the command is there.
need() { command -v "$1" >/dev/null || fail "$1 is missing: install $2"; }

# Ends with one line if NVFP4_RELEASE_KERNELS is not what build.rs takes.
check_kernels() {
    local known name
    known=$(sed -n '/^pub const TARGETS/,/;/p' src/cuda/driver/nvrtc.rs | grep -oE 'sm_[0-9a-z]+' | xargs)
    [[ $KERNELS != [01] ]] || return 0
    for name in ${KERNELS//,/ }; do
        [[ " $known " == *" $name "* ]] || usage "NVFP4_RELEASE_KERNELS names '$name': it takes architectures of $known with commas between them, 1 for all, or 0"
    done
}

# export_source COMMIT FOLDER: a copy of the commit, so that nothing else of the checkout gets into a release, and its time in
# FOLDER.epoch, which is that of every file.
export_source() {
    rm -rf "$2" && mkdir -p "$2" && git archive "$1" | tar x -C "$2"
    git log -1 --format=%ct "$1" >"$2.epoch"
    git rev-parse "$1" >"$2.commit"
}

# virtual_environment NAME REQUIREMENT...: the folder of one, which is named after the versions in it as well. A file in it says that it is
# whole, as it cannot be moved.
virtual_environment() {
    local folder=$OUT/tools/$1
    shift
    folder+=$(printf -- '-%s' "${@#*==}")
    if [ ! -e "$folder/whole" ]; then
        need python3 "python3 and python3-venv"
        rm -rf "$folder"
        python3 -m venv "$folder" >&2 || fail "python3 -m venv does not work: install python3-venv"
        "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@" >&2 || fail "pip could not install $*"
        touch "$folder/whole"
    fi
    echo "$folder"
}

# What PyPI has of the tools that compile.
python_tools() { virtual_environment python "$ZIG" "$ZIGBUILD" "$NVRTC"; }

# cargo_tool NAME VERSION [OPTION...]: the path of a tool that cargo installs.
cargo_tool() {
    local name=$1 version=$2 folder=$OUT/tools/$1-$2
    shift 2
    if [ ! -x "$folder/bin/$name" ]; then
        say "compiling $name $version" >&2
        CARGO_TARGET_DIR=$OUT/tools/cargo cargo install --quiet --locked --root "$folder" "$name@$version" "$@" >&2 ||
            fail "cargo could not install $name $version"
    fi
    echo "$folder/bin/$name"
}

# objcopy ARGUMENT...: rustc's own, which knows every architecture, and whose libraries are beside it; or LLVM's.
objcopy() {
    local sysroot own
    sysroot=$(rustc --print sysroot)
    own=$sysroot/lib/rustlib/$(rustc -vV | sed -n 's/^host: //p')/bin/rust-objcopy
    if LD_LIBRARY_PATH=$sysroot/lib "$own" --version >/dev/null 2>&1; then
        LD_LIBRARY_PATH=$sysroot/lib "$own" "$@"
    else
        need llvm-objcopy "Debian's llvm, or rustc by rustup, which brings one"
        llvm-objcopy "$@"
    fi
}

# The standard library for an architecture.
need_target() {
    local triple=$1
    [ -d "$(rustc --print target-libdir --target "$triple")" ] && return
    if command -v rustup >/dev/null; then
        rustup --quiet target add "$triple" >&2 && return
        fail "rustup could not add the target $triple: try 'rustup target add $triple' where its server can be reached"
    fi
    fail "rustc has no target $triple: install Rust by rustup, and 'rustup target add $triple'"
}

native_folder() { echo "$OUT/natives/linux-$1"; }

# The sums of all artifacts, after each part that makes some.
sum_artifacts() {
    local sums
    sums=$(cd "$OUT/dist" && find . -type f ! -name SHA256SUMS -printf '%P\n' | LC_ALL=C sort | xargs -d '\n' sha256sum --)
    echo "$sums" >"$OUT/dist/SHA256SUMS"
}

# The notices of Rust's standard library, which is linked into the natives too.
standard_library_notices() {
    local file
    file=$(rustc --print sysroot)/share/doc/rust/COPYRIGHT-library.html
    [ -e "$file" ] || fail "rustc has no $file, the notices of its standard library: install Rust by rustup"
    echo "$file"
}

# unnamed_crates SOURCE: the crates, with their versions, that are linked for either architecture and that its THIRD-PARTY.txt does not name.
unnamed_crates() {
    local arch source=$1
    comm -23 <(for arch in "${KNOWN_ARCHES[@]}"; do
        cargo tree --manifest-path "$source/Cargo.toml" --locked --edges normal --prefix none --format '{p}' --target "$arch-unknown-linux-gnu"
    done | awk '$1 != "nvfp4" { print $1, substr($2, 2) }' | sort -u) \
        <(sed -nE 's/^    ([^ ]+ [0-9][^ ]*)$/\1/p' "$source/release/THIRD-PARTY.txt" | sort -u)
}

# The first heading of CHANGELOG.md, without its marks: "VERSION (unreleased)", "VERSION (DATE)" or "Unreleased".
changelog_heading() { sed -n 's/^## //p' CHANGELOG.md | head -1; }

# is_unreleased VERSION: whether CHANGELOG.md says so of it.
is_unreleased() { [ "$(changelog_heading)" = "$1 (unreleased)" ]; }

# The newest version whose header is kept in tests/abi.
last_header() {
    local found
    found=$(find tests/abi -path 'tests/abi/*/nvfp4.h' | cut -d/ -f3 | sort -V | tail -1)
    [ -n "$found" ] || fail "tests/abi has the header of no release"
    echo "$found"
}

# Installs abidiff where that is allowed.
install_abidiff() {
    local as_root=()
    [ "$(id -u)" -eq 0 ] || as_root=(sudo -n)
    "${as_root[@]}" apt-get update -qq &&
        DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends abigail-tools
}
