// Common parts of linear/tiled.cu and linear/wide.cu: arguments, positions of tiles, and the epilogue.
#pragma once
#include "activation/gate.cuh"
#include "common/ptx.cuh"
#include "format/fragment_major.cuh"
#include "linear/matrix.cuh"

enum Output { STORE_F32, STORE_F16, ADD_F32, STORE_FRAGMENT_MAJOR };  // the last is for the GLU kernels only

struct Arguments {
    const u16* x;               // f16 [m, k]; for linear/wide.cu fragment-major
    void* out;                  // [m, out_stride]; the matrices' features follow each other
    float* partial;             // the split-K workspace of linear/tiled.cu: [split_k, m, features of all matrices]; unused without splits
    Matrix matrix[MATRICES];
    int matrices;
    int m;
    int k;
    int out_stride;
    int output;
    int split_k;                // ranges of K, each multiplied by a block of its own
    float out_scale;            // GLU: keeps the result, which may be large, within f16
    int activation;             // GLU
};

__device__ __forceinline__ int features_of(const Arguments& a) {
    int all = 0;
    for (int i = 0; i < a.matrices; i++) all += a.matrix[i].rows;
    return all;
}

// The position of a tile of FEATURES features. Each matrix has its own tiles, and those of the matrices follow each other.
template <int FEATURES>
struct TilePlace {
    const Matrix* matrix;
    int column;         // in the output, of the matrix's first feature
    int first_feature;  // of the tile, in the matrix

    __device__ __forceinline__ TilePlace(const Arguments& a, int tile) {
        int index = 0;
        column = 0;
        while (index < a.matrices - 1 && tile >= ceil_div(a.matrix[index].rows, FEATURES)) {
            tile -= ceil_div(a.matrix[index].rows, FEATURES);
            column += a.matrix[index++].rows;
        }
        matrix = a.matrix + index;
        first_feature = tile * FEATURES;
    }
};

// Stores the sum over K for row m of activations and row `row` of a matrix whose first feature is `column` of the output.
__device__ __forceinline__ void store(const Arguments& a, const Matrix& w, int column, int m, int row, float sum) {
    sum = scaled_sum(sum, w.global * PACKED_FACTOR, w.bias, row);
    size_t at = (size_t)m * a.out_stride + column + row;
    if (a.output == STORE_F32) ((float*)a.out)[at] = sum;
    if (a.output == ADD_F32) ((float*)a.out)[at] += sum;
    if (a.output == STORE_F16) ((u16*)a.out)[at] = to_f16(sum);
}

// Stores a warp's accumulators of one matrix instruction: 16 features of the matrix from `first` on, by 8 rows of activations from
// `first_row` on.
__device__ __forceinline__ void store_accumulators(const Arguments& a, const Matrix& w, int column, int first, int first_row,
                                                   const float (&c)[4]) {
    int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        int m = first_row + 2 * t + e % 2, row = first + g + e / 2 * 8;
        if (m < a.m && row < w.rows) store(a, w, column, m, row, c[e]);
    }
}
// As store_accumulators(), for the accumulators of one split of K, which go to the workspace.
__device__ __forceinline__ void store_partial(const Arguments& a, const Matrix& w, int column, int first, int first_row, int split,
                                              const float (&c)[4]) {
    int g = lane_id() / 4, t = lane_id() % 4, all = features_of(a);
#pragma unroll
    for (int e = 0; e < 4; e++) {
        int m = first_row + 2 * t + e % 2, row = first + g + e / 2 * 8;
        if (m < a.m && row < w.rows) a.partial[((size_t)split * a.m + m) * all + column + row] = c[e];
    }
}
// Applies the GLU to accumulators whose rows 0 to 7 are gate's features from `first` on and whose rows 8 to 15 are up's, and calls
// store(row of activations, feature, f16 value) for each result. Values past the last feature are zeros.
template <class Store>
__device__ __forceinline__ void store_glu(const Arguments& a, int first, int first_row, const float (&c)[4], Store store) {
    int g = lane_id() / 4, t = lane_id() % 4, row = first + g;
    const Matrix &gate = a.matrix[0], &up = a.matrix[1];
    bool exists = row < gate.rows;
    auto sum = [&](const Matrix& w, float sum) { return scaled_sum(sum, w.global * PACKED_FACTOR, exists ? w.bias : nullptr, row); };
#pragma unroll
    for (int e = 0; e < 2; e++) {
        float x = sum(gate, c[e]), y = sum(up, c[e + 2]);
        store(first_row + 2 * t + e, row, exists ? to_f16(activate(a.activation, x) * y * a.out_scale) : (u16)0);
    }
}
