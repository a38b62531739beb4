"""Writes families.json: what transformers' own config classes say about the families that this library runs. The tables of
`src/model/families` are compared with it. Run with transformers installed:

    python tests/golden/families/make.py

Its parts. `families`: the defaults of each config class, and its `attribute_map`. `outer`: the models of text, pictures and sound
whose text model may be of one of the families, with its `model_type` and their default of `tie_word_embeddings`. `probes`: configs that
leave keys out or have them in unusual words, to be added to `small`, and what the class makes of them.
"""

import dataclasses
import json
import logging
import pathlib

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

logging.disable(logging.WARNING)

FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2_moe",
    "qwen3_moe": "qwen3_moe",
    "mistral": "mistral",
    "ministral3": "ministral3",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_next": "qwen3_next",
    "nemotron_h": "nemotron_h",
    "gpt_oss": "gpt_oss",
    "gemma4": "gemma4_text",
    "glm4": "glm4",
    "glm4_moe": "glm4_moe",
    "minimax_m2": "minimax_m2",
    "smollm3": "smollm3",
    "seed_oss": "seed_oss",
    "ernie4_5": "ernie4_5",
    "olmo2": "olmo2",
    "olmo3": "olmo3",
    "exaone4": "exaone4",
    "hunyuan_v1_dense": "hunyuan_v1_dense",
    "granite": "granite",
    "ministral": "ministral",
    "mixtral": "mixtral",
    "solar_open": "solar_open",
}
# Keys of training, of caches and of what a call returns; and token ids, which the tokenizer and generation_config.json name.
IGNORED = {
    "initializer_range", "use_cache", "router_jitter_noise", "residual_dropout", "eod_token_id", "pretraining_tp", "attention_dropout", "resid_pdrop", "embd_pdrop",
    "output_router_logits", "router_aux_loss_coef", "pad_token_id", "bos_token_id", "eos_token_id",
    # Nemotron-H's keys of fresh weights, kernels, precisions and layers that draft, and those that its class does not read.
    "num_logits_to_keep", "use_mamba_kernels", "expand", "time_step_min", "time_step_max", "time_step_floor", "chunk_size", "mamba_proj_bias",
    "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "num_nextn_predict_layers", "mtp_layers_block_type", "residual_in_fp32",
    "hidden_dropout", "rescale_prenorm_residual",
}
BASE = {field.name for field in dataclasses.fields(PreTrainedConfig)}


def tagged(value):
    """Infinity as transformers writes it."""
    if isinstance(value, (list, tuple)):
        return [tagged(v) for v in value]
    return {"__float__": "Infinity"} if value == float("inf") else value


def family(model_type):
    config = CONFIG_MAPPING[model_type]
    fields = {f.name: f.default for f in dataclasses.fields(config)}
    own = {k: tagged(v) for k, v in fields.items() if k not in BASE - {"tie_word_embeddings"} and k not in IGNORED}
    return {"defaults": own, "renamed": dict(config.attribute_map)}


def outer():
    found = {}
    for name in sorted(CONFIG_MAPPING.keys()):
        config = CONFIG_MAPPING[name]
        text = (getattr(config, "sub_configs_defaults", None) or {}).get("text_config")
        if text and text.model_type in FAMILIES.values():
            tied = {f.name: f.default for f in dataclasses.fields(config)}.get("tie_word_embeddings")
            found[name] = {"text": text.model_type, "tied": bool(tied)}
    return found


SMALL = dict(hidden_size=512, num_attention_heads=32, num_hidden_layers=6, intermediate_size=96, vocab_size=320)
COMMON = [
    {},
    dict(num_key_value_heads=2, head_dim=32),
    dict(rope_theta=5e5, rms_norm_eps=1e-5),
    dict(tie_word_embeddings=True),
    dict(sliding_window=16),
]
PROBES = {
    "llama": COMMON + [dict(rope_parameters=dict(rope_theta=3e4, rope_type="default"))],
    "mistral": COMMON + [dict(sliding_window=None), dict(sliding_window=0)],
    "phi3": COMMON + [dict(sliding_window=None), dict(sliding_window=0), dict(partial_rotary_factor=0.5)],
    "qwen2": COMMON,
    "qwen3": COMMON,
    "qwen2_moe": COMMON,
    "qwen3_moe": COMMON,
    "gemma3": COMMON + [
        dict(sliding_window=16, sliding_window_pattern=3),
        dict(rope_scaling=dict(rope_type="linear", factor=8.0), rope_local_base_freq=2e4),
        dict(rope_parameters=dict(full_attention=dict(rope_type="default", rope_theta=7e5))),
    ],
}
for kind in ["qwen2", "qwen3", "qwen2_moe", "qwen3_moe"]:
    PROBES[kind] = PROBES[kind] + [
        dict(use_sliding_window=True),
        dict(use_sliding_window=True, sliding_window=16),
        dict(use_sliding_window=True, sliding_window=16, max_window_layers=3),
        dict(use_sliding_window=False, sliding_window=16, max_window_layers=3),
        dict(use_sliding_window=False, sliding_window=0),
    ]
for kind in ["qwen2_moe", "qwen3_moe"]:
    PROBES[kind] = PROBES[kind] + [
        dict(num_experts=12, num_experts_per_tok=3, decoder_sparse_step=2),
        dict(num_experts=12, mlp_only_layers=[1, 4], norm_topk_prob=True),
    ]
PROBES["qwen3_moe"] = PROBES["qwen3_moe"] + [dict(num_local_experts=12)]
for kind in ["qwen2", "qwen3", "qwen2_moe"]:
    types = ["sliding_attention", "full_attention"] * 3
    PROBES[kind] = PROBES[kind] + [dict(use_sliding_window=True, sliding_window=16, layer_types=types)]


RECURRENT = ["qwen3_5", "qwen3_5_moe", "qwen3_next"]
TYPES = ["linear_attention", "full_attention", "full_attention", "linear_attention", "full_attention", "linear_attention"]
for kind in RECURRENT:
    PROBES[kind] = COMMON + [
        dict(full_attention_interval=2),
        dict(layer_types=TYPES, full_attention_interval=2),
        dict(partial_rotary_factor=0.5, rope_theta=1e7),
        dict(rope_parameters=dict(rope_theta=1e7, rope_type="default")),
        dict(rope_parameters=dict(rope_theta=1e7, rope_type="default", partial_rotary_factor=0.125)),
        dict(linear_num_key_heads=4, linear_num_value_heads=12, linear_key_head_dim=64, linear_value_head_dim=32, linear_conv_kernel_dim=3),
    ]
for kind in ["qwen3_5", "qwen3_5_moe"]:
    mrope = dict(mrope_interleaved=True, mrope_section=[2, 1, 1], partial_rotary_factor=0.25, rope_theta=1e7, rope_type="default")
    PROBES[kind] = PROBES[kind] + [dict(head_dim=32, rope_parameters=mrope, partial_rotary_factor=0.25, attn_output_gate=True)]
for kind in ["qwen3_5_moe", "qwen3_next"]:
    PROBES[kind] = PROBES[kind] + [dict(num_experts=12, num_experts_per_tok=3)]
# A class without these keys has a mixture in each layer, of normalized weights, whatever the file says.
sparse = dict(num_experts=12, mlp_only_layers=[1, 4], norm_topk_prob=False)
PROBES["qwen3_5_moe"] = PROBES["qwen3_5_moe"] + [sparse]
PROBES["qwen3_next"] = PROBES["qwen3_next"] + [sparse, dict(num_experts=12, decoder_sparse_step=2)]


types = ["full_attention", "sliding_attention", "full_attention", "full_attention", "sliding_attention", "sliding_attention"]
PROBES["gpt_oss"] = COMMON + [
    dict(sliding_window=16, layer_types=types),
    dict(num_local_experts=12, num_experts_per_tok=3),
    dict(num_experts=12),
    dict(rope_scaling=dict(rope_type="yarn", factor=8.0, truncate=False, original_max_position_embeddings=4096)),
    dict(rope_parameters=dict(rope_type="default")),
]


types = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
PROBES["gemma4"] = COMMON + [
    dict(sliding_window=16, layer_types=types),
    dict(num_key_value_heads=2, head_dim=32, global_head_dim=64, num_global_key_value_heads=1, attention_k_eq_v=True),
    dict(num_global_key_value_heads=1),
    dict(layer_types=types, num_kv_shared_layers=2, hidden_size_per_layer_input=0),
    dict(per_layer_config={"5": dict(head_dim=64, num_key_value_heads=2)}),
    dict(enable_moe_block=True, num_experts=12, top_k_experts=3, moe_intermediate_size=32),
    dict(rope_parameters=dict(
        full_attention=dict(rope_type="proportional", rope_theta=3e5, partial_rotary_factor=0.5),
        sliding_attention=dict(rope_type="default", rope_theta=2e4))),
]


PROBES["ministral3"] = [probe for probe in COMMON if "rope_theta" not in probe] + [
    dict(rope_parameters=dict(rope_type="yarn", rope_theta=3e4, factor=8.0, original_max_position_embeddings=4096, llama_4_scaling_beta=0.2)),
]
PROBES["gemma2"] = COMMON + [
    dict(sliding_window=16, layer_types=["full_attention", "full_attention", "sliding_attention"] * 2),
    dict(attn_logit_softcapping=None, final_logit_softcapping=12.0),
]
PROBES["smollm3"] = COMMON + [
    dict(num_attention_heads=16, use_sliding_window=True, sliding_window=16),
    dict(no_rope_layers=[0, 1, 1, 0, 1, 1], use_sliding_window=True, sliding_window=16),
    dict(layer_types=["full_attention", "sliding_attention"] * 3, use_sliding_window=True, sliding_window=16),
]
PROBES["seed_oss"] = COMMON + [dict(num_key_value_heads=None), dict(head_dim=None)]
PROBES["ernie4_5"] = COMMON + [dict(num_key_value_heads=None), dict(head_dim=None)]
PROBES["olmo2"] = COMMON + [dict(num_key_value_heads=None)]
PROBES["olmo3"] = COMMON + [
    dict(sliding_window=16, layer_types=["full_attention", "sliding_attention"] * 3),
    dict(rope_theta=3e5, rope_scaling=dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=512)),
]
PROBES["exaone4"] = COMMON + [
    dict(sliding_window=16, sliding_window_pattern=3),
    dict(sliding_window=None, layer_types=["full_attention"] * 6),
    dict(sliding_window=16, sliding_window_pattern="LG", layer_types=["sliding_attention", "full_attention"] * 3),
]
PROBES["granite"] = COMMON + [dict(num_key_value_heads=None)]
PROBES["hunyuan_v1_dense"] = COMMON + [dict(num_key_value_heads=None)]
PROBES["ministral"] = COMMON + [dict(sliding_window=16, layer_types=["full_attention", "sliding_attention"] * 3), dict(sliding_window=None)]
PROBES["mixtral"] = COMMON + [dict(num_local_experts=12, num_experts_per_tok=3), dict(num_experts=12)]
PROBES["solar_open"] = COMMON + [dict(n_routed_experts=12, num_experts_per_tok=3), dict(norm_topk_prob=False)]
PROBES["minimax_m2"] = COMMON + [
    dict(rotary_dim=64),
    dict(rotary_dim=16, head_dim=32, rope_theta=1e4),
    dict(partial_rotary_factor=0.25),
    dict(num_local_experts=12, num_experts_per_tok=3),
    dict(num_experts=12),
]
PROBES["glm4"] = COMMON + [
    dict(partial_rotary_factor=0.25),
    dict(partial_rotary_factor=1.0),
    dict(rope_parameters=dict(rope_theta=3e4, rope_type="default")),
]
PROBES["glm4_moe"] = COMMON + [
    dict(n_routed_experts=12, num_experts_per_tok=3, first_k_dense_replace=3),
    dict(num_local_experts=12, norm_topk_prob=False),
    dict(partial_rotary_factor=0.25),
    dict(rope_parameters=dict(rope_theta=3e4, rope_type="default")),
    dict(rope_scaling=None, rope_theta=3e4),
]


for kind in ["llama", "phi3", "qwen2", "qwen3"]:
    PROBES[kind] = PROBES[kind] + [dict(num_key_value_heads=None)]


def thetas(config):
    """The bases of layers that see everything and of those with a window."""
    rope = config.rope_parameters
    full, sliding = rope.get("full_attention", rope), rope.get("sliding_attention", rope)
    return [full["rope_theta"], sliding["rope_theta"]]


def resolved(model_type, probe):
    """What the class makes of a probe, by the rules of its modeling code."""
    config = CONFIG_MAPPING[model_type](**json.loads(json.dumps({**SMALL, **probe})))
    layers = config.num_hidden_layers
    heads = config.num_attention_heads
    fields = {f.name for f in dataclasses.fields(config)}
    # A class without the field has no window, whatever the file says. 0 is none in files; as a window it would hide every position.
    has_window = "sliding_window" in fields
    window = (config.sliding_window or None) if has_window else None
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    by_layer = list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config] * layers
    out = {
        "head_dim": getattr(by_layer[0], "head_dim", None) or config.hidden_size // heads,
        "kv_heads": by_layer[0].num_key_value_heads,
        "eps": config.rms_norm_eps,
        "max_positions": config.max_position_embeddings,
        "tied": config.tie_word_embeddings,
        "thetas": thetas(config),
        "windows": [window if kind == "sliding_attention" else None for kind in types],
    }
    if "num_kv_shared_layers" in fields:
        # Key/value heads and their size; and whether a layer takes those of an earlier one.
        out["heads"] = [[c.num_key_value_heads, c.head_dim] for c in by_layer]
        out["shared"] = [mode == "reuse" for mode in config.kv_sharing_modes]
        out["width_per_layer"] = config.hidden_size_per_layer_input
    if "linear_num_key_heads" in fields:
        out["recurrent"] = [kind == "linear_attention" for kind in types]
        # Key heads and their width, value heads and their width, and the convolution's.
        keys = ["num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim", "conv_kernel_dim"]
        out["state"] = [getattr(config, "linear_" + key) for key in keys]
        out["rotary_dim"] = int(out["head_dim"] * config.rope_parameters["partial_rotary_factor"])
    if "no_rope_layers" in fields:
        out["rotates"] = [bool(rotates) for rotates in config.no_rope_layers]
        window = window if config.use_sliding_window else None
        out["windows"] = [window if kind == "sliding_attention" else None for kind in types]
    if model_type == "exaone4":
        out["rotates"] = [config.sliding_window is None or kind == "sliding_attention" for kind in types]
    if "attn_logit_softcapping" in fields:
        out["caps"] = [config.attn_logit_softcapping, config.final_logit_softcapping]
    if "llama_4_scaling_beta" in config.rope_parameters:
        out["growth"] = [config.rope_parameters[key] for key in ("llama_4_scaling_beta", "original_max_position_embeddings")]
    if "partial_rotary_factor" in config.rope_parameters:
        out["rotary_dim"] = int(out["head_dim"] * config.rope_parameters["partial_rotary_factor"])
    if "first_k_dense_replace" in fields:
        out["experts"] = [0 if i < config.first_k_dense_replace else config.n_routed_experts for i in range(layers)]
        out["experts_per_token"] = config.num_experts_per_tok
        out["normalized"] = config.norm_topk_prob
    elif "n_routed_experts" in fields:
        out["experts"] = [config.n_routed_experts] * layers
        out["experts_per_token"] = config.num_experts_per_tok
        out["normalized"] = config.norm_topk_prob
    elif "num_local_experts" in fields and "decoder_sparse_step" not in fields:
        out["experts"] = [config.num_local_experts] * layers
        out["experts_per_token"] = config.num_experts_per_tok
        out["normalized"] = True
    elif "enable_moe_block" in fields:
        if config.enable_moe_block:
            out["experts"] = [config.num_experts] * layers
            out["experts_per_token"] = config.top_k_experts
            out["normalized"] = True
    elif "num_experts" in fields and "decoder_sparse_step" not in fields:
        out["experts"] = [config.num_experts] * layers
        out["experts_per_token"] = config.num_experts_per_tok
        out["normalized"] = True
    elif hasattr(config, "decoder_sparse_step"):
        out["experts"] = [
            0 if i in config.mlp_only_layers or (i + 1) % config.decoder_sparse_step else config.num_experts
            for i in range(layers)
        ]
        out["experts_per_token"] = config.num_experts_per_tok
        out["normalized"] = config.norm_topk_prob
    return out


def main():
    written = {
        "made_by": {"transformers": transformers.__version__},
        "families": {name: family(kind) for name, kind in FAMILIES.items()},
        "outer": outer(),
        "small": SMALL,
        "probes": [
            {"family": name, "config": probe, "resolved": resolved(FAMILIES[name], probe)}
            for name, probes in PROBES.items()
            for probe in probes
        ],
    }
    path = pathlib.Path(__file__).with_name("families.json")
    parts = []
    for name, part in written.items():
        items = [json.dumps(v) for v in part] if isinstance(part, list) else [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in part.items()]
        left, right = "[]" if isinstance(part, list) else "{}"
        parts.append(f' {json.dumps(name)}: {left}\n  ' + ",\n  ".join(items) + f"\n {right}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    print(f"{path}: {path.stat().st_size} bytes, {len(written['probes'])} probes")


if __name__ == "__main__":
    main()
