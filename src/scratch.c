#include "src/scratch.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Of the process: a signal's handler knows of nothing else. */
static char folder[PS_SCRATCH_PATH], files[PS_SCRATCH_FILES][PS_SCRATCH_PATH];
static volatile sig_atomic_t made; /* files */

void ps_scratch_remove(void)
{
    for (int i = 0; i < made; i++) {
        unlink(files[i]);
    }
    if (*folder) {
        rmdir(folder);
    }
    made = 0;
    *folder = 0;
}

static void ended(int number)
{
    ps_scratch_remove();
    signal(number, SIG_DFL);
    raise(number);
}

static enum ps_status make_folder(const char *program)
{
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    const char *parent = getenv("TMPDIR");
    const int length = snprintf(folder, sizeof folder, "%s/%s-XXXXXX", parent && *parent ? parent : "/tmp", program);
    if (length >= PS_SCRATCH_PATH || !mkdtemp(folder)) {
        const char *reason = length >= PS_SCRATCH_PATH ? "its name is too long" : strerror(errno);
        *folder = 0;
        return ps_fail(PS_DATA, "%s: no folder for files of a while can be made in it: %s", parent && *parent ? parent : "/tmp",
                       reason);
    }
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
        if (signal(signals[i], ended) == SIG_IGN) {
            signal(signals[i], SIG_IGN);
        }
    }
    return PS_OK;
}

enum ps_status ps_scratch_file(const char *program, const char *name, char path[PS_SCRATCH_PATH])
{
    if (!*folder) {
        PS_TRY(make_folder(program));
    }
    if (made == PS_SCRATCH_FILES || snprintf(path, PS_SCRATCH_PATH, "%s/%s", folder, name) >= PS_SCRATCH_PATH) {
        return ps_fail(PS_DATA, "%s: no name for %s in it", folder, name);
    }
    memcpy(files[made], path, PS_SCRATCH_PATH);
    made = made + 1;
    return PS_OK;
}
