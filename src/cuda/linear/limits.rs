//! Rows of activations up to which each kind of kernel serves.

/// Rows of activations that the fused kernel takes at once.
pub const SMALL: usize = 16;
/// Rows of activations beyond which Hopper's kernel of wide tiles serves, unless they are ordered: of 16 rows a layer of Qwen3-4B took
/// 56.9 us by it and 60.4 by the others, of 8 rows 52.5 and 43.2. Of ordered rows the fused kernel takes all that it has room for: the
/// four products of a layer take 34.7 us of 16 rows by it, each measured by itself, and 41.6 by the wide one.
pub(super) const WIDE: usize = 8;
/// Rows of activations that need no scratch memory, and products of which leave half of a multiprocessor's shared memory to other
/// kernels.
pub(in crate::cuda) const FEW: usize = 4;
/// Bytes of a block's activations, row after row, beyond which the fused kernel gives way to the tiled one. On an H200, 8 rows of
/// 9,728 took blocks that hold all of them 11.1 us and the tiled kernel 9.6, but a layer is 0.5 us faster where pairs of blocks divide
/// them.
pub(super) const FUSED_BYTES: usize = 128 << 10;
/// Rows of activations that the tiled kernel takes where there is the library, too. It was measured against the library's way for
/// a step of 64 rows only, in earlier forms, and was faster: 8,440 and 8,912 tokens a second of Qwen3-4B to 8,064.
pub const TILED: usize = 128;
