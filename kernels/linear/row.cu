// One row of activations times dense weights of one type, accumulated in f32: y[n] = sum over k of x[k] w[n, k]. Bound by reading the weights
// once.
//
// Warps take units of one or two neighbouring output features, each as many units further as the grid has warps. A warp streams its weights
// through registers, 16 bytes a lane, with several pieces of a row in flight across the ends of units; the first are loaded before the kernel
// waits for its predecessor, because weights depend on no kernel. The row is in shared memory as f32, [step][quarter][lane], so that the
// values that a lane multiplies with a piece are read without bank conflicts.
#include "common/reduce.cuh"
#include "linear/dense.cuh"

// The weights of an output feature; null if there is none.
template <int KIND>
__device__ __forceinline__ const void* weights_of(const Arguments& a, int feature) {
    const void* weights = nullptr;
#pragma unroll
    for (int i = 0; i < MATRICES; i++) {
        int own = a.matrices[i].rows;
        if (feature >= 0 && feature < own) weights = (const u8*)a.matrices[i].weight + (size_t)feature * a.k * Bits<KIND>::SIZE;
        feature -= own;
    }
    return weights;
}

// The rows of weights of a unit, from its pieces.
template <int KIND, int ROWS>
struct Stream {
    using Piece = Bits<KIND>[ROWS];

    const Arguments& a;
    int lane, units, steps, stride, unit, step = 0;
    const void* rows[ROWS];     // null beyond the last feature

    __device__ __forceinline__ Stream(const Arguments& a, int features, int first, int stride)
        : a(a), lane(lane_id()), units(ceil_div(features, ROWS)), steps(ceil_div(a.k, Values<KIND>::STEP)), stride(stride), unit(first) {
        find();
    }
    // The next piece of the unit, or the first of the next unit; zeros beyond the ends of rows, and after the last unit.
    __device__ __forceinline__ void next(Piece& to) {
        int i = step * Values<KIND>::STEP + Values<KIND>::COUNT * lane;
#pragma unroll
        for (int r = 0; r < ROWS; r++) to[r] = rows[r] && i < a.k ? Bits<KIND>(rows[r], i) : Bits<KIND>::zero();
        if (++step < steps) return;
        step = 0, unit += stride;
        find();
    }

private:
    __device__ __forceinline__ void find() {
#pragma unroll
        for (int r = 0; r < ROWS; r++) rows[r] = weights_of<KIND>(a, unit * ROWS + r);
    }
};

// The bias of a feature's output.
__device__ __forceinline__ float bias_of(const Arguments& a, int feature) {
    float bias = 0;
#pragma unroll
    for (int i = 0; i < MATRICES; i++) {
        const Matrix& matrix = a.matrices[i];
        int own = matrix.rows;
        if (feature >= 0 && feature < own && matrix.bias) bias = matrix.bias[feature];
        feature -= own;
    }
    return bias;
}

// AHEAD pieces of each row of a unit are in flight.
template <int KIND, int ROWS, int AHEAD>
__device__ __forceinline__ void run(const Arguments& a) {
    constexpr int COUNT = Values<KIND>::COUNT, STEP = Values<KIND>::STEP, QUARTERS = COUNT / 4;
    extern __shared__ __align__(16) char shared[];
    float4* x = (float4*)shared;
    int lane = lane_id(), first = blockIdx.x * WARPS + threadIdx.x / WARP, stride = gridDim.x * WARPS, features = 0;
#pragma unroll
    for (int i = 0; i < MATRICES; i++) features += a.matrices[i].rows;
    Stream<KIND, ROWS> stream(a, features, first, stride);
    typename Stream<KIND, ROWS>::Piece pieces[AHEAD];
#pragma unroll
    for (int u = 0; u < AHEAD; u++) stream.next(pieces[u]);
    if (!a.beside) wait_for_earlier_kernels();
    let_later_kernels_start();
    for (int i = 8 * threadIdx.x; i < stream.steps * STEP; i += 8 * THREADS) {
        float4* to = x + (i / STEP * QUARTERS + i % COUNT / 4) * WARP + i % STEP / COUNT;
        uint4 bits = i < a.k ? *(const uint4*)(a.x + i) : make_uint4(0, 0, 0, 0);
        to[0] = make_float4(f16_low(bits.x), f16_high(bits.x), f16_low(bits.y), f16_high(bits.y));
        to[WARP] = make_float4(f16_low(bits.z), f16_high(bits.z), f16_low(bits.w), f16_high(bits.w));
    }
    __syncthreads();

    int unit = first, step = 0;
    float sums[ROWS] = {};
    // Lane r ends row r of a unit.
    auto feature = [&] { return unit * ROWS + lane; };
    auto ends = [&] { return lane < ROWS && feature() < features; };
    float bias = bias_of(a, ends() ? feature() : -1);
    while (unit < stream.units) {
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            if (unit >= stream.units) break;
            const float4* part = x + step * QUARTERS * WARP + lane;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                Values<KIND> w(pieces[u][r]);
#pragma unroll
                for (int q = 0; q < QUARTERS; q++) {
                    float4 factors = part[q * WARP];
                    sums[r] = fmaf(w.v[4 * q], factors.x, sums[r]), sums[r] = fmaf(w.v[4 * q + 1], factors.y, sums[r]);
                    sums[r] = fmaf(w.v[4 * q + 2], factors.z, sums[r]), sums[r] = fmaf(w.v[4 * q + 3], factors.w, sums[r]);
                }
            }
            stream.next(pieces[u]);
            if (++step < stream.steps) continue;
            float sum = 0;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float all = warp_sum(sums[r]);
                if (lane == r) sum = all;
                sums[r] = 0;
            }
            if (ends()) store_product(a, feature(), sum * a.factor + bias);
            step = 0, unit += stride;
            bias = bias_of(a, ends() ? feature() : -1);
        }
    }
    if (a.beside) wait_for_earlier_kernels();
}

#define KERNEL(NAME, KIND, ROWS, AHEAD) \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) NAME(const __grid_constant__ Arguments a) { run<KIND, ROWS, AHEAD>(a); }
#define KERNELS(NAME, KIND, AHEAD)       \
    KERNEL(linear_row_##NAME, KIND, 1, AHEAD) \
    KERNEL(linear_row_##NAME##_pair, KIND, 2, AHEAD / 2)
// Grid: any number of blocks.
KERNELS(f32, F32, 4)
KERNELS(f16, F16, 8)
KERNELS(bf16, BF16, 8)
