//! Log-probabilities of given tokens after those that a session holds: for evaluation harnesses, rerankers and perplexity.

use super::Session;
use crate::base::error::{bail, err};
use crate::base::{Result, alloc, call};
use crate::cpu::Cpu;
use crate::engine::{NewTokens, Sequence};
use crate::model::{Output, Wanted};
use crate::ops::likelihood::{Likelihood, likelihoods};

/// Most continuations that run in a pass: each has blocks of its own.
const CONTINUATIONS: usize = 64;

/// A given token, as the model predicts it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoredToken {
    /// The natural logarithm of its probability after the tokens before it. NaN for a first token that no other stands before.
    pub log_probability: f32,
    /// Whether it is the argmax: the token that a greedy generation would choose.
    pub is_argmax: bool,
}

impl ScoredToken {
    const UNPREDICTED: ScoredToken = ScoredToken {
        log_probability: f32::NAN,
        is_argmax: false,
    };
}

impl From<Likelihood> for ScoredToken {
    fn from(found: Likelihood) -> Self {
        ScoredToken {
            log_probability: found.log_probability,
            is_argmax: found.is_argmax,
        }
    }
}

/// A continuation that is read.
struct Reading<'a> {
    /// Its index.
    index: usize,
    tokens: &'a [u32],
    /// Tokens that have run. The last one does not run: nothing follows it.
    run: usize,
    sequence: Sequence,
}

impl Reading<'_> {
    fn left(&self) -> usize {
        self.tokens.len().saturating_sub(self.run + 1)
    }
}

/// A trainer has changed the weights during a score.
struct Changed;

impl Session {
    /// Scores each of `continuations` as if it stood alone after the tokens of this session, with one [`ScoredToken`] for each of its tokens.
    /// The session keeps its tokens. Continuations share its cached keys and values, and up to 64 of them run together in passes as long as
    /// those of prompts. On a GPU the logits stay on the device. On the CPU the results have the same bits however many there are.
    pub fn score(&mut self, continuations: &[&[u32]]) -> Result<Vec<Vec<ScoredToken>>> {
        for (i, tokens) in continuations.iter().enumerate() {
            let of_one = |e: crate::base::Error| e.within(format_args!("continuation {i}"));
            self.model.check_tokens(tokens).map_err(of_one)?;
            if !self.fits(tokens.len()) {
                let (len, context) = (self.len(), self.options.context);
                return Err(of_one(err!(
                    ContextFull,
                    "{} tokens do not fit: {len} of {context} are in use",
                    tokens.len()
                )));
            }
        }
        let tokens: usize = continuations.iter().map(|tokens| tokens.len()).sum();
        let _results = alloc::Budget::copies(tokens * size_of::<ScoredToken>()).set_aside()?;
        let cpu = self.model.device().host_cpu()?;
        loop {
            if let Ok(scores) = self.score_by_same_weights(continuations, &cpu)? {
                return Ok(scores);
            }
        }
    }

    fn score_by_same_weights(
        &mut self,
        continuations: &[&[u32]],
        cpu: &Cpu,
    ) -> Result<std::result::Result<Vec<Vec<ScoredToken>>, Changed>> {
        let mut scores: Vec<Vec<ScoredToken>> = continuations
            .iter()
            .map(|tokens| Vec::with_capacity(tokens.len()))
            .collect();
        if !self.is_empty() {
            self.flush()?;
        }
        let mut weights = (!self.is_empty()).then(|| self.cache.weights());
        for (tokens, scores) in continuations.iter().zip(&mut scores) {
            match (tokens.first(), self.next.logits()) {
                (None, _) => {}
                (Some(_), None) => scores.push(ScoredToken::UNPREDICTED),
                (Some(&first), Some(logits)) => {
                    let found = likelihoods(logits, &[first], cpu)?;
                    scores.extend(found.into_iter().map(ScoredToken::from));
                }
            }
        }
        let lengths = continuations.iter().map(|tokens| tokens.len());
        call::expect(lengths.map(|len| len.saturating_sub(1) as u64).sum());
        let mut waiting = continuations.iter().enumerate();
        let mut reading: Vec<Reading<'_>> = Vec::new();
        loop {
            let mut rows: usize = reading.iter().map(Reading::left).sum();
            while rows < self.model.pass_rows()
                && reading.len() < CONTINUATIONS
                && let Some((index, tokens)) = waiting.next()
            {
                let mut sequence = self.cache.clone();
                sequence.truncate(self.cache.len().min(self.tokens.len()))?;
                sequence.set_drafts(false)?;
                let one = Reading {
                    index,
                    tokens,
                    run: 0,
                    sequence,
                };
                if one.left() > 0 {
                    rows += one.left();
                    reading.push(one);
                }
            }
            if reading.is_empty() {
                return Ok(Ok(scores));
            }
            self.read(&mut reading, &mut scores)?;
            for one in &reading {
                if *weights.get_or_insert(one.sequence.weights()) != one.sequence.weights() {
                    return Ok(Err(Changed));
                }
            }
            reading.retain(|one| one.left() > 0);
        }
    }

    /// Runs the tokens of a pass of these continuations, in their order, and scores the tokens after them.
    fn read(&mut self, reading: &mut [Reading<'_>], scores: &mut [Vec<ScoredToken>]) -> Result<()> {
        let mut room = self.model.pass_rows();
        let (mut work, mut places) = (Vec::new(), Vec::new());
        for one in reading {
            let count = one.left().min(room);
            if count == 0 {
                continue;
            }
            room -= count;
            let first = one.run;
            one.run += count;
            places.push(one.index);
            work.push(NewTokens {
                tokens: &one.tokens[first..one.run],
                sequence: &mut one.sequence,
                wanted: Wanted::Likelihoods(&one.tokens[first + 1..][..count]),
            });
        }
        let (scratch, mut logits) = (&mut self.scratch, Vec::new());
        let outputs = self.model.run(work, false, scratch, &mut logits)?;
        for (index, output) in places.into_iter().zip(outputs) {
            let Output::Likelihoods(found) = output? else {
                bail!(Internal, "a part of a continuation without likelihoods");
            };
            scores[index].extend(found.into_iter().map(ScoredToken::from));
        }
        call::check()
    }
}
