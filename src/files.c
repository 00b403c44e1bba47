#include "src/files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum ps_status ps_file_read(enum ps_status status, const char *path, size_t longest, char **bytes, size_t *size)
{
    *bytes = NULL;
    *size = 0;
    struct stat about;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
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
        ssize_t n = read(fd, *bytes + *size, length - *size);
        if (n == 0) {
            break; /* it became shorter: the reader of the bytes will tell */
        }
        if (n > 0) {
            *size += (size_t)n;
        } else if (errno != EINTR) {
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

/* 1, or 0 and errno. */
static int write_all(int fd, const char *bytes, size_t size)
{
    while (size > 0) {
        ssize_t n = write(fd, bytes, size);
        if (n < 0 && errno != EINTR) {
            return 0;
        }
        bytes += n > 0 ? n : 0;
        size -= n > 0 ? (size_t)n : 0;
    }
    return 1;
}

/* Makes the renaming itself last. 1, or 0 and errno. */
static int flush_folder(const char *path)
{
    const char *slash = strrchr(path, '/');
    char *folder = slash ? strndup(path, (size_t)(slash - path) + 1) : strdup(".");
    int fd = folder ? open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    free(folder);
    if (fd < 0) {
        return 0;
    }
    int done = fsync(fd) == 0 || errno == EINVAL; /* EINVAL: a file system that needs no such flush */
    int cause = errno;
    close(fd);
    errno = cause;
    return done;
}

enum ps_status ps_file_replace(enum ps_status status, const char *path, const void *bytes, size_t size)
{
    char *partial = NULL;
    if (asprintf(&partial, "%s.partial", path) < 0) {
        return ps_fail(status, "%s: no memory", path);
    }
    enum ps_status result = PS_OK;
    int fd = open(partial, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) {
        result = ps_fail(status, "%s: cannot be written: %s", partial, strerror(errno));
    } else {
        int done = write_all(fd, bytes, size) && fsync(fd) == 0;
        int cause = errno;
        if (close(fd) != 0 && done) {
            done = 0;
            cause = errno;
        }
        if (!done) {
            result = ps_fail(status, "%s: cannot be written: %s", partial, strerror(cause));
        } else if (rename(partial, path) != 0) {
            result = ps_fail(status, "%s: cannot be replaced: %s", path, strerror(errno));
        }
        if (result != PS_OK) {
            unlink(partial);
        } else if (!flush_folder(path)) {
            result = ps_fail(status, "%s: its folder cannot be flushed: %s", path, strerror(errno));
        }
    }
    free(partial);
    return result;
}
