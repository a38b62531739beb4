// A barrier of the whole grid, which a decoder in a single kernel needs between the parts of its layers: by one counter in memory, or first
// within clusters; with idle memory, and with other warps reading at full rate.
#include "common/types.cuh"

struct Arguments {
    u32* counter;           // zero
    const uint4* data;      // what the other warps read
    u64 words;              // of 16 bytes
    u64* nanoseconds;       // [blocks]
    u64* read;              // words read by all
    int rounds;
};

constexpr int UNROLL = 8;   // loads in flight in a thread

__device__ __forceinline__ void arrive(u32* counter) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory"); }
__device__ __forceinline__ u32 look(const u32* counter) {
    u32 x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
    return x;
}
__device__ __forceinline__ u64 now() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
    return t;
}
__device__ __forceinline__ u32 cluster_size() {
    u32 x;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(x));
    return x;
}
__device__ __forceinline__ u32 cluster_rank() {
    u32 x;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(x));
    return x;
}
// A barrier of all threads of the first warps of a cluster. Each block has one warp there, or all its threads wait.
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ uint4 load(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// Thread 0 of each block goes through the barriers; from warp 1 on, threads read until it is through.
extern "C" __global__ void __launch_bounds__(512) counter(const __grid_constant__ Arguments a) {
    __shared__ volatile int done;
    if (threadIdx.x == 0) done = 0;
    __syncthreads();
    if (threadIdx.x == 0) {
        // An uncounted barrier first: all blocks are present after it.
        u64 start = 0;
        for (int i = 0; i <= a.rounds; i++) {
            arrive(a.counter);
            while (look(a.counter) < (u32)(i + 1) * gridDim.x) {}
            if (i == 0) start = now();
        }
        a.nanoseconds[blockIdx.x] = now() - start;
        done = 1;
    } else if (threadIdx.x >= WARP) {
        u32 readers = blockDim.x - WARP, all = gridDim.x * readers, sum = 0;
        u64 at = blockIdx.x * readers + threadIdx.x - WARP, count = 0;
        while (!done) {
            uint4 v[UNROLL];
#pragma unroll
            for (int i = 0; i < UNROLL; i++) {
                v[i] = load(a.data + at);
                at += all;
                if (at >= a.words) at -= a.words;
            }
#pragma unroll
            for (int i = 0; i < UNROLL; i++) sum ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
            count += UNROLL;
        }
        // Never true; makes the compiler keep the loads.
        if (sum == 0x12345678u && count == 0) a.counter[1] = sum;
        atomicAdd(a.read, count);
    }
}

// Blocks of one warp: within the cluster, then the clusters by the counter, then within the cluster again.
__device__ __forceinline__ void by_clusters(const Arguments& a) {
    u32 clusters = gridDim.x / cluster_size();
    u64 start = 0;
    for (int i = 0; i <= a.rounds; i++) {
        cluster_barrier();
        if (cluster_rank() == 0 && threadIdx.x == 0) {
            arrive(a.counter);
            while (look(a.counter) < (u32)(i + 1) * clusters) {}
        }
        cluster_barrier();
        if (i == 0) start = now();
    }
    if (threadIdx.x == 0) a.nanoseconds[blockIdx.x] = now() - start;
}
extern "C" __global__ void __launch_bounds__(32) __cluster_dims__(2) clusters_2(const __grid_constant__ Arguments a) { by_clusters(a); }
extern "C" __global__ void __launch_bounds__(32) __cluster_dims__(4) clusters_4(const __grid_constant__ Arguments a) { by_clusters(a); }
