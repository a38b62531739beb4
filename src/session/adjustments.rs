//! Changes of logits before a choice: biases, penalties by count, bad words, and a host's own processor. Logits are in host memory;
//! grammars and sampling settings apply afterwards.

use std::collections::HashMap;

use super::processor::{LogitsProcessor, check_left};
use crate::base::error::bail;
use crate::base::{ErrorKind, Result, memory};
use crate::model::{SamplingOptions, TokenMask};
use crate::ops::sample::penalize;

/// Changes of the logits, in the order of the fields. Grammars, the repetition penalty and temperature apply to the result.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogitAdjustments {
    /// Numbers added to the logits of tokens. Minus infinity excludes a token; several biases of one token add up.
    pub bias: Vec<(u32, f32)>,
    /// Subtracted from the logits of tokens that the generation has at least once.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token once for each time that the generation has it.
    pub frequency_penalty: f32,
    /// Token sequences that are not completed: where all but the last token of one are the end of the session's tokens, its last token is
    /// excluded.
    pub bad_words: Vec<Vec<u32>>,
    /// Tokens at the session's end that the repetition penalty counts; 0 for all.
    pub repetition_window: usize,
    /// A host's own change of the result. The repetition penalty then applies before it, and it sees minus infinity for tokens that a grammar
    /// excludes, which stay excluded.
    pub processor: Option<LogitsProcessor>,
}

impl LogitAdjustments {
    /// Whether they change nothing.
    pub fn is_none(&self) -> bool {
        self.bias.is_empty()
            && self.bad_words.is_empty()
            && !self.counts_tokens()
            && self.repetition_window == 0
            && self.processor.is_none()
    }

    /// Whether they depend on the generated tokens.
    fn counts_tokens(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Fails for penalties that are not finite, biases that are NaN or plus infinity, empty bad words, and ids outside a vocabulary of
    /// `vocabulary` tokens.
    pub fn check(&self, vocabulary: usize) -> Result<()> {
        let is_known = |token: u32| (token as usize) < vocabulary;
        for (name, value) in [
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ] {
            if !value.is_finite() {
                bail!(
                    InvalidArgument,
                    "{name} is {value}; it must be a finite number"
                );
            }
        }
        for (i, &(token, bias)) in self.bias.iter().enumerate() {
            if !is_known(token) {
                bail!(
                    InvalidArgument,
                    "logit bias {i} is of token {token}; the vocabulary has {vocabulary} tokens"
                );
            }
            if bias.is_nan() || bias == f32::INFINITY {
                bail!(
                    InvalidArgument,
                    "the logit bias of token {token} is {bias}; it must be a finite number, or minus infinity to exclude the token"
                );
            }
        }
        for (i, word) in self.bad_words.iter().enumerate() {
            if word.is_empty() {
                bail!(
                    InvalidArgument,
                    "bad word {i} is empty; it must have at least one token"
                );
            }
            if let Some(token) = word.iter().find(|&&token| !is_known(token)) {
                bail!(
                    InvalidArgument,
                    "bad word {i} has token {token}; the vocabulary has {vocabulary} tokens"
                );
            }
        }
        Ok(())
    }

    /// Fails for penalties by count, where `what` chooses a token that is part of no generation.
    pub fn check_without_counts(&self, what: &str) -> Result<()> {
        if self.counts_tokens() {
            bail!(
                InvalidArgument,
                "{what} is part of no generation whose tokens presence_penalty {} and frequency_penalty {} could count; pass what they subtract as logit bias",
                self.presence_penalty,
                self.frequency_penalty
            );
        }
        Ok(())
    }

    /// Changes `logits`, one for each token of the vocabulary. `tokens` are those before the choice, and `counts` those of the generation.
    fn apply(&self, logits: &mut [f32], tokens: &[u32], counts: &HashMap<u32, u32>) {
        for &(token, bias) in &self.bias {
            change(logits, token, bias);
        }
        for (&token, &count) in counts {
            let penalty = self.presence_penalty + self.frequency_penalty * count as f32;
            change(logits, token, -penalty.clamp(f32::MIN, f32::MAX));
        }
        for word in &self.bad_words {
            if let Some((&last, prefix)) = word.split_last()
                && tokens.ends_with(prefix)
            {
                change(logits, last, f32::NEG_INFINITY);
            }
        }
    }
}

/// Adds `by` to the logit of `token`. Finite numbers have a finite sum.
fn change(logits: &mut [f32], token: u32, by: f32) {
    if let Some(logit) = logits.get_mut(token as usize) {
        *logit = match logit.is_finite() && by.is_finite() {
            true => (*logit + by).clamp(f32::MIN, f32::MAX),
            false if *logit == f32::NEG_INFINITY => f32::NEG_INFINITY,
            false => *logit + by,
        };
    }
}

/// The adjustments of one generation, or of one choice, with the tokens that it has counted.
#[derive(Debug)]
pub(super) struct Adjuster<'a> {
    adjustments: &'a LogitAdjustments,
    /// The repetition penalty, which applies here if a processor follows.
    repetition_penalty: f32,
    counts: HashMap<u32, u32>,
    /// Tokens of the generation, for a processor.
    generated: Vec<u32>,
    logits: Vec<f32>,
    /// Whether the last choice failed by what a processor wrote.
    is_refused: bool,
}

impl<'a> Adjuster<'a> {
    /// An adjuster before the first token, for choices by `sampling`; `None` if it would change nothing.
    pub(super) fn new(
        adjustments: &'a LogitAdjustments,
        sampling: &SamplingOptions,
    ) -> Option<Self> {
        (!adjustments.is_none()).then(|| Adjuster {
            adjustments,
            repetition_penalty: sampling.repetition_penalty,
            counts: HashMap::new(),
            generated: Vec::new(),
            logits: Vec::new(),
            is_refused: false,
        })
    }

    /// Records a token of the generation.
    pub(super) fn push(&mut self, token: u32) -> Result<()> {
        if self.adjustments.counts_tokens() {
            *self.counts.entry(token).or_default() += 1;
        }
        if self.has_processor() {
            memory::make_room(&mut self.generated, 1)?;
            self.generated.push(token);
        }
        Ok(())
    }

    /// Whether it calls the host.
    pub(super) fn has_processor(&self) -> bool {
        self.adjustments.processor.is_some()
    }

    /// Whether the last choice failed by what a processor wrote.
    pub(super) fn is_refused(&self) -> bool {
        self.is_refused
    }

    /// The tokens among `tokens` that a repetition penalty has yet to find: none if it has been applied here.
    pub(super) fn unpenalized<'t>(&self, tokens: &'t [u32]) -> &'t [u32] {
        match self.has_processor() {
            true => &[],
            false => self.window(tokens),
        }
    }

    /// The tokens among `tokens` that a repetition penalty counts.
    fn window<'t>(&self, tokens: &'t [u32]) -> &'t [u32] {
        match self.adjustments.repetition_window {
            0 => tokens,
            window => &tokens[tokens.len().saturating_sub(window)..],
        }
    }

    /// Adjusts `logits`, a copy of the model's `own`, in place for a choice after `tokens` among those that `allowed` allows. Fails if a
    /// processor ends the generation, or leaves nothing to choose from.
    pub(super) fn adjust(
        &self,
        logits: &mut [f32],
        own: &[f32],
        tokens: &[u32],
        allowed: Option<TokenMask<'_>>,
    ) -> Result<()> {
        self.adjustments.apply(logits, tokens, &self.counts);
        let Some(processor) = &self.adjustments.processor else {
            return Ok(());
        };
        let exclude = |logits: &mut [f32]| {
            if let Some(allowed) = allowed {
                allowed.apply(logits);
            }
        };
        if self.repetition_penalty != 1.0 {
            let counted = self.window(tokens);
            penalize(logits, counted, self.repetition_penalty, &mut Vec::new());
        }
        exclude(logits);
        processor.process(logits, own, &self.generated, tokens.len())?;
        exclude(logits);
        check_left(logits, tokens.len())
    }

    /// The adjusted copy of the model's `own` logits, for a choice after `tokens` among those that `allowed` allows.
    pub(super) fn adjusted(
        &mut self,
        own: &[f32],
        tokens: &[u32],
        allowed: Option<TokenMask<'_>>,
    ) -> Result<&[f32]> {
        let mut logits = std::mem::take(&mut self.logits);
        logits.clear();
        memory::make_room(&mut logits, own.len())?;
        logits.extend_from_slice(own);
        let done = self.adjust(&mut logits, own, tokens, allowed);
        self.logits = logits;
        let refuses = |kind: ErrorKind| kind == ErrorKind::InvalidArgument;
        self.is_refused = done.as_ref().is_err_and(|e| refuses(e.kind()));
        done.map(|()| &*self.logits)
    }
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use super::*;
    use crate::base::ErrorKind;

    const NEVER: f32 = f32::NEG_INFINITY;

    #[test]
    fn the_repetition_penalty_counts_the_tokens_of_its_window() {
        let tokens = [4, 1, 2];
        for (window, counted) in [(0, 3), (1, 1), (2, 2), (3, 3), (usize::MAX, 3)] {
            let mut adjustments = LogitAdjustments {
                bias: vec![(0, 1.0)],
                repetition_window: window,
                ..LogitAdjustments::default()
            };
            let sampling = SamplingOptions {
                repetition_penalty: 2.0,
                ..SamplingOptions::GREEDY
            };
            let adjuster = Adjuster::new(&adjustments, &sampling).unwrap();
            assert_eq!(adjuster.unpenalized(&tokens), &tokens[3 - counted..]);
            // Before a processor it applies here.
            adjustments.processor = Some(LogitsProcessor::new(|_, _| ControlFlow::Continue(())));
            let mut adjuster = Adjuster::new(&adjustments, &sampling).unwrap();
            assert!(adjuster.unpenalized(&tokens).is_empty());
            let mut expected = [1.0; 5];
            expected[0] = 2.0;
            for &token in &tokens[3 - counted..] {
                expected[token as usize] = 0.5;
            }
            assert_eq!(
                adjuster.adjusted(&[1.0; 5], &tokens, None).unwrap(),
                expected
            );
        }
        let window = LogitAdjustments {
            repetition_window: 64,
            ..LogitAdjustments::default()
        };
        assert!(Adjuster::new(&window, &SamplingOptions::GREEDY).is_some());
    }

    #[test]
    fn the_formula_of_biases_and_penalties() {
        let adjustments = LogitAdjustments {
            bias: vec![(0, 1.5), (2, NEVER), (0, 0.5), (5, 1.0)],
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            ..LogitAdjustments::default()
        };
        let mut adjuster = Adjuster::new(&adjustments, &SamplingOptions::GREEDY).unwrap();
        [1, 3, 3, 4, 4, 4]
            .into_iter()
            .for_each(|token| adjuster.push(token).unwrap());
        let logits = [1.0, 1.0, 1.0, -1.0, NEVER, 0.0];
        // Tokens before the generation count for nothing.
        let adjusted = adjuster.adjusted(&logits, &[5, 5, 1], None).unwrap();
        assert_eq!(adjusted, [3.0, 0.25, NEVER, -2.0, NEVER, 1.0]);
        // A negative penalty makes its tokens more probable.
        let negative = LogitAdjustments {
            frequency_penalty: -2.0,
            ..LogitAdjustments::default()
        };
        let mut adjuster = Adjuster::new(&negative, &SamplingOptions::GREEDY).unwrap();
        [1, 1]
            .into_iter()
            .for_each(|token| adjuster.push(token).unwrap());
        assert_eq!(
            adjuster.adjusted(&[0.0, 0.0], &[], None).unwrap(),
            [0.0, 4.0]
        );
    }

    #[test]
    fn bad_words_are_excluded_where_their_beginning_stands() {
        let adjustments = LogitAdjustments {
            bad_words: vec![vec![0], vec![1, 2], vec![1, 1, 3]],
            ..LogitAdjustments::default()
        };
        let mut adjuster = Adjuster::new(&adjustments, &SamplingOptions::GREEDY).unwrap();
        let mut excluded = |tokens: &[u32]| -> Vec<usize> {
            let adjusted = adjuster.adjusted(&[0.0; 5], tokens, None).unwrap();
            (0..5).filter(|&i| adjusted[i] == NEVER).collect()
        };
        assert_eq!(excluded(&[]), [0]);
        assert_eq!(excluded(&[1]), [0, 2]);
        assert_eq!(excluded(&[4, 1, 1]), [0, 2, 3]);
        assert_eq!(excluded(&[1, 1, 4]), [0]);
    }

    #[test]
    fn adjusted_logits_stay_usable() {
        let mut logits = [f32::MAX, f32::MIN, NEVER, f32::NAN];
        change(&mut logits, 0, f32::MAX);
        change(&mut logits, 1, f32::MIN);
        change(&mut logits, 2, f32::MAX);
        change(&mut logits, 9, 1.0);
        assert_eq!(logits[..3], [f32::MAX, f32::MIN, NEVER]);
        change(&mut logits, 1, NEVER);
        assert_eq!(logits[1], NEVER);
        // A NaN of the model stays visible.
        change(&mut logits, 3, 1.0);
        assert!(logits[3].is_nan());
    }

    #[test]
    fn refusals() {
        let refused = |adjustments: LogitAdjustments, expected: &str| {
            let e = adjustments.check(10).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidArgument);
            assert!(e.message().contains(expected), "{e}");
            assert!(!adjustments.is_none());
        };
        let bias = |token, bias| LogitAdjustments {
            bias: vec![(0, 0.0), (token, bias)],
            ..LogitAdjustments::default()
        };
        refused(bias(10, 1.0), "logit bias 1 is of token 10");
        refused(bias(3, f32::NAN), "token 3 is NaN");
        refused(bias(3, f32::INFINITY), "token 3 is inf");
        assert!(bias(9, NEVER).check(10).is_ok());
        let words = |word: &[u32]| LogitAdjustments {
            bad_words: vec![vec![1, 2], word.to_vec()],
            ..LogitAdjustments::default()
        };
        refused(words(&[]), "bad word 1 is empty");
        refused(words(&[1, 10]), "bad word 1 has token 10");
        for penalty in [f32::NAN, f32::INFINITY] {
            let presence = LogitAdjustments {
                presence_penalty: penalty,
                ..LogitAdjustments::default()
            };
            refused(presence.clone(), "presence_penalty is");
            let frequency = LogitAdjustments {
                frequency_penalty: penalty,
                ..LogitAdjustments::default()
            };
            refused(frequency, "frequency_penalty is");
            let e = presence.check_without_counts("a step").unwrap_err();
            assert!(e.message().starts_with("a step is part"), "{e}");
        }
        assert!(bias(1, 1.0).check_without_counts("a step").is_ok());
        assert!(LogitAdjustments::default().is_none());
    }
}
