/*
 * How soon a session begins that shares its prompt with another one, what memory the two take, and how long a fork takes.
 *
 *     cargo build --release && cc -O2 -Iinclude benches/c/prefixes.c -Ltarget/release -lNVFP4 -Wl,-rpath,$PWD/target/release -o target/prefixes
 *     target/prefixes MODEL DEVICE SHARED OWN SESSIONS HELD
 *
 * DEVICE is cpu or cuda:N. A first session runs SHARED tokens, and so many SESSIONS the same tokens with OWN further ones behind them, each from
 * its creation to its first token. Then a session of HELD tokens is forked. Each time is the median, and the longest in parentheses.
 */
#define _POSIX_C_SOURCE 200809L
#include "measure.h"

#include <string.h>

enum { MOST_SESSIONS = 1024, MOST_TOKENS = 1 << 17, FORKS = 100 };

static NVFP4_Model *model;
static int32_t tokens[MOST_TOKENS];
static double times[MOST_SESSIONS];

static void draw(size_t from, size_t to)
{
    static uint64_t state = 1;
    for (size_t i = from; i < to; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        tokens[i] = (int32_t)((state >> 33) % 300);
    }
}

static NVFP4_Session *prompted(size_t count)
{
    NVFP4_Session *session;
    int32_t token;
    OK(NVFP4_session_create(model, NULL, &session));
    OK(NVFP4_session_prefill(session, tokens, count, NULL));
    OK(NVFP4_session_sample(session, NULL, &token));
    return session;
}

static uint64_t blocks_used(void)
{
    NVFP4_ModelStatistics now = {.struct_size = sizeof now};
    OK(NVFP4_model_statistics(model, &now));
    return now.blocks_used;
}

static void print(const char *what, size_t count)
{
    qsort(times, count, sizeof *times, ascending);
    printf("%s: %.3f ms (%.3f)\n", what, 1e3 * times[count / 2], 1e3 * times[count - 1]);
}

int main(int argc, char **argv)
{
    static NVFP4_Session *sessions[MOST_SESSIONS];
    if (argc != 7) {
        fprintf(stderr, "usage: %s MODEL DEVICE SHARED OWN SESSIONS HELD\n", argv[0]);
        return 2;
    }
    size_t shared = strtoul(argv[3], NULL, 10), own = strtoul(argv[4], NULL, 10), count = strtoul(argv[5], NULL, 10);
    size_t held = strtoul(argv[6], NULL, 10);
    if (count < 1 || count > MOST_SESSIONS || shared + own > MOST_TOKENS || held > MOST_TOKENS)
        return 2;
    NVFP4_LoadOptions load;
    OK(NVFP4_load_options_init(&load, sizeof load));
    load.device_type = strncmp(argv[2], "cuda", 4) == 0 ? NVFP4_DEVICE_CUDA : NVFP4_DEVICE_CPU;
    load.device_index = argv[2][4] == ':' ? atoi(argv[2] + 5) : 0;
    OK(NVFP4_model_load(argv[1], strlen(argv[1]), &load, NULL, &model));

    draw(0, shared);
    /* The first prompt of a process compiles kernels and chooses algorithms: one of other tokens runs before those that are measured. */
    tokens[0] = 301;
    OK(NVFP4_session_release(prompted(shared)));
    tokens[0] = 302;
    double begun = now();
    NVFP4_Session *first = prompted(shared);
    printf("the first session: %.3f ms\n", 1e3 * (now() - begun));
    uint64_t of_one = blocks_used();
    for (size_t i = 0; i < count; i++) {
        draw(shared, shared + own);
        begun = now();
        sessions[i] = prompted(shared + own);
        times[i] = now() - begun;
    }
    double second = times[0];
    printf("the second: %.3f ms\n", 1e3 * second);
    print("all that share", count);
    printf("blocks: %llu of the first, %llu of all %zu\n", (unsigned long long)of_one, (unsigned long long)blocks_used(), count + 1);
    for (size_t i = 0; i < count; i++)
        OK(NVFP4_session_release(sessions[i]));
    OK(NVFP4_session_release(first));

    draw(0, held);
    first = prompted(held);
    for (size_t i = 0; i < FORKS; i++) {
        begun = now();
        OK(NVFP4_session_fork(first, &sessions[i]));
        times[i] = now() - begun;
    }
    print("a fork", FORKS);
    for (size_t i = 0; i < FORKS; i++)
        OK(NVFP4_session_release(sessions[i]));
    OK(NVFP4_session_release(first));
    OK(NVFP4_model_release(model));
    return 0;
}
