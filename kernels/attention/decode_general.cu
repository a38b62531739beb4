// Decode attention for heads of any size, with full or partial rotation, windows and soft caps. See attention/decode.cuh.
#include "attention/decode.cuh"

constexpr int GENERAL_BLOCKS = 3;   // of a multiprocessor where shared memory allows; one fits on every architecture

KERNELS(32, true, ANY_ROTARY, attention_decode_32_general, LONG_RING_BLOCKS, GENERAL_BLOCKS)
KERNELS(64, true, ANY_ROTARY, attention_decode_64_general, LONG_RING_BLOCKS, GENERAL_BLOCKS)
KERNELS(80, true, ANY_ROTARY, attention_decode_80_general, LONG_RING_BLOCKS, GENERAL_BLOCKS)
KERNELS(96, true, ANY_ROTARY, attention_decode_96_general, LONG_RING_BLOCKS, GENERAL_BLOCKS)
KERNELS(128, true, ANY_ROTARY, attention_decode_128_general, LONG_RING_BLOCKS, GENERAL_BLOCKS)
KERNELS(192, true, ANY_ROTARY, attention_decode_192_general, 1, GENERAL_BLOCKS)
KERNELS(256, true, ANY_ROTARY, attention_decode_256_general, 1, GENERAL_BLOCKS)
