// RMSNorm of rows: y = x / sqrt(mean(x^2) + eps) * weight. A block takes a row.
#include "common/ptx.cuh"
#include "common/reduce.cuh"

struct Arguments {
    const float* x;         // [rows, width]
    const float* weight;    // [width]
    u16* y;                 // f16 [rows, width]
    int width;              // a multiple of 4
    float eps;
};

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) rms_norm(const __grid_constant__ Arguments a) {
    __shared__ float sums[THREADS / WARP];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    const float4* x = (const float4*)a.x + (size_t)blockIdx.x * (a.width / 4);
    float sum = 0;
    for (int i = threadIdx.x; i < a.width / 4; i += THREADS) {
        float4 v = x[i];
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) sums[threadIdx.x / WARP] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int i = 0; i < THREADS / WARP; i++) sum += sums[i];
    float factor = rsqrtf(sum / a.width + a.eps);
    uint2* y = (uint2*)a.y + (size_t)blockIdx.x * (a.width / 4);
    for (int i = threadIdx.x; i < a.width / 4; i += THREADS) {
        float4 v = x[i], w = ((const float4*)a.weight)[i];
        y[i] = make_uint2(pack_f16(v.x * factor * w.x, v.y * factor * w.y), pack_f16(v.z * factor * w.z, v.w * factor * w.w));
    }
}
