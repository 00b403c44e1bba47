#include "data/files.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- what goes wrong, and where ---- */

enum fault { FAULT_NONE, FAULT_ERROR, FAULT_SHORT, FAULT_DIE, FAULT_SIGNAL };

static const struct kind {
    const char *name;
    enum fault fault;
    int error;
} kinds[] = {{"eio", FAULT_ERROR, EIO}, {"enospc", FAULT_ERROR, ENOSPC}, {"eintr", FAULT_ERROR, EINTR},
             {"short", FAULT_SHORT, 0}, {"enosys", FAULT_ERROR, ENOSYS}, {"die", FAULT_DIE, 0},
             {"term", FAULT_SIGNAL, 0}, {"invalid", FAULT_ERROR, EINVAL}};
enum { KINDS = sizeof kinds / sizeof *kinds };

static struct {
    pthread_once_t read;
    int watched;            /* either variable is set */
    long first, last;       /* calls that go wrong */
    const struct kind *how; /* NULL: none does */
    int trace;              /* descriptor; -1: none */
    atomic_long calls;
} plan = {.read = PTHREAD_ONCE_INIT, .trace = -1};

static void read_environment(void)
{
    const char *fault = getenv("PS_IO_FAULT"), *trace = getenv("PS_IO_TRACE");
    plan.watched = fault || trace;
    if (trace) {
        plan.trace = open(trace, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    }
    if (fault) {
        char *end;
        plan.first = strtol(fault, &end, 10);
        plan.last = *end == '+' ? LONG_MAX : plan.first;
        end += *end == '+';
        for (int i = 0; *end == ':' && plan.first > 0 && i < KINDS; i++) {
            if (strcmp(end + 1, kinds[i].name) == 0 && !(kinds[i].error == EINTR && plan.last > plan.first)) { /* no end of it */
                plan.how = &kinds[i];
            }
        }
        if (!plan.how) {
            plan.how = &kinds[KINDS - 1];
            plan.first = 0;
            plan.last = LONG_MAX;
        }
    }
}

/* Counts a call. FAULT_ERROR: it is not to be made, errno says what it failed with. FAULT_SHORT, FAULT_DIE: come from writes alone;
 * from another call the process does not return to die. */
static enum fault fault_of(const char *call, const char *path)
{
    pthread_once(&plan.read, read_environment);
    if (!plan.watched) {
        return FAULT_NONE;
    }
    long n = atomic_fetch_add(&plan.calls, 1) + 1;
    int is_write = strcmp(call, "write") == 0, wrong = plan.how && n >= plan.first && n <= plan.last;
    wrong = wrong && (plan.how->fault != FAULT_SHORT || is_write);
    if (plan.trace >= 0) {
        dprintf(plan.trace, "%ld %s %s%s%s\n", n, call, path, wrong ? " " : "", wrong ? plan.how->name : "");
    }
    if (!wrong) {
        return FAULT_NONE;
    }
    if (plan.how->fault == FAULT_DIE && !is_write) {
        raise(SIGKILL);
    }
    if (plan.how->fault == FAULT_SIGNAL) {
        kill(getpid(), SIGTERM); /* of the process: a thread that blocks signals leaves it to another */
        return FAULT_NONE;
    }
    errno = plan.how->error;
    return plan.how->fault;
}

/* ---- the calls: again after EINTR; -1 and errno ---- */

static int call_open(const char *path, int flags)
{
    int fd;
    do {
        fd = fault_of("open", path) ? -1 : open(path, flags | O_CLOEXEC, 0666);
    } while (fd < 0 && errno == EINTR);
    return fd;
}

/* at: place in the file; HERE: where the last one ended, or the file's end as it was opened. */
enum { HERE = -1 };

static ssize_t call_read(int fd, const char *path, void *bytes, size_t size, off_t at)
{
    ssize_t n;
    do {
        n = fault_of("read", path) ? -1 : at == HERE ? read(fd, bytes, size) : pread(fd, bytes, size, at);
    } while (n < 0 && errno == EINTR);
    return n;
}

static ssize_t call_write(int fd, const char *path, const void *bytes, size_t size, off_t at)
{
    ssize_t n = -1;
    do {
        enum fault fault = fault_of("write", path);
        size = fault ? (size + 1) / 2 : size;
        if (fault != FAULT_ERROR) {
            n = at == HERE ? write(fd, bytes, size) : pwrite(fd, bytes, size, at);
        }
        if (fault == FAULT_DIE) {
            raise(SIGKILL);
        }
    } while (n < 0 && errno == EINTR);
    return n;
}

static int call_truncate(int fd, const char *path, off_t size)
{
    int result;
    do {
        result = fault_of("truncate", path) ? -1 : ftruncate(fd, size);
    } while (result != 0 && errno == EINTR);
    return result;
}

static int call_fsync(int fd, const char *path)
{
    int result;
    do {
        result = fault_of("fsync", path) ? -1 : fsync(fd);
    } while (result != 0 && errno == EINTR);
    return result;
}

/* Linux has closed the descriptor when it says EINTR, and what was written has been flushed. */
static int call_close(int fd, const char *path)
{
    enum fault fault = fault_of("close", path);
    int error = errno, result = close(fd);
    if (fault) {
        errno = error;
        result = -1;
    }
    return result != 0 && errno == EINTR ? 0 : result;
}

static int call_rename(const char *from, const char *to)
{
    int result;
    do {
        result = fault_of("rename", to) ? -1 : rename(from, to);
    } while (result != 0 && errno == EINTR);
    return result;
}

static int call_link(const char *path, const char *name)
{
    int result;
    do {
        result = fault_of("link", name) ? -1 : link(path, name);
    } while (result != 0 && errno == EINTR);
    return result;
}

static int call_unlink(const char *path)
{
    int result;
    do {
        result = fault_of("unlink", path) ? -1 : unlink(path);
    } while (result != 0 && errno == EINTR);
    return result;
}

static int call_mkdir(const char *path)
{
    int result;
    do {
        result = fault_of("mkdir", path) ? -1 : mkdir(path, 0777);
    } while (result != 0 && errno == EINTR);
    return result;
}

/* The whole file, as long as the process lives or until it closes the file. */
static int call_lock(int fd, const char *path)
{
    struct flock range = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    int result;
    do {
        result = fault_of("lock", path) ? -1 : fcntl(fd, F_SETLK, &range);
    } while (result != 0 && errno == EINTR);
    return result;
}

/* What call_lock fails with when another process has the lock, and where there are none. */
static int is_held(int error)
{
    return error == EAGAIN || error == EACCES;
}

static int has_no_locks(int error)
{
    return error == ENOLCK || error == ENOSYS || error == EOPNOTSUPP;
}

static enum ps_status fail_held(enum ps_status status, const char *path, int fd)
{
    struct flock range = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    char holder[32] = "another process";
    if (fcntl(fd, F_GETLK, &range) == 0 && range.l_type != F_UNLCK && range.l_pid > 0) {
        snprintf(holder, sizeof holder, "process %ld", (long)range.l_pid);
    }
    return ps_fail(status, "%s: held by %s: wait for its end, or choose another folder", path, holder);
}

/* ---- reading ---- */

enum ps_status ps_file_read(enum ps_status status, const char *path, size_t longest, char **bytes, size_t *size)
{
    *bytes = NULL;
    *size = 0;
    struct stat about;
    int fd = call_open(path, O_RDONLY);
    if (fd < 0 || fstat(fd, &about) != 0) {
        ps_fail(status, "%s: cannot be opened: %s", path, strerror(errno));
        if (fd >= 0) {
            close(fd);
        }
        return status;
    }
    enum ps_status result = PS_OK;
    size_t length = (size_t)about.st_size;
    if (!S_ISREG(about.st_mode)) {
        result = ps_fail(status, "%s: is %s, not a file", path, S_ISDIR(about.st_mode) ? "a folder" : "a device or a pipe");
    } else if (longest && length > longest) {
        result = ps_fail(status, "%s: has %zu bytes; at most %zu are expected", path, length, longest);
    } else if (!(*bytes = malloc(length + 1))) {
        result = ps_fail(status, "%s: no memory for its %zu bytes", path, length);
    }
    while (result == PS_OK && *size < length) {
        ssize_t n = call_read(fd, path, *bytes + *size, length - *size, HERE);
        if (n == 0) {
            break; /* it became shorter: the reader of the bytes will tell */
        }
        if (n > 0) {
            *size += (size_t)n;
        } else {
            result = ps_fail(status, "%s: cannot be read: %s", path, strerror(errno));
        }
    }
    close(fd);
    if (result != PS_OK) {
        free(*bytes);
        *bytes = NULL;
        *size = 0;
    } else {
        (*bytes)[*size] = 0;
    }
    return result;
}

/* ---- writing ---- */

/* 1, or 0 and errno. */
static int write_all(int fd, const char *path, const char *bytes, size_t size, off_t at)
{
    while (size > 0) {
        ssize_t n = call_write(fd, path, bytes, size, at);
        if (n <= 0) {
            return 0;
        }
        bytes += n;
        size -= (size_t)n;
        at += at == HERE ? 0 : n;
    }
    return 1;
}

/* Flushes, when there is something to flush, and closes. 1, or 0 and errno. */
static int close_written(int fd, const char *path, int written)
{
    int done = written && call_fsync(fd, path) == 0;
    int error = errno;
    if (call_close(fd, path) != 0 && done) {
        done = 0;
        error = errno;
    }
    errno = error;
    return done;
}

/* The folder that holds path, so that a change of its entries lasts. 1, or 0 and errno. */
static int flush_folder_of(const char *path)
{
    size_t end = strlen(path);
    while (end > 1 && path[end - 1] == '/') {
        end--;
    }
    const char *slash = memrchr(path, '/', end);
    char *folder = slash ? strndup(path, (size_t)(slash - path) + 1) : strdup(".");
    int fd = folder ? call_open(folder, O_RDONLY | O_DIRECTORY) : -1, done = 0;
    if (fd >= 0) {
        done = call_fsync(fd, folder) == 0 || errno == EINVAL; /* EINVAL: a file system that needs no such flush */
        int error = errno;
        close(fd);
        errno = error;
    }
    free(folder);
    return done;
}

static enum ps_status folder_flushed(enum ps_status status, const char *path)
{
    return flush_folder_of(path) ? PS_OK : ps_fail(status, "%s: its folder cannot be flushed: %s", path, strerror(errno));
}

static enum ps_status not_written(enum ps_status status, const char *path)
{
    return ps_fail(status, "%s: cannot be written: %s", path, strerror(errno));
}

struct ps_output {
    enum ps_status status;
    char *path, *partial;
    int fd;
    int error; /* errno of the first failure; 0: none */
};

/* The empty file, locked: two processes that write the same file would mix their bytes. One that a crash left is taken over. */
static enum ps_status open_partial(enum ps_status status, const char *partial, int *fd)
{
    struct stat opened, named;
    for (int tries = 0; tries < 100; tries++) {
        *fd = call_open(partial, O_RDWR | O_CREAT);
        if (*fd < 0) {
            return not_written(status, partial);
        }
        if (call_lock(*fd, partial) != 0 && !has_no_locks(errno)) {
            if (is_held(errno)) {
                fail_held(status, partial, *fd);
            } else {
                not_written(status, partial);
                call_unlink(partial);
            }
            break;
        }
        /* Between opening and locking, the one who held it may have put it in its place. */
        if (fstat(*fd, &opened) == 0 && stat(partial, &named) == 0 && opened.st_ino == named.st_ino &&
            opened.st_dev == named.st_dev) {
            if (opened.st_size == 0 || call_truncate(*fd, partial, 0) == 0) {
                return PS_OK;
            }
            not_written(status, partial);
            call_unlink(partial);
            break;
        }
        ps_fail(status, "%s: comes and goes: another process writes it", partial);
        close(*fd);
        *fd = -1;
    }
    if (*fd >= 0) {
        close(*fd);
    }
    return status;
}

enum ps_status ps_output_open(enum ps_status status, const char *path, struct ps_output **output)
{
    struct ps_output *o = calloc(1, sizeof *o);
    *output = NULL;
    if (!o || !(o->path = strdup(path)) || asprintf(&o->partial, "%s.partial", path) < 0) {
        ps_fail(status, "%s: no memory", path);
        if (o) {
            free(o->path);
        }
        free(o);
        return status;
    }
    o->status = status;
    if (open_partial(status, o->partial, &o->fd) != PS_OK) {
        free(o->path);
        free(o->partial);
        free(o);
        return status;
    }
    *output = o;
    return PS_OK;
}

static void note(struct ps_output *output, int done)
{
    if (!done && !output->error) {
        output->error = errno;
    }
}

void ps_output_write(struct ps_output *output, uint64_t at, const void *bytes, size_t size)
{
    note(output, output->error || write_all(output->fd, output->partial, bytes, size, (off_t)at));
}

void ps_output_read(struct ps_output *output, uint64_t at, void *bytes, size_t size)
{
    memset(bytes, 0, size);
    ssize_t n = 1;
    for (size_t used = 0; used < size && n > 0; used += (size_t)n) {
        n = call_read(output->fd, output->partial, (char *)bytes + used, size - used, (off_t)(at + used));
    }
    note(output, n >= 0);
}

void ps_output_truncate(struct ps_output *output, uint64_t size)
{
    note(output, output->error || call_truncate(output->fd, output->partial, (off_t)size) == 0);
}

void ps_output_start(struct ps_output *output)
{
    if (!ps_output_failed(output)) {
        sync_file_range(output->fd, 0, 0, SYNC_FILE_RANGE_WRITE); /* a hint: what goes wrong is met again when finish flushes */
    }
}

int ps_output_failed(const struct ps_output *output)
{
    return output->error != 0;
}

enum ps_status ps_output_finish(struct ps_output *output, enum ps_status so_far)
{
    struct ps_output *o = output;
    enum ps_status result = so_far;
    if (o->error || (so_far == PS_OK && call_fsync(o->fd, o->partial) != 0)) {
        errno = o->error ? o->error : errno;
        result = not_written(o->status, o->partial);
    }
    /* The lock ends with the close: who gets it before the file has its name would empty it. */
    if (result == PS_OK && call_rename(o->partial, o->path) != 0) {
        result = ps_fail(o->status, "%s: cannot be replaced: %s", o->path, strerror(errno));
    }
    if (result != PS_OK) {
        call_unlink(o->partial);
    }
    if (call_close(o->fd, o->partial) != 0 && result == PS_OK) {
        result = not_written(o->status, o->partial);
    }
    if (result == PS_OK) {
        result = folder_flushed(o->status, o->path);
    }
    free(o->path);
    free(o->partial);
    free(o);
    return result;
}

enum ps_status ps_file_replace(enum ps_status status, const char *path, const void *bytes, size_t size)
{
    struct ps_output *output;
    PS_TRY(ps_output_open(status, path, &output));
    ps_output_write(output, 0, bytes, size);
    return ps_output_finish(output, PS_OK);
}

enum ps_status ps_file_append(enum ps_status status, const char *path, const void *bytes, size_t size)
{
    int fd = call_open(path, O_WRONLY | O_APPEND), is_new = fd < 0 && errno == ENOENT;
    if (is_new) {
        fd = call_open(path, O_WRONLY | O_APPEND | O_CREAT);
    }
    if (fd < 0 || !close_written(fd, path, write_all(fd, path, bytes, size, HERE))) {
        return not_written(status, path);
    }
    return is_new ? folder_flushed(status, path) : PS_OK;
}

static enum ps_status not_removed(enum ps_status status, const char *path)
{
    return errno == ENOENT ? PS_OK : ps_fail(status, "%s: cannot be removed: %s", path, strerror(errno));
}

enum ps_status ps_file_drop(enum ps_status status, const char *path)
{
    return call_unlink(path) != 0 ? not_removed(status, path) : PS_OK;
}

enum ps_status ps_file_remove(enum ps_status status, const char *path)
{
    return call_unlink(path) != 0 ? not_removed(status, path) : folder_flushed(status, path);
}

enum ps_status ps_file_sweep(enum ps_status status, const char *path)
{
    char *partial;
    if (asprintf(&partial, "%s.partial", path) < 0) {
        return ps_fail(status, "%s: no memory", path);
    }
    enum ps_status result = ps_file_remove(status, partial);
    free(partial);
    return result;
}

enum ps_status ps_file_link(enum ps_status status, const char *path, const char *name)
{
    if ((call_unlink(name) == 0 || errno == ENOENT) && call_link(path, name) == 0) {
        return PS_OK;
    }
    int single = errno == EPERM || errno == EOPNOTSUPP || errno == ENOSYS || errno == EMLINK;
    if (single && call_rename(path, name) == 0) {
        return PS_OK;
    }
    return ps_fail(status, "%s: cannot be kept as %s: %s", path, name, strerror(errno));
}

/* ---- folders ---- */

enum ps_status ps_folder_make(enum ps_status status, const char *path)
{
    if (call_mkdir(path) != 0) {
        return errno == EEXIST ? PS_OK : ps_fail(status, "%s: cannot make the folder: %s", path, strerror(errno));
    }
    return folder_flushed(status, path);
}

/* ---- locks ---- */

enum ps_status ps_file_lock(enum ps_status status, const char *path, int *lock)
{
    int fd = call_open(path, O_RDWR | O_CREAT);
    if (fd < 0) {
        return not_written(status, path);
    }
    if (call_lock(fd, path) == 0) {
        *lock = fd;
        return PS_OK;
    }
    if (is_held(errno)) {
        fail_held(status, path, fd);
    } else if (has_no_locks(errno)) {
        status = ps_fail(PS_UNSUPPORTED, "%s: its file system has no locks: %s", path, strerror(errno));
    } else {
        ps_fail(status, "%s: cannot be locked: %s", path, strerror(errno));
    }
    close(fd);
    return status;
}

void ps_file_unlock(int lock)
{
    if (lock >= 0) {
        close(lock);
    }
}

/* ---- standard streams ---- */

void ps_streams_open(void)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++) {
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF) {
            /* The lowest free descriptor is fd. Not open for what it is there for, so that who uses it hears of it. */
            int opened = open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
            (void)opened; /* without /dev/null there is nothing better */
        }
    }
    signal(SIGPIPE, SIG_IGN);
}

enum ps_status ps_stdout_flush(enum ps_status status)
{
    int failed = ferror(stdout);
    if (fflush(stdout) != 0 || failed) {
        return ps_fail(status, "stdout: cannot be written: %s", strerror(errno));
    }
    return PS_OK;
}
