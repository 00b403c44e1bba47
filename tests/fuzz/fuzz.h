/* What the fuzz targets share. Each is one file, fuzz_NAME.c, with libFuzzer's LLVMFuzzerTestOneInput; scripts/fuzz.sh runs them.
 *
 * Targets that hand bytes to libhdf5 call what the programs run in a child (data/probe.h) in this process, so that libFuzzer sees
 * it. libhdf5 has faults of its own that crash it there; a crash is a finding when our code is at fault, or when the same input
 * harms a process that looks at it through a child. PS_FUZZ_CONTAINED=1 runs that second form. */
#ifndef PS_TESTS_FUZZ_H
#define PS_TESTS_FUZZ_H

#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/status.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t most);

/* An oracle that fails: the input is kept as a crash. */
#define MUST(condition)                                                                                     \
    do {                                                                                                    \
        if (!(condition)) {                                                                                 \
            fprintf(stderr, "%s:%d: not so: %s: %s\n", __FILE__, __LINE__, #condition, ps_error_message()); \
            abort();                                                                                        \
        }                                                                                                   \
    } while (0)

/* A refusal is one line, and says something. */
static inline void must_explain(enum ps_status status, enum ps_status expected)
{
    MUST(status == PS_OK || status == expected);
    MUST(status == PS_OK || (*ps_error_message() && !strchr(ps_error_message(), '\n')));
}

/* A path of this process in the folder that scripts/fuzz.sh makes, in memory, and removes. */
static inline const char *own_path(char path[256], const char *ending)
{
    const char *folder = getenv("PS_FUZZ_FOLDER");
    snprintf(path, 256, "%s/fuzz-%d%s", folder ? folder : "/tmp", (int)getpid(), ending);
    return path;
}

/* The bytes as a file; its path. */
static inline const char *put_file(const void *bytes, size_t size)
{
    static char path[256];
    int fd = open(own_path(path, ""), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    MUST(fd >= 0 && write(fd, bytes, size) == (ssize_t)size && close(fd) == 0);
    return path;
}

#endif
