// The weights of a warp's share, streamed through a ring of its own in shared memory. Loads run ahead of the products, across tiles.
#pragma once
#include "common/ptx.cuh"
#include "linear/skinny/schedule.cuh"

template <class C>
class WeightPipeline {
    using Ring = typename C::Ring;
    const Arguments& a;
    const Schedule<C>& schedule;
    // The weights of consecutive steps of a tile, a run, are contiguous.
    int tile, step;             // of the next run
    int left, run = 0;          // steps after this run; steps of it that are not requested yet
    const u8* low = nullptr;    // the first chunk of the next step, 16 bytes further on for each lane
    long long to_high = 0;      // from there to its second chunk: Ring::to_second()

public:
    Ring ring;

    __device__ __forceinline__ WeightPipeline(const Arguments& a, const Schedule<C>& schedule, void* memory)
        : a(a), schedule(schedule), tile(schedule.first_tile + schedule.tile), step(schedule.step), left(schedule.count), ring(memory) {}

    // Requests the weights of the share's next step, if there is one, for the ring's stage at offset `stage`. `waited` says whether the
    // kernel has waited for its predecessor.
    __device__ __forceinline__ void load(u32 stage, bool waited) {
        if (run == 0) {
            if (left == 0) {
                // A warp without a share does so after the products.
                if (C::IS_LONG && waited && (!C::IN_RANGES || schedule.count > 0)) let_later_kernels_start();
                return ring.skip();
            }
            next_run();
        }
        ring.fill(stage, low, to_high);
        low += C::STEP_CHUNKS * CHUNK_BYTES;
        run--;
    }
    // load() for the stages from number `first` to before number `end`.
    __device__ __forceinline__ void load_stages(int first, int end, bool waited) {
#pragma unroll 1
        for (int i = first; i < end; i++) load(Ring::offset(i), waited);
    }

private:
    __device__ __forceinline__ void next_run() {
        int first_step = schedule.first_step, steps = schedule.steps, chunks = a.chunks;
        if (step == steps) {
            step = 0;
            tile++;
        }
        int row;
        const Matrix& w = a.matrix[Schedule<C>::locate(a, tile, row)];
        low = chunk_of(w.chunks, chunks, row, (first_step + step) * C::STEP_K);
        const u8* high = low;
        // The last of an odd number of chunks also replaces the missing chunk after it, whose activations are zeros.
        if (C::TILE == DEEP && first_step + step < (int)((u32)chunks / 2)) high += CHUNK_BYTES;
        if (C::TILE == GATE_UP) high += a.matrix[1].chunks - a.matrix[0].chunks;
        // Beyond the last features, the last ones are repeated; their accumulators are dropped.
        if (C::TILE == TALL && row + CHUNK_ROWS < w.rows) high += chunks * CHUNK_BYTES;
        to_high = Ring::to_second(low, high);
        low += lane_id() * 16;
        int whole = C::TILE == DEEP ? (int)((u32)chunks / 2) - first_step : steps;
        run = min(step < whole ? min(whole, steps) - step : 1, left);
        step += run;
        left -= run;
    }
};
