//! W4A4 products on a GPU: from host memory, uploaded without conversion, and from tensors in the GPU's memory, with the result in that
//! memory.

use std::sync::Arc;

use super::types::Nvfp4Tensor;
use crate::base::error::{Result, bail};
use crate::base::memory::Tag;
use crate::base::size::product;
use crate::cuda::{self, Contiguous, DeviceBuffer, DeviceSlice, Gpu};
use crate::format::nvfp4::{self, BLOCK};
use crate::format::swizzle::{self, ScaleLayout};
use crate::ops::transfer::in_stream_order;
use crate::tensor::{DType, Tensor};

/// An NVFP4 matrix `[rows, k]` on a GPU.
pub(in crate::ops) struct Operand<'a> {
    codes: Contiguous<'a>,
    scales: Contiguous<'a>,
    layout: ScaleLayout,
    rows: usize,
    k: usize,
    global: f32,
}

impl Operand<'static> {
    /// Uploads the codes and scales of a matrix `[rows, k]`.
    pub(in crate::ops) fn upload(
        gpu: &Arc<Gpu>,
        codes: &[u8],
        scales: &[u8],
        layout: ScaleLayout,
        (rows, k): (usize, usize),
        global: f32,
    ) -> Result<Operand<'static>> {
        check_scales(scales, layout, rows, k / BLOCK)?;
        let upload = |bytes| -> Result<Contiguous<'static>> {
            let copy = DeviceBuffer::from_slice(gpu, Tag::DeviceScratch, bytes)?;
            Ok(Contiguous::Copied(copy))
        };
        Ok(Operand {
            codes: upload(codes)?,
            scales: upload(scales)?,
            layout,
            rows,
            k,
            global,
        })
    }
}

impl<'a> Operand<'a> {
    /// A matrix in the memory of `gpu`: borrowed if it is contiguous and aligned for the kernels, else a copy. Its scales are not checked
    /// yet.
    pub(super) fn of(gpu: &'a Arc<Gpu>, x: &'a Nvfp4Tensor) -> Result<Operand<'a>> {
        let (rows, k) = x.dims()?;
        let [codes, scales] = cuda::Operand::ALIGNMENT;
        Ok(Operand {
            codes: Contiguous::new(gpu, &x.codes, codes)?,
            scales: Contiguous::new(gpu, &x.scales, scales)?,
            layout: x.layout,
            rows,
            k,
            global: x.global,
        })
    }

    pub(super) fn on_device(&self) -> Result<cuda::Operand<'_>> {
        cuda::Operand::new(
            self.codes.slice(),
            self.scales.slice(),
            self.layout,
            self.rows,
            self.k,
            self.global,
        )
    }
}

/// Fails on bytes that are not valid block scales, which kernels do not handle. The padding of swizzled scales may hold anything.
fn check_scales(scales: &[u8], layout: ScaleLayout, rows: usize, blocks: usize) -> Result<()> {
    let wanted = layout.len(rows, blocks)?;
    if scales.len() != wanted {
        bail!(
            InvalidArgument,
            "scales of {rows} rows by {blocks} blocks take {wanted} bytes, not {}",
            scales.len()
        );
    }
    match layout {
        ScaleLayout::Linear => nvfp4::check_block_scales(scales, 0, blocks)?,
        ScaleLayout::Swizzled => {
            for row in 0..rows {
                for block in 0..blocks {
                    let byte = scales[swizzle::offset(row, block, blocks)];
                    nvfp4::check_block_scale(byte, row, block)?;
                }
            }
        }
    }
    Ok(())
}

/// `a` `[M, K]` times `b` `[N, K]` transposed, as `[M, N]` of `dtype`: f32, f16 or bf16.
pub(in crate::ops) fn on_gpu(
    gpu: &Arc<Gpu>,
    a: &Operand<'_>,
    b: &Operand<'_>,
    dtype: DType,
) -> Result<DeviceBuffer> {
    let bytes = product("output", &[a.rows, b.rows, dtype.bytes()])?;
    let out = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, bytes)?;
    cuda::scaled_mm(gpu, &a.on_device()?, &b.on_device()?, dtype, &out)?;
    Ok(out)
}

/// The W4A4 product of tensors in the memory of `gpu`, into a tensor there; see [`super::scaled_mm_into`].
pub(super) fn in_place(
    gpu: &Arc<Gpu>,
    a: &Nvfp4Tensor,
    b: &Nvfp4Tensor,
    out: &mut Tensor,
) -> Result<()> {
    let dtype = out.dtype();
    in_stream_order(gpu, || {
        let (a, b) = (Operand::of(gpu, a)?, Operand::of(gpu, b)?);
        let out = DeviceSlice::result(gpu, out)?;
        let (a, b) = (a.on_device()?, b.on_device()?);
        cuda::check_scales(gpu, "scaled_mm", &a, &b)?;
        cuda::scaled_mm(gpu, &a, &b, dtype, out)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;
    use crate::format::e4m3;

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
            expect_kind(
                check_scales(&scales[1..], layout, rows, blocks),
                ErrorKind::InvalidArgument,
                "scales of 3 rows by 2 blocks",
            );
        }
    }
}
