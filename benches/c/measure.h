/* Common parts of the measuring programs: an exit on failed calls, a clock in seconds, and the order for medians. */
#ifndef MEASURE_H
#define MEASURE_H

#include <nvfp4.h>

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define OK(call)                                                                                                                   \
    do {                                                                                                                           \
        if ((call) != NVFP4_OK) {                                                                                                  \
            fprintf(stderr, "%s: %s\n", #call, NVFP4_last_error());                                                                \
            exit(1);                                                                                                               \
        }                                                                                                                          \
    } while (0)

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

#endif
