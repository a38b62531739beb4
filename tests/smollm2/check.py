"""What a real model must hold, SmolLM2-135M-Instruct, as a GGUF file and as the NVFP4 made of it:

    check.py BUILD GGUF NVFP4 WIDE

WIDE is the same with its table in bf16, where NVFP4 has it in int8.

- its tokenizer gives the tokens, and its weights as the GGUF file holds them the perplexity, that transformers gives for
  text.txt; reference.py wrote those to reference.json;
- running it takes no more memory than weights, keys and values need, the library's own account agrees, and it starts soon;
- rounding the table to int8 moves what it predicts by a KL divergence of 0.003 at most, and the model is no larger than the GGUF file, which has
  its table in Q8_0;
- from 6 prompts, or 20 where NVFP4_LONG is set, greedy decoding gives the same tokens with cached keys and values, with none, and after a prompt that was
  run token by token.
"""

import concurrent.futures
import ctypes
import json
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "common"))
from bars import check_memory, check_start, close, expect, nvfp4

TEXT = HERE / "text.txt"
REFERENCE = json.loads((HERE / "reference.json").read_text())

# Passes without a cache take time by the square of the tokens.
TOKENS, COUNT = (64, 20) if os.environ.get("NVFP4_LONG") else (32, 6)

PROMPTS = json.loads((HERE / "prompts.json").read_text())[:COUNT]


def tokenize(library, path, text):
    library.NVFP4_last_error.restype = ctypes.c_char_p

    def call(name, *arguments):
        if getattr(library, name)(*arguments) != 0:
            sys.exit(f"{name}: {library.NVFP4_last_error().decode()}")

    model, count = ctypes.c_void_p(), ctypes.c_size_t()
    path, text = os.fsencode(path), text.encode()
    size = ctypes.c_size_t
    call("NVFP4_model_load", path, size(len(path)), None, None, ctypes.byref(model))
    tokens = (ctypes.c_int32 * len(text))()
    call("NVFP4_model_tokenize", model, text, size(len(text)), 0, tokens, size(len(tokens)), ctypes.byref(count))
    call("NVFP4_model_release", model)
    return tokens[: count.value]


def check_reference(build, gguf, quantized):
    library = ctypes.CDLL(str((build / ("libNVFP4.dylib" if sys.platform == "darwin" else "libNVFP4.so")).resolve()))
    for path in (gguf, quantized):
        tokens = tokenize(library, path, TEXT.read_text(encoding="utf-8"))
        expect(tokens == REFERENCE["tokens"], f"{path}: tokens of {TEXT.name} differ from those of transformers: {tokens}")
    got, *_ = nvfp4(build / "nvfp4", "perplexity", "--model", gguf, "--kv", "f32", "--window", REFERENCE["window"], "--text", TEXT)
    expected = REFERENCE["perplexity"]
    difference = abs(got["perplexity"] / expected - 1)
    line = f"perplexity {got['perplexity']:.6f}, with transformers {expected:.6f}: {difference:.1e} apart"
    print(line)
    expect(got["predicted"] == REFERENCE["predicted"] and difference <= 1e-3, line)


def check_tables(program, gguf, quantized, wide):
    got, *_ = nvfp4(program, "perplexity", "--model", quantized, "--reference", wide, "--kv", "f32", "--window", REFERENCE["window"],
                    "--text", TEXT)
    line = f"KL divergence of a table in int8 from one in bf16: {got['reference']['kl_divergence']:.6f}"
    print(line)
    expect(0 < got["reference"]["kl_divergence"] <= 0.003, line)
    config = json.loads((quantized / "config.json").read_text())
    expect(config["tie_word_embeddings"] is True, "the head is not tied to the table")
    table = config["vocab_size"] * config["hidden_size"]
    sizes = [(place / "model.safetensors").stat().st_size for place in (quantized, wide)]
    line = f"{gguf.stat().st_size} bytes became {sizes[0]}, with a table in bf16 {sizes[1]}"
    print(line)
    expect(sizes[0] <= gguf.stat().st_size and sizes[1] - sizes[0] >= table * 0.99, line)


def generate(program, model, prompt, *more):
    got, *_ = nvfp4(
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
    build, gguf, quantized, wide = map(pathlib.Path, sys.argv[1:])
    program = build / "nvfp4"
    # Text and answer nearly fill the cache, so that it is touched, and look up many rows of the embedding.
    for model in (quantized, gguf):
        check_memory(program, model, "--prompt-file", TEXT, "--context", 1024, "--max-tokens", 128)
    check_start(program, quantized, 1)
    check_reference(build, gguf, quantized)
    check_tables(program, gguf, quantized, wide)
    check_ways(program, quantized)
    close()


if __name__ == "__main__":
    main()
