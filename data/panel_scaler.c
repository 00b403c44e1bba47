/* Scaling by series: each by the mean and standard deviation of its own training rows; of all its rows where it has no training
 * window. */
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "data/panel.h"
#include "data/series_file.h"
#include "data/text.h"

/* One pass over the rows, in the order of the file. */
struct pass {
    const struct ps_series *series;
    const struct ps_splits *splits;
    struct ps_scaler *scaler;
    double *observed; /* [series]: how many values are */
    int deviations;   /* else the means are taken */
};

/* Ends of the part of rows [first, first + rows) that series i has. */
static int64_t part_of(const struct ps_panel *panel, int64_t i, int64_t first, int64_t rows, int64_t *begin)
{
    *begin = panel->offsets[i] > first ? panel->offsets[i] : first;
    return panel->offsets[i + 1] < first + rows ? panel->offsets[i + 1] : first + rows;
}

static enum ps_status add_rows(void *argument, int64_t first, int64_t rows, const float *values)
{
    const struct pass *pass = argument;
    const struct ps_panel *panel = pass->series->panel;
    double *mean = pass->scaler->mean, *std = pass->scaler->std;
    for (int64_t i = ps_panel_series(panel, first); i < panel->series && panel->offsets[i] < first + rows; i++) {
        const struct ps_span *fitted = &pass->splits->fitted[i];
        int64_t begin, end = part_of(panel, i, first, rows, &begin);
        begin = begin > fitted->first ? begin : fitted->first;
        end = end < fitted->first + fitted->count ? end : fitted->first + fitted->count;
        double sum = pass->deviations ? std[i] : mean[i];
        for (int64_t r = begin; r < end; r++) {
            double x = values[r - first], deviation = x - mean[i];
            if (!isnan(x)) {
                sum += pass->deviations ? deviation * deviation : x;
                pass->observed[i] += !pass->deviations;
            }
        }
        *(pass->deviations ? &std[i] : &mean[i]) = sum;
    }
    return PS_OK;
}

enum ps_status ps_panel_scaler_fit(const struct ps_series *series, const struct ps_splits *splits, double *observed,
                                   struct ps_scaler *scaler)
{
    struct pass pass = {.series = series, .splits = splits, .scaler = scaler, .observed = observed};
    scaler->panel = series->panel;
    PS_TRY(ps_series_each(series, 0, series->rows, add_rows, &pass));
    for (int64_t i = 0; i < scaler->channels; i++) {
        observed[i] = observed[i] > 0 ? observed[i] : 1;
        scaler->mean[i] /= observed[i];
    }
    pass.deviations = 1;
    PS_TRY(ps_series_each(series, 0, series->rows, add_rows, &pass));
    for (int64_t i = 0; i < scaler->channels; i++) {
        scaler->std[i] = sqrt(scaler->std[i] / observed[i]);
        if (scaler->std[i] == 0) { /* exact for a constant series, as for a constant channel */
            scaler->std[i] = 1;
            scaler->is_constant[i] = 1;
            scaler->constant++;
        }
    }
    return PS_OK;
}

void ps_panel_scale(const struct ps_scaler *scaler, int64_t first, int64_t rows, float *values)
{
    const struct ps_panel *panel = scaler->panel;
    for (int64_t i = ps_panel_series(panel, first); i < panel->series && panel->offsets[i] < first + rows; i++) {
        int64_t begin, end = part_of(panel, i, first, rows, &begin);
        double mean = scaler->mean[i], std = scaler->std[i];
        for (float *x = values + (begin - first); x < values + (end - first); x++) {
            *x = (float)((*x - mean) / std);
        }
    }
}

struct check {
    const struct ps_scaler *scaler;
    const struct ps_series *series;
};

static enum ps_status check_rows(void *argument, int64_t first, int64_t rows, const float *values)
{
    const struct check *check = argument;
    const struct ps_scaler *scaler = check->scaler;
    int64_t i = ps_panel_series(scaler->panel, first);
    for (int64_t r = first; r < first + rows; r++) {
        i += r >= scaler->panel->offsets[i + 1];
        double x = values[r - first], scaled = (x - scaler->mean[i]) / scaler->std[i];
        if (!isfinite((float)scaled) && !isnan(x)) {
            return ps_fail(PS_DATA,
                           "%s: /values holds %.9g in %s: standardised with that series' mean %.9g and deviation %.9g it is %.3g, "
                           "and float32 ends at %.3g: correct such rows, or leave the series out",
                           check->series->path, x, ps_series_place(check->series, 0, r).text, scaler->mean[i], scaler->std[i],
                           scaled, (double)FLT_MAX);
        }
    }
    return PS_OK;
}

enum ps_status ps_panel_scaler_check(const struct ps_scaler *scaler, const struct ps_series *series)
{
    int64_t safe = 0;
    while (safe < scaler->channels && (series->largest + fabs(scaler->mean[safe])) / scaler->std[safe] <= FLT_MAX) {
        safe++;
    }
    struct check check = {scaler, series};
    return safe < scaler->channels ? ps_series_each(series, 0, series->rows, check_rows, &check) : PS_OK;
}
