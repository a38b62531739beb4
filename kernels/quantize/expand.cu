// Dequantizes row-major NVFP4 in f32 and rounds to the type of the output. The bits are those of src/format.
#include "common/values.cuh"
#include "format/nvfp4.cuh"
#include "format/swizzle.cuh"

struct Arguments {
    const u8* codes;    // rows of 8 row_blocks bytes
    const u8* scales;   // rows of row_blocks bytes, or swizzled
    u8* out;            // [rows, 16 row_blocks]
    u64 codes_stride;   // bytes from row to row, a multiple of 8
    u64 scales_stride;  // bytes from row to row, unless swizzled
    u32 blocks;         // of all rows
    u32 row_blocks;
    float global;
    int swizzled;
};

constexpr int THREADS = 256;

// Any e4m3 byte, also negative ones and NaN, whose other bits are all set.
__device__ __forceinline__ float decode_scale(u32 byte) {
    float magnitude = (byte & 0x7f) == 0x7f ? __uint_as_float(0x7fc00000) : scale_to_float(byte & 0x7f);
    return __uint_as_float(__float_as_uint(magnitude) | (byte & 0x80) << 24);
}

// A thread takes a block of 16.
template <Type T>
__device__ __forceinline__ void expand(const Arguments& a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    u32 index = blockIdx.x * THREADS + threadIdx.x;
    if (index >= a.blocks) return;
    u32 row = index / a.row_blocks, column = index % a.row_blocks;
    uint2 codes = *(const uint2*)(a.codes + row * a.codes_stride + (u64)column * 8);
    u64 at = row * a.scales_stride + column;
    if (a.swizzled) at = scale_row(true, row, a.row_blocks) + (u64)(column / SCALES_IN_WORD) * scale_word_stride(true) + column % SCALES_IN_WORD;
    float scale = decode_scale(a.scales[at]);
    float x[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; i++) x[i] = decode_value(code_to_float((i < 8 ? codes.x : codes.y) >> i % 8 * 4 & 15), scale, a.global);
    uint4* out = (uint4*)a.out + (u64)index * (T == F32 ? 4 : 2);
    auto pair = [&](int i) { return T == F16 ? pack_f16(x[i], x[i + 1]) : pack_bf16(x[i], x[i + 1]); };
#pragma unroll
    for (int i = 0; i < (T == F32 ? 4 : 2); i++) {
        auto bits = [&](int j) { return __float_as_uint(x[4 * i + j]); };
        out[i] = T == F32 ? make_uint4(bits(0), bits(1), bits(2), bits(3))
                          : make_uint4(pair(8 * i % BLOCK), pair((8 * i + 2) % BLOCK), pair((8 * i + 4) % BLOCK), pair((8 * i + 6) % BLOCK));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) dequantize_f32(const __grid_constant__ Arguments a) { expand<F32>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) dequantize_f16(const __grid_constant__ Arguments a) { expand<F16>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) dequantize_bf16(const __grid_constant__ Arguments a) { expand<BF16>(a); }
