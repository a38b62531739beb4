// E2M1 codes with a residual in local steps. Mirrors src/format/residual.rs bit for bit.
//
// A point of the grid is an index, counted in steps from zero: a level, -7 to 7, times the steps of a gap, plus the residual. Gaps are 0.5
// wide up to level 4, then 1 up to level 6, then 2, so that the value of an index is the largest of three lines, and the index of a value
// the smallest of their inverses.
#pragma once
#include "format/fraction.cuh"

template <int BITS>
struct Residual {
    static constexpr int STEPS = 1 << BITS;
    static constexpr int LAST = 7 * STEPS + STEPS / 2 - 1;

    // The value of an index.
    static __device__ __forceinline__ float value(float index) {
        float x = fabsf(index);
        float v = fmaxf(fmaxf(x * (0.5f / STEPS), __fmaf_rn(x, 1.0f / STEPS, -2.0f)), __fmaf_rn(x, 2.0f / STEPS, -8.0f));
        return copysignf(v, index);
    }
    // The fraction that the low half of a draw stands for.
    static __device__ __forceinline__ float fraction(u32 draw) {
        return BITS == 4 ? fraction16(draw, 0) : ((float)(draw >> 4 & 0xfff) + 0.5f) * (1.0f / 4096);
    }
    // The index of a value, rounded stochastically by a fraction.
    static __device__ __forceinline__ float encode(float value, float fraction) {
        float x = fabsf(value);
        float exact = fminf(fminf(2.0f * STEPS * x, __fmaf_rn(x, (float)STEPS, 2.0f * STEPS)),
                            fminf(__fmaf_rn(x, 0.5f * STEPS, 4.0f * STEPS), (float)LAST));
        return copysignf(round_down(exact + fraction) - TWO_23, value);
    }
};

// Four indices with residuals of 4 bits, each plus 128 in a byte: 16 times the level plus 8, plus the residual.
struct Indices {
    u32 bytes;

    // The levels plus 8.
    __device__ __forceinline__ u32 levels() const { return bytes + 0x08080808u >> 4 & 0x0f0f0f0fu; }
    // Index i.
    __device__ __forceinline__ float at(int i) const { return from_byte(bytes, i) - (TWO_23 + 128); }

    // Of codes, each with its sign in bit 7 of a byte and its magnitude in bits 3 to 1, and residuals in two's complement.
    static __device__ __forceinline__ Indices of(u32 codes, u32 residuals) {
        u32 negative = (codes >> 7 & 0x01010101u) * 7;
        u32 levels = ((codes >> 1 & 0x07070707u) ^ negative) + (0x08080808u - negative);
        return {levels * 16 + (residuals ^ 0x08080808u) - 0x08080808u};
    }
    static __device__ __forceinline__ Indices of(float a, float b, float c, float d) {
        constexpr float BIAS = TWO_23 + 128;
        return {low_bytes(a + BIAS, b + BIAS, c + BIAS, d + BIAS)};
    }
    // The codes, as of() takes them; the residuals are the low halves of the bytes.
    __device__ __forceinline__ u32 codes() const {
        u32 levels = this->levels(), negative = ~levels >> 3 & 0x01010101u;
        u32 magnitudes = ((levels & 0x07070707u) ^ negative * 7) + negative;
        return negative << 7 | magnitudes << 1;
    }
};

// Bytes of x that are not zero, where none is above 127.
__device__ __forceinline__ int count_bytes(u32 x) { return __popc(x + 0x7f7f7f7fu & 0x80808080u); }
