// Conversions around a library's GEMM with an int8 weight: codes to f16, which holds them exactly, and the scales of the weight's rows onto
// f32 products.
#include "common/ptx.cuh"
#include "format/int8.cuh"

constexpr int THREADS = 256;

struct HalvesArguments {
    const uint4* codes;     // INT8_CODES each
    uint4* out;             // f16
    u64 pieces;
};

// Grid: (ceil(pieces / THREADS))
extern "C" __global__ void __launch_bounds__(THREADS) linear_int8_to_f16(const __grid_constant__ HalvesArguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    u64 i = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.pieces) return;
    uint4 piece = a.codes[i];
    u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
    float v[INT8_CODES];
#pragma unroll
    for (int j = 0; j < 4; j++) int8_codes(words[j], v + 4 * j);
    auto pair = [&](int j) { return pack_f16(v[j], v[j + 1]); };
    a.out[2 * i] = make_uint4(pair(0), pair(2), pair(4), pair(6));
    a.out[2 * i + 1] = make_uint4(pair(8), pair(10), pair(12), pair(14));
}

struct ScaleArguments {
    float* y;               // rows of products, `stride` apart
    const float* scales;    // [width]
    int width;
    int stride;
};

// Grid: (ceil(width / THREADS), rows)
extern "C" __global__ void __launch_bounds__(THREADS) linear_int8_scale(const __grid_constant__ ScaleArguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < a.width) a.y[(size_t)blockIdx.y * a.stride + i] *= a.scales[i];
}
