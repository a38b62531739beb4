// What products that take tiles of features and rows have in common: their arguments, where tiles lie, and what becomes of sums.
#pragma once
#include "activation/gate.cuh"
#include "common/ptx.cuh"
#include "format/fragment_major.cuh"
#include "linear/matrix.cuh"

enum Output { STORE_F32, STORE_F16, ADD_F32, STORE_FRAGMENT_MAJOR };  // the last is that of gated activations, which have kernels of their own

struct Arguments {
    const u16* x;               // f16 [m, k]; those of linear/wide.cu in the order of format/fragment_major.cuh
    void* out;                  // [m, out_stride]; the matrices' features follow each other
    float* partial;             // [parts, m, features of all matrices], if there are several parts
    Matrix matrix[MATRICES];
    int matrices;
    int m;
    int k;
    int out_stride;
    int output;
    int parts;                  // blocks that share a tile, each with a range of K
    float out_scale;            // GLU: of the result, which may be large
    int activation;             // GLU
};

__device__ __forceinline__ int features_of(const Arguments& a) {
    int all = 0;
    for (int i = 0; i < a.matrices; i++) all += a.matrix[i].rows;
    return all;
}

// A tile of FEATURES features, of the matrices one after the other.
template <int FEATURES>
struct TilePlace {
    const Matrix* matrix;
    int column;         // of the output, of the matrix's first feature
    int first_feature;  // of the matrix

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

// What becomes of a sum: of row m of activations and a feature of a matrix whose first is `column` of the output.
__device__ __forceinline__ void store(const Arguments& a, const Matrix& w, int column, int m, int row, float sum) {
    sum *= w.global * PACKED_FACTOR;
    if (w.bias) sum += w.bias[row];
    size_t at = (size_t)m * a.out_stride + column + row;
    if (a.output == STORE_F32) ((float*)a.out)[at] = sum;
    if (a.output == ADD_F32) ((float*)a.out)[at] += sum;
    if (a.output == STORE_F16) ((u16*)a.out)[at] = to_f16(sum);
}

// What becomes of a warp's sums of 16 features from `first` of the matrix on and of 8 rows of activations from `first_row` on, as
// an accumulator of the matrix instruction.
__device__ __forceinline__ void put_away(const Arguments& a, const Matrix& w, int column, int first, int first_row, const float (&c)[4]) {
    int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        int m = first_row + 2 * t + e % 2, row = first + g + e / 2 * 8;
        if (m < a.m && row < w.rows) store(a, w, column, m, row, c[e]);
    }
}
// The same for a part of them.
__device__ __forceinline__ void put_away_part(const Arguments& a, const Matrix& w, int column, int first, int first_row, int part,
                                              const float (&c)[4]) {
    int g = lane_id() / 4, t = lane_id() % 4, all = features_of(a);
#pragma unroll
    for (int e = 0; e < 4; e++) {
        int m = first_row + 2 * t + e % 2, row = first + g + e / 2 * 8;
        if (m < a.m && row < w.rows) a.partial[((size_t)part * a.m + m) * all + column + row] = c[e];
    }
}
// The same for rows 0 to 7 of A that are gate's features from `first` on and rows 8 to 15 that are up's: calls put(row of
// activations, feature, value) with f16 values, which are zeros past the last feature.
template <class Put>
__device__ __forceinline__ void put_away_glu(const Arguments& a, int first, int first_row, const float (&c)[4], Put put) {
    int g = lane_id() / 4, t = lane_id() % 4, row = first + g;
    const Matrix &gate = a.matrix[0], &up = a.matrix[1];
    bool there = row < gate.rows;
    float gate_bias = there && gate.bias ? gate.bias[row] : 0, up_bias = there && up.bias ? up.bias[row] : 0;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        float x = c[e] * (gate.global * PACKED_FACTOR) + gate_bias, y = c[e + 2] * (up.global * PACKED_FACTOR) + up_bias;
        put(first_row + 2 * t + e, row, there ? to_f16(activate(a.activation, x) * y * a.out_scale) : (u16)0);
    }
}
