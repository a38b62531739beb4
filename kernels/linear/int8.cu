// GEMM with int8 rows on tensor cores: our own kernel for batches of decode steps, and for more rows the conversions around cuBLASLt's
// GEMM: codes to f16, which holds them exactly, and the scales of the weight's rows onto f32 products.
#include "linear/int8_ring.cuh"
#include "linear/matrices.cuh"

constexpr int THREADS = 256;

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

constexpr int MAX_WARPS = THREADS / WARP - 1;   // that multiply
constexpr int WARP_ROWS = 16;       // of the weight
constexpr int DEPTH = 64, TURNS = STEP_K / DEPTH;   // elements of K of a turn, 16 a lane; turns of a step
constexpr int STAGES = 3;           // of a warp's ring
constexpr int X_STAGES = 4;         // of activations, which have a turn each
constexpr int X_PITCH = 2 * DEPTH + 16;  // bytes from row to row, so that a quarter of a warp reads all banks

using Ring = Int8Ring<WARP_ROWS>;

// 16 x TOKENS outputs per warp. Each warp streams its rows through a ring of its own; one more warp copies the block's activations, so that
// nobody waits for weights that were asked for before them. The order of K is free as long as both operands share it: a lane takes 16
// neighbours in a turn, so that it loads codes and activations 16 bytes at a time. Its k-th word of codes is the k-th of four fragments.
template <int TOKENS>
__device__ __forceinline__ void product(const ProductArguments& a) {
    constexpr int GROUPS = TOKENS / 8, X_BYTES = X_STAGES * TOKENS * X_PITCH;
    extern __shared__ __align__(128) char shared[];
    int lane = lane_id(), g = lane / 4, t = lane % 4, warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), warps = blockDim.x / WARP - 1, split = blockIdx.z;
    Place place(a.matrices, blockIdx.x, warps * WARP_ROWS);
    int first_token = blockIdx.y * TOKENS;
    int all_steps = ceil_div(a.k, STEP_K), step = all_steps * split / a.split_k, end = all_steps * (split + 1) / a.split_k;
    int first_k = step * STEP_K, turns = ceil_div(min(a.k, end * STEP_K) - first_k, DEPTH);
    u32 staged = shared_address(shared);
    float sums[GROUPS][4] = {};

    if (warp == warps) {
        // A lane copies a piece of every AT_ONCE-th token. Beyond the last token, it copies that one.
        constexpr int TOKEN_PIECES = DEPTH / 8, AT_ONCE = WARP / TOKEN_PIECES;
        int token = lane / TOKEN_PIECES, piece = lane % TOKEN_PIECES, k = first_k + piece * 8, below = a.m - 1 - first_token - token;
        const u16* from = a.x + (long long)(first_token + token) * a.k + k;
        auto copy = [&](int turn) {
            u32 to = staged + (turn % X_STAGES * TOKENS + token) * X_PITCH + piece * 16;
            bool is_there = k + turn * DEPTH < a.k;
#pragma unroll
            for (int i = 0; i < TOKENS && turn < turns; i += AT_ONCE) {
                const u16* source = is_there ? from + turn * DEPTH + (long long)min(i, below) * a.k : a.x;
                copy_async_16(to + i * X_PITCH, source, is_there ? 16 : 0);
            }
            copy_async_commit();
        };
        wait_for_earlier_kernels();
        let_later_kernels_start();
        for (int turn = 0; turn < X_STAGES - 1; turn++) copy(turn);
        for (int turn = 0; turn < turns; turn++) {
            copy_async_wait<X_STAGES - 2>();
            __syncthreads();
            copy(turn + X_STAGES - 1);
        }
    } else {
        Ring ring(staged + X_BYTES + warp * (STAGES * Ring::STAGE_BYTES));
        int row = min(place.first_row + warp * WARP_ROWS + Ring::first_row(), place.rows - 1), below = place.rows - 1 - row;
        const u8* from = (const u8*)place.weight + (size_t)row * a.k + Ring::first_k();
        auto request = [&](int stage, int step) {
            int k = step * STEP_K;
            if (step < end) ring.request(stage, from + k, below, a.k, k + Ring::first_k() < a.k);
            copy_async_commit();
        };
        // Weights do not depend on earlier kernels.
#pragma unroll
        for (int i = 0; i < STAGES; i++) request(i, step + i);
        wait_for_earlier_kernels();
        let_later_kernels_start();

        int stage = 0;
#pragma unroll 1
        for (int turn = 0; turn < turns; turn++) {
            int of_step = turn % TURNS;
            if (of_step == 0) copy_async_wait<STAGES - 1>();
            // For the copies of the other lanes, and for the activations.
            __syncthreads();
            uint4 rows[2] = {ring.take(stage, of_step), ring.take(stage, of_step, 8)};
            if (of_step == TURNS - 1) {
                __syncwarp();
                request(stage, step + STAGES);
                stage = stage + 1 < STAGES ? stage + 1 : 0, step++;
            }
            u32 words[2][4] = {{rows[0].x, rows[0].y, rows[0].z, rows[0].w}, {rows[1].x, rows[1].y, rows[1].z, rows[1].w}};
            u32 x = staged + (turn % X_STAGES * TOKENS + g) * X_PITCH + 32 * t;
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
                    uint4 pairs = load_shared_16(x + group * 8 * X_PITCH + 16 * half);
                    mma_f16(sums[group], weights[0][0], weights[0][1], weights[0][2], weights[0][3], pairs.x, pairs.y);
                    mma_f16(sums[group], weights[1][0], weights[1][1], weights[1][2], weights[1][3], pairs.z, pairs.w);
                }
            }
        }
    }

    auto store = [&](int warp, int group, const float (&c)[4]) {
        const Matrix& matrix = a.matrices[place.matrix];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int row = place.first_row + warp * WARP_ROWS + g + 8 * i;
            if (row >= place.rows) continue;
            float scale = matrix.scales[row], bias = matrix.bias ? matrix.bias[row] : 0;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int token = first_token + 8 * group + 2 * t + j;
                if (token >= a.m) continue;
                float y = c[2 * i + j] * a.factor * scale + bias;
                store_product(a, (size_t)token * a.out_stride + place.first_column + row, y);
            }
        }
    };
#if __CUDA_ARCH__ >= 900
    if (a.split_k > 1) {
        static_assert(MAX_WARPS * GROUPS * WARP * 16 <= X_BYTES, "sums take the place of activations");
        sum_over_cluster(sums, shared, warps, split, a.split_k, store);
        return;
    }
#endif
    if (warp == warps) return;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) store(warp, group, sums[group]);
}

#define KERNEL(TOKENS) \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) linear_int8_product_##TOKENS(const __grid_constant__ ProductArguments a) { product<TOKENS>(a); }

// Block: up to MAX_WARPS warps, and one more. Grid: (sum over the matrices of ceil(rows / (16 warps)), ceil(m / tokens), split_k), in
// clusters along K. Shared memory: X_STAGES * tokens * X_PITCH bytes of activations, and for each warp STAGES of Ring::STAGE_BYTES.
KERNEL(8)
KERNEL(16)
KERNEL(32)

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
