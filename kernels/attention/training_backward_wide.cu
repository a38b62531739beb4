// Attention backward on Hopper, for training. See attention/training_wide.cuh, and attention/training_backward.cu for why there are two
// kernels.
#include "attention/training_wide.cuh"

constexpr int STEP = 64;    // rows of the tiles that a block goes over

extern __shared__ __align__(1024) u8 shared[];

// A block takes 128 keys of a key/value head, a warpgroup 64 of them, over all queries of its group that see them. Grid: (ceil(T / 128),
// kv_heads)
template <int D>
__device__ __forceinline__ void backward_keys(const Arguments& a) {
    using Keys = WideTile<WIDE_ROWS, D>;
    using Queries = WideTile<STEP, D>;
    wait_for_earlier_kernels();
    int kv = blockIdx.y, heads = a.heads / a.kv_heads, group = warpgroup_id(), g = lane_id() / 4, t = lane_id() % 4;
    int first = blockIdx.x * WIDE_ROWS, last = min(first + WIDE_ROWS, a.rows) - 1;
    size_t stride = (size_t)(a.heads + 2 * a.kv_heads) * D, out_stride = (size_t)a.heads * D;
    u32 base = shared_address(shared), stages = base + 2 * Keys::BYTES, numbers = stages + 4 * Queries::BYTES;
    Keys keys{base}, values{base + Keys::BYTES};
    auto queries = [&](int i) { return Queries{stages + i % 2 * 2 * Queries::BYTES}; };
    auto gradients = [&](int i) { return Queries{stages + (i % 2 * 2 + 1) * Queries::BYTES}; };
    keys.load(a.qkv + (a.heads + kv) * D, first, a.rows, stride);
    values.load(a.qkv + (a.heads + a.kv_heads + kv) * D, first, a.rows, stride);

    int begin = first / STEP, of_head = (seen_until(a, last) + STEP - 1) / STEP - begin, tiles = of_head * heads;
    // Log-sum-exp and delta of each query of a tile.
    float* shared_numbers = (float*)(shared + (numbers - base));
    auto load = [&](int i) {
        if (i < tiles) {
            int head = kv * heads + i / of_head, row = (begin + i % of_head) * STEP;
            queries(i).load(a.qkv + head * D, row, a.rows, stride);
            gradients(i).load(a.dout + head * D, row, a.rows, out_stride);
            if (threadIdx.x < 2 * STEP) {
                int own = row + threadIdx.x % STEP;
                const float* from = threadIdx.x < STEP ? a.lse : a.delta;
                copy_async_4(numbers + (i % 2 * 2 * STEP + threadIdx.x) * 4, from + (size_t)head * a.rows + min(own, a.rows - 1), 4);
            }
        }
        copy_async_commit();
    };
    load(0);
    float dk[D / 8][4] = {}, dv[D / 8][4] = {};
    int group0 = first + 64 * group, key0 = group0 + threadIdx.x % WARPGROUP / WARP * 16, until[2];
    for (int h = 0; h < 2; h++) until[h] = seen_until(a, min(key0 + g + 8 * h, a.rows - 1));
    int group_until = seen_until(a, min(group0 + 63, a.rows - 1)), warp_until = seen_until(a, min(key0, a.rows - 1));
    float scale = a.scale * LOG2E;
    for (int i = 0; i < tiles; i++) {
        copy_async_wait<0>();
        publish_shared();
        __syncthreads();
        int from = (begin + i % of_head) * STEP;
        // Tiles that see no key of the warpgroup.
        if (from + STEP <= group0 || from >= group_until) {
            load(i + 1);
            continue;
        }
        // Transposed: rows are keys, columns queries.
        float p[STEP / 8][4], ds[STEP / 8][4];
        wgmma_fence_accumulators(p);
        wgmma_fence_accumulators(ds);
        wgmma_fence();
        begin_product(p, keys, 64 * group, queries(i));
        wgmma_commit();
        begin_product(ds, values, 64 * group, gradients(i));
        wgmma_commit();
        load(i + 1);
        const float *lse = shared_numbers + i % 2 * 2 * STEP, *delta = lse + STEP;
        wgmma_wait<1>();
        wgmma_fence_accumulators(p);
        if (from < key0 + 15 || from + STEP > warp_until) hide_queries(p, key0, from, until);
#pragma unroll
        for (int n = 0; n < STEP / 8; n++) {
            float2 sums = *(const float2*)(lse + 8 * n + 2 * t);
            sums.x *= -LOG2E, sums.y *= -LOG2E;
#pragma unroll
            for (int j = 0; j < 4; j++) p[n][j] = exp2_approx(__fmaf_rn(p[n][j], scale, j % 2 ? sums.y : sums.x));
        }
        wgmma_wait<0>();
        wgmma_fence_accumulators(ds);
#pragma unroll
        for (int n = 0; n < STEP / 8; n++) {
            float2 sums = *(const float2*)(delta + 8 * n + 2 * t);
#pragma unroll
            for (int j = 0; j < 4; j++) ds[n][j] = p[n][j] * (ds[n][j] - (j % 2 ? sums.y : sums.x));
        }
        u32 left[STEP / 16][4], left_gradients[STEP / 16][4];
        pack_left(left, p);
        pack_left(left_gradients, ds);
        wgmma_fence_accumulators(dv);
        wgmma_fence_accumulators(dk);
        wgmma_fence();
        begin_adding<D>(dv, left, gradients(i));
        begin_adding<D>(dk, left_gradients, queries(i));
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_fence_accumulators(dv);
        wgmma_fence_accumulators(dk);
    }
    store_rows<D>(dk, a.dqkv + (a.heads + kv) * D, key0, a.rows, stride, a.scale, a.scale);
    store_rows<D>(dv, a.dqkv + (a.heads + a.kv_heads + kv) * D, key0, a.rows, stride, 1, 1);
}

// A block takes 128 queries of a head, a warpgroup 64 of them. Grid: (ceil(T / 128), heads), the longest first.
template <int D>
__device__ __forceinline__ void backward_queries(const Arguments& a) {
    using Queries = WideTile<WIDE_ROWS, D>;
    using Keys = WideTile<STEP, D>;
    wait_for_earlier_kernels();
    int head = blockIdx.y, kv = head / (a.heads / a.kv_heads), group = warpgroup_id(), g = lane_id() / 4, t = lane_id() % 4;
    int first = (gridDim.x - 1 - blockIdx.x) * WIDE_ROWS, last = min(first + WIDE_ROWS, a.rows) - 1;
    size_t stride = (size_t)(a.heads + 2 * a.kv_heads) * D, out_stride = (size_t)a.heads * D;
    u32 base = shared_address(shared), stages = base + 2 * Queries::BYTES;
    Queries queries{base}, gradients{base + Queries::BYTES};
    auto keys = [&](int i) { return Keys{stages + i % 2 * 2 * Keys::BYTES}; };
    auto values = [&](int i) { return Keys{stages + (i % 2 * 2 + 1) * Keys::BYTES}; };
    queries.load(a.qkv + head * D, first, a.rows, stride);
    gradients.load(a.dout + head * D, first, a.rows, out_stride);
    int begin = first_seen(a, first) / STEP, tiles = last / STEP + 1 - begin;
    auto load = [&](int i) {
        if (i < tiles) {
            keys(i).load(a.qkv + (a.heads + kv) * D, (begin + i) * STEP, a.rows, stride);
            values(i).load(a.qkv + (a.heads + a.kv_heads + kv) * D, (begin + i) * STEP, a.rows, stride);
        }
        copy_async_commit();
    };
    load(0);
    int group0 = first + 64 * group, row0 = group0 + threadIdx.x % WARPGROUP / WARP * 16;
    int seen[2], group_first = first_seen(a, min(group0, a.rows - 1)), all_see = first_seen(a, min(row0 + 15, a.rows - 1));
    float lse[2], delta[2];
    for (int h = 0; h < 2; h++) {
        int row = min(row0 + g + 8 * h, a.rows - 1);
        seen[h] = first_seen(a, row);
        lse[h] = a.lse[(size_t)head * a.rows + row] * LOG2E, delta[h] = a.delta[(size_t)head * a.rows + row];
    }
    float dq[D / 8][4] = {}, scale = a.scale * LOG2E;
    for (int i = 0; i < tiles; i++) {
        copy_async_wait<0>();
        publish_shared();
        __syncthreads();
        load(i + 1);
        int key0 = (begin + i) * STEP;
        // Tiles that no row of the warpgroup sees.
        if (key0 > group0 + 63 || key0 + STEP <= group_first) continue;
        float p[STEP / 8][4], ds[STEP / 8][4];
        wgmma_fence_accumulators(p);
        wgmma_fence_accumulators(ds);
        wgmma_fence();
        begin_product(p, queries, 64 * group, keys(i));
        wgmma_commit();
        begin_product(ds, gradients, 64 * group, values(i));
        wgmma_commit();
        wgmma_wait<1>();
        wgmma_fence_accumulators(p);
        if (key0 < all_see || key0 + STEP - 1 > row0) hide_keys(p, row0, key0, seen);
#pragma unroll
        for (int n = 0; n < STEP / 8; n++) {
#pragma unroll
            for (int j = 0; j < 4; j++) p[n][j] = exp2_approx(__fmaf_rn(p[n][j], scale, -lse[j / 2]));
        }
        wgmma_wait<0>();
        wgmma_fence_accumulators(ds);
#pragma unroll
        for (int n = 0; n < STEP / 8; n++) {
#pragma unroll
            for (int j = 0; j < 4; j++) ds[n][j] = p[n][j] * (ds[n][j] - delta[j / 2]);
        }
        u32 left[STEP / 16][4];
        pack_left(left, ds);
        wgmma_fence_accumulators(dq);
        wgmma_fence();
        begin_adding<D>(dq, left, keys(i));
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_fence_accumulators(dq);
    }
    store_rows<D>(dq, a.dqkv + head * D, row0, a.rows, stride, a.scale, a.scale);
}

#define KERNEL(D)                                                                                                                                \
    extern "C" __global__ void __launch_bounds__(WIDE_THREADS, 1) attention_training_keys_wide_##D(const __grid_constant__ Arguments a) {       \
        backward_keys<D>(a);                                                                                                                     \
    }                                                                                                                                            \
    extern "C" __global__ void __launch_bounds__(WIDE_THREADS, 1) attention_training_queries_wide_##D(const __grid_constant__ Arguments a) {    \
        backward_queries<D>(a);                                                                                                                  \
    }
KERNEL(64)
KERNEL(128)
