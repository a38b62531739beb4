//! A mixture of experts in training: [`BlockOp::Route`](crate::model::order::BlockOp::Route) and
//! [`BlockOp::Experts`](crate::model::order::BlockOp::Experts), forward and backward. The backward pass recomputes each expert just before
//! its gradients.

use super::block::{BlockPass, branch_gradients};
use super::layout::GatedMlpLayout;
use super::scratch::{Routing, TrainingScratch};
use super::{MatrixId, RowGradients, Store};
use crate::base::Result;
use crate::base::error::bail;
use crate::model::order::{ExpertTurn, expert_turns};
use crate::model::spec::{DenseMlpSpec, MlpSpec};
use crate::ops::experts::{RoutedRows, Routes, route, route_backward};
use crate::ops::training::activation::{glu, glu_backward};
use crate::ops::training::array;
use crate::ops::training::matmul::{GemmForm, Sizes, matmul};
use crate::ops::{Array, Mixed, Slice, activation};

/// Bytes of scratch for a mixture of experts with `rows` rows of `hidden` elements and width `wide` between the projections. An element of
/// activations has `element` bytes.
pub(super) fn expert_bytes(
    mlp: &MlpSpec,
    (rows, hidden, wide): (usize, usize, usize),
    element: usize,
    backward: bool,
) -> usize {
    match mlp.experts() {
        0 => 0,
        experts => {
            let outputs = if backward { 3 } else { 2 };
            let activations = outputs * hidden + 2 * wide;
            let dlogits = if backward { element * experts } else { 0 };
            rows * (element * activations + dlogits + size_of::<f32>() * (hidden + experts))
        }
    }
}

/// The rows of an expert among all rows `x` of a batch.
#[derive(Clone, Copy)]
struct ExpertRows<'a> {
    rows: &'a RoutedRows,
    expert: usize,
    x: Slice<'a, Mixed>,
}

impl ExpertRows<'_> {
    fn count(&self) -> usize {
        self.rows.routes().count(self.expert)
    }
}

/// The parameters and the shape of a gated MLP.
type GatedMlp<'a> = (&'a GatedMlpLayout, &'a DenseMlpSpec);

impl BlockPass<'_> {
    /// Routes the rows `x` to experts, and stores the routing in `s.experts.routing`.
    pub(super) fn route(
        &self,
        store: &mut dyn Store,
        x: Slice<'_, Mixed>,
        s: &mut TrainingScratch,
    ) -> Result<()> {
        let (layout, spec) = self.mixture()?;
        let logits = self.products(store, layout.router, x, s)?;
        let routes = route(&logits, spec.count, spec.per_token, spec.normalized)?;
        let every_row = match layout.shared {
            Some((_, gate)) => {
                let gate = gate.map(|gate| self.products(store, gate, x, s));
                Routes::shared(self.rows(), gate.transpose()?.as_deref())
            }
            None => Routes::none(),
        };
        s.experts.routing = Some(Routing {
            logits,
            routed: RoutedRows::new(self.device, routes)?,
            every_row: RoutedRows::new(self.device, every_row)?,
            dweights: Vec::new(),
            dshared: Vec::new(),
        });
        Ok(())
    }

    /// Computes the output of the mixture for the rows `x` in `s.experts.made`.
    pub(super) fn experts(
        &self,
        store: &mut dyn Store,
        x: Slice<'_, Mixed>,
        s: &mut TrainingScratch,
    ) -> Result<()> {
        let (device, hidden, len) = (self.device, self.spec.hidden_size, x.len());
        let routing = take_routing(s)?;
        s.experts.made.grow(device, len)?;
        s.experts.sum.grow(device, len)?;
        activation::fill(device, s.experts.sum.first_mut(len)?, 0.0)?;
        for turn in expert_turns(self.mixture()?.1) {
            let (of, mlp) = self.expert(turn, &routing, x)?;
            if of.count() == 0 {
                continue;
            }
            self.run_expert(store, mlp, of, s)?;
            let made = s.experts.made.first(of.count() * hidden)?;
            let sum = s.experts.sum.first_mut(len)?;
            of.rows.add(device, of.expert, made, hidden, sum)?;
        }
        s.experts.routing = Some(routing);
        let (made, sum) = (&mut s.experts.made, &s.experts.sum);
        array::convert(device, sum.first(len)?, made.first_mut(len)?)
    }

    /// Backward of [`BlockPass::experts`]: computes in `s.experts.sum` the gradient of the rows `x` through the experts, and gives the
    /// store the gradients of the experts' matrices. An expert without rows has zero gradients.
    pub(super) fn experts_backward(
        &self,
        store: &mut dyn Store,
        x: Slice<'_, Mixed>,
        s: &mut TrainingScratch,
    ) -> Result<()> {
        let (device, hidden, len) = (self.device, self.spec.hidden_size, x.len());
        let mut routing = take_routing(s)?;
        s.experts.sum.grow(device, len)?;
        activation::fill(device, s.experts.sum.first_mut(len)?, 0.0)?;
        let (mut dweights, mut dshared) = (Vec::new(), Vec::new());
        for turn in expert_turns(self.mixture()?.1) {
            let (of, (layout, spec)) = self.expert(turn, &routing, x)?;
            let (down, wide) = ([layout.down], spec.intermediate_size);
            let both = self.linear_of(of.count(), &layout.gate_up, hidden);
            let down = self.linear_of(of.count(), &down, wide);
            if of.count() == 0 {
                both.no_gradients(store, (&mut s.weight, &mut s.linear))?;
                down.no_gradients(store, (&mut s.weight, &mut s.linear))?;
                continue;
            }
            let gradients = match turn {
                ExpertTurn::Routed(_) => &mut dweights,
                ExpertTurn::Shared => &mut dshared,
            };
            self.run_expert(store, (layout, spec), of, s)?;
            gradients.extend(self.sum_backward(of, s)?);

            let (n, rows) = (of.count() * hidden, of.count() * wide);
            let dy = s.experts.dmade.first(n)?;
            let memory = (&mut s.weight, &mut s.linear);
            down.input_gradients(store, dy, s.inner.first_mut(rows)?, memory)?;
            let gate_up = s.experts.gate_up.first_mut(2 * rows)?;
            let inner = s.inner.first_mut(rows)?;
            glu_backward(device, spec.activation, gate_up, wide, inner)?;
            let memory = (&mut s.weight, &mut s.linear);
            down.weight_gradients(store, dy, s.inner.first(rows)?, memory)?;

            let dy = s.experts.gate_up.first(2 * rows)?;
            let memory = (&mut s.weight, &mut s.linear);
            both.input_gradients(store, dy, s.experts.made.first_mut(n)?, memory)?;
            let memory = (&mut s.weight, &mut s.linear);
            both.weight_gradients(store, dy, s.experts.taken.first(n)?, memory)?;
            let (dx, sum) = (s.experts.made.first(n)?, s.experts.sum.first_mut(len)?);
            of.rows.take_backward(device, of.expert, dx, hidden, sum)?;
        }
        (routing.dweights, routing.dshared) = (dweights, dshared);
        s.experts.routing = Some(routing);
        Ok(())
    }

    /// Backward of [`BlockPass::route`]: computes in `s.dx_before` the gradient of the rows `x`, including the part through the experts,
    /// and gives the store the gradients of the router and of the shared expert's gate.
    pub(super) fn route_backward(
        &self,
        store: &mut dyn Store,
        x: Slice<'_, Mixed>,
        s: &mut TrainingScratch,
    ) -> Result<()> {
        let (layout, spec) = self.mixture()?;
        let Routing {
            logits,
            routed,
            every_row,
            dweights,
            dshared,
        } = take_routing(s)?;
        let (count, routes) = (spec.count, routed.routes());
        let dlogits = route_backward(&logits, count, routes, &dweights, spec.normalized);
        self.products_backward(store, layout.router, x, &dlogits, s)?;
        if let Some((_, Some(gate))) = layout.shared {
            // The derivative of a sigmoid w is w (1 - w).
            let weights = every_row.routes().of(0).zip(&dshared);
            let dlogits: Vec<f32> = weights.map(|((_, w), d)| d * w * (1.0 - w)).collect();
            self.products_backward(store, gate, x, &dlogits, s)?;
        }
        let dx = s.dx_before.first_mut(x.len())?;
        array::convert(self.device, s.experts.sum.first(x.len())?, dx)
    }

    /// An expert with its rows.
    fn expert<'a>(
        &'a self,
        turn: ExpertTurn,
        routing: &'a Routing,
        x: Slice<'a, Mixed>,
    ) -> Result<(ExpertRows<'a>, GatedMlp<'a>)> {
        let (layout, spec) = self.mixture()?;
        let (rows, expert, mlp) = match (turn, &layout.shared, &spec.shared) {
            (ExpertTurn::Routed(expert), ..) => {
                let mlp = (&layout.experts[expert], &spec.expert);
                (&routing.routed, expert, mlp)
            }
            (ExpertTurn::Shared, Some((layout, _)), Some(shared)) => {
                (&routing.every_row, 0, (layout, &shared.mlp))
            }
            _ => bail!(Internal, "an expert of every row without parameters"),
        };
        Ok((ExpertRows { rows, expert, x }, mlp))
    }

    /// Computes the output of an expert for its rows in `s.experts.made`. Leaves the rows in `taken`, and gate and up in `gate_up`.
    fn run_expert(
        &self,
        store: &mut dyn Store,
        (layout, spec): GatedMlp<'_>,
        of: ExpertRows<'_>,
        s: &mut TrainingScratch,
    ) -> Result<()> {
        let (device, hidden, wide) = (self.device, self.spec.hidden_size, spec.intermediate_size);
        let (rows, n) = (of.count(), of.count() * hidden);
        s.experts.taken.grow(device, n)?;
        s.experts.gate_up.grow(device, 2 * rows * wide)?;
        s.experts.made.grow(device, n)?;
        s.inner.grow(device, rows * wide)?;
        let taken = s.experts.taken.first_mut(n)?;
        of.rows.take(device, of.expert, of.x, hidden, taken)?;
        let both = self.linear_of(rows, &layout.gate_up, hidden);
        let (taken, gate_up) = (s.experts.taken.first(n)?, &mut s.experts.gate_up);
        let memory = (&mut s.weight, &mut s.linear);
        both.forward(store, taken, gate_up, false, memory)?;
        let gate_up = s.experts.gate_up.first(2 * rows * wide)?;
        let inner = s.inner.first_mut(rows * wide)?;
        glu(device, spec.activation, gate_up, wide, inner)?;
        let down = [layout.down];
        let down = self.linear_of(rows, &down, wide);
        let inner = s.inner.first(rows * wide)?;
        let memory = (&mut s.weight, &mut s.linear);
        down.forward(store, inner, &mut s.experts.made, false, memory)
    }

    /// Computes in `s.experts.dmade` the gradient of an expert's output, which is in `made`, and returns the gradients of its routing
    /// weights.
    fn sum_backward(&self, of: ExpertRows<'_>, s: &mut TrainingScratch) -> Result<Vec<f32>> {
        let (device, hidden, rows) = (self.device, self.spec.hidden_size, of.count());
        let dy = branch_gradients(self.layout.mlp_norms[1], &s.dx, &s.dbranch);
        let (made, dsum) = (s.experts.made.first(rows * hidden)?, dy.first(of.x.len())?);
        s.experts.dmade.grow(device, rows * hidden)?;
        s.experts.logits.grow(device, rows)?;
        let dmade = s.experts.dmade.first_mut(rows * hidden)?;
        let dweights = s.experts.logits.first_mut(rows)?;
        let operands = (made, dsum);
        of.rows
            .add_backward(device, of.expert, operands, hidden, dmade, dweights)?;
        let mut values = vec![0.0; rows];
        s.experts.logits.first(rows)?.read(&mut values)?;
        Ok(values)
    }

    /// The products of the rows `x` with the rows of a small matrix, in f32.
    fn products(
        &self,
        store: &mut dyn Store,
        matrix: MatrixId,
        x: Slice<'_, Mixed>,
        s: &mut TrainingScratch,
    ) -> Result<Vec<f32>> {
        let (device, m) = (self.device, self.rows());
        let (n, k) = store.shape(matrix);
        s.weight.grow(device, n * k)?;
        store.read(matrix, 0..n, s.weight.first_mut(n * k)?)?;
        let out = &mut s.experts.logits;
        out.grow(device, m * n)?;
        let (weight, to) = (s.weight.first(n * k)?, out.first_mut(m * n)?);
        matmul(
            device,
            GemmForm::NT,
            Sizes { m, n, k },
            x,
            weight,
            to,
            false,
        )?;
        let mut values = vec![0.0; m * n];
        out.first(m * n)?.read(&mut values)?;
        Ok(values)
    }

    /// Backward of [`BlockPass::products`]: adds the gradient of `x` to `s.experts.sum`, and gives the store the gradient of the matrix.
    fn products_backward(
        &self,
        store: &mut dyn Store,
        matrix: MatrixId,
        x: Slice<'_, Mixed>,
        dproducts: &[f32],
        s: &mut TrainingScratch,
    ) -> Result<()> {
        let (device, t) = (self.device, self.rows());
        let (n, k) = store.shape(matrix);
        let mut dy = Array::<Mixed>::scratch(device, dproducts.len())?;
        dy.all_mut().copy_from(Slice::Host(dproducts))?;
        s.weight.grow(device, n * k)?;
        store.read(matrix, 0..n, s.weight.first_mut(n * k)?)?;
        let (weight, sum) = (s.weight.first(n * k)?, s.experts.sum.first_mut(t * k)?);
        let sizes = Sizes { m: t, n: k, k: n };
        matmul(device, GemmForm::NN, sizes, dy.all(), weight, sum, true)?;
        if !store.trains(matrix) {
            return Ok(());
        }
        let sizes = Sizes { m: n, n: k, k: t };
        let to = s.weight.first_mut(n * k)?;
        matmul(device, GemmForm::TN, sizes, dy.all(), x, to, false)?;
        store.gradients(&[RowGradients {
            matrix,
            first_row: 0,
            values: s.weight.first(n * k)?,
        }])
    }
}

fn take_routing(s: &mut TrainingScratch) -> Result<Routing> {
    match s.experts.routing.take() {
        Some(routing) => Ok(routing),
        None => bail!(Internal, "experts of rows that were not routed"),
    }
}
