#include "src/passive.h"

#include <limits.h>
#include <stdlib.h>
#include <unistd.h>

/* libgomp reads its environment as it is loaded, before main: the program sets the variable and starts once more, as the same
 * process. Where it cannot, threads spin. Its path is asked for because /proc/self/exe would name the process "exe". */
void ps_wait_passively(char **argv)
{
    char path[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    if (length > 0 && !getenv("OMP_WAIT_POLICY") && !getenv("GOMP_SPINCOUNT") && setenv("OMP_WAIT_POLICY", "passive", 1) == 0) {
        path[length] = 0;
        execv(path, argv);
    }
}
