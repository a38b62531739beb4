// Stores keys and values in 8 bits for heads of 32, 64 or 128 elements that all rotate. See rope/store.cuh.
#include "rope/store.cuh"

#define F8_KERNELS(D)                            \
    HEADS_OF(u8, D, D, rope_store_heads_##D##_f8) \
    VALUES_OF(u8, D, rope_store_values_##D##_f8)  \
    ROWS_OF(u8, D, D, rope_store_rows_##D##_f8)

F8_KERNELS(32)
F8_KERNELS(64)
F8_KERNELS(128)
