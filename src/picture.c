#include "src/picture.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "data/text.h"

extern char **environ;

/* The system's too, for which packages are, when another stands before it. */
static const char *const pythons[] = {"python3", "/usr/bin/python3"};

enum ps_status ps_picture_check(const char *picture)
{
    return ps_text_ends(picture, ".png") || ps_text_ends(picture, ".pdf") || ps_text_ends(picture, ".svg")
               ? PS_OK
               : ps_fail(PS_USAGE, "--plot is \"%.200s\": expected a name that ends with .png, .pdf or .svg", picture);
}

/* plot.py beside the program as it was built, or where it was installed. */
static enum ps_status find_script(char script[PATH_MAX])
{
    static const char *const places[] = {"scripts/plot.py", PS_BIN_TO_SCRIPTS "/plot.py"};
    char program[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    program[length > 0 ? length : 0] = 0;
    char *slash = strrchr(program, '/');
    for (size_t i = 0; slash && i < sizeof places / sizeof *places; i++) {
        slash[1] = 0;
        if (snprintf(script, PATH_MAX, "%s%s", program, places[i]) < PATH_MAX && access(script, R_OK) == 0) {
            return PS_OK;
        }
    }
    return ps_fail(PS_USAGE, "plot.py is neither in scripts/ beside the program nor in " PS_BIN_TO_SCRIPTS);
}

/* Runs it and waits. said: the last line of its stderr. Its exit code; -1: it did not start, or a signal ended it. */
static int run(const char *const *arguments, char said[512])
{
    int end[2], code = -1;
    pid_t child;
    *said = 0;
    if (pipe2(end, O_CLOEXEC) != 0) {
        return -1;
    }
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, end[1], STDERR_FILENO);
    const int started = posix_spawnp(&child, arguments[0], &actions, NULL, (char *const *)arguments, environ) == 0;
    posix_spawn_file_actions_destroy(&actions);
    close(end[1]);
    FILE *from = fdopen(end[0], "r");
    for (char line[512]; from && fgets(line, sizeof line, from);) {
        line[strcspn(line, "\n")] = 0;
        if (*line) {
            strcpy(said, line);
        }
    }
    if (from) {
        fclose(from);
    } else {
        close(end[0]);
    }
    if (started) {
        while (waitpid(child, &code, 0) < 0 && errno == EINTR) {
        }
        code = WIFEXITED(code) ? WEXITSTATUS(code) : -1;
    }
    return code;
}

/* One that could import what plot.py does; NULL: none. */
static const char *find_python(void)
{
    static const char can[] = "import importlib.util as u, sys; sys.exit(not (u.find_spec('matplotlib') and u.find_spec('h5py')))";
    char said[512];
    for (size_t i = 0; i < sizeof pythons / sizeof *pythons; i++) {
        if (run((const char *const[]){pythons[i], "-c", can, NULL}, said) == 0) {
            return pythons[i];
        }
    }
    return NULL;
}

enum ps_status ps_picture_draw(const char *forecasts, const char *data, const char *picture)
{
    char script[PATH_MAX], said[512];
    PS_TRY(find_script(script));
    const char *python = find_python();
    if (!python) {
        return ps_fail(PS_USAGE, "needs python3 with matplotlib and h5py, as of Debian's python3-matplotlib and python3-h5py");
    }
    const int code =
        run((const char *const[]){python, "-B", script, "--ahead", forecasts, "--data", data, "--out", picture, NULL}, said);
    return code == 0 ? PS_OK : ps_fail(PS_USAGE, "%s", *said ? said : "plot.py did not come to its end");
}
