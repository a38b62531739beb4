"""Makes reference.json: what transformers makes of text.txt with SmolLM2 as its GGUF file holds it, in f32.

    python tests/smollm2/reference.py SmolLM2-135M-Instruct.Q4_1.gguf

Needs torch, transformers, accelerate and gguf; no network. transformers reads the file itself: it decodes the blocks to f32, undoes the
order in which GGUF keeps the rows of queries and keys, and makes a tokenizer of the vocabulary and merges. The windows are
those of `nvfp4 perplexity`: they do not overlap, nothing is put before them, and the first token of each is not predicted.
"""

import json
import math
import pathlib
import sys

import gguf
import torch
import transformers

HERE = pathlib.Path(__file__).parent
WINDOW = 256


def main():
    (path,) = map(pathlib.Path, sys.argv[1:])
    source = dict(pretrained_model_name_or_path=path.parent, gguf_file=path.name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, attn_implementation="eager").eval()
    # Decoded a second time by other code, one matrix that is not reordered must be the same.
    stored = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.7.ffn_down.weight")
    decoded = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type))
    assert torch.equal(decoded, model.model.layers[7].mlp.down_proj.weight)

    tokens = tokenizer.encode((HERE / "text.txt").read_text(encoding="utf-8"), add_special_tokens=False)
    loss, predicted = 0.0, 0
    for start in range(0, len(tokens), WINDOW):
        window = torch.tensor(tokens[start : start + WINDOW])
        with torch.no_grad():
            logits = model(window[None]).logits[0, :-1]
        loss += torch.nn.functional.cross_entropy(logits.double(), window[1:], reduction="sum").item()
        predicted += len(window) - 1
    result = {
        "made_with": {m.__name__: m.__version__ for m in (torch, transformers)},
        "window": WINDOW,
        "predicted": predicted,
        "loss": loss / predicted,
        "perplexity": math.exp(loss / predicted),
        "tokens": tokens,
    }
    text = json.dumps(result, indent=1)
    head, _ = text.split('"tokens"')
    (HERE / "reference.json").write_text(head + f'"tokens": {json.dumps(tokens)}\n}}\n')
    print(f"perplexity {result['perplexity']:.6f} over {predicted} of {len(tokens)} tokens")


if __name__ == "__main__":
    main()
