// As attention/rows.cu, of keys and values in 8 bits.
#include "attention/prefill.cuh"

KERNEL_OF(u8, 32, true, attention_rows_32_f8)
KERNEL_OF(u8, 64, true, attention_rows_64_f8)
KERNEL_OF(u8, 128, true, attention_rows_128_f8)
