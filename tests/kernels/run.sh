#!/usr/bin/env bash
# GPU kernels on a machine without a GPU: bash tests/kernels/run.sh
#
# Fetches NVIDIA's compiler library and disassembler from PyPI into the target folder, builds with the kernels of one architecture
# embedded, as release/build.sh embeds all, and runs tests/kernels.rs, for every architecture, and the test of what is embedded.
# Installs pip with apt-get where it is missing and that is allowed. What cannot be fetched is SKIPPED, or fails if NVFP4_REQUIRE
# names nvrtc. Takes three minutes of processor time. The last line is "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/common/checks.sh

# The spills and instructions that the test expects are those of this compiler.
readonly packages=(nvidia-cuda-nvrtc==13.0.88 nvidia-cuda-nvdisasm==13.5.37)
target=${CARGO_TARGET_DIR:-target}
tools=$target/kernels/$(IFS=+; echo "${packages[*]}")
log=$work/log

has_pip() { python3 -m pip --version >/dev/null 2>&1; }

install_pip() {
    has_pip && return
    install_packages python3-pip
}

# The folder gets its name when it is whole.
fetch() {
    [ -d "$tools" ] && return
    install_pip
    mkdir -p "$target/kernels" && rm -rf "$tools.part" &&
        python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$tools.part" "${packages[@]}" >&2 &&
        mv "$tools.part" "$tools"
}

if ! again fetch; then
    skip "everything" "compiling kernels needs ${packages[*]}, which pip could not install" nvrtc
    finish
fi

tools=$(cd "$tools/nvidia/cu13" && pwd)
export NVFP4_NVRTC=$tools/lib/libnvrtc.so.13 PATH=$tools/bin:$PATH
export NVFP4_EMBED_KERNELS=sm_90a NVFP4_REQUIRE=nvrtc,nvdisasm

# Without optimisation, and so beside the build of the other tests, which embeds nothing.
cargo test --locked --color never --no-fail-fast --config profile.dev.opt-level=0 --lib --test kernels -- \
    cuda::registry:: sm_ every_target reports_are an_architecture benchmark_sources 2>&1 | tee "$log" | without_compiling
code=${PIPESTATUS[0]}
count() { grep '^test result:' "$log" | grep -oE "[0-9]+ $1" | awk '{ sum += $1 } END { print sum + 0 }'; }
passed=$(count passed) failed=$(count failed)
# Not compiled, or killed; or the names of the tests have changed.
if [ "$failed" -eq 0 ] && { [ "$code" -ne 0 ] || [ "$passed" -lt 15 ]; }; then
    echo "15 tests were expected, and $passed ran"
    failed=1
fi
finish
