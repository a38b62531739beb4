// Attention of rows of one sequence with the bits of single tokens, for heads of every size. See attention/prefill.cuh.
#include "attention/prefill.cuh"

KERNEL_OF(u16, 32, true, attention_rows_32)
KERNEL_OF(u16, 64, true, attention_rows_64)
KERNEL_OF(u16, 80, true, attention_rows_80)
KERNEL_OF(u16, 96, true, attention_rows_96)
KERNEL_OF(u16, 128, true, attention_rows_128)
KERNEL_OF(u16, 192, true, attention_rows_192)
KERNEL_OF(u16, 256, true, attention_rows_256)
KERNEL_OF(u16, 512, true, attention_rows_512)
