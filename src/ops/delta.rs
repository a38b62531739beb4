//! Gated delta nets (Yang et al., 2024, "Gated Delta Networks"), in the form that reads a state and writes the next.

use super::{Array, Device, SliceMut};
use crate::base::error::{Result, bail, err};
use crate::cpu::DeltaGates;
use crate::tensor::DeltaShape;

pub use crate::cpu::DeltaRuleRows;

/// Added to the sum of squares of a query or a key before its root.
const NORM_EPS: f32 = 1e-6;

/// The weights of a gated delta net that are no projections.
#[derive(Debug)]
pub struct DeltaWeights {
    /// The convolution of queries, keys and values, `[channels, taps]`, oldest position first.
    pub convolution: Array,
    /// The logarithm of each value head's rate of decay.
    pub a_log: Array,
    /// Added to the projection that the decay of each value head comes of.
    pub dt_bias: Array,
    /// What the norms of queries and of keys multiply by, `[key_dim]`: constants of the shape, not of the file.
    pub norms: [Array; 2],
}

impl DeltaWeights {
    /// The factors after the norms of queries and keys: an RMSNorm with the first gives `q / |q| / sqrt(key_dim)`, with the second `k / |k|`.
    pub fn norm_factors(shape: &DeltaShape) -> [f32; 2] {
        let dim = shape.key_dim as f32;
        [1.0 / dim, 1.0 / dim.sqrt()]
    }

    /// The epsilon of such an RMSNorm, which adds it to the mean of squares.
    pub fn norm_eps(shape: &DeltaShape) -> f32 {
        NORM_EPS / shape.key_dim as f32
    }
}

/// Convolves the rows of one sequence, `[rows, channels]` each, in place, and puts their last inputs into `history`,
/// `[taps - 1, channels]` with the channels of queries, keys and values side by side.
pub fn convolve(
    device: &Device,
    [q, k, v]: [SliceMut<'_>; 3],
    weights: &DeltaWeights,
    shape: &DeltaShape,
    history: &mut [f32],
) -> Result<()> {
    let Device::Cpu(cpu) = device else {
        return unsupported(device);
    };
    let widths = [shape.key_width(), shape.key_width(), shape.value_width()];
    let all = weights.convolution.all().host()?;
    let mut first = 0;
    for (x, width) in [q, k, v].into_iter().zip(widths) {
        let weight = all.get(first * shape.taps..(first + width) * shape.taps);
        let weight = weight.ok_or_else(|| err!(Internal, "a convolution of too few channels"))?;
        cpu.convolve(x.host()?, width, weight, history, shape.channels(), first)?;
        first += width;
    }
    Ok(())
}

/// Computes the gates of rows: `a` becomes the decay of each value head's state, and `b` how much of a correction is written.
pub fn gates(
    device: &Device,
    weights: &DeltaWeights,
    a: SliceMut<'_>,
    b: SliceMut<'_>,
) -> Result<()> {
    let Device::Cpu(cpu) = device else {
        return unsupported(device);
    };
    let gates = DeltaGates {
        a_log: weights.a_log.all().host()?,
        dt_bias: weights.dt_bias.all().host()?,
    };
    cpu.delta_gates(gates, a.host()?, b.host()?)
}

/// The gated delta rule over the rows of one sequence; see [`crate::cpu::Cpu::delta_rule`].
pub fn delta_rule(
    device: &Device,
    shape: &DeltaShape,
    rows: DeltaRuleRows<'_>,
    state: &mut [f32],
) -> Result<()> {
    match device {
        Device::Cpu(cpu) => cpu.delta_rule(shape, rows, state),
        Device::Cuda(_) => unsupported(device),
    }
}

fn unsupported(device: &Device) -> Result<()> {
    bail!(
        Unsupported,
        "gated delta nets do not run on {}; load the model on the CPU",
        device.name()
    )
}
