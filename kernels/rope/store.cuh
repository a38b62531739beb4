// Between the projections and prefill attention, for rows of one sequence: applies norm and RoPE to queries and keys, and stores the new
// keys and values in the cache. Also stores keys and values alone, of a row of each of several sequences.
#pragma once
#include "common/heads.cuh"
#include "common/pages.cuh"

struct Arguments {
    const float* qkv;       // [rows, row.all D]
    const float* q_norm;    // [D] or null
    const float* k_norm;
    u16* q;                 // f16 [rows, heads, D], scaled
    HeadOptions head;
    RowHeads row;
    Pages pages;            // of the one sequence
    int heads;
    int rows;
    int first_position;
    float scale;            // of the scores, times log2(e); applied to queries
};

struct RowsArguments {
    const float* qkv;       // [rows, (heads + 2 kv_heads) D]
    const float* k_norm;    // [D] or null
    const int* positions;   // [rows]
    HeadOptions head;
    Pages pages;            // a row of the block table for each row
    int heads;
    int before;             // positions by which each row lies before its position in `positions`, but not before the first
};

constexpr int WARPS = 4;

// Grid: (rows, ceil(heads / WARPS)), of queries and of keys that the layer has; a warp takes a head.
template <int D, int ROTARY>
__device__ __forceinline__ void heads(const Arguments& a) {
    wait_for_earlier_kernels();
    int row = blockIdx.x, head = blockIdx.y * WARPS + threadIdx.x / WARP, lane = lane_id();
    if (head >= a.heads + (a.row.has_keys ? a.pages.kv_heads : 0)) return;
    int position = a.first_position + row;
    bool is_key = head >= a.heads;
    const float* x = a.qkv + ((size_t)row * a.row.all + head) * D;
    const float* norm = is_key ? a.k_norm : a.q_norm;
    float weight[SLOTS<D>], y[SLOTS<D>];
    load_norm<D>(norm, weight);
    load_head<D>(x, y);
    norm_and_rotate<D>(y, norm != nullptr, weight, a.head.eps, Rotation<D, ROTARY>(a.head, position), is_key ? 1 : a.scale);
    u16* to = is_key ? keys<D>(a.pages, 0, position, head - a.heads) : a.q + ((size_t)row * a.heads + head) * D;
    bool is_unfit = false;
#pragma unroll
    for (int j = 0; j < SLOTS<D>; j++) {
        if (has_slot<D>(j)) to[lane + WARP * j] = to_f16(y[j]);
        is_unfit |= !fits_f16(y[j]);
    }
    note_unfit(a.pages, row, is_unfit);
}

// Grid: (groups of 8 positions with rows, kv_heads); a thread takes one element of 8 positions.
template <int D>
__device__ __forceinline__ void store_values(const Arguments& a) {
    constexpr int WHOLE_WARPS = D / WARP;
    __shared__ float factors[8];
    wait_for_earlier_kernels();
    int d = threadIdx.x, head = blockIdx.y, start = (a.first_position / 8 + blockIdx.x) * 8;
    size_t stride = (size_t)a.row.all * D;
    const float* x = a.qkv + (size_t)(a.row.value + head) * D;
    if (a.row.value_norm) {
        int warp = d / WARP;
        for (int i = warp; warp < WHOLE_WARPS && i < 8; i += WHOLE_WARPS) {
            int row = start + i - a.first_position;
            if (row < 0 || row >= a.rows) continue;
            float y[SLOTS<D>];
            load_head<D>(x + row * stride, y);
            float factor = norm_factor<D>(y, a.head.eps);
            if (lane_id() == 0) factors[i] = factor;
        }
        __syncthreads();
    }
    x += d;
    u16* to = values<D>(a.pages, 0, start, head) + d * PAGE;
    u32 packed[4];
    bool whole = start >= a.first_position && start + 8 <= a.first_position + a.rows;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int row = start + i - a.first_position;
        bool inside = row >= 0 && row < a.rows;
        float value = inside ? x[row * stride] * (a.row.value_norm ? factors[i] : 1) : 0;
        u16 v = to_f16(value);
        note_unfit(a.pages, row, !fits_f16(value));
        if (!whole && inside) to[i] = v;
        packed[i / 2] = i % 2 ? packed[i / 2] | (u32)v << 16 : v;
    }
    if (whole) *(uint4*)to = make_uint4(packed[0], packed[1], packed[2], packed[3]);
}

// Keys and values of single rows. Grid: (rows, ceil(2 kv_heads / WARPS)); a warp takes a key or a value.
template <int D, int ROTARY>
__device__ __forceinline__ void store_rows(const RowsArguments& a) {
    wait_for_earlier_kernels();
    int row = blockIdx.x, head = blockIdx.y * WARPS + threadIdx.x / WARP, kv_heads = a.pages.kv_heads;
    if (head >= 2 * kv_heads) return;
    int position = max(a.positions[row] - a.before, 0);
    bool is_key = head < kv_heads, is_unfit = false;
    float y[SLOTS<D>];
    load_head<D>(a.qkv + ((size_t)row * (a.heads + 2 * kv_heads) + a.heads + head) * D, y);
    if (is_key) {
        float weight[SLOTS<D>];
        load_norm<D>(a.k_norm, weight);
        norm_and_rotate<D>(y, a.k_norm != nullptr, weight, a.head.eps, Rotation<D, ROTARY>(a.head, position), 1);
    }
    u16* to = is_key ? keys<D>(a.pages, row, position, head) : values<D>(a.pages, row, position, head - kv_heads);
    int step = is_key ? 1 : PAGE;
#pragma unroll
    for (int j = 0; j < SLOTS<D>; j++) {
        if (has_slot<D>(j)) to[(lane_id() + WARP * j) * step] = to_f16(y[j]);
        is_unfit |= !fits_f16(y[j]);
    }
    note_unfit(a.pages, row, is_unfit);
}

#define HEADS(D, ROTARY, NAME) \
    extern "C" __global__ void __launch_bounds__(WARPS* WARP) NAME(const __grid_constant__ Arguments a) { heads<D, ROTARY>(a); }
#define VALUES(D) \
    extern "C" __global__ void __launch_bounds__(D) rope_store_values_##D(const __grid_constant__ Arguments a) { store_values<D>(a); }
#define ROWS(D, ROTARY, NAME) \
    extern "C" __global__ void __launch_bounds__(WARPS* WARP) NAME(const __grid_constant__ RowsArguments a) { store_rows<D, ROTARY>(a); }
