/* forecast: what comes after the end of the data, by a checkpoint's model. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/dates.h"
#include "data/files.h"
#include "data/hdf5_util.h"
#include "data/panel.h"
#include "data/text.h"
#include "data/times.h"
#include "src/csv_out.h"
#include "src/data_file.h"
#include "src/engine.h"
#include "src/forecast_panel.h"
#include "src/forecaster.h"
#include "src/intervals.h"
#include "src/kept.h"
#include "src/options.h"
#include "src/passive.h"
#include "src/picture.h"

static const char usage[] =
    "usage: forecast CHECKPOINT|RUN [--data FILE] [--panel ID,TIME,VALUE] [--out FILE] [--origin TIME|ROW] [--last N] [--steps N]\n"
    "                [--interval LEVEL] [--plot PICTURE] [--overwrite] [--device auto|cpu|cuda[:N]] [--precision "
    "fp32|tf32|bf16|fp16]\n"
    "\n"
    "Forecasts the rows after the end of the data, in the data's own units: pred_len of them, as the model was trained. Of a "
    "panel,\n"
    "those after the end of each series: rows of id, time and value, and in FILE.h5 another panel.\n"
    "\n"
    "  RUN               a run's folder: its best checkpoint, or the last where there is no best\n"
    "  --data FILE       the series, HDF5 or CSV (default: the run's); its channels are found by name\n"
    "  --panel ID,TIME,VALUE   FILE is a CSV of many series, and these are its columns, as for import_csv\n"
    "  --out FILE        FILE.h5: /forecasts [origins, steps, channels], /origin and /time; another name: CSV (default: to "
    "stdout)\n"
    "  --origin TIME     the last row that is known, by its time (\"2018-06-26 19:00\") or its number, counted from 0; of a panel "
    "by\n"
    "                    its time, and series without a row at that time are left out\n"
    "  --last N          N forecasts: from the origin and from each of the N - 1 rows before it; of a panel as CSV alone\n"
    "  --steps N         N rows; beyond pred_len by feeding forecasts back, and column fed_back says so\n"
    "  --interval LEVEL  columns CHANNEL_loN and CHANNEL_hiN (in FILE.h5 /lower, /upper), between which N = 100 LEVEL percent of\n"
    "                    targets lie, by the errors over the run's validation windows; up to pred_len steps. A model of\n"
    "                    quantiles gives columns CHANNEL_qN (/quantiles) in their place, unasked\n"
    "  --plot PICTURE    also drawn behind the rows before them, by plot.py, which needs python3 with matplotlib and h5py: a PNG,\n"
    "                    PDF or SVG; of --last the latest, of a panel a few series\n"
    "  --overwrite       replace FILE and PICTURE when they exist\n"
    "  --device, --precision   what computes it (default: as trained where this machine can, else fp32 on the CPU)\n"
    "\n"
    "exit codes: 0 done, 2 usage or config, 3 data, 4 checkpoint, 5 device\n";

struct arguments {
    const char *checkpoint, *data, *panel, *out, *origin, *plot, *device, *precision;
    uint64_t last, steps;
    double interval; /* 0: none */
    int overwrite;
};

static enum ps_status parse(int argc, char **argv, struct arguments *a)
{
    *a = (struct arguments){.last = 1};
    const char *interval = NULL;
    const struct ps_option options[] = {{"data", .text = &a->data},
                                        {"panel", .text = &a->panel},
                                        {"out", .text = &a->out},
                                        {"origin", .text = &a->origin},
                                        {"last", .number = &a->last, .least = 1, .most = INT32_MAX},
                                        {"steps", .number = &a->steps, .least = 1, .most = 1 << 20},
                                        {"interval", .text = &interval},
                                        {"plot", .text = &a->plot},
                                        {"overwrite", .given = &a->overwrite},
                                        {"device", .text = &a->device},
                                        {"precision", .text = &a->precision},
                                        {0}};
    PS_TRY(ps_options_read(argc, argv, options, 1, "one CHECKPOINT", usage));
    a->checkpoint = argv[argc - 1];
    if (a->plot) {
        PS_TRY(ps_picture_check(a->plot));
    }
    return interval ? ps_intervals_level(interval, &a->interval) : PS_OK;
}

/* ---- the data ---- */

struct data {
    struct ps_data_file file;
    struct ps_series *series;
    struct ps_times times;
};

static enum ps_status open_series(const struct arguments *a, const struct ps_checkpoint *checkpoint, const struct ps_config *c,
                                  struct data *d)
{
    const char *path = a->data ? a->data : c->data.path;
    if (!path || !*path) {
        return ps_fail(PS_USAGE, "the checkpoint names no data: give --data");
    }
    struct ps_reading reading = ps_checkpoint_reading(checkpoint, c, 1);
    reading.rows = 1;
    PS_TRY(ps_data_file_open("forecast", path, a->panel, checkpoint, c, &d->file));
    PS_TRY(ps_series_open_as(d->file.path, &reading, &d->series));
    if (d->series->channels != checkpoint->scaler.channels) {
        return ps_fail(PS_DATA, "%s: %" PRId64 " channels, the checkpoint's model has %" PRId64, path, d->series->channels,
                       checkpoint->scaler.channels);
    }
    return d->series->panel ? PS_OK : ps_times_read(d->file.path, d->series->rows, &d->times);
}

/* The row after which the first forecast begins. */
static enum ps_status find_origin(const struct arguments *a, const struct ps_config *c, const char *path, const struct data *d,
                                  int64_t *origin)
{
    const int64_t rows = d->series->rows, L = c->model.seq_len;
    *origin = rows - 1;
    if (a->origin) {
        char *end;
        int64_t seconds, number = strtoll(a->origin, &end, 10);
        if (*a->origin >= '0' && *a->origin <= '9' && !*end) {
            *origin = number;
        } else if (!ps_date_read(a->origin, &seconds)) {
            return ps_fail(PS_USAGE, "--origin is \"%.60s\": expected a row's number or its time, as " PS_DATE_FORMS, a->origin);
        } else if (!d->times.time) {
            return ps_fail(PS_DATA, "%s: has no /time: give --origin as a row's number", path);
        } else {
            for (*origin = 0; *origin < rows && d->times.time[*origin] != seconds; ++*origin) {
            }
            if (*origin == rows) {
                return ps_fail(PS_DATA, "%s: no row has the time %s: it has %s to %s", path, ps_date_text(seconds).text,
                               ps_date_text(d->times.time[0]).text, ps_date_text(d->times.time[rows - 1]).text);
            }
        }
    }
    if (*origin >= rows) {
        return ps_fail(PS_USAGE, "--origin is row %" PRId64 ": %s has %" PRId64 ", counted from 0", *origin, path, rows);
    }
    if (*origin + 1 < L + (int64_t)a->last - 1) {
        return ps_fail(PS_DATA, "%s: %" PRId64 " rows up to the origin: %" PRId64 " are needed, the model's seq_len%s", path,
                       *origin + 1, L + (int64_t)a->last - 1, a->last > 1 ? " and one for each more of --last" : "");
    }
    return PS_OK;
}

/* ---- forecasts ---- */

/* inputs [n, C, L]: the windows that end with rows origin - n + 1 .. origin. */
static enum ps_status take_windows(const struct data *d, int64_t origin, int64_t n, int64_t C, int64_t L, float *inputs)
{
    const int64_t rows = L + n - 1;
    float *values = malloc((size_t)(rows * C) * sizeof *values);
    if (!values) {
        return ps_fail(PS_DATA, "no memory for %" PRId64 " rows", rows);
    }
    enum ps_status status = ps_series_rows(d->series, origin + 1 - rows, rows, values);
    for (int64_t i = 0; i < n * C && status == PS_OK; i++) {
        for (int64_t l = 0; l < L; l++) {
            inputs[i * L + l] = values[(i / C + l) * C + i % C];
        }
    }
    free(values);
    return status;
}

/* Half widths in the data's own units, [C, H], malloc'ed: by the run's own data, whatever is forecast. */
static enum ps_status fit_intervals(const struct arguments *a, const struct ps_checkpoint *checkpoint, const struct ps_config *c,
                                    float **half)
{
    struct ps_session *s = NULL;
    struct ps_intervals intervals = {.half = NULL};
    enum ps_status status = ps_session_open(c, &(struct ps_session_options){.device = a->device, .checkpoint = checkpoint}, &s);
    if (status == PS_OK) {
        status = ps_session_load_weights(s, checkpoint, 0);
    }
    if (status == PS_OK) {
        status = ps_intervals_fit(s, a->interval, &intervals);
    }
    ps_session_close(s);
    for (int64_t i = 0; status == PS_OK && i < intervals.channels * intervals.pred_len; i++) {
        intervals.half[i] = (float)(intervals.half[i] * checkpoint->scaler.std[i / intervals.pred_len]);
    }
    *half = intervals.half;
    return status;
}

/* ---- output ---- */

struct result {
    int64_t origin, n, steps, channels, pred_len;
    const char *names;   /* each with a zero byte behind it; NULL: numbers */
    const float *values; /* [n, steps, channels] */
    const float *half;   /* [channels, pred_len]; NULL: no intervals */
    double level;
    const struct ps_times *times;
    const struct ps_loss *loss;
    const float *quantiles; /* [n, steps, channels, Q]; NULL: the model has none */
};

/* A row's time, or its number. */
static void put_time(FILE *to, const struct result *r, int64_t origin, int64_t after)
{
    if (r->times->time) {
        fputs(ps_date_text(ps_steps_after(&r->times->steps, r->times->time[origin], after)).text, to);
    } else {
        fprintf(to, "%" PRId64, origin + after);
    }
}

/* The i-th value, or the end of its interval at that side, -1 or 1. */
static float value_at(const struct result *r, int64_t i, int side)
{
    const int64_t c = i % r->channels, step = i / r->channels % r->steps;
    return side ? r->values[i] + (float)side * r->half[c * r->pred_len + step] : r->values[i];
}

static void write_csv(FILE *to, const struct result *r)
{
    const char *name = r->names;
    const char *time = r->times->time ? "time" : "row";
    fprintf(to, "%s%s", r->n > 1 ? "origin," : "", time);
    for (int64_t c = 0; c < r->channels; c++) {
        char number[32], suffix[32];
        snprintf(number, sizeof number, "channel_%" PRId64, c);
        for (int side = 0; side < (r->half ? 3 : 1); side++) {
            snprintf(suffix, sizeof suffix, side ? "_%s%.10g" : "", side == 1 ? "lo" : "hi", 100 * r->level);
            putc(',', to);
            ps_put_field(to, name ? name : number, suffix);
        }
        for (int q = 0; r->quantiles && q < r->loss->quantiles; q++) {
            snprintf(suffix, sizeof suffix, "_q%.10g", 100 * r->loss->quantile[q]);
            putc(',', to);
            ps_put_field(to, name ? name : number, suffix);
        }
        name = name ? name + strlen(name) + 1 : NULL;
    }
    fputs(r->steps > r->pred_len ? ",fed_back\n" : "\n", to);
    for (int64_t i = 0; i < r->n * r->steps; i++) {
        const int64_t origin = r->origin - r->n + 1 + i / r->steps, step = i % r->steps;
        if (r->n > 1) {
            put_time(to, r, origin, 0);
            putc(',', to);
        }
        put_time(to, r, origin, step + 1);
        for (int64_t c = 0; c < r->channels; c++) {
            static const int sides[] = {0, -1, 1};
            for (int side = 0; side < (r->half ? 3 : 1); side++) {
                putc(',', to);
                ps_put_value(to, value_at(r, i * r->channels + c, sides[side]));
            }
            for (int64_t q = 0; r->quantiles && q < r->loss->quantiles; q++) {
                putc(',', to);
                ps_put_value(to, r->quantiles[(i * r->channels + c) * r->loss->quantiles + q]);
            }
        }
        fputs(r->steps <= r->pred_len ? "\n" : step < r->pred_len ? ",0\n" : ",1\n", to);
    }
}

static enum ps_status csv_file(const char *path, const struct result *r)
{
    char *text = NULL;
    size_t size = 0;
    FILE *to = open_memstream(&text, &size);
    if (to) {
        write_csv(to, r);
    }
    if (!to || fclose(to) != 0) {
        free(text);
        return ps_fail(PS_DATA, "%s: no memory for what is to be written", path);
    }
    enum ps_status status = ps_file_replace(PS_DATA, path, text, size);
    free(text);
    return status;
}

static enum ps_status write_quantiles(const struct ps_hdf5_output *out, const struct result *r)
{
    hid_t set PS_HDF5_SCOPED = H5I_INVALID_HID;
    const hsize_t size[4] = {(hsize_t)r->n, (hsize_t)r->steps, (hsize_t)r->channels, (hsize_t)r->loss->quantiles};
    PS_TRY(ps_hdf5_create_rows(out, "/quantiles", H5T_IEEE_F32LE, 4, size, &set));
    PS_TRY(ps_hdf5_write_reals(out, set, "levels", r->loss->quantile, size[3]));
    return ps_hdf5_write_rows(out, "/quantiles", set, 0, size[0], r->quantiles);
}

static enum ps_status write_datasets(const struct ps_hdf5_output *out, const struct result *r)
{
    hid_t forecasts PS_HDF5_SCOPED = H5I_INVALID_HID, origins PS_HDF5_SCOPED = H5I_INVALID_HID,
                    rows PS_HDF5_SCOPED = H5I_INVALID_HID;
    const hsize_t size[3] = {(hsize_t)r->n, (hsize_t)r->steps, (hsize_t)r->channels};
    const int64_t all = r->n * r->steps;
    PS_TRY(ps_hdf5_create_rows(out, "/forecasts", H5T_IEEE_F32LE, 3, size, &forecasts));
    PS_TRY(ps_hdf5_write_rows(out, "/forecasts", forecasts, 0, size[0], r->values));
    const char **names = malloc((size_t)r->channels * sizeof *names);
    int64_t *time = malloc((size_t)(all + r->n) * sizeof *time), *origin = time + all;
    enum ps_status status = names && time ? PS_OK : ps_fail(PS_DATA, "%s: no memory for %" PRId64 " times", out->path, all);
    if (status == PS_OK && r->names) {
        const char *name = r->names;
        for (int64_t c = 0; c < r->channels; c++, name += strlen(name) + 1) {
            names[c] = name;
        }
        status = ps_hdf5_write_texts(out, forecasts, "channels", (char *const *)names, size[2]);
    }
    for (int64_t i = 0; i < all && status == PS_OK; i++) {
        const int64_t from = r->origin - r->n + 1 + i / r->steps, after = i % r->steps + 1;
        time[i] = r->times->time ? ps_steps_after(&r->times->steps, r->times->time[from], after) : from + after;
        origin[i / r->steps] = r->times->time ? r->times->time[from] : from;
    }
    if (status == PS_OK) {
        status = ps_hdf5_create_rows(out, r->times->time ? "/time" : "/row", H5T_STD_I64LE, 2, size, &rows);
    }
    if (status == PS_OK) {
        status = ps_hdf5_write_rows(out, "/time", rows, 0, size[0], time);
    }
    if (status == PS_OK) {
        status = ps_hdf5_create_rows(out, "/origin", H5T_STD_I64LE, 1, size, &origins);
    }
    if (status == PS_OK) {
        status = ps_hdf5_write_rows(out, "/origin", origins, 0, size[0], origin);
    }
    static const char *const ends[] = {"/lower", "/upper"};
    for (int side = 0; side < 2 && r->half && status == PS_OK; side++) {
        hid_t set PS_HDF5_SCOPED = H5I_INVALID_HID;
        float *values = malloc((size_t)(all * r->channels) * sizeof *values);
        for (int64_t i = 0; values && i < all * r->channels; i++) {
            values[i] = value_at(r, i, side ? 1 : -1);
        }
        status = values ? ps_hdf5_create_rows(out, ends[side], H5T_IEEE_F32LE, 3, size, &set)
                        : ps_fail(PS_DATA, "%s: no memory for %" PRId64 " rows", out->path, all);
        status = status == PS_OK ? ps_hdf5_write_rows(out, ends[side], set, 0, size[0], values) : status;
        free(values);
    }
    if (r->quantiles && status == PS_OK) {
        status = write_quantiles(out, r);
    }
    free(names);
    free(time);
    return status;
}

static enum ps_status write_result(const char *path, const struct result *r)
{
    if (!path) {
        write_csv(stdout, r);
        return ps_stdout_flush(PS_USAGE);
    }
    if (!ps_text_ends(path, ".h5")) {
        return csv_file(path, r);
    }
    struct ps_hdf5_output out;
    PS_TRY(ps_hdf5_create(path, &out));
    return ps_hdf5_finish(&out, write_datasets(&out, r));
}

/* ---- all of it ---- */

/* What is drawn is written for it alone: the latest origin's. */
static enum ps_status write_drawn(const struct result *r, char path[PS_SCRATCH_PATH])
{
    struct result latest = *r;
    latest.values += (r->n - 1) * r->steps * r->channels;
    if (r->quantiles) {
        latest.quantiles += (r->n - 1) * r->steps * r->channels * r->loss->quantiles;
    }
    latest.n = 1;
    PS_TRY(ps_scratch_file("forecast", "forecasts.h5", path));
    return write_result(path, &latest);
}

static enum ps_status draw(const struct arguments *a, const struct data *d, const char *forecasts)
{
    const enum ps_status status = ps_picture_draw(forecasts, d->file.path, a->plot);
    return status == PS_OK
               ? PS_OK
               : ps_fail(status, "--plot %s: the forecasts are written, but not drawn: %s", a->plot, ps_error_message());
}

static enum ps_status of_panel(const struct arguments *a, const struct ps_checkpoint *checkpoint, const struct ps_config *c,
                               const struct data *d, int64_t steps)
{
    char drawn[PS_SCRATCH_PATH] = "";
    float *half = NULL;
    if (a->plot) {
        PS_TRY(ps_scratch_file("forecast", "forecasts.h5", drawn));
    }
    if (a->interval > 0) {
        PS_TRY(fit_intervals(a, checkpoint, c, &half));
    }
    const struct ps_panel_request request = {.steps = steps,
                                             .origin = a->origin,
                                             .last = (int64_t)a->last,
                                             .half = half,
                                             .level = a->interval,
                                             .device = a->device,
                                             .out = a->out,
                                             .also = a->plot ? drawn : NULL};
    const enum ps_status status = ps_forecast_panel(checkpoint, c, d->series, &request);
    free(half);
    return status == PS_OK && a->plot ? draw(a, d, drawn) : status;
}

static enum ps_status forecast(const struct arguments *a, const struct ps_checkpoint *checkpoint, const struct ps_config *c,
                               struct data *d)
{
    const char *path = a->data ? a->data : c->data.path;
    const int64_t n = (int64_t)a->last, C = checkpoint->scaler.channels, L = c->model.seq_len, H = c->model.pred_len;
    const int64_t steps = a->steps ? (int64_t)a->steps : H;
    int64_t origin;
    PS_TRY(open_series(a, checkpoint, c, d));
    if (a->interval > 0 && steps > H) {
        return ps_fail(PS_USAGE,
                       "--interval: of %" PRId64 " steps, those beyond %" PRId64 " have no errors to go by: lower --steps", steps,
                       H);
    }
    if (d->series->panel) {
        return of_panel(a, checkpoint, c, d, steps);
    }
    if (checkpoint->by_series) {
        return ps_fail(PS_DATA,
                       "%s: the model was trained on a panel, each series scaled by its own values: make it a panel of one "
                       "series",
                       path);
    }
    PS_TRY(find_origin(a, c, path, d, &origin));
    float *half = NULL;
    if (a->interval > 0) {
        PS_TRY(fit_intervals(a, checkpoint, c, &half));
    }
    struct ps_forecaster *f = NULL;
    const struct ps_loss loss = ps_config_loss(c);
    const int64_t Q = loss.quantiles;
    float *inputs = malloc((size_t)(n * C * L) * sizeof *inputs), *forecasts = malloc((size_t)(n * steps * C) * sizeof *forecasts);
    float *quantiles = Q ? malloc((size_t)(n * steps * C * Q) * sizeof *quantiles) : NULL;
    enum ps_status status =
        inputs && forecasts && (!Q || quantiles) ? PS_OK : ps_fail(PS_DATA, "no memory for %" PRId64 " windows", n);
    if (status == PS_OK) {
        status = take_windows(d, origin, n, C, L, inputs);
    }
    if (status == PS_OK) {
        status = ps_forecaster_open(checkpoint, c, a->device, n, d->series->missing > 0, &f);
    }
    if (status == PS_OK) {
        status = ps_forecaster_extend(f, inputs, n, steps, forecasts, quantiles);
    }
    if (status == PS_OK) {
        const struct result result = {origin,    n,    steps,       C,         H,     checkpoint->names,
                                      forecasts, half, a->interval, &d->times, &loss, quantiles};
        char drawn[PS_SCRATCH_PATH];
        status = write_result(a->out, &result);
        if (status == PS_OK && a->plot) {
            status = write_drawn(&result, drawn);
        }
        if (status == PS_OK && a->plot) {
            status = draw(a, d, drawn);
        }
    }
    if (status == PS_OK) {
        ps_forecaster_warn(&loss, steps, H);
    }
    ps_forecaster_close(f);
    free(inputs);
    free(forecasts);
    free(quantiles);
    free(half);
    return status;
}

int main(int argc, char **argv)
{
    ps_streams_open();
    ps_wait_passively(argv);
    struct arguments a;
    struct ps_checkpoint checkpoint = {0};
    struct ps_config config = {0};
    struct data data = {0};
    char note[PS_ENGINE_NOTE] = "", path[PS_KEPT_PATH];
    enum ps_status status = parse(argc, argv, &a);
    if (status == PS_OK) {
        status = ps_kept_named(&a.checkpoint, path);
    }
    if (status == PS_OK) {
        status = ps_checkpoint_load(a.checkpoint, &checkpoint);
    }
    if (status == PS_OK) {
        status = ps_config_parse_saved(checkpoint.config, a.checkpoint, &config);
    }
    if (status == PS_OK) {
        status = ps_engine_check_head(&config, a.checkpoint);
    }
    const char *const written[2][2] = {{"--out", a.out}, {"--plot", a.plot}};
    for (int i = 0; i < 2 && status == PS_OK; i++) {
        if (written[i][1]) {
            status = ps_options_output(written[i][0], written[i][1], a.overwrite, a.checkpoint, a.data ? a.data : config.data.path);
        }
    }
    if (status == PS_OK) {
        status = ps_engine_adapt(&config, a.device, a.precision, note);
    }
    if (status == PS_OK && *note) {
        fprintf(stderr, "forecast: %s: %s\n", a.checkpoint, note);
    }
    if (status == PS_OK) {
        status = forecast(&a, &checkpoint, &config, &data);
    }
    ps_scratch_remove();
    ps_series_close(data.series);
    ps_times_free(&data.times);
    ps_config_free(&config);
    ps_checkpoint_free(&checkpoint);
    if (status != PS_OK) {
        fprintf(stderr, "forecast: %s\n", ps_error_message());
    }
    return (int)status;
}
