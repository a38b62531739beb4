//! Parts of a config common to all families: sizes, heads, biases, rotation, and a default block from which a family changes single layers.

use serde_json::{Map, Value, json};

use crate::base::Result;
use crate::base::error::{bail, err};
use crate::format::nvfp4::BLOCK;
use crate::model::keys::{Keys, LARGEST};
use crate::model::rope::{self, RopeSet};
use crate::model::spec::{
    Activation, AttentionSpec, BlockSpec, DenseMlpSpec, ExpertNames, ExpertsSpec, KeyValues,
    MixerSpec, MlpSpec, NormNames, NormPlacement, PerLayerSpec, QkNorm, Scoring, SigmoidScoring,
    Spec,
};

/// Larger than the number of blocks of any model, and small enough that listing missing tensors stays cheap.
const MOST_LAYERS: usize = 4096;
/// A layer with a window, in `layer_types`.
pub(super) const WINDOWED: &str = "sliding_attention";
/// Larger than the number of experts of any model.
const MOST_EXPERTS: usize = 4096;
/// Positions that a convolution of the kernels sees at most.
pub(super) const MOST_TAPS: usize = 4;
/// Elements of a recurrent head in a vector of the kernels.
pub(super) const HEAD_MULTIPLE: usize = 16;
/// Larger than the width of all recurrent heads of any model.
pub(super) const MOST_WIDTH: usize = 1 << 20;

/// A decoder that is not finished: all of its blocks are still equal.
pub(super) struct Decoder {
    /// Everything except the blocks.
    pub(super) spec: Spec,
    /// The default block.
    pub(super) block: DecoderBlock,
    pub(super) layers: usize,
}

/// A block that is not finished.
#[derive(Clone)]
pub(super) struct DecoderBlock {
    pub(super) norms: NormPlacement,
    pub(super) attention: AttentionSpec,
    /// The mixer in the place of attention, if any.
    pub(super) mixer: Option<MixerSpec>,
    pub(super) mlp: MlpSpec,
    /// See [`BlockSpec::per_layer`].
    pub(super) per_layer: Option<PerLayerSpec>,
    /// See [`BlockSpec::scaled`].
    pub(super) scaled: bool,
}

impl DecoderBlock {
    pub(super) fn finish(self) -> BlockSpec {
        BlockSpec {
            norms: self.norms,
            mixer: self.mixer.unwrap_or(MixerSpec::Attention(self.attention)),
            mlp: self.mlp,
            per_layer: self.per_layer,
            scaled: self.scaled,
        }
    }
}

impl Decoder {
    /// Reads the common parts, with one rotation for all layers.
    pub(super) fn read(keys: &Keys<'_>) -> Result<Decoder> {
        Decoder::read_with(keys, |head_dim, max_positions| {
            Ok(vec![rope::read(keys, head_dim, max_positions)?])
        })
    }

    /// Reads the common parts, with rotations from `ropes`, which takes the head size and the maximum number of positions.
    pub(super) fn read_with(
        keys: &Keys<'_>,
        ropes: impl FnOnce(usize, usize) -> Result<Vec<RopeSet>>,
    ) -> Result<Decoder> {
        let hidden_size = keys.required_size("hidden_size")?;
        let layers = keys.required_size("num_hidden_layers")?;
        if layers > MOST_LAYERS {
            bail!(
                CorruptFile,
                "config: num_hidden_layers is {layers}; expected at most {MOST_LAYERS}"
            );
        }
        multiple_of_block("hidden_size", hidden_size)?;
        let max_positions = keys.size("max_position_embeddings")?.unwrap_or(2048);
        let attention = attention(keys, hidden_size)?;
        let mlp = DenseMlpSpec {
            intermediate_size: intermediate_size(keys, WIDTH)?,
            gated: true,
            activation: activation(keys)?,
            bias: keys.flag("mlp_bias")? == Some(true),
        };
        Ok(Decoder {
            layers,
            spec: Spec {
                family: "",
                hidden_size,
                vocab_size: keys.required_size("vocab_size")?,
                max_positions,
                norm_eps: norm_eps(keys)?,
                norm_plus_one: false,
                embedding_scale: 1.0,
                per_layer_table: None,
                tied: keys.flag("tie_word_embeddings")?.unwrap_or(false),
                residual_scale: 1.0,
                logit_scale: 1.0,
                logit_cap: cap(keys, "final_logit_softcapping")?,
                ropes: ropes(attention.head_dim, max_positions)?,
                blocks: Vec::new(),
                drafter: None,
                norm_names: NormNames::PRE,
                renamed: &[],
                unread_layers: 0,
                eos: keys.ids("eos_token_id")?,
                bos: keys.ids("bos_token_id")?.first().copied(),
            },
            block: DecoderBlock {
                norms: NormPlacement {
                    pre: true,
                    post: false,
                },
                attention,
                mixer: None,
                mlp: MlpSpec::Dense(mlp),
                per_layer: None,
                scaled: false,
            },
        })
    }

    /// Reads the biases of all four projections of attention from `attention_bias`.
    pub(super) fn read_attention_bias(&mut self, keys: &Keys<'_>) -> Result<()> {
        let bias = keys.flag("attention_bias")? == Some(true);
        self.block.attention.qkv_bias = bias;
        self.block.attention.o_bias = bias;
        Ok(())
    }

    /// Refuses a mixture of experts, for families without one.
    pub(super) fn refuse_experts(&self, keys: &Keys<'_>) -> Result<()> {
        for key in ["num_local_experts", "num_experts"] {
            if let Some(n) = keys.count(key)?.filter(|&n| n > 1) {
                bail!(
                    Unsupported,
                    "config: {key} is {n}, a mixture of experts; models of this family are known only without"
                );
            }
        }
        Ok(())
    }

    /// The window, unless it covers all positions and has no effect.
    pub(super) fn effective_window(&self, window: Option<usize>) -> Option<usize> {
        window.filter(|&w| w < self.spec.max_positions)
    }

    /// The layers of the kind `marked`, from `layer_types`, in which others have full attention; `None` if the config has no such list.
    pub(super) fn read_layer_types(
        &self,
        keys: &Keys<'_>,
        marked: &str,
    ) -> Result<Option<Vec<bool>>> {
        let Some(types) = keys.texts("layer_types")? else {
            return Ok(None);
        };
        if types.len() != self.layers {
            bail!(
                CorruptFile,
                "config: 'layer_types' names {} layers; num_hidden_layers is {}",
                types.len(),
                self.layers
            );
        }
        let is_marked = |kind: &&str| match *kind {
            "full_attention" => Ok(false),
            kind if kind == marked => Ok(true),
            other => bail!(
                Unsupported,
                "config: 'layer_types' has '{other}'; known are full_attention, {marked}"
            ),
        };
        types.iter().map(is_marked).collect::<Result<_>>().map(Some)
    }

    /// The finished spec, after `change` has modified each block.
    pub(super) fn finish(mut self, mut change: impl FnMut(usize, &mut DecoderBlock)) -> Spec {
        self.spec.blocks = (0..self.layers)
            .map(|layer| {
                let mut block = self.block.clone();
                change(layer, &mut block);
                block.finish()
            })
            .collect();
        self.spec
    }

    /// The finished spec, with a window of `window` positions in the layers that `windowed` selects, which have the last rotation.
    pub(super) fn finish_windowed(
        self,
        window: Option<usize>,
        windowed: impl Fn(usize) -> bool,
    ) -> Spec {
        let window = self.effective_window(window);
        let rope = self.spec.ropes.len() - 1;
        self.finish(|layer, block| {
            if windowed(layer) {
                block.attention.rope = Some(rope);
                block.attention.window = window;
            }
        })
    }
}

/// Fails unless a number that the key `name` gives is a multiple of NVFP4's blocks.
pub(super) fn multiple_of_block(name: &str, k: usize) -> Result<()> {
    if !k.is_multiple_of(BLOCK) {
        bail!(
            Unsupported,
            "config: {name} is {k}; it must be a multiple of {BLOCK}"
        );
    }
    Ok(())
}

/// The width of an MLP, from the key `name`.
pub(super) fn intermediate_size(keys: &Keys<'_>, name: &str) -> Result<usize> {
    let size = keys.required_size(name)?;
    multiple_of_block(name, size)?;
    Ok(size)
}

fn attention(keys: &Keys<'_>, hidden_size: usize) -> Result<AttentionSpec> {
    let heads = keys.required_size("num_attention_heads")?;
    let kv_heads = keys.size("num_key_value_heads")?.unwrap_or(heads);
    let head_dim = match keys.size("head_dim")? {
        Some(d) => d,
        None if hidden_size.is_multiple_of(heads) => hidden_size / heads,
        None => bail!(
            CorruptFile,
            "config: hidden_size {hidden_size} is not a multiple of num_attention_heads {heads}, and there is no head_dim"
        ),
    };
    check_heads(
        heads,
        ("num_key_value_heads", kv_heads),
        ("head_dim", head_dim),
    )?;
    Ok(AttentionSpec {
        heads,
        kv_heads,
        head_dim,
        key_values: KeyValues::Projected,
        qk_norm: QkNorm::None,
        value_norm: false,
        qkv_bias: false,
        o_bias: false,
        gated: false,
        sinks: false,
        interleaved: false,
        rope: Some(0),
        window: None,
        scale: 1.0 / (head_dim as f32).sqrt(),
        score_cap: cap(keys, "attn_logit_softcapping")?,
    })
}

/// Fails unless key/value heads divide query heads, and heads have a size that kernels take. Errors name both by their keys.
pub(super) fn check_heads(
    heads: usize,
    (kv_key, kv_heads): (&str, usize),
    (dim_key, head_dim): (&str, usize),
) -> Result<()> {
    if !heads.is_multiple_of(kv_heads) {
        bail!(
            CorruptFile,
            "config: num_attention_heads {heads} is not a multiple of {kv_key} {kv_heads}"
        );
    }
    match heads.checked_mul(head_dim) {
        Some(width) if width as u64 <= LARGEST => {
            multiple_of_block(&format!("num_attention_heads * {dim_key}"), width)?;
        }
        _ => bail!(
            CorruptFile,
            "config: {heads} heads of {head_dim} are too wide"
        ),
    }
    multiple_of_block(dim_key, head_dim)
}

fn norm_eps(keys: &Keys<'_>) -> Result<f32> {
    match keys.number("rms_norm_eps")? {
        None => bail!(CorruptFile, "config: 'rms_norm_eps' is missing"),
        Some(eps) if eps > 0.0 && eps < 1.0 => Ok(eps as f32),
        Some(eps) => bail!(
            CorruptFile,
            "config: rms_norm_eps is {eps}; it must lie between 0 and 1"
        ),
    }
}

/// The activation function of the MLP.
pub(super) fn activation(keys: &Keys<'_>) -> Result<Activation> {
    let (key, name) = match keys.text("hidden_activation")? {
        Some(name) => ("hidden_activation", Some(name)),
        None => ("hidden_act", keys.text("hidden_act")?),
    };
    match name {
        None | Some("silu" | "swish") => Ok(Activation::Silu),
        Some("gelu_pytorch_tanh" | "gelu_tanh") => Ok(Activation::GeluTanh),
        Some(other) => bail!(
            Unsupported,
            "config: {key} is '{other}'; known are silu, gelu_pytorch_tanh"
        ),
    }
}

fn cap(keys: &Keys<'_>, name: &str) -> Result<Option<f32>> {
    match keys.number(name)? {
        Some(cap) if !(cap > 0.0 && cap.is_finite()) => bail!(
            CorruptFile,
            "config: '{name}' is {cap}; expected a positive number"
        ),
        cap => Ok(cap.map(|cap| cap as f32)),
    }
}

/// The factor that the key `name` gives, or else 1.
pub(super) fn factor(keys: &Keys<'_>, name: &str) -> Result<f32> {
    match keys.number(name)? {
        Some(factor) if !(factor > 0.0 && (factor as f32).is_finite()) => bail!(
            CorruptFile,
            "config: '{name}' is {factor}; expected a positive number"
        ),
        factor => Ok(factor.unwrap_or(1.0) as f32),
    }
}

/// The number of experts, from the key `count_key`, and that of a token, from `chosen_key`.
pub(super) fn expert_counts(
    keys: &Keys<'_>,
    count_key: &str,
    chosen_key: &str,
) -> Result<(usize, usize)> {
    let (count, per_token) = (
        keys.required_size(count_key)?,
        keys.required_size(chosen_key)?,
    );
    if count > MOST_EXPERTS || per_token > count {
        bail!(
            CorruptFile,
            "config: a token goes to {per_token} experts ({chosen_key}) of {count} ({count_key}); expected at most {MOST_EXPERTS}, and no more for a token than there are"
        );
    }
    Ok((count, per_token))
}

/// The key for the width of an expert in most configs.
pub(super) const EXPERT_WIDTH: &str = "moe_intermediate_size";
/// The key for the width of an MLP, in some configs that of an expert.
pub(super) const WIDTH: &str = "intermediate_size";

/// The experts described by Qwen's keys, their number by `count_key`, and their width by `width_key`.
pub(super) fn experts(keys: &Keys<'_>, count_key: &str, width_key: &str) -> Result<ExpertsSpec> {
    let (count, per_token) = expert_counts(keys, count_key, "num_experts_per_tok")?;
    Ok(ExpertsSpec {
        count,
        per_token,
        normalized: keys.flag("norm_topk_prob")? == Some(true),
        scoring: Scoring::Softmax,
        router_bias: false,
        router_scaled: false,
        names: ExpertNames::Qwen,
        expert: DenseMlpSpec {
            intermediate_size: intermediate_size(keys, width_key)?,
            gated: true,
            activation: activation(keys)?,
            bias: false,
        },
        shared: None,
    })
}

/// Scores by sigmoids, from DeepSeek's keys, for `per_token` experts of `count`.
pub(super) fn sigmoid_scoring(
    keys: &Keys<'_>,
    (count, per_token): (usize, usize),
) -> Result<Scoring> {
    let scale = keys.number("routed_scaling_factor")?.unwrap_or(1.0);
    if !(scale > 0.0 && scale.is_finite()) {
        bail!(
            CorruptFile,
            "config: 'routed_scaling_factor' is {scale}; expected a positive number"
        );
    }
    let scoring = SigmoidScoring {
        groups: keys.size("n_group")?.unwrap_or(1),
        top_groups: keys.size("topk_group")?.unwrap_or(1),
        scale: scale as f32,
    };
    scoring.check(count, per_token).map_err(|e| {
        err!(
            CorruptFile,
            "config: n_group and topk_group say {}",
            e.message()
        )
    })?;
    Ok(Scoring::Sigmoid(scoring))
}

/// The config with these numbers, by their keys, where it has none.
pub(super) fn with_numbers(keys: &Keys<'_>, numbers: &[(&str, f64)]) -> Result<Map<String, Value>> {
    let mut config = keys.0.clone();
    for (key, number) in numbers {
        if keys.number(key)?.is_none() {
            config.insert((*key).to_owned(), json!(number));
        }
    }
    Ok(config)
}

/// The key for the part of a head that rotates.
pub(super) const ROTARY_PART: &str = "partial_rotary_factor";
/// The key for the base of the rotation.
pub(super) const THETA: &str = "rope_theta";

/// The layers with experts, from Qwen's keys: every `decoder_sparse_step`th, except `mlp_only_layers`.
pub(super) fn expert_layers(keys: &Keys<'_>) -> Result<impl Fn(usize) -> bool + use<>> {
    let step = keys.size("decoder_sparse_step")?.unwrap_or(1);
    let dense = keys.counts("mlp_only_layers")?.unwrap_or_default();
    Ok(move |layer: usize| (layer + 1).is_multiple_of(step) && !dense.contains(&layer))
}
