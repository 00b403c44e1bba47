#include "model/model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/philox.h"
#include "model/embedding.h"
#include "model/layer.h"

/* ---- dropout sites: 0 the embedding; three a layer, which are at most 1024; softmax's weights of each; the head ---- */

enum { SITES_A_LAYER = 3, SITE_WEIGHTS = 4096, SITE_HEAD = 8192 };

enum { BLOCK = 8 }; /* elements that a block of dropout's draws serves */

/* Elements of a window's part of the tensor that is dropped out there. */
static int64_t elements_at(const struct ps_model_shape *s, enum ps_dropout_place place)
{
    const int64_t patches = ps_patches(s), width = place == PS_DROP_HIDDEN              ? s->d_ff
                                                   : place == PS_DROP_ATTENTION_WEIGHTS ? s->n_heads * patches
                                                                                        : s->d_model;
    return s->channels * patches * width;
}

int64_t ps_model_granule(const struct ps_model_shape *shape)
{
    int64_t granule = 1;
    for (int place = 0; place < PS_DROP_PLACES; place++) {
        while (ps_dropout_rate(shape, place) > 0 && granule * elements_at(shape, place) % BLOCK != 0) {
            granule *= 2;
        }
    }
    return granule;
}

/* Where a layer's weights begin in the flat buffers, the next layer's behind them; n_layers: the head's. */
static int64_t weights_begin(const struct ps_model *m, int64_t layer)
{
    const struct ps_parameters *p = m->layout;
    return p->table[layer < m->shape.n_layers ? p->layer[layer][PS_W_QKV] : p->w_h].offset;
}

/* Of a step of so many windows. */
static double gradient_scale_of(const struct ps_model *m, int64_t windows)
{
    const double outputs = (double)ps_head_rows(&m->shape, windows) * (double)ps_head_width(&m->shape);
    return m->k->precision == PS_FP16 ? exp2(floor(log2(outputs))) : 1;
}

void ps_model_place(struct ps_model *m, const struct ps_batch_place *place)
{
    m->place = *place;
    m->unsummed = weights_begin(m, m->shape.n_layers);
    m->gradient_scale = gradient_scale_of(m, place->whole ? place->whole : m->batch);
}

static struct ps_dropout dropout_at(const struct ps_model *m, enum ps_dropout_place place, int64_t layer,
                                    const struct ps_step_state *state, int training)
{
    int64_t site = 0;
    switch (place) {
    case PS_DROP_ATTENTION:
    case PS_DROP_HIDDEN:
    case PS_DROP_OUTPUT:
        site = 1 + SITES_A_LAYER * layer + (place - PS_DROP_ATTENTION);
        break;
    case PS_DROP_ATTENTION_WEIGHTS:
        site = SITE_WEIGHTS + layer;
        break;
    case PS_DROP_HEAD:
        site = SITE_HEAD;
        break;
    default:
        break;
    }
    struct ps_dropout dropout = ps_dropout_make(training ? ps_dropout_rate(&m->shape, place) : 0, m->options.seed,
                                                (uint32_t)(PS_SITE_DROPOUT + site), state);
    dropout.first = (uint32_t)(m->place.first * elements_at(&m->shape, place) / BLOCK);
    return dropout;
}

struct ps_dropout ps_head_dropout(const struct ps_model *m, const struct ps_step_state *state, int training)
{
    return dropout_at(m, PS_DROP_HEAD, 0, state, training);
}

/* What BatchNorm exchanges; nothing where a batch is one rank's alone. */
static struct ps_together together_of(const struct ps_model *m, int training)
{
    if (!training || !m->together || !m->place.shares.ranks) {
        return (struct ps_together){.exchange = NULL};
    }
    const enum ps_type type = m->k->statistics;
    const int64_t d = m->shape.d_model, ranks = m->options.exchange->size;
    char *mine = (char *)m->together + (size_t)(ranks * 2 * d) * ps_type_bytes(type);
    return (struct ps_together){.exchange = m->options.exchange,
                                .parts = ps_tensor_3d(m->together, type, ranks, 2, d),
                                .mine = ps_tensor_2d(mine, type, 2, d),
                                .shares = m->place.shares,
                                .rows = m->shape.channels * ps_patches(&m->shape)};
}

/* ---- heads in more columns than they have ---- */

static int is_padded(const struct ps_model *m)
{
    return m->head * m->shape.n_heads != m->shape.d_model;
}

/* Of wide weights, or their gradients, those of layers begin .. end - 1: [layers, units, columns]. */
static struct ps_tensor wide_of(void *all, enum ps_type type, int64_t begin, int64_t end, int64_t units, int64_t columns)
{
    char *first = (char *)all + (size_t)(begin * units * columns) * ps_type_bytes(type);
    return ps_tensor_3d(first, type, end - begin, units, columns);
}

/* The same of the model's own, by the first layer's place in a flat buffer: layers lie equally far apart. */
static struct ps_tensor narrow_of(const struct ps_model *m, void *flat, enum ps_type type, enum ps_layer_parameter which,
                                  int64_t begin, int64_t end, int64_t units, int64_t columns)
{
    const struct ps_parameters *p = m->layout;
    const int64_t at = p->table[p->layer[begin][which]].offset;
    struct ps_tensor t = ps_tensor_3d((char *)flat + (size_t)at * ps_type_bytes(type), type, end - begin, units, columns);
    if (end - begin > 1) {
        t.stride[0] = p->table[p->layer[begin + 1][which]].offset - at;
    }
    return t;
}

/* The wide weights, of the parameters as they are now. */
static enum ps_status pad_weights(const struct ps_model *m)
{
    const struct ps_shared_cache *s = &m->cache.shared;
    const enum ps_type real = m->k->real, parameter = m->k->parameter;
    const int64_t layers = m->shape.n_layers, d = m->shape.d_model, h = m->shape.n_heads, e = d / h, wide = m->head;
    if (!is_padded(m)) {
        return PS_OK;
    }
    return m->k->pad_heads(m->k,
                           &(struct ps_pad_heads){.w_qkv_out = wide_of(s->padded_w_qkv, real, 0, layers, 3 * d * h, wide),
                                                  .w_o_out = wide_of(s->padded_w_o, real, 0, layers, h, wide * d),
                                                  .b_qkv_out = wide_of(s->padded_b_qkv, parameter, 0, layers, 3 * h, wide),
                                                  .w_qkv = narrow_of(m, m->weights, real, PS_W_QKV, 0, layers, 3 * d * h, e),
                                                  .w_o = narrow_of(m, m->weights, real, PS_W_O, 0, layers, h, e * d),
                                                  .b_qkv = narrow_of(m, m->parameters, parameter, PS_B_QKV, 0, layers, 3 * h, e)});
}

/* gradients += those of the wide weights, of layers begin .. end - 1. */
static enum ps_status unpad_gradients(const struct ps_model *m, int64_t begin, int64_t end)
{
    const struct ps_shared_cache *s = &m->cache.shared;
    const enum ps_type type = m->k->parameter;
    const int64_t d = m->shape.d_model, h = m->shape.n_heads, e = d / h, wide = m->head;
    return m->k->unpad_heads(
        m->k, &(struct ps_unpad_heads){.dw_qkv = narrow_of(m, m->gradients, type, PS_W_QKV, begin, end, 3 * d * h, e),
                                       .dw_o = narrow_of(m, m->gradients, type, PS_W_O, begin, end, h, e * d),
                                       .db_qkv = narrow_of(m, m->gradients, type, PS_B_QKV, begin, end, 3 * h, e),
                                       .g_qkv = wide_of(s->padded_dw_qkv, type, begin, end, 3 * d * h, wide),
                                       .g_o = wide_of(s->padded_dw_o, type, begin, end, h, wide * d),
                                       .g_b = wide_of(s->padded_db_qkv, type, begin, end, 3 * h, wide)});
}

/* [layers, n] of [layers, units, n]: each layer's unit `number`. */
static struct ps_tensor vectors_of(struct ps_tensor t, int64_t number)
{
    const struct ps_tensor unit = ps_tensor_slice(t, 1, number, 1);
    return (struct ps_tensor){.data = unit.data,
                              .type = unit.type,
                              .rank = 2,
                              .size = {unit.size[0], unit.size[2]},
                              .stride = {unit.stride[0], unit.stride[2]}};
}

/* gradients += those of W_qkv with the norm below the layer in it, or of W_1 with the layer's first, of layers begin .. end - 1. */
static enum ps_status unfold_gradients(const struct ps_model *m, int qkv, int64_t begin, int64_t end)
{
    const struct ps_shared_cache *s = &m->cache.shared;
    const enum ps_type type = m->k->parameter;
    const enum ps_layer_parameter w = qkv ? PS_W_QKV : PS_W_1, b = qkv ? PS_B_QKV : PS_B_1;
    const int64_t d = m->shape.d_model, n = qkv ? 3 * m->shape.n_heads * m->head : m->shape.d_ff;
    if (begin >= end) {
        return PS_OK;
    }
    struct ps_tensor dw = narrow_of(m, m->gradients, type, w, begin, end, d, n);
    struct ps_tensor dbias = narrow_of(m, m->gradients, type, b, begin, end, 1, n);
    if (qkv && is_padded(m)) {
        dw = wide_of(s->padded_dw_qkv, type, begin, end, d, n);
        dbias = wide_of(s->padded_db_qkv, type, begin, end, 1, n);
    }
    const struct ps_tensor g_bias = wide_of(qkv ? s->folded_db_qkv : s->folded_db_1, type, begin, end, 1, n);
    const struct ps_tensor lines = wide_of(qkv ? s->norm2_lines : s->norm1_lines, type, begin - qkv, end - qkv, 2, d);
    return m->k->batchnorm_unfold(
        m->k, &(struct ps_batchnorm_unfold){.dw = dw,
                                            .dbias = vectors_of(dbias, 0),
                                            .g = wide_of(qkv ? s->folded_dw_qkv : s->folded_dw_1, type, begin, end, d, n),
                                            .g_bias = vectors_of(g_bias, 0),
                                            .scale = vectors_of(lines, 0),
                                            .shift = vectors_of(lines, 1)});
}

/* Adds the gradients of weights that norms are folded into, and of the wide ones, to the model's own, of layers from `begin` on
 * whose are still there. Their sums no longer wait: they have been added, or where ranks sum them never waited. */
static enum ps_status unwrap_gradients(struct ps_model *m, int64_t begin)
{
    const int64_t end = m->wrapped;
    if (begin >= end) {
        return PS_OK;
    }
    m->wrapped = begin;
    if (m->unfolding) {
        PS_TRY(unfold_gradients(m, 0, begin, end));
        PS_TRY(unfold_gradients(m, 1, begin > 0 ? begin : 1, end)); /* no norm stands below the first layer */
    }
    return is_padded(m) ? unpad_gradients(m, begin, end) : PS_OK;
}

/* A layer's weights around attention are the wide ones. */
static void take_padded(const struct ps_model *m, struct ps_layer *l)
{
    const struct ps_shared_cache *s = &m->cache.shared;
    const struct {
        enum ps_layer_parameter which;
        void *weight, *gradient;
        int64_t rows, columns;
    } wide[] = {{PS_W_QKV, s->padded_w_qkv, s->padded_dw_qkv, l->d, 3 * l->a},
                {PS_W_O, s->padded_w_o, s->padded_dw_o, l->a, l->d},
                {PS_B_QKV, s->padded_b_qkv, s->padded_db_qkv, 1, 3 * l->a}};
    for (size_t i = 0; i < sizeof wide / sizeof *wide && is_padded(m); i++) {
        struct ps_tensor *const tensor[] = {&l->weight[wide[i].which], &l->gradient[wide[i].which]};
        void *const all[] = {wide[i].weight, wide[i].gradient};
        for (int t = 0; t < 2; t++) {
            const int rank = tensor[t]->rank, settled = tensor[t]->settled;
            const int64_t size[] = {wide[i].rows, wide[i].columns};
            *tensor[t] = wide_of(all[t], tensor[t]->type, l->index, l->index + 1, wide[i].rows, wide[i].columns);
            *tensor[t] = ps_tensor_reshape(*tensor[t], rank, size + 2 - rank);
            tensor[t]->settled = settled;
        }
    }
}

static struct ps_layer layer_of(struct ps_model *m, int64_t index, const struct ps_step_state *state, int64_t batch, int training)
{
    struct ps_layer l = {.k = m->k,
                         .S = batch * m->shape.channels,
                         .N = ps_patches(&m->shape),
                         .d = m->shape.d_model,
                         .h = m->shape.n_heads,
                         .f = m->shape.d_ff,
                         .inner = m->shape.activation == PS_SWIGLU ? 2 * m->shape.d_ff : m->shape.d_ff,
                         .index = index,
                         .first = index == 0,
                         .last = index == m->shape.n_layers - 1,
                         .training = training,
                         .angles = m->angles,
                         .norm = m->shape.norm,
                         .norm_place = m->shape.norm_place,
                         .activation = m->shape.activation,
                         .residual_attention = m->shape.residual_attention,
                         .cache = &m->cache.layers[index],
                         .lowest = &m->cache.layers[0],
                         .slope_kept = &m->cache.layers[index].slope_kept,
                         .shared = &m->cache.shared,
                         .u = ps_model_stream(m, index, batch),
                         .y = ps_model_stream(m, index + 1, batch),
                         .merge_qkv = m->options.merge_qkv,
                         .epilogue = m->options.epilogue && m->k->gemm_bias,
                         .tiled_attention = m->options.tiled_attention,
                         .strided_heads = m->strided_heads,
                         .folded = m->folded && training,
                         .feed_forward = m->options.feed_forward,
                         .gradients_wait = !m->place.sum,
                         .gradients_together = m->options.epilogue && m->k->gemm_gradients,
                         .together = together_of(m, training)};
    l.R = l.S * l.N;
    l.e = m->head;
    l.a = l.h * l.e;
    l.scale = 1 / sqrt((double)l.d / (double)l.h);
    for (int t = 0; t < PS_LAYER_PARAMETERS; t++) {
        int place = m->layout->layer[index][t];
        if (place < 0) {
            continue;
        }
        l.weight[t] = t <= PS_W_2 ? ps_parameter_tensor(m->layout, place, m->weights, m->k->real)
                                  : ps_parameter_tensor(m->layout, place, m->parameters, m->k->parameter);
        l.weight[t].settled = 1; /* between what writes parameters and a layer stands the embedding */
        l.gradient[t] = ps_parameter_tensor(m->layout, place, m->gradients, m->k->parameter);
    }
    take_padded(m, &l);
    for (int t = 0; t < PS_LAYER_STATISTICS && m->shape.norm == PS_NORM_BATCH; t++) {
        l.statistics[t] = ps_parameter_tensor(m->layout, m->layout->statistics[index][t], m->parameters, m->k->parameter);
    }
    if (index > 0) {
        l.below_dropout = dropout_at(m, PS_DROP_OUTPUT, index - 1, state, training);
    }
    l.weights_dropout = dropout_at(m, PS_DROP_ATTENTION_WEIGHTS, index, state, training);
    l.attention_dropout = dropout_at(m, PS_DROP_ATTENTION, index, state, training);
    l.hidden_dropout = dropout_at(m, PS_DROP_HIDDEN, index, state, training);
    l.output_dropout = dropout_at(m, PS_DROP_OUTPUT, index, state, training);
    return l;
}

/* What a layer knows of the ones beside it. */
static void know_others(struct ps_model *m, struct ps_layer *layer, const struct ps_step_state *state, int64_t batch, int training)
{
    if (!layer->last && layer->norm_place == PS_NORM_PRE) {
        const struct ps_layer above = layer_of(m, layer->index + 1, state, batch, training);
        layer->above_norm1 = ps_layer_norm_of(&above, PS_NORM_1);
    }
    if (!layer->first) {
        const struct ps_layer below = layer_of(m, layer->index - 1, state, batch, training);
        layer->below = below.cache;
        layer->below_norm2 = ps_layer_norm_of(&below, PS_NORM_2);
        layer->below_db_2 = below.gradient[PS_B_2];
    }
}

/* The same as a fused encoder's table entries take it. */
static struct ps_encoder_sizes encoder_sizes(const struct ps_model *m, const struct ps_step_state *state, int training)
{
    const struct ps_parameters *p = m->layout;
    const int64_t above = m->shape.n_layers > 1 ? 1 : 0;
    const int *first = p->layer[0], *second = p->layer[above];
    int64_t offset[PS_LAYER_PARAMETERS];
    for (int t = 0; t < PS_LAYER_PARAMETERS; t++) {
        offset[t] = first[t] < 0 ? 0 : p->table[first[t]].offset; /* RMSNorm has no beta */
    }
    struct ps_encoder_sizes sizes = {.layers = m->shape.n_layers,
                                     .n_heads = m->shape.n_heads,
                                     .d_ff = m->shape.d_ff,
                                     .layout = {.w_qkv = offset[PS_W_QKV],
                                                .w_o = offset[PS_W_O],
                                                .w_1 = offset[PS_W_1],
                                                .w_2 = offset[PS_W_2],
                                                .ln1_gamma = offset[PS_NORM1_GAMMA],
                                                .ln1_beta = offset[PS_NORM1_BETA],
                                                .b_qkv = offset[PS_B_QKV],
                                                .b_o = offset[PS_B_O],
                                                .ln2_gamma = offset[PS_NORM2_GAMMA],
                                                .ln2_beta = offset[PS_NORM2_BETA],
                                                .b_1 = offset[PS_B_1],
                                                .b_2 = offset[PS_B_2],
                                                .matrix_stride = p->table[second[PS_W_QKV]].offset - offset[PS_W_QKV],
                                                .vector_stride = p->table[second[PS_NORM1_GAMMA]].offset - offset[PS_NORM1_GAMMA]},
                                     .epsilon = PS_NORM_EPSILON,
                                     .dropout = dropout_at(m, PS_DROP_ATTENTION, 0, state, training),
                                     .hidden_dropout = dropout_at(m, PS_DROP_HIDDEN, 0, state, training),
                                     .output_dropout = dropout_at(m, PS_DROP_OUTPUT, 0, state, training),
                                     .norm = m->shape.norm,
                                     .norm_place = m->shape.norm_place,
                                     .activation = m->shape.activation,
                                     .residual_attention = m->shape.residual_attention,
                                     .training = training,
                                     .momentum = PS_BATCHNORM_MOMENTUM};
    for (int t = 0; t < PS_LAYER_STATISTICS && m->shape.norm == PS_NORM_BATCH; t++) {
        sizes.layout.running[t] = p->table[p->statistics[0][t]].offset;
        sizes.layout.running_stride = p->table[p->statistics[above][t]].offset - sizes.layout.running[t];
    }
    return sizes;
}

/* ---- opening ---- */

static int has_copy(const struct ps_kernels *k)
{
    return k->real != k->parameter;
}

/* Whether products of attention take heads where they lie in their rows. */
static int takes_strides(const struct ps_kernels *k, const struct ps_model_shape *shape, const struct ps_model_options *options)
{
    return options->level == PS_LEVEL_GEMM && !options->tiled_attention && k->strided_heads_faster &&
           k->strided_heads_faster(k, ps_patches(shape), shape->d_model / shape->n_heads);
}

/* Whether BatchNorms are folded into the weights that read them, in training. */
static int folds(const struct ps_kernels *k, const struct ps_model_shape *shape, int64_t batch,
                 const struct ps_model_options *options)
{
    return options->level == PS_LEVEL_GEMM && options->epilogue && !options->feed_forward && k->gemm_finish &&
           shape->norm == PS_NORM_BATCH && shape->norm_place == PS_NORM_POST && k->batchnorm_fold_faster &&
           k->batchnorm_fold_faster(k, batch * shape->channels * ps_patches(shape), shape->d_model, shape->d_ff, shape->activation);
}

/* Gradients to unfold, or of padded heads, none yet. */
static enum ps_status clear_gradients(const struct ps_model *m)
{
    const struct ps_shared_cache *s = &m->cache.shared;
    const size_t d = (size_t)m->shape.d_model, f = (size_t)m->shape.d_ff, a = (size_t)(m->shape.n_heads * m->head),
                 layers = (size_t)m->shape.n_layers;
    const struct {
        void *gradient;
        size_t count;
    } each[] = {{s->folded_dw_qkv, layers * d * 3 * a}, {s->folded_db_qkv, layers * 3 * a},     {s->folded_dw_1, layers * d * f},
                {s->folded_db_1, layers * f},           {s->padded_dw_qkv, layers * d * 3 * a}, {s->padded_dw_o, layers * a * d},
                {s->padded_db_qkv, layers * 3 * a}};
    struct ps_device *const device = m->k->device;
    for (size_t i = 0; i < sizeof each / sizeof *each; i++) {
        if (each[i].gradient) {
            PS_TRY(device->fill_zero(device, PS_COMPUTE, each[i].gradient, each[i].count * ps_type_bytes(m->k->parameter)));
        }
    }
    return PS_OK;
}

/* The columns that a head lies in. */
static int64_t head_columns(const struct ps_kernels *k, const struct ps_model_shape *shape, const struct ps_model_options *options)
{
    return options->level == PS_LEVEL_GEMM && options->tiled_attention ? ps_padded_head(k, shape) : shape->d_model / shape->n_heads;
}

static int cache_levels(const struct ps_kernels *k, const struct ps_model_shape *shape, int64_t batch,
                        const struct ps_model_options *options)
{
    return (int)options->level | (options->level == PS_LEVEL_GEMM && options->tiled_attention ? PS_LEVEL_TILED : 0) |
           (takes_strides(k, shape, options) ? PS_LEVEL_STRIDED : 0) |
           (options->level == PS_LEVEL_GEMM && options->feed_forward ? PS_LEVEL_FED : 0) |
           (folds(k, shape, batch, options) ? PS_LEVEL_FOLDED : 0) |
           (head_columns(k, shape, options) * shape->n_heads != shape->d_model ? PS_LEVEL_PADDED : 0);
}

/* The parts of ps_model.constants. */
enum { POSITIONS, ANGLES, NO_BIAS, ZEROS, ONES, CONSTANTS };

/* Where each begins, in elements; the last: how many there are. */
static void place_constants(const struct ps_model_shape *s, int64_t batch, int64_t head, int64_t begin[CONSTANTS + 1])
{
    const int64_t patches = ps_patches(s), rows = s->mask_ratio > 0 ? ps_head_rows(s, batch) : 0;
    const int64_t count[CONSTANTS] = {[POSITIONS] = s->positions == PS_POSITIONS_LEARNED ? 0 : patches * s->d_model,
                                      [ANGLES] = s->positions == PS_POSITIONS_ROPE ? patches * head : 0,
                                      [NO_BIAS] = s->individual_head || s->revin_affine ? ps_head_width(s) : 0,
                                      [ZEROS] = rows,
                                      [ONES] = rows};
    begin[0] = 0;
    for (int i = 0; i < CONSTANTS; i++) {
        begin[i + 1] = begin[i] + count[i];
    }
}

static size_t constants_bytes(const struct ps_kernels *k, const struct ps_model_shape *s, int64_t batch, int64_t head)
{
    int64_t begin[CONSTANTS + 1];
    place_constants(s, batch, head, begin);
    return (size_t)begin[CONSTANTS] * ps_type_bytes(k->parameter);
}

static enum ps_status make_constants(struct ps_model *m)
{
    const struct ps_kernels *k = m->k;
    const enum ps_type type = k->parameter;
    int64_t begin[CONSTANTS + 1];
    place_constants(&m->shape, m->batch, m->head, begin);
    const int64_t all = begin[CONSTANTS], patches = ps_patches(&m->shape);
    m->constants_bytes = constants_bytes(k, &m->shape, m->batch, m->head);
    if (!all) {
        return PS_OK;
    }
    PS_TRY(k->device->allocate(k->device, m->constants_bytes, &m->constants));
    double *values = calloc((size_t)all, sizeof *values);
    float *narrow = malloc((size_t)all * sizeof *narrow);
    enum ps_status status = values && narrow ? PS_OK : ps_fail(PS_DEVICE, "no memory for %lld constants", (long long)all);
    if (status == PS_OK) {
        struct ps_tensor *const parts[CONSTANTS] = {&m->positions, &m->angles, &m->no_bias, &m->zeros, &m->ones};
        const int64_t columns[CONSTANTS] = {[POSITIONS] = m->shape.d_model, [ANGLES] = m->head};
        for (int i = 0; i < CONSTANTS; i++) {
            char *data = (char *)m->constants + (size_t)begin[i] * ps_type_bytes(type);
            const int64_t count = begin[i + 1] - begin[i];
            if (count) {
                *parts[i] = columns[i] ? ps_tensor_2d(data, type, patches, columns[i]) : ps_tensor_1d(data, type, count);
            }
        }
        if (m->positions.data) {
            ps_positions_fill(&m->shape, values);
        }
        if (m->angles.data) {
            ps_rope_angles(&m->shape, m->head, values + begin[ANGLES]);
        }
        for (int64_t i = begin[ONES]; i < all; i++) {
            values[i] = 1;
        }
        for (int64_t i = 0; i < all; i++) {
            narrow[i] = (float)values[i];
        }
        status = k->device->upload(k->device, PS_COMPUTE, m->constants, type == PS_F64 ? (void *)values : (void *)narrow,
                                   m->constants_bytes);
    }
    if (status == PS_OK) {
        status = k->device->synchronize(k->device);
    }
    free(values);
    free(narrow);
    return status;
}

/* What no encoder of level layer has been told of: the key and what it is; NULL: they are asked. */
static const char *beyond_level_layer(const struct ps_model_shape *s, const struct ps_model_options *options)
{
    return s->positions == PS_POSITIONS_ROPE                   ? "model.positions: rope"
           : ps_dropout_rate(s, PS_DROP_ATTENTION_WEIGHTS) > 0 ? "model.dropout_attention_weights"
           : s->norm == PS_NORM_BATCH && options->exchange     ? "model.norm: batch over several ranks"
                                                               : NULL;
}

/* Whether the embedding, or the head, is another than the one that encoders of level layer can do besides. */
static int ends_apart(const struct ps_model_shape *s)
{
    return s->positions != PS_POSITIONS_LEARNED || s->individual_head || s->revin_affine || s->revin_subtract_last ||
           s->patches_from_end || ps_dropout_rate(s, PS_DROP_HEAD) > 0;
}

int ps_model_tiles(const struct ps_kernels *k, const struct ps_model_shape *shape)
{
    return k->attention && !(ps_dropout_rate(shape, PS_DROP_ATTENTION_WEIGHTS) > 0);
}

/* Whether a batch's part in the mean over a step's observed targets is known only once the step's have been counted. */
static int counts_observed(const struct ps_model_options *options, int64_t batch)
{
    return options->loss.missing && options->whole > batch;
}

/* The operations that a variant needs, where the table has them. */
static enum ps_status check_operations(const struct ps_kernels *k, const struct ps_model_shape *s, const struct ps_model_options *o)
{
    const int shared = s->norm == PS_NORM_BATCH && o->exchange;
    const struct {
        int needed, there;
        const char *what;
    } operations[] = {{s->norm == PS_NORM_BATCH, k->batchnorm && k->batchnorm_statistics && k->batchnorm_backward, "norm: batch"},
                      {shared, k->batchnorm_join && o->level != PS_LEVEL_NONE, "norm: batch over several ranks"},
                      {s->positions == PS_POSITIONS_ROPE, k->rope != NULL, "positions: rope"},
                      {s->mask_ratio > 0, k->mask_patches != NULL, "mask_ratio"},
                      {s->individual_head || s->revin_affine, k->channel_affine && k->channel_affine_backward,
                       s->revin_affine ? "revin_affine" : "head: individual"}};
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++) {
        if (operations[i].needed && !operations[i].there) {
            return ps_fail(PS_UNSUPPORTED, "model.%s is not there for backend %s in %s", operations[i].what, k->backend,
                           ps_precision_name(k->precision));
        }
    }
    return PS_OK;
}

size_t ps_model_bytes(const struct ps_model_shape *shape, int64_t batch, const struct ps_model_options *options,
                      const struct ps_kernels *k)
{
    struct ps_parameters *layout;
    if (ps_parameters_layout(shape, &layout) != PS_OK) {
        return 0;
    }
    size_t count = (size_t)layout->count, both = count + (size_t)layout->stored;
    ps_parameters_free(layout);
    return both * ps_type_bytes(k->parameter) + constants_bytes(k, shape, batch, head_columns(k, shape, options)) +
           (has_copy(k) ? count * ps_type_bytes(k->real) : 0) +
           ps_cache_bytes(k, shape, batch, cache_levels(k, shape, batch, options));
}

enum ps_status ps_model_open(const struct ps_kernels *k, const struct ps_model_shape *shape, int64_t batch,
                             const struct ps_model_options *options, struct ps_model **model)
{
    PS_TRY(ps_model_shape_check(shape));
    if (options->level == PS_LEVEL_LAYER && !k->encoder_forward) {
        return ps_fail(PS_UNSUPPORTED, "runtime.fusion: layer is not there for backend %s in %s: take gemm", k->backend,
                       ps_precision_name(k->precision));
    }
    const char *beyond = beyond_level_layer(shape, options);
    if (options->level == PS_LEVEL_LAYER && beyond) {
        return ps_fail(PS_UNSUPPORTED, "runtime.fusion: layer does not serve %s: take auto or gemm", beyond);
    }
    PS_TRY(check_operations(k, shape, options));
    if ((options->loss.kind == PS_LOSS_QUANTILE) != (shape->quantiles > 0) || options->loss.quantiles != shape->quantiles) {
        return ps_fail(PS_USAGE, "train.loss: of %d quantiles, and the head has %lld", options->loss.quantiles,
                       (long long)shape->quantiles);
    }
    if (options->level == PS_LEVEL_GEMM && options->tiled_attention && !k->attention) {
        return ps_fail(PS_UNSUPPORTED, "runtime.attention: tiled is not there for backend %s in %s: take gemm", k->backend,
                       ps_precision_name(k->precision));
    }
    const int64_t pieces = shape->residual_attention ? shape->n_layers : 1; /* residual attention: of all layers side by side */
    if (options->level == PS_LEVEL_GEMM && options->tiled_attention && !ps_model_tiles(k, shape)) {
        return ps_fail(PS_UNSUPPORTED, "runtime.attention: tiled does not serve model.%s on backend %s: take auto or gemm",
                       pieces > 1 ? "residual_attention" : "dropout_attention_weights", k->backend);
    }
    const int64_t patches = ps_patches(shape), head = pieces * (shape->d_model / shape->n_heads);
    const int tiled = options->level == PS_LEVEL_GEMM && options->tiled_attention;
    if (tiled && k->attention_patches && (patches > k->attention_patches || head > k->attention_head)) {
        return ps_fail(PS_UNSUPPORTED,
                       "runtime.attention: tiled serves up to %lld patches and heads of up to %lld columns on backend %s, not %lld "
                       "and %lld: take auto or gemm",
                       (long long)k->attention_patches, (long long)k->attention_head, k->backend, (long long)patches,
                       (long long)head);
    }
    if (tiled && k->attention_head && head > k->attention_head) {
        return ps_fail(
            PS_UNSUPPORTED,
            "runtime.attention: tiled serves heads of up to %lld columns on backend %s in %s, not %lld: take auto or gemm",
            (long long)k->attention_head, k->backend, ps_precision_name(k->precision), (long long)head);
    }
    if (options->level == PS_LEVEL_NONE && k->precision != PS_FP32 && k->precision != PS_FP64) {
        return ps_fail(PS_UNSUPPORTED, "runtime.fusion: none runs in fp32 (and fp64) only, not %s: take gemm",
                       ps_precision_name(k->precision));
    }
    struct ps_model *m = calloc(1, sizeof *m);
    if (!m) {
        return ps_fail(PS_DEVICE, "no memory for the model");
    }
    m->k = k;
    m->shape = *shape;
    m->batch = batch;
    m->options = *options;
    m->options.loss.missing |= shape->mask_ratio > 0; /* a patch that is seen is no target */
    m->head = head_columns(k, shape, options);
    m->strided_heads = takes_strides(k, shape, options);
    m->folded = folds(k, shape, batch, options);
    snprintf(m->kernels, sizeof m->kernels, "%s", ps_level_name(options->level));
    m->gradient_scale = gradient_scale_of(m, batch);
    struct ps_device *device = k->device;
    enum ps_status status = ps_parameters_layout(shape, &m->layout);
    if (status == PS_OK && options->level == PS_LEVEL_LAYER) {
        const struct ps_encoder_sizes sizes = encoder_sizes(m, NULL, 1); /* masks are kept too */
        status = k->encoder_prepare(k, &sizes,
                                    &(struct ps_encoder_shape){.sequences = batch * shape->channels,
                                                               .patches = ps_patches(shape),
                                                               .d_model = shape->d_model,
                                                               .seq_len = shape->seq_len,
                                                               .patch_len = shape->patch_len,
                                                               .pred_len = shape->pred_len,
                                                               .other_loss = !ps_loss_is_plain(&m->options.loss),
                                                               .ends_apart = m->options.loss.missing || ends_apart(shape),
                                                               .other_rate = ps_dropout_rate(shape, PS_DROP_EMBEDDING) !=
                                                                             ps_dropout_rate(shape, PS_DROP_ATTENTION)},
                                    &m->encoder);
        if (status == PS_UNSUPPORTED) {
            char why[512];
            snprintf(why, sizeof why, "%s", ps_error_message());
            status = ps_fail(PS_UNSUPPORTED, "runtime.fusion: layer does not serve this model: %s", why);
        }
        if (status == PS_OK && options->if_faster && m->encoder.fp16_rows && !shape->revin) {
            status = ps_fail(PS_UNSUPPORTED, "rows of level layer in tf32 end at 65504, which windows without RevIN may pass");
        } else if (status == PS_OK && options->if_faster && m->encoder.slower) {
            status =
                ps_fail(PS_UNSUPPORTED, "level layer is slower than level gemm for d_model %lld and %lld sequences of %lld patches",
                        (long long)shape->d_model, (long long)(batch * shape->channels), (long long)ps_patches(shape));
        }
        if (status == PS_OK) {
            snprintf(m->kernels, sizeof m->kernels, "%s", m->encoder.kernels);
            status = device->allocate(device, m->encoder.kept_bytes, &m->kept);
        }
    }
    if (status == PS_OK) {
        size_t needed = ps_model_bytes(shape, batch, options, k), free_bytes, total_bytes;
        status = device->memory(device, &free_bytes, &total_bytes);
        if (status == PS_OK && needed > free_bytes) {
            status = ps_fail(PS_DEVICE,
                             "not enough memory on %s: the model needs %.0f MiB at batch_size %lld, %.0f MiB are free: lower %s",
                             device->name, (double)needed / 0x1p20, (long long)batch, (double)free_bytes / 0x1p20,
                             batch > 1 ? "train.batch_size" : "model.d_model, model.d_ff, model.n_layers or model.seq_len");
        }
    }
    if (status == PS_OK) {
        size_t flat = (size_t)m->layout->count * ps_type_bytes(k->parameter);
        status = device->allocate(device, (size_t)m->layout->stored * ps_type_bytes(k->parameter), &m->parameters);
        if (status == PS_OK && has_copy(k)) {
            status = device->allocate(device, (size_t)m->layout->count * ps_type_bytes(k->real), &m->weights);
        } else if (status == PS_OK) {
            m->weights = m->parameters;
        }
        if (status == PS_OK) {
            status = device->allocate(device, flat, &m->gradients);
        }
    }
    if (status == PS_OK) {
        status = make_constants(m);
    }
    if (status == PS_OK && options->exchange && shape->norm == PS_NORM_BATCH) {
        m->together_bytes = (size_t)((options->exchange->size + 1) * 2 * shape->d_model) * ps_type_bytes(k->statistics);
        status = device->allocate(device, m->together_bytes, &m->together);
    }
    if (status == PS_OK && counts_observed(options, batch)) {
        status = device->allocate(device, sizeof *m->observed, (void **)&m->observed);
    }
    if (status == PS_OK) {
        status = ps_cache_open(k, shape, batch, cache_levels(k, shape, batch, options), &m->cache);
    }
    if (status == PS_OK) {
        status = clear_gradients(m);
    }
    if (status != PS_OK) {
        ps_model_close(m);
        return status;
    }
    if (options->level == PS_LEVEL_GEMM && options->tiled_attention) {
        const struct ps_layer first = layer_of(m, 0, NULL, batch, 0);
        const char *way = ps_layer_attention_way(&first);
        if (way) {
            snprintf(m->kernels, sizeof m->kernels, "%s, attention %s", ps_level_name(options->level), way);
        }
    }
    *model = m;
    return PS_OK;
}

void ps_model_close(struct ps_model *m)
{
    if (!m) {
        return;
    }
    struct ps_device *device = m->k->device;
    size_t count = m->layout ? (size_t)m->layout->count : 0, flat = count * ps_type_bytes(m->k->parameter);
    if (m->weights && m->weights != m->parameters) {
        device->release(device, m->weights, count * ps_type_bytes(m->k->real));
    }
    if (m->parameters) {
        device->release(device, m->parameters, (size_t)m->layout->stored * ps_type_bytes(m->k->parameter));
    }
    if (m->constants) {
        device->release(device, m->constants, m->constants_bytes);
    }
    if (m->gradients) {
        device->release(device, m->gradients, flat);
    }
    if (m->together) {
        device->release(device, m->together, m->together_bytes);
    }
    if (m->observed) {
        device->release(device, m->observed, sizeof *m->observed);
    }
    if (m->kept) {
        device->release(device, m->kept, m->encoder.kept_bytes);
    }
    ps_cache_close(device, &m->cache);
    ps_parameters_free(m->layout);
    free(m);
}

const char *ps_model_kernels(const struct ps_model *m)
{
    return m->kernels;
}

/* The place in the table of the tensor that an element of a flat buffer of that type belongs to; -1: not in the buffer. */
static int place_of(const struct ps_model *m, const void *flat, enum ps_type type, const void *address)
{
    const size_t bytes = (size_t)m->layout->count * ps_type_bytes(type);
    if (!flat || (const char *)address < (const char *)flat || (const char *)address >= (const char *)flat + bytes) {
        return -1;
    }
    const int64_t element = ((const char *)address - (const char *)flat) / (int64_t)ps_type_bytes(type);
    int found = -1;
    for (int t = 0; t < m->layout->n; t++) {
        const int64_t offset = m->layout->table[t].offset;
        if (offset <= element && (found < 0 || offset > m->layout->table[found].offset)) {
            found = t;
        }
    }
    return found;
}

void ps_model_tensor_name(const struct ps_model *m, const void *address, char name[PS_TENSOR_NAME])
{
    int weight = place_of(m, m->weights, m->k->real, address);
    weight = weight < 0 ? place_of(m, m->parameters, m->k->parameter, address) : weight;
    const int gradient = place_of(m, m->gradients, m->k->parameter, address), place = weight < 0 ? gradient : weight;
    if (place >= 0) {
        const char *full = m->layout->table[place].name, *dot = strrchr(full, '.');
        snprintf(name, PS_TENSOR_NAME, "%s%s", weight < 0 ? "d " : "", dot ? dot + 1 : full);
        return;
    }
    const char *buffer = ps_cache_name(&m->cache, m->shape.n_layers, address);
    snprintf(name, PS_TENSOR_NAME, "%s", buffer ? buffer : "");
}

enum ps_status ps_model_refresh_weights(struct ps_model *m)
{
    const struct ps_kernels *k = m->k;
    if (m->weights == m->parameters) {
        return PS_OK;
    }
    return k->strided_copy(k, &(struct ps_strided_copy){.y = ps_tensor_1d(m->weights, k->real, m->layout->count),
                                                        .x = ps_tensor_1d(m->parameters, k->parameter, m->layout->count)});
}

/* ---- the way of one batch ---- */

/* The stream [layers + 1, S, N, d] and one of its parts. */
static struct ps_tensor whole_stream(const struct ps_model *m, int64_t batch)
{
    const int64_t size[4] = {m->shape.n_layers + 1, batch * m->shape.channels, ps_patches(&m->shape), m->shape.d_model};
    return ps_tensor_nd(m->cache.shared.stream, m->k->real, 4, size);
}

static struct ps_tensor flat_tensor(const struct ps_model *m, void *flat, enum ps_type type)
{
    return ps_tensor_1d(flat, type, m->layout->count);
}

/* embed, head: level layer does the embedding too, and the head of a training step. Else pad_weights comes first; `alone`: right
 * before. */
static enum ps_status encode(struct ps_model *m, const struct ps_step_state *state, int64_t batch, int training,
                             const struct ps_embed_forward *embed, const struct ps_head_step *head, int alone)
{
    const struct ps_kernels *k = m->k;
    if (m->options.level == PS_LEVEL_LAYER) {
        return k->encoder_forward(k, &(struct ps_encoder_forward){.stream = whole_stream(m, batch),
                                                                  .weights = flat_tensor(m, m->weights, k->real),
                                                                  .parameters = flat_tensor(m, m->parameters, k->parameter),
                                                                  .sizes = encoder_sizes(m, state, training),
                                                                  .kept = m->kept,
                                                                  .kept_bytes = m->encoder.kept_bytes,
                                                                  .embed = embed,
                                                                  .head = head});
    }
    int normed = 0;
    for (int64_t l = 0; l < m->shape.n_layers; l++) {
        struct ps_layer layer = layer_of(m, l, state, batch, training);
        layer.normed = &normed;
        layer.weight[PS_W_QKV].settled = l > 0 || !alone;
        know_others(m, &layer, state, batch, training);
        PS_TRY(m->options.level == PS_LEVEL_NONE ? ps_layer_none_forward(&layer) : ps_layer_gemm_forward(&layer));
    }
    return PS_OK;
}

/* Gradients begin .. end - 1, over the ranks. */
static enum ps_status sum_range(struct ps_model *m, int64_t begin, int64_t end, int beside)
{
    struct ps_exchange *const e = m->place.sum;
    void *const values = (char *)m->gradients + (size_t)begin * ps_type_bytes(m->k->parameter);
    return (beside ? e->sum_beside : e->sum)(e, values, m->k->parameter, end - begin);
}

/* Behind a layer's backward, which leaves its weights' gradients as they are summed; biases' and norms' are still to come. With
 * those of the layers above that wait, where they are too few. */
static enum ps_status sum_layer(struct ps_model *m, int64_t layer)
{
    const struct ps_exchange *const e = m->place.sum;
    const int64_t begin = weights_begin(m, layer), end = m->unsummed;
    if (!e || !e->sum_beside || m->options.level == PS_LEVEL_LAYER ||
        (size_t)(end - begin) * ps_type_bytes(m->k->parameter) < e->part) {
        return PS_OK;
    }
    m->unsummed = begin;
    PS_TRY(unwrap_gradients(m, layer));
    return sum_range(m, begin, end, 1);
}

enum ps_status ps_model_sum_gradients(struct ps_model *m)
{
    const int64_t begun = m->unsummed, behind = weights_begin(m, m->shape.n_layers);
    if (!m->place.sum) {
        return PS_OK;
    }
    if (begun == behind) {
        return sum_range(m, 0, m->layout->count, 0);
    }
    PS_TRY(sum_range(m, 0, begun, 0));
    PS_TRY(sum_range(m, behind, m->layout->count, 0));
    return m->place.sum->join(m->place.sum);
}

enum ps_status ps_model_encode(struct ps_model *m, const struct ps_step_state *state, int64_t batch, int training)
{
    PS_TRY(pad_weights(m));
    return encode(m, state, batch, training, NULL, NULL, is_padded(m));
}

static enum ps_status begin_head_gradients(void *model)
{
    struct ps_model *m = model;
    return ps_head_gradients(m, &m->head_rest, 0);
}

/* embed, head, update: level layer does the embedding's backward too, the rest of the head's, and AdamW. */
static enum ps_status encode_backward(struct ps_model *m, const struct ps_step_state *state, int64_t batch, int training,
                                      const struct ps_embed_backward *embed, const struct ps_head_gradient *head,
                                      const struct ps_adamw *update)
{
    const struct ps_kernels *k = m->k;
    if (m->options.level == PS_LEVEL_LAYER) {
        struct ps_tensor stream = whole_stream(m, batch);
        struct ps_tensor du = ps_tensor_nd(m->cache.shared.gradient, k->real, 3, stream.size + 1);
        return k->encoder_backward(k, &(struct ps_encoder_backward){.du = du,
                                                                    .gradients = flat_tensor(m, m->gradients, k->parameter),
                                                                    .dy = du,
                                                                    .stream = stream,
                                                                    .weights = flat_tensor(m, m->weights, k->real),
                                                                    .parameters = flat_tensor(m, m->parameters, k->parameter),
                                                                    .sizes = encoder_sizes(m, state, training),
                                                                    .kept = m->kept,
                                                                    .kept_bytes = m->encoder.kept_bytes,
                                                                    .embed = embed,
                                                                    .head = head,
                                                                    .update = update,
                                                                    .headed = embed && m->encoder.span >= PS_SPAN_LOSS});
    }
    struct ps_gradient_notes notes = {0};
    m->unfolding = m->folded && training;
    m->wrapped = is_padded(m) || m->unfolding ? m->shape.n_layers : 0;
    struct ps_work head_gradients = {.run = begin_head_gradients, .argument = m};
    for (int64_t l = m->shape.n_layers; l-- > 0;) {
        struct ps_layer layer = layer_of(m, l, state, batch, training);
        layer.notes = &notes;
        layer.beside_attention = layer.last ? &head_gradients : NULL;
        know_others(m, &layer, state, batch, training);
        PS_TRY(m->options.level == PS_LEVEL_NONE ? ps_layer_none_backward(&layer) : ps_layer_gemm_backward(&layer));
        PS_TRY(sum_layer(m, l));
    }
    return PS_OK;
}

enum ps_status ps_model_encode_backward(struct ps_model *m, const struct ps_step_state *state, int64_t batch, int training)
{
    PS_TRY(encode_backward(m, state, batch, training, NULL, NULL, NULL));
    return unwrap_gradients(m, 0);
}

/* Windows to the last layer's output, in one operation where the encoder does the embedding; it does the head too then, if there
 * is one. */
static enum ps_status embed_and_encode(struct ps_model *m, const struct ps_windows *windows, const struct ps_step_state *state,
                                       int64_t batch, int training, const struct ps_head_step *head)
{
    struct ps_dropout dropout = dropout_at(m, PS_DROP_EMBEDDING, 0, state, training);
    if (m->encoder.span >= PS_SPAN_EMBEDDING) {
        const struct ps_embed_forward embed = ps_embed_forward_of(m, windows, state, batch, dropout);
        return encode(m, state, batch, training, &embed, head, 0);
    }
    PS_TRY(pad_weights(m));
    PS_TRY(ps_embedding_forward(m, windows, state, batch, dropout));
    return encode(m, state, batch, training, NULL, NULL, 0);
}

enum ps_status ps_model_forward(struct ps_model *m, const struct ps_windows *windows, const struct ps_step_state *state,
                                int64_t batch, int training)
{
    PS_TRY(embed_and_encode(m, windows, state, batch, training, NULL));
    return ps_head_forward(m, batch, ps_model_stream(m, m->shape.n_layers, batch), ps_head_dropout(m, state, training));
}

/* ---- the step ---- */

enum {
    /* Elements of W_h from which on it is updated beside the encoder's backward, where that is of many kernels: they are 90 MB and
     * 20 us of their own, against two launches more. */
    EARLY_HEAD = 1 << 21,
    /* And those of layers' weights and W_h from which on they are updated beside the embedding's: fewer are not worth the launches.
     */
    EARLY_LAYERS = 3 << 18,
};

static int updates_early(const struct ps_model *m)
{
    return m->k->beside && m->options.level != PS_LEVEL_LAYER &&
           ps_parameter_count(&m->layout->table[m->layout->w_h]) >= EARLY_HEAD;
}

/* AdamW of elements begin .. end - 1. */
static enum ps_status update_part(const struct ps_model *m, const struct ps_adamw *update, int64_t begin, int64_t end)
{
    struct ps_adamw part = *update;
    struct ps_tensor *const flat[] = {&part.parameters, &part.gradients, &part.m, &part.v, &part.copy};
    for (size_t i = 0; i < sizeof flat / sizeof *flat; i++) {
        *flat[i] = flat[i]->data ? ps_tensor_slice(*flat[i], 0, begin, end - begin) : *flat[i];
    }
    part.decayed -= begin;
    part.more = end < m->layout->count;
    return m->k->adamw(m->k, &part);
}

/* Behind ps_head_train: W_h's gradient is whole, or will be where this begins, and nothing reads W_h any more. */
static enum ps_status update_head(const struct ps_model *m, const struct ps_adamw *update)
{
    PS_TRY(ps_beside(m->k, PS_BESIDE_BEGIN));
    return ps_beside_end(m->k, update_part(m, update, weights_begin(m, m->shape.n_layers), m->layout->decayed));
}

/* Behind all gradients: where weights from element `updated` on have been updated, of those before and of what does not decay;
 * layout->decayed: none has been. */
static enum ps_status update_rest(const struct ps_model *m, const struct ps_adamw *update, int64_t updated)
{
    if (updated == m->layout->decayed) {
        return m->k->adamw(m->k, update);
    }
    PS_TRY(update_part(m, update, 0, updated));
    return update_part(m, update, m->layout->decayed, m->layout->count);
}

/* Behind the head, down to the embedding's gradients. Sums over rows wait until the layers' are all there, and are then added
 * beside the embedding's; behind them there what folded norms' and padded heads' weights have is taken apart, and with `update`
 * weights from the first layer's up to element `end` are updated. */
static enum ps_status windows_backward(struct ps_model *m, const struct ps_step_state *state, int64_t batch,
                                       struct ps_dropout dropout, const struct ps_adamw *update, int64_t end)
{
    const struct ps_kernels *k = m->k;
    const struct ps_shared_cache *s = &m->cache.shared;
    PS_TRY(s->sums ? k->later_sums(k, s->sums, PS_LATER_SUMS * ps_type_bytes(k->parameter)) : PS_OK);
    enum ps_status status = encode_backward(m, state, batch, 1, NULL, NULL, NULL);
    const int beside = status == PS_OK && (s->sums || update);
    status = beside ? ps_beside(k, PS_BESIDE_BEGIN) : status;
    const enum ps_status added = s->sums ? k->later_sums(k, NULL, 0) : PS_OK; /* behind an error too: nothing waits any more */
    status = status == PS_OK ? added : status;
    status = status == PS_OK ? unwrap_gradients(m, 0) : status;
    status = status == PS_OK && update ? update_part(m, update, weights_begin(m, 0), end) : status;
    status = beside ? ps_beside_end(k, status) : status;
    return status == PS_OK ? ps_embedding_backward(m, batch, dropout) : status;
}

/* A training pass; with AdamW, when there is `update`. */
static enum ps_status train(struct ps_model *m, const struct ps_windows *windows, struct ps_step_state *state, int64_t batch,
                            const struct ps_adamw *update)
{
    struct ps_dropout dropout = dropout_at(m, PS_DROP_EMBEDDING, 0, state, 1);
    const struct ps_head_step head = ps_head_step_of(m, windows, state, batch, ps_partial_rows(batch * m->shape.channels));
    const struct ps_head_step *within = m->encoder.span >= PS_SPAN_LOSS ? &head : NULL; /* never of another loss */
    m->head_rest.state = NULL;
    PS_TRY(embed_and_encode(m, windows, state, batch, 1, within));
    const struct ps_embed_backward embed = ps_embed_backward_of(m, batch, dropout);
    const int early = update && updates_early(m);
    const int embeds_apart = m->encoder.span < PS_SPAN_EMBEDDING; /* the embedding's backward is an operation of its own */
    const int64_t end = early ? weights_begin(m, m->shape.n_layers) : m->layout->decayed, begin = weights_begin(m, 0);
    const int apart = update && m->k->beside && embeds_apart && end - begin >= EARLY_LAYERS;
    if (ps_model_steps(m)) {
        const struct ps_head_gradient rest = ps_head_gradient_of(m, state, within);
        return encode_backward(m, state, batch, 1, &embed, &rest, update);
    }
    /* Attention leaves more of a multiprocessor to what runs beside it than the products before it do. A large W_h's gradient
     * begins at once, since AdamW may follow it. */
    const int put_off = m->k->beside && m->options.level == PS_LEVEL_GEMM && !updates_early(m);
    PS_TRY(ps_head_train(m, windows, state, batch, within, 0, put_off ? &m->head_rest : NULL));
    PS_TRY(early ? update_head(m, update) : PS_OK);
    PS_TRY(embeds_apart ? windows_backward(m, state, batch, dropout, apart ? update : NULL, end)
                        : encode_backward(m, state, batch, 1, &embed, NULL, NULL));
    PS_TRY(ps_beside(m->k, PS_BESIDE_JOIN));
    return update ? update_rest(m, update, apart ? begin : end) : PS_OK;
}

enum ps_status ps_model_gradients(struct ps_model *m, const struct ps_windows *windows, struct ps_step_state *state, int64_t batch)
{
    return train(m, windows, state, batch, NULL);
}

enum ps_status ps_model_head_gradients(struct ps_model *m, const struct ps_windows *windows, struct ps_step_state *state,
                                       int64_t batch)
{
    PS_TRY(embed_and_encode(m, windows, state, batch, 0, NULL));
    PS_TRY(ps_head_train(m, windows, state, batch, NULL, 1, NULL));
    return ps_beside(m->k, PS_BESIDE_JOIN);
}

enum ps_status ps_model_attend(struct ps_model *m)
{
    for (int64_t l = 0; l < m->shape.n_layers && m->together; l++) {
        const struct ps_layer layer = layer_of(m, l, NULL, 0, 1);
        PS_TRY(ps_norm_attend(&layer, PS_NORM_1));
        PS_TRY(ps_norm_attend(&layer, PS_NORM_2));
    }
    for (int64_t l = m->shape.n_layers; l-- > 0;) {
        const struct ps_layer layer = layer_of(m, l, NULL, 0, 1);
        for (int norm = 0; norm < 2 && m->together; norm++) {
            PS_TRY(ps_norm_attend_backward(&layer));
        }
        PS_TRY(sum_layer(m, l));
    }
    return PS_OK;
}

enum ps_status ps_model_count_observed(struct ps_model *m, const struct ps_windows *windows, const struct ps_step_state *state,
                                       int64_t batch)
{
    PS_TRY(ps_gather_targets_of(m, windows, state, batch));
    return m->k->count_observed(
        m->k, &(struct ps_count_observed){.count = ps_tensor_1d(m->observed, PS_F64, 1), .targets = ps_target_tensor(m, batch)});
}

int ps_model_steps(const struct ps_model *m)
{
    return m->encoder.span >= PS_SPAN_UPDATE;
}

enum ps_status ps_model_step(struct ps_model *m, const struct ps_windows *windows, struct ps_step_state *state, int64_t batch,
                             const struct ps_adamw *update)
{
    if (update->clip_norm > 0 || update->skip || update->held > 0) {
        return ps_fail(PS_UNSUPPORTED, "a step that is clipped, left out or held needs all gradients first");
    }
    return train(m, windows, state, batch, update);
}

enum ps_status ps_model_errors(struct ps_model *m, const struct ps_windows *windows, const struct ps_step_state *state,
                               int64_t batch, struct ps_tensor errors, int64_t slot_windows)
{
    const struct ps_shared_cache *s = &m->cache.shared;
    PS_TRY(ps_gather_targets_of(m, windows, state, batch));
    return m->k->forecast_error(m->k, &(struct ps_forecast_error){.errors = errors,
                                                                  .x = ps_head_tensor(m, s->head_out, batch),
                                                                  .bias = ps_head_bias(m),
                                                                  .mean = ps_head_mean(m, batch),
                                                                  .std = ps_head_std(m, batch),
                                                                  .targets = ps_target_tensor(m, batch),
                                                                  .state = state,
                                                                  .slot_windows = slot_windows,
                                                                  .loss = m->options.loss});
}

enum ps_status ps_model_forecast(struct ps_model *m, int64_t batch, struct ps_tensor y)
{
    const struct ps_shared_cache *s = &m->cache.shared;
    return m->k->forecast(m->k, &(struct ps_forecast){.y = y,
                                                      .x = ps_head_tensor(m, s->head_out, batch),
                                                      .bias = ps_head_bias(m),
                                                      .mean = ps_head_mean(m, batch),
                                                      .std = ps_head_std(m, batch),
                                                      .quantiles = m->shape.quantiles});
}

int64_t ps_model_targets(const struct ps_model_shape *s)
{
    return s->mask_ratio > 0 ? ps_head_rows(s, 1) * s->patch_len : s->channels * s->pred_len;
}

void ps_model_points(const struct ps_loss *loss, int64_t rows, int64_t steps, const float *quantiles, float *points)
{
    const int64_t outputs = ps_loss_outputs(loss), point = ps_loss_point(loss);
    for (int64_t i = 0; i < rows * steps; i++) {
        points[i] = quantiles[(i / steps * outputs + point) * steps + i % steps];
    }
}

double ps_model_step_flops(const struct ps_model_shape *shape, int64_t batch)
{
    double S = (double)(batch * shape->channels), N = (double)ps_patches(shape), R = S * N, d = (double)shape->d_model;
    double f = (double)shape->d_ff, P = (double)shape->patch_len, H = (double)ps_head_width(shape);
    /* Multiply-adds of the products forward; backward costs twice as many, but the embedding has no input gradient
     * unless RevIN's affine wants it. */
    double matrices = shape->activation == PS_SWIGLU ? 3 : 2;
    double layer = R * d * (4 * d + matrices * f) + 2 * S * N * N * d,
           head = (double)(ps_head_rows(shape, batch) * ps_head_columns(shape)) * H, embedding = R * P * d;
    return 2 * (3 * ((double)shape->n_layers * layer + head) + (shape->revin_affine ? 3 : 2) * embedding);
}
