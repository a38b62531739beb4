"""Prints assertions in C of the sizes and offsets that src/abi/layout.rs has: python3 layout.py | gcc -std=c11 -fsyntax-only -Iinclude -xc -

Rust asserts them when it compiles the library, so a difference between the two compilers is found. Exits with 1 if a struct of nvfp4.h, or
one of its fields, has no number there.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "bindings"))

import generate  # noqa: E402


def main() -> int:
    structs = {name: [field.name for field in struct.fields] for name, struct in
               generate.parse(generate.HEADER.read_text(encoding="utf-8")).structs.items()}
    known = {name: (size, dict(re.findall(r"(\w+): (\d+)", fields))) for name, size, fields in
             re.findall(r"^layout!\(NVFP4_(\w+), (\d+), ([^)]*)\);", (ROOT / "src/abi/layout.rs").read_text(encoding="utf-8"), re.M)}
    if {name: list(offsets) for name, (_, offsets) in known.items()} != structs:
        print("src/abi/layout.rs has other structs than nvfp4.h:", sorted(known.keys() ^ structs.keys()) or
              [name for name, fields in structs.items() if list(known[name][1]) != fields], file=sys.stderr)
        return 1
    print("#include <stddef.h>\n#include <nvfp4.h>")
    for name, (size, offsets) in known.items():
        print(f'_Static_assert(sizeof(NVFP4_{name}) == {size}, "sizeof(NVFP4_{name})");')
        for field, offset in offsets.items():
            print(f'_Static_assert(offsetof(NVFP4_{name}, {field}) == {offset}, "offsetof(NVFP4_{name}, {field})");')
    return 0


if __name__ == "__main__":
    sys.exit(main())
