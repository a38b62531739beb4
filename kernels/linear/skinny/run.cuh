// The skinny GEMM of one configuration, and the definition of its kernel.
#pragma once
#include "linear/skinny/accumulators.cuh"
#include "linear/skinny/epilogue.cuh"
#include "linear/skinny/pipeline.cuh"

template <class C>
__device__ __forceinline__ void multiply(const Arguments& a, const Schedule<C>& schedule, const SharedMemory<C>& memory, WeightPipeline<C>& weights,
                                         ActivationLoad<C>& activations, typename AccumulatorsOf<C>::Type& accumulators, RowAdapters<C>& adapters, int warp) {
    using Ring = typename C::Ring;
    u32 stage = 0;
    int left = schedule.count, tile = schedule.tile, step = schedule.step;
    int range = schedule.first_of_warp - tile * schedule.ranges, slot = C::IN_RANGES ? schedule.first_of_warp : tile + warp;
    // Without a share, a place of accumulators would be another warp's.
    if (C::IN_RANGES && left == 0) return;
    // Steps until stages of the ring are not filled again.
    int until_request = C::ADAPTED ? left - C::STAGES + 1 : 0;
    do {
        int tile_left = min(left, (C::IN_RANGES ? schedule.range_begin(a, range + 1) : schedule.steps) - step), now = tile_left;
        if (C::ADAPTED && until_request > 0) now = min(now, until_request);
        left -= now;
#pragma unroll 1
        for (u32 at = step * accumulators.STRIDE, i = now; i > 0; i--, at += accumulators.STRIDE) {
            activations.wait(at / accumulators.STRIDE);
            weights.ring.wait();
            accumulators.fetch(weights.ring, stage);
            __syncwarp();
            weights.load(stage, true);
            stage = Ring::after(stage);
            accumulators.multiply(at);
        }
        if (C::ADAPTED) {
            until_request -= now;
            if (until_request == 0) adapters.request(weights.ring.base + Ring::before(stage), warp);
            step += now;
            if (now < tile_left) continue;
        }
        // A warp without steps stores zeros. Warps that share a tile have separate places.
        accumulators.store(memory.accumulators + slot++ * (a.m * ACCUMULATORS));
        step = C::IN_RANGES && ++range < schedule.ranges ? schedule.range_begin(a, range) : 0;
        if (range == schedule.ranges) range = 0;
    } while (left > 0);
}

template <class C>
__device__ __forceinline__ void run(const Arguments& a) {
    extern __shared__ __align__(128) char shared[];
    int thread = threadIdx.x, warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0);
    Schedule<C> schedule(a, warp);
    WeightPipeline<C> weights(a, schedule, shared + warp * C::Ring::BYTES);
    weights.load_stages(0, C::EARLY_STAGES, false);

    SharedMemory<C> memory(a, schedule, shared);
    InputNorm<C> norm(a, memory, schedule.is_first_block());
    RowAdapters<C> adapters(a, schedule, memory, thread);
    Epilogue<C> epilogue(a, schedule, memory, norm, adapters, thread);
    ActivationLoad<C> activations(a, memory, thread);
    typename AccumulatorsOf<C>::Type accumulators(a, memory);
    adapters.prefetch_next(warp);
    adapters.prepare(warp);
    epilogue.find_first();
    bool beside = !C::IN_RANGES && a.beside;
    if (!beside) wait_for_earlier_kernels();
    if (!C::IS_LONG) let_later_kernels_start();
    epilogue.load_first();
    norm.load(activations, warp);
    adapters.clear();
    weights.load_stages(C::EARLY_STAGES, C::STAGES, true);
    epilogue.wait_for_cluster();
    adapters.wait_for_factors(warp);
    __syncthreads();
    norm.mend(activations);
    adapters.share(activations, warp);
    multiply(a, schedule, memory, weights, activations, accumulators, adapters, warp);
    adapters.complete(warp);
    __syncthreads();
    if (C::IS_LONG && C::IN_RANGES) let_later_kernels_start();
    epilogue.run();
    if (beside) wait_for_earlier_kernels();
}

#define KERNEL(NAME, ...)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, Config<__VA_ARGS__>::BLOCKS) NAME(const __grid_constant__ Arguments a) { \
        run<Config<__VA_ARGS__>>(a);                                                                                  \
    }
