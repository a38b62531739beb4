//! The numbers of rows that each kind of kernel serves. The measurements behind them are in `benches/NOTES.md`.

/// The most rows of activations of the skinny GEMM.
pub const SKINNY_ROWS: usize = 16;
/// Row-major activations of more rows than this go to Hopper's kernel of wide tiles. Those in fragment-major layout stay with the skinny
/// GEMM as long as they fit.
pub(super) const WIDE: usize = 8;
/// Products of at most this many rows need no scratch memory, and leave half of a multiprocessor's shared memory to other kernels.
pub(in crate::cuda) const HALF_SM_ROWS: usize = 4;
/// With more bytes of row-major activations in a block than this, the tiled kernel is faster than the skinny GEMM.
pub(super) const FUSED_BYTES: usize = 128 << 10;
/// The most rows that the tiled kernel takes where cuBLASLt is present, too.
pub const TILED: usize = 128;
