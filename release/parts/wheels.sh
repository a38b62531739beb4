# A wheel for each architecture: the Python package with the library that part `natives` left, in $OUT/dist.
# shellcheck shell=bash

part_wheels() {
    local arch
    [ -e "$OUT/source.epoch" ] || fail "there are no natives in $OUT: run 'bash release/build.sh natives wheels'"
    mkdir -p "$OUT/dist"
    for arch in $ARCHES; do
        [ -e "$(native_folder "$arch")/libNVFP4.so" ] || fail "there is no library for $arch in $OUT: run 'bash release/build.sh natives'"
        make_wheel "$arch" "$OUT/source" "$(native_folder "$arch")/libNVFP4.so" "$OUT/wheels" "$OUT/dist"
        inspect_wheel "$arch" "$OUT/dist/$(wheel_name "$arch")"
    done
    sum_artifacts
}

wheel_name() { echo "nvfp4-$VERSION-py3-none-manylinux_${GLIBC/./_}_$1.whl"; }

wheel_tools() { virtual_environment wheels "$SETUPTOOLS" "$BUILD" "$AUDITWHEEL"; }

# make_wheel ARCH SOURCE LIBRARY WORK RESULT
make_wheel() {
    local arch=$1 source=$2 library=$3 work=$4 result=$5 tools notices
    tools=$(wheel_tools)
    notices=$(standard_library_notices)
    mkdir -p "$result"
    stage_package "$source" "$library" "$work/$arch"
    install -m 644 "$notices" "$work/$arch/LICENSE-RUST-STANDARD-LIBRARY.html"
    pack_wheel "$tools/bin/python" "$work/$arch" "manylinux_${GLIBC/./_}_$arch" "$(<"$source.epoch")" "$result"
}

# stage_package SOURCE LIBRARY FOLDER: the package, as setuptools finds it, with the library where native.py looks first.
stage_package() {
    local source=$1 library=$2 folder=$3
    rm -rf "$folder" && mkdir -p "$folder"
    # Links are followed: the licences are in the source's root.
    cp -rL "$source/bindings/python/." "$folder"
    rm -rf "$folder/build" "$folder"/*.egg-info "$folder/nvfp4/__pycache__"
    install -m 755 "$library" "$folder/nvfp4/libNVFP4.so"
}

# pack_wheel PYTHON FOLDER PLATFORM EPOCH RESULT: the same bytes for the same files. Modes are in a wheel, and its compression is zlib's.
pack_wheel() {
    local python=$1 folder=$2 platform=$3 epoch=$4 result=$5
    chmod -R u=rwX,go=rX "$folder"
    (cd "$folder" && umask 022 && SOURCE_DATE_EPOCH=$epoch PYTHONDONTWRITEBYTECODE=1 "$python" -m build --quiet --wheel --no-isolation \
        --config-setting="--build-option=--plat-name=$platform" --outdir "$folder.wheel" >"$folder.log" 2>&1) || {
        tail -20 "$folder.log" >&2
        fail "packing the wheel for $platform failed"
    }
    mv "$folder.wheel"/*.whl "$result"
    rmdir "$folder.wheel"
}

# Checks of a wheel that pip and PyPI need.
inspect_wheel() {
    local arch=$1 wheel=$2 shown glibc
    [ -e "$wheel" ] || fail "the wheel for $arch has another name than $(basename "$wheel")"
    shown=$("$(wheel_tools)/bin/auditwheel" show "$wheel" 2>&1) || fail "auditwheel cannot read $wheel: $(tail -1 <<<"$shown")"
    # The newest glibc whose symbols it asks for, by its own measure.
    glibc=$(tr '\n' ' ' <<<"$shown" | sed -nE "s/.*consistent with the following platform tag: +\"manylinux_([0-9]+)_([0-9]+)_$arch\".*/\1.\2/p")
    if [ "$(printf '%s\n' "${glibc:-none}" "$GLIBC" | sort -V | tail -1)" != "$GLIBC" ]; then
        printf '%s\n' "$shown" >&2
        fail "auditwheel does not find that $wheel runs with glibc $GLIBC"
    fi
    say "$arch $(basename "$wheel"): $(stat -c %s "$wheel") bytes, glibc $glibc by auditwheel"
}
