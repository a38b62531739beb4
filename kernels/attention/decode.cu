// What most models have: heads of 32, 64 or 128 elements, all of which rotate, that see everything. See attention/decode.cuh.
#include "attention/decode.cuh"

KERNELS(32, false, false, attention_decode_32, SOME_BLOCKS, MANY_BLOCKS)
KERNELS(64, false, false, attention_decode_64, SOME_BLOCKS, MANY_BLOCKS)
KERNELS(128, false, false, attention_decode_128, SOME_BLOCKS, MANY_BLOCKS)
#if __CUDA_ARCH__ >= 900
KERNEL(32, false, false, attention_decode_32_pair, SOME_STAGES, 1, SOME_BLOCKS, true)
KERNEL(64, false, false, attention_decode_64_pair, SOME_STAGES, 1, SOME_BLOCKS, true)
KERNEL(128, false, false, attention_decode_128_pair, SOME_STAGES, 1, SOME_BLOCKS, true)
#endif
