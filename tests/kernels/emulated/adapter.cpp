// kernels/adapter/adapter.cu on the CPU, as it ships, against f64: rows of several adapters and of none in one pass, factors of each type,
// ranks and widths that divide unevenly, both layouts. A row has the same bits whatever rows run beside it. Prints "ok" or the first error.
#include "cuda.hpp"

#include "activation/gate.cuh"
#include "common/ptx.cuh"
#include "common/values.cuh"
#include "format/fragment_major.cuh"

// Static shared memory may outlive its block, as no two blocks run at once.
#undef __shared__
#define __shared__ static
namespace adapter {
#include "adapter/adapter.cu"
}

static void expect(bool held, const char* what, int row, int i, double got, double want) {
    if (!held) printf("%s: (%d, %d) is %g, not %g\n", what, row, i, got, want), exit(1);
}

// A factor in a type, and the values that it holds.
struct Stored {
    std::vector<uint4> words;
    std::vector<double> values;
    int type;

    Stored(size_t count, int type) : words(count / 4 + 1), type(type) {
        for (size_t i = 0; i < count; i++) {
            float x = uniform();
            if (type == F32) ((float*)words.data())[i] = x;
            if (type == F16) ((u16*)words.data())[i] = to_f16(x), x = f16_to_float(to_f16(x));
            if (type == BF16) ((u16*)words.data())[i] = (u16)(__float_as_uint(x) >> 16), x = bf16_to_float((u16)(__float_as_uint(x) >> 16));
            values.push_back(x);
        }
    }
};

struct Pair {
    Stored a, b;
    int rank;
    float scale;
};

struct Adapter {
    std::vector<Pair> pairs;
    std::vector<adapter::Factors> table;
};

// Tiles of the rows of each adapter; -1 is none.
static std::vector<adapter::RowTile> tiles_of(const std::vector<int>& of_row, const std::vector<Adapter>& adapters) {
    std::vector<adapter::RowTile> tiles;
    for (int which = -1; which < (int)adapters.size(); which++) {
        int count = adapter::TILE_ROWS;
        for (int row = 0; row < (int)of_row.size(); row++) {
            if (of_row[row] != which) continue;
            if (count == adapter::TILE_ROWS) tiles.push_back({which < 0 ? nullptr : adapters[which].table.data(), 0, {}, 0}), count = 0;
            tiles.back().row[count++] = row, tiles.back().rows = count;
        }
    }
    // Unused ones, as a recorded pass has them.
    tiles.push_back({nullptr, 0, {}, 0});
    return tiles;
}

// The rows of `of_row` with these adapters, of which -1 is none, through projections that share an input.
static void check(const std::vector<int>& of_row, const std::vector<int>& outputs, int k, std::vector<int> ranks, bool fragments, bool glu) {
    const int FIRST = 2;
    const float FACTOR = 4;
    int rows = (int)of_row.size(), projections = (int)outputs.size(), groups = ceil_div(rows, GROUP_ROWS);
    std::vector<Adapter> adapters(ranks.size());
    for (size_t i = 0; i < adapters.size(); i++) {
        adapters[i].table.resize(FIRST + projections, adapter::Factors{});
        adapters[i].pairs.reserve(projections);
        for (int p = 0; p < projections; p++) {
            int a_type = (int)(i + p) % 3, b_type = (int)(i + 2 * p + 1) % 3;
            adapters[i].pairs.push_back({Stored((size_t)ranks[i] * k, a_type), Stored((size_t)outputs[p] * ranks[i], b_type), ranks[i], 0.5f + p});
            // The last adapter leaves the last projection as it is.
            if (i > 0 && i + 1 == adapters.size() && p + 1 == projections) adapters[i].pairs.back().rank = 0;
            Pair& pair = adapters[i].pairs.back();
            if (pair.rank > 0) adapters[i].table[FIRST + p] = {pair.a.words.data(), pair.b.words.data(), pair.scale, pair.rank, a_type, b_type};
        }
    }
    std::vector<uint4> memory(groups * GROUP_ROWS * padded_k(k) / 8 + 1);
    u16* x = (u16*)memory.data();
    std::vector<double> inputs;
    for (int r = 0; r < rows; r++) {
        for (int i = 0; i < k; i++) {
            u16 bits = to_f16(uniform());
            x[fragments ? fragment_index(groups, r, i) : (size_t)r * k + i] = bits;
            inputs.push_back(f16_to_float(bits));
        }
    }
    std::vector<adapter::RowTile> tiles = tiles_of(of_row, adapters);
    int most = *std::max_element(ranks.begin(), ranks.end()), stride = k / 32 + most, width = 0;
    for (int n : outputs) width += n;
    std::vector<float> low((size_t)projections * rows * stride, NAN);
    adapter::Low of_low = {low.data(), rows, stride, k};
    adapter::ShrinkArguments s = {x, tiles.data(), of_low, FIRST, FACTOR};
    launch(ceil_div(k, adapter::STEP_K), projections, tiles.size(), adapter::SHRINK_THREADS,
           [&] { fragments ? adapter::adapter_shrink_fragments(s) : adapter::adapter_shrink(s); });

    auto added = [&](int r, int p, int n) {
        double sum = 0;
        if (of_row[r] < 0) return sum;
        const Pair& pair = adapters[of_row[r]].pairs[p];
        for (int j = 0; j < pair.rank; j++) {
            double of_a = 0;
            for (int i = 0; i < k; i++) of_a += inputs[(size_t)r * k + i] * FACTOR * pair.a.values[(size_t)j * k + i];
            sum += of_a * pair.b.values[(size_t)n * ranks[of_row[r]] + j];
        }
        return sum * pair.scale;
    };
    std::vector<float> y((size_t)rows * width);
    for (float& v : y) v = uniform();
    std::vector<u16> halves;
    for (float v : y) halves.push_back(to_f16(v));
    if (!glu) {
        std::vector<float> got = y;
        std::vector<u16> got_halves = halves;
        adapter::ExpandArguments e = {got.data(), tiles.data(), of_low, FIRST, {}, width, 0};
        int blocks = 0;
        for (int p = 0; p < projections; p++) e.outputs[p] = outputs[p], blocks += ceil_div(outputs[p], adapter::EXPAND_THREADS);
        launch(blocks, tiles.size(), 1, adapter::EXPAND_THREADS, [&] { adapter::adapter_expand(e); });
        e.y = got_halves.data(), e.is_f16 = 1;
        launch(blocks, tiles.size(), 1, adapter::EXPAND_THREADS, [&] { adapter::adapter_expand(e); });
        for (int r = 0; r < rows; r++) {
            for (int p = 0, column = 0; p < projections; column += outputs[p++]) {
                for (int n = 0; n < outputs[p]; n++) {
                    size_t at = (size_t)r * width + column + n;
                    double more = added(r, p, n), bar = 1e-4 * std::sqrt((double)k);
                    expect(std::fabs(got[at] - y[at] - more) <= bar, "an adapted output", r, column + n, got[at], y[at] + more);
                    if (of_row[r] < 0) expect(got[at] == y[at], "an output without adapter", r, column + n, got[at], y[at]);
                    double half = f16_to_float(halves[at]) + more, got_half = f16_to_float(got_halves[at]);
                    expect(std::fabs(got_half - half) <= bar + std::fabs(half) * 0x1.1p-11, "an adapted output in f16", r, column + n, got_half, half);
                }
            }
        }
        return;
    }
    int wide = outputs[0], padded = fragments ? padded_k(wide) : wide;
    for (int kind = 0; kind < 4; kind++) {
        bool is_f16 = kind % 2;
        int done = kind / 2;
        std::vector<uint4> out(groups * GROUP_ROWS * padded_k(wide) / 8 + 1, uint4{~0u, ~0u, ~0u, ~0u});
        std::vector<u32> overflow(rows);
        adapter::GluArguments g = {is_f16 ? (const void*)halves.data() : y.data(), (u16*)out.data(), tiles.data(), of_low, overflow.data(), FIRST, wide, 0.25f, SILU, 6, fragments, done};
        launch(ceil_div(padded, adapter::EXPAND_THREADS), tiles.size(), 1, adapter::EXPAND_THREADS,
               [&] { is_f16 ? adapter::adapter_glu_f16(g) : adapter::adapter_glu_f32(g); });
        for (int r = 0; r < rows; r++) {
            bool fits = true;
            // The last adapter has factors for the gate, and rows without one stay as they were.
            for (int n = 0; done && of_row[r] < 0 && n < padded; n++) {
                u16 got = g.y[fragments ? fragment_index(groups, r, n) : (size_t)r * wide + n];
                expect(got == 0xffff, "a gated unit that is done", r, n, got, 0xffff);
            }
            if (done && of_row[r] < 0) continue;
            for (int n = 0; n < padded; n++) {
                double got = f16_to_float(g.y[fragments ? fragment_index(groups, r, n) : (size_t)r * wide + n]);
                if (n >= wide) {
                    expect(got == 0, "the padding of a gated unit", r, n, got, 0);
                    continue;
                }
                size_t at = (size_t)r * 2 * wide + n;
                double gate = is_f16 ? f16_to_float(halves[at]) : y[at], up = is_f16 ? f16_to_float(halves[at + wide]) : y[at + wide];
                gate += added(r, 0, n), up += added(r, 1, n);
                double want = gate / (1 + std::exp(-gate)) * up * 0.25, bar = 1e-4 * k;
                if (std::fabs(want) > 65504) fits = false;
                else expect(std::fabs(got - want) <= bar + std::fabs(want) * 0x1p-9, "a gated unit", r, n, got, want);
            }
            expect(overflow[r] == (fits ? 0u : 7u), "a noted overflow", r, 0, overflow[r], fits ? 0 : 7);
        }
    }
}

// The residual stream with adapters, and its norm.
static void check_norm(const std::vector<int>& of_row, int k, int width, std::vector<int> ranks, bool fragments) {
    int rows = (int)of_row.size(), groups = ceil_div(rows, GROUP_ROWS), most = *std::max_element(ranks.begin(), ranks.end()), stride = k / 32 + most;
    std::vector<Adapter> adapters(ranks.size());
    for (size_t i = 0; i < adapters.size(); i++) {
        int type = (int)i % 3;
        adapters[i].pairs.push_back({Stored((size_t)ranks[i] * k, type), Stored((size_t)width * ranks[i], type), ranks[i], 0.75f});
        Pair& pair = adapters[i].pairs[0];
        adapters[i].table = {{pair.a.words.data(), pair.b.words.data(), pair.scale, pair.rank, type, type}};
    }
    std::vector<adapter::RowTile> tiles = tiles_of(of_row, adapters);
    std::vector<float> low((size_t)rows * stride), x((size_t)rows * width), weight(width);
    for (auto* all : {&low, &x, &weight}) {
        for (float& v : *all) v = uniform();
    }
    std::vector<float> before = x;
    std::vector<uint4> memory(groups * GROUP_ROWS * padded_k(width) / 8 + 1, uint4{~0u, ~0u, ~0u, ~0u});
    adapter::NormArguments a = {x.data(), weight.data(), (u16*)memory.data(), tiles.data(), {low.data(), rows, stride, k}, 0, width, 1e-6f, fragments};
    launch(adapter::TILE_ROWS, tiles.size(), 1, adapter::NORM_THREADS, [&] { adapter::adapter_norm(a); });
    for (int r = 0; r < rows; r++) {
        std::vector<double> sum(width);
        double squares = 0;
        for (int n = 0; n < width; n++) {
            double more = 0;
            for (int j = 0; of_row[r] >= 0 && j < ranks[of_row[r]]; j++) {
                int rank = ranks[of_row[r]], splits = ceil_div(k, adapter::Low::split(rank));
                double of_a = 0;
                for (int s = 0; s < splits; s++) of_a += low[(size_t)r * stride + s * rank + j];
                more += of_a * adapters[of_row[r]].pairs[0].b.values[(size_t)n * rank + j] * 0.75;
            }
            sum[n] = before[(size_t)r * width + n] + more, squares += sum[n] * sum[n];
            expect(std::fabs(x[(size_t)r * width + n] - sum[n]) <= 1e-4, "an adapted residual stream", r, n, x[(size_t)r * width + n], sum[n]);
        }
        double factor = 1 / std::sqrt(squares / width + 1e-6);
        for (int n = 0; n < (fragments ? padded_k(width) : width); n++) {
            double want = n < width ? sum[n] * factor * weight[n] : 0, got = f16_to_float(a.y[fragments ? fragment_index(groups, r, n) : (size_t)r * width + n]);
            expect(std::fabs(got - want) <= 1e-4 + std::fabs(want) * 0x1p-10, "the norm of an adapted residual stream", r, n, got, want);
        }
    }
}

// The sums of A of one row, whatever rows are beside it.
static void check_bits(int k, int rank) {
    std::vector<Adapter> adapters(1);
    adapters[0].pairs.push_back({Stored((size_t)rank * k, F32), Stored(rank, F32), rank, 1});
    adapters[0].table = {{adapters[0].pairs[0].a.words.data(), nullptr, 1, rank, F32, F32}};
    std::vector<u16> x;
    for (int i = 0; i < 40 * k; i++) x.push_back(to_f16(uniform()));
    int stride = k / 32 + rank;
    auto lows = [&](int first, int rows, bool fragments) {
        int groups = ceil_div(rows, GROUP_ROWS);
        std::vector<u16> some(groups * GROUP_ROWS * padded_k(k));
        for (int r = 0; r < rows; r++) {
            for (int i = 0; i < k; i++) some[fragments ? fragment_index(groups, r, i) : (size_t)r * k + i] = x[(size_t)(first + r) * k + i];
        }
        std::vector<adapter::RowTile> tiles = tiles_of(std::vector<int>(rows, 0), adapters);
        std::vector<float> low((size_t)rows * stride, 0);
        adapter::ShrinkArguments s = {some.data(), tiles.data(), {low.data(), rows, stride, k}, 0, 1};
        launch(ceil_div(k, adapter::STEP_K), 1, tiles.size(), adapter::SHRINK_THREADS,
               [&] { fragments ? adapter::adapter_shrink_fragments(s) : adapter::adapter_shrink(s); });
        return low;
    };
    std::vector<float> all = lows(0, 40, true);
    for (int row : {0, 5, 17, 39}) {
        for (bool fragments : {false, true}) {
            std::vector<float> alone = lows(row, 1, fragments);
            bool same = std::equal(alone.begin(), alone.end(), all.begin() + (size_t)row * stride);
            expect(same, "the bits of a row alone", row, fragments, 0, 1);
        }
    }
}

int main() {
    std::vector<int> alternate;
    for (int i = 0; i < 37; i++) alternate.push_back(i % 3 - 1);
    for (bool fragments : {false, true}) {
        check({0}, {48, 16, 16}, 640, {16}, fragments, false);
        check(alternate, {160, 8, 24, 130}, 336, {16, 48}, fragments, false);
        check({0, 1, -1, 1}, {72}, 1552, {32, 16}, fragments, false);
        check({0, -1, 1, 1, 0}, {144, 144}, 576, {16, 32}, fragments, true);
        check(alternate, {40, 40}, 48, {16, 16}, fragments, true);
    }
    for (bool fragments : {false, true}) {
        check_norm({0}, 9728, 2560, {16}, fragments);
        check_norm({0, -1, 1, 1, -1, 0, 0, 1, -1}, 656, 592, {16, 48}, fragments);
        check_norm({-1, 0}, 48, 8192, {16}, fragments);
    }
    check_bits(1552, 16);
    check_bits(592, 48);
    puts("ok");
}
