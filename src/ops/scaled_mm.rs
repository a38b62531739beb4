//! W4A4 products on a GPU: of host memory, where both operands go there as they are and the result comes back, and of tensors
//! in its own memory.

use std::sync::Arc;

use super::tensors::Nvfp4Tensor;
use super::transfer::in_order;
use crate::base::error::{Result, bail};
use crate::base::memory::Tag;
use crate::base::size::product;
use crate::cuda::{self, DeviceBuffer, Gpu, Span};
use crate::format::e4m3;
use crate::format::nvfp4::BLOCK;
use crate::format::swizzle::{self, ScaleLayout};
use crate::tensor::{DType, Tensor};

/// An NVFP4 matrix `[rows, k]` that was brought to a GPU.
pub(super) struct Operand {
    codes: DeviceBuffer,
    scales: DeviceBuffer,
    layout: ScaleLayout,
    rows: usize,
    k: usize,
    global: f32,
}

impl Operand {
    /// Brings codes and scales of a matrix `[rows, k]` there.
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        codes: &[u8],
        scales: &[u8],
        layout: ScaleLayout,
        (rows, k): (usize, usize),
        global: f32,
    ) -> Result<Operand> {
        check_scales(scales, layout, rows, k / BLOCK)?;
        Ok(Operand {
            codes: DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, codes)?,
            scales: DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, scales)?,
            layout,
            rows,
            k,
            global,
        })
    }

    fn on_device(&self) -> Result<cuda::Operand<'_>> {
        cuda::Operand::new(
            &self.codes,
            &self.scales,
            self.layout,
            self.rows,
            self.k,
            self.global,
        )
    }
}

/// Refuses NaN and negative scales, which kernels do not expect; what pads swizzled ones may be anything.
fn check_scales(scales: &[u8], layout: ScaleLayout, rows: usize, blocks: usize) -> Result<()> {
    let wanted = layout.len(rows, blocks)?;
    if scales.len() != wanted {
        bail!(
            InvalidArgument,
            "scales of {rows} rows by {blocks} blocks take {wanted} bytes, not {}",
            scales.len()
        );
    }
    if scales.iter().all(|&s| s <= e4m3::MAX_BYTE) {
        return Ok(());
    }
    for row in 0..rows {
        for block in 0..blocks {
            let scale = scales[match layout {
                ScaleLayout::Linear => row * blocks + block,
                ScaleLayout::Swizzled => swizzle::offset(row, block, blocks),
            }];
            if scale > e4m3::MAX_BYTE {
                bail!(
                    InvalidArgument,
                    "the scale of block {block} in row {row} has the byte {scale:#04x}, which is NaN or negative"
                );
            }
        }
    }
    Ok(())
}

/// `a` `[M, K]` times `b` `[N, K]` transposed, as `[M, N]` of `dtype`: f32, f16 or bf16.
pub(super) fn on_gpu(
    gpu: &Arc<Gpu>,
    a: &Operand,
    b: &Operand,
    dtype: DType,
) -> Result<DeviceBuffer> {
    let bytes = product("output", &[a.rows, b.rows, dtype.bytes()])?;
    let out = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, bytes)?;
    cuda::scaled_mm(gpu, &a.on_device()?, &b.on_device()?, dtype, &out)?;
    Ok(out)
}

/// The bytes of a tensor on the device, row-major and where the kernels want them: its own, or those of the copy.
fn span<'a>(
    gpu: &Arc<Gpu>,
    tensor: &'a Tensor,
    copy: &'a mut Option<DeviceBuffer>,
) -> Result<Span<'a>> {
    match Span::of(gpu, tensor)? {
        Some(span) => Ok(span),
        None => {
            let made = cuda::contiguous(gpu, Tag::DeviceScratch, tensor)?;
            Ok(Span::from(&*copy.insert(made)))
        }
    }
}

/// `a` `[M, K]` times `b` `[N, K]` transposed, all three in the memory of the device. Scales are not looked at: the result of
/// one that is NaN or negative holds anything.
pub(super) fn in_place(
    gpu: &Arc<Gpu>,
    a: &Nvfp4Tensor,
    b: &Nvfp4Tensor,
    out: &mut Tensor,
) -> Result<()> {
    let ((m, k), (n, _)) = (a.dims()?, b.dims()?);
    let dtype = out.dtype();
    in_order(gpu, || {
        let mut copies = [const { None }; 4];
        let [a_codes, a_scales, b_codes, b_scales] = &mut copies;
        let a = cuda::Operand::new(
            span(gpu, &a.codes, a_codes)?,
            span(gpu, &a.scales, a_scales)?,
            a.layout,
            m,
            k,
            a.global,
        )?;
        let b = cuda::Operand::new(
            span(gpu, &b.codes, b_codes)?,
            span(gpu, &b.scales, b_scales)?,
            b.layout,
            n,
            k,
            b.global,
        )?;
        cuda::scaled_mm(gpu, &a, &b, dtype, Span::result(gpu, out)?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_that_are_nan_or_negative_are_refused_and_padding_is_not() {
        let (rows, blocks) = (3, 2);
        for layout in [ScaleLayout::Linear, ScaleLayout::Swizzled] {
            let place = |row: usize, block: usize| match layout {
                ScaleLayout::Linear => row * blocks + block,
                ScaleLayout::Swizzled => swizzle::offset(row, block, blocks),
            };
            let mut scales = vec![0xff; layout.len(rows, blocks).unwrap()];
            for row in 0..rows {
                for block in 0..blocks {
                    scales[place(row, block)] = e4m3::MAX_BYTE;
                }
            }
            check_scales(&scales, layout, rows, blocks).unwrap();
            for byte in [0x7f, 0x80] {
                scales[place(2, 1)] = byte;
                let e = check_scales(&scales, layout, rows, blocks).unwrap_err();
                assert!(e.message().contains("block 1 in row 2"), "{e}");
            }
            assert!(check_scales(&scales[1..], layout, rows, blocks).is_err());
        }
    }
}
