// Small integers and floats without conversions, which cost several times as much as what they are part of: an f32 of 2^23 and more
// steps by one, so that its low bits are an integer.
#pragma once
#include "common/types.cuh"

constexpr float TWO_23 = 8388608.0f;
constexpr u32 TWO_23_BITS = 0x4b000000u;

// 2^23 plus byte `at` of x, or plus its half `at`.
__device__ __forceinline__ float from_byte(u32 x, int at) { return __uint_as_float(__byte_perm(x, TWO_23_BITS, 0x7440 | at)); }
__device__ __forceinline__ float from_half(u32 x, int at) { return __uint_as_float(__byte_perm(x, TWO_23_BITS, at ? 0x7432 : 0x7410)); }
// Has the integer not above x, from 0 to below 2^22, in its low bits.
__device__ __forceinline__ float round_down(float x) { return __fadd_rd(x, TWO_23); }
// Has the integer nearest to x, ties to even, in its low bits, in two's complement; |x| is below 2^21.
__device__ __forceinline__ float round_to_even(float x) { return x + 1.5f * TWO_23; }
// The low bytes of four floats.
__device__ __forceinline__ u32 low_bytes(float a, float b, float c, float d) {
    u32 first = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x0040), second = __byte_perm(__float_as_uint(c), __float_as_uint(d), 0x0040);
    return __byte_perm(first, second, 0x5410);
}

// (n + 1/2) / 2^16 of half `at` of a draw. Exact, as every line here: a fused operation rounds once, and the result is an f32.
__device__ __forceinline__ float fraction16(u32 draw, int at) {
    return __fmaf_rn(from_half(draw, at), 1.0f / 65536, -TWO_23 / 65536 + 1.0f / (1 << 17));
}
// (n + 1/2) / 2^8 - 1/2 of byte `at` of a draw: from 128 on, an f32 steps by 2^-16, so that n stands in its second byte, and the half in its first.
__device__ __forceinline__ float dither8(u32 draw, int at) { return __uint_as_float(__byte_perm(draw, 0x43000080u, 0x7604 | at << 4)) - 128.5f; }

// Eight values of 4 bits: even ones in the bytes of `even`, odd ones in those of `odd`, or the other way.
struct Bytes {
    u32 even, odd;
};
__device__ __forceinline__ Bytes bytes_of_nibbles(u32 x) { return {x & 0x0f0f0f0fu, x >> 4 & 0x0f0f0f0fu}; }
__device__ __forceinline__ u32 nibbles_of_bytes(u32 even, u32 odd) { return (even & 0x0f0f0f0fu) | (odd << 4 & 0xf0f0f0f0u); }
// 2^23 plus value i.
__device__ __forceinline__ float from_nibble(const Bytes& x, int i) { return from_byte(i % 2 ? x.odd : x.even, i / 2); }
// The low four bits of eight floats.
__device__ __forceinline__ u32 low_nibbles(const float* x) { return nibbles_of_bytes(low_bytes(x[0], x[2], x[4], x[6]), low_bytes(x[1], x[3], x[5], x[7])); }
