/* A program that was compiled with the header of a later version: newer MODEL_DIR SCRATCH_DIR. Every struct has one more field at its end.
 *
 * Where it is zero, the library does what it knows; where it is not, it refuses to, and says so. */
#include "check.h"

/* Options with their defaults, of which the library does not know the last. */
#define OPTIONS(type, name, init)                                                                            \
    struct {                                                                                                 \
        type known;                                                                                          \
        uint64_t unknown;                                                                                    \
    } name = {.unknown = 1};                                                                                 \
    CHECK(sizeof name == sizeof name.known + 8);                                                             \
    OK(init(&name.known, sizeof name));                                                                      \
    CHECK(name.known.struct_size == sizeof name && name.unknown == 0)

/* The call works, and does not once the unknown field is used; `type` is whose it is. */
#define KNOWN_ALONE(type, unknown, call)                                                                     \
    OK(call);                                                                                                \
    unknown = 7;                                                                                             \
    FAILS(NVFP4_ABI_MISMATCH, call);                                                                         \
    SAYS(type " has a field at byte ");                                                                      \
    SAYS("that this version does not know and that is not zero; update the library");                        \
    unknown = 0

/* Where results go; what the library does not know is zero afterwards. */
#define RESULTS(type, name)                                                                                  \
    struct {                                                                                                 \
        type known;                                                                                          \
        uint64_t unknown;                                                                                    \
    } name = {.known = {.struct_size = sizeof name}, .unknown = 1}

static void tensors(void)
{
    static float x[64];
    const int64_t shape[] = {2, 32}, codes_shape[] = {2, 16};
    char text[256];
    size_t length = 0;
    float global_scale = 0;
    NVFP4_Tensor *input = NULL, *codes = NULL, *scales = NULL;
    for (int i = 0; i < 64; i++)
        x[i] = (float)(i - 20);
    OK(NVFP4_tensor_from_host(x, shape, 2, NULL, NVFP4_DTYPE_FLOAT32, NULL, NULL, &input));
    OPTIONS(NVFP4_CallOptions, call, NVFP4_call_options_init);
    OPTIONS(NVFP4_QuantizeOptions, quantize, NVFP4_quantize_options_init);
    quantize.known.call = &call.known;
    OK(NVFP4_tensor_quantize(input, &quantize.known, &codes, &scales, &global_scale));
    CHECK(codes != NULL && scales != NULL && global_scale > 0);
    OK(NVFP4_tensor_release(codes));
    OK(NVFP4_tensor_release(scales));
    codes = scales = NULL;
    quantize.unknown = 1;
    FAILS(NVFP4_ABI_MISMATCH, NVFP4_tensor_quantize(input, &quantize.known, &codes, &scales, &global_scale));
    snprintf(text, sizeof text, "NVFP4_QuantizeOptions has a field at byte %zu ", sizeof quantize.known);
    SAYS(text);
    quantize.unknown = 0;
    call.unknown = (uint64_t)1 << 56;
    FAILS(NVFP4_ABI_MISMATCH, NVFP4_tensor_quantize(input, &quantize.known, &codes, &scales, &global_scale));
    snprintf(text, sizeof text, "NVFP4_CallOptions has a field at byte %zu ", sizeof call.known + 7);
    SAYS(text);
    CHECK(codes == NULL && scales == NULL);

    OPTIONS(NVFP4_WeightOptions, weight, NVFP4_weight_options_init);
    weight.known.device_type = NVFP4_DEVICE_CPU;
    KNOWN_ALONE("NVFP4_WeightOptions", weight.unknown,
                NVFP4_backend_select(NVFP4_FORMAT_NVFP4, &weight.known, text, sizeof text, &length));

    struct {
        NVFP4_NamedTensor known;
        uint64_t unknown;
    } names[2] = {{{"a", 1, NVFP4_DTYPE_UINT8, 2, codes_shape}, 0}, {{"b.qdata", 7, NVFP4_DTYPE_UINT8, 2, codes_shape}, 0}};
    RESULTS(NVFP4_SchemaResult, schema);
    KNOWN_ALONE("tensors[1]: NVFP4_NamedTensor", names[1].unknown,
                NVFP4_schema_detect(&names->known, 2, sizeof *names, NULL, 0, &schema.known));
    CHECK(schema.known.struct_size == sizeof schema && schema.known.weights == 1 && schema.unknown == 0);

    NVFP4_OptimizerState *state = NULL;
    OPTIONS(NVFP4_OptimizerOptions, options, NVFP4_optimizer_options_init);
    OPTIONS(NVFP4_StepOptions, step, NVFP4_step_options_init);
    KNOWN_ALONE("NVFP4_OptimizerOptions", options.unknown, NVFP4_optimizer_create(input, &options.known, &state));
    KNOWN_ALONE("NVFP4_StepOptions", step.unknown, NVFP4_optimizer_step(state, input, &step.known, NULL, NULL));
    uint64_t steps = 0;
    OK(NVFP4_optimizer_size(state, &steps, NULL));
    CHECK(steps == 1);
    OK(NVFP4_optimizer_release(state));
    OK(NVFP4_tensor_release(input));
}

static void sessions(const char *path, const char *scratch)
{
    const int32_t tokens[] = {5, 6, 7};
    char place[512], text[1024];
    size_t length = 0, count = strlen(path);
    int32_t token = -1;
    NVFP4_Model *model = NULL;
    NVFP4_Session *session = NULL;
    OPTIONS(NVFP4_LoadOptions, load, NVFP4_load_options_init);
    load.known.device_type = NVFP4_DEVICE_CPU;
    KNOWN_ALONE("NVFP4_LoadOptions", load.unknown, NVFP4_model_load(path, count, &load.known, NULL, &model));
    OPTIONS(NVFP4_PlanOptions, wanted, NVFP4_plan_options_init);
    RESULTS(NVFP4_Plan, plan);
    KNOWN_ALONE("NVFP4_PlanOptions", wanted.unknown,
                NVFP4_model_plan(path, count, NULL, NULL, &wanted.known, &plan.known));
    CHECK(plan.known.struct_size == sizeof plan && plan.known.weight_bytes > 0 && plan.unknown == 0);
    RESULTS(NVFP4_ModelStatistics, statistics);
    OK(NVFP4_model_statistics(model, &statistics.known));
    CHECK(statistics.known.struct_size == sizeof statistics && statistics.known.passes == 0 && statistics.unknown == 0);
    snprintf(place, sizeof place, "%s/newer", scratch);
    OPTIONS(NVFP4_ConvertOptions, convert, NVFP4_convert_options_init);
    convert.known.replace = 1;
    KNOWN_ALONE("NVFP4_ConvertOptions", convert.unknown,
                NVFP4_model_convert(path, count, place, strlen(place), &convert.known, NULL));

    struct {
        NVFP4_Message known;
        uint64_t unknown;
    } messages[] = {{{"user", 4, "Why?", 4}, 0}, {{"assistant", 9, "So.", 3}, 0}};
    KNOWN_ALONE("messages[1]: NVFP4_Message", messages[1].unknown,
                NVFP4_model_render_chat(model, &messages->known, 2, sizeof *messages, 1, text, sizeof text, &length));

    OPTIONS(NVFP4_SessionOptions, options, NVFP4_session_options_init);
    KNOWN_ALONE("NVFP4_SessionOptions", options.unknown, NVFP4_session_create(model, &options.known, &session));
    OPTIONS(NVFP4_CallOptions, call, NVFP4_call_options_init);
    KNOWN_ALONE("NVFP4_CallOptions", call.unknown, NVFP4_session_prefill(session, tokens, 3, &call.known));
    OK(NVFP4_session_length(session, &length));
    CHECK(length == 3);
    OPTIONS(NVFP4_GenerateOptions, generate, NVFP4_generate_options_init);
    generate.known.max_tokens = 2;
    KNOWN_ALONE("NVFP4_GenerateOptions", generate.unknown, NVFP4_session_sample(session, &generate.known, &token));
    OPTIONS(NVFP4_ChatOptions, chat, NVFP4_chat_options_init);
    RESULTS(NVFP4_GenerationResult, result);
    OK(NVFP4_session_reset(session));
    KNOWN_ALONE("NVFP4_ChatOptions", chat.unknown,
                NVFP4_session_chat(session, "Why?", 4, &chat.known, &generate.known, NULL, NULL, &result.known));
    CHECK(result.known.struct_size == sizeof result && result.known.prompt_tokens > 0 && result.unknown == 0);
    OK(NVFP4_session_release(session));
    OK(NVFP4_model_release(model));
}

static void training(const char *path)
{
    int32_t tokens[] = {5, 6, 7, 8}, labels[] = {6, 7, 8, -100};
    const size_t lengths[] = {4};
    NVFP4_Trainer *trainer = NULL;
    OPTIONS(NVFP4_TrainerOptions, options, NVFP4_trainer_options_init);
    options.known.device_type = NVFP4_DEVICE_CPU;
    KNOWN_ALONE("NVFP4_TrainerOptions", options.unknown,
                NVFP4_trainer_create(path, strlen(path), &options.known, NULL, &trainer));
    const char *files[] = {"/nowhere.tsv"};
    const size_t file_lengths[] = {12};
    NVFP4_Data *data = NULL;
    OPTIONS(NVFP4_DataOptions, reading, NVFP4_data_options_init);
    reading.unknown = 1;
    FAILS(NVFP4_ABI_MISMATCH, NVFP4_data_read(path, strlen(path), files, file_lengths, 1, &reading.known, NULL, &data));
    struct {
        NVFP4_MicroBatch known;
        uint64_t unknown;
    } batches[2] = {{{tokens, labels, 4, lengths, 1, NULL}, 0}, {{tokens, labels, 4, lengths, 1, NULL}, 0}};
    RESULTS(NVFP4_StepReport, report);
    KNOWN_ALONE("batches[1]: NVFP4_MicroBatch", batches[1].unknown,
                NVFP4_trainer_step(trainer, &batches->known, 2, sizeof *batches, NULL, &report.known));
    CHECK(report.known.struct_size == sizeof report && report.known.step == 1 && report.known.targets == 6 && report.unknown == 0);
    OK(NVFP4_trainer_release(trainer));
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: newer MODEL_DIR SCRATCH_DIR\n");
        return 2;
    }
    tensors();
    sessions(argv[1], argv[2]);
    training(argv[1]);
    return report("newer");
}
