#!/usr/bin/env bash
# Compares include/nvfp4.h with cbindgen's output for src/abi. "tests/header/run.sh --bless" regenerates it, and the copy in tests/abi of a
# version that is not released yet.
set -euo pipefail
cd "$(dirname "$0")/../.."
CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/header cargo run --quiet --locked --manifest-path tests/header/Cargo.toml -- "$@"
[ "${1-}" = --bless ] || exit 0
source release/common.sh
if is_unreleased "$VERSION" && [ -e "tests/abi/$VERSION/nvfp4.h" ]; then
    cp include/nvfp4.h "tests/abi/$VERSION"
fi
