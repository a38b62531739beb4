// The skinny GEMM of one configuration, and the definition of its kernel.
#pragma once
#include "linear/skinny/accumulators.cuh"
#include "linear/skinny/epilogue.cuh"
#include "linear/skinny/pipeline.cuh"

template <class C>
__device__ __forceinline__ void multiply(const Arguments& a, const Schedule<C>& schedule, const SharedMemory<C>& memory, WeightPipeline<C>& weights,
                                         ActivationLoad<C>& activations, typename AccumulatorsOf<C>::Type& accumulators, int warp) {
    using Ring = typename C::Ring;
    u32 stage = 0;
    int left = schedule.count, tile = schedule.tile, step = schedule.step;
    int range = schedule.first_of_warp - tile * schedule.ranges, slot = C::IN_RANGES ? schedule.first_of_warp : tile + warp;
    // Without a share, a place of accumulators would be another warp's.
    if (C::IN_RANGES && left == 0) return;
    do {
        int tile_left = min(left, (C::IN_RANGES ? schedule.range_begin(a, range + 1) : schedule.steps) - step);
        left -= tile_left;
#pragma unroll 1
        for (u32 at = step * accumulators.STRIDE; tile_left > 0; tile_left--, at += accumulators.STRIDE) {
            activations.wait(at / accumulators.STRIDE);
            weights.ring.wait();
            accumulators.fetch(weights.ring, stage);
            __syncwarp();
            weights.load(stage, true);
            stage = Ring::after(stage);
            accumulators.multiply(at);
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
    RowAdapter<C> adapter(a, schedule, memory, thread);
    Epilogue<C> epilogue(a, schedule, memory, norm, adapter, thread);
    ActivationLoad<C> activations(a, memory, thread);
    typename AccumulatorsOf<C>::Type accumulators(a, memory);
    epilogue.find_first();
    wait_for_earlier_kernels();
    if (!C::IS_LONG) let_later_kernels_start();
    epilogue.load_first();
    adapter.request();
    norm.load(activations, warp);
    adapter.add_up();
    weights.load_stages(C::EARLY_STAGES, C::STAGES, true);
    epilogue.wait_for_cluster();
    __syncthreads();
    bool normalized = norm.mend(activations);
    adapter.finish(norm, normalized);
    multiply(a, schedule, memory, weights, activations, accumulators, warp);
    adapter.wait();
    __syncthreads();
    if (C::IS_LONG && C::IN_RANGES) let_later_kernels_start();
    epilogue.run();
}

#define KERNEL(NAME, ...)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, Config<__VA_ARGS__>::BLOCKS) NAME(const __grid_constant__ Arguments a) { \
        run<Config<__VA_ARGS__>>(a);                                                                                  \
    }
