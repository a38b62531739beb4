// As attention/decode_fixed.cu, over keys and values in 8 bits.
#include "attention/decode.cuh"

FIXED_KERNELS(u8, 32, false, 32, attention_decode_32_f8_fixed, LONG_RING_BLOCKS, ONE_PAGE_BLOCKS)
FIXED_KERNELS(u8, 64, false, 64, attention_decode_64_f8_fixed, LONG_RING_BLOCKS, ONE_PAGE_BLOCKS)
FIXED_KERNELS(u8, 128, false, 128, attention_decode_128_f8_fixed, LONG_RING_BLOCKS, ONE_PAGE_BLOCKS)
