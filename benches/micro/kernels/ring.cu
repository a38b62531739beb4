// Reads through a ring in shared memory that the bulk copy engine fills and nobody empties: the effect of bytes in flight and of the size
// of a copy. One thread of each block copies the block's share, front to back.
#include "common/types.cuh"

struct Arguments {
    const u8* data;
    u64 share;      // bytes of a block, a multiple of the chunk
    u32 chunk;      // bytes of a copy
    u32 stages;     // copies in flight
};

constexpr int MOST_STAGES = 128;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void start_barrier(u32 barrier) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void copy(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier), "r"(parity)
        : "memory");
}

extern "C" __global__ void __launch_bounds__(32) ring(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 buffer[];
    __shared__ u64 barriers[MOST_STAGES];
    if (threadIdx.x != 0) return;
    for (u32 s = 0; s < a.stages; s++) start_barrier(shared_address(barriers + s));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    const u8* data = a.data + blockIdx.x * a.share;
    u32 count = (u32)(a.share / a.chunk), buffers = shared_address(buffer);
    for (u32 i = 0; i < count + a.stages; i++) {
        u32 stage = i % a.stages, lap = i / a.stages;
        u32 barrier = shared_address(barriers + stage);
        if (lap > 0 && i - a.stages < count) wait(barrier, (lap - 1) & 1);
        if (i < count) copy(buffers + stage * a.chunk, data + (u64)i * a.chunk, a.chunk, barrier);
    }
}

struct Fill {
    u32* data;
    u64 words;
};
// Bits that no memory can predict.
extern "C" __global__ void __launch_bounds__(256) fill(const __grid_constant__ Fill f) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < f.words; i += (u64)gridDim.x * blockDim.x) {
        u32 x = (u32)i * 0x9e3779b1u ^ (u32)(i >> 32);
        x ^= x >> 15;
        x *= 0x85ebca77u;
        f.data[i] = x ^ x >> 13;
    }
}
