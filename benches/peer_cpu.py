"""Decode and prefill beside llama.cpp on this machine, at the shape of Qwen3-0.6B, with seeded random weights.

    pip install llama-cpp-python gguf numpy
    cargo build --release
    python benches/peer_cpu.py [--threads N] [--rounds N] [--prompt 512] [--generate 128]

Every round runs each contender once, so that a noisy neighbour troubles all alike; the table gives medians. llama.cpp gets
Q4_0 everywhere, its head included (its own converter would give the head more bits), and NVFP4 everywhere but
the embedding. Both sides decode from an empty context, as `llama-bench` does, and prefill one batch of the whole prompt.
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 1024, 28, 16, 8, 128, 3072, 151936


def write_gguf(path, kind):
    """A Qwen3-0.6B-shaped GGUF whose linear weights are random blocks of `kind`, "q4_0" or "nvfp4"."""
    import gguf

    rng = np.random.default_rng(17)
    writer = gguf.GGUFWriter(str(path), "qwen3")
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("no_vocab")

    def linear(name, rows, cols, kind=kind):
        if kind == "q4_0":
            blocks = rng.integers(0, 256, (rows, cols // 32, 18), dtype=np.uint8)
            scale = rng.uniform(0.5, 1.5, (rows, cols // 32)).astype(np.float16) * np.float16(0.2 / cols**0.5)
            blocks[:, :, :2] = scale[:, :, None].view(np.uint8)
            raw = gguf.GGMLQuantizationType.Q4_0
        else:
            blocks = rng.integers(0, 256, (rows, cols // 64, 36), dtype=np.uint8)
            # Block scales from 2^-7 to 2^-5, in e4m3.
            blocks[:, :, :4] = rng.integers(0x04, 0x10, (rows, cols // 64, 4), dtype=np.uint8)
            raw = gguf.GGMLQuantizationType.NVFP4
        writer.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=raw)

    linear("token_embd.weight", VOCAB, HIDDEN, "q4_0")
    if kind != "q4_0":
        linear("output.weight", VOCAB, HIDDEN)
    ones = lambda n: np.ones(n, dtype=np.float32)
    writer.add_tensor("output_norm.weight", ones(HIDDEN))
    for i in range(LAYERS):
        writer.add_tensor(f"blk.{i}.attn_norm.weight", ones(HIDDEN))
        writer.add_tensor(f"blk.{i}.ffn_norm.weight", ones(HIDDEN))
        writer.add_tensor(f"blk.{i}.attn_q_norm.weight", ones(HEAD_DIM))
        writer.add_tensor(f"blk.{i}.attn_k_norm.weight", ones(HEAD_DIM))
        linear(f"blk.{i}.attn_q.weight", HEADS * HEAD_DIM, HIDDEN)
        linear(f"blk.{i}.attn_k.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        linear(f"blk.{i}.attn_v.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        linear(f"blk.{i}.attn_output.weight", HIDDEN, HEADS * HEAD_DIM)
        linear(f"blk.{i}.ffn_gate.weight", FFN, HIDDEN)
        linear(f"blk.{i}.ffn_up.weight", FFN, HIDDEN)
        linear(f"blk.{i}.ffn_down.weight", HIDDEN, FFN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Llama:
    """One llama.cpp model through its C API."""

    def __init__(self, path, threads, prompt):
        import llama_cpp as lib

        self.lib, self.prompt = lib, prompt
        quiet = lib.llama_log_callback(lambda *_: None)
        self._quiet = quiet
        lib.llama_log_set(quiet, None)
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        if not self.model:
            sys.exit(f"llama.cpp cannot load {path}")
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 2048, prompt, prompt
        params.n_threads = params.n_threads_batch = threads
        self.context = lib.llama_init_from_model(self.model, params)

    def decode(self, tokens):
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        if self.lib.llama_decode(self.context, self.lib.llama_batch_get_one(array, len(tokens))) != 0:
            sys.exit("llama_decode failed")

    def clear(self):
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)

    def measure(self, generate):
        tokens = [(i * 7919) % VOCAB for i in range(self.prompt)]
        self.clear()
        start = time.perf_counter()
        self.decode(tokens)
        prefill = self.prompt / (time.perf_counter() - start)
        self.clear()
        self.decode([1])
        start = time.perf_counter()
        for i in range(generate):
            self.decode([(i * 104729) % VOCAB])
        return prefill, generate / (time.perf_counter() - start)


def ours(model, activations, threads, prompt, generate):
    """Prefill and decode rates, and the roofline, from one run of `nvfp4 bench`."""
    command = [
        ROOT / "target/release/nvfp4", "bench", "--model", model, "--prompt-tokens", prompt, "--gen-tokens", generate,
        "--activations", activations, "--runs", 1, "--decode-from-empty", "--json",
    ]
    environment = dict(os.environ, NVFP4_THREADS=str(threads))
    out = subprocess.run([str(c) for c in command], env=environment, check=True, capture_output=True, text=True)
    result = json.loads(out.stdout)
    return result["prefill_tok_s"], result["decode_tok_s"], result["roofline"]


def processor():
    """The CPU by name, family and model."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    field = lambda name: next((l.split(":", 1)[1].strip() for l in lines if l.startswith(name)), "?")
    return f"{field('model name')} (family {field('cpu family')}, model {field('model')})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--generate", type=int, default=128)
    parser.add_argument("--json", help="also write the medians here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        synth = [ROOT / "target/release/nvfp4", "synth", "--arch", "qwen3-0.6b", "--out", folder / "synth"]
        subprocess.run([str(c) for c in synth], check=True, stderr=subprocess.DEVNULL)
        peers = {}
        for kind in ("q4_0", "nvfp4"):
            write_gguf(folder / f"{kind}.gguf", kind)
            peers[kind] = Llama(folder / f"{kind}.gguf", args.threads, args.prompt)
            peers[kind].measure(8)
        rows = {}
        for _ in range(args.rounds):
            for activations in ("exact", "int8"):
                result = ours(folder / "synth", activations, args.threads, args.prompt, args.generate)
                rows.setdefault(f"libNVFP4 {activations}", []).append(result)
            for kind, peer in peers.items():
                rows.setdefault(f"llama.cpp {kind}", []).append((*peer.measure(args.generate), float("nan")))
    medians = {name: [statistics.median(column) for column in zip(*runs)] for name, runs in rows.items()}
    print(f"{processor()}, {args.threads} threads, {args.rounds} rounds")
    print(f"{'':18} {'prefill tok/s':>14} {'decode tok/s':>13} {'roofline':>9}")
    for name, (prefill, decode, roofline) in medians.items():
        print(f"{name:18} {prefill:14.1f} {decode:13.1f} {roofline:9.2f}")
    exact, int8 = medians["libNVFP4 exact"], medians["libNVFP4 int8"]
    q4, nvfp4 = medians["llama.cpp q4_0"], medians["llama.cpp nvfp4"]
    print(f"decode / llama.cpp Q4_0: exact {exact[1] / q4[1]:.2f}, int8 {int8[1] / q4[1]:.2f}")
    print(f"prefill, int8 / llama.cpp Q4_0: {int8[0] / q4[0]:.2f}; int8 / llama.cpp NVFP4: {int8[0] / nvfp4[0]:.2f}")
    print(f"prefill, exact / int8: {exact[0] / int8[0]:.2f}")
    if args.json:
        Path(args.json).write_text(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
