#include "optim/optimizer.h"

#include <string.h>

enum ps_status ps_optimizer_open(const struct ps_kernels *k, int64_t count, int64_t decayed,
                                 const struct ps_optimizer_options *options, const double *rates, int64_t steps,
                                 struct ps_optimizer *o)
{
    *o = (struct ps_optimizer){.k = k, .options = *options, .count = count, .decayed = decayed, .steps = steps};
    struct ps_device *device = k->device;
    size_t elements = (size_t)count, rate_bytes = (size_t)steps * sizeof *rates;
    enum ps_status status = device->allocate(device, elements * ps_type_bytes(k->parameter), &o->m);
    if (status == PS_OK) {
        status = device->allocate(device, elements * sizeof *o->v, (void **)&o->v);
    }
    if (status == PS_OK) {
        status = device->allocate(device, rate_bytes, (void **)&o->learning_rates);
    }
    if (status == PS_OK) {
        status = device->upload(device, PS_COMPUTE, o->learning_rates, rates, rate_bytes);
    }
    if (status == PS_OK) {
        status = device->synchronize(device); /* rates is the caller's */
    }
    if (status != PS_OK) {
        ps_optimizer_close(o);
    }
    return status;
}

void ps_optimizer_close(struct ps_optimizer *o)
{
    if (o->k) {
        struct ps_device *device = o->k->device;
        size_t elements = (size_t)o->count;
        if (o->m) {
            device->release(device, o->m, elements * ps_type_bytes(o->k->parameter));
        }
        if (o->v) {
            device->release(device, o->v, elements * sizeof *o->v);
        }
        if (o->learning_rates) {
            device->release(device, o->learning_rates, (size_t)o->steps * sizeof *o->learning_rates);
        }
    }
    memset(o, 0, sizeof *o);
}

struct ps_adamw ps_optimizer_adamw(const struct ps_optimizer *o, void *parameters, void *weights, void *gradients,
                                   struct ps_step_state *state, int64_t windows)
{
    const struct ps_kernels *k = o->k;
    enum ps_type type = k->parameter;
    void *copy = weights == parameters ? NULL : weights;
    return (struct ps_adamw){.parameters = ps_tensor_1d(parameters, type, o->count),
                             .gradients = ps_tensor_1d(gradients, type, o->count),
                             .m = ps_tensor_1d(o->m, type, o->count),
                             .v = ps_tensor_1d(o->v, PS_F64, o->count),
                             .learning_rates = ps_tensor_1d(o->learning_rates, PS_F64, o->steps),
                             .copy = ps_tensor_1d(copy, k->real, o->count),
                             .decayed = o->decayed,
                             .beta1 = o->options.beta1,
                             .beta2 = o->options.beta2,
                             .epsilon = o->options.epsilon,
                             .weight_decay = o->options.weight_decay,
                             .clip_norm = o->options.clip_norm,
                             .gradient_scale = o->options.gradient_scale,
                             .skip = o->options.skip_nonfinite,
                             .state = state,
                             .windows = (uint64_t)windows,
                             .held = o->options.held,
                             .trained = {o->options.trained[0], o->options.trained[1]}};
}

int ps_optimizer_looks_first(const struct ps_optimizer *o)
{
    return o->options.clip_norm > 0 || o->options.skip_nonfinite;
}

enum ps_status ps_optimizer_step(const struct ps_optimizer *o, void *parameters, void *weights, void *gradients,
                                 struct ps_step_state *state, int64_t windows)
{
    const struct ps_adamw adamw = ps_optimizer_adamw(o, parameters, weights, gradients, state, windows);
    if (ps_optimizer_looks_first(o)) {
        PS_TRY(o->k->sum_squares(o->k, &(struct ps_sum_squares){.x = adamw.gradients, .state = state}));
    }
    return o->k->adamw(o->k, &adamw);
}
