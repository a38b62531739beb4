// Tables of a row a token, on the device or in host memory.
#pragma once
#include "format/int8.cuh"
#include "format/packed.cuh"

enum Kind { F32, F16, BF16, NVFP4, INT8 };

struct Table {
    const void* values;     // [vocabulary, width]; NVFP4: see format/packed.cuh
    const float* scales;    // [vocabulary]: INT8
    float global;           // NVFP4
    float scale;            // of the values
    int kind;
    int width;

    // Element i of a token's row.
    __device__ __forceinline__ float at(int token, int i) const {
        size_t at = (size_t)token * width + i;
        float value;
        switch (kind) {
            case F32: value = ((const float*)values)[at]; break;
            case F16: value = f16_to_float(((const u16*)values)[at]); break;
            case BF16: value = bf16_to_float(((const u16*)values)[at]); break;
            case INT8: value = int8_code(values, at) * scales[token]; break;
            default: value = packed_value((const u8*)values, width, token, i, global);
        }
        return value * scale;
    }
};
