//! 64-bit checksums for our own files and for telling models apart: they find accidents, not attacks. [`Checksum`] is for what is
//! small or written to disk; [`RowsChecksum`] goes through weights about as fast as memory brings them.

/// The odd multiplier of the 64-bit FNV hash.
const PRIME: u64 = 0x0000_0100_0000_01b3;

/// A running checksum. Each word enters by steps that can be undone, so a change to any one word always changes the result.
#[derive(Clone, Debug)]
pub struct Checksum {
    state: u64,
    pending: [u8; 8],
    bytes: u64,
}

impl Default for Checksum {
    fn default() -> Self {
        Checksum {
            state: 0xcbf2_9ce4_8422_2325,
            pending: [0; 8],
            bytes: 0,
        }
    }
}

impl Checksum {
    /// The checksum of nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds `bytes`. Splitting them over several calls makes no difference.
    pub fn update(&mut self, mut bytes: &[u8]) {
        let held = (self.bytes % 8) as usize;
        self.bytes += bytes.len() as u64;
        if held > 0 {
            let n = bytes.len().min(8 - held);
            self.pending[held..held + n].copy_from_slice(&bytes[..n]);
            bytes = &bytes[n..];
            if held + n < 8 {
                return;
            }
            self.word(u64::from_le_bytes(self.pending));
        }
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.word(u64::from_le_bytes(*word));
        }
        self.pending[..rest.len()].copy_from_slice(rest);
    }

    fn word(&mut self, word: u64) {
        self.state = (self.state ^ word).wrapping_mul(PRIME);
        // Multiplying only carries upwards; this brings high bits down again.
        self.state ^= self.state >> 32;
    }

    /// The checksum of everything added so far, its length included.
    pub fn finish(&self) -> u64 {
        let mut last = self.clone();
        let held = (self.bytes % 8) as usize;
        last.pending[held..].fill(0);
        last.word(u64::from_le_bytes(last.pending));
        last.word(self.bytes);
        last.state
    }
}

/// Numbers that go through a row side by side, as a product takes longer than the next can wait for.
const LANES: usize = 4;
/// 64-bit words that the lanes take in one step, two each.
const STRIPE: usize = 2 * LANES;
/// Binary digits of pi: where the lanes start, and what they mix in. Numbers without a pattern that weights could share.
const STARTS: [u64; LANES] = [
    0x243f_6a88_85a3_08d3,
    0x1319_8a2e_0370_7344,
    0xa409_3822_299f_31d0,
    0x082e_fa98_ec4e_6c89,
];
const KEYS: [u64; LANES] = [
    0x4528_21e6_38d0_1377,
    0xbe54_66cf_34e9_0c6c,
    0xc0ac_29b7_c97c_50dd,
    0x3f84_d5b5_b547_0917,
];

/// The two halves of the product in one, which every bit of both factors takes part in.
const fn fold(a: u64, b: u64) -> u64 {
    let product = a as u128 * b as u128;
    product as u64 ^ (product >> 64) as u64
}

/// A checksum of the rows of a matrix: the sum of one number for each row, made of its place and its content. So they may come in
/// any order and in any runs, and those that other threads have seen are added at the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowsChecksum(u64);

impl RowsChecksum {
    /// The checksum of no rows.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds rows of `len` bytes each, of which the first is row `first`.
    pub fn add(&mut self, first: usize, len: usize, bytes: &[u8]) {
        const BYTES: usize = 8 * STRIPE;
        let words = |stripe: &[u8; BYTES]| -> [u64; STRIPE] {
            let (words, _) = stripe.as_chunks::<8>();
            std::array::from_fn(|i| u64::from_le_bytes(words[i]))
        };
        for (number, row) in (first..).zip(bytes.chunks_exact(len)) {
            let (stripes, rest) = row.as_chunks::<BYTES>();
            let last = (!rest.is_empty()).then(|| {
                let mut last = [0; BYTES];
                last[..rest.len()].copy_from_slice(rest);
                words(&last)
            });
            self.row(number, len, stripes.iter().map(words).chain(last));
        }
    }

    /// Adds rows of `cols` values each, of which the first is row `first`.
    pub fn add_f32(&mut self, first: usize, cols: usize, values: &[f32]) {
        const VALUES: usize = 2 * STRIPE;
        let words = |stripe: &[f32; VALUES]| -> [u64; STRIPE] {
            let bits = |i: usize| u64::from(stripe[i].to_bits());
            std::array::from_fn(|i| bits(2 * i) | bits(2 * i + 1) << 32)
        };
        for (number, row) in (first..).zip(values.chunks_exact(cols)) {
            let (stripes, rest) = row.as_chunks::<VALUES>();
            let last = (!rest.is_empty()).then(|| {
                let mut last = [0.0; VALUES];
                last[..rest.len()].copy_from_slice(rest);
                words(&last)
            });
            self.row(number, cols, stripes.iter().map(words).chain(last));
        }
    }

    fn row(&mut self, number: usize, len: usize, stripes: impl Iterator<Item = [u64; STRIPE]>) {
        let mut lanes = STARTS;
        stripes.for_each(|words| {
            for (i, lane) in lanes.iter_mut().enumerate() {
                *lane = fold(*lane ^ words[2 * i], KEYS[i] ^ words[2 * i + 1]);
            }
        });
        let [a, b, c, d] = lanes;
        let row = fold(
            fold(a ^ len as u64, b ^ KEYS[0]) ^ KEYS[1],
            fold(c ^ number as u64, d ^ KEYS[2]) ^ KEYS[3],
        );
        self.0 = self.0.wrapping_add(row);
    }

    /// Adds the rows that `other` has seen.
    pub fn merge(&mut self, other: RowsChecksum) {
        self.0 = self.0.wrapping_add(other.0);
    }

    /// The checksum of all rows added so far.
    pub fn finish(self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(bytes: &[u8]) -> u64 {
        let mut c = Checksum::new();
        c.update(bytes);
        c.finish()
    }

    #[test]
    fn every_bit_and_the_length_count_and_splits_do_not() {
        let bytes: Vec<u8> = (0..45u8).map(|i| i.wrapping_mul(7)).collect();
        let whole = of(&bytes);
        for bit in 0..bytes.len() * 8 {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(of(&changed), whole);
        }
        for cut in 0..bytes.len() {
            let mut c = Checksum::new();
            c.update(&bytes[..cut]);
            c.update(&[]);
            c.update(&bytes[cut..]);
            assert_eq!(c.finish(), whole);
        }
        assert_ne!(of(&[0; 8]), of(&[0; 9]));
        assert_ne!(of(&[]), of(&[0]));
    }

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
            // In other runs and in another order.
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
