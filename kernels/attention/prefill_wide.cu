// Prefill attention for heads of other sizes. See attention/prefill.cuh.
#include "attention/prefill.cuh"

KERNEL(80)
KERNEL(96)
KERNEL(192)
KERNEL(256)
