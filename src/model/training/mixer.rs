//! The first projections of a mixer, and attention, in training, forward and backward.

use super::Store;
use super::block::BlockPass;
use super::layout::{MixerVectors, VectorId};
use super::scratch::{Saved, TrainingScratch};
use crate::base::Result;
use crate::base::error::bail;
use crate::model::spec::AttentionSpec;
use crate::ops::rope::Angles;
use crate::ops::training::activation::{sigmoid_gate, sigmoid_gate_backward};
use crate::ops::training::array::{gather_columns, scatter_columns};
use crate::ops::training::attention::{attention, attention_backward};
use crate::ops::training::heads::{HeadOptions, heads, heads_backward};
use crate::ops::{Array, Mixed, Slice, activation};

impl BlockPass<'_> {
    /// Computes queries, keys and values in `saved.qkv`, and gates in `saved.gate`.
    pub(super) fn mixer_inputs(
        &self,
        store: &mut dyn Store,
        saved: &mut Saved,
        s: &mut TrainingScratch,
    ) -> Result<()> {
        let (device, sizes) = (self.device, self.sizes());
        let inputs = self.linear(&self.layout.inputs, self.spec.hidden_size);
        let x = saved.normed.first(sizes.stream)?;
        let memory = (&mut s.weight, &mut s.linear);
        saved.qkv.grow(device, sizes.qkv)?;
        let Some(columns) = &self.layout.columns else {
            return inputs.forward(store, x, &mut saved.qkv, false, memory);
        };
        saved.gate.grow(device, sizes.gate)?;
        s.columns.grow(device, sizes.columns())?;
        inputs.forward(store, x, &mut s.columns, false, memory)?;
        let all = s.columns.first(sizes.columns())?;
        let (width, qkv) = (
            sizes.columns() / self.rows(),
            saved.qkv.first_mut(sizes.qkv)?,
        );
        gather_columns(device, all, width, &columns.qkv, qkv)?;
        let gate = saved.gate.first_mut(sizes.gate)?;
        gather_columns(device, all, width, &columns.gate, gate)
    }

    /// Backward of [`BlockPass::mixer_inputs`], from the gradient `dqkv` of queries, keys and values, and that of gates in `gate`: computes
    /// in `s.dx_before` the gradient of the rows `x`, if something needs it, and gives the store those of the projections.
    pub(super) fn mixer_inputs_backward(
        &self,
        store: &mut dyn Store,
        x: Slice<'_, Mixed>,
        (dqkv, gate): (&Array<Mixed>, &Array<Mixed>),
        s: &mut TrainingScratch,
        needs_input: bool,
    ) -> Result<()> {
        let (device, sizes) = (self.device, self.sizes());
        let inputs = self.linear(&self.layout.inputs, self.spec.hidden_size);
        let dqkv = dqkv.first(sizes.qkv)?;
        let dy = match &self.layout.columns {
            None => dqkv,
            Some(columns) => {
                s.columns.grow(device, sizes.columns())?;
                let width = sizes.columns() / self.rows();
                let mut all = s.columns.first_mut(sizes.columns())?;
                scatter_columns(device, dqkv, &columns.qkv, all.reborrow(), width)?;
                scatter_columns(device, gate.first(sizes.gate)?, &columns.gate, all, width)?;
                s.columns.first(sizes.columns())?
            }
        };
        if needs_input {
            let dx = s.dx_before.first_mut(sizes.stream)?;
            inputs.input_gradients(store, dy, dx, (&mut s.weight, &mut s.linear))?;
        }
        inputs.weight_gradients(store, dy, x, (&mut s.weight, &mut s.linear))
    }

    /// Norms and RoPE of queries and keys.
    pub(super) fn heads(&self, store: &dyn Store, saved: &mut Saved) -> Result<()> {
        let (device, len) = (self.device, self.sizes().qkv);
        saved.rotated.grow(device, len)?;
        let options = self.head_options(store, self.angles()?)?;
        let (qkv, rotated) = (saved.qkv.first(len)?, saved.rotated.first_mut(len)?);
        heads(device, &options, qkv, rotated)
    }

    /// Backward of [`BlockPass::heads`], in `s.inner`.
    pub(super) fn heads_backward(
        &self,
        store: &mut dyn Store,
        saved: &Saved,
        s: &mut TrainingScratch,
    ) -> Result<()> {
        let (device, dim) = (self.device, self.block.required_attention()?.head_dim);
        let len = self.sizes().qkv;
        // Computes the gradients of both norms together; the store keeps them apart.
        s.dvectors.grow(device, 2 * dim)?;
        activation::fill(device, s.dvectors.first_mut(2 * dim)?, 0.0)?;
        let mut q = Array::scratch(device, dim)?;
        activation::fill(device, q.all_mut(), 0.0)?;
        let [q_norm, k_norm] = self.head_norms()?;
        {
            let options = self.head_options(&*store, self.angles()?)?;
            let dnorms = [
                q_norm.map(|_| q.all_mut()),
                match k_norm {
                    Some(_) => Some(s.dvectors.first_mut(dim)?),
                    None => None,
                },
            ];
            let dqkv = s.inner.first_mut(len)?;
            heads_backward(device, &options, saved.qkv.first(len)?, dqkv, dnorms)?;
        }
        for (norm, gradient) in [(q_norm, q.all()), (k_norm, s.dvectors.first(dim)?)] {
            if let Some(id) = norm {
                let (_, to) = store.vector_with_gradient(id)?;
                activation::add(device, to, gradient)?;
            }
        }
        Ok(())
    }

    /// Attention of the batch's documents.
    pub(super) fn attend(&self, saved: &mut Saved) -> Result<()> {
        let (device, sizes) = (self.device, self.sizes());
        saved.attended.grow(device, sizes.attended)?;
        saved.lse.grow(device, sizes.lse)?;
        attention(
            device,
            &self.block.required_attention()?.shape(),
            &self.batch.documents,
            saved.rotated.first(sizes.qkv)?,
            saved.attended.first_mut(sizes.attended)?,
            saved.lse.first_mut(sizes.lse)?,
        )
    }

    /// Backward of [`BlockPass::attend`]: computes in `s.inner` the gradients of queries, keys and values from `s.dattended`.
    pub(super) fn attend_backward(&self, saved: &Saved, s: &mut TrainingScratch) -> Result<()> {
        let sizes = self.sizes();
        let forward = (
            saved.rotated.first(sizes.qkv)?,
            saved.attended.first(sizes.attended)?,
            saved.lse.first(sizes.lse)?,
        );
        attention_backward(
            self.device,
            &self.block.required_attention()?.shape(),
            &self.batch.documents,
            forward,
            s.dattended.first(sizes.attended)?,
            s.inner.first_mut(sizes.qkv)?,
        )
    }

    /// Multiplies the output of attention by the sigmoid of its gate.
    pub(super) fn gate_heads(&self, saved: &mut Saved) -> Result<()> {
        let (device, len) = (self.device, self.sizes().attended);
        saved.gated.grow(device, len)?;
        let (gate, x) = (saved.gate.first(len)?, saved.attended.first(len)?);
        sigmoid_gate(device, gate, x, saved.gated.first_mut(len)?)
    }

    /// Backward of [`BlockPass::gate_heads`], in `s.dattended` and in `saved.gate`.
    pub(super) fn gate_heads_backward(
        &self,
        saved: &mut Saved,
        s: &mut TrainingScratch,
    ) -> Result<()> {
        let len = self.sizes().attended;
        let (gate, x) = (saved.gate.first_mut(len)?, saved.attended.first(len)?);
        sigmoid_gate_backward(self.device, gate, x, s.dattended.first_mut(len)?)
    }

    fn angles(&self) -> Result<&Angles> {
        match self.block.required_attention()?.rope {
            Some(rope) => Ok(&self.batch.angles[rope]),
            None => bail!(Internal, "attention without rotation is not trained"),
        }
    }

    fn head_norms(&self) -> Result<[Option<VectorId>; 2]> {
        match self.layout.vectors {
            MixerVectors::Attention(norms) => Ok(norms),
            MixerVectors::GatedDelta(_) => bail!(Internal, "a gated delta net taken for attention"),
        }
    }

    fn head_options<'b>(
        &self,
        store: &'b dyn Store,
        angles: &'b Angles,
    ) -> Result<HeadOptions<'b>> {
        let of = |norm: Option<VectorId>| norm.map(|id| store.vector(id)).transpose();
        let [q, k] = self.head_norms()?;
        let AttentionSpec {
            heads,
            kv_heads,
            head_dim,
            ..
        } = *self.block.required_attention()?;
        Ok(HeadOptions {
            heads,
            kv_heads,
            dim: head_dim,
            norms: [of(q)?, of(k)?],
            eps: self.spec.norm_eps,
            angles,
        })
    }
}
