#include "src/together.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "src/version.h"

static int size_of(const struct ps_session *s)
{
    return ps_ranks_size(s->ranks);
}

enum ps_status ps_ranks_load_config(struct ps_ranks *ranks, const char *path, char *const *overrides, int n_overrides,
                                    struct ps_config *config)
{
    char *text = NULL, program[256];
    PS_TRY(ps_ranks_check(ranks, ps_config_load(path, overrides, n_overrides, config)));
    snprintf(program, sizeof program, "%s, kernel sources %s", ps_version, ps_kernel_sources);
    enum ps_status status = ps_ranks_same(ranks, "program's version", program);
    if (status == PS_OK) {
        status = ps_ranks_check(ranks, ps_config_text(config, &text));
    }
    if (status == PS_OK) {
        status = ps_ranks_same(ranks, "config", text);
    }
    free(text);
    if (status != PS_OK) {
        ps_config_free(config);
    }
    return status;
}

int64_t ps_session_part(struct ps_session *s, int64_t first, int64_t step, struct ps_windows *windows)
{
    const int64_t batch = s->config->train.batch_size, left = step - first;
    const int rank = ps_ranks_rank(s->ranks);
    struct ps_batch_place place = {.whole = step,
                                   .further = left <= batch ? step : 0,
                                   .shares = {.windows = left < batch ? left : batch, .granule = s->granule, .ranks = size_of(s)},
                                   .sum = left <= batch ? s->exchange : NULL};
    place.first = first + ps_share_begin(&place.shares, rank);
    ps_model_place(s->model, &place);
    *windows = *ps_feed_windows(s->feed);
    windows->indices = ps_tensor_slice(windows->indices, 0, place.first, windows->indices.size[0] - place.first);
    return ps_share_count(&place.shares, rank);
}

int ps_session_stopped(const struct ps_session *s)
{
    return s->ranks ? s->stopping : s->stop ? *s->stop : 0;
}

enum ps_status ps_session_agree(struct ps_session *s, enum ps_status mine, uint64_t *nonfinite)
{
    if (!s->ranks) {
        return mine;
    }
    struct word {
        int32_t status, stop;
        uint64_t nonfinite;
    } word = {(int32_t)mine, s->stop ? *s->stop : 0, *nonfinite}, *all = malloc((size_t)size_of(s) * sizeof *all);
    if (!all) {
        return ps_fail(PS_DEVICE, "no memory for the words of %d ranks", size_of(s));
    }
    enum ps_status status = ps_ranks_gather(s->ranks, &word, sizeof word, all);
    int failures = 0;
    for (int r = 0; r < size_of(s) && status == PS_OK; r++) {
        failures += all[r].status != PS_OK;
        s->stopping = all[r].stop > s->stopping ? all[r].stop : s->stopping;
        *nonfinite = all[r].nonfinite > *nonfinite ? all[r].nonfinite : *nonfinite;
    }
    free(all);
    PS_TRY(status);
    return failures ? ps_ranks_check(s->ranks, mine) : PS_OK;
}

/* Device memory that every rank shall have as rank 0 has it. */
static enum ps_status spread(struct ps_session *s, void *memory, size_t bytes)
{
    char *host = malloc(bytes);
    enum ps_status status = host ? PS_OK : ps_fail(PS_DEVICE, "no memory for %zu bytes of rank 0", bytes);
    if (status == PS_OK && ps_ranks_rank(s->ranks) == 0) {
        status = s->device->download(s->device, PS_COMPUTE, host, memory, bytes);
    }
    if (status == PS_OK) {
        status = ps_ranks_broadcast(s->ranks, host, bytes);
    }
    if (status == PS_OK && ps_ranks_rank(s->ranks) > 0) {
        status = s->device->upload(s->device, PS_COMPUTE, memory, host, bytes);
    }
    s->device->synchronize(s->device);
    free(host);
    return status;
}

enum ps_status ps_session_spread(struct ps_session *s)
{
    if (!s->ranks) {
        return PS_OK;
    }
    const struct ps_parameters *layout = s->model->layout;
    const size_t count = (size_t)layout->count, stored = (size_t)layout->stored * ps_type_bytes(s->kernels->parameter);
    struct place {
        struct ps_step_state now;
        double best_validation;
        uint64_t epoch, best_epoch, epochs_since_best, best_holds, losses;
    } place = {s->now, s->best_validation, s->epoch, s->best_epoch, s->epochs_since_best, s->best_holds, s->resumed != NULL};
    PS_TRY(ps_ranks_broadcast(s->ranks, &place, sizeof place));
    PS_TRY(spread(s, s->model->parameters, stored));
    PS_TRY(spread(s, s->optimizer.m, count * ps_type_bytes(s->kernels->parameter)));
    PS_TRY(spread(s, s->optimizer.v, count * sizeof *s->optimizer.v));
    PS_TRY(spread(s, s->best, stored));
    /* Each rank's own losses, where as many have left them; else rank 0 has all. */
    struct ps_step_state *states = calloc((size_t)size_of(s), sizeof *states);
    if (!states) {
        return ps_fail(PS_DEVICE, "no memory for the states of %d ranks", size_of(s));
    }
    states[0] = place.now;
    if (s->resumed) {
        memcpy(states, s->resumed, (size_t)size_of(s) * sizeof *states);
    }
    enum ps_status status = ps_ranks_broadcast(s->ranks, states, (size_t)size_of(s) * sizeof *states);
    s->now = place.now;
    s->now.loss_sum = states[ps_ranks_rank(s->ranks)].loss_sum;
    s->now.lost = states[ps_ranks_rank(s->ranks)].lost;
    s->now.unobserved = states[ps_ranks_rank(s->ranks)].unobserved;
    free(states);
    PS_TRY(status);
    s->best_validation = place.best_validation;
    s->epoch = place.epoch;
    s->best_epoch = place.best_epoch;
    s->epochs_since_best = place.epochs_since_best;
    s->best_holds = place.best_holds;
    PS_TRY(s->device->upload(s->device, PS_COMPUTE, s->state, &s->now, sizeof s->now));
    PS_TRY(ps_model_refresh_weights(s->model));
    return s->device->synchronize(s->device);
}

enum ps_status ps_session_spread_statistics(struct ps_session *s)
{
    const struct ps_parameters *layout = s->model->layout;
    const size_t element = ps_type_bytes(s->kernels->parameter), begin = (size_t)layout->count * element;
    return s->ranks && s->config->model.batchnorm == PS_BATCHNORM_LOCAL
               ? spread(s, (char *)s->model->parameters + begin, (size_t)layout->stored * element - begin)
               : PS_OK;
}

enum ps_status ps_session_gather_states(struct ps_session *s)
{
    return s->exchange ? s->exchange->gather(s->exchange, s->states, s->state, sizeof *s->state) : PS_OK;
}

struct ps_step_state ps_states_joined(const struct ps_step_state *states, int ranks)
{
    struct ps_step_state joined = states[0];
    for (int r = 1; r < ranks; r++) {
        joined.loss_sum += states[r].loss_sum;
        joined.lost += states[r].lost;
        joined.unobserved += states[r].unobserved;
    }
    return joined;
}

enum ps_status ps_session_join_state(struct ps_session *s, struct ps_step_state *joined)
{
    struct ps_step_state *all = malloc((size_t)size_of(s) * sizeof *all);
    if (!all) {
        return ps_fail(PS_DEVICE, "no memory for the states of %d ranks", size_of(s));
    }
    enum ps_status status = ps_ranks_gather(s->ranks, &s->now, sizeof s->now, all);
    if (status == PS_OK) {
        *joined = ps_states_joined(all, size_of(s));
    }
    free(all);
    return status;
}

enum ps_status ps_session_check_data(struct ps_session *s)
{
    char data[64];
    snprintf(data, sizeof data, "%016" PRIx64, s->series->fingerprint);
    return ps_ranks_same(s->ranks, "data file's fingerprint", data);
}

/* Several steps a graph where every rank has them: data that streams on one has single ones. */
static enum ps_status agree_on_graphs(struct ps_session *s)
{
    int64_t *all = malloc((size_t)size_of(s) * sizeof *all);
    if (!all) {
        return ps_fail(PS_DEVICE, "no memory for the graphs of %d ranks", size_of(s));
    }
    enum ps_status status = ps_ranks_gather(s->ranks, &s->graph_steps, sizeof s->graph_steps, all);
    for (int r = 0; r < size_of(s) && status == PS_OK; r++) {
        s->graph_steps = all[r] < s->graph_steps ? all[r] : s->graph_steps;
    }
    free(all);
    return status;
}

enum ps_status ps_session_check_same(struct ps_session *s)
{
    if (!s->ranks) {
        return PS_OK;
    }
    PS_TRY(agree_on_graphs(s));
    PS_TRY(ps_ranks_same(s->ranks, "level of fusion", ps_level_name(s->level)));
    PS_TRY(ps_ranks_same(s->ranks, "rule for products", s->algorithms));
    return ps_ranks_same(s->ranks, "device and versions", s->versions);
}
