//! Runs tokens of sequences, and drafts what may follow them.

use super::pass::{NewTokens, Request, pass};
use super::sequence::Sequence;
use super::served::Served;
use crate::base::Result;
use crate::base::error::bail;
use crate::model::{Batch, Choice, DrafterRows, Drafting, Logits, Output, Scratch, Wanted};

/// A sequence to draft for.
#[derive(Debug)]
pub struct NextDrafts<'a> {
    /// The sequence, which drafts.
    pub sequence: &'a mut Sequence,
    /// The choice of the first drafted token. Its history ends with the token after the sequence.
    pub choice: Choice<'a>,
}

impl Served {
    /// Runs tokens of different sequences together, and appends the rows of logits that they ask for to `logits`. Returns for each its
    /// output, or its own fault; see [`Model::run`](crate::model::Model::run). If the call fails, no sequence changes, except that recurrent
    /// layers and windows may keep fewer positions, and sequences that older weights computed fewer or none.
    ///
    /// Each pass holds the weights: a trainer's step may come between two of them. Tokens of a sequence that ran with the weights before it run
    /// again first, so that all outputs are those of the weights of their pass.
    ///
    /// Calls of several threads run in the same passes: see [`Served::generates`].
    ///
    /// A sequence that shares prefixes, with several tokens to run, of which only the last one's output is wanted, begins with full blocks of
    /// others as far as those hold the same tokens, and runs the rest. On the CPU it has the same bits as if all had run.
    ///
    /// With `look_ahead` a GPU runs the step after this one at once, with the tokens that it chose.
    pub fn run(
        &self,
        work: Vec<NewTokens<'_>>,
        look_ahead: bool,
        scratch: &mut Scratch,
        logits: &mut Vec<f32>,
    ) -> Result<Vec<Result<Output>>> {
        self.check(&work)?;
        self.runner().run(
            (self.model(), self.leased()),
            work,
            look_ahead,
            scratch,
            logits,
        )
    }

    /// Like [`Served::run`], but always uses the reference block, against which fused kernels are tested. Slow on a GPU. The sequences
    /// share no blocks with others from then on.
    pub fn run_reference(
        &self,
        mut work: Vec<NewTokens<'_>>,
        scratch: &mut Scratch,
        logits: &mut Vec<f32>,
    ) -> Result<Vec<Result<Output>>> {
        self.check(&work)?;
        let _held = self.hold()?;
        for part in &mut work {
            part.sequence.set_sharing(false);
        }
        let mut request = Request::new(work);
        request.renew()?;
        let run = |batch: Batch<'_>, scratch: &mut Scratch, logits: &mut Vec<f32>| {
            self.model().run_reference(batch, scratch, logits)
        };
        let vocabulary = self.spec().vocab_size;
        while !request.is_over() {
            let left = request.waiting().left;
            pass(vec![request.part(left)], false, vocabulary, scratch, run);
        }
        request.finish(logits, vocabulary)
    }

    /// Refuses tokens that cannot be run, and sequences of other models.
    fn check(&self, work: &[NewTokens<'_>]) -> Result<()> {
        for part in work {
            self.check_tokens(part.tokens)?;
            if !part.sequence.is_of(self.model()) {
                bail!(InvalidArgument, "the sequence is of another model");
            }
        }
        Ok(())
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
}
