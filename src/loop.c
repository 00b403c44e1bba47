/* The two loops of a session: training steps and scoring. Between the start and the end of a pass the host only enqueues. */
#include <math.h>
#include <stdlib.h>

#include "src/clock.h"
#include "src/together.h"

/* ---- captured passes ---- */

int ps_session_frozen(const struct ps_session *s)
{
    const int64_t epochs = s->config->train.freeze_epochs;
    return s->config->train.freeze == PS_FREEZE_ENCODER && (epochs == 0 || s->epoch < (uint64_t)epochs);
}

/* The targets of a step that are observed, of all ranks, where its loss is a mean over them that no part of it knows. */
static enum ps_status count_observed(struct ps_session *s, int64_t batch)
{
    double *const observed = s->model->observed;
    if (!observed) {
        return PS_OK;
    }
    PS_TRY(s->device->fill_zero(s->device, PS_COMPUTE, observed, sizeof *observed));
    for (int64_t first = 0; first < batch; first += s->config->train.batch_size) {
        struct ps_windows windows;
        const int64_t mine = ps_session_part(s, first, batch, &windows);
        PS_TRY(mine > 0 ? ps_model_count_observed(s->model, &windows, s->state, mine) : PS_OK);
    }
    return s->exchange ? s->exchange->sum(s->exchange, observed, PS_F64, 1) : PS_OK;
}

/* gradients += those of a step's mean loss, of this rank's windows, train.batch_size at a time. */
static enum ps_status step_gradients(struct ps_session *s, int64_t batch, int frozen)
{
    PS_TRY(count_observed(s, batch));
    for (int64_t first = 0; first < batch; first += s->config->train.batch_size) {
        struct ps_windows windows;
        const int64_t mine = ps_session_part(s, first, batch, &windows);
        if (frozen) {
            PS_TRY(mine > 0 ? ps_model_head_gradients(s->model, &windows, s->state, mine) : PS_OK);
        } else {
            PS_TRY(mine > 0 ? ps_model_gradients(s->model, &windows, s->state, mine) : ps_model_attend(s->model));
        }
    }
    return ps_model_sum_gradients(s->model);
}

static enum ps_status train_batch(struct ps_session *s, int64_t batch, int frozen)
{
    struct ps_model *m = s->model;
    if (!ps_optimizer_looks_first(&s->optimizer) && !s->optimizer.options.held && !s->exchange &&
        batch <= s->config->train.batch_size) {
        struct ps_windows windows;
        PS_TRY(count_observed(s, batch));
        const int64_t mine = ps_session_part(s, 0, batch, &windows);
        s->optimizer.options.gradient_scale = m->gradient_scale;
        const struct ps_adamw update = ps_optimizer_adamw(&s->optimizer, m->parameters, m->weights, m->gradients, s->state, batch);
        return ps_model_step(m, &windows, s->state, mine, &update);
    }
    PS_TRY(step_gradients(s, batch, frozen));
    s->optimizer.options.gradient_scale = m->gradient_scale; /* this step's */
    return ps_optimizer_step(&s->optimizer, m->parameters, m->weights, m->gradients, s->state, batch);
}

enum ps_status ps_session_step(struct ps_session *s, int64_t batch)
{
    return train_batch(s, batch, ps_session_frozen(s));
}

/* Errors of so many batches. The place in the pass moves on once, behind them, so that no batch waits for it. */
static enum ps_status score_batches(struct ps_session *s, int64_t batch, int64_t batches)
{
    const struct ps_tensor errors = ps_tensor_2d(s->errors, PS_F64, s->slots, PS_ERRORS);
    const int64_t at_once = s->config->train.batch_size, all = batch * batches;
    for (int64_t done = 0; done < all; done += at_once) {
        const int64_t slot = done / at_once; /* from that of the place on */
        struct ps_windows windows;
        const int64_t mine = ps_session_part(s, done, all, &windows);
        if (mine > 0) {
            PS_TRY(ps_model_forward(s->model, &windows, s->scoring_state, mine, 0));
            PS_TRY(ps_model_errors(s->model, &windows, s->scoring_state, mine, ps_tensor_slice(errors, 0, slot, s->slots - slot),
                                   at_once));
        }
    }
    return s->kernels->advance(s->kernels, &(struct ps_advance){.state = s->scoring_state, .windows = (uint64_t)all});
}

/* A replay on the CPU calls this again: whether the encoder is frozen is what held at the capture, as on CUDA. */
static enum ps_status replay_body(void *argument)
{
    struct ps_replay *r = argument;
    for (int64_t i = 0; r->training && i < r->steps; i++) {
        PS_TRY(train_batch(r->session, r->batch, r->frozen));
    }
    return r->training ? PS_OK : score_batches(r->session, r->batch, r->steps);
}

/* The graph of `steps` passes over `batch` windows each: of one or s->graph_steps full batches, and of one of one shorter size
 * (captured anew if that changes, or when the encoder is no longer frozen). */
static enum ps_status graph_of(struct ps_session *s, int64_t batch, int64_t steps, int training, struct ps_graph **graph)
{
    enum ps_replay_kind kind = batch < s->step_windows ? PS_REPLAY_SHORT : steps > 1 ? PS_REPLAY_SEVERAL : PS_REPLAY_FULL;
    struct ps_replay *r = &s->replays[training][kind];
    const int frozen = training && ps_session_frozen(s);
    if (r->graph && (r->batch != batch || r->frozen != frozen)) {
        PS_TRY(s->device->synchronize(s->device));
        s->device->graph_destroy(s->device, r->graph);
        r->graph = NULL;
    }
    if (!r->graph) {
        *r = (struct ps_replay){.session = s, .batch = batch, .steps = steps, .training = training, .frozen = frozen};
        PS_TRY(s->device->capture(s->device, replay_body, r, &r->graph));
    }
    *graph = r->graph;
    return PS_OK;
}

enum ps_status ps_session_full_step(struct ps_session *s, struct ps_graph **graph)
{
    return graph_of(s, s->step_windows, 1, 1, graph);
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
        PS_TRY(graph_of(s, s->step_windows, now, 1, &graph));
        PS_TRY(s->device->replay(s->device, graph));
    }
    return PS_OK;
}

/* Those of a whole pass. */
static enum ps_status graphs_of(struct ps_session *s, int64_t windows, int training)
{
    const int64_t B = s->step_windows, full = windows / B, several = steps_at_once(s, full), left = windows % B;
    struct ps_graph *graph;
    PS_TRY(full > 0 ? graph_of(s, B, several, training, &graph) : PS_OK);
    PS_TRY(full % several > 0 ? graph_of(s, B, 1, training, &graph) : PS_OK);
    return left > 0 ? graph_of(s, left, 1, training, &graph) : PS_OK;
}

enum ps_status ps_session_capture(struct ps_session *s)
{
    PS_TRY(graphs_of(s, s->train_windows, 1));
    return graphs_of(s, s->splits.count[PS_VALIDATION], 0);
}

/* ---- keeping little queued, without waiting on the device ---- */

#define GROUP_SECONDS 0.015

struct throttle {
    struct ps_device *device;
    struct ps_event *event[PS_GROUPS];
    const struct ps_step_state *state; /* device; seen[i]: as it was at event i */
    struct ps_step_state *seen;
    uint64_t nonfinite;   /* of the last event that happened */
    int next, pending;    /* ring */
    int64_t group, since; /* graphs between events; graphs since the last */
    double last;          /* when the last event was seen to happen */
};

static enum ps_status throttle_open(struct ps_session *s, int training, struct throttle *t)
{
    struct ps_device *device = s->device;
    *t = (struct throttle){
        .device = device, .state = training ? s->state : s->scoring_state, .seen = s->seen, .group = 1, .last = ps_seconds()};
    for (int i = 0; i < PS_GROUPS; i++) {
        PS_TRY(device->event_create(device, &t->event[i]));
    }
    return PS_OK;
}

static void throttle_close(struct throttle *t)
{
    for (int i = 0; i < PS_GROUPS; i++) {
        if (t->event[i]) {
            t->device->event_destroy(t->device, t->event[i]);
        }
    }
}

/* After each graph: at most PS_GROUPS groups of about GROUP_SECONDS are queued at any time. */
static enum ps_status throttle_step(struct throttle *t)
{
    if (++t->since < t->group) {
        return PS_OK;
    }
    t->since = 0;
    PS_TRY(t->device->download_async(t->device, PS_COMPUTE, &t->seen[t->next], t->state, sizeof *t->seen));
    PS_TRY(t->device->event_record(t->device, PS_COMPUTE, t->event[t->next]));
    t->next = (t->next + 1) % PS_GROUPS;
    if (++t->pending < PS_GROUPS) {
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
    t->nonfinite = t->seen[t->next].nonfinite;
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
    int64_t begin, end; /* positions in the order of windows */
    int64_t position;   /* done */
    int64_t batches;    /* so far */
    struct throttle throttle;
};

struct ps_order ps_session_order(const struct ps_session *s, enum ps_split split)
{
    return (struct ps_order){.first = s->splits.first[split], .count = s->splits.count[split], .runs = &s->splits.runs[split]};
}

/* The training windows as the present epoch takes them. */
static struct ps_order training_order(const struct ps_session *s)
{
    struct ps_order order = ps_session_order(s, PS_TRAIN);
    order.shuffled = 1;
    order.seed = s->config->train.seed;
    order.epoch = s->epoch;
    return order;
}

/* Windows [begin, end) of the order. */
static enum ps_status pass_open(struct ps_session *s, const struct ps_order *order, int64_t begin, int64_t end, struct pass *pass)
{
    *pass = (struct pass){.session = s, .training = order->shuffled, .begin = begin, .end = end, .position = begin};
    PS_TRY(ps_feed_start(s->feed, order, begin, end));
    return throttle_open(s, pass->training, &pass->throttle);
}

/* Enqueues the next batches, `most` at most; *batches 0 when the pass is over. */
static enum ps_status pass_step(struct pass *pass, int64_t most, int64_t *batches)
{
    struct ps_session *s = pass->session;
    int64_t left = pass->end - pass->position, B = s->step_windows, n = left < B ? left : B;
    *batches = 0;
    if (n == 0) {
        return PS_OK;
    }
    struct ps_graph *graph;
    int64_t steps = n < B ? 1 : steps_at_once(s, left / B < most ? left / B : most);
    PS_TRY(graph_of(s, n, steps, pass->training, &graph));
    PS_TRY(ps_session_agree(s, ps_feed_next(s->feed), &pass->throttle.nonfinite));
    PS_TRY(s->device->replay(s->device, graph));
    PS_TRY(ps_feed_used(s->feed));
    pass->position += steps * n;
    pass->batches += steps;
    *batches = steps;
    return throttle_step(&pass->throttle);
}

static enum ps_status pass_close(struct pass *pass, enum ps_status status)
{
    struct ps_session *s = pass->session;
    enum ps_status finished = s->device->synchronize(s->device);
    ps_feed_stop(s->feed);
    throttle_close(&pass->throttle);
    return status != PS_OK ? status : finished;
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
        PS_TRY(watch->begun && done > 0 && done == pass->batches ? watch->begun(s, watch->argument) : PS_OK);
        if (done == 0 || pass->throttle.nonfinite) {
            return PS_OK;
        }
        step += (uint64_t)done;
        ps_progress_step(watch->progress, (int64_t)s->epoch + 1, (int64_t)step - (int64_t)s->epoch * s->steps_per_epoch, NAN);
        if (ps_session_stopped(s) || (watch->max_steps && pass->batches >= watch->max_steps)) {
            return PS_OK;
        }
        if (watch->checkpoint_every && step % (uint64_t)watch->checkpoint_every == 0 && pass->position < pass->end) {
            s->now.step = step; /* as the device will have it when it comes to the copy; the loss it tells then */
            s->now.cursor = (uint64_t)pass->position;
            PS_TRY(watch->checkpoint(s, watch->argument));
        }
    }
}

/* Whether tensor t of m, a flat buffer, holds a value that is not finite. */
static int is_spoilt(const struct ps_parameters *layout, int t, const float *m)
{
    const struct ps_parameter *p = &layout->table[t];
    for (int64_t i = 0; i < ps_parameter_count(p); i++) {
        if (!isfinite(m[p->offset + i])) {
            return 1;
        }
    }
    return 0;
}

/* Appends the places that the model has of `count`. */
static void append_places(int *order, int *n, const int *places, int count)
{
    for (int i = 0; i < count; i++) {
        if (places[i] >= 0) {
            order[(*n)++] = places[i];
        }
    }
}

/* The places in the table in the order in which backward comes to them: [n]. */
static void backward_order(const struct ps_parameters *layout, int layers, int post, int *order)
{
    const int head[] = {layout->revin_bias, layout->revin_weight, layout->b_h, layout->w_h};
    const int embedding[] = {layout->w_pos, layout->b_p, layout->w_p};
    int n = 0;
    append_places(order, &n, head, 4);
    for (int l = layers; l-- > 0;) {
        const int *p = layout->layer[l];
        const int norms[2][2] = {{p[PS_NORM2_BETA], p[PS_NORM2_GAMMA]}, {p[PS_NORM1_BETA], p[PS_NORM1_GAMMA]}};
        const int branches[2][4] = {{p[PS_B_2], p[PS_W_2], p[PS_B_1], p[PS_W_1]}, {p[PS_B_O], p[PS_W_O], p[PS_B_QKV], p[PS_W_QKV]}};
        for (int i = 0; i < 2; i++) { /* the feed-forward, attention */
            append_places(order, &n, norms[i], post ? 2 : 0);
            append_places(order, &n, branches[i], 4);
            append_places(order, &n, norms[i], post ? 0 : 2);
        }
    }
    append_places(order, &n, embedding, 3);
}

/* Says at which step what was not finite. AdamW's m has kept, since then, which gradients were not; the first is the one that
 * backward comes to first. */
static enum ps_status went_wrong(struct ps_session *s, uint64_t lost)
{
    const struct ps_parameters *layout = s->model->layout;
    size_t bytes = (size_t)layout->count * sizeof(float);
    float *m = malloc(bytes);
    int *order = malloc((size_t)layout->n * sizeof *order), n = 0, first = -1;
    enum ps_status status = m && order ? s->device->download(s->device, PS_COMPUTE, m, s->optimizer.m, bytes)
                                       : ps_fail(PS_DEVICE, "no memory for %lld moments", (long long)layout->count);
    if (order) {
        backward_order(layout, (int)s->config->model.n_layers, s->model->shape.norm_place == PS_NORM_POST, order);
    }
    for (int i = 0; i < layout->n && status == PS_OK; i++) {
        if (is_spoilt(layout, order[i], m)) {
            first = first < 0 ? order[i] : first;
            n++;
        }
    }
    free(order);
    free(m);
    PS_TRY(status);
    uint64_t step = s->now.nonfinite;
    return ps_fail(
        PS_USAGE,
        "step %llu, in epoch %llu: %s is not finite (gradients of %d of %d tensors, first %s): %slower optim.lr, set "
        "optim.clip_norm, or leave such steps out with train.on_nonfinite: skip; the last checkpoint is of a step before",
        (unsigned long long)step, (unsigned long long)((step - 1) / (uint64_t)s->steps_per_epoch + 1),
        lost ? "the loss" : "a gradient", n, layout->n, first < 0 ? "none" : layout->table[first].name,
        s->kernels->precision == PS_FP16 ? "fp16 ends at 65504: take bf16 or tf32, "
        : s->kernels->precision == PS_TF32 && s->level == PS_LEVEL_LAYER
            ? "rows of level layer end at 65504: take runtime.fusion: gemm, "
            : "");
}

enum ps_status ps_session_train_epoch(struct ps_session *s, const struct ps_epoch_watch *watch, int *finished, double *loss)
{
    const struct ps_order order = training_order(s);
    struct pass pass = {0};
    enum ps_status status = pass_open(s, &order, (int64_t)s->now.cursor, s->train_windows, &pass);
    if (status == PS_OK) {
        status = train_pass(&pass, watch);
    }
    *finished = pass.position == pass.end;
    if (status == PS_OK) { /* no earlier look at the state is still to come */
        status = s->device->download_async(s->device, PS_COMPUTE, s->seen, s->state, sizeof s->now);
    }
    PS_TRY(pass_close(&pass, status));
    s->now = *s->seen;
    struct ps_step_state joined;
    PS_TRY(ps_session_join_state(s, &joined));
    if (s->now.nonfinite) {
        return ps_ranks_check(s->ranks, went_wrong(s, joined.lost));
    }
    const double unobserved = (double)joined.unobserved / (double)ps_model_targets(&s->model->shape);
    const double windows = (double)(joined.cursor - joined.lost) - unobserved;
    *loss = windows > 0 ? joined.loss_sum / windows : NAN;
    if (*finished) {
        s->ended = s->now;
        s->epoch++;
        s->now = (struct ps_step_state){.step = s->now.step};
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
    s->now = s->ended;
    return write_state(s, s->state, &s->now);
}

enum ps_status ps_session_rewind(struct ps_session *s)
{
    s->epoch = 0;
    s->now = (struct ps_step_state){0};
    if (ps_feed_resident(s->feed)) {
        const struct ps_order order = training_order(s);
        PS_TRY(ps_feed_start(s->feed, &order, 0, s->train_windows));
    }
    PS_TRY(write_state(s, s->state, &s->now));
    return s->device->synchronize(s->device);
}

/* ---- scoring ---- */

/* Means over what is observed. */
static struct ps_score score_of(const double sums[PS_ERRORS], int64_t windows)
{
    const double n = sums[PS_ERROR_OBSERVED];
    return (struct ps_score){.mse = sums[PS_ERROR_SQUARES] / n,
                             .mae = sums[PS_ERROR_ABSOLUTES] / n,
                             .windows = windows,
                             .loss = sums[PS_ERROR_LOSS] / n,
                             .coverage = sums[PS_ERROR_WITHIN] / n};
}

static int64_t slots_of(const struct ps_session *s, int64_t windows)
{
    const int64_t B = s->config->train.batch_size;
    return (windows + B - 1) / B;
}

/* Has what a pass over so many windows leaves in s->errors brought to the host, which then waits for the pass. */
static enum ps_status fetch_errors(struct ps_session *s, int64_t windows)
{
    return s->device->download_async(s->device, PS_COMPUTE, s->host_errors, s->errors,
                                     (size_t)slots_of(s, windows) * PS_ERRORS * sizeof *s->host_errors);
}

/* Of the errors of a pass over `count` windows. */
static enum ps_status read_accuracy(struct ps_session *s, enum ps_split split, int64_t count, struct ps_accuracy *accuracy)
{
    int64_t B = s->config->train.batch_size;
    int64_t slots = slots_of(s, count), full = count / B;
    PS_TRY(ps_ranks_sum(s->ranks, s->host_errors, PS_F64, slots * PS_ERRORS));
    double sums[PS_ERRORS] = {0};
    accuracy->full_batches = score_of(sums, 0);
    for (int64_t i = 0; i < slots; i++) {
        for (int j = 0; j < PS_ERRORS; j++) {
            sums[j] += s->host_errors[PS_ERRORS * i + j];
        }
        if (i + 1 == full && sums[PS_ERROR_OBSERVED] > 0) {
            accuracy->full_batches = score_of(sums, full * B);
        }
    }
    accuracy->all = score_of(sums, count);
    if (count > 0 && sums[PS_ERROR_OBSERVED] == 0) {
        return ps_fail(PS_DATA, "%s: the %s part has no target that is observed behind an input that is: there is nothing to score",
                       s->series->path, ps_split_name(split));
    }
    return PS_OK;
}

enum ps_status ps_session_score(struct ps_session *s, enum ps_split split, struct ps_accuracy *accuracy)
{
    int64_t count = s->splits.count[split];
    const struct ps_step_state start = {0};
    const struct ps_order order = ps_session_order(s, split);
    PS_TRY(write_state(s, s->scoring_state, &start));
    PS_TRY(ps_session_spread_statistics(s));
    if (s->ranks) { /* a share may have no windows */
        PS_TRY(s->device->fill_zero(s->device, PS_COMPUTE, s->errors, (size_t)s->slots * PS_ERRORS * sizeof *s->errors));
    }
    struct pass pass;
    enum ps_status status = pass_open(s, &order, 0, count, &pass);
    for (int64_t done = 1; status == PS_OK && done > 0 && !ps_session_stopped(s);) {
        status = pass_step(&pass, INT64_MAX, &done);
    }
    if (split == PS_VALIDATION && s->best && s->epoch < (uint64_t)s->config->train.epochs) { /* while the device scores */
        const struct ps_order next = training_order(s);
        ps_feed_prepare(s->feed, &next);
    }
    status = status == PS_OK ? fetch_errors(s, count) : status;
    PS_TRY(pass_close(&pass, status));
    if (pass.position < pass.end) {
        *accuracy = (struct ps_accuracy){0};
        return PS_OK;
    }
    return read_accuracy(s, split, count, accuracy);
}

enum ps_status ps_session_naive(struct ps_session *s, enum ps_split split, struct ps_naive *naive)
{
    const struct ps_order order = ps_session_order(s, split);
    const int64_t season = s->config->data.season;
    if (s->groups) {
        return ps_groups_naive(s->groups, &order, season, naive);
    }
    if (s->splits.runs[split].n == 0) {
        *naive = ps_naive_score(&s->view, order.first, order.count, season);
        return PS_OK;
    }
    enum { PART = 1 << 18 }; /* windows */
    int32_t *index = malloc(PART * sizeof *index);
    if (!index) {
        return ps_fail(PS_DATA, "no memory for the windows of the naive forecasts");
    }
    struct ps_naive_sums sums = {.count = order.count, .season = season};
    for (int64_t begin = 0, n; begin < order.count; begin += n) {
        n = order.count - begin < PART ? order.count - begin : PART;
        ps_order_windows(&order, begin, n, index);
        ps_naive_add(&sums, &s->view, begin, n, index);
    }
    *naive = ps_naive_end(&sums, &s->view);
    free(index);
    return PS_OK;
}

/* Room of a batch on the host, and where in it things lie: quantiles [B, C, Q, H], points and targets [B, C, H], inputs [B, C, L].
 */
struct room {
    float *quantiles, *points, *targets, *inputs;
};

static enum ps_status room_open(const struct ps_session *s, struct room *room)
{
    const int64_t B = s->config->train.batch_size, rows = B * s->view.channels, H = s->view.pred_len;
    const int64_t width = ps_head_width(&s->model->shape);
    room->quantiles = malloc((size_t)(rows * (width + 2 * H + s->view.seq_len)) * sizeof(float));
    if (!room->quantiles) {
        return ps_fail(PS_DEVICE, "no memory for the forecasts of %lld windows", (long long)B);
    }
    room->points = room->quantiles + rows * width;
    room->targets = room->points + rows * H;
    room->inputs = room->targets + rows * H;
    return PS_OK;
}

/* The forecasts of the batch that the pass has just enqueued, with its windows, to the sink. */
static enum ps_status forecast_batch(const struct pass *pass, int64_t first, int64_t n, const struct room *room,
                                     ps_forecast_sink *sink, void *argument)
{
    struct ps_session *s = pass->session;
    const struct ps_loss *loss = &s->model->options.loss;
    const int64_t rows = n * s->view.channels, H = s->view.pred_len, Q = ps_loss_outputs(loss);
    /* The errors are known: the head's output becomes the forecasts. */
    struct ps_tensor y = ps_tensor_2d(s->model->cache.shared.head_out, s->kernels->parameter, rows, Q * H);
    PS_TRY(ps_model_forecast(s->model, n, y));
    PS_TRY(s->device->download(s->device, PS_COMPUTE, room->quantiles, y.data, (size_t)(rows * Q * H) * sizeof(float)));
    ps_model_points(loss, rows, H, room->quantiles, room->points);
    const float *inputs = room->inputs, *targets = room->targets;
    if (ps_feed_resident(s->feed)) {
        ps_windows_gather(&s->view, ps_feed_order(s->feed) + first, n, room->inputs, room->targets);
    } else {
        ps_feed_batch(s->feed, &inputs, &targets);
    }
    return sink(argument, first, n, inputs, targets, room->points, room->quantiles);
}

enum ps_status ps_session_forecast(struct ps_session *s, enum ps_split split, ps_forecast_sink *sink, void *argument)
{
    const int64_t count = s->splits.count[split];
    struct room room = {0};
    PS_TRY(room_open(s, &room));
    const struct ps_step_state start = {0};
    const struct ps_order order = ps_session_order(s, split);
    enum ps_status status = write_state(s, s->scoring_state, &start);
    struct pass pass = {0};
    if (status == PS_OK) {
        status = pass_open(s, &order, 0, count, &pass);
    }
    for (int64_t done = 1; status == PS_OK && done > 0;) {
        int64_t first = pass.position;
        status = pass_step(&pass, 1, &done);
        int64_t n = pass.position - first;
        if (status == PS_OK && n > 0) {
            status = forecast_batch(&pass, first, n, &room, sink, argument);
        }
    }
    status = status == PS_OK ? fetch_errors(s, count) : status;
    if (pass.session) {
        status = pass_close(&pass, status);
    }
    free(room.quantiles);
    return status;
}

enum ps_status ps_session_score_and_forecast(struct ps_session *s, enum ps_split split, ps_forecast_sink *sink, void *argument,
                                             struct ps_accuracy *accuracy)
{
    PS_TRY(ps_session_forecast(s, split, sink, argument)); /* each of its passes ends with the batch's errors */
    return read_accuracy(s, split, s->splits.count[split], accuracy);
}
