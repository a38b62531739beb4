// The issue rate of an instruction on a multiprocessor: eight independent chains per thread, whose links cannot be merged.
#include "common/types.cuh"

struct Arguments {
    u64* clocks;    // [blocks]
    u32* keep;
    u32 seed;
    int rounds;
};

constexpr int CHAINS = 8;
constexpr int LINKS = 8;    // of each chain in a round

__device__ __forceinline__ u64 clock_now() {
    u64 t;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory");
    return t;
}

struct Lop3 {
    static __device__ __forceinline__ void step(u32& x, u32 y, u32 z) { asm volatile("lop3.b32 %0, %0, %1, %2, 0x9a;" : "+r"(x) : "r"(y), "r"(z)); }
};
struct Shf {
    static __device__ __forceinline__ void step(u32& x, u32 y, u32) { asm volatile("shf.l.wrap.b32 %0, %0, %1, 7;" : "+r"(x) : "r"(y)); }
};
struct Prmt {
    static __device__ __forceinline__ void step(u32& x, u32 y, u32 z) { asm volatile("prmt.b32 %0, %0, %1, %2;" : "+r"(x) : "r"(y), "r"(z)); }
};
struct Imad {
    static __device__ __forceinline__ void step(u32& x, u32 y, u32 z) { asm volatile("mad.lo.u32 %0, %0, %1, %2;" : "+r"(x) : "r"(y), "r"(z)); }
};
struct Iadd3 {
    static __device__ __forceinline__ void step(u32& x, u32 y, u32 z) { asm volatile("{.reg .u32 t; add.u32 t, %0, %1; add.u32 %0, t, %2;}" : "+r"(x) : "r"(y), "r"(z)); }
};
struct Hfma2 {
    static __device__ __forceinline__ void step(u32& x, u32 y, u32 z) { asm volatile("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(x) : "r"(y), "r"(z)); }
};
struct Ffma {
    static __device__ __forceinline__ void step(u32& x, u32 y, u32 z) { asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+r"(x) : "r"(y), "r"(z)); }
};
struct ToHalves {
    static __device__ __forceinline__ void step(u32& x, u32 y, u32) {
        asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(__uint_as_float(x)), "f"(__uint_as_float(y)));
    }
};
struct FromE4m3 {
    static __device__ __forceinline__ void step(u32& x, u32, u32) { asm volatile("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(x) : "h"((u16)x)); }
};

template <typename Op>
__device__ __forceinline__ void time(const Arguments& a) {
    u32 x[CHAINS];
#pragma unroll
    for (int i = 0; i < CHAINS; i++) x[i] = a.seed * (i + 1) + threadIdx.x;
    __syncthreads();
    u64 start = clock_now();
    for (int round = 0; round < a.rounds; round++) {
#pragma unroll
        for (int link = 0; link < LINKS; link++) {
#pragma unroll
            for (int i = 0; i < CHAINS; i++) Op::step(x[i], x[(i + 1) % CHAINS], x[(i + 2) % CHAINS]);
        }
    }
    __syncthreads();
    u64 end = clock_now();
    u32 all = 0;
#pragma unroll
    for (int i = 0; i < CHAINS; i++) all ^= x[i];
    if (all == 0x12345678u) *a.keep = all;
    if (threadIdx.x == 0) a.clocks[blockIdx.x] = end - start;
}

#define TIME(NAME, OP) \
    extern "C" __global__ void __launch_bounds__(512) NAME(const __grid_constant__ Arguments a) { time<OP>(a); }
TIME(lop3, Lop3)
TIME(shf, Shf)
TIME(prmt, Prmt)
TIME(imad, Imad)
TIME(iadd3, Iadd3)
TIME(hfma2, Hfma2)
TIME(ffma, Ffma)
TIME(to_halves, ToHalves)
TIME(from_e4m3, FromE4m3)
