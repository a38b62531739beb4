//! Changes of logits before a choice: biases, penalties, exclusions, filters, and a host's own processor. Logits are in host memory; grammars
//! and sampling settings apply afterwards.

use std::collections::HashMap;
use std::sync::Arc;

use super::filters::{Softmax, top_n_sigma};
use super::processor::{LogitsProcessor, check_left};
use super::repetition::{Dry, Repeats};
use crate::base::error::bail;
use crate::base::{ErrorKind, Result, memory};
use crate::engine::Served;
use crate::model::{Choice, SamplingOptions};
use crate::ops::sample::penalize;
use crate::text::Tokenizer;

/// Changes of the logits, in the order of the fields. Grammars apply after the exclusions, and temperature to the result.
#[derive(Clone, Debug, PartialEq)]
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
    /// Tokens that would complete a sequence of this many tokens which the session has already are excluded; 0 for none.
    pub no_repeat_ngram_size: usize,
    /// Tokens of a generation before which those that end it are excluded, and stop strings are not looked for. A grammar that has no
    /// other way to go on ends the text all the same.
    pub min_tokens: usize,
    /// Tokens at the session's end that the repetition penalty counts; 0 for all. That penalty comes next.
    pub repetition_window: usize,
    /// Penalties of tokens that would extend a repetition.
    pub dry: Dry,
    /// A host's own change of the result. It sees minus infinity for tokens that a grammar excludes, which stay excluded.
    pub processor: Option<LogitsProcessor>,
    /// Excludes tokens whose logit is more than this many standard deviations below the largest; 0 excludes none.
    pub top_n_sigma: f32,
    /// Keeps the tokens whose surprise is nearest to the entropy, as many as reach this probability together; 1 keeps all.
    pub typical_p: f32,
    /// Probability with which a choice excludes the most probable tokens; 0 for never.
    pub xtc_probability: f32,
    /// Tokens with at least this probability are then excluded, but for the least probable of them.
    pub xtc_threshold: f32,
}

impl Default for LogitAdjustments {
    fn default() -> Self {
        LogitAdjustments {
            bias: Vec::new(),
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            bad_words: Vec::new(),
            no_repeat_ngram_size: 0,
            min_tokens: 0,
            repetition_window: 0,
            dry: Dry::default(),
            processor: None,
            top_n_sigma: 0.0,
            typical_p: 1.0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
        }
    }
}

impl LogitAdjustments {
    /// Whether they change nothing before a choice by `sampling`.
    pub fn is_none(&self, sampling: &SamplingOptions) -> bool {
        self.are_over(sampling, 0)
    }

    /// Whether they change nothing once a generation has `generated` tokens.
    pub(super) fn are_over(&self, sampling: &SamplingOptions, generated: usize) -> bool {
        self.bias.is_empty()
            && self.bad_words.is_empty()
            && !self.counts_tokens()
            && self.no_repeat_ngram_size == 0
            && self.min_tokens <= generated
            && (self.repetition_window == 0 || sampling.repetition_penalty == 1.0)
            && !self.follow_penalty()
    }

    /// Whether they depend on the number of generated tokens of each kind.
    fn counts_tokens(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Whether some apply after the repetition penalty, which then applies among them.
    fn follow_penalty(&self) -> bool {
        !self.dry.is_off() || self.processor.is_some() || self.filters()
    }

    /// Whether some are filters.
    fn filters(&self) -> bool {
        self.top_n_sigma > 0.0 || self.typical_p < 1.0 || self.xtc_probability > 0.0
    }

    /// Fails for numbers that describe no change, and ids outside a vocabulary of `vocabulary` tokens.
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
        self.dry.check()?;
        let sigmas = self.top_n_sigma;
        if !(sigmas.is_finite() && sigmas >= 0.0) {
            bail!(
                InvalidArgument,
                "top_n_sigma is {sigmas}; it must be 0 or a positive number"
            );
        }
        for (name, value) in [
            ("typical_p", self.typical_p),
            ("xtc_probability", self.xtc_probability),
            ("xtc_threshold", self.xtc_threshold),
        ] {
            if !(0.0..=1.0).contains(&value) {
                bail!(InvalidArgument, "{name} is {value}; it must be from 0 to 1");
            }
        }
        Ok(())
    }

    /// Fails for what counts the tokens of a generation, where `what` chooses a token that is part of none.
    pub fn check_without_counts(&self, what: &str) -> Result<()> {
        if self.counts_tokens() {
            bail!(
                InvalidArgument,
                "{what} is part of no generation whose tokens presence_penalty {} and frequency_penalty {} could count; pass what they subtract as logit bias",
                self.presence_penalty,
                self.frequency_penalty
            );
        }
        if self.min_tokens > 0 {
            bail!(
                InvalidArgument,
                "{what} is part of no generation whose tokens min_tokens {} could count; exclude the tokens that end a text by logit bias",
                self.min_tokens
            );
        }
        Ok(())
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
    /// The text of tokens, if that decides.
    tokenizer: Option<Arc<Tokenizer>>,
    /// Tokens that end the text.
    ends: Vec<u32>,
    counts: HashMap<u32, u32>,
    /// Tokens of the generation, if there is a use for them.
    generated: Vec<u32>,
    logits: Vec<f32>,
    scratch: AdjusterScratch,
    /// Whether the last choice failed by what a processor wrote.
    is_refused: bool,
}

/// Memory of adjustments that is used again.
#[derive(Debug, Default)]
pub(super) struct AdjusterScratch {
    repeats: Repeats,
    softmax: Softmax,
    seen: Vec<bool>,
}

impl<'a> Adjuster<'a> {
    /// An adjuster before the first token, for choices of `model` by `sampling`; `None` if it would change nothing. Fails if the text of
    /// tokens decides and the model has no tokenizer.
    pub(super) fn of(
        adjustments: &'a LogitAdjustments,
        sampling: &SamplingOptions,
        model: &Served,
    ) -> Result<Option<Self>> {
        let dry = &adjustments.dry;
        let tokenizer = match dry.is_off() || dry.breakers().next().is_none() {
            true => None,
            false => {
                let tokenizer = model.tokenizer();
                Some(
                    tokenizer
                        .map_err(|e| e.within("dry_sequence_breakers"))?
                        .clone(),
                )
            }
        };
        let adjuster = Adjuster::new(adjustments, sampling);
        Ok(adjuster.map(|adjuster| Adjuster {
            tokenizer,
            ..adjuster
        }))
    }

    /// As [`of`](Self::of), with tokens that have no text.
    fn new(adjustments: &'a LogitAdjustments, sampling: &SamplingOptions) -> Option<Self> {
        (!adjustments.is_none(sampling)).then(|| Adjuster {
            adjustments,
            tokenizer: None,
            ends: Vec::new(),
            counts: HashMap::new(),
            generated: Vec::new(),
            logits: Vec::new(),
            scratch: AdjusterScratch::default(),
            is_refused: false,
        })
    }

    /// With `ends` as the tokens that end the text.
    pub(super) fn ending_by(self, ends: Vec<u32>) -> Self {
        Adjuster { ends, ..self }
    }

    /// Records a token of the generation.
    pub(super) fn push(&mut self, token: u32) -> Result<()> {
        if self.adjustments.counts_tokens() {
            *self.counts.entry(token).or_default() += 1;
        }
        if self.has_processor() || self.generated.len() < self.adjustments.min_tokens {
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
        match self.adjustments.follow_penalty() {
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

    /// Adjusts `logits`, a copy of the model's `own`, in place for `choice`, whose history is all tokens before it. Fails if a processor ends
    /// the generation, or leaves nothing to choose from.
    pub(super) fn adjust(
        &self,
        logits: &mut [f32],
        own: &[f32],
        choice: &Choice<'_>,
        scratch: &mut AdjusterScratch,
    ) -> Result<()> {
        let (how, tokens) = (self.adjustments, choice.history);
        let AdjusterScratch {
            repeats,
            softmax,
            seen,
        } = scratch;
        if how.no_repeat_ngram_size > 0 || !how.dry.is_off() {
            repeats.find(tokens)?;
        }
        self.add(logits);
        self.exclude(logits, tokens, repeats);
        if !how.follow_penalty() {
            return Ok(());
        }
        let mask = |logits: &mut [f32]| {
            if let Some(allowed) = choice.allowed {
                allowed.apply(logits);
            }
        };
        mask(logits);
        let penalty = choice.options.repetition_penalty;
        if penalty != 1.0 {
            penalize(logits, self.window(tokens), penalty, seen);
        }
        if !how.dry.is_off() {
            let text = |token| self.text(token);
            for (token, penalty) in how.dry.penalties(tokens, repeats, text) {
                change(logits, token, -penalty);
            }
        }
        if let Some(processor) = &how.processor {
            processor.process(logits, own, &self.generated, tokens.len())?;
            mask(logits);
            check_left(logits, tokens.len())?;
        }
        if how.top_n_sigma > 0.0 {
            top_n_sigma(logits, how.top_n_sigma);
        }
        if how.typical_p < 1.0 {
            softmax.typical(logits, how.typical_p)?;
        }
        if how.xtc_probability > 0.0 {
            let by = (how.xtc_probability, how.xtc_threshold);
            softmax.xtc(logits, by, choice)?;
        }
        Ok(())
    }

    /// Adds biases, and subtracts penalties by count.
    fn add(&self, logits: &mut [f32]) {
        let how = self.adjustments;
        for &(token, bias) in &how.bias {
            change(logits, token, bias);
        }
        for (&token, &count) in &self.counts {
            let penalty = how.presence_penalty + how.frequency_penalty * count as f32;
            change(logits, token, -penalty.clamp(f32::MIN, f32::MAX));
        }
    }

    /// Excludes the tokens that may not follow `tokens`.
    fn exclude(&self, logits: &mut [f32], tokens: &[u32], repeats: &Repeats) {
        let how = self.adjustments;
        let mut exclude = |token| change(logits, token, f32::NEG_INFINITY);
        for word in &how.bad_words {
            if let Some((&last, prefix)) = word.split_last()
                && tokens.ends_with(prefix)
            {
                exclude(last);
            }
        }
        if how.no_repeat_ngram_size > 0 {
            let completing = repeats.completing(how.no_repeat_ngram_size, tokens);
            completing.for_each(&mut exclude);
        }
        if self.generated.len() < how.min_tokens {
            self.ends.iter().copied().for_each(exclude);
        }
    }

    /// The bytes of `token`, if its text decides and it has one.
    fn text(&self, token: u32) -> &[u8] {
        let tokenizer = self.tokenizer.as_ref();
        let bytes = tokenizer.and_then(|tokenizer| tokenizer.bytes_of(token).ok());
        bytes.unwrap_or_default()
    }

    /// The adjusted copy of the model's `own` logits, for `choice`, whose history is all tokens before it.
    pub(super) fn adjusted(&mut self, own: &[f32], choice: &Choice<'_>) -> Result<&[f32]> {
        let mut logits = std::mem::take(&mut self.logits);
        let mut scratch = std::mem::take(&mut self.scratch);
        logits.clear();
        memory::make_room(&mut logits, own.len())?;
        logits.extend_from_slice(own);
        let done = self.adjust(&mut logits, own, choice, &mut scratch);
        (self.logits, self.scratch) = (logits, scratch);
        let refuses = |kind: ErrorKind| kind == ErrorKind::InvalidArgument;
        self.is_refused = done.as_ref().is_err_and(|e| refuses(e.kind()));
        done.map(|()| &*self.logits)
    }
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;
    use std::sync::Mutex;

    use super::*;
    use crate::base::ErrorKind;
    use crate::model::TokenMask;

    const NEVER: f32 = f32::NEG_INFINITY;

    /// A choice after `history`.
    fn choice<'a>(options: &'a SamplingOptions, history: &'a [u32]) -> Choice<'a> {
        Choice {
            options,
            draw: 0,
            history,
            allowed: None,
        }
    }

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
                adjuster
                    .adjusted(&[1.0; 5], &choice(&sampling, &tokens))
                    .unwrap(),
                expected
            );
        }
        let window = LogitAdjustments {
            repetition_window: 64,
            ..LogitAdjustments::default()
        };
        // Without the penalty a window has nothing to count.
        assert!(Adjuster::new(&window, &SamplingOptions::GREEDY).is_none());
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
        let adjusted = adjuster
            .adjusted(&logits, &choice(&SamplingOptions::GREEDY, &[5, 5, 1]))
            .unwrap();
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
            adjuster
                .adjusted(&[0.0, 0.0], &choice(&SamplingOptions::GREEDY, &[]))
                .unwrap(),
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
            let choice = choice(&SamplingOptions::GREEDY, tokens);
            let adjusted = adjuster.adjusted(&[0.0; 5], &choice).unwrap();
            (0..5).filter(|&i| adjusted[i] == NEVER).collect()
        };
        assert_eq!(excluded(&[]), [0]);
        assert_eq!(excluded(&[1]), [0, 2]);
        assert_eq!(excluded(&[4, 1, 1]), [0, 2, 3]);
        assert_eq!(excluded(&[1, 1, 4]), [0]);
    }

    /// The logits that a processor sees, and those that it writes.
    fn watching(seen: &Arc<Mutex<Vec<f32>>>, writes: &[f32]) -> LogitsProcessor {
        let (seen, writes) = (seen.clone(), writes.to_vec());
        LogitsProcessor::new(move |logits, _| {
            *seen.lock().unwrap() = logits.to_vec();
            logits.copy_from_slice(&writes);
            ControlFlow::Continue(())
        })
    }

    #[test]
    fn adjustments_apply_in_their_order() {
        // After "0 1 0 1": token 0 would extend a repetition of two tokens. Token 4 is bad, token 5 no part of the grammar.
        let tokens = [0, 1, 0, 1];
        let written = [-3.5, -2.0, 2.5, -0.5, -2.5, 9.0, 1.5, 1.5];
        let seen = Arc::new(Mutex::new(Vec::new()));
        let how = LogitAdjustments {
            bias: vec![(0, 4.0), (4, 50.0)],
            presence_penalty: 1.0,
            bad_words: vec![vec![4]],
            dry: Dry {
                multiplier: 1.5,
                sequence_breakers: Some(Vec::new()),
                ..Dry::default()
            },
            processor: Some(watching(&seen, &written)),
            top_n_sigma: 1.5,
            typical_p: 0.7,
            xtc_probability: 1.0,
            xtc_threshold: 0.2,
            ..LogitAdjustments::default()
        };
        let sampling = SamplingOptions {
            repetition_penalty: 2.0,
            ..SamplingOptions::GREEDY
        };
        let mut adjuster = Adjuster::new(&how, &sampling).unwrap();
        adjuster.push(0).unwrap();
        let mask = [!(1 << 5)];
        let choice = Choice {
            allowed: Some(TokenMask(&mask)),
            ..choice(&sampling, &tokens)
        };
        let adjusted = adjuster.adjusted(&[1.0; 8], &choice).unwrap().to_vec();
        // (1 + 4 - 1) / 2 - 1.5 for token 0.
        let want = [0.5, 0.5, 1.0, 1.0, NEVER, NEVER, 1.0, 1.0];
        assert_eq!(*seen.lock().unwrap(), want);
        type Filter<'a> = &'a dyn Fn(&mut [f32]);
        let filters: [Filter<'_>; 3] = [
            &|logits| top_n_sigma(logits, how.top_n_sigma),
            &|logits| Softmax::default().typical(logits, 0.7).unwrap(),
            &|logits| Softmax::default().xtc(logits, (1.0, 0.2), &choice).unwrap(),
        ];
        let by_order = |order: [usize; 3]| {
            let mut logits = written;
            logits[5] = NEVER;
            order.iter().for_each(|&i| filters[i](&mut logits));
            logits
        };
        assert_eq!(adjusted, by_order([0, 1, 2]));
        for other in [[0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            assert_ne!(adjusted, by_order(other), "{other:?} is the same here");
        }
        assert!(adjuster.unpenalized(&tokens).is_empty());
    }

    #[test]
    fn tokens_that_end_a_text_wait_for_enough_of_them() {
        let how = LogitAdjustments {
            min_tokens: 2,
            ..LogitAdjustments::default()
        };
        let sampling = SamplingOptions::GREEDY;
        let adjuster = Adjuster::new(&how, &sampling).unwrap();
        let mut adjuster = adjuster.ending_by(vec![3, 1]);
        for generated in 0..4 {
            let excluded = if generated < 2 { NEVER } else { 1.0 };
            let want = [1.0, excluded, 1.0, excluded];
            let choice = choice(&sampling, &[1, 1, 1]);
            assert_eq!(adjuster.adjusted(&[1.0; 4], &choice).unwrap(), want);
            adjuster.push(0).unwrap();
            assert_eq!(how.are_over(&sampling, generated), generated >= 2);
        }
        let others = LogitAdjustments {
            typical_p: 0.5,
            ..how
        };
        assert!(!others.are_over(&sampling, 9));
    }

    #[test]
    fn ngrams_occur_once() {
        let how = LogitAdjustments {
            no_repeat_ngram_size: 3,
            ..LogitAdjustments::default()
        };
        let sampling = SamplingOptions::GREEDY;
        let mut adjuster = Adjuster::new(&how, &sampling).unwrap();
        let mut excluded = |tokens: &[u32]| -> Vec<usize> {
            let choice = choice(&sampling, tokens);
            let adjusted = adjuster.adjusted(&[0.0; 5], &choice).unwrap();
            (0..5).filter(|&i| adjusted[i] == NEVER).collect()
        };
        assert!(excluded(&[]).is_empty());
        assert!(excluded(&[1, 2]).is_empty());
        assert_eq!(excluded(&[1, 2, 3, 4, 1, 2, 0, 1, 2]), [0, 3]);
        assert_eq!(excluded(&[2, 2, 2]), [2]);
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
    fn numbers_outside_their_range_are_refused() {
        type Change = fn(&mut LogitAdjustments, f32);
        let changes: [(&str, &[f32], Change); 6] = [
            ("dry_multiplier", &[-0.5, f32::INFINITY], |a, x| {
                a.dry.multiplier = x;
            }),
            ("dry_base", &[0.5, f32::INFINITY], |a, x| a.dry.base = x),
            ("top_n_sigma", &[-1.0, f32::INFINITY], |a, x| {
                a.top_n_sigma = x;
            }),
            ("typical_p", &[-0.5, 1.5], |a, x| a.typical_p = x),
            ("xtc_probability", &[-0.5, 1.5], |a, x| {
                a.xtc_probability = x;
            }),
            ("xtc_threshold", &[-0.5, 1.5], |a, x| a.xtc_threshold = x),
        ];
        let refused = |adjustments: &LogitAdjustments, expected: &str| {
            let e = adjustments.check(10).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidArgument);
            assert!(e.message().starts_with(expected), "{e}");
        };
        for (name, wrong, change) in changes {
            for &value in wrong.iter().chain(&[f32::NAN]) {
                let mut adjustments = LogitAdjustments::default();
                change(&mut adjustments, value);
                refused(&adjustments, &format!("{name} is {value}; it must be "));
            }
            let mut right = LogitAdjustments::default();
            change(&mut right, 1.0);
            right.check(10).unwrap();
        }
        let mut adjustments = LogitAdjustments::default();
        adjustments.dry.allowed_length = 0;
        refused(&adjustments, "dry_allowed_length is 0");
        adjustments.dry = Dry {
            sequence_breakers: Some(vec!["a".to_owned(), String::new()]),
            ..Dry::default()
        };
        refused(&adjustments, "dry sequence breaker 1 is empty");
    }

    #[test]
    fn refusals() {
        let refused = |adjustments: LogitAdjustments, expected: &str| {
            let e = adjustments.check(10).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidArgument);
            assert!(e.message().contains(expected), "{e}");
            assert!(!adjustments.is_none(&SamplingOptions::GREEDY));
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
        let least = LogitAdjustments {
            min_tokens: 3,
            ..LogitAdjustments::default()
        };
        let e = least.check_without_counts("a step").unwrap_err();
        assert!(e.message().contains("min_tokens 3"), "{e}");
        assert!(LogitAdjustments::default().is_none(&SamplingOptions::GREEDY));
    }
}
