/* A program that Ctrl-C stops at once, whether it is loading the model, running a long prompt or generating an answer.
 *
 *     cc interrupt.c $(pkg-config --cflags --libs nvfp4) -o interrupt && ./interrupt MODEL "Tell me a long story."
 *
 * See docs/hosts.md.
 */
#define _POSIX_C_SOURCE 200809L
#include <nvfp4.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

static NVFP4_Cancel *cancel;

/* A signal handler may trigger a cancel handle: that takes no lock and no memory, and cannot be lost. */
static void on_signal(int signal)
{
    (void)signal;
    NVFP4_cancel_trigger(cancel);
}

static int32_t print_progress(void *what, uint64_t done, uint64_t total)
{
    fprintf(stderr, "\r%s: %3.0f %%", (const char *)what, 100 * (double)done / (double)(total > 0 ? total : 1));
    return 0;
}

static int32_t print_piece(void *user, const NVFP4_TokenEvent *event)
{
    (void)user;
    fwrite(event->text, 1, event->text_length, stdout);
    return fflush(stdout);
}

static int failed(NVFP4_Status status)
{
    fprintf(stderr, "\n%s\n", NVFP4_last_error());
    return status == NVFP4_CANCELLED ? 130 : 1;
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: %s MODEL PROMPT\n", argv[0]);
        return 2;
    }
    NVFP4_Status status = NVFP4_cancel_create(&cancel);
    if (status != NVFP4_OK)
        return failed(status);
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    sigaction(SIGINT, &action, NULL);

    /* One cancel handle serves every call. */
    NVFP4_CallOptions call;
    NVFP4_LoadOptions load;
    NVFP4_GenerateOptions generate;
    NVFP4_call_options_init(&call, sizeof call);
    NVFP4_load_options_init(&load, sizeof load);
    NVFP4_generate_options_init(&generate, sizeof generate);
    call.cancel = cancel;
    call.progress = print_progress;
    call.user = (void *)"loading";
    load.device_type = NVFP4_DEVICE_AUTO;
    load.call = generate.call = &call;
    generate.max_tokens = 100000;

    NVFP4_Model *model = NULL;
    NVFP4_Session *session = NULL;
    NVFP4_GenerationResult result;
    result.struct_size = sizeof result;
    if ((status = NVFP4_model_load(argv[1], strlen(argv[1]), &load, NULL, &model)) != NVFP4_OK)
        return failed(status);
    fprintf(stderr, "\n");
    call.progress = NULL;
    if ((status = NVFP4_session_create(model, NULL, &session)) != NVFP4_OK ||
        (status = NVFP4_session_chat(session, argv[2], strlen(argv[2]), NULL, &generate, print_piece, NULL, &result)) != NVFP4_OK)
        return failed(status);
    /* A cancelled answer keeps its tokens, and the conversation can go on. */
    if (result.finish == NVFP4_FINISH_CANCELLED)
        fprintf(stderr, "\n[ended after %zu tokens]\n", result.generated_tokens);
    NVFP4_session_release(session);
    NVFP4_model_release(model);
    NVFP4_cancel_release(cancel);
    return result.finish == NVFP4_FINISH_CANCELLED ? 130 : 0;
}
