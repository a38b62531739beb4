"""What a real model must hold, SmolLM2-135M-Instruct, as a GGUF file and as the NVFP4 made of it:

    check.py BUILD GGUF NVFP4

- its tokenizer gives the tokens, and its weights as the GGUF file holds them the perplexity, that transformers gives for
  text.txt; reference.py wrote those to reference.json;
- running it takes no more memory than weights, keys and values need, and the library's own account agrees;
- from 20 prompts, greedy decoding gives the same tokens with cached keys and values, with none, and after a prompt that was
  run token by token.
"""

import concurrent.futures
import ctypes
import json
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
TEXT = HERE / "text.txt"
REFERENCE = json.loads((HERE / "reference.json").read_text())

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
    "🙂🙂",
    '{"name": "Ada", "born":',
    "a",
    "    ",
    "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n",
    "It was the best of times, it was the worst of times,",
    "The quick brown fox jumps over the lazy dog. Then",
]

passed = failed = 0


def expect(held, what):
    """Counts one test, and says what did not hold."""
    global passed, failed
    if held:
        passed += 1
    else:
        failed += 1
        print(f"FAILED: {what}")


def nvfp4(program, *arguments):
    """What a subcommand prints as JSON, and the most memory its process occupied, in bytes."""
    process = subprocess.Popen([program, *map(str, arguments), "--json"], stdout=subprocess.PIPE)
    with process.stdout:
        out = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"nvfp4 {' '.join(map(str, arguments))}: exit code {process.returncode}")
    return json.loads(out), used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def tokenize(library, path, text):
    library.NVFP4_last_error.restype = ctypes.c_char_p

    def call(name, *arguments):
        if getattr(library, name)(*arguments) != 0:
            sys.exit(f"{name}: {library.NVFP4_last_error().decode()}")

    model, count = ctypes.c_void_p(), ctypes.c_size_t()
    path, text = os.fsencode(path), text.encode()
    size = ctypes.c_size_t
    call("NVFP4_model_load", path, size(len(path)), None, None, None, None, ctypes.byref(model))
    tokens = (ctypes.c_int32 * len(text))()
    call("NVFP4_model_tokenize", model, text, size(len(text)), 0, tokens, size(len(tokens)), ctypes.byref(count))
    call("NVFP4_model_release", model)
    return tokens[: count.value]


def check_reference(build, gguf, quantized):
    library = ctypes.CDLL(str((build / ("libNVFP4.dylib" if sys.platform == "darwin" else "libNVFP4.so")).resolve()))
    for path in (gguf, quantized):
        tokens = tokenize(library, path, TEXT.read_text(encoding="utf-8"))
        expect(tokens == REFERENCE["tokens"], f"{path}: tokens of {TEXT.name} differ from those of transformers: {tokens}")
    got, _ = nvfp4(build / "nvfp4", "perplexity", "--model", gguf, "--kv", "f32", "--window", REFERENCE["window"], "--text", TEXT)
    expected = REFERENCE["perplexity"]
    difference = abs(got["perplexity"] / expected - 1)
    line = f"perplexity {got['perplexity']:.6f}, with transformers {expected:.6f}: {difference:.1e} apart"
    print(line)
    expect(got["predicted"] == REFERENCE["predicted"] and difference <= 1e-3, line)


def check_memory(program, model):
    # Text and answer nearly fill the cache, so that it is touched, and look up many rows of the embedding.
    got, resident = nvfp4(
        program, "run", "--model", model, "--raw", "--prompt-file", TEXT, "--context", 1024, "--max-tokens", 128, "--ignore-stops"
    )
    memory, weights = got["memory"], got["model"]["weight_bytes"]
    needed = weights + memory["kv_bytes"]
    bar = 1.2 * needed + 100e6
    line = (
        f"{model.name}: {resident / 1e6:.1f} MB resident at most, {memory['peak_bytes'] / 1e6:.1f} MB by the library's account; "
        f"weights {weights / 1e6:.1f}, keys and values {memory['kv_bytes'] / 1e6:.1f}, bar {bar / 1e6:.1f}"
    )
    print(line)
    expect(resident <= bar, line)
    # Code, tokenizer and pages of the file are not in the account; all else is.
    expect(needed <= memory["peak_bytes"] <= resident <= memory["peak_bytes"] + 100e6, line)


def generate(program, model, prompt, *more):
    got, _ = nvfp4(
        program, "run", "--model", model, "--raw", "--prompt", prompt, "--max-tokens", TOKENS, "--ignore-stops", "--threads", 1, *more
    )
    return got


def check_ways(program, model):
    # Threads share the work of one process badly at a few tokens a pass; processes of one thread each do not have to.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = [
            [pool.submit(generate, program, model, prompt, *way) for way in ((), ("--replay",), ("--token-by-token",))]
            for prompt in PROMPTS
        ]
        for prompt, (cached, *others) in zip(PROMPTS, runs):
            cached = cached.result()
            expect(len(cached["tokens"]) == TOKENS, f"{prompt!r}: {len(cached['tokens'])} tokens instead of {TOKENS}")
            for way, other in zip(("replayed", "token by token"), others):
                tokens = other.result()["tokens"]
                expect(tokens == cached["tokens"], f"{prompt!r} {way}: {tokens} instead of {cached['tokens']}")
            print(f"{prompt[:40]!r}: {cached['text'][:60]!r}", flush=True)
    answer = runs[0][0].result()["text"]
    expect("Paris" in answer, f"the capital of France is{answer!r}")


def main():
    build, gguf, quantized = map(pathlib.Path, sys.argv[1:])
    program = build / "nvfp4"
    # First, while this process is small: a child's peak starts with what its parent occupied.
    check_memory(program, quantized)
    check_memory(program, gguf)
    check_reference(build, gguf, quantized)
    check_ways(program, quantized)
    print(f"{passed} passed, {failed} failed, 0 skipped")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
