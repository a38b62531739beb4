/*
 * Time to the first token of a chat turn after a long conversation, and its share for text: rendering the conversation, tokenizing it,
 * and matching it with the session's tokens.
 *
 *     cc -O2 -I include benches/c/turn.c -L target/release -lNVFP4 -Wl,-rpath,$PWD/target/release -o target/turn
 *     target/turn MODEL [DEVICE] [TOKENS] [RUNS]
 *
 * MODEL needs a tokenizer. DEVICE is cpu or cuda:N. The conversation has TOKENS tokens in turns of some 200; each run asks a question of
 * ten tokens, and is undone. For comparison the same tokens are run by NVFP4_session_prefill(), and their argmax is taken: the difference
 * is the share for text.
 */
#define _POSIX_C_SOURCE 200809L
#include "measure.h"

#include <string.h>

enum { MOST_RUNS = 1001, MOST_TOKENS = 1 << 20 };

static int32_t tokens[MOST_TOKENS];

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: %s MODEL [DEVICE] [TOKENS] [RUNS]\n", argv[0]);
        return 2;
    }
    const char *device = argc > 2 ? argv[2] : "cpu", *question = "And what else is there to say of it?";
    size_t most = argc > 3 ? (size_t)strtoul(argv[3], NULL, 10) : 8000, length = 0, count;
    int runs = argc > 4 ? atoi(argv[4]) : 21, turns = 0;
    if (runs < 1 || runs > MOST_RUNS)
        return 2;
    NVFP4_LoadOptions load;
    NVFP4_GenerateOptions options;
    NVFP4_GenerationResult result = {.struct_size = sizeof result};
    NVFP4_Model *model;
    NVFP4_Session *session;
    OK(NVFP4_load_options_init(&load, sizeof load));
    /* Every prompt is run as a whole. */
    load.prefix_cache = 0;
    if (strncmp(device, "cuda", 4) == 0) {
        load.device_type = NVFP4_DEVICE_CUDA;
        load.device_index = device[4] == ':' ? atoi(device + 5) : 0;
    }
    OK(NVFP4_model_load(argv[1], strlen(argv[1]), &load, NULL, &model));
    OK(NVFP4_session_create(model, NULL, &session));
    OK(NVFP4_generate_options_init(&options, sizeof options));
    options.max_tokens = 1;
    options.ignore_model_stops = 1;
    while (length < most) {
        char text[4096];
        int at = snprintf(text, sizeof text, "Question %d:", turns++);
        for (int i = 0; i < 14; i++)
            at += snprintf(text + at, sizeof text - (size_t)at, " what of the sea and the sky, and of word %d in the book?", i * turns);
        OK(NVFP4_session_chat(session, text, (size_t)at, NULL, &options, NULL, NULL, &result));
        OK(NVFP4_session_length(session, &length));
    }

    static double turn[MOST_RUNS], alone[MOST_RUNS];
    size_t prompt = 0;
    for (int run = -1; run < runs; run++) {
        int at = run < 0 ? 0 : run;
        int32_t likeliest;
        OK(NVFP4_session_chat(session, question, strlen(question), NULL, &options, NULL, NULL, &result));
        turn[at] = result.first_token_seconds;
        prompt = result.prompt_tokens;
        OK(NVFP4_session_tokens(session, tokens, MOST_TOKENS, &count));
        OK(NVFP4_session_truncate(session, length));
        double start = now();
        OK(NVFP4_session_prefill(session, tokens + length, prompt, NULL));
        OK(NVFP4_session_sample(session, NULL, &likeliest));
        alone[at] = now() - start;
        OK(NVFP4_session_truncate(session, length));
    }
    qsort(turn, (size_t)runs, sizeof *turn, ascending);
    qsort(alone, (size_t)runs, sizeof *alone, ascending);
    printf("%d turns, %zu tokens on %s, then %zu more, medians of %d: first token after %.3f ms, without the text %.3f ms (%.3f)\n", turns,
           length, device, prompt, runs, 1e3 * turn[runs / 2], 1e3 * alone[runs / 2], turn[runs / 2] / alone[runs / 2]);
    OK(NVFP4_session_release(session));
    OK(NVFP4_model_release(model));
    return 0;
}
