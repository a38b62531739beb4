// The activations of MLPs: those of gated linear units, and that of MLPs without a gate.
#pragma once
#include "common/types.cuh"

enum Activation { SILU, GELU_TANH, CLAMPED_SWIGLU };

// x sigmoid(t).
__device__ __forceinline__ float gated(float x, float t) { return x / (1 + __expf(-t)); }

// x sigmoid(x), or x (1 + tanh(u)) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3), which is x sigmoid(2 u).
__device__ __forceinline__ float activate(int activation, float x) {
    return gated(x, activation == SILU ? x : 1.5957691f * (x + 0.044715f * x * x * x));
}

// A gated linear unit, with the numbers of CLAMPED_SWIGLU: g sigmoid(alpha g) (u + 1) with g = min(gate, limit) and u = up within the limit.
struct Gating {
    int activation;
    float alpha;
    float limit;
};
__device__ __forceinline__ float gated_unit(const Gating& a, float gate, float up) {
    if (a.activation != CLAMPED_SWIGLU) return activate(a.activation, gate) * up;
    float g = fminf(gate, a.limit);
    return gated(g, a.alpha * g) * (fminf(fmaxf(up, -a.limit), a.limit) + 1);
}

// The activation without a gate, max(x, 0)^2. NaN stays NaN.
__device__ __forceinline__ float relu_squared(float x) { return x < 0 ? 0 : x * x; }

// An activation and its derivative by x. Because sigmoid' = sigmoid (1 - sigmoid), the derivative of x s with s = sigmoid(t) is s + x s (1
// - s) t'.
struct Activated {
    float value, slope;
};
__device__ __forceinline__ Activated activate_with_slope(int activation, float x) {
    float t = activation == SILU ? x : 1.5957691f * (x + 0.044715f * x * x * x);
    float dt = activation == SILU ? 1 : 1.5957691f * (1 + 3 * 0.044715f * x * x);
    float s = 1 / (1 + __expf(-t));
    return {x * s, s + x * s * (1 - s) * dt};
}
