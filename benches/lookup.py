#!/usr/bin/env python3
"""Prompt lookup beside decoding without it, on one model with its chat template:

    NVFP4_LIB_PATH=target/release PYTHONPATH=bindings/python python3 benches/lookup.py MODEL [--device cuda:0] [--deterministic]

Generates with prompt lookup and without in turn, each time in a new session, after a first pair that is not measured: a file of code that is
repeated with one change, sentences that are quoted from a page, and a story with drawn tokens, which quotes nothing. Prints the median tokens
per second of decoding, and the median of the ratios of runs beside each other. On the CPU and with --deterministic fails if a text differs;
elsewhere says at which token, since near-ties fall either way.
"""

import argparse
import os
import statistics

import nvfp4

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")


def page(path, start, end):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()[start:end]


CODE = page("examples/python/reinforce.py", 0, None)
TEXT = page("docs/sessions.md", 2500, 5500)
CASES = [
    ("code, repeated with a change", {"temperature": 0},
     f"Here is a Python file:\n\n```python\n{CODE}\n```\n\nRepeat the whole file, and rename main to run. Print the file and nothing else."),
    ("sentences, quoted", {"temperature": 0},
     f"Read this text:\n\n{TEXT}\n\nQuote the first sentences of the text, word for word."),
    ("a story, drawn", {"temperature": 1, "top_p": 0.95, "seed": 5},
     "Write a story about a lighthouse keeper who finds a letter in a bottle."),
]


def first_difference(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args()

    with nvfp4.Model(args.model, device=args.device, deterministic=args.deterministic) as model:

        def run(prompt, drawn, lookup):
            with model.session() as session:
                session.prefill(prompt)
                done = session.generate(max_tokens=args.tokens, prompt_lookup=lookup, ignore_model_stops=True, **drawn)
                return (done.generated_tokens - 1) / done.decode_seconds, session.tokens, done

        for name, drawn, text in CASES:
            prompt = model.tokenizer.encode_chat([{"role": "user", "content": text}])
            speeds, ratios = {0: [], 16: []}, []
            for round in range(args.rounds + 1):
                (plain, tokens, _), (fast, same, done) = (run(prompt, drawn, lookup) for lookup in (0, 16))
                differs = first_difference(tokens[len(prompt):], same[len(prompt):])
                assert differs is None or args.device != "cpu" and not args.deterministic, f"{name}: another text from token {differs} on"
                if round > 0:
                    speeds[0].append(plain)
                    speeds[16].append(fast)
                    ratios.append(fast / plain)
            print(f"{name}: {statistics.median(speeds[0]):.1f} tok/s, with lookup {statistics.median(speeds[16]):.1f}: "
                  f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}); {done.generated_tokens} tokens, "
                  f"{done.accepted_tokens} of {done.drafted_tokens} drafted ones right"
                  + (f"; another token after {differs}" if differs is not None else ""))


if __name__ == "__main__":
    main()
