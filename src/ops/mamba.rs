//! Mamba-2 (Dao and Gu, 2024, "Transformers are SSMs") on the CPU, in the form that reads a state and writes the next. A GPU has kernels of
//! the same operations for ragged batches, which its fused passes call.

use super::{Array, Device, SliceMut};
use crate::base::error::{Result, bail};
use crate::cpu::{Cpu, MambaSteps};
use crate::tensor::MambaShape;

pub use crate::cpu::MambaScanRows;

/// The weights of Mamba-2 that are no projections.
#[derive(Debug)]
pub struct MambaWeights {
    /// The convolution of x, B and C, `[channels, taps]`, oldest position first.
    pub convolution: Array,
    /// Its bias, `[channels]`, if it has one.
    pub convolution_bias: Option<Array>,
    /// The logarithm of each head's rate of decay.
    pub a_log: Array,
    /// Added to the projection that the time step of each head comes of.
    pub dt_bias: Array,
    /// D: the factor of each head's x that is added to its output.
    pub skip: Array,
    /// RMSNorm of the output by groups, `[width]`.
    pub norm: Array,
}

/// Convolves the rows of one sequence, `[rows, channels]`, in place, and puts their last inputs into `history`, `[taps - 1, channels]`.
pub fn convolve(
    device: &Device,
    shape: &MambaShape,
    weights: &MambaWeights,
    xbc: SliceMut<'_>,
    history: &mut [f32],
) -> Result<()> {
    let weight = weights.convolution.all().host()?;
    let bias = weights.convolution_bias.as_ref();
    let bias = bias.map(|bias| bias.all().host()).transpose()?;
    host(device)?.convolve(xbc.host()?, shape.channels(), weight, bias, history)
}

/// Computes the time steps of rows, within `limits`, in `dt`, and what the states are multiplied by in `decay`.
pub fn steps(
    device: &Device,
    weights: &MambaWeights,
    limits: [f32; 2],
    dt: SliceMut<'_>,
    decay: SliceMut<'_>,
) -> Result<()> {
    let steps = MambaSteps {
        a_log: weights.a_log.all().host()?,
        dt_bias: weights.dt_bias.all().host()?,
        limits,
    };
    host(device)?.mamba_steps(steps, dt.host()?, decay.host()?)
}

/// The recurrence over the rows of one sequence; see [`Cpu::mamba_scan`].
pub fn scan(
    device: &Device,
    shape: &MambaShape,
    rows: MambaScanRows<'_>,
    state: &mut [f32],
) -> Result<()> {
    host(device)?.mamba_scan(shape, rows, state)
}

/// Normalizes each group of the rows of `x`, `[rows, width]`, in place.
pub fn norm(
    device: &Device,
    shape: &MambaShape,
    weights: &MambaWeights,
    eps: f32,
    x: SliceMut<'_>,
) -> Result<()> {
    let weight = weights.norm.all().host()?;
    host(device)?.rms_norm_groups(x.host()?, weight, shape.groups, eps)
}

fn host(device: &Device) -> Result<&Cpu> {
    match device {
        Device::Cpu(cpu) => Ok(cpu),
        Device::Cuda(_) => bail!(
            Unsupported,
            "Mamba-2 runs on {} by fused kernels alone",
            device.name()
        ),
    }
}
