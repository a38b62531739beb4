/* A conversation with a model that may call a tool: it asks for the weather, the program looks it up, and the model answers.
 *
 *     cc tools.c $(pkg-config --cflags --libs nvfp4) -o tools
 *     ./tools MODEL "How is the weather in Paris?"
 */
#include <nvfp4.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char tools[] =
    "[{\"type\": \"function\", \"function\": {\"name\": \"weather\", \"description\": \"The weather in a city now.\","
    " \"parameters\": {\"type\": \"object\", \"properties\": {\"city\": {\"type\": \"string\"}}, \"required\": [\"city\"]}}}]";

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
    /* A call is passed in one piece, when it is complete. */
    if (event->part == NVFP4_PART_TOOL_CALL)
        fprintf(stderr, "[calls %.*s]\n", (int)event->text_length, event->text);
    if (event->part == NVFP4_PART_CONTENT)
        fwrite(event->text, 1, event->text_length, stdout);
    return fflush(stdout);
}

/* The conversation so far, as a text with room for `more` bytes. */
static char *messages_of(const NVFP4_Session *session, size_t more)
{
    size_t length = 0;
    check(NVFP4_session_messages(session, NULL, 0, &length));
    char *json = malloc(length + more + 1);
    if (json == NULL)
        exit(1);
    check(NVFP4_session_messages(session, json, length + 1, &length));
    return json;
}

/* The result of a call with these arguments, as the contents of a JSON string. A real tool parses the arguments, which are a
 * string of JSON, and reads the city. */
static const char *weather(const char *calls)
{
    return strstr(calls, "Paris") != NULL ? "Rain, 12 degrees" : "Sun, 25 degrees";
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: %s MODEL QUESTION\n", argv[0]);
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

    NVFP4_ChatOptions chat;
    check(NVFP4_chat_options_init(&chat, sizeof chat));
    chat.tools = tools;
    chat.tools_length = strlen(tools);
    NVFP4_GenerationResult result = {.struct_size = sizeof result};
    check(NVFP4_session_chat(session, argv[2], strlen(argv[2]), &chat, &options, print_piece, NULL, &result));

    /* The model calls tools until it has its answer. The limit is for models that never stop calling. */
    for (int turn = 0; result.tool_calls > 0 && turn < 5; turn++) {
        char calls[4096];
        size_t length;
        check(NVFP4_session_tool_calls(session, calls, sizeof calls, &length));
        char *json = messages_of(session, result.tool_calls * 256);
        char *end = json + strlen(json) - 1;
        /* One result for each call, in their order. Each may name its call in `tool_call_id`. */
        for (size_t i = 0; i < result.tool_calls; i++)
            end += sprintf(end, ",{\"role\":\"tool\",\"content\":\"%s\"}", weather(calls));
        strcpy(end, "]");
        check(NVFP4_session_chat_messages(session, json, strlen(json), NULL, &options, print_piece, NULL, &result));
        free(json);
    }
    printf("\n");

    check(NVFP4_session_release(session));
    check(NVFP4_model_release(model));
    return 0;
}
