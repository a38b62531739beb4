// As attention/rows.cu, of keys and values in 8 bits.
#include "attention/prefill.cuh"

ROWS_HALF(u8, 32, attention_rows_32_f8)
ROWS_HALF(u8, 64, attention_rows_64_f8)
ROWS_HALF(u8, 128, attention_rows_128_f8)
ROWS_WHOLE(u8, 128, attention_rows_128_f8)
