/* Print the library's version, and what it supports on this machine.
 *
 *     cc 01_version.c $(pkg-config --cflags --libs nvfp4) -o 01_version && ./01_version
 */
#include <nvfp4.h>
#include <stdio.h>
#include <stdlib.h>

int main(void)
{
    /* A library found at run time need not be the one this program was compiled for. */
    if (NVFP4_check_version(NVFP4_ABI_VERSION, NVFP4_VERSION_NUMBER) != NVFP4_OK) {
        fprintf(stderr, "%s\n", NVFP4_last_error());
        return 1;
    }
    printf("libNVFP4 %s\n", NVFP4_version());

    /* Text comes into the caller's buffer: ask for the length, then for the text. */
    size_t length;
    if (NVFP4_diagnose(NULL, 0, &length) != NVFP4_OK) {
        fprintf(stderr, "%s\n", NVFP4_last_error());
        return 1;
    }
    char *json = malloc(length + 1);
    if (json == NULL || NVFP4_diagnose(json, length + 1, &length) != NVFP4_OK) {
        fprintf(stderr, "%s\n", NVFP4_last_error());
        free(json);
        return 1;
    }
    printf("%s\n", json);
    free(json);

    /* Not needed before exit, but it leaves nothing for a leak checker to ask about. */
    NVFP4_empty_cache();
    return 0;
}
