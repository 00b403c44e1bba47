#include "data/missing.h"

#include <math.h>
#include <stddef.h>
#include <strings.h>

int ps_missing_text(const char *text)
{
    static const char *const forms[] = {"", "NA", "N/A", "NaN", "null", "none", "?"};
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        if (strcasecmp(text, forms[i]) == 0) {
            return 1;
        }
    }
    return 0;
}

int ps_missing_fill(float *values, int64_t rows, int64_t channels, int64_t channel, const int64_t *time, enum ps_fill fill)
{
    float *at = values + channel;
    int64_t before = -1;
    for (int64_t next = 0; next <= rows; next++) {
        if (next < rows && isnan(at[next * channels])) {
            continue;
        }
        if (next == rows && before < 0) {
            return 0;
        }
        /* The rows between `before` and `next`, of which one may not be there, have no value. */
        double last = at[(before < 0 ? next : before) * channels];
        double slope = 0, begin = time != NULL && before >= 0 ? (double)time[before] : (double)before;
        if (fill == PS_FILL_LINEAR && before >= 0 && next < rows) {
            slope = (at[next * channels] - last) / ((time != NULL ? (double)time[next] : (double)next) - begin);
        }
        for (int64_t i = before + 1; i < next; i++) {
            at[i * channels] = (float)(last + slope * ((time != NULL ? (double)time[i] : (double)i) - begin));
        }
        before = next;
    }
    return 1;
}
