//! Adapters in fused passes: the rows of a pass by adapter, and the launches beside its GEMMs.

use std::sync::Arc;

use super::memory::Memory;
use super::operands::{biased, matrix};
use super::pass::FusedPass;
use super::plan::{self, Norm, Normed};
use super::recurrent_scratch::{delta_inputs, mamba_inputs};
use super::sizes::Sizes;
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::base::memory::Tag;
use crate::cuda::{
    self, AdaptedGateUp, AdaptedGroup, AdaptedOutputs, AdapterScratch, AdapterTiles, DeviceBuffer,
    GemmPlan, Gpu, Layout, Output,
};
use crate::model::adapter::{AdaptedPart, Adapter, Adapts};
use crate::model::spec::MixerSpec;

/// The properties of a pass with adapters that its launches depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct AdaptedPass {
    pub(super) adapts: Adapts,
    /// Tiles of rows that are launched.
    tiles: usize,
    /// The largest rank, rounded up so that a recording serves others.
    rank: usize,
}

/// The rows of a pass by adapter.
pub(super) struct RowAdapters {
    pub(super) pass: AdaptedPass,
    /// The table of each row's adapter, or 0.
    pub(super) tables: Vec<u64>,
    tiles: AdapterTiles,
}

impl RowAdapters {
    /// The adapters of rows, and of padding up to `rows`; `None` if no row has one.
    pub(super) fn of<'a>(
        each: impl Iterator<Item = Option<&'a Adapter>>,
        rows: usize,
    ) -> Result<Option<RowAdapters>> {
        let (mut adapts, mut rank) = (Adapts::NOTHING, 0);
        let mut tables = Vec::with_capacity(rows);
        for adapter in each {
            let Some(adapter) = adapter else {
                tables.push(0);
                continue;
            };
            let on_gpu = adapter.on_gpu()?;
            adapts = adapts.or(on_gpu.adapts());
            rank = rank.max(on_gpu.rank());
            tables.push(on_gpu.address());
        }
        if rank == 0 {
            return Ok(None);
        }
        tables.resize(rows, 0);
        let tiles = AdapterTiles::of(&tables);
        Ok(Some(RowAdapters {
            pass: AdaptedPass {
                adapts,
                tiles: tiles.count().next_power_of_two().min(rows),
                rank: rank.next_power_of_two(),
            },
            tables,
            tiles,
        }))
    }
}

/// Working memory of passes with adapters. The first of them allocates it.
pub(super) struct AdapterMemory {
    scratch: AdapterScratch,
    /// f32 `[rows, 2 intermediate]`: gate and up where a pass without adapters has them in registers.
    gate_up: DeviceBuffer,
}

impl Memory {
    /// Enqueues a write of the rows of a pass by adapter, and makes room for the pass.
    pub(super) fn write_adapters(
        &mut self,
        gpu: &Arc<Gpu>,
        sizes: &Sizes,
        adapters: &RowAdapters,
    ) -> Result<()> {
        let (rows, pass) = (adapters.tables.len(), adapters.pass);
        let has_wide = pass.adapts.mlp_inputs && (sizes.deterministic || rows <= cuda::TILED);
        let wide = |rows: usize| rows * 2 * sizes.intermediate * size_of::<f32>();
        let wide_bytes = if has_wide { wide(rows) } else { 0 };
        let holds = |memory: &AdapterMemory| {
            memory.scratch.holds(rows, pass.rank) && memory.gate_up.bytes() >= wide_bytes
        };
        if !self.adapters.as_ref().is_some_and(holds) {
            // Recordings have its addresses.
            self.graphs.clear();
            self.adapters = None;
            let most = rows.max(self.rows);
            let wide_rows = match sizes.deterministic {
                true => rows,
                false => cuda::TILED.min(most),
            };
            let width = sizes.inner().max(sizes.hidden);
            self.adapters = Some(AdapterMemory {
                scratch: AdapterScratch::new(gpu, most, width, pass.rank)?,
                gate_up: DeviceBuffer::uninit(
                    gpu,
                    Tag::DeviceScratch,
                    wide_bytes.max(wide(wide_rows)),
                )?,
            });
        }
        match &mut self.adapters {
            Some(memory) => memory.scratch.write(&adapters.tiles, pass.tiles),
            None => Ok(()),
        }
    }
}

impl<'a> FusedPass<'a> {
    fn adapter_memory(&self) -> Result<(AdaptedPass, &'a AdapterMemory)> {
        let memory = self.memory.adapters.as_ref();
        let both = self.adapted.zip(memory);
        both.ok_or_else(|| err!(Internal, "a plan with adapters for a pass without them"))
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
