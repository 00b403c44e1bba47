/* evaluate: a checkpoint's accuracy on a split, beside naive forecasts; and its forecasts themselves. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "data/files.h"
#include "data/hdf5_util.h"
#include "src/engine.h"
#include "src/options.h"
#include "src/passive.h"
#include "src/session.h"

struct arguments {
    const char *checkpoint, *data, *device, *precision, *forecasts;
    enum ps_split split;
    int json, original_units, overwrite;
};

static const char usage[] =
    "usage: evaluate CHECKPOINT [--data FILE] [--split train|val|test] [--json] [--save-forecasts OUT.h5] [--original-units]\n"
    "                [--overwrite] [--device auto|cpu|cuda[:N]] [--precision fp32|tf32|bf16|fp16]\n"
    "\n"
    "  --data FILE              another HDF5 file than the run's\n"
    "  --split SPLIT            which windows (default: test)\n"
    "  --json                   print one JSON object\n"
    "  --save-forecasts OUT.h5  write /forecasts and /targets [W, C, H] and /inputs [W, C, L]\n"
    "  --original-units         undo the scaling in what is saved\n"
    "  --overwrite              replace OUT.h5 when it exists\n"
    "  --device, --precision    what computes it (default: as trained where this machine can, else fp32 on the CPU)\n"
    "\n"
    "exit codes: 0 done, 2 usage or config, 3 data, 4 checkpoint, 5 device\n";

static enum ps_status parse(int argc, char **argv, struct arguments *a)
{
    const char *split = ps_split_name(PS_TEST);
    const struct ps_option options[] = {{"data", .text = &a->data},
                                        {"split", .text = &split},
                                        {"device", .text = &a->device},
                                        {"precision", .text = &a->precision},
                                        {"json", .given = &a->json},
                                        {"save-forecasts", .text = &a->forecasts},
                                        {"original-units", .given = &a->original_units},
                                        {"overwrite", .given = &a->overwrite},
                                        {0}};
    PS_TRY(ps_options_read(argc, argv, options, 1, "one CHECKPOINT", usage));
    a->checkpoint = argv[argc - 1];
    for (a->split = PS_TRAIN; a->split < PS_SPLITS && strcmp(split, ps_split_name(a->split)) != 0; a->split++) {
    }
    return a->split < PS_SPLITS ? PS_OK : ps_fail(PS_USAGE, "--split: \"%s\": train, val or test", split);
}

/* ---- forecasts into a file ---- */

struct output {
    struct ps_session *session;
    struct ps_hdf5_output file;
    hid_t datasets[3]; /* forecasts, targets, inputs */
    int original_units;
    float *scaled; /* one of them of one batch, in original units */
};

/* x * std + mean, channel by channel; x [n, C, length]. */
static void to_original(const struct ps_scaler *scaler, float *x, int64_t n, int64_t length)
{
    for (int64_t i = 0; i < n * scaler->channels; i++) {
        int64_t c = i % scaler->channels;
        for (int64_t t = 0; t < length; t++) {
            x[i * length + t] = (float)(x[i * length + t] * scaler->std[c] + scaler->mean[c]);
        }
    }
}

static const char *const names[3] = {"/forecasts", "/targets", "/inputs"};

static enum ps_status write_batch(void *argument, int64_t first, int64_t n, const float *inputs, const float *targets,
                                  const float *forecasts)
{
    struct output *o = argument;
    const struct ps_window_view *v = &o->session->view;
    const float *values[3] = {forecasts, targets, inputs};
    for (int i = 0; i < 3; i++) {
        int64_t length = i == 2 ? v->seq_len : v->pred_len;
        if (o->original_units) {
            memcpy(o->scaled, values[i], (size_t)(n * v->channels * length) * sizeof *o->scaled);
            to_original(&o->session->scaler, o->scaled, n, length);
            values[i] = o->scaled;
        }
        PS_TRY(ps_hdf5_write_rows(&o->file, names[i], o->datasets[i], (hsize_t)first, (hsize_t)n, values[i]));
    }
    return PS_OK;
}

/* What is being read is never written over, and other files only when that was asked for. */
static enum ps_status check_output(const struct arguments *a, const char *data)
{
    const char *read[2] = {a->checkpoint, data};
    struct stat out, in;
    if (stat(a->forecasts, &out) != 0) {
        return PS_OK;
    }
    for (int i = 0; i < 2; i++) {
        if (stat(read[i], &in) == 0 && in.st_dev == out.st_dev && in.st_ino == out.st_ino) {
            return ps_fail(PS_USAGE, "--save-forecasts: %s is the %s that is evaluated: choose another name", a->forecasts,
                           i == 0 ? "checkpoint" : "data");
        }
    }
    return a->overwrite ? PS_OK
                        : ps_fail(PS_USAGE, "--save-forecasts: %s exists: choose another name, or replace it with --overwrite",
                                  a->forecasts);
}

static enum ps_status write_forecasts(struct output *o, enum ps_split split)
{
    struct ps_session *s = o->session;
    int64_t B = s->config->train.batch_size, C = s->view.channels, H = s->view.pred_len, L = s->view.seq_len;
    int64_t count = s->splits.count[split];
    o->scaled = malloc((size_t)(B * C * (L > H ? L : H)) * sizeof *o->scaled);
    if (!o->scaled) {
        return ps_fail(PS_DATA, "%s: no memory for a batch of %lld windows", o->file.path, (long long)B);
    }
    for (int i = 0; i < 3; i++) {
        hsize_t size[3] = {(hsize_t)count, (hsize_t)C, (hsize_t)(i == 2 ? L : H)};
        PS_TRY(ps_hdf5_create_rows(&o->file, names[i], H5T_IEEE_F32LE, 3, size, &o->datasets[i]));
    }
    return ps_session_forecast(s, split, write_batch, o);
}

/* What stood there is lost only to a whole file. */
static enum ps_status save_forecasts(struct ps_session *s, const struct arguments *a)
{
    struct output o = {
        .session = s, .original_units = a->original_units, .datasets = {H5I_INVALID_HID, H5I_INVALID_HID, H5I_INVALID_HID}};
    PS_TRY(ps_hdf5_create(a->forecasts, &o.file));
    enum ps_status status = write_forecasts(&o, a->split);
    for (int i = 0; i < 3; i++) {
        ps_hdf5_drop(&o.datasets[i]);
    }
    free(o.scaled);
    return ps_hdf5_finish(&o.file, status);
}

/* ---- scores ---- */

static void print_line(const char *name, const struct ps_score *score)
{
    if (score->windows > 0) {
        printf("%-16s mse %.4f  mae %.4f  windows %lld\n", name, score->mse, score->mae, (long long)score->windows);
    }
}

static enum ps_status score(struct ps_session *s, const struct arguments *a, const struct ps_checkpoint *checkpoint)
{
    struct ps_accuracy accuracy;
    PS_TRY(ps_session_score(s, a->split, &accuracy));
    int64_t count = s->splits.count[a->split];
    struct ps_naive naive;
    PS_TRY(ps_session_naive(s, a->split, &naive));
    struct ps_test_record record = {
        .all = accuracy.all,
        .full_batches = accuracy.full_batches,
        .repeat_last = {naive.repeat_mse, naive.repeat_mae, count},
        .seasonal_naive = {naive.seasonal_mse, naive.seasonal_mae, isnan(naive.seasonal_mse) ? 0 : count},
        .epoch = checkpoint->epoch,
        .step = checkpoint->step};
    if (a->json) {
        char *json = ps_test_json(&record);
        if (!json) {
            return ps_fail(PS_USAGE, "--json: no memory");
        }
        puts(json);
        free(json);
        return PS_OK;
    }
    printf("%s, split %s, standardised units\n", a->checkpoint, ps_split_name(a->split));
    print_line("model", &record.all);
    print_line("full batches", &record.full_batches);
    print_line("repeat-last", &record.repeat_last);
    print_line("seasonal-naive", &record.seasonal_naive);
    return PS_OK;
}

static enum ps_status evaluate(const struct arguments *a)
{
    struct ps_checkpoint checkpoint;
    struct ps_config config;
    struct ps_session *s = NULL;
    PS_TRY(ps_checkpoint_load(a->checkpoint, &checkpoint));
    enum ps_status status = ps_config_parse_saved(checkpoint.config, a->checkpoint, &config);
    if (status == PS_OK && a->forecasts) {
        status = check_output(a, a->data ? a->data : config.data.path);
    }
    char note[PS_ENGINE_NOTE] = "";
    if (status == PS_OK) {
        status = ps_engine_adapt(&config, a->device, a->precision, note);
    }
    if (status == PS_OK && *note) {
        fprintf(stderr, "evaluate: %s: %s\n", a->checkpoint, note);
    }
    if (status == PS_OK) {
        status = ps_session_open(
            &config, &(struct ps_session_options){.data_path = a->data, .device = a->device, .checkpoint = &checkpoint}, &s);
    }
    if (status == PS_OK) {
        ps_session_warn_threads(s, "evaluate");
        status = ps_session_load_weights(s, &checkpoint, 0);
    }
    if (status == PS_OK && a->forecasts) {
        status = save_forecasts(s, a);
    }
    if (status == PS_OK) {
        status = score(s, a, &checkpoint);
    }
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
