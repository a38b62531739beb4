//! Scores of multiple-choice questions, as in lm-evaluation-harness: a model chooses the continuation with the highest probability, in
//! total (accuracy) or per byte (length-normalized accuracy). Knows no model.

use serde::Serialize;

/// Number of ways to choose: by the log-probability of a choice, and by that divided by the bytes of its text.
pub(super) const WAYS: usize = 2;

/// A question and a choice as one token sequence.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Continuation {
    /// Tokens of question and choice.
    pub(super) tokens: Vec<u32>,
    /// Index of the choice's first token.
    pub(super) first: usize,
    /// Bytes of the choice's text.
    pub(super) bytes: usize,
}

impl Continuation {
    /// Joins the tokens of a question with a choice, given those of the `question` alone. The choice begins where they differ: a tokenizer
    /// may join the end of the question with the beginning of the choice.
    pub(super) fn new(question: &[u32], tokens: Vec<u32>, bytes: usize) -> Continuation {
        let both = question.iter().zip(&tokens);
        // A choice has at least one token.
        let first = both.take_while(|(a, b)| a == b).count();
        Continuation {
            first: first.min(tokens.len().saturating_sub(1)),
            tokens,
            bytes,
        }
    }
}

/// The choices of a model, in each of the [`WAYS`]; the first one on a tie.
pub(super) fn chosen(log_probabilities: &[f64], bytes: &[usize]) -> [usize; WAYS] {
    let by_byte = log_probabilities.iter().zip(bytes);
    let by_byte: Vec<f64> = by_byte.map(|(sum, &n)| sum / n.max(1) as f64).collect();
    [largest(log_probabilities), largest(&by_byte)]
}

fn largest(values: &[f64]) -> usize {
    let mut largest = 0;
    for (i, value) in values.iter().enumerate() {
        if *value > values[largest] {
            largest = i;
        }
    }
    largest
}

/// A share of questions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Share {
    pub(super) share: f64,
    /// Standard error from the sample's deviation; `None` for a single question.
    pub(super) stderr: Option<f64>,
}

impl Share {
    /// The share of `hits` among `n` questions.
    pub(super) fn new(hits: usize, n: usize) -> Share {
        let share = hits as f64 / n as f64;
        Share {
            share,
            stderr: (n > 1).then(|| (share * (1.0 - share) / (n as f64 - 1.0)).sqrt()),
        }
    }
}

/// Share of questions on which two lists of choices agree, in one of the [`WAYS`].
pub(super) fn agreement(
    choices: &[[usize; WAYS]],
    way: usize,
    others: impl Iterator<Item = usize>,
) -> Share {
    let both = choices.iter().zip(others);
    let hits = both.filter(|(choice, other)| choice[way] == *other).count();
    Share::new(hits, choices.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_begins_where_the_question_ends() {
        let of = |question: &[u32], tokens: &[u32]| {
            Continuation::new(question, tokens.to_vec(), 1).first
        };
        assert_eq!(of(&[1, 2, 3], &[1, 2, 3, 4, 5]), 3);
        // The choice changed the last token of the question.
        assert_eq!(of(&[1, 2, 3], &[1, 2, 9, 5]), 2);
        // The whole choice merged into it.
        assert_eq!(of(&[1, 2, 3], &[1, 2]), 1);
        assert_eq!(of(&[1], &[2]), 0);
    }

    #[test]
    fn a_long_choice_wins_by_length() {
        let sums = [-4.0, -6.0, -4.0];
        assert_eq!(chosen(&sums, &[4, 12, 4]), [0, 1]);
        assert_eq!(chosen(&[-2.0, -1.0], &[1, 1]), [1, 1]);
    }

    #[test]
    fn shares_have_the_standard_error_of_a_sample() {
        // The mean of 1, 1, 1, 0 is 3/4, variance (3 (1/4)^2 + (3/4)^2) / 3 = 1/4, error sqrt(1/4 / 4).
        let share = Share::new(3, 4);
        assert_eq!(share.share, 0.75);
        assert!((share.stderr.unwrap() - 0.25).abs() < 1e-12);
        assert_eq!(Share::new(1, 1).stderr, None);
        let choices = [[0, 1], [2, 2], [1, 0]];
        assert_eq!(
            agreement(&choices, 0, [0, 1, 1].into_iter()).share,
            2.0 / 3.0
        );
        assert_eq!(
            agreement(&choices, 1, [0, 0, 0].into_iter()).share,
            1.0 / 3.0
        );
    }
}
