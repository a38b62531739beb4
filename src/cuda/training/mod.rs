//! The kernels of training beside those of inference.

mod optimizer;

pub use optimizer::{
    Moments, Step, TrainedWeights, adamw, adamw_vector, chunk_bytes, decode_matrix, pack_matrix,
    unpack_matrix,
};

/// What the kernels of this room are passed, by the start of their names.
pub(super) const ARGUMENTS: &[&[(&str, usize)]] = &[optimizer::ARGUMENTS];
