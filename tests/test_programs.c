/* The programs, run as a person runs them, on generated data: train, evaluate, bench, and what they refuse.
 *
 * PS_TEST_DEVICE: the --device to run on (default cpu). PS_TEST_SEED: of the random moments of interruption (default: the time). */
#include <dlfcn.h>
#include <math.h>

#include "data/import.h"
#include "data/series.h"
#include "kernels/device.h"
#include "src/progress.h"
#include "src/version.h"
#include "tests/programs.h"
#include "tests/seal.h"
#include "tests/suite.h"

enum { HOURS = 2000, CHANNELS = 3, L = 48, H = 12, BATCH = 16, EPOCHS = 3 };

static int full, on_cpu, gpus;    /* gpus: counted here, because CUDA does not survive the tests' fork */
static struct path series, whole; /* whole: a run that nothing disturbed */
static double whole_seconds;      /* from its first line to its end */

static const char config_text[] = "data:\n"
                                  "  path: series.h5\n"
                                  "model:\n"
                                  "  seq_len: 48\n"
                                  "  pred_len: 12\n"
                                  "  patch_len: 8\n"
                                  "  stride: 4\n"
                                  "  d_model: 16\n"
                                  "  n_heads: 4\n"
                                  "  d_ff: 24\n"
                                  "  n_layers: 2\n"
                                  "  dropout: 0.1\n"
                                  "optim:\n"
                                  "  lr: 2e-3\n"
                                  "  schedule: constant\n"
                                  "train:\n"
                                  "  epochs: 3\n"
                                  "  batch_size: 16\n"
                                  "runtime:\n"
                                  "  threads: 2\n";

/* Windows of a split of HOURS rows with the default fractions, and steps an epoch. */
static int windows_of(enum ps_split split)
{
    int rows[PS_SPLITS] = {HOURS * 7 / 10, HOURS / 10, HOURS / 5};
    return rows[split] - (split == PS_TRAIN ? L + H : H) + 1;
}

static int steps_per_epoch(void)
{
    return windows_of(PS_TRAIN) / BATCH;
}

/* ---- a whole run ---- */

START_TEST(run_folder)
{
    json_t *metrics = expect_metrics(whole.text, EPOCHS, steps_per_epoch());
    double first = number_in(json_array_get(metrics, 0), "train_loss"),
           last = number_in(json_array_get(metrics, EPOCHS - 1), "train_loss");
    ck_assert_double_lt(last, first);
    json_t *test = read_test(whole.text);
    const json_t *naive = json_object_get(test, "repeat_last"), *full_batches = json_object_get(test, "full_batches"),
                 *seasonal = json_object_get(test, "seasonal_naive");
    ck_assert_double_lt(number_in(test, "mse"), number_in(naive, "mse"));
    ck_assert_double_lt(number_in(test, "mae"), number_in(naive, "mae"));
    ck_assert_double_gt(number_in(seasonal, "mse"), 0);
    int windows = windows_of(PS_TEST);
    ck_assert_int_eq((int)number_in(test, "windows"), windows);
    ck_assert_int_eq((int)number_in(naive, "windows"), windows);
    ck_assert_int_eq((int)number_in(full_batches, "windows"), windows / BATCH * BATCH);
    ck_assert_double_ne(number_in(full_batches, "mse"), number_in(test, "mse"));
    /* The best epoch is the one with the least validation MSE, and best.h5 speaks of it. */
    int best = 0;
    for (int i = 1; i < EPOCHS; i++) {
        best =
            number_in(json_array_get(metrics, (size_t)i), "val_mse") < number_in(json_array_get(metrics, (size_t)best), "val_mse")
                ? i
                : best;
    }
    ck_assert_int_eq((int)number_in(test, "epoch"), best + 1);
    ck_assert_double_eq(number_in(test, "val_mse"), number_in(json_array_get(metrics, (size_t)best), "val_mse"));
    ck_assert_double_eq(number_in(test, "val_mae"), number_in(json_array_get(metrics, (size_t)best), "val_mae"));
    ck_assert_int_eq((int)number_in(test, "step"), (best + 1) * steps_per_epoch());
    struct ps_checkpoint c = load(whole.text, "best.h5");
    ck_assert_uint_eq(c.best_epoch, (uint64_t)best + 1);
    ck_assert_uint_eq(c.epoch, (uint64_t)best + 1);
    ck_assert_uint_eq(c.step, (uint64_t)((best + 1) * steps_per_epoch()));
    ck_assert(c.m == NULL && c.v == NULL);
    ck_assert_double_eq(c.best_validation, number_in(json_array_get(metrics, (size_t)best), "val_mse"));
    ps_checkpoint_free(&c);
    c = load(whole.text, "last.h5");
    ck_assert_uint_eq(c.epoch, EPOCHS);
    ck_assert_uint_eq(c.step, (uint64_t)(EPOCHS * steps_per_epoch()));
    ck_assert_uint_eq(c.cursor, 0);
    ck_assert(c.m != NULL && c.v != NULL);
    ps_checkpoint_free(&c);
    json_decref(metrics);
    json_decref(test);
    ck_assert(!file_exists(in_run(whole.text, "checkpoints/last.h5.partial").text));
    /* The resolved config is a config. */
    expect_done(
        run("bench", ARGS(in_run(whole.text, "config.yaml").text, "--device", (char *)device, "--steps", "1", "--epochs", "0")));
}
END_TEST

/* metrics.jsonl has the rate of each epoch's last step: cosine, from 2e-3 at step 0 to 0 at the run's last. */
START_TEST(logged_rates)
{
    struct path dir = new_dir("rates");
    expect_done(train(dir.text, ARGS("--set", "optim.schedule=cosine")));
    int steps = steps_per_epoch(), last = EPOCHS * steps - 1;
    json_t *metrics = expect_metrics(dir.text, EPOCHS, steps);
    for (int epoch = 1; epoch <= EPOCHS; epoch++) {
        double expected = 2e-3 * (1 + cos(acos(-1) * (epoch * steps - 1) / last)) / 2;
        double lr = number_in(json_array_get(metrics, (size_t)epoch - 1), "lr");
        ck_assert_msg(fabs(lr - expected) <= 1e-12, "epoch %d: lr %.15g, not %.15g", epoch, lr, expected);
    }
    json_decref(metrics);
}
END_TEST

START_TEST(two_runs)
{
    struct path dir = new_dir("two_runs");
    expect_done(train(dir.text, ARGS()));
    expect_same_run(whole.text, dir.text);
    struct path other = new_dir("other_seed");
    expect_done(train(other.text, ARGS("--set", "train.seed=2", "--set", "train.epochs=1")));
    struct ps_checkpoint a = load(dir.text, "last.h5"), b = load(other.text, "last.h5");
    ck_assert(memcmp(a.parameters, b.parameters, (size_t)a.layout->count * sizeof *a.parameters) != 0);
    ps_checkpoint_free(&a);
    ps_checkpoint_free(&b);
}
END_TEST

START_TEST(existing_run)
{
    struct path dir = new_dir("existing");
    expect_done(train(dir.text, ARGS("--set", "train.epochs=1", "--set", "train.seed=5")));
    struct listed before = list(dir.text);
    expect_refused(train(dir.text, ARGS()), 2, ARGS(dir.text, "--resume", "--overwrite", "--run-dir"));
    expect_refused(train(dir.text, ARGS("--resume", "--overwrite")), 2, ARGS("--resume", "--overwrite"));
    expect_untouched(dir.text, before, "a refused run");
    free(before.text);
    expect_done(train(dir.text, ARGS("--overwrite")));
    expect_same_run(whole.text, dir.text);
}
END_TEST

/* Without --run-dir: runs/ and the config's name, from where the program is started. */
START_TEST(default_run_dir)
{
    ck_assert_int_eq(chdir(folder.text), 0);
    expect_done(run("train", ARGS("tiny.yaml", "--device", (char *)device, "--set", "train.epochs=1")));
    ck_assert(file_exists("runs/tiny/test.json"));
    ck_assert(file_exists("runs/tiny/checkpoints/best.h5"));
}
END_TEST

/* A config whose name is an ending alone names no folder, and neither does an empty --run-dir. */
START_TEST(nameless_run_dir)
{
    static const char *const names[] = {".yaml", "..yaml", "...yaml", "named/.yaml"};
    ck_assert_int_eq(chdir(folder.text), 0);
    mkdir("nameless", 0777);
    mkdir("nameless/named", 0777);
    ck_assert_int_eq(chdir("nameless"), 0);
    for (int i = 0; i < 4; i++) {
        file_write(names[i], config_text, strlen(config_text));
        expect_refused(run("train", ARGS((char *)names[i], "--set", "data.path=../series.h5")), 2,
                       ARGS((char *)names[i], "--run-dir"));
    }
    expect_refused(run("train", ARGS(config.text, "--run-dir", "")), 2, ARGS("--run-dir"));
    ck_assert(!file_exists("runs"));
    expect_done(run("train", ARGS(".yaml", "--set", "data.path=../series.h5", "--device", (char *)device, "--set", "train.epochs=1",
                                  "--run-dir", "named/run")));
}
END_TEST

/* On a terminal one line is drawn again and again and cleared in the end; elsewhere stderr stays empty. */
START_TEST(progress_bar)
{
    struct path train_path = path_of("%s/train", programs), dir = new_dir("bar");
    struct process p = process_start(train_path.text, ARGS(config.text, "--device", (char *)device, "--run-dir", dir.text), 1);
    struct result r = process_end(&p);
    ck_assert_int_eq(r.code, 0);
    ck_assert_msg(strncmp(r.err, "\r[", 2) == 0 && strstr(r.err, "epoch 1/3, step ") != NULL, "no bar: %s", r.err);
    size_t length = strlen(r.err);
    ck_assert_msg(length > 4 && strcmp(r.err + length - 4, "\r\033[K") == 0, "the bar is left behind: %s", r.err);
    ck_assert(strchr(r.err, '\n') == NULL);
    const char *last = r.out;
    for (int epoch = 1; epoch <= EPOCHS; epoch++) {
        char line[32];
        snprintf(line, sizeof line, "\nepoch %d/%d: ", epoch, EPOCHS);
        last = strstr(last, line);
        ck_assert_msg(last != NULL, "no line of epoch %d: %s", epoch, r.out);
    }
    ck_assert_int_eq(lines_of(r.out), EPOCHS + 2);
    result_free(&r);
}
END_TEST

/* Inside an epoch the time left is what an epoch takes, times the share of the epochs that is not done. */
START_TEST(time_left)
{
    int terminal = posix_openpt(O_RDWR | O_NOCTTY), kept = dup(STDERR_FILENO);
    ck_assert(terminal >= 0 && grantpt(terminal) == 0 && unlockpt(terminal) == 0);
    int err = open(ptsname(terminal), O_RDWR | O_NOCTTY);
    ck_assert_int_eq(ioctl(err, TIOCSWINSZ, &(struct winsize){.ws_row = 24, .ws_col = 200}), 0);
    dup2(err, STDERR_FILENO);
    struct ps_progress *progress = ps_progress_open(4, 10);
    ps_progress_step(progress, 2, 0, NAN);
    sleep_seconds(3);
    ps_progress_step(progress, 2, 4, NAN);
    dup2(kept, STDERR_FILENO);
    close(kept);
    close(err);
    char text[1024] = "";
    ssize_t used = 0, size;
    while (used < (ssize_t)sizeof text - 1 && (size = read(terminal, text + used, sizeof text - 1 - (size_t)used)) > 0) {
        used += size;
    }
    ps_progress_close(progress);
    close(terminal);
    const char *said = strstr(text, "step 4/10, ");
    double epoch, left;
    ck_assert_msg(said != NULL && sscanf(said, "step 4/10, %lf s an epoch, %lf s left", &epoch, &left) == 2, "no time: %s", text);
    ck_assert_msg(epoch >= 7.5 && fabs(left - epoch * (2 + 0.6)) < 0.2, "%s", text);
}
END_TEST

/* A disk that takes no checkpoint: exit code 4, the old checkpoint still whole, nothing left beside it, and the run goes on later.
 */
START_TEST(disk_full)
{
    struct path dir = new_dir("disk"), last = in_run(dir.text, "checkpoints/last.h5"), copy = new_dir("disk_last.h5"), command;
    expect_done(train(dir.text, ARGS("--set", "train.epochs=1")));
    size_t size;
    char *bytes = file_read(last.text, &size);
    file_write(copy.text, bytes, size);
    free(bytes);
    command = path_of("trap '' XFSZ; ulimit -f 40; exec '%.250s/train' '%.250s' --device %.20s --run-dir '%.250s' --resume",
                      programs, config.text, device, dir.text);
    struct process p = process_start("/bin/sh", ARGS("-c", command.text), 0);
    expect_refused(process_end(&p), 4, ARGS(dir.text, ".h5.partial", "File too large"));
    ck_assert(files_equal(last.text, copy.text));
    ck_assert(!file_exists(in_run(dir.text, "checkpoints/last.h5.partial").text));
    ck_assert(!file_exists(in_run(dir.text, "checkpoints/best.h5.partial").text));
    expect_done(train(dir.text, ARGS("--resume")));
    expect_same_results(whole.text, dir.text);
}
END_TEST

/* ---- interruption ---- */

static uint64_t moments; /* state of the random moments */

/* xorshift64*; uniform in [0, 1) */
static double moment(void)
{
    moments ^= moments >> 12;
    moments ^= moments << 25;
    moments ^= moments >> 27;
    return (double)(moments * 0x2545f4914f6cdd1du >> 11) * 0x1p-53;
}

/* Trains, interrupts within `seconds` and resumes until the run is over, or lets it end after `most` signals. Returns how often it
 * was stopped inside an epoch; *slowest: seconds from a signal to the exit. */
static int interrupt_until_done(const char *dir, char *const *more, int steps, double seconds, int most, double *slowest)
{
    char *again[ARGUMENTS + 1] = {"--resume"};
    for (int i = 0; more[i]; i++) {
        again[i + 1] = more[i];
    }
    int within = 0;
    for (int i = 0;; i++) {
        struct process p = start_train(dir, i ? again : more);
        int number = i % 2 ? SIGTERM : SIGINT, ended = process_read(&p, LONGEST_RUN, 1); /* its first line: the handlers stand */
        if (!ended && i < most) {
            sleep_seconds(seconds * moment());
            kill(p.pid, number);
        }
        struct result r = process_end(&p);
        if (r.code == 0) {
            result_free(&r);
            return within;
        }
        *slowest = r.seconds > *slowest ? r.seconds : *slowest;
        expect_refused(r, 128 + number, ARGS("signal", "checkpoints/last.h5", "--resume"));
        struct ps_checkpoint c = load(dir, "last.h5");
        ck_assert_uint_eq(c.step, c.epoch * (uint64_t)steps + c.cursor / BATCH);
        within += c.cursor > 0;
        ps_checkpoint_free(&c);
    }
}

/* Stopped at random moments and resumed, a run ends on the same bytes as one that was left alone. */
START_TEST(interrupted)
{
    uint64_t seed = getenv("PS_TEST_SEED") ? strtoull(getenv("PS_TEST_SEED"), NULL, 10) : (uint64_t)time(NULL);
    printf("interrupted at random moments: PS_TEST_SEED=%llu\n", (unsigned long long)seed);
    fflush(stdout); /* a failure would lose it */
    moments = seed * 2 + 1;
    int within = 0, rounds = full ? 12 : 2;
    double slowest = 0, span = 0.7 * whole_seconds;
    for (int i = 0; i < rounds || (within == 0 && i < rounds + 8); i++, span *= within ? 1 : 0.5) {
        struct path dir = path_of("%.400s/interrupted%d", folder.text, i);
        if (i % 2) { /* batches stream from the host */
            within += interrupt_until_done(dir.text, ARGS("--set", "data.placement=host"), steps_per_epoch(), span, full ? 8 : 5,
                                           &slowest);
            expect_same_results(whole.text, dir.text);
        } else {
            within += interrupt_until_done(dir.text, ARGS(), steps_per_epoch(), span, full ? 8 : 5, &slowest);
            expect_same_run(whole.text, dir.text);
        }
    }
    printf("stopped %d times inside an epoch; at most %.2f s from signal to exit\n", within, slowest);
    ck_assert_int_gt(within, 0);
    ck_assert_double_lt(slowest, 10);
}
END_TEST

/* A signal during a long validation or test does not wait for its end, and the epoch's record is made after all. */
START_TEST(interrupted_while_scoring)
{
    struct path alone = new_dir("scored_alone"), data = new_dir("long.h5");
    char *more[] = {"--set", "data.path=long.h5",   "--set", "data.split=[100, 11000, 3000]", "--set", "train.epochs=1",
                    "--set", "data.placement=host", NULL};
    expect_done(run("sample_series", ARGS(data.text, "--hours", "14500", "--channels", "3")));
    double begin = seconds_now();
    expect_done(train(alone.text, more));
    double seconds = seconds_now() - begin, slowest = 0;
    int within = 0;
    for (int i = 0; within == 0 && i < 8; i++) { /* sooner and sooner, should the first run have been slow by chance */
        struct path dir = path_of("%.400s/scored%d", folder.text, i);
        within = interrupt_until_done(dir.text, more, 2, 0.6 * seconds / (1 << i), full ? 12 : 3, &slowest);
        expect_same_run(alone.text, dir.text);
    }
    printf("scoring takes %.2f s; stopped %d times before its end; at most %.2f s from signal to exit\n", seconds, within, slowest);
    ck_assert_int_gt(within, 0); /* the epoch's two steps take next to nothing: it was its validation that was cut short */
    ck_assert_double_lt(slowest, 10);
}
END_TEST

/* An epoch that was trained and not yet validated, as a signal then leaves it: resuming it measures no training, and says so. */
START_TEST(validated_when_resumed)
{
    struct path dir = new_dir("unvalidated"), last = in_run(dir.text, "checkpoints/last.h5");
    expect_done(train(dir.text, ARGS("--set", "train.epochs=1")));
    json_t *before = read_metrics(dir.text);
    struct ps_checkpoint c = load(dir.text, "last.h5");
    c.epoch = 0;
    c.cursor = c.step * BATCH;
    c.loss_sum = number_in(json_array_get(before, 0), "train_loss") * (double)c.cursor;
    c.best_epoch = 0;
    c.best_validation = HUGE_VAL;
    OK(ps_checkpoint_save(last.text, &c));
    ps_checkpoint_free(&c);
    struct result r = train(dir.text, ARGS("--resume", "--set", "train.epochs=1"));
    ck_assert_msg(r.code == 0 && !*r.err && strstr(r.out, "epoch 1/1: ") && !strstr(r.out, "windows/s"),
                  "exit code %d; stdout: %s; stderr: %s", r.code, r.out, r.err);
    result_free(&r);
    json_t *after = expect_stopped_metrics(dir.text, 1, steps_per_epoch(), 1), *record = json_array_get(after, 0);
    ck_assert(json_is_null(json_object_get(record, "windows_per_second")));
    ck_assert_double_gt(number_in(record, "seconds"), 0);
    ck_assert_double_eq(number_in(record, "val_mse"), number_in(json_array_get(before, 0), "val_mse"));
    json_decref(before);
    json_decref(after);
}
END_TEST

/* Killed outright, a run goes on from the last checkpoint inside the epoch. */
START_TEST(checkpoint_every)
{
    struct path dir = new_dir("every");
    int killed = 0;
    for (int attempt = 0; attempt < 5 && !killed; attempt++) {
        struct process p = start_train(dir.text, ARGS("--overwrite", "--set", "train.checkpoint_every=7"));
        uint64_t step = 0;
        while (!killed && !process_read(&p, 0.002, SIZE_MAX)) {
            struct ps_checkpoint c;
            if (ps_checkpoint_load(in_run(dir.text, "checkpoints/last.h5").text, &c) == PS_OK) {
                step = c.step;
                ps_checkpoint_free(&c);
            }
            if (step > 7) {
                kill(p.pid, SIGKILL);
                killed = 1;
            }
        }
        struct result r = process_end(&p);
        ck_assert_msg(r.code == (killed ? -1 : 0) || (killed && r.code == 0), "exit code %d: %s", r.code, r.err);
        killed = r.code == -1;
        result_free(&r);
    }
    ck_assert_msg(killed, "no checkpoint after step 7 was seen while training");
    struct ps_checkpoint c = load(dir.text, "last.h5");
    ck_assert_uint_eq(c.step % 7, 0);
    ck_assert_uint_eq(c.step, c.epoch * (uint64_t)steps_per_epoch() + c.cursor / BATCH);
    ps_checkpoint_free(&c);
    expect_done(train(dir.text, ARGS("--resume", "--set", "train.checkpoint_every=0")));
    expect_same_run(whole.text, dir.text);
}
END_TEST

/* Exit code 0, and one line on stderr, a warning that holds every text of `says`. */
static void expect_warned(struct result r, char *const *says)
{
    ck_assert_msg(r.code == 0 && lines_of(r.err) == 1 && strncmp(r.err, "train: warning: ", 16) == 0,
                  "exit code %d; stdout: %s; stderr: %s", r.code, r.out, r.err);
    for (int i = 0; says[i]; i++) {
        ck_assert_msg(strstr(r.err, says[i]) != NULL, "\"%s\" is not in the warning: %s", says[i], r.err);
    }
    result_free(&r);
}

/* best.h5 is written before last.h5. Where the two are of different runs, the older or the newer best.h5 gives way to the weights
 * of the epoch that last.h5 speaks of, where they are still to be had. */
START_TEST(best_and_last_apart)
{
    struct path dir = new_dir("apart"), last = in_run(dir.text, "checkpoints/last.h5"),
                best = in_run(dir.text, "checkpoints/best.h5");
    size_t last_size, best_size;
    expect_done(train(dir.text, ARGS("--set", "train.epochs=1")));
    char *last_1 = file_read(last.text, &last_size), *best_1 = file_read(best.text, &best_size);
    expect_done(train(dir.text, ARGS("--resume", "--set", "train.epochs=2")));
    struct ps_checkpoint c = load(dir.text, "best.h5");
    ck_assert_uint_eq(c.epoch, 2);
    ps_checkpoint_free(&c);
    size_t size;
    char *best_2 = file_read(best.text, &size);
    file_write(best.text, best_1, best_size);
    expect_done(train(dir.text, ARGS("--resume", "--set", "train.epochs=2")));
    char *again = file_read(best.text, NULL);
    ck_assert_msg(memcmp(again, best_2, size) == 0, "best.h5 was not written again from the state of that epoch's end");
    free(again);
    file_write(last.text, last_1, last_size);
    struct process p = start_train(dir.text, ARGS("--resume"));
    process_read(&p, LONGEST_RUN, 1);
    kill(p.pid, SIGINT);
    expect_refused(process_end(&p), 128 + SIGINT, ARGS("--resume"));
    c = load(dir.text, "last.h5");
    struct ps_checkpoint weights = load(dir.text, "best.h5");
    ck_assert_uint_eq(weights.epoch, c.best_epoch);
    ps_checkpoint_free(&weights);
    ps_checkpoint_free(&c);
    expect_done(train(dir.text, ARGS("--resume")));
    expect_same_results(whole.text, dir.text);
    free(last_1);
    free(best_1);
    free(best_2);
}
END_TEST

/* Flips a bit in the middle of a file, which keeps no other name. */
static void flip(const char *dir, const char *name)
{
    struct path path = path_of("%.400s/checkpoints/%s", dir, name);
    size_t size;
    char *bytes = file_read(path.text, &size);
    bytes[size / 2] ^= 4;
    remove(path.text);
    file_write(path.text, bytes, size);
    free(bytes);
}

/* A damaged last.h5 costs the steps since the state before it, and no more: the run ends on the same bits. */
START_TEST(falls_back)
{
    struct path dir = new_dir("back");
    char *more[] = {"--set", "train.checkpoint_every=20", "--set", "train.keep_last=3", "--set", "train.keep_best=2", NULL, NULL};
    expect_done(train(dir.text, more));
    static const char *const files[] = {"last.h5", "last-240.h5", "last-220.h5", "best.h5"};
    for (int i = 0; i < 4; i++) {
        ck_assert_msg(file_exists(path_of("%.400s/checkpoints/%s", dir.text, files[i]).text), "%s is missing", files[i]);
    }
    ck_assert(!file_exists(in_run(dir.text, "checkpoints/last-200.h5").text));
    more[6] = "--resume";
    flip(dir.text, "last.h5");
    expect_warned(train(dir.text, more), ARGS("checkpoints/last.h5: altered", "checkpoints/last-240.h5, of step 240"));
    expect_same_results(whole.text, dir.text);
    flip(dir.text, "last.h5");
    flip(dir.text, "last-240.h5");
    struct path cut = in_run(dir.text, "checkpoints/last-220.h5");
    ck_assert(file_exists(cut.text));
    expect_warned(train(dir.text, more), ARGS("checkpoints/last.h5: altered", "checkpoints/last-220.h5, of step 220"));
    expect_same_results(whole.text, dir.text);
    /* The best weights alone: the state of that epoch's end has them too. */
    more[1] = "train.checkpoint_every=0";
    more[6] = "--overwrite";
    expect_done(train(dir.text, more));
    more[6] = "--resume";
    flip(dir.text, "best.h5");
    expect_warned(train(dir.text, more), ARGS("checkpoints/best.h5: altered", "found elsewhere"));
    expect_same_results(whole.text, dir.text);
}
END_TEST

START_TEST(resume_longer_or_changed)
{
    struct path dir = new_dir("longer");
    expect_refused(train(dir.text, ARGS("--resume")), 4, ARGS("last.h5", "resume"));
    ck_assert(!file_exists(dir.text));
    expect_done(train(dir.text, ARGS("--set", "train.epochs=2")));
    struct listed before = list(dir.text);
    static const struct {
        char *set, *says;
    } changes[] = {{"optim.lr=0.5", "optim.lr"},         {"model.d_model=32", "model.d_model"}, {"train.seed=9", "train.seed"},
                   {"train.batch_size=8", "batch_size"}, {"data.drop_last=false", "drop_last"}, {"train.epochs=1", "train.epochs"}};
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        expect_refused(train(dir.text, ARGS("--resume", "--set", "train.epochs=2", "--set", changes[i].set)), 4,
                       ARGS(changes[i].says));
        expect_untouched(dir.text, before, changes[i].set);
    }
    /* Other data of the same shape. */
    expect_done(run("sample_series", ARGS(new_dir("other.h5").text, "--hours", "2000", "--channels", "3", "--seed", "4")));
    expect_refused(train(dir.text, ARGS("--resume", "--set", "train.epochs=2", "--set", "data.path=other.h5")), 4,
                   ARGS("other.h5"));
    expect_untouched(dir.text, before, "other data");
    free(before.text);
    expect_done(train(dir.text, ARGS("--resume")));
    expect_same_results(whole.text, dir.text);
}
END_TEST

/* Exit code 0, nothing on stderr, and a line of stdout that begins so. */
static void expect_line(struct result r, const char *begin)
{
    struct path line = path_of("\n%s", begin);
    ck_assert_msg(r.code == 0 && !*r.err && strstr(r.out, line.text) != NULL, "exit code %d; no line \"%s\": %s; stderr: %s",
                  r.code, begin, r.out, r.err);
    result_free(&r);
}

/* A run that is resumed says where, and that it was finished where it was; and why an epoch more is refused. */
START_TEST(says_where_it_resumes)
{
    struct path dir = new_dir("where"), last = in_run(dir.text, "checkpoints/last.h5"),
                from = path_of("resumed from %.400s: ", last.text);
    char *more[] = {"--set", "optim.schedule=cosine", "--set", "train.epochs=2", NULL, NULL};
    expect_done(train(dir.text, more));
    more[4] = "--resume";
    expect_line(train(dir.text, more),
                path_of("%.500sthe run was finished, after epoch 2/2: its weights are tested again\n", from.text).text);
    remove(in_run(dir.text, "test.json").text);
    expect_line(train(dir.text, more), path_of("%.500safter epoch 2/2, the test is left\n", from.text).text);
    more[3] = "train.epochs=8";
    expect_refused(train(dir.text, more), 4, ARGS("train.epochs", "made with 2", "this run has 8", "optim.schedule cosine"));
    more[1] = "optim.schedule=constant";
    more[4] = "--overwrite";
    more[3] = "train.epochs=1";
    expect_done(train(dir.text, more));
    more[4] = "--resume";
    more[3] = "train.epochs=2";
    expect_line(train(dir.text, more), path_of("%.500sin epoch 2/2, 0 of its %d steps done\n", from.text, steps_per_epoch()).text);
    /* Inside an epoch, as a signal leaves it. */
    struct ps_checkpoint c = load(dir.text, "last.h5");
    c.epoch = 1;
    c.step = (uint64_t)steps_per_epoch() + 7;
    c.cursor = 7 * BATCH;
    OK(ps_checkpoint_save(last.text, &c));
    ps_checkpoint_free(&c);
    expect_line(train(dir.text, more), path_of("%.500sin epoch 2/2, 7 of its %d steps done\n", from.text, steps_per_epoch()).text);
}
END_TEST

/* A batch of one window cannot be made smaller: what is too large is the model. */
START_TEST(one_window_too_large)
{
    struct path dir = new_dir("one_window");
    char *more[] = {"--set", "model.d_model=262144", "--set", "model.n_heads=1", "--set", "train.batch_size=1", NULL};
    struct result r = train(dir.text, more);
    ck_assert_msg(r.code == 5 && strstr(r.err, "at batch_size 1") && strstr(r.err, "lower model.d_model") &&
                      !strstr(r.err, "lower train.batch_size"),
                  "exit code %d: %s", r.code, r.err);
    result_free(&r);
    more[5] = "train.batch_size=2";
    expect_refused(train(dir.text, more), 5, ARGS("at batch_size 2", "lower train.batch_size"));
    ck_assert(!file_exists(dir.text));
}
END_TEST

/* A text that last.h5 records, changed with HDF5's own calls; NULL: removed. */
static void record(const char *dir, const char *name, const char *text)
{
    struct path path = in_run(dir, "checkpoints/last.h5");
    hid_t file = H5Fopen(path.text, H5F_ACC_RDWR, H5P_DEFAULT);
    ck_assert_msg(H5Adelete(file, name) >= 0, "%s has no attribute %s", path.text, name);
    if (text) {
        hid_t type = H5Tcopy(H5T_C_S1), space = H5Screate(H5S_SCALAR);
        H5Tset_size(type, strlen(text) + 1);
        H5Tset_cset(type, H5T_CSET_UTF8);
        hid_t attribute = H5Acreate2(file, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
        ck_assert_int_ge(H5Awrite(attribute, type, text), 0);
        H5Aclose(attribute);
        H5Sclose(space);
        H5Tclose(type);
    }
    H5Fclose(file);
    seal(path.text);
}

/* What another program wrote, or other kernels, is gone on from with one warning, and here to the same bits, since it only says so.
 */
START_TEST(resume_of_another_program)
{
    struct path dir = new_dir("another"), last = in_run(dir.text, "checkpoints/last.h5");
    expect_done(train(dir.text, ARGS("--set", "train.epochs=2")));
    struct ps_checkpoint c = load(dir.text, "last.h5");
    ck_assert_str_eq(c.program_version, ps_version);
    ck_assert_str_eq(c.kernel_sources, ps_kernel_sources);
    ck_assert_msg(*c.kernels && (!on_cpu || strcmp(c.kernels, c.level) == 0), "kernels %s at level %s", c.kernels, c.level);
    ck_assert_uint_eq(strlen(ps_kernel_sources), 16);
    ck_assert_uint_eq(strspn(ps_kernel_sources, "0123456789abcdef"), 16);
    ps_checkpoint_free(&c);
    record(dir.text, "kernel_sources", "0000000000000000");
    expect_done(run("evaluate", ARGS(last.text, "--device", (char *)device)));
    struct path line =
        path_of("train: warning: %s was written with kernel sources 0000000000000000, this program has kernel sources %s: the run "
                "goes on, its bits may differ from those of an uninterrupted one\n",
                last.text, ps_kernel_sources);
    struct result r = train(dir.text, ARGS("--resume"));
    ck_assert_int_eq(r.code, 0);
    ck_assert_str_eq(r.err, line.text);
    result_free(&r);
    expect_same_results(whole.text, dir.text);
    expect_done(train(dir.text, ARGS("--resume"))); /* nothing is left to do, and the checkpoint is this program's */
    /* Each of the three, and all of them, where they differ and where they are unknown. */
    record(dir.text, "program_version", "0.0.9");
    expect_warned(train(dir.text, ARGS("--resume")), ARGS("with version 0.0.9, this program has version"));
    record(dir.text, "kernels", "one\nof another name");
    expect_warned(train(dir.text, ARGS("--resume")), ARGS("with kernels one?of another name, this program has kernels"));
    record(dir.text, "program_version", NULL);
    record(dir.text, "kernel_sources", NULL);
    record(dir.text, "kernels", NULL);
    expect_warned(train(dir.text, ARGS("--resume")),
                  ARGS("with version unknown, kernel sources unknown, kernels unknown, this", (char *)ps_version));
    /* What is refused is refused in one line. */
    record(dir.text, "kernel_sources", "0000000000000000");
    record(dir.text, "algorithms", "others");
    struct listed before = list(dir.text);
    expect_refused(train(dir.text, ARGS("--resume")), 4, ARGS("cannot resume to the same bits: algorithms", "others"));
    expect_untouched(dir.text, before, "a refused run");
    free(before.text);
}
END_TEST

/* With a rate too small to change a weight the first epoch stays the best, and best.h5 says so, though it is written at the end. */
START_TEST(patience)
{
    struct path dir = new_dir("patience");
    char *more[] = {"--set", "optim.lr=1e-30",
                    "--set", "train.patience=2",
                    "--set", "train.epochs=9",
                    "--set", "train.checkpoint_every=1000",
                    NULL,    NULL};
    expect_done(train(dir.text, more));
    json_decref(expect_metrics(dir.text, 3, steps_per_epoch()));
    json_t *test = read_test(dir.text);
    ck_assert_int_eq((int)number_in(test, "epoch"), 1);
    json_decref(test);
    struct ps_checkpoint c = load(dir.text, "best.h5");
    ck_assert_uint_eq(c.epoch, 1);
    ck_assert_uint_eq(c.step, (uint64_t)steps_per_epoch());
    ck_assert_uint_eq(c.epochs_since_best, 0);
    ps_checkpoint_free(&c);
    more[8] = "--resume"; /* nothing is left to do */
    expect_done(train(dir.text, more));
    json_decref(expect_metrics(dir.text, 3, steps_per_epoch()));
    /* test.json's validation errors are of the first epoch's line, whose weights are tested. */
    static const char lines[] = "{\"epoch\":1,\"val_mse\":0.5,\"val_mae\":0.25}\n{\"epoch\":3,\"val_mse\":0.75,\"val_mae\":1}\n";
    file_write(in_run(dir.text, "metrics.jsonl").text, lines, strlen(lines));
    expect_done(train(dir.text, more));
    test = read_test(dir.text);
    ck_assert(number_in(test, "val_mse") == 0.5 && number_in(test, "val_mae") == 0.25);
    json_decref(test);
}
END_TEST

/* A series of 1,500 values, 1-D or of 3 channels, written with HDF5 as anyone would. */
static void write_series(const char *path, hid_t type, int rank, const void *values)
{
    hid_t file = H5Fcreate(path, H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    hid_t space = H5Screate_simple(rank, (hsize_t[]){rank == 1 ? 1500 : 500, 3}, NULL);
    hid_t id = H5Dcreate2(file, "series", type, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    ck_assert_int_ge(H5Dwrite(id, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values), 0);
    H5Dclose(id);
    H5Sclose(space);
    H5Fclose(file);
}

/* A rate that ruins the first step ends the run, which names step and tensor; the checkpoint from before it stays, and so does
 * every later one: nothing is written of weights that are spoilt. */
START_TEST(stops_when_not_finite)
{
    struct path dir = new_dir("stopped");
    char *more[] = {"--set", "optim.lr=1e38", "--set", "train.checkpoint_every=1", "--set", "train.keep_last=100", NULL, NULL};
    expect_refused(train(dir.text, more), 2,
                   ARGS("in epoch 1: the loss is not finite", "tensors, first b_h", "optim.lr", "optim.clip_norm",
                        "train.on_nonfinite: skip", "the last checkpoint is of a step before"));
    struct ps_checkpoint c = load(dir.text, "last.h5");
    ck_assert_uint_le(c.step, 3);
    for (int64_t i = 0; i < c.layout->count; i++) {
        ck_assert(isfinite(c.parameters[i]) && isfinite(c.m[i]) && isfinite(c.v[i]));
    }
    ps_checkpoint_free(&c);
    struct path nothing = in_run(dir.text, "metrics.jsonl");
    ck_assert(!file_exists(nothing.text) && !file_exists(in_run(dir.text, "checkpoints/best.h5").text));
    /* And says so again, from where it was. */
    more[6] = "--resume";
    expect_refused(train(dir.text, more), 2, ARGS("in epoch 1: the loss is not finite"));
}
END_TEST

/* A rate that overflows the parameters in a step whose gradients are finite: the run is one step, so no later gradient tells. Of
 * that state nothing is written, and the one before it stays. */
START_TEST(stops_when_parameters_overflow)
{
    struct path dir = new_dir("overflow");
    expect_refused(train(dir.text, ARGS("--set", "optim.lr=1e39", "--set", "train.batch_size=1341", "--set", "train.epochs=1")), 2,
                   ARGS("step 1: w_p has a value that is not finite, and is not written", "optim.lr"));
    struct ps_checkpoint c = load(dir.text, "last.h5");
    ck_assert_uint_eq(c.step, 0);
    for (int64_t i = 0; i < c.layout->count; i++) {
        ck_assert(isfinite(c.parameters[i]));
    }
    ps_checkpoint_free(&c);
    ck_assert(!file_exists(in_run(dir.text, "checkpoints/best.h5").text) && !file_exists(in_run(dir.text, "test.json").text));
}
END_TEST

/* Steps that are left out are counted in metrics.jsonl and told; the others train. */
START_TEST(skips_when_not_finite)
{
    struct path dir = new_dir("skipped"), data = new_dir("spike.h5");
    static float values[3 * 500];
    for (int i = 0; i < 3 * 500; i++) {
        values[i] = (float)sin(0.1 * i);
    }
    values[3 * 200 + 1] = 3e38f; /* finite, but its square is not */
    write_series(data.text, H5T_NATIVE_FLOAT, 2, values);
    char *more[] = {"--set", "data.path=spike.h5", "--set", "data.standardize=false", "--set", "model.revin=false",
                    "--set", "train.epochs=2",     "--set", "train.batch_size=4",     NULL,    NULL,
                    NULL};
    expect_refused(train(dir.text, more), 2, ARGS("is not finite", "train.on_nonfinite: skip"));
    more[10] = "--resume";
    more[11] = "--set=train.on_nonfinite=skip"; /* the run that was stopped goes on */
    struct result r = train(dir.text, more);
    ck_assert_msg(r.code == 0 && !*r.err && strstr(r.out, "steps skipped (not finite)"), "exit code %d; stdout: %s; stderr: %s",
                  r.code, r.out, r.err);
    result_free(&r);
    int windows = 350 - L - H + 1, steps = windows / 4;
    json_t *metrics = expect_metrics(dir.text, 2, steps); /* every loss is a number */
    for (int i = 0; i < 2; i++) {
        int skipped = (int)number_in(json_array_get(metrics, (size_t)i), "skipped");
        ck_assert_int_ge(skipped, (L + H) / 4); /* as many windows hold the spike */
        ck_assert_int_lt(skipped, steps);
    }
    json_decref(metrics);
    json_decref(read_test(dir.text));
}
END_TEST

/* When every step is left out no epoch is good: the last weights are tested, with a warning. */
START_TEST(no_finite_epoch)
{
    struct path dir = new_dir("ruined");
    struct result r =
        train(dir.text, ARGS("--set", "optim.lr=1e38", "--set", "train.epochs=2", "--set", "train.on_nonfinite=skip"));
    ck_assert_msg(r.code == 0, "exit code %d: %s", r.code, r.err);
    ck_assert_int_eq(lines_of(r.err), 1);
    ck_assert_msg(strstr(r.err, "warning") && strstr(r.err, "optim.lr"), "%s", r.err);
    result_free(&r);
    ck_assert(!file_exists(in_run(dir.text, "checkpoints/best.h5").text));
    json_t *test = read_test(dir.text), *metrics = read_metrics(dir.text);
    ck_assert(json_is_null(json_object_get(test, "mse")));
    ck_assert(json_is_null(json_object_get(test, "val_mse")) && json_is_null(json_object_get(test, "val_mae")));
    ck_assert_int_eq((int)number_in(test, "epoch"), 2);
    ck_assert_int_eq((int)json_array_size(metrics), 2);
    ck_assert(json_is_null(json_object_get(json_array_get(metrics, 1), "val_mse")));
    ck_assert(json_is_null(json_object_get(json_array_get(metrics, 1), "train_loss")));
    ck_assert_int_eq((int)number_in(json_array_get(metrics, 1), "skipped"), steps_per_epoch());
    json_decref(test);
    json_decref(metrics);
}
END_TEST

/* ---- threads ---- */

/* The end of a run's record of versions: "..., 1 thread, avx2". */
static void expect_threads(const char *dir, int threads)
{
    struct ps_checkpoint c = load(dir, "last.h5");
    const struct path says = path_of(", %d thread%s, ", threads, threads == 1 ? "" : "s");
    ck_assert_msg(strstr(c.versions, says.text) != NULL, "\"%s\" is not in \"%s\"", says.text, c.versions);
    ps_checkpoint_free(&c);
}

/* Where OpenMP gives fewer threads than the config asks for, the run goes on with those, says so and records it. Products this
 * large are OpenBLAS's, which would wait for threads that never come. */
START_TEST(fewer_threads)
{
    static const char *const variables[] = {"OMP_THREAD_LIMIT", "OMP_MAX_ACTIVE_LEVELS"}, *const values[] = {"1", "0"};
    struct path dir = new_dir("fewer"), last = in_run(dir.text, "checkpoints/last.h5");
    char *more[] = {"--overwrite",
                    "--device",
                    "cpu",
                    "--set",
                    "model.d_model=256",
                    "--set",
                    "model.d_ff=1024",
                    "--set",
                    "model.n_layers=1",
                    "--set",
                    "data.split=[200, 100, 100]",
                    "--set",
                    "train.epochs=1",
                    NULL};
    for (int i = 0; i < 2; i++) {
        setenv(variables[i], values[i], 1);
        expect_warned(train(dir.text, more), ARGS("runtime.threads: 1 of 2", "OMP_THREAD_LIMIT"));
        struct result r = run("evaluate", ARGS(last.text, "--device", "cpu"));
        ck_assert_msg(r.code == 0 && lines_of(r.err) == 1 && strstr(r.err, "evaluate: warning: runtime.threads: 1 of 2"),
                      "exit code %d: %s", r.code, r.err);
        result_free(&r);
        unsetenv(variables[i]);
        expect_threads(dir.text, 1);
    }
    more[0] = "--resume";
    expect_refused(train(dir.text, more), 4, ARGS("device and versions", "2 threads", "1 thread"));
    /* All processors, as far as the limit allows: nothing to warn of. */
    setenv("OMP_THREAD_LIMIT", "1", 1);
    expect_done(train(dir.text, ARGS("--overwrite", "--device", "cpu", "--set", "runtime.threads=0", "--set", "train.epochs=1")));
    unsetenv("OMP_THREAD_LIMIT");
    expect_threads(dir.text, 1);
}
END_TEST

/* KiB of address space that train takes before it has done anything: while it waits for a config that is a pipe. */
static long room_of_train(void)
{
    struct path pipe = new_dir("pipe.yaml");
    ck_assert_int_eq(mkfifo(pipe.text, 0666), 0);
    struct process p = start("train", ARGS(pipe.text));
    long kib = 0;
    for (char state = 'R'; state != 'S';) {
        sleep_seconds(0.01);
        FILE *status = fopen(path_of("/proc/%d/status", (int)p.pid).text, "r");
        ck_assert(status != NULL);
        for (char line[256]; fgets(line, sizeof line, status);) {
            sscanf(line, "State: %c", &state);
            sscanf(line, "VmSize: %ld", &kib);
        }
        fclose(status);
        ck_assert_msg(state != 'Z', "it ended");
    }
    kill(p.pid, SIGKILL);
    struct result r = process_end(&p);
    result_free(&r);
    ck_assert_int_eq(unlink(pipe.text), 0); /* who reads the folder would wait for a writer */
    return kib;
}

static struct result train_within(const char *dir, long kib)
{
    struct path command = path_of("ulimit -v %ld; exec '%.250s/train' '%.250s' --device cpu --run-dir '%.250s' --overwrite --set "
                                  "runtime.threads=1000 --set train.epochs=1",
                                  kib, programs, config.text, dir);
    struct process p = process_start("/bin/sh", ARGS("-c", command.text), 0);
    return process_end(&p);
}

/* More threads than the address space holds: as many as it does, or a line that says what is missing. */
START_TEST(threads_without_room)
{
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
    printf("skipped: the sanitizers take address space without measure\n");
    return;
#endif
    int (*parallel)(void);
    *(void **)&parallel = dlsym(RTLD_DEFAULT, "openblas_get_parallel");
    if (!parallel || parallel() != 2) {
        printf("skipped: threads without room: this OpenBLAS is not the one that computes with OpenMP's threads\n");
        return;
    }
    struct path dir = new_dir("no_room");
    setenv("OMP_NUM_THREADS", "1", 1); /* those that OpenBLAS makes room for when it is loaded */
    long kib = room_of_train();
    struct result r = train_within(dir.text, kib + 1200 * 1024);
    const char *says = strstr(r.err, "runtime.threads: ");
    int threads = says ? atoi(says + strlen("runtime.threads: ")) : 0;
    ck_assert_msg(threads >= 1 && threads < 1000, "stderr: %s", r.err);
    expect_warned(r, ARGS(" of 1000: ", "ulimit"));
    expect_threads(dir.text, threads);
    expect_refused(train_within(dir.text, kib + 100 * 1024), 5, ARGS("not enough memory", "ulimit -v"));
    unsetenv("OMP_NUM_THREADS");
}
END_TEST

/* ---- bad input ---- */

/* 1-D, integers, NaN, a constant channel; and a good one of one channel, whose 1,341 training windows are one more than batches of
 * 4 hold. */
static void write_bad_series(void)
{
    static float values[1500];
    static int32_t integers[1500];
    for (int i = 0; i < 1500; i++) {
        values[i] = (float)sin(0.1 * i);
    }
    write_series(new_dir("flat.h5").text, H5T_NATIVE_FLOAT, 1, values);
    write_series(new_dir("integers.h5").text, H5T_NATIVE_INT32, 2, integers);
    values[3 * 123 + 1] = NAN;
    write_series(new_dir("nan.h5").text, H5T_NATIVE_FLOAT, 2, values);
    values[3 * 123 + 1] = -INFINITY;
    write_series(new_dir("inf.h5").text, H5T_NATIVE_FLOAT, 2, values);
    for (int i = 0; i < 500; i++) {
        values[3 * i + 1] = 4;
    }
    write_series(new_dir("constant.h5").text, H5T_NATIVE_FLOAT, 2, values);
    file_write(new_dir("text.h5").text, "date,load\n", 10);
    OK(ps_sample_series(new_dir("one.h5").text, HOURS, 1, 3));
}

/* A window is one row. */
#define ONE_ROW "data.path=one.h5", "model.norm=batch", "model.patch_len=48", "model.padding=none"

static const struct bad {
    char *set[6]; /* --set each */
    int code;
    char *says[5];
} bad_input[] = {
    {{"model.d_modle=16"}, 2, {"d_modle", "d_model"}},
    {{"modle.d_model=16"}, 2, {"modle", "model"}},
    {{"model.d_model=wide"}, 2, {"model.d_model", "wide", "whole number"}},
    {{"train.epochs=1.5"}, 2, {"train.epochs", "1.5"}},
    {{"optim.lr=-1"}, 2, {"optim.lr", "-1"}},
    {{"model.dropout=1"}, 2, {"model.dropout", "1"}},
    {{"optim.schedule=linear"}, 2, {"optim.schedule", "linear", "cosine"}},
    {{"model.n_heads=5"}, 2, {"n_heads", "5", "16"}},
    {{"model.patch_len=49"}, 2, {"patch_len", "49", "48"}},
    {{"d_model"}, 2, {"d_model", "section.key=value"}},
    {{"data.split=[1500, 400, 200]"}, 3, {"series.h5", "2100", "2000"}},
    {{"data.split=[59, 100, 100]"}, 3, {"series.h5", "train", "59", "60"}},
    {{"data.split=[1000, 11, 100]"}, 3, {"series.h5", "val", "11", "12"}},
    {{"data.split=[1000, 100, 0]"}, 3, {"series.h5", "test", "12"}},
    {{"data.path=missing.h5"}, 3, {"missing.h5", "No such file"}},
    {{"data.path=text.h5"}, 3, {"text.h5", "not an HDF5 file"}},
    {{"data.path=flat.h5"}, 3, {"flat.h5", "/series", "rank 1", "rank 2"}},
    {{"data.path=integers.h5"}, 3, {"integers.h5", "/series", "int32", "float32"}},
    {{"data.path=nan.h5"}, 3, {"nan.h5", "NaN", "channel 1", "row 123"}},
    {{"data.path=inf.h5"}, 3, {"inf.h5", "-Inf", "channel 1", "row 123"}},
    {{"train.batch_size=5000"}, 2, {"train.batch_size", "5000", "1341", "drop_last"}},
    {{"train.batch_size=100000000", "data.drop_last=false"}, 5, {"train.batch_size", "MiB"}},
    {{ONE_ROW, "train.batch_size=1"}, 2, {"model.norm: batch", "a batch, of 1 window", "raise train.batch_size"}},
    {{ONE_ROW, "train.batch_size=4", "data.drop_last=false"}, 2, {"model.norm: batch", "last batch", "data.drop_last: true"}},
    {{"runtime.fusion=layer"}, 2, {"runtime.fusion", "layer"}},
    {{"runtime.device=gpu"}, 2, {"runtime.device", "gpu", "cuda"}},
};
enum { BAD_INPUT = sizeof bad_input / sizeof *bad_input };

/* Refused in a new folder, which is not even made, and over a run, which stays as it was. */
START_TEST(bad_config_or_data)
{
    write_bad_series();
    struct listed before = list(whole.text);
    struct path dir = new_dir("refused");
    for (int i = 0; i < BAD_INPUT; i++) {
        const struct bad *b = &bad_input[i];
        char *more[14] = {NULL};
        int n = 0;
        for (int j = 0; j < 6 && b->set[j]; j++) {
            more[n++] = "--set";
            more[n++] = b->set[j];
        }
        expect_refused(train(dir.text, more), b->code, b->says);
        ck_assert_msg(!file_exists(dir.text), "%s: a run folder was made", b->set[0]);
        more[n] = "--overwrite";
        expect_refused(train(whole.text, more), b->code, b->says);
        expect_untouched(whole.text, before, b->set[0]);
    }
    free(before.text);
    /* Two rows are enough: a last batch that is left out, one of two windows, and windows of two patches. */
    static char *const enough[][3] = {
        {"train.batch_size=4"}, {"train.batch_size=1339", "data.drop_last=false"}, {"train.batch_size=1", "model.padding=end"}};
    for (size_t i = 0; i < sizeof enough / sizeof *enough; i++) {
        char *const sets[] = {ONE_ROW, "train.epochs=1", enough[i][0], enough[i][1]};
        char *more[2 * sizeof sets / sizeof *sets + 2] = {"--overwrite"};
        for (size_t j = 0, n = 1; j < sizeof sets / sizeof *sets && sets[j]; j++) {
            more[n++] = "--set";
            more[n++] = sets[j];
        }
        expect_done(train(dir.text, more));
    }
}
END_TEST

/* In a file the line is named too. */
START_TEST(bad_config_file)
{
    struct path bad = new_dir("bad.yaml"), dir = new_dir("refused_file");
    static const struct {
        const char *text;
        char *says[3];
    } cases[] = {{"data:\n  path: series.h5\nmodel:\n  seq_len: 48\n  paatch_len: 8\n", {"bad.yaml:5", "paatch_len", "patch_len"}},
                 {"data:\n  path: series.h5\ntrain:\n  epochs: many\n", {"bad.yaml:4", "train.epochs", "many"}},
                 {"data:\n  path: [series.h5\n", {"bad.yaml"}},
                 {"model:\n  d_model: 16\n", {"bad.yaml", "data.path"}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        file_write(bad.text, cases[i].text, strlen(cases[i].text));
        char *says[4] = {cases[i].says[0], cases[i].says[1], cases[i].says[2], NULL};
        expect_refused(run("train", ARGS(bad.text, "--run-dir", dir.text)), 2, says);
        expect_refused(run("bench", ARGS(bad.text)), 2, says);
    }
    ck_assert(!file_exists(dir.text));
    expect_refused(run("train", ARGS(new_dir("none.yaml").text, "--run-dir", dir.text)), 2, ARGS("none.yaml", "No such file"));
    expect_refused(run("train", ARGS()), 2, ARGS("train", "--help"));
    expect_refused(run("train", ARGS(config.text, "--epochs", "3")), 2, ARGS("--epochs"));
    expect_refused(run("train", ARGS(config.text, "--run-dir")), 2, ARGS("--run-dir"));
    expect_refused(run("train", ARGS(config.text, "--device", "gpu", "--run-dir", dir.text)), 2, ARGS("gpu", "cuda"));
    if (gpus == 0) {
        expect_refused(run("train", ARGS(config.text, "--device", "cuda", "--run-dir", dir.text)), 5, ARGS("cuda", "CUDA"));
    }
    ck_assert(!file_exists(dir.text));
}
END_TEST

/* Allowed, with one line that names the channel. */
START_TEST(constant_channel)
{
    write_bad_series();
    struct result r = train(new_dir("constant").text, ARGS("--set", "data.path=constant.h5", "--set", "train.epochs=1"));
    ck_assert_msg(r.code == 0, "exit code %d: %s", r.code, r.err);
    ck_assert_int_eq(lines_of(r.err), 1);
    ck_assert_msg(strstr(r.err, "warning") && strstr(r.err, "constant.h5") && strstr(r.err, "channel 1"), "%s", r.err);
    result_free(&r);
}
END_TEST

/* ---- evaluate ---- */

START_TEST(evaluate_scores)
{
    struct path best = in_run(whole.text, "checkpoints/best.h5"), last = in_run(whole.text, "checkpoints/last.h5");
    json_t *test = read_test(whole.text), *again = evaluate_json(best.text, ARGS("--json"));
    ck_assert_msg(same_scores(test, again), "evaluate does not give test.json's figures");
    struct result r = evaluate(best.text, ARGS());
    ck_assert_int_eq(r.code, 0);
    char figure[32];
    snprintf(figure, sizeof figure, "mse %.4f", number_in(test, "mse"));
    static const char *const names[] = {"test", "model", "full batches", "repeat-last", "seasonal-naive"};
    for (int i = 0; i < 5; i++) {
        ck_assert_msg(strstr(r.out, names[i]) != NULL, "%s is not in: %s", names[i], r.out);
    }
    ck_assert_msg(strstr(r.out, figure) != NULL, "%s is not in: %s", figure, r.out);
    result_free(&r);
    json_decref(again);
    /* The last weights on the validation split: what the last line of metrics.jsonl says. */
    again = evaluate_json(last.text, ARGS("--json", "--split", "val"));
    json_t *metrics = read_metrics(whole.text);
    ck_assert_double_eq(number_in(again, "mse"), number_in(json_array_get(metrics, EPOCHS - 1), "val_mse"));
    ck_assert_double_eq(number_in(again, "mae"), number_in(json_array_get(metrics, EPOCHS - 1), "val_mae"));
    ck_assert_int_eq((int)number_in(again, "windows"), windows_of(PS_VALIDATION));
    ck_assert_int_eq((int)number_in(again, "epoch"), EPOCHS);
    json_decref(again);
    json_decref(metrics);
    again = evaluate_json(last.text, ARGS("--json", "--split", "train"));
    ck_assert_int_eq((int)number_in(again, "windows"), windows_of(PS_TRAIN));
    json_decref(again);
    /* The same data in another file, files of more channels and fewer. */
    struct path copy = new_dir("copy.h5"), other = new_dir("others.h5");
    size_t size;
    char *bytes = file_read(series.text, &size);
    file_write(copy.text, bytes, size);
    free(bytes);
    again = evaluate_json(best.text, ARGS("--json", "--data", copy.text));
    ck_assert(same_scores(test, again));
    json_decref(again);
    expect_done(run("sample_series", ARGS(other.text, "--hours", "2000", "--channels", "4")));
    expect_done(evaluate(best.text, ARGS("--data", other.text)));
    expect_done(run("sample_series", ARGS(other.text, "--hours", "2000", "--channels", "2", "--overwrite")));
    expect_refused(evaluate(best.text, ARGS("--data", other.text)), 3, ARGS("others.h5", "has no channel \"channel_3\""));
    expect_refused(evaluate(best.text, ARGS("--split", "tset")), 2, ARGS("--split", "tset", "test"));
    json_decref(test);
}
END_TEST

/* Mean squared difference, channel c of a in units of scale[c]. */
static double squares(const struct array *a, const struct array *b, const double *scale)
{
    double sum = 0;
    size_t n = a->size[0] * a->size[1] * a->size[2];
    for (size_t i = 0; i < n; i++) {
        double e = ((double)a->values[i] - (double)b->values[i]) / scale[i / a->size[2] % a->size[1]];
        sum += e * e;
    }
    return sum / (double)n;
}

START_TEST(save_forecasts)
{
    struct path best = in_run(whole.text, "checkpoints/best.h5"), out = new_dir("forecasts.h5");
    const double one[CHANNELS] = {1, 1, 1};
    json_t *test = read_test(whole.text);
    struct ps_checkpoint c = load(whole.text, "best.h5");
    struct ps_series *s;
    OK(ps_series_open(series.text, &s));
    for (int original = 0; original < 2; original++) {
        struct result r = evaluate(best.text, original ? ARGS("--save-forecasts", out.text, "--original-units", "--overwrite")
                                                       : ARGS("--save-forecasts", out.text));
        ck_assert_msg(r.code == 0 && !*r.err, "exit code %d: %s", r.code, r.err);
        result_free(&r);
        struct array forecasts = read_array(out.text, "forecasts"), targets = read_array(out.text, "targets"),
                     inputs = read_array(out.text, "inputs");
        hsize_t windows = (hsize_t)windows_of(PS_TEST);
        ck_assert(forecasts.size[0] == windows && forecasts.size[1] == CHANNELS && forecasts.size[2] == H);
        ck_assert(targets.size[0] == windows && targets.size[1] == CHANNELS && targets.size[2] == H);
        ck_assert(inputs.size[0] == windows && inputs.size[1] == CHANNELS && inputs.size[2] == L);
        double mse = squares(&forecasts, &targets, original ? c.scaler.std : one);
        ck_assert_double_eq_tol(mse / number_in(test, "mse"), 1, 1e-5);
        int64_t first = HOURS * 8 / 10 - L; /* row of the first test window */
        for (hsize_t i = 0; i < windows; i++) {
            for (int ch = 0; ch < CHANNELS; ch++) {
                double mean = original ? 0 : c.scaler.mean[ch], std = original ? 1 : c.scaler.std[ch];
                for (int t = 0; t < L + H; t++) {
                    double row = s->values[(first + (int64_t)i + t) * CHANNELS + ch];
                    float found = t < L ? inputs.values[(i * CHANNELS + (hsize_t)ch) * L + (hsize_t)t]
                                        : targets.values[(i * CHANNELS + (hsize_t)ch) * H + (hsize_t)(t - L)];
                    ck_assert_msg(fabs(found * std + mean - row) <= 2e-6 * (fabs(row) + c.scaler.std[ch]),
                                  "window %d, channel %d, row %d: %g, not %g", (int)i, ch, t, found * std + mean, row);
                }
            }
        }
        free(forecasts.values);
        free(targets.values);
        free(inputs.values);
    }
    ps_series_close(s);
    ps_checkpoint_free(&c);
    json_decref(test);
    expect_refused(evaluate(best.text, ARGS("--save-forecasts", new_dir("nowhere/out.h5").text)), 3, ARGS("nowhere/out.h5"));
}
END_TEST

/* Forecasts that are longer than the window, in original units: the buffer is for the longer of both. */
START_TEST(save_long_forecasts)
{
    struct path dir = new_dir("beyond"), out = new_dir("beyond.h5");
    expect_done(train(dir.text, ARGS("--set", "train.epochs=1", "--set", "model.seq_len=16", "--set", "model.pred_len=96")));
    struct path best = in_run(dir.text, "checkpoints/best.h5");
    expect_done(evaluate(best.text, ARGS("--save-forecasts", out.text, "--original-units")));
    struct array forecasts = read_array(out.text, "forecasts"), targets = read_array(out.text, "targets");
    ck_assert(forecasts.size[2] == 96 && targets.size[2] == 96);
    for (hsize_t i = 0; i < forecasts.size[0] * forecasts.size[1] * 96; i++) {
        ck_assert(isfinite(forecasts.values[i]));
    }
    free(forecasts.values);
    free(targets.values);
}
END_TEST

/* What exists stays unless it is told to be replaced, and what is read stays even then, by whatever name it is called. */
START_TEST(save_forecasts_over)
{
    struct path data = new_dir("precious.h5"), checkpoint = new_dir("checkpoint.h5"), other = new_dir("other_file"),
                links[4] = {new_dir("soft_data"), new_dir("hard_data"), new_dir("soft_checkpoint"), new_dir("hard_checkpoint")};
    size_t size;
    char *bytes = file_read(series.text, &size);
    file_write(data.text, bytes, size);
    free(bytes);
    bytes = file_read(in_run(whole.text, "checkpoints/best.h5").text, &size);
    file_write(checkpoint.text, bytes, size);
    free(bytes);
    file_write(other.text, "mine", 4);
    for (int i = 0; i < 4; i++) {
        const char *of = i < 2 ? data.text : checkpoint.text;
        ck_assert_int_eq(i % 2 ? link(of, links[i].text) : symlink(of, links[i].text), 0);
    }
    struct listed before = list(folder.text);
    const char *read[6] = {data.text, links[0].text, links[1].text, checkpoint.text, links[2].text, links[3].text};
    for (int i = 0; i < 12; i++) {
        expect_refused(evaluate(checkpoint.text, ARGS("--data", data.text, "--save-forecasts", (char *)read[i / 2],
                                                      i % 2 ? "--overwrite" : "--json")),
                       2, ARGS("--save-forecasts", (char *)read[i / 2], i < 6 ? "is the data" : "is the checkpoint"));
    }
    expect_refused(evaluate(checkpoint.text, ARGS("--save-forecasts", series.text, "--overwrite")), 2,
                   ARGS("--save-forecasts", series.text, "is the data")); /* the config's own */
    /* Refused before anything is computed: the device and the data, which would be refused too, are not opened. */
    struct path run_last = in_run(whole.text, "checkpoints/last.h5");
    const char *there[3] = {other.text, run_last.text, whole.text};
    for (int i = 0; i < 3; i++) {
        expect_refused(run("evaluate", ARGS(checkpoint.text, "--data", new_dir("none.h5").text, "--device", "abacus",
                                            "--save-forecasts", (char *)there[i])),
                       2, ARGS("--save-forecasts", (char *)there[i], "exists", "--overwrite"));
    }
    expect_untouched(folder.text, before, "refused forecasts");
    free(before.text);
    struct result r = evaluate(checkpoint.text, ARGS("--save-forecasts", other.text, "--overwrite"));
    ck_assert_msg(r.code == 0 && !*r.err, "exit code %d: %s", r.code, r.err);
    result_free(&r);
    free(read_array(other.text, "forecasts").values);
    expect_refused(evaluate(checkpoint.text, ARGS("--save-forecasts", whole.text, "--overwrite")), 3,
                   ARGS(whole.text, "cannot be replaced"));
}
END_TEST

/* A tuning table is CUDA's: the CPU neither reads nor records it. It is seen from the config's folder, and evaluate finds it from
 * any. */
START_TEST(tuning_table)
{
    struct path dir = new_dir("tuned"), table = new_dir("gemm.tune");
    if (!on_cpu) {
        expect_refused(train(dir.text, ARGS("--set", "runtime.tuning=gemm.tune")), 2, ARGS(table.text, "No such file"));
        return;
    }
    expect_done(train(dir.text, ARGS("--set", "runtime.tuning=gemm.tune", "--set", "train.epochs=1")));
    struct ps_checkpoint c = load(dir.text, "best.h5"), untuned = load(whole.text, "best.h5");
    ck_assert_msg(strstr(c.config, table.text) != NULL, "%s is not in: %s", table.text, c.config);
    ck_assert_str_eq(c.algorithms, untuned.algorithms);
    ps_checkpoint_free(&c);
    ps_checkpoint_free(&untuned);
    ck_assert_int_eq(chdir("/"), 0);
    json_t *test = read_test(dir.text), *again = evaluate_json(in_run(dir.text, "checkpoints/best.h5").text, ARGS("--json"));
    ck_assert(same_scores(test, again));
    json_decref(test);
    json_decref(again);
    if (gpus > 0) {
        expect_refused(
            run("evaluate", ARGS(in_run(dir.text, "checkpoints/best.h5").text, "--device", "cuda", "--data", series.text)), 2,
            ARGS(table.text, "No such file"));
    } else {
        printf("skipped: a tuning table that is missing: no CUDA device\n");
    }
    expect_done(train(dir.text, ARGS("--resume", "--set", "train.epochs=2"))); /* and without it goes on */
}
END_TEST

/* Another file is standardised as the model was trained, not by its own rows: figures worked out here from both files' values. */
START_TEST(evaluate_other_data)
{
    struct path best = in_run(whole.text, "checkpoints/best.h5"), data = new_dir("shifted.h5"),
                out = new_dir("shifted_forecasts.h5");
    const int train_rows = HOURS * 7 / 10, first = HOURS * 8 / 10 - L, windows = windows_of(PS_TEST);
    double mean[CHANNELS] = {0}, std[CHANNELS] = {0}, squares = 0, absolutes = 0;
    struct ps_series *s;
    OK(ps_series_open(series.text, &s));
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < train_rows * CHANNELS; i++) {
            double x = s->values[i];
            int c = i % CHANNELS;
            if (pass == 0) {
                mean[c] += x / train_rows;
            } else {
                std[c] += (x - mean[c]) * (x - mean[c]) / train_rows;
            }
        }
    }
    for (int i = 0; i < HOURS * CHANNELS; i++) {
        s->values[i] = (float)(1 + i % CHANNELS) * s->values[i] + 20; /* each channel by a factor of its own */
    }
    OK(ps_series_write(data.text, s->values, HOURS, CHANNELS, s->channel_names, NULL, NULL, NULL));
    for (int w = 0; w < windows; w++) {
        for (int i = 0; i < H * CHANNELS; i++) {
            int c = i % CHANNELS;
            const float *last = s->values + (first + w + L - 1) * CHANNELS + c;
            double e = ((double)last[(1 + i / CHANNELS) * CHANNELS] - (double)*last) / sqrt(std[c]);
            squares += e * e;
            absolutes += fabs(e);
        }
    }
    json_t *scores = evaluate_json(best.text, ARGS("--json", "--data", data.text, "--save-forecasts", out.text));
    const json_t *naive = json_object_get(scores, "repeat_last");
    double n = (double)windows * H * CHANNELS;
    ck_assert_double_eq_tol(number_in(naive, "mse") * n / squares, 1, 1e-5);
    ck_assert_double_eq_tol(number_in(naive, "mae") * n / absolutes, 1, 1e-5);
    struct array inputs = read_array(out.text, "inputs");
    for (int i = 0; i < CHANNELS * L; i++) {
        int c = i / L;
        double expected = (s->values[(first + i % L) * CHANNELS + c] - mean[c]) / sqrt(std[c]);
        ck_assert_double_eq_tol(inputs.values[i], expected, 1e-5 * (1 + fabs(expected)));
    }
    free(inputs.values);
    json_decref(scores);
    ps_series_close(s);
}
END_TEST

/* Values that float32 holds, and no longer once they are standardised: refused, not scored as NaN. */
START_TEST(scaled_beyond_float)
{
    static float values[3 * 500];
    struct path data = new_dir("steep.h5"), dir = new_dir("steep");
    for (int i = 0; i < 3 * 500; i++) {
        values[i] = i % 3 == 2 ? 1e-30f * (float)(i % 2) : (float)sin(0.1 * i);
    }
    write_series(data.text, H5T_NATIVE_FLOAT, 2, values);
    expect_done(train(dir.text, ARGS("--set", "data.path=steep.h5", "--set", "train.epochs=1")));
    values[3 * 480 + 2] = 1e10f; /* a row of the test part */
    write_series(data.text, H5T_NATIVE_FLOAT, 2, values);
    char *says[] = {data.text, "/series", "channel 2, row 480", "1e+10", "e+40", "3.4e+38", NULL};
    expect_refused(evaluate(in_run(dir.text, "checkpoints/best.h5").text, ARGS()), 3, says);
    expect_refused(train(new_dir("too_steep").text, ARGS("--set", "data.path=steep.h5")), 3, says);
    ck_assert(!file_exists(new_dir("too_steep").text));
}
END_TEST

/* The run's data with other names or none; NULL: none. */
static void write_named(const char *path, char *const *channel_names)
{
    struct ps_series *s;
    OK(ps_series_open(series.text, &s));
    OK(ps_series_write(path, s->values, s->rows, s->channels, channel_names, NULL, NULL, NULL));
    ps_series_close(s);
}

/* A model's channels are those of its data by name, where both sides have names: others are refused, and another order where a run
 * goes on. */
START_TEST(other_channels)
{
    struct path dir = new_dir("channels"), data = new_dir("named.h5"), last = in_run(dir.text, "checkpoints/last.h5");
    static char *const same[] = {"channel_1", "channel_2", "channel_3"}, *const swapped[] = {"channel_1", "channel_3", "channel_2"},
                       *const spelt[] = {"channel_1", "channel_2", "Channel_3"};
    expect_done(train(dir.text, ARGS("--set", "train.epochs=1")));
    struct ps_checkpoint c = load(dir.text, "last.h5");
    ck_assert_uint_eq(c.names_bytes, 30);
    ck_assert_mem_eq(c.names, "channel_1\0channel_2\0channel_3", 30);
    ps_checkpoint_free(&c);
    struct listed before = list(dir.text);
    for (int i = 0; i < 2; i++) {
        write_named(data.text, i == 0 ? swapped : spelt);
        char *says[] = {data.text, i == 0 ? "channel 1 is \"channel_3\"" : "channel 2 is \"Channel_3\"",
                        i == 0 ? "\"channel_2\" in the data" : "\"channel_3\" in the data", "order", NULL};
        if (i == 0) { /* the second and third channel in each other's place */
            expect_done(evaluate(last.text, ARGS("--data", data.text)));
        } else {
            expect_refused(evaluate(last.text, ARGS("--data", data.text)), 3,
                           ARGS(data.text, "has no channel \"channel_3\", which the model was trained on",
                                "it has \"channel_1\", \"channel_2\", \"Channel_3\""));
        }
        expect_refused(train(dir.text, ARGS("--resume", "--set", "train.epochs=1", "--set", "data.path=named.h5")), 3, says);
    }
    expect_untouched(dir.text, before, "data of other channels");
    free(before.text);
    json_t *alone = evaluate_json(last.text, ARGS("--json"));
    for (int i = 0; i < 2; i++) { /* the same names, and none */
        write_named(data.text, i == 0 ? same : NULL);
        json_t *scores = evaluate_json(last.text, ARGS("--json", "--data", data.text));
        ck_assert(json_equal(alone, scores));
        json_decref(scores);
        expect_done(train(dir.text, ARGS("--resume", "--set", "train.epochs=1", "--set", "data.path=named.h5")));
    }
    json_decref(alone);
    /* A checkpoint without names takes any. */
    expect_done(train(dir.text, ARGS("--overwrite", "--set", "train.epochs=1", "--set", "data.path=named.h5")));
    c = load(dir.text, "last.h5");
    ck_assert(c.names == NULL && c.names_bytes == 0);
    ps_checkpoint_free(&c);
    expect_done(evaluate(last.text, ARGS("--data", series.text)));
    expect_done(train(dir.text, ARGS("--resume", "--set", "train.epochs=1")));
}
END_TEST

/* Truncated, altered in one byte, not a checkpoint, missing: by evaluate, and by train --resume, which leaves the run as it is when
 * there is no other state to go on from. */
START_TEST(damaged_checkpoint)
{
    struct path dir = new_dir("damaged"), last = in_run(dir.text, "checkpoints/last.h5");
    char *once[] = {"--set", "train.epochs=1", "--set", "train.keep_last=1", NULL},
         *again[] = {"--resume", "--set", "train.epochs=1", "--set", "train.keep_last=1", NULL};
    expect_done(train(dir.text, once));
    size_t size;
    char *bytes = file_read(last.text, &size);
    for (int i = 0; i < (full ? 24 : 8); i++) {
        char *damaged = malloc(size);
        memcpy(damaged, bytes, size);
        size_t length = i == 0 ? size / 2 : i == 1 ? size - 1 : i == 2 ? 300 : i == 3 ? 0 : size;
        if (length == size) {
            damaged[i == 4 ? 30 : size / 24 * (size_t)i + 600] ^= 1;
        }
        file_write(last.text, damaged, length);
        free(damaged);
        struct listed before = list(dir.text);
        expect_refused(evaluate(last.text, ARGS()), 4, ARGS("last.h5"));
        expect_refused(train(dir.text, again), 4, ARGS("last.h5"));
        expect_untouched(dir.text, before, "resuming from a damaged checkpoint");
        free(before.text);
    }
    file_write(last.text, bytes, size);
    free(bytes);
    expect_refused(evaluate(series.text, ARGS()), 4, ARGS("series.h5", "not a checkpoint"));
    expect_refused(evaluate(new_dir("no.h5").text, ARGS()), 4, ARGS("no.h5", "No such file"));
    expect_refused(evaluate(folder.text, ARGS()), 4, ARGS(folder.text, "folder"));
    expect_done(train(dir.text, again));
    /* Nothing to resume: a folder that was never begun, and one whose state is gone. */
    expect_refused(train(new_dir("never").text, ARGS("--resume")), 4, ARGS("last.h5", "train without --resume"));
    ck_assert_int_eq(remove(in_run(dir.text, "checkpoints/best.h5").text), 0);
    expect_warned(train(dir.text, again), ARGS("best.h5", "found elsewhere"));
    /* A run whose best weights are gone: with so small a rate the first epoch stays the best, and the state is of a later one. */
    struct path lost = new_dir("lost");
    char *small[] = {"--set", "optim.lr=1e-30", "--set", "train.epochs=2", "--set", "train.keep_last=1", NULL, NULL};
    expect_done(train(lost.text, small));
    small[6] = "--resume";
    ck_assert_int_eq(remove(in_run(lost.text, "checkpoints/best.h5").text), 0);
    expect_refused(train(lost.text, small), 4, ARGS("best.h5", "No such file"));
    ck_assert_int_eq(remove(last.text), 0);
    expect_refused(train(dir.text, again), 4, ARGS("last.h5", "train with --overwrite"));
}
END_TEST

/* ---- the programs' own folder ---- */

/* A copy of the programs and the library is whole: it does not reach back for the library it was built with. */
START_TEST(copied_programs)
{
    struct path copy = new_dir("copy");
    mkdir(copy.text, 0777);
    ck_assert_int_eq(system(path_of("cp -P %s/libpatchstep.so* %s/train %s", programs, programs, copy.text).text), 0);
    ck_assert_int_eq(chdir("/"), 0);
    setenv("LD_TRACE_LOADED_OBJECTS", "1", 1); /* as ldd */
    struct process p = process_start(path_of("%.400s/train", copy.text).text, ARGS(), 0);
    struct result r = process_end(&p);
    ck_assert_msg(strstr(r.out, path_of("=> %.400s/libpatchstep.so", copy.text).text) != NULL, "%s%s", r.out, r.err);
    result_free(&r);
}
END_TEST

/* ---- threads that wait ---- */

/* Unless the environment says how, they sleep: GOMP_SPINCOUNT as libgomp tells it, the last time if the program started twice. For
 * a run on CUDA it does not. */
START_TEST(waiting_threads)
{
    static const struct {
        const char *name, *value, *spin;
    } cases[] = {{"OMP_WAIT_POLICY", NULL, "'0'"}, {"OMP_WAIT_POLICY", "active", "'30000000000'"}, {"GOMP_SPINCOUNT", "7", "'7'"}};
    static const char *const names[] = {"train", "evaluate", "bench"};
    setenv("OMP_DISPLAY_ENV", "verbose", 1);
    for (int i = 0; i < 9; i++) {
        unsetenv("OMP_WAIT_POLICY");
        unsetenv("GOMP_SPINCOUNT");
        if (cases[i / 3].value) {
            setenv(cases[i / 3].name, cases[i / 3].value, 1);
        }
        struct result r = run(names[i % 3], ARGS("--help"));
        const char *told = NULL;
        for (const char *next = r.err; (next = strstr(next, "GOMP_SPINCOUNT = ")) != NULL; told = next) {
            next += strlen("GOMP_SPINCOUNT = ");
        }
        ck_assert_msg(told && strncmp(told, cases[i / 3].spin, strlen(cases[i / 3].spin)) == 0, "%s, %s=%s: not %s: %s",
                      names[i % 3], cases[i / 3].name, cases[i / 3].value ? cases[i / 3].value : "", cases[i / 3].spin, r.err);
        ck_assert_int_eq(r.code, 0);
        ck_assert_msg(strstr(r.out, "usage: ") != NULL, "%s", r.out);
        result_free(&r);
    }
    unsetenv("GOMP_SPINCOUNT");
    for (int i = 0; i < 3; i++) {
        struct result r = run(names[i], ARGS("--device", "cuda:0", "--help"));
        const char *told = strstr(r.err, "GOMP_SPINCOUNT = ");
        ck_assert_msg(told && !strstr(told + 1, "GOMP_SPINCOUNT = ") && !strstr(r.err, "GOMP_SPINCOUNT = '0'"), "%s: %s", names[i],
                      r.err);
        ck_assert_int_eq(r.code, 0);
        result_free(&r);
    }
}
END_TEST

/* ---- bench ---- */

START_TEST(bench_json)
{
    struct path written = new_dir("written");
    mkdir(written.text, 0777);
    struct result r = run("bench", ARGS(config.text, "--device", (char *)device, "--steps", "40", "--epochs", "1", "--checkpoint",
                                        written.text, "--json"));
    ck_assert_msg(r.code == 0 && !*r.err, "exit code %d: %s", r.code, r.err);
    json_t *object = read_json(r.out), *step = json_object_get(object, "ms_per_step"), *graph = json_object_get(object, "graph");
    double median = number_in(step, "median");
    ck_assert_double_gt(number_in(step, "min"), 0);
    ck_assert_double_le(number_in(step, "min"), median);
    ck_assert_double_le(median, number_in(step, "max"));
    ck_assert_double_gt(number_in(step, "processor"), 0);
    ck_assert_double_gt(number_in(object, "processor_seconds_per_epoch"), 0);
    ck_assert_double_eq_tol(number_in(object, "windows_per_second") * median * 1e-3 / BATCH, 1, 1e-6);
    ck_assert_double_eq_tol(number_in(object, "flops_per_second") * median * 1e-3 / number_in(object, "flops_per_step"), 1, 1e-6);
    ck_assert_double_gt(number_in(object, "seconds_per_epoch"), 0);
    ck_assert_double_gt(number_in(object, "peak_device_bytes"), 1e5);
    ck_assert_double_ge(number_in(object, "waiting_for_data"), 0);
    ck_assert_double_lt(number_in(object, "waiting_for_data"), 1);
    ck_assert_int_eq((int)number_in(object, "batch"), BATCH);
    ck_assert_str_eq(json_string_value(json_object_get(object, "version")), ps_version);
    const char *kernels = json_string_value(json_object_get(object, "kernels"));
    ck_assert(kernels && (!on_cpu || strcmp(kernels, json_string_value(json_object_get(object, "level"))) == 0));
    const json_t *checkpoint = json_object_get(object, "checkpoint_ms");
    ck_assert_double_gt(number_in(checkpoint, "write"), 0);
    ck_assert_double_gt(number_in(checkpoint, "stall"), 0);
    ck_assert_double_le(number_in(checkpoint, "write"), number_in(checkpoint, "longest_write"));
    ck_assert_double_le(number_in(checkpoint, "stall"), number_in(checkpoint, "longest_stall"));
    ck_assert_msg(rmdir(written.text) == 0, "checkpoints are left in %s", written.text);
    ck_assert(on_cpu == (number_in(graph, "kernels") == 0));
    double calls = 0, products = 0;
    size_t i;
    json_t *part;
    json_array_foreach(json_object_get(object, "parts"), i, part)
    {
        calls += number_in(part, "calls");
        ck_assert_double_ge(number_in(part, "ms"), 0);
        ck_assert_double_gt(number_in(part, "bytes"), strcmp(json_string_value(json_object_get(part, "name")), "advance") ? 0 : -1);
        if (strncmp(json_string_value(json_object_get(part, "name")), "gemm", strlen("gemm")) == 0) { /* gemm_bias, .. too */
            products += number_in(part, "calls") * number_in(part, "flops");
            const char *product = json_string_value(json_object_get(part, "product"));
            char tensor[3][32];
            ck_assert_msg(strncmp(product, "d ", 2) == 0 ||
                              sscanf(product, "%31s = %31s %31s", tensor[0], tensor[1], tensor[2]) == 3,
                          "\"%s\" does not say which product", product);
        } else if (strcmp(json_string_value(json_object_get(part, "name")), "feed_forward") == 0) { /* and backward twice as many */
            products += 3 * number_in(part, "calls") * number_in(part, "flops");
        }
    }
    ck_assert_double_eq(calls, number_in(object, "operations"));
    /* Products are most of a step's work, and no more than all of it. */
    ck_assert_double_le(products, number_in(object, "flops_per_step"));
    ck_assert_double_ge(products, 0.7 * number_in(object, "flops_per_step"));
    json_decref(object);
    result_free(&r);
}
END_TEST

/* A processor spends no more time on one thread than passes; the slack is the clocks'. */
START_TEST(bench_processor_time)
{
    setenv("OPENBLAS_NUM_THREADS", "1", 1); /* of an OpenBLAS with threads of its own, which spin */
    struct result r = run("bench", ARGS(config.text, "--device", "cpu", "--set", "runtime.threads=1", "--json"));
    unsetenv("OPENBLAS_NUM_THREADS");
    ck_assert_msg(r.code == 0 && !*r.err, "exit code %d: %s", r.code, r.err);
    json_t *object = read_json(r.out), *step = json_object_get(object, "ms_per_step");
    ck_assert_double_gt(number_in(step, "processor"), 0);
    ck_assert_double_le(number_in(step, "processor"), 1.05 * number_in(step, "median"));
    ck_assert_double_gt(number_in(object, "processor_seconds_per_epoch"), 0);
    ck_assert_double_le(number_in(object, "processor_seconds_per_epoch"), 1.05 * number_in(object, "seconds_per_epoch"));
    json_decref(object);
    result_free(&r);
}
END_TEST

/* Every level in every precision has its row, timed or with the reason why not. */
START_TEST(bench_compare)
{
    struct result r = run("bench", ARGS(config.text, "--device", (char *)device, "--steps", "20", "--compare", "--json"));
    ck_assert_msg(r.code == 0 && !*r.err, "exit code %d: %s", r.code, r.err);
    json_t *object = read_json(r.out), *rows = json_object_get(object, "levels"), *row;
    ck_assert_uint_eq(json_array_size(rows), 12);
    size_t i;
    int timed = 0;
    json_array_foreach(rows, i, row)
    {
        int gemm = strcmp(json_string_value(json_object_get(row, "level")), "gemm") == 0;
        int fp32 = strcmp(json_string_value(json_object_get(row, "precision")), "fp32") == 0;
        if (json_object_get(row, "not_served")) {
            ck_assert_msg(!(gemm && fp32), "%s", json_string_value(json_object_get(row, "not_served")));
            continue;
        }
        timed++;
        ck_assert_double_gt(number_in(row, "min"), 0);
        ck_assert_double_le(number_in(row, "min"), number_in(row, "median"));
        ck_assert_double_gt(number_in(row, "processor"), 0);
        ck_assert_double_gt(number_in(row, "peak_device_bytes"), 1e5);
        ck_assert(on_cpu == (number_in(row, "kernels") == 0));
    }
    ck_assert_int_ge(timed, 3); /* level none in fp32, level gemm in fp32 and tf32 */
    json_decref(object);
    result_free(&r);
    expect_refused(run("bench", ARGS(config.text, "--trace", "--json")), 2, ARGS("--trace", "--json"));
}
END_TEST

/* One line an operation, numbered from 0, before the summary, which counts as many. */
START_TEST(bench_trace)
{
    struct result r = run("bench", ARGS(config.text, "--device", (char *)device, "--steps", "20", "--epochs", "0", "--trace"));
    ck_assert_msg(r.code == 0 && !*r.err, "exit code %d: %s", r.code, r.err);
    int lines = 0, counted = -1, gathered = 0, stepped = 0;
    char *rest = r.out;
    for (char *line; (line = strsep(&rest, "\n")) != NULL;) {
        int number, used = 0;
        char name[32], shape[8];
        if (sscanf(line, "%d %31s %*f KB %*f MFLOP %7s%n", &number, name, shape, &used) >= 2 && strstr(line, "MFLOP")) {
            ck_assert_int_eq(number, lines);
            gathered |= lines == 0 && strcmp(name, "gather_patches") == 0;
            stepped |= strcmp(name, "adamw") == 0;
            lines++;
        }
        const char *operations = strncmp(line, "graph", 5) == 0 ? strrchr(line, ';') : NULL;
        if (operations) {
            counted = atoi(operations + 1);
        }
    }
    ck_assert_int_gt(lines, 40);
    ck_assert_int_eq(lines, counted);
    ck_assert(gathered && stepped);
    result_free(&r);
    expect_refused(run("bench", ARGS(config.text, "--steps", "0")), 2, ARGS("--steps", "0"));
    expect_refused(run("bench", ARGS(config.text, "--epochs", "few")), 2, ARGS("--epochs", "few"));
    expect_refused(run("bench", ARGS(config.text, "--device", "cpu", "--tune", "none")), 2, ARGS("--tune", "cpu"));
    struct path taken = in_run(whole.text, "checkpoints");
    expect_refused(run("bench", ARGS(config.text, "--steps", "1", "--epochs", "0", "--checkpoint", taken.text)), 2,
                   ARGS("--checkpoint", taken.text, "holds checkpoints"));
}
END_TEST

/* The CPU has no kernels to launch and no memory of a device, and bench speaks of none; every product says which it is. */
START_TEST(bench_on_cpu)
{
    struct result r = run("bench", ARGS(config.text, "--device", "cpu", "--steps", "20", "--epochs", "0", "--set",
                                        "runtime.attention=gemm", "--set", "runtime.epilogue=false"));
    ck_assert_msg(r.code == 0 && !*r.err, "exit code %d: %s", r.code, r.err);
    static const char *const says[] = {
        "\nhost memory ",       "\ngraph           none on the CPU", "  hidden_in = norm2_out w_1  [576,24] [576,16] [16,24]\n",
        "  d w_1 = norm2_out ", "  head_out = stream w_h  ",         "  attention = heads heads  "};
    for (size_t i = 0; i < sizeof says / sizeof *says; i++) {
        ck_assert_msg(strstr(r.out, says[i]) != NULL, "\"%s\" is not in: %s", says[i], r.out);
    }
    ck_assert_msg(!strstr(r.out, "device memory") && !strstr(r.out, " 0 kernels"), "%s", r.out);
    result_free(&r);
    r = run("bench", ARGS(config.text, "--device", "cpu", "--steps", "1", "--compare"));
    ck_assert_int_eq(r.code, 0);
    const char *row = strstr(r.out, "\nfp32       gemm ");
    double ms[4];
    int steps;
    char kernels[16];
    ck_assert_msg(row && sscanf(row, " fp32 gemm %lf %lf %lf %lf %d %15s", &ms[0], &ms[1], &ms[2], &ms[3], &steps, kernels) == 6,
                  "%s", r.out);
    ck_assert_str_eq(kernels, "-");
    result_free(&r);
}
END_TEST

/* A step that is timed is one of a full batch; so there must be one, whatever drop_last says. */
START_TEST(bench_short_epochs)
{
    char *const few[] = {
        config.text, "--device", (char *)device, "--steps", "20", "--set", "train.batch_size=500", "--set", "data.drop_last=false",
        NULL};
    struct result r = run("bench", few);
    ck_assert_msg(r.code == 0 && !*r.err, "exit code %d: %s", r.code, r.err);
    ck_assert_msg(strstr(r.out, "groups of 2 steps") != NULL, "two full batches an epoch: %s", r.out);
    result_free(&r);
    char *const none[] = {
        config.text, "--device", (char *)device, "--steps", "20", "--set", "train.batch_size=1400", "--set", "data.drop_last=false",
        NULL};
    expect_refused(run("bench", none), 2, ARGS("train.batch_size", "1400", "1341"));
}
END_TEST

/* ---- from a CSV ---- */

START_TEST(csv_to_forecasts)
{
    struct path csv = new_dir("load.csv"), imported = new_dir("load.h5");
    FILE *file = fopen(csv.text, "w");
    fputs("date,north,south\n", file);
    for (int i = 0; i < 800; i++) {
        fprintf(file, "2020-%02d-%02d %02d:00:00,%.6f,%.6f\n", 1 + i / 24 / 31, 1 + i / 24 % 31, i % 24, sin(i / 3.8),
                cos(i / 5.1));
    }
    fclose(file);
    struct result r = run("import_csv", ARGS(csv.text, imported.text));
    ck_assert_msg(r.code == 0, "exit code %d: %s", r.code, r.err);
    result_free(&r);
    struct path dir = new_dir("csv_run");
    expect_done(train(dir.text, ARGS("--set", "data.path=load.h5", "--set", "train.epochs=1")));
    json_decref(read_test(dir.text));
}
END_TEST

/* ---- */

static void set_up(void)
{
    folder = folder_make();
    config = new_dir("tiny.yaml");
    series = new_dir("series.h5");
    whole = new_dir("whole");
    file_write(config.text, config_text, strlen(config_text));
    expect_done(run("sample_series", ARGS(series.text, "--hours", "2000", "--channels", "3")));
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    struct process p = start_train(whole.text, ARGS());
    process_read(&p, LONGEST_RUN, 1);
    double begin = seconds_now();
    expect_done(process_end(&p));
    whole_seconds = seconds_now() - begin;
}

static void tear_down(void)
{
    folder_remove(folder.text);
}

int main(void)
{
    const char *environment = getenv("PS_TEST_DEVICE"), *form = getenv("PS_TEST_FULL");
    programs = getenv("PS_PROGRAMS");
    device = environment && *environment ? environment : "cpu";
    on_cpu = strcmp(device, "cpu") == 0;
    full = form && strcmp(form, "1") == 0;
    if (!programs) {
        fprintf(stderr, "PS_PROGRAMS: not set: the folder that holds the programs\n");
        return 1;
    }
    gpus = ps_cuda_device_count();
    if (!on_cpu && gpus == 0) {
        printf("skipped: the programs on %s: no CUDA device\n", device);
        return 0;
    }
    Suite *suite = suite_create("programs");
    TCase *tests = tcase_create("programs");
    tcase_set_timeout(tests, full ? 3000 : 500);
    tcase_add_unchecked_fixture(tests, set_up, tear_down);
    tcase_add_test(tests, run_folder);
    tcase_add_test(tests, logged_rates);
    tcase_add_test(tests, two_runs);
    tcase_add_test(tests, existing_run);
    tcase_add_test(tests, default_run_dir);
    tcase_add_test(tests, nameless_run_dir);
    tcase_add_test(tests, progress_bar);
    tcase_add_test(tests, time_left);
    tcase_add_test(tests, disk_full);
    tcase_add_test(tests, interrupted);
    tcase_add_test(tests, interrupted_while_scoring);
    tcase_add_test(tests, validated_when_resumed);
    tcase_add_test(tests, checkpoint_every);
    tcase_add_test(tests, best_and_last_apart);
    tcase_add_test(tests, falls_back);
    tcase_add_test(tests, resume_longer_or_changed);
    tcase_add_test(tests, says_where_it_resumes);
    tcase_add_test(tests, one_window_too_large);
    tcase_add_test(tests, resume_of_another_program);
    tcase_add_test(tests, patience);
    tcase_add_test(tests, stops_when_not_finite);
    tcase_add_test(tests, stops_when_parameters_overflow);
    tcase_add_test(tests, skips_when_not_finite);
    tcase_add_test(tests, no_finite_epoch);
    tcase_add_test(tests, fewer_threads);
    tcase_add_test(tests, threads_without_room);
    tcase_add_test(tests, bad_config_or_data);
    tcase_add_test(tests, bad_config_file);
    tcase_add_test(tests, constant_channel);
    tcase_add_test(tests, evaluate_scores);
    tcase_add_test(tests, save_forecasts);
    tcase_add_test(tests, save_long_forecasts);
    tcase_add_test(tests, save_forecasts_over);
    tcase_add_test(tests, evaluate_other_data);
    tcase_add_test(tests, scaled_beyond_float);
    tcase_add_test(tests, tuning_table);
    tcase_add_test(tests, other_channels);
    tcase_add_test(tests, damaged_checkpoint);
    tcase_add_test(tests, copied_programs);
    tcase_add_test(tests, waiting_threads);
    tcase_add_test(tests, bench_json);
    if (on_cpu) { /* CUDA's driver has threads of its own */
        tcase_add_test(tests, bench_processor_time);
    }
    tcase_add_test(tests, bench_compare);
    tcase_add_test(tests, bench_trace);
    tcase_add_test(tests, bench_on_cpu);
    tcase_add_test(tests, bench_short_epochs);
    tcase_add_test(tests, csv_to_forecasts);
    suite_add_tcase(suite, tests);
    return run_suite(suite, CK_FORK_GETENV) != 0;
}
