// Decode attention for the heads of most models: 32, 64 or 128 elements that all rotate, without a window or soft cap. See
// attention/decode.cuh.
#include "attention/decode.cuh"

KERNELS(32, false, 32, attention_decode_32, LONG_RING_BLOCKS, ONE_PAGE_BLOCKS)
KERNELS(64, false, 64, attention_decode_64, LONG_RING_BLOCKS, ONE_PAGE_BLOCKS)
KERNELS(128, false, 128, attention_decode_128, LONG_RING_BLOCKS, ONE_PAGE_BLOCKS)
#if __CUDA_ARCH__ >= 900
KERNEL(32, false, 32, attention_decode_32_cluster, 2, 1, LONG_RING_BLOCKS, true)
KERNEL(64, false, 64, attention_decode_64_cluster, 2, 1, LONG_RING_BLOCKS, true)
KERNEL(128, false, 128, attention_decode_128_cluster, 2, 1, LONG_RING_BLOCKS, true)
#endif
