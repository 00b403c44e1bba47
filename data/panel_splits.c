/* Training, validation and test of a panel: parts of each series' rows. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "data/panel.h"
#include "data/series_file.h"

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* The rows of one series' parts: fractions of its own rows, or counts, of which a series too short has fewer, of training first. */
static void part_rows(const double split[3], int fractions, int64_t T, int64_t rows[PS_SPLITS])
{
    for (int i = 0; i < PS_SPLITS; i++) {
        rows[i] = (int64_t)floor(fractions ? split[i] * (double)T : split[i]);
    }
    if (fractions && fabs(split[0] + split[1] + split[2] - 1) <= 1e-9) {
        rows[PS_TEST] = T - rows[PS_TRAIN] - rows[PS_VALIDATION];
    }
    rows[PS_TEST] = least(rows[PS_TEST], T);
    rows[PS_VALIDATION] = least(rows[PS_VALIDATION], T - rows[PS_TEST]);
    rows[PS_TRAIN] = least(rows[PS_TRAIN], T - rows[PS_TEST] - rows[PS_VALIDATION]);
}

static enum ps_status allocate(const struct ps_series *series, struct ps_splits *splits)
{
    size_t n = (size_t)series->panel->series;
    int failed = 0;
    for (int i = 0; i <= PS_ALL; i++) {
        struct ps_runs *runs = &splits->runs[i];
        runs->first = malloc(n * sizeof *runs->first);
        runs->before = malloc((n + 1) * sizeof *runs->before);
        failed |= runs->first == NULL || runs->before == NULL;
    }
    splits->fitted = malloc(n * sizeof *splits->fitted);
    splits->left_out = calloc(n, 1);
    return failed || splits->fitted == NULL || splits->left_out == NULL
               ? ps_fail(PS_DATA, "%s: no memory for the windows of %" PRId64 " series", series->path, series->panel->series)
               : PS_OK;
}

/* Windows first, first + 1, ..., the last of which ends before row `end`, if there are any. */
static void add_run(struct ps_splits *splits, int part, int64_t first, int64_t end, int64_t length)
{
    struct ps_runs *runs = &splits->runs[part];
    int64_t count = end - first - length + 1;
    if (count <= 0) {
        return;
    }
    runs->first[runs->n] = first;
    runs->before[runs->n++] = splits->count[part];
    splits->count[part] += count;
}

/* The parts stand at a series' end, training, validation, test. Validation and test inputs may begin in the parts before, or in
 * what is left of the rows before these; their targets may not. */
static void add_series(const struct ps_panel *panel, int64_t i, const int64_t rows[PS_SPLITS], int whole, int64_t seq_len,
                       int64_t pred_len, struct ps_splits *splits)
{
    int64_t begin = panel->offsets[i], end = panel->offsets[i + 1], length = seq_len + pred_len;
    int64_t train = end - rows[PS_TRAIN] - rows[PS_VALIDATION] - rows[PS_TEST], at = train;
    int trained = rows[PS_TRAIN] >= length;
    for (int part = 0; part < PS_SPLITS && !whole; part++) {
        int64_t first = part == PS_TRAIN ? at : at - seq_len;
        at += rows[part];
        add_run(splits, part, first > begin ? first : begin, at, length);
    }
    if (whole) {
        add_run(splits, PS_ALL, begin, end, length);
    }
    splits->left_out[i] = (char)!trained;
    splits->train_series += trained;
    splits->train_rows += trained ? rows[PS_TRAIN] : 0;
    splits->fitted[i] = trained ? (struct ps_span){train, rows[PS_TRAIN]} : (struct ps_span){begin, end - begin};
}

static void end_runs(struct ps_splits *splits)
{
    for (int part = 0; part <= PS_ALL; part++) {
        struct ps_runs *runs = &splits->runs[part];
        runs->before[runs->n] = splits->count[part];
        splits->first[part] = runs->n > 0 ? runs->first[0] : 0;
    }
}

enum ps_status ps_panel_splits(const struct ps_series *series, const double split[3], int whole, int64_t seq_len, int64_t pred_len,
                               struct ps_splits *splits)
{
    int fractions;
    PS_TRY(ps_split_check(split, "rows", &fractions));
    if (fractions && split[0] + split[1] + split[2] > 1 + 1e-9) {
        return ps_fail(PS_DATA, "%s: the split [%g, %g, %g] is more than each series has: give fractions that sum to 1",
                       series->path, split[0], split[1], split[2]);
    }
    PS_TRY(allocate(series, splits));
    for (int64_t i = 0; i < series->panel->series; i++) {
        int64_t rows[PS_SPLITS];
        part_rows(split, fractions, series->panel->offsets[i + 1] - series->panel->offsets[i], rows);
        add_series(series->panel, i, rows, whole, seq_len, pred_len, splits);
    }
    end_runs(splits);
    return PS_OK;
}

/* How many of a series' rows come before a time. */
static int64_t rows_before(const struct ps_panel *panel, int64_t i, int64_t time)
{
    const int64_t T = panel->offsets[i + 1] - panel->offsets[i];
    const int64_t rows = ps_panel_steps(&panel->step, panel->start[i], time - 1) + 1;
    return rows < 0 ? 0 : least(rows, T);
}

enum ps_status ps_panel_splits_dated(const struct ps_series *series, const int64_t from[2], int whole, int64_t seq_len,
                                     int64_t pred_len, struct ps_splits *splits)
{
    const struct ps_panel *panel = series->panel;
    PS_TRY(allocate(series, splits));
    for (int64_t i = 0; i < panel->series; i++) {
        const int64_t validation = rows_before(panel, i, from[0]), test = rows_before(panel, i, from[1]);
        const int64_t rows[PS_SPLITS] = {validation, test - validation, panel->offsets[i + 1] - panel->offsets[i] - test};
        add_series(panel, i, rows, whole, seq_len, pred_len, splits);
    }
    end_runs(splits);
    return PS_OK;
}
