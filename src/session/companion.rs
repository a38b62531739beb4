//! The sequence by which a draft model follows a session and guesses its next tokens. It is brought up to date when a step drafts, from the
//! tokens of the session alone: truncation, eviction, forks and restored sessions need nothing of it.

use std::sync::Arc;

use super::options::MOST_DRAFTS;
use super::sampler::Sampler;
use crate::base::error::bail;
use crate::base::{Error, Result, call, memory};
use crate::engine::{NewTokens, Sequence, Served};
use crate::model::{KvType, Output, Scratch, Wanted};

/// Tokens behind a session that a step of drafts makes up for. More run before it, as a prompt.
const FEW: usize = MOST_DRAFTS + 1;

/// A draft model's sequence. A clone shares its blocks until either goes on.
pub(super) struct Companion {
    model: Arc<Served>,
    sequence: Sequence,
    scratch: Scratch,
}

impl Companion {
    /// An empty sequence of `model`, whose tokens are those of the session's model. It holds up to `context` tokens, fewer if the model was made
    /// for fewer, and shares the beginnings of other sequences if it `shares`.
    pub(super) fn new(
        model: &Arc<Served>,
        context: usize,
        kind: KvType,
        shares: bool,
    ) -> Result<Companion> {
        let capacity = context.min(model.spec().max_positions);
        let mut sequence = model.sequence(capacity, kind).map_err(of_draft)?;
        sequence.set_sharing(shares);
        Ok(Companion {
            model: model.clone(),
            sequence,
            scratch: Scratch::new(),
        })
    }

    /// The draft model.
    pub(super) fn model(&self) -> &Arc<Served> {
        &self.model
    }

    /// Bytes of its sequence's tables.
    pub(super) fn table_bytes(&self) -> usize {
        self.sequence.table_bytes()
    }

    /// Most tokens that it can draft after so many.
    pub(super) fn room_after(&self, len: usize) -> usize {
        (self.sequence.capacity() + 1).saturating_sub(len)
    }

    /// Goes back to the tokens that it has in common with `tokens`, of which the last is pending, and runs what it lacks of them but for a
    /// few. Returns false if it cannot run one of them.
    pub(super) fn follow(&mut self, tokens: &[u32]) -> Result<bool> {
        let held = self.sequence.tokens();
        let ran = &tokens[..held.len().min(tokens.len().saturating_sub(1))];
        let common = match held.starts_with(ran) {
            true => ran.len(),
            false => held.iter().zip(ran).take_while(|(a, b)| a == b).count(),
        };
        self.sequence.truncate(common).map_err(of_draft)?;
        let missing = &tokens[self.sequence.len()..];
        if let Some(index) = self.model.without_a_row(missing) {
            tracing::warn!(
                "the generation goes on without drafts: the draft model has {} tokens, and not token {}",
                self.model.spec().vocab_size,
                missing[index]
            );
            return Ok(false);
        }
        if missing.len() > FEW {
            self.run(&tokens[..tokens.len() - 1], Wanted::Nothing, false)?;
        }
        Ok(true)
    }

    /// Drafts up to `count` tokens after `tokens`, which it [follows](Companion::follow), as `sampler` would choose them from the draft
    /// model's logits: by the draws that choose the session's tokens, so that models that agree choose the same token. Ends before a token
    /// whose id is `vocabulary` or more. `tokens` is as before afterwards, also if it fails.
    pub(super) fn draft(
        &mut self,
        tokens: &mut Vec<u32>,
        sampler: &Sampler,
        count: usize,
        vocabulary: usize,
    ) -> Result<Vec<u32>> {
        memory::make_room(tokens, count)?;
        let len = tokens.len();
        let done = self.extend(tokens, sampler, count, vocabulary);
        let drafted = tokens.split_off(len);
        done.map(|()| drafted)
    }

    /// Appends drafted tokens to `tokens`.
    fn extend(
        &mut self,
        tokens: &mut Vec<u32>,
        sampler: &Sampler,
        count: usize,
        vocabulary: usize,
    ) -> Result<()> {
        let model = self.model.clone();
        let _generating = model.generates(&self.sequence);
        let has_states = model.kv().has_states();
        let mut kept = None;
        for ahead in 0..count {
            // Recurrent layers cannot go back by a few tokens: the sequence before what is drafted is kept.
            if has_states && ahead == 1 {
                kept = Some(self.sequence.clone());
            }
            let pending = tokens.len() - self.sequence.len();
            if pending == 2 && model.device().is_cuda() {
                // A GPU records steps of single tokens, and runs two like a prompt.
                self.next(&tokens[..tokens.len() - 1], sampler, ahead, false)?;
            }
            let goes_on = ahead + 1 < count && !(has_states && ahead == 0);
            let token = self.next(tokens, sampler, ahead, goes_on)?;
            if token as usize >= vocabulary {
                break;
            }
            tokens.push(token);
        }
        if let Some(kept) = kept {
            self.sequence = kept;
        }
        Ok(())
    }

    /// Runs the tokens that it lacks, and chooses the next one by the draw that is `ahead` of the sampler's next.
    fn next(
        &mut self,
        tokens: &[u32],
        sampler: &Sampler,
        ahead: usize,
        look_ahead: bool,
    ) -> Result<u32> {
        let wanted = Wanted::Token(sampler.choice_ahead(ahead, tokens));
        match self.run(tokens, wanted, look_ahead)? {
            Output::Token(token) => Ok(token),
            other => bail!(Internal, "{other:?} in the place of a token"),
        }
    }

    /// Runs those of `tokens` that the sequence lacks.
    fn run(&mut self, tokens: &[u32], wanted: Wanted<'_>, look_ahead: bool) -> Result<Output> {
        let work = NewTokens {
            tokens: &tokens[self.sequence.len()..],
            sequence: &mut self.sequence,
            wanted,
        };
        let (model, scratch) = (&self.model, &mut self.scratch);
        // The caller's progress counts tokens of the session.
        let outputs =
            call::in_silence(|| model.run(vec![work], look_ahead, scratch, &mut Vec::new()));
        let output = outputs.and_then(|mut outputs| outputs.pop().transpose());
        match output.map_err(of_draft)? {
            Some(output) => Ok(output),
            None => bail!(Internal, "no output of the draft model"),
        }
    }
}

impl Clone for Companion {
    fn clone(&self) -> Self {
        Companion {
            model: self.model.clone(),
            sequence: self.sequence.clone(),
            scratch: Scratch::new(),
        }
    }
}

/// An error of the draft model.
fn of_draft(e: Error) -> Error {
    e.within("the draft model")
}
