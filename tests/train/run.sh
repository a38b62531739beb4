#!/usr/bin/env bash
# `nvfp4 train` as docs/training.md describes it, with models of some 100,000 parameters: from random weights on the words of a document,
# stopped half-way and resumed; then questions and answers, killed again and again; the result is asked, measured, converted and trained on.
# The last line is "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/common/checks.sh

build=$(cd "${NVFP4_BUILD:-target/release}" && pwd) || exit 1
nvfp4=$build/nvfp4

# A shape and a tokenizer, without weights.
mkdir "$work/shape"
cp tests/golden/model/qwen3_tied/{config,tokenizer,generation_config}.json "$work/shape"

pretrain() {
    local batch=(--batch 4)
    [[ " $* " != *" --batch "* ]] || batch=()
    "$nvfp4" train --init "$work/shape" --data tests/data/verse-10m/passage.txt --eval-share 0.1 --out "$work/run" --device cpu \
        --steps 60 "${batch[@]}" --window 128 --rate 3e-3 --save-every 10 --eval-every 20 --sample "The model" "$@"
}

# A file named stop ends a run after the current step; the run can be resumed.
stopped_half_way() {
    pretrain --json >"$work/events" &
    local run=$!
    until grep -q '"event":"checkpoint"' "$work/events" 2>/dev/null; do
        kill -0 "$run" || return 1
        sleep 0.02
    done
    touch "$work/run/stop"
    wait "$run" || return 1
    tail -1 "$work/events"
    tail -1 "$work/events" | grep -q '"ending":"stopped"' && [ ! -e "$work/run/stop" ] && [ ! -e "$work/run/model" ]
}

# refused WORDS COMMAND...: it fails, and says so in these words.
refused() {
    "${@:2}" >"$work/said" 2>&1 && return 1
    cat "$work/said"
    grep -q -- "$1" "$work/said"
}

# Without --resume it is refused, and so are other data.
not_by_mistake() {
    refused "go on with it by --resume, or name another --out" pretrain &&
        refused "2 windows in a batch instead of 4" pretrain --resume --batch 2
}

resumed() {
    pretrain --resume >"$work/said" 2>&1 || { cat "$work/said"; return 1; }
    cat "$work/said"
    grep -q "nvfp4 run --model $work/run/model --raw" "$work/said" &&
        [ "$(wc -l <"$work/run/loss.csv")" -eq 62 ] && [ "$(cut -d, -f1 "$work/run/loss.csv" | tail -n +2)" = "$(seq 0 60)" ] &&
        [ "$(ls "$work/run/checkpoints" | wc -l)" -eq 2 ] && grep -q '</svg>' "$work/run/loss.svg" &&
        python3 - "$work/run" <<'PYTHON'
import csv, json, sys, xml.dom.minidom
folder = sys.argv[1]
rows = list(csv.DictReader(open(f"{folder}/loss.csv")))
first, last = float(rows[1]["loss"]), float(rows[-1]["eval_loss_delivered"])
print(f"loss {first:.3f}, and {last:.3f} of what was set aside")
assert first > 5.5 and last < 4.2, "nothing was learned"
assert [r["step"] for r in rows if r["eval_loss_delivered"]] == ["0", "20", "40", "60"]
xml.dom.minidom.parse(f"{folder}/loss.svg")
memory = json.load(open(f"{folder}/memory.json"))
assert [p["phase"] for p in memory["phases"]][-3:] == ["zero_grad_done", "backward_done", "optimizer_step_done"]
assert memory["state_bytes"] <= 2.6 * memory["parameters"]
PYTHON
}

# The loss that the inference side finds is that of a model that has learned.
measured() {
    "$nvfp4" perplexity --model "$work/run/model" --text docs/command.md --window 128 --device cpu --json | tee /dev/stderr |
        python3 -c 'import json, sys; assert json.load(sys.stdin)["perplexity"] < 70'
}

# questions YES NO: with answers that can be known.
questions() {
    for i in 1 2 3 4 5 6; do
        for colour in red blue green; do printf 'Is %s %s?\t%s\n' "$i" "$colour" "$([ $colour = blue ] && echo "$1" || echo "$2")"; done
    done >"$work/facts.tsv"
}

teach() {
    "$nvfp4" train --model "$1" --data "$work/facts.tsv" --out "$2" --device cpu --epochs 40 --window 64 --rate 4e-3 --save-every 1 \
        --eval-every 0 "${@:3}" 2>"$work/progress" || { tail -3 "$work/progress"; return 1; }
}

# Killed three times at random, with a checkpoint per step: the result has the bits of an undisturbed run.
killed() {
    questions yes no
    teach "$work/run/model" "$work/whole" >/dev/null || return 1
    local resume=()
    for after in 0.3 0.5 0.4; do
        # Nothing has begun where the first kill came before the first checkpoint.
        [ -z "$(ls "$work/taught/checkpoints" 2>/dev/null)" ] || resume=(--resume)
        teach "$work/run/model" "$work/taught" "${resume[@]}" >/dev/null 2>&1 &
        sleep "$after"
        # The command is the child of the shell that runs the function.
        pkill -9 -P $! 2>/dev/null
        wait $! 2>/dev/null
    done
    [ -z "$(ls "$work/taught/checkpoints" 2>/dev/null)" ] || resume=(--resume)
    teach "$work/run/model" "$work/taught" "${resume[@]}" || return 1
    cmp "$work/whole/model/model.safetensors" "$work/taught/model/model.safetensors"
}

# ask MODEL QUESTION
ask() { "$nvfp4" run --model "$1" --raw --device cpu --temp 0 --max-tokens 4 --prompt "$2"; }

# right MODEL LEAST [YES NO]: at least this many of twelve questions are answered as taught.
right() {
    local right=0 i
    for i in 1 2 3 4 5 6; do
        [ "$(ask "$1" "Is $i blue?")" = "${3:-yes}" ] && right=$((right + 1))
        [ "$(ask "$1" "Is $i red?")" = "${4:-no}" ] && right=$((right + 1))
    done
    echo "$right of 12 right"
    [ "$right" -ge "$2" ]
}

# adapt OPTIONS...: adapters that learn the questions, on top of the model trained from random weights.
adapt() {
    "$nvfp4" train --model "$work/run/model" --data "$work/facts.tsv" --out "$work/adapted" --device cpu --epochs 60 --window 64 --rate 5e-3 \
        --save-every 20 --eval-every 0 --adapter 16 "$@" 2>"$work/progress" || { tail -3 "$work/progress"; return 1; }
}

# Stopped, refused, resumed, and merged if requested: the base stays unchanged, and the merged model has learned. The answers use words that
# the base knows, because its table stays.
adapters() {
    local before
    questions the and
    before=$(sha256sum "$work"/run/model/*)
    rm -f "$work/events"
    adapt --json >"$work/events" &
    local run=$!
    until grep -q '"event":"checkpoint"' "$work/events" 2>/dev/null; do
        kill -0 "$run" || return 1
        sleep 0.02
    done
    touch "$work/adapted/stop"
    wait "$run" || return 1
    grep -q '"ending":"stopped"' "$work/events" && [ ! -e "$work/adapted/adapter" ] || return 1
    refused "go on with it by --resume" adapt || return 1
    adapt --resume >"$work/said" || return 1
    cat "$work/said"
    grep -q "from_pretrained(model, \"$work/adapted/adapter\")" "$work/said" && [ ! -e "$work/adapted/model" ] &&
        [ "$(cd "$work/adapted/adapter" && echo *)" = "adapter_config.json adapter_model.safetensors" ] || return 1
    adapt --resume --merge && right "$work/adapted/model" 10 the and && [ "$before" = "$(sha256sum "$work"/run/model/*)" ]
}

# A .dat file is trained, and exported with the same layout, with weights rounded to one level of scales. At rate 0 a run delivers its
# initial model, and in float32 the result of quantizing it.
unchanged() {
    local model=$work/run/model
    for options in "" "--last-blocks 1" "--adapter 4 --merge"; do
        rm -rf "$work/same"
        # shellcheck disable=SC2086
        "$nvfp4" train --model "$model" --data "$work/facts.tsv" --out "$work/same" --device cpu --steps 2 --window 64 --rate 0 $options \
            2>"$work/progress" || { tail -3 "$work/progress"; return 1; }
        diff -r "$model" "$work/same/model" || return 1
    done
    # In float32, for which quantizing gives a different model.
    "$nvfp4" train --model "$model" --data "$work/facts.tsv" --out "$work/wide" --device cpu --steps 3 --window 64 --rate 1e-3 --recipe float32 \
        2>"$work/progress" || { tail -3 "$work/progress"; return 1; }
    rm -rf "$work/same"
    "$nvfp4" quantize "$work/wide/model" "$work/quantized" --recipe amax --tables int8 || return 1
    "$nvfp4" train --model "$work/wide/model" --data "$work/facts.tsv" --out "$work/same" --device cpu --steps 2 --window 64 --rate 0 \
        --weight-scales amax --tables int8 2>"$work/progress" || { tail -3 "$work/progress"; return 1; }
    diff -r "$work/quantized" "$work/same/model"
}

dat() {
    mkdir "$work/dat" && "$nvfp4" quantize "$work/run/model" "$work/dat/model.dat" || return 1
    teach "$work/dat/model.dat" "$work/from-dat" --export "$work/dat/taught.dat" || return 1
    "$nvfp4" inspect "$work/dat/taught.dat" && [ "$(stat -c %s "$work/dat/model.dat")" -eq "$(stat -c %s "$work/dat/taught.dat")" ] &&
        right "$work/dat/taught.dat" 9
}

# learn_from TEACHER OUT OPTION...: the codes of a model in float32 come nearer to it.
learn_from() {
    "$nvfp4" train --model "$work/dense/model" --teacher "$1" --out "$2" --device cpu --batch 2 --window 256 --rate 3e-5 --eval-every 10 \
        --eval "$work/short.txt" "${@:3}"
}

# Distillation: the divergence falls, matches perplexity's, and is in the reports; a stopped run is resumed to the same bits only with its
# teacher.
distilled() {
    local words=(--data tests/data/verse-10m/passage.txt --steps 80 --eval "other=$work/other.txt")
    # A window, which perplexity reads as one too.
    head -c 260 tests/data/verse-10m/passage.txt >"$work/short.txt"
    tail -c 300 tests/data/verse-10m/passage.txt >"$work/other.txt"
    "$nvfp4" train --init "$work/shape" --data tests/data/verse-10m/passage.txt --out "$work/dense" --device cpu --steps 60 --batch 4 \
        --window 128 --rate 3e-3 --recipe float32 --save-every 0 || return 1
    learn_from "$work/dense/model" "$work/distilled" "${words[@]}" --best --tensorboard --json >"$work/events" || return 1
    grep -q "eval/other/divergence_stored" "$work"/distilled/tensorboard/* && grep -q "other divergence, as delivered" "$work/distilled/loss.svg" || return 1
    "$nvfp4" perplexity --model "$work/distilled/model" --reference "$work/dense/model" --text "$work/short.txt" --window 256 \
        --device cpu --json >"$work/compared" || return 1
    python3 - "$work" <<'PYTHON' || return 1
import csv, json, sys
folder = sys.argv[1]
events = [json.loads(line) for line in open(f"{folder}/events")]
of = {name: [e["divergence_delivered"] for e in events if e["event"] == "evaluation" and e["set"] == name] for name in ("eval", "other")}
found, end = of["eval"], events[-1]
compared = json.load(open(f"{folder}/compared"))["reference"]["kl_divergence"]
print(f"divergence {found[0]:.6f}, and {found[-1]:.6f}; {compared:.6f} by perplexity")
assert min(found) < 0.8 * found[0] and 0.95 < compared / min(found) < 1.05
assert (end["start_divergence"], end["delivered_divergence"]) == (found[0], min(found)) and not end["worse"]
rows = list(csv.DictReader(open(f"{folder}/distilled/loss.csv")))
for column, values in [("", found), (":other", of["other"])]:
    column = "eval_divergence_delivered" + column
    assert [float(r[column]) for r in rows if r[column]] == values
assert next(e for e in events if e["event"] == "begin")["teacher"]["streamed"] is False
PYTHON
    # The loop would find the events of the run before until the next one, in the background, has emptied the file.
    rm "$work/events"
    learn_from "$work/dense/model" "$work/halved" "${words[@]}" --save-every 5 --json >"$work/events" &
    local run=$!
    until grep -q '"event":"checkpoint"' "$work/events" 2>/dev/null; do
        kill -0 "$run" || return 1
        sleep 0.02
    done
    touch "$work/halved/stop"
    wait "$run" && grep -q '"ending":"stopped"' "$work/events" || return 1
    refused "the teacher is another model" learn_from "$work/run/model" "$work/halved" "${words[@]}" --resume --save-every 5 || return 1
    refused "label_share 0.0, and now 0.5" learn_from "$work/dense/model" "$work/halved" "${words[@]}" --resume --label-share 0.5 || return 1
    refused "learns from a teacher" "$nvfp4" train --model "$work/dense/model" --out "$work/halved" --device cpu --batch 2 --window 256 \
        --eval "$work/short.txt" "${words[@]}" --resume || return 1
    learn_from "$work/dense/model" "$work/halved" "${words[@]}" --resume --save-every 5 --teacher-memory streamed || return 1
    cmp "$work/distilled/checkpoints/step-00000080/state.bin" "$work/halved/checkpoints/step-00000080/state.bin"
}

# Rows that a teacher writes, of its own and as answers, from the start and from the middle; and refusals.
written() {
    local free=(--teacher-writes 40 --steps 2)
    learn_from "$work/dense/model" "$work/free" "${free[@]}" || return 1
    local rows=$work/free/teacher.jsonl
    [ "$(wc -l <"$rows")" -eq 40 ] && grep -q '"text"' "$rows" || return 1
    mkdir "$work/again" && cp "$work/free/teacher.json" "$work/again" && head -c 2000 "$rows" >"$work/again/teacher.jsonl" || return 1
    learn_from "$work/dense/model" "$work/again" "${free[@]}" && cmp "$rows" "$work/again/teacher.jsonl" &&
        cmp "$work/free/checkpoints/step-00000002/state.bin" "$work/again/checkpoints/step-00000002/state.bin" || return 1
    refused "with other options" learn_from "$work/dense/model" "$work/again" --teacher-writes 41 --steps 2 --resume || return 1
    printf 'What\tthat\nWho\tshe\n' >"$work/asked.tsv"
    learn_from "$work/dense/model" "$work/asked" --teacher-writes 3 --data "$work/asked.tsv" --steps 2 || return 1
    python3 - "$work/asked/teacher.jsonl" <<'PYTHON' || return 1
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
print(rows)
assert [row["prompt"] for row in rows] == ["What", "Who", "What"] and all(row["completion"] for row in rows)
PYTHON
    refused "no question for the teacher" learn_from "$work/dense/model" "$work/none" --teacher-writes 3 \
        --data tests/data/verse-10m/passage.txt --steps 2 && [ ! -e "$work/none" ] || return 1
    local rows=(--data "$work/asked.tsv" --no-packing --steps 2)
    refused "predicts 150 tokens and the model 320" learn_from tests/golden/model/qwen3_untied "$work/none" "${rows[@]}" &&
        refused "name the model that it was quantized from" "$nvfp4" train --model "$work/run/model" --teacher --out "$work/none" "${rows[@]}" &&
        refused "--teacher-memory streamed" learn_from "$work/dense/model" "$work/none" "${rows[@]}" --memory-budget 0.0005 \
            --teacher-memory resident &&
        refused "below 1" learn_from "$work/dense/model" "$work/none" "${rows[@]}" --label-share 1
}

# A conversation for a model without a template is ChatML, as it is when one talks to it.
conversations() {
    printf '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}\n' >"$work/chat.jsonl"
    "$nvfp4" train --model "$work/run/model" --data "$work/chat.jsonl" --out "$work/chat" --device cpu --epochs 80 --rate 4e-3 --eval-every 0 &&
        [ "$("$nvfp4" run --model "$work/chat/model" --device cpu --temp 0 --max-tokens 4 --prompt Hi)" = Ho ]
}

bad_rows() {
    printf 'a\tb\nno tab\n' >"$work/bad.tsv"
    local train=("$nvfp4" train --model "$work/run/model" --data "$work/bad.tsv" --out "$work/bad" --device cpu --steps 1)
    refused "bad.tsv line 2: 0 tabs" "${train[@]}" && [ ! -e "$work/bad" ] || return 1
    "${train[@]}" --skip-bad-rows 2>&1 | grep "1 rows that cannot be used left out"
}

# The model in tests/data, whose training its README describes: its loss on an unseen passage is unchanged since it was exported, and so is
# its continuation, by AVX-512 or any other instructions.
verse() {
    local found
    found=$("$nvfp4" perplexity --model tests/data/verse-10m --text tests/data/verse-10m/passage.txt --device cpu --json) || return 1
    echo "$found"
    python3 -c 'import json, sys; x = json.loads(sys.argv[1])["perplexity"]; assert abs(x / 61.1206 - 1) < 1e-3, x' "$found" &&
        "$nvfp4" run --model tests/data/verse-10m --device cpu --raw --prompt "HAMLET." --temp 0 --max-tokens 24 | grep "And I will tell you, sir, I will not be a man."
}

check "the model in tests/data" verse
check "a run that a file stops half-way" stopped_half_way
check "the same command again is refused" not_by_mistake
check "a resumed run, and its reports" resumed
check "perplexity of what was trained" measured
check "killed three times" killed
check "answers that were taught" right "$work/taught/model" 11
check "nothing learned, nothing changed" unchanged
check "a .dat file in and out" dat
check "adapters" adapters
check "conversations without a template" conversations
check "bad rows" bad_rows
check "distillation" distilled
check "texts that a teacher writes" written
finish
