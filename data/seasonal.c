#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/series_file.h"

/* A pass over the training rows, in the order of memory. */
struct seasonal {
    double *sums;             /* [C] */
    int64_t channels, season; /* C */
    int64_t inner;            /* windows: the length of an input; series: 1 */
    float *last;              /* series: [season, C], row t at t % season */
};

static enum ps_status add_rows(void *argument, int64_t first, int64_t rows, const float *x)
{
    const struct seasonal *s = argument;
    for (int64_t t = first; t < first + rows; t++, x += s->channels) {
        float *before = s->last + t % s->season * s->channels;
        for (int64_t c = 0; c < s->channels && t >= s->season; c++) {
            s->sums[c] += fabs((double)x[c] - (double)before[c]);
        }
        memcpy(before, x, (size_t)s->channels * sizeof *x);
    }
    return PS_OK;
}

static enum ps_status add_windows(void *argument, int64_t first, int64_t windows, const float *x)
{
    (void)first;
    const struct seasonal *s = argument;
    for (int64_t i = 0; i < windows * s->channels; i++, x += s->inner) {
        for (int64_t t = s->season; t < s->inner; t++) {
            s->sums[i % s->channels] += fabs((double)x[t] - (double)x[t - s->season]);
        }
    }
    return PS_OK;
}

enum ps_status ps_seasonal_mae(const struct ps_series *series, int64_t train_rows, int64_t season, double *mae)
{
    const int is_series = series->layout == PS_LAYOUT_SERIES;
    const int64_t C = series->channels, after = (is_series ? train_rows : series->seq_len) - season;
    const int64_t terms = after <= 0 ? 0 : is_series ? after : train_rows * after;
    struct seasonal s = {.sums = mae, .channels = C, .season = season, .inner = is_series ? 1 : series->seq_len};
    for (int64_t c = 0; c < C; c++) {
        mae[c] = terms > 0 ? 0 : NAN;
    }
    if (terms <= 0) {
        return PS_OK;
    }
    if (is_series && !(s.last = malloc((size_t)(season * C) * sizeof *s.last))) {
        return ps_fail(PS_DATA, "%s: no memory for a season of %" PRId64 " rows", series->path, season);
    }
    enum ps_status status = ps_series_each(series, 0, train_rows, is_series ? add_rows : add_windows, &s);
    free(s.last);
    for (int64_t c = 0; c < C; c++) {
        mae[c] /= (double)terms;
    }
    return status;
}
