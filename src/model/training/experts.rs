//! A mixture of experts forward.

use super::block::BlockPass;
use super::layout::{ExpertsLayout, GatedMlpLayout};
use super::linear::LinearScratch;
use super::scratch::{ExpertScratch, Scratch};
use super::{MatrixId, Store};
use crate::base::Result;
use crate::base::error::bail;
use crate::model::spec::{ExpertsSpec, GatedMlpSpec, MlpSpec};
use crate::ops::experts::route;
use crate::ops::training::activation::glu;
use crate::ops::training::array;
use crate::ops::training::experts::RoutedRows;
use crate::ops::training::matmul::{Form, Sizes, matmul};
use crate::ops::{Array, Mixed, Slice, activation};

/// Bytes that `rows` rows of `hidden` elements take in a mixture of experts, where an element of activations has `element`: rows of an expert
/// and its results, and the sum and the router's logits in f32.
pub(super) fn expert_bytes(mlp: &MlpSpec, rows: usize, hidden: usize, element: usize) -> usize {
    match mlp.experts() {
        0 => 0,
        experts => rows * (2 * element * hidden + size_of::<f32>() * (hidden + experts)),
    }
}

/// Gate and up, what goes into the last projection, and the memory of projections.
type GatedMemory<'a> = (
    &'a mut Array<Mixed>,
    &'a mut Array<Mixed>,
    &'a mut Array<Mixed>,
    &'a mut LinearScratch,
);

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
        let shared = match (&layout.shared, &spec.shared) {
            (Some((mlp, gate)), Some(shared)) => {
                let weights = match gate {
                    Some(gate) => self.gate(store, *gate, x, s)?,
                    None => vec![1.0; self.rows()],
                };
                Some((RoutedRows::all(device, &weights)?, (mlp, &shared.mlp)))
            }
            _ => None,
        };
        let Scratch {
            weight,
            linear,
            inner,
            experts,
            ..
        } = s;
        let ExpertScratch {
            taken, made, sum, ..
        } = experts;
        taken.grow(device, len)?;
        made.grow(device, len)?;
        sum.grow(device, len)?;
        activation::fill(device, sum.first_mut(len)?, 0.0)?;
        for (expert, rows) in routed.counts() {
            if rows == 0 {
                continue;
            }
            let n = rows * hidden;
            routed.take(device, expert, x, hidden, taken.first_mut(n)?)?;
            let mlp = (&layout.experts[expert], &spec.expert);
            let memory = (&mut *gate_up, &mut *inner, &mut *weight, &mut *linear);
            self.run_gated(store, mlp, (taken.first(n)?, rows), made, memory)?;
            routed.add(device, expert, made.first(n)?, hidden, sum.first_mut(len)?)?;
        }
        if let Some((all, mlp)) = shared {
            let memory = (gate_up, inner, weight, linear);
            self.run_gated(store, mlp, (x, self.rows()), made, memory)?;
            all.add(device, 0, made.first(len)?, hidden, sum.first_mut(len)?)?;
        }
        array::convert(device, sum.first(len)?, made.first_mut(len)?)
    }

    /// Makes `made` what a gated MLP makes of some rows.
    fn run_gated(
        &self,
        store: &mut dyn Store,
        (layout, spec): (&GatedMlpLayout, &GatedMlpSpec),
        (x, rows): (Slice<'_, Mixed>, usize),
        made: &mut Array<Mixed>,
        (gate_up, inner, weight, linear): GatedMemory<'_>,
    ) -> Result<()> {
        let (device, hidden, wide) = (self.device, self.spec.hidden_size, spec.intermediate_size);
        gate_up.grow(device, 2 * rows * wide)?;
        inner.grow(device, rows * wide)?;
        let both = self.linear_of(rows, &layout.gate_up, hidden);
        both.forward(store, x, gate_up, false, (&mut *weight, &mut *linear))?;
        let gate_up = gate_up.first(2 * rows * wide)?;
        let to = inner.first_mut(rows * wide)?;
        glu(device, spec.activation, gate_up, wide, to)?;
        let down = [layout.down];
        let down = self.linear_of(rows, &down, wide);
        let inner = inner.first(rows * wide)?;
        down.forward(store, inner, made, false, (weight, linear))
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
