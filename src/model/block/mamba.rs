//! The operations of Mamba-2 in the reference block.

use super::{BlockScratch, ReferencePass, Rows, update_states};
use crate::base::Result;
use crate::model::kv::StatePart;
use crate::model::spec::Mamba2Spec;
use crate::model::weights::Mamba2;
use crate::ops::activation::{self, Activation};
use crate::ops::mamba::{self, MambaScanRows};

impl ReferencePass<'_> {
    /// Projects to the gate, to x, B and C, and to time steps, and computes the decay of states.
    pub(super) fn mamba_inputs(
        &self,
        (spec, weights): (&Mamba2Spec, &Mamba2),
        s: &mut BlockScratch,
    ) -> Result<()> {
        let (m, shape) = (self.rows, &spec.shape);
        let (channels, width) = (m * shape.channels(), m * shape.width());
        let heads = m * shape.heads;
        self.project(
            s.normed.first(m * self.spec.hidden_size)?,
            self.all_rows(),
            &mut [
                (&weights.z, s.head_gate.first_mut(width)?),
                (&weights.xbc, s.q.first_mut(channels)?),
                (&weights.dt, s.beta.first_mut(heads)?),
            ],
            &mut s.products,
        )?;
        let (dt, decay) = (s.beta.first_mut(heads)?, s.decay.first_mut(heads)?);
        mamba::steps(self.device, &weights.heads, spec.step_limits, dt, decay)
    }

    pub(super) fn mamba_convolve(
        &self,
        index: usize,
        (spec, weights): (&Mamba2Spec, &Mamba2),
        segments: &[Rows<'_>],
        s: &mut BlockScratch,
    ) -> Result<()> {
        let shape = &spec.shape;
        update_states(index, StatePart::History, segments, |rows, history| {
            let xbc = s.q.part_mut(rows.elements(shape.channels()))?;
            mamba::convolve(self.device, shape, &weights.heads, xbc, history)
        })
    }

    pub(super) fn mamba_scan(
        &self,
        index: usize,
        (spec, weights): (&Mamba2Spec, &Mamba2),
        segments: &[Rows<'_>],
        s: &mut BlockScratch,
    ) -> Result<()> {
        let shape = &spec.shape;
        update_states(index, StatePart::Matrices, segments, |rows, state| {
            let heads = rows.elements(shape.heads);
            let out = rows.elements(shape.width());
            let rows = MambaScanRows {
                xbc: s.q.part(rows.elements(shape.channels()))?.host()?,
                decay: s.decay.part(heads.clone())?.host()?,
                dt: s.beta.part(heads)?.host()?,
                skip: weights.heads.skip.all().host()?,
                out: s.attended.part_mut(out)?.host()?,
            };
            mamba::scan(self.device, shape, rows, state)
        })
    }

    /// Multiplies what was read from the state by `silu` of the gate, in the gate's memory, and normalizes the product by groups.
    pub(super) fn mamba_norm(
        &self,
        (spec, weights): (&Mamba2Spec, &Mamba2),
        s: &mut BlockScratch,
    ) -> Result<()> {
        let (device, len) = (self.device, self.rows * spec.shape.width());
        let (gate, x) = (s.head_gate.first_mut(len)?, s.attended.first(len)?);
        activation::glu(device, Activation::Silu, gate, x)?;
        let (x, eps) = (s.head_gate.first_mut(len)?, self.spec.norm_eps);
        mamba::norm(device, &spec.shape, &weights.heads, eps, x)
    }
}
