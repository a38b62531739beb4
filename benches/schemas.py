#!/usr/bin/env python3
"""Generations of random weights by the schemas of the JSON-Schema test suite: how many end, and whether each that does is valid.

    pip download --no-deps --no-binary :all: jsonschema && tar xf jsonschema-*.tar.gz       # The suite is in its folder json.
    NVFP4_LIB_PATH=target/release PYTHONPATH=bindings/python python3 benches/schemas.py jsonschema-*/json/tests/draft2020-12

Needs the package jsonschema, which says what is valid. The model is tests/golden/model/qwen3_tied with room for 8,192 tokens: what it
writes follows no pattern but the grammar's.
"""

import argparse
import collections
import json
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema

import nvfp4

ROOT = Path(__file__).resolve().parent.parent


def suite(folder):
    """The schemas of the suite, each with its place."""
    for file in sorted(folder.glob("*.json")):
        for group in json.loads(file.read_text()):
            yield f"{file.stem}: {group['description']}", group["schema"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--generations", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        shutil.copytree(ROOT / "tests/golden/model/qwen3_tied", path)
        config = json.loads((path / "config.json").read_text())
        config["max_position_embeddings"] = 8192
        (path / "config.json").unlink()
        (path / "config.json").write_text(json.dumps(config))
        return measure(args, nvfp4.Model(path, device="cpu", threads=1))


def measure(args, model):
    compiled, refused = [], collections.Counter()
    for place, schema in suite(args.folder):
        try:
            compiled.append((place, schema, nvfp4.Grammar.json_schema(model, schema)))
        except nvfp4.InvalidArgument as error:
            refused[str(error).split(": ")[-1].split(";")[0][:60]] += 1
    print(f"{len(compiled)} schemas compiled, {sum(refused.values())} refused: {dict(refused.most_common(12))}")

    def generate(number):
        place, schema, grammar = compiled[number % len(compiled)]
        session = model.session()
        session.prefill([300])
        try:
            result = session.generate(grammar=grammar, max_tokens=args.max_tokens, temperature=1.0, seed=number)
        except nvfp4.Error as error:
            return f"failed: {error}", place, ""
        if result.finish != "stop":
            return result.finish, place, result.text
        try:
            value = json.loads(result.text)
            jsonschema.Draft202012Validator(schema).validate(value)
        except (ValueError, jsonschema.ValidationError) as error:
            return "invalid", place, f"{result.text!r}: {str(error).splitlines()[0]}"
        return "valid", place, result.text

    with ThreadPoolExecutor(args.threads) as pool:
        results = list(pool.map(generate, range(args.generations)))
    ends = collections.Counter(end for end, *_ in results)
    for end, place, text in results:
        if end not in ("valid", "length"):
            print(f"{end}: {place}: {text}")
    print(f"{args.generations} generations: {dict(ends)}")
    return int(ends["valid"] < args.generations / 2 or any(end not in ("valid", "length") for end in ends))


if __name__ == "__main__":
    sys.exit(main())
