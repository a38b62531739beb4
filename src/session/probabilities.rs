//! Log-probabilities of tokens by a model's own logits: of a chosen token, and of the most probable ones.

use crate::base::Result;
use crate::base::error::bail;

/// Largest number of most probable tokens that are reported with a token.
pub const MOST_TOP: usize = 20;

/// Fails for more than [`MOST_TOP`] most probable tokens.
pub(super) fn check_top(top: Option<usize>) -> Result<()> {
    match top {
        Some(count) if count > MOST_TOP => bail!(
            InvalidArgument,
            "log-probabilities of the {count} most probable tokens; expected at most {MOST_TOP}"
        ),
        _ => Ok(()),
    }
}

/// Natural logarithms of the probabilities of a chosen token and of the most probable ones, in the model's own distribution, before
/// adjustments, grammars and sampling settings.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenProbabilities {
    /// The log-probability of the chosen token.
    pub chosen: f32,
    /// The most probable tokens, in descending order; of equal ones the lower id first.
    pub top: Vec<u32>,
    /// The log-probabilities of the tokens in `top`.
    pub top_log_probabilities: Vec<f32>,
}

impl TokenProbabilities {
    /// The log-probabilities of `token` and of the `top` most probable tokens.
    pub(super) fn of(logits: &[f32], token: u32, top: usize) -> Self {
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&l| f64::from(l - most).exp()).sum();
        let log_sum = sum.ln();
        let log_probability =
            |token: u32| (f64::from(logits[token as usize] - most) - log_sum) as f32;
        let top = largest(logits, top);
        TokenProbabilities {
            chosen: log_probability(token),
            top_log_probabilities: top.iter().map(|&token| log_probability(token)).collect(),
            top,
        }
    }
}

/// The tokens with the `count` largest logits, in descending order; of equal ones the lower id first.
fn largest(logits: &[f32], count: usize) -> Vec<u32> {
    let mut found: Vec<u32> = Vec::with_capacity(count + 1);
    for (token, &logit) in (0u32..).zip(logits) {
        let logit_of = |token: u32| logits[token as usize];
        if found.len() == count && found.last().is_none_or(|&last| logit <= logit_of(last)) {
            continue;
        }
        let place = found.partition_point(|&other| logit_of(other) >= logit);
        found.insert(place, token);
        found.truncate(count);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::random;

    fn log_probability(logits: &[f32], token: u32) -> f32 {
        TokenProbabilities::of(logits, token, 0).chosen
    }

    #[test]
    fn log_probabilities_are_those_of_the_softmax() {
        let logits = [0.0, 1.0, f32::NEG_INFINITY, 3.0];
        let sum = 1.0 + 1f64.exp() + 3f64.exp();
        for (token, expected) in [(0, -sum.ln()), (3, 3.0 - sum.ln())] {
            assert!((f64::from(log_probability(&logits, token)) - expected).abs() < 1e-6);
        }
        assert_eq!(log_probability(&logits, 2), f32::NEG_INFINITY);
        // Large ones do not overflow.
        assert_eq!(log_probability(&[1e38, -1e38], 0), 0.0);
    }

    #[test]
    fn the_largest_are_those_of_sorting() {
        for case in 0..200u64 {
            let logit = |i| match random::bits(case, i) % 50 {
                0 => f32::NEG_INFINITY,
                x => x as f32 / 4.0,
            };
            let logits: Vec<f32> = (0..case % 90).map(logit).collect();
            let mut sorted: Vec<u32> = (0..logits.len() as u32).collect();
            sorted.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
            for count in [0, 1, 5, MOST_TOP] {
                let expected = &sorted[..count.min(sorted.len())];
                assert_eq!(largest(&logits, count), expected, "{case}");
            }
        }
        assert!(check_top(Some(MOST_TOP)).is_ok() && check_top(None).is_ok());
        let e = check_top(Some(MOST_TOP + 1)).unwrap_err();
        assert!(e.message().contains("the 21 most"), "{e}");
    }
}
