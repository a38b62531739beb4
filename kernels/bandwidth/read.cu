// Reads memory and discards it, to measure the read bandwidth.
#include "common/ptx.cuh"

struct Arguments {
    const uint4* data;
    u64 count;      // of uint4
    u32* sink;
};

constexpr int THREADS = 512;
constexpr int BATCH = 8;    // loads of a thread in flight

extern "C" __global__ void __launch_bounds__(THREADS) read_all(const __grid_constant__ Arguments a) {
    wait_for_earlier_kernels();
    u32 sum = 0;
    u64 step = (u64)gridDim.x * THREADS;
    u64 i = (u64)blockIdx.x * THREADS + threadIdx.x;
    for (; i + (BATCH - 1) * step < a.count; i += BATCH * step) {
        uint4 v[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; j++) v[j] = a.data[i + j * step];
#pragma unroll
        for (int j = 0; j < BATCH; j++) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    for (; i < a.count; i += step) sum ^= a.data[i].x;
    // Never true, but the compiler cannot know that, and so keeps the loads.
    if (sum == 0x12345678 && a.count == 1) *a.sink = sum;
}
