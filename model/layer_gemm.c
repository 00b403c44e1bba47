/* Level gemm: 8 products and 7 kinds of sub-kernel forward, 14 and 6 backward (head_split and head_merge count as one); fewer
 * products with merge_qkv, and neither split nor merge where products take heads by row. Buffers that are done with are used again
 * in place, so a layer keeps only what backward reads. A layer is two branches and two norms: pre-norm or post-norm is how they are
 * put together, at the end of each direction. */
#include "model/layer.h"

/* What A v reads: A, or drop(A) beside it. */
static enum ps_status weights_of(const struct ps_layer *l, struct ps_tensor *weights)
{
    const struct ps_kernels *k = l->k;
    *weights = ps_layer_attention(l, l->cache->attention);
    if (!l->weights_dropout.threshold) {
        return PS_OK;
    }
    const struct ps_tensor attention = *weights;
    weights->data = l->shared->dropped;
    return k->drop(k, &(struct ps_drop){.y = *weights, .x = attention, .dropout = l->weights_dropout});
}

/* A part of rows [R, columns] as matrices of heads, or of `split`, what they have been split to. */
static struct ps_tensor heads_of(const struct ps_layer *l, void *rows, int64_t columns, void *split, int64_t part)
{
    return l->strided_heads ? ps_layer_head_rows(l, rows, columns, part) : ps_layer_head(l, split, part);
}

/* Scores or weights [S h, N, N] as products of such heads take them. */
static struct ps_tensor beside_heads(const struct ps_layer *l, struct ps_tensor scores)
{
    return l->strided_heads ? ps_tensor_reshape(scores, 4, (int64_t[]){l->S, l->h, l->N, l->N}) : scores;
}

/* merged = drop(A) v from rows of q, k, v, A = softmax(scores), scores = q k' / sqrt(e), and with residual attention those of the
 * layers below added: by heads, three sub-kernels between two products, or one where products take heads by row; */
static enum ps_status heads_forward(const struct ps_layer *l, struct ps_tensor rows)
{
    const struct ps_kernels *k = l->k;
    const struct ps_layer_cache *c = l->cache;
    const struct ps_shared_cache *s = l->shared;
    struct ps_tensor attention = ps_layer_attention(l, c->attention), weights, head[3];
    struct ps_tensor scores = l->residual_attention ? ps_layer_attention(l, s->scores) : attention;
    if (!l->strided_heads) {
        PS_TRY(k->head_split(k, &(struct ps_head_split){.heads = ps_layer_heads(l, c->heads, 3), .rows = rows}));
    }
    for (int part = 0; part < 3; part++) {
        head[part] = heads_of(l, rows.data, 3 * l->a, c->heads, part);
    }
    PS_TRY(ps_product(k, beside_heads(l, scores), head[0], ps_transposed(head[1]), l->scale, l->residual_attention && !l->first));
    PS_TRY(k->softmax(k, &(struct ps_softmax){.y = attention, .x = scores}));
    PS_TRY(weights_of(l, &weights));
    PS_TRY(ps_product(k, heads_of(l, c->merged, l->a, s->mixed, 0), beside_heads(l, weights), head[2], 1, 0));
    return l->strided_heads ? PS_OK
                            : k->head_merge(k, &(struct ps_head_merge){.rows = ps_layer_rows(l, c->merged, l->a),
                                                                       .heads = ps_layer_heads(l, s->mixed, 1)});
}

/* Part 0 (q) or 1 (k) of rows [R, 3a], or their gradients; of residual attention those of this layer and of all below it, a piece
 * of each head's columns a layer: the sum of the layers' scores is then one product. They lie `distance` elements apart from
 * `lowest` on. */
static struct ps_tensor scored(const struct ps_layer *l, void *own, void *lowest, int64_t distance, int64_t part)
{
    struct ps_tensor t = ps_layer_head_rows(l, l->residual_attention ? lowest : own, 3 * l->a, part);
    if (l->residual_attention && !l->first) {
        t.rank = 5;
        t.size[4] = t.size[3];
        t.stride[4] = t.stride[3];
        t.size[3] = l->index + 1;
        t.stride[3] = distance;
    }
    return t;
}

static struct ps_tensor scored_rows(const struct ps_layer *l, int64_t part)
{
    const int64_t bytes = (char *)l->cache->heads - (char *)l->lowest->heads; /* every layer's cache is as long */
    const int64_t distance = l->index ? bytes / l->index / (int64_t)ps_type_bytes(l->k->real) : 0;
    return scored(l, l->cache->heads, l->lowest->heads, distance, part);
}

/* The gradients of q, k, v by row, [R, 3a]: of residual attention by tiles each layer's own, since those above it add to them. */
static struct ps_tensor gradient_rows(const struct ps_layer *l)
{
    const int64_t count = l->residual_attention && l->tiled_attention ? l->index * 3 * l->R * l->a : 0;
    return ps_layer_rows(l, (char *)l->shared->rows + (size_t)count * ps_type_bytes(l->k->real), 3 * l->a);
}

/* or by tiles, in one. */
static struct ps_attention tiled(const struct ps_layer *l)
{
    const struct ps_layer_cache *c = l->cache;
    return (struct ps_attention){.mixed = ps_layer_head_rows(l, c->merged, l->a, 0),
                                 .logsum = ps_layer_head_statistics(l, c->logsum),
                                 .q = scored_rows(l, 0),
                                 .k = scored_rows(l, 1),
                                 .v = ps_layer_head_rows(l, c->heads, 3 * l->a, 2),
                                 .scale = l->scale};
}

static enum ps_status tiled_forward(const struct ps_layer *l)
{
    const struct ps_attention attention = tiled(l);
    return l->k->attention(l->k, &attention);
}

const char *ps_layer_attention_way(const struct ps_layer *l)
{
    const struct ps_attention attention = tiled(l);
    return l->k->way ? l->k->way(l->k, PS_OP_attention, &attention) : NULL;
}

/* The product with what follows it in one, where kernels have that and serve it; else *done is 0 and nothing has been done. */
static enum ps_status finish(const struct ps_layer *l, const struct ps_gemm_finish *whole, int *done)
{
    *done = 0;
    const int activated = whole->finish == PS_FINISH_ACTIVATION || whole->finish == PS_FINISH_SLOPE;
    if (!l->epilogue || !l->k->gemm_finish || (activated && whole->activation == PS_SWIGLU)) {
        return PS_OK;
    }
    const enum ps_status status = l->k->gemm_finish(l->k, whole);
    *done = status != PS_UNSUPPORTED;
    return *done ? status : PS_OK;
}

/* ---- a BatchNorm folded into what reads it ---- */

/* A weight and its bias, and their gradients, as products take them: where `line` is there, norm's scale and shift [2, d], with the
 * norm in them, and the rows are its input; else as they are. given: where what the norm gives may be written after all. */
struct folded {
    int w, b; /* which of the layer's parameters */
    struct ps_tensor line, weight, bias, dweight, dbias, given;
    struct ps_layer_norm norm;
};

/* A layer's part of a buffer of `count` parameters a layer. */
static void *part_of(const struct ps_layer *l, void *all, int64_t layer, int64_t count)
{
    return (char *)all + (size_t)(layer * count) * ps_type_bytes(l->k->parameter);
}

/* `lines` of all layers, and `layer` that the norm is of; NULL: none is folded. */
static struct folded folded_of(const struct ps_layer *l, int w, int b, void *lines, int64_t layer, void *bias, void *dweights,
                               void *dbiases)
{
    struct folded f = {
        .w = w, .b = b, .weight = l->weight[w], .bias = l->weight[b], .dweight = l->gradient[w], .dbias = l->gradient[b]};
    if (lines) {
        f.line = ps_tensor_2d(part_of(l, lines, layer, 2 * l->d), l->k->parameter, 2, l->d);
        f.weight.data = l->shared->folded_w;
        f.weight.settled = 0;
        f.bias.data = bias;
        f.dweight.data = part_of(l, dweights, l->index, ps_tensor_count(&f.dweight));
        f.dbias.data = part_of(l, dbiases, l->index, ps_tensor_count(&f.dbias));
    }
    return f;
}

/* W_qkv, behind the layer below's norm 2. */
static struct folded folded_qkv(const struct ps_layer *l)
{
    const struct ps_shared_cache *s = l->shared;
    struct folded f = folded_of(l, PS_W_QKV, PS_B_QKV, l->folded && !l->first ? s->norm2_lines : NULL, l->index - 1,
                                s->folded_b_qkv, s->folded_dw_qkv, s->folded_db_qkv);
    f.norm = l->below_norm2;
    f.given = l->u;
    return f;
}

/* W_1, behind norm 1. */
static struct folded folded_1(const struct ps_layer *l)
{
    const struct ps_shared_cache *s = l->shared;
    const struct ps_layer_cache *c = l->cache;
    struct folded f =
        folded_of(l, PS_W_1, PS_B_1, l->folded ? s->norm1_lines : NULL, l->index, c->folded_b_1, s->folded_dw_1, s->folded_db_1);
    f.norm = ps_layer_norm_of(l, PS_NORM_1);
    f.given = ps_layer_rows(l, c->norm1_out, l->d);
    return f;
}

static enum ps_status fold(const struct ps_layer *l, const struct folded *f)
{
    if (!f->line.data) {
        return PS_OK;
    }
    return l->k->batchnorm_fold(l->k, &(struct ps_batchnorm_fold){.w_out = f->weight,
                                                                  .bias_out = f->bias,
                                                                  .scale = ps_layer_half(f->line, 0),
                                                                  .shift = ps_layer_half(f->line, 1),
                                                                  .w = l->weight[f->w],
                                                                  .bias = l->weight[f->b],
                                                                  .mean = f->norm.mean,
                                                                  .var = f->norm.spread,
                                                                  .gamma = f->norm.gamma,
                                                                  .beta = f->norm.beta,
                                                                  .epsilon = PS_NORM_EPSILON});
}

/* ---- a layer's two branches ---- */

/* y = residual + drop(x weight + bias), or what the norm that is folded gives of the residual. `next`, where there is one: the norm
 * that reads y. Of a BatchNorm its statistics too; another one's whole output where that is served in one, as *normed tells. */
static enum ps_status branch_end(const struct ps_layer *l, struct ps_tensor y, struct ps_tensor x, struct ps_tensor weight,
                                 struct ps_tensor bias, struct ps_tensor residual, const struct folded *behind,
                                 struct ps_dropout dropout, const struct ps_layer_norm *next, int *normed)
{
    const struct ps_kernels *k = l->k;
    const int counted = next && l->norm == PS_NORM_BATCH && l->training;
    struct ps_gemm_finish whole = {
        .c = y, .a = x, .b = weight, .bias = bias, .addend = residual, .finish = PS_FINISH_RESIDUAL, .dropout = dropout};
    if (behind->line.data) {
        whole.addend_scale = ps_layer_half(behind->line, 0);
        whole.addend_shift = ps_layer_half(behind->line, 1);
    }
    struct ps_layer_norm mine = {.momentum = 0};
    if (counted) {
        mine = ps_norm_mine(l, next);
        whole.mean = mine.mean;
        whole.var = mine.spread;
        whole.running_mean = mine.running_mean;
        whole.running_var = mine.running_var;
        whole.momentum = mine.momentum;
    }
    int done = 0;
    if (next && l->norm != PS_NORM_BATCH) {
        struct ps_gemm_finish with = whole;
        with.normed = next->y;
        with.row_mean = next->mean;
        with.rstd = next->spread;
        with.gamma = next->gamma;
        with.beta = next->beta;
        with.epsilon = PS_NORM_EPSILON;
        PS_TRY(finish(l, &with, &done));
    }
    *normed = done;
    if (!done) {
        PS_TRY(finish(l, &whole, &done));
    }
    if (done) {
        return counted ? ps_norm_join(l, next) : PS_OK;
    }
    if (behind->line.data) { /* refused, as of sums over more rows than there is room for: the norm's pass after all */
        PS_TRY(k->batchnorm(k, &(struct ps_batchnorm){.y = behind->given,
                                                      .x = residual,
                                                      .mean = behind->norm.mean,
                                                      .var = behind->norm.spread,
                                                      .gamma = behind->norm.gamma,
                                                      .beta = behind->norm.beta,
                                                      .epsilon = PS_NORM_EPSILON}));
        residual = behind->given;
    }
    if (l->epilogue && !dropout.threshold && !counted) {
        const enum ps_status status =
            k->gemm_bias(k, &(struct ps_gemm_bias){.c = y, .a = x, .b = weight, .bias = bias, .addend = residual});
        if (status != PS_UNSUPPORTED) {
            return status;
        }
    }
    PS_TRY(ps_product(k, y, x, weight, 1, 0));
    if (counted && k->bias_residual_statistics) {
        PS_TRY(k->bias_residual_statistics(k, &(struct ps_bias_residual_statistics){.y = y,
                                                                                    .mean = mine.mean,
                                                                                    .var = mine.spread,
                                                                                    .running_mean = mine.running_mean,
                                                                                    .running_var = mine.running_var,
                                                                                    .x = y,
                                                                                    .bias = bias,
                                                                                    .residual = residual,
                                                                                    .dropout = dropout,
                                                                                    .momentum = mine.momentum}));
        return ps_norm_join(l, next);
    }
    PS_TRY(k->bias_residual_add(
        k, &(struct ps_bias_residual_add){.y = y, .x = y, .bias = bias, .residual = residual, .dropout = dropout}));
    return counted ? ps_norm_statistics(l, next, y) : PS_OK;
}

/* y = residual + drop(attention(a) W_o + b_o) */
static enum ps_status attention_branch(const struct ps_layer *l, struct ps_tensor y, struct ps_tensor a, struct ps_tensor residual,
                                       const struct ps_layer_norm *next, int *normed)
{
    const struct ps_kernels *k = l->k;
    const struct folded qkv = folded_qkv(l);
    const struct ps_tensor *w = l->weight, bias = qkv.bias;
    PS_TRY(fold(l, &qkv));
    const int by_row = l->tiled_attention || l->strided_heads;
    struct ps_tensor rows = ps_layer_rows(l, by_row ? l->cache->heads : l->shared->rows, 3 * l->a);
    int parts = l->merge_qkv ? 1 : 3, biased = l->epilogue;
    for (int p = 0; p < parts; p++) {
        int64_t columns = 3 * l->a / parts;
        struct ps_tensor part = ps_tensor_slice(rows, 1, p * columns, columns);
        struct ps_tensor weight = ps_tensor_slice(qkv.weight, 1, p * columns, columns);
        enum ps_status status = PS_UNSUPPORTED;
        if (biased) {
            status = k->gemm_bias(
                k, &(struct ps_gemm_bias){.c = part, .a = a, .b = weight, .bias = ps_tensor_slice(bias, 0, p * columns, columns)});
            biased = status != PS_UNSUPPORTED; /* the parts are alike */
        }
        PS_TRY(status == PS_UNSUPPORTED ? ps_product(k, part, a, weight, 1, 0) : status);
    }
    if (!biased) {
        PS_TRY(k->bias_add(k, &(struct ps_bias_add){.y = rows, .bias = bias}));
    }
    PS_TRY(ps_layer_rope(l, rows, 0));
    PS_TRY(l->tiled_attention ? tiled_forward(l) : heads_forward(l, rows));
    return branch_end(l, y, ps_layer_rows(l, l->cache->merged, l->a), w[PS_W_O], w[PS_B_O], residual, &qkv, l->attention_dropout,
                      next, normed);
}

/* y = residual + drop(drop(activation(a W_1 + b_1)) W_2 + b_2) */
static enum ps_status feed_forward_branch(const struct ps_layer *l, struct ps_tensor y, struct ps_tensor a,
                                          struct ps_tensor residual, const struct ps_layer_norm *next, int *normed)
{
    const struct ps_kernels *k = l->k;
    const struct ps_tensor *w = l->weight;
    if (l->feed_forward) {
        *normed = 0;
        PS_TRY(k->feed_forward(k, &(struct ps_feed_forward){.y = y,
                                                            .x = a,
                                                            .w_1 = w[PS_W_1],
                                                            .b_1 = w[PS_B_1],
                                                            .w_2 = w[PS_W_2],
                                                            .b_2 = w[PS_B_2],
                                                            .residual = residual,
                                                            .hidden_dropout = l->hidden_dropout,
                                                            .output_dropout = l->output_dropout,
                                                            .activation = l->activation}));
        return next && l->norm == PS_NORM_BATCH && l->training ? ps_norm_statistics(l, next, y) : PS_OK;
    }
    const struct folded w_1 = folded_1(l);
    struct ps_tensor inner = ps_layer_rows(l, l->cache->hidden_in, l->inner), hidden = ps_layer_rows(l, l->cache->hidden, l->f);
    const struct ps_tensor nothing = {.data = NULL};
    int done;
    PS_TRY(fold(l, &w_1));
    PS_TRY(finish(l,
                  &(struct ps_gemm_finish){.c = hidden,
                                           .kept = l->training ? inner : nothing,
                                           .a = a,
                                           .b = w_1.weight,
                                           .bias = w_1.bias,
                                           .finish = PS_FINISH_ACTIVATION,
                                           .activation = l->activation,
                                           .dropout = l->hidden_dropout},
                  &done));
    *l->slope_kept = done;
    if (!done) {
        PS_TRY(ps_product(k, inner, a, w_1.weight, 1, 0));
        PS_TRY(k->bias_activation(
            k, &(struct ps_bias_activation){
                   .y = hidden, .x = inner, .bias = w_1.bias, .dropout = l->hidden_dropout, .activation = l->activation}));
    }
    return branch_end(l, y, hidden, w[PS_W_2], w[PS_B_2], residual, &w_1, l->output_dropout, next, normed);
}

/* What the layer reads: the stream, or where its norm is folded that norm's input. */
static struct ps_tensor stream_of(const struct ps_layer *l)
{
    return l->folded && !l->first ? l->below_norm2.x : l->u;
}

enum ps_status ps_layer_gemm_forward(const struct ps_layer *l)
{
    const struct ps_layer_cache *c = l->cache;
    const struct ps_layer_norm norm1 = ps_layer_norm_of(l, PS_NORM_1), norm2 = ps_layer_norm_of(l, PS_NORM_2);
    struct ps_tensor first = ps_layer_rows(l, c->norm1_out, l->d), residual = ps_layer_rows(l, c->residual, l->d);
    int normed;
    if (l->norm_place == PS_NORM_POST) {
        struct ps_tensor sum = ps_layer_rows(l, c->sum, l->d), u = stream_of(l);
        PS_TRY(attention_branch(l, residual, u, u, &norm1, &normed));
        if (l->folded) { /* the layer above reads the sum likewise */
            PS_TRY(feed_forward_branch(l, sum, residual, residual, &norm2, &normed));
            return l->last ? ps_norm_forward(l, PS_NORM_2, l->y, sum, 1) : PS_OK;
        }
        PS_TRY(normed ? PS_OK : ps_norm_forward(l, PS_NORM_1, first, residual, 1));
        PS_TRY(feed_forward_branch(l, sum, first, first, &norm2, &normed));
        return normed ? PS_OK : ps_norm_forward(l, PS_NORM_2, l->y, sum, 1);
    }
    const int by_row = l->norm != PS_NORM_BATCH; /* a BatchNorm's statistics are another pass's here */
    struct ps_tensor second = ps_layer_rows(l, c->norm2_out, l->d);
    PS_TRY(*l->normed ? PS_OK : ps_norm_forward(l, PS_NORM_1, first, l->u, 0));
    PS_TRY(attention_branch(l, residual, first, l->u, &norm2, &normed));
    PS_TRY(normed ? PS_OK : ps_norm_forward(l, PS_NORM_2, second, residual, 1));
    return feed_forward_branch(l, l->y, second, residual, by_row && !l->last ? &l->above_norm1 : NULL, l->normed);
}

/* Weights' gradients that are asked for together, where the table has that; x and dy stay as they are until then. */
struct gradients {
    struct ps_gemm_gradient each[4];
    int count;
};

static enum ps_status gradients_end(const struct ps_layer *l, struct gradients *later)
{
    if (!later || later->count == 0) {
        return PS_OK;
    }
    const int count = later->count;
    later->count = 0;
    return l->k->gemm_gradients(l->k, later->each, count);
}

/* dweight += x' dy, dbias += the columns' sums of dy: those in the product where epilogues are wanted. Not NULL, `later` takes it.
 */
static enum ps_status weight_gradient(const struct ps_layer *l, struct gradients *later, struct ps_tensor dweight,
                                      struct ps_tensor dbias, struct ps_tensor x, struct ps_tensor dy)
{
    const struct ps_kernels *k = l->k;
    const struct ps_gemm_gradient whole = {.dw = dweight, .db = dbias, .x = x, .dy = dy, .waits = l->gradients_wait};
    if (later) {
        later->each[later->count++] = whole;
        return PS_OK;
    }
    if (l->epilogue && k->gemm_gradient) {
        return k->gemm_gradient(k, &whole);
    }
    if (dbias.data) {
        PS_TRY(k->bias_grad(k, &(struct ps_bias_grad){.dbias = dbias, .dy = dy}));
    }
    return ps_product(k, dweight, ps_transposed(x), dy, 1, 1);
}

/* The same of a branch's end, drop(x weight + bias), whose gradient dropout masks, in `masked`; returns in *out what the input's
 * product reads. */
static enum ps_status branch_gradient(const struct ps_layer *l, struct gradients *later, struct ps_tensor dweight,
                                      struct ps_tensor dbias, struct ps_tensor x, struct ps_tensor dy, struct ps_dropout dropout,
                                      void *masked, struct ps_tensor *out)
{
    const struct ps_kernels *k = l->k;
    if (!dropout.threshold) {
        *out = dy;
        return weight_gradient(l, later, dweight, dbias, x, dy);
    }
    *out = ps_layer_rows(l, masked, l->d);
    if (l->notes->masked) {
        const struct ps_tensor nothing = {.data = NULL};
        const int summed = l->notes->summed;
        l->notes->masked = l->notes->summed = 0;
        return weight_gradient(l, later, dweight, summed ? nothing : dbias, x, *out);
    }
    PS_TRY(k->bias_grad(k, &(struct ps_bias_grad){.dbias = dbias, .masked = *out, .dy = dy, .dropout = dropout}));
    if (later) {
        return weight_gradient(l, later, dweight, (struct ps_tensor){.data = NULL}, x, *out);
    }
    return ps_product(k, dweight, ps_transposed(x), *out, 1, 1);
}

/* shared->rows = the gradient of q, k, v by row, from that of merged: A = softmax(scores), mixed = drop(A) v, by heads. The
 * gradient of residual attention's scores goes on to the layer below, whose own it is added to. */
static enum ps_status heads_backward(const struct ps_layer *l, struct ps_tensor d_merged)
{
    const struct ps_kernels *k = l->k;
    const struct ps_layer_cache *c = l->cache;
    const struct ps_shared_cache *s = l->shared;
    struct ps_tensor attention = ps_layer_attention(l, c->attention), d_attention = ps_layer_attention(l, s->d_attention);
    struct ps_tensor d_scores = ps_layer_attention(l, l->residual_attention ? s->d_scores : s->d_attention), below = d_scores;
    struct ps_tensor d_mixed = heads_of(l, d_merged.data, l->a, s->mixed, 0), weights, head[3], d_head[3];
    if (!l->residual_attention || l->last) {
        below.data = NULL;
    }
    for (int part = 0; part < 3; part++) {
        head[part] = heads_of(l, c->heads, 3 * l->a, c->heads, part);
        d_head[part] = heads_of(l, s->rows, 3 * l->a, s->d_heads, part);
    }
    if (!l->strided_heads) {
        PS_TRY(k->head_split(k, &(struct ps_head_split){.heads = ps_layer_heads(l, s->mixed, 1), .rows = d_merged}));
    }
    PS_TRY(weights_of(l, &weights));
    PS_TRY(ps_product(k, d_head[2], ps_transposed(beside_heads(l, weights)), d_mixed, 1, 0));
    PS_TRY(ps_product(k, beside_heads(l, d_attention), d_mixed, ps_transposed(head[2]), 1, 0));
    if (l->weights_dropout.threshold) {
        PS_TRY(k->drop(k, &(struct ps_drop){.y = d_attention, .x = d_attention, .dropout = l->weights_dropout}));
    }
    PS_TRY(
        k->softmax_backward(k, &(struct ps_softmax_backward){.dx = d_scores, .dy = d_attention, .y = attention, .addend = below}));
    d_scores = beside_heads(l, d_scores);
    PS_TRY(ps_product(k, d_head[0], d_scores, head[1], l->scale, 0));
    PS_TRY(ps_product(k, d_head[1], ps_transposed(d_scores), head[0], l->scale, 0));
    return l->strided_heads ? PS_OK
                            : k->head_merge(k, &(struct ps_head_merge){.rows = ps_layer_rows(l, s->rows, 3 * l->a),
                                                                       .heads = ps_layer_heads(l, s->d_heads, 3)});
}

/* or by tiles. */
static enum ps_status tiled_backward(const struct ps_layer *l, struct ps_tensor d_merged)
{
    const struct ps_attention forward = tiled(l);
    struct ps_tensor rows = gradient_rows(l);
    const int64_t distance = 3 * l->R * l->a;
    return l->k->attention_backward(l->k, &(struct ps_attention_backward){.dq = scored(l, rows.data, l->shared->rows, distance, 0),
                                                                          .dk = scored(l, rows.data, l->shared->rows, distance, 1),
                                                                          .dv = ps_layer_head_rows(l, rows.data, 3 * l->a, 2),
                                                                          .delta = ps_layer_head_statistics(l, l->shared->delta),
                                                                          .d_mixed = ps_layer_head_rows(l, d_merged.data, l->a, 0),
                                                                          .mixed = forward.mixed,
                                                                          .logsum = forward.logsum,
                                                                          .q = forward.q,
                                                                          .k = forward.k,
                                                                          .v = forward.v,
                                                                          .scale = forward.scale,
                                                                          .accumulate = l->residual_attention && !l->last});
}

/* Pre-norm's last step down a branch that begins with a norm of rows, with that norm's backward and the meeting with the stream, as
 * ps_norm_join_pre has it, in one where that is served; else *done is 0 and nothing has been done. */
static enum ps_status branch_joined(const struct ps_layer *l, enum ps_norm_number number, struct ps_tensor gradient,
                                    struct ps_tensor before, struct ps_tensor dy, struct ps_tensor weight, int *done)
{
    const struct ps_tensor nothing = {.data = NULL};
    const struct ps_dropout next = number == PS_NORM_2 ? l->attention_dropout : l->below_dropout;
    const struct ps_layernorm_backward b = ps_norm_backward_of(l, number, gradient, nothing, before, next);
    PS_TRY(finish(l,
                  &(struct ps_gemm_finish){.c = b.dx,
                                           .dgamma = b.dgamma,
                                           .dbeta = b.dbeta,
                                           .a = dy,
                                           .b = ps_transposed(weight),
                                           .addend = b.addend,
                                           .x = b.x,
                                           .masked = b.masked,
                                           .dbias = b.dbias,
                                           .row_mean = b.mean,
                                           .rstd = b.rstd,
                                           .gamma = b.gamma,
                                           .finish = PS_FINISH_SUM,
                                           .dropout = b.dropout},
                  done));
    if (*done) {
        ps_norm_note(l, &b);
    }
    return PS_OK;
}

/* A branch's last step down: *branch = dy weight'. Of post-norm the stream's gradient, `before`, becomes the sum of both in
 * `gradient` in the same product where that is served, and *branch is absent then; of pre-norm with a norm of rows, norm `number`,
 * what ps_norm_join_pre would make of it likewise. `norm`, where there is one: of a BatchNorm, whose backward reads the result,
 * what it sums may be there then too, as notes tell. */
static enum ps_status branch_input(const struct ps_layer *l, struct ps_tensor *branch, struct ps_tensor gradient,
                                   struct ps_tensor before, struct ps_tensor dy, struct ps_tensor weight,
                                   enum ps_norm_number number, const struct ps_layer_norm *norm)
{
    const int post = l->norm_place == PS_NORM_POST, counted = norm && l->norm == PS_NORM_BATCH && !ps_norm_is_shared(l);
    struct ps_gemm_finish whole = {.c = *branch, .a = dy, .b = ps_transposed(weight), .finish = PS_FINISH_SUM};
    if (post) {
        whole.c = gradient;
        whole.addend = before;
    }
    if (counted) {
        whole.means = ps_layer_norm_means(l);
        whole.dgamma = norm->d_gamma;
        whole.dbeta = norm->d_beta;
        whole.mean = norm->mean;
        whole.var = norm->spread;
        whole.x = norm->x;
        whole.epsilon = PS_NORM_EPSILON;
    }
    int done = 0;
    if (!post && l->norm != PS_NORM_BATCH) {
        PS_TRY(branch_joined(l, number, gradient, before, dy, weight, &done));
        if (done) {
            branch->data = NULL;
            return PS_OK;
        }
    }
    if (post || counted) {
        PS_TRY(finish(l, &whole, &done));
    }
    if (!done) {
        return ps_product(l->k, *branch, dy, whole.b, 1, 0);
    }
    l->notes->means = counted;
    if (post) {
        branch->data = NULL;
    }
    return PS_OK;
}

/* *branch = the gradient of the feed-forward's input, from dy, the stream's at its end; gradient, norm: as branch_input's. */
static enum ps_status feed_forward_backward(const struct ps_layer *l, struct gradients *later, struct ps_tensor *branch,
                                            struct ps_tensor gradient, struct ps_tensor dy, struct ps_tensor a,
                                            const struct ps_layer_norm *norm)
{
    const struct ps_kernels *k = l->k;
    const struct ps_shared_cache *s = l->shared;
    const struct ps_tensor *w = l->weight, *g = l->gradient;
    if (l->feed_forward) { /* of post-norm the stream's gradient becomes the sum of both, as branch_input's */
        const int post = l->norm_place == PS_NORM_POST;
        const struct ps_tensor nothing = {.data = NULL};
        PS_TRY(k->feed_forward_backward(k, &(struct ps_feed_forward_backward){.dx = post ? gradient : *branch,
                                                                              .dw_1 = g[PS_W_1],
                                                                              .db_1 = g[PS_B_1],
                                                                              .dw_2 = g[PS_W_2],
                                                                              .db_2 = g[PS_B_2],
                                                                              .dy = dy,
                                                                              .x = a,
                                                                              .w_1 = w[PS_W_1],
                                                                              .b_1 = w[PS_B_1],
                                                                              .w_2 = w[PS_W_2],
                                                                              .addend = post ? dy : nothing,
                                                                              .hidden_dropout = l->hidden_dropout,
                                                                              .output_dropout = l->output_dropout,
                                                                              .activation = l->activation}));
        l->notes->masked = 0;
        if (post) {
            branch->data = NULL;
        }
        return PS_OK;
    }
    struct ps_tensor d_hidden = ps_layer_rows(l, s->d_hidden, l->f), m;
    struct ps_tensor d_inner = ps_layer_rows(l, l->activation == PS_SWIGLU ? s->d_hidden_in : s->d_hidden, l->inner);
    PS_TRY(branch_gradient(l, later, g[PS_W_2], g[PS_B_2], ps_layer_rows(l, l->cache->hidden, l->f), dy, l->output_dropout,
                           s->masked, &m));
    struct ps_tensor kept = ps_layer_rows(l, l->cache->hidden_in, l->inner);
    const struct folded w_1 = folded_1(l);
    int done = 0;
    if (*l->slope_kept) {
        PS_TRY(finish(l,
                      &(struct ps_gemm_finish){.c = d_inner,
                                               .kept = kept,
                                               .a = m,
                                               .b = ps_transposed(w[PS_W_2]),
                                               .finish = PS_FINISH_SLOPE,
                                               .activation = l->activation},
                      &done));
    }
    if (!done) {
        if (*l->slope_kept) { /* refused what forward was not: what activation_backward reads after all */
            PS_TRY(fold(l, &w_1));
            PS_TRY(ps_product(k, kept, a, w_1.weight, 1, 0));
        }
        PS_TRY(ps_product(k, d_hidden, m, ps_transposed(w[PS_W_2]), 1, 0));
        PS_TRY(k->activation_backward(k, &(struct ps_activation_backward){.dx = d_inner,
                                                                          .dy = d_hidden,
                                                                          .x = kept,
                                                                          .bias = w_1.bias,
                                                                          .dropout = l->hidden_dropout,
                                                                          .activation = l->activation}));
    }
    PS_TRY(weight_gradient(l, later, w_1.dweight, w_1.dbias, a, d_inner));
    if (!l->output_dropout.threshold && gradient.data == dy.data) { /* dy itself is soon another's */
        PS_TRY(gradients_end(l, later));
    }
    return branch_input(l, branch, gradient, dy, d_inner, w[PS_W_1], PS_NORM_2, norm);
}

/* The same of attention. */
static enum ps_status attention_backward(const struct ps_layer *l, struct gradients *later, struct ps_tensor *branch,
                                         struct ps_tensor gradient, struct ps_tensor dy, struct ps_tensor a,
                                         const struct ps_layer_norm *norm)
{
    const struct ps_kernels *k = l->k;
    const struct ps_tensor *w = l->weight, *g = l->gradient;
    struct ps_tensor rows = gradient_rows(l), d_merged = ps_layer_rows(l, l->shared->branch, l->a), m;
    const struct folded qkv = folded_qkv(l);
    PS_TRY(branch_gradient(l, later, g[PS_W_O], g[PS_B_O], ps_layer_rows(l, l->cache->merged, l->a), dy, l->attention_dropout,
                           ps_layer_masked_o(l), &m));
    PS_TRY(ps_product(k, d_merged, m, ps_transposed(w[PS_W_O]), 1, 0));
    PS_TRY(l->beside_attention ? l->beside_attention->run(l->beside_attention->argument) : PS_OK);
    PS_TRY(l->tiled_attention ? tiled_backward(l, d_merged) : heads_backward(l, d_merged));
    PS_TRY(ps_layer_rope(l, rows, 1));
    if (l->merge_qkv) {
        PS_TRY(weight_gradient(l, later, qkv.dweight, qkv.dbias, a, rows));
    } else {
        PS_TRY(k->bias_grad(k, &(struct ps_bias_grad){.dbias = qkv.dbias, .dy = rows}));
        for (int p = 0; p < 3; p++) {
            PS_TRY(ps_product(k, ps_tensor_slice(qkv.dweight, 1, p * l->a, l->a), ps_transposed(a),
                              ps_tensor_slice(rows, 1, p * l->a, l->a), 1, 1));
        }
    }
    PS_TRY(gradients_end(l, later));
    return branch_input(l, branch, gradient, dy, rows, w[PS_W_QKV], PS_NORM_1, norm);
}

enum ps_status ps_layer_gemm_backward(const struct ps_layer *l)
{
    const struct ps_layer_cache *c = l->cache;
    const struct ps_layer_norm norm1 = ps_layer_norm_of(l, PS_NORM_1), norm2 = ps_layer_norm_of(l, PS_NORM_2);
    struct ps_tensor gradient = ps_layer_rows(l, l->shared->gradient, l->d), branch = ps_layer_rows(l, l->shared->branch, l->d);
    struct ps_tensor first = ps_layer_rows(l, c->norm1_out, l->d), below = branch, nothing = {.data = NULL};
    struct gradients all = {.count = 0}, *later = l->gradients_together ? &all : NULL;
    /* Without dropout W_2's gradient reads the stream's own, which so stays until all are asked for. */
    const int stays = later && !l->output_dropout.threshold && !l->attention_dropout.threshold;
    const struct ps_tensor between = stays ? ps_layer_rows(l, l->shared->masked, l->d) : gradient;
    if (l->norm_place == PS_NORM_POST) {
        PS_TRY(ps_norm_join_post(l, PS_NORM_2, gradient, gradient, nothing, l->output_dropout));
        const struct ps_tensor residual = ps_layer_rows(l, c->residual, l->d);
        PS_TRY(feed_forward_backward(l, later, &branch, between, gradient, l->folded ? residual : first, &norm1));
        PS_TRY(ps_norm_join_post(l, PS_NORM_1, between, gradient, branch, l->attention_dropout));
        PS_TRY(attention_backward(l, later, &below, gradient, between, stream_of(l), l->first ? NULL : &l->below_norm2));
        return below.data ? l->k->add(l->k, &(struct ps_add){.y = gradient, .a = between, .b = below}) : PS_OK;
    }
    PS_TRY(feed_forward_backward(l, later, &branch, between, gradient, ps_layer_rows(l, c->norm2_out, l->d), &norm2));
    PS_TRY(branch.data ? ps_norm_join_pre(l, PS_NORM_2, between, gradient, branch, l->attention_dropout) : PS_OK);
    PS_TRY(attention_backward(l, later, &below, gradient, between, first, &norm1));
    return below.data ? ps_norm_join_pre(l, PS_NORM_1, gradient, between, below, l->below_dropout) : PS_OK;
}
