"""Makes the goldens of far positions: for each RoPE scaling a small seeded model in ModelOpt's NVFP4 layout, and the logits that
transformers computes from the same dequantized weights at positions 4,096, 32,768 and 131,072. Run with torch, transformers,
tokenizers and safetensors installed:

    python tests/golden/model/long_positions.py [CASE ...]

Each case is a directory with config.json, model.safetensors and expected.safetensors, which has `logits_P` for each position P.

Every layer but those of long_recurrent has a window, so the logits of a position depend on the tokens of a few windows before it alone. Only those are run, at
their true positions, which gives what one pass over the whole sequence does: what depends on its length (longrope, dynamic)
transformers takes from the last position.

long_recurrent runs all tokens: gated delta nets, whose states come from all of them. Their rule is in f32, as transformers has it.

transformers computes an angle as the f32 product of an f32 frequency and the position. At position 131,072 that is off by up to 0.004
radians, by other amounts for each position, and attention sees the difference. A model is trained and served with these angles, so
they are the reference. All else is computed in f64: it costs nothing here, and leaves the whole bound to what is tested.
"""

import json
import pathlib
import shutil
import sys

import torch
import transformers
from safetensors.torch import save_file

from make import CONFIGS, MEDIUM, RECURRENT, TYPES, quantize, recurrent, rope, sections

HERE = pathlib.Path(__file__).parent
POSITIONS = [4096, 32768, 131072]
WINDOW = 64
# Tokens that are run up to a position: more than two layers see.
RUN = 3 * WINDOW
BASE = dict(
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    vocab_size=97,
    max_position_embeddings=262144,
    rms_norm_eps=1e-6,
    sliding_window=WINDOW,
    tie_word_embeddings=True,
)
PHI3 = dict(BASE, head_dim=None, num_attention_heads=1, tie_word_embeddings=False, pad_token_id=0, eos_token_id=1)
CASES = {
    "long_default": ("Mistral", dict(BASE, **rope(rope_theta=1e4, rope_type="default"))),
    "long_linear": ("Mistral", dict(BASE, **rope(rope_theta=1e4, rope_type="linear", factor=8.0))),
    # Dynamic scaling changes nothing up to max_position_embeddings, and a cache has room for no more.
    "long_dynamic": ("Mistral", dict(BASE, **rope(rope_theta=1e4, rope_type="dynamic", factor=4.0))),
    "long_llama3": ("Mistral", dict(BASE, **rope(
        rope_theta=5e5, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192))),
    "long_yarn": ("Mistral", dict(BASE, **rope(
        rope_theta=1e6, rope_type="yarn", factor=64.0, original_max_position_embeddings=4096))),
    # The first position is in a short sequence, the others in long ones.
    "long_longrope": ("Phi3", dict(PHI3, original_max_position_embeddings=16384, **rope(
        rope_theta=1e4, rope_type="longrope", original_max_position_embeddings=16384, partial_rotary_factor=0.75,
        short_factor=[1 + i / 16 for i in range(24)], long_factor=[1 + i * i / 8 for i in range(24)]))),
    "long_partial": ("Phi3", dict(PHI3, **rope(rope_theta=1e4, rope_type="default", partial_rotary_factor=0.5))),
    # Two bases; the layers with a window have the second.
    "long_local": ("Gemma3", dict(
        BASE, num_hidden_layers=2, query_pre_attn_scalar=64, hidden_activation="gelu_pytorch_tanh",
        layer_types=["sliding_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": dict(rope_theta=1e6, rope_type="linear", factor=8.0),
            "sliding_attention": dict(rope_theta=1e4, rope_type="default"),
        })),
    # The first 8 of the 32 pairs of a head turn.
    "long_proportional": ("Mistral", dict(BASE, **rope(rope_theta=1e4, rope_type="proportional", partial_rotary_factor=0.25))),
    "long_recurrent": ("Qwen3_5", {
        **MEDIUM, **RECURRENT, "num_hidden_layers": 2, "layer_types": ["linear_attention", "linear_attention"], "vocab_size": 97,
        "max_position_embeddings": 262144, "tie_word_embeddings": True, **sections(2, 1, 1)}),
}


def token(position):
    """The token at a position; the tests have the same formula."""
    return (position * 2654435761 % 2**32 >> 16) % BASE["vocab_size"]


transformers.AttentionInterface.register("no_attention", None)


def make(name, family, settings, seed):
    settings = {k: v for k, v in settings.items() if v is not None}
    is_recurrent = "linear_attention" in settings.get("layer_types", [])
    config = getattr(transformers, CONFIGS.get(family, family + "Config"))(**settings)
    # Without attention there is no mask to make, which would have an element for each pair of positions.
    config._attn_implementation = "no_attention" if is_recurrent else "eager"
    generator = torch.Generator().manual_seed(seed)
    model = getattr(transformers, family + "ForCausalLM")(config).eval().double()
    stored = {}
    for key, value in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        w = torch.randn(value.shape, generator=generator)
        random = lambda shape: torch.randn(shape, generator=generator)
        uniform = lambda shape: torch.rand(shape, generator=generator)
        if key.endswith("norm.weight"):
            is_offset = family == "Gemma3" or (is_recurrent and not key.endswith("linear_attn.norm.weight"))
            w = (0 if is_offset else 1) + 0.2 * w
            stored[key] = w
        elif found := recurrent(key, value.shape, random, uniform):
            w, stored[key] = found
        elif key == "model.embed_tokens.weight":
            stored[key] = (0.3 * w).bfloat16()
            w = stored[key].float()
        else:
            packed, scales, multiplier, w = quantize(w * (2.0 / value.shape[1] ** 0.5))
            stored[key] = packed
            stored[key + "_scale"] = scales
            stored[key + "_scale_2"] = multiplier
        value.copy_(w)
    expected = {}
    for position in POSITIONS:
        run = torch.arange(0 if is_recurrent else position + 1 - RUN, position + 1)
        tokens = torch.tensor([token(p) for p in run.tolist()])
        with torch.no_grad():
            logits = model(tokens[None], position_ids=run[None], use_cache=False, logits_to_keep=1).logits[0, -1]
        expected[f"logits_{position}"] = logits.float().contiguous()

    out = HERE / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    save_file(stored, out / "model.safetensors")
    save_file(expected, out / "expected.safetensors")
    written = {"architectures": [family + "ForCausalLM"], "model_type": TYPES.get(family, family.lower()), **settings}
    if "hidden_activation" not in written:
        written["hidden_act"] = "silu"
    (out / "config.json").write_text(json.dumps(written, indent=1) + "\n")
    spread = torch.stack(list(expected.values())).std().item()
    print(f"{name}: logits vary by {spread:.2f}, {(out / 'model.safetensors').stat().st_size} bytes")


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    wanted = sys.argv[1:] or CASES
    for seed, (name, (family, settings)) in enumerate(CASES.items(), start=1001):
        if name in wanted:
            make(name, family, settings, seed)
