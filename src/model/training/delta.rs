//! A gated delta net in training, between its projections, forward and backward.

use super::Store;
use super::block::BlockPass;
use super::layout::{DeltaVectors, MixerVectors};
use super::scratch::{Saved, TrainingScratch};
use crate::base::Result;
use crate::base::error::bail;
use crate::ops::activation;
use crate::ops::training::delta::{self, GateConstants, RuleGradients, RuleInputs};
use crate::tensor::DeltaShape;

impl BlockPass<'_> {
    fn delta(&self) -> Result<(DeltaShape, DeltaVectors)> {
        match (self.block.gated_delta(), self.layout.vectors) {
            (Some(spec), MixerVectors::GatedDelta(vectors)) => Ok((spec.shape, vectors)),
            _ => bail!(Internal, "attention taken for a gated delta net"),
        }
    }

    /// The convolution of queries, keys and values, and the norms of queries and keys.
    pub(super) fn convolve(&self, store: &dyn Store, saved: &mut Saved) -> Result<()> {
        let (device, len, (shape, vectors)) = (self.device, self.sizes().qkv, self.delta()?);
        saved.rotated.grow(device, len)?;
        let (x, out) = (saved.qkv.first(len)?, saved.rotated.first_mut(len)?);
        let weight = store.vector(vectors.convolution)?;
        delta::convolve(device, &shape, &self.batch.documents, weight, x, out)
    }

    /// Backward of [`BlockPass::convolve`]: computes the gradients of queries, keys and values from `s.inner` in `saved.rotated`, which no
    /// earlier operation needs.
    pub(super) fn convolve_backward(
        &self,
        store: &mut dyn Store,
        saved: &mut Saved,
        s: &mut TrainingScratch,
    ) -> Result<()> {
        let (device, len, (shape, vectors)) = (self.device, self.sizes().qkv, self.delta()?);
        let (weight, dweight) = store.vector_with_gradient(vectors.convolution)?;
        let (x, dx) = (saved.qkv.first(len)?, saved.rotated.first_mut(len)?);
        let gradients = (s.inner.first_mut(len)?, dx);
        let documents = &self.batch.documents;
        delta::convolve_backward(device, &shape, documents, (weight, x), gradients, dweight)
    }

    /// The gated delta rule.
    pub(super) fn delta_rule(&self, store: &dyn Store, saved: &mut Saved) -> Result<()> {
        let (device, sizes, (shape, vectors)) = (self.device, self.sizes(), self.delta()?);
        saved.attended.grow(device, sizes.attended)?;
        saved.states.grow(device, sizes.states)?;
        let inputs = RuleInputs {
            qkv: saved.rotated.first(sizes.qkv)?,
            gates: saved.gate.first(sizes.gate)?,
            constants: constants(store, vectors)?,
        };
        let out = saved.attended.first_mut(sizes.attended)?;
        let states = saved.states.first_mut(sizes.states)?;
        delta::delta_rule(device, &shape, &self.batch.documents, inputs, out, states)
    }

    /// Backward of [`BlockPass::delta_rule`]: computes in `s.inner` the gradients of queries, keys and values from `s.dattended`, and in
    /// `saved.gate` those of b and a.
    pub(super) fn delta_rule_backward(
        &self,
        store: &mut dyn Store,
        saved: &mut Saved,
        s: &mut TrainingScratch,
    ) -> Result<()> {
        let (device, sizes, (shape, vectors)) = (self.device, self.sizes(), self.delta()?);
        let (heads, scratch) = (shape.value_heads, shape.backward_floats());
        s.delta.grow(device, scratch)?;
        s.dvectors.grow(device, 2 * heads)?;
        activation::fill(device, s.dvectors.first_mut(2 * heads)?, 0.0)?;
        let forward = (
            saved.rotated.first(sizes.qkv)?,
            constants(store, vectors)?,
            saved.states.first(sizes.states)?,
        );
        let gradients = RuleGradients {
            dqkv: s.inner.first_mut(sizes.qkv)?,
            gates: saved.gate.first_mut(sizes.gate)?,
            dconstants: s.dvectors.first_mut(2 * heads)?,
        };
        delta::delta_rule_backward(
            device,
            &shape,
            &self.batch.documents,
            forward,
            s.dattended.first(sizes.attended)?,
            gradients,
            s.delta.first_mut(scratch)?,
        )?;
        for (id, part) in [
            (vectors.a_log, 0..heads),
            (vectors.dt_bias, heads..2 * heads),
        ] {
            let (_, to) = store.vector_with_gradient(id)?;
            activation::add(device, to, s.dvectors.part(part)?)?;
        }
        Ok(())
    }

    /// The gated norm of each value head.
    pub(super) fn delta_norm(&self, store: &dyn Store, saved: &mut Saved) -> Result<()> {
        let (device, sizes, (shape, vectors)) = (self.device, self.sizes(), self.delta()?);
        saved.gated.grow(device, sizes.attended)?;
        let norm = (store.vector(vectors.norm)?, self.spec.norm_eps);
        let (x, gates) = (
            saved.attended.first(sizes.attended)?,
            saved.gate.first(sizes.gate)?,
        );
        let out = saved.gated.first_mut(sizes.attended)?;
        delta::gated_norm(device, &shape, norm, x, gates, out)
    }

    /// Backward of [`BlockPass::delta_norm`], in `s.dattended` and for z in `saved.gate`. Overwrites `saved.gated`.
    pub(super) fn delta_norm_backward(
        &self,
        store: &mut dyn Store,
        saved: &mut Saved,
        s: &mut TrainingScratch,
    ) -> Result<()> {
        let (device, sizes, (shape, vectors)) = (self.device, self.sizes(), self.delta()?);
        let (weight, dweight) = store.vector_with_gradient(vectors.norm)?;
        let norm = (weight, self.spec.norm_eps);
        let x = saved.attended.first(sizes.attended)?;
        let normed = saved.gated.first_mut(sizes.attended)?;
        let gates = saved.gate.first_mut(sizes.gate)?;
        let dy = s.dattended.first_mut(sizes.attended)?;
        delta::gated_norm_backward(device, &shape, norm, (x, normed), gates, dy, dweight)
    }
}

fn constants(store: &dyn Store, vectors: DeltaVectors) -> Result<GateConstants<'_>> {
    Ok(GateConstants {
        a_log: store.vector(vectors.a_log)?,
        dt_bias: store.vector(vectors.dt_bias)?,
    })
}
