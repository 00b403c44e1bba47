/* A panel: many series of one channel, one behind the other in /values, with lengths and starts of their own. Its rows are read and
 * streamed as those of one series; here stands which of them belong together. */
#ifndef PS_DATA_PANEL_H
#define PS_DATA_PANEL_H

#include "data/series.h"
#include "data/storage.h"
#include "data/times.h"

struct ps_panel {
    int64_t series;
    int64_t *offsets; /* [series + 1]: rows of series i are offsets[i] up to offsets[i + 1], at least one */
    int64_t *start;   /* [series]: time of each one's first row, Unix seconds */
    int64_t *id_at;   /* [series]: of its name in ids */
    char *ids;        /* names, no two the same, each with a zero byte behind it */
    int64_t ids_bytes;
    char frequency[32];   /* time from a row to the next: "1h", "15min", "1d", "1mo" */
    struct ps_steps step; /* the same, read */
};

/* Reads and checks /offsets, /ids, /start and the attribute frequency of /values, which has `rows` rows. trying: every dataset as
 * ps_storage_try does first, as whoever looks at a file before others must. PS_DATA. */
enum ps_status ps_panel_open(const struct ps_storage *storage, hid_t values, int64_t rows, int trying, struct ps_panel **panel);
void ps_panel_close(struct ps_panel *panel); /* NULL is fine */

/* Bytes of host memory that a panel takes beside its values, with its splits and its scaler. */
int64_t ps_panel_bytes(const struct ps_panel *panel);

const char *ps_panel_id(const struct ps_panel *panel, int64_t series);
/* The series that a row of /values belongs to. */
int64_t ps_panel_series(const struct ps_panel *panel, int64_t row);
/* The time n steps after a series' start. A step of months keeps the day of the month, and the last day of a month stays the last.
 */
int64_t ps_panel_after(const struct ps_steps *step, int64_t start, int64_t n);
/* How many whole steps lie between a start and a time, rounded down: negative before the start. */
int64_t ps_panel_steps(const struct ps_steps *step, int64_t start, int64_t time);
/* The time of row `row` of a series, counted from 0; also of one behind its end. */
int64_t ps_panel_time(const struct ps_panel *panel, int64_t series, int64_t row);
/* The first series with a time outside the years 1 to 9999, that of the row behind its last one included; -1: none. */
int64_t ps_panel_outside(const struct ps_panel *panel);
/* The row of a series that has a time; -1: none has. */
int64_t ps_panel_row(const struct ps_panel *panel, int64_t series, int64_t time);

/* The first few series for which `which` is not 0, as text: "\"a\", \"b\", \"c\", ..." */
struct ps_panel_names {
    char text[256];
};
struct ps_panel_names ps_panel_some(const struct ps_panel *panel, const char *which);

/* ps_splits_make, or with `whole` ps_splits_all, and ps_splits_dated, where any may have no window; ps_scaler_fit, which counts in
 * observed [series], zeros to begin with, ps_scaler_check and the scaling of rows [first, first + rows) of /values, of panels. */
enum ps_status ps_panel_splits(const struct ps_series *series, const double split[3], int whole, int64_t seq_len, int64_t pred_len,
                               struct ps_splits *splits);
enum ps_status ps_panel_splits_dated(const struct ps_series *series, const int64_t from[2], int whole, int64_t seq_len,
                                     int64_t pred_len, struct ps_splits *splits);
enum ps_status ps_panel_scaler_fit(const struct ps_series *series, const struct ps_splits *splits, double *observed,
                                   struct ps_scaler *scaler);
enum ps_status ps_panel_scaler_check(const struct ps_scaler *scaler, const struct ps_series *series);
void ps_panel_scale(const struct ps_scaler *scaler, int64_t first, int64_t rows, float *values);

/* ps_seasonal_mae of each series, over the rows that its scaling is fitted on: [series]. */
enum ps_status ps_panel_seasonal_mae(const struct ps_series *series, const struct ps_splits *splits, int64_t season, double *mae);

/* Writes such a file; its bytes depend on the contents alone. more: lists like /values beside them, the last without a name; NULL:
 * none. Beside its place, and renamed. */
struct ps_panel_list {
    const char *name;
    const float *values;
};
enum ps_status ps_panel_write_with(const char *path, const struct ps_panel *panel, const float *values, const char *source,
                                   const struct ps_panel_list *more);
enum ps_status ps_panel_write(const char *path, const struct ps_panel *panel, const float *values, const char *source);

#endif
