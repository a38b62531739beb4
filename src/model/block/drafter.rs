//! The input of the drafter's block, and the hidden rows that it is made of.

use super::{BlockScratch, ReferencePass};
use crate::base::{Result, memory};
use crate::model::spec::Spec;
use crate::model::weights::{Drafter, Weights};
use crate::ops::linear::linear;
use crate::ops::{Device, Slice, SliceMut, norm};

impl ReferencePass<'_> {
    /// Sets the residual stream to the input of the drafter's block, from the tokens after the rows' positions and the hidden rows
    /// `[rows, hidden]`.
    pub(in crate::model) fn enter_drafter(
        &self,
        (weights, drafter): (&Weights, &Drafter),
        tokens: &[u32],
        hidden: &[f32],
        s: &mut BlockScratch,
    ) -> Result<()> {
        let (device, eps, width) = (self.device, self.spec.norm_eps, self.spec.hidden_size);
        let (m, len) = (self.rows, self.rows * width);
        self.embed(weights, tokens, s)?;
        s.normed.first_mut(len)?.copy_from(Slice::Host(hidden))?;
        for (half, (x, weight)) in [
            (&mut s.residual, &drafter.embedding_norm),
            (&mut s.normed, &drafter.hidden_norm),
        ]
        .into_iter()
        .enumerate()
        {
            norm::rms_norm_in_place(device, x.first_mut(len)?, weight, eps)?;
            for row in 0..m {
                let to = (2 * row + half) * width;
                let from = x.part(row * width..(row + 1) * width)?;
                s.joined.part_mut(to..to + width)?.copy_from(from)?;
            }
        }
        let out: SliceMut<'_> = s.residual.first_mut(len)?;
        let outputs = &mut [(&drafter.fc, out)];
        let x = s.joined.first(2 * len)?;
        let workspace = &mut s.products.workspace;
        linear(device, x, m, outputs, self.activations, workspace)
    }
}

/// Normalizes `rows` rows of the residual stream in place by the final norm, and returns them, `[rows, hidden]`.
pub(in crate::model) fn hidden_rows(
    device: &Device,
    spec: &Spec,
    weights: &Weights,
    rows: usize,
    s: &mut BlockScratch,
) -> Result<Vec<f32>> {
    let len = rows * spec.hidden_size;
    let x = s.residual.first_mut(len)?;
    norm::rms_norm_in_place(device, x, &weights.norm, spec.norm_eps)?;
    let mut hidden = memory::zeros(len)?;
    s.residual.first(len)?.read(&mut hidden)?;
    Ok(hidden)
}
