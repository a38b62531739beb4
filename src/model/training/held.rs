//! A frozen model's parameters for passes that read the same matrices again and again.

use std::ops::Range;

use super::teacher::Weights;
use super::{MatrixId, Store, VectorId};
use crate::base::Result;
use crate::ops::{Array, Device, Mixed, Slice, SliceMut};

/// Streamed parameters. Matrices that were read stay on the device until [`HeldWeights::release`].
#[derive(Debug)]
pub(super) struct HeldWeights {
    weights: Weights,
    device: Device,
    held: Vec<(MatrixId, Range<usize>, Array<Mixed>)>,
}

impl HeldWeights {
    pub(super) fn new(device: &Device, weights: Weights) -> HeldWeights {
        HeldWeights {
            weights,
            device: device.clone(),
            held: Vec::new(),
        }
    }

    /// Replaces the values `[rows, cols]` of a matrix, if it is held.
    pub(super) fn put(&mut self, matrix: MatrixId, values: &[f32]) -> Result<()> {
        let cols = self.weights.shape(matrix).1;
        for (_, rows, held) in self.held.iter_mut().filter(|(id, ..)| *id == matrix) {
            let own = &values[rows.start * cols..rows.end * cols];
            held.all_mut().copy_from(Slice::Host(own))?;
        }
        Ok(())
    }

    /// Frees the held matrices.
    pub(super) fn release(&mut self) {
        self.held.clear();
    }
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
