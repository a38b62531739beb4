//! Drafted tokens of a generation: the model's drafter or a draft model guesses the next tokens, or they are looked up in the sequence
//! itself, and one pass of the model verifies them. The tokens of a generation are those of one without drafts.
//! [`Paces`](super::pace::Paces) decide how many are drafted at a time.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;

use super::companion::Companion;
use super::lookup;
use super::options::{GenerateOptions, MOST_DRAFTS};
use super::pace::Source;
use super::{Sampler, Session, SessionOptions};
use crate::base::error::bail;
use crate::base::{Result, call, memory};
use crate::engine::{NewTokens, NextDrafts, Served};
use crate::model::{Output, Verification, Wanted};

/// Tokens that a step drafts by the drafter at most where options do not say.
const MOST_ADAPTED: usize = 3;

/// Tokens that a step drafts by a draft model at most where options do not say.
const MOST_BY_MODEL: usize = 8;

/// Numbers of tokens that a step drafts by a draft model, below the most. Few, because each is tried.
const BY_MODEL: [usize; 4] = [0, 1, 2, 4];

/// Numbers of tokens that a step drafts by prompt lookup, below the most, where passes are recorded: those of their rows.
const LOOKED_UP_RECORDED: [usize; 2] = [0, 3];

/// Numbers of tokens that a step drafts by a draft model, below the most, where passes are recorded.
const BY_MODEL_RECORDED: [usize; 3] = [0, 1, 3];

/// Numbers of tokens that a step drafts by prompt lookup, below the most. Few, because each is tried.
const LOOKED_UP: [usize; 4] = [0, 2, 4, 8];

/// Counts of a generation's drafted tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DraftCounts {
    /// Tokens that were drafted.
    pub drafted: usize,
    /// Drafted tokens that the model itself chose.
    pub accepted: usize,
}

/// The beginning of a step whose time decides how many tokens are drafted.
pub(super) struct StepStart {
    at: Instant,
    recorded: u64,
}

impl StepStart {
    pub(super) fn now(model: &Served) -> StepStart {
        StepStart {
            at: Instant::now(),
            recorded: model.recorded_passes(),
        }
    }

    /// The seconds since; `None` if a pass was recorded in them, which later steps need not do.
    pub(super) fn seconds(&self, model: &Served) -> Option<f64> {
        let is_like_later_ones = model.recorded_passes() == self.recorded;
        is_like_later_ones.then(|| self.at.elapsed().as_secs_f64())
    }
}

/// The drafts of one generation.
#[derive(Debug, Default)]
pub(super) struct Drafts {
    source: Source,
    /// Tokens drafted at a time at most; 0 for a generation without drafts.
    most: usize,
    /// Whether the session's pace decides how many, rather than the caller.
    adapts: bool,
    /// Tokens that were chosen and are not appended yet.
    ahead: VecDeque<u32>,
    /// Tokens that end the text.
    stops: Vec<u32>,
    counts: DraftCounts,
}

impl Drafts {
    pub(super) fn counts(&self) -> DraftCounts {
        self.counts
    }

    pub(super) fn source(&self) -> Source {
        self.source
    }
}

impl Session {
    /// Decides whether the drafter follows tokens that run from now on. A session of a model with a drafter begins with that; without it
    /// the drafter takes no time, and later drafts are worse. Fails for a model without a drafter.
    pub fn set_drafts(&mut self, drafts: bool) -> Result<()> {
        self.cache.set_drafts(drafts)
    }

    /// Lets the drafter follow the session if the generation to come drafts.
    pub(super) fn follow_drafts(&mut self, options: &GenerateOptions) -> Result<()> {
        if let Some(most) = options.drafts.filter(|most| *most > MOST_DRAFTS) {
            bail!(
                InvalidArgument,
                "{most} drafted tokens in a step; expected at most {MOST_DRAFTS}"
            );
        }
        self.set_draft_model(options.draft_model.as_ref())?;
        let by_drafter = options.prompt_lookup == 0 && options.draft_model.is_none();
        match options.drafts {
            None => self.set_drafts(by_drafter && self.model.has_drafter()),
            Some(0) => self.set_drafts(false),
            Some(_) => self.set_drafts(options.draft_model.is_none()),
        }
    }

    /// Makes an empty sequence of a draft model, unless the session has one of it, and drops that of another.
    fn set_draft_model(&mut self, draft: Option<&Arc<Served>>) -> Result<()> {
        let own = self.companion.as_ref().map(Companion::model);
        if own == draft {
            return Ok(());
        }
        self.companion = None;
        self.paces.forget(Source::Model);
        if let Some(draft) = draft {
            self.model.check_draft_model(draft)?;
            let SessionOptions {
                context,
                kv,
                private,
                ..
            } = self.options;
            self.companion = Some(Companion::new(draft, context, kv, !private)?);
        }
        Ok(())
    }

    /// The drafts of a generation with these options.
    pub(super) fn drafts_of(&self, options: &GenerateOptions) -> Drafts {
        let source = match (&options.draft_model, options.prompt_lookup) {
            (Some(_), _) => Source::Model,
            (None, 0) => Source::Drafter,
            (None, _) => Source::Lookup,
        };
        if source == Source::Drafter && !self.cache.drafts() || options.excludes_drafts() {
            return Drafts::default();
        }
        let own = match options.ignore_model_stops {
            true => &[],
            false => self.model.stop_tokens(),
        };
        Drafts {
            source,
            most: match source {
                Source::Drafter => options.drafts.unwrap_or(MOST_ADAPTED),
                Source::Lookup => options.prompt_lookup,
                Source::Model => options.drafts.unwrap_or(MOST_BY_MODEL),
            },
            adapts: options.drafts.is_none() || source == Source::Lookup,
            stops: [own, &options.stop_tokens].concat(),
            ..Drafts::default()
        }
    }

    /// The next token, if drafts give it: one that was verified already, or the first of those that a step with drafts chooses. `left` is
    /// the number of tokens that the generation may still have.
    pub(super) fn next_by_drafts(
        &mut self,
        sampler: &mut Sampler,
        drafts: &mut Drafts,
        left: usize,
    ) -> Result<Option<u32>> {
        if drafts.ahead.is_empty() && self.is_between_steps() && drafts.most > 0 {
            let most = drafts.most.min(left - 1);
            // No token may be evicted before all that are chosen have been appended.
            let most = most.min(self.options.context - self.tokens.len());
            let (count, found) = self.planned(drafts, most);
            if count > 0 {
                self.verify_drafts(sampler, drafts, count, found)?;
            }
        }
        let token = drafts.ahead.pop_front();
        if token.is_some() {
            sampler.moves_on();
        }
        Ok(token)
    }

    /// The number of tokens to draft in the next step, at most `most`, and the tokens themselves if they are looked up.
    fn planned(&mut self, drafts: &Drafts, most: usize) -> (usize, Option<Vec<u32>>) {
        let recorded = self.model.recorded_drafts();
        let few = match (drafts.source, recorded) {
            (Source::Model, None) => &BY_MODEL[..],
            (Source::Model, Some(_)) => &BY_MODEL_RECORDED,
            (_, None) => &LOOKED_UP,
            (_, Some(_)) => &LOOKED_UP_RECORDED,
        };
        let most = match drafts.adapts {
            true => most.min(recorded.unwrap_or(most)),
            false => most,
        };
        let pace = self.paces.of(drafts.source);
        match drafts.source {
            Source::Drafter if drafts.adapts => {
                let numbers: Vec<usize> = (0..=most).collect();
                (pace.count(&numbers), None)
            }
            Source::Model => {
                let room = |companion: &Companion| companion.room_after(self.tokens.len());
                let most = most.min(self.companion.as_ref().map_or(0, room));
                let count = match drafts.adapts {
                    true => pace.count(&up_to(most, few)),
                    false => most,
                };
                (count, None)
            }
            Source::Drafter => (most, None),
            Source::Lookup => {
                let mut found = lookup::continuation(&self.tokens, most);
                if !found.is_empty() {
                    found.truncate(pace.count(&up_to(most, few)));
                }
                (found.len(), Some(found))
            }
        }
    }

    /// Whether exactly the last token is pending, and nothing is known of the next.
    pub(super) fn is_between_steps(&self) -> bool {
        let is_pending = self.cache.len() + 1 == self.tokens.len();
        is_pending && !self.cache.is_empty() && self.next.is_unknown()
    }

    /// Takes back the tokens that were chosen ahead: the sequence ends, or goes on with other tokens.
    pub(super) fn discard_drafts(&mut self, drafts: &mut Drafts) -> Result<()> {
        if drafts.ahead.is_empty() {
            return Ok(());
        }
        drafts.ahead.clear();
        self.cache
            .truncate(self.cache.len().min(self.tokens.len() - 1))
    }

    /// Drafts up to `count` tokens after the pending one, unless they were `found`, and verifies them in one pass. The chosen tokens are then
    /// ahead: none if nothing was drafted. Without memory for it, the generation goes on without drafts.
    fn verify_drafts(
        &mut self,
        sampler: &Sampler,
        drafts: &mut Drafts,
        count: usize,
        found: Option<Vec<u32>>,
    ) -> Result<()> {
        let len = self.tokens.len();
        let mut start = StepStart::now(&self.model);
        let chosen = match (drafts.source, &mut self.companion) {
            (Source::Model, Some(companion)) => companion.follow(&self.tokens),
            _ => Ok(true),
        };
        if let Ok(false) = chosen {
            drafts.most = 0;
            return Ok(());
        }
        let chosen = chosen.and_then(|_| {
            // Tokens that a draft model had yet to run say nothing of the steps to come.
            start = StepStart::now(&self.model);
            self.chosen_with_drafts(sampler, drafts, count, found)
        });
        let drafted = self.tokens.len() - len;
        self.tokens.truncate(len);
        let chosen = match chosen {
            Err(e) if e.kind().is_lack_of_memory() => {
                tracing::warn!("the generation goes on without drafts: {e}");
                drafts.most = 0;
                self.companion = None;
                return Ok(());
            }
            chosen => chosen?,
        };
        if chosen.is_empty() {
            return Ok(());
        }
        drafts.counts.drafted += drafted;
        drafts.counts.accepted += chosen.len() - 1;
        let is_stopped = chosen.last().is_some_and(|t| drafts.stops.contains(t));
        let is_wrong = chosen.len() <= drafted && !is_stopped;
        let pace = self.paces.of(drafts.source);
        pace.record_drafts(chosen.len() - 1, is_wrong);
        if let Some(seconds) = start.seconds(&self.model) {
            pace.record(count, seconds);
        }
        drafts.ahead.extend(chosen);
        Ok(())
    }

    /// The tokens that the model chooses after the pending token and as many of the drafted ones as are right, which the sequence then
    /// holds. The drafted tokens are left at the end of the session's.
    fn chosen_with_drafts(
        &mut self,
        sampler: &Sampler,
        drafts: &Drafts,
        count: usize,
        found: Option<Vec<u32>>,
    ) -> Result<Vec<u32>> {
        let (cache, scratch) = (&mut self.cache, &mut self.scratch);
        let drafted = match (found, drafts.source, &mut self.companion) {
            (Some(found), ..) => found,
            (None, Source::Model, Some(companion)) => {
                let vocabulary = self.model.spec().vocab_size;
                companion.draft(&mut self.tokens, sampler, count, vocabulary)?
            }
            _ => {
                let work = &mut [NextDrafts {
                    sequence: cache,
                    choice: sampler.choice(&self.tokens),
                }];
                self.model.draft(work, count, scratch)?.concat()
            }
        };
        if drafted.is_empty() {
            return Ok(drafted);
        }
        call::expect(drafted.len() as u64 + 1);
        let pending = self.tokens.len() - 1;
        memory::make_room(&mut self.tokens, drafted.len())?;
        self.tokens.extend(drafted);
        let work = NewTokens {
            tokens: &self.tokens[pending..],
            sequence: &mut self.cache,
            wanted: Wanted::Verified(Verification {
                choice: sampler.choice(&self.tokens),
                stops: &drafts.stops,
            }),
        };
        let mut logits = Vec::new();
        let mut outputs = self.model.run(vec![work], false, scratch, &mut logits)?;
        match outputs.pop().transpose()? {
            Some(Output::Verified(chosen)) => Ok(chosen),
            other => bail!(Internal, "{other:?} in the place of verified tokens"),
        }
    }
}

/// Numbers to choose from: `few` as far as they are below `most`, and `most`.
fn up_to(most: usize, few: &[usize]) -> Vec<usize> {
    let below = few.iter().copied().filter(|count| *count < most);
    below.chain([most]).collect()
}
