//! What arrays must be for the kernels of this room, which load 16 bytes at a time.

use super::super::driver::DeviceSlice;
use crate::base::Result;
use crate::base::error::bail;
use crate::base::size::product;

/// Elements of bf16 that a thread takes at once.
pub(super) const PIECE: usize = 8;
/// What the width of rows must be a multiple of.
pub(super) const WIDTH: usize = 16;
/// Bytes of a bf16.
const BF16: usize = 2;
/// Where arrays must begin.
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

/// Refuses an array of bf16 that is not exactly of these sizes, or not aligned.
pub(super) fn expect_bf16(what: &str, x: DeviceSlice<'_>, sizes: &[usize]) -> Result<()> {
    expect(what, x, BF16, sizes)?;
    check_alignment(what, x)
}

/// Refuses an array of f32 that is not exactly of these sizes, or not aligned.
pub(super) fn expect_f32(what: &str, x: DeviceSlice<'_>, sizes: &[usize]) -> Result<()> {
    expect_words(what, x, sizes)?;
    check_alignment(what, x)
}

/// Refuses an array that is not exactly of these sizes, of elements of four bytes that are loaded one at a time.
pub(super) fn expect_words(what: &str, x: DeviceSlice<'_>, sizes: &[usize]) -> Result<()> {
    expect(what, x, size_of::<f32>(), sizes)
}

/// Refuses an array of f32 with less room than for these sizes, or that is not aligned.
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

/// Refuses rows whose width is no multiple of 16.
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
