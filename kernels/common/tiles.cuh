// Tiles of (row, expert) pairs: experts/route.cu makes them, and linear/experts.cu multiplies them.
#pragma once
#include "common/types.cuh"

struct __align__(16) ExpertTile {
    int expert;
    int first;      // pair, in the order of experts
    int pairs;      // 0 for an unused tile
    int unused;
};
