//! The last norm and the head, forward and backward, in chunks of the vocabulary; and the gradients of the embedding.

use std::ops::Range;

use super::lesson::Lesson;
use super::scratch::{TrainingScratch, grow};
use super::{Batch, Layout, RowGradients, Store};
use crate::base::Result;
use crate::model::Spec;
use crate::ops::training::divergence::{Divergence, Totals};
use crate::ops::training::loss::{Chunk, Loss};
use crate::ops::training::matmul::{GemmForm, Sizes, matmul};
use crate::ops::training::{array, norm};
use crate::ops::{Array, Device, Mixed, Slice};

/// The head of a model, applied to a batch.
pub(super) struct HeadPass<'a> {
    pub(super) device: &'a Device,
    pub(super) spec: &'a Spec,
    pub(super) layout: &'a Layout,
    pub(super) batch: &'a Batch,
    /// Number of tokens in a chunk.
    pub(super) chunk: usize,
    /// Keeps the gradients of a tied head until those of the embedding are added, instead of recomputing the logits.
    pub(super) keeps: bool,
}

/// The loss of a head's predictions.
pub(super) enum HeadLoss<'a> {
    /// Cross-entropy of the batch's labels.
    Labels(Loss),
    /// Divergence from a teacher, mixed with the labels' cross-entropy.
    Lesson(Divergence, Lesson<'a>),
}

impl<'a> HeadLoss<'a> {
    /// A loss before the first chunk of its rows.
    pub(super) fn new(
        device: &Device,
        rows: usize,
        lesson: Option<Lesson<'a>>,
    ) -> Result<HeadLoss<'a>> {
        Ok(match lesson {
            None => HeadLoss::Labels(Loss::new(device, rows)?),
            Some(lesson) => {
                HeadLoss::Lesson(Divergence::new(device, rows, lesson.mixture)?, lesson)
            }
        })
    }
}

/// Sizes of a batch's rows in a head, in elements.
pub(super) struct HeadSizes {
    /// The head's input.
    pub(super) stream: usize,
    /// The head's rows for a chunk, or their gradients.
    pub(super) weight: usize,
    /// Logits of a chunk.
    pub(super) logits: usize,
}

impl HeadSizes {
    pub(super) fn new(spec: &Spec, chunk: usize, rows: usize) -> HeadSizes {
        let widest = chunk.min(spec.vocab_size);
        HeadSizes {
            stream: rows * spec.hidden_size,
            weight: widest * spec.hidden_size,
            logits: rows * widest,
        }
    }
}

/// Divides a vocabulary into ranges of at most `chunk` tokens.
pub(super) fn vocabulary_chunks(
    vocabulary: usize,
    chunk: usize,
) -> impl Iterator<Item = Range<usize>> + use<> {
    (0..vocabulary)
        .step_by(chunk)
        .map(move |first| first..vocabulary.min(first + chunk))
}

impl HeadPass<'_> {
    fn sizes(&self, rows: usize) -> HeadSizes {
        HeadSizes::new(self.spec, self.chunk, rows)
    }

    fn chunks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        vocabulary_chunks(self.spec.vocab_size, self.chunk)
    }

    /// Tokens of the largest chunk.
    fn widest(&self) -> usize {
        self.chunk.min(self.spec.vocab_size)
    }

    fn columns(&self, tokens: &Range<usize>) -> Chunk {
        Chunk {
            first: tokens.start,
            width: tokens.len(),
            cap: self.spec.logit_cap,
        }
    }

    /// Accumulates the loss of the rows `x`, the output of the last block. `loss` must be before its first chunk.
    pub(super) fn forward(
        &self,
        store: &mut dyn Store,
        loss: &mut HeadLoss<'_>,
        x: &Array<Mixed>,
        s: &mut TrainingScratch,
    ) -> Result<Totals> {
        let (device, t) = (self.device, self.batch.rows());
        self.normalize(store, x.first(t * self.spec.hidden_size)?, s)?;
        let targets = &self.batch.targets;
        for tokens in self.chunks() {
            self.logits(store, &tokens, t, s)?;
            let (columns, logits) = (self.columns(&tokens), s.logits.first(t * tokens.len())?);
            match loss {
                HeadLoss::Labels(loss) => loss.add(device, targets, columns, logits)?,
                HeadLoss::Lesson(loss, lesson) => {
                    let teacher = lesson.predictions.logits(&tokens)?;
                    loss.add(device, targets, columns, logits, teacher)?;
                }
            }
        }
        match loss {
            HeadLoss::Labels(loss) => {
                let loss = loss.finish(device, targets)?;
                Ok(Totals {
                    loss,
                    cross_entropy: loss,
                    divergence: 0.0,
                })
            }
            HeadLoss::Lesson(loss, _) => loss.finish(device, targets),
        }
    }

    /// The token with the largest logit after the last row of `x`, the first of equal ones.
    pub(super) fn next_token(
        &self,
        store: &mut dyn Store,
        x: &Array<Mixed>,
        s: &mut TrainingScratch,
    ) -> Result<u32> {
        let (t, hidden) = (self.batch.rows(), self.spec.hidden_size);
        self.normalize(store, x.part((t - 1) * hidden..t * hidden)?, s)?;
        let mut logits = vec![0.0; self.widest()];
        let mut best = (0, f32::NEG_INFINITY);
        for tokens in self.chunks() {
            self.logits(store, &tokens, 1, s)?;
            let logits = &mut logits[..tokens.len()];
            s.logits.first(tokens.len())?.read(logits)?;
            for (token, &logit) in tokens.zip(&*logits) {
                if logit > best.1 {
                    best = (token as u32, logit);
                }
            }
        }
        Ok(best.0)
    }

    /// Computes a chunk's logits of the first `t` rows. Leaves the chunk's rows of the head in `s.weight`.
    pub(super) fn logits(
        &self,
        store: &mut dyn Store,
        tokens: &Range<usize>,
        t: usize,
        s: &mut TrainingScratch,
    ) -> Result<()> {
        let (device, hidden, width) = (self.device, self.spec.hidden_size, tokens.len());
        let sizes = self.sizes(t);
        s.weight.grow(device, sizes.weight)?;
        s.logits.grow(device, sizes.logits)?;
        store.read(
            self.layout.head,
            tokens.clone(),
            s.weight.first_mut(width * hidden)?,
        )?;
        let sizes = Sizes::mnk(t, width, hidden);
        let (x, weight) = (
            s.head_normed.first(t * hidden)?,
            s.weight.first(width * hidden)?,
        );
        matmul(
            device,
            GemmForm::NT,
            sizes,
            x,
            weight,
            s.logits.first_mut(t * width)?,
            false,
        )
    }

    /// Computes the gradients of a chunk's logits.
    fn logit_gradients(
        &self,
        store: &mut dyn Store,
        loss: &mut HeadLoss<'_>,
        tokens: &Range<usize>,
        s: &mut TrainingScratch,
    ) -> Result<()> {
        self.logits(store, tokens, self.batch.rows(), s)?;
        let len = self.batch.rows() * tokens.len();
        let sizes = self.sizes(self.batch.rows());
        s.dlogits.grow(self.device, sizes.logits)?;
        let (logits, gradients) = (s.logits.first(len)?, s.dlogits.first_mut(len)?);
        let (device, targets, columns) = (self.device, &self.batch.targets, self.columns(tokens));
        match loss {
            HeadLoss::Labels(loss) => loss.gradients(device, targets, columns, logits, gradients),
            HeadLoss::Lesson(loss, lesson) => {
                let of_both = (logits, lesson.predictions.logits(tokens)?);
                loss.gradients(device, targets, columns, of_both, gradients)
            }
        }
    }

    /// Normalizes the rows `x` into `s.head_normed`, the head's input.
    pub(super) fn normalize(
        &self,
        store: &dyn Store,
        x: Slice<'_, Mixed>,
        s: &mut TrainingScratch,
    ) -> Result<()> {
        let len = x.len();
        s.head_normed.grow(self.device, len)?;
        norm::rms_norm(
            self.device,
            x,
            store.vector(self.layout.norm)?,
            self.spec.norm_eps,
            s.head_normed.first_mut(len)?,
        )
    }

    /// In place: `s.dx`, the gradient of the last norm's output, becomes the gradient of the rows `x`.
    pub(super) fn normalize_backward(
        &self,
        store: &mut dyn Store,
        x: &Array<Mixed>,
        s: &mut TrainingScratch,
    ) -> Result<()> {
        let len = self.batch.rows() * self.spec.hidden_size;
        let (weight, dweight) = store.vector_with_gradient(self.layout.norm)?;
        let (x, dx) = (x.first(len)?, s.dx.first_mut(len)?);
        let eps = self.spec.norm_eps;
        norm::rms_norm_backward(self.device, x, weight, eps, dx, None, dweight)
    }

    /// Whether the gradients of a tied head are kept for the embedding.
    fn keeps_tied(&self, store: &dyn Store) -> bool {
        self.keeps && self.spec.tied && store.trains(self.layout.head)
    }

    /// Computes a chunk's gradients of the head, in `s.gradient` or its part of `s.tied`, from the gradients of its logits.
    fn weight_gradients(
        &self,
        tokens: &Range<usize>,
        kept: bool,
        s: &mut TrainingScratch,
    ) -> Result<()> {
        let (t, hidden, width) = (self.batch.rows(), self.spec.hidden_size, tokens.len());
        let sizes = Sizes::mnk(width, hidden, t);
        let (dlogits, x) = (
            s.dlogits.first(t * width)?,
            s.head_normed.first(t * hidden)?,
        );
        let out = match kept {
            true => s
                .tied
                .part_mut(tokens.start * hidden..tokens.end * hidden)?,
            false => {
                s.gradient.grow(self.device, self.sizes(t).weight)?;
                s.gradient.first_mut(width * hidden)?
            }
        };
        matmul(self.device, GemmForm::TN, sizes, dlogits, x, out, false)
    }

    /// Computes in `s.dx` the gradient of the rows `x`. The gradients of an untied head go to the store at once; those of a tied head wait
    /// for the embedding's.
    pub(super) fn backward(
        &self,
        store: &mut dyn Store,
        loss: &mut HeadLoss<'_>,
        x: &Array<Mixed>,
        s: &mut TrainingScratch,
    ) -> Result<()> {
        let (device, t, hidden) = (self.device, self.batch.rows(), self.spec.hidden_size);
        s.head_gradient.grow(device, t * hidden)?;
        grow(device, &mut [(&mut s.dx, t * hidden)])?;
        let keeps_tied = self.keeps_tied(store);
        if keeps_tied {
            s.tied.grow(device, self.spec.vocab_size * hidden)?;
        }
        for tokens in self.chunks() {
            self.logit_gradients(store, loss, &tokens, s)?;
            let width = tokens.len();
            let sizes = Sizes::mnk(t, hidden, width);
            let (dlogits, weight) = (s.dlogits.first(t * width)?, s.weight.first(width * hidden)?);
            let to = s.head_gradient.first_mut(t * hidden)?;
            matmul(
                device,
                GemmForm::NN,
                sizes,
                dlogits,
                weight,
                to,
                tokens.start > 0,
            )?;
            if keeps_tied {
                self.weight_gradients(&tokens, true, s)?;
            } else if !self.spec.tied && store.trains(self.layout.head) {
                self.weight_gradients(&tokens, false, s)?;
                store.gradients(&[RowGradients {
                    matrix: self.layout.head,
                    first_row: tokens.start,
                    values: s.gradient.first(width * hidden)?,
                }])?;
            }
        }
        array::convert(
            device,
            s.head_gradient.first(t * hidden)?,
            s.dx.first_mut(t * hidden)?,
        )?;
        self.normalize_backward(store, x, s)
    }

    /// Gives the store the gradients of the embedding: from the gradients of its rows in `s.dx`, plus those of a tied head if there is a
    /// loss. `x` are the rows that left the last block.
    pub(super) fn embedding_backward(
        &self,
        store: &mut dyn Store,
        loss: Option<&mut HeadLoss<'_>>,
        x: &Array<Mixed>,
        s: &mut TrainingScratch,
    ) -> Result<()> {
        let (device, t, hidden) = (self.device, self.batch.rows(), self.spec.hidden_size);
        if !store.trains(self.layout.embedding) {
            return Ok(());
        }
        let mut of_head = loss.filter(|_| self.spec.tied);
        let kept = of_head.is_some() && self.keeps_tied(store);
        if of_head.is_some() && !kept {
            self.normalize(store, x.first(t * hidden)?, s)?;
        }
        for tokens in self.chunks() {
            let len = tokens.len() * hidden;
            match of_head.as_deref_mut() {
                Some(_) if kept => {}
                Some(loss) => {
                    self.logit_gradients(store, loss, &tokens, s)?;
                    self.weight_gradients(&tokens, false, s)?;
                }
                None => {
                    s.gradient.grow(device, self.sizes(t).weight)?;
                    array::clear(device, s.gradient.first_mut(len)?)?;
                }
            }
            let mut gradient = match kept {
                true => s
                    .tied
                    .part_mut(tokens.start * hidden..tokens.end * hidden)?,
                false => s.gradient.first_mut(len)?,
            };
            self.batch.by_token.add(
                device,
                s.dx.first(t * hidden)?,
                self.spec.embedding_scale,
                tokens.start,
                hidden,
                gradient.reborrow(),
            )?;
            store.gradients(&[RowGradients {
                matrix: self.layout.embedding,
                first_row: tokens.start,
                values: gradient.as_slice(),
            }])?;
        }
        Ok(())
    }
}
