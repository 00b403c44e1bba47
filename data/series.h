/* What a run reads: an HDF5 series or ready-made windows, opened once, checked, and kept in host memory as float32; or left in the
 * file where that would take more memory than it may, and read again in parts (data/groups.h).
 *
 * Layouts (docs/design.md, Files): `/series` float32 [T, C] with attribute `channels`; or a panel, `/values` [T] with `/offsets`,
 * `/ids` and `/start`, whose rows are those of a series of one channel; or `/inputs` [W, C, L] and `/targets` [W, C, H]. data/
 * fills host buffers and knows nothing of a device. */
#ifndef PS_DATA_SERIES_H
#define PS_DATA_SERIES_H

#include <stdint.h>

#include "kernels/status.h"

enum ps_layout { PS_LAYOUT_SERIES, PS_LAYOUT_WINDOWS };
/* PS_ALL: every window of the file, whatever its parts are. */
enum ps_split { PS_TRAIN, PS_VALIDATION, PS_TEST, PS_SPLITS, PS_ALL = PS_SPLITS };
const char *ps_split_name(enum ps_split split); /* "train", "val", "test", "all" */

struct ps_series {
    char *path;
    enum ps_layout layout;
    int64_t rows;                /* series: T; windows: W */
    int64_t channels;            /* C */
    int64_t seq_len, pred_len;   /* windows: L and H as stored; series: 0 */
    float *values;               /* series: [T, C]; all three NULL while the file stays open */
    float *inputs;               /* windows: [W, C, L] */
    float *targets;              /* windows: [W, C, H] */
    struct ps_series_file *file; /* too large for the memory it may take: open for reading. Else NULL */
    char **channel_names;        /* C names, or NULL */
    struct ps_panel *panel;      /* many series of one channel, one behind the other (data/panel.h); NULL: one series */
    uint64_t fingerprint;        /* of shape and every element as stored, before scaling; checkpoints record it */
    float largest;               /* of the elements' magnitudes, likewise */
    int64_t missing;             /* elements that are NaN, which is unobserved: none unless they are taken */
};

/* Opens, checks and reads the whole file read-only. PS_DATA, one line naming file and dataset, for: missing file, not HDF5, neither
 * layout, wrong rank or type (float32 or float64, the latter converted), NaN or Inf (channel and row named). */
enum ps_status ps_series_open(const char *path, struct ps_series **series);
/* What ps_series_open does first, in a child process (data/probe.h): opens and checks everything but the values, and
 * tries what reading them will do. PS_DATA. */
enum ps_status ps_series_look(const char *path);
void ps_series_close(struct ps_series *series); /* NULL is fine */

/* The channels' names, each with a zero byte behind it, malloc'ed; NULL and 0 bytes when the file has none. */
enum ps_status ps_series_names(const struct ps_series *series, char **names, uint64_t *bytes);
/* PS_DATA when channels have other names than these, or another order: naming the first that differs. A file without names, or
 * NULL, is taken as it is. */
enum ps_status ps_series_check_names(const struct ps_series *series, const char *names);

/* Rows [first, first + count) of a series as they are stored, or once a scaler was applied to it as that left them: [count, C] in
 * float32. PS_DATA when its file cannot be read, or is not the one that was opened. */
enum ps_status ps_series_rows(const struct ps_series *series, int64_t first, int64_t count, float *to);

/* Host memory that the data may take: series or groups of blocks, two batches, the windows' order, and what reading needs. The
 * model, threads' stacks and the libraries themselves are beside it.
 * Of ranks that share each batch every one holds a part of it. Whole batches are counted where they fit, so that blocks, and the
 * windows' order with them, are those of one process that has the same limit. Where they do not, half of the limit is for the
 * parts, however many ranks there are. */
struct ps_memory {
    int64_t limit;                    /* bytes; 0: any */
    int64_t seq_len, pred_len, batch; /* what windows are read for */
    int64_t held;                     /* of a batch, windows of the largest part; 0: all of them */
};
/* Opens a file that need not fit: one that does is read as by ps_series_open, and otherwise checked in parts and kept open, with
 * the same fingerprint and the same errors. Also PS_DATA: a limit too small even for that, saying the least that would do. */
enum ps_status ps_series_open_within(const char *path, const struct ps_memory *memory, struct ps_series **series);

/* How a file is read. */
struct ps_reading {
    struct ps_memory memory;
    int masked; /* NaN is taken, and is unobserved; else it is refused */
    int rows;   /* ready-made windows are refused */

    /* The channels of the file that are taken, in this order: names, each with a zero byte behind it. 0: all of them. */
    const char *channels;
    int64_t channel_count;
    int trained; /* they are those that a model was trained on, and a file without names has them as they stand; else it is refused
                  */
};
/* As ps_series_open_within, which refuses NaN and takes all channels. Of some it is as if the file had no others. PS_DATA for a
 * name that it has not. */
enum ps_status ps_series_open_as(const char *path, const struct ps_reading *reading, struct ps_series **series);

/* Windows of which only those of a run follow one another: run i has before[i + 1] - before[i] of them, from first[i] on. */
struct ps_runs {
    int64_t n;
    int64_t *first;  /* [n], rising */
    int64_t *before; /* [n + 1], rising: how many windows come before the run; at last, how many there are */
};

/* Rows that follow one another. */
struct ps_span {
    int64_t first, count;
};

/* Where each split's windows lie. A window is named by its first input row (series) or its index (windows). Either the three parts
 * have windows, or PS_ALL has. */
struct ps_splits {
    int64_t first[PS_SPLITS + 1]; /* of the split's first window */
    int64_t count[PS_SPLITS + 1]; /* windows in it */
    int64_t train_rows;           /* rows (windows) that the scaler is fitted on */

    /* Of a panel; else there are none. */
    struct ps_runs runs[PS_SPLITS + 1]; /* the split's windows, which do not all follow one another */
    struct ps_span *fitted;             /* [series]: rows that each one's scaling is fitted on */
    char *left_out;                     /* [series]: whether it is too short for a training window */
    int64_t train_series;               /* those that are not */
};

/* split: three row counts, or three fractions when each is <= 1 (rows = floor(fraction * T); fractions that sum to 1 within 1e-9
 * give the last part every row left). Validation and test windows reach back seq_len rows into the part before: with train rows n0,
 * validation n1, test n2, inputs of validation start at n0 - seq_len. count = rows of the part (+ seq_len for validation and test)
 * - seq_len - pred_len + 1. For ready-made windows the parts are windows. PS_DATA when the split is longer than the series or a
 * part has no window, saying which, how many rows it has and how many it needs.
 *
 * Of a panel the parts are those of each series, at its end: the last rows are test, those before validation. Of three counts a
 * series that is shorter has fewer rows, of training first. A series without the rows for a window of some part has none there;
 * PS_DATA when none has. Windows are taken in the series' order. */
enum ps_status ps_splits_make(const struct ps_series *series, const double split[3], int64_t seq_len, int64_t pred_len,
                              struct ps_splits *splits);
/* Every window of the file as PS_ALL, and none in the three parts. train_rows as above, 0 where the file is too short for the
 * parts. PS_DATA when it is too short for one window. */
enum ps_status ps_splits_all(const struct ps_series *series, const double split[3], int64_t seq_len, int64_t pred_len,
                             struct ps_splits *splits);
/* The same by times, Unix seconds: rows before from[0] are training, those before from[1] validation, the others test. Of a panel
 * these are times of all series. With `whole` as ps_splits_all. Also PS_DATA: a series without /time, or ready-made windows. */
enum ps_status ps_splits_dated(const struct ps_series *series, const int64_t from[2], int whole, int64_t seq_len, int64_t pred_len,
                               struct ps_splits *splits);
void ps_splits_free(struct ps_splits *splits); /* of series and windows: does nothing */

/* PS_DATA when no target is observed among the windows of one of the parts, a bit each (1 << PS_TEST): which. Costs a pass over
 * data of which values are missing. */
enum ps_status ps_splits_observed(const struct ps_series *series, const struct ps_splits *splits, unsigned parts, int64_t seq_len,
                                  int64_t pred_len);

/* Per-channel mean and population standard deviation of what is observed of the training rows (of ready-made windows: of the
 * training inputs), in double; of nothing 0 and 1. Of a panel: of each series, over its training rows, or all of its rows where it
 * has no training window. */
struct ps_scaler {
    int64_t channels;             /* C; or how many series */
    double *mean, *std;           /* [C] */
    char *is_constant;            /* [C]: std was 0, or of nothing, and is taken as 1 */
    int constant;                 /* how many are */
    const struct ps_panel *panel; /* whose series they are; NULL: they are of channels */
};
enum ps_status ps_scaler_fit(const struct ps_series *series, const struct ps_splits *splits, struct ps_scaler *scaler);
/* The identity, for `standardize: false`. */
enum ps_status ps_scaler_identity(int64_t channels, struct ps_scaler *scaler);
/* The same means and deviations, in memory of its own; `from` is not of a panel. */
enum ps_status ps_scaler_copy(const struct ps_scaler *from, struct ps_scaler *scaler);
void ps_scaler_free(struct ps_scaler *scaler);
/* values = (values - mean)/std, in place, inputs and targets alike; computed in double, stored as float32; NaN stays. PS_DATA, with
 * nothing changed, when float32 does not hold one of them: naming file, dataset, row, channel, the value and the scaled one. */
enum ps_status ps_scaler_apply(const struct ps_scaler *scaler, struct ps_series *series);
/* The same of values [outer, C, inner], which float32 is known to hold; of channels alone. */
void ps_scaler_scale(const struct ps_scaler *scaler, float *values, int64_t outer, int64_t inner);
/* The same of rows [first, first + rows) of a series or a panel: values [rows, C]. */
void ps_scaler_scale_rows(const struct ps_scaler *scaler, int64_t first, int64_t rows, float *values);
/* Back: values [C, length] of the window that begins at row `window` of a series or a panel, or of a ready-made one. */
void ps_scaler_restore(const struct ps_scaler *scaler, int64_t window, int64_t length, float *values);

/* Strides, in elements, of the windows seen as inputs[w, c, l] from `inputs` and targets[w, c, t] from `targets` (both layouts, so
 * that nothing after this line asks which it is). `windows` is how many start rows (or windows) exist. */
struct ps_window_view {
    const float *inputs, *targets;
    int64_t windows, channels, seq_len, pred_len;
    int64_t input_stride[3], target_stride[3];
};
/* Of a series that stays in its file, the sizes alone: inputs and targets are NULL. */
struct ps_window_view ps_window_view_make(const struct ps_series *series, int64_t seq_len, int64_t pred_len);

/* Copies windows index[0..n) into dense inputs [n, C, L] and targets [n, C, H]. Targets of a channel of a window with nothing
 * observed among its inputs count as unobserved too. */
void ps_windows_gather(const struct ps_window_view *view, const int32_t *index, int64_t n, float *inputs, float *targets);

/* A seeded permutation of first .. first+count-1 for one epoch (Fisher-Yates on Philox, site PS_SITE_SHUFFLE, step = epoch). */
void ps_shuffle(uint64_t seed, uint64_t epoch, int64_t first, int64_t count, int32_t *index);
/* The same of what index holds. */
void ps_shuffle_index(uint64_t seed, uint64_t epoch, int64_t count, int32_t *index);
/* The same for group 0, 1, ... of the epoch (site PS_SITE_SHUFFLE + 1 + group). */
void ps_shuffle_group(uint64_t seed, uint64_t epoch, int64_t group, int64_t count, int32_t *index);
/* first, first+1, ... */
void ps_sequence(int64_t first, int64_t count, int32_t *index);

/* Mean squared and mean absolute error of naive forecasts over windows first..first+count-1, in the view's units: repeat-last (the
 * last value that is observed), and seasonal-naive (the value one season before; season 0 or > seq_len: not computed, NaN). Over
 * targets that are observed, and forecasts that are; NaN over none. */
struct ps_naive {
    double repeat_mse, repeat_mae, seasonal_mse, seasonal_mae;
};
struct ps_naive ps_naive_score(const struct ps_window_view *view, int64_t first, int64_t count, int64_t season);

/* What MASE is scaled by: the seasonal-naive forecast's mean absolute error on the training rows, one season ahead. mae[c] is the
 * mean of |x_t - x_(t - season)| over rows season .. train_rows - 1 (of ready-made windows: of each training input) of channel c,
 * both of them observed, in double, in the units that the series has now; NaN where there is no such row. season >= 1. */
enum ps_status ps_seasonal_mae(const struct ps_series *series, int64_t train_rows, int64_t season, double *mae);

/* The same scores, to the bit, over windows that come in parts. begin..begin+n-1 of `count` are index[0..n) of the view. */
struct ps_naive_sums {
    int64_t count, season;
    double part[64][4];      /* of a fixed number of parts, each summed in order: the same bits for any number of threads */
    int64_t observed[64][2]; /* of each part: errors of repeat-last, and of seasonal-naive */
};
void ps_naive_add(struct ps_naive_sums *sums, const struct ps_window_view *view, int64_t begin, int64_t n, const int32_t *index);
struct ps_naive ps_naive_end(const struct ps_naive_sums *sums, const struct ps_window_view *view);

#endif
