//! Estimates the memory of a training pass, from the allocation sizes of its parts and from which of them exist at the same time.

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

/// The configuration of a training pass, for estimates before it exists.
pub struct PassMemory<'a> {
    /// The device that it runs on.
    pub device: &'a Device,
    /// The model.
    pub spec: &'a Spec,
    /// Its parameters.
    pub layout: &'a Layout,
    /// How it uses memory.
    pub options: Options,
    /// The precision of its products.
    pub precision: &'a ProductPrecision,
    /// Selects the matrices that get gradients.
    pub trains: &'a dyn Fn(MatrixId) -> bool,
    /// The first block that gets gradients.
    pub first_block: usize,
}

/// Scratch that blocks use one after another, in elements.
#[derive(Clone, Copy, Default)]
struct Blocks {
    linear: LinearSizes,
    inner: usize,
    /// Gradients of the residual stream before a half, of a half's output, and of the input of the mixer's last projection.
    dx_before: usize,
    dbranch: usize,
    dattended: usize,
    /// The output of the mixer's first projections, where its roles have columns of their own.
    columns: usize,
    /// Scratch of the backward pass of the gated delta rule, in f32.
    delta: usize,
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
            columns: self.columns.max(other.columns),
            delta: self.delta.max(other.delta),
            experts: self.experts.max(other.experts),
        }
    }

    fn bytes(&self, element: usize) -> usize {
        let gradients = self.dx_before + self.dbranch + self.dattended;
        element * (self.inner + gradients + self.columns)
            + size_of::<f32>() * self.delta
            + self.linear.scratch_bytes(element)
            + self.experts
    }
}

/// Memory of the blocks of a pass.
struct BlockParts {
    /// Bytes that each block keeps for itself.
    kept: usize,
    /// Bytes that blocks share for recomputed activations, and those of them that the backward pass takes.
    shared: usize,
    shared_backward: usize,
    forward: Blocks,
    backward: Blocks,
}

impl BlockParts {
    /// Bytes of the scratch that blocks use one after another, for both directions.
    fn both(&self, element: usize) -> usize {
        self.forward.max(self.backward).bytes(element)
    }
}

impl PassMemory<'_> {
    /// Bytes of offloaded activations in host memory for a batch of `rows` tokens.
    pub fn offloaded(&self, rows: usize) -> usize {
        let away = Streams::away(self.spec.blocks.len(), self.options.offload);
        Array::<Mixed>::element_bytes(self.device) * away * rows * self.spec.hidden_size
    }

    /// Peak bytes on the device while computing gradients of a batch of `rows` tokens. Leaves out relatively small parts.
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
        // Scratch of the blocks stays until the embedding's turn, if that comes, or permanently if nothing is recomputed.
        let (shared, both) = (parts.shared, parts.both(element));
        let most = match keeps {
            true => shared + both + head,
            false if self.embeds() || spec.tied => {
                let forward = shared + parts.forward.bytes(element);
                let backward = parts.shared_backward + parts.backward.bytes(element);
                head.max(forward).max(backward)
            }
            false => head.max(shared + both),
        };
        always + most
    }

    /// [`PassMemory::bytes`] for a distillation loss, without the teacher's own memory.
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
        // The head's input is computed before the rest is freed.
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

    /// Bytes that a pass holds from its first batch on.
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
        // `head.stream` is the gradient of the residual stream.
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
        let mut shared_backward = SavedSizes::default();
        // Blocks without gradients use the memory of the first block with gradients, or else of the last block.
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
            if index >= first {
                shared_backward = shared_backward.max(&again);
            }
            forward = forward.max(Blocks {
                linear: self.linear_forward(own, rows),
                inner: sizes.wide,
                columns: sizes.columns(),
                experts: experts(false),
                ..Blocks::default()
            });
            if index >= self.first_block {
                let posts = [own.mixer_norms[1], own.mlp_norms[1]];
                let normalizes = posts.iter().any(Option::is_some);
                backward = backward.max(Blocks {
                    linear: self.linear_backward(index, rows),
                    inner: sizes.inner(),
                    dx_before: sizes.stream,
                    dbranch: if normalizes { sizes.stream } else { 0 },
                    dattended: sizes.attended,
                    columns: sizes.columns(),
                    delta: sizes.delta,
                    experts: experts(true),
                });
            }
        }
        BlockParts {
            kept,
            shared: shared.bytes(element),
            shared_backward: shared_backward.bytes(element),
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
        let mixer = of(&block.inputs).max(of(&[block.output]));
        let mlps = block.mlp.gated();
        let mlps = mlps.map(|mlp| of(&mlp.gate_up).max(of(&[mlp.down])));
        mlps.fold(mixer, LinearSizes::max)
    }

    /// Scratch of the backward pass, including recomputed operations.
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
        let first = of(&block.inputs[..], parts.qkv, inputs);
        let mixer = first.max(of(&[block.output], parts.output, true));
        let mlps = block
            .mlp
            .gated()
            .map(|mlp| of(&mlp.gate_up, parts.gate_up, true).max(of(&[mlp.down], down, true)));
        mlps.fold(mixer, LinearSizes::max)
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

    /// Whether the embedding gets gradients from its lookups.
    fn embeds(&self) -> bool {
        self.first_block == 0 && (self.trains)(self.layout.embedding)
    }
}
