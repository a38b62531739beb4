"""Every block of code in pages, headers, docstrings and the examples' first comments: blocks.py check BUILD, or blocks.py write LANGUAGE FOLDER.

A fence in a page names its language, or text, of which nothing is checked; an indented block is for a shell. `check` compiles C and C++ against the headers, Python, JSON
and CMake, and has shells read their commands. What a program of C, C++ or Python calls is declared; options of `nvfp4` are known to it, and
scripts that commands name are there. A block of C, C++, C# or F# that is no whole program is part of one of the examples, which other tests
build, or stands where `/* here */` is in a file of around/: that of a header's comment is named after the header and the block's number
there, that of a page's by a comment before it, <!-- around: NAME -->. Whole programs of C# and F# are compiled by tests/dotnet, which
has them written. Blocks of Rust are documentation tests. What is wrong is printed with its place, and ends it with 1.
"""

import ast
import glob
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import typing

SKIPPED = {"target", ".git", "golden"}
PLACES = {"c": "c/*.c", "cpp": "cpp/*.cpp", "csharp": "csharp/**/*.cs", "fsharp": "fsharp/*.fsx", "python": "python/*.py"}
WHOLE = {"c": r"^int main\(", "cpp": r"^int main\(", "csharp": r"static (void|async Task) Main\(", "fsharp": r"^#r |EntryPoint"}
SUFFIXES = {"c": "c", "cpp": "cpp", "csharp": "cs", "fsharp": "fs"}
AROUND = os.path.join(os.path.dirname(os.path.abspath(__file__)), "around")


class Block(typing.NamedTuple):
    path: str
    line: int
    language: str
    text: str
    around: str = ""

    @property
    def place(self):
        return f"{self.path}:{self.line}"

    @property
    def is_whole(self):
        return re.search(WHOLE[self.language], self.text, flags=re.M) is not None


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def indented(lines, first, least):
    """Blocks of lines with at least so many spaces before them, after an empty one: each with the number of its first line."""
    block, empty = [], True
    for number, line in enumerate([*lines, ""], first):
        deep = line.startswith(" " * least)
        if block and (deep or not line.strip()):
            block.append((number, line))
        elif deep and empty:
            block = [(number, line)]
        elif block:
            yield block[0][0], textwrap.dedent("\n".join(text for _, text in block)).strip("\n") + "\n"
            block = []
        empty = not line.strip()
    if block:
        yield block[0][0], textwrap.dedent("\n".join(text for _, text in block)).strip("\n") + "\n"


def of_page(path):
    plain, fence, begun, around = [], None, 0, ""
    for number, line in enumerate(read(path).splitlines(), 1):
        if fence is not None and line == "```":
            yield Block(path, begun, fence[0], "".join(text + "\n" for text in fence[1:]), around)
            fence, around = None, ""
        elif fence is not None:
            fence.append(line)
        elif line.startswith("```"):
            fence, begun = [line[3:]], number + 1
        elif line.startswith("<!-- around: "):
            around = line[len("<!-- around: "):-len(" -->")]
        plain.append("" if fence is not None or line == "```" else line)
    for number, text in indented(plain, 1, 4):
        yield Block(path, number, "sh", text)


def of_comments(path, language):
    """Blocks in comments of C: what stands further to the right, after an empty line."""
    count, text = 0, read(path)
    for comment in re.finditer(r"/\*.*?\*/", text, flags=re.S):
        lines = [re.sub(r"^\s*/?\*+/?", "", line) for line in comment[0].splitlines()]
        for number, block in indented(lines, text.count("\n", 0, comment.start()) + 1, 5):
            count += 1
            yield Block(path, number, language, block, f"{os.path.basename(path)}.{count}")


def of_docstrings(path):
    for node in ast.walk(ast.parse(read(path))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            for number, text in indented(ast.get_docstring(node).splitlines(), node.body[0].lineno, 4):
                yield Block(path, number, "python", text)


def blocks():
    for path in sorted(glob.glob("**/*.md", recursive=True)):
        if not SKIPPED.intersection(path.split(os.sep)):
            yield from of_page(path)
    yield from of_comments("include/nvfp4.h", "c")
    yield from of_comments("include/nvfp4.hpp", "cpp")
    for path in sorted(glob.glob("examples/c/*.c") + glob.glob("examples/cpp/*.cpp")):
        yield from of_comments(path, "sh")
    for path in sorted(glob.glob("bindings/python/nvfp4/*.py")):
        yield from of_docstrings(path)


def compiled(block, folder):
    """What a compiler says of a block of C or C++."""
    text = f'#line {block.line} "{block.path}"\n{block.text}'
    if not block.is_whole:
        if any(block.text in read(path) for path in glob.glob(os.path.join("examples", PLACES[block.language]))):
            return
        around = os.path.join(AROUND, f"{block.around}.{SUFFIXES[block.language]}")
        if not os.path.exists(around):
            yield f"no whole program, in no example, and there is no {os.path.relpath(around)} for it to stand in"
            return
        text = read(around).replace("/* here */\n", text)
    path = os.path.join(folder, f"block.{SUFFIXES[block.language]}")
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    # Coroutines are the one thing for which C++ has to be later.
    cpp = "-std=c++20" if "co_await" in text else "-std=c++17"
    command = {"c": ["gcc", "-std=c99"], "cpp": ["g++", cpp]}[block.language]
    said = subprocess.run([*command, "-pedantic-errors", "-Wall", "-Werror", "-fsyntax-only", "-Iinclude", path], capture_output=True, text=True)
    if said.returncode:
        yield f"does not compile:\n{said.stderr}"


def in_examples(block):
    found = glob.glob(os.path.join("examples", PLACES[block.language]), recursive=True)
    if not block.is_whole and not any(block.text in read(path) for path in found):
        yield "no whole program, and in no example"


class Stubs:
    """The package's classes as its stubs have them: what a member is, or gives when it is called."""

    def __init__(self):
        self.classes = {}
        for path in glob.glob("bindings/python/nvfp4/*.pyi") + ["bindings/python/nvfp4/native.py"]:
            for node in ast.parse(read(path)).body:
                if isinstance(node, ast.ClassDef):
                    members = {m.name: ast.unparse(m.returns) for m in node.body if isinstance(m, ast.FunctionDef) and m.returns}
                    members.update({m.target.id: ast.unparse(m.annotation) for m in node.body if isinstance(m, ast.AnnAssign)})
                    self.classes[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)], members

    def member(self, kind, name):
        bases, members = self.classes[kind]
        if name in members:
            return kind if members[name] == "Self" else members[name]
        return next(filter(None, (self.member(base, name) for base in bases if base in self.classes)), None)


class Names(ast.NodeVisitor):
    """Finds what nvfp4 and its objects do not have, as far as it can tell what is which."""

    def __init__(self, module, stubs):
        self.module, self.stubs, self.kinds, self.wrong = module, stubs, {}, []

    def fits(self, node, function, *first):
        """Whether a call's arguments are those of a function. Which ones a star stands for is not known."""
        if any(isinstance(one, ast.Starred) for one in node.args) or any(one.arg is None for one in node.keywords):
            return
        try:
            inspect.signature(function).bind(*first, *node.args, **{one.arg: one.value for one in node.keywords})
        except TypeError as error:
            self.wrong.append(f"line {node.lineno}: {ast.unparse(node.func)}(): {error}")

    def kind(self, node):
        """The class of an expression, or None."""
        if isinstance(node, ast.Name):
            return self.kinds.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.kind(node.value)
            return self.known(self.stubs.member(owner, node.attr)) if owner else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if isinstance(node.func.value, ast.Name) and node.func.value.id == "nvfp4":
                return self.known(node.func.attr)
            return self.kind(node.func)
        return None

    def known(self, name):
        return name if name in self.stubs.classes else None

    def bind(self, target, value):
        if isinstance(target, ast.Name):
            self.kinds[target.id] = self.kind(value)

    def visit_Assign(self, node):
        self.generic_visit(node)
        self.bind(node.targets[0], node.value)

    def visit_With(self, node):
        for item in node.items:
            self.visit(item.context_expr)
            if item.optional_vars is not None:
                self.bind(item.optional_vars, item.context_expr)
        for one in node.body:
            self.visit(one)

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "nvfp4":
            if not hasattr(self.module, node.attr):
                self.wrong.append(f"line {node.lineno}: nvfp4 has no {node.attr}")
            return
        owner = self.kind(node.value)
        if owner and self.stubs.member(owner, node.attr) is None:
            self.wrong.append(f"line {node.lineno}: a {owner} has no {node.attr}")

    def visit_Call(self, node):
        self.generic_visit(node)
        if not isinstance(node.func, ast.Attribute):
            return
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "nvfp4":
            if hasattr(self.module, node.func.attr):
                self.fits(node, getattr(self.module, node.func.attr))
            return
        owner = self.kind(node.func.value)
        method = owner and getattr(getattr(self.module, owner, None), node.func.attr, None)
        if inspect.isfunction(method):
            self.fits(node, method, None)


def python(block, names):
    try:
        tree = ast.parse(textwrap.dedent(block.text))
    except SyntaxError as error:
        yield f"line {error.lineno}: {error.msg}"
        return
    found = Names(*names)
    found.visit(tree)
    yield from found.wrong


class Commands:
    """The subcommands of nvfp4 and the options that each knows."""

    def __init__(self, build):
        self.nvfp4, self.known = os.path.join(build, "nvfp4"), {}
        self.names = re.findall(r"^  ([a-z]+) ", self.help().partition("Commands:")[2].partition("Options:")[0], flags=re.M)

    def help(self, *command):
        return subprocess.run([self.nvfp4, *command, "--help"], capture_output=True, text=True, check=True).stdout

    def options(self, name):
        if name not in self.known:
            self.known[name] = set(re.findall(r"--[a-z][a-z0-9-]*", self.help(name)))
        return self.known[name]


def shell(block, commands):
    said = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    if said.returncode:
        yield said.stderr
        return
    # A comment takes its line's end along otherwise.
    text = re.sub(r"(^|\s)#.*", "", block.text.replace("\\\n", " "), flags=re.M)
    words = shlex.shlex(text, posix=True, punctuation_chars="();|&\n")
    words.whitespace, words.whitespace_split, words.commenters = " \t", True, ""
    command = []
    for word in [*words, ";"]:
        if not re.fullmatch(r"[();|&\n]+", word):
            command.append(word)
            continue
        yield from wrong_command(block, command, commands)
        command = []


def wrong_command(block, command, commands):
    """What a command names that is not there."""
    while command and re.match(r"[A-Z_]+=|sudo$|env$|!$", command[0]):
        command = command[1:]
    if len(command) < 2:
        return
    name, *rest = command
    if os.path.basename(name) == "nvfp4" and not rest[0].startswith("-"):
        if rest[0] not in commands.names and rest[0] not in ("COMMAND", "help"):
            yield f"nvfp4 has no command {rest[0]}"
        elif rest[0] in commands.names:
            for option in rest[1:]:
                if re.match(r"--[a-z]", option) and option.partition("=")[0] not in commands.options(rest[0]):
                    yield f"nvfp4 {rest[0]} has no option {option}"
    is_script = name in ("bash", "python", "python3") and re.search(r"\.(sh|py)$|^\.ci/", rest[0])
    # Paths of a release's archive are those in it.
    if is_script and not block.path.startswith("release/") and not os.path.exists(rest[0]):
        yield f"there is no {rest[0]}"


def cmake(block, folder):
    if shutil.which("cmake") is None:
        return
    path = os.path.join(folder, "block.cmake")
    with open(path, "w", encoding="utf-8") as file:
        file.write(f"if(FALSE)\n{block.text}endif()\n")
    said = subprocess.run(["cmake", "-P", path], capture_output=True, text=True)
    if said.returncode:
        yield said.stderr


def jsons(block):
    try:
        json.loads(block.text)
    except ValueError as error:
        yield str(error)


def rust(block):
    included = f'include_str!("{os.path.relpath(block.path, "src")}")'
    if not any(included in read(path) for path in glob.glob("src/*.rs")):
        yield f"no documentation test: nothing in src has {included}"


def check(build):
    sys.path.insert(0, "bindings/python")
    os.environ["NVFP4_LIB_PATH"] = build
    import nvfp4

    names, commands, counts, wrong = (nvfp4, Stubs()), Commands(build), {}, 0
    with tempfile.TemporaryDirectory() as folder:
        checks = {"c": lambda b: compiled(b, folder), "cpp": lambda b: compiled(b, folder), "csharp": in_examples, "fsharp": in_examples,
                  "python": lambda b: python(b, names), "sh": lambda b: shell(b, commands), "cmake": lambda b: cmake(b, folder), "json": jsons,
                  "rust": rust, "text": lambda b: []}
        for block in blocks():
            counts[block.language] = counts.get(block.language, 0) + 1
            if block.language not in checks:
                print(f"{block.place}: the language '{block.language}' is none of {', '.join(checks)}")
                wrong += 1
                continue
            for said in checks[block.language](block):
                print(f"{block.place}: {said}")
                wrong += 1
    missing = [language for language in checks if language not in counts]
    if missing:
        print(f"no block in {', '.join(missing)} was found")
    print(", ".join(f"{count} {language}" for language, count in sorted(counts.items())))
    return wrong + len(missing)


def write(language, folder):
    """Writes the whole programs of a language into a folder, with the place of each in its first line."""
    programs = [block for block in blocks() if block.language == language and block.is_whole]
    for number, block in enumerate(programs, 1):
        with open(os.path.join(folder, f"{number}.{SUFFIXES[language]}"), "w", encoding="utf-8") as file:
            file.write(f"// {block.place}\n{block.text}")
    return not programs


if __name__ == "__main__":
    sys.exit(min({"check": check, "write": write}[sys.argv[1]](*sys.argv[2:]), 1))
