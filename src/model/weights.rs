//! A model's weights as the forward pass reads them, created by the loader or shared by a trainer. Immutable and shared; knows no files,
//! except that the embedding may stay in one.

use std::sync::Arc;

use super::spec::Spec;
use crate::base::Result;
use crate::base::error::bail;
use crate::base::locked::Locked;
use crate::checkpoint::{Checkpoint, Entry};
use crate::ops::Array;
use crate::ops::delta::DeltaWeights;
use crate::ops::linear::Linear;
use crate::ops::mamba::MambaWeights;

/// A linear map with its bias, if any.
#[derive(Debug)]
pub struct Projection {
    /// Its name in the model, without the suffix of its weight or bias. Adapters are found by it.
    pub name: String,
    /// The weight, `[out features, in features]`.
    pub linear: Linear,
    /// One number per output feature.
    pub bias: Option<Array>,
}

/// One decoder block.
#[derive(Debug)]
pub struct Block {
    /// The norms before and after the mixer.
    pub mixer_norms: Norms,
    /// The mixer.
    pub mixer: Mixer,
    /// The norms before and after the MLP.
    pub mlp_norms: Norms,
    /// The MLP.
    pub mlp: Mlp,
    /// The weights by which the block takes its own input, if the model has such inputs.
    pub per_layer: Option<PerLayer>,
    /// The factor of the residual stream at the end of the block, `[1]`, if the model has it.
    pub scale: Option<Array>,
}

/// The RMSNorms around a half of a block, `[hidden]`, if the model has them.
#[derive(Debug)]
pub struct Norms {
    /// The norm of the half's input.
    pub pre: Option<Array>,
    /// The norm of the half's output, before it is added to the residual stream.
    pub post: Option<Array>,
}

/// The half of a block in which a token sees those before it.
#[derive(Debug)]
pub enum Mixer {
    /// Grouped-query attention.
    Attention(Box<Attention>),
    /// A gated delta net.
    GatedDelta(Box<GatedDelta>),
    /// Mamba-2.
    Mamba2(Box<Mamba2>),
    /// The block is an MLP alone.
    None,
}

impl Mixer {
    /// The attention; an error for another mixer.
    pub fn required_attention(&self) -> Result<&Attention> {
        match self {
            Mixer::Attention(attention) => Ok(attention),
            _ => bail!(Internal, "attention of a block with another mixer"),
        }
    }

    /// The last projection; an error without a mixer.
    pub fn last(&self) -> Result<&Projection> {
        match self {
            Mixer::Attention(attention) => Ok(&attention.o),
            Mixer::GatedDelta(delta) => Ok(&delta.out),
            Mixer::Mamba2(mamba) => Ok(&mamba.out),
            Mixer::None => bail!(Internal, "the output of a block without a mixer"),
        }
    }

    fn projections(&self) -> Vec<&Projection> {
        match self {
            Mixer::Attention(attention) => {
                let Attention {
                    q, gate, k, v, o, ..
                } = &**attention;
                let inputs = [Some(q), gate.as_ref(), k.as_ref(), v.as_ref()];
                inputs.into_iter().flatten().chain([o]).collect()
            }
            Mixer::GatedDelta(delta) => delta.projections().collect(),
            Mixer::Mamba2(mamba) => mamba.projections().collect(),
            Mixer::None => Vec::new(),
        }
    }

    /// The vectors: norms, convolutions and constants of heads.
    fn vectors(&self) -> Vec<&Array> {
        match self {
            Mixer::Attention(attention) => {
                let vectors = [&attention.q_norm, &attention.k_norm, &attention.sinks];
                vectors.into_iter().flatten().collect()
            }
            Mixer::GatedDelta(delta) => delta.vectors().collect(),
            Mixer::Mamba2(mamba) => mamba.vectors().collect(),
            Mixer::None => Vec::new(),
        }
    }
}

/// The weights of a gated delta net.
#[derive(Debug)]
pub struct GatedDelta {
    /// Queries, keys and values before the convolution, `[channels, hidden]`.
    pub qkv: Projection,
    /// The gate of the norm, `[value_width, hidden]`.
    pub z: Projection,
    /// The projection to the decay of each value head, `[value_heads, hidden]`.
    pub a: Projection,
    /// The projection to the share of a correction that each value head writes, `[value_heads, hidden]`.
    pub b: Projection,
    /// Convolutions, and constants of heads.
    pub heads: DeltaWeights,
    /// RMSNorm of each value head's output, `[value_dim]`.
    pub norm: Array,
    /// Output, `[hidden, value_width]`.
    pub out: Projection,
}

impl GatedDelta {
    fn projections(&self) -> impl Iterator<Item = &Projection> {
        [&self.qkv, &self.z, &self.b, &self.a, &self.out].into_iter()
    }

    fn vectors(&self) -> impl Iterator<Item = &Array> {
        let heads = &self.heads;
        [&heads.convolution, &heads.a_log, &heads.dt_bias, &self.norm].into_iter()
    }
}

/// The weights of Mamba-2.
#[derive(Debug)]
pub struct Mamba2 {
    /// The gate of the norm, `[width, hidden]`.
    pub z: Projection,
    /// x, B and C before the convolution, `[channels, hidden]`.
    pub xbc: Projection,
    /// The projection to the time step of each head, `[heads, hidden]`.
    pub dt: Projection,
    /// Convolution, constants of heads, and norm.
    pub heads: MambaWeights,
    /// Output, `[hidden, width]`.
    pub out: Projection,
}

impl Mamba2 {
    fn projections(&self) -> impl Iterator<Item = &Projection> {
        [&self.z, &self.xbc, &self.dt, &self.out].into_iter()
    }

    fn vectors(&self) -> impl Iterator<Item = &Array> {
        let heads = &self.heads;
        let bias = heads.convolution_bias.iter();
        let of_heads = [&heads.a_log, &heads.dt_bias, &heads.skip, &heads.norm];
        [&heads.convolution].into_iter().chain(bias).chain(of_heads)
    }
}

/// The weights of grouped-query attention.
#[derive(Debug)]
pub struct Attention {
    /// Queries, `[heads * head_dim, hidden]`.
    pub q: Projection,
    /// The gate of each head's output, shaped like queries, if the model has one.
    pub gate: Option<Projection>,
    /// Keys, `[kv_heads * head_dim, hidden]`; `None` in a layer that takes the keys and values of another.
    pub k: Option<Projection>,
    /// Values, shaped like keys; `None` where keys are the values too.
    pub v: Option<Projection>,
    /// RMSNorm of each query head, `[head_dim]`, if the model has it.
    pub q_norm: Option<Array>,
    /// RMSNorm of each key head.
    pub k_norm: Option<Array>,
    /// RMSNorm of each value head, if the model has it: ones, since files store no weight for it.
    pub v_norm: Option<Array>,
    /// The sink of each query head, `[heads]`, if the model has them.
    pub sinks: Option<Array>,
    /// Output, `[hidden, heads * head_dim]`.
    pub o: Projection,
}

impl Attention {
    /// The projections of queries, and of the keys and values that the layer has itself.
    pub fn inputs(&self) -> impl Iterator<Item = &Projection> {
        let keys = [&self.k, &self.v].into_iter().flatten();
        std::iter::once(&self.q).chain(keys)
    }

    /// Queries, keys and values; an error for a layer that has no projections of its own for all three.
    pub fn required_qkv(&self) -> Result<[&Projection; 3]> {
        match (&self.k, &self.v) {
            (Some(k), Some(v)) => Ok([&self.q, k, v]),
            _ => bail!(
                Internal,
                "keys and values of attention without projections of both"
            ),
        }
    }
}

/// The MLP of a block.
#[derive(Debug)]
pub enum Mlp {
    /// A single MLP for all tokens.
    Dense(Box<DenseMlp>),
    /// Several experts and their router.
    Experts(Box<Experts>),
    /// A dense MLP, and experts beside it.
    DenseAndExperts(Box<DenseAndExperts>),
    /// The block is a mixer alone.
    None,
}

/// An MLP.
#[derive(Debug)]
pub struct DenseMlp {
    /// `[intermediate, hidden]`, if it has a gate.
    pub gate: Option<Projection>,
    /// `[intermediate, hidden]`.
    pub up: Projection,
    /// `[hidden, intermediate]`.
    pub down: Projection,
}

/// A dense MLP and experts beside it. The norm of the half's input is that of the dense MLP's input.
#[derive(Debug)]
pub struct DenseAndExperts {
    /// The dense MLP.
    pub dense: DenseMlp,
    /// RMSNorm of its output, `[hidden]`.
    pub dense_norm: Array,
    /// The experts.
    pub experts: Experts,
    /// RMSNorm of their input, `[hidden]`.
    pub experts_input_norm: Array,
    /// RMSNorm of their sum, `[hidden]`.
    pub experts_norm: Array,
}

/// A mixture of experts.
#[derive(Debug)]
pub struct Experts {
    /// The router, which computes the logits of the experts, `[experts, hidden]`.
    pub router: Projection,
    /// RMSNorm of the router's input, `[hidden]`, and the factors of the experts' weights, `[experts]`, if the router has them. The norm
    /// includes the factor of the input, `hidden^-0.5`.
    pub router_scales: Option<[Array; 2]>,
    /// Added to the scores by which experts are chosen, `[experts]`, if they are sigmoids.
    pub correction: Option<Array>,
    /// The experts.
    pub experts: Vec<DenseMlp>,
    /// The shared expert, and the projection `[1, hidden]` whose sigmoid multiplies its output.
    pub shared: Option<(DenseMlp, Option<Linear>)>,
}

/// A drafter by multi-token prediction; see [`DrafterSpec`](super::spec::DrafterSpec).
#[derive(Debug)]
pub struct Drafter {
    /// The norm of the next token's embedding, `[hidden]`.
    pub embedding_norm: Array,
    /// The norm of the hidden row, `[hidden]`.
    pub hidden_norm: Array,
    /// The projection of both, `[hidden, 2 * hidden]`.
    pub fc: Linear,
    /// The block.
    pub block: Block,
    /// The norm of its output, `[hidden]`.
    pub norm: Array,
}

impl Drafter {
    fn linears(&self) -> impl Iterator<Item = &Linear> {
        [&self.fc].into_iter().chain(self.block.linears())
    }

    fn vectors(&self) -> impl Iterator<Item = &Array> {
        let norms = [&self.embedding_norm, &self.hidden_norm, &self.norm];
        norms.into_iter().chain(self.block.vectors())
    }

    /// Bytes held in memory.
    fn bytes(&self) -> usize {
        let linears = self.linears().map(Linear::bytes).sum::<usize>();
        linears + self.vectors().map(Array::bytes).sum::<usize>()
    }
}

/// The weights by which a block takes its own input of each token.
#[derive(Debug)]
pub struct PerLayer {
    /// The gate, `[width, hidden]`.
    pub gate: Projection,
    /// The projection to the residual stream, `[hidden, width]`.
    pub projection: Projection,
    /// RMSNorm of the projection's output, `[hidden]`.
    pub norm: Array,
}

/// The per-layer embeddings, from which the inputs of all blocks come.
pub struct PerLayerTable {
    /// The table, `[vocab, blocks * width]`.
    pub table: FileTable,
    /// The projection of a token's embedding, `[blocks * width, hidden]`.
    pub projection: Projection,
    /// RMSNorm of each block's part of the projection's output, `[width]`.
    pub norm: Array,
}

/// A table in a file that stays open: a row is read on lookup, usually from the system's file cache. Fails if the file is truncated or
/// written to meanwhile.
pub struct FileTable {
    /// The opened checkpoint.
    pub checkpoint: Arc<dyn Checkpoint>,
    /// The table's entry.
    pub entry: Entry,
}

impl FileTable {
    /// Writes row `index` to `out`.
    pub fn row(&self, index: usize, out: &mut [f32]) -> Result<()> {
        self.checkpoint.rows_f32(&self.entry, index..index + 1, out)
    }
}

/// Source of embedding rows.
pub enum Embedding {
    /// The file.
    File(FileTable),
    /// The head, which holds the same values.
    Head,
    /// A matrix in memory, for a model that is being trained.
    Matrix(Linear),
}

/// All of a model's weights.
pub struct Weights {
    /// The lock of the memory below, if it was asked for. The first field, because it is dropped before the memory.
    pub locked: Option<Locked>,
    /// The embedding table.
    pub embedding: Embedding,
    /// The per-layer embeddings, if the model has them; `None` when loaded for sampling only.
    pub per_layer: Option<PerLayerTable>,
    /// The blocks, first to last; empty when loaded for sampling only.
    pub blocks: Vec<Block>,
    /// The drafter, if the model has one and was not loaded for sampling only.
    pub drafter: Option<Drafter>,
    /// The last RMSNorm.
    pub norm: Array,
    /// The output layer, `[vocab, hidden]`.
    pub head: Projection,
}

impl DenseMlp {
    fn projections(&self) -> impl Iterator<Item = &Projection> {
        self.gate.iter().chain([&self.up, &self.down])
    }

    /// The gate; an error for an MLP without one.
    pub fn required_gate(&self) -> Result<&Projection> {
        match &self.gate {
            Some(gate) => Ok(gate),
            None => bail!(Internal, "the gate of an MLP without one"),
        }
    }
}

impl Mlp {
    /// The MLP that all tokens use, if there is one.
    pub fn of_all_rows(&self) -> Option<&DenseMlp> {
        match self {
            Mlp::Dense(mlp) => Some(mlp),
            Mlp::DenseAndExperts(both) => Some(&both.dense),
            Mlp::Experts(experts) => experts.shared.as_ref().map(|(mlp, _)| mlp),
            Mlp::None => None,
        }
    }

    /// The mixture of experts, if it has one.
    pub fn mixture(&self) -> Option<&Experts> {
        match self {
            Mlp::Dense(_) | Mlp::None => None,
            Mlp::Experts(experts) => Some(experts),
            Mlp::DenseAndExperts(both) => Some(&both.experts),
        }
    }

    /// All MLPs: for a mixture the experts, and then the shared expert or the dense MLP.
    pub fn mlps(&self) -> Vec<&DenseMlp> {
        let experts = self.mixture().map(|mixture| &mixture.experts);
        let experts = experts.into_iter().flatten();
        experts.chain(self.of_all_rows()).collect()
    }

    /// The vectors that are no biases of projections.
    fn vectors(&self) -> Vec<&Array> {
        let mixture = self.mixture();
        let correction = mixture.and_then(|experts| experts.correction.as_ref());
        let scales = mixture.and_then(|experts| experts.router_scales.as_ref());
        let norms = match self {
            Mlp::DenseAndExperts(both) => vec![
                &both.dense_norm,
                &both.experts_input_norm,
                &both.experts_norm,
            ],
            Mlp::Dense(_) | Mlp::Experts(_) | Mlp::None => Vec::new(),
        };
        let vectors = correction.into_iter().chain(scales.into_iter().flatten());
        vectors.chain(norms).collect()
    }

    /// The projections that select experts.
    fn routers(&self) -> Vec<&Linear> {
        let Some(experts) = self.mixture() else {
            return Vec::new();
        };
        let shared = experts.shared.iter().filter_map(|(_, gate)| gate.as_ref());
        let router = &experts.router.linear;
        std::iter::once(router).chain(shared).collect()
    }
}

impl Block {
    fn projections(&self) -> impl Iterator<Item = &Projection> {
        let mlps = self.mlp.mlps().into_iter();
        let mixer = self.mixer.projections().into_iter();
        let per_layer = self.per_layer.iter();
        let per_layer = per_layer.flat_map(|own| [&own.gate, &own.projection]);
        mixer
            .chain(mlps.flat_map(DenseMlp::projections))
            .chain(per_layer)
    }

    /// Its linear maps.
    fn linears(&self) -> impl Iterator<Item = &Linear> {
        let projections = self.projections().map(|p| &p.linear);
        projections.chain(self.mlp.routers())
    }

    /// The bias of the router, if there is one.
    fn router_bias(&self) -> Option<&Array> {
        self.mlp.mixture()?.router.bias.as_ref()
    }

    /// The vectors: norms, biases, and what else a mixer has.
    fn vectors(&self) -> impl Iterator<Item = &Array> {
        let norms = [
            &self.mixer_norms.pre,
            &self.mixer_norms.post,
            &self.mlp_norms.pre,
            &self.mlp_norms.post,
        ];
        norms
            .into_iter()
            .flatten()
            .chain(self.mixer.vectors())
            .chain(self.mlp.vectors())
            .chain(self.per_layer.iter().map(|own| &own.norm))
            .chain(&self.scale)
            .chain(self.router_bias())
            .chain(self.projections().filter_map(|p| p.bias.as_ref()))
    }
}

impl Weights {
    /// The table on a GPU that embeds tokens, unless it is in host memory.
    pub fn table(&self) -> &Linear {
        match &self.embedding {
            Embedding::Matrix(table) => table,
            Embedding::Head | Embedding::File(_) => &self.head.linear,
        }
    }

    /// Every linear map, blocks first, then the drafter, that of per-layer embeddings, and the head.
    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        let blocks = self.blocks.iter().flat_map(Block::linears);
        let drafter = self.drafter.iter().flat_map(Drafter::linears);
        let per_layer = self.per_layer.iter().map(|all| &all.projection.linear);
        blocks
            .chain(drafter)
            .chain(per_layer)
            .chain([&self.head.linear])
    }

    /// The norms and biases.
    pub fn vectors(&self) -> impl Iterator<Item = &Array> {
        let blocks = self.blocks.iter().flat_map(Block::vectors);
        let drafter = self.drafter.iter().flat_map(Drafter::vectors);
        let per_layer = self.per_layer.iter().map(|all| &all.norm);
        blocks
            .chain(drafter)
            .chain(per_layer)
            .chain([&self.norm])
            .chain(&self.head.bias)
    }

    /// Bytes held in memory in the kernels' layout. Tables that stay in their file do not count.
    pub fn bytes(&self) -> usize {
        let table = match &self.embedding {
            Embedding::Matrix(table) => table.bytes(),
            Embedding::Head | Embedding::File(_) => 0,
        };
        let vectors = self.vectors().chain(self.value_norms());
        table
            + self.linears().map(Linear::bytes).sum::<usize>()
            + vectors.map(Array::bytes).sum::<usize>()
    }

    /// Part of [`Weights::bytes`] that is in a mapped file, which other processes may share.
    pub fn mapped_bytes(&self) -> usize {
        self.linears().map(Linear::mapped_bytes).sum()
    }

    /// Locks them in host memory: all, or none if that fails.
    pub fn lock(&mut self) -> Result<()> {
        let linears = self.linears().map(Linear::host_bytes);
        let vectors = self.vectors().chain(self.value_norms());
        let parts: Vec<&[u8]> = linears.chain(vectors.map(Array::host_bytes)).collect();
        self.locked = Some(Locked::new(&parts)?);
        Ok(())
    }

    /// The norms of values, which are ones and no parameters of the model.
    fn value_norms(&self) -> impl Iterator<Item = &Array> {
        self.blocks.iter().filter_map(|block| match &block.mixer {
            Mixer::Attention(attention) => attention.v_norm.as_ref(),
            _ => None,
        })
    }

    /// Average bytes that a decode step of `batch` sequences without drafts reads, if all experts are equally likely.
    pub fn bytes_per_step(&self, spec: &Spec, batch: usize) -> f64 {
        let idle = self.blocks.iter().zip(&spec.blocks).map(|(block, spec)| {
            let (Some(experts), Some(spec)) = (block.mlp.mixture(), spec.mlp.mixture()) else {
                return 0.0;
            };
            let projections = experts.experts.iter().flat_map(DenseMlp::projections);
            let all: usize = projections.map(|p| p.linear.bytes()).sum();
            let chosen = spec.per_token as f64 / spec.count as f64;
            all as f64 * (1.0 - chosen).powi(batch.min(1 << 20) as i32)
        });
        let drafter = self.drafter.as_ref().map_or(0, Drafter::bytes);
        (self.bytes() - drafter) as f64 - idle.sum::<f64>()
    }

    /// Writes the stored embeddings of `tokens` to `out`, one row of `hidden` numbers each.
    pub fn embed(&self, tokens: &[u32], out: &mut [f32]) -> Result<()> {
        let (vocab, hidden) = (self.head.linear.rows(), self.head.linear.cols());
        if let Some(token) = tokens.iter().find(|&&t| t as usize >= vocab) {
            bail!(
                InvalidArgument,
                "token {token} is outside the vocabulary of {vocab}"
            );
        }
        if out.len() != tokens.len() * hidden {
            bail!(
                InvalidArgument,
                "{} floats for the embeddings of {} tokens; they take {hidden} each",
                out.len(),
                tokens.len()
            );
        }
        for (&token, row) in tokens.iter().zip(out.chunks_exact_mut(hidden)) {
            let token = token as usize;
            match &self.embedding {
                Embedding::Head => self.head.linear.row(token, row)?,
                Embedding::Matrix(table) => table.row(token, row)?,
                Embedding::File(table) => table.row(token, row)?,
            }
        }
        Ok(())
    }
}
