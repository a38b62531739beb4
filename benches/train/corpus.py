#!/usr/bin/env python3
"""Text, a tokenizer and a config for experiments in training: corpus.py SOURCE OUT [--vocab N] [--shape 10m|14m|60m]

SOURCE is a folder of text files (.txt, .txt.gz, .pod; what a package of documentation unpacks to). OUT gets train.jsonl and held.jsonl, a
document a line, and model/, a Qwen3 of the given shape without weights: config.json, and the byte-level BPE that is trained on the text. Files
are split by a checksum of their names, one in fifty held out; --hold NAME holds out exactly the files whose names contain NAME. --match takes only
the files whose names match a regular expression. Same input, same output. Needs the package tokenizers.
"""
import argparse
import gzip
import json
import pathlib
import re
import zlib

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SHAPES = {  # layers, hidden, heads, key/value heads, intermediate
    "10m": (5, 384, 6, 2, 1152),
    "14m": (6, 384, 6, 3, 1152),
    "60m": (12, 640, 10, 5, 1920),
}
HEAD = 64
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def text_of(path):
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("source", type=pathlib.Path)
    arguments.add_argument("out", type=pathlib.Path)
    arguments.add_argument("--vocab", type=int, default=8192)
    arguments.add_argument("--shape", choices=SHAPES, default="14m")
    arguments.add_argument("--hold")
    arguments.add_argument("--match", default="")
    arguments.add_argument("--mebibytes", type=float, default=64)
    a = arguments.parse_args()

    names = sorted(p for p in a.source.rglob("*") if p.is_file() and re.search(r"\.(txt|pod|rst)(\.gz)?$", p.name))
    # In an order that does not depend on folders, so that a limit takes some of each.
    names.sort(key=lambda p: zlib.crc32(str(p.relative_to(a.source)).encode()))
    train, held, size, seen = [], [], 0, set()
    for path in names:
        name = str(path.relative_to(a.source))
        if "translations" in name or not re.search(a.match, name):
            continue
        text = text_of(path)
        if len(text) < 200 or text in seen:
            continue
        seen.add(text)
        is_held = a.hold in name if a.hold else zlib.crc32(b"hold " + name.encode()) % 50 == 0
        (held if is_held else train).append(text)
        size += len(text)
        if size > a.mebibytes * 2**20:
            break

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=a.vocab,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(train, trainer)

    model = a.out / "model"
    model.mkdir(parents=True, exist_ok=True)
    for name, documents in [("train", train), ("held", held)]:
        with open(a.out / f"{name}.jsonl", "w") as file:
            for text in documents:
                file.write(json.dumps({"text": text}) + "\n")
    tokenizer.save(str(model / "tokenizer.json"))
    layers, hidden, heads, kv_heads, intermediate = SHAPES[a.shape]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD,
        "intermediate_size": intermediate,
        "vocab_size": a.vocab,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    (model / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    settings = {"eos_token": SPECIAL[0], "model_max_length": 2048, "tokenizer_class": "PreTrainedTokenizerFast"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    tokens = sum(len(tokenizer.encode(text).ids) for text in held)
    bytes_held = sum(len(text.encode()) for text in held)
    print(f"{len(train)} documents to train on, {len(held)} held out, {size} characters; {bytes_held / tokens:.2f} bytes a token held out")


if __name__ == "__main__":
    main()
