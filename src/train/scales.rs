//! Chooses new block scales for matrices that have moved, by the inputs of their products.

use serde::Serialize;

use super::inputs::ObservedInputs;
use super::parameters::Parameters;
use crate::base::Result;
use crate::base::memory::{Buffer, Tag};
use crate::model::training::MatrixId;
use crate::ops::training::optimizer::StatePart;

/// A choice of new block scales.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ScaleChoice {
    /// Blocks for which another scale was better.
    pub blocks: usize,
    /// Loss of the step's batch by the delivered weights, with the old scales.
    pub before: f64,
    /// Loss with the new scales, which are kept if it is lower.
    pub after: f64,
}

/// Saved state of matrices: codes, scales and residuals.
struct Before(Vec<(MatrixId, [Buffer<u8>; 3])>);

impl Parameters {
    /// Chooses new block scales for the matrices that have moved. Returns their old state, and the number of blocks that changed.
    fn choose_scales(&mut self, inputs: &ObservedInputs) -> Result<(Before, usize)> {
        let (device, host) = (self.device().clone(), self.device().host_cpu()?);
        let (mut before, mut blocks) = (Vec::new(), 0);
        for id in 0..self.matrices().len() {
            let matrix = &self.matrices()[id];
            if !matrix.forms().weight.is_packed() || !self.may_have_moved(id) {
                continue;
            }
            let Some(moments) = inputs.of(self.layout(), id)? else {
                continue;
            };
            let copy = |part| Buffer::from_slice(Tag::Weights, &matrix.read_part(&device, part)?);
            let state = [
                copy(StatePart::Codes)?,
                copy(StatePart::Scales)?,
                copy(StatePart::Rest)?,
            ];
            let changed = self.matrices_mut()[id].choose_scales(&device, &host, &moments)?;
            if changed > 0 {
                blocks += changed;
                before.push((id, state));
            }
        }
        Ok((Before(before), blocks))
    }

    fn restore_scales(&mut self, before: Before) -> Result<()> {
        let device = self.device().clone();
        for (id, [codes, scales, rest]) in before.0 {
            let matrix = &mut self.matrices_mut()[id];
            matrix.write_weights(&device, &codes, &scales)?;
            matrix.write_part(StatePart::Rest, &rest)?;
        }
        Ok(())
    }
}

/// A choice of scales that can be undone until its step is taken.
#[derive(Default)]
pub(super) struct Chosen {
    /// The choice, for the step's report.
    pub(super) choice: Option<ScaleChoice>,
    /// The old state of the matrices, if new scales were kept.
    before: Option<Before>,
}

impl Chosen {
    /// Whether the delivered weights have changed.
    pub(super) fn is_kept(&self) -> bool {
        self.before.is_some()
    }

    /// Restores the old state.
    pub(super) fn undo(&mut self, parameters: &mut Parameters) -> Result<()> {
        match self.before.take() {
            Some(before) => parameters.restore_scales(before),
            None => Ok(()),
        }
    }
}

/// Computes the loss of some text by the current weights of passes.
type Loss<'a> = dyn FnMut(&mut Parameters) -> Result<f64> + 'a;

/// Computes the loss by the delivered weights, and records the inputs of matrices.
pub(super) fn observe(
    parameters: &mut Parameters,
    loss: &mut Loss<'_>,
) -> Result<(f64, ObservedInputs)> {
    parameters.multiply_with_all(false);
    parameters.observe_inputs();
    let found = loss(parameters);
    let inputs = parameters.observed_inputs();
    Ok((found?, inputs))
}

/// Chooses new block scales for the matrices that have moved, and keeps them if they lower the loss by the delivered weights.
pub(super) fn choose(parameters: &mut Parameters, loss: &mut Loss<'_>) -> Result<Chosen> {
    let (before, inputs) = observe(parameters, loss)?;
    let (matrices, blocks) = parameters.choose_scales(&inputs)?;
    drop(inputs);
    if blocks == 0 {
        return Ok(Chosen::default());
    }
    let after = loss(parameters);
    let mut chosen = Chosen {
        choice: None,
        before: Some(matrices),
    };
    if !after.as_ref().is_ok_and(|after| *after < before) {
        chosen.undo(parameters)?;
    }
    chosen.choice = Some(ScaleChoice {
        blocks,
        before,
        after: after?,
    });
    Ok(chosen)
}
