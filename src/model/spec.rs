//! What a decoder is, as data: the sizes and constants of a model and, block by block, where it normalizes, how it attends, and what
//! its MLP is. Loading, the forward pass on every device, conversion and reports follow it; `families` makes it of a config. Knows no
//! files and no devices.

use super::rope::RopeSet;

pub use crate::ops::activation::Activation;

/// A decoder-only language model.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// The family: `model_type` in `config.json`.
    pub family: &'static str,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Positions the model was made for.
    pub max_positions: usize,
    /// Added to the mean square in every RMSNorm.
    pub norm_eps: f32,
    /// Whether norms are stored as what is to be added to one.
    pub norm_plus_one: bool,
    /// Multiplies the embedding of a token.
    pub embedding_scale: f32,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// Bounds logits softly: `cap * tanh(logit / cap)`.
    pub logit_cap: Option<f32>,
    /// The ways in which heads are rotated; each block names one.
    pub ropes: Vec<RopeSet>,
    /// The decoder blocks, first to last.
    pub blocks: Vec<BlockSpec>,
    /// What norms are called.
    pub norm_names: NormNames,
    /// Tokens that end a text.
    pub eos: Vec<u32>,
    /// The token that begins a text, where the config names one.
    pub bos: Option<u32>,
}

/// One decoder block: attention, then an MLP, each added to the residual stream.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockSpec {
    /// Where attention and MLP are normalized.
    pub norms: NormPlacement,
    /// The attention.
    pub attention: AttentionSpec,
    /// The MLP.
    pub mlp: MlpSpec,
}

/// Whether what enters each half of a block is normalized, and what leaves it before it is added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormPlacement {
    /// What enters.
    pub pre: bool,
    /// What leaves.
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
    /// Whether each head of queries and keys is normalized before it is rotated.
    pub qk_norm: bool,
    /// Whether the projections of queries, keys and values must have a bias.
    pub qkv_bias: bool,
    /// Whether the output projection must have a bias.
    pub o_bias: bool,
    /// Which of [`Spec::ropes`] rotates queries and keys.
    pub rope: usize,
    /// Positions that a query sees, its own included; all before its own if `None`.
    pub window: Option<usize>,
    /// Multiplies the product of query and key.
    pub scale: f32,
    /// Bounds scores softly: `cap * tanh(score / cap)`.
    pub score_cap: Option<f32>,
}

impl AttentionSpec {
    /// Elements of a row of queries.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Elements of a row of keys, and of values.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

/// What follows attention.
#[derive(Clone, Debug, PartialEq)]
pub enum MlpSpec {
    /// One gated MLP for all tokens.
    Dense(GatedMlpSpec),
    /// Several, of which a router chooses some for each token.
    Experts(ExpertsSpec),
}

impl MlpSpec {
    /// Elements between the projections; of one expert.
    pub fn intermediate_size(&self) -> usize {
        match self {
            MlpSpec::Dense(mlp) => mlp.intermediate_size,
            MlpSpec::Experts(experts) => experts.expert.intermediate_size,
        }
    }

    /// How many experts there are; 0 for a dense MLP.
    pub fn experts(&self) -> usize {
        self.mixture().map_or(0, |experts| experts.count)
    }

    /// The mixture of experts, if it is one.
    pub fn mixture(&self) -> Option<&ExpertsSpec> {
        match self {
            MlpSpec::Dense(_) => None,
            MlpSpec::Experts(experts) => Some(experts),
        }
    }

    /// The gated MLP that all tokens go through, if there is one.
    pub fn of_all_rows(&self) -> Option<&GatedMlpSpec> {
        match self {
            MlpSpec::Dense(mlp) => Some(mlp),
            MlpSpec::Experts(experts) => experts.shared.as_ref().map(|shared| &shared.mlp),
        }
    }
}

/// A gated MLP: `down(act(gate(x)) * up(x))`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatedMlpSpec {
    /// Elements between.
    pub intermediate_size: usize,
    /// The function of the gate.
    pub activation: Activation,
    /// Whether the three projections must have a bias.
    pub bias: bool,
}

/// A mixture of experts: softmax over the router's logits, the most probable experts, and the sum of their outputs weighted with
/// those probabilities.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsSpec {
    /// How many experts there are.
    pub count: usize,
    /// How many of them a token goes to.
    pub per_token: usize,
    /// Whether the probabilities of those are divided by their sum.
    pub normalized: bool,
    /// Each expert.
    pub expert: GatedMlpSpec,
    /// An MLP for all tokens beside them.
    pub shared: Option<SharedExpertSpec>,
}

/// An expert that every token goes to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SharedExpertSpec {
    /// Its MLP.
    pub mlp: GatedMlpSpec,
    /// Whether its output is multiplied by the sigmoid of a projection of the input to one number.
    pub gated: bool,
}

/// The names of a block's norms within `model.layers.N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormNames {
    /// Before attention.
    pub attention: &'static str,
    /// After attention.
    pub attention_post: &'static str,
    /// Before the MLP.
    pub mlp: &'static str,
    /// After the MLP.
    pub mlp_post: &'static str,
}

impl NormNames {
    /// The usual ones, of blocks that normalize what enters.
    pub const PRE: NormNames = NormNames {
        attention: "input_layernorm",
        attention_post: "",
        mlp: "post_attention_layernorm",
        mlp_post: "",
    };
    /// Those of Gemma, whose blocks also normalize what leaves.
    pub const PRE_AND_POST: NormNames = NormNames {
        attention: "input_layernorm",
        attention_post: "post_attention_layernorm",
        mlp: "pre_feedforward_layernorm",
        mlp_post: "post_feedforward_layernorm",
    };
}

impl Spec {
    /// Bytes that one cached position takes in f16.
    pub fn kv_bytes_per_token(&self) -> u64 {
        let widths = self.blocks.iter().map(|b| 2 * b.attention.kv_width());
        (widths.sum::<usize>() * size_of::<half::f16>()) as u64
    }
}
