# Common parts of the tests of wheels: packs one from the checkout's package. Sourced after checks.sh, from the repository's root.
# shellcheck shell=bash

# in_release PART COMMAND...: with the functions of the scripts that make releases.
in_release() (
    set -e
    source release/common.sh
    source "release/parts/$1.sh"
    shift
    "$@"
)

# The folder of the tools that pack wheels, kept with the tools of releases.
wheel_tools() { NVFP4_RELEASE=${CARGO_TARGET_DIR:-target}/distribution with_lock wheels in_release wheels wheel_tools; }

# pack_package LIBRARY PLATFORM EPOCH RESULT: a wheel of the checkout's package.
pack_package() {
    local python
    python=$(wheel_tools)/bin/python || return
    [ "${python:0:1}" = / ] || python=$PWD/$python
    in_release wheels stage_package . "$1" "$work/package" && mkdir -p "$4" &&
        in_release wheels pack_wheel "$python" "$work/package" "$2" "$3" "$4"
}
