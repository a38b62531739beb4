/* Talk with a language model.
 *
 *     cc chat.c $(pkg-config --cflags --libs nvfp4) -o chat
 *     ./chat MODEL "Why is the sky blue?"     answers and ends
 *     ./chat MODEL                            a conversation, one turn per line
 *     ./chat --no-thinking MODEL [PROMPT]     the same without the reasoning of a model that has any
 *
 * MODEL is a directory or file that `nvfp4 quantize` wrote, or any other that NVFP4_model_load() takes.
 */
#include <nvfp4.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Every call that can fail returns a status, and sets an error message of one line. */
static void check(NVFP4_Status status)
{
    if (status != NVFP4_OK) {
        fprintf(stderr, "%s: %s\n", NVFP4_status_name(status), NVFP4_last_error());
        exit(1);
    }
}

/* Called with each token as it comes. Its text is whole characters, perhaps none, without a NUL after
 * it. Reasoning goes to stderr. */
static int32_t print_piece(void *user, const NVFP4_TokenEvent *event)
{
    int32_t *last = user;
    if (*last == NVFP4_PART_REASONING && event->part != NVFP4_PART_REASONING)
        fputs("\n", stderr);
    *last = event->part;
    fwrite(event->text, 1, event->text_length, event->part == NVFP4_PART_REASONING ? stderr : stdout);
    /* Anything but 0 ends the answer: here, when standard output is closed. */
    return fflush(stdout);
}

/* While the model is loaded, the log says on which device it runs, and why. */
static int32_t print_log(void *user, int32_t level, const char *message, size_t length)
{
    (void)user, (void)level;
    fprintf(stderr, "[%.*s]\n", (int)length, message);
    return 0;
}

/* The session holds the conversation, so only new tokens are run. */
static void answer(NVFP4_Session *session, const NVFP4_ChatOptions *chat, const NVFP4_GenerateOptions *options, const char *text,
                   size_t length)
{
    NVFP4_GenerationResult result = {.struct_size = sizeof result};
    int32_t part = NVFP4_PART_CONTENT;
    check(NVFP4_session_chat(session, text, length, chat, options, print_piece, &part, &result));
    printf("\n");
    double seconds = result.decode_seconds > 0 ? result.decode_seconds : 1;
    fprintf(stderr, "[%zu tokens after %.2f s, then %.1f per second%s]\n", result.generated_tokens,
            result.first_token_seconds, (double)result.generated_tokens / seconds,
            result.finish == NVFP4_FINISH_CONTEXT ? "; the context is full" : "");
}

int main(int argc, char **argv)
{
    /* A variable that the template does not read has no effect, so this works with any model. */
    NVFP4_ChatOptions chat;
    check(NVFP4_chat_options_init(&chat, sizeof chat));
    if (argc > 1 && strcmp(argv[1], "--no-thinking") == 0) {
        chat.variables = "{\"enable_thinking\": false}";
        chat.variables_length = strlen(chat.variables);
        argc--, argv++;
    }
    if (argc != 2 && argc != 3) {
        fprintf(stderr, "usage: chat [--no-thinking] MODEL [PROMPT]\n");
        return 2;
    }
    /* On the GPU with room for the model, or else on the CPU. */
    NVFP4_LoadOptions load_options;
    check(NVFP4_load_options_init(&load_options, sizeof load_options));
    load_options.device_type = NVFP4_DEVICE_AUTO;
    uint64_t log;
    check(NVFP4_log_add(print_log, NULL, NVFP4_LOG_INFO, NULL, &log));
    NVFP4_Model *model;
    check(NVFP4_model_load(argv[1], strlen(argv[1]), &load_options, NULL, &model));
    check(NVFP4_log_remove(log));

    /* A long conversation drops its oldest turns instead of ending. */
    NVFP4_SessionOptions session_options;
    check(NVFP4_session_options_init(&session_options, sizeof session_options));
    session_options.eviction = NVFP4_EVICTION_DROP_OLDEST;
    NVFP4_Session *session;
    check(NVFP4_session_create(model, &session_options, &session));

    /* The sampling settings that the model recommends. Without any it is greedy, and small models tend to repeat themselves. */
    NVFP4_GenerateOptions options;
    check(NVFP4_model_generate_options(model, &options, sizeof options));
    if (options.temperature <= 0 && options.repetition_penalty <= 1)
        options.repetition_penalty = 1.1f;
    fprintf(stderr, "[temperature %g, top_k %d, top_p %g, min_p %g, repetition penalty %g]\n", (double)options.temperature,
            (int)options.top_k, (double)options.top_p, (double)options.min_p, (double)options.repetition_penalty);
    /* The session keeps the model alive. */
    check(NVFP4_model_release(model));

    if (argc == 3)
        answer(session, &chat, &options, argv[2], strlen(argv[2]));
    char line[8192];
    while (argc == 2 && fputs("> ", stderr) >= 0 && fgets(line, sizeof line, stdin) != NULL) {
        size_t length = strcspn(line, "\n");
        if (length > 0)
            answer(session, &chat, &options, line, length);
    }

    check(NVFP4_session_release(session));
    NVFP4_empty_cache();
    return 0;
}
