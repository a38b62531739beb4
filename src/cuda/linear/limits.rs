//! Numbers of rows at which one GEMM kernel takes over from another. `benches/NOTES.md` has the measurements behind them.

/// The most activation rows of the skinny GEMM.
pub const SKINNY_ROWS: usize = 16;
/// With more rows than this, row-major activations go to Hopper's kernel of wide tiles. Fragment-major ones stay with the skinny GEMM as
/// long as they fit.
pub(super) const WIDE: usize = 8;
/// Up to this many rows a GEMM needs no scratch memory, and leaves half of a multiprocessor's shared memory to other kernels.
pub(in crate::cuda) const HALF_SM_ROWS: usize = 4;
/// If a CTA has more bytes of row-major activations than this, the tiled kernel is faster than the skinny GEMM.
pub(super) const FUSED_BYTES: usize = 128 << 10;
/// The most rows that the tiled kernel takes even if cuBLASLt is present.
pub const TILED: usize = 128;

/// Most matrices of a GEMM.
pub(super) const MATRICES: usize = 4;
/// Most matrices that the kernels for NVFP4 take together.
pub(super) const NVFP4_MATRICES: usize = 3;
