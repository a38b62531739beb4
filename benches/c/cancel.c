/*
 * The cost of making a prompt cancellable, and the time that a cancelled one still takes.
 *
 *     cc -O2 -I include benches/c/cancel.c -L target/release -lNVFP4 -lpthread -Wl,-rpath,$PWD/target/release -o target/cancel
 *     target/cancel MODEL [DEVICE] [TOKENS] [RUNS]
 *
 * DEVICE is cpu or cuda:N. Prompts of TOKENS run in turns without a call's options, with a cancel handle and a progress callback, and
 * with a handle that another thread triggers somewhere in the prompt.
 */
#define _POSIX_C_SOURCE 200809L
#include "measure.h"

#include <pthread.h>
#include <string.h>

enum { MOST_RUNS = 1001 };

static double last_heard, longest_silence;
static int heard;

static int32_t hear(void *user, uint64_t done, uint64_t total)
{
    double at = now();
    (void)user, (void)done, (void)total;
    if (at - last_heard > longest_silence)
        longest_silence = at - last_heard;
    last_heard = at;
    heard++;
    return 0;
}

static NVFP4_Cancel *cancel;
static double trigger_after, triggered_at;

static void *trigger(void *unused)
{
    struct timespec wait = {(time_t)trigger_after, (long)(1e9 * (trigger_after - (double)(time_t)trigger_after))};
    nanosleep(&wait, NULL);
    triggered_at = now();
    NVFP4_cancel_trigger(cancel);
    return unused;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: %s MODEL [DEVICE] [TOKENS] [RUNS]\n", argv[0]);
        return 2;
    }
    const char *device = argc > 2 ? argv[2] : "cpu";
    size_t tokens = argc > 3 ? (size_t)strtoul(argv[3], NULL, 10) : 512, vocabulary;
    int runs = argc > 4 ? atoi(argv[4]) : 5;
    if (runs < 1 || runs > MOST_RUNS)
        return 2;
    NVFP4_LoadOptions load;
    NVFP4_SessionOptions options;
    NVFP4_CallOptions watched, cancelled;
    NVFP4_Model *model;
    NVFP4_Session *session;
    OK(NVFP4_load_options_init(&load, sizeof load));
    if (strncmp(device, "cuda", 4) == 0) {
        load.device_type = NVFP4_DEVICE_CUDA;
        load.device_index = device[4] == ':' ? atoi(device + 5) : 0;
    }
    OK(NVFP4_model_load(argv[1], strlen(argv[1]), &load, NULL, &model));
    OK(NVFP4_session_options_init(&options, sizeof options));
    options.context = tokens;
    OK(NVFP4_session_create(model, &options, &session));
    OK(NVFP4_model_vocab_size(model, &vocabulary));
    OK(NVFP4_cancel_create(&cancel));
    OK(NVFP4_call_options_init(&watched, sizeof watched));
    watched.cancel = cancel;
    cancelled = watched;
    watched.progress = hear;

    int32_t *prompt = malloc(tokens * sizeof *prompt);
    static double plain[MOST_RUNS], seen[MOST_RUNS], late[MOST_RUNS];
    for (size_t i = 0; i < tokens; i++)
        prompt[i] = (int32_t)((i * 7919 + 11) % vocabulary);
    int stopped = 0;
    for (int run = -1; run < runs; run++) {
        int at = run < 0 ? 0 : run;
        OK(NVFP4_session_reset(session));
        double start = now();
        OK(NVFP4_session_prefill(session, prompt, tokens, NULL));
        plain[at] = now() - start;
        OK(NVFP4_session_reset(session));
        start = last_heard = now();
        OK(NVFP4_session_prefill(session, prompt, tokens, &watched));
        seen[at] = now() - start;

        pthread_t thread;
        OK(NVFP4_session_reset(session));
        trigger_after = plain[at] * (0.1 + 0.8 * at / runs);
        if (pthread_create(&thread, NULL, trigger, NULL) != 0)
            return 1;
        NVFP4_Status status = NVFP4_session_prefill(session, prompt, tokens, &cancelled);
        double end = now();
        pthread_join(thread, NULL);
        if (status == NVFP4_CANCELLED)
            late[run < 0 ? 0 : stopped++] = end - triggered_at;
        if (run < 0)
            stopped = heard = 0, longest_silence = 0;
        OK(NVFP4_cancel_reset(cancel));
    }
    qsort(plain, (size_t)runs, sizeof *plain, ascending);
    qsort(seen, (size_t)runs, sizeof *seen, ascending);
    qsort(late, (size_t)stopped, sizeof *late, ascending);
    printf("%zu tokens on %s, medians of %d: %.0f tok/s, watched %.0f tok/s (%.3f); told %d times, at most %.1f ms apart\n", tokens,
           device, runs, (double)tokens / plain[runs / 2], (double)tokens / seen[runs / 2], plain[runs / 2] / seen[runs / 2], heard,
           1e3 * longest_silence);
    if (stopped > 0)
        printf("%d of %d were cancelled, and ended after %.1f ms, %.1f ms at most\n", stopped, runs, 1e3 * late[stopped / 2],
               1e3 * late[stopped - 1]);
    free(prompt);
    OK(NVFP4_cancel_release(cancel));
    OK(NVFP4_session_release(session));
    OK(NVFP4_model_release(model));
    return 0;
}
