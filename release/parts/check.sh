# Builds the natives again, from a copy of the same commit in another folder and with kernels that are compiled anew, and packs them: each
# byte must be as before.
# shellcheck shell=bash

part_check() {
    local again=$OUT/again arch name
    source release/parts/natives.sh
    source release/parts/archives.sh
    source release/parts/wheels.sh
    source release/parts/nuget.sh
    [ -e "$OUT/source.commit" ] || fail "there is nothing in $OUT to compare with: run 'bash release/build.sh'"
    rm -rf "$again"
    export_source "$(<"$OUT/source.commit")" "$again/elsewhere/source"
    for arch in $ARCHES; do
        build_native "$arch" "$again/elsewhere/source" "$again/elsewhere/cargo" "$again/elsewhere/kernels" "$again/natives/linux-$arch"
        diff -r "$(native_folder "$arch")" "$again/natives/linux-$arch" || fail "the natives for $arch are not reproducible"
        say "the natives for $arch: the same bytes"
        make_archive "$arch" "$again/elsewhere/source" "$again/natives/linux-$arch" "$again/archives" "$again/dist"
        make_wheel "$arch" "$again/elsewhere/source" "$again/natives/linux-$arch/libNVFP4.so" "$again/wheels" "$again/dist"
        for name in "$again/dist/"*"linux"*"$arch"*; do
            cmp "$name" "$OUT/dist/$(basename "$name")" || fail "$(basename "$name") is not reproducible"
        done
        say "the archives and the wheel for $arch: the same bytes"
    done
    make_packages "$again/elsewhere/source" "$again/natives" "$again/nuget" "$again/dist"
    for name in "$again/dist/"*nupkg; do
        cmp "$name" "$OUT/dist/$(basename "$name")" || fail "$(basename "$name") is not reproducible"
    done
    say "the NuGet packages: the same bytes"
}
