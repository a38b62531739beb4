// Sampling on the CPU: kernels/sample/draw.cu as it ships, with its instructions emulated as the PTX ISA describes them. Reads cases from
// standard input: rows, vocabulary, whether there are penalties, and the blocks of the first two kernels; for each row its rule, the input
// token, a bit for each token that has occurred, and the logits. Writes what the host receives for each row, or exits with 1 and an error.
#include "cuda.hpp"

#include "common/ptx.cuh"
#include "format/random.cuh"
#include "sample/choice.cuh"

// Static shared memory may outlive its block, as no two blocks run at once.
#undef __shared__
#define __shared__ static
namespace draw {
#include "sample/draw.cu"
}

template <class T>
static bool take(T* to, size_t count) {
    return fread(to, sizeof(T), count, stdin) == count;
}

static void expect(bool held, const char* what) {
    if (!held) fprintf(stderr, "%s\n", what), exit(1);
}

int main() {
    const int STEPS = 3;
    for (int head[5]; take(head, 5);) {
        int rows = head[0], vocabulary = head[1], words = ceil_div(vocabulary, 32), blocks = head[3];
        std::vector<draw::Rule> rules(rows);
        std::vector<int> tokens(rows), candidates(rows * blocks), positions(rows, 4), history(STEPS * rows, -99);
        std::vector<u32> occurred(rows * words), counts(rows * draw::BUCKETS);
        std::vector<float> logits((size_t)rows * vocabulary), values(rows * blocks);
        std::vector<u64> weights(rows * draw::BUCKETS);
        int groups = ceil_div(vocabulary, draw::GROUP);
        std::vector<uint4> buckets(rows * groups);
        expect(take(rules.data(), rows) && take(tokens.data(), rows) && take(occurred.data(), occurred.size()) && take(logits.data(), logits.size()), "a case ends early");
        std::vector<draw::Rule> before = rules;
        std::vector<int> inputs = tokens;
        draw::Arguments a = {logits.data(), rules.data(), head[2] ? occurred.data() : nullptr, values.data(), candidates.data(), (u16*)buckets.data(), weights.data(), counts.data(),
                             tokens.data(), positions.data(), history.data(), vocabulary, STEPS, blocks, groups * draw::GROUP};
        launch(blocks, rows, 1, draw::THREADS, [&] { draw::draw_largest(a); });
        launch(head[4], rows, 1, draw::THREADS, [&] { draw::draw_buckets(a); });
        launch(1, rows, 1, draw::CHOOSERS, [&] { draw::draw_choose(a); });
        for (int r = 0; r < rows; r++) {
            int choice = history[5 % STEPS * rows + r];
            expect(choice < 0 || choice == tokens[r], "the device continues with another token than the host receives");
            expect(tokens[r] >= 0 && tokens[r] < vocabulary && positions[r] == 5 && rules[r].draw == before[r].draw + 1, "the next step");
            expect(!head[2] || occurred[r * words + inputs[r] / 32] >> inputs[r] % 32 & 1, "the input token is not marked");
            fwrite(&choice, sizeof choice, 1, stdout);
        }
        for (u64 s : weights) expect(s == 0, "weights of buckets are not zero");
        for (u32 c : counts) expect(c == 0, "counts of buckets are not zero");
    }
}
