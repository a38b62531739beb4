#!/usr/bin/env python3
"""Cost of an adapter at run time, through the command: python3 benches/adapters.py MODEL [--command target/release/nvfp4] [--device cpu] [--rank 16] [--rounds 5]

Makes a bfloat16 adapter of random factors for the attention and the MLP of every block of a model with Qwen3's names, and decodes with it
and without in turn, one sequence and 64. Prints the median tokens per second of each, and the median of the ratios of runs beside each other.
"""

import argparse
import json
import os
import random
import statistics
import struct
import subprocess
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")


def shapes(config):
    """Outputs and inputs of the adapted projections of a block."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    attention = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden), "o_proj": (hidden, queries)}
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return {**{f"self_attn.{name}": shape for name, shape in attention.items()}, **{f"mlp.{name}": shape for name, shape in mlp.items()}}


def bfloat16(count, draws):
    """Random numbers of magnitudes from 2^-7 to 2^-6, as bytes."""
    return b"".join(struct.pack("<H", draws.choice((0x3C00, 0xBC00)) | draws.getrandbits(7)) for _ in range(count))


def write(config, rank, folder):
    draws, header, parts, at = random.Random(5), {}, [], 0
    # Factors of one size have the same random bytes.
    made = {}
    for block in range(config["num_hidden_layers"]):
        for name, (outputs, inputs) in shapes(config).items():
            for factor, shape in (("lora_A", [rank, inputs]), ("lora_B", [outputs, rank])):
                count = shape[0] * shape[1]
                part = made.get(count) or made.setdefault(count, bfloat16(count, draws))
                header[f"base_model.model.model.layers.{block}.{name}.{factor}.weight"] = {
                    "dtype": "BF16", "shape": shape, "data_offsets": [at, at + len(part)]}
                parts.append(part)
                at += len(part)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(folder, "adapter_model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(parts))
    modules = sorted({name.split(".")[1] for name in shapes(config)})
    with open(os.path.join(folder, "adapter_config.json"), "w", encoding="utf-8") as file:
        json.dump({"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}, file)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--command", default=os.path.join(ROOT, "target/release/nvfp4"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with open(os.path.join(args.model, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    with tempfile.TemporaryDirectory() as folder:
        write(config, args.rank, folder)

        def speed(sequences, *adapter):
            tokens = (32 if sequences == 1 else 8) * (8 if args.device != "cpu" else 1)
            said = subprocess.run([args.command, "bench", "--model", args.model, "--device", args.device, "--prompt-tokens", "16", "--gen-tokens", str(tokens),
                                   "--batch", str(sequences), "--runs", "1", "--json", *adapter], check=True, capture_output=True, text=True)
            return json.loads(said.stdout)["decode_tok_s"]

        for sequences in (1, 64):
            pairs = [(speed(sequences), speed(sequences, "--adapter", folder)) for _ in range(args.rounds)]
            plain, adapted = (statistics.median(speeds) for speeds in zip(*pairs))
            ratios = [b / a for a, b in pairs]
            print(f"{sequences} sequences: {plain:.1f} tok/s, with an adapter of rank {args.rank} {adapted:.1f}: {statistics.median(ratios):.3f} "
                  f"({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
