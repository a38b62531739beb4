/* Tokens per second of NVFP4_trainer_step() with random tokens below 128, on the first GPU or else the CPU.
 *
 *     cargo build --release && cc -O2 -Iinclude benches/c/train.c -Ltarget/release -lNVFP4 -Wl,-rpath,$PWD/target/release -o target/train
 *     target/train MODEL DOCUMENTS TOKENS [recompute|keep] [STEPS] [CONFIG]
 *
 * A step is one batch of documents of equal length; all parameters are trained, in the default form, and gradients are released; or CONFIG
 * says how, as the JSON object that is printed at the end. Prints the median after two steps, the time to make the trainer, and what the
 * trainer holds.
 */
#define _POSIX_C_SOURCE 200809L
#include "measure.h"

#include <stdint.h>
#include <string.h>

static uint64_t state = 1;

static int32_t draw(int32_t below)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int32_t)((state >> 33) % (uint64_t)below);
}

int main(int argc, char **argv)
{
    if (argc < 4) {
        fprintf(stderr, "usage: %s MODEL DOCUMENTS TOKENS [recompute|keep] [STEPS] [CONFIG]\n", argv[0]);
        return 2;
    }
    const size_t documents = strtoul(argv[2], NULL, 10), length = strtoul(argv[3], NULL, 10), rows = documents * length;
    const int steps = argc > 5 ? atoi(argv[5]) : 9;
    if (rows == 0 || steps < 3) {
        fprintf(stderr, "documents and tokens must be positive, and steps at least 3\n");
        return 2;
    }

    NVFP4_TrainerOptions options;
    OK(NVFP4_trainer_options_init(&options, sizeof options));
    options.device_type = NVFP4_DEVICE_AUTO;
    options.release = 1;
    options.clip = NVFP4_CLIP_PREVIOUS;
    options.recompute = argc < 5 || strcmp(argv[4], "keep") != 0;
    options.rate = 1e-5;
    if (argc > 6) {
        OK(NVFP4_trainer_options_init(&options, sizeof options));
        options.device_type = NVFP4_DEVICE_AUTO;
        options.config = argv[6];
        options.config_length = strlen(argv[6]);
    }
    const double start = now();
    NVFP4_Trainer *trainer = NULL;
    OK(NVFP4_trainer_create(argv[1], strlen(argv[1]), &options, NULL, &trainer));
    const double made = now() - start;
    char info[4096];
    size_t info_length = 0;
    OK(NVFP4_trainer_info(trainer, info, sizeof info, &info_length));

    int32_t *tokens = malloc(rows * sizeof *tokens), *labels = malloc(rows * sizeof *labels);
    size_t *lengths = malloc(documents * sizeof *lengths);
    double *times = malloc((size_t)steps * sizeof *times);
    for (size_t i = 0; i < documents; i++) {
        lengths[i] = length;
    }
    for (int step = 0; step < steps; step++) {
        for (size_t i = 0; i < rows; i++) {
            tokens[i] = draw(128);
            labels[i] = draw(128);
        }
        NVFP4_MicroBatch batch = {tokens, labels, rows, lengths, documents, NULL};
        NVFP4_StepReport report = {.struct_size = sizeof report};
        const double begin = now();
        OK(NVFP4_trainer_step(trainer, &batch, 1, sizeof batch, NULL, &report));
        times[step] = now() - begin;
    }
    qsort(times + 2, (size_t)(steps - 2), sizeof *times, ascending);
    const double median = times[2 + (steps - 2) / 2];
    uint64_t bytes = 0, most = 0;
    OK(NVFP4_memory_stats(NVFP4_MEMORY_TOTAL, &bytes, &most));
    printf("%zu x %zu tokens: %.0f ms, %.0f tok/s; made in %.1f s; %.2f GB at most\n%s\n", documents, length, median * 1e3,
           (double)rows / median, made, (double)most / 1e9, info);
    free(tokens), free(labels), free(lengths), free(times);
    return NVFP4_trainer_release(trainer) != NVFP4_OK;
}
