// Decode attention for heads of 512 elements, by half pages: two of them in a ring, or one where shared memory is small or blocks are many.
// See attention/decode.cuh.
#include "attention/decode.cuh"

constexpr int WIDEST_BLOCKS = 2;    // of a multiprocessor where shared memory allows; one fits on every architecture

KERNEL(512, true, 512, attention_decode_512_limited_ring2, 2, 1, 1, false)
KERNEL(512, true, 512, attention_decode_512_limited_ring1, 1, 1, WIDEST_BLOCKS, false)
