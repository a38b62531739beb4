//! Runs a model. [`Model::run`] is the only way through the weights: it divides a batch into passes, run by the reference block on the CPU
//! and by fused kernels on a GPU (`run_on_gpu`), runs one call at a time, and gives each slot an output or its fault.

use std::sync::Mutex;

use super::batch::{Batch, Divided, Output, Part, PassLimits, Segment, Wanted, passes};
use super::block::{self, Rows};
use super::fused::{self, Executor, Source};
use super::kv::KvArena;
use super::{KvType, Model, Weights};
use crate::base::error::{bail, err};
use crate::base::turns::Turn;
use crate::base::{Error, Result, call, memory};
use crate::ops::likelihood::{Likelihood, likelihoods};
use crate::ops::sample::{self, Choice};
use crate::ops::{Slice, activation};

/// Rows that go through the blocks together on the CPU: enough to make full use of each weight that is read, few enough that
/// scratch memory does not grow with the prompt.
pub(super) const ROWS: usize = 512;

/// Rows of logits that are in host memory together for likelihoods: few, because the CPU's kernels for few rows are the fastest.
const LIKELIHOOD_ROWS: usize = 32;

/// Most rows of a pass, by fused kernels or by the reference block.
pub(super) fn pass_rows(is_fused: bool) -> usize {
    if is_fused { fused::ROWS } else { ROWS }
}

/// Memory reused between passes, by one caller at a time. It grows to the largest pass seen.
#[derive(Debug)]
pub struct Scratch {
    pub(super) block: block::BlockScratch,
    sample: Vec<Mutex<sample::SampleScratch>>,
    /// Logits from which tokens are chosen.
    logits: Vec<f32>,
    /// The hidden row of the last position of each segment that drafts; empty if it is not known.
    pub(super) hidden: Vec<Vec<f32>>,
}

impl Scratch {
    /// Empty scratch memory.
    pub fn new() -> Self {
        Scratch {
            block: block::BlockScratch::new(),
            sample: Vec::new(),
            logits: Vec::new(),
            hidden: Vec::new(),
        }
    }

    /// Removes the hidden row, `[hidden]`, of the last position that stays of a segment of the last run, if the segment drafts.
    pub fn take_hidden(&mut self, slot: usize) -> Option<Vec<f32>> {
        let hidden = self.hidden.get_mut(slot).map(std::mem::take);
        hidden.filter(|row| !row.is_empty())
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        let hidden = self.hidden.iter().map(|row| size_of_val(&**row));
        self.block.bytes() + size_of_val(&*self.logits) + hidden.sum::<usize>()
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}

/// The rows of a pass with a requested output, in the order of slots.
#[derive(Default)]
pub(super) struct RowsWanted {
    /// Rows whose logits are returned, each with its slot.
    pub(super) logits: Vec<(usize, usize)>,
    /// Rows whose hidden rows are returned, each with its slot.
    pub(super) hidden: Vec<(usize, usize)>,
    /// Rows by which given tokens have likelihoods.
    pub(super) likelihoods: Vec<LikelihoodRow>,
    /// Rows from which tokens are chosen.
    pub(super) tokens: Vec<ChosenRow>,
}

/// A row by which a given token has a likelihood.
#[derive(Clone, Copy)]
pub(super) struct LikelihoodRow {
    pub(super) row: usize,
    pub(super) slot: usize,
    /// The given token.
    pub(super) token: u32,
}

/// A row from which a token is chosen.
#[derive(Clone, Copy)]
pub(super) struct ChosenRow {
    pub(super) row: usize,
    pub(super) slot: usize,
    /// The number of the row in its segment.
    pub(super) index: usize,
}

/// Outputs of a batch's slots so far.
pub(super) struct Slots {
    outputs: Vec<Result<Output>>,
    /// Rows of logits so far, including those present before.
    rows: usize,
}

impl Slots {
    fn of(batch: &Batch<'_>, vocabulary: usize, logits: &[f32]) -> Slots {
        let rows = logits.len() / vocabulary;
        let each = batch.segments.iter().map(|segment| {
            Ok(match segment.wanted {
                Wanted::Last | Wanted::All => Output::Logits(rows..rows),
                Wanted::LastHidden | Wanted::AllHidden => Output::Hidden(Vec::new()),
                Wanted::Likelihoods(_) => Output::Likelihoods(Vec::new()),
                Wanted::Nothing | Wanted::Token(_) => Output::Cached,
                Wanted::Verified(_) => Output::Verified(Vec::new()),
            })
        });
        Slots {
            outputs: each.collect(),
            rows,
        }
    }

    /// Assigns the next row of logits to a slot. The rows of a slot are consecutive.
    pub(super) fn add_row(&mut self, slot: usize) {
        if let Ok(Output::Logits(rows)) = &mut self.outputs[slot] {
            if rows.start == rows.end {
                *rows = self.rows..self.rows;
            }
            rows.end += 1;
        }
        self.rows += 1;
    }

    /// Appends hidden rows of a pass to their slots, which are those of `wanted`; `hidden` has them in the same order.
    pub(super) fn add_hidden(
        &mut self,
        wanted: &[(usize, usize)],
        hidden: &[f32],
        width: usize,
    ) -> Result<()> {
        for (&(_, slot), row) in wanted.iter().zip(hidden.chunks_exact(width)) {
            if let Ok(Output::Hidden(rows)) = &mut self.outputs[slot] {
                memory::make_room(rows, width)?;
                rows.extend_from_slice(row);
            }
        }
        Ok(())
    }

    /// Appends likelihoods of a slot's next tokens, or records why there are none.
    pub(super) fn add_likelihoods(&mut self, slot: usize, found: Result<Vec<Likelihood>>) {
        match (&mut self.outputs[slot], found) {
            (Ok(Output::Likelihoods(all)), Ok(found)) => all.extend(found),
            (Ok(_), Err(fault)) => self.fail(slot, fault),
            _ => {}
        }
    }

    pub(super) fn choose(&mut self, slot: usize, token: Result<u32>) {
        if self.outputs[slot].is_ok() {
            self.outputs[slot] = token.map(Output::Token);
        }
    }

    /// Adds the token after row `index` of a verified segment, if all of its tokens up to that row are right. Only the first row can fail:
    /// later ones run again, with tokens that were chosen.
    pub(super) fn verify(
        &mut self,
        slot: usize,
        segment: &Segment<'_>,
        index: usize,
        token: Result<u32>,
    ) {
        let Ok(Output::Verified(chosen)) = &mut self.outputs[slot] else {
            return;
        };
        let is_right = chosen.len() == index
            && chosen.last().is_none_or(|last| {
                let Wanted::Verified(how) = segment.wanted else {
                    return false;
                };
                *last == segment.tokens[index] && !how.stops.contains(last)
            });
        match token {
            Ok(token) if is_right => chosen.push(token),
            Err(fault) if index == 0 => self.fail(slot, fault),
            _ => {}
        }
    }

    /// The number of rows of a part that stay.
    pub(super) fn kept(&self, part: &Part) -> usize {
        match &self.outputs[part.slot] {
            Err(_) => 0,
            Ok(Output::Verified(chosen)) => {
                let of_part = chosen.len().saturating_sub(part.tokens.start);
                of_part.min(part.tokens.len())
            }
            Ok(_) => part.tokens.len(),
        }
    }

    /// Records a fault, unless the slot already has one.
    pub(super) fn fail(&mut self, slot: usize, fault: Error) {
        if self.outputs[slot].is_ok() {
            self.outputs[slot] = Err(fault);
        }
    }
}

impl Model {
    /// Runs a batch, and appends the rows of logits that its segments ask for to `logits`, `vocab_size` numbers each. Returns for each
    /// segment its output, with hidden rows if it asks for these, or its own fault: values beyond f16, or no token that could be chosen. For segments that draft, `scratch` has
    /// the hidden row of the last position that stays: [`Scratch::take_hidden`].
    ///
    /// Afterwards the blocks of segments without a fault hold the keys and values of their tokens. Those of the others, and of all if the
    /// call fails or the thread's [`call`] is cancelled, may hold anything at these positions. Segments must be of different sequences.
    ///
    /// On the CPU the logits of a token have the same bits however tokens are divided among segments, batches and calls, and on any number
    /// of threads. On a GPU the same calls give the same bits; calls that divide the work differently sum in another order, and differ by
    /// rounding.
    pub fn run(
        &self,
        batch: Batch<'_>,
        scratch: &mut Scratch,
        logits: &mut Vec<f32>,
    ) -> Result<Vec<Result<Output>>> {
        self.run_by(self.executor().as_deref(), batch, scratch, logits)
    }

    /// Most rows of a pass of [`Model::run_beside`]; `None` if nothing runs there.
    pub fn rows_beside(&self) -> Option<usize> {
        Some(self.beside()?.rows)
    }

    /// Like [`Model::run`], but runs on some of a GPU's multiprocessors, in working memory of its own, while calls of [`Model::run`] on other
    /// threads go on. Segments are prompts of two tokens or more. One thread at a time. Reports no progress: callbacks run outside.
    pub fn run_beside(
        &self,
        batch: Batch<'_>,
        scratch: &mut Scratch,
        logits: &mut Vec<f32>,
    ) -> Result<Vec<Result<Output>>> {
        self.in_lane(|executor| self.run_by(Some(executor), batch, scratch, logits))
    }

    /// Grows the working memory of [`Model::run_beside`] to that of a prompt's pass of so many rows, which ends before a position. Fails if
    /// there is no room.
    pub fn reserve_beside(&self, rows: usize, end: usize) -> Result<()> {
        // Entering the lane waits for steps.
        if self.beside().is_some_and(|beside| beside.holds(rows, end)) {
            return Ok(());
        }
        self.in_lane(|executor| executor.reserve(rows, end))
    }

    fn in_lane<T>(&self, work: impl FnOnce(&fused::Executor) -> Result<T>) -> Result<T> {
        let (Some(beside), Some(other)) = (self.beside(), self.executor()) else {
            bail!(Internal, "a model without a lane, run beside others");
        };
        call::in_silence(|| beside.run(&other, work))
    }

    /// Like [`Model::run`], but always uses the reference block, against which fused kernels are tested. Slow on a GPU.
    pub fn run_reference(
        &self,
        batch: Batch<'_>,
        scratch: &mut Scratch,
        logits: &mut Vec<f32>,
    ) -> Result<Vec<Result<Output>>> {
        self.run_by(None, batch, scratch, logits)
    }

    fn run_by(
        &self,
        executor: Option<&Executor>,
        batch: Batch<'_>,
        scratch: &mut Scratch,
        logits: &mut Vec<f32>,
    ) -> Result<Vec<Result<Output>>> {
        for segment in &batch.segments {
            self.check_tokens(segment.tokens)?;
            self.check_blocks(segment)?;
            if let Some(adapter) = segment.adapter {
                self.check_adapter(adapter)?;
            }
            if let Wanted::Likelihoods(tokens) = segment.wanted {
                self.check_ids(tokens)?;
                if tokens.len() != segment.tokens.len() {
                    let (given, run) = (tokens.len(), segment.tokens.len());
                    bail!(Internal, "likelihoods of {given} tokens after {run}");
                }
            }
            if segment.drafts_after.is_some() {
                self.check_drafter()?;
            }
            if executor.is_some() && segment.wanted.verifies_by_mask() {
                bail!(
                    Unsupported,
                    "a GPU verifies no drafted tokens by a mask; run one token at a time"
                );
            }
        }
        scratch.hidden.clear();
        for segment in &batch.segments {
            let before = segment.drafts_after.and_then(|hidden| hidden.0);
            scratch
                .hidden
                .push(before.map_or(Vec::new(), <[f32]>::to_vec));
        }
        let before = logits.len();
        let mut slots = Slots::of(&batch, self.spec().vocab_size, logits);
        let result = match executor {
            None => self.run_on_host(&batch, scratch, logits, &mut slots),
            Some(executor) => self.run_on_gpu(executor, &batch, scratch, logits, &mut slots),
        };
        match result {
            Ok(()) => Ok(slots.outputs),
            Err(e) => {
                logits.truncate(before);
                Err(e)
            }
        }
    }

    /// Most rows that go through the weights together: longer batches are divided into passes.
    pub fn pass_rows(&self) -> usize {
        pass_rows(self.device().is_cuda())
    }

    /// Fails unless a segment's positions have blocks.
    fn check_blocks(&self, segment: &Segment<'_>) -> Result<()> {
        let cache = self.kv().cache(segment.tables.kind())?;
        let end = segment.first + segment.tokens.len();
        let lacks = |(group, arena): (usize, &KvArena)| {
            segment.tables.blocks(group).len() * arena.block_positions() < end
        };
        match cache.arenas().iter().enumerate().position(lacks) {
            None => Ok(()),
            Some(group) => bail!(
                Internal,
                "{end} positions of a sequence in {} blocks of group {group}",
                segment.tables.blocks(group).len()
            ),
        }
    }

    fn run_on_host(
        &self,
        batch: &Batch<'_>,
        scratch: &mut Scratch,
        logits: &mut Vec<f32>,
        slots: &mut Slots,
    ) -> Result<()> {
        let segments = batch.segments.iter().enumerate();
        let segments = segments.map(|(slot, segment)| Divided::of(slot, segment));
        let limits = PassLimits {
            rows: ROWS,
            segments: ROWS,
            border: 1,
        };
        for parts in passes(segments, limits) {
            let _turn = self.turn()?;
            let tokens = tokens_of(&batch.segments, &parts);
            let wanted = rows_wanted(&batch.segments, &parts);
            self.blocks(&tokens, &batch.segments, &parts, scratch)?;
            let mut unusable: Vec<(usize, Error)> = std::mem::take(&mut scratch.block.faults);
            for (row, fault) in &unusable {
                let slot = slot_of(&parts, *row);
                if !matches!(batch.segments[slot].wanted, Wanted::Verified(_)) {
                    slots.fail(slot, fault.clone());
                }
            }
            self.head(&rows(&wanted.logits), &mut scratch.block, logits)?;
            wanted
                .logits
                .iter()
                .for_each(|&(_, slot)| slots.add_row(slot));
            let hidden = self.hidden_rows(&rows(&wanted.hidden), &mut scratch.block)?;
            slots.add_hidden(&wanted.hidden, &hidden, self.spec().hidden_size)?;
            self.likelihoods_on_host(&wanted.likelihoods, scratch, slots)?;
            if !wanted.tokens.is_empty() {
                let of_tokens = chosen_rows(&wanted.tokens);
                scratch.logits.clear();
                self.head(&of_tokens, &mut scratch.block, &mut scratch.logits)?;
                let choices = choices(&batch.segments, &wanted.tokens);
                let (logits, cpu) = (&scratch.logits, self.device.host()?);
                let chosen = sample::sample_rows(logits, &choices, cpu, &mut scratch.sample);
                for (at, mut token) in wanted.tokens.iter().zip(chosen) {
                    let fault = unusable.iter().position(|(row, _)| *row == at.row);
                    if let Some(fault) = fault {
                        token = Err(unusable.swap_remove(fault).1);
                    }
                    let segment = &batch.segments[at.slot];
                    match segment.wanted {
                        Wanted::Verified(_) => slots.verify(at.slot, segment, at.index, token),
                        _ => slots.choose(at.slot, token),
                    }
                }
            }
            self.follow(&batch.segments, &parts, slots, scratch)?;
            call::add(tokens.len() as u64);
        }
        Ok(())
    }

    /// Gives slots the likelihoods of given tokens, from the logits of a few rows at a time.
    fn likelihoods_on_host(
        &self,
        wanted: &[LikelihoodRow],
        scratch: &mut Scratch,
        slots: &mut Slots,
    ) -> Result<()> {
        if wanted.is_empty() {
            return Ok(());
        }
        let cpu = self.device.host_cpu()?;
        for of_slot in wanted.chunk_by(|a, b| a.slot == b.slot) {
            for part in of_slot.chunks(LIKELIHOOD_ROWS) {
                let rows: Vec<usize> = part.iter().map(|at| at.row).collect();
                let tokens: Vec<u32> = part.iter().map(|at| at.token).collect();
                scratch.logits.clear();
                self.head(&rows, &mut scratch.block, &mut scratch.logits)?;
                let found = likelihoods(&scratch.logits, &tokens, &cpu);
                slots.add_likelihoods(part[0].slot, found);
            }
        }
        Ok(())
    }

    /// Runs the rows of a pass through all blocks and stores their keys and values; the output of the last block is left in the residual
    /// stream.
    fn blocks(
        &self,
        tokens: &[u32],
        segments: &[Segment<'_>],
        parts: &[Part],
        s: &mut Scratch,
    ) -> Result<()> {
        let (spec, weights) = (self.spec(), self.weights());
        let of_part = |(row, part): (usize, &Part)| {
            let segment = &segments[part.slot];
            let first = segment.first + part.tokens.start;
            let end = segment.first + part.tokens.end;
            Ok(Rows {
                cache: self.kv().cache(segment.tables.kind())?,
                tables: segment.tables,
                states: segment.tables.state().parts_of_pass(first, end),
                context: segment.context,
                adapter: segment.adapter,
                first,
                rows: row..row + part.tokens.len(),
            })
        };
        let of_pass = starts(parts).into_iter().zip(parts).map(of_part);
        let of_pass = of_pass.collect::<Result<Vec<_>>>()?;
        let pass = block::ReferencePass::new(&self.device, spec, self.activations, &of_pass)?;
        pass.embed(&weights, tokens, &mut s.block)?;
        for (index, block) in weights.blocks.iter().enumerate() {
            call::check()?;
            call::begun((tokens.len() * index / spec.blocks.len()) as u64);
            pass.block(index, block, &of_pass, &mut s.block)?;
        }
        Ok(())
    }

    /// Appends the logits of `rows` of the residual stream.
    fn head(
        &self,
        rows: &[usize],
        s: &mut block::BlockScratch,
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        let (spec, weights) = (self.spec(), self.weights());
        let device = &self.device;
        match rows.is_empty() {
            true => Ok(()),
            false => {
                let last = (&weights.norm, &weights.head);
                block::head(device, spec, self.activations, last, rows, s, logits)
            }
        }
    }

    /// The hidden rows, `[rows, hidden]`, of `rows` of the residual stream.
    fn hidden_rows(&self, rows: &[usize], s: &mut block::BlockScratch) -> Result<Vec<f32>> {
        let (spec, weights) = (self.spec(), self.weights());
        let mut hidden = memory::zeros(rows.len() * spec.hidden_size)?;
        if !rows.is_empty() {
            block::normalize_rows(&self.device, spec, &weights.norm, rows, s)?.read(&mut hidden)?;
        }
        Ok(hidden)
    }

    /// The model with the cache of a type, for fused kernels.
    pub(super) fn source<'a>(&'a self, weights: &'a Weights, kv: KvType) -> Result<Source<'a>> {
        Ok(Source {
            spec: self.spec(),
            weights,
            kv: self.kv().cache(kv)?,
        })
    }

    /// As [`Model::turn`], for a pass of an executor. One in a lane waits for no other.
    pub(super) fn turn_of(&self, executor: &Executor) -> Result<Option<Turn<'_>>> {
        match executor.is_beside() {
            false => self.turn().map(Some),
            true => call::check().map(|()| None),
        }
    }

    /// Waits until no other call runs this model; fails if the call is cancelled meanwhile. A batch yields after each of its passes.
    pub(super) fn turn(&self) -> Result<Turn<'_>> {
        let turn = self.turns.take(call::is_over)?;
        call::check()?;
        Ok(turn)
    }

    /// The embeddings of `tokens`, which are the input of the first block, `hidden_size` numbers each.
    pub fn embed(&self, tokens: &[u32], out: &mut [f32]) -> Result<()> {
        self.check_ids(tokens)?;
        self.weights().embed(tokens, out)?;
        let scale = self.spec().embedding_scale;
        out.iter_mut().for_each(|x| *x *= scale);
        Ok(())
    }

    /// The logits of rows that left the last block elsewhere, `hidden_size` numbers each: final norm and head. A model loaded for sampling
    /// only supports this and [`Model::embed`].
    pub fn logits_of(
        &self,
        hidden: &[f32],
        scratch: &mut Scratch,
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        let width = self.spec().hidden_size;
        logits.clear();
        if !hidden.len().is_multiple_of(width) {
            bail!(
                InvalidArgument,
                "{} numbers are not whole rows of {width}",
                hidden.len()
            );
        }
        for rows in hidden.chunks(ROWS * width) {
            let _turn = self.turn()?;
            let residual = &mut scratch.block.residual;
            residual.grow(&self.device, rows.len())?;
            let mut to = residual.first_mut(rows.len())?;
            to.reborrow().copy_from(Slice::Host(rows))?;
            match self.spec().residual_scale {
                1.0 => {}
                divisor => activation::scale(&self.device, to, 1.0 / divisor)?,
            }
            let all: Vec<usize> = (0..rows.len() / width).collect();
            self.head(&all, &mut scratch.block, logits)?;
        }
        Ok(())
    }

    /// Fails for tokens that cannot be run.
    pub fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        if self.weights().blocks.is_empty() {
            bail!(
                Unsupported,
                "the model was loaded for sampling only, without its layers; load it whole to run tokens"
            );
        }
        self.check_ids(tokens)
    }

    /// Fails for ids without a row in the embedding.
    pub fn check_ids(&self, tokens: &[u32]) -> Result<()> {
        match self.without_a_row(tokens) {
            None => Ok(()),
            Some(index) => Err(self.no_row(tokens[index], index, None)),
        }
    }

    /// The index of the first id that the embedding has no row for.
    pub(crate) fn without_a_row(&self, tokens: &[u32]) -> Option<usize> {
        let rows = self.spec().vocab_size;
        tokens.iter().position(|&id| id as usize >= rows)
    }

    /// The error for a token without a row in the embedding, with its text if that is known.
    pub(crate) fn no_row(&self, id: u32, index: usize, text: Option<String>) -> Error {
        err!(
            InvalidArgument,
            "token {id} at index {index} is outside the vocabulary of {}{}",
            self.spec().vocab_size,
            match text {
                Some(text) => format!(": it is '{text}', and the embedding has no row for it"),
                None => String::new(),
            }
        )
    }
}

/// The first row of each part of a pass.
pub(super) fn starts(parts: &[Part]) -> Vec<usize> {
    let mut row = 0;
    parts
        .iter()
        .map(|part| {
            row += part.tokens.len();
            row - part.tokens.len()
        })
        .collect()
}

/// The slot that a row of a pass belongs to.
pub(super) fn slot_of(parts: &[Part], row: usize) -> usize {
    let mut starts = starts(parts).into_iter().zip(parts).rev();
    starts
        .find(|(start, _)| *start <= row)
        .map_or(0, |(_, part)| part.slot)
}

fn tokens_of(segments: &[Segment<'_>], parts: &[Part]) -> Vec<u32> {
    let of = |part: &Part| &segments[part.slot].tokens[part.tokens.clone()];
    parts.iter().flat_map(of).copied().collect()
}

/// The rows of a pass with a requested output.
pub(super) fn rows_wanted(segments: &[Segment<'_>], parts: &[Part]) -> RowsWanted {
    let mut wanted = RowsWanted::default();
    for (start, part) in starts(parts).into_iter().zip(parts) {
        let segment = &segments[part.slot];
        let end = start + part.tokens.len();
        let is_last = part.tokens.end == segment.tokens.len();
        match segment.wanted {
            Wanted::All => wanted
                .logits
                .extend((start..end).map(|row| (row, part.slot))),
            Wanted::Last if is_last => wanted.logits.push((end - 1, part.slot)),
            Wanted::AllHidden => wanted
                .hidden
                .extend((start..end).map(|row| (row, part.slot))),
            Wanted::LastHidden if is_last => wanted.hidden.push((end - 1, part.slot)),
            Wanted::Likelihoods(tokens) => {
                let given = &tokens[part.tokens.clone()];
                let rows = (start..end).zip(given);
                wanted
                    .likelihoods
                    .extend(rows.map(|(row, &token)| LikelihoodRow {
                        row,
                        slot: part.slot,
                        token,
                    }));
            }
            Wanted::Token(_) if is_last => wanted.tokens.push(ChosenRow {
                row: end - 1,
                slot: part.slot,
                index: part.tokens.end - 1,
            }),
            Wanted::Verified(_) => {
                let rows = (start..end).zip(part.tokens.clone());
                wanted.tokens.extend(rows.map(|(row, index)| ChosenRow {
                    row,
                    slot: part.slot,
                    index,
                }));
            }
            Wanted::Nothing | Wanted::Last | Wanted::LastHidden | Wanted::Token(_) => {}
        }
    }
    wanted
}

pub(super) fn rows(wanted: &[(usize, usize)]) -> Vec<usize> {
    wanted.iter().map(|&(row, _)| row).collect()
}

pub(super) fn chosen_rows(wanted: &[ChosenRow]) -> Vec<usize> {
    wanted.iter().map(|at| at.row).collect()
}

/// The choice settings of these rows.
pub(super) fn choices<'a>(segments: &[Segment<'a>], wanted: &[ChosenRow]) -> Vec<Choice<'a>> {
    let choice = |at: &ChosenRow| match segments[at.slot].wanted {
        Wanted::Token(choice) => Some(choice),
        Wanted::Verified(how) => Some(how.choice(at.index, segments[at.slot].tokens.len())),
        _ => None,
    };
    wanted.iter().filter_map(choice).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use std::sync::Arc;

    use crate::base::ErrorKind;
    use crate::base::call::Cancel;
    use crate::model::kv::KvTables;
    use crate::model::{Device, KvType, LoadOptions};

    fn golden() -> Arc<Model> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/model/qwen3_tied");
        Model::load(&path, &LoadOptions::new(Device::cpu(Some(1)).unwrap())).unwrap()
    }

    /// While one sequence runs, calls for others wait, and end when they are cancelled.
    #[test]
    fn who_waits_for_another_sequence_can_be_cancelled() {
        let model = golden();
        let cancel = Cancel::new();
        let mut scratch = Scratch::new();
        let groups = model.kv().groups().len();
        let mut tables = KvTables::new(KvType::F16, groups);
        (0..groups).for_each(|group| tables.push(group, 1));
        let greedy = crate::model::SamplingOptions::default();
        let choice = Choice {
            options: &greedy,
            draw: 0,
            history: &[],
            allowed: None,
        };
        std::thread::scope(|scope| {
            let other = model.turns.take(|| false).unwrap();
            let waiting = scope.spawn(|| {
                let mut logits = Vec::new();
                cancel.watching(|| {
                    [Wanted::Nothing, Wanted::Last, Wanted::Token(choice)].map(|wanted| {
                        let segment = Segment {
                            tokens: &[1, 2, 3],
                            first: 0,
                            tables: &tables,
                            context: 64,
                            adapter: None,
                            wanted,
                            drafts_after: None,
                        };
                        let batch = Batch {
                            segments: vec![segment],
                            look_ahead: false,
                        };
                        model.run(batch, &mut scratch, &mut logits)
                    })
                })
            });
            // Whether or not it already waits, it does not get its turn.
            cancel.cancel();
            for result in waiting.join().unwrap() {
                assert_eq!(result.unwrap_err().kind(), ErrorKind::Cancelled);
            }
            drop(other);
        });
    }
}
