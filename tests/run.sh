#!/usr/bin/env bash
# Runs every test: bash tests/run.sh [--fast | --long | --gpu]
#
#   --fast  what shows most mistakes in under 8 minutes on two cores, from compiled dependencies: the Rust tests, and the scripts that need
#           neither a release build nor long, with the library and the command as the Rust tests compile them
#   --long  everything, with the random loops at their full length (NVFP4_LONG=1, which works for any one test too). Without it they are
#           short, and the same at every run
#   --gpu   every test of a GPU, on a machine that has one, where none may be skipped (NVFP4_REQUIRE=cuda). Without cargo, the folder
#           $NVFP4_GPU_TESTS has the executables `cuda` and `faults` (cargo test --release --test cuda --test faults --no-run)
#
# Without an option it installs the tools that are missing (cargo-nextest with cargo; compilers, emulators and the like with apt-get, where that
# is allowed), runs the Rust tests and the documentation's examples, builds the release library, and then runs every
# executable tests/*/run.sh. Those start in the repository's root and find libNVFP4.so and nvfp4 in the folder $NVFP4_BUILD;
# each may close with a line "N passed, N failed, N skipped", and counts as one test if it does not.
#
# Two scripts run at a time where there are two processors (NVFP4_SCRIPTS says another number), and what each printed is shown when it
# ends. Those of ALONE run with nothing beside them.
#
# A test that cannot run here, or not all of it, prints a line starting with SKIPPED and passes; such tests are counted as
# skipped too. Name what must not be skipped in NVFP4_REQUIRE (avx512, cuda, ...). Of tests that pass nothing is shown but their
# number, so that a log is short where something fails. What a failing test prints is shown where it ran. At the end stand the seconds
# of each part, after those of the file $NVFP4_PARTS if there is one, what was skipped and what failed, and the last line,
# "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/.."
source tests/common/checks.sh
source tests/common/parts.sh

# Scripts for --fast: half a minute at most, and no more of the build than tests have.
readonly FAST=(header hub python readme templates terminal)
# Scripts that use a GPU if there is one, beside the Rust tests of these names.
readonly GPU=(c python torchsharp) GPU_TESTS=(cuda faults)
# Scripts that take longest, which begin first so that two end together.
readonly LONGEST=(c aarch64 dotnet kernels release)
# Scripts that compare a rate or a time with a bar, and a real model that fills both processors: nothing runs beside them.
readonly ALONE=(hub smollm2 synth)

mode=${1-}
case $mode in
    "" | --fast | --gpu) ;;
    --long) export NVFP4_LONG=1 ;;
    *)
        echo "usage: bash tests/run.sh [--fast | --long | --gpu], not $mode" >&2
        exit 2
        ;;
esac

at_a_time=${NVFP4_SCRIPTS:-$(($(nproc) > 1 ? 2 : 1))}
if [[ ! $at_a_time =~ ^[1-9][0-9]*$ ]]; then
    echo "NVFP4_SCRIPTS is '$at_a_time': it takes the number of scripts that run at a time, 1 or more" >&2
    exit 2
fi

target=${CARGO_TARGET_DIR:-target}
target=$(mkdir -p "$target" && cd "$target" && pwd) || exit 1
export NVFP4_BUILD=$target/release

# title WORDS...: a heading, with the seconds since the start.
title() { printf '\n== %s, at %d s\n' "$*" "$SECONDS"; }

# add PASSED FAILED SKIPPED
add() { passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3)); }

# part NAME COMMAND...: runs a part of the tests in a subshell, and stores its counts in $work/counts/NAME.
part() { timed "$work/took-$1" counting "$@"; }

counting() {
    local name=$1 code
    passed=0 failed=0 skipped=0
    shift
    "$@"
    code=$?
    echo "$passed $failed $skipped" >"$work/counts/$name"
    return $code
}

# count NAME: adds a part's counts, and its times to the table. A part that was killed has no counts, and has failed.
count() {
    local counted
    if [ -s "$work/counts/$1" ] && [ -s "$work/took-$1" ]; then
        read -r -a counted <"$work/counts/$1"
        add "${counted[@]}"
        sed "s|\$|\t$1|" "$work/took-$1" >>"$work/parts"
    else
        echo "FAILED: $1 was killed" | tee -a "$work/failures"
        add 0 1 0
    fi
}

# counted NAME COMMAND...: a part, which is shown while it runs.
counted() {
    part "$@"
    local code=$?
    count "$1"
    return $code
}

# Prints the number before a word in a summary line; 0 if there is none.
number() { grep -oE "[0-9]+ $1" <<<"$2" | head -1 | grep -oE '^[0-9]+' || echo 0; }

# Removes passing tests and their output from nextest's log.
quiet() {
    awk '/^ *[A-Z-]+ \[ *[0-9.]+s\]/ { hide = $1 == "PASS" }
         /^ *Summary \[/ { hide = 0 }
         !hide { print; fflush() }'
}

# Leaves out of a script's log the lines that say of a test that it passed.
without_passing() { grep --line-buffered -vE '^ok  | \.\.\. ok$'; }

# Appends "NAME: SKIPPED reason" for the skips in a log to the list, and prints how many tests skipped something. In nextest's log the name
# is that of the test with this output, else it is the given one.
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

# Debian packages by the commands that they bring: those for all tests, and those that scripts would each install for themselves, which
# costs a list of packages each time.
readonly NEEDED=(g++ cmake pkg-config valgrind tmux)
declare -A PACKAGES=([abidiff]=abigail-tools [fish]=fish [mcs]=mono-mcs [mono]=mono-runtime [zsh]=zsh)
[ "$(uname -m)" = aarch64 ] || PACKAGES+=([aarch64-linux-gnu-gcc]="gcc-aarch64-linux-gnu libc6-dev-arm64-cross" [qemu-aarch64]=qemu-user)
readonly PACKAGES

# install_system_tools [all]: the required tools, and with `all` those of single scripts, which install them themselves if that fails.
install_system_tools() {
    local tool missing=() more=()
    for tool in "${NEEDED[@]}"; do
        command -v "$tool" >/dev/null || missing+=("$tool")
    done
    [ "${1-}" != all ] || for tool in "${!PACKAGES[@]}"; do
        # shellcheck disable=SC2206 # Several packages.
        command -v "$tool" >/dev/null || more+=(${PACKAGES[$tool]})
    done
    [ $((${#missing[@]} + ${#more[@]})) -eq 0 ] && return
    title "installing ${missing[*]} ${more[*]}"
    [ ${#more[@]} -gt 0 ] && install_packages "${missing[@]}" "${more[@]}" && return
    [ ${#missing[@]} -eq 0 ] || install_packages "${missing[@]}"
    for tool in "${missing[@]}"; do
        command -v "$tool" >/dev/null || echo "$tool is missing and could not be installed; tests that need it will say so"
    done
}

install_nextest() {
    cargo nextest --version >/dev/null 2>&1 && return
    title "installing cargo-nextest"
    cargo install --locked cargo-nextest
}

# install_tools [all]: succeeds if the tools to run tests are there.
install_tools() { install_system_tools "$@"; install_nextest; }

# compile_tests [OPTION...]: with options for cargo. Lists the executables for scripts that run tests with something that they have fetched.
compile_tests() {
    title "compiling Rust tests"
    cargo test --locked --color never "$@" --no-run 2>&1 | tee "$work/executables" | without_compiling | grep --line-buffered -v '^ *Executable '
    [ "${PIPESTATUS[0]}" -eq 0 ] && return
    add 0 1 0
    return 1
}

# rust_tests [OPTION...]: all tests, or those selected by options for nextest.
rust_tests() {
    title "Rust tests"
    local log=$work/rust summary run ok
    # One more than there are processors, because network tests wait most of their time.
    cargo nextest run --locked "$@" --test-threads $(($(nproc) + 1)) --no-fail-fast --color never --status-level pass --final-status-level none \
        --success-output immediate 2>&1 | tee "$log" | without_compiling | quiet
    local code=${PIPESTATUS[0]}
    failures "$log" "Rust tests"
    summary=$(grep -E '^ *Summary \[' "$log" | tail -1)
    run=$(number 'tests? run' "${summary//\// }")
    ok=$(number passed "$summary")
    add "$ok" $((run - ok)) $(($(number skipped "$summary") + $(skips "$log" rust)))
    # Without a summary nothing ran: nextest itself failed.
    [ "$code" -ne 0 ] && [ "$run" -eq "$ok" ] && add 0 1 0
}

# documentation_tests [OPTION...]
documentation_tests() {
    title "documentation examples"
    local log=$work/doc result
    cargo test --locked --quiet --doc --color never "$@" 2>&1 | tee "$log"
    local code=${PIPESTATUS[0]}
    failures "$log" "documentation examples"
    result=$(grep -E '^test result:' "$log" | tail -1)
    add "$(number passed "$result")" "$(number failed "$result")" "$(number ignored "$result")"
    [ "$code" -ne 0 ] && [ "$(number failed "$result")" -eq 0 ] && add 0 1 0
}

# rust [OPTION...]: compiles the Rust tests with options for cargo, and runs them. Fails if they do not compile.
rust() {
    counted "compiling Rust tests" compile_tests "$@" || return
    export NVFP4_RUST_TESTS=$work/executables
    counted "Rust tests" rust_tests "$@"
    return 0
}

# script_tests NAME: tests/NAME/run.sh, as a part.
script_tests() {
    local script=tests/$1/run.sh log=$work/script-$1 summary code skips
    "./$script" 2>&1 </dev/null | tee "$log" | without_passing
    code=${PIPESTATUS[0]}
    failures "$log" "$script"
    skips=$(skips "$log" "$script")
    summary=$(grep -E '^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$' "$log" | tail -1)
    if [ -n "$summary" ]; then
        add "$(number passed "$summary")" "$(number failed "$summary")" "$(number skipped "$summary")"
        [ "$code" -ne 0 ] && [ "$(number failed "$summary")" -eq 0 ] && add 0 1 0
    elif [ "$code" -eq 0 ]; then
        add 1 0 "$skips"
    else
        echo "FAILED: exit code $code" | tee "$log.code"
        failures "$log.code" "$script"
        add 0 1 0
    fi
    # Failures are in the counts.
    return 0
}

# Names of scripts that run, by the number of their process, which is that of their process group.
declare -A running=()

# Ends the scripts that run, with all that they have started.
stop_scripts() {
    local process
    for process in "${!running[@]}"; do
        kill -TERM -- "-$process" 2>/dev/null
    done
}

# begin NAME: in the background, with its output in a file. Under job control its processes are a group, and receive signals as from a
# terminal; without it, they would ignore interrupts.
begin() {
    echo "tests/$1/run.sh begins, at $SECONDS s"
    set -m
    part "$1" script_tests "$1" >"$work/out-$1" 2>&1 &
    set +m
    running[$!]=$1
}

# Waits until a script ends, and shows those that have.
await() {
    local process name
    wait -n
    for process in "${!running[@]}"; do
        kill -0 "$process" 2>/dev/null && continue
        name=${running[$process]}
        unset "running[$process]"
        title "tests/$name/run.sh"
        cat "$work/out-$name"
        count "$name"
    done
}

# run_scripts NUMBER NAME...: runs that many at a time.
run_scripts() {
    local most=$1 name
    shift
    for name; do
        [ -x "tests/$name/run.sh" ] || continue
        while [ ${#running[@]} -ge "$most" ]; do await; done
        begin "$name"
    done
    while [ ${#running[@]} -gt 0 ]; do await; done
}

# is_one_of NAME OTHER...
is_one_of() { [[ " ${*:2} " == *" $1 "* ]]; }

# all_scripts NAME...: runs these, the longest first, and those that run alone at the end.
all_scripts() {
    local name beside=() alone=()
    for name in "${LONGEST[@]}"; do
        is_one_of "$name" "$@" && beside+=("$name")
    done
    for name; do
        if is_one_of "$name" "${ALONE[@]}"; then
            alone+=("$name")
        elif ! is_one_of "$name" "${LONGEST[@]}"; then
            beside+=("$name")
        fi
    done
    run_scripts "$at_a_time" "${beside[@]}"
    run_scripts 1 "${alone[@]}"
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

# Prints the seconds of each part, and the processor seconds, the longest part first.
table() {
    local from=("$work/parts")
    [ ! -s "${NVFP4_PARTS-}" ] || from=("$NVFP4_PARTS" "${from[@]}")
    echo "seconds  of processors  part"
    sort -k1,1nr "${from[@]}" | awk -F'\t' -v all="$SECONDS" -v before="${NVFP4_PARTS-}" '
        { printf "%7d  %13d  %s\n", $1, $2, $3; sum += $2 }
        END { while (before != "" && (getline <before) > 0) all += $1; printf "%7d  %13d  %s\n", all, sum, "all" }'
}

mkdir "$work/counts"
trap 'stop_scripts; rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if [ "$mode" = --gpu ] && [ -n "${NVFP4_GPU_TESTS-}" ]; then
    export NVFP4_REQUIRE=cuda
    counted "GPU tests" prebuilt_tests
else
    extra=()
    [[ $mode = --[fg]* ]] || extra=(all)
    if ! counted tools install_tools "${extra[@]}"; then
        echo "cargo-nextest could not be installed"
        failed=1
        finish
    fi
    case $mode in
        "" | --long)
            rust "${CHECKED[@]}" && counted "documentation examples" documentation_tests "${CHECKED[@]}"
            scripts=(tests/*/run.sh)
            scripts=("${scripts[@]#tests/}")
            scripts=("${scripts[@]%/run.sh}")
            counted "release build" build --release || scripts=()
            ;;
        --fast)
            rust
            scripts=("${FAST[@]}")
            export NVFP4_BUILD=$target/debug
            counted build build || scripts=()
            ;;
        --gpu)
            export NVFP4_REQUIRE=cuda
            counted "Rust tests" rust_tests --release "${GPU_TESTS[@]/#/--test=}"
            scripts=("${GPU[@]}")
            counted "release build" build --release || scripts=()
            ;;
    esac
    [ ${#scripts[@]} -eq 0 ] || all_scripts "${scripts[@]}"
fi

title "parts"
table
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
