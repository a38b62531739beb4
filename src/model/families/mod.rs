//! Reads a `config.json` (or GGUF metadata with the same keys) into a [`Spec`], checked before any weight is touched. One file per family;
//! `decoder` has their common parts.

mod decoder;
mod family;
mod gemma;
mod gemma4;
mod gguf;
mod glm;
mod gpt_oss;
mod granite;
mod hunyuan;
mod llama;
mod minimax;
mod mistral;
mod nemotron;
mod olmo;
mod phi3;
mod qwen;
mod qwen35;
mod within;

use std::path::Path;

use serde_json::Value;

use super::keys::Keys;
use super::spec::Spec;
use crate::base::Result;
use crate::base::error::bail;
use crate::base::files::GivenFiles;
use crate::checkpoint::{self, Checkpoint, GgufFamily};

pub use family::Family;

/// All supported families.
pub const FAMILIES: &[Family] = &[
    llama::LLAMA,
    qwen::QWEN2,
    qwen::QWEN3,
    qwen::QWEN2_MOE,
    qwen::QWEN3_MOE,
    mistral::MISTRAL,
    mistral::MINISTRAL3,
    phi3::PHI3,
    gemma::GEMMA2,
    gemma::GEMMA3,
    qwen35::QWEN3_5,
    qwen35::QWEN3_5_MOE,
    qwen35::QWEN3_NEXT,
    nemotron::NEMOTRON_H,
    gpt_oss::GPT_OSS,
    gemma4::GEMMA4,
    glm::GLM4,
    glm::GLM4_MOE,
    minimax::MINIMAX_M2,
    llama::SMOLLM3,
    llama::SEED_OSS,
    llama::ERNIE4_5,
    olmo::OLMO2,
    olmo::OLMO3,
    olmo::EXAONE4,
    hunyuan::HUNYUAN_V1_DENSE,
    granite::GRANITE,
    mistral::MINISTRAL,
    mistral::MIXTRAL,
    glm::SOLAR_OPEN,
];

const LATENT: &str = "latent attention";
const MAMBA: &str = "Mamba-2 before an MLP";

/// Families that do not run, by `model_type`, and what they have that cannot be run.
const MISSING: &[(&str, &str)] = &[
    ("deepseek_v2", LATENT),
    ("deepseek_v3", LATENT),
    ("deepseek_v32", "sparse latent attention"),
    ("glm4_moe_lite", LATENT),
    ("glm_moe_dsa", "sparse latent attention"),
    ("kimi_k2", LATENT),
    (
        "kimi_linear",
        "latent attention and delta nets gated by channels",
    ),
    ("longcat_flash", LATENT),
    ("minicpm3", LATENT),
    ("mistral4", LATENT),
    ("mistral_large4", LATENT),
    ("llama4", "attention in chunks"),
    ("minimax", "linear attention"),
    ("ernie4_5_moe", "experts chosen by corrected softmax scores"),
    ("falcon_h1", "Mamba-2 beside attention"),
    ("granitemoehybrid", MAMBA),
    ("lfm2", "short convolutions"),
    ("lfm2_moe", "short convolutions"),
];

/// The families whose GGUF files are translated.
pub fn gguf() -> &'static [GgufFamily] {
    gguf::FAMILIES
}

/// Opens the checkpoint at `path` like [`checkpoint::open`], with GGUF files translated to Hugging Face names.
pub fn open(path: &Path) -> Result<Box<dyn Checkpoint>> {
    checkpoint::open(path, gguf())
}

/// Opens files that the host gives like [`checkpoint::open_given`], with GGUF files translated to Hugging Face names.
pub fn open_given(files: &GivenFiles) -> Result<Box<dyn Checkpoint>> {
    checkpoint::open_given(files, gguf())
}

/// Opens a file in memory like [`checkpoint::open_bytes`], with GGUF files translated to Hugging Face names.
pub fn open_bytes(name: &str, bytes: Vec<u8>) -> Result<Box<dyn Checkpoint>> {
    checkpoint::open_bytes(name, bytes, gguf())
}

/// Reads and checks a config. Ignores keys that do not affect inference. A model that also takes images or sound is read as its text model,
/// which its `text_config` describes.
pub fn read(config: &Value) -> Result<Spec> {
    let Value::Object(map) = config else {
        bail!(CorruptFile, "config: expected a JSON object");
    };
    let outer = Keys(map);
    match within::text_config(&outer)? {
        None => family(&outer)?.read(&outer),
        Some(text) => {
            let mut spec = family(&Keys(&text))?.read(&Keys(&text))?;
            spec.tied |= within::is_tied(&outer)?;
            if spec.eos.is_empty() || !outer.ids("eos_token_id")?.is_empty() {
                spec.eos = outer.ids("eos_token_id")?;
            }
            Ok(spec)
        }
    }
}

/// Whether a config ties embedding and head, in the model or in its text model. For a config of an unknown family, only an explicit key
/// counts.
pub fn is_tied(config: &Value) -> bool {
    let says = |config: &Value| config["tie_word_embeddings"] == true;
    match read(config) {
        Ok(spec) => spec.tied,
        Err(_) => says(config) || within::TEXT.iter().any(|&text| says(&config[text])),
    }
}

fn family(keys: &Keys<'_>) -> Result<&'static Family> {
    let class = keys
        .texts("architectures")?
        .and_then(|classes| classes.first().copied());
    // A text model within a larger one has a suffix: `gemma3_text`.
    let name = keys.text("model_type")?;
    let plain = name.map(|name| name.strip_suffix("_text").unwrap_or(name));
    if (plain, class) == (None, None) {
        bail!(
            CorruptFile,
            "config: neither 'model_type' nor 'architectures' says what the model is"
        );
    }
    let of_type = |f: &&Family| plain.is_some_and(|name| f.model_type == within::family_of(name));
    let missing = MISSING.iter().find(|(name, _)| Some(*name) == plain);
    // Early copies of MiniMax-M2 have the type of MiniMax-01.
    let is_by_class = plain.is_none() || missing.is_some();
    let of_class = |f: &&Family| is_by_class && Some(f.class) == class;
    if let Some(found) = (FAMILIES.iter().find(of_type)).or(FAMILIES.iter().find(of_class)) {
        return Ok(found);
    }
    if let Some((name, what)) = missing {
        let types = keys.texts("layer_types")?;
        let has_mamba = types.is_none_or(|types| types.contains(&"mamba"));
        let what = match *what {
            MAMBA if !has_mamba => "an MLP stored as a shared expert",
            what => what,
        };
        bail!(
            Unsupported,
            "models of the architecture '{name}' have {what}, which cannot be run yet"
        );
    }
    let known: Vec<_> = FAMILIES.iter().map(|f| f.model_type).collect();
    bail!(
        Unsupported,
        "unknown architecture '{}'; known are {}",
        name.or(class).unwrap_or_default(),
        known.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::spec::{AttentionSpec, BlockSpec, QkNorm};
    use serde_json::json;

    fn base() -> Value {
        json!({
            "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 320,
            "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "eos_token_id": [3, 4]
        })
    }

    fn attention(spec: &Spec, block: usize) -> &AttentionSpec {
        spec.blocks[block].attention().unwrap()
    }

    fn with(key: &str, value: Value) -> Result<Spec> {
        let mut config = base();
        config[key] = value;
        read(&config)
    }

    #[test]
    fn families_are_data() {
        let c = read(&base()).unwrap();
        let attention = c.blocks[0].attention().unwrap();
        assert!(attention.qk_norm == QkNorm::Heads && !attention.qkv_bias && !c.tied);
        assert_eq!((c.eos, c.blocks.len()), (vec![3, 4], 2));
        let c = with("model_type", json!("qwen2")).unwrap();
        let attention = c.blocks[0].attention().unwrap();
        assert!(attention.qk_norm == QkNorm::None && attention.qkv_bias && !attention.o_bias);
        let mut config = base();
        config["model_type"] = Value::Null;
        config["architectures"] = json!(["LlamaForCausalLM"]);
        config["attention_bias"] = json!(true);
        let c = read(&config).unwrap();
        let attention = c.blocks[0].attention().unwrap();
        assert!(c.family == "llama" && attention.qkv_bias && attention.o_bias);
    }

    /// The published config of a model that takes images; missing keys have the defaults of transformers.
    #[test]
    fn the_text_model_within_another_is_read() {
        let outer = json!({
            "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106],
            "text_config": {
                "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
                "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}
            },
            "vision_config": {"hidden_size": 1152}
        });
        let spec = read(&outer).unwrap();
        assert_eq!(
            (spec.family, spec.vocab_size, spec.blocks.len()),
            ("gemma3", 262_208, 34)
        );
        assert_eq!((&spec.eos, spec.tied), (&vec![1, 106], true));
        let (near, far) = (attention(&spec, 4), attention(&spec, 5));
        assert_eq!((near.heads, near.kv_heads, near.head_dim), (8, 4, 256));
        assert_eq!((near.window, far.window), (Some(1024), None));
        let ropes = (near.rope, far.rope);
        assert_eq!((ropes, near.scale), ((Some(1), Some(0)), 1.0 / 16.0));
        assert_eq!(spec.ropes[0].table.frequencies[0], 0.125);
        assert_eq!(spec.ropes[1].table.frequencies[0], 1.0);
        assert_eq!(spec.embedding_scale, 2560f32.sqrt());
    }

    #[test]
    fn some_layers_have_experts() {
        let mut config = base();
        for (key, value) in [
            ("model_type", json!("qwen3_moe")),
            ("num_hidden_layers", json!(6)),
            ("num_experts", json!(8)),
            ("num_experts_per_tok", json!(2)),
            ("moe_intermediate_size", json!(48)),
            ("decoder_sparse_step", json!(2)),
            ("mlp_only_layers", json!([3])),
        ] {
            config[key] = value;
        }
        let spec = read(&config).unwrap();
        let experts: Vec<usize> = spec.blocks.iter().map(|b| b.mlp.experts()).collect();
        assert_eq!(experts, [0, 8, 0, 0, 0, 8]);
        config["num_experts_per_tok"] = json!(9);
        let e = read(&config).unwrap_err();
        assert!(
            e.message().contains("9 experts (num_experts_per_tok) of 8"),
            "{e}"
        );
        config["num_experts_per_tok"] = Value::Null;
        let e = read(&config).unwrap_err();
        assert!(
            e.message().contains("'num_experts_per_tok' is missing"),
            "{e}"
        );
    }

    #[test]
    fn refusals_name_what_is_wrong() {
        for (key, value, expected) in [
            (
                "model_type",
                json!("mamba"),
                "'mamba'; known are llama, qwen2, qwen3, qwen2_moe, qwen3_moe, mistral, ministral3, phi3, gemma2, gemma3, qwen3_5, qwen3_5_moe, qwen3_next, nemotron_h, gpt_oss, gemma4, glm4, glm4_moe, minimax_m2, smollm3, seed_oss, ernie4_5, olmo2, olmo3, exaone4, hunyuan_v1_dense, granite, ministral, mixtral, solar_open",
            ),
            (
                "model_type",
                json!("deepseek_v3"),
                "models of the architecture 'deepseek_v3' have latent attention, which cannot be run yet",
            ),
            (
                "model_type",
                json!("llama4_text"),
                "the architecture 'llama4' have attention in chunks",
            ),
            ("hidden_act", json!("gelu"), "'gelu'"),
            ("hidden_size", json!(72), "hidden_size is 72"),
            ("hidden_size", json!(-64), "'hidden_size' is -64"),
            ("hidden_size", Value::Null, "'hidden_size' is missing"),
            ("num_key_value_heads", json!(3), "num_key_value_heads 3"),
            ("num_hidden_layers", json!(1e30), "'num_hidden_layers'"),
            ("rms_norm_eps", json!(0), "rms_norm_eps is 0"),
            (
                "num_experts",
                json!(8),
                "num_experts is 8, a mixture of experts",
            ),
            (
                "final_logit_softcapping",
                json!(0),
                "'final_logit_softcapping' is 0",
            ),
            ("sliding_window", json!(-1), "'sliding_window' is -1"),
            (
                "layer_types",
                json!(["chunked_attention", "full_attention"]),
                "'chunked_attention'",
            ),
            ("layer_types", json!(["full_attention"]), "names 1 layers"),
            ("eos_token_id", json!("x"), "'eos_token_id'"),
            ("tie_word_embeddings", json!(1), "'tie_word_embeddings'"),
        ] {
            let e = with(key, value).unwrap_err();
            assert!(e.message().contains(expected), "{key}: {e}");
        }
    }

    #[test]
    fn windows_are_those_that_are_reached() {
        let windows = |config: &Value| {
            let spec = read(config).unwrap();
            spec.blocks
                .iter()
                .map(|b| b.attention().unwrap().window)
                .collect::<Vec<_>>()
        };
        let mut config = base();
        config["use_sliding_window"] = json!(true);
        config["sliding_window"] = json!(64);
        assert_eq!(windows(&config), [None, None]);
        config["max_window_layers"] = json!(1);
        assert_eq!(windows(&config), [None, Some(64)]);
        config["layer_types"] = json!(["sliding_attention", "full_attention"]);
        assert_eq!(windows(&config), [Some(64), None]);
        config["sliding_window"] = json!(128);
        assert_eq!(windows(&config), [None, None]);
        config["sliding_window"] = json!(64);
        config["use_sliding_window"] = json!(false);
        assert_eq!(windows(&config), [None, None]);
        let mut config = base();
        config["model_type"] = json!("mistral");
        config["max_position_embeddings"] = json!(8192);
        assert_eq!(windows(&config), [Some(4096), Some(4096)]);
        config["sliding_window"] = Value::Null;
        assert_eq!(windows(&config), [None, None]);
    }

    /// The golden values that `tests/golden/families/make.py` generated with the config classes of transformers.
    fn of_transformers() -> Value {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/golden/families/families.json"
        );
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    }

    fn object(value: &Value) -> &serde_json::Map<String, Value> {
        value.as_object().unwrap()
    }

    /// Compares numbers by value: JSON has both 1e6 and 1000000.
    fn same(a: &Value, b: &Value) -> bool {
        a == b || (a.is_number() && a.as_f64() == b.as_f64())
    }

    #[test]
    fn defaults_and_names_are_those_of_transformers() {
        let golden = of_transformers();
        let theirs = object(&golden["families"]);
        assert_eq!(theirs.len(), FAMILIES.len());
        for family in FAMILIES {
            let (ours, theirs) = ((family.defaults)(), &theirs[family.model_type]);
            let (ours, defaults) = (object(&ours), object(&theirs["defaults"]));
            let name = |name: &String| match family.renamed.iter().find(|(_, own)| own == name) {
                Some((other, _)) if !defaults.contains_key(name) => (*other).to_owned(),
                _ => name.clone(),
            };
            for (key, value) in ours {
                let expected = &defaults[&name(key)];
                assert!(
                    same(value, expected),
                    "{}: {key} is {value}, and {expected} in transformers",
                    family.model_type
                );
            }
            let has = |key: &str| {
                let mut renamed = family.renamed.iter();
                let own = renamed.find_map(|(other, own)| (*other == key).then_some(*own));
                ours.contains_key(key) || own.is_some_and(|own| ours.contains_key(own))
            };
            let missing = defaults.keys().find(|key| !has(key));
            assert_eq!(missing, None, "{}", family.model_type);
            let renamed: Vec<(&str, &str)> = object(&theirs["renamed"])
                .iter()
                .map(|(name, other)| (other.as_str().unwrap(), name.as_str()))
                .collect();
            assert_eq!(family.renamed, renamed, "{}", family.model_type);
        }
    }

    #[test]
    fn larger_models_are_those_of_transformers() {
        let golden = of_transformers();
        let theirs = object(&golden["outer"]);
        let ours = within::OUTER.iter().map(|outer| {
            let says = json!({"text": outer.text, "tied": outer.tied});
            (outer.model_type.to_owned(), says)
        });
        assert_eq!(&ours.collect::<serde_json::Map<_, _>>(), theirs);
    }

    /// Configs with missing or null keys, or 0 for none.
    #[test]
    fn configs_are_read_as_transformers_reads_them() {
        let golden = of_transformers();
        let probes = golden["probes"].as_array().unwrap();
        assert!(probes.len() > 50);
        for probe in probes {
            let mut config = object(&golden["small"]).clone();
            config.extend(object(&probe["config"]).clone());
            config.insert("model_type".to_owned(), probe["family"].clone());
            let spec = read(&Value::Object(config)).unwrap_or_else(|e| panic!("{probe}: {e}"));
            let expected = &probe["resolved"];
            let attention = spec.blocks.iter().find_map(|b| b.attention()).unwrap();
            let rope_of = |block: usize| spec.blocks[block].attention().and_then(|a| a.rope);
            let base = |block: usize| {
                let rope = &spec.ropes[rope_of(block).unwrap_or(0)].table;
                // The frequency of pair 1 is the base to the power of -2 over the size of a head.
                let width = 2.0 * rope.frequencies.len() as f64;
                f64::from(rope.frequencies[1]).powf(-width / 2.0)
            };
            let max_positions = expected["max_positions"].as_u64().unwrap();
            let windows: Vec<Option<u64>> = expected["windows"]
                .as_array()
                .unwrap()
                .iter()
                .map(|w| w.as_u64().filter(|&w| w < max_positions))
                .collect();
            let got: Vec<Option<u64>> = spec
                .blocks
                .iter()
                .map(|b| b.attention().and_then(|a| a.window).map(|w| w as u64))
                .collect();
            assert_eq!(got, windows, "{probe}");
            let sizes = json!({
                "head_dim": attention.head_dim, "kv_heads": attention.kv_heads, "max_positions": spec.max_positions,
                "tied": spec.tied
            });
            for (key, value) in object(&sizes) {
                assert_eq!(value, &expected[key], "{key} of {probe}");
            }
            assert_eq!(spec.norm_eps, expected["eps"].as_f64().unwrap() as f32);
            if spec.ropes.len() > 1 {
                // The second-to-last block has full attention, and the first has a window.
                let full = spec
                    .blocks
                    .iter()
                    .position(|b| b.attention().is_some_and(|a| a.rope == Some(0)));
                let scaling = probe["config"]["rope_scaling"]["factor"].as_f64();
                if let (Some(full), None) = (full, scaling) {
                    let want = expected["thetas"][0].as_f64().unwrap();
                    assert!((base(full) / want - 1.0).abs() < 1e-3, "{probe}");
                }
            }
            let want = expected["thetas"][spec.ropes.len() - 1].as_f64().unwrap();
            if probe["config"]["partial_rotary_factor"].is_null() {
                assert!((base(0) / want - 1.0).abs() < 1e-3, "{probe}");
            }
            if let Some(rotates) = expected["rotates"].as_array() {
                let attentions = spec.blocks.iter().filter_map(|block| block.attention());
                let got: Vec<Value> = attentions.map(|a| json!(a.rope.is_some())).collect();
                assert_eq!(&got, rotates, "{probe}");
            }
            if let Some(caps) = expected["caps"].as_array() {
                let got = [attention.score_cap, spec.logit_cap];
                let caps = caps.iter().map(|cap| cap.as_f64().map(|cap| cap as f32));
                assert_eq!(got.to_vec(), caps.collect::<Vec<_>>(), "{probe}");
            }
            let growth = spec.ropes.first().and_then(|set| set.table.growth);
            if let Some(expected) = expected["growth"].as_array() {
                let growth = growth.unwrap();
                assert_eq!(growth.rate, expected[0].as_f64().unwrap() as f32, "{probe}");
                assert_eq!(json!(growth.positions), expected[1], "{probe}");
            }
            if let Some(rotary_dim) = expected["rotary_dim"].as_u64() {
                assert_eq!(
                    spec.ropes[0].table.rotary_dim() as u64,
                    rotary_dim,
                    "{probe}"
                );
            }
            if let Some(heads) = expected["heads"].as_array() {
                let of_block = |block: &BlockSpec| {
                    let a = block.attention().unwrap();
                    (json!([a.kv_heads, a.head_dim]), json!(!a.has_own_keys()))
                };
                let (got, shared): (Vec<Value>, Vec<Value>) =
                    spec.blocks.iter().map(of_block).unzip();
                assert_eq!(&got, heads, "{probe}");
                assert_eq!(json!(shared), expected["shared"], "{probe}");
            }
            if let Some(experts) = expected["experts"].as_array() {
                let got: Vec<Value> = spec.blocks.iter().map(|b| json!(b.mlp.experts())).collect();
                assert_eq!(&got, experts, "{probe}");
                let mixture = spec.blocks.iter().find_map(|b| b.mlp.mixture()).unwrap();
                assert_eq!(json!(mixture.per_token), expected["experts_per_token"]);
                assert_eq!(json!(mixture.normalized), expected["normalized"]);
            }
        }
    }

    /// Early copies of MiniMax-M2 have the type of another architecture.
    #[test]
    fn a_class_names_a_family_where_the_type_does_not() {
        let config = |class: &str| json!({"model_type": "minimax", "architectures": [class]});
        let spec = read(&config("MiniMaxM2ForCausalLM")).unwrap();
        assert_eq!(spec.family, "minimax_m2");
        let e = read(&config("MiniMaxForCausalLM")).unwrap_err();
        assert!(e.message().contains("linear attention"), "{e}");
    }

    /// Dense models of Granite 4 have the type of those with Mamba-2.
    #[test]
    fn granite_without_mamba_is_refused_for_its_mlp() {
        let refusal = |types: Value| {
            let config = json!({"model_type": "granitemoehybrid", "layer_types": types});
            read(&config).unwrap_err().message().to_owned()
        };
        for types in [Value::Null, json!(["attention", "mamba"])] {
            assert!(refusal(types).contains("Mamba-2 before an MLP"));
        }
        let dense = refusal(json!(["attention", "attention"]));
        assert!(
            dense.contains("an MLP stored as a shared expert"),
            "{dense}"
        );
    }

    /// Flags of larger models disagree in published files: a head that is missing is tied if any of them says so.
    #[test]
    fn a_tie_flag_anywhere_ties() {
        let text = |tied: Value| {
            let mut text = base();
            text["tie_word_embeddings"] = tied;
            text
        };
        for (kind, outer, inner, expected) in [
            ("mistral3", json!(true), json!(false), true),
            ("mistral3", json!(false), json!(true), true),
            ("mistral3", json!(false), json!(false), false),
            // The default of transformers if the outer config has no flag.
            ("mistral3", Value::Null, json!(false), true),
            ("smolvlm", Value::Null, json!(false), false),
            ("unheard_of", Value::Null, json!(true), true),
        ] {
            let config = json!({"model_type": kind, "tie_word_embeddings": outer, "text_config": text(inner)});
            assert_eq!(read(&config).unwrap().tied, expected, "{config}");
            assert_eq!(is_tied(&config), expected, "{config}");
        }
        let config =
            json!({"tie_word_embeddings": true, "text_config": {"tie_word_embeddings": true}});
        assert!(is_tied(&config));
    }

    /// Gemma's vision models have the type of their values outside the text model's config.
    #[test]
    fn the_outer_type_rounds_the_scale_of_embeddings() {
        let scale = |outer: Value, inner: Value| {
            let config = json!({
                "model_type": "gemma3", "torch_dtype": outer,
                "text_config": {"model_type": "gemma3_text", "hidden_size": 1152, "dtype": inner}
            });
            read(&config).unwrap().embedding_scale
        };
        let exact = 1152f32.sqrt();
        let rounded = half::bf16::from_f32(exact).to_f32();
        assert_ne!(exact, rounded);
        assert_eq!(scale(json!("bfloat16"), Value::Null), rounded);
        assert_eq!(scale(Value::Null, json!("bfloat16")), rounded);
        assert_eq!(scale(json!("float32"), json!("bfloat16")), exact);
        assert_eq!(scale(Value::Null, Value::Null), exact);
    }

    #[test]
    fn text_models_within_others_are_found() {
        let named = json!({"model_type": "llava", "text_config": {"vocab_size": 32_064}});
        let spec = read(&named).unwrap();
        assert_eq!(
            (spec.family, spec.vocab_size, spec.blocks.len()),
            ("llama", 32_064, 32)
        );
        let mut text = base();
        text["hidden_size"] = json!(128);
        let spec = read(&json!({"model_type": "internvl_chat", "llm_config": text})).unwrap();
        assert_eq!((spec.family, spec.hidden_size), ("qwen3", 128));
    }

    /// Published configs of Qwen's vision models, flat and nested.
    #[test]
    fn text_models_of_qwens_vision_models_are_those_of_its_families() {
        let mut plain = base();
        plain["tie_word_embeddings"] = json!(true);
        for (kind, family) in within::ALIKE {
            plain["model_type"] = json!(family);
            let expected = read(&plain).unwrap();
            let mut text = plain.clone();
            text["model_type"] = json!(kind);
            text["rope_scaling"] = json!({"type": "mrope", "mrope_section": [4, 2, 2]});
            text["vision_config"] = json!({"depth": 32});
            assert_eq!(
                format!("{:?}", read(&text).unwrap()),
                format!("{expected:?}"),
                "{kind}"
            );
            text["model_type"] = json!(format!("{kind}_text"));
            text["rope_scaling"] = json!({"rope_type": "default", "mrope_interleaved": true, "mrope_section": [4, 2, 2]});
            let nested =
                json!({"model_type": kind, "tie_word_embeddings": true, "text_config": text});
            assert_eq!(
                format!("{:?}", read(&nested).unwrap()),
                format!("{expected:?}"),
                "{kind}"
            );
        }
    }

    #[test]
    fn models_that_embed_texts_are_refused() {
        let config = json!({"model_type": "gemma3_text", "use_bidirectional_attention": true});
        let e = read(&config).unwrap_err();
        assert!(e.message().contains("use_bidirectional_attention"), "{e}");
    }
}
