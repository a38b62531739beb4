"""Makes GGUF files of some model goldens, as llama.cpp's converter writes them: tensor names from the `gguf` package's own tables, norms of
Gemma with one added, rotated rows of llama's queries and keys interleaved, experts stacked. Values are those that the NVFP4 weights stand
for, in F32, so that the logits are the goldens'. Run with gguf, numpy, torch and safetensors installed:

    python tests/golden/gguf/make.py
"""

import json
import pathlib

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

HERE = pathlib.Path(__file__).parent
GOLDENS = HERE.parent / "model"
MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
ARCHS = {"gemma3_text": "GEMMA3", "qwen3_moe": "QWEN3MOE", "phi3": "PHI3", "mistral": "LLAMA"}


def values(stored):
    """The tensors of a golden by name, as f32."""
    out = {}
    for name, tensor in stored.items():
        if name.endswith(("_scale", "_scale_2")):
            continue
        if tensor.dtype == torch.uint8:
            codes = torch.stack([tensor & 15, tensor >> 4], -1).reshape(tensor.shape[0], -1).long()
            numbers = MAGNITUDES[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
            scales = stored[name + "_scale"].float().repeat_interleave(16, 1)
            tensor = numbers * scales * stored[name + "_scale_2"]
        out[name] = tensor.float()
    return out


def interleave(w, heads):
    """The rows of each head so that those that rotate together are neighbours."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def make(case):
    config = json.loads((GOLDENS / case / "config.json").read_text())
    tensors = values(load_file(GOLDENS / case / "model.safetensors"))
    kind, layers = config["model_type"], config["num_hidden_layers"]
    arch = getattr(gguf.MODEL_ARCH, ARCHS[kind])
    names = gguf.get_tensor_name_map(arch, layers)
    writer = gguf.GGUFWriter(HERE / f"{case}.gguf", gguf.MODEL_ARCH_NAMES[arch])
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention") or rope
    scaling = config.get("rope_scaling") or rope
    writer.add_rope_freq_base(config.get("rope_theta") or rope["rope_theta"])
    partial = config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1
    writer.add_rope_dimension_count(int(head_dim * partial))
    if kind == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])
        pattern = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_array("gemma3.attention.sliding_window_pattern", pattern)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "mistral" and config["sliding_window"]:
        writer.add_sliding_window(config["sliding_window"])
    if kind == "phi3":
        writer.add_sliding_window(config.get("sliding_window") or 0)
    if scaling.get("short_factor"):
        original = config["original_max_position_embeddings"]
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(scale) / np.log(original))))
        for which in ["short", "long"]:
            factors = np.array(scaling[f"{which}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{which}.weight", factors)
    if kind == "qwen3_moe":
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        for layer in range(layers):
            for projection in ["gate_proj", "up_proj", "down_proj"]:
                prefix = f"model.layers.{layer}.mlp.experts"
                parts = [tensors.pop(f"{prefix}.{e}.{projection}.weight") for e in range(config["num_experts"])]
                tensors[f"{prefix}.{projection}.weight"] = torch.stack(parts)
    for name, tensor in tensors.items():
        if kind == "gemma3_text" and name.endswith("norm.weight"):
            tensor = tensor + 1
        if kind == "mistral" and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = interleave(tensor, heads if "q_proj" in name else kv_heads)
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new, name
        writer.add_tensor(new, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{case}: {(HERE / f'{case}.gguf').stat().st_size} bytes")


for case in ["gemma3_wide", "qwen3moe_normalized", "phi3_longrope", "mistral_window"]:
    make(case)
