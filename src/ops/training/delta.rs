//! The parts of a gated delta net (Yang et al., 2024, "Gated Delta Networks") between its projections, over packed documents: the
//! convolution with the norms of queries and keys, the gated delta rule and the gated norm. They run on the CPU alone.

use super::super::delta::host;
use super::super::{Device, Mixed, Slice, SliceMut};
use super::attention::Documents;
use crate::base::Result;
use crate::base::error::bail;
use crate::cpu::DeltaGates;
use crate::cpu::training::{DeltaForward, DeltaGradients};
use crate::tensor::DeltaShape;

/// The learned constants of the gates, one number a value head.
#[derive(Clone, Copy, Debug)]
pub struct GateConstants<'a> {
    /// The logarithm of the rate of decay.
    pub a_log: Slice<'a>,
    /// Added to the projection that the decay comes of.
    pub dt_bias: Slice<'a>,
}

/// The inputs of the gated delta rule.
#[derive(Clone, Copy, Debug)]
pub struct RuleInputs<'a> {
    /// `[T, channels]`: the results of [`convolve`].
    pub qkv: Slice<'a, Mixed>,
    /// `[T, value_width + 2 value_heads]`: the output of the projections z, b and a, side by side.
    pub gates: Slice<'a, Mixed>,
    /// The constants of the gates.
    pub constants: GateConstants<'a>,
}

/// The gradients that [`delta_rule_backward`] computes.
#[derive(Debug)]
pub struct RuleGradients<'a> {
    /// `[T, channels]`: the gradient of [`RuleInputs::qkv`].
    pub dqkv: SliceMut<'a, Mixed>,
    /// Its columns of b and a become their gradients; those of z stay. On entry [`RuleInputs::gates`].
    pub gates: SliceMut<'a, Mixed>,
    /// `[2, value_heads]`: the sums to which the gradients of `a_log` and of `dt_bias` are added.
    pub dconstants: SliceMut<'a>,
}

/// Elements of a row of the projections z, b and a.
pub fn gate_width(shape: &DeltaShape) -> usize {
    shape.value_width() + 2 * shape.value_heads
}

/// Convolves queries, keys and values `x`, `[T, channels]`, with `weight`, `[channels, taps]`, and SiLU into `out`, each document alone,
/// and normalizes queries and keys.
pub fn convolve(
    device: &Device,
    shape: &DeltaShape,
    documents: &Documents,
    weight: Slice<'_>,
    x: Slice<'_, Mixed>,
    out: SliceMut<'_, Mixed>,
) -> Result<()> {
    let (documents, weight) = (documents.host()?, weight.host()?);
    host(device)?.packed_convolve(shape, documents, weight, x.host()?, out.host()?)
}

/// Backward of [`convolve`]: computes in `dx` the gradient of `x` from `dy`, the gradient of the output. Overwrites `dy`, and adds to
/// `dweight`.
pub fn convolve_backward(
    device: &Device,
    shape: &DeltaShape,
    documents: &Documents,
    (weight, x): (Slice<'_>, Slice<'_, Mixed>),
    (dy, dx): (SliceMut<'_, Mixed>, SliceMut<'_, Mixed>),
    dweight: SliceMut<'_>,
) -> Result<()> {
    let gradients = (dy.host()?, dx.host()?);
    let (forward, dweight) = ((weight.host()?, x.host()?), dweight.host()?);
    host(device)?.packed_convolve_backward(shape, documents.host()?, forward, gradients, dweight)
}

/// The gated delta rule, from the zero state at the first row of each document. Writes `out`, `[T, value_width]`, and to `states`, of
/// [`DeltaShape::checkpoint_floats`] elements, what [`delta_rule_backward`] recomputes the states from.
pub fn delta_rule(
    device: &Device,
    shape: &DeltaShape,
    documents: &Documents,
    inputs: RuleInputs<'_>,
    out: SliceMut<'_, Mixed>,
    states: SliceMut<'_>,
) -> Result<()> {
    let cpu = host(device)?;
    let Gates { mut a, mut b } = Gates::of(shape, inputs.gates.host()?)?;
    cpu.delta_gates(inputs.constants.host()?, &mut a, &mut b)?;
    let (documents, qkv) = (documents.host()?, inputs.qkv.host()?);
    let (out, states) = (out.host()?, states.host()?);
    cpu.packed_delta_rule(shape, documents, (qkv, &a, &b), out, states)
}

/// Backward of [`delta_rule`], from `dout`, the gradient of its output. `scratch` has [`DeltaShape::backward_floats`] elements.
pub fn delta_rule_backward(
    device: &Device,
    shape: &DeltaShape,
    documents: &Documents,
    (qkv, constants, states): (Slice<'_, Mixed>, GateConstants<'_>, Slice<'_>),
    dout: Slice<'_, Mixed>,
    gradients: RuleGradients<'_>,
    scratch: SliceMut<'_>,
) -> Result<()> {
    let cpu = host(device)?;
    let (rows, constants) = (gradients.gates.host()?, constants.host()?);
    let before = Gates::of(shape, rows)?;
    let mut gates = before.clone();
    cpu.delta_gates(constants, &mut gates.a, &mut gates.b)?;
    let forward = DeltaForward {
        qkv: qkv.host()?,
        decay: &gates.a,
        beta: &gates.b,
        states: states.host()?,
    };
    let (mut dlog, mut dbeta) = (vec![0.0; before.a.len()], vec![0.0; before.b.len()]);
    let of_rule = DeltaGradients {
        dqkv: gradients.dqkv.host()?,
        dlog: &mut dlog,
        dbeta: &mut dbeta,
    };
    let (documents, dout, scratch) = (documents.host()?, dout.host()?, scratch.host()?);
    cpu.packed_delta_rule_backward(shape, documents, forward, dout, of_rule, scratch)?;
    let of_heads = gradients.dconstants.host()?;
    let of_heads = of_heads.split_at_mut(shape.value_heads.min(of_heads.len()));
    let of_gates = (&mut dlog[..], &mut dbeta[..]);
    cpu.delta_gates_backward(constants, (&before.a, &before.b), of_gates, of_heads)?;
    Gates { a: dlog, b: dbeta }.write(shape, rows);
    Ok(())
}

/// The gated norm: RMSNorm of each value head of `x`, `[T, value_width]`, times SiLU of z, into `out`.
pub fn gated_norm(
    device: &Device,
    shape: &DeltaShape,
    (weight, eps): (Slice<'_>, f32),
    x: Slice<'_, Mixed>,
    gates: Slice<'_, Mixed>,
    mut out: SliceMut<'_, Mixed>,
) -> Result<()> {
    super::norm::rms_norm(device, x, weight, eps, out.reborrow())?;
    host(device)?.silu_gate_rows(gates.host()?, shape.value_width(), out.host()?)
}

/// Backward of [`gated_norm`]: `dy`, the gradient of its output, becomes the gradient of `x`, and the columns of z in `gates` their own
/// gradient. `normed` receives the norm without its gate. Adds to `dweight`.
pub fn gated_norm_backward(
    device: &Device,
    shape: &DeltaShape,
    (weight, eps): (Slice<'_>, f32),
    (x, mut normed): (Slice<'_, Mixed>, SliceMut<'_, Mixed>),
    gates: SliceMut<'_, Mixed>,
    mut dy: SliceMut<'_, Mixed>,
    dweight: SliceMut<'_>,
) -> Result<()> {
    super::norm::rms_norm(device, x, weight, eps, normed.reborrow())?;
    let (normed, of_gate) = (normed.host()?, dy.reborrow().host()?);
    let width = shape.value_width();
    host(device)?.silu_gate_rows_backward(gates.host()?, width, normed, of_gate)?;
    super::norm::rms_norm_backward(device, x, weight, eps, dy, None, dweight)
}

impl<'a> GateConstants<'a> {
    fn host(&self) -> Result<DeltaGates<'a>> {
        Ok(DeltaGates {
            a_log: self.a_log.host()?,
            dt_bias: self.dt_bias.host()?,
        })
    }
}

/// The columns of b and a, `[T, value_heads]` each.
#[derive(Clone)]
struct Gates {
    a: Vec<f32>,
    b: Vec<f32>,
}

impl Gates {
    /// The columns in `rows`, `[T, value_width + 2 value_heads]`.
    fn of(shape: &DeltaShape, rows: &[f32]) -> Result<Gates> {
        let (width, heads, first) = (gate_width(shape), shape.value_heads, shape.value_width());
        if !rows.len().is_multiple_of(width) {
            bail!(
                Internal,
                "{} elements of gates are not whole rows of {width}",
                rows.len()
            );
        }
        let columns = |first: usize| {
            let rows = rows.chunks_exact(width);
            rows.flat_map(|row| row[first..first + heads].to_vec())
                .collect()
        };
        Ok(Gates {
            b: columns(first),
            a: columns(first + heads),
        })
    }

    /// Writes the columns to `rows`.
    fn write(&self, shape: &DeltaShape, rows: &mut [f32]) {
        let (heads, first) = (shape.value_heads, shape.value_width());
        let gates = self.b.chunks_exact(heads).zip(self.a.chunks_exact(heads));
        for (row, (b, a)) in rows.chunks_exact_mut(gate_width(shape)).zip(gates) {
            row[first..first + heads].copy_from_slice(b);
            row[first + heads..].copy_from_slice(a);
        }
    }
}
