//! Mamba-2: checks, and splitting over threads by columns of heads.

use super::Cpu;
use super::delta::softplus;
use super::engine::Out;
use super::table::StateColumns;
use crate::base::error::{Result, bail};
use crate::tensor::MambaShape;

/// Learned constants of Mamba-2's time steps, one number a head.
#[derive(Clone, Copy, Debug)]
pub struct MambaSteps<'a> {
    /// The logarithm of the rate of decay.
    pub a_log: &'a [f32],
    /// Added to the projection that the time step comes of.
    pub dt_bias: &'a [f32],
    /// The least and the largest time step.
    pub limits: [f32; 2],
}

/// Rows of one sequence, for the recurrence of Mamba-2.
#[derive(Debug)]
pub struct MambaScanRows<'a> {
    /// `[rows, channels]`: x, B and C of a row side by side.
    pub xbc: &'a [f32],
    /// `[rows, heads]`: what the state is multiplied by.
    pub decay: &'a [f32],
    /// `[rows, heads]`: the time steps.
    pub dt: &'a [f32],
    /// `[heads]`: D, the factor of x that is added to its output.
    pub skip: &'a [f32],
    /// `[rows, heads, head_dim]`.
    pub out: &'a mut [f32],
}

impl Cpu {
    /// The time steps of rows, `[rows, heads]`: `dt` becomes `softplus(dt + dt_bias)` within its limits, and `decay` becomes
    /// `exp(-exp(a_log) dt)`.
    pub fn mamba_steps(
        &self,
        steps: MambaSteps<'_>,
        dt: &mut [f32],
        decay: &mut [f32],
    ) -> Result<()> {
        let MambaSteps {
            a_log,
            dt_bias,
            limits: [least, largest],
        } = steps;
        let heads = a_log.len();
        let is_sound = heads > 0
            && dt_bias.len() == heads
            && dt.len() == decay.len()
            && dt.len().is_multiple_of(heads)
            && least <= largest;
        if !is_sound {
            bail!(
                InvalidArgument,
                "{} time steps from {least} to {largest} and {} decays for {heads} and {} heads",
                dt.len(),
                decay.len(),
                dt_bias.len()
            );
        }
        let (least, largest) = (f64::from(least), f64::from(largest));
        for (i, (dt, decay)) in dt.iter_mut().zip(decay).enumerate() {
            let (log, bias) = (f64::from(a_log[i % heads]), f64::from(dt_bias[i % heads]));
            let step = softplus(f64::from(*dt) + bias).max(least).min(largest);
            *dt = step as f32;
            *decay = (-log.exp() * step).exp() as f32;
        }
        Ok(())
    }

    /// The recurrence of Mamba-2 (Dao and Gu, 2024) over the rows of one sequence: for each head, with its state `S`
    /// `[state_size, head_dim]`, `S = decay S + B (dt x)^T`, and `out = S^T C + D x`. `state` holds the matrices of all heads. The bits do
    /// not depend on how rows are divided among calls. Cancelled with the thread's [`call`](crate::base::call).
    pub fn mamba_scan(
        &self,
        shape: &MambaShape,
        rows: MambaScanRows<'_>,
        state: &mut [f32],
    ) -> Result<()> {
        let MambaScanRows {
            xbc,
            decay,
            dt,
            skip,
            out,
        } = rows;
        let (heads, dim, width) = (shape.heads, shape.head_dim, shape.width());
        let (channels, group_width) = (shape.channels(), shape.group_width());
        let m = decay.len() / heads.max(1);
        let is_sound = heads > 0
            && heads.is_multiple_of(shape.groups.max(1))
            && dim.is_multiple_of(16)
            && [xbc.len(), out.len()] == [m * channels, m * width]
            && [decay.len(), dt.len()] == [m * heads; 2]
            && skip.len() == heads
            && state.len() == shape.matrix_floats();
        if !is_sound {
            bail!(
                InvalidArgument,
                "the recurrence of {shape:?} with {} inputs, {} time steps and a state of {}",
                xbc.len(),
                dt.len(),
                state.len()
            );
        }
        let shared = heads / shape.groups;
        let (out, state) = (Out(out.as_mut_ptr()), Out(state.as_mut_ptr()));
        self.by_columns(self.table.mamba_scan, heads, dim, |head| {
            let (group, value) = (head / shared * shape.state_size, head * dim);
            // SAFETY: lengths were checked.
            unsafe {
                StateColumns {
                    q: xbc.as_ptr().add(width + group_width + group),
                    k: xbc.as_ptr().add(width + group),
                    v: xbc.as_ptr().add(value),
                    stride: channels,
                    out: out.at(value),
                    out_stride: width,
                    decay: decay.as_ptr().add(head),
                    beta: dt.as_ptr().add(head),
                    gate_stride: heads,
                    state: state.at(value * shape.state_size),
                    key_dim: shape.state_size,
                    value_dim: dim,
                    columns: dim,
                    rows: m,
                    skip: skip[head],
                }
            }
        })
    }

    /// RMSNorm of each of `groups` equal parts of each row of `x`, in place; rows have `weight.len()` elements.
    pub fn rms_norm_groups(
        &self,
        x: &mut [f32],
        weight: &[f32],
        groups: usize,
        eps: f32,
    ) -> Result<()> {
        let width = weight.len();
        let is_sound = width > 0
            && groups > 0
            && width.is_multiple_of(groups)
            && x.len().is_multiple_of(width);
        if !is_sound {
            bail!(
                InvalidArgument,
                "norms of {} elements, which are not whole rows of {groups} groups in {width}",
                x.len()
            );
        }
        let n = width / groups;
        let out = Out(x.as_mut_ptr());
        self.by_rows(x.len() / n, n, |part| {
            // SAFETY: the level is present; each part is normalized by one thread, within its `n` elements.
            unsafe {
                let (x, weight) = (out.at(part * n), weight.as_ptr().add(part % groups * n));
                (self.table.rms_norm)(x, weight, eps, n, x);
            }
        });
        Ok(())
    }
}
