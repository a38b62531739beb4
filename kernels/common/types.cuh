// Short names for fixed-width integers, and the reinterpretations that every kernel needs. Arithmetic of number formats is in format/.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define INFINITY __int_as_float(0x7f800000)

constexpr float LOG2E = 1.4426950408889634f;

constexpr int WARP = 32;
constexpr u32 ALL_LANES = 0xffffffffu;

__device__ __forceinline__ int lane_id() { return threadIdx.x & (WARP - 1); }

__device__ __forceinline__ float4 as_floats(uint4 v) {
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}

// A bf16 as a float, exactly.
__device__ __forceinline__ float bf16_to_float(u16 x) { return __uint_as_float((u32)x << 16); }

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
