//! Converts tensors to NVFP4 and back, and changes the layout of their block scales.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::chunks::{by_chunks, fill_rows, part, split};
use super::types::{Nvfp4Tensor, check_result, float_input, host_result, new_result};
use super::w4a4::Operand;
use crate::base::call;
use crate::base::error::{Result, bail};
use crate::base::memory::{self, Buffer, Tag};
use crate::base::size::product;
use crate::cuda::{self, DeviceBuffer, DeviceSlice, Gpu};
use crate::format::nvfp4::{self, BLOCK, Levels, QuantizeOptions};
use crate::format::swizzle::{self, ScaleLayout};
use crate::ops::Device;
use crate::ops::transfer::{in_stream_order, in_stream_order_and_wait};
use crate::tensor::{DType, Tensor};

/// The shapes of the codes and of the scales of `x` `[.., K]`: codes and linear scales keep its leading dimensions.
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

/// Quantizes `x` `[.., K]` along K on the device that holds it: the CPU for host memory, the GPU for its memory. For the shapes see
/// [`quantized_sizes`].
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

/// Quantizes `x` into the caller's tensors, uint8 and float8_e4m3fn, in the same memory as `x`; returns the global scale. After an error
/// their contents are unspecified.
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
    call::expect((rows * cols) as u64);
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

/// Reads and decodes the rows of a range.
pub(super) fn decode_rows(
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

/// The values of `a`, `[.., K]`, in a floating `dtype`, on the device that holds it: see [`quantize`]. On a GPU waits until the scales have
/// been checked, but not for the values.
pub fn dequantize(device: &Device, a: &Nvfp4Tensor, dtype: DType) -> Result<Tensor> {
    dequantize_if(device, a, dtype, true)
}

/// Dequantizes a result of [`quantize`], whose scales need no check: on a GPU it waits for nothing.
pub(in crate::ops) fn dequantize_own(
    device: &Device,
    a: &Nvfp4Tensor,
    dtype: DType,
) -> Result<Tensor> {
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

fn from_bytes(scales: &[u8]) -> Result<Tensor> {
    Tensor::build(&[scales.len()], DType::F8E4M3, |bytes| {
        bytes.copy_from_slice(scales);
        Ok(())
    })
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

/// Converts row-major scales `[rows, K / 16]` to the swizzled layout, on the device that holds them.
pub fn swizzle_scales(scales: &Tensor) -> Result<Tensor> {
    if let Some(ordinal) = scales.place().cuda() {
        return swizzle_on(&Gpu::open(ordinal)?, scales);
    }
    let (rows, blocks) = scales.shape().matrix();
    from_bytes(&swizzle::swizzle(&scale_bytes(scales)?, rows, blocks)?)
}

/// Converts swizzled scales to row-major `[rows, blocks]`, on the device that holds them.
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

fn buffer(gpu: &Arc<Gpu>, sizes: &[usize]) -> Result<DeviceBuffer> {
    DeviceBuffer::uninit(gpu, Tag::DeviceTensor, product("a tensor", sizes)?)
}

/// Quantizes `x` `[.., K]` in the memory of `gpu`; see [`quantize_into`], which has checked the shapes of the results.
fn quantize_on(
    gpu: &Arc<Gpu>,
    x: &Tensor,
    options: &QuantizeOptions,
    layout: ScaleLayout,
    codes: &mut Tensor,
    scales: &mut Tensor,
) -> Result<f32> {
    let swizzled = layout == ScaleLayout::Swizzled;
    let work = || {
        let (codes, scales) = (
            DeviceSlice::result(gpu, codes)?,
            DeviceSlice::result(gpu, scales)?,
        );
        cuda::quantize(gpu, x, options, None, swizzled, codes, scales)
    };
    match options.levels {
        // The host needs the global scale, so this waits for it.
        Levels::Two => in_stream_order_and_wait(gpu, work),
        Levels::Single | Levels::Legacy => in_stream_order(gpu, work),
    }
}

/// The values of `a`, in the memory of `gpu`; see [`dequantize`]. With `check`, waits until its scales have been checked.
fn dequantize_on(gpu: &Arc<Gpu>, a: &Nvfp4Tensor, dtype: DType, check: bool) -> Result<Tensor> {
    let (rows, cols) = a.dims()?;
    in_stream_order(gpu, || {
        let out = buffer(gpu, &[rows, cols, dtype.bytes()])?;
        let swizzled = a.layout == ScaleLayout::Swizzled;
        let decode = || cuda::dequantize(gpu, &a.codes, &a.scales, swizzled, a.global, dtype, &out);
        match check {
            true => {
                let operand = Operand::of(gpu, a)?;
                cuda::check_scales_of(gpu, "dequantize", &operand.on_device()?)?;
                decode()?;
            }
            false => decode()?,
        }
        cuda::tensor(out, &a.codes.shape().with_last(cols), dtype)
    })
}

/// Converts row-major scales in the memory of `gpu` to the swizzled layout.
fn swizzle_on(gpu: &Arc<Gpu>, scales: &Tensor) -> Result<Tensor> {
    let (rows, blocks) = scales.shape().matrix();
    let len = swizzle::len(rows, blocks)?;
    in_stream_order(gpu, || {
        let out = buffer(gpu, &[len])?;
        cuda::swizzle(gpu, scales, &out)?;
        cuda::tensor(out, &[len], DType::F8E4M3)
    })
}

/// Converts swizzled scales in the memory of `gpu` to row-major.
fn unswizzle_on(gpu: &Arc<Gpu>, scales: &Tensor, rows: usize, blocks: usize) -> Result<Tensor> {
    in_stream_order(gpu, || {
        let out = buffer(gpu, &[rows, blocks])?;
        cuda::unswizzle(gpu, scales, rows, blocks, &out)?;
        cuda::tensor(out, &[rows, blocks], DType::F8E4M3)
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::{device, random};
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;
    use crate::tensor::Shape;

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
