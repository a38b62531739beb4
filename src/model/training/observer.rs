//! A model that text runs through, block by block, and what its projections multiply there.

use std::ops::Range;
use std::sync::Arc;

use super::teacher::Weights;
use super::{Batch, MatrixId, Options, Pass, Placement, ProjectionLayout, Source, Store, VectorId};
use crate::base::Result;
use crate::ops::{Array, Device, Mixed, Slice, SliceMut};

/// Is given the inputs `[rows, cols]` of projections, of which the first is named; and the number of the batch that they are of.
pub type See<'a> = dyn FnMut(usize, MatrixId, Slice<'_, Mixed>) -> Result<()> + 'a;

/// A frozen model with some text on its way through it. Weights are read from the checkpoint when their turn comes.
#[derive(Debug)]
pub struct Observer {
    weights: Weights,
    pass: Pass,
    batches: Vec<Batch>,
    /// Each batch's residual stream before the next block.
    streams: Vec<Array<Mixed>>,
    next: Array<Mixed>,
    block: usize,
}

impl Observer {
    /// The model of a checkpoint, before its first block, with batches of documents: tokens, and the documents' lengths.
    pub fn new(
        device: &Device,
        source: Arc<Source>,
        texts: &[(Vec<u32>, Vec<usize>)],
    ) -> Result<Observer> {
        let pass = Pass::new(device, source.spec(), source.layout(), Options::default())?;
        let mut weights = Weights::new(device, source.clone(), Placement::Streamed)?;
        let (mut batches, mut streams) = (Vec::new(), Vec::new());
        for (tokens, documents) in texts {
            let batch = Batch::unlabelled(device, source.spec(), tokens, documents)?;
            streams.push(pass.embed(&mut weights, &batch)?);
            batches.push(batch);
        }
        Ok(Observer {
            weights,
            pass,
            batches,
            streams,
            next: Array::empty(),
            block: 0,
        })
    }

    /// Takes all batches through the next block.
    pub fn advance(&mut self, see: &mut See<'_>) -> Result<()> {
        for (number, batch) in self.batches.iter().enumerate() {
            let mut store = Observed {
                weights: &mut self.weights,
                batch: number,
                see,
            };
            let x = &self.streams[number];
            self.pass
                .run_block(&mut store, batch, self.block, x, &mut self.next)?;
            std::mem::swap(&mut self.streams[number], &mut self.next);
        }
        self.block += 1;
        Ok(())
    }
}

/// A frozen model's parameters, with somebody who looks on.
struct Observed<'a, 'b> {
    weights: &'a mut Weights,
    /// The number of the batch that is on its way.
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
