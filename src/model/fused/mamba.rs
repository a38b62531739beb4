//! Launches of the kernels of Mamba-2.

use super::operands::{biased, f32_from};
use super::pass::FusedPass;
use super::plan::Normed;
use super::recurrent_layer::RecurrentLayer;
use super::recurrent_scratch::mamba_inputs;
use crate::base::Result;
use crate::cuda::{
    self, GemmPlan, Layout, MambaConstants, MambaInputs, Output, RecurrentOutput, StridedRows,
};
use crate::model::spec::{Mamba2Spec, MixerSpec};
use crate::model::weights::{Mamba2, Mixer};
use crate::ops::Array;

type Layer<'a> = RecurrentLayer<'a, Mamba2Spec, Mamba2>;

impl<'a> Layer<'a> {
    fn inputs(&self) -> MambaInputs<'a> {
        MambaInputs {
            xbc: (&self.scratch.convolved).into(),
            decay: (&self.scratch.decay).into(),
            steps: (&self.scratch.rates).into(),
        }
    }
}

impl<'a> FusedPass<'a> {
    fn mamba(&self, index: usize) -> Result<Layer<'a>> {
        let (weights, spec) = self.source.block(index)?;
        let parts = match (&spec.mixer, &weights.mixer) {
            (MixerSpec::Mamba2(spec), Mixer::Mamba2(weights)) => Some((spec, &**weights)),
            _ => None,
        };
        RecurrentLayer::new(self, index, parts)
    }

    /// Columns of [`Kernel::MambaInputs`](super::plan::Kernel::MambaInputs) from one on: the gate, then x, B and C, then time steps.
    fn mamba_rows(&self, layer: &Layer<'_>, first: usize) -> Result<StridedRows<'a>> {
        Ok(StridedRows {
            values: f32_from(&self.memory.projected, first)?,
            stride: mamba_inputs(&layer.spec.shape),
        })
    }

    pub(super) fn mamba_inputs(&self, index: usize, input: &Normed, gemm: &GemmPlan) -> Result<()> {
        let layer = self.mamba(index)?;
        let Mamba2 { z, xbc, dt, .. } = layer.weights;
        let matrices = [biased(z)?, biased(xbc)?, biased(dt)?];
        self.linear(
            gemm,
            self.input(input)?,
            &matrices,
            Output::F32,
            &self.memory.projected,
            mamba_inputs(&layer.spec.shape),
        )
    }

    pub(super) fn mamba_conv(&self, index: usize) -> Result<()> {
        let layer = self.mamba(index)?;
        let (shape, heads) = (&layer.spec.shape, &layer.weights.heads);
        let bias = heads.convolution_bias.as_ref().map(Array::on_gpu);
        let constants = MambaConstants {
            conv: heads.convolution.on_gpu()?.into(),
            conv_bias: bias.transpose()?.map(Into::into),
            a_log: heads.a_log.on_gpu()?.into(),
            dt_bias: heads.dt_bias.on_gpu()?.into(),
            step_limits: layer.spec.step_limits,
        };
        cuda::mamba_conv(
            shape,
            &constants,
            &layer.segments,
            &layer.states,
            self.rows,
            self.mamba_rows(&layer, shape.width())?,
            self.mamba_rows(&layer, shape.width() + shape.channels())?,
            &layer.inputs(),
        )
    }

    pub(super) fn mamba_scan(&self, index: usize) -> Result<()> {
        let layer = self.mamba(index)?;
        cuda::mamba_scan(
            &layer.spec.shape,
            layer.weights.heads.skip.on_gpu()?.into(),
            &layer.segments,
            &layer.states,
            self.rows,
            &layer.inputs(),
            (&layer.scratch.answers).into(),
        )
    }

    pub(super) fn mamba_norm(&self, index: usize, layout: Layout) -> Result<()> {
        let layer = self.mamba(index)?;
        cuda::mamba_norm(
            &layer.spec.shape,
            layer.weights.heads.norm.on_gpu()?.into(),
            self.source.spec.norm_eps,
            self.rows,
            (&layer.scratch.answers).into(),
            self.mamba_rows(&layer, 0)?,
            RecurrentOutput::F16(layout),
            Some((self.overflow()?.into(), index)),
            (&self.memory.input).into(),
        )
    }
}
