//! The loss of hidden states: how far what the head takes is from what it should take.

use super::Store;
use super::head::HeadPass;
use super::scratch::Scratch;
use crate::base::Result;
use crate::ops::training::{loss, norm};
use crate::ops::{Array, Mixed, Slice};

/// What the hidden states of a batch should be.
#[derive(Clone, Copy, Debug)]
pub struct HiddenTargets<'a> {
    /// `[T, hidden]`, of what leaves the last norm.
    pub values: Slice<'a, Mixed>,
    /// What the sum of absolute differences is multiplied by: the inverse of their number for a mean.
    pub weight: f32,
}

impl HeadPass<'_> {
    /// The loss of the rows `x` that leave the last block, and in `s.dx` the gradients of the last norm's results.
    pub(super) fn hidden(
        &self,
        store: &dyn Store,
        targets: HiddenTargets<'_>,
        x: &Array<Mixed>,
        s: &mut Scratch,
    ) -> Result<f64> {
        let (device, len) = (self.device, self.batch.rows() * self.spec.hidden_size);
        s.head_normed.grow(device, len)?;
        s.dx.grow(device, len)?;
        let (weight, normed) = (
            store.vector(self.layout.norm)?,
            s.head_normed.first_mut(len)?,
        );
        norm::rms_norm(device, x.first(len)?, weight, self.spec.norm_eps, normed)?;
        loss::l1(
            device,
            s.head_normed.first(len)?,
            targets.values,
            targets.weight,
            s.dx.first_mut(len)?,
        )
    }

    /// Makes `s.dx`, the gradients of the last norm's results, those of the rows `x`.
    pub(super) fn hidden_backward(
        &self,
        store: &mut dyn Store,
        x: &Array<Mixed>,
        s: &mut Scratch,
    ) -> Result<()> {
        let len = self.batch.rows() * self.spec.hidden_size;
        let (weight, dweight) = store.vector_with_gradient(self.layout.norm)?;
        let (x, dx) = (x.first(len)?, s.dx.first_mut(len)?);
        norm::rms_norm_backward(
            self.device,
            x,
            weight,
            self.spec.norm_eps,
            dx,
            None,
            dweight,
        )
    }
}
