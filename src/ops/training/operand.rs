//! Rounds operands of GEMMs to NVFP4 and back: see [`crate::format::operand`]. Rounds rows of tables to int8 likewise: see
//! [`crate::format::int8`].

use super::super::{Device, Mixed, Slice, SliceMut};
use super::scratch;
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::training as cuda;

pub use crate::format::operand::{OperandRounding, ROTATED, ScaleRule};

/// Rounds `x` `[rows, width]` to NVFP4 in blocks of 16 along rows, each row with its own global scale, to `out` of the same size. A row
/// with a value that is not finite becomes NaN.
pub fn round_rows(
    device: &Device,
    x: Slice<'_, Mixed>,
    width: usize,
    rounding: OperandRounding,
    out: SliceMut<'_, Mixed>,
) -> Result<()> {
    check(x.len(), out.len(), x.len())?;
    match device {
        Device::Cpu(cpu) => cpu.round_rows(x.host()?, width, rounding, out.host()?),
        Device::Cuda(_) => cuda::round_rows(x.cuda()?, width, rounding, out.cuda()?),
    }
}

/// Rounds the rows of `x` `[rows, width]` to int8 in place, each with its own scale. A row with a value that is not finite becomes NaN.
pub fn round_int8_rows(device: &Device, x: SliceMut<'_, Mixed>, width: usize) -> Result<()> {
    match device {
        Device::Cpu(cpu) => cpu.round_int8_rows(x.host()?, width),
        Device::Cuda(_) => cuda::round_int8_rows(x.cuda()?, width),
    }
}

/// Rotates `x` `[rows, width]` along rows, 16 together, to `out` `[rows up to a multiple of 16, width]`, with rows of zeros after the last;
/// rounds it in blocks of those 16 where `rounding` is given, with one global scale. All becomes NaN where a value is not finite.
pub fn round_columns(
    device: &Device,
    x: Slice<'_, Mixed>,
    width: usize,
    rounding: Option<OperandRounding>,
    out: SliceMut<'_, Mixed>,
) -> Result<()> {
    let rows = x.len() / width.max(1);
    check(x.len(), out.len(), rows.next_multiple_of(ROTATED) * width)?;
    match device {
        Device::Cpu(cpu) => cpu.round_columns(x.host()?, width, rounding, out.host()?),
        Device::Cuda(_) => {
            let mut maxima = scratch(device, cuda::OPERAND_MAXIMA)?;
            let maxima = maxima.all_mut().cuda()?;
            cuda::round_columns(x.cuda()?, width, rounding, maxima, out.cuda()?)
        }
    }
}

/// Checks the size of a result, and that the random bits' numbers suffice for its elements.
fn check(len: usize, found: usize, wanted: usize) -> Result<()> {
    if found != wanted || u32::try_from(wanted).is_err() {
        bail!(
            Internal,
            "an operand of {len} elements to {found}; {wanted} are right, and 2^32 are too many"
        );
    }
    Ok(())
}
