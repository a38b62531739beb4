//! Gated delta nets, and the convolution of all recurrent layers: checks, and splitting over threads by channels, and by columns of heads.

use super::Cpu;
use super::engine::Out;
use super::table::{ConvolvedChannels, MOST_TAPS, StateColumns};
use crate::base::call;
use crate::base::error::{Result, bail};
use crate::tensor::DeltaShape;

/// Columns of a head's state per part, whose 128 rows stay in a core's own cache.
const COLUMNS: usize = 64;
/// Channels of a convolution per part, and of a vector.
const CHANNELS: usize = 16;

/// Added to the sum of squares of a query or a key before its root.
const NORM_EPS: f32 = 1e-6;

/// Learned constants of a gated delta net's gates, one number a value head.
#[derive(Clone, Copy, Debug)]
pub struct DeltaGates<'a> {
    /// The logarithm of the rate of decay.
    pub a_log: &'a [f32],
    /// Added to the projection that decay comes of.
    pub dt_bias: &'a [f32],
}

/// Rows of one sequence, for the gated delta rule.
#[derive(Debug)]
pub struct DeltaRuleRows<'a> {
    /// `[rows, channels]`: the queries, keys and values of a row side by side.
    pub qkv: &'a [f32],
    /// `[rows, value_heads]`: what the state is multiplied by.
    pub decay: &'a [f32],
    /// `[rows, value_heads]`: how much of a correction is written.
    pub beta: &'a [f32],
    /// `[rows, value_heads, value_dim]`.
    pub out: &'a mut [f32],
}

/// `log(1 + e^x)`, which does not overflow.
pub(super) fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

impl DeltaShape {
    /// The norms of queries and of keys as RMSNorms: their weights, and what is added to the mean square. The root of a sum of squares is
    /// that of their mean times the root of their number.
    pub(super) fn norms(&self) -> ([Vec<f32>; 2], f32) {
        let dim = self.key_dim as f32;
        let factors = [1.0 / dim, 1.0 / dim.sqrt()].map(|factor| vec![factor; self.key_dim]);
        (factors, NORM_EPS / dim)
    }
}

impl Cpu {
    /// A causal convolution of each channel with `silu` after it: `x`, `[rows, channels]`, becomes `silu(bias + sum of weight * x)` over the
    /// last `taps` positions. `weight` is `[channels, taps]`, oldest position first, and `bias` is `[channels]`. `history`,
    /// `[taps - 1, channels]`, has the inputs of the positions before, which become the last inputs. `channels` is a multiple of 16.
    /// Cancelled with the thread's [`call`].
    pub fn convolve(
        &self,
        x: &mut [f32],
        channels: usize,
        weight: &[f32],
        bias: Option<&[f32]>,
        history: &mut [f32],
    ) -> Result<()> {
        let taps = weight.len() / channels.max(1);
        let is_sound = channels > 0
            && channels.is_multiple_of(CHANNELS)
            && x.len().is_multiple_of(channels)
            && (1..=MOST_TAPS).contains(&taps)
            && weight.len() == channels * taps
            && bias.is_none_or(|bias| bias.len() == channels)
            && history.len() == (taps - 1) * channels;
        if !is_sound {
            bail!(
                InvalidArgument,
                "a convolution of {} inputs in {channels} channels with {} weights, {} biases and {} inputs before",
                x.len(),
                weight.len(),
                bias.map_or(0, <[f32]>::len),
                history.len()
            );
        }
        let rows = x.len() / channels;
        let (x, history) = (Out(x.as_mut_ptr()), Out(history.as_mut_ptr()));
        call::with(|call| {
            self.pool().run(channels / CHANNELS, |part| {
                if call.is_over() {
                    return;
                }
                let channel = part * CHANNELS;
                // SAFETY: the level is present; lengths were checked, and each part has channels of its own.
                unsafe {
                    (self.table.convolve)(ConvolvedChannels {
                        x: x.at(channel),
                        stride: channels,
                        rows,
                        weight: weight.as_ptr().add(channel * taps),
                        taps,
                        bias: bias.map(|bias| bias.as_ptr().add(channel)),
                        history: history.at(channel),
                    });
                }
            });
            call.check()
        })
    }

    /// Divides each query and key in rows of queries, keys and values, `[rows, channels]`, by its length, and each query by the square root
    /// of its size too.
    pub fn delta_norms(&self, shape: &DeltaShape, qkv: &mut [f32]) -> Result<()> {
        let (channels, dim, heads) = (shape.channels(), shape.key_dim, 2 * shape.key_heads);
        let (factors, eps) = shape.norms();
        if !qkv.len().is_multiple_of(channels) {
            bail!(
                InvalidArgument,
                "norms of {} numbers, which are not whole rows of {channels}",
                qkv.len()
            );
        }
        let rows = qkv.len() / channels;
        let out = Out(qkv.as_mut_ptr());
        self.by_rows(rows * heads, dim, |index| {
            let (row, head) = (index / heads, index % heads);
            let factors = factors[usize::from(head >= shape.key_heads)].as_ptr();
            // SAFETY: the level is present; each head is normalized by one thread, within its `dim` elements.
            unsafe {
                let x = out.at(row * channels + head * dim);
                (self.table.rms_norm)(x, factors, eps, dim, x);
            }
        });
        Ok(())
    }

    /// The gates of rows: `a`, `[rows, value_heads]`, becomes the decay `exp(-exp(a_log) softplus(a + dt_bias))`, and `b` becomes
    /// `sigmoid(b)`.
    pub fn delta_gates(&self, gates: DeltaGates<'_>, a: &mut [f32], b: &mut [f32]) -> Result<()> {
        let DeltaGates { a_log, dt_bias } = gates;
        let heads = a_log.len();
        let is_sound = heads > 0
            && dt_bias.len() == heads
            && a.len() == b.len()
            && a.len().is_multiple_of(heads);
        if !is_sound {
            bail!(
                InvalidArgument,
                "gates of {} and {} numbers for {heads} and {} heads",
                a.len(),
                b.len(),
                dt_bias.len()
            );
        }
        for (i, (a, b)) in a.iter_mut().zip(b).enumerate() {
            let (log, bias) = (f64::from(a_log[i % heads]), f64::from(dt_bias[i % heads]));
            *a = (-log.exp() * softplus(f64::from(*a) + bias)).exp() as f32;
            *b = (1.0 / (1.0 + (-f64::from(*b)).exp())) as f32;
        }
        Ok(())
    }

    /// The gated delta rule (Yang et al., 2024) over the rows of one sequence: for each value head, with its state `S`
    /// `[key_dim, value_dim]`, `S = decay S + k (beta (v - decay S^T k))^T`, and `out = S^T q`. `state` holds the matrices of all heads.
    /// The bits do not depend on how rows are divided among calls. Cancelled with the thread's [`call`].
    pub fn delta_rule(
        &self,
        shape: &DeltaShape,
        rows: DeltaRuleRows<'_>,
        state: &mut [f32],
    ) -> Result<()> {
        let DeltaRuleRows {
            qkv,
            decay,
            beta,
            out,
        } = rows;
        let (keys, values, heads) = (shape.key_width(), shape.value_width(), shape.value_heads);
        let channels = shape.channels();
        let m = decay.len() / heads.max(1);
        let is_sound = heads > 0
            && heads.is_multiple_of(shape.key_heads.max(1))
            && shape.value_dim.is_multiple_of(16)
            && [qkv.len(), out.len()] == [m * channels, m * values]
            && [decay.len(), beta.len()] == [m * heads; 2]
            && state.len() == shape.matrix_floats();
        if !is_sound {
            bail!(
                InvalidArgument,
                "the delta rule of {shape:?} with {} queries, keys and values, {} gates and a state of {}",
                qkv.len(),
                decay.len(),
                state.len()
            );
        }
        let shared = heads / shape.key_heads;
        let (out, state) = (Out(out.as_mut_ptr()), Out(state.as_mut_ptr()));
        self.by_columns(self.table.delta_rule, heads, shape.value_dim, |head| {
            let key = head / shared * shape.key_dim;
            let value = head * shape.value_dim;
            // SAFETY: lengths were checked.
            unsafe {
                StateColumns {
                    q: qkv.as_ptr().add(key),
                    k: qkv.as_ptr().add(keys + key),
                    v: qkv.as_ptr().add(2 * keys + value),
                    stride: channels,
                    out: out.at(value),
                    out_stride: values,
                    decay: decay.as_ptr().add(head),
                    beta: beta.as_ptr().add(head),
                    gate_stride: heads,
                    state: state.at(value * shape.key_dim),
                    key_dim: shape.key_dim,
                    value_dim: shape.value_dim,
                    columns: shape.value_dim,
                    rows: m,
                    skip: 0.0,
                }
            }
        })
    }

    /// Runs a recurrence over parts of the columns of each of `heads` heads, which have `dim` columns. `whole` gives all columns of a head.
    /// Cancelled with the thread's [`call`].
    pub(super) fn by_columns(
        &self,
        recurrence: unsafe fn(StateColumns),
        heads: usize,
        dim: usize,
        whole: impl Fn(usize) -> StateColumns + Sync,
    ) -> Result<()> {
        let parts = dim.div_ceil(COLUMNS);
        call::with(|call| {
            self.pool().run(heads * parts, |part| {
                if call.is_over() {
                    return;
                }
                let first = part % parts * COLUMNS;
                let all = whole(part / parts);
                // SAFETY: the level is present; `whole` has pointers to `dim` columns, and each part has columns of its own.
                unsafe {
                    recurrence(StateColumns {
                        v: all.v.add(first),
                        out: all.out.add(first),
                        state: all.state.add(first),
                        columns: COLUMNS.min(dim - first),
                        ..all
                    });
                }
            });
            call.check()
        })
    }
}
