#!/usr/bin/env bash
# Checks README, docs/ and every other page: blocks of code (see blocks.py), the C, C++ and Python programs of README and docs/, environment
# variables, links, comparison and drawing. bash tests/readme/run.sh, with libNVFP4.so and nvfp4 in $NVFP4_BUILD (target/release if unset).
# The last line is "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/common/checks.sh

build=$(cd "${NVFP4_BUILD:-target/release}" && pwd) || exit 1

# block LANGUAGE LINES FILE: the first piece of code of a page in a language, which has as many lines as there should be.
block() {
    awk -v fence="\`\`\`$1" '$0 == fence { inside = 1; next } /^```$/ && inside { exit } inside' "$3" >"$work/example.$1"
    [ "$(wc -l <"$work/example.$1")" -eq "$2" ] || { echo "$(wc -l <"$work/example.$1") lines instead of $2"; return 1; }
}

# With a small model in place of the named one; its answers mean nothing.
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

# The second C++ program of the page, whose coroutines share a thread.
coroutine_example() {
    awk '/^```cpp/ { on = ++k == 2; next } /^```/ { on = 0 } on' docs/hosts.md >"$work/coroutines.cpp" && grep -q co_await "$work/coroutines.cpp" &&
        g++ -std=c++20 -pedantic-errors -Wall -Werror -Iinclude "$work/coroutines.cpp" -o "$work/coroutines" -L"$build" -lNVFP4 -Wl,-rpath,"$build" \
            -pthread && answers "$(printf '%s Because. \n' "Why is the sea salty?" "Why is the sky blue?")" bash -c "'$work/coroutines' | sort"
}

python_example() {
    export PYTHONPATH=$PWD/bindings/python NVFP4_LIB_PATH=$build PYTHONDONTWRITEBYTECODE=1
    block python 10 docs/hosts.md && answers "Because. Because. " python3 "$work/example.python" &&
        ! (cd "$work" && python3 example.python 2>said) && grep -q '^NotFound: .*qwen3-nvfp4' "$work/said"
}

# The second Python program of the page, whose streams are those of an event loop.
asyncio_example() {
    export PYTHONPATH=$PWD/bindings/python NVFP4_LIB_PATH=$build PYTHONDONTWRITEBYTECODE=1
    awk '/^```python/ { on = ++k == 2; next } /^```/ { on = 0 } on' docs/hosts.md >"$work/event-loop.py" && grep -q asyncio "$work/event-loop.py" &&
        answers "Because. Because. " python3 "$work/event-loop.py"
}

# The C and Python programs of the page with a processor of logits say the same, and not what the model says alone.
processors() {
    export PYTHONPATH=$PWD/bindings/python NVFP4_LIB_PATH=$build PYTHONDONTWRITEBYTECODE=1
    local folder=$work/once language
    mkdir -p "$folder" && ln -sf "$PWD/tests/golden/model/qwen3_tied" "$folder/qwen3-nvfp4" || return 1
    for language in c python; do
        awk -v fence="\`\`\`$language" '$0 == fence { on = 1; text = ""; next }
            /^```/ { if (on && text ~ /logits/) printf "%s", text; on = 0 } on { text = text $0 "\n" }' docs/hosts.md >"$folder/once.$language" || return 1
    done
    grep -v 'options.logits_processor' "$folder/once.c" >"$folder/alone.c"
    gcc -std=c99 -pedantic-errors -Wall -Werror -Iinclude "$folder/once.c" -o "$folder/once" -L"$build" -lNVFP4 -Wl,-rpath,"$build" &&
        gcc -std=c99 -Iinclude "$folder/alone.c" -o "$folder/alone" -L"$build" -lNVFP4 -Wl,-rpath,"$build" &&
        (cd "$folder" && ./once >c && python3 once.python >python && ./alone >other) && [ -s "$folder/c" ] && cmp "$folder/c" "$folder/python" &&
        ! cmp -s "$folder/c" "$folder/other"
}

# The C++ and Python programs of the page with a model from memory.
from_memory() {
    export PYTHONPATH=$PWD/bindings/python NVFP4_LIB_PATH=$build PYTHONDONTWRITEBYTECODE=1
    local language
    for language in cpp python; do
        awk -v fence="\`\`\`$language" '$0 == fence { on = 1; text = ""; next }
            /^```/ { if (on && text ~ /load_files|from_files/) printf "%s", text; on = 0 } on { text = text $0 "\n" }' docs/hosts.md >"$work/memory.$language"
        [ -s "$work/memory.$language" ] || return 1
    done
    g++ -std=c++17 -pedantic-errors -Wall -Werror -Iinclude "$work/memory.cpp" -o "$work/memory" -L"$build" -lNVFP4 -Wl,-rpath,"$build" -pthread &&
        answers "Because. " "$work/memory" && answers "Because. " python3 "$work/memory.python"
}

# The Python program of the page that lends its threads.
pool_example() {
    export PYTHONPATH=$PWD/bindings/python NVFP4_LIB_PATH=$build PYTHONDONTWRITEBYTECODE=1
    awk '/^```python/ { on = 1; text = ""; next } /^```/ { if (on && text ~ /Pool/) printf "%s", text; on = 0 } on { text = text $0 "\n" }' \
        docs/hosts.md >"$work/pool.py" && answers "Because. " python3 "$work/pool.py"
}

# The C, C++ and Python programs of the page with embeddings print the same, and the command takes the line beneath them.
embeddings() {
    export PYTHONPATH=$PWD/bindings/python NVFP4_LIB_PATH=$build PYTHONDONTWRITEBYTECODE=1
    local folder=$work/embeddings language
    mkdir -p "$folder" && ln -sfn "$PWD/tests/golden/embedding/qwen3" "$folder/qwen3-embedding" || return 1
    for language in c cpp python; do
        awk -v fence="\`\`\`$language" '$0 == fence { on = 1; text = ""; next }
            /^```/ { if (on && text ~ /qwen3-embedding/) printf "%s", text; on = 0 } on { text = text $0 "\n" }' docs/hosts.md >"$folder/near.$language" || return 1
    done
    gcc -std=c99 -pedantic-errors -Wall -Werror -Iinclude "$folder/near.c" -o "$folder/near-c" -L"$build" -lNVFP4 -Wl,-rpath,"$build" &&
        g++ -std=c++17 -pedantic-errors -Wall -Werror -Iinclude "$folder/near.cpp" -o "$folder/near-cpp" -L"$build" -lNVFP4 -Wl,-rpath,"$build" -pthread ||
        return 1
    cd "$folder" && ./near-c >c && ./near-cpp >cpp && python3 near.python >python && [ "$(grep -cE '^-?0\.[0-9]{3} [TG]' c)" -eq 2 ] && cmp c cpp && cmp c python &&
        eval "$(grep '^    nvfp4 embed' "$OLDPWD/docs/hosts.md" | sed "s|nvfp4|$build/nvfp4|")" >table && grep -q 'cosines of 48 dimensions' table
}

# The reranker of docs/conversation.md scores a document as its logits do, and shares the beginning of the prompts.
reranker() {
    export PYTHONPATH=$PWD/bindings/python NVFP4_LIB_PATH=$build PYTHONDONTWRITEBYTECODE=1
    local folder=$work/reranker
    mkdir -p "$folder" && ln -sfn "$PWD/tests/golden/embedding/qwen3" "$folder/qwen3-reranker" || return 1
    awk '/^```python/ { on = 1; text = ""; next }
        /^```/ { if (on && text ~ /qwen3-reranker/) printf "%s", text; on = 0 } on { text = text $0 "\n" }' docs/conversation.md >"$folder/rank.py" || return 1
    cat >"$folder/check.py" <<'END'
import rank
model = rank.nvfp4.Model("qwen3-reranker", device="cpu")
encode = model.tokenizer.encode
for document, score in zip(rank.documents, rank.rank(model, "Why?", rank.documents)):
    session = model.session()
    asked = f"<Instruct>: {rank.TASK}\n<Query>: Why?\n<Document>: {document}"
    session.prefill(encode(rank.BEFORE, add_special=False) + encode(asked, add_special=False) + encode(rank.AFTER, add_special=False))
    yes, no = (session.logits()[encode(word, add_special=False)[0]] for word in ("yes", "no"))
    assert abs(score - 1 / (1 + rank.math.exp(no - yes))) < 1e-5, (score, yes, no)
END
    cd "$folder" && python3 rank.py >said && [ "$(grep -cE '^[01]\.[0-9]{3} [TG]' said)" -eq 2 ] && python3 check.py >said
}

# Every variable that the library reads, and no other of its own.
environment() {
    diff --label docs/environment.md --label src/base/env.rs -u \
        <(grep -oE '^\| `NVFP4_[A-Z0-9_]+`' docs/environment.md | grep -oE 'NVFP4_[A-Z0-9_]+' | sort -u) \
        <(grep -oE '(text|path|number_up_to)\("NVFP4_[A-Z0-9_]+"' src/base/env.rs | grep -oE 'NVFP4_[A-Z0-9_]+' | sort -u)
}

# Every block of code anywhere, and that one which is wrong is found.
every_block() { python3 tests/readme/blocks.py check "$build"; }

wrong_blocks() {
    local tree=$work/tree
    mkdir -p "$tree/include" "$tree/docs" "$tree/bindings" "$tree/tests" "$tree/src" && cp -r examples benches "$tree" && cp -r bindings/python "$tree/bindings" &&
        cp -r tests/readme tests/data "$tree/tests" && cp src/lib.rs src/README.md "$tree/src" && cp -r README.md .ci "$tree" && cp -r release "$tree" || return 1
    # Nine mistakes, each of its own kind.
    sed 's/question, strlen(question), NULL, NULL, print_piece/question, strlen(question), NULL, print_piece/' include/nvfp4.h >"$tree/include/nvfp4.h" &&
        sed 's/ \*         if (piece.part ==/ *         if (piece.parts ==/' include/nvfp4.hpp >"$tree/include/nvfp4.hpp" || return 1
    cat >"$tree/docs/wrong.md" <<'END'
```c
    nothing_like_this();
```

```python
import nvfp4
chat = nvfp4.Model("a").chat()
chat.asks("b")
nvfp4.Modell("a")
nvfp4.Cancel(1)
```

```fsharp
let nothing = 1
```

```json
{'a': 1}
```

    nvfp4 chat --modell MODEL; nvfp4 talk
    bash tests/none.sh
    if true
END
    (cd "$tree" && python3 tests/readme/blocks.py check "$build" >"$work/found") && { echo "nothing was found"; return 1; }
    cat "$work/found"
    local needle
    for needle in 'include/nvfp4.h:5: does not compile' "has no member named .parts." 'docs/wrong.md:2: no whole program' 'a ChatSession has no asks' \
        'nvfp4 has no Modell' 'Cancel(): too many' 'docs/wrong.md:14: no whole program' 'docs/wrong.md:18: ' 'docs/wrong.md:21: .*syntax error'; do
        grep -q -- "$needle" "$work/found" || { echo "not found: $needle"; return 1; }
    done
    sed -i 's/^    if true$//' "$tree/docs/wrong.md" && (cd "$tree" && python3 tests/readme/blocks.py check "$build" >"$work/found")
    for needle in 'nvfp4 chat has no option --modell' 'nvfp4 has no command talk' 'there is no tests/none.sh'; do
        grep -q -- "$needle" "$work/found" || { echo "not found: $needle"; return 1; }
    done
}

# Programs of the Python package's page, with a small model in place of the one that they name. The second one needs numpy: see tests/release.
python_page() {
    export PYTHONPATH=$PWD/bindings/python NVFP4_LIB_PATH=$build PYTHONDONTWRITEBYTECODE=1
    mkdir -p "$work/page" && python3 tests/python/reciter.py "$work/page/qwen3-nvfp4" "Because. " || return 1
    local number
    for number in 1 3; do
        awk -v n=$number '/^```python/ { on = ++k == n; next } /^```/ { on = 0 } on' bindings/python/README.md >"$work/page/$number.py" &&
            [ -s "$work/page/$number.py" ] && (cd "$work/page" && CUDA_VISIBLE_DEVICES='' python3 $number.py >"$number.out") && [ -s "$work/page/$number.out" ] || return 1
    done
    [ -f "$work/page/qwen3-tuned/model.safetensors" ]
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
check "the C++ program with coroutines answers" coroutine_example
check "the Python program answers" python_example
check "the asyncio program answers" asyncio_example
check "the programs with a processor of logits" processors
check "the programs with a model from memory" from_memory
check "the Python program with a pool" pool_example
check "the programs with embeddings" embeddings
check "the reranker" reranker
check "the environment variables" environment
check "the links" links
check "every block of code" every_block
check "blocks that are wrong are found" wrong_blocks
check "the programs of the Python package's page" python_page
check "the subcommands" commands
check "tables and chart of the comparison" python3 benches/compare.py --check
check "the drawing of the architecture" python3 docs/architecture.py --check
finish
