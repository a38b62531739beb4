//! A training pass: runs a batch through the whole model, forward and backward.

use std::ops::Range;

use super::block::BlockPass;
use super::head::{HeadLoss, HeadPass, vocabulary_chunks};
use super::hidden::HiddenTargets;
use super::lesson::Lesson;
use super::precision::ProductPrecision;
use super::recompute::Recompute;
use super::scratch::{Saved, TrainingScratch};
use super::streams::Streams;
use super::{Batch, Layout, Store, check_device};
use crate::base::error::bail;
use crate::base::{Result, call};
use crate::format::adamw::GROUP_ROWS;
use crate::model::Spec;
use crate::ops::training::array;
use crate::ops::training::divergence::{TeacherLogits, Totals};
use crate::ops::{Array, Device, Mixed};

/// Memory options of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// The activations that the backward pass recomputes.
    pub recompute: Recompute,
    /// Number of tokens whose logits are computed at a time.
    pub head_chunk: usize,
    /// Whether the inputs of blocks are offloaded to host memory until the backward pass. Requires a GPU with its own memory:
    /// [`Device::check_offload`].
    pub offload: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            recompute: Recompute::default(),
            head_chunk: 8192,
            offload: false,
        }
    }
}

/// The target of a backward pass.
enum Goal<'a> {
    /// Labels, or a teacher's predictions.
    Predictions(Option<Lesson<'a>>),
    Hidden(HiddenTargets<'a>),
}

/// Runs batches through a model. Keeps its memory between batches.
#[derive(Debug)]
pub struct Pass {
    device: Device,
    spec: Spec,
    layout: Layout,
    options: Options,
    precision: ProductPrecision,
    /// Key of the random bits of rounding.
    key: u64,
    streams: Streams,
    /// The first block that gets gradients. Blocks before it keep nothing for the backward pass.
    first: usize,
    /// The activations kept for each block; see [`Pass::place`].
    saved: Vec<Saved>,
    /// Recomputed activations, for one block at a time.
    shared: Saved,
    scratch: TrainingScratch,
}

impl Pass {
    /// A pass for a model with these parameters. Fails on a GPU for a model that is trained on the CPU alone:
    /// [`untrainable_on_gpu`](super::untrainable_on_gpu).
    pub fn new(device: &Device, spec: &Spec, layout: &Layout, options: Options) -> Result<Pass> {
        if options.head_chunk == 0 || !options.head_chunk.is_multiple_of(GROUP_ROWS) {
            bail!(
                InvalidArgument,
                "a chunk of {} tokens; it must be a positive multiple of {GROUP_ROWS}",
                options.head_chunk
            );
        }
        if options.offload {
            device.check_offload()?;
        }
        check_device(device, spec)?;
        let blocks = spec.blocks.len();
        Ok(Pass {
            device: device.clone(),
            spec: spec.clone(),
            layout: layout.clone(),
            options,
            precision: ProductPrecision::default(),
            key: 0,
            first: 0,
            streams: Streams::new(blocks, options.offload),
            saved: (0..blocks).map(|_| Saved::new()).collect(),
            shared: Saved::new(),
            scratch: TrainingScratch::new(),
        })
    }

    /// Sets the precision of the products of projections; by default operands are not rounded.
    pub fn set_precision(&mut self, precision: ProductPrecision) {
        self.precision = precision;
    }

    /// Sets the key of the random bits of stochastic rounding: another one for each batch.
    pub fn set_key(&mut self, key: u64) {
        self.key = key;
    }

    /// Bytes of the gradients of matrices before they go to the store.
    pub fn gradient_bytes(&self) -> usize {
        self.scratch.gradient.bytes()
    }

    /// Index of the block whose memory a block uses for kept activations: its own, or that of the first block with gradients, which runs
    /// later.
    fn place(&self, block: usize) -> usize {
        block.max(self.first).min(self.spec.blocks.len() - 1)
    }

    /// Sets the first block that gets gradients, and frees the memory of earlier blocks.
    fn begin_at(&mut self, first: usize) {
        self.first = first;
        self.streams.begin_at(first);
        for block in 0..first {
            if self.place(block) != block {
                self.saved[block] = Saved::new();
            }
        }
    }

    /// Takes the kept activations of a block, together with the memory of recomputed ones; [`Pass::put_saved`] returns it.
    fn take_saved(&mut self, block: usize) -> Saved {
        let place = self.place(block);
        let mut saved = std::mem::replace(&mut self.saved[place], Saved::new());
        saved.swap_recomputed(&mut self.shared, self.options.recompute.parts());
        saved
    }

    fn put_saved(&mut self, block: usize, mut saved: Saved) {
        saved.swap_recomputed(&mut self.shared, self.options.recompute.parts());
        let place = self.place(block);
        self.saved[place] = saved;
    }

    fn block<'a>(&'a self, batch: &'a Batch, index: usize) -> BlockPass<'a> {
        BlockPass {
            device: &self.device,
            spec: &self.spec,
            block: &self.spec.blocks[index],
            layout: &self.layout.blocks[index],
            batch,
            precision: &self.precision,
            key: self.key,
        }
    }

    fn head<'a>(&'a self, batch: &'a Batch) -> HeadPass<'a> {
        HeadPass {
            device: &self.device,
            spec: &self.spec,
            layout: &self.layout,
            batch,
            chunk: self.options.head_chunk,
            keeps: self.options.recompute == Recompute::None,
        }
    }

    /// Runs a batch through all blocks; the output of the last block is in the last stream. Inputs of blocks from `kept` on stay for the
    /// backward pass.
    fn forward(&mut self, store: &mut dyn Store, batch: &Batch, kept: usize) -> Result<()> {
        // Memory left by the embedding's gradients, or by an evaluation.
        self.scratch.release_head();
        let len = batch.rows() * self.spec.hidden_size;
        let mut first = self.streams.take(0);
        self.embed_to(store, batch, &mut first)?;
        self.streams.put(0, first);
        for index in 0..self.spec.blocks.len() {
            call::check()?;
            let mut out = self.streams.take(index + 1);
            let mut saved = self.take_saved(index);
            let mut scratch = std::mem::replace(&mut self.scratch, TrainingScratch::new());
            let x = self.streams.at(index);
            let done =
                self.block(batch, index)
                    .forward(store, x, &mut out, &mut saved, &mut scratch);
            self.streams.put(index + 1, out);
            self.put_saved(index, saved);
            self.scratch = scratch;
            done?;
            if index >= kept {
                self.streams.keep(&self.device, index, len)?;
            }
        }
        Ok(())
    }

    fn embed_to(&self, store: &mut dyn Store, batch: &Batch, to: &mut Array<Mixed>) -> Result<()> {
        let len = batch.rows() * self.spec.hidden_size;
        to.grow(&self.device, len)?;
        store.embed(self.layout.embedding, &batch.tokens, to.first_mut(len)?)?;
        match self.spec.embedding_scale {
            1.0 => Ok(()),
            scale => array::scale(&self.device, to.first_mut(len)?, scale),
        }
    }

    /// A batch's residual stream before the first block.
    pub(super) fn embed(&self, store: &mut dyn Store, batch: &Batch) -> Result<Array<Mixed>> {
        let mut stream = Array::empty();
        self.embed_to(store, batch, &mut stream)?;
        Ok(stream)
    }

    /// Runs the block input `x` through a block to `out`, and keeps nothing for a backward pass.
    pub(super) fn run_block(
        &mut self,
        store: &mut dyn Store,
        batch: &Batch,
        index: usize,
        x: &Array<Mixed>,
        out: &mut Array<Mixed>,
    ) -> Result<()> {
        call::check()?;
        self.begin_at(self.spec.blocks.len());
        let mut saved = self.take_saved(index);
        let mut scratch = std::mem::replace(&mut self.scratch, TrainingScratch::new());
        let block = self.block(batch, index);
        let done = block.forward(store, x, out, &mut saved, &mut scratch);
        self.put_saved(index, saved);
        self.scratch = scratch;
        done
    }

    /// Applies the last norm to a batch's rows `x`, the output of the last block.
    pub(super) fn normalize(
        &mut self,
        store: &dyn Store,
        batch: &Batch,
        x: &Array<Mixed>,
        out: &mut Array<Mixed>,
    ) -> Result<()> {
        let mut scratch = std::mem::replace(&mut self.scratch, TrainingScratch::new());
        std::mem::swap(&mut scratch.head_normed, out);
        let len = batch.rows() * self.spec.hidden_size;
        let done = x
            .first(len)
            .and_then(|x| self.head(batch).normalize(store, x, &mut scratch));
        std::mem::swap(&mut scratch.head_normed, out);
        self.scratch = scratch;
        done
    }

    /// Computes the logits `[rows, tokens]` of a range of tokens for a batch's rows `x`, the output of [`Pass::normalize`], which stay
    /// unchanged.
    pub(super) fn logits(
        &mut self,
        store: &mut dyn Store,
        batch: &Batch,
        x: &mut Array<Mixed>,
        tokens: &Range<usize>,
        out: &mut Array,
    ) -> Result<()> {
        call::check()?;
        let mut scratch = std::mem::replace(&mut self.scratch, TrainingScratch::new());
        std::mem::swap(&mut scratch.head_normed, x);
        std::mem::swap(&mut scratch.logits, out);
        let done = self
            .head(batch)
            .logits(store, tokens, batch.rows(), &mut scratch);
        std::mem::swap(&mut scratch.logits, out);
        std::mem::swap(&mut scratch.head_normed, x);
        self.scratch = scratch;
        done
    }

    /// Ranges of tokens whose logits are computed at a time.
    pub(super) fn vocabulary_chunks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        vocabulary_chunks(self.spec.vocab_size, self.options.head_chunk)
    }

    /// Frees the scratch that only blocks use and the backward pass does not need.
    fn release_blocks(&mut self, s: &mut TrainingScratch) {
        if self.options.recompute != Recompute::None {
            self.shared = Saved::new();
            s.release_blocks();
        }
    }

    /// The sum over the batch's rows of weight times cross-entropy.
    pub fn loss(&mut self, store: &mut dyn Store, batch: &Batch) -> Result<f64> {
        Ok(self.totals(store, batch, None)?.loss)
    }

    /// Loss, cross-entropy and divergence of a batch against a teacher's predictions.
    pub fn lesson_totals(
        &mut self,
        store: &mut dyn Store,
        batch: &Batch,
        mut lesson: Lesson<'_>,
    ) -> Result<Totals> {
        self.rest();
        lesson.predictions.begin()?;
        self.totals(store, batch, Some(lesson))
    }

    fn totals(
        &mut self,
        store: &mut dyn Store,
        batch: &Batch,
        lesson: Option<Lesson<'_>>,
    ) -> Result<Totals> {
        let blocks = self.spec.blocks.len();
        self.forward(store, batch, blocks)?;
        let mut scratch = std::mem::replace(&mut self.scratch, TrainingScratch::new());
        let (last, head) = (self.streams.at(blocks), self.head(batch));
        let totals = HeadLoss::new(&self.device, batch.rows(), lesson)
            .and_then(|mut loss| head.forward(store, &mut loss, last, &mut scratch));
        self.scratch = scratch;
        totals
    }

    /// Releases the scratch of the head and the blocks before a teacher's pass.
    fn rest(&mut self) {
        let mut scratch = std::mem::replace(&mut self.scratch, TrainingScratch::new());
        scratch.release_head();
        self.release_blocks(&mut scratch);
        self.scratch = scratch;
    }

    /// Runs a batch through all blocks and the last norm, for [`Pass::head_logits`], and frees everything else.
    pub(super) fn head_inputs(&mut self, store: &mut dyn Store, batch: &Batch) -> Result<()> {
        let blocks = self.spec.blocks.len();
        self.begin_at(blocks);
        let done = self.forward(store, batch, blocks).and_then(|()| {
            let mut scratch = std::mem::replace(&mut self.scratch, TrainingScratch::new());
            let last = self.streams.at(blocks);
            let len = batch.rows() * self.spec.hidden_size;
            let normalized = last
                .first(len)
                .and_then(|x| self.head(batch).normalize(store, x, &mut scratch));
            self.scratch = scratch;
            normalized
        });
        self.streams = Streams::new(blocks, self.options.offload);
        self.saved.fill_with(Saved::new);
        self.shared = Saved::new();
        self.scratch.release_blocks();
        self.scratch.weight = Array::empty();
        done
    }

    /// The logits of a range of tokens for the batch of the last [`Pass::head_inputs`].
    pub(super) fn head_logits(
        &mut self,
        store: &mut dyn Store,
        batch: &Batch,
        tokens: &Range<usize>,
    ) -> Result<TeacherLogits<'_>> {
        let mut scratch = std::mem::replace(&mut self.scratch, TrainingScratch::new());
        let done = self
            .head(batch)
            .logits(store, tokens, batch.rows(), &mut scratch);
        self.scratch = scratch;
        done?;
        Ok(TeacherLogits {
            values: self.scratch.logits.first(batch.rows() * tokens.len())?,
            cap: self.spec.logit_cap,
        })
    }

    /// The most likely token after the batch's last token, independent of its labels.
    pub fn next_token(&mut self, store: &mut dyn Store, batch: &Batch) -> Result<u32> {
        let blocks = self.spec.blocks.len();
        self.forward(store, batch, blocks)?;
        let mut scratch = std::mem::replace(&mut self.scratch, TrainingScratch::new());
        let last = self.streams.at(blocks);
        let token = self.head(batch).next_token(store, last, &mut scratch);
        self.scratch = scratch;
        token
    }

    /// Like [`Pass::loss`], and gives the gradients to the store, unless the loss is not finite. Blocks before `first_block` get no
    /// gradients. The embedding gets them only if `first_block` is 0 or it is also the head.
    pub fn gradients(
        &mut self,
        store: &mut dyn Store,
        batch: &Batch,
        first_block: usize,
    ) -> Result<f64> {
        Ok(self
            .gradients_of(store, batch, first_block, Goal::Predictions(None))?
            .loss)
    }

    /// Like [`Pass::gradients`], for the loss against a teacher's predictions.
    pub fn lesson_gradients(
        &mut self,
        store: &mut dyn Store,
        batch: &Batch,
        mut lesson: Lesson<'_>,
        first_block: usize,
    ) -> Result<Totals> {
        self.rest();
        lesson.predictions.begin()?;
        self.gradients_of(store, batch, first_block, Goal::Predictions(Some(lesson)))
    }

    /// The sum over hidden states of weight times the absolute difference to their targets. Gives the gradients to the store like
    /// [`Pass::gradients`], but none for the head. Ignores labels and weights of the batch.
    pub fn hidden_gradients(
        &mut self,
        store: &mut dyn Store,
        batch: &Batch,
        targets: HiddenTargets<'_>,
        first_block: usize,
    ) -> Result<f64> {
        let goal = Goal::Hidden(targets);
        Ok(self.gradients_of(store, batch, first_block, goal)?.loss)
    }

    fn gradients_of(
        &mut self,
        store: &mut dyn Store,
        batch: &Batch,
        first_block: usize,
        goal: Goal<'_>,
    ) -> Result<Totals> {
        let first = first_block.min(self.spec.blocks.len());
        self.begin_at(first);
        self.forward(store, batch, first)?;
        let mut scratch = std::mem::replace(&mut self.scratch, TrainingScratch::new());
        let result = self.backward(store, batch, first, goal, &mut scratch);
        self.scratch = scratch;
        result
    }

    fn backward(
        &mut self,
        store: &mut dyn Store,
        batch: &Batch,
        first_block: usize,
        goal: Goal<'_>,
        s: &mut TrainingScratch,
    ) -> Result<Totals> {
        let blocks = self.spec.blocks.len();
        // Blocks and the head take turns with the largest part of the memory.
        self.release_blocks(s);
        let (head, x) = (self.head(batch), self.streams.at(blocks));
        let (mut loss, totals) = match goal {
            Goal::Hidden(targets) => {
                let loss = head.hidden(store, targets, x, s)?;
                let totals = Totals {
                    loss,
                    ..Totals::default()
                };
                (None, totals)
            }
            Goal::Predictions(lesson) => {
                let mut loss = HeadLoss::new(&self.device, batch.rows(), lesson)?;
                let totals = head.forward(store, &mut loss, x, s)?;
                (Some(loss), totals)
            }
        };
        if !totals.loss.is_finite() {
            return Ok(totals);
        }
        match &mut loss {
            Some(loss) => head.backward(store, loss, x, s)?,
            None => head.normalize_backward(store, x, s)?,
        }
        s.release_head();
        let embeds = first_block == 0 && store.trains(self.layout.embedding);
        for index in (first_block..blocks).rev() {
            let len = batch.rows() * self.spec.hidden_size;
            self.streams.fetch(index, len)?;
            let mut saved = self.take_saved(index);
            let parts = self.options.recompute.parts();
            let done = (|| {
                let (block, x) = (self.block(batch, index), self.streams.at(index));
                block.forward_again(store, x, &mut saved, parts, s)?;
                block.backward(store, x, &mut saved, s, index > first_block || embeds)
            })();
            self.put_saved(index, saved);
            done?;
        }
        if embeds || (self.spec.tied && loss.is_some()) {
            self.release_blocks(s);
            if !embeds {
                // Rows of a frozen beginning get no gradients; only the head's share remains.
                let len = batch.rows() * self.spec.hidden_size;
                array::clear(&self.device, s.dx.first_mut(len)?)?;
            }
            let x = self.streams.at(blocks);
            self.head(batch)
                .embedding_backward(store, loss.as_mut(), x, s)?;
        }
        Ok(totals)
    }
}
