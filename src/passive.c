#include "src/passive.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* --device cuda: the CPU's threads compute next to nothing, and a second start takes 10 ms. */
static int asks_for_cuda(char **argv)
{
    for (; argv[0]; argv++) {
        if (strcmp(argv[0], "--device") == 0 && argv[1] && strncmp(argv[1], "cuda", 4) == 0) {
            return 1;
        }
    }
    return 0;
}

/* libgomp reads its environment as it is loaded, before main: the program sets the variable and starts once more, as the same
 * process. Where it cannot, threads spin. Its path is asked for because /proc/self/exe would name the process "exe". */
void ps_wait_passively(char **argv)
{
    char path[PATH_MAX];
    if (asks_for_cuda(argv)) {
        return;
    }
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    if (length > 0 && !getenv("OMP_WAIT_POLICY") && !getenv("GOMP_SPINCOUNT") && setenv("OMP_WAIT_POLICY", "passive", 1) == 0) {
        path[length] = 0;
        execv(path, argv);
    }
}
