"""Makes the model goldens: small seeded models in ModelOpt's NVFP4 layout, and the logits that transformers computes from
the same dequantized weights in f32. Run with torch, transformers, tokenizers and safetensors installed:

    python tests/golden/model/make.py [CASE ...]

Each case is a directory with config.json, model.safetensors and expected.safetensors: for each length L, `tokens_L` and
`logits_L` (of the last positions). The quantizer here is written from the format's description, not from this library.
"""

import copy
import json
import pathlib
import shutil
import sys

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = pathlib.Path(__file__).parent
MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# Midpoints between neighbours; a tie at an odd index's upper border goes up to the even code.
MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
TIES_UP = torch.tensor([False, True, False, True, False, True, False])


def quantize(w):
    """Codes (low nibble = even column), e4m3 scales and multiplier of a matrix, and the values they stand for."""
    rows, cols = w.shape
    blocks = w.reshape(rows, cols // 16, 16)
    multiplier = w.abs().max() / (448 * 6)
    scales = (blocks.abs().amax(-1) / 6 / multiplier).to(torch.float8_e4m3fn)
    x = blocks / (scales.float() * multiplier)[..., None]
    distance = x.abs()[..., None]
    code = ((distance > MIDPOINTS) | ((distance == MIDPOINTS) & TIES_UP)).sum(-1)
    values = MAGNITUDES[code] * x.sign() * scales.float()[..., None] * multiplier
    code = (code + 8 * ((x < 0) & (code > 0))).reshape(rows, cols).to(torch.uint8)
    packed = code[:, 0::2] | (code[:, 1::2] << 4)
    return packed, scales, multiplier.float(), values.reshape(rows, cols)


SMALL = dict(
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=150,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
)
MEDIUM = dict(
    SMALL,
    hidden_size=64,
    intermediate_size=96,
    head_dim=32,
    vocab_size=320,
)


def rope(**parameters):
    return dict(rope_parameters=parameters)


CASES = {
    "qwen3_tied": ("Qwen3", dict(MEDIUM, tie_word_embeddings=True, **rope(rope_theta=1e6, rope_type="default"))),
    "qwen3_untied": ("Qwen3", dict(SMALL, num_attention_heads=6, num_key_value_heads=3, tie_word_embeddings=False, **rope(rope_theta=5e6, rope_type="default"))),
    "qwen2_untied": ("Qwen2", dict(MEDIUM, head_dim=None, num_key_value_heads=1, tie_word_embeddings=False, **rope(rope_theta=1e6, rope_type="default"))),
    "qwen2_tied": ("Qwen2", dict(SMALL, hidden_size=64, head_dim=None, tie_word_embeddings=True, **rope(rope_theta=1e4, rope_type="default"))),
    "llama_tied": ("Llama", dict(SMALL, rms_norm_eps=1e-5, tie_word_embeddings=True, **rope(rope_theta=1e4, rope_type="default"))),
    "llama_biased": ("Llama", dict(SMALL, attention_bias=True, mlp_bias=True, num_key_value_heads=4, tie_word_embeddings=False, **rope(rope_theta=1e4, rope_type="default"))),
    "llama_llama3": ("Llama", dict(SMALL, tie_word_embeddings=False, **rope(
        rope_theta=5e5, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32))),
    "llama_linear": ("Llama", dict(SMALL, tie_word_embeddings=True, **rope(rope_theta=1e4, rope_type="linear", factor=4.0))),
    "qwen3_yarn": ("Qwen3", dict(SMALL, head_dim=32, tie_word_embeddings=True, **rope(
        rope_theta=1e4, rope_type="yarn", factor=4.0, original_max_position_embeddings=64))),
    "qwen2_yarn": ("Qwen2", dict(SMALL, hidden_size=64, head_dim=None, tie_word_embeddings=True, **rope(
        rope_theta=1e4, rope_type="yarn", factor=8.0, original_max_position_embeddings=32, attention_factor=0.9, beta_fast=16.0, beta_slow=2.0))),
}
GEMMA3 = dict(
    SMALL,
    intermediate_size=96,
    num_hidden_layers=4,
    sliding_window=8,
    query_pre_attn_scalar=24,
    hidden_activation="gelu_pytorch_tanh",
    layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    tie_word_embeddings=True,
    rope_parameters={
        "full_attention": dict(rope_theta=1e6, rope_type="linear", factor=8.0),
        "sliding_attention": dict(rope_theta=1e4, rope_type="default"),
    },
)
EXPERTS = dict(
    SMALL,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    norm_topk_prob=True,
    tie_word_embeddings=False,
    **rope(rope_theta=1e6, rope_type="default"),
)
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=1e4,
    short_factor=[1.0, 1.1, 1.2, 1.3, 1.5, 1.7],
    long_factor=[1.0, 2.0, 3.0, 5.0, 8.0, 13.0],
    original_max_position_embeddings=16,
)
PHI3 = dict(SMALL, tie_word_embeddings=False, pad_token_id=0, eos_token_id=1)
CASES.update({
    "gemma3_narrow": ("Gemma3", GEMMA3),
    "gemma3_wide": ("Gemma3", dict(GEMMA3, head_dim=256, num_attention_heads=2, num_key_value_heads=1, query_pre_attn_scalar=256)),
    "qwen3moe_normalized": ("Qwen3Moe", EXPERTS),
    "qwen3moe_mixed": ("Qwen3Moe", dict(
        EXPERTS, num_hidden_layers=3, num_experts_per_tok=3, norm_topk_prob=False, mlp_only_layers=[1], head_dim=32)),
    "mistral_window": ("Mistral", dict(SMALL, sliding_window=9, head_dim=32, tie_word_embeddings=False, **rope(rope_theta=1e4, rope_type="default"))),
    "mistral_plain": ("Mistral", dict(SMALL, sliding_window=None, head_dim=80, tie_word_embeddings=False, **rope(rope_theta=1e6, rope_type="default"))),
    "qwen2_window": ("Qwen2", dict(
        SMALL, hidden_size=64, head_dim=None, num_hidden_layers=3, use_sliding_window=True, sliding_window=6, max_window_layers=1,
        tie_word_embeddings=True, **rope(rope_theta=1e4, rope_type="default"))),
    "phi3_window": ("Phi3", dict(PHI3, head_dim=None, hidden_size=64, sliding_window=11, **rope(rope_theta=1e4, rope_type="default"))),
    "phi3_partial": ("Phi3", dict(PHI3, head_dim=None, hidden_size=128, sliding_window=None, **rope(
        rope_theta=1e4, rope_type="default", partial_rotary_factor=0.75))),
    "phi3_longrope": ("Phi3", dict(PHI3, head_dim=None, hidden_size=64, sliding_window=None, original_max_position_embeddings=16, **rope(
        **LONGROPE, partial_rotary_factor=0.75))),
    "llama_wide": ("Llama", dict(SMALL, head_dim=192, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True, **rope(rope_theta=1e4, rope_type="dynamic", factor=2.0))),
    "qwen3_uneven": ("Qwen3", dict(SMALL, head_dim=96, num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True, **rope(rope_theta=1e4, rope_type="default"))),
})
# Properties of published models that random ones lack: a token whose residual stream reaches 2e5, by an MLP activation of some millions;
# keys of 500, common to all positions, and scores of a thousand. Computed in f64.
CASES["qwen2_massive"] = ("Qwen2", dict(
    MEDIUM, head_dim=None, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=3, tie_word_embeddings=False,
    **rope(rope_theta=1e6, rope_type="default")))
MASSIVE = {"qwen2_massive"}
# New cases come last: the seed of a case is its number.
CASES["qwen2moe_shared"] = ("Qwen2Moe", dict(
    EXPERTS, head_dim=None, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, norm_topk_prob=False,
    shared_expert_intermediate_size=48))
# All layers of Qwen3's mixtures have the window, whatever max_window_layers says.
CASES["qwen3moe_window"] = ("Qwen3Moe", dict(
    EXPERTS, num_experts=4, moe_intermediate_size=16, intermediate_size=48, use_sliding_window=True, sliding_window=6, max_window_layers=28))
# The config is as transformers 5 saves it, without keys whose values are defaults.
CASES["qwen3moe_saved"] = ("Qwen3Moe", dict(
    EXPERTS, num_experts=4, moe_intermediate_size=16, intermediate_size=48, use_sliding_window=False, sliding_window=0))
CASES["qwen2moe_window"] = ("Qwen2Moe", dict(
    EXPERTS, head_dim=None, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, num_experts=4, moe_intermediate_size=16,
    intermediate_size=48, shared_expert_intermediate_size=32, num_hidden_layers=3, use_sliding_window=True, sliding_window=6, max_window_layers=2))
# Text models within larger ones: (names before the text model's, names before the head's, config around). The text model is computed alone.
CASES["smolvlm_nested"] = ("Llama", dict(SMALL, tie_word_embeddings=False, **rope(rope_theta=1e4, rope_type="default")))
CASES["mistral3_nested"] = ("Mistral", dict(
    SMALL, sliding_window=None, head_dim=32, tie_word_embeddings=True, **rope(rope_theta=1e4, rope_type="default")))
# Three layers of four have a recurrent state, which a gated delta rule updates, and a short convolution.
RECURRENT = dict(
    num_hidden_layers=4,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=32,
    linear_conv_kernel_dim=4,
)


def sections(*pairs):
    """The RoPE of published files: pairs that turn by time, height and width, which are one position in text."""
    return rope(mrope_interleaved=True, mrope_section=list(pairs), partial_rotary_factor=0.25, rope_theta=1e7, rope_type="default")


RECURRENT_EXPERTS = {**EXPERTS, **RECURRENT, "shared_expert_intermediate_size": 48}
CASES["qwen35_tied"] = ("Qwen3_5", {**MEDIUM, **RECURRENT, "tie_word_embeddings": True, **sections(2, 1, 1)})
# As published: within a larger model, beside layers that predict further tokens. `layer_types` says otherwise than the interval.
CASES["qwen35_nested"] = ("Qwen3_5", {
    **SMALL, **RECURRENT,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "layer_types": [["linear_attention", "full_attention"][i in (1, 4)] for i in range(6)],
    "full_attention_interval": 4,
    "attention_bias": False,
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "partial_rotary_factor": 0.25,
    "tie_word_embeddings": False,
    **sections(3, 3, 2),
})
# The class has neither a width of dense layers nor a choice of normalized weights.
CASES["qwen35moe_shared"] = ("Qwen3_5Moe", {
    **RECURRENT_EXPERTS, "intermediate_size": None, "norm_topk_prob": None, "full_attention_interval": 4, **sections(2, 1, 1)})
CASES["qwen3next_shared"] = ("Qwen3Next", {
    **RECURRENT_EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [], "full_attention_interval": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 16,
    **rope(rope_theta=1e7, rope_type="default", partial_rotary_factor=0.25)})
# Layer 3 alone is a mixture. The part of a head that RoPE turns is the default.
CASES["qwen3next_dense"] = ("Qwen3Next", {
    **RECURRENT_EXPERTS, "num_experts": 4, "norm_topk_prob": False, "mlp_only_layers": [1], "decoder_sparse_step": 2,
    "full_attention_interval": 2})
# Blocks of one half each: Mamba-2, attention without positions, and an MLP of a squared ReLU, or several of them.
MAMBA = dict(
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    layer_norm_epsilon=1e-6,
    chunk_size=32,
    tie_word_embeddings=False,
)
CASES["nemotronh_dense"] = ("NemotronH", {
    **MAMBA,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "vocab_size": 320,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 3,
    "use_bias": True,
    "mlp_bias": True,
})
# By the names and with the pattern of published files.
CASES["nemotronh_experts"] = ("NemotronH", {
    **MAMBA,
    "hidden_size": 48,
    "head_dim": 32,
    "vocab_size": 150,
    "hybrid_override_pattern": "MEM*E",
    "num_hidden_layers": 5,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 3,
    "ssm_state_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
})
PUBLISHED = {"nemotronh_experts"}
# Layer types in turn, a window smaller than the longest sequence, YaRN with a range that is not truncated, and a limit that some gates
# and ups reach.
GPT_OSS = dict(
    SMALL,
    intermediate_size=32,
    num_hidden_layers=3,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=6,
    swiglu_limit=1.5,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    **rope(
        rope_theta=150000.0, rope_type="yarn", factor=8.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
        original_max_position_embeddings=32),
)
CASES["gptoss_dense"] = ("GptOss", GPT_OSS)
CASES["gptoss_mxfp4"] = ("GptOss", dict(GPT_OSS, hidden_size=64, num_hidden_layers=2, head_dim=32))
CASES["gptoss_nvfp4"] = ("GptOss", dict(GPT_OSS, num_hidden_layers=2, num_key_value_heads=1, head_dim=32))
# Several formats in one file, as ModelOpt publishes larger versions of Qwen3.5: recurrent layers, their convolution included, and attention in
# float8 with a scale a tensor, experts in NVFP4 of 16-bit activations, and scales of a float8 cache.
CASES["qwen35moe_float8"] = ("Qwen3_5Moe", {
    **RECURRENT_EXPERTS, "intermediate_size": None, "norm_topk_prob": None, "full_attention_interval": 2, **sections(2, 1, 1)})
FLOAT8 = {"qwen35moe_float8": (".linear_attn.", ".self_attn.")}
# Layers with full attention have heads of their own size and number, whose keys are the values too, and turn an eighth of their pairs.
GEMMA4 = dict(
    SMALL,
    num_hidden_layers=4,
    layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    sliding_window=8,
    hidden_activation="gelu_pytorch_tanh",
    hidden_size_per_layer_input=0,
    tie_word_embeddings=True,
    rope_parameters={
        "full_attention": dict(rope_theta=1e6, rope_type="proportional", partial_rotary_factor=0.125),
        "sliding_attention": dict(rope_theta=1e4, rope_type="default"),
    },
)
CASES["gemma4_dense"] = ("Gemma4", dict(
    GEMMA4, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True, final_logit_softcapping=4.0))
# The last three layers take the keys and values of the last ones of their types before them, and have MLPs of twice the width. The config
# is as transformers 5 saves it, and the file holds keys that no layer reads, as published ones do.
CASES["gemma4_perlayer"] = ("Gemma4", dict(
    GEMMA4, num_hidden_layers=6, hidden_size_per_layer_input=32, vocab_size_per_layer_input=160, num_kv_shared_layers=3,
    use_double_wide_mlp=True,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    per_layer_config={"2": dict(head_dim=32), "5": dict(head_dim=32)}))
# A dense MLP and experts beside it, each with norms of their own.
CASES["gemma4_experts"] = ("Gemma4", dict(
    GEMMA4, num_hidden_layers=3, layer_types=["sliding_attention", "sliding_attention", "full_attention"], global_head_dim=32,
    num_global_key_value_heads=1, attention_k_eq_v=True, enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=32))
# Heads that kernels of a GPU take: the sizes of published models, and smaller ones.
CASES["gemma4_wide"] = ("Gemma4", dict(
    GEMMA4, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], head_dim=256, global_head_dim=512,
    num_global_key_value_heads=1, attention_k_eq_v=True, final_logit_softcapping=4.0))
CASES["gemma4_shared"] = ("Gemma4", dict(
    GEMMA4, num_hidden_layers=6, hidden_size_per_layer_input=32, vocab_size_per_layer_input=160, num_kv_shared_layers=3,
    use_double_wide_mlp=True, layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2, head_dim=32,
    per_layer_config={"2": dict(head_dim=64), "5": dict(head_dim=64)}))
CASES["gemma4_beside"] = ("Gemma4", dict(
    GEMMA4, num_hidden_layers=3, layer_types=["sliding_attention", "sliding_attention", "full_attention"], head_dim=32, global_head_dim=64,
    num_global_key_value_heads=1, attention_k_eq_v=True, enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=32))
# The first layer is dense; half of each head rotates.
GLM4_MOE = dict(
    SMALL,
    hidden_size=64,
    num_hidden_layers=3,
    head_dim=32,
    n_routed_experts=6,
    num_experts_per_tok=2,
    n_shared_experts=1,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    tie_word_embeddings=False,
    num_nextn_predict_layers=0,
)
CASES["glm4moe_biased"] = ("Glm4Moe", dict(
    GLM4_MOE, attention_bias=True, **rope(rope_theta=1e6, rope_type="default", partial_rotary_factor=0.5)))
# As published: the part that rotates is the default or beside the base, and a layer that drafts follows the others.
CASES["glm4moe_grouped"] = ("Glm4Moe", dict(
    GLM4_MOE, hidden_size=48, num_hidden_layers=2, use_qk_norm=True, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2,
    norm_topk_prob=False, routed_scaling_factor=2.5, n_shared_experts=2, moe_intermediate_size=16, num_nextn_predict_layers=1,
    **rope(rope_theta=1e6, rope_type="default")))
# Interleaved RoPE of half of each head; norms after each half of a block too.
GLM4 = dict(SMALL, num_key_value_heads=1, pad_token_id=0, eos_token_id=1, tie_word_embeddings=False)
CASES["glm4_biased"] = ("Glm4", dict(
    GLM4, hidden_size=64, head_dim=32, attention_bias=True, **rope(rope_theta=1e4, rope_type="default", partial_rotary_factor=0.5)))
# Whole heads rotate.
CASES["glm4_whole"] = ("Glm4", dict(
    GLM4, num_key_value_heads=2, attention_bias=False, **rope(rope_theta=1e4, rope_type="default", partial_rotary_factor=1.0)))
# Queries grow with their position, twice within the longest sequence.
MINISTRAL3 = dict(SMALL, tie_word_embeddings=False, **rope(
    type="yarn", rope_type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
    mscale_all_dim=1.0, llama_4_scaling_beta=0.1))
CASES["ministral3_tied"] = ("Ministral3", dict(MINISTRAL3, head_dim=32, tie_word_embeddings=True))
CASES["ministral3_nested"] = ("Ministral3", MINISTRAL3)
# Norms over all heads of queries and of keys, and experts by the names of Mixtral. The part of a head that rotates is given in elements.
MINIMAX_M2 = dict(
    SMALL,
    intermediate_size=32,
    num_local_experts=6,
    num_experts_per_tok=2,
    tie_word_embeddings=False,
    **rope(rope_theta=1e4, rope_type="default"),
)
CASES["minimaxm2_partial"] = ("MiniMaxM2", dict(MINIMAX_M2, head_dim=32, rotary_dim=16))
CASES["minimaxm2_whole"] = ("MiniMaxM2", dict(
    MINIMAX_M2, hidden_size=64, num_attention_heads=6, num_local_experts=4, num_experts_per_tok=3, num_hidden_layers=3))
NUMBERED = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}
# Both caps, and a window in every other layer.
GEMMA2 = dict(
    SMALL,
    num_hidden_layers=3,
    sliding_window=8,
    query_pre_attn_scalar=24,
    hidden_activation="gelu_pytorch_tanh",
    attn_logit_softcapping=2.0,
    final_logit_softcapping=4.0,
    tie_word_embeddings=True,
    **rope(rope_theta=1e4, rope_type="default"),
)
CASES["gemma2_wide"] = ("Gemma2", dict(
    GEMMA2, hidden_size=64, head_dim=256, num_attention_heads=2, num_key_value_heads=1, query_pre_attn_scalar=256))
CASES["gemma2_mixed"] = ("Gemma2", dict(
    GEMMA2, head_dim=32, layer_types=["full_attention", "full_attention", "sliding_attention"], final_logit_softcapping=None))
# Layers without positions, by their interval or listed, the latter with a window too.
SMOLLM3 = dict(SMALL, head_dim=None, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=3, pad_token_id=0)
CASES["smollm3_tied"] = ("SmolLM3", dict(
    SMOLLM3, num_hidden_layers=4, num_key_value_heads=2, tie_word_embeddings=True, **rope(rope_theta=2e6, rope_type="default")))
CASES["smollm3_listed"] = ("SmolLM3", dict(
    SMOLLM3, no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=8, attention_bias=True, mlp_bias=True,
    tie_word_embeddings=False, **rope(rope_theta=1e4, rope_type="default")))
# Biases of queries, keys and values, and of other projections.
SEED_OSS = dict(SMALL, tie_word_embeddings=False, **rope(rope_theta=1e6, rope_type="default"))
CASES["seedoss_biased"] = ("SeedOss", dict(SEED_OSS, head_dim=32, attention_bias=True))
CASES["seedoss_others"] = ("SeedOss", dict(SEED_OSS, attention_bias=False, attention_out_bias=True, mlp_bias=True))
# Neighbours rotate.
CASES["ernie45_biased"] = ("Ernie4_5", dict(
    SMALL, head_dim=32, use_bias=True, tie_word_embeddings=True, **rope(rope_theta=5e5, rope_type="default")))
CASES["ernie45_plain"] = ("Ernie4_5", dict(
    SMALL, num_key_value_heads=1, use_bias=False, tie_word_embeddings=False, **rope(rope_theta=1e4, rope_type="default")))
# Norms after each half of a block, and none before.
OLMO = dict(SMALL, head_dim=None, hidden_size=64, tie_word_embeddings=False, pad_token_id=0, eos_token_id=1)
CASES["olmo2_grouped"] = ("Olmo2", dict(OLMO, num_attention_heads=2, num_key_value_heads=1, **rope(rope_theta=5e5, rope_type="default")))
CASES["olmo2_tied"] = ("Olmo2", dict(
    OLMO, hidden_size=48, num_attention_heads=3, num_key_value_heads=3, attention_bias=True, tie_word_embeddings=True,
    **rope(rope_theta=1e4, rope_type="default")))
# Only layers that see everything have the scaling.
CASES["olmo3_window"] = ("Olmo3", dict(
    OLMO, num_attention_heads=2, num_hidden_layers=4, sliding_window=8,
    rope_parameters={
        "full_attention": dict(
            rope_type="yarn", rope_theta=5e5, factor=8.0, original_max_position_embeddings=32, attention_factor=1.2, beta_fast=32.0, beta_slow=1.0),
        "sliding_attention": dict(rope_type="default", rope_theta=5e5),
    }))
EXAONE4 = dict(SMALL, head_dim=32, tie_word_embeddings=True)
CASES["exaone4_plain"] = ("Exaone4", dict(
    EXAONE4, sliding_window=0, layer_types=["full_attention"] * 2, **rope(
        rope_theta=1e6, rope_type="llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)))
# Layers with a window rotate, and the other does not.
CASES["exaone4_mixed"] = ("Exaone4", dict(
    EXAONE4, num_hidden_layers=4, sliding_window=8, sliding_window_pattern=4, tie_word_embeddings=False, **rope(rope_theta=1e6, rope_type="default")))
# A window of 0 here is null in files.
NO_WINDOW = {"exaone4_plain"}
# Multipliers of embeddings, scores and residuals, and a divisor of logits.
GRANITE = dict(
    SMALL, head_dim=None, hidden_size=64, embedding_multiplier=6.0, attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=2.0,
    **rope(rope_theta=1e4, rope_type="default"))
CASES["granite_tied"] = ("Granite", dict(GRANITE, tie_word_embeddings=True))
CASES["granite_biased"] = ("Granite", dict(
    GRANITE, num_attention_heads=2, attention_bias=True, mlp_bias=True, num_hidden_layers=3, tie_word_embeddings=False))
# Norms of heads after their rotation, whose base `alpha` stretches.
HUNYUAN = dict(SMALL, pad_token_id=0)
CASES["hunyuan_alpha"] = ("HunYuanDenseV1", dict(
    HUNYUAN, head_dim=32, tie_word_embeddings=True, **rope(rope_theta=1e4, rope_type="dynamic", factor=1.0, alpha=50.0)))
CASES["hunyuan_biased"] = ("HunYuanDenseV1", dict(
    HUNYUAN, num_key_value_heads=1, attention_bias=True, tie_word_embeddings=False, **rope(rope_theta=1e4, rope_type="default")))
CASES["ministral_mixed"] = ("Ministral", dict(
    SMALL, num_hidden_layers=3, sliding_window=8, layer_types=["full_attention", "sliding_attention", "full_attention"],
    tie_word_embeddings=False, **rope(rope_theta=1e6, rope_type="default")))
MIXTRAL = dict(
    SMALL, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False, **rope(rope_theta=1e6, rope_type="default"))
CASES["mixtral_plain"] = ("Mixtral", dict(MIXTRAL, head_dim=32))
CASES["mixtral_window"] = ("Mixtral", dict(MIXTRAL, num_local_experts=6, num_experts_per_tok=3, sliding_window=8))
# GLM-4.5 without dense layers, whose whole heads rotate.
CASES["solaropen_yarn"] = ("SolarOpen", dict(
    SMALL, intermediate_size=None, head_dim=32, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=32,
    routed_scaling_factor=1.5, tie_word_embeddings=False, **rope(
        rope_theta=1e6, rope_type="yarn", factor=2.0, original_max_position_embeddings=128)))
# Families whose norms multiply by one more than the weight, but for the gated norm within a recurrent layer.
OFFSET_NORMS = {"Gemma2", "Gemma3", "Qwen3_5", "Qwen3_5Moe", "Qwen3Next"}
SAVED = {"qwen3moe_saved": ["rms_norm_eps", "max_position_embeddings", "transformers_version"]}
NESTED = {
    "smolvlm_nested": ("model.text_model.", "lm_head.", dict(model_type="smolvlm", architectures=["SmolVLMForConditionalGeneration"])),
    # The text model's own flag says that it is not tied; there is no head.
    "mistral3_nested": ("language_model.model.", "language_model.lm_head.", dict(
        model_type="mistral3", architectures=["Mistral3ForConditionalGeneration"], tie_word_embeddings=True)),
    "ministral3_nested": ("language_model.model.", "language_model.lm_head.", dict(
        model_type="mistral3", architectures=["Mistral3ForConditionalGeneration"], tie_word_embeddings=False)),
    "qwen35moe_float8": ("model.language_model.", "lm_head.", dict(
        model_type="qwen3_5_moe", architectures=["Qwen3_5MoeForConditionalGeneration"], tie_word_embeddings=False)),
    "gemma4_perlayer": ("model.language_model.", "lm_head.", dict(
        model_type="gemma4", architectures=["Gemma4ForConditionalGeneration"])),
    "qwen35_nested": ("model.language_model.", "lm_head.", dict(
        model_type="qwen3_5", architectures=["Qwen3_5ForConditionalGeneration"], image_token_id=147, video_token_id=148,
        vision_start_token_id=145, vision_end_token_id=146, tie_word_embeddings=False)),
}
VISION = {
    "qwen35_nested": dict(
        model_type="qwen3_5", depth=1, hidden_act="gelu_pytorch_tanh", hidden_size=16, in_channels=3, intermediate_size=32, num_heads=2,
        num_position_embeddings=4, out_hidden_size=48, patch_size=2, spatial_merge_size=2, temporal_patch_size=2,
        deepstack_visual_indexes=[]),
}
# In these the config is written with the words of older files.
OLD_WORDS = {"qwen2_untied", "llama_linear", "qwen2_yarn", "llama_llama3", "gemma3_narrow", "phi3_longrope", "qwen3next_shared", "glm4moe_grouped"}
# As families are called in classes and in `model_type`.
CONFIGS = {"Gemma3": "Gemma3TextConfig", "Gemma4": "Gemma4TextConfig", "Qwen3_5": "Qwen3_5TextConfig", "Qwen3_5Moe": "Qwen3_5MoeTextConfig"}
TYPES = {
    "Gemma3": "gemma3_text",
    "Gemma4": "gemma4_text",
    "Qwen3Moe": "qwen3_moe",
    "Qwen2Moe": "qwen2_moe",
    "Qwen3_5": "qwen3_5_text",
    "Qwen3_5Moe": "qwen3_5_moe_text",
    "Qwen3Next": "qwen3_next",
    "NemotronH": "nemotron_h",
    "GptOss": "gpt_oss",
    "Glm4Moe": "glm4_moe",
    "MiniMaxM2": "minimax_m2",
    "SeedOss": "seed_oss",
    "SolarOpen": "solar_open",
    "HunYuanDenseV1": "hunyuan_v1_dense",
}
LENGTHS = [7, 33]
# Recurrent layers take 64 tokens at once here: this is more.
RECURRENT_LENGTHS = [*LENGTHS, 100]
KEPT = 3
# Makes the exponents of neighbouring blocks differ by more than their values do.
EXPONENTS = torch.Generator().manual_seed(1)


def store_expert(stored, key, expert, w):
    """Stores what transformers stacks as files have it, a tensor to a projection; gives the values they stand for."""
    prefix, projection = key.rsplit(".", 1)
    parts = dict(zip(["gate_proj", "up_proj"], w.chunk(2))) if projection == "gate_up_proj" else {projection: w}
    values = []
    for part, matrix in parts.items():
        packed, scales, multiplier, held = quantize(matrix)
        name = f"{prefix}.{expert}.{part}.weight"
        stored[name] = packed
        stored[name + "_scale"] = scales
        stored[name + "_scale_2"] = multiplier
        values.append(held)
    return torch.cat(values)


def store_float8(stored, key, w):
    """Stores a tensor in float8 with one scale, beside what only runs of 8-bit activations and caches read; gives the values it stands for."""
    scale = w.abs().max() / 448
    codes = (w / scale).to(torch.float8_e4m3fn)
    stored[key] = codes
    stored[key + "_scale"] = scale
    stored[key.removesuffix("weight") + "input_scale"] = torch.tensor(0.01)
    for projection in ("k", "v"):
        if key.endswith(f".{projection}_proj.weight"):
            stored[key.removesuffix("weight") + f"{projection}_scale"] = torch.tensor(0.02)
    return codes.float() * scale


def mixed_precision(stored):
    """What ModelOpt's config says of the tensors of such a file."""
    layers = {}
    for key, tensor in stored.items():
        if key.endswith(".weight") and tensor.dtype == torch.float8_e4m3fn:
            layers[key.removesuffix(".weight")] = {"quant_algo": "FP8"}
        elif key.endswith(".weight") and tensor.dtype == torch.uint8:
            layers[key.removesuffix(".weight")] = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    return {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "ignore": ["mtp*", "*.mlp.gate", "*.shared_expert_gate"], "producer": {"name": "modelopt", "version": "0.45.0"},
        "quantized_layers": layers,
    }


def store_stack(name, stored, key, expert, w):
    """
    Stores an expert of gpt-oss, `[in features, out features]` as transformers has it, in the form of the case; gives the values.

    In 16 bits a stack is stored as transformers has it. Else rows are output features: two rows to a line of `gate_up_proj`, gate first.
    """
    if name == "gptoss_dense":
        w = w.bfloat16()
        stored.setdefault(key, []).append(w)
        return w.float()
    rows = w.T.contiguous()
    if name == "gptoss_mxfp4":
        blocks, scales, rows = quantize_mxfp4(rows)
        stored.setdefault(key + "_blocks", []).append(blocks)
        stored.setdefault(key + "_scales", []).append(scales)
    elif key.endswith("gate_up_proj"):
        held = store_expert(stored, key, expert, torch.cat([rows[0::2], rows[1::2]]))
        rows = torch.stack(held.chunk(2), 1).reshape(rows.shape)
    else:
        rows = store_expert(stored, key, expert, rows)
    return rows.T


def quantize_mxfp4(w):
    """Codes (low nibble = even column), exponents plus 127 of blocks of 32, and the values they stand for, of a matrix."""
    blocks = w.reshape(w.shape[0], -1, 32)
    exponents = (blocks.abs().amax(-1) / 6).log2().round() - torch.randint(0, 3, blocks.shape[:2], generator=EXPONENTS)
    power = 2.0 ** exponents[..., None]
    x = blocks / power
    code = (x.abs()[..., None] > MIDPOINTS).sum(-1)
    values = MAGNITUDES[code] * x.sign() * power
    code = (code + 8 * ((x < 0) & (code > 0))).to(torch.uint8)
    packed = code[..., 0::2] | (code[..., 1::2] << 4)
    return packed, (exponents + 127).to(torch.uint8), values.reshape(w.shape)


def unread(settings, config):
    """Keys and values of layers that take those of others: published files of Gemma 4 hold them."""
    found = {}
    for layer, mode in enumerate(config.kv_sharing_modes):
        if mode == "reuse":
            of_layer = config.per_layer_config[layer]
            shape = (of_layer.num_key_value_heads * of_layer.head_dim, settings["hidden_size"])
            for part, value in {"k_proj": torch.ones(shape), "v_proj": torch.ones(shape), "k_norm": torch.ones(of_layer.head_dim)}.items():
                found[f"model.layers.{layer}.self_attn.{part}.weight"] = value.bfloat16()
    return found


def drafting(settings):
    """Tensors of the layer after the last, which drafts, as published files of GLM-4.5 name them."""
    hidden, layer = settings["hidden_size"], f"model.layers.{settings['num_hidden_layers']}"
    vectors = ["enorm", "hnorm", "shared_head.norm", "input_layernorm", "self_attn.q_norm"]
    found = {f"{layer}.{part}.weight": torch.ones(hidden).bfloat16() for part in vectors}
    found[f"{layer}.eh_proj.weight"] = torch.ones(hidden, 2 * hidden).bfloat16()
    found[f"{layer}.mlp.experts.0.up_proj.weight"] = torch.ones(16, hidden).bfloat16()
    return found


def beside(name, settings, random):
    """Tensors of a larger model that are not its text model's."""
    if name == "gemma4_perlayer":
        parts = ["vision_tower.encoder.layers.0.mlp.up_proj.linear", "audio_tower.output_proj", "embed_vision.embedding_projection", "embed_audio.embedding_projection"]
        return {f"model.{part}.weight": torch.ones(16, 16).bfloat16() for part in parts}
    if name != "qwen35_nested":
        return {"model.connector.modality_projection.proj.weight": torch.ones(4, 16)}
    hidden, inner, width = settings["hidden_size"], settings["intermediate_size"], settings["head_dim"]
    heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    shapes = {
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.layers.0.input_layernorm.weight": (hidden,),
        "mtp.layers.0.mlp.down_proj.weight": (hidden, inner),
        "mtp.layers.0.mlp.gate_proj.weight": (inner, hidden),
        "mtp.layers.0.mlp.up_proj.weight": (inner, hidden),
        "mtp.layers.0.post_attention_layernorm.weight": (hidden,),
        "mtp.layers.0.self_attn.k_norm.weight": (width,),
        "mtp.layers.0.self_attn.k_proj.weight": (kv_heads * width, hidden),
        "mtp.layers.0.self_attn.o_proj.weight": (hidden, heads * width),
        "mtp.layers.0.self_attn.q_norm.weight": (width,),
        "mtp.layers.0.self_attn.q_proj.weight": (2 * heads * width, hidden),
        "mtp.layers.0.self_attn.v_proj.weight": (kv_heads * width, hidden),
        "mtp.norm.weight": (hidden,),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
        "model.visual.blocks.0.attn.qkv.weight": (48, 16),
        "model.visual.blocks.0.attn.qkv.bias": (48,),
        "model.visual.merger.linear_fc2.weight": (48, 64),
        "model.visual.patch_embed.proj.weight": (16, 3, 2, 2, 2),
        "model.visual.pos_embed.weight": (4, 16),
    }
    return {key: (0.2 * random(shape)).bfloat16() for key, shape in shapes.items()}


def nested(stored, prefix, head, found):
    """Adds tensors to the others of a larger model, by the names that they have there."""
    for key, value in stored.items():
        rest = key.removeprefix("model.")
        found[head + key.removeprefix("lm_head.") if rest == key else prefix + rest] = value
    return found


def make_massive(key, w, embeddings):
    """Changes a random weight so that the first of the embeddings becomes a massive activation in the first block."""
    direction = embeddings[1] / embeddings[1].norm()
    if key == "model.layers.0.mlp.gate_proj.weight" or key == "model.layers.0.mlp.up_proj.weight":
        w[0] = direction * 260
    elif key == "model.layers.0.mlp.down_proj.weight":
        w[0, 0] = 0.06
        w[1:, 0] *= 1e-5
    elif key.endswith("o_proj.weight") and ".0." in key:
        w *= 0.05
    elif key.endswith("k_proj.bias"):
        w[31] = 500
    elif key.endswith("q_proj.bias"):
        w[31::32] = 12
    return w


def recurrent(key, shape, random, uniform):
    """
    The values of a tensor of a recurrent layer that is not in 4 bits, and what is stored. None for other tensors.

    The gated norm divides what a head reads by its size. Convolutions of this size, and steps and gates of this one, leave few heads that
    read close to nothing, whose rounding errors the norm would raise to a thousandfold.
    """
    if key.endswith("A_log"):
        w = (0.5 + 7.5 * uniform(shape)).log()
        return w, w
    if key.endswith("dt_bias"):
        w = 4 * uniform(shape) - 2
    elif key.endswith("mixer.D"):
        w = random(shape)
    elif key.endswith("conv1d.weight"):
        w = random(shape)
    elif key.endswith(("in_proj_a.weight", "in_proj_b.weight", "in_proj_ba.weight")):
        w = random(shape) / shape[1] ** 0.5
    else:
        return None
    w = w.bfloat16()
    return w.float(), w


def check_steps(name, model, tokens, logits, kept):
    """
    Runs the tokens one by one. Chunks of tokens and single ones have different forms of the gated delta rule, and that of chunks has the
    larger rounding errors.
    """
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        rows = [model(token[None, None], cache=cache, use_cache=True).logits[0, 0] for token in tokens]
    difference = (torch.stack(rows) - logits).abs()
    largest = difference[-kept:].max().item()
    print(f"{name}: {len(tokens)} tokens one by one differ by {difference.max().item():.1e}, and in what is kept by {largest:.1e}")
    assert largest < 1e-4


def maxima(model, tokens):
    """The largest magnitudes that a run meets."""
    found = {}

    def note(what, x):
        found[what] = max(found.get(what, 0), x.abs().max().item())

    for layer in model.model.layers:
        layer.register_forward_hook(lambda m, i, o: note("residual", o[0] if isinstance(o, tuple) else o))
        layer.mlp.down_proj.register_forward_pre_hook(lambda m, i: note("between gate and down", i[0]))
        layer.self_attn.k_proj.register_forward_hook(lambda m, i, o: note("keys", o))
        layer.self_attn.q_proj.register_forward_hook(lambda m, i, o: note("queries", o))
    with torch.no_grad():
        model(tokens[None])
    return found


def make(name, family, settings, seed):
    """Makes a case, and returns the model of transformers with its weights."""
    settings = {k: v for k, v in settings.items() if v is not None}
    # A class adds defaults to `rope_parameters`. The config that is written has them, but not that of a model with recurrent layers, or with
    # a number of elements that rotate.
    given = copy.deepcopy(settings) if {"linear_conv_kernel_dim", "rotary_dim"} & set(settings) else settings
    config = getattr(transformers, CONFIGS.get(family, family + "Config"))(**given)
    config._attn_implementation = "eager"
    if name in NO_WINDOW:
        config.sliding_window = None
    generator = torch.Generator().manual_seed(seed)
    random = lambda shape: torch.randn(shape, generator=generator)
    uniform = lambda shape: torch.rand(shape, generator=generator)
    model = getattr(transformers, family + "ForCausalLM")(config).eval().float()
    if name in MASSIVE:
        model = model.double()
    stored = {}
    state = model.state_dict()
    for key, value in state.items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if key.endswith(("norm.weight", "norm_f.weight", "norm_1.weight", "norm_2.weight", "router.scale", "per_expert_scale")):
            is_offset = family in OFFSET_NORMS and not key.endswith("linear_attn.norm.weight")
            w = (0 if is_offset else 1) + 0.2 * random(value.shape)
            stored[key] = w
        elif key.endswith("router.proj.weight"):
            # Its rows of input have the length 1.
            w = (2.0 * random(value.shape)).bfloat16().float()
            stored[key] = w.bfloat16()
        elif "per_layer" in key:
            scale = 0.3 if "embed_tokens" in key else 2.0 / value.shape[1] ** 0.5
            w = (scale * random(value.shape)).bfloat16().float()
            stored[key] = w.bfloat16()
        elif key.endswith("layer_scalar"):
            w = (0.6 + 0.6 * uniform(value.shape)).bfloat16().float()
            stored[key] = w.bfloat16()
        elif found := recurrent(key, value.shape, random, uniform):
            w, stored[key] = found
            if name in FLOAT8 and key.endswith("weight"):
                w = store_float8(stored, key, w)
        elif key.endswith("e_score_correction_bias"):
            w = 0.2 * random(value.shape)
            stored[key] = w
        elif key.endswith(("mlp.gate.weight", "mlp.router.weight", "mixer.gate.weight", "shared_expert_gate.weight")):
            # Logits of about 2, as trained routers give: larger ones make the sum of experts hang on the last bits of their input.
            w = (random(value.shape) * (2.0 / value.shape[1] ** 0.5)).bfloat16().float()
            stored[key] = w.bfloat16()
        elif family == "GptOss" and ".experts." in key and value.dim() == 3:
            made = (random(part.shape) * (2.0 / part.shape[0] ** 0.5) for part in value)
            w = torch.stack([store_stack(name, stored, key, e, part) for e, part in enumerate(made)])
            stored.update({k: torch.stack(v) for k, v in stored.items() if isinstance(v, list)})
        elif key.endswith("self_attn.sinks"):
            w = random(value.shape).bfloat16().float()
            stored[key] = w.bfloat16()
        elif ".experts." in key and value.dim() == 3:
            w = torch.stack([store_expert(stored, key, e, random(part.shape) * (2.0 / part.shape[1] ** 0.5)) for e, part in enumerate(value)])
        elif key.endswith((".bias", "_bias")):
            w = 0.3 * random(value.shape)
            w = (make_massive(key, w, state["model.embed_tokens.weight"]) if name in MASSIVE else w).bfloat16().float()
            stored[key] = w.bfloat16()
        elif key in ("model.embed_tokens.weight", "model.embeddings.weight"):
            w = (random(value.shape) * 0.3).bfloat16().float()
            stored[key] = w.bfloat16()
        elif name in ("gptoss_dense", "gptoss_mxfp4"):
            w = (random(value.shape) * (2.0 / value.shape[1] ** 0.5)).bfloat16().float()
            stored[key] = w.bfloat16()
        else:
            scale = 1.0 if key.endswith(("linear_attn.out_proj.weight", "mixer.in_proj.weight", "mixer.out_proj.weight")) else 2.0
            w = random(value.shape) * (scale / value.shape[1] ** 0.5)
            w = make_massive(key, w, state["model.embed_tokens.weight"].float()) if name in MASSIVE else w
            if any(part in key for part in FLOAT8.get(name, ())):
                w = store_float8(stored, key, w)
            else:
                packed, scales, multiplier, w = quantize(w)
                stored[key] = packed
                stored[key + "_scale"] = scales
                stored[key + "_scale_2"] = multiplier
        value.copy_(w)
    expected = {}
    is_recurrent = "linear_attention" in (getattr(config, "layer_types", None) or [])
    for length in RECURRENT_LENGTHS if is_recurrent else LENGTHS:
        tokens = torch.randint(0, config.vocab_size, (length,), generator=generator)
        if name in MASSIVE:
            tokens[0] = 1
            print(name, maxima(model, tokens))
        with torch.no_grad():
            logits = model(tokens[None]).logits[0].float()
        kept = length if length < 10 and "tied" in name else KEPT
        if is_recurrent:
            check_steps(name, model, tokens, logits, kept)
        expected[f"tokens_{length}"] = tokens
        expected[f"logits_{length}"] = logits[-kept:].contiguous()

    out = HERE / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    if name == "gemma4_perlayer":
        stored.update(unread(settings, config))
    if settings.get("num_nextn_predict_layers"):
        stored.update(drafting(settings))
    if name in NESTED:
        stored = nested(stored, *NESTED[name][:2], beside(name, settings, random))
    if family in ("MiniMaxM2", "Mixtral"):
        for part, published in NUMBERED.items():
            stored = {key.replace(part, published): value for key, value in stored.items()}
    if name in PUBLISHED:
        stored = {key.replace("model.", "backbone.", 1): value for key, value in stored.items()}
    save_file(stored, out / "model.safetensors")
    save_file(expected, out / "expected.safetensors")
    written = {"architectures": [family + "ForCausalLM"], "model_type": TYPES.get(family, family.lower()), "hidden_act": "silu", **settings}
    if "hidden_activation" in written or family == "NemotronH":
        del written["hidden_act"]
    if name in NO_WINDOW:
        written["sliding_window"] = None
    if name in OLD_WORDS:
        parameters = dict(written.pop("rope_parameters"))
        if "full_attention" in parameters:
            written["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
            parameters = dict(parameters["full_attention"])
            del written["layer_types"]
            written["sliding_window_pattern"] = 3
        if "partial_rotary_factor" in parameters:
            written["partial_rotary_factor"] = parameters.pop("partial_rotary_factor")
        written["rope_theta"] = parameters.pop("rope_theta")
        kind = parameters.pop("rope_type")
        written["rope_scaling"] = {("type" if kind == "linear" else "rope_type"): kind, **parameters} if parameters else None
    if name in SAVED:
        config.architectures = written["architectures"]
        written = {k: v for k, v in config.to_diff_dict().items() if k not in SAVED[name]}
        written["sliding_window"] = settings["sliding_window"]
    if name == "gptoss_mxfp4":
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        written["quantization_config"] = {"modules_to_not_convert": kept, "quant_method": "mxfp4"}
    if name in NESTED:
        if "tie_word_embeddings" in NESTED[name][2]:
            written["tie_word_embeddings"] = False
        del written["architectures"]
        written = {**NESTED[name][2], "text_config": written, "vision_config": VISION.get(name, {"hidden_size": 32})}
    if name in FLOAT8:
        written["quantization_config"] = mixed_precision(stored)
    (out / "config.json").write_text(json.dumps(written, indent=1) + "\n")
    spread = expected[f"logits_{LENGTHS[-1]}"].std().item()
    print(f"{name}: logits vary by {spread:.2f}, {(out / 'model.safetensors').stat().st_size} bytes")
    return model


TEXT = """The quick brown fox jumps over the lazy dog. Hello, world! How are you today? I am fine, thank you.
The user asks the assistant and the assistant answers the user. What is the name of the thing that you see here?"""


def make_text(out):
    """A byte-level tokenizer with the marks of ChatML, for the first case."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=316,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    (out / "generation_config.json").write_text('{"eos_token_id": [2, 0]}\n')


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    wanted = sys.argv[1:] or CASES
    for seed, (name, (family, settings)) in enumerate(CASES.items(), start=1):
        if name in wanted:
            make(name, family, settings, seed)
    if "qwen3_tied" in wanted:
        make_text(HERE / "qwen3_tied")
