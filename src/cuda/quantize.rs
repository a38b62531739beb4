//! NVFP4 on the device: quantize, dequantize, and reorder block scales. The result has the bits of `crate::format`, for inputs of any type
//! and strides.

use std::sync::Arc;

use super::checks::{CheckedCall, NoteArgument, Subject};
use super::driver::{DeviceBuffer, DeviceSlice, Gpu, Launch, Pinned, int, keep, take};
use super::kernel::kernels;
use super::tensor::{Contiguous, by_type, download, rows};
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::base::memory::{Buffer, Tag};
use crate::base::size::product;
use crate::format::nvfp4::{
    self, BLOCK, Levels, NonFinite, QuantizeOptions, Recipe, global_scale, largest,
};
use crate::format::{Rounding, swizzle as order};
use crate::tensor::{DType, Shape, Tensor};

kernels! {
    /// Quantizes, by recipe and type.
    enum Quantize(QuantizeArguments) {
        Quantize {
            F32 = "quantize_f32",
            F16 = "quantize_f16",
            Bf16 = "quantize_bf16",
            SingleF16 = "quantize_single_f16",
            SingleBf16 = "quantize_single_bf16",
        }
        QuantizeSearch {
            SearchF32 = "quantize_search_f32",
            SearchF16 = "quantize_search_f16",
            SearchBf16 = "quantize_search_bf16",
        }
    }

    /// The largest magnitude, by type.
    enum Amax(AmaxArguments) {
        Amax {
            F32 = "amax_f32",
            F16 = "amax_f16",
            Bf16 = "amax_bf16",
        }
    }

    /// Dequantizes, by the type of the result.
    enum Expand(ExpandArguments) {
        Expand {
            F32 = "dequantize_f32",
            F16 = "dequantize_f16",
            Bf16 = "dequantize_bf16",
        }
    }

    /// Reorders block scales.
    enum Reorder(SwizzleArguments) {
        Swizzle {
            Swizzle = "swizzle_scales",
            Unswizzle = "unswizzle_scales",
        }
    }
}

const THREADS: u32 = 256;

/// Blocks of all rows, as the kernels count them, and blocks of one row.
fn blocks(rows: usize, cols: usize) -> Result<(u32, u32)> {
    let of_row = cols / BLOCK;
    let all = product("blocks", &[rows, of_row])?;
    // The last thread's number must fit too, and a row's blocks must fit an int.
    int("K / 16", of_row)?;
    int("the number of rows", rows)?;
    match u32::try_from(all) {
        Ok(all) if all < u32::MAX - THREADS => Ok((all, of_row as u32)),
        _ => bail!(
            Unsupported,
            "{rows} rows of {cols} are {all} blocks of {BLOCK}; a GPU kernel takes less than 2^32"
        ),
    }
}

#[repr(C)]
struct AmaxArguments {
    input: u64,
    amax: u64,
    stride: u64,
    vectors: u64,
    row_vectors: u32,
    saturate: i32,
}

#[repr(C)]
struct QuantizeArguments {
    input: u64,
    codes: u64,
    scales: u64,
    amax: u64,
    report: u64,
    note: NoteArgument,
    stride: u64,
    seed: u64,
    blocks: u32,
    row_blocks: u32,
    global: f32,
    largest: f32,
    legacy: i32,
    saturate: i32,
    swizzled: i32,
    rounding: i32,
    recipe: i32,
}

/// Bytes in which the kernels report the largest magnitude to the host.
const REPORT_BYTES: usize = 4;

/// Quantizes `x` `[.., K]`, of float16, bfloat16 or float32 and any strides, into `codes` and `scales`. Returns the global scale: `global`
/// if given, or a computed one for two-level scaling. Waits for the device only to compute it. Values that are not finite, unless they
/// saturate, are then the error of [`nvfp4::quantize`]; otherwise a later call reports them, see [`Gpu::check_calls`].
pub fn quantize<'a>(
    gpu: &Arc<Gpu>,
    x: &Tensor,
    options: &QuantizeOptions,
    global: Option<f32>,
    swizzled: bool,
    codes: impl Into<DeviceSlice<'a>>,
    scales: impl Into<DeviceSlice<'a>>,
) -> Result<f32> {
    let (codes, scales) = (codes.into(), scales.into());
    options.check()?;
    let (height, cols) = x.shape().matrix();
    let computed = options.levels == Levels::Two && global.is_none();
    let global = global.unwrap_or(1.0);
    // Fails with the same message as on the CPU.
    nvfp4::quantize_rows(&[], cols, 0, global, options, &mut [], &mut [])?;
    let (blocks, row_blocks) = blocks(height, cols)?;
    let kernels = {
        use Quantize::*;
        if options.recipe != Recipe::Amax || options.rounding == Rounding::Stochastic {
            [SearchF32, SearchF16, SearchBf16]
        } else if options.levels != Levels::Two && options.rounding == Rounding::NearestEven {
            [F32, SingleF16, SingleBf16]
        } else {
            [F32, F16, Bf16]
        }
    };
    let kernel = by_type(x.dtype(), kernels)?;
    codes.holds("codes", &[height, cols / 2])?;
    let linear = height * row_blocks as usize;
    let scale_bytes = match swizzled {
        true => order::len(height, row_blocks as usize)?,
        false => linear,
    };
    scales.holds("scales", &[scale_bytes])?;
    let input = rows(gpu, x, 16)?;
    if scale_bytes > linear {
        scales.clear(scale_bytes)?;
    }

    let saturate = options.nonfinite == NonFinite::Saturate;
    let amax = match computed {
        true => Some(amax(
            gpu,
            (input.address, input.stride),
            (height, cols),
            x.dtype(),
            saturate,
        )?),
        false => None,
    };
    let mut report = None;
    if computed {
        let mut pinned = take(gpu, REPORT_BYTES)?;
        pinned.bytes_mut()[..REPORT_BYTES].fill(0);
        report = Some(pinned);
    }
    // A computed largest magnitude shows by itself whether a value is not finite.
    let call = match saturate || computed {
        true => None,
        false => Some(CheckedCall::begin(
            gpu,
            "quantize",
            Subject::Values { cols },
        )?),
    };
    let arguments = QuantizeArguments {
        input: input.address,
        codes: codes.address(),
        scales: scales.address(),
        amax: amax.as_ref().map_or(0, DeviceBuffer::address),
        report: report.as_ref().map_or(0, Pinned::address),
        note: call.as_ref().map(CheckedCall::note).unwrap_or_default(),
        stride: input.stride as u64,
        seed: options.seed,
        blocks,
        row_blocks,
        global,
        largest: largest(options),
        legacy: i32::from(options.levels == Levels::Legacy),
        saturate: i32::from(saturate),
        swizzled: i32::from(swizzled),
        rounding: match options.rounding {
            Rounding::NearestEven => 0,
            Rounding::HalfAway => 1,
            Rounding::Stochastic => 2,
        },
        recipe: match options.recipe {
            Recipe::Amax => 0,
            Recipe::FourOverSix => 1,
            Recipe::Sweep => 2,
        },
    };
    let launch = Launch::new([blocks.div_ceil(THREADS), 1, 1], THREADS);
    // SAFETY: sizes were checked; what it points to is freed in the order of the stream or with the
    // device, or, the report, after the wait below.
    unsafe { launch.of(kernel).run(gpu, &arguments)? };
    let Some(report) = report else {
        return Ok(global);
    };
    let waited = gpu.synchronize();
    let bits = report.read_i32(0).unwrap_or(0) as u32;
    if waited.is_ok() {
        keep(gpu, report);
    } else {
        // The device may still write it.
        std::mem::forget(report);
    }
    waited?;
    let amax = f32::from_bits(bits);
    if !amax.is_finite() {
        return Err(nonfinite_error(x));
    }
    Ok(global_scale(amax, options))
}

/// The CPU's error for the first value that is not finite, which it finds by reading the rows.
fn nonfinite_error(x: &Tensor) -> crate::base::Error {
    /// Values checked per copy.
    const AT_ONCE: usize = 1 << 20;
    let (height, cols) = x.shape().matrix();
    let look = || -> Result<()> {
        let step = (AT_ONCE / cols).max(1);
        for first in (0..height).step_by(step) {
            let values = read_rows(x, first, step.min(height - first))?;
            nvfp4::amax(&values, first * cols, NonFinite::Error)?;
        }
        Ok(())
    };
    match look() {
        Err(e) => e,
        Ok(()) => err!(
            InvalidArgument,
            "the input had a value that is not finite, and was changed while it was read"
        ),
    }
}

/// Rows of a tensor's matrix as f32.
fn read_rows(x: &Tensor, first: usize, count: usize) -> Result<Buffer<f32>> {
    let cols = x.shape().matrix().1;
    let mut bytes = Buffer::<u8>::zeroed(Tag::Scratch, count * cols * x.dtype().bytes())?;
    let mut values = Buffer::<f32>::zeroed(Tag::Scratch, count * cols)?;
    let stride = x.shape().strides().last().copied().unwrap_or(1);
    match x.shape().row_stride() {
        Some(step) => {
            let part = Shape::strided(&[count, cols], &[step, stride])?;
            download(&x.view(part, first * step)?, &mut bytes)?;
        }
        None => {
            let row = Shape::strided(&[cols], &[stride])?;
            let row_bytes = cols * x.dtype().bytes();
            for (i, out) in bytes.chunks_exact_mut(row_bytes).enumerate() {
                download(&x.view(row.clone(), x.shape().row_offset(first + i))?, out)?;
            }
        }
    }
    x.dtype().to_f32(&bytes, &mut values)?;
    Ok(values)
}

/// Enqueues the search for the largest magnitude of rows at an address, `stride` bytes apart. The result is the bits of an f32.
fn amax(
    gpu: &Arc<Gpu>,
    (address, stride): (u64, usize),
    (height, cols): (usize, usize),
    dtype: DType,
    saturate: bool,
) -> Result<DeviceBuffer> {
    let row_vectors = cols * dtype.bytes() / 16;
    let out = DeviceBuffer::zeroed(gpu, Tag::DeviceScratch, 4)?;
    let arguments = AmaxArguments {
        input: address,
        amax: out.address(),
        stride: stride as u64,
        vectors: (height * row_vectors) as u64,
        row_vectors: int("a row's vectors", row_vectors)? as u32,
        saturate: i32::from(saturate),
    };
    let needed = (height * row_vectors).div_ceil(THREADS as usize);
    let launch = Launch::new(
        [needed.min(8 * gpu.multiprocessors()) as u32, 1, 1],
        THREADS,
    );
    let kernel = by_type(dtype, [Amax::F32, Amax::F16, Amax::Bf16])?;
    // SAFETY: the rows are there, and freed in the order of the stream.
    unsafe { launch.of(kernel).run(gpu, &arguments)? };
    Ok(out)
}

/// Whether all of `values`, `[rows, cols]` of float16, bfloat16 or float32, are finite. Waits for the device. Values must be aligned to 16
/// bytes, and a row must be a multiple of 16 bytes.
pub fn is_finite(
    values: DeviceSlice<'_>,
    (rows, cols): (usize, usize),
    dtype: DType,
) -> Result<bool> {
    let row_bytes = product("a row", &[cols, dtype.bytes()])?;
    values.holds("values", &[rows, row_bytes])?;
    if !row_bytes.is_multiple_of(16) || !values.address().is_multiple_of(16) {
        bail!(
            Internal,
            "rows of {row_bytes} bytes, or their address, are not a multiple of 16"
        );
    }
    let at = (values.address(), row_bytes);
    let mut bits = [0u32];
    amax(values.gpu(), at, (rows, cols), dtype, false)?.read(0, &mut bits)?;
    Ok(f32::from_bits(bits[0]).is_finite())
}

#[repr(C)]
struct ExpandArguments {
    codes: u64,
    scales: u64,
    out: u64,
    codes_stride: u64,
    scales_stride: u64,
    blocks: u32,
    row_blocks: u32,
    global: f32,
    swizzled: i32,
}

/// Enqueues the dequantization of `codes` `[.., K / 2]` and `scales`, both of any strides, times `global`, as `dtype` (float16, bfloat16 or
/// float32) into `out` `[.., K]`.
pub fn dequantize(
    gpu: &Arc<Gpu>,
    codes: &Tensor,
    scales: &Tensor,
    swizzled: bool,
    global: f32,
    dtype: DType,
    out: &DeviceBuffer,
) -> Result<()> {
    let (height, packed) = codes.shape().matrix();
    let cols = product("K", &[packed, 2])?;
    let kernel = by_type(dtype, [Expand::F32, Expand::F16, Expand::Bf16])?;
    if cols == 0 || !cols.is_multiple_of(BLOCK) {
        bail!(
            InvalidArgument,
            "K = {cols} is not a positive multiple of {BLOCK}"
        );
    }
    let (blocks, row_blocks) = blocks(height, cols)?;
    let needed = match swizzled {
        true => order::len(height, row_blocks as usize)?,
        false => blocks as usize,
    };
    if scales.shape().elements() != needed
        || (!swizzled && scales.shape().matrix() != (height, row_blocks as usize))
        || [codes, scales].iter().any(|t| t.dtype().bytes() != 1)
    {
        bail!(
            InvalidArgument,
            "{codes:?} and {scales:?} do not belong together: {needed} scales of a byte go with codes of {height} rows of K = {cols}"
        );
    }
    out.holds("values", &[height, cols, dtype.bytes()])?;
    let code_rows = rows(gpu, codes, BLOCK / 2)?;
    // Swizzled scales are one run of bytes; their row stride is not used.
    let (scale_run, scale_rows);
    let (scales, scales_stride) = match swizzled {
        true => {
            scale_run = Contiguous::new(gpu, scales, 1)?;
            (scale_run.slice().address(), 0)
        }
        false => {
            scale_rows = rows(gpu, scales, 1)?;
            (scale_rows.address, scale_rows.stride)
        }
    };
    let arguments = ExpandArguments {
        codes: code_rows.address,
        scales,
        out: out.address(),
        codes_stride: code_rows.stride as u64,
        scales_stride: scales_stride as u64,
        blocks,
        row_blocks,
        global,
        swizzled: i32::from(swizzled),
    };
    let launch = Launch::new([blocks.div_ceil(THREADS), 1, 1], THREADS);
    // SAFETY: sizes were checked; copies are freed in the order of the stream.
    unsafe { launch.of(kernel).run(gpu, &arguments) }
}

#[repr(C)]
struct SwizzleArguments {
    from: u64,
    to: u64,
    from_stride: u64,
    words: u64,
    rows: u32,
    row_blocks: u32,
}

fn reorder(
    gpu: &Gpu,
    kernel: Reorder,
    (from, from_stride): (u64, usize),
    out: &DeviceBuffer,
    written_rows: usize,
    height: usize,
    row_blocks: usize,
) -> Result<()> {
    let words = product("scales", &[written_rows, row_blocks.div_ceil(4)])?;
    let arguments = SwizzleArguments {
        from,
        to: out.address(),
        from_stride: from_stride as u64,
        words: words as u64,
        rows: int("the number of rows", height)? as u32,
        row_blocks: int("K / 16", row_blocks)? as u32,
    };
    let grid = int("blocks", words.div_ceil(THREADS as usize))? as u32;
    // SAFETY: the callers checked the sizes.
    unsafe {
        Launch::new([grid, 1, 1], THREADS)
            .of(kernel)
            .run(gpu, &arguments)
    }
}

/// Enqueues the conversion of row-major `scales` `[.., K / 16]` to swizzled order in `out`, with its padding.
pub fn swizzle(gpu: &Arc<Gpu>, scales: &Tensor, out: &DeviceBuffer) -> Result<()> {
    let (height, row_blocks) = scales.shape().matrix();
    out.holds("swizzled scales", &[order::len(height, row_blocks)?])?;
    require_bytes(scales)?;
    let from = rows(gpu, scales, 1)?;
    let written = height.next_multiple_of(order::TILE_ROWS);
    reorder(
        gpu,
        Reorder::Swizzle,
        (from.address, from.stride),
        out,
        written,
        height,
        row_blocks,
    )
}

/// Enqueues the conversion of swizzled `scales` to row-major order `[height, row_blocks]` in `out`.
pub fn unswizzle(
    gpu: &Arc<Gpu>,
    scales: &Tensor,
    height: usize,
    row_blocks: usize,
    out: &DeviceBuffer,
) -> Result<()> {
    require_bytes(scales)?;
    let from = Contiguous::new(gpu, scales, 1)?;
    let wanted = order::len(height, row_blocks)?;
    if scales.shape().elements() != wanted {
        bail!(
            InvalidArgument,
            "swizzled scales of {height} rows by {row_blocks} blocks take {wanted} bytes, not {}",
            scales.shape().elements()
        );
    }
    out.holds("scales", &[height, row_blocks])?;
    reorder(
        gpu,
        Reorder::Unswizzle,
        (from.slice().address(), 0),
        out,
        height,
        height,
        row_blocks,
    )
}

fn require_bytes(scales: &Tensor) -> Result<()> {
    if scales.dtype().bytes() != 1 {
        bail!(
            InvalidArgument,
            "block scales are bytes (float8_e4m3fn or uint8), not {}",
            scales.dtype().name()
        );
    }
    Ok(())
}
