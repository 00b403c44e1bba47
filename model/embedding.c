#include "model/embedding.h"

#include "model/layer.h"

#define PS_REVIN_EPSILON 1e-5

static struct ps_tensor parameter(const struct ps_model *m, int t)
{
    return ps_parameter_tensor(m->layout, t, m->parameters, m->k->parameter);
}

/* What a product reads. */
static struct ps_tensor weight(const struct ps_model *m, int t)
{
    return ps_parameter_tensor(m->layout, t, m->weights, m->k->real);
}

static struct ps_tensor gradient(const struct ps_model *m, int t)
{
    return ps_parameter_tensor(m->layout, t, m->gradients, m->k->parameter);
}

struct ps_embed_forward ps_embed_forward_of(struct ps_model *m, const struct ps_windows *windows, const struct ps_step_state *state,
                                            int64_t batch, struct ps_dropout dropout)
{
    const struct ps_shared_cache *s = &m->cache.shared;
    int64_t R = batch * m->shape.channels * ps_patches(&m->shape);
    return (struct ps_embed_forward){.u = ps_model_stream(m, 0, batch),
                                     .patches = ps_tensor_2d(s->patches, m->k->real, R, m->shape.patch_len),
                                     .mean = ps_revin_tensor(m, s->revin_mean, batch),
                                     .std = ps_revin_tensor(m, s->revin_std, batch),
                                     .inputs = windows->inputs,
                                     .indices = windows->indices,
                                     .weight = weight(m, m->layout->w_p),
                                     .bias = parameter(m, m->layout->b_p),
                                     .position = parameter(m, m->layout->w_pos),
                                     .state = state,
                                     .batch = batch,
                                     .stride = m->shape.stride,
                                     .revin = m->shape.revin,
                                     .pad_end = m->shape.pad_end,
                                     .epsilon = PS_REVIN_EPSILON,
                                     .dropout = dropout};
}

struct ps_embed_backward ps_embed_backward_of(struct ps_model *m, int64_t batch, struct ps_dropout dropout)
{
    const struct ps_shared_cache *s = &m->cache.shared;
    int64_t R = batch * m->shape.channels * ps_patches(&m->shape);
    return (struct ps_embed_backward){.d_weight = gradient(m, m->layout->w_p),
                                      .d_bias = gradient(m, m->layout->b_p),
                                      .d_position = gradient(m, m->layout->w_pos),
                                      .du = ps_tensor_2d(s->gradient, m->k->real, R, m->shape.d_model),
                                      .patches = ps_tensor_2d(s->patches, m->k->real, R, m->shape.patch_len),
                                      .dropout = dropout};
}

enum ps_status ps_embedding_forward(struct ps_model *m, const struct ps_windows *windows, const struct ps_step_state *state,
                                    int64_t batch, struct ps_dropout dropout)
{
    const struct ps_kernels *k = m->k;
    const struct ps_embed_forward e = ps_embed_forward_of(m, windows, state, batch, dropout);
    if (k->embed_forward) {
        enum ps_status status = k->embed_forward(k, &e);
        if (status != PS_UNSUPPORTED) {
            return status;
        }
    }
    PS_TRY(k->gather_patches(k, &(struct ps_gather_patches){.patches = e.patches,
                                                            .mean = e.mean,
                                                            .std = e.std,
                                                            .inputs = e.inputs,
                                                            .indices = e.indices,
                                                            .state = e.state,
                                                            .batch = e.batch,
                                                            .stride = e.stride,
                                                            .revin = e.revin,
                                                            .pad_end = e.pad_end,
                                                            .epsilon = e.epsilon}));
    PS_TRY(ps_product(k, e.u, e.patches, e.weight, 1, 0));
    return k->bias_position_add(
        k, &(struct ps_bias_position_add){.y = e.u, .x = e.u, .bias = e.bias, .position = e.position, .dropout = dropout});
}

enum ps_status ps_embedding_backward(struct ps_model *m, int64_t batch, struct ps_dropout dropout)
{
    const struct ps_kernels *k = m->k;
    const struct ps_embed_backward e = ps_embed_backward_of(m, batch, dropout);
    if (k->embed_backward) {
        enum ps_status status = k->embed_backward(k, &e);
        if (status != PS_UNSUPPORTED) {
            return status;
        }
    }
    /* The sum over sequences alone, seen as columns of [S, N*d], is the position's gradient; the mask is drawn here, in place. */
    int64_t S = batch * m->shape.channels, positions = ps_patches(&m->shape) * m->shape.d_model;
    struct ps_tensor wide = ps_tensor_reshape(e.du, 2, (int64_t[]){S, positions});
    struct ps_tensor d_position = ps_tensor_reshape(e.d_position, 1, (int64_t[]){positions});
    struct ps_tensor masked = wide;
    if (!dropout.threshold) {
        masked.data = NULL;
    }
    PS_TRY(k->bias_grad(k, &(struct ps_bias_grad){.dbias = d_position, .masked = masked, .dy = wide, .dropout = dropout}));
    PS_TRY(k->bias_grad(k, &(struct ps_bias_grad){.dbias = e.d_bias, .dy = e.du}));
    return ps_product(k, e.d_weight, ps_transposed(e.patches), e.du, 1, 1);
}

struct ps_tensor ps_head_tensor(const struct ps_model *m, void *buffer, int64_t batch)
{
    return ps_tensor_2d(buffer, m->k->parameter, batch * m->shape.channels, m->shape.pred_len);
}

struct ps_tensor ps_revin_tensor(const struct ps_model *m, void *buffer, int64_t batch)
{
    return ps_tensor_1d(buffer, m->k->statistics, batch * m->shape.channels);
}

/* [R, d] seen as the head reads it, [S, N*d]. */
static struct ps_tensor flattened(const struct ps_model *m, struct ps_tensor y, int64_t batch)
{
    return ps_tensor_reshape(y, 2, (int64_t[]){batch * m->shape.channels, ps_patches(&m->shape) * m->shape.d_model});
}

enum ps_status ps_head_forward(struct ps_model *m, int64_t batch, struct ps_tensor y)
{
    return ps_product(m->k, ps_head_tensor(m, m->cache.shared.head_out, batch), flattened(m, y, batch), weight(m, m->layout->w_h),
                      1, 0);
}

enum ps_status ps_gather_targets_of(struct ps_model *m, const struct ps_windows *windows, const struct ps_step_state *state,
                                    int64_t batch)
{
    return m->k->gather_targets(m->k, &(struct ps_gather_targets){.y = ps_head_tensor(m, m->cache.shared.targets, batch),
                                                                  .targets = windows->targets,
                                                                  .indices = windows->indices,
                                                                  .state = state,
                                                                  .batch = batch});
}

struct ps_head_step ps_head_step_of(struct ps_model *m, const struct ps_windows *windows, const struct ps_step_state *state,
                                    int64_t batch, int64_t rows)
{
    const struct ps_shared_cache *s = &m->cache.shared;
    struct ps_tensor z = flattened(m, ps_model_stream(m, m->shape.n_layers, batch), batch), dz = z;
    dz.data = s->gradient;
    return (struct ps_head_step){.dz = dz,
                                 .dx = ps_tensor_2d(s->d_head_out, m->k->real, z.size[0], m->shape.pred_len),
                                 .partials = ps_tensor_2d(s->head_partials, PS_F64, rows, m->shape.pred_len + 1),
                                 .z = z,
                                 .weight = weight(m, m->layout->w_h),
                                 .bias = parameter(m, m->layout->b_h),
                                 .mean = ps_revin_tensor(m, s->revin_mean, batch),
                                 .std = ps_revin_tensor(m, s->revin_std, batch),
                                 .targets = windows->targets,
                                 .indices = windows->indices,
                                 .state = state,
                                 .batch = batch,
                                 .gradient_scale = m->gradient_scale};
}

/* dx, the loss's sums and dz. *summed: the loss and the bias's gradient have their sums already; else partials hold their parts. */
static enum ps_status head_loss(struct ps_model *m, struct ps_step_state *state, const struct ps_windows *windows,
                                const struct ps_head_step *h, int *multiplied, int *summed)
{
    const struct ps_kernels *k = m->k;
    struct ps_tensor x = ps_head_tensor(m, m->cache.shared.head_out, h->batch);
    enum ps_status status = PS_UNSUPPORTED;
    *multiplied = *summed = 0;
    if (k->head_step) {
        status = k->head_step(k, h);
        *multiplied = status == PS_OK;
    }
    if (status != PS_UNSUPPORTED) {
        return status;
    }
    PS_TRY(ps_head_forward(m, h->batch, h->z));
    if (k->window_loss) {
        status = k->window_loss(k, &(struct ps_window_loss){.dx = h->dx,
                                                            .partials = h->partials,
                                                            .x = x,
                                                            .bias = h->bias,
                                                            .mean = h->mean,
                                                            .std = h->std,
                                                            .targets = h->targets,
                                                            .indices = h->indices,
                                                            .state = state,
                                                            .batch = h->batch,
                                                            .gradient_scale = h->gradient_scale});
    }
    if (status != PS_UNSUPPORTED) {
        return status;
    }
    *summed = 1;
    PS_TRY(ps_gather_targets_of(m, windows, state, h->batch));
    return k->forecast_loss(k, &(struct ps_forecast_loss){.dx = h->dx,
                                                          .x = x,
                                                          .bias = h->bias,
                                                          .mean = h->mean,
                                                          .std = h->std,
                                                          .targets = ps_head_tensor(m, m->cache.shared.targets, h->batch),
                                                          .state = state,
                                                          .batch = h->batch,
                                                          .gradient_scale = h->gradient_scale});
}

struct ps_head_gradient ps_head_gradient_of(struct ps_model *m, struct ps_step_state *state, const struct ps_head_step *done)
{
    return (struct ps_head_gradient){.d_weight = gradient(m, m->layout->w_h),
                                     .d_bias = gradient(m, m->layout->b_h),
                                     .z = done->z,
                                     .dx = done->dx,
                                     .partials = done->partials,
                                     .state = state,
                                     .batch = done->batch};
}

enum ps_status ps_head_train(struct ps_model *m, const struct ps_windows *windows, struct ps_step_state *state, int64_t batch,
                             const struct ps_head_step *done)
{
    const struct ps_kernels *k = m->k;
    int64_t S = batch * m->shape.channels;
    struct ps_tensor d_bias = gradient(m, m->layout->b_h);
    struct ps_head_step h = done ? *done : ps_head_step_of(m, windows, state, batch, (S + PS_PARTIAL_ROWS - 1) / PS_PARTIAL_ROWS);
    int multiplied = 1, summed = 0;
    if (!done) {
        PS_TRY(head_loss(m, state, windows, &h, &multiplied, &summed));
    }
    /* Nothing but AdamW waits for these. */
    if (k->beside) {
        PS_TRY(k->beside(k, PS_BESIDE_BEGIN));
    }
    enum ps_status status = ps_product(k, gradient(m, m->layout->w_h), ps_transposed(h.z), h.dx, 1, 1);
    if (status == PS_OK) {
        status =
            summed ? k->bias_grad(k, &(struct ps_bias_grad){.dbias = d_bias, .dy = h.dx})
                   : k->head_sums(k, &(struct ps_head_sums){
                                         .d_bias = d_bias, .partials = h.partials, .state = state, .batch = batch, .sequences = S});
    }
    if (k->beside) {
        enum ps_status ended = k->beside(k, PS_BESIDE_END);
        status = status == PS_OK ? ended : status;
    }
    if (status != PS_OK || multiplied) {
        return status;
    }
    return ps_product(k, h.dz, h.dx, ps_transposed(h.weight), 1, 0);
}
