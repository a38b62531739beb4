// Attention of training on Hopper: as attention/training.cuh, for heads of 64 and 128 elements without a cap, by wgmma. A warpgroup takes
// 64 rows; operands come from swizzled tiles in shared memory, and probabilities from registers.
#pragma once
#include "attention/training.cuh"
#include "common/wgmma.cuh"

constexpr int WIDE_WARPGROUPS = 2, WIDE_ROWS = 64 * WIDE_WARPGROUPS, WIDE_THREADS = WARPGROUP * WIDE_WARPGROUPS;

// ROWS rows of D elements in shared memory, in blocks of 64 columns; see wgmma_swizzled().
template <int ROWS, int D>
struct WideTile {
    static constexpr int BLOCK_BYTES = ROWS * 128, BYTES = D / 64 * BLOCK_BYTES;
    u32 address;

    // Starts to copy rows from `first` on, `stride` elements apart; those past `rows` become zeros.
    __device__ __forceinline__ void load(const u16* from, int first, int rows, size_t stride) const {
        // A thread copies the same piece of rows whose numbers share the last three bits.
        constexpr int PIECES = D / 8, AT_ONCE = WIDE_THREADS / PIECES;
        static_assert(ROWS % AT_ONCE == 0 && AT_ONCE % 8 == 0, "whole rows of threads");
        int row = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
        u32 to = address + piece / 8 * BLOCK_BYTES + row * 128 + ((piece ^ row) & 7) * 16;
        from += (first + row) * stride + piece * 8;
#pragma unroll
        for (int i = 0; i < ROWS; i += AT_ONCE) copy_async_16(to + i * 128, from + i * stride, first + row + i < rows ? 16 : 0);
    }
    // An operand whose K runs along rows: rows from `row` on, elements from k on.
    __device__ __forceinline__ u64 along(int row, int k) const { return wgmma_swizzled(address + k / 64 * BLOCK_BYTES + row * 128 + k % 64 * 2, 16); }
    // An operand whose K runs down rows from `row` on, and whose N runs along them.
    __device__ __forceinline__ u64 down(int row) const { return wgmma_swizzled(address + row * 128, BLOCK_BYTES); }
};

// Begins c = 64 rows of x from `row` on, times the transpose of the first 8 N rows of y.
template <int D, int N, int X, int Y>
__device__ __forceinline__ void begin_product(float (&c)[N][4], const WideTile<X, D>& x, int row, const WideTile<Y, D>& y) {
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        if (k == 0)
            wgmma_bf16<false>(c, x.along(row, k), y.along(0, k));
        else
            wgmma_bf16<true>(c, x.along(row, k), y.along(0, k));
    }
}
// Begins sum += p times the first 16 K rows of y.
template <int D, int K, int Y>
__device__ __forceinline__ void begin_adding(float (&sum)[D / 8][4], const u32 (&p)[K][4], const WideTile<Y, D>& y) {
#pragma unroll
    for (int k = 0; k < K; k++) wgmma_bf16_rows(sum, p[k], y.down(16 * k));
}
// Accumulators as a left operand in bf16.
template <int K>
__device__ __forceinline__ void pack_left(u32 (&p)[K][4], const float (&c)[2 * K][4]) {
#pragma unroll
    for (int k = 0; k < K; k++) {
        p[k][0] = pack_bf16(c[2 * k][0], c[2 * k][1]), p[k][1] = pack_bf16(c[2 * k][2], c[2 * k][3]);
        p[k][2] = pack_bf16(c[2 * k + 1][0], c[2 * k + 1][1]), p[k][3] = pack_bf16(c[2 * k + 1][2], c[2 * k + 1][3]);
    }
}
