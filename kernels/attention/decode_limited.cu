// Decode attention for heads that rotate completely, with windows, soft caps and sinks. See attention/decode.cuh.
#include "attention/decode.cuh"

constexpr int WIDE_BLOCKS = 3;  // of a multiprocessor where shared memory allows; one fits on every architecture

KERNELS(32, true, 32, attention_decode_32_limited, LONG_RING_BLOCKS, ONE_PAGE_BLOCKS)
KERNELS(64, true, 64, attention_decode_64_limited, LONG_RING_BLOCKS, ONE_PAGE_BLOCKS)
KERNELS(128, true, 128, attention_decode_128_limited, LONG_RING_BLOCKS, ONE_PAGE_BLOCKS)
KERNELS(192, true, 192, attention_decode_192_limited, 1, WIDE_BLOCKS)
KERNELS(256, true, 256, attention_decode_256_limited, 1, WIDE_BLOCKS)
