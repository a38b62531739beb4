// kernels/optimizer/{adamw,decode}.cu on the CPU: the sources as they ship, with their instructions emulated as the PTX ISA describes them.
// Reads steps from standard input, with matrices row-major, and writes the results to standard output, in the format of tests/kernels.rs.
#include "cuda.hpp"

#include "common/cluster.cuh"
#include "common/ptx.cuh"
#include "common/reduce.cuh"
#include "format/moment.cuh"
#include "format/swizzle.cuh"
#include "optimizer/weights.cuh"

// Its shared memory is that of cuda.hpp.
#include "optimizer/adamw.cu"
namespace decode {
#include "optimizer/decode.cu"
}
namespace packing {
#include "linear/pack.cu"
}

struct Case {
    u32 any, rows, cols, first_row, form, first, second;
    Band band;
    float global;
    u32 clipped;
    float clip;
    Coefficients c;
    u64 rounding, dither, previous;
};
static_assert(sizeof(Case) == 112, "no padding");

// Bytes that are aligned as those of a GPU's allocations, with others around them that nothing may change.
struct Bytes16 {
    static constexpr u8 AROUND = 0xa5;
    std::vector<uint4> pieces;
    size_t size;
    explicit Bytes16(size_t size) : pieces(size / 16 + 3, uint4{0xa5a5a5a5, 0xa5a5a5a5, 0xa5a5a5a5, 0xa5a5a5a5}), size(size) {}
    u8* data() { return (u8*)(pieces.data() + 1); }
    void check() {
        for (size_t i = 0; i < 16; i++) {
            if (data()[-1 - (int)i] != AROUND || data()[size + i] != AROUND) fprintf(stderr, "written beyond %zu bytes\n", size), exit(1);
        }
    }
    static Bytes16 read() {
        u32 size;
        if (fread(&size, 4, 1, stdin) != 1) exit(1);
        Bytes16 bytes(size);
        if (fread(bytes.data(), 1, size, stdin) != size) exit(1);
        return bytes;
    }
    void write() {
        check();
        fwrite(data(), 1, size, stdout);
    }
};

static void run(const Case& c) {
    Bytes16 codes = Bytes16::read(), scales = Bytes16::read(), rest = Bytes16::read();
    Bytes16 fields[6] = {Bytes16::read(), Bytes16::read(), Bytes16::read(), Bytes16::read(), Bytes16::read(), Bytes16::read()};
    Bytes16 gradients = Bytes16::read();
    int chunks = ceil_div((int)c.cols, CHUNK_K), groups = ceil_div((int)c.rows, CHUNK_ROWS), blocks = c.cols / BLOCK;
    bool packed = c.form < DENSE_BF16;
    Bytes16 chunked(packed ? (size_t)groups * chunks * CHUNK_BYTES : 0);
    if (packed) {
        packing::Arguments a = {codes.data(), scales.data(), chunked.data(), 0, (int)c.rows, (int)c.cols, 0};
        launch(ceil_div(chunks * packing::WORDS, packing::THREADS), groups, 1, packing::THREADS, [&] { packing::linear_pack(a); });
    }
    Weights w = {packed ? chunked.data() : codes.data(), rest.data(), c.global, (int)c.form, (int)c.cols, chunks};
    u64 counters[3] = {};
    Arguments a = {};
    a.w = w;
    a.first = {fields[0].data(), fields[1].data(), (float*)fields[2].data(), (int)c.first};
    a.second = {fields[3].data(), fields[4].data(), (float*)fields[5].data(), (int)c.second};
    a.gradients = (const u16*)gradients.data();
    a.rounding = c.rounding, a.dither = c.dither, a.previous = c.previous;
    a.counters = counters;
    a.clip = c.clipped ? &c.clip : nullptr;
    a.c = c.c;
    a.first_row = (int)c.first_row;
    a.rows = (int)(c.rows - c.first_row);
    a.band = c.band;
    // Also more blocks than chunks.
    unsigned splits = 1 + noise() % 4;
    launch(ceil_div(a.rows, CHUNK_ROWS), 1, splits, THREADS, [&] { c.any ? adamw_any(a) : adamw_default(a); }, splits);
    int columns = ceil_div(blocks, decode::THREADS);
    if (packed) {
        decode::UnpackArguments u = {chunked.data(), codes.data(), scales.data(), (int)c.rows, (int)c.cols};
        launch(columns, 2, 1, decode::THREADS, [&] { decode::unpack_matrix(u); });
    }
    chunked.check();
    gradients.check();
    for (Bytes16* part : {&codes, &scales, &rest}) part->write();
    for (Bytes16& field : fields) field.write();
    fwrite(counters, sizeof counters, 1, stdout);
    for (int whole : {1, 0}) {
        Bytes16 out((size_t)c.rows * c.cols * 2);
        decode::Arguments d = {w, (u16*)out.data(), nullptr, 0, (int)c.rows, whole};
        launch(columns, 3, 1, decode::THREADS, [&] { c.form == RESIDUAL4 ? decode::decode_matrix_default(d) : decode::decode_matrix_any(d); });
        out.write();
    }
}

int main() {
    Case c;
    while (fread(&c, sizeof c, 1, stdin) == 1) run(c);
}
