#!/usr/bin/env python3
"""What nvfp4.h declares, for release/compare.sh.

    interface.py stub HEADER [OLD]    prints a definition of every function in C, so that a compiler knows the types of each; with OLD as
                                      its programs may see them: structs without the fields that they grew by
    interface.py compare OLD NEW      prints "VERDICT: WHAT" for each difference: major if a program that was compiled with OLD may break
                                      with NEW, minor if there is more than there was

OLD and NEW are headers, or shared libraries, which tell the names of functions alone. Parameters' names are no difference, nor are comments.
It knows the header's own promise: structs grow at their end, and fields called `reserved` become others of the same type.
"""

import os
import re
import subprocess
import sys
import tempfile

CC = os.environ.get("CC", "gcc")
# Macros whose values differ between any two versions.
VERSIONS = re.compile(r"NVFP4_VERSION_(MAJOR|MINOR|PATCH|NUMBER)")
# Macros that programs do not use.
GUARDS = ("NVFP4_H", "NVFP4_API")


class Unknown(Exception):
    """What the header says is none of what it is known to say."""


def run(*command, text=None):
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unknown(f"{command[0]}: {done.stderr.strip().splitlines()[0] if done.stderr.strip() else 'failed'}")
    return done.stdout


def tidy(text):
    """A type, with one space between words and none after a star."""
    return re.sub(r"\s*\*\s*", " *", " ".join(text.split())).replace("* *", "**").strip()


def named(declaration):
    """The type and the name of a field or a parameter."""
    found = re.fullmatch(r"(.*?[\s*])(\w+)((?:\s*\[\w+\])*)", declaration.strip(), flags=re.S)
    if not found:
        raise Unknown(f"not understood: {declaration.strip()!r}")
    return tidy(found[1] + found[3]), found[2]


def parameters(text):
    return [] if text.strip() in ("", "void") else [named(one) for one in text.split(",")]


class Header:
    """Functions, structs, other types and constants, each by its name."""

    def __init__(self, path):
        self.path = path
        self.functions, self.structs, self.types, self.constants = {}, {}, {}, {}
        self.sizes, self.offsets = {}, {}
        self.text = list(self.statements())
        for statement in self.text:
            self.read(statement)
        for line in run(CC, "-dM", "-E", "-xc", path).splitlines():
            name, _, value = line.removeprefix("#define ").partition(" ")
            if name.startswith("NVFP4_") and name not in GUARDS:
                self.constants[name] = value
        self.measure()

    def statements(self):
        """What is in the file itself, without its comments and what it includes."""
        text, inside = "", False
        for line in run(CC, "-E", "-xc", self.path).splitlines():
            marker = re.match(r'# \d+ "(.*?)"', line)
            if marker:
                inside = marker[1] == self.path
            elif inside:
                text += line + "\n"
        text = re.sub(r"__attribute__\s*\(\(.*?\)\)\)?", "", text)
        depth, start = 0, 0
        for at, letter in enumerate(text):
            depth += (letter == "{") - (letter == "}")
            if letter == ";" and depth == 0:
                yield " ".join(text[start:at].split())
                start = at + 1

    def read(self, statement):
        if found := re.fullmatch(r"typedef struct (\w+) \{(.*)\} \1", statement):
            self.structs[found[1]] = [named(field) for field in found[2].split(";") if field.strip()]
        elif found := re.fullmatch(r"typedef struct (\w+) \1", statement):
            self.types[found[1]] = "an opaque type"
        elif found := re.fullmatch(r"typedef (.*?)\(\*(\w+)\)\((.*)\)", statement):
            self.types[found[2]] = f"{tidy(found[1])} (*)({', '.join(kind for kind, _ in parameters(found[3]))})"
        elif found := re.fullmatch(r"typedef ([^(){}]*?[\s*])(\w+)", statement):
            self.types[found[2]] = tidy(found[1])
        elif found := re.fullmatch(r"([^(){}]*?[\s*])(\w+)\s*\(([^()]*)\)", statement):
            self.functions[found[2]] = (tidy(found[1]), parameters(found[3]))
        elif not re.fullmatch(r"struct \w+", statement):
            raise Unknown(f"not understood: {statement!r}")

    def measure(self):
        """The size of each struct, and where its fields are."""
        lines = []
        for name, fields in self.structs.items():
            lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
            lines += [f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));' for _, field in fields]
        program = f'#include <stddef.h>\n#include <stdio.h>\n#include "{os.path.abspath(self.path)}"\nint main(void) {{ {" ".join(lines)} return 0; }}\n'
        with tempfile.TemporaryDirectory() as folder:
            binary = os.path.join(folder, "measure")
            run(CC, "-xc", "-", "-o", binary, text=program)
            for line in run(binary).splitlines():
                name, number = line.split()
                (self.offsets if "." in name else self.sizes)[name] = int(number)

    def stub(self, old=None):
        yield "#include <stddef.h>\n#include <stdint.h>"
        for statement in self.text:
            found = re.fullmatch(r"typedef struct (\w+) \{.*\} \1", statement)
            name = found and found[1]
            if old and name in old.structs and self.may_grow(name):
                fields = [(kind, "reserved" if (kind, "reserved") == before else field)
                          for (kind, field), before in zip(self.structs[name], old.structs[name])]
                yield f"typedef struct {name} {{ {' '.join(f'{kind} {field};' for kind, field in fields)} }} {name};"
            else:
                yield statement + ";"
        for name, (result, taken) in self.functions.items():
            yield f"{result} {name}({', '.join(f'{kind} {word}' for kind, word in taken) or 'void'}) {{ __builtin_trap(); }}"

    def may_grow(self, name):
        """Whether the library is told the size of a struct: by its first field, or by a parameter of each function that takes one."""
        if self.structs[name][0] == ("uint32_t", "struct_size"):
            return True
        pointer = re.compile(rf"(const )?{name} \*+")
        takers = [taken for _, taken in self.functions.values() if any(pointer.fullmatch(kind) for kind, _ in taken)]
        elsewhere = any(re.search(rf"\b{name}\b", kind) for fields in self.structs.values() for kind, _ in fields)
        elsewhere |= any(re.search(rf"\b{name}\b", kind) for kind in self.types.values())
        return bool(takers) and not elsewhere and all(
            any(kind == "size_t" and word.endswith("_size") for kind, word in taken) for taken in takers)


class Library:
    """The functions that a shared library exports, by name alone."""

    def __init__(self, path):
        self.functions = {name: None for name in re.findall(r" [TWi] (NVFP4_\w+)", run("nm", "-D", "--defined-only", path))}


def interface(path):
    with open(path, "rb") as file:
        return Library(path) if file.read(4) == b"\x7fELF" else Header(path)


def names(what, old, new):
    for name in old:
        if name not in new:
            yield f"major: {what % name} is gone"
    for name in new:
        if name not in old:
            yield f"minor: {what % name} is new"


def functions(old, new):
    yield from names("%s()", old, new)
    for name in old:
        if name not in new or old[name] is None or new[name] is None:
            continue
        (was, took), (now, takes) = old[name], new[name]
        if was != now:
            yield f"major: {name}() returns {now}, and returned {was}"
        if len(took) != len(takes):
            yield f"major: {name}() takes {len(takes)} parameters, and took {len(took)}"
        else:
            for at, ((before, _), (after, word)) in enumerate(zip(took, takes)):
                if before != after:
                    yield f"major: parameter {at + 1} of {name}(), {word}, is {after}, and was {before}"


def struct(name, old, new):
    before, after = old.structs[name], new.structs[name]
    for at, (kind, field) in enumerate(before):
        if at >= len(after):
            yield f"major: {name}.{field} is gone"
            return
        there, called = after[at]
        if (there, new.offsets[f"{name}.{called}"]) == (kind, old.offsets[f"{name}.{field}"]) and (called == field or field == "reserved"):
            if called != field:
                yield f"minor: {name}.{field} is {called} now"
            continue
        yield (f"major: {name} has '{there} {called}' at byte {new.offsets[f'{name}.{called}']}, "
               f"and had '{kind} {field}' at byte {old.offsets[f'{name}.{field}']}")
        return
    for kind, field in after[len(before):]:
        where = new.offsets[f"{name}.{field}"]
        if not new.may_grow(name) or not old.may_grow(name):
            yield f"major: {name}.{field} is new, and the library is not told which size of {name} a program has"
        elif where < old.sizes[name]:
            yield f"major: {name}.{field} is new at byte {where}, where programs had padding that nobody set"
        else:
            yield f"minor: {name}.{field} is new at the end"
    if len(after) == len(before) and old.sizes[name] != new.sizes[name]:
        yield f"major: {name} has {new.sizes[name]} bytes, and had {old.sizes[name]}"


def values(old, new):
    yield from names("%s", old, new)
    for name in old:
        if name in new and old[name] != new[name]:
            yield f"major: {name} is {new[name]}, and was {old[name]}"


def compare(old, new):
    yield from functions(old.functions, new.functions)
    if isinstance(old, Library) or isinstance(new, Library):
        return
    yield from names("the struct %s", old.structs, new.structs)
    for name in old.structs:
        if name in new.structs:
            yield from struct(name, old, new)
    # A type that was opaque may become a struct that programs see.
    opaque = {name: kind for name, kind in old.types.items() if name not in new.structs}
    yield from values(opaque, new.types)
    kept = [{name: value for name, value in one.constants.items() if not VERSIONS.fullmatch(name)} for one in (old, new)]
    yield from values(*kept)


def main():
    try:
        if len(sys.argv) in (3, 4) and sys.argv[1] == "stub":
            header, *old = map(Header, sys.argv[2:])
            print("\n".join(header.stub(*old)))
        elif len(sys.argv) == 4 and sys.argv[1] == "compare":
            for line in compare(interface(sys.argv[2]), interface(sys.argv[3])):
                print(line)
        else:
            sys.exit(__doc__)
    except (Unknown, OSError) as error:
        sys.exit(f"interface.py: {error}")


if __name__ == "__main__":
    main()
