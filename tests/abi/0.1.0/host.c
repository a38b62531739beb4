/* A program of the time of 0.1.0: host MODEL_DIR SCRATCH_DIR. It is compiled with the header beside it, and run with the library of today.
 *
 * Each struct has the size of that header, and memory behind it that must stay as it is. */
#include "check.h"
#include <math.h>
#include <stdlib.h>

#define K 64
#define ROWS 8

/* A struct, and what a library that takes it for a larger one would read or overwrite. */
#define GUARDED(type, name)                            \
    struct {                                           \
        type it;                                       \
        unsigned char after[64];                       \
    } name;                                            \
    memset(&name, 0xa5, sizeof name)
#define UNTOUCHED(name)                                \
    for (size_t i_ = 0; i_ < sizeof name.after; i_++)  \
    CHECK(name.after[i_] == 0xa5)
/* Options with their defaults. */
#define OPTIONS(type, name, init)                      \
    GUARDED(type, name);                               \
    OK(init(&name.it, sizeof name.it));                \
    CHECK(name.it.struct_size == sizeof name.it);      \
    UNTOUCHED(name)
/* A place for results. */
#define RESULTS(type, name)                            \
    GUARDED(type, name);                               \
    name.it.struct_size = sizeof name.it

typedef struct {
    int tokens, texts, progress;
    size_t bytes;
} Seen;

static int32_t saw(void *user, const NVFP4_TokenEvent *event)
{
    Seen *seen = user;
    CHECK(event->struct_size >= sizeof *event);
    CHECK(event->kind == NVFP4_EVENT_TOKEN || event->kind == NVFP4_EVENT_TEXT);
    seen->tokens += event->kind == NVFP4_EVENT_TOKEN;
    seen->texts += event->kind == NVFP4_EVENT_TEXT;
    seen->bytes += event->text_length;
    return 0;
}

static int32_t progressed(void *user, uint64_t done, uint64_t total)
{
    ((Seen *)user)->progress += done <= total;
    return 0;
}

static int32_t logged(void *user, int32_t level, const char *message, size_t length)
{
    *(int *)user += level <= NVFP4_LOG_DEBUG && message[0] != '\0' && length > 0;
    return 0;
}

static void library(void)
{
    char text[1 << 16];
    size_t length = 0;
    int lines = 0;
    uint64_t token = 0, current = 1, peak = 0;
    OK(NVFP4_check_version(NVFP4_ABI_VERSION, NVFP4_VERSION_NUMBER));
    CHECK(NVFP4_abi_version() == NVFP4_ABI_VERSION && NVFP4_version_number() >= NVFP4_VERSION_NUMBER);
    CHECK(strlen(NVFP4_version()) >= 5 && strcmp(NVFP4_status_name(NVFP4_BUSY), "BUSY") == 0);
    OK(NVFP4_diagnose(text, sizeof text, &length));
    CHECK(length == strlen(text) && strstr(text, "\"abi_version\":1") != NULL);
    OK(NVFP4_log_add(logged, &lines, NVFP4_LOG_DEBUG, NULL, &token));
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_set_threads(-1));
    SAYS("-1");
    OK(NVFP4_log_remove(token));
    CHECK(lines == 1);
    OK(NVFP4_set_threads(1));
    OK(NVFP4_memory_stats(NVFP4_MEMORY_TOTAL, &current, &peak));
    CHECK(current <= peak);
    NVFP4_Error *error = NULL;
    OK(NVFP4_take_error(&error));
    CHECK(NVFP4_error_status(error) == NVFP4_INVALID_ARGUMENT && strstr(NVFP4_error_message(error), "-1") != NULL);
    OK(NVFP4_error_release(error));
}

/* Quantize, multiply in 4 bits both ways, and find the weight by its names; the drop-in functions too. */
static void tensors(void)
{
    static float x[ROWS * K], y[ROWS * ROWS], z[ROWS * ROWS];
    const int64_t shape[] = {ROWS, K}, codes_shape[] = {ROWS, K / 2}, scales_shape[] = {ROWS, K / 16};
    NVFP4_Tensor *input = NULL, *codes = NULL, *scales = NULL, *back = NULL, *product = NULL, *square = NULL;
    NVFP4_Weight *weight = NULL;
    float global_scale = 0;
    for (int i = 0; i < ROWS * K; i++)
        x[i] = sinf(0.7f * (float)i) * (float)(1 + i / K);
    OK(NVFP4_tensor_from_host(x, shape, 2, NULL, NVFP4_DTYPE_FLOAT32, NULL, NULL, &input));

    Seen seen = {0};
    volatile int32_t flag = 0;
    NVFP4_Cancel *cancel = NULL;
    OK(NVFP4_cancel_create(&cancel));
    OPTIONS(NVFP4_CallOptions, call, NVFP4_call_options_init);
    call.it.cancel = cancel;
    call.it.cancel_flag = &flag;
    call.it.progress = progressed;
    call.it.user = &seen;
    OPTIONS(NVFP4_QuantizeOptions, quantize, NVFP4_quantize_options_init);
    CHECK(quantize.it.levels == NVFP4_LEVELS_TWO && quantize.it.rounding == NVFP4_ROUNDING_NEAREST_EVEN && quantize.it.call == NULL);
    quantize.it.recipe = NVFP4_RECIPE_SWEEP;
    quantize.it.call = &call.it;
    OK(NVFP4_tensor_quantize(input, &quantize.it, &codes, &scales, &global_scale));
    CHECK(seen.progress > 0 && global_scale > 0);
    OK(NVFP4_tensor_dequantize(codes, scales, global_scale, NVFP4_SCALES_LINEAR, NVFP4_DTYPE_FLOAT32, &back));
    static float decoded[ROWS * K];
    OK(NVFP4_tensor_copy_as_float(back, decoded, ROWS * K));
    double off = 0, norm = 0;
    for (int i = 0; i < ROWS * K; i++) {
        off += pow(decoded[i] - x[i], 2);
        norm += pow(x[i], 2);
    }
    CHECK(off > 0 && sqrt(off / norm) < 0.12);

    OPTIONS(NVFP4_WeightOptions, options, NVFP4_weight_options_init);
    options.it.device_type = NVFP4_DEVICE_CPU;
    options.it.compute_path = NVFP4_COMPUTE_PATH_KERNEL_ONLY;
    options.it.backend = "nvfp4-kernel";
    options.it.backend_length = 12;
    OK(NVFP4_weight_create_nvfp4(codes, scales, global_scale, &options.it, &weight));
    OK(NVFP4_linear(weight, back, NVFP4_ACTIVATIONS_EXACT, NVFP4_DTYPE_FLOAT32, &product));
    OK(NVFP4_tensor_copy_as_float(product, y, ROWS * ROWS));
    OK(NVFP4_matmul(codes, scales, global_scale, codes, scales, global_scale, NVFP4_SCALES_LINEAR, NVFP4_DTYPE_FLOAT32, &square));
    OK(NVFP4_tensor_copy_as_float(square, z, ROWS * ROWS));
    for (int i = 0; i < ROWS * ROWS; i++)
        CHECK(fabs((double)y[i] - (double)z[i]) <= 1e-5 * norm);

    struct {
        NVFP4_NamedTensor it[2];
        unsigned char after[64];
    } names;
    memset(&names, 0xa5, sizeof names);
    names.it[0] = (NVFP4_NamedTensor){"up.qdata", 8, NVFP4_DTYPE_UINT8, 2, codes_shape};
    names.it[1] = (NVFP4_NamedTensor){"up.scale", 8, NVFP4_DTYPE_FLOAT8_E4M3FN, 2, scales_shape};
    RESULTS(NVFP4_SchemaResult, schema);
    OK(NVFP4_schema_detect(names.it, 2, sizeof names.it[0], NULL, 0, &schema.it));
    UNTOUCHED(schema);
    CHECK(schema.it.struct_size == sizeof schema.it && schema.it.format == NVFP4_FORMAT_NVFP4 && schema.it.tensors == 2);
    CHECK(schema.it.weights == 1 && schema.it.problems == 0 && schema.it.out_features == ROWS && schema.it.in_features == K);

    void *qdata = NULL, *scale = NULL;
    NVFP4_quantize(input, &qdata, &scale);
    CHECK(qdata != NULL && scale != NULL && NVFP4_last_status() == NVFP4_OK);
    flag = 1;
    FAILS(NVFP4_CANCELLED, NVFP4_tensor_quantize(input, &quantize.it, &codes, &scales, &global_scale));
    flag = 0;
    OK(NVFP4_cancel_trigger(cancel));
    FAILS(NVFP4_CANCELLED, NVFP4_tensor_quantize(input, &quantize.it, &codes, &scales, &global_scale));
    NVFP4_Tensor *const used[] = {input, codes, scales, back, product, square, qdata, scale};
    for (int i = 0; i < 8; i++)
        OK(NVFP4_tensor_release(used[i]));
    OK(NVFP4_weight_release(weight));
    OK(NVFP4_cancel_release(cancel));
}

static void sessions(const char *path, const char *scratch)
{
    static char text[4096];
    static float logits[4096];
    char place[512];
    size_t length = 0, count = 0;
    int32_t tokens[64];
    Seen seen = {0};
    NVFP4_Model *model = NULL;
    NVFP4_Session *session = NULL, *twin = NULL;

    /* A copy in 4 bits, and the model from it. */
    snprintf(place, sizeof place, "%s/converted", scratch);
    OPTIONS(NVFP4_CallOptions, call, NVFP4_call_options_init);
    call.it.progress = progressed;
    call.it.user = &seen;
    OPTIONS(NVFP4_ConvertOptions, convert, NVFP4_convert_options_init);
    convert.it.container = NVFP4_CONTAINER_MODELOPT;
    convert.it.replace = 1;
    convert.it.call = &call.it;
    OPTIONS(NVFP4_QuantizeOptions, quantize, NVFP4_quantize_options_init);
    OK(NVFP4_model_convert(path, strlen(path), place, strlen(place), &convert.it, &quantize.it));
    CHECK(seen.progress > 0);
    OPTIONS(NVFP4_LoadOptions, load, NVFP4_load_options_init);
    CHECK(load.it.threads == 0 && load.it.activations == NVFP4_ACTIVATIONS_EXACT && load.it.sampling_only == 0);
    load.it.device_type = NVFP4_DEVICE_CPU;
    load.it.threads = 1;
    load.it.call = &call.it;
    OK(NVFP4_model_load(place, strlen(place), &load.it, &quantize.it, &model));
    OK(NVFP4_model_info(model, text, sizeof text, &length));
    OK(NVFP4_model_tokenize(model, "The sky is blue.", 16, 1, tokens, 64, &count));
    OK(NVFP4_model_detokenize(model, tokens, count, 1, text, sizeof text, &length));
    CHECK(count > 0 && strcmp(text, "The sky is blue.") == 0);
    struct {
        NVFP4_Message it[1];
        unsigned char after[64];
    } message;
    memset(&message, 0xa5, sizeof message);
    message.it[0] = (NVFP4_Message){"user", 4, "Why?", 4};
    OK(NVFP4_model_render_chat(model, message.it, 1, sizeof message.it[0], 1, text, sizeof text, &length));
    CHECK(strstr(text, "Why?") != NULL);

    OPTIONS(NVFP4_SessionOptions, options, NVFP4_session_options_init);
    CHECK(options.it.kv_type == NVFP4_KV_FLOAT16 && options.it.eviction == NVFP4_EVICTION_ERROR && options.it.context == 0);
    options.it.context = 200;
    options.it.eviction = NVFP4_EVICTION_DROP_OLDEST;
    options.it.keep = 4;
    options.it.system = "Be brief.";
    options.it.system_length = 9;
    OK(NVFP4_session_create(model, &options.it, &session));
    OK(NVFP4_session_context(session, &length));
    CHECK(length == 200);

    OPTIONS(NVFP4_GenerateOptions, generate, NVFP4_generate_options_init);
    const int32_t stops[] = {319};
    const char *const words[] = {"never said"};
    const size_t lengths[] = {10};
    generate.it.max_tokens = 6;
    generate.it.ignore_model_stops = 1;
    generate.it.temperature = 0.8f;
    generate.it.seed = 3;
    generate.it.log_probabilities = 1;
    generate.it.stop_tokens = stops;
    generate.it.stop_token_count = 1;
    generate.it.stop_strings = words;
    generate.it.stop_string_lengths = lengths;
    generate.it.stop_string_count = 1;
    generate.it.call = &call.it;
    RESULTS(NVFP4_GenerationResult, result);
    OK(NVFP4_session_prefill(session, tokens, count, &call.it));
    OK(NVFP4_session_fork(session, &twin));
    OK(NVFP4_session_generate(session, &generate.it, saw, &seen, &result.it));
    UNTOUCHED(result);
    CHECK(result.it.struct_size == sizeof result.it && result.it.generated_tokens > 0 && result.it.generated_tokens <= 6);
    CHECK((size_t)seen.tokens == result.it.generated_tokens && result.it.seed == 3 && result.it.decode_seconds >= 0);

    /* The same seed gives the same tokens, step by step too. */
    int32_t drawn[64], again[64], next = -1;
    size_t total = 0;
    OK(NVFP4_session_tokens(session, drawn, 64, &total));
    OK(NVFP4_session_generate(twin, &generate.it, NULL, NULL, &result.it));
    OK(NVFP4_session_tokens(twin, again, 64, &length));
    CHECK(total == length && memcmp(drawn, again, total * sizeof *drawn) == 0);
    OK(NVFP4_session_truncate(twin, count));
    OK(NVFP4_session_sample(twin, &generate.it, &next));
    CHECK(next == drawn[count]);
    const NVFP4_GenerateOptions *each[] = {&generate.it};
    NVFP4_Status status = -1;
    OK(NVFP4_session_step_sample(&twin, &next, 1, each, &call.it, &next, &status));
    CHECK(status == NVFP4_OK && next >= 0);
    OK(NVFP4_session_logits(twin, logits, 4096, &length, &call.it));
    CHECK(length == 320);

    NVFP4_Detokenizer *detokenizer = NULL;
    const char *piece = NULL;
    int32_t finish = NVFP4_FINISH_NONE;
    OK(NVFP4_detokenizer_create(model, tokens, count, &generate.it, &detokenizer));
    OK(NVFP4_detokenizer_push(detokenizer, drawn[count], &piece, &length, &finish));
    OK(NVFP4_detokenizer_finish(detokenizer, &piece, &length));
    OK(NVFP4_detokenizer_release(detokenizer));

    /* A conversation, kept in a file. */
    OPTIONS(NVFP4_ChatOptions, chat, NVFP4_chat_options_init);
    CHECK(chat.it.keep_reasoning == 0 && chat.it.tools == NULL);
    chat.it.variables = "{\"enable_thinking\": false}";
    chat.it.variables_length = strlen(chat.it.variables);
    OK(NVFP4_session_reset(session));
    seen = (Seen){0};
    OK(NVFP4_session_chat(session, "Why?", 4, &chat.it, &generate.it, saw, &seen, &result.it));
    UNTOUCHED(result);
    CHECK(result.it.prompt_tokens > 0 && seen.tokens > 0);
    OK(NVFP4_session_messages(session, text, sizeof text, &length));
    CHECK(strstr(text, "Be brief.") != NULL && strstr(text, "Why?") != NULL);
    snprintf(place, sizeof place, "%s/session", scratch);
    OK(NVFP4_session_save(session, place, strlen(place), &call.it));
    OK(NVFP4_session_release(twin));
    OK(NVFP4_session_restore(model, place, strlen(place), &call.it, &twin));
    OK(NVFP4_session_length(session, &total));
    OK(NVFP4_session_length(twin, &length));
    CHECK(total == length);
    OK(NVFP4_model_release(model));
    OK(NVFP4_session_release(session));
    OK(NVFP4_session_release(twin));
    UNTOUCHED(load);
    UNTOUCHED(options);
    UNTOUCHED(generate);
    UNTOUCHED(chat);
}

static void training(const char *path, const char *scratch)
{
    enum { TOKENS = 24 };
    int32_t tokens[TOKENS], labels[TOKENS];
    const size_t documents[] = {16, 8};
    char place[512];
    double loss = 0, first = 0;
    NVFP4_Trainer *trainer = NULL, *resumed = NULL;
    NVFP4_Model *model = NULL;
    for (int i = 0; i < TOKENS; i++) {
        tokens[i] = (i * 7 + 3) % 250;
        labels[i] = i == 15 || i == TOKENS - 1 ? -100 : (i * 7 + 10) % 250;
    }
    OPTIONS(NVFP4_CallOptions, call, NVFP4_call_options_init);
    OPTIONS(NVFP4_TrainerOptions, options, NVFP4_trainer_options_init);
    CHECK(options.it.steps == 1000 && options.it.weights == NVFP4_WEIGHT_FORM_RESIDUAL4 && options.it.last_blocks == -1);
    options.it.device_type = NVFP4_DEVICE_CPU;
    options.it.threads = 1;
    options.it.schedule = NVFP4_SCHEDULE_CONSTANT;
    options.it.steps = 6;
    options.it.rate = 5e-3;
    options.it.seed = 1;
    OK(NVFP4_trainer_create(path, strlen(path), &options.it, &call.it, &trainer));
    UNTOUCHED(options);
    struct {
        NVFP4_MicroBatch it[1];
        unsigned char after[64];
    } batch;
    memset(&batch, 0xa5, sizeof batch);
    batch.it[0] = (NVFP4_MicroBatch){tokens, labels, TOKENS, documents, 2, NULL};
    OK(NVFP4_trainer_evaluate(trainer, batch.it, 1, sizeof batch.it[0], 1, &call.it, &first));
    RESULTS(NVFP4_StepReport, report);
    for (uint64_t i = 1; i <= 4; i++) {
        OK(NVFP4_trainer_step(trainer, batch.it, 1, sizeof batch.it[0], &call.it, &report.it));
        UNTOUCHED(report);
        CHECK(report.it.struct_size == sizeof report.it && report.it.outcome == NVFP4_STEP_UPDATED && report.it.step == i);
        CHECK(report.it.targets == TOKENS - 2 && report.it.changed > 0);
    }
    OK(NVFP4_trainer_evaluate(trainer, batch.it, 1, sizeof batch.it[0], 1, &call.it, &loss));
    CHECK(loss < first);
    snprintf(place, sizeof place, "%s/run", scratch);
    OK(NVFP4_trainer_save(trainer, place, strlen(place), "{}", 2, 1, &call.it));
    OK(NVFP4_trainer_options_init(&options.it, sizeof options.it));
    OK(NVFP4_trainer_resume(path, strlen(path), place, strlen(place), &options.it, &call.it, &resumed));
    OK(NVFP4_trainer_evaluate(resumed, batch.it, 1, sizeof batch.it[0], 1, &call.it, &first));
    CHECK(memcmp(&first, &loss, sizeof loss) == 0);
    OK(NVFP4_trainer_model(trainer, &call.it, &model));
    OK(NVFP4_model_release(model));
    snprintf(place, sizeof place, "%s/trained", scratch);
    OK(NVFP4_trainer_export_directory(trainer, place, strlen(place), NVFP4_TABLES_NVFP4, 1, &call.it));
    OK(NVFP4_trainer_release(resumed));
    OK(NVFP4_trainer_release(trainer));
}

/* A pass of the host's own: one weight, whose gradient is the weight itself. */
static void optimizer(void)
{
    static float w[ROWS * K], after[ROWS * K];
    const int64_t shape[] = {ROWS, K};
    static uint8_t state[1 << 16];
    size_t length = 0;
    uint64_t changed = 0, delivered = 0, steps = 0, bytes = 0, seed = 0;
    void *weight = NULL, *product = NULL;
    NVFP4_Tensor *tensor = NULL;
    NVFP4_OptimizerState *one = NULL, *two = NULL;
    for (int i = 0; i < ROWS * K; i++)
        w[i] = cosf(0.3f * (float)i);
    OK(NVFP4_tensor_from_host(w, shape, 2, NULL, NVFP4_DTYPE_FLOAT32, NULL, NULL, &tensor));
    OPTIONS(NVFP4_OptimizerOptions, options, NVFP4_optimizer_options_init);
    CHECK(options.it.weights == NVFP4_WEIGHT_FORM_RESIDUAL4 && options.it.fresh_scales == 0);
    OK(NVFP4_optimizer_create(tensor, &options.it, &one));
    UNTOUCHED(options);
    OPTIONS(NVFP4_StepOptions, step, NVFP4_step_options_init);
    CHECK(step.it.gradient_scale == 1 && step.it.rate == 0.001 && step.it.weight_decay == 0.1);
    step.it.rate = 0.05;
    step.it.seed = 4;
    OK(NVFP4_optimizer_step(one, tensor, &step.it, &changed, &delivered));
    UNTOUCHED(step);
    CHECK(changed > 0 && delivered <= changed);
    OK(NVFP4_optimizer_save(one, state, sizeof state, &length));
    OK(NVFP4_optimizer_restore(state, length, NVFP4_DEVICE_CPU, 0, 0, &two));
    OK(NVFP4_optimizer_size(two, &steps, &bytes));
    CHECK(steps == 1 && bytes > 0 && bytes < sizeof w);
    OK(NVFP4_optimizer_weight(two, 0, NVFP4_DTYPE_FLOAT32, &weight));
    OK(NVFP4_tensor_copy_as_float(weight, after, ROWS * K));
    CHECK(fabsf(after[0]) < fabsf(w[0]));
    OK(NVFP4_rounding_seed(1, 2, 3, &seed));
    OK(NVFP4_ste_linear(tensor, weight, &product));
    OK(NVFP4_tensor_release(product));
    OK(NVFP4_tensor_release(weight));
    OK(NVFP4_tensor_release(tensor));
    OK(NVFP4_optimizer_release(one));
    OK(NVFP4_optimizer_release(two));
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: host MODEL_DIR SCRATCH_DIR\n");
        return 2;
    }
    library();
    tensors();
    sessions(argv[1], argv[2]);
    training(argv[1], argv[2]);
    optimizer();
    return report("host");
}
