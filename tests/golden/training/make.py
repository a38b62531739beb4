"""Makes the gradient goldens: for dense models of tests/golden/model, the loss of packed documents and what torch's autograd gives for
every parameter, in f64. Run with torch, transformers and safetensors installed:

    python tests/golden/training/make.py

A case is a file with `tokens`, `documents` (lengths), `labels` (-1 where no loss counts), `weights`, `loss`, and for each parameter its
gradient, of which a matrix [rows, cols] is kept as two products: `NAME.right` [rows], with cos(0.7 j + 0.3), and `NAME.left` [cols], with
cos(1.1 i + 0.5). Documents run one by one, so that nothing can leak between them.
"""

import json
import pathlib

import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = pathlib.Path(__file__).parent
MODELS = HERE.parent / "model"
MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
CLASSES = {"gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM")}
CASES = [
    "qwen3_tied", "qwen3_untied", "qwen3_yarn", "qwen2_untied", "qwen2_tied", "qwen2_window", "llama_tied", "llama_biased", "llama_llama3",
    "gemma3_wide", "mistral_window", "phi3_window", "phi3_partial",
]
DOCUMENTS = [5, 1, 17, 14]


def dequantize(stored, key):
    packed = stored[key].int()
    codes = torch.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    values = MAGNITUDES[codes & 7] * torch.where(codes > 7, -1.0, 1.0).double()
    scales = stored[key + "_scale"].double().repeat_interleave(16, 1)
    return values * (scales * stored[key + "_scale_2"].double())


def load(name):
    settings = json.loads((MODELS / name / "config.json").read_text())
    config_class, model_class = CLASSES.get(settings["model_type"], (None, settings["architectures"][0]))
    config = getattr(transformers, config_class or model_class.replace("ForCausalLM", "Config"))(
        **{k: v for k, v in settings.items() if k not in ("architectures", "model_type")})
    config._attn_implementation = "eager"
    model = getattr(transformers, model_class)(config).double()
    stored = load_file(MODELS / name / "model.safetensors")
    with torch.no_grad():
        for key, value in model.named_parameters():
            value.copy_(dequantize(stored, key) if key + "_scale" in stored else stored[key].double())
    return model, config


def make(name, seed):
    model, config = load(name)
    generator = torch.Generator().manual_seed(seed)
    rows = sum(DOCUMENTS)
    tokens = torch.randint(0, config.vocab_size, (rows,), generator=generator)
    labels = torch.randint(0, config.vocab_size, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < 0.25] = -1
    weights = torch.rand(rows, generator=generator, dtype=torch.float64).float()
    loss, first = 0, 0
    for length in DOCUMENTS:
        part = slice(first, first + length)
        logits = model(tokens[part][None]).logits[0]
        losses = torch.nn.functional.cross_entropy(logits, labels[part].clamp(min=0), reduction="none")
        loss = loss + (losses * weights[part].double() * (labels[part] >= 0)).sum()
        first += length
    loss.backward()
    out = {
        "tokens": tokens.int(), "labels": labels.int(), "documents": torch.tensor(DOCUMENTS).int(), "weights": weights,
        "loss": loss.detach().float().reshape(1),
    }
    for key, value in model.named_parameters():
        gradient = value.grad
        if gradient.dim() == 1:
            out[key] = gradient.float()
        else:
            height, width = gradient.shape
            out[key + ".right"] = (gradient @ torch.cos(0.7 * torch.arange(width).double() + 0.3)).float()
            out[key + ".left"] = (torch.cos(1.1 * torch.arange(height).double() + 0.5) @ gradient).float()
    save_file(out, HERE / f"{name}.safetensors")
    print(f"{name}: loss {loss.item():.4f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for seed, name in enumerate(CASES, start=1):
        make(name, seed)
