//! Per-layer embeddings in the reference block: the inputs of all blocks, computed once a pass, and the third half of a block, which takes
//! its own.

use std::f32::consts::FRAC_1_SQRT_2;

use super::{BlockScratch, ReferencePass};
use crate::base::error::bail;
use crate::base::{Result, memory};
use crate::model::spec::PerLayerSpec;
use crate::model::weights::{PerLayer, PerLayerTable, Weights};
use crate::ops::{Slice, SliceMut, activation, norm};

impl ReferencePass<'_> {
    /// Computes the inputs of all blocks, if the model has them, from the tokens and from their embeddings in the residual stream.
    pub(super) fn per_layer_inputs(
        &self,
        weights: &Weights,
        tokens: &[u32],
        s: &mut BlockScratch,
    ) -> Result<()> {
        match (&self.spec.per_layer_table, &weights.per_layer) {
            (None, _) => Ok(()),
            (Some(spec), Some(weights)) => {
                self.project_embeddings(spec.width, weights, s)?;
                self.add_table_rows((spec.width, spec.scale), weights, tokens, s)
            }
            (Some(_), None) => bail!(Internal, "a model without the table that its spec has"),
        }
    }

    /// The normalized projections of the embeddings.
    fn project_embeddings(
        &self,
        width: usize,
        weights: &PerLayerTable,
        s: &mut BlockScratch,
    ) -> Result<()> {
        let (device, m, hidden) = (self.device, self.rows, self.spec.hidden_size);
        let len = m * self.spec.blocks.len() * width;
        let projected = &mut s.layer_projections;
        self.project(
            s.residual.first(m * hidden)?,
            self.all_rows(),
            &mut [(&weights.projection, projected.first_mut(len)?)],
            &mut s.products,
        )?;
        let factor = (hidden as f64).powf(-0.5) as f32;
        activation::scale(device, projected.first_mut(len)?, factor)?;
        let eps = self.spec.norm_eps;
        norm::rms_norm_in_place(device, projected.first_mut(len)?, &weights.norm, eps)
    }

    /// Adds the table's rows of the tokens to the projections, and sorts the sums by block.
    fn add_table_rows(
        &self,
        parts: (usize, f32),
        weights: &PerLayerTable,
        tokens: &[u32],
        s: &mut BlockScratch,
    ) -> Result<()> {
        let len = self.rows * self.spec.blocks.len() * parts.0;
        let projected = s.layer_projections.first(len)?;
        let inputs = s.layer_inputs.first_mut(len)?;
        match (projected, inputs) {
            (Slice::Host(projected), SliceMut::Host(inputs)) => {
                self.sum_by_block(parts, weights, tokens, projected, inputs)
            }
            // The table is on the host.
            (projected, inputs) => {
                let (mut before, mut after) = (memory::zeros(len)?, memory::zeros(len)?);
                projected.read(&mut before)?;
                self.sum_by_block(parts, weights, tokens, &before, &mut after)?;
                inputs.copy_from(Slice::Host(&after))
            }
        }
    }

    /// Adds the table's rows of the tokens to `projected` `[rows, blocks, width]`, into `inputs` `[blocks, rows, width]`.
    fn sum_by_block(
        &self,
        (width, scale): (usize, f32),
        weights: &PerLayerTable,
        tokens: &[u32],
        projected: &[f32],
        inputs: &mut [f32],
    ) -> Result<()> {
        let (m, blocks) = (self.rows, self.spec.blocks.len());
        let mut stored = memory::zeros(blocks * width)?;
        let rows = projected.chunks_exact(blocks * width).zip(tokens);
        for (row, (projected, &token)) in rows.enumerate() {
            weights.table.row(token as usize, &mut stored)?;
            let parts = projected.chunks_exact(width);
            for (block, (projected, stored)) in parts.zip(stored.chunks_exact(width)).enumerate() {
                let input = &mut inputs[(block * m + row) * width..][..width];
                for ((x, p), t) in input.iter_mut().zip(projected).zip(stored) {
                    *x = (p + t * scale) * FRAC_1_SQRT_2;
                }
            }
        }
        Ok(())
    }

    /// The gate of a block's input, times that input, in the memory of an MLP's gate.
    pub(super) fn per_layer_gate(
        &self,
        index: usize,
        (spec, weights): (&PerLayerSpec, &PerLayer),
        s: &mut BlockScratch,
    ) -> Result<()> {
        let (m, hidden, len) = (self.rows, self.spec.hidden_size, self.rows * spec.width);
        self.project(
            s.residual.first(m * hidden)?,
            self.all_rows(),
            &mut [(&weights.gate, s.gate.first_mut(len)?)],
            &mut s.products,
        )?;
        let input = s.layer_inputs.part(index * len..(index + 1) * len)?;
        activation::glu(self.device, spec.activation, s.gate.first_mut(len)?, input)
    }

    /// The projection of the gated input, in `normed`.
    pub(super) fn per_layer_project(
        &self,
        (spec, weights): (&PerLayerSpec, &PerLayer),
        s: &mut BlockScratch,
    ) -> Result<()> {
        let (m, hidden) = (self.rows, self.spec.hidden_size);
        self.project(
            s.gate.first(m * spec.width)?,
            self.all_rows(),
            &mut [(&weights.projection, s.normed.first_mut(m * hidden)?)],
            &mut s.products,
        )
    }
}
