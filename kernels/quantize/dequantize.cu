// Dequantizes packed NVFP4 weights (format/packed.cuh) to f16 without the global scale, which is exact.
#include "common/ptx.cuh"
#include "format/packed.cuh"

struct Arguments {
    const u8* chunks;   // see format/packed.cuh
    u16* out;           // [rows, k]
    int rows;
    int k;
};

constexpr int THREADS = 256;
constexpr int WORDS = CHUNK_CODES / 4;

// A thread takes a word of codes. Grid: (ceil(words of the chunks along k / THREADS), ceil(rows / 8))
extern "C" __global__ void __launch_bounds__(THREADS) dequantize_packed(const __grid_constant__ Arguments a) {
    wait_for_earlier_kernels();
    int chunks = ceil_div(a.k, CHUNK_K), index = blockIdx.x * THREADS + threadIdx.x;
    int chunk = index / WORDS, word = index % WORDS, lane = word / 4, j = word % 4;
    int row = blockIdx.y * CHUNK_ROWS + lane / 4, k = chunk * CHUNK_K + 2 * j * BLOCK + lane % 4 * 4;
    if (row >= a.rows || k >= a.k) return;
    const u8* from = a.chunks + ((size_t)blockIdx.y * chunks + chunk) * CHUNK_BYTES;
    u32 pairs[4], scales = packed_scales(*(const u16*)(from + CHUNK_CODES + lane / 4 * CHUNK_BLOCKS + 2 * j));
    decode_word(((const u32*)from)[word], pairs);
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = mul_f16(mul_f16(pairs[i], scales), TWO_14);
    u16* out = a.out + (size_t)row * a.k + k;
    *(uint2*)out = make_uint2(__byte_perm(pairs[0], pairs[1], 0x5410), __byte_perm(pairs[2], pairs[3], 0x5410));
    if (k + BLOCK < a.k) {
        *(uint2*)(out + BLOCK) = make_uint2(__byte_perm(pairs[0], pairs[1], 0x7632), __byte_perm(pairs[2], pairs[3], 0x7632));
    }
}
