//! The loss of hidden states: how far what the head takes is from what it should take.

use super::Store;
use super::head::HeadPass;
use super::scratch::Scratch;
use crate::base::Result;
use crate::ops::training::loss;
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
        self.normalize(store, x.first(len)?, s)?;
        s.dx.grow(device, len)?;
        loss::l1(
            device,
            s.head_normed.first(len)?,
            targets.values,
            targets.weight,
            s.dx.first_mut(len)?,
        )
    }
}
