//! The sizes of a model that determine working memory and launches on a GPU: the maxima over its blocks, the drafter's included.

use super::recurrent_scratch::RecurrentSizes;
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::{Routing, ScratchDevice, SplitKvWorkspace};
use crate::model::kv::KvGroup;
use crate::model::spec::{AttentionSpec, BlockSpec, KeyValues, Spec};

/// Maximum sizes over all blocks.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::model) struct Sizes {
    pub(super) hidden: usize,
    pub(super) vocab: usize,
    /// Elements of a row of queries.
    pub(super) q: usize,
    /// Elements of a row of queries, and of the keys and values that a layer has itself.
    pub(super) qkv: usize,
    /// Width between the projections of an MLP that all rows use.
    pub(super) intermediate: usize,
    /// Elements of a row of heads' gates; 0 without any.
    pub(super) head_gate: usize,
    pub(super) recurrent: Option<RecurrentSizes>,
    pub(super) experts: Option<ExpertSizes>,
    pub(super) per_layer: Option<PerLayerSizes>,
    /// The distinct attention specs of the blocks.
    pub(super) attentions: Vec<AttentionSpec>,
    /// Groups of layers with block tables of their own.
    pub(super) groups: usize,
    /// Whether there is a drafter.
    pub(super) drafts: bool,
    /// Whether any weight is dense, which requires room for activations of its type.
    pub(super) dense: bool,
    /// Whether the bits of a row depend on its sequence alone.
    pub(super) deterministic: bool,
    /// Whether verifications are recorded: rows of one sequence store their keys and values before they attend, which there are kernels for
    /// only where attention projects both and normalizes no values.
    pub(super) records_verifications: bool,
    /// Whether halves of blocks take the residual stream as f16 without a norm.
    pub(super) takes_stream: bool,
}

/// Sizes of per-layer embeddings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PerLayerSizes {
    /// Elements of the own input of one block.
    pub(super) width: usize,
    /// Elements of a row of those of all blocks.
    pub(super) all: usize,
}

/// Maximum sizes over mixtures of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ExpertSizes {
    pub(super) routing: Routing,
    /// Width between the projections of an expert.
    pub(super) intermediate: usize,
}

impl ExpertSizes {
    fn of(spec: &Spec) -> Option<ExpertSizes> {
        let mixtures = || spec.all_blocks().filter_map(|b| b.mlp.mixture());
        Some(ExpertSizes {
            routing: Routing {
                experts: mixtures().map(|e| e.count).max()?,
                per_token: mixtures().map(|e| e.per_token).max()?,
                normalized: false,
                sigmoid: None,
            },
            intermediate: mixtures().map(|e| e.expert.intermediate_size).max()?,
        })
    }
}

/// The attention specs of a model, each once.
pub(super) fn attentions(spec: &Spec) -> Vec<AttentionSpec> {
    let mut attentions: Vec<AttentionSpec> = Vec::new();
    for attention in spec.all_blocks().filter_map(BlockSpec::attention) {
        if !attentions.contains(attention) {
            attentions.push(attention.clone());
        }
    }
    attentions
}

impl Sizes {
    /// Sizes of a model.
    pub(in crate::model) fn of(spec: &Spec, dense: bool, deterministic: bool) -> Result<Sizes> {
        if spec.blocks.is_empty() {
            bail!(
                Unsupported,
                "a model without its layers has nothing for a GPU"
            );
        }
        let attentions = attentions(spec);
        let mut verifying = spec.blocks.iter().filter_map(BlockSpec::attention);
        let of_all_rows = spec.all_blocks().filter_map(|b| b.mlp.of_all_rows());
        let widths = of_all_rows.map(|mlp| mlp.intermediate_size);
        let widest = |width: fn(&AttentionSpec) -> usize| attentions.iter().map(width).max();
        Ok(Sizes {
            hidden: spec.hidden_size,
            vocab: spec.vocab_size,
            q: widest(AttentionSpec::q_width).unwrap_or(0),
            qkv: widest(AttentionSpec::projected_width).unwrap_or(0),
            intermediate: widths.max().unwrap_or(0),
            head_gate: widest(|a| if a.gated { a.q_width() } else { 0 }).unwrap_or(0),
            recurrent: RecurrentSizes::of(spec),
            experts: ExpertSizes::of(spec),
            per_layer: spec.per_layer_table.map(|table| PerLayerSizes {
                width: table.width,
                all: table.width * spec.blocks.len(),
            }),
            attentions,
            groups: KvGroup::of(spec).len(),
            drafts: spec.drafter.is_some(),
            dense,
            deterministic,
            records_verifications: verifying
                .all(|a| a.key_values == KeyValues::Projected && !a.value_norm),
            takes_stream: spec.all_blocks().any(|b| !b.norms.pre),
        })
    }

    /// Elements of a row of what the mixer's last projection takes.
    pub(super) fn mixed(&self) -> usize {
        self.q
            .max(self.recurrent.map_or(0, |recurrent| recurrent.values))
    }

    /// Elements of a row of the widest input of the last projection of a part of a block, or of the drafter's projection.
    pub(super) fn inner(&self) -> usize {
        let joined = if self.drafts { 2 * self.hidden } else { 0 };
        let wide = self.intermediate.max(self.own_input());
        wide.max(self.mixed()).max(joined)
    }

    /// Elements of a row of the widest output of the mixer's first projections.
    pub(super) fn mixer_inputs(&self) -> usize {
        self.qkv
            .max(self.recurrent.map_or(0, |recurrent| recurrent.inputs))
    }

    /// Elements of a row of one block's own input; 0 without any.
    pub(super) fn own_input(&self) -> usize {
        self.per_layer.map_or(0, |per_layer| per_layer.width)
    }

    /// Floats of a sequence in the split-KV workspace, and CTAs that attend to it.
    pub(super) fn split_kv(&self) -> (usize, usize) {
        let each = self.attentions.iter();
        let sizes = each.map(|a| SplitKvWorkspace::sizes(a.heads, a.kv_heads, a.head_dim));
        sizes.fold((0, 0), |a, b| (a.0.max(b.0), a.1.max(b.1)))
    }

    /// The device for which scratch memory is sized: `device`, with deterministic plans if the model is deterministic.
    pub(super) fn scratch_device(&self, device: ScratchDevice) -> ScratchDevice {
        match self.deterministic {
            true => device.deterministic(),
            false => device,
        }
    }
}
