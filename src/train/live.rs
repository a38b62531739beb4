//! The weights of a trainer as a model runs on them between steps.

use std::ops::Range;

use super::parameters::Parameters;
use crate::base::Result;
use crate::base::error::bail;
use crate::format::adamw::WeightForm;
use crate::format::nvfp4::BLOCK;
use crate::model::Trained;
use crate::model::tensors::StoredRows;
use crate::model::training::{MatrixId, VectorId};
use crate::ops::Array;
use crate::ops::linear::Linear;
use crate::tensor::DType;

impl Trained for Parameters {
    fn matrix(&self, id: MatrixId) -> Result<Linear> {
        self.check_runnable()?;
        Linear::trained(self.device(), self.matrices()[id].shared())
    }

    fn rows(&self, id: MatrixId, rows: &StoredRows) -> Result<Linear> {
        self.check_runnable()?;
        let (device, matrix) = (self.device(), &self.matrices()[id]);
        let (cols, count) = (matrix.shape().1, rows.count());
        if let Some((codes, scales)) = matrix.delivered(device)? {
            let read = &mut |range: Range<usize>, to: &mut [u8], to_scales: &mut [u8]| {
                take(rows, range.clone(), cols / 2, &codes, to);
                take(rows, range, cols / BLOCK, &scales, to_scales);
                Ok(())
            };
            return Linear::nvfp4(device, count, cols, matrix.global(), read);
        }
        let dtype = match matrix.forms().weight {
            WeightForm::Bf16 => DType::BF16,
            _ => DType::F32,
        };
        let all = matrix.delivered_values(device)?;
        let read = &mut |range: Range<usize>, to: &mut [f32]| {
            take(rows, range, cols, &all, to);
            Ok(())
        };
        Linear::dense(device, count, cols, dtype, read)
    }

    fn vector(&self, id: VectorId) -> Result<Array> {
        let values = self.vectors()[id].values();
        let mut copy = Array::zeroed(self.device(), values.len())?;
        copy.all_mut().copy_from(values)?;
        Ok(copy)
    }
}

impl Parameters {
    /// Refuses to run a model on weights with adapters.
    fn check_runnable(&self) -> Result<()> {
        match self.layout().adapted().next() {
            None => Ok(()),
            Some(_) => bail!(
                Unsupported,
                "a model cannot be run on weights with adapters that are trained; export it with the adapters merged, and load that"
            ),
        }
    }
}

/// Copies a range of the rows `rows` of a matrix, `width` elements each.
fn take<T: Copy>(rows: &StoredRows, range: Range<usize>, width: usize, all: &[T], to: &mut [T]) {
    for (at, run) in rows.parts(range) {
        let len = run.len() * width;
        to[at * width..][..len].copy_from_slice(&all[run.start * width..][..len]);
    }
}
