// The skinny GEMM of deterministic plans on Hopper: rows have the bits that linear/wide.cu gives them. Tensor cores add up a range of K in the
// same order, and the sums of ranges are added in order. mma.sync and wgmma round alike; tests/cuda/deterministic.rs compares both.
#include "linear/skinny/run.cuh"

// Kernel names contain the most rows that a kernel takes.
#define KERNELS(NAME, TILE, INPUT, OUTPUT, BLOCKS)                       \
    KERNEL(NAME##_1, TILE, INPUT, OUTPUT, 1, 2, true)                    \
    KERNEL(NAME##_4, TILE, INPUT, OUTPUT, 4, BLOCKS, true)
#define FRAGMENT_KERNELS(NAME, TILE, OUTPUT)                             \
    KERNEL(NAME##_fragments_8, TILE, FRAGMENT_MAJOR, OUTPUT, 8, 1, true) \
    KERNEL(NAME##_fragments_16, TILE, FRAGMENT_MAJOR, OUTPUT, 16, 1, true)
KERNELS(skinny_ranges_f32, TALL, ROW_MAJOR, STORE_F32, 2)
KERNELS(skinny_ranges_f16, TALL, ROW_MAJOR, STORE_F16, 2)
KERNELS(skinny_ranges_add, TALL, ROW_MAJOR, ADD_F32, 2)
KERNELS(skinny_ranges_glu, GATE_UP, ROW_MAJOR, GLU_ROW_MAJOR, 2)
FRAGMENT_KERNELS(skinny_ranges_f32, TALL, STORE_F32)
FRAGMENT_KERNELS(skinny_ranges_f16, TALL, STORE_F16)
FRAGMENT_KERNELS(skinny_ranges_add, TALL, ADD_F32)
FRAGMENT_KERNELS(skinny_ranges_glu, GATE_UP, GLU_FRAGMENT_MAJOR)
KERNELS(skinny_ranges_f32_norm, TALL, NORMALIZED, STORE_F32, 1)
KERNELS(skinny_ranges_glu_norm, GATE_UP, NORMALIZED, GLU_ROW_MAJOR, 1)
