// Splits of a sequence's pages whose number follows from the positions that a row sees: split s has the pages from s * length on. The bits of
// a row's attention then depend on that row alone.
#pragma once
#include "common/pages.cuh"

constexpr int MOST_SPLITS = WARP;   // of a row: a lane for each combines them

struct FixedSplits {
    int length;     // pages
    int first;      // number of the first with a page that the row sees
    int count;

    // `shortest` is a length that doubles until no row of so many pages, or with such a window, has too many splits.
    __device__ __forceinline__ FixedSplits(int shortest, int window, int first_page, int last_page) : length(shortest) {
        int pages = window > 0 ? ceil_div(window, PAGE) + 1 : last_page + 1;
        while (pages > (MOST_SPLITS - 1) * length) length *= 2;
        first = first_page / length;
        count = last_page / length - first + 1;
    }
};

// The factors of two sums whose weights are relative to a largest score each, where one of both is to be the largest. Minus infinity is the
// largest score of no positions.
struct SplitFactors {
    float max_score, own, later;

    __device__ __forceinline__ SplitFactors(float own_max, float later_max) : max_score(fmaxf(own_max, later_max)) {
        float subtracted = max_score == -INFINITY ? 0 : max_score;
        own = exp2_approx(own_max - subtracted);
        later = exp2_approx(later_max - subtracted);
    }
    __device__ __forceinline__ float sum(float x, float of_later) const { return fmaf(of_later, later, __fmul_rn(x, own)); }
};

// Two probabilities of 1: a product with them adds up the probabilities.
constexpr u32 TWO_ONES = 0x3c003c00;
// An element of the output. Zero has no sign, since a sum to which nothing is added may have any.
__device__ __forceinline__ float normalized(float y, float factor) { return fmaf(y, factor, 0); }
