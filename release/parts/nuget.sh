# The NuGet packages, LibNVFP4 with the libraries that part `natives` left and LibNVFP4.FSharp, and a package of symbols for each, in $OUT/dist.
# shellcheck shell=bash

source release/dotnet.sh

readonly DOTNET_PACKAGES=(LibNVFP4 LibNVFP4.FSharp)

part_nuget() {
    local arch
    [ -e "$OUT/source.epoch" ] || fail "there are no natives in $OUT: run 'bash release/build.sh natives nuget'"
    for arch in $ARCHES; do
        [ -e "$(native_folder "$arch")/libNVFP4.so" ] || fail "there is no library for $arch in $OUT: run 'bash release/build.sh natives'"
    done
    make_packages "$OUT/source" "$OUT/natives" "$OUT/nuget" "$OUT/dist"
    inspect_packages "$OUT/dist" "$OUT/nuget/content"
    sum_artifacts
}

# make_packages SOURCE NATIVES WORK RESULT
make_packages() {
    local source=$1 natives=$2 work=$3 result=$4 notices sdk
    notices=$(standard_library_notices)
    sdk=$(dotnet_sdk "$(uname -m)")
    stage_packages "$source" "$natives" "$work"
    install -m 644 "$notices" "$(packing_folder "$work")/LICENSE-RUST-STANDARD-LIBRARY.html"
    pack_packages "$sdk" "$work" "$(<"$source.commit")" "$(<"$source.epoch")" "$result"
}

# dotnet_sdk ARCH: the folder of an SDK, as install_dotnet makes it.
dotnet_sdk() {
    local folder=$OUT/tools/dotnet-$DOTNET-$1 log
    log=$(install_dotnet "$1" "$folder" 2>&1) || fail "$(tail -1 <<<"$log")"
    echo "$folder"
}

# stand_in SDK ID VERSION FOLDER FEED: in a feed, a package that the SDK refers to by itself, made of the assembly of that name in the SDK.
stand_in() {
    local sdk=$1 name=$2 assembly
    case $name in
        NETStandard.Library) assembly=$(echo "$sdk"/sdk/sdk/*/ref/netstandard.dll) ;;
        FSharp.Core) assembly=$(echo "$sdk"/sdk/sdk/*/FSharp/FSharp.Core.dll) ;;
    esac
    python3 release/nupkg.py stand-in "$name" "$3" "$4" "$assembly" "$5"
}

# give_packages FOLDER SDK FEED: the packages, and what programs that add them would take from nuget.org beside them.
give_packages() {
    local name
    mkdir -p "$3"
    for name in "${DOTNET_PACKAGES[@]}"; do
        cp "$1/$name.$VERSION.nupkg" "$3"
    done
    stand_in "$2" FSharp.Core 4.7.0 lib/netstandard2.0 "$3"
}

# packing_folder FOLDER: where the projects are packed in a folder. The F# compiler leaves as much room in an assembly as the path of it has
# characters, though the path that it writes there is another: it has so many wherever that is.
packing_folder() {
    local folder length=160
    folder=$(cd "$1" && pwd)/source
    [ ${#folder} -le $length ] || fail "$folder has more than $length characters: let NVFP4_RELEASE be a folder with a shorter path"
    printf '%s%s' "$folder" "$(printf '%*s' $((length - ${#folder})) "" | tr ' ' -)"
}

# stage_packages SOURCE NATIVES FOLDER: the projects in FOLDER, and in FOLDER/natives the library for each architecture, by the names of .NET.
stage_packages() {
    local source=$1 natives=$2 folder=$3 projects arch
    rm -rf "$folder" && mkdir -p "$folder"
    projects=$(packing_folder "$folder")
    mkdir -p "$projects/release" "$projects/bindings"
    cp -r "$source/bindings/dotnet" "$projects/bindings"
    find "$projects" -depth \( -name bin -o -name obj \) -exec rm -r {} +
    cp "$source"/LICENSE-{MIT,APACHE} "$projects"
    cp "$source/release/THIRD-PARTY.txt" "$projects/release"
    for arch in $ARCHES; do
        install -D -m 644 "$natives/linux-$arch/libNVFP4.so" "$folder/natives/linux-$(dotnet_arch "$arch")/libNVFP4.so"
    done
}

# pack_packages SDK FOLDER COMMIT EPOCH RESULT: the same bytes for the same files.
pack_packages() {
    local sdk=$1 folder commit=$3 epoch=$4 result=$5 projects name file
    folder=$(cd "$2" && pwd)
    projects=$(packing_folder "$folder")
    mkdir -p "$result"
    # No feed is asked: the two packages that the SDK refers to by itself are in it as assemblies.
    stand_in "$sdk" NETStandard.Library 2.0.3 ref/netstandard2.0 "$folder/feed"
    stand_in "$sdk" FSharp.Core 4.7.0 lib/netstandard2.0 "$folder/feed"
    for name in "${DOTNET_PACKAGES[@]}"; do
        (
            quiet_dotnet "$folder/home"
            export LD_LIBRARY_PATH=$sdk/ssl
            "$sdk/sdk/dotnet" pack "$projects/bindings/dotnet/$name" -nologo -c Release -o "$folder/packed" -p:NVFP4Package=true \
                -p:NVFP4Natives="$folder/natives" -p:RestoreSources="$folder/feed" -p:RepositoryType=git -p:RepositoryCommit="$commit" \
                -p:PathMap="$projects=/nvfp4" -p:TreatWarningsAsErrors=true -p:UseSharedCompilation=false >"$folder/$name.log" 2>&1
        ) || {
            tail -20 "$folder/$name.log" >&2
            fail "packing $name failed"
        }
        for file in "$name.$VERSION".{nupkg,snupkg}; do
            python3 release/nupkg.py finish "$folder/packed/$file" "$epoch" "$result/$file"
        done
    done
}

# inspect_packages FOLDER WORK: what the packages in FOLDER must be for NuGet.
inspect_packages() {
    local folder=$1 work=$2 name file arch part content
    rm -rf "$work"
    for name in "${DOTNET_PACKAGES[@]}"; do
        content=$work/$name
        for file in "$name.$VERSION".{nupkg,snupkg}; do
            python3 -m zipfile -e "$folder/$file" "$content/${file##*.}"
            ! grep -arqF -e "$OUT/" -e "$HOME/" "$content/${file##*.}/lib" || fail "$file has paths of this machine in it"
            say "$file: $(stat -c %s "$folder/$file") bytes"
        done
        for part in "<readme>README.md</readme>" '<license type="expression">MIT OR Apache-2.0</license>' "<version>$VERSION</version>" \
            '<repository type="git" commit='; do
            grep -qF "$part" "$content/nupkg/$name.nuspec" || fail "$name.$VERSION.nupkg does not say $part"
        done
        for file in nupkg/README.md nupkg/LICENSE-{MIT,APACHE} nupkg/lib/{netstandard2.0,netcoreapp3.1}/"$name".{dll,xml} \
            snupkg/lib/{netstandard2.0,netcoreapp3.1}/"$name".pdb; do
            [ -e "$content/$file" ] || fail "$name.$VERSION.${file%%/*} has no ${file#*/}"
        done
    done
    content=$work/LibNVFP4/nupkg
    for file in THIRD-PARTY.txt LICENSE-RUST-STANDARD-LIBRARY.html; do
        [ -e "$content/$file" ] || fail "LibNVFP4.$VERSION.nupkg has no $file"
    done
    for arch in $ARCHES; do
        file=runtimes/linux-$(dotnet_arch "$arch")/native/libNVFP4.so
        [ -e "$content/$file" ] || fail "LibNVFP4.$VERSION.nupkg has no $file"
    done
}
