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

/* y = xhat gamma + beta; xhat, rstd kept. */
static enum ps_status layernorm(const struct ps_layer *l, struct ps_tensor y, struct ps_tensor xhat, void *rstd_buffer,
                                struct ps_tensor x, struct ps_tensor gamma, struct ps_tensor beta)
{
    const struct ps_kernels *k = l->k;
    struct ps_tensor mean = ps_tensor_1d(l->shared->column_a, k->real, l->R), rstd = ps_layer_statistics(l, rstd_buffer);
    PS_TRY(sum_last(k, mean, x));
    PS_TRY(affine(k, mean, 1.0 / (double)l->d, mean, 0));
    PS_TRY(binary(k, xhat, x, PS_SUBTRACT, across_columns(mean, l->d)));
    PS_TRY(unary(k, y, PS_SQUARE, xhat));
    PS_TRY(sum_last(k, rstd, y));
    PS_TRY(affine(k, rstd, 1.0 / (double)l->d, rstd, PS_LAYERNORM_EPSILON));
    PS_TRY(unary(k, rstd, PS_RSQRT, rstd));
    PS_TRY(binary(k, xhat, xhat, PS_MULTIPLY, across_columns(rstd, l->d)));
    PS_TRY(binary(k, y, xhat, PS_MULTIPLY, across_rows(gamma, l->R)));
    return binary(k, y, y, PS_ADD, across_rows(beta, l->R));
}

/* dx from dy, in place allowed; with g = dy gamma: dx = rstd (g - mean(g) - xhat mean(g xhat)). */
static enum ps_status layernorm_backward(const struct ps_layer *l, struct ps_tensor dx, struct ps_tensor dgamma,
                                         struct ps_tensor dbeta, struct ps_tensor dy, struct ps_tensor xhat, void *rstd_buffer,
                                         struct ps_tensor gamma)
{
    const struct ps_kernels *k = l->k;
    struct ps_tensor product = ps_layer_rows(l, l->shared->narrow_a, l->d), g = ps_layer_rows(l, l->shared->narrow_b, l->d);
    struct ps_tensor mean_g = ps_tensor_1d(l->shared->column_a, k->real, l->R);
    struct ps_tensor mean_gx = ps_tensor_1d(l->shared->column_b, k->real, l->R);
    PS_TRY(sum_rows(k, dbeta, dy));
    PS_TRY(binary(k, product, dy, PS_MULTIPLY, xhat));
    PS_TRY(sum_rows(k, dgamma, product));
    PS_TRY(binary(k, g, dy, PS_MULTIPLY, across_rows(gamma, l->R)));
    PS_TRY(sum_last(k, mean_g, g));
    PS_TRY(affine(k, mean_g, 1.0 / (double)l->d, mean_g, 0));
    PS_TRY(binary(k, product, g, PS_MULTIPLY, xhat));
    PS_TRY(sum_last(k, mean_gx, product));
    PS_TRY(affine(k, mean_gx, 1.0 / (double)l->d, mean_gx, 0));
    PS_TRY(binary(k, product, xhat, PS_MULTIPLY, across_columns(mean_gx, l->d)));
    PS_TRY(binary(k, g, g, PS_SUBTRACT, across_columns(mean_g, l->d)));
    PS_TRY(binary(k, g, g, PS_SUBTRACT, product));
    return binary(k, dx, g, PS_MULTIPLY, across_columns(ps_layer_statistics(l, rstd_buffer), l->d));
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

enum ps_status ps_layer_none_forward(const struct ps_layer *l)
{
    const struct ps_kernels *k = l->k;
    const struct ps_layer_cache *c = l->cache;
    const struct ps_shared_cache *s = l->shared;
    const struct ps_tensor *w = l->weight;
    int64_t d = l->d, R = l->R;
    struct ps_tensor a = ps_layer_rows(l, c->ln1_out, d), rows = ps_layer_rows(l, s->rows, 3 * d);
    PS_TRY(layernorm(l, a, ps_layer_rows(l, c->ln1_xhat, d), c->ln1_rstd, l->u, w[PS_NORM1_GAMMA], w[PS_NORM1_BETA]));
    for (int p = 0; p < 3; p++) {
        struct ps_tensor part = ps_tensor_slice(rows, 1, p * d, d);
        PS_TRY(ps_product(k, part, a, ps_tensor_slice(w[PS_W_QKV], 1, p * d, d), 1, 0));
        PS_TRY(binary(k, part, part, PS_ADD, across_rows(ps_tensor_slice(w[PS_B_QKV], 0, p * d, d), R)));
        PS_TRY(k->strided_copy(k, &(struct ps_strided_copy){.y = part_of_heads(l, c->heads, p), .x = part_of_rows(l, part)}));
    }

    /* A = softmax(q k' / sqrt(e)) */
    struct ps_tensor A = ps_layer_attention(l, c->attention);
    int64_t matrices = l->S * l->h;
    struct ps_tensor extreme = ps_tensor_2d(s->column_a, k->real, matrices, l->N);
    PS_TRY(ps_product(k, A, ps_layer_head(l, c->heads, 0), ps_transposed(ps_layer_head(l, c->heads, 1)), 1, 0));
    PS_TRY(affine(k, A, 1 / sqrt((double)l->e), A, 0));
    PS_TRY(k->reduce(k, &(struct ps_reduce){.y = extreme, .x = A, .function = PS_MAX}));
    PS_TRY(binary(k, A, A, PS_SUBTRACT, across_columns(extreme, l->N)));
    PS_TRY(unary(k, A, PS_EXP, A));
    PS_TRY(sum_last(k, extreme, A));
    PS_TRY(binary(k, A, A, PS_DIVIDE, across_columns(extreme, l->N)));
    PS_TRY(ps_product(k, ps_layer_head(l, s->mixed, 0), A, ps_layer_head(l, c->heads, 2), 1, 0));
    struct ps_tensor merged = ps_layer_rows(l, c->merged, d);
    PS_TRY(k->strided_copy(k, &(struct ps_strided_copy){.y = part_of_rows(l, merged), .x = part_of_heads(l, s->mixed, 0)}));

    /* r = u + drop(merged W_o + b_o) */
    struct ps_tensor r = ps_layer_rows(l, c->residual, d);
    PS_TRY(ps_product(k, r, merged, w[PS_W_O], 1, 0));
    PS_TRY(binary(k, r, r, PS_ADD, across_rows(w[PS_B_O], R)));
    PS_TRY(drop(k, r, r, l->attention_dropout));
    PS_TRY(binary(k, r, r, PS_ADD, l->u));

    /* hidden = drop(gelu(LN2(r) W_1 + b_1)) */
    struct ps_tensor ln2_out = ps_layer_rows(l, c->ln2_out, d), x = ps_layer_rows(l, c->hidden_in, l->f);
    struct ps_tensor t = ps_layer_rows(l, c->hidden_tanh, l->f), hidden = ps_layer_rows(l, c->hidden, l->f);
    PS_TRY(layernorm(l, ln2_out, ps_layer_rows(l, c->ln2_xhat, d), c->ln2_rstd, r, w[PS_NORM2_GAMMA], w[PS_NORM2_BETA]));
    PS_TRY(ps_product(k, x, ln2_out, w[PS_W_1], 1, 0));
    PS_TRY(binary(k, x, x, PS_ADD, across_rows(w[PS_B_1], R)));
    PS_TRY(unary(k, t, PS_SQUARE, x));
    PS_TRY(affine(k, t, CUBIC * SLOPE, t, SLOPE));
    PS_TRY(binary(k, t, t, PS_MULTIPLY, x));
    PS_TRY(unary(k, t, PS_TANH, t));
    PS_TRY(affine(k, hidden, 0.5, t, 0.5));
    PS_TRY(binary(k, hidden, hidden, PS_MULTIPLY, x));
    PS_TRY(drop(k, hidden, hidden, l->hidden_dropout));

    /* y = r + drop(hidden W_2 + b_2) */
    struct ps_tensor y = l->y;
    PS_TRY(ps_product(k, y, hidden, w[PS_W_2], 1, 0));
    PS_TRY(binary(k, y, y, PS_ADD, across_rows(w[PS_B_2], R)));
    PS_TRY(drop(k, y, y, l->output_dropout));
    return binary(k, y, y, PS_ADD, r);
}

/* dx = dy gelu'(x), gelu' = (1 + t)/2 + x (1 - t^2) SLOPE (1 + 3 CUBIC x^2)/2, t the saved tanh; in place on dy. */
static enum ps_status activation_backward(const struct ps_layer *l, struct ps_tensor dy, struct ps_tensor x, struct ps_tensor t)
{
    const struct ps_kernels *k = l->k;
    struct ps_tensor p = ps_layer_rows(l, l->shared->wide_a, l->f), q = ps_layer_rows(l, l->shared->wide_b, l->f);
    PS_TRY(unary(k, p, PS_SQUARE, t));
    PS_TRY(affine(k, p, -0.5, p, 0.5));
    PS_TRY(unary(k, q, PS_SQUARE, x));
    PS_TRY(affine(k, q, 3 * CUBIC * SLOPE, q, SLOPE));
    PS_TRY(binary(k, p, p, PS_MULTIPLY, q));
    PS_TRY(binary(k, p, p, PS_MULTIPLY, x));
    PS_TRY(affine(k, q, 0.5, t, 0.5));
    PS_TRY(binary(k, p, p, PS_ADD, q));
    return binary(k, dy, dy, PS_MULTIPLY, p);
}

enum ps_status ps_layer_none_backward(const struct ps_layer *l)
{
    const struct ps_kernels *k = l->k;
    const struct ps_layer_cache *c = l->cache;
    const struct ps_shared_cache *s = l->shared;
    const struct ps_tensor *w = l->weight, *g = l->gradient;
    int64_t d = l->d;
    struct ps_tensor gradient = ps_layer_rows(l, s->gradient, d), masked = ps_layer_rows(l, s->masked, d);
    struct ps_tensor branch = ps_layer_rows(l, s->branch, d), d_hidden = ps_layer_rows(l, s->d_hidden, l->f);

    /* y = r + drop(hidden W_2 + b_2) */
    PS_TRY(drop(k, masked, gradient, l->output_dropout));
    PS_TRY(sum_rows(k, g[PS_B_2], masked));
    PS_TRY(ps_product(k, g[PS_W_2], ps_transposed(ps_layer_rows(l, c->hidden, l->f)), masked, 1, 1));
    PS_TRY(ps_product(k, d_hidden, masked, ps_transposed(w[PS_W_2]), 1, 0));

    /* hidden = drop(gelu(LN2(r) W_1 + b_1)) */
    PS_TRY(drop(k, d_hidden, d_hidden, l->hidden_dropout));
    PS_TRY(activation_backward(l, d_hidden, ps_layer_rows(l, c->hidden_in, l->f), ps_layer_rows(l, c->hidden_tanh, l->f)));
    PS_TRY(sum_rows(k, g[PS_B_1], d_hidden));
    PS_TRY(ps_product(k, g[PS_W_1], ps_transposed(ps_layer_rows(l, c->ln2_out, d)), d_hidden, 1, 1));
    PS_TRY(ps_product(k, branch, d_hidden, ps_transposed(w[PS_W_1]), 1, 0));
    PS_TRY(layernorm_backward(l, branch, g[PS_NORM2_GAMMA], g[PS_NORM2_BETA], branch, ps_layer_rows(l, c->ln2_xhat, d), c->ln2_rstd,
                              w[PS_NORM2_GAMMA]));
    PS_TRY(binary(k, gradient, gradient, PS_ADD, branch));

    /* r = u + drop(merged W_o + b_o) */
    PS_TRY(drop(k, masked, gradient, l->attention_dropout));
    PS_TRY(sum_rows(k, g[PS_B_O], masked));
    PS_TRY(ps_product(k, g[PS_W_O], ps_transposed(ps_layer_rows(l, c->merged, d)), masked, 1, 1));
    PS_TRY(ps_product(k, branch, masked, ps_transposed(w[PS_W_O]), 1, 0));
    PS_TRY(k->strided_copy(k, &(struct ps_strided_copy){.y = part_of_heads(l, s->mixed, 0), .x = part_of_rows(l, branch)}));

    /* A = softmax(q k' / sqrt(e)), mixed = A v */
    struct ps_tensor A = ps_layer_attention(l, c->attention), dA = ps_layer_attention(l, s->d_attention);
    struct ps_tensor d_mixed = ps_layer_head(l, s->mixed, 0), product = ps_layer_attention(l, s->wide_a);
    struct ps_tensor dot = ps_tensor_2d(s->column_a, k->real, l->S * l->h, l->N);
    PS_TRY(ps_product(k, ps_layer_head(l, s->d_heads, 2), ps_transposed(A), d_mixed, 1, 0));
    PS_TRY(ps_product(k, dA, d_mixed, ps_transposed(ps_layer_head(l, c->heads, 2)), 1, 0));
    PS_TRY(binary(k, product, dA, PS_MULTIPLY, A));
    PS_TRY(sum_last(k, dot, product));
    PS_TRY(binary(k, dA, dA, PS_SUBTRACT, across_columns(dot, l->N)));
    PS_TRY(binary(k, dA, dA, PS_MULTIPLY, A));
    PS_TRY(affine(k, dA, 1 / sqrt((double)l->e), dA, 0));
    PS_TRY(ps_product(k, ps_layer_head(l, s->d_heads, 0), dA, ps_layer_head(l, c->heads, 1), 1, 0));
    PS_TRY(ps_product(k, ps_layer_head(l, s->d_heads, 1), ps_transposed(dA), ps_layer_head(l, c->heads, 0), 1, 0));

    /* q, k, v = a W + b */
    struct ps_tensor rows = ps_layer_rows(l, s->rows, 3 * d), a = ps_transposed(ps_layer_rows(l, c->ln1_out, d));
    for (int p = 0; p < 3; p++) {
        struct ps_tensor part = ps_tensor_slice(rows, 1, p * d, d);
        PS_TRY(k->strided_copy(k, &(struct ps_strided_copy){.y = part_of_rows(l, part), .x = part_of_heads(l, s->d_heads, p)}));
        PS_TRY(sum_rows(k, ps_tensor_slice(g[PS_B_QKV], 0, p * d, d), part));
        PS_TRY(ps_product(k, ps_tensor_slice(g[PS_W_QKV], 1, p * d, d), a, part, 1, 1));
    }
    PS_TRY(ps_product(k, branch, rows, ps_transposed(w[PS_W_QKV]), 1, 0));
    PS_TRY(layernorm_backward(l, branch, g[PS_NORM1_GAMMA], g[PS_NORM1_BETA], branch, ps_layer_rows(l, c->ln1_xhat, d), c->ln1_rstd,
                              w[PS_NORM1_GAMMA]));
    return binary(k, gradient, gradient, PS_ADD, branch);
}
