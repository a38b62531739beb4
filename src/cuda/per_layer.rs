//! Per-layer embeddings: the inputs that the blocks of a model have of their own, and their gate.

use super::driver::{DeviceBuffer, Gpu, Launch, int};
use super::elementwise::TableArgument;
use super::kernel::kernels;
use super::linear::Activation;
use super::table::{HostTable, Table};
use crate::base::Result;
use crate::base::error::bail;

kernels! {
    /// Makes the inputs.
    enum Inputs(InputArguments) {
        PerLayerInputs { Rows = "per_layer_inputs" }
    }

    /// Gates an input.
    enum Gate(GateArguments) {
        PerLayerGate { Rows = "per_layer_gate" }
    }
}

const THREADS: u32 = 128;

#[repr(C)]
struct InputArguments {
    tokens: u64,
    factors: u64,
    norm: u64,
    x: u64,
    table: TableArgument,
    scale: f32,
    eps: f32,
    width: i32,
}

/// How the projections of embeddings become inputs.
#[derive(Clone, Copy)]
pub struct ProjectedInputs<'a> {
    /// Factor of the projections.
    pub scale: f32,
    /// The numbers by which the embeddings of each row were multiplied before their projection, f32 `[rows]`.
    pub factors: &'a DeviceBuffer,
    /// Weight of the norm over each input, f32 `[width]`.
    pub norm: &'a DeviceBuffer,
    /// Added to the mean square.
    pub eps: f32,
}

/// `x = (norm(x * scale / factor) + table_scale * table[token]) / sqrt(2)` for f32 `x` `[rows, blocks, width]`, with the norm over each
/// `width`, and the rows of `tokens` (i32, each less than the table's rows) in a table of `blocks * width` columns.
pub fn per_layer_inputs(
    gpu: &Gpu,
    projected: ProjectedInputs<'_>,
    (table, table_scale): (&HostTable, f32),
    tokens: &DeviceBuffer,
    (rows, width): (usize, usize),
    x: &DeviceBuffer,
) -> Result<()> {
    let table = Table::Host(table).argument(table_scale)?;
    let all = table.width();
    if width == 0 || !all.is_multiple_of(width) {
        bail!(
            Internal,
            "a table of rows of {all} for inputs of {width} elements"
        );
    }
    tokens.holds("tokens", &[rows, 4])?;
    projected.factors.holds("factors", &[rows, 4])?;
    projected.norm.holds("a norm", &[width, 4])?;
    x.holds("projections of embeddings", &[rows, all, 4])?;
    let arguments = InputArguments {
        tokens: tokens.address(),
        factors: projected.factors.address(),
        norm: projected.norm.address(),
        x: x.address(),
        table,
        scale: projected.scale,
        eps: projected.eps,
        width: int("the width of an input", width)?,
    };
    let launch = Launch::new([(all / width) as u32, rows as u32, 1], THREADS);
    // SAFETY: sizes were checked; the caller vouches for tokens, which are checked before they are written.
    unsafe { launch.of(Inputs::Rows).run(gpu, &arguments) }
}

#[repr(C)]
struct GateArguments {
    gate: u64,
    factors: u64,
    input: u64,
    y: u64,
    divisors: u64,
    width: i32,
    stride: i32,
    activation: i32,
}

/// The inputs of one block in those of all: f32 `[rows, stride]`, from element `first` of each row on.
#[derive(Clone, Copy)]
pub struct BlockInputs<'a> {
    /// The inputs of all blocks.
    pub all: &'a DeviceBuffer,
    /// Elements of a row.
    pub stride: usize,
    /// Element of a row where the block's input begins.
    pub first: usize,
}

/// `y = act(gate / factor) * input / divisor`: f32 `gate` `[rows, width]`, the product of rows that were multiplied by `factors` `[rows]`,
/// to f16 `y` `[rows, width]`. The divisors, f32 `[rows]`, are powers of two that bring the largest magnitude of a row between 1 and 2.
pub fn per_layer_gate(
    gpu: &Gpu,
    activation: Activation,
    gate: &DeviceBuffer,
    factors: &DeviceBuffer,
    inputs: BlockInputs<'_>,
    (rows, width): (usize, usize),
    y: &DeviceBuffer,
    divisors: &DeviceBuffer,
) -> Result<()> {
    let BlockInputs { all, stride, first } = inputs;
    gate.holds("gates", &[rows, width, 4])?;
    factors.holds("factors", &[rows, 4])?;
    all.holds("inputs of blocks", &[rows, stride, 4])?;
    y.holds("gated inputs", &[rows, width, 2])?;
    divisors.holds("divisors", &[rows, 4])?;
    if first + width > stride {
        bail!(
            Internal,
            "an input of {width} elements at {first} of rows of {stride}"
        );
    }
    let arguments = GateArguments {
        gate: gate.address(),
        factors: factors.address(),
        input: all.address() + (first * 4) as u64,
        y: y.address(),
        divisors: divisors.address(),
        width: int("the width of an input", width)?,
        stride: int("the width of all inputs", stride)?,
        activation: activation as i32,
    };
    let launch = Launch::new([rows as u32, 1, 1], THREADS);
    // SAFETY: sizes were checked.
    unsafe { launch.of(Gate::Rows).run(gpu, &arguments) }
}
