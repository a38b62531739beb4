// Kernels of a graph, to measure the overhead of one.
#include "common/ptx.cuh"

struct Arguments {
    u64 clocks;     // how long a block takes
};

__device__ __forceinline__ void work(u64 clocks) {
    u64 start = clock64();
    while (clock64() - start < clocks) {}
}

extern "C" __global__ void __launch_bounds__(256) plain(const __grid_constant__ Arguments a) { work(a.clocks); }
// May start early, and then waits.
extern "C" __global__ void __launch_bounds__(256) waiting(const __grid_constant__ Arguments a) {
    wait_for_earlier_kernels();
    work(a.clocks);
}
// Lets its successor start at once.
extern "C" __global__ void __launch_bounds__(256) early(const __grid_constant__ Arguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    work(a.clocks);
}
