//! Adapters: what they begin as, the frozen matrices that they stand beside, and both together.

use std::ops::Range;

use super::recipe::Recipe;
use crate::base::Result;
use crate::base::error::bail;
use crate::checkpoint::Encoding;
use crate::cpu::Cpu;
use crate::format::adamw::{FirstForm, Forms, SecondForm, WeightForm};
use crate::format::nvfp4::{self, BLOCK, NonFinite};
use crate::format::random::{bits, uniform};
use crate::model::training::{AdapterLayout, MatrixId, MatrixLayout, Source};
use crate::ops::Device;
use crate::ops::training::optimizer::Matrix;
use crate::tensor::DType;

/// Rows of a matrix that are read at a time.
const ROWS: usize = 256;
/// The stream of random bits that first factors begin with, apart from those of rounding.
const STREAM: u64 = 0x6c6f_7261;

/// The forms of adapters.
pub(super) const FORMS: Forms = Forms {
    weight: WeightForm::F32,
    first: FirstForm::F32,
    second: SecondForm::F32,
    fresh_scales: false,
};

fn runs(rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows)
        .step_by(ROWS)
        .map(move |first| first..rows.min(first + ROWS))
}

/// A factor of an adapter: A if its name says so, else B, which begins as zeros; zeros both unless `filled`.
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

/// The form of a matrix of the model that adapters are trained over: as [`Recipe::lora`] says.
pub(super) fn base_form(
    source: &Source,
    recipe: &Recipe,
    id: MatrixId,
    name: &str,
) -> Result<WeightForm> {
    let stored = source.encoding(id)?;
    let is_high = recipe.keeps_high(name) || source.is_nvfp4()?;
    Ok(match stored {
        Encoding::Nvfp4 => WeightForm::OneTerm,
        _ if !is_high => WeightForm::OneTerm,
        Encoding::Dense(DType::BF16) => WeightForm::Bf16,
        _ => WeightForm::F32,
    })
}

/// A matrix of the model that adapters are trained over.
pub(super) fn base(
    device: &Device,
    host: &Cpu,
    source: &Source,
    recipe: &Recipe,
    id: MatrixId,
    m: &MatrixLayout,
) -> Result<Matrix> {
    let (rows, cols) = (m.rows, m.cols);
    let stored = source.encoding(id)?;
    if !cols.is_multiple_of(BLOCK) {
        bail!(
            Unsupported,
            "a matrix of [{rows}, {cols}] cannot be held: columns must be a multiple of {BLOCK}"
        );
    }
    let read = |rows: Range<usize>, out: &mut [f32]| source.matrix(id, rows, out);
    let mut codes = vec![0; rows * cols / 2];
    let mut scales = vec![0; rows * cols / BLOCK];
    if stored == Encoding::Nvfp4 {
        let global = source.nvfp4(id, &mut codes, &mut scales)?;
        return Matrix::frozen_nvfp4(device, (rows, cols), (&codes, &scales, global));
    }
    let form = base_form(source, recipe, id, &m.name)?;
    if !form.is_packed() {
        return Matrix::frozen(device, host, form, rows, cols, &read);
    }
    let options = recipe.weight_scales.options();
    let mut values = vec![0.0; ROWS.min(rows) * cols];
    let mut amax = 0f32;
    for run in runs(rows) {
        let (first, values) = (run.start, &mut values[..run.len() * cols]);
        read(run, values)?;
        amax = amax.max(nvfp4::amax(values, first * cols, NonFinite::Error)?);
    }
    let global = nvfp4::global_scale(amax, &options);
    for run in runs(rows) {
        let (first, values) = (run.start, &mut values[..run.len() * cols]);
        let codes = &mut codes[run.start * cols / 2..run.end * cols / 2];
        let scales = &mut scales[run.start * cols / BLOCK..run.end * cols / BLOCK];
        read(run, values)?;
        nvfp4::quantize_rows(values, cols, first, global, &options, codes, scales)?;
    }
    Matrix::frozen_nvfp4(device, (rows, cols), (&codes, &scales, global))
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
