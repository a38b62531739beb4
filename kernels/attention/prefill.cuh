// Prefill attention: rows of one sequence attend causally to its cached keys and values. Row i is at first_position + i and sees the
// positions up to its own. Bound by the tensor cores.
//
// A block takes 128 rows of one query head, 16 to a warp, and walks over the pages; a page's keys and values are copied to shared memory
// while the page before it is processed. Scores stay in registers and become the A operand of the product with the values, with a running
// softmax. 16-byte pieces in shared memory are swizzled by row, so that loads of matrices have no bank conflicts.
//
// The widest heads are taken by half pages, and two warps have the same rows: each computes their scores, and has half of the values'
// elements.
//
// FIXED kernels give each row the bits that a FIXED kernel of attention/decode.cuh gives it as a single token: they add up splits of
// attention/splits.cuh one after the other, and the rounding of each sum is written out in both. Beside the sums of a split they hold those of
// all splits, so that queries stay in shared memory, and more warps have the same rows of wide heads. Two blocks of four warps, each with pages of
// its own, are faster than one of eight where both fit a multiprocessor: they do not wait for each other.
//
// Codes in 8 bits are widened as in decode attention: see attention/decode.cuh.
#pragma once
#include "attention/splits.cuh"
#include "common/pages.cuh"
#include "common/ptx.cuh"
#include "format/f8.cuh"

constexpr int MOST_WARPS = 8;
// Whether a page of such heads is too large for the shared memory of some architectures, and its values for the registers of a warp.
template <int D>
constexpr bool IS_WIDEST = D > 256;
// Warps that take the same rows.
template <int D, bool FIXED = false>
constexpr int SHARERS = FIXED ? ceil_div(D, 128) : IS_WIDEST<D> ? 2 : 1;
// Rows of a block.
template <int D, bool FIXED = false, int WARPS = MOST_WARPS>
constexpr int ROWS = WARPS / SHARERS<D, FIXED> * 16;

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
    int split_pages;        // of FIXED kernels: see FixedSplits
};

// Steps along K, of 16 elements or positions, for which load_matrices() loads two B.
template <typename E>
constexpr int STEPS = HAS_SCALES<E> ? 2 : 1;

// Adds the products of A with the matrices at an address, which have 8 columns for each accumulator.
template <typename E>
__device__ __forceinline__ void multiply(float (&left)[4], float (&right)[4], const u32 (&a)[STEPS<E>][4], u32 matrices) {
    u32 b[4];
    load_matrices(b, matrices);
#pragma unroll
    for (int i = 0; i < STEPS<E>; i++) {
        u32 of_left[2] = {b[0], b[1]}, of_right[2] = {b[2], b[3]};
        if (HAS_SCALES<E>) {
            f8_pairs(b[i], of_left[0], of_left[1]);
            f8_pairs(b[i + 2], of_right[0], of_right[1]);
        }
        mma_f16(left, a[i][0], a[i][1], a[i][2], a[i][3], of_left[0], of_left[1]);
        mma_f16(right, a[i][0], a[i][1], a[i][2], a[i][3], of_right[0], of_right[1]);
    }
}

// A row's attention to some positions: a lane's elements of the weighted sum of values, the largest score, and the sum of weights.
template <int TILES>
struct RowSums {
    float y[TILES][4] = {}, max_score[2] = {-INFINITY, -INFINITY}, weight[2] = {};

    // Adds those of a later split, as PartialResult::add() does, and clears them.
    __device__ __forceinline__ void take(RowSums& split, float factor) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            SplitFactors factors(max_score[r], split.max_score[r]);
            max_score[r] = factors.max_score;
            weight[r] = factors.sum(weight[r], split.weight[r]);
#pragma unroll
            for (int n = 0; n < TILES; n++) {
#pragma unroll
                for (int i = 2 * r; i < 2 * r + 2; i++) y[n][i] = factors.sum(y[n][i], split.y[n][i] * factor);
            }
        }
        split = RowSums();
    }
};

// E: an element of the cache.
template <int D, typename E = u16, bool FIXED = false, int WARPS = MOST_WARPS>
__device__ __forceinline__ void run(const Arguments& a) {
    // A page is taken in parts of so many positions.
    constexpr int PIECE = 16 / sizeof(E), K_STEPS = STEPS<E>;
    constexpr int POSITIONS = IS_WIDEST<D> ? PAGE / 2 : PAGE, KEY_PIECES = D / PIECE, VALUE_PIECES = POSITIONS / PIECE;
    constexpr int TILE_BYTES = POSITIONS * D * sizeof(E), TILE_PIECES = TILE_BYTES / 16, SCALE_BYTES = HAS_SCALES<E> ? POSITIONS * 4 : 0;
    constexpr int SHARE = SHARERS<D, FIXED>, BLOCK_ROWS = ROWS<D, FIXED, WARPS>, OWN_TILES = D / 8 / SHARE;
    // Wide heads leave shared memory for only one page, and no registers for queries.
    constexpr bool WIDE = D > 128;
    constexpr int STAGES = WIDE ? 1 : 2;
    static_assert(!HAS_SCALES<E> || !WIDE, "");
    // Queries in shared memory, whose rows are shifted against each other's banks.
    constexpr bool SHARED_QUERIES = FIXED && !WIDE;
    constexpr int QUERY_PITCH = D + 8;
    extern __shared__ __align__(128) u16 shared[];  // [STAGES]: keys, values, their scales; then queries [BLOCK_ROWS][QUERY_PITCH]
    int lane = lane_id(), warp = threadIdx.x / WARP % (WARPS / SHARE), g = lane / 4, t = lane % 4;
    int first_tile = threadIdx.x / WARP / (WARPS / SHARE) * OWN_TILES;
    // The blocks that see the most positions start first. FIXED blocks begin at multiples of their rows, so that the splits of all rows have
    // one length.
    int first_row = (gridDim.y - 1 - blockIdx.y) * BLOCK_ROWS - (FIXED ? a.first_position % BLOCK_ROWS : 0);
    int head = blockIdx.x, kv_head = head / (a.heads / a.pages.kv_heads);

    // Bytes from the start of a tile to a piece of a row. Rows that are a multiple of 8 apart have a fixed distance.
    constexpr int KEY_ROW = D * sizeof(E), VALUE_ROW = POSITIONS * sizeof(E);
    auto key_at = [&](int row, int piece) { return row * KEY_ROW + swizzled_piece<KEY_PIECES>(row, piece) * 16; };
    auto value_at = [&](int row, int piece) { return row * VALUE_ROW + swizzled_piece<VALUE_PIECES>(row, piece) * 16; };
    u32 base = shared_address(shared);
    auto key_tile = [&](int part) { return base + part % STAGES * (2 * (TILE_BYTES + SCALE_BYTES)); };
    auto value_tile = [&](int part) { return key_tile(part) + TILE_BYTES; };
    auto key_scales = [&](int part) { return key_tile(part) + 2 * TILE_BYTES; };
    auto load = [&](int part) {
        constexpr int AT_ONCE = WARPS * WARP;
        const E* k = keys<D, E>(a.pages, 0, part * POSITIONS, kv_head) + threadIdx.x * PIECE;
        const E* v = values<D, E>(a.pages, 0, part * POSITIONS, kv_head);
        v += IS_WIDEST<D> ? threadIdx.x / VALUE_PIECES * PAGE + threadIdx.x % VALUE_PIECES * PIECE : threadIdx.x * PIECE;
        u32 to = value_tile(part) + value_at(threadIdx.x / VALUE_PIECES, threadIdx.x % VALUE_PIECES);
#pragma unroll
        for (int i = 0; i < TILE_PIECES; i += AT_ONCE) {
            if (TILE_PIECES % AT_ONCE == 0 || i + (int)threadIdx.x < TILE_PIECES) copy_async_16(to + i * 16, v + i / VALUE_PIECES * PAGE, 16);
        }
        // Whether all threads together copy a multiple of 8 rows, or of 16 in their own order, so that each thread's copies are at fixed
        // distances.
        constexpr bool SAME = AT_ONCE % (8 * K_STEPS * KEY_PIECES) == 0;
        auto key_piece = [&](int piece) { return key_at(row_of_position<E>(piece / KEY_PIECES), piece % KEY_PIECES); };
        to = key_tile(part);
        if (SAME) to += key_piece(threadIdx.x);
#pragma unroll
        for (int i = 0; i < TILE_PIECES; i += AT_ONCE) {
            int piece = i + threadIdx.x, at = SAME ? i * 16 : key_piece(piece);
            if (TILE_PIECES % AT_ONCE == 0 || piece < TILE_PIECES) copy_async_16(to + at, k + i * PIECE, 16);
        }
        if (HAS_SCALES<E> && threadIdx.x < 2 * SCALE_BYTES / 16) {
            constexpr int PIECES = SCALE_BYTES / 16;
            int i = threadIdx.x;
            const float* scales = scales_of(a.pages, D, 0, part * POSITIONS, kv_head) + (i < PIECES ? i * 4 : a.pages.kv_heads * PAGE + (i - PIECES) * 4);
            copy_async_16(key_scales(part) + i * 16, scales, 16);
        }
        copy_async_commit();
    };

    wait_for_earlier_kernels();
    int last_row = min(first_row + BLOCK_ROWS, a.rows) - 1;
    int parts = (a.first_position + last_row) / POSITIONS + 1;
    int first_part = a.window > 0 ? max(a.first_position + max(first_row, 0) + 1 - a.window, 0) / POSITIONS : 0;
    int split_parts = FIXED ? FixedSplits(a.split_pages, a.window, 0, (a.first_position + last_row) / PAGE).length * (PAGE / POSITIONS) : 0;
    if (!WIDE) load(first_part);

    int rows[2] = {first_row + warp * 16 + g, first_row + warp * 16 + g + 8};
    const u16* from[2];
    // Along K of a product a lane has two neighbours from NEIGHBOURS * t on, and two that are APART from those.
    constexpr int NEIGHBOURS = HAS_SCALES<E> ? 4 : 2, APART = HAS_SCALES<E> ? 2 : 8;
    constexpr bool HELD_QUERIES = !WIDE && !FIXED;
    u32 queries[HELD_QUERIES ? D / 16 / K_STEPS : 1][K_STEPS][4];
    auto load_query = [&](int k, u32 (&q)[4]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            q[i] = *(const u32*)(from[i] + 16 * k + NEIGHBOURS * t);
            q[i + 2] = *(const u32*)(from[i] + 16 * k + NEIGHBOURS * t + APART);
        }
    };
    // The position in a part of a lane's score i of column tile n.
    auto score_position = [&](int n, int i) { return HAS_SCALES<E> ? n / 2 * 16 + 4 * t + n % 2 * 2 + i % 2 : n * 8 + 2 * t + i % 2; };
    // The scales of the lane's four positions of column tiles n and n + 1.
    auto four_scales = [&](u32 scales, int n, float (&four)[4]) {
        float4 v = as_floats(load_shared_16(scales + score_position(n, 0) * 4));
        four[0] = v.x, four[1] = v.y, four[2] = v.z, four[3] = v.w;
    };
#pragma unroll
    for (int i = 0; i < 2; i++) from[i] = a.q + ((size_t)min(max(rows[i], 0), a.rows - 1) * a.heads + head) * D;
    if (HELD_QUERIES) {
#pragma unroll
        for (int k = 0; k < D / 16; k++) load_query(k, queries[HELD_QUERIES ? k / K_STEPS : 0][k % K_STEPS]);
    }
    // Columns of 16 are in the order in which load_query() takes them.
    u32 shared_queries = base + STAGES * 2 * (TILE_BYTES + SCALE_BYTES);
    if (SHARED_QUERIES) {
        for (int i = threadIdx.x; i < BLOCK_ROWS * (D / 8); i += WARPS * WARP) {
            int row = i / (D / 8), piece = i % (D / 8), from_row = min(max(first_row + row, 0), a.rows - 1);
            uint4 words = *(const uint4*)(a.q + ((size_t)from_row * a.heads + head) * D + piece * 8);
            u32 to = shared_queries + row * QUERY_PITCH * 2;
            if (HAS_SCALES<E>) {
                to += piece / 2 * 32 + piece % 2 * 8;
                store_shared_8(to, make_uint2(words.x, words.z));
                store_shared_8(to + 16, make_uint2(words.y, words.w));
            } else {
                store_shared_16(to + piece * 16, words);
            }
        }
        shared_queries += ((warp * 16 + lane % 16) * QUERY_PITCH + lane / 16 * 8) * 2;
    }
    RowSums<OWN_TILES> sums, all;   // of a split, and of all splits before it; the latter of FIXED kernels alone
    float(&y)[OWN_TILES][4] = sums.y, (&max_score)[2] = sums.max_score, (&weight)[2] = sums.weight;
    // ldmatrix: lanes 8 i to 8 i + 7 address matrix i of four; the first two are the B operand of a product, 16 by 8 columns.
    int matrix_row = lane % 8 + lane / 16 * 8, matrix_half = lane / 8 % 2;
    // Computed once: eight rows further, a matrix is at a fixed distance.
    u32 key_matrices[WIDE ? 1 : D / 16 / K_STEPS], value_matrices[POSITIONS / 16 / K_STEPS];
#pragma unroll
    for (int k = 0; !WIDE && k < D / 16 / K_STEPS; k++) key_matrices[k] = key_at(matrix_row, 2 * k + matrix_half);
#pragma unroll
    for (int k = 0; k < POSITIONS / 16 / K_STEPS; k++) value_matrices[k] = value_at(matrix_row, 2 * k + matrix_half);

    auto attend = [&](int part) {
        float score[POSITIONS / 8][4] = {};
        auto multiply_keys = [&](int n, int k, const u32(&q)[K_STEPS][4]) {
            u32 matrices = WIDE ? key_at(matrix_row, 2 * k + matrix_half) : key_matrices[WIDE ? 0 : k];
            multiply<E>(score[n], score[n + 1], q, key_tile(part) + matrices + n * 8 * KEY_ROW);
        };
        if (WIDE) {
#pragma unroll 2
            for (int k = 0; k < D / 16; k++) {
                u32 q[K_STEPS][4];
                load_query(k, q[0]);
#pragma unroll
                for (int n = 0; n < POSITIONS / 8; n += 2) multiply_keys(n, k, q);
            }
        } else if (SHARED_QUERIES) {
#pragma unroll
            for (int k = 0; k < D / 16 / K_STEPS; k++) {
                u32 q[K_STEPS][4];
#pragma unroll
                for (int i = 0; i < K_STEPS; i++) load_matrices(q[i], shared_queries + (k * K_STEPS + i) * 32);
#pragma unroll
                for (int n = 0; n < POSITIONS / 8; n += 2) multiply_keys(n, k, q);
            }
        } else {
#pragma unroll
            for (int n = 0; n < POSITIONS / 8; n += 2) {
#pragma unroll
                for (int k = 0; k < D / 16 / K_STEPS; k++) multiply_keys(n, k, queries[HELD_QUERIES ? k : 0]);
            }
        }
        if (HAS_SCALES<E>) {
#pragma unroll
            for (int n = 0; n < POSITIONS / 8; n += 2) {
                float scales[4];
                four_scales(key_scales(part), n, scales);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    score[n][i] = __fmul_rn(score[n][i], scales[i % 2]);
                    score[n + 1][i] = __fmul_rn(score[n + 1][i], scales[2 + i % 2]);
                }
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
                    if (part * POSITIONS + score_position(n, i) > a.first_position + rows[i / 2]) score[n][i] = -INFINITY;
                }
            }
        }
        if (a.window > 0 && part * POSITIONS <= a.first_position + first_row + warp * 16 + 15 - a.window) {
#pragma unroll
            for (int n = 0; n < POSITIONS / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if (part * POSITIONS + score_position(n, i) <= a.first_position + rows[i / 2] - a.window) score[n][i] = -INFINITY;
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
        u32 p[POSITIONS / 16 / K_STEPS][K_STEPS][4], weights[POSITIONS / 16][4];
#pragma unroll
        for (int n = 0; n < POSITIONS / 8; n++) {
            float scales[4] = {1, 1, 1, 1};
            if (HAS_SCALES<E>) four_scales(key_scales(part) + SCALE_BYTES, n & ~1, scales);
            float of_low = scales[n % 2 * 2] * PROBABILITY_FACTOR<E>, of_high = scales[n % 2 * 2 + 1] * PROBABILITY_FACTOR<E>;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float low = exp2_approx(score[n][2 * r] - subtracted[r]), high = exp2_approx(score[n][2 * r + 1] - subtracted[r]);
                if (FIXED) {
                    weights[n / 2][n % 2 * 2 + r] = pack_f16(low, high);
                } else {
                    weight[r] += low + high;
                }
                p[n / 2 / K_STEPS][n / 2 % K_STEPS][n % 2 * 2 + r] = pack_f16(low * of_low, high * of_high);
            }
        }
        if (FIXED) {
            float sum[4] = {weight[0], 0, weight[1], 0};
#pragma unroll
            for (int k = 0; k < POSITIONS / 16; k++) mma_f16(sum, weights[k][0], weights[k][1], weights[k][2], weights[k][3], TWO_ONES, TWO_ONES);
            weight[0] = sum[0], weight[1] = sum[2];
        }
        // Most pages of a prompt change no largest score, and a factor of 1 no sum.
        if (!FIXED || __any_sync(ALL_LANES, factor[0] != 1 || factor[1] != 1)) {
#pragma unroll
            for (int n = 0; n < OWN_TILES; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) y[n][i] *= factor[i / 2];
            }
        }
#pragma unroll
        for (int n = 0; n < OWN_TILES; n += 2) {
#pragma unroll
            for (int k = 0; k < POSITIONS / 16 / K_STEPS; k++) {
                multiply<E>(y[n], y[n + 1], p[k], value_tile(part) + value_matrices[k] + (first_tile + n) * 8 * VALUE_ROW);
            }
        }
    };
    for (int part = first_part; part < parts; part++) {
        if (WIDE) {
            __syncthreads();
            load(part);
        }
        copy_async_wait<0>();
        __syncthreads();
        if (!WIDE && part + 1 < parts) load(part + 1);
        // Positions that no row of a warp sees change nothing.
        if (!FIXED || part * POSITIONS <= a.first_position + first_row + warp * 16 + 15) attend(part);
        if (FIXED && ((part + 1) % split_parts == 0 || part + 1 == parts)) all.take(sums, 1 / PROBABILITY_FACTOR<E>);
    }
    float sink = a.sinks ? a.sinks[head] * LOG2E : -INFINITY;
    auto& [result, largest, total] = FIXED ? all : sums;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (!FIXED) {
            total[r] += __shfl_xor_sync(ALL_LANES, total[r], 1);
            total[r] += __shfl_xor_sync(ALL_LANES, total[r], 2);
        }
        if (rows[r] >= a.rows || (FIXED && rows[r] < 0)) continue;
        u16* out = a.out + ((size_t)rows[r] * a.heads + head) * D;
        float factor = (FIXED ? 1 : 1 / PROBABILITY_FACTOR<E>) / (total[r] + exp2_approx(sink - largest[r]));
#pragma unroll
        for (int n = 0; n < OWN_TILES; n++) {
            *(u32*)(out + (first_tile + n) * 8 + 2 * t) = pack_f16(normalized(result[n][2 * r], factor), normalized(result[n][2 * r + 1], factor));
        }
    }
}

#define KERNEL_OF(E, D, FIXED, WARPS, NAME)                                                                           \
    extern "C" __global__ void __launch_bounds__(WARPS* WARP, MOST_WARPS / WARPS) NAME(const __grid_constant__ Arguments a) { \
        run<D, E, FIXED, WARPS>(a);                                                                                   \
    }
#define KERNEL(D) KERNEL_OF(u16, D, false, MOST_WARPS, attention_prefill_##D)
// With all warps, and with half of them.
#define ROWS_WHOLE(E, D, NAME) KERNEL_OF(E, D, true, MOST_WARPS, NAME)
#define ROWS_HALF(E, D, NAME) KERNEL_OF(E, D, true, MOST_WARPS / 2, NAME##_half)
