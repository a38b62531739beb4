// Stores keys and values for heads of other sizes, and heads that rotate partially. See rope/store.cuh.
#include "rope/store.cuh"

HEADS(192, false, rope_store_heads_192)
HEADS(256, false, rope_store_heads_256)
HEADS(512, false, rope_store_heads_512)
HEADS(32, true, rope_store_heads_32_general)
HEADS(64, true, rope_store_heads_64_general)
HEADS(80, true, rope_store_heads_80_general)
HEADS(96, true, rope_store_heads_96_general)
HEADS(128, true, rope_store_heads_128_general)
HEADS(192, true, rope_store_heads_192_general)
HEADS(256, true, rope_store_heads_256_general)
VALUES(80)
VALUES(96)
VALUES(192)
VALUES(256)
VALUES(512)
