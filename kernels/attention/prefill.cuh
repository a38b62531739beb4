// Prefill attention: rows of one sequence attend causally to its cached keys and values. Row i is at first_position + i and sees the
// positions up to its own. Bound by the tensor cores.
//
// A block takes 128 rows of one query head, 16 to a warp, and walks over the pages; a page's keys and values are copied to shared memory
// while the page before it is processed. Scores stay in registers and become the A operand of the product with the values, with a running
// softmax. 16-byte pieces in shared memory are swizzled by row, so that loads of matrices have no bank conflicts.
//
// The widest heads are taken by half pages, and two warps have the same rows: each computes their scores, and has half of the values'
// elements.
#pragma once
#include "common/pages.cuh"
#include "common/ptx.cuh"

constexpr int WARPS = 8;
// Whether a page of such heads is too large for the shared memory of some architectures, and its values for the registers of a warp.
template <int D>
constexpr bool IS_WIDEST = D > 256;
// Warps that take the same rows.
template <int D>
constexpr int SHARERS = IS_WIDEST<D> ? 2 : 1;
// Rows of a block.
template <int D>
constexpr int ROWS = WARPS / SHARERS<D> * 16;

struct Arguments {
    const u16* q;           // f16 [rows, heads, D], scaled by the scores' scale times log2(e)
    const float* sinks;     // [heads]: a logit of each head that has no value; or null
    u16* out;               // f16 [rows, heads, D]
    Pages pages;            // of the one sequence
    int heads;
    int rows;
    int first_position;
    int window;             // positions that a row sees, its own included; 0: all
    float cap;              // of the scores, times log2(e); 0: none
};

template <int D>
__device__ __forceinline__ void run(const Arguments& a) {
    // A page is taken in parts of so many positions.
    constexpr int POSITIONS = IS_WIDEST<D> ? PAGE / 2 : PAGE, KEY_PIECES = D / 8, VALUE_PIECES = POSITIONS / 8, TILE = POSITIONS * D;
    constexpr int OWN_TILES = D / 8 / SHARERS<D>;
    // Wide heads leave shared memory for only one page, and no registers for queries.
    constexpr bool WIDE = D > 128;
    constexpr int STAGES = WIDE ? 1 : 2;
    extern __shared__ __align__(128) u16 shared[];  // [STAGES][keys, values][TILE]
    int lane = lane_id(), warp = threadIdx.x / WARP % (WARPS / SHARERS<D>), g = lane / 4, t = lane % 4;
    int first_tile = threadIdx.x / WARP / (WARPS / SHARERS<D>) * OWN_TILES;
    // The blocks that see the most positions start first.
    int first_row = (gridDim.y - 1 - blockIdx.y) * ROWS<D>;
    int head = blockIdx.x, kv_head = head / (a.heads / a.pages.kv_heads);

    // Bytes from the start of a tile to a piece of a row. Rows that are a multiple of 8 apart have a fixed distance.
    auto key_at = [&](int row, int piece) { return row * (D * 2) + swizzled_piece<KEY_PIECES>(row, piece) * 16; };
    auto value_at = [&](int row, int piece) { return row * (POSITIONS * 2) + swizzled_piece<VALUE_PIECES>(row, piece) * 16; };
    u32 base = shared_address(shared);
    auto key_tile = [&](int part) { return base + part % STAGES * (4 * TILE); };
    auto value_tile = [&](int part) { return key_tile(part) + 2 * TILE; };
    auto load = [&](int part) {
        constexpr int AT_ONCE = WARPS * WARP;
        const u16* k = keys<D>(a.pages, 0, part * POSITIONS, kv_head) + threadIdx.x * 8;
        const u16* v = values<D>(a.pages, 0, part * POSITIONS, kv_head);
        v += IS_WIDEST<D> ? threadIdx.x / VALUE_PIECES * PAGE + threadIdx.x % VALUE_PIECES * 8 : threadIdx.x * 8;
        u32 to = value_tile(part) + value_at(threadIdx.x / VALUE_PIECES, threadIdx.x % VALUE_PIECES);
#pragma unroll
        for (int i = 0; i < TILE / 8; i += AT_ONCE) {
            if (TILE / 8 % AT_ONCE == 0 || i + (int)threadIdx.x < TILE / 8) copy_async_16(to + i * 16, v + i / VALUE_PIECES * PAGE, 16);
        }
        // Whether all threads together copy a multiple of 8 rows, so that each thread's copies are at fixed distances.
        constexpr bool SAME = AT_ONCE % (8 * KEY_PIECES) == 0;
        to = key_tile(part);
        if (SAME) to += key_at(threadIdx.x / KEY_PIECES, threadIdx.x % KEY_PIECES);
#pragma unroll
        for (int i = 0; i < TILE / 8; i += AT_ONCE) {
            int piece = i + threadIdx.x, at = SAME ? i * 16 : key_at(piece / KEY_PIECES, piece % KEY_PIECES);
            if (TILE / 8 % AT_ONCE == 0 || piece < TILE / 8) copy_async_16(to + at, k + i * 8, 16);
        }
        copy_async_commit();
    };

    wait_for_earlier_kernels();
    int last_row = min(first_row + ROWS<D>, a.rows) - 1;
    int parts = (a.first_position + last_row) / POSITIONS + 1;
    int first_part = a.window > 0 ? max(a.first_position + first_row + 1 - a.window, 0) / POSITIONS : 0;
    if (!WIDE) load(first_part);

    int rows[2] = {first_row + warp * 16 + g, first_row + warp * 16 + g + 8};
    const u16* from[2];
    u32 queries[WIDE ? 1 : D / 16][4];
    auto load_query = [&](int k, u32 (&q)[4]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            q[i] = *(const u32*)(from[i] + 16 * k + 2 * t);
            q[i + 2] = *(const u32*)(from[i] + 16 * k + 2 * t + 8);
        }
    };
#pragma unroll
    for (int i = 0; i < 2; i++) from[i] = a.q + ((size_t)min(rows[i], a.rows - 1) * a.heads + head) * D;
    if (!WIDE) {
#pragma unroll
        for (int k = 0; k < D / 16; k++) load_query(k, queries[WIDE ? 0 : k]);
    }
    float y[OWN_TILES][4] = {}, max_score[2] = {-INFINITY, -INFINITY}, weight[2] = {0, 0};
    // ldmatrix: lanes 8 i to 8 i + 7 address matrix i of four; the first two are the B operand of a product, 16 by 8 columns.
    int matrix_row = lane % 8 + lane / 16 * 8, matrix_half = lane / 8 % 2;
    // Computed once: eight rows further, a matrix is at a fixed distance.
    u32 key_matrices[WIDE ? 1 : D / 16], value_matrices[POSITIONS / 16];
#pragma unroll
    for (int k = 0; !WIDE && k < D / 16; k++) key_matrices[k] = key_at(matrix_row, 2 * k + matrix_half);
#pragma unroll
    for (int k = 0; k < POSITIONS / 16; k++) value_matrices[k] = value_at(matrix_row, 2 * k + matrix_half);

    for (int part = first_part; part < parts; part++) {
        if (WIDE) {
            __syncthreads();
            load(part);
        }
        copy_async_wait<0>();
        __syncthreads();
        if (!WIDE && part + 1 < parts) load(part + 1);
        float score[POSITIONS / 8][4] = {};
        auto multiply = [&](int n, int k, const u32(&q)[4]) {
            u32 b[4];
            load_matrices(b, key_tile(part) + (WIDE ? key_at(matrix_row, 2 * k + matrix_half) : key_matrices[WIDE ? 0 : k]) + n * 8 * (D * 2));
            mma_f16(score[n], q[0], q[1], q[2], q[3], b[0], b[1]);
            mma_f16(score[n + 1], q[0], q[1], q[2], q[3], b[2], b[3]);
        };
        if (WIDE) {
#pragma unroll 2
            for (int k = 0; k < D / 16; k++) {
                u32 q[4];
                load_query(k, q);
#pragma unroll
                for (int n = 0; n < POSITIONS / 8; n += 2) multiply(n, k, q);
            }
        } else {
#pragma unroll
            for (int n = 0; n < POSITIONS / 8; n += 2) {
#pragma unroll
                for (int k = 0; k < D / 16; k++) multiply(n, k, queries[WIDE ? 0 : k]);
            }
        }
        if (a.cap > 0) {
#pragma unroll
            for (int n = 0; n < POSITIONS / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) score[n][i] = capped(score[n][i], a.cap);
            }
        }
        if ((part + 1) * POSITIONS > a.first_position + first_row + warp * 16) {
#pragma unroll
            for (int n = 0; n < POSITIONS / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if (part * POSITIONS + n * 8 + 2 * t + i % 2 > a.first_position + rows[i / 2]) score[n][i] = -INFINITY;
                }
            }
        }
        if (a.window > 0 && part * POSITIONS <= a.first_position + first_row + warp * 16 + 15 - a.window) {
#pragma unroll
            for (int n = 0; n < POSITIONS / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if (part * POSITIONS + n * 8 + 2 * t + i % 2 <= a.first_position + rows[i / 2] - a.window) score[n][i] = -INFINITY;
                }
            }
        }
        float factor[2], subtracted[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float best = max_score[r];
#pragma unroll
            for (int n = 0; n < POSITIONS / 8; n++) best = fmaxf(best, fmaxf(score[n][2 * r], score[n][2 * r + 1]));
            best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, 1));
            best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, 2));
            // A row whose window begins after this part has no largest score yet.
            subtracted[r] = best == -INFINITY ? 0 : best;
            factor[r] = exp2_approx(max_score[r] - subtracted[r]);
            max_score[r] = best;
            weight[r] *= factor[r];
        }
        u32 p[POSITIONS / 8][2];
#pragma unroll
        for (int n = 0; n < POSITIONS / 8; n++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float low = exp2_approx(score[n][2 * r] - subtracted[r]), high = exp2_approx(score[n][2 * r + 1] - subtracted[r]);
                weight[r] += low + high;
                p[n][r] = pack_f16(low, high);
            }
        }
#pragma unroll
        for (int n = 0; n < OWN_TILES; n += 2) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                y[n][i] *= factor[i / 2];
                y[n + 1][i] *= factor[i / 2];
            }
#pragma unroll
            for (int k = 0; k < POSITIONS / 16; k++) {
                u32 b[4];
                load_matrices(b, value_tile(part) + value_matrices[k] + (first_tile + n) * 8 * (POSITIONS * 2));
                mma_f16(y[n], p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1], b[0], b[1]);
                mma_f16(y[n + 1], p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1], b[2], b[3]);
            }
        }
    }
    float sink = a.sinks ? a.sinks[head] * LOG2E : -INFINITY;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        weight[r] += __shfl_xor_sync(ALL_LANES, weight[r], 1);
        weight[r] += __shfl_xor_sync(ALL_LANES, weight[r], 2);
        if (rows[r] >= a.rows) continue;
        u16* out = a.out + ((size_t)rows[r] * a.heads + head) * D;
        float factor = 1 / (weight[r] + exp2_approx(sink - max_score[r]));
#pragma unroll
        for (int n = 0; n < OWN_TILES; n++) *(u32*)(out + (first_tile + n) * 8 + 2 * t) = pack_f16(y[n][2 * r] * factor, y[n][2 * r + 1] * factor);
    }
}

#define KERNEL(D)                                                                                                                    \
    extern "C" __global__ void __launch_bounds__(WARPS* WARP, 1) attention_prefill_##D(const __grid_constant__ Arguments a) { run<D>(a); }
