// Attention of rows of one sequence as of single tokens, for heads of every size. See attention/rows.cuh.
#include "attention/rows.cuh"

ROWS_OF(u16, 32, 2, attention_rows_32)
ROWS_OF(u16, 64, 2, attention_rows_64)
ROWS_OF(u16, 80, 2, attention_rows_80)
ROWS_OF(u16, 96, 2, attention_rows_96)
ROWS_OF(u16, 128, 2, attention_rows_128)
ROWS_OF(u16, 192, 1, attention_rows_192)
ROWS_OF(u16, 256, 1, attention_rows_256)
ROWS_OF(u16, 512, 1, attention_rows_512)
