// What stands between products and attention, on the processor, against f64 and against sorting: kernels/norm/rms_norm.cu,
// kernels/activation/swiglu.cu, kernels/sample/argmax.cu, as they ship, with instructions replaced by what the PTX ISA says of
// them. Prints "ok" or what is wrong.
#include "cuda.hpp"

#include "activation/silu.cuh"
#include "common/ptx.cuh"
#include "common/reduce.cuh"
#include "format/ordered.cuh"
#include "norm/fours.cuh"
#include "sample/said.cuh"

// Shared memory outlives its block, as no two run at once.
#undef __shared__
#define __shared__ static
namespace norm {
#include "norm/rms_norm.cu"
}
namespace activation {
#include "activation/swiglu.cu"
}
namespace best {
#include "sample/argmax.cu"
}

static void expect(bool held, const char* what, int row, int i, double got, double want) {
    if (!held) printf("%s: (%d, %d) is %g, not %g\n", what, row, i, got, want), exit(1);
}

static void check_norm(int rows, int width, bool ordered) {
    std::vector<float4> x(rows * width / 4), weight(width / 4);
    for (float4& v : x) v = {uniform(), uniform(), uniform(), uniform()};
    for (float4& v : weight) v = {uniform(), uniform(), uniform(), uniform()};
    int groups = ceil_div(rows, GROUP_ROWS), whole = filled(width);
    std::vector<uint4> y(groups * GROUP_ROWS * whole / 8, uint4{~0u, ~0u, ~0u, ~0u});
    std::vector<float> factors(rows, NAN);
    norm::Arguments a = {&x[0].x, &weight[0].x, (u16*)y.data(), ordered ? factors.data() : nullptr, width, 1e-6f};
    launch(rows, 1, 1, norm::THREADS, [&] { ordered ? norm::rms_norm_ordered(a) : norm::rms_norm(a); });
    for (int r = 0; r < rows; r++) {
        double squares = 0;
        for (int i = 0; i < width; i++) squares += std::pow(a.x[r * width + i], 2.0);
        double factor = 1 / std::sqrt(squares / width + 1e-6);
        if (ordered) expect(std::fabs(factors[r] - factor) <= 1e-5 * factor, "the factor of a norm", r, 0, factors[r], factor);
        for (int i = 0; i < width; i++) {
            double want = a.x[r * width + i] * factor * a.weight[i];
            double got = f16_to_float(a.y[ordered ? ordered_at(groups, r, i) : (size_t)r * width + i]);
            expect(std::fabs(got - want) <= std::fabs(want) * 0x1.1p-11 + 0x1p-25, "norm", r, i, got, want);
        }
        for (int i = width; ordered && i < whole; i++) {
            u16 got = a.y[ordered_at(groups, r, i)];
            expect(got == 0, "what is missing at the end of a norm", r, i, f16_to_float(got), 0);
        }
    }
}

static void check_swiglu(int rows, int width) {
    std::vector<uint4> x(rows * width / 4), y(rows * width / 8);
    u16* halves = (u16*)x.data();
    for (int i = 0; i < rows * width * 2; i++) halves[i] = to_f16(8 * uniform());
    activation::SwigluArguments a = {halves, (u16*)y.data(), width, 0.25f};
    launch(ceil_div(width / 8, activation::THREADS), rows, 1, activation::THREADS, [&] { activation::swiglu(a); });
    for (int r = 0; r < rows; r++) {
        for (int i = 0; i < width; i++) {
            double gate = f16_to_float(halves[r * 2 * width + i]), up = f16_to_float(halves[r * 2 * width + width + i]);
            double want = gate / (1 + std::exp(-gate)) * up * 0.25, got = f16_to_float(a.y[r * width + i]);
            expect(std::fabs(got - want) <= std::fabs(want) * 0x1.1p-11 + 0x1p-25, "swiglu", r, i, got, want);
        }
    }
}

// Logits of one of several kinds: many equal, all equal, some that are not finite, descending, unusable, ruled out.
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
// The larger logit first, and of equal ones the lower token.
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
        int want = ranking(&x[(size_t)r * vocabulary], vocabulary)[0], said = want;
        if (kind == 5) want = vocabulary / 2, said = -2 - want;
        if (kind == 6) said = -1;
        expect(tokens[r] == want, "the likeliest token", kind, r, tokens[r], want);
        expect(history[5 % STEPS * rows + r] == said && positions[r] == 5 && arrived[r] == 0, "the next step", kind, r, positions[r], 5);
    }
}

int main() {
    check_norm(3, 100, false);
    check_norm(2, 2560, false);
    check_norm(1, 9236, false);
    check_norm(9, 112, true);
    check_norm(2, 9232, true);
    check_swiglu(2, 24);
    check_swiglu(1, 4104);
    for (int kind = 0; kind < 7; kind++) check_argmax(kind, 2, 1000, 3);
    check_argmax(1, 1, 50, 4);
    puts("ok");
}
