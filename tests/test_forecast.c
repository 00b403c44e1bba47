/* forecast, run as a person runs it: against evaluate's forecasts of the same windows, by hand-made continuations, on other
 * machines than the one that trained, and what it refuses.
 *
 * PS_TEST_DEVICE: the --device to run on (default cpu). */
#include <math.h>

#include "data/dates.h"
#include "data/import.h"
#include "data/series.h"
#include "data/times.h"
#include "src/scratch.h"
#include "tests/programs.h"
#include "tests/random_values.h"
#include "tests/suite.h"

enum { ROWS = 400, CHANNELS = 3, L = 48, H = 12, TEST_WINDOWS = ROWS / 5 - H + 1, HOUR = 3600 };
static const int64_t first_time = 1514764800; /* 2018-01-01 00:00:00 */

static struct path data, best, saved; /* saved: evaluate's forecasts of the test windows, in original units */
static char *const names[CHANNELS] = {"load", "wind, \"west\"", "price"};
static float values[ROWS * CHANNELS];

static const char config_text[] = "data: {path: data.h5}\n"
                                  "model: {seq_len: 48, pred_len: 12, patch_len: 8, stride: 4, d_model: 16, n_heads: 4, d_ff: 24,\n"
                                  "        n_layers: 2, norm: batch, norm_place: post, residual_attention: true}\n"
                                  "optim: {lr: 2e-3, schedule: constant}\n"
                                  "train: {epochs: 1, batch_size: 16}\n"
                                  "runtime: {threads: 2}\n";

/* ---- reading what it writes ---- */

/* Lines of comma-separated fields; the one field with quotes stands in the header. */
struct table {
    char *text, *header;
    int rows;
    char *line[8192];
};

static struct table table_of(char *text)
{
    struct table t = {.text = text};
    char *rest = text;
    t.header = strsep(&rest, "\n");
    for (char *line; (line = strsep(&rest, "\n")) != NULL && *line;) {
        ck_assert_int_lt(t.rows, 8192);
        t.line[t.rows++] = line;
    }
    return t;
}

static const char *field(const struct table *t, int row, int column)
{
    static char text[64];
    const char *at = t->line[row];
    for (; column > 0; column--) {
        at = strchr(at, ',');
        ck_assert_msg(at != NULL, "too few fields: %s", t->line[row]);
        at++;
    }
    snprintf(text, sizeof text, "%.*s", (int)strcspn(at, ","), at);
    return text;
}

static float number(const struct table *t, int row, int column)
{
    return strtof(field(t, row, column), NULL);
}

/* forecast on the device, which must succeed and say nothing on stderr; what it printed. */
static struct table forecast(const char *checkpoint, char *const *more)
{
    char *arguments[ARGUMENTS + 1] = {(char *)checkpoint, "--device", (char *)device};
    int n = 3;
    for (int i = 0; more[i]; i++) {
        arguments[n++] = more[i];
    }
    struct result r = run("forecast", arguments);
    ck_assert_msg(r.code == 0 && !*r.err, "exit code %d; stderr: %s", r.code, r.err);
    free(r.err);
    return table_of(r.out);
}

static struct result refused(char *const *more)
{
    char *arguments[ARGUMENTS + 1] = {best.text};
    int n = 1;
    for (int i = 0; more[i]; i++) {
        arguments[n++] = more[i];
    }
    return run("forecast", arguments);
}

static float *read_floats(const char *path, const char *name, size_t count)
{
    hid_t file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT), set = H5Dopen2(file, name, H5P_DEFAULT), space = H5Dget_space(set);
    float *read = malloc(count * sizeof *read);
    ck_assert_msg(set >= 0, "%s has no %s", path, name);
    ck_assert_int_eq((int)H5Sget_simple_extent_npoints(space), (int)count);
    ck_assert_int_ge(H5Dread(set, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, read), 0);
    H5Sclose(space);
    H5Dclose(set);
    H5Fclose(file);
    return read;
}

static void write_rows(const char *path, const float *from, int rows, const int64_t *time)
{
    OK(ps_series_write(path, from, rows, CHANNELS, names, time, NULL, NULL));
}

static void hours_from(int64_t *time, int rows)
{
    for (int i = 0; i < rows; i++) {
        time[i] = first_time + (int64_t)i * HOUR;
    }
}

/* ---- the same as evaluate's ---- */

/* Every test window at once and some alone: the same, whatever else is forecast beside them. */
START_TEST(as_evaluate)
{
    static const int each = H * CHANNELS;
    float *expected = read_floats(saved.text, "/forecasts", (size_t)TEST_WINDOWS * each); /* [W, C, H] */
    for (int last = 1; last <= TEST_WINDOWS; last = last < 3 ? last + 1 : last * 3) {
        const int n = last < TEST_WINDOWS / 2 ? last : TEST_WINDOWS;
        struct path out = new_dir("windows.h5");
        struct table t = forecast(best.text, ARGS("--origin", path_of("%d", ROWS - H - 1).text, "--last", path_of("%d", n).text,
                                                  "--out", out.text, "--overwrite"));
        ck_assert_str_eq(t.header, "");
        float *got = read_floats(out.text, "/forecasts", (size_t)n * each); /* [n, H, C] */
        for (int i = 0; i < n * each; i++) {
            const int window = i / each, step = i / CHANNELS % H, c = i % CHANNELS;
            const float want = expected[(TEST_WINDOWS - n + window) * each + c * H + step];
            ck_assert_msg(same_forecast(got[i], want), "%d windows, window %d, step %d, channel %d: %.9g, evaluate has %.9g", n,
                          window, step, c, (double)got[i], (double)want);
        }
        free(got);
        free(t.text);
    }
    free(expected);
}
END_TEST

/* Beyond the data's end: times go on, the CSV holds what the file holds to the bit, and names are quoted where they must be. */
START_TEST(after_the_end)
{
    struct path out = new_dir("end.h5"), csv = new_dir("end.csv");
    struct table t = forecast(best.text, ARGS(NULL));
    free(forecast(best.text, ARGS("--out", out.text)).text);
    free(forecast(best.text, ARGS("--out", csv.text)).text);
    ck_assert_str_eq(t.header, "time,load,\"wind, \"\"west\"\"\",price");
    ck_assert_int_eq(t.rows, H);
    float *expected = read_floats(out.text, "/forecasts", H * CHANNELS);
    for (int i = 0; i < H; i++) {
        ck_assert_str_eq(field(&t, i, 0), ps_date_text(first_time + (int64_t)(ROWS + i) * HOUR).text);
        for (int c = 0; c < CHANNELS; c++) {
            ck_assert(isfinite(expected[i * CHANNELS + c]));
            ck_assert_msg(number(&t, i, 1 + c) == expected[i * CHANNELS + c], "row %d, channel %d", i, c);
        }
    }
    free(expected);
    char *file = file_read(csv.text, NULL);
    struct table again = table_of(file);
    ck_assert_str_eq(again.header, t.header);
    ck_assert_int_eq(again.rows, H);
    for (int i = 0; i < H; i++) {
        ck_assert_str_eq(again.line[i], t.line[i]);
    }
    free(file);
    free(t.text);
}
END_TEST

/* --steps beyond pred_len: the same as forecasting again from data to which the first forecast was added; more than seq_len too. */
START_TEST(fed_back)
{
    enum { STEPS = 5 * H + 5 };
    struct table t = forecast(best.text, ARGS("--steps", path_of("%d", STEPS).text)),
                 fewer = forecast(best.text, ARGS("--steps", "5"));
    ck_assert_int_eq(t.rows, STEPS);
    ck_assert_msg(strstr(t.header, ",fed_back") != NULL && !strstr(fewer.header, "fed_back"), "%s", t.header);
    ck_assert_int_eq(fewer.rows, 5);
    float longer[(ROWS + STEPS) * CHANNELS];
    int64_t time[ROWS + STEPS];
    struct path path = new_dir("longer.h5");
    memcpy(longer, values, sizeof values);
    hours_from(time, ROWS + STEPS);
    for (int done = 0; done < STEPS; done += H) {
        write_rows(path.text, longer, ROWS + done, time);
        struct table part = forecast(best.text, ARGS("--data", path.text));
        for (int i = 0; i < H && done + i < STEPS; i++) {
            ck_assert_str_eq(field(&t, done + i, 0), ps_date_text(time[ROWS + done + i]).text);
            ck_assert_str_eq(field(&t, done + i, 1 + CHANNELS), done == 0 ? "0" : "1");
            for (int c = 0; c < CHANNELS; c++) {
                const float x = number(&part, i, 1 + c);
                ck_assert_msg(number(&t, done + i, 1 + c) == x, "step %d, channel %d", done + i, c);
                longer[(ROWS + done + i) * CHANNELS + c] = x;
            }
        }
        free(part.text);
    }
    free(t.text);
    free(fewer.text);
}
END_TEST

/* ---- intervals ---- */

static int ascending(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* The k-th smallest of the validation's errors at each channel and step, k = ceil((W + 1) level), by sorting what evaluate saves;
 * and the share of the test's targets within. */
START_TEST(intervals)
{
    enum { W = ROWS / 10 - H + 1, EACH = CHANNELS * H };
    static const struct {
        const char *level, *lo, *hi;
        int rank; /* of 29 */
    } cases[] = {{"0.8", ",load_lo80,", ",load_hi80,", 24},
                 {"0.5", ",load_lo50,", ",load_hi50,", 15},
                 {"0.025", ",load_lo2.5,", ",load_hi2.5,", 1}};
    float *errors[2], half[EACH];
    for (int test = 0; test < 2; test++) {
        struct path path = new_dir("errors.h5");
        const int windows = test ? TEST_WINDOWS : W;
        struct result r = run("evaluate", ARGS(best.text, "--device", (char *)device, "--split", test ? "test" : "val",
                                               "--save-forecasts", path.text, "--overwrite"));
        ck_assert_msg(r.code == 0, "%s", r.err);
        result_free(&r);
        float *targets = read_floats(path.text, "/targets", (size_t)windows * EACH);
        errors[test] = read_floats(path.text, "/forecasts", (size_t)windows * EACH);
        for (int i = 0; i < windows * EACH; i++) {
            errors[test][i] = fabsf(targets[i] - errors[test][i]);
        }
        free(targets);
    }
    struct ps_checkpoint checkpoint;
    OK(ps_checkpoint_load(best.text, &checkpoint));
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        int within = 0;
        for (int i = 0; i < EACH; i++) {
            float column[W];
            for (int w = 0; w < W; w++) {
                column[w] = errors[0][w * EACH + i];
            }
            qsort(column, W, sizeof *column, ascending);
            half[i] = column[cases[k].rank - 1];
            for (int w = 0; w < TEST_WINDOWS; w++) {
                within += errors[1][w * EACH + i] <= half[i];
            }
        }
        struct path out = new_dir("ends.h5");
        struct table t = forecast(best.text, ARGS("--interval", (char *)cases[k].level));
        free(forecast(best.text, ARGS("--interval", (char *)cases[k].level, "--out", out.text, "--overwrite")).text);
        ck_assert_msg(strstr(t.header, cases[k].lo) && strstr(t.header, cases[k].hi), "%s", t.header);
        float *lower = read_floats(out.text, "/lower", EACH), *upper = read_floats(out.text, "/upper", EACH);
        for (int i = 0; i < EACH; i++) {
            const int step = i / CHANNELS, c = i % CHANNELS;
            const double middle = number(&t, step, 1 + 3 * c), width = half[c * H + step] * checkpoint.scaler.std[c];
            ck_assert_double_eq_tol(number(&t, step, 2 + 3 * c), middle - width, 1e-6 * middle);
            ck_assert_double_eq_tol(number(&t, step, 3 + 3 * c), middle + width, 1e-6 * middle);
            ck_assert(lower[i] == number(&t, step, 2 + 3 * c) && upper[i] == number(&t, step, 3 + 3 * c));
        }
        struct result r =
            run("evaluate", ARGS(best.text, "--device", (char *)device, "--json", "--interval", (char *)cases[k].level));
        json_t *score = read_json(r.out);
        const json_t *interval = json_object_get(score, "interval");
        ck_assert_double_eq_tol(number_in(interval, "coverage"), (double)within / (TEST_WINDOWS * EACH), 1e-12);
        ck_assert_int_eq((int)number_in(interval, "windows"), W);
        json_decref(score);
        result_free(&r);
        free(lower);
        free(upper);
        free(t.text);
    }
    ps_checkpoint_free(&checkpoint);
    free(errors[0]);
    free(errors[1]);
}
END_TEST

/* ---- the data ---- */

/* Columns in another order are found by their names, from HDF5 and from CSV; without names or times, by place and by row. */
START_TEST(other_files)
{
    static const int order[CHANNELS] = {2, 0, 1};
    float moved[ROWS * CHANNELS];
    int64_t time[ROWS];
    char *moved_names[CHANNELS];
    hours_from(time, ROWS);
    struct path h5 = new_dir("moved.h5"), csv = new_dir("moved.csv"), bare = new_dir("bare.h5");
    FILE *file = fopen(csv.text, "w");
    fputs("date,price,load,\"wind, \"\"west\"\"\"\n", file);
    for (int i = 0; i < ROWS * CHANNELS; i++) {
        moved[i] = values[i / CHANNELS * CHANNELS + order[i % CHANNELS]];
        moved_names[i % CHANNELS] = names[order[i % CHANNELS]];
        if (i % CHANNELS == 0) {
            fputs(ps_date_text(time[i / CHANNELS]).text, file);
        }
        fprintf(file, ",%.9g%s", (double)moved[i], i % CHANNELS == CHANNELS - 1 ? "\n" : "");
    }
    fclose(file);
    OK(ps_series_write(h5.text, moved, ROWS, CHANNELS, moved_names, time, NULL, NULL));
    OK(ps_series_write(bare.text, values, ROWS, CHANNELS, NULL, NULL, NULL, NULL));
    struct table t = forecast(best.text, ARGS(NULL)), from_h5 = forecast(best.text, ARGS("--data", h5.text)),
                 from_csv = forecast(best.text, ARGS("--data", csv.text)),
                 from_bare = forecast(best.text, ARGS("--data", bare.text));
    ck_assert_str_eq(from_bare.header, "row,load,\"wind, \"\"west\"\"\",price");
    for (int i = 0; i < H; i++) {
        ck_assert_str_eq(from_h5.line[i], t.line[i]);
        ck_assert_str_eq(from_csv.line[i], t.line[i]);
        ck_assert_int_eq(atoi(from_bare.line[i]), ROWS + i);
        ck_assert_str_eq(strchr(from_bare.line[i], ','), strchr(t.line[i], ','));
    }
    free(t.text);
    free(from_h5.text);
    free(from_csv.text);
    free(from_bare.text);
}
END_TEST

/* An origin by its time, with seconds and without, and by its row; several origins are told apart by a column. */
START_TEST(origins)
{
    struct table by_row = forecast(best.text, ARGS("--origin", "300")),
                 by_time = forecast(best.text, ARGS("--origin", "2018-01-13 12:00")),
                 with_t = forecast(best.text, ARGS("--origin", "2018-01-13T12:00:00")),
                 three = forecast(best.text, ARGS("--origin", "300", "--last", "3"));
    ck_assert_int_eq(three.rows, 3 * H);
    ck_assert_int_eq(strncmp(three.header, "origin,time,", 12), 0);
    for (int i = 0; i < H; i++) {
        ck_assert_str_eq(by_row.line[i], by_time.line[i]);
        ck_assert_str_eq(by_row.line[i], with_t.line[i]);
        ck_assert_str_eq(three.line[2 * H + i] + 20, by_row.line[i]);
        ck_assert_int_eq(strncmp(three.line[2 * H + i], "2018-01-13 12:00:00,", 20), 0);
        ck_assert_int_eq(strncmp(three.line[i], "2018-01-13 10:00:00,2018-01-13", 30), 0);
    }
    free(by_row.text);
    free(by_time.text);
    free(with_t.text);
    free(three.text);
}
END_TEST

/* ---- the calendar ---- */

START_TEST(calendar)
{
    static const struct {
        const char *from, *after; /* and the n-th of them */
        struct ps_steps steps;
        int64_t n;
    } cases[] = {{"2018-12-31 23:00:00", "2019-01-01 01:00:00", {.seconds = 3600}, 2},
                 {"2018-01-31 00:00:00", "2018-02-28 00:00:00", {.months = 1, .day = 31}, 1},
                 {"2020-01-31 00:00:00", "2020-02-29 00:00:00", {.months = 1, .day = 31}, 1},
                 {"2018-02-28 00:00:00", "2018-03-31 00:00:00", {.months = 1, .day = 31}, 1},
                 {"2018-02-28 00:00:00", "2018-03-30 00:00:00", {.months = 1, .day = 30}, 1},
                 {"2018-11-15 12:30:00", "2019-02-15 12:30:00", {.months = 1, .day = 15}, 3},
                 {"2019-12-01 00:00:00", "2020-06-01 00:00:00", {.months = 3, .day = 1}, 2},
                 {"2020-02-29 00:00:00", "2021-02-28 00:00:00", {.months = 12, .day = 29}, 1},
                 {"1969-12-31 23:59:59", "1970-01-01 00:00:01", {.seconds = 1}, 2},
                 {"1900-02-28 00:00:00", "1900-03-01 00:00:00", {.seconds = 86400}, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t from;
        ck_assert_int_eq(ps_date_read(cases[i].from, &from), 1);
        ck_assert_str_eq(ps_date_text(ps_steps_after(&cases[i].steps, from, cases[i].n)).text, cases[i].after);
    }
}
END_TEST

/* The step is that of most rows: a gap does not change it, and months are whole months. One row alone has none. */
START_TEST(steps)
{
    int64_t time[ROWS];
    struct ps_times times;
    struct path path = new_dir("steps.h5");
    hours_from(time, ROWS);
    for (int i = 200; i < ROWS; i++) {
        time[i] += 5 * HOUR;
    }
    write_rows(path.text, values, ROWS, time);
    OK(ps_times_read(path.text, ROWS, &times));
    ck_assert_int_eq((int)times.steps.seconds, HOUR);
    ps_times_free(&times);
    for (int months = 1; months <= 12; months *= 3) {
        const struct ps_steps step = {.months = months, .day = 1};
        for (int i = 0; i < ROWS; i++) {
            time[i] = ps_steps_after(&step, first_time, i);
        }
        write_rows(path.text, values, ROWS, time);
        OK(ps_times_read(path.text, ROWS, &times));
        ck_assert_int_eq((int)times.steps.months, months);
        ps_times_free(&times);
    }
    write_rows(path.text, values, 1, time);
    OK(ps_times_read(path.text, 1, &times));
    ck_assert_ptr_null(times.time);
}
END_TEST

/* ---- other machines ---- */

/* A checkpoint whose config says that it was trained so. */
static struct path trained(const char *name, const char *from, const char *to)
{
    struct ps_checkpoint c;
    OK(ps_checkpoint_load(best.text, &c));
    const char *at = strstr(c.config, from);
    ck_assert_msg(at != NULL, "%s is not in %s", from, c.config);
    char *changed = malloc(strlen(c.config) + strlen(to) + 1);
    sprintf(changed, "%.*s%s%s", (int)(at - c.config), c.config, to, at + strlen(from));
    free(c.config);
    c.config = changed;
    struct path path = new_dir(name);
    OK(ps_checkpoint_save(path.text, &c));
    ps_checkpoint_free(&c);
    return path;
}

/* Trained in another precision, by another backend, at a level that the CPU has not: computed there in fp32, and said so. */
START_TEST(anywhere)
{
    static const struct {
        const char *from, *to, *note;
    } cases[] = {{"precision: fp32", "precision: bf16", "trained in bf16, computed in fp32 on the CPU"},
                 {"precision: fp32", "precision: fp16", "trained in fp16, computed in fp32 on the CPU"},
                 {"precision: fp32", "precision: tf32", "trained in tf32, computed in fp32 on the CPU"},
                 {"backend: auto", "backend: cuda", NULL},
                 {"fusion: auto", "fusion: layer", NULL},
                 {"\n  attention: auto", "\n  attention: tiled", NULL}};
    struct result whole_run = run("forecast", ARGS(best.text, "--device", "cpu"));
    struct table t = table_of(whole_run.out);
    struct result scored = run("evaluate", ARGS(best.text, "--device", "cpu", "--json"));
    json_t *whole = read_json(scored.out);
    const double mse = number_in(whole, "mse");
    json_decref(whole);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct path path = trained("elsewhere.h5", cases[i].from, cases[i].to);
        struct result r = run("forecast", ARGS(path.text, "--device", "cpu"));
        struct result e = run("evaluate", ARGS(path.text, "--device", "cpu", "--json"));
        ck_assert_msg(r.code == 0 && e.code == 0, "%s: %s%s", cases[i].to, r.err, e.err);
        for (int k = 0; k < 2; k++) {
            const char *err = k ? e.err : r.err;
            ck_assert_msg(cases[i].note ? strstr(err, cases[i].note) != NULL && lines_of(err) == 1 : !*err, "%s: %s", cases[i].to,
                          err);
        }
        json_t *score = read_json(e.out);
        ck_assert_double_eq(number_in(score, "mse"), mse);
        json_decref(score);
        struct table u = table_of(r.out);
        ck_assert_str_eq(u.header, t.header);
        for (int row = 0; row < H; row++) {
            ck_assert_str_eq(u.line[row], t.line[row]);
        }
        free(r.err);
        free(r.out);
        result_free(&e);
        unlink(path.text);
    }
    result_free(&scored);
    result_free(&whole_run);
}
END_TEST

/* A device that the config names and this machine has not: its CPU instead. One that was asked for is an error. */
START_TEST(without_a_gpu)
{
    struct path path = trained("gpu.h5", "device: auto", "device: cuda:7");
    struct result r = run("forecast", ARGS(path.text));
    ck_assert_msg(r.code == 0 || ps_cuda_device_count() > 0, "%s", r.err);
    result_free(&r);
    expect_refused(run("forecast", ARGS(path.text, "--device", "cpu", "--precision", "bf16")), 2, ARGS("fp32", "bf16"));
    expect_refused(run("forecast", ARGS(path.text, "--device", "cuda:77")), 5, ARGS("forecast: "));
    unlink(path.text);
}
END_TEST

/* ---- pictures ---- */

/* What plot.py is given, by a python3 of the test's own: of several origins the latest, and the data as HDF5; and what becomes of
 * what it says. tests/test_run_scripts.c has it draw. */
START_TEST(gives_to_plot)
{
    static const char keeps[] = "#!/bin/sh\n[ \"$1\" = -c ] && exit\n[ $# = 8 ] && cp \"$4\" \"$8\" && cp \"$6\" \"$8.data\"\n",
                      fails[] = "#!/bin/sh\n[ \"$1\" = -c ] && exit\necho first >&2\necho the last line >&2\nexit 1\n";
    struct path bin = new_dir("bin"), drawn = new_dir("drawn.png"), out = new_dir("latest.h5"), kept = new_dir("drawn.png.data");
    ck_assert_int_eq(mkdir(bin.text, 0777), 0);
    struct path python = path_of("%.400s/python3", bin.text), path = path_of("%.400s:%s", bin.text, getenv("PATH"));
    setenv("PATH", path.text, 1);
    file_write(python.text, keeps, strlen(keeps));
    chmod(python.text, 0777);
    free(forecast(best.text, ARGS("--out", out.text, "--origin", "300", "--interval", "0.5")).text);
    free(forecast(best.text, ARGS("--plot", drawn.text, "--origin", "300", "--last", "3", "--interval", "0.5")).text);
    ck_assert(files_equal(drawn.text, out.text));
    ck_assert(files_equal(kept.text, data.text));
    file_write(python.text, fails, strlen(fails));
    struct result r = run("forecast", ARGS(best.text, "--plot", drawn.text, "--overwrite"));
    ck_assert_msg(lines_of(r.out) == 1 + H, "%s", r.out);
    expect_refused(r, 2, ARGS("drawn.png: the forecasts are written, but not drawn: the last line"));
}
END_TEST

/* ---- what it leaves behind ---- */

/* Files of a while go with the process, whatever ends it, and keep no signal from doing so. */
START_TEST(files_of_a_while)
{
    static const int by[] = {0, SIGINT, SIGTERM, SIGHUP};
    for (size_t i = 0; i < sizeof by / sizeof *by; i++) {
        struct path parent = new_dir("tmp");
        ck_assert_int_eq(mkdir(parent.text, 0777), 0);
        setenv("TMPDIR", parent.text, 1);
        pid_t child = fork();
        if (child == 0) {
            signal(by[i], SIG_DFL); /* nohup leaves SIGHUP ignored; 0 is no signal */
            char path[2][PS_SCRATCH_PATH];
            for (int k = 0; k < 2; k++) {
                if (ps_scratch_file("forecast", k ? "b" : "a", path[k]) != PS_OK) {
                    _exit(9);
                }
                file_write(path[k], "x", 1);
            }
            if (strncmp(path[0], parent.text, strlen(parent.text)) != 0) {
                _exit(8);
            }
            if (by[i]) {
                raise(by[i]);
            }
            ps_scratch_remove();
            _exit(7);
        }
        int status;
        ck_assert_int_eq(waitpid(child, &status, 0), child);
        ck_assert_msg(by[i] ? WIFSIGNALED(status) && WTERMSIG(status) == by[i] : WIFEXITED(status) && WEXITSTATUS(status) == 7,
                      "signal %d: status %x", by[i], (unsigned)status);
        ck_assert_msg(rmdir(parent.text) == 0, "signal %d: %s", by[i], strerror(errno));
    }
    setenv("TMPDIR", new_dir("none").text, 1);
    char path[PS_SCRATCH_PATH];
    ck_assert_int_eq(ps_scratch_file("forecast", "a", path), PS_DATA);
    ck_assert_msg(strstr(ps_error_message(), new_dir("none").text) != NULL, "%s", ps_error_message());
}
END_TEST

/* ---- what it refuses ---- */

START_TEST(refuses)
{
    int64_t time[ROWS];
    hours_from(time, ROWS);
    char *const other[CHANNELS] = {"load", "solar", "price"};
    struct path renamed = new_dir("renamed.h5"), narrow = new_dir("narrow.h5"), falls = new_dir("falls.h5"),
                windows = new_dir("w.h5"), few = new_dir("few.h5"), gone = new_dir("none.h5");
    OK(ps_series_write(renamed.text, values, ROWS, CHANNELS, other, time, NULL, NULL));
    OK(ps_series_write(narrow.text, values, ROWS, 2, NULL, NULL, NULL, NULL));
    write_rows(few.text, values, L - 1, time);
    time[77] = time[76];
    write_rows(falls.text, values, ROWS, time);
    OK(ps_sample_windows(windows.text, 50, CHANNELS, L, H, 1));
    const struct {
        int code;
        char *const *arguments, *const *says;
    } cases[] = {
        {3, ARGS("--data", renamed.text), ARGS("forecast: ", renamed.text, "has no channel \"wind, \"west\"\"")},
        {3, ARGS("--data", narrow.text), ARGS(narrow.text, "2 channels", "3")},
        {3, ARGS("--data", falls.text), ARGS(falls.text, "/time of row 77", "2018-01-04 04:00:00, not after 2018-01-04 04:00:00")},
        {3, ARGS("--data", windows.text), ARGS(windows.text, "ready-made windows")},
        {3, ARGS("--data", few.text), ARGS(few.text, "47 rows", "48 are needed")},
        {3, ARGS("--data", gone.text), ARGS(gone.text, "cannot be opened")},
        {3, ARGS("--last", "354"), ARGS("401 are needed", "--last")},
        {3, ARGS("--origin", "46"), ARGS("47 rows up to the origin", "48 are needed")},
        {2, ARGS("--origin", "400"), ARGS("row 400", "400, counted from 0")},
        {2, ARGS("--origin", "99999999999999999999"), ARGS("counted from 0")},
        {2, ARGS("--origin", "noon"), ARGS("--origin is \"noon\"")},
        {3, ARGS("--origin", "2018-01-04 04:30"), ARGS("no row has the time 2018-01-04 04:30:00")},
        {2, ARGS("--steps", "0"), ARGS("--steps")},
        {2, ARGS("--last", "0"), ARGS("--last")},
        {2, ARGS("--interval", "0"), ARGS("--interval", "\"0\"")},
        {2, ARGS("--interval", "90%"), ARGS("--interval", "90%")},
        {2, ARGS("--interval", "0.97"), ARGS("--interval 0.97", "33 validation windows", "there are 29")},
        {2, ARGS("--interval", "0.5", "--steps", "13"), ARGS("--interval", "beyond 12")},
        {2, ARGS("--precision", "fp8"), ARGS("--precision", "fp8")},
        {2, ARGS("--device", "gpu"), ARGS("--device", "gpu")},
        {2, ARGS("--out", best.text), ARGS("is the checkpoint")},
        {2, ARGS("--out", data.text, "--overwrite"), ARGS("is the data")},
        {2, ARGS("--out", saved.text), ARGS("exists")},
        {3, ARGS("--out", "/nowhere/at/all.csv"), ARGS("/nowhere/at/all.csv")},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        expect_refused(refused(cases[i].arguments), cases[i].code, cases[i].says);
    }
    expect_refused(run("forecast", ARGS(data.text)), 4, ARGS(data.text));
    expect_refused(run("forecast", ARGS(NULL)), 2, ARGS("one CHECKPOINT"));
}
END_TEST

static void make_run(void)
{
    folder = folder_make();
    int64_t time[ROWS];
    uint64_t random = 5;
    hours_from(time, ROWS);
    for (int i = 0; i < ROWS * CHANNELS; i++) {
        const int c = i % CHANNELS, t = i / CHANNELS;
        values[i] = (float)(100 * (c + 1) + (c + 1) * sin(t * 0.26 + c) + 0.3 * random_normal(&random));
    }
    data = new_dir("data.h5");
    config = new_dir("config.yaml");
    saved = new_dir("saved.h5");
    struct path run_dir = new_dir("run");
    best = in_run(run_dir.text, "checkpoints/best.h5");
    write_rows(data.text, values, ROWS, time);
    file_write(config.text, config_text, strlen(config_text));
    expect_done(train(run_dir.text, ARGS(NULL)));
    struct result r =
        run("evaluate", ARGS(best.text, "--device", (char *)device, "--save-forecasts", saved.text, "--original-units"));
    ck_assert_msg(r.code == 0, "%s", r.err);
    result_free(&r);
}

static void remove_run(void)
{
    folder_remove(folder.text);
}

int main(void)
{
    const char *wanted = getenv("PS_TEST_DEVICE"), *of = getenv("PS_PROGRAMS");
    device = wanted ? wanted : "cpu";
    programs = of ? of : ".";

    Suite *suite = suite_create("forecast");
    TCase *c = tcase_create("forecast");
    tcase_set_timeout(c, 300);
    tcase_add_unchecked_fixture(c, make_run, remove_run);
    tcase_add_test(c, as_evaluate);
    tcase_add_test(c, after_the_end);
    tcase_add_test(c, fed_back);
    tcase_add_test(c, intervals);
    tcase_add_test(c, other_files);
    tcase_add_test(c, origins);
    tcase_add_test(c, calendar);
    tcase_add_test(c, steps);
    tcase_add_test(c, anywhere);
    tcase_add_test(c, without_a_gpu);
    tcase_add_test(c, gives_to_plot);
    tcase_add_test(c, files_of_a_while);
    tcase_add_test(c, refuses);
    suite_add_tcase(suite, c);
    return run_suite(suite, CK_FORK_GETENV) != 0;
}
