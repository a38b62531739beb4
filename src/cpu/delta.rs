//! Gated delta nets: checks, and splitting over threads by channels, and by columns of heads.

use super::Cpu;
use super::engine::Out;
use super::table::{ConvolvedChannels, DeltaColumns, MOST_TAPS};
use crate::base::call;
use crate::base::error::{Result, bail};
use crate::tensor::DeltaShape;

/// Columns of a head's state per part, whose 128 rows stay in a core's own cache.
const COLUMNS: usize = 64;
/// Channels of a convolution per part, and of a vector.
const CHANNELS: usize = 16;

/// What a gated delta net learns of its two gates, one number a value head.
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
    /// `[rows, key_heads, key_dim]`.
    pub q: &'a [f32],
    /// `[rows, key_heads, key_dim]`.
    pub k: &'a [f32],
    /// `[rows, value_heads, value_dim]`.
    pub v: &'a [f32],
    /// `[rows, value_heads]`: what the state is multiplied by.
    pub decay: &'a [f32],
    /// `[rows, value_heads]`: how much of a correction is written.
    pub beta: &'a [f32],
    /// `[rows, value_heads, value_dim]`.
    pub out: &'a mut [f32],
}

impl Cpu {
    /// A causal convolution of each channel with `silu` after it: `x`, `[rows, channels]`, becomes `silu(sum of weight * x)` over the last
    /// `taps` positions. `weight` is `[channels, taps]`, oldest position first. `history` has rows of `stride` numbers, one for each of the
    /// `taps - 1` positions before, and its channels from `first` on are those of `x`; they become the last inputs. `channels` is a
    /// multiple of 16. Cancelled with the thread's [`call`].
    pub fn convolve(
        &self,
        x: &mut [f32],
        channels: usize,
        weight: &[f32],
        history: &mut [f32],
        stride: usize,
        first: usize,
    ) -> Result<()> {
        let taps = weight.len() / channels.max(1);
        let is_sound = channels > 0
            && channels.is_multiple_of(CHANNELS)
            && x.len().is_multiple_of(channels)
            && (1..=MOST_TAPS).contains(&taps)
            && weight.len() == channels * taps
            && history.len() == (taps - 1) * stride
            && first + channels <= stride;
        if !is_sound {
            bail!(
                InvalidArgument,
                "a convolution of {} inputs in {channels} channels with {} weights and {} inputs before, {stride} a position from {first} on",
                x.len(),
                weight.len(),
                history.len()
            );
        }
        let rows = x.len() / channels;
        let x = Out(x.as_mut_ptr());
        // Without positions before, nothing is there.
        let history = Out(history.as_mut_ptr().wrapping_add(first));
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
                        history: history.at(channel),
                        history_stride: stride,
                    });
                }
            });
            call.check()
        })
    }

    /// The gates of rows: `a`, `[rows, value_heads]`, becomes the decay `exp(-exp(a_log) softplus(a + dt_bias))`, and `b` becomes
    /// `sigmoid(b)`.
    pub fn delta_gates(&self, gates: DeltaGates<'_>, a: &mut [f32], b: &mut [f32]) -> Result<()> {
        let DeltaGates { a_log, dt_bias } = gates;
        let heads = a_log.len();
        if heads == 0 || dt_bias.len() != heads || a.len() != b.len() || a.len() % heads != 0 {
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
            let x = f64::from(*a) + bias;
            // log(1 + e^x), which does not overflow.
            let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
            *a = (-log.exp() * softplus).exp() as f32;
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
            q,
            k,
            v,
            decay,
            beta,
            out,
        } = rows;
        let (keys, values, heads) = (shape.key_width(), shape.value_width(), shape.value_heads);
        let m = decay.len() / heads.max(1);
        let is_sound = heads > 0
            && heads.is_multiple_of(shape.key_heads.max(1))
            && shape.value_dim.is_multiple_of(16)
            && [q.len(), k.len()] == [m * keys; 2]
            && [v.len(), out.len()] == [m * values; 2]
            && [decay.len(), beta.len()] == [m * heads; 2]
            && state.len() == shape.matrix_floats();
        if !is_sound {
            bail!(
                InvalidArgument,
                "the delta rule of {shape:?} with {} queries, {} keys, {} values, {} gates and a state of {}",
                q.len(),
                k.len(),
                v.len(),
                decay.len(),
                state.len()
            );
        }
        let shared = heads / shape.key_heads;
        let parts = shape.value_dim.div_ceil(COLUMNS);
        let (out, state) = (Out(out.as_mut_ptr()), Out(state.as_mut_ptr()));
        call::with(|call| {
            self.pool().run(heads * parts, |part| {
                if call.is_over() {
                    return;
                }
                let (head, first) = (part / parts, part % parts * COLUMNS);
                let (key, value) = (
                    head / shared * shape.key_dim,
                    head * shape.value_dim + first,
                );
                // SAFETY: the level is present; lengths were checked, and each part has columns of its own.
                unsafe {
                    (self.table.delta_rule)(DeltaColumns {
                        q: q.as_ptr().add(key),
                        k: k.as_ptr().add(key),
                        key_stride: keys,
                        v: v.as_ptr().add(value),
                        out: out.at(value),
                        value_stride: values,
                        decay: decay.as_ptr().add(head),
                        beta: beta.as_ptr().add(head),
                        gate_stride: heads,
                        state: state.at(head * shape.key_dim * shape.value_dim + first),
                        key_dim: shape.key_dim,
                        value_dim: shape.value_dim,
                        columns: COLUMNS.min(shape.value_dim - first),
                        rows: m,
                    });
                }
            });
            call.check()
        })
    }
}
