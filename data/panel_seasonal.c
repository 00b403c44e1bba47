#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "data/panel.h"

enum ps_status ps_panel_seasonal_mae(const struct ps_series *series, const struct ps_splits *splits, int64_t season, double *mae)
{
    int64_t longest = 0;
    for (int64_t i = 0; i < series->panel->series; i++) {
        longest = splits->fitted[i].count > longest ? splits->fitted[i].count : longest;
    }
    float *rows = malloc((size_t)longest * sizeof *rows);
    if (rows == NULL) {
        return ps_fail(PS_DATA, "%s: no memory for a series of %" PRId64 " rows", series->path, longest);
    }
    enum ps_status status = PS_OK;
    for (int64_t i = 0; i < series->panel->series && status == PS_OK; i++) {
        const struct ps_span *fitted = &splits->fitted[i];
        double sum = 0, terms = 0;
        status = ps_series_rows(series, fitted->first, fitted->count, rows);
        for (int64_t t = season; t < fitted->count && status == PS_OK; t++) {
            const double size = fabs((double)rows[t] - (double)rows[t - season]);
            sum += isnan(size) ? 0 : size;
            terms += isnan(size) ? 0 : 1;
        }
        mae[i] = terms > 0 ? sum / terms : NAN;
    }
    free(rows);
    return status;
}
