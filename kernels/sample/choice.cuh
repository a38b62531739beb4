// Encodes a choice of token for the host.
#pragma once
#include "common/types.cuh"

// The token; or a negative number if none can be chosen: -1 if every logit is minus infinity, and -2 - token if the logit of `token` is the
// first that is plus infinity or NaN, for which `largest` is INFINITY.
__device__ __forceinline__ int encode_choice(float largest, int token) {
    if (largest == INFINITY) return -2 - token;
    return largest == -INFINITY ? -1 : token;
}
