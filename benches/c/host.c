/*
 * Speed of a host through nvfp4.h: tokens per second of sequences stepped together, greedy and sampled by each kind of option, of
 * generations, and of threads that each generate in a session of their own.
 *
 *     cc -O2 -I include benches/c/host.c -L target/release -lNVFP4 -lpthread -Wl,-rpath,$PWD/target/release -o target/host
 *     target/host MODEL [--device cpu|cuda:N] [--prompt N] [--tokens N] [--runs N] [--batches 1,8,64] [--threads N] [--json]
 *
 * The model is best a synthetic one (nvfp4 synth), whose answers no stop token ends. Medians of repeated runs after one that is not
 * counted. One measurement is a server's decode loop: every step takes the tokens of the previous one. The other is
 * NVFP4_session_generate() with a callback. benches/host.py compares them with `nvfp4 bench`.
 */
#define _POSIX_C_SOURCE 200809L
#include "measure.h"

#include <pthread.h>
#include <string.h>

enum { MOST_SESSIONS = 256, MOST_RUNS = 101, THREADS = 8 };

static double median(double *values, int count)
{
    qsort(values, (size_t)count, sizeof *values, ascending);
    return (values[(count - 1) / 2] + values[count / 2]) / 2;
}

struct kind {
    const char *name;
    NVFP4_GenerateOptions options;
};

static NVFP4_Model *model;
static NVFP4_Session *sessions[MOST_SESSIONS];
static int32_t *prompt;
static size_t prompt_tokens = 128, gen_tokens = 128;
static int runs = 5;

/* One run: all sequences start over, and are stepped together. */
static double steps(int batch, const NVFP4_GenerateOptions *options)
{
    const NVFP4_GenerateOptions *each[MOST_SESSIONS];
    int32_t next[MOST_SESSIONS];
    for (int i = 0; i < batch; i++) {
        each[i] = options;
        OK(NVFP4_session_reset(sessions[i]));
        prompt[0] = i;
        OK(NVFP4_session_prefill(sessions[i], prompt, prompt_tokens, NULL));
        OK(NVFP4_session_sample(sessions[i], options, &next[i]));
    }
    double start = now();
    for (size_t n = 0; n < gen_tokens; n++)
        OK(NVFP4_session_step_sample(sessions, next, (size_t)batch, each, NULL, next, NULL));
    return (double)gen_tokens * batch / (now() - start);
}

static size_t given;
static int32_t count(void *user, const NVFP4_TokenEvent *event)
{
    (void)user, (void)event;
    given++;
    return 0;
}

/* One generation, timed from its first token. */
static double generation(NVFP4_GenerateOptions options)
{
    NVFP4_GenerationResult result;
    result.struct_size = sizeof result;
    options.max_tokens = gen_tokens + 1;
    options.ignore_model_stops = 1;
    OK(NVFP4_session_reset(sessions[0]));
    OK(NVFP4_session_prefill(sessions[0], prompt, prompt_tokens, NULL));
    given = 0;
    OK(NVFP4_session_generate(sessions[0], &options, count, NULL, &result));
    if (given < result.generated_tokens) {
        fprintf(stderr, "%zu of %zu tokens reached the callback\n", given, result.generated_tokens);
        exit(1);
    }
    return (double)(result.generated_tokens - 1) / result.decode_seconds;
}

static NVFP4_GenerateOptions alone;
static pthread_barrier_t start_line;

static void *generating(void *session)
{
    NVFP4_GenerationResult result;
    result.struct_size = sizeof result;
    pthread_barrier_wait(&start_line);
    OK(NVFP4_session_generate(session, &alone, NULL, NULL, &result));
    return NULL;
}

/* One run: `count` threads generate at the same time. */
static double threads_together(int count, NVFP4_GenerateOptions options)
{
    pthread_t threads[THREADS];
    alone = options;
    alone.max_tokens = gen_tokens;
    alone.ignore_model_stops = 1;
    pthread_barrier_init(&start_line, NULL, (unsigned)count + 1);
    for (int i = 0; i < count; i++) {
        OK(NVFP4_session_reset(sessions[i]));
        OK(NVFP4_session_prefill(sessions[i], prompt, prompt_tokens, NULL));
        if (pthread_create(&threads[i], NULL, generating, sessions[i]) != 0) {
            fprintf(stderr, "a thread could not be started\n");
            exit(1);
        }
    }
    double start = now();
    pthread_barrier_wait(&start_line);
    for (int i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&start_line);
    return (double)gen_tokens * count / (now() - start);
}

int main(int argc, char **argv)
{
    const char *path = NULL, *batches = "1,8,64", *device = "cpu";
    int json = 0, threads = 0;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--device"))
            device = value, i++;
        else if (!strcmp(argv[i], "--prompt"))
            prompt_tokens = (size_t)atol(value), i++;
        else if (!strcmp(argv[i], "--tokens"))
            gen_tokens = (size_t)atol(value), i++;
        else if (!strcmp(argv[i], "--runs"))
            runs = atoi(value), i++;
        else if (!strcmp(argv[i], "--batches"))
            batches = value, i++;
        else if (!strcmp(argv[i], "--threads"))
            threads = atoi(value), i++;
        else if (!strcmp(argv[i], "--json"))
            json = 1;
        else
            path = argv[i];
    }
    if (path == NULL || prompt_tokens < 1 || gen_tokens < 1 || runs < 1 || runs > MOST_RUNS) {
        fprintf(stderr, "usage: host MODEL [--device cpu|cuda:N] [--prompt N] [--tokens N] [--runs N] [--batches N,N] [--threads N] [--json]\n");
        return 2;
    }

    if (threads > 0)
        OK(NVFP4_set_threads(threads));
    NVFP4_LoadOptions load;
    OK(NVFP4_load_options_init(&load, sizeof load));
    /* Every prompt is run as a whole. */
    load.prefix_cache = 0;
    if (!strncmp(device, "cuda", 4)) {
        load.device_type = NVFP4_DEVICE_CUDA;
        load.device_index = device[4] == ':' ? atoi(device + 5) : 0;
    }
    OK(NVFP4_model_load(path, strlen(path), &load, NULL, &model));
    NVFP4_SessionOptions options;
    OK(NVFP4_session_options_init(&options, sizeof options));
    options.context = prompt_tokens + gen_tokens + 2;
    size_t vocabulary;
    OK(NVFP4_model_vocab_size(model, &vocabulary));
    prompt = calloc(prompt_tokens, sizeof *prompt);
    if (prompt == NULL)
        return 1;
    for (size_t i = 0; i < prompt_tokens; i++)
        prompt[i] = (int32_t)((i * 2654435761u + 12345) % vocabulary);

    NVFP4_GenerateOptions greedy;
    OK(NVFP4_generate_options_init(&greedy, sizeof greedy));
    struct kind kinds[] = {{"greedy", greedy}, {"temperature 0.7, top-p 0.9", greedy}, {"temperature 1", greedy},
                           {"top-k 40", greedy}, {"min-p 0.05", greedy}, {"repetition penalty 1.1, greedy", greedy},
                           {"penalty, top-k, top-p and min-p", greedy}};
    enum { KINDS = sizeof kinds / sizeof *kinds };
    kinds[1].options.temperature = 0.7f, kinds[1].options.top_p = 0.9f;
    kinds[2].options.temperature = 1;
    kinds[3].options.temperature = 0.8f, kinds[3].options.top_k = 40;
    kinds[4].options.temperature = 0.8f, kinds[4].options.min_p = 0.05f;
    kinds[5].options.repetition_penalty = 1.1f;
    kinds[6].options.temperature = 0.8f, kinds[6].options.repetition_penalty = 1.1f, kinds[6].options.top_k = 2000,
    kinds[6].options.top_p = 0.9f, kinds[6].options.min_p = 0.01f;

    const char *separator = json ? "[" : "";
    int made = 0;
    for (const char *at = batches; *at != 0;) {
        char *end;
        int batch = (int)strtol(at, &end, 10);
        at = *end == ',' ? end + 1 : end;
        if (batch < 1 || batch > MOST_SESSIONS || (*end != 0 && *end != ',')) {
            fprintf(stderr, "--batches is %s; it takes numbers from 1 to %d\n", batches, MOST_SESSIONS);
            return 2;
        }
        for (; made < batch; made++)
            OK(NVFP4_session_create(model, &options, &sessions[made]));
        /* Every kind takes its turn in each round, so that temporary load on the machine affects all kinds equally. */
        static double stepped[KINDS][MOST_RUNS], generated[KINDS][MOST_RUNS];
        for (int run = -1; run < runs; run++) {
            for (int k = 0; k < KINDS; k++) {
                double rate = steps(batch, &kinds[k].options), generating = batch == 1 ? generation(kinds[k].options) : 0;
                if (run >= 0)
                    stepped[k][run] = rate, generated[k][run] = generating;
            }
        }
        double first = 0;
        for (int k = 0; k < KINDS; k++) {
            double rate = median(stepped[k], runs), generating = median(generated[k], runs);
            first = k == 0 ? rate : first;
            if (json) {
                printf("%s{\"batch\":%d,\"sampling\":\"%s\",\"step_tok_s\":%.1f,\"generate_tok_s\":%.1f}", separator, batch, kinds[k].name, rate, generating);
            } else {
                printf("%3d sequences, %-33s %10.1f tok/s (%.2f of greedy)", batch, kinds[k].name, rate, rate / first);
                if (batch == 1)
                    printf("; generating %.1f", generating);
                printf("\n");
            }
            separator = ",\n";
            fflush(stdout);
        }
    }
    if (made >= THREADS) {
        static double one[MOST_RUNS], all[MOST_RUNS];
        for (int run = -1; run < runs; run++) {
            double single = threads_together(1, greedy), many = threads_together(THREADS, greedy);
            if (run >= 0)
                one[run] = single, all[run] = many;
        }
        double single = median(one, runs), many = median(all, runs);
        if (json)
            printf("%s{\"batch\":%d,\"sampling\":\"threads\",\"step_tok_s\":%.1f,\"generate_tok_s\":%.1f}", separator, THREADS, many, single);
        else
            printf("%d threads that generate: %.1f tok/s in all, where one makes %.1f (%.2f)\n", THREADS, many, single, many / single);
    }
    if (json)
        printf("]\n");
    for (int i = 0; i < made; i++)
        OK(NVFP4_session_release(sessions[i]));
    OK(NVFP4_model_release(model));
    free(prompt);
    return 0;
}
