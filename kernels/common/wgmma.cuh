// Inline PTX of wgmma, Hopper's asynchronous matrix products of a warpgroup, four warps.
//
// m64nNk16: C += A B. A has 64 rows, 16 per warp, whose lanes hold A and C as in common/ptx.cuh; C is N / 8 such fragments side by side.
// For f16, B is in shared memory in matrices of 8 columns by 8 rows, 16 bytes per column; for bf16, B is swizzled, and A may be too.
//
// Registers of A and C belong to the tensor cores from a fence to the wait for the committed group; B must have been published before a
// barrier.
#pragma once
#include "common/ptx.cuh"

#define HAS_WGMMA (__CUDA_ARCH__ == 900)

constexpr int WARPGROUP = 4 * WARP;

// The number of a thread's warpgroup. The shuffle tells the compiler that all lanes agree, so it computes operand addresses once per warp.
__device__ __forceinline__ int warpgroup_id() { return __shfl_sync(ALL_LANES, threadIdx.x / WARPGROUP, 0); }

#if HAS_WGMMA
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving uses of the accumulators before the wait for them.
template <int TILES>
__device__ __forceinline__ void wgmma_fence_accumulators(float (&c)[TILES][4]) {
#pragma unroll
    for (int i = 0; i < TILES; i++) asm volatile("" : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])::"memory");
}
// Makes earlier writes to shared memory visible to the tensor cores after the next barrier.
__device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The descriptor of B: an address in shared memory, a multiple of 16, and the distances in bytes between its 8 by 8 matrices.
template <int ALONG_K, int ALONG_N>
__device__ __forceinline__ u64 wgmma_descriptor(u32 shared) {
    return (u64)(shared >> 4 & 0x3fff) | (u64)(ALONG_K / 16) << 16 | (u64)(ALONG_N / 16) << 32;
}

#define WGMMA_ACCUMULATORS(I) "+f"(c[I][0]), "+f"(c[I][1]), "+f"(c[I][2]), "+f"(c[I][3])
__device__ __forceinline__ void wgmma_f16(float (&c)[1][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {"
                 "%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
                 : WGMMA_ACCUMULATORS(0)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}
__device__ __forceinline__ void wgmma_f16(float (&c)[2][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7}, "
                 "{%8, %9, %10, %11}, %12, 1, 1, 1, 0;"
                 : WGMMA_ACCUMULATORS(0), WGMMA_ACCUMULATORS(1)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}
__device__ __forceinline__ void wgmma_f16(float (&c)[4][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
                 : WGMMA_ACCUMULATORS(0), WGMMA_ACCUMULATORS(1), WGMMA_ACCUMULATORS(2), WGMMA_ACCUMULATORS(3)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}
__device__ __forceinline__ void wgmma_f16(float (&c)[8][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
                 : WGMMA_ACCUMULATORS(0), WGMMA_ACCUMULATORS(1), WGMMA_ACCUMULATORS(2), WGMMA_ACCUMULATORS(3),
                   WGMMA_ACCUMULATORS(4), WGMMA_ACCUMULATORS(5), WGMMA_ACCUMULATORS(6), WGMMA_ACCUMULATORS(7)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}
__device__ __forceinline__ void wgmma_f16(float (&c)[16][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
                 : WGMMA_ACCUMULATORS(0), WGMMA_ACCUMULATORS(1), WGMMA_ACCUMULATORS(2), WGMMA_ACCUMULATORS(3),
                   WGMMA_ACCUMULATORS(4), WGMMA_ACCUMULATORS(5), WGMMA_ACCUMULATORS(6), WGMMA_ACCUMULATORS(7),
                   WGMMA_ACCUMULATORS(8), WGMMA_ACCUMULATORS(9), WGMMA_ACCUMULATORS(10), WGMMA_ACCUMULATORS(11),
                   WGMMA_ACCUMULATORS(12), WGMMA_ACCUMULATORS(13), WGMMA_ACCUMULATORS(14), WGMMA_ACCUMULATORS(15)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}
// The descriptor of a swizzled operand: rows of 128 bytes, whose pieces of 16 bytes are swizzled by the row's number modulo 8. The address
// is that of a row whose number is a multiple of 8, in a block of rows that begins at a multiple of 1024, plus 32 bytes per 16 elements
// along a row. If N runs along rows, `blocks` is the distance in bytes between blocks of 64 columns each.
__device__ __forceinline__ u64 wgmma_swizzled(u32 shared, int blocks) {
    return (u64)(shared >> 4 & 0x3fff) | (u64)(blocks / 16) << 16 | (u64)(1024 / 16) << 32 | (u64)1 << 62;
}
// C = A B, or added to C: both in shared memory, swizzled, with K along rows.
template <bool ADD>
__device__ __forceinline__ void wgmma_bf16(float (&c)[8][4], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "%32, %33, %34, 1, 1, 0, 0;"
                 : WGMMA_ACCUMULATORS(0), WGMMA_ACCUMULATORS(1), WGMMA_ACCUMULATORS(2), WGMMA_ACCUMULATORS(3),
                   WGMMA_ACCUMULATORS(4), WGMMA_ACCUMULATORS(5), WGMMA_ACCUMULATORS(6), WGMMA_ACCUMULATORS(7)
                 : "l"(a), "l"(b), "n"((int)ADD));
}
template <bool ADD>
__device__ __forceinline__ void wgmma_bf16(float (&c)[16][4], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "%64, %65, %66, 1, 1, 0, 0;"
                 : WGMMA_ACCUMULATORS(0), WGMMA_ACCUMULATORS(1), WGMMA_ACCUMULATORS(2), WGMMA_ACCUMULATORS(3),
                   WGMMA_ACCUMULATORS(4), WGMMA_ACCUMULATORS(5), WGMMA_ACCUMULATORS(6), WGMMA_ACCUMULATORS(7),
                   WGMMA_ACCUMULATORS(8), WGMMA_ACCUMULATORS(9), WGMMA_ACCUMULATORS(10), WGMMA_ACCUMULATORS(11),
                   WGMMA_ACCUMULATORS(12), WGMMA_ACCUMULATORS(13), WGMMA_ACCUMULATORS(14), WGMMA_ACCUMULATORS(15)
                 : "l"(a), "l"(b), "n"((int)ADD));
}
// C += A B: A in registers, B in shared memory, swizzled, with N along rows.
__device__ __forceinline__ void wgmma_bf16_rows(float (&c)[8][4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : WGMMA_ACCUMULATORS(0), WGMMA_ACCUMULATORS(1), WGMMA_ACCUMULATORS(2), WGMMA_ACCUMULATORS(3),
                   WGMMA_ACCUMULATORS(4), WGMMA_ACCUMULATORS(5), WGMMA_ACCUMULATORS(6), WGMMA_ACCUMULATORS(7)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_bf16_rows(float (&c)[16][4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : WGMMA_ACCUMULATORS(0), WGMMA_ACCUMULATORS(1), WGMMA_ACCUMULATORS(2), WGMMA_ACCUMULATORS(3),
                   WGMMA_ACCUMULATORS(4), WGMMA_ACCUMULATORS(5), WGMMA_ACCUMULATORS(6), WGMMA_ACCUMULATORS(7),
                   WGMMA_ACCUMULATORS(8), WGMMA_ACCUMULATORS(9), WGMMA_ACCUMULATORS(10), WGMMA_ACCUMULATORS(11),
                   WGMMA_ACCUMULATORS(12), WGMMA_ACCUMULATORS(13), WGMMA_ACCUMULATORS(14), WGMMA_ACCUMULATORS(15)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef WGMMA_ACCUMULATORS
#endif
