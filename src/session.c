#include "src/session.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/panel.h"
#include "src/engine.h"
#include "src/exchange.h"
#include "src/safetensors.h"
#include "src/together.h"

/* ---- from the config ---- */

enum ps_status ps_session_splits(const struct ps_config *c, const struct ps_series *series, int whole, struct ps_splits *splits)
{
    const int64_t L = c->model.seq_len, H = c->model.pred_len;
    return c->data.split_dated ? ps_splits_dated(series, c->data.split_from, whole, L, H, splits)
           : whole             ? ps_splits_all(series, c->data.split, L, H, splits)
                               : ps_splits_make(series, c->data.split, L, H, splits);
}

static enum ps_status split_data(struct ps_session *s, const struct ps_session_options *options)
{
    const struct ps_config *c = s->config;
    const int64_t L = c->model.seq_len, H = c->model.pred_len;
    enum ps_status status = ps_session_splits(c, s->series, options->whole, &s->splits);
    if (options->whole) {
        return status;
    }
    int any = s->series->layout == PS_LAYOUT_WINDOWS || s->series->rows - L >= H;
    return status == PS_DATA && options->otherwise && any ? ps_fail(status, "%s; %s", ps_error_message(), options->otherwise)
                                                          : status;
}

/* Windows of a full step; of one that scores, a batch. */
static int64_t step_windows(const struct ps_config *c, int training)
{
    return training ? c->train.batch_size * c->train.accumulate : c->train.batch_size;
}

/* Opens and splits the data. */
static enum ps_status read_data(struct ps_session *s, const struct ps_session_options *options)
{
    const struct ps_config *c = s->config;
    const char *path = options->data_path ? options->data_path : c->data.path;
    if (!path || !*path) {
        return ps_fail(PS_USAGE, "data.path: missing: name the HDF5 file that holds the series");
    }
    const int64_t windows = step_windows(c, options->training), batch = c->train.batch_size;
    struct ps_reading reading = ps_checkpoint_reading(options->checkpoint, c, windows);
    if (s->ranks) { /* the channels, which are not known yet, can but make the granule smaller */
        const struct ps_model_shape shape = ps_config_shape(c, 1);
        const struct ps_shares shares = {batch, ps_model_granule(&shape), ps_ranks_size(s->ranks)};
        reading.memory.held = windows / batch * ps_share_most(&shares);
    }
    PS_TRY(ps_series_open_as(path, &reading, &s->series));
    if (s->series->layout == PS_LAYOUT_WINDOWS &&
        (s->series->seq_len != c->model.seq_len || s->series->pred_len != c->model.pred_len)) {
        return ps_fail(PS_DATA,
                       "%s: its windows are %lld + %lld steps, the config asks for model.seq_len %lld and model.pred_len %lld",
                       path, (long long)s->series->seq_len, (long long)s->series->pred_len, (long long)c->model.seq_len,
                       (long long)c->model.pred_len);
    }
    if (s->series->missing > 0 && c->train.objective == PS_OBJECTIVE_MASKED) {
        return ps_fail(PS_DATA,
                       "%s: holds NaN, and train.objective: masked would learn to reconstruct what is not there: fill such rows "
                       "(import_csv --fill previous or linear) or leave their channels out (data.channels)",
                       path);
    }
    PS_TRY(split_data(s, options));
    return ps_splits_observed(s->series, &s->splits, options->scored, c->model.seq_len, c->model.pred_len);
}

/* Fits the scaler; of several ranks one reads the training rows for it, and the others are told. */
static enum ps_status fit_scaler(struct ps_session *s)
{
    const struct ps_panel *panel = s->series->panel;
    const int64_t n = panel ? panel->series : s->series->channels;
    struct ps_scaler *scaler = &s->scaler;
    PS_TRY(ps_ranks_check(s->ranks, ps_ranks_rank(s->ranks) == 0 ? ps_scaler_fit(s->series, &s->splits, scaler)
                                                                 : ps_scaler_identity(n, scaler)));
    PS_TRY(ps_ranks_broadcast(s->ranks, scaler->mean, (size_t)n * sizeof *scaler->mean));
    PS_TRY(ps_ranks_broadcast(s->ranks, scaler->std, (size_t)n * sizeof *scaler->std));
    PS_TRY(ps_ranks_broadcast(s->ranks, scaler->is_constant, (size_t)n));
    scaler->panel = panel;
    return ps_ranks_broadcast(s->ranks, &scaler->constant, sizeof scaler->constant);
}

/* Reads the data, splits and standardises it. */
static enum ps_status open_data(struct ps_session *s, const struct ps_session_options *options)
{
    const struct ps_config *c = s->config;
    PS_TRY(ps_ranks_check(s->ranks, read_data(s, options)));
    PS_TRY(ps_session_check_data(s));
    const struct ps_scaler *scaler = options->checkpoint ? &options->checkpoint->scaler : NULL;
    if (scaler && scaler->channels != s->series->channels) {
        return ps_fail(PS_DATA, "%s: %lld channels, the checkpoint's model has %lld", s->series->path,
                       (long long)s->series->channels, (long long)scaler->channels);
    }
    if (scaler && options->checkpoint->by_series) {
        scaler = NULL; /* each series has its own, of its own training rows */
    }
    if (scaler) {
        PS_TRY(ps_scaler_copy(scaler, &s->scaler));
    } else if (c->data.standardize) {
        PS_TRY(fit_scaler(s));
    } else {
        PS_TRY(ps_scaler_identity(s->series->channels, &s->scaler));
    }
    if (options->seasonal) { /* before the values are scaled */
        const int64_t n = s->series->panel ? s->series->panel->series : s->series->channels;
        const int64_t season = c->data.season > 0 ? c->data.season : 1;
        s->seasonal_mae = malloc((size_t)n * sizeof *s->seasonal_mae);
        if (!s->seasonal_mae) {
            return ps_fail(PS_DATA, "%s: no memory for the seasonal errors of %lld channels", s->series->path, (long long)n);
        }
        PS_TRY(s->series->panel ? ps_panel_seasonal_mae(s->series, &s->splits, season, s->seasonal_mae)
                                : ps_seasonal_mae(s->series, s->splits.train_rows, season, s->seasonal_mae));
    }
    s->view = ps_window_view_make(s->series, c->model.seq_len, c->model.pred_len);
    if (s->series->file) {
        return ps_groups_open(s->series, &s->scaler, c->model.seq_len, c->model.pred_len, &s->groups);
    }
    return ps_scaler_apply(&s->scaler, s->series);
}

static enum ps_status open_device(struct ps_session *s, const struct ps_session_options *options)
{
    PS_TRY(ps_engine_open_device(s->config, options->device, s->ranks, &s->device, &s->kernels, s->tuning));
    char text[512];
    snprintf(text, sizeof text, "%s; %s; %s", s->kernels->backend, s->device->name, s->device->version);
    s->versions = strdup(text);
    return s->versions ? PS_OK : ps_fail(PS_DEVICE, "no memory for the session");
}

/* What the checkpoint records of the ways that products are computed. */
static enum ps_status record_algorithms(struct ps_session *s)
{
    const struct ps_config *c = s->config;
    char text[512];
    snprintf(text, sizeof text, "products: %s%s, fixed workspace; tiny_gemm %s; merge_qkv %s; epilogue %s; attention %s",
             *s->tuning ? "tuning table " : "first heuristic", s->tuning, c->runtime.tiny_gemm ? "on" : "off",
             c->runtime.merge_qkv ? "on" : "off", c->runtime.epilogue ? "on" : "off",
             s->level == PS_LEVEL_GEMM && s->model->options.tiled_attention ? "tiled" : "gemm");
    s->algorithms = strdup(text);
    return s->algorithms ? PS_OK : ps_fail(PS_DEVICE, "no memory for the session");
}

/* A graph of several steps saves the gap between graphs, a few microseconds. Large steps would not notice, and many would keep a
 * signal waiting; streamed batches come one by one; on the CPU a graph is a call. */
static int64_t graph_steps(const struct ps_session *s)
{
    enum { SEVERAL = 20 };
    int64_t steps = (int64_t)(SEVERAL * 50e9 / ps_model_step_flops(&s->model->shape, s->step_windows));
    return !ps_feed_resident(s->feed) || strcmp(s->device->kind, "cpu") == 0 || steps < 2 ? 1 : steps < SEVERAL ? steps : SEVERAL;
}

/* Bytes of the parameters and the running statistics. */
static size_t stored_bytes(const struct ps_session *s)
{
    return (size_t)s->model->layout->stored * ps_type_bytes(s->kernels->parameter);
}

/* BatchNorm's statistics are of two rows at least, in the shortest batch of an epoch too. */
static enum ps_status check_rows(const struct ps_session *s, const struct ps_model_shape *shape)
{
    const int64_t batch = s->config->train.batch_size, left = s->train_windows % batch, each = shape->channels * ps_patches(shape);
    if (shape->norm == PS_NORM_BATCH && s->ranks && each < 2) {
        return ps_fail(PS_USAGE,
                       "model.norm: batch takes statistics over the rows of each rank first, and a window of 1 channel and 1 "
                       "patch has 1: train on one rank, or set model.norm: layer");
    }
    const int64_t rows = (left ? left : batch) * shape->channels * ps_patches(shape);
    if (shape->norm != PS_NORM_BATCH || rows >= 2) {
        return PS_OK;
    }
    return ps_fail(PS_USAGE,
                   "model.norm: batch takes statistics over a batch's rows, and %s, of 1 window, 1 channel and 1 patch, has 1: %s",
                   left ? "an epoch's last batch" : "a batch",
                   left ? "set data.drop_last: true, or another train.batch_size" : "raise train.batch_size");
}

/* Steps in which the encoder is frozen. */
static uint64_t held_steps(const struct ps_session *s)
{
    const struct ps_config *c = s->config;
    return c->train.freeze == PS_FREEZE_NONE ? 0
           : c->train.freeze_epochs == 0     ? UINT64_MAX
                                             : (uint64_t)(c->train.freeze_epochs * s->steps_per_epoch);
}

/* A parameter's elements in the flat buffers. */
static struct ps_range range_of(const struct ps_session *s, int t)
{
    const struct ps_parameter *p = &s->model->layout->table[t];
    return (struct ps_range){p->offset, p->offset + ps_parameter_count(p)};
}

/* Bits depend on the library that sums. */
static enum ps_status record_carrier(struct ps_session *s)
{
    if (!s->exchange || !*s->exchange->carrier) {
        return PS_OK;
    }
    char text[512];
    snprintf(text, sizeof text, "%.440s; %s", s->versions, s->exchange->carrier);
    free(s->versions);
    s->versions = strdup(text);
    return s->versions ? PS_OK : ps_fail(PS_DEVICE, "no memory for the session");
}

/* What this rank computes of a batch. */
static enum ps_status open_share(struct ps_session *s, struct ps_engine_share *share)
{
    const struct ps_model_shape shape = ps_config_shape(s->config, s->series->channels);
    const int64_t batch = s->config->train.batch_size;
    const int ranks = ps_ranks_size(s->ranks);
    s->granule = ps_model_granule(&shape);
    if (batch < ranks) {
        return ps_fail(PS_USAGE, "train.batch_size: %lld windows cannot be shared by %d ranks: raise it, or start fewer",
                       (long long)batch, ranks);
    }
    if (s->config->train.accumulate > 1 && batch % s->granule != 0) {
        return ps_fail(PS_USAGE,
                       "train.accumulate: batches begin where a block of dropout's draws does: train.batch_size %lld must be a "
                       "multiple of %lld for this model",
                       (long long)batch, (long long)s->granule);
    }
    PS_TRY(ps_exchange_open(s->ranks, s->device, s->config->runtime.exchange, &s->exchange));
    PS_TRY(record_carrier(s));
    *share = (struct ps_engine_share){.batch = ps_share_most(&(struct ps_shares){batch, s->granule, ranks}),
                                      .whole = s->step_windows,
                                      .exchange = s->config->model.batchnorm == PS_BATCHNORM_LOCAL ? NULL : s->exchange};
    return PS_OK;
}

/* Model, optimiser, feed and what the loops need on the device. */
static enum ps_status open_model(struct ps_session *s, int training)
{
    const struct ps_config *c = s->config;
    struct ps_device *device = s->device;
    int64_t batch = c->train.batch_size;
    enum ps_status status;
    struct ps_engine_share share;
    s->step_windows = step_windows(c, training);
    PS_TRY(open_share(s, &share));
    PS_TRY(ps_engine_open_model(c, s->kernels, s->series->channels, s->series->missing > 0, &share, &s->model, &s->level));
    PS_TRY(record_algorithms(s));
    s->train_windows = s->splits.count[PS_TRAIN];
    if (c->data.drop_last) {
        s->train_windows -= s->train_windows % s->step_windows;
    }
    s->steps_per_epoch = (s->train_windows + s->step_windows - 1) / s->step_windows;
    PS_TRY(device->allocate(device, sizeof *s->state, (void **)&s->state));
    PS_TRY(device->allocate(device, sizeof *s->scoring_state, (void **)&s->scoring_state));
    PS_TRY(device->allocate_host(device, PS_GROUPS * sizeof *s->seen, (void **)&s->seen));
    if (s->ranks) {
        PS_TRY(device->allocate(device, (size_t)ps_ranks_size(s->ranks) * sizeof *s->states, (void **)&s->states));
    }
    if (training) {
        if (s->steps_per_epoch == 0) {
            return ps_fail(
                PS_USAGE, "train.batch_size: %lld%s is more than the %lld training windows: lower it, or set data.drop_last: false",
                (long long)s->step_windows, c->train.accumulate > 1 ? ", with train.accumulate," : "",
                (long long)s->splits.count[PS_TRAIN]);
        }
        PS_TRY(check_rows(s, &s->model->shape));
        struct ps_schedule schedule = {.kind = c->optim.schedule,
                                       .lr = c->optim.lr,
                                       .warmup_steps = c->optim.warmup_steps,
                                       .min_lr = c->optim.min_lr,
                                       .pct_start = c->optim.pct_start,
                                       .steps_per_epoch = s->steps_per_epoch,
                                       .epochs = c->train.epochs};
        int64_t steps = s->steps_per_epoch * c->train.epochs;
        double *rates = steps < (int64_t)1 << 48 ? malloc((size_t)steps * sizeof *rates) : NULL;
        if (!rates) {
            return ps_fail(PS_DEVICE, "train.epochs: no memory for the learning rates of %lld steps", (long long)steps);
        }
        ps_schedule_fill(&schedule, rates);
        struct ps_optimizer_options adamw = {.beta1 = c->optim.beta1,
                                             .beta2 = c->optim.beta2,
                                             .epsilon = c->optim.eps,
                                             .weight_decay = c->optim.weight_decay,
                                             .clip_norm = c->optim.clip_norm,
                                             .held = held_steps(s),
                                             .trained = {range_of(s, s->model->layout->w_h), range_of(s, s->model->layout->b_h)},
                                             .skip_nonfinite = c->train.on_nonfinite == PS_NONFINITE_SKIP};
        status =
            ps_optimizer_open(s->kernels, s->model->layout->count, s->model->layout->decayed, &adamw, rates, steps, &s->optimizer);
        free(rates);
        PS_TRY(status);
        PS_TRY(device->allocate(device, stored_bytes(s), &s->best));
    }
    int64_t longest = 0;
    for (int i = PS_TRAIN; i <= PS_ALL; i++) {
        longest = s->splits.count[i] > longest ? s->splits.count[i] : longest;
    }
    s->slots = (longest + batch - 1) / batch;
    PS_TRY(device->allocate(device, (size_t)s->slots * PS_ERRORS * sizeof *s->errors, (void **)&s->errors));
    PS_TRY(device->allocate_host(device, (size_t)s->slots * PS_ERRORS * sizeof *s->host_errors, (void **)&s->host_errors));
    const struct ps_feed_share part = {.at_once = batch,
                                       .granule = s->granule,
                                       .most = s->ranks ? s->step_windows / batch * share.batch : s->step_windows,
                                       .rank = ps_ranks_rank(s->ranks),
                                       .ranks = ps_ranks_size(s->ranks)};
    PS_TRY(ps_feed_open(device, c, s->series, s->groups, s->step_windows, longest, &part, &s->feed));
    s->graph_steps = graph_steps(s);
    return PS_OK;
}

enum ps_status ps_session_open(const struct ps_config *config, const struct ps_session_options *options,
                               struct ps_session **session)
{
    struct ps_session *s = calloc(1, sizeof *s);
    if (!s) {
        return ps_fail(PS_DEVICE, "no memory for the session");
    }
    s->config = config;
    s->ranks = options->ranks;
    s->best_validation = HUGE_VAL;
    /* The data first: looking at it forks, which is cheap and safe while there are no threads and no device. */
    enum ps_status status = open_data(s, options);
    if (status == PS_OK) {
        status = open_device(s, options);
    }
    if (status == PS_OK) {
        status = open_model(s, options->training);
    }
    if (status != PS_OK) {
        ps_session_close(s);
        return status;
    }
    *session = s;
    return PS_OK;
}

void ps_session_warn_threads(const struct ps_session *s, const char *program)
{
    static int told;
    const struct ps_device *d = s->device;
    if (d->threads < d->threads_asked && !told) {
        fprintf(stderr, "%s: warning: runtime.threads: %d of %d: OMP_THREAD_LIMIT, ulimit or memory allow no more\n", program,
                d->threads, d->threads_asked);
        told = 1;
    }
}

void ps_session_describe(const struct ps_session *s, char text[PS_SESSION_TEXT])
{
    const char *level = ps_level_name(s->level), *kernels = ps_model_kernels(s->model);
    int named = strcmp(kernels, level) != 0;
    snprintf(text, PS_SESSION_TEXT, "%s on %s, %s, level %s%s%s", s->kernels->backend, s->device->name,
             ps_precision_name(s->kernels->precision), level, named ? ", " : "", named ? kernels : "");
}

static void release(struct ps_session *s, void *memory, size_t bytes)
{
    if (memory) {
        s->device->release(s->device, memory, bytes);
    }
}

/* What open_model took from the device. */
static void close_on_device(struct ps_session *s)
{
    struct ps_device *device = s->device;
    device->synchronize(
        device); /* nothing may still be running on what is freed; its error has been or will be reported by others */
    for (int i = 0; i < 2 * PS_REPLAY_KINDS; i++) {
        struct ps_graph *graph = s->replays[i / PS_REPLAY_KINDS][i % PS_REPLAY_KINDS].graph;
        if (graph) {
            device->graph_destroy(device, graph);
        }
    }
    ps_feed_close(s->feed);
    release(s, s->errors, (size_t)s->slots * PS_ERRORS * sizeof *s->errors);
    release(s, s->state, sizeof *s->state);
    release(s, s->scoring_state, sizeof *s->scoring_state);
    release(s, s->states, (size_t)ps_ranks_size(s->ranks) * sizeof *s->states);
    if (s->seen) {
        device->release_host(device, s->seen);
    }
    if (s->host_errors) {
        device->release_host(device, s->host_errors);
    }
    if (s->model) {
        release(s, s->best, stored_bytes(s));
    }
    ps_optimizer_close(&s->optimizer);
    ps_model_close(s->model);
    if (s->exchange) {
        s->exchange->close(s->exchange);
    }
    if (s->kernels) {
        s->kernels->close(s->kernels);
    }
    device->close(device);
}

void ps_session_close(struct ps_session *s)
{
    if (!s) {
        return;
    }
    if (s->device) {
        close_on_device(s);
    }
    ps_groups_close(s->groups);
    ps_splits_free(&s->splits);
    ps_scaler_free(&s->scaler);
    free(s->seasonal_mae);
    ps_series_close(s->series);
    free(s->algorithms);
    free(s->versions);
    free(s->init_from);
    free(s->resumed);
    free(s);
}

/* ---- weights and state ---- */

/* The tensor of that name, looked for from place `near` on; -1: there is none. */
static int tensor_named(const struct ps_parameters *p, const char *name, int near)
{
    for (int i = 0; i < p->all; i++) {
        int t = (near + i) % p->all;
        if (strcmp(p->table[t].name, name) == 0) {
            return t;
        }
    }
    return -1;
}

/* What two models do not share, in words. */
struct differences {
    char text[800];
    int n, left_out; /* of them: those that the text has no room for */
    int beside_head;
};

/* A forecast head's tensors, or those of one that reconstructs. */
static int is_head(const char *name)
{
    return strcmp(name, "w_h") == 0 || strcmp(name, "b_h") == 0 || strcmp(name, "w_r") == 0 || strcmp(name, "b_r") == 0;
}

static void note_difference(struct differences *d, const struct ps_parameter *ours, const struct ps_parameter *theirs)
{
    const char *name = ours ? ours->name : theirs->name;
    char text[512];
    if (ours && theirs) {
        snprintf(text, sizeof text, "%s is %s there and %s here", name, ps_shape_text(theirs->rank, theirs->size).text,
                 ps_shape_text(ours->rank, ours->size).text);
    } else {
        snprintf(text, sizeof text, "%s is %s alone", name, ours ? "here" : "there");
    }
    size_t used = strlen(d->text);
    d->n++;
    d->beside_head |= !is_head(name);
    if (used + strlen(text) + 3 > sizeof d->text) {
        d->left_out++;
    } else {
        snprintf(d->text + used, sizeof d->text - used, "%s%s", used ? "; " : "", text);
    }
}

/* Whether weights of `theirs` can take the place of ours, name by name; the head's do not count when it is new. */
static enum ps_status check_weights(const struct ps_parameters *ours, const struct ps_parameters *theirs, int new_head)
{
    struct differences d = {.n = 0};
    for (int t = 0; t < ours->all; t++) {
        const struct ps_parameter *p = &ours->table[t];
        int at = tensor_named(theirs, p->name, t);
        if (!(new_head && (t == ours->w_h || t == ours->b_h)) &&
            (at < 0 || theirs->table[at].rank != p->rank || memcmp(theirs->table[at].size, p->size, sizeof p->size) != 0)) {
            note_difference(&d, p, at < 0 ? NULL : &theirs->table[at]);
        }
    }
    for (int t = 0; t < theirs->all; t++) {
        if (tensor_named(ours, theirs->table[t].name, t) < 0 && !(new_head && is_head(theirs->table[t].name))) {
            note_difference(&d, NULL, &theirs->table[t]);
        }
    }
    char more[32] = "";
    snprintf(more, sizeof more, d.left_out ? "; and %d more" : "", d.left_out);
    return d.n == 0 ? PS_OK
                    : ps_fail(PS_CHECKPOINT, "its weights are not this model's: %s%s%s", d.text, more,
                              d.beside_head ? "" : "; --new-head starts the head anew");
}

/* The seed's parameters as float, malloc'ed [layout->stored]. */
static enum ps_status first_parameters(const struct ps_session *s, float **parameters)
{
    int64_t count = s->model->layout->stored;
    double *values = malloc((size_t)count * sizeof *values);
    *parameters = malloc((size_t)count * sizeof **parameters);
    if (!values || !*parameters) {
        free(values);
        free(*parameters);
        return ps_fail(PS_DEVICE, "no memory for %lld parameters", (long long)count);
    }
    ps_parameters_initialise(s->model->layout, s->config->train.seed, values);
    for (int64_t i = 0; i < count; i++) {
        (*parameters)[i] = (float)values[i];
    }
    free(values);
    return PS_OK;
}

static enum ps_status upload_parameters(struct ps_session *s, const float *parameters)
{
    PS_TRY(s->device->upload(s->device, PS_COMPUTE, s->model->parameters, parameters, stored_bytes(s)));
    PS_TRY(ps_model_refresh_weights(s->model));
    return s->device->synchronize(s->device);
}

enum ps_status ps_session_initialise(struct ps_session *s)
{
    float *parameters;
    PS_TRY(first_parameters(s, &parameters));
    enum ps_status status = upload_parameters(s, parameters);
    free(parameters);
    return status;
}

enum ps_status ps_session_initialise_from(struct ps_session *s, const struct ps_checkpoint *c, int new_head)
{
    const struct ps_parameters *ours = s->model->layout;
    float *parameters;
    PS_TRY(check_weights(ours, c->layout, new_head));
    PS_TRY(first_parameters(s, &parameters));
    for (int t = 0; t < ours->all; t++) {
        if (!(new_head && (t == ours->w_h || t == ours->b_h))) {
            const struct ps_parameter *from = &c->layout->table[tensor_named(c->layout, ours->table[t].name, t)];
            memcpy(parameters + ours->table[t].offset, c->parameters + from->offset,
                   (size_t)ps_parameter_count(from) * sizeof *parameters);
        }
    }
    enum ps_status status = upload_parameters(s, parameters);
    free(parameters);
    return status;
}

enum ps_status ps_session_keep_best(struct ps_session *s)
{
    s->best_holds = s->epoch;
    return s->device->copy(s->device, PS_COMPUTE, s->best, s->model->parameters, stored_bytes(s));
}

enum ps_status ps_session_take_best(struct ps_session *s)
{
    PS_TRY(s->device->copy(s->device, PS_COMPUTE, s->model->parameters, s->best, stored_bytes(s)));
    return ps_model_refresh_weights(s->model);
}

enum ps_status ps_session_load_weights(struct ps_session *s, const struct ps_checkpoint *c, int into_best)
{
    PS_TRY(ps_engine_load_weights(s->device, s->model, c, into_best ? s->best : NULL));
    if (into_best) {
        s->best_holds = c->epoch;
    }
    return PS_OK;
}

enum ps_status ps_session_restore(struct ps_session *s, const struct ps_checkpoint *c)
{
    struct ps_config saved;
    PS_TRY(ps_config_parse_saved(c->config, "the checkpoint's config", &saved));
    enum ps_status status = ps_config_compatible(&saved, s->config);
    ps_config_free(&saved);
    PS_TRY(status);
    const struct {
        const char *what, *here, *there;
    } same[] = {{"fusion level", ps_level_name(s->level), c->level},
                {"algorithms", s->algorithms, c->algorithms},
                {"device and versions", s->versions, c->versions}};
    const int ranks = c->ranks ? (int)c->ranks : 1, as_many = ranks == ps_ranks_size(s->ranks);
    for (size_t i = 0; i < sizeof same / sizeof *same && as_many; i++) {
        if (strcmp(same[i].here, same[i].there) != 0) {
            return ps_fail(PS_CHECKPOINT, "cannot resume to the same bits: %s: \"%s\" here, \"%s\" in the checkpoint", same[i].what,
                           same[i].here, same[i].there);
        }
    }
    if (c->scaler.channels == s->series->channels) {
        PS_TRY(ps_series_check_names(s->series, c->names));
    }
    if (c->fingerprint != s->series->fingerprint) {
        return ps_fail(PS_CHECKPOINT, "cannot resume: %s is not the data the checkpoint was trained on", s->series->path);
    }
    if (!c->m || !c->v) {
        return ps_fail(PS_CHECKPOINT, "cannot resume: the checkpoint holds weights alone");
    }
    /* Step and cursor index tables of this run. */
    uint64_t batch = (uint64_t)s->step_windows, per_epoch = (uint64_t)s->steps_per_epoch;
    if (c->epoch > (uint64_t)s->config->train.epochs || c->cursor > (uint64_t)s->train_windows ||
        c->step != c->epoch * per_epoch + (c->cursor + batch - 1) / batch) {
        return ps_fail(
            PS_CHECKPOINT,
            "cannot resume: step %llu is not %llu windows into epoch %llu of %lld, as the checkpoint says: it is damaged",
            (unsigned long long)c->step, (unsigned long long)c->cursor, (unsigned long long)c->epoch + 1,
            (long long)s->config->train.epochs);
    }
    size_t count = (size_t)s->model->layout->count;
    PS_TRY(ps_session_load_weights(s, c, 0));
    PS_TRY(s->device->upload(s->device, PS_COMPUTE, s->optimizer.m, c->m, count * sizeof *c->m));
    PS_TRY(s->device->upload(s->device, PS_COMPUTE, s->optimizer.v, c->v, count * sizeof *c->v));
    s->now = (struct ps_step_state){.step = c->step,
                                    .cursor = c->cursor,
                                    .loss_sum = c->loss_sum,
                                    .lost = c->lost,
                                    .skipped = c->skipped,
                                    .unobserved = c->unobserved};
    PS_TRY(s->device->upload(s->device, PS_COMPUTE, s->state, &s->now, sizeof s->now));
    free(s->init_from);
    s->init_from = c->init_from ? strdup(c->init_from) : NULL;
    if (c->init_from && !s->init_from) {
        return ps_fail(PS_DEVICE, "no memory for the session");
    }
    if (as_many && c->ranks) {
        s->resumed = calloc((size_t)ranks, sizeof *s->resumed);
        if (!s->resumed) {
            return ps_fail(PS_DEVICE, "no memory for the states of %d ranks", ranks);
        }
        for (int r = 0; r < ranks; r++) {
            s->resumed[r] =
                (struct ps_step_state){.loss_sum = c->rank_losses[r], .lost = c->rank_lost[r], .unobserved = c->rank_unobserved[r]};
        }
    }
    s->epoch = c->epoch;
    s->best_validation = c->best_validation;
    s->best_epoch = c->best_epoch;
    s->epochs_since_best = c->epochs_since_best;
    return s->device->synchronize(s->device);
}
