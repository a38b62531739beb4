// Decode attention of a single row with an adapter, for the heads of attention/decode.cu (attention/adapter.cuh).
#include "attention/decode.cuh"

// With as many registers as the other kernels of one row leave, whose blocks share a multiprocessor with these.
#define ADAPTED_KERNEL(D, NAME, STAGES, SPAN)                                                                                        \
    extern "C" __global__ void __launch_bounds__(SPAN* PAGE_WARPS* WARP, 4 / SPAN) NAME(const __grid_constant__ Arguments a) {       \
        run<D, false, D, STAGES, SPAN, false, u16, false, true>(a);                                                                    \
    }
#define ADAPTED_KERNELS(D)                                          \
    ADAPTED_KERNEL(D, attention_decode_##D##_adapted_ring4, 4, 2)   \
    ADAPTED_KERNEL(D, attention_decode_##D##_adapted_ring2, 2, 1)   \
    ADAPTED_KERNEL(D, attention_decode_##D##_adapted_ring1, 1, 1)

ADAPTED_KERNELS(32)
ADAPTED_KERNELS(64)
ADAPTED_KERNELS(128)
