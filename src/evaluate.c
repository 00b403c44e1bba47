/* evaluate: a checkpoint's accuracy on a split, beside naive forecasts; and its forecasts themselves. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "data/files.h"
#include "data/hdf5_util.h"
#include "data/panel.h"
#include "src/breakdown.h"
#include "src/data_file.h"
#include "src/engine.h"
#include "src/intervals.h"
#include "src/kept.h"
#include "src/options.h"
#include "src/passive.h"
#include "src/session.h"

enum by { BY_NOTHING, BY_STEP, BY_CHANNEL, BY_SERIES };

struct arguments {
    const char *checkpoint, *data, *panel, *device, *precision, *forecasts;
    enum ps_split split;
    enum by by;
    int json, original_units, overwrite;
    double interval; /* 0: none */
    int of_run;      /* the checkpoint was found in a run's folder */
};

static const char usage[] =
    "usage: evaluate CHECKPOINT|RUN [--data FILE] [--panel ID,TIME,VALUE] [--split train|val|test|all] [--json]\n"
    "                [--by step|channel|series] [--interval LEVEL] [--save-forecasts OUT.h5] [--original-units] [--overwrite]\n"
    "                [--device auto|cpu|cuda[:N]] [--precision fp32|tf32|bf16|fp16]\n"
    "\n"
    "  RUN                      a run's folder: its best checkpoint, or the last where there is no best\n"
    "  --data FILE              another file than the run's, HDF5 or CSV\n"
    "  --panel ID,TIME,VALUE    FILE is a CSV of many series, and these are its columns, as for import_csv\n"
    "  --split SPLIT            which windows (default: test; all: every window of the file)\n"
    "  --json                   print one JSON object\n"
    "  --by step|channel|series also MSE and MAE of each step of the horizon, of each channel, or of each series of a panel\n"
    "  --interval LEVEL         also how many targets lie in the intervals that forecast --interval LEVEL gives\n"
    "  --save-forecasts OUT.h5  write /forecasts and /targets [W, C, H], /inputs [W, C, L], and of a model of quantiles these "
    "too,\n"
    "                           /quantiles [W, C, Q, H]\n"
    "  --original-units         also MSE and MAE by channel in the data's own units; undo the scaling in what is saved\n"
    "  --overwrite              replace OUT.h5 when it exists\n"
    "  --device, --precision    what computes it (default: as trained where this machine can, else fp32 on the CPU)\n"
    "\n"
    "exit codes: 0 done, 2 usage or config, 3 data, 4 checkpoint, 5 device\n";

static enum ps_status parse(int argc, char **argv, struct arguments *a)
{
    const char *split = ps_split_name(PS_TEST), *by = NULL, *interval = NULL;
    const struct ps_option options[] = {{"data", .text = &a->data},
                                        {"panel", .text = &a->panel},
                                        {"split", .text = &split},
                                        {"device", .text = &a->device},
                                        {"precision", .text = &a->precision},
                                        {"by", .text = &by},
                                        {"interval", .text = &interval},
                                        {"json", .given = &a->json},
                                        {"save-forecasts", .text = &a->forecasts},
                                        {"original-units", .given = &a->original_units},
                                        {"overwrite", .given = &a->overwrite},
                                        {0}};
    PS_TRY(ps_options_read(argc, argv, options, 1, "one CHECKPOINT or run", usage));
    a->checkpoint = argv[argc - 1];
    if (interval) {
        PS_TRY(ps_intervals_level(interval, &a->interval));
    }
    a->by = !by ? BY_NOTHING : strcmp(by, "step") == 0 ? BY_STEP : strcmp(by, "series") == 0 ? BY_SERIES : BY_CHANNEL;
    if (a->by == BY_CHANNEL && strcmp(by, "channel") != 0) {
        return ps_fail(PS_USAGE, "--by: \"%s\": step or channel, or series of a panel", by);
    }
    for (a->split = PS_TRAIN; a->split < PS_ALL && strcmp(split, ps_split_name(a->split)) != 0; a->split++) {
    }
    return strcmp(split, ps_split_name(a->split)) == 0 ? PS_OK
                                                       : ps_fail(PS_USAGE, "--split: \"%s\": train, val, test or all", split);
}

/* ---- forecasts into a file ---- */

/* As sinks get them; quantiles of a model that has some. */
enum { DATASETS = 4 };
static const char *const names[DATASETS] = {"/forecasts", "/targets", "/inputs", "/quantiles"};

struct output {
    const struct ps_session *session;
    struct ps_hdf5_output file;
    enum ps_split split;
    int n;
    hid_t datasets[DATASETS];
    int64_t length[DATASETS]; /* of a channel's values */
    int original_units;
    float *scaled; /* one of them of one batch, in original units */
};

static enum ps_status write_batch(struct output *o, int64_t first, int64_t n, const float *values[DATASETS])
{
    const struct ps_window_view *v = &o->session->view;
    const struct ps_order order = ps_session_order(o->session, o->split);
    for (int i = 0; i < o->n; i++) {
        if (o->original_units) {
            memcpy(o->scaled, values[i], (size_t)(n * v->channels * o->length[i]) * sizeof *o->scaled);
            for (int64_t w = 0; w < n; w++) {
                ps_scaler_restore(&o->session->scaler, ps_order_window(&order, first + w), o->length[i],
                                  o->scaled + w * v->channels * o->length[i]);
            }
            values[i] = o->scaled;
        }
        PS_TRY(ps_hdf5_write_rows(&o->file, names[i], o->datasets[i], (hsize_t)first, (hsize_t)n, values[i]));
    }
    return PS_OK;
}

static enum ps_status open_output(const struct arguments *a, const struct ps_session *s, struct output *o)
{
    int64_t B = s->config->train.batch_size, C = s->view.channels, H = s->view.pred_len, L = s->view.seq_len;
    const struct ps_loss *loss = &s->model->options.loss;
    const int64_t count = s->splits.count[a->split], Q = ps_loss_outputs(loss), longest = L > Q * H ? L : Q * H;
    const int64_t length[DATASETS] = {H, H, L, Q * H};
    memcpy(o->length, length, sizeof length);
    o->scaled = malloc((size_t)(B * C * longest) * sizeof *o->scaled);
    if (!o->scaled) {
        return ps_fail(PS_DATA, "%s: no memory for a batch of %lld windows", o->file.path, (long long)B);
    }
    for (int i = 0; i < DATASETS - 1; i++, o->n++) {
        hsize_t size[3] = {(hsize_t)count, (hsize_t)C, (hsize_t)length[i]};
        PS_TRY(ps_hdf5_create_rows(&o->file, names[i], H5T_IEEE_F32LE, 3, size, &o->datasets[i]));
    }
    if (loss->kind == PS_LOSS_QUANTILE) {
        hsize_t size[4] = {(hsize_t)count, (hsize_t)C, (hsize_t)Q, (hsize_t)H};
        PS_TRY(ps_hdf5_create_rows(&o->file, names[o->n], H5T_IEEE_F32LE, 4, size, &o->datasets[o->n]));
        PS_TRY(ps_hdf5_write_reals(&o->file, o->datasets[o->n++], "levels", loss->quantile, (hsize_t)Q));
    }
    PS_TRY(ps_hdf5_write_text(&o->file, o->datasets[0], "units", a->original_units ? "original" : "standardised"));
    return s->series->channel_names
               ? ps_hdf5_write_texts(&o->file, o->datasets[0], "channels", s->series->channel_names, (hsize_t)C)
               : PS_OK;
}

/* What stood there is lost only to a whole file. */
static enum ps_status close_output(struct output *o, enum ps_status status)
{
    for (int i = 0; i < DATASETS; i++) {
        ps_hdf5_drop(&o->datasets[i]);
    }
    free(o->scaled);
    return ps_hdf5_finish(&o->file, status);
}

/* ---- scores ---- */

struct scores {
    struct ps_test_record record;
    struct ps_intervals intervals; /* half NULL: none */
    int64_t within, observed;      /* targets */
    struct ps_breakdown *breakdown;
    struct output *output; /* NULL: forecasts are not saved */
};

static enum ps_status take_batch(void *argument, int64_t first, int64_t n, const float *inputs, const float *targets,
                                 const float *forecasts, const float *quantiles)
{
    struct scores *scores = argument;
    ps_breakdown_add(scores->breakdown, first, n, inputs, targets, forecasts);
    if (scores->intervals.half) {
        scores->within += ps_intervals_within(&scores->intervals, n, targets, forecasts, &scores->observed);
    }
    const float *values[DATASETS] = {forecasts, targets, inputs, quantiles};
    return scores->output ? write_batch(scores->output, first, n, values) : PS_OK;
}

/* One pass for scores, errors and forecasts. */
static enum ps_status pass(struct ps_session *s, const struct arguments *a, struct scores *scores, struct ps_accuracy *accuracy)
{
    if (!a->forecasts) {
        return ps_session_score_and_forecast(s, a->split, take_batch, scores, accuracy);
    }
    struct output output = {.session = s,
                            .split = a->split,
                            .original_units = a->original_units,
                            .datasets = {H5I_INVALID_HID, H5I_INVALID_HID, H5I_INVALID_HID, H5I_INVALID_HID}};
    PS_TRY(ps_hdf5_create(a->forecasts, &output.file));
    scores->output = &output;
    enum ps_status status = open_output(a, s, &output);
    if (status == PS_OK) {
        status = ps_session_score_and_forecast(s, a->split, take_batch, scores, accuracy);
    }
    scores->output = NULL;
    return close_output(&output, status);
}

static enum ps_status score(struct ps_session *s, const struct arguments *a, struct scores *scores)
{
    struct ps_accuracy accuracy;
    struct ps_naive naive;
    if (a->by == BY_SERIES && !s->series->panel) {
        return ps_fail(PS_USAGE, "--by series: %s is one series: --by channel or step", s->series->path);
    }
    PS_TRY(ps_breakdown_open(s, a->split, &scores->breakdown));
    if (a->interval > 0) {
        PS_TRY(ps_intervals_fit(s, a->interval, &scores->intervals));
    }
    PS_TRY(pass(s, a, scores, &accuracy));
    PS_TRY(ps_session_naive(s, a->split, &naive));
    int64_t count = s->splits.count[a->split];
    scores->record.all = accuracy.all;
    scores->record.full_batches = accuracy.full_batches;
    scores->record.repeat_last = (struct ps_score){.mse = naive.repeat_mse, .mae = naive.repeat_mae, .windows = count};
    scores->record.seasonal_naive =
        (struct ps_score){.mse = naive.seasonal_mse, .mae = naive.seasonal_mae, .windows = isnan(naive.seasonal_mse) ? 0 : count};
    return PS_OK;
}

/* The share of the targets that lie in their intervals. */
static double coverage(const struct scores *scores)
{
    return (double)scores->within / (double)scores->observed;
}

/* ---- as text ---- */

static void print_line(const char *name, const struct ps_score *score)
{
    if (score->windows > 0) {
        printf("%-16s mse %.4f  mae %.4f  windows %lld\n", name, score->mse, score->mae, (long long)score->windows);
    }
}

static const char *const forecasters[PS_FORECASTERS] = {"model", "repeat-last", "seasonal-naive"};

/* The name, or the number, counted from 0 as everywhere. */
static const char *channel_name(const struct ps_session *s, int64_t c, char text[64])
{
    if (s->series->channel_names) {
        return s->series->channel_names[c];
    }
    snprintf(text, 64, "channel %" PRId64, c);
    return text;
}

/* A cell of a table; "-" where there is no figure. */
static void print_cell(int width, double value)
{
    char text[32] = "-";
    if (isfinite(value)) {
        snprintf(text, sizeof text, fabs(value) < 1e6 ? "%.4f" : "%.6g", value);
    }
    printf("  %*s", width, text);
}

static void print_steps(const struct ps_session *s, const struct scores *scores)
{
    printf("\n%-6s  %10s  %10s\n", "step", "mse", "mae");
    for (int64_t t = 0; t < s->view.pred_len; t++) {
        struct ps_measures m = ps_breakdown_step(scores->breakdown, PS_FORECASTER_MODEL, t);
        printf("%-6" PRId64, t + 1);
        print_cell(10, m.mse);
        print_cell(10, m.mae);
        putchar('\n');
    }
}

static void print_channels(const struct ps_session *s, const struct arguments *a, const struct scores *scores)
{
    char text[64];
    int width = (int)strlen("channel");
    for (int64_t c = 0; c < s->view.channels; c++) {
        int length = (int)strlen(channel_name(s, c, text));
        width = length > width ? length : width;
    }
    printf("\n%-*s  %10s  %10s  %10s  %10s", width, "channel", "mse", "mae", "mase", "smape %");
    printf(a->original_units ? "  %14s  %14s\n" : "\n", "original mse", "original mae");
    for (int64_t c = 0; c < s->view.channels; c++) {
        struct ps_measures m = ps_breakdown_channel(scores->breakdown, PS_FORECASTER_MODEL, c);
        printf("%-*s", width, channel_name(s, c, text));
        print_cell(10, m.mse);
        print_cell(10, m.mae);
        print_cell(10, m.mase);
        print_cell(10, m.smape);
        if (a->original_units) {
            print_cell(14, m.original_mse);
            print_cell(14, m.original_mae);
        }
        putchar('\n');
    }
}

static void print_series(const struct ps_session *s, const struct scores *scores)
{
    const struct ps_panel *panel = s->series->panel;
    int width = (int)strlen("series");
    for (int64_t i = 0; i < panel->series; i++) {
        int length = (int)strlen(ps_panel_id(panel, i));
        width = length > width ? length : width;
    }
    printf("\n%-*s  %10s  %10s  %10s  %10s  %10s\n", width, "series", "windows", "mse", "mae", "mase", "smape %");
    for (int64_t i = 0, windows; i < panel->series; i++) {
        struct ps_measures m = ps_breakdown_series(scores->breakdown, PS_FORECASTER_MODEL, i, &windows);
        printf("%-*s  %10" PRId64, width, ps_panel_id(panel, i), windows);
        print_cell(10, m.mse);
        print_cell(10, m.mae);
        print_cell(10, m.mase);
        print_cell(10, m.smape);
        putchar('\n');
    }
}

static void print_text(const struct ps_session *s, const struct arguments *a, const struct scores *scores)
{
    const struct ps_test_record *record = &scores->record;
    printf("%s, split %s, standardised units\n", a->checkpoint, ps_split_name(a->split));
    print_line("model", &record->all);
    char loss[PS_LOSS_TEXT];
    ps_loss_text(&record->loss, &record->all, loss);
    if (*loss && record->all.windows > 0) {
        printf("%-16s %s\n", "", loss);
    }
    print_line("full batches", &record->full_batches);
    print_line("repeat-last", &record->repeat_last);
    print_line("seasonal-naive", &record->seasonal_naive);
    int64_t season = s->config->data.season > 0 ? s->config->data.season : 1;
    if (isfinite(ps_breakdown_all(scores->breakdown, PS_FORECASTER_MODEL).mase)) {
        printf("MASE (season %" PRId64 ") and sMAPE, original units\n", season);
    } else {
        puts("sMAPE, original units; no MASE: no training rows a season apart that differ");
    }
    for (int f = 0; f < PS_FORECASTERS; f++) {
        struct ps_measures m = ps_breakdown_all(scores->breakdown, (enum ps_forecaster)f);
        if (isfinite(m.smape)) {
            printf("%-16s ", forecasters[f]);
            printf(isfinite(m.mase) ? "mase %.4f  " : "", m.mase);
            printf("smape %.4f %%\n", m.smape);
        }
    }
    if (scores->intervals.half) {
        printf("interval %g: %.4f of the targets within, mean width %.4f standardised, by %" PRId64 " validation windows\n",
               a->interval, coverage(scores), ps_intervals_mean_width(&scores->intervals), scores->intervals.windows);
    }
    if (a->by == BY_STEP) {
        print_steps(s, scores);
    }
    if (a->by == BY_SERIES) {
        print_series(s, scores);
    }
    if (a->by == BY_CHANNEL || a->original_units) {
        print_channels(s, a, scores);
    }
}

/* ---- as JSON ---- */

/* MASE and sMAPE into an object of scores, which may be null. */
static int add_measures(json_t *object, struct ps_measures m)
{
    return json_is_object(object) ? json_object_set_new(object, "mase", ps_json_number(m.mase)) |
                                        json_object_set_new(object, "smape", ps_json_number(m.smape))
                                  : 0;
}

static json_t *measures_object(struct ps_measures m)
{
    return json_pack("{s:o, s:o}", "mse", ps_json_number(m.mse), "mae", ps_json_number(m.mae));
}

static json_t *step_objects(const struct ps_session *s, const struct scores *scores)
{
    json_t *all = json_array();
    for (int64_t t = 0; t < s->view.pred_len; t++) {
        json_t *object = measures_object(ps_breakdown_step(scores->breakdown, PS_FORECASTER_MODEL, t));
        json_object_set_new(object, "step", json_integer(t + 1));
        json_array_append_new(all, object);
    }
    return all;
}

static json_t *channel_objects(const struct ps_session *s, const struct arguments *a, const struct scores *scores)
{
    json_t *all = json_array();
    for (int64_t c = 0; c < s->view.channels; c++) {
        char text[64];
        struct ps_measures m = ps_breakdown_channel(scores->breakdown, PS_FORECASTER_MODEL, c);
        json_t *object = measures_object(m);
        json_object_set_new(object, "channel", json_string(channel_name(s, c, text)));
        add_measures(object, m);
        if (a->original_units) {
            json_object_set_new(object, "original_mse", ps_json_number(m.original_mse));
            json_object_set_new(object, "original_mae", ps_json_number(m.original_mae));
        }
        json_array_append_new(all, object);
    }
    return all;
}

static json_t *series_objects(const struct ps_session *s, const struct scores *scores)
{
    json_t *all = json_array();
    for (int64_t i = 0, windows; i < s->series->panel->series; i++) {
        struct ps_measures m = ps_breakdown_series(scores->breakdown, PS_FORECASTER_MODEL, i, &windows);
        json_t *object = measures_object(m);
        json_object_set_new(object, "series", json_string(ps_panel_id(s->series->panel, i)));
        json_object_set_new(object, "windows", json_integer(windows));
        add_measures(object, m);
        json_array_append_new(all, object);
    }
    return all;
}

static enum ps_status print_json(const struct ps_session *s, const struct arguments *a, const struct scores *scores)
{
    json_t *root = ps_test_object(&scores->record);
    json_t *objects[PS_FORECASTERS] = {root, json_object_get(root, "repeat_last"), json_object_get(root, "seasonal_naive")};
    int failed = root ? json_object_set_new(root, "split", json_string(ps_split_name(a->split))) : 1;
    if (!failed && a->of_run) {
        failed = json_object_set_new(root, "checkpoint", json_string(a->checkpoint));
    }
    for (int f = 0; f < PS_FORECASTERS; f++) {
        failed |= add_measures(objects[f], ps_breakdown_all(scores->breakdown, (enum ps_forecaster)f));
    }
    if (!failed && scores->intervals.half) {
        failed = json_object_set_new(
            root, "interval",
            json_pack("{s:f, s:o, s:f, s:I}", "level", a->interval, "coverage", ps_json_number(coverage(scores)), "mean_width",
                      ps_intervals_mean_width(&scores->intervals), "windows", (json_int_t)scores->intervals.windows));
    }
    if (!failed && a->by == BY_SERIES) {
        failed = json_object_set_new(root, "by_series", series_objects(s, scores));
    }
    if (!failed && a->by == BY_STEP) {
        failed = json_object_set_new(root, "by_step", step_objects(s, scores));
    }
    if (!failed && (a->by == BY_CHANNEL || a->original_units)) {
        failed = json_object_set_new(root, "by_channel", channel_objects(s, a, scores));
    }
    if (failed) {
        json_decref(root);
        root = NULL;
    }
    char *json = ps_json_text(root);
    if (!json) {
        return ps_fail(PS_USAGE, "--json: no memory");
    }
    puts(json);
    free(json);
    return PS_OK;
}

static enum ps_status evaluate(struct arguments *a)
{
    char path[PS_KEPT_PATH];
    PS_TRY(ps_kept_named(&a->checkpoint, path));
    a->of_run = a->checkpoint == path;
    struct ps_checkpoint checkpoint;
    struct ps_config config;
    struct ps_session *s = NULL;
    PS_TRY(ps_checkpoint_load(a->checkpoint, &checkpoint));
    enum ps_status status = ps_config_parse_saved(checkpoint.config, a->checkpoint, &config);
    if (status == PS_OK) {
        status = ps_engine_check_head(&config, a->checkpoint);
    }
    if (status == PS_OK && a->forecasts) {
        status =
            ps_options_output("--save-forecasts", a->forecasts, a->overwrite, a->checkpoint, a->data ? a->data : config.data.path);
    }
    char note[PS_ENGINE_NOTE] = "";
    if (status == PS_OK) {
        status = ps_engine_adapt(&config, a->device, a->precision, note);
    }
    if (status == PS_OK && *note) {
        fprintf(stderr, "evaluate: %s: %s\n", a->checkpoint, note);
    }
    struct ps_data_file data = {.path = NULL};
    if (status == PS_OK && (a->data || a->panel)) {
        status = ps_data_file_open("evaluate", a->data ? a->data : config.data.path, a->panel, &checkpoint, &config, &data);
    }
    if (status == PS_OK) {
        status = ps_session_open(&config,
                                 &(struct ps_session_options){.data_path = data.path,
                                                              .device = a->device,
                                                              .checkpoint = &checkpoint,
                                                              .scored = 1u << a->split,
                                                              .seasonal = 1,
                                                              .whole = a->split == PS_ALL,
                                                              .otherwise = "--split all takes every window of the file"},
                                 &s);
    }
    if (status == PS_OK) {
        ps_session_warn_threads(s, "evaluate");
        status = ps_session_load_weights(s, &checkpoint, 0);
    }
    struct scores scores = {.record = {.loss = ps_config_loss(&config), .epoch = checkpoint.epoch, .step = checkpoint.step}};
    if (status == PS_OK) {
        status = score(s, a, &scores);
    }
    if (status == PS_OK && a->json) {
        status = print_json(s, a, &scores);
    } else if (status == PS_OK) {
        print_text(s, a, &scores);
    }
    ps_scratch_remove();
    ps_breakdown_close(scores.breakdown);
    ps_intervals_free(&scores.intervals);
    ps_session_close(s);
    ps_config_free(&config);
    ps_checkpoint_free(&checkpoint);
    return status;
}

int main(int argc, char **argv)
{
    ps_streams_open();
    ps_wait_passively(argv);
    struct arguments arguments = {0};
    enum ps_status status = parse(argc, argv, &arguments);
    if (status == PS_OK) {
        status = evaluate(&arguments);
    }
    if (status == PS_OK) {
        status = ps_stdout_flush(PS_USAGE);
    }
    if (status != PS_OK) {
        fprintf(stderr, "evaluate: %s\n", ps_error_message());
    }
    return (int)status;
}
