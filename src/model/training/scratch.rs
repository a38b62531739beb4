//! Memory of a training pass. It grows to the largest batch seen.

use super::linear::LinearScratch;
use super::recompute::RecomputedParts;
use crate::base::Result;
use crate::ops::experts::RoutedRows;
use crate::ops::{Array, Device, Mixed};

/// Activations of a block that its backward pass needs.
#[derive(Debug, Default)]
pub(super) struct Saved<M = Array<Mixed>, F = Array> {
    /// The input of the mixer's projections, `[T, hidden]`.
    pub(super) normed: M,
    /// Queries, keys and values after projection, and after norms and RoPE, or the convolution and norms of a gated delta net.
    pub(super) qkv: M,
    pub(super) rotated: M,
    /// The gate of attention, or z, b and a of a gated delta net, `[T, value_width + 2 value_heads]`. Becomes its gradient in place.
    pub(super) gate: M,
    /// The output of attention, and its log-sum-exp; the output of the gated delta rule, and checkpoints of its states.
    pub(super) attended: M,
    pub(super) lse: F,
    pub(super) states: F,
    /// That output times its gate, in blocks that have one.
    pub(super) gated: M,
    /// The output of the mixer half before its norm, in blocks with a norm there.
    pub(super) mixer_branch: M,
    /// The residual stream between the halves.
    pub(super) middle: M,
    /// The input of the MLP's projections.
    pub(super) mlp_normed: M,
    /// Gate and up, `[T, 2 intermediate]`.
    pub(super) gate_up: M,
    /// The output of the MLP before its norm, in blocks with a norm there.
    pub(super) mlp_branch: M,
}

/// Sizes of [`Saved`]'s arrays, in elements.
pub(super) type SavedSizes = Saved<usize, usize>;

impl Saved {
    pub(super) fn new() -> Saved {
        Saved {
            normed: Array::empty(),
            qkv: Array::empty(),
            rotated: Array::empty(),
            gate: Array::empty(),
            attended: Array::empty(),
            lse: Array::empty(),
            states: Array::empty(),
            gated: Array::empty(),
            mixer_branch: Array::empty(),
            middle: Array::empty(),
            mlp_normed: Array::empty(),
            gate_up: Array::empty(),
            mlp_branch: Array::empty(),
        }
    }
}

impl SavedSizes {
    /// The sizes of arrays of activations.
    fn mixed(&self) -> [usize; 11] {
        [
            self.normed,
            self.qkv,
            self.rotated,
            self.gate,
            self.attended,
            self.gated,
            self.mixer_branch,
            self.middle,
            self.mlp_normed,
            self.gate_up,
            self.mlp_branch,
        ]
    }

    /// Elementwise maximum, for uses that follow one another.
    pub(super) fn max(&self, other: &SavedSizes) -> SavedSizes {
        SavedSizes {
            normed: self.normed.max(other.normed),
            qkv: self.qkv.max(other.qkv),
            rotated: self.rotated.max(other.rotated),
            gate: self.gate.max(other.gate),
            attended: self.attended.max(other.attended),
            lse: self.lse.max(other.lse),
            states: self.states.max(other.states),
            gated: self.gated.max(other.gated),
            mixer_branch: self.mixer_branch.max(other.mixer_branch),
            middle: self.middle.max(other.middle),
            mlp_normed: self.mlp_normed.max(other.mlp_normed),
            gate_up: self.gate_up.max(other.gate_up),
            mlp_branch: self.mlp_branch.max(other.mlp_branch),
        }
    }

    /// Bytes. An element of activations has `element` bytes.
    pub(super) fn bytes(&self, element: usize) -> usize {
        let elements: usize = self.mixed().iter().sum();
        element * elements + size_of::<f32>() * (self.lse + self.states)
    }
}

impl<M, F> Saved<M, F> {
    /// Exchanges the recomputed arrays with `other`.
    pub(super) fn swap_recomputed(&mut self, other: &mut Self, parts: RecomputedParts) {
        let RecomputedParts {
            norms,
            qkv,
            heads,
            attention,
            output,
            gate_up,
            down,
        } = parts;
        let arrays = [
            (norms, &mut self.normed, &mut other.normed),
            (norms, &mut self.mlp_normed, &mut other.mlp_normed),
            (qkv, &mut self.qkv, &mut other.qkv),
            (qkv, &mut self.gate, &mut other.gate),
            (heads, &mut self.rotated, &mut other.rotated),
            (attention, &mut self.attended, &mut other.attended),
            (attention, &mut self.gated, &mut other.gated),
            (output, &mut self.mixer_branch, &mut other.mixer_branch),
            (output, &mut self.middle, &mut other.middle),
            (gate_up, &mut self.gate_up, &mut other.gate_up),
            (down, &mut self.mlp_branch, &mut other.mlp_branch),
        ];
        for (recomputed, own, other) in arrays {
            if recomputed {
                std::mem::swap(own, other);
            }
        }
        if attention {
            std::mem::swap(&mut self.lse, &mut other.lse);
            std::mem::swap(&mut self.states, &mut other.states);
        }
    }
}

/// The experts of each row of a batch.
#[derive(Debug)]
pub(super) struct Routing {
    /// The router's logits, `[T, experts]`.
    pub(super) logits: Vec<f32>,
    pub(super) routed: RoutedRows,
    /// Every row, for the shared expert, weighted by the sigmoid of its gate. Without a shared expert, no rows.
    pub(super) every_row: RoutedRows,
    /// Gradients of the weights of `routed`, expert by expert.
    pub(super) dweights: Vec<f32>,
    /// Gradients of the weights of `every_row`.
    pub(super) dshared: Vec<f32>,
}

/// Scratch of a mixture of experts.
#[derive(Debug)]
pub(super) struct ExpertScratch {
    /// Router logits, and gradients of routing weights: f32, copied to the host at once.
    pub(super) logits: Array,
    /// The experts of each row, from the forward pass of [`BlockOp::Route`](crate::model::order::BlockOp::Route) to its backward pass.
    pub(super) routing: Option<Routing>,
    /// Rows of one expert, `[T, hidden]`.
    pub(super) taken: Array<Mixed>,
    /// Gate and up of one expert, `[T, 2 intermediate]`.
    pub(super) gate_up: Array<Mixed>,
    /// The output of one expert, `[T, hidden]`, and of the mixture.
    pub(super) made: Array<Mixed>,
    /// The gradients of the output of one expert, `[T, hidden]`.
    pub(super) dmade: Array<Mixed>,
    /// The sum over experts, `[T, hidden]`, or the sum of the gradients of their rows.
    pub(super) sum: Array,
}

impl ExpertScratch {
    fn new() -> ExpertScratch {
        ExpertScratch {
            logits: Array::empty(),
            routing: None,
            taken: Array::empty(),
            gate_up: Array::empty(),
            made: Array::empty(),
            dmade: Array::empty(),
            sum: Array::empty(),
        }
    }
}

/// Scratch that operations use one after another.
#[derive(Debug)]
pub(super) struct TrainingScratch {
    /// The weights of a GEMM of a block, and then their gradients; the weights of a chunk of the head.
    pub(super) weight: Array<Mixed>,
    /// The gradients of a chunk of the head or of the embedding.
    pub(super) gradient: Array<Mixed>,
    /// The gradients of a tied head, if activations are kept.
    pub(super) tied: Array<Mixed>,
    /// Scratch of projections.
    pub(super) linear: LinearScratch,
    /// Gradients of the norms of queries and keys, or of the constants of a gated delta net.
    pub(super) dvectors: Array,
    /// `[T, intermediate]`: the input of the last projection of an MLP, or its gradient; later the gradients of queries, keys and values.
    pub(super) inner: Array<Mixed>,
    /// `[T, hidden]`: gradients of the residual stream, after a half of a block and before it.
    pub(super) dx: Array<Mixed>,
    pub(super) dx_before: Array<Mixed>,
    /// `[T, hidden]`: gradients of a half's output before its norm.
    pub(super) dbranch: Array<Mixed>,
    /// Gradients of the input of the mixer's last projection, and of the output of attention or of the gated delta rule.
    pub(super) dattended: Array<Mixed>,
    /// `[T, columns]`: the output of the mixer's first projections in the columns of their files, or its gradient, in blocks whose roles
    /// have columns of their own.
    pub(super) columns: Array<Mixed>,
    /// Scratch of the backward pass of the gated delta rule.
    pub(super) delta: Array,
    /// Scratch of mixtures of experts.
    pub(super) experts: ExpertScratch,
    /// `[T, hidden]`: the head's input, and its gradients in f32.
    pub(super) head_normed: Array<Mixed>,
    pub(super) head_gradient: Array,
    /// `[T, chunk]`: logits and their gradients.
    pub(super) logits: Array,
    pub(super) dlogits: Array<Mixed>,
}

impl TrainingScratch {
    pub(super) fn new() -> TrainingScratch {
        TrainingScratch {
            weight: Array::empty(),
            gradient: Array::empty(),
            tied: Array::empty(),
            linear: LinearScratch::new(),
            dvectors: Array::empty(),
            inner: Array::empty(),
            dx: Array::empty(),
            dx_before: Array::empty(),
            dbranch: Array::empty(),
            dattended: Array::empty(),
            columns: Array::empty(),
            delta: Array::empty(),
            experts: ExpertScratch::new(),
            head_normed: Array::empty(),
            head_gradient: Array::empty(),
            logits: Array::empty(),
            dlogits: Array::empty(),
        }
    }

    /// Frees the arrays that only the head uses.
    pub(super) fn release_head(&mut self) {
        self.gradient = Array::empty();
        self.head_normed = Array::empty();
        self.head_gradient = Array::empty();
        self.logits = Array::empty();
        self.dlogits = Array::empty();
    }

    /// Frees the arrays that only blocks use.
    pub(super) fn release_blocks(&mut self) {
        self.linear = LinearScratch::new();
        self.inner = Array::empty();
        self.dx_before = Array::empty();
        self.dbranch = Array::empty();
        self.dattended = Array::empty();
        self.columns = Array::empty();
        self.delta = Array::empty();
        self.experts = ExpertScratch::new();
    }
}

/// Grows each array to at least the given length.
pub(super) fn grow(device: &Device, arrays: &mut [(&mut Array<Mixed>, usize)]) -> Result<()> {
    for (array, len) in arrays {
        array.grow(device, *len)?;
    }
    Ok(())
}
