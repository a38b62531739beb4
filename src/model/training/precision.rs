//! The precision of the products of projections.

use serde::{Deserialize, Serialize};

use super::MatrixId;
use super::layout::ProjectionLayout;
use crate::format::random::bits;
use crate::ops::training::operand::{OperandRounding, ScaleRule};

/// Format of an operand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProductForm {
    /// Not rounded: bfloat16 on a GPU, float32 on the CPU.
    #[default]
    Bf16,
    /// Rounded to NVFP4 and back.
    Nvfp4,
}

/// The precision of the products of projections.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProductPrecision {
    /// Format of the rows.
    pub activations: ProductForm,
    /// Rule that chooses the rows' block scales.
    pub activation_scales: ScaleRule,
    /// Format of the output gradients.
    pub gradients: ProductForm,
    /// For each matrix, whether its products are not rounded; this extends to projections that share its rows. Empty means that all are
    /// rounded as above.
    pub high: Vec<bool>,
}

/// The rounding of the operands of some projections.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rounding {
    /// Rounding of the rows; `None` if they are not rounded.
    pub(super) rows: Option<OperandRounding>,
    /// Rounding of the output gradients, in the GEMM of the row gradients and in the GEMM of the weight gradients.
    pub(super) gradients: Option<[OperandRounding; 2]>,
}

impl ProductPrecision {
    /// The rounding of projections that share their rows, with random bits derived from `key`.
    pub(super) fn of(&self, projections: &[ProjectionLayout], key: u64) -> Rounding {
        let is_high = |id: MatrixId| self.high.get(id).copied().unwrap_or(false);
        let high = projections.iter().any(|p| is_high(p.matrix));
        let rounds = |form: ProductForm| form == ProductForm::Nvfp4 && !high;
        let first = projections.first().map_or(0, |p| p.matrix as u64);
        Rounding {
            rows: rounds(self.activations)
                .then_some(OperandRounding::Nearest(self.activation_scales)),
            gradients: rounds(self.gradients).then(|| {
                [2 * first, 2 * first + 1]
                    .map(|stream| OperandRounding::Stochastic(bits(key, stream)))
            }),
        }
    }
}
