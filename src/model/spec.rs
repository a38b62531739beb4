//! A decoder architecture as data: sizes and constants of a model, and for each block its norms, mixer and MLP. Loading, the forward
//! pass on every device, conversion and reports follow it; `families` creates it from a config. Knows no files and no devices.

use super::rope::RopeSet;
use crate::base::Result;
use crate::base::error::bail;
use crate::ops::attention::KvType;
use crate::tensor::{AttentionShape, DeltaShape, MambaShape, RecurrentShape};

pub use crate::ops::activation::Activation;
pub use crate::ops::experts::Scoring;
pub use crate::ops::rope::QueryGrowth;
pub use crate::tensor::SigmoidScoring;

/// A decoder-only language model.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// The family: `model_type` in `config.json`.
    pub family: &'static str,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Maximum number of positions of the model.
    pub max_positions: usize,
    /// Epsilon, added to the mean square in every RMSNorm. The residual stream is divided by [`Spec::residual_scale`] before.
    pub norm_eps: f32,
    /// Whether norms are stored as offsets from one.
    pub norm_plus_one: bool,
    /// Factor of a token's embedding.
    pub embedding_scale: f32,
    /// The per-layer embeddings, if the model has them.
    pub per_layer_table: Option<PerLayerTableSpec>,
    /// Whether the head shares the embedding's table.
    pub tied: bool,
    /// Residual multiplier: factor of what each half of a block adds to the residual stream. Passes divide the residual stream by it, so that
    /// halves add what they compute.
    pub residual_scale: f32,
    /// Factor of the logits.
    pub logit_scale: f32,
    /// Soft cap of the logits: `cap * tanh(logit / cap)`.
    pub logit_cap: Option<f32>,
    /// The rotations; each block refers to one by index.
    pub ropes: Vec<RopeSet>,
    /// The decoder blocks, first to last.
    pub blocks: Vec<BlockSpec>,
    /// The drafter, if the model has one.
    pub drafter: Option<DrafterSpec>,
    /// Names of the norms' tensors.
    pub norm_names: NormNames,
    /// Other names of the family's files: the start of a usual name, within the block if it belongs to one, and what stands for it. The
    /// first match applies.
    pub renamed: &'static [(&'static str, &'static str)],
    /// Blocks that files hold after the model's own, which draft further tokens and are not read.
    pub unread_layers: usize,
    /// Tokens that end a text.
    pub eos: Vec<u32>,
    /// The token that begins a text, if the config names one.
    pub bos: Option<u32>,
}

/// A drafter by multi-token prediction. It predicts the token after the next one from the embedding of the next token and the output of the
/// model's final norm: each normalized, side by side in this order, through one projection; then one decoder block at the position of the
/// hidden row, a norm, and the model's own head. vLLM's `qwen3_next_mtp.py` and `qwen3_5_mtp.py` compute it so.
#[derive(Clone, Debug, PartialEq)]
pub struct DrafterSpec {
    /// Its block, whose mixer is attention.
    pub block: BlockSpec,
    /// Number of blocks that the config names.
    pub layers: usize,
    /// Whether the config names embeddings of its own.
    pub own_embeddings: bool,
}

impl DrafterSpec {
    /// Fails for a drafter that cannot be run.
    pub fn check(&self) -> Result<()> {
        if self.own_embeddings {
            bail!(
                Unsupported,
                "config: mtp_use_dedicated_embeddings is true; drafters are known only with the embeddings of their model"
            );
        }
        if self.layers > 1 {
            bail!(
                Unsupported,
                "config: mtp_num_hidden_layers is {}; drafters are known only with one layer",
                self.layers
            );
        }
        Ok(())
    }
}

/// One decoder block: a mixer, then an MLP, each added to the residual stream. A family may leave out either half.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockSpec {
    /// Norms around mixer and MLP.
    pub norms: NormPlacement,
    /// The half in which a token sees those before it.
    pub mixer: MixerSpec,
    /// The MLP.
    pub mlp: MlpSpec,
    /// The block's own input of each token, which a third half adds to the residual stream, if the model has such inputs.
    pub per_layer: Option<PerLayerSpec>,
    /// Whether the residual stream is multiplied by a stored number at the end of the block.
    pub scaled: bool,
}

/// How a block takes its own input `e` of each token: the residual stream `x` becomes `x + norm(P (act(G x) * e))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PerLayerSpec {
    /// Elements of `e`.
    pub width: usize,
    /// Activation function of the gate.
    pub activation: Activation,
}

/// The per-layer embeddings of a model, of which each block takes its own part: `(norm(M x / sqrt(hidden)) + scale * table[token]) /
/// sqrt(2)`, with the scaled embedding `x`, and the norm over each part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PerLayerTableSpec {
    /// Elements of one block's part of a row.
    pub width: usize,
    /// Rows of the table, at least one for each token.
    pub vocab_size: usize,
    /// Factor of the table's values.
    pub scale: f32,
}

impl BlockSpec {
    /// The attention, if that is its mixer.
    pub fn attention(&self) -> Option<&AttentionSpec> {
        match &self.mixer {
            MixerSpec::Attention(attention) => Some(attention),
            _ => None,
        }
    }

    /// The attention; an error for another mixer.
    pub fn required_attention(&self) -> Result<&AttentionSpec> {
        match self.attention() {
            Some(attention) => Ok(attention),
            None => bail!(Internal, "attention of a block with another mixer"),
        }
    }

    /// The gated delta net, if that is its mixer.
    pub fn gated_delta(&self) -> Option<&GatedDeltaSpec> {
        match &self.mixer {
            MixerSpec::GatedDelta(delta) => Some(delta),
            _ => None,
        }
    }

    /// The Mamba-2, if that is its mixer.
    pub fn mamba2(&self) -> Option<&Mamba2Spec> {
        match &self.mixer {
            MixerSpec::Mamba2(mamba) => Some(mamba),
            _ => None,
        }
    }

    /// The shape of its recurrent state, if its mixer has one.
    pub fn recurrent(&self) -> Option<RecurrentShape> {
        match &self.mixer {
            MixerSpec::GatedDelta(delta) => Some(RecurrentShape::GatedDelta(delta.shape)),
            MixerSpec::Mamba2(mamba) => Some(RecurrentShape::Mamba2(mamba.shape)),
            MixerSpec::Attention(_) | MixerSpec::None => None,
        }
    }
}

/// The half of a block in which a token sees those before it.
#[derive(Clone, Debug, PartialEq)]
pub enum MixerSpec {
    /// Attention over the keys and values of all tokens, or of a window.
    Attention(AttentionSpec),
    /// A gated delta net, whose state does not grow with the sequence.
    GatedDelta(GatedDeltaSpec),
    /// Mamba-2, whose state does not grow with the sequence either.
    Mamba2(Mamba2Spec),
    /// The block is an MLP alone.
    None,
}

/// A gated delta net: a causal convolution of queries, keys and values, a matrix a head that forgets and is corrected at each token
/// (the gated delta rule), and a gated norm of what it answers. See [`DeltaShape`].
#[derive(Clone, Debug, PartialEq)]
pub struct GatedDeltaSpec {
    /// Its heads.
    pub shape: DeltaShape,
    /// How files store its projections.
    pub projections: DeltaProjections,
}

/// How files store the projections of a gated delta net.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeltaProjections {
    /// One matrix for queries, keys and values, and one for each gate: Qwen3.5.
    ByRole,
    /// Two matrices, with the rows of each key head together: Qwen3-Next.
    ByHead,
}

/// Mamba-2: a causal convolution of x, B and C, a matrix a head that decays and to which each token adds, and a norm of what is read from
/// it, by groups and after the gate. See [`MambaShape`].
#[derive(Clone, Debug, PartialEq)]
pub struct Mamba2Spec {
    /// Its heads.
    pub shape: MambaShape,
    /// Whether its projections must have a bias.
    pub bias: bool,
    /// Whether its convolution must have a bias.
    pub convolution_bias: bool,
    /// The least and the largest time step.
    pub step_limits: [f32; 2],
}

/// Whether a half of a block has a norm before it, and whether it has one after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormPlacement {
    /// Whether the input of each half is normalized.
    pub pre: bool,
    /// Whether the output of each half is normalized before it is added to the residual stream.
    pub post: bool,
}

/// Grouped-query attention.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Where its keys and values come from.
    pub key_values: KeyValues,
    /// Norms of queries and keys.
    pub qk_norm: QkNorm,
    /// Whether each head of values is normalized, by a norm without a weight.
    pub value_norm: bool,
    /// Whether the projections of queries, keys and values must have a bias.
    pub qkv_bias: bool,
    /// Whether the output projection must have a bias.
    pub o_bias: bool,
    /// Whether the output of each head is multiplied by the sigmoid of a gate, which the projection of queries computes too.
    pub gated: bool,
    /// Whether each head has a sink: a logit that takes part in the softmax of every row and has no value.
    pub sinks: bool,
    /// Whether files interleave the two halves of the rotating rows of each head of queries and keys (interleaved RoPE).
    pub interleaved: bool,
    /// Index in [`Spec::ropes`] of the rotation of queries and keys; `None` for attention without positions.
    pub rope: Option<usize>,
    /// Positions that a query attends to, its own included; `None` for all positions up to its own.
    pub window: Option<usize>,
    /// Factor of the product of query and key.
    pub scale: f32,
    /// Soft cap of scores: `cap * tanh(score / cap)`.
    pub score_cap: Option<f32>,
}

/// Norms of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// Nothing.
    None,
    /// Each head before RoPE, with a weight for all of them.
    Heads,
    /// Each head after RoPE.
    RotatedHeads,
    /// All heads together, before RoPE.
    Projections,
}

/// Where the keys and values of an attention layer come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyValues {
    /// One projection for keys and one for values.
    Projected,
    /// The projection of keys gives both: values are keys before norm and rotation.
    KeysAsValues,
    /// An earlier block has them, in its cache. The layer has neither projections of them nor a cache of its own.
    OfBlock(usize),
}

impl AttentionSpec {
    /// Whether it computes keys and values and caches them.
    pub fn has_own_keys(&self) -> bool {
        !matches!(self.key_values, KeyValues::OfBlock(_))
    }

    /// The block whose cache holds its keys and values, for attention in block `index`.
    pub fn cached_in(&self, index: usize) -> usize {
        match self.key_values {
            KeyValues::OfBlock(block) => block,
            KeyValues::Projected | KeyValues::KeysAsValues => index,
        }
    }

    /// Elements of a row of queries.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Elements of a row of keys, and of values.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Its heads and scores, as operations take them.
    pub fn shape(&self) -> AttentionShape {
        AttentionShape {
            heads: self.heads,
            kv_heads: self.kv_heads,
            dim: self.head_dim,
            scale: self.scale,
            window: self.window,
            score_cap: self.score_cap,
        }
    }

    /// Elements of a row of queries, keys and values.
    pub fn qkv_width(&self) -> usize {
        self.q_width() + 2 * self.kv_width()
    }

    /// Elements of a row of its first projections: queries, and the keys and values that it projects itself.
    pub fn projected_width(&self) -> usize {
        let of_keys = match self.key_values {
            KeyValues::Projected => 2,
            KeyValues::KeysAsValues => 1,
            KeyValues::OfBlock(_) => 0,
        };
        self.q_width() + of_keys * self.kv_width()
    }
}

/// The MLP of a block.
#[derive(Clone, Debug, PartialEq)]
pub enum MlpSpec {
    /// One MLP for all tokens.
    Dense(DenseMlpSpec),
    /// Several experts; a router chooses some of them for each token.
    Experts(ExpertsSpec),
    /// A dense MLP and experts beside it, both of the residual stream, each with norms of its own; their outputs are added.
    DenseAndExperts(DenseMlpSpec, ExpertsSpec),
    /// The block is a mixer alone.
    None,
}

impl MlpSpec {
    /// Width between the projections; of one expert in a mixture, and 0 without an MLP.
    pub fn intermediate_size(&self) -> usize {
        match self {
            MlpSpec::None => 0,
            MlpSpec::Dense(mlp) => mlp.intermediate_size,
            MlpSpec::Experts(experts) | MlpSpec::DenseAndExperts(_, experts) => {
                experts.expert.intermediate_size
            }
        }
    }

    /// Number of experts; 0 without a mixture.
    pub fn experts(&self) -> usize {
        self.mixture().map_or(0, |experts| experts.count)
    }

    /// The mixture of experts, if it is one.
    pub fn mixture(&self) -> Option<&ExpertsSpec> {
        match self {
            MlpSpec::Dense(_) | MlpSpec::None => None,
            MlpSpec::Experts(experts) | MlpSpec::DenseAndExperts(_, experts) => Some(experts),
        }
    }

    /// Whether it has [`Activation::ClampedSwiglu`].
    pub(crate) fn is_clamped(&self) -> bool {
        let is_clamped =
            |mlp: &DenseMlpSpec| matches!(mlp.activation, Activation::ClampedSwiglu { .. });
        self.specs().any(is_clamped)
    }

    /// Its MLPs: for a mixture an expert, and the shared expert or the dense MLP if there is one.
    pub fn specs(&self) -> impl Iterator<Item = &DenseMlpSpec> {
        let expert = self.mixture().map(|experts| &experts.expert);
        expert.into_iter().chain(self.of_all_rows())
    }

    /// The MLP that all tokens use, if there is one.
    pub fn of_all_rows(&self) -> Option<&DenseMlpSpec> {
        match self {
            MlpSpec::Dense(mlp) | MlpSpec::DenseAndExperts(mlp, _) => Some(mlp),
            MlpSpec::Experts(experts) => experts.shared.as_ref().map(|shared| &shared.mlp),
            MlpSpec::None => None,
        }
    }
}

/// An MLP: `down(act(gate(x)) * up(x))`, or `down(act(up(x)))` without a gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DenseMlpSpec {
    /// Width between the projections.
    pub intermediate_size: usize,
    /// Whether it has a gate.
    pub gated: bool,
    /// Activation function of the gate, or of `up`.
    pub activation: Activation,
    /// Whether its projections must have a bias.
    pub bias: bool,
}

/// A mixture of experts: scores them by the router's logits, selects those with the best scores, and sums their outputs weighted with
/// those scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsSpec {
    /// Number of experts.
    pub count: usize,
    /// Number of experts for each token.
    pub per_token: usize,
    /// Whether the scores of the chosen experts are divided by their sum.
    pub normalized: bool,
    /// Function of the logits that scores them.
    pub scoring: Scoring,
    /// Whether the router has a bias, which is added to its logits.
    pub router_bias: bool,
    /// Whether the router takes the residual stream by a norm of its own, and the weight of each expert is multiplied by a stored number.
    pub router_scaled: bool,
    /// The names and the order of rows that files have.
    pub names: ExpertNames,
    /// The shape of each expert.
    pub expert: DenseMlpSpec,
    /// An additional MLP for all tokens.
    pub shared: Option<SharedExpertSpec>,
}

/// How files name the router of a mixture, and order the rows of a stack of gate and up projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertNames {
    /// `mlp.gate`; the gate rows of an expert, then its up rows: Qwen.
    Qwen,
    /// `mlp.router`; gate and up rows of an expert in turn: gpt-oss.
    GptOss,
    /// `router.proj`; the gate rows of an expert, then its up rows: Gemma 4.
    Gemma4,
    /// As Qwen, but a projection of an expert is `w1` (gate), `w3` (up) or `w2` (down) where experts are stored one by one: Mixtral.
    Mixtral,
}

/// A shared expert, which every token uses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SharedExpertSpec {
    /// Its MLP.
    pub mlp: DenseMlpSpec,
    /// Whether its output is multiplied by a gate: the sigmoid of a projection of the input to one number.
    pub gated: bool,
}

/// The names of a block's norms within `model.layers.N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormNames {
    /// Before the mixer.
    pub mixer: &'static str,
    /// After the mixer.
    pub mixer_post: &'static str,
    /// Before the MLP.
    pub mlp: &'static str,
    /// After the MLP.
    pub mlp_post: &'static str,
}

impl NormNames {
    /// The usual names, for blocks with norms only before each half.
    pub const PRE: NormNames = NormNames {
        mixer: "input_layernorm",
        mixer_post: "",
        mlp: "post_attention_layernorm",
        mlp_post: "",
    };
    /// The names of Gemma, for blocks with norms before and after each half.
    pub const PRE_AND_POST: NormNames = NormNames {
        mixer: "input_layernorm",
        mixer_post: "post_attention_layernorm",
        mlp: "pre_feedforward_layernorm",
        mlp_post: "post_feedforward_layernorm",
    };
    /// The names of GLM-4, for the same blocks.
    pub const GLM4: NormNames = NormNames {
        mixer: "input_layernorm",
        mixer_post: "post_self_attn_layernorm",
        mlp: "post_attention_layernorm",
        mlp_post: "post_mlp_layernorm",
    };
    /// The name in files whose blocks have one half each.
    pub const SINGLE: NormNames = NormNames {
        mixer: "norm",
        mixer_post: "",
        mlp: "norm",
        mlp_post: "",
    };
}

impl Spec {
    /// The blocks, and the block of the drafter after them.
    pub fn all_blocks(&self) -> impl Iterator<Item = &BlockSpec> {
        self.blocks
            .iter()
            .chain(self.drafter.iter().map(|d| &d.block))
    }

    /// A block by its index in [`Spec::all_blocks`].
    pub fn block(&self, index: usize) -> Result<&BlockSpec> {
        match self.all_blocks().nth(index) {
            Some(block) => Ok(block),
            None => bail!(Internal, "block {index} of {}", self.blocks.len()),
        }
    }

    /// The spec for passes in which queries do not grow with their position, which therefore has only the positions before they grow.
    pub(crate) fn without_growth(mut self) -> Spec {
        let tables = self.ropes.iter_mut().flat_map(RopeSet::tables_mut);
        for growth in tables.filter_map(|table| table.growth.take()) {
            self.max_positions = self.max_positions.min(growth.positions);
        }
        self
    }

    /// Fails for a number of positions that a sequence of the model cannot have room for.
    pub fn check_context(&self, positions: usize) -> Result<()> {
        let most = self.max_positions;
        if positions == 0 || positions > most {
            bail!(
                InvalidArgument,
                "a context of {positions} positions; the model was made for 1 to {most}"
            );
        }
        Ok(())
    }

    /// Factor of a token's embedding in the residual stream, which is divided by [`Spec::residual_scale`].
    pub(crate) fn stream_scale(&self) -> f32 {
        self.embedding_scale / self.residual_scale
    }

    /// The number of rotations whose long table applies to a sequence with room for `capacity` positions: keys of sequences of which this
    /// differs are rotated differently.
    pub fn long_ropes(&self, capacity: usize) -> usize {
        let long = self.ropes.iter().filter(|set| set.is_long(capacity));
        long.count()
    }

    /// Bytes of one cached position in this type, the drafter's included.
    pub fn kv_bytes_per_token(&self, kind: KvType) -> u64 {
        let attentions = self.all_blocks().filter_map(BlockSpec::attention);
        let cached = attentions.filter(|attention| attention.has_own_keys());
        let bytes = cached.map(|a| 2 * a.kv_heads * kind.vector_bytes(a.head_dim));
        bytes.sum::<usize>() as u64
    }
}
