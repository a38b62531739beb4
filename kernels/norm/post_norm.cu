// The end of a half of a block that normalizes what leaves it: x += rms_norm(y) * weight, and, where it is known what comes next, the norm of
// the new x as f16, in rows or in the order of format/ordered.cuh. A block takes a row, which passes through registers once.
#include "common/reduce.cuh"
#include "format/ordered.cuh"
#include "norm/fours.cuh"

struct Arguments {
    const float* y;         // [rows, width]
    const float* weight;    // [width]
    float* x;               // [rows, width]: the residual stream
    const float* next;      // [width]: the norm that follows; or null
    u16* normed;            // f16 [rows, width]
    int width;              // a multiple of 4, and of 16 if ordered
    float eps;
    int ordered;
};

constexpr int THREADS = 512;
constexpr int HELD = 2;     // pieces that a thread keeps, which is all of a row of 8,192

__device__ __forceinline__ float block_sum(float sum, float* sums) {
    sum = warp_sum(sum);
    if (lane_id() == 0) sums[threadIdx.x / WARP] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int i = 0; i < THREADS / WARP; i++) sum += sums[i];
    return sum;
}

__device__ __forceinline__ float4 sum_of(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

extern "C" __global__ void __launch_bounds__(THREADS) post_norm(const __grid_constant__ Arguments a) {
    __shared__ float sums[2][THREADS / WARP];
    int row = blockIdx.x, groups = ceil_div(gridDim.x, GROUP_ROWS);
    int count = a.ordered ? filled(a.width) / 8 : ceil_div(a.width, 2 * BLOCK) * 4;
    const float* y = a.y + (size_t)row * a.width;
    float* x = a.x + (size_t)row * a.width;

    // Weights depend on no earlier kernel.
    Fours w[HELD], after[HELD], v[HELD], r[HELD];
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        int i = threadIdx.x + j * THREADS;
        w[j] = Fours(a.weight, i, a.width);
        if (a.next) after[j] = Fours(a.next, i, a.width);
    }
    wait_for_earlier_kernels();
    let_later_kernels_start();
    float sum = 0;
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        int i = threadIdx.x + j * THREADS;
        v[j] = Fours(y, i, a.width);
        r[j] = Fours(x, i, a.width);
        sum += v[j].squares();
    }
    float factor = rsqrtf(block_sum(sum, sums[0]) / a.width + a.eps);
    sum = 0;
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        int k = first_element(threadIdx.x + j * THREADS);
        r[j].first = sum_of(r[j].first, normalised(v[j].first, factor, w[j].first));
        r[j].second = sum_of(r[j].second, normalised(v[j].second, factor, w[j].second));
        if (k < a.width) *(float4*)(x + k) = r[j].first;
        if (k + BLOCK < a.width) *(float4*)(x + k + BLOCK) = r[j].second;
        sum += r[j].squares();
    }
    if (!a.next) return;
    factor = rsqrtf(block_sum(sum, sums[1]) / a.width + a.eps);
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        int i = threadIdx.x + j * THREADS, k = first_element(i);
        if (i >= count) continue;
        float4 first = normalised(r[j].first, factor, after[j].first), second = normalised(r[j].second, factor, after[j].second);
        if (a.ordered) {
            store_ordered(a.normed, groups, row, k, first, second);
        } else {
            u16* to = a.normed + (size_t)row * a.width + k;
            if (k < a.width) *(uint2*)to = make_uint2(pack_f16(first.x, first.y), pack_f16(first.z, first.w));
            if (k + BLOCK < a.width) *(uint2*)(to + BLOCK) = make_uint2(pack_f16(second.x, second.y), pack_f16(second.z, second.w));
        }
    }
}
