/* Pre-training and what follows it, by the programs: a masked run, its checkpoint as a start, resumed runs.
 *
 * PS_TEST_DEVICE: the --device to run on (default cpu). */
#include <math.h>

#include "kernels/device.h"
#include "src/config.h"
#include "tests/programs.h"
#include "tests/suite.h"

enum { EPOCHS = 4, BATCH = 16 };

static struct path pretrained; /* a masked run that nothing disturbed */

static const char config_text[] = "data:\n"
                                  "  path: series.h5\n"
                                  "model:\n"
                                  "  seq_len: 48\n"
                                  "  pred_len: 12\n"
                                  "  patch_len: 8\n"
                                  "  stride: 8\n"
                                  "  padding: none\n"
                                  "  mask_ratio: 0.5\n"
                                  "  d_model: 16\n"
                                  "  n_heads: 4\n"
                                  "  d_ff: 24\n"
                                  "  n_layers: 2\n"
                                  "  dropout: 0.1\n"
                                  "optim:\n"
                                  "  lr: 3e-3\n"
                                  "  schedule: constant\n"
                                  "train:\n"
                                  "  epochs: 4\n"
                                  "  batch_size: 16\n"
                                  "runtime:\n"
                                  "  threads: 2\n";

#define MASKED "--set", "train.objective=masked"

/* Trains, stopped by a signal inside an epoch and resumed until it ends. At least one stop is inside an epoch. */
static void train_interrupted(const char *dir, char *const *more)
{
    char *again[ARGUMENTS + 1] = {"--resume"};
    int within = 0;
    for (int i = 0, n = 1; more[i]; i++) {
        if (strcmp(more[i], "--init-from") == 0) { /* and its value: a run that goes on has its weights */
            i++;
        } else {
            again[n++] = more[i];
        }
    }
    for (int i = 0, code = -1; code != 0; i++) {
        struct process p = start_train(dir, i ? again : more);
        if (!process_read(&p, LONGEST_RUN, 1) && within == 0) { /* its first line: the handlers stand */
            sleep_seconds(0.03 + 0.02 * (i % 7));
            kill(p.pid, SIGTERM);
        }
        struct result r = process_end(&p);
        code = r.code;
        ck_assert_msg(code == 0 || code == 128 + SIGTERM, "exit code %d: %s", code, r.err);
        result_free(&r);
        struct ps_checkpoint c = load(dir, "last.h5");
        within += c.cursor > 0;
        ps_checkpoint_free(&c);
        if (code == 0 && within == 0) { /* too quick to be stopped inside */
            ck_assert_int_lt(i, 40);
            folder_remove(dir);
            code = i = -1;
        }
    }
}

/* ---- masked runs ---- */

START_TEST(masked_run)
{
    json_t *metrics = expect_metrics(pretrained.text, EPOCHS, (2000 * 7 / 10 - 48 - 12 + 1) / BATCH),
           *scores = read_test(pretrained.text);
    const double first = number_in(json_array_get(metrics, 0), "train_loss"),
                 last = number_in(json_array_get(metrics, EPOCHS - 1), "train_loss");
    printf("masked: loss %.3f, then %.3f; test %.3f\n", first, last, number_in(scores, "mse"));
    ck_assert_double_lt(last, 0.9 * first);
    ck_assert_double_lt(first, 1.5); /* RevIN's unit variance */
    ck_assert_double_lt(fabs(number_in(scores, "mse") - number_in(scores, "val_mse")), 0.3);
    ck_assert(json_is_null(json_object_get(scores, "repeat_last")) && json_is_null(json_object_get(scores, "seasonal_naive")));
    json_decref(metrics);
    json_decref(scores);
}
END_TEST

/* Masks, dropout and shuffling follow from the seed: the same bits again, when interrupted and with batches from the host too. */
START_TEST(masked_again)
{
    struct path dir = new_dir("again"), stopped = new_dir("stopped"), host = new_dir("host");
    expect_done(train(dir.text, ARGS(MASKED)));
    expect_same_run(pretrained.text, dir.text);
    train_interrupted(stopped.text, ARGS(MASKED));
    expect_same_run(pretrained.text, stopped.text);
    expect_done(train(host.text, ARGS(MASKED, "--set", "data.placement=host")));
    expect_same_results(pretrained.text, host.text);
}
END_TEST

/* Other seeds mask other patches; the epochs of a run, too: with a learning rate of next to nothing their losses still differ. */
START_TEST(masked_anew)
{
    struct path dir = new_dir("anew");
    expect_done(train(dir.text, ARGS(MASKED, "--set", "optim.lr=1e-30", "--set", "model.dropout=0", "--set", "train.epochs=2")));
    json_t *metrics = read_metrics(dir.text);
    const json_t *one = json_array_get(metrics, 0), *two = json_array_get(metrics, 1);
    ck_assert(number_in(one, "train_loss") != number_in(two, "train_loss"));
    ck_assert(number_in(one, "val_mse") == number_in(two, "val_mse")); /* validation's masks stay */
    json_decref(metrics);
}
END_TEST

/* The scores of validation and test do not depend on how many windows a batch has. */
START_TEST(masked_scores)
{
    struct path dir[2] = {new_dir("scores-16"), new_dir("scores-7")};
    json_t *scores[2];
    for (int i = 0; i < 2; i++) {
        expect_done(train(dir[i].text, ARGS(MASKED, "--init-from", pretrained.text, "--set", "optim.lr=1e-30", "--set",
                                            "train.epochs=1", "--set", i ? "train.batch_size=7" : "train.batch_size=16")));
        scores[i] = read_test(dir[i].text);
    }
    ck_assert_double_le(fabs(number_in(scores[0], "mse") / number_in(scores[1], "mse") - 1), 1e-6);
    ck_assert_double_le(fabs(number_in(scores[0], "val_mae") / number_in(scores[1], "val_mae") - 1), 1e-6);
    json_decref(scores[0]);
    json_decref(scores[1]);
}
END_TEST

/* Its checkpoint forecasts nothing, in one line; as a start of a forecaster it needs a new head. */
START_TEST(no_forecast_head)
{
    struct path best = in_run(pretrained.text, "checkpoints/best.h5"), out = new_dir("exported"), dir = new_dir("no-head");
    expect_refused(evaluate(best.text, ARGS()), 4, ARGS(best.text, "no forecast head", "--new-head"));
    expect_refused(run("forecast", ARGS(pretrained.text)), 4, ARGS(best.text, "no forecast head", "train.objective"));
    expect_refused(run("export_weights", ARGS(best.text, out.text)), 4, ARGS(best.text, "no forecast head"));
    expect_refused(train(dir.text, ARGS("--init-from", pretrained.text)), 4,
                   ARGS(best.text, "w_h is here alone", "w_r is there alone", "--new-head starts the head anew"));
    expect_refused(train(dir.text, ARGS("--init-from", pretrained.text, "--new-head", "--set", "model.d_ff=16")), 4,
                   ARGS(best.text, "layers.0.w_1 is [16, 24] there and [16, 16] here"));
}
END_TEST

/* A forecaster begins with the encoder's weights to the bit, and its head is the seed's. */
START_TEST(transferred)
{
    struct path dir = new_dir("transferred"), fresh = new_dir("fresh");
    expect_done(train(dir.text, ARGS("--init-from", pretrained.text, "--new-head", "--set", "optim.lr=1e-30", "--set",
                                     "optim.weight_decay=0", "--set", "train.epochs=1")));
    expect_done(train(fresh.text, ARGS("--set", "optim.lr=1e-30", "--set", "optim.weight_decay=0", "--set", "train.epochs=1")));
    struct ps_checkpoint from = load(pretrained.text, "best.h5"), to = load(dir.text, "last.h5"),
                         seeds = load(fresh.text, "last.h5");
    for (int t = 0; t < to.layout->n; t++) {
        const struct ps_parameter *p = &to.layout->table[t];
        const int head = t == to.layout->w_h || t == to.layout->b_h;
        const float *expected = seeds.parameters + p->offset;
        for (int u = 0; !head && u < from.layout->n; u++) {
            expected = strcmp(from.layout->table[u].name, p->name) == 0 ? from.parameters + from.layout->table[u].offset : expected;
        }
        ck_assert_msg(memcmp(to.parameters + p->offset, expected, (size_t)ps_parameter_count(p) * sizeof *expected) == 0, "%s",
                      p->name);
    }
    struct path best = in_run(pretrained.text, "checkpoints/best.h5");
    const struct path began = path_of("%.800s, SHA-256 %s, epoch %d, with a new head", best.text, from.digest, (int)from.epoch);
    ck_assert(to.init_from && strlen(from.digest) == 64);
    ck_assert_str_eq(to.init_from, began.text);
    ck_assert(!from.init_from && !seeds.init_from);
    ps_checkpoint_free(&from);
    ps_checkpoint_free(&to);
    ps_checkpoint_free(&seeds);
}
END_TEST

/* ---- a frozen encoder ---- */

/* How many tensors of the encoder, and of its running statistics, are the same in both, and how many of the head. */
static void count_same(const struct ps_checkpoint *a, const struct ps_checkpoint *b, int *encoder, int *head)
{
    *encoder = *head = 0;
    ck_assert_int_eq(a->layout->all, b->layout->all);
    for (int t = 0; t < a->layout->all; t++) {
        const struct ps_parameter *p = &a->layout->table[t];
        const size_t bytes = (size_t)ps_parameter_count(p) * sizeof *a->parameters;
        const int same = memcmp(a->parameters + p->offset, b->parameters + p->offset, bytes) == 0;
        *(t == a->layout->w_h || t == a->layout->b_h ? head : encoder) += same;
    }
}

/* Whether AdamW has moments of anything but the head. */
static int has_moments(const struct ps_checkpoint *c)
{
    int any = 0;
    for (int t = 0; t < c->layout->n; t++) {
        const struct ps_parameter *p = &c->layout->table[t];
        for (int64_t i = p->offset; i < p->offset + ps_parameter_count(p) && t != c->layout->w_h && t != c->layout->b_h; i++) {
            any |= c->m[i] != 0 || c->v[i] != 0;
        }
    }
    return any;
}

/* What a probe is combined with: BatchNorm has running statistics, the affine of RevIN a gradient at the head's end too. */
static char *const probes[][8] = {{"--set", "model.dropout_head=0.2", "--set", "optim.clip_norm=0.1"},
                                  {"--set", "model.norm=batch", "--set", "model.revin_affine=true", "--set", "optim.clip_norm=0.1"},
                                  {"--set", "model.head=individual", "--set", "train.on_nonfinite=skip"},
                                  {"--set", "model.norm=batch", "--set", "runtime.fusion=none"}};

static void arguments_of(char *const *probe, char *const *more, char **all)
{
    int n = 0;
    for (int i = 0; i < 8 && probe[i]; i++) {
        all[n++] = probe[i];
    }
    for (int i = 0; more[i]; i++) {
        all[n++] = more[i];
    }
    all[n] = NULL;
}

/* Frozen for two epochs of four: until then the encoder, its running statistics and its moments are as they were to the bit,
 * whatever the decay; then all of it learns. Interrupted in either part, the run ends on the same bytes. */
START_TEST(probe_then_all)
{
    char *all[ARGUMENTS], *begin[ARGUMENTS];
    struct path start = path_of("%.400s/start%d", folder.text, _i), whole = path_of("%.400s/probe%d", folder.text, _i),
                stopped = path_of("%.400s/stopped%d", folder.text, _i);
    arguments_of(probes[_i], ARGS("--set", "train.epochs=1"), begin);
    expect_done(train(start.text, begin)); /* a start with running statistics of its own */
    struct path from = in_run(start.text, "checkpoints/best.h5");
    arguments_of(probes[_i],
                 ARGS("--init-from", from.text, "--set", "train.freeze=encoder", "--set", "train.freeze_epochs=2", "--set",
                      "optim.weight_decay=0.1", "--set", "train.keep_last=8"),
                 all);
    expect_done(train(whole.text, all));
    const int steps = (2000 * 7 / 10 - 48 - 12 + 1) / BATCH;
    struct ps_checkpoint first = load(start.text, "best.h5"), probed = load(whole.text, path_of("last-%d.h5", 2 * steps).text),
                         after = load(whole.text, path_of("last-%d.h5", 3 * steps).text);
    int encoder, head;
    count_same(&first, &probed, &encoder, &head);
    ck_assert_int_eq(encoder, first.layout->all - 2);
    ck_assert_int_eq(head, 0);
    ck_assert(!has_moments(&probed));
    count_same(&probed, &after, &encoder, &head);
    ck_assert_int_eq(encoder, 0);
    ck_assert_int_eq(head, 0);
    ck_assert(has_moments(&after));
    ps_checkpoint_free(&first);
    ps_checkpoint_free(&probed);
    ps_checkpoint_free(&after);
    json_t *metrics = read_metrics(whole.text);
    ck_assert_double_lt(number_in(json_array_get(metrics, 1), "train_loss"), number_in(json_array_get(metrics, 0), "train_loss"));
    json_decref(metrics);
    train_interrupted(stopped.text, all);
    expect_same_run(whole.text, stopped.text);
}
END_TEST

/* Without freeze_epochs to the end; a frozen encoder of the seed's own is worth a word. */
START_TEST(probe_to_the_end)
{
    struct path dir = new_dir("to-the-end"), longer = new_dir("longer");
    struct result r = train(dir.text, ARGS("--set", "train.freeze=encoder"));
    ck_assert_msg(r.code == 0 && lines_of(r.err) == 1 && strstr(r.err, "warning: train.freeze: encoder without --init-from"), "%s",
                  r.err);
    result_free(&r);
    struct ps_checkpoint first = load(dir.text, "last.h5");
    ck_assert(!has_moments(&first));
    ps_checkpoint_free(&first);
    expect_refused(train(dir.text, ARGS("--resume")), 4, ARGS("train.freeze", "resume with the same"));
    expect_refused(train(dir.text, ARGS("--resume", "--set", "train.freeze=encoder", "--set", "train.freeze_epochs=2")), 4,
                   ARGS("train.freeze_epochs", "resume with the same"));
    /* As one that would thaw later. */
    r = train(longer.text, ARGS("--set", "train.freeze=encoder", "--set", "train.freeze_epochs=9"));
    ck_assert_int_eq(r.code, 0);
    result_free(&r);
    expect_equal_datasets(in_run(dir.text, "checkpoints/last.h5").text, in_run(longer.text, "checkpoints/last.h5").text);
}
END_TEST

/* ---- */

static void set_up(void)
{
    struct path series;
    folder = folder_make();
    config = new_dir("small.yaml");
    series = new_dir("series.h5");
    pretrained = new_dir("pretrained");
    file_write(config.text, config_text, strlen(config_text));
    expect_done(run("sample_series", ARGS(series.text, "--hours", "2000", "--channels", "3")));
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    expect_done(train(pretrained.text, ARGS(MASKED)));
}

static void tear_down(void)
{
    folder_remove(folder.text);
}

int main(void)
{
    const char *environment = getenv("PS_TEST_DEVICE");
    programs = getenv("PS_PROGRAMS");
    device = environment && *environment ? environment : "cpu";
    if (!programs) {
        fprintf(stderr, "PS_PROGRAMS: not set: the folder that holds the programs\n");
        return 1;
    }
    if (strcmp(device, "cpu") != 0 && ps_cuda_device_count() == 0) {
        printf("skipped: pre-training on %s: no CUDA device\n", device);
        return 0;
    }
    Suite *suite = suite_create("transfer");
    TCase *tests = tcase_create("transfer");
    tcase_set_timeout(tests, 500);
    tcase_add_unchecked_fixture(tests, set_up, tear_down);
    tcase_add_test(tests, masked_run);
    tcase_add_test(tests, masked_again);
    tcase_add_test(tests, masked_anew);
    tcase_add_test(tests, masked_scores);
    tcase_add_test(tests, no_forecast_head);
    tcase_add_test(tests, transferred);
    tcase_add_loop_test(tests, probe_then_all, 0, (int)(sizeof probes / sizeof *probes));
    tcase_add_test(tests, probe_to_the_end);
    suite_add_tcase(suite, tests);
    return run_suite(suite, CK_FORK_GETENV) != 0;
}
