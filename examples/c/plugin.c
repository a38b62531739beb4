/* A plug-in that answers questions: a shared object of a host that knows nothing of the library, loads it, asks, and unloads it.
 *
 *     cc -shared -fPIC plugin.c $(pkg-config --cflags --libs nvfp4) -o plugin.so
 *     cc -DHOST plugin.c -ldl -o plugin_host && ./plugin_host ./plugin.so MODEL "Why is the sky blue?"
 *
 * See docs/hosts.md.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef HOST
#include <nvfp4.h>

typedef struct {
    NVFP4_Model *model;
    NVFP4_Cancel *cancel;
    uint64_t log;
} Plugin;

static int32_t on_log(void *user, int32_t level, const char *message, size_t length)
{
    (void)user;
    fprintf(stderr, "[plugin, level %d: %.*s]\n", (int)level, (int)length, message);
    return 0;
}

void plugin_stop(void *plugin);

/* The host calls this first, on any thread. */
void *plugin_start(const char *path)
{
    Plugin *plugin = calloc(1, sizeof *plugin);
    NVFP4_LoadOptions load;
    NVFP4_CallOptions call;
    /* The host may have loaded an older library. */
    if (plugin == NULL || NVFP4_check_version(NVFP4_ABI_VERSION, NVFP4_VERSION_NUMBER) != NVFP4_OK ||
        NVFP4_log_add(on_log, NULL, NVFP4_LOG_INFO, NULL, &plugin->log) != NVFP4_OK ||
        NVFP4_cancel_create(&plugin->cancel) != NVFP4_OK || NVFP4_load_options_init(&load, sizeof load) != NVFP4_OK ||
        NVFP4_call_options_init(&call, sizeof call) != NVFP4_OK)
        goto failed;
    call.cancel = plugin->cancel;
    load.device_type = NVFP4_DEVICE_AUTO;
    load.call = &call;
    if (NVFP4_model_load(path, strlen(path), &load, NULL, &plugin->model) == NVFP4_OK)
        return plugin;
failed:
    fprintf(stderr, "%s\n", NVFP4_last_error());
    plugin_stop(plugin);
    return NULL;
}

/* Writes the answer to a buffer; the number of its bytes, or -1. From any thread: each question has a session of its own. */
long plugin_ask(void *plugin, const char *question, char *buffer, size_t capacity)
{
    Plugin *own = plugin;
    NVFP4_Session *session = NULL;
    NVFP4_GenerateOptions generate;
    NVFP4_CallOptions call;
    size_t length = 0;
    NVFP4_ChatOptions chat;
    int fine = NVFP4_generate_options_init(&generate, sizeof generate) == NVFP4_OK &&
               NVFP4_chat_options_init(&chat, sizeof chat) == NVFP4_OK && NVFP4_call_options_init(&call, sizeof call) == NVFP4_OK;
    if (fine) {
        /* A short answer has no room for reasoning. */
        chat.variables = "{\"enable_thinking\": false}";
        chat.variables_length = strlen(chat.variables);
        call.cancel = own->cancel;
        generate.call = &call;
        generate.max_tokens = 64;
        fine = NVFP4_session_create(own->model, NULL, &session) == NVFP4_OK &&
               NVFP4_session_chat(session, question, strlen(question), &chat, &generate, NULL, NULL, NULL) == NVFP4_OK &&
               NVFP4_session_text(session, buffer, capacity, &length) == NVFP4_OK;
    }
    if (!fine)
        fprintf(stderr, "%s\n", NVFP4_last_error());
    NVFP4_session_release(session);
    return fine ? (long)length : -1;
}

/* The host may call this at any time, on any thread: it cancels the answers in progress. */
void plugin_cancel(void *plugin)
{
    NVFP4_cancel_trigger(((Plugin *)plugin)->cancel);
}

/* The host calls this last. Nothing may point into this object's code and memory when it is unloaded, above all the log callback.
 * The library itself stays in the process. */
void plugin_stop(void *plugin)
{
    Plugin *own = plugin;
    if (own == NULL)
        return;
    NVFP4_model_release(own->model);
    NVFP4_cancel_release(own->cancel);
    if (own->log != 0)
        NVFP4_log_remove(own->log);
    NVFP4_empty_cache();
    free(own);
}

#else
#include <dlfcn.h>

static void find(void *object, const char *name, void *place)
{
    void *address = dlsym(object, name);
    if (address == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    memcpy(place, &address, sizeof address);
}

int main(int argc, char **argv)
{
    void *(*start)(const char *);
    long (*ask)(void *, const char *, char *, size_t);
    void (*stop)(void *);
    static char answer[65536];
    if (argc != 4) {
        fprintf(stderr, "usage: %s PLUGIN MODEL QUESTION\n", argv[0]);
        return 2;
    }
    /* Twice, because an unloaded plug-in may be loaded again. */
    for (int i = 0; i < 2; i++) {
        void *object = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
        if (object == NULL) {
            fprintf(stderr, "%s\n", dlerror());
            return 1;
        }
        find(object, "plugin_start", &start);
        find(object, "plugin_ask", &ask);
        find(object, "plugin_stop", &stop);
        void *plugin = start(argv[2]);
        long length = plugin == NULL ? -1 : ask(plugin, argv[3], answer, sizeof answer);
        stop(plugin);
        dlclose(object);
        if (length < 0)
            return 1;
        printf("%.*s\n", (int)length, answer);
    }
    return 0;
}
#endif
