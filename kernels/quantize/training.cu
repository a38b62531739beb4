// NVFP4 operands of training's GEMMs, as values that bfloat16 holds exactly: rows for a product along their width, and rotated columns for
// one along tokens. Mirrors src/format/operand.rs bit for bit. Also rounds rows of tables to int8, as src/format/int8.rs.
#include "common/reduce.cuh"
#include "format/random.cuh"
#include "quantize/block.cuh"

// Rounding rules; KEEP leaves values as they are.
enum Rule { RULE_AMAX, RULE_FOUR_OVER_SIX, RULE_STOCHASTIC, RULE_KEEP, RULE_INT8 };

constexpr int WARPS = THREADS / WARP;
constexpr int MAXIMA = 256;             // partial maxima of an array
constexpr int ROTATED = 16;             // tokens that are rotated together
constexpr u32 ROTATION_SIGNS = 0x6b89;
constexpr float INT8_LARGEST = 127;
static_assert(MAXIMA == THREADS, "a thread for each partial maximum");
static_assert(ROTATED == BLOCK, "rotated tokens are a block");

struct RowsArguments {
    const uint4* x;         // bf16 [rows, 16 blocks]
    uint4* y;               // bf16, of the same size; may be x
    u64 key;
    int blocks;
    int rule;
};

struct MaximaArguments {
    const uint4* x;         // bf16
    float* maxima;          // [MAXIMA]
    u64 pieces;             // of eight elements
};

struct ColumnsArguments {
    const u32* x;           // bf16 [rows, 2 pairs]
    u32* y;                 // bf16, rows in groups of 16
    const float* maxima;    // [MAXIMA]
    u64 key;
    int rows;
    int pairs;
    int rule;
};

__device__ __forceinline__ float global_of(float amax) { return power_for(amax, 10); }

__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fffffffu); }

// The magnitude of a value; infinity if it is not finite.
__device__ __forceinline__ float magnitude_of(float x) { return is_finite(x) ? fabsf(x) : INFINITY; }

// Rounds a block of finite values, whose indices rise by `stride`.
__device__ __forceinline__ void round_block(float (&x)[BLOCK], float global, int rule, u64 key, u32 index, u32 stride) {
    float amax = largest_magnitude(x);
    u32 scale = 0;
    if (amax > 0) {
        if (rule == RULE_STOCHASTIC) scale = encode_scale_up(amax / E2M1_MAX / global);
        else if (rule == RULE_FOUR_OVER_SIX) scale = four_over_six(x, amax, global);
        else scale = encode_scale_above_zero(amax / E2M1_MAX / global);
    }
    float step = step_of(scale, global), decoded = scale_to_float(scale);
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        float q = scale ? fabsf(x[i]) / step : 0;
        u32 code = rule == RULE_STOCHASTIC ? stochastic(q, random_words(key, index + i * stride).x) : nearest_even(q);
        x[i] = copysignf(magnitude(code) * decoded * global, x[i]);
    }
}

// Rounds values of a row to int8, under the row's scale. For a row of zeros any scale will do.
__device__ __forceinline__ void round_int8(float (&x)[BLOCK], float scale) {
#pragma unroll
    for (int i = 0; i < BLOCK; i++) x[i] = fminf(fmaxf(rintf(x[i] / scale), -INT8_LARGEST), INT8_LARGEST) * scale;
}

// Grid: (rows)
extern "C" __global__ void __launch_bounds__(THREADS) train_operand_rows(const __grid_constant__ RowsArguments a) {
    __shared__ float maxima[WARPS];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    const uint4* x = a.x + (u64)blockIdx.x * a.blocks * 2;
    uint4* y = a.y + (u64)blockIdx.x * a.blocks * 2;
    float amax = 0;
    for (int b = threadIdx.x; b < a.blocks; b += THREADS) {
        float values[BLOCK];
        load_values<BF16, BLOCK>(x + 2 * b, values);
#pragma unroll
        for (int i = 0; i < BLOCK; i++) amax = fmaxf(amax, magnitude_of(values[i]));
    }
    amax = block_max(amax, maxima, WARPS);
    float global = global_of(amax), scale = amax / INT8_LARGEST > 0 ? amax / INT8_LARGEST : 1;
    for (int b = threadIdx.x; b < a.blocks; b += THREADS) {
        float values[BLOCK];
        load_values<BF16, BLOCK>(x + 2 * b, values);
        if (is_finite(amax) && a.rule == RULE_INT8) {
            round_int8(values, scale);
        } else if (is_finite(amax)) {
            round_block(values, global, a.rule, a.key, (blockIdx.x * a.blocks + b) * BLOCK, 1);
        } else {
#pragma unroll
            for (int i = 0; i < BLOCK; i++) values[i] = not_a_number();
        }
        u32 words[BLOCK / 2];
#pragma unroll
        for (int i = 0; i < BLOCK / 2; i++) words[i] = pack_bf16(values[2 * i], values[2 * i + 1]);
        y[2 * b] = make_uint4(words[0], words[1], words[2], words[3]);
        y[2 * b + 1] = make_uint4(words[4], words[5], words[6], words[7]);
    }
}

// Grid: (MAXIMA)
extern "C" __global__ void __launch_bounds__(THREADS) train_operand_maxima(const __grid_constant__ MaximaArguments a) {
    __shared__ float maxima[WARPS];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    float amax = 0;
    for (u64 i = blockIdx.x * THREADS + threadIdx.x; i < a.pieces; i += MAXIMA * THREADS) {
        float values[PIECE];
        load_bf16(a.x + i, values);
#pragma unroll
        for (int e = 0; e < PIECE; e++) amax = fmaxf(amax, magnitude_of(values[e]));
    }
    amax = block_max(amax, maxima, WARPS);
    if (threadIdx.x == 0) a.maxima[blockIdx.x] = amax;
}

__device__ __forceinline__ void rotate(float (&x)[ROTATED]) {
#pragma unroll
    for (int i = 0; i < ROTATED; i++)
        if (ROTATION_SIGNS >> i & 1) x[i] = -x[i];
#pragma unroll
    for (int width = 1; width < ROTATED; width *= 2)
#pragma unroll
        for (int i = 0; i < ROTATED; i++)
            if (!(i & width)) {
                float a = x[i], b = x[i + width];
                x[i] = a + b, x[i + width] = a - b;
            }
#pragma unroll
    for (int i = 0; i < ROTATED; i++) x[i] *= 0.25f;
}

// Rows beyond the last count as zeros. Grid: (ceil(pairs / THREADS), ceil(rows / ROTATED))
extern "C" __global__ void __launch_bounds__(THREADS) train_operand_columns(const __grid_constant__ ColumnsArguments a) {
    __shared__ float maxima[WARPS];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    float amax = fminf(4 * block_max(a.maxima[threadIdx.x], maxima, WARPS), 3.4028235e38f);
    bool finite = is_finite(block_max(a.maxima[threadIdx.x], maxima, WARPS));
    float global = global_of(amax);
    int pair = blockIdx.x * THREADS + threadIdx.x, first = blockIdx.y * ROTATED;
    if (pair >= a.pairs) return;
    u32 words[ROTATED];
#pragma unroll
    for (int i = 0; i < ROTATED; i++) words[i] = first + i < a.rows ? a.x[(u64)(first + i) * a.pairs + pair] : 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float x[ROTATED];
#pragma unroll
        for (int i = 0; i < ROTATED; i++) x[i] = bf16_to_float((u16)(words[i] >> 16 * half));
        rotate(x);
        u32 index = (u32)first * a.pairs * 2 + 2 * pair + half;
        if (a.rule != RULE_KEEP && finite) round_block(x, global, a.rule, a.key, index, 2 * a.pairs);
#pragma unroll
        for (int i = 0; i < ROTATED; i++) {
            u32 bits = pack_bf16(finite ? x[i] : not_a_number(), 0) & 0xffffu;
            words[i] = half ? (words[i] & 0xffffu) | bits << 16 : (words[i] & 0xffff0000u) | bits;
        }
    }
#pragma unroll
    for (int i = 0; i < ROTATED; i++) a.y[(u64)(first + i) * a.pairs + pair] = words[i];
}
