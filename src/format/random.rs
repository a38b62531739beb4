//! Counter-based random bits: a pure function of a seed and a position. Any part of a tensor can be rounded on any device and in any order,
//! with the same bits as the whole. Not for secrets.

/// The odd constant nearest to 2^64 divided by the golden ratio: its multiples spread evenly over 64 bits.
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

/// 64 random bits, as two words, for position `counter` of the stream `key`, in eight GPU instructions: for draws per weight and step. A
/// key is a result of [`bits`].
///
/// Four rounds of Philox 2x32 (Salmon et al., SC 2011), the fewest that pass the tests below: a bijection of the counter and half of the
/// key, keyed by the other half.
#[inline(always)]
pub const fn words(key: u64, counter: u32) -> [u32; 2] {
    let (mut x, mut y) = (counter, (key >> 32) as u32);
    let mut round = 0;
    while round < 4 {
        let product = x as u64 * 0xd256_d193;
        let round_key = (key as u32).wrapping_add(((GOLDEN >> 32) as u32).wrapping_mul(round));
        x = (product >> 32) as u32 ^ y ^ round_key;
        y = product as u32;
        round += 1;
    }
    [x, y]
}

/// The 16 random bits for `index` in the [`words`] of position `index / 4`.
#[inline(always)]
pub const fn bits16(key: u64, index: u32) -> u16 {
    (words(key, index / 4)[(index / 2 % 2) as usize] >> (16 * (index % 2))) as u16
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

    /// Both words of a position as one number.
    fn joined(key: u64, counter: u32) -> u64 {
        let [x, y] = words(key, counter);
        u64::from(x) << 32 | u64::from(y)
    }

    /// Bits are fair, and independent of those at other positions, under other keys, and of each other: any dependence between two draws
    /// shows in the exclusive or of one with a rotation of the other.
    #[test]
    fn words_are_fair_and_independent() {
        const N: u32 = 1 << 14;
        // Six standard deviations of a fair coin, because more than 10^5 coins are tossed.
        let limit = 3.0 * f64::from(N).sqrt();
        let check = |what: &str, draw: &dyn Fn(u32) -> u64| {
            let mut ones = [0u32; 64];
            for counter in 0..N {
                let b = draw(counter);
                for (i, n) in ones.iter_mut().enumerate() {
                    *n += (b >> i & 1) as u32;
                }
            }
            for n in ones {
                let excess = f64::from(n) - f64::from(N) / 2.0;
                assert!(excess.abs() < limit, "{what}: {ones:?}");
            }
        };
        for step in 0..3 {
            let (key, next) = (bits(5, step), bits(5, step + 1));
            check("bits", &|c| joined(key, c));
            check("keys", &|c| joined(key, c) ^ joined(next, c));
            // Distances of neighbours, of rows and of matrices.
            for distance in [1, 2, 3, 4, 8, 64, 160, 1024, 4096, 1 << 20] {
                let what = format!("positions {distance} apart");
                check(&what, &|c| joined(key, c) ^ joined(key, c + distance));
            }
            for bit in 0..32 {
                // Counters without the bit, so that no pair is seen twice.
                let without = |c: u32| (c >> bit) << bit << 1 | c & ((1 << bit) - 1);
                check(&format!("avalanche of bit {bit}"), &|c| {
                    joined(key, without(c)) ^ joined(key, without(c) ^ 1 << bit)
                });
            }
            for by in 1..64 {
                let what = format!("bits {by} apart");
                check(&what, &|c| joined(key, c) ^ joined(key, c).rotate_left(by));
                let what = format!("bits {by} apart of neighbours");
                check(&what, &|c| {
                    joined(key, c) ^ joined(key, c + 1).rotate_left(by)
                });
                let what = format!("bits {by} apart of steps");
                check(&what, &|c| joined(key, c) ^ joined(next, c).rotate_left(by));
            }
        }
    }

    /// Bytes fill 256 cells evenly (chi-squared), and so do the combined top halves of any two bytes of a draw, of two neighbours, or of
    /// two steps.
    #[test]
    fn words_are_uniform() {
        const N: u32 = 1 << 16;
        let check = |what: &str, cell: &dyn Fn(u32) -> u64| {
            let mut cells = [0u32; 256];
            (0..N).for_each(|c| cells[(cell(c) & 255) as usize] += 1);
            let expected = f64::from(N) / 256.0;
            let chi: f64 = cells
                .iter()
                .map(|&n| (f64::from(n) - expected).powi(2) / expected)
                .sum();
            // 255 degrees of freedom: mean 255, standard deviation 22.6.
            assert!((142.0..368.0).contains(&chi), "{what}: {chi}");
        };
        for seed in 0..2 {
            let (key, next) = (bits(seed, 9), bits(seed, 10));
            for i in (0..64).step_by(8) {
                check(&format!("byte at {i}"), &|c| joined(key, c) >> i);
                for j in (0..64).step_by(8) {
                    let pair = |a: u64, b: u64| (a >> i & 0xf0) | (b >> (j + 4) & 15);
                    let what = format!("bytes at {i} and {j}");
                    if i != j {
                        check(&what, &|c| pair(joined(key, c), joined(key, c)));
                    }
                    check(&what, &|c| pair(joined(key, c), joined(key, c + 1)));
                    check(&what, &|c| pair(joined(key, c), joined(next, c)));
                }
            }
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
