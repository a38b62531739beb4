// Common parts of the kernels of recurrent layers, gated delta nets and Mamba-2: segments of a batch, and the layer's state in the blocks
// of an arena.
//
// The state of a layer in a block is S, f32 [heads][rows of S][columns of S], and then the inputs of the convolution at the last taps - 1
// positions, f32 [taps - 1][channels], the oldest first.
#pragma once
#include "common/types.cuh"

// Rows row_starts[s] to row_starts[s + 1] are consecutive tokens of one sequence. Their state is read from one block and written to another
// or to the same; block 0 is never read, but stands for zeros. No block is written by two segments. One that reads what the segment before
// it writes continues that segment, and has rows; no other block is written by one segment and read by another. A segment that reads what it
// writes and is continued has at least as many rows as the convolution keeps.
struct Segments {
    const int* row_starts;  // [count + 1], the first is 0
    const u32* read;        // [count]
    const u32* write;       // [count]
    int count;

    __device__ __forceinline__ bool continues(int s) const { return s > 0 && s < count && read[s] != 0 && read[s] == write[s - 1]; }
    // The first segment of the sequence that segment s is of, and the segment after its last one.
    __device__ __forceinline__ int first_of(int s) const {
        while (continues(s)) s--;
        return s;
    }
    __device__ __forceinline__ int end_of(int s) const {
        do s++;
        while (continues(s));
        return s;
    }
};

struct States {
    u8* base;           // the layer's part of block 0 that the kernel uses
    u64 block_bytes;

    __device__ __forceinline__ float* at(u32 block) const { return (float*)(base + block * block_bytes); }
};

__device__ __forceinline__ float sigmoid(float x) { return 1 / (1 + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x / (1 + expf(-x)); }
__device__ __forceinline__ float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }
