#!/usr/bin/env bash
# tests/run.sh itself, with scripts and a cargo that are created here: bash tests/runner/run.sh
#
# Two scripts run at a time, apart from those that run alone; the output of each stays together; a script that is killed has failed; a
# signal ends all of them; the table of seconds and the closing line. The last line is "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/common/checks.sh

tree=$work/tree
unset NVFP4_REQUIRE NVFP4_LONG NVFP4_SCRIPTS NVFP4_PARTS NVFP4_RUST_TESTS CARGO_TARGET_DIR

# A cargo whose tests pass, and stand-ins for tools.
make_tree() {
    local tool
    mkdir -p "$tree/bin" "$tree/tests" && cp tests/run.sh "$tree/tests" && cp -r tests/common "$tree/tests" || return 1
    for tool in g++ cmake pkg-config valgrind tmux abidiff mcs mono aarch64-linux-gnu-gcc qemu-aarch64; do
        ln -s "$(command -v true)" "$tree/bin/$tool"
    done
    cat >"$tree/bin/cargo" <<'END'
#!/usr/bin/env bash
echo "$*" >>calls
case "$*" in
    "nextest run"*) echo "     Summary [   1.0s] 3 tests run: 3 passed, 0 skipped" ;;
    *--no-run*) echo "  Executable tests/text.rs ($(command -v echo))" ;;
    *--doc*) echo "test result: ok. 2 passed; 0 failed; 1 ignored" ;;
esac
END
    chmod +x "$tree/bin/cargo"
}

# script NAME: an executable of the tree's tests, from standard input.
script() {
    mkdir -p "$tree/tests/$1" && cat - >"$tree/tests/$1/run.sh" <<<"#!/usr/bin/env bash
$(cat)" && chmod +x "$tree/tests/$1/run.sh"
}

no_scripts() { find "$tree/tests" -mindepth 2 -name run.sh -delete; }

# runs [OPTION...]: the tree's tests. What they print is in $work/said.
runs() {
    (cd "$tree" && rm -f calls && PATH=$tree/bin:$PATH bash tests/run.sh "$@") >"$work/said" 2>&1
    local code=$?
    cat "$work/said"
    return $code
}

closes() { [ "$(tail -1 "$work/said")" = "$1" ]; }

# Three tests of nextest and two examples; a further test is left out.
without_scripts() {
    runs && closes "5 passed, 0 failed, 1 skipped" && grep -q -- '--doc' "$tree/calls" && grep -q '^build .*--release' "$tree/calls"
}

# Each waits for the other to have begun.
two_at_a_time() {
    no_scripts
    script first <<<'touch first; for i in {1..100}; do [ -e second ] && break; sleep 0.1; done; [ -e second ]'
    script second <<<'touch second; for i in {1..100}; do [ -e first ] && break; sleep 0.1; done; [ -e first ]'
    rm -f "$tree"/{first,second} && NVFP4_SCRIPTS=2 runs && closes "7 passed, 0 failed, 1 skipped"
}

# Nothing runs beside those of ALONE, and one at a time if that is asked for.
alone() {
    no_scripts
    local name
    for name in first second hub synth; do
        script $name <<'END'
mkdir busy || exit
sleep 0.3
rmdir busy
END
    done
    NVFP4_SCRIPTS=1 runs && closes "9 passed, 0 failed, 1 skipped" || return 1
    script first <<<'sleep 0.5'
    script second <<<'sleep 0.2'
    NVFP4_SCRIPTS=2 runs && closes "9 passed, 0 failed, 1 skipped"
}

kept_together() {
    no_scripts
    script first <<<'for i in 1 2 3 4 5; do echo "FAILED  first $i"; sleep 0.1; done; echo "0 passed, 5 failed, 0 skipped"; exit 1'
    script second <<<'for i in 1 2 3 4 5; do echo "SKIPPED second $i"; sleep 0.1; done; echo "2 passed, 0 failed, 5 skipped"'
    ! NVFP4_SCRIPTS=2 runs && closes "7 passed, 5 failed, 6 skipped" &&
        [ "$(grep -n '^FAILED  first' "$work/said" | head -5 | cut -d: -f1 | awk 'NR > 1 && $1 != last + 1 { n++ } { last = $1 } END { print n + 0 }')" -eq 0 ] &&
        grep -qx 'tests/first/run.sh: FAILED  first 5' "$work/said" && grep -q '^second 5: tests/second' "$work/said"
}

killed() {
    no_scripts
    script first <<<'kill -9 -- -$(ps -o pgid= -p $$ | tr -d " ")'
    script second <<<'exit 3'
    ! runs && closes "5 passed, 2 failed, 1 skipped" && grep -qx 'FAILED: first was killed' "$work/said" &&
        grep -qx 'tests/second/run.sh: FAILED: exit code 3' "$work/said"
}

# Interrupts are not ignored, unlike in background jobs of a shell.
interrupts() {
    no_scripts
    script first <<<'[ $((0x$(sed -n "s/^SigIgn:\t//p" /proc/$$/status) & 2)) -eq 0 ]'
    runs && closes "6 passed, 0 failed, 1 skipped"
}

ended() {
    no_scripts
    script first <<<'echo $$ >pid; sleep 60 & wait'
    rm -f "$tree/pid"
    (cd "$tree" && PATH=$tree/bin:$PATH exec bash tests/run.sh) >"$work/said" 2>&1 &
    local run=$! i
    for i in {1..100}; do [ -s "$tree/pid" ] && break; sleep 0.1; done
    kill -TERM "$run"
    wait "$run"
    [ $? -eq 143 ] || return 1
    for i in {1..50}; do kill -0 "$(cat "$tree/pid")" 2>/dev/null || return 0; sleep 0.1; done
    echo "the script goes on"
    return 1
}

# The parts of .ci/run stand in it too.
table() {
    no_scripts
    script first <<<'while [ "$SECONDS" -lt 3 ]; do :; done'
    printf '7\t9\tlints\n' >"$work/before"
    NVFP4_PARTS=$work/before runs && grep -qx ' *7  *9  lints' "$work/said" && grep -qE '^ +[1-9][0-9]* +[1-9][0-9]*  first$' "$work/said" &&
        grep -qE '^ +0 +0  Rust tests$' "$work/said" && [ "$(grep -cE '^ +[0-9]+ +[0-9]+  all$' "$work/said")" -eq 1 ]
}

long() {
    no_scripts
    script first <<<'[ "${NVFP4_LONG-}" = 1 ]'
    ! runs && runs --long
}

# Scripts that are named are there.
names() {
    local name names
    names=$(sed -nE 's/^readonly (FAST|LONGEST|ALONE|GPU)=\(([a-z0-9 ]+)\).*/\2/p' tests/run.sh)
    [ "$(wc -l <<<"$names")" -eq 4 ] || return 1
    for name in $names; do
        [ -x "tests/$name/run.sh" ] || { echo "there is no tests/$name/run.sh"; return 1; }
    done
}

refused() { runs "$@"; [ $? -eq 2 ] && [ "$(wc -l <"$work/said")" -eq 1 ]; }

check "a tree of tests" make_tree
check "no scripts" without_scripts
check "two scripts at a time" two_at_a_time
check "scripts that run alone" alone
check "what a script prints stays together" kept_together
check "a script that is killed" killed
check "scripts take interrupts" interrupts
check "a signal ends scripts" ended
check "the table of seconds" table
check "long tests" long
check "names of scripts" names
check "another option" refused --longer
NVFP4_SCRIPTS=none check "no number of scripts" refused
finish
