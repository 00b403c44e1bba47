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

enum { AT_ONCE = 4096 }; /* series */

struct panel_forecast {
    const struct ps_series *series;
    const struct ps_panel *panel;
    struct ps_scaler scaler; /* by series; of no series: the forecaster's own is enough */
    struct ps_forecaster *forecaster;
    int64_t seq_len, pred_len, steps;
    float *inputs, *forecasts; /* [AT_ONCE, seq_len], [AT_ONCE, steps] */
    char *is_short;            /* [series] */
    int64_t n_short;

    int rows;              /* are written as they come */
    struct ps_output *csv; /* where; NULL: to stdout */
    uint64_t written;
    float *all; /* [series, steps]; NULL: not kept */
};

/* The last seq_len rows of a series, those before its first filled with that one's value; scaled. */
static enum ps_status take_window(struct panel_forecast *f, int64_t i, float *to)
{
    const int64_t L = f->seq_len, begin = f->panel->offsets[i], end = f->panel->offsets[i + 1];
    const int64_t rows = end - begin < L ? end - begin : L, filled = L - rows;
    PS_TRY(ps_series_rows(f->series, end - rows, rows, to + filled));
    if (f->scaler.panel) {
        ps_scaler_scale_rows(&f->scaler, end - rows, rows, to + filled);
    }
    for (int64_t l = 0; l < filled; l++) {
        to[l] = to[filled];
    }
    f->is_short[i] = filled > 0;
    f->n_short += filled > 0;
    return PS_OK;
}

static void put_rows(FILE *to, const struct panel_forecast *f, int64_t first, int64_t n)
{
    for (int64_t k = 0; k < n * f->steps; k++) {
        const int64_t i = first + k / f->steps, step = k % f->steps, rows = f->panel->offsets[i + 1] - f->panel->offsets[i];
        ps_put_field(to, ps_panel_id(f->panel, i), "");
        fprintf(to, ",%s,", ps_date_text(ps_panel_time(f->panel, i, rows + step)).text);
        ps_put_value(to, f->forecasts[k]);
        fputs(f->steps <= f->pred_len ? "\n" : step < f->pred_len ? ",0\n" : ",1\n", to);
    }
}

/* Rows of series first .. first + n, the header before the first. */
static enum ps_status write_rows(struct panel_forecast *f, int64_t first, int64_t n)
{
    char *text = NULL;
    size_t size = 0;
    FILE *to = open_memstream(&text, &size);
    if (to) {
        if (first == 0) {
            fputs(f->steps <= f->pred_len ? "id,time,value\n" : "id,time,value,fed_back\n", to);
        }
        put_rows(to, f, first, n);
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

static enum ps_status forecast_all(struct panel_forecast *f)
{
    for (int64_t first = 0, n; first < f->panel->series; first += n) {
        n = f->panel->series - first < AT_ONCE ? f->panel->series - first : AT_ONCE;
        for (int64_t k = 0; k < n; k++) {
            PS_TRY(take_window(f, first + k, f->inputs + k * f->seq_len));
        }
        PS_TRY(ps_forecaster_extend(f->forecaster, f->inputs, n, f->steps, f->forecasts));
        for (int64_t k = 0; k < n && f->scaler.panel; k++) {
            ps_scaler_restore(&f->scaler, f->panel->offsets[first + k], f->steps, f->forecasts + k * f->steps);
        }
        if (f->all) {
            memcpy(f->all + first * f->steps, f->forecasts, (size_t)(n * f->steps) * sizeof *f->all);
        }
        if (f->rows) {
            PS_TRY(write_rows(f, first, n));
        }
    }
    return PS_OK;
}

/* Forecasts are a panel too, whose series begin where those of the data end. */
static enum ps_status write_panel(const struct panel_forecast *f, const char *out)
{
    struct ps_panel panel = *f->panel;
    panel.offsets = malloc((size_t)(panel.series + 1) * sizeof *panel.offsets);
    panel.start = malloc((size_t)panel.series * sizeof *panel.start);
    enum ps_status status = panel.offsets && panel.start ? PS_OK : ps_fail(PS_DATA, "%s: no memory for its times", out);
    for (int64_t i = 0; i <= panel.series && status == PS_OK; i++) {
        panel.offsets[i] = i * f->steps;
        if (i < panel.series) {
            panel.start[i] = ps_panel_time(f->panel, i, f->panel->offsets[i + 1] - f->panel->offsets[i]);
        }
    }
    if (status == PS_OK) {
        status = ps_panel_write(out, &panel, f->all, NULL);
    }
    free(panel.offsets);
    free(panel.start);
    return status;
}

/* Each series by its own training rows, as it was trained. */
static enum ps_status fit_scaler(struct panel_forecast *f, const struct ps_config *config)
{
    struct ps_splits splits = {0};
    enum ps_status status = ps_panel_splits(f->series, config->data.split, 0, f->seq_len, f->pred_len, &splits);
    if (status == PS_OK) {
        status = ps_scaler_fit(f->series, &splits, &f->scaler);
    }
    ps_splits_free(&splits);
    return status;
}

static enum ps_status run(struct panel_forecast *f, const struct ps_checkpoint *checkpoint, const struct ps_config *config,
                          const char *device, const char *out, const char *also)
{
    const int to_panel = out && ps_text_ends(out, ".h5"), all = to_panel || also;
    int64_t count;
    if (__builtin_mul_overflow(f->panel->series, f->steps, &count) || (all && count > INT32_MAX)) {
        return ps_fail(PS_USAGE, "--steps: %" PRId64 " rows for each of %" PRId64 " series are more than %d", f->steps,
                       f->panel->series, INT32_MAX);
    }
    f->inputs = malloc((size_t)(AT_ONCE * f->seq_len) * sizeof *f->inputs);
    f->forecasts = malloc((size_t)(AT_ONCE * f->steps) * sizeof *f->forecasts);
    f->is_short = calloc((size_t)f->panel->series, 1);
    f->all = all ? malloc((size_t)count * sizeof *f->all) : NULL;
    if (!f->inputs || !f->forecasts || !f->is_short || (all && !f->all)) {
        return ps_fail(PS_DATA, "no memory for %" PRId64 " forecasts", count);
    }
    if (checkpoint->by_series) {
        PS_TRY(fit_scaler(f, config));
    }
    PS_TRY(ps_forecaster_open(checkpoint, config, device, AT_ONCE, &f->forecaster));
    if (out && !to_panel) {
        PS_TRY(ps_output_open(PS_DATA, out, &f->csv));
    }
    f->rows = !to_panel;
    enum ps_status status = forecast_all(f);
    if (f->csv) {
        status = ps_output_finish(f->csv, status);
    }
    PS_TRY(status);
    PS_TRY(to_panel ? write_panel(f, out) : f->csv ? PS_OK : ps_stdout_flush(PS_USAGE));
    return also ? write_panel(f, also) : PS_OK;
}

enum ps_status ps_forecast_panel(const struct ps_checkpoint *checkpoint, const struct ps_config *config,
                                 const struct ps_series *series, const char *device, int64_t steps, const char *out,
                                 const char *also)
{
    struct panel_forecast f = {.series = series,
                               .panel = series->panel,
                               .seq_len = config->model.seq_len,
                               .pred_len = config->model.pred_len,
                               .steps = steps};
    enum ps_status status = run(&f, checkpoint, config, device, out, also);
    if (status == PS_OK && f.n_short > 0) {
        fprintf(stderr,
                "forecast: warning: %s: %" PRId64 " of %" PRId64 " series are shorter than seq_len, %" PRId64
                ", and filled on the left with their first value: %s\n",
                series->path, f.n_short, f.panel->series, f.seq_len, ps_panel_some(f.panel, f.is_short).text);
    }
    ps_forecaster_close(f.forecaster);
    ps_scaler_free(&f.scaler);
    free(f.inputs);
    free(f.forecasts);
    free(f.is_short);
    free(f.all);
    return status;
}
