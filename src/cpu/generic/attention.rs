//! Causal attention of a few queries over one key/value head, in the layout of [`crate::cpu::kv`]: scores for sixteen
//! positions at a time, softmax, then the weighted sum of values in order of position. Each query is computed in the same
//! order whatever its neighbours, so prefill and decode agree bit for bit.

use super::pointwise::softmax;
use crate::cpu::simd::Simd;

/// How cached keys and values are read.
///
/// # Safety
/// As for [`Simd`]: implementations read exactly 16 elements with instructions of its level.
pub(in crate::cpu) unsafe trait Element<S: Simd>: Copy {
    /// Reads 16 elements as `f32`.
    unsafe fn load(p: *const Self) -> S::V;
}
// SAFETY: reads exactly 16 elements.
unsafe impl<S: Simd> Element<S> for f32 {
    #[inline(always)]
    unsafe fn load(p: *const f32) -> S::V {
        // SAFETY: forwarded.
        unsafe { S::load(p) }
    }
}
// SAFETY: reads exactly 16 elements of IEEE half precision.
unsafe impl<S: Simd> Element<S> for u16 {
    #[inline(always)]
    unsafe fn load(p: *const u16) -> S::V {
        // SAFETY: forwarded.
        unsafe { S::load_f16(p) }
    }
}

/// One query: its vector, how many positions it sees, where its scores go (room for that many rounded up to 16) and
/// where its result goes.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Query {
    pub q: *const f32,
    pub len: usize,
    pub scores: *mut f32,
    pub out: *mut f32,
}

/// `Q` queries over the pages of one head. `page(i)` is page `i`: keys `[dim][16]`, then values `[16][dim]`.
///
/// # Safety
/// As for [`Simd`]; every query sees at least one position, `dim` is a multiple of 16, and pages cover the longest query.
#[inline(always)]
pub(in crate::cpu) unsafe fn attend<S: Simd, E: Element<S>, const Q: usize>(
    queries: [Query; Q],
    page: impl Fn(usize) -> *const E,
    dim: usize,
    scale: f32,
) {
    // SAFETY: forwarded.
    unsafe {
        let longest = queries.iter().map(|q| q.len).max().unwrap_or(0);
        let zero = S::splat(0.0);
        let scale = S::splat(scale);
        for p in 0..longest.div_ceil(16) {
            let keys = page(p);
            let mut sum = [zero; Q];
            for d in 0..dim {
                let k = E::load(keys.add(d * 16));
                for i in 0..Q {
                    sum[i] = S::fma(S::splat(*queries[i].q.add(d)), k, sum[i]);
                }
            }
            for i in 0..Q {
                // A shorter neighbour has no room for, and no interest in, pages past its own.
                if p * 16 < queries[i].len {
                    S::store(queries[i].scores.add(p * 16), S::mul(sum[i], scale));
                }
            }
        }
        let mut inverse = [0.0; Q];
        for i in 0..Q {
            inverse[i] = 1.0 / softmax::<S>(queries[i].scores, queries[i].len);
        }
        let shortest = queries.iter().map(|q| q.len).min().unwrap_or(0);
        let mut d = 0;
        while d < dim {
            // Twice the sums where there are registers for them.
            if 2 * Q <= S::TILE && d + 32 <= dim {
                weigh::<S, E, Q, 2>(&queries, &page, dim, d, shortest, &inverse);
                d += 32;
            } else {
                weigh::<S, E, Q, 1>(&queries, &page, dim, d, shortest, &inverse);
                d += 16;
            }
        }
    }
}

/// `16 * D` dimensions, from `d`, of the weighted sums of values.
#[inline(always)]
unsafe fn weigh<S: Simd, E: Element<S>, const Q: usize, const D: usize>(
    queries: &[Query; Q],
    page: &impl Fn(usize) -> *const E,
    dim: usize,
    d: usize,
    shortest: usize,
    inverse: &[f32; Q],
) {
    // SAFETY: forwarded.
    unsafe {
        let mut sum = [[S::splat(0.0); D]; Q];
        let mut position = 0;
        while position < shortest {
            let values = page(position / 16).add(16 * dim + d);
            let end = (shortest - position).min(16);
            for j in 0..end {
                let mut v = [S::splat(0.0); D];
                for c in 0..D {
                    v[c] = E::load(values.add(j * dim + c * 16));
                }
                for i in 0..Q {
                    let p = S::splat(*queries[i].scores.add(position + j));
                    for c in 0..D {
                        sum[i][c] = S::fma(p, v[c], sum[i][c]);
                    }
                }
            }
            position += end;
        }
        for i in 0..Q {
            for position in shortest..queries[i].len {
                let values = page(position / 16).add(16 * dim + position % 16 * dim + d);
                let p = S::splat(*queries[i].scores.add(position));
                for c in 0..D {
                    sum[i][c] = S::fma(p, E::load(values.add(c * 16)), sum[i][c]);
                }
            }
            for c in 0..D {
                S::store(
                    queries[i].out.add(d + c * 16),
                    S::mul(sum[i][c], S::splat(inverse[i])),
                );
            }
        }
    }
}
