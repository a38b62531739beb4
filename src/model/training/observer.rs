//! Runs text through a model block by block, and passes the inputs of its projections to a callback. Calibration uses it.

use std::ops::Range;
use std::sync::Arc;

use super::held::HeldWeights;
use super::teacher::Weights;
use super::{Batch, MatrixId, Options, Pass, Placement, ProjectionLayout, Source, Store, VectorId};
use crate::base::Result;
use crate::base::error::bail;
use crate::ops::{Array, Device, Mixed, Slice, SliceMut};

/// Receives the inputs `[rows, cols]` of projections, the id of the first of them, and the index of the batch.
pub type See<'a> = dyn FnMut(usize, MatrixId, Slice<'_, Mixed>) -> Result<()> + 'a;

/// A frozen model with the residual streams of some texts. Reads a block's weights from the checkpoint once, when the block is next.
#[derive(Debug)]
pub struct Observer {
    weights: HeldWeights,
    pass: Pass,
    batches: Vec<Batch>,
    /// Residual stream of each batch before the next block.
    streams: Vec<Array<Mixed>>,
    tried: Vec<Tried>,
    next: Array<Mixed>,
    hidden_size: usize,
    block: usize,
}

/// A batch that goes through the last block again with other weights.
#[derive(Debug)]
struct Tried {
    /// Index of the batch.
    batch: usize,
    /// Its residual stream before the block.
    before: Array<Mixed>,
    /// The stream after the block, in host memory; empty until the first [`Observer::error`].
    after: Vec<f32>,
}

impl Observer {
    /// The model of a checkpoint, before its first block, with batches of documents: tokens, and the documents' lengths.
    /// [`Observer::error`] covers the batches with the indices `tried`.
    pub fn new(
        device: &Device,
        source: Arc<Source>,
        texts: &[(Vec<u32>, Vec<usize>)],
        tried: impl IntoIterator<Item = usize>,
    ) -> Result<Observer> {
        let pass = Pass::new(device, source.spec(), source.layout(), Options::default())?;
        let streamed = Weights::new(device, source.clone(), Placement::Streamed)?;
        let mut weights = HeldWeights::new(device, streamed);
        let (mut batches, mut streams) = (Vec::new(), Vec::new());
        for (tokens, documents) in texts {
            let batch = Batch::unlabelled(device, source.spec(), tokens, documents)?;
            streams.push(pass.embed(&mut weights, &batch)?);
            batches.push(batch);
        }
        let tried = tried.into_iter().map(|batch| Tried {
            batch,
            before: Array::empty(),
            after: Vec::new(),
        });
        Ok(Observer {
            hidden_size: source.spec().hidden_size,
            weights,
            pass,
            batches,
            streams,
            tried: tried.collect(),
            next: Array::empty(),
            block: 0,
        })
    }

    /// The next block of the batches.
    pub fn block(&self) -> usize {
        self.block
    }

    /// Runs all batches through the next block.
    pub fn advance(&mut self, see: &mut See<'_>) -> Result<()> {
        self.weights.release();
        for (number, batch) in self.batches.iter().enumerate() {
            let mut store = Observed {
                weights: &mut self.weights,
                batch: number,
                see,
            };
            let before = &self.streams[number];
            self.pass
                .run_block(&mut store, batch, self.block, before, &mut self.next)?;
            std::mem::swap(&mut self.streams[number], &mut self.next);
            if let Some(tried) = self.tried.iter_mut().find(|t| t.batch == number) {
                std::mem::swap(&mut tried.before, &mut self.next);
                tried.after.clear();
            }
        }
        self.block += 1;
        Ok(())
    }

    /// Replaces the values `[rows, cols]` of a matrix of the block that the batches have run last.
    pub fn put(&mut self, matrix: MatrixId, values: &[f32]) -> Result<()> {
        self.weights.put(matrix, values)
    }

    /// The relative error of the streams after the last block with the replaced matrices: the mean over tokens of the squared difference,
    /// relative to the square of the stream.
    pub fn error(&mut self) -> Result<f64> {
        let Some(last) = self.block.checked_sub(1) else {
            bail!(Internal, "no block to try other weights in");
        };
        let (mut sum, mut tokens, mut found) = (0.0, 0, Vec::new());
        for tried in &mut self.tried {
            let batch = &self.batches[tried.batch];
            let len = batch.rows() * self.hidden_size;
            self.pass.run_block(
                &mut self.weights,
                batch,
                last,
                &tried.before,
                &mut self.next,
            )?;
            if tried.after.is_empty() {
                tried.after.resize(len, 0.0);
                let stream = self.streams[tried.batch].first(len)?;
                stream.read(&mut tried.after)?;
            }
            found.resize(len, 0.0);
            self.next.first(len)?.read(&mut found)?;
            let rows = found.chunks_exact(self.hidden_size);
            let rows = rows.zip(tried.after.chunks_exact(self.hidden_size));
            sum += rows.map(|(a, b)| relative_square(a, b)).sum::<f64>();
            tokens += batch.rows();
        }
        Ok(sum / tokens.max(1) as f64)
    }
}

/// The squared difference of two rows, relative to the square of the second.
fn relative_square(found: &[f32], expected: &[f32]) -> f64 {
    let (mut difference, mut whole) = (0.0, f64::MIN_POSITIVE);
    for (&a, &b) in found.iter().zip(expected) {
        let (a, b) = (f64::from(a), f64::from(b));
        difference += (a - b) * (a - b);
        whole += b * b;
    }
    difference / whole
}

/// A frozen model's parameters with an observer of the projections' inputs.
struct Observed<'a, 'b> {
    weights: &'a mut HeldWeights,
    /// Index of the current batch.
    batch: usize,
    see: &'a mut See<'b>,
}

impl Store for Observed<'_, '_> {
    fn shape(&self, matrix: MatrixId) -> (usize, usize) {
        self.weights.shape(matrix)
    }

    fn read(
        &mut self,
        matrix: MatrixId,
        rows: Range<usize>,
        out: SliceMut<'_, Mixed>,
    ) -> Result<()> {
        self.weights.read(matrix, rows, out)
    }

    fn embed(&mut self, matrix: MatrixId, tokens: &[u32], out: SliceMut<'_, Mixed>) -> Result<()> {
        self.weights.embed(matrix, tokens, out)
    }

    fn vector(&self, vector: VectorId) -> Result<Slice<'_>> {
        self.weights.vector(vector)
    }

    fn observe(&mut self, projections: &[ProjectionLayout], x: Slice<'_, Mixed>) -> Result<()> {
        (self.see)(self.batch, projections[0].matrix, x)
    }
}
