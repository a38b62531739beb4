//! A frozen model whose blocks, last norm and head run one at a time on streams that the caller holds: `model::compare` puts two models
//! side by side with it.

use std::ops::Range;
use std::sync::Arc;

use super::held::HeldWeights;
use super::teacher::Weights;
use super::{Batch, Options, Pass, Source};
use crate::base::Result;
use crate::model::Spec;
use crate::ops::{Array, Device, Mixed};

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
            weights: HeldWeights::new(device, Weights::exact(device, source)?),
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
        self.weights.release();
    }
}
