// As attention/rows.cu, of keys and values in 8 bits.
#include "attention/rows.cuh"

ROWS_OF(u8, 32, 2, attention_rows_32_f8)
ROWS_OF(u8, 64, 2, attention_rows_64_f8)
ROWS_OF(u8, 128, 2, attention_rows_128_f8)
