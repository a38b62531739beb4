//! The number formats and the products on [`Tensor`]s of any element type and stride: what the C API's quant and linear
//! chapters call. Rows are converted a bounded number at a time, so a large tensor never has a dense copy.
//!
//! Shapes: values `[.., K]`; codes `[.., K / 2]` as bytes; linear scales `[.., K / 16]`; swizzled scales one run of bytes.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::backend::Backend;
use super::linear::{Activations, DenseType, Linear, linear as multiply, of_tensor};
use super::quantize::{dequantize_on, quantize_on, swizzle_on, unswizzle_on};
use super::{Device, Slice, SliceMut, Workspace, prepare, scaled_mm};
use crate::base::call;
use crate::base::error::{Result, bail};
use crate::base::memory::{self, Buffer, Tag};
use crate::base::size::product;
use crate::cuda::{self, DeviceBuffer, Gpu};
use crate::format::nvfp4::{self, BLOCK, Levels, QuantizeOptions};
use crate::format::{nf4, swizzle};
use crate::tensor::{DType, Shape, Tensor};

pub use crate::format::swizzle::ScaleLayout;

/// Values converted to f32 at a time.
const CHUNK: usize = 64 * 1024;

/// A tensor in NVFP4, its parts as tensors.
#[derive(Clone, Debug)]
pub struct Nvfp4Tensor {
    /// Packed codes `[.., K / 2]`, uint8.
    pub codes: Tensor,
    /// Block scales, `float8_e4m3fn`, or as uint8 from hosts that have no such type.
    pub scales: Tensor,
    /// What every value is multiplied by.
    pub global: f32,
    /// How `scales` are ordered.
    pub layout: ScaleLayout,
}

impl Nvfp4Tensor {
    /// Rows and K, after every check on types and sizes.
    pub fn dims(&self) -> Result<(usize, usize)> {
        if !matches!(self.codes.dtype(), DType::U8 | DType::F4E2M1x2) {
            bail!(
                InvalidArgument,
                "NVFP4 codes are packed in uint8 or float4_e2m1fn_x2, not {}",
                self.codes.dtype().name()
            );
        }
        if !matches!(self.scales.dtype(), DType::F8E4M3 | DType::U8) {
            bail!(
                InvalidArgument,
                "NVFP4 block scales are float8_e4m3fn, or uint8 holding its bytes, not {}",
                self.scales.dtype().name()
            );
        }
        let (rows, packed) = self.codes.shape().matrix();
        let cols = product("K", &[packed, 2])?;
        if self.codes.shape().rank() == 0 || cols == 0 || !cols.is_multiple_of(BLOCK) {
            bail!(
                InvalidArgument,
                "codes of shape {:?} hold K = {cols}; K must be a positive multiple of {BLOCK}",
                self.codes.shape().sizes()
            );
        }
        let blocks = cols / BLOCK;
        let (fits, wanted) = match self.layout {
            ScaleLayout::Linear => (
                self.scales.shape().matrix() == (rows, blocks),
                rows * blocks,
            ),
            ScaleLayout::Swizzled => {
                let wanted = swizzle::len(rows, blocks)?;
                (self.scales.shape().elements() == wanted, wanted)
            }
        };
        if !fits {
            bail!(
                InvalidArgument,
                "scales of shape {:?} do not belong to codes of shape {:?}: {rows} rows of {blocks} blocks take {wanted} {} scales",
                self.scales.shape().sizes(),
                self.codes.shape().sizes(),
                match self.layout {
                    ScaleLayout::Linear => "row-major",
                    ScaleLayout::Swizzled => "swizzled",
                }
            );
        }
        nvfp4::check_global_scale(self.global)?;
        Ok((rows, cols))
    }

    /// The CUDA device whose memory both parts are in; nothing if they are in host memory.
    fn cuda(&self) -> Result<Option<usize>> {
        one_place(&[("codes", &self.codes), ("scales", &self.scales)])
    }

    /// A copy on a GPU, of host memory.
    fn upload(&self, gpu: &Arc<Gpu>) -> Result<scaled_mm::Operand<'static>> {
        scaled_mm::Operand::upload(
            gpu,
            &in_order(&self.codes)?,
            &in_order(&self.scales)?,
            self.layout,
            self.dims()?,
            self.global,
        )
    }

    /// A reader of row ranges: codes, and scales in row-major order.
    // A closure's type can only be spelled where it is returned.
    #[allow(clippy::type_complexity)]
    fn reader(&self) -> Result<impl Fn(Range<usize>, &mut [u8], &mut [u8]) -> Result<()> + Sync> {
        let (_, cols) = self.dims()?;
        let blocks = cols / BLOCK;
        let mut swizzled = Vec::new();
        if self.layout == ScaleLayout::Swizzled {
            swizzled = memory::zeros(self.scales.bytes())?;
            self.scales.copy_to(&mut swizzled)?;
        }
        Ok(
            move |rows: Range<usize>, codes: &mut [u8], scales: &mut [u8]| {
                self.codes.copy_rows(rows.clone(), codes)?;
                match self.layout {
                    ScaleLayout::Linear => self.scales.copy_rows(rows, scales),
                    ScaleLayout::Swizzled => {
                        for (row, scales) in rows.zip(scales.chunks_exact_mut(blocks)) {
                            for (block, scale) in scales.iter_mut().enumerate() {
                                *scale = swizzled[swizzle::offset(row, block, blocks)];
                            }
                        }
                        Ok(())
                    }
                }
            },
        )
    }
}

/// The bytes of a tensor in row-major order.
fn in_order(x: &Tensor) -> Result<Cow<'_, [u8]>> {
    Ok(match x.as_bytes() {
        Some(bytes) => Cow::Borrowed(bytes),
        None => {
            let mut bytes = memory::zeros(x.bytes())?;
            x.copy_to(&mut bytes)?;
            Cow::Owned(bytes)
        }
    })
}

/// Calls `each` for ranges of rows of about [`CHUNK`] values, spread over the device's threads, and gives the results in
/// order; of several errors, the first in that order. The end of the thread's [`call`] is one.
fn by_chunks<T: Send>(
    device: &Device,
    rows: usize,
    cols: usize,
    each: impl Fn(usize, Range<usize>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let step = chunk_rows(cols);
    let parts = rows.div_ceil(step);
    let results: Vec<Mutex<Option<Result<T>>>> = (0..parts).map(|_| Mutex::new(None)).collect();
    let pool = device.host()?.pool();
    call::with(|call| {
        pool.run(parts, |part| {
            let start = part * step;
            let result = call
                .check()
                .and_then(|()| each(part, start..(start + step).min(rows)));
            if let Ok(mut slot) = results[part].lock() {
                *slot = Some(result);
            }
        });
    });
    results
        .into_iter()
        .filter_map(|slot| slot.into_inner().ok().flatten())
        .collect()
}

fn chunk_rows(cols: usize) -> usize {
    (CHUNK / cols.max(1)).max(1)
}

/// The parts of an output that [`by_chunks`] fills, each behind a lock that only its own part takes.
fn split<T>(out: &mut [T], row: usize, cols: usize) -> Vec<Mutex<&mut [T]>> {
    out.chunks_mut((row * chunk_rows(cols)).max(1))
        .map(Mutex::new)
        .collect()
}

fn part<'a, 'b, T>(
    parts: &'a [Mutex<&'b mut [T]>],
    i: usize,
) -> std::sync::MutexGuard<'a, &'b mut [T]> {
    parts[i]
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn float_input(x: &Tensor, what: &str) -> Result<(usize, usize)> {
    if !x.dtype().is_float() {
        bail!(
            InvalidArgument,
            "{what} is {}; it must be float16, bfloat16, float32 or float64",
            x.dtype().name()
        );
    }
    if x.shape().rank() == 0 {
        bail!(
            InvalidArgument,
            "{what} is a scalar; it needs a dimension K"
        );
    }
    Ok(x.shape().matrix())
}

/// Refuses tensors of which not all are in host memory, or all in the memory of one CUDA device. Gives that device.
pub fn one_place(tensors: &[(&str, &Tensor)]) -> Result<Option<usize>> {
    let mut all = tensors.iter().map(|(name, t)| (name, t.place()));
    let Some((first, place)) = all.next() else {
        return Ok(None);
    };
    for (name, other) in all {
        if other.cuda() != place.cuda() {
            bail!(
                InvalidArgument,
                "{first} in {place} and {name} in {other} must be in one place; copy one of them"
            );
        }
    }
    Ok(place.cuda())
}

/// The device that computes with a tensor in the place where it is: `processor` gives the one for host memory.
pub fn device_of(tensor: &Tensor, processor: impl FnOnce() -> Result<Device>) -> Result<Device> {
    match tensor.place().cuda() {
        None => processor(),
        Some(ordinal) => Device::cuda(ordinal),
    }
}

/// The sizes of the codes and of the scales of `x` `[.., K]`: codes take its leading dimensions, as do linear scales.
pub fn quantized_sizes(x: &Tensor, layout: ScaleLayout) -> Result<[Vec<usize>; 2]> {
    let (rows, cols) = float_input(x, "the input")?;
    if cols == 0 || !cols.is_multiple_of(BLOCK) {
        bail!(
            InvalidArgument,
            "the input of shape {:?} has K = {cols}, which is not a positive multiple of {BLOCK}",
            x.shape().sizes()
        );
    }
    let blocks = cols / BLOCK;
    let scales = match layout {
        ScaleLayout::Linear => x.shape().with_last(blocks),
        ScaleLayout::Swizzled => vec![swizzle::len(rows, blocks)?],
    };
    Ok([x.shape().with_last(cols / 2), scales])
}

/// A tensor of `device` that a result of all its elements will be written to.
fn new_result(device: &Device, sizes: &[usize], dtype: DType) -> Result<Tensor> {
    match device {
        Device::Cpu(_) => Tensor::zeros(sizes, dtype),
        Device::Cuda(gpu) => {
            let bytes = Shape::contiguous(sizes)?.elements() * dtype.bytes();
            let buffer = DeviceBuffer::uninit(gpu, Tag::DeviceTensor, bytes)?;
            cuda::tensor(buffer, sizes, dtype)
        }
    }
}

/// Refuses a tensor that a result of these sizes and this type cannot be written to.
fn check_result(name: &str, result: &Tensor, sizes: &[usize], dtype: DType) -> Result<()> {
    if result.shape().sizes() != sizes || result.dtype() != dtype || !result.shape().is_contiguous()
    {
        bail!(
            InvalidArgument,
            "{name} go to a contiguous {} tensor of shape {sizes:?}, not to a {} tensor of shape {:?} and strides {:?}",
            dtype.name(),
            result.dtype().name(),
            result.shape().sizes(),
            result.shape().strides()
        );
    }
    Ok(())
}

/// The memory of a result on the host.
fn host_result<'a>(name: &str, result: &'a mut Tensor) -> Result<&'a mut [u8]> {
    result.require_host()?;
    match result.bytes_mut() {
        Some(bytes) => Ok(bytes),
        None => bail!(
            InvalidArgument,
            "{name} go to memory that may be written and that no other tensor shares"
        ),
    }
}

/// Quantizes `x` `[.., K]` along K, where it is: in host memory with the processor, or in a GPU's memory there. For the sizes
/// see [`quantized_sizes`].
pub fn quantize(
    device: &Device,
    x: &Tensor,
    options: &QuantizeOptions,
    layout: ScaleLayout,
) -> Result<Nvfp4Tensor> {
    let [codes, scales] = quantized_sizes(x, layout)?;
    let mut codes = new_result(device, &codes, DType::U8)?;
    let mut scales = new_result(device, &scales, DType::F8E4M3)?;
    let global = quantize_into(device, x, options, layout, &mut codes, &mut scales)?;
    Ok(Nvfp4Tensor {
        codes,
        scales,
        global,
        layout,
    })
}

/// The same into tensors of the caller's, uint8 and float8_e4m3fn, which are where `x` is; gives the global scale. After an
/// error they hold anything.
pub fn quantize_into(
    device: &Device,
    x: &Tensor,
    options: &QuantizeOptions,
    layout: ScaleLayout,
    codes: &mut Tensor,
    scales: &mut Tensor,
) -> Result<f32> {
    options.check()?;
    let sizes = quantized_sizes(x, layout)?;
    check_result("codes", codes, &sizes[0], DType::U8)?;
    check_result("scales", scales, &sizes[1], DType::F8E4M3)?;
    if let Device::Cuda(gpu) = device {
        return quantize_on(gpu, x, options, layout, codes, scales);
    }
    x.require_host()?;
    let (rows, cols) = x.shape().matrix();
    let read = |range: Range<usize>| -> Result<Vec<f32>> {
        let mut values = memory::zeros(range.len() * cols)?;
        x.rows_f32(range, &mut values)?;
        Ok(values)
    };
    let global = match options.levels {
        Levels::Two => {
            let amax = by_chunks(device, rows, cols, |_, range| {
                let first = range.start * cols;
                nvfp4::amax(&read(range)?, first, options.nonfinite)
            })?;
            nvfp4::global_scale(amax.into_iter().fold(0.0, f32::max), options)
        }
        Levels::Single | Levels::Legacy => 1.0,
    };
    let blocks = cols / BLOCK;
    let codes = host_result("codes", codes)?;
    let scales = host_result("scales", scales)?;
    let done = AtomicU64::new(0);
    call::expect((rows * cols) as u64);
    let mut run = |linear: &mut [u8]| {
        let codes = split(codes, cols / 2, cols);
        let scales = split(linear, blocks, cols);
        by_chunks(device, rows, cols, |i, range| {
            let first = range.start;
            let values = read(range)?;
            let (mut codes, mut scales) = (part(&codes, i), part(&scales, i));
            nvfp4::quantize_rows(
                &values,
                cols,
                first,
                global,
                options,
                &mut codes,
                &mut scales,
            )?;
            let len = values.len() as u64;
            call::begun(done.fetch_add(len, Ordering::Relaxed) + len);
            Ok(())
        })
    };
    match layout {
        ScaleLayout::Linear => {
            run(scales)?;
        }
        ScaleLayout::Swizzled => {
            let mut linear =
                Buffer::<u8>::zeroed(Tag::Scratch, product("scales", &[rows, blocks])?)?;
            run(&mut linear)?;
            scales.copy_from_slice(&swizzle::swizzle(&linear, rows, blocks)?);
        }
    }
    call::add((rows * cols) as u64);
    call::check()?;
    Ok(global)
}

fn from_bytes(scales: &[u8]) -> Result<Tensor> {
    Tensor::build(&[scales.len()], DType::F8E4M3, |bytes| {
        bytes.copy_from_slice(scales);
        Ok(())
    })
}

/// Builds a tensor of a floating `dtype` whose rows `fill` gives as f32.
fn fill_rows(
    device: &Device,
    sizes: &[usize],
    dtype: DType,
    fill: impl Fn(Range<usize>, &mut [f32]) -> Result<()> + Sync,
) -> Result<Tensor> {
    let (rows, cols) = Shape::contiguous(sizes)?.matrix();
    Tensor::build(sizes, dtype, |bytes| {
        let parts = split(bytes, cols * dtype.bytes(), cols);
        by_chunks(device, rows, cols, |i, range| {
            let mut values = memory::zeros(range.len() * cols)?;
            fill(range, &mut values)?;
            dtype.from_f32(&values, &mut part(&parts, i))
        })?;
        Ok(())
    })
}

/// Reads and decodes the rows of a range.
fn decode_rows(
    read: &impl Fn(Range<usize>, &mut [u8], &mut [u8]) -> Result<()>,
    global: f32,
    rows: Range<usize>,
    values: &mut [f32],
) -> Result<()> {
    let mut codes = memory::zeros(values.len() / 2)?;
    let mut scales = memory::zeros(values.len() / BLOCK)?;
    let first_row = rows.start;
    let blocks = scales.len() / rows.len().max(1);
    read(rows, &mut codes, &mut scales)?;
    nvfp4::check_block_scales(&scales, first_row, blocks)?;
    nvfp4::dequantize(&codes, &scales, global, values)
}

/// The values of `a` in host memory.
fn values_of(device: &Device, a: &Nvfp4Tensor) -> Result<Buffer<f32>> {
    let (rows, cols) = a.dims()?;
    let read = a.reader()?;
    let mut values = Buffer::zeroed(Tag::Scratch, product("values", &[rows, cols])?)?;
    let parts = split(&mut values, cols, cols);
    by_chunks(device, rows, cols, |i, range| {
        decode_rows(&read, a.global, range, &mut part(&parts, i))
    })?;
    drop(parts);
    Ok(values)
}

/// The values of `a`, `[.., K]`, in a floating `dtype`, where it is: see [`quantize`]. On a GPU waits until the scales have been
/// looked at, and not for the values.
pub fn dequantize(device: &Device, a: &Nvfp4Tensor, dtype: DType) -> Result<Tensor> {
    dequantize_if(device, a, dtype, true)
}

/// The same of what [`quantize`] has made, whose scales are scales: on a GPU it waits for nothing.
pub(super) fn dequantize_own(device: &Device, a: &Nvfp4Tensor, dtype: DType) -> Result<Tensor> {
    dequantize_if(device, a, dtype, false)
}

fn dequantize_if(device: &Device, a: &Nvfp4Tensor, dtype: DType, check: bool) -> Result<Tensor> {
    if let Device::Cuda(gpu) = device {
        return dequantize_on(gpu, a, dtype, check);
    }
    let (_, cols) = a.dims()?;
    let read = a.reader()?;
    fill_rows(
        device,
        &a.codes.shape().with_last(cols),
        dtype,
        |range, values| decode_rows(&read, a.global, range, values),
    )
}

/// Quantizes `x`, flattened, to NF4 blocks of `block` values: codes `[ceil(n / 2)]` as uint8 and `absmax` as float32.
pub fn quantize_nf4(x: &Tensor, block: usize) -> Result<(Tensor, Tensor)> {
    float_input(x, "the input")?;
    let packed = nf4::quantize(&x.to_f32()?, block)?;
    let codes = Tensor::build(&[packed.codes.len()], DType::U8, |bytes| {
        bytes.copy_from_slice(&packed.codes);
        Ok(())
    })?;
    let absmax = Tensor::from_f32(&packed.absmax, &[packed.absmax.len()], DType::F32)?;
    Ok((codes, absmax))
}

/// A tensor in NF4, flattened, its parts as tensors.
#[derive(Clone, Debug)]
pub struct Nf4Tensor {
    /// Packed codes, two to a byte, the first in the high nibble; uint8 of any shape.
    pub codes: Tensor,
    /// The largest magnitude of each block, of a floating type and any shape.
    pub absmax: Tensor,
    /// The 16 values of the codes, if not the usual ones.
    pub map: Option<Tensor>,
    /// Values in a block.
    pub block: usize,
}

/// The parts of an [`Nf4Tensor`] as plain numbers.
struct Nf4Parts<'a> {
    codes: Cow<'a, [u8]>,
    absmax: Buffer<f32>,
    map: [f32; 16],
    block: usize,
}

impl Nf4Tensor {
    /// Reads the parts, which must be those of `values` values.
    fn read(&self, values: usize) -> Result<Nf4Parts<'_>> {
        if self.codes.dtype() != DType::U8 || !self.absmax.dtype().is_float() {
            bail!(
                InvalidArgument,
                "NF4 takes codes as uint8 and absmax of a floating type, not {} and {}",
                self.codes.dtype().name(),
                self.absmax.dtype().name()
            );
        }
        let map = match &self.map {
            None => nf4::VALUES,
            Some(map) if map.dtype().is_float() && map.shape().elements() == 16 => {
                let mut values = [0.0; 16];
                values.copy_from_slice(&map.to_f32()?);
                values
            }
            Some(map) => bail!(
                InvalidArgument,
                "the quant map is {} of shape {:?}; NF4 has 16 values of a floating type",
                map.dtype().name(),
                map.shape().sizes()
            ),
        };
        let codes = in_order(&self.codes)?;
        let absmax = self.absmax.to_f32()?;
        nf4::check(values, &codes, &absmax, self.block)?;
        Ok(Nf4Parts {
            codes,
            absmax,
            map,
            block: self.block,
        })
    }
}

impl Nf4Parts<'_> {
    /// The values from index `first` on.
    fn expand(&self, first: usize, out: &mut [f32]) -> Result<()> {
        nf4::dequantize_from(first, &self.codes, &self.absmax, &self.map, self.block, out)
    }
}

/// Expands NF4 to a tensor of shape `sizes` and a floating `dtype`.
pub fn dequantize_nf4(x: &Nf4Tensor, sizes: &[usize], dtype: DType) -> Result<Tensor> {
    let mut out = Buffer::zeroed(Tag::Scratch, Shape::contiguous(sizes)?.elements())?;
    x.read(out.len())?.expand(0, &mut out)?;
    Tensor::from_f32(&out, sizes, dtype)
}

fn scale_bytes(scales: &Tensor) -> Result<Vec<u8>> {
    if scales.dtype().bytes() != 1 {
        bail!(
            InvalidArgument,
            "block scales are bytes (float8_e4m3fn or uint8), not {}",
            scales.dtype().name()
        );
    }
    let mut bytes = memory::zeros(scales.bytes())?;
    scales.copy_to(&mut bytes)?;
    Ok(bytes)
}

/// Row-major scales `[rows, K / 16]` in swizzled order, where they are.
pub fn swizzle_scales(scales: &Tensor) -> Result<Tensor> {
    if let Some(ordinal) = scales.place().cuda() {
        return swizzle_on(&Gpu::open(ordinal)?, scales);
    }
    let (rows, blocks) = scales.shape().matrix();
    from_bytes(&swizzle::swizzle(&scale_bytes(scales)?, rows, blocks)?)
}

/// Swizzled scales in row-major order, `[rows, blocks]`, where they are.
pub fn unswizzle_scales(scales: &Tensor, rows: usize, blocks: usize) -> Result<Tensor> {
    if let Some(ordinal) = scales.place().cuda() {
        return unswizzle_on(&Gpu::open(ordinal)?, scales, rows, blocks);
    }
    let linear = swizzle::unswizzle(&scale_bytes(scales)?, rows, blocks)?;
    Tensor::build(&[rows, blocks], DType::F8E4M3, |bytes| {
        bytes.copy_from_slice(&linear);
        Ok(())
    })
}

/// Prepares the NVFP4 weight `w` `[N, K]` for products on `device`: from host memory, or on a GPU from its own memory too.
pub fn weight(device: &Device, w: &Nvfp4Tensor) -> Result<Linear> {
    let (rows, cols) = w.dims()?;
    if let (Device::Cuda(gpu), Some(_)) = (device, w.cuda()?) {
        return prepare::nvfp4(gpu, w);
    }
    let read = w.reader()?;
    Linear::nvfp4(device, rows, cols, w.global, &mut |range, codes, scales| {
        read(range, codes, scales)
    })
}

/// Prepares the NVFP4 weight `w` `[N, K]` for `backend`; where that decodes, the values are held as `dense`.
pub fn weight_for(
    device: &Device,
    w: &Nvfp4Tensor,
    backend: Backend,
    dense: DenseType,
) -> Result<Linear> {
    match backend {
        Backend::Nvfp4Kernel => weight(device, w),
        Backend::DequantMatmul => {
            let (rows, cols) = w.dims()?;
            if let (Device::Cuda(gpu), Some(_)) = (device, w.cuda()?) {
                return prepare::decoded(gpu, w, dense);
            }
            let read = w.reader()?;
            Linear::dense(device, rows, cols, dense, &mut |range, values| {
                decode_rows(&read, w.global, range, values)
            })
        }
        Backend::Nf4Kernel => bail!(InvalidArgument, "{} is not for NVFP4", backend.name()),
    }
}

/// Prepares the NF4 weight `w` `[rows, cols]` for `backend`; where that decodes, the values are held as `dense`.
pub fn nf4_weight_for(
    device: &Device,
    w: &Nf4Tensor,
    (rows, cols): (usize, usize),
    backend: Backend,
    dense: DenseType,
) -> Result<Linear> {
    match backend {
        Backend::DequantMatmul => {
            let parts = w.read(product("weight", &[rows, cols])?)?;
            Linear::dense(device, rows, cols, dense, &mut |range, values| {
                parts.expand(range.start * cols, values)
            })
        }
        Backend::Nf4Kernel | Backend::Nvfp4Kernel => bail!(
            Unsupported,
            "{} cannot multiply with NF4 on {}",
            backend.name(),
            device.name()
        ),
    }
}

/// Prepares the dense weight `w` `[N, K]`, held in its own type (float64 as float32), from where [`weight`] takes its own.
pub fn dense_weight(device: &Device, w: &Tensor) -> Result<Linear> {
    let (rows, cols) = float_input(w, "the weight")?;
    let dtype = match w.dtype() {
        DType::F16 => DenseType::F16,
        DType::BF16 => DenseType::BF16,
        _ => DenseType::F32,
    };
    if let (Device::Cuda(gpu), Some(_)) = (device, w.place().cuda()) {
        return prepare::dense(gpu, w, dtype);
    }
    Linear::dense(device, rows, cols, dtype, &mut |range, values| {
        w.rows_f32(range, values)
    })
}

/// `x` `[.., K]` times `weight` `[N, K]` transposed: `[.., N]` in a floating `dtype`. An input in host memory gives a result there;
/// one in the memory of the weight's GPU is multiplied without leaving it, and its result stays there.
pub fn linear(
    device: &Device,
    x: &Tensor,
    weight: &Linear,
    activations: Activations,
    dtype: DType,
    workspace: &mut Workspace,
) -> Result<Tensor> {
    let (rows, cols) = float_input(x, "the input")?;
    if cols != weight.cols() {
        bail!(
            InvalidArgument,
            "the input of shape {:?} has K = {cols} and the weight [{}, {}] has K = {}; they must be equal",
            x.shape().sizes(),
            weight.rows(),
            weight.cols(),
            weight.cols()
        );
    }
    if let Some(ordinal) = x.place().cuda() {
        return match device {
            Device::Cuda(gpu) if gpu.ordinal() == ordinal => {
                of_tensor(gpu, x, weight, activations, dtype)
            }
            Device::Cuda(_) | Device::Cpu(_) => bail!(
                InvalidArgument,
                "the input is in {} and the weight is for {}; copy the input to the host or to that device, or prepare the weight for the input's",
                x.place(),
                device.name()
            ),
        };
    }
    let values = x.to_f32()?;
    let mut out = Buffer::zeroed(Tag::Scratch, product("output", &[rows, weight.rows()])?)?;
    multiply(
        device,
        Slice::Host(&values),
        rows,
        &mut [(weight, SliceMut::Host(&mut out))],
        activations,
        workspace,
    )?;
    Tensor::from_f32(&out, &x.shape().with_last(weight.rows()), dtype)
}

/// The sizes of the W4A4 product of `a` and `b`, after every check on both.
pub fn product_sizes(a: &Nvfp4Tensor, b: &Nvfp4Tensor) -> Result<[usize; 2]> {
    let ((m, k), (n, k_b)) = (a.dims()?, b.dims()?);
    if k != k_b {
        bail!(
            InvalidArgument,
            "scaled_mm of [{m}, {k}] and [{n}, {k_b}]: K must be equal"
        );
    }
    one_place(&[
        ("the codes of a", &a.codes),
        ("the scales of a", &a.scales),
        ("the codes of b", &b.codes),
        ("the scales of b", &b.scales),
    ])?;
    Ok([m, n])
}

/// The W4A4 product: `a` `[M, K]` times `b` `[N, K]` transposed, both NVFP4, as `[M, N]` in a floating `dtype`. Exact on the
/// decoded values but for the order of summation in f32, and for the rounding to `dtype`. The result is where both operands are.
pub fn scaled_mm(
    device: &Device,
    a: &Nvfp4Tensor,
    b: &Nvfp4Tensor,
    dtype: DType,
    workspace: &mut Workspace,
) -> Result<Tensor> {
    let sizes = product_sizes(a, b)?;
    let mut out = match a.cuda()? {
        Some(_) => new_result(device, &sizes, dtype)?,
        None => Tensor::zeros(&sizes, dtype)?,
    };
    scaled_mm_into(device, a, b, &mut out, workspace)?;
    Ok(out)
}

/// The same into a tensor of the caller's, of a floating type, which is where the operands are. After an error it holds
/// anything.
pub fn scaled_mm_into(
    device: &Device,
    a: &Nvfp4Tensor,
    b: &Nvfp4Tensor,
    out: &mut Tensor,
    workspace: &mut Workspace,
) -> Result<()> {
    let [m, n] = product_sizes(a, b)?;
    let dtype = out.dtype();
    check_result("products", out, &[m, n], dtype)?;
    if !dtype.is_float() {
        bail!(
            InvalidArgument,
            "products come as float16, float32, float64 or bfloat16, not {}",
            dtype.name()
        );
    }
    one_place(&[("the codes of a", &a.codes), ("the result", out)])?;
    if m == 0 || n == 0 {
        return Ok(());
    }
    if let Device::Cuda(gpu) = device {
        if a.cuda()?.is_some() {
            return scaled_mm::in_place(gpu, a, b, out);
        }
        let (a, b) = (a.upload(gpu)?, b.upload(gpu)?);
        // What a GPU has no type for is converted here.
        let made = match dtype {
            DType::F16 | DType::BF16 => dtype,
            _ => DType::F32,
        };
        let product = scaled_mm::on_gpu(gpu, &a, &b, made)?;
        let out = host_result("products", out)?;
        if made == dtype {
            return product.read(0, out);
        }
        let mut values = Buffer::<f32>::zeroed(Tag::Scratch, m * n)?;
        product.read(0, &mut values)?;
        return dtype.from_f32(&values, out);
    }
    let weight = weight(device, b)?;
    let values = values_of(device, a)?;
    let out = host_result("products", out)?;
    let mut products = Buffer::<f32>::zeroed(Tag::Scratch, m * n)?;
    multiply(
        device,
        Slice::Host(&values),
        m,
        &mut [(&weight, SliceMut::Host(&mut products))],
        Activations::Exact,
        workspace,
    )?;
    dtype.from_f32(&products, out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;
    use crate::format::random;

    fn device() -> Device {
        Device::cpu(Some(2)).unwrap()
    }

    fn random(sizes: &[usize], seed: u64, dtype: DType) -> Tensor {
        let n = sizes.iter().product::<usize>();
        let values: Vec<f32> = (0..n as u64)
            .map(|i| random::uniform(seed, i) - 0.5)
            .collect();
        Tensor::from_f32(&values, sizes, dtype).unwrap()
    }

    fn bytes(t: &Tensor) -> Vec<u8> {
        let mut out = vec![0; t.bytes()];
        t.copy_to(&mut out).unwrap();
        out
    }

    #[test]
    fn chunks_and_strides_give_the_bytes_of_the_whole() {
        let (rows, cols) = (70, 2048);
        let x = random(&[rows, cols], 1, DType::F32);
        let whole = nvfp4::quantize(
            &x.to_f32().unwrap(),
            rows,
            cols,
            &QuantizeOptions::default(),
        )
        .unwrap();
        let q = quantize(
            &device(),
            &x,
            &QuantizeOptions::default(),
            ScaleLayout::Linear,
        )
        .unwrap();
        assert_eq!(bytes(&q.codes), whole.codes);
        assert_eq!(bytes(&q.scales), whole.scales);
        assert_eq!(q.global, whole.global);
        let dense = dequantize(&device(), &q, DType::F32).unwrap();
        assert_eq!(&dense.to_f32().unwrap()[..], whole.dequantize().unwrap());

        let wide = random(&[rows, cols + 16], 2, DType::BF16);
        let view = wide
            .view(Shape::strided(&[rows, cols], &[cols + 16, 1]).unwrap(), 16)
            .unwrap();
        let values = view.to_f32().unwrap();
        let whole = nvfp4::quantize(&values, rows, cols, &QuantizeOptions::default()).unwrap();
        let q = quantize(
            &device(),
            &view,
            &QuantizeOptions::default(),
            ScaleLayout::Swizzled,
        )
        .unwrap();
        assert_eq!(bytes(&q.codes), whole.codes);
        let linear = unswizzle_scales(&q.scales, rows, cols / 16).unwrap();
        assert_eq!(bytes(&linear), whole.scales);
        assert_eq!(bytes(&swizzle_scales(&linear).unwrap()), bytes(&q.scales));
    }

    #[test]
    fn an_error_names_the_first_index_of_the_tensor() {
        let mut values = vec![1.0f32; 128 * 2048];
        values[100 * 2048 + 3] = f32::NAN;
        values[120 * 2048] = f32::INFINITY;
        let x = Tensor::from_f32(&values, &[128, 2048], DType::F32).unwrap();
        for levels in [Levels::Two, Levels::Single] {
            let options = QuantizeOptions {
                levels,
                ..Default::default()
            };
            let e = quantize(&device(), &x, &options, ScaleLayout::Linear).unwrap_err();
            assert!(e.message().contains("204803"), "{e}");
        }
    }

    #[test]
    fn products_agree_with_f64() {
        let (m, n, k) = (3, 20, 64);
        let d = device();
        let mut ws = Workspace::new();
        let options = QuantizeOptions::default();
        let a = quantize(
            &d,
            &random(&[m, k], 3, DType::F16),
            &options,
            ScaleLayout::Linear,
        )
        .unwrap();
        let b = quantize(
            &d,
            &random(&[n, k], 4, DType::F32),
            &options,
            ScaleLayout::Swizzled,
        )
        .unwrap();
        let (da, db) = (
            dequantize(&d, &a, DType::F32).unwrap().to_f32().unwrap(),
            dequantize(&d, &b, DType::F32).unwrap().to_f32().unwrap(),
        );
        let exact = |i: usize, j: usize| -> f64 {
            (0..k)
                .map(|c| f64::from(da[i * k + c]) * f64::from(db[j * k + c]))
                .sum()
        };
        let out = scaled_mm(&d, &a, &b, DType::F32, &mut ws).unwrap();
        assert_eq!(out.shape().sizes(), [m, n]);
        let out = out.to_f32().unwrap();
        let (mut error, mut norm) = (0.0, 0.0);
        for i in 0..m {
            for j in 0..n {
                error += (f64::from(out[i * n + j]) - exact(i, j)).powi(2);
                norm += exact(i, j).powi(2);
            }
        }
        // The design's bound for f32 accumulation.
        assert!(error.sqrt() <= 1e-6 * norm.sqrt(), "{error} {norm}");

        let dense = dequantize(&d, &b, DType::F32).unwrap();
        let x = dequantize(&d, &a, DType::F32).unwrap();
        let w = dense_weight(&d, &dense).unwrap();
        let again = linear(&d, &x, &w, Activations::Exact, DType::F32, &mut ws).unwrap();
        for (p, q) in again.to_f32().unwrap().iter().zip(&out[..]) {
            assert!((p - q).abs() <= 1e-5, "{p} {q}");
        }
    }

    #[test]
    fn nf4_goes_both_ways() {
        let x = random(&[5, 13], 5, DType::F32);
        let (codes, absmax) = quantize_nf4(&x, 64).unwrap();
        assert_eq!(codes.shape().sizes(), [33]);
        assert_eq!(absmax.shape().sizes(), [2]);
        let mut q = Nf4Tensor {
            codes,
            absmax,
            map: None,
            block: 64,
        };
        let y = dequantize_nf4(&q, &[5, 13], DType::F32).unwrap();
        let packed = nf4::quantize(&x.to_f32().unwrap(), 64).unwrap();
        let mut wanted = vec![0.0; 65];
        nf4::dequantize(&packed.codes, &packed.absmax, &nf4::VALUES, 64, &mut wanted).unwrap();
        assert_eq!(&y.to_f32().unwrap()[..], wanted);
        expect_kind(
            dequantize_nf4(&q, &[5, 16], DType::F32),
            ErrorKind::InvalidArgument,
            "not 33 and 2",
        );
        q.map = Some(q.absmax.clone());
        expect_kind(
            dequantize_nf4(&q, &[5, 13], DType::F32),
            ErrorKind::InvalidArgument,
            "the quant map is float32 of shape [2]",
        );
    }

    #[test]
    fn a_decoded_weight_has_the_values_of_its_format() {
        let (n, k) = (300, 48);
        let d = device();
        let x = random(&[n, k], 7, DType::F32);
        let options = QuantizeOptions::default();
        let q = quantize(&d, &x, &options, ScaleLayout::Swizzled).unwrap();
        let (codes, absmax) = quantize_nf4(&x, 64).unwrap();
        let nf4 = Nf4Tensor {
            codes,
            absmax,
            map: None,
            block: 64,
        };
        let dense = Backend::DequantMatmul;
        for (weight, wanted) in [
            (
                weight_for(&d, &q, dense, DenseType::F32).unwrap(),
                dequantize(&d, &q, DType::F32).unwrap(),
            ),
            (
                nf4_weight_for(&d, &nf4, (n, k), dense, DenseType::F32).unwrap(),
                dequantize_nf4(&nf4, &[n, k], DType::F32).unwrap(),
            ),
        ] {
            let wanted = wanted.to_f32().unwrap();
            let mut row = vec![0.0; k];
            for (r, wanted) in wanted.chunks_exact(k).enumerate() {
                weight.row(r, &mut row).unwrap();
                assert_eq!(row, wanted, "row {r}");
            }
        }
        let kernel = weight_for(&d, &q, Backend::Nvfp4Kernel, DenseType::F32).unwrap();
        assert_eq!(kernel.kind().name(), "nvfp4");
        expect_kind(
            weight_for(&d, &q, Backend::Nf4Kernel, DenseType::F32),
            ErrorKind::InvalidArgument,
            "nf4-kernel is not for NVFP4",
        );
        let kernel = nf4_weight_for(&d, &nf4, (n, k), Backend::Nf4Kernel, DenseType::F32);
        assert_eq!(
            kernel.unwrap_err().kind(),
            crate::base::ErrorKind::Unsupported
        );
        let short = nf4_weight_for(&d, &nf4, (n - 1, k), dense, DenseType::F32);
        expect_kind(short, ErrorKind::InvalidArgument, "not 7200 and 225");
    }

    #[test]
    fn parts_that_do_not_belong_together_are_refused() {
        let d = device();
        let q = quantize(
            &d,
            &random(&[4, 32], 6, DType::F32),
            &QuantizeOptions::default(),
            ScaleLayout::Linear,
        )
        .unwrap();
        let refused = |change: &dyn Fn(&mut Nvfp4Tensor)| {
            let mut other = q.clone();
            change(&mut other);
            dequantize(&d, &other, DType::F32).unwrap_err()
        };
        let zeros = |sizes: &[usize], dtype| Tensor::zeros(sizes, dtype).unwrap();
        refused(&|q| q.layout = ScaleLayout::Swizzled);
        refused(&|q| q.scales = zeros(&[4, 3], DType::U8));
        refused(&|q| q.scales = zeros(&[4, 2], DType::F16));
        refused(&|q| q.codes = zeros(&[4, 16], DType::F32));
        refused(&|q| q.codes = zeros(&[4, 7], DType::U8));
        refused(&|q| q.global = f32::NAN);
        expect_kind(
            dequantize(&d, &q, DType::I32),
            ErrorKind::InvalidArgument,
            "not int32",
        );
        let x = zeros(&[4, 17], DType::F32);
        expect_kind(
            quantize(&d, &x, &QuantizeOptions::default(), ScaleLayout::Linear),
            ErrorKind::InvalidArgument,
            "K = 17",
        );
        let x = zeros(&[4, 16], DType::I32);
        expect_kind(
            quantize(&d, &x, &QuantizeOptions::default(), ScaleLayout::Linear),
            ErrorKind::InvalidArgument,
            "the input is int32",
        );
    }
}
