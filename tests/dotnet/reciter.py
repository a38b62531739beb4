"""Writes a model that recites: python3 reciter.py TOKENIZER DIRECTORY TEXT [--forever]

A language model for tests of hosts: whatever it is asked in a chat, it answers TEXT byte by byte, and then stops, or begins
anew. It is a Qwen3 whose one layer adds nothing, and whose head gives after each token the one that follows in TEXT; so no byte
may be twice in TEXT. TOKENIZER is a byte-level tokenizer.json with the tokens of ChatML.
"""

import json
import os
import random
import shutil
import struct
import sys

HIDDEN, VOCABULARY, HEAD, INNER = 128, 320, 16, 16


def byte_symbols():
    """The character that stands for each byte in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = {byte: chr(byte) for byte in plain}
    others = (byte for byte in range(256) if byte not in symbols)
    symbols.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    return symbols


def main(tokenizer, directory, text, forever):
    vocabulary = json.load(open(tokenizer, encoding="utf-8"))["model"]["vocab"]
    symbols = byte_symbols()
    data = text.encode()
    if len(set(data)) != len(data) or ord("\n") in data:
        raise SystemExit(f"{text!r} has a byte twice, or a line break")
    spoken = [vocabulary[symbols[byte]] for byte in data]
    following = dict(zip([vocabulary["Ċ"], *spoken], [*spoken, vocabulary["<|im_end|>"]]))
    if forever:
        following[spoken[-1]] = spoken[0]

    # Two different rows of random signs have a small product, and a row with itself the largest there is.
    generator = random.Random(1)
    embedding = [[generator.choice((-1.0, 1.0)) for _ in range(HIDDEN)] for _ in range(VOCABULARY)]
    head = [[0.0] * HIDDEN for _ in range(VOCABULARY)]
    for token, next_token in following.items():
        head[next_token] = [a + b for a, b in zip(head[next_token], embedding[token])]

    def constant(value, *shape):
        return shape, [value] * (shape[0] * (shape[1] if len(shape) > 1 else 1))

    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": ((VOCABULARY, HIDDEN), sum(embedding, [])),
        "lm_head.weight": ((VOCABULARY, HIDDEN), sum(head, [])),
        "model.norm.weight": constant(1.0, HIDDEN),
        layer + "input_layernorm.weight": constant(1.0, HIDDEN),
        layer + "post_attention_layernorm.weight": constant(1.0, HIDDEN),
        layer + "self_attn.q_norm.weight": constant(1.0, HEAD),
        layer + "self_attn.k_norm.weight": constant(1.0, HEAD),
        layer + "self_attn.q_proj.weight": constant(0.0, HEAD, HIDDEN),
        layer + "self_attn.k_proj.weight": constant(0.0, HEAD, HIDDEN),
        layer + "self_attn.v_proj.weight": constant(0.0, HEAD, HIDDEN),
        layer + "self_attn.o_proj.weight": constant(0.0, HIDDEN, HEAD),
        layer + "mlp.gate_proj.weight": constant(0.0, INNER, HIDDEN),
        layer + "mlp.up_proj.weight": constant(0.0, INNER, HIDDEN),
        layer + "mlp.down_proj.weight": constant(0.0, HIDDEN, INNER),
    }
    header, blob = {}, bytearray()
    for name, (shape, values) in tensors.items():
        start = len(blob)
        blob += struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, len(blob)]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)

    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded + blob)
    with open(os.path.join(directory, "config.json"), "w") as file:
        json.dump({
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "hidden_size": HIDDEN,
            "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
            "head_dim": HEAD, "vocab_size": VOCABULARY, "max_position_embeddings": 1 << 20, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        }, file)
    with open(os.path.join(directory, "generation_config.json"), "w") as file:
        json.dump({"eos_token_id": [vocabulary["<|im_end|>"]]}, file)
    shutil.copy(tokenizer, os.path.join(directory, "tokenizer.json"))


if __name__ == "__main__":
    main(*sys.argv[1:4], forever=sys.argv[4:] == ["--forever"])
