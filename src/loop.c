/* The two loops of a session: training steps and scoring. Between the start and the end of a pass the host only enqueues. */
#include <math.h>
#include <stdlib.h>

#include "src/clock.h"
#include "src/session.h"

/* ---- captured passes ---- */

enum ps_status ps_session_step(struct ps_session *s, int64_t batch)
{
    PS_TRY(ps_model_forward(s->model, &s->windows, s->state, batch, 1));
    PS_TRY(ps_model_backward(s->model, &s->windows, s->state, batch));
    return ps_optimizer_step(&s->optimizer, s->model->parameters, s->model->weights, s->model->gradients, s->state, batch);
}

static enum ps_status score_batch(struct ps_session *s, int64_t batch)
{
    struct ps_tensor errors = ps_tensor_2d(s->errors, PS_F64, s->slots, 2);
    PS_TRY(ps_model_forward(s->model, &s->windows, s->scoring_state, batch, 0));
    PS_TRY(ps_model_errors(s->model, &s->windows, s->scoring_state, batch, errors, s->config->train.batch_size));
    return s->kernels->advance(s->kernels, &(struct ps_advance){.state = s->scoring_state, .windows = (uint64_t)batch});
}

static enum ps_status replay_body(void *argument)
{
    struct ps_replay *r = argument;
    for (int64_t i = 0; i < r->steps; i++) {
        PS_TRY(r->training ? ps_session_step(r->session, r->batch) : score_batch(r->session, r->batch));
    }
    return PS_OK;
}

/* The graph of `steps` passes over `batch` windows each: of one or s->graph_steps full batches, and of one of one shorter size
 * (captured anew if that changes). */
static enum ps_status graph_of(struct ps_session *s, int64_t batch, int64_t steps, int training, struct ps_graph **graph)
{
    enum ps_replay_kind kind = batch < s->config->train.batch_size ? PS_REPLAY_SHORT
                               : steps > 1                         ? PS_REPLAY_SEVERAL
                                                                   : PS_REPLAY_FULL;
    struct ps_replay *r = &s->replays[training][kind];
    if (r->graph && r->batch != batch) {
        PS_TRY(s->device->synchronize(s->device));
        s->device->graph_destroy(s->device, r->graph);
        r->graph = NULL;
    }
    if (!r->graph) {
        *r = (struct ps_replay){.session = s, .batch = batch, .steps = steps, .training = training};
        PS_TRY(s->device->capture(s->device, replay_body, r, &r->graph));
    }
    *graph = r->graph;
    return PS_OK;
}

enum ps_status ps_session_full_step(struct ps_session *s, struct ps_graph **graph)
{
    return graph_of(s, s->config->train.batch_size, 1, 1, graph);
}

/* Full batches of the next graph when `most` may follow. */
static int64_t steps_at_once(const struct ps_session *s, int64_t most)
{
    return most < s->graph_steps ? 1 : s->graph_steps;
}

enum ps_status ps_session_full_steps(struct ps_session *s, int64_t steps)
{
    for (int64_t done = 0, now; done < steps; done += now) {
        struct ps_graph *graph;
        now = steps_at_once(s, steps - done);
        PS_TRY(graph_of(s, s->config->train.batch_size, now, 1, &graph));
        PS_TRY(s->device->replay(s->device, graph));
    }
    return PS_OK;
}

/* ---- keeping little queued, without waiting on the device ---- */

enum { GROUPS = 3 };
#define GROUP_SECONDS 0.015

struct throttle {
    struct ps_device *device;
    struct ps_event *event[GROUPS];
    int next, pending;    /* ring */
    int64_t group, since; /* graphs between events; graphs since the last */
    double last;          /* when the last event was seen to happen */
};

static enum ps_status throttle_open(struct ps_device *device, struct throttle *t)
{
    *t = (struct throttle){.device = device, .group = 1, .last = ps_seconds()};
    for (int i = 0; i < GROUPS; i++) {
        PS_TRY(device->event_create(device, &t->event[i]));
    }
    return PS_OK;
}

static void throttle_close(struct throttle *t)
{
    for (int i = 0; i < GROUPS; i++) {
        if (t->event[i]) {
            t->device->event_destroy(t->device, t->event[i]);
        }
    }
}

/* After each graph: at most GROUPS groups of about GROUP_SECONDS are queued at any time. */
static enum ps_status throttle_step(struct throttle *t)
{
    if (++t->since < t->group) {
        return PS_OK;
    }
    t->since = 0;
    PS_TRY(t->device->event_record(t->device, PS_COMPUTE, t->event[t->next]));
    t->next = (t->next + 1) % GROUPS;
    if (++t->pending < GROUPS) {
        return PS_OK;
    }
    int happened = 0;
    for (;;) {
        PS_TRY(t->device->event_query(t->device, t->event[t->next], &happened)); /* the oldest */
        if (happened) {
            break;
        }
        ps_nap();
    }
    t->pending--;
    double seen = ps_seconds(), step = (seen - t->last) / (double)t->group;
    t->last = seen;
    int64_t fit = step > 0 ? (int64_t)(GROUP_SECONDS / step) : 1;
    t->group = fit < 1 ? 1 : fit > 2 * t->group ? 2 * t->group : fit;
    return PS_OK;
}

/* ---- one pass over windows ---- */

struct pass {
    struct ps_session *session;
    int training;
    int64_t begin, end; /* positions in host_indices */
    int64_t position;   /* done */
    int64_t batches;    /* so far */
    int uploading[2];   /* slots whose upload may still read the host's buffer */
    struct throttle throttle;
};

/* Uploads the order of windows. Streamed batches lie in the two slots by turns, whatever windows they hold. */
static enum ps_status pass_open(struct ps_session *s, int training, int64_t begin, int64_t end, struct pass *pass)
{
    *pass = (struct pass){.session = s, .training = training, .begin = begin, .end = end, .position = begin};
    int64_t B = s->config->train.batch_size;
    int32_t *order = s->host_indices;
    if (!s->on_device) {
        ps_prefetch_start(s->prefetch, s->host_indices, begin, end);
        order = malloc((size_t)end * sizeof *order);
        if (!order) {
            return ps_fail(PS_DEVICE, "no memory for the order of %lld windows", (long long)end);
        }
        for (int64_t i = 0; i < end; i++) {
            order[i] = i < begin ? 0 : (int32_t)((i - begin) / B % 2 * B + (i - begin) % B);
        }
    }
    enum ps_status status = s->device->upload(s->device, PS_COMPUTE, s->windows.indices.data, order, (size_t)end * sizeof *order);
    if (!s->on_device) {
        free(order);
    }
    PS_TRY(status);
    return throttle_open(s->device, &pass->throttle);
}

/* The next batch of a streamed pass, on its way to its slot; the step waits for it on the device. */
static enum ps_status stream_in(struct pass *pass, int *slot)
{
    struct ps_session *s = pass->session;
    struct ps_device *device = s->device;
    /* The reader fills the buffer of two batches ago once the device has taken it. */
    int reused = (int)(pass->batches % 2), happened = 0;
    while (pass->uploading[reused]) {
        PS_TRY(device->event_query(device, s->slot_uploaded[reused], &happened));
        if (happened) {
            ps_prefetch_release(s->prefetch, reused);
            pass->uploading[reused] = 0;
        } else {
            ps_nap();
        }
    }
    int64_t n;
    PS_TRY(ps_prefetch_next(s->prefetch, slot, &n, &s->waited));
    int64_t B = s->config->train.batch_size, C = s->view.channels;
    size_t input = (size_t)(C * s->view.seq_len) * sizeof(float), target = (size_t)(C * s->view.pred_len) * sizeof(float);
    PS_TRY(device->event_wait(device, PS_COPY, s->slot_free[*slot]));
    PS_TRY(device->upload(device, PS_COPY, (char *)s->data[0] + (size_t)(*slot * B) * input, s->slot_inputs[*slot],
                          (size_t)n * input));
    PS_TRY(device->upload(device, PS_COPY, (char *)s->data[1] + (size_t)(*slot * B) * target, s->slot_targets[*slot],
                          (size_t)n * target));
    PS_TRY(device->event_record(device, PS_COPY, s->slot_uploaded[*slot]));
    pass->uploading[*slot] = 1;
    return device->event_wait(device, PS_COMPUTE, s->slot_uploaded[*slot]);
}

/* Enqueues the next batches, `most` at most; *batches 0 when the pass is over. */
static enum ps_status pass_step(struct pass *pass, int64_t most, int64_t *batches)
{
    struct ps_session *s = pass->session;
    int64_t left = pass->end - pass->position, B = s->config->train.batch_size, n = left < B ? left : B;
    *batches = 0;
    if (n == 0) {
        return PS_OK;
    }
    struct ps_graph *graph;
    int64_t steps = n < B ? 1 : steps_at_once(s, left / B < most ? left / B : most);
    PS_TRY(graph_of(s, n, steps, pass->training, &graph));
    int slot = 0;
    if (!s->on_device) {
        PS_TRY(stream_in(pass, &slot));
    }
    PS_TRY(s->device->replay(s->device, graph));
    if (!s->on_device) {
        PS_TRY(s->device->event_record(s->device, PS_COMPUTE, s->slot_free[slot]));
    }
    pass->position += steps * n;
    pass->batches += steps;
    *batches = steps;
    return throttle_step(&pass->throttle);
}

static enum ps_status pass_close(struct pass *pass, enum ps_status status)
{
    struct ps_session *s = pass->session;
    enum ps_status finished = s->device->synchronize(s->device);
    for (int slot = 0; slot < 2; slot++) {
        if (pass->uploading[slot]) {
            ps_prefetch_release(s->prefetch, slot);
        }
    }
    if (!s->on_device) { /* a pass that was cut short leaves the reader at work: host_indices is about to be written again */
        ps_prefetch_start(s->prefetch, s->host_indices, 0, 0);
    }
    throttle_close(&pass->throttle);
    return status != PS_OK ? status : finished;
}

static int stopped(const struct ps_session *s)
{
    return s->stop && *s->stop;
}

/* ---- training ---- */

static enum ps_status read_state(struct ps_session *s)
{
    return s->device->download(s->device, PS_COMPUTE, &s->now, s->state, sizeof s->now);
}

static enum ps_status write_state(struct ps_session *s, struct ps_step_state *device_state, const struct ps_step_state *state)
{
    PS_TRY(s->device->upload(s->device, PS_COMPUTE, device_state, state, sizeof *state));
    return PS_OK;
}

/* Steps from `step` to the next checkpoint. */
static int64_t steps_to_checkpoint(const struct ps_epoch_watch *watch, uint64_t step)
{
    return watch->checkpoint_every ? watch->checkpoint_every - (int64_t)(step % (uint64_t)watch->checkpoint_every) : INT64_MAX;
}

static enum ps_status train_pass(struct pass *pass, const struct ps_epoch_watch *watch)
{
    struct ps_session *s = pass->session;
    uint64_t step = s->now.step;
    for (;;) {
        int64_t most = steps_to_checkpoint(watch, step), done;
        if (watch->max_steps && watch->max_steps - pass->batches < most) {
            most = watch->max_steps - pass->batches;
        }
        PS_TRY(pass_step(pass, most, &done));
        if (done == 0) {
            return PS_OK;
        }
        step += (uint64_t)done;
        ps_progress_step(watch->progress, (int64_t)s->epoch + 1, (int64_t)step - (int64_t)s->epoch * s->steps_per_epoch, NAN);
        if (stopped(s) || (watch->max_steps && pass->batches >= watch->max_steps)) {
            return PS_OK;
        }
        if (watch->checkpoint_every && step % (uint64_t)watch->checkpoint_every == 0 && pass->position < pass->end) {
            s->now.step = step; /* as the device will have it when it comes to the copy; the loss it tells then */
            s->now.cursor = (uint64_t)pass->position;
            PS_TRY(watch->checkpoint(s, watch->argument));
        }
    }
}

enum ps_status ps_session_train_epoch(struct ps_session *s, const struct ps_epoch_watch *watch, int *finished, double *loss)
{
    PS_TRY(read_state(s));
    ps_shuffle(s->config->train.seed, s->epoch, s->splits.first[PS_TRAIN], s->splits.count[PS_TRAIN], s->host_indices);
    struct pass pass = {0};
    enum ps_status status = pass_open(s, 1, (int64_t)s->now.cursor, s->train_windows, &pass);
    if (status == PS_OK) {
        status = train_pass(&pass, watch);
    }
    *finished = pass.position == pass.end;
    PS_TRY(pass_close(&pass, status));
    PS_TRY(read_state(s));
    *loss = s->now.cursor ? s->now.loss_sum / (double)s->now.cursor : NAN;
    if (*finished) {
        s->ended_loss_sum = s->now.loss_sum;
        s->epoch++;
        s->now.cursor = 0;
        s->now.loss_sum = 0;
        PS_TRY(write_state(s, s->state, &s->now));
    }
    return PS_OK;
}

enum ps_status ps_session_recall(struct ps_session *s)
{
    PS_TRY(s->device->synchronize(s->device));
    return read_state(s);
}

enum ps_status ps_session_reopen_epoch(struct ps_session *s)
{
    s->epoch--;
    s->now.cursor = (uint64_t)s->train_windows;
    s->now.loss_sum = s->ended_loss_sum;
    return write_state(s, s->state, &s->now);
}

enum ps_status ps_session_rewind(struct ps_session *s)
{
    s->epoch = 0;
    s->now = (struct ps_step_state){0};
    ps_shuffle(s->config->train.seed, s->epoch, s->splits.first[PS_TRAIN], s->splits.count[PS_TRAIN], s->host_indices);
    if (s->on_device) {
        PS_TRY(s->device->upload(s->device, PS_COMPUTE, s->windows.indices.data, s->host_indices,
                                 (size_t)s->train_windows * sizeof *s->host_indices));
    }
    PS_TRY(write_state(s, s->state, &s->now));
    return s->device->synchronize(s->device);
}

/* ---- scoring ---- */

enum ps_status ps_session_score(struct ps_session *s, enum ps_split split, struct ps_accuracy *accuracy)
{
    int64_t count = s->splits.count[split], B = s->config->train.batch_size;
    const struct ps_step_state start = {0};
    ps_sequence(s->splits.first[split], count, s->host_indices);
    PS_TRY(write_state(s, s->scoring_state, &start));
    struct pass pass;
    enum ps_status status = pass_open(s, 0, 0, count, &pass);
    for (int64_t done = 1; status == PS_OK && done > 0 && !stopped(s);) {
        status = pass_step(&pass, INT64_MAX, &done);
    }
    PS_TRY(pass_close(&pass, status));
    if (pass.position < pass.end) {
        *accuracy = (struct ps_accuracy){0};
        return PS_OK;
    }
    int64_t slots = (count + B - 1) / B, full = count / B;
    PS_TRY(s->device->download(s->device, PS_COMPUTE, s->host_errors, s->errors, (size_t)slots * 2 * sizeof *s->host_errors));
    double sums[2] = {0, 0}, full_sums[2] = {NAN, NAN};
    for (int64_t i = 0; i < slots; i++) {
        sums[0] += s->host_errors[2 * i];
        sums[1] += s->host_errors[2 * i + 1];
        if (i + 1 == full) {
            full_sums[0] = sums[0];
            full_sums[1] = sums[1];
        }
    }
    double window = (double)(s->view.channels * s->view.pred_len), all = (double)count * window,
           whole = (double)(full * B) * window;
    *accuracy = (struct ps_accuracy){
        .all = {.mse = sums[0] / all, .mae = sums[1] / all, .windows = count},
        .full_batches = {.mse = full_sums[0] / whole, .mae = full_sums[1] / whole, .windows = full * B},
    };
    return PS_OK;
}

enum ps_status ps_session_forecast(struct ps_session *s, enum ps_split split, ps_forecast_sink *sink, void *argument)
{
    int64_t count = s->splits.count[split], B = s->config->train.batch_size, C = s->view.channels, H = s->view.pred_len;
    size_t bytes = (size_t)(B * C * H) * sizeof(float);
    float *host = malloc(bytes);
    if (!host) {
        return ps_fail(PS_DEVICE, "no memory for the forecasts of %lld windows", (long long)B);
    }
    const struct ps_step_state start = {0};
    ps_sequence(s->splits.first[split], count, s->host_indices);
    enum ps_status status = write_state(s, s->scoring_state, &start);
    struct pass pass = {0};
    if (status == PS_OK) {
        status = pass_open(s, 0, 0, count, &pass);
    }
    for (int64_t done = 1; status == PS_OK && done > 0;) {
        int64_t first = pass.position;
        status = pass_step(&pass, 1, &done);
        int64_t n = pass.position - first;
        if (status == PS_OK && n > 0) {
            /* The targets have been used: their buffer takes the forecasts. */
            struct ps_tensor y = ps_tensor_2d(s->model->cache.shared.targets, s->kernels->parameter, n * C, H);
            status = ps_model_forecast(s->model, n, y);
            if (status == PS_OK) {
                status = s->device->download(s->device, PS_COMPUTE, host, y.data, (size_t)(n * C * H) * sizeof *host);
            }
            if (status == PS_OK) {
                status = sink(argument, first, n, host);
            }
        }
    }
    if (pass.session) {
        status = pass_close(&pass, status);
    }
    free(host);
    return status;
}
