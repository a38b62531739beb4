// Quantization recipes that try several scales for a block, and stochastic rounding. Otherwise as quantize.cu.
#include "quantize/block.cuh"
#include "format/random.cuh"

// See sweep() in src/format/nvfp4.rs for why no other scale can be the best.
__device__ __forceinline__ u32 sweep(const float (&x)[BLOCK], float amax, float global) {
    constexpr u32 FIRST_NORMAL = 8;
    auto reach = [&](u32 scale) { return 6.0 * ((double)scale_to_float(scale) * (double)global); };
    u32 start = encode_scale_above_zero(amax / E2M1_MAX / global);
    u32 best = start;
    double least = squared_error(x, start, global);
    for (u32 scale = start - 1; scale > 0; scale--) {
        double clipped = (double)amax - reach(scale);
        if (clipped > 0 && clipped * clipped > least) break;
        double error = squared_error(x, scale, global);
        if (error <= least) best = scale, least = error;
    }
    u32 unclipped = start;
    while (unclipped < E4M3_MAX_BYTE && reach(unclipped) < (double)amax) unclipped++;
    u32 end = min(E4M3_MAX_BYTE, max(unclipped, FIRST_NORMAL) + 7);
    for (u32 scale = start + 1; scale <= end; scale++) {
        double error = squared_error(x, scale, global);
        if (error < least) best = scale, least = error;
    }
    return best;
}

// Recipes that compare scales, and stochastic rounding, which all need the quotient of every value.
template <Type T>
__device__ __forceinline__ void quantize_search(const Arguments& a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    Block block(a, T == F32 ? 4 : 2);
    if (block.index >= a.blocks) return;
    float x[BLOCK];
    load_values<T>(block.input, x);
    float global = global_scale(a);
    float amax = largest_magnitude(x);
    if (!is_finite(amax)) amax = saturated(a, block.index, x, global);
    if (amax == 0 && !a.legacy) {
        block.write(a, make_uint2(0, 0), 0);
        return;
    }
    u32 scale;
    switch (a.recipe) {
        case FOUR_OVER_SIX: scale = four_over_six(x, amax, global); break;
        case SWEEP: scale = sweep(x, amax, global); break;
        default: scale = scale_of(a, amax / E2M1_MAX, global);
    }
    float step = step_of(a, scale, global);
    uint2 codes;
    if (a.rounding == STOCHASTIC) {
        u64 stream = random_stream(a.seed), first = (u64)block.index * BLOCK;
        u32 words[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < BLOCK; i++) {
            u32 random = random_bits(stream, first + i) >> 32;
            words[i / 8] |= (stochastic(fabsf(x[i]) / step, random) | sign(x[i], a.legacy, step)) << i % 8 * 4;
        }
        codes = make_uint2(words[0], words[1]);
    } else {
        codes = encode(a, x, step);
    }
    block.write(a, codes, scale);
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize_search_f32(const __grid_constant__ Arguments a) { quantize_search<F32>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) quantize_search_f16(const __grid_constant__ Arguments a) { quantize_search<F16>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) quantize_search_bf16(const __grid_constant__ Arguments a) { quantize_search<BF16>(a); }
