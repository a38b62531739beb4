/* Sizes and offsets of the structs in the header, as a host in another language has to mirror them. The same numbers stand in
 * src/abi/layout.rs; changing one of them breaks hosts. */
#include "check.h"
#include <stddef.h>

#define SIZE(type, bytes) CHECK(sizeof(type) == (bytes))
#define AT(type, field, offset) CHECK(offsetof(type, field) == (offset))

int main(void)
{
    SIZE(NVFP4_Status, 4);
    SIZE(size_t, 8);

    SIZE(NVFP4_QuantizeOptions, 32);
    AT(NVFP4_QuantizeOptions, struct_size, 0);
    AT(NVFP4_QuantizeOptions, levels, 4);
    AT(NVFP4_QuantizeOptions, recipe, 8);
    AT(NVFP4_QuantizeOptions, rounding, 12);
    AT(NVFP4_QuantizeOptions, nonfinite, 16);
    AT(NVFP4_QuantizeOptions, scale_layout, 20);
    AT(NVFP4_QuantizeOptions, seed, 24);

    SIZE(NVFP4_LoadOptions, 24);
    AT(NVFP4_LoadOptions, struct_size, 0);
    AT(NVFP4_LoadOptions, device_type, 4);
    AT(NVFP4_LoadOptions, device_index, 8);
    AT(NVFP4_LoadOptions, threads, 12);
    AT(NVFP4_LoadOptions, activations, 16);
    AT(NVFP4_LoadOptions, sampling_only, 20);

    SIZE(NVFP4_Message, 32);
    AT(NVFP4_Message, role, 0);
    AT(NVFP4_Message, role_length, 8);
    AT(NVFP4_Message, content, 16);
    AT(NVFP4_Message, content_length, 24);

    return report("layout");
}
