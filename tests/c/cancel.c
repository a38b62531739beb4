/* Ending long calls: cancel MODEL_DIR SCRATCH_DIR. By a handle, a flag of the host and a progress callback; from other threads and
 * from signal handlers; before a call begins, just as it begins, and in the middle of it. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

/* Long enough to be cancelled in the middle. */
enum { LONG = 4000, RACES = 10000, COLUMNS = 4096 };

/* Rows of what is quantized, and tokens of the prompt that reports its progress; fewer under valgrind. */
static int rows = 256, half = LONG / 2;

static NVFP4_Model *model;
static NVFP4_Session *session;
static NVFP4_Cancel *cancel;
static int32_t prompt[LONG];
static volatile sig_atomic_t flag;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static size_t length_of(const NVFP4_Session *of)
{
    size_t length = 0;
    OK(NVFP4_session_length(of, &length));
    return length;
}

static NVFP4_CallOptions call_options(void)
{
    NVFP4_CallOptions call;
    OK(NVFP4_call_options_init(&call, sizeof call));
    CHECK(call.cancel == NULL && call.cancel_flag == NULL && call.progress == NULL && call.user == NULL);
    call.cancel = cancel;
    return call;
}

static int32_t told_values(void *user, uint64_t done, uint64_t total)
{
    uint64_t *told = user;
    CHECK(done >= told[1] && done <= total && total == (uint64_t)(rows * COLUMNS));
    told[0]++;
    told[1] = done;
    return 0;
}

static int32_t stop_at_once(void *user, uint64_t done, uint64_t total)
{
    return user != NULL || done <= total;
}

/* A cancellation before a call begins ends it, for each kind of call. */
static void before(const char *path, const char *scratch)
{
    NVFP4_CallOptions call = call_options();
    NVFP4_LoadOptions load;
    NVFP4_ConvertOptions convert;
    NVFP4_GenerateOptions generate;
    NVFP4_GenerationResult result = {.struct_size = sizeof result};
    char destination[512];
    OK(NVFP4_load_options_init(&load, sizeof load));
    OK(NVFP4_convert_options_init(&convert, sizeof convert));
    OK(NVFP4_generate_options_init(&generate, sizeof generate));
    load.call = convert.call = generate.call = &call;
    snprintf(destination, sizeof destination, "%s/converted", scratch);
    OK(NVFP4_session_reset(session));
    OK(NVFP4_session_prefill(session, prompt, 3, &call));
    for (int kind = 0; kind < 2; kind++) {
        float logits[512];
        int32_t token = 3, triggered = 7;
        size_t count;
        NVFP4_Model *none = NULL;
        NVFP4_Session *restored = NULL;
        call.cancel = kind == 0 ? cancel : NULL;
        call.cancel_flag = kind == 0 ? NULL : &flag;
        CHECK(NVFP4_cancel_trigger(cancel) == NVFP4_OK);
        OK(NVFP4_cancel_is_triggered(cancel, &triggered));
        CHECK(triggered == 1);
        flag = 1;
        FAILS(NVFP4_CANCELLED, NVFP4_model_load(path, strlen(path), &load, NULL, &none));
        FAILS(NVFP4_CANCELLED, NVFP4_model_convert(path, strlen(path), destination, strlen(destination), &convert, NULL));
        FAILS(NVFP4_CANCELLED, NVFP4_session_prefill(session, prompt, 1, &call));
        FAILS(NVFP4_CANCELLED, NVFP4_session_prefill_token_by_token(session, prompt, 1, &call));
        FAILS(NVFP4_CANCELLED, NVFP4_session_decode(session, 3, &call));
        FAILS(NVFP4_CANCELLED, NVFP4_session_logits(session, logits, 512, &count, &call));
        FAILS(NVFP4_CANCELLED, NVFP4_session_sample(session, &generate, &token));
        FAILS(NVFP4_CANCELLED, NVFP4_session_step(&session, &token, 1, &call, NULL));
        FAILS(NVFP4_CANCELLED, NVFP4_session_step_sample(&session, &token, 1, NULL, &call, &token, NULL));
        FAILS(NVFP4_CANCELLED, NVFP4_session_save(session, destination, strlen(destination), &call));
        FAILS(NVFP4_CANCELLED, NVFP4_session_restore(model, destination, strlen(destination), &call, &restored));
        result.finish = 77;
        OK(NVFP4_session_generate(session, &generate, NULL, NULL, &result));
        CHECK(result.finish == NVFP4_FINISH_CANCELLED && result.generated_tokens == 0);
        CHECK(length_of(session) == 3 && none == NULL && restored == NULL);
        flag = 0;
        CHECK(NVFP4_cancel_reset(cancel) == NVFP4_OK);
        OK(NVFP4_session_decode(session, 3, &call));
        OK(NVFP4_session_truncate(session, 3));
    }
}

static void *trigger_after(void *microseconds)
{
    struct timespec wait = {0, 1000L * *(int *)microseconds};
    nanosleep(&wait, NULL);
    return NVFP4_cancel_trigger(cancel) == NVFP4_OK ? NULL : microseconds;
}

static size_t messages_of(char *json, size_t capacity)
{
    size_t length = 0;
    OK(NVFP4_session_messages(session, json, capacity, &length));
    return length;
}

/* A generation or a turn that is cancelled at any time ends in the same way: no error status, the tokens so far, and the session as
 * before if there are none. A set flag and a set handle end it at its start. */
static void generations(void)
{
    NVFP4_CallOptions call = call_options();
    NVFP4_GenerateOptions generate;
    NVFP4_SessionOptions short_ones;
    NVFP4_Session *whole = session;
    char before[4096], after[4096], text[64];
    int without = 0, with = 0;
    OK(NVFP4_session_options_init(&short_ones, sizeof short_ones));
    short_ones.context = 2000;
    OK(NVFP4_session_create(model, &short_ones, &session));
    OK(NVFP4_generate_options_init(&generate, sizeof generate));
    generate.call = &call;
    generate.max_tokens = 40;
    generate.ignore_model_stops = 1;
    NVFP4_GenerationResult result = {.struct_size = sizeof result};
    call.cancel = NULL;
    OK(NVFP4_session_chat(session, "Hi", 2, NULL, &generate, NULL, NULL, &result));
    for (int i = 0; i < 120; i++) {
        int chat = i % 2, delay = i / 2 % 12 * 400;
        size_t start = length_of(session), count, length;
        pthread_t thread;
        void *failed = NULL;
        CHECK((count = messages_of(before, sizeof before)) < sizeof before);
        CHECK(NVFP4_cancel_reset(cancel) == NVFP4_OK);
        flag = i % 24 == 0;
        call.cancel = cancel;
        call.cancel_flag = &flag;
        if (delay == 0)
            CHECK(NVFP4_cancel_trigger(cancel) == NVFP4_OK);
        CHECK(pthread_create(&thread, NULL, trigger_after, &delay) == 0);
        result.finish = 77;
        OK(chat ? NVFP4_session_chat(session, "How far is it?", 14, NULL, &generate, NULL, NULL, &result)
                : NVFP4_session_generate(session, &generate, NULL, NULL, &result));
        CHECK(pthread_join(thread, &failed) == 0 && failed == NULL);
        CHECK(result.finish == NVFP4_FINISH_CANCELLED || (delay > 0 && result.finish == NVFP4_FINISH_LENGTH));
        CHECK(delay > 0 || result.generated_tokens == 0);
        if (result.generated_tokens == 0) {
            CHECK(length_of(session) == start && messages_of(after, sizeof after) == count && memcmp(before, after, count) == 0);
            OK(NVFP4_session_text(session, text, sizeof text, &length));
            CHECK(length == 0);
            without++;
        } else {
            CHECK(length_of(session) >= start + result.generated_tokens);
            with++;
        }
        if (length_of(session) > 1000 || count > sizeof before / 2) {
            OK(NVFP4_session_reset(session));
            call.cancel = NULL;
            flag = 0;
            OK(NVFP4_session_chat(session, "Hi", 2, NULL, &generate, NULL, NULL, &result));
        }
    }
    flag = 0;
    CHECK(without >= 10);
    printf("%d generations were cancelled before a token, %d later or not\n", without, with);
    CHECK(NVFP4_cancel_reset(cancel) == NVFP4_OK);
    OK(NVFP4_session_release(session));
    session = whole;
}

/* Quantizing ends too, and says how many values are done; a model's loading has its own word. */
static void quantizing(const char *path)
{
    NVFP4_CallOptions call = call_options();
    NVFP4_QuantizeOptions quantize;
    NVFP4_Tensor *values = NULL, *codes = NULL, *scales = NULL;
    NVFP4_Model *none = NULL;
    int64_t shape[] = {rows, COLUMNS};
    float *data = calloc((size_t)(rows * COLUMNS), sizeof *data), factor;
    uint64_t told[2] = {0, 0};
    CHECK(data != NULL);
    for (int i = 0; i < rows * COLUMNS; i++)
        data[i] = (float)(i % 1999 - 999);
    OK(NVFP4_tensor_from_host(data, shape, 2, NULL, NVFP4_DTYPE_FLOAT32, NULL, NULL, &values));
    OK(NVFP4_quantize_options_init(&quantize, sizeof quantize));
    CHECK(quantize.call == NULL);
    quantize.recipe = NVFP4_RECIPE_SWEEP;
    quantize.call = &call;
    CHECK(NVFP4_cancel_trigger(cancel) == NVFP4_OK);
    FAILS(NVFP4_CANCELLED, NVFP4_tensor_quantize(values, &quantize, &codes, &scales, &factor));
    CHECK(codes == NULL && scales == NULL);
    CHECK(NVFP4_cancel_reset(cancel) == NVFP4_OK);
    call.progress = told_values;
    call.user = told;
    OK(NVFP4_tensor_quantize(values, &quantize, &codes, &scales, &factor));
    CHECK(told[0] >= 1 && told[1] == (uint64_t)(rows * COLUMNS));
    OK(NVFP4_tensor_release(codes));
    OK(NVFP4_tensor_release(scales));
    call.progress = stop_at_once;
    FAILS(NVFP4_CANCELLED, NVFP4_tensor_quantize(values, &quantize, &codes, &scales, &factor));
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_model_load(path, strlen(path), NULL, &quantize, &none));
    OK(NVFP4_tensor_release(values));
    free(data);
}

static void *trigger(void *delay)
{
    /* Just before the call begins, just after, or at once. */
    for (volatile int i = *(int *)delay; i > 0; i--)
        continue;
    return NVFP4_cancel_trigger(cancel) == NVFP4_OK ? NULL : delay;
}

/* A trigger at any moment around the beginning of a call ends it, or comes when it has ended. */
static void races(int count)
{
    NVFP4_CallOptions call = call_options();
    int lost = 0, ended = 0;
    for (int i = 0; i < count; i++) {
        int delay = i % 100 * 50;
        pthread_t thread;
        void *failed = NULL;
        int32_t triggered;
        CHECK(NVFP4_cancel_reset(cancel) == NVFP4_OK);
        OK(NVFP4_session_reset(session));
        CHECK(pthread_create(&thread, NULL, trigger, &delay) == 0);
        NVFP4_Status status = NVFP4_session_prefill(session, prompt, 2, &call);
        CHECK(pthread_join(thread, &failed) == 0 && failed == NULL);
        ended += status == NVFP4_CANCELLED;
        CHECK(status == NVFP4_OK || status == NVFP4_CANCELLED);
        CHECK(length_of(session) == (status == NVFP4_OK ? 2 : 0));
        /* A handle that is triggered ends whatever comes next. */
        OK(NVFP4_cancel_is_triggered(cancel, &triggered));
        lost += triggered == 0 || NVFP4_session_prefill(session, prompt, 2, &call) != NVFP4_CANCELLED;
    }
    CHECK(lost == 0);
    printf("%d of %d calls were cancelled, %d cancels were lost\n", ended, count, lost);
    CHECK(NVFP4_cancel_reset(cancel) == NVFP4_OK);
}

static void *trigger_later(void *at)
{
    struct timespec wait = {0, 30000000};
    nanosleep(&wait, NULL);
    *(double *)at = now();
    NVFP4_cancel_trigger(cancel);
    return NULL;
}

/* A long prompt ends soon after it is cancelled, as if it had not begun. */
static void in_the_middle(void)
{
    NVFP4_CallOptions call = call_options();
    double slowest = 0, at;
    int in_time = 0;
    for (int i = 0; i < 5; i++) {
        pthread_t thread;
        OK(NVFP4_session_reset(session));
        CHECK(NVFP4_cancel_reset(cancel) == NVFP4_OK);
        CHECK(pthread_create(&thread, NULL, trigger_later, &at) == 0);
        NVFP4_Status status = NVFP4_OK;
        while (status == NVFP4_OK) {
            status = NVFP4_session_prefill(session, prompt, LONG, &call);
            if (status == NVFP4_OK)
                OK(NVFP4_session_reset(session));
        }
        double end = now();
        CHECK(pthread_join(thread, NULL) == 0);
        CHECK(status == NVFP4_CANCELLED && length_of(session) == 0);
        in_time += end - at < 0.05;
        if (end - at > slowest)
            slowest = end - at;
    }
    printf("a prompt ended %.1f ms after its cancelling at the latest\n", 1e3 * slowest);
    /* A machine that is busy with something else may be late now and then. */
    CHECK(in_time >= 3);
    CHECK(NVFP4_cancel_reset(cancel) == NVFP4_OK);
}

typedef struct {
    uint64_t last, total;
    int calls, stop_at;
} Heard;

static int32_t hear(void *user, uint64_t done, uint64_t total)
{
    Heard *heard = user;
    CHECK(done >= heard->last && done <= total);
    heard->last = done;
    heard->total = total;
    return ++heard->calls == heard->stop_at;
}

/* A prompt reports its progress, and ends when the receiver wants it to. */
static void progress(const char *scratch)
{
    Heard heard = {0};
    NVFP4_CallOptions call = call_options();
    NVFP4_GenerateOptions generate;
    NVFP4_GenerationResult result = {.struct_size = sizeof result};
    char path[512];
    call.progress = hear;
    call.user = &heard;
    OK(NVFP4_session_reset(session));
    OK(NVFP4_session_prefill(session, prompt, (size_t)half, &call));
    CHECK(heard.calls > 0 && heard.last == (uint64_t)half && heard.total == heard.last);
    snprintf(path, sizeof path, "%s/heard.session", scratch);
    heard = (Heard){0};
    OK(NVFP4_session_save(session, path, strlen(path), &call));
    CHECK(heard.calls > 0 && heard.last == heard.total && heard.total > (uint64_t)half);
    Heard reading = {0};
    NVFP4_Session *restored = NULL;
    call.user = &reading;
    OK(NVFP4_session_restore(model, path, strlen(path), &call, &restored));
    CHECK(reading.calls > 0 && reading.last == heard.total);
    CHECK(length_of(restored) == (size_t)half);
    OK(NVFP4_session_release(restored));

    /* The callback alone, in the first prompt of a chat. */
    heard = (Heard){.stop_at = 1};
    call.user = &heard;
    OK(NVFP4_generate_options_init(&generate, sizeof generate));
    generate.call = &call;
    generate.max_tokens = 5;
    OK(NVFP4_session_reset(session));
    result.finish = 77;
    OK(NVFP4_session_chat(session, "How far is it?", 14, NULL, &generate, NULL, NULL, &result));
    CHECK(heard.calls == 1 && length_of(session) == 0);
    CHECK(result.finish == NVFP4_FINISH_CANCELLED && result.generated_tokens == 0);
    call.progress = NULL;
    OK(NVFP4_session_chat(session, "How far is it?", 14, NULL, &generate, NULL, NULL, &result));
}

static void on_signal(int signal)
{
    (void)signal;
    flag = 1;
    NVFP4_cancel_trigger(cancel);
}

static void on_storm(int signal)
{
    (void)signal;
    static int other;
    /* Marks come and go, on a handle that no call has. */
    NVFP4_cancel_trigger(cancel);
    if (other++ % 2 == 0)
        NVFP4_cancel_reset(cancel);
}

/* Ctrl-C: a handler ends a prompt by the handle or by the flag. */
static void signals(void)
{
    struct sigaction action = {.sa_handler = on_signal};
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    for (int kind = 0; kind < 2; kind++) {
        NVFP4_CallOptions call = call_options();
        struct itimerval soon = {.it_value = {0, 30000}};
        NVFP4_Status status = NVFP4_OK;
        if (kind == 1) {
            call.cancel = NULL;
            call.cancel_flag = &flag;
        }
        OK(NVFP4_session_reset(session));
        CHECK(setitimer(ITIMER_REAL, &soon, NULL) == 0);
        while (status == NVFP4_OK) {
            status = NVFP4_session_prefill(session, prompt, LONG, &call);
            if (status == NVFP4_OK)
                OK(NVFP4_session_reset(session));
        }
        CHECK(status == NVFP4_CANCELLED && length_of(session) == 0);
        CHECK(NVFP4_cancel_reset(cancel) == NVFP4_OK);
        flag = 0;
    }
    /* A handler 10,000 times a second while handles are made, used and released, which is when locks are held. */
    struct itimerval often = {.it_interval = {0, 100}, .it_value = {0, 100}}, never = {{0, 0}, {0, 0}};
    action.sa_handler = on_storm;
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    CHECK(setitimer(ITIMER_REAL, &often, NULL) == 0);
    double end = now() + 1;
    int rounds = 0;
    while (now() < end) {
        NVFP4_Cancel *more[40];
        for (int i = 0; i < 40; i++)
            OK(NVFP4_cancel_create(&more[i]));
        OK(NVFP4_session_reset(session));
        NVFP4_CallOptions call = call_options();
        call.cancel = more[7];
        OK(NVFP4_session_prefill(session, prompt, 8, &call));
        FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_session_decode(session, -1, &call));
        for (int i = 0; i < 40; i++)
            OK(NVFP4_cancel_release(more[i]));
        rounds++;
    }
    CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0 && rounds > 0);
    /* One may be on its way still. */
    action.sa_handler = SIG_IGN;
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    CHECK(NVFP4_cancel_reset(cancel) == NVFP4_OK);
}

/* A call that runs keeps its handle alive; the number leads nowhere any more. */
static int32_t release_it(void *user, const NVFP4_TokenEvent *event)
{
    NVFP4_Cancel *own = user;
    if (event->kind == NVFP4_EVENT_TOKEN && NVFP4_cancel_trigger(own) == NVFP4_OK)
        OK(NVFP4_cancel_release(own));
    return 0;
}

static void lifetimes(void)
{
    NVFP4_Cancel *own = NULL;
    NVFP4_CallOptions call = call_options();
    NVFP4_GenerateOptions generate;
    NVFP4_GenerationResult result = {.struct_size = sizeof result};
    OK(NVFP4_cancel_create(&own));
    call.cancel = own;
    OK(NVFP4_generate_options_init(&generate, sizeof generate));
    generate.call = &call;
    generate.ignore_model_stops = 1;
    OK(NVFP4_session_reset(session));
    OK(NVFP4_session_prefill(session, prompt, 3, NULL));
    OK(NVFP4_session_generate(session, &generate, release_it, own, &result));
    CHECK(result.finish == NVFP4_FINISH_CANCELLED && result.generated_tokens == 1);
    CHECK(NVFP4_cancel_trigger(own) == NVFP4_INVALID_HANDLE);
    FAILS(NVFP4_INVALID_HANDLE, NVFP4_session_decode(session, 3, &call));
    SAYS("stale");
    /* A wrong handle is no cancel handle. */
    CHECK(NVFP4_cancel_trigger((NVFP4_Cancel *)session) == NVFP4_INVALID_HANDLE);
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        fprintf(stderr, "usage: cancel MODEL_DIR SCRATCH_DIR [RACES]\n");
        return 2;
    }
    const char *preloaded = getenv("LD_PRELOAD");
    if (preloaded != NULL && strstr(preloaded, "vgpreload") != NULL) {
        rows = 16;
        half = 200;
    }
    NVFP4_SessionOptions options;
    OK(NVFP4_model_load(argv[1], strlen(argv[1]), NULL, NULL, &model));
    OK(NVFP4_session_options_init(&options, sizeof options));
    options.context = LONG;
    OK(NVFP4_session_create(model, &options, &session));
    OK(NVFP4_cancel_create(&cancel));
    for (int i = 0; i < LONG; i++)
        prompt[i] = (i * 37 + 11) % 300;
    before(argv[1], argv[2]);
    generations();
    quantizing(argv[1]);
    lifetimes();
    races(argc > 3 ? atoi(argv[3]) : RACES);
    in_the_middle();
    progress(argv[2]);
    signals();
    OK(NVFP4_cancel_release(cancel));
    OK(NVFP4_session_release(session));
    OK(NVFP4_model_release(model));
    return report("cancel");
}
