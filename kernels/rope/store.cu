// Stores keys and values for heads of 32, 64 or 128 elements that all rotate. See rope/store.cuh.
#include "rope/store.cuh"

HEADS(32, 32, rope_store_heads_32)
HEADS(64, 64, rope_store_heads_64)
HEADS(128, 128, rope_store_heads_128)
VALUES(32)
VALUES(64)
VALUES(128)
ROWS(32, 32, rope_store_rows_32)
ROWS(64, 64, rope_store_rows_64)
ROWS(128, 128, rope_store_rows_128)
