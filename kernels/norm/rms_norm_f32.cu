// RMSNorm of rows of any width in f32, for the unfused path.
#include "common/ptx.cuh"
#include "common/reduce.cuh"

struct Arguments {
    const float* x;         // [rows, width]
    const float* weight;    // [width]
    float* y;               // [rows, width]; may be x
    int width;
    float eps;
};

constexpr int THREADS = 256;

// Grid: (rows)
extern "C" __global__ void __launch_bounds__(THREADS) rms_norm_f32(const __grid_constant__ Arguments a) {
    __shared__ float warp_sums[THREADS / WARP];
    wait_for_earlier_kernels();
    const float* x = a.x + (size_t)blockIdx.x * a.width;
    float* y = a.y + (size_t)blockIdx.x * a.width;
    float sum = 0;
    for (int i = threadIdx.x; i < a.width; i += THREADS) sum += x[i] * x[i];
    sum = warp_sum(sum);
    if (lane_id() == 0) warp_sums[threadIdx.x / WARP] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int i = 0; i < THREADS / WARP; i++) sum += warp_sums[i];
    float factor = 1 / sqrtf(sum / a.width + a.eps);
    for (int i = threadIdx.x; i < a.width; i += THREADS) y[i] = x[i] * factor * a.weight[i];
}
