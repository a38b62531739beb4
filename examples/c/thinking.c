/* A conversation with a reasoning model: its reasoning apart from its answers, without reasoning, and with a budget for it.
 *
 *     cc thinking.c $(pkg-config --cflags --libs nvfp4) -o thinking
 *     ./thinking MODEL
 */
#include <nvfp4.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void check(NVFP4_Status status)
{
    if (status != NVFP4_OK) {
        fprintf(stderr, "%s: %s\n", NVFP4_status_name(status), NVFP4_last_error());
        exit(1);
    }
}

static int32_t print_piece(void *user, const NVFP4_TokenEvent *event)
{
    (void)user;
    /* Reasoning goes to stderr, the answer to stdout. */
    FILE *file = event->part == NVFP4_PART_REASONING ? stderr : stdout;
    fwrite(event->text, 1, event->text_length, file);
    return fflush(file);
}

/* `chat` NULL leaves the options of the turn before. */
static void ask(NVFP4_Session *session, const char *text, const NVFP4_ChatOptions *chat, const NVFP4_GenerateOptions *options)
{
    NVFP4_GenerationResult result = {.struct_size = sizeof result};
    check(NVFP4_session_chat(session, text, strlen(text), chat, options, print_piece, NULL, &result));
    printf("\n");
    fprintf(stderr, "[%zu tokens run, %zu generated]\n", result.prompt_tokens, result.generated_tokens);
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: %s MODEL\n", argv[0]);
        return 2;
    }
    NVFP4_Model *model;
    NVFP4_Session *session;
    NVFP4_LoadOptions load;
    check(NVFP4_load_options_init(&load, sizeof load));
    load.device_type = NVFP4_DEVICE_AUTO;
    check(NVFP4_model_load(argv[1], strlen(argv[1]), &load, NULL, &model));
    check(NVFP4_session_create(model, NULL, &session));

    /* The sampling settings that the model recommends. Greedy reasoning tends to repeat itself. */
    NVFP4_GenerateOptions options;
    check(NVFP4_model_generate_options(model, &options, sizeof options));

    NVFP4_ChatOptions chat;
    check(NVFP4_chat_options_init(&chat, sizeof chat));
    ask(session, "Why is the sky blue?", &chat, &options);

    /* At most 100 tokens of reasoning. */
    chat.reasoning_budget = 100;
    ask(session, "And at sunset?", &chat, &options);

    /* None at all, in this turn and those after it. */
    chat.variables = "{\"enable_thinking\": false}";
    chat.variables_length = strlen(chat.variables);
    ask(session, "On Mars too?", &chat, &options);
    ask(session, "Thank you.", NULL, &options);

    check(NVFP4_session_release(session));
    check(NVFP4_model_release(model));
    return 0;
}
