#include "data/probe.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MEMORY = 512 << 20 };

/* What the child writes into the pipe, at the end and whole: less than PIPE_BUF. */
struct answer {
    enum ps_status status;
    char message[1024];
};

/* Bytes of address space in use. 0: /proc cannot be read. */
static rlim_t mapped(void)
{
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "re");
    if (file != NULL) {
        if (fscanf(file, "%lu", &pages) != 1) {
            pages = 0;
        }
        fclose(file);
    }
    return (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE);
}

/* most: the hard limit, at which the kernel no longer says why it kills. */
static void limit(int resource, rlim_t value, rlim_t most)
{
    struct rlimit now;
    if (getrlimit(resource, &now) == 0 && now.rlim_max > most) {
        setrlimit(resource, &(struct rlimit){value, most});
    }
}

static void run_child(pid_t parent, int pipe, rlim_t seconds, enum ps_status (*look)(const void *argument), const void *argument)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) {
        _exit(0);
    }
    /* glibc names a damaged heap on stderr; the one line is the parent's. */
    int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
    dup2(null, STDOUT_FILENO);
    dup2(null, STDERR_FILENO);
    rlim_t memory = mapped();
    if (memory > 0) {
        limit(RLIMIT_AS, memory + MEMORY, memory + MEMORY);
    }
    limit(RLIMIT_CPU, seconds, seconds + 5);
    limit(RLIMIT_CORE, 0, 0);
    struct answer answer = {.status = look(argument)};
    if (answer.status != PS_OK) {
        snprintf(answer.message, sizeof answer.message, "%s", ps_error_message());
    }
    while (write(pipe, &answer, sizeof answer) < 0 && errno == EINTR) {
    }
    _exit(0);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int64_t ps_probe_seconds(int64_t bytes)
{
    return 10 + (bytes >> 23);
}

int ps_probe_wait(double seconds)
{
    return seconds < 3600 ? (int)(1000 * seconds) + 1 : 3600 * 1000;
}

/* 1: the answer came whole. 0: the child ended without one. -1: the time is over. */
static int wait_for_answer(int pipe, double end, struct answer *answer)
{
    for (;;) {
        double left = end - now();
        if (left <= 0) {
            return -1;
        }
        int ready = poll(&(struct pollfd){.fd = pipe, .events = POLLIN}, 1, ps_probe_wait(left));
        if (ready == 0) {
            continue;
        }
        ssize_t n = ready > 0 ? read(pipe, answer, sizeof *answer) : -1;
        if (n >= 0 || errno != EINTR) {
            return n == (ssize_t)sizeof *answer;
        }
    }
}

enum ps_status ps_probe(enum ps_status failure, const char *path, int64_t seconds, enum ps_status (*look)(const void *argument),
                        const void *argument)
{
    int end[2];
    if (pipe2(end, O_CLOEXEC) != 0) {
        return ps_fail(failure, "%s: no pipe to the process that looks at it: %s", path, strerror(errno));
    }
    pid_t parent = getpid(), child = fork();
    if (child == 0) {
        run_child(parent, end[1], (rlim_t)seconds, look, argument);
    }
    int cause = errno;
    close(end[1]);
    if (child < 0) {
        close(end[0]);
        return ps_fail(failure, "%s: no process to look at it: %s", path, strerror(cause));
    }
    struct answer answer = {0};
    int answered = wait_for_answer(end[0], now() + 10.0 * (double)seconds, &answer), status = 0;
    close(end[0]);
    if (answered != 1) {
        kill(child, SIGKILL); /* nothing, when it has ended */
    }
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    if (answered == 1) {
        return answer.status == PS_OK ? PS_OK : ps_fail(answer.status, "%s", answer.message);
    }
    if (answered < 0 || (WIFSIGNALED(status) && WTERMSIG(status) == SIGXCPU)) {
        return ps_fail(failure, "%s: HDF5 did not come to an end with it in %" PRId64 " s: it is damaged, or made to harm", path,
                       seconds);
    }
    return ps_fail(failure, "%s: HDF5 crashed on it%s%s%s: it is damaged, or made to harm", path, WIFSIGNALED(status) ? " (" : "",
                   WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "", WIFSIGNALED(status) ? ")" : "");
}
