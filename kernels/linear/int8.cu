// GEMM with int8 rows on tensor cores: our own kernel for batches of decode steps, and for more rows the conversions around cuBLASLt's
// GEMM: codes to f16, which holds them exactly, and the scales of the weight's rows onto f32 products.
#include "format/int8.cuh"
#include "linear/matrices.cuh"

constexpr int THREADS = 256, WARPS = THREADS / WARP;

struct ProductArguments {
    const u16* x;           // f16 [m, k]
    Matrix matrices[MATRICES];  // of codes; the output features of one follow those of the one before
    void* out;              // [m, out_stride]
    float factor;           // of the product
    int output;
    int m;
    int k;                  // a multiple of 16
    int out_stride;
    int split_k;            // blocks of a cluster, which share K; 1 before Hopper
};

constexpr int BLOCK_ROWS = 128;     // of the weight: 16 a warp
constexpr int DEPTH = 64;           // of K in a step: 16 a lane. Two steps share the same 128 bytes of a row.
constexpr int STAGES = 4;           // of activations in shared memory
constexpr int X_PITCH = 2 * DEPTH + 16;  // bytes from row to row, so that a quarter of a warp reads all banks
static_assert(BLOCK_ROWS == WARPS * 16, "a warp has the rows of one fragment");
static_assert((STAGES & (STAGES - 1)) == 0, "stages are numbered by the low bits of a step");

using BlockPlace = Place<BLOCK_ROWS>;
static_assert(sizeof(BlockPlace) == 24, "the launcher's shared memory has room for it");

// The first element of K of piece i of a step; a piece is half of what a lane takes.
__device__ __forceinline__ int element_of(int step, int i) { return step / 2 * (2 * DEPTH) + i / 2 * 32 + step % 2 * 16 + i % 2 * 8; }

// 16 x TOKENS outputs per warp. The order of K is free as long as both operands share it: a lane takes 16 neighbours in a step, so that
// it loads codes and activations 16 bytes at a time. Its k-th word of codes is the k-th of four fragments.
template <int TOKENS>
__device__ __forceinline__ void product(const ProductArguments& a) {
    constexpr int GROUPS = TOKENS / 8, PIECES = TOKENS * DEPTH / 8;
    constexpr int AHEAD = TOKENS > 32 ? 2 : 4;  // steps of codes in registers; with more, those of 64 tokens spill
    extern __shared__ __align__(16) char shared[];
    int lane = lane_id(), g = lane / 4, t = lane % 4, warp = threadIdx.x / WARP, split = blockIdx.z;
    BlockPlace place(a.matrices);
    // The loop needs the registers.
    BlockPlace& kept = *(BlockPlace*)(shared + STAGES * TOKENS * X_PITCH);
    if (threadIdx.x == 0) kept = place;
    int first_token = blockIdx.y * TOKENS;
    int all_steps = ceil_div(a.k, 2 * DEPTH) * 2, begin = all_steps * split / a.split_k, end = all_steps * (split + 1) / a.split_k;
    u32 staged = shared_address(shared);

    // Beyond the last row, the last one is read and nothing is stored.
    const u8* rows[2];
#pragma unroll
    for (int i = 0; i < 2; i++) rows[i] = (const u8*)place.weight + (size_t)min(place.first_row + warp * 16 + g + 8 * i, place.rows - 1) * a.k;
    uint4 codes[AHEAD][2];
    auto load = [&](int step, uint4(&to)[2]) {
        int k = element_of(step, 2 * t);
        bool is_there = step < end && k < a.k;
#pragma unroll
        for (int i = 0; i < 2; i++) to[i] = is_there ? *(const uint4*)(rows[i] + k) : make_uint4(0, 0, 0, 0);
    };
    // Weights do not depend on earlier kernels.
#pragma unroll
    for (int i = 0; i < AHEAD; i++) load(begin + i, codes[i]);
    wait_for_earlier_kernels();
    let_later_kernels_start();

    auto stage = [&](int step) {
        for (int i = threadIdx.x; i < PIECES; i += THREADS) {
            int token = i / (DEPTH / 8), column = element_of(step, i % (DEPTH / 8));
            bool is_there = first_token + token < a.m && column < a.k;
            const u16* from = a.x + (is_there ? (size_t)(first_token + token) * a.k + column : 0);
            copy_async_16(staged + (step % STAGES * TOKENS + token) * X_PITCH + i % (DEPTH / 8) * 16, from, is_there ? 16 : 0);
        }
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (begin + i < end) stage(begin + i);
        copy_async_commit();
    }

    float sums[GROUPS][4] = {};
    for (int first = begin; first < end; first += AHEAD) {
#pragma unroll
        for (int ahead = 0; ahead < AHEAD; ahead++) {
            int step = first + ahead;
            if (step >= end) break;
            copy_async_wait<STAGES - 2>();
            __syncthreads();
            if (step + STAGES - 1 < end) stage(step + STAGES - 1);
            copy_async_commit();

            u32 words[2][4] = {{codes[ahead][0].x, codes[ahead][0].y, codes[ahead][0].z, codes[ahead][0].w},
                               {codes[ahead][1].x, codes[ahead][1].y, codes[ahead][1].z, codes[ahead][1].w}};
            load(step + AHEAD, codes[ahead]);
            u32 from = staged + (step % STAGES * TOKENS + g) * X_PITCH + 32 * t;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 weights[2][4];
#pragma unroll
                for (int i = 0; i < 2; i++) {
#pragma unroll
                    for (int row = 0; row < 2; row++) int8_pairs(words[row][2 * half + i], weights[i][row], weights[i][row + 2]);
                }
#pragma unroll
                for (int group = 0; group < GROUPS; group++) {
                    uint4 x = load_shared_16(from + group * 8 * X_PITCH + 16 * half);
                    mma_f16(sums[group], weights[0][0], weights[0][1], weights[0][2], weights[0][3], x.x, x.y);
                    mma_f16(sums[group], weights[1][0], weights[1][1], weights[1][2], weights[1][3], x.z, x.w);
                }
            }
        }
    }

    auto store = [&](int warp, int group, const float (&c)[4]) {
        const Matrix& matrix = a.matrices[kept.matrix];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int row = kept.first_row + warp * 16 + g + 8 * i;
            if (row >= kept.rows) continue;
            float scale = matrix.scales[row], bias = matrix.bias ? matrix.bias[row] : 0;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int token = first_token + 8 * group + 2 * t + j;
                if (token >= a.m) continue;
                float y = c[2 * i + j] * a.factor * scale + bias;
                size_t to = (size_t)token * a.out_stride + kept.first_column + row;
                if (a.output == STORE_F32) ((float*)a.out)[to] = y;
                if (a.output == ADD_F32) ((float*)a.out)[to] += y;
                if (a.output == STORE_F16) ((u16*)a.out)[to] = to_f16(y);
            }
        }
    };
#if __CUDA_ARCH__ >= 900
    if (a.split_k > 1) {
        static_assert(WARPS * GROUPS * WARP * 16 <= STAGES * TOKENS * X_PITCH, "sums take the place of activations");
        sum_over_cluster<WARPS>(sums, shared, split, a.split_k, store);
        return;
    }
#endif
#pragma unroll
    for (int group = 0; group < GROUPS; group++) store(warp, group, sums[group]);
}

#if __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
constexpr int BLOCKS_OF_64 = 1;     // of a multiprocessor; with two, registers spill
#else
constexpr int BLOCKS_OF_64 = 2;
#endif

#define KERNEL(tokens, blocks) \
    extern "C" __global__ void __launch_bounds__(THREADS, blocks) linear_int8_product_##tokens(const __grid_constant__ ProductArguments a) { product<tokens>(a); }

// Grid: (sum of ceil(rows / BLOCK_ROWS), ceil(m / tokens), split_k), in clusters along K. Shared memory: STAGES * tokens * X_PITCH bytes and a Place.
KERNEL(8, 2)
KERNEL(16, 2)
KERNEL(32, 2)
KERNEL(64, BLOCKS_OF_64)

struct HalvesArguments {
    const uint4* codes;     // INT8_CODES each
    uint4* out;             // f16
    u64 pieces;
};

// Grid: (ceil(pieces / THREADS))
extern "C" __global__ void __launch_bounds__(THREADS) linear_int8_to_f16(const __grid_constant__ HalvesArguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    u64 i = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.pieces) return;
    uint4 piece = a.codes[i];
    u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
    float v[INT8_CODES];
#pragma unroll
    for (int j = 0; j < 4; j++) int8_codes(words[j], v + 4 * j);
    auto pair = [&](int j) { return pack_f16(v[j], v[j + 1]); };
    a.out[2 * i] = make_uint4(pair(0), pair(2), pair(4), pair(6));
    a.out[2 * i + 1] = make_uint4(pair(8), pair(10), pair(12), pair(14));
}

struct ScaleArguments {
    float* y;               // rows of products, `stride` apart
    const float* scales;    // [width]
    int width;
    int stride;
};

// Grid: (ceil(width / THREADS), rows)
extern "C" __global__ void __launch_bounds__(THREADS) linear_int8_scale(const __grid_constant__ ScaleArguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < a.width) a.y[(size_t)blockIdx.y * a.stride + i] *= a.scales[i];
}
