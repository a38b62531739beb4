//! The sizes of a model that determine working memory and launches on a GPU: the maxima over its blocks.

use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::Routing;
use crate::model::spec::{AttentionSpec, Spec};

/// Maximum sizes over all blocks.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sizes {
    pub(super) hidden: usize,
    pub(super) vocab: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    /// Elements of a row of queries.
    pub(super) q: usize,
    /// Width between the projections of an MLP that all rows use.
    pub(super) intermediate: usize,
    pub(super) experts: Option<ExpertSizes>,
    /// The distinct attention specs of the blocks.
    pub(super) attentions: Vec<AttentionSpec>,
    /// Whether any weight is dense, which requires room for activations of its type.
    pub(super) dense: bool,
}

/// Maximum sizes over mixtures of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExpertSizes {
    pub(super) routing: Routing,
    /// Width between the projections of an expert.
    pub(super) intermediate: usize,
}

impl ExpertSizes {
    fn of(spec: &Spec) -> Option<ExpertSizes> {
        let mixtures = || spec.blocks.iter().filter_map(|b| b.mlp.mixture());
        Some(ExpertSizes {
            routing: Routing {
                experts: mixtures().map(|e| e.count).max()?,
                per_token: mixtures().map(|e| e.per_token).max()?,
                normalized: false,
            },
            intermediate: mixtures().map(|e| e.expert.intermediate_size).max()?,
        })
    }
}

impl Sizes {
    /// Sizes of a model. Fails unless all blocks have the same head shape.
    pub(super) fn of(spec: &Spec, dense: bool) -> Result<Sizes> {
        let Some(first) = spec.blocks.first() else {
            bail!(
                Unsupported,
                "a model without its layers has nothing for a GPU"
            );
        };
        let heads = |a: &AttentionSpec| (a.heads, a.kv_heads, a.head_dim);
        let alike = heads(&first.attention);
        for (index, block) in spec.blocks.iter().enumerate() {
            let own = heads(&block.attention);
            if own != alike {
                bail!(
                    Unsupported,
                    "block {index} has {} query and {} key/value heads of {}, and block 0 {}, {} of {}; on a GPU all are alike",
                    own.0,
                    own.1,
                    own.2,
                    alike.0,
                    alike.1,
                    alike.2
                );
            }
        }
        let mut attentions: Vec<AttentionSpec> = Vec::new();
        for block in &spec.blocks {
            if !attentions.contains(&block.attention) {
                attentions.push(block.attention.clone());
            }
        }
        let of_all_rows = spec.blocks.iter().filter_map(|b| b.mlp.of_all_rows());
        let widths = of_all_rows.map(|mlp| mlp.intermediate_size);
        Ok(Sizes {
            hidden: spec.hidden_size,
            vocab: spec.vocab_size,
            heads: alike.0,
            kv_heads: alike.1,
            head_dim: alike.2,
            q: first.attention.q_width(),
            intermediate: widths.max().unwrap_or(0),
            experts: ExpertSizes::of(spec),
            attentions,
            dense,
        })
    }

    /// The index of an attention spec in [`Sizes::attentions`].
    pub(super) fn attention_index(&self, attention: &AttentionSpec) -> usize {
        self.attentions
            .iter()
            .position(|a| a == attention)
            .unwrap_or(0)
    }

    /// Elements of a row of queries, keys and values.
    pub(super) fn qkv(&self) -> usize {
        self.q + 2 * self.kv_heads * self.head_dim
    }
}
