//! Runs tokens of sequences: takes blocks for them, runs the model, and commits what ran.

use super::sequence::Sequence;
use super::served::Served;
use crate::base::Result;
use crate::base::error::bail;
use crate::model::{
    Batch, Choice, DrafterRows, Drafting, HiddenBefore, Logits, Output, Scratch, Segment, Wanted,
};

/// Tokens that continue a sequence.
#[derive(Debug)]
pub struct NewTokens<'a> {
    /// The tokens.
    pub tokens: &'a [u32],
    /// Holds `tokens` afterwards, if they run without a fault; otherwise it is as it was.
    pub sequence: &'a mut Sequence,
    /// The requested output.
    pub wanted: Wanted<'a>,
}

/// A sequence to draft for.
#[derive(Debug)]
pub struct NextDrafts<'a> {
    /// The sequence, which drafts.
    pub sequence: &'a mut Sequence,
    /// The choice of the first drafted token. Its history ends with the token after the sequence.
    pub choice: Choice<'a>,
}

impl Served {
    /// Runs tokens of different sequences together, with the weights held, and appends the rows of logits that they ask for to `logits`.
    /// Returns for each its output, or its own fault; see [`Model::run`](crate::model::Model::run). If the call fails, no sequence changes.
    ///
    /// With `look_ahead` a GPU runs the step after this one at once, with the tokens that it chose.
    pub fn run(
        &self,
        work: Vec<NewTokens<'_>>,
        look_ahead: bool,
        scratch: &mut Scratch,
        logits: &mut Vec<f32>,
    ) -> Result<Vec<Result<Output>>> {
        self.run_by(work, look_ahead, scratch, |batch, scratch| {
            self.model().run(batch, scratch, logits)
        })
    }

    /// Like [`Served::run`], but always uses the reference block, against which fused kernels are tested. Slow on a GPU.
    pub fn run_reference(
        &self,
        work: Vec<NewTokens<'_>>,
        scratch: &mut Scratch,
        logits: &mut Vec<f32>,
    ) -> Result<Vec<Result<Output>>> {
        self.run_by(work, false, scratch, |batch, scratch| {
            self.model().run_reference(batch, scratch, logits)
        })
    }

    /// Runs the tokens of one sequence and replaces `logits` with the requested rows.
    pub fn forward(
        &self,
        tokens: &[u32],
        sequence: &mut Sequence,
        scratch: &mut Scratch,
        wanted: Logits,
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        logits.clear();
        let wanted = match wanted {
            Logits::None => Wanted::Nothing,
            Logits::Last => Wanted::Last,
            Logits::All => Wanted::All,
        };
        let work = NewTokens {
            tokens,
            sequence,
            wanted,
        };
        let outputs = self.run(vec![work], false, scratch, logits)?;
        match outputs.into_iter().find_map(Result::err) {
            None => Ok(()),
            Some(fault) => {
                logits.clear();
                Err(fault)
            }
        }
    }

    /// For each of `work`, up to `count` tokens that the drafter expects after the next token of a sequence that drafts. See
    /// [`Model::draft`](crate::model::Model::draft). The sequences keep their positions, and have blocks for those of a verification. No more
    /// tokens are drafted than the sequence with the least room has room for.
    pub fn draft(
        &self,
        work: &mut [NextDrafts<'_>],
        count: usize,
        scratch: &mut Scratch,
    ) -> Result<Vec<Vec<u32>>> {
        let mut next = Vec::with_capacity(work.len());
        for own in work.iter() {
            match own.choice.history.last() {
                Some(&token) => next.push(token),
                None => bail!(InvalidArgument, "drafts after an empty history"),
            }
        }
        let choices: Vec<Choice<'_>> = work.iter().map(|own| own.choice).collect();
        let mut sequences: Vec<&mut Sequence> =
            work.iter_mut().map(|own| &mut *own.sequence).collect();
        let room = sequences.iter().map(|sequence| sequence.room()).min();
        let count = count.min(room.unwrap_or(0));
        let drafted = self.with_drafter(&mut sequences, &next, count, |rows| {
            let work = rows.iter().zip(&choices);
            let work: Vec<Drafting<'_>> = work
                .map(|(&row, &choice)| Drafting { row, choice })
                .collect();
            self.model().draft(&work, count, scratch)
        })?;
        for (sequence, drafted) in sequences.into_iter().zip(&drafted) {
            if drafted.is_empty() {
                // No verification follows that needs the blocks.
                sequence.give_up()?;
            }
        }
        Ok(drafted)
    }

    /// The logits of the token after `next` as the drafter sees them, `vocab_size` numbers, where `next` follows a sequence that drafts.
    /// The sequence stays as it is.
    pub fn drafter_logits(
        &self,
        sequence: &mut Sequence,
        next: u32,
        scratch: &mut Scratch,
    ) -> Result<Vec<f32>> {
        let mut logits = Vec::new();
        self.with_drafter(&mut [sequence], &[next], 1, |rows| {
            self.model().drafter_logits(rows[0], scratch, &mut logits)
        })?;
        Ok(logits)
    }

    /// Calls `run` with the drafter's rows of the last positions of sequences, which the tokens of `next` follow, and with blocks for `count`
    /// rows of each.
    fn with_drafter<T>(
        &self,
        sequences: &mut [&mut Sequence],
        next: &[u32],
        count: usize,
        run: impl FnOnce(&[DrafterRows<'_>]) -> Result<T>,
    ) -> Result<T> {
        for sequence in sequences.iter() {
            if sequence.is_empty() {
                bail!(InvalidArgument, "drafts after a sequence without tokens");
            }
            if !sequence.drafts() || !sequence.is_of(self.model()) {
                bail!(
                    InvalidArgument,
                    "drafts after a sequence that the drafter of this model does not follow"
                );
            }
        }
        let _held = self.hold()?;
        let unknown = vec![0.0; self.spec().hidden_size];
        let mut all = sequences.iter_mut();
        let reserved = all.try_for_each(|sequence| sequence.reserve_blocks(count));
        let done = reserved.and_then(|()| {
            let rows = sequences
                .iter()
                .zip(next)
                .map(|(sequence, next)| DrafterRows {
                    tokens: std::slice::from_ref(next),
                    hidden: sequence.hidden().unwrap_or(&unknown),
                    first: sequence.len() - 1,
                    tables: sequence.tables(),
                    context: sequence.capacity(),
                });
            run(&rows.collect::<Vec<_>>())
        });
        done.or_else(|e| {
            let mut all = sequences.iter_mut();
            all.try_for_each(|sequence| sequence.give_up()).and(Err(e))
        })
    }

    /// Takes blocks for the tokens, calls `run`, and commits what it ran.
    fn run_by(
        &self,
        mut work: Vec<NewTokens<'_>>,
        look_ahead: bool,
        scratch: &mut Scratch,
        run: impl FnOnce(Batch<'_>, &mut Scratch) -> Result<Vec<Result<Output>>>,
    ) -> Result<Vec<Result<Output>>> {
        for part in &work {
            self.check_tokens(part.tokens)?;
            if !part.sequence.is_of(self.model()) {
                bail!(InvalidArgument, "the sequence is of another model");
            }
        }
        let _held = self.hold()?;
        let mut outputs = reserve(&mut work).and_then(|()| {
            if look_ahead && self.device().is_cuda() {
                // Without a block for it, the step after this one does not run ahead.
                for part in work.iter_mut().filter(|part| part.sequence.room() > 1) {
                    let _ = part.sequence.reserve_ahead(part.tokens.len());
                }
            }
            let segments = work.iter().map(|part| Segment {
                tokens: part.tokens,
                first: part.sequence.len(),
                tables: part.sequence.tables(),
                context: part.sequence.capacity(),
                wanted: part.wanted,
                drafts_after: (part.sequence.drafts())
                    .then(|| HiddenBefore(part.sequence.hidden())),
            });
            let batch = Batch {
                segments: segments.collect(),
                look_ahead,
            };
            run(batch, scratch)
        });
        let ran: Vec<bool> = (0..work.len())
            .map(|i| outputs.as_ref().is_ok_and(|outputs| outputs[i].is_ok()))
            .collect();
        for (part, _) in work.iter_mut().zip(&ran).filter(|(_, ran)| !**ran) {
            // Values left past the sequence's end may spoil its next tokens, so the call fails if they stay.
            let given_up = part.sequence.give_up();
            outputs = outputs.and_then(|done| given_up.map(|()| done));
        }
        for (i, part) in work.iter_mut().enumerate().filter(|(i, _)| ran[*i]) {
            match outputs.as_ref().map(|outputs| &outputs[i]) {
                Ok(Ok(Output::Verified(chosen))) => part.sequence.advance_verified(chosen.len()),
                Ok(_) => part.sequence.advance(part.tokens.len()),
                // The call has an error already.
                Err(_) => {
                    drop(part.sequence.give_up());
                    continue;
                }
            }
            part.sequence.set_hidden(scratch.take_hidden(i));
        }
        outputs
    }
}

/// Takes blocks for the tokens of each sequence.
fn reserve(work: &mut [NewTokens<'_>]) -> Result<()> {
    let alone = work.len() == 1;
    for (i, part) in work.iter_mut().enumerate() {
        let verified = matches!(part.wanted, Wanted::Verified(_));
        let reserved = part.sequence.reserve(part.tokens.len(), verified);
        reserved.map_err(|e| match alone {
            true => e,
            false => e.within(format_args!("sequence {i}")),
        })?;
    }
    Ok(())
}
