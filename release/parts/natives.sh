# The library and the command for each architecture, in $OUT/natives/linux-ARCH, their debug symbols in its folder `debug`.
# shellcheck shell=bash

part_natives() {
    [ -z "$(git status --porcelain)" ] || say "what is not committed is not in it"
    export_source HEAD "$OUT/source"
    local arch
    for arch in $ARCHES; do
        build_native "$arch" "$OUT/source" "$OUT/cargo" "$OUT/kernels" "$(native_folder "$arch")"
        inspect_native "$arch" "$(native_folder "$arch")"
    done
}

# build_native ARCH SOURCE TARGET_FOLDER KERNELS RESULT: what is in RESULT depends on none of the folders.
build_native() {
    local arch=$1 source=$2 target=$3 kernels=$4 result=$5
    local triple=$arch-unknown-linux-gnu tools sysroot home built epoch
    epoch=$(<"$source.epoch")
    need readelf binutils
    need_target "$triple"
    tools=$(python_tools)
    sysroot=$(rustc --print sysroot)
    home=${CARGO_HOME:-$HOME/.cargo}
    built=$target/$triple/release
    say "compiling for $arch"
    # Of two prefixes that fit, the later counts.
    local map=("$home=/cargo" "$sysroot/lib/rustlib/src/rust=/rust" "$target=/target" "$source=/nvfp4")
    # The static library is made in the same compilation as the rest, which Cargo.toml alone can say.
    sed -i 's/^crate-type = \["cdylib", "rlib"\]$/crate-type = ["cdylib", "rlib", "staticlib"]/' "$source/Cargo.toml"
    grep -q '^crate-type = .*staticlib' "$source/Cargo.toml" || fail "Cargo.toml's crate-type is not what release/parts/natives.sh expects"
    (
        cd "$source"
        unset NVFP4_CPU CARGO_ENCODED_RUSTFLAGS
        export PATH=$tools/bin:$PATH CARGO_TARGET_DIR=$target CARGO_INCREMENTAL=0
        export RUSTFLAGS="${map[*]/#/--remap-path-prefix=} -Clink-arg=-Wl,--build-id=sha1"
        export CFLAGS="${map[*]/#/-ffile-prefix-map=}"
        export NVFP4_EMBED_KERNELS=$KERNELS NVFP4_EMBED_CACHE=$kernels
        NVFP4_NVRTC=$(find "$tools/" -name 'libnvrtc.so.1?')
        export NVFP4_NVRTC SOURCE_DATE_EPOCH=$epoch
        cargo zigbuild --quiet --locked --release --target "$triple.$GLIBC" --lib --bins \
            --config 'profile.release.strip="none"' --config 'profile.release.debug="line-tables-only"' \
            --config profile.release.package.nvfp4.codegen-units=1
    ) || fail "compiling for $arch failed"
    split_symbols "$built" "$result"
}

# split_symbols BUILT RESULT: the library and the command without symbols, these in a folder `debug`, and the static library with function
# names alone.
split_symbols() {
    local built=$1 result=$2 name
    rm -rf "$result" && mkdir -p "$result/debug"
    for name in libNVFP4.so nvfp4; do
        objcopy --only-keep-debug --compress-debug-sections=zlib "$built/$name" "$result/debug/$name.debug"
        # The checksum in the link is that of the file of symbols, which it takes from the folder where this runs.
        (cd "$result/debug" && objcopy --strip-all --add-gnu-debuglink="$name.debug" "$built/$name" "$result/$name")
    done
    objcopy --strip-debug --enable-deterministic-archives "$built/libNVFP4.a" "$result/libNVFP4.a"
}

# Checks of a native that must hold whatever machine it was built on.
inspect_native() {
    local arch=$1 folder=$2 file newest machine
    case $arch in
        x86_64) machine=X86-64 ;;
        aarch64) machine=AArch64 ;;
    esac
    for file in libNVFP4.so nvfp4; do
        readelf -hW "$folder/$file" | grep -q "Machine:.*$machine" || fail "$folder/$file is not for $arch"
        newest=$(readelf -VW "$folder/$file" | grep -oE 'GLIBC_[0-9.]+' | sort -uV | tail -1)
        [ "$(printf '%s\n' "GLIBC_$GLIBC" "$newest" | sort -V | tail -1)" = "GLIBC_$GLIBC" ] ||
            fail "$folder/$file asks for $newest, and GLIBC_$GLIBC is the floor"
        readelf -nW "$folder/$file" | grep -q 'Build ID' || fail "$folder/$file has no build id"
        if readelf -dW "$folder/$file" | grep NEEDED | grep -vE '\[(lib(c|m|dl|pthread|rt)\.so\.[0-9]+|ld-linux[^]]*)\]'; then
            fail "$folder/$file needs the library above, which a bare system may lack"
        fi
        if grep -aqF -e "$OUT/" -e "$HOME/" "$folder/$file"; then
            fail "$folder/$file has paths of this machine in it"
        fi
        say "$arch $file: $(stat -c %s "$folder/$file") bytes, $newest"
    done
    readelf -dW "$folder/libNVFP4.so" | grep -q "SONAME.*\[libNVFP4.so.${VERSION%%.*}\]" || fail "$folder/libNVFP4.so has no soname"
    readelf -dW "$folder/libNVFP4.so" | grep -q NODELETE || fail "$folder/libNVFP4.so is not linked with -z nodelete"
    diff --label "exported by libNVFP4.so for $arch" --label "declared in nvfp4.h" -u \
        <(readelf --dyn-syms -W "$folder/libNVFP4.so" | awk '$5 ~ /GLOBAL|WEAK/ && $7 != "UND" { sub(/@.*/, "", $8); print $8 }' | sort -u) \
        <(grep -oE '\bNVFP4_[a-z][A-Za-z0-9_]*\(' include/nvfp4.h | tr -d '(' | sort -u) || fail "the symbols of $folder/libNVFP4.so are others"
}
