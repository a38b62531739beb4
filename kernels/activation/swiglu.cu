// silu(gate) * up, and the addition of a bias to rows.
#include "common/ptx.cuh"

struct SwigluArguments {
    const u16* gate_up;     // bf16 [rows, 2 width]: gate, then up
    u16* y;                 // bf16 [rows, width]
    int width;              // a multiple of 8
};

constexpr int THREADS = 256;

__device__ __forceinline__ float silu(float x) { return x / (1 + __expf(-x)); }
__device__ __forceinline__ u32 product(u32 gate, u32 up) {
    return pack_bf16(silu(bf16_low(gate)) * bf16_low(up), silu(bf16_high(gate)) * bf16_high(up));
}

// Grid: (ceil(width / 8 / THREADS), rows)
extern "C" __global__ void __launch_bounds__(THREADS) swiglu(const __grid_constant__ SwigluArguments a) {
    wait_for_earlier_kernels();
    int i = blockIdx.x * THREADS + threadIdx.x, pieces = a.width / 8;
    if (i >= pieces) return;
    const uint4* row = (const uint4*)a.gate_up + (size_t)blockIdx.y * 2 * pieces;
    uint4 g = row[i], u = row[pieces + i];
    ((uint4*)a.y)[(size_t)blockIdx.y * pieces + i] = make_uint4(product(g.x, u.x), product(g.y, u.y), product(g.z, u.z), product(g.w, u.w));
}

struct BiasArguments {
    void* y;                // f32 or bf16 [rows, stride]
    const float* bias;      // [width]
    int width;
    int stride;
    int is_bf16;
};

// Grid: (ceil(width / THREADS), rows)
extern "C" __global__ void __launch_bounds__(THREADS) add_bias(const __grid_constant__ BiasArguments a) {
    wait_for_earlier_kernels();
    int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.width) return;
    size_t at = (size_t)blockIdx.y * a.stride + i;
    if (a.is_bf16) {
        u16* y = (u16*)a.y + at;
        *y = (u16)pack_bf16(bf16_to_float(*y) + a.bias[i], 0);
    } else {
        ((float*)a.y)[at] += a.bias[i];
    }
}
