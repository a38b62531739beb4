#!/usr/bin/env bash
# Runs every test: bash tests/run.sh
#
# Installs the tools that are missing (cargo-nextest with cargo; g++, cmake, pkg-config and valgrind with apt-get, where that
# is allowed), runs the Rust tests and the documentation's examples, builds the release library, and then runs every
# executable tests/*/run.sh. Those start in the repository's root and find libNVFP4.so and nvfp4 in the folder $NVFP4_BUILD;
# each may close with a line "N passed, N failed, N skipped", and counts as one test if it does not.
#
# A test that cannot run here, or not all of it, prints a line starting with SKIPPED and passes; such tests are counted as
# skipped too, and listed at the end. Name what must not be skipped in NVFP4_REQUIRE (avx512, cuda, ...). The last line is
# "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-target}
export NVFP4_BUILD
NVFP4_BUILD=$(mkdir -p "$target" && cd "$target" && pwd)/release
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
passed=0 failed=0 skipped=0

title() { printf '\n== %s\n' "$*"; }

# add PASSED FAILED SKIPPED
add() { passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3)); }

# Prints the number before a word in a summary line; 0 if there is none.
number() { grep -oE "[0-9]+ $1" <<<"$2" | head -1 | grep -oE '^[0-9]+' || echo 0; }

# Leaves out what passing tests print.
quiet() {
    awk '/^ *[A-Z-]+ \[ *[0-9.]+s\]/ { hide = $1 == "PASS" }
         /^ *Summary \[/ { hide = 0 }
         !hide || /^ *PASS \[/ { print; fflush() }'
}

# Appends "NAME: SKIPPED reason" for the skips in a log to the list, and prints how many tests skipped something. In nextest's
# log the name is that of the test whose output this is, else it is the one given.
skips() {
    awk -v name="$2" '/^ *[A-Z-]+ \[.*\] *\(/ { failed = $1 != "PASS"; name = $0; sub(/^[^)]*\) */, "", name) }
                      /^ *SKIPPED/ && !failed { sub(/^ */, ""); print name ": " $0 }' "$1" | sort -u >"$1.skips"
    cat "$1.skips" >>"$logs/skipped"
    sed 's/: SKIPPED.*//' "$1.skips" | sort -u | wc -l
}

install_system_tools() {
    local tool missing=()
    for tool in g++ cmake pkg-config valgrind; do
        command -v "$tool" >/dev/null || missing+=("$tool")
    done
    [ ${#missing[@]} -eq 0 ] && return
    title "installing ${missing[*]}"
    local root=()
    if [ "$(id -u)" -ne 0 ]; then
        root=(sudo -n)
        sudo -n true 2>/dev/null || root=(false)
    fi
    if command -v apt-get >/dev/null && [ "${root[0]-}" != false ]; then
        export DEBIAN_FRONTEND=noninteractive
        "${root[@]}" apt-get update -qq && "${root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
    fi
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
    local log=$logs/rust summary run ok
    cargo nextest run --locked --no-fail-fast --color never --status-level pass --success-output immediate 2>&1 | tee "$log" | quiet
    local code=${PIPESTATUS[0]}
    summary=$(grep -E '^ *Summary \[' "$log" | tail -1)
    run=$(number 'tests? run' "${summary//\// }")
    ok=$(number passed "$summary")
    add "$ok" $((run - ok)) $(($(number skipped "$summary") + $(skips "$log" rust)))
    # Without a summary nothing ran: the tests did not compile, or nextest itself failed.
    [ "$code" -ne 0 ] && [ "$run" -eq "$ok" ] && add 0 1 0
}

documentation_tests() {
    title "documentation examples"
    local log=$logs/doc result
    cargo test --locked --doc --color never 2>&1 | tee "$log"
    local code=${PIPESTATUS[0]}
    result=$(grep -E '^test result:' "$log" | tail -1)
    add "$(number passed "$result")" "$(number failed "$result")" "$(number ignored "$result")"
    [ "$code" -ne 0 ] && [ "$(number failed "$result")" -eq 0 ] && add 0 1 0
}

script_tests() {
    local script=$1 name log summary
    name=$(basename "$(dirname "$script")")
    log=$logs/script-$name
    title "$script"
    "./$script" 2>&1 </dev/null | tee "$log"
    local code=${PIPESTATUS[0]} skips
    skips=$(skips "$log" "$script")
    summary=$(grep -E '^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$' "$log" | tail -1)
    if [ -n "$summary" ]; then
        add "$(number passed "$summary")" "$(number failed "$summary")" "$(number skipped "$summary")"
        [ "$code" -ne 0 ] && [ "$(number failed "$summary")" -eq 0 ] && add 0 1 0
    elif [ "$code" -eq 0 ]; then
        add 1 0 "$skips"
    else
        echo "$script failed with exit code $code"
        add 0 1 0
    fi
}

install_system_tools
if ! install_nextest; then
    echo "cargo-nextest could not be installed"
    echo "0 passed, 1 failed, 0 skipped"
    exit 1
fi
rust_tests
documentation_tests

title "release library and command"
if cargo build --locked --release --lib --bins; then
    for script in tests/*/run.sh; do
        [ -x "$script" ] && script_tests "$script"
    done
else
    add 0 1 0
fi

if [ -s "$logs/skipped" ]; then
    title "skipped"
    cat "$logs/skipped"
fi
echo
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
