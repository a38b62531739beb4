// Products of tens of rows with NVFP4 weights on Hopper: y[m, n] = sum over k of x[m, k] w[n, k], for fragment-major x
// (format/fragment_major.cuh). Like linear/tiled.cu, but with wgmma, and with tiles three times as wide, so that activations are read from
// the L2 cache a third as often.
//
// A block takes 192 output features, 16 to a warp, and up to COLUMNS rows of activations, and goes along K a chunk of format/packed.cuh at
// a time. Weights are the A operand, decoded once for all rows; each warp loads its own through a ring, which it begins to fill before the
// kernel waits for its predecessor. Activations are the B operand; one more warp loads them, as far ahead as there are free stages.
//
// If that gives too few blocks, K is split (split-K): the blocks of a cluster take the same tile over a range of K each. At the end each
// block adds up the accumulators of all of them for its share of the tile, in a fixed order. Kernels of whole K take these ranges one after
// the other, and give the same bits; so does linear/skinny_ranges.cu for few rows. K must be a multiple of 16.
#pragma once
#include "common/cluster.cuh"
#include "common/ring.cuh"
#include "common/wgmma.cuh"
#include "linear/tile.cuh"

constexpr int WARPGROUPS = 3;
constexpr int WARPS = WARPGROUPS * WARPGROUP / WARP;    // that multiply
constexpr int FEATURES = WARPS * 16;
constexpr int GLU_FEATURES = FEATURES / 2;              // of gate, and as many of up
static_assert(GLU_FEATURES == WARPGROUPS * 2 * BLOCK, "a warpgroup has two blocks of gate and of up");
constexpr int MAX_SPLIT_K = 8;

// The stages of activations in shared memory. Each holds a chunk of all rows and has two barriers: one for "full" and one for "empty".
template <int COLUMNS>
struct ActivationStages {
    static constexpr int COUNT = COLUMNS <= 64 ? 4 : 3, STAGE_BYTES = COLUMNS / GROUP_ROWS * GROUP_BYTES, BYTES = COUNT * (STAGE_BYTES + 16);
    u32 base;

    __device__ __forceinline__ u32 data(int step) const { return base + step % COUNT * STAGE_BYTES; }
    __device__ __forceinline__ u32 full(int step) const { return base + COUNT * STAGE_BYTES + step % COUNT * 16; }
    __device__ __forceinline__ u32 empty(int step) const { return full(step) + 8; }
    static __device__ __forceinline__ u32 phase(int step) { return step / COUNT % 2; }

    __device__ __forceinline__ void init() const {
        for (int i = 0; i < COUNT; i++) {
            barrier_init(full(i), 1);
            barrier_init(empty(i), WARPS);
        }
        publish_barriers();
    }
    // Loads the chunks of all steps, `stride` bytes apart, as stages become free; one thread calls this.
    __device__ __forceinline__ void load(const u8* from, size_t stride, int bytes, int steps) const {
        for (int step = 0; step < steps; step++) {
            if (step >= COUNT) barrier_wait(empty(step), phase(step - COUNT));
            barrier_expect(full(step), bytes);
            copy_bulk(data(step), from + step * stride, bytes, full(step));
        }
    }
};

// The sums of earlier ranges of K in shared memory, where each thread has its own: registers have no room for them beside accumulators.
template <int TILES>
class RangeSums {
    u32 own;
    __device__ __forceinline__ u32 at(int i) const { return own + i * (WARPS * WARP * 16); }
    static __device__ __forceinline__ u32 add(u32 sum, float c) { return __float_as_uint(__uint_as_float(sum) + c); }

public:
    __device__ __forceinline__ RangeSums(const char* shared) : own(shared_address(shared) + threadIdx.x * 16) {}
    // Adds the accumulators of a range, and sets them to zero.
    __device__ __forceinline__ void take(float (&c)[TILES][4], bool is_first) const {
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            uint4 sum = is_first ? make_uint4(0, 0, 0, 0) : load_shared_16(at(i));
            sum.x = add(sum.x, c[i][0]), sum.y = add(sum.y, c[i][1]), sum.z = add(sum.z, c[i][2]), sum.w = add(sum.w, c[i][3]);
            store_shared_16(at(i), sum);
#pragma unroll
            for (int e = 0; e < 4; e++) c[i][e] = 0;
        }
    }
    // Adds them to the accumulators of the last of at least two ranges.
    __device__ __forceinline__ void add_to(float (&c)[TILES][4]) const {
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            uint4 sum = load_shared_16(at(i));
            c[i][0] += __uint_as_float(sum.x), c[i][1] += __uint_as_float(sum.y), c[i][2] += __uint_as_float(sum.z), c[i][3] += __uint_as_float(sum.w);
        }
    }
};

// Stores a warpgroup's GLU results in fragment-major layout. Its features are two neighbouring blocks, which are contiguous for a group of
// rows, so results pass through shared memory and are stored 16 bytes at a time.
template <int ROOM, int TILES>
__device__ __forceinline__ void store_glu_fragments(const Arguments& a, char* shared, int first_feature, int first_row,
                                                    const float (&c)[TILES][4]) {
    constexpr int PAIR_BYTES = 4 * FRAGMENT_BYTES, PIECES = PAIR_BYTES / 16;
    static_assert(TILES * PAIR_BYTES <= ROOM, "results take the place of the warps' rings");
    int thread = threadIdx.x % WARPGROUP, warp = thread / WARP, groups = ceil_div(a.m, GROUP_ROWS);
    auto sync_warpgroup = [] { barrier(1 + threadIdx.x / WARPGROUP, WARPGROUP); };
    sync_warpgroup();
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        store_glu(a, first_feature + warp * 8, 0, c[i], [&](int m, int feature, u16 value) {
            ((u16*)(shared + i * PAIR_BYTES))[fragment_index(1, m, feature - first_feature)] = value;
        });
    }
    sync_warpgroup();
    if (first_feature >= padded_k(a.matrix[0].rows)) return;
    for (int i = thread; i < TILES * PIECES; i += WARPGROUP) {
        int row = first_row + i / PIECES * GROUP_ROWS;
        if (row < a.m) ((uint4*)((u16*)a.out + fragment_index(groups, row, first_feature)))[i % PIECES] = ((const uint4*)shared)[i];
    }
}

// For rows without adapters; linear/wide_adapted.cu has the class for rows with them.
struct NoAdapters {
    static constexpr bool EXIST = false;
    static constexpr int WARPS = 0;     // of a block that serve them alone
    struct Rows {};
    static __device__ __forceinline__ int blocks(const Rows&) { return 0; }
    static __device__ __forceinline__ void shrink(const Arguments&, const Rows&, char*) {}
    __device__ __forceinline__ NoAdapters(const Arguments&, const Rows&, int, int, char*) {}
    __device__ __forceinline__ void prepare() const {}
    __device__ __forceinline__ void gather() const {}
    __device__ __forceinline__ void fetch(int) const {}
    template <int TILES>
    __device__ __forceinline__ void add(float (&)[TILES][4], int, int) const {}
};

template <class Adapters>
constexpr int THREADS = (WARPS + 1 + Adapters::WARPS) * WARP;

// IS_GLU: the 16 features of a warp are eight of gate and the same eight of up. IS_WHOLE: a block takes all ranges of K, at least two. Adapters
// add the products of the rows' adapters to accumulators.
template <int COLUMNS, bool IS_GLU, bool IS_WHOLE, class Adapters>
__device__ __forceinline__ void run(const Arguments& a, const typename Adapters::Rows& rows) {
    constexpr int TILES = COLUMNS / 8;
    // The sums of 128 rows leave room for two.
    constexpr int STAGES = IS_WHOLE && COLUMNS > 64 ? 2 : 3;
    using Ring = WarpRing<STAGES, CHUNK_BYTES>;
    using X = ActivationStages<COLUMNS>;
    extern __shared__ __align__(128) char shared[];
    int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), lane = lane_id(), g = lane / 4;
    int chunks = ceil_div(a.k, CHUNK_K), split = blockIdx.z;
    auto range_begin = [&](int split) { return chunks * split / a.split_k; };
    int begin = range_begin(split), steps = IS_WHOLE ? chunks : range_begin(split + 1) - begin;
    int first_row = blockIdx.y * COLUMNS, groups = ceil_div(a.m, GROUP_ROWS);

    // The first blocks multiply by A factors.
    int block = blockIdx.x - Adapters::blocks(rows);
    if (Adapters::EXIST && block < 0) return Adapters::shrink(a, rows, shared);
    TilePlace<FEATURES> tile(a, IS_GLU ? 0 : block);
    const Matrix& w = *tile.matrix;
    int tile_feature = IS_GLU ? block * GLU_FEATURES : tile.first_feature;
    auto first_feature = [&](int warp) { return tile_feature + warp * (IS_GLU ? 8 : 16); };
    X x{shared_address(shared)};
    char* rings = shared + X::BYTES;
    bool has_tile = IS_WHOLE || a.split_k == 1;
    Adapters adapters(a, rows, tile.matrix - a.matrix, tile_feature, rings + WARPS * Ring::BYTES);
    if (threadIdx.x == 0) x.init();
    float c[TILES][4] = {};

    if (warp == WARPS) {
        wait_for_earlier_kernels();
        let_later_kernels_start();
        __syncthreads();
        int first_group = first_row / GROUP_ROWS, block_groups = min(groups - first_group, TILES);
        const u8* from = (const u8*)a.x + ((size_t)begin * groups + first_group) * GROUP_BYTES;
        if (lane == 0) x.load(from, (size_t)groups * GROUP_BYTES, block_groups * GROUP_BYTES, steps);
        __syncwarp();
    } else if (Adapters::EXIST && warp > WARPS) {
        wait_for_earlier_kernels();
        let_later_kernels_start();
        __syncthreads();
        // Others do not wait for this warp before they exchange accumulators.
        if (!has_tile) cluster_arrive();
        adapters.prepare();
        adapters.gather();
    } else {
        // Beyond the last features, the last ones are repeated; their accumulators are dropped.
        int last_line = ceil_div(w.rows, CHUNK_ROWS) - 1;
        auto line = [&](int i) {
            const u8* from = IS_GLU ? a.matrix[i].chunks : w.chunks;
            return from + ((size_t)min(first_feature(warp) / CHUNK_ROWS + (IS_GLU ? 0 : i), last_line) * chunks + begin) * CHUNK_BYTES;
        };
        const u8* low = line(0) + lane * 16;
        long long to_high = Ring::to_second(line(0), line(1));
        Ring ring(rings + warp * Ring::BYTES);
        auto load = [&](int step) {
            if (step < steps) {
                ring.fill(Ring::offset(step % STAGES), low + step * CHUNK_BYTES, to_high);
            } else {
                ring.skip();
            }
        };
        // Weights do not depend on the predecessor kernel.
#pragma unroll
        for (int i = 0; i < STAGES; i++) load(i);
        wait_for_earlier_kernels();
        let_later_kernels_start();
        __syncthreads();

        RangeSums<TILES> sums(rings + WARPS * Ring::BYTES);
        int ranges = IS_WHOLE ? a.split_k : 1, step = 0;
        for (int range = 1;; range++) {
            for (int end = range < ranges ? range_begin(range) : steps; step < end; step++) {
                ring.wait();
                u32 stage = ring.base + Ring::offset(step % STAGES);
                uint4 low_codes = load_shared_16(stage + lane * 16), high_codes = load_shared_16(stage + CHUNK_BYTES + lane * 16);
                uint2 low_scales = load_shared_8(stage + CHUNK_CODES + g * CHUNK_BLOCKS);
                uint2 high_scales = load_shared_8(stage + CHUNK_BYTES + CHUNK_CODES + g * CHUNK_BLOCKS);
                __syncwarp();
                load(step + STAGES);
                u32 words_low[4] = {low_codes.x, low_codes.y, low_codes.z, low_codes.w};
                u32 words_high[4] = {high_codes.x, high_codes.y, high_codes.z, high_codes.w};
                u32 u[4][4], v[4][4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    decode_packed(words_low[j], low_scales, j, u[j]);
                    decode_packed(words_high[j], high_scales, j, v[j]);
                    if (j == 0) {
                        // The products of a step run while the weights of the next step are loaded and the first of them decoded.
                        wgmma_wait<0>();
                        if (step > 0 && lane == 0) barrier_arrive(x.empty(step - 1));
                        barrier_wait(x.full(step), X::phase(step));
                    }
                    auto b = [&](int i) { return wgmma_descriptor<FRAGMENT_BYTES, GROUP_BYTES>(x.data(step) + (4 * j + i) * FRAGMENT_BYTES); };
                    wgmma_fence();
                    wgmma_f16(c, u[j][0], v[j][0], u[j][1], v[j][1], b(0));
                    wgmma_f16(c, u[j][2], v[j][2], u[j][3], v[j][3], b(2));
                    wgmma_commit();
                }
            }
            if (has_tile) adapters.fetch(first_feature(warp));
            wgmma_wait<0>();
            wgmma_fence_accumulators(c);
            if (range >= ranges) break;
            sums.take(c, range == 1);
        }
        if (IS_WHOLE) sums.add_to(c);
        if (has_tile) adapters.add(c, first_feature(warp), 0);
    }
    auto store_tile = [&](int warp, int i, const float (&c)[4]) {
        if (IS_GLU) {
            store_glu(a, first_feature(warp), first_row + 8 * i, c, [&](int m, int feature, u16 value) {
                bool fragment_major = a.output == STORE_FRAGMENT_MAJOR;
                if (m >= a.m || feature >= (fragment_major ? padded_k(w.rows) : w.rows)) return;
                ((u16*)a.out)[fragment_major ? fragment_index(groups, m, feature) : (size_t)m * a.out_stride + feature] = value;
            });
        } else {
            store_accumulators(a, w, tile.column, first_feature(warp), first_row + 8 * i, c);
        }
    };
    if (IS_GLU && has_tile && a.output == STORE_FRAGMENT_MAJOR) {
        constexpr int ROOM = 4 * Ring::BYTES;
        char* ring = rings + warp / 4 * ROOM;
        if (warp < WARPS) store_glu_fragments<ROOM>(a, ring, tile_feature + warp / 4 * (2 * BLOCK), first_row, c);
        return;
    }
    if (has_tile) {
        if (warp >= WARPS) return;
#pragma unroll
        for (int i = 0; i < TILES; i++) store_tile(warp, i, c[i]);
        return;
    }
    // The cluster exchanges accumulators through the shared memory of the activations: [warp][group of rows][lane].
    static_assert(WARPS * TILES * WARP * 16 <= X::COUNT * X::STAGE_BYTES, "accumulators take the place of activations");
    bool serves_adapters = Adapters::EXIST && warp > WARPS;
    if (Adapters::EXIST && !serves_adapters) barrier(1, (WARPS + 1) * WARP);
    if (!Adapters::EXIST) __syncthreads();
    if (warp < WARPS) {
#pragma unroll
        for (int i = 0; i < TILES; i++) ((float4*)shared)[(warp * TILES + i) * WARP + lane] = make_float4(c[i][0], c[i][1], c[i][2], c[i][3]);
    }
    __syncwarp();
    int end = WARPS * TILES * (split + 1) / a.split_k, i = WARPS * TILES * split / a.split_k + warp;
    adapters.fetch(first_feature(i / TILES));
    if (serves_adapters) {
        cluster_wait();
    } else {
        cluster_sync();
    }
    bool last;
    do {
        float sums[1][4] = {}, (&sum)[4] = sums[0];
        u32 own = x.base + (i * WARP + lane) * 16;
        if (i < end) {
#pragma unroll
            for (int s = 0; s < MAX_SPLIT_K; s++) {
                if (s >= a.split_k) break;
                float4 v = load_cluster_16(own, s);
                sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
            }
            // Nobody reads this store, but it depends on the loads from other blocks and so completes them.
            store_shared_16(own, make_uint4(__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]), __float_as_uint(sum[3])));
        }
        int next = i + THREADS<Adapters> / WARP;
        last = next >= end;
        __syncwarp();
        // Other blocks may exit once no warp reads their memory any more. A release would needlessly wait for all earlier stores.
        if (last) cluster_arrive();
        if (i < end) {
            adapters.add(sums, first_feature(i / TILES), i % TILES * 8);
            store_tile(i / TILES, i % TILES, sum);
        }
        i = next;
        if (!last) adapters.fetch(first_feature(i / TILES));
    } while (!last);
    __syncwarp();
    cluster_wait();
}
