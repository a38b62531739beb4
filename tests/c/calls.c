/* The cost of calls: calls MODEL_DIR. Without a GPU, a call asks the loader for nothing. A call that only reads takes less than 0.2 us,
 * creating and releasing a small tensor takes less than 1 us, and a text is tokenized once for its length and its tokens. Detokenizing
 * and rendering likewise work once. */
#define _GNU_SOURCE
#include "check.h"
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>

static int loads;

/* Stands before the system's, to count. */
void *dlopen(const char *file, int mode)
{
    static void *(*next)(const char *, int);
    loads++;
    if (next == NULL) {
        void *found = dlsym(RTLD_NEXT, "dlopen");
        memcpy(&next, &found, sizeof next);
    }
    return next(file, mode);
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static int rising(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

enum { ROUNDS = 21, CALLS = 2000 };

static void read_length(void *session)
{
    size_t length = 0;
    if (NVFP4_session_length(session, &length) != NVFP4_OK)
        failures++;
}

static void make_tensor(void *user)
{
    const int64_t shape[] = {4, 16};
    NVFP4_Tensor *tensor = NULL;
    (void)user;
    if (NVFP4_tensor_empty(shape, 2, NVFP4_DTYPE_UINT8, NVFP4_DEVICE_CPU, 0, &tensor) != NVFP4_OK ||
        NVFP4_tensor_release(tensor) != NVFP4_OK)
        failures++;
}

/* The median time of a call in microseconds. */
static double microseconds(void (*call)(void *), void *user)
{
    double times[ROUNDS];
    for (int round = 0; round < ROUNDS; round++) {
        const double start = now();
        for (int i = 0; i < CALLS; i++)
            call(user);
        times[round] = (now() - start) / CALLS * 1e6;
    }
    qsort(times, ROUNDS, sizeof *times, rising);
    return times[ROUNDS / 2];
}

/* A text is tokenized once, however its tokens are requested, and again if anything differs. */
static void tokenize(NVFP4_Model *model)
{
    enum { LENGTH = 1 << 17 };
    static char words[LENGTH];
    static int32_t tokens[LENGTH], again[LENGTH];
    double counting[5], filling[5];
    size_t count = 0, number = 0;
    for (int round = 0; round < 5; round++) {
        for (size_t i = 0; i < LENGTH; i++)
            words[i] = "a quick brown fox jumps over the lazy dog, "[(i * (size_t)(round + 1)) % 43];
        const double start = now();
        OK(NVFP4_model_tokenize(model, words, LENGTH, 0, NULL, 0, &count));
        const double counted = now();
        CHECK(count > 0 && count <= LENGTH);
        OK(NVFP4_model_tokenize(model, words, LENGTH, 0, tokens, LENGTH, &number));
        filling[round] = now() - counted;
        counting[round] = counted - start;
        CHECK(number == count);
        OK(NVFP4_model_tokenize(model, words, LENGTH, 0, again, LENGTH, &number));
        CHECK(number == count && memcmp(tokens, again, count * sizeof *tokens) == 0);
    }
    qsort(counting, 5, sizeof *counting, rising);
    qsort(filling, 5, sizeof *filling, rising);
    printf("tokenizing %d bytes: to count %.2f ms, then to fill %.2f ms\n", LENGTH, counting[2] * 1e3, filling[2] * 1e3);
    CHECK(filling[2] < counting[2] / 4);

    /* The count was for another text, or for the same one with its special tokens around it. */
    OK(NVFP4_model_tokenize(model, "one two", 7, 0, NULL, 0, &count));
    OK(NVFP4_model_tokenize(model, "one tow", 7, 0, tokens, LENGTH, &number));
    OK(NVFP4_model_tokenize(model, "one two", 7, 0, NULL, 0, &count));
    CHECK(NVFP4_model_tokenize(model, "one two", 7, 0, again, 1, &count) == NVFP4_BUFFER_TOO_SMALL);
    OK(NVFP4_model_tokenize(model, "one two", 7, 1, again, LENGTH, &number));
    OK(NVFP4_model_tokenize(model, "one two", 7, 0, again, LENGTH, &number));
    CHECK(number == count && memcmp(tokens, again, count * sizeof *tokens) != 0);
}

/* A text that a model gives, asked for its length and then to be filled. */
typedef NVFP4_Status (*Giver)(NVFP4_Model *model, int32_t flag, char *buffer, size_t capacity, size_t *bytes);

enum { MANY = 1 << 13 };
static int32_t ids[MANY];
static NVFP4_Message messages[MANY];
static size_t many;

static NVFP4_Status detokenized(NVFP4_Model *model, int32_t flag, char *buffer, size_t capacity, size_t *bytes)
{
    return NVFP4_model_detokenize(model, ids, many, flag, buffer, capacity, bytes);
}

static NVFP4_Status rendered(NVFP4_Model *model, int32_t flag, char *buffer, size_t capacity, size_t *bytes)
{
    return NVFP4_model_render_chat(model, messages, many, sizeof *messages, flag, buffer, capacity, bytes);
}

/* The result is computed once, and again if anything differs: the input, the flag or the function. */
static void texts(NVFP4_Model *model, const char *name, Giver give, Giver other)
{
    enum { LENGTH = 1 << 20 };
    static char first[LENGTH], again[LENGTH];
    static const char words[] = "what was said before";
    double counting[5], filling[5];
    size_t length = 0, number = 0;
    many = MANY;
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < MANY; i++) {
            const NVFP4_Message message = {i % 2 ? "assistant" : "user", i % 2 ? 9 : 4, words, (size_t)((i + round) % 20)};
            ids[i] = 5 + (i * 7 + round) % 100;
            messages[i] = message;
        }
        const double start = now();
        OK(give(model, 0, NULL, 0, &length));
        const double counted = now();
        CHECK(length > MANY / 2 && length < LENGTH);
        OK(give(model, 0, first, LENGTH, &number));
        filling[round] = now() - counted;
        counting[round] = counted - start;
        CHECK(number == length && strlen(first) == length);
        OK(give(model, 0, again, LENGTH, &number));
        CHECK(number == length && strcmp(first, again) == 0);
    }
    qsort(counting, 5, sizeof *counting, rising);
    qsort(filling, 5, sizeof *filling, rising);
    printf("%s of %d: to count %.2f ms, then to fill %.3f ms\n", name, MANY, counting[2] * 1e3, filling[2] * 1e3);
    CHECK(filling[2] < counting[2] / 10);

    /* A buffer that is too small is a question too; the answer is not that of another input, flag or function. */
    CHECK(give(model, 0, first, 1, &length) == NVFP4_BUFFER_TOO_SMALL);
    many--;
    OK(give(model, 0, first, LENGTH, &number));
    CHECK(number < length);
    OK(give(model, 0, NULL, 0, &length));
    OK(give(model, 1, again, LENGTH, &number));
    OK(give(model, 0, again, LENGTH, &number));
    CHECK(number == length && strcmp(first, again) == 0);
    OK(other(model, 0, NULL, 0, &number));
    OK(give(model, 0, again, LENGTH, &number));
    CHECK(number == length && strcmp(first, again) == 0);
    many = 0;
    OK(give(model, 0, NULL, 0, &length));
    OK(give(model, 0, first, LENGTH, &number));
    CHECK(number == length && strlen(first) == length);
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    NVFP4_Model *model = NULL;
    NVFP4_Session *session = NULL;
    OK(NVFP4_model_load(argv[1], strlen(argv[1]), NULL, NULL, &model));
    OK(NVFP4_session_create(model, NULL, &session));

    loads = 0;
    const double length = microseconds(read_length, session), tensor = microseconds(make_tensor, NULL);
    const int32_t prompt[] = {5, 6, 7};
    OK(NVFP4_session_prefill(session, prompt, 3, NULL));
    CHECK(NVFP4_session_decode(session, -1, NULL) != NVFP4_OK);
    CHECK(loads == 0);
    printf("session_length %.3f us, tensor_empty and tensor_release %.3f us\n", length, tensor);
    /* Under valgrind, a simulated processor takes its time. */
    const char *preloaded = getenv("LD_PRELOAD");
    if (preloaded == NULL || strstr(preloaded, "vgpreload") == NULL) {
        CHECK(length < 0.2);
        CHECK(tensor < 1);
    }

    tokenize(model);
    texts(model, "detokenizing", detokenized, rendered);
    texts(model, "rendering a chat", rendered, detokenized);
    OK(NVFP4_session_release(session));
    OK(NVFP4_model_release(model));
    return report("calls");
}
