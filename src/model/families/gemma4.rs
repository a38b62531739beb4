//! Gemma 4: norms before and after each half of a block; layers with full attention have heads of their own size and number, and may take
//! keys for values; the last layers may take keys and values of earlier ones.

use serde_json::{Map, Value, json};

use super::decoder::{
    Decoder, WINDOWED, activation, check_heads, expert_counts, intermediate_size, multiple_of_block,
};
use super::family::Family;
use super::gemma::embedding_scale;
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::model::keys::Keys;
use crate::model::rope::{self, RopeSet};
use crate::model::spec::{
    AttentionSpec, DenseMlpSpec, ExpertNames, ExpertsSpec, KeyValues, MlpSpec, NormNames,
    NormPlacement, PerLayerSpec, PerLayerTableSpec, QkNorm, Scoring, Spec,
};

pub(super) const GEMMA4: Family = Family {
    model_type: "gemma4",
    class: "Gemma4ForCausalLM",
    defaults,
    renamed: &[],
    read,
};

fn defaults() -> Value {
    json!({
        "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "tie_word_embeddings": true, "rope_parameters": null,
        "attention_bias": false, "sliding_window": 512, "layer_types": null, "final_logit_softcapping": null,
        "use_bidirectional_attention": null, "vocab_size_per_layer_input": 262_144, "hidden_size_per_layer_input": 256,
        "attention_k_eq_v": false, "num_kv_shared_layers": 0, "enable_moe_block": false, "use_double_wide_mlp": false,
        "num_experts": null, "top_k_experts": null, "moe_intermediate_size": null
    })
}

/// Where files have experts, which are beside the MLP and not in it.
const EXPERTS: &[(&str, &str)] = &[("mlp.experts.", "experts.")];
/// Elements of a head of full attention, if the config does not say.
const GLOBAL_HEAD_DIM: usize = 512;
/// One layer of so many has full attention, if the config does not say.
const PATTERN: usize = 6;
/// The rotation's base for layers with full attention, and for layers with a window.
const THETA: (f64, f64) = (1e6, 1e4);
/// The part of the pairs of a head of full attention that turns, if the config does not say.
const PARTIAL_ROTARY: f64 = 0.25;

fn read(keys: &Keys<'_>) -> Result<Spec> {
    check_direction(keys)?;
    let config = with_rotations(keys)?;
    let mut decoder = Decoder::read_with(&Keys(&config), |_, _| Ok(Vec::new()))?;
    let windowed = windowed_layers(keys, &decoder)?;
    let heads = heads_by_layer(keys, &decoder, &windowed)?;
    decoder.spec.ropes = rotations(&Keys(&config), &decoder, &heads, &windowed)?;
    decoder.read_attention_bias(keys)?;
    decoder.spec.norm_names = NormNames::PRE_AND_POST;
    decoder.spec.embedding_scale = embedding_scale(keys, decoder.spec.hidden_size)?;
    decoder.block.scaled = true;
    decoder.block.norms = NormPlacement {
        pre: true,
        post: true,
    };
    decoder.block.attention = AttentionSpec {
        qk_norm: QkNorm::Heads,
        value_norm: true,
        scale: 1.0,
        score_cap: None,
        ..decoder.block.attention
    };
    read_per_layer(keys, &mut decoder)?;
    read_experts(keys, &mut decoder)?;
    let sources = sources(keys, &windowed)?;
    let has_one_projection = keys.flag("attention_k_eq_v")? == Some(true);
    let is_double_wide = keys.flag("use_double_wide_mlp")? == Some(true);
    let window = decoder.effective_window(keys.window("sliding_window")?);
    Ok(decoder.finish(|layer, block| {
        let attention = &mut block.attention;
        (attention.kv_heads, attention.head_dim) = (heads[layer].kv_heads, heads[layer].head_dim);
        attention.rope = Some(usize::from(windowed[layer]));
        attention.window = window.filter(|_| windowed[layer]);
        attention.key_values = match sources[layer] {
            Some(source) => KeyValues::OfBlock(source),
            None if has_one_projection && !windowed[layer] => KeyValues::KeysAsValues,
            None => KeyValues::Projected,
        };
        if let (Some(_), true, MlpSpec::Dense(mlp) | MlpSpec::DenseAndExperts(mlp, _)) =
            (sources[layer], is_double_wide, &mut block.mlp)
        {
            mlp.intermediate_size *= 2;
        }
    }))
}

/// Refuses attention to later tokens. That of pictures' tokens alone changes nothing for a text.
fn check_direction(keys: &Keys<'_>) -> Result<()> {
    match keys.text("use_bidirectional_attention")? {
        None | Some("vision") => Ok(()),
        Some("all") => bail!(
            Unsupported,
            "config: 'use_bidirectional_attention' is all: the model embeds whole texts; only models that predict the next token can be run"
        ),
        Some(other) => bail!(
            Unsupported,
            "config: 'use_bidirectional_attention' is '{other}'; known are vision, or null for none"
        ),
    }
}

/// The config with the default rotations.
fn with_rotations(keys: &Keys<'_>) -> Result<Map<String, Value>> {
    let mut config = keys.0.clone();
    if keys.object("rope_parameters")?.is_none() {
        let rotations = json!({
            "sliding_attention": {"rope_type": "default", "rope_theta": THETA.1},
            "full_attention": {
                "rope_type": "proportional", "rope_theta": THETA.0, "partial_rotary_factor": PARTIAL_ROTARY
            }
        });
        config.insert("rope_parameters".to_owned(), rotations);
    }
    Ok(config)
}

/// The rotations of layers with full attention and of layers with a window. Each type that the model has must have parameters.
fn rotations(
    config: &Keys<'_>,
    decoder: &Decoder,
    heads: &[Heads],
    windowed: &[bool],
) -> Result<Vec<RopeSet>> {
    let parameters = config.object("rope_parameters")?;
    for (name, kind) in [("full_attention", false), (WINDOWED, true)] {
        let given = parameters.map(|all| all.object(name)).transpose()?;
        if windowed.contains(&kind) && given.flatten().is_none() {
            bail!(
                CorruptFile,
                "config: 'rope_parameters' has none for {name}, which is in 'layer_types'"
            );
        }
    }
    let of_full = heads_of(heads, windowed, false)?.head_dim;
    let of_windowed = heads_of(heads, windowed, true)?.head_dim;
    let max_positions = decoder.spec.max_positions;
    let (full, windowed) =
        rope::read_by_layer_type(config, (of_full, of_windowed), max_positions, THETA)?;
    Ok(vec![full, windowed])
}

/// Reads the experts beside the MLP of each block, if there are any.
fn read_experts(keys: &Keys<'_>, decoder: &mut Decoder) -> Result<()> {
    let (true, MlpSpec::Dense(dense)) = (
        keys.flag("enable_moe_block")? == Some(true),
        &decoder.block.mlp,
    ) else {
        return Ok(());
    };
    let (count, per_token) = expert_counts(keys, "num_experts", "top_k_experts")?;
    let experts = ExpertsSpec {
        count,
        per_token,
        normalized: true,
        scoring: Scoring::Softmax,
        router_bias: false,
        router_scaled: true,
        names: ExpertNames::Gemma4,
        expert: DenseMlpSpec {
            intermediate_size: intermediate_size(keys, "moe_intermediate_size")?,
            ..*dense
        },
        shared: None,
    };
    decoder.block.mlp = MlpSpec::DenseAndExperts(*dense, experts);
    decoder.spec.renamed = EXPERTS;
    Ok(())
}

/// Reads the widths of per-layer embeddings, which 0 leaves out.
fn read_per_layer(keys: &Keys<'_>, decoder: &mut Decoder) -> Result<()> {
    let Some(width) = keys
        .count("hidden_size_per_layer_input")?
        .filter(|&width| width > 0)
    else {
        return Ok(());
    };
    multiple_of_block("hidden_size_per_layer_input", width)?;
    let vocab_size = keys.required_size("vocab_size_per_layer_input")?;
    if vocab_size < decoder.spec.vocab_size {
        bail!(
            CorruptFile,
            "config: vocab_size_per_layer_input is {vocab_size}; expected at least vocab_size, {}",
            decoder.spec.vocab_size
        );
    }
    decoder.block.per_layer = Some(PerLayerSpec {
        width,
        activation: activation(keys)?,
    });
    decoder.spec.per_layer_table = Some(PerLayerTableSpec {
        width,
        vocab_size,
        scale: embedding_scale(keys, width)?,
    });
    Ok(())
}

/// Whether each layer has a window: by `layer_types`, or else all but every sixth and the last.
fn windowed_layers(keys: &Keys<'_>, decoder: &Decoder) -> Result<Vec<bool>> {
    let layers = decoder.layers;
    match decoder.read_layer_types(keys, WINDOWED)? {
        Some(windowed) if windowed.last() == Some(&true) => bail!(
            Unsupported,
            "config: 'layer_types' ends with {WINDOWED}; the last layer of this family has full_attention"
        ),
        Some(windowed) => Ok(windowed),
        None => Ok((1..=layers)
            .map(|n| !n.is_multiple_of(PATTERN) && n < layers)
            .collect()),
    }
}

/// The heads of keys and values of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Heads {
    kv_heads: usize,
    head_dim: usize,
}

/// The heads of each layer: those of `per_layer_config`, which transformers 5 writes, or else those of full attention by keys of their own,
/// which published configs have.
fn heads_by_layer(keys: &Keys<'_>, decoder: &Decoder, windowed: &[bool]) -> Result<Vec<Heads>> {
    let attention = &decoder.block.attention;
    let common = Heads {
        kv_heads: attention.kv_heads,
        head_dim: attention.head_dim,
    };
    if let Some(overrides) = keys.object("per_layer_config")? {
        return overridden(&overrides, attention.heads, common, windowed.len());
    }
    let own_heads = match keys.flag("attention_k_eq_v")? {
        Some(true) => keys.size("num_global_key_value_heads")?,
        _ => None,
    };
    let (kv_key, kv_heads) = match own_heads {
        Some(kv_heads) => ("num_global_key_value_heads", kv_heads),
        None => ("num_key_value_heads", common.kv_heads),
    };
    let head_dim = keys.size("global_head_dim")?.unwrap_or(GLOBAL_HEAD_DIM);
    check_heads(
        attention.heads,
        (kv_key, kv_heads),
        ("global_head_dim", head_dim),
    )?;
    let full = Heads { kv_heads, head_dim };
    let of = |&is_windowed: &bool| if is_windowed { common } else { full };
    Ok(windowed.iter().map(of).collect())
}

/// The heads of each layer by `per_layer_config`: an object of changed keys for each layer that has any, named by the layer's index.
fn overridden(
    overrides: &Keys<'_>,
    heads: usize,
    common: Heads,
    layers: usize,
) -> Result<Vec<Heads>> {
    let mut all = vec![common; layers];
    for name in overrides.0.keys() {
        let place = name
            .parse()
            .ok()
            .and_then(|layer: usize| all.get_mut(layer));
        let Some(own) = place else {
            bail!(
                CorruptFile,
                "config: 'per_layer_config' names layer '{name}'; num_hidden_layers is {layers}"
            );
        };
        let Some(changed) = overrides.object(name)? else {
            continue;
        };
        let mut unknown = changed.0.keys();
        if let Some(key) =
            unknown.find(|key| !["head_dim", "num_key_value_heads"].contains(&key.as_str()))
        {
            bail!(
                Unsupported,
                "config: 'per_layer_config' changes {key} of layer {name}; known are head_dim, num_key_value_heads"
            );
        }
        *own = Heads {
            kv_heads: changed
                .size("num_key_value_heads")?
                .unwrap_or(common.kv_heads),
            head_dim: changed.size("head_dim")?.unwrap_or(common.head_dim),
        };
        check_heads(
            heads,
            ("num_key_value_heads", own.kv_heads),
            ("head_dim", own.head_dim),
        )?;
    }
    Ok(all)
}

/// The heads of all layers with a window, or of all others, which must be alike: they have one rotation and one cache. Those of the first
/// layer if there is none of this kind.
fn heads_of(heads: &[Heads], windowed: &[bool], kind: bool) -> Result<Heads> {
    let mut of_kind = (0..heads.len()).filter(|&layer| windowed[layer] == kind);
    let first = of_kind.next().unwrap_or(0);
    match of_kind.find(|&layer| heads[layer] != heads[first]) {
        None => Ok(heads[first]),
        Some(layer) => bail!(
            Unsupported,
            "config: 'per_layer_config' gives layers {first} and {layer} different heads; layers of one type must be alike"
        ),
    }
}

/// The earlier layer whose keys and values each layer takes: for each of the last `num_kv_shared_layers`, the last one before these that is
/// of its kind.
fn sources(keys: &Keys<'_>, windowed: &[bool]) -> Result<Vec<Option<usize>>> {
    let (layers, shared) = (
        windowed.len(),
        keys.count("num_kv_shared_layers")?.unwrap_or(0),
    );
    let Some(own) = layers.checked_sub(shared) else {
        bail!(
            CorruptFile,
            "config: num_kv_shared_layers is {shared}; num_hidden_layers is {layers}"
        );
    };
    let source = |layer: usize| {
        if layer < own {
            return Ok(None);
        }
        let found = (0..own).rfind(|&earlier| windowed[earlier] == windowed[layer]);
        let source = found.ok_or_else(|| {
            err!(
                CorruptFile,
                "config: layer {layer} takes the keys and values of another (num_kv_shared_layers is {shared}), and none of the first {own} is of its type"
            )
        });
        source.map(Some)
    };
    (0..layers).map(source).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::KvType;
    use crate::model::families;
    use crate::model::kv::KvGroup;
    use crate::model::tensors::{self, TensorRole};

    fn small() -> Value {
        json!({
            "model_type": "gemma4_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "vocab_size": 320,
            "hidden_size_per_layer_input": 0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
        })
    }

    fn with(changes: Value) -> Result<Spec> {
        let mut config = small();
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        families::read(&config)
    }

    /// The config of a published model, of which one layer of `pattern` has full attention.
    fn published(pattern: usize, layers: usize, sizes: Value) -> Spec {
        let kind = |layer: usize| match layer.is_multiple_of(pattern) {
            true => "full_attention",
            false => "sliding_attention",
        };
        let types: Vec<_> = (1..=layers).map(kind).collect();
        let mut text = json!({
            "model_type": "gemma4_text", "num_hidden_layers": layers, "layer_types": types, "head_dim": 256,
            "global_head_dim": 512, "final_logit_softcapping": 30.0, "use_bidirectional_attention": "vision"
        });
        for (key, value) in sizes.as_object().unwrap() {
            text[key] = value.clone();
        }
        let outer = json!({
            "model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "dtype": "bfloat16",
            "eos_token_id": [1, 106], "text_config": text
        });
        families::read(&outer).unwrap()
    }

    /// The number of parameters. Matrices are stored one by one, as NVFP4 holds them.
    fn parameters(spec: &Spec) -> usize {
        let stored = tensors::stored(spec);
        for (name, shape, role) in &stored {
            let is_matrix = shape.len() == 2 && name.ends_with(".weight");
            assert!(is_matrix || *role == TensorRole::Vector, "{name}");
        }
        let sizes = stored
            .iter()
            .map(|(_, shape, _)| shape.iter().product::<usize>());
        sizes.sum()
    }

    /// The numbers of parameters are those of transformers' models of these configs.
    #[test]
    fn the_tensors_of_published_models_have_their_parameters() {
        let e2b = published(
            5,
            35,
            json!({
                "hidden_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 1, "intermediate_size": 6144,
                "num_kv_shared_layers": 20, "use_double_wide_mlp": true, "hidden_size_per_layer_input": 256
            }),
        );
        assert_eq!(parameters(&e2b), 4_628_569_379);
        assert_eq!((&e2b.eos, e2b.tied), (&vec![1, 106], true));
        // Rounded to bfloat16, as the square root of 1536 is not in it.
        assert_eq!(e2b.embedding_scale, 39.25);
        assert_eq!(e2b.per_layer_table.unwrap().scale, 16.0);
        // Keys and values of 12 layers with a window and of three others.
        assert_eq!(
            e2b.kv_bytes_per_token(KvType::F16),
            2 * 2 * (12 * 256 + 3 * 512)
        );
        let attention = |layer: usize| e2b.blocks[layer].attention().unwrap();
        assert_eq!(attention(15).key_values, KeyValues::OfBlock(13));
        assert_eq!(attention(34).key_values, KeyValues::OfBlock(14));
        assert_eq!(e2b.blocks[15].mlp.intermediate_size(), 12_288);
        // An eighth of 512 elements turns with its pair, an eighth stands beside it.
        let frequencies = &e2b.ropes[attention(4).rope.unwrap()].table.frequencies;
        assert_eq!(frequencies.iter().filter(|f| **f > 0.0).count(), 64);
        assert_eq!(frequencies.len(), 256);

        let experts = published(
            6,
            30,
            json!({
                "hidden_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2,
                "attention_k_eq_v": true, "intermediate_size": 2112, "hidden_size_per_layer_input": 0,
                "enable_moe_block": true, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704
            }),
        );
        assert_eq!(parameters(&experts), 25_233_141_790);
        let dense = published(
            6,
            60,
            json!({
                "hidden_size": 5376, "num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4,
                "attention_k_eq_v": true, "intermediate_size": 21_504, "hidden_size_per_layer_input": 0
            }),
        );
        assert_eq!(parameters(&dense), 30_697_345_340);
        let full = dense.blocks[5].attention().unwrap();
        assert_eq!((full.kv_heads, full.head_dim), (4, 512));
        assert_eq!(full.key_values, KeyValues::KeysAsValues);
    }

    #[test]
    fn both_spellings_of_heads_by_layer_agree() {
        let keys = json!({"attention_k_eq_v": true, "num_global_key_value_heads": 1});
        let layers = json!({"1": {"head_dim": 32, "num_key_value_heads": 1}, "3": {"head_dim": 32, "num_key_value_heads": 1}});
        let by_layer =
            json!({"attention_k_eq_v": true, "per_layer_config": layers, "global_head_dim": null});
        assert_eq!(with(keys).unwrap(), with(by_layer).unwrap());
    }

    #[test]
    fn layers_with_the_keys_of_others_have_no_cache() {
        let groups = KvGroup::of(&with(json!({"num_kv_shared_layers": 2})).unwrap());
        let layers: Vec<_> = groups.into_iter().map(|group| group.layers).collect();
        assert_eq!(layers, [vec![0], vec![1]]);
    }

    #[test]
    fn refusals_name_what_is_wrong() {
        let types = [
            "full_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
        ];
        for (changes, expected) in [
            (
                json!({"use_bidirectional_attention": "all"}),
                "'use_bidirectional_attention' is all",
            ),
            (
                json!({"use_bidirectional_attention": "both"}),
                "'use_bidirectional_attention' is 'both'; known are vision",
            ),
            (
                json!({"layer_types": types}),
                "'layer_types' ends with sliding_attention",
            ),
            (
                json!({"global_head_dim": 40}),
                "global_head_dim is 40; it must be a multiple of 16",
            ),
            (
                json!({"attention_k_eq_v": true, "num_global_key_value_heads": 3}),
                "num_attention_heads 4 is not a multiple of num_global_key_value_heads 3",
            ),
            (
                json!({"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
                "'rope_parameters' has none for full_attention",
            ),
            (
                json!({"num_kv_shared_layers": 5}),
                "num_kv_shared_layers is 5; num_hidden_layers is 4",
            ),
            (
                json!({"num_kv_shared_layers": 3}),
                "layer 1 takes the keys and values of another (num_kv_shared_layers is 3), and none of the first 1 is of its type",
            ),
            (
                json!({"per_layer_config": {"4": {"head_dim": 32}}}),
                "'per_layer_config' names layer '4'; num_hidden_layers is 4",
            ),
            (
                json!({"per_layer_config": {"1": {"intermediate_size": 32}}}),
                "'per_layer_config' changes intermediate_size of layer 1",
            ),
            (
                json!({"per_layer_config": {"1": {"head_dim": 32}}}),
                "gives layers 1 and 3 different heads",
            ),
            (
                json!({"hidden_size_per_layer_input": 24}),
                "hidden_size_per_layer_input is 24; it must be a multiple of 16",
            ),
            (
                json!({"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 300}),
                "vocab_size_per_layer_input is 300; expected at least vocab_size, 320",
            ),
            (
                json!({"enable_moe_block": true, "num_experts": 4, "moe_intermediate_size": 32}),
                "'top_k_experts' is missing",
            ),
            (
                json!({"enable_moe_block": true, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 32}),
                "5 experts (top_k_experts) of 4 (num_experts)",
            ),
        ] {
            let e = with(changes).unwrap_err();
            assert!(e.message().contains(expected), "{expected}: {e}");
        }
    }
}
