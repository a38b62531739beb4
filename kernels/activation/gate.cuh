// The activations of gated linear units.
#pragma once
#include "common/types.cuh"

enum Activation { SILU, GELU_TANH };

// x sigmoid(t).
__device__ __forceinline__ float gated(float x, float t) { return x / (1 + __expf(-t)); }

// x sigmoid(x), or x (1 + tanh(u)) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3), which is x sigmoid(2 u).
__device__ __forceinline__ float activate(int activation, float x) {
    return gated(x, activation == SILU ? x : 1.5957691f * (x + 0.044715f * x * x * x));
}
