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

/* The row of the (padded) window where its first patch begins. */
static int64_t first_row(const struct ps_model *m)
{
    return m->shape.patches_from_end ? (m->shape.seq_len - m->shape.patch_len) % m->shape.stride : 0;
}

/* Patches seen as channel_affine takes them, [S, N*P]. */
static struct ps_tensor by_channel(const struct ps_model *m, void *patches, int64_t batch)
{
    return ps_tensor_2d(patches, m->k->real, batch * m->shape.channels, ps_patches(&m->shape) * m->shape.patch_len);
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
                                     .position = m->positions.data ? m->positions : parameter(m, m->layout->w_pos),
                                     .state = state,
                                     .batch = batch,
                                     .stride = m->shape.stride,
                                     .first = first_row(m),
                                     .step = m->place.whole ? m->place.further : batch,
                                     .revin = m->shape.revin,
                                     .subtract_last = m->shape.revin_subtract_last,
                                     .pad_end = m->shape.pad_end,
                                     .epsilon = PS_REVIN_EPSILON,
                                     .dropout = dropout};
}

struct ps_embed_backward ps_embed_backward_of(struct ps_model *m, int64_t batch, struct ps_dropout dropout)
{
    const struct ps_shared_cache *s = &m->cache.shared;
    int64_t R = batch * m->shape.channels * ps_patches(&m->shape);
    const struct ps_tensor no_gradient = {.data = NULL};
    return (struct ps_embed_backward){.d_weight = gradient(m, m->layout->w_p),
                                      .d_bias = gradient(m, m->layout->b_p),
                                      .d_position = m->positions.data ? no_gradient : gradient(m, m->layout->w_pos),
                                      .du = ps_tensor_2d(s->gradient, m->k->real, R, m->shape.d_model),
                                      .patches = ps_tensor_2d(s->patches, m->k->real, R, m->shape.patch_len),
                                      .dropout = dropout};
}

/* Takes the masked patches out of what the encoder sees; they are the targets. */
static enum ps_status mask(struct ps_model *m, struct ps_tensor patches, const struct ps_step_state *state, int64_t batch)
{
    const int64_t N = ps_patches(&m->shape);
    return m->k->mask_patches(m->k, &(struct ps_mask_patches){.y = patches,
                                                              .targets = ps_target_tensor(m, batch),
                                                              .x = patches,
                                                              .state = state,
                                                              .seed = m->options.seed,
                                                              .channels = m->shape.channels,
                                                              .patches = N,
                                                              .kept = N - ps_masked_patches(&m->shape),
                                                              .first = (uint64_t)m->place.first});
}

enum ps_status ps_embedding_forward(struct ps_model *m, const struct ps_windows *windows, const struct ps_step_state *state,
                                    int64_t batch, struct ps_dropout dropout)
{
    const struct ps_kernels *k = m->k;
    const struct ps_embed_forward e = ps_embed_forward_of(m, windows, state, batch, dropout);
    const int affine = m->shape.revin_affine, masked = m->shape.mask_ratio > 0;
    if (k->embed_forward && !affine && !m->options.loss.missing) {
        enum ps_status status = k->embed_forward(k, &e);
        if (status != PS_UNSUPPORTED) {
            return status;
        }
    }
    struct ps_tensor normalised = e.patches;
    normalised.data = affine ? m->cache.shared.normalised : e.patches.data;
    PS_TRY(k->gather_patches(k, &(struct ps_gather_patches){.patches = normalised,
                                                            .mean = e.mean,
                                                            .std = e.std,
                                                            .inputs = e.inputs,
                                                            .indices = e.indices,
                                                            .state = e.state,
                                                            .batch = e.batch,
                                                            .stride = e.stride,
                                                            .first = e.first,
                                                            .revin = e.revin,
                                                            .subtract_last = e.subtract_last,
                                                            .pad_end = e.pad_end,
                                                            .epsilon = e.epsilon,
                                                            .masked = m->options.loss.missing && !masked}));
    if (affine) {
        PS_TRY(k->channel_affine(k, &(struct ps_channel_affine){.y = by_channel(m, e.patches.data, batch),
                                                                .x = by_channel(m, normalised.data, batch),
                                                                .weight = parameter(m, m->layout->revin_weight),
                                                                .bias = parameter(m, m->layout->revin_bias),
                                                                .channels = m->shape.channels}));
    }
    if (masked) {
        PS_TRY(mask(m, e.patches, state, batch));
    }
    PS_TRY(ps_product(k, e.u, e.patches, e.weight, 1, 0));
    return k->bias_position_add(
        k, &(struct ps_bias_position_add){.y = e.u, .x = e.u, .bias = e.bias, .position = e.position, .dropout = dropout});
}

/* RevIN's gradients from the embedding's masked du, by way of the patches. */
static enum ps_status revin_backward(struct ps_model *m, int64_t batch, struct ps_tensor du)
{
    const struct ps_kernels *k = m->k;
    const struct ps_shared_cache *s = &m->cache.shared;
    struct ps_tensor d_patches = ps_tensor_2d(s->d_patches, k->real, du.size[0], m->shape.patch_len), nothing = {.data = NULL};
    PS_TRY(ps_product(k, d_patches, du, ps_transposed(weight(m, m->layout->w_p)), 1, 0));
    return k->channel_affine_backward(k, &(struct ps_channel_affine_backward){.dx = nothing,
                                                                              .d_weight = gradient(m, m->layout->revin_weight),
                                                                              .d_bias = gradient(m, m->layout->revin_bias),
                                                                              .dy = by_channel(m, d_patches.data, batch),
                                                                              .kept = by_channel(m, s->normalised, batch),
                                                                              .weight = parameter(m, m->layout->revin_weight),
                                                                              .channels = m->shape.channels});
}

enum ps_status ps_embedding_backward(struct ps_model *m, int64_t batch, struct ps_dropout dropout)
{
    const struct ps_kernels *k = m->k;
    const struct ps_embed_backward e = ps_embed_backward_of(m, batch, dropout);
    const int affine = m->shape.revin_affine;
    if (k->embed_backward && !affine) {
        struct ps_embed_backward early = e;
        early.du.settled = m->options.level == PS_LEVEL_LAYER; /* an encoder's last kernel adds up weights' gradients */
        enum ps_status status = k->embed_backward(k, &early);
        if (status != PS_UNSUPPORTED) {
            return status;
        }
    }
    /* The mask is drawn here, in place, by whichever sum comes first. The sum over sequences alone, seen as columns of [S, N*d], is
     * the position's gradient. */
    struct ps_tensor masked = e.du;
    struct ps_dropout later = dropout;
    if (!dropout.threshold) {
        masked.data = NULL;
    }
    if (e.d_position.data) {
        int64_t S = batch * m->shape.channels, positions = ps_patches(&m->shape) * m->shape.d_model;
        struct ps_tensor wide = ps_tensor_reshape(e.du, 2, (int64_t[]){S, positions}), wide_masked = wide;
        wide_masked.data = masked.data;
        PS_TRY(k->bias_grad(k, &(struct ps_bias_grad){.dbias = ps_tensor_reshape(e.d_position, 1, (int64_t[]){positions}),
                                                      .masked = wide_masked,
                                                      .dy = wide,
                                                      .dropout = dropout}));
        masked.data = NULL;
        later.threshold = 0;
    }
    PS_TRY(k->bias_grad(k, &(struct ps_bias_grad){.dbias = e.d_bias, .masked = masked, .dy = e.du, .dropout = later}));
    PS_TRY(ps_product(k, e.d_weight, ps_transposed(e.patches), e.du, 1, 1));
    return affine ? revin_backward(m, batch, e.du) : PS_OK;
}

struct ps_tensor ps_head_tensor(const struct ps_model *m, void *buffer, int64_t batch)
{
    return ps_tensor_2d(buffer, m->k->parameter, ps_head_rows(&m->shape, batch), ps_head_width(&m->shape));
}

struct ps_tensor ps_target_tensor(const struct ps_model *m, int64_t batch)
{
    const int64_t columns = m->shape.mask_ratio > 0 ? m->shape.patch_len : m->shape.pred_len;
    return ps_tensor_2d(m->cache.shared.targets, m->k->parameter, ps_head_rows(&m->shape, batch), columns);
}

/* What the head's outputs are multiplied by, or added to: RevIN's statistics, or where normalised patches are reconstructed ones
 * and zeros. */
static struct ps_tensor outputs_statistic(const struct ps_model *m, void *revin, struct ps_tensor constant, int64_t batch)
{
    return m->shape.mask_ratio > 0 ? ps_tensor_slice(constant, 0, 0, ps_head_rows(&m->shape, batch))
                                   : ps_revin_tensor(m, revin, batch);
}

struct ps_tensor ps_head_mean(const struct ps_model *m, int64_t batch)
{
    return outputs_statistic(m, m->cache.shared.revin_mean, m->zeros, batch);
}

struct ps_tensor ps_head_std(const struct ps_model *m, int64_t batch)
{
    return outputs_statistic(m, m->cache.shared.revin_std, m->ones, batch);
}

struct ps_tensor ps_revin_tensor(const struct ps_model *m, void *buffer, int64_t batch)
{
    return ps_tensor_1d(buffer, m->k->statistics, batch * m->shape.channels);
}

/* [R, d] seen as the head reads it, [S, N*d] or as it is. */
static struct ps_tensor flattened(const struct ps_model *m, struct ps_tensor y, int64_t batch)
{
    return ps_tensor_reshape(y, 2, (int64_t[]){ps_head_rows(&m->shape, batch), ps_head_columns(&m->shape)});
}

/* Whether ps_head_forward ends with b_h and the affine. */
static int finishes(const struct ps_model *m)
{
    return m->shape.individual_head || m->shape.revin_affine;
}

/* Whether fused operations serve the head of a training step. */
static int fuses(const struct ps_model *m)
{
    return !finishes(m) && ps_loss_is_plain(&m->options.loss);
}

struct ps_tensor ps_head_bias(const struct ps_model *m)
{
    return finishes(m) ? m->no_bias : parameter(m, m->layout->b_h);
}

/* The head's input and output as each channel's own matrices, [C, B, columns] of rows [B*C, columns]. */
static struct ps_tensor channels_first(const struct ps_model *m, struct ps_tensor rows, int64_t batch)
{
    int64_t C = m->shape.channels, columns = rows.size[1];
    return ps_tensor_transpose(ps_tensor_reshape(rows, 3, (int64_t[]){batch, C, columns}), 0, 1);
}

/* What W_h reads: y flattened, or dropped out beside it. */
static enum ps_status head_input(struct ps_model *m, int64_t batch, struct ps_tensor y, struct ps_dropout dropout,
                                 struct ps_tensor *z)
{
    *z = flattened(m, y, batch);
    if (!dropout.threshold) {
        return PS_OK;
    }
    const struct ps_tensor whole = *z;
    z->data = m->cache.shared.head_in;
    return m->k->drop(m->k, &(struct ps_drop){.y = *z, .x = whole, .dropout = dropout});
}

/* head_out = z W_h, and what `finishes` says. */
static enum ps_status head_product(struct ps_model *m, int64_t batch, struct ps_tensor z)
{
    const struct ps_kernels *k = m->k;
    struct ps_tensor x = ps_head_tensor(m, m->cache.shared.head_out, batch), nothing = {.data = NULL};
    const int affine = m->shape.revin_affine;
    PS_TRY(m->shape.individual_head
               ? ps_product(k, channels_first(m, x, batch), channels_first(m, z, batch), weight(m, m->layout->w_h), 1, 0)
               : ps_product(k, x, z, weight(m, m->layout->w_h), 1, 0));
    return finishes(m) ? k->channel_affine(
                             k, &(struct ps_channel_affine){.y = x,
                                                            .x = x,
                                                            .offset = parameter(m, m->layout->b_h),
                                                            .weight = affine ? parameter(m, m->layout->revin_weight) : nothing,
                                                            .bias = affine ? parameter(m, m->layout->revin_bias) : nothing,
                                                            .channels = m->shape.channels,
                                                            .inverse = affine})
                       : PS_OK;
}

enum ps_status ps_head_forward(struct ps_model *m, int64_t batch, struct ps_tensor y, struct ps_dropout dropout)
{
    struct ps_tensor z;
    PS_TRY(head_input(m, batch, y, dropout, &z));
    return head_product(m, batch, z);
}

enum ps_status ps_gather_targets_of(struct ps_model *m, const struct ps_windows *windows, const struct ps_step_state *state,
                                    int64_t batch)
{
    const struct ps_tensor unmasked = {.data = NULL};
    if (m->shape.mask_ratio > 0) {
        return PS_OK; /* the embedding has made them */
    }
    return m->k->gather_targets(m->k, &(struct ps_gather_targets){.y = ps_target_tensor(m, batch),
                                                                  .targets = windows->targets,
                                                                  .indices = windows->indices,
                                                                  .inputs = m->options.loss.missing ? windows->inputs : unmasked,
                                                                  .state = state,
                                                                  .batch = batch});
}

struct ps_head_step ps_head_step_of(struct ps_model *m, const struct ps_windows *windows, const struct ps_step_state *state,
                                    int64_t batch, int64_t rows)
{
    const struct ps_shared_cache *s = &m->cache.shared;
    struct ps_tensor z = flattened(m, ps_model_stream(m, m->shape.n_layers, batch), batch), dz = z;
    /* Of means over the batch's targets; one over the step's observed ones needs no part. */
    const double part = m->place.whole && !m->observed ? (double)batch / (double)m->place.whole : 1;
    dz.data = s->gradient;
    return (struct ps_head_step){.dz = dz,
                                 .dx = ps_tensor_2d(s->d_head_out, m->k->real, z.size[0], ps_head_width(&m->shape)),
                                 .partials = ps_tensor_2d(s->head_partials, PS_F64, rows, m->shape.pred_len + 1),
                                 .z = z,
                                 .weight = weight(m, m->layout->w_h),
                                 .bias = parameter(m, m->layout->b_h),
                                 .mean = ps_head_mean(m, batch),
                                 .std = ps_head_std(m, batch),
                                 .targets = windows->targets,
                                 .indices = windows->indices,
                                 .state = state,
                                 .batch = batch,
                                 .gradient_scale = m->gradient_scale * part};
}

/* dx, the loss's sums and dz. *summed: the loss and the bias's gradient have their sums already; else partials hold their parts. */
static enum ps_status head_loss(struct ps_model *m, struct ps_step_state *state, const struct ps_windows *windows,
                                const struct ps_head_step *h, int *multiplied, int *summed)
{
    const struct ps_kernels *k = m->k;
    struct ps_tensor x = ps_head_tensor(m, m->cache.shared.head_out, h->batch);
    enum ps_status status = PS_UNSUPPORTED;
    *multiplied = *summed = 0;
    if (k->head_step && fuses(m)) {
        status = k->head_step(k, h);
        *multiplied = status == PS_OK;
    }
    if (status != PS_UNSUPPORTED) {
        return status;
    }
    PS_TRY(head_product(m, h->batch, h->z));
    if (k->window_loss && fuses(m)) {
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
    const struct ps_tensor batch_alone = {.data = NULL};
    PS_TRY(ps_gather_targets_of(m, windows, state, h->batch));
    return k->forecast_loss(k,
                            &(struct ps_forecast_loss){.dx = h->dx,
                                                       .x = x,
                                                       .bias = ps_head_bias(m),
                                                       .mean = h->mean,
                                                       .std = h->std,
                                                       .targets = ps_target_tensor(m, h->batch),
                                                       .observed = m->observed ? ps_tensor_1d(m->observed, PS_F64, 1) : batch_alone,
                                                       .state = state,
                                                       .batch = h->batch,
                                                       .gradient_scale = h->gradient_scale,
                                                       .loss = m->options.loss});
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

/* The affine's gradients, where they are wanted, and dx with it undone, in place. */
static enum ps_status undo_affine(struct ps_model *m, const struct ps_head_step *h, int alone)
{
    const int64_t C = m->shape.channels;
    const struct ps_tensor unread = ps_tensor_1d(m->cache.shared.d_affine, m->k->parameter, 2 * C);
    const struct ps_tensor d_weight = alone ? ps_tensor_slice(unread, 0, 0, C) : gradient(m, m->layout->revin_weight);
    const struct ps_tensor d_bias = alone ? ps_tensor_slice(unread, 0, C, C) : gradient(m, m->layout->revin_bias);
    return m->k->channel_affine_backward(
        m->k, &(struct ps_channel_affine_backward){.dx = h->dx,
                                                   .d_weight = d_weight,
                                                   .d_bias = d_bias,
                                                   .dy = h->dx,
                                                   .kept = ps_head_tensor(m, m->cache.shared.head_out, h->batch),
                                                   .weight = parameter(m, m->layout->revin_weight),
                                                   .channels = m->shape.channels,
                                                   .inverse = 1});
}

/* b_h's gradient, and the loss's sums unless `summed`. */
static enum ps_status head_sums(struct ps_model *m, struct ps_step_state *state, const struct ps_head_step *h, int summed)
{
    struct ps_tensor d_bias = gradient(m, m->layout->b_h);
    return summed ? m->k->bias_grad(m->k, &(struct ps_bias_grad){.dbias = d_bias, .dy = h->dx})
                  : m->k->head_sums(m->k, &(struct ps_head_sums){.d_bias = d_bias,
                                                                 .partials = h->partials,
                                                                 .state = state,
                                                                 .batch = h->batch,
                                                                 .sequences = h->batch * m->shape.channels});
}

/* Gradients of W_h and b_h; those of the loss's sums too, unless `summed`. alone: no encoder's backward runs beside. */
static enum ps_status head_gradients(struct ps_model *m, struct ps_step_state *state, const struct ps_head_step *h, int summed,
                                     int alone)
{
    const struct ps_kernels *k = m->k;
    struct ps_tensor d_weight = gradient(m, m->layout->w_h);
    if (m->shape.individual_head) {
        int64_t columns = m->shape.channels * ps_head_width(&m->shape);
        PS_TRY(ps_product(k, d_weight, ps_transposed(channels_first(m, h->z, h->batch)), channels_first(m, h->dx, h->batch), 1, 1));
        return k->bias_grad(k,
                            &(struct ps_bias_grad){.dbias = ps_tensor_reshape(gradient(m, m->layout->b_h), 1, (int64_t[]){columns}),
                                                   .dy = ps_tensor_reshape(h->dx, 2, (int64_t[]){h->batch, columns})});
    }
    struct ps_tensor dx = h->dx;
    const int room = m->encoder.room && !alone;
    if (room) { /* the product last: blocks of the encoder's backward have come to their places by then */
        PS_TRY(head_sums(m, state, h, summed));
        dx.settled = 1;
    }
    PS_TRY(ps_product(k, d_weight, ps_transposed(h->z), dx, 1, 1));
    return room ? PS_OK : head_sums(m, state, h, summed);
}

enum ps_status ps_head_gradients(struct ps_model *m, struct ps_head_rest *rest, int alone)
{
    const struct ps_kernels *k = m->k;
    if (!rest->state) {
        return PS_OK;
    }
    /* Nothing but AdamW waits for these. */
    PS_TRY(ps_beside(k, PS_BESIDE_BEGIN));
    const enum ps_status status = head_gradients(m, rest->state, &rest->step, rest->summed, alone);
    rest->state = NULL;
    return ps_beside_end(k, status);
}

enum ps_status ps_head_train(struct ps_model *m, const struct ps_windows *windows, struct ps_step_state *state, int64_t batch,
                             const struct ps_head_step *done, int alone, struct ps_head_rest *rest)
{
    const struct ps_kernels *k = m->k;
    int64_t S = batch * m->shape.channels;
    const struct ps_dropout dropout = ps_head_dropout(m, state, 1);
    struct ps_head_step h = done ? *done : ps_head_step_of(m, windows, state, batch, (S + PS_PARTIAL_ROWS - 1) / PS_PARTIAL_ROWS);
    int multiplied = 1, summed = 0;
    if (!done) {
        PS_TRY(head_input(m, batch, h.z, dropout, &h.z));
        PS_TRY(head_loss(m, state, windows, &h, &multiplied, &summed));
        if (m->shape.revin_affine) {
            PS_TRY(undo_affine(m, &h, alone));
        }
    }
    struct ps_head_rest own = {.step = h, .state = state, .summed = summed};
    if (rest) {
        *rest = own;
    }
    enum ps_status status = rest ? PS_OK : ps_head_gradients(m, &own, alone);
    if (alone) {
        return status;
    }
    if (status == PS_OK && !multiplied) {
        status = m->shape.individual_head
                     ? ps_product(k, channels_first(m, h.dz, batch), channels_first(m, h.dx, batch), ps_transposed(h.weight), 1, 0)
                     : ps_product(k, h.dz, h.dx, ps_transposed(h.weight), 1, 0);
    }
    if (status == PS_OK && dropout.threshold) {
        status = k->drop(k, &(struct ps_drop){.y = h.dz, .x = h.dz, .dropout = dropout});
    }
    return status;
}
