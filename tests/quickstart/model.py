"""Writes a model of the form of Qwen/Qwen3-0.6B that answers every chat with one text: model.py TOKENIZER_FOLDER DIRECTORY TEXT

TOKENIZER_FOLDER has Qwen3's own tokenizer.json and tokenizer_config.json, which go along. The weights are bfloat16, with Qwen3's
vocabulary and little else: embeddings of the tokens that matter are one-hot, the one layer adds nothing, and the head's row of a
token points to the token before it. So after the newline that ends the prompt, or the two that follow the mark of a thought
left out, comes the first token of TEXT, after each token the next, and after the last one the end of the turn. TEXT is cut into
the longest tokens that fit, of which none may come twice.
"""

import array
import json
import os
import shutil
import struct
import sys

ROWS, HIDDEN, HEAD = 151_936, 64, 32
NEWLINE, NEWLINES, END = "\u010a", "\u010a\u010a", "<|im_end|>"


def main(tokenizer, directory, text):
    with open(os.path.join(tokenizer, "tokenizer.json"), encoding="utf-8") as file:
        described = json.load(file)
    vocabulary = described["model"]["vocab"]
    special = {token["content"]: token["id"] for token in described["added_tokens"]}
    answer, rest = [], text.replace(" ", "\u0120")
    while rest:
        piece = next(rest[:n] for n in range(len(rest), 0, -1) if rest[:n] in vocabulary)
        answer.append(vocabulary[piece])
        rest = rest[len(piece) :]
    chain = [vocabulary[NEWLINE], *answer, special[END]]
    assert len(set(chain)) == len(chain) <= HIDDEN, f"{text!r} has a token twice, or too many"

    def matrix(rows, columns, ones=()):
        values = array.array("H", bytes(2 * rows * columns))
        for row, column in ones:
            values[row * columns + column] = 0x3F80  # 1 in bfloat16.
        return [rows, columns], values.tobytes()

    def norm(width):
        return [width], array.array("H", [0x3F80] * width).tobytes()

    layer = "model.layers.0."
    tensors = {
        "lm_head.weight": matrix(ROWS, HIDDEN, ((token, place) for place, token in enumerate(chain[1:]))),
        "model.embed_tokens.weight": matrix(
            ROWS, HIDDEN, [(vocabulary[NEWLINES], 0), *((token, place) for place, token in enumerate(chain))]
        ),
        layer + "input_layernorm.weight": norm(HIDDEN),
        layer + "mlp.down_proj.weight": matrix(HIDDEN, HEAD),
        layer + "mlp.gate_proj.weight": matrix(HEAD, HIDDEN),
        layer + "mlp.up_proj.weight": matrix(HEAD, HIDDEN),
        layer + "post_attention_layernorm.weight": norm(HIDDEN),
        layer + "self_attn.k_norm.weight": norm(HEAD),
        layer + "self_attn.q_norm.weight": norm(HEAD),
        **{f"{layer}self_attn.{name}_proj.weight": matrix(HEAD, HIDDEN) for name in "qkv"},
        layer + "self_attn.o_proj.weight": matrix(HIDDEN, HEAD),
        "model.norm.weight": norm(HIDDEN),
    }
    header, position = {"__metadata__": {"format": "pt"}}, 0
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
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "head_dim": HEAD, "hidden_act": "silu", "hidden_size": HIDDEN, "initializer_range": 0.02,
        "intermediate_size": HEAD, "max_position_embeddings": 40960, "max_window_layers": 1, "model_type": "qwen3",
        "num_attention_heads": 1, "num_hidden_layers": 1, "num_key_value_heads": 1, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": ROWS,
    }
    generation = {
        "bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643], "pad_token_id": 151643, "temperature": 0.6,
        "top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0",
    }
    for name, content in (("config", config), ("generation_config", generation)):
        with open(os.path.join(directory, name + ".json"), "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(os.path.join(tokenizer, name), directory)
    with open(os.path.join(directory, "merges.txt"), "w", encoding="utf-8") as file:
        file.writelines(" ".join(pair) + "\n" if isinstance(pair, list) else pair + "\n" for pair in described["model"]["merges"])
    with open(os.path.join(directory, "vocab.json"), "w", encoding="utf-8") as file:
        json.dump(vocabulary, file, ensure_ascii=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
