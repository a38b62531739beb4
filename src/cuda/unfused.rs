//! The unfused reference: one operation per kernel, from f32 to f32, with fewer bits only in the cache. Fused kernels are compared with it.
//! Everything is enqueued.

use super::driver::{DeviceSlice, Launch, int};
use super::heads::{CachedPages, KvShape, PAGE, Pages};
use super::kernel::kernels;
use super::linear::{Activation, GatedUnit, Gating};
use crate::base::Result;
use crate::base::error::bail;
use crate::base::size::product;
use crate::tensor::{AttentionShape, KvType};

kernels! {
    /// The norm.
    enum RmsNorm(NormArguments) {
        RmsNormF32 { Rows = "rms_norm_f32" }
    }

    /// Rotates heads.
    enum Rotate(RotateArguments) {
        Rotate { Heads = "rotate" }
    }

    /// Operations on each element.
    enum Pointwise(PointwiseArguments) {
        Pointwise {
            Glu = "pointwise_glu",
            ReluSquared = "pointwise_relu_squared",
            Add = "pointwise_add",
            Scale = "pointwise_scale",
            Fill = "pointwise_fill",
            Cap = "pointwise_cap",
        }
    }

    /// Attention.
    enum Attend(AttendArguments) {
        AttentionReference { F16 = "attention_reference", F8 = "attention_reference_f8" }
    }

    /// Stores keys and values.
    enum StoreKv(StoreArguments) {
        AttentionReference { F16 = "attention_store", F8 = "attention_store_f8" }
    }
}

const THREADS: u32 = 256;
/// Upper limit of CTAs that iterate over an array.
const MOST_BLOCKS: usize = 65_535;
/// Upper limit of elements of a head.
const MOST_ELEMENTS: usize = 512;

/// Elements of an array of f32.
fn elements(x: DeviceSlice<'_>) -> usize {
    x.bytes() / size_of::<f32>()
}

/// Fails unless an array has exactly these sizes.
fn expect(what: &str, x: DeviceSlice<'_>, sizes: &[usize]) -> Result<()> {
    let wanted = product(what, sizes)?;
    if elements(x) != wanted {
        bail!(
            Internal,
            "{what}: {} elements, and {wanted} are wanted",
            elements(x)
        );
    }
    Ok(())
}

#[repr(C)]
struct NormArguments {
    x: u64,
    weight: u64,
    y: u64,
    width: i32,
    eps: f32,
}

/// `out = x / sqrt(mean(x^2) + eps) * weight`, row by row; rows are as long as `weight`. `out` may be `x`.
pub fn rms_norm_f32(
    x: DeviceSlice<'_>,
    weight: DeviceSlice<'_>,
    eps: f32,
    out: DeviceSlice<'_>,
) -> Result<()> {
    let width = elements(weight);
    if width == 0 || !elements(x).is_multiple_of(width) {
        bail!(
            Internal,
            "a norm of {} elements, which are not whole rows of {width}",
            elements(x)
        );
    }
    expect("normalised rows", out, &[elements(x)])?;
    let arguments = NormArguments {
        x: x.address(),
        weight: weight.address(),
        y: out.address(),
        width: int("the width of a norm", width)?,
        eps,
    };
    let rows = int("rows", elements(x) / width)?;
    let launch = Launch::new([rows as u32, 1, 1], THREADS);
    // SAFETY: sizes were checked.
    unsafe { launch.of(RmsNorm::Rows).run(x.gpu(), &arguments) }
}

#[repr(C)]
struct RotateArguments {
    x: u64,
    cos: u64,
    sin: u64,
    heads: i32,
    dim: i32,
    half: i32,
}

/// Rotates `x` `[rows, heads, dim]` in place, row i by row i of `cos` and `sin`, `[rows, rotary_dim / 2]`. Within the first rotary_dim
/// elements of a head, element i pairs with element i + rotary_dim / 2; the others pass unchanged.
pub fn rotate(
    x: DeviceSlice<'_>,
    heads: usize,
    dim: usize,
    cos: DeviceSlice<'_>,
    sin: DeviceSlice<'_>,
) -> Result<()> {
    let row = heads * dim;
    if row == 0 || !elements(x).is_multiple_of(row) {
        bail!(
            Internal,
            "a rotation of {} elements, which are not whole rows of {heads} heads of {dim}",
            elements(x)
        );
    }
    let rows = elements(x) / row;
    let half = elements(cos).checked_div(rows).unwrap_or(0);
    if 2 * half > dim {
        bail!(
            Internal,
            "a rotation of {} elements of heads of {dim}",
            2 * half
        );
    }
    expect("cosines", cos, &[rows, half])?;
    expect("sines", sin, &[rows, half])?;
    let arguments = RotateArguments {
        x: x.address(),
        cos: cos.address(),
        sin: sin.address(),
        heads: int("heads", heads)?,
        dim: int("the size of a head", dim)?,
        half: int("pairs of a head", half)?,
    };
    let pairs = int("pairs of a row", heads * half)? as u32;
    let launch = Launch::new(
        [int("rows", rows)? as u32, pairs.div_ceil(THREADS), 1],
        THREADS,
    );
    // SAFETY: sizes were checked.
    unsafe { launch.of(Rotate::Heads).run(x.gpu(), &arguments) }
}

#[repr(C)]
struct PointwiseArguments {
    x: u64,
    y: u64,
    count: u64,
    period: u64,
    factor: f32,
    gating: Gating,
}

/// Placeholder in operations without a gated linear unit.
const NO_UNIT: GatedUnit = GatedUnit::Plain(Activation::Silu);

/// Runs a kernel over the elements of `x` and those of `y`, which repeats along `x`.
fn pointwise(
    kernel: Pointwise,
    x: DeviceSlice<'_>,
    y: Option<DeviceSlice<'_>>,
    factor: f32,
    unit: GatedUnit,
) -> Result<()> {
    let (count, period) = (elements(x), y.map_or(1, elements));
    if period == 0 || !count.is_multiple_of(period) {
        bail!(
            Internal,
            "{kernel:?}: {count} elements are not whole rows of {period}"
        );
    }
    let arguments = PointwiseArguments {
        x: x.address(),
        y: y.map_or(0, |y| y.address()),
        count: count as u64,
        period: period as u64,
        factor,
        gating: unit.argument(),
    };
    let blocks = count.div_ceil(THREADS as usize).min(MOST_BLOCKS);
    let launch = Launch::new([blocks as u32, 1, 1], THREADS);
    // SAFETY: sizes were checked.
    unsafe { launch.of(kernel).run(x.gpu(), &arguments) }
}

/// A gated linear unit in the place of `gate`, element by element.
pub fn glu_f32(unit: GatedUnit, gate: DeviceSlice<'_>, up: DeviceSlice<'_>) -> Result<()> {
    expect("up", up, &[elements(gate)])?;
    pointwise(Pointwise::Glu, gate, Some(up), 0.0, unit)
}

/// `x = max(x, 0)^2`, element by element.
pub fn relu_squared_f32(x: DeviceSlice<'_>) -> Result<()> {
    pointwise(Pointwise::ReluSquared, x, None, 0.0, NO_UNIT)
}

/// `x += y`, element by element; `y` may be a single row that is added to each row of `x` (a bias).
pub fn add(x: DeviceSlice<'_>, y: DeviceSlice<'_>) -> Result<()> {
    pointwise(Pointwise::Add, x, Some(y), 0.0, NO_UNIT)
}

/// `x *= factor`.
pub fn scale(x: DeviceSlice<'_>, factor: f32) -> Result<()> {
    pointwise(Pointwise::Scale, x, None, factor, NO_UNIT)
}

/// `x = value`.
pub fn fill(x: DeviceSlice<'_>, value: f32) -> Result<()> {
    pointwise(Pointwise::Fill, x, None, value, NO_UNIT)
}

/// `x = cap * tanh(x / cap)`.
pub fn cap_f32(x: DeviceSlice<'_>, cap: f32) -> Result<()> {
    pointwise(Pointwise::Cap, x, None, cap, NO_UNIT)
}

#[repr(C)]
struct AttendArguments {
    q: u64,
    sinks: u64,
    out: u64,
    pages: Pages,
    heads: i32,
    dim: i32,
    first_position: i32,
    window: i32,
    scale: f32,
    cap: f32,
}

/// Refuses heads without kernels, and positions without a block.
fn check_heads(cache: &CachedPages<'_>, positions: usize) -> Result<()> {
    let KvShape {
        heads: kv_heads,
        dim,
        kind,
    } = cache.shape;
    if kind == KvType::F32 {
        bail!(Internal, "keys and values as f32 on a GPU");
    }
    if kv_heads == 0 || dim == 0 || dim > MOST_ELEMENTS || !dim.is_multiple_of(16) {
        bail!(
            Unsupported,
            "attention of {kv_heads} key/value heads of {dim} on a GPU; head_dim must be a multiple of 16 up to {MOST_ELEMENTS}"
        );
    }
    if positions > cache.stride * PAGE {
        bail!(Internal, "{positions} positions in {} blocks", cache.stride);
    }
    Ok(())
}

/// Attention of f32 `q` `[rows, heads, dim]`, rows of one sequence from `first_position` on, over its cached keys and values: the softmax of
/// q and k times `scale` in f32, times v, to f32 `out` of the same shape. A row sees positions up to its own, whose blocks must exist and
/// hold them. `sinks` `[heads]` takes part in the softmax of each row and has no value.
pub fn attention_reference(
    shape: &AttentionShape,
    sinks: Option<DeviceSlice<'_>>,
    cache: &CachedPages<'_>,
    q: DeviceSlice<'_>,
    rows: usize,
    first_position: usize,
    out: DeviceSlice<'_>,
) -> Result<()> {
    let heads = shape.heads;
    let KvShape {
        heads: kv_heads,
        dim,
        kind,
    } = cache.shape;
    check_heads(cache, first_position + rows)?;
    if heads == 0 || !heads.is_multiple_of(kv_heads) || shape.window == Some(0) {
        bail!(
            Unsupported,
            "attention of {heads} query and {kv_heads} key/value heads in a window of {:?}; the query heads must be a multiple of the others, and a window at least 1",
            shape.window
        );
    }
    expect("queries", q, &[rows, heads, dim])?;
    expect("what attention makes", out, &[rows, heads, dim])?;
    if let Some(sinks) = sinks {
        expect("sinks", sinks, &[heads])?;
    }
    let arguments = AttendArguments {
        q: q.address(),
        sinks: sinks.map_or(0, |sinks| sinks.address()),
        out: out.address(),
        pages: cache.argument(1, 0..rows)?,
        heads: int("heads", heads)?,
        dim: dim as i32,
        first_position: int("the position", first_position)?,
        window: int("the window", shape.window.unwrap_or(0))?,
        scale: shape.scale,
        cap: shape.score_cap.unwrap_or(0.0),
    };
    let launch = Launch::new([int("rows", rows)? as u32, heads as u32, 1], THREADS);
    let kernel = match kind {
        KvType::F8 => Attend::F8,
        KvType::F16 | KvType::F32 => Attend::F16,
    };
    // SAFETY: sizes were checked; the caller vouches for blocks.
    unsafe { launch.of(kernel).run(q.gpu(), &arguments) }
}

#[repr(C)]
struct StoreArguments {
    k: u64,
    v: u64,
    pages: Pages,
    dim: i32,
    first_position: i32,
}

/// Rounds f32 keys and values `[rows, kv_heads, dim]` of one sequence to the type of the cache, ties to even, and stores them in the cache from
/// `first_position` on, where blocks must exist. Values outside f16's range set `unfit` of `cache`.
pub fn store_kv(
    cache: &CachedPages<'_>,
    k: DeviceSlice<'_>,
    v: DeviceSlice<'_>,
    rows: usize,
    first_position: usize,
) -> Result<()> {
    let KvShape {
        heads: kv_heads,
        dim,
        kind,
    } = cache.shape;
    check_heads(cache, first_position + rows)?;
    expect("keys", k, &[rows, kv_heads, dim])?;
    expect("values", v, &[rows, kv_heads, dim])?;
    let arguments = StoreArguments {
        k: k.address(),
        v: v.address(),
        pages: cache.argument(1, 0..rows)?,
        dim: dim as i32,
        first_position: int("the position", first_position)?,
    };
    let launch = Launch::new([int("rows", rows)? as u32, kv_heads as u32, 1], THREADS);
    let kernel = match kind {
        KvType::F8 => StoreKv::F8,
        KvType::F16 | KvType::F32 => StoreKv::F16,
    };
    // SAFETY: sizes were checked; the caller vouches for blocks.
    unsafe { launch.of(kernel).run(k.gpu(), &arguments) }
}
