// Rows of a pass by adapter, and their products with A factors: A x of LoRA adapters, for tiles of rows with the same adapter.
#pragma once
#include "adapter/factors.cuh"
#include "common/ptx.cuh"
#include "format/fragment_major.cuh"

constexpr int TILE_ROWS = 16;
constexpr int WARP_K = 4 * BLOCK;   // elements of K that a warp takes at a time

// Rows with the same adapter.
struct RowTile {
    const Factors* factors;     // of all projections of a model; null: the rows have no adapter
    int rows;
    int row[TILE_ROWS];
    int unused;
};

__device__ __forceinline__ Factors factors_of(const RowTile& tile, int projection) {
    Factors f{};
    if (tile.factors) f = tile.factors[projection];
    return f;
}

// A tile in shared memory, where later stores cannot change it. All threads of a block call this before they use the tile.
__device__ __forceinline__ void load_tile(RowTile& to, const RowTile& tile) {
    if (threadIdx.x < sizeof(RowTile) / 4) ((u32*)&to)[threadIdx.x] = ((const u32*)&tile)[threadIdx.x];
    __syncthreads();
}

// Rows x, f16 [rows, k], row-major or fragment-major; k is a multiple of 16.
struct ShrinkInput {
    const u16* x;
    int rows, k;
};

// Elements k to k + 3 of a row of x in the low halves, and those of the next block in the high ones; zeros where there are none.
template <bool FRAGMENTS>
__device__ __forceinline__ uint4 load_x(const ShrinkInput& a, int row, int k, bool has_first, bool has_second) {
    if (row < 0 || !has_first) return make_uint4(0, 0, 0, 0);
    if (FRAGMENTS) {
        // The padding of a row is zeros.
        constexpr int NEXT = FRAGMENT_BYTES / 4;
        const u32* from = (const u32*)(a.x + fragment_index(ceil_div(a.rows, GROUP_ROWS), row, k));
        return make_uint4(from[0], from[NEXT], from[2 * NEXT], from[3 * NEXT]);
    }
    const uint2* from = (const uint2*)(a.x + (size_t)row * a.k + k);
    uint2 p = from[0], q = has_second ? from[BLOCK / 4] : make_uint2(0, 0);
    return make_uint4(__byte_perm(p.x, q.x, 0x5410), __byte_perm(p.x, q.x, 0x7632), __byte_perm(p.y, q.y, 0x5410), __byte_perm(p.y, q.y, 0x7632));
}


// The sums over elements `begin` to `end` of K of the products of a tile's rows with RANK_STEP rows of A from number `rank` on: store(row of
// the tile, number, sum) for each. All WARPS warps of the block call this; each has the loads of STEPS steps in flight. ready() waits until x is
// complete; the first factors are requested before.
//
// Tensor cores multiply in tf32, which holds f16 and bf16: ranks are the rows of A, rows of x the columns of B. A factor in f32 is the sum of
// two numbers in tf32, up to 2^-22 of it. Along K a lane has four neighbours of a block, and those of the next one.
template <int WARPS, int STEPS, bool FRAGMENTS, Type T, class Ready, class Store>
__device__ __forceinline__ void shrink_ranks(const ShrinkInput& input, const RowTile& tile, const Factors& f, int rank, int begin, int end,
                                             float (*sums)[TILE_ROWS][RANK_STEP], Ready ready, Store store) {
    constexpr int COLUMNS = TILE_ROWS / 8, PAIRS = WARP_K / (2 * BLOCK), STEP = WARPS * WARP_K;
    int lane = lane_id(), g = lane / 4, t = lane % 4, warp = threadIdx.x / WARP, k = input.k, rows[COLUMNS];
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) rows[column] = g + 8 * column < tile.rows ? tile.row[g + 8 * column] : -1;
    float c[COLUMNS][4] = {};
    uint4 factors[STEPS][PAIRS][4];
    auto place = [&](int step, int i, int pair) { return step + i * STEP + warp * WARP_K + pair * 2 * BLOCK + 4 * t; };
    auto load = [&](int step) {
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
#pragma unroll
            for (int pair = 0; pair < PAIRS; pair++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int at = place(step, i, pair) + e / 2 * BLOCK;
                    factors[i][pair][e] = at < end ? load_four(f.a, T, (size_t)(rank + g + e % 2 * 8) * k + at) : make_uint4(0, 0, 0, 0);
                }
            }
        }
    };
    load(begin);
    ready();
#pragma unroll 1
    for (int step = begin; step < end;) {
        uint4 x[STEPS][PAIRS][COLUMNS];
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
#pragma unroll
            for (int pair = 0; pair < PAIRS; pair++) {
                int at = place(step, i, pair);
#pragma unroll
                for (int column = 0; column < COLUMNS; column++) x[i][pair][column] = load_x<FRAGMENTS>(input, rows[column], at, at < end, at + BLOCK < end);
            }
        }
#pragma unroll
        for (int i = 0; i < STEPS * PAIRS; i++) {
            float values[4][4];
#pragma unroll
            for (int e = 0; e < 4; e++) unpack<T>(factors[i / PAIRS][i % PAIRS][e], values[e]);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                u32 high[4], low[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    high[j] = T == F32 ? to_tf32(values[j][e]) : __float_as_uint(values[j][e]);
                    low[j] = to_tf32(values[j][e] - __uint_as_float(high[j]));
                }
#pragma unroll
                for (int column = 0; column < COLUMNS; column++) {
                    uint4 v = x[i / PAIRS][i % PAIRS][column];
                    u32 words[4] = {v.x, v.y, v.z, v.w}, first = __float_as_uint(f16_low(words[e])), second = __float_as_uint(f16_high(words[e]));
                    mma_tf32(c[column], high, first, second);
                    if (T == F32) mma_tf32(c[column], low, first, second);
                }
            }
        }
        step += STEPS * STEP;
        if (step < end) load(step);
    }
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) {
#pragma unroll
        for (int e = 0; e < 4; e++) sums[warp][8 * column + 2 * t + e % 2][g + e / 2 * 8] = c[column][e];
    }
    __syncthreads();
    static_assert(WARPS * WARP >= TILE_ROWS * RANK_STEP, "a thread adds up one number of a tile");
    int row = threadIdx.x / RANK_STEP, number = threadIdx.x % RANK_STEP;
    if (row < tile.rows) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) sum += sums[i][row][number];
        store(row, number, sum);
    }
    __syncthreads();
}

// shrink_ranks() for a factor of any type.
template <int WARPS, int STEPS, bool FRAGMENTS, class Ready, class Store>
__device__ __forceinline__ void shrink_tile(const ShrinkInput& input, const RowTile& tile, const Factors& f, int rank, int begin, int end,
                                            float (*sums)[TILE_ROWS][RANK_STEP], Ready ready, Store store) {
    // Factors in f32 take twice as many registers.
    if (f.a_type == F32) shrink_ranks<WARPS, 1, FRAGMENTS, F32>(input, tile, f, rank, begin, end, sums, ready, store);
    if (f.a_type == F16) shrink_ranks<WARPS, STEPS, FRAGMENTS, F16>(input, tile, f, rank, begin, end, sums, ready, store);
    if (f.a_type == BF16) shrink_ranks<WARPS, STEPS, FRAGMENTS, BF16>(input, tile, f, rank, begin, end, sums, ready, store);
}
