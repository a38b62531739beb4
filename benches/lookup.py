#!/usr/bin/env python3
"""Prompt lookup through the command: python3 benches/lookup.py MODEL [--command target/release/nvfp4] [--rounds 5] [--tokens 200]

Generates with prompt lookup and without in turn: a file of code that is repeated with one change, sentences that are quoted from a page, and
a story with drawn tokens, which quotes nothing. Prints the median tokens per second of decoding, and the median of the ratios of runs beside
each other. Fails if a text differs.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")


def page(path, start, end):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()[start:end]


CODE = page("examples/python/reinforce.py", 0, None)
TEXT = page("docs/sessions.md", 2500, 5500)
CASES = [
    ("code, repeated with a change", ["--temp", "0"],
     f"Here is a Python file:\n\n```python\n{CODE}\n```\n\nRepeat the whole file, and rename main to run. Print the file and nothing else."),
    ("sentences, quoted", ["--temp", "0"],
     f"Read this text:\n\n{TEXT}\n\nQuote the first sentences of the text, word for word."),
    ("a story, drawn", ["--temp", "1", "--top-p", "0.95", "--seed", "5"],
     "Write a story about a lighthouse keeper who finds a letter in a bottle."),
]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--command", default=os.path.join(ROOT, "target/release/nvfp4"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args()

    def run(prompt, sampling, lookup):
        with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
            file.write(prompt)
            file.flush()
            said = subprocess.run([args.command, "run", "--model", args.model, "--prompt-file", file.name, "--max-tokens", str(args.tokens),
                                   "--prompt-lookup", str(lookup), "--json", *sampling], check=True, capture_output=True, text=True)
        answer = json.loads(said.stdout)
        speed = (len(answer["tokens"]) - 1) / answer["timings"]["decode_seconds"]
        return speed, answer["tokens"], answer["drafts"]

    for name, sampling, prompt in CASES:
        speeds, ratios = {0: [], 16: []}, []
        for _ in range(args.rounds):
            (plain, tokens, _), (fast, same, drafts) = (run(prompt, sampling, lookup) for lookup in (0, 16))
            assert tokens == same, f"{name}: another text"
            speeds[0].append(plain)
            speeds[16].append(fast)
            ratios.append(fast / plain)
        print(f"{name}: {statistics.median(speeds[0]):.1f} tok/s, with lookup {statistics.median(speeds[16]):.1f}: "
              f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}); {len(tokens)} tokens, "
              f"{drafts['accepted']} of {drafts['drafted']} drafted ones right")


if __name__ == "__main__":
    main()
