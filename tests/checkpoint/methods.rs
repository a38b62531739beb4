//! Small llama models in the forms of quantization methods: supported ones are read correctly, and others are refused in one line that
//! names the method and an alternative, by loading, estimating, training and converting alike.

use std::ops::ControlFlow;
use std::path::Path;

use NVFP4::base::threads::Pool;
use NVFP4::base::{ErrorKind, Result};
use NVFP4::engine::Served;
use NVFP4::format::nvfp4::Recipe;
use NVFP4::format::random;
use NVFP4::model::convert::{Container, ConvertOptions, convert};
use NVFP4::model::footprint::weight_bytes;
use NVFP4::model::training::Source;
use NVFP4::model::{self, Device, LoadOptions};
use NVFP4::ops::DeviceKind;
use serde_json::{Value, json};

use super::files::{Scratch, tensors};

pub(super) const ATTENTION: &str = "model.layers.0.self_attn.";

/// A tensor: name, dtype, shape and bytes.
pub(super) type Tensor = (String, &'static str, Vec<usize>, Vec<u8>);

fn f32s(values: impl Iterator<Item = f32>) -> Vec<u8> {
    values.flat_map(f32::to_le_bytes).collect()
}

/// Random values in a tensor of this name and shape.
fn dense(name: &str, shape: &[usize]) -> Tensor {
    let seed = name.bytes().map(u64::from).sum();
    let count = shape.iter().product::<usize>() as u64;
    let values = (0..count).map(|i| (random::bits(seed, i) as i64 as f64 / 2f64.powi(66)) as f32);
    (name.to_owned(), "F32", shape.to_vec(), f32s(values))
}

/// A tensor of zeros.
fn zeros(name: &str, dtype: &'static str, shape: &[usize]) -> Tensor {
    let width = match dtype {
        "I64" => 8,
        "F32" | "I32" => 4,
        "F16" | "BF16" => 2,
        _ => 1,
    };
    let bytes = vec![0; width * shape.iter().product::<usize>()];
    (name.to_owned(), dtype, shape.to_vec(), bytes)
}

/// Every tensor of a model that is not quantized.
fn model_tensors() -> Vec<Tensor> {
    let layer = |name: &str| format!("model.layers.0.{name}");
    vec![
        dense("model.embed_tokens.weight", &[20, 32]),
        dense("lm_head.weight", &[20, 32]),
        dense("model.norm.weight", &[32]),
        dense(&layer("input_layernorm.weight"), &[32]),
        dense(&layer("post_attention_layernorm.weight"), &[32]),
        dense(&layer("self_attn.q_proj.weight"), &[32, 32]),
        dense(&layer("self_attn.k_proj.weight"), &[16, 32]),
        dense(&layer("self_attn.v_proj.weight"), &[16, 32]),
        dense(&layer("self_attn.o_proj.weight"), &[32, 32]),
        dense(&layer("mlp.gate_proj.weight"), &[48, 32]),
        dense(&layer("mlp.up_proj.weight"), &[48, 32]),
        dense(&layer("mlp.down_proj.weight"), &[32, 48]),
    ]
}

/// Writes the model with these tensors and this `quantization_config`.
pub(super) fn write(directory: &Path, all: &[Tensor], quantization: Value) {
    std::fs::create_dir_all(directory).unwrap();
    let shapes: Vec<String> = all.iter().map(|t| format!("{:?}", t.2)).collect();
    let items: Vec<_> = all
        .iter()
        .zip(&shapes)
        .map(|(t, shape)| (t.0.as_str(), t.1, shape.as_str(), t.3.clone()))
        .collect();
    std::fs::write(directory.join("model.safetensors"), tensors(&items)).unwrap();
    let mut config = json!({
        "model_type": "llama", "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 20,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": false,
    });
    if !quantization.is_null() {
        config["quantization_config"] = quantization;
    }
    std::fs::write(directory.join("config.json"), config.to_string()).unwrap();
}

/// The model with the weights of attention in another form: `of` gives the tensors that stand for one, by module and shape.
pub(super) fn with_attention(of: impl Fn(&str, [usize; 2]) -> Vec<Tensor>) -> Vec<Tensor> {
    let mut all = Vec::new();
    for tensor in model_tensors() {
        match tensor.0.strip_suffix(".weight") {
            Some(module) if module.starts_with(ATTENTION) => {
                all.extend(of(module, [tensor.2[0], tensor.2[1]]));
            }
            _ => all.push(tensor),
        }
    }
    all
}

pub(super) fn load(directory: &Path) -> Result<()> {
    Served::load(directory, &LoadOptions::new(Device::cpu(Some(1))?)).map(|_| ())
}

pub(super) fn quantize(directory: &Path, to: &Path) -> Result<()> {
    let options = ConvertOptions::new(Container::ModelOpt, Recipe::Amax);
    let source = model::open(directory)?;
    convert(&*source, to, &options, &Pool::new(1)?, &mut |_| {
        ControlFlow::Continue(())
    })
    .map(|_| ())
}

/// Every way to use a model refuses this one in the same line, which has these words; it can still be listed.
#[track_caller]
pub(super) fn refused(all: &[Tensor], quantization: Value, words: &str) {
    let scratch = Scratch::new();
    let (from, to) = (scratch.0.join("in"), scratch.0.join("out"));
    write(&from, all, quantization);
    let opened = model::open(&from).unwrap_or_else(|e| panic!("{words}: {e}"));
    assert!(!opened.entries().is_empty());
    for result in [
        load(&from),
        weight_bytes(&*opened, DeviceKind::Cpu, false).map(|_| ()),
        Source::open(&from).map(|_| ()),
        quantize(&from, &to),
    ] {
        let e = result.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unsupported, "{e}");
        assert!(e.message().contains(words), "'{words}' is not in: {e}");
        assert!(!e.message().contains('\n'), "{e}");
        let instead = "use the original model in BF16, or an NVFP4, FP8 or GGUF version of it";
        assert!(e.message().ends_with(instead), "{e}");
    }
    assert!(!to.exists(), "{words}: something was written");
}

/// 8-bit integers of GPTQ.
fn packed_words(module: &str, [rows, cols]: [usize; 2]) -> Vec<Tensor> {
    vec![
        zeros(&format!("{module}.qweight"), "I32", &[cols / 4, rows]),
        zeros(&format!("{module}.qzeros"), "I32", &[1, rows / 4]),
        zeros(&format!("{module}.scales"), "F16", &[1, rows]),
    ]
}

/// MXFP4 and packed integers of compressed-tensors.
fn compressed(
    codes: &'static str,
    per_code: usize,
    scales: &'static str,
) -> impl Fn(&str, [usize; 2]) -> Vec<Tensor> {
    move |module, [rows, cols]| {
        vec![
            zeros(
                &format!("{module}.weight_packed"),
                codes,
                &[rows, cols / per_code],
            ),
            zeros(
                &format!("{module}.weight_scale"),
                scales,
                &[rows, cols / 32],
            ),
        ]
    }
}

#[test]
fn methods_that_the_config_names_are_refused_by_name() {
    let integers = with_attention(packed_words);
    for (method, words) in [
        (
            json!({"quant_method": "awq", "bits": 8}),
            "8-bit AWQ integers (quant_method 'awq' in config.json)",
        ),
        (
            json!({"quant_method": "gptq", "bits": 8}),
            "8-bit GPTQ integers",
        ),
        (json!({"quant_method": "hqq"}), "HQQ integers"),
        (json!({"quant_method": "quanto"}), "quanto tensors"),
        (
            json!({"quant_method": "zip4", "bits": 4}),
            "in an unknown format (quant_method 'zip4' in config.json)",
        ),
        (
            json!({"group_size": 64, "bits": 4}),
            "4-bit MLX integers (quantization in config.json:",
        ),
    ] {
        refused(&integers, method, words);
    }
    let int4 = with_attention(compressed("I32", 8, "BF16"));
    let method = |format: &str| json!({"quant_method": "compressed-tensors", "format": format});
    let words = "packed integers (format 'pack-quantized' of compressed-tensors in config.json)";
    refused(&int4, method("pack-quantized"), words);
    let mxfp4 = with_attention(compressed("U8", 2, "U8"));
    refused(
        &mxfp4,
        method("mxfp4-pack-quantized"),
        "the weights are MXFP4",
    );
    let bytes = with_attention(|module, [rows, cols]| {
        vec![
            zeros(&format!("{module}.weight"), "I8", &[rows, cols]),
            zeros(&format!("{module}.SCB"), "F32", &[rows]),
        ]
    });
    refused(
        &bytes,
        json!({"quant_method": "bitsandbytes", "load_in_8bit": true}),
        "8-bit integers of bitsandbytes (load_in_8bit",
    );
}

#[test]
fn methods_that_only_the_tensors_tell_are_refused_by_name() {
    let q = "'model.layers.0.self_attn.q_proj.";
    for (all, words) in [
        (
            with_attention(packed_words),
            format!("AWQ or GPTQ integers ({q}qweight')"),
        ),
        (
            with_attention(|module, shape| {
                let mut all = packed_words(module, shape);
                all.push(zeros(&format!("{module}.g_idx"), "I32", &[32]));
                all
            }),
            format!("are GPTQ integers ({q}qweight')"),
        ),
        (
            with_attention(compressed("I32", 8, "BF16")),
            format!("packed integers of compressed-tensors ({q}weight_packed')"),
        ),
        (
            with_attention(compressed("U8", 2, "U8")),
            format!("MXFP4 of compressed-tensors ({q}weight_packed')"),
        ),
        (
            with_attention(|module, [rows, cols]| {
                vec![
                    zeros(&format!("{module}.weight"), "I8", &[rows, cols]),
                    zeros(&format!("{module}.SCB"), "F32", &[rows]),
                ]
            }),
            format!("8-bit integers of bitsandbytes ({q}weight')"),
        ),
        (
            with_attention(|module, [rows, cols]| {
                vec![
                    zeros(&format!("{module}.weight"), "U8", &[rows, cols / 2]),
                    zeros(&format!("{module}.weight_scale"), "U8", &[rows, cols / 32]),
                ]
            }),
            format!("MXFP4 or other packed codes ({q}weight')"),
        ),
        (
            with_attention(|module, [rows, cols]| {
                vec![zeros(&format!("{module}.W_q"), "U8", &[rows, cols / 2])]
            }),
            format!("HQQ integers ({q}W_q')"),
        ),
        (
            with_attention(|module, [rows, cols]| {
                vec![
                    zeros(&format!("{module}._weight_qdata"), "I8", &[rows, cols]),
                    zeros(&format!("{module}._weight_scale"), "F32", &[rows]),
                ]
            }),
            format!("torchao tensors ({q}_weight_qdata')"),
        ),
    ] {
        refused(&all, Value::Null, &words);
    }
}

/// Weights in a known form load whatever the config calls them, as in transformers, unless more than weights was changed.
#[test]
fn weights_that_need_no_method_are_read() {
    let all = model_tensors();
    for method in [
        json!({"quant_method": "hqq"}),
        json!({"quant_method": "zip4"}),
        json!({"quant_method": "fp8", "weight_block_size": [128, 128]}),
        json!({"quant_method": "compressed-tensors", "format": "float-quantized", "transform_config": {}}),
    ] {
        let scratch = Scratch::new();
        write(&scratch.0, &all, method.clone());
        load(&scratch.0).unwrap_or_else(|e| panic!("{method}: {e}"));
    }
    refused(
        &all,
        json!({"quant_method": "bitnet"}),
        "BitNet ternary weights",
    );
    let transform = json!({"R3": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}});
    refused(
        &all,
        json!({"quant_method": "compressed-tensors", "transform_config": {"config_groups": transform}}),
        "changes activations while the model runs ('input')",
    );
}

/// Float8 as compressed-tensors, DeepSeek and ModelOpt write it runs, modules that are ignored stay dense, and a scale that is missing
/// is not taken for 1.
#[test]
fn float8_models_load() {
    let code = |i: usize| (random::bits(7, i as u64) % 0x7f) as u8;
    let float8 = |suffix: &'static str, shape: fn([usize; 2]) -> Vec<usize>| {
        move |module: &str, [rows, cols]: [usize; 2]| {
            let scales = shape([rows, cols]);
            let count = scales.iter().product::<usize>();
            vec![
                (
                    format!("{module}.weight"),
                    "F8_E4M3",
                    vec![rows, cols],
                    (0..rows * cols).map(code).collect(),
                ),
                (
                    format!("{module}.{suffix}"),
                    "F32",
                    scales,
                    f32s((0..count).map(|i| 1e-3 * (i + 1) as f32)),
                ),
            ]
        }
    };
    let block = json!({"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [24, 24]}}}});
    let fp8 = json!({"quant_method": "fp8", "weight_block_size": [24, 24]});
    let modelopt = json!({"quant_method": "modelopt", "quant_algo": "FP8"});
    let by_block = |[rows, cols]: [usize; 2]| vec![rows.div_ceil(24), cols.div_ceil(24)];
    for (suffix, shape, method) in [
        (
            "weight_scale",
            by_block as fn([usize; 2]) -> Vec<usize>,
            &block,
        ),
        ("weight_scale_inv", by_block, &fp8),
        (
            "weight_scale",
            |[rows, cols]| vec![rows.div_ceil(128), 1, cols.div_ceil(128), 1],
            &modelopt,
        ),
        ("weight_scale", |[rows, _]| vec![rows, 1], &modelopt),
        ("weight_scale", |_| vec![], &modelopt),
    ] {
        let scratch = Scratch::new();
        let (from, to) = (scratch.0.join("in"), scratch.0.join("out"));
        write(
            &from,
            &with_attention(float8(suffix, shape)),
            method.clone(),
        );
        load(&from).unwrap_or_else(|e| panic!("{method}: {e}"));
        quantize(&from, &to).unwrap();
        load(&to).unwrap();
    }
    let scratch = Scratch::new();
    let lone = with_attention(|module, shape| {
        let mut all = float8("weight_scale", |_| vec![])(module, shape);
        all.truncate(1);
        all
    });
    write(&scratch.0, &lone, block);
    let e = load(&scratch.0).unwrap_err();
    let words = "there is no 'model.layers.0.self_attn.q_proj.weight_scale'";
    assert_eq!(e.kind(), ErrorKind::CorruptFile);
    assert!(e.message().contains(words), "{e}");
    write(&scratch.0, &lone, Value::Null);
    load(&scratch.0).unwrap();
}
