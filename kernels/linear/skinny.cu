// The skinny GEMM: y[m, n] = sum over k of x[m, k] w[n, k] for 1 to 16 rows of activations and NVFP4 weights. Bound by reading the
// weights once, and almost as much by the instructions that decode them. K must be a multiple of 16.
//
// A block takes consecutive tiles of output features, and cuts the steps along K of all of them into equal shares for its warps
// (skinny/schedule.cuh). A warp streams the weights of its share through a ring of its own (skinny/pipeline.cuh), which it begins to fill
// before the kernel waits for its predecessor, because weights depend on no kernel. Activations are in shared memory as f16 in the order of
// the weights (skinny/memory.cuh, skinny/activations.cuh). The warps' accumulators of a tile (skinny/accumulators.cuh) go to shared memory
// and are added up at the end (skinny/epilogue.cuh). If tiles would divide unevenly, two blocks of a cluster take the same tiles over half
// of K each.
//
// RMSNorm is fused on both sides (norm/fused_norm.cuh): GEMMs on normalized rows apply the rows' factors in their epilogue
// (skinny/input_norm.cuh), and GEMMs that add to the residual stream prepare the next norm in theirs.
#include "linear/skinny/run.cuh"

// Kernel names contain the most rows that a kernel takes.
#define KERNELS(NAME, OUTPUT)                         \
    KERNEL(NAME##_1, DEEP, ROW_MAJOR, OUTPUT, 1, 2)   \
    KERNEL(NAME##_4, DEEP, ROW_MAJOR, OUTPUT, 4, 2)   \
    KERNEL(NAME##_8, TALL, ROW_MAJOR, OUTPUT, 8, 1)   \
    KERNEL(NAME##_16, TALL, ROW_MAJOR, OUTPUT, 16, 1)
KERNELS(skinny_f32, STORE_F32)
KERNELS(skinny_f16, STORE_F16)
KERNELS(skinny_add, ADD_F32)
KERNEL(skinny_glu_1, GATE_UP, ROW_MAJOR, GLU_ROW_MAJOR, 1, 2)
KERNEL(skinny_glu_8, GATE_UP, ROW_MAJOR, GLU_ROW_MAJOR, 8, 2)
KERNEL(skinny_glu_16, GATE_UP, ROW_MAJOR, GLU_ROW_MAJOR, 16, 1)
KERNEL(skinny_f32_residual_1, DEEP, RESIDUAL, STORE_F32, 1, 2)
KERNEL(skinny_glu_residual_1, GATE_UP, RESIDUAL, GLU_ROW_MAJOR, 1, 2)

#if __CUDA_ARCH__ >= 900
#define FRAGMENT_KERNELS(NAME, TILE, OUTPUT, BLOCKS)                       \
    KERNEL(NAME##_fragments_8, TILE, FRAGMENT_MAJOR, OUTPUT, 8, BLOCKS) \
    KERNEL(NAME##_fragments_16, TILE, FRAGMENT_MAJOR, OUTPUT, 16, 1)
FRAGMENT_KERNELS(skinny_f32, TALL, STORE_F32, 1)
FRAGMENT_KERNELS(skinny_f16, TALL, STORE_F16, 1)
FRAGMENT_KERNELS(skinny_add, TALL, ADD_F32, 1)
FRAGMENT_KERNELS(skinny_glu, GATE_UP, GLU_FRAGMENT_MAJOR, 2)
#endif
