//! `nvfp4 synth`: writes a model of a known shape with seeded random NVFP4 weights, for benchmarks. Its answers are meaningless; its
//! activations stay in a sane range.

use std::path::PathBuf;

use NVFP4::base::Result;
use NVFP4::base::error::bail;
use NVFP4::checkpoint::{Encoding, Metadata, ModelOptWriter, Planned, TokenizerSource, Writer};
use NVFP4::format::nvfp4::BLOCK;
use NVFP4::format::random;
use NVFP4::model::tensors::{self, TensorRole};
use NVFP4::model::{Spec, families};
use clap::ValueEnum;
use serde_json::{Value, json};

use super::{model, output};
use NVFP4::tensor::DType;

#[derive(clap::Args)]
pub(super) struct Args {
    /// The shape
    #[arg(long, value_enum)]
    arch: Arch,
    /// The directory to write
    #[arg(long)]
    out: PathBuf,
    /// Replace the model in the directory, with everything in it, once the new one is complete; without it a directory that
    /// is not empty is refused
    #[arg(long)]
    force: bool,
    /// Let the output head be the embedding, as in the smaller ones of the published models; without it, it is a tensor of its own
    #[arg(long)]
    tied: bool,
    /// Write a drafter too, for the shapes of Qwen3.5 and 3.6; its drafts are never right
    #[arg(long)]
    drafter: bool,
    /// The seed of the weights
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Arch {
    #[value(name = "tiny")]
    Tiny,
    #[value(name = "qwen3-0.6b")]
    Qwen3_0_6B,
    #[value(name = "qwen3-1.7b")]
    Qwen3_1_7B,
    #[value(name = "qwen3-4b")]
    Qwen3_4B,
    #[value(name = "qwen3-8b")]
    Qwen3_8B,
    #[value(name = "qwen3-30b-a3b")]
    Qwen3_30BA3B,
    #[value(name = "gemma3-4b")]
    Gemma3_4B,
    #[value(name = "qwen3.5-4b")]
    Qwen35_4B,
    #[value(name = "qwen3.6-35b-a3b")]
    Qwen36_35BA3B,
    #[value(name = "nemotron-3-nano-30b-a3b")]
    Nemotron3Nano30BA3B,
    #[value(name = "gpt-oss-20b")]
    GptOss20B,
    #[value(name = "gpt-oss-120b")]
    GptOss120B,
    #[value(name = "gemma-4-e2b")]
    Gemma4E2B,
    #[value(name = "gemma-4-e4b")]
    Gemma4E4B,
    #[value(name = "gemma-4-26b-a4b")]
    Gemma4_26BA4B,
    #[value(name = "gemma-4-31b")]
    Gemma4_31B,
    #[value(name = "glm-4-9b")]
    Glm4_9B,
    #[value(name = "glm-4.5-air")]
    Glm45Air,
    #[value(name = "minimax-m2")]
    MiniMaxM2,
}

impl Arch {
    /// The config of a published model of this shape, except for whether its output head is a separate tensor.
    fn config(self) -> Value {
        let qwen3 = |hidden, layers, heads, intermediate| {
            json!({
                "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": hidden,
                "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128,
                "intermediate_size": intermediate, "vocab_size": 151_936, "hidden_act": "silu", "attention_bias": false,
                "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "rope_scaling": null,
                "torch_dtype": "bfloat16"
            })
        };
        let with = |mut config: Value, changes: Value| {
            for (key, value) in changes.as_object().into_iter().flatten() {
                config[key] = value.clone();
            }
            config
        };
        let qwen35 = json!({
            "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 2560,
            "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
            "intermediate_size": 9216, "vocab_size": 248_320, "hidden_act": "silu", "attention_bias": false,
            "attn_output_gate": true, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "max_position_embeddings": 262_144, "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25,
                "mrope_interleaved": true, "mrope_section": [11, 11, 10]
            },
            "torch_dtype": "bfloat16"
        });
        let gpt_oss = |layers, experts| {
            json!({
                "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880,
                "num_hidden_layers": layers, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
                "intermediate_size": 2880, "vocab_size": 201_088, "hidden_act": "silu", "attention_bias": true,
                "num_local_experts": experts, "num_experts_per_tok": 4, "swiglu_limit": 7.0, "sliding_window": 128,
                "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0,
                "rope_scaling": {
                    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
                    "original_max_position_embeddings": 4096
                },
                "eos_token_id": 200_002, "torch_dtype": "bfloat16"
            })
        };
        // One layer of `pattern` has full attention.
        let gemma4 = |pattern, sizes: Value| {
            let common = json!({
                "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "head_dim": 256, "global_head_dim": 512,
                "vocab_size": 262_144, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 1024,
                "hidden_size_per_layer_input": 0, "max_position_embeddings": 262_144, "rms_norm_eps": 1e-6,
                "final_logit_softcapping": 30.0, "attention_bias": false,
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25
                    },
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}
                },
                "eos_token_id": [1, 106], "torch_dtype": "bfloat16"
            });
            let mut config = with(common, sizes);
            let layers = config["num_hidden_layers"].as_u64().unwrap_or(0);
            let kind = |layer: u64| match layer.is_multiple_of(pattern) {
                true => "full_attention",
                false => "sliding_attention",
            };
            config["layer_types"] = (1..=layers).map(kind).collect();
            config
        };
        match self {
            Arch::Gemma4E2B => gemma4(
                5,
                json!({
                    "hidden_size": 1536, "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 1,
                    "intermediate_size": 6144, "num_kv_shared_layers": 20, "use_double_wide_mlp": true,
                    "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144, "sliding_window": 512,
                    "max_position_embeddings": 131_072
                }),
            ),
            Arch::Gemma4E4B => gemma4(
                6,
                json!({
                    "hidden_size": 2560, "num_hidden_layers": 42, "num_attention_heads": 8, "num_key_value_heads": 2,
                    "intermediate_size": 10_240, "num_kv_shared_layers": 18, "hidden_size_per_layer_input": 256,
                    "vocab_size_per_layer_input": 262_144, "sliding_window": 512, "max_position_embeddings": 131_072
                }),
            ),
            Arch::Gemma4_26BA4B => gemma4(
                6,
                json!({
                    "hidden_size": 2816, "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8,
                    "num_global_key_value_heads": 2, "attention_k_eq_v": true, "intermediate_size": 2112,
                    "enable_moe_block": true, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704
                }),
            ),
            Arch::Gemma4_31B => gemma4(
                6,
                json!({
                    "hidden_size": 5376, "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16,
                    "num_global_key_value_heads": 4, "attention_k_eq_v": true, "intermediate_size": 21_504
                }),
            ),
            Arch::Glm4_9B => json!({
                "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "hidden_size": 4096, "num_hidden_layers": 40,
                "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5,
                "intermediate_size": 13_696, "vocab_size": 151_552, "hidden_act": "silu", "attention_bias": true,
                "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "torch_dtype": "bfloat16"
            }),
            Arch::Glm45Air => json!({
                "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_size": 4096,
                "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
                "partial_rotary_factor": 0.5, "intermediate_size": 10_944, "vocab_size": 151_552, "hidden_act": "silu",
                "attention_bias": true, "use_qk_norm": false, "first_k_dense_replace": 1, "n_routed_experts": 128,
                "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 1408, "n_group": 1,
                "topk_group": 1, "norm_topk_prob": true, "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 0,
                "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0,
                "rope_scaling": null, "torch_dtype": "bfloat16"
            }),
            Arch::MiniMaxM2 => json!({
                "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "hidden_size": 3072,
                "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64,
                "intermediate_size": 1536, "vocab_size": 200_064, "hidden_act": "silu", "num_local_experts": 256,
                "num_experts_per_tok": 8, "max_position_embeddings": 196_608, "rms_norm_eps": 1e-6,
                "rope_theta": 5_000_000.0, "torch_dtype": "bfloat16"
            }),
            Arch::GptOss20B => gpt_oss(24, 32),
            Arch::GptOss120B => gpt_oss(36, 128),
            Arch::Tiny => with(
                qwen3(64, 2, 4, 160),
                json!({"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 640}),
            ),
            Arch::Qwen3_0_6B => qwen3(1024, 28, 16, 3072),
            Arch::Qwen3_1_7B => qwen3(2048, 28, 16, 6144),
            Arch::Qwen3_4B => qwen3(2560, 36, 32, 9728),
            Arch::Qwen3_8B => qwen3(4096, 36, 32, 12288),
            Arch::Qwen3_30BA3B => with(
                qwen3(2048, 48, 32, 6144),
                json!({
                    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_key_value_heads": 4,
                    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": true,
                    "decoder_sparse_step": 1, "mlp_only_layers": []
                }),
            ),
            Arch::Qwen35_4B => qwen35,
            Arch::Qwen36_35BA3B => with(
                qwen35,
                json!({
                    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "hidden_size": 2048,
                    "num_hidden_layers": 40, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8,
                    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512
                }),
            ),
            Arch::Nemotron3Nano30BA3B => json!({
                "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 2688,
                "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "num_hidden_layers": 52,
                "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 1856,
                "vocab_size": 131_072, "attention_bias": false, "mlp_bias": false, "mlp_hidden_act": "relu2",
                "mamba_num_heads": 64, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "n_groups": 8,
                "ssm_state_size": 128, "conv_kernel": 4, "chunk_size": 128, "use_bias": false, "use_conv_bias": true,
                "n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 1, "moe_intermediate_size": 1856,
                "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "topk_group": 1, "norm_topk_prob": true,
                "routed_scaling_factor": 2.5, "max_position_embeddings": 262_144, "layer_norm_epsilon": 1e-5,
                "torch_dtype": "bfloat16"
            }),
            Arch::Gemma3_4B => json!({
                "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 2560,
                "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                "intermediate_size": 10240, "vocab_size": 262_208, "hidden_activation": "gelu_pytorch_tanh",
                "sliding_window": 1024, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
                "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
                "rope_local_base_freq": 10_000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "torch_dtype": "bfloat16"
            }),
        }
    }
}

/// The tensors to write: linear weights in NVFP4, those of recurrent layers in int8, the rest in bf16.
fn plan(spec: &Spec) -> Vec<Planned> {
    let tensors = tensors::stored(spec).into_iter();
    let planned = tensors.map(|(name, shape, role)| Planned {
        name,
        shape,
        encoding: match role {
            TensorRole::Linear => Encoding::Nvfp4,
            TensorRole::Recurrent => Encoding::Int8,
            _ => Encoding::Dense(DType::BF16),
        },
    });
    planned.collect()
}

/// Root mean square of the 16 e2m1 values, equally distributed.
const CODE_RMS: f32 = 2.926;

/// Root mean square of the bytes in two's complement, equally distributed.
const BYTE_RMS: f32 = 73.9;

/// The standard deviation of the weights: Qwen's initializer_range.
const WEIGHT_RMS: f32 = 0.02;

/// Bytes generated and written at a time: codes of whole blocks, and their scales.
const CHUNK: usize = 1 << 20;

fn fill(seed: u64, first: u64, out: &mut [u8]) {
    for (i, chunk) in out.chunks_mut(8).enumerate() {
        let bits = random::bits(seed, first + i as u64).to_le_bytes();
        chunk.copy_from_slice(&bits[..chunk.len()]);
    }
}

pub(super) fn run(args: &Args) -> Result<()> {
    let mut config = args.arch.config();
    config["tie_word_embeddings"] = args.tied.into();
    let mut spec = families::read(&config)?;
    if !args.drafter {
        spec.drafter = None;
    } else if spec.drafter.is_none() {
        bail!(InvalidArgument, "--drafter: models of this shape have none");
    }
    let plan = plan(&spec);
    let metadata = Metadata {
        config: Some(config),
        tokenizer: TokenizerSource::None,
        embedding: Vec::new(),
    };
    let values = |p: &Planned| p.shape.iter().product::<usize>();
    let bytes = |p: &Planned| match p.encoding {
        Encoding::Nvfp4 => values(p) / 2 + values(p) / BLOCK,
        Encoding::Int8 => values(p) + p.shape[0] * size_of::<f32>(),
        _ => values(p) * 2,
    } as u64;
    let total: u64 = plan.iter().map(bytes).sum();
    let bar = output::byte_bar("writing", total);
    let start = match args.force {
        true => ModelOptWriter::replace,
        false => ModelOptWriter::create,
    };
    let mut writer = Box::new(start(&args.out, &plan, &metadata)?);
    let mut codes = vec![0; CHUNK];
    let mut scales = vec![0; CHUNK * 2 / BLOCK];
    for (t, tensor) in plan.iter().enumerate() {
        let seed = random::bits(args.seed, t as u64);
        if tensor.encoding == Encoding::Nvfp4 {
            writer.begin(&tensor.name, WEIGHT_RMS / CODE_RMS)?;
            let all = values(tensor) / 2;
            for start in (0..all).step_by(CHUNK) {
                let n = CHUNK.min(all - start);
                fill(seed, (start / 8) as u64, &mut codes[..n]);
                let scales = &mut scales[..n * 2 / BLOCK];
                fill(!seed, (start / 64) as u64, scales);
                // Eight neighbouring scales from 0.75 to 1.375.
                scales.iter_mut().for_each(|s| *s = 0x34 + (*s & 7));
                writer.nvfp4(&codes[..n], scales)?;
                bar.inc((n + scales.len()) as u64);
            }
            continue;
        }
        writer.begin(&tensor.name, 1.0)?;
        if tensor.encoding == Encoding::Int8 {
            let (rows, cols) = (tensor.shape[0], tensor.shape[1]);
            let run = (CHUNK / cols).clamp(1, rows);
            let mut codes = vec![0; run * cols];
            for first in (0..rows).step_by(run) {
                let n = run.min(rows - first);
                let codes = &mut codes[..n * cols];
                fill(seed, (first * cols / 8) as u64, codes);
                let scales = vec![WEIGHT_RMS / BYTE_RMS; n];
                writer.int8(codes, &scales)?;
                bar.inc((codes.len() + size_of_val(&*scales)) as u64);
            }
            continue;
        }
        if tensor.shape.len() == 1 {
            // Norms that only normalize, and biases that change nothing.
            let is_offset = tensors::is_offset_from_one(&spec, &tensor.name);
            let one = match is_offset || tensor.name.ends_with(".bias") {
                true => 0.0,
                false => 1.0,
            };
            writer.values(&vec![one; values(tensor)])?;
            bar.inc(bytes(tensor));
            continue;
        }
        let all = values(tensor) * 2;
        for start in (0..all).step_by(CHUNK) {
            let n = CHUNK.min(all - start);
            fill(seed, (start / 8) as u64, &mut codes[..n]);
            // bf16 of either sign from 2^-7 to 2^-5: sign, lowest exponent bit and mantissa are random.
            for high in codes[1..n].iter_mut().step_by(2) {
                *high = (*high & 0x80) | 0x3c;
            }
            writer.raw(&codes[..n])?;
            bar.inc(n as u64);
        }
    }
    writer.finish()?;
    bar.finish_and_clear();
    let parameters: usize = plan.iter().map(values).sum();
    if args.json {
        return output::json(
            &json!({"path": model::shown(args.out.as_os_str()), "bytes": total, "parameters": parameters}),
        );
    }
    output::line(format_args!(
        "{}: {:.3} billion parameters, {}",
        args.out.display(),
        parameters as f64 / 1e9,
        output::size(total)
    ))
}
