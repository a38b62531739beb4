//! RMSNorm fused into the epilogues of GEMMs. The GEMM before the norm stores its rows times the norm's weight, with their sums of squares;
//! the GEMMs after it apply each row's factor in their epilogue. See `kernels/norm/fused_norm.cuh`.

use std::sync::Arc;

use super::limits::SKINNY_ROWS;
use super::matrix::MatrixShape;
use super::output::{Layout, Output};
use super::tile::Tile;
use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::Tag;
use crate::cuda::driver::{DeviceBuffer, Gpu, int};

/// The width of rows is a multiple of this: sums of squares, one for each tile, are read four at a time.
pub(super) const MULTIPLE: usize = 64;

/// Scratch memory between the GEMMs around a norm, for up to [`SKINNY_ROWS`] rows.
pub struct NormScratch {
    width: usize,
    rows: DeviceBuffer,
    squares: DeviceBuffer,
    factors: [DeviceBuffer; 2],
}

impl NormScratch {
    /// Bytes of rows, squares and a set of factors, for rows of `width`.
    const fn sizes(width: usize) -> [usize; 3] {
        let squares = SKINNY_ROWS * width.div_ceil(Tile::Deep.features());
        [
            Layout::FragmentMajor.elements(SKINNY_ROWS, width) * 2,
            squares * 4,
            SKINNY_ROWS * 4,
        ]
    }

    /// Bytes for rows of `width`.
    pub fn bytes_of(width: usize) -> usize {
        let [rows, squares, factors] = Self::sizes(width);
        rows + squares + 2 * factors
    }

    /// For rows of `width`.
    pub fn new(gpu: &Arc<Gpu>, width: usize) -> Result<NormScratch> {
        let scratch = |bytes| DeviceBuffer::uninit(gpu, Tag::DeviceScratch, bytes);
        let [rows, squares, factors] = Self::sizes(width);
        Ok(NormScratch {
            width,
            rows: scratch(rows)?,
            squares: scratch(squares)?,
            factors: [scratch(factors)?, scratch(factors)?],
        })
    }

    /// Factors of each row, f32, for the fused norm that follows. Another kernel that applies a norm stores them here.
    pub fn factors(&self, turn: usize) -> &DeviceBuffer {
        &self.factors[turn % 2]
    }
}

/// A norm that the GEMMs around it apply. It scales its rows by the factors of the previous norm, so that they stay within f16; the two
/// sets of factors alternate.
#[derive(Clone, Copy)]
pub struct FusedNorm<'a> {
    /// Shared by all norms of the rows.
    pub scratch: &'a NormScratch,
    /// Selects the set of factors that this norm writes, by its parity. The norm reads the other set.
    pub turn: usize,
    /// The rows themselves, f32 `[m, width]`.
    pub x: &'a DeviceBuffer,
    /// f32 `[width]`.
    pub weight: &'a DeviceBuffer,
    /// Added to the mean square.
    pub eps: f32,
}

/// Argument of the skinny GEMM for the norm of its result, or of its input.
#[repr(C)]
#[derive(Default)]
pub(super) struct NormArgument {
    weight: u64,
    squares: u64,
    previous_factors: u64,
    tiles: i32,
    rows: u64,
    factors: u64,
    x: u64,
    eps: f32,
}

impl FusedNorm<'_> {
    /// Elements of a row.
    pub(super) fn width(&self) -> usize {
        self.scratch.width
    }

    /// The rows in the layout that the skinny GEMM takes.
    pub(super) fn rows(&self) -> &DeviceBuffer {
        &self.scratch.rows
    }

    /// Refuses a matrix whose product does not have rows of this width.
    pub(super) fn takes(&self, makes: MatrixShape) -> Result<()> {
        if makes.rows != self.width() {
            bail!(
                Internal,
                "a product of {} features added to rows of {}",
                makes.rows,
                self.width()
            );
        }
        Ok(())
    }

    pub(super) fn argument(&self, m: usize) -> Result<NormArgument> {
        let width = self.scratch.width;
        self.x.holds("rows", &[m, width, 4])?;
        self.weight.holds("a norm", &[width, 4])?;
        if m > SKINNY_ROWS || !width.is_multiple_of(MULTIPLE) {
            bail!(
                Internal,
                "a norm of {m} rows of {width} fused into products; it takes up to {SKINNY_ROWS} rows of a multiple of {MULTIPLE}"
            );
        }
        Ok(NormArgument {
            weight: self.weight.address(),
            squares: self.scratch.squares.address(),
            previous_factors: self.scratch.factors(self.turn + 1).address(),
            tiles: int("tiles", width / Tile::of(Output::Add, m).features())?,
            rows: self.scratch.rows.address(),
            factors: self.scratch.factors(self.turn).address(),
            x: self.x.address(),
            eps: self.eps,
        })
    }
}
