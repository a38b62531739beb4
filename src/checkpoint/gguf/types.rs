//! GGUF's type numbers: the encodings of supported types, and the names of unsupported ones.

use crate::checkpoint::Encoding;
use crate::checkpoint::ggml::{GgmlType, SUPER};
use crate::tensor::DType;

/// Encoding, elements per block and bytes per block of a GGUF type number.
pub(super) fn encoding(code: u32) -> Option<(Encoding, usize, usize)> {
    use GgmlType::*;
    let dense = |dtype: DType| Some((Encoding::Dense(dtype), 1, dtype.bytes()));
    let ggml = |t, elements, bytes| Some((Encoding::Ggml(t), elements, bytes));
    match code {
        0 => dense(DType::F32),
        1 => dense(DType::F16),
        2 => ggml(Q4_0, 32, 18),
        3 => ggml(Q4_1, 32, 20),
        6 => ggml(Q5_0, 32, 22),
        7 => ggml(Q5_1, 32, 24),
        8 => ggml(Q8_0, 32, 34),
        10 => ggml(Q2_K, SUPER, 84),
        11 => ggml(Q3_K, SUPER, 110),
        12 => ggml(Q4_K, SUPER, 144),
        13 => ggml(Q5_K, SUPER, 176),
        14 => ggml(Q6_K, SUPER, 210),
        20 => ggml(IQ4_NL, 32, 18),
        23 => ggml(IQ4_XS, SUPER, 136),
        24 => dense(DType::I8),
        25 => dense(DType::I16),
        26 => dense(DType::I32),
        27 => dense(DType::I64),
        28 => dense(DType::F64),
        30 => dense(DType::BF16),
        39 => ggml(MXFP4, 32, 17),
        40 => Some((Encoding::Nvfp4, 64, 36)),
        _ => None,
    }
}

/// The name of an unsupported type number, for errors.
pub(super) fn unsupported_name(code: u32) -> String {
    let name = match code {
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        21 => "IQ3_S",
        22 => "IQ2_S",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        _ => return format!("type {code}"),
    };
    name.to_owned()
}
