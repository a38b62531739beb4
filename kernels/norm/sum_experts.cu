// The end of a mixture of experts: x += the weighted sum of the outputs of a row's experts + the output of the shared expert, followed by
// the norm of the new x if that can be fused. A thread takes a piece of a row, and adds experts in the order of their probabilities. A row
// is a block, or on Hopper and later a cluster, whose blocks exchange their sums of squares.
#include "common/cluster.cuh"
#include "norm/residual.cuh"

struct Arguments {
    const float* outputs;   // [pairs, width]: of experts, sorted as experts/route.cu has them
    const int* places;      // [rows, per_token]: of a row's pairs in `outputs`
    const float* weights;   // [rows, per_token]
    const float* shared;    // [rows, width]: of the shared expert; or null
    const float* gate;      // a logit at r * gate_stride for row r, whose sigmoid multiplies `shared`; or null
    float* x;               // [rows, width]: the residual stream
    NextNorm next;          // with a weight, or nothing follows
    int per_token;          // at most a warp's lanes
    int gate_stride;
};

constexpr int ROW_THREADS = 1024;
constexpr int PART_THREADS = 128, PART_WARPS = PART_THREADS / WARP;
constexpr int MAX_PARTS = 8;        // blocks of a cluster
static_assert(PART_WARPS == 4, "the sums of a block are 16 bytes");

// r + weight * v
__device__ __forceinline__ Piece add_scaled(const Piece& r, const Piece& v, float weight) {
    Piece sum;
    sum.first = add(r.first, scaled(v.first, weight));
    sum.second = add(r.second, scaled(v.second, weight));
    return sum;
}

// Piece i of a row after the addition. BATCH outputs are in flight before the first is used.
template <int BATCH>
__device__ __forceinline__ Piece sum(const Arguments& a, int row, int i) {
    static_assert(WARP % BATCH == 0, "lanes have the places of whole batches");
    int width = a.next.width, lane = lane_id(), at = row * a.per_token + lane;
    int place = lane < a.per_token ? a.places[at] : 0;
    float weight = lane < a.per_token ? a.weights[at] : 0;
    float gate = a.shared && a.gate ? a.gate[(size_t)row * a.gate_stride] : 0;
    Piece r(a.x + (size_t)row * width, i, width);
#pragma unroll 1
    for (int first = 0; first < a.per_token; first += BATCH) {
        Piece v[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            int from = __shfl_sync(ALL_LANES, place, first + j);
            v[j] = Piece(a.outputs + (size_t)from * width, i, first + j < a.per_token ? width : 0);
        }
#pragma unroll
        for (int j = 0; j < BATCH; j++) r = add_scaled(r, v[j], __shfl_sync(ALL_LANES, weight, first + j));
    }
    if (!a.shared) return r;
    return add_scaled(r, Piece(a.shared + (size_t)row * width, i, width), a.gate ? 1 / (1 + expf(-gate)) : 1);
}

// Grid: (rows). As many threads as there are pieces of a row, in whole warps.
extern "C" __global__ void __launch_bounds__(ROW_THREADS) experts_sum(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) char shared[];
    int row = blockIdx.x, i = threadIdx.x;
    // Weights do not depend on the predecessor kernel.
    Piece w;
    if (a.next.weight) w = Piece(a.next.weight, i, a.next.width);
    wait_for_earlier_kernels();
    let_later_kernels_start();
    Piece r = sum<2>(a, row, i);
    a.next.store_residual(a.x + (size_t)row * a.next.width, i, r);
    if (!a.next.weight) return;
    float* warp_sums = (float*)shared;      // [warps]
    float own = warp_sum(r.squares()), squares = 0;
    if (lane_id() == 0) warp_sums[threadIdx.x / WARP] = own;
    __syncthreads();
    for (int warp = 0; warp < (int)(blockDim.x / WARP); warp++) squares += warp_sums[warp];
    a.next.store_norm(row, i, r, rsqrtf(squares / a.next.width + a.next.eps), w);
}

#if __CUDA_ARCH__ >= 900
// Grid: (rows, 1, parts), in clusters along the parts. As many threads as there are pieces of a part, in whole warps.
extern "C" __global__ void __launch_bounds__(PART_THREADS) experts_sum_cluster(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) char shared[];
    int row = blockIdx.x, i = blockIdx.z * blockDim.x + threadIdx.x, thread = threadIdx.x, warps = blockDim.x / WARP, parts = gridDim.z;
    Piece w;
    if (a.next.weight) w = Piece(a.next.weight, i, a.next.width);
    wait_for_earlier_kernels();
    let_later_kernels_start();
    Piece r = sum<8>(a, row, i);
    a.next.store_residual(a.x + (size_t)row * a.next.width, i, r);
    if (!a.next.weight) return;
    float* warp_sums = (float*)shared;      // [PART_WARPS]
    float own = warp_sum(r.squares());
    if (lane_id() == 0) warp_sums[thread / WARP] = own;
    if (thread >= warps && thread < PART_WARPS) warp_sums[thread] = 0;
    cluster_sync();
    float4 sums[MAX_PARTS];
#pragma unroll
    for (int part = 0; part < MAX_PARTS; part++) {
        sums[part] = part < parts ? load_cluster_16(shared_address(shared), part) : make_float4(0, 0, 0, 0);
    }
    float squares = 0;
#pragma unroll
    for (int part = 0; part < MAX_PARTS; part++) squares += (sums[part].x + sums[part].y) + (sums[part].z + sums[part].w);
    a.next.store_norm(row, i, r, rsqrtf(squares / a.next.width + a.next.eps), w);
    // No block may end while another reads its memory.
    cluster_sync();
}
#endif
