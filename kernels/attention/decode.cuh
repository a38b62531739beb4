// Decode attention: one new token of each sequence of a batch attends to the sequence's cached keys and values. The same kernel applies
// norm and RoPE to the token's queries and key, and stores its key and value in the cache. Bound by reading the cache.
//
// A block takes up to 8 query heads that share a key/value head, and one of several splits of the sequence (split-KV), one or two pages at
// a time, of which each warp takes 16 positions. Scores are computed transposed (keys as A, the heads as B), so that 8 heads fill the
// instruction. The widest heads are taken by half pages: two warps have the same positions, and each has half of the values' elements.
//
// Pages pass through a ring in shared memory, which is filled before the kernel waits for its predecessor: the new token is handled
// separately, and nothing else in the cache depends on that kernel. Where rows are consecutive tokens of one sequence, they depend on each
// other: an earlier kernel stores their keys and values, for which the ring then waits. The last block of a sequence to finish combines the splits in a fixed
// order. Alternatively the splits are a cluster, whose blocks send each other their partial results, and each block combines some of the
// heads.
//
// The number of splits is that of the grid. In FIXED kernels it follows from the positions that a row sees (attention/splits.cuh), so that a
// row's bits depend on no other row, and sums go over the positions in order, as attention/prefill.cuh has them for many rows: the warps
// agree on the largest scores of a page, exchange its probabilities, and multiply all of them with some elements of the values each. Weights are
// added up by a product with ones. The new token takes its place in the ring. The rounding of each sum is written out in both.
//
// Codes in 8 bits are widened to f16, which is exact. The scales of keys apply to scores, and those of values to probabilities. A word of
// load_matrices() has four neighbouring codes of a row, of which the matrix instruction takes the first two in the place of neighbours 2t
// and the others in that of neighbours 2t + 8: along K both operands have this order.
#pragma once
#include "attention/splits.cuh"
#include "common/cluster.cuh"
#include "common/heads.cuh"
#include "common/pages.cuh"
#include "format/f8.cuh"
#include "format/fragment_major.cuh"

constexpr int HEADS = 8;        // the N of the matrix instruction
constexpr int STEP = 16;        // positions of a warp at a time
constexpr int PAGE_WARPS = PAGE / STEP;
// Whether a page of such heads is too large for the shared memory of some architectures, and its values for the registers of a warp.
template <int D>
constexpr bool IS_WIDEST = D > 256;
// Positions of a stage of the ring.
template <int D>
constexpr int POSITIONS = IS_WIDEST<D> ? PAGE / 2 : PAGE;
// Warps that take the same positions.
template <int D>
constexpr int SHARERS = PAGE / POSITIONS<D>;

struct Arguments {
    const float* qkv;           // [sequences, (heads + 2 kv_heads) D]; for LIMITED kernels [sequences, row.all D]
    const float* q_norm;        // [D] or null
    const float* k_norm;
    const float* sinks;         // [heads]: a logit of each head that has no value; or null. LIMITED kernels alone take them
    const int* positions;       // [sequences]: of the new token
    u16* out;                   // f16 [sequences, heads D], or the same, fragment-major
    float* partial;             // the split-KV workspace: [sequences, head blocks, splits, HEADS, D + 2]
    u32* arrived;               // [sequences, head blocks]: zero before and after
    HeadOptions head;
    RowHeads row;               // for LIMITED kernels
    Pages pages;
    int group;                  // query heads for each key/value head
    float scale;                // of the scores, times log2(e)
    float cap;                  // of the scores, times log2(e); 0: none
    int window;                 // positions that a token sees, its own included; 0: all
    int fragment_major;
    int stored;                 // whether an earlier kernel has stored all keys and values: rows may be consecutive tokens of one sequence
    int split_pages;            // of FIXED kernels: see FixedSplits
};

// The output of a sequence.
struct OutputRow {
    u16* out;
    int sequence, width, groups;  // groups of 8 sequences; 0 if row-major

    // A row of row-major outputs.
    __device__ __forceinline__ OutputRow(u16* out, int sequence, int width) : out(out), sequence(sequence), width(width), groups(0) {}
    __device__ __forceinline__ OutputRow(const Arguments& a, int sequence, int width)
        : out(a.out), sequence(sequence), width(width), groups(a.fragment_major ? ceil_div(gridDim.y, GROUP_ROWS) : 0) {}
    __device__ __forceinline__ u16& at(int k) const {
        return out[groups > 0 ? fragment_index(groups, sequence, k) : (size_t)sequence * width + k];
    }
};

// The keys [POSITIONS][D] and transposed values [D][POSITIONS] of a page of a head, or of a half of one, in shared memory, and then their
// scales. 16-byte pieces are swizzled by row, so that the same pieces of 8 neighbouring rows have no bank conflicts.
template <int D, int THREADS, typename E>
struct PageStage {
    static constexpr int PIECE = 16 / sizeof(E), KEY_PIECES = D / PIECE, VALUE_PIECES = POSITIONS<D> / PIECE;
    static constexpr int KEY_BYTES = POSITIONS<D> * D * sizeof(E), SCALE_BYTES = HAS_SCALES<E> ? POSITIONS<D> * 4 : 0;
    static constexpr int BYTES = 2 * (KEY_BYTES + SCALE_BYTES);
    // Whether the pieces that a thread requests have the same swizzle: rows have one again after 8 of them, positions after 16 of codes.
    static constexpr bool HAS_PERIOD = !IS_WIDEST<D> && THREADS % ((HAS_SCALES<E> ? 16 : 8) * KEY_PIECES) == 0 && THREADS % (8 * VALUE_PIECES) == 0 &&
                                       POSITIONS<D> * KEY_PIECES % THREADS == 0;
    // Tiles of 16 elements that are loaded at once.
    static constexpr int AT_ONCE = HAS_SCALES<E> ? 2 : 1;
    u32 base;

    template <int PIECES>
    static __device__ __forceinline__ int place(int row, int piece) {
        return (row * PIECES + swizzled_piece<PIECES>(row, piece)) * 16;
    }
    // Offsets of an element of the key and of the value of a position of the stage.
    static __device__ __forceinline__ int key_offset(int position, int i) {
        return place<KEY_PIECES>(row_of_position<E>(position), i / PIECE) + i % PIECE * (int)sizeof(E);
    }
    static __device__ __forceinline__ int value_offset(int position, int i) {
        return KEY_BYTES + place<VALUE_PIECES>(i, position / PIECE) + position % PIECE * (int)sizeof(E);
    }
    // Requests the positions from these on; all threads call this. The scales of values are `apart` floats after those of keys.
    __device__ __forceinline__ void fill(const E* keys, const E* values, const float* scales, int apart) const {
        auto key = [](int i) { return place<KEY_PIECES>(row_of_position<E>(i / KEY_PIECES), i % KEY_PIECES); };
        auto value = [](int i) { return KEY_BYTES + place<VALUE_PIECES>(i / VALUE_PIECES, i % VALUE_PIECES); };
        if constexpr (HAS_PERIOD) {
            u32 key_to = base + key(threadIdx.x), value_to = base + value(threadIdx.x);
#pragma unroll 4
            for (int i = 0; i < POSITIONS<D> * KEY_PIECES; i += THREADS) {
                copy_async_16(key_to + i * 16, keys + (threadIdx.x + i) * PIECE, 16);
                copy_async_16(value_to + i * 16, values + (threadIdx.x + i) * PIECE, 16);
            }
        } else {
#pragma unroll 4
            for (int i = threadIdx.x; i < POSITIONS<D> * KEY_PIECES; i += THREADS) {
                copy_async_16(base + key(i), keys + i * PIECE, 16);
                copy_async_16(base + value(i), values + (IS_WIDEST<D> ? i / VALUE_PIECES * PAGE + i % VALUE_PIECES * PIECE : i * PIECE), 16);
            }
        }
        constexpr int PIECES = SCALE_BYTES / 16;
        int i = threadIdx.x;
        if (HAS_SCALES<E> && i < 2 * PIECES) copy_async_16(base + 2 * KEY_BYTES + i * 16, scales + (i < PIECES ? i * 4 : apart + (i - PIECES) * 4), 16);
    }
    // Tiles from the words of load_matrices(), as A.
    static __device__ __forceinline__ void widen(const u32 (&words)[4], u32 (&a)[AT_ONCE][4]) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if (HAS_SCALES<E>) {
                    f8_pairs(words[2 * i + e], a[i][e], a[i][e + 2]);
                } else {
                    a[i][e] = words[e], a[i][e + 2] = words[e + 2];
                }
            }
        }
    }
    // Keys: tiles of elements from AT_ONCE * j on, of 16 positions from `first` on, as A.
    __device__ __forceinline__ void keys(int first, int j, u32 (&a)[AT_ONCE][4]) const {
        int lane = lane_id();
        u32 words[4];
        load_matrices(words, base + place<KEY_PIECES>(first + lane % 16, 2 * j + lane / 16));
        widen(words, a);
    }
    // As keys(), for transposed values.
    __device__ __forceinline__ void values(int first, int j, u32 (&a)[AT_ONCE][4]) const {
        int lane = lane_id();
        int row = HAS_SCALES<E> ? lane : lane % 16, piece = HAS_SCALES<E> ? 0 : lane / 16;
        u32 words[4];
        load_matrices(words, base + KEY_BYTES + place<VALUE_PIECES>(16 * AT_ONCE * j + row, first / PIECE + piece));
        widen(words, a);
    }
    // The offset of the scale of the key of a position of the stage, and that of the scale of its value.
    static __device__ __forceinline__ int key_scale_offset(int position) { return 2 * KEY_BYTES + position * 4; }
    static __device__ __forceinline__ int value_scale_offset(int position) { return key_scale_offset(position) + SCALE_BYTES; }
    // These scales.
    __device__ __forceinline__ float key_scale(int position) const { return load_shared_float(base + key_scale_offset(position)); }
    __device__ __forceinline__ float value_scale(int position) const { return load_shared_float(base + value_scale_offset(position)); }
};

// The new token in shared memory, and two words by which a block coordinates with others.
template <int D, typename E>
struct __align__(128) NewToken {
    u16 q[HEADS][D];
    E key[D], value[D];
    float scales[2];  // of key and value
    u64 exchange;   // barrier for the partial results that other blocks of the cluster send
    int last;       // whether the block is the last of its sequence to finish
};

// The scores of a page that the warps of a FIXED kernel exchange, each of 16 positions: the largest, and the probabilities as B of the product
// with the values. In 8 bits the scales of values are in the second of two forms.
template <typename E>
struct PageExchange {
    float largest[PAGE_WARPS][HEADS];
    uint2 probabilities[HAS_SCALES<E> ? 2 : 1][PAGE_WARPS][WARP];
};

// The attention of a head to some positions: a lane's elements of the weighted sum of values, the largest score, and the sum of weights. In
// memory it is a line of D elements, the score and the sum of weights.
template <int D>
struct PartialResult {
    static constexpr int LINE = D + 2;
    static constexpr int N = SLOTS<D>;
    float y[N] = {}, max_score = -INFINITY, weight = 0;

    PartialResult() = default;
    // Combines the lines of warps or splits in order.
    __device__ __forceinline__ PartialResult(const float* lines, int count, int stride) {
#pragma unroll
        for (int i = 0; i < count; i++) max_score = fmaxf(max_score, lines[i * stride + D]);
#pragma unroll
        for (int i = 0; i < count; i++) {
            // The largest score of no positions is minus infinity.
            float score = lines[i * stride + D], factor = score == -INFINITY ? 0 : exp2_approx(score - max_score);
            weight = fmaf(lines[i * stride + D + 1], factor, weight);
#pragma unroll
            for (int j = 0; j < N; j++) y[j] = has_slot<D>(j) ? fmaf(lines[i * stride + lane_id() + WARP * j], factor, y[j]) : 0;
        }
    }
    // Combines the splits of a head in global memory, at most as many as lanes. Each lane loads the score of one split, and the elements of
    // BATCH splits are in flight before the first is used. IN_ORDER: adds one split after the other to those before it.
    template <bool IN_ORDER>
    static __device__ __forceinline__ PartialResult of_splits(const float* lines, int splits) {
        constexpr int STRIDE = HEADS * LINE, BATCH = IS_WIDEST<D> ? 4 : 8;
        PartialResult r;
        bool has_split = lane_id() < splits;
        const float* own = lines + lane_id() * STRIDE + D;
        float score = has_split ? own[0] : -INFINITY, weight = has_split ? own[1] : 0;
        float factor = 0;
        if (!IN_ORDER) {
            r.max_score = warp_max(score);
            factor = score == -INFINITY ? 0 : exp2_approx(score - r.max_score);
            r.weight = warp_sum(__fmul_rn(weight, factor));
        }
#pragma unroll 1
        for (int first = 0; first < splits; first += BATCH) {
            float y[BATCH][N];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
#pragma unroll
                for (int j = 0; j < N; j++) y[i][j] = first + i < splits && has_slot<D>(j) ? lines[(first + i) * STRIDE + lane_id() + WARP * j] : 0;
            }
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                if (IN_ORDER) {
                    // Beyond the last split there are no scores and no weights.
                    r.add(y[i], __shfl_sync(ALL_LANES, score, first + i), __shfl_sync(ALL_LANES, weight, first + i));
                    continue;
                }
                float f = __shfl_sync(ALL_LANES, factor, first + i);
#pragma unroll
                for (int j = 0; j < N; j++) r.y[j] = fmaf(y[i][j], f, r.y[j]);
            }
        }
        return r;
    }
    // Adds a later split of these elements, largest score and weight.
    __device__ __forceinline__ void add(const float (&later)[N], float later_max, float later_weight) {
        SplitFactors factors(max_score, later_max);
        max_score = factors.max_score;
        weight = factors.sum(weight, later_weight);
#pragma unroll
        for (int j = 0; j < N; j++) y[j] = factors.sum(y[j], later[j]);
    }
    __device__ __forceinline__ void store(float* line) const {
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (has_slot<D>(j)) line[lane_id() + WARP * j] = y[j];
        }
        if (lane_id() == 0) {
            line[D] = max_score;
            line[D + 1] = weight;
        }
    }
#if __CUDA_ARCH__ >= 900
    // Stores to the line at this address of another block of the cluster.
    __device__ __forceinline__ void send(u32 line, int block, u32 barrier) const {
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (has_slot<D>(j)) send_to_cluster(line + (lane_id() + WARP * j) * 4, block, y[j], barrier);
        }
        if (lane_id() == 0) {
            send_to_cluster(line + D * 4, block, max_score, barrier);
            send_to_cluster(line + (D + 1) * 4, block, weight, barrier);
        }
    }
#endif
    // `sink` is a score without a value, minus infinity for none.
    __device__ __forceinline__ void store_output(const OutputRow& row, int head, float sink) const {
        float factor = 1 / (weight + exp2_approx(sink - max_score));
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (has_slot<D>(j)) row.at(head * D + lane_id() + WARP * j) = to_f16(normalized(y[j], factor));
        }
    }
};

// The ring has STAGES pages, or half pages, SPAN of which are processed at a time. CLUSTER: the splits of a sequence are the blocks of a
// cluster. LIMITED: there may be a window, a soft cap or sinks, and rows of projections may lack keys or values. ROTARY: see Rotation. E: an
// element of the cache. FIXED: see above.
template <int D, bool LIMITED, int ROTARY, int STAGES, int SPAN, bool CLUSTER, typename E = u16, bool FIXED = false>
__device__ __forceinline__ void run(const Arguments& a) {
    static_assert(STAGES % SPAN == 0, "");
    constexpr int WARPS = SPAN * PAGE_WARPS, THREADS = WARPS * WARP;
    static_assert((SHARERS<D> == 1 && !FIXED) || (SPAN == 1 && !CLUSTER), "");
    using Stage = PageStage<D, THREADS, E>;
    constexpr int AT_ONCE = Stage::AT_ONCE;
    constexpr int TILES = D / 16, OWN_TILES = FIXED ? ceil_div(TILES / AT_ONCE, WARPS) * AT_ONCE : TILES / SHARERS<D>;
    constexpr int LINE = PartialResult<D>::LINE, N = SLOTS<D>;
    // Warps with positions of their own, and lines of partial results: of these and of the new token, or of all.
    constexpr int POSITION_WARPS = WARPS / SHARERS<D>, LINES = FIXED ? 1 : POSITION_WARPS + 1;
    static_assert(!HAS_SCALES<E> || !IS_WIDEST<D>, "");
    extern __shared__ __align__(128) char shared[];
    auto& [q, new_key, new_value, new_scales, exchange, last] = *(NewToken<D, E>*)shared;
    char* ring = shared + sizeof(NewToken<D, E>);

    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    int head_blocks = ceil_div(a.group, HEADS);
    int kv_head = blockIdx.x / head_blocks, first_head = blockIdx.x % head_blocks * HEADS;
    int heads = min(HEADS, a.group - first_head), all_heads = a.group * a.pages.kv_heads;
    int sequence = blockIdx.y, split = blockIdx.z;
    first_head += kv_head * a.group;

    // Positions change only between steps; pages, norms and earlier keys and values not even then. All of them may be read before the wait,
    // since all kernels before the predecessor have completed.
    int position = a.positions[sequence];
    // Splits are as equal as possible: blocks of the next kernels would crowd on multiprocessors that finish early.
    int start = LIMITED && a.window > 0 ? max(position + 1 - a.window, 0) : 0, first_page = start / PAGE, all = position / PAGE + 1 - first_page;
    int splits = gridDim.z;
    int begin = (first_page + all * split / splits) * PAGE, next = (first_page + all * (split + 1) / splits) * PAGE;
    if (FIXED) {
        FixedSplits fixed(a.split_pages, LIMITED ? a.window : 0, first_page, position / PAGE);
        splits = fixed.count;
        if (split >= splits) return;
        int own = (fixed.first + split) * fixed.length;
        begin = max(first_page, own) * PAGE, next = min(position / PAGE + 1, own + fixed.length) * PAGE;
    }
    // If an earlier layer has stored the new token, it is one of the cached positions.
    bool has_keys = !LIMITED || a.row.has_keys;
    int end = min(has_keys && !FIXED ? position : position + 1, next);
    int stages = LIMITED && start >= end ? 0 : ceil_div(max(end - begin, 0), POSITIONS<D>);
    bool has_new = has_keys && position >= begin && position < next;

    auto stage = [&](int i) { return Stage{shared_address(ring) + i % STAGES * Stage::BYTES}; };
    auto load = [&](int i) {
        if (i < stages) {
            int p = begin + i * POSITIONS<D>;
            const float* scales = HAS_SCALES<E> ? scales_of(a.pages, D, sequence, p, kv_head) : nullptr;
            stage(i).fill(keys<D, E>(a.pages, sequence, p, kv_head), values<D, E>(a.pages, sequence, p, kv_head), scales, a.pages.kv_heads * PAGE);
        }
        copy_async_commit();
    };
    if (a.stored) wait_for_earlier_kernels();
#pragma unroll 1
    for (int i = 0; i < STAGES; i++) load(i);
#if __CUDA_ARCH__ >= 900
    // Each block of a cluster combines and stores the heads h with h % splits == split.
    if (CLUSTER) {
        if (threadIdx.x == 0) {
            barrier_init(shared_address(&exchange), 1);
            barrier_expect(shared_address(&exchange), (heads - split + splits - 1) / splits * (splits - 1) * LINE * 4);
            publish_barriers();
        }
        __syncwarp();
        cluster_arrive();
    }
#endif
    Rotation<D, ROTARY> rotation(a.head, position);
    float q_weight[N], k_weight[N];
    load_norm<D>(a.q_norm, q_weight);
    load_norm<D>(a.k_norm, k_weight);

    wait_for_earlier_kernels();
    let_later_kernels_start();
    // The heads of the row that the block needs: queries, then the key and the value. A warp takes one per turn; all are in flight before
    // the first is used.
    constexpr int TURNS = ceil_div(HEADS + 2, WARPS);
    const float* row = a.qkv + (size_t)sequence * (LIMITED ? a.row.all : all_heads + 2 * a.pages.kv_heads) * D;
    float y[TURNS][N];
    bool is_unfit = false;
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        int i = warp + turn * WARPS;
        int value = LIMITED ? a.row.value : all_heads + a.pages.kv_heads;
        int head = i < heads ? first_head + i : kv_head + (i == heads ? all_heads : value);
        if (i < heads + (has_keys ? 2 : 0)) {
            load_head<D>(row + head * D, y[turn]);
        } else if (LIMITED) {
#pragma unroll
            for (int j = 0; j < N; j++) y[turn][j] = 0;
        }
    }
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        int i = warp + turn * WARPS;
        if (i < heads) {
            norm_and_rotate<D>(y[turn], a.q_norm != nullptr, q_weight, a.head, rotation, a.scale);
        } else if (i == heads) {
            norm_and_rotate<D>(y[turn], a.k_norm != nullptr, k_weight, a.head, rotation, 1);
        } else if (LIMITED && a.row.value_norm && i == heads + 1) {
            float factor = norm_factor<D>(y[turn], a.head.eps);
#pragma unroll
            for (int j = 0; j < N; j++) y[turn][j] *= factor;
        }
        if (i < heads + 2) {
            E* to = i == heads ? new_key : new_value;
            float scale = i < heads ? 1 : vector_scale<E>(y[turn]);
#pragma unroll
            for (int j = 0; j < N; j++) {
                is_unfit |= !fits_f16(y[turn][j]);
                if (!has_slot<D>(j)) continue;
                if (i < heads) {
                    q[i][lane + WARP * j] = to_f16(y[turn][j]);
                } else {
                    to[lane + WARP * j] = to_element<E>(y[turn][j], scale);
                }
            }
            if (HAS_SCALES<E> && i >= heads && lane == 0) new_scales[i - heads] = scale;
        }
    }
    note_unfit(a.pages, sequence, is_unfit);
    for (int i = threadIdx.x; i < (HEADS - heads) * D; i += THREADS) q[heads + i / D][i % D] = 0;
    __syncthreads();

    if (has_new && !a.stored) {
        E *to_key = keys<D, E>(a.pages, sequence, position, kv_head), *to_value = values<D, E>(a.pages, sequence, position, kv_head);
        for (int i = threadIdx.x; i < D; i += THREADS) {
            to_key[i] = new_key[i];
            to_value[i * PAGE] = new_value[i];
        }
        if (HAS_SCALES<E> && threadIdx.x < 2) {
            scales_of(a.pages, D, sequence, position, kv_head)[threadIdx.x * a.pages.kv_heads * PAGE] = new_scales[threadIdx.x];
        }
    }
    // Along K of a product a lane has two neighbours from NEIGHBOURS * t on, and two that are APART from those.
    constexpr int NEIGHBOURS = HAS_SCALES<E> ? 4 : 2, APART = HAS_SCALES<E> ? 2 : 8;
    u32 query[TILES][2];
#pragma unroll
    for (int j = 0; j < TILES; j++) {
        query[j][0] = *(const u32*)&q[g][16 * j + NEIGHBOURS * t];
        query[j][1] = *(const u32*)&q[g][16 * j + NEIGHBOURS * t + APART];
    }
    // The lane's positions of 16: rows g and g + 8 of the scores.
    int low = position_of_row<E>(g), high = low + APART;
    float y_tiles[OWN_TILES][4] = {}, max_score[2] = {-INFINITY, -INFINITY}, weight[2] = {0, 0};

    // The positions of a warp in a stage, and its tiles of values.
    int first = warp % POSITION_WARPS % PAGE_WARPS * STEP, first_tile = (FIXED ? warp : warp % PAGE_WARPS / POSITION_WARPS) * OWN_TILES;
    // The scores of 16 positions from p on, in the ring's stage `at`.
    auto scores_of = [&](int at, int p, float (&score)[4]) {
#pragma unroll
        for (int j = 0; j < TILES / AT_ONCE; j++) {
            u32 k[AT_ONCE][4];
            stage(at).keys(first, j, k);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const u32(&of_tile)[2] = query[AT_ONCE * j + i];
                mma_f16(score, k[i][0], k[i][1], k[i][2], k[i][3], of_tile[0], of_tile[1]);
            }
        }
        if (HAS_SCALES<E>) {
            float of_low = stage(at).key_scale(first + low), of_high = stage(at).key_scale(first + high);
            score[0] = __fmul_rn(score[0], of_low), score[1] = __fmul_rn(score[1], of_low);
            score[2] = __fmul_rn(score[2], of_high), score[3] = __fmul_rn(score[3], of_high);
        }
        if (LIMITED && a.cap > 0) {
#pragma unroll
            for (int e = 0; e < 4; e++) score[e] = capped(score[e], a.cap);
        }
        if (p + low >= end || (LIMITED && p + low < start)) score[0] = score[1] = -INFINITY;
        if (p + high >= end || (LIMITED && p + high < start)) score[2] = score[3] = -INFINITY;
    };
    // The largest score of the 16 positions for a head.
    auto largest_of = [](const float (&score)[4], int h) {
        float best = fmaxf(score[h], score[h + 2]);
#pragma unroll
        for (int d = 4; d < WARP; d *= 2) best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, d));
        return best;
    };
    if constexpr (FIXED) {
        auto& [largest, probabilities] = *(PageExchange<E>*)(ring + STAGES * Stage::BYTES);
        float sum[4] = {};  // of the weights, in each row
        for (int i = 0; i < stages; i++) {
            copy_async_wait<STAGES - 1>();
            __syncthreads();
            if (has_new && !a.stored && i == stages - 1) {
                char* to = ring + i % STAGES * Stage::BYTES;
                int at = (position - begin) % POSITIONS<D>;
                for (int e = threadIdx.x; e < D; e += THREADS) {
                    *(E*)(to + Stage::key_offset(at, e)) = new_key[e];
                    *(E*)(to + Stage::value_offset(at, e)) = new_value[e];
                }
                if (HAS_SCALES<E> && threadIdx.x == 0) {
                    *(float*)(to + Stage::key_scale_offset(at)) = new_scales[0];
                    *(float*)(to + Stage::value_scale_offset(at)) = new_scales[1];
                }
                __syncthreads();
            }
            int p = begin + i * POSITIONS<D> + first;
            bool has_positions = warp < POSITION_WARPS;
            float score[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
            if (has_positions && p < end && (!LIMITED || p + STEP > start)) {
                score[0] = score[1] = score[2] = score[3] = 0;
                scores_of(i, p, score);
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float best = largest_of(score, h);
                if (has_positions && g == 0) largest[warp][2 * t + h] = best;
            }
            __syncthreads();
            float factor[2], subtracted[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float best = max_score[h];
#pragma unroll
                for (int w = 0; w < POSITION_WARPS; w++) best = fmaxf(best, largest[w][2 * t + h]);
                subtracted[h] = best == -INFINITY ? 0 : best;
                factor[h] = exp2_approx(max_score[h] - subtracted[h]);
                max_score[h] = best;
            }
            u32 scaled[2], plain[2];
#pragma unroll
            for (int b = 0; b < 2; b++) {
                float x = exp2_approx(score[2 * b] - subtracted[0]), z = exp2_approx(score[2 * b + 1] - subtracted[1]);
                plain[b] = transpose_matrix(pack_f16(x, z));
                if (HAS_SCALES<E>) {
                    float scale = stage(i).value_scale(first + (b == 0 ? low : high)) * PROBABILITY_FACTOR<E>;
                    scaled[b] = transpose_matrix(pack_f16(x * scale, z * scale));
                }
            }
            if (has_positions) {
                probabilities[0][warp][lane] = make_uint2(plain[0], plain[1]);
                if constexpr (HAS_SCALES<E>) probabilities[1][warp][lane] = make_uint2(scaled[0], scaled[1]);
            }
            __syncthreads();
#pragma unroll
            for (int e = 0; e < 4; e++) {
                sum[e] *= factor[e % 2];
#pragma unroll
                for (int j = 0; j < OWN_TILES; j++) y_tiles[j][e] *= factor[e % 2];
            }
#pragma unroll
            for (int w = 0; w < POSITION_WARPS; w++) {
                uint2 weights = probabilities[0][w][lane], of_values = weights;
                if constexpr (HAS_SCALES<E>) of_values = probabilities[1][w][lane];
                mma_f16(sum, TWO_ONES, TWO_ONES, TWO_ONES, TWO_ONES, weights.x, weights.y);
#pragma unroll
                for (int j = 0; j < OWN_TILES; j += AT_ONCE) {
                    // Tiles need not divide into the warps.
                    if (TILES % (WARPS * AT_ONCE) != 0 && first_tile + j >= TILES) continue;
                    u32 v[AT_ONCE][4];
                    stage(i).values(w * STEP, (first_tile + j) / AT_ONCE, v);
#pragma unroll
                    for (int n = 0; n < AT_ONCE; n++) mma_f16(y_tiles[j + n], v[n][0], v[n][1], v[n][2], v[n][3], of_values.x, of_values.y);
                }
            }
            __syncthreads();
            load(i + STAGES);
        }
        weight[0] = sum[0], weight[1] = sum[1];
    } else {
        for (int i = 0; i < stages; i += SPAN) {
            copy_async_wait<STAGES - SPAN>();
            __syncthreads();
            int at = i + warp / PAGE_WARPS, p = begin + at * POSITIONS<D> + first;
            if (p < end && (!LIMITED || p + STEP > start)) {
                float score[4] = {};
                scores_of(at, p, score);
                float factor[2];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float best = fmaxf(largest_of(score, h), max_score[h]);
                    factor[h] = exp2_approx(max_score[h] - best);
                    max_score[h] = best;
                    weight[h] *= factor[h];
                }
                u32 probability[2];
#pragma unroll
                for (int b = 0; b < 2; b++) {
                    float x = exp2_approx(score[2 * b] - max_score[0]), z = exp2_approx(score[2 * b + 1] - max_score[1]);
                    weight[0] += x;
                    weight[1] += z;
                    float scale = HAS_SCALES<E> ? stage(at).value_scale(first + (b == 0 ? low : high)) * PROBABILITY_FACTOR<E> : 1;
                    probability[b] = transpose_matrix(pack_f16(x * scale, z * scale));
                }
#pragma unroll
                for (int j = 0; j < OWN_TILES / AT_ONCE; j++) {
                    u32 v[AT_ONCE][4];
                    stage(at).values(first, first_tile / AT_ONCE + j, v);
#pragma unroll
                    for (int i = 0; i < AT_ONCE; i++) {
                        float(&y)[4] = y_tiles[AT_ONCE * j + i];
#pragma unroll
                        for (int e = 0; e < 4; e++) y[e] *= factor[e % 2];
                        mma_f16(y, v[i][0], v[i][1], v[i][2], v[i][3], probability[0], probability[1]);
                    }
                }
            }
            __syncthreads();
#pragma unroll
            for (int j = 0; j < SPAN; j++) load(i + j + STAGES);
        }
    }

    // The ring is no longer in use.
    static_assert(LINES * HEADS * LINE * 4 <= STAGES * Stage::BYTES, "partial results take the place of the ring");
    float(*of_warp)[HEADS][LINE] = (float(*)[HEADS][LINE])ring;  // [LINES]
    for (int h = warp; !FIXED && h < heads; h += WARPS) {
        float score = 0, *line = of_warp[LINES - 1][h];
#pragma unroll
        for (int j = 0; j < N; j++) {
            int i = lane + WARP * j;
            if (!has_slot<D>(j)) continue;
            score = fmaf(f16_to_float(q[h][i]), element_to_float(new_key[i]), score);
            line[i] = element_to_float(new_value[i]) * (HAS_SCALES<E> ? new_scales[1] : 1);
        }
        score = warp_sum(score) * (HAS_SCALES<E> ? new_scales[0] : 1);
        if (LIMITED && a.cap > 0) score = capped(score, a.cap);
        if (lane == 0) {
            line[D] = has_new ? score : -INFINITY;
            line[D + 1] = 1;
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int d = 4; !FIXED && d < WARP; d *= 2) weight[h] += __shfl_xor_sync(ALL_LANES, weight[h], d);
        float* line = of_warp[FIXED ? 0 : SHARERS<D> == 1 ? warp : first / STEP][2 * t + h];
#pragma unroll
        for (int i = 0; i < OWN_TILES; i++) {
            if (FIXED && first_tile + i >= TILES) continue;
            line[16 * (first_tile + i) + g] = y_tiles[i][h] * (1 / PROBABILITY_FACTOR<E>);
            line[16 * (first_tile + i) + g + 8] = y_tiles[i][h + 2] * (1 / PROBABILITY_FACTOR<E>);
        }
        if (g == 0 && first_tile == 0) {
            line[D] = max_score[h];
            line[D + 1] = weight[h];
        }
    }
    __syncthreads();

    OutputRow out(a, sequence, all_heads * D);
    auto store_output = [&](const PartialResult<D>& r, int h) {
        r.store_output(out, first_head + h, LIMITED && a.sinks ? a.sinks[first_head + h] * LOG2E : -INFINITY);
    };
    if (a.fragment_major && split == 0 && first_head == 0) {
        // The padding is zeros.
        for (int k = out.width + threadIdx.x; k < padded_k(out.width); k += THREADS) out.at(k) = 0;
    }
#if __CUDA_ARCH__ >= 900
    if (CLUSTER) {
        float(*of_split)[HEADS][LINE] = (float(*)[HEADS][LINE])(ring + STAGES * Stage::BYTES);  // [splits]
        __syncwarp();
        cluster_wait();
        for (int h = warp; h < heads; h += WARPS) {
            PartialResult<D> r(of_warp[0][h], LINES, HEADS * LINE);
            if (h % splits == split) {
                r.store(of_split[split][h]);
            } else {
                r.send(shared_address(of_split[split][h]), h % splits, shared_address(&exchange));
            }
        }
        __syncwarp();
        barrier_wait(shared_address(&exchange), 0);
        for (int h = warp; h < heads; h += WARPS) {
            if (h % splits == split) store_output(PartialResult<D>(of_split[0][h], splits, HEADS * LINE), h);
        }
        return;
    }
#endif
    int block = sequence * gridDim.x + blockIdx.x;
    float* lines = a.partial + (size_t)block * gridDim.z * HEADS * LINE;
    for (int h = warp; h < heads; h += WARPS) {
        PartialResult<D> r(of_warp[0][h], LINES, HEADS * LINE);
        if (splits == 1) {
            store_output(r, h);
        } else {
            r.store(lines + (split * HEADS + h) * LINE);
        }
    }
    if (splits == 1) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = (int)atomic_add_release_acquire(a.arrived + block, 1) == splits - 1;
        if (last) a.arrived[block] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int h = warp; h < heads; h += WARPS) store_output(PartialResult<D>::template of_splits<FIXED>(lines + h * LINE, splits), h);
}

// With few blocks, each has a ring of four pages, two of which are processed at a time. With more blocks, and in clusters, a ring of two
// pages leaves shared memory to a block of the kernels before and after. With the most blocks, several share a multiprocessor, each with
// one page. Of wide heads, whose ring has two pages, both are processed at a time where a block has few positions (attention/decode_wide.cu).
// FIXED kernels have a ring of two pages, or one. Minimum numbers of blocks per multiprocessor:
constexpr int LONG_RING_BLOCKS = 2, ONE_PAGE_BLOCKS = 4;

#define KERNEL_OF(E, D, LIMITED, ROTARY, NAME, STAGES, SPAN, BLOCKS, CLUSTER, FIXED)                                         \
    extern "C" __global__ void __launch_bounds__(SPAN* PAGE_WARPS* WARP, BLOCKS) NAME(const __grid_constant__ Arguments a) { \
        run<D, LIMITED, ROTARY, STAGES, SPAN, CLUSTER, E, FIXED>(a);                                                         \
    }
#define KERNEL(D, LIMITED, ROTARY, NAME, STAGES, SPAN, BLOCKS, CLUSTER) \
    KERNEL_OF(u16, D, LIMITED, ROTARY, NAME, STAGES, SPAN, BLOCKS, CLUSTER, false)
#define KERNELS(D, LIMITED, ROTARY, NAME, RING_BLOCKS, PAGE_BLOCKS)         \
    KERNEL(D, LIMITED, ROTARY, NAME##_ring4, 4, 2, RING_BLOCKS, false)      \
    KERNEL(D, LIMITED, ROTARY, NAME##_ring2, 2, 1, RING_BLOCKS, false)      \
    KERNEL(D, LIMITED, ROTARY, NAME##_ring1, 1, 1, PAGE_BLOCKS, false)
#define FIXED_KERNELS(E, D, LIMITED, ROTARY, NAME, RING_BLOCKS, PAGE_BLOCKS)                                           \
    KERNEL_OF(E, D, LIMITED, ROTARY, NAME##_ring2, (HAS_SCALES<E> ? 4 : 2), 1, RING_BLOCKS, false, true)               \
    KERNEL_OF(E, D, LIMITED, ROTARY, NAME##_ring1, (HAS_SCALES<E> ? 2 : 1), 1, PAGE_BLOCKS, false, true)
