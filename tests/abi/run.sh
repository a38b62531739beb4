#!/usr/bin/env bash
# The promise to hosts: bash tests/abi/run.sh, with libNVFP4.so in $NVFP4_BUILD (target/release if unset).
#
# tests/abi/VERSION has the header of each release that changed it, and programs of that time. Those of this major version are compiled
# with their header and with each later one, linked with a library that has no more than that header's functions, and run with the
# library of today. A program with structs of a later version runs too. Then release/compare.sh: what it says of the interface since the
# last release, and of changes whose verdict is known. The last line is "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/common/checks.sh

build=$(cd "${NVFP4_BUILD:-target/release}" && pwd) || exit 1
library=$build/libNVFP4.so
model=$PWD/tests/golden/model/qwen3_tied
header=include/nvfp4.h
warnings=(-pedantic-errors -Wall -Wextra -Wconversion -Wshadow -Wundef -Werror)
export LD_LIBRARY_PATH=$build${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

# in_release COMMAND...: with the functions of release/common.sh.
in_release() (
    set -e
    source release/common.sh
    "$@"
)

version=$(package_version)
major=${version%%.*}
last=$(in_release last_header)
mapfile -t versions < <(find tests/abi -path "tests/abi/$major.*/nvfp4.h" | cut -d/ -f3 | sort -V)

# Until a version is released, what is kept is the header of today; afterwards, that of its tag.
kept_headers_are_right() {
    local kept of
    for kept in "${versions[@]}"; do
        if in_release is_unreleased "$kept"; then
            diff -u "tests/abi/$kept/nvfp4.h" $header || { echo "run: bash tests/header/run.sh --bless"; return 1; }
        elif git rev-parse --quiet --verify "refs/tags/v$kept" >/dev/null 2>&1; then
            git show "v$kept:$header" | diff -u - "tests/abi/$kept/nvfp4.h" || return 1
        fi
        of=$(sed -n 's/^#define NVFP4_VERSION_M[AI][JN]OR //p' "tests/abi/$kept/nvfp4.h" | xargs)
        [ "$of" = "$(cut -d. -f1,2 <<<"$kept" | tr . ' ')" ] || { echo "tests/abi/$kept has the header of $of"; return 1; }
    done
}

# of_then VERSION: a library with the functions of that header, under the soname of a program that is linked with it.
of_then() {
    mkdir -p "$work/$1" && python3 release/interface.py stub "tests/abi/$1/nvfp4.h" >"$work/$1/stub.c" &&
        gcc -shared -fPIC -w -Wl,-soname,"libNVFP4.so.$major" "$work/$1/stub.c" -o "$work/$1/libNVFP4.so"
}

# program SOURCE VERSION NAME: compiled and linked as with that version.
program() {
    gcc -std=c99 -g "${warnings[@]}" -I"tests/abi/$2" -Itests/c "$1" -o "$work/$3" -L"$work/$2" -lNVFP4 -lm &&
        [ "$(readelf -d "$work/$3" | grep -cF "[libNVFP4.so.$major]")" -eq 1 ]
}

# runs NAME [COMMAND...]: in a folder of its own.
runs() {
    local name=$1
    shift
    rm -rf "$work/$name-files" && mkdir "$work/$name-files" && "$@" "$work/$name" "$model" "$work/$name-files"
}

newer_compiles() {
    gcc -std=c99 -g "${warnings[@]}" -Iinclude -Itests/c tests/abi/newer.c -o "$work/newer" -L"$build" -lNVFP4
}

# It may break programs only with another major version.
promise_is_kept() {
    local said
    said=$(bash release/compare.sh) || return
    echo "$said"
    [ "$(tail -1 <<<"$said")" != major ] || [ "$major" != "${last%%.*}" ]
}

library_has_all() {
    local said
    said=$(bash release/compare.sh "tests/abi/$1/nvfp4.h" "$library") || return
    echo "$said"
    [ "$(tail -1 <<<"$said")" != major ]
}

# says VERDICT WORDS SUBSTITUTION: what compare.sh says of the header after a substitution of perl's, which is then in $said.
says() {
    local verdict=$1 words=$2
    perl -0777 -p -e "\$n += $3; END { exit !\$n }" $header >"$work/altered.h" || { echo "nothing was changed"; return 1; }
    said=$(bash release/compare.sh $header "$work/altered.h") || return
    echo "$said"
    [ "$(tail -1 <<<"$said")" = "$verdict" ] && grep -F -- "$words" <<<"$said"
}

# both VERDICT...: abidiff says so too, as types tell it.
both() { says "$@" && grep -F "major: abidiff: " <<<"$said"; }

# The other way round: what was added is taken away.
is_major_backwards() {
    local said
    perl -0777 -p -e 's/NVFP4_API\s+NVFP4_Status NVFP4_set_threads/NVFP4_API int32_t NVFP4_added_here(void);\n$&/' $header >"$work/added.h"
    said=$(bash release/compare.sh "$work/added.h" $header) || return
    echo "$said"
    [ "$(tail -1 <<<"$said")" = major ] && grep -xF "major: NVFP4_added_here() is gone" <<<"$said"
}

libraries_are_compared_by_names() {
    printf 'int NVFP4_a(void) { return 0; }\nint NVFP4_b(void) { return 0; }\n' | gcc -shared -fPIC -xc - -o "$work/old.so" &&
        printf 'int NVFP4_b(void) { return 0; }\n' | gcc -shared -fPIC -xc - -o "$work/new.so" || return 1
    bash release/compare.sh "$work/old.so" "$work/new.so" | diff - <(printf 'major: NVFP4_a() is gone\nmajor\n') &&
        bash release/compare.sh "$work/new.so" "$work/old.so" | diff - <(printf 'minor: NVFP4_a() is new\nminor\n') &&
        bash release/compare.sh "$work/old.so" "$work/old.so" | diff - <(echo patch)
}

refuses() {
    local words=$1 said
    shift
    ! said=$("$@" 2>&1 >/dev/null) && echo "$said" && [ "$(wc -l <<<"$said")" -eq 1 ] && grep -qF -- "$words" <<<"$said"
}

check "kept headers are right" kept_headers_are_right
for at in "${!versions[@]}"; do
    check "a library of ${versions[at]}" of_then "${versions[at]}"
    check "the library has what ${versions[at]} had" library_has_all "${versions[at]}"
done
programs=()
for at in "${!versions[@]}"; do
    for source in "tests/abi/${versions[at]}"/*.c; do
        [ -e "$source" ] || continue
        for with in "${versions[@]:at}"; do
            name=$(basename "$source" .c)-${versions[at]}-with-$with
            programs+=("$name")
            check "$name compiles" program "$source" "$with" "$name"
            check "$name runs" runs "$name"
        done
    done
done
check "there are programs of this major version" [ ${#programs[@]} -gt 0 ]
check "newer compiles" newer_compiles
check "newer runs" runs newer

command -v abidiff >/dev/null || install_packages abigail-tools || true
if ! command -v abidiff >/dev/null; then
    skip "comparing headers" "abidiff is missing (Debian's abigail-tools)"
else
    check "the interface since $last" promise_is_kept
    check "nothing changed" says patch patch 's/reference/mention/'
    check "other names of parameters" says patch patch 's/(NVFP4_set_threads\(int32_t) threads/$1 workers/'
    check "a function is gone" both major "NVFP4_set_threads() is gone" 's/NVFP4_API\s+NVFP4_Status NVFP4_set_threads\(.*?;//'
    check "taken back" is_major_backwards
    check "another type of a parameter" both major "parameter 1 of NVFP4_set_threads(), threads, is int64_t" 's/(NVFP4_set_threads\()int32_t/$1int64_t/'
    check "another type of a result" both major "returns void, and returned NVFP4_Status" 's/NVFP4_Status (NVFP4_set_threads)/void $1/'
    check "one parameter more" both major "takes 2 parameters, and took 1" 's/(NVFP4_set_threads\(int32_t threads)/$1, int32_t pin/'
    check "const is gone" says major "is NVFP4_Session *" 's/(NVFP4_session_length\()const /$1/'
    check "fields in another order" both major "NVFP4_QuantizeOptions has 'int32_t recipe' at byte 4" 's/(int32_t levels;)(.*?)(int32_t recipe;)/$3$2$1/s'
    check "another type of a field" both major "had 'uint64_t seed'" 's/uint64_t (seed;[^}]*\} NVFP4_QuantizeOptions)/double $1/'
    check "a field in the middle" both major "NVFP4_LoadOptions has" 's/(uint32_t struct_size;)([^}]*\} NVFP4_LoadOptions)/$1 int32_t first; int32_t second;$2/'
    check "a field is gone" both major "NVFP4_StepReport.changed_delivered is gone" 's/double changed_delivered;(\s*\} NVFP4_StepReport)/$1/'
    check "a field has another name" says major "had 'int32_t recompute'" 's/int32_t recompute;/int32_t recomputed;/'
    check "a field at the end" says minor "NVFP4_QuantizeOptions.added_here is new at the end" 's/(\n\} NVFP4_QuantizeOptions)/\n    uint64_t added_here;$1/'
    check "a field at the end of an element" says minor "NVFP4_MicroBatch.added_here is new at the end" 's/(\n\} NVFP4_MicroBatch)/\n    uint64_t added_here;$1/'
    check "a field at the end, and another type before" both major "had 'uint64_t seed'" \
        's/uint64_t (seed;[^}]*)(\} NVFP4_QuantizeOptions)/double $1    uint64_t added_here;\n$2/'
    check "a field at the end of what has no size" says major "is not told which size" \
        's/size_t batch_size/size_t each/g + s/(\n\} NVFP4_MicroBatch)/\n    uint64_t added_here;$1/'
    check "a reserved field in use" says minor "NVFP4_CallOptions.reserved is threads now" 's/int32_t reserved(;[^}]*\} NVFP4_CallOptions)/int32_t threads$1/'
    check "another callback" both major "NVFP4_LogCallback is" 's/(NVFP4_LogCallback\)\(void \*user, int32_t) level/$1 level, int32_t thread/'
    check "another type behind a name" both major "NVFP4_Status is int64_t" 's/typedef int32_t NVFP4_Status/typedef int64_t NVFP4_Status/'
    check "a new function" says minor "NVFP4_added_here() is new" 's/NVFP4_API\s+NVFP4_Status NVFP4_set_threads/NVFP4_API int32_t NVFP4_added_here(void);\n$&/'
    check "a new handle" says minor "NVFP4_AddedHere is new" 's/typedef struct NVFP4_Model NVFP4_Model;/typedef struct NVFP4_AddedHere NVFP4_AddedHere;\n$&/'
    check "a constant has another value" says major "NVFP4_BUSY is 19, and was 9" 's/#define NVFP4_BUSY 9/#define NVFP4_BUSY 19/'
    check "a constant is gone" says major "NVFP4_BUSY is gone" 's/#define NVFP4_BUSY 9//'
    check "a new constant" says minor "NVFP4_ADDED_HERE is new" 's/#define NVFP4_BUSY 9/#define NVFP4_ADDED_HERE 77\n$&/'
    check "another version alone" says patch patch 's/(#define NVFP4_VERSION_NUMBER) \d+/$1 90909/'
    sed 's/^typedef int32_t NVFP4_Status;/&\nextern int strange[3];/' $header >"$work/strange.h"
    check "what is not understood" refuses "not understood: 'extern int strange[3]'" \
        bash release/compare.sh $header "$work/strange.h"
fi
check "libraries are compared by names" libraries_are_compared_by_names
check "no such header" refuses "/nowhere.h" bash release/compare.sh /nowhere.h
check "too many arguments" refuses "not 3 arguments" bash release/compare.sh a b c

# Finds accesses beyond a struct of that version.
if command -v valgrind >/dev/null; then
    # Valgrind does not know AVX-512.
    grep -q avx512f /proc/cpuinfo && export NVFP4_CPU=avx2
    for name in "${programs[@]}" newer; do
        check "$name under valgrind" runs "$name" valgrind --quiet --error-exitcode=9
    done
else
    skip "programs under valgrind" "valgrind is missing"
fi
finish
