// Configuration of the skinny GEMM: the constants that distinguish its kernels, and the arguments of a launch.
#pragma once
#include "adapter/shrink.cuh"
#include "common/ring.cuh"
#include "format/packed.cuh"
#include "linear/matrix.cuh"
#include "norm/fused_norm.cuh"

// The weights are the A operand of the matrix instruction. Its rows 0 to 7 are one chunk of format/packed.cuh, rows 8 to 15 another:
enum Tile {
    TALL,       // the next 8 output features
    GATE_UP,    // the same 8 features of another matrix
    DEEP,       // the next 128 elements of K of the same 8 features
};
// The activations.
enum Input {
    ROW_MAJOR,
    FRAGMENT_MAJOR,     // format/fragment_major.cuh
    RESIDUAL,           // one row, which every block computes on the way to shared memory: ResidualRow
    NORMALIZED,         // rows of up to NORMALIZED_WIDTH, which every block normalizes on the way to shared memory: NormalizedRows
};
enum Output { STORE_F32, STORE_F16, ADD_F32, GLU_ROW_MAJOR, GLU_FRAGMENT_MAJOR };

constexpr int WARPS = 16;
constexpr int THREADS = WARPS * WARP;
constexpr int X_CHUNK_BYTES = CHUNK_K * 2;      // a row's activations for a chunk
constexpr int ACCUMULATORS = 16;                // of a tile, for each row of activations: of features, or of halves of features
constexpr int MAX_SPLIT_K = 2;
constexpr int NORMALIZED_WIDTH = 4096;          // a piece of a row for each lane of each warp

// The constants of a kernel for up to MAX_ROWS rows of activations, which runs BLOCKS blocks per multiprocessor. IN_RANGES: it adds up along
// K in the order of linear/wide.cu, whatever the rows. ADAPTED: rows may have adapters (skinny/adapter.cuh).
template <Tile TILE_, Input INPUT_, Output OUTPUT_, int MAX_ROWS_, int BLOCKS_, bool IN_RANGES_ = false, bool ADAPTED_ = false>
struct Config {
    static constexpr Tile TILE = TILE_;
    static constexpr Input INPUT = INPUT_;
    static constexpr Output OUTPUT = OUTPUT_;
    static constexpr int MAX_ROWS = MAX_ROWS_, BLOCKS = BLOCKS_;
    static constexpr bool IN_RANGES = IN_RANGES_, ADAPTED = ADAPTED_;
    static constexpr bool IS_GLU = OUTPUT == GLU_ROW_MAJOR || OUTPUT == GLU_FRAGMENT_MAJOR;
    static constexpr bool TAKES_FRAGMENTS = INPUT == FRAGMENT_MAJOR;
    static_assert(!TAKES_FRAGMENTS || TILE != DEEP, "fragment-major activations fill all columns of B");
    static_assert(!IN_RANGES || TILE != DEEP, "a range takes one chunk at a time");

    static constexpr int FEATURES = TILE == TALL ? 16 : 8;      // of a tile, of each matrix
    static constexpr int STEP_CHUNKS = TILE == DEEP ? 2 : 1;    // along K
    static constexpr int STEP_K = STEP_CHUNKS * CHUNK_K;
    static constexpr int STEP_BYTES = STEP_CHUNKS * X_CHUNK_BYTES;
    // Whether the blocks of a cluster may split K.
    static constexpr bool MAY_SPLIT_K = __CUDA_ARCH__ >= 900 && TILE != GATE_UP && (MAX_ROWS <= 8 || TAKES_FRAGMENTS);
    // Whether a fused norm of x may be applied to the result.
    static constexpr bool MAY_FUSE_NORM = OUTPUT != ADD_F32 && OUTPUT != STORE_F16 && INPUT != RESIDUAL && !IN_RANGES;

    // Weights that are requested before the kernel waits for its predecessor compete with that kernel's last weights, and then with
    // this one's own activations. For the same reason a kernel with a long loop lets its successor start only when its warps have
    // requested their last weights. benches/NOTES.md has the measurements, of rings with more stages too.
    static constexpr bool IS_LONG = TILE == GATE_UP;
    static constexpr int EARLY_STAGES = BLOCKS == 1 && INPUT == ROW_MAJOR ? 1 : 2;
    static constexpr int STAGES = IS_LONG && MAX_ROWS == 1 && !IN_RANGES ? 4 : 3;
    using Ring = WarpRing<STAGES, CHUNK_BYTES>;
};

// The row of x is norm(x + norm(y) * post) * weight. The sum is stored as well, because the next addition starts from it.
struct ResidualRow {
    const float* y;         // [k]
    const float* post;      // [k]
    const float* x;         // [k]: the residual stream
    const float* weight;    // [k]
    float* sum;             // [k]: x + norm(y) * post; not x
    float eps;
};

// Rows x, whose RMSNorm is the input.
struct NormalizedRows {
    const float* x;         // [m, k]
    const float* weight;    // [k]
    float eps;
};

// The range of K of one block of a cluster, in steps.
struct KRange {
    int first, steps;
    u32 inverse;            // 2^32 / steps, rounded up; unused for a single step
};

// The projections of the product with adapters that follows.
struct NextFactors {
    int first, matrices;        // by their numbers in the model; how many
    int k;
    int features[MATRICES];
};

// A x of rows with adapters, each its own or none. There are no more tiles than rows, one for each adapter.
struct LowProducts {
    const RowTile* tiles;
    float* values;          // f32 [matrices, m, parts, ranks], which the launch finds pending
    uint4* taken;           // of an earlier launch, which become pending
    int taken_pieces;       // of 16 bytes
    int adapters;           // number of tiles
    int matrices;
    int rank_shift;         // the logarithm of the largest rank of an adapter, or of more
    int part_shift;         // the logarithm of the parts into which K is divided; blocks of a cluster have as many each
    int first;              // number of the first matrix among the projections of the model
    float factor;           // by which x was divided
    int copies;             // bytes of shared memory for copies of factors
    NextFactors next;
};

struct Arguments {
    const u16* x;               // f16 [m, k]
    void* out;                  // [m, out_stride]; the matrices' features follow each other
    Matrix matrix[MATRICES];    // GLU: gate and up, of equal rows
    int tiles[MATRICES - 1];    // of all matrices up to this one; GATE_UP: of all
    int cluster_tiles;          // of a cluster
    int larger_clusters;        // how many clusters, the first ones, have one tile more
    KRange k_range[MAX_SPLIT_K];    // for the blocks of a cluster along the grid's last dimension; the last is no shorter
    int chunks;                 // of a row
    int m;
    int k;
    int out_stride;
    float out_scale;            // GLU: of the result, which may be large
    int activation;             // GLU
    int beside;                 // not IN_RANGES: whether the kernel runs beside its predecessor, which does not make x
    FusedNorm norm;             // ADD: of the result; otherwise: of x
    ResidualRow residual;       // RESIDUAL
    int ranges;                 // IN_RANGES: into which the chunks of K are divided
    NormalizedRows normalized;  // NORMALIZED
    LowProducts low;            // ADAPTED: A x
};
