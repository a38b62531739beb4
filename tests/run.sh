#!/usr/bin/env bash
# Runs every test: bash tests/run.sh [--fast | --gpu]
#
#   --fast  what shows most mistakes in under 8 minutes on two cores, from compiled dependencies: the Rust tests, and the scripts that need
#           neither a release build nor long, with the library and the command as the Rust tests compile them
#   --gpu   every test of a GPU, on a machine that has one, where none may be skipped (NVFP4_REQUIRE=cuda). Without cargo, the folder
#           $NVFP4_GPU_TESTS has the executables `cuda` and `faults` (cargo test --release --test cuda --test faults --no-run)
#
# Without an option it installs the tools that are missing (cargo-nextest with cargo; g++, cmake, pkg-config, valgrind and tmux with apt-get, where that
# is allowed), runs the Rust tests and the documentation's examples, builds the release library, and then runs every
# executable tests/*/run.sh. Those start in the repository's root and find libNVFP4.so and nvfp4 in the folder $NVFP4_BUILD;
# each may close with a line "N passed, N failed, N skipped", and counts as one test if it does not.
#
# A test that cannot run here, or not all of it, prints a line starting with SKIPPED and passes; such tests are counted as
# skipped too. Name what must not be skipped in NVFP4_REQUIRE (avx512, cuda, ...). Of tests that pass nothing is shown but their
# number, so that a log is short where something fails. What a failing test prints is shown where it ran; what was skipped and
# what failed is listed at the end, before the last line, "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/.."
source tests/common/checks.sh

# Scripts for --fast: half a minute at most, and no more of the build than tests have.
readonly FAST=(header hub python readme templates terminal)
# Scripts that try a GPU where there is one, beside the Rust tests of these names.
readonly GPU=(c python torchsharp) GPU_TESTS=(cuda faults)

part=${1-}
case $part in
    "" | --fast | --gpu) ;;
    *)
        echo "usage: bash tests/run.sh [--fast | --gpu], not $part" >&2
        exit 2
        ;;
esac

target=${CARGO_TARGET_DIR:-target}
target=$(mkdir -p "$target" && cd "$target" && pwd) || exit 1
export NVFP4_BUILD=$target/release

# title WORDS...: a heading, with the seconds since the start.
title() { printf '\n== %s, at %d s\n' "$*" "$SECONDS"; }

# add PASSED FAILED SKIPPED
add() { passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3)); }

# Prints the number before a word in a summary line; 0 if there is none.
number() { grep -oE "[0-9]+ $1" <<<"$2" | head -1 | grep -oE '^[0-9]+' || echo 0; }

# Leaves out of nextest's log the tests that pass, and what they print.
quiet() {
    awk '/^ *[A-Z-]+ \[ *[0-9.]+s\]/ { hide = $1 == "PASS" }
         /^ *Summary \[/ { hide = 0 }
         !hide { print; fflush() }'
}

# Leaves out of a script's log the lines that say of a test that it passed.
without_passing() { grep --line-buffered -vE '^ok  | \.\.\. ok$'; }

# Appends "NAME: SKIPPED reason" for the skips in a log to the list, and prints how many tests skipped something. In nextest's
# log the name is that of the test whose output this is, else it is the one given.
skips() {
    awk -v name="$2" '/^ *[A-Z-]+ \[.*\] *\(/ { failed = $1 != "PASS"; name = $0; sub(/^[^)]*\) */, "", name) }
                      /^ *SKIPPED/ && !failed { sub(/^ */, ""); print name ": " $0 }' "$1" | sort -u >"$1.skips"
    cat "$1.skips" >>"$work/skipped"
    sed 's/: SKIPPED.*//' "$1.skips" | sort -u | wc -l
}

# Prints each reason of a skip once, with how many tests gave it and the first of them.
reasons() {
    awk '{ at = index($0, ": SKIPPED"); name = substr($0, 1, at - 1); reason = substr($0, at + 9); sub(/^:? */, "", reason)
           if (!(reason in first)) { order[++count] = reason; first[reason] = name }
           number[reason]++ }
         END { for (i = 1; i <= count; i++) { more = number[order[i]] - 1
               print order[i] ": " first[order[i]] (more ? " and " more " more" : "") } }' "$work/skipped"
}

# Adds to the list of failures the lines of a log that say so.
failures() { grep -E '^ *(FAIL|SIG[A-Z]+|ABORT|TIMEOUT|LEAK-FAIL) \[|^FAILED|^test .* FAILED$|^test .* failed$' "$1" | sort -u | sed "s|^ *|$2: |" >>"$work/failures"; }

install_system_tools() {
    local tool missing=()
    for tool in g++ cmake pkg-config valgrind tmux; do
        command -v "$tool" >/dev/null || missing+=("$tool")
    done
    [ ${#missing[@]} -eq 0 ] && return
    title "installing ${missing[*]}"
    install_packages "${missing[@]}"
    for tool in "${missing[@]}"; do
        command -v "$tool" >/dev/null || echo "$tool is missing and could not be installed; tests that need it will say so"
    done
}

install_nextest() {
    cargo nextest --version >/dev/null 2>&1 && return
    title "installing cargo-nextest"
    cargo install --locked cargo-nextest
}

# rust_tests [OPTION...]: all of them, or those that nextest is told.
rust_tests() {
    title "Rust tests"
    local log=$work/rust summary run ok
    cargo nextest run --locked "$@" --no-fail-fast --color never --status-level pass --final-status-level none \
        --success-output immediate 2>&1 | tee "$log" | without_compiling | quiet
    local code=${PIPESTATUS[0]}
    failures "$log" "Rust tests"
    summary=$(grep -E '^ *Summary \[' "$log" | tail -1)
    run=$(number 'tests? run' "${summary//\// }")
    ok=$(number passed "$summary")
    add "$ok" $((run - ok)) $(($(number skipped "$summary") + $(skips "$log" rust)))
    # Without a summary nothing ran: the tests did not compile, or nextest itself failed.
    [ "$code" -ne 0 ] && [ "$run" -eq "$ok" ] && add 0 1 0
}

documentation_tests() {
    title "documentation examples"
    local log=$work/doc result
    cargo test --locked --quiet --doc --color never 2>&1 | tee "$log"
    local code=${PIPESTATUS[0]}
    failures "$log" "documentation examples"
    result=$(grep -E '^test result:' "$log" | tail -1)
    add "$(number passed "$result")" "$(number failed "$result")" "$(number ignored "$result")"
    [ "$code" -ne 0 ] && [ "$(number failed "$result")" -eq 0 ] && add 0 1 0
}

script_tests() {
    local script=$1 name log summary
    name=$(basename "$(dirname "$script")")
    log=$work/script-$name
    title "$script"
    "./$script" 2>&1 </dev/null | tee "$log" | without_passing
    local code=${PIPESTATUS[0]} skips
    failures "$log" "$script"
    skips=$(skips "$log" "$script")
    summary=$(grep -E '^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$' "$log" | tail -1)
    if [ -n "$summary" ]; then
        add "$(number passed "$summary")" "$(number failed "$summary")" "$(number skipped "$summary")"
        [ "$code" -ne 0 ] && [ "$(number failed "$summary")" -eq 0 ] && add 0 1 0
    elif [ "$code" -eq 0 ]; then
        add 1 0 "$skips"
    else
        echo "FAILED: exit code $code" | tee "$work/code"
        failures "$work/code" "$script"
        add 0 1 0
    fi
}

# The tests of a GPU as executables, one process a test, as nextest does it.
prebuilt_tests() {
    local name test
    for name in "${GPU_TESTS[@]}"; do
        title "$NVFP4_GPU_TESTS/$name"
        [ -x "$NVFP4_GPU_TESTS/$name" ] || { echo "FAILED  $name: there is no such executable" | tee -a "$work/failures"; add 0 1 0; continue; }
        while read -r test; do
            check "$name $test" "$NVFP4_GPU_TESTS/$name" --exact "$test"
        done < <("$NVFP4_GPU_TESTS/$name" --list | sed -n 's/: test$//p') | tee "$work/prebuilt" | without_passing
        failures "$work/prebuilt" "$name"
        add "$(grep -c '^ok ' "$work/prebuilt")" "$(grep -c '^FAILED ' "$work/prebuilt")" 0
    done
}

# build [OPTION...]: the library and the command.
build() {
    title "library and command"
    cargo build --locked --color never "$@" --lib --bins 2>&1 | without_compiling && return
    add 0 1 0
    return 1
}

if [ "$part" = --gpu ] && [ -n "${NVFP4_GPU_TESTS-}" ]; then
    export NVFP4_REQUIRE=cuda
    prebuilt_tests
else
    install_system_tools
    if ! install_nextest; then
        echo "cargo-nextest could not be installed"
        failed=1
        finish
    fi
    case $part in
        "")
            rust_tests
            documentation_tests
            scripts=(tests/*/run.sh)
            build --release || scripts=()
            ;;
        --fast)
            rust_tests
            scripts=("${FAST[@]/#/tests/}")
            scripts=("${scripts[@]/%//run.sh}")
            export NVFP4_BUILD=$target/debug
            build || scripts=()
            ;;
        --gpu)
            export NVFP4_REQUIRE=cuda
            rust_tests --release "${GPU_TESTS[@]/#/--test=}"
            scripts=("${GPU[@]/#/tests/}")
            scripts=("${scripts[@]/%//run.sh}")
            build --release || scripts=()
            ;;
    esac
    for script in "${scripts[@]}"; do
        [ -x "$script" ] && script_tests "$script"
    done
fi

if [ -s "$work/skipped" ]; then
    title "skipped"
    reasons
fi
if [ -s "$work/failures" ]; then
    title "failed"
    cat "$work/failures"
fi
echo
finish
