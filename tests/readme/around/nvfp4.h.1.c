/* The program around the first example of nvfp4.h. */
#include <nvfp4.h>
#include <stdio.h>
#include <string.h>

static int32_t print_piece(void *user, const NVFP4_TokenEvent *event)
{
    (void)user;
    return fwrite(event->text, 1, event->text_length, stdout) != event->text_length;
}

int main(int argc, char **argv)
{
    const char *path = argv[argc - 1], *question = "Why is the sky blue?";
/* here */
    return 0;
}
