/* A wall clock that someone sets all the time, for LD_PRELOAD: a day ahead and a day back by turns. Clocks that no one sets go on
 * as they do. */
#include <stdatomic.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static time_t jump(void)
{
    static atomic_int calls;
    return atomic_fetch_add(&calls, 1) % 2 ? -86400 : 86400;
}

int clock_gettime(clockid_t clock, struct timespec *t)
{
    int result = (int)syscall(SYS_clock_gettime, clock, t);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        t->tv_sec += jump();
    }
    return result;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone)
{
    (void)zone;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    *t = (struct timeval){.tv_sec = now.tv_sec, .tv_usec = now.tv_nsec / 1000};
    return 0;
}

time_t time(time_t *t)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t) {
        *t = now.tv_sec;
    }
    return now.tv_sec;
}
