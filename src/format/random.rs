//! Random bits by counter: a pure function of a seed and a position, so that any part of a tensor can be rounded, on any
//! device and in any order, with the bits the whole would have used. Not for secrets.

/// The odd constant nearest to 2^64 divided by the golden ratio: successive multiples spread evenly over 64 bits.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finalizer of SplitMix64: a bijection in which every input bit reaches every output bit.
#[inline(always)]
const fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// 64 random bits for position `counter` of the stream `seed`. The seed is mixed on its own first, so that neighbouring
/// seeds do not give shifted copies of one stream.
#[inline(always)]
pub const fn bits(seed: u64, counter: u64) -> u64 {
    let start = mix(seed.wrapping_add(GOLDEN));
    mix(start.wrapping_add(counter.wrapping_add(1).wrapping_mul(GOLDEN)))
}

/// A number in [0, 1), a multiple of 2^-24, for position `counter` of the stream `seed`.
#[inline(always)]
pub const fn uniform(seed: u64, counter: u64) -> f32 {
    (bits(seed, counter) >> 40) as f32 * (1.0 / (1u32 << 24) as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_is_fair_in_every_seed() {
        const N: u64 = 1 << 14;
        for seed in [0, 1, 2, u64::MAX] {
            let mut ones = [0u64; 64];
            for counter in 0..N {
                let b = bits(seed, counter);
                for (i, n) in ones.iter_mut().enumerate() {
                    *n += (b >> i) & 1;
                }
            }
            // Five standard deviations of a fair coin.
            let limit = 2.5 * (N as f64).sqrt();
            for n in ones {
                assert!((n as f64 - N as f64 / 2.0).abs() < limit, "seed {seed}");
            }
        }
    }

    #[test]
    fn neighbouring_seeds_are_not_shifts_of_each_other() {
        let first: Vec<u64> = (0..256).map(|c| bits(7, c)).collect();
        for seed in [6, 8, 7u64.wrapping_add(GOLDEN), 7u64.wrapping_sub(GOLDEN)] {
            assert!((0..256).all(|c| !first.contains(&bits(seed, c))));
        }
    }

    #[test]
    fn uniform_stays_below_one() {
        let sum: f64 = (0..4096)
            .map(|c| {
                let u = uniform(3, c);
                assert!((0.0..1.0).contains(&u));
                f64::from(u)
            })
            .sum();
        assert!((sum / 4096.0 - 0.5).abs() < 0.03);
    }
}
