// Converts block scales between the layouts of format/swizzle.cuh. A thread takes the scales of four neighbouring blocks of a row.
#include "common/ptx.cuh"
#include "format/swizzle.cuh"

struct Arguments {
    const u8* from;
    u8* to;
    u64 from_stride;    // bytes from row to row of row-major input
    u64 words;          // of all rows, including padding where that is written
    u32 rows;
    u32 row_blocks;
};

constexpr int THREADS = 256;

// Row-major to swizzled, padded with zeros.
extern "C" __global__ void __launch_bounds__(THREADS) swizzle_scales(const __grid_constant__ Arguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    u64 index = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (index >= a.words) return;
    u32 row_words = (a.row_blocks + SCALES_IN_WORD - 1) / SCALES_IN_WORD;
    u32 row = index / row_words, word = index % row_words;
    u32 scales = 0;
    for (u32 i = 0; i < SCALES_IN_WORD; i++) {
        u32 block = word * SCALES_IN_WORD + i;
        if (row < a.rows && block < a.row_blocks) scales |= (u32)a.from[row * a.from_stride + block] << 8 * i;
    }
    *(u32*)(a.to + scale_row(true, row, a.row_blocks) + (u64)word * scale_word_stride(true)) = scales;
}

// Swizzled to row-major without gaps.
extern "C" __global__ void __launch_bounds__(THREADS) unswizzle_scales(const __grid_constant__ Arguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    u64 index = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (index >= a.words) return;
    u32 row_words = (a.row_blocks + SCALES_IN_WORD - 1) / SCALES_IN_WORD;
    u32 row = index / row_words, word = index % row_words;
    const u8* from = a.from + scale_row(true, row, a.row_blocks) + (u64)word * scale_word_stride(true);
    u8* to = a.to + (u64)row * a.row_blocks + word * SCALES_IN_WORD;
    for (u32 i = 0; i < SCALES_IN_WORD; i++)
        if (word * SCALES_IN_WORD + i < a.row_blocks) to[i] = from[i];
}
