//! The adapter of a pass of one row, for kernels that apply it themselves: those that make rows multiply them by A factors, part by part,
//! and those that take the rows add up these parts. See `kernels/adapter/factors.cuh`.

use super::driver::{DeviceBuffer, int};
use crate::base::Result;
use crate::base::error::bail;

/// Largest rank that such kernels take.
pub const ROW_RANK: usize = 64;
/// Most parts of a row.
pub const ROW_PARTS: usize = 256;
/// Most projections that share an input in such a pass.
const PROJECTIONS: usize = 3;

/// The rows whose products of A factors are in memory at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdaptedInput {
    /// The residual stream, before queries, keys and values, and before gate and up.
    Residual,
    /// The outputs of attention and of the gated unit.
    Inner,
}

/// Projections of a model that take a row, by their numbers in an [`AdapterTable`](super::AdapterTable).
#[derive(Clone, Copy, Debug)]
pub struct RowProjections {
    /// The first. The others follow.
    pub first: usize,
    /// Their number.
    pub count: usize,
}

/// The adapter of the one row of a pass.
#[derive(Clone, Copy)]
pub struct RowAdapter<'a> {
    /// Begins with the address of the adapter's table.
    pub(super) tiles: &'a DeviceBuffer,
    /// Products of A factors: see [`RowAdapter::bytes`].
    pub(super) parts: &'a DeviceBuffer,
    /// The largest rank of an adapter, or more: a power of two from 16 to [`ROW_RANK`].
    pub(super) rank: usize,
}

/// The adapter of a GEMM of a single row.
#[derive(Clone, Copy)]
pub struct AdaptedGemm<'a> {
    /// The row's adapter.
    pub adapter: RowAdapter<'a>,
    /// The number of the GEMM's first projection. The others follow.
    pub first: usize,
    /// The projections that take the outputs, if there are any that may be adapted.
    pub next: Option<RowProjections>,
    /// Projections of later kernels, whose entries of the table are fetched.
    pub later: Option<RowProjections>,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct LowInput {
    values: u64,
    first: i32,
    parts: i32,
    factor: f32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct LowOutput {
    adapter: u64,
    values: u64,
    first: i32,
    count: i32,
    parts: i32,
    shift: i32,
    copies: i32,
    later: i32,
    laters: i32,
}

impl RowAdapter<'_> {
    /// Bytes of the products of both inputs, for ranks up to `rank`.
    pub(super) const fn bytes(rank: usize) -> usize {
        2 * Self::bytes_of_input(rank)
    }

    const fn bytes_of_input(rank: usize) -> usize {
        PROJECTIONS * ROW_PARTS * rank * 4
    }

    fn values(&self, input: AdaptedInput, parts: usize) -> Result<u64> {
        self.parts
            .holds("products of A factors", &[Self::bytes(self.rank)])?;
        if parts > ROW_PARTS || self.rank > ROW_RANK || !self.rank.is_power_of_two() {
            bail!(
                Internal,
                "a row in {parts} parts with an adapter of rank {}; there is room for {ROW_PARTS} and {ROW_RANK}",
                self.rank
            );
        }
        let second = match input {
            AdaptedInput::Residual => 0,
            AdaptedInput::Inner => Self::bytes_of_input(self.rank),
        };
        Ok(self.parts.address() + second as u64)
    }

    /// The argument of the kernel that makes a row in `parts` parts for `next`; none if no adapted projection takes it. `copies` bytes of
    /// shared memory are for factors. Entries of tables of `later` projections are fetched to L2.
    pub(super) fn output(
        &self,
        input: AdaptedInput,
        next: Option<RowProjections>,
        parts: usize,
        copies: usize,
        later: Option<RowProjections>,
    ) -> Result<LowOutput> {
        let none = RowProjections { first: 0, count: 0 };
        let (next, later) = (next.unwrap_or(none), later.unwrap_or(none));
        if next.count > PROJECTIONS {
            bail!(
                Internal,
                "{} projections of a row with an adapter",
                next.count
            );
        }
        Ok(LowOutput {
            adapter: self.tiles.address(),
            values: self.values(input, parts)?,
            first: int("a projection", next.first)?,
            count: next.count as i32,
            parts: parts as i32,
            shift: self.rank.trailing_zeros() as i32,
            copies: int("bytes for factors", copies)?,
            later: int("a projection", later.first)?,
            laters: int("projections", later.count)?,
        })
    }

    /// The argument of the kernel that takes a row, which is in `parts` parts, or without products. The row was divided by `factor`.
    pub(super) fn input(
        &self,
        input: AdaptedInput,
        first: usize,
        parts: Option<usize>,
        factor: f32,
    ) -> Result<LowInput> {
        Ok(LowInput {
            values: match parts {
                Some(parts) => self.values(input, parts)?,
                None => 0,
            },
            first: int("a projection", first)?,
            parts: parts.unwrap_or(0) as i32,
            factor,
        })
    }
}
