/* train.accumulate: the curve of a batch so many times as large, alone and by several ranks, and the same bits across an
 * interruption; and model.batchnorm: local, whose shares are what batches are there.
 * PS_TEST_DEVICE: the --device to run on (default cpu). */
#include "tests/ranks.h"
#include "tests/suite.h"

#include <math.h>

static const char config_text[] = RANKS_MODEL "  n_layers: 2\n"
                                              "  dropout: 0.2\n"
                                              "optim:\n"
                                              "  lr: 2e-3\n"
                                              "train:\n"
                                              "  epochs: 4\n"
                                              "runtime:\n"
                                              "  threads: 1\n";
enum { EPOCHS = 4, WHOLE = 24, STEPS = 27 }; /* the last step of an epoch has 15 windows */

static const char *missing; /* why there are no ranks */

#define BATCHES(n, windows) "--set", "train.accumulate=" #n, "--set", "train.batch_size=" #windows

static const struct model {
    const char *name;
    char *const *arguments;
} models[] = {{"default", (char *const[]){NULL}},
              {"clipped", (char *const[]){"--set", "optim.clip_norm=0.5", NULL}},
              {"streamed", (char *const[]){"--set", "data.placement=host", NULL}},
              {"from the file", (char *const[]){"--set", "data.memory_limit=3000000", NULL}},
              {"masked", (char *const[]){"--set", "train.objective=masked", "--set", "model.padding=none", NULL}},
              {"Huber's, level none", (char *const[]){"--set", "train.loss=huber", "--set", "runtime.fusion=none", NULL}},
              {"dropout everywhere",
               (char *const[]){"--set", "model.dropout_attention_weights=0.1", "--set", "model.dropout_head=0.1", NULL}},
              {"holes", (char *const[]){HOLES, NULL}},
              {"holes, streamed, Huber's, clipped", (char *const[]){HOLES, "--set", "data.placement=host", "--set",
                                                                    "train.loss=huber", "--set", "optim.clip_norm=0.5", NULL}}};

/* The largest difference, relative, of the runs' metrics named by keys, over all epochs. */
static double apart(const char *a, const char *b, int steps, const char *const *keys)
{
    json_t *x = read_metrics(a), *y = read_metrics(b);
    double worst = 0;
    ck_assert(json_array_size(x) == EPOCHS && json_array_size(y) == EPOCHS);
    ck_assert_int_eq((int)number_in(json_array_get(y, EPOCHS - 1), "step"), EPOCHS * steps);
    for (size_t i = 0; i < EPOCHS; i++) {
        for (const char *const *key = keys; *key; key++) {
            worst = fmax(worst, fabs(number_in(json_array_get(x, i), *key) / number_in(json_array_get(y, i), *key) - 1));
        }
    }
    json_decref(x);
    json_decref(y);
    return worst;
}

/* Batches of 12, of 8 (the last step: 8 and 7) and, by ranks, shares of these. */
START_TEST(test_curve)
{
    static const char *const keys[] = {"train_loss", "val_mse", "val_mae", NULL};
    const struct model *m = &models[_i];
    const struct {
        int ranks;
        char *const *arguments;
    } ways[] = {
        {0, ARGS(BATCHES(2, 12))}, {0, ARGS(BATCHES(3, 8))}, {2, ARGS(BATCHES(2, 12))}, {usual_ranks(), ARGS(BATCHES(3, 8))}};
    struct path one = new_dir("one");
    expect_done(train_ranks(0, one.text, joined(m->arguments, ARGS(BATCHES(1, 24)))));
    for (size_t i = 0; i < sizeof ways / sizeof *ways && !(missing && ways[i].ranks); i++) {
        struct path dir = path_of("%.400s/way%zu", folder.text, i);
        expect_done(train_ranks(ways[i].ranks, dir.text, joined(m->arguments, ways[i].arguments)));
        const double worst = apart(one.text, dir.text, STEPS, keys);
        printf("%s: %s %s, %d ranks: %.1e from the batch of %d\n", m->name, ways[i].arguments[1], ways[i].arguments[3],
               ways[i].ranks, worst, WHOLE);
        ck_assert_msg(worst < 1e-5, "%s, way %zu: %g from the whole batch's curve", m->name, i, worst);
    }
}
END_TEST

/* Stopped by a signal and resumed: the same bits; another number of batches is refused. Without holes in the data and with. */
START_TEST(test_resume)
{
    char *const *more = _i ? ARGS(BATCHES(3, 8), HOLES, "--set", "train.checkpoint_every=5")
                           : ARGS(BATCHES(3, 8), "--set", "train.checkpoint_every=5");
    struct path whole = new_dir("whole"), stopped = new_dir("stopped");
    expect_done(train_ranks(0, whole.text, more));
    struct process p = start_ranks(0, stopped.text, more);
    for (double begin = seconds_now(); !file_exists(in_run(stopped.text, "metrics.jsonl").text) && seconds_now() - begin < 20;) {
        sleep_seconds(0.005);
    }
    kill(p.pid, SIGTERM);
    struct result r = process_end(&p);
    ck_assert_msg(r.code == 128 + SIGTERM, "exit code %d: %s", r.code, r.err);
    result_free(&r);
    expect_refused(train_ranks(0, stopped.text, joined(more, ARGS(BATCHES(2, 8), "--resume"))), 4,
                   ARGS("train.accumulate: the checkpoint was made with 3, this run has 2"));
    expect_done(train_ranks(0, stopped.text, joined(more, ARGS("--resume"))));
    expect_same_results(whole.text, stopped.text);
}
END_TEST

/* Each rank's part of a batch within data.memory_limit, which whole batches would pass: the order is the same for any number of
 * ranks. */
START_TEST(test_limit)
{
    static const char *const keys[] = {"train_loss", "val_mse", "val_mae", NULL};
    char *const *large = ARGS(BATCHES(1, 4000), "--set", "data.split=[9000, 120, 180]", "--set", "data.memory_limit=6500000");
    struct path two = new_dir("two"), three = new_dir("three");
    expect_refused(train_ranks(0, new_dir("alone").text, large), 3,
                   ARGS("data.memory_limit: 6500000 bytes are too few: ", "for two batches of 4000 windows"));
    if (missing) {
        return;
    }
    expect_done(train_ranks(2, two.text, large));
    expect_done(train_ranks(3, three.text, large));
    const double worst = apart(two.text, three.text, 3, keys);
    printf("parts of batches of 4000 windows: %.1e between 2 and 3 ranks\n", worst);
    ck_assert_msg(worst < 1e-5, "%g", worst);
    struct result r = train_ranks(2, new_dir("more").text, joined(large, ARGS(BATCHES(2, 4000))));
    ck_assert_msg(r.code == 3 && strstr(r.err, "for two batches of 4000 windows") != NULL, "exit code %d: %s", r.code, r.err);
    result_free(&r);
}
END_TEST

START_TEST(test_refused)
{
    struct path dir = new_dir("refused");
    expect_refused(train_ranks(0, dir.text, ARGS(BATCHES(2, 400), "--set", "data.drop_last=true")), 2,
                   ARGS("train.batch_size: 800, with train.accumulate,"));
    expect_refused(train_ranks(0, dir.text, ARGS(BATCHES(2, 2147483647))), 2, ARGS("train.accumulate: 2 batches of 2147483647"));
    expect_refused(train_ranks(0, dir.text, ARGS(BATCHES(2, 13), "--set", "model.d_model=4")), 2,
                   ARGS("train.accumulate: ", "must be a multiple of 2"));
    expect_refused(train_ranks(0, dir.text, ARGS("--set", "model.batchnorm=local")), 2,
                   ARGS("model.batchnorm: local is of model.norm: batch"));
    ck_assert(!file_exists(dir.text));
}
END_TEST

#define BATCHNORM "--set", "model.norm=batch", "--set", "model.norm_place=post", "--set", "data.drop_last=true"
#define LOCAL BATCHNORM, "--set", "train.batch_size=26", "--set", "model.batchnorm=local"

/* The shares of two ranks are the batches of one that accumulates: one training loss, without holes in the data and with. Of the
 * running statistics rank 0's are kept: those that all score with are the checkpoint's. Twice, and across an interruption, the same
 * bits. */
START_TEST(test_local)
{
    if (missing) {
        return;
    }
    static const char *const keys[] = {"train_loss", NULL};
    struct path one = new_dir("batches"), two = new_dir("local"), again = new_dir("again");
    char *const *holes = _i ? ARGS(HOLES) : ARGS();
    expect_done(train_ranks(0, one.text, joined(ARGS(BATCHNORM, BATCHES(2, 13)), holes)));
    expect_done(train_ranks(2, two.text, joined(ARGS(LOCAL), holes)));
    const double worst = apart(one.text, two.text, 24, keys);
    printf("BatchNorm of each rank's own: %.1e from one rank's batches\n", worst);
    ck_assert_msg(worst < 1e-5, "%g", worst);
    json_t *test = read_test(two.text), *evaluated = evaluate_json(in_run(two.text, "checkpoints/best.h5").text, ARGS("--json"));
    ck_assert_msg(fabs(number_in(evaluated, "mse") / number_in(test, "mse") - 1) < (strcmp(device, "cpu") ? 1e-7 : 1e-9),
                  "evaluate: %.12g, test: %.12g", number_in(evaluated, "mse"), number_in(test, "mse"));
    json_decref(test);
    json_decref(evaluated);
    char *const *stops =
        _i ? ARGS(LOCAL, HOLES, "--set", "train.checkpoint_every=7") : ARGS(LOCAL, "--set", "train.checkpoint_every=7");
    struct process p = start_ranks(2, again.text, stops);
    for (double begin = seconds_now(); !file_exists(in_run(again.text, "metrics.jsonl").text) && seconds_now() - begin < 20;) {
        sleep_seconds(0.005);
    }
    pid_t ranks[2];
    const int n = children_of(p.pid, "train", ranks, 2);
    if (n == 2) {
        kill(ranks[1], SIGTERM);
    }
    struct result r = process_end(&p);
    ck_assert_msg(r.code == 0 || r.code == 128 + SIGTERM, "exit code %d: %s", r.code, r.err);
    result_free(&r);
    expect_done(train_ranks(2, again.text, joined(stops, ARGS("--resume"))));
    expect_same_results(two.text, again.text);
}
END_TEST

static void begin(void)
{
    begin_ranks(config_text, "300000"); /* more than the limit of what streams */
    write_holes();
}

int main(void)
{
    programs = getenv("PS_PROGRAMS");
    device = getenv("PS_TEST_DEVICE") ? getenv("PS_TEST_DEVICE") : "cpu";
    if (!programs) {
        fprintf(stderr, "test_accumulate: PS_PROGRAMS: must name the folder of the programs\n");
        return 2;
    }
    missing = ranks_missing();
    if (missing) {
        printf("skipped: accumulation by several ranks, BatchNorm of each rank's own: %s\n", missing);
    }
    if (strcmp(device, "cpu") != 0) {
        (void)nccl_missing(); /* test_ranks says it */
    }
    Suite *suite = suite_create("accumulate");
    TCase *cases = tcase_create("accumulate");
    tcase_set_timeout(cases, 300);
    tcase_add_checked_fixture(cases, begin, end_ranks);
    tcase_add_loop_test(cases, test_curve, 0, (int)(sizeof models / sizeof *models));
    tcase_add_loop_test(cases, test_resume, 0, 2);
    tcase_add_test(cases, test_limit);
    tcase_add_test(cases, test_refused);
    tcase_add_loop_test(cases, test_local, 0, 2);
    suite_add_tcase(suite, cases);
    return run_suite(suite, CK_FORK_GETENV) != 0;
}
