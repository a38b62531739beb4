//! Mamba-2 layers between their projections: the convolution and the time steps, the recurrence, and the norm of its gated output. Batches
//! are ragged, as those of gated delta nets.

use super::driver::{DeviceSlice, Launch, Planned, int};
use super::kernel::kernels;
use super::recurrent::{
    Convolution, ConvolutionArgument, MOST_BLOCKS, MOST_TAPS, OverflowNotes, RecurrentOutput,
    RecurrentSegments, RecurrentStates, SegmentsArgument, StatesArgument, StridedRows, THREADS,
    TargetArgument, WARP, check_aligned, recurrence, tiled_grid,
};
use crate::base::Result;
use crate::base::error::bail;
use crate::tensor::{MambaShape, RecurrentShape};

kernels! {
    /// The convolution and the time steps.
    enum Convolve(ConvolveArguments) {
        MambaConv { Rows = "mamba_conv" }
    }

    /// The recurrence, by the state size.
    enum Scan(ScanArguments) {
        MambaScan {
            To64 = "mamba_scan_64",
            To128 = "mamba_scan_128",
            To256 = "mamba_scan_256",
        }
    }

    /// The norm of the gated output, by its own output.
    enum GroupNorm(GroupNormArguments) {
        MambaNorm {
            F32 = "mamba_norm_f32",
            F16 = "mamba_norm_f16",
            Fragments = "mamba_norm_fragments",
        }
    }
}

/// Channels of the convolution that a warp takes.
const SPAN: usize = 128;
/// Upper limit of elements of B, and of C, of a group.
const MOST_STATE: usize = 256;
/// Elements of a block of NVFP4, of which a head and a state have whole ones.
const MULTIPLE: usize = 16;

/// The f32 weights of a layer's convolution and time steps.
#[derive(Clone, Copy, Debug)]
pub struct MambaConstants<'a> {
    /// `[channels, taps]`, at a multiple of 16 bytes; the last tap is the row's own.
    pub conv: DeviceSlice<'a>,
    /// `[channels]`, at a multiple of 16 bytes.
    pub conv_bias: Option<DeviceSlice<'a>>,
    /// `[heads]`
    pub a_log: DeviceSlice<'a>,
    /// `[heads]`
    pub dt_bias: DeviceSlice<'a>,
    /// The least and the largest time step.
    pub step_limits: [f32; 2],
}

/// The output of the convolution and the input of the recurrence: f32 rows without gaps.
#[derive(Clone, Copy, Debug)]
pub struct MambaInputs<'a> {
    /// x, B and C `[rows, channels]`, at a multiple of 16 bytes.
    pub xbc: DeviceSlice<'a>,
    /// Factors of S `[rows, heads]`.
    pub decay: DeviceSlice<'a>,
    /// Time steps `[rows, heads]`.
    pub steps: DeviceSlice<'a>,
}

impl MambaInputs<'_> {
    fn check(&self, shape: &MambaShape, rows: usize) -> Result<()> {
        self.xbc.holds("x, B and C", &[rows, shape.channels(), 4])?;
        self.decay.holds("decays", &[rows, shape.heads, 4])?;
        self.steps.holds("time steps", &[rows, shape.heads, 4])?;
        check_aligned("x, B and C", self.xbc)
    }
}

/// Refuses shapes without kernels.
fn check_shape(shape: &MambaShape) -> Result<()> {
    let &MambaShape {
        heads,
        head_dim,
        groups,
        state_size,
        taps,
    } = shape;
    let is_whole = |n: usize| n > 0 && n.is_multiple_of(MULTIPLE);
    if heads == 0
        || heads > MOST_BLOCKS
        || groups == 0
        || !heads.is_multiple_of(groups)
        || !is_whole(head_dim)
        || !is_whole(state_size)
        || state_size > MOST_STATE
        || !(2..=MOST_TAPS).contains(&taps)
    {
        bail!(
            Unsupported,
            "Mamba-2 of {heads} heads of {head_dim} and {groups} groups of {state_size}, with {taps} taps, on a GPU; the heads must be a multiple of the groups and at most {MOST_BLOCKS}, their size a multiple of {MULTIPLE}, that of the groups too and at most {MOST_STATE}, and the taps 2 to {MOST_TAPS}"
        );
    }
    int("channels", shape.channels())?;
    Ok(())
}

#[repr(C)]
struct ConvolveArguments {
    conv: ConvolutionArgument,
    dt: u64,
    dt_stride: u64,
    a_log: u64,
    dt_bias: u64,
    steps: u64,
    decay: u64,
    least: f32,
    largest: f32,
    heads: i32,
}

/// The convolution of the rows of `x` `[rows, channels]` with SiLU, the time steps `softplus(dt + dt_bias)` within their limits, of `dt`
/// `[rows, heads]`, and the decays `exp(-exp(a_log) step)`. Writes the last inputs of each segment to its state. The kernel before may
/// write neither the segments nor the weights.
pub fn mamba_conv(
    shape: &MambaShape,
    weights: &MambaConstants<'_>,
    segments: &RecurrentSegments<'_>,
    states: &RecurrentStates,
    rows: usize,
    x: StridedRows<'_>,
    dt: StridedRows<'_>,
    out: &MambaInputs<'_>,
) -> Result<()> {
    check_shape(shape)?;
    let heads = shape.heads;
    weights.a_log.holds("rates of decay", &[heads, 4])?;
    weights.dt_bias.holds("biases of time steps", &[heads, 4])?;
    dt.check("time steps", rows, heads, 1)?;
    out.check(shape, rows)?;
    let convolution = Convolution {
        x,
        weights: weights.conv,
        bias: weights.conv_bias,
        y: out.xbc,
        channels: shape.channels(),
        taps: shape.taps,
    };
    let history = states.history(RecurrentShape::Mamba2(*shape))?;
    let [least, largest] = weights.step_limits;
    let arguments = ConvolveArguments {
        conv: convolution.argument(rows, segments, history)?,
        dt: dt.values.address(),
        dt_stride: dt.stride as u64,
        a_log: weights.a_log.address(),
        dt_bias: weights.dt_bias.address(),
        steps: out.steps.address(),
        decay: out.decay.address(),
        least,
        largest,
        heads: heads as i32,
    };
    let units = shape.channels().div_ceil(SPAN) + heads.div_ceil(WARP);
    let launch = Launch::new(tiled_grid(rows, segments, units)?, THREADS);
    // SAFETY: sizes were checked; the caller vouches for segments and blocks.
    unsafe { launch.of(Convolve::Rows).run(x.values.gpu(), &arguments) }
}

#[repr(C)]
struct ScanArguments {
    xbc: u64,
    decay: u64,
    steps: u64,
    skip: u64,
    y: u64,
    segments: SegmentsArgument,
    states: StatesArgument,
    heads: i32,
    head_dim: i32,
    groups: i32,
    state_size: i32,
}

/// The kernel for a shape, and its launch.
fn planned(shape: &MambaShape, segments: &RecurrentSegments<'_>) -> Planned<Scan> {
    let (kernel, height) = match shape.state_size {
        0..=64 => (Scan::To64, 64),
        65..=128 => (Scan::To128, 128),
        _ => (Scan::To256, 256),
    };
    recurrence([shape.head_dim, shape.heads], height, segments).of(kernel)
}

/// The recurrence over the rows of each segment, from its state on, which is written back: f32 `y` `[rows, heads, head_dim]`, with `skip`
/// `[heads]` times x added. A segment's bits do not depend on how it is divided. Follows [`mamba_conv`] directly: the kernel before may
/// write neither the segments nor the matrices of states.
pub fn mamba_scan(
    shape: &MambaShape,
    skip: DeviceSlice<'_>,
    segments: &RecurrentSegments<'_>,
    states: &RecurrentStates,
    rows: usize,
    inputs: &MambaInputs<'_>,
    y: DeviceSlice<'_>,
) -> Result<()> {
    check_shape(shape)?;
    inputs.check(shape, rows)?;
    skip.holds("factors of x", &[shape.heads, 4])?;
    y.holds("results of Mamba-2", &[rows, shape.width(), 4])?;
    let arguments = ScanArguments {
        xbc: inputs.xbc.address(),
        decay: inputs.decay.address(),
        steps: inputs.steps.address(),
        skip: skip.address(),
        y: y.address(),
        segments: segments.argument()?,
        states: states.matrices(RecurrentShape::Mamba2(*shape))?,
        heads: shape.heads as i32,
        head_dim: shape.head_dim as i32,
        groups: shape.groups as i32,
        state_size: shape.state_size as i32,
    };
    let planned = planned(shape, segments);
    // SAFETY: sizes were checked; the caller vouches for segments and blocks.
    unsafe { planned.run(y.gpu(), &arguments) }
}

#[repr(C)]
struct GroupNormArguments {
    y: u64,
    z: u64,
    weight: u64,
    to: TargetArgument,
    z_stride: u64,
    groups: i32,
    size: i32,
    eps: f32,
}

/// `rms_norm(y * silu(z)) * weight` by group of a row: f32 `y` and `z` `[rows, width]`, f32 `weight` `[width]`, to `out` of the same shape.
pub fn mamba_norm(
    shape: &MambaShape,
    weight: DeviceSlice<'_>,
    eps: f32,
    rows: usize,
    y: DeviceSlice<'_>,
    z: StridedRows<'_>,
    output: RecurrentOutput,
    overflow: Option<OverflowNotes<'_>>,
    out: DeviceSlice<'_>,
) -> Result<()> {
    check_shape(shape)?;
    let width = shape.width();
    weight.holds("a norm", &[width, 4])?;
    y.holds("results of Mamba-2", &[rows, width, 4])?;
    z.check("gates of results", rows, width, 4)?;
    for (what, slice) in [("weights", weight), ("results", y)] {
        check_aligned(what, slice)?;
    }
    let kernel = output.kernel([GroupNorm::F32, GroupNorm::F16, GroupNorm::Fragments]);
    let size = width / shape.groups;
    let arguments = GroupNormArguments {
        y: y.address(),
        z: z.values.address(),
        weight: weight.address(),
        to: TargetArgument::new(output, rows, width, overflow, out)?,
        z_stride: z.stride as u64,
        groups: shape.groups as i32,
        size: size as i32,
        eps,
    };
    // A CTA takes whole pairs of blocks.
    let of_block = if size.is_multiple_of(2 * MULTIPLE) {
        1
    } else {
        2
    };
    let blocks = shape.groups.div_ceil(of_block);
    let launch = Launch::new([int("rows", rows)? as u32, blocks as u32, 1], THREADS);
    // SAFETY: sizes were checked.
    unsafe { launch.of(kernel).run(y.gpu(), &arguments) }
}
