// The moments of an optimizer in 4 and 8 bits. Mirrors src/format/moment.rs bit for bit.
#pragma once
#include "format/encode.cuh"
#include "format/random.cuh"

constexpr float FIRST_MAX = 7.0f, SECOND_MAX = 15.0f, WIDE_MAX = 127.0f;

// The least e4m3 byte whose value is at least x, which is not negative; saturates.
__device__ __forceinline__ u32 encode_scale_up(float x) {
    u32 nearest = encode_scale(x);
    return nearest + (scale_to_float(nearest) < x && nearest < E4M3_MAX_BYTE);
}
// The scale of a block for codes up to `most`.
__device__ __forceinline__ u32 moment_scale(float amax, float most, float global) { return encode_scale_up(amax / (most * global)); }

// Of 16 random bits, a threshold in (0, 1).
__device__ __forceinline__ float threshold16(u32 draw) { return ((float)(draw & 0xffff) + 0.5f) * (1.0f / 65536); }
// Of 8, a dither in [-1/2, 1/2).
__device__ __forceinline__ float dither8(u32 draw) { return ((float)(draw & 0xff) + 0.5f) * (1.0f / 256) - 0.5f; }

__device__ __forceinline__ u32 encode_first(float quotient, float dither) {
    return (u32)(int)fminf(fmaxf(rintf(quotient + dither), -FIRST_MAX), FIRST_MAX) & 15;
}
__device__ __forceinline__ float decode_first(u32 code, float dither) { return (float)((int)(code << 28) >> 28) - dither; }

// Rounds a quotient that is not beyond `most` stochastically.
__device__ __forceinline__ float round_stochastic(float quotient, float threshold) {
    float low = floorf(quotient);
    return low + (threshold < quotient - low ? 1.0f : 0.0f);
}
__device__ __forceinline__ u32 encode_second(float quotient, float threshold, float most) {
    return (u32)fminf(fmaxf(round_stochastic(fminf(quotient, most), threshold), 1.0f), most);
}
