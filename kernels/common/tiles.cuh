// Tiles of pairs of a row and an expert that it goes to, which products with experts take one by one.
#pragma once
#include "common/types.cuh"

struct __align__(16) ExpertTile {
    int expert;
    int first;      // pair, in the order of experts
    int pairs;      // none of a tile that is not needed
    int unused;
};
