/* evaluate on generated data: which windows and which checkpoint, errors by step and by channel, the M competitions' measures. */
#include <math.h>

#include "data/dates.h"
#include "data/import.h"
#include "data/times.h"
#include "src/breakdown.h"
#include "src/intervals.h"
#include "tests/programs.h"
#include "tests/suite.h"

enum { HOURS = 2000, CHANNELS = 3, L = 48, H = 12, FIRST = HOURS * 8 / 10 - L /* row of the first test window */ };

static struct path series, whole, best; /* whole: a run; best: its best.h5 */

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
                                  "  n_layers: 1\n"
                                  "optim:\n"
                                  "  lr: 2e-3\n"
                                  "train:\n"
                                  "  epochs: 1\n"
                                  "  batch_size: 16\n"
                                  "runtime:\n"
                                  "  threads: 2\n";

/* ---- the measures ---- */

/* Ten times the row, and every other row 1 more: two rows apart 20, one row apart 10 +- 1. */
START_TEST(seasonal_by_hand)
{
    float values[7 * 2], inputs[2 * 2 * 4] = {0, 1, 4, 9, 5, 5, 5, 5, 1, 1, 2, 2, 0, 1, 0, 1};
    for (int t = 0; t < 7; t++) {
        values[2 * t] = (float)(10 * t + t % 2);
        values[2 * t + 1] = 3;
    }
    struct ps_series rows = {.path = "memory", .layout = PS_LAYOUT_SERIES, .rows = 7, .channels = 2, .values = values};
    double mae[2];
    OK(ps_seasonal_mae(&rows, 6, 2, mae));
    ck_assert(mae[0] == 20 && mae[1] == 0);
    OK(ps_seasonal_mae(&rows, 6, 1, mae)); /* 11, 9, 11, 9, 11 */
    ck_assert(mae[0] == 51.0 / 5 && mae[1] == 0);
    OK(ps_seasonal_mae(&rows, 6, 6, mae));
    ck_assert(isnan(mae[0]) && isnan(mae[1]));
    OK(ps_seasonal_mae(&rows, 0, 1, mae));
    ck_assert(isnan(mae[0]) && isnan(mae[1]));
    struct ps_series windows = {
        .path = "memory", .layout = PS_LAYOUT_WINDOWS, .rows = 2, .channels = 2, .seq_len = 4, .pred_len = 1, .inputs = inputs};
    OK(ps_seasonal_mae(&windows, 2, 2, mae)); /* 4, 8, 1, 1; 0 */
    ck_assert(mae[0] == 14.0 / 4 && mae[1] == 0);
    OK(ps_seasonal_mae(&windows, 1, 1, mae)); /* 1, 3, 5; 0 */
    ck_assert(mae[0] == 3 && mae[1] == 0);
    OK(ps_seasonal_mae(&windows, 2, 4, mae));
    ck_assert(isnan(mae[0]));
}
END_TEST

/* The same bits from a file that is read in pieces. */
START_TEST(seasonal_from_file)
{
    struct path data = new_dir("large.h5");
    expect_done(run("sample_series", ARGS(data.text, "--hours", "60000", "--channels", "8")));
    struct ps_series *memory, *file;
    OK(ps_series_open(data.text, &memory));
    OK(ps_series_open_within(data.text, &(struct ps_memory){.limit = 1400000, .seq_len = L, .pred_len = H, .batch = 4}, &file));
    ck_assert(memory->values && !file->values);
    double a[8], b[8];
    OK(ps_seasonal_mae(memory, 41000, 24, a));
    OK(ps_seasonal_mae(file, 41000, 24, b));
    ck_assert_mem_eq(a, b, sizeof a);
    ps_series_close(memory);
    ps_series_close(file);
}
END_TEST

static void near(double found, double expected)
{
    ck_assert_msg(fabs(found - expected) <= 1e-12 * fabs(expected), "%.17g, not %.17g", found, expected);
}

/* Two channels, a window of 4 + 2 rows, season 2; channel 0 is 10 + 2 x in its own units. */
START_TEST(breakdown_by_hand)
{
    struct ps_config c = {.data.season = 2};
    double mean[] = {10, 0}, std[] = {2, 1}, scale[] = {4, 0.5};
    struct ps_session s = {.config = &c,
                           .view = {.channels = 2, .seq_len = 4, .pred_len = 2},
                           .scaler = {.channels = 2, .mean = mean, .std = std},
                           .seasonal_mae = scale};
    const float inputs[] = {0, 1, 2, 1, 1, 2, 3, 4}, targets[] = {2, -5, 3, 4}, forecasts[] = {1, -5, 4, 2};
    struct ps_breakdown *b;
    OK(ps_breakdown_open(&s, PS_TEST, &b));
    ps_breakdown_add(b, 0, 1, inputs, targets, forecasts);
    struct ps_measures m = ps_breakdown_channel(b, PS_FORECASTER_MODEL, 0); /* 14 and 0, forecast 12 and 0 */
    near(m.mse, 0.5);
    near(m.mae, 0.5);
    near(m.original_mse, 2);
    near(m.original_mae, 1);
    near(m.mase, 0.25);
    near(m.smape, (200.0 * 2 / 26 + 0) / 2);
    m = ps_breakdown_channel(b, PS_FORECASTER_MODEL, 1);
    near(m.mse, 2.5);
    near(m.mae, 1.5);
    near(m.original_mse, 2.5);
    near(m.mase, 3);
    near(m.smape, (200.0 / 7 + 200.0 * 2 / 6) / 2);
    m = ps_breakdown_all(b, PS_FORECASTER_MODEL);
    near(m.mse, 1.5);
    near(m.mae, 1);
    near(m.mase, 1.625);
    near(m.smape, (200.0 * 2 / 26 + 200.0 / 7 + 200.0 * 2 / 6) / 4);
    ck_assert(isnan(m.original_mse) && isnan(m.original_mae)); /* the channels' units differ */
    m = ps_breakdown_step(b, PS_FORECASTER_MODEL, 0);
    near(m.mse, 1);
    near(m.mae, 1);
    m = ps_breakdown_step(b, PS_FORECASTER_MODEL, 1);
    near(m.mse, 2);
    near(m.mae, 1);
    m = ps_breakdown_all(b, PS_FORECASTER_REPEAT_LAST);
    near(m.mase, (3.5 * 2 / 4 + 0.5 / 0.5) / 2);
    near(m.smape, (200.0 * 2 / 26 + 200 + 200.0 / 7 + 0) / 4);
    m = ps_breakdown_all(b, PS_FORECASTER_SEASONAL_NAIVE); /* 2, 1 and 3, 4 */
    near(m.mse, 36.0 / 4);
    near(m.mase, (3.0 * 2 / 4 + 0) / 2);
    /* A second window, forecast without an error, halves them. */
    ps_breakdown_add(b, 0, 1, inputs, targets, targets);
    near(ps_breakdown_all(b, PS_FORECASTER_MODEL).mase, 1.625 / 2);
    near(ps_breakdown_step(b, PS_FORECASTER_MODEL, 1).mse, 1);
    scale[0] = 0; /* a channel that its training rows give no scale is left out of the mean */
    ck_assert(isnan(ps_breakdown_channel(b, PS_FORECASTER_MODEL, 0).mase));
    near(ps_breakdown_all(b, PS_FORECASTER_MODEL).mase, 1.5);
    scale[0] = scale[1] = NAN;
    ck_assert(isnan(ps_breakdown_all(b, PS_FORECASTER_MODEL).mase));
    ps_breakdown_close(b);
    /* What is not observed is left out, and what naive forecasts repeat is the last that is. */
    scale[0] = 4, scale[1] = 0.5;
    const float holes[] = {0, 1, 2, NAN, NAN, 2, NAN, 4}, seen[] = {NAN, -5, NAN, NAN};
    OK(ps_breakdown_open(&s, PS_TEST, &b));
    ps_breakdown_add(b, 0, 1, holes, seen, forecasts);
    ps_breakdown_add(b, 0, 1, inputs, seen, inputs); /* 1 for -5 */
    m = ps_breakdown_all(b, PS_FORECASTER_MODEL);
    near(m.mse, 36.0 / 2);
    near(m.mae, 3);
    near(m.mase, 3 * 2 / 4.0); /* nothing of channel 1 */
    near(m.smape, (0 + 200.0) / 2);
    ck_assert(isnan(ps_breakdown_channel(b, PS_FORECASTER_MODEL, 1).mse));
    ck_assert(isnan(ps_breakdown_step(b, PS_FORECASTER_MODEL, 0).mse));
    near(ps_breakdown_all(b, PS_FORECASTER_REPEAT_LAST).mae, (7.0 + 6) / 2);
    near(ps_breakdown_all(b, PS_FORECASTER_SEASONAL_NAIVE).mae, 6); /* the first's is a hole */
    const float none[8] = {NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN};
    ps_breakdown_add(b, 0, 1, none, seen, forecasts);
    near(ps_breakdown_all(b, PS_FORECASTER_REPEAT_LAST).mae, (7.0 + 6) / 2);
    near(ps_breakdown_all(b, PS_FORECASTER_MODEL).mae, 6.0 / 3);
    ps_breakdown_close(b);
    c.data.season = 5; /* longer than the input */
    OK(ps_breakdown_open(&s, PS_TEST, &b));
    ps_breakdown_add(b, 0, 1, inputs, targets, forecasts);
    m = ps_breakdown_all(b, PS_FORECASTER_SEASONAL_NAIVE);
    ck_assert(isnan(m.mse) && isnan(m.mase) && isnan(m.smape));
    ps_breakdown_close(b);
}
END_TEST

/* ---- intervals ---- */

enum { COLUMNS = CHANNELS * H, VALIDATION = HOURS / 10 - H + 1, FIRST_HOLE = HOURS * 8 / 10 - 10 /* row, of the last 10 */ };

static enum ps_status keep_errors(void *argument, int64_t first, int64_t n, const float *inputs, const float *targets,
                                  const float *forecasts, const float *quantiles)
{
    (void)inputs, (void)quantiles;
    float *errors = argument;
    for (int64_t i = 0; i < n * COLUMNS; i++) {
        errors[first * COLUMNS + i] = fabsf(targets[i] - forecasts[i]);
    }
    return PS_OK;
}

static int by_size(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* The rank is among the targets that are observed. */
START_TEST(intervals_with_holes)
{
    static float errors[VALIDATION * COLUMNS], column[VALIDATION];
    struct ps_checkpoint checkpoint;
    struct ps_config c;
    struct ps_session *s;
    struct ps_intervals intervals;
    OK(ps_checkpoint_load(best.text, &checkpoint));
    OK(ps_config_parse_saved(checkpoint.config, best.text, &c));
    OK(ps_session_open(&c, &(struct ps_session_options){.checkpoint = &checkpoint, .device = "cpu"}, &s));
    OK(ps_session_load_weights(s, &checkpoint, 0));
    ck_assert_int_eq(s->splits.count[PS_VALIDATION], VALIDATION);
    OK(ps_session_forecast(s, PS_VALIDATION, keep_errors, errors));
    for (int row = FIRST_HOLE; row < HOURS * 8 / 10; row++) { /* targets alone, of channel 0 */
        s->series->values[row * CHANNELS] = NAN;
    }
    OK(ps_intervals_fit(s, 0.8, &intervals));
    for (int i = 0; i < COLUMNS; i++) {
        int n = 0;
        for (int w = 0; w < VALIDATION; w++) {
            if (i >= H || HOURS * 7 / 10 + w + i % H < FIRST_HOLE) {
                column[n++] = errors[w * COLUMNS + i];
            }
        }
        ck_assert(i >= H ? n == VALIDATION : n == VALIDATION - (i < 2 ? 0 : i - 1));
        qsort(column, (size_t)n, sizeof *column, by_size);
        ck_assert_float_eq(intervals.half[i], column[(int)ceil((n + 1) * 0.8) - 1]);
    }
    float targets[COLUMNS], forecasts[COLUMNS] = {0};
    for (int i = 0; i < COLUMNS; i++) {
        targets[i] = i % 3 == 0 ? NAN : i % 3 == 1 ? 0 : 1e6F;
    }
    int64_t observed = 1;
    ck_assert_int_eq(ps_intervals_within(&intervals, 1, targets, forecasts, &observed), COLUMNS / 3);
    ck_assert_int_eq(observed, 1 + COLUMNS / 3 * 2);
    ps_intervals_free(&intervals);
    ck_assert_int_eq(ps_intervals_fit(s, 0.9945, &intervals), PS_USAGE); /* 181 of 189: not where 10 are missing */
    ck_assert_ptr_nonnull(
        strstr(ps_error_message(), "at least 181 observed targets of each channel and step, and channel 0 has 180"));
    ps_session_close(s);
    ps_config_free(&c);
    ps_checkpoint_free(&checkpoint);
}
END_TEST

/* One step ahead, where every training row with one a season before it is forecast once, naive forecasts have MASE 1. */
START_TEST(naive_is_one)
{
    static const struct {
        char *season, *seq_len, *patch_len;
        const char *naive;
    } cases[] = {{"data.season=12", "model.seq_len=12", "model.patch_len=4", "seasonal_naive"},
                 {"data.season=0", "model.seq_len=1", "model.patch_len=1", "repeat_last"}}; /* 0: the row before */
    for (int i = 0; i < 2; i++) {
        struct path dir = path_of("%.400s/one%d", folder.text, i);
        expect_done(train(dir.text, ARGS("--set", cases[i].season, "--set", cases[i].seq_len, "--set", cases[i].patch_len, "--set",
                                         "model.stride=1", "--set", "model.pred_len=1")));
        json_t *scores = evaluate_json(dir.text, ARGS("--json", "--split", "train")),
               *naive = json_object_get(scores, cases[i].naive);
        ck_assert_double_eq_tol(number_in(naive, "mase"), 1, 1e-6);
        ck_assert_double_gt(number_in(scores, "mase"), 0);
        ck_assert_double_ne(number_in(scores, "mase"), 1);
        ck_assert(i == 0 || json_is_null(json_object_get(scores, "seasonal_naive")));
        json_decref(scores);
    }
}
END_TEST

/* By step and by channel, in both units: what the forecasts that it saves say. */
START_TEST(by_step_and_channel)
{
    struct path out = new_dir("by.h5");
    json_t *all = evaluate_json(best.text, ARGS("--json", "--by", "step", "--original-units", "--save-forecasts", out.text)),
           *steps = json_object_get(all, "by_step"), *channels = json_object_get(all, "by_channel");
    struct array f = read_array(out.text, "forecasts"), y = read_array(out.text, "targets");
    struct ps_checkpoint c = load(whole.text, "best.h5");
    ck_assert_uint_eq(json_array_size(steps), H);
    ck_assert_uint_eq(json_array_size(channels), CHANNELS);
    double step[H][2] = {0}, channel[CHANNELS][3] = {0}, whole_mse = 0, windows = (double)f.size[0];
    for (size_t i = 0; i < f.size[0] * CHANNELS * H; i++) {
        int ch = (int)(i / H % CHANNELS), t = (int)(i % H);
        double e = (double)f.values[i] - (double)y.values[i], scaled = e / c.scaler.std[ch],
               size = fabs((double)f.values[i]) + fabs((double)y.values[i]);
        step[t][0] += scaled * scaled / (windows * CHANNELS);
        step[t][1] += fabs(scaled) / (windows * CHANNELS);
        channel[ch][0] += e * e / (windows * H);
        channel[ch][1] += fabs(e) / (windows * H);
        channel[ch][2] += 200 * fabs(e) / size / (windows * H);
    }
    for (int t = 0; t < H; t++) {
        const json_t *o = json_array_get(steps, (size_t)t);
        ck_assert_int_eq((int)number_in(o, "step"), t + 1);
        ck_assert_double_eq_tol(number_in(o, "mse") / step[t][0], 1, 1e-5);
        ck_assert_double_eq_tol(number_in(o, "mae") / step[t][1], 1, 1e-5);
        whole_mse += number_in(o, "mse") / H;
    }
    ck_assert_double_eq_tol(whole_mse / number_in(all, "mse"), 1, 1e-6);
    struct result text = evaluate(whole.text, ARGS("--original-units")); /* alone too */
    ck_assert_msg(text.code == 0 && !*text.err, "%s", text.err);
    for (int ch = 0; ch < CHANNELS; ch++) {
        const json_t *o = json_array_get(channels, (size_t)ch);
        struct path name = path_of("channel_%d", ch + 1), row;
        double std = c.scaler.std[ch];
        ck_assert_str_eq(json_string_value(json_object_get(o, "channel")), name.text);
        ck_assert_double_eq_tol(number_in(o, "original_mse") / channel[ch][0], 1, 1e-5);
        ck_assert_double_eq_tol(number_in(o, "original_mae") / channel[ch][1], 1, 1e-5);
        ck_assert_double_eq_tol(number_in(o, "smape") / channel[ch][2], 1, 1e-4);
        ck_assert_double_eq_tol(number_in(o, "mse") * std * std / channel[ch][0], 1, 1e-5);
        row = path_of("\n%s  %10.4f  %10.4f  %10.4f  %10.4f  %14.4f  %14.4f\n", name.text, number_in(o, "mse"), number_in(o, "mae"),
                      number_in(o, "mase"), number_in(o, "smape"), number_in(o, "original_mse"), number_in(o, "original_mae"));
        ck_assert_msg(strstr(text.out, row.text) != NULL, "no row \"%s\" in: %s", row.text, text.out);
    }
    ck_assert_msg(strstr(text.out, "original mse    original mae\n") && !strstr(text.out, "\nstep "), "%s", text.out);
    result_free(&text);
    text = evaluate(best.text, ARGS("--by", "step"));
    struct path row = path_of("\n%-6d  %10.4f  %10.4f\n", H, number_in(json_array_get(steps, H - 1), "mse"),
                              number_in(json_array_get(steps, H - 1), "mae"));
    ck_assert_msg(text.code == 0 && strstr(text.out, row.text) && !strstr(text.out, "channel"), "no \"%s\": %s", row.text,
                  text.out);
    result_free(&text);
    text = evaluate(best.text, ARGS("--by", "channel"));
    ck_assert_msg(text.code == 0 && strstr(text.out, "\nchannel_3 ") && !strstr(text.out, "original mse"), "%s", text.out);
    result_free(&text);
    json_t *plain = evaluate_json(best.text, ARGS("--json"));
    ck_assert(!json_object_get(plain, "by_step") && !json_object_get(plain, "by_channel"));
    ck_assert_double_eq(number_in(plain, "mse"), number_in(all, "mse"));
    expect_refused(evaluate(best.text, ARGS("--by", "row")), 2, ARGS("--by", "row", "step or channel"));
    json_decref(plain);
    json_decref(all);
    free(f.values);
    free(y.values);
    ps_checkpoint_free(&c);
}
END_TEST

/* ---- which windows ---- */

/* Rows [first, HOURS) of the series, or fewer. */
static struct path cut(const char *name, int first, int rows)
{
    struct path path = new_dir(name);
    struct ps_series *s;
    OK(ps_series_open(series.text, &s));
    OK(ps_series_write(path.text, s->values + (size_t)first * CHANNELS, rows, CHANNELS, s->channel_names, NULL, NULL, NULL));
    ps_series_close(s);
    return path;
}

/* All windows of a file that holds the test part's rows alone are those of the test part, to the bit. */
START_TEST(all_windows)
{
    struct path dir = new_dir("by_rows"), tail = cut("tail.h5", FIRST, HOURS - FIRST), one = cut("one.h5", 7, L + H),
                none = cut("none.h5", 7, L + H - 1), ready = new_dir("ready.h5");
    expect_done(train(dir.text, ARGS("--set", "data.split=[1400, 200, 400]")));
    json_t *test = evaluate_json(dir.text, ARGS("--json")),
           *all = evaluate_json(dir.text, ARGS("--json", "--split", "all", "--data", tail.text));
    static const char *const parts[] = {"full_batches", "repeat_last", "seasonal_naive", NULL};
    for (int i = 0; i < 4; i++) {
        const json_t *a = parts[i] ? json_object_get(test, parts[i]) : test, *b = parts[i] ? json_object_get(all, parts[i]) : all;
        ck_assert_double_eq(number_in(a, "mse"), number_in(b, "mse"));
        ck_assert_double_eq(number_in(a, "mae"), number_in(b, "mae"));
        ck_assert_double_eq(number_in(a, "windows"), number_in(b, "windows"));
    }
    ck_assert_double_eq(number_in(test, "smape"), number_in(all, "smape"));
    ck_assert(json_is_null(json_object_get(all, "mase")) && json_is_number(json_object_get(test, "mase")));
    ck_assert_str_eq(json_string_value(json_object_get(all, "split")), "all");
    json_decref(all);
    all = evaluate_json(dir.text, ARGS("--json", "--split", "all"));
    ck_assert_int_eq((int)number_in(all, "windows"), HOURS - L - H + 1);
    ck_assert(json_is_number(json_object_get(all, "mase"))); /* this file has the training rows */
    json_decref(all);
    json_decref(test);
    all = evaluate_json(dir.text, ARGS("--json", "--split", "all", "--data", one.text));
    ck_assert_int_eq((int)number_in(all, "windows"), 1);
    json_decref(all);
    expect_done(run("sample_series", ARGS(ready.text, "--windows", "5", "--seq-len", "48", "--pred-len", "12", "--channels", "3")));
    all = evaluate_json(dir.text, ARGS("--json", "--split", "all", "--data", ready.text));
    ck_assert_int_eq((int)number_in(all, "windows"), 5);
    json_decref(all);
    struct result text = evaluate(dir.text, ARGS("--split", "all", "--data", one.text));
    ck_assert_msg(text.code == 0 && strstr(text.out, "split all") && strstr(text.out, "no MASE"), "%s%s", text.out, text.err);
    result_free(&text);
    /* Too short for the splits: says what would do, where it would. */
    expect_refused(evaluate(dir.text, ARGS("--data", tail.text)), 3, ARGS(tail.text, "[1400, 200, 400]", "--split all"));
    expect_refused(evaluate(whole.text, ARGS("--data", one.text)), 3, ARGS(one.text, "part has no window", "--split all"));
    struct result r = evaluate(dir.text, ARGS("--data", none.text));
    ck_assert_msg(r.code == 3 && !strstr(r.err, "--split all"), "exit code %d: %s", r.code, r.err);
    result_free(&r);
    expect_refused(evaluate(dir.text, ARGS("--data", none.text, "--split", "all")), 3,
                   ARGS(none.text, "has no window", "59 rows", "at least 60"));
    r = train(new_dir("too_short").text, ARGS("--set", "data.path=one.h5")); /* train has no such option */
    ck_assert_msg(r.code == 3 && !strstr(r.err, "--split"), "exit code %d: %s", r.code, r.err);
    result_free(&r);
}
END_TEST

/* Parts by times are those of the counts of rows that they are; of another file they are its own rows at these times. */
START_TEST(by_times)
{
    struct path counts = new_dir("by_counts"), dirs[2] = {new_dir("by_times"), new_dir("between")}, bare = cut("bare.h5", 0, HOURS),
                ready = new_dir("windows.h5"), later = new_dir("later.h5");
    struct ps_series *s;
    struct ps_times times;
    OK(ps_series_open(series.text, &s));
    OK(ps_times_read(series.text, HOURS, &times));
    char at[2][128];
    for (int i = 0; i < 2; i++) { /* at rows, and between two */
        snprintf(at[i], sizeof at[i], "data.split=[%s, %s]", ps_date_text(times.time[1400] - i * 1800).text,
                 ps_date_text(times.time[1600] - i).text);
    }
    expect_done(train(counts.text, ARGS("--set", "data.split=[1400, 200, 400]")));
    for (int i = 0; i < 2; i++) {
        expect_done(train(dirs[i].text, ARGS("--set", at[i])));
        expect_same_results(counts.text, dirs[i].text);
    }
    struct result r = train(dirs[0].text, ARGS("--set", at[0], "--resume"));
    ck_assert_msg(r.code == 0, "%s", r.err);
    result_free(&r);
    expect_refused(train(dirs[0].text, ARGS("--set", at[1], "--resume")), 4, ARGS("data.split: the checkpoint was made with"));
    /* A file that begins later and ends earlier. */
    OK(ps_series_write(later.text, s->values + 500 * CHANNELS, HOURS - 600, CHANNELS, s->channel_names, times.time + 500, NULL,
                       NULL));
    json_t *score = evaluate_json(dirs[0].text, ARGS("--json", "--split", "val", "--data", later.text)),
           *whole_score = evaluate_json(dirs[0].text, ARGS("--json", "--split", "val"));
    ck_assert_double_eq(number_in(score, "mse"), number_in(whole_score, "mse"));
    ck_assert_int_eq((int)number_in(score, "windows"), 200 - H + 1);
    json_decref(score);
    json_decref(whole_score);
    score = evaluate_json(dirs[0].text, ARGS("--json", "--data", later.text));
    ck_assert_int_eq((int)number_in(score, "windows"), 300 - H + 1);
    json_decref(score);
    score = evaluate_json(dirs[0].text, ARGS("--json", "--data", bare.text, "--split", "all"));
    ck_assert_int_eq((int)number_in(score, "windows"), HOURS - L - H + 1);
    ck_assert(json_is_null(json_object_get(score, "mase")));
    json_decref(score);
    score = evaluate_json(dirs[0].text, ARGS("--json", "--split", "all"));
    ck_assert(json_is_number(json_object_get(score, "mase")));
    json_decref(score);

    const struct ps_date_text first = ps_date_text(times.time[1400]);
    expect_refused(evaluate(dirs[0].text, ARGS("--data", bare.text)), 3,
                   ARGS("bare.h5: has no /time", "give counts of rows", "--split all"));
    expect_refused(train(new_dir("bare").text, ARGS("--set", at[0], "--set", "data.path=bare.h5")), 3,
                   ARGS("bare.h5: has no /time, and the split is by times, ", (char *)first.text));
    expect_done(
        run("sample_series", ARGS(ready.text, "--windows", "50", "--seq-len", "48", "--pred-len", "12", "--channels", "3")));
    expect_refused(train(new_dir("ready").text, ARGS("--set", at[0], "--set", "data.path=windows.h5")), 3,
                   ARGS("windows.h5: holds ready-made windows, which have no times", "counts of windows"));
    expect_refused(train(new_dir("early").text, ARGS("--set", "data.split=[1999-01-01, 2000-01-01]")), 3,
                   ARGS("the train part has no window: it has 0 rows", "split at 1999-01-01 00:00:00 and 2000-01-01 00:00:00",
                        "has rows of ", ps_date_text(times.time[HOURS - 1]).text));
    ps_times_free(&times);
    ps_series_close(s);
}
END_TEST

/* ---- which checkpoint ---- */

/* The checkpoint that evaluate takes of a run's folder, below its checkpoints/. */
static void expect_taken(const char *dir, const char *name)
{
    struct path path = path_of("%.400s/checkpoints/%s", dir, name), head = path_of("%.500s, split test, ", path.text);
    struct result r = evaluate(dir, ARGS());
    ck_assert_msg(r.code == 0 && !*r.err && strncmp(r.out, head.text, strlen(head.text)) == 0, "not %s: %s%s", path.text, r.out,
                  r.err);
    result_free(&r);
    json_t *json = evaluate_json(dir, ARGS("--json"));
    ck_assert_str_eq(json_string_value(json_object_get(json, "checkpoint")), path.text);
    json_decref(json);
}

START_TEST(run_folders)
{
    struct path dir = new_dir("folder"), from, to;
    expect_done(train(dir.text, ARGS()));
    expect_taken(dir.text, "best.h5");
    static const char *const renamed[][2] = {
        {"best.h5", "best-9.h5"}, {"best-9.h5", "best-12.h5"}, {"best-12.h5", "mine.h5"}, {"last.h5", "last-83.h5"}};
    static const char *const taken[] = {"best-9.h5", "best-12.h5", "last.h5", "last-83.h5"};
    for (int i = 0; i < 4; i++) {
        from = path_of("%.400s/checkpoints/%s", dir.text, renamed[i][0]);
        to = path_of("%.400s/checkpoints/%s", dir.text, renamed[i][1]);
        ck_assert_int_eq(rename(from.text, to.text), 0);
        expect_taken(dir.text, taken[i]);
        if (i == 0) { /* 10 is more than 9, though not as a text */
            to = path_of("%.400s/checkpoints/best-10.h5", dir.text);
            ck_assert_int_eq(link(path_of("%.400s/checkpoints/best-9.h5", dir.text).text, to.text), 0);
            expect_taken(dir.text, "best-10.h5");
            ck_assert_int_eq(remove(to.text), 0);
        }
    }
    remove(in_run(dir.text, "checkpoints/last-83.h5").text);
    remove(in_run(dir.text, "checkpoints/last-0.h5").text); /* from before the first step */
    expect_refused(evaluate(dir.text, ARGS()), 4, ARGS(dir.text, "best.h5", "name a run's folder, or a checkpoint"));
    expect_refused(evaluate(folder.text, ARGS()), 4, ARGS(folder.text, "run's folder"));
    /* What is read is not written over, by the folder's name either. */
    expect_refused(evaluate(whole.text, ARGS("--save-forecasts", best.text, "--overwrite")), 2, ARGS("is the checkpoint"));
    expect_refused(evaluate(whole.text, ARGS("--save-forecasts", series.text)), 2, ARGS("is the data"));
    expect_refused(evaluate(whole.text, ARGS("--save-forecasts", config.text)), 2, ARGS("exists", "--overwrite"));
}
END_TEST

/* ---- */

static void set_up(void)
{
    folder = folder_make();
    config = new_dir("tiny.yaml");
    series = new_dir("series.h5");
    whole = new_dir("whole");
    best = in_run(whole.text, "checkpoints/best.h5");
    file_write(config.text, config_text, strlen(config_text));
    expect_done(run("sample_series", ARGS(series.text, "--hours", "2000", "--channels", "3")));
    expect_done(train(whole.text, ARGS()));
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
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
    Suite *suite = suite_create("evaluate");
    TCase *tests = tcase_create("evaluate");
    tcase_set_timeout(tests, 300);
    tcase_add_unchecked_fixture(tests, set_up, tear_down);
    tcase_add_test(tests, seasonal_by_hand);
    tcase_add_test(tests, seasonal_from_file);
    tcase_add_test(tests, breakdown_by_hand);
    tcase_add_test(tests, intervals_with_holes);
    tcase_add_test(tests, naive_is_one);
    tcase_add_test(tests, by_step_and_channel);
    tcase_add_test(tests, all_windows);
    tcase_add_test(tests, by_times);
    tcase_add_test(tests, run_folders);
    suite_add_tcase(suite, tests);
    return run_suite(suite, CK_FORK_GETENV) != 0;
}
