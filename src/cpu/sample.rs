//! What a draw needs of a row of logits: the largest, and every token's weight and bucket.

use std::ops::ControlFlow;
use std::sync::OnceLock;

use super::generic::sample::WEIGHT_BITS;
use super::level::Level;
use super::table::Table;
use crate::base::Result;

/// Parts of the ranking: a token's bucket is never smaller than that of a more probable one.
pub const BUCKETS: usize = 2048;
/// Buckets by which a token's probability halves. The last one also holds all that have a weight of 0.
const BUCKETS_PER_HALVING: f32 = BUCKETS as f32 / WEIGHT_BITS as f32;

/// The bucket of a logarithm to base 2 relative to that of the most probable token.
pub fn bucket(log: f32) -> usize {
    // Through i32, for which there are vector instructions.
    (-log * BUCKETS_PER_HALVING).min((BUCKETS - 1) as f32) as i32 as usize
}

/// A float's place among all that are numbers, -0 below +0.
pub fn place(x: f32) -> i32 {
    let bits = x.to_bits().cast_signed();
    bits ^ ((bits >> 31).cast_unsigned() >> 1).cast_signed()
}

/// The largest logit, or the index of the first that is not a number or plus infinity.
pub fn largest(logits: &[f32]) -> ControlFlow<usize, f32> {
    const INFINITY: u32 = f32::INFINITY.to_bits();
    let unusable = |x: f32| x.to_bits() == INFINITY || x.to_bits() & (u32::MAX >> 1) > INFINITY;
    // Without an early end, and in whole numbers: both loops then become vector instructions.
    if logits.iter().fold(false, |any, &x| any | unusable(x)) {
        let first = logits.iter().position(|&x| unusable(x));
        return ControlFlow::Break(first.unwrap_or(0));
    }
    let top = logits
        .iter()
        .fold(place(f32::NEG_INFINITY), |top, &x| top.max(place(x)));
    // Its own inverse.
    let bits = top ^ ((top >> 31).cast_unsigned() >> 1).cast_signed();
    ControlFlow::Continue(f32::from_bits(bits.cast_unsigned()))
}

/// For every logit its logarithm to base 2 relative to that of `largest`, which is `(x - largest) * scale`, and 2 to that power
/// times 2^40, of which the whole part is its weight. All slices are of one length. The same on every level and on a GPU.
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
