//! Checked arithmetic on sizes from files and callers, and human-readable sizes.

use super::error::{Result, err};

/// The product of `factors`; on overflow an error that names `what`.
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

/// `n` rounded up to a multiple of `multiple`. Panics in debug builds on overflow: check the size first.
pub const fn round_up(n: usize, multiple: usize) -> usize {
    n.div_ceil(multiple) * multiple
}

/// `bytes` in human-readable form: `1.5 GB`.
pub fn readable(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["kB", "MB", "GB", "TB"];
    let mut value = bytes as f64;
    let mut unit = "B";
    for next in UNITS {
        if value < 1000.0 {
            break;
        }
        value /= 1000.0;
        unit = next;
    }
    if unit == "B" {
        format!("{bytes} B")
    } else {
        format!("{value:.1} {unit}")
    }
}
