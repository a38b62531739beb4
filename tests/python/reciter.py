"""Writes a model that answers every chat with one text: reciter.py DIRECTORY TEXT.

Its vocabulary has the bytes, and behind them the text in pieces of two bytes or more, cut where they fall. Embeddings are
one-hot, the one layer adds nothing, and the head's row of a token points to the token before it: so after the newline that
ends the prompt comes the first piece, after each piece the next, and after the last one the end of the turn.
"""

import array
import json
import os
import struct
import sys

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END = 2


def alphabet():
    """The characters that stand for the bytes in a byte-level vocabulary, by byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


def cut(data, taken=()):
    """The text in pieces, each as short as it can be: two bytes at least, as bytes have tokens already, and none twice or taken."""
    pieces, start = [], 0
    for end in range(2, len(data) + 1):
        if end - start >= 2 and data[start:end] not in pieces and data[start:end] not in taken:
            pieces.append(data[start:end])
            start = end
    if not pieces or pieces[-1] + data[start:] in [*pieces[:-1], *taken]:
        raise ValueError(f"{data!r} cannot be cut in this way: let it end otherwise")
    pieces[-1] += data[start:]
    return pieces


def write(directory, text):
    """Makes the model; returns the token ids of its answer."""
    pieces = cut(text.encode())
    letters = alphabet()
    names = SPECIAL + [letters[byte] for byte in range(256)] + ["".join(letters[byte] for byte in piece) for piece in pieces]
    answer = range(len(SPECIAL) + 256, len(names))
    following = dict(zip([len(SPECIAL) + 10, *answer], [*answer, END]))
    added = [(name, True) for name in SPECIAL]
    save(directory, names, added, {(after, before): 1.0 for before, after in following.items()})
    return list(answer)


def save(directory, names, added, head, merges=(), seen=()):
    """
    Writes the model in which `head` gives, for a next token and a last one, how well it follows. `added` are the first tokens, each
    special or not. `seen` are pairs of a token and a row beyond `names`, of which the head may say too: it is set, the
    stronger the nearer the beginning, where the token has occurred.
    """
    size = (len(names) + 2 + 31) // 32 * 32

    def matrix(rows, columns, values=()):
        out = array.array("H", bytes(2 * rows * columns))
        for row, column, value in values:
            out[row * columns + column] = struct.unpack("<2H", struct.pack("<f", value))[1]  # As bfloat16.
        return [rows, columns], out.tobytes()

    def norm(width):
        return [width], array.array("H", [0x3F80] * width).tobytes()

    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": matrix(size, size, ((token, token, 1) for token in range(size))),
        "lm_head.weight": matrix(size, size, ((after, before, how) for (after, before), how in head.items())),
        "model.norm.weight": norm(size),
        layer + "input_layernorm.weight": norm(size),
        layer + "post_attention_layernorm.weight": norm(size),
        layer + "self_attn.q_norm.weight": norm(32),
        layer + "self_attn.k_norm.weight": norm(32),
        # Queries and keys are nothing, so that each token sees the mean of the values before it.
        layer + "self_attn.q_proj.weight": matrix(32, size),
        layer + "self_attn.k_proj.weight": matrix(32, size),
        layer + "self_attn.v_proj.weight": matrix(32, size, ((i, token, 1) for i, (token, _) in enumerate(seen))),
        layer + "self_attn.o_proj.weight": matrix(size, 32, ((row, i, 2) for i, (_, row) in enumerate(seen))),
        layer + "mlp.gate_proj.weight": matrix(32, size),
        layer + "mlp.up_proj.weight": matrix(32, size),
        layer + "mlp.down_proj.weight": matrix(size, 32),
    }
    header, position = {}, 0
    for name, (shape, values) in tensors.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, position + len(values)]}
        position += len(values)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)

    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.writelines(values for _, values in tensors.values())
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "hidden_size": size,
        "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32,
        "vocab_size": size, "max_position_embeddings": 16384, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "rope_theta": 10000.0, "eos_token_id": END,
    }
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": level,
        "added_tokens": [{"id": id, "content": name, **flags, "special": special} for id, (name, special) in enumerate(added)],
        "post_processor": None, "decoder": level,
        "model": {"type": "BPE", "vocab": {name: id for id, name in enumerate(names)}, "merges": list(merges)},
    }
    for name, content in (("config", config), ("tokenizer", tokenizer)):
        with open(os.path.join(directory, name + ".json"), "w", encoding="utf-8") as file:
            json.dump(content, file)


if __name__ == "__main__":
    write(*sys.argv[1:])
