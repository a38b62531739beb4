// Attention backward, for training. See attention/training.cuh. One kernel computes the gradients of keys and values, another those of
// queries, each with accumulators in registers and a fixed order: seven products where a single kernel would take five, but no sums through
// memory.
#include "attention/training.cuh"

constexpr int BACKWARD_WARPS = 4, BACKWARD_THREADS = WARP * BACKWARD_WARPS;
static_assert(16 * BACKWARD_WARPS == TILE, "a warp takes 16 rows of a tile");

extern __shared__ __align__(16) u8 shared[];

struct DeltaArguments {
    const u16* out;     // bf16 [T, heads D]
    const u16* dout;
    float* delta;       // [heads, T]
    int rows;
    int heads;
    int dim;
};

// A warp takes a row of a head. Grid: (ceil(T heads / 4))
extern "C" __global__ void __launch_bounds__(BACKWARD_THREADS) attention_training_delta(const __grid_constant__ DeltaArguments a) {
    wait_for_earlier_kernels();
    int i = blockIdx.x * BACKWARD_WARPS + threadIdx.x / WARP;
    if (i >= a.rows * a.heads) return;
    const u32 *x = (const u32*)(a.out + (size_t)i * a.dim), *y = (const u32*)(a.dout + (size_t)i * a.dim);
    float sum = 0;
    for (int j = lane_id(); j < a.dim / 2; j += WARP) {
        u32 p = x[j], q = y[j];
        sum += bf16_to_float((u16)p) * bf16_to_float((u16)q) + bf16_to_float((u16)(p >> 16)) * bf16_to_float((u16)(q >> 16));
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) a.delta[(size_t)(i % a.heads) * a.rows + i / a.heads] = sum;
}

// Rows whose probabilities a warp holds at a time.
constexpr int STEP = 32;

// A block takes 64 keys of a key/value head, a warp 16 of them, over all queries of its group that see them. Grid: (ceil(T / 64), kv_heads)
template <int D>
__device__ __forceinline__ void backward_keys(const Arguments& a) {
    using Tile = SharedTile<D>;
    wait_for_earlier_kernels();
    int kv = blockIdx.y, group = a.heads / a.kv_heads, warp = threadIdx.x / WARP, g = lane_id() / 4, t = lane_id() % 4;
    int first = blockIdx.x * TILE, last = min(first + TILE, a.rows) - 1;
    size_t stride = (size_t)(a.heads + 2 * a.kv_heads) * D, out_stride = (size_t)a.heads * D;
    u32 base = shared_address(shared);
    Tile keys{base}, values{base + Tile::BYTES};
    auto queries = [&](int i) { return Tile{base + (2 + i % 2 * 2) * Tile::BYTES}; };
    auto gradients = [&](int i) { return Tile{base + (3 + i % 2 * 2) * Tile::BYTES}; };
    keys.template load<BACKWARD_THREADS>(a.qkv + (a.heads + kv) * D, first, a.rows, stride);
    values.template load<BACKWARD_THREADS>(a.qkv + (a.heads + a.kv_heads + kv) * D, first, a.rows, stride);

    int begin = first / TILE, end = (seen_until(a, last) + TILE - 1) / TILE, of_head = end - begin, tiles = of_head * group;
    auto load = [&](int i) {
        if (i < tiles) {
            int head = kv * group + i / of_head, row = (begin + i % of_head) * TILE;
            queries(i).template load<BACKWARD_THREADS>(a.qkv + head * D, row, a.rows, stride);
            gradients(i).template load<BACKWARD_THREADS>(a.dout + head * D, row, a.rows, out_stride);
        }
        copy_async_commit();
    };
    load(0);
    float dk[D / 8][4] = {}, dv[D / 8][4] = {};
    // For the warp's keys g and g + 8.
    int key0 = first + 16 * warp, until[2];
    for (int h = 0; h < 2; h++) until[h] = seen_until(a, min(key0 + g + 8 * h, a.rows - 1));
    int warp_until = seen_until(a, min(key0, a.rows - 1));
    for (int i = 0; i < tiles; i++) {
        load(i + 1);
        copy_async_wait<1>();
        __syncthreads();
        int head = kv * group + i / of_head, row0 = (begin + i % of_head) * TILE;
        const float *lse = a.lse + (size_t)head * a.rows, *delta = a.delta + (size_t)head * a.rows;
#pragma unroll 1
        for (int step = 0; step < TILE; step += STEP) {
            int from = row0 + step;
            // Transposed: rows are keys, columns queries.
            float p[STEP / 8][4], ds[STEP / 8][4];
            product<D, STEP / 16>(p, keys, 16 * warp, queries(i), step);
            product<D, STEP / 16>(ds, values, 16 * warp, gradients(i), step);
            float sums[STEP / 8][2];
#pragma unroll
            for (int n = 0; n < STEP / 8; n++) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    int at = min(from + 8 * n + 2 * t + j, a.rows - 1);
                    sums[n][j] = lse[at] * LOG2E;
                    ds[n][j] -= delta[at], ds[n][j + 2] -= delta[at];
                }
            }
            scale_scores(a, p, ds);
            if (from < key0 + 15 || from + STEP > warp_until) hide_queries(p, key0, from, until);
#pragma unroll
            for (int n = 0; n < STEP / 8; n++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    p[n][j] = exp2_approx(p[n][j] - sums[n][j % 2]);
                    ds[n][j] *= p[n][j];
                }
            }
            add_product<D, STEP / 16>(dv, p, gradients(i), step);
            add_product<D, STEP / 16>(dk, ds, queries(i), step);
        }
        __syncthreads();
    }
    store_rows<D>(dk, a.dqkv + (a.heads + kv) * D, key0, a.rows, stride, a.scale, a.scale);
    store_rows<D>(dv, a.dqkv + (a.heads + a.kv_heads + kv) * D, key0, a.rows, stride, 1, 1);
}

// A block takes 64 queries of a head, a warp 16 of them. Grid: (ceil(T / 64), heads), the longest first.
template <int D>
__device__ __forceinline__ void backward_queries(const Arguments& a) {
    using Tile = SharedTile<D>;
    wait_for_earlier_kernels();
    int head = blockIdx.y, kv = head / (a.heads / a.kv_heads), warp = threadIdx.x / WARP, g = lane_id() / 4, t = lane_id() % 4;
    int first = (gridDim.x - 1 - blockIdx.x) * TILE, last = min(first + TILE, a.rows) - 1;
    size_t stride = (size_t)(a.heads + 2 * a.kv_heads) * D, out_stride = (size_t)a.heads * D;
    u32 base = shared_address(shared);
    Tile queries{base}, gradients{base + Tile::BYTES};
    auto keys = [&](int i) { return Tile{base + (2 + i % 2 * 2) * Tile::BYTES}; };
    auto values = [&](int i) { return Tile{base + (3 + i % 2 * 2) * Tile::BYTES}; };
    queries.template load<BACKWARD_THREADS>(a.qkv + head * D, first, a.rows, stride);
    gradients.template load<BACKWARD_THREADS>(a.dout + head * D, first, a.rows, out_stride);
    int begin = first_seen(a, first) / TILE, tiles = last / TILE + 1 - begin;
    auto load = [&](int i) {
        if (i < tiles) {
            keys(i).template load<BACKWARD_THREADS>(a.qkv + (a.heads + kv) * D, (begin + i) * TILE, a.rows, stride);
            values(i).template load<BACKWARD_THREADS>(a.qkv + (a.heads + a.kv_heads + kv) * D, (begin + i) * TILE, a.rows, stride);
        }
        copy_async_commit();
    };
    load(0);
    int row0 = first + 16 * warp;
    int seen[2], all_see = first_seen(a, min(row0 + 15, a.rows - 1));
    float lse[2], delta[2];
    for (int h = 0; h < 2; h++) {
        int row = min(row0 + g + 8 * h, a.rows - 1);
        seen[h] = first_seen(a, row);
        lse[h] = a.lse[(size_t)head * a.rows + row] * LOG2E, delta[h] = a.delta[(size_t)head * a.rows + row];
    }
    float dq[D / 8][4] = {};
    for (int i = 0; i < tiles; i++) {
        load(i + 1);
        copy_async_wait<1>();
        __syncthreads();
#pragma unroll 1
        for (int step = 0; step < TILE; step += STEP) {
            int key0 = (begin + i) * TILE + step;
            float p[STEP / 8][4], ds[STEP / 8][4];
            product<D, STEP / 16>(p, queries, 16 * warp, keys(i), step);
            product<D, STEP / 16>(ds, gradients, 16 * warp, values(i), step);
#pragma unroll
            for (int n = 0; n < STEP / 8; n++) ds[n][0] -= delta[0], ds[n][1] -= delta[0], ds[n][2] -= delta[1], ds[n][3] -= delta[1];
            scale_scores(a, p, ds);
            if (key0 < all_see || key0 + STEP - 1 > row0) hide_keys(p, row0, key0, seen);
#pragma unroll
            for (int n = 0; n < STEP / 8; n++) {
#pragma unroll
                for (int j = 0; j < 4; j++) ds[n][j] *= exp2_approx(p[n][j] - lse[j / 2]);
            }
            add_product<D, STEP / 16>(dq, ds, keys(i), step);
        }
        __syncthreads();
    }
    store_rows<D>(dq, a.dqkv + head * D, row0, a.rows, stride, a.scale, a.scale);
}

#define KERNEL(D)                                                                                                                               \
    extern "C" __global__ void __launch_bounds__(BACKWARD_THREADS, 1) attention_training_keys_##D(const __grid_constant__ Arguments a) {       \
        backward_keys<D>(a);                                                                                                                    \
    }                                                                                                                                           \
    extern "C" __global__ void __launch_bounds__(BACKWARD_THREADS, 1) attention_training_queries_##D(const __grid_constant__ Arguments a) {    \
        backward_queries<D>(a);                                                                                                                 \
    }
KERNEL(16)
KERNEL(32)
KERNEL(64)
KERNEL(80)
KERNEL(96)
KERNEL(128)
