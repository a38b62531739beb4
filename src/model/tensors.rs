//! The tensors of a model with a given spec: their names in transformers, their shapes, and the ways in which files store them. A file may
//! store projections with the same input as one matrix, and experts as one stack; a tensor is then a range of its rows. Knows names and
//! shapes, not files.

use std::ops::Range;

use super::spec::{
    AttentionSpec, BlockSpec, ExpertsSpec, GatedMlpSpec, MlpSpec, SharedExpertSpec, Spec,
};

/// The table of embeddings, `[vocab, hidden]`.
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";
/// The output layer, `[vocab, hidden]`.
pub(super) const HEAD: &str = "lm_head.weight";
/// The router of a mixture of experts, `[experts, hidden]`.
pub(super) const ROUTER: &str = "mlp.gate.weight";
/// The gate of the shared expert, `[1, hidden]`.
pub(super) const SHARED_GATE: &str = "mlp.shared_expert_gate.weight";
/// The last norm, `[hidden]`.
pub(super) const NORM: &str = "model.norm.weight";

/// A tensor of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSpec {
    /// Its own name.
    pub name: String,
    /// Its shape: `[elements]` or `[out features, in features]`.
    pub shape: Vec<usize>,
    /// Whether the model requires it.
    pub required: bool,
    /// Its role.
    pub role: TensorRole,
    /// Alternative locations, in the order of the search.
    pub within: Vec<Within>,
}

/// The role of a tensor, which determines how it is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorRole {
    /// A norm or a bias, in f32.
    Vector,
    /// A table for row lookup.
    Table,
    /// A matrix of a product; may be held in 4 bits.
    Linear,
    /// The routing projection, whose precision decides the choice of experts. Held in f32 unless it is stored in 4 bits.
    Router,
}

/// Some rows of a stored tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Within {
    /// Name of the stored tensor.
    pub name: String,
    /// Shape of the stored tensor.
    pub shape: Vec<usize>,
    /// The rows, with the stored tensor seen as a matrix; the elements if it is a vector.
    pub rows: Range<usize>,
}

/// The prefix of a block's tensors.
pub(super) fn block_name(block: usize, name: &str) -> String {
    format!("model.layers.{block}.{name}")
}

/// A projection, `gate_proj`, `up_proj` or `down_proj`, of an expert of a block.
fn expert_name(block: usize, expert: usize, projection: &str) -> String {
    block_name(block, &format!("mlp.experts.{expert}.{projection}"))
}

/// All tensors of a model, the embedding first, then the head and the last norm, then the blocks in order.
pub fn all(spec: &Spec) -> Vec<TensorSpec> {
    let mut tensors = outside(spec);
    for index in 0..spec.blocks.len() {
        tensors.extend(of_block(spec, index));
    }
    tensors
}

/// Tensors outside the blocks.
pub(super) fn outside(spec: &Spec) -> Vec<TensorSpec> {
    let table = vec![spec.vocab_size, spec.hidden_size];
    let whole = |name: &str, shape, required, role| TensorSpec {
        name: name.to_owned(),
        shape,
        required,
        role,
        within: Vec::new(),
    };
    let mut embedding = whole(EMBEDDING, table.clone(), true, TensorRole::Table);
    if spec.tied {
        // The table may be stored under either name.
        embedding.within.push(Within {
            name: HEAD.to_owned(),
            shape: table.clone(),
            rows: 0..spec.vocab_size,
        });
    }
    vec![
        embedding,
        whole(HEAD, table, !spec.tied, TensorRole::Linear),
        whole(NORM, vec![spec.hidden_size], true, TensorRole::Vector),
    ]
}

/// Tensors of a block.
fn of_block(spec: &Spec, index: usize) -> Vec<TensorSpec> {
    let BlockSpec {
        norms,
        attention,
        mlp,
    } = &spec.blocks[index];
    let mut list = List {
        index,
        tensors: Vec::new(),
    };
    let names = spec.norm_names;
    for (name, has) in [
        (names.attention, norms.pre),
        (names.attention_post, norms.post),
        (names.mlp, norms.pre),
        (names.mlp_post, norms.post),
    ] {
        if has {
            list.vector(&format!("{name}.weight"), spec.hidden_size, true);
        }
    }
    list.attention(attention, spec.hidden_size);
    match mlp {
        MlpSpec::Dense(mlp) => list.dense("mlp", mlp, spec.hidden_size),
        MlpSpec::Experts(experts) => list.experts(experts, spec.hidden_size),
    }
    list.tensors
}

struct List {
    index: usize,
    tensors: Vec<TensorSpec>,
}

impl List {
    fn vector(&mut self, name: &str, len: usize, required: bool) {
        self.tensors.push(TensorSpec {
            name: block_name(self.index, name),
            shape: vec![len],
            required,
            role: TensorRole::Vector,
            within: Vec::new(),
        });
    }

    /// A projection of `cols` features to `rows` with its bias. It may also be stored as the rows from `first` on of a tensor `whole` with
    /// the given number of rows.
    fn projection(
        &mut self,
        name: &str,
        (rows, cols): (usize, usize),
        bias: bool,
        whole: Option<(&str, usize, usize)>,
    ) {
        for (suffix, required, cols) in [("weight", true, Some(cols)), ("bias", bias, None)] {
            let shape = |rows| std::iter::once(rows).chain(cols).collect::<Vec<_>>();
            let within = whole.map(|(name, first, all)| Within {
                name: block_name(self.index, &format!("{name}.{suffix}")),
                shape: shape(all),
                rows: first..first + rows,
            });
            self.tensors.push(TensorSpec {
                name: block_name(self.index, &format!("{name}.{suffix}")),
                shape: shape(rows),
                required,
                role: match cols {
                    Some(_) => TensorRole::Linear,
                    None => TensorRole::Vector,
                },
                within: within.into_iter().collect(),
            });
        }
    }

    fn attention(&mut self, attention: &AttentionSpec, hidden: usize) {
        let (q, kv) = (attention.q_width(), attention.kv_width());
        let fused = |first| Some(("self_attn.qkv_proj", first, q + 2 * kv));
        let bias = attention.qkv_bias;
        self.projection("self_attn.q_proj", (q, hidden), bias, fused(0));
        self.projection("self_attn.k_proj", (kv, hidden), bias, fused(q));
        self.projection("self_attn.v_proj", (kv, hidden), bias, fused(q + kv));
        self.projection("self_attn.o_proj", (hidden, q), attention.o_bias, None);
        if attention.qk_norm {
            for name in ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] {
                self.vector(name, attention.head_dim, true);
            }
        }
    }

    fn dense(&mut self, name: &str, mlp: &GatedMlpSpec, hidden: usize) {
        let wide = mlp.intermediate_size;
        let fused = format!("{name}.gate_up_proj");
        let of = |first| Some((fused.as_str(), first, 2 * wide));
        let projection = |projection: &str| format!("{name}.{projection}");
        self.projection(&projection("gate_proj"), (wide, hidden), mlp.bias, of(0));
        self.projection(&projection("up_proj"), (wide, hidden), mlp.bias, of(wide));
        self.projection(&projection("down_proj"), (hidden, wide), mlp.bias, None);
    }

    fn experts(&mut self, experts: &ExpertsSpec, hidden: usize) {
        self.router(ROUTER, experts.count, hidden);
        let wide = experts.expert.intermediate_size;
        for (projection, rows, cols, fused) in [
            ("gate_proj", wide, hidden, Some(0)),
            ("up_proj", wide, hidden, Some(wide)),
            ("down_proj", hidden, wide, None),
        ] {
            for expert in 0..experts.count {
                let stack = |name: &str, of: usize, first: usize| Within {
                    name: block_name(self.index, &format!("mlp.experts.{name}")),
                    shape: vec![experts.count, of, cols],
                    rows: expert * of + first..expert * of + first + rows,
                };
                let mut within = vec![stack(&format!("{projection}.weight"), rows, 0)];
                within.push(match fused {
                    Some(first) => stack("gate_up_proj", 2 * wide, first),
                    None => stack("down_proj", rows, 0),
                });
                self.tensors.push(TensorSpec {
                    name: expert_name(self.index, expert, projection) + ".weight",
                    shape: vec![rows, cols],
                    required: true,
                    role: TensorRole::Linear,
                    within,
                });
            }
        }
        if let Some(SharedExpertSpec { mlp, gated }) = &experts.shared {
            self.dense("mlp.shared_expert", mlp, hidden);
            if *gated {
                self.router(SHARED_GATE, 1, hidden);
            }
        }
    }

    fn router(&mut self, name: &str, rows: usize, hidden: usize) {
        self.tensors.push(TensorSpec {
            name: block_name(self.index, name),
            shape: vec![rows, hidden],
            required: true,
            role: TensorRole::Router,
            within: Vec::new(),
        });
    }
}
