// Copies a strided tensor to a contiguous row-major one.
#include "common/ptx.cuh"

constexpr int MAX_RANK = 8;

struct Arguments {
    const u8* from;
    u8* to;
    u64 elements;
    u64 sizes[MAX_RANK];    // the innermost dimension first; 1 for absent dimensions
    u64 strides[MAX_RANK];  // in elements
};

constexpr int THREADS = 256;

template <class Element>
__device__ __forceinline__ void gather(const Arguments& a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    u64 index = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (index >= a.elements) return;
    u64 rest = index, at = 0;
#pragma unroll
    for (int d = 0; d < MAX_RANK; d++) {
        if (rest == 0) break;
        at += rest % a.sizes[d] * a.strides[d];
        rest /= a.sizes[d];
    }
    ((Element*)a.to)[index] = ((const Element*)a.from)[at];
}

extern "C" __global__ void __launch_bounds__(THREADS) gather_1(const __grid_constant__ Arguments a) { gather<u8>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) gather_2(const __grid_constant__ Arguments a) { gather<u16>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) gather_4(const __grid_constant__ Arguments a) { gather<u32>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) gather_8(const __grid_constant__ Arguments a) { gather<u64>(a); }
