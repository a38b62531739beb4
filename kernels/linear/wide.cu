// The products of linear/wide.cuh whose rows have no adapters.
#include "linear/wide.cuh"

#define WIDE(NAME, COLUMNS, IS_GLU, IS_WHOLE)                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS<NoAdapters>, 1) linear_wide_##NAME(const __grid_constant__ Arguments a) { \
        run<COLUMNS, IS_GLU, IS_WHOLE, NoAdapters>(a, {});                                                                         \
    }
#define KERNEL(COLUMNS)                  \
    WIDE(COLUMNS, COLUMNS, false, false) \
    WIDE(glu_##COLUMNS, COLUMNS, true, false)
KERNEL(8)
KERNEL(16)
KERNEL(32)
KERNEL(64)
KERNEL(128)
WIDE(whole_64, 64, false, true)
WIDE(whole_128, 128, false, true)
WIDE(glu_whole_32, 32, true, true)
WIDE(glu_whole_64, 64, true, true)
WIDE(glu_whole_128, 128, true, true)
