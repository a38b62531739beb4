#!/usr/bin/env bash
# Gives the project another version, everywhere that it is written: bash release/version.sh NEW [--unreleased]
#
# Dates the first section of CHANGELOG.md, which is "Unreleased" or "VERSION (unreleased)", and keeps the header for tests/abi: the next
# commit is the release. With --unreleased the version is that of work which goes on: the section says so, and no header is kept.
#
# Refuses a tree with changes, a version that is none or not later than the one there is, and one that is too low for what
# release/compare.sh says of the C interface: what breaks programs is a major version, what adds to it a minor one. A major version has
# another soname; NVFP4_ABI_VERSION grows where programs would break. All is done in a copy, and the tree changes at once or not at all.
set -euo pipefail
cd "$(dirname "$0")/.."
source release/common.sh

# Where each occurrence of the version, and of the soname, is the project's.
readonly TEXTS=(README.md docs/hosts.md include/cbindgen.toml examples/c/dlopen.c bindings/python/README.md bindings/dotnet/README.md release/README.md)
# Where a version may stand that stays: history, what was measured, goldens and other packages.
readonly KEPT=(CHANGELOG.md src/train/calibration/ docs/release.md benches/ tests/abi/ tests/data/ tests/golden/ release/THIRD-PARTY.txt Cargo.lock fuzz/Cargo.lock)

# later A B: whether A is a later version than B.
later() { [ "$1" != "$2" ] && [ "$(printf '%s\n' "$1" "$2" | sort -V | tail -1)" = "$1" ]; }

# number_of VERSION: as NVFP4_VERSION_NUMBER says it.
number_of() (
    IFS=. read -r major minor patch <<<"$1"
    echo $((major * 10000 + minor * 100 + patch))
)

# change FILE SUBSTITUTION: one of perl's, of the whole file, which must find its place.
change() {
    perl -0777 -pi -e "\$n += $2; END { exit !\$n }" "$1" || fail "$1 does not have what $2 changes: mend release/version.sh"
}

# Changes the tree in this folder from one version to another; $1 is its NVFP4_ABI_VERSION.
change_all() {
    local abi=$1 file title="$new (unreleased)" number
    number=$(number_of "$new")
    change Cargo.toml "s/^version = \"\\K[^\"]+/$new/m"
    for file in Cargo.lock fuzz/Cargo.lock; do
        change $file "s/^name = \"nvfp4\"\\nversion = \"\\K[^\"]+/$new/m"
    done
    IFS=. read -r major minor patch <<<"$new"
    change src/abi/library.rs "s/^pub const NVFP4_VERSION_MAJOR: i32 = \\K\\d+/$major/m"
    change src/abi/library.rs "s/^pub const NVFP4_VERSION_MINOR: i32 = \\K\\d+/$minor/m"
    change src/abi/library.rs "s/^pub const NVFP4_VERSION_PATCH: i32 = \\K\\d+/$patch/m"
    change src/abi/library.rs "s/^pub const NVFP4_VERSION_NUMBER: i32 = \\K\\d+/$number/m"
    change src/abi/library.rs "s/^pub const NVFP4_ABI_VERSION: i32 = \\K\\d+/$abi/m"
    change bindings/python/pyproject.toml "s/^version = \"\\K[^\"]+/$new/m"
    change bindings/dotnet/Directory.Build.props "s/<Version>\\K[^<]+/$new/"
    perl -pi -e "s/\$ENV{WHOLE}/$new/g; s/\$ENV{SONAME}/libNVFP4.so.$major/g" "${TEXTS[@]}"

    [ $releasing = 0 ] || title="$new ($(date -u +%F))"
    if $was_unreleased; then
        change CHANGELOG.md "s/^## \\K.*/$title/m"
    else
        change CHANGELOG.md "s/^(?=## )/## $title\\n\\n/m"
    fi
    # What was to be that version's header is this one's.
    if [ "$heading" = "$old (unreleased)" ] && [ "$new" != "$old" ] && [ -e "tests/abi/$old" ]; then
        mv "tests/abi/$old" "tests/abi/$new"
    fi
    bash tests/header/run.sh --bless || fail "the header and the bindings could not be generated"
    # A patch release has the interface of the last header.
    if [ $releasing = 1 ] && [ "${new%.*}" != "${last%.*}" ]; then
        mkdir -p "tests/abi/$new" && cp include/nvfp4.h "tests/abi/$new"
    fi
    cargo metadata --quiet --locked --format-version 1 >/dev/null || fail "Cargo.lock does not fit Cargo.toml"
}

# Lines of the tree in this folder that still have the old version, or its soname.
left_over() {
    [ "$new" != "$old" ] || return 0
    local kept
    kept=$(printf '|%s' "${KEPT[@]//./\\.}")
    {
        grep -rnIP "$WHOLE" .
        [ "${new%%.*}" = "${old%%.*}" ] || grep -rnIP "$SONAME" .
    } | sed 's:^\./::' | grep -vE "^(${kept:1})"
}

if [ $# -lt 1 ] || [ $# -gt 2 ] || [ "${2---unreleased}" != --unreleased ]; then
    usage "version.sh takes a version, and perhaps --unreleased"
fi
new=$1 old=$VERSION releasing=$((2 - $#))
[[ $new =~ ^(0|[1-9][0-9]*)\.(0|[1-9][0-9]?)\.(0|[1-9][0-9]?)$ ]] ||
    usage "'$new' is no version: it takes MAJOR.MINOR.PATCH, the last two below 100"
need git git
need cargo "Rust, by rustup (https://rustup.rs)"
need perl perl
[ -z "$(git status --porcelain)" ] || fail "there are changes that are not committed ('git status' lists them): commit or stash them"
! git rev-parse --quiet --verify "refs/tags/v$new" >/dev/null || fail "$new is released: there is a tag v$new"
heading=$(changelog_heading)
case $heading in
    Unreleased | "$old (unreleased)") was_unreleased=true ;;
    "$old ("*) was_unreleased=false ;;
    *) fail "CHANGELOG.md begins with '$heading', and Cargo.toml has $old" ;;
esac
if [ "$new" = "$old" ]; then
    [ "$heading$releasing" = "$old (unreleased)1" ] || fail "$new is the version already: it takes a later one"
else
    later "$new" "$old" || fail "$new is not later than $old"
fi
if [ $releasing = 1 ]; then
    $was_unreleased || fail "CHANGELOG.md does not say what is new since $heading: begin it with a section '## Unreleased'"
    # With -q, grep would end before sed, whose signal would count as a failure.
    sed '1,/^## /d' CHANGELOG.md | sed '/^## /,$d' | grep '[^[:space:]]' >/dev/null || fail "the section '$heading' of CHANGELOG.md is empty"
fi

# What the interface asks for, since the last release: the header of a version that is not released yet is no measure.
last='' verdict='' abi=$(sed -n 's/^#define NVFP4_ABI_VERSION //p' include/nvfp4.h)
while read -r version; do
    is_unreleased "$version" || last=$version
done < <(find tests/abi -path 'tests/abi/*/nvfp4.h' | cut -d/ -f3 | sort -V)
if [ -n "$last" ]; then
    verdict=$(bash release/compare.sh "tests/abi/$last/nvfp4.h" | tail -1)
    IFS=. read -r major minor patch <<<"$last"
    case $verdict in
        major) least=$((major + 1)).0.0 ;;
        minor) least=$major.$((minor + 1)).0 ;;
        patch) least=$major.$minor.$((patch + 1)) ;;
        *) fail "bash release/compare.sh does not say what has changed since $last" ;;
    esac
    ! later "$least" "$new" ||
        fail "$new is too low: the interface's changes since $last are $verdict ('bash release/compare.sh' lists them), which takes $least or later"
    if [ "$verdict" = major ] && grep -qx "#define NVFP4_ABI_VERSION $abi" "tests/abi/$last/nvfp4.h"; then
        abi=$((abi + 1))
    fi
fi

# The version where it is no part of a longer one, as it is not after a name such as NVFP4 and a point; and the soname.
export WHOLE="(?<![0-9])(?<!(?<![A-Za-z])[0-9]\.)${old//./\\.}(?![0-9])(?!\.[0-9])" SONAME="libNVFP4\.so\.${old%%.*}(?![0-9])"
CARGO_TARGET_DIR=$(mkdir -p "${CARGO_TARGET_DIR:-target}" && cd "${CARGO_TARGET_DIR:-target}" && pwd)
export CARGO_TARGET_DIR
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
# With times of now, so that cargo takes nothing there for compiled.
mkdir "$copy/tree" && git archive HEAD | tar xm -C "$copy/tree"
(cd "$copy/tree" && change_all "$abi") || exit
left=$(cd "$copy/tree" && left_over) || true
[ -z "$left" ] || fail "$(head -1 <<<"$left" | cut -d: -f1,2) has ${old} still: name the file among TEXTS or KEPT of release/version.sh"

# As one patch, which git applies as a whole or not at all.
(
    GIT_DIR=$(git rev-parse --absolute-git-dir)
    export GIT_DIR GIT_WORK_TREE=$copy/tree GIT_INDEX_FILE=$copy/index
    cd "$copy/tree"
    git read-tree HEAD && git add --all . && git diff --cached --binary HEAD >"$copy/patch"
)
git apply "$copy/patch"

git -c core.quotePath=false diff --stat
git ls-files --others --exclude-standard | sed 's/^/ new: /'
say "$(changelog_heading), after $old${verdict:+; the interface since $last: $verdict}"
