//! The reference block: attention and MLP of any [`BlockSpec`], in terms of operations on tensors of either device. The CPU runs inference
//! through it; on a GPU it is what fused kernels are tested against, and what training runs. Works on rows of the residual stream; whose
//! rows they are shows only where keys and values are stored and attended to.

use std::ops::Range;

use super::Activations;
use super::kv_cache::KvCache;
use super::spec::{BlockSpec, ExpertsSpec, GatedMlpSpec, MlpSpec, SharedExpertSpec, Spec};
use super::weights::{Attention, Block, Experts, GatedMlp, Mlp, Projection, Weights};
use crate::base::error::{bail, err};
use crate::base::{Result, memory};
use crate::ops::attention::AttentionOptions;
use crate::ops::experts::{Routes, route};
use crate::ops::linear::{Linear, linear};
use crate::ops::rope::Angles;
use crate::ops::{Array, Device, Slice, SliceMut, Workspace, activation, norm, rope};

/// Rows of one sequence within a pass: `rows` of the pass stand after what `cache` holds.
pub(super) struct Segment<'a> {
    pub(super) cache: &'a mut KvCache,
    pub(super) rows: Range<usize>,
}

/// Memory that passes reuse. One serves one caller at a time; it grows to the largest pass it has seen.
#[derive(Debug)]
pub(super) struct Scratch {
    pub(super) workspace: Workspace,
    /// `[rows, hidden]`: what blocks add to.
    pub(super) residual: Array,
    /// `[rows, hidden]`: what enters a half of a block, and what leaves it.
    normed: Array,
    q: Array,
    k: Array,
    v: Array,
    attended: Array,
    gate: Array,
    up: Array,
    experts: ExpertScratch,
}

/// What a mixture of experts takes beside.
#[derive(Debug)]
struct ExpertScratch {
    /// `[rows, experts]`.
    logits: Array,
    /// `[rows, hidden]`: the rows of one expert.
    gathered: Array,
    /// `[rows, hidden]`: what an expert makes of them.
    made: Array,
    /// `[rows, hidden]`: the sum over experts.
    sum: Array,
}

impl Scratch {
    /// Empty scratch memory.
    pub(super) fn new() -> Self {
        Scratch {
            workspace: Workspace::new(),
            residual: Array::empty(),
            normed: Array::empty(),
            q: Array::empty(),
            k: Array::empty(),
            v: Array::empty(),
            attended: Array::empty(),
            gate: Array::empty(),
            up: Array::empty(),
            experts: ExpertScratch {
                logits: Array::empty(),
                gathered: Array::empty(),
                made: Array::empty(),
                sum: Array::empty(),
            },
        }
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        let experts = &self.experts;
        let arrays = [
            &self.residual,
            &self.normed,
            &self.q,
            &self.k,
            &self.v,
            &self.attended,
            &self.gate,
            &self.up,
            &experts.logits,
            &experts.gathered,
            &experts.made,
            &experts.sum,
        ];
        self.workspace.bytes() + arrays.iter().map(|a| a.bytes()).sum::<usize>()
    }
}

/// Rows that go through the blocks together.
pub(super) struct Pass<'a> {
    device: &'a Device,
    spec: &'a Spec,
    activations: Activations,
    rows: usize,
    /// By number of [`Spec::ropes`].
    angles: Vec<Angles>,
}

impl<'a> Pass<'a> {
    /// A pass of the rows of these segments.
    pub(super) fn new(
        device: &'a Device,
        spec: &'a Spec,
        activations: Activations,
        segments: &[Segment<'_>],
    ) -> Result<Pass<'a>> {
        let mut angles = Vec::with_capacity(spec.ropes.len());
        for set in &spec.ropes {
            let positions = segments.iter().flat_map(|segment| {
                let (table, first) = (set.table(segment.cache.capacity()), segment.cache.len());
                (first..first + segment.rows.len()).map(move |p| (table, p as u32))
            });
            angles.push(Angles::new(device, positions)?);
        }
        Ok(Pass {
            device,
            spec,
            activations,
            rows: segments.iter().map(|s| s.rows.len()).sum(),
            angles,
        })
    }

    /// Makes the residual stream the embeddings of `tokens`.
    pub(super) fn embed(&self, weights: &Weights, tokens: &[u32], s: &mut Scratch) -> Result<()> {
        let len = tokens.len() * self.spec.hidden_size;
        s.residual.grow(self.device, len)?;
        let mut rows = s.residual.first_mut(len)?;
        match rows.reborrow() {
            SliceMut::Host(rows) => weights.embed(tokens, rows)?,
            rows @ SliceMut::Cuda(_) => {
                let mut host = memory::zeros(len)?;
                weights.embed(tokens, &mut host)?;
                rows.copy_from(Slice::Host(&host))?;
            }
        }
        match self.spec.embedding_scale {
            1.0 => Ok(()),
            factor => activation::scale(self.device, rows, factor),
        }
    }

    /// Takes the rows of the residual stream through block `index`, and stores their keys and values.
    pub(super) fn block(
        &self,
        index: usize,
        weights: &Block,
        segments: &mut [Segment<'_>],
        s: &mut Scratch,
    ) -> Result<()> {
        let spec = &self.spec.blocks[index];
        let norms = &weights.attention_norms;
        self.enter(norms.pre.as_ref(), s)?;
        self.attend(index, spec, &weights.attention, segments, s)?;
        self.leave(norms.post.as_ref(), s)?;

        let norms = &weights.mlp_norms;
        self.enter(norms.pre.as_ref(), s)?;
        match (&weights.mlp, &spec.mlp) {
            (Mlp::Dense(weights), MlpSpec::Dense(spec)) => self.dense(spec, weights, s)?,
            (Mlp::Experts(weights), MlpSpec::Experts(spec)) => self.experts(spec, weights, s)?,
            _ => bail!(
                Internal,
                "the MLP of block {index} is not what its spec says"
            ),
        }
        self.leave(norms.post.as_ref(), s)
    }

    /// Makes `normed` what a half of a block takes of the residual stream.
    fn enter(&self, norm: Option<&Array>, s: &mut Scratch) -> Result<()> {
        let len = self.rows * self.spec.hidden_size;
        s.normed.grow(self.device, len)?;
        let (x, normed) = (s.residual.first(len)?, s.normed.first_mut(len)?);
        match norm {
            Some(weight) => norm::rms_norm(self.device, x, weight, self.spec.norm_eps, normed),
            None => normed.copy_from(x),
        }
    }

    /// Adds what a half of a block has left in `normed` to the residual stream.
    fn leave(&self, norm: Option<&Array>, s: &mut Scratch) -> Result<()> {
        let len = self.rows * self.spec.hidden_size;
        let (device, eps) = (self.device, self.spec.norm_eps);
        if let Some(weight) = norm {
            norm::rms_norm_in_place(device, s.normed.first_mut(len)?, weight, eps)?;
        }
        activation::add(device, s.residual.first_mut(len)?, s.normed.first(len)?)
    }

    fn attend(
        &self,
        index: usize,
        spec: &BlockSpec,
        weights: &Attention,
        segments: &mut [Segment<'_>],
        s: &mut Scratch,
    ) -> Result<()> {
        let (device, spec, m) = (self.device, &spec.attention, self.rows);
        let (q_width, kv_width) = (spec.q_width(), spec.kv_width());
        for (array, width) in [
            (&mut s.q, q_width),
            (&mut s.k, kv_width),
            (&mut s.v, kv_width),
            (&mut s.attended, q_width),
        ] {
            array.grow(device, m * width)?;
        }
        self.project(
            s.normed.first(m * self.spec.hidden_size)?,
            m,
            &mut [
                (&weights.q, s.q.first_mut(m * q_width)?),
                (&weights.k, s.k.first_mut(m * kv_width)?),
                (&weights.v, s.v.first_mut(m * kv_width)?),
            ],
            &mut s.workspace,
        )?;
        let angles = &self.angles[spec.rope];
        for (x, heads, weight) in [
            (&mut s.q, spec.heads, &weights.q_norm),
            (&mut s.k, spec.kv_heads, &weights.k_norm),
        ] {
            let mut x = x.first_mut(m * heads * spec.head_dim)?;
            if let Some(weight) = weight {
                norm::rms_norm_in_place(device, x.reborrow(), weight, self.spec.norm_eps)?;
            }
            rope::apply(device, x, heads, spec.head_dim, angles)?;
        }
        let options = AttentionOptions {
            heads: spec.heads,
            scale: spec.scale,
            window: spec.window,
            score_cap: spec.score_cap,
        };
        for segment in segments {
            let (first, rows) = (segment.cache.len(), segment.rows.clone());
            let kv_rows = rows.start * kv_width..rows.end * kv_width;
            let q_rows = rows.start * q_width..rows.end * q_width;
            let (k, v) = (s.k.part(kv_rows.clone())?, s.v.part(kv_rows)?);
            segment.cache.store(device, index, first, k, v)?;
            segment.cache.attend(
                device,
                index,
                s.q.part(q_rows.clone())?,
                &options,
                first,
                s.attended.part_mut(q_rows)?,
                &mut s.workspace,
            )?;
        }
        self.project(
            s.attended.first(m * q_width)?,
            m,
            &mut [(&weights.o, s.normed.first_mut(m * self.spec.hidden_size)?)],
            &mut s.workspace,
        )
    }

    fn dense(&self, spec: &GatedMlpSpec, weights: &GatedMlp, s: &mut Scratch) -> Result<()> {
        let m = self.rows;
        let Scratch {
            workspace,
            normed,
            gate,
            up,
            ..
        } = s;
        self.gate_up(spec, weights, normed, m, gate, up, workspace)?;
        let out = normed.first_mut(m * self.spec.hidden_size)?;
        self.down(spec, weights, gate, m, out, workspace)
    }

    /// Makes `gate` what goes into the last projection of a gated MLP, of the first `m` rows of `x`.
    fn gate_up(
        &self,
        spec: &GatedMlpSpec,
        weights: &GatedMlp,
        x: &Array,
        m: usize,
        gate: &mut Array,
        up: &mut Array,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let (device, len) = (self.device, m * spec.intermediate_size);
        gate.grow(device, len)?;
        up.grow(device, len)?;
        self.project(
            x.first(m * self.spec.hidden_size)?,
            m,
            &mut [
                (&weights.gate, gate.first_mut(len)?),
                (&weights.up, up.first_mut(len)?),
            ],
            workspace,
        )?;
        let (gate, up) = (gate.first_mut(len)?, up.first(len)?);
        activation::glu(device, spec.activation, gate, up)
    }

    fn down(
        &self,
        spec: &GatedMlpSpec,
        weights: &GatedMlp,
        inner: &Array,
        m: usize,
        out: SliceMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let inner = inner.first(m * spec.intermediate_size)?;
        self.project(inner, m, &mut [(&weights.down, out)], workspace)
    }

    /// A mixture of experts: each expert in turn takes its rows, so that a row's sum does not depend on other rows.
    fn experts(&self, spec: &ExpertsSpec, weights: &Experts, s: &mut Scratch) -> Result<()> {
        let (device, m, hidden) = (self.device, self.rows, self.spec.hidden_size);
        let routes = self.route(spec, weights, s)?;
        let Scratch {
            workspace,
            normed,
            gate,
            up,
            experts,
            ..
        } = s;
        for array in [&mut experts.gathered, &mut experts.made, &mut experts.sum] {
            array.grow(device, m * hidden)?;
        }
        activation::fill(device, experts.sum.first_mut(m * hidden)?, 0.0)?;
        let row = |i: usize| i * hidden..(i + 1) * hidden;
        for (expert, mlp) in weights.experts.iter().enumerate() {
            let rows = routes.rows_of(expert);
            for (i, &(from, _)) in rows.iter().enumerate() {
                let to = experts.gathered.part_mut(row(i))?;
                to.copy_from(normed.part(row(from))?)?;
            }
            if rows.is_empty() {
                continue;
            }
            let n = rows.len();
            self.gate_up(&spec.expert, mlp, &experts.gathered, n, gate, up, workspace)?;
            let made = experts.made.first_mut(n * hidden)?;
            self.down(&spec.expert, mlp, gate, n, made, workspace)?;
            for (i, &(to, weight)) in rows.iter().enumerate() {
                activation::scale(device, experts.made.part_mut(row(i))?, weight)?;
                let sum = experts.sum.part_mut(row(to))?;
                activation::add(device, sum, experts.made.part(row(i))?)?;
            }
        }
        if let (Some((mlp, gate_weight)), Some(shared)) = (&weights.shared, &spec.shared) {
            let SharedExpertSpec { mlp: spec, .. } = shared;
            self.gate_up(spec, mlp, normed, m, gate, up, workspace)?;
            let made = experts.made.first_mut(m * hidden)?;
            self.down(spec, mlp, gate, m, made, workspace)?;
            if let Some(weight) = gate_weight {
                experts.logits.grow(device, m)?;
                let logits = experts.logits.first_mut(m)?;
                self.multiply(normed.first(m * hidden)?, m, weight, logits, workspace)?;
                let mut factors = vec![0.0; m];
                experts.logits.first(m)?.read(&mut factors)?;
                for (i, factor) in factors.iter().enumerate() {
                    let made = experts.made.part_mut(row(i))?;
                    activation::scale(device, made, 1.0 / (1.0 + (-factor).exp()))?;
                }
            }
            let sum = experts.sum.first_mut(m * hidden)?;
            activation::add(device, sum, experts.made.first(m * hidden)?)?;
        }
        normed
            .first_mut(m * hidden)?
            .copy_from(experts.sum.first(m * hidden)?)
    }

    /// Which experts each row goes to.
    fn route(&self, spec: &ExpertsSpec, weights: &Experts, s: &mut Scratch) -> Result<Routes> {
        let (m, count) = (self.rows, spec.count);
        let logits = &mut s.experts.logits;
        logits.grow(self.device, m * count)?;
        let x = s.normed.first(m * self.spec.hidden_size)?;
        let out = logits.first_mut(m * count)?;
        self.multiply(x, m, &weights.router, out, &mut s.workspace)?;
        let mut values = vec![0.0; m * count];
        logits.first(m * count)?.read(&mut values)?;
        route(&values, count, spec.per_token, spec.normalized)
    }

    fn multiply(
        &self,
        x: Slice<'_>,
        m: usize,
        weight: &Linear,
        out: SliceMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let outputs = &mut [(weight, out)];
        linear(self.device, x, m, outputs, self.activations, workspace)
    }

    /// Applies projections that share an input, and their biases.
    fn project(
        &self,
        x: Slice<'_>,
        m: usize,
        outputs: &mut [(&Projection, SliceMut<'_>)],
        workspace: &mut Workspace,
    ) -> Result<()> {
        project(self.device, self.activations, x, m, outputs, workspace)
    }
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

/// Appends the logits of some rows of the residual stream: last norm and head.
pub(super) fn head(
    device: &Device,
    spec: &Spec,
    activations: Activations,
    weights: &Weights,
    rows: Range<usize>,
    s: &mut Scratch,
    logits: &mut Vec<f32>,
) -> Result<()> {
    let (m, hidden) = (rows.len(), spec.hidden_size);
    s.normed.grow(device, m * hidden)?;
    let x = s.residual.part(rows.start * hidden..rows.end * hidden)?;
    let normed = s.normed.first_mut(m * hidden)?;
    norm::rms_norm(device, x, &weights.norm, spec.norm_eps, normed)?;
    let (before, len) = (logits.len(), m * spec.vocab_size);
    logits
        .try_reserve(len)
        .map_err(|e| err!(OutOfMemory, "{len} logits: {e}"))?;
    logits.resize(before + len, 0.0);
    let x = s.normed.first(m * hidden)?;
    let mut out = SliceMut::Host(&mut logits[before..]);
    let mut on_device = Array::empty();
    if device.is_cuda() {
        on_device.grow(device, len)?;
        out = on_device.first_mut(len)?;
    }
    let outputs = &mut [(&weights.head, out.reborrow())];
    project(device, activations, x, m, outputs, &mut s.workspace)?;
    if let Some(cap) = spec.logit_cap {
        activation::soft_cap(device, out, cap)?;
    }
    if device.is_cuda() {
        on_device.first(len)?.read(&mut logits[before..])?;
    }
    Ok(())
}
