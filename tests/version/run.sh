#!/usr/bin/env bash
# release/version.sh, in a copy of the tree with a repository of its own: bash tests/version/run.sh
#
# There the version is released: its header is kept, and the changelog begins with the news since then. The kept header is then altered, so
# that today's interface adds to it or breaks it. The last line is "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/common/checks.sh

old=$(package_version)
abi=$(sed -n 's/^#define NVFP4_ABI_VERSION //p' include/nvfp4.h)
IFS=. read -r major minor patch <<<"$old"
next_patch=$major.$minor.$((patch + 1)) next_minor=$major.$((minor + 1)).0 next_major=$((major + 1)).0.0
CARGO_TARGET_DIR=$(mkdir -p "${CARGO_TARGET_DIR:-target}" && cd "${CARGO_TARGET_DIR:-target}" && pwd)
export CARGO_TARGET_DIR
root=$PWD copy=$work/copy
kept=tests/abi/$old/nvfp4.h
export GIT_AUTHOR_NAME=test GIT_AUTHOR_EMAIL=test@localhost GIT_COMMITTER_NAME=test GIT_COMMITTER_EMAIL=test@localhost

commit() { git add --all && git commit --quiet --message "$1"; }

# The tree as it is here, changes too.
make_copy() {
    mkdir "$copy" && git ls-files -z --cached --others --exclude-standard | (while read -rd '' file; do
        [ ! -e "$file" ] && [ ! -h "$file" ] || printf '%s\0' "$file"
    done) | tar c --null -T - | tar x -C "$copy" && cd "$copy" && git init --quiet || return 1
    sed -i 's/^\(## [0-9.]*\) (unreleased)/\1 (2020-01-01)/' CHANGELOG.md && perl -0777 -pi -e 's/^(?=## )/## Unreleased\n\n- A change.\n\n/m' CHANGELOG.md
    mkdir -p "$(dirname "$kept")" && cp include/nvfp4.h "$kept" && commit start && git tag start
}

# from SUBSTITUTION FILE COMMAND...: from the beginning, after a substitution of perl's in a file, which is committed.
from() {
    cd "$copy" && git reset --quiet --hard start && git clean -fdq || return 1
    if [ -n "$1" ]; then
        perl -0777 -pi -e "\$n += $1; END { exit !\$n }" "$2" && commit altered || return 1
    fi
    shift 2
    "$@"
}

# refuses CODE WORDS ARGUMENT...: in one line, and nothing is changed.
refuses() {
    local code=$1 words=$2 said
    shift 2
    git status --porcelain >"$work/before"
    said=$(bash release/version.sh "$@" 2>&1 >"$work/out")
    [ $? -eq "$code" ] && echo "$said" && [ "$(wc -l <<<"$said")" -eq 1 ] && grep -qF -- "$words" <<<"$said" &&
        git status --porcelain | diff "$work/before" -
}

dirty() { echo >>README.md && refuses 1 "not committed" "$next_patch"; }
untracked() { touch new-file && refuses 1 "not committed" "$next_patch"; }
tagged() { git tag "v$next_patch" && refuses 1 "there is a tag v$next_patch" "$next_patch" && git tag -d "v$next_patch"; }

# bumps NEW ABI TITLE [OPTION]: everything with a version has the new one, and nothing has the old one except its history.
bumps() {
    local new=$1 abi=$2 title=$3 number left file
    shift 3
    bash release/version.sh "$new" "$@" || return 1
    git diff | grep '^+[^+]'
    number=$(echo "$new" | awk -F. '{ print $1 * 10000 + $2 * 100 + $3 }')
    for file in Cargo.toml bindings/python/pyproject.toml; do
        grep -xF "version = \"$new\"" $file || return 1
    done
    for file in Cargo.lock fuzz/Cargo.lock; do
        grep -A1 -x 'name = "nvfp4"' $file | grep -xF "version = \"$new\"" || return 1
    done
    for file in include/nvfp4.h src/abi/library.rs bindings/python/nvfp4/_abi.py bindings/dotnet/LibNVFP4/Native.g.cs; do
        grep -iE "VERSION_?NUMBER(: i32)?( =)? $number\b" $file && grep -iE "ABI_?VERSION(: i32)?( =)? $abi\b" $file || return 1
    done
    for file in MAJOR:${new%%.*} PATCH:${new##*.}; do
        grep -xF "#define NVFP4_VERSION_${file%:*} ${file#*:}" include/nvfp4.h || return 1
    done
    grep -F "<Version>$new</Version>" bindings/dotnet/Directory.Build.props && grep -F "nvfp4-$new-linux-x86_64.tar.xz" README.md &&
        grep -F "soname is libNVFP4.so.${new%%.*}," include/nvfp4.h && grep -F "\"libNVFP4.so.${new%%.*}\"" examples/c/dlopen.c &&
        [ "$(grep -m1 '^## ' CHANGELOG.md)" = "## $title" ] && [ "$(grep -c '(unreleased)\|^## Unreleased' CHANGELOG.md)" -le 1 ] || return 1
    [ "$new" != "$old" ] || return 0
    left=$(git grep -nwF "$old" -- . ':!CHANGELOG.md' ':!docs/release.md' ':!tests/abi' ':!tests/data' ':!tests/golden' ':!release/THIRD-PARTY.txt' ':!*.lock' \
        ':!benches' ':!src/train/calibration' | grep -vE "[0-9]\.?${old//./\\.}|${old//./\\.}\.?[0-9]")
    [ -z "$left" ] || { echo "$left"; return 1; }
    [ "${new%%.*}" = "$major" ] || ! git grep -nF "libNVFP4.so.$major" -- . ':!CHANGELOG.md' ':!docs/release.md' ':!tests/abi' ':!src/train/calibration'
}

today() { echo "$1 ($(date -u +%F))"; }

patch_release() { bumps "$next_patch" "$abi" "$(today "$next_patch")" && [ ! -e "tests/abi/$next_patch" ] && git diff --quiet tests/abi; }

keeps_header() { cmp include/nvfp4.h "tests/abi/$1/nvfp4.h" && [ -e "$kept" ]; }

minor_release() { refuses 1 "which takes $next_minor or later" "$next_patch" && bumps "$next_minor" "$abi" "$(today "$next_minor")" && keeps_header "$next_minor"; }

major_release() { refuses 1 "which takes $next_major or later" "$next_minor" && bumps "$next_major" $((abi + 1)) "$(today "$next_major")" && keeps_header "$next_major"; }

# Work under a name, which becomes another one, and is then released.
work_and_release() {
    bumps "$next_minor" "$abi" "$next_minor (unreleased)" --unreleased && [ ! -e "tests/abi/$next_minor" ] && commit work &&
        refuses 1 "is the version already" "$next_minor" --unreleased && bumps "$next_major" "$abi" "$next_major (unreleased)" --unreleased && commit more &&
        bumps "$next_major" "$abi" "$(today "$next_major")" && keeps_header "$next_major" && commit release && refuses 1 "is the version already" "$next_major"
}

# Before the first release its header is kept already, and follows the version.
first_release() {
    bumps "$old" "$abi" "$(today "$old")" && git diff --quiet tests/abi && git reset --quiet --hard &&
        bumps "$next_minor" "$abi" "$next_minor (unreleased)" --unreleased && cmp include/nvfp4.h "tests/abi/$next_minor/nvfp4.h" && [ ! -e "$kept" ]
}

for command in cargo gcc perl abidiff; do
    command -v $command >/dev/null || [ $command != abidiff ] || install_packages abigail-tools || true
    if ! command -v $command >/dev/null; then
        skip "release/version.sh" "$command is missing"
        finish
    fi
done
check "a copy" make_copy
[ "$failed" -eq 0 ] || finish

for version in 1.2 v1.2.3 1.2.3.4 01.2.3 1.100.0 1.2.3-rc.1 ''; do
    check "'$version' is no version" from "" "" refuses 2 "'$version' is no version" "$version"
done
check "no version" from "" "" refuses 2 "takes a version"
check "another option" from "" "" refuses 2 "takes a version" "$next_patch" --released
check "the same version" from "" "" refuses 1 "is the version already" "$old"
check "an earlier version" from "" "" refuses 1 "0.0.9 is not later than $old" 0.0.9
check "a tree with changes" from "" "" dirty
check "a tree with a new file" from "" "" untracked
check "a version with a tag" from "" "" tagged
check "nothing new" from 's/## Unreleased\n\n- A change.\n\n//' CHANGELOG.md refuses 1 "does not say what is new" "$next_patch"
check "an empty section" from 's/- A change.\n//' CHANGELOG.md refuses 1 "is empty" "$next_patch"
check "another version's section" from 's/## Unreleased/## 9.9.9 (unreleased)/' CHANGELOG.md refuses 1 "begins with '9.9.9 (unreleased)'" "$next_patch"
check "a version that nobody knows of" from "s/\$/\nSince $old.\n/" docs/sessions.md refuses 1 "docs/sessions.md:" "$next_patch"
check "a version after a name" from "s/\$/\nLibNVFP4.$old.nupkg\n/" docs/sessions.md refuses 1 "docs/sessions.md:" "$next_patch"
check "a longer version" from "s/\$/\nlibother 1$old, 2.$old and $old.1\n/" docs/sessions.md bumps "$next_patch" "$abi" "$(today "$next_patch")"
check "a place that has gone" from 's/^version =/number =/m' bindings/python/pyproject.toml refuses 1 "bindings/python/pyproject.toml" "$next_patch"
check "a patch release" from "" "" patch_release
check "a minor release" from 's/NVFP4_API\s+NVFP4_Status NVFP4_set_threads\(.*?;//' "$kept" minor_release
check "a major release" from 's/NVFP4_API\s+NVFP4_Status NVFP4_set_threads\(/NVFP4_API int32_t NVFP4_gone(void);\n$&/' "$kept" major_release
check "work on a version, and its release" from "" "" work_and_release
check "a first release" from "s/## Unreleased\n\n- A change.\n\n## [^\n]*/## $old (unreleased)/" CHANGELOG.md first_release
cd "$root" || exit 1
finish
