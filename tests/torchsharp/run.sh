#!/usr/bin/env bash
# The drop-in functions with tensors of a real libtorch: bash tests/torchsharp/run.sh, with libNVFP4.so in $NVFP4_BUILD
# (target/release if unset).
#
# host.c is a TorchSharp host and torchsharp.cpp the native half of TorchSharp, as far as they concern this library. They run with
# the oldest libtorch that the library knows and with a new one, from the pip package torch in virtual environments under
# target/torch, made at the first run; or with the one in the folder $NVFP4_TORCH (site-packages/torch), which is how a machine with
# a GPU tests its own. The last line is "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/common/checks.sh

versions=(2.10.0 2.15.0)
# Libraries that libtorch_cpu.so of PyPI's x86-64 packages is linked with; those for other machines need nothing.
declare -A with=(
    [2.10.0]="nvidia-cuda-runtime-cu12==12.8.90 nvidia-cuda-cupti-cu12==12.8.90"
    [2.15.0]="nvidia-cuda-runtime==13.2.86 nvidia-cuda-cupti==13.2.86"
)
library=$(cd "${NVFP4_BUILD:-target/release}" && pwd)/libNVFP4.so || exit 1
cache=$(mkdir -p "${CARGO_TARGET_DIR:-target}/torch" && cd "${CARGO_TARGET_DIR:-target}/torch" && pwd) || exit 1

# measured NAME COMMAND...: a test, with its skips and measurements shown.
measured() {
    local before=$passed
    check "$@"
    [ "$passed" -gt "$before" ] || return
    grep -E '^(SKIPPED|quantizing|10000 calls|NVFP4_scaled_mm of|host:)' "$work/log" | sed "s/^SKIPPED/SKIPPED $1:/; t; s/^/    /"
    grep -q '^SKIPPED' "$work/log" && skipped=$((skipped + 1))
}

# install VERSION: libtorch of this version, without parts that no test needs; prints the folder of the package torch.
install() {
    local version=$1 home=$cache/$1
    if [ ! -f "$home/complete" ]; then
        rm -rf "$home"
        local packages=("torch==$version")
        # shellcheck disable=SC2206 # Several words.
        [ "$(uname -m)" = x86_64 ] && packages+=(${with[$version]})
        python3 -m venv "$home" &&
            "$home/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-compile --no-deps "${packages[@]}" ||
            { rm -rf "$home"; return 1; }
        # The halves for GPUs are the greater part, and cannot be loaded without a dozen other packages.
        find "$home" -name 'libtorch_cuda*' -o -name 'libtorch_nvshmem*' -o -name 'libtorch_python*' | xargs rm -f
        touch "$home/complete"
    fi >&2
    dirname "$(find "$home" -path '*/torch/version.py' | head -1)"
}

# compile TORCH: both sides.
compile() {
    rm -f "$work/libLibTorchSharp.so"
    g++ -std=c++20 -fPIC -shared -fvisibility=hidden -Wall -Wextra -Werror -isystem "$1/include" tests/torchsharp/torchsharp.cpp \
        -Wl,-soname,libLibTorchSharp.so -Wl,-rpath,"$1/lib" -L"$1/lib" -ltorch_cpu -lc10 -o "$work/libLibTorchSharp.so" &&
        gcc -std=gnu11 -g -Wall -Wextra -Wshadow -Werror -Iinclude tests/torchsharp/host.c -o "$work/host" -ldl -lm -pthread
}

# Nothing of libtorch or CUDA, and nothing at all that the loader does not find.
needs_neither() {
    # Without addresses, whose digits may happen to spell c10.
    ldd "$library" | sed -E 's/ \(0x[0-9a-f]+\)$//' >"$work/ldd" || return 1
    cat "$work/ldd"
    ! grep -qE 'torch|c10|cuda|cudart|cublas|nvrtc|not found' "$work/ldd"
}

# with_torch NAME TORCH
with_torch() {
    local name=$1 torch=$2 cuda=()
    [ -f "$torch/lib/libtorch_cuda.so" ] && ! ldd "$torch/lib/libtorch_cuda.so" | grep -q 'not found' && cuda=("$torch/lib/libtorch_cuda.so")
    check "$name: compiles" compile "$torch"
    measured "$name: host" "$work/host" "$work/libLibTorchSharp.so" "$library" ${cuda[@]+"${cuda[@]}"}
    if command -v cargo >/dev/null; then
        check "$name: wrapped memory" wrapped "$torch"
    else
        skip "$name: wrapped memory" "cargo is missing, with which its test is compiled"
    fi
}

# The library's own memory as a tensor of libtorch, which only managed memory becomes: here from within, on the CPU.
wrapped() {
    local tests
    tests=$(rust_executable lib) &&
        LD_PRELOAD="$1/lib/libtorch_cpu.so" "$tests" --ignored --exact abi::libtorch::tests::memory_of_the_library_becomes_a_tensor_and_comes_back
}

check "the library needs neither libtorch nor CUDA" needs_neither
if [ -n "${NVFP4_TORCH-}" ]; then
    with_torch "libtorch in \$NVFP4_TORCH" "$NVFP4_TORCH"
else
    for version in "${versions[@]}"; do
        if torch=$(again install "$version" 2>"$work/said"); then
            with_torch "libtorch $version" "$torch"
        else
            skip "libtorch $version" "pip could not install it: $(grep . "$work/said" | tail -1)" torch
        fi
    done
fi

finish
