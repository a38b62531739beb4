// The start of a Mamba-2 layer: a causal convolution of each channel of x, B and C with its bias and SiLU, and the time steps. A warp takes
// 128 channels, or the time steps of 32 heads, in a tile of rows of one segment.
#include "common/ptx.cuh"
#include "recurrent/convolution.cuh"

struct Arguments {
    Convolution conv;
    const float* dt;        // [rows, heads], rows dt_stride apart
    u64 dt_stride;
    const float* a_log;     // [heads]
    const float* dt_bias;   // [heads]
    float* steps;           // [rows, heads]: softplus(dt + dt_bias) within the limits
    float* decay;           // [rows, heads]: the factor of S, exp(-exp(a_log) steps)
    float least;
    float largest;
    int heads;
};

constexpr int WARPS = 4, THREADS = WARPS * WARP;

// Grid: (ceil(units / WARPS), rows / TILE_ROWS + segments), where a warp takes a unit.
extern "C" __global__ void __launch_bounds__(THREADS) mamba_conv(const __grid_constant__ Arguments a) {
    using Unit = Channels<1>;
    const Convolution& c = a.conv;
    Tile tile(c.segments, blockIdx.y);
    if (tile.is_empty()) return;
    int unit = blockIdx.x * WARPS + threadIdx.x / WARP, spans = ceil_div(c.channels, Unit::SPAN);
    if (unit < spans) {
        Unit channels(c, unit * Unit::SPAN, min(Unit::SPAN, c.channels - unit * Unit::SPAN));
        wait_for_earlier_kernels();
        let_later_kernels_start();
        channels.load(c, tile);
#pragma unroll
        for (int i = 0; i < TILE_ROWS; i++) {
            if (tile.first + i >= tile.end) continue;
            float4 y[1];
            channels.convolve(c, i, y);
            channels.store(c, tile, i, y, 1);
        }
        if (tile.is_first()) channels.keep(c, tile);
        return;
    }
    int head = (unit - spans) * WARP + lane_id();
    bool has = head < a.heads;
    float rate = has ? expf(a.a_log[head]) : 0, bias = has ? a.dt_bias[head] : 0;
    wait_for_earlier_kernels();
    let_later_kernels_start();
    if (!has) return;
    for (int row = tile.first; row < min(tile.first + TILE_ROWS, tile.end); row++) {
        size_t to = (size_t)row * a.heads + head;
        float step = fminf(fmaxf(softplus(a.dt[row * a.dt_stride + head] + bias), a.least), a.largest);
        a.steps[to] = step;
        a.decay[to] = expf(-rate * step);
    }
}
