//! Block scales by the inputs of products: those of matrices that have moved are chosen anew, and those of matrices that adapters are
//! merged into are chosen so.

use std::collections::BTreeMap;

use serde::Serialize;

use super::parameters::Parameters;
use super::trainer::{Prepared, Trainer};
use crate::base::Result;
use crate::base::memory::{Buffer, Tag};
use crate::model::training::{Layout, MatrixId};
use crate::ops::training::input_moments::{BlockMoments, InputMoments};
use crate::ops::training::optimizer::StatePart;
use crate::ops::{Device, Mixed, Slice};

/// Block scales that were chosen anew.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ScaleChoice {
    /// Blocks for which another scale was better.
    pub blocks: usize,
    /// The loss of the step's batch as it was delivered, before.
    pub before: f64,
    /// The same with the new scales, which are kept if it is less.
    pub after: f64,
}

/// Second moments of the inputs of matrices. Projections that take the same inputs share theirs, under the first of them.
#[derive(Debug, Default)]
pub(super) struct ObservedInputs(BTreeMap<MatrixId, InputMoments>);

impl ObservedInputs {
    /// Adds inputs `x` of projections of which `first` is the first one. Each has `cols` inputs.
    pub(super) fn add(
        &mut self,
        device: &Device,
        (first, cols): (MatrixId, usize),
        x: Slice<'_, Mixed>,
    ) -> Result<()> {
        self.at(device, (first, cols))?.add(device, x)
    }

    /// The moments under a matrix of `cols` inputs: of none, unless some were added.
    pub(super) fn at(
        &mut self,
        device: &Device,
        (first, cols): (MatrixId, usize),
    ) -> Result<&mut InputMoments> {
        use std::collections::btree_map::Entry;
        Ok(match self.0.entry(first) {
            Entry::Occupied(moments) => moments.into_mut(),
            Entry::Vacant(place) => place.insert(InputMoments::new(device, cols)?),
        })
    }

    /// Bytes of all.
    pub(super) fn bytes(&self) -> usize {
        self.0.values().map(InputMoments::state_bytes).sum()
    }

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Those under a matrix.
    pub(super) fn under(&self, first: MatrixId) -> Option<&InputMoments> {
        self.0.get(&first)
    }

    /// The same, to be restored.
    pub(super) fn under_mut(&mut self, first: MatrixId) -> Option<&mut InputMoments> {
        self.0.get_mut(&first)
    }

    /// Those of a matrix's inputs, fit to choose scales by.
    pub(super) fn of(
        &self,
        layout: &Layout,
        matrix: MatrixId,
    ) -> Result<Option<Vec<BlockMoments>>> {
        let moments = self.under(layout.first_with_inputs_of(matrix));
        moments.map(InputMoments::read).transpose()
    }
}

/// Matrices before their scales were chosen anew: codes, scales, and what is beside the codes.
struct Before(Vec<(MatrixId, [Buffer<u8>; 3])>);

impl Parameters {
    /// Chooses the block scales of the matrices that have moved anew. Gives what they were, and the number of blocks that changed.
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

/// What came of a choice, until the step that it was made for is taken.
#[derive(Default)]
pub(super) struct Chosen {
    /// What to say of it.
    pub(super) choice: Option<ScaleChoice>,
    /// What there was before, if new scales are kept.
    before: Option<Before>,
}

impl Chosen {
    /// Whether weights are delivered otherwise than before.
    pub(super) fn is_kept(&self) -> bool {
        self.before.is_some()
    }

    /// Brings back what there was before.
    pub(super) fn undo(&mut self, parameters: &mut Parameters) -> Result<()> {
        match self.before.take() {
            Some(before) => parameters.restore_scales(before),
            None => Ok(()),
        }
    }
}

impl Trainer {
    /// Before a step on `batches`: chooses block scales anew when it is time to, and takes note of the inputs of matrices with adapters
    /// unless that was done.
    pub(super) fn look_at_inputs(&mut self, batches: &[Prepared]) -> Result<Chosen> {
        if !batches.iter().all(Prepared::has_labels) {
            return Ok(Chosen::default());
        }
        if self.chooses_scales_after() == Some(self.steps()) {
            return self.choose_scales(batches);
        }
        if self.config().recipe.observes_adapted() && self.parameters().inputs().is_empty() {
            let (_, inputs) = self.observe(batches)?;
            self.parameters_mut().set_inputs(inputs);
        }
        Ok(Chosen::default())
    }

    /// The loss of batches as it is delivered, and the inputs of their matrices.
    fn observe(&mut self, batches: &[Prepared]) -> Result<(f64, ObservedInputs)> {
        self.parameters_mut().multiply_with_all(false);
        self.parameters_mut().observe_inputs();
        let loss = self.loss_of(batches);
        let inputs = self.parameters_mut().observed_inputs();
        Ok((loss?, inputs))
    }

    /// Chooses the block scales of the matrices that have moved anew, where that lowers the loss of `batches` as it is delivered.
    fn choose_scales(&mut self, batches: &[Prepared]) -> Result<Chosen> {
        let (before, inputs) = self.observe(batches)?;
        let (matrices, blocks) = self.parameters_mut().choose_scales(&inputs)?;
        drop(inputs);
        if blocks == 0 {
            return Ok(Chosen::default());
        }
        let after = self.loss_of(batches);
        let mut chosen = Chosen {
            choice: None,
            before: Some(matrices),
        };
        if !after.as_ref().is_ok_and(|after| *after < before) {
            chosen.undo(self.parameters_mut())?;
        }
        chosen.choice = Some(ScaleChoice {
            blocks,
            before,
            after: after?,
        });
        Ok(chosen)
    }
}
