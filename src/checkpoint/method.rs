//! Quantization methods: float8 block sizes from `quantization_config`, and methods that no reader here supports, recognized by the config
//! or by tensor names. A model in an unsupported method cannot be loaded, but its tensors can be listed.

use serde_json::Value as Json;

use super::{Checkpoint, Encoding};
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::tensor::DType;

/// The advice for models in an unsupported method.
const INSTEAD: &str = "use the original model in BF16, or an NVFP4, FP8 or GGUF version of it";

/// Values of `quant_method`, and the name of such weights in messages.
const METHODS: [(&str, &str); 29] = [
    ("aqlm", "AQLM codebooks"),
    ("auto-round", "AutoRound integers"),
    ("awq", "AWQ integers"),
    ("bitnet", "BitNet ternary weights"),
    ("deepspeedfp", "DeepSpeed FP6 or FP8"),
    ("eetq", "EETQ 8-bit integers"),
    ("exl2", "EXL2 integers"),
    ("exl3", "EXL3 trellis codes"),
    ("experts_int8", "8-bit integers"),
    ("fouroversix", "Four Over Six tensors"),
    ("fp_quant", "FP-Quant, rotated 4-bit floats"),
    ("gemma", "quantized Gemma integers"),
    ("gptq", "GPTQ integers"),
    ("gptqmodel", "GPTQ integers"),
    ("higgs", "HIGGS, rotated codes"),
    ("hqq", "HQQ integers"),
    ("marlin", "Marlin integers"),
    ("metal", "integers for Metal"),
    ("mlx", "MLX integers"),
    ("moe_wna16", "integers of experts"),
    ("quanto", "quanto tensors"),
    ("quark", "Quark tensors"),
    ("quip", "QuIP# codes"),
    ("sinq", "SINQ integers"),
    ("spqr", "SpQR integers"),
    ("squeezellm", "SqueezeLLM codes"),
    ("torchao", "torchao tensors"),
    ("tpu_int8", "8-bit integers"),
    ("vptq", "VPTQ codebooks"),
];

/// Methods with at least one supported form. The tensors tell which form a model has.
const READ: [&str; 13] = [
    "auto-round",
    "bitsandbytes",
    "compressed-tensors",
    "fbgemm_fp8",
    "fp8",
    "modelopt",
    "modelopt_fp4",
    "mxfp4",
    "mxfp8",
    "nvfp4",
    "quark",
    "torchao",
    "gguf",
];

/// Methods of which 4-bit integers are read.
const INTEGERS: [&str; 4] = ["auto-round", "awq", "gptq", "gptqmodel"];

/// Unsupported formats of compressed-tensors.
const COMPRESSED: [(&str, &str); 6] = [
    ("marlin-24", "sparse 4-bit integers"),
    ("mxfp4-pack-quantized", "MXFP4"),
    ("mxfp6-pack-quantized", "MXFP6"),
    ("pack-quantized", "packed integers"),
    ("sparse-24-bitmask", "sparse weights"),
    ("sparse-bitmask", "sparse weights"),
];

/// The quantization declared by a config, including that of a nested text model.
pub(super) fn declared(config: &Json) -> Option<&Json> {
    let places = [
        &config["quantization_config"],
        &config["text_config"]["quantization_config"],
        &config["compression_config"],
    ];
    places.into_iter().find(|place| place.is_object())
}

/// How a file of GPTQ stores zero points and groups.
pub(super) struct GptqForm {
    /// Added to a stored zero point, modulo 16: 1 in the first version of its files.
    pub(super) zero_offset: u8,
    /// Whether `g_idx` says the group of each input. Other files number inputs in order, whatever theirs says.
    pub(super) is_ordered: bool,
}

/// The form of a file of GPTQ; `None` for AutoRound's own form, which has other zero points.
pub(super) fn gptq(declared: Option<&Json>) -> Option<GptqForm> {
    let text = |key: &str| declared.and_then(|d| d[key].as_str());
    let is_own = text("quant_method") == Some("auto-round")
        && !text("packing_format").is_some_and(|format| format.contains("gptq"));
    let form = GptqForm {
        zero_offset: (text("checkpoint_format") != Some("gptq_v2")).into(),
        is_ordered: declared.is_none_or(|d| d["desc_act"] != false),
    };
    (!is_own).then_some(form)
}

/// Inputs of a group of MLX's integers of 4 bits, in this module; `None` if it has other codes.
pub(super) fn mlx(config: &Json, module: &str) -> Option<usize> {
    let places = [&config["quantization"], &config["quantization_config"]];
    let all = places.into_iter().find(|q| q["group_size"].is_u64())?;
    let of = |key: &str| all[module].get(key).or_else(|| all.get(key));
    let is_affine = of("mode").is_none_or(|mode| mode == "affine");
    let is_read = is_affine && of("bits").is_some_and(|bits| *bits == 4);
    of("group_size")
        .and_then(number)
        .filter(|&size| is_read && size > 0)
}

/// The distinct float8 block sizes `[rows, columns]` of a declared quantization.
pub(super) fn block_sizes(declared: &Json) -> Result<Vec<[usize; 2]>> {
    let mut sizes = Vec::new();
    let given = &declared["weight_block_size"];
    if !given.is_null() {
        sizes.push(block_size("weight_block_size", given)?);
    }
    for group in groups(declared) {
        let weights = &group["weights"];
        if weights["num_bits"].as_u64().is_some_and(|bits| bits != 8) {
            continue;
        }
        let (structure, size) = (&weights["block_structure"], &weights["group_size"]);
        if !structure.is_null() {
            sizes.push(block_size("block_structure", structure)?);
        } else if size.as_u64().is_some_and(|size| size > 0) {
            sizes.push([1, number(size).unwrap_or(1)]);
        }
    }
    sizes.dedup();
    Ok(sizes)
}

fn groups(declared: &Json) -> impl Iterator<Item = &Json> {
    let groups = declared["config_groups"].as_object();
    groups.into_iter().flat_map(|groups| groups.values())
}

/// Inputs of the groups of weights that a config of compressed-tensors names.
pub(super) fn group_sizes(config: &Json) -> Vec<usize> {
    let declared = declared(config).into_iter().flat_map(groups);
    let sizes = declared.filter_map(|group| group["weights"]["group_size"].as_u64());
    sizes
        .filter_map(|size| usize::try_from(size).ok())
        .collect()
}

/// Whether a group of weights has integers that are read when all of their tensors are there.
fn is_int4(group: &Json) -> bool {
    group["weights"]["num_bits"] == 4 && group["weights"]["type"] != "float"
}

/// Rows and columns of a block: `[128, 128]`, or "128x128" in older files.
fn block_size(key: &str, given: &Json) -> Result<[usize; 2]> {
    let sizes: Option<Vec<usize>> = match given {
        Json::Array(sizes) => sizes.iter().map(number).collect(),
        Json::String(text) => text.split('x').map(|n| n.trim().parse().ok()).collect(),
        _ => None,
    };
    match sizes.as_deref() {
        Some(&[rows, cols]) if rows > 0 && cols > 0 => Ok([rows, cols]),
        _ => Err(err!(
            CorruptFile,
            "config.json: {key} is {given}; expected two numbers above 0, rows and columns"
        )),
    }
}

fn number(value: &Json) -> Option<usize> {
    value.as_u64().and_then(|n| usize::try_from(n).ok())
}

/// Refuses a model in an unsupported method with a message that names the method. `is_complete` says that the checkpoint has all
/// tensors that the model needs, with the right shapes and types. A method in the config is then only a warning, as in transformers.
pub fn check_method(checkpoint: &dyn Checkpoint, is_complete: bool) -> Result<()> {
    let config = checkpoint.metadata().config.as_ref();
    let declared = config.and_then(self::declared);
    let method = declared.and_then(|d| d["quant_method"].as_str());
    if method == Some("bitnet") {
        bail!(
            Unsupported,
            "{}",
            refusal("BitNet ternary weights", &by_method("bitnet"))
        );
    }
    if let Some(location) = declared.and_then(online_transform) {
        bail!(
            Unsupported,
            "config.json: transform_config changes activations while the model runs ('{location}'), which is not supported; {INSTEAD}"
        );
    }
    if is_complete {
        let is_read = |method: &str| READ.contains(&method) || INTEGERS.contains(&method);
        if let Some(method) = method.filter(|m| !is_read(&m.to_ascii_lowercase())) {
            tracing::warn!(
                "config.json says quant_method '{method}', but all weights are there in a form that needs none; they are read as they are"
            );
        }
        return Ok(());
    }
    let told = config
        .and_then(by_config)
        .or_else(|| by_tensors(checkpoint));
    match told {
        Some(text) => bail!(Unsupported, "{text}"),
        None => Ok(()),
    }
}

fn refusal(what: &str, why: &str) -> String {
    format!("the weights are {what} ({why}), which are not supported; {INSTEAD}")
}

fn by_method(method: &str) -> String {
    format!("quant_method '{method}' in config.json")
}

/// The location of a compressed-tensors transform that changes activations rather than weights.
fn online_transform(declared: &Json) -> Option<&str> {
    groups(&declared["transform_config"])
        .filter_map(|group| group["apply"].as_array())
        .flatten()
        .filter_map(|apply| apply["location"].as_str())
        .find(|location| !location.starts_with("weight_"))
}

/// The refusal of a model whose config names an unsupported method.
fn by_config(config: &Json) -> Option<String> {
    let declared = self::declared(config);
    let Some(method) = declared.and_then(|d| d["quant_method"].as_str()) else {
        // MLX names no method.
        let mlx = [Some(&config["quantization"]), declared];
        let mlx = mlx
            .into_iter()
            .flatten()
            .find(|q| q["group_size"].is_u64())?;
        let what = with_bits("MLX integers", mlx);
        let why = "quantization in config.json: affine ones of 4 bits are read, unless experts are stacked";
        return Some(refusal(&what, why));
    };
    let declared = declared?;
    let lower = method.to_ascii_lowercase();
    match lower.as_str() {
        "compressed-tensors" => {
            let formats = std::iter::once(declared).chain(groups(declared));
            let is_read = groups(declared).next().is_some() && groups(declared).all(is_int4);
            formats
                .filter_map(|of| of["format"].as_str())
                .filter(|format| *format != "pack-quantized" || !is_read)
                .find_map(|format| {
                    let (_, what) = COMPRESSED.iter().find(|(name, _)| *name == format)?;
                    let why = format!("format '{format}' of compressed-tensors in config.json");
                    Some(refusal(what, &why))
                })
        }
        "bitsandbytes" if declared["load_in_8bit"] == true => Some(refusal(
            "8-bit integers of bitsandbytes",
            "load_in_8bit in config.json",
        )),
        "modelopt" => by_algorithm(declared),
        method if INTEGERS.contains(&method) && declared["bits"] == 4 => None,
        "bitsandbytes" | "fbgemm_fp8" | "fp8" | "modelopt_fp4" | "mxfp4" | "mxfp8" | "nvfp4"
        | "gguf" => None,
        _ => {
            let known = METHODS.iter().find(|(name, _)| *name == lower);
            let what = known.map_or("in an unknown format", |(_, what)| what);
            Some(refusal(&with_bits(what, declared), &by_method(method)))
        }
    }
}

/// The refusal of a model of ModelOpt with an unsupported algorithm: that of all layers, or of one in a mixed file.
fn by_algorithm(declared: &Json) -> Option<String> {
    let algorithm = declared["quant_algo"].as_str();
    if let Some(algorithm) = algorithm
        && ["INT4", "INT8", "W4A8", "W4A16_AWQ", "MXFP4"]
            .iter()
            .any(|unread| algorithm.contains(unread))
    {
        return Some(refusal(algorithm, "quant_algo of ModelOpt in config.json"));
    }
    let layers = declared["quantized_layers"].as_object()?.iter();
    let mut algorithms = layers.map(|(layer, of)| (layer, of["quant_algo"].as_str().unwrap_or("")));
    let (layer, algorithm) = algorithms
        .find(|(_, algorithm)| !["FP8", "NVFP4"].iter().any(|read| algorithm.contains(read)))?;
    let what = match algorithm {
        "" => "in a format without a name",
        algorithm => algorithm,
    };
    let why = format!("quant_algo of '{layer}', one of ModelOpt's quantized_layers in config.json");
    Some(refusal(what, &why))
}

/// Adds the number of bits to a name of integers: "4-bit AWQ integers".
fn with_bits(what: &str, declared: &Json) -> String {
    match declared["bits"].as_u64() {
        Some(bits) if what.contains("integers") && !what.contains("-bit") => {
            format!("{bits}-bit {what}")
        }
        _ => what.to_owned(),
    }
}

/// The refusal of a model whose tensors have the names of an unsupported method.
fn by_tensors(checkpoint: &dyn Checkpoint) -> Option<String> {
    let has = |name: &str| checkpoint.find(name).is_some();
    let entries = checkpoint.entries().iter();
    let entries = entries.map(|e| (e.name.as_str(), Some(e.encoding)));
    // Tensors of unread types count too, such as the U32 of MLX.
    let unreadable = checkpoint.unreadable().iter();
    let mut tensors = entries.chain(unreadable.map(|u| (u.name.as_str(), None)));
    tensors.find_map(|(name, encoding)| {
        let beside = |module: &str, suffix: &str| has(&format!("{module}{suffix}"));
        let what = if let Some(module) = name.strip_suffix(".qweight") {
            match beside(module, ".g_idx") {
                true => "GPTQ integers",
                false => "AWQ or GPTQ integers",
            }
        } else if name.ends_with(".weight_packed") {
            match encoding.and_then(Encoding::element_bytes) {
                Some(1) => "MXFP4 of compressed-tensors",
                _ => "packed integers of compressed-tensors",
            }
        } else if let Some(module) = name.strip_suffix(".weight")
            && encoding.is_none_or(Encoding::is_integer)
        {
            if beside(module, ".SCB") {
                "8-bit integers of bitsandbytes"
            } else if beside(module, ".biases") {
                "MLX integers"
            } else if beside(module, ".weight_scales") {
                "EETQ 8-bit integers"
            } else if beside(module, ".weight_scale")
                && encoding == Some(Encoding::Dense(DType::U8))
            {
                "MXFP4 or other packed codes"
            } else if beside(module, ".weight_scale") {
                "integers with scales"
            } else {
                return None;
            }
        } else if name.ends_with("._weight_qdata") {
            "torchao tensors"
        } else if name.ends_with(".weight._data") {
            "quanto tensors"
        } else if name.ends_with(".W_q") {
            "HQQ integers"
        } else if name.ends_with(".q_weight") {
            "EXL2 integers"
        } else if name.ends_with(".trellis") {
            "EXL3 trellis codes"
        } else if name.ends_with(".codebooks") {
            "AQLM codebooks"
        } else {
            return None;
        };
        Some(refusal(what, &format!("'{name}'")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn blocks_are_given_in_three_ways() {
        let group = |weights: Json| json!({"config_groups": {"group_0": {"weights": weights}}});
        for (config, sizes) in [
            (json!({"weight_block_size": [128, 64]}), vec![[128, 64]]),
            (group(json!({"block_structure": [64, 32]})), vec![[64, 32]]),
            (group(json!({"block_structure": "128x96"})), vec![[128, 96]]),
            (
                group(json!({"group_size": 32, "num_bits": 8})),
                vec![[1, 32]],
            ),
            (group(json!({"group_size": 16, "num_bits": 4})), vec![]),
            (
                group(json!({"group_size": null, "strategy": "channel"})),
                vec![],
            ),
            (json!({"weight_block_size": null}), vec![]),
        ] {
            assert_eq!(block_sizes(&config).unwrap(), sizes, "{config}");
        }
        for bad in [
            json!([128]),
            json!("128"),
            json!([0, 128]),
            json!("ax128"),
            json!(128),
        ] {
            for config in [
                group(json!({"block_structure": bad})),
                json!({"weight_block_size": bad}),
            ] {
                let e = block_sizes(&config).unwrap_err();
                assert!(e.message().contains("two numbers above 0"), "{e}");
            }
        }
    }

    #[test]
    fn configs_name_what_is_not_read() {
        let of = |quantization: Json| by_config(&json!({"quantization_config": quantization}));
        for (config, words) in [
            (
                json!({"quant_method": "awq", "bits": 8}),
                "8-bit AWQ integers (quant_method 'awq'",
            ),
            (
                json!({"quant_method": "gptq", "bits": 8}),
                "8-bit GPTQ integers",
            ),
            (
                json!({"quant_method": "bitsandbytes", "load_in_8bit": true}),
                "8-bit integers of bitsandbytes",
            ),
            (
                json!({"quant_method": "compressed-tensors", "format": "pack-quantized"}),
                "packed integers (format 'pack-quantized'",
            ),
            (
                json!({"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {"a": {"format": "float-quantized"}, "b": {"format": "mxfp4-pack-quantized"}}}),
                "MXFP4 (format 'mxfp4-pack-quantized'",
            ),
            (
                json!({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}),
                "W4A8_AWQ (quant_algo",
            ),
            (
                json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
                    "model.layers.0.mlp.up_proj": {"quant_algo": "W4A16_NVFP4"}, "model.layers.1.mlp.up_proj": {"quant_algo": "NOVEL"}}}),
                "NOVEL (quant_algo of 'model.layers.1.mlp.up_proj'",
            ),
            (
                json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"lm_head": {}}}),
                "in a format without a name (quant_algo of 'lm_head'",
            ),
            (
                json!({"quant_method": "HQQ"}),
                "HQQ integers (quant_method 'HQQ'",
            ),
            (
                json!({"quant_method": "novel", "bits": 3}),
                "in an unknown format (quant_method 'novel'",
            ),
            (
                json!({"group_size": 64, "bits": 4}),
                "4-bit MLX integers (quantization in",
            ),
        ] {
            let told = of(config.clone()).unwrap_or_else(|| panic!("{config} is read"));
            assert!(told.contains(words) && told.contains(INSTEAD), "{told}");
        }
        let mlx = by_config(&json!({"quantization": {"group_size": 64, "bits": 6}})).unwrap();
        assert!(mlx.contains("6-bit MLX integers"), "{mlx}");
        for config in [
            json!({"quant_method": "fp8", "weight_block_size": [128, 128]}),
            json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}),
            json!({"quant_method": "modelopt", "quant_algo": "FP8"}),
            json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
                "a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W4A16_NVFP4", "group_size": 16}, "c": {"quant_algo": "FP8_PB_WO"}}}),
            json!({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}),
            json!({"quant_method": "compressed-tensors", "format": "float-quantized"}),
            json!({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": {"weights": {"num_bits": 4}}}}),
            json!({"quant_method": "bitsandbytes", "load_in_4bit": true}),
            json!({"quant_method": "gptq", "bits": 4}),
            json!({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}),
        ] {
            assert_eq!(of(config.clone()), None, "{config}");
        }
        assert_eq!(by_config(&json!({"model_type": "llama"})), None);
    }

    #[test]
    fn transforms_of_activations_are_found() {
        let with = |location: &str| {
            json!({"transform_config": {"config_groups": {"R1": {
                "type": "hadamard", "apply": [{"targets": ["Linear"], "location": location}]
            }}}})
        };
        assert_eq!(online_transform(&with("input")), Some("input"));
        assert_eq!(online_transform(&with("q_attn")), Some("q_attn"));
        assert_eq!(online_transform(&with("weight_output")), None);
        assert_eq!(online_transform(&json!({"transform_config": {}})), None);
    }
}
