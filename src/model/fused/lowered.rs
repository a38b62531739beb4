//! A model lowered to fused kernels: the shapes for the planner, and the operands that the kernels need beside weights.

use std::sync::Arc;

use super::memory::Memory;
use super::operands::{Mixture, glu_divisor, matrix, mixture, of_linear, shape};
use super::plan::{self, BlockShape};
use super::sizes::Sizes;
use crate::base::Result;
use crate::base::memory::Tag;
use crate::cuda::{self, DeviceBuffer, Gpu, Hardware, Heads, HostTable, MatrixShape, Table, Unit};
use crate::model::kv::KvCache;
use crate::model::spec::{AttentionSpec, BlockSpec, Spec};
use crate::model::weights::Weights;
use crate::ops::Array;
use crate::tensor::WeightType;

/// The kernels that the steps and prompts of a model may need.
pub(in crate::model) fn units(spec: &Spec) -> Vec<Unit> {
    let mut units = vec![
        Unit::LinearSkinny,
        Unit::LinearTiled,
        Unit::LinearWide,
        Unit::LinearDense,
        Unit::LinearTf32,
        Unit::LinearInt8,
        Unit::LinearRows,
        Unit::LinearRowNorms,
        Unit::LinearPack,
        Unit::Embed,
        Unit::ExpertRows,
        Unit::RmsNorm,
        Unit::PostNorm,
        Unit::RopeStore,
        Unit::Glu,
        Unit::CheckScales,
        Unit::Argmax,
        Unit::Draw,
    ];
    if spec.blocks.iter().any(|b| b.mlp.mixture().is_some()) {
        units.extend([Unit::ExpertsRouter, Unit::ExpertsRoute]);
        units.extend([Unit::LinearExperts, Unit::ExpertsSum]);
    }
    if spec.blocks.iter().any(|b| b.gated_delta().is_some()) {
        units.extend([Unit::DeltaConv, Unit::DeltaRule, Unit::DeltaNorm]);
        units.push(Unit::DeltaStep);
    }
    if spec.blocks.iter().any(|b| b.mamba2().is_some()) {
        units.extend([Unit::MambaConv, Unit::MambaScan, Unit::MambaNorm]);
    }
    for attention in spec.blocks.iter().filter_map(BlockSpec::attention) {
        for unit in attention_units(spec, attention) {
            if !units.contains(&unit) {
                units.push(unit);
            }
        }
    }
    units
}

pub(super) fn attention_units(spec: &Spec, attention: &AttentionSpec) -> [Unit; 3] {
    let rope = attention.rope.map(|rope| &spec.ropes[rope]);
    let rotary_dim = rope.map_or(0, |set| set.table.rotary_dim());
    let is_limited = attention.window.is_some() || attention.score_cap.is_some() || attention.sinks;
    cuda::attention_units(attention.head_dim, rotary_dim, is_limited)
}

/// References to a model, passed to every call.
#[derive(Clone, Copy)]
pub(in crate::model) struct Source<'a> {
    pub(in crate::model) spec: &'a Spec,
    pub(in crate::model) weights: &'a Weights,
    pub(in crate::model) kv: &'a KvCache,
}

/// The rotary frequencies of a set, f32 on the device.
struct Frequencies {
    short: DeviceBuffer,
    /// Frequencies of contexts longer than the given number of positions.
    long: Option<(usize, DeviceBuffer)>,
}

/// Everything that fused kernels need of a model beside its weights, computed once.
pub(in crate::model) struct Lowered {
    pub(super) gpu: Arc<Gpu>,
    pub(super) hardware: Hardware,
    pub(super) sizes: Sizes,
    pub(super) blocks: Vec<BlockShape>,
    pub(super) head: MatrixShape,
    /// The mixture of experts of each block that has one.
    pub(super) mixtures: Vec<Option<Mixture>>,
    /// Divisor of the activations between gate and down, for each block.
    pub(super) glu_divisors: Vec<u32>,
    frequencies: Vec<Frequencies>,
    /// The embedding, unless the head serves as one.
    table: Option<HostTable>,
}

impl Lowered {
    /// `table` is the result of [`super::table`] for the embedding. Fails for a model that no fused kernel supports; the error names the
    /// unsupported property.
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        source: Source<'_>,
        table: Option<HostTable>,
    ) -> Result<Lowered> {
        let Source { spec, weights, .. } = source;
        plan::check_supported(spec)?;
        let pairs = weights.blocks.iter().zip(&spec.blocks);
        let mixtures = pairs.clone().map(|pair| mixture(gpu, pair));
        let mixtures = mixtures.collect::<Result<_>>()?;
        let blocks: Vec<BlockShape> = pairs.clone().map(shape).collect::<Result<_>>()?;
        let head = matrix(&weights.head)?.shape();
        let is_dense = |w: &MatrixShape| w.storage != WeightType::Nvfp4;
        let dense = is_dense(&head) || blocks.iter().flat_map(BlockShape::matrices).any(is_dense);
        let sizes = Sizes::of(spec, dense)?;
        let upload = |values: &[f32]| DeviceBuffer::from_slice(gpu, Tag::DeviceWeights, values);
        let frequencies = spec.ropes.iter().map(|set| {
            let long = match &set.long {
                Some(long) => Some((long.original_positions, upload(&long.table.frequencies)?)),
                None => None,
            };
            Ok(Frequencies {
                short: upload(&set.table.frequencies)?,
                long,
            })
        });
        let divisors = pairs.map(|pair| glu_divisor(gpu, pair));
        let lowered = Lowered {
            gpu: gpu.clone(),
            glu_divisors: divisors.collect::<Result<_>>()?,
            hardware: Hardware::of(gpu)?,
            frequencies: frequencies.collect::<Result<_>>()?,
            blocks,
            head,
            mixtures,
            table,
            sizes,
        };
        let attends = |index: &usize| spec.blocks[*index].attention().is_some();
        for index in (0..spec.blocks.len()).filter(attends) {
            lowered.heads(source, index, false)?.check()?;
        }
        Ok(lowered)
    }

    /// Bytes held here rather than with the weights: an embedding in host memory.
    pub(super) fn bytes(&self) -> usize {
        self.table.as_ref().map_or(0, HostTable::bytes)
    }

    /// Whether a sequence with room for `capacity` positions uses the long RoPE table.
    pub(super) fn is_long(&self, capacity: usize) -> bool {
        let mut sets = self.frequencies.iter().filter_map(|f| f.long.as_ref());
        sets.any(|(original, _)| capacity > *original)
    }

    /// Arguments of the attention kernels for a block.
    pub(super) fn heads<'a>(
        &'a self,
        source: Source<'a>,
        block: usize,
        long: bool,
    ) -> Result<Heads<'a>> {
        let spec = source.spec.blocks[block].required_attention()?;
        let weights = source.weights.blocks[block].mixer.required_attention()?;
        let vector = |vector: &'a Option<Array>| vector.as_ref().and_then(|v| v.on_gpu().ok());
        let rotation = spec.rope.map(|rope| {
            let (set, frequencies) = (&source.spec.ropes[rope], &self.frequencies[rope]);
            match (&set.long, &frequencies.long) {
                (Some(set), Some((_, frequencies))) if long => (&set.table, frequencies),
                _ => (&set.table, &frequencies.short),
            }
        });
        Ok(Heads {
            shape: spec.shape(),
            q_norm: vector(&weights.q_norm),
            k_norm: vector(&weights.k_norm),
            sinks: vector(&weights.sinks),
            frequencies: rotation.map(|(_, frequencies)| frequencies),
            rotary_dim: rotation.map_or(0, |(table, _)| table.rotary_dim()),
            attention_factor: rotation.map_or(1.0, |(table, _)| table.attention_factor),
            eps: source.spec.norm_eps,
        })
    }

    /// Sets the residual stream to the embeddings of the first `rows` tokens in memory.
    pub(super) fn embed(&self, source: Source<'_>, rows: usize, memory: &Memory) -> Result<()> {
        let table = match &self.table {
            Some(table) => Table::Host(table),
            None => Table::Device(of_linear(source.weights.table())?),
        };
        let scale = source.spec.embedding_scale;
        let (tokens, residual) = (&memory.tokens, &memory.residual);
        cuda::embed(&self.gpu, table, tokens, rows, scale, residual)
    }
}
