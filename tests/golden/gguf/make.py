"""Makes GGUF files of some model goldens, as llama.cpp's converter writes them: tensor names from the `gguf` package's own tables, norms of
Gemma and Qwen3.5 with one added, rotated rows of llama's queries and keys interleaved, value heads of Qwen3.5 tile by tile, experts stacked.
Values are those that the NVFP4 weights stand for, in F32, so that the logits are the goldens'. NVFP4 matrices of `qwen35_drafter` and
`nemotronh_dense` whose rows divide into blocks of 64 stay NVFP4, and so do the MXFP4 stacks of gpt-oss. Matrices of Nemotron-H and Gemma 4
in bf16 stay so. Run with gguf, numpy, torch and safetensors installed:

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
    "nemotron_h": "NEMOTRON_H",
    "gemma4_text": "GEMMA4",
}
DELTA = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
# Families whose matrices in bf16 stay so, and goldens whose matrices in NVFP4 do.
BFLOAT16 = ("nemotron_h", "gemma4_text")
NVFP4 = ("qwen35_drafter", "nemotronh_dense")
# Tensors that the converter writes as matrices in F32.
VECTORS = (".A_log", ".D", "conv1d.weight", "mixer.norm.weight")
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
        # Gemma 4 has factors of experts by such a name.
        is_scale = name.endswith("_scale") and name.removesuffix("_scale") in stored
        if is_scale or name.endswith(("_scale_2", "_blocks", "_scales")):
            continue
        if tensor.dtype == torch.uint8:
            codes = torch.stack([tensor & 15, tensor >> 4], -1).reshape(tensor.shape[0], -1).long()
            numbers = MAGNITUDES[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
            scales = stored[name + "_scale"].float().repeat_interleave(16, 1)
            tensor = numbers * scales * stored[name + "_scale_2"]
        out[name] = tensor.float()
    return out


def interleave(w, heads):
    """The rows of each head with its two halves interleaved."""
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
    reorder = of_delta if config["model_type"] in DELTA else lambda tensors, _: tensors
    packed, scales = stored[name], stored[name + "_scale"].view(torch.uint8)
    codes = torch.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    both = {"codes": codes, "scales": scales.repeat_interleave(16, 1)}
    both = {key: reorder({name: w}, config)[name] for key, w in both.items()}
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


def of_nemotron(tensors, config):
    """The tensors of Nemotron-H in GGUF's shapes and functions, by the names that the converter looks up, with stacks of experts."""
    tensors = {name.replace("model.", "backbone.", 1): w for name, w in tensors.items()}
    out = {}
    for name in sorted(name for name in tensors if ".experts.0." in name):
        experts = range(config["n_routed_experts"])
        parts = [tensors.pop(name.replace(".experts.0.", f".experts.{expert}.")) for expert in experts]
        name = name.replace("backbone.", "model.").replace(".mixer.", ".mlp.").replace(".experts.0.", ".experts.")
        out[name] = torch.stack(parts)
    for name, w in tensors.items():
        if name.endswith(".A_log"):
            w = -torch.exp(w).unsqueeze(1)
        elif name.endswith(".D"):
            w = w.unsqueeze(1)
        elif name.endswith(".dt_bias"):
            name = name.replace(".dt_bias", ".dt_proj.bias")
        elif name.endswith("conv1d.weight"):
            w = w.squeeze(1)
        elif name.endswith("mixer.norm.weight"):
            w = w.reshape(config["n_groups"], -1)
        elif name.endswith("e_score_correction_bias"):
            name = name.replace("correction_bias", "correction.bias")
        out[name] = w
    return out


def write_nemotron(writer, config):
    """Writes the metadata of Nemotron-H that other families lack. Arrays say which blocks have which kind."""
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    pattern = config.get("hybrid_override_pattern") or [letters[kind] for kind in config["layers_block_type"]]
    heads = config["mamba_num_heads"]
    width = config.get("intermediate_size") or config["moe_intermediate_size"]
    writer.add_block_count(len(pattern))
    writer.add_context_length(1 << 20)
    writer.add_feed_forward_length([width if kind in "-E" else 0 for kind in pattern])
    writer.add_head_count_kv([config["num_key_value_heads"] if kind == "*" else 0 for kind in pattern])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_scaling_finetuned(False)
    writer.add_ssm_conv_kernel(config.get("conv_kernel", 4))
    writer.add_ssm_state_size(config["ssm_state_size"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_inner_size(config["mamba_head_dim"] * heads)
    writer.add_ssm_time_step_rank(heads)
    if "E" in pattern:
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_shared_count(1)
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def of_gemma4(tensors, config):
    """The text model's tensors of Gemma 4, by the names that the converter looks up; gates and ups of experts are one stack."""
    tensors = {name.replace("model.language_model.", "model."): w for name, w in tensors.items()}
    for layer in range(config["num_hidden_layers"] if config.get("num_experts") else 0):
        prefix = f"model.layers.{layer}.experts"
        experts = range(config["num_experts"])
        parts = {part: [tensors.pop(f"{prefix}.{e}.{part}_proj.weight") for e in experts] for part in ("gate", "up", "down")}
        halves = zip(parts["gate"], parts["up"])
        tensors[f"{prefix}.gate_up_proj.weight"] = torch.stack([torch.cat(both) for both in halves])
        tensors[f"{prefix}.down_proj.weight"] = torch.stack(parts["down"])
    beside = ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.")
    tensors = {name: w for name, w in tensors.items() if not name.startswith(beside)}
    return {name + ".weight" if name.endswith("layer_scalar") else name: w for name, w in tensors.items()}


def write_gemma4(writer, config):
    """Writes the metadata of Gemma 4 that other families lack, and the divisors of frequencies: 1e30 for pairs that do not turn."""
    windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
    full = config.get("per_layer_config", {}).get(str(windowed.index(False)), {})
    dim = config.get("global_head_dim") or full["head_dim"]
    shared = config.get("num_kv_shared_layers", 0)
    double = shared if config.get("use_double_wide_mlp") else 0
    usual = len(windowed) - double
    parameters = config["rope_parameters"]
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(windowed)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    if double:
        writer.add_feed_forward_length([config["intermediate_size"] * (1 + (layer >= usual)) for layer in range(len(windowed))])
    if "num_global_key_value_heads" in config:
        both = config["num_global_key_value_heads"], config["num_key_value_heads"]
        writer.add_head_count_kv([both[near] for near in windowed])
    writer.add_rope_freq_base_swa(parameters["sliding_attention"]["rope_theta"])
    writer.add_rope_dimension_count(dim)
    writer.add_rope_dimension_count_swa(config["head_dim"])
    if config.get("num_experts"):
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "final_logit_softcapping" in config:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    turning = int(dim * parameters["full_attention"]["partial_rotary_factor"] / 2)
    divisors = [1.0] * turning + [1e30] * (dim // 2 - turning)
    writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))


def make(case):
    config = json.loads((GOLDENS / case / "config.json").read_text())
    config = config.get("text_config", config)
    stored = load_file(GOLDENS / case / "model.safetensors")
    tensors = values(stored)
    kind, layers = config["model_type"], config.get("num_hidden_layers") or len(config["layers_block_type"])
    drafter = config.get("mtp_num_hidden_layers", 0)
    arch = getattr(gguf.MODEL_ARCH, ARCHS[kind] + ("_MOE" if kind == "nemotron_h" and "n_routed_experts" in config else ""))
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
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["layer_norm_epsilon"])
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention") or rope
    scaling = config.get("rope_scaling") or rope
    writer.add_rope_freq_base(config.get("rope_theta") or rope.get("rope_theta", 10000.0))
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
    if kind == "nemotron_h":
        write_nemotron(writer, config)
        tensors = of_nemotron(tensors, config)
    elif kind == "gemma4_text":
        write_gemma4(writer, config)
        tensors = of_gemma4(tensors, config)
    elif config.get("num_experts"):
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
        own = name.replace("backbone.", "model.").replace(f"model.layers.{layers}", "mtp.layers.0")
        if case in NVFP4 and stored.get(own, tensor).dtype == torch.uint8 and tensor.shape[1] % 64 == 0:
            new = names.get_name(name, try_suffixes=(".weight",))
            packed = nvfp4_blocks(stored, own, config).contiguous().numpy()
            writer.add_tensor(new, packed, raw_dtype=gguf.GGMLQuantizationType.NVFP4)
            scale = stored[own + "_scale_2"].reshape(1).numpy()
            writer.add_tensor(new.replace(".weight", ".scale"), scale)
            continue
        if own.endswith((".router.scale", ".router.per_expert_scale")):
            part = "ffn_gate_inp" if own.endswith(".router.scale") else "ffn_down_exps"
            writer.add_tensor(f"blk.{name.split('.')[2]}.{part}.scale", tensor.contiguous().numpy())
            continue
        if kind == "gpt_oss" and name.endswith("sinks"):
            name += ".weight"
        if kind == "gemma3_text" and name.endswith("norm.weight"):
            tensor = tensor + 1
        if kind == "mistral" and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = interleave(tensor, heads if "q_proj" in name else kv_heads)
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new, name
        if kind in BFLOAT16 and tensor.dim() == 2 and torch.equal(tensor.bfloat16().float(), tensor) and not own.endswith(VECTORS):
            packed = tensor.bfloat16().contiguous().view(torch.uint8).numpy()
            writer.add_tensor(new, packed, raw_dtype=gguf.GGMLQuantizationType.BF16)
            continue
        writer.add_tensor(new, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{case}: {(HERE / f'{case}.gguf').stat().st_size} bytes")


CASES = ["gemma3_wide", "qwen3moe_normalized", "phi3_longrope", "mistral_window", "gptoss_mxfp4", "qwen35_drafter", "qwen35moe_drafter",
         "qwen3next_shared", "nemotronh_dense", "nemotronh_experts", "gemma4_experts", "gemma4_perlayer"]
for case in sys.argv[1:] or CASES:
    make(case)
