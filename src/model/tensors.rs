//! The tensors of a model with a given spec: their names in transformers, their shapes, and the ways in which files store them. A file may
//! store projections with the same input as one matrix, and experts as one stack; a tensor is then a range of its rows. Knows names and
//! shapes, not files.

use std::collections::HashSet;

use super::spec::{
    AttentionSpec, BlockSpec, DeltaProjections, DenseMlpSpec, ExpertNames, ExpertsSpec,
    GatedDeltaSpec, KeyValues, Mamba2Spec, MixerSpec, MlpSpec, QkNorm, Scoring, SharedExpertSpec,
    Spec,
};

pub use super::stored_rows::{RowPattern, StoredRows};

/// The table of embeddings, `[vocab, hidden]`.
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";
/// The names that files have for it.
pub(super) const EMBEDDINGS: [&str; 2] = [EMBEDDING, "model.embeddings.weight"];
/// The output layer, `[vocab, hidden]`.
pub(super) const HEAD: &str = "lm_head.weight";
/// The correction that a router by sigmoids adds to its scores before it chooses, `[experts]`.
pub(super) const ROUTER_CORRECTION: &str = "mlp.gate.e_score_correction_bias";
/// The factors of the router's input, `[hidden]`, and of the experts' weights, `[experts]`.
pub(super) const ROUTER_SCALE: &str = "router.scale";
pub(super) const EXPERT_SCALES: &str = "router.per_expert_scale";
/// The norms of a dense MLP's output, and of the input and the sum of the experts beside it.
pub(super) const DENSE_POST: &str = "post_feedforward_layernorm_1.weight";
pub(super) const EXPERTS_PRE: &str = "pre_feedforward_layernorm_2.weight";
pub(super) const EXPERTS_POST: &str = "post_feedforward_layernorm_2.weight";
/// The gate of the shared expert, `[1, hidden]`.
pub(super) const SHARED_GATE: &str = "mlp.shared_expert_gate.weight";
/// The last norm, `[hidden]`.
pub(super) const NORM: &str = "model.norm.weight";

/// The prefix of the drafter's tensors.
pub const DRAFTER: &str = "mtp.";
/// The projection of the drafter's inputs, `[hidden, 2 * hidden]`.
pub(super) const DRAFTER_FC: &str = "mtp.fc.weight";
/// The norms of its inputs, and of its output, `[hidden]`.
pub(super) const DRAFTER_EMBEDDING_NORM: &str = "mtp.pre_fc_norm_embedding.weight";
pub(super) const DRAFTER_HIDDEN_NORM: &str = "mtp.pre_fc_norm_hidden.weight";
pub(super) const DRAFTER_NORM: &str = "mtp.norm.weight";

/// The table of per-layer embeddings, `[vocab, blocks * width]`.
pub(super) const PER_LAYER_TABLE: &str = "model.embed_tokens_per_layer.weight";
/// The projection of embeddings that is added to its rows, and the norm of each block's part.
pub(super) const PER_LAYER_MODEL: &str = "model.per_layer_model_projection";
pub(super) const PER_LAYER_NORM: &str = "model.per_layer_projection_norm.weight";
/// The gate of a block's own input, its projection, and the norm after that.
pub(super) const PER_LAYER_GATE: &str = "per_layer_input_gate";
pub(super) const PER_LAYER_OUT: &str = "per_layer_projection";
pub(super) const PER_LAYER_POST: &str = "post_per_layer_input_norm.weight";
/// The factor of the residual stream at the end of a block, `[1]`.
pub(super) const BLOCK_SCALE: &str = "layer_scalar";
/// The sinks of attention, `[heads]`.
pub(super) const SINKS: &str = "self_attn.sinks";
/// Queries of gated attention, which files store with the gate.
pub(super) const QUERY: &str = "self_attn.q_proj.query";
/// The gate of attention.
pub(super) const QUERY_GATE: &str = "self_attn.q_proj.gate";
/// Queries, keys and values of a gated delta net.
pub(super) const DELTA_QKV: &str = "linear_attn.in_proj_qkv";
/// Its other projections.
pub(super) const DELTA_Z: &str = "linear_attn.in_proj_z";
pub(super) const DELTA_B: &str = "linear_attn.in_proj_b";
pub(super) const DELTA_A: &str = "linear_attn.in_proj_a";
pub(super) const DELTA_OUT: &str = "linear_attn.out_proj";
/// The convolution of its queries, keys and values, `[channels, 1, taps]`.
pub(super) const DELTA_CONVOLUTION: &str = "linear_attn.conv1d.weight";
/// Constants of its value heads.
pub(super) const DELTA_A_LOG: &str = "linear_attn.A_log";
pub(super) const DELTA_DT_BIAS: &str = "linear_attn.dt_bias";
/// The norm of its value heads, which is no offset from one in any family.
pub(super) const DELTA_NORM: &str = "linear_attn.norm.weight";

/// The gate of Mamba-2's norm; x, B and C; and time steps: rows of one projection, in this order.
pub(super) const MAMBA_Z: &str = "mixer.in_proj.z";
pub(super) const MAMBA_XBC: &str = "mixer.in_proj.xbc";
pub(super) const MAMBA_DT: &str = "mixer.in_proj.dt";
pub(super) const MAMBA_OUT: &str = "mixer.out_proj";
/// The convolution of x, B and C, `[channels, 1, taps]`, and its bias.
pub(super) const MAMBA_CONVOLUTION: &str = "mixer.conv1d.weight";
pub(super) const MAMBA_CONVOLUTION_BIAS: &str = "mixer.conv1d.bias";
/// Constants of its heads.
pub(super) const MAMBA_A_LOG: &str = "mixer.A_log";
pub(super) const MAMBA_D: &str = "mixer.D";
pub(super) const MAMBA_DT_BIAS: &str = "mixer.dt_bias";
/// The norm of its output.
pub(super) const MAMBA_NORM: &str = "mixer.norm.weight";

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
    /// Whether files store it by its own name. If not, it is always part of another tensor.
    pub alone: bool,
    /// Alternative locations, in the order of the search.
    pub within: Vec<Within>,
}

impl TensorSpec {
    /// The name that a file has for it, or for the tensor that it is part of.
    pub fn stored_name(&self) -> &str {
        match self.within.first() {
            Some(within) if !self.alone => &within.name,
            _ => &self.name,
        }
    }
}

/// The role of a tensor, which determines how it is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorRole {
    /// A norm, a bias, a convolution, or a constant or sink of each head, in f32.
    Vector,
    /// A table for row lookup.
    Table,
    /// A matrix of a product; may be held in 4 bits.
    Linear,
    /// A projection of a recurrent layer, whose errors add up in its state. Quantized to 8 bits, and not while loading.
    Recurrent,
    /// The projection of a drafter's inputs. Held as it is stored, as other engines expect.
    DrafterInput,
    /// A projection of per-layer embeddings, small and read by every block; keeps the precision of its file.
    PerLayer,
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
    /// The rows, with the stored tensor seen as a matrix; for a part with one dimension the elements, with the stored tensor flattened.
    pub rows: StoredRows,
}

/// The name of a tensor of a block.
pub(super) fn block_name(block: usize, name: &str) -> String {
    format!("model.layers.{block}.{name}")
}

/// The prefix of the tensors of a block, by its index in [`Spec::all_blocks`].
pub(super) fn block_prefix(spec: &Spec, index: usize) -> String {
    match index < spec.blocks.len() {
        true => block_name(index, ""),
        false => format!("{DRAFTER}layers.{}.", index - spec.blocks.len()),
    }
}

/// The router of a mixture within a block, without the suffix of its weight `[experts, hidden]` or bias `[experts]`.
pub(super) const fn router(names: ExpertNames) -> &'static str {
    match names {
        ExpertNames::Qwen | ExpertNames::Mixtral => "mlp.gate",
        ExpertNames::GptOss => "mlp.router",
        ExpertNames::Gemma4 => "router.proj",
    }
}

/// All tensors of a model, the embedding first, then the head and the last norm, then per-layer embeddings, then the blocks in order, then
/// the drafter.
pub fn all(spec: &Spec) -> Vec<TensorSpec> {
    let mut tensors = outside(spec);
    tensors.extend(per_layer_table(spec));
    for (index, block) in spec.all_blocks().enumerate() {
        tensors.extend(of_any_block(spec, &block_prefix(spec, index), block));
    }
    if spec.drafter.is_some() {
        tensors.extend(beside_drafter_block(spec));
    }
    tensors
}

/// The tensors of the drafter outside its block.
fn beside_drafter_block(spec: &Spec) -> impl Iterator<Item = TensorSpec> {
    let hidden = spec.hidden_size;
    let norm = |name| (name, vec![hidden], TensorRole::Vector);
    let fc = vec![hidden, 2 * hidden];
    let tensors = [
        (DRAFTER_FC, fc, TensorRole::DrafterInput),
        norm(DRAFTER_EMBEDDING_NORM),
        norm(DRAFTER_HIDDEN_NORM),
        norm(DRAFTER_NORM),
    ];
    tensors.into_iter().map(|(name, shape, role)| TensorSpec {
        name: name.to_owned(),
        shape,
        required: true,
        role,
        alone: true,
        within: Vec::new(),
    })
}

/// All tensors of a model as files name them: those that files always store as parts of one tensor are that tensor, in the place and with
/// the role of its first part. Training has them so.
pub fn whole(spec: &Spec) -> Vec<TensorSpec> {
    let mut whole: Vec<TensorSpec> = Vec::new();
    let mut named = HashSet::new();
    for mut tensor in all(spec) {
        if !tensor.alone {
            // A tensor by its name in the family's files comes before the stack that it may be in.
            if tensor.within.is_empty() {
                continue;
            }
            let of = tensor.within.remove(0);
            (tensor.name, tensor.shape, tensor.alone) = (of.name, of.shape, true);
        }
        if named.insert(tensor.name.clone()) {
            whole.push(tensor);
        }
    }
    whole
}

/// The tensors that a file of a model has, by the names and shapes that it has them in, without optional ones. The role is that of the
/// first tensor that one is part of.
pub fn stored(spec: &Spec) -> Vec<(String, Vec<usize>, TensorRole)> {
    let required = whole(spec).into_iter().filter(|t| t.required);
    required.map(|t| (t.name, t.shape, t.role)).collect()
}

/// Whether a vector is stored as an offset from one.
pub fn is_offset_from_one(spec: &Spec, name: &str) -> bool {
    let is_norm = name.ends_with("norm.weight")
        || [DRAFTER_EMBEDDING_NORM, DRAFTER_HIDDEN_NORM].contains(&name);
    spec.norm_plus_one && is_norm && !name.ends_with(DELTA_NORM)
}

/// Tensors outside the blocks.
pub(super) fn outside(spec: &Spec) -> Vec<TensorSpec> {
    let table = vec![spec.vocab_size, spec.hidden_size];
    let whole = |name: &str, shape, required, role| TensorSpec {
        name: name.to_owned(),
        shape,
        required,
        role,
        alone: true,
        within: Vec::new(),
    };
    let mut embedding = whole(EMBEDDING, table.clone(), true, TensorRole::Table);
    if spec.tied {
        // The table may be stored under either name.
        embedding.within.push(Within {
            name: HEAD.to_owned(),
            shape: table.clone(),
            rows: (0..spec.vocab_size).into(),
        });
    }
    let tensors = [
        embedding,
        whole(HEAD, table, !spec.tied, TensorRole::Linear),
        whole(NORM, vec![spec.hidden_size], true, TensorRole::Vector),
    ];
    tensors
        .map(|tensor| stored_by_name(spec, "", tensor))
        .into()
}

/// Tensors of per-layer embeddings outside the blocks, if the model has them.
fn per_layer_table(spec: &Spec) -> Vec<TensorSpec> {
    let Some(table) = &spec.per_layer_table else {
        return Vec::new();
    };
    let all = spec.blocks.len() * table.width;
    let tensor = |name: &str, shape: &[usize], role| TensorSpec {
        name: name.to_owned(),
        shape: shape.to_vec(),
        required: true,
        role,
        alone: true,
        within: Vec::new(),
    };
    let projection = format!("{PER_LAYER_MODEL}.weight");
    vec![
        tensor(PER_LAYER_TABLE, &[table.vocab_size, all], TensorRole::Table),
        tensor(&projection, &[all, spec.hidden_size], TensorRole::PerLayer),
        tensor(PER_LAYER_NORM, &[table.width], TensorRole::Vector),
    ]
}

/// Tensors of a block.
pub(super) fn of_block(spec: &Spec, index: usize) -> Vec<TensorSpec> {
    of_any_block(spec, &block_prefix(spec, index), &spec.blocks[index])
}

/// Tensors of a block with this prefix.
fn of_any_block(spec: &Spec, prefix: &str, block: &BlockSpec) -> Vec<TensorSpec> {
    let BlockSpec {
        norms,
        mixer,
        mlp,
        per_layer,
        scaled,
    } = block;
    let mut list = List {
        prefix,
        tensors: Vec::new(),
    };
    let names = spec.norm_names;
    let (mixes, has_mlp) = (*mixer != MixerSpec::None, *mlp != MlpSpec::None);
    for (name, has) in [
        (names.mixer, norms.pre && mixes),
        (names.mixer_post, norms.post && mixes),
        (names.mlp, norms.pre && has_mlp),
        (names.mlp_post, norms.post && has_mlp),
    ] {
        if has {
            list.vector(&format!("{name}.weight"), spec.hidden_size, true);
        }
    }
    match mixer {
        MixerSpec::Attention(attention) => {
            let rope = attention.rope.filter(|_| attention.interleaved);
            let interleaved = rope.map(|rope| spec.ropes[rope].table.rotary_dim());
            list.attention(attention, spec.hidden_size, interleaved);
        }
        MixerSpec::GatedDelta(delta) => list.gated_delta(delta, spec.hidden_size),
        MixerSpec::Mamba2(mamba) => list.mamba2(mamba, spec.hidden_size),
        MixerSpec::None => {}
    }
    match mlp {
        MlpSpec::Dense(mlp) => list.dense("mlp", mlp, spec.hidden_size),
        MlpSpec::Experts(experts) => list.experts(experts, spec.hidden_size),
        MlpSpec::DenseAndExperts(dense, experts) => {
            list.dense("mlp", dense, spec.hidden_size);
            list.experts(experts, spec.hidden_size);
            for name in [DENSE_POST, EXPERTS_PRE, EXPERTS_POST] {
                list.vector(name, spec.hidden_size, true);
            }
        }
        MlpSpec::None => {}
    }
    if let Some(own) = per_layer {
        list.matrix(
            PER_LAYER_GATE,
            (own.width, spec.hidden_size),
            TensorRole::PerLayer,
        );
        list.matrix(
            PER_LAYER_OUT,
            (spec.hidden_size, own.width),
            TensorRole::PerLayer,
        );
        list.vector(PER_LAYER_POST, spec.hidden_size, true);
    }
    if *scaled {
        list.vector(BLOCK_SCALE, 1, true);
    }
    let tensors = list.tensors.into_iter();
    tensors
        .map(|tensor| stored_by_name(spec, prefix, tensor))
        .collect()
}

/// A tensor with the names that files of its family have, whose renamed parts follow `prefix`.
fn stored_by_name(spec: &Spec, prefix: &str, mut tensor: TensorSpec) -> TensorSpec {
    let renamed = |name: &str| {
        let name = name.strip_prefix(prefix)?;
        let mut starts = spec.renamed.iter();
        starts.find_map(|(usual, stored)| {
            let rest = name.strip_prefix(usual)?;
            Some(format!("{prefix}{stored}{rest}"))
        })
    };
    for within in &mut tensor.within {
        if let Some(name) = renamed(&within.name) {
            within.name = name;
        }
    }
    if let Some(name) = renamed(&tensor.name).filter(|_| tensor.alone) {
        tensor.alone = false;
        let whole = Within {
            name,
            shape: tensor.shape.clone(),
            rows: (0..tensor.shape[0]).into(),
        };
        tensor.within.insert(0, whole);
    }
    tensor
}

/// The rows of an expert's gate projection (`half` 0) or up projection (1), of `height` rows each, in a stack of both of all experts.
pub(super) fn gate_up_rows(
    names: ExpertNames,
    expert: usize,
    half: usize,
    height: usize,
) -> StoredRows {
    let first = expert * 2 * height;
    match names {
        ExpertNames::Qwen | ExpertNames::Gemma4 | ExpertNames::Mixtral => {
            let first = first + half * height;
            (first..first + height).into()
        }
        ExpertNames::GptOss => StoredRows::new(vec![RowPattern {
            first: first + half,
            run: 1,
            stride: 2,
            runs: height,
        }]),
    }
}

/// The name of a projection of an expert in files that store experts one by one.
pub(super) fn expert_projection(names: ExpertNames, projection: &str) -> &str {
    match (names, projection) {
        (ExpertNames::Mixtral, "gate_proj") => "w1",
        (ExpertNames::Mixtral, "up_proj") => "w3",
        (ExpertNames::Mixtral, "down_proj") => "w2",
        _ => projection,
    }
}

struct List<'a> {
    prefix: &'a str,
    tensors: Vec<TensorSpec>,
}

impl List<'_> {
    /// The name of a tensor of the block.
    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn vector(&mut self, name: &str, len: usize, required: bool) {
        self.tensors.push(TensorSpec {
            name: self.name(name),
            shape: vec![len],
            required,
            role: TensorRole::Vector,
            alone: true,
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
                name: self.name(&format!("{name}.{suffix}")),
                shape: shape(all),
                rows: (first..first + rows).into(),
            });
            self.tensors.push(TensorSpec {
                name: self.name(&format!("{name}.{suffix}")),
                shape: shape(rows),
                required,
                role: match cols {
                    Some(_) => TensorRole::Linear,
                    None => TensorRole::Vector,
                },
                alone: true,
                within: within.into_iter().collect(),
            });
        }
    }

    /// A tensor of this shape that is always some rows of another, `whole`.
    fn part(
        &mut self,
        name: &str,
        shape: &[usize],
        role: TensorRole,
        whole: (&str, &[usize]),
        rows: StoredRows,
    ) {
        let (whole, whole_shape) = whole;
        self.tensors.push(TensorSpec {
            name: self.name(name),
            shape: shape.to_vec(),
            required: true,
            role,
            alone: false,
            within: vec![Within {
                name: self.name(whole),
                shape: whole_shape.to_vec(),
                rows,
            }],
        });
    }

    /// Lets the last tensor, a part of another, be stored alone too.
    fn or_alone(&mut self) {
        if let Some(tensor) = self.tensors.last_mut() {
            tensor.within.push(Within {
                name: tensor.name.clone(),
                shape: tensor.shape.clone(),
                rows: (0..tensor.shape[0]).into(),
            });
        }
    }

    /// The tensors of attention. `interleaved` is the number of rotating rows of a head, for files that interleave them.
    fn attention(&mut self, attention: &AttentionSpec, hidden: usize, interleaved: Option<usize>) {
        let (q, kv) = (attention.q_width(), attention.kv_width());
        // Files store one matrix for all three only where there are three.
        let has_values = attention.key_values == KeyValues::Projected;
        let fused = |first| has_values.then_some(("self_attn.qkv_proj", first, q + 2 * kv));
        let bias = attention.qkv_bias;
        match attention.gated {
            false => self.projection("self_attn.q_proj", (q, hidden), bias, fused(0)),
            true => self.gated_queries(attention, hidden),
        }
        self.interleaved_heads(interleaved, attention.head_dim);
        if attention.has_own_keys() {
            self.projection("self_attn.k_proj", (kv, hidden), bias, fused(q));
            self.interleaved_heads(interleaved, attention.head_dim);
        }
        if has_values {
            self.projection("self_attn.v_proj", (kv, hidden), bias, fused(q + kv));
        }
        self.projection("self_attn.o_proj", (hidden, q), attention.o_bias, None);
        let normalized = match attention.qk_norm {
            QkNorm::None => None,
            QkNorm::Heads | QkNorm::RotatedHeads => Some([attention.head_dim; 2]),
            QkNorm::Projections => Some([q, kv]),
        };
        if let Some([of_query, of_key]) = normalized {
            self.vector("self_attn.q_norm.weight", of_query, true);
            if attention.has_own_keys() {
                self.vector("self_attn.k_norm.weight", of_key, true);
            }
        }
        if attention.sinks {
            self.vector(SINKS, attention.heads, true);
        }
    }

    /// Maps the last projection, weight and bias, to what files store under its name. Its heads have `dim` rows, of which the first `rotated`
    /// are stored interleaved: row 0 and row `rotated / 2`, row 1 and the row after that, and so on.
    fn interleaved_heads(&mut self, rotated: Option<usize>, dim: usize) {
        let Some(rotated) = rotated else { return };
        let half = |first| RowPattern {
            first,
            run: 1,
            stride: 2,
            runs: rotated / 2,
        };
        let rest = RowPattern {
            first: rotated,
            run: dim - rotated,
            stride: dim,
            runs: 1,
        };
        let first = self.tensors.len() - 2;
        for tensor in &mut self.tensors[first..] {
            let heads = tensor.shape[0] / dim;
            tensor.alone = false;
            tensor.within = vec![Within {
                name: tensor.name.clone(),
                shape: tensor.shape.clone(),
                rows: StoredRows::repeated(vec![half(0), half(1), rest], heads, dim),
            }];
        }
    }

    /// The projections of queries and of their heads' gates, which are stored together: the rows of a head's query, then those of its gate.
    fn gated_queries(&mut self, attention: &AttentionSpec, hidden: usize) {
        let (dim, width) = (attention.head_dim, attention.q_width());
        for (name, first) in [(QUERY, 0), (QUERY_GATE, dim)] {
            let rows = StoredRows::new(vec![RowPattern {
                first,
                run: dim,
                stride: 2 * dim,
                runs: attention.heads,
            }]);
            let mut part = |suffix: &str, cols: Option<usize>, role| {
                let shape = |rows| std::iter::once(rows).chain(cols).collect::<Vec<_>>();
                let whole = format!("self_attn.q_proj.{suffix}");
                let whole = (whole.as_str(), &shape(2 * width)[..]);
                let name = format!("{name}.{suffix}");
                self.part(&name, &shape(width), role, whole, rows.clone());
            };
            part("weight", Some(hidden), TensorRole::Linear);
            if attention.qkv_bias {
                part("bias", None, TensorRole::Vector);
            }
        }
    }

    fn gated_delta(&mut self, delta: &GatedDeltaSpec, hidden: usize) {
        let shape = &delta.shape;
        let (channels, values, heads) = (shape.channels(), shape.value_width(), shape.value_heads);
        match delta.projections {
            DeltaProjections::ByRole => {
                for (name, rows) in [
                    (DELTA_QKV, channels),
                    (DELTA_Z, values),
                    (DELTA_B, heads),
                    (DELTA_A, heads),
                ] {
                    self.recurrent(name, rows, hidden);
                }
            }
            DeltaProjections::ByHead => {
                let (dim, shared) = (shape.key_dim, heads / shape.key_heads);
                let run = shared * shape.value_dim;
                // The rows of a key head: its query and key, then the values and gates of its value heads.
                let of_qkv = [(0, dim), (dim, dim), (2 * dim, run)];
                let qkvz = ("linear_attn.in_proj_qkvz.weight", 2 * dim + 2 * run);
                let ba = ("linear_attn.in_proj_ba.weight", 2 * shared);
                let heads = shape.key_heads;
                let mut of_heads = |name: &str, (whole, stride): (&str, usize), runs: &[_]| {
                    let pattern = |&(first, run): &(usize, usize)| RowPattern {
                        first,
                        run,
                        stride,
                        runs: heads,
                    };
                    let stored = StoredRows::new(runs.iter().map(pattern).collect());
                    let whole = (whole, &[heads * stride, hidden][..]);
                    let (name, sizes) = (format!("{name}.weight"), [stored.count(), hidden]);
                    self.part(&name, &sizes, TensorRole::Recurrent, whole, stored);
                    self.or_alone();
                };
                of_heads(DELTA_QKV, qkvz, &of_qkv);
                of_heads(DELTA_Z, qkvz, &[(2 * dim + run, run)]);
                of_heads(DELTA_B, ba, &[(0, shared)]);
                of_heads(DELTA_A, ba, &[(shared, shared)]);
            }
        }
        self.convolution(DELTA_CONVOLUTION, shape.channels(), shape.taps);
        self.vector(DELTA_A_LOG, heads, true);
        self.vector(DELTA_DT_BIAS, heads, true);
        self.vector(DELTA_NORM, shape.value_dim, true);
        self.recurrent(DELTA_OUT, hidden, values);
    }

    fn mamba2(&mut self, mamba: &Mamba2Spec, hidden: usize) {
        let shape = &mamba.shape;
        let (width, channels, heads) = (shape.width(), shape.channels(), shape.heads);
        let (all, first_dt) = (width + channels + heads, width + channels);
        let parts = [
            (MAMBA_Z, 0..width),
            (MAMBA_XBC, width..first_dt),
            (MAMBA_DT, first_dt..all),
        ];
        let weight = ("weight", Some(hidden), TensorRole::Recurrent);
        let bias = mamba.bias.then_some(("bias", None, TensorRole::Vector));
        for (suffix, cols, role) in [weight].into_iter().chain(bias) {
            let shape = |rows| std::iter::once(rows).chain(cols).collect::<Vec<_>>();
            let whole = format!("mixer.in_proj.{suffix}");
            for (name, rows) in &parts {
                let (name, stored) = (format!("{name}.{suffix}"), rows.clone().into());
                let whole = (whole.as_str(), &shape(all)[..]);
                self.part(&name, &shape(rows.len()), role, whole, stored);
            }
        }
        self.convolution(MAMBA_CONVOLUTION, channels, shape.taps);
        if mamba.convolution_bias {
            self.vector(MAMBA_CONVOLUTION_BIAS, channels, true);
        }
        for name in [MAMBA_A_LOG, MAMBA_D, MAMBA_DT_BIAS] {
            self.vector(name, heads, true);
        }
        self.vector(MAMBA_NORM, width, true);
        self.recurrent(MAMBA_OUT, hidden, width);
        if mamba.bias {
            self.vector(&format!("{MAMBA_OUT}.bias"), hidden, true);
        }
    }

    fn convolution(&mut self, name: &str, channels: usize, taps: usize) {
        self.tensors.push(TensorSpec {
            name: self.name(name),
            shape: vec![channels, 1, taps],
            required: true,
            role: TensorRole::Vector,
            alone: true,
            within: Vec::new(),
        });
    }

    /// A projection of a recurrent layer that is stored alone.
    fn recurrent(&mut self, name: &str, rows: usize, cols: usize) {
        self.matrix(name, (rows, cols), TensorRole::Recurrent);
    }

    /// A projection without a bias that is stored alone.
    fn matrix(&mut self, name: &str, (rows, cols): (usize, usize), role: TensorRole) {
        self.tensors.push(TensorSpec {
            name: self.name(&format!("{name}.weight")),
            shape: vec![rows, cols],
            required: true,
            role,
            alone: true,
            within: Vec::new(),
        });
    }

    fn dense(&mut self, name: &str, mlp: &DenseMlpSpec, hidden: usize) {
        let wide = mlp.intermediate_size;
        let fused = format!("{name}.gate_up_proj");
        let of = |first| mlp.gated.then_some((fused.as_str(), first, 2 * wide));
        let projection = |projection: &str| format!("{name}.{projection}");
        if mlp.gated {
            self.projection(&projection("gate_proj"), (wide, hidden), mlp.bias, of(0));
        }
        self.projection(&projection("up_proj"), (wide, hidden), mlp.bias, of(wide));
        self.projection(&projection("down_proj"), (hidden, wide), mlp.bias, None);
    }

    fn experts(&mut self, experts: &ExpertsSpec, hidden: usize) {
        let router = router(experts.names);
        self.router(&format!("{router}.weight"), experts.count, hidden);
        if experts.router_bias {
            self.vector(&format!("{router}.bias"), experts.count, true);
        }
        if experts.router_scaled {
            self.vector(ROUTER_SCALE, hidden, true);
            self.vector(EXPERT_SCALES, experts.count, true);
        }
        if experts.scoring != Scoring::Softmax {
            self.vector(ROUTER_CORRECTION, experts.count, true);
        }
        let wide = experts.expert.intermediate_size;
        let projections = [
            ("gate_proj", wide, hidden),
            ("up_proj", wide, hidden),
            ("down_proj", hidden, wide),
        ];
        let first = usize::from(!experts.expert.gated);
        for (projection, rows, cols) in projections.into_iter().skip(first) {
            for expert in 0..experts.count {
                self.expert(experts, expert, projection, (rows, cols));
            }
        }
        if let Some(SharedExpertSpec { mlp, gated }) = &experts.shared {
            self.dense("mlp.shared_expert", mlp, hidden);
            if *gated {
                self.router(SHARED_GATE, 1, hidden);
            }
        }
    }

    /// A projection of an expert and its bias, alone or within a stack of all experts.
    fn expert(
        &mut self,
        experts: &ExpertsSpec,
        expert: usize,
        projection: &str,
        (rows, cols): (usize, usize),
    ) {
        let alone: StoredRows = (expert * rows..(expert + 1) * rows).into();
        let half = |half| gate_up_rows(experts.names, expert, half, rows);
        let (stack, height, of_stack) = match projection {
            "gate_proj" => ("gate_up_proj", 2 * rows, half(0)),
            "up_proj" if experts.expert.gated => ("gate_up_proj", 2 * rows, half(1)),
            projection => (projection, rows, alone.clone()),
        };
        let within = |name: &str, shape: Vec<usize>, rows: &StoredRows| Within {
            name: self.name(&format!("mlp.experts.{name}")),
            shape,
            rows: rows.clone(),
        };
        let shape = |height| vec![experts.count, height, cols];
        let stacks = [
            within(&format!("{projection}.weight"), shape(rows), &alone),
            within(stack, shape(height), &of_stack),
        ];
        let weights = match experts.names {
            ExpertNames::Qwen | ExpertNames::Gemma4 => stacks.into(),
            ExpertNames::Mixtral => {
                let own = expert_projection(experts.names, projection);
                let name = format!("{expert}.{own}.weight");
                let one = within(&name, vec![rows, cols], &(0..rows).into());
                [one].into_iter().chain(stacks).collect()
            }
            // A checkpoint gives the stack this name, and its matrices row by row, however the file stores them. GGUF has gates and ups apart.
            ExpertNames::GptOss => vec![
                within(&format!("{stack}.weight"), shape(height), &of_stack),
                within(&format!("{projection}.weight"), shape(rows), &alone),
            ],
        };
        let biases = vec![
            within(
                &format!("{stack}_bias"),
                vec![experts.count, height],
                &of_stack,
            ),
            within(
                &format!("{projection}.bias"),
                vec![experts.count, rows],
                &alone,
            ),
        ];
        let name = self.name(&format!("mlp.experts.{expert}.{projection}"));
        self.tensors.push(TensorSpec {
            name: format!("{name}.weight"),
            shape: vec![rows, cols],
            required: true,
            role: TensorRole::Linear,
            alone: experts.names != ExpertNames::Mixtral,
            within: weights,
        });
        if experts.expert.bias {
            self.tensors.push(TensorSpec {
                name: format!("{name}.bias"),
                shape: vec![rows],
                required: true,
                role: TensorRole::Vector,
                alone: true,
                within: biases,
            });
        }
    }

    fn router(&mut self, name: &str, rows: usize, hidden: usize) {
        self.tensors.push(TensorSpec {
            name: self.name(name),
            shape: vec![rows, hidden],
            required: true,
            role: TensorRole::Router,
            alone: true,
            within: Vec::new(),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gates_and_ups_of_an_expert_follow_each_other_or_alternate() {
        let stored = |rows: &StoredRows| -> Vec<usize> {
            rows.parts(0..rows.count())
                .flat_map(|(_, part)| part)
                .collect()
        };
        let [gate, up] = [0, 1].map(|half| gate_up_rows(ExpertNames::GptOss, 1, half, 4));
        assert_eq!(stored(&gate), [8, 10, 12, 14]);
        assert_eq!(stored(&up), [9, 11, 13, 15]);
        // Two of them, and the one between.
        assert_eq!(up.alternating(&(1..3)), Some(11..14));
        assert_eq!(up.alternating(&(2..2)), None);
        let [gate, up] = [0, 1].map(|half| gate_up_rows(ExpertNames::Qwen, 1, half, 4));
        assert_eq!(stored(&gate), [8, 9, 10, 11]);
        assert_eq!(stored(&up), [12, 13, 14, 15]);
        assert_eq!(up.alternating(&(0..4)), None);
    }
}
