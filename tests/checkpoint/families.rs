//! GGUF models of every family: the weights of a golden, under the names and in the order of llama.cpp's converter, are the same model and
//! give the logits of transformers. And text models within larger ones, as they are published.

use std::collections::{BTreeSet, HashMap};
use std::ops::ControlFlow;
use std::path::Path;

use super::common::{expect_kind, golden, options};
use super::files::{Gguf, Scratch, tensors};
use NVFP4::base::ErrorKind;
use NVFP4::base::threads::Pool;
use NVFP4::checkpoint::{Checkpoint, Encoding};
use NVFP4::engine::Served;
use NVFP4::format::nvfp4::Recipe;
use NVFP4::model::convert::{Container, ConvertOptions, convert};
use NVFP4::model::{self, KvType, Logits, Scratch as Room, families};
use NVFP4::tensor::DType;
use safetensors::SafeTensors;
use serde_json::{Value, json};

/// The bar of the parity tests in f32.
const TOLERANCE: f32 = 2e-4;

pub(crate) fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn values(checkpoint: &dyn Checkpoint, name: &str) -> Vec<f32> {
    let entry = checkpoint.find(name).unwrap_or_else(|| panic!("{name}"));
    let mut out = vec![f32::NAN; entry.rows() * entry.cols()];
    checkpoint
        .rows_f32(entry, 0..entry.rows(), &mut out)
        .unwrap();
    out
}

pub(crate) fn integer(key: &str, value: u32) -> Vec<u8> {
    Gguf::pair(key, 4, &value.to_le_bytes())
}

fn integers(key: &str, values: &[u32]) -> Vec<u8> {
    let bytes: Vec<u8> = values.iter().flat_map(|n| n.to_le_bytes()).collect();
    Gguf::array_pair(key, 4, values.len() as u64, &bytes)
}

pub(crate) fn float(key: &str, value: f32) -> Vec<u8> {
    Gguf::pair(key, 6, &value.to_le_bytes())
}

/// A golden as a GGUF file of `architecture`.
struct Case {
    golden: &'static str,
    architecture: &'static str,
    /// Names within a layer that are not those of llama, logical before GGUF.
    names: &'static [(&'static str, &'static str)],
    integers: &'static [(&'static str, u32)],
    floats: &'static [(&'static str, f32)],
    flags: &'static [(&'static str, bool)],
    texts: &'static [(&'static str, &'static str)],
    /// Plain vectors that the file has beside weights.
    vectors: &'static [(&'static str, &'static [f32])],
}

const CASES: [Case; 21] = [
    Case {
        golden: "mistral_window",
        architecture: "llama",
        names: &[],
        integers: &[
            ("attention.key_length", 32),
            ("attention.sliding_window", 9),
        ],
        floats: &[("rope.freq_base", 1e4)],
        flags: &[],
        texts: &[],
        vectors: &[],
    },
    Case {
        golden: "gemma3_wide",
        architecture: "gemma3",
        names: &[
            ("post_attention_layernorm", "post_attention_norm"),
            ("pre_feedforward_layernorm", "ffn_norm"),
            ("post_feedforward_layernorm", "post_ffw_norm"),
        ],
        integers: &[
            ("attention.key_length", 256),
            ("attention.sliding_window", 8),
            ("attention.sliding_window_pattern", 3),
        ],
        floats: &[("rope.freq_base", 1e6), ("rope.scaling.factor", 8.0)],
        flags: &[],
        texts: &[],
        vectors: &[],
    },
    Case {
        golden: "qwen3moe_normalized",
        architecture: "qwen3moe",
        names: &[
            ("mlp.gate", "ffn_gate_inp"),
            ("mlp.experts.gate_proj", "ffn_gate_exps"),
            ("mlp.experts.up_proj", "ffn_up_exps"),
            ("mlp.experts.down_proj", "ffn_down_exps"),
        ],
        integers: &[
            ("attention.key_length", 16),
            ("expert_count", 6),
            ("expert_used_count", 2),
            ("expert_feed_forward_length", 32),
        ],
        floats: &[("rope.freq_base", 1e6)],
        flags: &[],
        texts: &[],
        vectors: &[],
    },
    Case {
        golden: "qwen2moe_shared",
        architecture: "qwen2moe",
        names: &[
            ("mlp.gate", "ffn_gate_inp"),
            ("mlp.experts.gate_proj", "ffn_gate_exps"),
            ("mlp.experts.up_proj", "ffn_up_exps"),
            ("mlp.experts.down_proj", "ffn_down_exps"),
            ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
            ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
            ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
            ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
        ],
        integers: &[
            ("expert_count", 6),
            ("expert_used_count", 2),
            ("expert_feed_forward_length", 32),
            ("expert_shared_feed_forward_length", 48),
            // 0 is none.
            ("attention.sliding_window", 0),
        ],
        // 0 is no factor.
        floats: &[("rope.freq_base", 1e6), ("rope.scaling.factor", 0.0)],
        flags: &[],
        texts: &[],
        vectors: &[],
    },
    Case {
        golden: "phi3_window",
        architecture: "phi3",
        names: PHI3,
        integers: &[
            ("attention.sliding_window", 11),
            ("rope.dimension_count", 16),
            ("rope.scaling.original_context_length", 256),
        ],
        floats: &[("rope.freq_base", 1e4)],
        flags: &[],
        texts: &[],
        vectors: &[],
    },
    Case {
        golden: "phi3_partial",
        architecture: "phi3",
        names: PHI3,
        integers: &[
            ("attention.sliding_window", 0),
            ("rope.dimension_count", 24),
            ("rope.scaling.original_context_length", 256),
        ],
        floats: &[("rope.freq_base", 1e4)],
        flags: &[],
        texts: &[],
        vectors: &[],
    },
    Case {
        golden: "phi3_longrope",
        architecture: "phi3",
        names: PHI3,
        integers: &[
            ("attention.sliding_window", 0),
            ("rope.dimension_count", 12),
            ("rope.scaling.original_context_length", 16),
        ],
        // sqrt(1 + ln(256 / 16) / ln(16))
        floats: &[
            ("rope.freq_base", 1e4),
            ("rope.scaling.attn_factor", std::f32::consts::SQRT_2),
        ],
        flags: &[],
        texts: &[],
        vectors: &[
            ("rope_factors_short.weight", &[1.0, 1.1, 1.2, 1.3, 1.5, 1.7]),
            ("rope_factors_long.weight", &[1.0, 2.0, 3.0, 5.0, 8.0, 13.0]),
        ],
    },
    Case {
        golden: "ministral3_tied",
        architecture: "mistral3",
        names: &[],
        integers: &[
            ("attention.key_length", 32),
            ("rope.scaling.original_context_length", 16),
        ],
        floats: &[
            ("rope.freq_base", 1e6),
            ("rope.scaling.factor", 16.0),
            ("rope.scaling.yarn_beta_fast", 32.0),
            ("rope.scaling.yarn_beta_slow", 1.0),
            ("rope.scaling.yarn_log_multiplier", 1.0),
            ("attention.temperature_scale", 0.1),
        ],
        flags: &[],
        texts: &[("rope.scaling.type", "yarn")],
        vectors: &[],
    },
    Case {
        golden: "minimaxm2_partial",
        architecture: "minimax-m2",
        names: &[
            ("block_sparse_moe.gate", "ffn_gate_inp"),
            (
                "block_sparse_moe.e_score_correction_bias",
                "exp_probs_b.bias",
            ),
            ("block_sparse_moe.experts.w1", "ffn_gate_exps"),
            ("block_sparse_moe.experts.w3", "ffn_up_exps"),
            ("block_sparse_moe.experts.w2", "ffn_down_exps"),
        ],
        integers: &[
            ("attention.key_length", 32),
            ("rope.dimension_count", 16),
            ("expert_count", 6),
            ("expert_used_count", 2),
            ("expert_feed_forward_length", 32),
            ("expert_gating_func", 2),
        ],
        floats: &[("rope.freq_base", 1e4)],
        flags: &[],
        texts: &[],
        vectors: &[],
    },
    Case {
        golden: "gemma2_wide",
        architecture: "gemma2",
        names: &[
            ("post_attention_layernorm", "post_attention_norm"),
            ("pre_feedforward_layernorm", "ffn_norm"),
            ("post_feedforward_layernorm", "post_ffw_norm"),
        ],
        integers: &[
            ("attention.key_length", 256),
            ("attention.sliding_window", 8),
        ],
        floats: &[
            ("rope.freq_base", 1e4),
            ("attn_logit_softcapping", 2.0),
            ("final_logit_softcapping", 4.0),
        ],
        flags: &[],
        texts: &[],
        vectors: &[],
    },
    Case {
        golden: "smollm3_tied",
        architecture: "smollm3",
        names: &[],
        integers: &[("rope.dimension_count", 32)],
        floats: &[("rope.freq_base", 2e6)],
        flags: &[],
        texts: &[],
        vectors: &[],
    },
    Case {
        golden: "seedoss_biased",
        architecture: "seed_oss",
        names: &[("post_attention_layernorm", "post_attention_norm")],
        integers: &[("attention.key_length", 32)],
        floats: &[("rope.freq_base", 1e6)],
        flags: &[],
        texts: &[],
        vectors: &[],
    },
    Case {
        golden: "ernie45_biased",
        architecture: "ernie4_5",
        names: &[],
        integers: &[("attention.key_length", 32)],
        floats: &[("rope.freq_base", 5e5)],
        flags: &[],
        texts: &[],
        vectors: &[],
    },
    Case {
        golden: "olmo2_grouped",
        architecture: "olmo2",
        names: AFTER_HALVES,
        integers: &[],
        floats: &[("rope.freq_base", 5e5)],
        flags: &[],
        texts: &[],
        vectors: &[],
    },
    Case {
        golden: "olmo3_window",
        architecture: "olmo2",
        names: AFTER_HALVES,
        integers: &[
            ("attention.sliding_window", 8),
            ("rope.scaling.original_context_length", 32),
        ],
        floats: &[
            ("rope.freq_base", 5e5),
            ("rope.scaling.factor", 8.0),
            ("rope.scaling.attn_factor", 1.2),
            ("rope.scaling.yarn_beta_fast", 32.0),
            ("rope.scaling.yarn_beta_slow", 1.0),
        ],
        flags: &[],
        texts: &[("rope.scaling.type", "yarn")],
        vectors: &[],
    },
    Case {
        golden: "exaone4_mixed",
        architecture: "exaone4",
        names: AFTER_HALVES,
        integers: &[
            ("attention.key_length", 32),
            ("attention.sliding_window", 8),
        ],
        floats: &[("rope.freq_base", 1e6)],
        flags: &[],
        texts: &[],
        vectors: &[],
    },
    Case {
        golden: "granite_tied",
        architecture: "granite",
        names: &[],
        integers: &[],
        floats: &[
            ("rope.freq_base", 1e4),
            ("embedding_scale", 6.0),
            ("attention.scale", 0.2),
            ("residual_scale", 0.4),
            ("logit_scale", 2.0),
        ],
        flags: &[],
        texts: &[],
        vectors: &[],
    },
    Case {
        golden: "hunyuan_biased",
        architecture: "hunyuan-dense",
        names: &[
            ("self_attn.query_layernorm", "attn_q_norm"),
            ("self_attn.key_layernorm", "attn_k_norm"),
        ],
        integers: &[("attention.key_length", 16)],
        floats: &[("rope.freq_base", 1e4)],
        flags: &[],
        texts: &[],
        vectors: &[],
    },
    Case {
        golden: "mixtral_window",
        architecture: "llama",
        names: &[
            ("block_sparse_moe.gate", "ffn_gate_inp"),
            ("block_sparse_moe.experts.w1", "ffn_gate_exps"),
            ("block_sparse_moe.experts.w3", "ffn_up_exps"),
            ("block_sparse_moe.experts.w2", "ffn_down_exps"),
        ],
        integers: &[
            ("attention.key_length", 16),
            ("attention.sliding_window", 8),
            ("expert_count", 6),
            ("expert_used_count", 3),
        ],
        floats: &[("rope.freq_base", 1e6)],
        flags: &[],
        texts: &[],
        vectors: &[],
    },
    Case {
        golden: "glm4_biased",
        architecture: "glm4",
        names: &[
            ("post_self_attn_layernorm", "post_attention_norm"),
            ("post_mlp_layernorm", "post_ffw_norm"),
            ("mlp.gate_up_proj", "ffn_up"),
        ],
        integers: &[("attention.key_length", 32), ("rope.dimension_count", 16)],
        floats: &[("rope.freq_base", 1e4)],
        flags: &[],
        texts: &[],
        vectors: &[],
    },
    Case {
        golden: "glm4moe_biased",
        architecture: "glm4moe",
        names: GLM4_MOE,
        integers: &[
            ("attention.key_length", 32),
            ("rope.dimension_count", 16),
            ("expert_count", 6),
            ("expert_used_count", 2),
            ("expert_shared_count", 1),
            ("expert_feed_forward_length", 32),
            ("expert_gating_func", 2),
            ("leading_dense_block_count", 1),
            ("nextn_predict_layers", 0),
        ],
        floats: &[("rope.freq_base", 1e6), ("expert_weights_scale", 1.0)],
        flags: &[("expert_weights_norm", true)],
        texts: &[],
        vectors: &[],
    },
];

const AFTER_HALVES: &[(&str, &str)] = &[
    ("post_attention_layernorm", "post_attention_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

const GLM4_MOE: &[(&str, &str)] = &[
    ("post_attention_layernorm", "post_attention_norm"),
    ("mlp.gate", "ffn_gate_inp"),
    ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
    ("mlp.experts.gate_proj", "ffn_gate_exps"),
    ("mlp.experts.up_proj", "ffn_up_exps"),
    ("mlp.experts.down_proj", "ffn_down_exps"),
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
];

const PHI3: &[(&str, &str)] = &[
    ("self_attn.qkv_proj", "attn_qkv"),
    ("mlp.gate_up_proj", "ffn_up"),
];

/// Names outside the layers and within, logical before GGUF.
const NAMES: [(&str, &str); 14] = [
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

impl Case {
    /// The GGUF name of the tensor with the logical name `name`, without the expert's number.
    fn gguf_name(&self, name: &str) -> String {
        let find = |name: &str| {
            let mut all = self.names.iter().chain(&NAMES);
            Some(all.find(|(logical, _)| *logical == name)?.1)
        };
        // Some tensors have a name with its suffix.
        let lookup = |name: &str| {
            let (stem, suffix) = name.rsplit_once('.').unwrap();
            let with_suffix = || Some(format!("{}.{suffix}", find(stem)?));
            let found = find(name).map(str::to_owned).or_else(with_suffix);
            found.unwrap_or_else(|| panic!("{name}"))
        };
        match name.strip_prefix("model.layers.") {
            None => lookup(name),
            Some(rest) => {
                let (layer, name) = rest.split_once('.').unwrap();
                format!("blk.{layer}.{}", lookup(name))
            }
        }
    }

    /// The values of a tensor as the converter writes them.
    fn stored(&self, name: &str, shape: &[usize], values: &mut [f32], config: &Value) {
        if self.architecture.starts_with("gemma") && name.ends_with("norm.weight") {
            values.iter_mut().for_each(|v| *v += 1.0);
        }
        let heads = match name {
            _ if !["llama", "mistral3", "smollm3", "granite"].contains(&self.architecture) => {
                return;
            }
            _ if name.ends_with("q_proj.weight") => "num_attention_heads",
            _ if name.ends_with("k_proj.weight") => "num_key_value_heads",
            _ => return,
        };
        let (rows, cols) = (shape[0], shape[1]);
        let width = rows / config[heads].as_u64().unwrap() as usize;
        let original = values.to_vec();
        for row in 0..rows {
            // Row i of a head and row i + width / 2 rotate together, and lie side by side.
            let within = row % width;
            let at = row - within + 2 * (within % (width / 2)) + within / (width / 2);
            values[at * cols..][..cols].copy_from_slice(&original[row * cols..][..cols]);
        }
    }

    fn gguf(&self) -> Vec<u8> {
        let source = model::open(&golden(self.golden)).unwrap();
        let config = source.metadata().config.clone().unwrap();
        let key = |name: &str| format!("{}.{name}", self.architecture);
        let mut gguf = Gguf::new(self.architecture);
        for (name, of) in [
            ("embedding_length", "hidden_size"),
            ("feed_forward_length", "intermediate_size"),
            ("block_count", "num_hidden_layers"),
            ("attention.head_count", "num_attention_heads"),
            ("attention.head_count_kv", "num_key_value_heads"),
            ("context_length", "max_position_embeddings"),
        ] {
            let value = config[of].as_u64().unwrap() as u32;
            gguf = gguf.with_pair(integer(&key(name), value));
        }
        gguf = gguf.with_pair(float(&key("attention.layer_norm_rms_epsilon"), 1e-6));
        for (name, value) in self.integers {
            gguf = gguf.with_pair(integer(&key(name), *value));
        }
        for (name, value) in self.floats {
            gguf = gguf.with_pair(float(&key(name), *value));
        }
        for (name, value) in self.flags {
            gguf = gguf.with_pair(Gguf::pair(&key(name), 7, &[u8::from(*value)]));
        }
        for (name, value) in self.texts {
            gguf = gguf.with_pair(Gguf::text_pair(&key(name), value));
        }
        if let Some(eos) = config["eos_token_id"].as_u64() {
            gguf = gguf.with_pair(integer("tokenizer.ggml.eos_token_id", eos as u32));
        }
        // Experts of a layer come one after the other, and are stacked.
        let mut order: Vec<String> = Vec::new();
        let mut made: HashMap<String, (Vec<usize>, Vec<f32>)> = HashMap::new();
        let expert = |name: &str| {
            let rest = name.split_once(".experts.")?.1;
            rest.split_once('.')?.0.parse::<usize>().ok()
        };
        let mut entries: Vec<_> = source
            .entries()
            .iter()
            .map(|e| (expert(&e.name), e))
            .collect();
        entries.sort_by_key(|(expert, _)| *expert);
        for (expert, entry) in entries {
            let name = match expert {
                Some(n) => entry.name.replace(&format!(".experts.{n}."), ".experts."),
                None => entry.name.clone(),
            };
            let mut read = values(&*source, &entry.name);
            self.stored(&name, &entry.shape, &mut read, &config);
            let name = self.gguf_name(&name);
            match made.get_mut(&name) {
                None => {
                    let mut shape = entry.shape.clone();
                    if expert.is_some() {
                        shape.insert(0, 1);
                    }
                    order.push(name.clone());
                    made.insert(name, (shape, read));
                }
                Some((shape, all)) => {
                    shape[0] += 1;
                    all.extend(read);
                }
            }
        }
        for (name, vector) in self.vectors {
            order.push((*name).to_owned());
            made.insert((*name).to_owned(), (vec![vector.len()], vector.to_vec()));
        }
        let mut data = Vec::new();
        for name in order {
            let (shape, values) = &made[&name];
            // The converter drops dimensions of 1.
            let shape: Vec<usize> = shape.iter().copied().filter(|&d| d > 1).collect();
            let dims: Vec<u64> = shape.iter().rev().map(|&d| d as u64).collect();
            gguf = gguf.tensor(&name, &dims, 0, data.len() as u64);
            data.extend(bytes(values));
            data.resize(data.len().next_multiple_of(32), 0);
        }
        gguf.with_data(data).build()
    }
}

/// Tokens and the logits that transformers has after them.
fn expected(case: &str) -> Vec<(Vec<u32>, Vec<f32>)> {
    let bytes = std::fs::read(golden(case).join("expected.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let of = |n: usize| {
        let tokens = file.tensor(&format!("tokens_{n}")).unwrap();
        let logits = file.tensor(&format!("logits_{n}")).unwrap();
        let tokens = tokens.data().as_chunks::<8>().0.iter();
        let logits = logits.data().as_chunks::<4>().0.iter();
        (
            tokens.map(|b| i64::from_le_bytes(*b) as u32).collect(),
            logits.map(|b| f32::from_le_bytes(*b)).collect(),
        )
    };
    vec![of(7), of(33)]
}

fn agrees_with_transformers(path: &Path, case: &str) {
    let model = Served::load(path, &options()).unwrap();
    for (tokens, want) in expected(case) {
        let mut cache = model.sequence(tokens.len(), KvType::F32).unwrap();
        let mut got = Vec::new();
        model
            .forward(&tokens, &mut cache, &mut Room::new(), Logits::All, &mut got)
            .unwrap();
        assert!(want.len() <= got.len() && !want.is_empty());
        let got = &got[got.len() - want.len()..];
        let worst = got.iter().zip(&want).map(|(g, w)| (g - w).abs());
        let worst = worst.fold(0f32, f32::max);
        assert!(
            worst <= TOLERANCE,
            "{case}, {} tokens: {worst}",
            tokens.len()
        );
    }
}

#[test]
fn gguf_models_of_every_family_are_those_of_transformers() {
    for case in &CASES {
        let scratch = Scratch::new();
        let path = scratch.0.join("model.gguf");
        std::fs::write(&path, case.gguf()).unwrap();
        let read = |path: &Path| {
            let opened = model::open(path).unwrap();
            families::read(opened.metadata().config.as_ref().unwrap()).unwrap()
        };
        assert_eq!(read(&path), read(&golden(case.golden)), "{}", case.golden);
        agrees_with_transformers(&path, case.golden);
    }
}

/// Subtracting the added 1 restores the weights, up to the precision lost by the addition.
#[test]
fn norms_of_gemma_are_stored_with_one_added() {
    let case = CASES.iter().find(|c| c.architecture == "gemma3").unwrap();
    let opened = model::open_bytes("x.gguf", case.gguf()).unwrap();
    let source = model::open(&golden(case.golden)).unwrap();
    let mut norms = 0;
    for entry in source.entries() {
        let is_norm = entry.name.ends_with("norm.weight");
        let want = values(&*source, &entry.name);
        let want = want.into_iter().map(|v| match is_norm {
            true => (v + 1.0) - 1.0,
            false => v,
        });
        let got = values(&*opened, &entry.name);
        assert!(
            got.iter()
                .zip(want)
                .all(|(g, w)| g.to_bits() == w.to_bits()),
            "{}",
            entry.name
        );
        let found = opened.find(&entry.name).unwrap();
        assert_eq!(opened.plain(found).is_none(), is_norm, "{}", entry.name);
        norms += usize::from(is_norm);
    }
    assert_eq!(norms, 4 * 6 + 1);
}

/// A GGUF file with the least that a family needs, and `pairs`.
fn small(architecture: &str, pairs: Vec<Vec<u8>>) -> Gguf {
    let key = |name: &str| format!("{architecture}.{name}");
    let sizes = [
        ("attention.head_count", 4),
        ("embedding_length", 32),
        ("feed_forward_length", 48),
    ];
    let mut gguf = Gguf::new(architecture);
    for (name, value) in sizes {
        gguf = gguf.with_pair(integer(&key(name), value));
    }
    pairs
        .into_iter()
        .fold(gguf, Gguf::with_pair)
        .tensor("output_norm.weight", &[8], 0, 0)
        .with_data(vec![0; 32])
}

fn config(gguf: &Gguf) -> Value {
    let opened = model::open_bytes("x.gguf", gguf.build()).unwrap();
    opened.metadata().config.clone().unwrap()
}

#[test]
fn what_gemma_leaves_out_is_known() {
    let layers = |n| integer("gemma3.block_count", n);
    let window = || integer("gemma3.attention.sliding_window", 512);
    let sliding = |config: &Value| -> Vec<bool> {
        let types = config["layer_types"].as_array().unwrap();
        types.iter().map(|t| t == "sliding_attention").collect()
    };
    let c = config(&small("gemma3", vec![layers(7), window()]));
    assert_eq!(sliding(&c), [true, true, true, true, true, false, true]);
    assert_eq!(c["rope_local_base_freq"], 1e4);
    assert_eq!(c["sliding_window"], 512);
    assert_eq!(c["query_pre_attn_scalar"], 8);
    assert_eq!(c["hidden_activation"], "gelu_pytorch_tanh");
    assert!(c.get("hidden_act").is_none() && c.get("final_logit_softcapping").is_none());

    let c = config(&small("gemma3", vec![layers(3)]));
    assert_eq!(sliding(&c), [false; 3]);
    assert!(c.get("sliding_window").is_none());

    let pattern = Gguf::array_pair("gemma3.attention.sliding_window_pattern", 7, 3, &[0, 1, 0]);
    let more = vec![
        layers(3),
        window(),
        pattern,
        float("gemma3.rope.freq_base_swa", 5e3),
        float("gemma3.final_logit_softcapping", 30.0),
        integer("gemma3.attention.key_length", 16),
    ];
    let c = config(&small("gemma3", more));
    assert_eq!(sliding(&c), [false, true, false]);
    assert_eq!(c["rope_local_base_freq"], 5e3);
    assert_eq!(c["final_logit_softcapping"], 30.0);
    assert_eq!(c["query_pre_attn_scalar"], 16);

    // The largest one scales by its width over its heads.
    let large = vec![layers(62), integer("gemma3.attention.key_length", 16)];
    assert_eq!(config(&small("gemma3", large))["query_pre_attn_scalar"], 8);
}

#[test]
fn what_experts_leave_out_is_known() {
    let count = |name: &str, n| integer(&format!("qwen3moe.{name}"), n);
    let c = config(&small(
        "qwen3moe",
        vec![count("expert_count", 8), count("expert_used_count", 3)],
    ));
    assert_eq!(
        (&c["num_experts"], &c["num_experts_per_tok"]),
        (&json!(8), &json!(3))
    );
    assert_eq!(c["moe_intermediate_size"], 16);
    assert_eq!(c["norm_topk_prob"], true);
    assert_eq!(c["model_type"], "qwen3_moe");
}

/// As in llama.cpp, no layer is dense where a file of GLM-4.5 does not say, and a width of dense layers is not needed.
#[test]
fn what_glm_leaves_out_is_known() {
    let count = |name: &str, n| integer(&format!("glm4moe.{name}"), n);
    let mut gguf = Gguf::new("glm4moe");
    for (name, n) in [
        ("attention.head_count", 4),
        ("embedding_length", 32),
        ("expert_feed_forward_length", 16),
    ] {
        gguf = gguf.with_pair(count(name, n));
    }
    let gguf = gguf
        .tensor("output_norm.weight", &[8], 0, 0)
        .with_data(vec![0; 32]);
    let c = config(&gguf);
    assert_eq!(
        (&c["first_k_dense_replace"], &c["intermediate_size"]),
        (&json!(0), &json!(16))
    );
    let given = [
        count("feed_forward_length", 48),
        count("leading_dense_block_count", 2),
    ];
    let c = config(&given.into_iter().fold(gguf, Gguf::with_pair));
    assert_eq!(
        (&c["first_k_dense_replace"], &c["intermediate_size"]),
        (&json!(2), &json!(48))
    );
}

#[test]
fn what_the_expert_of_every_token_leaves_out_is_known() {
    let count = |name: &str, n| integer(&format!("qwen2moe.{name}"), n);
    let c = config(&small(
        "qwen2moe",
        vec![count("expert_count", 8), count("expert_used_count", 3)],
    ));
    // It is as wide as a dense MLP, and the others are so together.
    assert_eq!(c["shared_expert_intermediate_size"], 48);
    assert_eq!(c["moe_intermediate_size"], 16);
    assert_eq!(c["norm_topk_prob"], false);
    assert_eq!(c["model_type"], "qwen2_moe");
}

/// Sizes that a file lacks are not those that transformers takes for a config that lacks them.
#[test]
fn what_a_file_leaves_out_has_no_default() {
    let c = config(&small("llama", vec![]));
    for key in ["num_hidden_layers", "rms_norm_eps", "vocab_size"] {
        assert!(c[key].is_null() && c.get(key).is_some(), "{key}");
    }
    let e = families::read(&c).unwrap_err();
    assert!(
        e.message().contains("'num_hidden_layers' is missing"),
        "{e}"
    );
}

/// Converters write 0 where they mean none.
#[test]
fn zero_is_none() {
    let window =
        |architecture: &str| integer(&format!("{architecture}.attention.sliding_window"), 0);
    let c = config(&small("llama", vec![window("llama")]));
    assert_eq!(c["model_type"], "llama");
    let layers = integer("gemma3.block_count", 2);
    let cap = float("gemma3.final_logit_softcapping", 0.0);
    let c = config(&small("gemma3", vec![layers, window("gemma3"), cap]));
    assert_eq!(
        c["layer_types"],
        json!(["full_attention", "full_attention"])
    );
    assert!(c.get("final_logit_softcapping").is_none());
    // The class of Gemma 2 has caps where a config has none.
    let caps = ["attn_logit_softcapping", "final_logit_softcapping"];
    let zero = |cap: &str| float(&format!("gemma2.{cap}"), 0.0);
    let mut pairs = vec![integer("gemma2.block_count", 2)];
    pairs.extend(caps.map(zero));
    let c = config(&small("gemma2", pairs));
    for cap in caps {
        assert_eq!(c.get(cap), Some(&Value::Null), "{cap}");
    }
    for (kind, expected) in [
        (None, Value::Null),
        (
            Some("linear"),
            json!({"rope_type": "linear", "factor": 1.0}),
        ),
    ] {
        let mut pairs = vec![float("qwen3.rope.scaling.factor", 0.0)];
        pairs.extend(kind.map(|kind| Gguf::text_pair("qwen3.rope.scaling.type", kind)));
        let c = config(&small("qwen3", pairs));
        assert_eq!(c.get("rope_scaling").cloned().unwrap_or_default(), expected);
    }
}

/// Nothing is padded, so a padding id that no token has bears on nothing.
#[test]
fn a_padding_id_out_of_range_is_ignored() {
    let text = |t: &str| [&(t.len() as u64).to_le_bytes()[..], t.as_bytes()].concat();
    let with = |name: &str| {
        small("llama", vec![])
            .with_pair(Gguf::text_pair("tokenizer.ggml.model", "gpt2"))
            .with_pair(Gguf::array_pair(
                "tokenizer.ggml.tokens",
                8,
                2,
                &[text("a"), text("b")].concat(),
            ))
            .with_pair(integer(&format!("tokenizer.ggml.{name}_token_id"), 2))
            .build()
    };
    let opened = model::open_bytes("x.gguf", with("padding")).unwrap();
    let NVFP4::checkpoint::TokenizerSource::Vocabulary(vocabulary) = &opened.metadata().tokenizer
    else {
        panic!("no vocabulary");
    };
    assert_eq!((vocabulary.pad, vocabulary.tokens.len()), (None, 2));
    assert!(model::open_bytes("x.gguf", with("bos")).is_err());
}

/// Files of Qwen's vision models hold the text model; their axes of positions bear on pictures alone.
#[test]
fn the_text_models_of_qwens_vision_models_are_those_of_its_families() {
    for (architecture, like) in [
        ("qwen2vl", "qwen2"),
        ("qwen3vl", "qwen3"),
        ("qwen3vlmoe", "qwen3moe"),
    ] {
        let of = |name: &str, mut pairs: Vec<Vec<u8>>| {
            let count = |key: &str, n| integer(&format!("{name}.{key}"), n);
            if like == "qwen3moe" {
                pairs.extend([count("expert_count", 8), count("expert_used_count", 3)]);
            }
            config(&small(name, pairs))
        };
        let key = format!("{architecture}.rope.dimension_sections");
        let layers = integer(&format!("{architecture}.n_deepstack_layers"), 3);
        let sections = integers(&key, &[4, 2, 2, 0]);
        assert_eq!(
            of(architecture, vec![sections, layers]),
            of(like, vec![]),
            "{architecture}"
        );
    }
}

/// The converter reorders the rows of queries and keys of vision models, and writes the sections of their rotation.
#[test]
fn glm4_of_vision_models_is_refused() {
    let key = "glm4.rope.dimension_sections";
    let with = |sections: &[u32]| small("glm4", vec![integers(key, sections)]).build();
    expect_kind(
        model::open_bytes("x.gguf", with(&[8, 12, 12, 0])),
        ErrorKind::Unsupported,
        "'glm4.rope.dimension_sections' is [8, 12, 12, 0]",
    );
    assert!(model::open_bytes("x.gguf", with(&[0; 4])).is_ok());
}

/// A drafter's blocks have no window of their own, and a list of windows has them or leaves them out. A number is a period.
#[test]
fn windows_are_those_of_the_model_without_its_drafter() {
    let full_layers = |pairs: Vec<Vec<u8>>| -> Vec<usize> {
        let mut all = vec![
            integer("exaone4.block_count", 9),
            integer("exaone4.nextn_predict_layers", 1),
        ];
        all.extend(pairs);
        let c = config(&small("exaone4", all));
        assert_eq!(c["num_hidden_layers"], 8);
        let types = c["layer_types"].as_array().unwrap();
        assert_eq!(types.len(), 8);
        let is_full = |layer: &usize| types[*layer] == "full_attention";
        (0..8).filter(is_full).collect()
    };
    let window = || integer("exaone4.attention.sliding_window", 512);
    let pattern = "exaone4.attention.sliding_window_pattern";
    let list = |flags: &[u8]| Gguf::array_pair(pattern, 7, flags.len() as u64, flags);
    assert_eq!(full_layers(vec![]), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(full_layers(vec![window()]), [3, 7]);
    assert_eq!(full_layers(vec![window(), integer(pattern, 3)]), [2, 5]);
    for flags in [&[1, 0, 1, 1, 1, 1, 1, 1][..], &[1, 0, 1, 1, 1, 1, 1, 1, 0]] {
        assert_eq!(full_layers(vec![window(), list(flags)]), [1]);
    }
}

#[test]
fn a_window_makes_mistral_of_llama() {
    let c = config(&small("llama", vec![]));
    assert_eq!(
        (&c["model_type"], c.get("sliding_window")),
        (&json!("llama"), None)
    );
    let window = integer("llama.attention.sliding_window", 4096);
    let c = config(&small("llama", vec![window]));
    assert_eq!(c["model_type"], "mistral");
    assert_eq!(c["architectures"], json!(["MistralForCausalLM"]));
    assert_eq!(c["sliding_window"], 4096);
}

#[test]
fn metadata_that_makes_no_config_is_refused() {
    let refused = |gguf: Gguf, needles: &[&str]| {
        let error = model::open_bytes("x.gguf", gguf.build())
            .map(|_| ())
            .unwrap_err();
        for needle in ["x.gguf"].iter().chain(needles) {
            assert!(error.message().contains(needle), "{error} lacks {needle}");
        }
        assert_eq!(error.kind(), ErrorKind::CorruptFile, "{error}");
    };
    let gemma = |pairs: Vec<Vec<u8>>| small("gemma3", pairs);
    let layers = |n| integer("gemma3.block_count", n);
    let window = || integer("gemma3.attention.sliding_window", 8);
    let pattern = "gemma3.attention.sliding_window_pattern";
    refused(gemma(vec![]), &["no gemma3.block_count"]);
    refused(gemma(vec![layers(0)]), &["'gemma3.block_count' is 0"]);
    refused(
        gemma(vec![layers(1 << 30)]),
        &["is 1073741824", "at most 4096"],
    );
    refused(
        gemma(vec![layers(2), window(), integer(pattern, 0)]),
        &[pattern, "is 0"],
    );
    let list = Gguf::array_pair(pattern, 7, 3, &[1, 1, 0]);
    refused(
        gemma(vec![layers(2), window(), list]),
        &["has 3 elements for 2 layers"],
    );
    refused(
        small("qwen3moe", vec![]),
        &["no qwen3moe.expert_used_count"],
    );
    let experts = integer("qwen3moe.expert_used_count", 0);
    refused(
        small("qwen3moe", vec![experts]),
        &["'qwen3moe.expert_used_count' is 0"],
    );

    let (short, long) = ("rope_factors_short.weight", "rope_factors_long.weight");
    let with = |tensors: &[(&str, &[u64], u32)]| {
        let mut gguf = small("phi3", vec![]).with_data(vec![0; 512]);
        for (i, (name, dims, kind)) in tensors.iter().enumerate() {
            gguf = gguf.tensor(name, dims, *kind, 32 + 64 * i as u64);
        }
        gguf
    };
    refused(
        with(&[(short, &[4], 0)]),
        &[short, "no 'rope_factors_long.weight'"],
    );
    refused(
        with(&[(long, &[4], 0)]),
        &[long, "no 'rope_factors_short.weight'"],
    );
    refused(
        with(&[(short, &[4], 0), (long, &[2, 2], 0)]),
        &[long, "[2, 2]", "vector"],
    );
    refused(
        with(&[(short, &[4], 0), (long, &[32], 8)]),
        &[long, "Q8_0", "plain numbers"],
    );
    let zero = "blk.0.attn_norm.weight";
    let packed = small("gemma3", vec![layers(1)])
        .with_data(vec![0; 512])
        .tensor(zero, &[64], 40, 64);
    expect_kind(
        model::open_bytes("x.gguf", packed.build()),
        ErrorKind::Unsupported,
        "'blk.0.attn_norm.weight' is a norm in NVFP4",
    );
}

/// Stacks of experts come apart under the names that Mixtral's own files have.
#[test]
fn experts_of_mixtral_are_written_by_their_numbers() {
    for name in ["mixtral_window", "minimaxm2_partial"] {
        let case = CASES.iter().find(|c| c.golden == name).unwrap();
        let source = model::open_bytes("x.gguf", case.gguf()).unwrap();
        let scratch = Scratch::new();
        let out = scratch.0.join("out");
        let to_modelopt = ConvertOptions::new(Container::ModelOpt, Recipe::Amax);
        let pool = Pool::new(2).unwrap();
        convert(&*source, &out, &to_modelopt, &pool, &mut |_| {
            ControlFlow::Continue(())
        })
        .unwrap();
        let made = model::open(&out).unwrap();
        let names = |checkpoint: &dyn Checkpoint| -> BTreeSet<String> {
            let entries = checkpoint.entries().iter();
            let experts = entries.filter(|e| e.name.contains(".experts."));
            experts.map(|e| e.name.clone()).collect()
        };
        let own = model::open(&golden(name)).unwrap();
        assert_eq!(names(&*made), names(&*own), "{name}");
        let global = |projection: &str| {
            let weight = format!("model.layers.1.block_sparse_moe.experts.3.{projection}.weight");
            made.global_scale(made.find(&weight).unwrap()).unwrap()
        };
        assert_eq!(global("w1"), global("w3"), "{name}");
        drop(Served::load(&out, &options()).unwrap());
    }
}

/// The config of safetensors names layers that draft and are not read, and that of a GGUF file none.
#[test]
fn layers_that_are_not_read_make_no_other_model() {
    let golden = golden("glm4moe_biased");
    let scratch = Scratch::new();
    let weights = "model.safetensors";
    std::fs::copy(golden.join(weights), scratch.0.join(weights)).unwrap();
    let source = model::open(&golden).unwrap();
    let mut config = source.metadata().config.clone().unwrap();
    config["num_nextn_predict_layers"] = json!(1);
    std::fs::write(scratch.0.join("config.json"), config.to_string()).unwrap();
    assert_eq!(families::read(&config).unwrap().unread_layers, 1);
    let fingerprint = |path: &Path| Served::load(path, &options()).unwrap().fingerprint();
    assert_eq!(fingerprint(&scratch.0), fingerprint(&golden));
}

/// A golden as it would be within a model that also takes pictures.
fn published(case: &str, within: &str, scratch: &Scratch) {
    let bytes = std::fs::read(golden(case).join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let eye = "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight";
    let mut items = vec![(eye.to_owned(), "F32", "[2, 20]".to_owned(), vec![0; 160])];
    for (name, tensor) in file.tensors() {
        let name = match name.strip_prefix("model.") {
            Some(rest) => format!("{within}{rest}"),
            None => format!("language_model.{name}"),
        };
        let dtype = match tensor.dtype() {
            safetensors::Dtype::F32 => "F32",
            safetensors::Dtype::BF16 => "BF16",
            safetensors::Dtype::U8 => "U8",
            safetensors::Dtype::F8_E4M3 => "F8_E4M3",
            other => panic!("{other:?}"),
        };
        let shape = format!("{:?}", tensor.shape());
        items.push((name, dtype, shape, tensor.data().to_vec()));
    }
    let items: Vec<_> = items
        .iter()
        .map(|(n, d, s, b)| (n.as_str(), *d, s.as_str(), b.clone()))
        .collect();
    std::fs::write(scratch.0.join("model.safetensors"), tensors(&items)).unwrap();
    let text = std::fs::read(golden(case).join("config.json")).unwrap();
    let text: Value = serde_json::from_slice(&text).unwrap();
    let config = json!({
        "architectures": ["SeesForConditionalGeneration"], "model_type": "sees",
        "text_config": text, "vision_config": {"hidden_size": 20},
    });
    std::fs::write(scratch.0.join("config.json"), config.to_string()).unwrap();
}

#[test]
fn a_text_model_within_a_larger_one_is_run_and_converted() {
    for (case, within) in [
        ("gemma3_wide", "language_model.model."),
        ("gemma3_wide", "model.language_model."),
        ("mistral_window", "language_model.model."),
        ("mistral_window", "model.language_model."),
    ] {
        let scratch = Scratch::new();
        published(case, within, &scratch);
        agrees_with_transformers(&scratch.0, case);
        let source = model::open(&scratch.0).unwrap();
        let stored = source.find("model.norm.weight").unwrap();
        assert_eq!(
            source.parts(stored).unwrap()[0].key,
            format!("{within}norm.weight")
        );
        for (container, name) in [(Container::ModelOpt, "out"), (Container::Dat, "out.dat")] {
            let made = Scratch::new();
            let path = made.0.join(name);
            let keep_head = ConvertOptions {
                keep_head: true,
                ..ConvertOptions::new(container, Recipe::Amax)
            };
            let pool = Pool::new(2).unwrap();
            convert(&*source, &path, &keep_head, &pool, &mut |_| {
                ControlFlow::Continue(())
            })
            .unwrap();
            let eye = "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight";
            let copy = model::open(&path).unwrap();
            assert_eq!(
                copy.find(eye).unwrap().encoding,
                Encoding::Dense(DType::F32)
            );
            let config = copy.metadata().config.as_ref().unwrap();
            assert!(config["text_config"].is_object());
            match container {
                // Its tensors are NVFP4 already and kept.
                Container::ModelOpt => agrees_with_transformers(&path, case),
                Container::Dat => drop(Served::load(&path, &options()).unwrap()),
            }
        }
    }
}

#[test]
fn a_tensor_under_two_names_is_refused() {
    let twice = tensors(&[
        ("model.language_model.norm.weight", "F32", "[2]", vec![0; 8]),
        ("model.norm.weight", "F32", "[2]", vec![0; 8]),
    ]);
    expect_kind(
        model::open_bytes("x.safetensors", twice),
        ErrorKind::CorruptFile,
        "two tensors are both 'model.norm.weight'",
    );
}
