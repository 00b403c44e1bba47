#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/series_file.h"

/* A pass over the training rows, in the order of memory. */
struct seasonal {
    double *sums, *terms;     /* [C] */
    int64_t channels, season; /* C */
    int64_t inner;            /* windows: the length of an input; series: 1 */
    float *last;              /* series: [season, C], row t at t % season */
};

static void add_term(const struct seasonal *s, int64_t channel, float now, float before)
{
    double size = fabs((double)now - (double)before);
    if (!isnan(size)) { /* both are observed */
        s->sums[channel] += size;
        s->terms[channel]++;
    }
}

static enum ps_status add_rows(void *argument, int64_t first, int64_t rows, const float *x)
{
    const struct seasonal *s = argument;
    for (int64_t t = first; t < first + rows; t++, x += s->channels) {
        float *before = s->last + t % s->season * s->channels;
        for (int64_t c = 0; c < s->channels && t >= s->season; c++) {
            add_term(s, c, x[c], before[c]);
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
            add_term(s, i % s->channels, x[t], x[t - s->season]);
        }
    }
    return PS_OK;
}

enum ps_status ps_seasonal_mae(const struct ps_series *series, int64_t train_rows, int64_t season, double *mae)
{
    const int is_series = series->layout == PS_LAYOUT_SERIES;
    const int64_t C = series->channels, after = (is_series ? train_rows : series->seq_len) - season;
    struct seasonal s = {.sums = mae,
                         .terms = calloc((size_t)C, sizeof *s.terms),
                         .channels = C,
                         .season = season,
                         .inner = is_series ? 1 : series->seq_len,
                         .last = is_series && after > 0 ? malloc((size_t)(season * C) * sizeof *s.last) : NULL};
    enum ps_status status = PS_OK;
    if (s.terms == NULL || (is_series && after > 0 && s.last == NULL)) {
        status = ps_fail(PS_DATA, "%s: no memory for a season of %" PRId64 " rows", series->path, season);
    }
    for (int64_t c = 0; c < C; c++) {
        mae[c] = 0;
    }
    if (status == PS_OK && after > 0) {
        status = ps_series_each(series, 0, train_rows, is_series ? add_rows : add_windows, &s);
    }
    for (int64_t c = 0; c < C && status == PS_OK; c++) {
        mae[c] = s.terms[c] > 0 ? mae[c] / s.terms[c] : NAN;
    }
    free(s.terms);
    free(s.last);
    return status;
}
