#!/usr/bin/env bash
# The Python package and its examples: bash tests/python/run.sh, with libNVFP4.so in $NVFP4_BUILD (target/release if unset).
#
# NVFP4_PYTHON is the interpreter (python3 if unset). Where it has no numpy, pip fetches one for it into target/python. What needs
# torch runs where the interpreter has it. Tests that numpy or torch are missing for say SKIPPED, or fail if NVFP4_REQUIRE names it.
# The last line is "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/common/checks.sh

python=${NVFP4_PYTHON:-python3}
export NVFP4_BUILD PYTHONDONTWRITEBYTECODE=1
NVFP4_BUILD=$(cd "${NVFP4_BUILD:-target/release}" && pwd) || exit 1

has_numpy() { "$python" -c 'import numpy' 2>/dev/null; }

# The folder gets its name when it is whole.
fetch_numpy() {
    local folder=${CARGO_TARGET_DIR:-target}/python/numpy-$("$python" -c 'import sys; print(sys.implementation.cache_tag)')
    if [ ! -d "$folder" ]; then
        mkdir -p "$(dirname "$folder")" && rm -rf "$folder.part" &&
            "$python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --target "$folder.part" \
                'numpy>=2,<3' >/dev/null 2>&1 && mv "$folder.part" "$folder" || return
    fi
    PYTHONPATH=$(cd "$folder" && pwd)${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONPATH
}

has_numpy || again fetch_numpy
"$python" tests/python/test_nvfp4.py 2>&1 | tee "$work/log"
closing=$(tail -1 "$work/log")
number() { grep -oE "[0-9]+ $1" <<<"$closing" | grep -oE '[0-9]+' || echo 0; }
passed=$(number passed) failed=$(number failed) skipped=$(number skipped)
[ "$passed" -gt 0 ] || failed=$((failed + 1))

export NVFP4_LIB_PATH=$NVFP4_BUILD PYTHONPATH=$PWD/bindings/python${PYTHONPATH:+:$PYTHONPATH}
model=$PWD/tests/golden/model/qwen3_tied

recites() {
    "$python" tests/python/reciter.py "$work/reciter" "漢字とかな 🦀👩‍👩‍👧." &&
        "$python" examples/python/chat.py "$work/reciter" "What?" >"$work/answer" && [ "$(cat "$work/answer")" = "漢字とかな 🦀👩‍👩‍👧." ]
}

converses() {
    printf 'Hello\n\nAnd you?\n' | "$python" examples/python/chat.py "$model" >"$work/answer" && [ "$(wc -c <"$work/answer")" -gt 20 ]
}

fails() {
    "$python" examples/python/chat.py /nowhere Hello 2>"$work/said"
    [ $? -eq 1 ] && cat "$work/said" && grep -q '^NotFound: .*/nowhere' "$work/said"
}

# A text is learned, and the model that comes out of it knows it better.
trains() {
    printf 'the sky is blue and the sea is blue\n%.0s' 1 2 3 4 5 6 7 8 >"$work/text"
    "$python" examples/python/train.py "$model" "$work/text" "$work/trained" 20 >"$work/losses" || return 1
    awk 'NR == 1 { first = $1 } { last = $1 } END { print first " nats, then " last; exit !(NR == 20 && last < first - 1) }' "$work/losses" &&
        [ -f "$work/trained/model.safetensors" ]
}

# What comes to stdout is the answers alone, and the thought to stderr.
thinks() {
    "$python" examples/python/thinking.py "$work/thinker" "What?" >"$work/answer" 2>"$work/said" &&
        [ "$(cat "$work/answer")" = "$(printf 'Blue 漢字 light 🦀.\n%.0s' 1 2 3)" ] && grep -q 'Let me see what is asked.' "$work/said"
}

calls() {
    "$python" examples/python/tools.py "$work/thinker" "What?" >"$work/answer" 2>"$work/said" &&
        [ "$(cat "$work/answer")" = "It rains in Paris." ] && grep -q "^\[weather {'city': 'Paris'}\]$" "$work/said"
}

check "example chat.py" recites
check "example chat.py, a conversation" converses
check "example chat.py without a model" fails
check "a model that thinks" "$python" tests/common/thinker.py "$work/thinker"
check "example thinking.py" thinks
check "example tools.py" calls
check "example train.py" trains
if has_numpy; then
    check "example quantize.py" "$python" examples/python/quantize.py
else
    skip "example quantize.py" "numpy is missing" numpy
fi
finish
