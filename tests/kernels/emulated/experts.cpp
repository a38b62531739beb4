// A mixture of experts on the CPU, against f64 and against sorting: kernels/experts/*.cu of routing, kernels/linear/experts.cu,
// kernels/norm/{sum_experts,sum_experts_beside}.cu and kernels/linear/dense.cu as they ship, with their instructions emulated as the PTX ISA
// describes them.
// Weights go through the packing kernel first. Prints "ok" or the first error.
#include "cuda.hpp"

#include "activation/gate.cuh"
#include "common/cluster.cuh"
#include "common/ptx.cuh"
#include "common/reduce.cuh"
#include "common/tiles.cuh"
#include "experts/choice.cuh"
#include "format/fragment_major.cuh"
#include "format/int8.cuh"
#include "format/packed.cuh"
#include "linear/matrix.cuh"

namespace pack {
#include "linear/pack.cu"
}
// The shared memory that kernels declare is the one array of cuda.hpp.
namespace products {
extern char shared[] asm("shared");
#include "linear/experts.cu"
#undef KERNEL
#undef KERNELS
}
namespace dense {
extern char shared[] asm("shared");
#include "linear/row.cu"
#undef KERNEL
#include "linear/int8_row.cu"
#undef KERNEL
#undef KERNELS
}
namespace sum {
extern char shared[] asm("shared");
#include "norm/sum_experts.cu"
}
// Static shared memory may outlive its block, as no two blocks run at once.
#undef __shared__
#define __shared__ static
namespace routes {
#include "experts/route.cu"
}
namespace beside {
using namespace sum;
#include "norm/sum_experts_beside.cu"
}
namespace dense {
#include "linear/dense.cu"
}

static void expect(bool held, const char* what, int row, int i, double got, double want) {
    if (!held) printf("%s: (%d, %d) is %g, not %g\n", what, row, i, got, want), exit(1);
}

struct Routed {
    std::vector<int> choices, places, sources;
    std::vector<float> weights;
    std::vector<ExpertTile> tiles;
};

// Scores of experts: the softmax, or sigmoids within the best of some groups.
struct Scoring {
    int groups = 0, top_groups = 0;
    float scale = 1;
    // Of the experts' weights; or empty.
    std::vector<float> factors = {};
    bool is_sigmoid() const { return groups > 0; }
};

// The experts of a row, best first, and their weights.
static std::vector<std::pair<int, double>> best_experts(const float* logits, const std::vector<float>& correction, int per_token, bool normalized, Scoring scoring) {
    int experts = (int)correction.size();
    std::vector<double> scores(experts);
    double all = 0;
    for (int e = 0; e < experts; e++) all += std::exp((double)logits[e]);
    for (int e = 0; e < experts; e++) scores[e] = scoring.is_sigmoid() ? 1 / (1 + std::exp(-(double)logits[e])) : std::exp((double)logits[e]) / all;
    auto order = [](std::vector<int> which, auto value) {
        std::stable_sort(which.begin(), which.end(), [&](int i, int j) { return value(i) > value(j); });
        return which;
    };
    auto corrected = [&](int e) { return scores[e] + (scoring.is_sigmoid() ? correction[e] : 0); };
    auto numbers = [](int first, int count) {
        std::vector<int> all(count);
        for (int i = 0; i < count; i++) all[i] = first + i;
        return all;
    };
    std::vector<bool> may(experts, !scoring.is_sigmoid());
    if (scoring.is_sigmoid()) {
        int size = experts / scoring.groups;
        auto of_group = [&](int g) {
            auto best = order(numbers(g * size, size), corrected);
            return corrected(best[0]) + corrected(best[1]);
        };
        auto groups = order(numbers(0, scoring.groups), of_group);
        for (int i = 0; i < scoring.top_groups; i++) std::fill_n(may.begin() + groups[i] * size, size, true);
    }
    std::vector<std::pair<int, double>> chosen;
    double sum = 0;
    for (int e : order(numbers(0, experts), corrected)) {
        if ((int)chosen.size() < per_token && may[e]) chosen.push_back({e, scores[e]}), sum += scores[e];
    }
    for (auto& [expert, weight] : chosen) {
        weight = weight / (normalized ? sum : 1) * scoring.scale * (scoring.factors.empty() ? 1 : scoring.factors[expert]);
    }
    return chosen;
}

// Routes rows with some equal logits, and compares with sorting.
static Routed check_route(int rows, int experts, int per_token, bool normalized, int tile_pairs, Scoring scoring = {}) {
    bool few = rows <= FEW_ROWS && rows * per_token <= FEW_PAIRS;
    int pairs = rows * per_token, most = pairs / tile_pairs + min(pairs, experts), stride = experts + 1;
    std::vector<float> logits(rows * stride, NAN), correction(experts);
    // Far apart, so that rounding decides no choice. Without a difference, equal logits have equal sums.
    for (float& c : correction) c = noise() % 3 ? (float)(noise() % 5) * 0.25f : 0;
    for (int r = 0; r < rows; r++) {
        for (int e = 0; e < experts; e++) logits[r * stride + e] = noise() % 3 ? 4 * uniform() : (float)(noise() % 3);
    }
    Routed routed = {std::vector<int>(pairs, -1), std::vector<int>(pairs, -1), std::vector<int>(pairs, -1), std::vector<float>(pairs, NAN),
                     std::vector<ExpertTile>(most, ExpertTile{-1, -1, -1, -1})};
    std::vector<u32> unfit(rows);
    Routing a = {logits.data(), routed.choices.data(), routed.weights.data(), routed.places.data(), routed.sources.data(),
                           routed.tiles.data(), unfit.data(), scoring.is_sigmoid() ? correction.data() : nullptr, scoring.factors.empty() ? nullptr : scoring.factors.data(), scoring.scale, scoring.groups, scoring.top_groups,
                           rows, stride, experts, per_token, normalized, tile_pairs, most, 7};
    if (few) {
        launch(1, 1, 1, routes::FEW_THREADS, [&] { routes::experts_route_few(a); });
    } else {
        launch(ceil_div(rows, routes::ROUTE_THREADS / WARP), 1, 1, routes::ROUTE_THREADS, [&] { routes::experts_route(a); });
        launch(experts, 1, 1, routes::GROUP_THREADS, [&] { routes::experts_group(a); });
    }
    for (int r = 0; r < rows; r++) expect(unfit[r] == 0, "a logit that is not finite", r, 0, unfit[r], 0);
    std::vector<std::pair<int, int>> order;     // of experts and pairs
    for (int r = 0; r < rows; r++) {
        auto best = best_experts(&logits[r * stride], correction, per_token, normalized, scoring);
        for (int i = 0; i < per_token; i++) {
            int at = r * per_token + i;
            auto [expert, want] = best[i];
            expect(routed.choices[at] == expert, "a choice", r, i, routed.choices[at], expert);
            expect(std::fabs(routed.weights[at] - want) <= 1e-5 * std::fabs(want), "the weight of an expert", r, i, routed.weights[at], want);
            order.push_back({expert, at});
        }
    }
    std::sort(order.begin(), order.end());
    int tiles = 0;
    for (int place = 0; place < pairs; place++) {
        auto [expert, pair] = order[place];
        expect(routed.places[pair] == place, "a place", pair, expert, routed.places[pair], place);
        expect(routed.sources[place] == pair / per_token, "a source", place, expert, routed.sources[place], pair / per_token);
        bool goes_on = tiles > 0 && routed.tiles[tiles - 1].expert == expert && place < routed.tiles[tiles - 1].first + tile_pairs;
        if (goes_on) continue;
        int last = place;
        while (last < pairs && last < place + tile_pairs && order[last].first == expert) last++;
        const ExpertTile& tile = routed.tiles[tiles++];
        expect(tile.expert == expert && tile.first == place && tile.pairs == last - place, "a tile", expert, place, tile.first, place);
    }
    for (int i = tiles; i < most; i++) expect(routed.tiles[i].pairs == 0, "an unused tile", i, 0, routed.tiles[i].pairs, 0);

    // Logits that are not finite are reported, and every choice is an expert all the same.
    logits[(rows - 1) * stride + experts / 2] = NAN;
    std::vector<int> choices(pairs, -1);
    std::vector<float> weights(pairs);
    Routing odd = a;
    odd.choices = choices.data(), odd.weights = weights.data();
    launch(ceil_div(rows, routes::ROUTE_THREADS / WARP), 1, 1, routes::ROUTE_THREADS, [&] { routes::experts_route(odd); });
    for (int i = 0; i < pairs; i++) expect(choices[i] >= 0 && choices[i] < experts, "a choice among logits that are not finite", i, 0, choices[i], 0);
    for (int r = 0; r < rows; r++) {
        u32 want = r == rows - 1 ? 8 : 0;
        expect(unfit[r] == want, "a logit that is not finite", r, 0, unfit[r], want);
    }
    return routed;
}

// An NVFP4 weight that has been packed.
struct Weight {
    std::vector<double> values;
    std::vector<uint4> chunks;
    float global;

    Weight(int rows, int k) : chunks((size_t)ceil_div(rows, CHUNK_ROWS) * ceil_div(k, CHUNK_K) * CHUNK_BYTES / 16), global(1e-3f * (1 + noise() % 4)) {
        std::vector<uint4> codes(rows * k / 32), scales(ceil_div(rows * k / BLOCK, 16));
        u8 *c = (u8*)codes.data(), *s = (u8*)scales.data();
        for (int i = 0; i < rows * k / 2; i++) c[i] = (u8)noise();
        for (int i = 0; i < rows * k / BLOCK; i++) s[i] = (u8)(0x30 + noise() % 16);
        for (int i = 0; i < rows * k; i++) values.push_back(e2m1(i % 2 ? c[i / 2] >> 4 : c[i / 2]) * ue4m3(s[i / BLOCK]) * global);
        pack::Arguments a = {c, s, (u8*)chunks.data(), 0, rows, k, 0};
        launch(ceil_div(ceil_div(k, CHUNK_K) * pack::WORDS, pack::THREADS), ceil_div(rows, CHUNK_ROWS), 1, pack::THREADS, [&] { pack::linear_pack(a); });
    }
};

// The sum of experts by one block a row, or in parts of so many threads, against f64, without a norm after it and with one.
static void check_sum(sum::Arguments a, int rows, int threads) {
    int width = a.next.width, per_token = a.per_token, groups = ceil_div(rows, GROUP_ROWS);
    int pieces = a.next.fragment_major ? padded_k(width) / 8 : ceil_div(width, 2 * BLOCK) * 4;
    std::vector<float4> before(rows * width / 4), x(before.size());
    memcpy(before.data(), a.x, rows * width * 4);
    std::vector<uint4> normed(groups * GROUP_ROWS * padded_k(width) / 8, uint4{~0u, ~0u, ~0u, ~0u});
    const float* weight = a.next.weight;
    for (bool has_next : {false, true}) {
        x = before;
        a.x = &x[0].x, a.next.weight = has_next ? weight : nullptr, a.next.normed = (u16*)normed.data();
        int parts = threads > 0 ? ceil_div(pieces, threads) : 1;
        if (parts > sum::MAX_PARTS) return;
#if __CUDA_ARCH__ >= 900
        if (threads > 0) launch(rows, 1, parts, threads, [&] { sum::experts_sum_cluster(a); }, parts);
#endif
        if (threads == 0) launch(rows, 1, 1, ceil_div(pieces, WARP) * WARP, [&] { sum::experts_sum(a); });
        for (int r = 0; r < rows; r++) {
            double squares = 0;
            std::vector<double> want(width);
            for (int i = 0; i < width; i++) {
                want[i] = (&before[0].x)[r * width + i];
                for (int j = 0; j < per_token; j++) {
                    int pair = r * per_token + j;
                    want[i] += a.weights[pair] * (double)a.outputs[(size_t)a.places[pair] * width + i];
                }
                double factor = a.gate ? 1 / (1 + std::exp(-(double)a.gate[r * a.gate_stride])) : 1;
                if (a.shared) want[i] += a.shared[r * width + i] * factor;
                squares += want[i] * want[i];
                double got = a.x[r * width + i];
                expect(std::fabs(got - want[i]) <= 1e-5 * std::fabs(want[i]) + 1e-5, "the sum of experts", r, i, got, want[i]);
            }
            double factor = 1 / std::sqrt(squares / width + 1e-6);
            for (int i = 0; i < pieces * 8 && has_next; i++) {
                if (i >= width && !a.next.fragment_major) break;
                double of = i < width ? want[i] * factor * weight[i] : 0;
                double got = f16_to_float(a.next.normed[a.next.fragment_major ? fragment_index(groups, r, i) : (size_t)r * width + i]);
                expect(std::fabs(got - of) <= std::fabs(of) * 0x1.2p-11 + 1e-5, "the norm after experts", r, i, got, of);
            }
        }
    }
}

enum Unit { SWIGLU, CLAMPED, RELU_SQUARED };

// A whole mixture: routing, gate and up, down, and the sum, each against f64.
static void check_mixture(int rows, int experts, int per_token, int hidden, int wide, int columns, bool shared, bool fragment_major, Unit unit = SWIGLU) {
    Routed routed = check_route(rows, experts, per_token, true, columns);
    bool gpt_oss = unit == CLAMPED, gated = unit != RELU_SQUARED, biased = unit != SWIGLU;
    int pairs = rows * per_token;
    std::vector<std::unique_ptr<Weight>> weights;
    std::vector<Matrix> table;
    std::vector<std::vector<float>> biases;
    // Some gates and ups lie beyond this limit.
    Gating gating = {gpt_oss ? CLAMPED_SWIGLU : SILU, 1.702f, 0.5f};
    for (int i = 0; i < experts * products::PROJECTIONS; i++) {
        bool has = gated || i % products::PROJECTIONS != products::GATE;
        bool down = i % products::PROJECTIONS == products::DOWN;
        weights.push_back(std::make_unique<Weight>(down ? hidden : wide, down ? wide : hidden));
        biases.emplace_back(down ? hidden : wide);
        for (float& b : biases.back()) b = biased ? uniform() : 0;
        table.push_back({has ? (const u8*)weights.back()->chunks.data() : nullptr, biased ? biases.back().data() : nullptr, weights.back()->global, down ? hidden : wide});
    }
    std::vector<uint4> x(rows * hidden / 8), inner(pairs * wide / 8 + 1, uint4{~0u, ~0u, ~0u, ~0u});
    u16* halves = (u16*)x.data();
    for (int i = 0; i < rows * hidden; i++) halves[i] = to_f16(uniform());
    std::vector<float> outputs(pairs * hidden, NAN);
    products::Arguments up = {halves, routed.sources.data(), routed.tiles.data(), table.data(), inner.data(), wide, hidden, 2, 0.25f, gating};
    products::Arguments down = {(u16*)inner.data(), nullptr, routed.tiles.data(), table.data(), outputs.data(), hidden, wide, 4, 1, gating};
    int of_block = CHUNK_ROWS * products::WARPS, count = (int)routed.tiles.size();
    launch(ceil_div(wide, gated ? of_block : 2 * of_block), count, 1, products::THREADS, [&] {
        if (!gated) return columns == 8 ? products::linear_experts_relu2_8(up) : columns == 16 ? products::linear_experts_relu2_16(up) : columns == 32 ? products::linear_experts_relu2_32(up) : products::linear_experts_relu2_64(up);
        columns == 8 ? products::linear_experts_glu_8(up) : columns == 16 ? products::linear_experts_glu_16(up) : columns == 32 ? products::linear_experts_glu_32(up) : products::linear_experts_glu_64(up);
    });
    launch(ceil_div(hidden, 2 * of_block), count, 1, products::THREADS, [&] {
        columns == 8 ? products::linear_experts_8(down) : columns == 16 ? products::linear_experts_16(down) : columns == 32 ? products::linear_experts_32(down) : products::linear_experts_64(down);
    });
    auto product = [](const Weight& w, int feature, int k, auto x) {
        double sum = 0;
        for (int i = 0; i < k; i++) sum += w.values[(size_t)feature * k + i] * x(i);
        return sum;
    };
    for (int pair = 0; pair < pairs; pair++) {
        int place = routed.places[pair], row = pair / per_token, expert = routed.choices[pair];
        const auto* of = &weights[expert * products::PROJECTIONS];
        const auto* bias = &biases[expert * products::PROJECTIONS];
        const u16* inner_out = (const u16*)inner.data() + (size_t)place * wide;
        for (int i = 0; i < wide; i++) {
            auto in = [&](int j) { return 2.0 * f16_to_float(halves[row * hidden + j]); };
            double gate = gated ? product(*of[0], i, hidden, in) + bias[0][i] : 0, up = product(*of[1], i, hidden, in) + bias[1][i], want;
            if (gpt_oss) {
                gate = std::min(gate, 0.5), up = std::min(std::max(up, -0.5), 0.5);
                want = (up + 1) * gate / (1 + std::exp(-1.702 * gate)) * 0.25;
            } else if (gated) {
                want = gate / (1 + std::exp(-gate)) * up * 0.25;
            } else {
                want = std::pow(std::max(up, 0.0), 2) * 0.25;
            }
            expect(std::fabs(f16_to_float(inner_out[i]) - want) <= 1e-3 * std::fabs(want) + 1e-5, "gate and up", place, i, f16_to_float(inner_out[i]), want);
        }
        for (int i = 0; i < hidden; i++) {
            double want = product(*of[2], i, wide, [&](int j) { return 4.0 * f16_to_float(inner_out[j]); }) + bias[2][i], got = outputs[(size_t)place * hidden + i];
            expect(std::fabs(got - want) <= 1e-4 * std::fabs(want) + 1e-5, "down", place, i, got, want);
        }
    }

    auto random_vector = [](int n) {
        std::vector<float4> v(n / 4);
        for (float4& f : v) f = {uniform(), uniform(), uniform(), uniform()};
        return v;
    };
    auto residual = random_vector(rows * hidden), shared_out = random_vector(rows * hidden), norm = random_vector(hidden), gates = random_vector(rows * 4);
    sum::Arguments s = {outputs.data(), routed.places.data(), routed.weights.data(), shared ? &shared_out[0].x : nullptr, shared ? &gates[0].x : nullptr,
                        &residual[0].x, {&norm[0].x, nullptr, nullptr, hidden, 1e-6f, fragment_major, 0, nullptr}, per_token, 3};
    check_sum(s, rows, 0);
    // In parts of one warp and of more, in the last of which some threads have no piece.
    for (int threads : {32, 64}) {
        if (__CUDA_ARCH__ >= 900) check_sum(s, rows, threads);
    }
}

// The end of a mixture beside a dense MLP.
static void check_beside(int rows, int per_token, int hidden, bool fragment_major, bool is_scaled, bool followed) {
    auto random_vector = [](int n) {
        std::vector<float4> v(n / 4);
        for (float4& f : v) f = {uniform(), uniform(), uniform(), uniform()};
        return v;
    };
    int pairs = rows * per_token, groups = ceil_div(rows, GROUP_ROWS), whole = padded_k(hidden);
    auto outputs = random_vector(pairs * hidden), out_of_dense = random_vector(rows * hidden), x = random_vector(rows * hidden), before = x;
    auto experts_norm = random_vector(hidden), dense_norm = random_vector(hidden), post_norm = random_vector(hidden), next = random_vector(hidden);
    std::vector<int> places(pairs);
    std::vector<float> weights(pairs);
    for (int i = 0; i < pairs; i++) places[i] = pairs - 1 - i, weights[i] = uniform();
    float scale = 0.375f;
    std::vector<uint4> normed(groups * GROUP_ROWS * whole / 8, uint4{~0u, ~0u, ~0u, ~0u});
    beside::Arguments a = {&outputs[0].x, places.data(), weights.data(), &out_of_dense[0].x, &experts_norm[0].x, &dense_norm[0].x, &post_norm[0].x,
                           is_scaled ? &scale : nullptr, &x[0].x, {followed ? &next[0].x : nullptr, followed ? (u16*)normed.data() : nullptr, nullptr, hidden, 1e-6f,
                            fragment_major, 0, nullptr}, per_token};
    launch(rows, 1, 1, beside::THREADS, [&] { beside::experts_sum_beside(a); });
    auto norm = [&](std::vector<double> v, const float* weight) {
        double squares = 0;
        for (double e : v) squares += e * e;
        for (int i = 0; i < hidden; i++) v[i] *= weight[i] / std::sqrt(squares / hidden + 1e-6);
        return v;
    };
    for (int r = 0; r < rows; r++) {
        std::vector<double> sum(hidden), mlp(hidden);
        for (int i = 0; i < hidden; i++) {
            for (int j = 0; j < per_token; j++) sum[i] += (double)weights[r * per_token + j] * a.outputs[(size_t)places[r * per_token + j] * hidden + i];
            mlp[i] = a.dense[r * hidden + i];
        }
        sum = norm(sum, a.experts_norm), mlp = norm(mlp, a.dense_norm);
        for (int i = 0; i < hidden; i++) sum[i] += mlp[i];
        sum = norm(sum, a.post_norm);
        for (int i = 0; i < hidden; i++) {
            sum[i] = (sum[i] + (&before[0].x)[r * hidden + i]) * (is_scaled ? scale : 1);
            double got = a.x[r * hidden + i];
            expect(std::fabs(got - sum[i]) <= 1e-5 * std::fabs(sum[i]) + 1e-5, "experts beside an MLP", r, i, got, sum[i]);
        }
        if (!followed) continue;
        sum = norm(sum, a.next.weight);
        for (int i = 0; i < hidden; i++) {
            double got = f16_to_float(a.next.normed[fragment_major ? fragment_index(groups, r, i) : (size_t)r * hidden + i]);
            expect(std::fabs(got - sum[i]) <= std::fabs(sum[i]) * 0x1.2p-11 + 1e-5, "the norm after experts beside an MLP", r, i, got, sum[i]);
        }
    }
}

constexpr int INT8 = dense::BF16 + 1;

// Dense weights, as routers are, and int8 rows, as heads are, with one row of activations. The rows are divided among up to three matrices.
static void check_dense(int m, int rows, int k, int kind, unsigned blocks = 1, bool pairs = false) {
    std::vector<uint4> x(ceil_div(m * k, 8)), w(rows * k / 4);
    std::vector<double> values;
    std::vector<float> scales(rows), bias(rows);
    for (int r = 0; r < rows; r++) scales[r] = 1e-2f * (1 + r % 5), bias[r] = uniform();
    for (int i = 0; i < m * k; i++) ((u16*)x.data())[i] = to_f16(uniform());
    for (int i = 0; i < rows * k; i++) {
        float v = uniform();
        if (kind == INT8) {
            // Every code, -128 too.
            u8 code = i < 256 ? (u8)i : (u8)noise();
            ((u8*)w.data())[i] = code, v = (float)(double)(signed char)code * scales[i / k];
        }
        if (kind == dense::F32) ((float*)w.data())[i] = v;
        if (kind == dense::F16) ((u16*)w.data())[i] = to_f16(v), v = f16_to_float(to_f16(v));
        if (kind == dense::BF16) ((u16*)w.data())[i] = (u16)pack_bf16(v, 0), v = bf16_to_float((u16)pack_bf16(v, 0));
        values.push_back(v);
    }
    std::vector<float> out(m * (rows + 1), NAN);
    dense::Arguments a = {(u16*)x.data(), {}, out.data(), 0.5f, kind, dense::STORE_F32, m, k, rows + 1, 0};
    int size = kind == INT8 ? 1 : kind == dense::F32 ? 4 : 2, parts = min(rows, 3);
    for (int i = 0; i < parts; i++) {
        int from = rows * i / parts, to = rows * (i + 1) / parts;
        a.matrices[i] = {(u8*)w.data() + (size_t)from * k * size, kind == INT8 ? &scales[from] : nullptr, &bias[from], (u64)(to - from)};
    }
    using Kernel = void (*)(dense::Arguments);
    const Kernel of_row[3][2] = {{dense::linear_row_f32, dense::linear_row_f32_pair},
                                 {dense::linear_row_f16, dense::linear_row_f16_pair},
                                 {dense::linear_row_bf16, dense::linear_row_bf16_pair}};
    if (m > 1 && kind == INT8) {
        launch(blocks, 1, 1, dense::BLOCK_THREADS, [&] { pairs ? dense::linear_int8_row_4_2(a) : dense::linear_int8_row_4_3(a); });
    } else if (m > 1) {
        launch(ceil_div(rows, dense::WARPS), ceil_div(m, dense::TOKENS), 1, dense::THREADS, [&] { dense::linear_dense(a); });
    } else {
        // Some warps have several units, and some none.
        if (kind == INT8) {
            launch(blocks, 1, 1, dense::BLOCK_THREADS, [&] { pairs ? dense::linear_int8_row_1_2(a) : dense::linear_int8_row_1_4(a); });
        } else {
            launch(blocks, 1, 1, dense::THREADS, [&] { of_row[kind][pairs](a); });
        }
    }
    for (int i = 0; i < m * rows; i++) {
        double want = bias[i % rows], got = out[i / rows * (rows + 1) + i % rows];
        for (int j = 0; j < k; j++) want += values[i % rows * k + j] * f16_to_float(a.x[i / rows * k + j]) * 0.5;
        expect(std::fabs(got - want) <= 1e-5 * (1 + std::fabs(want)), "a product with a dense weight", i / rows, i % rows, got, want);
    }
}

int main() {
    check_route(1, 128, 8, true, 8);
    check_route(16, 60, 4, false, 8);
    check_route(17, 16, 2, true, 16);
    check_route(300, 512, 10, false, 8);
    check_route(700, 3, 3, true, 64);
    check_route(3, 128, 6, true, 8, {1, 1, 2.5f});
    check_route(40, 128, 6, false, 8, {8, 3, 2.5f});
    check_route(16, 64, 4, true, 8, {32, 2, 1});
    check_route(20, 300, 8, true, 8, {3, 1, 1});
    check_route(3, 8, 2, true, 8, {0, 0, 1, {0.5f, -1, 2, 0.25f, 1, 3, 0, 1.5f}});
    check_route(20, 4, 3, false, 16, {0, 0, 1, {0.5f, -1, 2, 0.25f}});
    check_beside(3, 2, 144, false, true, true);
    check_beside(9, 8, 2816, true, true, true);
    check_beside(1, 4, 64, false, false, false);
    check_mixture(1, 8, 2, 144, 48, 8, false, false);
    check_mixture(20, 3, 2, 272, 80, 16, true, true);
    check_mixture(40, 2, 1, 128, 144, 32, true, false);
    check_mixture(90, 2, 2, 64, 32, 64, false, true);
    check_mixture(3, 4, 2, 144, 80, 8, false, false, CLAMPED);
    check_mixture(90, 2, 2, 80, 48, 64, false, true, CLAMPED);
    check_mixture(3, 4, 2, 144, 80, 8, true, false, RELU_SQUARED);
    check_mixture(20, 3, 2, 80, 144, 16, false, true, RELU_SQUARED);
    check_mixture(40, 2, 1, 64, 48, 32, false, false, RELU_SQUARED);
    check_mixture(90, 2, 2, 80, 48, 64, false, true, RELU_SQUARED);
    check_dense(11, 3, 528, dense::F16);
    check_dense(8, 17, 48, dense::F32);
    for (bool pairs : {false, true}) {
        check_dense(1, 9, 272, dense::BF16, 1, pairs);
        check_dense(1, 53, 272, dense::F16, 2, pairs);
        check_dense(1, 1, 2576, dense::F32, 1, pairs);
        // Warps without steps, blocks of several tiles, K that ends anywhere in a step.
        check_dense(1, 9, 1040, INT8, 1, pairs);
        check_dense(1, 40, 528, INT8, 2, pairs);
        check_dense(1, 17, 16, INT8, 3, pairs);
        check_dense(1, 2, 2560, INT8, 1, pairs);
        check_dense(1, 37, 4624, INT8, 1, pairs);
        check_dense(1, 600, 80, INT8, 1, pairs);
        check_dense(2, 17, 16, INT8, 3, pairs);
        check_dense(3, 37, 2064, INT8, 1, pairs);
        check_dense(4, 600, 272, INT8, 2, pairs);
    }
    puts("ok");
}
