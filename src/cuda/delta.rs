//! Gated-delta-net layers between their projections: the convolution, the recurrence and the gated norm. Batches are ragged: each segment
//! of rows continues the state of a sequence, which is in a block of an arena.

use super::driver::{DeviceSlice, Launch, Planned, int};
use super::kernel::kernels;
use super::recurrent::{
    Convolution, ConvolutionArgument, MOST_BLOCKS, MOST_TAPS, OverflowNotes, RecurrentOutput,
    RecurrentSegments, RecurrentStates, SegmentsArgument, StatesArgument, StridedRows, THREADS,
    TargetArgument, WARP, WARPS, check_aligned, recurrence, tiled_grid,
};
use crate::base::Result;
use crate::base::error::bail;
use crate::tensor::{DeltaShape, RecurrentShape};

kernels! {
    /// The convolution, norms and gates, by the size of key heads.
    enum Convolve(ConvolveArguments) {
        DeltaConv {
            Narrow = "delta_conv",
            Wide = "delta_conv_wide",
        }
    }

    /// The recurrence, by the size of key heads.
    enum Recur(RecurArguments) {
        DeltaRule {
            To64 = "delta_rule_64",
            To128 = "delta_rule_128",
            To256 = "delta_rule_256",
        }
    }

    /// The gated norm, by its output.
    enum GatedNorm(GatedNormArguments) {
        DeltaNorm {
            F32 = "delta_norm_f32",
            F16 = "delta_norm_f16",
            Fragments = "delta_norm_fragments",
        }
    }
}

/// Upper limit of elements of a head.
const MOST_ELEMENTS: usize = 256;

/// The f32 weights of a layer's convolution and gates.
#[derive(Clone, Copy, Debug)]
pub struct DeltaConstants<'a> {
    /// `[channels, taps]`, at a multiple of 16 bytes; the last tap is the row's own.
    pub conv: DeviceSlice<'a>,
    /// `[value_heads]`
    pub a_log: DeviceSlice<'a>,
    /// `[value_heads]`
    pub dt_bias: DeviceSlice<'a>,
}

/// The output of the convolution and the input of the recurrence: f32 rows without gaps.
#[derive(Clone, Copy, Debug)]
pub struct DeltaInputs<'a> {
    /// Queries, keys and values `[rows, channels]`, at a multiple of 16 bytes.
    pub qkv: DeviceSlice<'a>,
    /// Factors of S `[rows, value_heads]`.
    pub decay: DeviceSlice<'a>,
    /// Learning rates `[rows, value_heads]`.
    pub beta: DeviceSlice<'a>,
}

/// Refuses shapes without kernels.
fn check_shape(shape: &DeltaShape) -> Result<()> {
    let has_kernel = |dim: usize| (16..=MOST_ELEMENTS).contains(&dim) && dim.is_multiple_of(16);
    let &DeltaShape {
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        taps,
    } = shape;
    if key_heads == 0
        || value_heads == 0
        || value_heads > MOST_BLOCKS
        || !value_heads.is_multiple_of(key_heads)
        || !has_kernel(key_dim)
        || !has_kernel(value_dim)
        || !(2..=MOST_TAPS).contains(&taps)
    {
        bail!(
            Unsupported,
            "a gated delta net of {key_heads} key heads of {key_dim} and {value_heads} value heads of {value_dim}, with {taps} taps, on a GPU; the value heads must be a multiple of the key heads and at most {MOST_BLOCKS}, their sizes multiples of 16 up to {MOST_ELEMENTS}, and the taps 2 to {MOST_TAPS}"
        );
    }
    int("channels", shape.channels())?;
    Ok(())
}

impl DeltaInputs<'_> {
    fn check(&self, shape: &DeltaShape, rows: usize) -> Result<()> {
        self.qkv
            .holds("queries, keys and values", &[rows, shape.channels(), 4])?;
        self.decay.holds("decays", &[rows, shape.value_heads, 4])?;
        self.beta
            .holds("learning rates", &[rows, shape.value_heads, 4])?;
        check_aligned("queries, keys and values", self.qkv)
    }
}

#[repr(C)]
struct ConvolveArguments {
    conv: ConvolutionArgument,
    a: u64,
    b: u64,
    a_stride: u64,
    b_stride: u64,
    a_log: u64,
    dt_bias: u64,
    decay: u64,
    beta: u64,
    key_heads: i32,
    key_dim: i32,
    value_heads: i32,
}

/// The convolution of the rows of `x` `[rows, channels]` with SiLU, the L2 norms of queries and keys, the scale of queries, and the gates
/// of `a` and `b` `[rows, value_heads]`. Writes the last inputs of each segment to its state. The kernel before may write neither the
/// segments nor the weights.
pub fn delta_conv(
    shape: &DeltaShape,
    weights: &DeltaConstants<'_>,
    segments: &RecurrentSegments<'_>,
    states: &RecurrentStates,
    rows: usize,
    x: StridedRows<'_>,
    a: StridedRows<'_>,
    b: StridedRows<'_>,
    out: &DeltaInputs<'_>,
) -> Result<()> {
    check_shape(shape)?;
    let heads = shape.value_heads;
    weights.a_log.holds("rates of decay", &[heads, 4])?;
    weights.dt_bias.holds("biases of decays", &[heads, 4])?;
    a.check("gates of decays", rows, heads, 1)?;
    b.check("gates of learning rates", rows, heads, 1)?;
    out.check(shape, rows)?;
    let convolution = Convolution {
        x,
        weights: weights.conv,
        bias: None,
        y: out.qkv,
        channels: shape.channels(),
        taps: shape.taps,
    };
    let history = states.history(RecurrentShape::GatedDelta(*shape))?;
    let arguments = ConvolveArguments {
        conv: convolution.argument(rows, segments, history)?,
        a: a.values.address(),
        b: b.values.address(),
        a_stride: a.stride as u64,
        b_stride: b.stride as u64,
        a_log: weights.a_log.address(),
        dt_bias: weights.dt_bias.address(),
        decay: out.decay.address(),
        beta: out.beta.address(),
        key_heads: shape.key_heads as i32,
        key_dim: shape.key_dim as i32,
        value_heads: heads as i32,
    };
    let (kernel, span) = match shape.key_dim > 128 {
        true => (Convolve::Wide, 256),
        false => (Convolve::Narrow, 128),
    };
    let units = 2 * shape.key_heads + shape.value_width().div_ceil(span) + heads.div_ceil(WARP);
    let launch = Launch::new(tiled_grid(rows, segments, units)?, THREADS);
    // SAFETY: sizes were checked; the caller vouches for segments and blocks.
    unsafe { launch.of(kernel).run(x.values.gpu(), &arguments) }
}

#[repr(C)]
struct RecurArguments {
    qkv: u64,
    decay: u64,
    beta: u64,
    o: u64,
    segments: SegmentsArgument,
    states: StatesArgument,
    key_heads: i32,
    value_heads: i32,
    key_dim: i32,
    value_dim: i32,
}

/// The kernel for a shape, and its launch.
fn planned(shape: &DeltaShape, segments: &RecurrentSegments<'_>) -> Planned<Recur> {
    let (kernel, height) = match shape.key_dim {
        0..=64 => (Recur::To64, 64),
        65..=128 => (Recur::To128, 128),
        _ => (Recur::To256, 256),
    };
    recurrence([shape.value_dim, shape.value_heads], height, segments).of(kernel)
}

/// The gated delta rule over the rows of each segment, from its state on, which is written back: f32 `o` `[rows, value_heads, value_dim]`.
/// A segment's bits do not depend on how it is divided. Follows [`delta_conv`] directly: the kernel before may write neither the segments
/// nor the matrices of states.
pub fn delta_rule(
    shape: &DeltaShape,
    segments: &RecurrentSegments<'_>,
    states: &RecurrentStates,
    rows: usize,
    inputs: &DeltaInputs<'_>,
    o: DeviceSlice<'_>,
) -> Result<()> {
    check_shape(shape)?;
    inputs.check(shape, rows)?;
    o.holds("results of a delta rule", &[rows, shape.value_width(), 4])?;
    let arguments = RecurArguments {
        qkv: inputs.qkv.address(),
        decay: inputs.decay.address(),
        beta: inputs.beta.address(),
        o: o.address(),
        segments: segments.argument()?,
        states: states.matrices(RecurrentShape::GatedDelta(*shape))?,
        key_heads: shape.key_heads as i32,
        value_heads: shape.value_heads as i32,
        key_dim: shape.key_dim as i32,
        value_dim: shape.value_dim as i32,
    };
    let planned = planned(shape, segments);
    // SAFETY: sizes were checked; the caller vouches for segments and blocks.
    unsafe { planned.run(o.gpu(), &arguments) }
}

#[repr(C)]
struct GatedNormArguments {
    o: u64,
    z: u64,
    weight: u64,
    to: TargetArgument,
    z_stride: u64,
    heads: i32,
    dim: i32,
    eps: f32,
}

/// `rms_norm(o) * weight * silu(z)` by value head: f32 `o` and `z` `[rows, value_heads, value_dim]`, f32 `weight` `[value_dim]`, to `out`
/// of the same shape.
pub fn delta_norm(
    shape: &DeltaShape,
    weight: DeviceSlice<'_>,
    eps: f32,
    rows: usize,
    o: DeviceSlice<'_>,
    z: StridedRows<'_>,
    output: RecurrentOutput,
    overflow: Option<OverflowNotes<'_>>,
    out: DeviceSlice<'_>,
) -> Result<()> {
    check_shape(shape)?;
    let width = shape.value_width();
    weight.holds("a norm", &[shape.value_dim, 4])?;
    o.holds("results of a delta rule", &[rows, width, 4])?;
    z.check("gates of results", rows, width, 4)?;
    let kernel = output.kernel([GatedNorm::F32, GatedNorm::F16, GatedNorm::Fragments]);
    for (what, slice) in [("weights", weight), ("results", o)] {
        check_aligned(what, slice)?;
    }
    let arguments = GatedNormArguments {
        o: o.address(),
        z: z.values.address(),
        weight: weight.address(),
        to: TargetArgument::new(output, rows, width, overflow, out)?,
        z_stride: z.stride as u64,
        heads: shape.value_heads as i32,
        dim: shape.value_dim as i32,
        eps,
    };
    // A warp takes two heads.
    let blocks = shape.value_heads.div_ceil(2).div_ceil(WARPS);
    let launch = Launch::new([int("rows", rows)? as u32, blocks as u32, 1], THREADS);
    // SAFETY: sizes were checked.
    unsafe { launch.of(kernel).run(o.gpu(), &arguments) }
}
