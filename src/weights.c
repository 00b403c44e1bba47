/* import_weights and export_weights: files in, files out. */
#include "src/weights.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "data/files.h"
#include "data/series.h"
#include "src/checkpoint.h"
#include "src/engine.h"
#include "src/session.h"
#include "src/version.h"

char *ps_weights_file(const char *folder, const char *name)
{
    char *path = NULL;
    return asprintf(&path, "%s/%s", folder, name) < 0 ? NULL : path;
}

/* ---- in ---- */

/* What is read and made on the way. */
struct incoming {
    enum ps_weights_kind kind;
    char *config_path, *tensors_path, *index_path, *data_path; /* data_path: absolute, with "data.path=" before it */
    struct ps_safetensors file;
    struct ps_known known;
    int64_t channels; /* 0: the weights do not say */
    struct ps_config config;
    struct ps_series *series;
    struct ps_checkpoint checkpoint;
};

static void incoming_free(struct incoming *in)
{
    free(in->config_path);
    free(in->tensors_path);
    free(in->index_path);
    free(in->data_path);
    ps_safetensors_free(&in->file);
    ps_config_free(&in->config);
    ps_series_close(in->series);
    ps_parameters_free(in->checkpoint.layout);
    free(in->checkpoint.parameters);
    ps_scaler_free(&in->checkpoint.scaler);
    free(in->checkpoint.names);
    free(in->checkpoint.config);
}

/* A folder is Hugging Face's, a file the authors'. */
static enum ps_status read_from(const char *from, struct incoming *in)
{
    struct stat info;
    if (stat(from, &info) != 0) {
        return ps_fail(PS_CHECKPOINT, "%s: %s", from, strerror(errno));
    }
    in->kind = S_ISDIR(info.st_mode) ? PS_WEIGHTS_HF : PS_WEIGHTS_AUTHORS;
    if (in->kind == PS_WEIGHTS_AUTHORS) {
        PS_TRY(ps_safetensors_read(from, &in->file));
        return ps_weights_authors_known(&in->file, &in->known, &in->channels);
    }
    in->config_path = ps_weights_file(from, PS_WEIGHTS_CONFIG);
    in->tensors_path = ps_weights_file(from, PS_WEIGHTS_TENSORS);
    in->index_path = ps_weights_file(from, PS_WEIGHTS_INDEX);
    if (!in->config_path || !in->tensors_path || !in->index_path) {
        return ps_fail(PS_CHECKPOINT, "%s: no memory", from);
    }
    PS_TRY(ps_weights_hf_known(in->config_path, &in->known, &in->channels));
    in->known.origin = from;
    int whole = stat(in->tensors_path, &info) == 0 || stat(in->index_path, &info) != 0;
    PS_TRY(whole ? ps_safetensors_read(in->tensors_path, &in->file) : ps_safetensors_read_index(in->index_path, &in->file));
    return ps_weights_hf_positions(&in->file, &in->known);
}

/* The config: the weights' values, the user's file and overrides, and the data's path last. */
static enum ps_status load_config(const struct ps_weights_import *import, struct incoming *in)
{
    char **overrides = malloc(((size_t)import->n_overrides + 1) * sizeof *overrides);
    int n = import->n_overrides;
    if (!overrides) {
        return ps_fail(PS_USAGE, "no memory for the overrides");
    }
    if (n > 0) {
        memcpy(overrides, import->overrides, (size_t)n * sizeof *overrides);
    }
    enum ps_status status = PS_OK;
    if (import->data) {
        char *path = realpath(import->data, NULL);
        if (!path || asprintf(&in->data_path, "data.path=%s", path) < 0) {
            in->data_path = NULL;
            status = ps_fail(PS_DATA, "%s: %s", import->data, strerror(errno));
        }
        free(path);
        overrides[n++] = in->data_path;
    }
    if (status == PS_OK) {
        status = ps_config_load_known(&in->known, import->config, overrides, n, &in->config);
    }
    free(overrides);
    return status;
}

/* The authors drop out attention's output twice, each with the one rate that they have: together a share of 1 - (1-p)^2. */
static void settle_dropout(struct incoming *in)
{
    double *attention = &in->config.model.dropout_at[PS_DROP_ATTENTION], kept = 1 - in->config.model.dropout;
    if (in->kind == PS_WEIGHTS_AUTHORS && *attention < 0) {
        *attention = 1 - kept * kept;
    }
}

/* Opens the data, if there are any, and settles how many channels the model has. */
static enum ps_status settle_channels(const struct ps_weights_import *import, struct incoming *in)
{
    const struct ps_config *c = &in->config;
    if (*c->data.path) {
        const struct ps_reading reading = ps_config_reading(c, c->train.batch_size);
        PS_TRY(ps_series_open_as(c->data.path, &reading, &in->series));
    }
    const struct {
        int64_t channels;
        const char *says;
    } said[] = {
        {in->channels, import->from}, {import->channels, "--channels"}, {in->series ? in->series->channels : 0, c->data.path}};
    const char *first = NULL;
    for (size_t i = 0; i < sizeof said / sizeof *said; i++) {
        if (said[i].channels > 0 && first && said[i].channels != in->channels) {
            return ps_fail(i == 2 ? PS_DATA : PS_USAGE, "%s: %" PRId64 " channels, and %s has %" PRId64, said[i].says,
                           said[i].channels, first, in->channels);
        }
        if (said[i].channels > 0 && !first) {
            first = said[i].says;
            in->channels = said[i].channels;
        }
    }
    return first ? PS_OK
                 : ps_fail(PS_USAGE, "--channels: missing: %s does not say how many channels the data have: give it, or --data",
                           import->from);
}

/* Patches that the authors' weights have, against those that the config makes. */
static enum ps_status check_patches(const struct incoming *in, const struct ps_model_shape *shape)
{
    const struct ps_safetensor *t = ps_safetensors_find(&in->file, "backbone.W_pos");
    if (in->kind == PS_WEIGHTS_AUTHORS && t && t->rank == 2 && t->size[0] != ps_patches(shape)) {
        return ps_fail(PS_USAGE,
                       "%s: its model has %" PRId64 " patches, and model.seq_len %" PRId64 ", patch_len %" PRId64
                       ", stride %" PRId64 " and padding %s make %" PRId64 ": set those of the model",
                       in->file.path, t->size[0], shape->seq_len, shape->patch_len, shape->stride, shape->pad_end ? "end" : "none",
                       ps_patches(shape));
    }
    return PS_OK;
}

/* The scaler that train would fit to the data; without data, and without standardising, the identity. */
static enum ps_status make_scaler(struct incoming *in)
{
    const struct ps_config *c = &in->config;
    struct ps_checkpoint *out = &in->checkpoint;
    if (!in->series) {
        return ps_scaler_identity(in->channels, &out->scaler);
    }
    struct ps_splits splits;
    PS_TRY(ps_session_splits(c, in->series, 0, &splits));
    out->by_series = c->data.standardize && in->series->panel;
    enum ps_status status = c->data.standardize && !out->by_series ? ps_scaler_fit(in->series, &splits, &out->scaler)
                                                                   : ps_scaler_identity(in->channels, &out->scaler);
    ps_splits_free(&splits);
    PS_TRY(status);
    out->fingerprint = in->series->fingerprint;
    return ps_series_names(in->series, &out->names, &out->names_bytes);
}

static enum ps_status import_all(const struct ps_weights_import *import, struct incoming *in)
{
    PS_TRY(read_from(import->from, in));
    PS_TRY(load_config(import, in));
    if (in->config.train.objective != PS_OBJECTIVE_FORECAST) {
        return ps_fail(PS_USAGE, "train.objective: masked: a forecaster's weights are imported: set forecast");
    }
    if (in->config.train.loss == PS_LOSS_QUANTILE) {
        return ps_fail(PS_USAGE, "train.loss: quantile: the weights forecast one value of each step: take mse, mae or huber");
    }
    settle_dropout(in);
    PS_TRY(settle_channels(import, in));
    struct ps_checkpoint *out = &in->checkpoint;
    struct ps_model_shape shape = ps_config_shape(&in->config, in->channels);
    PS_TRY(check_patches(in, &shape));
    PS_TRY(ps_parameters_layout(&shape, &out->layout));
    PS_TRY(ps_weights_convert(in->kind, &shape, out->layout, &in->file, &out->parameters));
    PS_TRY(make_scaler(in));
    PS_TRY(ps_config_text(&in->config, &out->config));
    out->seed = in->config.train.seed;
    out->best_validation = HUGE_VAL;
    out->level = out->algorithms = (char *)"none: imported";
    out->versions = in->kind == PS_WEIGHTS_HF ? (char *)"Hugging Face's PatchTSTForPrediction" : (char *)"the authors' PatchTST";
    out->program_version = (char *)ps_version;
    return ps_checkpoint_save(import->out, out);
}

enum ps_status ps_weights_import(const struct ps_weights_import *import, struct ps_weights_done *done)
{
    struct incoming in = {0};
    enum ps_status status = import_all(import, &in);
    if (status == PS_OK) {
        *done = (struct ps_weights_done){.channels = in.channels, .scaled = in.series && in.config.data.standardize};
        for (int t = 0; t < in.checkpoint.layout->n; t++) {
            done->parameters += ps_parameter_count(&in.checkpoint.layout->table[t]);
        }
    }
    incoming_free(&in);
    return status;
}

/* ---- out ---- */

static enum ps_status write_folder(const char *folder, const char *config, const char *tensors, size_t size)
{
    char *config_path = ps_weights_file(folder, PS_WEIGHTS_CONFIG), *tensors_path = ps_weights_file(folder, PS_WEIGHTS_TENSORS);
    enum ps_status status =
        config_path && tensors_path ? ps_folder_make(PS_CHECKPOINT, folder) : ps_fail(PS_CHECKPOINT, "%s: no memory", folder);
    if (status == PS_OK) {
        status = ps_file_replace(PS_CHECKPOINT, tensors_path, tensors, size);
    }
    if (status == PS_OK) {
        status = ps_file_replace(PS_CHECKPOINT, config_path, config, strlen(config));
    }
    free(config_path);
    free(tensors_path);
    return status;
}

static enum ps_status export_loaded(const struct ps_checkpoint *c, const struct ps_config *config, const char *folder)
{
    struct ps_model_shape shape = ps_config_shape(config, c->scaler.channels);
    char *text = NULL, *bytes = NULL;
    size_t size = 0;
    enum ps_status status = ps_weights_hf_config(config, c->scaler.channels, &text);
    if (status == PS_OK) {
        status = ps_weights_revert(folder, &shape, c->layout, c->parameters, &bytes, &size);
    }
    if (status == PS_OK) {
        status = write_folder(folder, text, bytes, size);
    }
    free(text);
    free(bytes);
    return status;
}

enum ps_status ps_weights_export(const char *checkpoint, const char *folder, struct ps_weights_done *done, double path_dropouts[2])
{
    struct ps_checkpoint c;
    struct ps_config config = {0};
    PS_TRY(ps_checkpoint_load(checkpoint, &c));
    enum ps_status status = ps_config_parse_saved(c.config, checkpoint, &config);
    if (status == PS_OK) {
        status = ps_engine_check_head(&config, checkpoint);
    }
    if (status == PS_OK) {
        status = export_loaded(&c, &config, folder);
    }
    if (status == PS_OK) {
        struct ps_model_shape shape = ps_config_shape(&config, c.scaler.channels);
        path_dropouts[0] = ps_dropout_rate(&shape, PS_DROP_ATTENTION);
        path_dropouts[1] = ps_dropout_rate(&shape, PS_DROP_OUTPUT);
        *done = (struct ps_weights_done){.channels = c.scaler.channels};
        for (int64_t i = 0; i < c.scaler.channels; i++) {
            done->scaled |= c.scaler.mean[i] != 0 || c.scaler.std[i] != 1;
        }
        for (int t = 0; t < c.layout->n; t++) {
            done->parameters += ps_parameter_count(&c.layout->table[t]);
        }
    }
    ps_config_free(&config);
    ps_checkpoint_free(&c);
    return status;
}
