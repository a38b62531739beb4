// Repacks rows of an NVFP4 weight from the layout of files and tensors to that of format/packed.cuh.
#include "common/ptx.cuh"
#include "format/packed.cuh"
#include "format/swizzle.cuh"

struct Arguments {
    const u8* codes;    // [.., k / 2]
    const u8* scales;   // [.., k / 16], or swizzled
    u8* chunks;         // of these rows
    int first_row;      // in codes and scales
    int rows;
    int k;
    int swizzled;
};

constexpr int THREADS = 256;
constexpr int WORDS = CHUNK_CODES / 4;

// A thread packs a word of codes; half of the threads also copy a scale. Grid: (ceil(words of the chunks along k / THREADS), ceil(rows /
// 8))
extern "C" __global__ void __launch_bounds__(THREADS) linear_pack(const __grid_constant__ Arguments a) {
    wait_for_earlier_kernels();
    int chunks = ceil_div(a.k, CHUNK_K), index = blockIdx.x * THREADS + threadIdx.x;
    int chunk = index / WORDS, word = index % WORDS;
    if (chunk >= chunks) return;
    u8* out = a.chunks + ((size_t)blockIdx.y * chunks + chunk) * CHUNK_BYTES;
    int first = blockIdx.y * CHUNK_ROWS, lane = word / 4, j = word % 4, row = first + lane / 4;
    u32 pairs[4] = {};
    for (int half = 0; half < 2; half++) {
        int k = chunk * CHUNK_K + (2 * j + half) * BLOCK + lane % 4 * 4;
        if (row >= a.rows || k >= a.k) break;
        u32 codes = *(const u16*)(a.codes + ((size_t)(a.first_row + row) * a.k + k) / 2);
        for (int i = 0; i < 4; i++) pairs[i] |= spread_code(codes, i) << (16 * half);
    }
    ((u32*)out)[word] = encode_word(pairs);
    if (word < CHUNK_ROWS * CHUNK_BLOCKS) {
        int r = first + word / CHUNK_BLOCKS, block = chunk * CHUNK_BLOCKS + word % CHUNK_BLOCKS, blocks = a.k / BLOCK;
        u64 at = scale_row(a.swizzled, a.first_row + r, blocks) + (u64)(block / SCALES_IN_WORD) * scale_word_stride(a.swizzled);
        bool inside = r < a.rows && block < blocks;
        out[CHUNK_CODES + word] = inside ? a.scales[at + block % SCALES_IN_WORD] : 0;
    }
}
