#include "src/forecast_panel.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/dates.h"
#include "data/files.h"
#include "data/panel.h"
#include "data/text.h"
#include "src/csv_out.h"
#include "src/forecaster.h"

enum { AT_ONCE = 4096 }; /* windows */

/* A forecast's series, and how many of its rows are known. */
struct origin {
    int64_t series, known;
};

struct panel_forecast {
    const struct ps_series *series;
    const struct ps_panel *panel;
    const struct ps_panel_request *request;
    struct ps_scaler scaler; /* by series; of no series: the forecaster's own is enough */
    struct ps_forecaster *forecaster;
    int64_t seq_len, pred_len, steps;

    struct origin *at; /* [AT_ONCE], of those that are under way */
    int64_t n;
    float *inputs, *forecasts; /* [AT_ONCE, seq_len], [AT_ONCE, steps] */
    struct ps_loss loss;       /* the model's */
    float *quantiles;          /* [AT_ONCE, steps, Q] of a model of quantiles; else NULL */

    char *is_short, *is_out; /* [series] */
    int64_t n_short, n_out;

    int rows;              /* are written as they come */
    struct ps_output *csv; /* where; NULL: to stdout */
    uint64_t written;
    float *all;           /* [series, steps]: the latest of each series that has one; NULL: not kept */
    float *all_quantiles; /* [Q, series, steps]: theirs */
    struct origin *of;
    int64_t kept;
};

/* ---- origins ---- */

/* is_out, and *seconds: the origin's time. */
static enum ps_status find_origin(struct panel_forecast *f, int64_t *seconds)
{
    const struct ps_panel *p = f->panel;
    if (!ps_date_read(f->request->origin, seconds)) {
        return ps_fail(PS_USAGE,
                       "--origin is \"%.60s\": of a panel, whose series have rows of their own, expected a time, as " PS_DATE_FORMS,
                       f->request->origin);
    }
    int64_t first = INT64_MAX, last = INT64_MIN;
    for (int64_t i = 0; i < p->series; i++) {
        const int64_t end = ps_panel_time(p, i, p->offsets[i + 1] - p->offsets[i] - 1);
        f->is_out[i] = ps_panel_row(p, i, *seconds) < 0;
        f->n_out += f->is_out[i];
        first = p->start[i] < first ? p->start[i] : first;
        last = end > last ? end : last;
    }
    return f->n_out < p->series
               ? PS_OK
               : ps_fail(PS_DATA, "%s: no series has a row of the time %s: they have some of %s to %s, %s apart", f->series->path,
                         ps_date_text(*seconds).text, ps_date_text(first).text, ps_date_text(last).text, p->frequency);
}

/* The last seq_len rows that are known of a series, those before its first filled with that one's value; scaled. */
static enum ps_status take_window(struct panel_forecast *f, const struct origin *o, float *to)
{
    const int64_t L = f->seq_len, i = o->series, end = f->panel->offsets[i] + o->known;
    const int64_t rows = o->known < L ? o->known : L, filled = L - rows;
    PS_TRY(ps_series_rows(f->series, end - rows, rows, to + filled));
    if (f->scaler.panel) {
        ps_scaler_scale_rows(&f->scaler, end - rows, rows, to + filled);
    }
    for (int64_t l = 0; l < filled; l++) {
        to[l] = to[filled];
    }
    f->n_short += filled > 0 && !f->is_short[i];
    f->is_short[i] |= filled > 0;
    return PS_OK;
}

/* ---- output ---- */

/* The k-th value under way, or the end of its interval at that side, -1 or 1. */
static float value_at(const struct panel_forecast *f, float value, const struct origin *o, int64_t step, int side)
{
    const double std = f->scaler.panel ? f->scaler.std[o->series] : 1;
    return side ? value + (float)side * (float)(f->request->half[step] * std) : value;
}

static const int sides[] = {0, -1, 1};

static void put_rows(FILE *to, const struct panel_forecast *f)
{
    for (int64_t k = 0; k < f->n * f->steps; k++) {
        const struct origin *o = &f->at[k / f->steps];
        const int64_t step = k % f->steps;
        ps_put_field(to, ps_panel_id(f->panel, o->series), "");
        if (f->request->last > 1) {
            fprintf(to, ",%s", ps_date_text(ps_panel_time(f->panel, o->series, o->known - 1)).text);
        }
        fprintf(to, ",%s", ps_date_text(ps_panel_time(f->panel, o->series, o->known + step)).text);
        for (int side = 0; side < (f->request->half ? 3 : 1); side++) {
            putc(',', to);
            ps_put_value(to, value_at(f, f->forecasts[k], o, step, sides[side]));
        }
        for (int q = 0; q < f->loss.quantiles; q++) {
            putc(',', to);
            ps_put_value(to, f->quantiles[k * f->loss.quantiles + q]);
        }
        fputs(f->steps <= f->pred_len ? "\n" : step < f->pred_len ? ",0\n" : ",1\n", to);
    }
}

static void put_header(FILE *to, const struct panel_forecast *f)
{
    fprintf(to, "id,%stime,value", f->request->last > 1 ? "origin," : "");
    if (f->request->half) {
        fprintf(to, ",value_lo%.10g,value_hi%.10g", 100 * f->request->level, 100 * f->request->level);
    }
    for (int q = 0; q < f->loss.quantiles; q++) {
        fprintf(to, ",value_q%.10g", 100 * f->loss.quantile[q]);
    }
    fputs(f->steps <= f->pred_len ? "\n" : ",fed_back\n", to);
}

/* The rows under way, the header before the first; with none, the header alone. */
static enum ps_status write_rows(struct panel_forecast *f, int header)
{
    char *text = NULL;
    size_t size = 0;
    FILE *to = open_memstream(&text, &size);
    if (to && header) {
        put_header(to, f);
    }
    if (to) {
        put_rows(to, f);
    }
    enum ps_status status = to && fclose(to) == 0 ? PS_OK : ps_fail(PS_DATA, "no memory for what is to be written");
    if (status == PS_OK && f->csv) {
        ps_output_write(f->csv, f->written, text, size);
        f->written += size;
    } else if (status == PS_OK && fwrite(text, 1, size, stdout) != size) {
        status = ps_stdout_flush(PS_USAGE);
    }
    free(text);
    return status;
}

/* Those under way that are the latest of their series. */
static void keep(struct panel_forecast *f, const struct origin *latest)
{
    for (int64_t k = 0; k < f->n; k++) {
        if (k == f->n - 1 ? f->at[k].known == latest->known : f->at[k + 1].series != f->at[k].series) {
            const int Q = f->loss.quantiles;
            memcpy(f->all + f->kept * f->steps, f->forecasts + k * f->steps, (size_t)f->steps * sizeof *f->all);
            for (int64_t i = 0; i < f->steps * Q; i++) {
                f->all_quantiles[(i % Q * f->panel->series + f->kept) * f->steps + i / Q] = f->quantiles[k * f->steps * Q + i];
            }
            f->of[f->kept++] = f->at[k];
        }
    }
}

/* latest: of the last series under way. */
static enum ps_status forecast_some(struct panel_forecast *f, const struct origin *latest, int header)
{
    for (int64_t k = 0; k < f->n; k++) {
        PS_TRY(take_window(f, &f->at[k], f->inputs + k * f->seq_len));
    }
    PS_TRY(ps_forecaster_extend(f->forecaster, f->inputs, f->n, f->steps, f->forecasts, f->quantiles));
    for (int64_t k = 0; k < f->n && f->scaler.panel; k++) {
        const int64_t window = f->panel->offsets[f->at[k].series], count = f->steps * f->loss.quantiles;
        ps_scaler_restore(&f->scaler, window, f->steps, f->forecasts + k * f->steps);
        if (count > 0) {
            ps_scaler_restore(&f->scaler, window, count, f->quantiles + k * count);
        }
    }
    if (f->all) {
        keep(f, latest);
    }
    return f->rows ? write_rows(f, header) : PS_OK;
}

static enum ps_status forecast_all(struct panel_forecast *f)
{
    const struct ps_panel *p = f->panel;
    struct origin latest = {0};
    int64_t seconds = 0;
    int header = 1;
    if (f->request->origin) {
        PS_TRY(find_origin(f, &seconds));
    }
    for (int64_t i = 0; i < p->series; i++) {
        if (f->is_out[i]) {
            continue;
        }
        const int64_t rows = f->request->origin ? ps_panel_row(p, i, seconds) + 1 : p->offsets[i + 1] - p->offsets[i];
        latest = (struct origin){i, rows};
        for (int64_t known = rows > f->request->last ? rows - f->request->last + 1 : 1; known <= rows; known++) {
            f->at[f->n++] = (struct origin){i, known};
            if (f->n == AT_ONCE) {
                PS_TRY(forecast_some(f, &latest, header));
                f->n = header = 0;
            }
        }
    }
    return f->n > 0 ? forecast_some(f, &latest, header) : PS_OK;
}

/* Forecasts are a panel too, whose series begin behind the origins. */
static enum ps_status write_panel(const struct panel_forecast *f, const char *out)
{
    struct ps_panel panel = *f->panel;
    const size_t n = (size_t)f->kept;
    panel.series = f->kept;
    panel.offsets = malloc((n + 1) * sizeof *panel.offsets);
    panel.start = malloc(n * sizeof *panel.start);
    panel.id_at = malloc(n * sizeof *panel.id_at);
    float *end[2] = {NULL, NULL};
    int failed = !panel.offsets || !panel.start || !panel.id_at;
    for (int side = 0; side < 2 && f->request->half; side++) {
        end[side] = malloc(n * (size_t)f->steps * sizeof *end[side]);
        failed |= !end[side];
        for (int64_t k = 0; k < f->kept * f->steps && !failed; k++) {
            end[side][k] = value_at(f, f->all[k], &f->of[k / f->steps], k % f->steps, sides[1 + side]);
        }
    }
    for (int64_t k = 0; k <= f->kept && !failed; k++) {
        panel.offsets[k] = k * f->steps;
        if (k < f->kept) {
            panel.start[k] = ps_panel_time(f->panel, f->of[k].series, f->of[k].known);
            panel.id_at[k] = f->panel->id_at[f->of[k].series];
        }
    }
    struct ps_panel_list more[PS_MOST_QUANTILES + 1] = {{NULL, NULL}};
    char name[PS_MOST_QUANTILES][32];
    if (f->request->half) {
        more[0] = (struct ps_panel_list){"/lower", end[0]};
        more[1] = (struct ps_panel_list){"/upper", end[1]};
    }
    for (int q = 0; q < f->loss.quantiles; q++) { /* without intervals then */
        snprintf(name[q], sizeof name[q], "/q%.10g", 100 * f->loss.quantile[q]);
        more[q] = (struct ps_panel_list){name[q], f->all_quantiles + q * f->panel->series * f->steps};
    }
    enum ps_status status = failed ? ps_fail(PS_DATA, "%s: no memory for its series", out)
                                   : ps_panel_write_with(out, &panel, f->all, NULL, more[0].name ? more : NULL);
    free(panel.offsets);
    free(panel.start);
    free(panel.id_at);
    free(end[0]);
    free(end[1]);
    return status;
}

/* ---- all of it ---- */

/* Each series by its own training rows, as it was trained. */
static enum ps_status fit_scaler(struct panel_forecast *f, const struct ps_config *config)
{
    struct ps_splits splits = {0};
    enum ps_status status = config->data.split_dated
                                ? ps_panel_splits_dated(f->series, config->data.split_from, 0, f->seq_len, f->pred_len, &splits)
                                : ps_panel_splits(f->series, config->data.split, 0, f->seq_len, f->pred_len, &splits);
    if (status == PS_OK) {
        status = ps_scaler_fit(f->series, &splits, &f->scaler);
    }
    ps_splits_free(&splits);
    return status;
}

static enum ps_status allocate(struct panel_forecast *f, int all)
{
    const int64_t series = f->panel->series;
    int64_t count;
    if (__builtin_mul_overflow(series, f->steps, &count) || (all && count > INT32_MAX)) {
        return ps_fail(PS_USAGE, "--steps: %" PRId64 " rows for each of %" PRId64 " series are more than %d", f->steps, series,
                       INT32_MAX);
    }
    f->at = malloc(AT_ONCE * sizeof *f->at);
    f->inputs = malloc((size_t)(AT_ONCE * f->seq_len) * sizeof *f->inputs);
    f->forecasts = malloc((size_t)(AT_ONCE * f->steps) * sizeof *f->forecasts);
    const int64_t Q = f->loss.quantiles;
    f->quantiles = Q ? malloc((size_t)(AT_ONCE * f->steps * Q) * sizeof *f->quantiles) : NULL;
    f->all_quantiles = all && Q ? malloc((size_t)(count * Q) * sizeof *f->all_quantiles) : NULL;
    f->is_short = calloc((size_t)series, 1);
    f->is_out = calloc((size_t)series, 1);
    f->all = all ? malloc((size_t)count * sizeof *f->all) : NULL;
    f->of = all ? malloc((size_t)series * sizeof *f->of) : NULL;
    return f->at && f->inputs && f->forecasts && f->is_short && f->is_out && (!all || (f->all && f->of)) &&
                   (!Q || (f->quantiles && (!all || f->all_quantiles)))
               ? PS_OK
               : ps_fail(PS_DATA, "no memory for %" PRId64 " forecasts", count);
}

static enum ps_status run(struct panel_forecast *f, const struct ps_checkpoint *checkpoint, const struct ps_config *config)
{
    const struct ps_panel_request *r = f->request;
    const int to_panel = r->out && ps_text_ends(r->out, ".h5");
    if (to_panel && r->last > 1) {
        return ps_fail(PS_USAGE,
                       "--last %" PRId64 ": %s is to be a panel, of one forecast a series: write CSV, or leave out --last", r->last,
                       r->out);
    }
    PS_TRY(allocate(f, to_panel || r->also));
    if (checkpoint->by_series) {
        PS_TRY(fit_scaler(f, config));
    }
    PS_TRY(ps_forecaster_open(checkpoint, config, r->device, AT_ONCE, f->series->missing > 0, &f->forecaster));
    if (r->out && !to_panel) {
        PS_TRY(ps_output_open(PS_DATA, r->out, &f->csv));
    }
    f->rows = !to_panel;
    enum ps_status status = forecast_all(f);
    if (f->csv) {
        status = ps_output_finish(f->csv, status);
    }
    PS_TRY(status);
    PS_TRY(to_panel ? write_panel(f, r->out) : f->csv ? PS_OK : ps_stdout_flush(PS_USAGE));
    return r->also ? write_panel(f, r->also) : PS_OK;
}

enum ps_status ps_forecast_panel(const struct ps_checkpoint *checkpoint, const struct ps_config *config,
                                 const struct ps_series *series, const struct ps_panel_request *request)
{
    struct panel_forecast f = {.series = series,
                               .panel = series->panel,
                               .request = request,
                               .seq_len = config->model.seq_len,
                               .pred_len = config->model.pred_len,
                               .loss = ps_config_loss(config),
                               .steps = request->steps};
    enum ps_status status = run(&f, checkpoint, config);
    if (status == PS_OK && f.n_out > 0) {
        fprintf(stderr,
                "forecast: warning: %s: %" PRId64 " of %" PRId64 " series have no row at the origin, %s, and are left out: %s\n",
                series->path, f.n_out, f.panel->series, request->origin, ps_panel_some(f.panel, f.is_out).text);
    }
    if (status == PS_OK && f.n_short > 0) {
        fprintf(stderr,
                "forecast: warning: %s: %" PRId64 " of %" PRId64 " series are shorter than seq_len, %" PRId64
                ", %sand filled on the left with their first value: %s\n",
                series->path, f.n_short, f.panel->series, f.seq_len,
                request->origin || request->last > 1 ? "up to an origin, " : "", ps_panel_some(f.panel, f.is_short).text);
    }
    if (status == PS_OK) {
        ps_forecaster_warn(&f.loss, f.steps, f.pred_len);
    }
    ps_forecaster_close(f.forecaster);
    ps_scaler_free(&f.scaler);
    free(f.at);
    free(f.inputs);
    free(f.forecasts);
    free(f.quantiles);
    free(f.all_quantiles);
    free(f.is_short);
    free(f.is_out);
    free(f.all);
    free(f.of);
    return status;
}
