/* Train a language model on a text, and let it speak in between.
 *
 *     cc train.c $(pkg-config --cflags --libs nvfp4) -o train
 *     ./train MODEL TEXT OUT [STEPS]
 *
 * Weights and both moments of the optimizer stay in 4 bits. MODEL is any dense model that NVFP4_model_load() takes. Checkpoints go
 * to OUT.run: a run that was stopped goes on from the last one to the same bits. The model goes to the directory OUT.
 */
#include <nvfp4.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Tokens of a document. */
enum { LENGTH = 64 };
/* Documents of a step. */
enum { DOCUMENTS = 4 };

static void check(NVFP4_Status status)
{
    if (status != NVFP4_OK) {
        fprintf(stderr, "%s: %s\n", NVFP4_status_name(status), NVFP4_last_error());
        exit(1);
    }
}

static void *room(size_t bytes)
{
    void *memory = malloc(bytes != 0 ? bytes : 1);
    if (memory == NULL) {
        fprintf(stderr, "out of memory\n");
        exit(1);
    }
    return memory;
}

/* The text as tokens. Only the model's tokenizer is needed for that, and not its layers. */
static int32_t *tokens_of(const char *model_path, const char *text_path, size_t *count)
{
    FILE *file = fopen(text_path, "rb");
    if (file == NULL) {
        perror(text_path);
        exit(1);
    }
    fseek(file, 0, SEEK_END);
    const long end = ftell(file);
    rewind(file);
    const size_t length = end > 0 ? (size_t)end : 0;
    char *text = room(length);
    if (fread(text, 1, length, file) != length) {
        perror(text_path);
        exit(1);
    }
    fclose(file);

    NVFP4_LoadOptions options;
    check(NVFP4_load_options_init(&options, sizeof options));
    options.sampling_only = 1;
    NVFP4_Model *model = NULL;
    check(NVFP4_model_load(model_path, strlen(model_path), &options, NULL, &model));
    check(NVFP4_model_tokenize(model, text, length, 0, NULL, 0, count));
    int32_t *tokens = room(*count * sizeof *tokens);
    check(NVFP4_model_tokenize(model, text, length, 0, tokens, *count, count));
    check(NVFP4_model_release(model));
    free(text);
    return tokens;
}

/* The documents of a step: windows of the text, one after another, and from its beginning again at its end. */
static NVFP4_MicroBatch batch_of(const int32_t *tokens, size_t count, size_t step)
{
    static int32_t inputs[DOCUMENTS * LENGTH], labels[DOCUMENTS * LENGTH];
    static size_t lengths[DOCUMENTS];
    const size_t windows = (count - 1) / LENGTH;
    for (size_t d = 0; d < DOCUMENTS; d++) {
        const int32_t *window = tokens + (step * DOCUMENTS + d) % windows * LENGTH;
        memcpy(inputs + d * LENGTH, window, LENGTH * sizeof *window);
        /* Each token is to give the next one. Where none should count, the label would be -100. */
        memcpy(labels + d * LENGTH, window + 1, LENGTH * sizeof *window);
        lengths[d] = LENGTH;
    }
    const NVFP4_MicroBatch batch = {inputs, labels, DOCUMENTS * LENGTH, lengths, DOCUMENTS, NULL};
    return batch;
}

/* Some words of the model as it is now. It runs on the memory that is trained. */
static void speak(NVFP4_Trainer *trainer, const int32_t *tokens)
{
    NVFP4_Model *model = NULL;
    NVFP4_Session *session = NULL;
    NVFP4_GenerateOptions options;
    char text[1024];
    size_t length = 0;
    check(NVFP4_trainer_model(trainer, NULL, &model));
    check(NVFP4_session_create(model, NULL, &session));
    check(NVFP4_session_prefill(session, tokens, 8, NULL));
    check(NVFP4_generate_options_init(&options, sizeof options));
    options.max_tokens = 24;
    check(NVFP4_session_generate(session, &options, NULL, NULL, NULL));
    check(NVFP4_session_text(session, text, sizeof text, &length));
    printf("    %.*s\n", (int)length, text);
    check(NVFP4_session_release(session));
    check(NVFP4_model_release(model));
}

int main(int argc, char **argv)
{
    if (argc < 4) {
        fprintf(stderr, "usage: train MODEL TEXT OUT [STEPS]\n");
        return 2;
    }
    const char *model = argv[1], *out = argv[3];
    size_t count = 0;
    int32_t *tokens = tokens_of(model, argv[2], &count);
    if (count <= LENGTH) {
        fprintf(stderr, "the text has %zu tokens; it takes more than %d\n", count, LENGTH);
        return 1;
    }
    NVFP4_TrainerOptions options, device;
    check(NVFP4_trainer_options_init(&options, sizeof options));
    check(NVFP4_trainer_options_init(&device, sizeof device));
    options.device_type = device.device_type = NVFP4_DEVICE_AUTO;
    options.steps = argc > 4 ? strtoul(argv[4], NULL, 10) : 100;
    options.rate = 1e-3;
    options.warmup = options.steps / 20;

    char run[4096];
    snprintf(run, sizeof run, "%s.run", out);
    NVFP4_Trainer *trainer = NULL;
    size_t step = 0, length = 0;
    char data[64];
    const NVFP4_Status resumed = NVFP4_trainer_resume(model, strlen(model), run, strlen(run), &device, NULL, &trainer);
    if (resumed == NVFP4_NOT_FOUND) {
        check(NVFP4_trainer_create(model, strlen(model), &options, NULL, &trainer));
    } else {
        check(resumed);
        /* Where the data was: the number of the next step. */
        check(NVFP4_trainer_data(trainer, data, sizeof data, &length));
        step = strtoul(data, NULL, 10);
        fprintf(stderr, "going on after step %zu of %s\n", step, run);
    }
    for (; step < options.steps; step++) {
        const NVFP4_MicroBatch batch = batch_of(tokens, count, step);
        NVFP4_StepReport report = {.struct_size = sizeof report};
        check(NVFP4_trainer_step(trainer, &batch, 1, sizeof batch, NULL, &report));
        const int is_last = step + 1 == options.steps;
        if ((step + 1) % 10 == 0 || is_last) {
            printf("step %zu: loss %.4f, %.1f %% of weights changed\n", step + 1, report.loss, 100 * report.changed);
            speak(trainer, tokens);
            snprintf(data, sizeof data, "%zu", step + 1);
            check(NVFP4_trainer_save(trainer, run, strlen(run), data, strlen(data), 2, NULL));
        }
    }
    check(NVFP4_trainer_export_directory(trainer, out, strlen(out), NVFP4_TABLES_AUTO, 1, NULL));
    check(NVFP4_trainer_release(trainer));
    free(tokens);
    return 0;
}
