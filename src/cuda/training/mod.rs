//! Launchers of the kernels of training. Activations and their gradients are bf16; statistics, norm weights and sums are f32. Every sum has
//! a fixed order, so the same call gives the same bits. Arrays must not overlap unless a launcher allows it.

mod activation;
mod array;
mod attention;
mod divergence;
mod embedding;
mod experts;
mod heads;
mod input_moments;
mod loss;
mod matmul;
mod norm;
mod operand;
mod optimizer;
mod sizes;
mod statistics;

pub use activation::{add_bias_rows, column_sums, column_sums_partial, glu_backward, glu_forward};
pub use array::{add, add_columns, bf16_to_f32, copy_columns, f32_to_bf16, fill, scale};
pub use attention::{Attention, attention_backward, attention_forward};
pub use divergence::{
    DIVERGENCE_FOUND, DIVERGENCE_SUMS, DIVERGENCE_TOTALS, Divergence, divergence_chunk,
    divergence_finish, divergence_gradient,
};
pub use embedding::{TokenRows, scatter_add};
pub use experts::{
    RowsOfExpert, add_rows, add_rows_backward, add_rows_f32, add_rows_unweighted, gather_rows,
    take_rows,
};
pub use heads::{Heads, heads_backward, heads_forward, heads_partial};
pub use input_moments::add_input_moments;
pub use loss::{
    CrossEntropy, L1_PARTIAL, LogitChunk, cross_entropy_chunk, cross_entropy_finish,
    cross_entropy_gradient, l1_gradient,
};
pub use matmul::{WORKSPACE as PRODUCT_WORKSPACE, matmul};
pub use norm::{RmsNormBackward, rms_norm_backward, rms_norm_forward, rms_norm_partial};
pub use operand::{OPERAND_MAXIMA, round_columns, round_int8_rows, round_rows};
pub use optimizer::{
    AdamWStep, Moments, OFFLOAD_ROOM, TrainedWeights, adamw, adamw_offloaded, adamw_vector,
    chunk_bytes, decode_matrix, pack_matrix, unpack_matrix,
};
pub use statistics::{STATISTICS_ENTRY, STATISTICS_PARTIAL, gradient_statistics};

pub(super) use optimizer::CACHED;

/// Argument sizes of this folder's kernels, by name.
pub(super) const ARGUMENTS: &[&[(&str, usize)]] = &[
    activation::ARGUMENTS,
    array::ARGUMENTS,
    attention::ARGUMENTS,
    divergence::ARGUMENTS,
    embedding::ARGUMENTS,
    experts::ARGUMENTS,
    heads::ARGUMENTS,
    input_moments::ARGUMENTS,
    loss::ARGUMENTS,
    norm::ARGUMENTS,
    operand::ARGUMENTS,
    optimizer::ARGUMENTS,
    statistics::ARGUMENTS,
];
