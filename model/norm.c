/* Norms at level gemm: which operation a layer's norm is, in one place for each direction. */
#include "model/layer.h"

struct ps_layer_norm ps_layer_norm_of(const struct ps_layer *l, enum ps_norm_number number)
{
    const struct ps_layer_cache *c = l->cache;
    int first = number == PS_NORM_1, gamma = first ? PS_NORM1_GAMMA : PS_NORM2_GAMMA, beta = first ? PS_NORM1_BETA : PS_NORM2_BETA;
    const int64_t size = l->norm == PS_NORM_BATCH ? l->d : l->R;
    return (struct ps_layer_norm){
        .gamma = l->weight[gamma],
        .beta = l->weight[beta],
        .d_gamma = l->gradient[gamma],
        .d_beta = l->gradient[beta],
        .mean = ps_tensor_1d(first ? c->norm1_mean : c->norm2_mean, l->k->statistics, size),
        .spread = ps_tensor_1d(first ? c->norm1_spread : c->norm2_spread, l->k->statistics, size),
        .running_mean = l->statistics[first ? PS_RUNNING_MEAN_1 : PS_RUNNING_MEAN_2],
        .running_var = l->statistics[first ? PS_RUNNING_VAR_1 : PS_RUNNING_VAR_2],
        .x = first && l->norm_place == PS_NORM_PRE   ? l->u
             : first || l->norm_place == PS_NORM_PRE ? ps_layer_rows(l, c->residual, l->d)
                                                     : ps_layer_rows(l, c->sum, l->d),
        .xhat = first ? c->norm1_xhat : c->norm2_xhat,
    };
}

struct ps_tensor ps_layer_norm_means(const struct ps_layer *l)
{
    return ps_tensor_2d(l->shared->norm_means, l->k->statistics, 2, l->d);
}

enum ps_status ps_norm_forward(const struct ps_layer *l, enum ps_norm_number number, struct ps_tensor y, struct ps_tensor x,
                               int known)
{
    const struct ps_kernels *k = l->k;
    const struct ps_layer_norm n = ps_layer_norm_of(l, number);
    if (l->norm != PS_NORM_BATCH) {
        return k->layernorm(
            k, &(struct ps_layernorm){
                   .y = y, .mean = n.mean, .rstd = n.spread, .x = x, .gamma = n.gamma, .beta = n.beta, .epsilon = PS_NORM_EPSILON});
    }
    if (l->training && !known) {
        PS_TRY(k->batchnorm_statistics(k, &(struct ps_batchnorm_statistics){.mean = n.mean,
                                                                            .var = n.spread,
                                                                            .running_mean = n.running_mean,
                                                                            .running_var = n.running_var,
                                                                            .x = x,
                                                                            .momentum = PS_BATCHNORM_MOMENTUM}));
    }
    return k->batchnorm(k, &(struct ps_batchnorm){.y = y,
                                                  .x = x,
                                                  .mean = l->training ? n.mean : n.running_mean,
                                                  .var = l->training ? n.spread : n.running_var,
                                                  .gamma = n.gamma,
                                                  .beta = n.beta,
                                                  .epsilon = PS_NORM_EPSILON});
}

/* dx = norm'(dy + more) + addend, more and addend where there are any; more of BatchNorm alone, which also reads the means that
 * notes tell of and masks dx by `next`. */
static enum ps_status backward(const struct ps_layer *l, enum ps_norm_number number, struct ps_tensor dx, struct ps_tensor dy,
                               struct ps_tensor more, struct ps_tensor addend, struct ps_dropout next)
{
    const struct ps_kernels *k = l->k;
    const struct ps_layer_norm n = ps_layer_norm_of(l, number);
    struct ps_tensor means = {.data = NULL}, masked = {.data = NULL};
    if (l->norm == PS_NORM_BATCH) {
        if (l->notes->means) {
            means = ps_layer_norm_means(l);
        }
        if (l->epilogue && next.threshold) {
            masked = ps_layer_rows(l, l->shared->masked, l->d);
        }
        *l->notes = (struct ps_gradient_notes){.masked = masked.data != NULL};
        return k->batchnorm_backward(k, &(struct ps_batchnorm_backward){.dx = dx,
                                                                        .dgamma = n.d_gamma,
                                                                        .dbeta = n.d_beta,
                                                                        .masked = masked,
                                                                        .dy = dy,
                                                                        .more = more,
                                                                        .x = n.x,
                                                                        .mean = n.mean,
                                                                        .var = n.spread,
                                                                        .gamma = n.gamma,
                                                                        .addend = addend,
                                                                        .means = means,
                                                                        .dropout = next,
                                                                        .epsilon = PS_NORM_EPSILON});
    }
    return k->layernorm_backward(k, &(struct ps_layernorm_backward){.dx = dx,
                                                                    .dgamma = n.d_gamma,
                                                                    .dbeta = n.d_beta,
                                                                    .dy = dy,
                                                                    .x = n.x,
                                                                    .mean = n.mean,
                                                                    .rstd = n.spread,
                                                                    .gamma = n.gamma,
                                                                    .addend = addend});
}

static const struct ps_tensor none = {.data = NULL};

enum ps_status ps_norm_join_pre(const struct ps_layer *l, enum ps_norm_number number, struct ps_tensor gradient,
                                struct ps_tensor branch, struct ps_dropout next)
{
    if (l->epilogue) {
        return backward(l, number, gradient, branch, none, gradient, next);
    }
    PS_TRY(backward(l, number, branch, branch, none, none, next));
    return l->k->add(l->k, &(struct ps_add){.y = gradient, .a = gradient, .b = branch});
}

enum ps_status ps_norm_join_post(const struct ps_layer *l, enum ps_norm_number number, struct ps_tensor gradient,
                                 struct ps_tensor branch, struct ps_dropout next)
{
    if (branch.data && l->epilogue && l->norm == PS_NORM_BATCH) {
        return backward(l, number, gradient, gradient, branch, none, next);
    }
    if (branch.data) {
        PS_TRY(l->k->add(l->k, &(struct ps_add){.y = gradient, .a = gradient, .b = branch}));
    }
    return backward(l, number, gradient, gradient, none, none, next);
}
