# An archive for each architecture, of what part `natives` left, and another of its debug symbols; $OUT/dist has them and SHA256SUMS.
# shellcheck shell=bash

part_archives() {
    local arch
    need xz xz-utils
    need cmake "cmake, 3.18 or later"
    [ -e "$OUT/source.epoch" ] || fail "there are no natives in $OUT: run 'bash release/build.sh natives archives'"
    local unnamed
    unnamed=$(unnamed_crates "$OUT/source")
    [ -z "$unnamed" ] || fail "release/THIRD-PARTY.txt lacks the licences of $(paste -sd, <<<"$unnamed"): run 'bash release/build.sh licences' and commit it"
    mkdir -p "$OUT/dist"
    for arch in $ARCHES; do
        [ -e "$(native_folder "$arch")/nvfp4" ] || fail "there is no library for $arch in $OUT: run 'bash release/build.sh natives'"
        make_archive "$arch" "$OUT/source" "$(native_folder "$arch")" "$OUT/archives" "$OUT/dist"
    done
    sum_artifacts
    say "artifacts, in $OUT/dist:"
    (cd "$OUT/dist" && stat -c '%10s  %n' -- *)
}

# make_archive ARCH SOURCE NATIVES WORK RESULT
make_archive() {
    local arch=$1 source=$2 natives=$3 work=$4 result=$5
    local name=nvfp4-$VERSION-linux-$arch copyright
    rm -rf "${work:?}/$name" "${work:?}/$name-debug" && mkdir -p "$work" "$result"
    lay_out "$source" "$natives" "$work/$name" "$(host_command)"
    copyright=$(standard_library_notices)
    install -m 644 "$copyright" "$work/$name/share/doc/nvfp4/RUST-STANDARD-LIBRARY.html"
    bill_of_materials "$arch" "$source" "$result/$name.cdx.json"
    install -m 644 "$result/$name.cdx.json" "$work/$name/share/doc/nvfp4/nvfp4.cdx.json"
    pack "$work/$name" "$result/$name.tar.xz" "$(<"$source.epoch")"
    debug_tree "$natives" "$work/$name-debug"
    pack "$work/$name-debug" "$result/$name-debug.tar.xz" "$(<"$source.epoch")"
}

# Manual pages and completions are written by the command for this machine, whichever it is that they go beside.
host_command() {
    local command
    command=$(native_folder "$(uname -m)")/nvfp4
    [ -x "$command" ] || fail "$command is missing, which writes the manual pages: let NVFP4_RELEASE_ARCHES have $(uname -m)"
    echo "$command"
}

# lay_out SOURCE NATIVES TREE COMMAND: what an archive has, but for what only a release can make. COMMAND runs on this machine.
lay_out() {
    local source=$1 natives=$2 tree=$3 command=$4 own=$3/share/doc/nvfp4
    mkdir -p "$tree"
    tree=$(cd "$tree" && pwd)
    cmake -S "$source/cmake" -B "$tree.cmake" -DNVFP4_BUILD_DIR="$natives" -DCMAKE_INSTALL_PREFIX="$tree" -DCMAKE_INSTALL_LIBDIR=lib >/dev/null
    cmake --install "$tree.cmake" >/dev/null
    rm -rf "$tree.cmake"
    install -D -m 755 "$natives/nvfp4" "$tree/bin/nvfp4"
    "$command" pages "$tree/share"
    mkdir -p "$tree/share/nvfp4/examples" "$own"
    cp -r "$source/examples/c" "$source/examples/cpp" "$source/examples/CMakeLists.txt" "$tree/share/nvfp4/examples"
    cp "$source/release/README.md" "$tree"
    cp "$source"/{LICENSE-MIT,LICENSE-APACHE,CHANGELOG.md,release/THIRD-PARTY.txt} "$own"
}

# The symbols where debuggers look for them, by their build ids: unpacked into /usr, gdb finds them.
debug_tree() {
    local natives=$1 tree=$2 file id
    for file in libNVFP4.so nvfp4; do
        id=$(readelf -nW "$natives/$file" | sed -n 's/.*Build ID: \([0-9a-f]*\).*/\1/p')
        install -D -m 644 "$natives/debug/$file.debug" "$tree/lib/debug/.build-id/${id:0:2}/${id:2}.debug"
    done
}

# bill_of_materials ARCH SOURCE FILE: every crate that is linked, in CycloneDX 1.5.
bill_of_materials() {
    local arch=$1 source=$2 file=$3 tool
    # It reads a few files: unoptimised, it is compiled in half the time.
    tool=$(cargo_tool cargo-cyclonedx "$CYCLONEDX" --debug)
    (cd "$source" && SOURCE_DATE_EPOCH=$(<"$source.epoch") "$tool" cyclonedx --quiet --format json --spec-version 1.5 --no-build-deps \
        --target "$arch-unknown-linux-gnu" --override-filename bill)
    # Its addresses of the package itself are those of a folder here.
    sed "s|path+file://$source|path+file:///nvfp4|g" "$source/bill.json" >"$file"
    rm "$source/bill.json"
    ! grep -qF "$OUT" "$file" || fail "$file has paths of this machine in it"
}

# pack FOLDER FILE EPOCH: the same bytes for the same files. The library's kernels are in three files of it, and a dictionary that spans
# them all keeps them once: that is why it is xz.
pack() {
    # Tests that only unpack what they pack take another preset.
    local folder=$1 file=$2 epoch=$3
    LC_ALL=C tar --create --sort=name --format=gnu --mtime="@$epoch" --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX \
        -C "$(dirname "$folder")" "$(basename "$folder")" | xz -T1 "--lzma2=preset=${NVFP4_RELEASE_PRESET:-6},dict=128MiB" >"$file.part"
    mv "$file.part" "$file"
}
