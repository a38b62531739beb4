//! Checked arithmetic on sizes that come from files and from callers, and sizes as people read them.

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

/// `bytes` for people: `1.5 GB`.
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
