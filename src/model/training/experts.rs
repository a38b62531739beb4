//! A mixture of experts forward.

use super::block::BlockPass;
use super::layout::{ExpertsLayout, GatedMlpLayout};
use super::scratch::{ExpertScratch, Scratch};
use super::{MatrixId, Store};
use crate::base::Result;
use crate::base::error::bail;
use crate::model::spec::{ExpertsSpec, GatedMlpSpec, MlpSpec};
use crate::ops::experts::route;
use crate::ops::training::activation;
use crate::ops::training::experts::RoutedRows;
use crate::ops::training::matmul::{Form, Sizes, matmul};
use crate::ops::{Array, Mixed, Slice};

/// Elements of what rows take in a mixture of experts.
pub(super) struct ExpertSizes {
    /// Rows of an expert, and its results, each.
    pub(super) stream: usize,
    /// The router's logits, in f32.
    pub(super) logits: usize,
}

impl ExpertSizes {
    /// Sizes for `rows` rows of `hidden` elements. A dense MLP takes none.
    pub(super) fn new(mlp: &MlpSpec, rows: usize, hidden: usize) -> ExpertSizes {
        let experts = mlp.experts();
        ExpertSizes {
            stream: if experts > 0 { rows * hidden } else { 0 },
            logits: rows * experts,
        }
    }

    /// Bytes, where an element of activations has `element`.
    pub(super) fn bytes(&self, element: usize) -> usize {
        2 * element * self.stream + size_of::<f32>() * (self.stream + self.logits)
    }
}

impl BlockPass<'_> {
    /// Makes `s.experts.made` what the mixture makes of the rows `x`, and changes `gate_up`. The experts take their rows in turn, so that a
    /// row's sum has a fixed order.
    pub(super) fn run_experts(
        &self,
        store: &mut dyn Store,
        (layout, x): (&ExpertsLayout, Slice<'_, Mixed>),
        gate_up: &mut Array<Mixed>,
        s: &mut Scratch,
    ) -> Result<()> {
        let MlpSpec::Experts(spec) = &self.block.mlp else {
            bail!(Internal, "a dense MLP with the parameters of a mixture");
        };
        let (device, hidden) = (self.device, self.spec.hidden_size);
        let len = x.len();
        let routed = self.route(store, (layout, spec), x, s)?;
        let experts = &mut s.experts;
        for array in [&mut experts.taken, &mut experts.made] {
            array.grow(device, len)?;
        }
        experts.sum.grow(device, len)?;
        crate::ops::activation::fill(device, experts.sum.first_mut(len)?, 0.0)?;
        for (expert, rows) in routed.counts() {
            if rows == 0 {
                continue;
            }
            let n = rows * hidden;
            let taken = s.experts.taken.first_mut(n)?;
            routed.take(device, expert, x, hidden, taken)?;
            let taken = std::mem::replace(&mut s.experts.taken, Array::empty());
            let mlp = (&layout.experts[expert], &spec.expert);
            let done = self.run_gated(store, mlp, (taken.first(n)?, rows), gate_up, s);
            s.experts.taken = taken;
            done?;
            let ExpertScratch { made, sum, .. } = &mut s.experts;
            routed.add(device, expert, made.first(n)?, hidden, sum.first_mut(len)?)?;
        }
        if let (Some((mlp, gate)), Some(shared)) = (&layout.shared, &spec.shared) {
            let weights = match gate {
                Some(gate) => self.gate(store, *gate, x, s)?,
                None => vec![1.0; self.rows()],
            };
            let all = RoutedRows::all(device, &weights)?;
            self.run_gated(store, (mlp, &shared.mlp), (x, self.rows()), gate_up, s)?;
            let ExpertScratch { made, sum, .. } = &mut s.experts;
            all.add(device, 0, made.first(len)?, hidden, sum.first_mut(len)?)?;
        }
        let ExpertScratch { made, sum, .. } = &mut s.experts;
        crate::ops::training::array::convert(device, sum.first(len)?, made.first_mut(len)?)
    }

    /// Makes `s.experts.made` what a gated MLP makes of some rows.
    fn run_gated(
        &self,
        store: &mut dyn Store,
        (layout, spec): (&GatedMlpLayout, &GatedMlpSpec),
        (x, rows): (Slice<'_, Mixed>, usize),
        gate_up: &mut Array<Mixed>,
        s: &mut Scratch,
    ) -> Result<()> {
        let (device, hidden, wide) = (self.device, self.spec.hidden_size, spec.intermediate_size);
        gate_up.grow(device, 2 * rows * wide)?;
        s.inner.grow(device, rows * wide)?;
        let memory = (&mut s.weight, &mut s.linear);
        let both = self.linear_of(rows, &layout.gate_up, hidden);
        both.forward(store, x, gate_up, false, memory)?;
        let inner = s.inner.first_mut(rows * wide)?;
        activation::glu(
            device,
            spec.activation,
            gate_up.first(2 * rows * wide)?,
            wide,
            inner,
        )?;
        let down = [layout.down];
        let down = self.linear_of(rows, &down, wide);
        let memory = (&mut s.weight, &mut s.linear);
        let inner = s.inner.first(rows * wide)?;
        down.forward(store, inner, &mut s.experts.made, false, memory)
    }

    /// Routes each row of `x` to its experts.
    fn route(
        &self,
        store: &mut dyn Store,
        (layout, spec): (&ExpertsLayout, &ExpertsSpec),
        x: Slice<'_, Mixed>,
        s: &mut Scratch,
    ) -> Result<RoutedRows> {
        let logits = self.products(store, layout.router, x, s)?;
        let routes = route(&logits, spec.count, spec.per_token, spec.normalized)?;
        RoutedRows::new(self.device, &routes)
    }

    /// For each row of `x`, the factor of the results of the expert that every token goes to.
    fn gate(
        &self,
        store: &mut dyn Store,
        gate: MatrixId,
        x: Slice<'_, Mixed>,
        s: &mut Scratch,
    ) -> Result<Vec<f32>> {
        let mut factors = self.products(store, gate, x, s)?;
        let sigmoid = |x: &mut f32| *x = 1.0 / (1.0 + (-*x).exp());
        factors.iter_mut().for_each(sigmoid);
        Ok(factors)
    }

    /// The products of the rows `x` with those of a small matrix, in f32.
    fn products(
        &self,
        store: &mut dyn Store,
        matrix: MatrixId,
        x: Slice<'_, Mixed>,
        s: &mut Scratch,
    ) -> Result<Vec<f32>> {
        let (device, m) = (self.device, self.rows());
        let (n, k) = store.shape(matrix);
        s.weight.grow(device, n * k)?;
        store.read(matrix, 0..n, s.weight.first_mut(n * k)?)?;
        let out = &mut s.experts.logits;
        out.grow(device, m * n)?;
        let (weight, to) = (s.weight.first(n * k)?, out.first_mut(m * n)?);
        matmul(device, Form::NT, Sizes { m, n, k }, x, weight, to, false)?;
        let mut values = vec![0.0; m * n];
        out.first(m * n)?.read(&mut values)?;
        Ok(values)
    }
}
