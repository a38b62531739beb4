//! The kernels of per-layer embeddings in a pass.

use super::operands::biased;
use super::pass::FusedPass;
use super::per_layer_scratch::PerLayerScratch;
use super::plan::Normed;
use super::sizes::PerLayerSizes;
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::cuda::{self, BlockInputs, DeviceBuffer, GemmPlan, Layout, Output, ProjectedInputs};
use crate::model::spec::PerLayerSpec;
use crate::model::weights::PerLayer;

impl<'a> FusedPass<'a> {
    /// Computes the inputs of all blocks from the tokens in memory and from their embeddings in the residual stream.
    pub(super) fn layer_inputs(&self, gemm: &GemmPlan) -> Result<()> {
        let (lowered, memory, spec) = (self.lowered, self.memory, self.source.spec);
        let (sizes, scratch) = self.per_layer_scratch()?;
        let (Some(table_spec), Some(weights), Some(table)) = (
            &spec.per_layer_table,
            &self.source.weights.per_layer,
            &lowered.tables.per_layer,
        ) else {
            bail!(
                Internal,
                "a plan with inputs of blocks that the model lacks"
            );
        };
        self.normalize_for_input(scratch)?;
        let input = Layout::RowMajor.input(&memory.input, 1.0);
        let matrix = biased(&weights.projection)?;
        let (out, width) = (&scratch.inputs, sizes.all);
        self.linear(gemm, input, &[matrix], Output::F32, out, width)?;
        let projected = ProjectedInputs {
            scale: (lowered.sizes.hidden as f64).powf(-0.5) as f32,
            factors: &scratch.factors,
            norm: weights.norm.on_gpu()?,
            eps: spec.norm_eps,
        };
        cuda::per_layer_inputs(
            &lowered.gpu,
            projected,
            (table, table_spec.scale),
            &memory.tokens,
            (self.rows, sizes.width),
            out,
        )
    }

    /// Normalizes the residual stream without a weight, so that it fits f16 as the input of a product, and keeps the factors.
    pub(super) fn normalize_for_input(&self, scratch: &PerLayerScratch) -> Result<()> {
        let (lowered, memory) = (self.lowered, self.memory);
        cuda::rms_norm(
            &lowered.gpu,
            &memory.residual,
            0,
            lowered.ones()?,
            self.source.spec.norm_eps,
            self.rows,
            lowered.sizes.hidden,
            &memory.input,
            Layout::RowMajor,
            Some(&scratch.factors),
        )
    }

    pub(super) fn per_layer_gate(
        &self,
        index: usize,
        input: &Normed,
        gemm: &GemmPlan,
    ) -> Result<()> {
        let (spec, weights) = self.own_input(index)?;
        let out = &self.memory.projected;
        let matrix = biased(&weights.gate)?;
        let input = self.input(input)?;
        self.linear(gemm, input, &[matrix], Output::F32, out, spec.width)
    }

    pub(super) fn per_layer_activate(&self, index: usize) -> Result<()> {
        let memory = self.memory;
        let (spec, _) = self.own_input(index)?;
        let (sizes, scratch) = self.per_layer_scratch()?;
        let inputs = BlockInputs {
            all: &scratch.inputs,
            stride: sizes.all,
            first: index * sizes.width,
        };
        cuda::per_layer_gate(
            &self.lowered.gpu,
            spec.activation.on_gpu()?,
            &memory.projected,
            &scratch.factors,
            inputs,
            (self.rows, spec.width),
            &memory.inner,
            &scratch.divisors,
        )
    }

    pub(super) fn per_layer_project(&self, index: usize, gemm: &GemmPlan) -> Result<()> {
        let memory = self.memory;
        let (_, weights) = self.own_input(index)?;
        let input = Layout::RowMajor.input(&memory.inner, 1.0);
        let matrix = biased(&weights.projection)?;
        let (out, hidden) = (&memory.projected, self.lowered.sizes.hidden);
        self.linear(gemm, input, &[matrix], Output::F32, out, hidden)
    }

    /// The norm after a block's own input, and the numbers by which its rows were divided.
    pub(super) fn per_layer_norm(
        &self,
        index: usize,
    ) -> Result<(&'a DeviceBuffer, &'a DeviceBuffer)> {
        let (_, weights) = self.own_input(index)?;
        let (_, scratch) = self.per_layer_scratch()?;
        Ok((weights.norm.on_gpu()?, &scratch.divisors))
    }

    /// How a block takes its own input.
    fn own_input(&self, index: usize) -> Result<(&'a PerLayerSpec, &'a PerLayer)> {
        let spec = self.source.spec.blocks[index].per_layer.as_ref();
        let weights = self.source.weights.blocks[index].per_layer.as_ref();
        spec.zip(weights)
            .ok_or_else(|| err!(Internal, "block {index} has no input of its own"))
    }

    pub(super) fn per_layer_scratch(&self) -> Result<(PerLayerSizes, &'a PerLayerScratch)> {
        let sizes = self.lowered.sizes.per_layer;
        let scratch = self.memory.per_layer.as_ref();
        sizes
            .zip(scratch)
            .ok_or_else(|| err!(Internal, "the model has no per-layer embeddings"))
    }
}
