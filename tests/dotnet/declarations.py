"""Compares the declarations of the C# package with the header: python3 declarations.py HEADER NATIVE.cs LIBRARY.cs ENUMS.cs...

Functions and callbacks by name, result and parameters; structs by the names and types of their fields, in order; numbers by name
and value, those of the version among them. Says what differs, and exits with 1.
"""

import re
import sys

SCALARS = {"int8_t": "sbyte", "uint8_t": "byte", "int32_t": "int", "int64_t": "long", "uint32_t": "uint", "uint64_t": "ulong", "size_t": "UIntPtr",
           "float": "float", "double": "double", "NVFP4_Status": "int"}
HANDLES = ("NVFP4_Tensor", "NVFP4_Weight", "NVFP4_Model", "NVFP4_Session", "NVFP4_Detokenizer", "NVFP4_Cancel", "NVFP4_Error",
           "NVFP4_Trainer", "NVFP4_Data", "NVFP4_OptimizerState")
CALLBACKS = ("NVFP4_LogCallback", "NVFP4_LogRelease", "NVFP4_Deleter", "NVFP4_ProgressCallback", "NVFP4_TokenCallback")
# The names of C# where they are not those of the header in another spelling.
GROUPS = {"LOG": "LogLevel", "MEMORY": "MemoryTag", "MANAGED": "ManagedPolicy", "DTYPE": "DType", "DEVICE": "DeviceType",
          "SCALES": "ScaleLayout", "KV": "KvType", "FINISH": "FinishReason",
          "EVENT": "TokenEventKind", "STEP": "StepOutcome", "DATA": "DataFormat", "LONG": "LongRows"}


def plain(text):
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)


def allowed(kind):
    """The types of C# that fit a type of C."""
    kind = re.sub(r"\b(const|struct|volatile)\b|\s", "", kind)
    base, stars = kind.rstrip("*"), kind.count("*")
    if base in CALLBACKS:
        # A struct has the address of one, as pointers to it would not be possible otherwise.
        return {base[len("NVFP4_"):], "IntPtr"}
    if base in HANDLES:
        name = base[len("NVFP4_"):] + "Handle"
        return {name, "IntPtr"} if stars == 1 else {"out " + name, "IntPtr*"}
    if base in ("void", "DLManagedTensor", "DLManagedTensorVersioned"):
        return {"void"} if stars == 0 else {"IntPtr"} if stars == 1 else {"out IntPtr"}
    if base == "char":
        return {"byte" + "*" * stars, "IntPtr"}
    if base in SCALARS:
        return {SCALARS[base] + "*" * stars}
    return {"Native" + base[len("NVFP4_"):] + "*" * stars}


def split(parameters):
    parameters = " ".join(parameters.split())
    if parameters in ("", "void"):
        return []
    return [re.fullmatch(r"(.*?)\s*(\w+)", p.strip()).groups() for p in parameters.split(",")]


def camel(name):
    return "".join(part.capitalize() for part in name.lower().split("_"))


def main(header_path, native_path, library_path, *enum_paths):
    raw = open(header_path, encoding="utf-8").read()
    header, native = plain(raw), plain(open(native_path, encoding="utf-8").read())
    library = plain(open(library_path, encoding="utf-8").read())
    problems = []

    declared = {name: (result, split(parameters)) for result, name, parameters in
                re.findall(r"NVFP4_API\s+([\w\s*]+?)\s*\b(NVFP4_\w+)\s*\(([^)]*)\)\s*;", header) +
                re.findall(r"typedef (\w+) \(\*(NVFP4_\w+)\)\(([^)]*)\);", header)}
    imported = {name: (result, split(parameters)) for result, name, parameters in
                re.findall(r"static extern ([\w*]+) (NVFP4_\w+)\(([^)]*)\);", native) +
                [(result, "NVFP4_" + name, parameters) for result, name, parameters in
                 re.findall(r"delegate ([\w*]+) (\w+)\(([^)]*)\);", native)]}
    if len(declared) < 90:
        problems.append(f"only {len(declared)} functions were found in {header_path}")
    problems += [f"{name} is not declared in C#" for name in sorted(declared.keys() - imported.keys())]
    problems += [f"{name} is not in the header" for name in sorted(imported.keys() - declared.keys())]
    for name in sorted(declared.keys() & imported.keys()):
        result, parameters = declared[name]
        own_result, own = imported[name]
        if own_result not in allowed(result):
            problems.append(f"{name} gives {result}, and {own_result} in C#")
        if len(own) != len(parameters):
            problems.append(f"{name} has {len(parameters)} parameters, and {len(own)} in C#")
            continue
        for (kind, parameter), (own_kind, _) in zip(parameters, own):
            if own_kind not in allowed(kind):
                problems.append(f"{name}: {parameter} is {kind}, and {own_kind} in C#")

    for name, body in re.findall(r"typedef struct NVFP4_(\w+) \{(.*?)\}", header, flags=re.S):
        fields = [(camel(field), kind) for kind, field in split(body.strip().rstrip(";").replace(";", ","))]
        match = re.search(rf"struct Native{name}\s*\{{(.*?)\}}", native, flags=re.S)
        own = re.findall(r"internal ([\w*]+) (\w+);", match.group(1)) if match else []
        if [field for field, _ in fields] != [field for _, field in own]:
            problems.append(f"NVFP4_{name} has the fields {fields}, and in C# {own}")
        problems += [f"NVFP4_{name}: {field} is {kind}, and {own_kind} in C#"
                     for (field, kind), (own_kind, _) in zip(fields, own) if own_kind not in allowed(kind)]

    members = {}
    for path in enum_paths:
        for enum, body in re.findall(r"enum (\w+)\s*\{(.*?)\}", plain(open(path, encoding="utf-8").read()), flags=re.S):
            members.update({(enum, member.lower()): int(value) for member, value in re.findall(r"(\w+) = (-?\d+)", body)})
    seen = set()
    for name, value in re.findall(r"^#define NVFP4_([A-Z0-9_]+) (-?\d+)$", header, flags=re.M):
        if name in ("ABI_VERSION", "VERSION_NUMBER"):
            if f"const int {camel(name)} = {value};" not in library:
                problems.append(f"NVFP4_{name} is {value}, and not in {library_path}")
            continue
        if name.startswith("VERSION"):
            continue
        # The prefix is the name of an enum; constants without an enum are statuses.
        words = name.split("_")
        starts = (("_".join(words[:n]), "".join(words[n:]).lower()) for n in range(len(words) - 1, 0, -1))
        key = next((key for start, member in starts if (key := (GROUPS.get(start, camel(start)), member)) in members),
                   ("Status", "".join(words).lower()))
        seen.add(key)
        if members.get(key) != int(value):
            problems.append(f"NVFP4_{name} is {value}, and {'.'.join(key)} in C# {members.get(key)}")
    problems += [f"{'.'.join(key)} is not in the header" for key in sorted(members.keys() - seen - {("Status", "notloaded")})]

    print("\n".join(problems) if problems else f"{len(imported)} functions and callbacks, {len(members)} numbers")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
