/* Makes series files: from CSV, or generated. */
#ifndef PS_DATA_IMPORT_H
#define PS_DATA_IMPORT_H

#include <stdint.h>

#include "data/missing.h"
#include "kernels/status.h"

/* Writes /series float32 [T, C], attribute channels, and /time int64 (Unix seconds, UTC) when time is not NULL; chunked along T;
 * attributes frequency and source when not NULL. Written beside and renamed. */
enum ps_status ps_series_write(const char *path, const float *values, int64_t rows, int64_t channels, char *const *names,
                               const int64_t *time, const char *frequency, const char *source);

struct ps_import_options {
    const char *time_column; /* the column of times; NULL: the first one when its values are dates, or with time_format */
    const char *time_format; /* as ps_date_read_as takes it; NULL: dates as ps_date_read takes them, or Unix time */
    int allow_gaps;          /* else each time must follow the one before by the same step, or so many months */
    enum ps_fill fill;       /* what takes the place of missing values; PS_FILL_NONE: they are refused; PS_FILL_NAN: nothing */
    char delimiter;          /* 0: the comma, semicolon, tab or bar that the header has most of */
    int decimal_comma;       /* numbers have a decimal comma, not a point */
};

/* A CSV with a header row, numbers, and a column of times if it has one, each later than the one before. options: NULL stands for
 * zeros. PS_DATA naming file, line, column and value; PS_USAGE for a format that is none. *imported says what was written; it may
 * be NULL. */
struct ps_imported {
    int64_t rows, channels;
    char period[32]; /* the step: "1h", "15min", "1d", "1mo", "1y"; "" without two times. It is attribute frequency if gaps is 0 */
    int64_t filled, filled_channels; /* values that were missing, and channels that have any */
    int64_t gaps;                    /* rows that do not follow the one before by that step */
    const char *cut_at;              /* what fields were cut at: "commas", "semicolons", "tabs", "bars" */
    char warning[512];               /* a line for whoever asked for the import; "" when there is nothing to say */
};
enum ps_status ps_import_csv(const char *csv, const char *path, const struct ps_import_options *options,
                             struct ps_imported *imported);

/* A CSV with a header row and many series in it, a row for each time of each: columns "ID,TIME,VALUE" by their names. Rows of
 * different series may be interleaved, and those of one come in any order: they are put in the order of their times, which must be
 * whole steps apart, the same step for all. The panel has the series in the order in which their first rows come. Of options, fill,
 * delimiter, decimal_comma and time_format count. PS_DATA naming the line, or counting what is missing; PS_USAGE for columns or a
 * format that are none. */
struct ps_panel_imported {
    int64_t series, rows;
    int64_t gaps, with_gaps; /* rows that were missing between others, and the series that they were missing in */
    int64_t missing;         /* values that were missing in rows */
    char period[32];         /* the step: attribute frequency */
};
enum ps_status ps_import_panel(const char *csv, const char *path, const char *columns, const struct ps_import_options *options,
                               struct ps_panel_imported *imported);

/* A generated hourly series: per channel a trend, daily and weekly seasons of its own phase and size, and AR(1) noise; seeded
 * Philox (site PS_SITE_SAMPLE), the same bits everywhere. */
enum ps_status ps_sample_series(const char *path, int64_t hours, int64_t channels, uint64_t seed);

/* Generated ready-made windows cut from such a series: /inputs [windows, C, L], /targets [windows, C, H]. */
enum ps_status ps_sample_windows(const char *path, int64_t windows, int64_t channels, int64_t seq_len, int64_t pred_len,
                                 uint64_t seed);

#endif
