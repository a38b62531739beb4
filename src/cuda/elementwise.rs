//! Small kernels around the GEMMs: embedding, RMSNorm and activation.

use std::sync::Arc;

use super::driver::{DeviceBuffer, Gpu, Launch, int};
use super::kernel::kernels;
use super::linear::{Glu, Layout};
use crate::base::Result;
use crate::base::error::bail;
use crate::format::nvfp4::BLOCK;
use crate::tensor::WeightType;

const THREADS: u32 = 256;

kernels! {
    /// Looks rows up.
    enum Embed(EmbedArguments) {
        Embed { Rows = "embed" }
    }

    /// The norm, by the layout of its result.
    enum RmsNorm(NormArguments) {
        RmsNorm {
            RowMajor = "rms_norm",
            FragmentMajor = "rms_norm_fragments",
        }
    }

    /// Rows of the residual stream as they are, by the layout of the result.
    enum StreamKernel(StreamArguments) {
        RmsNorm {
            RowMajor = "stream_rows",
            FragmentMajor = "stream_rows_fragments",
        }
    }

    /// The norm after a half of a block, and the next.
    enum PostNorm(PostNormArguments) {
        PostNorm { Rows = "post_norm" }
    }

    /// The norms of queries and of keys.
    enum ProjectionNorms(ProjectionArguments) {
        ProjectionNorms { Rows = "norm_projections" }
    }

    /// The gated linear unit.
    enum GatedUnit(GluArguments) {
        Glu { Rows = "glu" }
    }

    /// The squared ReLU of MLPs without a gate.
    enum Square(SquareArguments) {
        Glu { Rows = "relu_squared_f16" }
    }

    /// The gate of attention.
    enum HeadGate(HeadGateArguments) {
        Glu { Rows = "gate_heads" }
    }

    /// The soft cap of logits.
    enum SoftCap(CapArguments) {
        Glu { Values = "soft_cap" }
    }
}

fn blocks(elements: usize) -> u32 {
    (elements as u32).div_ceil(THREADS)
}

#[repr(C)]
struct EmbedArguments {
    tokens: u64,
    out: u64,
    table: TableArgument,
}

/// A table of rows as an argument of kernels.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct TableArgument {
    values: u64,
    scales: u64,
    global: f32,
    scale: f32,
    kind: i32,
    width: i32,
}

impl TableArgument {
    /// A table at address `values`, of rows of `width` values that are multiplied by `scale`; int8 rows have their own `scales`, and NVFP4
    /// rows a `global` scale.
    pub(super) fn new(
        storage: WeightType,
        (values, scales): (u64, u64),
        global: f32,
        scale: f32,
        width: usize,
    ) -> Result<TableArgument> {
        Ok(TableArgument {
            values,
            scales,
            global,
            scale,
            kind: match storage {
                WeightType::F32 => 0,
                WeightType::F16 => 1,
                WeightType::BF16 => 2,
                WeightType::Nvfp4 => 3,
                WeightType::Int8 => 4,
            },
            width: int("the width of a table", width)?,
        })
    }

    /// Values of a row.
    pub(super) fn width(&self) -> usize {
        self.width as usize
    }
}

/// Launches the kernel of `table::embed`.
pub(super) fn embed(
    gpu: &Gpu,
    table: TableArgument,
    tokens: &DeviceBuffer,
    rows: usize,
    out: &DeviceBuffer,
) -> Result<()> {
    let width = table.width();
    tokens.holds("tokens", &[rows * 4])?;
    out.holds("embeddings", &[rows * width * 4])?;
    let arguments = EmbedArguments {
        tokens: tokens.address(),
        out: out.address(),
        table,
    };
    let launch = Launch::new([blocks(width), rows as u32, 1], THREADS);
    // SAFETY: sizes were checked; the caller vouches for tokens, which are checked before they are written.
    unsafe { launch.of(Embed::Rows).run(gpu, &arguments) }
}

#[repr(C)]
struct NormArguments {
    x: u64,
    weight: u64,
    y: u64,
    factors: u64,
    width: i32,
    eps: f32,
}

/// RMSNorm of f32 rows of `width` from byte `at` of `x` on, to f16 `y` in the given layout. Also stores the factor of each row in
/// `factors`, f32 `[rows]`.
pub fn rms_norm(
    gpu: &Gpu,
    x: &DeviceBuffer,
    at: usize,
    weight: &DeviceBuffer,
    eps: f32,
    rows: usize,
    width: usize,
    y: &DeviceBuffer,
    layout: Layout,
    factors: Option<&DeviceBuffer>,
) -> Result<()> {
    if let Some(factors) = factors {
        factors.holds("factors", &[rows, 4])?;
    }
    x.holds("rows", &[at + rows * width * 4])?;
    weight.holds("a norm", &[width * 4])?;
    y.holds("normalised rows", &[layout.elements(rows, width), 2])?;
    check_width(layout, width)?;
    let kernel = match layout {
        Layout::RowMajor => RmsNorm::RowMajor,
        Layout::FragmentMajor => RmsNorm::FragmentMajor,
    };
    let arguments = NormArguments {
        x: x.address() + at as u64,
        weight: weight.address(),
        y: y.address(),
        factors: factors.map_or(0, DeviceBuffer::address),
        width: int("the hidden size", width)?,
        eps,
    };
    // SAFETY: sizes were checked.
    unsafe {
        Launch::new([rows as u32, 1, 1], THREADS)
            .of(kernel)
            .run(gpu, &arguments)
    }
}

/// Fails for rows that kernels cannot store in a layout.
fn check_width(layout: Layout, width: usize) -> Result<()> {
    let (name, multiple) = match layout {
        Layout::RowMajor => ("row-major", 4),
        Layout::FragmentMajor => ("fragment-major", BLOCK),
    };
    if !width.is_multiple_of(multiple) {
        bail!(
            Unsupported,
            "rows of {width}; {name} rows have a multiple of {multiple} elements"
        );
    }
    Ok(())
}

#[repr(C)]
struct StreamArguments {
    x: u64,
    y: u64,
    overflow: u64,
    width: i32,
    layer: i32,
}

/// f32 rows `x` of `width` as f16 in the place and the layout that `next` says.
pub fn stream_rows(
    gpu: &Gpu,
    x: &DeviceBuffer,
    rows: usize,
    width: usize,
    next: StreamRows<'_>,
) -> Result<()> {
    x.holds("rows", &[rows, width, 4])?;
    next.check(rows, width)?;
    check_width(next.layout, width)?;
    let arguments = StreamArguments {
        x: x.address(),
        y: next.rows.address(),
        overflow: next.overflow.address(),
        width: int("the hidden size", width)?,
        layer: int("a layer", next.layer)?,
    };
    let kernel = match next.layout {
        Layout::RowMajor => StreamKernel::RowMajor,
        Layout::FragmentMajor => StreamKernel::FragmentMajor,
    };
    let launch = Launch::new([rows as u32, 1, 1], THREADS);
    // SAFETY: sizes were checked.
    unsafe { launch.of(kernel).run(gpu, &arguments) }
}

#[repr(C)]
struct PostNormArguments {
    y: u64,
    divisors: u64,
    weight: u64,
    scale: u64,
    x: u64,
    overflow: u64,
    layer: i32,
    next: NextArgument,
}

/// The longest row of a residual stream that a CTA keeps in registers.
const RESIDUAL_WIDTH: usize = 8192;
/// Threads of such a CTA, and of one that normalizes projections.
pub(super) const RESIDUAL_THREADS: u32 = 512;

/// The RMSNorm after an addition to the residual stream: its weight, f32 `[width]`, and where the normalized rows go, as f16 in a layout.
#[derive(Clone, Copy)]
pub struct NextNorm<'a> {
    /// The weight.
    pub weight: &'a DeviceBuffer,
    /// Layout of the normalized rows.
    pub layout: Layout,
    /// The normalized rows.
    pub rows: &'a DeviceBuffer,
    /// Where the factor of each row goes, f32 `[rows]`.
    pub factors: Option<&'a DeviceBuffer>,
}

/// Rows of a residual stream as f16, for what takes them without a norm.
#[derive(Clone, Copy)]
pub struct StreamRows<'a> {
    /// Their layout.
    pub layout: Layout,
    /// Where they go.
    pub rows: &'a DeviceBuffer,
    /// A u32 for each row. If a row has a value that f16 cannot hold, its u32 becomes 1 + `layer`, unless it is set already.
    pub overflow: &'a DeviceBuffer,
    /// The layer that takes the rows.
    pub layer: usize,
}

impl StreamRows<'_> {
    fn check(&self, rows: usize, width: usize) -> Result<()> {
        let elements = self.layout.elements(rows, width);
        self.rows
            .holds("rows of the residual stream", &[elements, 2])?;
        self.overflow
            .holds("the layers that overflowed", &[rows, 4])
    }
}

/// Rows of a residual stream for the next half of a block.
#[derive(Clone, Copy)]
pub enum NextRows<'a> {
    /// Its norm.
    Normalized(NextNorm<'a>),
    /// Rows as they are.
    Stream(StreamRows<'a>),
}

#[repr(C)]
#[derive(Default)]
pub(super) struct NextArgument {
    weight: u64,
    normed: u64,
    factors: u64,
    width: i32,
    eps: f32,
    fragment_major: i32,
    layer: i32,
    overflow: u64,
}

impl NextArgument {
    /// The argument for `rows` rows of `width`.
    pub(super) fn new(
        next: Option<NextRows<'_>>,
        rows: usize,
        width: usize,
        eps: f32,
    ) -> Result<NextArgument> {
        if !width.is_multiple_of(BLOCK) || width > RESIDUAL_WIDTH {
            bail!(
                Unsupported,
                "a residual stream of {width}; what adds to it and normalizes takes multiples of {BLOCK} up to {RESIDUAL_WIDTH}"
            );
        }
        let plain = NextArgument {
            width: int("the hidden size", width)?,
            eps,
            ..NextArgument::default()
        };
        Ok(match next {
            None => plain,
            Some(NextRows::Normalized(next)) => {
                next.weight.holds("a norm", &[width, 4])?;
                next.rows
                    .holds("normalised rows", &[next.layout.elements(rows, width), 2])?;
                if let Some(factors) = next.factors {
                    factors.holds("factors", &[rows, 4])?;
                }
                NextArgument {
                    weight: next.weight.address(),
                    normed: next.rows.address(),
                    factors: next.factors.map_or(0, DeviceBuffer::address),
                    fragment_major: (next.layout == Layout::FragmentMajor).into(),
                    ..plain
                }
            }
            Some(NextRows::Stream(next)) => {
                next.check(rows, width)?;
                NextArgument {
                    normed: next.rows.address(),
                    fragment_major: (next.layout == Layout::FragmentMajor).into(),
                    layer: int("a layer", next.layer)?,
                    overflow: next.overflow.address(),
                    ..plain
                }
            }
        })
    }
}

/// An addend of a residual stream, before its norm.
#[derive(Clone, Copy)]
pub struct NormedAddend<'a> {
    /// f32 `[rows, width]`.
    pub y: &'a DeviceBuffer,
    /// The numbers by which the rows of `y` were divided, f32 `[rows]`.
    pub divisors: Option<&'a DeviceBuffer>,
    /// Weight of the norm, f32 `[width]`.
    pub weight: &'a DeviceBuffer,
    /// A u32 for each row. If the squares of a row of `y` have no finite sum, its u32 becomes 1 + `layer`, unless it is set already: an
    /// earlier kernel has left f16.
    pub overflow: &'a DeviceBuffer,
    /// The layer that made `y`.
    pub layer: usize,
}

/// `x = (x + rms_norm(y) * weight) * scale` for f32 rows of `width`, then the norm of the new `x`, or its rows as they are, if `next` is
/// given. `scale` is one f32; `None` stands for 1.
pub fn post_norm(
    gpu: &Gpu,
    addend: NormedAddend<'_>,
    scale: Option<&DeviceBuffer>,
    eps: f32,
    rows: usize,
    width: usize,
    x: &DeviceBuffer,
    next: Option<NextRows<'_>>,
) -> Result<()> {
    let NormedAddend {
        y,
        divisors,
        weight,
        overflow,
        layer,
    } = addend;
    y.holds("rows", &[rows, width, 4])?;
    x.holds("rows", &[rows, width, 4])?;
    weight.holds("a norm", &[width, 4])?;
    overflow.holds("the layers that overflowed", &[rows, 4])?;
    if let Some(divisors) = divisors {
        divisors.holds("divisors", &[rows, 4])?;
    }
    if let Some(scale) = scale {
        scale.holds("the factor of a residual stream", &[4])?;
    }
    let arguments = PostNormArguments {
        y: y.address(),
        divisors: divisors.map_or(0, DeviceBuffer::address),
        weight: weight.address(),
        scale: scale.map_or(0, DeviceBuffer::address),
        x: x.address(),
        overflow: overflow.address(),
        layer: int("a layer", layer)?,
        next: NextArgument::new(next, rows, width, eps)?,
    };
    let launch = Launch::new([rows as u32, 1, 1], RESIDUAL_THREADS);
    // SAFETY: sizes were checked.
    unsafe { launch.of(PostNorm::Rows).run(gpu, &arguments) }
}

#[repr(C)]
struct ProjectionArguments {
    x: u64,
    weights: [u64; 2],
    widths: [i32; 2],
    stride: i32,
    eps: f32,
}

/// RMSNorms in place of each row of f32 `x` `[rows, stride]`: one over its queries, which begin the row, and one over its keys after them. Both
/// have their `widths`, and f32 `weights` of these.
pub fn norm_projections(
    gpu: &Gpu,
    x: &DeviceBuffer,
    weights: [&DeviceBuffer; 2],
    widths: [usize; 2],
    eps: f32,
    (rows, stride): (usize, usize),
) -> Result<()> {
    x.holds("projections", &[rows, stride, 4])?;
    for (weight, width) in weights.into_iter().zip(widths) {
        weight.holds("a norm", &[width, 4])?;
    }
    let [queries, keys] = widths;
    let are_multiples = [queries, keys, stride].iter().all(|n| n.is_multiple_of(4));
    if !are_multiples || queries + keys > stride {
        bail!(
            Internal,
            "norms of {queries} and {keys} elements of rows of {stride}; they take multiples of 4"
        );
    }
    let arguments = ProjectionArguments {
        x: x.address(),
        weights: weights.map(DeviceBuffer::address),
        widths: [int("queries", queries)?, int("keys", keys)?],
        stride: int("a row of projections", stride)?,
        eps,
    };
    let launch = Launch::new([rows as u32, 2, 1], RESIDUAL_THREADS);
    // SAFETY: sizes were checked.
    unsafe { launch.of(ProjectionNorms::Rows).run(gpu, &arguments) }
}

#[repr(C)]
struct GluArguments {
    gate_up: u64,
    y: u64,
    width: i32,
    scale: f32,
    activation: i32,
    layer: i32,
    overflow: u64,
}

/// `act(gate) * up / divisor`: f16 `[rows, 2 width]` to f16 `[rows, width]`. `overflow` is a u32 and a layer: if gate or up is not finite,
/// the u32 becomes 1 + that layer, unless it is set already.
pub fn glu(
    gpu: &Arc<Gpu>,
    glu: Glu,
    gate_up: &DeviceBuffer,
    rows: usize,
    width: usize,
    overflow: Option<(&DeviceBuffer, usize)>,
    y: &DeviceBuffer,
) -> Result<()> {
    if let Some((overflow, _)) = overflow {
        overflow.holds("the layer that overflowed", &[4])?;
    }
    gate_up.holds("gate and up", &[rows * width * 4])?;
    y.holds("activations", &[rows * width * 2])?;
    if !width.is_multiple_of(8) {
        bail!(
            Unsupported,
            "rows of {width}; gated activations take multiples of 8"
        );
    }
    let arguments = GluArguments {
        gate_up: gate_up.address(),
        y: y.address(),
        width: int("the intermediate size", width)?,
        scale: glu.factor(),
        activation: glu.activation as i32,
        layer: int("a layer", overflow.map_or(0, |(_, layer)| layer))?,
        overflow: overflow.map_or(0, |(overflow, _)| overflow.address()),
    };
    let launch = Launch::new([blocks(width / 8), rows as u32, 1], THREADS);
    // SAFETY: sizes were checked.
    unsafe { launch.of(GatedUnit::Rows).run(gpu, &arguments) }
}

#[repr(C)]
struct SquareArguments {
    x: u64,
    y: u64,
    width: i32,
    scale: f32,
    layer: i32,
    overflow: u64,
}

/// `max(x, 0)^2 / divisor`: f16 `[rows, width]` to f16 of the same shape. `overflow` is a u32 a row and a layer: if a value of a row of `x`
/// is not finite, its u32 becomes 1 + that layer, unless it is set already.
pub fn relu_squared(
    gpu: &Arc<Gpu>,
    divisor: u32,
    x: &DeviceBuffer,
    rows: usize,
    width: usize,
    (overflow, layer): (&DeviceBuffer, usize),
    y: &DeviceBuffer,
) -> Result<()> {
    overflow.holds("the layers that overflowed", &[rows, 4])?;
    x.holds("inputs of an activation", &[rows, width, 2])?;
    y.holds("activations", &[rows, width, 2])?;
    if !width.is_multiple_of(8) {
        bail!(
            Unsupported,
            "rows of {width}; activations without a gate take multiples of 8"
        );
    }
    let arguments = SquareArguments {
        x: x.address(),
        y: y.address(),
        width: int("the intermediate size", width)?,
        scale: 1.0 / divisor as f32,
        layer: int("a layer", layer)?,
        overflow: overflow.address(),
    };
    let launch = Launch::new([blocks(width / 8), rows as u32, 1], THREADS);
    // SAFETY: sizes were checked.
    unsafe { launch.of(Square::Rows).run(gpu, &arguments) }
}

#[repr(C)]
struct HeadGateArguments {
    y: u64,
    gate: u64,
    width: i32,
    fragment_major: i32,
}

/// `y *= sigmoid(gate)`: f16 `y` `[rows, width]` in `layout`, f32 `gate` `[rows, width]`.
pub fn gate_heads(
    gpu: &Arc<Gpu>,
    y: &DeviceBuffer,
    layout: Layout,
    gate: &DeviceBuffer,
    rows: usize,
    width: usize,
) -> Result<()> {
    y.holds(
        "the output of attention",
        &[layout.elements(rows, width), 2],
    )?;
    gate.holds("the gate of attention", &[rows, width, 4])?;
    let arguments = HeadGateArguments {
        y: y.address(),
        gate: gate.address(),
        width: int("the width of attention", width)?,
        fragment_major: i32::from(layout == Layout::FragmentMajor),
    };
    let launch = Launch::new([blocks(width), rows as u32, 1], THREADS);
    // SAFETY: sizes were checked.
    unsafe { launch.of(HeadGate::Rows).run(gpu, &arguments) }
}

#[repr(C)]
struct CapArguments {
    x: u64,
    count: u64,
    cap: f32,
}

/// `x = cap * tanh(x / cap)` for the first `count` f32.
pub fn soft_cap(gpu: &Gpu, x: &DeviceBuffer, count: usize, cap: f32) -> Result<()> {
    x.holds("numbers", &[count, 4])?;
    let arguments = CapArguments {
        x: x.address(),
        count: count as u64,
        cap,
    };
    let launch = Launch::new([blocks(count), 1, 1], THREADS);
    // SAFETY: sizes were checked.
    unsafe { launch.of(SoftCap::Values).run(gpu, &arguments) }
}
