#!/usr/bin/env bash
# What README and docs/ say, tried: their C, C++ and Python programs, environment variables, links, comparison and drawing. bash
# tests/readme/run.sh, with libNVFP4.so in $NVFP4_BUILD (target/release if unset). The last line is "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/common/checks.sh

build=$(cd "${NVFP4_BUILD:-target/release}" && pwd) || exit 1

# block LANGUAGE LINES FILE: the first piece of code of a page in a language, which has as many lines as there should be.
block() {
    awk -v fence="\`\`\`$1" '$0 == fence { inside = 1; next } /^```$/ && inside { exit } inside' "$3" >"$work/example.$1"
    [ "$(wc -l <"$work/example.$1")" -eq "$2" ] || { echo "$(wc -l <"$work/example.$1") lines instead of $2"; return 1; }
}

# With a small model in the place of the one that it names, whose answers mean nothing.
c_example() {
    block c 17 README.md && mkdir -p "$work/c" && ln -s "$PWD/tests/golden/model/qwen3_tied" "$work/c/qwen3-nvfp4" &&
        gcc -std=c99 -pedantic-errors -Wall -Werror -Iinclude "$work/example.c" -o "$work/example" -L"$build" -lNVFP4 -Wl,-rpath,"$build" &&
        (cd "$work/c" && "$work/example" >answer) && [ -s "$work/c/answer" ]
}

# answers TEXT COMMAND...: run where a model of the name in the README answers everything with "Because. ", prints TEXT.
answers() {
    local text=$1
    shift
    [ -d "$work/reciting" ] || python3 tests/python/reciter.py "$work/reciting/qwen3-nvfp4" "Because. " || return 1
    (cd "$work/reciting" && "$@" >answer) && [ "$(cat "$work/reciting/answer")" = "$text" ]
}

cpp_example() {
    block cpp 11 docs/hosts.md && g++ -std=c++17 -pedantic-errors -Wall -Werror -Iinclude -xc++ "$work/example.cpp" -o "$work/example-cpp" \
        -L"$build" -lNVFP4 -Wl,-rpath,"$build" -pthread && answers "Because. " "$work/example-cpp" &&
        ! (cd "$work" && ./example-cpp 2>said) && grep -q qwen3-nvfp4 "$work/said"
}

python_example() {
    export PYTHONPATH=$PWD/bindings/python NVFP4_LIB_PATH=$build PYTHONDONTWRITEBYTECODE=1
    block python 10 docs/hosts.md && answers "Because. Because. " python3 "$work/example.python" &&
        ! (cd "$work" && python3 example.python 2>said) && grep -q '^NotFound: .*qwen3-nvfp4' "$work/said"
}

# Every variable that the library reads, and no other of its own.
environment() {
    diff --label docs/environment.md --label src/base/env.rs -u \
        <(grep -oE '^\| `NVFP4_[A-Z0-9_]+`' docs/environment.md | grep -oE 'NVFP4_[A-Z0-9_]+' | sort -u) \
        <(grep -oE 'text\("NVFP4_[A-Z0-9_]+"\)' src/base/env.rs | grep -oE 'NVFP4_[A-Z0-9_]+' | sort -u)
}

# Each piece of code in docs/ is in one of the examples of its language, as it stands, or one of the first programs, which are tried by
# themselves: here, and in tests/dotnet.
documented() {
    python3 - docs/*.md <<'END'
import glob, re, sys
places = {"c": "c/*.c", "cpp": "cpp/*.cpp", "csharp": "csharp/**/*.cs", "fsharp": "fsharp/*.fsx", "python": "python/*.py"}
def read(path):
    return open(path, encoding="utf-8").read()
examples = {name: [read(path) for path in glob.glob("examples/" + place, recursive=True)] for name, place in places.items()}
def page(path):
    return re.sub(r"^## First programs$.*?(?=^## )", "", read(path), flags=re.S | re.M)
pieces = [(path, *piece) for path in sys.argv[1:] for piece in re.findall(r"```(\w+)\n(.*?)```", page(path), flags=re.S)]
strange = [(path, piece) for path, name, piece in pieces if not any(piece in example for example in examples.get(name, ()))]
for path, piece in strange:
    print(f"{path}: in no example:\n{piece}")
sys.exit(bool(strange) or len(pieces) < 3)
END
}

# Links to files and headings, as pages have them; addresses are left to readers.
links() {
    python3 - README.md CONTRIBUTING.md docs/*.md <<'END'
import os, re, sys
def headings(path):
    text = re.sub(r"```.*?```", "", open(path, encoding="utf-8").read(), flags=re.S)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, flags=re.M)}
broken = 0
for page in sys.argv[1:]:
    text = re.sub(r"```.*?```", "", open(page, encoding="utf-8").read(), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, heading = target.partition("#")
        path = os.path.join(os.path.dirname(page), path) if path else page
        if not os.path.exists(path) or (heading and heading not in headings(path)):
            print(f"{page}: there is no {target}")
            broken += 1
sys.exit(broken > 0)
END
}

commands() {
    local name ok=0
    for name in $("$build/nvfp4" --help | awk '/^Commands:/ { inside = 1; next } /^$/ { inside = 0 } inside { print $1 }'); do
        [ "$name" = help ] || grep -qE "^    (nvfp4 )?([a-z, ]*)\\b$name\\b" docs/command.md || { echo "nvfp4 $name is not mentioned"; ok=1; }
    done
    return $ok
}

check "the C program compiles and answers" c_example
check "the C++ program compiles and answers" cpp_example
check "the Python program answers" python_example
check "the environment variables" environment
check "the links" links
check "the code of docs" documented
check "the subcommands" commands
check "tables and chart of the comparison" python3 benches/compare.py --check
check "the drawing of the architecture" python3 docs/architecture.py --check
finish
