#!/usr/bin/env bash
# GPU kernels on a machine without a GPU: bash tests/kernels/run.sh
#
# Fetches NVIDIA's compiler library and disassembler from PyPI into the target folder, runs tests/kernels.rs, and builds
# with the kernels of one architecture embedded, as release/build.sh embeds all, for the tests of what is embedded. Those are kernels of
# standin.c, because tests/kernels.rs has compiled the real ones; with NVFP4_LONG they are compiled again, and all units for all
# architectures rather than for sm_80 and sm_90a and what others have of their own.
# Installs pip with apt-get where it is missing and that is allowed. What cannot be fetched is SKIPPED, or fails if NVFP4_REQUIRE
# names nvrtc. The last line is "N passed, N failed, N skipped".
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

# Before the variables below are set, with which cargo would compile everything again.
kernels=$(rust_executable kernels)
tools=$(cd "$tools/nvidia/cu13" && pwd)
export NVFP4_NVRTC=$tools/lib/libnvrtc.so.13 PATH=$tools/bin:$PATH
export NVFP4_REQUIRE=nvrtc,nvdisasm

embedding=$NVFP4_NVRTC
if [ -z "${NVFP4_LONG-}" ]; then
    embedding=$work/standin.so
    gcc -std=c11 -Wall -Wextra -Werror -shared -fPIC tests/kernels/standin.c -o "$embedding" || exit 1
fi

# Tests that compile kernels run from the executable of all other tests. Tests of embedded kernels need a build of their own, without
# optimisation, and with one architecture, which neither takes kernels from a cache nor leaves any there.
{
    "$kernels" sm_ every_target reports_are an_architecture benchmark_sources
    first=$?
    unset NVFP4_EMBED_CACHE
    NVFP4_NVRTC=$embedding NVFP4_EMBED_KERNELS=sm_90a cargo test --locked --color never --no-fail-fast "${CHECKED[@]}" \
        --config profile.release.package.nvfp4.opt-level=0 --lib -- cuda::registry:: && [ $first -eq 0 ]
} 2>&1 | tee "$log" | without_compiling
code=${PIPESTATUS[0]}
count() { grep '^test result:' "$log" | grep -oE "[0-9]+ $1" | awk '{ sum += $1 } END { print sum + 0 }'; }
passed=$(count passed) failed=$(count failed)
# Not compiled, or killed; or the names of the tests have changed.
if [ "$failed" -eq 0 ] && { [ "$code" -ne 0 ] || [ "$passed" -lt 15 ]; }; then
    echo "15 tests were expected, and $passed ran"
    failed=1
fi
finish
