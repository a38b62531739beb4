// LoRA adapters beside projections: y += scale * B (A x), for rows of a pass that each have an adapter of their own, or none. All sums are
// f32, of factors as they are stored, and the order of a row's sums follows from the shape of its factors alone.
//
// Rows are gathered into tiles of one adapter. Shrink computes A x for all projections that share an input, in splits along K that expand
// adds up in order. Shrink runs beside the product with the weights, whose input it shares: what wrote that input is complete when the
// product has let shrink start. Expand waits for both, because every block of shrink waits for the product before it ends.
#include "activation/gate.cuh"
#include "adapter/shrink.cuh"
#include "common/values.cuh"

constexpr int SHRINK_THREADS = 256;
constexpr int SHRINK_BLOCKS = 2;       // on a multiprocessor at least
constexpr int SHRINK_WARPS = SHRINK_THREADS / WARP;
constexpr int STEP_K = SHRINK_WARPS * WARP_K;
constexpr int SPLITS_AT_ONCE = 10;  // of which a thread has loads in flight: half of a row of 10,240
constexpr int EXPAND_THREADS = 128;
constexpr int EXPAND_BLOCKS = 4;     // on a multiprocessor at least
constexpr int PROJECTIONS = 4;      // that share an input

// The products of A factors of a group of projections, f32 [projections, rows, stride]; those of a row are [splits, rank].
struct Low {
    float* values;
    int rows, stride;
    int k;              // elements of an input row, a multiple of 16

    // Elements of K of a split; large ranks have fewer splits, so that the sums of a row take about as much memory.
    static __device__ __forceinline__ int split(int rank) { return STEP_K * (rank / RANK_STEP); }
    __device__ __forceinline__ float* of(int projection, int row) const { return values + ((size_t)projection * rows + row) * stride; }
    // Number r of A x, for a factor of this rank.
    __device__ __forceinline__ float sum(int projection, int row, int rank, int r) const {
        const float* from = of(projection, row) + r;
        int splits = ceil_div(k, split(rank));
        float sum = 0;
#pragma unroll 1
        for (int first = 0; first < splits; first += SPLITS_AT_ONCE) {
            float parts[SPLITS_AT_ONCE];
#pragma unroll
            for (int i = 0; i < SPLITS_AT_ONCE; i++) parts[i] = first + i < splits ? from[(first + i) * rank] : 0;
#pragma unroll
            for (int i = 0; i < SPLITS_AT_ONCE; i++) sum += parts[i];
        }
        return sum;
    }
};

// RANK_STEP numbers of a row of B.
__device__ __forceinline__ void load_factors(const void* b, int type, size_t at, float (&values)[RANK_STEP]) {
    if (type == F32) load_values<F32, RANK_STEP>((const uint4*)((const float*)b + at), values);
    if (type == F16) load_values<F16, RANK_STEP>((const uint4*)((const u16*)b + at), values);
    if (type == BF16) load_values<BF16, RANK_STEP>((const uint4*)((const u16*)b + at), values);
}

struct ShrinkArguments {
    const u16* x;           // f16 [rows, k], row-major or fragment-major
    const RowTile* tiles;
    Low low;
    int first;              // projection of the group among those of the model
    float factor;           // by which x was divided
};

// Grid: (ceil(k / STEP_K), projections, tiles). Launched after a product that has the same input, and followed by expand or by a gated unit.
template <bool FRAGMENTS>
__device__ __forceinline__ void shrink(const ShrinkArguments& a) {
    __shared__ RowTile tile;
    __shared__ float sums[SHRINK_WARPS][TILE_ROWS][RANK_STEP];
    let_later_kernels_start();
    load_tile(tile, a.tiles[blockIdx.z]);
    Factors f = factors_of(tile, a.first + blockIdx.y);
    int length = Low::split(f.rank), begin = blockIdx.x * length, end = min(begin + length, a.low.k);
    if (tile.rows > 0 && f.rank > 0 && begin < end) {
#pragma unroll 1
        for (int rank = 0; rank < f.rank; rank += RANK_STEP) {
            shrink_tile<SHRINK_WARPS, 1, FRAGMENTS>({a.x, a.low.rows, a.low.k}, tile, f, rank, begin, end, sums, [] {}, [&](int row, int number, float sum) {
                a.low.of(blockIdx.y, tile.row[row])[blockIdx.x * f.rank + rank + number] = sum * a.factor;
            });
        }
    }
    wait_for_earlier_kernels();
}

extern "C" __global__ void __launch_bounds__(SHRINK_THREADS, SHRINK_BLOCKS) adapter_shrink(const __grid_constant__ ShrinkArguments a) { shrink<false>(a); }
extern "C" __global__ void __launch_bounds__(SHRINK_THREADS, SHRINK_BLOCKS) adapter_shrink_fragments(const __grid_constant__ ShrinkArguments a) { shrink<true>(a); }

// The product of a row of B with the products of A of a tile's rows. All threads of a block run it.
class Expansion {
    const Factors f;
    int feature;    // -1: there is none
    float b[RANK_STEP];

    __device__ __forceinline__ void load(int rank) {
#pragma unroll
        for (int r = 0; r < RANK_STEP; r++) b[r] = 0;
        if (feature < 0) return;
        load_factors(f.b, f.b_type, (size_t)feature * f.rank + rank, b);
    }

public:
    // Loads the first numbers of the row of B, which depend on no kernel.
    __device__ __forceinline__ Expansion(const RowTile& tile, int projection, int feature)
        : f(factors_of(tile, projection)), feature(feature) {
        if (f.rank > 0) load(0);
    }
    __device__ __forceinline__ bool is_adapted() const { return f.rank > 0; }
    // Adds scale * B (A x) to a number of each row, after the wait for shrink.
    __device__ __forceinline__ void add(const Low& low, int projection, const RowTile& tile, float (&y)[TILE_ROWS],
                                        float (&shared)[TILE_ROWS][RANK_STEP]) {
        if (f.rank == 0) return;
        float sums[TILE_ROWS] = {};
#pragma unroll 1
        for (int rank = 0; rank < f.rank; rank += RANK_STEP) {
            if (rank > 0) load(rank);
            __syncthreads();
            for (int i = threadIdx.x; i < tile.rows * RANK_STEP; i += EXPAND_THREADS) {
                shared[i / RANK_STEP][i % RANK_STEP] = low.sum(projection, tile.row[i / RANK_STEP], f.rank, rank + i % RANK_STEP);
            }
            __syncthreads();
#pragma unroll
            for (int i = 0; i < TILE_ROWS; i++) {
                if (i >= tile.rows) break;
#pragma unroll
                for (int r = 0; r < RANK_STEP; r++) sums[i] = fmaf(b[r], shared[i][r], sums[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < TILE_ROWS; i++) y[i] = fmaf(f.scale, sums[i], y[i]);
    }
};

struct ExpandArguments {
    void* y;                    // f32 or f16 [rows, y_stride]: the outputs of the projections follow each other
    const RowTile* tiles;
    Low low;
    int first;                  // projection of the group among those of the model
    int outputs[PROJECTIONS];   // of each projection; 0 beyond the last
    int y_stride;
    int is_f16;
};

// Grid: (the sum of ceil(outputs / EXPAND_THREADS), tiles)
extern "C" __global__ void __launch_bounds__(EXPAND_THREADS, EXPAND_BLOCKS) adapter_expand(const __grid_constant__ ExpandArguments a) {
    __shared__ float shared[TILE_ROWS][RANK_STEP];
    int projection = 0, column = 0, block = blockIdx.x, outputs = a.outputs[0];
#pragma unroll
    for (int i = 1; i < PROJECTIONS; i++) {
        int blocks = ceil_div(outputs, EXPAND_THREADS);
        if (block < blocks || a.outputs[i] == 0) continue;
        block -= blocks, column += outputs, projection = i, outputs = a.outputs[i];
    }
    __shared__ RowTile tile;
    load_tile(tile, a.tiles[blockIdx.y]);
    int feature = block * EXPAND_THREADS + threadIdx.x;
    bool exists = feature < outputs;
    Expansion expansion(tile, a.first + projection, exists ? feature : -1);
    wait_for_earlier_kernels();
    let_later_kernels_start();
    if (!expansion.is_adapted()) return;
    auto place = [&](int i) { return (size_t)tile.row[i] * a.y_stride + column + feature; };
    float y[TILE_ROWS];
    if (a.is_f16) {
#pragma unroll
        for (int i = 0; i < TILE_ROWS; i++) y[i] = exists && i < tile.rows ? f16_to_float(((const u16*)a.y)[place(i)]) : 0;
    } else {
#pragma unroll
        for (int i = 0; i < TILE_ROWS; i++) y[i] = exists && i < tile.rows ? ((const float*)a.y)[place(i)] : 0;
    }
    expansion.add(a.low, projection, tile, y, shared);
    if (!exists) return;
#pragma unroll
    for (int i = 0; i < TILE_ROWS; i++) {
        if (i >= tile.rows) break;
        if (a.is_f16) {
            ((u16*)a.y)[place(i)] = to_f16(y[i]);
        } else {
            ((float*)a.y)[place(i)] = y[i];
        }
    }
}

struct GluArguments {
    const void* gate_up;    // f32 or f16 [rows, 2 width]: gate, then up, of all rows
    u16* y;                 // f16 [rows, width], row-major or fragment-major
    const RowTile* tiles;   // of all rows, with an adapter or without one
    Low low;
    u32* overflow;          // [rows]: if it is 0, set to 1 + layer where gate, up or y of the row is not finite
    int first;              // projection of the gate among those of the model; up follows it
    int width;
    float scale;            // keeps the result within f16
    int activation;
    int layer;
    int fragment_major;     // whether y is
    int others_are_done;    // whether rows whose gate and up are not adapted stay as they are
};

// The gated linear unit of adapted projections, with the padding of fragment-major rows. Grid: (ceil(padded width / EXPAND_THREADS), tiles)
template <typename T>
__device__ __forceinline__ void gated_unit(const GluArguments& a) {
    __shared__ float shared[TILE_ROWS][RANK_STEP];
    __shared__ RowTile tile;
    load_tile(tile, a.tiles[blockIdx.y]);
    int feature = blockIdx.x * EXPAND_THREADS + threadIdx.x, groups = ceil_div(a.low.rows, GROUP_ROWS);
    bool exists = feature < a.width;
    Expansion gate(tile, a.first, exists ? feature : -1), up(tile, a.first + 1, exists ? feature : -1);
    wait_for_earlier_kernels();
    let_later_kernels_start();
    if (a.others_are_done && !gate.is_adapted() && !up.is_adapted()) return;
    float g[TILE_ROWS], u[TILE_ROWS];
#pragma unroll
    for (int i = 0; i < TILE_ROWS; i++) {
        bool loads = exists && i < tile.rows;
        const T* row = (const T*)a.gate_up + (size_t)(loads ? tile.row[i] : 0) * 2 * a.width;
        auto load = [&](int column) { return sizeof(T) == 2 ? f16_to_float(((const u16*)row)[column]) : ((const float*)row)[column]; };
        g[i] = loads ? load(feature) : 0, u[i] = loads ? load(a.width + feature) : 0;
    }
    gate.add(a.low, 0, tile, g, shared);
    up.add(a.low, 1, tile, u, shared);
    if (feature >= (a.fragment_major ? padded_k(a.width) : a.width)) return;
#pragma unroll
    for (int i = 0; i < TILE_ROWS; i++) {
        if (i >= tile.rows) break;
        int row = tile.row[i];
        float y = activate(a.activation, g[i]) * u[i] * a.scale;
        bool fits = fabsf(y) < 65520 && fabsf(g[i]) < INFINITY && fabsf(u[i]) < INFINITY;
        if (exists && !fits) atomicCAS(a.overflow + row, 0, a.layer + 1);
        a.y[a.fragment_major ? fragment_index(groups, row, feature) : (size_t)row * a.width + feature] = exists ? to_f16(y) : (u16)0;
    }
}

extern "C" __global__ void __launch_bounds__(EXPAND_THREADS) adapter_glu_f32(const __grid_constant__ GluArguments a) { gated_unit<float>(a); }
extern "C" __global__ void __launch_bounds__(EXPAND_THREADS) adapter_glu_f16(const __grid_constant__ GluArguments a) { gated_unit<u16>(a); }

struct NormArguments {
    float* x;               // [rows, width]: the residual stream
    const float* weight;    // [width]
    u16* y;                 // f16 [rows, width], row-major or fragment-major
    const RowTile* tiles;   // of all rows, with an adapter or without one
    Low low;
    int first;              // projection among those of the model
    int width;
    float eps;
    int fragment_major;     // whether y is
};

constexpr int NORM_THREADS = 512;
constexpr int NORM_WARPS = NORM_THREADS / WARP;
constexpr int NORM_VALUES = 16;     // of a row, in the registers of a thread
constexpr int NORM_SPLITS = NORM_THREADS / RANK_STEP;

// Adds the products of RANK_STEP numbers of a row of B and of `low` for each value of a thread. Some rows of B are in flight together.
template <Type T>
__device__ __forceinline__ void add_products(const Factors& f, int rank, int width, const float (&low)[RANK_STEP], float (&added)[NORM_VALUES]) {
    constexpr int AHEAD = T != F32 && __CUDA_ARCH__ == 900 ? 4 : 1, PIECES = (T == F32 ? 4 : 2) * RANK_STEP / 16;
#pragma unroll
    for (int from = 0; from < NORM_VALUES; from += AHEAD) {
        if (from * NORM_THREADS >= width) break;
        uint4 b[AHEAD][PIECES];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            int i = min((int)threadIdx.x + (from + j) * NORM_THREADS, width - 1);
            const uint4* row = (const uint4*)((const u8*)f.b + ((size_t)i * f.rank + rank) * (T == F32 ? 4 : 2));
#pragma unroll
            for (int piece = 0; piece < PIECES; piece++) b[j][piece] = row[piece];
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            float values[RANK_STEP];
            load_values<T, RANK_STEP>(b[j], values);
#pragma unroll
            for (int r = 0; r < RANK_STEP; r++) added[from + j] = fmaf(values[r], low[r], added[from + j]);
        }
    }
}

// Adds scale * B (A x) to a row of the residual stream, and normalizes the sum. Grid: (TILE_ROWS, tiles); a block takes a row.
extern "C" __global__ void __launch_bounds__(NORM_THREADS) adapter_norm(const __grid_constant__ NormArguments a) {
    __shared__ float parts[NORM_SPLITS][RANK_STEP], low[RANK_STEP], warp_sums[NORM_WARPS];
    __shared__ RowTile tile;
    load_tile(tile, a.tiles[blockIdx.y]);
    bool exists = (int)blockIdx.x < tile.rows;
    int row = exists ? tile.row[blockIdx.x] : 0, groups = ceil_div(a.low.rows, GROUP_ROWS);
    Factors f = factors_of(tile, a.first);
    // Factors and weights depend on no kernel.
    int row_bytes = f.rank * (f.b_type == F32 ? 4 : 2);
    for (int i = threadIdx.x; exists && f.rank > 0 && i < a.width * row_bytes / 128; i += NORM_THREADS) prefetch((const u8*)f.b + (size_t)i * 128);
    float weight[NORM_VALUES], x[NORM_VALUES];
#pragma unroll
    for (int j = 0; j < NORM_VALUES; j++) {
        int i = threadIdx.x + j * NORM_THREADS;
        weight[j] = i < a.width ? a.weight[i] : 0;
    }
    wait_for_earlier_kernels();
    let_later_kernels_start();
    if (!exists) return;
#pragma unroll
    for (int j = 0; j < NORM_VALUES; j++) {
        int i = threadIdx.x + j * NORM_THREADS;
        x[j] = i < a.width ? a.x[(size_t)row * a.width + i] : 0;
    }
    float added[NORM_VALUES] = {};
#pragma unroll 1
    for (int rank = 0; rank < f.rank; rank += RANK_STEP) {
        int splits = ceil_div(a.low.k, Low::split(f.rank)), r = threadIdx.x % RANK_STEP;
        float part = 0;
        for (int i = threadIdx.x / RANK_STEP; i < splits; i += NORM_SPLITS) part += a.low.of(0, row)[i * f.rank + rank + r];
        parts[threadIdx.x / RANK_STEP][r] = part;
        __syncthreads();
        if (threadIdx.x < RANK_STEP) {
            float sum = 0;
#pragma unroll
            for (int i = 0; i < NORM_SPLITS; i++) sum += parts[i][r];
            low[r] = sum;
        }
        __syncthreads();
        if (f.b_type == F32) add_products<F32>(f, rank, a.width, low, added);
        if (f.b_type == F16) add_products<F16>(f, rank, a.width, low, added);
        if (f.b_type == BF16) add_products<BF16>(f, rank, a.width, low, added);
    }
    float sum = 0;
#pragma unroll
    for (int j = 0; j < NORM_VALUES; j++) {
        int i = threadIdx.x + j * NORM_THREADS;
        if (i < a.width) x[j] = fmaf(f.scale, added[j], x[j]);
        if (f.rank > 0 && i < a.width) a.x[(size_t)row * a.width + i] = x[j];
        sum += x[j] * x[j];
    }
    float factor = rsqrtf(block_sum(sum, warp_sums, NORM_WARPS) / a.width + a.eps);
    int stored = a.fragment_major ? padded_k(a.width) : a.width;
#pragma unroll
    for (int j = 0; j < NORM_VALUES; j++) {
        int i = threadIdx.x + j * NORM_THREADS;
        if (i < stored) a.y[a.fragment_major ? fragment_index(groups, row, i) : (size_t)row * a.width + i] = to_f16(x[j] * factor * weight[j]);
    }
}
