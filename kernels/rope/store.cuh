// Between the projections and prefill attention, for rows of one sequence: applies norm and RoPE to queries and keys, and stores the new
// keys and values in the cache. Also stores keys and values alone, of a row of each of several sequences.
#pragma once
#include "common/heads.cuh"
#include "common/pages.cuh"
#include "format/f8.cuh"

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
// Minimum blocks of store_rows() per multiprocessor; 0 leaves it to the compiler, which on sm_86 and sm_89 aims at so many that it spills.
constexpr int ROWS_BLOCKS = __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 ? 8 : 0;

// Stores a vector, of which each lane of a warp has some elements, `step` elements apart; and its scale, if such elements have one.
template <int D, typename E>
__device__ __forceinline__ void store_vector(E* to, int step, float* scale_to, const float (&y)[SLOTS<D>]) {
    float scale = vector_scale<E>(y);
    if (HAS_SCALES<E> && lane_id() == 0) *scale_to = scale;
#pragma unroll
    for (int j = 0; j < SLOTS<D>; j++) {
        if (has_slot<D>(j)) to[(lane_id() + WARP * j) * step] = to_element<E>(y[j], scale);
    }
}
template <int N>
__device__ __forceinline__ bool has_unfit(const float (&y)[N]) {
    bool is_unfit = false;
#pragma unroll
    for (int j = 0; j < N; j++) is_unfit |= !fits_f16(y[j]);
    return is_unfit;
}
// scales_of(), or null for elements without scales.
template <int D, typename E>
__device__ __forceinline__ float* scales(const Pages& p, int sequence, int position, int head) {
    return HAS_SCALES<E> ? scales_of(p, D, sequence, position, head) : nullptr;
}

// Grid: (rows, ceil(heads / WARPS)), of queries and of keys that the layer has; a warp takes a head. E: an element of the cache.
template <int D, int ROTARY, typename E = u16>
__device__ __forceinline__ void heads(const Arguments& a) {
    wait_for_earlier_kernels();
    int row = blockIdx.x, head = blockIdx.y * WARPS + threadIdx.x / WARP;
    if (head >= a.heads + (a.row.has_keys ? a.pages.kv_heads : 0)) return;
    int position = a.first_position + row;
    bool is_key = head >= a.heads;
    const float* x = a.qkv + ((size_t)row * a.row.all + head) * D;
    const float* norm = is_key ? a.k_norm : a.q_norm;
    float weight[SLOTS<D>], y[SLOTS<D>];
    load_norm<D>(norm, weight);
    load_head<D>(x, y);
    norm_and_rotate<D>(y, norm != nullptr, weight, a.head, Rotation<D, ROTARY>(a.head, position), is_key ? 1 : a.scale);
    note_unfit(a.pages, row, has_unfit(y));
    if (is_key) {
        store_vector<D>(keys<D, E>(a.pages, 0, position, head - a.heads), 1, scales<D, E>(a.pages, 0, position, head - a.heads), y);
    } else {
        store_vector<D>(a.q + ((size_t)row * a.heads + head) * D, 1, nullptr, y);
    }
}

// Grid: (groups of 8 positions with rows, kv_heads); a thread takes one element of 8 positions.
template <int D, typename E = u16>
__device__ __forceinline__ void store_values(const Arguments& a) {
    constexpr int WHOLE_WARPS = D / WARP;
    __shared__ float factors[8], value_scales[8];
    wait_for_earlier_kernels();
    int d = threadIdx.x, head = blockIdx.y, start = (a.first_position / 8 + blockIdx.x) * 8;
    size_t stride = (size_t)a.row.all * D;
    const float* x = a.qkv + (size_t)(a.row.value + head) * D;
    if (a.row.value_norm || HAS_SCALES<E>) {
        int warp = d / WARP;
        for (int i = warp; warp < WHOLE_WARPS && i < 8; i += WHOLE_WARPS) {
            int row = start + i - a.first_position;
            if (row < 0 || row >= a.rows) continue;
            float y[SLOTS<D>];
            load_head<D>(x + row * stride, y);
            float factor = a.row.value_norm ? norm_factor<D>(y, a.head.eps) : 1;
#pragma unroll
            for (int j = 0; j < SLOTS<D>; j++) y[j] *= factor;
            float scale = vector_scale<E>(y);
            if (lane_id() != 0) continue;
            factors[i] = factor;
            if (!HAS_SCALES<E>) continue;
            value_scales[i] = scale;
            scales<D, E>(a.pages, 0, start + i, head)[a.pages.kv_heads * PAGE] = scale;
        }
        __syncthreads();
    }
    x += d;
    E* to = values<D, E>(a.pages, 0, start, head) + d * PAGE;
    // Neighbouring elements, as words.
    constexpr int OF_WORD = 4 / sizeof(E);
    u32 packed[8 / OF_WORD] = {};
    bool whole = start >= a.first_position && start + 8 <= a.first_position + a.rows;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int row = start + i - a.first_position;
        bool inside = row >= 0 && row < a.rows;
        float value = inside ? x[row * stride] * (a.row.value_norm ? factors[i] : 1) : 0;
        E v = to_element<E>(value, HAS_SCALES<E> && inside ? value_scales[i] : 0);
        note_unfit(a.pages, row, !fits_f16(value));
        if (!whole && inside) to[i] = v;
        packed[i / OF_WORD] |= (u32)v << i % OF_WORD * (8 * sizeof(E));
    }
    if (!whole) return;
    if (HAS_SCALES<E>) {
        *(uint2*)to = make_uint2(packed[0], packed[1]);
    } else {
        *(uint4*)to = make_uint4(packed[0], packed[1], packed[2 % (8 / OF_WORD)], packed[3 % (8 / OF_WORD)]);
    }
}

// Keys and values of single rows. Grid: (rows, ceil(2 kv_heads / WARPS)); a warp takes a key or a value.
template <int D, int ROTARY, typename E = u16>
__device__ __forceinline__ void store_rows(const RowsArguments& a) {
    wait_for_earlier_kernels();
    int row = blockIdx.x, head = blockIdx.y * WARPS + threadIdx.x / WARP, kv_heads = a.pages.kv_heads;
    if (head >= 2 * kv_heads) return;
    int position = max(a.positions[row] - a.before, 0);
    bool is_key = head < kv_heads;
    float y[SLOTS<D>];
    load_head<D>(a.qkv + ((size_t)row * (a.heads + 2 * kv_heads) + a.heads + head) * D, y);
    if (is_key) {
        float weight[SLOTS<D>];
        load_norm<D>(a.k_norm, weight);
        norm_and_rotate<D>(y, a.k_norm != nullptr, weight, a.head, Rotation<D, ROTARY>(a.head, position), 1);
    }
    E* to = is_key ? keys<D, E>(a.pages, row, position, head) : values<D, E>(a.pages, row, position, head - kv_heads);
    // The scales of values follow those of all keys.
    store_vector<D>(to, is_key ? 1 : PAGE, scales<D, E>(a.pages, row, position, head), y);
    note_unfit(a.pages, row, has_unfit(y));
}

#define HEADS_OF(E, D, ROTARY, NAME) \
    extern "C" __global__ void __launch_bounds__(WARPS* WARP) NAME(const __grid_constant__ Arguments a) { heads<D, ROTARY, E>(a); }
#define VALUES_OF(E, D, NAME) \
    extern "C" __global__ void __launch_bounds__(D) NAME(const __grid_constant__ Arguments a) { store_values<D, E>(a); }
#define ROWS_OF(E, D, ROTARY, NAME) \
    extern "C" __global__ void __launch_bounds__(WARPS* WARP, ROWS_BLOCKS) \
    NAME(const __grid_constant__ RowsArguments a) { store_rows<D, ROTARY, E>(a); }
#define HEADS(D, ROTARY, NAME) HEADS_OF(u16, D, ROTARY, NAME)
#define VALUES(D) VALUES_OF(u16, D, rope_store_values_##D)
#define ROWS(D, ROTARY, NAME) ROWS_OF(u16, D, ROTARY, NAME)
