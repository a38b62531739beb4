// Pointwise operations on f32 for the unfused path: activations with and without a gate, sums, factors, soft caps and constants.
#include "activation/gate.cuh"
#include "common/ptx.cuh"

struct Arguments {
    float* x;           // [count]
    const float* y;     // [period], repeated along x; or null
    u64 count;
    u64 period;
    float factor;
    Gating gating;
};

constexpr int THREADS = 256;

// Calls change(x[i], y[i]) for each element and stores the result to x[i]. The grid may have any number of blocks.
template <class F>
__device__ __forceinline__ void each(const Arguments& a, F change) {
    wait_for_earlier_kernels();
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < a.count; i += (u64)gridDim.x * THREADS) {
        a.x[i] = change(a.x[i], a.y ? a.y[i % a.period] : 0);
    }
}

// x = the gated linear unit of gate x and up y
extern "C" __global__ void __launch_bounds__(THREADS) pointwise_glu(const __grid_constant__ Arguments a) {
    each(a, [&](float x, float y) { return gated_unit(a.gating, x, y); });
}
// x = max(x, 0)^2
extern "C" __global__ void __launch_bounds__(THREADS) pointwise_relu_squared(const __grid_constant__ Arguments a) {
    each(a, [](float x, float) { return relu_squared(x); });
}
// x += y
extern "C" __global__ void __launch_bounds__(THREADS) pointwise_add(const __grid_constant__ Arguments a) {
    each(a, [](float x, float y) { return x + y; });
}
// x *= factor
extern "C" __global__ void __launch_bounds__(THREADS) pointwise_scale(const __grid_constant__ Arguments a) {
    each(a, [&](float x, float) { return x * a.factor; });
}
// x = factor
extern "C" __global__ void __launch_bounds__(THREADS) pointwise_fill(const __grid_constant__ Arguments a) {
    each(a, [&](float, float) { return a.factor; });
}
// x = factor * tanh(x / factor)
extern "C" __global__ void __launch_bounds__(THREADS) pointwise_cap(const __grid_constant__ Arguments a) {
    each(a, [&](float x, float) { return a.factor * tanhf(x / a.factor); });
}
