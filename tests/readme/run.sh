#!/usr/bin/env bash
# What the README says, tried: its C and Python lines, its environment variables, its files, its comparison. bash tests/readme/run.sh, with
# libNVFP4.so in $NVFP4_BUILD (target/release if unset). The last line is "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/../.."

build=$(cd "${NVFP4_BUILD:-target/release}" && pwd) || exit 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0 failed=0

# check NAME COMMAND...
check() {
    local name=$1
    shift
    if "$@" >"$work/log" 2>&1; then
        echo "ok      $name"
        passed=$((passed + 1))
    else
        echo "FAILED  $name"
        sed 's/^/    /' "$work/log" | head -40
        failed=$((failed + 1))
    fi
}

# The program is as long as its introduction says, and answers with a small model in the place of the one it names.
c_example() {
    awk '/^```c$/ { inside = 1; next } /^```$/ { inside = 0 } inside' README.md >"$work/example.c"
    [ "$(wc -l <"$work/example.c")" -eq 15 ] || { echo "$(wc -l <"$work/example.c") lines instead of 15"; return 1; }
    gcc -std=c99 -pedantic-errors -Wall -Werror -Iinclude "$work/example.c" -o "$work/example" -L"$build" -lNVFP4 -Wl,-rpath,"$build" &&
        ln -s "$PWD/tests/golden/model/qwen3_tied" "$work/qwen3-nvfp4" && (cd "$work" && ./example >answer) && [ -s "$work/answer" ]
}

python_line() {
    local line
    line=$(grep -oE 'ctypes\.CDLL\([^`]*' README.md) && line=${line/target\/release/$build} &&
        [ "$(python3 -c "import ctypes; print($line)")" = "$(sed -n 's/^#define NVFP4_ABI_VERSION //p' include/nvfp4.h)" ]
}

# Every variable that the library reads, and no other of its own.
environment() {
    diff --label README.md --label src/base/env.rs -u \
        <(grep -oE '^\| `NVFP4_[A-Z0-9_]+`' README.md | grep -oE 'NVFP4_[A-Z0-9_]+' | sort -u) \
        <(grep -oE 'text\("NVFP4_[A-Z0-9_]+"\)' src/base/env.rs | grep -oE 'NVFP4_[A-Z0-9_]+' | sort -u)
}

links() {
    local target ok=0
    while read -r target; do
        [ -e "$target" ] || { echo "no $target"; ok=1; }
    done < <(grep -ohE '\]\([^)#:]+\)' README.md CONTRIBUTING.md | tr -d '])(')
    return $ok
}

commands() {
    local name ok=0
    for name in $("$build/nvfp4" --help | awk '/^Commands:/ { inside = 1; next } /^$/ { inside = 0 } inside { print $1 }'); do
        [ "$name" = help ] || grep -qE "^    (nvfp4 )?([a-z, ]*)\\b$name\\b" README.md || { echo "nvfp4 $name is not mentioned"; ok=1; }
    done
    return $ok
}

check "the C program compiles and answers" c_example
check "the Python line" python_line
check "the environment variables" environment
check "the linked files" links
check "the subcommands" commands
check "table and chart of the comparison" python3 benches/compare.py --check
echo "$passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]
