/*
 * Time of a new process to its first token, on the first GPU or else the CPU: from the start to the loaded model, and from there a prompt
 * of TOKENS tokens and the token that follows. Run it twice with an empty cache of kernels (NVFP4_CACHE=off): a library with embedded
 * kernels takes as long both times.
 *
 *     cc -O2 -I include benches/c/first.c -L target/release -lNVFP4 -Wl,-rpath,$PWD/target/release -o target/first
 *     target/first MODEL [TOKENS]
 */
#define _POSIX_C_SOURCE 200809L
#include "measure.h"

#include <string.h>

enum { MOST = 4096 };

int main(int argc, char **argv)
{
    const size_t length = argc > 2 ? strtoul(argv[2], NULL, 10) : 16;
    if (argc < 2 || length == 0 || length > MOST) {
        fprintf(stderr, "usage: %s MODEL [TOKENS, at most %d]\n", argv[0], MOST);
        return 2;
    }
    static int32_t tokens[MOST];
    for (size_t i = 0; i < length; i++) {
        tokens[i] = (int32_t)(i * 37 % 113);
    }
    NVFP4_Model *model;
    NVFP4_Session *session;
    int32_t token;
    NVFP4_LoadOptions load;
    OK(NVFP4_load_options_init(&load, sizeof load));
    /* Every prompt is run as a whole. */
    load.prefix_cache = 0;
    load.device_type = NVFP4_DEVICE_AUTO;
    const double start = now();
    OK(NVFP4_model_load(argv[1], strlen(argv[1]), &load, NULL, &model));
    const double loaded = now();
    OK(NVFP4_session_create(model, NULL, &session));
    OK(NVFP4_session_prefill(session, tokens, length, NULL));
    OK(NVFP4_session_sample(session, NULL, &token));
    printf("loaded after %.3f s, first token %.3f s later\n", loaded - start, now() - loaded);
    OK(NVFP4_session_release(session));
    OK(NVFP4_model_release(model));
    return 0;
}
