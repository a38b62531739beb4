/* Training from C: training MODEL_DIR OTHER_MODEL_DIR SCRATCH_DIR. A golden model is trained, saved, resumed to the same bits, exported
 * and loaded, and sessions run on the weights while they are trained. */
#include "check.h"
#include <stdlib.h>

#define TOKENS 48
#define STEPS 20

static int32_t tokens[2][TOKENS], labels[2][TOKENS];
static const size_t lengths[] = {30, 18};

/* Each token of a document follows from the one before it. */
static void fill_batches(NVFP4_MicroBatch *batches)
{
    for (int b = 0; b < 2; b++) {
        for (int i = 0; i < TOKENS; i++) {
            tokens[b][i] = i == 0 || i == 30 ? 11 + b : (tokens[b][i - 1] * 7 + 3) % 250;
            labels[b][i] = i == 29 || i == TOKENS - 1 ? -100 : (tokens[b][i] * 7 + 3) % 250;
        }
        batches[b] = (NVFP4_MicroBatch){tokens[b], labels[b], TOKENS, lengths, 2};
    }
}

static NVFP4_StepReport step(NVFP4_Trainer *trainer, const NVFP4_MicroBatch *batches)
{
    NVFP4_StepReport report = {0};
    report.struct_size = sizeof report;
    OK(NVFP4_trainer_step(trainer, batches, 2, sizeof *batches, NULL, &report));
    return report;
}

static double loss_of(NVFP4_Trainer *trainer, const NVFP4_MicroBatch *batches, int32_t delivered)
{
    double loss = -1;
    OK(NVFP4_trainer_evaluate(trainer, batches, 2, sizeof *batches, delivered, NULL, &loss));
    return loss;
}

/* The bits of a session's logits after the first document. */
static void logits_of(NVFP4_Model *model, float *logits, size_t capacity)
{
    NVFP4_Session *session = NULL;
    size_t count = 0;
    OK(NVFP4_session_create(model, NULL, &session));
    OK(NVFP4_session_prefill(session, tokens[0], lengths[0], NULL));
    OK(NVFP4_session_logits(session, logits, capacity, &count, NULL));
    OK(NVFP4_session_release(session));
}

static NVFP4_Trainer *training_one;
static int refused;

/* Within a generation there is no step. */
static int32_t step_meanwhile(void *user, const NVFP4_TokenEvent *event)
{
    (void)event;
    const NVFP4_Status status = NVFP4_trainer_step(training_one, user, 2, sizeof(NVFP4_MicroBatch), NULL, NULL);
    refused += status == NVFP4_BUSY;
    return 0;
}

static int32_t stop(void *user, uint64_t done, uint64_t total)
{
    (void)done;
    (void)total;
    return ++*(int *)user >= 1;
}

static char *read_all(const char *directory, size_t *size)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/step-00000020/state.bin", directory);
    FILE *file = fopen(path, "rb");
    char *bytes = malloc(8 << 20);
    *size = file != NULL && bytes != NULL ? fread(bytes, 1, 8 << 20, file) : 0;
    if (file != NULL)
        fclose(file);
    return bytes;
}

int main(int argc, char **argv)
{
    if (argc != 4) {
        fprintf(stderr, "usage: training MODEL_DIR OTHER_MODEL_DIR SCRATCH_DIR\n");
        return 2;
    }
    const char *path = argv[1];
    char run[512], other_run[512], place[512];
    snprintf(run, sizeof run, "%s/training-run", argv[3]);
    snprintf(other_run, sizeof other_run, "%s/training-other", argv[3]);
    snprintf(place, sizeof place, "%s/training-model", argv[3]);
    NVFP4_MicroBatch batches[2];
    fill_batches(batches);
    NVFP4_TrainerOptions options;
    OK(NVFP4_trainer_options_init(&options, sizeof options));
    options.steps = STEPS;
    options.rate = 5e-3;
    options.threads = 1;
    options.seed = 9;
    NVFP4_Trainer *one = NULL, *two = NULL;
    OK(NVFP4_trainer_create(path, strlen(path), &options, NULL, &one));
    const double before = loss_of(one, batches, 1);
    for (uint64_t i = 1; i <= 10; i++) {
        const NVFP4_StepReport report = step(one, batches);
        CHECK(report.outcome == NVFP4_STEP_UPDATED && report.step == i && report.targets == 2 * (TOKENS - 2));
        CHECK(report.gradient_norm > 0 && report.changed > 0 && report.changed <= 1 && report.rate > 0);
    }
    OK(NVFP4_trainer_save(one, run, strlen(run), "{\"epoch\": 3}", 12, 1, NULL));
    NVFP4_TrainerOptions device;
    OK(NVFP4_trainer_options_init(&device, sizeof device));
    device.threads = 1;
    OK(NVFP4_trainer_resume(path, strlen(path), run, strlen(run), &device, NULL, &two));
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_trainer_resume(argv[2], strlen(argv[2]), run, strlen(run), &device, NULL, &training_one));
    SAYS("lm_head.weight is not in the checkpoint");
    char data[64];
    size_t length = 0;
    OK(NVFP4_trainer_data(two, data, sizeof data, &length));
    CHECK(strcmp(data, "{\"epoch\":3}") == 0);
    for (int i = 10; i < STEPS; i++) {
        const NVFP4_StepReport a = step(one, batches), b = step(two, batches);
        CHECK(memcmp(&a, &b, sizeof a) == 0);
    }
    OK(NVFP4_trainer_save(one, run, strlen(run), NULL, 0, 1, NULL));
    OK(NVFP4_trainer_save(two, other_run, strlen(other_run), NULL, 0, 1, NULL));
    size_t sizes[2];
    char *states[] = {read_all(run, &sizes[0]), read_all(other_run, &sizes[1])};
    CHECK(sizes[0] > 0 && sizes[0] == sizes[1] && memcmp(states[0], states[1], sizes[0]) == 0);
    CHECK(loss_of(one, batches, 1) < before - 0.5 && loss_of(one, batches, 0) < before - 0.5);

    /* What is exported, and the model on live weights, are the same to the last bit. */
    enum { VOCABULARY = 4096 };
    static float live_logits[VOCABULARY], loaded_logits[VOCABULARY];
    NVFP4_Model *live = NULL, *loaded = NULL;
    NVFP4_LoadOptions load;
    OK(NVFP4_load_options_init(&load, sizeof load));
    load.threads = 1;
    OK(NVFP4_trainer_export_directory(one, place, strlen(place), NVFP4_TABLES_NVFP4, 0, NULL));
    OK(NVFP4_model_load(place, strlen(place), &load, NULL, &loaded));
    OK(NVFP4_trainer_model(one, NULL, &live));
    logits_of(live, live_logits, VOCABULARY);
    logits_of(loaded, loaded_logits, VOCABULARY);
    CHECK(live_logits[0] < 0 || live_logits[0] > 0);
    CHECK(memcmp(live_logits, loaded_logits, sizeof live_logits) == 0);

    /* No step while a session runs, and none of its tokens are of other weights. */
    NVFP4_Session *session = NULL;
    NVFP4_GenerateOptions generate;
    NVFP4_GenerationResult result = {0};
    result.struct_size = sizeof result;
    OK(NVFP4_generate_options_init(&generate, sizeof generate));
    generate.max_tokens = 5;
    generate.ignore_model_stops = 1;
    OK(NVFP4_session_create(live, NULL, &session));
    OK(NVFP4_session_prefill(session, tokens[0], lengths[0], NULL));
    training_one = one;
    OK(NVFP4_session_generate(session, &generate, step_meanwhile, batches, &result));
    CHECK(result.generated_tokens == 5 && refused >= 5);

    /* A step that is cancelled is none: the model stays what it was. */
    NVFP4_CallOptions call;
    int asked = 0;
    OK(NVFP4_call_options_init(&call, sizeof call));
    call.progress = stop;
    call.user = &asked;
    int32_t flag = 1;
    call.cancel_flag = &flag;
    FAILS(NVFP4_CANCELLED, NVFP4_trainer_step(one, batches, 2, sizeof *batches, &call, NULL));
    OK(NVFP4_session_decode(session, 5, NULL));
    step(one, batches);
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_session_decode(session, 5, NULL));
    SAYS("ask the trainer for its model again");
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_session_generate(session, &generate, NULL, NULL, NULL));
    OK(NVFP4_session_release(session));

    /* The model outlives its trainer. */
    OK(NVFP4_model_release(live));
    OK(NVFP4_trainer_model(one, NULL, &live));
    OK(NVFP4_trainer_release(one));
    logits_of(live, live_logits, VOCABULARY);
    CHECK(memcmp(live_logits, loaded_logits, sizeof live_logits) != 0);
    OK(NVFP4_model_release(live));
    OK(NVFP4_model_release(loaded));
    OK(NVFP4_trainer_release(two));
    free(states[0]);
    free(states[1]);
    return report("training");
}
