//! Gated linear units on rows of gate and up side by side, and gates of attention and of gated delta nets, forward and backward.

use super::rows::{by_parts, by_parts_of_two};
use crate::base::error::{Result, bail};
use crate::cpu::Cpu;

/// Elements of a part of an operation without rows.
const RUN: usize = 4096;

/// Returns the value of an activation, and its derivative.
pub(super) type Derivative = fn(f32) -> (f32, f32);

/// `x s` with `s = sigmoid(x)`, whose derivative is `s + x s (1 - s)`.
pub(super) fn silu(x: f32) -> (f32, f32) {
    let s = 1.0 / (1.0 + (-x).exp());
    (x * s, s + x * s * (1.0 - s))
}

/// `x (1 + t) / 2` with `t = tanh(u)`, `u = sqrt(2/pi) (x + 0.044715 x^3)`; the derivative is `(1 + t) / 2 + x (1 - t^2) u' / 2`.
fn gelu_tanh(x: f32) -> (f32, f32) {
    const FACTOR: f32 = 0.797_884_6;
    const CUBE: f32 = 0.044_715;
    let t = (FACTOR * (x + CUBE * x * x * x)).tanh();
    let slope = FACTOR * (1.0 + 3.0 * CUBE * x * x);
    (
        0.5 * x * (1.0 + t),
        0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope,
    )
}

impl Cpu {
    /// SiLU with its derivative.
    pub const SILU: Derivative = silu;
    /// The tanh form of GELU with its derivative.
    pub const GELU_TANH: Derivative = gelu_tanh;

    /// `act(gate) * up` for rows `[gate, up]`, each half `width` wide.
    pub fn glu_rows(
        &self,
        act: Derivative,
        gate_up: &[f32],
        width: usize,
        y: &mut [f32],
    ) -> Result<()> {
        check(gate_up.len(), y.len(), width)?;
        by_parts(self.pool(), y, width, |row, y| {
            let (gate, up) = gate_up[row * 2 * width..][..2 * width].split_at(width);
            for ((y, g), u) in y.iter_mut().zip(gate).zip(up) {
                *y = act(*g).0 * u;
            }
        });
        Ok(())
    }

    /// The backward pass of [`Cpu::glu_rows`], in place: `gate_up` becomes its gradient, and `dy`, the gradient of the results, becomes the
    /// recomputed results.
    pub fn glu_rows_backward(
        &self,
        act: Derivative,
        gate_up: &mut [f32],
        width: usize,
        dy: &mut [f32],
    ) -> Result<()> {
        check(gate_up.len(), dy.len(), width)?;
        by_parts_of_two(
            self.pool(),
            (gate_up, dy),
            (2 * width, width),
            |_, gate_up, dy| {
                let (gate, up) = gate_up.split_at_mut(width);
                for ((g, u), dy) in gate.iter_mut().zip(up).zip(dy) {
                    let (value, slope) = act(*g);
                    let d = *dy;
                    *dy = value * *u;
                    *g = d * *u * slope;
                    *u = d * value;
                }
            },
        );
        Ok(())
    }
}

impl Cpu {
    /// The backward pass of `y = sigmoid(gate) x`, [`Cpu::sigmoid_gate`]: `dy` becomes the gradient of `x`, and `gate` its own gradient.
    pub fn sigmoid_gate_backward(&self, gate: &mut [f32], x: &[f32], dy: &mut [f32]) -> Result<()> {
        if [x.len(), dy.len()] != [gate.len(); 2] {
            bail!(
                Internal,
                "gradients of {} gates, {} elements and {} results",
                gate.len(),
                x.len(),
                dy.len()
            );
        }
        by_parts_of_two(self.pool(), (gate, dy), (RUN, RUN), |part, gate, dy| {
            let x = &x[part * RUN..];
            for ((gate, dy), x) in gate.iter_mut().zip(dy).zip(x) {
                let s = 1.0 / (1.0 + (-*gate).exp());
                *gate = *dy * x * s * (1.0 - s);
                *dy *= s;
            }
        });
        Ok(())
    }

    /// `y *= silu(gate)` for rows of `y` `[T, width]`, where the first `width` elements of a row of `gates` are its gate.
    pub fn silu_gate_rows(&self, gates: &[f32], width: usize, y: &mut [f32]) -> Result<()> {
        let columns = gate_columns(gates.len(), width, y.len())?;
        by_parts(self.pool(), y, width, |row, y| {
            let gate = &gates[row * columns..][..width];
            y.iter_mut().zip(gate).for_each(|(y, g)| *y *= silu(*g).0);
        });
        Ok(())
    }

    /// The backward pass of [`Cpu::silu_gate_rows`] on rows `x` before it: `dy` becomes the gradient of `x`, and the gates their own
    /// gradients.
    pub fn silu_gate_rows_backward(
        &self,
        gates: &mut [f32],
        width: usize,
        x: &[f32],
        dy: &mut [f32],
    ) -> Result<()> {
        let columns = gate_columns(gates.len(), width, dy.len())?;
        gate_columns(gates.len(), width, x.len())?;
        by_parts_of_two(
            self.pool(),
            (gates, dy),
            (columns, width),
            |row, gates, dy| {
                let x = &x[row * width..][..width];
                for ((gate, dy), x) in gates.iter_mut().zip(dy).zip(x) {
                    let (value, slope) = silu(*gate);
                    *gate = *dy * x * slope;
                    *dy *= value;
                }
            },
        );
        Ok(())
    }
}

/// Elements of a row of gates.
fn gate_columns(gates: usize, width: usize, y: usize) -> Result<usize> {
    let rows = y / width.max(1);
    let columns = gates / rows.max(1);
    if rows == 0 || y != rows * width || gates != rows * columns || columns < width {
        bail!(
            Internal,
            "{gates} elements of gates for {y} in rows of {width}"
        );
    }
    Ok(columns)
}

fn check(gate_up: usize, y: usize, width: usize) -> Result<()> {
    if width == 0 || !y.is_multiple_of(width) || gate_up != 2 * y {
        bail!(
            Internal,
            "a gated unit of {gate_up} elements and {y} results in rows of {width}"
        );
    }
    Ok(())
}
