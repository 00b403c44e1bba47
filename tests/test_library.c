/* The library as another program uses it, through include/patchstep.h alone: against the program forecast, with several models in a
 * thread and in several, what it leaves as the caller has it, and what it refuses.
 *
 * PS_TEST_DEVICE: the device to run on (default cpu). */
#include "include/patchstep.h"

#include <cblas.h>
#include <dirent.h>
#include <locale.h>
#include <math.h>
#include <omp.h>
#include <pthread.h>

#include "data/import.h"
#include "tests/programs.h"
#include "tests/random_values.h"
#include "tests/suite.h"

enum { ROWS = 400, MODELS = 2, MOST_VALUES = 8 * 4 * 64 };

#define DONE(expression) ck_assert_msg((expression) == PATCHSTEP_OK, "%s: %s", #expression, patchstep_error())

/* Two models of other sizes and another kind, and what the program forecasts by them on one thread, as the library computes. */
static struct trained {
    const char *name, *config;
    char *const *channels; /* NULL: the data have no names */
    int C, L, H, windows;
    struct path checkpoint;
    float inputs[MOST_VALUES], expected[MOST_VALUES]; /* [windows, C, L], [windows, C, H] */
} models[MODELS] = {
    {"named",
     "data: {path: named.h5}\n"
     "model: {seq_len: 48, pred_len: 12, patch_len: 8, stride: 4, d_model: 16, n_heads: 4, d_ff: 24, n_layers: 2,\n"
     "        norm: batch, norm_place: post, residual_attention: true}\n"
     "train: {epochs: 1, batch_size: 16}\n"
     "runtime: {threads: 1}\n",
     (char *const[]){"load", "wind, \"west\"", "price"},
     3,
     48,
     12,
     7,
     {""},
     {0},
     {0}},
    {"bare",
     "data: {path: bare.h5}\n"
     "model: {seq_len: 64, pred_len: 24, patch_len: 16, stride: 8, d_model: 32, n_heads: 2, d_ff: 64, n_layers: 1}\n"
     "train: {epochs: 1, batch_size: 32}\n"
     "runtime: {threads: 1}\n",
     NULL,
     4,
     64,
     24,
     8,
     {""},
     {0},
     {0}}};

static struct patchstep_model *opened(const struct trained *t)
{
    struct patchstep_model *model;
    DONE(patchstep_open(t->checkpoint.text, device, NULL, &model));
    ck_assert(model != NULL);
    return model;
}

/* The first n windows, to the bit. */
static void expect_forecasts(struct patchstep_model *model, const struct trained *t, int n)
{
    float got[MOST_VALUES];
    DONE(patchstep_forecast(model, t->inputs, n, got));
    for (int i = 0; i < n * t->C * t->H; i++) {
        ck_assert_msg(got[i] == t->expected[i], "%s, %d windows, value %d: %.9g, the program has %.9g", t->name, n, i,
                      (double)got[i], (double)t->expected[i]);
    }
}

/* ---- forecasts ---- */

START_TEST(as_the_program)
{
    for (int m = 0; m < MODELS; m++) {
        const struct trained *t = &models[m];
        struct patchstep_model *model = opened(t);
        for (int n = 0; n <= t->windows; n++) {
            expect_forecasts(model, t, n);
        }
        patchstep_close(model);
    }
    ck_assert_str_eq(patchstep_error(), ""); /* none failed */
}
END_TEST

START_TEST(about_a_model)
{
    ck_assert_str_eq(patchstep_version(), "0.1.0");
    for (int m = 0; m < MODELS; m++) {
        const struct trained *t = &models[m];
        struct patchstep_model *model = opened(t);
        ck_assert_int_eq(patchstep_channels(model), t->C);
        ck_assert_int_eq(patchstep_seq_len(model), t->L);
        ck_assert_int_eq(patchstep_pred_len(model), t->H);
        ck_assert_str_eq(patchstep_note(model), "");
        for (int c = 0; c < t->C; c++) {
            const char *name = patchstep_channel_name(model, c);
            ck_assert_msg(t->channels ? name && strcmp(name, t->channels[c]) == 0 : !name, "channel %d of %s: %s", c, t->name,
                          name);
        }
        ck_assert(!patchstep_channel_name(model, -1) && !patchstep_channel_name(model, t->C));
        patchstep_close(model);
    }
    patchstep_close(NULL);
}
END_TEST

START_TEST(of_a_run)
{
    struct patchstep_model *model;
    DONE(patchstep_open(new_dir(models[1].name).text, device, NULL, &model));
    expect_forecasts(model, &models[1], 1);
    patchstep_close(model);
}
END_TEST

/* Trained otherwise than the CPU can compute: a note says so. */
START_TEST(note)
{
    struct ps_checkpoint c;
    struct path path = new_dir("noted.h5");
    OK(ps_checkpoint_load(models[0].checkpoint.text, &c));
    char *at = strstr(c.config, "precision: fp32");
    ck_assert(at != NULL);
    memcpy(at, "precision: bf16", 15);
    OK(ps_checkpoint_save(path.text, &c));
    ps_checkpoint_free(&c);
    struct patchstep_model *model;
    DONE(patchstep_open(path.text, "cpu", NULL, &model));
    ck_assert_str_eq(patchstep_note(model), "trained in bf16, computed in fp32 on the CPU");
    patchstep_close(model);
    DONE(patchstep_open(path.text, "cpu", "fp32", &model));
    ck_assert_str_eq(patchstep_note(model), "");
    patchstep_close(model);
}
END_TEST

/* ---- several models ---- */

START_TEST(several_in_a_thread)
{
    struct patchstep_model *first = opened(&models[0]), *second = opened(&models[1]), *again = opened(&models[0]);
    for (int i = 0; i < 3; i++) {
        expect_forecasts(first, &models[0], 1 + i);
        expect_forecasts(second, &models[1], 1 + i);
        expect_forecasts(again, &models[0], 2 + i);
    }
    patchstep_close(first);
    expect_forecasts(second, &models[1], 3);
    expect_forecasts(again, &models[0], 3);
    patchstep_close(again);
    patchstep_close(second);
}
END_TEST

enum { THREADS = 4, TIMES = 3, FORECASTS = 20 };

/* Opening forks, and a fork while another thread allocates leaves the child of a program under AddressSanitizer waiting for the
 * allocator's lock; glibc's own allocator minds forks. There alone opening waits until no other thread does anything; all threads
 * are there before the first opens, and stay until the last has. */
static pthread_rwlock_t quiet = PTHREAD_RWLOCK_INITIALIZER;
static pthread_barrier_t together;
#if defined(__SANITIZE_ADDRESS__)
#define OPENING() pthread_rwlock_wrlock(&quiet)
#else
#define OPENING() pthread_rwlock_rdlock(&quiet)
#endif

/* Check's assertions are the first thread's alone: others count what went wrong. */
static void *with_own_models(void *number)
{
    const int self = *(int *)number;
    intptr_t wrong = 0;
    pthread_barrier_wait(&together);
    for (int i = 0; i < TIMES; i++) {
        const struct trained *t = &models[(self + i) % MODELS];
        struct patchstep_model *model, *none;
        struct path missing = path_of("/nowhere/of-thread-%d-%d", self, i);
        float got[MOST_VALUES];
        OPENING();
        const int failed = patchstep_open(t->checkpoint.text, device, NULL, &model) != PATCHSTEP_OK;
        wrong += patchstep_open(missing.text, device, NULL, &none) != PATCHSTEP_CHECKPOINT;
        pthread_rwlock_unlock(&quiet);
        pthread_rwlock_rdlock(&quiet);
        wrong += failed;
        for (int j = 0; j < FORECASTS && !failed; j++) {
            const int n = 1 + j % t->windows;
            wrong += patchstep_forecast(model, t->inputs, n, got) != PATCHSTEP_OK;
            wrong += memcmp(got, t->expected, (size_t)(n * t->C * t->H) * sizeof *got) != 0;
        }
        wrong += strstr(patchstep_error(), missing.text) == NULL; /* other threads' errors are not this one's */
        patchstep_close(model);
        pthread_rwlock_unlock(&quiet);
    }
    pthread_barrier_wait(&together);
    return (void *)wrong;
}

START_TEST(one_in_each_thread)
{
    pthread_t threads[THREADS];
    int numbers[THREADS];
    pthread_barrier_init(&together, NULL, THREADS + 1);
    for (int i = 0; i < THREADS; i++) {
        numbers[i] = i;
        ck_assert_int_eq(pthread_create(&threads[i], NULL, with_own_models, &numbers[i]), 0);
    }
    pthread_barrier_wait(&together);
    pthread_barrier_wait(&together);
    for (int i = 0; i < THREADS; i++) {
        void *wrong;
        pthread_join(threads[i], &wrong);
        ck_assert_msg(!wrong, "thread %d: %ld calls went wrong", i, (long)(intptr_t)wrong);
    }
    pthread_barrier_destroy(&together);
    ck_assert_str_eq(patchstep_error(), ""); /* this thread's */
}
END_TEST

static void *use_of_another(void *model)
{
    float got[MOST_VALUES];
    const struct trained *t = &models[1];
    intptr_t wrong = patchstep_forecast(model, t->inputs, 2, got) != PATCHSTEP_OK ||
                     memcmp(got, t->expected, (size_t)(2 * t->C * t->H) * sizeof *got) != 0;
    patchstep_close(model);
    return (void *)wrong;
}

START_TEST(handed_over)
{
    pthread_t thread;
    void *wrong;
    ck_assert_int_eq(pthread_create(&thread, NULL, use_of_another, opened(&models[1])), 0);
    pthread_join(thread, &wrong);
    ck_assert(!wrong);
}
END_TEST

/* ---- what stays as the caller has it ---- */

static int threads_of_the_process(void)
{
    DIR *folder = opendir("/proc/self/task");
    int n = 0;
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        n += entry->d_name[0] != '.';
    }
    closedir(folder);
    return n;
}

START_TEST(settings)
{
    openblas_set_num_threads(2);
    omp_set_num_threads(3);
    omp_set_dynamic(1);
    const int threads = threads_of_the_process();
    struct patchstep_model *model = opened(&models[0]);
    expect_forecasts(model, &models[0], models[0].windows);
    if (strcmp(device, "cpu") == 0) {
        ck_assert_int_eq(threads_of_the_process(), threads);
    }
    patchstep_close(model);
    ck_assert_int_ne(patchstep_open("/nowhere", device, NULL, &model), PATCHSTEP_OK);
    ck_assert_int_eq(openblas_get_num_threads(), 2);
    ck_assert_int_eq(omp_get_max_threads(), 3);
    ck_assert_int_eq(omp_get_dynamic(), 1);
}
END_TEST

/* Where children are not waited for, and where numbers have a comma. */
START_TEST(surroundings)
{
    signal(SIGCHLD, SIG_IGN);
    const char *const commas[] = {"de_DE.UTF-8", "fr_FR.UTF-8", "nl_NL.UTF-8", "es_ES.UTF-8"};
    const char *set = NULL;
    for (size_t i = 0; i < sizeof commas / sizeof *commas && !set; i++) {
        set = setlocale(LC_ALL, commas[i]);
    }
    if (!set) {
        printf("skipped: no locale whose numbers have a comma\n");
    }
    const char comma = *localeconv()->decimal_point;
    struct patchstep_model *model = opened(&models[0]);
    expect_forecasts(model, &models[0], 2);
    patchstep_close(model);
    ck_assert(uselocale((locale_t)0) == LC_GLOBAL_LOCALE);
    ck_assert_int_eq(*localeconv()->decimal_point, comma);
}
END_TEST

/* ---- what it refuses ---- */

static void expect_message(enum patchstep_status got, enum patchstep_status status, const char *says)
{
    const char *message = patchstep_error();
    ck_assert_msg(got == status && strstr(message, says) != NULL && !strchr(message, '\n') && *message != '-',
                  "status %d, not %d with \"%s\": %s", got, status, says, message);
}

START_TEST(refuses)
{
    struct path said = new_dir("said"), cut = new_dir("cut.h5");
    const char *good = models[0].checkpoint.text;
    size_t size;
    char *bytes = file_read(good, &size);
    file_write(cut.text, bytes, size / 2);
    free(bytes);
    const struct {
        enum patchstep_status status;
        const char *checkpoint, *device, *precision, *says;
    } cases[] = {{PATCHSTEP_CHECKPOINT, "/nowhere/best.h5", "cpu", NULL, "/nowhere/best.h5"},
                 {PATCHSTEP_CHECKPOINT, cut.text, "cpu", NULL, cut.text},
                 {PATCHSTEP_CHECKPOINT, config.text, "cpu", NULL, config.text},
                 {PATCHSTEP_ARGUMENT, NULL, "cpu", NULL, "checkpoint is NULL"},
                 {PATCHSTEP_ARGUMENT, good, "gpu", NULL, "device: \"gpu\" is not one of auto, cpu, cuda, cuda:N"},
                 {PATCHSTEP_DEVICE, good, "cuda:77", NULL, ""},
                 {PATCHSTEP_ARGUMENT, good, "cpu", "fp8", "precision: \"fp8\" is not one of fp32, tf32, bf16, fp16"},
                 {PATCHSTEP_ARGUMENT, good, "cpu", "bf16", "bf16"}};
    const int before = dup(STDERR_FILENO), file = open(said.text, O_CREAT | O_RDWR, 0600);
    dup2(file, STDERR_FILENO);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct patchstep_model *model = (struct patchstep_model *)&cases;
        expect_message(patchstep_open(cases[i].checkpoint, cases[i].device, cases[i].precision, &model), cases[i].status,
                       cases[i].says);
        ck_assert(model == NULL);
    }
    dup2(before, STDERR_FILENO);
    close(file);
    char *text = file_read(said.text, NULL);
    ck_assert_str_eq(text, "");
    free(text);
    expect_message(patchstep_open(good, "cpu", NULL, NULL), PATCHSTEP_ARGUMENT, "model is NULL");
}
END_TEST

START_TEST(refuses_inputs)
{
    const struct trained *t = &models[0];
    struct patchstep_model *model = opened(t);
    float inputs[MOST_VALUES], forecasts[MOST_VALUES];
    memcpy(inputs, t->inputs, sizeof inputs);
    inputs[(2 * t->C + 1) * t->L + 5] = NAN;
    expect_message(patchstep_forecast(model, inputs, 3, forecasts), PATCHSTEP_DATA, "window 2, channel 1, step 5");
    expect_message(patchstep_forecast(NULL, inputs, 1, forecasts), PATCHSTEP_ARGUMENT, "model is NULL");
    expect_message(patchstep_forecast(model, inputs, -1, forecasts), PATCHSTEP_ARGUMENT, "n is less than 0");
    expect_message(patchstep_forecast(model, NULL, 1, forecasts), PATCHSTEP_ARGUMENT, "NULL");
    expect_message(patchstep_forecast(model, inputs, 1, NULL), PATCHSTEP_ARGUMENT, "NULL");
    DONE(patchstep_forecast(model, NULL, 0, NULL));
    expect_forecasts(model, t, 3); /* goes on */
    patchstep_close(model);
}
END_TEST

/* Opening asks for level layer, which the CPU refuses, and takes level gemm; on CUDA forecasts are refused ways too. Neither is
 * what the caller is told. */
START_TEST(keeps_the_last_failure)
{
    const struct trained *t = &models[0];
    struct patchstep_model *model, *none;
    float forecasts[MOST_VALUES];
    expect_message(patchstep_open("/nowhere/best.h5", device, NULL, &none), PATCHSTEP_CHECKPOINT, "/nowhere/best.h5");
    const struct path before = path_of("%s", patchstep_error());
    model = opened(t);
    ck_assert_str_eq(patchstep_error(), before.text);
    expect_forecasts(model, t, t->windows);
    ck_assert_str_eq(patchstep_error(), before.text);
    expect_message(patchstep_forecast(model, t->inputs, -1, forecasts), PATCHSTEP_ARGUMENT, "n is less than 0");
    expect_forecasts(model, t, 1);
    patchstep_close(model);
    patchstep_close(opened(t));
    ck_assert_str_eq(patchstep_error(), "patchstep_forecast: n is less than 0");
}
END_TEST

/* ---- what all of it is tested with ---- */

/* Writes the data, trains, and lets the program forecast the last windows. */
static void make_model(struct trained *t)
{
    float values[ROWS * 4];
    uint64_t random = 5;
    for (int i = 0; i < ROWS * t->C; i++) {
        const int c = i % t->C, row = i / t->C;
        values[i] = (float)(100 * (c + 1) + (c + 1) * sin(row * 0.26 + c) + 0.3 * random_normal(&random));
    }
    struct path data = path_of("%.400s/%s.h5", folder.text, t->name), run_dir = new_dir(t->name), out = new_dir("forecasts.h5");
    OK(ps_series_write(data.text, values, ROWS, t->C, t->channels, NULL, NULL, NULL));
    config = path_of("%.400s/%s.yaml", folder.text, t->name);
    file_write(config.text, t->config, strlen(t->config));
    expect_done(train(run_dir.text, ARGS(NULL)));
    t->checkpoint = in_run(run_dir.text, "checkpoints/best.h5");
    expect_done(run("forecast", ARGS(t->checkpoint.text, "--device", (char *)device, "--out", out.text, "--overwrite", "--last",
                                     path_of("%d", t->windows).text)));
    float forecasts[MOST_VALUES]; /* [windows, H, C] */
    hid_t file = H5Fopen(out.text, H5F_ACC_RDONLY, H5P_DEFAULT), set = H5Dopen2(file, "/forecasts", H5P_DEFAULT);
    ck_assert_int_ge(H5Dread(set, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, forecasts), 0);
    H5Dclose(set);
    H5Fclose(file);
    for (int w = 0; w < t->windows; w++) {
        const int first = ROWS - t->windows - t->L + 1 + w;
        for (int c = 0; c < t->C; c++) {
            for (int l = 0; l < t->L; l++) {
                t->inputs[(w * t->C + c) * t->L + l] = values[(first + l) * t->C + c];
            }
            for (int h = 0; h < t->H; h++) {
                t->expected[(w * t->C + c) * t->H + h] = forecasts[(w * t->H + h) * t->C + c];
            }
        }
    }
}

static void make_models(void)
{
    folder = folder_make();
    for (int m = 0; m < MODELS; m++) {
        make_model(&models[m]);
    }
}

static void remove_models(void)
{
    folder_remove(folder.text);
}

int main(void)
{
    const char *wanted = getenv("PS_TEST_DEVICE"), *of = getenv("PS_PROGRAMS");
    device = wanted ? wanted : "cpu";
    programs = of ? of : ".";

    Suite *suite = suite_create("library");
    TCase *c = tcase_create("library");
    tcase_set_timeout(c, 300);
    tcase_add_unchecked_fixture(c, make_models, remove_models);
    tcase_add_test(c, as_the_program);
    tcase_add_test(c, about_a_model);
    tcase_add_test(c, of_a_run);
    tcase_add_test(c, note);
    tcase_add_test(c, several_in_a_thread);
    tcase_add_test(c, one_in_each_thread);
    tcase_add_test(c, handed_over);
    tcase_add_test(c, settings);
    tcase_add_test(c, surroundings);
    tcase_add_test(c, refuses);
    tcase_add_test(c, refuses_inputs);
    tcase_add_test(c, keeps_the_last_failure);
    suite_add_tcase(suite, c);
    return run_suite(suite, CK_FORK_GETENV) != 0;
}
