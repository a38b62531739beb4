// Parts of the kernels of recurrences. A block takes some columns of the state S of a head through all rows of a sequence, and keeps S in
// registers. A lane has columns of every SLICES-th piece of four rows of S.
#pragma once
#include "common/ptx.cuh"
#include "recurrent/layer.cuh"

// The rows of the sequence that begins with a segment, and the end of the segment that is being processed.
struct SequenceRows {
    int segment, last;      // of the sequence
    int start, rows;        // the first row, and their number
    int end;                // rows up to the end of the segment; beyond all rows in the last one, whose state is kept after them

    __device__ __forceinline__ SequenceRows(const Segments& s, int first)
        : segment(first), last(s.end_of(first) - 1), start(s.row_starts[first]), rows(s.row_starts[last + 1] - start) {}
    // Goes on to the next segment.
    __device__ __forceinline__ void next(const Segments& s) { segment++, find_end(s); }
    __device__ __forceinline__ void find_end(const Segments& s) { end = segment < last ? s.row_starts[segment + 1] - start : rows + 1; }
};

// A lane's elements of a row that S is multiplied by.
template <int SLICES, int N>
__device__ __forceinline__ void load_slice(const float* row, int slice, float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        float4 v = *(const float4*)(row + 4 * (slice + SLICES * i));
        x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
    }
}
