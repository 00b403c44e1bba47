/* scripts/paper_table.sh, run as a person runs it, on small generated CSV files: what it trains, skips, goes on with and prints. */
#include <math.h>

#include "tests/programs.h"
#include "tests/suite.h"

enum { ROWS = 600 };

static struct path script, csvs, runs; /* csvs: the folder of the CSV files; runs: what --runs names */

/* The script over csvs into runs, with a model of a few parameters. */
static struct process start_table(const char *folder_of_csvs, char *const *more)
{
    static char *const tiny[] = {"model.seq_len=32",
                                 "model.patch_len=8",
                                 "model.stride=8",
                                 "model.d_model=8",
                                 "model.n_heads=2",
                                 "model.d_ff=8",
                                 "model.n_layers=2",
                                 "train.batch_size=8",
                                 "optim.lr=1e-3",
                                 "runtime.threads=1",
                                 NULL};
    char *arguments[ARGUMENTS + 1] = {(char *)folder_of_csvs, "--runs", runs.text, "--device", (char *)device};
    int n = 5;
    for (int i = 0; tiny[i]; i++) {
        arguments[n++] = "--set";
        arguments[n++] = tiny[i];
    }
    for (int i = 0; more[i]; i++) {
        ck_assert_int_lt(n, ARGUMENTS);
        arguments[n++] = more[i];
    }
    return process_start(script.text, arguments, 0);
}

static struct result table(char *const *more)
{
    struct process p = start_table(csvs.text, more);
    return process_end(&p);
}

/* Two channels, hourly; twice: a date that stands there twice, as in the field's Weather. */
static void write_csv(const char *name, int twice)
{
    FILE *file = fopen(path_of("%.400s/%s.csv", csvs.text, name).text, "w");
    ck_assert_ptr_nonnull(file);
    fputs("date,a (\xef\xbf\xbdmol),OT\n", file);
    for (int i = 0; i < ROWS; i++) {
        int hour = twice && i > 100 ? i - 1 : i;
        fprintf(file, "2020-01-%02d %02d:00:00,%.6f,%.6f\n", 1 + hour / 24, hour % 24, sin(0.26 * i) + 0.001 * i,
                cos(0.05 * i * i));
    }
    fclose(file);
}

static int times_in(const char *text, const char *sought)
{
    int times = 0;
    for (; (text = strstr(text, sought)) != NULL; text++) {
        times++;
    }
    return times;
}

static struct path run_of(const char *name)
{
    return path_of("%.400s/%s", runs.text, name);
}

/* Five settings of one table, in order: each begins with what the one before left. */
START_TEST(trains_and_prints)
{
    char *const asked[] = {
        "--datasets", "ETTh1",          "--horizons", "4 96", "--seeds", "1 2", "--set", "data.split=[300, 150, 150]",
        "--set",      "train.epochs=1", NULL};
    struct result r = table(asked);
    ck_assert_msg(r.code == 0 && !*r.err, "exit code %d; stdout: %s; stderr: %s", r.code, r.out, r.err);
    ck_assert_int_eq(times_in(r.out, ", horizon "), 4);
    ck_assert_ptr_nonnull(strstr(r.out, "ETTh1, horizon 96, seed 2 (4 of 4): MSE "));
    ck_assert_ptr_nonnull(strstr(r.out, "4 of 4 runs, "));
    /* The mean, the least and the largest of the runs' own figures, and the paper's. */
    double mse[2], mae = 0;
    for (int seed = 1; seed <= 2; seed++) {
        json_t *test = read_test(run_of(seed == 1 ? "ETTh1_96_1" : "ETTh1_96_2").text);
        const json_t *full_batches = json_object_get(test, "full_batches");
        mse[seed - 1] = number_in(full_batches, "mse");
        mae += number_in(full_batches, "mae") / 2;
        json_decref(test);
    }
    ck_assert_double_ne(mse[0], mse[1]);
    double mean = (mse[0] + mse[1]) / 2;
    struct path line = path_of("| ETTh1    | 96      | 2     | %.4f | %.4f to %.4f | %.4f | 0.375       | 0.399       | %.3f ",
                               mean, fmin(mse[0], mse[1]), fmax(mse[0], mse[1]), mae, mean / 0.375);
    ck_assert_msg(strstr(r.out, line.text) != NULL, "%s is not in %s", line.text, r.out);
    ck_assert_msg(strstr(r.out, "| - ") != NULL, "the paper has no horizon of 4: %s", r.out);
    result_free(&r);
    /* Again: nothing is trained. */
    struct listed before = list(runs.text);
    r = table(asked);
    ck_assert_msg(r.code == 0 && !*r.err && times_in(r.out, ", done before): MSE ") == 4, "%s%s", r.out, r.err);
    ck_assert_ptr_nonnull(strstr(r.out, line.text));
    result_free(&r);
    expect_untouched(runs.text, before, "a second time");
    /* A run that was not tested yet: that one alone goes on. */
    struct path test = run_of("ETTh1_4_2/test.json"), log = run_of("ETTh1_4_2/seconds.txt");
    char *tested = file_read(test.text, NULL), *seconds;
    ck_assert_int_eq(remove(test.text), 0);
    r = table(asked);
    ck_assert_msg(r.code == 0 && times_in(r.out, "done before") == 3, "%s%s", r.out, r.err);
    result_free(&r);
    char *again = file_read(test.text, NULL);
    ck_assert_str_eq(again, tested);
    seconds = file_read(log.text, NULL);
    ck_assert_int_eq(lines_of(seconds), 2);
    free(tested);
    free(again);
    free(seconds);
    free(before.text);
    /* Other settings in the same folder. */
    before = list(run_of("ETTh1_4_1").text);
    expect_refused(table(ARGS("--datasets", "ETTh1", "--horizons", "4", "--seeds", "1", "--set", "data.split=[300, 150, 150]",
                              "--set", "train.epochs=2")),
                   2, ARGS("ETTh1_4_1", "other settings", "--runs"));
    expect_untouched(run_of("ETTh1_4_1").text, before, "other settings");
    free(before.text);
}
END_TEST

/* Rows count as they stand, and a part is 0.7, 0.1 or 0.2 of them; a run that fails is named, the next one is run. */
START_TEST(takes_the_fields_files)
{
    struct result r = table(ARGS("--datasets", "weather", "--horizons", "60 4", "--seeds", "1", "--set", "train.epochs=1"));
    ck_assert_msg(r.code == 0 && !*r.err, "exit code %d; stdout: %s; stderr: %s", r.code, r.out, r.err);
    result_free(&r);
    char *config = file_read(run_of("weather_4_1/config.yaml").text, NULL);
    ck_assert_msg(strstr(config, "split: [420, 60, 120]") != NULL, "%s", config);
    free(config);
    r = table(ARGS("--datasets", "weather", "--horizons", "61 5", "--seeds", "1", "--set", "train.epochs=1"));
    ck_assert_msg(r.code == 3 && lines_of(r.err) == 1 && strstr(r.err, "part has no window"), "%s%s", r.out, r.err);
    ck_assert_msg(strstr(r.out, "horizon 5, seed 1 (2 of 2): MSE ") && strstr(r.out, "1 of 2 runs, "), "%s", r.out);
    result_free(&r);
}
END_TEST

START_TEST(stops_and_goes_on)
{
    char *const asked[] = {
        "--datasets", "ETTh1",           "--horizons", "8", "--seeds", "1", "--set", "data.split=[300, 150, 150]",
        "--set",      "train.epochs=60", NULL};
    struct process p = start_table(csvs.text, asked);
    for (double end = seconds_now() + 60; !file_exists(run_of("ETTh1_8_1/metrics.jsonl").text) && seconds_now() < end;) {
        process_read(&p, 0.01, SIZE_MAX);
    }
    kill(p.pid, SIGTERM);
    expect_refused(process_end(&p), 130, ARGS("the same command goes on"));
    ck_assert(!file_exists(run_of("ETTh1_8_1/test.json").text));
    struct result r = table(asked);
    ck_assert_msg(r.code == 0 && !*r.err && strstr(r.out, "1 of 1 runs"), "%s%s", r.out, r.err);
    result_free(&r);
    json_decref(expect_stopped_metrics(run_of("ETTh1_8_1").text, 60, (300 - 32 - 8 + 1) / 8, 1));
    char *seconds = file_read(run_of("ETTh1_8_1/seconds.txt").text, NULL);
    ck_assert_int_eq(lines_of(seconds), 2);
    free(seconds);
}
END_TEST

START_TEST(refuses)
{
    expect_refused(process_end(&(struct process[]){start_table(runs.text, ARGS("--seeds", "1"))}[0]), 2,
                   ARGS(runs.text, "ETTh1", "national_illness"));
    expect_refused(table(ARGS("--datasets", "ETTh3")), 2, ARGS("ETTh3", "ETTh1"));
    expect_refused(table(ARGS("--datasets", "traffic")), 2, ARGS("traffic.csv", "no such file"));
    expect_refused(table(ARGS("--horizons", "9x")), 2, ARGS("9x", "whole numbers"));
    expect_refused(table(ARGS("--seeds")), 2, ARGS("--seeds needs a value"));
    expect_refused(table(ARGS("--fast")), 2, ARGS("--fast"));
}
END_TEST

static void set_up(void)
{
    folder = folder_make();
    csvs = new_dir("csvs");
    runs = new_dir("runs");
    ck_assert(mkdir(csvs.text, 0777) == 0 && mkdir(runs.text, 0777) == 0);
    write_csv("ETTh1", 0);
    write_csv("weather", 1);
}

static void tear_down(void)
{
    folder_remove(folder.text);
}

int main(void)
{
    Suite *suite = suite_create("paper_table");
    TCase *c = tcase_create("paper_table");
    tcase_set_timeout(c, 300);
    tcase_add_unchecked_fixture(c, set_up, tear_down);
    programs = getenv("PS_PROGRAMS");
    device = getenv("PS_TEST_DEVICE") ? getenv("PS_TEST_DEVICE") : "cpu";
    script = path_of("%s/scripts/paper_table.sh", getenv("PS_SOURCE") ? getenv("PS_SOURCE") : ".");
    if (!programs) {
        printf("skipped: the table, because PS_PROGRAMS is not set\n");
    } else if (system("command -v bash >/dev/null && command -v python3 >/dev/null") != 0) {
        printf("skipped: the table, which needs bash and python3\n");
    } else {
        tcase_add_test(c, trains_and_prints);
        tcase_add_test(c, takes_the_fields_files);
        tcase_add_test(c, stops_and_goes_on);
        tcase_add_test(c, refuses);
    }
    suite_add_tcase(suite, c);
    return run_suite(suite, CK_FORK_GETENV) != 0;
}
