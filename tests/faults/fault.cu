// Kernels that each fail in a different way.
#include "common/types.cuh"

struct Arguments {
    u64 address;
};

extern "C" __global__ void write_there(const __grid_constant__ Arguments a) { *(volatile int*)a.address = 1; }

extern "C" __global__ void trap(const __grid_constant__ Arguments) { asm volatile("trap;"); }
