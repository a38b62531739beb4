// Small integers and floats without conversions, which would cost several times as much as the surrounding operations: an f32 from 2^23 on
// has steps of one, so that its low bits are an integer, and a fused operation on it rounds to an integer.
#pragma once
#include "common/types.cuh"

constexpr float TWO_23 = 8388608.0f;
constexpr u32 TWO_23_BITS = 0x4b000000u;

// 2^23 plus byte `at` of x, or plus its half `at`.
__device__ __forceinline__ float from_byte(u32 x, int at) { return __uint_as_float(__byte_perm(x, TWO_23_BITS, 0x7440 | at)); }
__device__ __forceinline__ float from_half(u32 x, int at) { return __uint_as_float(__byte_perm(x, TWO_23_BITS, at ? 0x7432 : 0x7410)); }
// The third bytes of four floats, which are 2^23 plus a number of 65536ths: their integer parts.
__device__ __forceinline__ u32 whole_bytes(float a, float b, float c, float d) {
    u32 first = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x0062), second = __byte_perm(__float_as_uint(c), __float_as_uint(d), 0x0062);
    return __byte_perm(first, second, 0x5410);
}

// (n + 1/2) / 2^16 of half `at` of a draw. Exact: a fused operation rounds once, and the result is an f32.
__device__ __forceinline__ float fraction16(u32 draw, int at) {
    return __fmaf_rn(from_half(draw, at), 1.0f / 65536, -TWO_23 / 65536 + 1.0f / (1 << 17));
}

// Eight values of 4 bits: even ones in the bytes of `even` and odd ones in those of `odd`, or vice versa.
struct Bytes {
    u32 even, odd;
};
__device__ __forceinline__ Bytes bytes_of_nibbles(u32 x) { return {x & 0x0f0f0f0fu, x >> 4 & 0x0f0f0f0fu}; }
__device__ __forceinline__ u32 nibbles_of_bytes(u32 even, u32 odd) { return (even & 0x0f0f0f0fu) | (odd << 4 & 0xf0f0f0f0u); }
// 2^23 plus value i.
__device__ __forceinline__ float from_nibble(const Bytes& x, int i) { return from_byte(i % 2 ? x.odd : x.even, i / 2); }
// The integer parts of eight floats, as above, in four bits each.
__device__ __forceinline__ u32 whole_nibbles(const float* x) {
    return nibbles_of_bytes(whole_bytes(x[0], x[2], x[4], x[6]), whole_bytes(x[1], x[3], x[5], x[7]));
}
