//! A block forward and backward.

use super::layout::{BlockLayout, GatedMlpLayout, MlpLayout, ProjectionLayout, VectorId};
use super::linear::{Linear, LinearScratch};
use super::precision::ProductPrecision;
use super::recompute::{Recompute, RecomputedParts};
use super::scratch::{Saved, SavedSizes, Scratch, grow};
use super::{Batch, Store};
use crate::base::Result;
use crate::base::error::bail;
use crate::model::spec::{Activation, AttentionSpec, BlockSpec, MlpSpec, Spec};
use crate::ops::training::attention::{PackedAttention, attention, attention_backward};
use crate::ops::training::heads::{HeadOptions, heads, heads_backward};
use crate::ops::training::{activation, array, norm};
use crate::ops::{Array, Device, Mixed, Slice};

/// Elements of what rows take in a block.
pub(super) struct BlockSizes {
    /// The residual stream.
    pub(super) stream: usize,
    /// Queries, keys and values.
    pub(super) qkv: usize,
    /// What attention makes, and a number for each row and head.
    pub(super) attended: usize,
    pub(super) lse: usize,
    /// What goes into the last projection of the MLP.
    pub(super) wide: usize,
}

impl BlockSizes {
    pub(super) fn new(spec: &Spec, block: &BlockSpec, rows: usize) -> BlockSizes {
        let attention = packed_attention(&block.attention);
        BlockSizes {
            stream: rows * spec.hidden_size,
            qkv: rows * attention.width(),
            attended: rows * attention.q_width(),
            lse: rows * attention.heads,
            wide: rows * widest(&block.mlp),
        }
    }

    /// What the backward pass takes from the forward pass.
    pub(super) fn saved(&self, layout: &BlockLayout) -> SavedSizes {
        let branch = |[_, post]: [Option<VectorId>; 2]| post.map_or(0, |_| self.stream);
        SavedSizes {
            normed: self.stream,
            qkv: self.qkv,
            rotated: self.qkv,
            attended: self.attended,
            lse: self.lse,
            attention_branch: branch(layout.attention_norms),
            middle: self.stream,
            mlp_normed: self.stream,
            gate_up: 2 * self.wide,
            mlp_branch: branch(layout.mlp_norms),
        }
    }

    /// What goes into the last projection of the MLP, its gradients, and those of queries, keys and values, one after another.
    pub(super) fn inner(&self) -> usize {
        self.wide.max(self.qkv)
    }
}

/// Elements between the projections of the widest MLP.
fn widest(mlp: &MlpSpec) -> usize {
    let of_all = mlp.of_all_rows().map_or(0, |mlp| mlp.intermediate_size);
    mlp.intermediate_size().max(of_all)
}

fn packed_attention(spec: &AttentionSpec) -> PackedAttention {
    PackedAttention {
        heads: spec.heads,
        kv_heads: spec.kv_heads,
        dim: spec.head_dim,
        scale: spec.scale,
        window: spec.window,
        score_cap: spec.score_cap,
    }
}

/// A block of a model, with rows that go through it.
pub(super) struct BlockPass<'a> {
    pub(super) device: &'a Device,
    pub(super) spec: &'a Spec,
    pub(super) block: &'a BlockSpec,
    pub(super) layout: &'a BlockLayout,
    pub(super) batch: &'a Batch,
    pub(super) precision: &'a ProductPrecision,
    /// What random bits of rounding follow from.
    pub(super) key: u64,
}

impl BlockPass<'_> {
    pub(super) fn rows(&self) -> usize {
        self.batch.rows()
    }

    /// Elements of the rows' residual stream.
    fn stream(&self) -> usize {
        self.rows() * self.spec.hidden_size
    }

    /// Projections of the rows of the batch, of `inputs` elements.
    fn linear<'b>(&'b self, projections: &'b [ProjectionLayout], inputs: usize) -> Linear<'b> {
        self.linear_of(self.rows(), projections, inputs)
    }

    /// Projections of so many rows of `inputs` elements.
    pub(super) fn linear_of<'b>(
        &'b self,
        rows: usize,
        projections: &'b [ProjectionLayout],
        inputs: usize,
    ) -> Linear<'b> {
        Linear {
            device: self.device,
            projections,
            rows,
            inputs,
            rounding: self.precision.of(projections, self.key),
        }
    }

    fn attention(&self) -> PackedAttention {
        packed_attention(&self.block.attention)
    }

    fn sizes(&self) -> BlockSizes {
        BlockSizes::new(self.spec, self.block, self.rows())
    }

    /// The parameters of a dense MLP, its activation, and the elements between its projections.
    fn dense(&self) -> Result<(&GatedMlpLayout, Activation, usize)> {
        match (&self.layout.mlp, &self.block.mlp) {
            (MlpLayout::Dense(layout), MlpSpec::Dense(mlp)) => {
                Ok((layout, mlp.activation, mlp.intermediate_size))
            }
            _ => bail!(Internal, "a mixture of experts has no backward pass"),
        }
    }

    /// Takes the rows of `x` through the block to `out`, and keeps in `saved` what [`BlockPass::backward`] takes.
    pub(super) fn forward(
        &self,
        store: &mut dyn Store,
        x: &Array<Mixed>,
        out: &mut Array<Mixed>,
        saved: &mut Saved,
        s: &mut Scratch,
    ) -> Result<()> {
        out.grow(self.device, self.stream())?;
        self.run(store, x, Some(out), saved, Recompute::Block.parts(), s)
    }

    /// Makes those parts of `saved` again that [`BlockPass::backward`] takes; the others are there.
    pub(super) fn forward_again(
        &self,
        store: &mut dyn Store,
        x: &Array<Mixed>,
        saved: &mut Saved,
        parts: RecomputedParts,
        s: &mut Scratch,
    ) -> Result<()> {
        self.run(store, x, None, saved, parts, s)
    }

    fn run(
        &self,
        store: &mut dyn Store,
        x: &Array<Mixed>,
        out: Option<&mut Array<Mixed>>,
        saved: &mut Saved,
        parts: RecomputedParts,
        s: &mut Scratch,
    ) -> Result<()> {
        self.run_attention(store, x, saved, parts, s)?;
        let (device, t, hidden, stream) = (
            self.device,
            self.rows(),
            self.spec.hidden_size,
            self.stream(),
        );
        let sizes = self.sizes().saved(self.layout);
        let [pre, post] = self.layout.mlp_norms;
        if parts.norms {
            saved.mlp_normed.grow(device, sizes.mlp_normed)?;
            self.enter(store, pre, &saved.middle, &mut saved.mlp_normed)?;
        }
        if let MlpLayout::Experts(experts) = &self.layout.mlp {
            let Some(out) = out else {
                bail!(Internal, "a mixture of experts has no backward pass");
            };
            let normed = saved.mlp_normed.first(stream)?;
            self.run_experts(store, (experts, normed), &mut saved.gate_up, s)?;
            return self.join(store, post, &saved.middle, &s.experts.made, out);
        }
        let (mlp, activation, wide) = self.dense()?;
        if parts.gate_up {
            saved.gate_up.grow(device, sizes.gate_up)?;
            let normed = saved.mlp_normed.first(stream)?;
            self.linear(&mlp.gate_up, hidden).forward(
                store,
                normed,
                &mut saved.gate_up,
                false,
                (&mut s.weight, &mut s.linear),
            )?;
        }
        // The results of the last product are taken again by the norm behind it alone.
        if out.is_none() && (post.is_none() || !parts.down) {
            return Ok(());
        }
        s.inner.grow(device, t * wide)?;
        let gate_up = saved.gate_up.first(t * 2 * wide)?;
        let inner = s.inner.first_mut(t * wide)?;
        activation::glu(device, activation, gate_up, wide, inner)?;
        self.leave(
            store,
            (post, mlp.down),
            &saved.middle,
            (s.inner.first(t * wide)?, wide),
            &mut saved.mlp_branch,
            out,
            (&mut s.weight, &mut s.linear),
        )
    }

    /// The first half.
    fn run_attention(
        &self,
        store: &mut dyn Store,
        x: &Array<Mixed>,
        saved: &mut Saved,
        parts: RecomputedParts,
        s: &mut Scratch,
    ) -> Result<()> {
        let (device, t, hidden, stream) = (
            self.device,
            self.rows(),
            self.spec.hidden_size,
            self.stream(),
        );
        let options = self.attention();
        let (width, q_width) = (options.width(), options.q_width());
        let sizes = self.sizes().saved(self.layout);
        let [pre, post] = self.layout.attention_norms;
        if parts.norms {
            saved.normed.grow(device, sizes.normed)?;
            self.enter(store, pre, x, &mut saved.normed)?;
        }
        if parts.qkv {
            saved.qkv.grow(device, sizes.qkv)?;
            let normed = saved.normed.first(stream)?;
            self.linear(&self.layout.qkv, hidden).forward(
                store,
                normed,
                &mut saved.qkv,
                false,
                (&mut s.weight, &mut s.linear),
            )?;
        }
        if parts.heads {
            saved.rotated.grow(device, sizes.rotated)?;
            let angles = &self.batch.angles[self.block.attention.rope];
            let qkv = saved.qkv.first(t * width)?;
            let rotated = saved.rotated.first_mut(t * width)?;
            heads(device, &self.heads(&*store, angles)?, qkv, rotated)?;
        }
        if parts.attention {
            saved.attended.grow(device, sizes.attended)?;
            saved.lse.grow(device, sizes.lse)?;
            attention(
                device,
                &options,
                &self.batch.documents,
                saved.rotated.first(t * width)?,
                saved.attended.first_mut(t * q_width)?,
                saved.lse.first_mut(t * options.heads)?,
            )?;
        }
        if !parts.output {
            return Ok(());
        }
        saved.middle.grow(device, sizes.middle)?;
        self.leave(
            store,
            (post, self.layout.o),
            x,
            (saved.attended.first(t * q_width)?, q_width),
            &mut saved.attention_branch,
            Some(&mut saved.middle),
            (&mut s.weight, &mut s.linear),
        )
    }

    /// Makes `s.dx`, the gradients of the block's results, those of its input `x`. Gradients of weights go to `store`; those of the input
    /// are left out where nothing needs them.
    pub(super) fn backward(
        &self,
        store: &mut dyn Store,
        x: &Array<Mixed>,
        saved: &mut Saved,
        s: &mut Scratch,
        needs_input: bool,
    ) -> Result<()> {
        let (device, t, hidden, stream) = (
            self.device,
            self.rows(),
            self.spec.hidden_size,
            self.stream(),
        );
        let options = self.attention();
        let (width, q_width) = (options.width(), options.q_width());
        let (mlp, activation, wide) = self.dense()?;
        let sizes = self.sizes();
        grow(
            device,
            &mut [
                (&mut s.dx_before, sizes.stream),
                (&mut s.dattended, sizes.attended),
                (&mut s.inner, sizes.inner()),
            ],
        )?;

        let [pre, post] = self.layout.mlp_norms;
        self.leave_backward(store, post, &saved.mlp_branch, s)?;
        let down = [mlp.down];
        let down = self.linear(&down, wide);
        down.input_gradients(
            store,
            branch_gradients(post, &s.dx, &s.dbranch).first(stream)?,
            s.inner.first_mut(t * wide)?,
            (&mut s.weight, &mut s.linear),
        )?;
        let gate_up = saved.gate_up.first_mut(t * 2 * wide)?;
        activation::glu_backward(
            device,
            activation,
            gate_up,
            wide,
            s.inner.first_mut(t * wide)?,
        )?;
        let dy = branch_gradients(post, &s.dx, &s.dbranch).first(stream)?;
        let input = s.inner.first(t * wide)?;
        down.weight_gradients(store, dy, input, (&mut s.weight, &mut s.linear))?;

        let both = self.linear(&mlp.gate_up, hidden);
        let dy = saved.gate_up.first(t * 2 * wide)?;
        let dx = s.dx_before.first_mut(stream)?;
        both.input_gradients(store, dy, dx, (&mut s.weight, &mut s.linear))?;
        let input = saved.mlp_normed.first(stream)?;
        both.weight_gradients(store, dy, input, (&mut s.weight, &mut s.linear))?;
        self.enter_backward(store, pre, &saved.middle, s)?;

        let [pre, post] = self.layout.attention_norms;
        self.leave_backward(store, post, &saved.attention_branch, s)?;
        let o = [self.layout.o];
        let o = self.linear(&o, q_width);
        let dy = branch_gradients(post, &s.dx, &s.dbranch).first(stream)?;
        let dx = s.dattended.first_mut(t * q_width)?;
        o.input_gradients(store, dy, dx, (&mut s.weight, &mut s.linear))?;
        let input = saved.attended.first(t * q_width)?;
        o.weight_gradients(store, dy, input, (&mut s.weight, &mut s.linear))?;
        let forward = (
            saved.rotated.first(t * width)?,
            saved.attended.first(t * q_width)?,
            saved.lse.first(t * options.heads)?,
        );
        attention_backward(
            device,
            &options,
            &self.batch.documents,
            forward,
            s.dattended.first(t * q_width)?,
            s.inner.first_mut(t * width)?,
        )?;
        self.heads_backward(store, saved, s)?;
        let qkv = self.linear(&self.layout.qkv, hidden);
        let dy = s.inner.first(t * width)?;
        if needs_input {
            let dx = s.dx_before.first_mut(stream)?;
            qkv.input_gradients(store, dy, dx, (&mut s.weight, &mut s.linear))?;
        }
        let input = saved.normed.first(stream)?;
        qkv.weight_gradients(store, dy, input, (&mut s.weight, &mut s.linear))?;
        if needs_input || pre.is_some() {
            self.enter_backward(store, pre, x, s)?;
        }
        Ok(())
    }

    fn heads<'b>(
        &self,
        store: &'b dyn Store,
        angles: &'b crate::ops::rope::Angles,
    ) -> Result<HeadOptions<'b>> {
        let of = |norm: Option<VectorId>| norm.map(|id| store.vector(id)).transpose();
        let [q, k] = self.layout.qk_norms;
        let AttentionSpec {
            heads,
            kv_heads,
            head_dim,
            ..
        } = self.block.attention;
        Ok(HeadOptions {
            heads,
            kv_heads,
            dim: head_dim,
            norms: [of(q)?, of(k)?],
            eps: self.spec.norm_eps,
            angles,
        })
    }

    fn heads_backward(&self, store: &mut dyn Store, saved: &Saved, s: &mut Scratch) -> Result<()> {
        let (device, dim) = (self.device, self.block.attention.head_dim);
        let len = self.rows() * self.attention().width();
        let angles = &self.batch.angles[self.block.attention.rope];
        // Both norms' gradients at once, which the store keeps apart.
        s.dnorms.grow(device, 2 * dim)?;
        crate::ops::activation::fill(device, s.dnorms.first_mut(2 * dim)?, 0.0)?;
        let mut q = Array::scratch(device, dim)?;
        crate::ops::activation::fill(device, q.all_mut(), 0.0)?;
        let [q_norm, k_norm] = self.layout.qk_norms;
        {
            let options = self.heads(&*store, angles)?;
            let dnorms = [
                q_norm.map(|_| q.all_mut()),
                match k_norm {
                    Some(_) => Some(s.dnorms.first_mut(dim)?),
                    None => None,
                },
            ];
            let dqkv = s.inner.first_mut(len)?;
            heads_backward(device, &options, saved.qkv.first(len)?, dqkv, dnorms)?;
        }
        for (norm, gradient) in [(q_norm, q.all()), (k_norm, s.dnorms.first(dim)?)] {
            if let Some(id) = norm {
                let (_, to) = store.vector_with_gradient(id)?;
                crate::ops::activation::add(device, to, gradient)?;
            }
        }
        Ok(())
    }

    /// Makes `normed` what a half of the block takes of the rows `x`.
    fn enter(
        &self,
        store: &dyn Store,
        pre: Option<VectorId>,
        x: &Array<Mixed>,
        normed: &mut Array<Mixed>,
    ) -> Result<()> {
        let (x, normed) = (x.first(self.stream())?, normed.first_mut(self.stream())?);
        match pre {
            Some(id) => norm::rms_norm(
                self.device,
                x,
                store.vector(id)?,
                self.spec.norm_eps,
                normed,
            ),
            None => normed.copy_from(x),
        }
    }

    /// Makes `s.dx` the gradients of `x`, from which a half of the block takes its input, whose gradients are in `s.dx_before`, and which
    /// goes around it, with the gradients in `s.dx`.
    fn enter_backward(
        &self,
        store: &mut dyn Store,
        pre: Option<VectorId>,
        x: &Array<Mixed>,
        s: &mut Scratch,
    ) -> Result<()> {
        let len = self.stream();
        match pre {
            Some(id) => {
                let (weight, dweight) = store.vector_with_gradient(id)?;
                let (x, dx) = (x.first(len)?, s.dx_before.first_mut(len)?);
                let around = Some(s.dx.first(len)?);
                norm::rms_norm_backward(
                    self.device,
                    x,
                    weight,
                    self.spec.norm_eps,
                    dx,
                    around,
                    dweight,
                )?;
            }
            None => array::add(self.device, s.dx_before.first_mut(len)?, s.dx.first(len)?)?,
        }
        std::mem::swap(&mut s.dx, &mut s.dx_before);
        Ok(())
    }

    /// Makes `out` the rows `x` plus the last projection of a half, of rows `[T, width]`, normalized where the model does so: `branch`
    /// is then what it was before, and all that is made without `out`.
    fn leave(
        &self,
        store: &mut dyn Store,
        (post, projection): (Option<VectorId>, ProjectionLayout),
        x: &Array<Mixed>,
        (rows, width): (Slice<'_, Mixed>, usize),
        branch: &mut Array<Mixed>,
        out: Option<&mut Array<Mixed>>,
        memory: (&mut Array<Mixed>, &mut LinearScratch),
    ) -> Result<()> {
        let (device, len) = (self.device, self.stream());
        let projections = [projection];
        let linear = self.linear(&projections, width);
        let Some(id) = post else {
            let Some(out) = out else { return Ok(()) };
            out.first_mut(len)?.copy_from(x.first(len)?)?;
            return linear.forward(store, rows, out, true, memory);
        };
        branch.grow(device, len)?;
        linear.forward(store, rows, branch, false, memory)?;
        match out {
            Some(out) => self.join(store, Some(id), x, branch, out),
            None => Ok(()),
        }
    }

    /// Makes `out` the rows `x` plus the results `branch` of a half, normalized where the model does so.
    fn join(
        &self,
        store: &dyn Store,
        post: Option<VectorId>,
        x: &Array<Mixed>,
        branch: &Array<Mixed>,
        out: &mut Array<Mixed>,
    ) -> Result<()> {
        let (device, len) = (self.device, self.stream());
        let from = branch.first(len)?;
        match post {
            Some(id) => {
                let (weight, eps) = (store.vector(id)?, self.spec.norm_eps);
                norm::rms_norm(device, from, weight, eps, out.first_mut(len)?)?;
            }
            None => out.first_mut(len)?.copy_from(from)?,
        }
        array::add(device, out.first_mut(len)?, x.first(len)?)
    }

    /// Makes `s.dbranch` the gradients of what leaves a half of the block before it is normalized, where it is, from `s.dx`.
    fn leave_backward(
        &self,
        store: &mut dyn Store,
        post: Option<VectorId>,
        branch: &Array<Mixed>,
        s: &mut Scratch,
    ) -> Result<()> {
        let len = self.stream();
        if let Some(id) = post {
            s.dbranch.grow(self.device, len)?;
            s.dbranch.first_mut(len)?.copy_from(s.dx.first(len)?)?;
            let (weight, dweight) = store.vector_with_gradient(id)?;
            let dx = s.dbranch.first_mut(len)?;
            norm::rms_norm_backward(
                self.device,
                branch.first(len)?,
                weight,
                self.spec.norm_eps,
                dx,
                None,
                dweight,
            )?;
        }
        Ok(())
    }
}

/// The gradients of what leaves a half of a block: those of the stream, unless it is normalized before it joins that.
fn branch_gradients<'a>(
    post: Option<VectorId>,
    dx: &'a Array<Mixed>,
    dbranch: &'a Array<Mixed>,
) -> &'a Array<Mixed> {
    match post {
        Some(_) => dbranch,
        None => dx,
    }
}
