//! Which experts of a mixture a token goes to, and with what weights.

use crate::base::error::{Result, bail};

/// The rows that each expert takes.
#[derive(Clone, Debug, PartialEq)]
pub struct Routes {
    /// For each expert: the indices of its rows in ascending order, and its weight in the sum of each.
    by_expert: Vec<Vec<(usize, f32)>>,
}

impl Routes {
    /// The rows of each expert, in order, and its weight in the sum of each.
    pub fn experts(&self) -> &[Vec<(usize, f32)>] {
        &self.by_expert
    }

    /// The rows of an expert, in order, and its weight in the sum of each.
    pub fn rows_of(&self, expert: usize) -> &[(usize, f32)] {
        &self.by_expert[expert]
    }
}

/// Routes each row by its logits, `[rows, count]`, to its top `per_token` experts, weighted with their softmax probabilities
/// over all experts. Of equal logits the lower index wins. `normalized` divides the weights of a row by their sum.
pub fn route(logits: &[f32], count: usize, per_token: usize, normalized: bool) -> Result<Routes> {
    if per_token == 0 || per_token > count || !logits.len().is_multiple_of(count) {
        bail!(
            InvalidArgument,
            "{} logits of {count} experts, of which {per_token} are chosen; there must be whole rows, and enough experts",
            logits.len()
        );
    }
    let mut by_expert = vec![Vec::new(); count];
    let mut order: Vec<usize> = Vec::with_capacity(count);
    for (row, logits) in logits.chunks_exact(count).enumerate() {
        if let Some(expert) = logits.iter().position(|l| !l.is_finite()) {
            bail!(
                InvalidArgument,
                "the router gives expert {expert} a logit of {}, by which nothing can be chosen",
                logits[expert]
            );
        }
        order.clear();
        order.extend(0..count);
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        let largest = logits[order[0]];
        let sum: f32 = logits.iter().map(|l| (l - largest).exp()).sum();
        let chosen = &order[..per_token];
        let probability = |expert: usize| (logits[expert] - largest).exp() / sum;
        let total: f32 = match normalized {
            true => chosen.iter().map(|&expert| probability(expert)).sum(),
            false => 1.0,
        };
        for &expert in chosen {
            by_expert[expert].push((row, probability(expert) / total));
        }
    }
    Ok(Routes { by_expert })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;

    #[test]
    fn the_most_probable_are_chosen_and_of_equals_the_first() {
        let third = (1.0f32 / 3.0).ln();
        // Probabilities 3, 1, 1, 3 of 8, and two of four equals.
        let logits = [0.0, third, third, 0.0, 1.0, 1.0, 1.0, 1.0];
        let routes = route(&logits, 4, 2, false).unwrap();
        let close = |a: &[(usize, f32)], b: &[(usize, f32)]| {
            assert_eq!(a.len(), b.len());
            for (a, b) in a.iter().zip(b) {
                assert!(a.0 == b.0 && (a.1 - b.1).abs() < 1e-6, "{a:?} {b:?}");
            }
        };
        close(routes.rows_of(0), &[(0, 0.375), (1, 0.25)]);
        close(routes.rows_of(1), &[(1, 0.25)]);
        close(routes.rows_of(2), &[]);
        close(routes.rows_of(3), &[(0, 0.375)]);
        let routes = route(&logits, 4, 2, true).unwrap();
        close(routes.rows_of(0), &[(0, 0.5), (1, 0.5)]);
    }

    #[test]
    fn refusals() {
        let invalid = ErrorKind::InvalidArgument;
        expect_kind(route(&[0.0; 4], 4, 5, true), invalid, "4 logits of 4");
        expect_kind(route(&[0.0; 5], 4, 1, true), invalid, "5 logits of 4");
        let nan = [0.0, f32::NAN];
        expect_kind(route(&nan, 2, 1, true), invalid, "expert 1 a logit of NaN");
    }
}
