/* The times that durations are measured with, and the nap between two looks at an event. */
#ifndef PS_SRC_CLOCK_H
#define PS_SRC_CLOCK_H

#include <time.h>

/* Seconds of a clock that no one sets. */
static inline double ps_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Seconds that processors have spent on this process, all of its threads together. */
static inline double ps_processor_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline void ps_nap(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
}

#endif
