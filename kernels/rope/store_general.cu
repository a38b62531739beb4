// Stores keys and values for heads of other sizes, and heads that rotate partially. See rope/store.cuh.
#include "rope/store.cuh"

HEADS(192, 192, rope_store_heads_192)
HEADS(256, 256, rope_store_heads_256)
HEADS(512, 512, rope_store_heads_512)
HEADS(32, ANY_ROTARY, rope_store_heads_32_general)
HEADS(64, ANY_ROTARY, rope_store_heads_64_general)
HEADS(80, ANY_ROTARY, rope_store_heads_80_general)
HEADS(96, ANY_ROTARY, rope_store_heads_96_general)
HEADS(128, ANY_ROTARY, rope_store_heads_128_general)
HEADS(192, ANY_ROTARY, rope_store_heads_192_general)
HEADS(256, ANY_ROTARY, rope_store_heads_256_general)
VALUES(80)
VALUES(96)
VALUES(192)
VALUES(256)
VALUES(512)
