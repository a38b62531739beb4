//! Element types, numbered like libtorch's `ScalarType`, and their conversion to and from f32.

use half::{bf16, f16};

use crate::base::error::{Result, bail, err};
use crate::format::e4m3;

macro_rules! dtypes {
    ($($(#[doc = $doc:literal])+ $variant:ident = $code:literal, $name:literal, $bytes:literal;)+) => {
        /// The type of a tensor's elements.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(i32)]
        pub enum DType { $($(#[doc = $doc])+ $variant = $code,)+ }

        impl DType {
            /// Every type, by number.
            pub const ALL: &'static [DType] = &[$(DType::$variant,)+];

            /// Its number in libtorch.
            pub const fn code(self) -> i32 { self as i32 }

            /// Short lower-case name.
            pub const fn name(self) -> &'static str { match self { $(DType::$variant => $name,)+ } }

            /// Bytes of one element.
            pub const fn bytes(self) -> usize { match self { $(DType::$variant => $bytes,)+ } }
        }
    };
}

dtypes! {
    /// Unsigned byte; also a pair of packed 4-bit codes.
    U8 = 0, "uint8", 1;
    /// Signed byte.
    I8 = 1, "int8", 1;
    /// 16-bit integer.
    I16 = 2, "int16", 2;
    /// 32-bit integer.
    I32 = 3, "int32", 4;
    /// 64-bit integer.
    I64 = 4, "int64", 8;
    /// IEEE half precision.
    F16 = 5, "float16", 2;
    /// IEEE single precision.
    F32 = 6, "float32", 4;
    /// IEEE double precision.
    F64 = 7, "float64", 8;
    /// A byte that is 0 or 1.
    Bool = 11, "bool", 1;
    /// bfloat16.
    BF16 = 15, "bfloat16", 2;
    /// E4M3 without infinities: the block scales of NVFP4.
    F8E4M3 = 24, "float8_e4m3fn", 1;
    /// Two E2M1 codes in one byte. An element of the tensor is the pair.
    F4E2M1x2 = 45, "float4_e2m1fn_x2", 1;
}

/// Reads little chunks of `N` bytes as values and converts each.
macro_rules! widen {
    ($from:expr, $to:expr, $ty:ty) => {
        for (bytes, value) in $from.as_chunks::<{ size_of::<$ty>() }>().0.iter().zip($to) {
            *value = <$ty>::from_ne_bytes(*bytes) as f32;
        }
    };
}

impl DType {
    /// The type with this number.
    pub fn from_code(code: i32) -> Result<DType> {
        DType::ALL
            .iter()
            .copied()
            .find(|d| d.code() == code)
            .ok_or_else(|| {
                let known: Vec<_> = DType::ALL
                    .iter()
                    .map(|d| format!("{} ({})", d.code(), d.name()))
                    .collect();
                err!(
                    InvalidArgument,
                    "dtype {code} is not known; the known ones are {}",
                    known.join(", ")
                )
            })
    }

    /// Whether values of this type are floating point of 16 bits or more.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F16 | DType::F32 | DType::F64 | DType::BF16)
    }

    /// Whether values of this type are integers or booleans.
    pub const fn is_integer(self) -> bool {
        matches!(
            self,
            DType::U8 | DType::I8 | DType::I16 | DType::I32 | DType::I64 | DType::Bool
        )
    }

    /// Converts the elements `from` to f32 in `to`. Integers and f64 round to nearest; bytes of [`DType::F8E4M3`] are decoded.
    pub fn to_f32(self, from: &[u8], to: &mut [f32]) -> Result<()> {
        self.check_lengths(from.len(), to.len())?;
        match self {
            DType::U8 | DType::Bool => widen!(from, to, u8),
            DType::I8 => widen!(from, to, i8),
            DType::I16 => widen!(from, to, i16),
            DType::I32 => widen!(from, to, i32),
            DType::I64 => widen!(from, to, i64),
            DType::F32 => widen!(from, to, f32),
            DType::F64 => widen!(from, to, f64),
            DType::F16 => {
                for (bytes, value) in from.as_chunks().0.iter().zip(to) {
                    *value = f16::from_ne_bytes(*bytes).to_f32();
                }
            }
            DType::BF16 => {
                for (bytes, value) in from.as_chunks().0.iter().zip(to) {
                    *value = bf16::from_ne_bytes(*bytes).to_f32();
                }
            }
            DType::F8E4M3 => {
                for (&byte, value) in from.iter().zip(to) {
                    *value = e4m3::decode(byte);
                }
            }
            DType::F4E2M1x2 => bail!(
                Unsupported,
                "an element of {} is a pair of codes without a scale; dequantize it instead",
                self.name()
            ),
        }
        Ok(())
    }

    /// Converts the values `from` to elements of this type in `to`: to nearest, ties to even, overflow to infinity, as in IEEE 754. Only
    /// for floating types.
    pub fn from_f32(self, from: &[f32], to: &mut [u8]) -> Result<()> {
        self.check_lengths(to.len(), from.len())?;
        match self {
            DType::F32 => {
                for (value, bytes) in from.iter().zip(to.as_chunks_mut().0) {
                    *bytes = value.to_ne_bytes();
                }
            }
            DType::F64 => {
                for (&value, bytes) in from.iter().zip(to.as_chunks_mut().0) {
                    *bytes = f64::from(value).to_ne_bytes();
                }
            }
            DType::F16 => {
                for (&value, bytes) in from.iter().zip(to.as_chunks_mut().0) {
                    *bytes = f16::from_f32(value).to_ne_bytes();
                }
            }
            DType::BF16 => {
                for (&value, bytes) in from.iter().zip(to.as_chunks_mut().0) {
                    *bytes = bf16::from_f32(value).to_ne_bytes();
                }
            }
            _ => bail!(
                InvalidArgument,
                "results come as float16, float32, float64 or bfloat16, not {}",
                self.name()
            ),
        }
        Ok(())
    }

    fn check_lengths(self, bytes: usize, elements: usize) -> Result<()> {
        if elements.checked_mul(self.bytes()) != Some(bytes) {
            bail!(
                InvalidArgument,
                "{elements} elements of {} do not take {bytes} bytes",
                self.name()
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;

    #[test]
    fn codes_come_back() {
        for &d in DType::ALL {
            assert_eq!(DType::from_code(d.code()).unwrap(), d);
        }
        assert!(
            DType::from_code(99)
                .unwrap_err()
                .message()
                .contains("24 (float8_e4m3fn)")
        );
    }

    #[test]
    fn every_float_type_keeps_small_integers() {
        let values: Vec<f32> = (-16..16).map(|i| i as f32).collect();
        for d in DType::ALL.iter().copied().filter(|d| d.is_float()) {
            let mut bytes = vec![0; values.len() * d.bytes()];
            d.from_f32(&values, &mut bytes).unwrap();
            let mut back = vec![0.0; values.len()];
            d.to_f32(&bytes, &mut back).unwrap();
            assert_eq!(back, values, "{}", d.name());
        }
    }

    #[test]
    fn integers_and_scales_widen() {
        let mut one = [0.0];
        for (d, bytes, value) in [
            (DType::I8, vec![0xff], -1.0),
            (DType::U8, vec![0xff], 255.0),
            (DType::I16, (-300i16).to_ne_bytes().to_vec(), -300.0),
            (DType::I32, 70_000i32.to_ne_bytes().to_vec(), 70_000.0),
            (DType::I64, (-5i64).to_ne_bytes().to_vec(), -5.0),
            (DType::Bool, vec![1], 1.0),
            (DType::F8E4M3, vec![0x38], 1.0),
        ] {
            d.to_f32(&bytes, &mut one).unwrap();
            assert_eq!(one[0], value, "{}", d.name());
        }
        expect_kind(
            DType::F4E2M1x2.to_f32(&[0], &mut one),
            ErrorKind::Unsupported,
            "dequantize it instead",
        );
        expect_kind(
            DType::F32.to_f32(&[0; 3], &mut one),
            ErrorKind::InvalidArgument,
            "do not take 3 bytes",
        );
        expect_kind(
            DType::I8.from_f32(&[0.0], &mut [0]),
            ErrorKind::InvalidArgument,
            "not int8",
        );
    }
}
