/* AdamW over the flat buffers of a model, with global-norm clipping; every number it needs during a step lives on the device. */
#ifndef PS_OPTIM_OPTIMIZER_H
#define PS_OPTIM_OPTIMIZER_H

#include "kernels/kernels.h"

struct ps_optimizer_options {
    double beta1, beta2, epsilon, weight_decay;
    double clip_norm;      /* 0: off */
    double gradient_scale; /* what the next step's gradients are multiplied by: ps_model.gradient_scale; 0: 1 */
    uint64_t held;         /* steps in which nothing changes but `trained`, see ps_adamw; 0: none */
    struct ps_range trained[2];
    int skip_nonfinite; /* leave out a step whose gradient is not finite, instead of every step from there on */
};

struct ps_optimizer {
    const struct ps_kernels *k; /* borrowed */
    struct ps_optimizer_options options;
    int64_t count, decayed; /* elements; those before `decayed` are decayed */
    int64_t steps;          /* of the learning-rate table */
    void *m;                /* device [count] k->parameter */
    double *v;              /* device [count] */
    double *learning_rates; /* device [steps] */
};

/* Moments start at zero. rates: host, [steps]. */
enum ps_status ps_optimizer_open(const struct ps_kernels *k, int64_t count, int64_t decayed,
                                 const struct ps_optimizer_options *options, const double *rates, int64_t steps,
                                 struct ps_optimizer *optimizer);
void ps_optimizer_close(struct ps_optimizer *optimizer); /* zeroed structs are fine */

/* AdamW of a step, for a model that does it in its own backward; the arguments as below. */
struct ps_adamw ps_optimizer_adamw(const struct ps_optimizer *optimizer, void *parameters, void *weights, void *gradients,
                                   struct ps_step_state *state, int64_t windows);
/* Whether the whole gradient has to be there before any parameter changes: for clipping, and for leaving out a step. */
int ps_optimizer_looks_first(const struct ps_optimizer *optimizer);
/* Clip, AdamW, zero the gradient, then advance state by one step and `windows` windows. parameters, gradients: device [count]
 * k->parameter; weights: device [count] k->real, their rounded copy, or the parameters themselves. */
enum ps_status ps_optimizer_step(const struct ps_optimizer *optimizer, void *parameters, void *weights, void *gradients,
                                 struct ps_step_state *state, int64_t windows);

#endif
