# Common parts of the scripts that run tests, sourced from the repository's root. Creates the folder $work, which is removed when a script
# ends, and counts in $passed, $failed and $skipped.
# shellcheck shell=bash

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0 failed=0 skipped=0

# check NAME COMMAND...: a test, in a shell of its own. What the command prints is in $work/log; its beginning is shown if it fails.
check() {
    local name=$1
    shift
    if ("$@") >"$work/log" 2>&1; then
        echo "ok      $name"
        passed=$((passed + 1))
    else
        echo "FAILED  $name"
        head -60 "$work/log" | sed 's/^/    /'
        failed=$((failed + 1))
    fi
}

# skip NAME REASON [WORD]: a test that cannot run here, which fails if NVFP4_REQUIRE names WORD.
skip() {
    if [ -n "${3-}" ] && [[ ",${NVFP4_REQUIRE-}," == *,$3,* ]]; then
        echo "FAILED  $1: NVFP4_REQUIRE names $3, and $2"
        failed=$((failed + 1))
    else
        echo "SKIPPED $1: $2"
        skipped=$((skipped + 1))
    fi
}

# The version of the package, which Cargo.toml has.
package_version() { sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1; }

# again COMMAND...: tries up to three times, because a network may fail once.
again() { "$@" || { sleep 5 && "$@"; } || { sleep 20 && "$@"; }; }

# with_lock NAME COMMAND...: runs it while no other script holds the lock of that name, for work that concurrent scripts share.
with_lock() (
    folder=${CARGO_TARGET_DIR:-target}/locks
    mkdir -p "$folder" && exec 9>"$folder/$1" || exit
    shift
    ! command -v flock >/dev/null || flock 9
    "$@" 9>&-
)

# Removes compiled crates from cargo's log, except for a line from time to time as a sign of progress.
without_compiling() {
    awk '/^ +(Compiling|Checking|Download(ed|ing)|Updating|Locking|Adding|Blocking) / { if (++n % 50 == 0) print "    " $0 " ..., " n; fflush(); next }
         { print; fflush() }'
}

# How tests/run.sh compiles Rust tests; a script that compiles a few of its own does so too, which leaves their dependencies compiled.
readonly CHECKED=(--release --config tests/common/checked.toml)

# rust_test NAME ARGUMENT...: runs Rust tests, those of tests/NAME.rs, or the library's own if NAME is lib.
rust_test() {
    local executable
    executable=$(rust_executable "$1") && "$executable" "${@:2}"
}

# rust_executable NAME: prints the path of such tests, which tests/run.sh has compiled and lists in the file $NVFP4_RUST_TESTS, or else cargo
# compiles here.
rust_executable() {
    local path=tests/$1.rs option=--test=$1 executable log=$work/compiled
    [ "$1" != lib ] || path="unittests src/lib.rs" option=--lib
    executable=$(executable_of "$path" "${NVFP4_RUST_TESTS:-/dev/null}")
    if [ ! -x "$executable" ]; then
        cargo test --locked --color never --no-run "$option" >"$log" 2>&1 || { cat "$log" >&2; return 1; }
        executable=$(executable_of "$path" "$log")
    fi
    echo "$executable"
}

# executable_of PATH LOG: the executable that cargo has built of a source file, from cargo's log.
executable_of() { sed -n "s|^ *Executable $1 (\\(.*\\))$|\\1|p" "$2"; }

# Clears the environment's settings of the Hugging Face hub, its cache, and the way to it.
no_hub() {
    unset HF_TOKEN HUGGING_FACE_HUB_TOKEN HF_TOKEN_PATH HF_HUB_OFFLINE TRANSFORMERS_OFFLINE HF_HUB_CACHE HUGGINGFACE_HUB_CACHE
    unset http_proxy HTTP_PROXY all_proxy ALL_PROXY
}

# start_hub CONFIG: a stand-in of the hub (tests/hub/hub.py) until the script ends. Its address is in $HF_ENDPOINT.
start_hub() {
    local waited=0
    no_hub
    python3 tests/hub/hub.py "$1" "$work/ports" &
    hub=$!
    trap 'kill "$hub"; rm -rf "$work"' EXIT
    until [ -s "$work/ports" ]; do
        [ $((waited += 1)) -le 1200 ] || { echo "the hub did not start"; return 1; }
        sleep 0.1
    done
    export HF_ENDPOINT
    HF_ENDPOINT=$(sed 's/.*"hub": "\([^"]*\)".*/\1/' "$work/ports")
}

# Installs Debian packages, where there is apt-get and it is allowed.
install_packages() { with_lock packages apt_install "$@"; }

apt_install() {
    command -v apt-get >/dev/null || return
    local root=()
    [ "$(id -u)" -eq 0 ] || root=(sudo -n)
    export DEBIAN_FRONTEND=noninteractive
    "${root[@]}" apt-get update -qq && "${root[@]}" apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# The line that tests/run.sh reads, and the exit code that it stands for.
finish() {
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ] && [ $((passed + skipped)) -gt 0 ]
    exit
}
