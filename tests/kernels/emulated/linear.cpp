// kernels/linear/{pack,rows,skinny,tiled,wide,int8,tf32}.cu, kernels/quantize/dequantize.cu and kernels/embed/embed.cu on the CPU, against sums in
// f64: the sources as they ship, with their instructions emulated as the PTX ISA describes them. Weights go through the packing kernel
// first. tests/kernels.rs builds this twice, for architectures with and without a conversion of e4m3. Prints "ok" or the first error.
#include "cuda.hpp"

#include "activation/gate.cuh"
#include "common/cluster.cuh"
#include "common/ptx.cuh"
#include "common/reduce.cuh"
#include "common/ring.cuh"
#include "common/wgmma.cuh"
#include "format/fragment_major.cuh"
#include "format/int8.cuh"
#include "format/packed.cuh"
#include "norm/fused_norm.cuh"

namespace adapter {
#include "adapter/shrink.cuh"
}
namespace pack {
#include "linear/pack.cu"
}
namespace rows {
using namespace adapter;
#include "linear/rows.cu"
}
namespace tile {
#include "linear/tile.cuh"
}
// The shared memory that kernels declare is the one array of cuda.hpp.
namespace skinny {
using namespace adapter;
using namespace tile;
extern char shared[] asm("shared");
#include "linear/skinny.cu"
#undef KERNELS
#undef FRAGMENT_KERNELS
#include "linear/skinny_adapted.cu"
#undef KERNELS
#undef FRAGMENT_KERNELS
#if HAS_WGMMA
#include "linear/skinny_ranges.cu"
#undef KERNELS
#undef FRAGMENT_KERNELS
#endif
#undef KERNEL
}
namespace tiled {
using namespace tile;
extern char shared[] asm("shared");
#include "linear/tiled.cu"
#undef KERNEL
}
#if HAS_WGMMA
namespace wide {
using namespace adapter;
using namespace tile;
extern char shared[] asm("shared");
#include "linear/wide.cu"
#undef KERNEL
#include "linear/wide_adapted.cu"
#undef KERNEL
}
#endif
namespace dequantize {
#include "quantize/dequantize.cu"
}
namespace matrices {
#include "linear/matrices.cuh"
}
namespace int8 {
using namespace matrices;
extern char shared[] asm("shared");
#include "linear/int8.cu"
#undef KERNEL
}
namespace tf32 {
using namespace matrices;
extern char shared[] asm("shared");
#include "linear/tf32.cu"
}
namespace embed {
#include "embed/embed.cu"
}
// Static shared memory may outlive its block, as no two blocks run at once.
#undef __shared__
#define __shared__ static
namespace row_norms {
using namespace rows;
#include "linear/row_norms.cu"
}
namespace norm {
#include "norm/rms_norm.cu"
}

static constexpr u8 POISON = 0xee;

static void wrong(const char* what, int row, int column, double got, double want) {
    printf("%s: (%d, %d) is %g, not %g\n", what, row, column, got, want);
    exit(1);
}

// An allocation on a 16-byte boundary, followed by a margin that must stay untouched.
struct Memory {
    size_t bytes;
    std::vector<uint4> words;
    explicit Memory(size_t bytes) : bytes(bytes), words(bytes / 16 + 5) { memset(words.data(), POISON, words.size() * 16); }
    u8* data() { return (u8*)words.data(); }
    void check(const char* what) {
        for (size_t i = bytes; i < words.size() * 16; i++) {
            if (data()[i] != POISON) printf("%s: written past the end\n", what), exit(1);
        }
    }
};

struct Weight {
    int rows, k;
    std::vector<double> values;
    std::vector<float> bias;
    Memory chunks;
    static constexpr float GLOBAL = 1e-3f;

    Weight(int rows, int k) : rows(rows), k(k), chunks((size_t)ceil_div(rows, CHUNK_ROWS) * ceil_div(k, CHUNK_K) * CHUNK_BYTES) {
        // Swizzled scales as in src/format/swizzle.rs; their padding is NaN.
        int swizzled = noise() % 2, blocks = k / BLOCK;
        auto place = [&](int row, int block) {
            if (!swizzled) return (size_t)row * blocks + block;
            return ((size_t)row / 128 * ceil_div(blocks, 4) + block / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
        };
        Memory codes((size_t)rows * k / 2), scales(swizzled ? (size_t)ceil_div(rows, 128) * ceil_div(blocks, 4) * 512 : (size_t)rows * blocks);
        memset(scales.data(), 0xff, scales.bytes);
        for (size_t i = 0; i < codes.bytes; i++) codes.data()[i] = (u8)noise();
        // Any valid scale, more often the ends and the middle of the range.
        u8 special[] = {0x00, 0x01, 0x7e, 0x38};
        for (int r = 0; r < rows; r++) {
            for (int b = 0; b < blocks; b++) scales.data()[place(r, b)] = noise() % 4 ? (u8)(0x30 + noise() % 16) : special[noise() % 4];
            for (int c = 0; c < k; c++) {
                u8 byte = codes.data()[((size_t)r * k + c) / 2];
                values.push_back(e2m1(c % 2 ? byte >> 4 : byte) * ue4m3(scales.data()[place(r, c / BLOCK)]));
            }
            bias.push_back((float)(noise() % 1000) * 1e-3f - 0.5f);
        }
        // In two calls, the first of whole chunks.
        unsigned words = ceil_div(k, CHUNK_K) * pack::WORDS;
        int half = rows / 2 / CHUNK_ROWS * CHUNK_ROWS;
        for (int first : {0, half}) {
            int count = first == 0 && half > 0 ? half : rows - first;
            pack::Arguments a = {codes.data(), scales.data(), chunks.data() + (size_t)first / CHUNK_ROWS * ceil_div(k, CHUNK_K) * CHUNK_BYTES, first, count, k, swizzled};
            launch(ceil_div(words, pack::THREADS), ceil_div(count, CHUNK_ROWS), 1, pack::THREADS, [&] { pack::linear_pack(a); });
        }
        chunks.check("packing");

        Memory dense((size_t)rows * k * 2);
        dequantize::Arguments d = {chunks.data(), (u16*)dense.data(), rows, k};
        launch(ceil_div(words, pack::THREADS), ceil_div(rows, CHUNK_ROWS), 1, pack::THREADS, [&] { dequantize::dequantize_packed(d); });
        dense.check("dequantizing");
        for (size_t i = 0; i < values.size(); i++) {
            double got = f16_to_float(((u16*)dense.data())[i]);
            if (got != values[i]) wrong("dequantizing", (int)(i / k), (int)(i % k), got, values[i]);
        }

        std::vector<int> tokens = {rows - 1, 0, rows / 2};
        Memory embedded(tokens.size() * k * 4);
        embed::Arguments e = {tokens.data(), (float*)embedded.data(), {chunks.data(), nullptr, GLOBAL, 2.5f, embed::NVFP4, k}};
        launch(ceil_div(k, embed::THREADS), (unsigned)tokens.size(), 1, embed::THREADS, [&] { embed::embed(e); });
        embedded.check("embedding");
        for (size_t i = 0; i < tokens.size() * k; i++) {
            float got = e.out[i], want = (float)values[(size_t)tokens[i / k] * k + i % k] * GLOBAL * 2.5f;
            if (got != want) wrong("embedding", tokens[i / k], (int)(i % k), got, want);
        }

        std::vector<float> columns, exact(values.begin(), values.end()), norms(2 * rows, NAN);
        for (int c = 0; c < k; c++) columns.push_back(uniform());
        row_norms::Arguments packed = {chunks.data(), nullptr, columns.data(), norms.data(), GLOBAL, embed::NVFP4, k};
        row_norms::Arguments plain = {exact.data(), nullptr, nullptr, norms.data() + rows, 1, embed::F32, k};
        for (auto& n : {packed, plain}) launch(rows, 1, 1, row_norms::THREADS, [&] { row_norms::linear_row_norms(n); });
        for (int r = 0; r < rows; r++) {
            double weighted = 0, squares = 0;
            for (int c = 0; c < k; c++) {
                double value = values[(size_t)r * k + c];
                squares += value * value;
                weighted += std::pow(value * GLOBAL * columns[c], 2);
            }
            double want[] = {std::sqrt(weighted), std::sqrt(squares)};
            for (int i : {0, 1}) {
                double got = norms[i * rows + r];
                if (!(std::fabs(got - want[i]) <= 2e-6 * want[i])) wrong("norms of rows", r, i, got, want[i]);
            }
        }
    }
    double product(int row, const double* x) const {
        double sum = 0;
        for (int c = 0; c < k; c++) sum += values[(size_t)row * k + c] * x[c];
        return sum * GLOBAL;
    }
};

// Products of `m` rows with int8 rows, with every output.
static void check_int8_products(int m, int rows, int k, int split_k, int warps = 7) {
    Memory codes((size_t)rows * k), x((size_t)m * k * 2);
    std::vector<float> scales, bias;
    std::vector<double> values;
    for (size_t i = 0; i < codes.bytes; i++) codes.data()[i] = (u8)noise();
    for (int r = 0; r < rows; r++) scales.push_back(1e-3f * (1 + (float)(noise() % 1000))), bias.push_back(uniform());
    for (int i = 0; i < m * k; i++) {
        u16 value = to_f16(uniform());
        ((u16*)x.data())[i] = value;
        values.push_back(f16_to_float(value));
    }
    int stride = rows + 3, tokens = m <= 8 ? 8 : m <= 16 ? 16 : 32;
    for (int output : {int8::STORE_F32, int8::STORE_F16, int8::ADD_F32}) {
        Memory out((size_t)m * stride * 4);
        std::vector<float> before(m * stride);
        for (float& v : before) v = uniform();
        if (output == int8::ADD_F32) memcpy(out.data(), before.data(), out.bytes);
        // The rows belong to three matrices.
        int8::ProductArguments a = {(const u16*)x.data(), {}, out.data(), 0.5f, output, m, k, stride, split_k};
        int first = 0, blocks = 0;
        for (int i = 0; i < 3; i++) {
            int count = i < 2 ? rows / 4 * (2 * i + 1) / 2 : rows - first;
            a.matrices[i] = {codes.data() + (size_t)first * k, scales.data() + first, bias.data() + first, (u64)count};
            first += count, blocks += ceil_div(count, warps * int8::WARP_ROWS);
        }
        launch(blocks, ceil_div(m, tokens), split_k, (warps + 1) * WARP, [&] {
            switch (tokens) {
                case 8: return int8::linear_int8_product_8(a);
                case 16: return int8::linear_int8_product_16(a);
                default: return int8::linear_int8_product_32(a);
            }
        }, split_k);
        out.check("products of int8 rows");
        for (int t = 0; t < m; t++) {
            for (int r = 0; r < rows; r++) {
                double sum = 0, magnitude = 0;
                for (int c = 0; c < k; c++) {
                    double part = (signed char)codes.data()[(size_t)r * k + c] * values[(size_t)t * k + c] * 0.5 * scales[r];
                    sum += part, magnitude += std::fabs(part);
                }
                size_t at = (size_t)t * stride + r;
                double want = sum + bias[r] + (output == int8::ADD_F32 ? before[at] : 0);
                double got = output == int8::STORE_F16 ? f16_to_float(((u16*)out.data())[at]) : ((float*)out.data())[at];
                // Roundings of sums in f32, and of the result.
                double bound = 1e-5 * magnitude + (output == int8::STORE_F16 ? 1e-3 : 1e-6) * std::fabs(want) + 1e-7;
                if (!(std::fabs(got - want) <= bound)) wrong("products of int8 rows", t, r, got, want);
            }
        }
    }
}

// Products of `m` rows with f32 weights, with every output. Magnitudes of weights are anywhere within f32, unless the output is f16.
static void check_f32_products(int m, int rows, int k, int split_k) {
    for (int output : {tf32::STORE_F32, tf32::STORE_F16, tf32::ADD_F32}) {
        Memory weights((size_t)rows * k * 4), x((size_t)m * k * 2), out((size_t)m * (rows + 3) * 4);
        std::vector<float> bias, before(m * (rows + 3));
        for (float& v : before) v = uniform();
        if (output == tf32::ADD_F32) memcpy(out.data(), before.data(), out.bytes);
        float* w = (float*)weights.data();
        for (int r = 0; r < rows; r++) {
            float size = output == tf32::STORE_F16 ? 1 : std::ldexp(1.0f, (r % 7 - 3) * 30);
            for (int i = 0; i < k; i++) w[(size_t)r * k + i] = (uniform() + 1e-4f * uniform()) * size;
            bias.push_back(uniform() * size);
        }
        u16* halves = (u16*)x.data();
        for (int i = 0; i < m * k; i++) halves[i] = to_f16(uniform());
        // The rows belong to three matrices, the last of which has no bias.
        tf32::Arguments a = {halves, {}, out.data(), 0.5f, output, m, k, rows + 3, split_k};
        int first = 0, blocks = 0;
        for (int i = 0; i < 3; i++) {
            int count = i < 2 ? rows / 4 * (2 * i + 1) / 2 : rows - first;
            a.matrices[i] = {w + (size_t)first * k, nullptr, i < 2 ? bias.data() + first : nullptr, (u64)count};
            first += count, blocks += ceil_div(count, tf32::BLOCK_ROWS);
            if (i == 2) std::fill(bias.begin() + first - count, bias.end(), 0.0f);
        }
        launch(blocks, ceil_div(m, tf32::BLOCK_TOKENS), split_k, tf32::THREADS, [&] { tf32::linear_tf32_product(a); }, split_k);
        out.check("products of f32 weights");
        for (int token = 0; token < m; token++) {
            for (int r = 0; r < rows; r++) {
                double sum = bias[r], magnitude = 0;
                for (int c = 0; c < k; c++) {
                    double part = (double)w[(size_t)r * k + c] * f16_to_float(halves[(size_t)token * k + c]) * 0.5;
                    sum += part, magnitude += std::fabs(part);
                }
                size_t at = (size_t)token * (rows + 3) + r;
                double want = sum + (output == tf32::ADD_F32 ? before[at] : 0);
                double got = output == tf32::STORE_F16 ? f16_to_float(((u16*)out.data())[at]) : ((float*)out.data())[at];
                // The parts of a weight lack 2^-22 of it; sums are rounded to f32, and so is the result.
                double bound = 0x1p-22 * magnitude + (output == tf32::STORE_F16 ? 1e-3 : 1e-6) * std::fabs(want) + 1e-30;
                if (!(std::fabs(got - want) <= bound)) wrong("products of f32 weights", token, r, got, want);
            }
        }
    }
}

// Codes as f16, products times their rows' scales, rows of tokens, and norms.
static void check_int8(int rows, int k) {
    Memory codes((size_t)rows * k), halves((size_t)rows * k * 2);
    std::vector<float> scales;
    for (size_t i = 0; i < codes.bytes; i++) codes.data()[i] = i < 256 ? (u8)i : (u8)noise();
    for (int r = 0; r < rows; r++) scales.push_back(1e-3f * (1 + (float)(noise() % 1000)));
    auto code = [&](size_t i) { return (double)(signed char)codes.data()[i]; };
    unsigned pieces = rows * k / INT8_CODES;
    int8::HalvesArguments h = {(const uint4*)codes.data(), (uint4*)halves.data(), pieces};
    launch(ceil_div((int)pieces, int8::THREADS), 1, 1, int8::THREADS, [&] { int8::linear_int8_to_f16(h); });
    halves.check("codes as f16");
    for (size_t i = 0; i < codes.bytes; i++) {
        double got = f16_to_float(((u16*)halves.data())[i]);
        if (got != code(i)) wrong("codes as f16", (int)(i / k), (int)(i % k), got, code(i));
    }

    int m = 3, stride = rows + 2;
    std::vector<float> y((size_t)m * stride), before;
    for (float& v : y) v = uniform();
    before = y;
    int8::ScaleArguments s = {y.data(), scales.data(), rows, stride};
    launch(ceil_div(rows, int8::THREADS), m, 1, int8::THREADS, [&] { int8::linear_int8_scale(s); });
    for (int i = 0; i < m * stride; i++) {
        float want = before[i] * (i % stride < rows ? scales[i % stride] : 1);
        if (y[i] != want) wrong("products times scales", i / stride, i % stride, y[i], want);
    }

    std::vector<int> tokens = {rows - 1, 0, rows / 2};
    Memory embedded(tokens.size() * k * 4);
    embed::Arguments e = {tokens.data(), (float*)embedded.data(), {codes.data(), scales.data(), 1, 2.5f, embed::INT8, k}};
    launch(ceil_div(k, embed::THREADS), (unsigned)tokens.size(), 1, embed::THREADS, [&] { embed::embed(e); });
    embedded.check("embedding of int8 rows");
    for (size_t i = 0; i < tokens.size() * k; i++) {
        int token = tokens[i / k];
        float want = (float)code((size_t)token * k + i % k) * scales[token] * 2.5f;
        if (e.out[i] != want) wrong("embedding of int8 rows", token, (int)(i % k), e.out[i], want);
    }

    std::vector<float> norms(rows, NAN);
    row_norms::Arguments n = {codes.data(), scales.data(), nullptr, norms.data(), 1, embed::INT8, k};
    launch(rows, 1, 1, row_norms::THREADS, [&] { row_norms::linear_row_norms(n); });
    for (int r = 0; r < rows; r++) {
        double squares = 0;
        for (int c = 0; c < k; c++) squares += std::pow(code((size_t)r * k + c) * scales[r], 2);
        if (!(std::fabs(norms[r] - std::sqrt(squares)) <= 2e-6 * std::sqrt(squares))) wrong("norms of int8 rows", r, 0, norms[r], std::sqrt(squares));
    }
}

struct Activations {
    std::vector<double> values;
    Memory halves;
    Activations(int m, int k) : halves((size_t)m * k * 2) {
        for (int i = 0; i < m * k; i++) {
            u16 x = to_f16(((int)(noise() % 2001) - 1000) * 1e-3);
            ((u16*)halves.data())[i] = x;
            values.push_back(f16_to_float(x));
        }
    }
};

enum Output { F32, F16, ADD, GLU, GLU_FRAGMENT_MAJOR };
static bool is_glu(Output output) { return output == GLU || output == GLU_FRAGMENT_MAJOR; }

// Rows in the layout of format/fragment_major.cuh, with zeros as padding along K.
static void to_fragment_major(const Memory& x, int m, int k, Memory& fragment_major) {
    rows::ToFragmentsArguments a = {(const u16*)const_cast<Memory&>(x).data(), (u16*)fragment_major.data(), k};
    launch(m, ceil_div(padded_k(k) / 8, rows::THREADS), 1, rows::THREADS, [&] { rows::linear_to_fragments(a); });
    fragment_major.check("linear_to_fragments");
}
static size_t fragment_major_bytes(int m, int k) { return (size_t)ceil_div(k, CHUNK_K) * ceil_div(m, GROUP_ROWS) * GROUP_BYTES; }
// And back.
static void to_row_major(const char* what, Memory& fragment_major, int m, int k, Memory& x) {
    fragment_major.check(what);
    int groups = ceil_div(m, GROUP_ROWS);
    for (int i = 0; i < m; i++) {
        for (int c = 0; c < padded_k(k); c++) {
            u16 value = ((u16*)fragment_major.data())[fragment_index(groups, i, c)];
            if (c < k) {
                ((u16*)x.data())[(size_t)i * (k + 2) + c] = value;
            } else if (value != 0) {
                wrong(what, i, c, f16_to_float(value), 0);
            }
        }
    }
}

// Compares all of `out` except its last two columns, which must be untouched.
static void compare(const char* what, Memory& out, int m, int features, int stride, Output output, double slack,
                    const std::function<double(int, int)>& want) {
    out.check(what);
    bool half = output == F16 || is_glu(output);
    for (int i = 0; i < m; i++) {
        double norm = 0;
        for (int j = 0; j < features; j++) norm = std::max(norm, std::fabs(want(i, j)));
        for (int j = 0; j < stride; j++) {
            size_t at = (size_t)i * stride + j;
            if (j >= features) {
                u8 bytes[4];
                memcpy(bytes, out.data() + at * (half ? 2 : 4), half ? 2 : 4);
                if (bytes[0] != POISON || bytes[1] != POISON) printf("%s: written beside row %d\n", what, i), exit(1);
                continue;
            }
            double got = half ? f16_to_float(((u16*)out.data())[at]) : ((float*)out.data())[at];
            double bar = norm * slack + (half ? std::fabs(want(i, j)) * 0x1p-10 : 0);
            if (!(std::fabs(got - want(i, j)) <= bar)) wrong(what, i, j, got, want(i, j));
        }
    }
}

static Memory before(int m, int stride, int features, Output output) {
    Memory out((size_t)m * stride * (output == F32 || output == ADD ? 4 : 2));
    if (output == ADD) {
        for (int i = 0; i < m; i++) {
            for (int j = 0; j < features; j++) ((float*)out.data())[(size_t)i * stride + j] = (float)(i + j % 50);
        }
    }
    return out;
}

// Several matrices that share their input; their features follow each other.
static int activation = SILU;

struct Set {
    std::vector<std::unique_ptr<Weight>> weights;
    int features = 0;
    Set(std::initializer_list<int> rows, int k) {
        for (int n : rows) {
            weights.push_back(std::make_unique<Weight>(n, k));
            features += n;
        }
    }
    template <class Matrix>
    void fill(Matrix (&matrix)[3], bool bias) const {
        for (size_t i = 0; i < 3; i++) {
            matrix[i] = {};
            if (i < weights.size()) matrix[i] = {weights[i]->chunks.data(), bias ? weights[i]->bias.data() : nullptr, Weight::GLOBAL, weights[i]->rows};
        }
    }
    double product(int feature, const double* x, bool bias) const {
        for (auto& w : weights) {
            if (feature < w->rows) return w->product(feature, x) + (bias ? w->bias[feature] : 0);
            feature -= w->rows;
        }
        return NAN;
    }
    // The result of the epilogue, with biases.
    double result(int feature, const double* x, Output output) const {
        double gate = product(feature, x, true);
        return is_glu(output) ? unit(gate, product(weights[0]->rows + feature, x, true)) : gate;
    }
    // The gated unit.
    double unit(double gate, double up) const {
        double u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate);
        double act = activation == SILU ? gate / (1 + std::exp(-gate)) : 0.5 * gate * (1 + std::tanh(u));
        return act * up / 16;
    }
};

// How a tiled kernel is launched.
struct Tiling {
    const char* name;
    int columns, features, threads;
    bool fragment_major;
};

// The activation of the GLU, which alternates between checks.
static int next_activation() { return activation = activation == SILU ? GELU_TANH : SILU; }

static void check_tiles(Tiling tiling, void (*kernel)(tile::Arguments), int m, std::initializer_list<int> rows, int k, int split_k, Output output) {
    char what[128];
    snprintf(what, sizeof what, "%s %d, %d rows, K = %d, %d splits, output %d", tiling.name, tiling.columns, m, k, split_k, output);
    Set set(rows, k);
    Activations x(m, k);
    int features = is_glu(output) ? set.weights[0]->rows : set.features, stride = features + 2, tiles = 0;
    Memory out = before(m, stride, features, output), partial((size_t)split_k * m * set.features * 4);
    Memory fragment_major(fragment_major_bytes(m, k)), fragment_major_out(fragment_major_bytes(m, features));
    if (tiling.fragment_major) to_fragment_major(x.halves, m, k, fragment_major);
    std::vector<double> old;
    for (int i = 0; i < m * stride; i++) old.push_back(output == ADD ? ((float*)out.data())[i] : 0);
    tile::Arguments a = {};
    a.x = (const u16*)(tiling.fragment_major ? fragment_major : x.halves).data();
    a.out = (output == GLU_FRAGMENT_MAJOR ? fragment_major_out : out).data();
    a.partial = (float*)partial.data();
    set.fill(a.matrix, true);
    a.matrices = (int)rows.size();
    a.m = m;
    a.k = k;
    a.out_stride = stride;
    a.output = output == GLU_FRAGMENT_MAJOR ? (int)tile::STORE_FRAGMENT_MAJOR : output == GLU ? (int)tile::STORE_F16 : output;
    a.split_k = split_k;
    a.out_scale = 1 / 16.0f;
    a.activation = next_activation();
    for (int n : rows) tiles += ceil_div(n, tiling.features);
    if (output == GLU) tiles = ceil_div(2 * features, tiling.features);
    if (output == GLU_FRAGMENT_MAJOR) tiles = ceil_div(2 * padded_k(features), tiling.features);
    launch(tiles, ceil_div(m, tiling.columns), split_k, tiling.threads, [&] { kernel(a); }, tiling.fragment_major ? split_k : 1);
    partial.check(what);
    if (output == GLU_FRAGMENT_MAJOR) to_row_major(what, fragment_major_out, m, features, out);
    if (split_k > 1 && !tiling.fragment_major) launch(ceil_div(set.features, tiled::SUM_THREADS), m, 1, tiled::SUM_THREADS, [&] { tiled::linear_tiled_sum(a); });
    compare(what, out, m, features, stride, output, 1e-5, [&](int i, int j) {
        return old[i * stride + j] + set.result(j, &x.values[(size_t)i * k], output);
    });
}

// How a skinny GEMM is launched: `clusters` clusters of `split_k` blocks.
struct Launched {
    skinny::Input input;
    skinny::Tile tile;
    int clusters, split_k;
};

static skinny::Arguments arguments_of(const Set& set, const Memory& x, int m, int k, Output output, Memory& out, int stride, Launched by) {
    int tile_features = by.tile == skinny::TALL ? 16 : 8, step_chunks = by.tile == skinny::DEEP ? 2 : 1;
    skinny::Arguments a = {};
    a.x = (const u16*)const_cast<Memory&>(x).data();
    a.out = out.data();
    set.fill(a.matrix, true);
    int tiles = 0, index = 0;
    for (auto& w : set.weights) {
        if (!is_glu(output) || index == 0) tiles += ceil_div(w->rows, tile_features);
        for (int i = index++; i < (int)std::size(a.tiles); i++) a.tiles[i] = tiles;
    }
    a.cluster_tiles = tiles / by.clusters;
    a.larger_clusters = tiles % by.clusters;
    a.chunks = ceil_div(k, CHUNK_K);
    int steps = ceil_div(a.chunks, step_chunks);
    for (int i = 0; i < skinny::MAX_SPLIT_K; i++) {
        int split = min(i, by.split_k - 1), first = steps * split / by.split_k, count = steps * (split + 1) / by.split_k - first;
        a.k_range[i] = {first, count, 0xffffffffu / count + 1};
    }
    a.m = m;
    a.k = k;
    a.out_stride = stride;
    a.out_scale = 1 / 16.0f;
    a.activation = next_activation();
    return a;
}
static void launch_skinny(void (*kernel)(skinny::Arguments), const skinny::Arguments& a, Launched by) {
    launch(by.clusters, 1, by.split_k, skinny::THREADS, [&] { kernel(a); }, by.split_k);
}

static void check_skinny(const char* name, void (*kernel)(skinny::Arguments), int m, std::initializer_list<int> rows, int k, Output output,
                        skinny::Input input, int clusters, int split_k, skinny::Tile tile) {
    char what[128];
    snprintf(what, sizeof what, "%s, %d rows, K = %d, %d clusters of %d blocks", name, m, k, clusters, split_k);
    Set set(rows, k);
    int features = is_glu(output) ? set.weights[0]->rows : set.features, stride = features + 2;
    Activations x(m, k);
    Memory out = before(m, stride, features, output), fragment_major(fragment_major_bytes(m, k)), fragment_major_out(fragment_major_bytes(m, features));
    if (input == skinny::FRAGMENT_MAJOR) to_fragment_major(x.halves, m, k, fragment_major);
    std::vector<double> old;
    for (int i = 0; i < m * stride; i++) old.push_back(output == ADD ? ((float*)out.data())[i] : 0);
    Launched by = {input, tile, clusters, split_k};
    Memory& to = output == GLU_FRAGMENT_MAJOR ? fragment_major_out : out;
    launch_skinny(kernel, arguments_of(set, input == skinny::FRAGMENT_MAJOR ? fragment_major : x.halves, m, k, output, to, stride, by), by);
    if (output == GLU_FRAGMENT_MAJOR) to_row_major(what, fragment_major_out, m, features, out);
    compare(what, out, m, features, stride, output, 1e-5, [&](int i, int j) {
        return old[i * stride + j] + set.result(j, &x.values[(size_t)i * k], output);
    });
}

// A norm fused into the product that makes its rows and the one that takes them. The previous factors are `factor` times as large as
// those of the rows, except in every third row.
static void check_fused_norm(void (*maker)(skinny::Arguments), void (*taker)(skinny::Arguments), int m, int k, int width, double factor, Output output,
                           Launched makes, Launched takes) {
    char what[128];
    snprintf(what, sizeof what, "a norm of %d rows of %d fused into products, with %g of its factor", m, width, factor);
    bool is_fragment_major = makes.input == skinny::FRAGMENT_MAJOR;
    Set first({width}, k), second(is_glu(output) ? std::initializer_list<int>{40, 40} : std::initializer_list<int>{40, 24, 9}, width);
    Activations x(m, k);
    Memory fragment_major(fragment_major_bytes(m, k)), residual = before(m, width, width, ADD), rows(is_fragment_major ? fragment_major_bytes(m, width) : m * width * 2);
    if (is_fragment_major) to_fragment_major(x.halves, m, k, fragment_major);
    std::vector<double> want, factors;
    std::vector<float> weight, told, left(m, NAN);
    for (int j = 0; j < width; j++) weight.push_back((float)(noise() % 1000) * 1e-3f);
    for (int i = 0; i < m; i++) {
        double squares = 0;
        for (int j = 0; j < width; j++) {
            want.push_back(((float*)residual.data())[i * width + j] + first.result(j, &x.values[(size_t)i * k], ADD));
            squares += want.back() * want.back();
        }
        factors.push_back(1 / std::sqrt(squares / width + 1e-6));
        // Not all rows are alike.
        told.push_back((float)(factors[i] * (i % 3 == 1 ? 1 : factor)));
    }
    int tiles = width / (makes.tile == skinny::DEEP ? 8 : 16);
    Memory squares(m * tiles * 4);
    skinny::Arguments a = arguments_of(first, is_fragment_major ? fragment_major : x.halves, m, k, ADD, residual, width, makes);
    a.norm = {weight.data(), (float*)squares.data(), told.data(), tiles, (u16*)rows.data(), nullptr, nullptr, 0};
    launch_skinny(maker, a, makes);
    rows.check(what);
    squares.check(what);
    // The two columns that `compare` wants untouched are not here.
    residual.check(what);
    for (int i = 0; i < m * width; i++) {
        double got = ((float*)residual.data())[i];
        if (!(std::fabs(got - want[i]) <= 1e-4 * (1 + std::fabs(want[i])))) wrong(what, i / width, i % width, got, want[i]);
    }

    int features = is_glu(output) ? second.weights[0]->rows : second.features, stride = features + 2;
    Memory out = before(m, stride, features, output), fragment_major_out(fragment_major_bytes(m, features));
    Memory& to = output == GLU_FRAGMENT_MAJOR ? fragment_major_out : out;
    a = arguments_of(second, rows, m, width, output, to, stride, takes);
    a.norm = {weight.data(), (float*)squares.data(), told.data(), tiles, nullptr, left.data(), (const float*)residual.data(), 1e-6f};
    launch_skinny(taker, a, takes);
    if (output == GLU_FRAGMENT_MAJOR) to_row_major(what, fragment_major_out, m, features, out);
    std::vector<double> normed;
    for (int i = 0; i < m * width; i++) normed.push_back(((float*)residual.data())[i] * factors[i / width] * weight[i % width]);
    // Rows are rounded to f16.
    compare(what, out, m, features, stride, output, 2e-3, [&](int i, int j) { return second.result(j, &normed[(size_t)i * width], output); });
    for (int i = 0; i < m; i++) {
        if (!(std::fabs(left[i] - factors[i]) <= 1e-5 * factors[i])) wrong(what, i, 0, left[i], factors[i]);
    }
}

// A factor of an adapter in a type, and the values that it holds.
struct Factor {
    Memory words;
    std::vector<double> values;
    int type;

    Factor(size_t count, int type) : words(count * (type == adapter::F32 ? 4 : 2)), type(type) {
        for (size_t i = 0; i < count; i++) {
            float x = uniform();
            if (type == adapter::F32) ((float*)words.data())[i] = x;
            if (type == adapter::F16) ((u16*)words.data())[i] = to_f16(x), x = f16_to_float(to_f16(x));
            if (type == adapter::BF16) ((u16*)words.data())[i] = (u16)(__float_as_uint(x) >> 16), x = bf16_to_float((u16)(__float_as_uint(x) >> 16));
            values.push_back(x);
        }
    }
};

// An adapter of some projections: the rank beside each, 0 for none.
struct Adapter {
    std::vector<std::unique_ptr<Factor>> a, b;
    std::vector<adapter::Factors> table;
    const adapter::Factors* start;

    void add(int rank, int k, int outputs) { add(rank, k, outputs, table.size() % 3, (table.size() + 1) % 3); }
    void add(int rank, int k, int outputs, int a_type, int b_type) {
        a.push_back(std::make_unique<Factor>((size_t)rank * k, a_type));
        b.push_back(std::make_unique<Factor>((size_t)rank * outputs, b_type));
        table.push_back({a.back()->words.data(), b.back()->words.data(), 0.25f, rank, a_type, b_type});
        start = table.data();
    }
    double low(int projection, int r, const double* x, int k) const {
        double sum = 0;
        for (int i = 0; i < k; i++) sum += a[projection]->values[(size_t)r * k + i] * x[i];
        return sum;
    }
    double product(int projection, int feature, const double* x, int k) const {
        const adapter::Factors& f = table[projection];
        double sum = 0;
        for (int r = 0; r < f.rank; r++) sum += b[projection]->values[(size_t)feature * f.rank + r] * low(projection, r, x, k);
        return f.scale * sum;
    }
};

// The rows of adapters, -1 for none, in tiles. The last tile is unused, as a recorded pass has them.
static std::vector<adapter::RowTile> tiles_of(int m, const std::vector<Adapter>& adapters, const std::function<int(int)>& of_row) {
    std::vector<adapter::RowTile> tiles;
    for (int which = -1; which < (int)adapters.size(); which++) {
        int count = adapter::TILE_ROWS;
        for (int row = 0; row < m; row++) {
            if (of_row(row) != which) continue;
            if (count == adapter::TILE_ROWS) tiles.push_back({which < 0 ? nullptr : adapters[which].table.data(), 0, {}, 0}), count = 0;
            tiles.back().row[count++] = row, tiles.back().rows = count;
        }
    }
    tiles.push_back({});
    return tiles;
}

// Adapters of some projections after FIRST others, with inputs of `k` elements: each has the ranks of `ranks`, one for each matrix. The types
// of factors differ between adapters.
static const int FIRST = 1;
static std::vector<Adapter> adapters_of(const Set& set, int k, const std::vector<std::vector<int>>& ranks) {
    std::vector<Adapter> adapters(ranks.size());
    for (size_t i = 0; i < ranks.size(); i++) {
        for (int p = 0; p < FIRST; p++) adapters[i].add(0, k, 8);
        for (size_t p = 0; p < set.weights.size(); p++) {
            int type = (i + p) % 3;
            adapters[i].add(ranks[i][p], k, set.weights[p]->rows, type, (type + 1 + i) % 3);
        }
    }
    return adapters;
}
static int log2_of(int x) { return 31 - __builtin_clz(x); }
// A power of two.
static int largest_rank(const std::vector<std::vector<int>>& ranks) {
    int largest = 16;
    for (auto& each : ranks) {
        for (int rank : each) while (largest < rank) largest *= 2;
    }
    return largest;
}

// Rows of the skinny GEMM with adapters: that of row r is of_row(r), or -1. K is in `parts`, and `copies` bytes are for factors. With `told`
// they are rows of a fused norm, as in check_fused_norm(), whose previous factors are so many times as large as those of the rows.
static void check_adapted_skinny(const char* name, void (*kernel)(skinny::Arguments), int m, std::initializer_list<int> outputs, int k, Output output, Launched by,
                                 std::vector<std::vector<int>> ranks, const std::function<int(int)>& of_row, int parts, int copies, double told = 0) {
    char what[128];
    snprintf(what, sizeof what, "%s, %d adapters of %d rows, K = %d in %d parts, %d copies, %g of a factor", name, (int)ranks.size(), m, k, parts, copies, told);
    bool is_fragment_major = by.input == skinny::FRAGMENT_MAJOR, has_norm = told > 0;
    float factor = has_norm ? 1 : 4;
    Set set(outputs, k);
    Activations x(m, k);
    std::vector<float> stream, weight(k), squares, factors, left(m, NAN);
    int tiles = k / 16;
    std::vector<double> rows = x.values;
    Memory halves(m * k * 2), fragment_major(fragment_major_bytes(m, k));
    memcpy(halves.data(), x.halves.data(), m * k * 2);
    for (int i = 0; has_norm && i < m; i++) {
        if (i == 0) for (float& w : weight) w = (float)(noise() % 1000) * 1e-3f;
        double sum = 0;
        for (int j = 0; j < k; j++) stream.push_back((float)x.values[i * k + j] * 3), sum += (double)stream.back() * stream.back();
        double right = 1 / std::sqrt(sum / k + 1e-6);
        factors.push_back((float)(right * (i % 3 == 1 ? 1 : told)));
        for (int j = 0; j < k; j++) {
            float y = stream[i * k + j], scaled = y * factors[i] * weight[j];
            if (j % 16 == 0) squares.push_back(0);
            squares.back() += std::fabs(scaled) <= 65504.0f ? y * y : INFINITY;
            ((u16*)halves.data())[i * k + j] = to_f16(scaled);
            rows[i * k + j] = y * right * weight[j];
        }
    }
    if (is_fragment_major) to_fragment_major(halves, m, k, fragment_major);
    std::vector<Adapter> adapters = adapters_of(set, k, ranks);
    std::vector<adapter::RowTile> of_rows = tiles_of(m, adapters, of_row);
    if ((int)of_rows.size() > m) of_rows.pop_back();
    int matrices = set.weights.size(), features = is_glu(output) ? set.weights[0]->rows : set.features, stride = features + 2, largest = largest_rank(ranks);
    Memory values((size_t)matrices * m * parts * largest * 4), taken(80 * 16);
    for (size_t i = 0; i < values.bytes / 4; i++) ((u32*)values.data())[i] = skinny::PENDING;
    int applied = next_activation();
    // Blocks run one after the other: the first ones wait in vain for others, and only the second time all numbers of A x are there.
    for (int turn = 0; turn < 2; turn++) {
        Memory out = before(m, stride, features, output), fragment_major_out(fragment_major_bytes(m, features));
        std::vector<double> old;
        for (int i = 0; i < m * stride; i++) {
            old.push_back(i % 7);
            if (output == ADD && i % stride < features) ((float*)out.data())[i] = (float)old[i];
            if (output != ADD) old[i] = 0;
        }
        Memory& to = output == GLU_FRAGMENT_MAJOR ? fragment_major_out : out;
        skinny::Arguments a = arguments_of(set, is_fragment_major ? fragment_major : halves, m, k, output, to, stride, by);
        a.activation = activation = applied;
        if (has_norm) a.norm = {weight.data(), squares.data(), factors.data(), tiles, nullptr, left.data(), stream.data(), 1e-6f};
        a.low = {of_rows.data(), (float*)values.data(), (uint4*)taken.data(), 80, (int)of_rows.size(), matrices, log2_of(largest), log2_of(parts), FIRST, factor, copies, {FIRST, 1, k, {7}}};
        launch_skinny(kernel, a, by);
        values.check(what), taken.check(what);
        for (int i = 0; i < 320; i++) {
            if (((u32*)taken.data())[i] != skinny::PENDING) wrong(what, turn, i, ((u32*)taken.data())[i], skinny::PENDING);
        }
        if (turn == 0) continue;
        if (output == GLU_FRAGMENT_MAJOR) to_row_major(what, fragment_major_out, m, features, out);
        auto with_adapter = [&](int i, int feature) {
            const double* row = &rows[(size_t)i * k];
            int index = 0, line = feature;
            while (line >= set.weights[index]->rows) line -= set.weights[index++]->rows;
            double added = of_row(i) < 0 ? 0 : factor * adapters[of_row(i)].product(FIRST + index, line, row, k);
            return set.product(feature, row, true) + added;
        };
        compare(what, out, m, features, stride, output, has_norm ? 4e-3 : 2e-5, [&](int i, int j) {
            double gate = with_adapter(i, j);
            return old[i * stride + j] + (is_glu(output) ? set.unit(gate, with_adapter(i, features + j)) : gate);
        });
    }
}

#if HAS_WGMMA
// Rows of wide tiles by adapter: that of row r is of_row(r), or -1. Each adapter has the ranks of `ranks`, one for each matrix.
static void check_adapted_rows(int columns, int m, std::initializer_list<int> outputs, int k, int split_k, Output output,
                               std::vector<std::vector<int>> ranks, const std::function<int(int)>& of_row) {
    const float FACTOR = 4;
    char what[128];
    snprintf(what, sizeof what, "%d adapters of %d rows, K = %d, %d splits, output %d", (int)ranks.size(), m, k, split_k, output);
    Set set(outputs, k);
    Activations x(m, k);
    int matrices = set.weights.size(), features = is_glu(output) ? set.weights[0]->rows : set.features, stride = features + 2, tiles = 0;
    std::vector<Adapter> adapters = adapters_of(set, k, ranks);
    std::vector<adapter::RowTile> of_rows = tiles_of(m, adapters, of_row);
    int largest = largest_rank(ranks);
    Memory fragment_major(fragment_major_bytes(m, k)), low((size_t)matrices * m * wide::PARTS * largest * 4);
    to_fragment_major(x.halves, m, k, fragment_major);
    u32 counter = 0;
    wide::AdaptedArguments a = {};
    set.fill(a.product.matrix, true);
    a.product.x = (const u16*)fragment_major.data(), a.product.matrices = matrices, a.product.m = m, a.product.k = k, a.product.out_stride = stride;
    a.product.output = output == GLU_FRAGMENT_MAJOR ? (int)tile::STORE_FRAGMENT_MAJOR : output;
    a.product.split_k = split_k, a.product.out_scale = 1 / 16.0f, a.product.activation = next_activation();
    a.rows = {of_rows.data(), (float*)low.data(), &counter, (int)of_rows.size(), 0, largest, FIRST, FACTOR};
    a.rows.blocks = ceil_div(a.rows.tasks(a.product), split_k);
    for (int n : outputs) tiles += ceil_div(n, wide::FEATURES);
    if (is_glu(output)) tiles = ceil_div(2 * padded_k(features), wide::FEATURES);
    // Twice, because the counter must be what it was.
    for (int turn = 0; turn < 2; turn++) {
        for (size_t i = 0; i < low.bytes / 4; i++) ((float*)low.data())[i] = NAN;
        Memory out = before(m, stride, features, output), fragment_major_out(fragment_major_bytes(m, features));
        std::vector<double> old;
        for (int i = 0; i < m * stride; i++) old.push_back(output == ADD ? ((float*)out.data())[i] : 0);
        a.product.out = (output == GLU_FRAGMENT_MAJOR ? fragment_major_out : out).data();
        launch(a.rows.blocks + tiles, 1, split_k, wide::THREADS<wide::RowAdapters<32, false>>, [&] {
            if (columns == 32) return is_glu(output) ? wide::linear_wide_adapted_glu_32(a) : wide::linear_wide_adapted_32(a);
            is_glu(output) ? wide::linear_wide_adapted_glu_64(a) : wide::linear_wide_adapted_64(a);
        }, split_k, a.rows.blocks);
        low.check(what);
        if (counter != 0) wrong(what, turn, 0, counter, 0);
        if (output == GLU_FRAGMENT_MAJOR) to_row_major(what, fragment_major_out, m, features, out);
        auto with_adapter = [&](int i, int feature) {
            const double* row = &x.values[(size_t)i * k];
            int index = 0, line = feature;
            while (line >= set.weights[index]->rows) line -= set.weights[index++]->rows;
            double added = of_row(i) < 0 ? 0 : FACTOR * adapters[of_row(i)].product(FIRST + index, line, row, k);
            return set.product(feature, row, true) + added;
        };
        compare(what, out, m, features, stride, output, 2e-5, [&](int i, int j) {
            double gate = with_adapter(i, j);
            return old[i * stride + j] + (is_glu(output) ? set.unit(gate, with_adapter(i, features + j)) : gate);
        });
    }
}
#endif

// A product of the row that every block computes: skinny::ResidualRow.
static void check_residual(void (*kernel)(skinny::Arguments), int k, Output output, Launched by) {
    char what[128];
    snprintf(what, sizeof what, "a residual row of %d, %d clusters of %d blocks", k, by.clusters, by.split_k);
    Set set(is_glu(output) ? std::initializer_list<int>{40, 40} : std::initializer_list<int>{40, 24, 9}, k);
    int features = is_glu(output) ? set.weights[0]->rows : set.features, stride = features + 2;
    Memory x(k * 4), y(k * 4), post(k * 4), weight(k * 4), sum(k * 4), out = before(1, stride, features, output);
    double squares = 0, after = 0;
    for (int i = 0; i < k; i++) {
        for (Memory* m : {&x, &y, &post, &weight}) ((float*)m->data())[i] = uniform();
        squares += std::pow(((float*)y.data())[i], 2.0);
    }
    std::vector<double> normed;
    for (int i = 0; i < k; i++) {
        normed.push_back(((float*)x.data())[i] + ((float*)y.data())[i] / std::sqrt(squares / k + 1e-6) * ((float*)post.data())[i]);
        after += normed[i] * normed[i];
    }
    skinny::Arguments a = arguments_of(set, x, 1, k, output, out, stride, by);
    a.x = nullptr;
    a.residual = {(float*)y.data(), (float*)post.data(), (float*)x.data(), (float*)weight.data(), (float*)sum.data(), 1e-6f};
    launch_skinny(kernel, a, by);
    sum.check(what);
    for (int i = 0; i < k; i++) {
        double got = ((float*)sum.data())[i];
        if (!(std::fabs(got - normed[i]) <= 1e-5)) wrong(what, 0, i, got, normed[i]);
        normed[i] *= ((float*)weight.data())[i] / std::sqrt(after / k + 1e-6);
    }
    // The row is rounded to f16.
    compare(what, out, 1, features, stride, output, 2e-3, [&](int, int j) { return set.result(j, normed.data(), output); });
}

#if HAS_WGMMA
// The skinny GEMM in ranges of K gives rows the bits of the wide kernel; `normalizes` if it takes them before their norm.
static void check_ranges(const char* name, void (*kernel)(skinny::Arguments), int m, std::initializer_list<int> rows, int k, int ranges, Output output,
                         bool normalizes, Launched by) {
    char what[128];
    snprintf(what, sizeof what, "%s, %d rows, K = %d, %d ranges, %d clusters of %d blocks", name, m, k, ranges, by.clusters, by.split_k);
    Set set(rows, k);
    int features = is_glu(output) ? set.weights[0]->rows : set.features, stride = features + 2, tiles = 0;
    Activations x(m, k);
    Memory fragment_major(fragment_major_bytes(m, k)), stream(m * k * 4), weight(k * 4);
    for (int i = 0; i < m * k; i++) ((float*)stream.data())[i] = uniform();
    for (int i = 0; i < k; i++) ((float*)weight.data())[i] = uniform();
    if (normalizes) {
        norm::Arguments n = {(const float*)stream.data(), (const float*)weight.data(), (u16*)x.halves.data(), nullptr, k, 1e-6f};
        launch(m, 1, 1, norm::THREADS, [&] { norm::rms_norm(n); });
    }
    to_fragment_major(x.halves, m, k, fragment_major);

    Memory outs[] = {before(m, stride, features, output), before(m, stride, features, output)};
    Memory fragments[] = {Memory(fragment_major_bytes(m, features)), Memory(fragment_major_bytes(m, features))};
    bool in_fragments = output == GLU_FRAGMENT_MAJOR;
    skinny::Arguments a = arguments_of(set, by.input == skinny::FRAGMENT_MAJOR ? fragment_major : x.halves, m, k, output, in_fragments ? fragments[0] : outs[0], stride, by);
    a.ranges = ranges;
    a.normalized = {(const float*)stream.data(), (const float*)weight.data(), 1e-6f};
    auto first = [&](int split) { return a.chunks * (ranges * split / by.split_k) / ranges; };
    for (int i = 0; i < skinny::MAX_SPLIT_K; i++) {
        int split = min(i, by.split_k - 1);
        a.k_range[i] = {first(split), first(split + 1) - first(split), 0};
    }
    launch_skinny(kernel, a, by);

    tile::Arguments w = {};
    w.x = (const u16*)fragment_major.data();
    w.out = (in_fragments ? fragments[1] : outs[1]).data();
    set.fill(w.matrix, true);
    w.matrices = (int)rows.size();
    w.m = m, w.k = k, w.out_stride = stride;
    w.output = in_fragments ? (int)tile::STORE_FRAGMENT_MAJOR : output == GLU ? (int)tile::STORE_F16 : output;
    w.split_k = ranges;
    w.out_scale = a.out_scale, w.activation = a.activation;
    for (int n : rows) tiles += ceil_div(n, wide::FEATURES);
    if (is_glu(output)) tiles = ceil_div(2 * (in_fragments ? padded_k(features) : features), wide::FEATURES);
    launch(tiles, 1, ranges, wide::THREADS<wide::NoAdapters>, [&] {
        if (is_glu(output)) return wide::linear_wide_glu_16(w);
        wide::linear_wide_16(w);
    }, ranges);
    for (int i = 0; i < 2 && in_fragments; i++) to_row_major(what, fragments[i], m, features, outs[i]);
    for (Memory& out : outs) out.check(what);
    int bytes = output == F32 || output == ADD ? 4 : 2;
    for (int i = 0; i < m; i++) {
        for (int j = 0; j < stride; j++) {
            size_t at = ((size_t)i * stride + j) * bytes;
            auto value = [&](Memory& out) { return bytes == 2 ? f16_to_float(*(u16*)(out.data() + at)) : *(float*)(out.data() + at); };
            if (memcmp(outs[0].data() + at, outs[1].data() + at, bytes)) wrong(what, i, j, value(outs[0]), value(outs[1]));
        }
    }
}
#endif

int main() {
    check_int8(9, 272);
    check_int8(300, 16);
    check_int8_products(2, 130, 336, 1);
    check_int8_products(9, 20, 16, 1);
    check_int8_products(31, 128, 80, 1, 3);
    check_int8_products(70, 17, 592, 1);
    check_int8_products(5, 150, 1616, 1, 4);
    check_f32_products(17, 66, 336, 1);
    check_f32_products(70, 20, 16, 1);
    check_f32_products(65, 130, 80, 1);
    auto t8 = [](tile::Arguments a) { tiled::linear_tiled_8(a); };
    auto t16 = [](tile::Arguments a) { tiled::linear_tiled_16(a); };
    auto t32 = [](tile::Arguments a) { tiled::linear_tiled_32(a); };
    auto t64 = [](tile::Arguments a) { tiled::linear_tiled_64(a); };
    auto tiled_by = [](int columns) { return Tiling{"tiled", columns, tiled::FEATURES, tiled::THREADS, false}; };
    check_tiles(tiled_by(8), t8, 5, {72}, 272, 1, F32);
    check_tiles(tiled_by(8), t8, 8, {64, 24, 40}, 640, 3, ADD);
    check_tiles(tiled_by(16), t16, 9, {130}, 48, 1, F16);
    check_tiles(tiled_by(32), t32, 33, {66, 8}, 400, 2, ADD);
    check_tiles(tiled_by(64), t64, 64, {64}, 384, 2, F32);
    check_tiles(tiled_by(64), t64, 70, {40}, 144, 1, ADD);

#if HAS_WGMMA
    auto w8 = [](tile::Arguments a) { wide::linear_wide_8(a); };
    auto w16 = [](tile::Arguments a) { wide::linear_wide_16(a); };
    auto w32 = [](tile::Arguments a) { wide::linear_wide_32(a); };
    auto w64 = [](tile::Arguments a) { wide::linear_wide_64(a); };
    auto w128 = [](tile::Arguments a) { wide::linear_wide_128(a); };
    auto wide_by = [](int columns) { return Tiling{"wide", columns, wide::FEATURES, wide::THREADS<wide::NoAdapters>, true}; };
    check_tiles(wide_by(8), w8, 3, {200, 8}, 784, 1, ADD);
    check_tiles(wide_by(16), w16, 16, {72}, 1040, 2, F32);
    check_tiles(wide_by(32), w32, 21, {193, 40, 9}, 272, 1, F16);
    check_tiles(wide_by(64), w64, 64, {192}, 656, 3, ADD);
    check_tiles(wide_by(64), w64, 70, {33}, 16, 1, F32);
    check_tiles(wide_by(128), w128, 100, {50, 30}, 400, 2, F32);
    auto ws8 = [](tile::Arguments a) { wide::linear_wide_glu_8(a); };
    auto ws64 = [](tile::Arguments a) { wide::linear_wide_glu_64(a); };
    check_tiles(wide_by(8), ws8, 5, {203, 203}, 272, 1, GLU);
    check_tiles(wide_by(64), ws64, 70, {40, 40}, 656, 1, GLU);
    check_tiles(wide_by(64), ws64, 40, {208, 208}, 784, 1, GLU_FRAGMENT_MAJOR);
    check_tiles(wide_by(8), ws8, 8, {112, 112}, 1024, 3, GLU_FRAGMENT_MAJOR);
    check_tiles(wide_by(8), ws8, 11, {90, 90}, 272, 1, GLU_FRAGMENT_MAJOR);
#endif

    auto f4 = [](skinny::Arguments a) { skinny::skinny_f32_4(a); };
    auto f1 = [](skinny::Arguments a) { skinny::skinny_f32_1(a); };
    auto add1 = [](skinny::Arguments a) { skinny::skinny_add_1(a); };
    auto f8 = [](skinny::Arguments a) { skinny::skinny_f32_8(a); };
    auto f16 = [](skinny::Arguments a) { skinny::skinny_f32_16(a); };
    auto h4 = [](skinny::Arguments a) { skinny::skinny_f16_4(a); };
    auto add8 = [](skinny::Arguments a) { skinny::skinny_add_8(a); };
    auto add4 = [](skinny::Arguments a) { skinny::skinny_add_4(a); };
    auto glu8 = [](skinny::Arguments a) { skinny::skinny_glu_8(a); };
    auto glu16 = [](skinny::Arguments a) { skinny::skinny_glu_16(a); };
    auto glu1 = [](skinny::Arguments a) { skinny::skinny_glu_1(a); };
    check_skinny("f32_1", f1, 1, {40, 24, 9}, 656, F32, skinny::ROW_MAJOR, 3, 1, skinny::DEEP);
    check_skinny("add_1", add1, 1, {50}, 2064, ADD, skinny::ROW_MAJOR, 4, 1, skinny::DEEP);
    check_skinny("f32_4", f4, 2, {40, 24, 9}, 656, F32, skinny::ROW_MAJOR, 3, 1, skinny::DEEP);
    check_skinny("f32_4", f4, 4, {33}, 16, F32, skinny::ROW_MAJOR, 2, 1, skinny::DEEP);
    check_skinny("f16_4", h4, 3, {24}, 1040, F16, skinny::ROW_MAJOR, 1, 1, skinny::DEEP);
    check_skinny("add_4", add4, 1, {50}, 2064, ADD, skinny::ROW_MAJOR, 4, 1, skinny::DEEP);
    check_skinny("f32_8", f8, 8, {40, 20}, 400, F32, skinny::ROW_MAJOR, 2, 1, skinny::TALL);
    check_skinny("add_8", add8, 5, {23}, 2320, ADD, skinny::ROW_MAJOR, 2, 1, skinny::TALL);
    check_skinny("f32_16", f16, 13, {72}, 272, F32, skinny::ROW_MAJOR, 2, 1, skinny::TALL);
    check_skinny("glu_8", glu8, 6, {24, 24}, 272, GLU, skinny::ROW_MAJOR, 2, 1, skinny::GATE_UP);
    check_skinny("glu_16", glu16, 11, {20, 20}, 144, GLU, skinny::ROW_MAJOR, 1, 1, skinny::GATE_UP);
    check_skinny("glu_1", glu1, 1, {16, 16}, 272, GLU, skinny::ROW_MAJOR, 2, 1, skinny::GATE_UP);
    // As large as the rows; so large that they do not fit f16; so small that they vanish.
    for (double factor : {1.0, 1e5, 1e-5}) {
        Launched split = {skinny::ROW_MAJOR, skinny::DEEP, 3, 1}, pair = {skinny::ROW_MAJOR, skinny::GATE_UP, 2, 1};
        check_fused_norm(add1, f1, 1, 656, 192, factor, F32, split, split);
        check_fused_norm(add1, glu1, 1, 272, 3136, factor, GLU, split, pair);
        check_fused_norm(add4, f4, 3, 272, 320, factor, F32, split, split);
        check_fused_norm(add4, glu8, 4, 272, 64, factor, GLU, split, pair);
    }
    auto f_residual = [](skinny::Arguments a) { skinny::skinny_f32_residual_1(a); };
    auto glu_residual = [](skinny::Arguments a) { skinny::skinny_glu_residual_1(a); };
    check_residual(f_residual, 656, F32, {skinny::RESIDUAL, skinny::DEEP, 3, 1});
    check_residual(f_residual, 4096, F32, {skinny::RESIDUAL, skinny::DEEP, 2, 1});
    check_residual(glu_residual, 272, GLU, {skinny::RESIDUAL, skinny::GATE_UP, 2, 1});
#if __CUDA_ARCH__ >= 900
    check_residual(f_residual, 656, F32, {skinny::RESIDUAL, skinny::DEEP, 3, 2});
    check_residual(f_residual, 4096, F32, {skinny::RESIDUAL, skinny::DEEP, 2, 2});
    check_skinny("f32_1", f1, 1, {40, 24, 9}, 656, F32, skinny::ROW_MAJOR, 3, 2, skinny::DEEP);
    check_skinny("add_1", add1, 1, {50}, 2064, ADD, skinny::ROW_MAJOR, 4, 2, skinny::DEEP);
    check_skinny("f16_4", h4, 3, {24}, 1040, F16, skinny::ROW_MAJOR, 1, 2, skinny::DEEP);
    check_skinny("f32_8", f8, 8, {40, 20}, 400, F32, skinny::ROW_MAJOR, 2, 2, skinny::TALL);
    check_skinny("add_8", add8, 5, {23}, 2320, ADD, skinny::ROW_MAJOR, 2, 2, skinny::TALL);
    auto f_fragments = [](skinny::Arguments a) { skinny::skinny_f32_fragments_8(a); };
    auto h_fragments = [](skinny::Arguments a) { skinny::skinny_f16_fragments_8(a); };
    auto add_fragments = [](skinny::Arguments a) { skinny::skinny_add_fragments_8(a); };
    auto glu_fragments = [](skinny::Arguments a) { skinny::skinny_glu_fragments_8(a); };
    check_skinny("f32_fragments", f_fragments, 8, {40, 20}, 400, F32, skinny::FRAGMENT_MAJOR, 2, 1, skinny::TALL);
    check_skinny("f32_fragments", f_fragments, 5, {40, 20, 9}, 1168, F32, skinny::FRAGMENT_MAJOR, 2, 2, skinny::TALL);
    check_skinny("f16_fragments", h_fragments, 6, {33}, 16, F16, skinny::FRAGMENT_MAJOR, 1, 1, skinny::TALL);
    check_skinny("add_fragments", add_fragments, 7, {23}, 2320, ADD, skinny::FRAGMENT_MAJOR, 2, 2, skinny::TALL);
    check_skinny("glu_fragments", glu_fragments, 8, {24, 24}, 272, GLU_FRAGMENT_MAJOR, skinny::FRAGMENT_MAJOR, 2, 1, skinny::GATE_UP);
    check_skinny("glu_fragments", glu_fragments, 6, {128, 128}, 1040, GLU_FRAGMENT_MAJOR, skinny::FRAGMENT_MAJOR, 3, 1, skinny::GATE_UP);
    auto f_fragments_16 = [](skinny::Arguments a) { skinny::skinny_f32_fragments_16(a); };
    auto add_fragments_16 = [](skinny::Arguments a) { skinny::skinny_add_fragments_16(a); };
    auto glu_fragments_16 = [](skinny::Arguments a) { skinny::skinny_glu_fragments_16(a); };
    check_skinny("f32_fragments_16", f_fragments_16, 16, {40, 20, 9}, 1168, F32, skinny::FRAGMENT_MAJOR, 2, 1, skinny::TALL);
    check_skinny("add_fragments_16", add_fragments_16, 11, {83}, 1296, ADD, skinny::FRAGMENT_MAJOR, 2, 2, skinny::TALL);
    check_skinny("glu_fragments_16", glu_fragments_16, 13, {40, 40}, 272, GLU_FRAGMENT_MAJOR, skinny::FRAGMENT_MAJOR, 2, 1, skinny::GATE_UP);
    for (double factor : {1.0, 1e5, 1e-5}) {
        Launched split = {skinny::ROW_MAJOR, skinny::DEEP, 3, 2}, rows = {skinny::FRAGMENT_MAJOR, skinny::TALL, 2, 2}, pair = {skinny::FRAGMENT_MAJOR, skinny::GATE_UP, 3, 1};
        check_fused_norm(add1, f1, 1, 1296, 704, factor, F32, split, split);
        check_fused_norm(add_fragments, f_fragments, 7, 1168, 320, factor, F32, rows, rows);
        check_fused_norm(add_fragments, glu_fragments, 8, 272, 576, factor, GLU_FRAGMENT_MAJOR, rows, pair);
        check_fused_norm(add_fragments_16, f_fragments_16, 11, 400, 640, factor, F32, rows, rows);
        check_fused_norm(add_fragments_16, glu_fragments_16, 16, 272, 192, factor, GLU_FRAGMENT_MAJOR, rows, pair);
    }
#if HAS_WGMMA
    auto ranges_of = [](skinny::Input input, skinny::Tile tile, int clusters, int split_k) { return Launched{input, tile, clusters, split_k}; };
#define RANGES(NAME) #NAME, [](skinny::Arguments a) { skinny::skinny_ranges_##NAME(a); }
    check_ranges(RANGES(f32_1), 1, {40, 24, 9}, 912, 2, F32, false, ranges_of(skinny::ROW_MAJOR, skinny::TALL, 3, 1));
    check_ranges(RANGES(add_1), 1, {150}, 1296, 3, ADD, false, ranges_of(skinny::ROW_MAJOR, skinny::TALL, 2, 2));
    check_ranges(RANGES(glu_1), 1, {203, 203}, 272, 1, GLU, false, ranges_of(skinny::ROW_MAJOR, skinny::GATE_UP, 2, 1));
    check_ranges(RANGES(f16_4), 3, {33}, 1040, 3, F16, false, ranges_of(skinny::ROW_MAJOR, skinny::TALL, 1, 1));
    check_ranges(RANGES(add_4), 4, {40}, 1168, 2, ADD, false, ranges_of(skinny::ROW_MAJOR, skinny::TALL, 1, 2));
    check_ranges(RANGES(glu_4), 2, {20, 20}, 784, 2, GLU, false, ranges_of(skinny::ROW_MAJOR, skinny::GATE_UP, 2, 1));
    check_ranges(RANGES(f32_fragments_8), 8, {40, 20}, 400, 1, F32, false, ranges_of(skinny::FRAGMENT_MAJOR, skinny::TALL, 2, 1));
    check_ranges(RANGES(add_fragments_8), 7, {83}, 2320, 5, ADD, false, ranges_of(skinny::FRAGMENT_MAJOR, skinny::TALL, 2, 2));
    check_ranges(RANGES(glu_fragments_8), 6, {128, 128}, 1040, 2, GLU_FRAGMENT_MAJOR, false, ranges_of(skinny::FRAGMENT_MAJOR, skinny::GATE_UP, 3, 1));
    check_ranges(RANGES(add_fragments_16), 11, {83}, 1296, 3, ADD, false, ranges_of(skinny::FRAGMENT_MAJOR, skinny::TALL, 2, 2));
    check_ranges(RANGES(f16_fragments_16), 16, {40}, 656, 2, F16, false, ranges_of(skinny::FRAGMENT_MAJOR, skinny::TALL, 2, 1));
    check_ranges(RANGES(glu_fragments_16), 13, {40, 40}, 272, 1, GLU_FRAGMENT_MAJOR, false, ranges_of(skinny::FRAGMENT_MAJOR, skinny::GATE_UP, 2, 1));
    check_ranges(RANGES(f32_norm_1), 1, {40, 24, 9}, 4096, 3, F32, true, ranges_of(skinny::NORMALIZED, skinny::TALL, 2, 2));
    check_ranges(RANGES(f32_norm_4), 3, {40, 24}, 656, 2, F32, true, ranges_of(skinny::NORMALIZED, skinny::TALL, 2, 1));
    check_ranges(RANGES(glu_norm_1), 1, {20, 20}, 272, 1, GLU, true, ranges_of(skinny::NORMALIZED, skinny::GATE_UP, 1, 1));
    check_ranges(RANGES(glu_norm_4), 4, {20, 20}, 912, 2, GLU, true, ranges_of(skinny::NORMALIZED, skinny::GATE_UP, 1, 1));
#endif
    check_int8_products(3, 20, 528, 2);
    check_int8_products(70, 140, 592, 3);
    check_int8_products(40, 70, 2080, 4, 5);
    check_f32_products(64, 130, 592, 3);
    check_f32_products(70, 20, 2064, 8);
#endif
    auto mixed = [](int row) { return row % 3 - 1; };
    auto only = [](int) { return 0; };
#define SKINNY_ADAPTED(NAME) #NAME, [](skinny::Arguments a) { skinny::skinny_adapted_##NAME(a); }
    for (double told : {0.0, 1.0, 1e5, 1e-5}) {
        Launched deep = {skinny::ROW_MAJOR, skinny::DEEP, 3, 1}, pair = {skinny::ROW_MAJOR, skinny::GATE_UP, 2, 1}, tall = {skinny::ROW_MAJOR, skinny::TALL, 2, 1};
        check_adapted_skinny(SKINNY_ADAPTED(f32_1), 1, {40, 24, 9}, 704, F32, deep, {{16, 0, 32}}, only, 2, 1 << 14, told);
        check_adapted_skinny(SKINNY_ADAPTED(glu_1), 1, {40, 40}, 3136, GLU, pair, {{16, 16}}, only, 4, 1 << 16, told);
        check_adapted_skinny(SKINNY_ADAPTED(f32_4), 3, {40, 24}, 320, F32, deep, {{16, 16}, {32, 16}}, mixed, 1, 1 << 14, told);
        check_adapted_skinny(SKINNY_ADAPTED(glu_8), 5, {40, 40}, 448, GLU, pair, {{32, 16}, {0, 16}}, mixed, 4, 0, told);
        check_adapted_skinny(SKINNY_ADAPTED(glu_16), 13, {20, 20}, 144, GLU, {skinny::ROW_MAJOR, skinny::GATE_UP, 1, 1}, {{16, 16}, {16, 48}}, mixed, 2, 1 << 16, 0);
        check_adapted_skinny(SKINNY_ADAPTED(f32_8), 8, {40, 20}, 400, F32, tall, {{64, 16}}, only, 2, 1 << 15, 0);
    }
    check_adapted_skinny(SKINNY_ADAPTED(add_1), 1, {50}, 2064, ADD, {skinny::ROW_MAJOR, skinny::DEEP, 4, 1}, {{16}}, only, 4, 1 << 14);
    // The last part is padding.
    check_adapted_skinny(SKINNY_ADAPTED(f32_8), 8, {40, 24, 9}, 144, F32, {skinny::ROW_MAJOR, skinny::TALL, 4, 1}, std::vector<std::vector<int>>(8, {16, 16, 16}), [](int row) { return row; }, 4, 1 << 15);
    check_adapted_skinny(SKINNY_ADAPTED(add_4), 4, {50}, 2064, ADD, {skinny::ROW_MAJOR, skinny::DEEP, 4, 1}, {{16}, {16}, {32}}, [](int row) { return row % 3; }, 2, 3000);
    check_adapted_skinny(SKINNY_ADAPTED(add_8), 5, {23}, 2320, ADD, {skinny::ROW_MAJOR, skinny::TALL, 2, 1}, {{16}, {16}}, mixed, 1, 1 << 15);
    check_adapted_skinny(SKINNY_ADAPTED(f32_16), 13, {72}, 272, F32, {skinny::ROW_MAJOR, skinny::TALL, 2, 1}, {{16}, {64}}, mixed, 4, 1 << 15);
    check_adapted_skinny(SKINNY_ADAPTED(add_16), 16, {40}, 272, ADD, {skinny::ROW_MAJOR, skinny::TALL, 2, 1}, std::vector<std::vector<int>>(16, {16}), [](int row) { return row; }, 2, 0);
#if __CUDA_ARCH__ >= 900
    check_adapted_skinny(SKINNY_ADAPTED(add_1), 1, {50}, 2064, ADD, {skinny::ROW_MAJOR, skinny::DEEP, 4, 2}, {{16}}, only, 4, 1 << 14);
    check_adapted_skinny(SKINNY_ADAPTED(f32_1), 1, {40, 24, 9}, 656, F32, {skinny::ROW_MAJOR, skinny::DEEP, 3, 2}, {{16, 16, 16}}, only, 2, 1 << 14);
    for (double told : {0.0, 1.0, 1e5}) {
        Launched tall = {skinny::FRAGMENT_MAJOR, skinny::TALL, 2, 1}, pair = {skinny::FRAGMENT_MAJOR, skinny::GATE_UP, 2, 1};
        check_adapted_skinny(SKINNY_ADAPTED(f32_fragments_8), 7, {40, 24, 9}, 704, F32, tall, {{16, 0, 32}, {32, 16, 16}}, mixed, 2, 1 << 15, told);
        check_adapted_skinny(SKINNY_ADAPTED(glu_fragments_8), 8, {40, 40}, 320, GLU_FRAGMENT_MAJOR, pair, {{16, 16}, {16, 32}}, mixed, 4, 1 << 16, told);
        check_adapted_skinny(SKINNY_ADAPTED(f32_fragments_16), 13, {40, 24}, 1344, F32, tall, {{16, 16}}, [](int row) { return row == 4 ? -1 : 0; }, 2, 1 << 15, told);
        check_adapted_skinny(SKINNY_ADAPTED(glu_fragments_16), 16, {20, 20}, 192, GLU_FRAGMENT_MAJOR, pair, {{16, 16}}, only, 4, 1 << 16, told);
    }
    check_adapted_skinny(SKINNY_ADAPTED(add_fragments_8), 6, {50}, 2064, ADD, {skinny::FRAGMENT_MAJOR, skinny::TALL, 2, 2}, {{16}, {48}}, mixed, 4, 1 << 14);
    check_adapted_skinny(SKINNY_ADAPTED(add_fragments_16), 16, {40}, 1040, ADD, {skinny::FRAGMENT_MAJOR, skinny::TALL, 1, 2}, {{16}, {16}}, mixed, 2, 0);
#endif
#if HAS_WGMMA
    check_adapted_rows(32, 17, {200, 24}, 272, 1, F32, {{16, 48}, {32, 16}}, mixed);
    check_adapted_rows(32, 24, {48, 48}, 400, 1, GLU_FRAGMENT_MAJOR, {{16, 48}, {32, 0}}, mixed);
    check_adapted_rows(64, 40, {72}, 1040, 3, ADD, {{16}}, [](int) { return 0; });
    check_adapted_rows(64, 33, {90, 90}, 64, 1, GLU_FRAGMENT_MAJOR, {{16, 16}}, [](int row) { return row == 5 ? 0 : -1; });
    check_adapted_rows(64, 64, {40}, 784, 2, F32, {{64}, {16}, {32}}, [](int row) { return row / 8 % 3; });
#endif
    puts("ok");
}
