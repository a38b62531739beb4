//! L1 loss of hidden states: the distance of the head's input from its targets.

use super::Store;
use super::head::HeadPass;
use super::scratch::TrainingScratch;
use crate::base::Result;
use crate::ops::training::loss;
use crate::ops::{Array, Mixed, Slice};

/// Targets for the hidden states of a batch.
#[derive(Clone, Copy, Debug)]
pub struct HiddenTargets<'a> {
    /// `[T, hidden]`, targets of the last norm's output.
    pub values: Slice<'a, Mixed>,
    /// Factor of the sum of absolute differences; the inverse of their number gives the mean.
    pub weight: f32,
}

impl HeadPass<'_> {
    /// The loss of the rows `x` that leave the last block. Computes the gradient of the last norm's output in `s.dx`.
    pub(super) fn hidden(
        &self,
        store: &dyn Store,
        targets: HiddenTargets<'_>,
        x: &Array<Mixed>,
        s: &mut TrainingScratch,
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
