//! Size and alignment checks for the arrays of training's kernels, which load 16 bytes at a time.

use super::super::driver::DeviceSlice;
use crate::base::Result;
use crate::base::error::bail;
use crate::base::size::product;

/// bf16 elements that a thread takes at once.
pub(super) const PIECE: usize = 8;
/// The width of rows is a multiple of this.
pub(super) const WIDTH: usize = 16;
/// Bytes of a bf16.
const BF16: usize = 2;
/// Alignment of arrays in bytes.
const ALIGNMENT: u64 = 16;

fn expect(what: &str, x: DeviceSlice<'_>, bytes: usize, sizes: &[usize]) -> Result<()> {
    let wanted = product(what, &[product(what, sizes)?, bytes])?;
    if x.bytes() != wanted {
        bail!(
            Internal,
            "{what}: {} bytes, and {wanted} are wanted for {sizes:?}",
            x.bytes()
        );
    }
    Ok(())
}

fn check_alignment(what: &str, x: DeviceSlice<'_>) -> Result<()> {
    if !x.address().is_multiple_of(ALIGNMENT) {
        bail!(
            Internal,
            "{what} begins {} bytes past a multiple of {ALIGNMENT}, where it must begin",
            x.address() % ALIGNMENT
        );
    }
    Ok(())
}

/// Fails unless a bf16 array has exactly these sizes and is aligned.
pub(super) fn expect_bf16(what: &str, x: DeviceSlice<'_>, sizes: &[usize]) -> Result<()> {
    expect(what, x, BF16, sizes)?;
    check_alignment(what, x)
}

/// Fails unless an f32 array has exactly these sizes and is aligned.
pub(super) fn expect_f32(what: &str, x: DeviceSlice<'_>, sizes: &[usize]) -> Result<()> {
    expect_words(what, x, sizes)?;
    check_alignment(what, x)
}

/// Fails unless an array of four-byte elements, loaded one at a time, has exactly these sizes.
pub(super) fn expect_words(what: &str, x: DeviceSlice<'_>, sizes: &[usize]) -> Result<()> {
    expect(what, x, size_of::<f32>(), sizes)
}

/// Fails unless an f32 array has at least room for these sizes and is aligned.
pub(super) fn expect_room(what: &str, x: DeviceSlice<'_>, sizes: &[usize]) -> Result<()> {
    let wanted = product(what, sizes)?;
    x.holds(what, &[wanted, size_of::<f32>()])?;
    check_alignment(what, x)
}

/// Elements of an array of f32.
pub(super) fn f32_elements(x: DeviceSlice<'_>) -> usize {
    x.bytes() / size_of::<f32>()
}

/// Elements of an array of bf16.
pub(super) fn bf16_elements(x: DeviceSlice<'_>) -> usize {
    x.bytes() / BF16
}

/// Fails unless the width of rows is a multiple of 16.
pub(super) fn check_width(what: &str, width: usize) -> Result<()> {
    if width == 0 || !width.is_multiple_of(WIDTH) {
        bail!(
            Unsupported,
            "{what}: rows of {width} elements on a GPU; their width must be a multiple of {WIDTH}"
        );
    }
    Ok(())
}

/// The number of rows of bf16 `x` `[rows, width]`.
pub(super) fn rows(what: &str, x: DeviceSlice<'_>, width: usize) -> Result<usize> {
    check_width(what, width)?;
    let rows = bf16_elements(x) / width;
    expect_bf16(what, x, &[rows, width])?;
    Ok(rows)
}

/// The number of pieces of bf16 `x`.
pub(super) fn pieces(what: &str, x: DeviceSlice<'_>) -> Result<usize> {
    let elements = bf16_elements(x);
    if !elements.is_multiple_of(PIECE) {
        bail!(
            Unsupported,
            "{what}: {elements} elements on a GPU; there must be a multiple of {PIECE}"
        );
    }
    expect_bf16(what, x, &[elements])?;
    Ok(elements / PIECE)
}
