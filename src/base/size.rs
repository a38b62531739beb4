//! Checked arithmetic on sizes that come from files and from callers.

use super::error::{Result, err};

/// The product of `factors`, or an error that names `what`.
pub fn product(what: &str, factors: &[usize]) -> Result<usize> {
    factors
        .iter()
        .try_fold(1usize, |acc, &f| acc.checked_mul(f))
        .ok_or_else(|| {
            err!(
                InvalidArgument,
                "{what}: the product of {factors:?} overflows"
            )
        })
}

/// `n` rounded up to a multiple of `multiple`. Panics in debug builds if that overflows: check the size first.
pub const fn round_up(n: usize, multiple: usize) -> usize {
    n.div_ceil(multiple) * multiple
}
