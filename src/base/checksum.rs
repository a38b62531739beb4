//! A checksum of a matrix's rows that tells models apart: it detects accidents, not attacks. It is built on XXH3 checksums, which also end
//! our own files.

use twox_hash::XxHash3_64;

use super::memory::as_bytes;

/// Checksum of a matrix's rows: the sum of one hash per row, of its position and its content. Rows may therefore be added in any order and
/// in any runs, and sums from other threads can be merged at the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowsChecksum(u64);

impl RowsChecksum {
    /// The checksum of no rows.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds rows of `len` bytes each; the first has index `first`.
    pub fn add(&mut self, first: usize, len: usize, bytes: &[u8]) {
        for (number, row) in (first as u64..).zip(bytes.chunks_exact(len)) {
            let content = XxHash3_64::oneshot(row).to_le_bytes();
            let row = XxHash3_64::oneshot_with_seed(number, &content);
            self.0 = self.0.wrapping_add(row);
        }
    }

    /// Adds rows of `cols` values each; the first has index `first`.
    pub fn add_f32(&mut self, first: usize, cols: usize, values: &[f32]) {
        self.add(first, cols * size_of::<f32>(), as_bytes(values));
    }

    /// Adds the rows that were added to `other`.
    pub fn merge(&mut self, other: RowsChecksum) {
        self.0 = self.0.wrapping_add(other.0);
    }

    /// The checksum of rows with this sum, which [`RowsChecksum::finish`] gave.
    pub fn from_sum(sum: u64) -> Self {
        RowsChecksum(sum)
    }

    /// The checksum of all rows added so far.
    pub fn finish(self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_of_a_row_counts_and_so_does_its_place() {
        for len in [1, 7, 8, 40, 64, 65, 200] {
            let bytes: Vec<u8> = (0..3 * len).map(|i| (i * 7 + i / 5) as u8).collect();
            let of = |bytes: &[u8]| {
                let mut sum = RowsChecksum::new();
                sum.add(0, len, bytes);
                sum.finish()
            };
            let whole = of(&bytes);
            let mut seen = std::collections::HashSet::from([whole]);
            for bit in 0..bytes.len() * 8 {
                let mut changed = bytes.clone();
                changed[bit / 8] ^= 1 << (bit % 8);
                assert!(seen.insert(of(&changed)), "bit {bit} of rows of {len}");
            }
            // Adding the rows in other runs and in another order gives the same checksum.
            let mut sum = RowsChecksum::new();
            sum.add(2, len, &bytes[2 * len..]);
            let mut other = RowsChecksum::new();
            other.add(1, len, &bytes[len..2 * len]);
            other.add(0, len, &bytes[..len]);
            sum.merge(other);
            assert_eq!(sum.finish(), whole);
            let mut swapped = bytes.clone();
            swapped[..2 * len].rotate_left(len);
            assert!(seen.insert(of(&swapped)), "swapped rows of {len}");
        }
    }

    #[test]
    fn every_value_of_a_row_counts() {
        for cols in [1, 3, 16, 17, 50] {
            let values: Vec<f32> = (0..2 * cols).map(|i| i as f32).collect();
            let of = |values: &[f32]| {
                let mut sum = RowsChecksum::new();
                sum.add_f32(5, cols, values);
                sum.finish()
            };
            let mut seen = std::collections::HashSet::from([of(&values)]);
            for i in 0..values.len() {
                let mut changed = values.clone();
                changed[i] = -changed[i];
                assert!(seen.insert(of(&changed)), "value {i} of rows of {cols}");
            }
        }
    }
}
