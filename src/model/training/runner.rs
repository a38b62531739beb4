//! A frozen model whose blocks, last norm and head run one at a time on streams that the caller holds: `model::compare` puts two models
//! side by side with it.

use std::ops::Range;
use std::sync::Arc;

use super::teacher::Weights;
use super::{Batch, MatrixId, Options, Pass, Source, Store, VectorId};
use crate::base::Result;
use crate::model::Spec;
use crate::ops::{Array, Device, Mixed, Slice, SliceMut};

/// A frozen model that runs in parts. Matrices are read from the checkpoint when they are needed, as they are stored, and held until
/// [`Runner::release`].
#[derive(Debug)]
pub struct Runner {
    device: Device,
    spec: Spec,
    weights: HeldWeights,
    pass: Pass,
}

impl Runner {
    /// The model of a checkpoint. Reads no matrices.
    pub fn new(device: &Device, source: Arc<Source>) -> Result<Runner> {
        let pass = Pass::new(device, source.spec(), source.layout(), Options::default())?;
        Ok(Runner {
            device: device.clone(),
            spec: source.spec().clone(),
            weights: HeldWeights {
                weights: Weights::exact(device, source)?,
                device: device.clone(),
                held: Vec::new(),
            },
            pass,
        })
    }

    /// Documents one after another, as this model takes them.
    pub fn batch(&self, tokens: &[u32], documents: &[usize]) -> Result<Batch> {
        Batch::unlabelled(&self.device, &self.spec, tokens, documents)
    }

    /// The residual stream `[rows, hidden]` of a batch before the first block.
    pub fn embed(&mut self, batch: &Batch) -> Result<Array<Mixed>> {
        self.pass.embed(&mut self.weights, batch)
    }

    /// Takes the stream `x` of a batch through a block to `out`.
    pub fn run_block(
        &mut self,
        batch: &Batch,
        block: usize,
        x: &Array<Mixed>,
        out: &mut Array<Mixed>,
    ) -> Result<()> {
        self.pass.run_block(&mut self.weights, batch, block, x, out)
    }

    /// Applies the last norm to the stream `x` of a batch.
    pub fn normalize(
        &mut self,
        batch: &Batch,
        x: &Array<Mixed>,
        out: &mut Array<Mixed>,
    ) -> Result<()> {
        self.pass.normalize(&self.weights, batch, x, out)
    }

    /// Ranges of tokens whose logits are computed at a time.
    pub fn vocabulary_chunks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        self.pass.vocabulary_chunks()
    }

    /// Writes the logits `[rows, tokens]` of these tokens for normalized rows `x` of a batch. They are not capped.
    pub fn logits(
        &mut self,
        batch: &Batch,
        x: &mut Array<Mixed>,
        tokens: &Range<usize>,
        out: &mut Array,
    ) -> Result<()> {
        self.pass.logits(&mut self.weights, batch, x, tokens, out)
    }

    /// Gives back the matrices that are held.
    pub fn release(&mut self) {
        self.weights.held.clear();
    }
}

/// Parameters of a model, of which those that were read stay on the device.
#[derive(Debug)]
struct HeldWeights {
    weights: Weights,
    device: Device,
    held: Vec<(MatrixId, Range<usize>, Array<Mixed>)>,
}

impl Store for HeldWeights {
    fn shape(&self, matrix: MatrixId) -> (usize, usize) {
        self.weights.shape(matrix)
    }

    fn read(
        &mut self,
        matrix: MatrixId,
        rows: Range<usize>,
        out: SliceMut<'_, Mixed>,
    ) -> Result<()> {
        let mut held = self.held.iter();
        let values = match held.find(|(id, of, _)| *id == matrix && *of == rows) {
            Some((_, _, values)) => values,
            None => {
                let mut values = Array::scratch(&self.device, out.len())?;
                self.weights.read(matrix, rows.clone(), values.all_mut())?;
                self.held.push((matrix, rows, values));
                &self.held[self.held.len() - 1].2
            }
        };
        out.copy_from(values.all())
    }

    fn embed(&mut self, matrix: MatrixId, tokens: &[u32], out: SliceMut<'_, Mixed>) -> Result<()> {
        self.weights.embed(matrix, tokens, out)
    }

    fn vector(&self, vector: VectorId) -> Result<Slice<'_>> {
        self.weights.vector(vector)
    }
}
