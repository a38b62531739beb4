/* The stack that a calling thread needs, as nvfp4.h states it: stack MODEL_DIR SCRATCH_DIR. Every long call on a thread that has so
 * much and no more, with everything that is used for the first time. What is used of it is told: the stack is painted before. */
#define _GNU_SOURCE
#include "check.h"
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { STATED = 96 << 10, LONG_TEXT = 20000, ROWS = 256, PAINT = 0xa5, GUARD = 1 << 20 };

static const char *path;
static char saved[4096], text[LONG_TEXT], prompt[4 * LONG_TEXT];
static int32_t tokens[LONG_TEXT];
static float values[ROWS * ROWS];
static NVFP4_Model *model;
static NVFP4_Session *session, *chatting, *restored;

static void load(void)
{
    OK(NVFP4_model_load(path, strlen(path), NULL, NULL, &model));
}

static void tokenize(void)
{
    size_t count = 0;
    OK(NVFP4_model_tokenize(model, text, LONG_TEXT, 1, tokens, LONG_TEXT, &count));
    OK(NVFP4_model_detokenize(model, tokens, count / 4, 0, prompt, sizeof prompt, &count));
}

static void render(void)
{
    const NVFP4_Message messages[] = {
        {"system", 6, "Be brief.", 9}, {"user", 4, text, LONG_TEXT}, {"assistant", 9, "Yes.", 4}, {"user", 4, "Why?", 4}};
    size_t length = 0;
    OK(NVFP4_model_render_chat(model, messages, 4, sizeof(NVFP4_Message), 1, prompt, sizeof prompt, &length));
}

static void prefill(void)
{
    OK(NVFP4_session_create(model, NULL, &session));
    OK(NVFP4_session_prefill(session, tokens, 64, NULL));
}

static int32_t on_token(void *user, const NVFP4_TokenEvent *event)
{
    (void)user;
    (void)event;
    return 0;
}

static void generate(void)
{
    NVFP4_GenerateOptions options;
    OK(NVFP4_generate_options_init(&options, sizeof options));
    options.max_tokens = 8;
    options.ignore_model_stops = 1;
    options.temperature = 0.7f;
    options.top_k = 40;
    options.top_p = 0.9f;
    options.min_p = 0.01f;
    options.repetition_penalty = 1.1f;
    OK(NVFP4_session_generate(session, &options, on_token, NULL, NULL));
}

static void chat(void)
{
    NVFP4_GenerateOptions options;
    size_t length = 0;
    OK(NVFP4_generate_options_init(&options, sizeof options));
    options.max_tokens = 4;
    OK(NVFP4_session_create(model, NULL, &chatting));
    OK(NVFP4_session_chat(chatting, "Hello <|im_end|>", 16, NULL, &options, on_token, NULL, NULL));
    OK(NVFP4_session_chat(chatting, "And you?", 8, NULL, &options, on_token, NULL, NULL));
    OK(NVFP4_session_messages(chatting, prompt, sizeof prompt, &length));
}

static void save(void)
{
    OK(NVFP4_session_save(chatting, saved, strlen(saved), NULL));
}

static void restore(void)
{
    OK(NVFP4_session_restore(model, saved, strlen(saved), NULL, &restored));
}

static void quantize(void)
{
    const int64_t shape[] = {ROWS, ROWS};
    NVFP4_Tensor *input = NULL, *codes = NULL, *scales = NULL;
    NVFP4_QuantizeOptions options;
    float global = 0;
    OK(NVFP4_tensor_from_host(values, shape, 2, NULL, NVFP4_DTYPE_FLOAT32, NULL, NULL, &input));
    OK(NVFP4_quantize_options_init(&options, sizeof options));
    for (int32_t recipe = NVFP4_RECIPE_AMAX; recipe <= NVFP4_RECIPE_SWEEP; recipe++) {
        options.recipe = recipe;
        OK(NVFP4_tensor_quantize(input, &options, &codes, &scales, &global));
        OK(NVFP4_tensor_release(codes));
        OK(NVFP4_tensor_release(scales));
    }
    OK(NVFP4_tensor_release(input));
}

static void multiply(void)
{
    const int64_t shape[] = {ROWS, ROWS};
    const int64_t transposed[] = {ROWS / 2, ROWS}, strides[] = {1, ROWS / 2};
    NVFP4_Tensor *input = NULL, *codes = NULL, *scales = NULL, *other = NULL, *product = NULL;
    OK(NVFP4_tensor_from_host(values, shape, 2, NULL, NVFP4_DTYPE_FLOAT32, NULL, NULL, &input));
    OK(NVFP4_quantize_packed(input, &codes, &scales));
    OK(NVFP4_tensor_view(codes, transposed, 2, strides, 0, &other));
    product = (NVFP4_Tensor *)NVFP4_scaled_mm(codes, other, scales, scales, NVFP4_DTYPE_FLOAT32);
    CHECK(product != NULL);
    OK(NVFP4_tensor_release(product));
    OK(NVFP4_tensor_release(other));
    OK(NVFP4_tensor_release(codes));
    OK(NVFP4_tensor_release(scales));
    OK(NVFP4_tensor_release(input));
}

static void diagnose(void)
{
    size_t length = 0;
    OK(NVFP4_diagnose(prompt, sizeof prompt, &length));
    CHECK(NVFP4_model_load("/nowhere", 8, NULL, NULL, &model) != NVFP4_OK);
}

static void release(void)
{
    OK(NVFP4_session_release(restored));
    OK(NVFP4_session_release(chatting));
    OK(NVFP4_session_release(session));
    OK(NVFP4_model_release(model));
}

static const struct {
    const char *name;
    void (*call)(void);
} calls[] = {
    {"load", load},         {"tokenize", tokenize}, {"render_chat", render}, {"prefill", prefill},
    {"generate", generate}, {"chat", chat},         {"save", save},          {"restore", restore},
    {"quantize", quantize}, {"scaled_mm", multiply}, {"release", release},   {"diagnose", diagnose},
};

static void *on_thread(void *call)
{
    (*(void (**)(void))call)();
    return NULL;
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    path = argv[1];
    snprintf(saved, sizeof saved, "%s/stack.session", argv[2]);
    for (size_t i = 0; i < LONG_TEXT; i++)
        text[i] = "a quick brown fox jumps over the lazy dog, and "[i % 47];
    for (size_t i = 0; i < ROWS * ROWS; i++)
        values[i] = (float)(i % 1001) / 500.0f - 1.0f;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), stated = (STATED + page - 1) / page * page;
    const char *preloaded = getenv("LD_PRELOAD");
    const int simulated = preloaded != NULL && strstr(preloaded, "vgpreload") != NULL;
    size_t most = 0;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        /* Below the stack nothing may be touched, however far past its end a frame reaches. */
        unsigned char *memory = mmap(NULL, GUARD + stated, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(memory != MAP_FAILED && mprotect(memory + GUARD, stated, PROT_READ | PROT_WRITE) == 0);
        unsigned char *stack = memory + GUARD;
        memset(stack, PAINT, stated);
        pthread_attr_t attributes;
        pthread_t thread;
        void (*call)(void) = calls[i].call;
        CHECK(pthread_attr_init(&attributes) == 0 && pthread_attr_setstack(&attributes, stack, stated) == 0);
        printf("%s", calls[i].name);
        fflush(stdout);
        CHECK(pthread_create(&thread, &attributes, on_thread, &call) == 0 && pthread_join(thread, NULL) == 0);
        pthread_attr_destroy(&attributes);
        /* To valgrind, memory below a stack's end does not exist. */
        size_t untouched = simulated ? stated : 0;
        while (untouched < stated && stack[untouched] == PAINT)
            untouched++;
        printf(" %zu%s", stated - untouched, i + 1 < sizeof calls / sizeof *calls ? ", " : "");
        if (stated - untouched > most)
            most = stated - untouched;
        munmap(memory, GUARD + stated);
    }
    printf(": %zu bytes of %d at most, the thread's own among them\n", most, STATED);
    remove(saved);
    return report("stack");
}
