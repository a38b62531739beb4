// Dequantizes rows of two NVFP4 matrices to f16 or bf16 for the GEMM of cuBLASLt: the values times 2^-8, without the global scales. That is
// exact, because a code times its scale has six significant bits.
#include "common/ptx.cuh"
#include "format/nvfp4.cuh"
#include "format/swizzle.cuh"

struct RowSlice {
    const u8* codes;    // [.., k / 2]
    const u8* scales;   // [.., k / 16], or swizzled
    void* out;          // [rows, k]
    int first_row;      // of the slice, in codes and scales
    int rows;
    int swizzled;
};

struct Arguments {
    RowSlice slices[2];
    int k;
};

constexpr int THREADS = 256;
constexpr int WORD = 8;     // codes in 32 bits
constexpr int ROWS = 4;     // of a thread, whose loads are in flight together

// The number of blocks of the grid for a slice: threads follow each other along a row, and then ROWS rows further on.
__device__ __forceinline__ int blocks_of(const RowSlice& s, int words) {
    return (int)(((u64)ceil_div(s.rows, ROWS) * words + THREADS - 1) / THREADS);
}

template <bool BF16>
__device__ __forceinline__ void run(const Arguments& a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int words = a.k / WORD, blocks = blocks_of(a.slices[0], words), block = blockIdx.x;
    const RowSlice& s = block < blocks ? a.slices[0] : a.slices[1];
    u64 i = (u64)(block < blocks ? block : block - blocks) * THREADS + threadIdx.x;
    int row = (int)(i / words) * ROWS, word = (int)(i % words);
    u32 codes[ROWS], scales[ROWS];
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
        if (row + j >= s.rows) continue;
        int from = s.first_row + row + j, at = word / 2;
        codes[j] = ((const u32*)s.codes)[(size_t)from * words + word];
        scales[j] = s.scales[scale_row(s.swizzled, from, words / 2) + (size_t)(at / SCALES_IN_WORD) * scale_word_stride(s.swizzled) +
                             at % SCALES_IN_WORD];
    }
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
        if (row + j >= s.rows) continue;
        u32 scale = both_low(scale_pair(scales[j])), pairs[4];
        decode_pairs(codes[j], pairs);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            pairs[e] = mul_f16(pairs[e], scale);
            if (BF16) pairs[e] = pack_bf16(f16_low(pairs[e]), f16_high(pairs[e]));
        }
        // Pair e holds elements e and e + 4.
        ((uint4*)s.out)[(size_t)(row + j) * words + word] =
            make_uint4(__byte_perm(pairs[0], pairs[1], 0x5410), __byte_perm(pairs[2], pairs[3], 0x5410), __byte_perm(pairs[0], pairs[1], 0x7632),
                       __byte_perm(pairs[2], pairs[3], 0x7632));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) scaled_mm_dequantize_f16(const __grid_constant__ Arguments a) { run<false>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) scaled_mm_dequantize_bf16(const __grid_constant__ Arguments a) { run<true>(a); }
