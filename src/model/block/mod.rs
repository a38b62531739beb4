//! The reference block: mixer and MLP of any [`BlockSpec`](super::spec::BlockSpec), built from operations on arrays of either device.
//! Inference on the CPU uses it, and the fused kernels of a GPU are tested against it. It runs the operations of `order` on rows of the
//! residual stream.

mod adapters;
mod beside;
mod drafter;
mod mamba;
mod per_layer;
mod widths;

use adapters::{AdaptedRows, InputRows, Products};
pub(super) use drafter::hidden_rows;
use widths::ARRAYS;
pub(super) use widths::RowWidths;

use std::ops::Range;

use super::Activations;
use super::adapter::Adapter;
use super::kv::{KvCache, KvTables, StateArena, StateBlocks, StatePart};
use super::order::{BlockOp, ExpertTurn, Half, expert_turns, operations};
use super::spec::{
    Activation, AttentionSpec, DenseMlpSpec, ExpertsSpec, GatedDeltaSpec, KeyValues, MixerSpec,
    MlpSpec, QkNorm, Scoring, Spec,
};
use super::weights::{
    Attention, Block, DenseMlp, Experts, GatedDelta, Mixer, Mlp, Projection, Weights,
};
use crate::base::error::{bail, err};
use crate::base::{Error, Result, memory};
use crate::ops::delta::{self, DeltaRuleRows};
use crate::ops::experts::{RoutedRows, Routes, check_logits, route, route_by_sigmoid};
use crate::ops::linear::{Linear, linear};
use crate::ops::rope::Angles;
use crate::ops::{Array, Device, Slice, SliceMut, Workspace, activation, norm, rope};

/// Rows of one sequence within a pass.
pub(super) struct Rows<'a> {
    pub(super) cache: &'a KvCache,
    pub(super) tables: &'a KvTables,
    /// The positions after which its recurrent state is written, in parts of the rows, and the blocks; empty if the model has no such
    /// state.
    pub(super) states: Vec<(Range<usize>, StateBlocks)>,
    /// Positions that the sequence may come to.
    pub(super) context: usize,
    /// The adapter of the sequence, if it has one.
    pub(super) adapter: Option<&'a Adapter>,
    /// Position of the first row.
    pub(super) first: usize,
    /// The rows of the pass.
    pub(super) rows: Range<usize>,
}

impl Rows<'_> {
    /// The arena of its recurrent state, and the parts of its rows after which the state is written.
    fn states(&self) -> Result<(&StateArena, impl Iterator<Item = (PartRows, StateBlocks)>)> {
        let Some(arena) = self.cache.state().filter(|_| !self.states.is_empty()) else {
            bail!(Internal, "rows of a recurrent layer have no state");
        };
        let before = self.rows.start;
        let parts = self.states.iter().map(move |(positions, blocks)| {
            let start = before + positions.start - self.first;
            (PartRows(start..start + positions.len()), *blocks)
        });
        Ok((arena, parts))
    }
}

/// Rows of one sequence that change its recurrent state together.
struct PartRows(Range<usize>);

impl PartRows {
    /// Its elements of rows of `width`.
    fn elements(&self, width: usize) -> Range<usize> {
        self.0.start * width..self.0.end * width
    }
}

/// Memory reused between passes, by one caller at a time. It grows to the largest pass seen.
#[derive(Debug)]
pub(super) struct BlockScratch {
    products: Products,
    /// `[rows, hidden]`: the residual stream.
    pub(super) residual: Array,
    /// `[rows, hidden]`: the input of a half of a block, and later its output.
    normed: Array,
    /// `[rows, q_width]`: queries; `[rows, channels]`: queries, keys and values of a gated delta net, or x, B and C of Mamba-2.
    q: Array,
    k: Array,
    v: Array,
    /// `[rows, q_width]`: the gate of attention; `[rows, value_width]`: that of a gated delta net or of Mamba-2. Then the output of the
    /// mixer.
    head_gate: Array,
    /// `[rows, value_heads]`: the decay, and the share of a correction of a gated delta net or the time step of Mamba-2.
    decay: Array,
    beta: Array,
    attended: Array,
    gate: Array,
    up: Array,
    /// `[rows, 2 * hidden]`: the inputs of the drafter's projection.
    joined: Array,
    experts: ExpertScratch,
    /// `[rows, blocks * width]`: the projections of embeddings in models with per-layer embeddings.
    layer_projections: Array,
    /// `[blocks, rows, width]`: the blocks' own inputs in such models.
    layer_inputs: Array,
    /// Rows with router logits that are not finite, since the caller last took this list.
    pub(super) faults: Vec<(usize, Error)>,
}

/// Extra scratch for mixture-of-experts blocks.
#[derive(Debug)]
struct ExpertScratch {
    /// The router's logits, `[rows, experts]`.
    logits: Array,
    /// The experts of each row, from [`BlockOp::Route`] to [`BlockOp::Experts`].
    routes: Option<Routes>,
    /// The rows of one expert, `[rows, hidden]`.
    taken: Array,
    /// The output of one expert, `[rows, hidden]`.
    made: Array,
    /// The sum over experts, `[rows, hidden]`.
    sum: Array,
    /// The output of the dense MLP beside experts, `[rows, hidden]`, from [`BlockOp::EnterExperts`] to [`BlockOp::LeaveExperts`].
    beside: Array,
}

impl BlockScratch {
    /// Empty scratch memory.
    pub(super) fn new() -> Self {
        BlockScratch {
            products: Products::default(),
            residual: Array::empty(),
            normed: Array::empty(),
            q: Array::empty(),
            k: Array::empty(),
            v: Array::empty(),
            head_gate: Array::empty(),
            decay: Array::empty(),
            beta: Array::empty(),
            attended: Array::empty(),
            gate: Array::empty(),
            up: Array::empty(),
            joined: Array::empty(),
            experts: ExpertScratch {
                logits: Array::empty(),
                routes: None,
                taken: Array::empty(),
                made: Array::empty(),
                sum: Array::empty(),
                beside: Array::empty(),
            },
            layer_projections: Array::empty(),
            layer_inputs: Array::empty(),
            faults: Vec::new(),
        }
    }

    /// Makes room for `rows` rows of a model with these widths. Arrays that were shorter lose their contents.
    fn fit(&mut self, device: &Device, widths: &RowWidths, rows: usize) -> Result<()> {
        let arrays = self.arrays_mut().into_iter().zip(widths.of_arrays());
        for (array, width) in arrays {
            array.grow(device, rows * width)?;
        }
        Ok(())
    }

    fn arrays_mut(&mut self) -> [&mut Array; ARRAYS] {
        let experts = &mut self.experts;
        [
            &mut self.residual,
            &mut self.normed,
            &mut self.q,
            &mut self.k,
            &mut self.v,
            &mut self.head_gate,
            &mut self.decay,
            &mut self.beta,
            &mut self.attended,
            &mut self.gate,
            &mut self.up,
            &mut self.joined,
            &mut self.layer_projections,
            &mut self.layer_inputs,
            &mut experts.logits,
            &mut experts.taken,
            &mut experts.made,
            &mut experts.sum,
            &mut experts.beside,
        ]
    }

    /// The first row that [`head`] normalized last, `[hidden]`, of a model on the CPU.
    pub(super) fn normed_row(&self, width: usize) -> Result<Vec<f32>> {
        Ok(self.normed.first(width)?.host()?.to_vec())
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        let experts = &self.experts;
        let arrays: [&Array; ARRAYS] = [
            &self.residual,
            &self.normed,
            &self.q,
            &self.k,
            &self.v,
            &self.head_gate,
            &self.decay,
            &self.beta,
            &self.attended,
            &self.gate,
            &self.up,
            &self.joined,
            &self.layer_projections,
            &self.layer_inputs,
            &experts.logits,
            &experts.taken,
            &experts.made,
            &experts.sum,
            &experts.beside,
        ];
        self.products.bytes() + arrays.iter().map(|a| a.bytes()).sum::<usize>()
    }
}

/// A pass: rows that run through the blocks together.
pub(super) struct ReferencePass<'a> {
    device: &'a Device,
    spec: &'a Spec,
    activations: Activations,
    rows: usize,
    /// The rows with adapters, adapter by adapter.
    adapted: Vec<AdaptedRows<'a>>,
    /// Indexed like [`Spec::ropes`].
    angles: Vec<Angles>,
}

impl<'a> ReferencePass<'a> {
    /// A pass of the rows of these segments.
    pub(super) fn new(
        device: &'a Device,
        spec: &'a Spec,
        activations: Activations,
        segments: &[Rows<'a>],
    ) -> Result<ReferencePass<'a>> {
        let mut angles = Vec::with_capacity(spec.ropes.len());
        for set in &spec.ropes {
            let positions = segments.iter().flat_map(|segment| {
                let (table, first) = (set.table(segment.context), segment.first);
                (first..first + segment.rows.len()).map(move |p| (table, p as u32))
            });
            angles.push(Angles::new(device, positions)?);
        }
        Ok(ReferencePass {
            device,
            spec,
            activations,
            rows: segments.iter().map(|s| s.rows.len()).sum(),
            adapted: adapters::adapted_rows(segments.iter().map(|s| (s.adapter, s.rows.clone()))),
            angles,
        })
    }

    /// Sets the residual stream to the embeddings of `tokens`, and computes the inputs of blocks that have their own.
    pub(super) fn embed(
        &self,
        weights: &Weights,
        tokens: &[u32],
        s: &mut BlockScratch,
    ) -> Result<()> {
        let len = tokens.len() * self.spec.hidden_size;
        s.fit(self.device, &RowWidths::of(self.spec), self.rows)?;
        let mut rows = s.residual.first_mut(len)?;
        match rows.reborrow() {
            SliceMut::Host(rows) => weights.embed(tokens, rows)?,
            rows @ SliceMut::Cuda(_) => {
                let mut host = memory::zeros(len)?;
                weights.embed(tokens, &mut host)?;
                rows.copy_from(Slice::Host(&host))?;
            }
        }
        match self.spec.stream_scale() {
            1.0 => {}
            factor => activation::scale(self.device, rows, factor)?,
        }
        self.per_layer_inputs(weights, tokens, s)
    }

    /// Runs the rows of the residual stream through block `index` of [`Spec::all_blocks`], and stores their keys and values.
    pub(super) fn block(
        &self,
        index: usize,
        weights: &Block,
        segments: &[Rows<'_>],
        s: &mut BlockScratch,
    ) -> Result<()> {
        let spec = self.spec.block(index)?;
        let mlp = || match (&weights.mlp, &spec.mlp) {
            (Mlp::Dense(weights), MlpSpec::Dense(spec)) => Ok((spec, &**weights)),
            (Mlp::DenseAndExperts(weights), MlpSpec::DenseAndExperts(spec, _)) => {
                Ok((spec, &weights.dense))
            }
            _ => Err(self.mismatch("MLP", index)),
        };
        let mixture = || match (&weights.mlp, &spec.mlp) {
            (Mlp::Experts(weights), MlpSpec::Experts(spec)) => Ok((spec, &**weights)),
            (Mlp::DenseAndExperts(weights), MlpSpec::DenseAndExperts(_, spec)) => {
                Ok((spec, &weights.experts))
            }
            _ => Err(self.mismatch("MLP", index)),
        };
        let attention = || match (&spec.mixer, &weights.mixer) {
            (MixerSpec::Attention(spec), Mixer::Attention(weights)) => Ok((spec, &**weights)),
            _ => Err(self.mismatch("mixer", index)),
        };
        let delta = || match (&spec.mixer, &weights.mixer) {
            (MixerSpec::GatedDelta(spec), Mixer::GatedDelta(weights)) => Ok((spec, &**weights)),
            _ => Err(self.mismatch("mixer", index)),
        };
        let mamba = || match (&spec.mixer, &weights.mixer) {
            (MixerSpec::Mamba2(spec), Mixer::Mamba2(weights)) => Ok((spec, &**weights)),
            _ => Err(self.mismatch("mixer", index)),
        };
        let beside = || match &weights.mlp {
            Mlp::DenseAndExperts(weights) => Ok(&**weights),
            _ => Err(self.mismatch("MLP", index)),
        };
        let own = || match (&spec.per_layer, &weights.per_layer) {
            (Some(spec), Some(weights)) => Ok((spec, weights)),
            _ => Err(self.mismatch("input", index)),
        };
        let norms = |half| match half {
            Half::Mixer => &weights.mixer_norms,
            Half::Mlp => &weights.mlp_norms,
        };
        for op in operations(spec) {
            match op {
                BlockOp::Enter(half) => self.enter(norms(half).pre.as_ref(), s)?,
                BlockOp::Qkv => self.qkv(attention()?, s)?,
                BlockOp::Heads => self.heads(attention()?, s)?,
                BlockOp::Attend => self.attend(index, attention()?, segments, s)?,
                BlockOp::GateHeads => self.gate_heads(attention()?.0, s)?,
                BlockOp::DeltaInputs => self.delta_inputs(delta()?, s)?,
                BlockOp::Convolve => self.convolve(index, delta()?, segments, s)?,
                BlockOp::DeltaRule => self.delta_rule(index, delta()?.0, segments, s)?,
                BlockOp::DeltaNorm => self.delta_norm(delta()?, s)?,
                BlockOp::MambaInputs => self.mamba_inputs(mamba()?, s)?,
                BlockOp::MambaConvolve => self.mamba_convolve(index, mamba()?, segments, s)?,
                BlockOp::MambaScan => self.mamba_scan(index, mamba()?, segments, s)?,
                BlockOp::MambaNorm => self.mamba_norm(mamba()?, s)?,
                BlockOp::Project(Half::Mixer) => self.output(weights, s)?,
                BlockOp::GateUp => {
                    let BlockScratch {
                        products,
                        normed,
                        gate,
                        up,
                        ..
                    } = s;
                    self.gate_up(mlp()?, (normed, self.all_rows()), (gate, up), products)?;
                }
                BlockOp::Activate => self.activate(mlp()?.0, self.rows, (&mut s.gate, &s.up))?,
                BlockOp::Project(Half::Mlp) => {
                    let BlockScratch {
                        products,
                        normed,
                        gate,
                        ..
                    } = s;
                    let out = normed.first_mut(self.rows * self.spec.hidden_size)?;
                    self.down(mlp()?, (gate, self.all_rows()), out, products)?;
                }
                BlockOp::Route => s.experts.routes = Some(self.route(mixture()?, s)?),
                BlockOp::Experts => self.experts(mixture()?, s)?,
                BlockOp::EnterExperts => self.enter_experts(beside()?, s)?,
                BlockOp::LeaveExperts => self.leave_experts(beside()?, s)?,
                BlockOp::Leave(half) => self.leave(norms(half).post.as_ref(), s)?,
                BlockOp::PerLayerGate => self.per_layer_gate(index, own()?, s)?,
                BlockOp::PerLayerProject => self.per_layer_project(own()?, s)?,
                BlockOp::PerLayerLeave => self.leave(Some(&own()?.1.norm), s)?,
                BlockOp::ScaleStream => self.scale_stream(weights, s)?,
            }
        }
        Ok(())
    }

    fn mismatch(&self, what: &str, index: usize) -> Error {
        err!(
            Internal,
            "the {what} of block {index} is not what its spec says"
        )
    }

    /// Computes the input of a half of a block in `normed`.
    fn enter(&self, norm: Option<&Array>, s: &mut BlockScratch) -> Result<()> {
        let len = self.rows * self.spec.hidden_size;
        let (x, normed) = (s.residual.first(len)?, s.normed.first_mut(len)?);
        match norm {
            Some(weight) => norm::rms_norm(self.device, x, weight, self.spec.norm_eps, normed),
            None => normed.copy_from(x),
        }
    }

    /// Adds the output of a half of a block, in `normed`, to the residual stream.
    fn leave(&self, norm: Option<&Array>, s: &mut BlockScratch) -> Result<()> {
        let len = self.rows * self.spec.hidden_size;
        let (device, eps) = (self.device, self.spec.norm_eps);
        if let Some(weight) = norm {
            norm::rms_norm_in_place(device, s.normed.first_mut(len)?, weight, eps)?;
        }
        activation::add(device, s.residual.first_mut(len)?, s.normed.first(len)?)
    }

    /// Multiplies the residual stream by the block's factor.
    fn scale_stream(&self, weights: &Block, s: &mut BlockScratch) -> Result<()> {
        let Some(scale) = &weights.scale else {
            bail!(Internal, "a block without the factor that its spec has");
        };
        let mut factor = [0.0];
        scale.all().read(&mut factor)?;
        let stream = s.residual.first_mut(self.rows * self.spec.hidden_size)?;
        activation::scale(self.device, stream, factor[0])
    }

    fn qkv(
        &self,
        (spec, weights): (&AttentionSpec, &Attention),
        s: &mut BlockScratch,
    ) -> Result<()> {
        let (m, q_len, kv_len) = (
            self.rows,
            self.rows * spec.q_width(),
            self.rows * spec.kv_width(),
        );
        let mut outputs = vec![(&weights.q, s.q.first_mut(q_len)?)];
        if let Some(k) = &weights.k {
            outputs.push((k, s.k.first_mut(kv_len)?));
        }
        if let Some(v) = &weights.v {
            outputs.push((v, s.v.first_mut(kv_len)?));
        }
        if let Some(gate) = &weights.gate {
            outputs.push((gate, s.head_gate.first_mut(q_len)?));
        }
        let x = s.normed.first(m * self.spec.hidden_size)?;
        self.project(x, self.all_rows(), &mut outputs, &mut s.products)?;
        match spec.key_values {
            KeyValues::KeysAsValues => s.v.first_mut(kv_len)?.copy_from(s.k.first(kv_len)?),
            KeyValues::Projected | KeyValues::OfBlock(_) => Ok(()),
        }
    }

    fn heads(
        &self,
        (spec, weights): (&AttentionSpec, &Attention),
        s: &mut BlockScratch,
    ) -> Result<()> {
        let angles = spec.rope.map(|rope| &self.angles[rope]);
        let rotates_first = spec.qk_norm == QkNorm::RotatedHeads;
        let keys = (&mut s.k, spec.kv_heads, &weights.k_norm);
        let keys = Some(keys).filter(|_| spec.has_own_keys());
        for (x, heads, weight) in [(&mut s.q, spec.heads, &weights.q_norm)]
            .into_iter()
            .chain(keys)
        {
            let mut x = x.first_mut(self.rows * heads * spec.head_dim)?;
            for normalizes in [!rotates_first, rotates_first] {
                let (device, x) = (self.device, x.reborrow());
                match (normalizes, weight, angles) {
                    (true, Some(w), _) => {
                        norm::rms_norm_in_place(device, x, w, self.spec.norm_eps)?
                    }
                    (false, _, Some(a)) => rope::apply(device, x, heads, spec.head_dim, a)?,
                    _ => {}
                }
            }
        }
        if let Some(angles) = angles {
            let (width, queries) = (spec.q_width(), &mut s.q);
            let queries = queries.first_mut(self.rows * width)?;
            rope::grow(self.device, queries, width, angles)?;
        }
        match &weights.v_norm {
            Some(ones) => {
                let values = s.v.first_mut(self.rows * spec.kv_width())?;
                norm::rms_norm_in_place(self.device, values, ones, self.spec.norm_eps)
            }
            None => Ok(()),
        }
    }

    fn attend(
        &self,
        index: usize,
        (spec, weights): (&AttentionSpec, &Attention),
        segments: &[Rows<'_>],
        s: &mut BlockScratch,
    ) -> Result<()> {
        let (device, q_width, kv_width) = (self.device, spec.q_width(), spec.kv_width());
        let shape = spec.shape();
        let sinks = weights.sinks.as_ref().map(Array::all);
        for segment in segments {
            let (first, rows) = (segment.first, segment.rows.clone());
            let kv_rows = rows.start * kv_width..rows.end * kv_width;
            let q_rows = rows.start * q_width..rows.end * q_width;
            let Rows { cache, tables, .. } = *segment;
            if spec.has_own_keys() {
                let (k, v) = (s.k.part(kv_rows.clone())?, s.v.part(kv_rows)?);
                cache.store(index, tables, first, k, v)?;
            }
            cache.attend(
                device,
                spec.cached_in(index),
                tables,
                s.q.part(q_rows.clone())?,
                &shape,
                sinks,
                first,
                s.attended.part_mut(q_rows)?,
                &mut s.products.workspace,
            )?;
        }
        Ok(())
    }

    /// Multiplies what was attended to by the sigmoid of its gate, in the gate's memory.
    fn gate_heads(&self, spec: &AttentionSpec, s: &mut BlockScratch) -> Result<()> {
        let len = self.rows * spec.q_width();
        let (gate, x) = (s.head_gate.first_mut(len)?, s.attended.first(len)?);
        activation::sigmoid_gate(self.device, gate, x)
    }

    fn delta_inputs(
        &self,
        (spec, weights): (&GatedDeltaSpec, &GatedDelta),
        s: &mut BlockScratch,
    ) -> Result<()> {
        let (m, shape) = (self.rows, &spec.shape);
        let (channels, values) = (m * shape.channels(), m * shape.value_width());
        let heads = m * shape.value_heads;
        self.project(
            s.normed.first(m * self.spec.hidden_size)?,
            self.all_rows(),
            &mut [
                (&weights.qkv, s.q.first_mut(channels)?),
                (&weights.z, s.head_gate.first_mut(values)?),
                (&weights.a, s.decay.first_mut(heads)?),
                (&weights.b, s.beta.first_mut(heads)?),
            ],
            &mut s.products,
        )?;
        let (a, b) = (s.decay.first_mut(heads)?, s.beta.first_mut(heads)?);
        delta::gates(self.device, &weights.heads, a, b)
    }

    /// Convolves queries, keys and values, and normalizes queries and keys.
    fn convolve(
        &self,
        index: usize,
        (spec, weights): (&GatedDeltaSpec, &GatedDelta),
        segments: &[Rows<'_>],
        s: &mut BlockScratch,
    ) -> Result<()> {
        let shape = &spec.shape;
        update_states(index, StatePart::History, segments, |rows, history| {
            let qkv = s.q.part_mut(rows.elements(shape.channels()))?;
            delta::convolve(self.device, shape, &weights.heads, qkv, history)
        })
    }

    fn delta_rule(
        &self,
        index: usize,
        spec: &GatedDeltaSpec,
        segments: &[Rows<'_>],
        s: &mut BlockScratch,
    ) -> Result<()> {
        let shape = &spec.shape;
        update_states(index, StatePart::Matrices, segments, |rows, state| {
            let heads = rows.elements(shape.value_heads);
            let out = rows.elements(shape.value_width());
            let rows = DeltaRuleRows {
                qkv: s.q.part(rows.elements(shape.channels()))?.host()?,
                decay: s.decay.part(heads.clone())?.host()?,
                beta: s.beta.part(heads)?.host()?,
                out: s.attended.part_mut(out)?.host()?,
            };
            delta::delta_rule(self.device, shape, rows, state)
        })
    }

    /// Normalizes the heads of a gated delta net and multiplies them by `silu` of their gate, in the gate's memory.
    fn delta_norm(
        &self,
        (spec, weights): (&GatedDeltaSpec, &GatedDelta),
        s: &mut BlockScratch,
    ) -> Result<()> {
        let (device, len) = (self.device, self.rows * spec.shape.value_width());
        let x = s.attended.first_mut(len)?;
        norm::rms_norm_in_place(device, x, &weights.norm, self.spec.norm_eps)?;
        let (gate, x) = (s.head_gate.first_mut(len)?, s.attended.first(len)?);
        activation::glu(device, Activation::Silu, gate, x)
    }

    /// The last projection of the mixer.
    fn output(&self, weights: &Block, s: &mut BlockScratch) -> Result<()> {
        let (m, hidden) = (self.rows, self.spec.hidden_size);
        let projection = weights.mixer.last()?;
        let x = match &weights.mixer {
            Mixer::Attention(attention) if attention.gate.is_none() => &s.attended,
            _ => &s.head_gate,
        };
        self.project(
            x.first(m * projection.linear.cols())?,
            self.all_rows(),
            &mut [(projection, s.normed.first_mut(m * hidden)?)],
            &mut s.products,
        )
    }

    /// Gate and up projections of the first rows of `x`. Without a gate, `up` has the memory of `gate`.
    fn gate_up(
        &self,
        (spec, weights): (&DenseMlpSpec, &DenseMlp),
        (x, rows): (&Array, InputRows<'_>),
        (gate, up): (&mut Array, &mut Array),
        products: &mut Products,
    ) -> Result<()> {
        let len = rows.count * spec.intermediate_size;
        let x = x.first(rows.count * self.spec.hidden_size)?;
        let Some(weight) = &weights.gate else {
            let outputs = &mut [(&weights.up, gate.first_mut(len)?)];
            return self.project(x, rows, outputs, products);
        };
        let outputs = &mut [
            (weight, gate.first_mut(len)?),
            (&weights.up, up.first_mut(len)?),
        ];
        self.project(x, rows, outputs, products)
    }

    /// Applies the activation to `m` rows of gate and up, in `gate`.
    fn activate(
        &self,
        spec: &DenseMlpSpec,
        m: usize,
        (gate, up): (&mut Array, &Array),
    ) -> Result<()> {
        let len = m * spec.intermediate_size;
        let gate = gate.first_mut(len)?;
        match spec.gated {
            true => activation::glu(self.device, spec.activation, gate, up.first(len)?),
            false => activation::activate(self.device, spec.activation, gate),
        }
    }

    fn down(
        &self,
        (spec, weights): (&DenseMlpSpec, &DenseMlp),
        (inner, rows): (&Array, InputRows<'_>),
        out: SliceMut<'_>,
        products: &mut Products,
    ) -> Result<()> {
        let inner = inner.first(rows.count * spec.intermediate_size)?;
        self.project(inner, rows, &mut [(&weights.down, out)], products)
    }

    /// Computes the sum of a mixture's experts in `normed`. The experts run in order, each on its own rows, so that a row's sum does not
    /// depend on other rows.
    fn experts(
        &self,
        (spec, weights): (&ExpertsSpec, &Experts),
        s: &mut BlockScratch,
    ) -> Result<()> {
        let (device, m, hidden) = (self.device, self.rows, self.spec.hidden_size);
        let Some(routes) = s.experts.routes.take() else {
            bail!(Internal, "experts of rows that were not routed");
        };
        let routed = RoutedRows::new(device, routes)?;
        let every_row = match &weights.shared {
            Some((_, gate)) => {
                let gate = gate.as_ref().map(|gate| self.products(gate, 1, s));
                Routes::shared(m, gate.transpose()?.as_deref())
            }
            None => Routes::none(),
        };
        let every_row = RoutedRows::new(device, every_row)?;
        let BlockScratch {
            products,
            normed,
            gate,
            up,
            experts,
            ..
        } = s;
        let ExpertScratch {
            taken, made, sum, ..
        } = experts;
        activation::fill(device, sum.first_mut(m * hidden)?, 0.0)?;
        for turn in expert_turns(spec) {
            let x = normed.first(m * hidden)?;
            let (rows, expert, mlp) = match (turn, &spec.shared, &weights.shared) {
                (ExpertTurn::Routed(expert), ..) => {
                    (&routed, expert, (&spec.expert, &weights.experts[expert]))
                }
                (ExpertTurn::Shared, Some(shared), Some((mlp, _))) => {
                    (&every_row, 0, (&shared.mlp, mlp))
                }
                _ => bail!(Internal, "an expert of every row without weights"),
            };
            let n = rows.routes().count(expert);
            if n == 0 {
                continue;
            }
            rows.take(device, expert, x, hidden, taken.first_mut(n * hidden)?)?;
            let of_expert = rows.routes().of(expert).map(|(row, _)| row);
            let adapted = adapters::taken(&self.adapted, of_expert);
            let inputs = InputRows {
                count: n,
                adapted: &adapted,
            };
            self.gate_up(mlp, (taken, inputs), (gate, up), products)?;
            self.activate(mlp.0, n, (gate, up))?;
            let out = made.first_mut(n * hidden)?;
            self.down(mlp, (gate, inputs), out, products)?;
            let (made, sum) = (made.first(n * hidden)?, sum.first_mut(m * hidden)?);
            rows.add(device, expert, made, hidden, sum)?;
        }
        let sum = sum.first(m * hidden)?;
        normed.first_mut(m * hidden)?.copy_from(sum)
    }

    /// Routes each row to its experts.
    fn route(
        &self,
        (spec, weights): (&ExpertsSpec, &Experts),
        s: &mut BlockScratch,
    ) -> Result<Routes> {
        let mut logits = self.router_logits((spec, weights), s)?;
        if let Some(bias) = &weights.router.bias {
            let bias = on_host(bias, spec.count)?;
            for logits in logits.chunks_exact_mut(spec.count) {
                logits.iter_mut().zip(&bias).for_each(|(x, b)| *x += b);
            }
        }
        for (row, logits) in logits.chunks_exact_mut(spec.count).enumerate() {
            if let Err(fault) = check_logits(logits) {
                // The row continues as if all experts were equal, so that the other rows can finish.
                logits.fill(0.0);
                s.faults.push((row, fault));
            }
        }
        match (&spec.scoring, &weights.correction) {
            (Scoring::Softmax, _) => {
                let routes = route(&logits, spec.count, spec.per_token, spec.normalized)?;
                match &weights.router_scales {
                    Some([_, factors]) => routes.scaled(&on_host(factors, spec.count)?),
                    None => Ok(routes),
                }
            }
            (Scoring::Sigmoid(scoring), Some(correction)) => {
                let correction = on_host(correction, spec.count)?;
                route_by_sigmoid(
                    &logits,
                    spec.per_token,
                    spec.normalized,
                    scoring,
                    &correction,
                )
            }
            (Scoring::Sigmoid(_), None) => {
                bail!(
                    Internal,
                    "a router by sigmoids without the correction of its scores"
                )
            }
        }
    }

    /// Multiplies `normed` with the rows of a small matrix; the result is on the host.
    fn products(&self, weight: &Linear, rows: usize, s: &mut BlockScratch) -> Result<Vec<f32>> {
        let (device, m) = (self.device, self.rows);
        let logits = &mut s.experts.logits;
        let x = s.normed.first(m * self.spec.hidden_size)?;
        let outputs = &mut [(weight, logits.first_mut(m * rows)?)];
        let workspace = &mut s.products.workspace;
        linear(device, x, m, outputs, self.activations, workspace)?;
        let mut values = vec![0.0; m * rows];
        logits.first(m * rows)?.read(&mut values)?;
        Ok(values)
    }

    /// All rows of the pass, as the input of projections.
    fn all_rows(&self) -> InputRows<'_> {
        InputRows {
            count: self.rows,
            adapted: &self.adapted,
        }
    }

    /// Applies projections that share an input, their biases, and the adapters of rows that have one.
    fn project(
        &self,
        x: Slice<'_>,
        rows: InputRows<'_>,
        outputs: &mut [(&Projection, SliceMut<'_>)],
        products: &mut Products,
    ) -> Result<()> {
        let (device, activations) = (self.device, self.activations);
        let workspace = &mut products.workspace;
        project(device, activations, x, rows.count, outputs, workspace)?;
        for adapted in rows.adapted {
            adapted.add(device, x, rows.count, outputs, products)?;
        }
        Ok(())
    }
}

/// A vector of `len` numbers, from the memory of either device.
fn on_host(vector: &Array, len: usize) -> Result<Vec<f32>> {
    let mut values = memory::zeros(len)?;
    vector.all().read(&mut values)?;
    Ok(values)
}

/// Changes a part of the state of each segment in the recurrent layer of block `index`, for all rows after which it is written.
fn update_states(
    index: usize,
    part: StatePart,
    segments: &[Rows<'_>],
    mut change: impl FnMut(&PartRows, &mut [f32]) -> Result<()>,
) -> Result<()> {
    for segment in segments {
        let (arena, parts) = segment.states()?;
        for (rows, blocks) in parts {
            arena.update(index, part, blocks, |state| change(&rows, state))?;
        }
    }
    Ok(())
}

fn project(
    device: &Device,
    activations: Activations,
    x: Slice<'_>,
    m: usize,
    outputs: &mut [(&Projection, SliceMut<'_>)],
    workspace: &mut Workspace,
) -> Result<()> {
    let mut products: Vec<_> = outputs
        .iter_mut()
        .map(|(p, y)| (&p.linear, y.reborrow()))
        .collect();
    linear(device, x, m, &mut products, activations, workspace)?;
    for (projection, y) in outputs {
        if let Some(bias) = &projection.bias {
            activation::add(device, y.reborrow(), bias.all())?;
        }
    }
    Ok(())
}

/// Normalizes `rows` of the residual stream, which stays, by `norm`. Returns them, `[rows, hidden]`.
pub(super) fn normalize_rows<'s>(
    device: &Device,
    spec: &Spec,
    norm: &Array,
    rows: &[usize],
    s: &'s mut BlockScratch,
) -> Result<Slice<'s>> {
    let hidden = spec.hidden_size;
    let len = rows.len() * hidden;
    s.normed.grow(device, len)?;
    for (i, row) in rows.iter().enumerate() {
        let x = s.residual.part(row * hidden..(row + 1) * hidden)?;
        let to = s.normed.part_mut(i * hidden..(i + 1) * hidden)?;
        to.copy_from(x)?;
    }
    norm::rms_norm_in_place(device, s.normed.first_mut(len)?, norm, spec.norm_eps)?;
    s.normed.first(len)
}

/// Appends the logits of some rows of the residual stream: `norm` and the head.
pub(super) fn head(
    device: &Device,
    spec: &Spec,
    activations: Activations,
    (norm, head): (&Array, &Projection),
    rows: &[usize],
    s: &mut BlockScratch,
    logits: &mut Vec<f32>,
) -> Result<()> {
    let m = rows.len();
    normalize_rows(device, spec, norm, rows, s)?;
    let (before, len) = (logits.len(), m * spec.vocab_size);
    logits
        .try_reserve(len)
        .map_err(|e| err!(OutOfMemory, "{len} logits: {e}"))?;
    logits.resize(before + len, 0.0);
    let x = s.normed.first(m * spec.hidden_size)?;
    let mut out = SliceMut::Host(&mut logits[before..]);
    let mut on_device = Array::empty();
    if device.is_cuda() {
        on_device.grow(device, len)?;
        out = on_device.first_mut(len)?;
    }
    let outputs = &mut [(head, out.reborrow())];
    let workspace = &mut s.products.workspace;
    project(device, activations, x, m, outputs, workspace)?;
    match spec.logit_scale {
        1.0 => {}
        factor => activation::scale(device, out.reborrow(), factor)?,
    }
    if let Some(cap) = spec.logit_cap {
        activation::soft_cap(device, out, cap)?;
    }
    if device.is_cuda() {
        on_device.first(len)?.read(&mut logits[before..])?;
    }
    Ok(())
}
