//! The gated delta rule over rows packed from several documents, whose states begin at zero, with checkpoints of the states, and its
//! backward pass, which recomputes the states between two checkpoints.

use super::attention::{DocumentRows, add_scaled, dot};
use super::rows::{by_parts, by_parts_of_two};
use crate::base::call;
use crate::base::error::{Result, bail};
use crate::cpu::{Cpu, DeltaGates, DeltaRuleRows};
use crate::tensor::DeltaShape;

/// Rows from one checkpoint of the states to the next: row `INTERVAL * i` has checkpoint i.
const INTERVAL: usize = 64;

impl DeltaShape {
    /// Elements of the checkpoints of `rows` rows: the state of each value head before every 64th row.
    pub fn checkpoint_floats(&self, rows: usize) -> usize {
        rows.div_ceil(INTERVAL) * self.matrix_floats()
    }

    /// Elements of the scratch of [`Cpu::packed_delta_rule_backward`].
    pub fn backward_floats(&self) -> usize {
        self.matrix_floats() + self.key_heads * self.key_head_floats()
    }

    /// Value heads of a key head.
    fn group(&self) -> usize {
        self.value_heads / self.key_heads
    }

    fn head_floats(&self) -> usize {
        self.key_dim * self.value_dim
    }

    /// Elements of the scratch of a key head: for one of its value heads the states and the corrections of the rows between two
    /// checkpoints, and for all of them the gradients of these rows.
    fn key_head_floats(&self) -> usize {
        INTERVAL * (self.head_floats() + self.value_dim + self.gradient_floats())
    }

    /// Elements of a row's gradients of a key head: of its query, its key, the values, and both gates.
    fn gradient_floats(&self) -> usize {
        2 * self.key_dim + self.group() * (self.value_dim + 2)
    }
}

/// The inputs and checkpoints of the gated delta rule.
#[derive(Clone, Copy, Debug)]
pub struct DeltaForward<'a> {
    /// `[T, channels]`: the queries, keys and values of a row side by side.
    pub qkv: &'a [f32],
    /// `[T, value_heads]`: the decay of the state.
    pub decay: &'a [f32],
    /// `[T, value_heads]`: the share of a correction that is written.
    pub beta: &'a [f32],
    /// The checkpoints that [`Cpu::packed_delta_rule`] wrote.
    pub states: &'a [f32],
}

/// The gradients that [`Cpu::packed_delta_rule_backward`] computes.
#[derive(Debug)]
pub struct DeltaGradients<'a> {
    /// `[T, channels]`.
    pub dqkv: &'a mut [f32],
    /// `[T, value_heads]`: the gradient of the logarithm of the decay.
    pub dlog: &'a mut [f32],
    /// `[T, value_heads]`.
    pub dbeta: &'a mut [f32],
}

/// The rows between two checkpoints.
#[derive(Clone, Copy)]
struct Chunk<'a> {
    shape: &'a DeltaShape,
    documents: DocumentRows<'a>,
    forward: DeltaForward<'a>,
    dout: &'a [f32],
    first: usize,
    rows: usize,
}

impl Cpu {
    /// The gated delta rule, [`Cpu::delta_rule`], from the zero state at the first row of each document. Writes `out`,
    /// `[T, value_heads, value_dim]`, and to `states`, of [`DeltaShape::checkpoint_floats`] elements, the states before every 64th row.
    pub fn packed_delta_rule(
        &self,
        shape: &DeltaShape,
        documents: DocumentRows<'_>,
        (qkv, decay, beta): (&[f32], &[f32], &[f32]),
        out: &mut [f32],
        states: &mut [f32],
    ) -> Result<()> {
        let rows = documents.starts.len();
        let (channels, heads, values) = (shape.channels(), shape.value_heads, shape.value_width());
        check(shape, rows, [qkv.len(), out.len(), states.len()])?;
        let mut state = vec![0.0; shape.matrix_floats()];
        let mut first = 0;
        while first < rows {
            if documents.starts[first] as usize == first {
                state.fill(0.0);
            }
            if first.is_multiple_of(INTERVAL) {
                let at = first / INTERVAL * state.len();
                states[at..at + state.len()].copy_from_slice(&state);
            }
            let end = (documents.ends[first] as usize).min((first / INTERVAL + 1) * INTERVAL);
            let gates = first * heads..end * heads;
            let run = DeltaRuleRows {
                qkv: &qkv[first * channels..end * channels],
                decay: &decay[gates.clone()],
                beta: &beta[gates],
                out: &mut out[first * values..end * values],
            };
            self.delta_rule(shape, run, &mut state)?;
            first = end;
        }
        Ok(())
    }

    /// The backward pass of [`Cpu::packed_delta_rule`], from `dout`, the gradient of its results. `scratch` has
    /// [`DeltaShape::backward_floats`] elements. Cancelled with the thread's [`call`].
    ///
    /// With `S' = decay S`, `c = v - S'^T k`, `u = beta c`, `S+ = S' + k u^T` and `out = S+^T q`, and with `D` the gradient of `S+`, to
    /// which `q dout^T` has been added: `dq = S+ dout`, `du = D^T k`, `dv = beta du`, `dbeta = du . c`, `dk = D u - S' dv`. The gradient of
    /// `S'` is `D' = D - k dv^T`, that of the logarithm of the decay the sum of `D' S'`, and that of `S` is `decay D'`.
    pub fn packed_delta_rule_backward(
        &self,
        shape: &DeltaShape,
        documents: DocumentRows<'_>,
        forward: DeltaForward<'_>,
        dout: &[f32],
        gradients: DeltaGradients<'_>,
        scratch: &mut [f32],
    ) -> Result<()> {
        let DeltaGradients { dqkv, dlog, dbeta } = gradients;
        let rows = documents.starts.len();
        check(
            shape,
            rows,
            [forward.qkv.len(), dout.len(), forward.states.len()],
        )?;
        check(shape, rows, [dqkv.len(), dout.len(), forward.states.len()])?;
        if scratch.len() != shape.backward_floats()
            || [dlog.len(), dbeta.len()] != [rows * shape.value_heads; 2]
        {
            bail!(
                Internal,
                "{} and {} gradients of the gates of {rows} rows of {shape:?}, with {} elements of scratch",
                dlog.len(),
                dbeta.len(),
                scratch.len()
            );
        }
        let (dstates, of_heads) = scratch.split_at_mut(shape.matrix_floats());
        dstates.fill(0.0);
        let group = shape.group();
        let parts = (group * shape.head_floats(), shape.key_head_floats());
        for chunk in (0..rows.div_ceil(INTERVAL)).rev() {
            call::check()?;
            let first = chunk * INTERVAL;
            let chunk = Chunk {
                shape,
                documents,
                forward,
                dout,
                first,
                rows: INTERVAL.min(rows - first),
            };
            let both = (&mut *dstates, &mut *of_heads);
            by_parts_of_two(self.pool(), both, parts, |key, dstates, scratch| {
                let (states, gradients) =
                    scratch.split_at_mut(scratch.len() - INTERVAL * shape.gradient_floats());
                gradients.fill(0.0);
                for (g, dstate) in dstates.chunks_exact_mut(shape.head_floats()).enumerate() {
                    chunk.recompute(key * group + g, states);
                    chunk.backward((key, g), states, dstate, gradients);
                }
            });
            let channels = shape.channels();
            let of_rows = &mut dqkv[first * channels..(first + chunk.rows) * channels];
            let (of_heads, gradient) = (&*of_heads, shape.gradient_floats());
            let gradients = |key: usize, row: usize| {
                let end = (key + 1) * shape.key_head_floats();
                &of_heads[end - (INTERVAL - row) * gradient..][..gradient]
            };
            by_parts(self.pool(), of_rows, channels, |row, dqkv| {
                for key in 0..shape.key_heads {
                    write_gradients(shape, key, gradients(key, row), dqkv);
                }
            });
            for row in 0..chunk.rows {
                for key in 0..shape.key_heads {
                    let gates = &gradients(key, row)[gradient - 2 * group..];
                    let at = (first + row) * shape.value_heads + key * group;
                    dlog[at..at + group].copy_from_slice(&gates[..group]);
                    dbeta[at..at + group].copy_from_slice(&gates[group..]);
                }
            }
        }
        Ok(())
    }

    /// The backward pass of [`Cpu::delta_gates`] on rows `a` and `b` `[T, value_heads]` before it: `dlog`, the gradient of the decay's
    /// logarithm `-exp(a_log) softplus(a + dt_bias)`, becomes that of `a`, and `dbeta` that of `b`. Adds to the gradients of `a_log` and
    /// `dt_bias`.
    pub fn delta_gates_backward(
        &self,
        gates: DeltaGates<'_>,
        (a, b): (&[f32], &[f32]),
        (dlog, dbeta): (&mut [f32], &mut [f32]),
        (da_log, ddt_bias): (&mut [f32], &mut [f32]),
    ) -> Result<()> {
        let heads = gates.a_log.len();
        let is_sound = heads > 0
            && a.len().is_multiple_of(heads)
            && [b.len(), dlog.len(), dbeta.len()] == [a.len(); 3]
            && [gates.dt_bias.len(), da_log.len(), ddt_bias.len()] == [heads; 3];
        if !is_sound {
            bail!(
                Internal,
                "gradients of {} and {} gates of {heads} heads, with {} and {} before",
                a.len(),
                b.len(),
                dlog.len(),
                dbeta.len()
            );
        }
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        for (i, (dlog, dbeta)) in dlog.iter_mut().zip(dbeta).enumerate() {
            let head = i % heads;
            let rate = f64::from(gates.a_log[head]).exp();
            let x = f64::from(a[i]) + f64::from(gates.dt_bias[head]);
            let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
            let d = f64::from(*dlog);
            da_log[head] += (-rate * softplus * d) as f32;
            *dlog = (-rate * sigmoid(x) * d) as f32;
            ddt_bias[head] += *dlog;
            let beta = sigmoid(f64::from(b[i]));
            *dbeta = (f64::from(*dbeta) * beta * (1.0 - beta)) as f32;
        }
        Ok(())
    }
}

impl Chunk<'_> {
    /// A row's query and key of a key head.
    fn query_and_key(&self, key: usize, row: usize) -> (&[f32], &[f32]) {
        let dim = self.shape.key_dim;
        let at = (self.first + row) * self.shape.channels() + key * dim;
        let qkv = self.forward.qkv;
        (
            &qkv[at..][..dim],
            &qkv[at + self.shape.key_width()..][..dim],
        )
    }

    fn value(&self, head: usize, row: usize) -> &[f32] {
        let dim = self.shape.value_dim;
        let at = (self.first + row) * self.shape.channels() + 2 * self.shape.key_width();
        &self.forward.qkv[at + head * dim..][..dim]
    }

    /// A row's decay and share of a correction.
    fn gates(&self, head: usize, row: usize) -> (f32, f32) {
        let at = (self.first + row) * self.shape.value_heads + head;
        (self.forward.decay[at], self.forward.beta[at])
    }

    /// Whether a row is the first of its document.
    fn begins(&self, row: usize) -> bool {
        self.documents.starts[self.first + row] as usize == self.first + row
    }

    /// Computes for a value head the state before each row, `[rows, key_dim, value_dim]`, and after them all the corrections
    /// `v - decay S^T k`, `[rows, value_dim]`.
    fn recompute(&self, head: usize, scratch: &mut [f32]) {
        let (len, dim) = (self.shape.head_floats(), self.shape.value_dim);
        let (states, corrections) = scratch.split_at_mut(INTERVAL * len);
        let at = self.first / INTERVAL * self.shape.matrix_floats() + head * len;
        states[..len].copy_from_slice(&self.forward.states[at..][..len]);
        for row in 0..self.rows {
            let (states, after) = states[row * len..].split_at_mut(len);
            if self.begins(row) {
                states.fill(0.0);
            }
            let (_, k) = self.query_and_key(head / self.shape.group(), row);
            let (decay, beta) = self.gates(head, row);
            let correction = &mut corrections[row * dim..][..dim];
            correction.copy_from_slice(self.value(head, row));
            for (k, state) in k.iter().zip(states.chunks_exact(dim)) {
                add_scaled(correction, state, -decay * k);
            }
            if row + 1 < self.rows {
                let states = states.chunks_exact(dim).zip(after.chunks_exact_mut(dim));
                for (k, (state, after)) in k.iter().zip(states) {
                    let change = k * beta;
                    for ((after, state), c) in after.iter_mut().zip(state).zip(&*correction) {
                        *after = decay * state + change * c;
                    }
                }
            }
        }
    }

    /// Runs the rows backward for the value head `g` of a key head, after [`Chunk::recompute`]. `dstate`, the gradient of the state after
    /// the last row, becomes that of the state before the first one. Adds to `gradients`, `[rows, gradient_floats]`.
    fn backward(
        &self,
        (key, g): (usize, usize),
        scratch: &[f32],
        dstate: &mut [f32],
        gradients: &mut [f32],
    ) {
        let shape = self.shape;
        let (len, dim, group) = (shape.head_floats(), shape.value_dim, shape.group());
        let (states, corrections) = scratch.split_at(INTERVAL * len);
        let head = key * group + g;
        let (mut u, mut du) = (vec![0.0; dim], vec![0.0; dim]);
        for row in (0..self.rows).rev() {
            if self.documents.ends[self.first + row] as usize == self.first + row + 1 {
                dstate.fill(0.0);
            }
            let (q, k) = self.query_and_key(key, row);
            let (decay, beta) = self.gates(head, row);
            let dout = &self.dout[((self.first + row) * shape.value_heads + head) * dim..][..dim];
            let (state, correction) = (
                &states[row * len..][..len],
                &corrections[row * dim..][..dim],
            );
            let gradients =
                &mut gradients[row * shape.gradient_floats()..][..shape.gradient_floats()];
            let (dq, rest) = gradients.split_at_mut(shape.key_dim);
            let (dk, rest) = rest.split_at_mut(shape.key_dim);
            let (dv, dgates) = rest.split_at_mut(group * dim);
            u.iter_mut()
                .zip(correction)
                .for_each(|(u, c)| *u = beta * c);
            du.fill(0.0);
            let written = dot(&u, dout);
            let both = || state.chunks_exact(dim);
            for (i, (dstate, state)) in dstate.chunks_exact_mut(dim).zip(both()).enumerate() {
                add_scaled(dstate, dout, q[i]);
                add_scaled(&mut du, dstate, k[i]);
                dq[i] += decay * dot(state, dout) + k[i] * written;
                dk[i] += dot(dstate, &u);
            }
            dgates[group + g] = dot(&du, correction);
            let dv = &mut dv[g * dim..][..dim];
            dv.iter_mut().zip(&du).for_each(|(dv, du)| *dv = beta * du);
            let mut dlog = 0.0;
            for (i, (dstate, state)) in dstate.chunks_exact_mut(dim).zip(both()).enumerate() {
                dk[i] -= decay * dot(state, dv);
                add_scaled(dstate, dv, -k[i]);
                dstate.iter_mut().for_each(|d| *d *= decay);
                dlog += dot(dstate, state);
            }
            dgates[g] = dlog;
        }
    }
}

/// Writes a key head's gradients of a row to their columns of `dqkv`.
fn write_gradients(shape: &DeltaShape, key: usize, gradients: &[f32], dqkv: &mut [f32]) {
    let (dim, width) = (shape.key_dim, shape.key_width());
    let values = shape.group() * shape.value_dim;
    dqkv[key * dim..][..dim].copy_from_slice(&gradients[..dim]);
    dqkv[width + key * dim..][..dim].copy_from_slice(&gradients[dim..2 * dim]);
    dqkv[2 * width + key * values..][..values].copy_from_slice(&gradients[2 * dim..][..values]);
}

/// Checks the lengths of queries, keys and values, of results, and of checkpoints.
fn check(shape: &DeltaShape, rows: usize, lengths: [usize; 3]) -> Result<()> {
    let expected = [
        rows * shape.channels(),
        rows * shape.value_width(),
        shape.checkpoint_floats(rows),
    ];
    if lengths != expected {
        bail!(
            Internal,
            "the delta rule of {rows} rows of {shape:?} with {lengths:?} elements; expected {expected:?}"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests;
