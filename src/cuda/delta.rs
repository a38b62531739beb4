//! Gated-delta-net layers between their projections: the convolution, the recurrence and the gated norm, or all of them in one launch for a
//! step of decoding. Batches are ragged: each segment of rows continues the state of a sequence, which is in a block of an arena.

use super::driver::{DeviceSlice, Launch, Planned, int};
use super::kernel::kernels;
use super::linear::{Hardware, Layout};
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

    /// The recurrence, by the size of key heads, and for single rows.
    enum Recur(RecurArguments) {
        DeltaRule {
            To64 = "delta_rule_64",
            To128 = "delta_rule_128",
            To256 = "delta_rule_256",
        }
        DeltaSingle { Single = "delta_single_128" }
    }

    /// A layer of single rows, by the columns of S of a CTA and the layout of the output.
    enum Step(StepArguments) {
        DeltaStep {
            RowMajor32 = "delta_step_32_f16",
            RowMajor64 = "delta_step_64_f16",
            RowMajor128 = "delta_step_128_f16",
            Fragments32 = "delta_step_32_fragments",
            Fragments64 = "delta_step_64_fragments",
            Fragments128 = "delta_step_128_fragments",
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

/// Columns of S of a CTA of the kernel of single rows, its threads, and the most rows of S, as in the kernel.
const SINGLE_COLUMNS: usize = 64;
const SINGLE_THREADS: usize = 128;
const SINGLE_KEY_DIM: usize = 128;

/// Whether [`delta_rule`] has a kernel of single rows for layers of this shape.
pub fn has_delta_single(hardware: &Hardware, shape: &DeltaShape) -> bool {
    // It adds in another order than the kernel of prompts.
    !hardware.deterministic && serves_single(shape)
}

fn serves_single(shape: &DeltaShape) -> bool {
    shape.key_dim <= SINGLE_KEY_DIM && shape.value_dim.is_multiple_of(SINGLE_COLUMNS)
}

/// The kernel for a shape, and its launch.
fn planned(
    shape: &DeltaShape,
    segments: &RecurrentSegments<'_>,
    single: bool,
) -> Result<Planned<Recur>> {
    if !single {
        let (kernel, height) = match shape.key_dim {
            0..=64 => (Recur::To64, 64),
            65..=128 => (Recur::To128, 128),
            _ => (Recur::To256, 256),
        };
        let sizes = [shape.value_dim, shape.value_heads];
        return Ok(recurrence(sizes, height, segments).of(kernel));
    }
    if !serves_single(shape) {
        bail!(
            Internal,
            "single rows of {shape:?}, which have no kernel of their own"
        );
    }
    let columns = shape.value_dim / SINGLE_COLUMNS;
    let grid = [columns, shape.value_heads, segments.count].map(|n| n as u32);
    // q and k, and sums of each warp for both products.
    let floats = 2 * SINGLE_KEY_DIM + 2 * SINGLE_THREADS / WARP * SINGLE_COLUMNS;
    let launch = Launch {
        shared: 4 * floats as u32,
        ..Launch::new(grid, SINGLE_THREADS as u32)
    };
    Ok(launch.of(Recur::Single))
}

/// The gated delta rule over the rows of each segment, from its state on, which is written back: f32 `o` `[rows, value_heads, value_dim]`.
/// A segment's bits do not depend on how it is divided. Follows [`delta_conv`] directly: the kernel before may write neither the segments
/// nor the matrices of states. `single` says that segment `s` is row `s` alone and continues no other, and chooses the kernel for that, which
/// shapes with [`has_delta_single`] have.
pub fn delta_rule(
    shape: &DeltaShape,
    segments: &RecurrentSegments<'_>,
    states: &RecurrentStates,
    rows: usize,
    single: bool,
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
    let planned = planned(shape, segments, single)?;
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

/// Columns of S of a CTA of [`delta_step`].
const STEP_COLUMNS: [usize; 3] = [32, 64, 128];
/// Most elements of its keys.
const STEP_KEY_DIM: usize = 128;
/// Columns of a warp.
const WARP_COLUMNS: usize = 8;
/// Most CTAs of a cluster.
const MOST_CLUSTER: usize = 8;

/// The columns of a CTA of [`delta_step`] and the CTAs of a key head: the most CTAs that form a cluster. `None` for shapes that it does not
/// serve.
fn step_division(shape: &DeltaShape) -> Option<(usize, usize)> {
    let group = shape.value_heads.checked_div(shape.key_heads)?;
    let divided = STEP_COLUMNS.map(|columns| (columns, group * shape.value_dim / columns));
    let fits = |&(columns, ctas): &(usize, usize)| {
        shape.value_dim.is_multiple_of(columns) && ctas <= MOST_CLUSTER
    };
    let division = divided.into_iter().find(fits)?;
    (shape.key_dim <= STEP_KEY_DIM && check_shape(shape).is_ok()).then_some(division)
}

/// Most rows for which one launch is faster: with more, the CTAs of three have more of the states' loads in flight.
const STEP_ROWS: usize = 1;

/// Whether [`delta_step`] serves `rows` rows of layers of this shape, and is faster than three launches.
pub fn has_delta_step(hardware: &Hardware, shape: &DeltaShape, rows: usize) -> bool {
    // One launch adds in another order than three.
    !hardware.deterministic
        && rows <= STEP_ROWS
        && hardware.has_clusters()
        && step_division(shape).is_some()
}

/// The projections of rows that [`delta_step`] takes, all f32.
#[derive(Clone, Copy, Debug)]
pub struct DeltaProjected<'a> {
    /// Inputs of the convolution `[rows, channels]`.
    pub x: StridedRows<'a>,
    /// Gates of results `[rows, value_heads, value_dim]`.
    pub z: StridedRows<'a>,
    /// Gates of decays `[rows, value_heads]`.
    pub a: StridedRows<'a>,
    /// Gates of learning rates `[rows, value_heads]`.
    pub b: StridedRows<'a>,
}

#[repr(C)]
struct StepArguments {
    x: u64,
    z: u64,
    a: u64,
    b: u64,
    x_stride: u64,
    z_stride: u64,
    a_stride: u64,
    b_stride: u64,
    conv: u64,
    a_log: u64,
    dt_bias: u64,
    weight: u64,
    segments: SegmentsArgument,
    matrices: StatesArgument,
    inputs: StatesArgument,
    to: TargetArgument,
    key_heads: i32,
    value_heads: i32,
    key_dim: i32,
    value_dim: i32,
    taps: i32,
    norm_eps: f32,
}

/// [`delta_conv`], [`delta_rule`] and [`delta_norm`] of a step of decoding in one launch, for shapes with [`has_delta_step`]. Segment `s` is
/// row `s` alone and continues no other. `norm` is the weight of the gated norm, f32 `[value_dim]`, and its epsilon; the rows go to `out` as
/// f16 `[rows, value_heads, value_dim]` in a layout. The kernel before may write neither the segments nor the states nor the weights.
pub fn delta_step(
    shape: &DeltaShape,
    weights: &DeltaConstants<'_>,
    (norm, eps): (DeviceSlice<'_>, f32),
    segments: &RecurrentSegments<'_>,
    states: &RecurrentStates,
    inputs: &DeltaProjected<'_>,
    layout: Layout,
    overflow: Option<OverflowNotes<'_>>,
    out: DeviceSlice<'_>,
) -> Result<()> {
    check_shape(shape)?;
    let Some((columns, ctas)) = step_division(shape) else {
        bail!(
            Internal,
            "a step of {shape:?}, which needs several launches"
        );
    };
    let (rows, output) = (segments.count, RecurrentOutput::F16(layout));
    let (heads, width) = (shape.value_heads, shape.value_width());
    let DeltaProjected { x, z, a, b } = inputs;
    x.check("inputs of a convolution", rows, shape.channels(), 4)?;
    z.check("gates of results", rows, width, 4)?;
    a.check("gates of decays", rows, heads, 1)?;
    b.check("gates of learning rates", rows, heads, 1)?;
    for (what, slice, floats) in [
        ("a convolution", weights.conv, shape.channels() * shape.taps),
        ("a norm", norm, shape.value_dim),
    ] {
        slice.holds(what, &[floats, 4])?;
        check_aligned(what, slice)?;
    }
    weights.a_log.holds("rates of decay", &[heads, 4])?;
    weights.dt_bias.holds("biases of decays", &[heads, 4])?;
    let recurrent = RecurrentShape::GatedDelta(*shape);
    let arguments = StepArguments {
        x: x.values.address(),
        z: z.values.address(),
        a: a.values.address(),
        b: b.values.address(),
        x_stride: x.stride as u64,
        z_stride: z.stride as u64,
        a_stride: a.stride as u64,
        b_stride: b.stride as u64,
        conv: weights.conv.address(),
        a_log: weights.a_log.address(),
        dt_bias: weights.dt_bias.address(),
        weight: norm.address(),
        segments: segments.argument()?,
        matrices: states.matrices(recurrent)?,
        inputs: states.history(recurrent)?,
        to: TargetArgument::new(output, rows, width, overflow, out)?,
        key_heads: shape.key_heads as i32,
        value_heads: heads as i32,
        key_dim: shape.key_dim as i32,
        value_dim: shape.value_dim as i32,
        taps: shape.taps as i32,
        norm_eps: eps,
    };
    // SAFETY: sizes were checked; the caller vouches for segments and blocks.
    unsafe {
        step_launch([rows, shape.key_heads, ctas], columns, layout).run(out.gpu(), &arguments)
    }
}

/// The launch of a step over rows, key heads and the CTAs of a key head.
fn step_launch(grid: [usize; 3], columns: usize, layout: Layout) -> Planned<Step> {
    let of = |[row_major, fragments]: [Step; 2]| match layout {
        Layout::RowMajor => row_major,
        Layout::FragmentMajor => fragments,
    };
    let kernel = match columns {
        32 => of([Step::RowMajor32, Step::Fragments32]),
        64 => of([Step::RowMajor64, Step::Fragments64]),
        _ => of([Step::RowMajor128, Step::Fragments128]),
    };
    let warps = columns / WARP_COLUMNS;
    // A sum of squares for each warp of a cluster, q and k, the columns of v and of o, and two gates.
    let floats = MOST_CLUSTER * warps + 2 * STEP_KEY_DIM + 2 * columns + 2;
    let launch = Launch {
        shared: (floats * 4).next_multiple_of(16) as u32,
        cluster: grid[2] as u32,
        ..Launch::new(grid.map(|n| n as u32), (warps * WARP) as u32)
    };
    launch.of(kernel)
}
