// Attention of many rows of one sequence, each with the bits that attention/decode.cuh gives it as a single token: the same products in the
// same order, with the rounding of each sum written out in both. Keys and values of all rows are in the cache.
//
// A block takes TILES tiles of columns, each of up to 8 pairs of a row and a query head that share a key/value head, and one split. A page is
// read once for all of them. The rows of a block are in the same page, so that they have the same last split.
#pragma once
#include "attention/decode.cuh"

struct RowsArguments {
    const u16* q;           // f16 [rows, heads, D], scaled by the scores' scale times log2(e)
    const float* sinks;     // [heads]: a logit of each head that has no value; or null
    u16* out;               // f16 [rows, heads, D]
    float* partial;         // [row blocks, head blocks, TILES, splits, HEADS, D + 2]
    u32* arrived;           // [row blocks, head blocks]: zero before and after
    Pages pages;            // of the one sequence
    int group;              // query heads for each key/value head
    int rows;
    int first_position;
    int window;             // positions that a row sees, its own included; 0: all
    float cap;              // of the scores, times log2(e); 0: none
    int split_pages;        // see FixedSplits
    int has_keys;           // 0: the keys and values are those of another layer, where a row's own are among the others
};

// Tiles of columns of a block: more would not fit the registers.
template <int D>
constexpr int COLUMN_TILES = D <= 128 ? 4 : 2;

// The columns of a block.
struct Columns {
    int heads;              // of the block
    int width;              // columns of a row: the heads, rounded up to a power of two
    int base;               // position of the first column's row, perhaps before the first row
    int first, end;         // positions of all rows

    __device__ __forceinline__ Columns(const RowsArguments& a, int heads, int tiles) : heads(heads), first(a.first_position), end(a.first_position + a.rows) {
        width = heads > 4 ? 8 : heads > 2 ? 4 : heads;
        int rows = tiles * (HEADS / width);
        base = first / rows * rows + blockIdx.y * rows;
    }
    __device__ __forceinline__ int head(int column) const { return column % width; }
    // The position of the row of a column, counted through all tiles.
    __device__ __forceinline__ int position(int column) const { return base + column / width; }
    __device__ __forceinline__ bool has(int column) const {
        int p = position(column);
        return head(column) < heads && p >= first && p < end;
    }
};

// Grid: (head blocks, row blocks, splits).
template <int D, int STAGES, typename E = u16>
__device__ __forceinline__ void attend_rows(const RowsArguments& a) {
    constexpr int NT = COLUMN_TILES<D>, WARPS = PAGE_WARPS, THREADS = WARPS * WARP, PITCH = D + 8;
    constexpr int TILES = D / 16, OWN_TILES = TILES / SHARERS<D>, LINE = PartialResult<D>::LINE, N = SLOTS<D>, LINES = WARPS / SHARERS<D>;
    using Stage = PageStage<D, THREADS, E>;
    constexpr int AT_ONCE = Stage::AT_ONCE;
    extern __shared__ __align__(128) char shared[];
    u16(*q)[PITCH] = (u16(*)[PITCH])shared;  // [NT * HEADS]
    char* ring = shared + (NT * HEADS * PITCH * 2 + 127) / 128 * 128;

    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    int head_blocks = ceil_div(a.group, HEADS), all_heads = a.group * a.pages.kv_heads;
    int kv_head = blockIdx.x / head_blocks, first_head = blockIdx.x % head_blocks * HEADS;
    Columns columns(a, min(HEADS, a.group - first_head), NT);
    first_head += kv_head * a.group;

    int lowest = max(columns.base, columns.first), highest = min(columns.position(NT * HEADS), columns.end) - 1;
    auto first_page_of = [&](int position) { return a.window > 0 ? max(position + 1 - a.window, 0) / PAGE : 0; };
    int first_page = first_page_of(lowest), last_page = highest / PAGE;
    FixedSplits splits(a.split_pages, a.window, first_page, last_page);
    int split = splits.first + blockIdx.z;
    if ((int)blockIdx.z >= splits.count) return;
    int begin = max(first_page, split * splits.length) * PAGE, next = min(last_page + 1, (split + 1) * splits.length) * PAGE;
    // As for a single token, the row's own position is added apart if the layer has its key and value.
    int own_apart = a.has_keys ? 0 : 1, end = min(highest + own_apart, next), stages = ceil_div(max(end - begin, 0), POSITIONS<D>);

    wait_for_earlier_kernels();
    let_later_kernels_start();
    auto stage = [&](int i) { return Stage{shared_address(ring) + i % STAGES * Stage::BYTES}; };
    auto load = [&](int i) {
        if (i < stages) {
            int p = begin + i * POSITIONS<D>;
            const float* scales = HAS_SCALES<E> ? scales_of(a.pages, D, 0, p, kv_head) : nullptr;
            stage(i).fill(keys<D, E>(a.pages, 0, p, kv_head), values<D, E>(a.pages, 0, p, kv_head), scales, a.pages.kv_heads * PAGE);
        }
        copy_async_commit();
    };
#pragma unroll 1
    for (int i = 0; i < STAGES; i++) load(i);
    for (int i = threadIdx.x; i < NT * HEADS * (D / 8); i += THREADS) {
        int column = i / (D / 8), piece = i % (D / 8) * 8;
        const u16* from = a.q + ((size_t)(columns.position(column) - columns.first) * all_heads + first_head + columns.head(column)) * D + piece;
        *(uint4*)&q[column][piece] = columns.has(column) ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
    }

    int low = position_of_row<E>(g), high = low + (HAS_SCALES<E> ? 2 : 8);
    // The address by which a lane takes part in loading the queries of 16 columns: eight lanes have eight columns, and the next eight lanes the
    // next eight elements of these.
    u32 queries = shared_address(&q[lane % 8 + lane / 16 * 8][lane / 8 % 2 * 8]);
    float y[NT][OWN_TILES][4] = {}, max_score[NT][2], weight[NT][2] = {};
    int sees[NT][2];    // the end of the positions that the rows of a lane's columns see
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            max_score[n][h] = -INFINITY;
            sees[n][h] = columns.position(n * HEADS + 2 * t + h) + own_apart;
        }
    }
    int all_see_from = a.window > 0 ? columns.position(NT * HEADS - 1) + 1 - a.window : 0, all_see_to = columns.base + own_apart;
    int first = warp % (PAGE_WARPS / SHARERS<D>) * STEP, first_tile = warp % PAGE_WARPS / (PAGE_WARPS / SHARERS<D>) * OWN_TILES;
    for (int i = 0; i < stages; i++) {
        copy_async_wait<STAGES - 1>();
        __syncthreads();
        int p = begin + i * POSITIONS<D> + first;
        if (p < end) {
            float score[NT][4] = {};
#pragma unroll
            for (int j = 0; j < TILES / AT_ONCE; j++) {
                u32 k[AT_ONCE][4];
                stage(i).keys(first, j, k);
#pragma unroll
                for (int s = 0; s < AT_ONCE; s++) {
                    if constexpr (HAS_SCALES<E>) {
#pragma unroll
                        for (int n = 0; n < NT; n++) {
                            const u16* query = &q[n * HEADS + g][16 * (AT_ONCE * j + s) + 4 * t];
                            mma_f16(score[n], k[s][0], k[s][1], k[s][2], k[s][3], *(const u32*)query, *(const u32*)(query + 2));
                        }
                    } else {
#pragma unroll
                        for (int n = 0; n < NT; n += 2) {
                            // Both halves of 16 elements, of the columns of two tiles.
                            u32 query[4];
                            load_matrices(query, queries + (n * HEADS * PITCH + 16 * (AT_ONCE * j + s)) * 2);
                            mma_f16(score[n], k[s][0], k[s][1], k[s][2], k[s][3], query[0], query[1]);
                            mma_f16(score[n + 1], k[s][0], k[s][1], k[s][2], k[s][3], query[2], query[3]);
                        }
                    }
                }
            }
            bool masks = p < all_see_from || p + STEP > all_see_to;
            float key_scales[2] = {1, 1}, value_scales[2] = {1, 1};
            if (HAS_SCALES<E>) {
                key_scales[0] = stage(i).key_scale(first + low), key_scales[1] = stage(i).key_scale(first + high);
                value_scales[0] = stage(i).value_scale(first + low), value_scales[1] = stage(i).value_scale(first + high);
            }
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    if (HAS_SCALES<E>) score[n][e] = __fmul_rn(score[n][e], key_scales[e / 2]);
                }
            }
            if (a.cap > 0) {
#pragma unroll
                for (int i = 0; i < NT * 4; i++) score[i / 4][i % 4] = capped(score[i / 4][i % 4], a.cap);
            }
            if (masks) {
#pragma unroll
                for (int i = 0; i < NT * 4; i++) {
                    int n = i / 4, e = i % 4, at = p + (e < 2 ? low : high), seen = sees[n][e % 2];
                    if (at >= seen || (a.window > 0 && at < seen - own_apart + 1 - a.window)) score[n][e] = -INFINITY;
                }
            }
            float factor[NT][2];
            u32 probability[NT][2];
            bool grows = false;     // whether a largest score does
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float best = fmaxf(score[n][h], score[n][h + 2]);
#pragma unroll
                    for (int d = 4; d < WARP; d *= 2) best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, d));
                    best = fmaxf(best, max_score[n][h]);
                    // Positions that a row does not see change nothing.
                    float subtracted = best == -INFINITY ? 0 : best;
                    factor[n][h] = exp2_approx(max_score[n][h] - subtracted);
                    grows |= factor[n][h] != 1;
                    max_score[n][h] = best;
                    weight[n][h] = __fmul_rn(weight[n][h], factor[n][h]);
                    score[n][h] = exp2_approx(score[n][h] - subtracted);
                    score[n][h + 2] = exp2_approx(score[n][h + 2] - subtracted);
                    weight[n][h] = __fadd_rn(__fadd_rn(weight[n][h], score[n][h]), score[n][h + 2]);
                }
#pragma unroll
                for (int b = 0; b < 2; b++) {
                    float scale = HAS_SCALES<E> ? value_scales[b] * PROBABILITY_FACTOR<E> : 1;
                    probability[n][b] = transpose_matrix(pack_f16(score[n][2 * b] * scale, score[n][2 * b + 1] * scale));
                }
            }
            // Most pages of a prompt change no largest score, and a factor of 1 no sum.
            if (__any_sync(ALL_LANES, grows)) {
#pragma unroll
                for (int n = 0; n < NT; n++) {
#pragma unroll
                    for (int i = 0; i < OWN_TILES; i++) {
#pragma unroll
                        for (int e = 0; e < 4; e++) y[n][i][e] *= factor[n][e % 2];
                    }
                }
            }
#pragma unroll
            for (int j = 0; j < OWN_TILES / AT_ONCE; j++) {
                u32 v[AT_ONCE][4];
                stage(i).values(first, first_tile / AT_ONCE + j, v);
#pragma unroll
                for (int s = 0; s < AT_ONCE; s++) {
#pragma unroll
                    for (int n = 0; n < NT; n++) {
                        mma_f16(y[n][AT_ONCE * j + s], v[s][0], v[s][1], v[s][2], v[s][3], probability[n][0], probability[n][1]);
                    }
                }
            }
        }
        __syncthreads();
        load(i + STAGES);
    }
    // Partial results take the place of the ring.
    copy_async_wait<0>();
    __syncthreads();

    static_assert((LINES + 1) * HEADS * LINE * 4 <= STAGES * Stage::BYTES, "partial results of a tile take the place of the ring");
    float(*of_warp)[HEADS][LINE] = (float(*)[HEADS][LINE])ring;
    int block = blockIdx.y * gridDim.x + blockIdx.x;
    float* partial = a.partial + (size_t)block * (NT * HEADS * LINE) * gridDim.z;
    auto lines_of = [&](int n) { return partial + (size_t)n * HEADS * LINE * gridDim.z; };
    auto first_split_of = [&](int column) { return first_page_of(columns.position(column)) / splits.length; };
    int end_split = splits.first + splits.count;
    auto store_output = [&](const PartialResult<D>& r, int column) {
        int head = first_head + columns.head(column);
        OutputRow row(a.out, columns.position(column) - columns.first, all_heads * D);
        r.store_output(row, head, a.sinks ? a.sinks[head] * LOG2E : -INFINITY);
    };
#pragma unroll
    for (int n = 0; n < NT; n++) {
        for (int h = warp; h < HEADS; h += WARPS) {
            int column = n * HEADS + h, own = columns.position(column);
            float score = 0, *line = of_warp[LINES][h];
            bool is_here = a.has_keys && columns.has(column) && own / PAGE / splits.length == split;
            if (is_here) {
                const E *key = keys<D, E>(a.pages, 0, own, kv_head), *value = values<D, E>(a.pages, 0, own, kv_head);
                const float* scales = HAS_SCALES<E> ? scales_of(a.pages, D, 0, own, kv_head) : nullptr;
#pragma unroll
                for (int j = 0; j < N; j++) {
                    int i = lane + WARP * j;
                    if (!has_slot<D>(j)) continue;
                    score = fmaf(f16_to_float(q[column][i]), element_to_float(key[i]), score);
                    line[i] = element_to_float(value[i * PAGE]) * (HAS_SCALES<E> ? scales[a.pages.kv_heads * PAGE] : 1);
                }
                score = warp_sum(score) * (HAS_SCALES<E> ? scales[0] : 1);
                if (a.cap > 0) score = capped(score, a.cap);
            } else {
#pragma unroll
                for (int j = 0; j < N; j++) {
                    if (has_slot<D>(j)) line[lane + WARP * j] = 0;
                }
            }
            if (lane == 0) {
                line[D] = is_here ? score : -INFINITY;
                line[D + 1] = 1;
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int d = 4; d < WARP; d *= 2) weight[n][h] += __shfl_xor_sync(ALL_LANES, weight[n][h], d);
            float* line = of_warp[SHARERS<D> == 1 ? warp : first / STEP][2 * t + h];
#pragma unroll
            for (int i = 0; i < OWN_TILES; i++) {
                line[16 * (first_tile + i) + g] = y[n][i][h] * (1 / PROBABILITY_FACTOR<E>);
                line[16 * (first_tile + i) + g + 8] = y[n][i][h + 2] * (1 / PROBABILITY_FACTOR<E>);
            }
            if (g == 0 && first_tile == 0) {
                line[D] = max_score[n][h];
                line[D + 1] = weight[n][h];
            }
        }
        __syncthreads();
        for (int h = warp; h < HEADS; h += WARPS) {
            int column = n * HEADS + h, first_split = first_split_of(column);
            if (!columns.has(column) || split < first_split) continue;
            PartialResult<D> r(of_warp[0][h], LINES + 1, HEADS * LINE);
            if (end_split - first_split == 1) {
                store_output(r, column);
            } else {
                r.store(lines_of(n) + ((split - first_split) * HEADS + h) * LINE);
            }
        }
        __syncthreads();
    }
    if (splits.count == 1) return;
    int& last = *(int*)ring;    // whether the block is the last of these rows to finish
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = (int)atomic_add_release_acquire(a.arrived + block, 1) == splits.count - 1;
        if (last) a.arrived[block] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int column = warp; column < NT * HEADS; column += WARPS) {
        int count = end_split - first_split_of(column);
        if (!columns.has(column) || count == 1) continue;
        store_output(PartialResult<D>::of_splits(lines_of(column / HEADS) + column % HEADS * LINE, count), column);
    }
}

#define ROWS_OF(E, D, STAGES, NAME) \
    extern "C" __global__ void __launch_bounds__(PAGE_WARPS* WARP, 1) NAME(const __grid_constant__ RowsArguments a) { attend_rows<D, STAGES, E>(a); }
