# Debian packages unpacked into their own folders without being installed, so that the machine is not affected by another architecture or
# another Rust compiler. Takes apt-get and dpkg, and no root. Sourced from the repository's root by run.sh, which sets $debian.
# shellcheck shell=bash

# apt_get FOLDER COMMAND...: with lists and packages of its own beside FOLDER, for this machine's architecture and for arm64.
apt_get() {
    local folder=$1
    shift
    mkdir -p "$folder.apt"/{lists,archives}/partial
    apt-get -qq -o Debug::NoLocking=1 -o APT::Sandbox::User= -o Dir::State::Lists="$folder.apt/lists" -o Dir::Cache="$folder.apt" \
        -o APT::Architectures::="$(dpkg --print-architecture)" -o APT::Architectures::=arm64 "$@"
}

# with_needs FOLDER PACKAGE... [OPTION...]: downloads packages with their dependencies.
with_needs() { apt_get "$1" install --reinstall --download-only --yes --no-install-recommends "${@:2}"; }

# unpack FOLDER COMMAND FOLDER...: unpacks the command's downloads, unless they are there already.
unpack() {
    local folder=$1 package
    shift
    [ ! -e "$folder/whole" ] || return 0
    command -v apt-get >/dev/null || { echo "apt-get is missing"; return 1; }
    rm -rf "$folder" "$folder.apt"
    # A source that cannot be read may be one that is not needed.
    apt_get "$folder" update
    mkdir -p "$folder" && "$@" || return 1
    for package in "$folder.apt"/archives/*.deb; do
        dpkg -x "$package" "$folder" || return 1
    done
    rm -rf "$folder.apt"
    touch "$folder/whole"
}

download_rust() {
    with_needs "$1" libstd-rust-web-dev && (cd "$1.apt/archives" && apt_get "$1" download rustc-web libstd-rust-web-dev:arm64)
}

# The newest Rust compiler of a Debian release, which browsers are compiled by, with the standard library for AArch64. Prints its path.
debian_rust() {
    local folder=$debian/rust
    unpack "$folder" download_rust "$folder" >&2 || return 1
    # Where it finds its own libraries.
    cat >"$folder/rustc" <<END
#!/bin/sh
export LD_LIBRARY_PATH="$folder/usr/lib/$(uname -m)-linux-gnu\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
exec "$folder/usr/bin/rustc" "\$@"
END
    chmod +x "$folder/rustc"
    echo "$folder/rustc"
}

# A Python for AArch64 with pip, and every library that it needs. Prints the folder, which is a root for the emulator.
debian_python() {
    local folder=$debian/python
    unpack "$folder" with_needs "$folder" python3-pip -o Dir::State::status=/dev/null -o APT::Architecture=arm64 >&2 && echo "$folder"
}
