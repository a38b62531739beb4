/* Many conversations on one thread: a queue runs the turns, and poll() waits for the clients and for the queue at once.
 *
 *     cc conversations.c $(pkg-config --cflags --libs nvfp4) -o conversations
 *     ./conversations MODEL <lines
 *
 * A line "NAME TEXT" says TEXT in the conversation of NAME, which begins with its first line; "NAME" alone interrupts the answer.
 * Conversations are independent: up to 64 are answered together. A server has sockets where this has standard input and output;
 * the loop is the same with epoll, libuv or asyncio. See docs/hosts.md.
 */
#define _POSIX_C_SOURCE 200809L
#include <nvfp4.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST = 64, LONGEST = 8192 };

static void check(NVFP4_Status status)
{
    if (status != NVFP4_OK) {
        fprintf(stderr, "%s: %s\n", NVFP4_status_name(status), NVFP4_last_error());
        exit(1);
    }
}

typedef struct {
    char name[64];
    NVFP4_Session *session;
    uint64_t generation; /* that runs or waits; 0 for none */
    char next[LONGEST];  /* what was said meanwhile */
} Conversation;

static NVFP4_Model *model;
static NVFP4_Queue *queue;
static Conversation conversations[MOST];
static size_t count, answering;

/* Submits a turn, and returns at once. */
static void say(Conversation *conversation, const char *text)
{
    NVFP4_GenerateOptions options;
    NVFP4_SubmitOptions submit;
    check(NVFP4_model_generate_options(model, &options, sizeof options));
    check(NVFP4_submit_options_init(&submit, sizeof submit));
    options.max_tokens = 64;
    submit.user = conversation;
    submit.deadline = 600;
    check(NVFP4_queue_chat(queue, conversation->session, text, strlen(text), NULL, &options, &submit, &conversation->generation));
    answering++;
}

static void line(char *text)
{
    Conversation *conversation = conversations;
    char *said = strchr(text, ' ');
    if (said != NULL)
        *said++ = '\0';
    if (text[0] == '\0')
        return;
    while (conversation < conversations + count && strcmp(conversation->name, text) != 0)
        conversation++;
    if (conversation == conversations + count) {
        if (said == NULL || count == MOST || strlen(text) >= sizeof conversation->name) {
            fprintf(stderr, "%s has no conversation, and there is room for %d\n", text, MOST);
            return;
        }
        strcpy(conversation->name, text);
        check(NVFP4_session_create(model, NULL, &conversation->session));
        count++;
    }
    if (said == NULL)
        check(conversation->generation != 0 ? NVFP4_queue_cancel(queue, conversation->generation) : NVFP4_OK);
    else if (conversation->generation == 0)
        say(conversation, said);
    else {
        size_t before = strlen(conversation->next);
        snprintf(conversation->next + before, sizeof conversation->next - before, "%s%s", before > 0 ? "\n" : "", said);
    }
}

/* Prints the answer of a turn that has ended. A fault is that of this conversation alone. */
static void end(const NVFP4_QueueEvent *event)
{
    Conversation *conversation = event->user;
    char answer[LONGEST] = "";
    size_t length = 0;
    conversation->generation = 0;
    answering--;
    if (event->status != NVFP4_OK) {
        printf("%s [%.*s]\n", conversation->name, (int)event->text_length, event->text);
    } else {
        check(NVFP4_session_text(conversation->session, answer, sizeof answer - 1, &length));
        for (char *at = answer; (at = strchr(at, '\n')) != NULL;)
            *at = ' ';
        printf("%s %s%s\n", conversation->name, answer, event->finish == NVFP4_FINISH_CANCELLED ? " [interrupted]" : "");
    }
    fflush(stdout);
    if (conversation->next[0] != '\0') {
        say(conversation, conversation->next);
        conversation->next[0] = '\0';
    }
}

/* Takes the lines that have come. Returns 0 at their end. */
static int lines(void)
{
    static char text[LONGEST];
    static size_t length;
    ssize_t more = read(STDIN_FILENO, text + length, sizeof text - 1 - length);
    if (more <= 0)
        return 0;
    length += (size_t)more;
    text[length] = '\0';
    char *first = text, *end;
    while ((end = strchr(first, '\n')) != NULL) {
        *end = '\0';
        line(first);
        first = end + 1;
    }
    length -= (size_t)(first - text);
    if (length == sizeof text - 1)
        length = 0; /* a line that is too long is nobody's */
    memmove(text, first, length);
    return 1;
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: %s MODEL <lines\n", argv[0]);
        return 2;
    }
    NVFP4_LoadOptions load;
    check(NVFP4_load_options_init(&load, sizeof load));
    load.device_type = NVFP4_DEVICE_AUTO;
    check(NVFP4_model_load(argv[1], strlen(argv[1]), &load, NULL, &model));
    check(NVFP4_queue_create(model, NULL, &queue));

    struct pollfd ready[2] = {{.fd = STDIN_FILENO, .events = POLLIN}, {.events = POLLIN}};
    check(NVFP4_queue_fd(queue, &ready[1].fd));
    while (ready[0].fd >= 0 || answering > 0) {
        if (poll(ready, 2, -1) < 0)
            continue;
        /* poll() skips what has a negative number. */
        if (ready[0].revents != 0 && !lines())
            ready[0].fd = -1;
        NVFP4_QueueEvent events[64];
        size_t taken;
        check(NVFP4_queue_wait(queue, events, sizeof events[0], 64, 0, &taken));
        for (size_t i = 0; i < taken; i++) {
            /* A server would send the text of the other events to its client as it comes. */
            if (events[i].kind == NVFP4_EVENT_END)
                end(&events[i]);
        }
    }

    for (size_t i = 0; i < count; i++)
        check(NVFP4_session_release(conversations[i].session));
    check(NVFP4_queue_release(queue));
    check(NVFP4_model_release(model));
    NVFP4_empty_cache();
    return 0;
}
