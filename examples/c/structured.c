/* An answer that fits a JSON schema, whatever the model.
 *
 *     cc structured.c $(pkg-config --cflags --libs nvfp4) -o structured
 *     ./structured MODEL "My order 4711 came broken, and nobody answers!"
 */
#include <nvfp4.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char ticket[] =
    "{\"type\": \"object\", \"properties\": {\"topic\": {\"enum\": [\"delivery\", \"payment\", \"other\"]},"
    " \"urgency\": {\"type\": \"integer\", \"minimum\": 1, \"maximum\": 5}},"
    " \"required\": [\"topic\", \"urgency\"], \"additionalProperties\": false}";

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
    /* Reasoning, which the grammar leaves free, goes to stderr. */
    FILE *file = event->part == NVFP4_PART_REASONING ? stderr : stdout;
    fwrite(event->text, 1, event->text_length, file);
    return fflush(file);
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: %s MODEL PROMPT\n", argv[0]);
        return 2;
    }
    NVFP4_Model *model;
    NVFP4_Session *session;
    NVFP4_LoadOptions load;
    check(NVFP4_load_options_init(&load, sizeof load));
    load.device_type = NVFP4_DEVICE_AUTO;
    check(NVFP4_model_load(argv[1], strlen(argv[1]), &load, NULL, &model));
    check(NVFP4_session_create(model, NULL, &session));
    NVFP4_GenerateOptions options;
    check(NVFP4_model_generate_options(model, &options, sizeof options));

    /* Compiled once; any number of generations, on any threads, may follow it. */
    NVFP4_Grammar *grammar;
    check(NVFP4_grammar_create(model, NULL, ticket, strlen(ticket), &grammar));
    options.grammar = grammar;
    NVFP4_GenerationResult result = {.struct_size = sizeof result};
    check(NVFP4_session_chat(session, argv[2], strlen(argv[2]), NULL, &options, print_piece, NULL, &result));
    printf("\n");

    check(NVFP4_grammar_release(grammar));
    check(NVFP4_session_release(session));
    check(NVFP4_model_release(model));
    return 0;
}
