//! Gated delta nets (Yang et al., 2024, "Gated Delta Networks") on the CPU, in the form that reads a state and writes the next. A GPU has
//! kernels of the same operations for ragged batches, which its fused passes call.

use super::{Array, Device, SliceMut};
use crate::base::error::{Result, bail};
use crate::cpu::{Cpu, DeltaGates};
use crate::tensor::DeltaShape;

pub use crate::cpu::DeltaRuleRows;

/// The weights of a gated delta net that are no projections.
#[derive(Debug)]
pub struct DeltaWeights {
    /// The convolution of queries, keys and values, `[channels, taps]`, oldest position first.
    pub convolution: Array,
    /// The logarithm of each value head's rate of decay.
    pub a_log: Array,
    /// Added to the projection that the decay of each value head comes of.
    pub dt_bias: Array,
}

/// Convolves the rows of one sequence, `[rows, channels]`, in place, puts their last inputs into `history`, `[taps - 1, channels]`, and
/// normalizes queries and keys.
pub fn convolve(
    device: &Device,
    shape: &DeltaShape,
    weights: &DeltaWeights,
    qkv: SliceMut<'_>,
    history: &mut [f32],
) -> Result<()> {
    let (cpu, qkv) = (host(device)?, qkv.host()?);
    let weight = weights.convolution.all().host()?;
    cpu.convolve(qkv, shape.channels(), weight, None, history)?;
    cpu.delta_norms(shape, qkv)
}

/// Computes the gates of rows: `a` becomes the decay of each value head's state, and `b` how much of a correction is written.
pub fn gates(
    device: &Device,
    weights: &DeltaWeights,
    a: SliceMut<'_>,
    b: SliceMut<'_>,
) -> Result<()> {
    let gates = DeltaGates {
        a_log: weights.a_log.all().host()?,
        dt_bias: weights.dt_bias.all().host()?,
    };
    host(device)?.delta_gates(gates, a.host()?, b.host()?)
}

/// The gated delta rule over the rows of one sequence; see [`Cpu::delta_rule`].
pub fn delta_rule(
    device: &Device,
    shape: &DeltaShape,
    rows: DeltaRuleRows<'_>,
    state: &mut [f32],
) -> Result<()> {
    host(device)?.delta_rule(shape, rows, state)
}

pub(super) fn host(device: &Device) -> Result<&Cpu> {
    match device {
        Device::Cpu(cpu) => Ok(cpu),
        Device::Cuda(_) => bail!(
            Unsupported,
            "gated delta nets run on {} by fused kernels alone",
            device.name()
        ),
    }
}
