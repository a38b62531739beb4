// Prefill attention over keys and values in 8 bits, for heads of 32, 64 and 128 elements. See attention/prefill.cuh.
#include "attention/prefill.cuh"

KERNEL_OF(u8, 32, false, MOST_WARPS, attention_prefill_32_f8)
KERNEL_OF(u8, 64, false, MOST_WARPS, attention_prefill_64_f8)
KERNEL_OF(u8, 128, false, MOST_WARPS, attention_prefill_128_f8)
