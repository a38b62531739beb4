#!/usr/bin/env bash
# What release/try.sh runs in a bare root, with an archive and a model beside it: bash try-inside.sh NAME
set -euo pipefail
cd "$(dirname "$0")"
name=$1
readonly VERSE="And I will tell you, sir, I will not be a man."

step() { printf '   %s\n' "$*"; }

# answer PROGRAM: the beginning of what it says, after which it ends, as nobody listens: emulated, the rest would take minutes.
answer() { { "$1" verse-10m "HAMLET." 2>log || true; } | head -c 100; }

tar xf "$name.tar.xz"
# Somewhere else than it was made for.
mkdir elsewhere && mv "$name" elsewhere/nvfp4
prefix=$PWD/elsewhere/nvfp4
step "$(. /etc/os-release && echo "$PRETTY_NAME"), $(uname -m), $(ldd --version | head -1)"

"$prefix/bin/nvfp4" --version
"$prefix/bin/nvfp4" --help | grep -q '^Usage: nvfp4 <COMMAND>'
grep -q '^\.TH nvfp4-run 1' "$prefix/share/man/man1/nvfp4-run.1"
"$prefix/bin/nvfp4" diagnose
"$prefix/bin/nvfp4" run --model verse-10m --device cpu --raw --prompt "HAMLET." --temp 0 --max-tokens 24 | grep -F "$VERSE"
step "the command: help, diagnose, a known answer"

export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
example=$prefix/share/nvfp4/examples/c/chat.c
read -ra flags <<<"$(pkg-config --cflags --libs nvfp4)"
gcc "$example" "${flags[@]}" "-Wl,-rpath,$prefix/lib" -o chat
answer ./chat >said
[ "$(wc -c <said)" -eq 100 ] || { cat log; exit 1; }
cat said
echo
step "chat.c by pkg-config"

if [ -e "$prefix/lib/libNVFP4.a" ]; then
    read -ra flags <<<"$(pkg-config --static --cflags --libs nvfp4)"
    # Both are installed, and of two the linker takes the shared one for the plain name.
    gcc "$example" "${flags[@]/#-lNVFP4/-l:libNVFP4.a}" -o static
    answer ./static | cmp - said
    step "chat.c with the static library says the same"
fi

version=$(pkg-config --modversion nvfp4)
mkdir project && cat >project/CMakeLists.txt <<END
cmake_minimum_required(VERSION 3.18)
project(chat LANGUAGES C)
find_package(NVFP4 ${version%.*} REQUIRED)
add_executable(chat "$example")
target_link_libraries(chat PRIVATE NVFP4::NVFP4)
END
cmake -S project -B build -DCMAKE_PREFIX_PATH="$prefix" >/dev/null
cmake --build build >/dev/null
answer build/chat | cmp - said
step "chat.c by CMake says the same"
