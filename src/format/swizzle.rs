//! The swizzled order in which block-scaled tensor cores read scale bytes: tiles of 128 rows by 4 scales, 512 bytes each, tile after tile
//! along a row of tiles. Within a tile there are 32 groups of 16 bytes, each with 4 scales of 4 rows that lie 32 apart. Rows are padded to
//! a multiple of 128 and scales per row to a multiple of 4, with zeros.

use crate::base::error::{Result, bail};
use crate::base::{memory, size};

/// The order of block scales in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ScaleLayout {
    /// Row-major, one row of scales for each row of values.
    #[default]
    Linear,
    /// In the 128 x 4 tiles that the tensor cores read, with padding.
    Swizzled,
}

impl ScaleLayout {
    /// Bytes of the scales of `rows` rows with `k_blocks` scales each, padding included.
    pub fn len(self, rows: usize, k_blocks: usize) -> Result<usize> {
        match self {
            ScaleLayout::Linear => size::product("scales", &[rows, k_blocks]),
            ScaleLayout::Swizzled => len(rows, k_blocks),
        }
    }
}

/// Rows in a tile.
pub const TILE_ROWS: usize = 128;
/// Scales of one row in a tile.
const TILE_COLUMNS: usize = 4;
/// Bytes in a tile.
const TILE: usize = TILE_ROWS * TILE_COLUMNS;

/// Bytes of the swizzled scales of `rows` rows with `k_blocks` scales each, padding included.
pub fn len(rows: usize, k_blocks: usize) -> Result<usize> {
    size::product(
        "swizzled scales",
        &[
            rows.div_ceil(TILE_ROWS),
            k_blocks.div_ceil(TILE_COLUMNS),
            TILE,
        ],
    )
}

/// Position of the scale of block `block` in row `row`.
#[inline(always)]
pub const fn offset(row: usize, block: usize, k_blocks: usize) -> usize {
    let tile = (row / TILE_ROWS) * k_blocks.div_ceil(TILE_COLUMNS) + block / TILE_COLUMNS;
    tile * TILE + (row % 32) * 16 + (row % TILE_ROWS) / 32 * TILE_COLUMNS + block % TILE_COLUMNS
}

fn check(what: &str, given: usize, wanted: usize, rows: usize, k_blocks: usize) -> Result<()> {
    if given != wanted {
        bail!(
            InvalidArgument,
            "{what} of {rows} rows by {k_blocks} blocks take {wanted} bytes, not {given}"
        );
    }
    Ok(())
}

/// Converts row-major scales `[rows, k_blocks]` to swizzled order.
pub fn swizzle(scales: &[u8], rows: usize, k_blocks: usize) -> Result<Vec<u8>> {
    let linear = size::product("scales", &[rows, k_blocks])?;
    check("row-major scales", scales.len(), linear, rows, k_blocks)?;
    let mut out = memory::zeros(len(rows, k_blocks)?)?;
    for row in 0..rows {
        for block in 0..k_blocks {
            out[offset(row, block, k_blocks)] = scales[row * k_blocks + block];
        }
    }
    Ok(out)
}

/// Converts swizzled scales to row-major order `[rows, k_blocks]`; the padding is not read.
pub fn unswizzle(scales: &[u8], rows: usize, k_blocks: usize) -> Result<Vec<u8>> {
    let swizzled = len(rows, k_blocks)?;
    check("swizzled scales", scales.len(), swizzled, rows, k_blocks)?;
    let mut out = memory::zeros(size::product("scales", &[rows, k_blocks])?)?;
    for row in 0..rows {
        for block in 0..k_blocks {
            out[row * k_blocks + block] = scales[offset(row, block, k_blocks)];
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;
    use proptest::prelude::*;

    #[test]
    fn lengths_that_do_not_fit_are_errors() {
        expect_kind(
            swizzle(&[0; 5], 2, 3),
            ErrorKind::InvalidArgument,
            "take 6 bytes, not 5",
        );
        expect_kind(
            unswizzle(&[0; 6], 2, 3),
            ErrorKind::InvalidArgument,
            "take 512 bytes, not 6",
        );
        expect_kind(
            len(usize::MAX, usize::MAX),
            ErrorKind::InvalidArgument,
            "overflows",
        );
        assert_eq!(swizzle(&[], 0, 3).unwrap(), Vec::<u8>::new());
    }

    proptest! {
        #[test]
        fn unswizzle_undoes_swizzle_and_padding_is_zero(
            rows in 1usize..300, k_blocks in 1usize..20, seed: u64,
        ) {
            let scales: Vec<u8> = (0..(rows * k_blocks) as u64)
                .map(|i| crate::format::random::bits(seed, i) as u8 | 1)
                .collect();
            let swizzled = swizzle(&scales, rows, k_blocks).unwrap();
            prop_assert_eq!(swizzled.len(), len(rows, k_blocks).unwrap());
            // Every input byte is odd, so zeros occur only in the padding.
            let padding = swizzled.iter().filter(|&&b| b == 0).count();
            prop_assert_eq!(padding, swizzled.len() - scales.len());
            prop_assert_eq!(unswizzle(&swizzled, rows, k_blocks).unwrap(), scales);
        }
    }
}
