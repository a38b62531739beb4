//! Memory of a pass, which grows to the largest batch it has seen.

use super::linear::LinearScratch;
use super::recompute::RecomputedParts;
use crate::base::Result;
use crate::ops::experts::RoutedRows;
use crate::ops::{Array, Device, Mixed};

/// What the backward pass of a block takes from its forward pass.
#[derive(Debug, Default)]
pub(super) struct Saved<M = Array<Mixed>, F = Array> {
    /// What attention's projections take, `[T, hidden]`.
    pub(super) normed: M,
    /// Queries, keys and values as projected, and as they attend.
    pub(super) qkv: M,
    pub(super) rotated: M,
    /// What attention makes, and the logarithms of its sums.
    pub(super) attended: M,
    pub(super) lse: F,
    /// What leaves attention before it is normalized, where it is.
    pub(super) attention_branch: M,
    /// The residual stream between the halves.
    pub(super) middle: M,
    /// What the MLP's projections take.
    pub(super) mlp_normed: M,
    /// Gate and up, `[T, 2 intermediate]`.
    pub(super) gate_up: M,
    /// What leaves the MLP before it is normalized, where it is.
    pub(super) mlp_branch: M,
}

/// The same as numbers of elements.
pub(super) type SavedSizes = Saved<usize, usize>;

impl Saved {
    pub(super) fn new() -> Saved {
        Saved {
            normed: Array::empty(),
            qkv: Array::empty(),
            rotated: Array::empty(),
            attended: Array::empty(),
            lse: Array::empty(),
            attention_branch: Array::empty(),
            middle: Array::empty(),
            mlp_normed: Array::empty(),
            gate_up: Array::empty(),
            mlp_branch: Array::empty(),
        }
    }
}

impl SavedSizes {
    fn all(&self) -> [usize; 10] {
        [
            self.normed,
            self.qkv,
            self.rotated,
            self.attended,
            self.lse,
            self.attention_branch,
            self.middle,
            self.mlp_normed,
            self.gate_up,
            self.mlp_branch,
        ]
    }

    /// What serves one after the other.
    pub(super) fn max(&self, other: &SavedSizes) -> SavedSizes {
        SavedSizes {
            normed: self.normed.max(other.normed),
            qkv: self.qkv.max(other.qkv),
            rotated: self.rotated.max(other.rotated),
            attended: self.attended.max(other.attended),
            lse: self.lse.max(other.lse),
            attention_branch: self.attention_branch.max(other.attention_branch),
            middle: self.middle.max(other.middle),
            mlp_normed: self.mlp_normed.max(other.mlp_normed),
            gate_up: self.gate_up.max(other.gate_up),
            mlp_branch: self.mlp_branch.max(other.mlp_branch),
        }
    }

    /// Bytes, where an element of activations has `element`.
    pub(super) fn bytes(&self, element: usize) -> usize {
        let elements: usize = self.all().iter().sum();
        element * (elements - self.lse) + size_of::<f32>() * self.lse
    }
}

impl<M, F> Saved<M, F> {
    /// Exchanges with `other` all that is computed again.
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
            (heads, &mut self.rotated, &mut other.rotated),
            (attention, &mut self.attended, &mut other.attended),
            (
                output,
                &mut self.attention_branch,
                &mut other.attention_branch,
            ),
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
        }
    }
}

/// The experts of each row of a batch.
#[derive(Debug)]
pub(super) struct Routing {
    /// The router's logits, `[T, experts]`.
    pub(super) logits: Vec<f32>,
    pub(super) routed: RoutedRows,
    /// Every row, for the shared expert, weighted by the sigmoid of its gate. No row where there is no such expert.
    pub(super) every_row: RoutedRows,
    /// Gradients of the weights of `routed`, expert by expert.
    pub(super) dweights: Vec<f32>,
    /// Gradients of the weights of `every_row`.
    pub(super) dshared: Vec<f32>,
}

/// Memory of a mixture of experts.
#[derive(Debug)]
pub(super) struct ExpertScratch {
    /// Logits of the router, and gradients of weights: f32, brought to the host at once.
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
    /// The sum over experts, `[T, hidden]`, or that of the gradients of their rows.
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

/// Memory that is used by one operation after another.
#[derive(Debug)]
pub(super) struct Scratch {
    /// The weights of a product of a block, and then their gradients; the weights of a chunk of the head.
    pub(super) weight: Array<Mixed>,
    /// The gradients of a chunk of the head or of the embedding.
    pub(super) gradient: Array<Mixed>,
    /// The gradients of a tied head, where activations are kept.
    pub(super) tied: Array<Mixed>,
    /// Of projections.
    pub(super) linear: LinearScratch,
    /// Gradients of the norms of queries and keys.
    pub(super) dnorms: Array,
    /// `[T, intermediate]`: what goes into the last projection of an MLP, or its gradients; and then those of queries, keys and values.
    pub(super) inner: Array<Mixed>,
    /// `[T, hidden]`: gradients of the residual stream, before a half of a block and behind it.
    pub(super) dx: Array<Mixed>,
    pub(super) dx_before: Array<Mixed>,
    /// `[T, hidden]`: gradients of what leaves a half before it is normalized.
    pub(super) dbranch: Array<Mixed>,
    /// Gradients of attention's results.
    pub(super) dattended: Array<Mixed>,
    /// Memory of mixtures of experts.
    pub(super) experts: ExpertScratch,
    /// `[T, hidden]`: what the head takes, and its gradients in f32.
    pub(super) head_normed: Array<Mixed>,
    pub(super) head_gradient: Array,
    /// `[T, chunk]`: logits and their gradients.
    pub(super) logits: Array,
    pub(super) dlogits: Array<Mixed>,
}

impl Scratch {
    pub(super) fn new() -> Scratch {
        Scratch {
            weight: Array::empty(),
            gradient: Array::empty(),
            tied: Array::empty(),
            linear: LinearScratch::new(),
            dnorms: Array::empty(),
            inner: Array::empty(),
            dx: Array::empty(),
            dx_before: Array::empty(),
            dbranch: Array::empty(),
            dattended: Array::empty(),
            experts: ExpertScratch::new(),
            head_normed: Array::empty(),
            head_gradient: Array::empty(),
            logits: Array::empty(),
            dlogits: Array::empty(),
        }
    }

    /// Gives back what only the head uses.
    pub(super) fn release_head(&mut self) {
        self.gradient = Array::empty();
        self.head_normed = Array::empty();
        self.head_gradient = Array::empty();
        self.logits = Array::empty();
        self.dlogits = Array::empty();
    }

    /// Gives back what only blocks use.
    pub(super) fn release_blocks(&mut self) {
        self.linear = LinearScratch::new();
        self.inner = Array::empty();
        self.dx_before = Array::empty();
        self.dbranch = Array::empty();
        self.dattended = Array::empty();
        self.experts = ExpertScratch::new();
    }
}

/// Makes each array at least so long.
pub(super) fn grow(device: &Device, arrays: &mut [(&mut Array<Mixed>, usize)]) -> Result<()> {
    for (array, len) in arrays {
        array.grow(device, *len)?;
    }
    Ok(())
}
