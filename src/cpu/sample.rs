//! Prepares a row of logits for a random draw: the largest logit, and every token's weight and bucket.

use std::ops::ControlFlow;
use std::sync::OnceLock;

use super::generic::sample::WEIGHT_BITS;
use super::level::Level;
use super::table::Table;
use crate::base::Result;

/// Number of buckets in the ranking: a less probable token never has a smaller bucket.
pub const BUCKETS: usize = 2048;
/// Buckets per halving of a token's probability. The last bucket also holds all tokens with weight 0.
const BUCKETS_PER_HALVING: f32 = BUCKETS as f32 / WEIGHT_BITS as f32;

/// The bucket of a logarithm to base 2 relative to that of the most probable token.
pub fn bucket(log: f32) -> usize {
    // Through i32, for which there are vector instructions.
    (-log * BUCKETS_PER_HALVING).min((BUCKETS - 1) as f32) as i32 as usize
}

/// Position of a float among all numbers, with -0 below +0.
pub fn place(x: f32) -> i32 {
    let bits = x.to_bits().cast_signed();
    bits ^ ((bits >> 31).cast_unsigned() >> 1).cast_signed()
}

/// The largest logit, or the index of the first that is NaN or plus infinity.
pub fn largest(logits: &[f32]) -> ControlFlow<usize, f32> {
    const INFINITY: u32 = f32::INFINITY.to_bits();
    let unusable = |x: f32| x.to_bits() == INFINITY || x.to_bits() & (u32::MAX >> 1) > INFINITY;
    // Without an early exit, and on integers, so that both loops are vectorized.
    if logits.iter().fold(false, |any, &x| any | unusable(x)) {
        let first = logits.iter().position(|&x| unusable(x));
        return ControlFlow::Break(first.unwrap_or(0));
    }
    let top = logits
        .iter()
        .fold(place(f32::NEG_INFINITY), |top, &x| top.max(place(x)));
    // This mapping is its own inverse.
    let bits = top ^ ((top >> 31).cast_unsigned() >> 1).cast_signed();
    ControlFlow::Continue(f32::from_bits(bits.cast_unsigned()))
}

/// Computes for every logit its logarithm to base 2 relative to `largest`, `(x - largest) * scale`, and 2 to that power times 2^40, whose
/// integer part is its weight. All slices have the same length. The bits are the same on every level and on a GPU.
pub fn weigh(
    logits: &[f32],
    largest: f32,
    scale: f32,
    logs: &mut [f32],
    weights: &mut [f32],
) -> Result<()> {
    static TABLE: OnceLock<&Table> = OnceLock::new();
    let table = match TABLE.get() {
        Some(table) => table,
        None => {
            let table = Table::of(Level::choose()?);
            TABLE.get_or_init(|| table)
        }
    };
    assert!(logs.len() == logits.len() && weights.len() == logits.len());
    let whole = logits.len() / 16 * 16;
    let (x, rest) = logits.split_at(whole);
    // SAFETY: the level is present; `whole` elements, a multiple of 16, are behind each pointer, 16 behind each of the second call.
    unsafe {
        let (to, powers) = (logs.as_mut_ptr(), weights.as_mut_ptr());
        (table.weigh)(x.as_ptr(), whole, largest, scale, to, powers);
        let (mut x, mut last, mut powers) = ([f32::NEG_INFINITY; 16], [0.0; 16], [0.0; 16]);
        x[..rest.len()].copy_from_slice(rest);
        let (to, from) = (last.as_mut_ptr(), powers.as_mut_ptr());
        (table.weigh)(x.as_ptr(), 16, largest, scale, to, from);
        logs[whole..].copy_from_slice(&last[..rest.len()]);
        weights[whole..].copy_from_slice(&powers[..rest.len()]);
    }
    Ok(())
}
