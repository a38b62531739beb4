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

/// 32 random bits for position `counter` of the stream `key`, in a third of the instructions of [`bits`] on a GPU: for what is
/// drawn anew for every weight in every step. A key is a result of [`bits`]; its halves enter before and between two rounds of
/// multiplication and shift.
#[inline(always)]
pub const fn bits32(key: u64, counter: u32) -> u32 {
    let x = counter
        .wrapping_mul(GOLDEN as u32 | 1)
        .wrapping_add(key as u32);
    let x = (x ^ (x >> 16)).wrapping_mul(0x21f0_aaad);
    let x = (x ^ (x >> 15))
        .wrapping_add((key >> 32) as u32)
        .wrapping_mul(0x735a_2d97);
    x ^ (x >> 15)
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

    /// Bits, pairs of neighbouring positions and pairs of neighbouring keys, each fair and without correlation.
    #[test]
    fn short_draws_are_fair_and_independent() {
        const N: u32 = 1 << 14;
        // Five standard deviations of a fair coin.
        let limit = 2.5 * f64::from(N).sqrt();
        for step in 0..4 {
            let (key, next) = (bits(5, step), bits(5, step + 1));
            for (what, draw) in [
                ("bits", &(|c| bits32(key, c)) as &dyn Fn(u32) -> u32),
                ("positions", &|c| bits32(key, c) ^ bits32(key, c + 1)),
                ("rows", &|c| bits32(key, c) ^ bits32(key, c + 4096)),
                ("keys", &|c| bits32(key, c) ^ bits32(next, c)),
                ("halves", &|c| {
                    bits32(key, c).rotate_left(16) ^ bits32(key, c)
                }),
            ] {
                let mut ones = [0u32; 32];
                for counter in 0..N {
                    let b = draw(counter);
                    for (i, n) in ones.iter_mut().enumerate() {
                        *n += (b >> i) & 1;
                    }
                }
                for n in ones {
                    let excess = f64::from(n) - f64::from(N) / 2.0;
                    assert!(excess.abs() < limit, "{what}, step {step}: {ones:?}");
                }
            }
        }
    }

    /// Thresholds of 16 bits fill 256 cells evenly (chi-squared), alone and in pairs.
    #[test]
    fn short_draws_are_uniform() {
        const N: u32 = 1 << 16;
        for seed in 0..4 {
            let key = bits(seed, 9);
            for shift in [0, 8, 16, 24] {
                let mut cells = [0u32; 256];
                (0..N).for_each(|c| cells[(bits32(key, c) >> shift & 255) as usize] += 1);
                let expected = f64::from(N) / 256.0;
                let chi: f64 = cells
                    .iter()
                    .map(|&n| (f64::from(n) - expected).powi(2) / expected)
                    .sum();
                // 255 degrees of freedom: mean 255, standard deviation 22.6.
                assert!(
                    (142.0..368.0).contains(&chi),
                    "seed {seed}, bits {shift}: {chi}"
                );
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
