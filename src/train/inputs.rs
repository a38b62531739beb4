//! Second moments of the inputs of a model's projections.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use crate::base::Result;
use crate::model::training::{Layout, MatrixId};
use crate::ops::training::input_moments::{BlockMoments, InputMoments};
use crate::ops::{Device, Mixed, Slice};

/// Second moments of the inputs of matrices. Projections with the same inputs share them, stored under the first projection.
#[derive(Debug, Default)]
pub(super) struct ObservedInputs(BTreeMap<MatrixId, InputMoments>);

impl ObservedInputs {
    /// Adds inputs `x`, `cols` wide, of a group of projections whose first one is `first`.
    pub(super) fn add(
        &mut self,
        device: &Device,
        (first, cols): (MatrixId, usize),
        x: Slice<'_, Mixed>,
    ) -> Result<()> {
        self.at(device, (first, cols))?.add(device, x)
    }

    /// The moments under a matrix with `cols` inputs; empty moments unless some were added.
    pub(super) fn at(
        &mut self,
        device: &Device,
        (first, cols): (MatrixId, usize),
    ) -> Result<&mut InputMoments> {
        Ok(match self.0.entry(first) {
            Entry::Occupied(moments) => moments.into_mut(),
            Entry::Vacant(place) => place.insert(InputMoments::new(device, cols)?),
        })
    }

    /// Total bytes.
    pub(super) fn bytes(&self) -> usize {
        self.0.values().map(InputMoments::state_bytes).sum()
    }

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The moments of a group, by its first matrix.
    pub(super) fn under(&self, first: MatrixId) -> Option<&InputMoments> {
        self.0.get(&first)
    }

    /// The moments under a matrix, for restoring.
    pub(super) fn under_mut(&mut self, first: MatrixId) -> Option<&mut InputMoments> {
        self.0.get_mut(&first)
    }

    /// Damped moments of a matrix's inputs.
    pub(super) fn of(
        &self,
        layout: &Layout,
        matrix: MatrixId,
    ) -> Result<Option<Vec<BlockMoments>>> {
        let moments = self.under(layout.first_with_inputs_of(matrix));
        moments.map(InputMoments::read).transpose()
    }
}
