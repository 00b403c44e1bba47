#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/panel.h"
#include "data/series_file.h"

static enum ps_status scaler_allocate(int64_t channels, struct ps_scaler *scaler)
{
    *scaler = (struct ps_scaler){.channels = channels};
    scaler->mean = calloc((size_t)channels, sizeof *scaler->mean);
    scaler->std = calloc((size_t)channels, sizeof *scaler->std);
    scaler->is_constant = calloc((size_t)channels, 1);
    if (scaler->mean == NULL || scaler->std == NULL || scaler->is_constant == NULL) {
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

enum ps_status ps_scaler_copy(const struct ps_scaler *from, struct ps_scaler *scaler)
{
    PS_TRY(scaler_allocate(from->channels, scaler));
    memcpy(scaler->mean, from->mean, (size_t)from->channels * sizeof *scaler->mean);
    memcpy(scaler->std, from->std, (size_t)from->channels * sizeof *scaler->std);
    return PS_OK;
}

void ps_scaler_free(struct ps_scaler *scaler)
{
    free(scaler->mean);
    free(scaler->std);
    free(scaler->is_constant);
    *scaler = (struct ps_scaler){0};
}

/* One of the two passes over the training rows, in the order of memory. */
struct fit {
    struct ps_scaler *scaler;
    double *observed; /* [C]: how many values are */
    int64_t inner;    /* values of a channel that follow one another: 1 in a series [rows, C], L in inputs [windows, C, L] */
};

static enum ps_status add_values(void *argument, int64_t first, int64_t rows, const float *x)
{
    (void)first;
    const struct fit *fit = argument;
    double *mean = fit->scaler->mean;
    for (int64_t o = 0; o < rows; o++) {
        for (int64_t c = 0; c < fit->scaler->channels; c++) {
            for (int64_t i = 0; i < fit->inner; i++, x++) {
                mean[c] += isnan(*x) ? 0 : *x;
                fit->observed[c] += isnan(*x) ? 0 : 1;
            }
        }
    }
    return PS_OK;
}

static enum ps_status add_deviations(void *argument, int64_t first, int64_t rows, const float *x)
{
    (void)first;
    const struct fit *fit = argument;
    const double *mean = fit->scaler->mean;
    double *std = fit->scaler->std;
    for (int64_t o = 0; o < rows; o++) {
        for (int64_t c = 0; c < fit->scaler->channels; c++) {
            for (int64_t i = 0; i < fit->inner; i++, x++) {
                double deviation = isnan(*x) ? 0 : *x - mean[c];
                std[c] += deviation * deviation;
            }
        }
    }
    return PS_OK;
}

static enum ps_status fit_passes(const struct ps_series *series, int64_t rows, struct fit *fit)
{
    struct ps_scaler *scaler = fit->scaler;
    PS_TRY(ps_series_each(series, 0, rows, add_values, fit));
    for (int64_t c = 0; c < scaler->channels; c++) {
        fit->observed[c] = fit->observed[c] > 0 ? fit->observed[c] : 1;
        scaler->mean[c] /= fit->observed[c];
    }
    PS_TRY(ps_series_each(series, 0, rows, add_deviations, fit));
    for (int64_t c = 0; c < scaler->channels; c++) {
        scaler->std[c] = sqrt(scaler->std[c] / fit->observed[c]);
        /* Exact for a constant channel: equal float32 values have exact sums in double, and so their mean is their value. */
        if (scaler->std[c] == 0) {
            scaler->std[c] = 1;
            scaler->is_constant[c] = 1;
            scaler->constant++;
        }
    }
    return PS_OK;
}

enum ps_status ps_scaler_fit(const struct ps_series *series, const struct ps_splits *splits, struct ps_scaler *scaler)
{
    PS_TRY(scaler_allocate(series->panel != NULL ? series->panel->series : series->channels, scaler));
    struct fit fit = {.scaler = scaler,
                      .observed = calloc((size_t)scaler->channels, sizeof(double)),
                      .inner = series->layout == PS_LAYOUT_SERIES ? 1 : series->seq_len};
    enum ps_status status = fit.observed == NULL ? ps_fail(PS_DATA, "out of host memory for %" PRId64 " counts", scaler->channels)
                            : series->panel != NULL ? ps_panel_scaler_fit(series, splits, fit.observed, scaler)
                                                    : fit_passes(series, splits->train_rows, &fit);
    free(fit.observed);
    if (status != PS_OK) {
        ps_scaler_free(scaler);
    }
    return status;
}

void ps_scaler_scale(const struct ps_scaler *scaler, float *values, int64_t outer, int64_t inner)
{
    int64_t C = scaler->channels;
    const double *mean = scaler->mean, *std = scaler->std;
    float *x = values;
    if (inner == 1) { /* the loop that compilers vectorise is the innermost */
        for (int64_t o = 0; o < outer; o++, x += C) {
            for (int64_t c = 0; c < C; c++) {
                x[c] = (float)((x[c] - mean[c]) / std[c]);
            }
        }
        return;
    }
    for (int64_t o = 0; o < outer; o++) {
        for (int64_t c = 0; c < C; c++, x += inner) {
            double m = mean[c], s = std[c];
            for (int64_t i = 0; i < inner; i++) {
                x[i] = (float)((x[i] - m) / s);
            }
        }
    }
}

void ps_scaler_scale_rows(const struct ps_scaler *scaler, int64_t first, int64_t rows, float *values)
{
    if (scaler->panel != NULL) {
        ps_panel_scale(scaler, first, rows, values);
    } else {
        ps_scaler_scale(scaler, values, rows, 1);
    }
}

void ps_scaler_restore(const struct ps_scaler *scaler, int64_t window, int64_t length, float *values)
{
    int64_t begin = scaler->panel != NULL ? ps_panel_series(scaler->panel, window) : 0;
    int64_t end = scaler->panel != NULL ? begin + 1 : scaler->channels;
    for (int64_t c = begin; c < end; c++) {
        for (int64_t t = 0; t < length; t++, values++) {
            *values = (float)(*values * scaler->std[c] + scaler->mean[c]);
        }
    }
}

/* A dataset that is looked through for what float32 does not hold once it is scaled. */
struct check {
    const struct ps_scaler *scaler;
    const struct ps_series *series;
    int dataset;
    int64_t inner;
};

static enum ps_status check_rows(void *argument, int64_t first, int64_t rows, const float *x)
{
    const struct check *check = argument;
    const struct ps_scaler *scaler = check->scaler;
    int64_t row = scaler->channels * check->inner;
    for (int64_t i = 0; i < rows * row; i++) {
        int64_t c = i / check->inner % scaler->channels;
        double scaled = (x[i] - scaler->mean[c]) / scaler->std[c];
        if (!isfinite((float)scaled) && !isnan(x[i])) {
            const char *name = check->series->panel != NULL                ? "/values"
                               : check->series->layout == PS_LAYOUT_SERIES ? "/series"
                               : check->dataset == 0                       ? "/inputs"
                                                                           : "/targets";
            return ps_fail(
                PS_DATA,
                "%s: %s holds %.9g in %s: standardised with the training rows' mean %.9g and deviation %.9g it is %.3g, and "
                "float32 ends at %.3g: correct such rows, or leave the channel out",
                check->series->path, name, (double)x[i], ps_series_place(check->series, check->dataset, first * row + i).text,
                scaler->mean[c], scaler->std[c], scaled, (double)FLT_MAX);
        }
    }
    return PS_OK;
}

enum ps_status ps_scaler_check(const struct ps_scaler *scaler, const struct ps_series *series)
{
    if (scaler->panel != NULL) {
        return ps_panel_scaler_check(scaler, series);
    }
    int64_t safe = 0;
    while (safe < scaler->channels && (series->largest + fabs(scaler->mean[safe])) / scaler->std[safe] <= FLT_MAX) {
        safe++;
    }
    int is_series = series->layout == PS_LAYOUT_SERIES;
    for (int i = 0; safe < scaler->channels && i < (is_series ? 1 : 2); i++) {
        struct check check = {scaler, series, i, is_series ? 1 : i == 0 ? series->seq_len : series->pred_len};
        PS_TRY(ps_series_each(series, i, series->rows, check_rows, &check));
    }
    return PS_OK;
}

enum ps_status ps_scaler_apply(const struct ps_scaler *scaler, struct ps_series *series)
{
    PS_TRY(ps_scaler_check(scaler, series));
    if (series->layout == PS_LAYOUT_SERIES) {
        ps_scaler_scale_rows(scaler, 0, series->rows, series->values);
    } else {
        ps_scaler_scale(scaler, series->inputs, series->rows, series->seq_len);
        ps_scaler_scale(scaler, series->targets, series->rows, series->pred_len);
    }
    return PS_OK;
}
