#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "data/series.h"

static enum ps_status scaler_allocate(int64_t channels, struct ps_scaler *scaler)
{
    *scaler = (struct ps_scaler){.channels = channels};
    scaler->mean = calloc((size_t)channels, sizeof *scaler->mean);
    scaler->std = calloc((size_t)channels, sizeof *scaler->std);
    if (scaler->mean == NULL || scaler->std == NULL) {
        ps_scaler_free(scaler);
        return ps_fail(PS_DATA, "out of host memory for the scaler of %" PRId64 " channels", channels);
    }
    return PS_OK;
}

enum ps_status ps_scaler_identity(int64_t channels, struct ps_scaler *scaler)
{
    PS_TRY(scaler_allocate(channels, scaler));
    for (int64_t c = 0; c < channels; c++) {
        scaler->std[c] = 1;
    }
    return PS_OK;
}

void ps_scaler_free(struct ps_scaler *scaler)
{
    free(scaler->mean);
    free(scaler->std);
    *scaler = (struct ps_scaler){0};
}

/* Both layouts as values[o, c, i]: a series is [rows, C, 1], inputs [windows, C, L]. */
struct block {
    float *values;
    int64_t outer, channels, inner;
};

static struct block first_rows(const struct ps_series *series, int64_t rows)
{
    if (series->layout == PS_LAYOUT_SERIES) {
        return (struct block){series->values, rows, series->channels, 1};
    }
    return (struct block){series->inputs, rows, series->channels, series->seq_len};
}

/* Two passes, each in the order of memory. */
enum ps_status ps_scaler_fit(const struct ps_series *series, const struct ps_splits *splits, struct ps_scaler *scaler)
{
    PS_TRY(scaler_allocate(series->channels, scaler));
    struct block b = first_rows(series, splits->train_rows);
    double count = (double)b.outer * (double)b.inner;
    double *mean = scaler->mean, *std = scaler->std;
    const float *x = b.values;
    for (int64_t o = 0; o < b.outer; o++) {
        for (int64_t c = 0; c < b.channels; c++) {
            for (int64_t i = 0; i < b.inner; i++) {
                mean[c] += *x++;
            }
        }
    }
    for (int64_t c = 0; c < b.channels; c++) {
        mean[c] /= count;
    }
    x = b.values;
    for (int64_t o = 0; o < b.outer; o++) {
        for (int64_t c = 0; c < b.channels; c++) {
            for (int64_t i = 0; i < b.inner; i++) {
                double deviation = *x++ - mean[c];
                std[c] += deviation * deviation;
            }
        }
    }
    for (int64_t c = 0; c < b.channels; c++) {
        std[c] = sqrt(std[c] / count);
        /* Exact for a constant channel: equal float32 values have exact sums in double, and so their mean is their value. */
        if (std[c] == 0) {
            std[c] = 1;
            scaler->constant++;
        }
    }
    return PS_OK;
}

static void scale(const struct ps_scaler *scaler, struct block b)
{
    float *x = b.values;
    for (int64_t o = 0; o < b.outer; o++) {
        for (int64_t c = 0; c < b.channels; c++) {
            for (int64_t i = 0; i < b.inner; i++, x++) {
                *x = (float)((*x - scaler->mean[c]) / scaler->std[c]);
            }
        }
    }
}

void ps_scaler_apply(const struct ps_scaler *scaler, struct ps_series *series)
{
    scale(scaler, first_rows(series, series->rows));
    if (series->layout == PS_LAYOUT_WINDOWS) {
        scale(scaler, (struct block){series->targets, series->rows, series->channels, series->pred_len});
    }
}
