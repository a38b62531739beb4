// Decode attention over keys and values in 8 bits, for heads of 32, 64 or 128 elements that all rotate, without a window or soft cap. Rings
// have as many bytes as those of f16, and so twice as many pages. See attention/decode.cuh.
#include "attention/decode.cuh"

#define F8_KERNELS(D)                                                                            \
    KERNEL_OF(u8, D, false, D, attention_decode_##D##_f8_ring8, 8, 2, LONG_RING_BLOCKS, false, false) \
    KERNEL_OF(u8, D, false, D, attention_decode_##D##_f8_ring4, 4, 1, LONG_RING_BLOCKS, false, false) \
    KERNEL_OF(u8, D, false, D, attention_decode_##D##_f8_ring2, 2, 1, ONE_PAGE_BLOCKS, false, false)

F8_KERNELS(32)
F8_KERNELS(64)
F8_KERNELS(128)
#if __CUDA_ARCH__ >= 900
KERNEL_OF(u8, 32, false, 32, attention_decode_32_f8_cluster, 4, 1, LONG_RING_BLOCKS, true, false)
KERNEL_OF(u8, 64, false, 64, attention_decode_64_f8_cluster, 4, 1, LONG_RING_BLOCKS, true, false)
KERNEL_OF(u8, 128, false, 128, attention_decode_128_f8_cluster, 4, 1, LONG_RING_BLOCKS, true, false)
#endif
