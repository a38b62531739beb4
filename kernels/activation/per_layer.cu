// The gate of a block's own input. It takes the residual stream without a norm, whose values may be beyond f16: the product is that of
// normalized rows, whose factors are undone here, and each row of the result is divided by a power of two.
#include "activation/gate.cuh"
#include "common/ptx.cuh"
#include "common/reduce.cuh"

struct Arguments {
    const float* gate;      // [rows, width]: products of rows that were multiplied by `factors`
    const float* factors;   // [rows]
    const float* input;     // [rows, stride], of which `width` count
    u16* y;                 // f16 [rows, width]
    float* divisors;        // [rows]: powers of two by which the rows of y are divided
    int width;
    int stride;
    int activation;
};

constexpr int THREADS = 128;

// The power of two at or below a magnitude; 1 for zero and for what has none.
__device__ __forceinline__ float power_of_two(float x) {
    u32 exponent = __float_as_uint(x) & 0x7f800000;
    return exponent == 0 || exponent == 0x7f800000 ? 1 : __uint_as_float(exponent);
}

// y = act(gate / factor) * input / divisor. Grid: (rows)
extern "C" __global__ void __launch_bounds__(THREADS) per_layer_gate(const __grid_constant__ Arguments a) {
    __shared__ float warp_maxima[THREADS / WARP];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int row = blockIdx.x;
    const float *gate = a.gate + (size_t)row * a.width, *input = a.input + (size_t)row * a.stride;
    float factor = a.factors[row], largest = 0;
    auto gated_input = [&](int i) { return activate(a.activation, gate[i] / factor) * input[i]; };
    for (int i = threadIdx.x; i < a.width; i += THREADS) largest = fmaxf(largest, fabsf(gated_input(i)));
    float divisor = power_of_two(block_max(largest, warp_maxima, THREADS / WARP));
    for (int i = threadIdx.x; i < a.width; i += THREADS) a.y[(size_t)row * a.width + i] = to_f16(gated_input(i) / divisor);
    if (threadIdx.x == 0) a.divisors[row] = divisor;
}
