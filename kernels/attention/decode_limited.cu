// Heads all of which rotate, with windows and soft caps. See attention/decode.cuh.
#include "attention/decode.cuh"

constexpr int WIDE_BLOCKS = 3;  // of which one has room on every architecture

KERNELS(32, true, false, attention_decode_32_limited, SOME_BLOCKS, MANY_BLOCKS)
KERNELS(64, true, false, attention_decode_64_limited, SOME_BLOCKS, MANY_BLOCKS)
KERNELS(128, true, false, attention_decode_128_limited, SOME_BLOCKS, MANY_BLOCKS)
KERNELS(192, true, false, attention_decode_192_limited, 1, WIDE_BLOCKS)
KERNELS(256, true, false, attention_decode_256_limited, 1, WIDE_BLOCKS)
