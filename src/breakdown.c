#include "src/breakdown.h"

#include <math.h>
#include <stdlib.h>

#include "data/panel.h"

/* Sums over windows, of what is observed. */
struct sums {
    double squares, absolutes, percents;
    int64_t n;
};

struct ps_breakdown {
    const struct ps_session *session;
    int64_t channels, seq_len, pred_len;
    int64_t season;        /* of the seasonal-naive forecast; 0: there is none */
    struct sums *sums;     /* [PS_FORECASTERS, C, H] */
    struct ps_order order; /* of the split's windows */

    const struct ps_panel *panel; /* NULL: not of one */
    struct sums *of_series;       /* [series, PS_FORECASTERS] */
    int64_t *series_windows;      /* [series] */
};

enum ps_status ps_breakdown_open(const struct ps_session *s, enum ps_split split, struct ps_breakdown **breakdown)
{
    const int64_t season = s->config->data.season, C = s->view.channels, L = s->view.seq_len, H = s->view.pred_len;
    struct ps_breakdown *b = calloc(1, sizeof *b);
    struct sums *sums = calloc((size_t)(PS_FORECASTERS * C * H), sizeof *sums);
    if (!b || !sums) {
        free(b);
        free(sums);
        return ps_fail(PS_DEVICE, "no memory for the errors of %lld steps of %lld channels", (long long)H, (long long)C);
    }
    *b = (struct ps_breakdown){.session = s,
                               .channels = C,
                               .seq_len = L,
                               .pred_len = H,
                               .season = season <= L ? season : 0,
                               .sums = sums,
                               .order = ps_session_order(s, split),
                               .panel = s->series ? s->series->panel : NULL};
    if (b->panel) {
        b->of_series = calloc((size_t)(b->panel->series * PS_FORECASTERS), sizeof *b->of_series);
        b->series_windows = calloc((size_t)b->panel->series, sizeof *b->series_windows);
        if (!b->of_series || !b->series_windows) {
            ps_breakdown_close(b);
            return ps_fail(PS_DEVICE, "no memory for the errors of %lld series", (long long)s->series->panel->series);
        }
    }
    *breakdown = b;
    return PS_OK;
}

void ps_breakdown_close(struct ps_breakdown *b)
{
    if (b) {
        free(b->sums);
        free(b->of_series);
        free(b->series_windows);
        free(b);
    }
}

static void add(struct sums *sums, double truth, double forecast, double mean, double std)
{
    const double e = fabs(truth - forecast), size = fabs(truth * std + mean) + fabs(forecast * std + mean);
    sums->squares += e * e;
    sums->absolutes += e;
    sums->percents += size > 0 ? 200 * e * std / size : 0;
    sums->n++;
}

/* The last value that is observed; NaN where none is. */
static float last_observed(const float *x, int64_t n)
{
    while (n > 1 && isnan(x[n - 1])) {
        n--;
    }
    return x[n - 1];
}

/* Window w of a batch, channel c of it: to the sums of its steps. series: NULL, or its own sums. */
static void add_window(struct ps_breakdown *b, int64_t c, const float *x, const float *y, const float *f, double mean, double std,
                       struct sums *series)
{
    const int64_t C = b->channels, L = b->seq_len, H = b->pred_len;
    const float last = last_observed(x, L);
    for (int64_t t = 0; t < H; t++) {
        const double forecasts[PS_FORECASTERS] = {f[t], last, b->season > 0 ? x[L - b->season + t % b->season] : NAN};
        for (int i = 0; i < PS_FORECASTERS; i++) {
            if (isnan(y[t]) || (i != PS_FORECASTER_MODEL && isnan(forecasts[i]))) {
                continue;
            }
            add(b->sums + (i * C + c) * H + t, y[t], forecasts[i], mean, std);
            if (series) {
                add(series + i, y[t], forecasts[i], mean, std);
            }
        }
    }
}

void ps_breakdown_add(struct ps_breakdown *b, int64_t first, int64_t n, const float *inputs, const float *targets,
                      const float *forecasts)
{
    const int64_t C = b->channels, L = b->seq_len, H = b->pred_len;
    const struct ps_scaler *scaler = &b->session->scaler;
#pragma omp parallel for schedule(static)
    for (int64_t c = 0; c < C; c++) {
        for (int64_t w = 0; w < n; w++) {
            const int64_t at = b->panel ? ps_panel_series(b->panel, ps_order_window(&b->order, first + w)) : c;
            const int64_t i = scaler->panel ? at : c;
            add_window(b, c, inputs + (w * C + c) * L, targets + (w * C + c) * H, forecasts + (w * C + c) * H, scaler->mean[i],
                       scaler->std[i], b->panel ? b->of_series + at * PS_FORECASTERS : NULL);
            if (b->panel) {
                b->series_windows[at]++;
            }
        }
    }
}

/* NaN where nothing is observed. */
static struct ps_measures means_of(const struct sums *s)
{
    const double n = (double)s->n;
    return (struct ps_measures){.mse = s->squares / n,
                                .mae = s->absolutes / n,
                                .original_mse = NAN,
                                .original_mae = NAN,
                                .mase = NAN,
                                .smape = s->percents / n};
}

/* Means over the channels and steps [first, last) of them. */
static struct ps_measures means(const struct ps_breakdown *b, enum ps_forecaster forecaster, const int64_t channels[2],
                                const int64_t steps[2])
{
    struct sums total = {0};
    for (int64_t c = channels[0]; c < channels[1]; c++) {
        for (int64_t t = steps[0]; t < steps[1]; t++) {
            const struct sums *s = b->sums + (forecaster * b->channels + c) * b->pred_len + t;
            total.squares += s->squares;
            total.absolutes += s->absolutes;
            total.percents += s->percents;
            total.n += s->n;
        }
    }
    return means_of(&total);
}

struct ps_measures ps_breakdown_channel(const struct ps_breakdown *b, enum ps_forecaster forecaster, int64_t c)
{
    struct ps_measures m = means(b, forecaster, (int64_t[]){c, c + 1}, (int64_t[]){0, b->pred_len});
    if (b->panel) {
        return m; /* its series have units of their own */
    }
    const double std = b->session->scaler.std[c], scale = b->session->seasonal_mae[c];
    m.original_mse = m.mse * std * std;
    m.original_mae = m.mae * std;
    m.mase = scale > 0 ? m.original_mae / scale : NAN;
    return m;
}

struct ps_measures ps_breakdown_series(const struct ps_breakdown *b, enum ps_forecaster forecaster, int64_t series,
                                       int64_t *windows)
{
    const struct sums *s = b->of_series + series * PS_FORECASTERS + forecaster;
    const struct ps_scaler *scaler = &b->session->scaler;
    *windows = b->series_windows[series];
    const double std = scaler->std[scaler->panel ? series : 0], scale = b->session->seasonal_mae[series];
    struct ps_measures m = means_of(s);
    m.original_mse = m.mse * std * std;
    m.original_mae = m.mae * std;
    m.mase = scale > 0 ? m.original_mae / scale : NAN;
    return m;
}

/* How many errors the i-th channel, or series of a panel, has. */
static int64_t observed(const struct ps_breakdown *b, enum ps_forecaster forecaster, int64_t i)
{
    int64_t n = 0;
    for (int64_t t = 0; t < b->pred_len && !b->panel; t++) {
        n += b->sums[(forecaster * b->channels + i) * b->pred_len + t].n;
    }
    return b->panel ? b->of_series[i * PS_FORECASTERS + forecaster].n : n;
}

struct ps_measures ps_breakdown_all(const struct ps_breakdown *b, enum ps_forecaster forecaster)
{
    struct ps_measures m = means(b, forecaster, (int64_t[]){0, b->channels}, (int64_t[]){0, b->pred_len});
    double sum = 0, scaled = 0;
    for (int64_t c = 0, windows; c < (b->panel ? b->panel->series : b->channels); c++) {
        const double mase =
            (b->panel ? ps_breakdown_series(b, forecaster, c, &windows) : ps_breakdown_channel(b, forecaster, c)).mase;
        if (observed(b, forecaster, c) > 0 && b->session->seasonal_mae[c] > 0) { /* not NaN either */
            sum += mase;
            scaled++;
        }
    }
    m.mase = scaled > 0 ? sum / scaled : NAN;
    return m;
}

struct ps_measures ps_breakdown_step(const struct ps_breakdown *b, enum ps_forecaster forecaster, int64_t step)
{
    return means(b, forecaster, (int64_t[]){0, b->channels}, (int64_t[]){step, step + 1});
}
