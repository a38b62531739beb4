/* The other unit: see two_units_a.c. */
#include <nvfp4.h>

NVFP4_Status other_unit(NVFP4_Tensor *tensor, int64_t *size);

NVFP4_Status other_unit(NVFP4_Tensor *tensor, int64_t *size)
{
    size_t rank;
    return NVFP4_tensor_shape(tensor, size, 1, &rank);
}
