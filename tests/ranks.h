/* train by several ranks under mpirun: what the suites of it share. */
#ifndef PS_TESTS_RANKS_H
#define PS_TESTS_RANKS_H

#include <dirent.h>
#include <dlfcn.h>

#include "data/import.h"
#include "tests/programs.h"
#include "tests/random_values.h"

static struct path mpirun;

/* How a suite's config begins: its data, of begin_ranks, and a model but for its layers. */
#define RANKS_MODEL              \
    "data:\n"                    \
    "  path: series.h5\n"        \
    "  split: [698, 120, 180]\n" \
    "  drop_last: false\n"       \
    "model:\n"                   \
    "  seq_len: 48\n"            \
    "  pred_len: 12\n"           \
    "  patch_len: 8\n"           \
    "  stride: 8\n"              \
    "  d_model: 16\n"            \
    "  n_heads: 4\n"             \
    "  d_ff: 32\n"

/* The suite's folder, with its config and so many hours of data. */
static inline void begin_ranks(const char *text, const char *hours)
{
    folder = folder_make();
    config = path_of("%.900s/config.yaml", folder.text);
    file_write(config.text, text, strlen(text));
    struct path series = path_of("%.900s/series.h5", folder.text);
    expect_done(run("sample_series", ARGS(series.text, "--hours", (char *)hours, "--channels", "3")));
}

#define HOLES "--set", "data.missing=mask", "--set", "data.path=holes.h5"

/* Beside it 998 hours with ever more holes, from one in fifty values to nine in ten, and windows of a channel with none observed:
 * so parts of a batch have other numbers of targets. */
static inline void write_holes(void)
{
    enum { ROWS = 998, CHANNELS = 3 };
    static float values[ROWS * CHANNELS];
    uint64_t random = 3;
    for (int i = 0; i < ROWS * CHANNELS; i++) {
        const int row = i / CHANNELS;
        const double x = 5 * (i % CHANNELS) + 2 * sin(0.26 * row) + 0.3 * random_normal(&random);
        const int unseen = i % CHANNELS == 1 && row >= 200 && row < 270;
        values[i] = unseen || random_uniform(&random) < 0.02 + 0.88 * row / ROWS ? NAN : (float)x;
    }
    ck_assert_msg(ps_series_write(path_of("%.900s/holes.h5", folder.text).text, values, ROWS, CHANNELS, NULL, NULL, NULL, NULL) ==
                      PS_OK,
                  "%s", ps_error_message());
}

static inline void end_ranks(void)
{
    folder_remove(folder.text);
}

/* Why ranks cannot be started here; NULL: they can. */
static inline const char *ranks_missing(void)
{
    const char *folders = getenv("PATH");
    char *copy = strdup(folders ? folders : ""), *rest = copy;
    for (char *one; !*mpirun.text && (one = strsep(&rest, ":")) != NULL;) {
        struct path candidate = path_of("%.900s/mpirun", one);
        if (access(candidate.text, X_OK) == 0) {
            mpirun = candidate;
        }
    }
    free(copy);
    if (!file_exists(path_of("%.900s/libpatchstep_mpi.so", programs).text)) {
        return "this build has no libpatchstep_mpi";
    }
    /* Containers run as root; and MPI keeps what it has allocated. */
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    setenv("LSAN_OPTIONS", "detect_leaks=0", 1);
    return *mpirun.text ? NULL : "no mpirun";
}

/* GPUs that NCCL can sum between, where ranks compute on GPUs; more ranks sum on the host. */
static int nccl_gpus;

/* Why NCCL is left out; NULL: it is not. */
static inline const char *nccl_missing(void)
{
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    const char *missing = ps_cuda_device_count() < 2 ? "one GPU is here" : library ? NULL : "no libnccl.so.2";
    nccl_gpus = missing ? 0 : ps_cuda_device_count();
    return missing;
}

/* How many ranks tests take where any number would do: so many that NCCL serves them, where it is there. */
static inline int usual_ranks(void)
{
    return nccl_gpus == 2 ? 2 : 3;
}

/* train by n ranks, or without mpirun where n is 0. */
static inline struct process start_ranks(int n, const char *dir, char *const *more)
{
    if (n == 0) {
        return start_train(dir, more);
    }
    const int on_host = strcmp(device, "cpu") != 0 && n > nccl_gpus;
    struct path number = path_of("%d", n), program = path_of("%.900s/train", programs);
    char *arguments[ARGUMENTS + 1] = {"--oversubscribe",
                                      "--bind-to",
                                      "none",
                                      "-n",
                                      number.text,
                                      program.text,
                                      config.text,
                                      "--device",
                                      (char *)device,
                                      "--run-dir",
                                      (char *)dir,
                                      "--set",
                                      on_host ? "runtime.exchange=mpi" : "runtime.exchange=auto"};
    int count = 13;
    for (int i = 0; more[i]; i++) {
        ck_assert_int_lt(count, ARGUMENTS);
        arguments[count++] = more[i];
    }
    return process_start(mpirun.text, arguments, 0);
}

/* The arguments of both lists, for one call. */
static inline char **joined(char *const *a, char *const *b)
{
    static char *all[ARGUMENTS + 1];
    int n = 0;
    for (int list = 0; list < 2; list++) {
        for (char *const *one = list ? b : a; *one; one++) {
            all[n++] = *one;
        }
    }
    all[n] = NULL;
    return all;
}

static inline struct result train_ranks(int n, const char *dir, char *const *more)
{
    struct process p = start_ranks(n, dir, more);
    return process_end(&p);
}

/* The processes that this one has started and that are named `name`: at most `room`. */
static inline int children_of(pid_t parent, const char *name, pid_t *pids, int room)
{
    int n = 0;
    DIR *all = opendir("/proc");
    for (const struct dirent *one; all && n < room && (one = readdir(all)) != NULL;) {
        struct path path = path_of("/proc/%.64s/stat", one->d_name);
        FILE *file = atoi(one->d_name) > 0 ? fopen(path.text, "r") : NULL;
        int found, above;
        char called[64], state;
        if (file && fscanf(file, "%d (%63[^)]) %c %d", &found, called, &state, &above) == 4 && above == parent &&
            strcmp(called, name) == 0) {
            pids[n++] = found;
        }
        if (file) {
            fclose(file);
        }
    }
    if (all) {
        closedir(all);
    }
    return n;
}

#endif
