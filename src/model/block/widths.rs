//! The widths of a model's scratch on the CPU, from which its bytes are known before it is loaded.

use crate::base::Result;
use crate::base::size::product;
use crate::model::spec::{
    AttentionSpec, BlockSpec, DenseMlpSpec, ExpertsSpec, MlpSpec, PerLayerSpec, Spec,
};
use crate::tensor::RecurrentShape;

/// Arrays of [`BlockScratch`](super::BlockScratch).
pub(super) const ARRAYS: usize = 19;

/// Elements of a row in the arrays of scratch memory: the most that any block of a model takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::model) struct RowWidths {
    hidden: usize,
    /// Queries; the input of a recurrent layer's convolution.
    q: usize,
    /// Keys, and values.
    kv: usize,
    /// The gate of attention or of a recurrent layer.
    head_gate: usize,
    /// Heads of a recurrent layer.
    heads: usize,
    /// The output of attention or of a recurrent layer.
    attended: usize,
    /// Gate and up, or the gate of a block's own input.
    gate: usize,
    up: usize,
    /// The inputs of the drafter's projection.
    joined: usize,
    /// The inputs of all blocks, in models with per-layer embeddings.
    layer_inputs: usize,
    /// The logits of a router.
    logits: usize,
    /// The rows of an expert, its output, and the sum over experts.
    routed: usize,
    /// The output of a dense MLP beside experts, or the input of a router with a norm of its own.
    beside: usize,
    /// Cosines and sines of all rotations.
    angles: usize,
}

impl RowWidths {
    /// The widths of a model.
    pub(in crate::model) fn of(spec: &Spec) -> RowWidths {
        let attentions = || spec.all_blocks().filter_map(BlockSpec::attention);
        let widest =
            |width: fn(&AttentionSpec) -> usize| attentions().map(width).max().unwrap_or(0);
        let recurrent = || spec.all_blocks().filter_map(BlockSpec::recurrent);
        let of_recurrent =
            |width: fn(RecurrentShape) -> usize| recurrent().map(width).max().unwrap_or(0);
        let mlps = || spec.all_blocks().flat_map(|block| block.mlp.specs());
        let own = spec.all_blocks().filter_map(|block| block.per_layer);
        let own = own.map(|own: PerLayerSpec| own.width).max().unwrap_or(0);
        let mixtures = || spec.all_blocks().filter_map(|block| block.mlp.mixture());
        let if_any = |any: bool| if any { spec.hidden_size } else { 0 };
        let values = of_recurrent(|shape| match shape {
            RecurrentShape::GatedDelta(shape) => shape.value_width(),
            RecurrentShape::Mamba2(shape) => shape.width(),
        });
        let gated = |mlp: &&DenseMlpSpec| mlp.gated;
        let wide = |mlp: &DenseMlpSpec| mlp.intermediate_size;
        let has_beside = |block: &BlockSpec| matches!(block.mlp, MlpSpec::DenseAndExperts(..));
        let router = |mixture: &ExpertsSpec| mixture.count;
        RowWidths {
            hidden: spec.hidden_size,
            q: widest(AttentionSpec::q_width).max(of_recurrent(|shape| match shape {
                RecurrentShape::GatedDelta(shape) => shape.channels(),
                RecurrentShape::Mamba2(shape) => shape.channels(),
            })),
            kv: widest(AttentionSpec::kv_width),
            head_gate: widest(|a| if a.gated { a.q_width() } else { 0 }).max(values),
            heads: of_recurrent(|shape| match shape {
                RecurrentShape::GatedDelta(shape) => shape.value_heads,
                RecurrentShape::Mamba2(shape) => shape.heads,
            }),
            attended: widest(AttentionSpec::q_width).max(values),
            gate: mlps().map(wide).max().unwrap_or(0).max(own),
            up: mlps().filter(gated).map(wide).max().unwrap_or(0),
            joined: 2 * if_any(spec.drafter.is_some()),
            layer_inputs: spec
                .per_layer_table
                .map_or(0, |table| table.width * spec.blocks.len()),
            logits: mixtures().map(router).max().unwrap_or(0),
            routed: if_any(mixtures().next().is_some()),
            beside: if_any(
                spec.all_blocks().any(has_beside)
                    || mixtures().any(|mixture| mixture.router_scaled),
            ),
            angles: spec.ropes.iter().map(|set| set.table.row_width()).sum(),
        }
    }

    /// The widths of the arrays of [`BlockScratch`](super::BlockScratch), in the order in which it lists them.
    pub(super) fn of_arrays(&self) -> [usize; ARRAYS] {
        let hidden = self.hidden;
        [
            hidden,
            hidden,
            self.q,
            self.kv,
            self.kv,
            self.head_gate,
            self.heads,
            self.heads,
            self.attended,
            self.gate,
            self.up,
            self.joined,
            self.layer_inputs,
            self.layer_inputs,
            self.logits,
            self.routed,
            self.routed,
            self.routed,
            self.beside,
        ]
    }

    /// Bytes of a pass of `rows` rows on the CPU: the arrays of scratch memory and the angles of rotations.
    pub(in crate::model) fn bytes(&self, rows: usize) -> Result<usize> {
        let row = self.of_arrays().iter().sum::<usize>() + self.angles;
        product("working memory", &[rows, row, size_of::<f32>()])
    }
}
