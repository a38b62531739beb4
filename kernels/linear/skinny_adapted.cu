// The skinny GEMM of rows with adapters (linear/skinny/adapter.cuh).
#include "linear/skinny/run.cuh"

// Blocks of a multiprocessor at least, for kernels of few rows: one of the next kernel beside one of this. Elsewhere registers would spill.
constexpr int SHARED_BLOCKS = __CUDA_ARCH__ == 900 ? 2 : 1;

#define ADAPTED_KERNEL(NAME, TILE, INPUT, OUTPUT, ROWS, BLOCKS) KERNEL(NAME, TILE, INPUT, OUTPUT, ROWS, BLOCKS, false, true)
// Kernel names contain the most rows that a kernel takes.
#define KERNELS(NAME, OUTPUT)                                            \
    ADAPTED_KERNEL(NAME##_1, DEEP, ROW_MAJOR, OUTPUT, 1, SHARED_BLOCKS) \
    ADAPTED_KERNEL(NAME##_4, DEEP, ROW_MAJOR, OUTPUT, 4, 1)             \
    ADAPTED_KERNEL(NAME##_8, TALL, ROW_MAJOR, OUTPUT, 8, 1)             \
    ADAPTED_KERNEL(NAME##_16, TALL, ROW_MAJOR, OUTPUT, 16, 1)
KERNELS(skinny_adapted_f32, STORE_F32)
KERNELS(skinny_adapted_add, ADD_F32)
ADAPTED_KERNEL(skinny_adapted_glu_1, GATE_UP, ROW_MAJOR, GLU_ROW_MAJOR, 1, SHARED_BLOCKS)
ADAPTED_KERNEL(skinny_adapted_glu_8, GATE_UP, ROW_MAJOR, GLU_ROW_MAJOR, 8, SHARED_BLOCKS)
ADAPTED_KERNEL(skinny_adapted_glu_16, GATE_UP, ROW_MAJOR, GLU_ROW_MAJOR, 16, 1)

#if __CUDA_ARCH__ >= 900
#define FRAGMENT_KERNELS(NAME, TILE, OUTPUT, BLOCKS)                               \
    ADAPTED_KERNEL(NAME##_fragments_8, TILE, FRAGMENT_MAJOR, OUTPUT, 8, BLOCKS)   \
    ADAPTED_KERNEL(NAME##_fragments_16, TILE, FRAGMENT_MAJOR, OUTPUT, 16, 1)
FRAGMENT_KERNELS(skinny_adapted_f32, TALL, STORE_F32, 1)
FRAGMENT_KERNELS(skinny_adapted_add, TALL, ADD_F32, 1)
FRAGMENT_KERNELS(skinny_adapted_glu, GATE_UP, GLU_FRAGMENT_MAJOR, SHARED_BLOCKS)
#endif
