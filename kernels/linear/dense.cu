// GEMM with dense weights of any floating-point type, and of one row with int8 rows, accumulated in f32: y[m, n] = sum over k of x[m, k]
// w[n, k]. For the few matrices that a model keeps in more than 4 bits, and for large GEMMs without cuBLASLt. A warp takes an output
// feature and up to 8 rows of x at a time.
#include "common/ptx.cuh"
#include "common/reduce.cuh"
#include "format/int8.cuh"
#include "linear/matrices.cuh"

enum Kind { F32, F16, BF16, INT8 };

struct Arguments {
    const u16* x;           // f16 [m, k]
    Matrix matrices[MATRICES];  // of one kind; the output features of one follow those of the one before
    void* out;              // [m, out_stride]
    float factor;           // of the product
    int kind;               // of linear_dense and linear_dense_1
    int output;
    int m;
    int k;                  // a multiple of 16
    int out_stride;
};

constexpr int WARPS = 8;
constexpr int TOKENS = 8;    // of a block, unless there is only one

// The bits of a weight that a lane loads at once.
template <int KIND>
struct Bits {
    uint4 piece[KIND == F32 ? 2 : 1];

    Bits() = default;
    __device__ __forceinline__ Bits(const void* p, size_t i) {
        constexpr int SIZE = KIND == F32 ? 4 : KIND == INT8 ? 1 : 2;
        const uint4* from = (const uint4*)((const u8*)p + i * SIZE);
        piece[0] = from[0];
        if constexpr (KIND == F32) piece[1] = from[1];
    }
};

// The values of a weight that a lane loads at once, from element i on, which is a multiple of their number; int8 without the row's scale.
template <int KIND>
struct Values {
    static constexpr int COUNT = KIND == INT8 ? INT8_CODES : 8;
    float v[COUNT];

    __device__ __forceinline__ Values(const void* p, size_t i) : Values(Bits<KIND>(p, i)) {}
    __device__ __forceinline__ Values(const Bits<KIND>& bits) {
        uint4 piece = bits.piece[0];
        if constexpr (KIND == F32) {
            uint4 next = bits.piece[1];
            v[0] = __uint_as_float(piece.x), v[1] = __uint_as_float(piece.y), v[2] = __uint_as_float(piece.z), v[3] = __uint_as_float(piece.w);
            v[4] = __uint_as_float(next.x), v[5] = __uint_as_float(next.y), v[6] = __uint_as_float(next.z), v[7] = __uint_as_float(next.w);
        } else {
            u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if constexpr (KIND == INT8) {
                    int8_codes(words[j], v + 4 * j);
                } else {
                    v[2 * j] = KIND == F16 ? f16_low(words[j]) : bf16_to_float((u16)words[j]);
                    v[2 * j + 1] = KIND == F16 ? f16_high(words[j]) : bf16_to_float((u16)(words[j] >> 16));
                }
            }
        }
    }
};

// The first UNROLL pieces of a row are loaded before the kernel waits for earlier ones, which write no weights.
template <int KIND, int MAX_TOKENS, int UNROLL>
__device__ __forceinline__ void multiply(const Arguments& a) {
    int feature = blockIdx.x * WARPS + threadIdx.x / WARP, first = blockIdx.y * MAX_TOKENS, lane = lane_id();
    // Scales and bias are looked up after the product, for which sm_80 needs the registers.
    const void* weight = a.matrices[0].weight;
    int row = feature, rows = a.matrices[0].rows, which = 0;
#pragma unroll
    for (int i = 1; i < MATRICES; i++) {
        if (row < rows) continue;
        row -= rows;
        weight = a.matrices[i].weight, rows = a.matrices[i].rows, which = i;
    }
    bool has = row < rows;
    int tokens = min(MAX_TOKENS, a.m - first);
    float accumulators[MAX_TOKENS] = {};
    constexpr int COUNT = Values<KIND>::COUNT, STEP = COUNT * WARP;
    size_t start = (size_t)row * a.k;
    auto multiply_by = [&](const Values<KIND>& w, int i) {
#pragma unroll
        for (int m = 0; m < MAX_TOKENS; m++) {
            if (MAX_TOKENS > 1 && m >= tokens) continue;
#pragma unroll
            for (int part = 0; part < COUNT; part += 8) {
                Values<F16> x(a.x, (size_t)(first + m) * a.k + i + part);
#pragma unroll
                for (int j = 0; j < 8; j++) accumulators[m] += w.v[part + j] * x.v[j];
            }
        }
    };
    Bits<KIND> ahead[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        int i = COUNT * lane + STEP * u;
        if (has && i < a.k) ahead[u] = Bits<KIND>(weight, start + i);
    }
    wait_for_earlier_kernels();
    let_later_kernels_start();
    if (!has) return;
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        int i = COUNT * lane + STEP * u;
        if (i < a.k) multiply_by(Values<KIND>(ahead[u]), i);
    }
#pragma unroll UNROLL
    for (int i = COUNT * lane + STEP * UNROLL; i < a.k; i += STEP) multiply_by(Values<KIND>(weight, start + i), i);
#pragma unroll
    for (int m = 0; m < MAX_TOKENS; m++) accumulators[m] = warp_sum(accumulators[m]);
    if (lane != 0) return;
    const Matrix& matrix = a.matrices[which];
    float scale = KIND == INT8 ? matrix.scales[row] : 1;
#pragma unroll
    for (int m = 0; m < MAX_TOKENS; m++) {
        if (MAX_TOKENS > 1 && m >= tokens) continue;
        float y = accumulators[m] * a.factor * scale + (matrix.bias ? matrix.bias[row] : 0);
        size_t to = (size_t)(first + m) * a.out_stride + feature;
        if (a.output == STORE_F32) ((float*)a.out)[to] = y;
        if (a.output == ADD_F32) ((float*)a.out)[to] += y;
        if (a.output == STORE_F16) ((u16*)a.out)[to] = to_f16(y);
    }
}

template <bool IS_INT8, int MAX_TOKENS, int UNROLL>
__device__ __forceinline__ void run(const Arguments& a) {
    if constexpr (IS_INT8) return multiply<INT8, MAX_TOKENS, UNROLL>(a);
    switch (a.kind) {
        case F32: return multiply<F32, MAX_TOKENS, UNROLL>(a);
        case F16: return multiply<F16, MAX_TOKENS, UNROLL>(a);
        default: return multiply<BF16, MAX_TOKENS, UNROLL>(a);
    }
}

#define KERNEL(name, is_int8, tokens, unroll) \
    extern "C" __global__ void __launch_bounds__(WARPS* WARP) name(const __grid_constant__ Arguments a) { run<is_int8, tokens, unroll>(a); }

// Grid: (ceil(rows / WARPS), ceil(m / TOKENS)); for one token (ceil(rows / WARPS), m), with registers for more weights in flight. int8 has
// kernels of its own, because it needs more registers than the others can spare.
KERNEL(linear_dense, false, TOKENS, 2)
KERNEL(linear_dense_1, false, 1, 4)
KERNEL(linear_dense_int8_1, true, 1, 4)
