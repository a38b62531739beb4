// Decode attention with fixed splits, for heads of any size, with full or partial rotation, windows, soft caps and sinks. See
// attention/decode.cuh.
#include "attention/decode.cuh"

constexpr int GENERAL_BLOCKS = 3, WIDEST_BLOCKS = 2;    // of a multiprocessor where shared memory allows; one fits on every architecture

FIXED_KERNELS(u16, 32, true, ANY_ROTARY, attention_decode_32_general_fixed, LONG_RING_BLOCKS, GENERAL_BLOCKS)
FIXED_KERNELS(u16, 64, true, ANY_ROTARY, attention_decode_64_general_fixed, LONG_RING_BLOCKS, GENERAL_BLOCKS)
FIXED_KERNELS(u16, 80, true, ANY_ROTARY, attention_decode_80_general_fixed, LONG_RING_BLOCKS, GENERAL_BLOCKS)
FIXED_KERNELS(u16, 96, true, ANY_ROTARY, attention_decode_96_general_fixed, LONG_RING_BLOCKS, GENERAL_BLOCKS)
FIXED_KERNELS(u16, 128, true, ANY_ROTARY, attention_decode_128_general_fixed, LONG_RING_BLOCKS, GENERAL_BLOCKS)
FIXED_KERNELS(u16, 192, true, ANY_ROTARY, attention_decode_192_general_fixed, 1, GENERAL_BLOCKS)
FIXED_KERNELS(u16, 256, true, ANY_ROTARY, attention_decode_256_general_fixed, 1, GENERAL_BLOCKS)
FIXED_KERNELS(u16, 512, true, 512, attention_decode_512_general_fixed, 1, WIDEST_BLOCKS)
