// kernels/quantize/{amax,quantize,search}.cu on the CPU: the sources as they ship, with their instructions emulated as the PTX ISA
// describes them. Cases come on standard input and results go to standard output, as tests/kernels.rs writes and reads them.
#include "cuda.hpp"

#include "common/values.cuh"
#include "common/note.cuh"
#include "format/encode.cuh"
#include "format/random.cuh"
#include "format/swizzle.cuh"

namespace computing_amax {
#include "quantize/amax.cu"
}
namespace quantizing {
#include "quantize/quantize.cu"
#include "quantize/search.cu"
}

struct Case {
    u32 family;     // quantize, quantize_single or quantize_search
    u32 type;       // f32, f16 or bf16
    u32 rows, row_blocks, padding;  // blocks from the end of a row to the next
    u32 computed;   // whether the global scale is computed from the amax
    float global, largest;
    u32 legacy, saturate, swizzled, rounding, recipe, scale_bytes;
    u64 seed;
};

static void run(const Case& c, const std::vector<uint4>& input, size_t row_bytes, size_t stride) {
    u32 bits = 0, blocks = c.rows * c.row_blocks;
    if (c.computed) {
        u32 vectors = (u32)(row_bytes / 16);
        computing_amax::Arguments m = {(const u8*)input.data(), &bits, stride, (u64)c.rows * vectors, vectors, (int)c.saturate};
        void (*kernels[])(computing_amax::Arguments) = {computing_amax::amax_f32, computing_amax::amax_f16, computing_amax::amax_bf16};
        launch(2, 1, 1, computing_amax::THREADS, [&] { kernels[c.type](m); });
    }
    std::vector<uint2> codes(blocks + 1, uint2{0xeeeeeeee, 0xeeeeeeee});
    // The padding of swizzled scales is zeros.
    std::vector<u8> scales(c.scale_bytes, c.swizzled ? 0 : 0xee);
    u32 report = 0, found = 0;
    u64 first = NOTHING_NOTED;
    quantizing::Arguments a = {};
    a.input = (const u8*)input.data();
    a.codes = (u8*)codes.data();
    a.scales = scales.data();
    a.amax = c.computed ? &bits : nullptr;
    a.report = c.computed ? &report : nullptr;
    if (!c.computed && !c.saturate) a.note = {&first, &found};
    a.stride = stride;
    a.seed = c.seed;
    a.blocks = blocks;
    a.row_blocks = c.row_blocks;
    a.global = c.global;
    a.largest = c.largest;
    a.legacy = (int)c.legacy;
    a.saturate = (int)c.saturate;
    a.swizzled = (int)c.swizzled;
    a.rounding = (int)c.rounding;
    a.recipe = (int)c.recipe;
    using Kernel = void (*)(quantizing::Arguments);
    Kernel kernels[3][3] = {{quantizing::quantize_f32, quantizing::quantize_f16, quantizing::quantize_bf16},
                            {nullptr, quantizing::quantize_single_f16, quantizing::quantize_single_bf16},
                            {quantizing::quantize_search_f32, quantizing::quantize_search_f16, quantizing::quantize_search_bf16}};
    launch(ceil_div((int)blocks, quantizing::THREADS), 1, 1, quantizing::THREADS, [&] { kernels[c.family][c.type](a); });
    u32 status[3] = {found, report, codes[blocks].x == 0xeeeeeeee && codes[blocks].y == 0xeeeeeeee};
    fwrite(status, sizeof status, 1, stdout);
    fwrite(&first, sizeof first, 1, stdout);
    fwrite(codes.data(), 8, blocks, stdout);
    fwrite(scales.data(), 1, scales.size(), stdout);
}

int main() {
    Case c;
    while (fread(&c, sizeof c, 1, stdin) == 1) {
        size_t width = c.type == F32 ? 4 : 2, row_bytes = (size_t)c.row_blocks * BLOCK * width, stride = row_bytes + c.padding * BLOCK * width;
        std::vector<uint4> input(c.rows * stride / 16);
        if (fread(input.data(), stride, c.rows, stdin) != c.rows) return 1;
        run(c, input, row_bytes, stride);
    }
}
