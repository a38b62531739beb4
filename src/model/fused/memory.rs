//! The working memory of prompts and decode steps on a GPU, and the state in which the last step left it.

use std::collections::HashMap;
use std::sync::Arc;

use super::sizes::Sizes;
use crate::base::error::err;
use crate::base::memory::Tag;
use crate::base::{Error, Result};
use crate::cuda::{
    self, Best, DeviceBuffer, DrawRule, DrawScratch, Drawn, Event, ExpertScratch, Gpu, Graph,
    Layout, LinearScratch, NormScratch, Pinned, SplitKv, SplitKvWorkspace,
};
use crate::model::gpu_cache::GpuCache;

/// How many steps the device may be ahead of the host.
const HISTORY: usize = 8;

/// How a step selects the next tokens.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Selection {
    /// The argmax.
    Argmax,
    /// Draws by rules; `penalties` says whether any has a repetition penalty.
    Drawn { penalties: bool },
}

/// The steps that a recorded graph can run.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct GraphKey {
    pub(super) batch: usize,
    /// By number of [`Sizes::attentions`].
    pub(super) splits: Vec<SplitKv>,
    pub(super) selection: Selection,
    /// Whether the sequences have room for long contexts.
    pub(super) long: bool,
}

/// A sequence that the device is ready to step: its pages and the position of its next token.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Ready {
    pub(super) version: u64,
    pub(super) position: usize,
}

/// Working memory, and the state in which the last step left it.
pub(super) struct Memory {
    pub(super) rows: usize,
    head_rows: usize,
    batch: usize,
    pub(super) pages: usize,
    /// f32 `[rows, hidden]`: the residual stream.
    pub(super) residual: DeviceBuffer,
    /// f32 `[hidden]`, for one row whose norms are fused into prologues: the residual stream between the halves of a block, and the output of
    /// a half.
    pub(super) between: DeviceBuffer,
    pub(super) half: DeviceBuffer,
    /// f16: normalized rows, the input of the first product of a half of a block; and attention's output.
    pub(super) input: DeviceBuffer,
    /// The output of the first product of a half of a block: qkv in f32, gate and up in f16. And, in f32, that of the last product of a
    /// half with a norm after it.
    pub(super) projected: DeviceBuffer,
    /// f16: rotated queries, and later the input of the MLP's last product.
    pub(super) inner: DeviceBuffer,
    pub(super) logits: DeviceBuffer,
    pub(super) tokens: DeviceBuffer,
    pub(super) positions: DeviceBuffer,
    pub(super) table: DeviceBuffer,
    pub(super) best: Best,
    /// Allocated when a token is first drawn.
    pub(super) draw: Option<DrawScratch>,
    /// A u32 a row: 1 + the first block whose queries, keys or values f16 does not hold, or 0.
    pub(super) unfit: DeviceBuffer,
    /// A u32 a row: 1 + the first block whose gate or up projection f16 does not hold, or 0.
    pub(super) overflow: DeviceBuffer,
    /// A u32 a row: 1 + the first block whose router gives a logit that is not finite, or 0.
    pub(super) unroutable: DeviceBuffer,
    /// Of models with mixtures of experts.
    pub(super) experts: Option<ExpertScratch>,
    pub(super) splits: SplitKvWorkspace,
    pub(super) norms: NormScratch,
    pub(super) linear: LinearScratch,
    pub(super) history: Pinned,
    pub(super) graphs: HashMap<GraphKey, Graph>,
    /// The sequences that the device is ready to step; none while its state is unknown.
    pub(super) ready: Vec<Ready>,
    /// The rules of the device's next draw; none if it takes the argmax, or if they are unknown.
    pub(super) rules: Vec<DrawRule>,
    /// The end of a look-ahead step.
    pub(super) look_ahead: Option<Event>,
}

impl Memory {
    /// Room for so many rows that go through the blocks, rows of logits, sequences of a step, and pages of each.
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        sizes: &Sizes,
        rows: usize,
        head_rows: usize,
        batch: usize,
        pages: usize,
    ) -> Result<Memory> {
        let scratch = |elements: usize, bytes: usize| {
            DeviceBuffer::uninit(gpu, Tag::DeviceScratch, elements * bytes)
        };
        let notes = || DeviceBuffer::zeroed(gpu, Tag::DeviceScratch, rows.max(batch).max(1) * 4);
        let (hidden, q, wide) = (sizes.hidden, sizes.q, sizes.intermediate);
        // The widest weight but the head, whose rows are taken in parts: logits of many rows are rarely wanted.
        let widest = sizes.qkv().max(wide) * hidden * 2;
        let k = wide.max(hidden).max(q);
        let converted = rows * k * 2;
        let widest = widest.max(if sizes.dense { converted } else { 0 });
        let activations = |k| Layout::FragmentMajor.elements(rows, k);
        let fused = if sizes.dense {
            cuda::SKINNY_ROWS
        } else {
            cuda::TILED
        };
        let large = rows.max(head_rows) > fused;
        let copy = if large { widest } else { 0 };
        Ok(Memory {
            rows,
            head_rows,
            batch,
            pages,
            residual: scratch(rows * hidden, 4)?,
            between: scratch(hidden, 4)?,
            half: scratch(hidden, 4)?,
            input: scratch(activations(hidden.max(q)), 2)?,
            projected: scratch(rows * sizes.qkv().max(wide).max(hidden), 4)?,
            inner: scratch(activations(wide.max(q)), 2)?,
            logits: scratch(head_rows * sizes.vocab, 4)?,
            tokens: scratch(rows.max(batch), 4)?,
            positions: scratch(batch, 4)?,
            table: scratch(batch * pages, 8)?,
            best: Best::new(gpu, batch)?,
            draw: None,
            unfit: notes()?,
            overflow: notes()?,
            unroutable: notes()?,
            experts: sizes
                .experts
                .map(|e| ExpertScratch::new(gpu, e.routing, rows, e.intermediate, hidden))
                .transpose()?,
            splits: SplitKvWorkspace::new(gpu, sizes.heads, sizes.kv_heads, sizes.head_dim, batch)?,
            norms: NormScratch::new(gpu, hidden)?,
            linear: LinearScratch::new(gpu, rows.max(head_rows), k, copy)?,
            history: Pinned::new(gpu, Tag::Scratch, HISTORY * batch * 4)?,
            graphs: HashMap::new(),
            ready: Vec::new(),
            rules: Vec::new(),
            look_ahead: None,
        })
    }

    /// Makes the memory large enough. What it held is lost if it was not.
    pub(super) fn fit(
        &mut self,
        gpu: &Arc<Gpu>,
        sizes: &Sizes,
        rows: usize,
        head_rows: usize,
        batch: usize,
        pages: usize,
    ) -> Result<()> {
        if rows <= self.rows
            && head_rows <= self.head_rows
            && batch <= self.batch
            && pages <= self.pages
        {
            return Ok(());
        }
        self.flush()?;
        self.graphs.clear();
        self.invalidate();
        if pages > self.pages {
            // Pages come one at a time; the table grows by leaps.
            let pages = pages.next_power_of_two().max(64);
            let mut table = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, self.batch * pages * 8)?;
            for row in 0..self.batch {
                let bytes = self.pages * 8;
                table.copy_from(row * pages * 8, &self.table, row * bytes, bytes)?;
            }
            (self.table, self.pages) = (table, pages);
        }
        if rows <= self.rows && batch <= self.batch && head_rows <= cuda::SKINNY_ROWS {
            // Rows wait in the residual for their logits.
            if head_rows > self.head_rows {
                let bytes = head_rows * sizes.vocab * 4;
                self.logits = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, bytes)?;
                self.head_rows = head_rows;
            }
            return Ok(());
        }
        let empty = Memory::new(gpu, sizes, 0, 0, 1, 1)?;
        // All else is freed before there is more of it.
        let (rows, head_rows, batch, pages, old_batch, residual, table) = {
            let old = std::mem::replace(self, empty);
            let (rows, head_rows) = (rows.max(old.rows), head_rows.max(old.head_rows));
            let most = batch.max(old.batch);
            let (residual, table) = (old.residual, old.table);
            (rows, head_rows, most, old.pages, old.batch, residual, table)
        };
        let mut new = Memory::new(gpu, sizes, rows, head_rows, batch, pages)?;
        let len = residual.bytes();
        new.residual.copy_from(0, &residual, 0, len)?;
        new.table.copy_from(0, &table, 0, old_batch * pages * 8)?;
        *self = new;
        Ok(())
    }

    /// Waits for a look-ahead step.
    pub(super) fn flush(&mut self) -> Result<()> {
        match self.look_ahead.take() {
            Some(event) => event.wait(),
            None => Ok(()),
        }
    }

    /// Appends the first `count` logits, once the device has them.
    pub(super) fn read_logits(&self, count: usize, logits: &mut Vec<f32>) -> Result<()> {
        let before = logits.len();
        logits
            .try_reserve(count)
            .map_err(|e| err!(OutOfMemory, "{count} logits: {e}"))?;
        logits.resize(before + count, 0.0);
        self.logits.read(0, &mut logits[before..])
    }

    /// Waits for the device. Gives the rows, of the first `rows`, that had values that f16 does not hold, or router logits that are not finite,
    /// with an error that names the first layer that had them.
    pub(super) fn faults(&mut self, rows: usize) -> Result<Vec<(usize, Error)>> {
        // In the order of a layer; later layers make nonsense of what is wrong.
        let mut notes = vec![
            (
                &mut self.unfit,
                "a query, key or value reaches beyond 65,504, the largest number of the cache's f16; a GPU has no other cache, run this model on the CPU with keys and values in f32",
            ),
            (
                &mut self.overflow,
                "a gate or up projection reaches beyond 65,504, the largest number of the f16 that prompts have it in on a GPU; run this model on the CPU",
            ),
        ];
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

    pub(super) fn write_pages(&mut self, caches: &[&GpuCache]) -> Result<()> {
        let mut all = vec![0u64; caches.len() * self.pages];
        for (row, cache) in all.chunks_exact_mut(self.pages).zip(caches) {
            for (slot, address) in row.iter_mut().zip(cache.addresses()) {
                *slot = address;
            }
        }
        self.table.write(0, &all)
    }

    /// The device's state is unknown from now on.
    pub(super) fn invalidate(&mut self) {
        self.ready.clear();
        self.rules.clear();
    }

    /// The memory of draws, for as many rows as the rest has room for.
    pub(super) fn drawing(&mut self, gpu: &Arc<Gpu>, sizes: &Sizes) -> Result<&mut DrawScratch> {
        if self.draw.as_ref().is_some_and(|d| d.rows() < self.batch) {
            self.flush()?;
            self.graphs.clear();
            self.draw = None;
        }
        match &mut self.draw {
            Some(scratch) => Ok(scratch),
            none => Ok(none.insert(DrawScratch::new(gpu, self.batch, sizes.vocab)?)),
        }
    }

    /// The token that the device selected for a position of a sequence.
    pub(super) fn drawn(&self, row: usize, batch: usize, position: usize) -> Option<Drawn> {
        let encoded = self
            .history
            .read_i32(position % self.steps(batch) * batch + row)?;
        Some(Drawn::read(encoded))
    }

    /// Whether the device selected these tokens for these positions.
    pub(super) fn chose(&self, tokens: &[u32], positions: &[usize]) -> bool {
        let mut rows = tokens.iter().zip(positions).enumerate();
        rows.all(|(row, (&token, &position))| {
            self.drawn(row, tokens.len(), position) == Some(Drawn::Token(token))
        })
    }

    /// Steps that the history holds for a batch; the kernel divides its size in the same way.
    fn steps(&self, batch: usize) -> usize {
        self.history.bytes() / 4 / batch
    }
}

/// The notes of the first rows, which are zero afterwards.
fn take_notes(notes: &mut DeviceBuffer, rows: usize) -> Result<Vec<u32>> {
    let mut values = vec![0u32; rows];
    notes.read(0, &mut values)?;
    if values.iter().any(|&value| value != 0) {
        notes.write(0, &vec![0u32; rows])?;
    }
    Ok(values)
}
