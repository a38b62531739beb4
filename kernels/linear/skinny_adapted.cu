// The skinny GEMM of one row with an adapter (linear/skinny/adapter.cuh).
#include "linear/skinny/run.cuh"

// Blocks of a multiprocessor at least: one of the next kernel beside one of this. Elsewhere registers would spill.
constexpr int DEEP_BLOCKS = __CUDA_ARCH__ == 900 ? 2 : 1;

#define ADAPTED_KERNEL(NAME, TILE, OUTPUT, BLOCKS)                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(const __grid_constant__ Arguments a) { \
        run<Config<TILE, ROW_MAJOR, OUTPUT, 1, 2, false, true>>(a);                                           \
    }

ADAPTED_KERNEL(skinny_adapted_f32, DEEP, STORE_F32, DEEP_BLOCKS)
ADAPTED_KERNEL(skinny_adapted_add, DEEP, ADD_F32, DEEP_BLOCKS)
ADAPTED_KERNEL(skinny_adapted_glu, GATE_UP, GLU_ROW_MAJOR, 2)
