// The products of linear/wide.cuh whose rows have LoRA adapters, each its own or none: y = W x + scale * B (A x).
//
// The first blocks of the grid multiply tiles of rows by A factors (adapter/shrink.cuh), while the others multiply by W. A counter says when
// they are done; the others then add B (A x) to their accumulators. Blocks begin in the order of their numbers, so that one that waits for
// the counter does not keep those that it waits for from running. With 128 rows accumulators leave no registers for this.
#include "adapter/shrink.cuh"
#include "linear/wide.cuh"

constexpr int PARTS = 2;    // of K, for the products with A
// Blocks have as few registers as if they had so many threads, which leaves room for blocks of the kernels before and after.
constexpr int BOUND = 640;

// The rows of a product by adapter.
struct AdaptedRows {
    const RowTile* tiles;   // of all rows
    float* low;             // A x, f32 [matrices, m, PARTS, rank], so that accumulators of the matrix get its product with B
    u32* counter;           // of blocks that have stored their products, and then of those that have taken them. 0 before and after
    int tile_count;
    int blocks;             // of the grid's first dimension, that multiply by A factors
    int rank;               // the largest, a power of two
    int first;              // the number of the first matrix among the projections of the model
    float factor;           // by which x was divided

    // Tasks of those blocks: a tile of rows, RANK_STEP ranks, and a part of K.
    __device__ __forceinline__ int tasks(const Arguments& a) const { return a.matrices * tile_count * (rank / RANK_STEP) * PARTS; }
    // The numbers of A x of a row, and of a matrix.
    __device__ __forceinline__ int row_size() const { return PARTS * rank; }
    __device__ __forceinline__ int size(const Arguments& a) const { return a.m * row_size(); }
};

template <int COLUMNS, bool IS_GLU>
class RowAdapters {
    static constexpr int OWN = IS_GLU ? 2 : 1;          // matrices of a block
    static constexpr int QUAD = 4;                      // ranks that a lane takes at a time
    static constexpr int SHRINK_STEPS = IS_GLU ? 1 : 2; // as registers allow
    struct BFactor {
        const void* b;
        u16 rank, type;
    };
    struct Memory {
        u64 prepared, ready;            // barriers: the rest of this is there; A x is there
        int count;                      // of the adapters of rows
        int features;                   // of the block's matrix
        int unused[2];
        int adapter_of[COLUMNS];        // of each row; -1: none
        BFactor factors[OWN][COLUMNS];  // of each adapter
    };  // A x follows, f32 [OWN, m, PARTS, rank].
    const Arguments& a;
    const AdaptedRows& rows;
    Memory& memory;
    int matrix, first_feature;          // of the block
    uint4 stored[2];                    // of B, for lines 0 to 7 and 8 to 15 of accumulators: QUAD of RANK_STEP ranks

    __device__ __forceinline__ u32 prepared() const { return shared_address(&memory.prepared); }
    __device__ __forceinline__ u32 ready() const { return shared_address(&memory.ready); }
    __device__ __forceinline__ float* low() const { return (float*)(&memory + 1); }
    __device__ __forceinline__ const BFactor& factor(int adapter, int half) const { return memory.factors[IS_GLU ? half : 0][adapter]; }
    // to_tf32() by integers, which the device converts several times as fast. The instruction drops the bits that tf32 lacks of the rest.
    static __device__ __forceinline__ u32 nearest_tf32(float x) { return (__float_as_uint(x) + 0x1000) & 0xffffe000; }
    // Requests ranks from `rank` on of B, for the features of the accumulators' lines.
    __device__ __forceinline__ void load(int adapter, int feature, int rank) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            BFactor f = factor(adapter, half);
            int line = feature + lane_id() / 4 + (IS_GLU ? 0 : 8 * half), at = rank + lane_id() % 4 * QUAD;
            bool exists = at < f.rank && line < memory.features;
            stored[half] = exists ? load_four(f.b, f.type, (size_t)line * f.rank + at) : make_uint4(0, 0, 0, 0);
        }
    }

public:
    static constexpr bool EXIST = true;
    static constexpr int WARPS = 1;
    using Rows = AdaptedRows;
    static __device__ __forceinline__ int blocks(const Rows& rows) { return rows.blocks; }

    // A block that multiplies by an A factor.
    static __device__ __forceinline__ void shrink(const Arguments& a, const Rows& rows, char* shared) {
        constexpr int ALL_WARPS = THREADS<RowAdapters> / WARP;
        RowTile& tile = *(RowTile*)shared;
        int tasks = rows.tasks(a), task = blockIdx.x * gridDim.z + blockIdx.z;
        if (task >= tasks) return;
        int part = task % PARTS, rank = task / PARTS % (rows.rank / RANK_STEP) * RANK_STEP;
        int group = task / PARTS / (rows.rank / RANK_STEP), matrix = group / rows.tile_count;
        load_tile(tile, rows.tiles[group % rows.tile_count]);
        Factors f = factors_of(tile, rows.first + matrix);
        int length = ceil_div(ceil_div(a.k, PARTS), WARP_K) * WARP_K, begin = part * length, end = min(begin + length, a.k);
        auto wait = [] {
            wait_for_earlier_kernels();
            let_later_kernels_start();
        };
        if (tile.rows > 0 && rank < f.rank) {
            int lines = ceil_div((end - begin) * bytes_of(f.a_type), 128);
            for (int i = threadIdx.x; i < RANK_STEP * lines; i += ALL_WARPS * WARP) {
                prefetch((const u8*)f.a + ((size_t)(rank + i / lines) * a.k + begin) * bytes_of(f.a_type) + i % lines * 128);
            }
            float(*sums)[TILE_ROWS][RANK_STEP] = (float(*)[TILE_ROWS][RANK_STEP])(shared + 128);
            static_assert(sizeof(RowTile) <= 128, "sums follow the tile");
            float factor = rows.factor * f.scale / (a.matrix[matrix].global * PACKED_FACTOR);
            float* to = rows.low + (size_t)matrix * rows.size(a) + part * rows.rank + rank;
            shrink_tile<ALL_WARPS, SHRINK_STEPS, true>({a.x, a.m, a.k}, tile, f, rank, begin, end, sums, wait, [&](int row, int number, float sum) {
                to[tile.row[row] * rows.row_size() + number] = sum * factor;
            });
        } else {
            wait();
        }
        if (threadIdx.x == 0) count_release(rows.counter, tasks + (gridDim.x - rows.blocks) * gridDim.z - 1);
    }

    __device__ __forceinline__ RowAdapters(const Arguments& a, const Rows& rows, int matrix, int first_feature, char* shared)
        : a(a), rows(rows), memory(*(Memory*)shared), matrix(matrix), first_feature(first_feature) {
        if (threadIdx.x == 0) barrier_init(prepared(), 1), barrier_init(ready(), 1);
    }

    // For the warp that serves adapters: finds the adapters of rows, and fetches their B factors to L2.
    __device__ __forceinline__ void prepare() {
        int lane = lane_id(), count = 0;
#pragma unroll
        for (int i = 0; i < COLUMNS; i += WARP) memory.adapter_of[i + lane] = -1;
        __syncwarp();
#pragma unroll 1
        for (int first = 0; first < rows.tile_count; first += WARP) {
            // Stores do not come between loads, which would then wait for each other.
            RowTile tile{};
            if (first + lane < rows.tile_count) tile = rows.tiles[first + lane];
            if (tile.rows == 0) tile.factors = nullptr;
            Factors f[OWN];
#pragma unroll
            for (int own = 0; own < OWN; own++) f[own] = factors_of(tile, rows.first + matrix + own);
            // Tiles of an adapter are one; those of 32 further ones are others.
            int leader = __ffs(__match_any_sync(ALL_LANES, (u64)tile.factors)) - 1;
            u32 leaders = __ballot_sync(ALL_LANES, tile.factors && lane == leader);
            int adapter = count + __popc(leaders & ((1u << leader) - 1));
            count += __popc(leaders);
#pragma unroll
            for (int i = 0; i < TILE_ROWS; i++) {
                if (tile.factors && i < tile.rows) memory.adapter_of[tile.row[i]] = adapter;
            }
#pragma unroll
            for (int own = 0; own < OWN; own++) {
                if (!tile.factors || lane != leader) break;
                BFactor& to = memory.factors[own][adapter];
                to.b = f[own].b, to.rank = f[own].rank, to.type = f[own].b_type;
            }
        }
        if (lane == 0) memory.count = count, memory.features = a.matrix[matrix].rows;
        __syncwarp();
        if (lane == 0) barrier_arrive(prepared());
        int features = min(IS_GLU ? GLU_FEATURES : FEATURES, a.matrix[matrix].rows - first_feature);
        for (int i = 0; i < count * OWN; i++) {
            BFactor f = memory.factors[i % OWN][i / OWN];
            int row_bytes = f.rank * bytes_of(f.type);
            for (int at = lane * 128; at < features * row_bytes; at += WARP * 128) prefetch((const u8*)f.b + (size_t)first_feature * row_bytes + at);
        }
    }
    // For the same warp: waits until A x is complete, and has it copied.
    __device__ __forceinline__ void gather() const {
        if (lane_id() == 0) {
            int tasks = rows.tasks(a), bytes = rows.size(a) * 4;
            while (load_acquire(rows.counter) < (u32)tasks) {}
            show_to_copies();
            barrier_expect(ready(), OWN * bytes);
            copy_bulk(shared_address(low()), rows.low + (size_t)matrix * rows.size(a), OWN * bytes, ready());
            count_release(rows.counter, tasks + (gridDim.x - rows.blocks) * gridDim.z - 1);
        }
        __syncwarp();
    }
    // Requests the B factors of the first adapter for 16 lines of accumulators.
    __device__ __forceinline__ void fetch(int feature) {
        barrier_wait(prepared(), 0);
        if (memory.count > 0) load(0, feature, 0);
    }
    // Adds B (A x) to accumulators of the features that were fetched, eight rows each from `row` on. In tf32 a float is the sum of two numbers, up
    // to 2^-21 of it; one is enough for B in 16 bits.
    template <int TILES>
    __device__ __forceinline__ void add(float (&c)[TILES][4], int feature, int row) {
        int count = memory.count, own_row = row + lane_id() / 4, t = lane_id() % 4, row_size = rows.row_size();
        barrier_wait(ready(), 0);
#pragma unroll 1
        for (int adapter = 0, r = 0; adapter < count;) {
            BFactor first = factor(adapter, 0), second = factor(adapter, 1);
            float numbers[2][QUAD];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int type = half == 0 ? first.type : second.type;
                u32 words[4] = {stored[half].x, stored[half].y, stored[half].z, stored[half].w};
#pragma unroll
                for (int i = 0; i < QUAD; i++) numbers[half][i] = value_of(type == F32 ? words[i] : words[i / 2] >> i % 2 * 16 & 0xffff, type);
            }
#pragma unroll 1
            for (bool is_rest = false;;) {
                u32 b[QUAD][2];
#pragma unroll
                for (int i = 0; i < 2 * QUAD; i++) {
                    float& number = numbers[i % 2][i / 2];
                    b[i / 2][i % 2] = nearest_tf32(number);
                    number -= __uint_as_float(b[i / 2][i % 2]);
                }
#pragma unroll
                for (int own = 0; own < OWN; own++) {
                    // Beyond the rank there is anything.
                    bool has_ranks = r < (own == 0 ? first : second).rank;
#pragma unroll
                    for (int i = 0; i < TILES; i++) {
                        int m = own_row + 8 * i;
                        bool is_own = m < a.m && memory.adapter_of[m] == adapter && has_ranks;
                        const float* from = low() + (own * a.m + m) * row_size + r + t * QUAD;
                        float4 x = make_float4(0, 0, 0, 0);
                        if (is_own) {
                            float4 y = *(const float4*)(from + rows.rank);
                            x = *(const float4*)from;
                            x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
                        }
                        float of_x[QUAD] = {x.x, x.y, x.z, x.w};
#pragma unroll
                        for (int j = 0; j < QUAD; j += 2) {
                            // Lines 0 to 7 are those of gate, 8 to 15 those of up.
                            u32 lines[4] = {own == 0 ? b[j][0] : 0, own == OWN - 1 ? b[j][1] : 0, own == 0 ? b[j + 1][0] : 0, own == OWN - 1 ? b[j + 1][1] : 0};
                            u32 x0 = nearest_tf32(of_x[j]), x1 = nearest_tf32(of_x[j + 1]);
                            mma_tf32(c[i], lines, x0, x1);
                            mma_tf32(c[i], lines, __float_as_uint(of_x[j] - __uint_as_float(x0)), __float_as_uint(of_x[j + 1] - __uint_as_float(x1)));
                        }
                    }
                }
                if (is_rest || (first.type != F32 && second.type != F32)) break;
                is_rest = true;
            }
            r += RANK_STEP;
            if (r >= max((int)first.rank, (int)second.rank)) adapter++, r = 0;
            if (adapter < count) load(adapter, feature, r);
        }
    }
};

struct AdaptedArguments {
    Arguments product;
    AdaptedRows rows;
};

#define ADAPTED(NAME, COLUMNS, IS_GLU)                                                                        \
    extern "C" __global__ void __launch_bounds__(BOUND, 1)                                                    \
        linear_wide_adapted_##NAME(const __grid_constant__ AdaptedArguments a) {                              \
        run<COLUMNS, IS_GLU, false, RowAdapters<COLUMNS, IS_GLU>>(a.product, a.rows);                         \
    }
#define KERNEL(COLUMNS)              \
    ADAPTED(COLUMNS, COLUMNS, false) \
    ADAPTED(glu_##COLUMNS, COLUMNS, true)
KERNEL(32)
KERNEL(64)
