//! A sampler: the sampling options and the number of draws so far. The same seed gives the same text.

use std::hash::{BuildHasher, Hasher, RandomState};

use crate::base::Result;
use crate::model::{Choice, SamplingOptions, TokenMask};
use crate::ops::sample;

/// A fresh random seed.
pub(super) fn new_seed() -> u64 {
    // The standard library seeds its hash maps with the system's random numbers.
    RandomState::new().build_hasher().finish()
}

/// Chooses tokens, one draw each.
#[derive(Clone, Debug)]
pub struct Sampler {
    options: SamplingOptions,
    draws: u64,
    scratch: sample::SampleScratch,
}

impl Sampler {
    /// A sampler before its first draw. If the options have no seed, it takes a new one.
    pub fn new(options: &SamplingOptions) -> Result<Self> {
        options.check()?;
        Ok(Sampler {
            options: options.seeded_by(new_seed()),
            draws: 0,
            scratch: sample::SampleScratch::default(),
        })
    }

    /// Sets the number of draws made so far to `draws`. A generation starts at the number of tokens appended before it
    /// ([`Session::appended`](super::Session::appended)), so that its draws do not depend on how a text was divided into calls.
    pub fn after(mut self, draws: usize) -> Self {
        self.set_draws(draws);
        self
    }

    pub(super) fn set_draws(&mut self, draws: usize) {
        self.draws = draws as u64;
    }

    /// The next token, given its logits and the tokens before it. A logit of minus infinity excludes its token.
    pub fn sample(&mut self, logits: &[f32], history: &[u32]) -> Result<u32> {
        self.sample_within(logits, history, None)
    }

    /// As [`Sampler::sample`], of the tokens that `allowed` allows.
    pub fn sample_within(
        &mut self,
        logits: &[f32],
        history: &[u32],
        allowed: Option<TokenMask<'_>>,
    ) -> Result<u32> {
        let choice = Choice {
            options: &self.options,
            draw: self.draws,
            history,
            allowed,
        };
        let token = sample::sample(logits, &choice, &mut self.scratch)?;
        self.moves_on();
        Ok(token)
    }

    /// The seed of its draws.
    pub fn seed(&self) -> u64 {
        self.options.seed.unwrap_or_default()
    }

    pub(super) fn options(&self) -> &SamplingOptions {
        &self.options
    }

    /// The next choice, for the model to make.
    pub(super) fn choice<'a>(&'a self, history: &'a [u32]) -> Choice<'a> {
        Choice {
            options: &self.options,
            draw: self.draws,
            history,
            allowed: None,
        }
    }

    /// The choice by the draw that is `ahead` of the next one.
    pub(super) fn choice_ahead<'a>(&'a self, ahead: usize, history: &'a [u32]) -> Choice<'a> {
        Choice {
            draw: self.draws + ahead as u64,
            ..self.choice(history)
        }
    }

    /// Counts a choice that the model made.
    pub(super) fn moves_on(&mut self) {
        self.draws += 1;
    }
}
