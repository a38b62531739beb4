// The moments of an optimizer in 4 and 8 bits. Mirrors src/format/moment.rs bit for bit.
#pragma once
#include "format/encode.cuh"
#include "format/fraction.cuh"
#include "format/random.cuh"

constexpr float FIRST_MAX = 7.0f, SECOND_MAX = 15.0f, WIDE_MAX = 127.0f;

// The scale of a block for codes up to `most`.
__device__ __forceinline__ u32 moment_scale(float amax, float most, float global) { return encode_scale_up(amax / (most * global)); }

// A first moment in the low four bits; quotients are at most 7, as scales are rounded up.
__device__ __forceinline__ float encode_first(float quotient, float dither) { return round_to_even(quotient + dither); }
// Of 2^23 plus a code plus 8.
__device__ __forceinline__ float decode_first(float code, float dither) { return code - (TWO_23 + 8) - dither; }

// The root of a second moment in the low four bits.
__device__ __forceinline__ float encode_second(float quotient, float fraction) {
    return round_down(fmaxf(fminf(quotient, SECOND_MAX) + fraction, 1.0f));
}

// Of 16 random bits, a threshold in (0, 1), and what is rounded by one.
__device__ __forceinline__ float threshold16(u32 draw) { return fraction16(draw, 0); }
__device__ __forceinline__ float round_stochastic(float quotient, float threshold) {
    float low = floorf(quotient);
    return low + (threshold < quotient - low ? 1.0f : 0.0f);
}
