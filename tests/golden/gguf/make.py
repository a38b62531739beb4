"""Makes GGUF files of some model goldens, as llama.cpp's converter writes them: tensor names from the `gguf` package's own tables, norms of
Gemma and Qwen3.5 with one added, rotated rows of llama's queries and keys interleaved, value heads of Qwen3.5 tile by tile, experts stacked.
Values are those that the NVFP4 weights stand for, in F32, so that the logits are the goldens'. NVFP4 matrices of `qwen35_drafter` whose
rows divide into blocks of 64 stay NVFP4, and so do the MXFP4 stacks of gpt-oss. Run with gguf, numpy, torch and safetensors installed:

    python tests/golden/gguf/make.py [CASE ...]
"""

import json
import pathlib
import sys

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

HERE = pathlib.Path(__file__).parent
GOLDENS = HERE.parent / "model"
MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
ARCHS = {
    "gemma3_text": "GEMMA3",
    "qwen3_moe": "QWEN3MOE",
    "phi3": "PHI3",
    "mistral": "LLAMA",
    "gpt_oss": "GPT_OSS",
    "qwen3_5_text": "QWEN35",
    "qwen3_5_moe_text": "QWEN35MOE",
    "qwen3_next": "QWEN3NEXT",
}
DELTA = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
# Tensors of the drafter outside its block. GGUF has them in that block, after the model's last.
DRAFTER = {
    "mtp.fc": "nextn.eh_proj",
    "mtp.pre_fc_norm_embedding": "nextn.enorm",
    "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm",
}


def values(stored):
    """The tensors of a golden by name, as f32."""
    out = {}
    for name, tensor in stored.items():
        if name.endswith(("_scale", "_scale_2", "_blocks", "_scales")):
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


def tiled(w, config, dim=0, first=0, width=1):
    """Value heads of that width, from `first` on, tile by tile rather than group by group."""
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    w = w.movedim(dim, 0)
    rest = w[first:].reshape(groups, heads // groups, width, *w.shape[1:]).swapaxes(0, 1)
    return torch.cat([w[:first], rest.reshape(w[first:].shape)]).movedim(0, dim)


def by_role(w, config):
    """The queries, keys and values of all heads, and the gates, from rows that are stored head by head."""
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key, values = config["linear_key_head_dim"], config["linear_value_head_dim"] * heads // groups
    parts = torch.split(w.reshape(groups, -1, w.shape[1]), [key, key, values, values], dim=1)
    q, k, v, z = [part.reshape(-1, w.shape[1]) for part in parts]
    return torch.cat([q, k, v]), z


def of_delta(tensors, config):
    """The tensors of a gated delta net in GGUF's order and functions."""
    is_tiled, value = config["model_type"] != "qwen3_next", config["linear_value_head_dim"]
    first = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    reorder = tiled if is_tiled else lambda w, *_, **__: w
    out = {}
    for name, w in tensors.items():
        if name.endswith("in_proj_qkvz.weight"):
            before = name.removesuffix("qkvz.weight")
            out[before + "qkv.weight"], out[before + "z.weight"] = by_role(w, config)
            continue
        if name.endswith(".A_log"):
            w = reorder(-torch.exp(w), config)
        elif name.endswith(".dt_bias"):
            name, w = name.replace(".dt_bias", ".dt_proj.bias"), reorder(w, config)
        elif name.endswith("conv1d.weight"):
            w = reorder(w.squeeze(1), config, first=first, width=value)
        elif name.endswith("in_proj_qkv.weight"):
            w = reorder(w, config, first=first, width=value)
        elif name.endswith("in_proj_z.weight"):
            w = reorder(w, config, width=value)
        elif name.endswith(("in_proj_a.weight", "in_proj_b.weight")):
            w = reorder(w, config)
        elif name.endswith("linear_attn.out_proj.weight"):
            w = reorder(w, config, dim=1, width=value)
        elif name.endswith("shared_expert_gate.weight"):
            w = w.squeeze(0)
        elif "norm" in name.rsplit(".", 2)[-2] and not name.endswith("linear_attn.norm.weight"):
            w = w + 1
        out[name] = w
    return out


def nvfp4_blocks(stored, name, config):
    """GGUF's NVFP4 blocks of a stored matrix: four scales, then the codes of four runs of 16, each with its halves in low and high nibbles."""
    packed, scales = stored[name], stored[name + "_scale"].view(torch.uint8)
    codes = torch.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    both = {"codes": codes, "scales": scales.repeat_interleave(16, 1)}
    both = {key: of_delta({name: w}, config)[name] for key, w in both.items()}
    codes = both["codes"].reshape(codes.shape[0], -1, 4, 2, 8)
    scales = both["scales"].reshape(codes.shape[0], -1, 4, 16)[..., 0]
    packed = (codes[:, :, :, 0] | codes[:, :, :, 1] << 4).reshape(*scales.shape[:2], 32)
    return torch.cat([scales, packed], -1).reshape(codes.shape[0], -1)


def mxfp4_blocks(blocks, scales):
    """GGUF's MXFP4 blocks: a scale, then 16 bytes with the first half of the codes in low nibbles."""
    codes = torch.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:3], 2, 16)
    packed = codes[..., 0, :] | codes[..., 1, :] << 4
    return torch.cat([scales.unsqueeze(-1), packed], -1).flatten(2)


def write_gpt_oss(writer, stored, tensors, layers):
    """Writes the experts of gpt-oss; gates and ups, which alternate in the golden, apart."""
    for layer in range(layers):
        prefix, block = f"model.layers.{layer}.mlp.experts", f"blk.{layer}.ffn"
        for name, parts in {"gate_up_proj": {"gate": 0, "up": 1}, "down_proj": {"down": None}}.items():
            for part, first in parts.items():
                rows = slice(None) if first is None else slice(first, None, 2)
                blocks, scales = (stored[f"{prefix}.{name}_{kind}"][:, rows] for kind in ("blocks", "scales"))
                packed = mxfp4_blocks(blocks, scales).contiguous().numpy()
                writer.add_tensor(f"{block}_{part}_exps.weight", packed, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
                bias = stored[f"{prefix}.{name}_bias"].float()[:, rows].contiguous()
                writer.add_tensor(f"{block}_{part}_exps.bias", bias.numpy())
            del tensors[f"{prefix}.{name}_bias"]


def make(case):
    config = json.loads((GOLDENS / case / "config.json").read_text())
    stored = load_file(GOLDENS / case / "model.safetensors")
    tensors = values(stored)
    kind, layers = config["model_type"], config["num_hidden_layers"]
    drafter = config.get("mtp_num_hidden_layers", 0)
    arch = getattr(gguf.MODEL_ARCH, ARCHS[kind])
    names = gguf.get_tensor_name_map(arch, layers + drafter)
    writer = gguf.GGUFWriter(HERE / f"{case}.gguf", gguf.MODEL_ARCH_NAMES[arch])
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers + drafter)
    if "intermediate_size" in config:
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
    if kind == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        write_gpt_oss(writer, stored, tensors, layers)
    if kind in DELTA:
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
        writer.add_full_attention_interval(config.get("full_attention_interval", 4))
        if drafter:
            writer.add_nextn_predict_layers(drafter)
            tensors = {
                key.replace("mtp.layers.0", f"model.layers.{layers}"): w for key, w in tensors.items()
            }
        if "shared_expert_intermediate_size" in config:
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if scaling.get("short_factor"):
        original = config["original_max_position_embeddings"]
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(scale) / np.log(original))))
        for which in ["short", "long"]:
            factors = np.array(scaling[f"{which}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{which}.weight", factors)
    if config.get("num_experts"):
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        for layer in range(layers + drafter):
            for projection in ["gate_proj", "up_proj", "down_proj"]:
                prefix = f"model.layers.{layer}.mlp.experts"
                parts = [tensors.pop(f"{prefix}.{e}.{projection}.weight") for e in range(config["num_experts"])]
                tensors[f"{prefix}.{projection}.weight"] = torch.stack(parts)
    if kind in DELTA:
        tensors = of_delta(tensors, config)
    for name, tensor in tensors.items():
        if (key := name.removesuffix(".weight")) in DRAFTER:
            writer.add_tensor(f"blk.{layers}.{DRAFTER[key]}.weight", tensor.contiguous().numpy())
            continue
        own = name.replace(f"model.layers.{layers}", "mtp.layers.0")
        if case == "qwen35_drafter" and stored.get(own, tensor).dtype == torch.uint8 and tensor.shape[1] % 64 == 0:
            new = names.get_name(name, try_suffixes=(".weight",))
            packed = nvfp4_blocks(stored, own, config).contiguous().numpy()
            writer.add_tensor(new, packed, raw_dtype=gguf.GGMLQuantizationType.NVFP4)
            scale = stored[own + "_scale_2"].reshape(1).numpy()
            writer.add_tensor(new.replace(".weight", ".scale"), scale)
            continue
        if kind == "gpt_oss" and name.endswith("sinks"):
            name += ".weight"
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


CASES = ["gemma3_wide", "qwen3moe_normalized", "phi3_longrope", "mistral_window", "gptoss_mxfp4", "qwen35_drafter", "qwen35moe_drafter",
         "qwen3next_shared"]
for case in sys.argv[1:] or CASES:
    make(case)
