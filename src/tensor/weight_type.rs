//! Storage types of weights that are prepared for GEMMs.

use super::DType;
use crate::base::error::{Result, bail};

/// Storage type of a prepared weight. Not a [`DType`], because codes and scales are not elements of one type, and kernels support only
/// three dense types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightType {
    /// e2m1 codes with an e4m3 scale per 16 along K and one global scale.
    Nvfp4,
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    BF16,
    /// int8 codes with one f32 scale per row.
    Int8,
}

impl WeightType {
    /// Every type.
    pub const ALL: [WeightType; 5] = [
        WeightType::Nvfp4,
        WeightType::F32,
        WeightType::F16,
        WeightType::BF16,
        WeightType::Int8,
    ];

    /// The type of this name.
    pub fn from_name(name: &str) -> Option<WeightType> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// The type of a dense weight with elements of `dtype`.
    pub fn dense(dtype: DType) -> Result<WeightType> {
        Ok(match dtype {
            DType::F32 => WeightType::F32,
            DType::F16 => WeightType::F16,
            DType::BF16 => WeightType::BF16,
            _ => bail!(
                Unsupported,
                "a dense weight is held in float32, float16 or bfloat16, not in {}",
                dtype.name()
            ),
        })
    }

    /// The type of the elements; `None` for codes with scales.
    pub const fn dtype(self) -> Option<DType> {
        match self {
            WeightType::Nvfp4 | WeightType::Int8 => None,
            WeightType::F32 => Some(DType::F32),
            WeightType::F16 => Some(DType::F16),
            WeightType::BF16 => Some(DType::BF16),
        }
    }

    /// Bytes of an element; `None` for codes with scales.
    pub const fn element_bytes(self) -> Option<usize> {
        match self.dtype() {
            Some(dtype) => Some(dtype.bytes()),
            None => None,
        }
    }

    /// Lower-case name used in reports.
    pub const fn name(self) -> &'static str {
        match self {
            WeightType::Nvfp4 => "nvfp4",
            WeightType::F32 => "f32",
            WeightType::F16 => "f16",
            WeightType::BF16 => "bf16",
            WeightType::Int8 => "int8",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;

    #[test]
    fn a_dense_weight_has_one_of_three_types() {
        for &dtype in DType::ALL {
            match WeightType::dense(dtype) {
                Ok(held) => assert_eq!(held.dtype(), Some(dtype)),
                refused => {
                    assert!(![DType::F32, DType::F16, DType::BF16].contains(&dtype));
                    expect_kind(refused, ErrorKind::Unsupported, dtype.name());
                }
            }
        }
    }
}
