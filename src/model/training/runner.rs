//! A frozen model whose blocks, last norm and head run one at a time on streams held by the caller. `model::compare` uses it to run two
//! models side by side.

use std::ops::Range;
use std::sync::Arc;

use super::held::HeldWeights;
use super::teacher::Weights;
use super::{Batch, Options, Pass, Source};
use crate::base::Result;
use crate::model::Spec;
use crate::ops::{Array, Device, Mixed};

/// A frozen model that runs in parts. Matrices are read from the checkpoint when needed, without rounding, and held until
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

    /// A batch of consecutive documents, prepared for this model.
    pub fn batch(&self, tokens: &[u32], documents: &[usize]) -> Result<Batch> {
        Batch::unlabelled(&self.device, &self.spec, tokens, documents)
    }

    /// The residual stream `[rows, hidden]` of a batch before the first block.
    pub fn embed(&mut self, batch: &Batch) -> Result<Array<Mixed>> {
        self.pass.embed(&mut self.weights, batch)
    }

    /// Runs the stream `x` of a batch through a block to `out`.
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

    /// Writes the logits `[rows, tokens]` of a range of tokens for normalized rows `x` of a batch, without the soft cap.
    pub fn logits(
        &mut self,
        batch: &Batch,
        x: &mut Array<Mixed>,
        tokens: &Range<usize>,
        out: &mut Array,
    ) -> Result<()> {
        self.pass.logits(&mut self.weights, batch, x, tokens, out)
    }

    /// Frees the held matrices.
    pub fn release(&mut self) {
        self.weights.release();
    }
}
