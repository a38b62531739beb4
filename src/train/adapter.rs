//! LoRA adapters: their initial values, and their sum with the matrices that they stand beside.

use std::ops::Range;

use super::recipe::Recipe;
use crate::base::Result;
use crate::cpu::Cpu;
use crate::format::adamw::{FirstForm, Forms, KeepScale, SecondForm, WeightForm};
use crate::format::random::{bits, uniform};
use crate::model::training::{AdapterLayout, MatrixId, MatrixLayout};
use crate::ops::Device;
use crate::ops::training::optimizer::Matrix;

/// The random stream of initial A factors, separate from those of rounding.
const STREAM: u64 = 0x6c6f_7261;

/// The forms in which adapters are stored.
pub(super) const FORMS: Forms = Forms {
    weight: WeightForm::F32,
    first: FirstForm::F32,
    second: SecondForm::F32,
    keep_scale: KeepScale::Near,
};

/// One factor of an adapter: A or B, by its name. A begins random and B zero; both are zero unless `filled`.
pub(super) fn factor(
    device: &Device,
    host: &Cpu,
    recipe: &Recipe,
    id: MatrixId,
    m: &MatrixLayout,
    filled: bool,
) -> Result<Matrix> {
    if !filled || !m.is_first_factor() {
        return Matrix::zeroed(device, FORMS, m.rows, m.cols);
    }
    let (key, bound) = (
        bits(recipe.seed ^ STREAM, id as u64),
        1.0 / (m.cols as f32).sqrt(),
    );
    let read = |rows: Range<usize>, out: &mut [f32]| {
        for (i, out) in (rows.start * m.cols..).zip(out) {
            *out = bound * (2.0 * uniform(key, i as u64) - 1.0);
        }
        Ok(())
    };
    Matrix::new(device, host, FORMS, m.rows, m.cols, &read)
}

/// The values of a matrix with its adapter: `W + scale * B A`.
pub(super) fn merged(
    device: &Device,
    matrices: &[Matrix],
    id: MatrixId,
    adapter: AdapterLayout,
) -> Result<Vec<f32>> {
    let all = |id: MatrixId| matrices[id].delivered_values(device);
    let (mut values, a, b) = (all(id)?, all(adapter.a)?, all(adapter.b)?);
    let (rows, cols) = matrices[id].shape();
    for (row, values) in values.chunks_exact_mut(cols).enumerate() {
        for inner in 0..adapter.rank {
            let factor = adapter.scale * b[inner * rows + row];
            let a = &a[inner * cols..][..cols];
            values
                .iter_mut()
                .zip(a)
                .for_each(|(v, a)| *v = factor.mul_add(*a, *v));
        }
    }
    Ok(values)
}
