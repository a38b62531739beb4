// The kernels between products and attention on the CPU, against f64 and against sorting: kernels/norm/rms_norm.cu,
// kernels/norm/{post_norm,projections}.cu, kernels/norm/drafter.cu, kernels/activation/{glu,per_layer}.cu, kernels/embed/per_layer.cu,
// kernels/sample/{argmax,likelihood,mask}.cu and the unfused kernels as they ship, with their instructions emulated as the PTX ISA describes them. Prints "ok"
// or the first error.
#include "cuda.hpp"

#include "activation/gate.cuh"
#include "common/ptx.cuh"
#include "common/reduce.cuh"
#include "format/fragment_major.cuh"
#include "format/int8.cuh"
#include "norm/piece.cuh"
#include "sample/choice.cuh"

// Static shared memory may outlive its block, as no two blocks run at once.
#undef __shared__
#define __shared__ static
namespace norm {
#include "norm/rms_norm.cu"
}
namespace post {
#include "norm/post_norm.cu"
}
namespace projections {
using namespace post;
#include "norm/projections.cu"
}
namespace drafter {
#include "norm/drafter.cu"
}
namespace activation {
#include "activation/glu.cu"
}
namespace inputs {
#include "embed/per_layer.cu"
}
namespace own_gate {
#include "activation/per_layer.cu"
}
namespace unfused_norm {
#include "norm/rms_norm_f32.cu"
}
namespace unfused_rope {
#include "rope/rotate.cu"
}
namespace unfused {
#include "activation/pointwise.cu"
}
namespace best {
#include "sample/argmax.cu"
}
namespace given {
#include "sample/likelihood.cu"
}
namespace excluded {
#include "sample/mask.cu"
}

static void expect(bool held, const char* what, int row, int i, double got, double want) {
    if (!held) printf("%s: (%d, %d) is %g, not %g\n", what, row, i, got, want), exit(1);
}

static double norm_factor(const float* x, int width) {
    double squares = 0;
    for (int i = 0; i < width; i++) squares += std::pow(x[i], 2.0);
    return 1 / std::sqrt(squares / width + 1e-6);
}

// Hidden rows, with their copies for the host by position, and the inputs of a drafter that are made of them.
static void check_drafter(int rows, int width) {
    const int STEPS = 2;
    auto random = [](int count) {
        std::vector<float> v(count);
        for (float& x : v) x = uniform();
        return v;
    };
    std::vector<float> x = random(rows * width), weight = random(width), before = random(rows * width);
    std::vector<float> hidden(2 * rows * width, NAN), copies(STEPS * rows * width, NAN);
    std::vector<int> positions, sources;
    // The first rows are those before sequences. Odd rows of the pass take the one that the row before them made.
    for (int r = 0; r < rows; r++) positions.push_back(7 + 3 * r), sources.push_back(r % 2 ? rows + r - 1 : r);
    std::copy(before.begin(), before.end(), hidden.begin());
    drafter::HiddenArguments h = {x.data(), weight.data(), &hidden[rows * width], copies.data(), positions.data(), width, STEPS, 1e-6f};
    launch(rows, 1, 1, drafter::THREADS, [&] { drafter::drafter_hidden(h); });
    for (int r = 0; r < rows; r++) {
        double factor = norm_factor(&x[r * width], width);
        for (int i = 0; i < width; i++) {
            double want = x[r * width + i] * factor * weight[i], got = hidden[(rows + r) * width + i];
            expect(std::fabs(got - want) <= 1e-6 * std::fabs(want), "a hidden row", r, i, got, want);
            float copy = copies[(positions[r] % STEPS * rows + r) * width + i];
            expect(copy == hidden[(rows + r) * width + i], "a copy of a hidden row", r, i, copy, got);
        }
    }
    std::vector<float> of_embedding = random(width), of_hidden = random(width), embeddings = random(rows * width);
    std::vector<u16> y(2 * rows * width, 0x7e00);
    drafter::InputArguments a = {embeddings.data(), hidden.data(), sources.data(), of_embedding.data(), of_hidden.data(), y.data(), width, 1e-6f};
    launch(rows, 2, 1, drafter::THREADS, [&] { drafter::drafter_inputs(a); });
    for (int r = 0; r < rows; r++) {
        for (int half = 0; half < 2; half++) {
            const float* from = half ? &hidden[sources[r] * width] : &embeddings[r * width];
            double factor = norm_factor(from, width);
            for (int i = 0; i < width; i++) {
                double want = from[i] * factor * (half ? of_hidden : of_embedding)[i], got = f16_to_float(y[(2 * r + half) * width + i]);
                expect(std::fabs(got - want) <= std::fabs(want) * 0x1.1p-11 + 0x1p-25, "an input of a drafter", r, half * width + i, got, want);
            }
        }
    }
    // Without copies no position is read.
    drafter::HiddenArguments alone = {x.data(), weight.data(), hidden.data(), nullptr, nullptr, width, 0, 1e-6f};
    launch(rows, 1, 1, drafter::THREADS, [&] { drafter::drafter_hidden(alone); });
    for (int i = 0; i < rows * width; i++) expect(hidden[i] == hidden[rows * width + i], "a hidden row", i / width, i % width, hidden[i], hidden[rows * width + i]);
}

static void check_norm(int rows, int width, bool fragment_major) {
    std::vector<float4> x(rows * width / 4), weight(width / 4);
    for (float4& v : x) v = {uniform(), uniform(), uniform(), uniform()};
    for (float4& v : weight) v = {uniform(), uniform(), uniform(), uniform()};
    int groups = ceil_div(rows, GROUP_ROWS), whole = padded_k(width);
    std::vector<uint4> y(groups * GROUP_ROWS * whole / 8, uint4{~0u, ~0u, ~0u, ~0u});
    std::vector<float> factors(rows, NAN);
    norm::Arguments a = {&x[0].x, &weight[0].x, (u16*)y.data(), fragment_major ? factors.data() : nullptr, width, 1e-6f};
    launch(rows, 1, 1, norm::THREADS, [&] { fragment_major ? norm::rms_norm_fragments(a) : norm::rms_norm(a); });
    for (int r = 0; r < rows; r++) {
        double squares = 0;
        for (int i = 0; i < width; i++) squares += std::pow(a.x[r * width + i], 2.0);
        double factor = 1 / std::sqrt(squares / width + 1e-6);
        if (fragment_major) expect(std::fabs(factors[r] - factor) <= 1e-5 * factor, "the factor of a norm", r, 0, factors[r], factor);
        for (int i = 0; i < width; i++) {
            double want = a.x[r * width + i] * factor * a.weight[i];
            double got = f16_to_float(a.y[fragment_major ? fragment_index(groups, r, i) : (size_t)r * width + i]);
            expect(std::fabs(got - want) <= std::fabs(want) * 0x1.1p-11 + 0x1p-25, "norm", r, i, got, want);
        }
        for (int i = width; fragment_major && i < whole; i++) {
            u16 got = a.y[fragment_index(groups, r, i)];
            expect(got == 0, "the padding of a norm", r, i, f16_to_float(got), 0);
        }
    }
}

// Rows as they are: one with the largest number that f16 holds, and one for each kind of number that it does not hold.
static void check_stream_rows(int width, bool fragment_major) {
    const float ODD[] = {0, 65519, -65520, INFINITY, NAN};
    const int ROWS = 5;
    int groups = ceil_div(ROWS, GROUP_ROWS), whole = padded_k(width);
    std::vector<float4> x(ROWS * width / 4);
    for (float4& v : x) v = {8 * uniform(), 8 * uniform(), 8 * uniform(), 8 * uniform()};
    for (int r = 1; r < ROWS; r++) (&x[0].x)[r * width + (7 * r) % width] = ODD[r];
    std::vector<uint4> y(groups * GROUP_ROWS * whole / 8, uint4{~0u, ~0u, ~0u, ~0u});
    std::vector<u32> overflow(ROWS);
    norm::StreamArguments a = {&x[0].x, (u16*)y.data(), overflow.data(), width, 6};
    launch(ROWS, 1, 1, norm::THREADS, [&] { fragment_major ? norm::stream_rows_fragments(a) : norm::stream_rows(a); });
    for (int r = 0; r < ROWS; r++) {
        expect(overflow[r] == (r < 2 ? 0 : 7), "a row with overflow", r, width, overflow[r], r < 2 ? 0 : 7);
        for (int i = 0; i < (fragment_major ? whole : width); i++) {
            u16 want = i < width ? to_f16(a.x[r * width + i]) : 0, got = a.y[fragment_major ? fragment_index(groups, r, i) : (size_t)r * width + i];
            expect(got == want, "a row as it is", r, i, f16_to_float(got), f16_to_float(want));
        }
    }
    // What an earlier layer has noted stays.
    a.layer = 9;
    launch(ROWS, 1, 1, norm::THREADS, [&] { fragment_major ? norm::stream_rows_fragments(a) : norm::stream_rows(a); });
    expect(overflow[4] == 7, "a row with overflow in an earlier layer", 4, width, overflow[4], 7);
}

// The norm of an addend, its addition, and the norm of the sum, if one follows. `factored`: rows of the addend were divided, the sum is
// multiplied by a number, and the factors of the norm that follows are kept. `as_is`: what follows takes the sum without a norm. Also addends
// whose squares have no finite sum.
static void check_post_norm(int rows, int width, bool fragment_major, bool followed, bool factored = false, bool as_is = false) {
    std::vector<float4> y(rows * width / 4), x(y), weight(width / 4), next(weight);
    for (auto* all : {&y, &x, &weight, &next}) {
        for (float4& v : *all) v = {uniform(), uniform(), uniform(), uniform()};
    }
    std::vector<float4> before = x;
    int groups = ceil_div(rows, GROUP_ROWS), whole = padded_k(width);
    std::vector<uint4> normed(groups * GROUP_ROWS * whole / 8, uint4{~0u, ~0u, ~0u, ~0u});
    // Numbers so large and so small that the epsilon counts, and does not.
    std::vector<float> divisors(rows), factors(rows, NAN);
    for (int r = 0; r < rows; r++) divisors[r] = factored ? std::pow(2.0f, (float)(8 - 5 * r)) : 1;
    float scale = factored ? 0.75f : 1;
    std::vector<u32> overflow(rows);
    // A row that f16 cannot hold, which is a fault where what follows takes it.
    if (as_is) (&x[0].x)[(rows - 1) * width + 3] = 1e6f, before = x;
    post::Arguments a = {&y[0].x, factored ? divisors.data() : nullptr, &weight[0].x, factored ? &scale : nullptr, &x[0].x, overflow.data(), 4,
                         {followed && !as_is ? &next[0].x : nullptr, followed ? (u16*)normed.data() : nullptr, factored ? factors.data() : nullptr, width, 1e-6f,
                          fragment_major, 6, overflow.data()}};
    launch(rows, 1, 1, post::THREADS, [&] { post::post_norm(a); });
    for (int r = 0; r < rows; r++) {
        double squares = 0, after = 0, divisor = divisors[r];
        for (int i = 0; i < width; i++) squares += std::pow(a.y[r * width + i] * divisor, 2.0);
        double factor = 1 / std::sqrt(squares / width + 1e-6);
        std::vector<double> sum(width);
        for (int i = 0; i < width; i++) {
            sum[i] = ((&before[0].x)[r * width + i] + a.y[r * width + i] * divisor * factor * a.weight[i]) * scale;
            after += sum[i] * sum[i];
            expect(std::fabs(a.x[r * width + i] - sum[i]) <= 1e-5 + 1e-7 * std::fabs(sum[i]), "the residual stream after a norm", r, i, a.x[r * width + i], sum[i]);
        }
        factor = as_is ? 1 : 1 / std::sqrt(after / width + 1e-6);
        expect(overflow[r] == (as_is && r == rows - 1 ? 7 : 0), "a row of the residual stream with overflow", r, 0, overflow[r], 7);
        if (factored && followed) expect(std::fabs(factors[r] - factor) <= 1e-5 * factor, "the factor of the norm after a norm", r, 0, factors[r], factor);
        for (int i = 0; followed && i < width; i++) {
            double want = sum[i] * factor * (as_is ? 1 : a.next.weight[i]), got = f16_to_float(a.next.normed[fragment_major ? fragment_index(groups, r, i) : (size_t)r * width + i]);
            if (std::fabs(want) >= 65520) continue;
            expect(std::fabs(got - want) <= std::fabs(want) * 0x1.2p-11 + 0x1p-20, "the norm after a norm", r, i, got, want);
        }
        for (int i = width; followed && fragment_major && i < whole; i++) {
            u16 got = a.next.normed[fragment_index(groups, r, i)];
            expect(got == 0, "the padding of a norm", r, i, f16_to_float(got), 0);
        }
    }
    // The part that made the addend is noted, not the next one, which takes what came of it.
    for (float odd : {1e18f, 1e20f, -INFINITY, NAN}) {
        for (u32& note : overflow) note = 0;
        (&y[0].x)[(rows - 1) * width + 5] = odd;
        x = before;
        launch(rows, 1, 1, post::THREADS, [&] { post::post_norm(a); });
        for (int r = 0; r < rows; r++) {
            u32 want = r < rows - 1 ? 0 : odd != 1e18f ? 5 : as_is ? 7 : 0;
            expect(overflow[r] == want, "an addend with overflow", r, 5, overflow[r], want);
            for (int i = 0; i < width; i++) expect(std::isnan(a.x[r * width + i]) == (want == 5), "the residual stream after overflow", r, i, a.x[r * width + i], want);
        }
    }
}

// Norms of queries and of keys, beside values. A row has the same bits whatever rows run beside it.
static void check_projection_norms(int rows, int queries, int keys) {
    int stride = queries + 2 * keys;
    std::vector<float4> x(rows * stride / 4), weights((queries + keys) / 4);
    for (float4& v : x) v = {uniform(), uniform(), uniform(), uniform()};
    for (float4& v : weights) v = {uniform(), uniform(), uniform(), uniform()};
    std::vector<float4> before = x, last(x.end() - stride / 4, x.end());
    const float* of_keys = &weights[queries / 4].x;
    projections::Arguments a = {&x[0].x, {&weights[0].x, of_keys}, {queries, keys}, stride, 1e-6f};
    launch(rows, 2, 1, projections::THREADS, [&] { projections::norm_projections(a); });
    for (int r = 0; r < rows; r++) {
        const float *from = &before[0].x + r * stride, *got = a.x + r * stride;
        double factors[] = {norm_factor(from, queries), norm_factor(from + queries, keys)};
        for (int i = 0; i < stride; i++) {
            double want = from[i];
            if (i < queries + keys) want *= factors[i >= queries] * a.weights[0][i];
            expect(std::fabs(got[i] - want) <= 1e-6 * std::fabs(want), "a norm of projections", r, i, got[i], want);
        }
    }
    projections::Arguments alone = a;
    alone.x = &last[0].x;
    launch(1, 2, 1, projections::THREADS, [&] { projections::norm_projections(alone); });
    for (int i = 0; i < stride; i++) {
        double want = a.x[(rows - 1) * stride + i];
        expect(alone.x[i] == want, "a norm of the projections of one row", rows - 1, i, alone.x[i], want);
    }
}

// Inputs of blocks from projections and a table.
static void check_inputs(int rows, int blocks, int width, int kind) {
    const int VOCABULARY = 30;
    int all = blocks * width;
    std::vector<float> x, norm, factors, values, scales;
    std::vector<int> tokens;
    std::vector<u16> halves;
    std::vector<signed char> codes;
    for (int i = 0; i < rows * all; i++) x.push_back(uniform());
    for (int i = 0; i < width; i++) norm.push_back(uniform());
    for (int i = 0; i < rows; i++) tokens.push_back(noise() % VOCABULARY), factors.push_back(std::pow(10.0f, (float)(2 - i)));
    for (int i = 0; i < VOCABULARY; i++) scales.push_back(uniform());
    for (int i = 0; i < VOCABULARY * all; i++) {
        codes.push_back((signed char)(noise() % 255 - 127));
        halves.push_back(kind == inputs::F16 ? to_f16(uniform()) : (u16)(__float_as_uint(uniform()) >> 16));
        values.push_back(kind == inputs::INT8 ? codes[i] * scales[i / all] : kind == inputs::F32 ? uniform() : kind == inputs::F16 ? f16_to_float(halves[i]) : bf16_to_float(halves[i]));
    }
    const void* table = kind == inputs::INT8 ? (const void*)codes.data() : kind == inputs::F32 ? (const void*)values.data() : (const void*)halves.data();
    std::vector<float> got = x;
    inputs::Arguments a = {tokens.data(), factors.data(), norm.data(), got.data(), {table, scales.data(), 1, 4, kind, all}, 0.25f, 1e-6f, width};
    launch(blocks, rows, 1, inputs::THREADS, [&] { inputs::per_layer_inputs(a); });
    for (int r = 0; r < rows; r++) {
        for (int i = 0; i < all; i++) {
            double squares = 0, scale = 0.25 / factors[r];
            for (int j = 0; j < width; j++) squares += std::pow(x[r * all + i / width * width + j] * scale, 2.0);
            double normed = x[r * all + i] * scale / std::sqrt(squares / width + 1e-6) * norm[i % width];
            double want = (normed + 4.0 * values[(size_t)tokens[r] * all + i]) / std::sqrt(2.0);
            expect(std::fabs(got[r * all + i] - want) <= 4e-6 * std::max(1.0, std::fabs(want)), "an input of a block", r, i, got[r * all + i], want);
        }
    }
}

// The gate of an input: rows beyond f16, ordinary ones, tiny ones and zeros.
static void check_own_gate(int width, int kind) {
    const int ROWS = 5;
    int stride = 3 * width;
    std::vector<float> gate, input, factors, divisors(ROWS, NAN);
    for (int r = 0; r < ROWS; r++) {
        for (int i = 0; i < width; i++) gate.push_back(r == 4 ? 0 : uniform());
        for (int i = 0; i < stride; i++) input.push_back(4 * uniform());
        factors.push_back(r == 0 ? 1e-7f : r == 1 ? 1 : r == 2 ? 1e3f : 0.03f);
    }
    std::vector<u16> y(ROWS * width, 0x7e00);
    own_gate::Arguments a = {gate.data(), factors.data(), input.data() + width, y.data(), divisors.data(), width, stride, kind};
    launch(ROWS, 1, 1, own_gate::THREADS, [&] { own_gate::per_layer_gate(a); });
    for (int r = 0; r < ROWS; r++) {
        double largest = 0;
        for (int i = 0; i < width; i++) {
            double g = (double)gate[r * width + i] / factors[r], u = std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g);
            double act = kind == SILU ? g / (1 + std::exp(-g)) : 0.5 * g * (1 + std::tanh(u));
            double want = act * input[r * stride + width + i] / divisors[r], got = f16_to_float(y[r * width + i]);
            largest = std::max(largest, std::fabs(want));
            // Where tanh is near -1, 1 + tanh loses digits.
            expect(std::fabs(got - want) <= std::fabs(want) * 0x1.1p-11 + 0x1p-19, "a gated input", r, i, got, want);
        }
        expect(r == 4 ? divisors[r] == 1 : largest > 0.999 && largest < 2.001, "the largest of a gated input", r, kind, largest, 1);
    }
}

static void check_gate_heads(int rows, int width, bool fragment_major) {
    int groups = ceil_div(rows, GROUP_ROWS), whole = fragment_major ? groups * GROUP_ROWS * padded_k(width) : rows * width;
    std::vector<u16> y(whole);
    std::vector<float> gate(rows * width);
    for (u16& v : y) v = to_f16(8 * uniform());
    for (float& v : gate) v = 8 * uniform();
    gate[0] = 200, gate[width - 1] = -200;
    std::vector<u16> before = y;
    activation::HeadGateArguments a = {y.data(), gate.data(), width, fragment_major};
    launch(ceil_div(width, activation::THREADS), rows, 1, activation::THREADS, [&] { activation::gate_heads(a); });
    for (int r = 0; r < rows; r++) {
        for (int i = 0; i < width; i++) {
            size_t at = fragment_major ? fragment_index(groups, r, i) : (size_t)r * width + i;
            double want = f16_to_float(before[at]) / (1 + std::exp(-(double)gate[r * width + i])), got = f16_to_float(y[at]);
            expect(std::fabs(got - want) <= std::fabs(want) * 0x1.1p-11 + 0x1p-25, "a gate of heads", r, i, got, want);
            before[at] = y[at];
        }
    }
    expect(before == y, "the padding beside gated heads", rows, width, 0, 0);
}

static void check_glu(int rows, int width, int kind) {
    std::vector<uint4> x(rows * width / 4), y(rows * width / 8);
    u16* halves = (u16*)x.data();
    for (int i = 0; i < rows * width * 2; i++) halves[i] = to_f16(8 * uniform());
    std::vector<u32> overflow(rows);
    activation::GluArguments a = {halves, (u16*)y.data(), width, 0.25f, kind, 6, overflow.data()};
    auto run = [&] { launch(ceil_div(width / 8, activation::THREADS), rows, 1, activation::THREADS, [&] { activation::glu(a); }); };
    run();
    for (int r = 0; r < rows; r++) expect(overflow[r] == 0, "a GLU without overflow", rows, width, overflow[r], 0);
    for (int r = 0; r < rows; r++) {
        for (int i = 0; i < width; i++) {
            double gate = f16_to_float(halves[r * 2 * width + i]), up = f16_to_float(halves[r * 2 * width + width + i]);
            double u = std::sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate);
            double act = kind == SILU ? gate / (1 + std::exp(-gate)) : 0.5 * gate * (1 + std::tanh(u));
            double want = act * up * 0.25, got = f16_to_float(a.y[r * width + i]);
            // Where tanh is near -1, 1 + tanh loses digits.
            expect(std::fabs(got - want) <= std::fabs(want) * 0x1.1p-11 + 0x1p-19, "a gated activation", r, i, got, want);
        }
    }
    // Infinities and NaN in either half of a word, in gate and in up, and as a contrast the largest f16.
    for (u16 odd : {0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e01}) {
        for (int at : {0, 7, width + 5, 2 * rows * width - 1}) {
            u16 kept = halves[at];
            halves[at] = odd;
            run();
            u32 want = (odd & 0x7fff) > 0x7bff ? 7 : 0;
            for (int r = 0; r < rows; r++) {
                u32 of_row = r == at / (2 * width) ? want : 0;
                expect(overflow[r] == of_row, "a GLU with overflow", odd, at, overflow[r], of_row);
                overflow[r] = 0;
            }
            halves[at] = kept;
        }
    }
}

static void check_relu_squared(int rows, int width) {
    std::vector<uint4> x(rows * width / 8), y(x.size());
    u16* halves = (u16*)x.data();
    for (int i = 0; i < rows * width; i++) halves[i] = to_f16(8 * uniform());
    std::vector<u32> overflow(rows);
    activation::SquareArguments a = {halves, (u16*)y.data(), width, 0.25f, 6, overflow.data()};
    auto run = [&] { launch(ceil_div(width / 8, activation::THREADS), rows, 1, activation::THREADS, [&] { activation::relu_squared_f16(a); }); };
    run();
    for (int i = 0; i < rows * width; i++) {
        double want = 0.25 * std::pow(std::max((double)f16_to_float(halves[i]), 0.0), 2), got = f16_to_float(a.y[i]);
        expect(std::fabs(got - want) <= want * 0x1.1p-11 + 0x1p-25, "a squared ReLU", i / width, i % width, got, want);
    }
    // The largest f16, infinities of both signs, and NaN.
    for (u16 odd : {0x7bff, 0x7c00, 0xfc00, 0x7e01}) {
        halves[rows * width - 1] = odd;
        run();
        for (int r = 0; r < rows; r++) {
            u32 want = r == rows - 1 && odd != 0x7bff ? 7 : 0;
            expect(overflow[r] == want, "a squared ReLU with overflow", odd, r, overflow[r], want);
            overflow[r] = 0;
        }
    }
    expect(std::isnan(f16_to_float(a.y[rows * width - 1])), "a squared ReLU of NaN", 0, 0, f16_to_float(a.y[rows * width - 1]), NAN);
}

static void check_unfused_norm(int rows, int width, bool in_place) {
    std::vector<float> x, weight, y((size_t)rows * width, NAN);
    for (int i = 0; i < rows * width; i++) x.push_back(uniform());
    for (int i = 0; i < width; i++) weight.push_back(uniform());
    std::vector<float> before = x;
    float* out = in_place ? x.data() : y.data();
    unfused_norm::Arguments a = {x.data(), weight.data(), out, width, 1e-6f};
    launch(rows, 1, 1, unfused_norm::THREADS, [&] { unfused_norm::rms_norm_f32(a); });
    for (int r = 0; r < rows; r++) {
        double squares = 0;
        for (int i = 0; i < width; i++) squares += std::pow(before[r * width + i], 2.0);
        for (int i = 0; i < width; i++) {
            double want = before[r * width + i] / std::sqrt(squares / width + 1e-6) * weight[i], got = out[r * width + i];
            expect(std::fabs(got - want) <= std::fabs(want) * 2e-6, "an unfused norm", r, i, got, want);
        }
    }
}

static void check_rotate(int rows, int heads, int dim, int half) {
    std::vector<float> x, cos, sin;
    for (int i = 0; i < rows * heads * dim; i++) x.push_back(uniform());
    for (int i = 0; i < rows * half; i++) cos.push_back(uniform()), sin.push_back(uniform());
    std::vector<float> y = x;
    unfused_rope::Arguments a = {y.data(), cos.data(), sin.data(), heads, dim, half};
    launch(rows, ceil_div(heads * half, unfused_rope::THREADS), 1, unfused_rope::THREADS, [&] { unfused_rope::rotate(a); });
    for (int r = 0; r < rows; r++) {
        for (int i = 0; i < heads * dim; i++) {
            const float* head = &x[(r * heads + i / dim) * dim];
            int e = i % dim, pair = e % half;
            double c = cos[r * half + pair], s = sin[r * half + pair], low = head[pair], high = head[pair + half];
            double want = e < half ? low * c - high * s : e < 2 * half ? high * c + low * s : head[e], got = y[r * heads * dim + i];
            expect(std::fabs(got - want) <= 3e-7, "a rotation", r, i, got, want);
        }
    }
}

static void check_pointwise(int rows, int width, int blocks) {
    std::vector<float> x, row, all;
    for (int i = 0; i < rows * width; i++) x.push_back(8 * uniform()), all.push_back(uniform());
    for (int i = 0; i < width; i++) row.push_back(uniform());
    auto gelu = [](double g) { return 0.5 * g * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g))); };
    auto check = [&](const char* what, const std::vector<float>* y, float factor, int kind, auto kernel, auto want_of) {
        std::vector<float> z = x;
        unfused::Arguments a = {z.data(), y ? y->data() : nullptr, z.size(), y ? y->size() : 1, factor, {kind, 1.702f, 0.5f}};
        launch(blocks, 1, 1, unfused::THREADS, [&] { kernel(a); });
        for (int i = 0; i < rows * width; i++) {
            double want = want_of((double)x[i], y ? (double)(*y)[i % y->size()] : 0);
            expect(std::fabs(z[i] - want) <= 2e-6 * std::max(1.0, std::fabs(want)), what, i / width, i % width, z[i], want);
        }
    };
    auto glu = [](auto a) { unfused::pointwise_glu(a); };
    auto add = [](auto a) { unfused::pointwise_add(a); };
    check("an unfused SwiGLU", &all, 0, SILU, glu, [](double x, double y) { return x / (1 + std::exp(-x)) * y; });
    check("an unfused GeGLU", &all, 0, GELU_TANH, glu, [&](double x, double y) { return gelu(x) * y; });
    check("an unfused clamped SwiGLU", &all, 0, CLAMPED_SWIGLU, glu, [](double x, double y) {
        double g = std::min(x, 0.5), u = std::min(std::max(y, -0.5), 0.5);
        return (u + 1) * g / (1 + std::exp(-1.702f * g));
    });
    check("an unfused squared ReLU", nullptr, 0, 0, [](auto a) { unfused::pointwise_relu_squared(a); }, [](double x, double) { return x > 0 ? x * x : 0; });
    check("a sum", &all, 0, 0, add, [](double x, double y) { return x + y; });
    check("a sum with a row", &row, 0, 0, add, [](double x, double y) { return x + y; });
    check("a factor", nullptr, -2.5f, 0, [](auto a) { unfused::pointwise_scale(a); }, [](double x, double) { return x * -2.5; });
    check("a soft cap", nullptr, 3, 0, [](auto a) { unfused::pointwise_cap(a); }, [](double x, double) { return 3 * std::tanh(x / 3); });
    x.assign(x.size(), NAN);
    check("one value", nullptr, 7, 0, [](auto a) { unfused::pointwise_fill(a); }, [](double, double) { return 7; });
}

// Logits of one of several kinds: random, many equal, all equal, some minus infinity, unusable (NaN and plus infinity), all minus infinity,
// descending.
static std::vector<float> logits_of(int kind, int rows, int vocabulary) {
    std::vector<float> x;
    for (int i = 0; i < rows * vocabulary; i++) {
        switch (kind) {
        case 0: x.push_back(20 * uniform()); break;
        case 1: x.push_back((float)(noise() % 7)); break;
        case 2: x.push_back(-1.5f); break;
        case 3: x.push_back(noise() % 3 ? uniform() : -__int_as_float(0x7f800000)); break;
        case 5: x.push_back(i % vocabulary == vocabulary / 2 ? NAN : i % vocabulary > vocabulary / 2 ? __int_as_float(0x7f800000) : uniform()); break;
        case 6: x.push_back(-__int_as_float(0x7f800000)); break;
        default: x.push_back(-(float)i); break;
        }
    }
    return x;
}
// Tokens by logit, the largest first, and by number where logits are equal.
static std::vector<int> ranking(const float* x, int vocabulary) {
    std::vector<int> order(vocabulary);
    for (int i = 0; i < vocabulary; i++) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](int i, int j) { return x[i] > x[j]; });
    return order;
}

static void check_argmax(int kind, int rows, int vocabulary, int blocks) {
    const int STEPS = 3;
    std::vector<float> x = logits_of(kind, rows, vocabulary), values(rows * blocks);
    std::vector<int> candidates(rows * blocks), tokens(rows), positions(rows, 4), history(STEPS * rows, -1);
    std::vector<u32> arrived(rows);
    best::Arguments a = {x.data(), values.data(), candidates.data(), arrived.data(), tokens.data(), positions.data(), history.data(), vocabulary, STEPS};
    launch(blocks, rows, 1, best::THREADS, [&] { best::argmax(a); });
    for (int r = 0; r < rows; r++) {
        int want = ranking(&x[(size_t)r * vocabulary], vocabulary)[0], choice = want;
        if (kind == 5) want = vocabulary / 2, choice = -2 - want;
        if (kind == 6) choice = -1;
        expect(tokens[r] == want, "the argmax", kind, r, tokens[r], want);
        expect(history[5 % STEPS * rows + r] == choice && positions[r] == 5 && arrived[r] == 0, "the next step", kind, r, positions[r], 5);
    }
}

// Log-probabilities of tokens in all kinds of logits, against f64.
static void check_likelihood(int kind, int rows, int vocabulary) {
    std::vector<float> x = logits_of(kind, rows, vocabulary);
    std::vector<int> tokens(rows);
    std::vector<given::Likelihood> found(rows);
    for (int r = 0; r < rows; r++) tokens[r] = (r * 331 + 7) % vocabulary;
    given::Arguments a = {x.data(), tokens.data(), found.data(), vocabulary};
    launch(rows, 1, 1, given::THREADS, [&] { given::likelihood(a); });
    for (int r = 0; r < rows; r++) {
        const float* row = &x[(size_t)r * vocabulary];
        int largest = ranking(row, vocabulary)[0], choice = largest;
        if (kind == 5) choice = -2 - vocabulary / 2;
        if (kind == 6) choice = -1;
        expect(found[r].choice == choice, "the argmax beside a likelihood", kind, r, found[r].choice, choice);
        if (choice < 0) continue;
        double sum = 0;
        for (int i = 0; i < vocabulary; i++) sum += std::exp((double)row[i] - row[largest]);
        double want = (double)row[tokens[r]] - row[largest] - std::log(sum), got = found[r].log_probability;
        expect(got == want || std::fabs(got - want) <= 1e-6 + std::fabs(want) * 6e-8, "a log-probability", kind, r, got, want);
    }
}

// Masks of some rows: excluded tokens become minus infinity, and nothing else changes.
static void check_mask(int rows, int vocabulary) {
    int words = ceil_div(vocabulary, 32), count = 0;
    std::vector<float> x = logits_of(0, rows, vocabulary), want = x;
    std::vector<u32> masks, masked;
    for (int r = rows - 1; r >= 0; r -= 2, count++) {
        masked.push_back(r);
        for (int w = 0; w < words; w++) {
            u32 word = (u32)(r * 7919 + w * 104729) * 2654435761u;
            masks.push_back(word);
            for (int i = 32 * w; i < std::min(32 * w + 32, vocabulary); i++)
                if (!(word >> i % 32 & 1)) want[(size_t)r * vocabulary + i] = -INFINITY;
        }
    }
    excluded::Arguments a = {x.data(), masks.data(), masked.data(), vocabulary, words};
    launch(ceil_div(words, excluded::THREADS), count, 1, excluded::THREADS, [&] { excluded::mask_logits(a); });
    for (size_t i = 0; i < x.size(); i++) expect(x[i] == want[i], "a masked logit", i / vocabulary, i % vocabulary, x[i], want[i]);
}

int main() {
    check_drafter(3, 48);
    check_drafter(5, 2560);
    check_norm(3, 100, false);
    check_norm(2, 2560, false);
    check_norm(1, 9236, false);
    check_norm(9, 112, true);
    check_norm(2, 9232, true);
    check_gate_heads(3, 48, false);
    check_gate_heads(9, 272, true);
    check_glu(2, 24, SILU);
    check_glu(2, 24, GELU_TANH);
    check_post_norm(2, 48, false, true);
    check_post_norm(9, 576, true, true);
    check_post_norm(1, 64, false, false);
    check_post_norm(4, 576, false, true, true);
    check_post_norm(9, 48, true, true, true);
    check_post_norm(2, 64, false, false, true);
    check_post_norm(9, 576, true, true, false, true);
    check_post_norm(2, 64, false, true, false, true);
    check_stream_rows(100, false);
    check_stream_rows(9232, true);
    check_projection_norms(3, 48, 16);
    check_projection_norms(2, 6144, 1024);
    check_projection_norms(1, 4096, 4096);
    for (int kind : {inputs::F32, inputs::F16, inputs::BF16, inputs::INT8}) check_inputs(3, 4, 48, kind);
    check_inputs(2, 2, 256, inputs::BF16);
    check_own_gate(256, GELU_TANH);
    check_own_gate(48, SILU);
    check_glu(1, 4104, GELU_TANH);
    check_relu_squared(3, 24);
    check_relu_squared(1, 4104);
    check_unfused_norm(3, 7, false);
    check_unfused_norm(2, 2561, true);
    check_rotate(3, 5, 16, 8);
    check_rotate(2, 9, 80, 32);
    check_pointwise(3, 100, 2);
    check_pointwise(5, 200, 2);
    for (int kind = 0; kind < 7; kind++) check_argmax(kind, 2, 1000, 3);
    check_argmax(1, 1, 50, 4);
    for (int kind = 0; kind < 7; kind++) check_likelihood(kind, 2, 2500);
    check_likelihood(0, 3, 40);
    check_mask(3, 9000);
    check_mask(2, 31);
    puts("ok");
}
