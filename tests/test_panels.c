/* Panels: many series of one channel, with lengths and starts of their own. */
#include "tests/programs.h"
#include "tests/suite.h"

#include <math.h>

#include "data/batches.h"
#include "data/dates.h"
#include "data/import.h"
#include "data/panel.h"
#include "data/series_file.h"

enum { L = 8, H = 3, BATCH = 16, MOST_SERIES = 64, MOST_ROWS = 1 << 19 };

static struct path data;

/* ---- panels ---- */

static uint64_t drawn = 1;

static int64_t draw(int64_t below)
{
    drawn = drawn * 6364136223846793005u + 1442695040888963407u;
    return (int64_t)((drawn >> 33) % (uint64_t)below);
}

/* A panel in memory. */
struct made {
    struct ps_panel panel;
    int64_t offsets[MOST_SERIES + 1], start[MOST_SERIES], id_at[MOST_SERIES];
    char ids[MOST_SERIES * 16];
    float values[MOST_ROWS];
};

static void make_panel(struct made *m, int64_t series, const int64_t *lengths)
{
    int64_t used = 0;
    memset(m, 0, sizeof *m);
    for (int64_t i = 0; i < series; i++) {
        m->offsets[i + 1] = m->offsets[i] + lengths[i];
        m->start[i] = 1500000000 + 3600 * i;
        m->id_at[i] = used;
        used += sprintf(m->ids + used, "item %d", (int)i) + 1;
    }
    ck_assert_int_le(m->offsets[series], MOST_ROWS);
    for (int64_t r = 0; r < m->offsets[series]; r++) {
        m->values[r] = (float)r + 10 * sinf((float)r);
    }
    m->panel = (struct ps_panel){.series = series,
                                 .offsets = m->offsets,
                                 .start = m->start,
                                 .id_at = m->id_at,
                                 .ids = m->ids,
                                 .ids_bytes = used,
                                 .frequency = "1h"};
}

static void write_panel(const struct made *m)
{
    OK(ps_panel_write(data.text, &m->panel, m->values, "a test"));
}

static void random_panel(struct made *m, int64_t longest)
{
    int64_t lengths[MOST_SERIES], n = 2 + draw(MOST_SERIES - 2);
    for (int64_t i = 0; i < n; i++) {
        lengths[i] = 1 + draw(i % 3 == 0 ? longest : 40);
    }
    lengths[0] = longest;
    make_panel(m, n, lengths);
}

static struct made made;

/* ---- reading ---- */

START_TEST(reads)
{
    static const int64_t lengths[] = {5, 1, 7};
    make_panel(&made, 3, lengths);
    write_panel(&made);
    struct ps_series *s;
    OK(ps_series_open(data.text, &s));
    ck_assert_int_eq(s->layout, PS_LAYOUT_SERIES);
    ck_assert_int_eq(s->rows, 13);
    ck_assert_int_eq(s->channels, 1);
    ck_assert_mem_eq(s->values, made.values, 13 * sizeof(float));
    const struct ps_panel *p = s->panel;
    ck_assert_int_eq(p->series, 3);
    ck_assert_mem_eq(p->offsets, made.offsets, 4 * sizeof(int64_t));
    ck_assert_mem_eq(p->start, made.start, 3 * sizeof(int64_t));
    ck_assert_str_eq(p->frequency, "1h");
    ck_assert_str_eq(ps_panel_id(p, 0), "item 0");
    ck_assert_str_eq(ps_panel_id(p, 2), "item 2");
    static const int of[13] = {0, 0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 2};
    for (int r = 0; r < 13; r++) {
        ck_assert_int_eq(ps_panel_series(p, r), of[r]);
    }
    ck_assert_int_eq(ps_panel_time(p, 1, 5), 1500000000 + 3600 + 5 * 3600);
    ck_assert_str_eq(ps_panel_some(p, (char[]){1, 0, 1}).text, "\"item 0\", \"item 2\"");
    /* Where borders lie is part of what the data are. */
    uint64_t fingerprint = s->fingerprint;
    ps_series_close(s);
    static const int64_t others[] = {5, 2, 6};
    make_panel(&made, 3, others);
    write_panel(&made);
    OK(ps_series_open(data.text, &s));
    ck_assert_uint_ne(s->fingerprint, fingerprint);
    ps_series_close(s);
}
END_TEST

static void overwrite(const char *name, hid_t type, const void *values)
{
    hid_t file = H5Fopen(data.text, H5F_ACC_RDWR, H5P_DEFAULT), set = H5Dopen2(file, name, H5P_DEFAULT);
    ck_assert_int_ge(H5Dwrite(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values), 0);
    H5Dclose(set);
    H5Fclose(file);
}

static void replace(const char *name, hid_t type, hsize_t count, const void *values)
{
    hid_t file = H5Fopen(data.text, H5F_ACC_RDWR, H5P_DEFAULT), space = H5Screate_simple(1, &count, NULL);
    H5Ldelete(file, name, H5P_DEFAULT);
    if (values != NULL) {
        hid_t set = H5Dcreate2(file, name, type, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
        ck_assert_int_ge(H5Dwrite(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values), 0);
        H5Dclose(set);
    }
    H5Sclose(space);
    H5Fclose(file);
}

static void set_frequency(const char *text)
{
    hid_t file = H5Fopen(data.text, H5F_ACC_RDWR, H5P_DEFAULT), set = H5Dopen2(file, "values", H5P_DEFAULT);
    H5Adelete(set, "frequency");
    if (text != NULL) {
        hid_t type = H5Tcopy(H5T_C_S1), space = H5Screate(H5S_SCALAR);
        H5Tset_size(type, strlen(text) + 1);
        hid_t attribute = H5Acreate2(set, "frequency", type, space, H5P_DEFAULT, H5P_DEFAULT);
        H5Awrite(attribute, type, text);
        H5Aclose(attribute);
        H5Sclose(space);
        H5Tclose(type);
    }
    H5Dclose(set);
    H5Fclose(file);
}

static void expect_unreadable(const char *says)
{
    struct ps_series *s;
    ck_assert_int_eq(ps_series_open(data.text, &s), PS_DATA);
    ck_assert_msg(strstr(ps_error_message(), says) && strstr(ps_error_message(), data.text) && !strchr(ps_error_message(), '\n'),
                  "\"%s\" is not in: %s", says, ps_error_message());
    ck_assert_ptr_null(s);
}

/* Each break of a good file is named. */
START_TEST(refuses)
{
    static const int64_t lengths[] = {5, 4, 7};
    make_panel(&made, 3, lengths);
    for (int i = 0;; i++) {
        write_panel(&made);
        switch (i) {
        case 0:
            overwrite("offsets", H5T_NATIVE_INT64, (int64_t[]){0, 9, 5, 16});
            expect_unreadable("/offsets of series 1 (counted from 0) go from 9 to 5");
            break;
        case 1:
            overwrite("offsets", H5T_NATIVE_INT64, (int64_t[]){0, 5, 5, 16});
            expect_unreadable("each series has one row at least");
            break;
        case 2:
            overwrite("offsets", H5T_NATIVE_INT64, (int64_t[]){0, 5, 9, 15});
            expect_unreadable("/offsets go from 0 to 15: expected 0 to 16");
            break;
        case 3:
            overwrite("offsets", H5T_NATIVE_INT64, (int64_t[]){1, 5, 9, 16});
            expect_unreadable("/offsets go from 1 to 16");
            break;
        case 4:
            overwrite("offsets", H5T_NATIVE_INT64, (int64_t[]){0, INT64_MAX, 9, 16});
            expect_unreadable("end at 9223372036854775807: /values has 16 rows");
            break;
        case 5:
            overwrite("offsets", H5T_NATIVE_INT64, (int64_t[]){0, INT64_MIN, 9, 16});
            expect_unreadable("/offsets of series 0");
            break;
        case 6:
            replace("offsets", H5T_NATIVE_INT64, 1, (int64_t[]){16});
            expect_unreadable("/offsets must be [series + 1]");
            break;
        case 7:
            replace("offsets", H5T_NATIVE_DOUBLE, 4, (double[]){0, 5, 9, 16});
            expect_unreadable("/offsets must be int64");
            break;
        case 8:
            replace("offsets", 0, 1, NULL);
            expect_unreadable("has neither /series nor /inputs and /targets, nor a panel's /values and /offsets");
            break;
        case 9:
            replace("ids", H5T_NATIVE_INT64, 3, (int64_t[]){1, 2, 3});
            expect_unreadable("/ids must be 3 texts");
            break;
        case 10: {
            hid_t type = H5Tcopy(H5T_C_S1);
            H5Tset_size(type, 2);
            replace("ids", type, 3, "a\0b\0a\0");
            H5Tclose(type);
            expect_unreadable("/ids names two series \"a\"");
            break;
        }
        case 11:
            replace("start", H5T_NATIVE_INT64, 2, (int64_t[]){1, 2});
            expect_unreadable("/start has 2 times, and /offsets 3 series");
            break;
        case 12:
            overwrite("start", H5T_NATIVE_INT64, (int64_t[]){0, INT64_MAX, 0});
            expect_unreadable("/start of series 1 (counted from 0) is 9223372036854775807");
            break;
        case 13:
            set_frequency(NULL);
            expect_unreadable("no attribute frequency");
            break;
        case 14:
            set_frequency("0h");
            expect_unreadable("attribute frequency of /values is \"0h\"");
            break;
        case 15:
            set_frequency("1 fortnight");
            expect_unreadable("attribute frequency of /values is \"1 fortnight\"");
            break;
        case 16: {
            float values[16] = {[11] = NAN};
            overwrite("values", H5T_NATIVE_FLOAT, values);
            expect_unreadable("/values holds NaN in series \"item 2\", row 2 of it (counted from 0)");
            break;
        }
        case 17: {
            float values[16] = {[0] = -INFINITY};
            overwrite("values", H5T_NATIVE_FLOAT, values);
            expect_unreadable("/values holds -Inf in series \"item 0\", row 0 of it");
            break;
        }
        case 18: {
            float values[2] = {0};
            replace("series", H5T_NATIVE_FLOAT, 2, values);
            expect_unreadable("both /series and /values");
            break;
        }
        case 19:
            replace("values", H5T_NATIVE_INT64, 16, made.values);
            expect_unreadable("/values has type int64");
            break;
        case 20:
            set_frequency("1000000y");
            expect_unreadable("an end before the year 10000");
            break;
        default:
            return;
        }
    }
}
END_TEST

/* As h5py stores texts, chunked and compressed lists, and numbers of other widths. */
START_TEST(other_storage)
{
    static const int64_t lengths[] = {5, 4, 7};
    make_panel(&made, 3, lengths);
    write_panel(&made);
    hid_t text = H5Tcopy(H5T_C_S1);
    H5Tset_size(text, H5T_VARIABLE);
    replace("ids", text, 3, (const char *[]){"one", "a longer name than before, \xc3\xa9t\xc3\xa9", ""});
    H5Tclose(text);
    replace("offsets", H5T_NATIVE_INT32, 4, (int32_t[]){0, 5, 9, 16});
    struct ps_series *s;
    OK(ps_series_open(data.text, &s));
    ck_assert_str_eq(ps_panel_id(s->panel, 1), "a longer name than before, \xc3\xa9t\xc3\xa9");
    ck_assert_str_eq(ps_panel_id(s->panel, 2), "");
    ck_assert_mem_eq(s->panel->offsets, made.offsets, 4 * sizeof(int64_t));
    ps_series_close(s);
}
END_TEST

/* ---- windows ---- */

START_TEST(splits_by_hand)
{
    /* seq_len 4, pred_len 2. */
    static const int64_t lengths[] = {30, 9, 8, 3, 7};
    const double counts[3] = {100, 3, 2};
    make_panel(&made, 5, lengths);
    write_panel(&made);
    struct ps_series *s;
    struct ps_splits splits;
    OK(ps_series_open(data.text, &s));
    OK(ps_splits_make(s, counts, 4, 2, &splits));
    /* Series 0, rows 0 to 29: training 0 to 24, 25 - 6 + 1 windows; validation 25 to 27, inputs from 21 on: windows 21, 22; test
     * 28, 29: window 24. Series 1, 30 to 38: training 30 to 33 has no window, validation 34 to 36: 30, 31; test 37, 38: 33. Series
     * 2, 39 to 46: validation 42 to 44, and inputs begin at 39: window 39, whose targets are 43 and 44; test: 41. Series 3 has
     * none. Series 4, 50 to 56: validation 52 to 54: no window, its targets would be 54 and 55; test: 51. */
    ck_assert_int_eq(splits.runs[PS_TRAIN].n, 1);
    ck_assert_int_eq(splits.first[PS_TRAIN], 0);
    ck_assert_int_eq(splits.count[PS_TRAIN], 20);
    ck_assert_int_eq(splits.train_series, 1);
    ck_assert_mem_eq(splits.left_out, ((char[]){0, 1, 1, 1, 1}), 5);
    ck_assert_int_eq(splits.count[PS_VALIDATION], 5);
    ck_assert_int_eq(splits.runs[PS_VALIDATION].n, 3);
    ck_assert_mem_eq(splits.runs[PS_VALIDATION].first, ((int64_t[]){21, 30, 39}), 3 * sizeof(int64_t));
    ck_assert_mem_eq(splits.runs[PS_VALIDATION].before, ((int64_t[]){0, 2, 4, 5}), 4 * sizeof(int64_t));
    ck_assert_int_eq(splits.count[PS_TEST], 4);
    ck_assert_mem_eq(splits.runs[PS_TEST].first, ((int64_t[]){24, 33, 41, 51}), 4 * sizeof(int64_t));
    ck_assert_int_eq(splits.fitted[0].first, 0);
    ck_assert_int_eq(splits.fitted[0].count, 25);
    ck_assert_int_eq(splits.fitted[1].first, 30);
    ck_assert_int_eq(splits.fitted[1].count, 9);
    const struct ps_order order = {.first = 21, .count = 5, .runs = &splits.runs[PS_VALIDATION]};
    int32_t index[5];
    ps_order_draw(&order, index);
    ck_assert_mem_eq(index, ((int32_t[]){21, 22, 30, 31, 39}), sizeof index);
    ps_splits_free(&splits);
    ck_assert_int_eq(ps_splits_make(s, (double[]){1, 3, 2}, 4, 2, &splits), PS_DATA);
    ck_assert_ptr_nonnull(strstr(ps_error_message(), "the train part has no window: none of its 5 series"));
    ck_assert_int_eq(ps_splits_make(s, (double[]){0.9, 0.9, 0}, 4, 2, &splits), PS_DATA);
    ck_assert_int_eq(ps_splits_make(s, (double[]){2.5, 3, 2}, 4, 2, &splits), PS_USAGE);
    ps_series_close(s);
}
END_TEST

/* By times, of series that begin anywhere: a window is of the part that all its targets lie in, of training with all its rows. */
START_TEST(splits_by_times)
{
    for (int round = 0; round < 40; round++) {
        random_panel(&made, 1 + draw(200));
        const char *frequency = round % 4 == 3 ? "1mo" : "1h";
        snprintf(made.panel.frequency, sizeof made.panel.frequency, "%s", frequency);
        ck_assert_int_eq(ps_steps_read(frequency, &made.panel.step), 1);
        for (int64_t i = 0; i < made.panel.series; i++) {
            made.start[i] += draw(100) * (round % 4 == 3 ? 30 * 86400 : 1800);
        }
        write_panel(&made);
        struct ps_series *s;
        struct ps_splits splits = {0};
        OK(ps_series_open(data.text, &s));
        int64_t from[2];
        for (int i = 0; i < 2; i++) { /* some fall on a row, some between two */
            const int64_t series = draw(made.panel.series), row = draw(made.offsets[series + 1] - made.offsets[series] + 2) - 1;
            from[i] = ps_panel_time(&made.panel, series, row) + draw(3) - 1;
        }
        if (from[0] > from[1]) {
            const int64_t swapped = from[0];
            from[0] = from[1];
            from[1] = swapped;
        }
        OK(ps_panel_splits_dated(s, from, 0, L, H, &splits));
        int64_t n[PS_SPLITS] = {0}, run[PS_SPLITS] = {0};
        for (int64_t i = 0; i < made.panel.series; i++) {
            const int64_t rows = made.offsets[i + 1] - made.offsets[i];
            int trained = 0;
            int64_t before[2] = {0, 0};
            for (int64_t w = 0; w < rows; w++) {
                const int64_t time = ps_panel_time(&made.panel, i, w);
                before[0] += time < from[0];
                before[1] += time < from[1];
            }
            for (int64_t w = 0; w + L + H <= rows; w++) {
                const int64_t first = ps_panel_time(&made.panel, i, w + L), last = ps_panel_time(&made.panel, i, w + L + H - 1);
                const int part = last < from[0]                       ? PS_TRAIN
                                 : first >= from[0] && last < from[1] ? PS_VALIDATION
                                 : first >= from[1]                   ? PS_TEST
                                                                      : -1;
                if (part < 0) {
                    continue;
                }
                const struct ps_runs *runs = &splits.runs[part];
                run[part] += run[part] < runs->n && n[part] >= runs->before[run[part] + 1];
                ck_assert_msg(n[part] < splits.count[part] &&
                                  runs->first[run[part]] + n[part] - runs->before[run[part]] == made.offsets[i] + w,
                              "%s, series %d, row %d: is no %s window", frequency, (int)i, (int)w, ps_split_name(part));
                n[part]++;
                trained |= part == PS_TRAIN;
            }
            ck_assert_int_eq(splits.left_out[i], !trained);
            ck_assert_int_eq(splits.fitted[i].first, made.offsets[i]);
            ck_assert_int_eq(splits.fitted[i].count, trained ? before[0] : rows);
        }
        ck_assert_mem_eq(n, splits.count, sizeof n);
        ps_splits_free(&splits);
        enum ps_status status = ps_splits_dated(s, from, 0, L, H, &splits);
        ck_assert_int_eq(status, n[0] && n[1] && n[2] ? PS_OK : PS_DATA);
        ck_assert(status == PS_OK || strstr(ps_error_message(), "part has no window: none of its"));
        ps_splits_free(&splits);
        ps_series_close(s);
    }
}
END_TEST

static int rising(const void *a, const void *b)
{
    return (*(const int32_t *)a > *(const int32_t *)b) - (*(const int32_t *)a < *(const int32_t *)b);
}

/* Every window that lies in one series, and whose targets lie in one part, is that part's, once; no other is. An epoch takes each
 * of them once. */
START_TEST(splits_random)
{
    static int32_t expected[MOST_ROWS], found[MOST_ROWS];
    static char seen[MOST_ROWS]; /* rows that a part's targets lie in: bit 1 << part */
    for (int round = 0; round < 60; round++) {
        drawn = 100 + (uint64_t)round;
        random_panel(&made, 60 + draw(200));
        write_panel(&made);
        struct ps_series *s;
        struct ps_splits splits;
        const double counts[3] = {(double)draw(300), (double)(H + draw(20)), (double)(H + draw(20))},
                     fractions[3] = {0.6, 0.2, 0.2};
        const double *split = round % 2 ? counts : fractions;
        OK(ps_series_open(data.text, &s));
        enum ps_status status = ps_splits_make(s, split, L, H, &splits);
        memset(seen, 0, sizeof seen);
        int64_t trained = 0;
        for (int part = 0; part < PS_SPLITS; part++) {
            int64_t n = 0;
            for (int64_t i = 0; i < made.panel.series; i++) {
                int64_t begin = made.offsets[i], end = made.offsets[i + 1], T = end - begin, rows[3];
                if (split == fractions) {
                    rows[0] = (int64_t)floor(0.6 * (double)T);
                    rows[1] = (int64_t)floor(0.2 * (double)T);
                    rows[2] = T - rows[0] - rows[1];
                } else {
                    rows[2] = fmin(counts[2], (double)T);
                    rows[1] = fmin(counts[1], (double)(T - rows[2]));
                    rows[0] = fmin(counts[0], (double)(T - rows[2] - rows[1]));
                }
                int64_t to = part == 2   ? end
                             : part == 1 ? end - rows[2]
                                         : end - rows[2] - rows[1],
                        from = to - rows[part], before = n;
                for (int64_t w = begin; w + L + H <= to; w++) {
                    if (part == PS_TRAIN ? w >= from : w + L >= from) {
                        expected[n++] = (int32_t)w;
                    }
                }
                trained += part == PS_TRAIN && n > before;
            }
            if (n == 0) {
                ck_assert_int_eq(status, PS_DATA);
                break;
            }
            if (status != PS_OK) {
                continue; /* for a later part */
            }
            ck_assert_int_eq(splits.count[part], n);
            struct ps_order order = {.first = splits.first[part], .count = n, .seed = 3, .runs = &splits.runs[part]};
            ps_order_draw(&order, found);
            ck_assert_mem_eq(found, expected, (size_t)n * sizeof *found);
            for (int64_t k = 0; k < n; k++) {
                ck_assert_int_eq(ps_order_before(&order, expected[k]), k);
                ck_assert_int_eq(ps_order_before(&order, expected[k] + 1), k + 1);
                ck_assert_int_eq(ps_order_window(&order, k), expected[k]);
                for (int64_t r = expected[k] + L; r < expected[k] + L + H; r++) {
                    seen[r] |= (char)(1 << part);
                }
            }
            int64_t at = draw(n), some = draw(n - at) + 1;
            ps_order_windows(&order, at, some, found);
            ck_assert_mem_eq(found, expected + at, (size_t)some * sizeof *found);
            order.shuffled = 1;
            ps_order_draw(&order, found);
            ck_assert(n < 12 || memcmp(found, expected, (size_t)n * sizeof *found) != 0);
            qsort(found, (size_t)n, sizeof *found, rising);
            ck_assert_mem_eq(found, expected, (size_t)n * sizeof *found);
        }
        if (status == PS_OK) {
            ck_assert_int_eq(splits.train_series, trained);
            for (int64_t r = 0; r < s->rows; r++) { /* no row is forecast in two parts */
                ck_assert_int_eq(seen[r] & (seen[r] - 1), 0);
            }
            ps_splits_free(&splits);
        }
        ps_series_close(s);
    }
}
END_TEST

START_TEST(scales_by_series)
{
    static const int64_t lengths[] = {40, 6, 40};
    make_panel(&made, 3, lengths);
    for (int r = 46; r < 86; r++) {
        made.values[r] = 0.1f;
    }
    write_panel(&made);
    struct ps_series *s;
    struct ps_splits splits;
    struct ps_scaler scaler;
    OK(ps_series_open(data.text, &s));
    OK(ps_splits_make(s, (double[]){100, 5, 5}, L, H, &splits));
    OK(ps_scaler_fit(s, &splits, &scaler));
    double mean[2] = {0}, std[2] = {0};
    for (int i = 0; i < 2; i++) { /* training rows of the first; all of the second, which has no window */
        int begin = i == 0 ? 0 : 40, n = i == 0 ? 30 : 6;
        for (int r = begin; r < begin + n; r++) {
            mean[i] += (double)made.values[r] / n;
        }
        for (int r = begin; r < begin + n; r++) {
            std[i] += (made.values[r] - mean[i]) * (made.values[r] - mean[i]) / n;
        }
        std[i] = sqrt(std[i]);
        ck_assert_double_eq_tol(scaler.mean[i], mean[i], 1e-12);
        ck_assert_double_eq_tol(scaler.std[i], std[i], 1e-12);
    }
    ck_assert(scaler.mean[2] == (double)0.1f && scaler.std[2] == 1 && scaler.constant == 1 && scaler.is_constant[2]);
    OK(ps_scaler_apply(&scaler, s));
    for (int r = 0; r < 86; r++) {
        int i = r < 40 ? 0 : r < 46 ? 1 : 2;
        ck_assert(s->values[r] == (float)((made.values[r] - scaler.mean[i]) / scaler.std[i]));
        float back = s->values[r];
        ps_scaler_restore(&scaler, r, 1, &back);
        ck_assert_double_eq_tol(back, made.values[r], 1e-4);
    }
    ps_scaler_free(&scaler);
    ps_splits_free(&splits);
    ps_series_close(s);

    /* What float32 does not hold is named by its series. */
    for (int r = 0; r < 86; r++) {
        made.values[r] = r == 45 ? 3e38f : r >= 40 && r < 46 ? 3e38f : r == 39 ? 3e38f : r % 2 ? 1e-30f : 0;
    }
    write_panel(&made);
    OK(ps_series_open(data.text, &s));
    OK(ps_splits_make(s, (double[]){100, 5, 5}, L, H, &splits));
    OK(ps_scaler_fit(s, &splits, &scaler));
    ck_assert_int_eq(ps_scaler_apply(&scaler, s), PS_DATA);
    ck_assert_msg(strstr(ps_error_message(), "in series \"item 0\", row 39 of it") != NULL, "%s", ps_error_message());
    ps_scaler_free(&scaler);
    ps_splits_free(&splits);
    ps_series_close(s);
}
END_TEST

/* ---- streaming ---- */

/* A limit that leaves `groups` bytes for groups of blocks, beside what HDF5, the windows' order and the rest need. */
static int64_t limit_of(int64_t groups)
{
    int64_t beside = 917504 + made.offsets[made.panel.series] * 4 + ps_panel_bytes(&made.panel) + 2 * BATCH * (L + H) * 4;
    return (beside + groups) * 8 / 7;
}

struct pair {
    struct ps_series *whole, *file;
    struct ps_splits splits;
    struct ps_scaler scaler[2];
    struct ps_window_view view;
    struct ps_groups *groups;
};

static void pair_open(struct pair *p, int64_t limit)
{
    const struct ps_memory memory = {.limit = limit, .seq_len = L, .pred_len = H, .batch = BATCH};
    OK(ps_series_open(data.text, &p->whole));
    OK(ps_series_open_within(data.text, &memory, &p->file));
    ck_assert_ptr_nonnull(p->file->file);
    ck_assert_uint_eq(p->whole->fingerprint, p->file->fingerprint);
    OK(ps_splits_make(p->file, (double[]){0.6, 0.2, 0.2}, L, H, &p->splits));
    OK(ps_scaler_fit(p->whole, &p->splits, &p->scaler[0]));
    OK(ps_scaler_fit(p->file, &p->splits, &p->scaler[1]));
    size_t bytes = (size_t)p->scaler[0].channels * sizeof(double);
    ck_assert_mem_eq(p->scaler[0].mean, p->scaler[1].mean, bytes);
    ck_assert_mem_eq(p->scaler[0].std, p->scaler[1].std, bytes);
    OK(ps_scaler_apply(&p->scaler[0], p->whole));
    p->view = ps_window_view_make(p->whole, L, H);
    OK(ps_groups_open(p->file, &p->scaler[1], L, H, &p->groups));
}

static void pair_close(struct pair *p)
{
    ps_groups_close(p->groups);
    for (int i = 0; i < 2; i++) {
        ps_scaler_free(&p->scaler[i]);
    }
    ps_splits_free(&p->splits);
    ps_series_close(p->whole);
    ps_series_close(p->file);
}

/* The windows of a pass from `begin` on, as rows of values: [*n, L + H]. */
static float *streamed_windows(struct pair *p, const struct ps_order *order, int64_t begin, int64_t *n)
{
    float *windows = malloc((size_t)(order->count - begin + 1) * (L + H) * sizeof *windows);
    *n = 0;
    ps_groups_start(p->groups, order, begin);
    for (;;) {
        struct ps_group group;
        OK(ps_groups_next(p->groups, &group));
        if (group.n == 0) {
            break;
        }
        ck_assert_int_le(*n + group.n, order->count - begin);
        for (int64_t i = 0; i < group.n; i++, ++*n) {
            float *to = windows + *n * (L + H);
            ps_windows_gather(&group.view, group.index + i, 1, to, to + L);
        }
        ps_groups_release(p->groups, &group);
    }
    ps_groups_stop(p->groups);
    return windows;
}

static int by_values(const void *a, const void *b)
{
    return memcmp(a, b, (L + H) * sizeof(float));
}

START_TEST(streaming)
{
    for (int round = 0; round < 6; round++) {
        drawn = 7 + (uint64_t)round;
        int64_t lengths[MOST_SERIES];
        for (int64_t i = 0; i < MOST_SERIES; i++) { /* long stretches without a window, too */
            lengths[i] = round % 2 && i > 10 && i < 50 ? 1 + draw(10) : 3000 + draw(3000);
        }
        lengths[3] = 6000;
        make_panel(&made, MOST_SERIES, lengths);
        write_panel(&made);
        struct pair p;
        pair_open(&p, limit_of(200000 + 20000 * round));
        for (int split = 0; split < PS_SPLITS; split++) {
            struct ps_order order = {.first = p.splits.first[split],
                                     .count = p.splits.count[split],
                                     .seed = 5,
                                     .epoch = 2,
                                     .runs = &p.splits.runs[split]};
            int64_t n, m;
            size_t bytes = (size_t)order.count * (L + H) * sizeof(float);
            int32_t *index = malloc((size_t)order.count * sizeof *index);
            float *expected = malloc(bytes), *found = streamed_windows(&p, &order, 0, &n);
            ps_order_draw(&order, index);
            for (int64_t i = 0; i < order.count; i++) {
                ps_windows_gather(&p.view, index + i, 1, expected + i * (L + H), expected + i * (L + H) + L);
            }
            ck_assert_int_eq(n, order.count);
            ck_assert_mem_eq(found, expected, bytes);
            free(found);

            struct ps_naive_sums sums = {.count = n, .season = 5};
            ps_naive_add(&sums, &p.view, 0, n, index);
            struct ps_naive naive = ps_naive_end(&sums, &p.view), streamed;
            OK(ps_groups_naive(p.groups, &order, 5, &streamed));
            ck_assert_mem_eq(&naive, &streamed, sizeof naive);

            /* Shuffled: each window once, the same again, and from any place on. */
            order.shuffled = 1;
            found = streamed_windows(&p, &order, 0, &n);
            ck_assert_int_eq(n, order.count);
            int64_t begin = draw(n);
            float *rest = streamed_windows(&p, &order, begin, &m);
            ck_assert_int_eq(m, n - begin);
            ck_assert_mem_eq(rest, found + begin * (L + H), (size_t)m * (L + H) * sizeof(float));
            free(rest);
            ck_assert(memcmp(found, expected, bytes) != 0);
            qsort(found, (size_t)n, (L + H) * sizeof(float), by_values);
            qsort(expected, (size_t)n, (L + H) * sizeof(float), by_values);
            ck_assert_mem_eq(found, expected, bytes);
            free(found);
            free(expected);
            free(index);
        }
        pair_close(&p);
    }
}
END_TEST

/* Panels that end with the last second, a step behind it, and so far behind that 64 bits do not hold it; that begin too early. */
START_TEST(outside)
{
    static const struct {
        struct ps_steps step;
        int64_t start, rows;
        int is_outside;
    } cases[] = {
        {{.seconds = 1}, INT64_C(253402300798), 1, 0},
        {{.seconds = 1}, INT64_C(253402300798), 2, 1},
        {{.seconds = 1}, INT64_C(253402300800), 1, 1},
        {{.seconds = 1}, INT64_C(-62135596800), 1, 0},
        {{.seconds = 1}, INT64_C(-62135596801), 1, 1},
        {{.months = 1}, INT64_C(253399622400), 1, 1}, /* 9999-12-01 */
        {{.months = 12}, 0, 8029, 0},
        {{.months = 12}, 0, 8030, 1},
        {{.months = 1000000}, 0, INT32_MAX, 1},
        {{.seconds = INT64_C(86400000000)}, 0, 213503983, 1}, /* 2^64 and a little */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t offsets[] = {0, cases[i].rows}, start = cases[i].start;
        const struct ps_panel p = {.series = 1, .offsets = offsets, .start = &start, .step = cases[i].step};
        ck_assert_msg(ps_panel_outside(&p) == cases[i].is_outside - 1, "case %zu", i);
    }
}
END_TEST

/* ---- from CSV ---- */

static enum ps_status import(const char *csv, enum ps_fill fill, struct ps_panel_imported *done)
{
    const struct ps_import_options options = {.fill = fill};
    struct path in = new_dir("in.csv");
    file_write(in.text, csv, strlen(csv));
    return ps_import_panel(in.text, data.text, "item,ts,v", &options, done);
}

/* Rows of three series among one another and out of order, a row and a value missing. */
START_TEST(imports)
{
    static const char csv[] = "item,ts,more,v\n"
                              "b,2020-01-01 05:00,x,10\n"
                              "a,2020-01-01 00:00,x,1\n"
                              "a,2020-01-01 01:00,\"x,y\",2\n"
                              "b,2020-01-01 06:00,x,11.5\n"
                              "a,2020-01-01 05:00,x,6\n"
                              "b,2020-01-01 04:00,x,9\n"
                              "a,2020-01-01 02:00,x,NA\n"
                              "a,2020-01-01 03:00,x,4\n"
                              "\"c,1\",1969-12-31 23:00,x,-7e-1\n";
    struct ps_panel_imported done;
    ck_assert_int_eq(import(csv, PS_FILL_NONE, &done), PS_DATA);
    ck_assert_msg(strstr(ps_error_message(), "1 rows are missing between others in 1 of 3 series, at a step of 1h, and 1 values"),
                  "%s", ps_error_message());
    for (int fill = PS_FILL_PREVIOUS; fill <= PS_FILL_LINEAR; fill++) {
        struct ps_series *s;
        OK(import(csv, fill, &done));
        ck_assert_int_eq(done.series, 3);
        ck_assert_int_eq(done.rows, 10);
        ck_assert_int_eq(done.gaps, 1);
        ck_assert_int_eq(done.with_gaps, 1);
        ck_assert_int_eq(done.missing, 1);
        OK(ps_series_open(data.text, &s));
        const struct ps_panel *p = s->panel;
        const float previous[] = {9, 10, 11.5f, 1, 2, 2, 4, 4, 6, -0.7f}, linear[] = {9, 10, 11.5f, 1, 2, 3, 4, 5, 6, -0.7f};
        ck_assert_mem_eq(s->values, fill == PS_FILL_LINEAR ? linear : previous, sizeof linear);
        ck_assert_mem_eq(p->offsets, ((int64_t[]){0, 3, 9, 10}), 4 * sizeof(int64_t));
        ck_assert_mem_eq(p->start, ((int64_t[]){1577851200, 1577836800, -3600}), 3 * sizeof(int64_t));
        ck_assert_str_eq(ps_panel_id(p, 0), "b");
        ck_assert_str_eq(ps_panel_id(p, 2), "c,1");
        ck_assert_str_eq(p->frequency, "1h");
        ps_series_close(s);
    }
    /* Months of the calendar. */
    OK(import("ts,v,item\n2019-12-31,1,a\n2020-01-31,2,a\n2020-02-29,3,a\n2020-04-30,5,a\n2020-02-01,1,b\n2020-03-01,2,b\n",
              PS_FILL_LINEAR, &done));
    ck_assert_str_eq(done.period, "1mo");
    ck_assert_int_eq(done.rows, 7);
    ck_assert_int_eq(done.gaps, 1);
}
END_TEST

START_TEST(imports_not)
{
#define HEAD "item,ts,v\na,2020-01-01,1\na,2020-01-02,2\na,2020-01-03,3\n"
    static const struct {
        const char *csv, *says;
        enum ps_status status;
    } cases[] = {
        {HEAD "a,2020-01-02,4\n", ":5: column 2 (ts): \"2020-01-02\" is there twice for series \"a\"", PS_DATA},
        {HEAD "a,2020-01-03,4\n", ":5: column 2 (ts): \"2020-01-03\" is there twice for series \"a\"", PS_DATA},
        {HEAD "a,2020-01-03 12:00,4\n", ":5: column 2 (ts): \"2020-01-03 12:00\" is no whole number of steps of 1d", PS_DATA},
        {HEAD ",2020-01-03,4\n", ":5: column 1 (item): \"\" names no series", PS_DATA},
        {HEAD "b,2020-13-03,4\n", ":5: column 2 (ts): \"2020-13-03\" is not a date", PS_DATA},
        {HEAD "b,0000-12-31,4\n", ":5: column 2 (ts): \"0000-12-31\" is not a date", PS_DATA},
        {HEAD "b,9999-12-31,4\n", "the row behind the last of series \"b\", 9999-12-31 00:00:00, is after the year 9999", PS_DATA},
        {"item,ts,v\na,9999-08-01,1\na,9999-10-01,1\na,9999-12-01,1\n", "at a step of 2mo the row behind the last of", PS_DATA},
        {HEAD "b,2020-01-03,four\n", ":5: column 3 (v): \"four\" is not a number", PS_DATA},
        {HEAD "b,2020-01-03,1e39\n", ":5: column 3 (v): \"1e39\" is not finite", PS_DATA},
        {HEAD "b,2020-01-03\n", ":5: has 2 fields, and the header has 3", PS_DATA},
        {HEAD "b,2020-01-03,\n", "series \"b\" holds no value in any row", PS_DATA},
        {"item,ts,v\na,2020-01-01,1\nb,2020-01-02,2\n", "no series has two rows", PS_DATA},
        {"item,ts,v\n", "has a header and no rows", PS_DATA},
        {"", "is empty", PS_DATA},
        {"item,time,v\na,2020-01-01,1\n", "no column is named \"ts\"", PS_DATA},
        {"item,ts,v\na,2000-01-01 00:00:00,1\na,2000-01-01 00:00:01,1\na,2001-01-01,1\n", "31622398 rows are missing", PS_DATA},
        {"item,ts,v\na,1200-01-01 00:00:00,1\na,1200-01-01 00:00:01,1\na,2020-01-01,1\n", "have more than 2147483647 rows",
         PS_DATA},
    };
    struct ps_panel_imported done;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ck_assert_int_eq(import(cases[i].csv, PS_FILL_LINEAR, &done), cases[i].status);
        ck_assert_msg(strstr(ps_error_message(), cases[i].says) && !strchr(ps_error_message(), '\n'), "\"%s\" is not in: %s",
                      cases[i].says, ps_error_message());
    }
    static const char *const columns[] = {"item", "item,ts", "item,ts,v,v", "item,ts,ts", ",ts,v", ""};
    struct path in = new_dir("in.csv");
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++) {
        file_write(in.text, HEAD, strlen(HEAD));
        ck_assert_int_eq(ps_import_panel(in.text, data.text, columns[i], &(struct ps_import_options){0}, &done), PS_USAGE);
    }
}
END_TEST

/* What was written as a CSV, in any order of its rows, comes back. */
START_TEST(imports_random)
{
    static int32_t order[MOST_ROWS];
    for (int round = 0; round < 8; round++) {
        drawn = 900 + (uint64_t)round;
        random_panel(&made, 300);
        struct path in = new_dir("in.csv");
        FILE *csv = fopen(in.text, "w");
        fputs("v,id,when\n", csv);
        int32_t rows = (int32_t)made.offsets[made.panel.series], at[MOST_SERIES];
        ps_shuffle(drawn, 0, 0, rows, order);
        if (round % 2) {
            qsort(order, (size_t)rows, sizeof *order, rising);
        }
        int32_t n = 0;
        for (int32_t k = 0; k < rows; k++) {
            int64_t i = ps_panel_series(&made.panel, order[k]);
            int known = 0;
            for (int32_t j = 0; j < n; j++) {
                known |= at[j] == i;
            }
            if (!known) {
                at[n++] = (int32_t)i;
            }
            fprintf(csv, "%.9g,%s,%lld\n", (double)made.values[order[k]], ps_panel_id(&made.panel, i),
                    (long long)(made.start[i] + 3600 * (order[k] - made.offsets[i])));
        }
        fclose(csv);
        struct ps_panel_imported done;
        OK(ps_import_panel(in.text, data.text, "id,when,v", &(struct ps_import_options){0}, &done));
        ck_assert_str_eq(done.period, "1h");
        struct ps_series *s;
        OK(ps_series_open(data.text, &s));
        ck_assert_int_eq(s->rows, rows);
        for (int32_t j = 0; j < n; j++) {
            int64_t begin = made.offsets[at[j]], length = made.offsets[at[j] + 1] - begin;
            ck_assert_str_eq(ps_panel_id(s->panel, j), ps_panel_id(&made.panel, at[j]));
            ck_assert_int_eq(s->panel->start[j], made.start[at[j]]);
            ck_assert_int_eq(s->panel->offsets[j + 1] - s->panel->offsets[j], length);
            ck_assert_mem_eq(s->values + s->panel->offsets[j], made.values + begin, (size_t)length * sizeof(float));
        }
        ps_series_close(s);
    }
}
END_TEST

/* ---- training ---- */

static void write_config(const char *path, const char *more)
{
    char text[2048];
    int n = snprintf(
        text, sizeof text,
        "data:\n  path: %s\n  season: 5\n%smodel:\n  seq_len: 8\n  pred_len: 3\n  patch_len: 4\n  stride: 2\n  d_model: 16\n"
        "  n_heads: 2\n  d_ff: 32\n  n_layers: 1\ntrain:\n  epochs: 3\n  batch_size: 16\nruntime:\n  threads: 1\n",
        path, more);
    file_write(config.text, text, (size_t)n);
}

/* A run that is stopped inside an epoch and goes on ends with the bits of one that was not, streamed too; evaluate finds what test
 * found. */
START_TEST(trains)
{
    int64_t lengths[MOST_SERIES];
    for (int64_t i = 0; i < MOST_SERIES; i++) {
        lengths[i] = 1 + draw(i % 2 ? 12 : _i ? 6000 : 800);
    }
    lengths[3] = 3000;
    make_panel(&made, MOST_SERIES, lengths);
    write_panel(&made);
    char limit[64] = "";
    if (_i) {
        const struct ps_memory memory = {.limit = limit_of(300000), .seq_len = L, .pred_len = H, .batch = BATCH};
        struct ps_series *s;
        OK(ps_series_open_within(data.text, &memory, &s));
        ck_assert_ptr_nonnull(s->file);
        ps_series_close(s);
        snprintf(limit, sizeof limit, "  memory_limit: %lld\n", (long long)memory.limit);
    }
    write_config(data.text, limit);
    struct path a = new_dir(_i ? "streamed" : "whole"), b = new_dir(_i ? "streamed-again" : "whole-again");
    struct result r = train(a.text, ARGS());
    ck_assert_msg(r.code == 0 && strstr(r.out, "64 series") && strstr(r.err, "series have too few training rows for a window"),
                  "%d: %s %s", r.code, r.out, r.err);
    result_free(&r);
    setenv("PS_IO_FAULT", "40:term", 1);
    r = train(b.text, ARGS("--set", "train.checkpoint_every=7"));
    unsetenv("PS_IO_FAULT");
    ck_assert_msg(r.code == 143, "%d: %s %s", r.code, r.out, r.err);
    result_free(&r);
    r = train(b.text, ARGS("--resume"));
    ck_assert_msg(r.code == 0, "%d: %s %s", r.code, r.out, r.err);
    result_free(&r);
    expect_same_results(a.text, b.text);

    struct ps_checkpoint best = load(a.text, "best.h5");
    ck_assert_uint_eq(best.by_series, 1);
    ck_assert_int_eq(best.scaler.channels, 1);
    ck_assert(best.scaler.mean[0] == 0 && best.scaler.std[0] == 1);
    ps_checkpoint_free(&best);
    r = run("evaluate", ARGS(in_run(a.text, "checkpoints/best.h5").text, "--json"));
    ck_assert_msg(r.code == 0, "%s", r.err);
    json_t *evaluated = read_json(r.out), *tested = read_test(a.text);
    static const char *const keys[] = {"mse", "mae", "windows"};
    for (int i = 0; i < 3; i++) {
        ck_assert_msg(number_in(evaluated, keys[i]) == number_in(tested, keys[i]), "%s: %s", keys[i], r.out);
    }
    ck_assert(number_in(evaluated, "mase") > 0 && number_in(evaluated, "smape") > 0);
    json_decref(evaluated);
    json_decref(tested);
    result_free(&r);
}
END_TEST

/* Errors by series against those of the saved forecasts, in each series' own units; MASE by the seasonal differences of its
 * training rows, and of all their mean. */
START_TEST(errors_by_series)
{
    enum { SEASON = 5 };
    int64_t lengths[MOST_SERIES];
    for (int64_t i = 0; i < MOST_SERIES; i++) {
        lengths[i] = 1 + draw(i % 3 ? 200 : 12);
    }
    make_panel(&made, MOST_SERIES, lengths);
    write_panel(&made);
    write_config(data.text, "  split: [0.6, 0.2, 0.2]\n");
    struct path dir = new_dir("by-series"), saved = new_dir("by-series.h5"), best = in_run(dir.text, "checkpoints/best.h5");
    struct result r = train(dir.text, ARGS());
    ck_assert_int_eq(r.code, 0);
    result_free(&r);
    r = run("evaluate", ARGS(best.text, "--by", "series", "--json", "--save-forecasts", saved.text, "--original-units"));
    ck_assert_msg(r.code == 0, "%s", r.err);
    json_t *root = read_json(r.out), *all = json_object_get(root, "by_series");
    result_free(&r);
    ck_assert_int_eq((int)json_array_size(all), MOST_SERIES);
    static float forecasts[2][MOST_ROWS];
    hid_t file = H5Fopen(saved.text, H5F_ACC_RDONLY, H5P_DEFAULT);
    for (int i = 0; i < 2; i++) {
        hid_t set = H5Dopen2(file, i == 0 ? "forecasts" : "targets", H5P_DEFAULT);
        ck_assert_int_ge(H5Dread(set, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, forecasts[i]), 0);
        H5Dclose(set);
    }
    H5Fclose(file);
    int64_t at = 0, windows = 0;
    double sum = 0, scaled = 0, squares = 0;
    for (int64_t i = 0; i < MOST_SERIES; i++) {
        const json_t *object = json_array_get(all, (size_t)i);
        const int64_t n = (int64_t)number_in(object, "windows"), T = lengths[i];
        int64_t rows = (int64_t)floor(0.6 * (double)T), first = made.offsets[i];
        ck_assert_str_eq(json_string_value(json_object_get(object, "series")), ps_panel_id(&made.panel, i));
        if (n == 0) {
            ck_assert(json_is_null(json_object_get(object, "mse")));
            continue;
        }
        rows = rows >= L + H ? rows : T;
        double absolutes = 0, percents = 0, scale = 0;
        for (int64_t k = 0; k < n * H; k++, at++) {
            const double y = forecasts[1][at], e = fabs(forecasts[0][at] - y);
            absolutes += e / (double)(n * H);
            percents += 200 * e / (fabs(y) + fabs((double)forecasts[0][at])) / (double)(n * H);
        }
        for (int64_t t = SEASON; t < rows; t++) {
            scale += fabs((double)made.values[first + t] - (double)made.values[first + t - SEASON]) / (double)(rows - SEASON);
        }
        ck_assert_double_eq_tol(number_in(object, "mase"), absolutes / scale, 1e-4 * absolutes / scale);
        ck_assert_double_eq_tol(number_in(object, "smape"), percents, 1e-3 * percents);
        sum += number_in(object, "mase");
        scaled++;
        windows += n;
        squares += number_in(object, "mse") * (double)n;
    }
    ck_assert_int_eq(at, windows * H);
    ck_assert_int_eq(windows, (int64_t)number_in(root, "windows"));
    ck_assert_double_eq_tol(number_in(root, "mase"), sum / scaled, 1e-9 * sum);
    ck_assert_double_eq_tol(number_in(root, "mse"), squares / (double)windows, 1e-5);
    json_decref(root);

    /* Every window of every series. */
    r = run("evaluate", ARGS(best.text, "--split", "all", "--by", "series"));
    ck_assert_msg(r.code == 0 && strstr(r.out, "split all") && strstr(r.out, "\nitem 63 "), "%s %s", r.out, r.err);
    int64_t expected = 0;
    for (int64_t i = 0; i < MOST_SERIES; i++) {
        expected += lengths[i] >= L + H ? lengths[i] - L - H + 1 : 0;
    }
    ck_assert_msg(strstr(r.out, path_of("windows %d\n", (int)expected).text) != NULL, "%d: %s", (int)expected, r.out);
    result_free(&r);
}
END_TEST

/* The values of a CSV of forecasts, [series, H]; ids and times are checked against the panel. */
static void read_forecasts(const char *path, const struct made *m, float *values)
{
    char *text = file_read(path, NULL), *rest = text, *line = strsep(&rest, "\n");
    ck_assert_str_eq(line, "id,time,value");
    for (int64_t i = 0; i < m->panel.series; i++) {
        for (int64_t h = 0; h < H; h++) {
            const int64_t time = m->start[i] + 3600 * (m->offsets[i + 1] - m->offsets[i] + h);
            struct path expected = path_of("%s,%s,", ps_panel_id(&m->panel, i), ps_date_text(time).text);
            line = strsep(&rest, "\n");
            ck_assert_msg(line && strncmp(line, expected.text, strlen(expected.text)) == 0, "%s: not %s", line, expected.text);
            values[i * H + h] = strtof(line + strlen(expected.text), NULL);
        }
    }
    ck_assert(rest && !*rest);
    free(text);
}

/* The made panel without the last H rows of each series. */
static void cut_ends(void)
{
    static struct made cut;
    int64_t lengths[MOST_SERIES];
    for (int64_t i = 0; i < made.panel.series; i++) {
        lengths[i] = made.offsets[i + 1] - made.offsets[i] - H;
    }
    make_panel(&cut, made.panel.series, lengths);
    for (int64_t i = 0; i < made.panel.series; i++) {
        memcpy(cut.values + cut.offsets[i], made.values + made.offsets[i], (size_t)lengths[i] * sizeof(float));
    }
    make_panel(&made, cut.panel.series, lengths);
    memcpy(made.values, cut.values, sizeof made.values);
}

/* Without the last rows of each series, forecast finds for them what evaluate does with them. */
START_TEST(forecasts)
{
    int64_t lengths[MOST_SERIES];
    for (int64_t i = 0; i < MOST_SERIES; i++) {
        lengths[i] = H + 1 + draw(i % 5 ? 100 : 12);
    }
    make_panel(&made, MOST_SERIES, lengths);
    write_panel(&made);
    write_config(data.text, "  split: [1000, 5, 5]\n  standardize: false\n");
    struct path dir = new_dir("forecasts"), saved = new_dir("saved.h5"), out = new_dir("out.csv"), again = new_dir("out.h5");
    struct path best = in_run(dir.text, "checkpoints/best.h5");
    struct result r = train(dir.text, ARGS());
    ck_assert_msg(r.code == 0, "%s", r.err);
    result_free(&r);
    expect_done(run("evaluate", ARGS(best.text, "--save-forecasts", saved.text)));
    static float values[MOST_ROWS * H], found[MOST_SERIES * H], scaled[MOST_SERIES * H];
    hid_t file = H5Fopen(saved.text, H5F_ACC_RDONLY, H5P_DEFAULT), set = H5Dopen2(file, "forecasts", H5P_DEFAULT);
    ck_assert_int_ge(H5Dread(set, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, values), 0);
    H5Dclose(set);
    H5Fclose(file);
    int64_t windows[MOST_SERIES]; /* of each series' last test window; -1: it has none */
    int64_t n = 0, compared = 0, filled = 0;
    for (int64_t i = 0; i < MOST_SERIES; i++) {
        const int64_t T = lengths[i], first = T - 5 - L > 0 ? T - 5 - L : 0, count = T - H - L - first + 1;
        n += count > 0 ? count : 0;
        windows[i] = count > 0 ? n - 1 : -1;
        filled += T - H < L;
    }
    cut_ends();
    write_panel(&made);
    r = run("forecast", ARGS(best.text, "--out", out.text));
    ck_assert_msg(r.code == 0 &&
                      strstr(r.err, path_of("%d of 64 series are shorter than seq_len, 8, and filled", (int)filled).text) &&
                      lines_of(r.err) == 1,
                  "%s", r.err);
    result_free(&r);
    read_forecasts(out.text, &made, found);
    for (int64_t i = 0; i < MOST_SERIES; i++) {
        if (windows[i] >= 0) {
            ck_assert_mem_eq(found + i * H, values + windows[i] * H, H * sizeof(float));
            compared++;
        }
    }
    ck_assert_int_gt(compared, 30);
    ck_assert_int_gt(filled, 3);

    /* As a panel of their own; and to stdout. */
    r = run("forecast", ARGS(best.text, "--out", again.text));
    result_free(&r);
    struct ps_series *s;
    OK(ps_series_open(again.text, &s));
    ck_assert_mem_eq(s->values, found, sizeof found);
    ck_assert_int_eq(s->panel->start[5], made.start[5] + 3600 * (made.offsets[6] - made.offsets[5]));
    ck_assert_str_eq(ps_panel_id(s->panel, 63), "item 63");
    ps_series_close(s);
    r = run("forecast", ARGS(best.text));
    char *text = file_read(out.text, NULL);
    ck_assert_str_eq(r.out, text);
    free(text);
    result_free(&r);
    r = run("forecast", ARGS(best.text, "--steps", "7"));
    ck_assert(r.code == 0 && lines_of(r.out) == 1 + 7 * 64 && strstr(r.out, ",fed_back\n") && strstr(r.out, ",1\n"));
    result_free(&r);

    /* Scaled by series: of four times the values the forecasts are four times as large. */
    write_config(data.text, "  split: [0.6, 0.2, 0.2]\n");
    dir = new_dir("forecasts-scaled");
    best = in_run(dir.text, "checkpoints/best.h5");
    r = train(dir.text, ARGS());
    ck_assert_msg(r.code == 0, "%s", r.err);
    result_free(&r);
    for (int round = 0; round < 2; round++) {
        r = run("forecast", ARGS(best.text, "--out", out.text, "--overwrite"));
        ck_assert_int_eq(r.code, 0);
        result_free(&r);
        read_forecasts(out.text, &made, round == 0 ? found : scaled);
        for (int64_t row = 0; row < made.offsets[MOST_SERIES]; row++) {
            made.values[row] *= 4;
        }
        write_panel(&made);
    }
    for (int i = 0; i < MOST_SERIES * H; i++) {
        const int64_t rows = made.offsets[i / H + 1] - made.offsets[i / H]; /* a single one has no deviation to scale by */
        ck_assert(rows == 1 || scaled[i] == 4 * found[i]);
    }
}
END_TEST

/* What a program prints, which must succeed. */
static char *printed(const char *program, char *const *arguments)
{
    struct result r = run(program, arguments);
    ck_assert_msg(r.code == 0, "%s: %s", program, r.err);
    free(r.err);
    return r.out;
}

/* The made panel as rows of a CSV, of each series the last first. */
static void write_csv(const char *path)
{
    FILE *to = fopen(path, "w");
    fputs("v,more,ts,item\n", to);
    for (int64_t i = 0; i < made.panel.series; i++) {
        for (int64_t r = made.offsets[i + 1] - 1; r >= made.offsets[i]; r--) {
            const int64_t time = made.start[i] + 3600 * (r - made.offsets[i]);
            fprintf(to, "%.9g,x,%s,%s\n", (double)made.values[r], ps_date_text(time).text, ps_panel_id(&made.panel, i));
        }
    }
    fclose(to);
}

static int float_order(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* The same quantiles in columns and in a panel's datasets, rising; the middle one is the forecast. */
START_TEST(forecasts_of_quantiles)
{
    enum { Q = 3 };
    static const char *const names[Q] = {"q10", "q50", "q90"};
    int64_t lengths[MOST_SERIES];
    for (int64_t i = 0; i < MOST_SERIES; i++) {
        lengths[i] = 70 + draw(20);
    }
    make_panel(&made, MOST_SERIES, lengths);
    write_panel(&made);
    write_config(data.text, "  split: [30, 12, 12]\n");
    struct path dir = new_dir("quantiles"), out = new_dir("quantiles.h5"), best = in_run(dir.text, "checkpoints/best.h5");
    free(printed("train", ARGS(config.text, "--device", (char *)device, "--run-dir", dir.text, "--set", "train.loss=quantile")));
    free(printed("forecast", ARGS(best.text, "--out", out.text)));
    char *all = printed("forecast", ARGS(best.text)), *rest = all, *line = strsep(&rest, "\n");
    ck_assert_str_eq(line, "id,time,value,value_q10,value_q50,value_q90");
    static float values[MOST_SERIES * H], read[Q][MOST_SERIES * H];
    hid_t file = H5Fopen(out.text, H5F_ACC_RDONLY, H5P_DEFAULT);
    for (int q = -1; q < Q; q++) {
        hid_t set = H5Dopen2(file, q < 0 ? "values" : names[q], H5P_DEFAULT);
        ck_assert_int_ge(H5Dread(set, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, q < 0 ? values : read[q]), 0);
        H5Dclose(set);
    }
    H5Fclose(file);
    int rises = 0;
    for (int64_t k = 0; k < MOST_SERIES * H; k++) {
        float value, low, middle, high;
        line = strsep(&rest, "\n");
        ck_assert_int_eq(sscanf(line, "item %*d,%*[^,],%f,%f,%f,%f", &value, &low, &middle, &high), 4);
        ck_assert_msg(value == values[k] && low == read[0][k] && middle == read[1][k] && high == read[2][k], "%s", line);
        ck_assert_msg(value == middle && low <= middle && middle <= high, "%s", line);
        rises += low < high;
    }
    ck_assert_int_gt(rises, MOST_SERIES * H / 2);
    free(all);
    struct result r = run("forecast", ARGS(best.text, "--steps", path_of("%d", H + 1).text));
    ck_assert_msg(r.code == 0 && strstr(r.err, "quantiles of steps beyond") != NULL &&
                      strstr(r.out, "value_q90,fed_back\n") != NULL,
                  "%s", r.err);
    result_free(&r);
}
END_TEST

/* From any time, from several, with intervals, and of a CSV. Rows that end at a time are as the same panel cut there has them. */
START_TEST(forecasts_from_times)
{
    enum { AT = 70, LAST = 3 };
    int64_t lengths[MOST_SERIES];
    for (int64_t i = 0; i < MOST_SERIES; i++) {
        lengths[i] = i % 4 == 1 ? 1 + draw(12) : AT + draw(20); /* some end before, and some begin just before or after */
    }
    make_panel(&made, MOST_SERIES, lengths);
    for (int64_t i = 0; i < MOST_SERIES; i++) {
        made.start[i] += 3600 * (i % 4 == 2 ? AT - 10 : 0);
    }
    write_panel(&made);
    write_config(data.text, "  split: [30, 12, 12]\n");
    struct path dir = new_dir("times"), csv = new_dir("long.csv"), out = new_dir("times.h5"), saved = new_dir("val.h5");
    struct path best = in_run(dir.text, "checkpoints/best.h5");
    free(printed("train", ARGS(config.text, "--device", (char *)device, "--run-dir", dir.text)));

    /* One time after another, and all at once. */
    char *text[LAST], *all, *rest, *line;
    int64_t here = 0, expected = 0;
    for (int64_t i = 0; i < MOST_SERIES; i++) {
        const int64_t rows = AT - (made.start[i] - made.start[0]) / 3600 + 1;
        const int has = rows >= 1 && rows <= lengths[i];
        here += has;
        expected += has ? (rows < LAST ? rows : LAST) * H : 0;
    }
    ck_assert(here > 20 && here < MOST_SERIES - 10 && expected < here * H * LAST);
    for (int k = 0; k < LAST; k++) {
        struct path time = path_of("%s", ps_date_text(made.start[0] + 3600 * (AT - k)).text);
        text[k] = printed("forecast", ARGS(best.text, "--origin", time.text));
    }
    ck_assert_int_eq(lines_of(text[0]), 1 + here * H);
    struct path origin = path_of("%s", ps_date_text(made.start[0] + 3600 * AT).text);
    all = rest = printed("forecast", ARGS(best.text, "--origin", origin.text, "--last", "3"));
    ck_assert_str_eq(strsep(&rest, "\n"), "id,origin,time,value");
    for (int64_t n = 0; (line = strsep(&rest, "\n")) != NULL && *line; n++, expected--) {
        char *from = strchr(line, ',') + 1;
        int64_t seconds;
        struct path when = path_of("%.19s", from), row = path_of("\n%.*s%s\n", (int)(from - line), line, from + 20);
        ck_assert_int_eq(ps_date_read(when.text, &seconds), 1);
        const int64_t k = AT - (seconds - made.start[0]) / 3600;
        ck_assert_msg(k >= 0 && k < LAST && strstr(text[k], row.text) != NULL, "%s, of row %d", line, (int)n);
    }
    ck_assert_int_eq(expected, 0);
    free(all);
    struct result r = run("forecast", ARGS(best.text, "--origin", origin.text));
    ck_assert_msg(strstr(r.err, path_of("%d of 64 series have no row at the origin", MOST_SERIES - (int)here).text) != NULL &&
                      strstr(r.err, "shorter than seq_len, 8, up to an origin, and filled") != NULL && lines_of(r.err) == 2,
                  "%s", r.err);
    result_free(&r);

    /* Intervals: a quantile of the validation's errors at each step, in each series' own deviation. */
    free(printed("evaluate", ARGS(best.text, "--split", "val", "--save-forecasts", saved.text)));
    static float errors[2][MOST_ROWS], column[MOST_ROWS];
    hid_t file = H5Fopen(saved.text, H5F_ACC_RDONLY, H5P_DEFAULT);
    int64_t windows = 0;
    for (int i = 0; i < 2; i++) {
        hid_t set = H5Dopen2(file, i == 0 ? "forecasts" : "targets", H5P_DEFAULT), space = H5Dget_space(set);
        windows = H5Sget_simple_extent_npoints(space) / H;
        ck_assert_int_ge(H5Dread(set, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, errors[i]), 0);
        H5Sclose(space);
        H5Dclose(set);
    }
    H5Fclose(file);
    float half[H];
    for (int h = 0; h < H; h++) {
        for (int64_t w = 0; w < windows; w++) {
            column[w] = fabsf(errors[0][w * H + h] - errors[1][w * H + h]);
        }
        qsort(column, (size_t)windows, sizeof *column, float_order);
        half[h] = column[(int64_t)ceil(0.75 * (double)(windows + 1)) - 1];
    }
    free(printed("forecast", ARGS(best.text, "--interval", "0.75", "--origin", origin.text, "--out", out.text)));
    all = rest = printed("forecast", ARGS(best.text, "--interval", "0.75", "--origin", origin.text));
    ck_assert_str_eq(strsep(&rest, "\n"), "id,time,value,value_lo75,value_hi75");
    static float ends[2][MOST_SERIES * H];
    file = H5Fopen(out.text, H5F_ACC_RDONLY, H5P_DEFAULT);
    for (int side = 0; side < 2; side++) {
        hid_t set = H5Dopen2(file, side ? "upper" : "lower", H5P_DEFAULT);
        ck_assert_int_ge(H5Dread(set, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, ends[side]), 0);
        H5Dclose(set);
    }
    H5Fclose(file);
    struct ps_series *s;
    OK(ps_series_open(out.text, &s));
    ck_assert_int_eq(s->panel->series, here);
    for (int64_t k = 0; k < here * H; k++) {
        float value, lower, upper;
        int id;
        line = strsep(&rest, "\n");
        ck_assert_int_eq(sscanf(line, "item %d,%*[^,],%f,%f,%f", &id, &value, &lower, &upper), 4);
        ck_assert_str_eq(ps_panel_id(s->panel, k / H), path_of("item %d", id).text);
        ck_assert_int_eq(s->panel->start[k / H], made.start[0] + 3600 * (AT + 1));
        ck_assert(s->values[k] == value && ends[0][k] == lower && ends[1][k] == upper);
        const int64_t T = lengths[id], trained = T - 24 >= 30 ? 30 : T - 24;
        const int64_t first = made.offsets[id] + (trained >= L + H ? T - 24 - trained : 0), n = trained >= L + H ? trained : T;
        double mean = 0, square = 0;
        for (int64_t t = first; t < first + n; t++) {
            mean += (double)made.values[t] / (double)n;
        }
        for (int64_t t = first; t < first + n; t++) {
            square += ((double)made.values[t] - mean) * ((double)made.values[t] - mean) / (double)n;
        }
        const double width = half[k % H] * sqrt(square);
        ck_assert_double_eq_tol(value - lower, width, 1e-5 * fabs(value) + 1e-4 * width);
        ck_assert_double_eq_tol(upper - value, width, 1e-5 * fabs(value) + 1e-4 * width);
    }
    ps_series_close(s);
    free(all);

    /* What is drawn of several times: the latest of each series, by a python3 that keeps what it is given. */
    static const char keeps[] = "#!/bin/sh\n[ \"$1\" = -c ] || cp \"$4\" \"$8\"\n";
    struct path python = new_dir("python3"), drawn = new_dir("drawn.png"), path = path_of("%.400s:%s", folder.text, getenv("PATH"));
    file_write(python.text, keeps, strlen(keeps));
    chmod(python.text, 0777);
    setenv("PATH", path.text, 1);
    free(printed("forecast", ARGS(best.text, "--interval", "0.75", "--origin", origin.text, "--last", "3", "--plot", drawn.text)));
    ck_assert(files_equal(drawn.text, out.text));

    /* The same rows as a CSV. */
    write_csv(csv.text);
    char *const columns = "item,ts,v";
    all = printed("forecast", ARGS(best.text, "--data", csv.text, "--panel", columns, "--origin", origin.text));
    ck_assert_str_eq(all, text[0]);
    free(all);
    char *theirs = printed("evaluate", ARGS(best.text, "--data", csv.text, "--panel", columns, "--by", "series", "--json"));
    all = printed("evaluate", ARGS(best.text, "--by", "series", "--json"));
    ck_assert_str_eq(all, theirs);
    free(all);
    free(theirs);
    for (int k = 0; k < LAST; k++) {
        free(text[k]);
    }

    static char *const both[] = {"forecast", "evaluate"};
    for (int i = 0; i < 2; i++) {
        expect_refused(run(both[i], ARGS(best.text, "--data", csv.text)), 2, ARGS("long.csv", "--panel ID,TIME,VALUE"));
        expect_refused(run(both[i], ARGS(best.text, "--panel", columns)), 2,
                       ARGS("--panel names columns of a CSV", "panel.h5 is none"));
        expect_refused(run(both[i], ARGS(best.text, "--data", csv.text, "--panel", "item,when,v")), 3,
                       ARGS("no column", "\"when\""));
        file_write(new_dir("gap.csv").text, "i,t,v\na,2020-01-01,1\na,2020-01-02,1\na,2020-01-04,1\n", 51);
        expect_refused(run(both[i], ARGS(best.text, "--data", new_dir("gap.csv").text, "--panel", "i,t,v")), 3,
                       ARGS("gap.csv: 1 rows are missing", "--fill previous", "an option of import_csv"));
    }
    expect_refused(run("forecast", ARGS(best.text, "--last", "2", "--out", new_dir("two.h5").text)), 2, ARGS("--last 2", "two.h5"));
    expect_refused(run("forecast", ARGS(best.text, "--origin", "70")), 2, ARGS("--origin is \"70\"", "expected a time"));
    expect_refused(run("forecast", ARGS(best.text, "--origin", "2017-07-14 02:39")), 3,
                   ARGS("no series has a row of the time 2017-07-14 02:39:00", "2017-07-14 02:40:00 to ", "1h apart"));
    expect_refused(run("forecast", ARGS(best.text, "--interval", "0.9", "--steps", "4")), 2, ARGS("--interval", "beyond 3"));
}
END_TEST

/* A series' rows by their times, of steps that are seconds and months; what lies between rows, before and behind is none. */
START_TEST(rows_by_time)
{
    static const char *const frequencies[] = {"15min", "1mo", "3mo", "1y"}, *const starts[] = {"2019-12-31 06:00", "2020-02-29"};
    for (int f = 0; f < 4; f++) {
        for (int k = 0; k < 2; k++) {
            int64_t offsets[] = {0, 40}, start, at = 0;
            struct ps_panel panel = {.series = 1, .offsets = offsets, .start = &start, .id_at = &at, .ids = (char *)"a"};
            ck_assert_int_eq(ps_date_read(starts[k], &start), 1);
            ck_assert_int_eq(ps_steps_read(frequencies[f], &panel.step), 1);
            for (int64_t row = -30; row < 70; row++) {
                const int64_t time = ps_panel_time(&panel, 0, row);
                ck_assert_int_eq(ps_panel_row(&panel, 0, time), row >= 0 && row < 40 ? row : -1);
                ck_assert_int_eq(ps_panel_steps(&panel.step, start, time), row);
                ck_assert_int_eq(ps_panel_steps(&panel.step, start, time - 1), row - 1);
                ck_assert_int_eq(ps_panel_steps(&panel.step, start, time + 1), row);
                ck_assert_int_eq(ps_panel_row(&panel, 0, time + 1), -1);
            }
        }
    }
}
END_TEST

/* A panel of one series trains to the bits of that series. */
START_TEST(one_series)
{
    static const int64_t lengths[] = {700};
    struct path plain = new_dir("one.h5"), dirs[2] = {new_dir("one-panel"), new_dir("one-series")};
    make_panel(&made, 1, lengths);
    write_panel(&made);
    OK(ps_series_write(plain.text, made.values, 700, 1, NULL, NULL, NULL, NULL));
    for (int i = 0; i < 2; i++) {
        write_config(i == 0 ? data.text : plain.text, "");
        expect_done(train(dirs[i].text, ARGS()));
    }
    ck_assert(files_equal(in_run(dirs[0].text, "test.json").text, in_run(dirs[1].text, "test.json").text));
    struct ps_checkpoint a = load(dirs[0].text, "last.h5"), b = load(dirs[1].text, "last.h5");
    ck_assert_mem_eq(a.parameters, b.parameters, (size_t)a.layout->stored * sizeof(float));
    ps_checkpoint_free(&a);
    ps_checkpoint_free(&b);
}
END_TEST

static void set_up(void)
{
    const char *found = getenv("PS_PROGRAMS");
    programs = found ? found : "build";
    const char *wanted = getenv("PS_TEST_DEVICE");
    device = wanted && *wanted ? wanted : "cpu";
    if (strcmp(device, "cpu") == 0) {
        setenv("CUDA_VISIBLE_DEVICES", "", 1); /* what is run without --device computes on it too */
    }
    folder = folder_make();
    data = path_of("%.400s/panel.h5", folder.text);
    config = path_of("%.400s/config.yaml", folder.text);
}

static void tear_down(void)
{
    folder_remove(folder.text);
}

int main(void)
{
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    Suite *suite = suite_create("panels");
    TCase *c = tcase_create("panels");
    tcase_set_timeout(c, 300);
    tcase_add_unchecked_fixture(c, set_up, tear_down);
    tcase_add_test(c, reads);
    tcase_add_test(c, refuses);
    tcase_add_test(c, other_storage);
    tcase_add_test(c, splits_by_hand);
    tcase_add_test(c, splits_by_times);
    tcase_add_test(c, splits_random);
    tcase_add_test(c, scales_by_series);
    tcase_add_test(c, streaming);
    tcase_add_test(c, outside);
    tcase_add_test(c, imports);
    tcase_add_test(c, imports_not);
    tcase_add_test(c, imports_random);
    tcase_add_loop_test(c, trains, 0, 2);
    tcase_add_test(c, errors_by_series);
    tcase_add_test(c, forecasts);
    tcase_add_test(c, forecasts_of_quantiles);
    tcase_add_test(c, forecasts_from_times);
    tcase_add_test(c, rows_by_time);
    tcase_add_test(c, one_series);
    suite_add_tcase(suite, c);
    return run_suite(suite, CK_FORK_GETENV) > 0;
}
