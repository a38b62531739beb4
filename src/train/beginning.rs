//! Initial parameters of training. A matrix begins in the form in which it would be delivered untrained, with its residual to the source.

use std::ops::Range;
use std::sync::Arc;

use super::recipe::Recipe;
use crate::base::error::bail;
use crate::base::{Result, memory};
use crate::checkpoint::Encoding;
use crate::cpu::Cpu;
use crate::format::adamw::{Forms, KeepScale, WeightForm};
use crate::format::int8;
use crate::format::nvfp4::BLOCK;
use crate::model::convert::{Quantized, Tables};
use crate::model::training::{MatrixId, Source};
use crate::ops::Device;
use crate::ops::training::optimizer::{Matrix, ReadRows};
use crate::tensor::DType;

/// Initial matrices of a model under a recipe.
pub(super) struct Beginning<'a> {
    source: &'a Source,
    recipe: &'a Recipe,
    /// The source as it would be delivered untrained; `None` for random weights.
    delivered: Option<Source>,
}

impl<'a> Beginning<'a> {
    /// Plans the initial state of `recipe` at `source`, which the threads of `host` quantize when it is read. Reads no weights.
    pub(super) fn new(source: &'a Source, recipe: &'a Recipe, host: &Arc<Cpu>) -> Result<Self> {
        let delivered = match source.is_fresh() {
            true => None,
            false => {
                let (checkpoint, options) = (source.checkpoint(), recipe.conversion(source));
                let quantized = Quantized::new(checkpoint.clone(), options, host.clone())?;
                Some(Source::new(Arc::new(quantized))?)
            }
        };
        Ok(Beginning {
            source,
            recipe,
            delivered,
        })
    }

    /// The model as it would be delivered untrained; `None` for random weights.
    pub(super) fn delivered(&self) -> Option<&Source> {
        self.delivered.as_ref()
    }

    /// The encoding in which a matrix is delivered, unless its trained form needs a wider one.
    pub(super) fn encoding(&self, id: MatrixId) -> Result<Encoding> {
        if let Some(delivered) = &self.delivered {
            return delivered.encoding(id);
        }
        let layout = self.source.layout();
        let is_table = id == layout.embedding || id == layout.head;
        Ok(match self.recipe.tables {
            _ if !self.recipe.weights.is_packed() => Encoding::Dense(DType::F32),
            Tables::Int8 if is_table => Encoding::Int8,
            Tables::Auto | Tables::Bf16 if is_table => Encoding::Dense(DType::BF16),
            _ if layout.matrices[id].is_recurrent => Encoding::Int8,
            _ => Encoding::Nvfp4,
        })
    }

    /// The forms of a matrix. For a frozen matrix only the weight form matters.
    pub(super) fn forms(&self, id: MatrixId, trains: bool) -> Result<Forms> {
        let name = &self.source.layout().matrices[id].name;
        let forms = self.recipe.forms_of(name);
        if trains && !forms.weight.is_packed() {
            return Ok(forms);
        }
        let weight = match self.encoding(id)? {
            Encoding::Nvfp4 if trains => forms.weight,
            Encoding::Nvfp4 => WeightForm::OneTerm,
            Encoding::Int8 | Encoding::Dense(DType::BF16) => WeightForm::Bf16,
            _ => WeightForm::F32,
        };
        let keep_scale = match forms.keep_scale {
            KeepScale::Near if !self.source.is_fresh() => KeepScale::Held,
            keep => keep,
        };
        Ok(Forms {
            weight,
            keep_scale,
            ..forms
        })
    }

    /// A matrix in its initial state. Unless `filled`, trained data is zero instead.
    pub(super) fn matrix(
        &self,
        device: &Device,
        host: &Cpu,
        id: MatrixId,
        (trains, filled): (bool, bool),
    ) -> Result<Matrix> {
        let m = &self.source.layout().matrices[id];
        let (rows, cols) = (m.rows, m.cols);
        if !cols.is_multiple_of(BLOCK) {
            bail!(
                Unsupported,
                "a matrix of [{rows}, {cols}] cannot be held: columns must be a multiple of {BLOCK}"
            );
        }
        let forms = self.forms(id, trains)?;
        if trains && !filled {
            return Matrix::zeroed(device, forms, rows, cols);
        }
        let read = |rows: Range<usize>, out: &mut [f32]| self.source.matrix(id, rows, out);
        let Some(delivered) = &self.delivered else {
            return match trains {
                true => Matrix::new(device, host, forms, rows, cols, &read),
                false => Matrix::frozen(device, host, forms.weight, rows, cols, &read),
            };
        };
        if !forms.weight.is_packed() {
            return match trains {
                true => Matrix::new(device, host, forms, rows, cols, &read),
                false => {
                    let read =
                        |rows: Range<usize>, out: &mut [f32]| self.as_delivered(id, rows, out);
                    Matrix::frozen(device, host, forms.weight, rows, cols, &read)
                }
            };
        }
        let mut codes = memory::zeros(rows * cols / 2)?;
        let mut scales = memory::zeros(rows * cols / BLOCK)?;
        let global = delivered.nvfp4(id, &mut codes, &mut scales)?;
        let of = (&codes[..], &scales[..], global);
        if !trains {
            return Matrix::frozen_nvfp4(device, (rows, cols), of);
        }
        let is_nvfp4 = self.source.encoding(id)? == Encoding::Nvfp4;
        let values: Option<&ReadRows<'_>> = match is_nvfp4 {
            true => None,
            false => Some(&read),
        };
        Matrix::begun(device, host, forms, (rows, cols), of, values)
    }

    /// Values of rows of a dense matrix or a table, as they would be delivered untrained.
    fn as_delivered(&self, id: MatrixId, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        self.source.matrix(id, rows.clone(), out)?;
        let is_rounded =
            self.encoding(id)? == Encoding::Int8 && self.source.encoding(id)? != Encoding::Int8;
        if is_rounded {
            let mut codes = vec![0; out.len()];
            let mut scales = vec![0.0; rows.len()];
            let cols = self.source.layout().matrices[id].cols;
            int8::quantize_rows(out, cols, rows.start, &mut codes, &mut scales)?;
            int8::dequantize_rows(&codes, &scales, cols, out)?;
        }
        Ok(())
    }
}
