//! Statistics over the tokens of a comparison.

use serde::Serialize;

use super::predictions::TokenComparison;

/// Statistics over all tokens of a comparison.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Mean KL(reference || examined), in nats a token.
    #[serde(rename = "kl_divergence")]
    pub mean: f64,
    /// Its median over tokens.
    #[serde(rename = "kl_median")]
    pub median: f64,
    /// Its 99th percentile: the smallest value that 99 % of tokens do not exceed.
    #[serde(rename = "kl_p99")]
    pub p99: f64,
    /// The largest.
    #[serde(rename = "kl_max")]
    pub max: f64,
    /// The share of tokens for which both models have the same most likely token.
    pub same_top: f64,
    /// Perplexity of the examined model.
    pub perplexity: f64,
    /// Perplexity of the reference.
    pub reference_perplexity: f64,
}

impl Summary {
    /// Summarizes tokens, which must not be empty.
    pub fn new(tokens: &[TokenComparison]) -> Summary {
        let mut sorted: Vec<f64> = tokens.iter().map(|t| t.divergence).collect();
        sorted.sort_unstable_by(f64::total_cmp);
        let Some(&max) = sorted.last() else {
            return Summary::default();
        };
        let n = sorted.len();
        let mean =
            |of: &dyn Fn(&TokenComparison) -> f64| tokens.iter().map(of).sum::<f64>() / n as f64;
        Summary {
            mean: mean(&|t| t.divergence),
            median: (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0,
            p99: sorted[(99 * n).div_ceil(100) - 1],
            max,
            same_top: mean(&|t| f64::from(u8::from(t.same_top()))),
            perplexity: mean(&|t| t.losses[0]).exp(),
            reference_perplexity: mean(&|t| t.losses[1]).exp(),
        }
    }
}

/// Tokens predicted from a range of positions in their windows.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PositionRange {
    /// The first position.
    pub first: usize,
    /// The last position in the range from which a token was predicted.
    pub last: usize,
    /// Number of tokens.
    pub tokens: usize,
    /// Mean KL(reference || examined), in nats a token.
    #[serde(rename = "kl_divergence")]
    pub divergence: f64,
}

/// Number of positions in the first range.
const FIRST_RANGE: usize = 16;

/// The mean divergence in ranges of positions, 0 to 15, 16 to 31, 32 to 63 and so on, as far as there are tokens.
pub fn by_position(tokens: &[TokenComparison]) -> Vec<PositionRange> {
    let mut ranges: Vec<PositionRange> = Vec::new();
    for token in tokens {
        let index = (token.position / FIRST_RANGE).checked_ilog2();
        let index = index.map_or(0, |log| log as usize + 1);
        while ranges.len() <= index {
            let first = match ranges.len() {
                0 => 0,
                index => FIRST_RANGE << (index - 1),
            };
            ranges.push(PositionRange {
                first,
                last: first,
                tokens: 0,
                divergence: 0.0,
            });
        }
        let range = &mut ranges[index];
        range.last = range.last.max(token.position);
        range.tokens += 1;
        range.divergence += token.divergence;
    }
    ranges.retain(|range| range.tokens > 0);
    for range in &mut ranges {
        range.divergence /= range.tokens as f64;
    }
    ranges
}

/// The `count` tokens with the largest divergences, the largest first; of equal ones the earlier first.
pub fn worst(tokens: &[TokenComparison], count: usize) -> Vec<TokenComparison> {
    let mut order: Vec<&TokenComparison> = tokens.iter().collect();
    order.sort_by(|a, b| b.divergence.total_cmp(&a.divergence));
    order.into_iter().take(count).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::super::predictions::LIKELY;
    use super::*;

    fn token(position: usize, divergence: f64, top: u32) -> TokenComparison {
        TokenComparison {
            window: 0,
            position,
            token: 1,
            divergence,
            losses: [1.0, 2.0],
            likely: [[(0, 0.5); LIKELY], [(top, 0.5); LIKELY]],
        }
    }

    #[test]
    fn summaries_by_hand() {
        let tokens: Vec<_> = (1..=200)
            .map(|i| token(i, i as f64, u32::from(i > 50)))
            .collect();
        let summary = Summary::new(&tokens);
        assert_eq!(summary.mean, 100.5);
        assert_eq!(summary.median, 100.5);
        assert_eq!((summary.p99, summary.max), (198.0, 200.0));
        assert_eq!(summary.same_top, 0.25);
        assert_eq!(summary.perplexity, 1f64.exp());
        assert_eq!(summary.reference_perplexity, 2f64.exp());
        assert_eq!(Summary::new(&tokens[..3]).median, 2.0);
        assert_eq!(Summary::new(&tokens[..1]).p99, 1.0);
    }

    #[test]
    fn positions_are_in_ranges_of_powers_of_two() {
        let at = [0, 15, 16, 31, 32, 63, 64, 130];
        let tokens: Vec<_> = at.iter().map(|&p| token(p, p as f64, 0)).collect();
        let found: Vec<_> = by_position(&tokens)
            .iter()
            .map(|r| (r.first, r.last, r.tokens, r.divergence))
            .collect();
        assert_eq!(
            found,
            [
                (0, 15, 2, 7.5),
                (16, 31, 2, 23.5),
                (32, 63, 2, 47.5),
                (64, 64, 1, 64.0),
                (128, 130, 1, 130.0)
            ]
        );
    }

    #[test]
    fn the_worst_come_first() {
        let tokens = [1.0, 3.0, 2.0, 3.0].map(|d| token((d * 10.0) as usize, d, 0));
        let found = worst(&tokens, 3);
        assert_eq!(found, [tokens[1], tokens[3], tokens[2]]);
        assert_eq!(worst(&tokens, 9).len(), 4);
    }
}
