// GEMM of many rows with f32 weights on tensor cores: y[m, n] = sum over k of x[m, k] w[n, k], for f16 x. For routers, whose logits decide
// by small differences.
//
// tf32 holds f16 exactly, and a weight as the sum of two numbers to 2^-22 of its magnitude: the nearest tf32, and the nearest to what is left.
// Tensor cores drop bits below the last place of a sum, so sums of a step go to f32 registers after it.
#include "common/ptx.cuh"
#include "linear/matrices.cuh"

struct Arguments {
    const u16* x;           // f16 [m, k]
    Matrix matrices[MATRICES];  // f32; the output features of one follow those of the one before
    void* out;              // [m, out_stride]
    float factor;           // of the product
    int output;
    int m;
    int k;                  // a multiple of 8
    int out_stride;
    int split_k;            // blocks of a cluster, which share K; 1 before Hopper
};

constexpr int THREADS = 256, WARPS = THREADS / WARP;
constexpr int BLOCK_ROWS = 64, BLOCK_TOKENS = 64;           // of the weight and of the activations
constexpr int ROW_WARPS = BLOCK_ROWS / 16, TOKEN_WARPS = WARPS / ROW_WARPS;
constexpr int GROUPS = BLOCK_TOKENS / TOKEN_WARPS / 8;      // of eight tokens, of a warp
constexpr int DEPTH = 32;           // of K in a step: eight neighbours a lane
constexpr int STAGES = 4;
// Bytes from row to row in shared memory, by which a quarter of a warp reads all banks.
constexpr int W_PITCH = 4 * DEPTH + 16, X_PITCH = 2 * DEPTH;
constexpr int X_OFFSET = BLOCK_ROWS * W_PITCH, STAGE_BYTES = X_OFFSET + BLOCK_TOKENS * X_PITCH;
static_assert(WARPS * GROUPS * WARP * 16 <= STAGES * STAGE_BYTES, "sums take the place of operands");
static_assert(STAGES * STAGE_BYTES == 53248, "the launcher asks for it");

// A weight as two tf32.
__device__ __forceinline__ void split(float w, u32& high, u32& low) {
    high = to_tf32(w);
    low = to_tf32(w - __uint_as_float(high));
}

// Grid: (sum of ceil(rows / BLOCK_ROWS), ceil(m / BLOCK_TOKENS), split_k), in clusters along K. Shared memory: STAGES * STAGE_BYTES.
extern "C" __global__ void __launch_bounds__(THREADS, 2) linear_tf32_product(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) char shared[];
    int lane = lane_id(), g = lane / 4, t = lane % 4, warp = threadIdx.x / WARP, split_index = blockIdx.z;
    int warp_row = warp % ROW_WARPS * 16, warp_token = warp / ROW_WARPS * 8 * GROUPS;
    Place place(a.matrices, blockIdx.x, BLOCK_ROWS);
    int first_token = blockIdx.y * BLOCK_TOKENS;
    int all_steps = ceil_div(a.k, DEPTH), begin = all_steps * split_index / a.split_k, end = all_steps * (split_index + 1) / a.split_k;
    u32 base = shared_address(shared);

    // Copies 16 bytes of a row, or zeros where there are none.
    auto stage_weights = [&](int step) {
        constexpr int PIECES = DEPTH / 4;
        for (int i = threadIdx.x; i < BLOCK_ROWS * PIECES; i += THREADS) {
            int row = place.first_row + i / PIECES, column = step * DEPTH + i % PIECES * 4;
            bool is_there = row < place.rows && column < a.k;
            const float* from = (const float*)place.weight + (is_there ? (size_t)row * a.k + column : 0);
            copy_async_16(base + step % STAGES * STAGE_BYTES + i / PIECES * W_PITCH + i % PIECES * 16, from, is_there ? 16 : 0);
        }
    };
    auto stage_activations = [&](int step) {
        constexpr int PIECES = DEPTH / 8;
        for (int i = threadIdx.x; i < BLOCK_TOKENS * PIECES; i += THREADS) {
            int token = first_token + i / PIECES, column = step * DEPTH + i % PIECES * 8;
            bool is_there = token < a.m && column < a.k;
            const u16* from = a.x + (is_there ? (size_t)token * a.k + column : 0);
            copy_async_16(base + step % STAGES * STAGE_BYTES + X_OFFSET + i / PIECES * X_PITCH + i % PIECES * 16, from, is_there ? 16 : 0);
        }
    };
    // Weights do not depend on earlier kernels.
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (begin + i < end) stage_weights(begin + i);
    }
    wait_for_earlier_kernels();
    let_later_kernels_start();
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (begin + i < end) stage_activations(begin + i);
        copy_async_commit();
    }

    float sums[GROUPS][4] = {};
    bool has_rows = place.first_row + warp_row < place.rows;
#pragma unroll 1
    for (int step = begin; step < end; step++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < end) {
            stage_weights(step + STAGES - 1);
            stage_activations(step + STAGES - 1);
        }
        copy_async_commit();
        if (!has_rows) continue;
        u32 w = base + step % STAGES * STAGE_BYTES + (warp_row + g) * W_PITCH + 32 * t;
        u32 x = base + step % STAGES * STAGE_BYTES + X_OFFSET + (warp_token + g) * X_PITCH + 16 * t;
        uint4 tokens[GROUPS];
#pragma unroll
        for (int group = 0; group < GROUPS; group++) tokens[group] = load_shared_16(x + group * 8 * X_PITCH);
        float part[GROUPS][4] = {};
        // A lane has two columns of each of four products.
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float4 rows[2] = {as_floats(load_shared_16(w + 16 * half)), as_floats(load_shared_16(w + 8 * W_PITCH + 16 * half))};
#pragma unroll
            for (int pair = 0; pair < 2; pair++) {
                u32 high[4], low[4];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    split(pair ? rows[i].z : rows[i].x, high[i], low[i]);
                    split(pair ? rows[i].w : rows[i].y, high[i + 2], low[i + 2]);
                }
#pragma unroll
                for (int group = 0; group < GROUPS; group++) {
                    uint4 all = tokens[group];
                    u32 word = half ? (pair ? all.w : all.z) : (pair ? all.y : all.x);
                    u32 b0 = __float_as_uint(f16_low(word)), b1 = __float_as_uint(f16_high(word));
                    mma_tf32(part[group], low, b0, b1);
                    mma_tf32(part[group], high, b0, b1);
                }
            }
        }
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
#pragma unroll
            for (int e = 0; e < 4; e++) sums[group][e] += part[group][e];
        }
    }

    auto store = [&](int warp, int group, const float (&c)[4]) {
        const Matrix& matrix = a.matrices[place.matrix];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int row = place.first_row + warp % ROW_WARPS * 16 + g + 8 * i;
            if (row >= place.rows) continue;
            float bias = matrix.bias ? matrix.bias[row] : 0;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int token = first_token + (warp / ROW_WARPS * GROUPS + group) * 8 + 2 * t + j;
                if (token >= a.m) continue;
                float y = c[2 * i + j] * a.factor + bias;
                store_product(a, (size_t)token * a.out_stride + place.first_column + row, y);
            }
        }
    };
#if __CUDA_ARCH__ >= 900
    if (a.split_k > 1) return sum_over_cluster(sums, shared, WARPS, split_index, a.split_k, store);
#endif
#pragma unroll
    for (int group = 0; group < GROUPS; group++) store(warp, group, sums[group]);
}
