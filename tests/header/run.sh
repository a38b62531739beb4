#!/usr/bin/env bash
# Compares include/nvfp4.h with cbindgen's output for src/abi, and the declarations of Python and C# with that header.
# "tests/header/run.sh --bless" regenerates them, and the copy in tests/abi of a version that is not released yet.
set -euo pipefail
cd "$(dirname "$0")/../.."
CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/header cargo run --quiet --locked --manifest-path tests/header/Cargo.toml -- "$@"
if [ "${1-}" != --bless ]; then
    python3 bindings/generate.py --check
    exit
fi
python3 bindings/generate.py
source release/common.sh
if is_unreleased "$VERSION" && [ -e "tests/abi/$VERSION/nvfp4.h" ]; then
    cp include/nvfp4.h "tests/abi/$VERSION"
fi
