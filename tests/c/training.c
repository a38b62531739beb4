/* Training from C: training MODEL_DIR OTHER_MODEL_DIR SCRATCH_DIR [STEPS]. A golden model is trained, saved after half of the steps,
 * resumed to the same bits, exported and loaded, and sessions run on the weights while they are trained. */
#include "check.h"
#include <pthread.h>
#include <stdlib.h>

#define TOKENS 48
#define STEPS 20 /* unless the command says another number */

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
        batches[b] = (NVFP4_MicroBatch){tokens[b], labels[b], TOKENS, lengths, 2, NULL};
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

/* Between two tokens of a generation there may be a step. */
static int32_t step_meanwhile(void *user, const NVFP4_TokenEvent *event)
{
    (void)event;
    step(training_one, user);
    return 0;
}

/* Within a pass there is none. */
static int32_t step_within(void *user, uint64_t done, uint64_t total)
{
    (void)done;
    (void)total;
    refused += NVFP4_trainer_step(training_one, user, 2, sizeof(NVFP4_MicroBatch), NULL, NULL) == NVFP4_BUSY;
    return 0;
}

static int steps_meanwhile;

/* Steps while another thread generates. */
static void *step_on(void *batches)
{
    for (int i = 0; i < steps_meanwhile; i++)
        step(training_one, batches);
    return NULL;
}

/* A session has the logits of a new one with its tokens. */
static void as_new(NVFP4_Model *model, NVFP4_Session *session)
{
    enum { VOCABULARY = 4096 };
    static float own[VOCABULARY], others[VOCABULARY];
    int32_t ids[256];
    size_t length = 0, count = 0;
    NVFP4_Session *other = NULL;
    OK(NVFP4_session_tokens(session, ids, 256, &length));
    OK(NVFP4_session_create(model, NULL, &other));
    OK(NVFP4_session_prefill(other, ids, length, NULL));
    OK(NVFP4_session_logits(session, own, VOCABULARY, &count, NULL));
    OK(NVFP4_session_logits(other, others, VOCABULARY, &count, NULL));
    CHECK(count > 0 && memcmp(own, others, count * sizeof own[0]) == 0);
    OK(NVFP4_session_release(other));
}

static int32_t stop(void *user, uint64_t done, uint64_t total)
{
    (void)done;
    (void)total;
    return ++*(int *)user >= 1;
}

static char *read_all(const char *directory, int steps, size_t *size)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/step-%08d/state.bin", directory, steps);
    FILE *file = fopen(path, "rb");
    char *bytes = malloc(8 << 20);
    *size = file != NULL && bytes != NULL ? fread(bytes, 1, 8 << 20, file) : 0;
    if (file != NULL)
        fclose(file);
    return bytes;
}

/* Rows of a file, with their learned tokens marked. */
static void data_of(const char *model, const char *scratch)
{
    char path[600], text[4096];
    snprintf(path, sizeof path, "%s/training-rows.jsonl", scratch);
    FILE *file = fopen(path, "wb");
    CHECK(file != NULL && fputs("{\"prompt\": \"one\", \"completion\": \"two\"}\n{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, "
                                "{\"role\": \"assistant\", \"content\": \"b\", \"weight\": 0.5}]}\n", file) >= 0);
    fclose(file);
    const char *files[] = {path};
    const size_t lengths_of_files[] = {strlen(path)};
    NVFP4_DataOptions options;
    OK(NVFP4_data_options_init(&options, sizeof options));
    options.window = 64;
    NVFP4_Data *data = NULL;
    OK(NVFP4_data_read(model, strlen(model), files, lengths_of_files, 1, &options, NULL, &data));
    size_t count = 0, length = 0;
    OK(NVFP4_data_count(data, &count));
    CHECK(count == 2);
    int32_t ids[64], next[64];
    float weights[64];
    OK(NVFP4_data_document(data, 1, NULL, NULL, NULL, 0, &length));
    CHECK(length > 4 && length < 64);
    OK(NVFP4_data_document(data, 1, ids, next, weights, 64, &length));
    int learned = 0;
    for (size_t i = 0; i < length; i++) {
        CHECK(next[i] == -1 || (i + 1 < length && next[i] == ids[i + 1]));
        CHECK(next[i] == -1 ? !(weights[i] > 0) : weights[i] > 0.49F && weights[i] < 0.51F);
        learned += next[i] != -1;
    }
    CHECK(learned > 0 && next[length - 1] == -1);
    FAILS(NVFP4_BUFFER_TOO_SMALL, NVFP4_data_document(data, 1, ids, NULL, NULL, 1, &length));
    OK(NVFP4_data_document(data, 0, NULL, NULL, weights, 64, &length));
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_data_document(data, 2, ids, next, weights, 64, &length));
    SAYS("index is 2, and there are 2 documents");
    OK(NVFP4_data_mask(data, 1, text, sizeof text, &length));
    CHECK(strstr(text, "\"line\":2") != NULL && strstr(text, "\"pieces\":[") != NULL);
    OK(NVFP4_data_report(data, text, sizeof text, &length));
    CHECK(strstr(text, "\"rows\":2") != NULL);
    OK(NVFP4_data_release(data));

    options.separator = "x";
    options.separator_length = 1;
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_data_read(model, strlen(model), files, lengths_of_files, 1, &options, NULL, &data));
    SAYS("no file is a text");
    OK(NVFP4_data_options_init(&options, sizeof options));
    options.window = 1 << 20;
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_data_read(model, strlen(model), files, lengths_of_files, 1, &options, NULL, &data));
    SAYS("a window of 1048576 tokens");
}

/* A document that is longer than the context of 256 positions is never trained. */
static void too_long(NVFP4_Trainer *trainer)
{
    static int32_t ids[257], next[257];
    double loss = 0;
    const NVFP4_MicroBatch batch = {ids, next, 257, NULL, 0, NULL};
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_trainer_step(trainer, &batch, 1, sizeof batch, NULL, NULL));
    SAYS("has 257 tokens, and the model's context has 256 positions");
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_trainer_evaluate(trainer, &batch, 1, sizeof batch, 1, NULL, &loss));
}

/* A model learns from the one that it was made from; another vocabulary is refused, and so is a checkpoint without its teacher. */
static void with_a_teacher(const char *path, const char *other, const char *run, const NVFP4_MicroBatch *batches)
{
    NVFP4_TrainerOptions options;
    OK(NVFP4_trainer_options_init(&options, sizeof options));
    options.threads = 1;
    options.rate = 1e-3;
    options.delivered_share = 1;
    options.teacher_temperature = 2;
    options.label_share = 0.25;
    NVFP4_Trainer *trainer = NULL, *again = NULL;
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_trainer_create(path, strlen(path), &options, NULL, &trainer));
    SAYS("no teacher is given");
    options.teacher = other;
    options.teacher_length = strlen(other);
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_trainer_create(path, strlen(path), &options, NULL, &trainer));
    SAYS("the teacher predicts 150 tokens and the model 320");
    options.teacher = path;
    options.teacher_length = strlen(path);
    options.teacher_memory = 7;
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_trainer_create(path, strlen(path), &options, NULL, &trainer));
    SAYS("teacher_memory");
    options.teacher_memory = NVFP4_TEACHER_STREAMED;
    OK(NVFP4_trainer_create(path, strlen(path), &options, NULL, &trainer));
    CHECK(step(trainer, batches).loss > 0);
    double loss = -1, divergence = -1, same = -1;
    OK(NVFP4_trainer_compare(trainer, batches, 2, sizeof *batches, 1, NULL, &loss, &divergence));
    const double alone = loss_of(trainer, batches, 1);
    CHECK(divergence > 0 && loss > 0.9999 * alone && loss < 1.0001 * alone);
    OK(NVFP4_trainer_save(trainer, run, strlen(run), NULL, 0, 1, NULL));
    NVFP4_TrainerOptions device;
    OK(NVFP4_trainer_options_init(&device, sizeof device));
    device.threads = 1;
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_trainer_resume(path, strlen(path), run, strlen(run), &device, NULL, &again));
    SAYS("set teacher");
    device.teacher = path;
    device.teacher_length = strlen(path);
    OK(NVFP4_trainer_resume(path, strlen(path), run, strlen(run), &device, NULL, &again));
    OK(NVFP4_trainer_compare(again, batches, 2, sizeof *batches, 1, NULL, &loss, &same));
    CHECK(same == divergence);
    const NVFP4_StepReport a = step(trainer, batches), b = step(again, batches);
    CHECK(memcmp(&a, &b, sizeof a) == 0);
    OK(NVFP4_trainer_release(trainer));
    OK(NVFP4_trainer_release(again));
}

int main(int argc, char **argv)
{
    const int steps = argc == 5 ? atoi(argv[4]) : STEPS;
    if ((argc != 4 && argc != 5) || steps < 2) {
        fprintf(stderr, "usage: training MODEL_DIR OTHER_MODEL_DIR SCRATCH_DIR [STEPS]\n");
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
    options.steps = (uint64_t)steps;
    options.rate = 5e-3;
    options.threads = 1;
    options.seed = 9;
    NVFP4_Trainer *one = NULL, *two = NULL;
    OK(NVFP4_trainer_create(path, strlen(path), &options, NULL, &one));
    data_of(path, argv[3]);
    too_long(one);
    const double before = loss_of(one, batches, 1);
    for (uint64_t i = 1; i <= (uint64_t)steps / 2; i++) {
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
    for (int i = steps / 2; i < steps; i++) {
        const NVFP4_StepReport a = step(one, batches), b = step(two, batches);
        CHECK(memcmp(&a, &b, sizeof a) == 0);
    }
    OK(NVFP4_trainer_save(one, run, strlen(run), NULL, 0, 1, NULL));
    OK(NVFP4_trainer_save(two, other_run, strlen(other_run), NULL, 0, 1, NULL));
    size_t sizes[2];
    char *states[] = {read_all(run, steps, &sizes[0]), read_all(other_run, steps, &sizes[1])};
    CHECK(sizes[0] > 0 && sizes[0] == sizes[1] && memcmp(states[0], states[1], sizes[0]) == 0);
    const double learned = steps < STEPS ? 0 : 0.5;
    CHECK(loss_of(one, batches, 1) < before - learned && loss_of(one, batches, 0) < before - learned);

    /* The exported model and the live model agree to the last bit. */
    enum { VOCABULARY = 4096 };
    static float live_logits[VOCABULARY], loaded_logits[VOCABULARY];
    NVFP4_Model *live = NULL, *loaded = NULL;
    NVFP4_LoadOptions load;
    OK(NVFP4_load_options_init(&load, sizeof load));
    load.threads = 1;
    OK(NVFP4_trainer_export_directory(one, place, strlen(place), NVFP4_TABLES_AUTO, 0, NULL));
    OK(NVFP4_model_load(place, strlen(place), &load, NULL, &loaded));
    OK(NVFP4_trainer_model(one, NULL, &live));
    logits_of(live, live_logits, VOCABULARY);
    logits_of(loaded, loaded_logits, VOCABULARY);
    CHECK(live_logits[0] < 0 || live_logits[0] > 0);
    CHECK(memcmp(live_logits, loaded_logits, sizeof live_logits) == 0);

    /* Sessions go on with the weights after each step. */
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
    CHECK(result.generated_tokens == 5);
    as_new(live, session);
    NVFP4_CallOptions within;
    OK(NVFP4_call_options_init(&within, sizeof within));
    within.progress = step_within;
    within.user = batches;
    OK(NVFP4_session_prefill(session, tokens[1], 4, &within));
    CHECK(refused > 0);
    as_new(live, session);

    /* A thread steps while others generate, in a queue too. */
    NVFP4_Session *queued = NULL;
    NVFP4_Queue *queue = NULL;
    uint64_t number = 0;
    pthread_t stepping;
    steps_meanwhile = steps / 4;
    OK(NVFP4_session_fork(session, &queued));
    OK(NVFP4_queue_create(live, NULL, &queue));
    generate.max_tokens = 20;
    OK(NVFP4_queue_generate(queue, queued, NULL, 0, &generate, NULL, &number));
    CHECK(pthread_create(&stepping, NULL, step_on, batches) == 0);
    OK(NVFP4_session_generate(session, &generate, NULL, NULL, &result));
    CHECK(result.generated_tokens == 20);
    for (int ended = 0; !ended;) {
        NVFP4_QueueEvent event = {0};
        size_t count = 0;
        OK(NVFP4_queue_wait(queue, &event, sizeof event, 1, -1, &count));
        ended = count == 1 && event.kind == NVFP4_EVENT_END;
        CHECK(!ended || event.status == NVFP4_OK);
    }
    CHECK(pthread_join(stepping, NULL) == 0);
    as_new(live, session);
    as_new(live, queued);
    NVFP4_ModelStatistics statistics = {.struct_size = sizeof statistics};
    OK(NVFP4_model_statistics(live, &statistics));
    CHECK(statistics.recomputed_tokens > 0 && statistics.recomputed_tokens <= statistics.prompt_tokens);
    OK(NVFP4_session_release(queued));
    OK(NVFP4_queue_release(queue));

    /* A cancelled step changes nothing. */
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
    as_new(live, session);

    /* The model outlives its trainer, and its sessions do. */
    NVFP4_Model *same = NULL;
    OK(NVFP4_trainer_model(one, NULL, &same));
    OK(NVFP4_model_release(same));
    step(one, batches);
    OK(NVFP4_trainer_release(one));
    as_new(live, session);
    OK(NVFP4_session_release(session));
    logits_of(live, live_logits, VOCABULARY);
    CHECK(memcmp(live_logits, loaded_logits, sizeof live_logits) != 0);
    OK(NVFP4_model_release(live));
    OK(NVFP4_model_release(loaded));
    OK(NVFP4_trainer_release(two));
    free(states[0]);
    free(states[1]);

    snprintf(run, sizeof run, "%s/training-taught", argv[3]);
    with_a_teacher(path, argv[2], run, batches);
    return report("training");
}
