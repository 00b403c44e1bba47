/* Temporary folders, whole files, and the programs run as a person runs them: what the end-to-end tests share. */
#ifndef PS_TESTS_RUN_H
#define PS_TESTS_RUN_H

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "kernels/status.h"
#include "tests/checks.h"

#define OK(expression) ck_assert_msg((expression) == PS_OK, "%s: %s", #expression, ps_error_message())

/* ---- files ---- */

struct path {
    char text[1024];
};

static inline struct path path_of(const char *format, ...) __attribute__((format(printf, 1, 2)));
static inline struct path path_of(const char *format, ...)
{
    struct path path;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(path.text, sizeof path.text, format, arguments);
    va_end(arguments);
    return path;
}

/* A new folder of its own. */
static inline struct path folder_make(void)
{
    const char *parent = getenv("TMPDIR");
    struct path path = path_of("%s/patchstep-test-XXXXXX", parent ? parent : "/tmp");
    ck_assert_msg(mkdtemp(path.text) != NULL, "%s: %s", path.text, strerror(errno));
    return path;
}

static inline int remove_entry(const char *path, const struct stat *about, int type, struct FTW *place)
{
    (void)about, (void)type, (void)place;
    return remove(path);
}

static inline void folder_remove(const char *path)
{
    nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

static inline int file_exists(const char *path)
{
    return access(path, F_OK) == 0;
}

/* The whole file, malloc'ed, with a zero byte after its *size bytes (size may be NULL). */
static inline char *file_read(const char *path, size_t *size)
{
    FILE *file = fopen(path, "rb");
    ck_assert_msg(file != NULL, "%s: %s", path, strerror(errno));
    fseek(file, 0, SEEK_END);
    size_t length = (size_t)ftell(file);
    rewind(file);
    char *bytes = malloc(length + 1);
    ck_assert_uint_eq(fread(bytes, 1, length, file), length);
    bytes[length] = 0;
    fclose(file);
    if (size) {
        *size = length;
    }
    return bytes;
}

static inline void file_write(const char *path, const void *bytes, size_t size)
{
    FILE *file = fopen(path, "wb");
    ck_assert_msg(file != NULL, "%s: %s", path, strerror(errno));
    ck_assert_uint_eq(fwrite(bytes, 1, size, file), size);
    fclose(file);
}

static inline int files_equal(const char *a, const char *b)
{
    size_t size_a, size_b;
    char *x = file_read(a, &size_a), *y = file_read(b, &size_b);
    int equal = size_a == size_b && memcmp(x, y, size_a) == 0;
    free(x);
    free(y);
    return equal;
}

/* ---- programs ---- */

enum { ARGUMENTS = 64, LONGEST_RUN = 240 /* seconds */ };

struct result {
    int code; /* exit code; -1 when a signal ended it */
    char *out, *err;
    double seconds; /* in all; after the signal, where one was sent */
};

static inline double seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline void sleep_seconds(double seconds)
{
    struct timespec t = {.tv_sec = (time_t)seconds, .tv_nsec = (long)(1e9 * (seconds - (double)(time_t)seconds))};
    while (nanosleep(&t, &t) != 0 && errno == EINTR) {
    }
}

/* A program under way; its output is collected as it comes. */
struct process {
    pid_t pid;
    int fd[2]; /* of its stdout and stderr; -1 once closed */
    char *text[2];
    size_t used[2];
    double begin;
};

/* path: of the program. arguments: NULL-terminated, without its name. terminal: its stderr is one, of 80 columns. */
static inline struct process process_start(const char *path, char *const *arguments, int terminal)
{
    char *argv[ARGUMENTS + 2] = {(char *)path};
    for (int i = 0; i < ARGUMENTS && arguments[i]; i++) {
        argv[i + 1] = arguments[i];
    }
    int out[2], err[2];
    ck_assert_int_eq(pipe(out), 0);
    if (terminal) {
        err[0] = posix_openpt(O_RDWR | O_NOCTTY);
        ck_assert_msg(err[0] >= 0 && grantpt(err[0]) == 0 && unlockpt(err[0]) == 0, "no terminal: %s", strerror(errno));
        err[1] = open(ptsname(err[0]), O_RDWR | O_NOCTTY);
        ck_assert_int_eq(ioctl(err[1], TIOCSWINSZ, &(struct winsize){.ws_row = 24, .ws_col = 80}), 0);
    } else {
        ck_assert_int_eq(pipe(err), 0);
    }
    posix_spawn_file_actions_t files; /* not fork, which copies the large page tables of AddressSanitizer */
    posix_spawn_file_actions_init(&files);
    int *const pipes[] = {out, err};
    for (int i = 0; i < 2; i++) {
        posix_spawn_file_actions_adddup2(&files, pipes[i][1], STDOUT_FILENO + i);
        posix_spawn_file_actions_addclose(&files, pipes[i][0]);
        posix_spawn_file_actions_addclose(&files, pipes[i][1]);
    }
    pid_t pid;
    const int failed = posix_spawn(&pid, path, &files, NULL, argv, environ);
    ck_assert_msg(failed == 0, "%s: %s", path, strerror(failed));
    posix_spawn_file_actions_destroy(&files);
    close(out[1]);
    close(err[1]);
    struct process p = {.pid = pid, .fd = {out[0], err[0]}, .begin = seconds_now()};
    for (int i = 0; i < 2; i++) {
        fcntl(p.fd[i], F_SETFD, FD_CLOEXEC);
        p.text[i] = calloc(1, 1);
    }
    return p;
}

/* Collects output for at most `seconds`, until `enough` characters of stdout are there or both streams have ended; 1: ended. */
static inline int process_read(struct process *p, double seconds, size_t enough)
{
    double end = seconds_now() + seconds;
    while (p->fd[0] >= 0 || p->fd[1] >= 0) {
        double left = end - seconds_now();
        if (left <= 0 || p->used[0] >= enough) {
            return 0;
        }
        struct pollfd ready[2] = {{.fd = p->fd[0], .events = POLLIN}, {.fd = p->fd[1], .events = POLLIN}};
        poll(ready, 2, (int)(1e3 * left) + 1);
        for (int i = 0; i < 2; i++) {
            if (p->fd[i] < 0 || !ready[i].revents) {
                continue;
            }
            char chunk[4096];
            ssize_t n = read(p->fd[i], chunk, sizeof chunk);
            if (n <= 0) {
                close(p->fd[i]);
                p->fd[i] = -1;
                continue;
            }
            p->text[i] = realloc(p->text[i], p->used[i] + (size_t)n + 1);
            memcpy(p->text[i] + p->used[i], chunk, (size_t)n);
            p->used[i] += (size_t)n;
            p->text[i][p->used[i]] = 0;
        }
    }
    return 1;
}

/* Waits for its end, at most LONGEST_RUN seconds. */
static inline struct result process_end(struct process *p)
{
    double begin = seconds_now();
    int ended = process_read(p, LONGEST_RUN, SIZE_MAX), how = 0;
    if (!ended) {
        kill(p->pid, SIGKILL);
    }
    waitpid(p->pid, &how, 0);
    ck_assert_msg(ended, "the program did not end within %d s; stdout: %s; stderr: %s", LONGEST_RUN, p->text[0], p->text[1]);
    return (struct result){
        .code = WIFEXITED(how) ? WEXITSTATUS(how) : -1, .out = p->text[0], .err = p->text[1], .seconds = seconds_now() - begin};
}

static inline void result_free(struct result *r)
{
    free(r->out);
    free(r->err);
}

static inline int lines_of(const char *text)
{
    int lines = 0;
    for (; *text; text++) {
        lines += *text == '\n';
    }
    return lines;
}

#endif
