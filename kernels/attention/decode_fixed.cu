// Decode attention with fixed splits, for heads of 32, 64 or 128 elements that all rotate, without a window or soft cap. See
// attention/decode.cuh.
#include "attention/decode.cuh"

FIXED_KERNELS(u16, 32, false, 32, attention_decode_32_fixed, LONG_RING_BLOCKS, ONE_PAGE_BLOCKS)
FIXED_KERNELS(u16, 64, false, 64, attention_decode_64_fixed, LONG_RING_BLOCKS, ONE_PAGE_BLOCKS)
FIXED_KERNELS(u16, 128, false, 128, attention_decode_128_fixed, LONG_RING_BLOCKS, ONE_PAGE_BLOCKS)
