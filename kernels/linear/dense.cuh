// Dense weights of any floating-point type as operands of kernels that accumulate in f32, and the arguments of products with one row.
#pragma once
#include "common/ptx.cuh"
#include "linear/matrices.cuh"

enum Kind { F32, F16, BF16 };

struct Arguments {
    const u16* x;           // f16 [m, k]
    Matrix matrices[MATRICES];  // of one kind; the output features of one follow those of the one before
    void* out;              // [m, out_stride]
    float factor;           // of the product
    int kind;               // of linear_dense
    int output;
    int m;
    int k;                  // a multiple of 16
    int out_stride;
    int beside;             // of one row: whether the kernel runs beside its predecessor, which does not make x
};

constexpr int WARPS = 8, THREADS = WARPS * WARP;

// The bits of a weight that a lane loads at once.
template <int KIND>
struct Bits {
    static constexpr int SIZE = KIND == F32 ? 4 : 2;     // bytes of a weight
    uint4 piece[KIND == F32 ? 2 : 1];

    Bits() = default;
    __device__ __forceinline__ Bits(const void* p, size_t i) {
        const uint4* from = (const uint4*)((const u8*)p + i * SIZE);
        piece[0] = from[0];
        if constexpr (KIND == F32) piece[1] = from[1];
    }
    static __device__ __forceinline__ Bits zero() {
        Bits bits;
        for (uint4& piece : bits.piece) piece = make_uint4(0, 0, 0, 0);
        return bits;
    }
};

// The values of a weight that a lane loads at once, from element i on, which is a multiple of their number.
template <int KIND>
struct Values {
    static constexpr int COUNT = 8;
    static constexpr int STEP = COUNT * WARP;   // elements of a row that a warp loads at once
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
                v[2 * j] = KIND == F16 ? f16_low(words[j]) : bf16_to_float((u16)words[j]);
                v[2 * j + 1] = KIND == F16 ? f16_high(words[j]) : bf16_to_float((u16)(words[j] >> 16));
            }
        }
    }
};
