// x sigmoid(x), of SwiGLU.
#pragma once
#include "common/types.cuh"

__device__ __forceinline__ float silu(float x) { return x / (1 + __expf(-x)); }
