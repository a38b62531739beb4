//! Reads rows of a matrix on all threads.

use std::ops::Range;

use super::optimizer::ReadRows;
use super::rows::by_parts_of_two;
use crate::base::Result;
use crate::cpu::Cpu;

/// Rows that a thread reads at a time.
const READ: usize = 64;

impl Cpu {
    /// Reads a range of rows of `cols` elements to `out`.
    pub fn read_rows(
        &self,
        rows: Range<usize>,
        cols: usize,
        read: &ReadRows<'_>,
        out: &mut [f32],
    ) -> Result<()> {
        let mut done = vec![Ok(()); rows.len().div_ceil(READ)];
        let both = (out, &mut done[..]);
        by_parts_of_two(self.pool(), both, (READ * cols, 1), |part, out, done| {
            let first = rows.start + part * READ;
            done[0] = read(first..rows.end.min(first + READ), out);
        });
        done.into_iter().collect()
    }
}
