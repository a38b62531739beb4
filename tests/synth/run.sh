#!/usr/bin/env bash
# A model of the shape of Qwen3-0.6B, made by `nvfp4 synth`, with the tokenizer of a small golden model. See check.py.
set -euo pipefail
cd "$(dirname "$0")/../.."

build=${NVFP4_BUILD:-target/release}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$build/nvfp4" synth --arch qwen3-0.6b --out "$scratch/qwen3-0.6b" >/dev/null
cp tests/golden/model/qwen3_tied/tokenizer.json "$scratch/qwen3-0.6b"
python3 tests/synth/check.py "$build" "$scratch/qwen3-0.6b"
