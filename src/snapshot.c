#include "src/snapshot.h"

#include <stdlib.h>
#include <string.h>

#include "src/clock.h"
#include "src/together.h"
#include "src/version.h"

enum ps_status ps_snapshot_open(struct ps_session *s, int best_weights, struct ps_snapshot *snapshot)
{
    struct ps_device *device = s->device;
    size_t count = (size_t)s->model->layout->count, stored = (size_t)s->model->layout->stored;
    *snapshot = (struct ps_snapshot){.session = s, .best_weights = best_weights};
    struct ps_checkpoint *c = &snapshot->checkpoint;
    static double no_mean = 0, no_std = 1;
    const int by_series = s->scaler.panel != NULL;
    const size_t ranks = (size_t)ps_ranks_size(s->ranks);
    *c = (struct ps_checkpoint){.layout = s->model->layout,
                                .scaler =
                                    by_series ? (struct ps_scaler){.channels = 1, .mean = &no_mean, .std = &no_std} : s->scaler,
                                .by_series = (uint64_t)by_series,
                                .seed = s->config->train.seed,
                                .fingerprint = s->series->fingerprint,
                                .level = (char *)ps_level_name(s->level),
                                .algorithms = s->algorithms,
                                .versions = s->versions,
                                .program_version = (char *)ps_version,
                                .kernel_sources = (char *)ps_kernel_sources,
                                .kernels = (char *)ps_model_kernels(s->model),
                                .init_from = s->init_from};
    enum ps_status status = ps_config_text(s->config, &c->config);
    if (status == PS_OK) {
        status = ps_series_names(s->series, &c->names, &c->names_bytes);
    }
    if (status == PS_OK && ranks > 1 && !best_weights) {
        c->ranks = ranks;
        status = ps_checkpoint_room(c);
    }
    if (status == PS_OK) { /* of 8 bytes first; one allocation, since each takes long */
        const size_t moments = best_weights ? 0 : count;
        status = device->allocate_host(
            device, ranks * sizeof *snapshot->state + moments * (sizeof *c->v + sizeof *c->m) + stored * sizeof *c->parameters,
            (void **)&snapshot->state);
        if (status == PS_OK) {
            double *const v = (double *)(snapshot->state + ranks);
            float *const m = (float *)(v + moments);
            c->v = best_weights ? NULL : v;
            c->m = best_weights ? NULL : m;
            c->parameters = m + moments;
        }
    }
    if (status == PS_OK) {
        status = device->event_create(device, &snapshot->copied);
    }
    if (status != PS_OK) {
        ps_snapshot_close(snapshot);
    }
    return status;
}

void ps_snapshot_close(struct ps_snapshot *snapshot)
{
    struct ps_device *device = snapshot->session ? snapshot->session->device : NULL;
    if (snapshot->state) {
        device->release_host(device, snapshot->state);
    }
    if (snapshot->copied) {
        device->event_destroy(device, snapshot->copied);
    }
    free(snapshot->checkpoint.rank_losses);
    free(snapshot->checkpoint.rank_lost);
    free(snapshot->checkpoint.rank_unobserved);
    free(snapshot->checkpoint.config);
    free(snapshot->checkpoint.names);
    memset(snapshot, 0, sizeof *snapshot);
}

enum ps_status ps_snapshot_take(struct ps_snapshot *snapshot)
{
    const struct ps_session *s = snapshot->session;
    struct ps_device *device = s->device;
    struct ps_checkpoint *c = &snapshot->checkpoint;
    size_t count = (size_t)s->model->layout->count, stored = (size_t)s->model->layout->stored;
    c->epoch = snapshot->best_weights ? s->best_holds : s->epoch;
    c->best_validation = s->best_validation;
    c->best_epoch = s->best_epoch;
    c->epochs_since_best = s->epochs_since_best;
    PS_TRY(device->download_async(device, PS_COMPUTE, snapshot->state, s->ranks ? s->states : s->state,
                                  (size_t)ps_ranks_size(s->ranks) * sizeof *snapshot->state));
    PS_TRY(device->download_async(device, PS_COMPUTE, c->parameters, snapshot->best_weights ? s->best : s->model->parameters,
                                  stored * sizeof *c->parameters));
    if (!snapshot->best_weights) {
        PS_TRY(device->download_async(device, PS_COMPUTE, c->m, s->optimizer.m, count * sizeof *c->m));
        PS_TRY(device->download_async(device, PS_COMPUTE, c->v, s->optimizer.v, count * sizeof *c->v));
    }
    return device->event_record(device, PS_COMPUTE, snapshot->copied);
}

enum ps_status ps_snapshot_wait(struct ps_snapshot *snapshot)
{
    const struct ps_session *s = snapshot->session;
    struct ps_checkpoint *c = &snapshot->checkpoint;
    for (int happened = 0;;) {
        PS_TRY(s->device->event_query(s->device, snapshot->copied, &happened));
        if (happened) {
            break;
        }
        ps_nap();
    }
    if (snapshot->best_weights) { /* of the moment when they were the present ones, whenever they are written */
        c->step = c->epoch * (uint64_t)s->steps_per_epoch;
        c->epochs_since_best = 0;
    } else {
        const struct ps_step_state joined = ps_states_joined(snapshot->state, ps_ranks_size(s->ranks));
        c->step = joined.step;
        c->cursor = joined.cursor;
        c->loss_sum = joined.loss_sum;
        c->lost = joined.lost;
        c->skipped = joined.skipped;
        c->unobserved = joined.unobserved;
        for (uint64_t r = 0; r < c->ranks; r++) {
            c->rank_losses[r] = snapshot->state[r].loss_sum;
            c->rank_lost[r] = snapshot->state[r].lost;
            c->rank_unobserved[r] = snapshot->state[r].unobserved;
        }
    }
    return PS_OK;
}
