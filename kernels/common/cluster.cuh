// Inline PTX of Hopper and later: barriers in shared memory (mbarrier), bulk copies that such a barrier counts, and clusters of blocks,
// which access each other's shared memory.
#pragma once
#include "common/ptx.cuh"

// A barrier takes 8 bytes. Its phase ends when it has the number of arrivals that it was initialized with, and all expected bytes have
// arrived; phases alternate between 0 and 1. One thread initializes it; others see it after publish_barriers() and a barrier of the block.
__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and adds `bytes` to the bytes that the phase expects.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits for the end of a phase.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 phase) {
    u32 ended = 0;
    while (!ended) {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(ended)
                     : "r"(barrier), "r"(phase)
                     : "memory");
    }
}
// Bulk copies that follow read what this thread sees in global memory.
__device__ __forceinline__ void show_to_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }
// Copies bytes that a barrier expects from global to shared memory; addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void copy_bulk(u32 shared, const void* global, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared), "l"(global),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}

// A barrier of all threads of a cluster, after which their writes to shared memory are visible.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// cluster_sync() in two halves, without the visibility guarantee: for published barriers in shared memory, and to announce that this block
// no longer reads the memory of others.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// The address in another block of the cluster that corresponds to an address in shared memory.
__device__ __forceinline__ u32 cluster_address(u32 shared, u32 block) {
    u32 address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(block));
    return address;
}
__device__ __forceinline__ float4 load_cluster_16(u32 shared, u32 block) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(cluster_address(shared, block))
                 : "memory");
    return v;
}
// Stores a number in the shared memory of a block of the cluster, which has started.
__device__ __forceinline__ void store_cluster(u32 shared, u32 block, float x) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(cluster_address(shared, block)), "f"(x) : "memory");
}
// Stores a number in the shared memory of another block of the cluster, whose barrier expects 4 bytes for it.
__device__ __forceinline__ void send_to_cluster(u32 shared, u32 block, float x, u32 barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(cluster_address(shared, block)),
                 "r"(__float_as_uint(x)), "r"(cluster_address(barrier, block))
                 : "memory");
}
