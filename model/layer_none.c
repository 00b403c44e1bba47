/* Level none: every elementary operation its own call. The yardstick that the other levels are measured against, and a second
 * derivation of the same equations to compare them with. */
#include "model/layer.h"

#include <math.h>

/* gelu(x) = x (1 + tanh(SLOPE (x + CUBIC x^3))) / 2 */
#define CUBIC 0.044715
#define SLOPE sqrt(2 / 3.14159265358979323846)

static enum ps_status binary(const struct ps_kernels *k, struct ps_tensor y, struct ps_tensor a, enum ps_binary_function function,
                             struct ps_tensor b)
{
    return k->binary(k, &(struct ps_binary){.y = y, .a = a, .b = b, .function = function});
}

static enum ps_status unary(const struct ps_kernels *k, struct ps_tensor y, enum ps_unary_function function, struct ps_tensor x)
{
    return k->unary(k, &(struct ps_unary){.y = y, .x = x, .function = function});
}

static enum ps_status affine(const struct ps_kernels *k, struct ps_tensor y, double scale, struct ps_tensor x, double shift)
{
    return k->affine(k, &(struct ps_affine){.y = y, .x = x, .scale = scale, .shift = shift});
}

static enum ps_status sum_last(const struct ps_kernels *k, struct ps_tensor y, struct ps_tensor x)
{
    return k->reduce(k, &(struct ps_reduce){.y = y, .x = x, .function = PS_SUM});
}

/* y += sum over the rows of x. */
static enum ps_status sum_rows(const struct ps_kernels *k, struct ps_tensor y, struct ps_tensor x)
{
    return k->reduce(k, &(struct ps_reduce){.y = y, .x = ps_transposed(x), .function = PS_SUM, .accumulate = 1});
}

static enum ps_status drop(const struct ps_kernels *k, struct ps_tensor y, struct ps_tensor x, struct ps_dropout dropout)
{
    return k->drop(k, &(struct ps_drop){.y = y, .x = x, .dropout = dropout});
}

/* [n] repeated over rows, as [rows, n]. */
static struct ps_tensor across_rows(struct ps_tensor t, int64_t rows)
{
    struct ps_tensor r = {.data = t.data, .type = t.type, .rank = 2};
    r.size[0] = rows;
    r.size[1] = t.size[0];
    r.stride[1] = 1;
    return r;
}

/* One number a row, repeated over n columns: t has every size but the last. */
static struct ps_tensor across_columns(struct ps_tensor t, int64_t n)
{
    t.size[t.rank] = n;
    t.stride[t.rank] = 0;
    t.rank++;
    return t;
}

/* y = the sum over the rows of x, times scale. */
static enum ps_status scaled_sum_rows(const struct ps_kernels *k, struct ps_tensor y, double scale, struct ps_tensor x)
{
    PS_TRY(sum_last(k, y, ps_transposed(x)));
    return affine(k, y, scale, y, 0);
}

/* running += momentum (scale batch - running). */
static enum ps_status move_running(const struct ps_layer *l, struct ps_tensor running, struct ps_tensor batch, double scale)
{
    const struct ps_kernels *k = l->k;
    struct ps_tensor moved = ps_tensor_1d(l->shared->narrow_b, k->real, l->d);
    PS_TRY(affine(k, moved, PS_BATCHNORM_MOMENTUM * scale, batch, 0));
    PS_TRY(affine(k, running, 1 - PS_BATCHNORM_MOMENTUM, running, 0));
    return binary(k, running, running, PS_ADD, moved);
}

/* BatchNorm's xhat, rstd in the place of the variance. */
static enum ps_status normalise_columns(const struct ps_layer *l, const struct ps_layer_norm *n, struct ps_tensor xhat,
                                        struct ps_tensor x)
{
    const struct ps_kernels *k = l->k;
    struct ps_tensor squares = ps_layer_rows(l, l->shared->narrow_a, l->d);
    const double rows = (double)l->R;
    if (l->training) {
        PS_TRY(scaled_sum_rows(k, n->mean, 1 / rows, x));
        PS_TRY(move_running(l, n->running_mean, n->mean, 1));
    }
    PS_TRY(binary(k, xhat, x, PS_SUBTRACT, across_rows(l->training ? n->mean : n->running_mean, l->R)));
    if (l->training) {
        PS_TRY(unary(k, squares, PS_SQUARE, xhat));
        PS_TRY(scaled_sum_rows(k, n->spread, 1 / rows, squares));
        PS_TRY(move_running(l, n->running_var, n->spread, rows / (rows - 1)));
    }
    PS_TRY(affine(k, n->spread, 1, l->training ? n->spread : n->running_var, PS_NORM_EPSILON));
    PS_TRY(unary(k, n->spread, PS_RSQRT, n->spread));
    return binary(k, xhat, xhat, PS_MULTIPLY, across_rows(n->spread, l->R));
}

/* LayerNorm's, and RMSNorm's without the mean; y is scratch. */
static enum ps_status normalise_rows(const struct ps_layer *l, const struct ps_layer_norm *n, struct ps_tensor xhat,
                                     struct ps_tensor x, struct ps_tensor y)
{
    const struct ps_kernels *k = l->k;
    const int centred = l->norm == PS_NORM_LAYER;
    struct ps_tensor mean = ps_tensor_1d(l->shared->column_a, k->real, l->R);
    if (centred) {
        PS_TRY(sum_last(k, mean, x));
        PS_TRY(affine(k, mean, 1.0 / (double)l->d, mean, 0));
        PS_TRY(binary(k, xhat, x, PS_SUBTRACT, across_columns(mean, l->d)));
    }
    PS_TRY(unary(k, y, PS_SQUARE, centred ? xhat : x));
    PS_TRY(sum_last(k, n->spread, y));
    PS_TRY(affine(k, n->spread, 1.0 / (double)l->d, n->spread, PS_NORM_EPSILON));
    PS_TRY(unary(k, n->spread, PS_RSQRT, n->spread));
    return binary(k, xhat, centred ? xhat : x, PS_MULTIPLY, across_columns(n->spread, l->d));
}

/* y = xhat gamma + beta; xhat, rstd kept. */
static enum ps_status norm_forward(const struct ps_layer *l, enum ps_norm_number number, struct ps_tensor y, struct ps_tensor x)
{
    const struct ps_kernels *k = l->k;
    const struct ps_layer_norm n = ps_layer_norm_of(l, number);
    struct ps_tensor xhat = ps_layer_rows(l, n.xhat, l->d);
    PS_TRY(l->norm == PS_NORM_BATCH ? normalise_columns(l, &n, xhat, x) : normalise_rows(l, &n, xhat, x, y));
    PS_TRY(binary(k, y, xhat, PS_MULTIPLY, across_rows(n.gamma, l->R)));
    return n.beta.data ? binary(k, y, y, PS_ADD, across_rows(n.beta, l->R)) : PS_OK;
}

/* dx from dy, in place allowed. Of rows, with g = dy gamma: dx = rstd (g - mean(g) - xhat mean(g xhat)), RMSNorm's without mean(g);
 * of columns the same with their means. */
static enum ps_status norm_backward(const struct ps_layer *l, enum ps_norm_number number, struct ps_tensor dx, struct ps_tensor dy)
{
    const struct ps_kernels *k = l->k;
    const struct ps_layer_norm n = ps_layer_norm_of(l, number);
    struct ps_tensor xhat = ps_layer_rows(l, n.xhat, l->d);
    struct ps_tensor product = ps_layer_rows(l, l->shared->narrow_a, l->d), g = ps_layer_rows(l, l->shared->narrow_b, l->d);
    if (n.d_beta.data) {
        PS_TRY(sum_rows(k, n.d_beta, dy));
    }
    PS_TRY(binary(k, product, dy, PS_MULTIPLY, xhat));
    PS_TRY(sum_rows(k, n.d_gamma, product));
    PS_TRY(binary(k, g, dy, PS_MULTIPLY, across_rows(n.gamma, l->R)));
    struct ps_tensor rstd = across_columns(n.spread, l->d), mean_g, mean_gx;
    if (l->norm == PS_NORM_BATCH) {
        struct ps_tensor sum_g = n.mean, sum_gx = ps_tensor_1d(l->shared->d_hidden, k->real, l->d); /* both done with */
        PS_TRY(scaled_sum_rows(k, sum_g, 1.0 / (double)l->R, g));
        PS_TRY(binary(k, product, g, PS_MULTIPLY, xhat));
        PS_TRY(scaled_sum_rows(k, sum_gx, 1.0 / (double)l->R, product));
        rstd = across_rows(n.spread, l->R);
        mean_g = across_rows(sum_g, l->R);
        mean_gx = across_rows(sum_gx, l->R);
    } else {
        struct ps_tensor sum_g = ps_tensor_1d(l->shared->column_a, k->real, l->R);
        struct ps_tensor sum_gx = ps_tensor_1d(l->shared->column_b, k->real, l->R);
        PS_TRY(sum_last(k, sum_g, g));
        PS_TRY(affine(k, sum_g, 1.0 / (double)l->d, sum_g, 0));
        PS_TRY(binary(k, product, g, PS_MULTIPLY, xhat));
        PS_TRY(sum_last(k, sum_gx, product));
        PS_TRY(affine(k, sum_gx, 1.0 / (double)l->d, sum_gx, 0));
        mean_g = across_columns(sum_g, l->d);
        mean_gx = across_columns(sum_gx, l->d);
    }
    PS_TRY(binary(k, product, xhat, PS_MULTIPLY, mean_gx));
    if (l->norm != PS_NORM_RMS) {
        PS_TRY(binary(k, g, g, PS_SUBTRACT, mean_g));
    }
    PS_TRY(binary(k, g, g, PS_SUBTRACT, product));
    return binary(k, dx, g, PS_MULTIPLY, rstd);
}

/* Part p of [R, 3d] seen as [S, h, N, e], and the same of the split heads. */
static struct ps_tensor part_of_rows(const struct ps_layer *l, struct ps_tensor rows)
{
    struct ps_tensor t = {.data = rows.data, .type = rows.type, .rank = 4};
    int64_t row = rows.stride[0];
    const int64_t size[4] = {l->S, l->h, l->N, l->e}, stride[4] = {l->N * row, l->e, row, 1};
    for (int i = 0; i < 4; i++) {
        t.size[i] = size[i];
        t.stride[i] = stride[i];
    }
    return t;
}

static struct ps_tensor part_of_heads(const struct ps_layer *l, void *heads, int64_t part)
{
    return ps_tensor_reshape(ps_layer_head(l, heads, part), 4, (int64_t[]){l->S, l->h, l->N, l->e});
}

/* A, or drop(A) beside it. */
static enum ps_status weights_of(const struct ps_layer *l, struct ps_tensor *weights)
{
    *weights = ps_layer_attention(l, l->cache->attention);
    if (!l->weights_dropout.threshold) {
        return PS_OK;
    }
    const struct ps_tensor attention = *weights;
    weights->data = l->shared->dropped;
    return drop(l->k, *weights, attention, l->weights_dropout);
}

/* y = residual + drop(attention(a) W_o + b_o), A = softmax(q k' / sqrt(e)), of residual attention plus the scores of the layer
 * below. */
static enum ps_status attention_branch(const struct ps_layer *l, struct ps_tensor y, struct ps_tensor a, struct ps_tensor residual)
{
    const struct ps_kernels *k = l->k;
    const struct ps_layer_cache *c = l->cache;
    const struct ps_shared_cache *s = l->shared;
    const struct ps_tensor *w = l->weight;
    int64_t d = l->d, R = l->R;
    struct ps_tensor rows = ps_layer_rows(l, s->rows, 3 * d);
    for (int p = 0; p < 3; p++) {
        struct ps_tensor part = ps_tensor_slice(rows, 1, p * d, d);
        PS_TRY(ps_product(k, part, a, ps_tensor_slice(w[PS_W_QKV], 1, p * d, d), 1, 0));
        PS_TRY(binary(k, part, part, PS_ADD, across_rows(ps_tensor_slice(w[PS_B_QKV], 0, p * d, d), R)));
    }
    PS_TRY(ps_layer_rope(l, rows, 0));
    for (int p = 0; p < 3; p++) {
        struct ps_tensor part = ps_tensor_slice(rows, 1, p * d, d);
        PS_TRY(k->strided_copy(k, &(struct ps_strided_copy){.y = part_of_heads(l, c->heads, p), .x = part_of_rows(l, part)}));
    }
    struct ps_tensor A = ps_layer_attention(l, c->attention), weights;
    int64_t matrices = l->S * l->h;
    struct ps_tensor extreme = ps_tensor_2d(s->column_a, k->real, matrices, l->N);
    PS_TRY(ps_product(k, A, ps_layer_head(l, c->heads, 0), ps_transposed(ps_layer_head(l, c->heads, 1)), 1, 0));
    PS_TRY(affine(k, A, l->scale, A, 0));
    if (l->residual_attention) {
        struct ps_tensor scores = ps_layer_attention(l, s->scores);
        PS_TRY(l->first ? affine(k, scores, 1, A, 0) : binary(k, scores, scores, PS_ADD, A));
        PS_TRY(affine(k, A, 1, scores, 0));
    }
    PS_TRY(k->reduce(k, &(struct ps_reduce){.y = extreme, .x = A, .function = PS_MAX}));
    PS_TRY(binary(k, A, A, PS_SUBTRACT, across_columns(extreme, l->N)));
    PS_TRY(unary(k, A, PS_EXP, A));
    PS_TRY(sum_last(k, extreme, A));
    PS_TRY(binary(k, A, A, PS_DIVIDE, across_columns(extreme, l->N)));
    PS_TRY(weights_of(l, &weights));
    PS_TRY(ps_product(k, ps_layer_head(l, s->mixed, 0), weights, ps_layer_head(l, c->heads, 2), 1, 0));
    struct ps_tensor merged = ps_layer_rows(l, c->merged, d);
    PS_TRY(k->strided_copy(k, &(struct ps_strided_copy){.y = part_of_rows(l, merged), .x = part_of_heads(l, s->mixed, 0)}));
    PS_TRY(ps_product(k, y, merged, w[PS_W_O], 1, 0));
    PS_TRY(binary(k, y, y, PS_ADD, across_rows(w[PS_B_O], R)));
    PS_TRY(drop(k, y, y, l->attention_dropout));
    return binary(k, y, y, PS_ADD, residual);
}

/* The activation of x [R, f], of swiglu's gate [R, 2f]; `curve` keeps what its derivative needs: gelu's tanh or erf, the sigmoid.
 */
static enum ps_status activation(const struct ps_layer *l, struct ps_tensor y, struct ps_tensor x, struct ps_tensor curve)
{
    const struct ps_kernels *k = l->k;
    struct ps_tensor gate = ps_tensor_slice(x, 1, 0, l->f), value = ps_tensor_slice(x, 1, l->inner - l->f, l->f);
    switch (l->activation) {
    case PS_GELU_TANH:
        PS_TRY(unary(k, curve, PS_SQUARE, x));
        PS_TRY(affine(k, curve, CUBIC * SLOPE, curve, SLOPE));
        PS_TRY(binary(k, curve, curve, PS_MULTIPLY, x));
        PS_TRY(unary(k, curve, PS_TANH, curve));
        break;
    case PS_GELU:
        PS_TRY(affine(k, curve, sqrt(0.5), x, 0));
        PS_TRY(unary(k, curve, PS_ERF, curve));
        break;
    case PS_RELU:
        return unary(k, y, PS_MAX_0, x);
    case PS_SWIGLU:
        PS_TRY(affine(k, curve, -1, gate, 0));
        PS_TRY(unary(k, curve, PS_EXP, curve));
        PS_TRY(affine(k, curve, 1, curve, 1));
        PS_TRY(unary(k, curve, PS_RECIPROCAL, curve));
        PS_TRY(binary(k, y, curve, PS_MULTIPLY, gate));
        return binary(k, y, y, PS_MULTIPLY, value);
    }
    PS_TRY(affine(k, y, 0.5, curve, 0.5));
    return binary(k, y, y, PS_MULTIPLY, x);
}

/* y = residual + drop(drop(activation(a W_1 + b_1)) W_2 + b_2) */
static enum ps_status feed_forward_branch(const struct ps_layer *l, struct ps_tensor y, struct ps_tensor a,
                                          struct ps_tensor residual)
{
    const struct ps_kernels *k = l->k;
    const struct ps_layer_cache *c = l->cache;
    const struct ps_tensor *w = l->weight;
    struct ps_tensor x = ps_layer_rows(l, c->hidden_in, l->inner), hidden = ps_layer_rows(l, c->hidden, l->f);
    PS_TRY(ps_product(k, x, a, w[PS_W_1], 1, 0));
    PS_TRY(binary(k, x, x, PS_ADD, across_rows(w[PS_B_1], l->R)));
    PS_TRY(activation(l, hidden, x, ps_layer_rows(l, c->hidden_curve, l->f)));
    PS_TRY(drop(k, hidden, hidden, l->hidden_dropout));
    PS_TRY(ps_product(k, y, hidden, w[PS_W_2], 1, 0));
    PS_TRY(binary(k, y, y, PS_ADD, across_rows(w[PS_B_2], l->R)));
    PS_TRY(drop(k, y, y, l->output_dropout));
    return binary(k, y, y, PS_ADD, residual);
}

enum ps_status ps_layer_none_forward(const struct ps_layer *l)
{
    const struct ps_layer_cache *c = l->cache;
    struct ps_tensor first = ps_layer_rows(l, c->norm1_out, l->d), residual = ps_layer_rows(l, c->residual, l->d);
    if (l->norm_place == PS_NORM_POST) {
        struct ps_tensor sum = ps_layer_rows(l, c->sum, l->d);
        PS_TRY(attention_branch(l, residual, l->u, l->u));
        PS_TRY(norm_forward(l, PS_NORM_1, first, residual));
        PS_TRY(feed_forward_branch(l, sum, first, first));
        return norm_forward(l, PS_NORM_2, l->y, sum);
    }
    struct ps_tensor second = ps_layer_rows(l, c->norm2_out, l->d);
    PS_TRY(norm_forward(l, PS_NORM_1, first, l->u));
    PS_TRY(attention_branch(l, residual, first, l->u));
    PS_TRY(norm_forward(l, PS_NORM_2, second, residual));
    return feed_forward_branch(l, l->y, second, residual);
}

/* dx = dy activation'(x), in place but of swiglu. gelu_tanh: (1 + t)/2 + x (1 - t^2) SLOPE (1 + 3 CUBIC x^2)/2, t the saved tanh;
 * gelu: (1 + t)/2 + x exp(-x^2/2)/sqrt(2 pi), t the saved erf; swiglu: of the value g s, of the gate g, with s the saved sigmoid,
 * s (1 + g (1 - s)) value. */
static enum ps_status activation_backward(const struct ps_layer *l, struct ps_tensor dx, struct ps_tensor dy, struct ps_tensor x,
                                          struct ps_tensor t)
{
    const struct ps_kernels *k = l->k;
    struct ps_tensor p = ps_layer_rows(l, l->shared->wide_a, l->f), q = ps_layer_rows(l, l->shared->wide_b, l->f);
    struct ps_tensor gate = ps_tensor_slice(x, 1, 0, l->f), value = ps_tensor_slice(x, 1, l->inner - l->f, l->f);
    switch (l->activation) {
    case PS_GELU_TANH:
        PS_TRY(unary(k, p, PS_SQUARE, t));
        PS_TRY(affine(k, p, -0.5, p, 0.5));
        PS_TRY(unary(k, q, PS_SQUARE, x));
        PS_TRY(affine(k, q, 3 * CUBIC * SLOPE, q, SLOPE));
        PS_TRY(binary(k, p, p, PS_MULTIPLY, q));
        PS_TRY(binary(k, p, p, PS_MULTIPLY, x));
        break;
    case PS_GELU:
        PS_TRY(unary(k, p, PS_SQUARE, x));
        PS_TRY(affine(k, p, -0.5, p, 0));
        PS_TRY(unary(k, p, PS_EXP, p));
        PS_TRY(affine(k, p, SLOPE / 2, p, 0));
        PS_TRY(binary(k, p, p, PS_MULTIPLY, x));
        break;
    case PS_RELU:
        PS_TRY(unary(k, p, PS_STEP, x));
        return binary(k, dx, dy, PS_MULTIPLY, p);
    case PS_SWIGLU: {
        struct ps_tensor d_gate = ps_tensor_slice(dx, 1, 0, l->f), d_value = ps_tensor_slice(dx, 1, l->f, l->f);
        PS_TRY(binary(k, q, gate, PS_MULTIPLY, t)); /* g s */
        PS_TRY(binary(k, d_value, dy, PS_MULTIPLY, q));
        PS_TRY(binary(k, p, q, PS_MULTIPLY, t)); /* g s^2 */
        PS_TRY(binary(k, q, q, PS_SUBTRACT, p));
        PS_TRY(binary(k, q, q, PS_ADD, t));
        PS_TRY(binary(k, q, q, PS_MULTIPLY, value));
        return binary(k, d_gate, dy, PS_MULTIPLY, q);
    }
    }
    PS_TRY(affine(k, q, 0.5, t, 0.5));
    PS_TRY(binary(k, p, p, PS_ADD, q));
    return binary(k, dx, dy, PS_MULTIPLY, p);
}

/* branch = the gradient of the feed-forward's input, from dy, that of its end. */
static enum ps_status feed_forward_backward(const struct ps_layer *l, struct ps_tensor branch, struct ps_tensor dy,
                                            struct ps_tensor a)
{
    const struct ps_kernels *k = l->k;
    const struct ps_layer_cache *c = l->cache;
    const struct ps_tensor *w = l->weight, *g = l->gradient;
    struct ps_tensor masked = ps_layer_rows(l, l->shared->masked, l->d), d_hidden = ps_layer_rows(l, l->shared->d_hidden, l->f);
    struct ps_tensor d_inner = ps_layer_rows(l, l->activation == PS_SWIGLU ? l->shared->d_hidden_in : d_hidden.data, l->inner);
    PS_TRY(drop(k, masked, dy, l->output_dropout));
    PS_TRY(sum_rows(k, g[PS_B_2], masked));
    PS_TRY(ps_product(k, g[PS_W_2], ps_transposed(ps_layer_rows(l, c->hidden, l->f)), masked, 1, 1));
    PS_TRY(ps_product(k, d_hidden, masked, ps_transposed(w[PS_W_2]), 1, 0));
    PS_TRY(drop(k, d_hidden, d_hidden, l->hidden_dropout));
    PS_TRY(activation_backward(l, d_inner, d_hidden, ps_layer_rows(l, c->hidden_in, l->inner),
                               ps_layer_rows(l, c->hidden_curve, l->f)));
    PS_TRY(sum_rows(k, g[PS_B_1], d_inner));
    PS_TRY(ps_product(k, g[PS_W_1], ps_transposed(a), d_inner, 1, 1));
    return ps_product(k, branch, d_inner, ps_transposed(w[PS_W_1]), 1, 0);
}

/* The same of attention. */
static enum ps_status attention_backward(const struct ps_layer *l, struct ps_tensor branch, struct ps_tensor dy, struct ps_tensor a)
{
    const struct ps_kernels *k = l->k;
    const struct ps_layer_cache *c = l->cache;
    const struct ps_shared_cache *s = l->shared;
    const struct ps_tensor *w = l->weight, *g = l->gradient;
    int64_t d = l->d;
    struct ps_tensor masked = ps_layer_rows(l, s->masked, d);
    PS_TRY(drop(k, masked, dy, l->attention_dropout));
    PS_TRY(sum_rows(k, g[PS_B_O], masked));
    PS_TRY(ps_product(k, g[PS_W_O], ps_transposed(ps_layer_rows(l, c->merged, d)), masked, 1, 1));
    PS_TRY(ps_product(k, branch, masked, ps_transposed(w[PS_W_O]), 1, 0));
    PS_TRY(k->strided_copy(k, &(struct ps_strided_copy){.y = part_of_heads(l, s->mixed, 0), .x = part_of_rows(l, branch)}));

    /* A = softmax(scores), mixed = drop(A) v */
    struct ps_tensor A = ps_layer_attention(l, c->attention), dA = ps_layer_attention(l, s->d_attention), weights;
    struct ps_tensor d_mixed = ps_layer_head(l, s->mixed, 0), product = ps_layer_attention(l, s->wide_a);
    struct ps_tensor dot = ps_tensor_2d(s->column_a, k->real, l->S * l->h, l->N);
    PS_TRY(weights_of(l, &weights));
    PS_TRY(ps_product(k, ps_layer_head(l, s->d_heads, 2), ps_transposed(weights), d_mixed, 1, 0));
    PS_TRY(ps_product(k, dA, d_mixed, ps_transposed(ps_layer_head(l, c->heads, 2)), 1, 0));
    if (l->weights_dropout.threshold) {
        PS_TRY(drop(k, dA, dA, l->weights_dropout));
    }
    PS_TRY(binary(k, product, dA, PS_MULTIPLY, A));
    PS_TRY(sum_last(k, dot, product));
    PS_TRY(binary(k, dA, dA, PS_SUBTRACT, across_columns(dot, l->N)));
    PS_TRY(binary(k, dA, dA, PS_MULTIPLY, A));
    if (l->residual_attention) {
        struct ps_tensor d_scores = ps_layer_attention(l, s->d_scores);
        PS_TRY(l->last ? affine(k, d_scores, 1, dA, 0) : binary(k, d_scores, d_scores, PS_ADD, dA));
        PS_TRY(affine(k, dA, 1, d_scores, 0));
    }
    PS_TRY(affine(k, dA, l->scale, dA, 0));
    PS_TRY(ps_product(k, ps_layer_head(l, s->d_heads, 0), dA, ps_layer_head(l, c->heads, 1), 1, 0));
    PS_TRY(ps_product(k, ps_layer_head(l, s->d_heads, 1), ps_transposed(dA), ps_layer_head(l, c->heads, 0), 1, 0));

    /* q, k, v = a W + b */
    struct ps_tensor rows = ps_layer_rows(l, s->rows, 3 * d);
    for (int p = 0; p < 3; p++) {
        struct ps_tensor part = ps_tensor_slice(rows, 1, p * d, d);
        PS_TRY(k->strided_copy(k, &(struct ps_strided_copy){.y = part_of_rows(l, part), .x = part_of_heads(l, s->d_heads, p)}));
    }
    PS_TRY(ps_layer_rope(l, rows, 1));
    for (int p = 0; p < 3; p++) {
        struct ps_tensor part = ps_tensor_slice(rows, 1, p * d, d);
        PS_TRY(sum_rows(k, ps_tensor_slice(g[PS_B_QKV], 0, p * d, d), part));
        PS_TRY(ps_product(k, ps_tensor_slice(g[PS_W_QKV], 1, p * d, d), ps_transposed(a), part, 1, 1));
    }
    return ps_product(k, branch, rows, ps_transposed(w[PS_W_QKV]), 1, 0);
}

enum ps_status ps_layer_none_backward(const struct ps_layer *l)
{
    const struct ps_kernels *k = l->k;
    const struct ps_layer_cache *c = l->cache;
    struct ps_tensor gradient = ps_layer_rows(l, l->shared->gradient, l->d), branch = ps_layer_rows(l, l->shared->branch, l->d);
    struct ps_tensor first = ps_layer_rows(l, c->norm1_out, l->d);
    if (l->norm_place == PS_NORM_POST) {
        PS_TRY(norm_backward(l, PS_NORM_2, gradient, gradient));
        PS_TRY(feed_forward_backward(l, branch, gradient, first));
        PS_TRY(binary(k, gradient, gradient, PS_ADD, branch));
        PS_TRY(norm_backward(l, PS_NORM_1, gradient, gradient));
        PS_TRY(attention_backward(l, branch, gradient, l->u));
        return binary(k, gradient, gradient, PS_ADD, branch);
    }
    PS_TRY(feed_forward_backward(l, branch, gradient, ps_layer_rows(l, c->norm2_out, l->d)));
    PS_TRY(norm_backward(l, PS_NORM_2, branch, branch));
    PS_TRY(binary(k, gradient, gradient, PS_ADD, branch));
    PS_TRY(attention_backward(l, branch, gradient, first));
    PS_TRY(norm_backward(l, PS_NORM_1, branch, branch));
    return binary(k, gradient, gradient, PS_ADD, branch);
}
