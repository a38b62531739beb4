// Attention forward on Hopper, for training. See attention/training_wide.cuh.
#include "attention/training_wide.cuh"

constexpr int KEYS = 128;

extern __shared__ __align__(1024) u8 shared[];

// A block takes 128 queries of a head, a warpgroup 64 of them. Grid: (ceil(T / 128), heads), the longest first.
template <int D>
__device__ __forceinline__ void forward(const Arguments& a) {
    using Queries = WideTile<WIDE_ROWS, D>;
    using Keys = WideTile<KEYS, D>;
    wait_for_earlier_kernels();
    int head = blockIdx.y, kv = head / (a.heads / a.kv_heads), group = warpgroup_id(), g = lane_id() / 4, t = lane_id() % 4;
    int first = (gridDim.x - 1 - blockIdx.x) * WIDE_ROWS, last = min(first + WIDE_ROWS, a.rows) - 1;
    size_t stride = (size_t)(a.heads + 2 * a.kv_heads) * D;
    const u16 *q = a.qkv + head * D, *k = a.qkv + (a.heads + kv) * D, *v = k + a.kv_heads * D;
    u32 base = shared_address(shared);
    Queries queries{base};
    auto keys = [&](int i) { return Keys{base + Queries::BYTES + i % 2 * 2 * Keys::BYTES}; };
    auto values = [&](int i) { return Keys{base + Queries::BYTES + (i % 2 * 2 + 1) * Keys::BYTES}; };

    queries.load(q, first, a.rows, stride);
    int begin = first_seen(a, first) / KEYS, tiles = last / KEYS + 1 - begin;
    auto load = [&](int i) {
        if (i < tiles) {
            keys(i).load(k, (begin + i) * KEYS, a.rows, stride);
            values(i).load(v, (begin + i) * KEYS, a.rows, stride);
        }
        copy_async_commit();
    };
    load(0);

    // Rows of the warpgroup, of the warp, and of the thread: the warp's rows g and g + 8.
    int group0 = first + 64 * group, row0 = group0 + threadIdx.x % WARPGROUP / WARP * 16;
    int seen[2], group_first = first_seen(a, min(group0, a.rows - 1)), all_see = first_seen(a, min(row0 + 15, a.rows - 1));
    for (int h = 0; h < 2; h++) seen[h] = first_seen(a, min(row0 + g + 8 * h, a.rows - 1));
    float sum[D / 8][4] = {}, most[2] = {-INFINITY, -INFINITY}, total[2] = {};
    float scale = a.scale * LOG2E;
    for (int i = 0; i < tiles; i++) {
        copy_async_wait<0>();
        publish_shared();
        __syncthreads();
        load(i + 1);
        int key0 = (begin + i) * KEYS;
        // Skips tiles that no row of the warpgroup sees.
        if (key0 > group0 + 63 || key0 + KEYS <= group_first) continue;
        float s[KEYS / 8][4];
        wgmma_fence_accumulators(s);
        wgmma_fence();
        begin_product(s, queries, 64 * group, keys(i));
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_fence_accumulators(s);
        float largest[2] = {most[0], most[1]};
        if (key0 < all_see || key0 + KEYS - 1 > row0) hide_keys(s, row0, key0, seen);
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (int j = 0; j < 4; j++) largest[j / 2] = fmaxf(largest[j / 2], s[n][j]);
        }
        float factor[2], against[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            largest[h] = fmaxf(largest[h], __shfl_xor_sync(ALL_LANES, largest[h], 1));
            largest[h] = fmaxf(largest[h], __shfl_xor_sync(ALL_LANES, largest[h], 2));
            // A row that has seen nothing yet keeps its zeros.
            against[h] = largest[h] == -INFINITY ? 0 : largest[h] * scale;
            factor[h] = exp2_approx(most[h] * scale - against[h]);
            most[h] = largest[h];
            total[h] *= factor[h];
        }
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                s[n][j] = exp2_approx(__fmaf_rn(s[n][j], scale, -against[j / 2]));
                total[j / 2] += s[n][j];
            }
        }
        u32 p[KEYS / 16][4];
        pack_left(p, s);
#pragma unroll
        for (int n = 0; n < D / 8; n++) sum[n][0] *= factor[0], sum[n][1] *= factor[0], sum[n][2] *= factor[1], sum[n][3] *= factor[1];
        wgmma_fence_accumulators(sum);
        wgmma_fence();
        begin_adding<D>(sum, p, values(i));
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_fence_accumulators(sum);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        total[h] += __shfl_xor_sync(ALL_LANES, total[h], 1);
        total[h] += __shfl_xor_sync(ALL_LANES, total[h], 2);
        int row = row0 + g + 8 * h;
        if (t == 0 && row < a.rows) a.lse[(size_t)head * a.rows + row] = most[h] * a.scale + logf(total[h]);
    }
    store_rows<D>(sum, a.out + head * D, row0, a.rows, (size_t)a.heads * D, 1 / total[0], 1 / total[1]);
}

#define KERNEL(D)                                                                                                                            \
    extern "C" __global__ void __launch_bounds__(WIDE_THREADS, 1) attention_training_forward_wide_##D(const __grid_constant__ Arguments a) { \
        forward<D>(a);                                                                                                                        \
    }
KERNEL(64)
KERNEL(128)
