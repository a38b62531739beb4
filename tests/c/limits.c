/* Little memory: limits MODEL_DIR SCRATCH_DIR [STEPS]. Everything that a program does with a model, in a child for each step of a
 * limit from almost nothing to what it takes: a budget, and addresses beside those in use when a call begins (setrlimit). Each
 * call works, or gives a status for want of memory and works with the limit lifted. No child ends by a signal, exits by itself,
 * hangs or writes to standard error.
 *
 * The status is NVFP4_OUT_OF_MEMORY or NVFP4_OVER_BUDGET, also where a system call on a file said ENOMEM. Under valgrind, which
 * needs addresses of its own, there is the budget alone. */
#define _GNU_SOURCE
#include "check.h"
#include <fcntl.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { STEPS = 100, LONG_TEXT = 12000, WORDS = 64, SIDE = 256, SECONDS = 60, ROOM = 1 << 20, SIMULATED = 600000 };

static const char *path;
static char saved[4096], text[LONG_TEXT];
static int32_t tokens[LONG_TEXT];
static float values[SIDE * SIDE];

/* Objects that a child has created so far. */
static NVFP4_Model *model;
static NVFP4_Session *session, *restored, *chatting;
static NVFP4_Tensor *input;
static NVFP4_Grammar *grammar;

static NVFP4_Status load(void)
{
    NVFP4_LoadOptions options;
    NVFP4_Status status = NVFP4_load_options_init(&options, sizeof options);
    if (status != NVFP4_OK)
        return status;
    options.device_type = NVFP4_DEVICE_CPU;
    options.threads = 2;
    return NVFP4_model_load(path, strlen(path), &options, NULL, &model);
}

static NVFP4_Status create(void)
{
    NVFP4_Status status = session != NULL ? NVFP4_OK : NVFP4_session_create(model, NULL, &session);
    return status != NVFP4_OK ? status : NVFP4_session_create(model, NULL, &chatting);
}

static NVFP4_Status tokenize(void)
{
    size_t count = 0;
    NVFP4_Status status = NVFP4_model_tokenize(model, text, LONG_TEXT, 0, NULL, 0, &count);
    return status != NVFP4_OK ? status : NVFP4_model_tokenize(model, text, LONG_TEXT, 0, tokens, LONG_TEXT, &count);
}

static NVFP4_Status detokenize(void)
{
    static char again[8 * LONG_TEXT];
    size_t length = 0;
    return NVFP4_model_detokenize(model, tokens, LONG_TEXT / 8, 0, again, sizeof again, &length);
}

static NVFP4_Status render(void)
{
    static char prompt[4 * LONG_TEXT];
    const NVFP4_Message messages[] = {{"user", 4, text, LONG_TEXT}, {"assistant", 9, "Yes.", 4}, {"user", 4, "Why?", 4}};
    size_t length = 0;
    return NVFP4_model_render_chat(model, messages, 3, sizeof(NVFP4_Message), 1, prompt, sizeof prompt, &length);
}

static NVFP4_Status prefill(void)
{
    return NVFP4_session_prefill(session, tokens, WORDS, NULL);
}

/* Generates up to so many tokens, which `held_to` holds if it is not NULL. */
static NVFP4_Status generate_up_to(size_t max_tokens, const NVFP4_Grammar *held_to)
{
    NVFP4_GenerateOptions options;
    NVFP4_Status status = NVFP4_generate_options_init(&options, sizeof options);
    if (status != NVFP4_OK)
        return status;
    options.max_tokens = max_tokens;
    options.ignore_model_stops = held_to == NULL;
    options.temperature = 0.7f;
    options.top_p = held_to == NULL ? 0.9f : 1;
    options.grammar = held_to;
    return NVFP4_session_generate(session, &options, NULL, NULL, NULL);
}

static NVFP4_Status generate(void)
{
    return generate_up_to(8, NULL);
}

static NVFP4_Status compile(void)
{
    static const char schema[] =
        "{\"type\": \"object\", \"properties\": {\"name\": {\"type\": \"string\", \"maxLength\": 20}, \"age\": {\"type\": \"integer\"},"
        " \"kind\": {\"enum\": [\"one\", \"two\"]}}, \"required\": [\"name\", \"age\", \"kind\"], \"additionalProperties\": false}";
    return NVFP4_grammar_create(model, NULL, schema, strlen(schema), &grammar);
}

static NVFP4_Status hold(void)
{
    return generate_up_to(40, grammar);
}

static NVFP4_Status chat(void)
{
    NVFP4_GenerateOptions options;
    NVFP4_Status status = NVFP4_generate_options_init(&options, sizeof options);
    if (status != NVFP4_OK)
        return status;
    options.max_tokens = 4;
    return NVFP4_session_chat(chatting, "How are you?", 12, NULL, &options, NULL, NULL, NULL);
}

static NVFP4_Status save(void)
{
    return NVFP4_session_save(session, saved, strlen(saved), NULL);
}

static NVFP4_Status restore(void)
{
    return NVFP4_session_restore(model, saved, strlen(saved), NULL, &restored);
}

static NVFP4_Status lend(void)
{
    const int64_t shape[] = {SIDE, SIDE};
    return NVFP4_tensor_from_host(values, shape, 2, NULL, NVFP4_DTYPE_FLOAT32, NULL, NULL, &input);
}

static NVFP4_Status quantize(void)
{
    NVFP4_Tensor *codes = NULL, *scales = NULL;
    float global = 0;
    NVFP4_Status status = NVFP4_tensor_quantize(input, NULL, &codes, &scales, &global);
    if (status == NVFP4_OK) {
        OK(NVFP4_tensor_release(codes));
        OK(NVFP4_tensor_release(scales));
    }
    return status;
}

static NVFP4_Status diagnose(void)
{
    static char report[1 << 16];
    size_t length = 0;
    return NVFP4_diagnose(report, sizeof report, &length);
}

static const struct {
    const char *name;
    NVFP4_Status (*call)(void);
} calls[] = {
    {"diagnose", diagnose}, {"lend a tensor", lend},    {"quantize", quantize}, {"load", load},
    {"create", create},     {"tokenize", tokenize},     {"detokenize", detokenize}, {"render", render},
    {"prefill", prefill},   {"generate", generate},     {"chat", chat},         {"compile", compile},
    {"hold", hold},         {"save", save},             {"restore", restore},
};
enum { CALLS = sizeof calls / sizeof *calls };

static void set_budget(size_t bytes)
{
    OK(NVFP4_memory_set_budget(bytes));
}

/* Addresses in use now, or at most so far. */
static size_t addresses(const char *field)
{
    char line[256];
    size_t kilobytes = 0;
    FILE *status = fopen("/proc/self/status", "r");
    while (status != NULL && fgets(line, sizeof line, status) != NULL)
        if (strncmp(line, field, strlen(field)) == 0)
            kilobytes = strtoul(line + strlen(field), NULL, 10);
    if (status != NULL)
        fclose(status);
    return kilobytes << 10;
}

/* So many more than are in use now; 0 is no limit. */
static void set_addresses(size_t bytes)
{
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_AS, &limit) == 0);
    limit.rlim_cur = bytes == 0 ? limit.rlim_max : addresses("VmSize:") + bytes;
    CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
}

/* Does everything, each call under the limit, which is lifted after a call that fails. Gives how many did. */
static int run(void (*limit)(size_t), size_t bytes)
{
    int failed = 0;
    for (int i = 0; i < CALLS; i++) {
        limit(bytes);
        NVFP4_Status status = calls[i].call();
        if (status == NVFP4_OK)
            continue;
        failed++;
        const int said = NVFP4_last_status() == status && NVFP4_last_error()[0] != '\0';
        char why[256];
        snprintf(why, sizeof why, "%s", NVFP4_last_error());
        limit(0);
        checks++;
        if ((status != NVFP4_OUT_OF_MEMORY && status != NVFP4_OVER_BUDGET) || !said) {
            failures++;
            printf("%s within %zu bytes: %s: %s\n", calls[i].name, bytes, NVFP4_status_name(status), why);
        }
        OK(calls[i].call());
    }
    limit(0);
    OK(NVFP4_session_release(session));
    OK(NVFP4_session_release(chatting));
    OK(NVFP4_session_release(restored));
    OK(NVFP4_model_release(model));
    OK(NVFP4_tensor_release(input));
    return failed;
}

/* Runs `child` in a child process, which has a minute, and returns its output through a pipe. */
static size_t forked(size_t (*child)(size_t), size_t bytes, const char *what)
{
    int pipes[2], errors[2];
    CHECK(pipe(pipes) == 0 && pipe(errors) == 0);
    fflush(stdout);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        dup2(errors[1], 2);
        alarm(SECONDS);
        failures = 0;
        const size_t said = child(bytes);
        fflush(stdout);
        const ssize_t written = write(pipes[1], &said, sizeof said);
        _exit(failures != 0 || written != sizeof said);
    }
    close(pipes[1]);
    close(errors[1]);
    size_t said = 0;
    char complaint[512];
    int status = -1;
    CHECK(waitpid(pid, &status, 0) == pid);
    if (read(pipes[0], &said, sizeof said) != sizeof said)
        said = 0;
    const ssize_t length = read(errors[0], complaint, sizeof complaint - 1);
    complaint[length > 0 ? length : 0] = '\0';
    close(pipes[0]);
    close(errors[0]);
    checks++;
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0 || length != 0) {
        failures++;
        printf("%s of %zu bytes: %s %d; on standard error: %s\n", what, bytes, WIFSIGNALED(status) ? "signal" : "exit",
               WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status), complaint);
    }
    return said;
}

static size_t within_budget(size_t bytes)
{
    return (size_t)run(set_budget, bytes);
}

/* The stack of a process's first thread grows as it is used, and a process that has no addresses left for that is ended. */
static void grow_stack(void)
{
    volatile char room[ROOM / 2];
    for (size_t i = 0; i < sizeof room; i += 512)
        room[i] = 1;
}

static size_t within_addresses(size_t bytes)
{
    grow_stack();
    return (size_t)run(set_addresses, bytes);
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* A child for each step of a limit, up to the need of everything: `needed`, or if that is 0, found by bisection. */
static void steps(int count, size_t needed, const char *what, size_t (*within)(size_t))
{
    const double start = now();
    size_t failed = 0, failing = 0;
    if (needed == 0) {
        needed = (size_t)1 << 30;
        CHECK(forked(within, needed, what) == 0);
        for (size_t half = needed / 2; half >= needed / 64; half /= 2)
            if (forked(within, needed - half, what) == 0)
                needed -= half;
    }
    for (int step = 1; step <= count; step++) {
        const size_t bytes = (size_t)((double)needed * step / count);
        const size_t these = forked(within, bytes < 4096 ? 4096 : bytes, what);
        failed += these;
        failing += these > 0;
    }
    printf("%s: all of it takes %zu bytes; in %d steps to there %zu calls failed, in %zu steps; %.1f s\n", what, needed, count,
           failed, failing, now() - start);
    CHECK(failing > 0);
}

int main(int argc, char **argv)
{
    if (argc != 3 && argc != 4)
        return 2;
    static char out[1 << 16];
    setvbuf(stdout, out, _IOFBF, sizeof out);
    path = argv[1];
    snprintf(saved, sizeof saved, "%s/limits.session", argv[2]);
    for (size_t i = 0; i < LONG_TEXT; i++)
        text[i] = "a quick brown fox jumps over the lazy dog, and "[i % 47];
    for (size_t i = 0; i < SIDE * SIDE; i++)
        values[i] = (float)(i % 1001) / 500.0f - 1.0f;
    const char *preloaded = getenv("LD_PRELOAD");
    const int simulated = preloaded != NULL && strstr(preloaded, "vgpreload") != NULL;
    const int count = simulated ? 2 : argc == 4 ? atoi(argv[3]) : STEPS;

    /* A child takes seconds there. */
    steps(count, simulated ? SIMULATED : 0, "a budget", within_budget);
    if (simulated)
        printf("SKIPPED address spaces: valgrind needs its own\n");
    else
        steps(count, 0, "an address space", within_addresses);
    remove(saved);
    return report("limits");
}
