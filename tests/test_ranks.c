/* Training by several ranks: the curve of one, the same bits from run to run and across an interruption, and what is refused.
 * Without MPI it says that it was skipped.
 * PS_TEST_DEVICE: the --device to run on (default cpu); ranks that share a GPU sum on the host. */
#include "tests/ranks.h"
#include "tests/suite.h"

#include <math.h>

static const char config_text[] = RANKS_MODEL "  n_layers: 2\n"
                                              "  dropout: 0.2\n"
                                              "optim:\n"
                                              "  lr: 2e-3\n"
                                              "train:\n"
                                              "  epochs: 4\n"
                                              "  batch_size: 11\n"
                                              "runtime:\n"
                                              "  threads: 1\n";
enum { EPOCHS = 4, STEPS = 59 }; /* the last step of an epoch has 1 window: fewer than ranks */

#define PAPER                                                                                                         \
    "--set", "model.norm=batch", "--set", "model.norm_place=post", "--set", "model.residual_attention=true", "--set", \
        "model.activation=gelu"

static const struct model {
    const char *name;
    char *const *arguments;
} models[] = {
    {"default", (char *const[]){NULL}},
    {"paper", (char *const[]){PAPER, NULL}},
    {"paper, all places of dropout",
     (char *const[]){PAPER, "--set", "model.dropout_attention_weights=0.1", "--set", "model.dropout_head=0.1", NULL}},
    {"pre-norm with BatchNorm, clipped", (char *const[]){"--set", "model.norm=batch", "--set", "optim.clip_norm=0.5", NULL}},
    {"streamed", (char *const[]){"--set", "data.placement=host", NULL}},
    {"masked", (char *const[]){PAPER, "--set", "train.objective=masked", "--set", "model.padding=none", NULL}},
    {"level none", (char *const[]){"--set", "runtime.fusion=none", NULL}},
    {"holes", (char *const[]){HOLES, NULL}},
    {"holes, paper, streamed, clipped",
     (char *const[]){PAPER, HOLES, "--set", "data.placement=host", "--set", "optim.clip_norm=0.5", NULL}}};

/* One rank's curve, to 1e-5 after 200 steps: the losses of all epochs, and the test's. Of the variants with one number of ranks. */
START_TEST(test_curve)
{
    const struct model *m = &models[_i];
    struct path one = new_dir("one");
    expect_done(train_ranks(0, one.text, m->arguments));
    json_t *expected = expect_metrics(one.text, EPOCHS, STEPS), *last = read_test(one.text);
    const int most = nccl_gpus ? usual_ranks() : 4;
    for (int n = _i < 2 ? 2 : usual_ranks(); n <= (_i < 2 ? most : usual_ranks()); n++) {
        struct path dir = path_of("%.400s/ranks%d", folder.text, n);
        expect_done(train_ranks(n, dir.text, m->arguments));
        json_t *metrics = expect_metrics(dir.text, EPOCHS, STEPS), *test = read_test(dir.text);
        static const char *const keys[] = {"train_loss", "val_mse", "val_mae"};
        double worst = 0;
        for (int i = 0; i < 3 * EPOCHS + 1; i++) {
            const char *key = i < 3 * EPOCHS ? keys[i % 3] : "mse";
            const json_t *here = i < 3 * EPOCHS ? json_array_get(metrics, (size_t)i / 3) : test,
                         *there = i < 3 * EPOCHS ? json_array_get(expected, (size_t)i / 3) : last;
            worst = fmax(worst, fabs(number_in(here, key) / number_in(there, key) - 1));
        }
        printf("%s: %d ranks: %.1e from one rank's curve\n", m->name, n, worst);
        ck_assert_msg(worst < 1e-5, "%s: %d ranks: %g from one rank's curve", m->name, n, worst);
        json_decref(metrics);
        json_decref(test);
    }
    json_decref(expected);
    json_decref(last);
}
END_TEST

/* Not the program's own lines: mpirun says what became of its processes. */
static void expect_line(const struct result *r, const char *text)
{
    ck_assert_msg(strstr(r->err, text) != NULL, "\"%s\" is not in: %s", text, r->err);
}

/* The same ranks twice; and stopped by a signal to any one of them, and resumed: the same bits. Without holes in the data and
 * with. */
START_TEST(test_same_bits)
{
    char *const *more =
        _i ? ARGS(PAPER, HOLES, "--set", "train.checkpoint_every=7") : ARGS(PAPER, "--set", "train.checkpoint_every=7");
    char *const *again = ARGS("--resume");
    struct path first = new_dir("first"), second = new_dir("second"), stopped = new_dir("stopped");
    const int n = usual_ranks();
    expect_done(train_ranks(n, first.text, more));
    expect_done(train_ranks(n, second.text, more));
    expect_same_run(first.text, second.text);
    int signals = 0;
    for (int i = 0; i < n; i++) {
        const int begins = !file_exists(in_run(stopped.text, "config.yaml").text);
        struct process p = start_ranks(n, stopped.text, begins ? more : joined(more, again));
        pid_t ranks[3];
        const int begun = !process_read(&p, LONGEST_RUN, 1); /* its first line: the handlers stand in every rank */
        sleep_seconds(0.05 * i);
        if (begun && children_of(p.pid, "train", ranks, n) == n) {
            kill(ranks[i], SIGTERM);
            signals++;
        }
        struct result r = process_end(&p);
        ck_assert_msg(r.code == 0 || r.code == 128 + SIGTERM, "exit code %d: %s", r.code, r.err);
        if (r.code != 0) {
            expect_line(&r, "train: signal 15: checkpoint written to ");
        }
        result_free(&r);
    }
    ck_assert_int_gt(signals, 0);
    expect_done(train_ranks(n, stopped.text, joined(more, again)));
    expect_same_results(first.text, stopped.text);
    struct ps_checkpoint c = load(first.text, "last.h5");
    ck_assert_int_eq((int)c.ranks, n);
    ps_checkpoint_free(&c);
}
END_TEST

/* Resumed by another number of ranks: allowed, and said. */
START_TEST(test_other_ranks)
{
    struct path one = new_dir("one"), dir = new_dir("other");
    expect_done(train_ranks(0, one.text, ARGS()));
    expect_done(train_ranks(2, dir.text, ARGS("--set", "optim.schedule=constant", "--set", "train.epochs=1")));
    const int ranks[] = {3, 0, 2};
    for (int i = 0; i < 3; i++) {
        struct path epochs = path_of("train.epochs=%d", i + 2), says = path_of("by %d rank", i == 0 ? 2 : i == 1 ? 3 : 1);
        struct result r =
            train_ranks(ranks[i], dir.text, ARGS("--resume", "--set", "optim.schedule=constant", "--set", epochs.text));
        ck_assert_msg(r.code == 0 && lines_of(r.err) == 1, "exit code %d: %s", r.code, r.err);
        expect_line(&r, says.text);
        expect_line(&r, "its bits may differ");
        result_free(&r);
    }
    json_decref(expect_metrics(dir.text, EPOCHS, STEPS));
}
END_TEST

/* What every rank finds wrong is said once. */
START_TEST(test_refused)
{
    struct path dir = new_dir("refused");
    struct {
        int code;
        const char *says;
        char *const *arguments;
    } cases[] = {{2, "train: train.batch_size: 2 windows cannot be shared by 3 ranks", ARGS("--set", "train.batch_size=2")},
                 {2, "model.n_heads: d_model 16 is not divisible by 5 heads", ARGS("--set", "model.n_heads=5")},
                 {2, "train: --resume and --overwrite", ARGS("--resume", "--overwrite")},
                 {4, "nothing to resume", ARGS("--resume")},
                 {3, "No such file", ARGS("--set", "data.path=/nowhere.h5")},
                 {2, "norm: batch over several ranks", ARGS(PAPER, "--set", "runtime.fusion=none")},
                 {2, "runtime.exchange: \"smoke\" is not one of auto, nccl, mpi", ARGS("--set", "runtime.exchange=smoke")},
                 {2, "runtime.exchange: nccl is between GPUs", ARGS("--device", "cpu", "--set", "runtime.exchange=nccl")}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct result r = train_ranks(3, dir.text, cases[i].arguments);
        ck_assert_msg(r.code == cases[i].code, "exit code %d, not %d: %s", r.code, cases[i].code, r.err);
        expect_line(&r, cases[i].says);
        const char *again = strstr(strstr(r.err, cases[i].says) + 1, cases[i].says);
        ck_assert_msg(!again, "said twice: %s", r.err);
        result_free(&r);
    }
    if (strcmp(device, "cpu") != 0 && ps_cuda_device_count() < 3) {
        struct result r = train_ranks(3, dir.text, ARGS("--set", "runtime.exchange=nccl"));
        ck_assert_msg(r.code == 2 || r.code == 5, "exit code %d: %s", r.code, r.err);
        expect_line(&r, r.code == 2 ? " share the GPU " : "NCCL, which cannot be loaded: ");
        result_free(&r);
    }
    ck_assert(!file_exists(dir.text));
}
END_TEST

/* An environment that speaks of ranks which are not there; and the program itself, which is linked to nothing of MPI. */
START_TEST(test_alone)
{
    setenv("OMPI_COMM_WORLD_SIZE", "2", 1);
    struct path dir = new_dir("alone");
    expect_refused(train(dir.text, ARGS()), 5, ARGS("OMPI_COMM_WORLD_SIZE is 2", "MPI found 1 rank"));
    setenv("OMPI_COMM_WORLD_SIZE", "1", 1);
    expect_done(train(dir.text, ARGS("--set", "train.epochs=1")));
    unsetenv("OMPI_COMM_WORLD_SIZE");
    struct path ldd = path_of("ldd %.900s/train", programs);
    FILE *pipe = popen(ldd.text, "r");
    int lines = 0;
    for (char line[1024]; pipe && fgets(line, sizeof line, pipe); lines++) {
        ck_assert_msg(!strstr(line, "libmpi") && !strstr(line, "libnccl"), "train is linked to %s", line);
    }
    ck_assert(pipe && pclose(pipe) == 0 && lines > 3);
}
END_TEST

/* bench by several ranks: one object, of all of them, with what a rank alone takes; and what is of one rank is refused. */
START_TEST(test_bench)
{
    struct path program = path_of("%.900s/bench", programs);
    const struct {
        char *option;
        const char *refused;
    } cases[] = {
        {"--json", NULL}, {"--compare", "bench: --compare: is of one rank"}, {"--trace", "bench: --trace: is of one rank"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *const arguments[] = {"--oversubscribe",
                                   "--bind-to",
                                   "none",
                                   "-n",
                                   "2",
                                   program.text,
                                   config.text,
                                   "--device",
                                   "cpu",
                                   "--epochs",
                                   "0",
                                   "--steps",
                                   "20",
                                   cases[i].option,
                                   NULL};
        struct process p = process_start(mpirun.text, arguments, 0);
        struct result r = process_end(&p);
        if (cases[i].refused) {
            ck_assert_int_eq(r.code, 2);
            expect_line(&r, cases[i].refused);
        } else {
            ck_assert_msg(r.code == 0, "exit code %d: %s", r.code, r.err);
            json_t *all = read_json(r.out), *ranks = json_object_get(all, "ranks");
            ck_assert(number_in(ranks, "ranks") == 2 && number_in(all, "batch") == 11 && number_in(ranks, "exchange_ms") > 0);
            const double step = number_in(json_object_get(all, "ms_per_step"), "median");
            const double whole = number_in(json_object_get(ranks, "one_rank_whole_ms"), "median");
            ck_assert(whole > 0 && number_in(json_object_get(ranks, "one_rank_part_ms"), "median") > 0);
            ck_assert_double_eq_tol(number_in(ranks, "speedup"), whole / step, 1e-9 * whole / step);
            ck_assert_double_ge(number_in(json_object_get(ranks, "in_exchanges_ms"), "most"),
                                number_in(json_object_get(ranks, "in_exchanges_ms"), "least"));
            json_decref(all);
        }
        result_free(&r);
    }
}
END_TEST

/* The scripts: a table of the ranks, and docs/scaling.md's, which is what the model of a step says. */
START_TEST(test_scripts)
{
    const char *source = getenv("PS_SOURCE");
    ck_assert(source != NULL);
    struct path script = path_of("%.400s/scripts/bench_scaling.sh", source), results = new_dir("scaling.jsonl"),
                model = path_of("%.400s/scripts/scaling_model.py", source), page = path_of("%.400s/docs/scaling.md", source);
    char *const arguments[] = {"cpu",     config.text, "--turns",   "1",          "--steps", "2",
                               "--ranks", "2,3",       "--results", results.text, NULL};
    struct process p = process_start(script.text, arguments, 0);
    struct result r = process_end(&p);
    ck_assert_msg(r.code == 0, "exit code %d: %s", r.code, r.err);
    static const char *const rows[] = {"; batch 11;", "\n| ranks |", "\n| 1 |", "\n| 2 |", "\n| 3 |"};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        ck_assert_msg(strstr(r.out, rows[i]) != NULL, "\"%s\" is not in: %s", rows[i], r.out);
    }
    result_free(&r);
    p = process_start(script.text, ARGS("cpu", config.text, "--turns", "0"), 0);
    r = process_end(&p);
    ck_assert_msg(r.code == 2 && lines_of(r.err) == 1, "exit code %d: %s", r.code, r.err);
    result_free(&r);
    p = process_start(model.text, ARGS(), 0);
    r = process_end(&p);
    char *text = file_read(page.text, NULL);
    ck_assert_msg(r.code == 0 && lines_of(r.out) == 27, "exit code %d: %s%s", r.code, r.out, r.err);
    ck_assert_msg(strstr(text, r.out) != NULL, "docs/scaling.md has another table than: %s", r.out);
    free(text);
    result_free(&r);
}
END_TEST

static void begin(void)
{
    begin_ranks(config_text, "998");
    write_holes();
}

int main(void)
{
    programs = getenv("PS_PROGRAMS");
    device = getenv("PS_TEST_DEVICE") ? getenv("PS_TEST_DEVICE") : "cpu";
    if (!programs) {
        fprintf(stderr, "test_ranks: PS_PROGRAMS: must name the folder of the programs\n");
        return 2;
    }
    Suite *suite = suite_create("ranks");
    TCase *cases = tcase_create("ranks");
    const char *missing = ranks_missing();
    if (missing) {
        printf("skipped: training by several ranks: %s\n", missing);
    } else {
        const char *without = strcmp(device, "cpu") != 0 ? nccl_missing() : NULL;
        if (without) {
            printf("skipped: sums between GPUs by NCCL: %s\n", without);
        }
        tcase_set_timeout(cases, 300);
        tcase_add_checked_fixture(cases, begin, end_ranks);
        tcase_add_loop_test(cases, test_curve, 0, (int)(sizeof models / sizeof *models));
        tcase_add_loop_test(cases, test_same_bits, 0, 2);
        tcase_add_test(cases, test_other_ranks);
        tcase_add_test(cases, test_refused);
        tcase_add_test(cases, test_bench);
        tcase_add_test(cases, test_scripts);
        tcase_add_test(cases, test_alone);
    }
    suite_add_tcase(suite, cases);
    return run_suite(suite, CK_FORK_GETENV) != 0;
}
