// Decodes a matrix under training to bf16, for GEMMs with plain matrices and for embeddings.
#include "optimizer/weights.cuh"

struct Arguments {
    Weights w;
    u16* out;           // bf16 [rows, cols]
    const u32* tokens;  // the row of each row of `out`; null for the rows from `first_row` on
    int first_row;
    int rows;
    int whole;          // all that is stored, or the codes alone
};

constexpr int THREADS = 128;

__device__ __forceinline__ void store_block(u16* out, u64 block, const float (&x)[BLOCK]) {
    uint4* to = (uint4*)(out + block * BLOCK);
    to[0] = make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
    to[1] = make_uint4(pack_bf16(x[8], x[9]), pack_bf16(x[10], x[11]), pack_bf16(x[12], x[13]), pack_bf16(x[14], x[15]));
}

template <bool ANY>
__device__ __forceinline__ void decode(const Arguments& a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int blocks = a.w.cols / BLOCK, column = blockIdx.x * THREADS + threadIdx.x;
    if (column >= blocks) return;
    for (int row = blockIdx.y; row < a.rows; row += gridDim.y) {
        float x[BLOCK];
        int from = a.tokens ? a.tokens[row] : a.first_row + row;
        decode_block(a.w, ANY ? a.w.form : RESIDUAL4, from, column, a.whole, x);
        store_block(a.out, (u64)row * blocks + column, x);
    }
}

// Grid: (ceil(cols / 16 / THREADS), rows, or fewer). One kernel for the default form, and one for any.
extern "C" __global__ void __launch_bounds__(THREADS) decode_matrix_default(const __grid_constant__ Arguments a) { decode<false>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) decode_matrix_any(const __grid_constant__ Arguments a) { decode<true>(a); }

struct UnpackArguments {
    const u8* chunks;
    u8* codes;          // [rows, cols / 2], the even column in the low half
    u8* scales;         // [rows, cols / 16]
    int rows;
    int cols;
};

// The inverse of packing to format/packed.cuh. Grid: (ceil(cols / 16 / THREADS), rows, or fewer)
extern "C" __global__ void __launch_bounds__(THREADS) unpack_matrix(const __grid_constant__ UnpackArguments a) {
    wait_for_earlier_kernels();
    int blocks = a.cols / BLOCK, column = blockIdx.x * THREADS + threadIdx.x, chunks = ceil_div(a.cols, CHUNK_K);
    if (column >= blocks) return;
    for (int row = blockIdx.y; row < a.rows; row += gridDim.y) {
        u8* chunk = (u8*)chunk_of(a.chunks, chunks, row, column * BLOCK);
        const u32* at = chunk_words(chunk, row, column);
        u32 words[4] = {at[0], at[4], at[8], at[12]};
        Nibbles codes = unpack_block(words, column % 2);
        u64 block = (u64)row * blocks + column;
        ((uint2*)a.codes)[block] = make_uint2(codes.words[0], codes.words[1]);
        a.scales[block] = *scale_at(chunk, row, column);
    }
}
