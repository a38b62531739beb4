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

// Piece i of a row. What the addition needs beside the outputs of experts is read first: it depends on no predecessor, because the products
// before this kernel start after the routing and the shared expert have completed.
class Sum {
    const Arguments& a;
    int i, width, place = 0;            // of choice `lane`
    float weight = 0, of_shared = 1;
    Piece r, shared;
    Piece next_weight;                  // of the norm

public:
    __device__ __forceinline__ Sum(const Arguments& a, int row, int i) : a(a), i(i), width(a.next.width) {
        int lane = lane_id(), at = row * a.per_token + lane;
        if (lane < a.per_token) place = a.places[at], weight = a.weights[at];
        float gate = a.shared && a.gate ? a.gate[(size_t)row * a.gate_stride] : 0;
        if (a.next.weight) next_weight = Piece(a.next.weight, i, width);
        r = Piece(a.x + (size_t)row * width, i, width);
        if (a.shared) shared = Piece(a.shared + (size_t)row * width, i, width);
        if (a.gate) of_shared = 1 / (1 + expf(-gate));
    }
    // Adds the outputs of experts, of which BATCH are in flight before the first is used, and that of the shared expert.
    template <int BATCH>
    __device__ __forceinline__ const Piece& add() {
        static_assert(WARP % BATCH == 0, "lanes have the places of whole batches");
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
        if (a.shared) r = add_scaled(r, shared, of_shared);
        return r;
    }
    // Stores the norm of the piece, by the sum of the row's squares.
    __device__ __forceinline__ void store_norm(int row, float squares) const {
        a.next.store_norm(row, i, r, rsqrtf(squares / width + a.next.eps), next_weight);
    }
};

// Grid: (rows). As many threads as there are pieces of a row, in whole warps.
extern "C" __global__ void __launch_bounds__(ROW_THREADS) experts_sum(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) char shared[];
    int row = blockIdx.x, i = threadIdx.x;
    Sum sum(a, row, i);
    wait_for_earlier_kernels();
    let_later_kernels_start();
    const Piece& r = sum.add<2>();
    a.next.store_residual(a.x + (size_t)row * a.next.width, i, r);
    if (!a.next.weight) return;
    float* warp_sums = (float*)shared;      // [warps]
    float own = warp_sum(r.squares()), squares = 0;
    if (lane_id() == 0) warp_sums[threadIdx.x / WARP] = own;
    __syncthreads();
    for (int warp = 0; warp < (int)(blockDim.x / WARP); warp++) squares += warp_sums[warp];
    sum.store_norm(row, squares);
}

#if __CUDA_ARCH__ >= 900
// Grid: (rows, 1, parts), in clusters along the parts. As many threads as there are pieces of a part, in whole warps.
extern "C" __global__ void __launch_bounds__(PART_THREADS) experts_sum_cluster(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) char shared[];
    int row = blockIdx.x, i = blockIdx.z * blockDim.x + threadIdx.x, thread = threadIdx.x, warps = blockDim.x / WARP, parts = gridDim.z;
    Sum sum(a, row, i);
    wait_for_earlier_kernels();
    let_later_kernels_start();
    const Piece& r = sum.add<8>();
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
    sum.store_norm(row, squares);
    // No block may end while another reads its memory.
    cluster_sync();
}
#endif
