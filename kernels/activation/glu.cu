// Gated linear units, squared ReLUs, soft caps, the addition of a bias to rows, and type conversions.
#include "activation/gate.cuh"
#include "common/ptx.cuh"
#include "format/fragment_major.cuh"

struct GluArguments {
    const u16* gate_up;     // f16 [rows, 2 width]: gate, then up
    u16* y;                 // f16 [rows, width]
    int width;              // a multiple of 8
    float scale;            // keeps the result, which may be large, within f16
    int activation;
    int layer;
    u32* overflow;          // [rows]: if it is 0, set to 1 + layer where gate or up of the row is not finite; null: not checked
};

constexpr int THREADS = 256;

__device__ __forceinline__ u32 product(u32 gate, u32 up, float scale, int activation) {
    return pack_f16(activate(activation, f16_low(gate)) * f16_low(up) * scale,
                    activate(activation, f16_high(gate)) * f16_high(up) * scale);
}

// Nonzero if a half of the pair is infinite or NaN: such an exponent plus one carries into the sign bit.
__device__ __forceinline__ u32 not_finite(u32 pair) { return ((pair & 0x7c007c00) + 0x04000400) & 0x80008000; }
__device__ __forceinline__ u32 not_finite(uint4 v) { return not_finite(v.x) | not_finite(v.y) | not_finite(v.z) | not_finite(v.w); }

// Grid: (ceil(width / 8 / THREADS), rows)
extern "C" __global__ void __launch_bounds__(THREADS) glu(const __grid_constant__ GluArguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int i = blockIdx.x * THREADS + threadIdx.x, pieces = a.width / 8;
    if (i >= pieces) return;
    const uint4* row = (const uint4*)a.gate_up + (size_t)blockIdx.y * 2 * pieces;
    uint4 g = row[i], u = row[pieces + i];
    if (a.overflow && (not_finite(g) | not_finite(u))) atomicCAS(a.overflow + blockIdx.y, 0, a.layer + 1);
    auto glu_of = [&](u32 gate, u32 up) { return product(gate, up, a.scale, a.activation); };
    uint4 y = make_uint4(glu_of(g.x, u.x), glu_of(g.y, u.y), glu_of(g.z, u.z), glu_of(g.w, u.w));
    ((uint4*)a.y)[(size_t)blockIdx.y * pieces + i] = y;
}

struct SquareArguments {
    const u16* x;           // f16 [rows, width]
    u16* y;                 // f16 [rows, width]
    int width;              // a multiple of 8
    float scale;            // keeps the result, which may be large, within f16
    int layer;
    u32* overflow;          // [rows]: if it is 0, set to 1 + layer where x of the row is not finite
};

// y = max(x, 0)^2 * scale. Grid: (ceil(width / 8 / THREADS), rows)
extern "C" __global__ void __launch_bounds__(THREADS) relu_squared_f16(const __grid_constant__ SquareArguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int i = blockIdx.x * THREADS + threadIdx.x, pieces = a.width / 8;
    if (i >= pieces) return;
    size_t at = (size_t)blockIdx.y * pieces + i;
    uint4 x = ((const uint4*)a.x)[at];
    if (not_finite(x)) atomicCAS(a.overflow + blockIdx.y, 0, a.layer + 1);
    auto square = [&](u32 pair) { return pack_f16(relu_squared(f16_low(pair)) * a.scale, relu_squared(f16_high(pair)) * a.scale); };
    ((uint4*)a.y)[at] = make_uint4(square(x.x), square(x.y), square(x.z), square(x.w));
}

struct HeadGateArguments {
    u16* y;                 // f16 [rows, width]: the output of attention
    const float* gate;      // [rows, width]
    int width;
    int fragment_major;     // whether y is; else it is row-major
};

// y *= sigmoid(gate). Grid: (ceil(width / THREADS), rows)
extern "C" __global__ void __launch_bounds__(THREADS) gate_heads(const __grid_constant__ HeadGateArguments a) {
    let_later_kernels_start();
    wait_for_earlier_kernels();
    int row = blockIdx.y, i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.width) return;
    size_t at = (size_t)row * a.width + i;
    u16* y = a.y + (a.fragment_major ? fragment_index(ceil_div(gridDim.y, GROUP_ROWS), row, i) : at);
    *y = to_f16(gated(f16_to_float(*y), a.gate[at]));
}

struct CapArguments {
    float* x;
    u64 count;
    float cap;
};

// x = cap * tanh(x / cap)
extern "C" __global__ void __launch_bounds__(THREADS) soft_cap(const __grid_constant__ CapArguments a) {
    wait_for_earlier_kernels();
    u64 i = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (i < a.count) a.x[i] = a.cap * tanhf(a.x[i] / a.cap);
}

struct BiasArguments {
    void* y;                // f32 or f16 [rows, stride]
    const float* bias;      // [width]
    int width;
    int stride;
    int is_f16;
};

// Grid: (ceil(width / THREADS), rows)
extern "C" __global__ void __launch_bounds__(THREADS) add_bias(const __grid_constant__ BiasArguments a) {
    wait_for_earlier_kernels();
    int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.width) return;
    size_t at = (size_t)blockIdx.y * a.stride + i;
    if (a.is_f16) {
        u16* y = (u16*)a.y + at;
        *y = to_f16(f16_to_float(*y) + a.bias[i]);
    } else {
        ((float*)a.y)[at] += a.bias[i];
    }
}

struct ConvertArguments {
    const u32* x;           // pairs of f16
    u32* y;                 // pairs of bf16
    u64 pairs;
};

extern "C" __global__ void __launch_bounds__(THREADS) f16_to_bf16(const __grid_constant__ ConvertArguments a) {
    wait_for_earlier_kernels();
    u64 i = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (i < a.pairs) a.y[i] = pack_bf16(f16_low(a.x[i]), f16_high(a.x[i]));
}

struct RowsArguments {
    u16* y;                 // [rows, stride]: bf16, converted to f16 in place
    int width;
    int stride;
};

// Grid: (ceil(width / THREADS), rows)
extern "C" __global__ void __launch_bounds__(THREADS) bf16_to_f16(const __grid_constant__ RowsArguments a) {
    wait_for_earlier_kernels();
    int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.width) return;
    u16* y = a.y + (size_t)blockIdx.y * a.stride + i;
    *y = to_f16(bf16_to_float(*y));
}
