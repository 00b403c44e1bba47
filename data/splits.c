#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "data/dates.h"
#include "data/panel.h"
#include "data/series_file.h"

enum ps_status ps_split_check(const double split[3], const char *unit, int *fractions)
{
    *fractions = 1;
    for (int i = 0; i < PS_SPLITS; i++) {
        if (!(split[i] >= 0 && split[i] <= INT32_MAX)) { /* also NaN */
            return ps_fail(PS_USAGE, "split: %s is %g: expected row counts, or fractions from 0 to 1", ps_split_name(i), split[i]);
        }
        *fractions &= split[i] <= 1;
    }
    for (int i = 0; i < PS_SPLITS; i++) {
        if (!*fractions && split[i] != floor(split[i])) {
            return ps_fail(PS_USAGE, "split: %s is %g: expected whole numbers of %s, or three fractions from 0 to 1",
                           ps_split_name(i), split[i], unit);
        }
    }
    return PS_OK;
}

/* Rows (or windows) of each part; see ps_splits_make. */
static enum ps_status part_rows(const struct ps_series *series, const double split[3], int64_t rows[PS_SPLITS])
{
    const char *unit = series->layout == PS_LAYOUT_SERIES ? "rows" : "windows";
    int fractions;
    PS_TRY(ps_split_check(split, unit, &fractions));
    for (int i = 0; i < PS_SPLITS; i++) {
        rows[i] = (int64_t)floor(fractions ? split[i] * (double)series->rows : split[i]);
    }
    if (fractions && fabs(split[0] + split[1] + split[2] - 1) <= 1e-9) {
        rows[PS_TEST] = series->rows - rows[PS_TRAIN] - rows[PS_VALIDATION];
    }
    int64_t sum = rows[PS_TRAIN] + rows[PS_VALIDATION] + rows[PS_TEST];
    if (sum > series->rows) {
        return ps_fail(PS_DATA,
                       "%s: the split [%g, %g, %g] needs %" PRId64 " %s and the file has %" PRId64
                       ": give smaller counts, or fractions that sum to 1",
                       series->path, split[0], split[1], split[2], sum, unit, series->rows);
    }
    return PS_OK;
}

/* Whether the file can have windows of such lengths at all. */
static enum ps_status check_lengths(const struct ps_series *series, int64_t seq_len, int64_t pred_len)
{
    int ready = series->layout == PS_LAYOUT_WINDOWS;
    if (ready && (seq_len != series->seq_len || pred_len != series->pred_len)) {
        return ps_fail(PS_DATA,
                       "%s: holds windows with seq_len %" PRId64 " and pred_len %" PRId64 ", and the config says %" PRId64
                       " and %" PRId64 ": set those of the file",
                       series->path, series->seq_len, series->pred_len, seq_len, pred_len);
    }
    if (seq_len < 1 || seq_len > INT32_MAX || pred_len < 1 || pred_len > INT32_MAX) {
        return ps_fail(PS_USAGE, "seq_len is %" PRId64 " and pred_len is %" PRId64 ": both must be 1 to %d", seq_len, pred_len,
                       INT32_MAX);
    }
    return PS_OK;
}

/* Of a panel, whose parts were made: the three, or PS_ALL; none is without a window. */
static enum ps_status check_panel(const struct ps_series *series, enum ps_status status, int whole, struct ps_splits *splits)
{
    for (int i = whole ? PS_ALL : PS_TRAIN; i < (whole ? PS_ALL + 1 : PS_SPLITS) && status == PS_OK; i++) {
        if (splits->count[i] == 0) {
            status = ps_fail(PS_DATA, "%s: the %s part has no window: none of its %" PRId64 " series has the rows for one (%s)",
                             series->path, ps_split_name(i), series->panel->series,
                             i == PS_TRAIN || whole ? "seq_len + pred_len" : "pred_len in the part, and seq_len before");
        }
    }
    if (status != PS_OK) {
        ps_splits_free(splits);
    }
    return status;
}

/* The windows of parts of so many rows, one behind the other. */
static enum ps_status from_rows(const struct ps_series *series, const int64_t rows[PS_SPLITS], int64_t seq_len, int64_t pred_len,
                                struct ps_splits *splits)
{
    int ready = series->layout == PS_LAYOUT_WINDOWS;
    int64_t begin = 0;
    for (int i = 0; i < PS_SPLITS; i++) {
        /* Validation and test inputs may begin in the part before; their targets may not. */
        int64_t back = ready || i == PS_TRAIN ? 0 : seq_len;
        int64_t needed = ready ? 1 : seq_len + pred_len - back;
        if (rows[i] < needed) {
            return ps_fail(PS_DATA, "%s: the %s part has no window: it has %" PRId64 " %s and needs at least %" PRId64 "%s",
                           series->path, ps_split_name(i), rows[i], ready ? "windows" : "rows", needed,
                           ready           ? ""
                           : i == PS_TRAIN ? " (seq_len + pred_len)"
                                           : " (pred_len)");
        }
        splits->first[i] = begin - back;
        splits->count[i] = rows[i] - needed + 1;
        begin += rows[i];
    }
    splits->train_rows = rows[PS_TRAIN];
    return PS_OK;
}

/* Every window, of a file that is no panel. */
static enum ps_status all_windows(const struct ps_series *series, int64_t train_rows, int64_t seq_len, int64_t pred_len,
                                  struct ps_splits *splits)
{
    int ready = series->layout == PS_LAYOUT_WINDOWS;
    int64_t needed = ready ? 1 : seq_len + pred_len;
    if (series->rows < needed) {
        return ps_fail(PS_DATA, "%s: has no window: it has %" PRId64 " %s and needs at least %" PRId64 "%s", series->path,
                       series->rows, ready ? "windows" : "rows", needed, ready ? "" : " (seq_len + pred_len)");
    }
    *splits = (struct ps_splits){.train_rows = train_rows};
    splits->count[PS_ALL] = series->rows - needed + 1;
    return PS_OK;
}

enum ps_status ps_splits_make(const struct ps_series *series, const double split[3], int64_t seq_len, int64_t pred_len,
                              struct ps_splits *splits)
{
    *splits = (struct ps_splits){0};
    PS_TRY(check_lengths(series, seq_len, pred_len));
    int64_t rows[PS_SPLITS];
    if (series->panel != NULL) {
        return check_panel(series, ps_panel_splits(series, split, 0, seq_len, pred_len, splits), 0, splits);
    }
    PS_TRY(part_rows(series, split, rows));
    return from_rows(series, rows, seq_len, pred_len, splits);
}

enum ps_status ps_splits_all(const struct ps_series *series, const double split[3], int64_t seq_len, int64_t pred_len,
                             struct ps_splits *splits)
{
    *splits = (struct ps_splits){0};
    PS_TRY(check_lengths(series, seq_len, pred_len));
    if (series->panel != NULL) {
        return check_panel(series, ps_panel_splits(series, split, 1, seq_len, pred_len, splits), 1, splits);
    }
    struct ps_splits parts;
    const int64_t train_rows = ps_splits_make(series, split, seq_len, pred_len, &parts) == PS_OK ? parts.train_rows : 0;
    return all_windows(series, train_rows, seq_len, pred_len, splits);
}

/* How many of the times come before one; they rise. */
static int64_t times_before(const struct ps_times *times, int64_t time)
{
    int64_t low = 0;
    for (int64_t high = times->rows; low < high;) {
        const int64_t middle = low + (high - low) / 2;
        if (times->time[middle] < time) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* Of a series: the windows of the parts between those times, and what of the file's own times explains that one has none. */
static enum ps_status dated_rows(const struct ps_series *series, const int64_t from[2], int64_t seq_len, int64_t pred_len,
                                 struct ps_splits *splits)
{
    struct ps_times times;
    const int ready = series->layout == PS_LAYOUT_WINDOWS;
    if (!ready) {
        PS_TRY(ps_times_read(series->path, series->rows, &times));
    }
    if (ready || times.time == NULL) {
        return ps_fail(PS_DATA, "%s: %s, and the split is by times, %s and %s: give counts of %s, or fractions", series->path,
                       ready ? "holds ready-made windows, which have no times" : "has no /time", ps_date_text(from[0]).text,
                       ps_date_text(from[1]).text, ready ? "windows" : "rows");
    }
    const int64_t validation = times_before(&times, from[0]), test = times_before(&times, from[1]);
    const int64_t rows[PS_SPLITS] = {validation, test - validation, series->rows - test};
    enum ps_status status = from_rows(series, rows, seq_len, pred_len, splits);
    if (status == PS_DATA) {
        status = ps_fail(status, "%s: it is split at %s and %s, and has rows of %s to %s", ps_error_message(),
                         ps_date_text(from[0]).text, ps_date_text(from[1]).text, ps_date_text(times.time[0]).text,
                         ps_date_text(times.time[series->rows - 1]).text);
    }
    ps_times_free(&times);
    return status;
}

enum ps_status ps_splits_dated(const struct ps_series *series, const int64_t from[2], int whole, int64_t seq_len, int64_t pred_len,
                               struct ps_splits *splits)
{
    *splits = (struct ps_splits){0};
    PS_TRY(check_lengths(series, seq_len, pred_len));
    if (series->panel != NULL) {
        return check_panel(series, ps_panel_splits_dated(series, from, whole, seq_len, pred_len, splits), whole, splits);
    }
    struct ps_splits parts = {0};
    const enum ps_status status = dated_rows(series, from, seq_len, pred_len, &parts);
    if (!whole) {
        *splits = parts;
        return status;
    }
    return all_windows(series, status == PS_OK ? parts.train_rows : 0, seq_len, pred_len, splits);
}

/* A pass over the rows (or windows) that hold targets. */
struct looking {
    const struct ps_splits *splits;
    unsigned parts;             /* bits of those whose targets have not been found yet */
    int64_t row;                /* values of a row */
    int64_t before, after;      /* a window's first target row, and the one behind its last, from its own first */
    int64_t run[PS_SPLITS + 1]; /* of each part: the first whose rows do not all lie behind */
};

static int any_observed(const float *values, int64_t n)
{
    int64_t i = 0;
    while (i < n && isnan(values[i])) {
        i++;
    }
    return i < n;
}

static enum ps_status look_for_targets(void *argument, int64_t first, int64_t rows, const float *values)
{
    struct looking *l = argument;
    for (int p = 0; p <= PS_ALL; p++) {
        const struct ps_runs *runs = &l->splits->runs[p];
        const int64_t n = runs->n > 0 ? runs->n : 1;
        for (int64_t *r = &l->run[p]; l->parts >> p & 1 && *r < n; ++*r) {
            const int64_t start = runs->n > 0 ? runs->first[*r] : l->splits->first[p];
            const int64_t windows = runs->n > 0 ? runs->before[*r + 1] - runs->before[*r] : l->splits->count[p];
            const int64_t behind = start + windows - 1 + l->after;
            const int64_t begin = start + l->before > first ? start + l->before : first;
            const int64_t end = behind < first + rows ? behind : first + rows;
            if (begin < end && any_observed(values + (begin - first) * l->row, (end - begin) * l->row)) {
                l->parts &= ~(1u << p);
            }
            if (behind > first + rows) {
                break;
            }
        }
    }
    return PS_OK;
}

enum ps_status ps_splits_observed(const struct ps_series *series, const struct ps_splits *splits, unsigned parts, int64_t seq_len,
                                  int64_t pred_len)
{
    const int ready = series->layout == PS_LAYOUT_WINDOWS;
    struct looking l = {.splits = splits,
                        .parts = parts,
                        .row = series->channels * (ready ? pred_len : 1),
                        .before = ready ? 0 : seq_len,
                        .after = ready ? 1 : seq_len + pred_len};
    if (series->missing == 0 || parts == 0) {
        return PS_OK;
    }
    PS_TRY(ps_series_each(series, ready, series->rows, look_for_targets, &l));
    for (int p = 0; p <= PS_ALL; p++) {
        if (l.parts >> p & 1) {
            return ps_fail(PS_DATA, "%s: the %s part has no target that is observed: all are NaN", series->path, ps_split_name(p));
        }
    }
    return PS_OK;
}

void ps_splits_free(struct ps_splits *splits)
{
    for (int i = 0; i <= PS_ALL; i++) {
        free(splits->runs[i].first);
        free(splits->runs[i].before);
    }
    free(splits->fitted);
    free(splits->left_out);
    *splits = (struct ps_splits){0};
}
