#!/usr/bin/env python3
"""Generates the declarations of the Python and .NET packages from include/nvfp4.h: python3 bindings/generate.py [--check]

Structs, numbers, callbacks, function signatures and their documentation all come from the header. GROUPS names the choices that users of
the packages see; the conventions of each language stand where its files are written. --check compares instead of writing, and exits with
1 if a file differs.
"""

import re
import sys
import textwrap
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

ROOT = Path(__file__).resolve().parent.parent
HEADER = ROOT / "include/nvfp4.h"
PYTHON = ROOT / "bindings/python/nvfp4"
DOTNET = ROOT / "bindings/dotnet/LibNVFP4"
WIDTH = 140


class Group(NamedTuple):
    """Numbers of one prefix: an enum in C#, a table of names in Python."""

    prefix: str
    dotnet: str
    python: Optional[str]  # The Literal of types.py.
    summary: str
    hidden: Tuple[str, ...] = ()  # Names that the Literal lacks.
    flags: bool = False  # Bits that are added up.


GROUPS = (
    Group("LOG", "LogLevel", "LogLevel", "Severity of log messages."),
    Group("MEMORY", "MemoryTag", None, "Purposes of memory."),
    Group("MANAGED", "ManagedPolicy", None, "Use of managed (unified) memory where a host asks for it by policy."),
    Group("DTYPE", "DType", "Dtype", "Element types of tensors, by libtorch's numbers."),
    Group("DEVICE", "DeviceType", None, "Kinds of devices, by libtorch's numbers."),
    Group("LEVELS", "Levels", "Levels", "Number of levels of scales."),
    Group("RECIPE", "Recipe", "Recipe", "How block scales are chosen."),
    Group("ROUNDING", "Rounding", "Rounding", "How values between two codes are rounded."),
    Group("NONFINITE", "Nonfinite", "Nonfinite", "Treatment of NaN and infinity."),
    Group("SCALES", "ScaleLayout", "ScaleLayout", "Order of block scales."),
    Group("ACTIVATIONS", "Activations", "Activations", "Precision of activations in a product."),
    Group("COMPUTE_PATH", "ComputePath", "ComputePath", "Whether a weight is multiplied in 4 bits or decoded."),
    Group("FORMAT", "Format", "Format", "4-bit format of a weight.", ("none", "mixed")),
    Group("CONTAINER", "Container", "Container", "Output format of a conversion."),
    Group("TOKEN_ROLE", "TokenRoles", "TokenRole", "Roles of special tokens.", flags=True),
    Group("PACKED", "PackedUse", "PackedUse", "Use of the file of packed weights beside a model's own."),
    Group("TUNING", "Tuning", "Tuning", "Goal of passes with prompts."),
    Group("KV", "KvType", "KvType", "Precision of cached keys and values."),
    Group("EVICTION", "Eviction", "Eviction", "Treatment of tokens that do not fit in a session."),
    Group("FINISH", "FinishReason", "Finish", "Why a generation ended.", ("none",)),
    Group("TOOL_CALLS", "ToolCalls", "ToolCalls", "Policy for holding tool calls of an answer to their tools' schemas."),
    Group("GRAMMAR", "GrammarKind", "GrammarKind", "Kind of a grammar's source."),
    Group("EVENT", "TokenEventKind", None, "Kinds of events in a generation."),
    Group("PART", "Part", "Part", "Kinds of text in an answer."),
    Group("POOLING", "Pooling", "Pooling", "The rows of a text that make its embedding."),
    Group("NORMALIZE", "Normalize", "Normalize", "Whether embeddings are divided by their length."),
    Group("SCHEDULE", "Schedule", "Schedule", "Learning rate after the warm-up."),
    Group("CLIP", "Clip", "Clip", "How gradients are clipped."),
    Group("TEACHER", "Teacher", "TeacherMemory", "Place of a teacher's weights."),
    Group("WEIGHT_FORM", "WeightForm", "WeightForm", "Stored form of weights between steps."),
    Group("FIRST_MOMENT", "FirstMoment", "FirstMoments", "Stored form of first moments."),
    Group("SECOND_MOMENT", "SecondMoment", "SecondMoments", "Stored form of second moments."),
    Group("STEP", "StepOutcome", "Outcome", "Outcome of a training step."),
    Group("TABLES", "Tables", "Tables", "Format of embedding and output head in a written model."),
    Group("DATA", "DataFormat", "DataFormat", "Format of a file of training data."),
    Group("LONG", "LongRows", "LongRows", "Treatment of rows longer than a window."),
    Group("EMPTY_THINK", "EmptyThink", "EmptyThink", "Treatment of the empty reasoning that some templates write before an answer without reasoning."),
)
STATUS = Group("", "Status", None, "Result of a call.")
# Numbers that are no choice.
SINGLE = ("VERSION_MAJOR", "VERSION_MINOR", "VERSION_PATCH", "VERSION_NUMBER", "ABI_VERSION", "SEED_NEW")


# The header.

class Number(NamedTuple):
    name: str  # Without NVFP4_, as all names here.
    value: int
    doc: str


class Declared(NamedTuple):
    """A field, a parameter or a result. `kind` is its type with const, `base` its type without const, stars and NVFP4_."""

    kind: str
    base: str
    stars: int
    name: str
    doc: str = ""


class Struct(NamedTuple):
    name: str
    fields: List[Declared]
    doc: str


class Function(NamedTuple):
    name: str
    result: Declared
    parameters: List[Declared]
    doc: str
    chapter: str


class Header(NamedTuple):
    numbers: List[Number]
    handles: Dict[str, str]  # Each handle type with its documentation.
    callbacks: Dict[str, Function]
    structs: Dict[str, Struct]
    functions: List[Function]

    @property
    def types(self) -> List[object]:
        return [*self.callbacks.values(), *self.structs.values()]


PATTERNS = {kind: re.compile(pattern, re.S) for kind, pattern in {
    "chapter": r"/\*\*\n \* @defgroup \w+ (?P<title>[^\n]*)\n.*?\*/\s*",
    "doc": r"/\*\*(?P<doc>.*?)\*/\s*",
    "number": r"#define NVFP4_(?P<name>\w+) (?P<value>-?\d+)(?:ull)?\s+",
    "handle": r"typedef struct NVFP4_(?P<name>\w+) NVFP4_(?P=name);\s*",
    "status": r"typedef int32_t NVFP4_Status;\s*",
    "callback": r"typedef (?P<result>[\w *]+?) \(\*NVFP4_(?P<name>\w+)\)\((?P<parameters>[^)]*)\);\s*",
    "struct": r"typedef struct NVFP4_(?P<name>\w+) \{\n(?P<fields>.*?)\n\} NVFP4_(?P=name);\s*",
    "function": r"NVFP4_API\s+(?P<result>[\w *]+?)\bNVFP4_(?P<name>\w+)\((?P<parameters>[^)]*)\);\s*",
}.items()}
FIELD = re.compile(r"\s*/\*\*(?P<doc>.*?)\*/\s*(?P<field>[^;]*);", re.S)


def parse(text: str) -> Header:
    """The declarations of a header. Fails at the first line that it does not understand."""
    header = Header([], {}, {}, {}, [])
    start, end = text.index('extern "C" {\n#endif\n'), text.rindex("#ifdef __cplusplus")
    at, doc, chapter = start + len('extern "C" {\n#endif\n'), "", ""
    at = re.compile(r"\s*").match(text, at).end()
    while at < end:
        found = next(((kind, match) for kind, pattern in PATTERNS.items() if (match := pattern.match(text, at))), None)
        if not found:
            raise SystemExit(f"{HEADER}:{text.count(chr(10), 0, at) + 1}: not understood: {text[at:].splitlines()[0]}")
        kind, match = found
        at, part = match.end(), match.groupdict()
        if kind == "chapter":
            chapter = part["title"]
        elif kind == "doc":
            doc = plain(part["doc"])
            continue
        elif kind == "number":
            header.numbers.append(Number(part["name"], int(part["value"]), doc))
        elif kind == "handle":
            header.handles[part["name"]] = doc
        elif kind == "struct":
            fields = [declared(field["field"], plain(field["doc"])) for field in FIELD.finditer(part["fields"])]
            if FIELD.sub("", part["fields"]).strip():
                raise SystemExit(f"NVFP4_{part['name']}: a field without documentation")
            header.structs[part["name"]] = Struct(part["name"], fields, doc)
        elif kind in ("callback", "function"):
            taken = " ".join(part["parameters"].split())
            function = Function(part["name"], declared(part["result"] + " _"), [declared(one) for one in taken.split(", ") if one != "void"],
                                doc, chapter)
            if kind == "callback":
                header.callbacks[function.name] = function
            else:
                header.functions.append(function)
        doc = ""
    return header


def plain(comment: str) -> str:
    """The text of a comment, without its frame."""
    return "\n".join(re.sub(r"^\s*\* ?", "", line).rstrip() for line in comment.strip().splitlines())


def declared(text: str, doc: str = "") -> Declared:
    """`const char *const *files` and the like."""
    kind, name = re.fullmatch(r"(.*?)(\w+)", " ".join(text.split())).groups()
    base = re.sub(r"\b(const|struct|volatile)\b|[\s*]", "", kind)
    return Declared(kind.strip(), re.sub("^NVFP4_", "", base), kind.count("*"), name, doc)


def grouped(header: Header) -> Dict[Group, List[Number]]:
    """The numbers by group. The statuses are the first ones, which count from 0."""
    groups: Dict[Group, List[Number]] = {STATUS: [], **{group: [] for group in GROUPS}}
    for number in header.numbers:
        if number.value == len(groups[STATUS]) and number == header.numbers[number.value]:
            groups[STATUS].append(number)
        elif number.name not in SINGLE:
            fitting = [group for group in GROUPS if number.name.startswith(group.prefix + "_")]
            if not fitting:
                raise SystemExit(f"NVFP4_{number.name} is in no group; name its group in GROUPS of {__file__}")
            group = max(fitting, key=lambda group: len(group.prefix))
            groups[group].append(number._replace(name=number.name[len(group.prefix) + 1:]))
    return groups


# Text.

def blocks(doc: str) -> Iterator[Tuple[str, str]]:
    """The paragraphs and list items of a comment, each with what stands before it: "", "- ", or "\n" after an empty line."""
    before, lines = "", []
    for line in [*doc.splitlines(), ""]:
        if lines and (not line or line.startswith("- ")):
            yield before, " ".join(lines)
            lines = []
        if line.startswith("- "):
            before = "- "
        elif not lines:
            before = "\n"
        if line:
            lines.append(line.strip().removeprefix("- ") if line.startswith("- ") else line.strip())


def wrapped(doc: str, width: int) -> List[str]:
    """The lines of a comment that is `width` wide."""
    out: List[str] = []
    previous = ""
    for before, text in blocks(doc):
        if out and (before == "\n" or previous != "- "):
            out.append("")
        bullet = before if before == "- " else ""
        out += textwrap.wrap(text, width, initial_indent=bullet, subsequent_indent=" " * len(bullet), break_long_words=False, break_on_hyphens=False)
        previous = before
    return out


def comment(doc: str, indent: int, mark: str) -> str:
    """A comment of whole lines."""
    start = " " * indent + mark
    return "".join(f"{start} {line}".rstrip() + "\n" for line in wrapped(doc, WIDTH - len(start) - 1))


def camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.lower().split("_"))


def filled(start: str, items: List[str], end: str, indent: int) -> str:
    """A list that is broken where its line is full."""
    text = start.replace(" ", "\0") + ", ".join(item.replace(" ", "\0") for item in items) + end
    lines = textwrap.wrap(text, WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ") + "\n"


# Python: ctypes. A pointer is a c_void_p, which takes a handle, an address, an array and what byref() gives.

CTYPES = {"int8_t": "c_int8", "uint8_t": "c_uint8", "int16_t": "c_int16", "uint16_t": "c_uint16", "int32_t": "c_int32", "uint32_t": "c_uint32",
          "int64_t": "c_int64", "uint64_t": "c_uint64", "size_t": "c_size_t", "float": "c_float", "double": "c_double", "Status": "c_int32"}
# Fields that take a choice, but whose documentation does not say "One of NVFP4_X_*".
CHOSEN = {("WeightOptions", "dense_dtype"): "DTYPE"}
# The option `device` sets both.
DEVICE = ("device_type", "device_index")
# Fields that are no option of the package's: a Quantized has its layout, dense_dtype takes few types, and container is a parameter.
NO_OPTIONS = {("WeightOptions", "scale_layout"), ("WeightOptions", "dense_dtype"), ("ConvertOptions", "container")}


def ctype(header: Header, one: Declared) -> str:
    if one.stars or one.base in header.callbacks:
        return "c_void_p"
    return CTYPES[one.base]


def ctype_of_result(header: Header, one: Declared) -> str:
    if one.base == "char":
        return "c_char_p"
    if one.base == "void" and not one.stars:
        return "None"
    return "Status" if one.base == "Status" else ctype(header, one)


def ctype_in_callback(header: Header, one: Declared) -> str:
    return f"POINTER({one.base})" if one.base in header.structs else ctype(header, one)


def group_of(struct: Struct, field: Declared) -> Optional[Group]:
    """The choices of a field."""
    said = re.search(r"\b[Oo]ne of NVFP4_(\w+)_\*", field.doc)
    prefix = CHOSEN.get((struct.name, field.name)) or (said and said[1])
    return next((group for group in GROUPS if group.prefix == prefix), None) if field.name not in DEVICE else None


def options_of(header: Header) -> List[Struct]:
    """The structs with fields that are options in Python."""
    return [struct for struct in header.structs.values() if struct.name.endswith("Options") and python_options(struct)]


def quoted(text: List[str], indent: int) -> str:
    """A docstring. One that ends with a quotation mark has that before a line of its own."""
    body = "\n".join(" " * indent * bool(line) + line for line in text).strip()
    prefix = "r" if "\\" in body else ""
    return f'{prefix}"""{body}"""' if len(text) == 1 and not body.endswith('"') else f'{prefix}"""\n{" " * indent}{body}\n{" " * indent}"""'


def python_interface(header: Header) -> str:
    groups = grouped(header)
    single = [number for number in header.numbers if number.name in SINGLE]
    names = [number.name for number in single] + ["CHOICES", "CHOSEN", "FUNCTIONS", "STATUSES", "Function", "Status"]
    names += [*header.structs, *header.callbacks]
    used = sorted({*re.findall(r"c_\w+", " ".join(CTYPES.values())), "c_char_p", "c_void_p"})
    out = ['"""The C interface of nvfp4.h for ctypes. Generated by bindings/generate.py: change the header\'s source instead."""\n\n'
           "from __future__ import annotations\n\n",
           filled("from ctypes import (", ["CFUNCTYPE", "POINTER", "Structure", *used], ")", 20),
           "from typing import Any, Dict, NamedTuple, Tuple\n\n",
           filled("__all__ = [", [f'"{name}"' for name in sorted(names)], "]", 4).replace("__all__ = [", "__all__ = [\n    ", 1).replace("]\n", ",\n]\n"), "\n"]
    for number in single:
        out += [comment(number.doc, 0, "#"), f"{number.name} = {number.value}\n"]

    out.append("\n# Statuses by name: NVFP4_NOT_FOUND is STATUSES[\"not_found\"].\nSTATUSES: Dict[str, int] = {\n")
    for number in groups[STATUS]:
        out += [comment(number.doc, 4, "#"), f'    "{number.name.lower()}": {number.value},\n']
    out.append('}\n\n# Choices by prefix and name: NVFP4_RECIPE_AMAX is CHOICES["recipe"]["amax"].\nCHOICES: Dict[str, Dict[str, int]] = {\n')
    for group in GROUPS:
        out += [comment(group.summary, 4, "#"), f'    "{group.prefix.lower()}": {{\n']
        for number in groups[group]:
            out += [comment(number.doc, 8, "#"), f'        "{number.name.lower()}": {number.value},\n']
        out.append("    },\n")
    out.append("}\n\n# Fields of options that take a choice, by struct, each with its table of CHOICES.\nCHOSEN: Dict[str, Dict[str, str]] = {\n")
    for struct in options_of(header):
        chosen = [f'"{field.name}": "{group.prefix.lower()}"' for field in struct.fields if (group := group_of(struct, field))]
        out.append(filled(f'    "{struct.name}": {{', chosen, "},", 8))
    out.append("}\n\n\nclass Status(c_int32):\n    \"\"\"The result of a function whose failure is an error.\"\"\"\n\n\n"
               "class Function(NamedTuple):\n"
               '    """A function: its name without NVFP4_, its parameters, its result, and its documentation."""\n\n'
               "    name: str\n    parameters: Tuple[Any, ...]\n    result: Any\n    doc: str\n")

    for struct in header.structs.values():
        doc = [*wrapped(struct.doc, WIDTH - 4), ""]
        for field in struct.fields:
            doc += wrapped(f"- `{field.name}`: {field.doc}", WIDTH - 4)
        out += [f"\n\nclass {struct.name}(Structure):\n    {quoted(doc, 4)}\n\n    _fields_ = [\n",
                *(f'        ("{field.name}", {ctype(header, field)}),\n' for field in struct.fields), "    ]\n"]
    out.append("\n")
    for function in header.callbacks.values():
        kinds = [ctype_of_result(header, function.result), *(ctype_in_callback(header, one) for one in function.parameters)]
        out += ["\n", comment(function.doc, 0, "#"), f"{function.name} = CFUNCTYPE({', '.join(kinds)})\n"]

    out.append("\n\nFUNCTIONS: Tuple[Function, ...] = (\n")
    chapter = ""
    for function in header.functions:
        if function.chapter != chapter:
            chapter = function.chapter
            out += ["\n" if not out[-1].endswith("(\n") else "", comment(chapter + ".", 4, "#")]
        kinds = "".join(ctype(header, one) + ", " for one in function.parameters)
        kinds = kinds[:-1] if len(function.parameters) == 1 else kinds[:-2]
        takes = ", ".join(signature(one) for one in function.parameters) or "void"
        doc = [f"NVFP4_{function.name}({takes})", "", *wrapped(function.doc, WIDTH - 8)]
        out.append(f'    Function("{function.name}", ({kinds}), {ctype_of_result(header, function.result)}, {quoted(doc, 8)}),\n')
    out.append(")\n")
    return "".join(out)


def signature(one: Declared) -> str:
    return one.kind + ("" if one.kind.endswith("*") else " ") + one.name


def python_types(header: Header) -> str:
    """The choices as Literals, and the options that are numbers, flags and choices as TypedDicts, of which types.py completes some."""
    groups = grouped(header)
    literals = [group for group in GROUPS if group.python]
    options = options_of(header)
    places = {f"{group.prefix}_{number.name}": f'"{number.name.lower()}"' for group, numbers in groups.items() for number in numbers}
    names = [group.python for group in literals if group.python]
    out = ['"""Choices and options of nvfp4.h, for types.py. Generated by bindings/generate.py: change the header\'s source instead."""\n\n'
           "from typing import Literal, Optional, TypedDict\n\n",
           filled("__all__ = [", [f'"{name}"' for name in sorted(names)], "]", 4).replace("__all__ = [", "__all__ = [\n    ", 1).replace("]\n", ",\n]\n"), "\n"]
    for group in literals:
        shown = [number.name.lower() for number in groups[group] if number.name.lower() not in group.hidden]
        out += [comment(group.summary, 0, "#"), filled(f"{group.python} = Literal[", [f'"{name}"' for name in shown], "]", len(f"{group.python} = Literal["))]
    for struct in options:
        out.append(f"\n\nclass {struct.name}(TypedDict, total=False):\n    {quoted(wrapped(struct.doc.split(' Fill with ')[0], WIDTH - 4), 4)}\n\n")
        for field, kind in python_options(struct):
            doc = re.sub(r"#NVFP4_(\w+)", lambda number: places.get(number[1], number[0]), field.doc)
            out += [comment(re.sub(r"\bNVFP4_\w+_\*", kind, doc), 4, "#"), f"    {field.name}: Optional[{kind}]\n"]
    return "".join(out)


def python_options(struct: Struct) -> List[Tuple[Declared, str]]:
    """Fields that are an option by themselves, with their types in Python. Lengths and counts belong to pointers."""
    out = []
    for field in struct.fields:
        group = group_of(struct, field)
        array = re.fullmatch("(.+)_(length|count)", field.name)
        if (field.stars or field.base not in CTYPES or field.name in ("struct_size", "reserved", "reserved2", *DEVICE)
                or (array and any(other.stars and other.name.startswith(array[1]) for other in struct.fields))
                or (struct.name, field.name) in NO_OPTIONS):
            continue
        kind = group.python if group and group.python else "float" if field.base in ("float", "double") else "bool" if field.doc.startswith("1 ") else "int"
        out.append((field, kind))
    return out


# C#: everything that crosses is blittable, but for callbacks, SafeHandles and what an `out` parameter gives.

BLITTABLE = {"int8_t": "sbyte", "uint8_t": "byte", "int16_t": "short", "uint16_t": "ushort", "int32_t": "int", "uint32_t": "uint", "int64_t": "long",
             "uint64_t": "ulong", "size_t": "UIntPtr", "float": "float", "double": "double", "char": "byte", "Status": "int"}
# Pointers to them are handles that only their owner looks into. Errors have no class, since each is read at once.
OPAQUE = ("void", "DLManagedTensor", "DLManagedTensorVersioned", "Error")
# Parts of names that are no word in capitals.
SPELLINGS = {"UINT8": "UInt8", "UINT4": "UInt4", "BFLOAT16": "BFloat16", "E4M3FN": "E4M3Fn", "E2M1FN": "E2M1Fn", "MODELOPT": "ModelOpt"}
KEYWORDS = ("base", "event", "in", "is", "lock", "object", "params", "ref", "string")
# Functions of C by the members that do the same.
MEMBERS = {"NVFP4_memory_set_budget()": "Memory.Budget", "NVFP4_model_info()": "ModelInfo.DeviceChoice"}
# Documentation of numbers whose C has other words for what .NET has.
DOCS = {
    ("Status", "Cancelled"): 'A callback, a token or <see cref="Session.Cancel"/> ended the call.',
    ("Status", "InvalidHandle"): "A handle is stale, foreign or of another type.",
    ("Status", "AbiMismatch"): "The library and this assembly do not fit together.",
    ("Status", "BufferTooSmall"): "A buffer is too small.",
    ("FinishReason", "Cancelled"): 'A callback, a token or <see cref="Session.Cancel"/> ended it. The tokens generated until then are kept.',
    ("Part", "ToolCall"): 'A complete tool call as JSON, which <see cref="LibNVFP4.ToolCall.FromJson"/> reads.',
}
# Members that C does not have.
MORE = {"Status": [("NotLoaded", -1, "The library could not be loaded, so that no call was made. The only status that is not the library's own.")],
        "TokenRoles": [("None", 0, "None is known.")]}


def member(name: str) -> str:
    return "".join(SPELLINGS.get(word, word.capitalize()) for word in name.split("_"))


def parameter_name(name: str) -> str:
    lower = camel(name)[0].lower() + camel(name)[1:]
    return "result" if name == "out" else "@" + lower if lower in KEYWORDS else lower


def net_field(header: Header, one: Declared) -> str:
    if one.base in header.callbacks or one.base in header.handles or one.base in OPAQUE:
        return "IntPtr" + "*" * max(one.stars - 1, 0)
    return BLITTABLE.get(one.base, "Native" + one.base) + "*" * one.stars


def net_parameter(header: Header, one: Declared, counted: bool = True) -> str:
    """`counted` is false for functions that count references themselves, which take a handle as a number."""
    if one.base in header.callbacks:
        return one.base
    if one.base in header.handles and one.base not in OPAQUE:
        if one.stars == 1:
            return one.base + "Handle" if counted else "IntPtr"
        return "IntPtr*" if "*const" in one.kind else f"out {one.base}Handle"
    if one.base in OPAQUE and one.base != "Error" and one.stars == 2:
        return "out IntPtr"
    return net_field(header, one)


def net_result(header: Header, one: Declared) -> str:
    if one.stars:
        return "IntPtr"
    return "void" if one.base == "void" else net_field(header, one)


GENERATED = ("// <auto-generated>\n// Generated by bindings/generate.py from include/nvfp4.h: change the header's source instead.\n"
             "// </auto-generated>\n\n")


def dotnet_interface(header: Header) -> str:
    out = [GENERATED, "using System;\nusing System.Runtime.InteropServices;\n\nnamespace LibNVFP4\n{\n"]
    for function in header.callbacks.values():
        takes = [f"{net_field(header, one)} {parameter_name(one.name)}" for one in function.parameters]
        unsafe = "unsafe " if any("*" in one for one in takes) else ""
        out += [comment(function.doc, 4, "//"), "    [UnmanagedFunctionPointer(CallingConvention.Cdecl)]\n",
                filled(f"    internal {unsafe}delegate {net_result(header, function.result)} {function.name}(", takes, ");", 8), "\n"]
    for struct in header.structs.values():
        out += [comment(struct.doc, 4, "//"), f"    [StructLayout(LayoutKind.Sequential)]\n    internal unsafe struct Native{struct.name}\n    {{\n"]
        for field in struct.fields:
            out += [comment(field.doc, 8, "//"), f"        internal {net_field(header, field)} {camel(field.name)};\n"]
        out.append("    }\n\n")
    for name, doc in header.handles.items():
        if name not in OPAQUE:
            release = next(function.name for function in header.functions
                           if function.name.endswith("_release") and function.parameters[0].base == name)
            out += [comment(doc, 4, "//"), f"    internal sealed partial class {name}Handle : NativeHandle\n    {{\n"
                    f"        internal override int Release() => Native.NVFP4_{release}(handle);\n    }}\n\n"]

    out.append("    internal static unsafe class Native\n    {\n"
               "        // The runtime looks for libNVFP4.so, libNVFP4.dylib or NVFP4.dll.\n        internal const string Name = \"NVFP4\";\n")
    for number in header.numbers:
        if number.name in SINGLE:
            kind, suffix = ("int", "") if number.value < 2 ** 31 else ("ulong", "UL")
            out += ["\n", comment(number.doc, 8, "//"), f"        internal const {kind} {camel(number.name)} = {number.value}{suffix};\n"]
    chapter = ""
    for function in header.functions:
        if function.chapter != chapter:
            chapter = function.chapter
            out += ["\n", comment(chapter + ".", 8, "//")]
        counted = not re.search("_(retain|release)$", function.name)
        takes = [f"{net_parameter(header, one, counted)} {parameter_name(one.name)}" for one in function.parameters]
        out += ["\n", comment(function.doc, 8, "//"), "        [DllImport(Name, CallingConvention = CallingConvention.Cdecl)]\n",
                filled(f"        internal static extern {net_result(header, function.result)} NVFP4_{function.name}(", takes, ");", 12)]
    out.append("    }\n}\n")
    return "".join(out)


def dotnet_enums(header: Header) -> str:
    groups = grouped(header)
    places = {f"{group.prefix}_{number.name}".lstrip("_"): f"{group.dotnet}.{member(number.name)}" for group, numbers in groups.items() for number in numbers}
    fields = {field.name for struct in header.structs.values() for field in struct.fields}
    out = [GENERATED, "namespace LibNVFP4\n{\n"]
    for group, numbers in groups.items():
        out += [] if len(out) == 2 else ["\n"]
        attribute = "    [System.Flags]\n" if group.flags else ""
        out += [xml_summary(group.summary, 4), attribute, f"    public enum {group.dotnet}\n    {{\n"]
        members = [(member(number.name), number.value, xml(number.doc, places, fields)) for number in numbers]
        for name, value, doc in sorted([*MORE.get(group.dotnet, []), *members], key=lambda one: one[1]):
            out += [xml_summary(DOCS.get((group.dotnet, name), doc), 8), f"        {name} = {value},\n"]
        out.append("    }\n")
    out.append("}\n")
    return "".join(out)


def xml(doc: str, places: Dict[str, str], fields: set) -> str:
    """A number's documentation as .NET has it. A sentence about all numbers of a prefix is left out, as an enum's summary says that."""
    text = " ".join(doc.split())
    text = " ".join(one for one in re.split(r"(?<=\.) (?=[A-Z])", text) if not re.search(r"NVFP4_\w+_\*", one))
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"`([^`]*)`", lambda code: f"<c>{camel(code[1]) if code[1] in fields else code[1]}</c>", text)
    text = re.sub(r"#NVFP4_(\w+)", lambda number: f'<see cref="{places[number[1]]}"/>', text)
    return re.sub(r"NVFP4_\w+\(\)", lambda call: f'<see cref="{MEMBERS[call[0]]}"/>' if call[0] in MEMBERS else f"<c>{call[0]}</c>", text)


def xml_summary(text: str, indent: int) -> str:
    start = " " * indent + "/// "
    if len(line := f"{start}<summary>{text}</summary>") <= WIDTH:
        return line + "\n"
    # A line breaks between elements, not within their tags.
    lines = [line.replace("\0", " ") for line in textwrap.wrap(re.sub(r"<[^>]*>", lambda tag: tag[0].replace(" ", "\0"), text), WIDTH - len(start),
                                                                break_long_words=False, break_on_hyphens=False)]
    return "".join(f"{start}{line}\n" for line in ["<summary>", *lines, "</summary>"])


def files(header: Header) -> Dict[Path, str]:
    return {PYTHON / "_abi.py": python_interface(header), PYTHON / "_types.py": python_types(header),
            DOTNET / "Native.g.cs": dotnet_interface(header), DOTNET / "Enums.g.cs": dotnet_enums(header)}


def main(arguments: List[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__.splitlines()[0], file=sys.stderr)
        return 2
    different = {path: text for path, text in files(parse(HEADER.read_text(encoding="utf-8"))).items()
                 if not path.exists() or path.read_text(encoding="utf-8") != text}
    for path, text in different.items():
        if arguments:
            print(f"{path.relative_to(ROOT)} differs from include/nvfp4.h; tests/header/run.sh --bless writes it anew")
        else:
            path.write_text(text, encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: {text.count(chr(10))} lines")
    if arguments and not different:
        print("the declarations of Python and C# match include/nvfp4.h")
    return 1 if arguments and different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
