/* One of two translation units that include the header and are linked into one program. */
#include "check.h"

NVFP4_Status other_unit(NVFP4_Tensor *tensor, int64_t *size);

int main(void)
{
    const int64_t shape[] = {3};
    NVFP4_Tensor *tensor = NULL;
    int64_t size = 0;
    OK(NVFP4_tensor_empty(shape, 1, NVFP4_DTYPE_FLOAT32, NVFP4_DEVICE_CPU, 0, &tensor));
    OK(other_unit(tensor, &size));
    CHECK(size == 3);
    OK(NVFP4_tensor_release(tensor));
    return report("two_units");
}
