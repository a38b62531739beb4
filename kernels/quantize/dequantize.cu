// NVFP4 to f16 without the global scale, which is exact.
#include "common/ptx.cuh"
#include "format/nvfp4.cuh"

struct Arguments {
    const u8* codes;        // [rows, k / 2]
    const u8* scales;       // [rows, k / 16]
    void* out;              // [rows, k]
    u64 blocks;             // rows k / 16
};

constexpr int THREADS = 256;

// One thread to a block of 16.
extern "C" __global__ void __launch_bounds__(THREADS) dequantize_folded(const __grid_constant__ Arguments a) {
    wait_for_earlier_kernels();
    u64 i = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.blocks) return;
    uint2 codes = ((const uint2*)a.codes)[i];
    u32 scale = both_low(scale_pair(a.scales[i]));
    u32 low[4], high[4];
    decode_pairs(codes.x, low);
    decode_pairs(codes.y, high);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        low[j] = mul_f16(mul_f16(low[j], scale), TWO_8);
        high[j] = mul_f16(mul_f16(high[j], scale), TWO_8);
    }
    uint4* out = (uint4*)a.out + 2 * i;
    // Pair j holds elements j and j + 4 of its word.
    auto ordered = [](const u32 (&p)[4]) {
        return make_uint4(__byte_perm(p[0], p[1], 0x5410), __byte_perm(p[2], p[3], 0x5410), __byte_perm(p[0], p[1], 0x7632),
                          __byte_perm(p[2], p[3], 0x7632));
    };
    out[0] = ordered(low);
    out[1] = ordered(high);
}
