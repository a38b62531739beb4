//! NVFP4 tensors, represented by their part tensors, and the checks on operands and results that every operation shares.

use std::borrow::Cow;
use std::ops::Range;

use crate::base::error::{Result, bail};
use crate::base::memory::{self, Tag};
use crate::base::size::product;
use crate::cuda::{self, DeviceBuffer};
use crate::format::nvfp4::{self, BLOCK};
use crate::format::swizzle::{self, ScaleLayout};
use crate::ops::Device;
use crate::tensor::{DType, Shape, Tensor};

/// An NVFP4 tensor, represented by its parts.
#[derive(Clone, Debug)]
pub struct Nvfp4Tensor {
    /// Packed codes `[.., K / 2]`, uint8.
    pub codes: Tensor,
    /// Block scales, `float8_e4m3fn`, or uint8 from hosts without that type.
    pub scales: Tensor,
    /// The global scale.
    pub global: f32,
    /// Layout of `scales`.
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

    /// The CUDA device that holds both parts; `None` for host memory.
    pub(super) fn cuda(&self) -> Result<Option<usize>> {
        one_place(&[("codes", &self.codes), ("scales", &self.scales)])
    }

    /// A reader of row ranges that gives codes, and scales in row-major order.
    // A closure's type can only be spelled where it is returned.
    #[allow(clippy::type_complexity)]
    pub(super) fn reader(
        &self,
    ) -> Result<impl Fn(Range<usize>, &mut [u8], &mut [u8]) -> Result<()> + Sync> {
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

/// The row-major bytes of a tensor in host memory: borrowed, or a copy if it is not contiguous.
pub(super) fn row_major(x: &Tensor) -> Result<Cow<'_, [u8]>> {
    Ok(match x.as_bytes() {
        Some(bytes) => Cow::Borrowed(bytes),
        None => {
            let mut bytes = memory::zeros(x.bytes())?;
            x.copy_to(&mut bytes)?;
            Cow::Owned(bytes)
        }
    })
}

/// Rows and K of `x`, which must be of a floating type and not a scalar; `what` names it in errors.
pub(super) fn float_input(x: &Tensor, what: &str) -> Result<(usize, usize)> {
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

/// Fails unless all tensors are in host memory, or all in the memory of one CUDA device. Returns that device.
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

/// The device that computes on a tensor in place; `processor` gives the device for host memory.
pub fn device_of(tensor: &Tensor, processor: impl FnOnce() -> Result<Device>) -> Result<Device> {
    match tensor.place().cuda() {
        None => processor(),
        Some(ordinal) => Device::cuda(ordinal),
    }
}

/// A new tensor on `device` for a result. Its contents are unspecified until the result is written.
pub fn new_result(device: &Device, sizes: &[usize], dtype: DType) -> Result<Tensor> {
    match device {
        Device::Cpu(_) => Tensor::zeros(sizes, dtype),
        Device::Cuda(gpu) => {
            let bytes = Shape::contiguous(sizes)?.elements() * dtype.bytes();
            let buffer = DeviceBuffer::uninit(gpu, Tag::DeviceTensor, bytes)?;
            cuda::tensor(buffer, sizes, dtype)
        }
    }
}

/// Fails unless the tensor can take a result of this shape and type.
pub(super) fn check_result(
    name: &str,
    result: &Tensor,
    sizes: &[usize],
    dtype: DType,
) -> Result<()> {
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
pub(super) fn host_result<'a>(name: &str, result: &'a mut Tensor) -> Result<&'a mut [u8]> {
    result.require_host()?;
    match result.bytes_mut() {
        Some(bytes) => Ok(bytes),
        None => bail!(
            InvalidArgument,
            "{name} go to memory that may be written and that no other tensor shares"
        ),
    }
}
