// Checks for bytes that are not valid block scales. The padding of swizzled scales may hold anything.
#include "common/note.cuh"
#include "common/ptx.cuh"
#include "format/nvfp4.cuh"
#include "format/swizzle.cuh"

struct Scales {
    const u8* scales;   // aligned to a word of them
    u64 words;          // of all rows
    u64 first;          // the number of the first scale, for the note
    u32 row_blocks;
    int swizzled;       // if not, all scales are passed as one row
};

struct Arguments {
    Scales matrices[2];
    Note note;          // the number of a scale in row-major order, and its byte
};

constexpr int THREADS = 256;

// A thread takes a word of up to four scales.
extern "C" __global__ void __launch_bounds__(THREADS) check_scales(const __grid_constant__ Arguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    u64 index = (u64)blockIdx.x * THREADS + threadIdx.x, before = a.matrices[0].words;
    bool second = index >= before;
    const Scales& m = a.matrices[second];
    if (second) index -= before;
    if (index >= m.words) return;
    u32 row_words = (m.row_blocks + SCALES_IN_WORD - 1) / SCALES_IN_WORD;
    u32 row = index / row_words, word = index % row_words, left = m.row_blocks - word * SCALES_IN_WORD;
    const u8* at = m.scales + scale_row(m.swizzled, row, m.row_blocks) + (u64)word * scale_word_stride(m.swizzled);
    u32 scales = 0;
    if (left >= SCALES_IN_WORD) {
        scales = *(const u32*)at;
    } else {
        for (u32 i = 0; i < left; i++) scales |= (u32)at[i] << 8 * i;
    }
    u32 invalid = not_block_scales(scales);
    if (!invalid) return;
    u32 i = (__ffs(invalid) - 1) / 8;
    take_note(a.note, m.first + (u64)row * m.row_blocks + word * SCALES_IN_WORD + i, scales >> 8 * i & 0xff);
}
