// Excludes tokens from a choice: the logits of tokens that a row's mask does not allow become minus infinity. Other rows are left alone.
#include "common/ptx.cuh"

constexpr int THREADS = 256;
constexpr int BITS = 32;    // of a word
static_assert(BITS == WARP, "a lane has a bit of each word, and a word of each group");

struct Arguments {
    float* logits;      // [rows, vocabulary]
    const u32* masks;   // [masks, words]: bit i % 32 of word i / 32 is set if token i is allowed
    const u32* rows;    // [masks]: the row of each mask
    int vocabulary;
    int words;          // ceil(vocabulary / 32)
};

// Grid: (ceil(words / THREADS), masks)
extern "C" __global__ void __launch_bounds__(THREADS) mask_logits(const __grid_constant__ Arguments a) {
    int first = blockIdx.x * THREADS + threadIdx.x / WARP * WARP;
    wait_for_earlier_kernels();
    let_later_kernels_start();
    u32 own = first + lane_id() < a.words ? a.masks[(size_t)blockIdx.y * a.words + first + lane_id()] : 0;
    float* logits = a.logits + (size_t)a.rows[blockIdx.y] * a.vocabulary;
    for (int i = 0; i < WARP; i++) {
        u32 word = __shfl_sync(ALL_LANES, own, i);
        int token = (first + i) * BITS + lane_id();
        if (token < a.vocabulary && !(word >> lane_id() & 1)) logits[token] = -INFINITY;
    }
}
