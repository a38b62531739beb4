// Gated linear units and biases of rows of bf16 for training, forward and backward. A thread takes eight elements.
#include "activation/gate.cuh"
#include "common/values.cuh"

struct GluArguments {
    const uint4* gate_up;   // bf16 [rows, 2 width]: gate, then up
    const uint4* dy;        // backward: bf16 [rows, width]
    uint4* d_gate_up;       // backward: bf16 [rows, 2 width]; may be gate_up
    uint4* y;               // bf16 [rows, width]; may be null backward, or dy
    int width;              // a multiple of 16
    int activation;
};

struct BiasArguments {
    uint4* x;               // bf16 [rows, width]
    const float* bias;      // [width]
    float* partial;         // [gridDim.y, width]
    int rows;
    int width;              // a multiple of 16
};

constexpr int THREADS = 256;

// y = act(gate) * up. Grid: (rows, ceil(width / 8 / THREADS))
extern "C" __global__ void __launch_bounds__(THREADS) train_glu(const __grid_constant__ GluArguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int i = blockIdx.y * THREADS + threadIdx.x, pieces = a.width / PIECE;
    if (i >= pieces) return;
    const uint4* row = a.gate_up + (size_t)blockIdx.x * 2 * pieces;
    float gate[PIECE], up[PIECE];
    load_bf16(row + i, gate);
    load_bf16(row + pieces + i, up);
#pragma unroll
    for (int e = 0; e < PIECE; e++) up[e] *= activate_with_slope(a.activation, gate[e]).value;  // the bits of the backward pass
    store_bf16(a.y + (size_t)blockIdx.x * pieces + i, up);
}

// d_gate = dy * up * act'(gate), d_up = dy * act(gate), and recomputes y. Grid: as above.
extern "C" __global__ void __launch_bounds__(THREADS) train_glu_backward(const __grid_constant__ GluArguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int i = blockIdx.y * THREADS + threadIdx.x, pieces = a.width / PIECE;
    if (i >= pieces) return;
    size_t row = (size_t)blockIdx.x * 2 * pieces, at = (size_t)blockIdx.x * pieces + i;
    float gate[PIECE], up[PIECE], dy[PIECE], y[PIECE];
    load_bf16(a.gate_up + row + i, gate);
    load_bf16(a.gate_up + row + pieces + i, up);
    load_bf16(a.dy + at, dy);
#pragma unroll
    for (int e = 0; e < PIECE; e++) {
        Activated act = activate_with_slope(a.activation, gate[e]);
        y[e] = act.value * up[e];
        gate[e] = dy[e] * up[e] * act.slope;
        up[e] = dy[e] * act.value;
    }
    store_bf16(a.d_gate_up + row + i, gate);
    store_bf16(a.d_gate_up + row + pieces + i, up);
    if (a.y) store_bf16(a.y + at, y);
}

// x += bias. Grid: (rows, ceil(width / 8 / THREADS))
extern "C" __global__ void __launch_bounds__(THREADS) train_add_bias(const __grid_constant__ BiasArguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int i = blockIdx.y * THREADS + threadIdx.x, pieces = a.width / PIECE;
    if (i >= pieces) return;
    uint4* at = a.x + (size_t)blockIdx.x * pieces + i;
    float x[PIECE], bias[PIECE];
    load_bf16(at, x);
    load_f32(a.bias + i * PIECE, bias);
#pragma unroll
    for (int e = 0; e < PIECE; e++) x[e] += bias[e];
    store_bf16(at, x);
}

// A block takes COLUMN_PIECES pieces of each of its rows, and a warp one of COLUMN_ROWS rows at a time.
constexpr int COLUMN_PIECES = WARP, COLUMN_ROWS = THREADS / WARP;

// Sums of columns over the rows of a block. Grid: (ceil(width / 8 / COLUMN_PIECES), blocks of rows)
extern "C" __global__ void __launch_bounds__(THREADS) train_column_sums(const __grid_constant__ BiasArguments a) {
    __shared__ float sums[COLUMN_ROWS][COLUMN_PIECES * PIECE];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int warp = threadIdx.x / WARP, lane = lane_id(), pieces = a.width / PIECE, i = blockIdx.x * COLUMN_PIECES + lane;
    float sum[PIECE] = {};
    if (i < pieces) {
#pragma unroll 4
        for (int row = blockIdx.y * COLUMN_ROWS + warp; row < a.rows; row += gridDim.y * COLUMN_ROWS) {
            float x[PIECE];
            load_bf16(a.x + (size_t)row * pieces + i, x);
#pragma unroll
            for (int e = 0; e < PIECE; e++) sum[e] += x[e];
        }
    }
#pragma unroll
    for (int e = 0; e < PIECE; e++) sums[warp][lane * PIECE + e] = sum[e];
    __syncthreads();
    int column = blockIdx.x * COLUMN_PIECES * PIECE + threadIdx.x;
    static_assert(THREADS == COLUMN_PIECES * PIECE, "a thread takes a column");
    if (column >= a.width) return;
    float total = 0;
#pragma unroll
    for (int r = 0; r < COLUMN_ROWS; r++) total += sums[r][threadIdx.x];
    a.partial[(size_t)blockIdx.y * a.width + column] = total;
}
