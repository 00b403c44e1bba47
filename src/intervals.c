#include "src/intervals.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_ERRORS = 1 << 27 }; /* held at a time: 512 MiB */

enum ps_status ps_intervals_level(const char *text, double *level)
{
    char *end;
    *level = strtod(text, &end);
    return end != text && !*end && *level > 0 && *level < 1
               ? PS_OK
               : ps_fail(PS_USAGE, "--interval is \"%.60s\": expected a share of the targets, above 0 and below 1, such as 0.9",
                         text);
}

/* The validation's errors as they come. */
struct errors {
    float *values; /* [C, H, windows] */
    int64_t columns, windows, every, taken;
};

static enum ps_status take_errors(void *argument, int64_t first, int64_t n, const float *inputs, const float *targets,
                                  const float *forecasts, const float *quantiles)
{
    (void)inputs;
    (void)quantiles;
    struct errors *e = argument;
    for (int64_t w = 0; w < n; w++) {
        if ((first + w) % e->every != 0) {
            continue;
        }
        for (int64_t i = 0; i < e->columns; i++) {
            e->values[i * e->windows + e->taken] = fabsf(targets[w * e->columns + i] - forecasts[w * e->columns + i]);
        }
        e->taken++;
    }
    return PS_OK;
}

/* The k-th smallest of n values, counted from 0, which it puts into another order (Hoare 1961). */
static float smallest(float *x, int64_t n, int64_t k)
{
    for (int64_t low = 0, high = n - 1; low < high;) {
        const float pivot = x[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            for (; x[i] < pivot; i++) {
            }
            for (; x[j] > pivot; j--) {
            }
            if (i <= j) {
                const float swapped = x[i];
                x[i++] = x[j];
                x[j--] = swapped;
            }
        }
        if (k <= j) {
            high = j;
        } else if (k >= i) {
            low = i;
        } else {
            break;
        }
    }
    return x[k];
}

/* Of `n` errors; the rank is above n where they are too few. */
static int64_t rank_of(double level, int64_t n)
{
    return (int64_t)ceil((double)(n + 1) * level);
}

/* Of column i's errors, which are NaN where the target is not observed. */
static enum ps_status half_width(struct ps_intervals *intervals, int64_t i, float *errors)
{
    const double level = intervals->level;
    int64_t n = 0;
    for (int64_t w = 0; w < intervals->windows; w++) {
        if (!isnan(errors[w])) {
            errors[n++] = errors[w];
        }
    }
    if (rank_of(level, n) > n) {
        return ps_fail(PS_USAGE,
                       "--interval %g: takes at least %.0f observed targets of each channel and step, and channel %" PRId64
                       " has %" PRId64 " of step %" PRId64 " in the validation windows",
                       level, ceil(level / (1 - level)), i / intervals->pred_len, n, i % intervals->pred_len + 1);
    }
    intervals->half[i] = smallest(errors, n, rank_of(level, n) - 1);
    return PS_OK;
}

enum ps_status ps_intervals_fit(struct ps_session *s, double level, struct ps_intervals *intervals)
{
    const struct ps_loss *loss = &s->model->options.loss;
    if (loss->kind == PS_LOSS_QUANTILE) {
        return ps_fail(PS_USAGE,
                       "--interval: the model forecasts quantiles of its own, %g to %g, which are given anyway: leave it out",
                       loss->quantile[0], loss->quantile[loss->quantiles - 1]);
    }
    const int64_t count = s->splits.count[PS_VALIDATION], columns = s->view.channels * s->view.pred_len;
    int64_t every = (int64_t)((double)count * (double)columns / MOST_ERRORS) + 1;
    const int64_t windows = (count + every - 1) / every;
    if (rank_of(level, windows) > windows) {
        return ps_fail(PS_USAGE, "--interval %g: takes at least %.0f validation windows, and there are %" PRId64, level,
                       ceil(level / (1 - level)), windows);
    }
    *intervals =
        (struct ps_intervals){.level = level, .windows = windows, .channels = s->view.channels, .pred_len = s->view.pred_len};
    intervals->half = malloc((size_t)columns * sizeof *intervals->half);
    struct errors errors = {malloc((size_t)(columns * windows) * sizeof(float)), columns, windows, every, 0};
    enum ps_status status = intervals->half && errors.values
                                ? ps_session_forecast(s, PS_VALIDATION, take_errors, &errors)
                                : ps_fail(PS_DATA, "--interval: no memory for the errors of %" PRId64 " windows", windows);
    if (status == PS_OK && errors.taken < windows) {
        status = ps_fail(PS_USAGE, "--interval: stopped");
    }
    for (int64_t i = 0; i < columns && status == PS_OK; i++) {
        status = half_width(intervals, i, errors.values + i * windows);
    }
    free(errors.values);
    if (status != PS_OK) {
        ps_intervals_free(intervals);
    }
    return status;
}

void ps_intervals_free(struct ps_intervals *intervals)
{
    free(intervals->half);
    intervals->half = NULL;
}

int64_t ps_intervals_within(const struct ps_intervals *intervals, int64_t n, const float *targets, const float *forecasts,
                            int64_t *observed)
{
    const int64_t columns = intervals->channels * intervals->pred_len;
    int64_t within = 0;
    for (int64_t i = 0; i < n * columns; i++) {
        within += fabsf(targets[i] - forecasts[i]) <= intervals->half[i % columns];
        *observed += !isnan(targets[i]);
    }
    return within;
}

double ps_intervals_mean_width(const struct ps_intervals *intervals)
{
    const int64_t columns = intervals->channels * intervals->pred_len;
    double sum = 0;
    for (int64_t i = 0; i < columns; i++) {
        sum += 2 * (double)intervals->half[i];
    }
    return sum / (double)columns;
}
