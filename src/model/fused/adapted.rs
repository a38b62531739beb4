//! Launches of the kernels that apply adapters in a pass, beside its GEMMs.

use super::lowered::{Lowered, attention_units};
use super::operands::{biased, matrix};
use super::pass::FusedPass;
use super::plan::{self, Norm, Normed, PlannedKernel, Rows};
use super::recurrent_scratch::{delta_inputs, mamba_inputs};
use super::row_adapters::{AdaptedPass, AdapterMemory};
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::cuda::{
    self, AdaptedGateUp, AdaptedGemm, AdaptedGroup, AdaptedOutputs, Biased, DeviceBuffer,
    FusedNorm, GemmPlan, Input, Layout, Output, RowProjections,
};
use crate::model::adapter::{self, AdaptedPart};
use crate::model::order::Half;
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
        if let Some(adapted) = self.adapted {
            let steps = match (kind, rows) {
                (Rows::Step, 1) => self.plan_of_row(adapted.rank)?,
                _ => {
                    let which = (adapted.adapts, adapted.division());
                    plan::adapted::of_rows(model, own.clone(), rows, kind, which, hardware)?
                }
            };
            if let Some(steps) = steps {
                return Ok(steps);
            }
        }
        plan::plan(model, own, rows, kind, self.adapts(), hardware)
    }

    /// The plan of a step of one row with an adapter of this rank, if its kernels can apply that themselves.
    fn plan_of_row(&self, rank: usize) -> Result<Option<Vec<PlannedKernel>>> {
        if rank > cuda::ROW_RANK {
            return Ok(None);
        }
        let (source, kv) = (self.source, self.source.kv.kind());
        let heads = |index: usize| {
            let attention = source.spec.blocks[index].attention()?;
            let [unit, ..] = attention_units(source.spec, attention, kv);
            cuda::has_adapted_decode(unit).then_some(attention.heads)
        };
        let Lowered {
            model, hardware, ..
        } = self.lowered;
        plan::adapted::of_row(model, model.own_blocks(), heads, hardware)
    }

    /// The GEMM of a part. It adds the products of the rows' adapters if it was planned for that.
    pub(super) fn linear_of(
        &self,
        (index, part): (usize, AdaptedPart),
        gemm: &GemmPlan,
        input: Input<'_>,
        matrices: &[Biased<'_>],
        output: Output,
        (out, stride): (&DeviceBuffer, usize),
    ) -> Result<()> {
        if !gemm.is_for_adapted_rows() {
            return self.linear(gemm, input, matrices, output, out, stride);
        }
        let (group, _) = self.group(index, part)?;
        let (gpu, scratch, rows) = (
            &self.lowered.gpu,
            &self.memory.linear,
            group.rows(matrices.len())?,
        );
        let to = (out, stride);
        gemm.enqueue_for_adapted_rows(gpu, input, matrices, output, to, scratch, &rows)
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

    /// The projections of a part by their numbers in the tables of adapters.
    fn row_projections(&self, index: usize, part: AdaptedPart) -> Result<RowProjections> {
        let (block, _) = self.source.block(index)?;
        Ok(RowProjections {
            first: part.first_place(index, block),
            count: part.projections(block).len(),
        })
    }

    /// The adapter of the GEMM of a part, in a pass of one row whose kernels apply it, and of the part that takes its outputs.
    pub(super) fn gemm_adapter(
        &self,
        index: usize,
        part: AdaptedPart,
        next: Option<(usize, AdaptedPart)>,
    ) -> Result<AdaptedGemm<'a>> {
        let (pass, memory) = self.adapter_memory()?;
        let next = next.map(|(index, part)| self.row_projections(index, part));
        Ok(AdaptedGemm {
            adapter: memory.scratch.of_row(pass.rank),
            first: self.row_projections(index, part)?.first,
            next: next.transpose()?,
            later: (part == AdaptedPart::MixerInputs).then(|| {
                let first = (index + 1) * adapter::PLACES;
                let is_last = index + 1 == self.lowered.model.own_blocks().end;
                let count = if is_last { 0 } else { adapter::PLACES };
                RowProjections { first, count }
            }),
        })
    }

    /// The projection that ends a half, before `norm`, with the row's adapter.
    pub(super) fn project_adapted(
        &self,
        index: usize,
        half: Half,
        input: Input<'_>,
        matrix: Biased<'_>,
        (norm, fused): (Norm, &FusedNorm<'_>),
        gemm: &GemmPlan,
    ) -> Result<()> {
        let next = match norm {
            Norm::Mixer(next) => Some((next, AdaptedPart::MixerInputs)),
            Norm::Mlp(next) => Some((next, AdaptedPart::MlpInputs)),
            Norm::Head => None,
            Norm::Router(_) | Norm::Experts(_) | Norm::PerLayer(_) => {
                bail!(Internal, "a row with an adapter before the {norm} norm")
            }
        };
        let adapter = self.gemm_adapter(index, plan::output_of(half), next)?;
        let to = (&self.memory.residual, self.lowered.sizes.hidden);
        let (gpu, add) = (&self.lowered.gpu, Output::Add);
        gemm.enqueue_adapted(gpu, input, &[matrix], add, to, Some(fused), &adapter)
    }

    /// Attention of one token of one sequence, whose output is multiplied by an A factor too.
    pub(super) fn decode_adapted(&self, index: usize) -> Result<()> {
        let (lowered, memory) = (self.lowered, self.memory);
        let (pass, adapters) = self.adapter_memory()?;
        let (_, spec) = self.source.block(index)?;
        let spec = spec.required_attention()?;
        cuda::decode_adapted(
            &lowered.gpu,
            &lowered.heads(self.source, index, self.long)?,
            &self.cached_pages(index, 0)?,
            &memory.projected,
            &memory.positions,
            self.attention.splits[lowered.sizes.attention_index(spec)],
            &memory.splits,
            &memory.input,
            &adapters.scratch.of_row(pass.rank),
            self.row_projections(index, AdaptedPart::MixerOutput)?,
        )
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
