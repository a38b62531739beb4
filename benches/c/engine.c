/*
 * The rate of threads that generate on one model, each with a session of its own, and of a queue that one thread waits on, beside sessions
 * that are stepped together; and the time for which a prompt of another thread holds them up.
 *
 *     cargo build --release && cc -O2 -pthread -Iinclude benches/c/engine.c -Ltarget/release -lNVFP4 -Wl,-rpath,$PWD/target/release -o target/engine
 *     target/engine MODEL DEVICE PROMPT TOKENS JOINING TUNING COUNT...
 *
 * DEVICE is cpu or cuda:N, and TUNING throughput or latency. For each COUNT, as many sessions have PROMPT tokens and get TOKENS more by their argmax, once by
 * NVFP4_session_step_sample(), once by NVFP4_session_generate() in a thread each, and once by NVFP4_queue_generate(); the prompts are not
 * measured. If JOINING is not 0, the
 * threads then generate again while another session prefills so many tokens, and one more 20 tokens at the same time: printed are the time of
 * the long prompt, beside alone, the time to the first token after the short one, and the
 * longest time between two tokens of a thread and that which 99 of 100 do not exceed, in steps, which are the median before the prompt came.
 */
#define _POSIX_C_SOURCE 200809L
#include "measure.h"

#include <pthread.h>
#include <string.h>

enum { MOST_SESSIONS = 1024, MOST_TOKENS = 1 << 16 };

struct client {
    NVFP4_Session *session;
    size_t tokens;
    pthread_barrier_t *start;
    double *times; /* of its tokens, or NULL */
    size_t count;
};

static uint64_t state = 1;
static NVFP4_Model *model;
static size_t prompt_length;

static int32_t draw(int32_t below)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int32_t)((state >> 33) % (uint64_t)below);
}

static NVFP4_Session *prompted(size_t length)
{
    static int32_t tokens[MOST_TOKENS];
    NVFP4_Session *session;
    for (size_t i = 0; i < length; i++)
        tokens[i] = draw(500);
    OK(NVFP4_session_create(model, NULL, &session));
    OK(NVFP4_session_prefill(session, tokens, length, NULL));
    return session;
}

static int32_t on_token(void *user, const NVFP4_TokenEvent *event)
{
    struct client *client = user;
    if (event->token >= 0 && client->count < client->tokens)
        client->times[client->count++] = now();
    return 0;
}

static void *generate(void *argument)
{
    struct client *client = argument;
    NVFP4_GenerateOptions options;
    NVFP4_GenerationResult result = {.struct_size = sizeof result};
    OK(NVFP4_generate_options_init(&options, sizeof options));
    options.max_tokens = client->tokens;
    options.ignore_model_stops = 1;
    pthread_barrier_wait(client->start);
    OK(NVFP4_session_generate(client->session, &options, client->times ? on_token : NULL, client, &result));
    return NULL;
}

/* Starts a thread for each session, and returns the time when all begin. */
static double start(struct client *clients, pthread_t *threads, size_t count, size_t tokens, pthread_barrier_t *barrier, int timed)
{
    pthread_barrier_init(barrier, NULL, (unsigned)count + 1);
    for (size_t i = 0; i < count; i++) {
        clients[i] = (struct client){prompted(prompt_length), tokens, barrier, timed ? malloc(tokens * sizeof(double)) : NULL, 0};
        pthread_create(&threads[i], NULL, generate, &clients[i]);
    }
    double begun = now();
    pthread_barrier_wait(barrier);
    return begun;
}

static double end(struct client *clients, pthread_t *threads, size_t count)
{
    for (size_t i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    double ended = now();
    for (size_t i = 0; i < count; i++)
        OK(NVFP4_session_release(clients[i].session));
    return ended;
}

static double stepped(size_t count, size_t tokens)
{
    NVFP4_Session *sessions[MOST_SESSIONS];
    int32_t next[MOST_SESSIONS];
    for (size_t i = 0; i < count; i++) {
        sessions[i] = prompted(prompt_length);
        OK(NVFP4_session_sample(sessions[i], NULL, &next[i]));
    }
    double begun = now();
    for (size_t i = 0; i < tokens; i++)
        OK(NVFP4_session_step_sample(sessions, next, count, NULL, NULL, next, NULL));
    double ended = now();
    for (size_t i = 0; i < count; i++)
        OK(NVFP4_session_release(sessions[i]));
    return ended - begun;
}

static double queued(size_t count, size_t tokens)
{
    NVFP4_Session *sessions[MOST_SESSIONS];
    NVFP4_Queue *queue;
    NVFP4_QueueOptions limits;
    NVFP4_GenerateOptions options;
    uint64_t generation;
    OK(NVFP4_queue_options_init(&limits, sizeof limits));
    limits.running = (int32_t)count;
    OK(NVFP4_queue_create(model, &limits, &queue));
    OK(NVFP4_generate_options_init(&options, sizeof options));
    options.max_tokens = tokens;
    options.ignore_model_stops = 1;
    for (size_t i = 0; i < count; i++)
        sessions[i] = prompted(prompt_length);
    double begun = now();
    for (size_t i = 0; i < count; i++)
        OK(NVFP4_queue_generate(queue, sessions[i], NULL, 0, &options, NULL, &generation));
    for (size_t ended = 0; ended < count;) {
        static NVFP4_QueueEvent events[1024];
        size_t taken;
        OK(NVFP4_queue_wait(queue, events, sizeof events[0], 1024, -1, &taken));
        for (size_t i = 0; i < taken; i++)
            ended += events[i].kind == NVFP4_EVENT_END;
    }
    double ended = now();
    for (size_t i = 0; i < count; i++)
        OK(NVFP4_session_release(sessions[i]));
    OK(NVFP4_queue_release(queue));
    return ended - begun;
}

/* Sets a time to that until the first token after a short prompt. */
static void *ask(void *argument)
{
    enum { LENGTH = 20 };
    double begun = now(), *took = argument;
    int32_t tokens[LENGTH], next;
    NVFP4_Session *session;
    for (int32_t i = 0; i < LENGTH; i++)
        tokens[i] = 7 * i + 1;
    OK(NVFP4_session_create(model, NULL, &session));
    OK(NVFP4_session_prefill(session, tokens, LENGTH, NULL));
    OK(NVFP4_session_sample(session, NULL, &next));
    *took = now() - begun;
    OK(NVFP4_session_release(session));
    return NULL;
}

static void joined(size_t count, size_t tokens, size_t joining)
{
    static struct client clients[MOST_SESSIONS];
    static pthread_t threads[MOST_SESSIONS];
    pthread_barrier_t barrier;
    /* Kernels run for the first time before. */
    OK(NVFP4_session_release(prompted(joining)));
    double alone = now();
    OK(NVFP4_session_release(prompted(joining)));
    alone = now() - alone;
    start(clients, threads, count, tokens, &barrier, 1);
    /* A quarter of the tokens come before. */
    while (((volatile struct client *)clients)[0].count < tokens / 4)
        nanosleep(&(struct timespec){0, 100000}, NULL);
    double joins = now(), asked;
    pthread_t other;
    pthread_create(&other, NULL, ask, &asked);
    OK(NVFP4_session_release(prompted(joining)));
    double took = now() - joins;
    pthread_join(other, NULL);
    end(clients, threads, count);
    static double gaps[MOST_TOKENS], beside[MOST_TOKENS];
    size_t before = 0, during = 0;
    for (size_t i = 0; i < count; i++) {
        for (size_t t = 1; t < clients[i].count; t++) {
            double gap = clients[i].times[t] - clients[i].times[t - 1];
            if (clients[i].times[t] < joins && before < MOST_TOKENS)
                gaps[before++] = gap;
            if (clients[i].times[t] >= joins && clients[i].times[t - 1] < joins + took && during < MOST_TOKENS)
                beside[during++] = gap;
        }
        free(clients[i].times);
    }
    qsort(gaps, before, sizeof *gaps, ascending);
    qsort(beside, during, sizeof *beside, ascending);
    double step = before ? gaps[before / 2] : 0, longest = during ? beside[during - 1] : 0, most = during ? beside[during * 99 / 100] : 0;
    printf("  a prompt of %zu that joins takes %.1f ms, alone %.1f (%.2f), one of 20 %.1f; the longest gap is %.1f ms, 99 %% are %.1f, a step %.2f (%.2f, %.2f)\n",
           joining, 1e3 * took, 1e3 * alone, took / alone, 1e3 * asked, 1e3 * longest, 1e3 * most, 1e3 * step, longest / step, most / step);
}

int main(int argc, char **argv)
{
    if (argc < 8) {
        fprintf(stderr, "usage: %s MODEL DEVICE PROMPT TOKENS JOINING TUNING COUNT...\n", argv[0]);
        return 2;
    }
    size_t tokens = strtoul(argv[4], NULL, 10), joining = strtoul(argv[5], NULL, 10);
    prompt_length = strtoul(argv[3], NULL, 10);
    NVFP4_LoadOptions load;
    OK(NVFP4_load_options_init(&load, sizeof load));
    /* Every prompt is run as a whole. */
    load.prefix_cache = 0;
    load.device_type = strncmp(argv[2], "cuda", 4) == 0 ? NVFP4_DEVICE_CUDA : NVFP4_DEVICE_CPU;
    load.device_index = argv[2][4] == ':' ? atoi(argv[2] + 5) : 0;
    load.tuning = strcmp(argv[6], "latency") == 0 ? NVFP4_TUNING_LATENCY : NVFP4_TUNING_THROUGHPUT;
    OK(NVFP4_model_load(argv[1], strlen(argv[1]), &load, NULL, &model));
    for (int i = 7; i < argc; i++) {
        static struct client clients[MOST_SESSIONS];
        static pthread_t threads[MOST_SESSIONS];
        pthread_barrier_t barrier;
        size_t count = strtoul(argv[i], NULL, 10);
        if (count < 1 || count > MOST_SESSIONS)
            return 2;
        stepped(count, 2);
        double together = (double)(count * tokens) / stepped(count, tokens);
        double begun = start(clients, threads, count, tokens, &barrier, 0);
        double apart = (double)(count * tokens) / (end(clients, threads, count) - begun);
        double by_queue = (double)(count * tokens) / queued(count, tokens);
        printf("%zu sessions: stepped %.1f tok/s, by threads %.1f (%.3f), by a queue %.1f (%.3f)\n", count, together, apart, apart / together,
               by_queue, by_queue / together);
        fflush(stdout);
        if (joining > 0)
            joined(count, tokens, joining);
    }
    OK(NVFP4_model_release(model));
    return 0;
}
