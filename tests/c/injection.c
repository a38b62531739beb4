/* Linked into examples/c/server.c in place of two functions, which it calls: before the first step of each session it tells how many
 * special tokens the prompt has, and writes its text. See run.sh. */
#include <nvfp4.h>
#include <stdio.h>
#include <string.h>

NVFP4_Status __real_NVFP4_model_load(const char *, size_t, const NVFP4_LoadOptions *, const NVFP4_QuantizeOptions *, NVFP4_Model **);
NVFP4_Status __wrap_NVFP4_model_load(const char *, size_t, const NVFP4_LoadOptions *, const NVFP4_QuantizeOptions *, NVFP4_Model **);
NVFP4_Status __real_NVFP4_session_sample(NVFP4_Session *, const NVFP4_GenerateOptions *, int32_t *);
NVFP4_Status __wrap_NVFP4_session_sample(NVFP4_Session *, const NVFP4_GenerateOptions *, int32_t *);

static NVFP4_Model *model;

NVFP4_Status __wrap_NVFP4_model_load(const char *path, size_t path_length, const NVFP4_LoadOptions *options,
                                     const NVFP4_QuantizeOptions *quantize, NVFP4_Model **out)
{
    NVFP4_Status status = __real_NVFP4_model_load(path, path_length, options, quantize, out);
    model = *out;
    return status;
}

NVFP4_Status __wrap_NVFP4_session_sample(NVFP4_Session *session, const NVFP4_GenerateOptions *options, int32_t *token)
{
    static int32_t tokens[4096];
    static char text[1 << 16];
    size_t count = 0, length = 0, special = 0;
    NVFP4_Status status = NVFP4_session_tokens(session, tokens, sizeof tokens / sizeof *tokens, &count);
    for (size_t i = 0; status == NVFP4_OK && i < count; i++) {
        status = NVFP4_model_detokenize(model, tokens + i, 1, 1, NULL, 0, &length);
        special += length == 0;
    }
    if (status == NVFP4_OK)
        status = NVFP4_model_detokenize(model, tokens, count, 1, text, sizeof text, &length);
    if (status != NVFP4_OK)
        return status;
    fprintf(stderr, "%zu special tokens in a prompt; its text:\n%s\n", special, text);
    return __real_NVFP4_session_sample(session, options, token);
}
