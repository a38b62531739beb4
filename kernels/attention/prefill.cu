// Prefill attention for heads of 32, 64 and 128 elements. See attention/prefill.cuh.
#include "attention/prefill.cuh"

KERNEL(32)
KERNEL(64)
KERNEL(128)
