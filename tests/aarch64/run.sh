#!/usr/bin/env bash
# The library on AArch64, from a machine that is not: bash tests/aarch64/run.sh
#
# Cross-compiles without a warning and runs under qemu-user: the CPU kernels, NEON against the portable level bit for bit;
# the golden values of number formats and models; with NVFP4_LONG all other tests of models, those of gradients, and training runs; the
# library's symbols, and C programs linked with it; a wheel, by a Python for AArch64.
#
# Fetches missing tools: gcc, its C library and qemu with apt-get, if that is allowed; the target with rustup, or else Debian's newest Rust
# compiler and target, unpacked only for this (NVFP4_AARCH64_RUST=debian takes them in any case). Missing parts are SKIPPED, or fail if
# NVFP4_REQUIRE names aarch64. An AArch64 machine runs all tests itself and has nothing to do here. The last line is "N passed, N failed, N
# skipped".
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/common/checks.sh
source tests/common/wheel.sh
source tests/aarch64/debian.sh

triple=aarch64-unknown-linux-gnu
compiler=aarch64-linux-gnu-gcc
emulator=(qemu-aarch64 -L /usr/aarch64-linux-gnu)
model=tests/golden/model/qwen3_tied
target=${CARGO_TARGET_DIR:-target}
target=$(mkdir -p "$target" && cd "$target" && pwd) || exit 1
debian=$target/debian
soname=libNVFP4.so.$(package_version | cut -d. -f1)
mkdir "$work/scratch"

# Prints the Debian packages of missing tools.
missing_packages() {
    command -v "$compiler" >/dev/null || echo gcc-aarch64-linux-gnu
    [ -e /usr/aarch64-linux-gnu/lib/libc.so ] || echo libc6-dev-arm64-cross
    command -v "${emulator[0]}" >/dev/null || echo qemu-user
}

# has_target RUSTC
has_target() { [ -d "$("$1" --print target-libdir --target $triple)" ]; }

# Chooses the compiler, or leaves in $lacks why there is none.
choose_rust() {
    local rustc needed has
    if [ -z "${NVFP4_AARCH64_RUST-}" ] && command -v rustc >/dev/null; then
        ! has_target rustc || return 0
        if command -v rustup >/dev/null; then
            rustup --quiet target add $triple && return
        fi
    fi
    if ! rustc=$(again debian_rust) || ! has_target "$rustc"; then
        lacks="rustc's $triple, which neither rustup nor Debian's libstd-rust-web-dev:arm64 could bring"
        return
    fi
    needed=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    has=$("$rustc" --version | cut -d' ' -f2)
    if [ "$(printf '%s\n' "$needed" "$has" | sort -V | head -1)" != "$needed" ]; then
        # Another day Debian may have a newer one.
        rm "$debian/rust/whole"
        lacks="rustc $needed for $triple, and Debian's rustc-web is $has"
        return
    fi
    echo "by Debian's $("$rustc" --version)"
    export RUSTC=$rustc
}

get_what_is_missing() {
    local packages
    mapfile -t packages < <(missing_packages)
    [ ${#packages[@]} -eq 0 ] || install_packages "${packages[@]}"
    choose_rust
}

# Without optimising dependencies: compiling costs more than the tests take, even emulated. What runs while compiling is shared with the
# release build.
cross() {
    local command=$1
    shift
    NVFP4_REQUIRE=neon cargo "$command" --locked --color never --target $triple "${CHECKED[@]}" --config 'profile.release.package."*".opt-level=0' "$@"
}

# Runs test files and counts their tests.
rust_tests() {
    local log=$work/rust code result ok=0 bad=0
    cross test --no-fail-fast "$@" 2>&1 | tee "$log" | without_compiling
    code=${PIPESTATUS[0]}
    while read -r result; do
        ok=$((ok + $(grep -oE '[0-9]+ passed' <<<"$result" | grep -oE '[0-9]+')))
        bad=$((bad + $(grep -oE '[0-9]+ failed' <<<"$result" | grep -oE '[0-9]+')))
    done < <(grep '^test result:' "$log")
    # Not compiled, or killed.
    [ "$code" -ne 0 ] && [ "$bad" -eq 0 ] && bad=1
    [ "$ok" -eq 0 ] && [ "$bad" -eq 0 ] && bad=1
    passed=$((passed + ok)) failed=$((failed + bad))
}

neon_is_chosen() {
    local said
    said=$("${emulator[@]}" "$build/nvfp4" diagnose) && echo "$said" && grep -q 'kernels neon' <<<"$said"
}

# The structs have the same layout in C as in Rust.
layout() { python3 tests/c/layout.py | $compiler -std=c11 -Iinclude -fsyntax-only -xc -; }

# The library exports exactly the header's declarations, under a soname that programs find beside it, and stays loaded.
symbols() {
    local dynamic
    aarch64-linux-gnu-nm -D --defined-only "$build/libNVFP4.so" | awk '{ print $NF }' | sort -u >"$work/exported" || return 1
    diff --label "exported by libNVFP4.so" --label "declared in nvfp4.h" -u "$work/exported" "$work/declared" || return 1
    dynamic=$(aarch64-linux-gnu-readelf -dW "$build/libNVFP4.so") || return 1
    grep -qF "[$soname]" <<<"$(grep SONAME <<<"$dynamic")" || { echo "no soname $soname"; return 1; }
    [ "$(readlink "$build/$soname")" = libNVFP4.so ] || { echo "no link $soname beside it"; return 1; }
    grep -q 'FLAGS_1.*NODELETE' <<<"$dynamic" || { echo "not linked with -z nodelete"; return 1; }
}

# program SOURCE ARGUMENT...: compiles a C program and runs it.
program() {
    local source=$1
    shift
    $compiler -std=c11 -Wall -Wextra -Werror -Iinclude "$source" -o "$work/program" \
        -L"$build" -lNVFP4 "-Wl,-rpath,$build" -lm -pthread && "${emulator[@]}" "$work/program" "$@"
}

# A wheel of the library, installed by pip and asked, in a Python that has nothing else.
wheel_answers() {
    local system=$1
    pack_package "$build/libNVFP4.so" linux_aarch64 1700000000 "$work/wheel" && mkdir "$work/try-wheel" &&
        cp -r "$work/wheel/"*.whl tests/data/verse-10m release/try-wheel.sh "$work/try-wheel" &&
        bash "$work/try-wheel/try-wheel.sh" "$(basename "$work/wheel/"*.whl)" qemu-aarch64 -L "$system" "$system/usr/bin/python3"
}

if [ "$(uname -m)" = aarch64 ]; then
    echo "This machine is AArch64: the other tests are those of its kernels."
    exit
fi
if [[ ${NVFP4_AARCH64_RUST:-debian} != debian ]]; then
    echo "NVFP4_AARCH64_RUST is '$NVFP4_AARCH64_RUST': it takes debian, or nothing" >&2
    exit 2
fi
lacks=
get_what_is_missing
mapfile -t lacking < <(missing_packages; command -v cargo >/dev/null || echo cargo; [ -z "$lacks" ] || echo "$lacks")
if [ ${#lacking[@]} -gt 0 ]; then
    skip "everything" "running AArch64 code needs ${lacking[*]}" aarch64
    finish
fi

export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=$compiler
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="${emulator[*]}"
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS=-Dwarnings
unset NVFP4_CPU RUSTFLAGS
# An emulated processor takes longer to compile a grammar.
export NVFP4_GRAMMAR_MS=20000

rust_tests --test cpu --test format_golden
# Some of these count all memory of their process, which no other test may use meanwhile. What stands between the kernels is the same code
# everywhere, so that all of these run only where tests are long; but for 131,072 positions, which take ten minutes here.
if [ -n "${NVFP4_LONG-}" ]; then
    rust_tests --test model -- --test-threads=1 --skip long_positions
else
    rust_tests --test model -- --exact logits_agree_with_transformers massive_activations_agree_with_transformers \
        threads_and_int8_activations a_batch_gives_each_sequence_its_own_bits
fi
# Gradients against autograd, and steps of every kind, are arithmetic of the kernels above, so that they run where tests are long. What is
# left out even there takes a minute or more each, or counts all memory of a process of its own.
if [ -n "${NVFP4_LONG-}" ]; then
    rust_tests --test training -- --skip adapters_learn_beside --skip four_bits_learn --skip memory:: --skip models_learn \
        --skip mixtures_learn --skip conversions_keep --skip stacks_of_experts --skip scales_are_chosen --skip a_streamed_teacher \
        --skip stochastic_gradients --skip what_resumes --skip what_learns_nothing --skip lessons_bring --skip calibration_is_never_worse \
        --skip recurrent_layers_learn --skip recurrent_models_are_calibrated --skip adapters_have_the_names
fi
# Nothing is left to compile: this puts libNVFP4.so beside the command.
if cross build --quiet --lib; then
    build=$(cd "$target/$triple/release" && pwd)
    $compiler -E -P -Iinclude -xc - <<<"#include <nvfp4.h>" | grep -oE '\bNVFP4_[A-Za-z0-9_]+[[:space:]]*\(' | tr -d '( \t' |
        sort -u >"$work/declared"
    check "nvfp4 diagnose chooses NEON" neon_is_chosen
    check "symbols" symbols
    check "layout" layout
    check "tensors" program tests/c/tensors.c
    check "drop_in" program tests/c/drop_in.c
    check "errors" program tests/c/errors.c "$work/declared" "$model"
    check "sessions" program tests/c/sessions.c "$model" "$work/scratch"
    check "dlopen" program examples/c/dlopen.c "$build/libNVFP4.so"
    if ! python=$(again debian_python); then
        skip "the wheel" "Debian's python3-pip for arm64 could not be had" aarch64
    elif ! again wheel_tools >"$work/log" 2>&1; then
        skip "the wheel" "$(tail -1 "$work/log")" aarch64
    else
        check "a wheel, installed without a network, answers" wheel_answers "$python"
    fi
else
    failed=$((failed + 1))
fi
finish
