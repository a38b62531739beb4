//! The memory that a pass takes, from the sizes that its parts allocate by, and from what of it is there at the same time.

use super::block::BlockSizes;
use super::experts::expert_bytes;
use super::head::HeadSizes;
use super::layout::{BlockLayout, ProjectionLayout};
use super::linear::{LinearSizes, Passes};
use super::precision::ProductPrecision;
use super::recompute::Recompute;
use super::scratch::SavedSizes;
use super::streams::Streams;
use super::{Batch, Layout, MatrixId, Options};
use crate::model::Spec;
use crate::ops::training::divergence::Divergence;
use crate::ops::training::loss::Loss;
use crate::ops::training::matmul;
use crate::ops::{Array, Device, Mixed};

/// A pass of training that is yet to be made.
pub struct PassMemory<'a> {
    /// Where it runs.
    pub device: &'a Device,
    /// The model.
    pub spec: &'a Spec,
    /// Its parameters.
    pub layout: &'a Layout,
    /// How it uses memory.
    pub options: Options,
    /// In what its products are.
    pub precision: &'a ProductPrecision,
    /// Which matrices get gradients.
    pub trains: &'a dyn Fn(MatrixId) -> bool,
    /// The first block that gets any.
    pub first_block: usize,
}

/// What blocks take one after another, in elements.
#[derive(Clone, Copy, Default)]
struct Blocks {
    linear: LinearSizes,
    inner: usize,
    /// Gradients of the residual stream before a half, of a branch of it, and of what attention makes.
    dx_before: usize,
    dbranch: usize,
    dattended: usize,
    /// Bytes of mixtures of experts.
    experts: usize,
}

impl Blocks {
    fn max(self, other: Blocks) -> Blocks {
        Blocks {
            linear: self.linear.max(other.linear),
            inner: self.inner.max(other.inner),
            dx_before: self.dx_before.max(other.dx_before),
            dbranch: self.dbranch.max(other.dbranch),
            dattended: self.dattended.max(other.dattended),
            experts: self.experts.max(other.experts),
        }
    }

    fn bytes(&self, element: usize) -> usize {
        let elements = self.inner + self.dx_before + self.dbranch + self.dattended;
        element * elements + self.linear.scratch_bytes(element) + self.experts
    }
}

/// Memory of the blocks of a pass.
struct BlockParts {
    /// Bytes that each block keeps for itself.
    kept: usize,
    /// Bytes that blocks share for what is computed again.
    shared: usize,
    forward: Blocks,
    backward: Blocks,
}

impl BlockParts {
    /// Bytes that blocks use in turn, in both directions.
    fn both(&self, element: usize) -> usize {
        self.forward.max(self.backward).bytes(element)
    }
}

impl PassMemory<'_> {
    /// Bytes of the host's memory that a batch of `rows` tokens takes beside a GPU.
    pub fn offloaded(&self, rows: usize) -> usize {
        let away = Streams::away(self.spec.blocks.len(), self.options.offload);
        Array::<Mixed>::element_bytes(self.device) * away * rows * self.spec.hidden_size
    }

    /// Bytes of the device that gradients of a batch of `rows` tokens at their peak; what is small beside them is left out.
    pub fn bytes(&self, rows: usize) -> usize {
        let PassMemory { device, spec, .. } = *self;
        let element = Array::<Mixed>::element_bytes(device);
        let parts = self.parts(rows);
        let head = self.head(rows);
        let keeps = self.options.recompute == Recompute::None;
        let trains_head = (self.trains)(self.layout.head);
        let keeps_tied = self.keeps_tied();
        let always =
            self.always(&parts, rows) + Batch::bytes(spec, rows) + Loss::bytes(device, rows);

        let float = size_of::<f32>();
        let logits = (float + element) * head.logits;
        let own_gradient = |wanted| element * if wanted { head.weight } else { 0 };
        let of_head =
            (element + float) * head.stream + logits + own_gradient(!spec.tied && trains_head);
        let of_embedding = match (self.embeds(), spec.tied) {
            _ if keeps_tied => 0,
            (true, true) => element * head.stream + logits + own_gradient(true),
            (true, false) => own_gradient(true),
            (false, _) => 0,
        };
        let head = of_head.max(of_embedding);
        // Scratch of the blocks stays until the embedding's turn, if that comes, or for good where nothing is computed again.
        let (shared, both) = (parts.shared, parts.both(element));
        let most = match keeps {
            true => shared + both + head,
            false if self.embeds() || spec.tied => {
                let blocks = parts
                    .forward
                    .bytes(element)
                    .max(parts.backward.bytes(element));
                head.max(shared + blocks)
            }
            false => head.max(shared + both),
        };
        always + most
    }

    /// [`PassMemory::bytes`] for a loss against a teacher, without the teacher's own memory.
    pub fn lesson_bytes(&self, rows: usize) -> usize {
        let (own, labels) = (
            Divergence::bytes(self.device, rows),
            Loss::bytes(self.device, rows),
        );
        self.bytes(rows) + own - labels
    }

    /// Bytes that the pass still holds between batches of `rows` tokens, while a teacher runs.
    pub fn resting_bytes(&self, rows: usize) -> usize {
        let element = Array::<Mixed>::element_bytes(self.device);
        let parts = self.parts(rows);
        let blocks = match self.options.recompute == Recompute::None {
            true => parts.shared + parts.both(element),
            false => 0,
        };
        self.always(&parts, rows) + Batch::bytes(self.spec, rows) + blocks
    }

    /// Bytes of a forward pass up to the head's input, for a batch of `rows` tokens.
    pub(super) fn inputs_bytes(&self, rows: usize) -> usize {
        let element = Array::<Mixed>::element_bytes(self.device);
        let (parts, head) = (self.parts(rows), self.head(rows));
        let streams = Streams::kept(self.spec.blocks.len(), false, self.spec.blocks.len());
        // The head's input is made before the rest is given back.
        let elements = (streams + 1) * head.stream + parts.forward.linear.weight;
        element * elements
            + parts.kept
            + parts.shared
            + parts.forward.bytes(element)
            + Batch::bytes(self.spec, rows)
    }

    /// Bytes of a chunk of logits of `rows` tokens, with its inputs.
    pub(super) fn logits_bytes(&self, rows: usize) -> usize {
        let element = Array::<Mixed>::element_bytes(self.device);
        let head = self.head(rows);
        element * (head.stream + head.weight)
            + size_of::<f32>() * head.logits
            + Batch::bytes(self.spec, rows)
    }

    fn head(&self, rows: usize) -> HeadSizes {
        HeadSizes::new(self.spec, self.options.head_chunk, rows)
    }

    fn keeps_tied(&self) -> bool {
        let keeps = self.options.recompute == Recompute::None;
        keeps && self.spec.tied && (self.trains)(self.layout.head)
    }

    /// Bytes that a pass takes from its first batch on.
    fn always(&self, parts: &BlockParts, rows: usize) -> usize {
        let element = Array::<Mixed>::element_bytes(self.device);
        let (spec, head) = (self.spec, self.head(rows));
        let blocks = spec.blocks.len();
        let streams = Streams::kept(blocks, self.options.offload, self.first_block) * head.stream;
        let tied = match self.keeps_tied() {
            true => spec.vocab_size * spec.hidden_size,
            false => 0,
        };
        let weight = parts.forward.linear.max(parts.backward.linear).weight;
        let weight = weight.max(head.weight);
        // Gradients of the stream come in between.
        element * (streams + weight + tied + head.stream)
            + parts.kept
            + matmul::workspace(self.device)
    }

    /// Memory of the blocks for a batch of `rows` tokens.
    fn parts(&self, rows: usize) -> BlockParts {
        let PassMemory {
            spec,
            layout,
            options,
            ..
        } = *self;
        let element = Array::<Mixed>::element_bytes(self.device);
        let parts = options.recompute.parts();
        let (mut kept, mut shared) = (0, SavedSizes::default());
        // Of blocks that get no gradients, in the memory of the first one that does, or of the last one.
        let (first, mut passed) = (self.first_block, SavedSizes::default());
        let (mut forward, mut backward) = (Blocks::default(), Blocks::default());
        for (index, (block, own)) in spec.blocks.iter().zip(&layout.blocks).enumerate() {
            let sizes = BlockSizes::new(spec, block, rows);
            let of_experts = (rows, spec.hidden_size, sizes.wide / rows.max(1));
            let experts = |backward| expert_bytes(&block.mlp, of_experts, element, backward);
            let mut again = SavedSizes::default();
            let mut saved = sizes.saved(own);
            saved.swap_recomputed(&mut again, parts);
            passed = passed.max(&saved);
            if index >= first || index + 1 == spec.blocks.len() {
                kept += std::mem::take(&mut passed).bytes(element);
            }
            shared = shared.max(&again);
            forward = forward.max(Blocks {
                linear: self.linear_forward(own, rows),
                inner: sizes.wide,
                experts: experts(false),
                ..Blocks::default()
            });
            if index >= self.first_block {
                let posts = [own.attention_norms[1], own.mlp_norms[1]];
                let normalizes = posts.iter().any(Option::is_some);
                backward = backward.max(Blocks {
                    linear: self.linear_backward(index, rows),
                    inner: sizes.inner(),
                    dx_before: sizes.stream,
                    dbranch: if normalizes { sizes.stream } else { 0 },
                    dattended: sizes.attended,
                    experts: experts(true),
                });
            }
        }
        BlockParts {
            kept,
            shared: shared.bytes(element),
            forward,
            backward,
        }
    }

    fn linear_forward(&self, block: &BlockLayout, rows: usize) -> LinearSizes {
        let passes = Passes {
            forward: true,
            backward: false,
            inputs: false,
        };
        let of = |projections: &[ProjectionLayout]| self.linear(projections, rows, passes);
        let attention = of(&block.qkv).max(of(&[block.o]));
        let mlps = block.mlp.gated();
        let mlps = mlps.map(|mlp| of(&mlp.gate_up).max(of(&[mlp.down])));
        mlps.fold(attention, LinearSizes::max)
    }

    /// With what is computed again.
    fn linear_backward(&self, index: usize, rows: usize) -> LinearSizes {
        let (block, parts) = (&self.layout.blocks[index], self.options.recompute.parts());
        let of = |projections: &[ProjectionLayout], forward, inputs| {
            let passes = Passes {
                forward,
                backward: true,
                inputs,
            };
            self.linear(projections, rows, passes)
        };
        let inputs = index > self.first_block || self.embeds();
        let down = parts.down && block.mlp_norms[1].is_some();
        let attention =
            of(&block.qkv[..], parts.qkv, inputs).max(of(&[block.o], parts.output, true));
        let mlps = block
            .mlp
            .gated()
            .map(|mlp| of(&mlp.gate_up, parts.gate_up, true).max(of(&[mlp.down], down, true)));
        mlps.fold(attention, LinearSizes::max)
    }

    fn linear(&self, projections: &[ProjectionLayout], rows: usize, passes: Passes) -> LinearSizes {
        let rounding = self.precision.of(projections, 0);
        LinearSizes::new(
            self.layout,
            projections,
            rows,
            &rounding,
            (passes, self.trains),
        )
    }

    /// Whether the embedding gets gradients of its rows.
    fn embeds(&self) -> bool {
        self.first_block == 0 && (self.trains)(self.layout.embedding)
    }
}
