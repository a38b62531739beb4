// Prefill attention for heads of 512 elements. See attention/prefill.cuh.
#include "attention/prefill.cuh"

KERNEL(512)
