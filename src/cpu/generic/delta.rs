//! The bodies of gated delta nets and of Mamba-2. Each row is computed alone, in order, so that a sequence gives the same bits however it is
//! divided.

use super::pointwise::{Activation, Silu};
use crate::cpu::simd::Simd;

/// Upper limit of positions that a convolution sees.
pub(in crate::cpu) const MOST_TAPS: usize = 4;

/// Vectors of a state's columns that are in registers together.
const COLUMNS: usize = 4;

/// Sixteen channels of a causal convolution.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct ConvolvedChannels {
    /// `[rows, stride]`: inputs, which outputs replace.
    pub x: *mut f32,
    /// Elements from one row to the next.
    pub stride: usize,
    pub rows: usize,
    /// `[16, taps]`, oldest position first.
    pub weight: *const f32,
    /// From 1 to [`MOST_TAPS`].
    pub taps: usize,
    /// `[16]`, added to each sum, if there is one.
    pub bias: Option<*const f32>,
    /// `[taps - 1, stride]`: inputs of the positions before, oldest first, which the last inputs replace.
    pub history: *mut f32,
}

/// `x = silu(bias + sum of weight * x at the last taps positions)` for sixteen channels.
///
/// # Safety
/// As for [`Simd`], with the elements that [`ConvolvedChannels`] states.
#[inline(always)]
pub(in crate::cpu) unsafe fn convolve<S: Simd>(c: ConvolvedChannels) {
    // SAFETY: forwarded.
    unsafe {
        // The last position is that of the output; those that the convolution does not see have weights of zero.
        let mut weights = [S::splat(0.0); MOST_TAPS];
        let mut inputs = [S::splat(0.0); MOST_TAPS];
        let bias = c.bias.map(|bias| S::load(bias));
        let unseen = MOST_TAPS - c.taps;
        for tap in 0..c.taps {
            let mut lanes = [0.0; 16];
            for (lane, weight) in lanes.iter_mut().enumerate() {
                *weight = *c.weight.add(lane * c.taps + tap);
            }
            weights[unseen + tap] = S::load(lanes.as_ptr());
        }
        for position in 0..c.taps - 1 {
            inputs[unseen + position + 1] = S::load(c.history.add(position * c.stride));
        }
        for row in 0..c.rows {
            let x = c.x.add(row * c.stride);
            inputs.copy_within(1.., 0);
            inputs[MOST_TAPS - 1] = S::load(x);
            let mut sum = match bias {
                Some(bias) => S::fma(weights[0], inputs[0], bias),
                None => S::mul(weights[0], inputs[0]),
            };
            for tap in 1..MOST_TAPS {
                sum = S::fma(weights[tap], inputs[tap], sum);
            }
            S::store(x, <Silu as Activation<S>>::of(sum));
        }
        for position in 0..c.taps - 1 {
            let to = c.history.add(position * c.stride);
            S::store(to, inputs[unseen + position + 1]);
        }
    }
}

/// Columns of one head's state, and the rows that change it.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct StateColumns {
    /// The head's first query and key (C and B of Mamba-2), and the columns' first values. The next row's are `stride` elements on.
    pub q: *const f32,
    pub k: *const f32,
    pub v: *const f32,
    pub stride: usize,
    /// The columns' first outputs. The next row's are `out_stride` elements on.
    pub out: *mut f32,
    pub out_stride: usize,
    /// The factor of the state before each row, `gate_stride` elements apart.
    pub decay: *const f32,
    /// The share of each row's correction that is written, or the factor of its values (the time step of Mamba-2), likewise.
    pub beta: *const f32,
    pub gate_stride: usize,
    /// `[key_dim, value_dim]`, from the first of the columns on.
    pub state: *mut f32,
    pub key_dim: usize,
    pub value_dim: usize,
    /// Columns, a multiple of 16.
    pub columns: usize,
    pub rows: usize,
    /// The factor of values that [`mamba_scan`] adds to their outputs.
    pub skip: f32,
}

/// The gated delta rule: for each row, `S = decay S + k (beta (v - decay S^T k))^T`, and `out = S^T q`.
///
/// # Safety
/// As for [`Simd`], with the elements that [`StateColumns`] states.
#[inline(always)]
pub(in crate::cpu) unsafe fn delta_rule<S: Simd>(d: StateColumns) {
    // SAFETY: forwarded.
    unsafe { all_columns::<S, true>(d) }
}

/// The recurrence of Mamba-2: for each row, `S = decay S + k (beta v)^T`, and `out = S^T q + skip v`.
///
/// # Safety
/// As for [`Simd`], with the elements that [`StateColumns`] states.
#[inline(always)]
pub(in crate::cpu) unsafe fn mamba_scan<S: Simd>(d: StateColumns) {
    // SAFETY: forwarded.
    unsafe { all_columns::<S, false>(d) }
}

#[inline(always)]
unsafe fn all_columns<S: Simd, const CORRECTS: bool>(d: StateColumns) {
    let mut column = 0;
    // SAFETY: forwarded; both parts cover the columns once.
    unsafe {
        while column + 16 * COLUMNS <= d.columns {
            columns::<S, COLUMNS, CORRECTS>(d, column);
            column += 16 * COLUMNS;
        }
        while column < d.columns {
            columns::<S, 1, CORRECTS>(d, column);
            column += 16;
        }
    }
}

/// The rows of `N` vectors of columns. `CORRECTS` says that a row writes what its values lack of what its key finds.
#[inline(always)]
unsafe fn columns<S: Simd, const N: usize, const CORRECTS: bool>(d: StateColumns, first: usize) {
    // SAFETY: forwarded.
    unsafe {
        for row in 0..d.rows {
            let (q, k) = (d.q.add(row * d.stride), d.k.add(row * d.stride));
            let (v, to) = (row * d.stride + first, row * d.out_stride + first);
            let decay = S::splat(*d.decay.add(row * d.gate_stride));
            let beta = S::splat(*d.beta.add(row * d.gate_stride));
            let mut change = [S::splat(0.0); N];
            let mut out = [S::splat(0.0); N];
            for n in 0..N {
                change[n] = S::load(d.v.add(v + 16 * n));
            }
            if CORRECTS {
                let mut held = [S::splat(0.0); N];
                for i in 0..d.key_dim {
                    let (s, key) = (d.state.add(i * d.value_dim + first), S::splat(*k.add(i)));
                    for n in 0..N {
                        held[n] = S::fma(S::load(s.add(16 * n)), key, held[n]);
                    }
                }
                for n in 0..N {
                    change[n] = S::sub(change[n], S::mul(held[n], decay));
                }
            } else {
                for n in 0..N {
                    out[n] = S::mul(change[n], S::splat(d.skip));
                }
            }
            for n in 0..N {
                change[n] = S::mul(change[n], beta);
            }
            for i in 0..d.key_dim {
                let s = d.state.add(i * d.value_dim + first);
                let (key, query) = (S::splat(*k.add(i)), S::splat(*q.add(i)));
                for n in 0..N {
                    let new = S::fma(key, change[n], S::mul(S::load(s.add(16 * n)), decay));
                    S::store(s.add(16 * n), new);
                    out[n] = S::fma(new, query, out[n]);
                }
            }
            for n in 0..N {
                S::store(d.out.add(to + 16 * n), out[n]);
            }
        }
    }
}
