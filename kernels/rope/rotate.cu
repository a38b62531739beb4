// RoPE in f32 for the unfused path: of the first rotary_dim elements of a head, element i pairs with element i + rotary_dim / 2.
#include "common/ptx.cuh"

struct Arguments {
    float* x;           // [rows, heads, dim]
    const float* cos;   // [rows, half]
    const float* sin;
    int heads;
    int dim;
    int half;           // rotary_dim / 2
};

constexpr int THREADS = 256;

// Grid: (rows, ceil(heads * half / THREADS)); a thread takes a pair.
extern "C" __global__ void __launch_bounds__(THREADS) rotate(const __grid_constant__ Arguments a) {
    wait_for_earlier_kernels();
    int pair = blockIdx.y * THREADS + threadIdx.x;
    if (pair >= a.heads * a.half) return;
    int head = pair / a.half, i = pair % a.half;
    float* x = a.x + ((size_t)blockIdx.x * a.heads + head) * a.dim + i;
    float c = a.cos[(size_t)blockIdx.x * a.half + i], s = a.sin[(size_t)blockIdx.x * a.half + i];
    float low = x[0], high = x[a.half];
    x[0] = low * c - high * s;
    x[a.half] = high * c + low * s;
}
