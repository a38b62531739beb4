//! Launches of the kernels that apply adapters in a pass, beside its GEMMs.

use super::lowered::Lowered;
use super::operands::{biased, matrix};
use super::pass::FusedPass;
use super::plan::{self, Norm, Normed, PlannedKernel, Rows};
use super::recurrent_scratch::{delta_inputs, mamba_inputs};
use super::row_adapters::{AdaptedPass, AdapterMemory};
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::cuda::{
    self, AdaptedGateUp, AdaptedGroup, AdaptedOutputs, Biased, DeviceBuffer, FusedNorm, GemmPlan,
    Input, Layout, NextProjections, Output,
};
use crate::model::adapter::AdaptedPart;
use crate::model::spec::MixerSpec;

impl<'a> FusedPass<'a> {
    fn adapter_memory(&self) -> Result<(AdaptedPass, &'a AdapterMemory)> {
        let memory = self.memory.adapters.as_ref();
        let both = self.adapted.zip(memory);
        both.ok_or_else(|| err!(Internal, "a plan with adapters for a pass without them"))
    }

    /// The kernels of the pass through the blocks of the model: those of rows without adapters, if they can apply adapters themselves.
    pub(super) fn plan(&self, kind: Rows) -> Result<Vec<PlannedKernel>> {
        let Lowered {
            model, hardware, ..
        } = self.lowered;
        let (own, rows) = (model.own_blocks(), self.rows);
        let decodes = self.attention.decodes;
        // CTAs of few rows wait for each other, which those of another process might keep from running.
        let serves = rows > cuda::SKINNY_ROWS || !self.lowered.gpu.is_shared();
        if let Some(adapted) = self.adapted.filter(|_| serves) {
            let which = (adapted.adapts, adapted.division());
            let steps =
                plan::adapted::of_rows(model, own.clone(), rows, kind, which, decodes, hardware)?;
            if let Some(steps) = steps {
                return Ok(steps);
            }
        }
        plan::plan(model, own, rows, kind, self.adapts(), decodes, hardware)
    }

    /// The GEMM of a part, before a norm if one is fused into it. It adds the products of the rows' adapters if it was planned for that.
    pub(super) fn linear_of(
        &self,
        (index, part): (usize, AdaptedPart),
        gemm: &GemmPlan,
        input: Input<'_>,
        matrices: &[Biased<'_>],
        output: Output,
        (out, stride): (&DeviceBuffer, usize),
        norm: Option<&FusedNorm<'_>>,
    ) -> Result<()> {
        if !gemm.is_for_adapted_rows() {
            return match norm {
                Some(norm) => gemm.enqueue_before_norm(&self.lowered.gpu, input, matrices[0], norm),
                None => self.linear(gemm, input, matrices, output, out, stride),
            };
        }
        let (group, _) = self.group(index, part)?;
        let (gpu, scratch, rows) = (
            &self.lowered.gpu,
            &self.memory.linear,
            group.rows(matrices.len(), self.projections_after(index, part)?)?,
        );
        let to = (out, stride);
        gemm.enqueue_for_adapted_rows(gpu, input, matrices, output, to, scratch, norm, &rows)
    }

    /// The projections that products with adapters take after a part: those of the next one, or of the first block in the next pass. None
    /// if that part has none.
    fn projections_after(&self, index: usize, part: AdaptedPart) -> Result<NextProjections> {
        let own = self.lowered.model.own_blocks();
        let (index, part) = match part {
            AdaptedPart::MixerInputs => (index, AdaptedPart::MixerOutput),
            AdaptedPart::MixerOutput => (index, AdaptedPart::MlpInputs),
            AdaptedPart::MlpInputs => (index, AdaptedPart::MlpOutput),
            _ if index + 1 == own.end => (own.start, AdaptedPart::MixerInputs),
            _ => (index + 1, AdaptedPart::MixerInputs),
        };
        let (block, _) = self.source.block(index)?;
        if part.projections(block).is_empty() {
            return Ok(NextProjections::default());
        }
        let (group, all) = self.group(index, part)?;
        let mut next = NextProjections {
            first: group.first,
            k: group.k,
            ..NextProjections::default()
        };
        for (to, n) in next.features.iter_mut().zip(all) {
            *to = n;
        }
        Ok(next)
    }

    /// The group of a part, and the output features of its projections.
    fn group(&self, index: usize, part: AdaptedPart) -> Result<(AdaptedGroup<'a>, Vec<usize>)> {
        let (pass, memory) = self.adapter_memory()?;
        let (block, _) = self.source.block(index)?;
        let projections = part.projections(block);
        let Some(first) = projections.first() else {
            bail!(Internal, "block {index} has no {part:?}");
        };
        let group = AdaptedGroup {
            scratch: &memory.scratch,
            tiles: pass.tiles,
            rank: pass.rank,
            rows: self.rows,
            first: part.first_place(index, block),
            k: matrix(first)?.cols(),
        };
        Ok((group, projections.iter().map(|p| p.linear.rows()).collect()))
    }

    pub(super) fn shrink(&self, index: usize, part: AdaptedPart, layout: Layout) -> Result<()> {
        let (group, features) = self.group(index, part)?;
        let (x, divisor) = match part {
            AdaptedPart::MlpOutput => (&self.memory.inner, self.lowered.glu_divisors[index]),
            _ => (&self.memory.input, 1),
        };
        let gpu = &self.lowered.gpu;
        cuda::shrink(gpu, &group, features.len(), x, layout, divisor as f32)
    }

    pub(super) fn expand(&self, index: usize, part: AdaptedPart, added: bool) -> Result<()> {
        let (group, features) = self.group(index, part)?;
        let (memory, hidden) = (self.memory, self.lowered.sizes.hidden);
        let width = features.iter().sum();
        let (y, stride) = match part {
            AdaptedPart::MixerInputs | AdaptedPart::DeltaInputsAndGates => {
                let (_, spec) = self.source.block(index)?;
                let stride = match &spec.mixer {
                    MixerSpec::Attention(attention) => attention.projected_width(),
                    MixerSpec::GatedDelta(delta) => delta_inputs(&delta.shape),
                    MixerSpec::Mamba2(mamba) => mamba_inputs(&mamba.shape),
                    MixerSpec::None => bail!(Internal, "block {index} has no mixer to adapt"),
                };
                (&memory.projected, stride)
            }
            AdaptedPart::DeltaGates => {
                let recurrent = memory.recurrent.as_ref();
                let scratch = recurrent
                    .ok_or_else(|| err!(Internal, "block {index} has no recurrent layer"))?;
                (&scratch.gates, width)
            }
            AdaptedPart::HeadGate => match &memory.head_gate {
                Some(gate) => (gate, width),
                None => bail!(Internal, "block {index} has no gate of heads"),
            },
            AdaptedPart::MixerOutput | AdaptedPart::MlpOutput if added => {
                (&memory.residual, hidden)
            }
            AdaptedPart::MixerOutput | AdaptedPart::MlpOutput => (&memory.projected, hidden),
            AdaptedPart::MlpInputs => (&memory.projected, width),
        };
        let outputs = AdaptedOutputs {
            y,
            stride,
            is_f16: part == AdaptedPart::MlpInputs,
            features: &features,
        };
        cuda::expand(&self.lowered.gpu, &group, &outputs)
    }

    pub(super) fn expand_norm(
        &self,
        index: usize,
        part: AdaptedPart,
        norm: Norm,
        layout: Layout,
    ) -> Result<()> {
        let (group, _) = self.group(index, part)?;
        let (memory, hidden) = (self.memory, self.lowered.sizes.hidden);
        cuda::expand_norm(
            &self.lowered.gpu,
            &group,
            &memory.residual,
            hidden,
            (self.norm_weight(norm)?, self.source.spec.norm_eps),
            &memory.input,
            layout,
        )
    }

    pub(super) fn adapted_gate_up(
        &self,
        index: usize,
        input: &Normed,
        gemm: &GemmPlan,
    ) -> Result<()> {
        let (_, memory) = self.adapter_memory()?;
        let (spec, mlp) = self.mlp(index)?;
        let matrices = [biased(mlp.required_gate()?)?, biased(&mlp.up)?];
        let (out, stride) = (&memory.gate_up, 2 * spec.intermediate_size);
        self.linear(
            gemm,
            self.input(input)?,
            &matrices,
            Output::F32,
            out,
            stride,
        )
    }

    pub(super) fn activate_adapted(
        &self,
        index: usize,
        layout: Layout,
        is_f16: bool,
        others_are_done: bool,
    ) -> Result<()> {
        let (_, memory) = self.adapter_memory()?;
        let (group, _) = self.group(index, AdaptedPart::MlpInputs)?;
        let (spec, _) = self.mlp(index)?;
        let inputs = AdaptedGateUp {
            gate_up: match is_f16 {
                true => &self.memory.projected,
                false => &memory.gate_up,
            },
            is_f16,
            width: spec.intermediate_size,
            others_are_done,
        };
        cuda::adapted_glu(
            &self.lowered.gpu,
            &group,
            plan::glu(spec.activation, self.lowered.glu_divisors[index])?,
            &inputs,
            (self.overflow()?, index),
            &self.memory.inner,
            layout,
        )
    }
}
