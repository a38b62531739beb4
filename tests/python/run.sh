#!/usr/bin/env bash
# The Python package and its examples: bash tests/python/run.sh, with libNVFP4.so in $NVFP4_BUILD (target/release if unset).
#
# NVFP4_PYTHON is the interpreter (python3 if unset). If it has no numpy, pip fetches one into target/python. Tests of torch run if the
# interpreter has it. Types are checked by mypy, in a virtual environment there. Tests that lack numpy, torch or mypy say SKIPPED, or fail
# if NVFP4_REQUIRE names it. The last line is "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/common/checks.sh

readonly MYPY=mypy==2.4.1 NUMPY='numpy>=2,<3'
python=${NVFP4_PYTHON:-python3}
fetched=${CARGO_TARGET_DIR:-target}/python
export NVFP4_BUILD PYTHONDONTWRITEBYTECODE=1
NVFP4_BUILD=$(cd "${NVFP4_BUILD:-target/release}" && pwd) || exit 1

tag() { "$python" -c 'import sys; print(sys.implementation.cache_tag)'; }
has_numpy() { "$python" -c 'import numpy' 2>/dev/null; }

# The folder gets its name when it is whole.
fetch_numpy() {
    local folder
    folder=$fetched/numpy-$(tag)
    if [ ! -d "$folder" ]; then
        mkdir -p "$(dirname "$folder")" && rm -rf "$folder.part" &&
            "$python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --target "$folder.part" \
                "$NUMPY" >/dev/null 2>&1 && mv "$folder.part" "$folder" || return
    fi
    PYTHONPATH=$(cd "$folder" && pwd)${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONPATH
}

# A virtual environment cannot be moved: a file says that it is whole.
fetch_mypy() {
    local folder
    folder=$fetched/${MYPY/==/-}-$(tag)
    if [ ! -e "$folder/whole" ]; then
        mkdir -p "$fetched" && rm -rf "$folder" && "$python" -m venv "$folder" >/dev/null 2>&1 &&
            env -u PYTHONPATH "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary :all: "$MYPY" "$NUMPY" \
                >/dev/null 2>&1 &&
            touch "$folder/whole" || return
    fi
    typed=$(cd "$folder/bin" && pwd)/python
    export MYPYPATH=$PWD/bindings/python MYPY_CACHE_DIR=$folder/cache
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

# Answers get better while the model that gives them is trained.
reinforces() {
    "$python" examples/python/reinforce.py "$model" "the sky" 40 5e-3 >"$work/rewards" || return 1
    awk 'NR <= 8 { first += $1 / 8 } NR > 32 { last += $1 / 8 } END { print first " of a reward, then " last; exit !(NR == 40 && last > first + 0.15) }' "$work/rewards"
}

# 40 questions at once, each answered.
converses_at_once() {
    seq 40 | "$python" examples/python/conversations.py "$work/reciter" >"$work/answer" && [ "$(wc -l <"$work/answer")" -eq 40 ] &&
        [ "$(sed 's/^[0-9]*: //' "$work/answer" | sort -u)" = "漢字とかな 🦀👩‍👩‍👧. [stop]" ]
}

# Answers alone go to stdout, and the reasoning to stderr.
thinks() {
    "$python" examples/python/thinking.py "$work/thinker" "What?" >"$work/answer" 2>"$work/said" &&
        [ "$(cat "$work/answer")" = "$(printf 'Blue 漢字 light 🦀.\n%.0s' 1 2 3)" ] && grep -q 'Let me see what is asked.' "$work/said"
}

calls() {
    "$python" examples/python/tools.py "$work/thinker" "What?" >"$work/answer" 2>"$work/said" &&
        [ "$(cat "$work/answer")" = "It rains in Paris." ] && grep -q "^\[weather {'city': 'Paris'}\]$" "$work/said"
}

# Whatever the model writes, it has the form that was asked for.
structures() {
    "$python" examples/python/structured.py "$work/thinker" "What?" >"$work/answer" || return 1
    sed -n 1p "$work/answer" | grep -qE '^(delivery|payment|other) [1-5] ' && [ "$(wc -l <"$work/answer")" -eq 3 ] &&
        sed -n 2p "$work/answer" | grep -qE '^(angry|calm|happy)$' && sed -n 3p "$work/answer" | grep -qE '^[A-Z]{2}-[0-9]{4}$'
}

check "example chat.py" recites
check "example chat.py, a conversation" converses
check "example chat.py without a model" fails
check "example conversations.py" converses_at_once
check "a model that thinks" "$python" tests/common/thinker.py "$work/thinker"
check "example thinking.py" thinks
check "example tools.py" calls
check "example structured.py" structures
check "example train.py" trains
check "example reinforce.py" reinforces
# mypy's view of a module must match Python's.
stubs_are_right() { PYTHONPATH=$1 "$typed" -m mypy.stubtest nvfp4.models nvfp4.streams nvfp4.tensors nvfp4.training; }

a_wrong_stub_is_seen() {
    mkdir "$work/drifted" && cp -r bindings/python/nvfp4 "$work/drifted" &&
        sed -i 's/def truncate(self, length: int)/def truncate(self, size: int)/' "$work/drifted/nvfp4/models.pyi" || return 1
    MYPYPATH=$work/drifted stubs_are_right "$work/drifted" >"$work/said"
    [ $? -eq 1 ] && cat "$work/said" && grep -q 'nvfp4.models.Session.truncate' "$work/said"
}

if has_numpy; then
    check "example quantize.py" "$python" examples/python/quantize.py
else
    skip "example quantize.py" "numpy is missing" numpy
fi
if again fetch_mypy; then
    check "mypy: the package" "$typed" -m mypy --strict bindings/python/nvfp4
    check "mypy: the examples" "$typed" -m mypy --strict examples/python/*.py
    check "mypy: right and wrong uses" "$typed" -m mypy --strict tests/python/typed_use.py
    check "the stubs say what the code does" stubs_are_right bindings/python
    check "a stub that does not is seen" a_wrong_stub_is_seen
else
    skip "mypy" "pip cannot install $MYPY for $python" mypy
fi
finish
