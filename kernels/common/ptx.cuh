// Inline PTX, which only this file, cluster.cuh and wgmma.cuh contain. Each function is one instruction, or its equivalent on architectures
// that lack it. Matrix products are warp-wide and accumulate in f32. In those of shape m16n8k16 lane l holds, with g = l / 4 and t = l % 4:
//   A: rows g, g + 8, g, g + 8; columns 2t, 2t, 2t + 8, 2t + 8 (two neighbours in each word)
//   B: column g; rows 2t and 2t + 8 (two neighbours in each word)
//   C: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
#pragma once
#include "common/types.cuh"

// Rounding to nearest even; `low` goes to the low half.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ u32 pack_f16(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ u16 to_f16(float x) {
    u16 r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ float f16_to_float(u16 x) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
    return r;
}
__device__ __forceinline__ float f16_low(u32 pair) { return f16_to_float((u16)pair); }
__device__ __forceinline__ float f16_high(u32 pair) { return f16_to_float((u16)(pair >> 16)); }

// Fused multiply-add of pairs; the second clamps its results to 0 and 1.
__device__ __forceinline__ u32 fma_f16(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}
__device__ __forceinline__ u32 fma_sat_f16(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.sat.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}
__device__ __forceinline__ u32 fma_bf16(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

// The larger of each pair; NaN if either is NaN.
__device__ __forceinline__ u32 max_f16(u32 a, u32 b) {
    u32 r;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ u32 max_bf16(u32 a, u32 b) {
    u32 r;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
// In each half: 1 where a >= b, else 0. For bf16 both must be positive, and not NaN.
__device__ __forceinline__ u32 at_least_f16(u32 a, u32 b) {
    u32 r;
    asm("set.ge.f16x2.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ u32 at_least_bf16(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
    u32 r;
    asm("set.ge.bf16x2.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
#else
    // Such numbers order like their bits.
    return (((a | 0x80008000u) - b) >> 15 & 0x00010001u) * 0x3f80u;
#endif
}
// Rounds up to f16, where infinity follows the largest finite number.
__device__ __forceinline__ u16 to_f16_up(float x) {
    u16 r;
    asm("cvt.rp.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ float max_float(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

// 1 / x for a normal x, to two units in the last place.
__device__ __forceinline__ float reciprocal_approx(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// 1 / sqrt(x) for a normal x, to two units in the last place.
__device__ __forceinline__ float rsqrt_approx(float x) {
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// The square root of x, which is normal or zero, to two units in the last place; zero for subnormals.
__device__ __forceinline__ float sqrt_approx(float x) {
    float r;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// In each half: all bits if two f16 differ as numbers, neither of which is NaN; else none.
__device__ __forceinline__ u32 differing_f16(u32 a, u32 b) {
    u32 r;
    asm("set.ne.u32.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// Prefetches a line of global memory to the L2 cache.
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
// Keeps the compiler from holding memory contents in registers.
__device__ __forceinline__ void forget_memory() { asm volatile("" ::: "memory"); }

// A pair of f16 products, subnormals kept.
__device__ __forceinline__ u32 mul_f16(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

#if __CUDA_ARCH__ >= 890
// A pair of e4m3 as f16, exactly.
__device__ __forceinline__ u32 e4m3_to_f16(u16 pair) {
    u32 r;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(pair));
    return r;
}
#endif

__device__ __forceinline__ float exp2_approx(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

__device__ __forceinline__ void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The nearest tf32, which has the exponent of f32 and 10 bits of mantissa; ties go away from zero.
__device__ __forceinline__ u32 to_tf32(float x) {
    u32 r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
    return r;
}
// m16n8k8 of tf32. Lane l holds, with g and t as above:
//   A: rows g, g + 8, g, g + 8; columns t, t, t + 4, t + 4
//   B: column g; rows t and t + 4
// and C as above.
__device__ __forceinline__ void mma_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Whether tensor cores multiply e2m1 codes together with e4m3 scales by a warp-wide instruction.
#define HAS_FP4_MMA (__CUDA_ARCH__ >= 1200 && __CUDA_ARCH__ < 1300)

#if HAS_FP4_MMA
// m16n8k64 of e2m1, with a scale per 16 along K (PTX ISA 9.2: "Matrix Fragments for mma.m16n8k64" and "Block Scaling for mma.sync", with
// selectors 0). Lane l holds, with g and t as above:
//   A: rows g, g + 8, g, g + 8; columns 8t, 8t, 8t + 32, 8t + 32 (eight neighbours in each word, the first lowest)
//   B: column g; rows 8t and 8t + 32 (eight neighbours in each word)
//   scales of A: the four of row g if t = 0, of row g + 8 if t = 1, the first lowest; those of t = 2 and 3 are not read
//   scales of B: the four of column g if t = 0; the others are not read
// and C as above.
__device__ __forceinline__ void mma_fp4(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, u32 a_scales, u32 b_scales) {
    asm("mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {0, 0}, {%11}, {0, 0};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(a_scales), "r"(b_scales));
}
#endif

// Four 8 x 8 matrices of 16-bit elements; lanes 8i to 8i + 7 give the addresses of the rows of matrix i.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
}
// load_matrices() with each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], u32 shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
}
// The transpose of an 8 x 8 matrix of 16-bit elements held as an accumulator fragment.
__device__ __forceinline__ u32 transpose_matrix(u32 x) {
    u32 r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
    return r;
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Asynchronous copies to shared memory: the first `bytes` come from global memory, the rest are zeros.
__device__ __forceinline__ void copy_async_16(u32 shared, const void* global, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_async_16(u32 shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_async_8(u32 shared, const void* global, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_async_4(u32 shared, const void* global, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// 16 bytes of global memory that an earlier kernel may have written: the compiler does not move this load before the wait for that kernel.
__device__ __forceinline__ uint4 load_global_16(const void* global) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(global) : "memory");
    return v;
}

// Shared memory by address.
__device__ __forceinline__ uint4 load_shared_16(u32 shared) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared) : "memory");
    return v;
}
__device__ __forceinline__ uint2 load_shared_8(u32 shared) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(shared) : "memory");
    return v;
}
__device__ __forceinline__ void store_shared_16(u32 shared, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void store_shared_8(u32 shared, uint2 v) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(shared), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ float load_shared_float(u32 shared) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(shared) : "memory");
    return v;
}
__device__ __forceinline__ void store_shared_float(u32 shared, float v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared), "f"(v) : "memory");
}
__device__ __forceinline__ u32 load_shared_2(u32 shared) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(shared) : "memory");
    return v;
}

// A barrier of `threads` threads of the block, a multiple of the warp; 0 is __syncthreads().
__device__ __forceinline__ void barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Programmatic dependent launch. Before the wait a kernel may neither read what its predecessor writes nor write what it reads. Kernels
// before the predecessor have completed even then, since a kernel lets its successor start only after its own wait, with three exceptions:
// - RMSNorm and the gate of heads let it start before. Products follow them, which read nothing but weights before their wait.
// - The kernel of A factors (adapter/adapter.cu) does so too, and reads and writes before its wait: the product before it has waited for the
//   kernels that make what it reads and for those that read what it writes.
// - A product whose activations its predecessor does not make may run beside that kernel. It waits at its end, so that both have completed
//   when it has; its successor reads nothing of either before its own wait.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_later_kernels_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Memory that other blocks write and read at the same time.
__device__ __forceinline__ uint4 load_relaxed_16(const void* p) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store_relaxed(float* p, float x) { asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory"); }
__device__ __forceinline__ u32 load_acquire(const u32* p) {
    u32 r;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
    return r;
}
// Adds 1 to a counter of which `last` is the largest value; 0 follows it.
__device__ __forceinline__ void count_release(u32* p, u32 last) {
    asm volatile("red.release.gpu.global.inc.u32 [%0], %1;" ::"l"(p), "r"(last) : "memory");
}
__device__ __forceinline__ u32 atomic_add_release_acquire(u32* p, u32 value) {
    u32 r;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(r) : "l"(p), "r"(value) : "memory");
    return r;
}
