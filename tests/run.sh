#!/usr/bin/env bash
# Runs every test: bash tests/run.sh
#
# Installs the tools that are missing (cargo-nextest with cargo; g++, cmake, pkg-config, valgrind and tmux with apt-get, where that
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

target=${CARGO_TARGET_DIR:-target}
export NVFP4_BUILD
NVFP4_BUILD=$(mkdir -p "$target" && cd "$target" && pwd)/release

title() { printf '\n== %s\n' "$*"; }

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

rust_tests() {
    title "Rust tests"
    local log=$work/rust summary run ok
    cargo nextest run --locked --no-fail-fast --color never --status-level pass --final-status-level none \
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

install_system_tools
if ! install_nextest; then
    echo "cargo-nextest could not be installed"
    failed=1
    finish
fi
rust_tests
documentation_tests

title "release library and command"
if cargo build --locked --color never --release --lib --bins 2>&1 | without_compiling; then
    for script in tests/*/run.sh; do
        [ -x "$script" ] && script_tests "$script"
    done
else
    add 0 1 0
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
