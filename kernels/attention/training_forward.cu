// Attention forward, for training. See attention/training.cuh.
#include "attention/training.cuh"

constexpr int FORWARD_WARPS = 8, FORWARD_ROWS = 16 * FORWARD_WARPS, FORWARD_THREADS = WARP * FORWARD_WARPS;
static_assert(FORWARD_ROWS == 2 * TILE, "queries come as two tiles");

extern __shared__ __align__(16) u8 shared[];

// A block takes 128 queries of a head, a warp 16 of them. Grid: (ceil(T / 128), heads), the longest first.
template <int D>
__device__ __forceinline__ void forward(const Arguments& a) {
    using Tile = SharedTile<D>;
    wait_for_earlier_kernels();
    int head = blockIdx.y, kv = head / (a.heads / a.kv_heads), warp = threadIdx.x / WARP, g = lane_id() / 4, t = lane_id() % 4;
    int first = (gridDim.x - 1 - blockIdx.x) * FORWARD_ROWS, last = min(first + FORWARD_ROWS, a.rows) - 1;
    size_t stride = (size_t)(a.heads + 2 * a.kv_heads) * D;
    const u16 *q = a.qkv + head * D, *k = a.qkv + (a.heads + kv) * D, *v = k + a.kv_heads * D;
    u32 base = shared_address(shared);
    Tile queries[2] = {{base}, {base + Tile::BYTES}};
    auto keys = [&](int i) { return Tile{base + (2 + i % 2 * 2) * Tile::BYTES}; };
    auto values = [&](int i) { return Tile{base + (3 + i % 2 * 2) * Tile::BYTES}; };

    int begin = first_seen(a, first) / TILE, end = last / TILE + 1, tiles = end - begin;
    auto load = [&](int i) {
        if (i < tiles) {
            keys(i).template load<FORWARD_THREADS>(k, (begin + i) * TILE, a.rows, stride);
            values(i).template load<FORWARD_THREADS>(v, (begin + i) * TILE, a.rows, stride);
        }
        copy_async_commit();
    };
    queries[0].template load<FORWARD_THREADS>(q, first, a.rows, stride);
    queries[1].template load<FORWARD_THREADS>(q, first + TILE, a.rows, stride);
    load(0);

    // Rows g and g + 8 of the warp.
    int row0 = first + 16 * warp, rows[2] = {min(row0 + g, a.rows - 1), min(row0 + g + 8, a.rows - 1)};
    int seen[2] = {first_seen(a, rows[0]), first_seen(a, rows[1])};
    // Bounds for the whole warp, from its first and its last row.
    int warp_first = first_seen(a, min(row0, a.rows - 1)), warp_last_first = first_seen(a, min(row0 + 15, a.rows - 1));
    float sum[D / 8][4] = {}, most[2] = {-INFINITY, -INFINITY}, total[2] = {};
    for (int i = 0; i < tiles; i++) {
        load(i + 1);
        copy_async_wait<1>();
        __syncthreads();
        int key0 = (begin + i) * TILE;
        // Skips tiles that no row of the warp sees.
        if (key0 <= row0 + 15 && key0 + TILE > warp_first) {
            float s[8][4];
            product<D, 4>(s, queries[warp / 4], warp % 4 * 16, keys(i), 0);
            scale_scores(a, s);
            if (key0 < warp_last_first || key0 + TILE - 1 > row0) hide_keys(s, row0, key0, seen);
            float largest[2] = {most[0], most[1]};
#pragma unroll
            for (int n = 0; n < 8; n++) {
#pragma unroll
                for (int j = 0; j < 4; j++) largest[j / 2] = fmaxf(largest[j / 2], s[n][j]);
            }
            float factor[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                largest[h] = fmaxf(largest[h], __shfl_xor_sync(ALL_LANES, largest[h], 1));
                largest[h] = fmaxf(largest[h], __shfl_xor_sync(ALL_LANES, largest[h], 2));
                // A row that has seen nothing yet keeps its zeros.
                float against = largest[h] == -INFINITY ? 0 : largest[h];
                factor[h] = exp2_approx(most[h] - against);
                most[h] = largest[h], largest[h] = against;
                total[h] *= factor[h];
            }
#pragma unroll
            for (int n = 0; n < 8; n++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    s[n][j] = exp2_approx(s[n][j] - largest[j / 2]);
                    total[j / 2] += s[n][j];
                }
            }
#pragma unroll
            for (int n = 0; n < D / 8; n++) sum[n][0] *= factor[0], sum[n][1] *= factor[0], sum[n][2] *= factor[1], sum[n][3] *= factor[1];
            add_product<D, 4>(sum, s, values(i), 0);
        }
        __syncthreads();
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        total[h] += __shfl_xor_sync(ALL_LANES, total[h], 1);
        total[h] += __shfl_xor_sync(ALL_LANES, total[h], 2);
        int row = row0 + g + 8 * h;
        if (t == 0 && row < a.rows) a.lse[(size_t)head * a.rows + row] = most[h] / LOG2E + logf(total[h]);
    }
    store_rows<D>(sum, a.out + head * D, row0, a.rows, (size_t)a.heads * D, 1 / total[0], 1 / total[1]);
}

#define KERNEL(D)                                                                                                                          \
    extern "C" __global__ void __launch_bounds__(FORWARD_THREADS, 1) attention_training_forward_##D(const __grid_constant__ Arguments a) { \
        forward<D>(a);                                                                                                                      \
    }
KERNEL(16)
KERNEL(32)
KERNEL(64)
KERNEL(80)
KERNEL(96)
KERNEL(128)
