//! Runs the drafter of a model: after each pass, for sequences that draft, its block over the positions whose next token the pass ran; and
//! before a verification, one row a drafted token. Its keys and values are a layer of the cache after those of the blocks. On a GPU fused
//! passes do both.

use super::batch::{Part, Segment};
use super::block::{self, ReferencePass, Rows};
use super::fused::{self, Executor, Guess};
use super::kv::KvTables;
use super::run::{Scratch, Slots, starts};
use super::weights::{Drafter, Weights};
use super::{Choice, KvType, Model};
use crate::base::error::bail;
use crate::base::{Result, call};
use crate::ops::sample;

/// Rows of the drafter: positions of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct DrafterRows<'a> {
    /// The token after each position.
    pub tokens: &'a [u32],
    /// The hidden row of each position: the output of the final norm, `[positions, hidden]`.
    pub hidden: &'a [f32],
    /// The first position. The drafter's keys and values before it are in the cache.
    pub first: usize,
    /// Blocks of the sequence.
    pub tables: &'a KvTables,
    /// Positions that the sequence may come to, which decides between the short and the long RoPE table.
    pub context: usize,
}

/// A sequence to draft for.
#[derive(Clone, Copy, Debug)]
pub struct Drafting<'a> {
    /// The last position, and the token after it.
    pub row: DrafterRows<'a>,
    /// The choice of the first drafted token.
    pub choice: Choice<'a>,
}

impl Model {
    /// Whether it has a drafter.
    pub fn has_drafter(&self) -> bool {
        self.weights().drafter.is_some()
    }

    /// The drafter of the model's weights.
    fn drafter<'a>(&self, weights: &'a Weights) -> Result<&'a Drafter> {
        match &weights.drafter {
            Some(drafter) => Ok(drafter),
            None => bail!(
                Unsupported,
                "drafts of a {} model without a drafter (tensors mtp.*); leave the number of drafted tokens out",
                self.spec().family
            ),
        }
    }

    /// Most drafted tokens of a sequence that a recorded pass verifies, on a GPU. More take a pass like a prompt's, which takes as long as
    /// several steps. `None` where no such pass is recorded: on the CPU, and of models like Gemma 4.
    pub fn recorded_drafts(&self) -> Option<usize> {
        let is_recorded = self.executor()?.records_verifications();
        is_recorded.then_some(fused::MOST_VERIFIED - 1)
    }

    /// The number of passes recorded so far on a GPU. A step in which it changes has also recorded its pass, and says nothing of later ones.
    pub fn recorded_passes(&self) -> u64 {
        self.executor()
            .map_or(0, |executor| executor.recorded_passes())
    }

    /// Fails unless [`Model::has_drafter`].
    pub fn check_drafter(&self) -> Result<()> {
        self.drafter(&self.weights()).map(|_| ())
    }

    /// Runs rows of several sequences through the drafter's block, and stores their keys and values; the output of the block is left in the
    /// residual stream.
    pub(super) fn run_drafter(&self, segments: &[DrafterRows<'_>], s: &mut Scratch) -> Result<()> {
        let weights = self.weights();
        let drafter = self.drafter(&weights)?;
        let (mut tokens, mut hidden) = (Vec::new(), Vec::new());
        let mut of_pass = Vec::with_capacity(segments.len());
        for segment in segments {
            let start = tokens.len();
            tokens.extend_from_slice(segment.tokens);
            hidden.extend_from_slice(segment.hidden);
            of_pass.push(Rows {
                adapter: None,
                cache: self.kv().cache(segment.tables.kind())?,
                tables: segment.tables,
                states: Vec::new(),
                context: segment.context,
                first: segment.first,
                rows: start..tokens.len(),
            });
        }
        let spec = self.spec();
        let pass = ReferencePass::new(self.device(), spec, self.activations(), &of_pass)?;
        pass.enter_drafter((&weights, drafter), &tokens, &hidden, &mut s.block)?;
        let index = spec.blocks.len();
        pass.block(index, &drafter.block, &of_pass, &mut s.block)?;
        // Rows whose experts cannot be chosen make bad drafts, and no fault of the sequence.
        s.block.faults.clear();
        Ok(())
    }

    /// Runs the drafter over the positions whose next token is in a pass, for segments that draft, and keeps the hidden row of the last
    /// position of each.
    pub(super) fn follow(
        &self,
        segments: &[Segment<'_>],
        parts: &[Part],
        slots: &Slots,
        scratch: &mut Scratch,
    ) -> Result<()> {
        if segments.iter().all(|s| s.drafts_after.is_none()) {
            return Ok(());
        }
        let (spec, width) = (self.spec(), self.spec().hidden_size);
        let count = parts.iter().map(|part| part.tokens.len()).sum();
        let device = self.device();
        let hidden = block::hidden_rows(device, spec, &self.weights(), count, &mut scratch.block)?;
        let mut of_parts = Vec::new();
        for (start, part) in starts(parts).into_iter().zip(parts) {
            let (segment, kept) = (&segments[part.slot], slots.kept(part));
            if segment.drafts_after.is_none() || kept == 0 {
                continue;
            }
            let first = segment.first + part.tokens.start;
            let rows = &hidden[start * width..(start + kept) * width];
            let (earlier, last) = rows.split_at((kept - 1) * width);
            let mut before = std::mem::replace(&mut scratch.hidden[part.slot], last.to_vec());
            before.resize(if first == 0 { 0 } else { width }, 0.0);
            before.extend_from_slice(earlier);
            // No position is before the first token.
            let tokens = part.tokens.start + usize::from(first == 0)..part.tokens.start + kept;
            of_parts.push((segment, first.saturating_sub(1), tokens, before));
        }
        let rows = of_parts
            .iter()
            .map(|(segment, first, tokens, hidden)| DrafterRows {
                tokens: &segment.tokens[tokens.clone()],
                hidden,
                first: *first,
                tables: segment.tables,
                context: segment.context,
            });
        let rows: Vec<_> = rows.filter(|rows| !rows.tokens.is_empty()).collect();
        match rows.is_empty() {
            true => Ok(()),
            false => self.run_drafter(&rows, scratch),
        }
    }

    /// Appends the logits of the token after the last of `rows`, `vocab_size` numbers, as the drafter sees it, and returns the drafter's
    /// hidden row of that token, `[hidden]`. Fails for a model without a drafter, and for hidden rows of another size.
    pub fn drafter_logits(
        &self,
        rows: DrafterRows<'_>,
        scratch: &mut Scratch,
        logits: &mut Vec<f32>,
    ) -> Result<Vec<f32>> {
        let count = self.check_rows(&rows)?;
        let _turn = self.turn()?;
        if let Some(executor) = self.executor() {
            return self.drafter_logits_on_gpu(&executor, rows, logits);
        }
        let (weights, width) = (self.weights(), self.spec().hidden_size);
        let drafter = self.drafter(&weights)?;
        self.run_drafter(&[rows], scratch)?;
        let (spec, last) = (self.spec(), (&drafter.norm, &weights.head));
        let s = &mut scratch.block;
        block::head(
            self.device(),
            spec,
            self.activations(),
            last,
            &[count - 1],
            s,
            logits,
        )?;
        s.normed_row(width)
    }

    /// The number of rows of the drafter. Fails unless there are some, with a hidden row for each.
    fn check_rows(&self, rows: &DrafterRows<'_>) -> Result<usize> {
        self.check_drafter()?;
        let (count, width) = (rows.tokens.len(), self.spec().hidden_size);
        if count == 0 || rows.hidden.len() != count * width {
            bail!(
                InvalidArgument,
                "{} numbers for the hidden rows of {count} tokens; each takes {width}, and there must be one",
                rows.hidden.len()
            );
        }
        self.check_tokens(rows.tokens)?;
        Ok(count)
    }

    /// One row after another, as guesses run.
    fn drafter_logits_on_gpu(
        &self,
        executor: &Executor,
        rows: DrafterRows<'_>,
        logits: &mut Vec<f32>,
    ) -> Result<Vec<f32>> {
        let weights = self.weights();
        let source = self.source(&weights, rows.tables.kind())?;
        let (before, mut last) = (logits.len(), Vec::new());
        let each = rows.hidden.chunks_exact(self.spec().hidden_size);
        for (i, (&token, hidden)) in rows.tokens.iter().zip(each).enumerate() {
            logits.truncate(before);
            let guess = Guess {
                token,
                hidden,
                position: rows.first + i,
                tables: rows.tables,
                context: rows.context,
                choice: fused::GREEDY,
            };
            last = executor.drafter_logits(source, guess, logits)?;
        }
        Ok(last)
    }

    /// For each of `work`, which are of different sequences, up to `count` tokens that may follow the token of its row, which is the only
    /// one. Each is chosen from the drafter's logits as its choice says, with a draw of the next number and the tokens before it as history,
    /// so that it is the model's own choice where both have the same logits. Ends early at a token that cannot be chosen.
    pub fn draft(
        &self,
        work: &[Drafting<'_>],
        count: usize,
        scratch: &mut Scratch,
    ) -> Result<Vec<Vec<u32>>> {
        for Drafting { row, .. } in work {
            match self.check_rows(row)? {
                1 => {}
                rows => bail!(
                    InvalidArgument,
                    "{rows} rows to draft from; expected one, of the last token"
                ),
            }
        }
        match self.executor() {
            Some(executor) => self.draft_on_gpu(&executor, work, count),
            None => {
                let each = work.iter().map(|own| self.draft_one(own, count, scratch));
                each.collect()
            }
        }
    }

    fn draft_on_gpu(
        &self,
        executor: &Executor,
        work: &[Drafting<'_>],
        count: usize,
    ) -> Result<Vec<Vec<u32>>> {
        let (mut drafted, weights) = (vec![Vec::new(); work.len()], self.weights());
        // A pass has one table of rotary frequencies, and one type of keys and values.
        let of_pass = [false, true].into_iter();
        for of_pass in of_pass.flat_map(|long| KvType::ALL.map(|kv| (long, kv))) {
            let kind = |row: &DrafterRows<'_>| (executor.is_long(row.context), row.tables.kind());
            let of_table = (0..work.len()).filter(|&i| kind(&work[i].row) == of_pass);
            let of_table: Vec<usize> = of_table.collect();
            for part in of_table.chunks(fused::BATCH) {
                let guesses = part.iter().map(|&i| Guess {
                    token: work[i].row.tokens[0],
                    hidden: work[i].row.hidden,
                    position: work[i].row.first,
                    tables: work[i].row.tables,
                    context: work[i].row.context,
                    choice: work[i].choice,
                });
                let guesses: Vec<Guess<'_>> = guesses.collect();
                let _turn = self.turn()?;
                let tokens = executor.draft(self.source(&weights, of_pass.1)?, &guesses, count)?;
                part.iter()
                    .zip(tokens)
                    .for_each(|(&i, tokens)| drafted[i] = tokens);
            }
        }
        Ok(drafted)
    }

    fn draft_one(
        &self,
        work: &Drafting<'_>,
        count: usize,
        scratch: &mut Scratch,
    ) -> Result<Vec<u32>> {
        let Drafting { row, choice } = *work;
        let mut history = choice.history.to_vec();
        let (mut drafted, mut hidden) = (Vec::new(), row.hidden.to_vec());
        let (mut logits, mut token) = (Vec::new(), row.tokens.to_vec());
        let mut sampling = sample::SampleScratch::default();
        for i in 0..count {
            call::check()?;
            let row = DrafterRows {
                tokens: &token,
                hidden: &hidden,
                first: row.first + i,
                ..row
            };
            logits.clear();
            hidden = self.drafter_logits(row, scratch, &mut logits)?;
            let choice = Choice {
                options: choice.options,
                draw: choice.draw + i as u64,
                history: &history,
                allowed: None,
            };
            let Ok(next) = sample::sample(&logits, &choice, &mut sampling) else {
                break;
            };
            drafted.push(next);
            history.push(next);
            token = vec![next];
        }
        Ok(drafted)
    }
}
