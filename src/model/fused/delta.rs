//! Launches of the kernels of gated delta nets.

use super::operands::{biased, f32_from};
use super::pass::FusedPass;
use super::plan::Normed;
use super::recurrent_layer::RecurrentLayer;
use super::recurrent_scratch::delta_inputs;
use crate::base::Result;
use crate::cuda::{
    self, DeltaConstants, DeltaInputs, DeltaProjected, GemmPlan, Layout, Output, RecurrentOutput,
    StridedRows,
};
use crate::model::spec::{GatedDeltaSpec, MixerSpec};
use crate::model::weights::{GatedDelta, Mixer};

type Layer<'a> = RecurrentLayer<'a, GatedDeltaSpec, GatedDelta>;

impl<'a> Layer<'a> {
    fn inputs(&self) -> DeltaInputs<'a> {
        DeltaInputs {
            qkv: (&self.scratch.convolved).into(),
            decay: (&self.scratch.decay).into(),
            beta: (&self.scratch.rates).into(),
        }
    }

    fn constants(&self) -> Result<DeltaConstants<'a>> {
        let heads = &self.weights.heads;
        Ok(DeltaConstants {
            conv: heads.convolution.on_gpu()?.into(),
            a_log: heads.a_log.on_gpu()?.into(),
            dt_bias: heads.dt_bias.on_gpu()?.into(),
        })
    }

    /// Elements from a row of what the first GEMM makes to the next.
    fn stride(&self) -> usize {
        delta_inputs(&self.spec.shape)
    }
}

impl<'a> FusedPass<'a> {
    fn delta(&self, index: usize) -> Result<Layer<'a>> {
        let (weights, spec) = self.source.block(index)?;
        let parts = match (&spec.mixer, &weights.mixer) {
            (MixerSpec::GatedDelta(spec), Mixer::GatedDelta(weights)) => Some((spec, &**weights)),
            _ => None,
        };
        RecurrentLayer::new(self, index, parts)
    }

    /// With `gates`, the projections to the gates of the rule follow.
    pub(super) fn delta_inputs(
        &self,
        index: usize,
        input: &Normed,
        gemm: &GemmPlan,
        gates: bool,
    ) -> Result<()> {
        let layer = self.delta(index)?;
        let mut matrices = vec![biased(&layer.weights.qkv)?, biased(&layer.weights.z)?];
        if gates {
            matrices.extend([biased(&layer.weights.b)?, biased(&layer.weights.a)?]);
        }
        self.linear(
            gemm,
            self.input(input)?,
            &matrices,
            Output::F32,
            &self.memory.projected,
            layer.stride(),
        )
    }

    pub(super) fn delta_gates(&self, index: usize, input: &Normed, gemm: &GemmPlan) -> Result<()> {
        let layer = self.delta(index)?;
        let matrices = [biased(&layer.weights.b)?, biased(&layer.weights.a)?];
        let (out, stride) = (&layer.scratch.gates, 2 * layer.spec.shape.value_heads);
        self.linear(
            gemm,
            self.input(input)?,
            &matrices,
            Output::F32,
            out,
            stride,
        )
    }

    pub(super) fn delta_conv(&self, index: usize, apart: bool) -> Result<()> {
        let layer = self.delta(index)?;
        let DeltaProjected { x, a, b, .. } = self.delta_projected(&layer, apart)?;
        cuda::delta_conv(
            &layer.spec.shape,
            &layer.constants()?,
            &layer.segments,
            &layer.states,
            self.rows,
            x,
            a,
            b,
            &layer.inputs(),
        )
    }

    /// The projections of all rows. `apart` says whether [`Kernel::DeltaGates`](super::plan::Kernel::DeltaGates) made those to the gates.
    fn delta_projected(&self, layer: &Layer<'a>, apart: bool) -> Result<DeltaProjected<'a>> {
        let (shape, stride) = (&layer.spec.shape, layer.stride());
        let of_first = |first| -> Result<StridedRows<'a>> {
            let values = f32_from(&self.memory.projected, first)?;
            Ok(StridedRows { values, stride })
        };
        let before = shape.channels() + shape.value_width();
        let gate = |first| match apart {
            true => Ok(StridedRows {
                values: f32_from(&layer.scratch.gates, first)?,
                stride: 2 * shape.value_heads,
            }),
            false => of_first(before + first),
        };
        Ok(DeltaProjected {
            x: of_first(0)?,
            z: of_first(shape.channels())?,
            a: gate(shape.value_heads)?,
            b: gate(0)?,
        })
    }

    /// The layer between its projections, for single rows.
    pub(super) fn delta_step(&self, index: usize, layout: Layout, apart: bool) -> Result<()> {
        let layer = self.delta(index)?;
        let norm = layer.weights.norm.on_gpu()?;
        cuda::delta_step(
            &layer.spec.shape,
            &layer.constants()?,
            (norm.into(), self.source.spec.norm_eps),
            &layer.segments,
            &layer.states,
            &self.delta_projected(&layer, apart)?,
            layout,
            Some(((&self.memory.overflow).into(), index)),
            (&self.memory.input).into(),
        )
    }

    pub(super) fn delta_rule(&self, index: usize, single: bool) -> Result<()> {
        let layer = self.delta(index)?;
        let answers = (&layer.scratch.answers).into();
        let (segments, states, inputs) = (&layer.segments, &layer.states, layer.inputs());
        let shape = &layer.spec.shape;
        cuda::delta_rule(shape, segments, states, self.rows, single, &inputs, answers)
    }

    pub(super) fn delta_norm(&self, index: usize, layout: Layout) -> Result<()> {
        let layer = self.delta(index)?;
        let z = StridedRows {
            values: f32_from(&self.memory.projected, layer.spec.shape.channels())?,
            stride: layer.stride(),
        };
        cuda::delta_norm(
            &layer.spec.shape,
            layer.weights.norm.on_gpu()?.into(),
            self.source.spec.norm_eps,
            self.rows,
            (&layer.scratch.answers).into(),
            z,
            RecurrentOutput::F16(layout),
            Some((self.overflow()?.into(), index)),
            (&self.memory.input).into(),
        )
    }
}
