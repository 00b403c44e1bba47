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
        .y = first                          ? ps_layer_rows(l, c->norm1_out, l->d)
             : l->norm_place == PS_NORM_PRE ? ps_layer_rows(l, c->norm2_out, l->d)
                                            : l->y,
        .xhat = first ? c->norm1_xhat : c->norm2_xhat,
    };
}

struct ps_tensor ps_layer_norm_means(const struct ps_layer *l)
{
    return ps_tensor_2d(l->shared->norm_means, l->k->statistics, 2, l->d);
}

int ps_norm_is_shared(const struct ps_layer *l)
{
    return l->together.exchange && l->norm == PS_NORM_BATCH;
}

struct ps_tensor ps_layer_half(struct ps_tensor both, int which)
{
    return ps_tensor_reshape(ps_tensor_slice(both, 0, which, 1), 1, &both.size[1]);
}

struct ps_layer_norm ps_norm_mine(const struct ps_layer *l, const struct ps_layer_norm *n)
{
    struct ps_layer_norm mine = *n;
    mine.momentum = PS_BATCHNORM_MOMENTUM;
    if (ps_norm_is_shared(l)) {
        mine.mean = ps_layer_half(l->together.mine, 0);
        mine.spread = ps_layer_half(l->together.mine, 1);
        mine.momentum = 0;
    }
    return mine;
}

enum ps_status ps_norm_join(const struct ps_layer *l, const struct ps_layer_norm *n)
{
    if (!ps_norm_is_shared(l)) {
        return PS_OK;
    }
    const struct ps_together *t = &l->together;
    const size_t bytes = (size_t)ps_tensor_count(&t->mine) * ps_type_bytes(t->mine.type);
    PS_TRY(t->exchange->gather(t->exchange, t->parts.data, t->mine.data, bytes));
    return l->k->batchnorm_join(l->k, &(struct ps_batchnorm_join){.mean = n->mean,
                                                                  .var = n->spread,
                                                                  .running_mean = n->running_mean,
                                                                  .running_var = n->running_var,
                                                                  .parts = t->parts,
                                                                  .shares = t->shares,
                                                                  .rows = t->rows,
                                                                  .momentum = PS_BATCHNORM_MOMENTUM});
}

enum ps_status ps_norm_statistics(const struct ps_layer *l, const struct ps_layer_norm *n, struct ps_tensor x)
{
    const struct ps_layer_norm mine = ps_norm_mine(l, n);
    PS_TRY(l->k->batchnorm_statistics(l->k, &(struct ps_batchnorm_statistics){.mean = mine.mean,
                                                                              .var = mine.spread,
                                                                              .running_mean = mine.running_mean,
                                                                              .running_var = mine.running_var,
                                                                              .x = x,
                                                                              .momentum = mine.momentum}));
    return ps_norm_join(l, n);
}

enum ps_status ps_norm_attend(const struct ps_layer *l, enum ps_norm_number number)
{
    const struct ps_layer_norm n = ps_layer_norm_of(l, number);
    return ps_norm_join(l, &n);
}

/* means, which hold this rank's part, become those of all rows. */
static enum ps_status sum_means(const struct ps_layer *l)
{
    const struct ps_tensor means = ps_layer_norm_means(l);
    return l->together.exchange->sum(l->together.exchange, means.data, means.type, ps_tensor_count(&means));
}

enum ps_status ps_norm_attend_backward(const struct ps_layer *l)
{
    const struct ps_tensor means = ps_layer_norm_means(l);
    PS_TRY(
        l->k->device->fill_zero(l->k->device, PS_COMPUTE, means.data, (size_t)ps_tensor_count(&means) * ps_type_bytes(means.type)));
    return sum_means(l);
}

void *ps_layer_masked_o(const struct ps_layer *l)
{
    return l->shared->masked_o ? l->shared->masked_o : l->shared->masked;
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
        PS_TRY(ps_norm_statistics(l, &n, x));
    }
    return k->batchnorm(k, &(struct ps_batchnorm){.y = y,
                                                  .x = x,
                                                  .mean = l->training ? n.mean : n.running_mean,
                                                  .var = l->training ? n.spread : n.running_var,
                                                  .gamma = n.gamma,
                                                  .beta = n.beta,
                                                  .epsilon = PS_NORM_EPSILON});
}

/* Whether the branch whose end the norm's backward comes to next ends with W_o; else with W_2. */
static int before_w_o(const struct ps_layer *l, enum ps_norm_number number)
{
    return (l->norm_place == PS_NORM_POST) == (number == PS_NORM_1);
}

/* Where dx is masked by `next` for the branch that is next; absent where nobody wants it. */
static struct ps_tensor masked_of(const struct ps_layer *l, enum ps_norm_number number, struct ps_dropout next)
{
    const int of_w_o = before_w_o(l, number), by_row = l->norm != PS_NORM_BATCH;
    if (!l->epilogue || !next.threshold || (l->feed_forward && (by_row || !of_w_o))) { /* a feed-forward in one masks its own */
        return (struct ps_tensor){.data = NULL};
    }
    return ps_layer_rows(l, of_w_o ? ps_layer_masked_o(l) : l->shared->masked, l->d);
}

struct ps_layernorm_backward ps_norm_backward_of(const struct ps_layer *l, enum ps_norm_number number, struct ps_tensor dx,
                                                 struct ps_tensor dy, struct ps_tensor addend, struct ps_dropout next)
{
    const struct ps_layer_norm n = ps_layer_norm_of(l, number);
    return (struct ps_layernorm_backward){.dx = dx,
                                          .dgamma = n.d_gamma,
                                          .dbeta = n.d_beta,
                                          .dy = dy,
                                          .x = n.x,
                                          .mean = n.mean,
                                          .rstd = n.spread,
                                          .gamma = n.gamma,
                                          .addend = addend,
                                          .masked = masked_of(l, number, next),
                                          .dbias = before_w_o(l, number)           ? l->gradient[PS_B_O]
                                                   : l->norm_place == PS_NORM_POST ? l->gradient[PS_B_2]
                                                                                   : l->below_db_2,
                                          .dropout = next};
}

void ps_norm_note(const struct ps_layer *l, const struct ps_layernorm_backward *done)
{
    *l->notes = (struct ps_gradient_notes){.masked = done->masked.data != NULL, .summed = done->masked.data != NULL};
}

/* dx = norm'(dy + more) + addend, more and addend where there are any; more of BatchNorm alone, which also reads the means that
 * notes tell of. dx is masked by `next` for the branch that is next, by norms of rows with its bias's gradient. */
static enum ps_status backward(const struct ps_layer *l, enum ps_norm_number number, struct ps_tensor dx, struct ps_tensor dy,
                               struct ps_tensor more, struct ps_tensor addend, struct ps_dropout next)
{
    const struct ps_kernels *k = l->k;
    if (l->norm == PS_NORM_BATCH) {
        const struct ps_layer_norm n = ps_layer_norm_of(l, number);
        const struct ps_tensor masked = masked_of(l, number, next);
        struct ps_tensor means = {.data = NULL};
        if (l->notes->means) {
            means = ps_layer_norm_means(l);
        }
        *l->notes = (struct ps_gradient_notes){.masked = masked.data != NULL};
        struct ps_batchnorm_backward b = {.dx = dx,
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
                                          .epsilon = PS_NORM_EPSILON};
        if (ps_norm_is_shared(l)) {
            b.means = ps_layer_norm_means(l);
            b.rows = l->together.shares.windows * l->together.rows;
            b.dx.data = NULL;
            PS_TRY(k->batchnorm_backward(k, &b));
            PS_TRY(sum_means(l));
            b.dx = dx;
        }
        return k->batchnorm_backward(k, &b);
    }
    const struct ps_layernorm_backward by_row = ps_norm_backward_of(l, number, dx, dy, addend, next);
    ps_norm_note(l, &by_row);
    return k->layernorm_backward(k, &by_row);
}

static const struct ps_tensor none = {.data = NULL};

enum ps_status ps_norm_join_pre(const struct ps_layer *l, enum ps_norm_number number, struct ps_tensor gradient,
                                struct ps_tensor before, struct ps_tensor branch, struct ps_dropout next)
{
    if (l->epilogue) {
        return backward(l, number, gradient, branch, none, before, next);
    }
    PS_TRY(backward(l, number, branch, branch, none, none, next));
    return l->k->add(l->k, &(struct ps_add){.y = gradient, .a = before, .b = branch});
}

enum ps_status ps_norm_join_post(const struct ps_layer *l, enum ps_norm_number number, struct ps_tensor gradient,
                                 struct ps_tensor before, struct ps_tensor branch, struct ps_dropout next)
{
    if (branch.data && l->epilogue && l->norm == PS_NORM_BATCH && !ps_norm_is_shared(l)) {
        return backward(l, number, gradient, before, branch, none, next);
    }
    if (branch.data) {
        PS_TRY(l->k->add(l->k, &(struct ps_add){.y = gradient, .a = before, .b = branch}));
    }
    return backward(l, number, gradient, gradient, none, none, next);
}
