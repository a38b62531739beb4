#!/usr/bin/env bash
# Compares include/nvfp4.h with what cbindgen makes of src/abi; "tests/header/run.sh --bless" writes it anew.
set -euo pipefail
cd "$(dirname "$0")/../.."
CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/header cargo run --quiet --locked --manifest-path tests/header/Cargo.toml -- "$@"
