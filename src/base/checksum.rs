//! A 64-bit checksum for our own files and for telling models apart: finds accidents, not attacks.

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

    /// Adds the bits of `values`.
    pub fn update_f32(&mut self, values: &[f32]) {
        for v in values {
            self.update(&v.to_bits().to_le_bytes());
        }
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
}
