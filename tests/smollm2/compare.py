"""Generates greedily from 20 prompts in three ways that must agree: compare.py NVFP4 MODEL"""

import json
import subprocess
import sys

TOKENS = 64

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8,",
    "Water boils at",
    "Dear Sir or Madam,\n\n",
    "The three laws of motion are",
    "Q: Why is the sky blue?\nA:",
    "Ingredients:\n- 2 eggs\n- 100 g flour\n",
    "In 1969,",
    "La capitale de l'Italie est",
    "Die Würde des Menschen ist",
    "日本の首都は",
    "🙂🙂🙂",
    "{\"name\": \"Ada\", \"born\":",
    "a",
    "    ",
    "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n",
    "It was the best of times, it was the worst of times, " * 3,
    "The quick brown fox jumps over the lazy dog. " * 5 + "Then",
]


def generate(program, model, prompt, *more):
    command = [program, "run", "--model", model, "--raw", "--prompt", prompt, "--max-tokens", str(TOKENS)]
    command += ["--ignore-stops", "--json", *more]
    out = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(out.stdout)


def main():
    program, model = sys.argv[1:]
    passed = failed = 0
    for prompt in PROMPTS:
        cached = generate(program, model, prompt)
        if len(cached["tokens"]) != TOKENS:
            sys.exit(f"{prompt!r}: {len(cached['tokens'])} tokens instead of {TOKENS}")
        for way in ("--replay", "--token-by-token"):
            other = generate(program, model, prompt, way)
            if other["tokens"] == cached["tokens"]:
                passed += 1
            else:
                failed += 1
                print(f"{prompt!r} with {way}: {other['tokens']} instead of {cached['tokens']}")
        print(f"{prompt[:40]!r}: {cached['text'][:60]!r}")
    answer = generate(program, model, PROMPTS[0])["text"]
    if "Paris" in answer:
        passed += 1
    else:
        failed += 1
        print(f"the capital of France is{answer!r}")
    print(f"{passed} passed, {failed} failed, 0 skipped")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
