// Decode attention for heads of 256 elements, the first 64 of which rotate, without a window or soft cap. See attention/decode.cuh.
#include "attention/decode.cuh"

constexpr int ROTARY = 64;
constexpr int WIDE_BLOCKS = 3;  // of a multiprocessor where shared memory allows; one fits on every architecture

KERNEL(256, false, ROTARY, attention_decode_256_rotary64_pair, 2, 2, 1, false)
KERNEL(256, false, ROTARY, attention_decode_256_rotary64_ring2, 2, 1, 1, false)
KERNEL(256, false, ROTARY, attention_decode_256_rotary64_ring1, 1, 1, WIDE_BLOCKS, false)
