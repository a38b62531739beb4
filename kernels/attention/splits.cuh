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
