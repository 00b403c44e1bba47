/* Values that are missing, and channels that are picked: what is read, scaled and scored, by hand and by the programs.
 *
 * PS_TEST_DEVICE: the --device to run on (default cpu). */
#include <math.h>

#include "data/batches.h"
#include "data/import.h"
#include "data/panel.h"
#include "data/series_file.h"
#include "include/patchstep.h"
#include "src/breakdown.h"
#include "tests/programs.h"
#include "tests/random_values.h"
#include "tests/suite.h"

enum { ROWS = 600, C = 3, L = 24, H = 6 };

static struct path data;
static char *const names[C] = {"load", "wind, \"west\"", "price"};
static float values[ROWS * C];

/* ---- data in files ---- */

/* A series whose values are missing with that chance. */
static void write_series(const char *path, double share, char *const *channel_names)
{
    uint64_t random = 5;
    for (int i = 0; i < ROWS * C; i++) {
        values[i] = (float)(10 * (i % C) + 3 * sin(0.26 * (i / C)) + random_normal(&random));
    }
    for (int i = 0; i < ROWS * C; i++) {
        values[i] = random_uniform(&random) < share ? NAN : values[i];
    }
    OK(ps_series_write(path, values, ROWS, C, channel_names, NULL, "1h", NULL));
}

static void put(hid_t file, const char *name, int rank, const hsize_t *size, const float *from)
{
    hid_t space = H5Screate_simple(rank, size, NULL);
    hid_t set = H5Dcreate2(file, name, H5T_IEEE_F32LE, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    ck_assert_int_ge(H5Dwrite(set, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, from), 0);
    H5Dclose(set);
    H5Sclose(space);
}

static void fails(enum ps_status status, const char *says)
{
    ck_assert_int_eq(status, PS_DATA);
    ck_assert_msg(strstr(ps_error_message(), says) != NULL, "\"%s\" is not in: %s", says, ps_error_message());
}

static const struct ps_reading masked = {.masked = 1};

/* A file without a single value is refused, whatever would be put in; one value is enough to keep the others as NaN. */
START_TEST(imports_of_nothing)
{
    static const struct {
        const char *text, *columns; /* columns: of a panel */
    } files[] = {{"d,a,b\n2020-01-01,,NA\n2020-01-02,nan,?\n", NULL}, {"item,ts,v\na,2020-01-01,\na,2020-01-02,NA\n", "item,ts,v"}};
    struct path in = new_dir("in.csv");
    for (int i = 0; i < 2; i++) {
        for (int value = 0; value < 2; value++) {
            char text[80];
            const int n = snprintf(text, sizeof text, "%s%s", files[i].text,
                                   !value   ? ""
                                   : i == 0 ? "2020-01-03,7,\n"
                                            : "a,2020-01-03,7\n");
            file_write(in.text, text, (size_t)n);
            const struct ps_import_options options = {.fill = PS_FILL_NAN, .time_column = i == 0 ? "d" : NULL};
            struct ps_panel_imported panel;
            enum ps_status status = files[i].columns == NULL
                                        ? ps_import_csv(in.text, data.text, &options, NULL)
                                        : ps_import_panel(in.text, data.text, files[i].columns, &options, &panel);
            if (value) {
                ck_assert_msg(status == PS_OK, "%s", ps_error_message());
                continue;
            }
            fails(status,
                  i == 0 ? "in.csv: holds no value: each of its 4 is missing" : "in.csv: holds no value: each of its 2 is missing");
            ck_assert(!file_exists(data.text));
        }
        ck_assert_int_eq(unlink(data.text), 0);
    }
}
END_TEST

START_TEST(taken_where_asked)
{
    write_series(data.text, 0, names);
    values[7] = values[1000] = NAN;
    OK(ps_series_write(data.text, values, ROWS, C, names, NULL, NULL, NULL));
    struct ps_series *s;
    fails(ps_series_open(data.text, &s), "channel 1 (wind, \"west\"), row 2 (counted from 0): fill or cut such rows, or train with "
                                         "data.missing: mask; every value must be finite");
    OK(ps_series_open_as(data.text, &masked, &s));
    ck_assert_int_eq(s->missing, 2);
    ck_assert_mem_eq(s->values, values, sizeof values);
    const uint64_t fingerprint = s->fingerprint;
    ps_series_close(s);
    values[8] = INFINITY;
    OK(ps_series_write(data.text, values, ROWS, C, names, NULL, NULL, NULL));
    fails(ps_series_open_as(data.text, &masked, &s),
          "holds Inf in channel 2 (price), row 2 (counted from 0): fill or cut such rows; ");
    /* Where nothing is missing both ways are the same. */
    write_series(data.text, 0, names);
    struct ps_series *other;
    OK(ps_series_open(data.text, &s));
    OK(ps_series_open_as(data.text, &masked, &other));
    ck_assert_int_eq(other->missing, 0);
    ck_assert_uint_eq(s->fingerprint, other->fingerprint);
    ck_assert_uint_ne(s->fingerprint, fingerprint);
    ps_series_close(s);
    ps_series_close(other);
}
END_TEST

/* ---- scaling and naive forecasts, by hand ---- */

static void near(double found, double expected)
{
    ck_assert_msg(fabs(found - expected) <= 1e-14 * fabs(expected), "%.17g, not %.17g", found, expected);
}

START_TEST(scaler_by_hand)
{
    float x[] = {1, NAN, NAN, NAN, 5, NAN, 3, 7, NAN, 100, 100, 100};
    struct ps_series s = {.path = "memory", .rows = 4, .channels = 3, .values = x, .missing = 5, .largest = 100};
    struct ps_splits splits = {.train_rows = 3};
    struct ps_scaler scaler;
    OK(ps_scaler_fit(&s, &splits, &scaler)); /* 1, 3; 5, 7; nothing */
    near(scaler.mean[0], 2);
    near(scaler.std[0], 1);
    near(scaler.mean[1], 6);
    near(scaler.std[1], 1);
    ck_assert(scaler.mean[2] == 0 && scaler.std[2] == 1 && scaler.is_constant[2] && scaler.constant == 1);
    OK(ps_scaler_apply(&scaler, &s));
    static const float scaled[] = {-1, NAN, NAN, NAN, -1, NAN, 1, 1, NAN, 98, 94, 100};
    for (int i = 0; i < 12; i++) {
        ck_assert(isnan(scaled[i]) ? isnan(x[i]) : x[i] == scaled[i]);
    }
    ps_scaler_free(&scaler);
    /* Ready-made windows of 2 rows; the targets do not count. */
    float inputs[] = {1, NAN, NAN, NAN, 3, 5, NAN, NAN}, targets[] = {9, NAN, NAN, 9};
    struct ps_series w = {.path = "memory",
                          .layout = PS_LAYOUT_WINDOWS,
                          .rows = 2,
                          .channels = 2,
                          .seq_len = 2,
                          .pred_len = 1,
                          .inputs = inputs,
                          .targets = targets,
                          .missing = 7};
    OK(ps_scaler_fit(&w, &(struct ps_splits){.train_rows = 2}, &scaler));
    near(scaler.mean[0], 3);
    near(scaler.std[0], sqrt(8.0 / 3));
    ck_assert(scaler.mean[1] == 0 && scaler.std[1] == 1);
    ps_scaler_free(&scaler);
}
END_TEST

/* Three series, one of them with nothing observed where it is fitted. */
START_TEST(panels_by_hand)
{
    static const char csv[] = "item,ts,v\n"
                              "a,2020-01-01 00:00,1\na,2020-01-01 02:00,5\na,2020-01-01 03:00,\na,2020-01-01 04:00,9\n"
                              "b,2020-01-01 00:00,NA\nb,2020-01-01 01:00,nan\nb,2020-01-01 02:00,2\n"
                              "c,2020-01-01 00:00,4\nc,2020-01-01 01:00,6\nc,2020-01-01 02:00,7\n";
    struct path in = new_dir("in.csv");
    file_write(in.text, csv, sizeof csv - 1);
    struct ps_panel_imported done;
    const struct ps_import_options how = {.fill = PS_FILL_NAN};
    fails(ps_import_panel(in.text, data.text, "item,ts,v", &(struct ps_import_options){.fill = PS_FILL_NONE}, &done),
          "or keep them as NaN with --fill nan");
    OK(ps_import_panel(in.text, data.text, "item,ts,v", &how, &done));
    ck_assert(done.gaps == 1 && done.with_gaps == 1 && done.missing == 3 && done.rows == 11);
    struct ps_series *s;
    fails(ps_series_open(data.text, &s), "/values holds NaN in series \"a\", row 1 of it");
    OK(ps_series_open_as(data.text, &masked, &s));
    ck_assert_int_eq(s->missing, 4);
    struct ps_span fitted[] = {{0, 5}, {5, 2}, {8, 3}};
    struct ps_splits splits = {.fitted = fitted};
    struct ps_scaler scaler;
    OK(ps_scaler_fit(s, &splits, &scaler));
    near(scaler.mean[0], 5);
    near(scaler.std[0], sqrt(32.0 / 3));
    ck_assert(scaler.mean[1] == 0 && scaler.std[1] == 1 && scaler.is_constant[1]);
    near(scaler.mean[2], 17.0 / 3);
    double mae[3];
    OK(ps_panel_seasonal_mae(s, &splits, 2, mae)); /* |5 - 1|, |9 - 5|; none; |7 - 4| */
    ck_assert(mae[0] == 4 && isnan(mae[1]) && mae[2] == 3);
    OK(ps_scaler_apply(&scaler, s));
    ck_assert(isnan(s->values[1]) && isnan(s->values[5]) && s->values[7] == 2);
    ps_scaler_free(&scaler);
    ps_series_close(s);
}
END_TEST

START_TEST(seasonal_by_hand)
{
    float x[] = {0, 1, NAN, 2, 4, NAN, 9, NAN, 12, 5}; /* [5, 2] */
    struct ps_series rows = {.path = "memory", .rows = 5, .channels = 2, .values = x};
    double mae[2];
    OK(ps_seasonal_mae(&rows, 5, 2, mae)); /* |4 - 0|, |12 - 4|; none */
    ck_assert(mae[0] == 6 && isnan(mae[1]));
    OK(ps_seasonal_mae(&rows, 5, 1, mae)); /* |9 - 4|, |12 - 9|; |2 - 1| */
    ck_assert(mae[0] == 4 && mae[1] == 1);
    float inputs[] = {0, NAN, 4, 9};
    struct ps_series windows = {
        .path = "memory", .layout = PS_LAYOUT_WINDOWS, .rows = 1, .channels = 1, .seq_len = 4, .pred_len = 1, .inputs = inputs};
    OK(ps_seasonal_mae(&windows, 1, 1, mae));
    ck_assert(mae[0] == 5);
}
END_TEST

START_TEST(naive_by_hand)
{
    /* Two windows of two channels, 3 + 2 rows: the last value is missing; all is missing; a target; a value a season before. */
    float inputs[] = {1, 2, NAN, NAN, NAN, NAN, 1, 2, 3, 4, NAN, 6}, targets[] = {4, 6, 1, 1, NAN, 5, 7, 9};
    struct ps_series w = {.path = "memory",
                          .layout = PS_LAYOUT_WINDOWS,
                          .rows = 2,
                          .channels = 2,
                          .seq_len = 3,
                          .pred_len = 2,
                          .inputs = inputs,
                          .targets = targets};
    const struct ps_window_view view = ps_window_view_make(&w, 3, 2);
    struct ps_naive n = ps_naive_score(&view, 0, 2, 2);
    near(n.repeat_mae, (2 + 4 + 2 + 1 + 3) / 5.0);
    near(n.repeat_mse, (4 + 16 + 4 + 1 + 9) / 5.0);
    near(n.seasonal_mae, (2 + 2 + 3) / 3.0); /* 4 by 2; 5 by 3; 9 by 6 */
    near(n.seasonal_mse, (4 + 4 + 9) / 3.0);
    n = ps_naive_score(&view, 0, 2, 0);
    ck_assert(isnan(n.seasonal_mae) && isnan(n.seasonal_mse));
    float x[2 * 2 * 3], y[2 * 2 * 2];
    ps_windows_gather(&view, (int32_t[]){0, 1}, 2, x, y);
    ck_assert_mem_eq(x, inputs, sizeof x);
    for (int i = 0; i < 8; i++) { /* nothing observed, no target */
        ck_assert(i == 2 || i == 3 || i == 4 ? isnan(y[i]) : y[i] == targets[i]);
    }
}
END_TEST

/* Windows of 4 + 2 rows, season 2: what is there is scored. */
START_TEST(breakdown_by_hand)
{
    struct ps_config c = {.data.season = 2};
    double mean[] = {10, 0}, std[] = {2, 1}, scale[] = {4, 0.5};
    struct ps_session s = {.config = &c,
                           .view = {.channels = 2, .seq_len = 4, .pred_len = 2},
                           .scaler = {.channels = 2, .mean = mean, .std = std},
                           .seasonal_mae = scale};
    const float inputs[] = {0, 3, NAN, NAN, 1, 2, 3, NAN}, targets[] = {2, NAN, 3, 4}, forecasts[] = {1, -5, 4, 2};
    struct ps_breakdown *b;
    OK(ps_breakdown_open(&s, PS_TEST, &b));
    ps_breakdown_add(b, 0, 1, inputs, targets, forecasts);
    struct ps_measures m = ps_breakdown_channel(b, PS_FORECASTER_MODEL, 0);
    ck_assert(m.mse == 1 && m.mae == 1 && m.original_mae == 2 && m.mase == 0.5);
    m = ps_breakdown_all(b, PS_FORECASTER_MODEL);
    near(m.mse, (1 + 1 + 4) / 3.0);
    near(m.mase, (0.5 + 1.5 / 0.5) / 2);
    m = ps_breakdown_step(b, PS_FORECASTER_MODEL, 1);
    ck_assert(m.mse == 4);
    m = ps_breakdown_all(b, PS_FORECASTER_REPEAT_LAST); /* 3 by 2; 3 by 3, 3 by 4 */
    near(m.mae, 2 / 3.0);
    m = ps_breakdown_channel(b, PS_FORECASTER_SEASONAL_NAIVE, 0); /* both missing */
    ck_assert(isnan(m.mae) && isnan(m.mase));
    m = ps_breakdown_channel(b, PS_FORECASTER_SEASONAL_NAIVE, 1); /* 3 by 3; missing */
    ck_assert(m.mae == 0 && m.mase == 0);
    ck_assert(ps_breakdown_all(b, PS_FORECASTER_SEASONAL_NAIVE).mase == 0);
    ps_breakdown_close(b);
}
END_TEST

/* A part without a target that is observed is named; inputs alone do not help it. */
START_TEST(parts_observed)
{
    for (int ready = 0; ready < 2; ready++) {
        for (int part = PS_TRAIN; part < PS_SPLITS; part++) {
            static float x[ROWS * C], inputs[30 * C * L], targets[30 * C * H];
            struct ps_series s = {.path = "memory", .rows = ready ? 30 : ROWS, .channels = C, .values = x, .missing = 1};
            if (ready) {
                s.layout = PS_LAYOUT_WINDOWS;
                s.seq_len = L;
                s.pred_len = H;
                s.inputs = inputs;
                s.targets = targets;
            }
            struct ps_splits splits;
            const double split[3] = {0.5, 0.2, 0.3};
            OK(ps_splits_make(&s, split, L, H, &splits));
            const int64_t row = ready ? C * H : C;
            float *of = ready ? targets : x;
            const int64_t begin = splits.first[part] + (ready ? 0 : L),
                          end = splits.first[part] + splits.count[part] + (ready ? 0 : L + H - 1);
            for (int64_t i = 0; i < s.rows * row; i++) {
                of[i] = i >= begin * row && i < end * row ? NAN : 1;
            }
            OK(ps_splits_observed(&s, &splits, 7 & ~(1u << part), L, H));
            fails(ps_splits_observed(&s, &splits, 7, L, H), "part has no target that is observed: all are NaN");
            ck_assert(strstr(ps_error_message(), ps_split_name(part)) != NULL);
            of[end * row - 1] = 1;
            OK(ps_splits_observed(&s, &splits, 7, L, H));
            of[end * row - 1] = NAN;
            s.missing = 0; /* nothing is looked for */
            OK(ps_splits_observed(&s, &splits, 7, L, H));
        }
    }
}
END_TEST

/* ---- from a file that stays there ---- */

enum { LONG_ROWS = 40000, MANY = 8 };

static const struct ps_memory little = {.limit = 1500000, .seq_len = L, .pred_len = H, .batch = 16};

static void write_long(double share)
{
    float *x = malloc((size_t)LONG_ROWS * MANY * sizeof *x);
    uint64_t random = 9;
    char *many[MANY] = {"a", "b", "c", "d", "e", "f", "g", "h"};
    for (int i = 0; i < LONG_ROWS * MANY; i++) {
        x[i] = random_uniform(&random) < share ? NAN : (float)random_normal(&random);
    }
    for (int t = 5000; t < 5100; t++) { /* windows with nothing observed */
        x[t * MANY + 3] = NAN;
    }
    OK(ps_series_write(data.text, x, LONG_ROWS, MANY, many, NULL, NULL, NULL));
    free(x);
}

/* Streamed windows are those from memory, holes and all; so are the scaler, the fingerprint and the naive scores. */
START_TEST(streams)
{
    write_long(0.2);
    const char picks[] = "g\0b\0d";
    for (int some = 0; some < 2; some++) {
        struct ps_reading whole = {.masked = 1, .channels = some ? picks : NULL, .channel_count = some ? 3 : 0}, parts = whole;
        parts.memory = little;
        struct ps_series *s, *f;
        OK(ps_series_open_as(data.text, &whole, &s));
        OK(ps_series_open_as(data.text, &parts, &f));
        ck_assert(s->values && !f->values);
        ck_assert_uint_eq(s->fingerprint, f->fingerprint);
        ck_assert_int_eq(s->missing, f->missing);
        ck_assert_int_gt(s->missing, 10000);
        const int64_t n = s->channels;
        struct ps_splits splits;
        OK(ps_splits_make(s, (const double[]){0.7, 0.1, 0.2}, L, H, &splits));
        OK(ps_splits_observed(f, &splits, 7, L, H));
        struct ps_scaler scaler, other;
        OK(ps_scaler_fit(s, &splits, &scaler));
        OK(ps_scaler_fit(f, &splits, &other));
        ck_assert_mem_eq(scaler.mean, other.mean, (size_t)n * sizeof(double));
        ck_assert_mem_eq(scaler.std, other.std, (size_t)n * sizeof(double));
        double mae[2][MANY];
        OK(ps_seasonal_mae(s, splits.train_rows, 24, mae[0]));
        OK(ps_seasonal_mae(f, splits.train_rows, 24, mae[1]));
        ck_assert_mem_eq(mae[0], mae[1], (size_t)n * sizeof(double));
        OK(ps_scaler_apply(&scaler, s));
        const struct ps_window_view view = ps_window_view_make(s, L, H), sizes = ps_window_view_make(f, L, H);
        struct ps_groups *groups;
        OK(ps_groups_open(f, &other, L, H, &groups));
        const struct ps_order order = {.first = splits.first[PS_TRAIN], .count = splits.count[PS_TRAIN]};
        struct ps_naive naive, expected = ps_naive_score(&view, order.first, order.count, 24);
        OK(ps_groups_naive(groups, &order, 24, &naive));
        ck_assert_mem_eq(&naive, &expected, sizeof naive);
        float *inputs[2], *targets[2], *x = malloc((size_t)(16 * n * L) * 4), *y = malloc((size_t)(16 * n * H) * 4);
        for (int i = 0; i < 2; i++) {
            inputs[i] = malloc((size_t)(16 * n * L) * 4);
            targets[i] = malloc((size_t)(16 * n * H) * 4);
        }
        struct ps_batches *batches;
        OK(ps_batches_open(&sizes, groups, 16, inputs, targets, &batches));
        ps_batches_start(batches, &order, NULL, 0, order.count);
        int64_t unseen = 0;
        for (int64_t done = 0, count; done < order.count; done += count) {
            int slot;
            double waited = 0;
            int32_t index[16];
            OK(ps_batches_next(batches, &slot, &count, &waited));
            ps_order_windows(&order, done, count, index);
            ps_windows_gather(&view, index, count, x, y);
            ck_assert_mem_eq(inputs[slot], x, (size_t)(count * n * L) * 4);
            ck_assert_mem_eq(targets[slot], y, (size_t)(count * n * H) * 4);
            for (int64_t i = 0; i < count * n; i++) {
                int any = 0;
                for (int l = 0; l < L; l++) {
                    any |= !isnan(x[i * L + l]);
                }
                for (int t = 0; t < H; t++) {
                    ck_assert(any || isnan(y[i * H + t]));
                }
                unseen += !any;
            }
            ps_batches_release(batches, slot);
        }
        ck_assert_int_ge(unseen, 100 - L);
        ps_batches_close(batches);
        ps_groups_close(groups);
        for (int i = 0; i < 2; i++) {
            free(inputs[i]);
            free(targets[i]);
        }
        free(x);
        free(y);
        ps_scaler_free(&scaler);
        ps_scaler_free(&other);
        ps_series_close(s);
        ps_series_close(f);
    }
}
END_TEST

/* ---- channels ---- */

/* A file's channels by name are those of a file that has no others: the same values, names and fingerprint. */
START_TEST(picks)
{
    struct path other = new_dir("picked.h5");
    static const struct {
        int n, column[C];
    } cases[] = {{1, {1}}, {2, {2, 0}}, {3, {2, 0, 1}}, {3, {0, 1, 2}}};
    write_series(data.text, 0, names);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        static float picked[ROWS * C];
        char *picked_names[C], list[64];
        const int n = cases[i].n;
        int used = 0;
        for (int c = 0; c < n; c++) {
            picked_names[c] = names[cases[i].column[c]];
            used += sprintf(list + used, "%s", picked_names[c]) + 1;
        }
        for (int r = 0; r < ROWS * n; r++) {
            picked[r] = values[r / n * C + cases[i].column[r % n]];
        }
        OK(ps_series_write(other.text, picked, ROWS, n, picked_names, NULL, "1h", NULL));
        struct ps_series *s, *expected;
        const struct ps_reading reading = {.channels = list, .channel_count = n};
        OK(ps_series_open_as(data.text, &reading, &s));
        OK(ps_series_open(other.text, &expected));
        ck_assert_int_eq(s->channels, n);
        ck_assert_mem_eq(s->values, picked, (size_t)(ROWS * n) * sizeof(float));
        ck_assert_uint_eq(s->fingerprint, expected->fingerprint);
        ck_assert(s->largest == expected->largest);
        for (int c = 0; c < n; c++) {
            ck_assert_str_eq(s->channel_names[c], picked_names[c]);
        }
        ps_series_close(s);
        ps_series_close(expected);
    }
}
END_TEST

/* Ready-made windows. */
START_TEST(picks_windows)
{
    enum { W = 5, LONG = 4, SHORT = 2 };
    static float inputs[W * C * LONG], targets[W * C * SHORT];
    for (int i = 0; i < W * C * LONG; i++) {
        inputs[i] = (float)i;
    }
    for (int i = 0; i < W * C * SHORT; i++) {
        targets[i] = (float)-i;
    }
    hid_t file = H5Fcreate(data.text, H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    put(file, "inputs", 3, (hsize_t[]){W, C, LONG}, inputs);
    put(file, "targets", 3, (hsize_t[]){W, C, SHORT}, targets);
    hid_t set = H5Dopen2(file, "inputs", H5P_DEFAULT), type = H5Tcopy(H5T_C_S1), space = H5Screate_simple(1, (hsize_t[]){C}, NULL);
    H5Tset_size(type, 4);
    hid_t attribute = H5Acreate2(set, "channels", type, space, H5P_DEFAULT, H5P_DEFAULT);
    H5Awrite(attribute, type, "x\0\0\0y\0\0\0z\0\0\0");
    H5Aclose(attribute);
    H5Tclose(type);
    H5Sclose(space);
    H5Dclose(set);
    H5Fclose(file);
    struct ps_series *s;
    OK(ps_series_open_as(data.text, &(struct ps_reading){.channels = "z\0x", .channel_count = 2}, &s));
    ck_assert_int_eq(s->channels, 2);
    for (int w = 0; w < W; w++) {
        ck_assert_mem_eq(s->inputs + (w * 2 + 0) * LONG, inputs + (w * C + 2) * LONG, LONG * sizeof(float));
        ck_assert_mem_eq(s->inputs + (w * 2 + 1) * LONG, inputs + (w * C + 0) * LONG, LONG * sizeof(float));
        ck_assert_mem_eq(s->targets + (w * 2 + 0) * SHORT, targets + (w * C + 2) * SHORT, SHORT * sizeof(float));
        ck_assert_mem_eq(s->targets + (w * 2 + 1) * SHORT, targets + (w * C + 0) * SHORT, SHORT * sizeof(float));
    }
    ps_series_close(s);
}
END_TEST

START_TEST(picks_refused)
{
    struct ps_series *s;
    struct ps_reading reading = {.channels = "price\0power", .channel_count = 2};
    write_series(data.text, 0, names);
    fails(ps_series_open_as(data.text, &reading, &s),
          "has no channel \"power\", which data.channels names: it has \"load\", \"wind, \"west\"\", \"price\"");
    reading.trained = 1;
    fails(ps_series_open_as(data.text, &reading, &s), "has no channel \"power\", which the model was trained on: it has \"load\"");
    write_series(data.text, 0, NULL);
    OK(ps_series_open_as(data.text, &reading, &s)); /* as they stand */
    ck_assert_int_eq(s->channels, C);
    ps_series_close(s);
    reading.trained = 0;
    fails(ps_series_open_as(data.text, &reading, &s), "data.channels: the file has no names for its channels");
    write_series(data.text, 0, (char *const[]){"a", "b", "a"});
    reading.channels = "a\0a";
    fails(ps_series_open_as(data.text, &reading, &s), "channel \"a\" is asked for twice");
}
END_TEST

/* ---- the programs ---- */

static const char config_text[] = "data: {path: data.h5}\n"
                                  "model: {seq_len: 24, pred_len: 6, patch_len: 8, stride: 4, d_model: 16, n_heads: 4, d_ff: 24,\n"
                                  "        n_layers: 2}\n"
                                  "optim: {lr: 2e-3, schedule: constant}\n"
                                  "train: {epochs: 2, batch_size: 16}\n"
                                  "runtime: {threads: 2}\n";

/* Without a hole: the same checkpoints, scores and metrics with either setting. */
START_TEST(same_bits)
{
    struct path refuse = new_dir("refuse"), mask = new_dir("mask");
    write_series(data.text, 0, names);
    expect_done(train(refuse.text, ARGS("--set", "train.epochs=2")));
    expect_done(train(mask.text, ARGS("--set", "data.missing=mask")));
    expect_same_results(refuse.text, mask.text);
    /* And a run goes on with either. */
    expect_done(train(mask.text, ARGS("--resume", "--set", "train.epochs=3", "--set", "data.missing=refuse")));
    expect_done(train(refuse.text, ARGS("--resume", "--set", "train.epochs=3", "--set", "data.missing=mask")));
    expect_same_results(refuse.text, mask.text);
}
END_TEST

/* Channels of a larger file, in another order: the run of a file that holds those alone; evaluated and forecast on either file. */
START_TEST(channels_by_name)
{
    struct path some = new_dir("some"), alone = new_dir("alone"), narrow = new_dir("narrow.h5"), out = new_dir("out.csv");
    write_series(data.text, 0, names);
    static float picked[ROWS * 2];
    for (int i = 0; i < ROWS * 2; i++) {
        picked[i] = values[i / 2 * C + (i % 2 == 0 ? 2 : 0)];
    }
    OK(ps_series_write(narrow.text, picked, ROWS, 2, (char *const[]){"price", "load"}, NULL, "1h", NULL));
    expect_done(train(some.text, ARGS("--set", "data.channels=[price, load]")));
    expect_done(train(alone.text, ARGS("--set", "data.path=narrow.h5")));
    expect_same_results(some.text, alone.text);
    struct path last = in_run(some.text, "checkpoints/last.h5");
    json_t *wide = evaluate_json(last.text, ARGS("--json")),
           *other = evaluate_json(last.text, ARGS("--json", "--data", narrow.text));
    ck_assert(json_equal(wide, other));
    json_decref(other);
    other = evaluate_json(in_run(alone.text, "checkpoints/last.h5").text, ARGS("--json", "--data", data.text));
    ck_assert(json_equal(wide, other));
    json_decref(wide);
    json_decref(other);
    expect_done(run("forecast", ARGS(last.text, "--out", out.text)));
    char *text = file_read(out.text, NULL);
    ck_assert_msg(strncmp(text, "row,price,load\n", 15) == 0, "%s", text);
    expect_done(run("forecast", ARGS(last.text, "--out", out.text, "--overwrite", "--data", narrow.text)));
    char *again = file_read(out.text, NULL);
    ck_assert_str_eq(text, again);
    free(text);
    free(again);
    expect_refused(train(new_dir("none").text, ARGS("--set", "data.channels=[price, power]")), 3,
                   ARGS(data.text, "has no channel \"power\", which data.channels names"));
    expect_refused(train(some.text, ARGS("--resume", "--set", "train.epochs=3", "--set", "data.channels=[load, price]")), 4,
                   ARGS("data.channels", "[price, load]", "[load, price]"));
}
END_TEST

/* Every number of a JSON document is finite, and so is every field of a CSV below its header. */
static void expect_numbers(const json_t *value)
{
    const char *key;
    json_t *of;
    ck_assert(!json_is_null(value));
    json_object_foreach((json_t *)value, key, of)
    {
        expect_numbers(of);
    }
}

static void expect_no_nan(const char *path)
{
    char *text = file_read(path, NULL), *body = strchr(text, '\n');
    ck_assert_msg(body != NULL && lines_of(text) > H && strcasestr(body, "nan") == NULL && strcasestr(body, "inf") == NULL &&
                      strstr(body, ",,") == NULL,
                  "%s", text);
    free(text);
}

/* A CSV as pandas writes it, with holes of every size: a tenth of the values, a channel that begins late, rows without any. */
static void write_csv(const char *path)
{
    FILE *out = fopen(path, "w");
    uint64_t random = 4;
    fputs("date,load,wind,price\n", out);
    for (int t = 0; t < ROWS; t++) {
        fprintf(out, "2021-%02d-%02d %02d:00:00", 1 + t / 24 / 28, 1 + t / 24 % 28, t % 24);
        for (int c = 0; c < C; c++) {
            static const char *const forms[] = {"", "NaN", "NA", "nan"};
            const int gone = random_uniform(&random) < 0.1 || (c == 1 && t < 100) || (t > 300 && t < 340);
            const double x = 10 * c + 3 * sin(0.26 * t) + random_normal(&random);
            if (gone) {
                fprintf(out, ",%s", forms[t % 4]);
            } else {
                fprintf(out, ",%.6f", x);
            }
        }
        fputc('\n', out);
    }
    fclose(out);
}

/* From a CSV with holes to forecasts: refused where it was not asked for; nothing that is not a number leaves; the same bits from
 * host and device, across an interruption, and scores from a file that stays there. fp16, the last, is a GPU's. */
START_TEST(from_csv_to_forecasts)
{
    struct path csv = new_dir("holes.csv"), dir = new_dir("run"), out = new_dir("out.csv"), other = new_dir("other");
    write_csv(csv.text);
    expect_refused(run("import_csv", ARGS(csv.text, data.text)), 3,
                   ARGS("is a missing value", "or keep them as NaN with --fill nan"));
    /* 28 days a month: the steps are not equal. */
    struct result r = run("import_csv", ARGS(csv.text, data.text, "--fill", "nan", "--allow-gaps"));
    ck_assert_msg(r.code == 0 && strstr(r.out, "missing values in 3 channels kept as NaN") != NULL, "%s%s", r.out, r.err);
    result_free(&r);
    expect_refused(train(dir.text, ARGS("--set", "train.epochs=1")), 3, ARGS(data.text, "holds NaN", "data.missing: mask"));
    static char *const variants[][8] = {
        {"--set", "data.missing=mask", NULL},
        {"--set", "data.missing=mask", "--set", "model.revin_subtract_last=true", "--set", "model.patches_from=end", NULL},
        {"--set", "data.missing=mask", "--set", "model.revin_affine=true", "--set", "model.head=individual", NULL},
        {"--set", "data.missing=mask", "--set", "model.norm=batch", "--set", "model.padding=none", NULL},
        {"--set", "data.missing=mask", "--set", "model.revin=false", "--set", "model.norm=rms", NULL},
        {"--set", "data.missing=mask", "--set", "runtime.precision=fp16", NULL}};
    for (size_t i = 0; i < sizeof variants / sizeof *variants - (strcmp(device, "cpu") == 0); i++) {
        dir = path_of("%.400s/run%zu", folder.text, i);
        expect_done(train(dir.text, variants[i]));
        json_t *metrics = read_metrics(dir.text), *test = read_test(dir.text);
        for (size_t e = 0; e < json_array_size(metrics); e++) {
            expect_numbers(json_array_get(metrics, e));
        }
        ck_assert_double_lt(number_in(json_array_get(metrics, 1), "train_loss"),
                            number_in(json_array_get(metrics, 0), "train_loss"));
        json_object_del(test, "seasonal_naive"); /* the window has no whole season but one */
        expect_numbers(test);
        json_decref(metrics);
        json_t *scores = evaluate_json(dir.text, ARGS("--json", "--by", "channel"));
        ck_assert_double_eq(number_in(scores, "mse"), number_in(test, "mse"));
        expect_numbers(json_object_get(scores, "by_channel"));
        json_decref(scores);
        json_decref(test);
        expect_done(run("forecast", ARGS(dir.text, "--out", out.text, "--overwrite", "--last", "300", "--steps", "10")));
        expect_no_nan(out.text);
        expect_done(run("forecast", ARGS(dir.text, "--data", csv.text, "--out", out.text, "--overwrite", "--origin", "330")));
        expect_no_nan(out.text);
        if (i > 0) {
            continue;
        }
        expect_done(train(other.text, ARGS("--set", "data.missing=mask", "--set", "data.placement=host")));
        expect_same_results(dir.text, other.text);
        expect_done(train(other.text, ARGS("--overwrite", "--set", "data.missing=mask", "--set", "train.epochs=1")));
        expect_done(train(other.text, ARGS("--resume", "--set", "data.missing=mask")));
        expect_same_results(dir.text, other.text);
    }
}
END_TEST

/* Six series with holes, gaps and an end without a value, from a CSV to the forecasts of each. */
START_TEST(panels_from_csv)
{
    struct path csv = new_dir("panel.csv"), dir = new_dir("panel"), out = new_dir("out.csv"), other = new_dir("other.csv");
    FILE *file = fopen(csv.text, "w");
    uint64_t random = 6;
    fputs("item,ts,v\n", file);
    for (int i = 0; i < 6; i++) {
        for (int t = 0; t < 120 + 30 * i; t++) {
            const double x = 5 * i + (1 + i) * sin(0.26 * t) + random_normal(&random);
            if (t > 0 && random_uniform(&random) < 0.05) {
                continue; /* a gap */
            }
            fprintf(file, "s%d,2021-%02d-%02d %02d:00:00,", i, 1 + t / 24 / 28, 1 + t / 24 % 28, t % 24);
            if (random_uniform(&random) < 0.1 || (i == 2 && t >= 120)) {
                fputs("NA\n", file);
            } else {
                fprintf(file, "%.6f\n", x);
            }
        }
    }
    fclose(file);
    expect_done(run("import_csv", ARGS(csv.text, data.text, "--panel", "item,ts,v", "--fill", "nan")));
    expect_refused(train(dir.text, ARGS("--set", "train.epochs=1")), 3,
                   ARGS(data.text, "holds NaN in series", "data.missing: mask"));
    expect_done(train(dir.text, ARGS("--set", "data.missing=mask")));
    json_t *metrics = read_metrics(dir.text), *scores = evaluate_json(dir.text, ARGS("--json", "--by", "series"));
    for (size_t e = 0; e < json_array_size(metrics); e++) {
        expect_numbers(json_array_get(metrics, e));
    }
    const json_t *series = json_object_get(scores, "by_series");
    ck_assert_int_eq(json_array_size(series), 6);
    for (size_t i = 0; i < 6; i++) { /* of the third nothing is observed where it is tested */
        const json_t *mse = json_object_get(json_array_get(series, i), "mse");
        ck_assert_msg(i == 2 ? json_is_null(mse) : json_is_real(mse), "series %zu", i);
    }
    json_decref(metrics);
    json_decref(scores);
    expect_done(run("forecast", ARGS(dir.text, "--out", out.text)));
    expect_no_nan(out.text);
    expect_done(run("forecast", ARGS(dir.text, "--out", other.text, "--data", csv.text, "--panel", "item,ts,v")));
    char *text = file_read(out.text, NULL), *again = file_read(other.text, NULL);
    ck_assert_int_eq(lines_of(text), 1 + 6 * H);
    ck_assert_str_eq(text, again);
    free(text);
    free(again);
}
END_TEST

/* NaN in what the library is given: the program's forecasts of the same rows, where holes were trained on; else refused. On one
 * thread, as the library computes: of more the last bits may be others. */
START_TEST(library_takes_holes)
{
    struct path mask = new_dir("mask"), refuse = new_dir("refuse"), out = new_dir("out.h5");
    float inputs[C * L], forecasts[C * H];
    write_series(data.text, 0.2, names);
    expect_done(train(mask.text, ARGS("--set", "data.missing=mask", "--set", "runtime.threads=1")));
    int holes = 0;
    for (int i = 0; i < C * L; i++) {
        inputs[i] = values[(ROWS - L + i % L) * C + i / L];
        holes += isnan(inputs[i]);
    }
    ck_assert_int_gt(holes, 5);
    expect_done(run("forecast", ARGS(mask.text, "--out", out.text, "--device", (char *)device)));
    struct array expected = read_array(out.text, "/forecasts"); /* [1, H, C] */
    struct patchstep_model *model;
    ck_assert_int_eq(patchstep_open(mask.text, device, NULL, &model), PATCHSTEP_OK);
    for (int nothing = 0; nothing < 2; nothing++) {
        ck_assert_msg(patchstep_forecast(model, inputs, 1, forecasts) == PATCHSTEP_OK, "%s", patchstep_error());
        for (int i = 0; i < C * H; i++) {
            ck_assert(isfinite(forecasts[i]));
            const double other = expected.values[i % H * C + i / H];
            ck_assert_msg(nothing || forecasts[i] == other, "channel %d, step %d: %.9g, by the program %.9g", i / H, i % H,
                          (double)forecasts[i], other);
        }
        for (int i = 0; i < C * L; i++) {
            inputs[i] = NAN;
        }
    }
    inputs[3] = INFINITY;
    ck_assert_int_eq(patchstep_forecast(model, inputs, 1, forecasts), PATCHSTEP_DATA);
    ck_assert_msg(strstr(patchstep_error(), "channel 0, step 3 (counted from 0) is inf") != NULL, "%s", patchstep_error());
    patchstep_close(model);
    free(expected.values);
    write_series(data.text, 0, names);
    expect_done(train(refuse.text, ARGS("--set", "train.epochs=1")));
    ck_assert_int_eq(patchstep_open(refuse.text, device, NULL, &model), PATCHSTEP_OK);
    inputs[3] = NAN;
    ck_assert_int_eq(patchstep_forecast(model, inputs, 1, forecasts), PATCHSTEP_DATA);
    ck_assert_msg(strstr(patchstep_error(), "a model trained with data.missing: mask takes NaN") != NULL, "%s", patchstep_error());
    patchstep_close(model);
}
END_TEST

/* What is not there cannot be scored: one line that says which part; forecasts are numbers all the same. */
START_TEST(nothing_observed)
{
    struct path dir = new_dir("run"), none = new_dir("none"), other = new_dir("other.h5"), out = new_dir("out.csv");
    write_series(other.text, 1, names);
    static char *const mask[] = {"--set", "data.missing=mask", "--set", "data.path=other.h5", NULL};
    expect_refused(train(none.text, mask), 3, ARGS(other.text, "the train part has no target that is observed: all are NaN"));
    write_series(data.text, 0.1, names);
    for (int i = ROWS * C * 8 / 10; i < ROWS * C; i++) {
        values[i] = NAN;
    }
    OK(ps_series_write(other.text, values, ROWS, C, names, NULL, "1h", NULL));
    expect_refused(train(none.text, mask), 3, ARGS(other.text, "the test part has no target that is observed: all are NaN"));
    expect_done(train(dir.text, ARGS("--set", "data.missing=mask")));
    struct path last = in_run(dir.text, "checkpoints/last.h5");
    expect_refused(evaluate(last.text, ARGS("--data", other.text)), 3,
                   ARGS(other.text, "the test part has no target that is observed: all are NaN"));
    json_t *scores = evaluate_json(last.text, ARGS("--json", "--data", other.text, "--split", "val"));
    ck_assert_double_gt(number_in(scores, "mse"), 0);
    json_decref(scores);
    expect_done(run("forecast", ARGS(last.text, "--data", other.text, "--out", out.text)));
    expect_no_nan(out.text);
    /* Ready-made windows whose targets are there, and none of their inputs. */
    static float inputs[30 * C * L], targets[30 * C * H];
    for (int i = 0; i < 30 * C * L; i++) {
        inputs[i] = NAN;
    }
    hid_t file = H5Fcreate(other.text, H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    put(file, "inputs", 3, (hsize_t[]){30, C, L}, inputs);
    put(file, "targets", 3, (hsize_t[]){30, C, H}, targets);
    H5Fclose(file);
    expect_refused(evaluate(last.text, ARGS("--data", other.text, "--split", "all")), 3,
                   ARGS(other.text, "the all part has no target that is observed behind an input that is"));
}
END_TEST

/* Masked patches are those that were hidden; what was never there is no target. */
START_TEST(pretraining_refused)
{
    write_series(data.text, 0.1, names);
    expect_refused(train(new_dir("run").text, ARGS("--set", "data.missing=mask", "--set", "train.objective=masked", "--set",
                                                   "model.stride=8", "--set", "model.padding=none")),
                   3, ARGS(data.text, "holds NaN", "train.objective: masked", "--fill previous"));
}
END_TEST

/* Data with holes that stream from their file: their scores are those from memory. */
START_TEST(streamed_scores)
{
    struct path dir = new_dir("run");
    write_long(0.2);
    expect_done(train(dir.text, ARGS("--set", "data.missing=mask", "--set", "data.split=[2000, 300, 6000]", "--set",
                                     "train.epochs=1", "--set", "data.memory_limit=1500000")));
    struct ps_checkpoint checkpoint = load(dir.text, "last.h5");
    struct ps_accuracy scores[2][PS_SPLITS];
    struct ps_naive naive[2];
    for (int streams = 0; streams < 2; streams++) {
        struct ps_config c;
        struct ps_session *s;
        OK(ps_config_parse_saved(checkpoint.config, "saved", &c));
        c.data.memory_limit = streams ? c.data.memory_limit : 0;
        OK(ps_session_open(&c, &(struct ps_session_options){.device = device, .checkpoint = &checkpoint, .scored = 7}, &s));
        ck_assert_int_eq(s->groups != NULL, streams);
        OK(ps_session_load_weights(s, &checkpoint, 0));
        for (int split = PS_TRAIN; split < PS_SPLITS; split++) {
            OK(ps_session_score(s, (enum ps_split)split, &scores[streams][split]));
            ck_assert(isfinite(scores[streams][split].all.mse));
        }
        OK(ps_session_naive(s, PS_TEST, &naive[streams]));
        ps_session_close(s);
        ps_config_free(&c);
    }
    ck_assert_mem_eq(scores[0], scores[1], sizeof scores[0]);
    ck_assert_mem_eq(&naive[0], &naive[1], sizeof naive[0]);
    ps_checkpoint_free(&checkpoint);
}
END_TEST

static void make_folder(void)
{
    folder = folder_make();
    data = new_dir("data.h5");
    config = new_dir("config.yaml");
    file_write(config.text, config_text, sizeof config_text - 1);
}

static void remove_folder(void)
{
    folder_remove(folder.text);
}

int main(void)
{
    const char *wanted = getenv("PS_TEST_DEVICE"), *of = getenv("PS_PROGRAMS");
    device = wanted ? wanted : "cpu";
    programs = of ? of : ".";

    Suite *suite = suite_create("missing");
    TCase *c = tcase_create("data"), *p = tcase_create("programs");
    tcase_set_timeout(c, 300);
    tcase_add_checked_fixture(c, make_folder, remove_folder);
    tcase_add_test(c, taken_where_asked);
    tcase_add_test(c, scaler_by_hand);
    tcase_add_test(c, imports_of_nothing);
    tcase_add_test(c, panels_by_hand);
    tcase_add_test(c, seasonal_by_hand);
    tcase_add_test(c, naive_by_hand);
    tcase_add_test(c, breakdown_by_hand);
    tcase_add_test(c, parts_observed);
    tcase_add_test(c, streams);
    tcase_add_test(c, picks);
    tcase_add_test(c, picks_windows);
    tcase_add_test(c, picks_refused);
    suite_add_tcase(suite, c);
    tcase_set_timeout(p, 300);
    tcase_add_checked_fixture(p, make_folder, remove_folder);
    tcase_add_test(p, same_bits);
    tcase_add_test(p, channels_by_name);
    tcase_add_test(p, from_csv_to_forecasts);
    tcase_add_test(p, panels_from_csv);
    tcase_add_test(p, library_takes_holes);
    tcase_add_test(p, nothing_observed);
    tcase_add_test(p, pretraining_refused);
    tcase_add_test(p, streamed_scores);
    suite_add_tcase(suite, p);
    return run_suite(suite, CK_FORK_GETENV) != 0;
}
