/* Answer many at once: one step of the model serves all of them, and sequences join and leave between two steps.
 *
 *     cc server.c $(pkg-config --cflags --libs nvfp4) -o server
 *     ./server MODEL [SECONDS] <questions     one question a line; each answer may take SECONDS
 *
 * A server has sockets where this has standard input and output; the rest is the same. See docs/hosts.md.
 */
#define _POSIX_C_SOURCE 200809L
#include <nvfp4.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { TOGETHER = 8 };

static void check(NVFP4_Status status)
{
    if (status != NVFP4_OK) {
        fprintf(stderr, "%s: %s\n", NVFP4_status_name(status), NVFP4_last_error());
        exit(1);
    }
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* A question that is being answered. */
typedef struct {
    int number;
    double deadline;
    NVFP4_Session *session;
    NVFP4_Detokenizer *text;
    NVFP4_Cancel *cancel;
    NVFP4_CallOptions call;
    NVFP4_GenerateOptions options;
    char answer[65536];
    size_t length;
} Request;

static void leave(Request *request, const char *why)
{
    printf("%d: %.*s [%s]\n", request->number, (int)request->length, request->answer, why);
    check(NVFP4_session_release(request->session));
    check(NVFP4_detokenizer_release(request->text));
    check(NVFP4_cancel_release(request->cancel));
    free(request);
}

static void append(Request *request, const char *text, size_t length)
{
    size_t room = sizeof request->answer - request->length;
    memcpy(request->answer + request->length, text, length < room ? length : room);
    request->length += length < room ? length : room;
}

/* Adds the text that a token completes; says whether the answer goes on. */
static int add(Request *request, int32_t token)
{
    const char *text;
    size_t length;
    int32_t finish;
    check(NVFP4_detokenizer_push(request->text, token, &text, &length, &finish));
    append(request, text, length);
    if (finish == NVFP4_FINISH_NONE)
        return 1;
    /* The text that was held back because it might have begun a stop string. */
    check(NVFP4_detokenizer_finish(request->text, &text, &length));
    append(request, text, length);
    leave(request, finish == NVFP4_FINISH_LENGTH ? "length" : "stop");
    return 0;
}

/* Asks the question, whose text is a message: names of special tokens in it are text. Runs the prompt, and samples the first token.
 * A failure affects only this question. */
static Request *join(NVFP4_Model *model, int number, const char *question, double seconds, int32_t *first)
{
    Request *request = calloc(1, sizeof *request);
    if (request == NULL)
        return NULL;
    request->number = number;
    request->deadline = now() + seconds;
    check(NVFP4_cancel_create(&request->cancel));
    check(NVFP4_call_options_init(&request->call, sizeof request->call));
    request->call.cancel = request->cancel;
    check(NVFP4_generate_options_init(&request->options, sizeof request->options));
    request->options.call = &request->call;
    request->options.max_tokens = 64;
    check(NVFP4_session_create(model, NULL, &request->session));
    check(NVFP4_detokenizer_create(model, NULL, 0, &request->options, &request->text));
    NVFP4_GenerateOptions prompt = request->options;
    prompt.max_tokens = 0;
    NVFP4_Status status = NVFP4_session_chat(request->session, question, strlen(question), NULL, &prompt, NULL, NULL, NULL);
    if (status == NVFP4_OK)
        status = NVFP4_session_sample(request->session, &request->options, first);
    if (status != NVFP4_OK) {
        leave(request, NVFP4_last_error());
        return NULL;
    }
    return add(request, *first) ? request : NULL;
}

int main(int argc, char **argv)
{
    if (argc != 2 && argc != 3) {
        fprintf(stderr, "usage: %s MODEL [SECONDS] <questions\n", argv[0]);
        return 2;
    }
    double seconds = argc > 2 ? atof(argv[2]) : 60;
    NVFP4_LoadOptions load;
    check(NVFP4_load_options_init(&load, sizeof load));
    load.device_type = NVFP4_DEVICE_AUTO;
    NVFP4_Model *model;
    check(NVFP4_model_load(argv[1], strlen(argv[1]), &load, NULL, &model));

    Request *active[TOGETHER];
    NVFP4_Session *sessions[TOGETHER];
    const NVFP4_GenerateOptions *options[TOGETHER];
    NVFP4_Status statuses[TOGETHER];
    int32_t tokens[TOGETHER];
    size_t count = 0;
    int number = 0, more = 1;
    char line[8192];
    while (more || count > 0) {
        while (more && count < TOGETHER) {
            more = fgets(line, sizeof line, stdin) != NULL;
            line[more ? strcspn(line, "\n") : 0] = '\0';
            if (more && line[0] != '\0' && (active[count] = join(model, ++number, line, seconds, &tokens[count])) != NULL)
                count++;
        }
        if (count == 0)
            continue;
        for (size_t i = 0; i < count; i++) {
            sessions[i] = active[i]->session;
            options[i] = &active[i]->options;
            /* A client that hangs up is handled the same way, from any thread, at any time. */
            if (now() > active[i]->deadline)
                NVFP4_cancel_trigger(active[i]->cancel);
        }
        check(NVFP4_session_step_sample(sessions, tokens, count, options, NULL, tokens, statuses));
        /* The others stay in order, because a GPU has already begun the next step with them. */
        size_t left = 0;
        for (size_t i = 0; i < count; i++) {
            if (statuses[i] != NVFP4_OK)
                leave(active[i], NVFP4_status_name(statuses[i]));
            else if (add(active[i], tokens[i])) {
                active[left] = active[i];
                tokens[left++] = tokens[i];
            }
        }
        count = left;
    }
    check(NVFP4_model_release(model));
    NVFP4_empty_cache();
    return 0;
}
