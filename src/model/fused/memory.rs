//! Working memory of prompts and decode steps on a GPU.

use std::sync::Arc;

use super::drafter_scratch::DrafterScratch;
use super::graphs::Graphs;
use super::memory_sizes::{BufferBytes, LinearRoom, Room, table_pages};
use super::operands::GLU_DIVISOR;
use super::per_layer_scratch::PerLayerScratch;
use super::recurrent_scratch::RecurrentScratch;
use super::row_adapters::{AdapterMemory, RowAdapters};
use super::sizes::Sizes;
use super::state::{AheadStep, Begin, DeviceState, StepInput};
use crate::base::error::err;
use crate::base::memory::Tag;
use crate::base::{Error, Result};
use crate::cuda::{
    self, Best, DeviceBuffer, DeviceSlice, DrawRule, DrawScratch, Drawn, ExpertScratch, Gpu,
    LinearScratch, MaskRows, NormScratch, Pinned, ScratchDevice, SplitKvWorkspace,
};
use crate::model::kv::{KvTables, NULL_BLOCK, StateBlocks};
use crate::ops::sample::Choice;

/// Working memory, and what the last step left in it.
pub(super) struct Memory {
    pub(super) rows: usize,
    head_rows: usize,
    batch: usize,
    pub(super) pages: usize,
    /// f32 `[rows, hidden]`: the residual stream.
    pub(super) residual: DeviceBuffer,
    /// f32 `[hidden]`, for a single row with norms fused into prologues: the residual stream between the halves of a block, and the output
    /// of a half.
    pub(super) between: DeviceBuffer,
    pub(super) half: DeviceBuffer,
    /// f16: normalized rows, the input of the first GEMM of a half of a block; also the output of attention.
    pub(super) input: DeviceBuffer,
    /// The output of the first GEMM of a half of a block: qkv in f32, gate and up in f16. Also, in f32, the output of the last GEMM of a
    /// half with a norm after it.
    pub(super) projected: DeviceBuffer,
    /// f16: rotated queries, and later the input of the MLP's last GEMM; before the drafter's block the input of its projection.
    pub(super) inner: DeviceBuffer,
    pub(super) logits: DeviceBuffer,
    pub(super) tokens: DeviceBuffer,
    pub(super) positions: DeviceBuffer,
    /// u32 `[batch, pages]` for each group of layers: the block tables.
    pub(super) tables: Vec<DeviceBuffer>,
    pub(super) best: Best,
    /// Allocated by the first draw.
    pub(super) draw: Option<DrawScratch>,
    /// Allocated by the first choice by a mask.
    masks: Option<MaskRows>,
    /// One u32 per row: 1 + the first block with queries, keys or values beyond f16, or 0.
    pub(super) unfit: DeviceBuffer,
    /// One u32 per row: 1 + the first block with one of the values of [`overflowing`] beyond f16, or 0.
    pub(super) overflow: DeviceBuffer,
    /// [`Sizes::takes_stream`].
    takes_stream: bool,
    /// One u32 per row: 1 + the first block with a router logit that is not finite, or 0.
    pub(super) unroutable: DeviceBuffer,
    /// f32: the gate of attention, in models that have it.
    pub(super) head_gate: Option<DeviceBuffer>,
    /// Scratch of recurrent layers, in models that have them.
    pub(super) recurrent: Option<RecurrentScratch>,
    /// Scratch of mixtures of experts, in models that have them.
    pub(super) experts: Option<ExpertScratch>,
    /// Working memory of per-layer embeddings, in models that have them.
    pub(super) per_layer: Option<PerLayerScratch>,
    /// Scratch of the drafter, in models that have one.
    pub(super) drafter: Option<DrafterScratch>,
    /// Working memory of passes with adapters, which the first of them allocates.
    pub(super) adapters: Option<AdapterMemory>,
    pub(super) splits: SplitKvWorkspace,
    pub(super) norms: NormScratch,
    pub(super) linear: LinearScratch,
    pub(super) history: Pinned,
    pub(super) graphs: Graphs,
    pub(super) state: DeviceState,
    /// Blocks of each row of the tables that the device has, indexed like them.
    written: Vec<Vec<usize>>,
    /// Whether rows that only padded a step may have noted faults.
    stale_faults: bool,
}

impl Memory {
    /// Memory for the given numbers of rows in the blocks, rows of logits, sequences of a step, and pages of each sequence.
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        sizes: &Sizes,
        rows: usize,
        head_rows: usize,
        batch: usize,
        pages: usize,
    ) -> Result<Memory> {
        let scratch = |bytes| DeviceBuffer::uninit(gpu, Tag::DeviceScratch, bytes);
        let room = Room {
            rows,
            head_rows,
            batch,
            pages,
        };
        let bytes = BufferBytes::of(sizes, room);
        let notes = || DeviceBuffer::zeroed(gpu, Tag::DeviceScratch, bytes.notes);
        let LinearRoom {
            rows: linear_rows,
            k,
            copy,
        } = bytes.linear;
        let device = sizes.scratch_device(ScratchDevice::of(gpu));
        Ok(Memory {
            rows,
            head_rows,
            batch,
            pages,
            residual: scratch(bytes.residual)?,
            between: scratch(bytes.between)?,
            half: scratch(bytes.between)?,
            input: scratch(bytes.input)?,
            projected: scratch(bytes.projected)?,
            inner: scratch(bytes.inner)?,
            logits: scratch(bytes.logits)?,
            tokens: scratch(bytes.tokens)?,
            positions: scratch(bytes.positions)?,
            tables: (0..sizes.groups)
                .map(|_| scratch(bytes.table))
                .collect::<Result<_>>()?,
            best: Best::new(gpu, head_rows.max(batch))?,
            draw: None,
            masks: None,
            unfit: notes()?,
            overflow: notes()?,
            takes_stream: sizes.takes_stream,
            unroutable: notes()?,
            head_gate: match sizes.head_gate {
                0 => None,
                _ => Some(scratch(bytes.head_gate)?),
            },
            recurrent: sizes
                .recurrent
                .map(|sizes| RecurrentScratch::new(gpu, sizes, rows, batch))
                .transpose()?,
            experts: sizes
                .experts
                .map(|e| ExpertScratch::new(gpu, e.routing, rows, e.intermediate, sizes.hidden))
                .transpose()?,
            per_layer: sizes
                .per_layer
                .map(|sizes| PerLayerScratch::new(gpu, sizes, rows))
                .transpose()?,
            drafter: match sizes.drafts {
                true => Some(DrafterScratch::new(gpu, sizes, rows, batch)?),
                false => None,
            },
            adapters: None,
            splits: SplitKvWorkspace::new(gpu, sizes.split_kv(), batch)?,
            norms: NormScratch::new(gpu, sizes.hidden)?,
            linear: LinearScratch::new_on(gpu, device, linear_rows, k, copy)?,
            history: Pinned::new(gpu, Tag::Scratch, bytes.history)?,
            graphs: Graphs::default(),
            state: DeviceState::Unknown,
            written: Vec::new(),
            stale_faults: false,
        })
    }

    /// Whether it has the given sizes.
    pub(super) fn holds(&self, rows: usize, head_rows: usize, batch: usize, pages: usize) -> bool {
        rows <= self.rows
            && head_rows <= self.head_rows
            && batch <= self.batch
            && pages <= self.pages
    }

    /// Grows the memory to the given sizes. If it has to grow, its contents are lost.
    pub(super) fn fit(
        &mut self,
        gpu: &Arc<Gpu>,
        sizes: &Sizes,
        rows: usize,
        head_rows: usize,
        batch: usize,
        pages: usize,
    ) -> Result<()> {
        if self.holds(rows, head_rows, batch, pages) {
            return Ok(());
        }
        self.forget()?;
        self.graphs.clear();
        if pages > self.pages {
            let pages = table_pages(pages);
            for table in &mut self.tables {
                let mut grown =
                    DeviceBuffer::uninit(gpu, Tag::DeviceScratch, self.batch * pages * 4)?;
                for row in 0..self.batch {
                    let bytes = self.pages * 4;
                    grown.copy_from(row * pages * 4, table, row * bytes, bytes)?;
                }
                *table = grown;
            }
            self.pages = pages;
        }
        if rows <= self.rows && batch <= self.batch && head_rows <= cuda::SKINNY_ROWS {
            // The rows in the residual stream must survive until their logits are computed.
            if head_rows > self.head_rows {
                let bytes = head_rows * sizes.vocab * 4;
                self.logits = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, bytes)?;
                self.best = Best::new(gpu, head_rows.max(self.batch))?;
                self.head_rows = head_rows;
            }
            return Ok(());
        }
        let empty = Memory::new(gpu, sizes, 0, 0, 1, 1)?;
        // Frees everything else before allocating more.
        let (rows, head_rows, batch, pages, old_batch, residual, tables) = {
            let old = std::mem::replace(self, empty);
            let (rows, head_rows) = (rows.max(old.rows), head_rows.max(old.head_rows));
            let most = batch.max(old.batch);
            let (residual, tables) = (old.residual, old.tables);
            (
                rows, head_rows, most, old.pages, old.batch, residual, tables,
            )
        };
        let mut new = Memory::new(gpu, sizes, rows, head_rows, batch, pages)?;
        let len = residual.bytes();
        new.residual.copy_from(0, &residual, 0, len)?;
        for (new, old) in new.tables.iter_mut().zip(&tables) {
            new.copy_from(0, old, 0, old_batch * pages * 4)?;
        }
        *self = new;
        Ok(())
    }

    /// Enqueues a write of the rows of a pass by adapter, and makes room for the pass.
    pub(super) fn write_adapters(
        &mut self,
        gpu: &Arc<Gpu>,
        sizes: &Sizes,
        adapters: &RowAdapters,
    ) -> Result<()> {
        let holds = |memory: &AdapterMemory| memory.holds(sizes, adapters);
        if !self.adapters.as_ref().is_some_and(holds) {
            // Recordings have its addresses.
            self.graphs.clear();
            self.adapters = None;
        }
        match &mut self.adapters {
            Some(memory) => memory.write(adapters),
            none => none
                .insert(AdapterMemory::new(gpu, sizes, adapters, self.rows)?)
                .write(adapters),
        }
    }

    /// Appends the first `count` logits; waits until the device has computed them.
    pub(super) fn read_logits(&self, count: usize, logits: &mut Vec<f32>) -> Result<()> {
        let before = logits.len();
        logits
            .try_reserve(count)
            .map_err(|e| err!(OutOfMemory, "{count} logits: {e}"))?;
        logits.resize(before + count, 0.0);
        self.logits.read(0, &mut logits[before..])
    }

    /// Waits for the device. Returns those of the first `rows` rows that had values beyond f16 or router logits that are not finite, each
    /// with an error that names the first such layer.
    pub(super) fn faults(&mut self, rows: usize) -> Result<Vec<(usize, Error)>> {
        let overflowing = overflowing(self.takes_stream, self.recurrent.is_some());
        // In the order within a layer, because errors corrupt all later values.
        let mut notes = vec![
            (
                &mut self.unfit,
                "a query, key or value reaches beyond 65,504, the largest number of the f16 in which a GPU multiplies them; run this model on the CPU with keys and values in f32",
            ),
            (&mut self.overflow, overflowing.as_str()),
        ];
        if self.takes_stream {
            // Blocks without norms convert the residual stream before they multiply it.
            notes.swap(0, 1);
        }
        if self.experts.is_some() {
            notes.push((
                &mut self.unroutable,
                "the router gives an expert a logit that is not finite, by which nothing can be chosen",
            ));
        }
        let mut first: Vec<Option<(u32, &str)>> = vec![None; rows];
        for (note, what) in notes {
            for (first, layer) in first.iter_mut().zip(take_notes(note, rows)?) {
                let found = layer.checked_sub(1).map(|layer| (layer, what));
                *first = match (*first, found) {
                    (Some(a), Some(b)) if b.0 < a.0 => Some(b),
                    (a, b) => a.or(b),
                };
            }
        }
        let faults = first.into_iter().enumerate().filter_map(|(row, found)| {
            let (layer, what) = found?;
            Some((row, err!(Unsupported, "layer {layer}: {what}")))
        });
        Ok(faults.collect())
    }

    /// Writes the block tables of sequences; the rows up to `rows` after them have the null block alone.
    pub(super) fn write_tables(&mut self, sequences: &[&KvTables], rows: usize) -> Result<()> {
        self.written.clear();
        for (group, table) in self.tables.iter_mut().enumerate() {
            let mut all = vec![NULL_BLOCK; rows.max(sequences.len()) * self.pages];
            let mut written = Vec::with_capacity(sequences.len());
            for (row, tables) in all.chunks_exact_mut(self.pages).zip(sequences) {
                let blocks = tables.blocks(group);
                let count = blocks.len().min(row.len());
                row[..count].copy_from_slice(&blocks[..count]);
                written.push(count);
            }
            table.write(0, &all)?;
            self.written.push(written);
        }
        Ok(())
    }

    /// Writes the blocks that were appended to the tables since [`Memory::write_tables`], which must have had the same sequences.
    pub(super) fn append_blocks(&mut self, sequences: &[&KvTables]) -> Result<()> {
        for (group, (table, written)) in self.tables.iter_mut().zip(&mut self.written).enumerate() {
            for (row, (tables, written)) in sequences.iter().zip(written).enumerate() {
                let blocks = tables.blocks(group);
                let count = blocks.len().min(self.pages);
                if *written < count {
                    table.write((row * self.pages + *written) * 4, &blocks[*written..count])?;
                    *written = count;
                }
            }
        }
        Ok(())
    }

    /// Begins a step, which chooses by `masks` or without any. The state is unknown afterwards until it is set again: see
    /// [`DeviceState::begin`].
    pub(super) fn begin(
        &mut self,
        input: &StepInput,
        continues: bool,
        masks: bool,
    ) -> Result<Begin> {
        match self.state.take_ahead() {
            Some(ahead) if continues && ahead.chooses && !masks && ahead.input == *input => {
                Ok(Begin::Enqueued(ahead.event))
            }
            Some(ahead) if continues && !ahead.chooses && ahead.input.has_logits_of(input) => {
                let rules = ahead.input.rules != input.rules;
                Ok(Begin::Choose { rules })
            }
            Some(ahead) => {
                self.abandon(&ahead)?;
                Ok(Begin::WriteAll)
            }
            None => Ok(self.state.begin(input, continues)),
        }
    }

    /// The faults of the step of `rows` rows that has just run, and of the one enqueued after it, which the next call then cannot begin with.
    pub(super) fn step_faults(&mut self, rows: usize) -> Result<Vec<(usize, Error)>> {
        match self.state.take_ahead() {
            Some(ahead) => self.abandon(&ahead),
            None => self.faults(rows),
        }
    }

    /// Waits for a step that is enqueued in vain, and removes what its faults left. Returns them, and those of the step before it.
    fn abandon(&mut self, ahead: &AheadStep) -> Result<Vec<(usize, Error)>> {
        ahead.event.wait()?;
        let faults = self.faults(ahead.input.rows.len())?;
        let rows: Vec<usize> = faults.iter().map(|(row, _)| *row).collect();
        ahead.clear(&rows)?;
        Ok(faults)
    }

    /// Forgets what is in working memory: something else will be.
    pub(super) fn forget(&mut self) -> Result<()> {
        let ahead = self.state.take_ahead();
        self.state = DeviceState::Unknown;
        ahead.map_or(Ok(()), |ahead| self.abandon(&ahead).map(drop))
    }

    /// Waits for a step that is enqueued, at the end.
    pub(super) fn wait(&mut self) -> Result<()> {
        self.state
            .take_ahead()
            .map_or(Ok(()), |ahead| ahead.event.wait())
    }

    /// Clears the faults of rows that only pad a step.
    pub(super) fn clear_stale_faults(&mut self) -> Result<()> {
        if std::mem::take(&mut self.stale_faults) {
            let mut notes = [&self.unfit, &self.overflow, &self.unroutable].into_iter();
            notes.try_for_each(|note| DeviceSlice::from(note).clear(note.bytes()))?;
        }
        Ok(())
    }

    /// Writes all input of a step but its draw rules and recurrent states: tokens, positions and block tables. There may be fewer sequences
    /// than rows.
    pub(super) fn write_step(
        &mut self,
        tokens: &[u32],
        positions: &[usize],
        sequences: &[&KvTables],
        rows: usize,
    ) -> Result<()> {
        self.clear_stale_faults()?;
        self.stale_faults = rows > tokens.len();
        let mut ids: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
        let mut places: Vec<i32> = positions.iter().map(|&p| p as i32).collect();
        ids.resize(rows, 0);
        places.resize(rows, 0);
        self.tokens.write(0, &ids)?;
        self.positions.write(0, &places)?;
        self.write_tables(sequences, rows)
    }

    /// Enqueues a write of the blocks of the recurrent state that a step of `rows` rows reads and writes. Rows beyond the sequences have null
    /// blocks.
    pub(super) fn write_states(
        &mut self,
        states: &[Option<StateBlocks>],
        rows: usize,
    ) -> Result<()> {
        let Some(recurrent) = &mut self.recurrent else {
            return Ok(());
        };
        let of_sequence = |state: &Option<StateBlocks>| {
            state.ok_or_else(|| err!(Internal, "a sequence has no recurrent state"))
        };
        let mut blocks = states.iter().map(of_sequence).collect::<Result<Vec<_>>>()?;
        blocks.resize(rows, StateBlocks::NULL);
        recurrent.write(blocks.into_iter().map(|blocks| (1, blocks)))
    }

    /// The drafter's scratch.
    pub(super) fn drafter(&self) -> Result<&DrafterScratch> {
        let scratch = self.drafter.as_ref();
        scratch.ok_or_else(|| err!(Internal, "a model without a drafter has no memory for it"))
    }

    /// The drafter's scratch, to write its input.
    pub(super) fn drafter_mut(&mut self) -> Result<&mut DrafterScratch> {
        let scratch = self.drafter.as_mut();
        scratch.ok_or_else(|| err!(Internal, "a model without a drafter has no memory for it"))
    }

    /// Writes the hidden rows of the positions before those of a pass, zeros for those that are not known, and the number of the one that
    /// each row takes.
    pub(super) fn write_hidden(
        &mut self,
        before: &[Option<&[f32]>],
        sources: impl Iterator<Item = usize>,
    ) -> Result<()> {
        let scratch = self.drafter_mut()?;
        scratch.write_before(before)?;
        scratch.write_sources(sources)
    }

    /// Writes the rules of all rows of a pass, and the tokens that occurred in each; there are no rules if all choices are the argmax.
    pub(super) fn write_rules(
        &mut self,
        gpu: &Arc<Gpu>,
        sizes: &Sizes,
        rules: &[DrawRule],
        choices: &[Choice<'_>],
    ) -> Result<()> {
        if rules.is_empty() {
            return Ok(());
        }
        let history: Vec<&[u32]> = choices.iter().map(|choice| choice.history).collect();
        self.drawing(gpu, sizes)?.set(gpu, rules, &history)
    }

    /// The token that the drafter guessed for a position of a sequence, in a pass of `rows` rows.
    pub(super) fn guessed(
        &self,
        row: usize,
        rows: usize,
        position: usize,
    ) -> Result<Option<Drawn>> {
        let scratch = self.drafter()?;
        let steps = scratch.guesses(rows);
        let encoded = scratch.guesses.read_i32(position % steps * rows + row);
        Ok(encoded.map(Drawn::read))
    }

    /// Says that rows which only pad a pass may note faults.
    pub(super) fn expect_stale_faults(&mut self) {
        self.stale_faults = true;
    }

    /// The scratch of draws, with room for as many sequences as the rest.
    pub(super) fn drawing(&mut self, gpu: &Arc<Gpu>, sizes: &Sizes) -> Result<&mut DrawScratch> {
        if self.draw.as_ref().is_some_and(|d| d.rows() < self.batch) {
            self.graphs.clear();
            self.draw = None;
        }
        match &mut self.draw {
            Some(scratch) => Ok(scratch),
            none => Ok(none.insert(DrawScratch::new(gpu, self.batch, sizes.vocab)?)),
        }
    }

    /// Enqueues the exclusion of tokens that masks of these choices, one for each of the first rows of logits, do not allow.
    pub(super) fn mask(
        &mut self,
        gpu: &Arc<Gpu>,
        sizes: &Sizes,
        choices: &[Choice<'_>],
    ) -> Result<()> {
        let masks = choices.iter().enumerate();
        let masks = masks.filter_map(|(row, choice)| Some((row, choice.allowed?.0)));
        let masks: Vec<(usize, &[u32])> = masks.collect();
        if masks.is_empty() {
            return Ok(());
        }
        if self.masks.as_ref().is_some_and(|m| m.rows() < masks.len()) {
            self.masks = None;
        }
        let room = self.batch.max(masks.len());
        let to = match &mut self.masks {
            Some(to) => to,
            none => none.insert(MaskRows::new(gpu, room, sizes.vocab)?),
        };
        to.set(&masks)?;
        cuda::mask_logits(gpu, &self.logits, to)
    }

    /// The token that a step of `rows` rows drew for a position of a sequence, if the history still holds it. The kernel divides the
    /// history in the same way.
    pub(super) fn drawn(&self, row: usize, rows: usize, position: usize) -> Option<Drawn> {
        let steps = self.history.bytes() / 4 / rows;
        let encoded = self.history.read_i32(position % steps * rows + row)?;
        Some(Drawn::read(encoded))
    }

    /// Whether steps of `rows` rows drew these tokens for these positions.
    pub(super) fn drew(&self, tokens: &[u32], positions: &[usize], rows: usize) -> bool {
        let mut each = tokens.iter().zip(positions).enumerate();
        each.all(|(row, (&token, &position))| {
            self.drawn(row, rows, position) == Some(Drawn::Token(token))
        })
    }
}

/// The fault of a row with a value beyond f16, for all values but queries, keys and values of attention. `takes_stream` is
/// [`Sizes::takes_stream`]; `recurs` says whether the model has recurrent layers.
fn overflowing(takes_stream: bool, recurs: bool) -> String {
    let mut values = vec!["a gate or up projection".to_string()];
    if takes_stream {
        values.insert(0, "the residual stream".into());
        values.push(format!("1/{GLU_DIVISOR} of their product"));
    }
    if recurs {
        values.push("the normalized output of a recurrent layer".into());
    }
    let (values, user) = match values.as_slice() {
        [rest @ .., last] if !rest.is_empty() => (
            format!("{}, or {last},", rest.join(", ")),
            "that a GPU has it in",
        ),
        only => (only.concat(), "that prompts have it in on a GPU"),
    };
    format!(
        "{values} reaches beyond 65,504, the largest number of the f16 {user}; run this model on the CPU"
    )
}

/// Reads and clears the notes of the first rows.
fn take_notes(notes: &mut DeviceBuffer, rows: usize) -> Result<Vec<u32>> {
    let mut values = vec![0u32; rows];
    notes.read(0, &mut values)?;
    if values.iter().any(|&value| value != 0) {
        notes.write(0, &vec![0u32; rows])?;
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overflow_names_all_values_that_the_model_has_in_f16() {
        for (takes_stream, recurs, values) in [
            (false, false, "a gate or up projection"),
            (
                true,
                false,
                "the residual stream, a gate or up projection, or 1/16 of their product,",
            ),
            (
                false,
                true,
                "a gate or up projection, or the normalized output of a recurrent layer,",
            ),
            (
                true,
                true,
                "the residual stream, a gate or up projection, 1/16 of their product, or the normalized output of a recurrent layer,",
            ),
        ] {
            let text = overflowing(takes_stream, recurs);
            let expected = format!("{values} reaches beyond 65,504, ");
            assert!(text.starts_with(&expected), "{text}");
        }
    }
}
