//! A model lowered to fused kernels: the shapes for the planner, and the operands that the kernels need beside weights.

use std::sync::Arc;

use super::embedding::HostTables;
use super::memory::Memory;
use super::operands::{Mixture, glu_divisor, matrix, mixture, of_linear, shape};
use super::shapes::{BlockShape, ModelShape};
use super::sizes::{Sizes, attentions};
use super::supported::check_supported;
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::base::memory::Tag;
use crate::cuda::{
    self, DeviceBuffer, ExpertTable, Gpu, Hardware, Heads, MatrixShape, RowHeads, Table, Unit,
};
use crate::model::kv::KvCache;
use crate::model::spec::{AttentionSpec, BlockSpec, KeyValues, MlpSpec, QkNorm, Spec};
use crate::model::weights::{Block, Drafter, Weights};
use crate::ops::Array;
use crate::tensor::{KvType, WeightType};

/// The kernels that the steps and prompts of a model may need, deterministic or not.
pub(in crate::model) fn units(spec: &Spec, deterministic: bool) -> Vec<Unit> {
    let mut units = vec![
        Unit::LinearSkinny,
        Unit::LinearTiled,
        Unit::LinearWide,
        Unit::LinearDense,
        Unit::LinearRow,
        Unit::LinearTf32,
        Unit::LinearInt8,
        Unit::LinearInt8Row,
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
    if deterministic {
        units.push(Unit::LinearSkinnyRanges);
    }
    if spec.logit_scale != 1.0 {
        units.push(Unit::Pointwise);
    }
    if spec.drafter.is_some() {
        units.push(Unit::DrafterRows);
    }
    if spec.all_blocks().any(|b| b.mlp.mixture().is_some()) {
        units.extend([Unit::ExpertsRoute, Unit::LinearExperts]);
    }
    let has_mlp = |is: fn(&MlpSpec) -> bool| spec.all_blocks().any(|b| is(&b.mlp));
    if has_mlp(|mlp| matches!(mlp, MlpSpec::Experts(_))) {
        units.push(Unit::ExpertsSum);
    }
    if has_mlp(|mlp| matches!(mlp, MlpSpec::DenseAndExperts(..))) {
        units.push(Unit::ExpertsSumBeside);
    }
    if spec.per_layer_table.is_some() {
        units.extend([Unit::PerLayerInputs, Unit::PerLayerGate]);
    }
    if spec.all_blocks().any(|b| b.gated_delta().is_some()) {
        units.extend([Unit::DeltaConv, Unit::DeltaRule, Unit::DeltaNorm]);
        units.extend([Unit::DeltaSingle, Unit::DeltaStep]);
    }
    if spec.all_blocks().any(|b| b.mamba2().is_some()) {
        units.extend([Unit::MambaConv, Unit::MambaScan, Unit::MambaNorm]);
    }
    let attentions = || spec.all_blocks().filter_map(BlockSpec::attention);
    if attentions().any(|a| a.qk_norm == QkNorm::Projections) {
        units.push(Unit::ProjectionNorms);
    }
    for attention in attentions() {
        let [decode, prefill, store] = attention_units(spec, attention, KvType::F16);
        let [decode, prefill] = match deterministic {
            true => cuda::fixed_attention_units(decode),
            false => [decode, prefill],
        };
        for unit in [decode, prefill, store] {
            if !units.contains(&unit) {
                units.push(unit);
            }
        }
    }
    units
}

/// The decode, prefill and store units of an attention layer, for which there must be kernels: see [`unsupported_f8`].
pub(super) fn attention_units(spec: &Spec, attention: &AttentionSpec, kv: KvType) -> [Unit; 3] {
    let (rotary_dim, is_limited) = (rotary_dim(spec, attention), is_limited(attention));
    cuda::attention_units(attention.head_dim, rotary_dim, is_limited, kv)
}

/// Elements of a head that rotate.
fn rotary_dim(spec: &Spec, attention: &AttentionSpec) -> usize {
    let rope = attention.rope.map(|rope| &spec.ropes[rope]);
    rope.map_or(0, |set| set.table.rotary_dim())
}

fn is_limited(attention: &AttentionSpec) -> bool {
    cuda::is_limited(
        &attention.shape(),
        attention.sinks,
        attention.value_norm,
        row_heads(attention),
    )
}

/// Why a GPU cannot keep the keys and values of a model in 8 bits, if so.
pub(in crate::model) fn unsupported_f8(spec: &Spec) -> Option<String> {
    let lacks = |(index, block): (usize, &BlockSpec)| {
        let attention = block.attention()?;
        let (dim, rotary_dim) = (attention.head_dim, rotary_dim(spec, attention));
        let is_limited = is_limited(attention);
        let lacks = !cuda::has_kernels(dim, rotary_dim, is_limited, KvType::F8);
        let of_others = if is_limited { ", with such limits" } else { "" };
        lacks.then(|| {
            format!(
                "its kernels are for heads of {}, and block {index} of this {} model has heads of {dim} elements of which {rotary_dim} rotate{of_others}; keep them as f16",
                cuda::F8_HEADS,
                spec.family
            )
        })
    };
    spec.all_blocks().enumerate().find_map(lacks)
}

/// The heads of a row of an attention layer's first projections.
fn row_heads(attention: &AttentionSpec) -> RowHeads {
    match attention.key_values {
        KeyValues::Projected => RowHeads::QueriesKeysValues,
        KeyValues::KeysAsValues => RowHeads::KeysAsValues,
        KeyValues::OfBlock(_) => RowHeads::Queries,
    }
}

/// References to a model, passed to every call.
#[derive(Clone, Copy)]
pub(in crate::model) struct Source<'a> {
    pub(in crate::model) spec: &'a Spec,
    pub(in crate::model) weights: &'a Weights,
    pub(in crate::model) kv: &'a Arc<KvCache>,
}

impl<'a> Source<'a> {
    /// The drafter's weights.
    pub(super) fn drafter(self) -> Result<&'a Drafter> {
        let drafter = self.weights.drafter.as_ref();
        drafter.ok_or_else(|| err!(Internal, "the model has no drafter"))
    }

    /// The blocks, and that of the drafter after them.
    fn blocks(self) -> impl Iterator<Item = (&'a Block, &'a BlockSpec)> + Clone {
        let drafter = self.weights.drafter.iter().map(|drafter| &drafter.block);
        let specs = self.spec.drafter.iter().map(|drafter| &drafter.block);
        let weights = self.weights.blocks.iter().chain(drafter);
        weights.zip(self.spec.blocks.iter().chain(specs))
    }

    /// A block by its number; that of the drafter comes after the others.
    pub(super) fn block(self, index: usize) -> Result<(&'a Block, &'a BlockSpec)> {
        match self.blocks().nth(index) {
            Some(block) => Ok(block),
            None => bail!(
                Internal,
                "block {index} of a model with {}",
                self.blocks().count()
            ),
        }
    }
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
    pub(super) model: ModelShape,
    /// The mixture of experts of each block that has one.
    pub(super) mixtures: Vec<Option<Mixture>>,
    /// Divisor of the activations between gate and down, for each block.
    pub(super) glu_divisors: Vec<u32>,
    frequencies: Vec<Frequencies>,
    /// The tables in host memory.
    pub(super) tables: HostTables,
    /// f32 `[hidden]`: ones, the weight of norms without one, in models with per-layer embeddings.
    ones: Option<DeviceBuffer>,
}

impl Lowered {
    /// `tables` is the result of [`super::tables`]. If `deterministic`, the bits of a row depend on its sequence alone. Fails for a model that
    /// no fused kernel supports; the error names the unsupported property.
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        source: Source<'_>,
        tables: HostTables,
        deterministic: bool,
    ) -> Result<Lowered> {
        let Source { spec, weights, .. } = source;
        check_supported(spec)?;
        let pairs = source.blocks();
        let mixtures = pairs.clone().map(|pair| mixture(gpu, pair));
        let mixtures = mixtures.collect::<Result<_>>()?;
        let attentions = attentions(spec);
        let blocks = pairs.clone().map(|pair| shape(pair, &attentions));
        let blocks: Vec<BlockShape> = blocks.collect::<Result<_>>()?;
        let layer_inputs = weights
            .per_layer
            .as_ref()
            .map(|all| matrix(&all.projection));
        let drafter_fc = weights
            .drafter
            .as_ref()
            .map(|drafter| of_linear(&drafter.fc));
        let model = ModelShape {
            blocks,
            layer_inputs: layer_inputs.transpose()?.map(cuda::Matrix::shape),
            drafter_fc: drafter_fc.transpose()?.map(cuda::Matrix::shape),
            head: matrix(&weights.head)?.shape(),
        };
        let is_dense = |w: &MatrixShape| w.storage != WeightType::Nvfp4;
        let sizes = Sizes::of(spec, model.matrices().any(is_dense), deterministic)?;
        let hardware = Hardware::of(gpu)?;
        let hardware = match deterministic {
            true => hardware.deterministic(),
            false => hardware,
        };
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
            hardware,
            frequencies: frequencies.collect::<Result<_>>()?,
            ones: match sizes.per_layer {
                Some(_) => Some(upload(&vec![1.0; sizes.hidden])?),
                None => None,
            },
            model,
            mixtures,
            tables,
            sizes,
        };
        for (index, (_, block)) in source.blocks().enumerate() {
            if block.attention().is_some() {
                lowered.heads(source, index, false)?.check()?;
            }
        }
        Ok(lowered)
    }

    /// Bytes that a model takes on the device beside its weights: tables of experts, rotary frequencies, and ones. A model without its layers
    /// has no tables of experts.
    pub(in crate::model) fn device_bytes_of(spec: &Spec, sampling_only: bool) -> usize {
        let blocks = spec.all_blocks().filter(|_| !sampling_only);
        let mixtures = blocks.filter_map(|block| block.mlp.mixture());
        let tables = mixtures.map(|mixture| ExpertTable::bytes_of(mixture.count));
        let frequencies = spec.ropes.iter().map(|set| {
            let long = set
                .long
                .as_ref()
                .map_or(0, |long| long.table.frequencies.len());
            set.table.frequencies.len() + long
        });
        let ones = spec.per_layer_table.map_or(0, |_| spec.hidden_size);
        tables.sum::<usize>() + (frequencies.sum::<usize>() + ones) * size_of::<f32>()
    }

    /// Bytes held here rather than with the weights: tables in host memory.
    pub(super) fn bytes(&self) -> usize {
        self.tables.bytes()
    }

    /// f32 `[hidden]`: ones.
    pub(super) fn ones(&self) -> Result<&DeviceBuffer> {
        self.ones
            .as_ref()
            .ok_or_else(|| err!(Internal, "a norm without a weight in a model that has none"))
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
        let (weights, spec) = source.block(block)?;
        let spec = spec.required_attention()?;
        let weights = weights.mixer.required_attention()?;
        let vector = |vector: &'a Option<Array>| vector.as_ref().and_then(|v| v.on_gpu().ok());
        // Norms of all heads together are applied before.
        let norm = |norm| vector(norm).filter(|_| spec.qk_norm != QkNorm::Projections);
        let rotation = spec.rope.map(|rope| {
            let (set, frequencies) = (&source.spec.ropes[rope], &self.frequencies[rope]);
            match (&set.long, &frequencies.long) {
                (Some(set), Some((_, frequencies))) if long => (&set.table, frequencies),
                _ => (&set.table, &frequencies.short),
            }
        });
        Ok(Heads {
            shape: spec.shape(),
            row: row_heads(spec),
            value_norm: spec.value_norm,
            q_norm: norm(&weights.q_norm),
            k_norm: norm(&weights.k_norm),
            sinks: vector(&weights.sinks),
            frequencies: rotation.map(|(_, frequencies)| frequencies),
            rotary_dim: rotation.map_or(0, |(table, _)| table.rotary_dim()),
            attention_factor: rotation.map_or(1.0, |(table, _)| table.attention_factor),
            eps: source.spec.norm_eps,
            rotates_first: spec.qk_norm == QkNorm::RotatedHeads,
        })
    }

    /// Sets the residual stream to the embeddings of the first `rows` tokens in memory.
    pub(super) fn embed(&self, source: Source<'_>, rows: usize, memory: &Memory) -> Result<()> {
        self.embed_to(source, rows, memory, &memory.residual)
    }

    /// Writes the embeddings of the first `rows` tokens in memory to `out`, f32 `[rows, hidden]`.
    pub(super) fn embed_to(
        &self,
        source: Source<'_>,
        rows: usize,
        memory: &Memory,
        out: &DeviceBuffer,
    ) -> Result<()> {
        let table = match &self.tables.embedding {
            Some(table) => Table::Host(table),
            None => Table::Device(of_linear(source.weights.table())?),
        };
        let scale = source.spec.stream_scale();
        cuda::embed(&self.gpu, table, &memory.tokens, rows, scale, out)
    }
}
