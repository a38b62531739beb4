// Common parts of the kernels of recurrent layers, gated delta nets and Mamba-2: segments of a batch, and the layer's state in the blocks
// of an arena.
//
// The state of a layer in a block is S, f32 [heads][rows of S][columns of S], and then the inputs of the convolution at the last taps - 1
// positions, f32 [taps - 1][channels], the oldest first.
#pragma once
#include "common/types.cuh"

// Rows row_starts[s] to row_starts[s + 1] are consecutive tokens of one sequence. Their state is read from one block and written to another
// or to the same; block 0 is never read, but stands for zeros. No block is written by two segments, or written by one and read by another.
struct Segments {
    const int* row_starts;  // [count + 1], the first is 0
    const u32* read;        // [count]
    const u32* write;       // [count]
    int count;
};

struct States {
    u8* base;           // the layer's part of block 0 that the kernel uses
    u64 block_bytes;

    __device__ __forceinline__ float* at(u32 block) const { return (float*)(base + block * block_bytes); }
};

__device__ __forceinline__ float sigmoid(float x) { return 1 / (1 + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x / (1 + expf(-x)); }
__device__ __forceinline__ float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }
