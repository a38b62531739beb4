//! In what the products of projections are.

use serde::{Deserialize, Serialize};

use super::MatrixId;
use super::layout::ProjectionLayout;
use crate::format::random::bits;
use crate::ops::training::operand::{OperandRounding, ScaleRule};

/// The form of an operand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProductForm {
    /// As it is: bfloat16 on a GPU, float32 on the CPU.
    #[default]
    Bf16,
    /// Rounded to NVFP4 and back.
    Nvfp4,
}

/// The precision of the products of projections.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProductPrecision {
    /// The rows that are multiplied.
    pub activations: ProductForm,
    /// How block scales of the rows are chosen.
    pub activation_scales: ScaleRule,
    /// The gradients that are multiplied.
    pub gradients: ProductForm,
    /// Of each matrix, whether its products stay as they are, and with it those of projections that take the same rows; none stay if it is
    /// empty.
    pub high: Vec<bool>,
}

/// The rounding of the operands of some projections.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rounding {
    /// Of the rows, where they are rounded.
    pub(super) rows: Option<OperandRounding>,
    /// Of gradients in the product that makes those of the rows, and in the one that makes those of the weights.
    pub(super) gradients: Option<[OperandRounding; 2]>,
}

impl ProductPrecision {
    /// That of projections which take the same rows, with random bits that follow from `key`.
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
