//! Two models side by side, batch by batch.

use std::sync::Arc;

use super::comparison::{Comparison, Measures};
use super::predictions::{Labels, Predictions};
use super::streams::{ErrorSums, HostStreams};
use crate::base::Result;
use crate::model::training::{Batch, Runner, Source};
use crate::ops::training::divergence::{Divergence, Mixture};
use crate::ops::{Array, Device, Mixed};

/// Maximum rows of a batch, unless a single window has more.
const BATCH_ROWS: usize = 2048;
/// Maximum bytes of a batch's streams, unless a single window takes more.
const STREAM_BYTES: usize = 512 << 20;

/// A residual stream.
type Stream = Array<Mixed>;

/// Two models, with the results so far.
pub(super) struct Pair {
    device: Device,
    measures: Measures,
    examined: Runner,
    reference: Runner,
    blocks: usize,
    hidden: usize,
    caps: [Option<f32>; 2],
    found: Comparison,
    /// Sums for each block: with each model on its own stream, and with both blocks on the reference's stream.
    errors: Vec<[ErrorSums; 2]>,
    /// Sums of divergences: with each block replaced, and with the tables replaced.
    divergences: Vec<f64>,
    of_tables: f64,
    /// Tokens in those sums.
    predicted: usize,
    host: HostStreams,
    next: Stream,
}

/// The streams of a batch between two blocks.
struct Streams {
    reference: Stream,
    /// The examined model's own stream, if requested.
    examined: Option<Stream>,
    /// The stream with the examined model's embedding and the reference's blocks, if requested.
    tables: Option<Stream>,
    /// Streams that ran through one block of the examined model and continue through the reference.
    exchanged: Vec<Stream>,
}

/// A batch prepared for each of the models.
struct Batches {
    examined: Batch,
    reference: Batch,
    labels: Labels,
}

impl Pair {
    pub(super) fn new(
        device: &Device,
        examined: &Arc<Source>,
        reference: &Arc<Source>,
        measures: Measures,
    ) -> Result<Pair> {
        let spec = reference.spec();
        let blocks = spec.blocks.len();
        Ok(Pair {
            device: device.clone(),
            measures,
            examined: Runner::new(device, examined.clone())?,
            reference: Runner::new(device, reference.clone())?,
            blocks,
            hidden: spec.hidden_size,
            caps: [examined, reference].map(|source| source.spec().logit_cap),
            found: Comparison::default(),
            errors: vec![[ErrorSums::default(); 2]; if measures.streams { blocks } else { 0 }],
            divergences: vec![0.0; if measures.blocks { blocks } else { 0 }],
            of_tables: 0.0,
            predicted: 0,
            host: HostStreams::default(),
            next: Array::empty(),
        })
    }

    /// Whether the examined model runs on its own stream.
    fn runs_examined(&self) -> bool {
        self.measures.tokens || self.measures.streams
    }

    /// The number of consecutive windows in each batch.
    pub(super) fn batches(&self, windows: &[&[u32]]) -> Vec<usize> {
        let streams = 3 + if self.measures.blocks { self.blocks } else { 0 };
        let row = streams * self.hidden * Stream::element_bytes(&self.device);
        let most = BATCH_ROWS.min(STREAM_BYTES / row);
        let (mut batches, mut rows) = (Vec::new(), 0);
        for window in windows {
            rows += window.len();
            match batches.last_mut() {
                Some(count) if rows <= most => *count += 1,
                _ => {
                    batches.push(1);
                    rows = window.len();
                }
            }
        }
        batches
    }

    /// Passes of a batch through a block or a chunk of the head.
    pub(super) fn passes(&self) -> u64 {
        let blocks = self.blocks as u64;
        let examined = u64::from(self.runs_examined());
        let tables = u64::from(self.measures.blocks);
        let alone = u64::from(self.measures.blocks || self.measures.streams);
        let of_blocks = blocks * (1 + examined + tables + alone);
        let of_exchanged = tables * blocks * (blocks - 1) / 2;
        let heads = 1 + u64::from(self.measures.tokens) + tables * (blocks + 1);
        let chunks = self.reference.vocabulary_chunks().count() as u64;
        of_blocks + of_exchanged + heads * chunks
    }

    /// Runs a batch of windows, of which `first` is the index of the first one. Calls `tell` after each pass.
    pub(super) fn run(
        &mut self,
        first: usize,
        windows: &[&[u32]],
        tell: &mut dyn FnMut(),
    ) -> Result<()> {
        let tokens = windows.concat();
        let lengths: Vec<usize> = windows.iter().map(|window| window.len()).collect();
        let batches = Batches {
            examined: self.examined.batch(&tokens, &lengths)?,
            reference: self.reference.batch(&tokens, &lengths)?,
            labels: Labels::new(&self.device, windows)?,
        };
        let mut streams = Streams {
            reference: self.reference.embed(&batches.reference)?,
            examined: match self.runs_examined() {
                true => Some(self.examined.embed(&batches.examined)?),
                false => None,
            },
            tables: match self.measures.blocks {
                true => Some(self.examined.embed(&batches.examined)?),
                false => None,
            },
            exchanged: Vec::new(),
        };
        for block in 0..self.blocks {
            self.run_block(block, &batches, &mut streams, tell)?;
        }
        self.predicted += tokens.len() - windows.len();
        let places: Vec<(usize, usize)> = (first..)
            .zip(&lengths)
            .flat_map(|(window, &len)| (0..len).map(move |position| (window, position)))
            .collect();
        self.run_head(&batches, streams, &places, tell)
    }

    /// Runs all streams of a batch through a block.
    fn run_block(
        &mut self,
        block: usize,
        batches: &Batches,
        streams: &mut Streams,
        tell: &mut dyn FnMut(),
    ) -> Result<()> {
        let next = &mut self.next;
        let mut alone = Array::empty();
        if self.measures.blocks || self.measures.streams {
            let x = &streams.reference;
            self.examined
                .run_block(&batches.examined, block, x, &mut alone)?;
            tell();
        }
        if let Some(x) = &mut streams.examined {
            self.examined.run_block(&batches.examined, block, x, next)?;
            std::mem::swap(x, next);
            tell();
        }
        self.examined.release();
        let of_reference = [&mut streams.reference].into_iter();
        for x in of_reference
            .chain(&mut streams.tables)
            .chain(&mut streams.exchanged)
        {
            self.reference
                .run_block(&batches.reference, block, x, next)?;
            std::mem::swap(x, next);
            tell();
        }
        self.reference.release();
        if let Some([by_themselves, of_block]) = self.errors.get_mut(block) {
            let len = batches.reference.rows() * self.hidden;
            self.host.set_reference(&streams.reference, len)?;
            if let Some(examined) = &streams.examined {
                self.host.add(examined, by_themselves)?;
            }
            self.host.add(&alone, of_block)?;
        }
        if self.measures.blocks {
            streams.exchanged.push(alone);
        }
        Ok(())
    }

    /// Runs the output of the last block through the last norm and the head, and adds the predictions.
    fn run_head(
        &mut self,
        batches: &Batches,
        mut streams: Streams,
        places: &[(usize, usize)],
        tell: &mut dyn FnMut(),
    ) -> Result<()> {
        self.normalize(batches, &mut streams)?;
        let (device, labels, rows) = (&self.device, &batches.labels, places.len());
        let divergence = || Divergence::new(device, rows, Mixture::default());
        let mut of_exchanged = streams
            .exchanged
            .iter()
            .map(|_| divergence())
            .collect::<Result<Vec<_>>>()?;
        let mut of_tables = divergence()?;
        let mut predictions = Predictions::new(device, rows, self.caps)?;
        let [cap, reference_cap] = self.caps;
        let (mut expected, mut logits) = (Array::empty(), Array::empty());
        for tokens in self.reference.vocabulary_chunks() {
            let batch = &batches.reference;
            self.reference
                .logits(batch, &mut streams.reference, &tokens, &mut expected)?;
            tell();
            let exchanged = streams.exchanged.iter_mut().zip(&mut of_exchanged);
            for (x, divergence) in exchanged {
                self.reference.logits(batch, x, &tokens, &mut logits)?;
                let (both, caps) = ([&logits, &expected], [reference_cap; 2]);
                labels.add(divergence, device, &tokens, both, caps)?;
                tell();
            }
            self.reference.release();
            let batch = &batches.examined;
            if let Some(x) = &mut streams.tables {
                self.examined.logits(batch, x, &tokens, &mut logits)?;
                let both = [&logits, &expected];
                labels.add(&mut of_tables, device, &tokens, both, [cap, reference_cap])?;
                tell();
            }
            if let Some(x) = streams.examined.as_mut().filter(|_| self.measures.tokens) {
                self.examined.logits(batch, x, &tokens, &mut logits)?;
                predictions.add(device, labels, &tokens, [&logits, &expected])?;
                tell();
            }
            self.examined.release();
        }
        for (sum, divergence) in self.divergences.iter_mut().zip(&of_exchanged) {
            *sum += labels.sum(divergence)?;
        }
        if self.measures.blocks {
            self.of_tables += labels.sum(&of_tables)?;
        }
        if self.measures.tokens {
            let found = predictions.finish(labels, |row| places[row])?;
            self.found.tokens.extend(found);
        }
        Ok(())
    }

    /// Applies the last norm: the examined model's to its own stream, and the reference's to all others.
    fn normalize(&mut self, batches: &Batches, streams: &mut Streams) -> Result<()> {
        let next = &mut self.next;
        if let Some(x) = &mut streams.examined {
            self.examined.normalize(&batches.examined, x, next)?;
            std::mem::swap(x, next);
        }
        let of_reference = [&mut streams.reference].into_iter();
        for x in of_reference
            .chain(&mut streams.tables)
            .chain(&mut streams.exchanged)
        {
            self.reference.normalize(&batches.reference, x, next)?;
            std::mem::swap(x, next);
        }
        Ok(())
    }

    /// The comparison over all batches.
    pub(super) fn finish(self) -> Comparison {
        let mean = |sum: f64| sum / self.predicted.max(1) as f64;
        let errors = |which: usize| {
            self.errors
                .iter()
                .map(move |e| e[which].relative())
                .collect()
        };
        Comparison {
            stream_errors: errors(0),
            block_errors: errors(1),
            block_divergences: self.divergences.iter().copied().map(mean).collect(),
            tables_divergence: self.measures.blocks.then(|| mean(self.of_tables)),
            ..self.found
        }
    }
}
