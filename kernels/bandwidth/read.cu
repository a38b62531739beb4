// Reads memory and does nothing with it: the ceiling of everything bound by reading.
#include "common/ptx.cuh"

struct Arguments {
    const uint4* data;
    u64 count;      // of uint4
    u32* sink;
};

constexpr int THREADS = 512;
constexpr int AT_ONCE = 8;

extern "C" __global__ void __launch_bounds__(THREADS) read_all(const __grid_constant__ Arguments a) {
    wait_for_earlier_kernels();
    u32 sum = 0;
    u64 step = (u64)gridDim.x * THREADS;
    u64 i = (u64)blockIdx.x * THREADS + threadIdx.x;
    for (; i + (AT_ONCE - 1) * step < a.count; i += AT_ONCE * step) {
        uint4 v[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) v[j] = a.data[i + j * step];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    for (; i < a.count; i += step) sum ^= a.data[i].x;
    // Never so, but the compiler does not know it.
    if (sum == 0x12345678 && a.count == 1) *a.sink = sum;
}
