// Looks at block scales for bytes that are none. What pads swizzled ones may be anything.
#include "common/ptx.cuh"
#include "format/nvfp4.cuh"
#include "format/swizzle.cuh"

struct Arguments {
    const u8* scales;   // aligned to a word of them
    u32* found;         // in memory of the host: set to 1 if there is such a byte
    u64 words;          // of all rows
    u32 row_blocks;
    int swizzled;       // if not, there is one row
};

constexpr int THREADS = 256;

// A thread takes a word of up to four scales.
extern "C" __global__ void __launch_bounds__(THREADS) check_scales(const __grid_constant__ Arguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    u64 index = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (index >= a.words) return;
    u32 row_words = (a.row_blocks + SCALES_IN_WORD - 1) / SCALES_IN_WORD;
    u32 row = index / row_words, word = index % row_words, left = a.row_blocks - word * SCALES_IN_WORD;
    const u8* at = a.scales + scale_row(a.swizzled, row, a.row_blocks) + (u64)word * scale_word_stride(a.swizzled);
    u32 scales = 0;
    if (left >= SCALES_IN_WORD) {
        scales = *(const u32*)at;
    } else {
        for (u32 i = 0; i < left; i++) scales |= (u32)at[i] << 8 * i;
    }
    if (!are_block_scales(scales)) *a.found = 1;
}
