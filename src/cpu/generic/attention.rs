//! Causal attention of a few queries over one key/value head, in the layout of [`crate::cpu::kv`]: scores for sixteen
//! positions at a time, softmax, then the weighted sum of values in order of position. Each query is computed in the same
//! order whatever its neighbours, so prefill and decode agree bit for bit.

use std::ops::Range;

use super::pointwise::{soft_cap, softmax};
use crate::cpu::simd::Simd;

/// An element type of cached keys and values.
///
/// # Safety
/// As for [`Simd`]: implementations read exactly 16 elements with instructions of its level.
pub(in crate::cpu) unsafe trait Element<S: Simd>: Copy {
    /// Reads 16 elements as `f32`, without their scales.
    unsafe fn load(p: *const Self) -> S::V;

    /// The scales of the sixteen keys of a page of a head, and those of its values; `None` for types without scales.
    #[inline(always)]
    unsafe fn scales(_page: *const Self, _dim: usize) -> Option<[S::V; 2]> {
        None
    }
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
// SAFETY: reads exactly 16 e4m3 codes, and the scales that follow those of a page.
unsafe impl<S: Simd> Element<S> for u8 {
    #[inline(always)]
    unsafe fn load(p: *const u8) -> S::V {
        // SAFETY: forwarded.
        unsafe { S::load_signed_e4m3(p) }
    }
    #[inline(always)]
    unsafe fn scales(page: *const u8, dim: usize) -> Option<[S::V; 2]> {
        // SAFETY: forwarded; the codes are followed by 32 scales.
        unsafe {
            let scales = page.add(32 * dim).cast::<f32>();
            Some([S::load(scales), S::load(scales.add(16))])
        }
    }
}

/// One query: its vector, the positions `start..len` that it sees, the place for scores of positions `0..len` (with room for 16 more), the
/// place for its result, and the sink of its head: a score without a value.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Query {
    pub q: *const f32,
    pub start: usize,
    pub len: usize,
    pub scores: *mut f32,
    pub out: *mut f32,
    pub sink: Option<f32>,
}

/// Transformation of query-key products before the softmax.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Scores {
    pub scale: f32,
    /// Soft cap of the scores: `cap * tanh(score / cap)`.
    pub cap: Option<f32>,
}

/// `Q` queries over the pages of one head. `page(i)` is page `i`: keys `[dim][16]`, then values `[16][dim]`, then scales, if there are any.
///
/// # Safety
/// As for [`Simd`]; every query sees at least one position, `dim` is a multiple of 16, and pages cover the longest query.
#[inline(always)]
pub(in crate::cpu) unsafe fn attend<S: Simd, E: Element<S>, const Q: usize>(
    queries: [Query; Q],
    page: impl Fn(usize) -> *const E,
    dim: usize,
    scores: Scores,
) {
    // SAFETY: forwarded.
    unsafe {
        let longest = queries.iter().map(|q| q.len).max().unwrap_or(0);
        let earliest = queries.iter().map(|q| q.start).min().unwrap_or(0);
        let zero = S::splat(0.0);
        let scale = S::splat(scores.scale);
        for p in earliest / 16..longest.div_ceil(16) {
            let keys = page(p);
            let mut sum = [zero; Q];
            for d in 0..dim {
                let k = E::load(keys.add(d * 16));
                for i in 0..Q {
                    sum[i] = S::fma(S::splat(*queries[i].q.add(d)), k, sum[i]);
                }
            }
            let key_scales = E::scales(keys, dim).map(|[of_keys, _]| of_keys);
            for i in 0..Q {
                let mut score = S::mul(sum[i], scale);
                if let Some(scales) = key_scales {
                    score = S::mul(score, scales);
                }
                // A query that sees fewer positions needs no scores of later pages, and has no room for them.
                if p * 16 < queries[i].len {
                    S::store(queries[i].scores.add(p * 16), score);
                }
            }
        }
        let mut inverse = [0.0; Q];
        for i in 0..Q {
            let Query {
                start, len, sink, ..
            } = queries[i];
            let visible = queries[i].scores.add(start);
            if let Some(cap) = scores.cap {
                soft_cap::<S>(visible, cap, len - start);
            }
            inverse[i] = 1.0 / softmax::<S>(visible, len - start, sink);
        }
        // A probability times the scale of its value weighs the codes.
        for p in earliest / 16..longest.div_ceil(16) {
            if let Some([_, of_values]) = E::scales(page(p), dim) {
                for query in queries.iter().filter(|query| p * 16 < query.len) {
                    let weights = query.scores.add(p * 16);
                    S::store(weights, S::mul(S::load(weights), of_values));
                }
            }
        }
        let latest = queries.iter().map(|q| q.start).max().unwrap_or(0);
        let shortest = queries.iter().map(|q| q.len).min().unwrap_or(0);
        // Positions that all queries see, if any.
        let common = latest.min(shortest)..shortest;
        let mut d = 0;
        while d < dim {
            // Twice the accumulators, if there are registers for them.
            if 2 * Q <= S::TILE && d + 32 <= dim {
                weigh::<S, E, Q, 2>(&queries, &page, dim, d, &common, &inverse);
                d += 32;
            } else {
                weigh::<S, E, Q, 1>(&queries, &page, dim, d, &common, &inverse);
                d += 16;
            }
        }
    }
}

/// The weighted sums of values for `16 * D` dimensions from `d` on, in order of position; positions in `common` for all queries at once.
#[inline(always)]
unsafe fn weigh<S: Simd, E: Element<S>, const Q: usize, const D: usize>(
    queries: &[Query; Q],
    page: &impl Fn(usize) -> *const E,
    dim: usize,
    d: usize,
    common: &Range<usize>,
    inverse: &[f32; Q],
) {
    // SAFETY: forwarded.
    unsafe {
        let value = |position: usize| page(position / 16).add((16 + position % 16) * dim + d);
        let mut sum = [[S::splat(0.0); D]; Q];
        for i in 0..Q {
            add_values::<S, E, D>(
                &queries[i],
                &value,
                queries[i].start..common.start,
                &mut sum[i],
            );
        }
        let mut position = common.start;
        while position < common.end {
            let values = value(position);
            let count = (common.end - position).min(16 - position % 16);
            for j in 0..count {
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
            position += count;
        }
        for i in 0..Q {
            let rest = common.end.max(queries[i].start)..queries[i].len;
            add_values::<S, E, D>(&queries[i], &value, rest, &mut sum[i]);
            for c in 0..D {
                S::store(
                    queries[i].out.add(d + c * 16),
                    S::mul(sum[i][c], S::splat(inverse[i])),
                );
            }
        }
    }
}

/// Adds the weighted values of some positions for one query.
#[inline(always)]
unsafe fn add_values<S: Simd, E: Element<S>, const D: usize>(
    query: &Query,
    value: &impl Fn(usize) -> *const E,
    positions: Range<usize>,
    sum: &mut [S::V; D],
) {
    for position in positions {
        // SAFETY: forwarded.
        unsafe {
            let p = S::splat(*query.scores.add(position));
            for c in 0..D {
                sum[c] = S::fma(p, E::load(value(position).add(c * 16)), sum[c]);
            }
        }
    }
}
