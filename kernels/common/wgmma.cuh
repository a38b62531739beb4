// Inline PTX of Hopper's matrix products, which tensor cores make for four warps together, a warpgroup, and meanwhile those go on.
//
// m64nNk16: C += A B for 64 rows, 16 of them each warp's, in whose lanes A and C are as common/ptx.cuh has them; C has N / 8 such
// pieces side by side. B is in shared memory in pieces of 8 columns by 8 rows, 16 bytes to a column.
//
// Registers of A and C belong to the tensor cores from a fence to the wait for the group that was committed; B must have been
// published before a barrier.
#pragma once
#include "common/ptx.cuh"

#define HAS_WGMMA (__CUDA_ARCH__ == 900)

constexpr int WARPGROUP = 4 * WARP;

#if HAS_WGMMA
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps what uses sums from being moved before the wait for them.
template <int TILES>
__device__ __forceinline__ void wgmma_settle(float (&c)[TILES][4]) {
#pragma unroll
    for (int i = 0; i < TILES; i++) asm volatile("" : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])::"memory");
}
// What was written to shared memory is there for tensor cores after a barrier that follows this.
__device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Where B is: an address in shared memory, a multiple of 16, and how far apart pieces are.
template <int ALONG_K, int ALONG_N>
__device__ __forceinline__ u64 wgmma_operand(u32 shared) {
    return (u64)(shared >> 4 & 0x3fff) | (u64)(ALONG_K / 16) << 16 | (u64)(ALONG_N / 16) << 32;
}

#define WGMMA_SUMS(I) "+f"(c[I][0]), "+f"(c[I][1]), "+f"(c[I][2]), "+f"(c[I][3])
__device__ __forceinline__ void wgmma_f16(float (&c)[1][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {"
                 "%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
                 : WGMMA_SUMS(0)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}
__device__ __forceinline__ void wgmma_f16(float (&c)[2][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7}, "
                 "{%8, %9, %10, %11}, %12, 1, 1, 1, 0;"
                 : WGMMA_SUMS(0), WGMMA_SUMS(1)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}
__device__ __forceinline__ void wgmma_f16(float (&c)[4][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
                 : WGMMA_SUMS(0), WGMMA_SUMS(1), WGMMA_SUMS(2), WGMMA_SUMS(3)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}
__device__ __forceinline__ void wgmma_f16(float (&c)[8][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
                 : WGMMA_SUMS(0), WGMMA_SUMS(1), WGMMA_SUMS(2), WGMMA_SUMS(3),
                   WGMMA_SUMS(4), WGMMA_SUMS(5), WGMMA_SUMS(6), WGMMA_SUMS(7)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}
__device__ __forceinline__ void wgmma_f16(float (&c)[16][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
                 : WGMMA_SUMS(0), WGMMA_SUMS(1), WGMMA_SUMS(2), WGMMA_SUMS(3),
                   WGMMA_SUMS(4), WGMMA_SUMS(5), WGMMA_SUMS(6), WGMMA_SUMS(7),
                   WGMMA_SUMS(8), WGMMA_SUMS(9), WGMMA_SUMS(10), WGMMA_SUMS(11),
                   WGMMA_SUMS(12), WGMMA_SUMS(13), WGMMA_SUMS(14), WGMMA_SUMS(15)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}
#undef WGMMA_SUMS
#endif
