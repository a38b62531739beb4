#!/usr/bin/env bash
# The library's hand-overs between threads under random schedules: tests/handovers/run.sh [PROGRAM [SEED]]. See src/main.rs.
#
# Schedules are the same at every run, and ten times as many with NVFP4_LONG. A random schedule that fails names its seed, by which
# SHUTTLE_RANDOM_SEED=SEED tests/handovers/run.sh PROGRAM runs it first.
set -euo pipefail
cd "$(dirname "$0")/../.."
source tests/common/checks.sh

target=${CARGO_TARGET_DIR:-target}/handovers
again env CARGO_TARGET_DIR="$target" cargo build --quiet --locked --release --manifest-path tests/handovers/Cargo.toml
"$target/release/nvfp4-handovers" "$@"
