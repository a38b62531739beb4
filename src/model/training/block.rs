//! A decoder block of training: runs the operations of `order` forward, recomputes them for the backward pass, and runs them backward in
//! reverse.

use super::layout::{
    BlockLayout, ExpertsLayout, GatedMlpLayout, MlpLayout, ProjectionLayout, VectorId,
};
use super::linear::Linear;
use super::precision::ProductPrecision;
use super::recompute::RecomputedParts;
use super::scratch::{Saved, SavedSizes, TrainingScratch, grow};
use super::{Batch, Store};
use crate::base::Result;
use crate::base::error::bail;
use crate::model::order::{BlockOp, Half, operations};
use crate::model::spec::{
    BlockSpec, DenseMlpSpec, ExpertsSpec, GatedDeltaSpec, MixerSpec, MlpSpec, Spec,
};
use crate::ops::training::delta::gate_width;
use crate::ops::training::{activation, array, norm};
use crate::ops::{Array, Device, Mixed, Slice};

/// Sizes of a batch's rows in a block, in elements.
#[derive(Default)]
pub(super) struct BlockSizes {
    /// The residual stream.
    pub(super) stream: usize,
    /// Queries, keys and values.
    pub(super) qkv: usize,
    /// The gate of attention, or z, b and a of a gated delta net; none in other blocks.
    pub(super) gate: usize,
    /// The output of attention, and the log-sum-exp of each row and head; the output of the gated delta rule, and checkpoints of states.
    pub(super) attended: usize,
    pub(super) lse: usize,
    pub(super) states: usize,
    /// Scratch of the backward pass of the gated delta rule.
    pub(super) delta: usize,
    /// The input of the MLP's last projection.
    pub(super) wide: usize,
}

impl BlockSizes {
    pub(super) fn new(spec: &Spec, block: &BlockSpec, rows: usize) -> BlockSizes {
        let shared = BlockSizes {
            stream: rows * spec.hidden_size,
            wide: rows * widest(&block.mlp),
            ..BlockSizes::default()
        };
        match &block.mixer {
            MixerSpec::Attention(attention) => BlockSizes {
                qkv: rows * attention.qkv_width(),
                gate: if attention.gated {
                    rows * attention.q_width()
                } else {
                    0
                },
                attended: rows * attention.q_width(),
                lse: rows * attention.heads,
                ..shared
            },
            MixerSpec::GatedDelta(GatedDeltaSpec { shape, .. }) => BlockSizes {
                qkv: rows * shape.channels(),
                gate: rows * gate_width(shape),
                attended: rows * shape.value_width(),
                states: shape.checkpoint_floats(rows),
                delta: shape.backward_floats(),
                ..shared
            },
            // Not trained.
            MixerSpec::Mamba2(_) | MixerSpec::None => shared,
        }
    }

    /// The activations that the backward pass needs from the forward pass.
    pub(super) fn saved(&self, layout: &BlockLayout) -> SavedSizes {
        let branch = |[_, post]: [Option<VectorId>; 2]| post.map_or(0, |_| self.stream);
        SavedSizes {
            normed: self.stream,
            qkv: self.qkv,
            rotated: self.qkv,
            gate: self.gate,
            attended: self.attended,
            lse: self.lse,
            states: self.states,
            gated: if self.gate > 0 { self.attended } else { 0 },
            mixer_branch: branch(layout.mixer_norms),
            middle: self.stream,
            mlp_normed: self.stream,
            // Experts are recomputed one by one.
            gate_up: layout.mlp.dense().map_or(0, |_| 2 * self.wide),
            mlp_branch: branch(layout.mlp_norms),
        }
    }

    /// The output of the mixer's first projections, if its roles have columns of their own.
    pub(super) fn columns(&self) -> usize {
        match self.gate {
            0 => 0,
            gate => self.qkv + gate,
        }
    }

    /// The largest of several tensors in the same memory: the input of the MLP's last projection, its gradient, and the gradients of
    /// queries, keys and values.
    pub(super) fn inner(&self) -> usize {
        self.wide.max(self.qkv)
    }
}

/// Width between the projections of the widest MLP.
fn widest(mlp: &MlpSpec) -> usize {
    let of_all = mlp.of_all_rows().map_or(0, |mlp| mlp.intermediate_size);
    mlp.intermediate_size().max(of_all)
}

/// A block of a model, applied to a batch.
pub(super) struct BlockPass<'a> {
    pub(super) device: &'a Device,
    pub(super) spec: &'a Spec,
    pub(super) block: &'a BlockSpec,
    pub(super) layout: &'a BlockLayout,
    pub(super) batch: &'a Batch,
    pub(super) precision: &'a ProductPrecision,
    /// Key of the random bits of rounding.
    pub(super) key: u64,
}

impl BlockPass<'_> {
    pub(super) fn rows(&self) -> usize {
        self.batch.rows()
    }

    /// Elements of the batch's residual stream.
    fn stream(&self) -> usize {
        self.rows() * self.spec.hidden_size
    }

    /// Projections of the batch's rows, of `inputs` elements each.
    pub(super) fn linear<'b>(
        &'b self,
        projections: &'b [ProjectionLayout],
        inputs: usize,
    ) -> Linear<'b> {
        self.linear_of(self.rows(), projections, inputs)
    }

    /// Projections of `rows` rows of `inputs` elements.
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

    pub(super) fn sizes(&self) -> BlockSizes {
        BlockSizes::new(self.spec, self.block, self.rows())
    }

    /// The parameters and the shape of a dense MLP.
    fn dense(&self) -> Result<(&GatedMlpLayout, &DenseMlpSpec)> {
        match (&self.layout.mlp, &self.block.mlp) {
            (MlpLayout::Dense(layout), MlpSpec::Dense(mlp)) => Ok((layout, mlp)),
            _ => bail!(Internal, "a mixture of experts taken for a dense MLP"),
        }
    }

    /// The parameters and the shape of a mixture of experts.
    pub(super) fn mixture(&self) -> Result<(&ExpertsLayout, &ExpertsSpec)> {
        match (&self.layout.mlp, &self.block.mlp) {
            (MlpLayout::Experts(layout), MlpSpec::Experts(mixture)) => Ok((layout, mixture)),
            _ => bail!(Internal, "a dense MLP taken for a mixture of experts"),
        }
    }

    /// The norms before and after a half.
    fn norms(&self, half: Half) -> [Option<VectorId>; 2] {
        match half {
            Half::Mixer => self.layout.mixer_norms,
            Half::Mlp => self.layout.mlp_norms,
        }
    }

    /// Runs the rows of `x` through the block to `out`, and keeps in `saved` the activations that [`BlockPass::backward`] needs.
    pub(super) fn forward(
        &self,
        store: &mut dyn Store,
        x: &Array<Mixed>,
        out: &mut Array<Mixed>,
        saved: &mut Saved,
        s: &mut TrainingScratch,
    ) -> Result<()> {
        out.grow(self.device, self.stream())?;
        for op in operations(self.block) {
            self.forward_op(op, store, (x, Some(&mut *out)), saved, s)?;
        }
        Ok(())
    }

    /// Recomputes the parts of `saved` that were not kept, for [`BlockPass::backward`].
    pub(super) fn forward_again(
        &self,
        store: &mut dyn Store,
        x: &Array<Mixed>,
        saved: &mut Saved,
        parts: RecomputedParts,
        s: &mut TrainingScratch,
    ) -> Result<()> {
        for op in operations(self.block).filter(|op| parts.includes(*op, self.block)) {
            self.forward_op(op, store, (x, None), saved, s)?;
        }
        Ok(())
    }

    /// Runs an operation of the forward pass. `out`, the output of the block, is only needed by the last half of the first pass.
    fn forward_op(
        &self,
        op: BlockOp,
        store: &mut dyn Store,
        (x, out): (&Array<Mixed>, Option<&mut Array<Mixed>>),
        saved: &mut Saved,
        s: &mut TrainingScratch,
    ) -> Result<()> {
        let (device, t, stream) = (self.device, self.rows(), self.stream());
        let (hidden, sizes) = (self.spec.hidden_size, self.sizes().saved(self.layout));
        match op {
            BlockOp::Enter(Half::Mixer) => {
                saved.normed.grow(device, sizes.normed)?;
                self.enter(store, Half::Mixer, x, &mut saved.normed)
            }
            BlockOp::Qkv | BlockOp::DeltaInputs => self.mixer_inputs(store, saved, s),
            BlockOp::Heads => self.heads(&*store, saved),
            BlockOp::Attend => self.attend(saved),
            BlockOp::GateHeads => self.gate_heads(saved),
            BlockOp::Convolve => self.convolve(&*store, saved),
            BlockOp::DeltaRule => self.delta_rule(&*store, saved),
            BlockOp::DeltaNorm => self.delta_norm(&*store, saved),
            untrained!() => bail!(Internal, "{op:?} is not trained"),
            BlockOp::Project(Half::Mixer) => {
                saved.middle.grow(device, sizes.middle)?;
                let len = self.sizes().attended;
                let mixed = match self.layout.columns {
                    None => &saved.attended,
                    Some(_) => &saved.gated,
                };
                let rows = (mixed.first(len)?, len / t);
                let to = (&mut saved.mixer_branch, Some(&mut saved.middle));
                self.project(store, Half::Mixer, rows, x, to, s)
            }
            BlockOp::Leave(Half::Mixer) => match self.norms(Half::Mixer) {
                [_, None] => Ok(()),
                [_, post] => self.leave(store, post, x, &saved.mixer_branch, &mut saved.middle),
            },
            BlockOp::Enter(Half::Mlp) => {
                saved.mlp_normed.grow(device, sizes.mlp_normed)?;
                self.enter(store, Half::Mlp, &saved.middle, &mut saved.mlp_normed)
            }
            BlockOp::GateUp => {
                saved.gate_up.grow(device, sizes.gate_up)?;
                self.linear(&self.dense()?.0.gate_up, hidden).forward(
                    store,
                    saved.mlp_normed.first(stream)?,
                    &mut saved.gate_up,
                    false,
                    (&mut s.weight, &mut s.linear),
                )
            }
            BlockOp::Activate => {
                let mlp = self.dense()?.1;
                let wide = mlp.intermediate_size;
                s.inner.grow(device, t * wide)?;
                let gate_up = saved.gate_up.first(t * 2 * wide)?;
                let inner = s.inner.first_mut(t * wide)?;
                activation::glu(device, mlp.activation, gate_up, wide, inner)
            }
            BlockOp::Project(Half::Mlp) => {
                let wide = self.dense()?.1.intermediate_size;
                let inner = std::mem::replace(&mut s.inner, Array::empty());
                let to = (&mut saved.mlp_branch, out);
                let done = inner.first(t * wide).and_then(|rows| {
                    self.project(store, Half::Mlp, (rows, wide), &saved.middle, to, s)
                });
                s.inner = inner;
                done
            }
            BlockOp::Route => self.route(store, saved.mlp_normed.first(stream)?, s),
            BlockOp::Experts => {
                self.experts(store, saved.mlp_normed.first(stream)?, s)?;
                if let [_, Some(_)] = self.norms(Half::Mlp) {
                    saved.mlp_branch.grow(device, sizes.mlp_branch)?;
                    let (from, to) = (s.experts.made.first(stream)?, &mut saved.mlp_branch);
                    to.first_mut(stream)?.copy_from(from)?;
                }
                Ok(())
            }
            BlockOp::Leave(Half::Mlp) => {
                let Some(out) = out else {
                    bail!(
                        Internal,
                        "the output of a block was asked for, and no place given"
                    );
                };
                match (self.norms(Half::Mlp), &self.block.mlp) {
                    ([_, None], MlpSpec::Dense(_) | MlpSpec::None) => Ok(()),
                    ([_, None], MlpSpec::Experts(_) | MlpSpec::DenseAndExperts(..)) => {
                        self.leave(store, None, &saved.middle, &s.experts.made, out)
                    }
                    ([_, post], _) => {
                        self.leave(store, post, &saved.middle, &saved.mlp_branch, out)
                    }
                }
            }
        }
    }

    /// In place: `s.dx`, the gradient of the block's output, becomes the gradient of its input `x`. Gradients of weights go to `store`; the
    /// gradient of the input is skipped if nothing needs it.
    pub(super) fn backward(
        &self,
        store: &mut dyn Store,
        x: &Array<Mixed>,
        saved: &mut Saved,
        s: &mut TrainingScratch,
        needs_input: bool,
    ) -> Result<()> {
        let sizes = self.sizes();
        grow(
            self.device,
            &mut [
                (&mut s.dx_before, sizes.stream),
                (&mut s.dattended, sizes.attended),
                (&mut s.inner, sizes.inner()),
            ],
        )?;
        for op in operations(self.block).rev() {
            self.backward_op(op, store, x, saved, s, needs_input)?;
        }
        Ok(())
    }

    /// Runs the backward pass of an operation, after those of all later operations.
    fn backward_op(
        &self,
        op: BlockOp,
        store: &mut dyn Store,
        x: &Array<Mixed>,
        saved: &mut Saved,
        s: &mut TrainingScratch,
        needs_input: bool,
    ) -> Result<()> {
        let (device, t, hidden, stream) = (
            self.device,
            self.rows(),
            self.spec.hidden_size,
            self.stream(),
        );
        match op {
            BlockOp::Leave(Half::Mlp) => {
                self.leave_backward(store, Half::Mlp, &saved.mlp_branch, s)
            }
            BlockOp::Experts => {
                let x = saved.mlp_normed.first(stream)?;
                self.experts_backward(store, x, s)
            }
            BlockOp::Route => self.route_backward(store, saved.mlp_normed.first(stream)?, s),
            BlockOp::Project(Half::Mlp) => {
                let (mlp, spec) = self.dense()?;
                let down = [mlp.down];
                let inner = s.inner.first_mut(t * spec.intermediate_size)?;
                let dy = branch_gradients(self.norms(Half::Mlp)[1], &s.dx, &s.dbranch);
                let memory = (&mut s.weight, &mut s.linear);
                self.linear(&down, spec.intermediate_size).input_gradients(
                    store,
                    dy.first(stream)?,
                    inner,
                    memory,
                )
            }
            BlockOp::Activate => {
                let (mlp, spec) = self.dense()?;
                let wide = spec.intermediate_size;
                let gate_up = saved.gate_up.first_mut(t * 2 * wide)?;
                let inner = s.inner.first_mut(t * wide)?;
                activation::glu_backward(device, spec.activation, gate_up, wide, inner)?;
                // The projection's input has been recomputed only at this point.
                let down = [mlp.down];
                let dy = branch_gradients(self.norms(Half::Mlp)[1], &s.dx, &s.dbranch);
                let (dy, inner) = (dy.first(stream)?, s.inner.first(t * wide)?);
                let memory = (&mut s.weight, &mut s.linear);
                self.linear(&down, wide)
                    .weight_gradients(store, dy, inner, memory)
            }
            BlockOp::GateUp => {
                let (mlp, spec) = self.dense()?;
                let both = self.linear(&mlp.gate_up, hidden);
                let dy = saved.gate_up.first(t * 2 * spec.intermediate_size)?;
                let dx = s.dx_before.first_mut(stream)?;
                both.input_gradients(store, dy, dx, (&mut s.weight, &mut s.linear))?;
                let input = saved.mlp_normed.first(stream)?;
                both.weight_gradients(store, dy, input, (&mut s.weight, &mut s.linear))
            }
            BlockOp::Enter(Half::Mlp) => self.enter_backward(store, Half::Mlp, &saved.middle, s),
            BlockOp::Leave(Half::Mixer) => {
                self.leave_backward(store, Half::Mixer, &saved.mixer_branch, s)
            }
            BlockOp::Project(Half::Mixer) => {
                let (output, len) = ([self.layout.output], self.sizes().attended);
                let output = self.linear(&output, len / t);
                let dy = branch_gradients(self.norms(Half::Mixer)[1], &s.dx, &s.dbranch);
                let (dy, dx) = (dy.first(stream)?, s.dattended.first_mut(len)?);
                output.input_gradients(store, dy, dx, (&mut s.weight, &mut s.linear))?;
                let mixed = match self.layout.columns {
                    None => &saved.attended,
                    Some(_) => &saved.gated,
                };
                let input = mixed.first(len)?;
                output.weight_gradients(store, dy, input, (&mut s.weight, &mut s.linear))
            }
            BlockOp::GateHeads => self.gate_heads_backward(saved, s),
            untrained!() => bail!(Internal, "{op:?} is not trained"),
            BlockOp::Attend => self.attend_backward(saved, s),
            BlockOp::Heads => self.heads_backward(store, saved, s),
            BlockOp::DeltaNorm => self.delta_norm_backward(store, saved, s),
            BlockOp::DeltaRule => self.delta_rule_backward(store, saved, s),
            BlockOp::Convolve => self.convolve_backward(store, saved, s),
            BlockOp::Qkv => {
                let dqkv = std::mem::replace(&mut s.inner, Array::empty());
                let (x, gradients) = (saved.normed.first(stream)?, (&dqkv, &saved.gate));
                let done = self.mixer_inputs_backward(store, x, gradients, s, needs_input);
                s.inner = dqkv;
                done
            }
            BlockOp::DeltaInputs => {
                let (x, gradients) = (saved.normed.first(stream)?, (&saved.rotated, &saved.gate));
                self.mixer_inputs_backward(store, x, gradients, s, needs_input)
            }
            BlockOp::Enter(Half::Mixer) => {
                match needs_input || self.norms(Half::Mixer)[0].is_some() {
                    true => self.enter_backward(store, Half::Mixer, x, s),
                    false => Ok(()),
                }
            }
        }
    }

    /// Computes the input of a half in `normed`, from the rows `x` of the residual stream.
    fn enter(
        &self,
        store: &dyn Store,
        half: Half,
        x: &Array<Mixed>,
        normed: &mut Array<Mixed>,
    ) -> Result<()> {
        let (x, normed) = (x.first(self.stream())?, normed.first_mut(self.stream())?);
        match self.norms(half)[0] {
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

    /// Computes in `s.dx` the gradient of the rows `x` of the residual stream before a half: the gradient of the half's input, in
    /// `s.dx_before`, through the norm, plus the gradient of the residual stream around the half, in `s.dx`.
    fn enter_backward(
        &self,
        store: &mut dyn Store,
        half: Half,
        x: &Array<Mixed>,
        s: &mut TrainingScratch,
    ) -> Result<()> {
        let len = self.stream();
        match self.norms(half)[0] {
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

    /// The last projection of a half, of `rows` `[T, width]`. Without a norm after it, its epilogue adds it to the rows `x` of the residual
    /// stream and writes the sum to `out`; otherwise it writes to `branch`.
    fn project(
        &self,
        store: &mut dyn Store,
        half: Half,
        (rows, width): (Slice<'_, Mixed>, usize),
        x: &Array<Mixed>,
        (branch, out): (&mut Array<Mixed>, Option<&mut Array<Mixed>>),
        s: &mut TrainingScratch,
    ) -> Result<()> {
        let (device, len) = (self.device, self.stream());
        let projection = match half {
            Half::Mixer => self.layout.output,
            Half::Mlp => self.dense()?.0.down,
        };
        let projections = [projection];
        let (linear, memory) = (
            self.linear(&projections, width),
            (&mut s.weight, &mut s.linear),
        );
        match (self.norms(half)[1], out) {
            (None, Some(out)) => {
                out.first_mut(len)?.copy_from(x.first(len)?)?;
                linear.forward(store, rows, out, true, memory)
            }
            (None, None) => Ok(()),
            (Some(_), _) => {
                branch.grow(device, len)?;
                linear.forward(store, rows, branch, false, memory)
            }
        }
    }

    /// Adds the output `branch` of a half to the rows `x` of the residual stream, normalized in blocks with a norm after it, and writes the
    /// sum to `out`.
    fn leave(
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

    /// In blocks with a norm after a half: computes in `s.dbranch` the gradient of the half's output `branch` before the norm, from `s.dx`.
    fn leave_backward(
        &self,
        store: &mut dyn Store,
        half: Half,
        branch: &Array<Mixed>,
        s: &mut TrainingScratch,
    ) -> Result<()> {
        let len = self.stream();
        if let Some(id) = self.norms(half)[1] {
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

/// The gradient of a half's output: the gradient of the residual stream, unless a norm comes in between.
pub(super) fn branch_gradients<'a>(
    post: Option<VectorId>,
    dx: &'a Array<Mixed>,
    dbranch: &'a Array<Mixed>,
) -> &'a Array<Mixed> {
    match post {
        Some(_) => dbranch,
        None => dx,
    }
}
