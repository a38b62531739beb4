// Attention of rows of one sequence with the bits of single tokens, for heads of every size: in blocks of half as many warps where two of them
// may fit a multiprocessor. See attention/prefill.cuh.
#include "attention/prefill.cuh"

ROWS_HALF(u16, 32, attention_rows_32)
ROWS_HALF(u16, 64, attention_rows_64)
ROWS_HALF(u16, 80, attention_rows_80)
ROWS_HALF(u16, 96, attention_rows_96)
ROWS_HALF(u16, 128, attention_rows_128)
ROWS_WHOLE(u16, 80, attention_rows_80)
ROWS_WHOLE(u16, 96, attention_rows_96)
ROWS_WHOLE(u16, 128, attention_rows_128)
ROWS_WHOLE(u16, 192, attention_rows_192)
ROWS_WHOLE(u16, 256, attention_rows_256)
ROWS_WHOLE(u16, 512, attention_rows_512)
