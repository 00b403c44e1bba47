/* What a run writes down about itself: metrics.jsonl, one JSON object an epoch, and test.json at its end. Numbers are written so
 * that they read back bit for bit; one that is not finite is written as null. */
#ifndef PS_SRC_METRICS_H
#define PS_SRC_METRICS_H

#include <jansson.h>
#include <stdint.h>

#include "kernels/kernels.h"

struct ps_epoch_record {
    uint64_t epoch, step; /* epochs completed, this one included (the first is 1); optimiser steps done */
    double train_loss;    /* mean over the epoch's windows */
    double val_mse, val_mae;
    enum ps_loss_kind loss;             /* that is trained */
    double val_loss;                    /* written of another loss than MSE */
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

/* An accuracy in standardised units. windows 0: not computed, written as null. */
struct ps_score {
    double mse, mae;
    int64_t windows;
    double loss;     /* of the kind that is trained, and for quantiles the pinball loss */
    double coverage; /* of quantiles: the share of the targets from the lowest to the highest */
};

/* The validation errors of an epoch's line, and of another loss than MSE that too; NaN where the file, or a line of that epoch, is
 * missing, and where they were not finite. PS_USAGE naming a file that cannot be read. */
enum ps_status ps_metrics_validation(const char *path, uint64_t epoch, struct ps_score *validation);

/* What MSE and MAE do not say of a loss: "huber loss 0.1234", "pinball loss 0.1234, 0.7980 within quantiles 0.1 to 0.9"; "". */
enum { PS_LOSS_TEXT = 128 };
void ps_loss_text(const struct ps_loss *loss, const struct ps_score *score, char text[PS_LOSS_TEXT]);

struct ps_test_record {
    struct ps_loss loss; /* that was trained */
    struct ps_score all, full_batches, repeat_last, seasonal_naive;
    uint64_t epoch, step;              /* of the weights that were tested */
    double val_mse, val_mae, val_loss; /* of that epoch, by which to choose between runs; for ps_test_write alone */
};

/* {"mse", "mae", "windows", "full_batches": {"mse", "mae", "windows"}, "repeat_last": {"mse", "mae", "windows"},
 * "seasonal_naive": {...} or null, "epoch", "step"}; of another loss than MSE also "loss": {"kind", "value"}, of Huber's with
 * "delta", of quantiles with "quantiles" and "coverage". NULL without memory. */
json_t *ps_test_object(const struct ps_test_record *record);
/* A number, or null where it is not finite. */
json_t *ps_json_number(double value);
/* As such files are written: indented, malloc'ed; takes the object, which may be NULL. NULL without memory. */
char *ps_json_text(json_t *object);
/* The same with "val_mse" and "val_mae", and "val_loss" where there is a "loss", into a file, written beside and renamed. PS_USAGE
 * naming the file. */
enum ps_status ps_test_write(const char *path, const struct ps_test_record *record);

#endif
