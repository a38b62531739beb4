#!/usr/bin/env bash
# Says what a change of the C interface asks of the version: bash release/compare.sh [OLD [NEW]]
#
# OLD and NEW are headers, or shared libraries; by default the header of the last release, the newest of tests/abi, and include/nvfp4.h.
# Each difference is a line "VERDICT: WHAT", and the last line is the verdict:
#
#   major   a program that was compiled with OLD may break, or no longer compile
#   minor   there is more than there was: functions, constants, fields at the end of structs
#   patch   nothing has changed that a program could tell
#
# Two judges: release/interface.py, which knows what the header promises, reads the declarations, constants among them; and abidiff of
# libabigail compares the types, as a compiler knows them, of two libraries made from the headers. The worse verdict counts. A library
# tells the names of its functions alone. What a function does, and the C++ wrapper, are compared by nobody.
set -euo pipefail
cd "$(dirname "$0")/.."
source release/common.sh

[ $# -le 2 ] || usage "compare.sh takes OLD and NEW, not $# arguments"
old=${1-} new=${2-include/nvfp4.h}
if [ -z "$old" ]; then
    old=tests/abi/$(last_header)/nvfp4.h
    ! is_unreleased "$(last_header)" || echo "$(last_header) is not released yet: what is in tests/abi will be its header"
fi
for file in "$old" "$new"; do
    [ -r "$file" ] || fail "there is no header or library $file"
done
need "${CC:-gcc}" gcc
need python3 python3
need nm binutils

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 release/interface.py compare "$old" "$new" >"$work/differences" || exit

is_library() { [ "$(head -c 4 "$1" | tail -c 3)" = ELF ]; }

# types NAME HEADER [OLD]: a library with debug information, whose functions are those of the header.
types() {
    local name=$1
    shift
    python3 release/interface.py stub "$@" >"$work/$name.c"
    "${CC:-gcc}" -g -shared -fPIC -w "$work/$name.c" -o "$work/$name.so" || fail "$1 could not be compiled"
}

# differ NAME [OPTION...]: whether abidiff sees a difference from the old types; its report is in $work/report.
differ() {
    local code=0 name=$1
    shift
    abidiff "$@" "$work/old.so" "$work/$name.so" >"$work/report" 2>&1 || code=$?
    [ $((code & 3)) -eq 0 ] || fail "abidiff failed: $(head -1 "$work/report")"
    [ $code -ne 0 ]
}

if ! is_library "$old" && ! is_library "$new"; then
    if ! command -v abidiff >/dev/null; then
        install_abidiff >/dev/null 2>&1 || true
        need abidiff "Debian's abigail-tools"
    fi
    types old "$old"
    types new "$new"
    types seen "$new" "$old"
    if differ seen --no-added-syms; then
        sed '/^$/d; s/^/major: abidiff: /' "$work/report" >>"$work/differences"
    elif [ ! -s "$work/differences" ] && differ new; then
        sed '/^$/d; s/^/minor: abidiff: /' "$work/report" >>"$work/differences"
    fi
fi

cat "$work/differences"
for verdict in major minor; do
    ! grep -q "^$verdict:" "$work/differences" || { echo $verdict; exit; }
done
echo patch
