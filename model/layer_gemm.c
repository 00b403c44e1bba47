/* Level gemm: 8 products and 7 kinds of sub-kernel forward, 14 and 6 backward (head_split and head_merge count as one); fewer
 * products with merge_qkv. Buffers that are done with are used again in place, so a layer keeps only what backward reads. */
#include "model/layer.h"

#include <math.h>

/* merged = softmax(q k' / sqrt(e)) v from rows of q, k, v: by heads, three sub-kernels between two products, */
static enum ps_status heads_forward(const struct ps_layer *l, struct ps_tensor rows)
{
    const struct ps_kernels *k = l->k;
    const struct ps_layer_cache *c = l->cache;
    const struct ps_shared_cache *s = l->shared;
    struct ps_tensor attention = ps_layer_attention(l, c->attention);
    PS_TRY(k->head_split(k, &(struct ps_head_split){.heads = ps_layer_heads(l, c->heads, 3), .rows = rows}));
    PS_TRY(ps_product(k, attention, ps_layer_head(l, c->heads, 0), ps_transposed(ps_layer_head(l, c->heads, 1)),
                      1 / sqrt((double)l->e), 0));
    PS_TRY(k->softmax(k, &(struct ps_softmax){.y = attention, .x = attention}));
    PS_TRY(ps_product(k, ps_layer_head(l, s->mixed, 0), attention, ps_layer_head(l, c->heads, 2), 1, 0));
    return k->head_merge(
        k, &(struct ps_head_merge){.rows = ps_layer_rows(l, c->merged, l->d), .heads = ps_layer_heads(l, s->mixed, 1)});
}

/* or by tiles, in one. */
static struct ps_attention tiled(const struct ps_layer *l)
{
    const struct ps_layer_cache *c = l->cache;
    return (struct ps_attention){.mixed = ps_layer_head_rows(l, c->merged, l->d, 0),
                                 .logsum = ps_layer_head_statistics(l, c->logsum),
                                 .q = ps_layer_head_rows(l, c->heads, 3 * l->d, 0),
                                 .k = ps_layer_head_rows(l, c->heads, 3 * l->d, 1),
                                 .v = ps_layer_head_rows(l, c->heads, 3 * l->d, 2),
                                 .scale = 1 / sqrt((double)l->e)};
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

/* y = residual + drop(x weight + bias); an epilogue cannot drop out. */
static enum ps_status branch_end(const struct ps_layer *l, struct ps_tensor y, struct ps_tensor x, struct ps_tensor weight,
                                 struct ps_tensor bias, struct ps_tensor residual, struct ps_dropout dropout)
{
    const struct ps_kernels *k = l->k;
    if (l->epilogue && !dropout.threshold) {
        return k->gemm_bias(k, &(struct ps_gemm_bias){.c = y, .a = x, .b = weight, .bias = bias, .addend = residual});
    }
    PS_TRY(ps_product(k, y, x, weight, 1, 0));
    return k->bias_residual_add(
        k, &(struct ps_bias_residual_add){.y = y, .x = y, .bias = bias, .residual = residual, .dropout = dropout});
}

enum ps_status ps_layer_gemm_forward(const struct ps_layer *l)
{
    const struct ps_kernels *k = l->k;
    const struct ps_layer_cache *c = l->cache;
    const struct ps_shared_cache *s = l->shared;
    const struct ps_tensor *w = l->weight;
    int64_t d = l->d;
    struct ps_tensor a = ps_layer_rows(l, c->ln1_out, d), residual = ps_layer_rows(l, c->residual, d);
    struct ps_tensor rows = ps_layer_rows(l, l->tiled_attention ? c->heads : s->rows, 3 * d);
    struct ps_tensor merged = ps_layer_rows(l, c->merged, d), ln2_out = ps_layer_rows(l, c->ln2_out, d);
    struct ps_tensor hidden_in = ps_layer_rows(l, c->hidden_in, l->f), hidden = ps_layer_rows(l, c->hidden, l->f);

    PS_TRY(k->layernorm(k, &(struct ps_layernorm){.y = a,
                                                  .mean = ps_layer_statistics(l, c->ln1_mean),
                                                  .rstd = ps_layer_statistics(l, c->ln1_rstd),
                                                  .x = l->u,
                                                  .gamma = w[PS_NORM1_GAMMA],
                                                  .beta = w[PS_NORM1_BETA],
                                                  .epsilon = PS_LAYERNORM_EPSILON}));
    struct ps_tensor bias = w[PS_B_QKV];
    int parts = l->merge_qkv ? 1 : 3;
    for (int p = 0; p < parts; p++) {
        int64_t columns = 3 * d / parts;
        struct ps_tensor part = ps_tensor_slice(rows, 1, p * columns, columns);
        struct ps_tensor weight = ps_tensor_slice(w[PS_W_QKV], 1, p * columns, columns);
        PS_TRY(l->epilogue
                   ? k->gemm_bias(k,
                                  &(struct ps_gemm_bias){
                                      .c = part, .a = a, .b = weight, .bias = ps_tensor_slice(bias, 0, p * columns, columns)})
                   : ps_product(k, part, a, weight, 1, 0));
    }
    if (!l->epilogue) {
        PS_TRY(k->bias_add(k, &(struct ps_bias_add){.y = rows, .bias = bias}));
    }
    PS_TRY(l->tiled_attention ? tiled_forward(l) : heads_forward(l, rows));

    PS_TRY(branch_end(l, residual, merged, w[PS_W_O], w[PS_B_O], l->u, l->attention_dropout));
    PS_TRY(k->layernorm(k, &(struct ps_layernorm){.y = ln2_out,
                                                  .mean = ps_layer_statistics(l, c->ln2_mean),
                                                  .rstd = ps_layer_statistics(l, c->ln2_rstd),
                                                  .x = residual,
                                                  .gamma = w[PS_NORM2_GAMMA],
                                                  .beta = w[PS_NORM2_BETA],
                                                  .epsilon = PS_LAYERNORM_EPSILON}));
    PS_TRY(ps_product(k, hidden_in, ln2_out, w[PS_W_1], 1, 0));
    PS_TRY(k->bias_activation(k, &(struct ps_bias_activation){.y = hidden, .x = hidden_in, .bias = w[PS_B_1], .dropout = l->hidden_dropout}));
    return branch_end(l, l->y, hidden, w[PS_W_2], w[PS_B_2], residual, l->output_dropout);
}

/* dweight += x' dy, dbias += the columns' sums of dy: those in the product where epilogues are wanted. */
static enum ps_status weight_gradient(const struct ps_layer *l, struct ps_tensor dweight, struct ps_tensor dbias,
                                      struct ps_tensor x, struct ps_tensor dy)
{
    const struct ps_kernels *k = l->k;
    if (l->epilogue && k->gemm_gradient) {
        return k->gemm_gradient(k, &(struct ps_gemm_gradient){.dw = dweight, .db = dbias, .x = x, .dy = dy});
    }
    PS_TRY(k->bias_grad(k, &(struct ps_bias_grad){.dbias = dbias, .dy = dy}));
    return ps_product(k, dweight, ps_transposed(x), dy, 1, 1);
}

/* The same of a branch's end, drop(x weight + bias), whose gradient dropout masks; returns in *out what the input's product reads.
 */
static enum ps_status branch_gradient(const struct ps_layer *l, struct ps_tensor dweight, struct ps_tensor dbias,
                                      struct ps_tensor x, struct ps_tensor dy, struct ps_dropout dropout, struct ps_tensor *out)
{
    const struct ps_kernels *k = l->k;
    if (!dropout.threshold) {
        *out = dy;
        return weight_gradient(l, dweight, dbias, x, dy);
    }
    *out = ps_layer_rows(l, l->shared->masked, l->d);
    PS_TRY(k->bias_grad(k, &(struct ps_bias_grad){.dbias = dbias, .masked = *out, .dy = dy, .dropout = dropout}));
    return ps_product(k, dweight, ps_transposed(x), *out, 1, 1);
}

/* gradient += that of x by way of LayerNorm, whose output has the gradient branch: in one pass where epilogues are wanted. */
static enum ps_status stream_gradient(const struct ps_layer *l, struct ps_tensor gradient, struct ps_tensor branch,
                                      struct ps_tensor x, struct ps_tensor mean, struct ps_tensor rstd, struct ps_tensor gamma,
                                      struct ps_tensor dgamma, struct ps_tensor dbeta)
{
    const struct ps_kernels *k = l->k;
    struct ps_layernorm_backward backward = {
        .dx = branch, .dgamma = dgamma, .dbeta = dbeta, .dy = branch, .x = x, .mean = mean, .rstd = rstd, .gamma = gamma};
    if (l->epilogue) {
        backward.dx = backward.addend = gradient;
        return k->layernorm_backward(k, &backward);
    }
    PS_TRY(k->layernorm_backward(k, &backward));
    return k->add(k, &(struct ps_add){.y = gradient, .a = gradient, .b = branch});
}

/* shared->rows = the gradient of q, k, v by row, from that of merged: A = softmax(q k' / sqrt(e)), mixed = A v, by heads */
static enum ps_status heads_backward(const struct ps_layer *l, struct ps_tensor d_merged)
{
    const struct ps_kernels *k = l->k;
    const struct ps_layer_cache *c = l->cache;
    const struct ps_shared_cache *s = l->shared;
    struct ps_tensor attention = ps_layer_attention(l, c->attention), d_attention = ps_layer_attention(l, s->d_attention);
    struct ps_tensor d_mixed = ps_layer_head(l, s->mixed, 0);
    double scale = 1 / sqrt((double)l->e);
    PS_TRY(k->head_split(k, &(struct ps_head_split){.heads = ps_layer_heads(l, s->mixed, 1), .rows = d_merged}));
    PS_TRY(ps_product(k, ps_layer_head(l, s->d_heads, 2), ps_transposed(attention), d_mixed, 1, 0));
    PS_TRY(ps_product(k, d_attention, d_mixed, ps_transposed(ps_layer_head(l, c->heads, 2)), 1, 0));
    PS_TRY(k->softmax_backward(k, &(struct ps_softmax_backward){.dx = d_attention, .dy = d_attention, .y = attention}));
    PS_TRY(ps_product(k, ps_layer_head(l, s->d_heads, 0), d_attention, ps_layer_head(l, c->heads, 1), scale, 0));
    PS_TRY(ps_product(k, ps_layer_head(l, s->d_heads, 1), ps_transposed(d_attention), ps_layer_head(l, c->heads, 0), scale, 0));
    return k->head_merge(
        k, &(struct ps_head_merge){.rows = ps_layer_rows(l, s->rows, 3 * l->d), .heads = ps_layer_heads(l, s->d_heads, 3)});
}

/* or by tiles. */
static enum ps_status tiled_backward(const struct ps_layer *l, struct ps_tensor d_merged)
{
    const struct ps_layer_cache *c = l->cache;
    const struct ps_shared_cache *s = l->shared;
    return l->k->attention_backward(l->k, &(struct ps_attention_backward){.dq = ps_layer_head_rows(l, s->rows, 3 * l->d, 0),
                                                                          .dk = ps_layer_head_rows(l, s->rows, 3 * l->d, 1),
                                                                          .dv = ps_layer_head_rows(l, s->rows, 3 * l->d, 2),
                                                                          .delta = ps_layer_head_statistics(l, s->delta),
                                                                          .d_mixed = ps_layer_head_rows(l, d_merged.data, l->d, 0),
                                                                          .mixed = ps_layer_head_rows(l, c->merged, l->d, 0),
                                                                          .logsum = ps_layer_head_statistics(l, c->logsum),
                                                                          .q = ps_layer_head_rows(l, c->heads, 3 * l->d, 0),
                                                                          .k = ps_layer_head_rows(l, c->heads, 3 * l->d, 1),
                                                                          .v = ps_layer_head_rows(l, c->heads, 3 * l->d, 2),
                                                                          .scale = 1 / sqrt((double)l->e)});
}

enum ps_status ps_layer_gemm_backward(const struct ps_layer *l)
{
    const struct ps_kernels *k = l->k;
    const struct ps_layer_cache *c = l->cache;
    const struct ps_shared_cache *s = l->shared;
    const struct ps_tensor *w = l->weight, *g = l->gradient;
    int64_t d = l->d;
    struct ps_tensor gradient = ps_layer_rows(l, s->gradient, d), branch = ps_layer_rows(l, s->branch, d), m;
    struct ps_tensor d_hidden = ps_layer_rows(l, s->d_hidden, l->f), hidden_in = ps_layer_rows(l, c->hidden_in, l->f);

    /* y = r + drop(hidden W_2 + b_2) */
    PS_TRY(branch_gradient(l, g[PS_W_2], g[PS_B_2], ps_layer_rows(l, c->hidden, l->f), gradient, l->output_dropout, &m));
    PS_TRY(ps_product(k, d_hidden, m, ps_transposed(w[PS_W_2]), 1, 0));
    PS_TRY(
        k->activation_backward(k, &(struct ps_activation_backward){
                                .dx = d_hidden, .dy = d_hidden, .x = hidden_in, .bias = w[PS_B_1], .dropout = l->hidden_dropout}));
    PS_TRY(weight_gradient(l, g[PS_W_1], g[PS_B_1], ps_layer_rows(l, c->ln2_out, d), d_hidden));
    PS_TRY(ps_product(k, branch, d_hidden, ps_transposed(w[PS_W_1]), 1, 0));
    PS_TRY(stream_gradient(l, gradient, branch, ps_layer_rows(l, c->residual, d), ps_layer_statistics(l, c->ln2_mean),
                           ps_layer_statistics(l, c->ln2_rstd), w[PS_NORM2_GAMMA], g[PS_NORM2_GAMMA], g[PS_NORM2_BETA]));

    /* r = u + drop(merged W_o + b_o) */
    PS_TRY(branch_gradient(l, g[PS_W_O], g[PS_B_O], ps_layer_rows(l, c->merged, d), gradient, l->attention_dropout, &m));
    PS_TRY(ps_product(k, branch, m, ps_transposed(w[PS_W_O]), 1, 0));
    PS_TRY(l->tiled_attention ? tiled_backward(l, branch) : heads_backward(l, branch));

    struct ps_tensor rows = ps_layer_rows(l, s->rows, 3 * d), a = ps_layer_rows(l, c->ln1_out, d);
    if (l->merge_qkv) {
        PS_TRY(weight_gradient(l, g[PS_W_QKV], g[PS_B_QKV], a, rows));
    } else {
        PS_TRY(k->bias_grad(k, &(struct ps_bias_grad){.dbias = g[PS_B_QKV], .dy = rows}));
        for (int p = 0; p < 3; p++) {
            PS_TRY(ps_product(k, ps_tensor_slice(g[PS_W_QKV], 1, p * d, d), ps_transposed(a), ps_tensor_slice(rows, 1, p * d, d), 1,
                              1));
        }
    }
    PS_TRY(ps_product(k, branch, rows, ps_transposed(w[PS_W_QKV]), 1, 0));
    return stream_gradient(l, gradient, branch, l->u, ps_layer_statistics(l, c->ln1_mean), ps_layer_statistics(l, c->ln1_rstd),
                           w[PS_NORM1_GAMMA], g[PS_NORM1_GAMMA], g[PS_NORM1_BETA]);
}
