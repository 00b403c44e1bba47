/* What a run writes down about itself: metrics.jsonl, one JSON object an epoch, and test.json at its end. Numbers are written so
 * that they read back bit for bit; one that is not finite is written as null. */
#ifndef PS_SRC_METRICS_H
#define PS_SRC_METRICS_H

#include <jansson.h>
#include <stdint.h>

#include "kernels/status.h"

struct ps_epoch_record {
    uint64_t epoch, step; /* epochs completed, this one included (the first is 1); optimiser steps done */
    double train_loss;    /* mean over the epoch's windows */
    double val_mse, val_mae;
    double lr;                          /* of the epoch's last step */
    double seconds, windows_per_second; /* of what the process did of the epoch; NaN: it only validated it */
    uint64_t skipped;                   /* steps left out because loss or gradient was not finite */
};

/* Appends one line and flushes it. PS_USAGE naming the file when it cannot be written. */
enum ps_status ps_metrics_append(const char *path, const struct ps_epoch_record *record);
/* Keeps the lines of epochs up to and including `epochs`; a resumed run writes the later ones again. An incomplete last line is
 * dropped. Rewritten beside and renamed; a file that is missing is left missing. PS_USAGE naming file and line when a line before
 * the last is not such an object. */
enum ps_status ps_metrics_truncate(const char *path, uint64_t epochs);

/* The validation errors of an epoch's line; NaN where the file, or a line of that epoch, is missing, and where they were not
 * finite. PS_USAGE naming a file that cannot be read. */
enum ps_status ps_metrics_validation(const char *path, uint64_t epoch, double *mse, double *mae);

/* An accuracy in standardised units. windows 0: not computed, written as null. */
struct ps_score {
    double mse, mae;
    int64_t windows;
    double loss;     /* of the kind that is trained, and for quantiles the pinball loss */
    double coverage; /* of quantiles: the share of the targets from the lowest to the highest */
};

struct ps_test_record {
    struct ps_score all, full_batches, repeat_last, seasonal_naive;
    uint64_t epoch, step;    /* of the weights that were tested */
    double val_mse, val_mae; /* of that epoch, by which to choose between runs; for ps_test_write alone */
};

/* {"mse", "mae", "windows", "full_batches": {"mse", "mae", "windows"}, "repeat_last": {"mse", "mae", "windows"},
 * "seasonal_naive": {...} or null, "epoch", "step"}. NULL without memory. */
json_t *ps_test_object(const struct ps_test_record *record);
/* A number, or null where it is not finite. */
json_t *ps_json_number(double value);
/* As such files are written: indented, malloc'ed; takes the object, which may be NULL. NULL without memory. */
char *ps_json_text(json_t *object);
/* The same with "val_mse" and "val_mae" into a file, written beside and renamed. PS_USAGE naming the file. */
enum ps_status ps_test_write(const char *path, const struct ps_test_record *record);

#endif
