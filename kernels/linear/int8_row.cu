// One to four rows of activations times int8 rows, on tensor cores: y[m, n] = sum over k of x[m, k] w[n, k]. Bound by reading the weights
// once.
//
// A tile is FEATURES output features of a matrix. Blocks take consecutive tiles. A block lines up the steps along K of its tiles, tile after
// tile, and cuts that line into equal shares for its warps, whose sums for a tile are added up in the order of the warps. A warp streams its
// share through a ring of its own.
//
// The weights are the A operand of the matrix instruction. Its rows 0 to 7 are 64 elements of K of the tile's features, rows 8 to 15 the 64
// elements after them; in B, even columns are the activations of the former, odd columns those of the latter, two columns for each row of
// activations. The order of K is free as long as both operands share it: a lane takes 16 neighbours of each.
#include "linear/dense.cuh"
#include "linear/int8_ring.cuh"

constexpr int BLOCK_WARPS = 16, BLOCK_THREADS = BLOCK_WARPS * WARP;
constexpr int FEATURES = 8;
constexpr int SIDE_K = 64, TURN_K = 2 * SIDE_K;     // of rows 0 to 7 of A; of four matrix instructions
using Ring = Int8Ring<FEATURES>;
static_assert(STEP_K == 2 * TURN_K, "a step is two turns");

// The shares of the warps in a block's line of steps.
struct Shares {
    int steps, total;   // of a tile; of all tiles

    __device__ __forceinline__ int begin(int warp) const { return (int)((u32)total * (u32)warp / BLOCK_WARPS); }
    // The warp that has a step.
    __device__ __forceinline__ int owner(int step) const {
        int warp = (int)((u32)step * BLOCK_WARPS / (u32)total);
        while (begin(warp + 1) <= step) warp++;
        return warp;
    }
};

// The weights of a warp's share, in its ring.
template <int STAGES>
class Weights {
    const Arguments& a;
    Ring ring;
    int steps, tile, step, left;    // the next step to request; how many are left
    const u8* from = nullptr;       // where the first piece of it is that the lane copies
    int k = 0, below = 0;           // the first element of that piece; how many rows of the matrix are below its row

public:
    __device__ __forceinline__ Weights(const Arguments& a, int steps, int tile, int step, int count, u32 ring)
        : a(a), ring(ring), steps(steps), tile(tile), step(step), left(count) {
        find();
    }
    // Requests the next step for a stage, or nothing after the last one. Each stage is requested in turn, when no lane uses it any more.
    __device__ __forceinline__ void request(int stage) {
        if (left > 0) {
            ring.request(stage, from, below, a.k, k < a.k);
            from += STEP_K, k += STEP_K, left--;
            if (++step == steps) step = 0, tile++, find();
        }
        copy_async_commit();
    }
    // Waits for the oldest step requested.
    __device__ __forceinline__ void wait() const {
        copy_async_wait<STAGES - 1>();
        __syncwarp();
    }
    // The lane's 16 codes for each side of a turn of the step in a stage.
    __device__ __forceinline__ void take(int stage, int turn, uint4 (&codes)[2]) const {
#pragma unroll
        for (int side = 0; side < 2; side++) codes[side] = ring.take(stage, 2 * turn + side);
    }

private:
    __device__ __forceinline__ void find() {
        if (left == 0) return;
        Place place(a.matrices, tile, FEATURES);
        int row = place.first_row + Ring::first_row();
        k = step * STEP_K + Ring::first_k(), below = place.rows - 1 - row;
        from = (const u8*)place.weight + (size_t)row * a.k + k;
    }
};

// An output of the block, which a thread adds up and stores: of ROWS rows of activations for each feature.
template <int ROWS>
struct Result {
    int slot, parts;        // of the first sum, and how many
    int row, column = -1;   // of the output; no column beyond the last row or feature
    float scale = 0, bias = 0;

    __device__ __forceinline__ Result(const Arguments& a, const Shares& shares, int first_tile, int output) {
        constexpr int TILE_OUTPUTS = FEATURES * ROWS;
        int tile = output / TILE_OUTPUTS, in_tile = output % TILE_OUTPUTS, first = tile * shares.steps, warp = shares.owner(first);
        slot = (tile + warp) * TILE_OUTPUTS + in_tile, parts = shares.owner(first + shares.steps - 1) - warp + 1;
        Place place(a.matrices, first_tile + tile, FEATURES);
        int feature = place.first_row + in_tile / ROWS;
        row = in_tile % ROWS;
        if (row >= a.m || feature >= place.rows) return;
        const Matrix& matrix = a.matrices[place.matrix];
        column = place.first_column + feature, scale = matrix.scales[feature] * a.factor;
        if (matrix.bias) bias = matrix.bias[feature];
    }
};

// Adds a turn's products to the accumulators.
__device__ __forceinline__ void multiply(const uint4 (&codes)[2], u32 x, float (&c)[4]) {
    uint4 first = load_shared_16(x), second = load_shared_16(x + TURN_K);
    u32 low[4] = {codes[0].x, codes[0].y, codes[0].z, codes[0].w}, high[4] = {codes[1].x, codes[1].y, codes[1].z, codes[1].w};
    u32 pairs[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 a0, a1, a2, a3;
        int8_pairs(low[i], a0, a2), int8_pairs(high[i], a1, a3);
        mma_f16(c, a0, a1, a2, a3, pairs[2 * i], pairs[2 * i + 1]);
    }
}

// Grid: any number of blocks, at most one for each tile. Shared memory: rings of STAGES stages; f16 [rows][turns][two][side][quarter][8]
// activations, of which a lane takes both pieces of a quarter; f32 [tiles of a block + BLOCK_WARPS][FEATURES][ROWS] sums.
template <int ROWS, int STAGES>
__device__ __forceinline__ void multiply_rows(const Arguments& a) {
    constexpr int RING_BYTES = STAGES * Ring::STAGE_BYTES;
    extern __shared__ __align__(128) char shared[];
    int thread = threadIdx.x, lane = lane_id(), warp = __shfl_sync(ALL_LANES, thread / WARP, 0);
    int all_tiles = 0, steps = ceil_div(a.k, STEP_K), row_pieces = steps * STEP_K / 8, rows = ROWS == 1 ? 1 : a.m;
#pragma unroll
    for (int i = 0; i < MATRICES; i++) all_tiles += ceil_div((int)a.matrices[i].rows, FEATURES);
    int each = all_tiles / gridDim.x, larger = all_tiles % gridDim.x, block = blockIdx.x;
    int first_tile = block * each + min(block, larger), tiles = each + (block < larger);
    Shares shares = {steps, tiles * steps};
    int begin = shares.begin(warp), left = shares.begin(warp + 1) - begin, tile = begin / steps, step = begin % steps;
    Weights<STAGES> weights(a, steps, first_tile + tile, step, left, shared_address(shared) + warp * RING_BYTES);
    // Weights depend on no kernel.
#pragma unroll
    for (int i = 0; i < STAGES; i++) weights.request(i);
    u32 x = shared_address(shared) + BLOCK_WARPS * RING_BYTES;
    float* sums = (float*)(shared + BLOCK_WARPS * RING_BYTES + rows * row_pieces * 16);
    int outputs = tiles * FEATURES * ROWS;
    Result<ROWS> result(a, shares, first_tile, min(thread, outputs - 1));

    if (!a.beside) wait_for_earlier_kernels();
    let_later_kernels_start();
    for (int row = 0; row < rows; row++) {
        for (int i = thread; i < row_pieces; i += BLOCK_THREADS) {
            uint4 piece = 8 * i < a.k ? load_global_16(a.x + (size_t)row * a.k + 8 * i) : make_uint4(0, 0, 0, 0);
            store_shared_16(x + (row * row_pieces + i / 16 * 16 + i % 2 * 8 + i % 16 / 2) * 16, piece);
        }
    }
    __syncthreads();

    // The columns of B are those of lanes' groups. Without as many rows, the last one is there again.
    u32 own_x = x + min(lane / 8, rows - 1) * row_pieces * 16 + lane / 4 % 2 * SIDE_K + lane % 4 * 16;
    int stage = 0;
    do {
        float c[4] = {};
        int now = min(left, steps - step);
        u32 from = own_x + step * (STEP_K * 2);
#pragma unroll 1
        for (int i = 0; i < now; i++) {
            uint4 codes[2][2];
            weights.wait();
            weights.take(stage, 0, codes[0]), weights.take(stage, 1, codes[1]);
            __syncwarp();
            weights.request(stage);
            stage = (stage + 1) % STAGES;
            multiply(codes[0], from, c), multiply(codes[1], from + 2 * TURN_K, c);
            from += STEP_K * 2;
        }
        // A warp without steps stores zeros. The two columns of C that a lane has are those of one row.
        if (lane % 4 < ROWS) sums[((tile + warp) * FEATURES + lane / 4) * ROWS + lane % 4] = c[0] + c[3];
        left -= now, step = 0, tile++;
    } while (left > 0);
    __syncthreads();

    for (int output = thread; output < outputs; output += BLOCK_THREADS) {
        if (output != thread) result = Result<ROWS>(a, shares, first_tile, output);
        float sum = 0;
        for (int i = 0; i < result.parts; i++) sum += sums[result.slot + i * (FEATURES * ROWS)];
        if (result.column >= 0) store_product(a, (size_t)result.row * a.out_stride + result.column, sum * result.scale + result.bias);
    }
    if (a.beside) wait_for_earlier_kernels();
}

// Blocks of a multiprocessor: one beside a block of another kernel where shared memory has room for both and kernels start early. Elsewhere
// registers would spill.
constexpr int BLOCKS = __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200 ? 2 : 1;
#define KERNEL(ROWS, STAGES)                                                                                                                     \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, BLOCKS) linear_int8_row_##ROWS##_##STAGES(const __grid_constant__ Arguments a) { \
        multiply_rows<ROWS, STAGES>(a);                                                                                                          \
    }
// The one with most stages for which there is memory beside a block of another kernel.
KERNEL(1, 4)
KERNEL(1, 2)
KERNEL(4, 4)
KERNEL(4, 3)
KERNEL(4, 2)
