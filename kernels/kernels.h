/* The table of operations: every operation that the training step needs, once. A table is opened for one backend and one precision;
 * model/ and optim/ are written against it alone.
 *
 * Conventions
 *  - An operation is called as k->name(k, &(struct ps_name){...}). It enqueues on the device's PS_COMPUTE stream (the CPU finishes
 * it before it returns), never allocates, never waits, and may be captured.
 *  - An argument struct begins with its tensors, outputs first; what else follows is plain values. The list below counts the
 * tensors, so hooks can show any operation's shapes without knowing it.
 *  - "=" outputs are overwritten, whatever they held; "+=" outputs are added to. Unless a comment says so, outputs alias nothing.
 *  - Tensors are row-major and contiguous unless a comment says "any strides".
 *  - Three types follow from the precision: k->real of activations, their gradients and the weights that products read;
 * k->parameter of parameters, biases, gradients and AdamW's m; k->statistics of mean, rstd and std. A tensor is of type real unless
 * a comment says otherwise. Arithmetic between loading and storing is at least fp32; stores round to nearest, ties to even.
 *  - Errors: PS_UNSUPPORTED for a shape or stride the backend cannot serve, PS_DEVICE when the device fails. Sizes that do not fit
 *    together are the caller's bug and come back as PS_UNSUPPORTED too, with the sizes in the message.
 *  - Results do not vary from run to run: no floating-point atomics; partial sums are reduced in a fixed order.
 *
 * Sizes: B batch, C channels, S = B*C sequences, L seq_len, H pred_len, P patch_len, N patches, d d_model, h n_heads, e = d/h, f
 * d_ff, R = S*N rows, W windows. */
#ifndef PS_KERNELS_KERNELS_H
#define PS_KERNELS_KERNELS_H

#include "kernels/device.h"
#include "kernels/share.h"
#include "kernels/status.h"
#include "kernels/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* fp64: reference backend only. fp32: true fp32 arithmetic. tf32: products' operands rounded to tf32, the rest as fp32. bf16: bf16
 * operands and activations, fp32 accumulation and master parameters. fp16: likewise, with tf32's significand but exponents down to
 * 2^-24 and up to 2^15 only, so the loss is scaled before it is differentiated. */
enum ps_precision { PS_FP64, PS_FP32, PS_TF32, PS_PRECISION_BF16, PS_FP16 };
const char *ps_precision_name(enum ps_precision precision); /* "fp64", "fp32", "tf32", "bf16", "fp16" */

enum ps_kind {
    PS_KIND_GEMM,
    PS_KIND_SUB,        /* a sub-kernel of an encoder layer at level gemm */
    PS_KIND_ELEMENTARY, /* what level none is made of */
    PS_KIND_MODEL,      /* gather, embedding, head, loss */
    PS_KIND_OPTIM,
    PS_KIND_FUSED, /* several of the above in one; optional */
};

/* X(name, kind, tensors, flops an element of the largest tensor). GEMMs and fused layers count their own FLOPs. */
#define PS_KERNEL_LIST(X)                           \
    X(gemm, PS_KIND_GEMM, 3, 0)                     \
    X(layernorm, PS_KIND_SUB, 6, 8)                 \
    X(bias_add, PS_KIND_SUB, 2, 1)                  \
    X(head_split, PS_KIND_SUB, 2, 0)                \
    X(softmax, PS_KIND_SUB, 2, 5)                   \
    X(head_merge, PS_KIND_SUB, 2, 0)                \
    X(bias_residual_add, PS_KIND_SUB, 4, 3)         \
    X(bias_activation, PS_KIND_SUB, 3, 12)          \
    X(batchnorm_statistics, PS_KIND_SUB, 5, 4)      \
    X(batchnorm, PS_KIND_SUB, 6, 4)                 \
    X(rope, PS_KIND_SUB, 3, 3)                      \
    X(layernorm_backward, PS_KIND_SUB, 11, 14)      \
    X(activation_backward, PS_KIND_SUB, 4, 18)      \
    X(softmax_backward, PS_KIND_SUB, 4, 4)          \
    X(batchnorm_backward, PS_KIND_SUB, 12, 10)      \
    X(bias_grad, PS_KIND_SUB, 3, 2)                 \
    X(add, PS_KIND_SUB, 3, 1)                       \
    X(affine, PS_KIND_ELEMENTARY, 2, 2)             \
    X(unary, PS_KIND_ELEMENTARY, 2, 1)              \
    X(binary, PS_KIND_ELEMENTARY, 3, 1)             \
    X(reduce, PS_KIND_ELEMENTARY, 2, 1)             \
    X(strided_copy, PS_KIND_ELEMENTARY, 2, 0)       \
    X(drop, PS_KIND_ELEMENTARY, 2, 1)               \
    X(gather_patches, PS_KIND_MODEL, 5, 6)          \
    X(gather_targets, PS_KIND_MODEL, 4, 0)          \
    X(bias_position_add, PS_KIND_MODEL, 4, 3)       \
    X(channel_affine, PS_KIND_MODEL, 5, 2)          \
    X(channel_affine_backward, PS_KIND_MODEL, 6, 4) \
    X(forecast, PS_KIND_MODEL, 5, 3)                \
    X(forecast_loss, PS_KIND_MODEL, 7, 8)           \
    X(forecast_error, PS_KIND_MODEL, 6, 8)          \
    X(mask_patches, PS_KIND_MODEL, 3, 0)            \
    X(sum_squares, PS_KIND_OPTIM, 1, 2)             \
    X(adamw, PS_KIND_OPTIM, 6, 16)                  \
    X(advance, PS_KIND_OPTIM, 0, 0)                 \
    X(attention, PS_KIND_FUSED, 5, 0)               \
    X(attention_backward, PS_KIND_FUSED, 10, 0)     \
    X(feed_forward, PS_KIND_FUSED, 7, 0)            \
    X(feed_forward_backward, PS_KIND_FUSED, 11, 0)  \
    X(encoder_forward, PS_KIND_FUSED, 3, 0)         \
    X(encoder_backward, PS_KIND_FUSED, 6, 0)        \
    X(bias_residual_statistics, PS_KIND_SUB, 8, 7)  \
    X(gemm_bias, PS_KIND_GEMM, 5, 0)                \
    X(gemm_gradient, PS_KIND_GEMM, 4, 0)            \
    X(gemm_finish, PS_KIND_GEMM, 23, 0)             \
    X(embed_forward, PS_KIND_FUSED, 9, 0)           \
    X(embed_backward, PS_KIND_FUSED, 5, 0)          \
    X(head_step, PS_KIND_FUSED, 10, 0)              \
    X(window_loss, PS_KIND_FUSED, 8, 8)             \
    X(head_sums, PS_KIND_FUSED, 2, 1)               \
    X(batchnorm_join, PS_KIND_SUB, 5, 8)            \
    X(batchnorm_fold, PS_KIND_SUB, 10, 5)           \
    X(batchnorm_unfold, PS_KIND_SUB, 6, 4)          \
    X(count_observed, PS_KIND_MODEL, 2, 1)          \
    X(pad_heads, PS_KIND_SUB, 6, 0)                 \
    X(unpad_heads, PS_KIND_SUB, 6, 1)

enum ps_op {
#define PS_X(name, kind, tensors, flops) PS_OP_##name,
    PS_KERNEL_LIST(PS_X)
#undef PS_X
        PS_OP_COUNT
};

const char *ps_op_name(enum ps_op op);
enum ps_kind ps_op_kind(enum ps_op op);
int ps_op_tensors(enum ps_op op);
/* Floating-point operations of one call (an exponential or a root counts 1). */
double ps_op_flops(enum ps_op op, const void *arguments);
/* Bytes of its tensors, each counted once and += outputs twice: the least a call must move. */
double ps_op_bytes(enum ps_op op, const void *arguments);

/* "[896,42,16] [42,16]": the sizes of its tensors, outputs first; absent ones are left out. */
enum { PS_SHAPES_TEXT = 160 };
void ps_op_shapes(enum ps_op op, const void *arguments, char text[PS_SHAPES_TEXT]);
/* status; of PS_DEVICE the message gets the operation and its shapes in front. */
enum ps_status ps_op_result(enum ps_op op, const void *arguments, enum ps_status status);

/* What the step carries from one replay to the next, in device memory. */
struct ps_step_state {
    uint64_t step;           /* optimiser steps completed; counts dropout's draws */
    uint64_t cursor;         /* windows of this epoch already consumed */
    double loss_sum;         /* this epoch's sum over windows of each window's mean loss */
    double gradient_squares; /* sum of squares of the gradient, from sum_squares */
    uint64_t lost;           /* windows of this epoch whose loss was not finite, and is not in loss_sum */
    uint64_t nonfinite;      /* 1 + the step whose gradient was not finite, since when adamw changes nothing; 0: none */
    uint64_t skipped;        /* steps of this epoch that adamw left out, see ps_adamw.skip */
    uint64_t unobserved;     /* targets of this epoch that were NaN, see ps_loss.missing; those of lost windows do not count */
};

/* Dropout at one site. Element i of the logical tensor (row-major index) draws 16 bits: bits 16*(i%2) .. of word (i%8)/2 of the
 * Philox4x32-10 block with key (seed low, seed high) and counter (first + i/8, site, step low, step high), low half first. It is
 * kept, times scale, when the draw >= threshold. See kernels/philox.h. */
struct ps_dropout {
    uint32_t threshold; /* round(p * 65536); 0: no dropout, nothing drawn */
    float scale;        /* 65536 / (65536 - threshold) */
    uint32_t site;
    uint32_t first; /* blocks before the tensor's, where it is a part of a larger one: of a batch that ranks share */
    uint64_t seed;
    const struct ps_step_state *state; /* device memory; its step counts */
};
/* p in [0, 1): state may be NULL when p is 0. */
struct ps_dropout ps_dropout_make(double p, uint64_t seed, uint32_t site, const struct ps_step_state *state);

/* ---- products ---- */

/* c = alpha * a b + beta * c over 0, 1 or 2 leading batch dimensions: a [.., m, k], b [.., k, n], c [.., m, n]. Any strides (a
 * transpose is a view). beta 0 overwrites, NaN included. FLOPs 2 m n k a matrix. a, b of type real (of a weight its copy, see
 * model/model.h); c of type real or parameter (a weight's gradient, the head's output). */
struct ps_gemm {
    struct ps_tensor c, a, b;
    double alpha, beta;
};

/* ---- sub-kernels of a layer, forward ---- */

/* y = (x - mean) * rstd * gamma + beta for each row; mean, rstd = (type k->statistics). y, x [R, d]; mean, rstd [R]; gamma, beta
 * [d] (type parameter). Population variance, rstd = 1/sqrt(var + epsilon). Ba et al. 2016. Without mean and beta, both, it is
 * RMSNorm: y = x * rstd * gamma, rstd = 1/sqrt(mean_d(x^2) + epsilon). Zhang and Sennrich 2019. */
struct ps_layernorm {
    struct ps_tensor y, mean, rstd, x, gamma, beta;
    double epsilon;
};

/* y += bias, in place. y [R, n], bias [n] (type parameter). */
struct ps_bias_add {
    struct ps_tensor y, bias;
};

/* heads[p, s, j, n, i] = rows[s*N + n, (p*h + j)*e + i]: from rows to heads, for p parts (q, k, v: 3) side by side.
 * heads [parts, S, h, N, e], rows [S*N, parts*h*e]. */
struct ps_head_split {
    struct ps_tensor heads, rows;
};

/* y = softmax of each row of x, rows along the last dimension; computed after subtracting the row's maximum. y may be x. [.., n] */
struct ps_softmax {
    struct ps_tensor y, x;
};

/* The inverse of head_split: rows = heads. */
struct ps_head_merge {
    struct ps_tensor rows, heads;
};

/* mean, var = those of each column of x, the population's, as exact as sums in double of x - mean in fp32 would be; then
 * running_mean += momentum (mean - running_mean), and running_var likewise of var R/(R-1), unless mean or var is not finite: with
 * momentum 0 they stay. x [R, d], R at least 2; the others [d] (type k->statistics). Ioffe and Szegedy 2015. */
struct ps_batchnorm_statistics {
    struct ps_tensor mean, var, running_mean, running_var, x;
    double momentum;
};

/* mean, var = those of the rows of all ranks, of which part i of parts has rank i's, `rows` for each window of its share; then the
 * running ones as batchnorm_statistics says, R the rows of all. parts [ranks, 2, d], the mean and the variance of each; the others
 * [d] (all type k->statistics); a share without windows adds nothing. Chan, Golub and LeVeque 1983. */
struct ps_batchnorm_join {
    struct ps_tensor mean, var, running_mean, running_var, parts;
    struct ps_shares shares;
    int64_t rows;
    double momentum;
};

/* y = (x - mean) / sqrt(var + epsilon) * gamma + beta. y, x [R, d]; mean, var [d] (type k->statistics): a batch's in training, the
 * running ones else; gamma, beta [d] (type parameter). y may be x. */
struct ps_batchnorm {
    struct ps_tensor y, x, mean, var, gamma, beta;
    double epsilon;
};

/* y = residual + drop(x + bias). All [R, d], bias [d] (type parameter). y may be x or residual. */
struct ps_bias_residual_add {
    struct ps_tensor y, x, bias, residual;
    struct ps_dropout dropout;
};

/* Of t: gelu_tanh 0.5 t (1 + tanh(sqrt(2/pi) (t + 0.044715 t^3))); gelu t/2 (1 + erf(t/sqrt(2))) (Hendrycks and Gimpel 2016); relu
 * max(t, 0); swiglu of t and g: silu(g) t, silu(g) = g / (1 + exp(-g)) (Shazeer 2020). */
enum ps_activation { PS_GELU_TANH, PS_GELU, PS_RELU, PS_SWIGLU };

/* y = drop(activation(x + bias)). y, x [R, f], bias [f] (type parameter); y may be x. Of swiglu x [R, 2f] and bias [2f], g in the
 * first f columns, and y is not x. */
struct ps_bias_activation {
    struct ps_tensor y, x, bias;
    struct ps_dropout dropout;
    enum ps_activation activation;
};

/* Rotates each pair of columns (2i, 2i + 1) of row n by the angle a(n, i) of which angles[n, 2i] is the cosine and [n, 2i + 1] the
 * sine, by -a with `inverse` (its gradient): y_2i = x_2i cos a - x_2i+1 sin a, y_2i+1 = x_2i sin a + x_2i+1 cos a. y, x [S, h, N,
 * e], any strides but the last, 1; angles [N, e] (type parameter). y may be x. Su et al. 2021. */
struct ps_rope {
    struct ps_tensor y, x, angles;
    int inverse;
};

/* ---- sub-kernels of a layer, backward ---- */

/* With xhat = (x - mean) rstd and g = dy gamma: dx = rstd (g - mean_d(g) - xhat mean_d(g xhat)), + addend where there is one;
 * dgamma += sum_R dy xhat; dbeta += sum_R dy. dx, dy, x, addend [R, d]; dgamma, dbeta, gamma [d] (type parameter); mean, rstd [R]
 * (type statistics). dx may be dy or addend. Of RMSNorm mean and dbeta are absent: xhat = x rstd, dx = rstd (g - xhat mean_d(g
 * xhat)), + addend. With `masked` [R, d] also bias_grad of dx as it is stored: masked = drop'(dx), which is not dx, dbias [d] (type
 * parameter) += sum_R masked. */
struct ps_layernorm_backward {
    struct ps_tensor dx, dgamma, dbeta, dy, x, mean, rstd, gamma, addend, masked, dbias;
    struct ps_dropout dropout; /* of masked */
};

/* Of a batch's statistics, with g = dy, + more where there is one, rstd = 1/sqrt(var + epsilon) and xhat = (x - mean) rstd:
 * dx = gamma rstd (g - mean_R(g) - xhat mean_R(g xhat)), + addend where there is one; dgamma += sum_R g xhat; dbeta += sum_R g.
 * dx, dy, more, x, addend [R, d]; dgamma, dbeta, gamma [d] (type parameter); mean, var [d] (type statistics). dx may be dy, or
 * addend; never both of more and addend. masked [R, d], where it is there: = drop'(dx) as it is stored.
 * With `means` [2, d] (type statistics) the sums over rows and dx are apart. Without dx: means = (sum_R(g), sum_R(g xhat)) / rows,
 * and dgamma, dbeta +=, for rows that may be a part of `rows`. With dx: it has means, of whoever wrote dy (gemm_finish) or summed
 * over all parts, in place of mean_R(g) and mean_R(g xhat), there is no more, and dgamma and dbeta, which have their share already,
 * stay. */
struct ps_batchnorm_backward {
    struct ps_tensor dx, dgamma, dbeta, masked, dy, more, x, mean, var, gamma, addend, means;
    struct ps_dropout dropout; /* of masked */
    double epsilon;
    int64_t rows; /* with means, without dx */
};

/* dx = activation'(x + bias) * drop'(dy), the mask of bias_activation drawn again. dx, dy, x [R, f], bias [f] (type parameter); dx
 * may be dy. Of swiglu dx, x [R, 2f], bias [2f], and dx is not dy. */
struct ps_activation_backward {
    struct ps_tensor dx, dy, x, bias;
    struct ps_dropout dropout;
    enum ps_activation activation;
};

/* dx = y (dy - sum_row(dy y)), + addend where there is one. All [.., n]. dx may be dy or addend. */
struct ps_softmax_backward {
    struct ps_tensor dx, dy, y, addend;
};

/* masked = drop'(dy) (absent: not written; then dropout must be off or dy already masked); dbias += sum over rows of drop'(dy).
 * dbias [n] (type parameter); masked, dy [R, n]. masked may be dy. */
struct ps_bias_grad {
    struct ps_tensor dbias, masked, dy;
    struct ps_dropout dropout;
};

/* y = a + b, same shapes. y may be a or b. */
struct ps_add {
    struct ps_tensor y, a, b;
};

/* ---- elementary operations: any strides, up to rank PS_MAX_RANK; sources may broadcast with stride 0; type parameter ---- */

/* y = scale * x + shift. y may be x. */
struct ps_affine {
    struct ps_tensor y, x;
    double scale, shift;
};

/* max_0: max(x, 0); step: 1 where x > 0, else 0. */
enum ps_unary_function { PS_EXP, PS_TANH, PS_SQUARE, PS_RSQRT, PS_RECIPROCAL, PS_ERF, PS_MAX_0, PS_STEP };
/* y = function(x). y may be x. */
struct ps_unary {
    struct ps_tensor y, x;
    enum ps_unary_function function;
};

enum ps_binary_function { PS_ADD, PS_SUBTRACT, PS_MULTIPLY, PS_DIVIDE };
/* y = a function b; a and b have y's sizes (broadcast by stride 0). y may be a or b. */
struct ps_binary {
    struct ps_tensor y, a, b;
    enum ps_binary_function function;
};

enum ps_reduce_function { PS_SUM, PS_MAX };
/* y = or += (accumulate, PS_SUM only) the sum or maximum of x over its last dimension. x [.., n], y the leading sizes [..]. */
struct ps_reduce {
    struct ps_tensor y, x;
    enum ps_reduce_function function;
    int accumulate;
};

/* y = x, same sizes, other strides; each of type real or parameter, converted where they differ. */
struct ps_strided_copy {
    struct ps_tensor y, x;
};

/* y = drop(x), and of a gradient drop'(x): the same. Contiguous, both of type real or both parameter; y may be x. */
struct ps_drop {
    struct ps_tensor y, x;
    struct ps_dropout dropout;
};

/* ---- gather, embedding, head, loss ---- */

/* Windows -> patches. Batch element b is window w = indices[state->cursor + b]; its channel c is x_l = inputs[w, c, l]. With revin
 * mean, std = (type k->statistics) its mean and sqrt(var + epsilon) over l, else 0 and 1; with subtract_last mean = x_(L-1), std as
 * before; z = (x - mean)/std; then the last value repeats `stride` times when pad_end; patches[(b*C + c)*N + n, p] = z[first +
 * n*stride + p]. patches [B*C*N, P]; mean, std [B*C]; inputs [W, C, L] float32 (float64 for fp64), any strides (a series is a view
 * in which windows overlap); indices int32 [at least cursor + B]. Kim et al. 2022 (RevIN), Nie et al. 2023 (patching).
 * With masked an x_l that is NaN is unobserved: mean and var are those of what is observed, x_(L-1) stands for the last that is, z
 * is 0 where x is unobserved, and a channel of a window with nothing observed has mean 0 and std 1. Else the same bits. */
struct ps_gather_patches {
    struct ps_tensor patches, mean, std, inputs, indices;
    const struct ps_step_state *state; /* device memory */
    int64_t batch, stride, first;
    int revin, subtract_last, pad_end;
    double epsilon;
    int masked;
};

/* y[b*C + c, t] = targets[indices[state->cursor + b], c, t]. y [B*C, H] (type of targets); targets [W, C, H], any strides. inputs,
 * which may be absent: as gather_patches has them with masked; y is NaN for a channel of a window of which nothing is observed
 * there. */
struct ps_gather_targets {
    struct ps_tensor y, targets, indices, inputs;
    const struct ps_step_state *state;
    int64_t batch;
};

/* y[s*N + n, i] = drop(x[s*N + n, i] + bias[i] + position[n, i]). y, x [S*N, d]; bias [d], position [N, d] (type parameter). y may
 * be x. */
struct ps_bias_position_add {
    struct ps_tensor y, x, bias, position;
    struct ps_dropout dropout;
};

/* Row s of [S, n] has channel c = s % channels: y = (x + offset) w_c + b_c, with `inverse` ((x + offset) - b_c) / (w_c + 1e-10).
 * y, x [S, n], both of type real or both parameter; offset [n] or [C, n], weight (w), bias (b) [C] (type parameter), each of which
 * may be absent, weight and bias together: 0; 1 and 0. y may be x. Kim et al. 2022: RevIN's affine, and what undoes it. */
struct ps_channel_affine {
    struct ps_tensor y, x, offset, weight, bias;
    int64_t channels;
    int inverse;
};

/* Its gradient: dx = dy w_c, d_weight_c += sum dy x, d_bias_c += sum dy; with `inverse` dx = dy / (w_c + 1e-10), d_weight_c -= sum
 * dx y, d_bias_c -= sum dx: `kept` is x, or y with `inverse`. dx, dy [S, n] of one type, kept [S, n], each of type real or
 * parameter; d_weight, d_bias, weight [C] (type parameter). dx may be dy; where it is absent it is not written. */
struct ps_channel_affine_backward {
    struct ps_tensor dx, d_weight, d_bias, dy, kept, weight;
    int64_t channels;
    int inverse;
};

/* What is minimised, with e = yhat - target: e^2; |e|; Huber's, e^2/2 up to |e| = delta and delta (|e| - delta/2) beyond (Huber
 * 1964); of quantiles the mean over them of the pinball loss, max(-quantile e, (1 - quantile) e) (Koenker and Bassett 1978). */
enum ps_loss_kind { PS_LOSS_MSE, PS_LOSS_MAE, PS_LOSS_HUBER, PS_LOSS_QUANTILE };

enum { PS_MOST_QUANTILES = 32 };

/* Zero: MSE of targets that are all there. Where the kind is PS_LOSS_QUANTILE the head gives Q values in place of one, and x and
 * what is made of it are [S, Q H], quantile by quantile: [S, Q, H]. */
struct ps_loss {
    enum ps_loss_kind kind;
    int missing;   /* targets may be NaN, and are left out then; else a NaN is a mistake, which shows in the loss */
    int quantiles; /* Q; 0 but of PS_LOSS_QUANTILE */
    double delta;
    double quantile[PS_MOST_QUANTILES]; /* rising */
};

/* Values that the head gives for each step: Q, or 1. */
static inline int64_t ps_loss_outputs(const struct ps_loss *loss)
{
    return loss->kind == PS_LOSS_QUANTILE ? loss->quantiles : 1;
}

/* Whether fused operations serve it, which know no other. */
static inline int ps_loss_is_plain(const struct ps_loss *loss)
{
    return loss->kind == PS_LOSS_MSE && !loss->missing;
}

/* Which of the values stands for the forecast where one is asked for: of quantiles the one nearest to the median. */
static inline int ps_loss_point(const struct ps_loss *loss)
{
    int nearest = 0;
    for (int q = 1; q < ps_loss_outputs(loss); q++) {
        const double now = loss->quantile[q] - 0.5, then = loss->quantile[nearest] - 0.5;
        nearest = now * now < then * then ? q : nearest;
    }
    return nearest;
}

/* y = (x + bias) * std + mean; with quantiles above 1, of [S, Q, H], those of each step in rising order (Chernozhukov et al. 2010).
 * y, x [S, Q H], bias [Q H] (type parameter); mean, std [S] (type statistics). y may be x. */
struct ps_forecast {
    struct ps_tensor y, x, bias, mean, std;
    int64_t quantiles; /* 0 is 1 */
};

/* yhat as in forecast, in no order; n targets of the S H are observed, all unless loss.missing; loss = the mean over those, and
 * over quantiles, of what loss.kind says; dx = gradient_scale d loss / d x, of MSE gradient_scale 2/n std (yhat - target), 0 where
 * the target is not observed. At a kink the slope is 0. state->loss_sum += B n/(S H) loss and state->unobserved += S H - n, or,
 * when the loss is not finite and state->nonfinite 0, state->lost += B. Where nothing is observed dx is 0 and the loss adds
 * nothing. dx [S, Q H] (type real); x [S, Q H], targets [S, H], bias [Q H] (type parameter); mean, std [S] (type statistics).
 * observed, float64 [1], which may be absent: the targets that are observed in all of a step that this batch is a part of; dx is
 * then that of a mean over so many, not n. */
struct ps_forecast_loss {
    struct ps_tensor dx, x, bias, mean, std, targets, observed;
    struct ps_step_state *state;
    int64_t batch;         /* B */
    double gradient_scale; /* 0 is 1, here and below */
    struct ps_loss loss;
};

/* count += targets that are observed, no NaN. count float64 [1]; targets [S, H] (type parameter). */
struct ps_count_observed {
    struct ps_tensor count, targets;
};

/* What forecast_error sums over the targets that are observed. Of quantiles the forecasts are first put in order, as forecast does;
 * squares and absolutes are then of ps_loss_point's. */
enum ps_error {
    PS_ERROR_SQUARES,
    PS_ERROR_ABSOLUTES,
    PS_ERROR_OBSERVED, /* 1: their number */
    PS_ERROR_LOSS,     /* of quantiles the mean over them */
    PS_ERROR_WITHIN,   /* 1 where the target lies from the lowest quantile to the highest; 0 but of quantiles */
    PS_ERRORS
};

/* yhat as in forecast; errors[slot] = the sums of yhat - target over S, H, in double, at slot = state->cursor / slot_windows.
 * errors float64 [slots, PS_ERRORS]; the rest as forecast_loss. */
struct ps_forecast_error {
    struct ps_tensor errors, x, bias, mean, std, targets;
    const struct ps_step_state *state;
    int64_t slot_windows;
    struct ps_loss loss;
};

/* Hides patches from the encoder. Sequence s has the patches of rows s*N .. of x; of these the `kept` with the smallest keys stay,
 * of equal ones the first: y = x, and targets are NaN, not observed (ps_loss.missing). The others: y = 0, targets = x. Row r's key
 * is ps_mask_key of place (state->cursor + first) * channels * N + r at state->step: it follows from the window's place in the pass
 * alone. y, x [S*N, P]; targets [S*N, P] (type parameter). y may be x. Nie et al. 2023. */
struct ps_mask_patches {
    struct ps_tensor y, targets, x;
    const struct ps_step_state *state; /* device memory */
    uint64_t seed;
    int64_t channels, patches, kept; /* C; N and how many of a sequence's N stay */
    uint64_t first;                  /* windows between the cursor and the first, of a batch that ranks share */
};

/* ---- optimiser ---- */

/* state->gradient_squares = sum of x^2, in double. x [n] (type parameter). */
struct ps_sum_squares {
    struct ps_tensor x;
    struct ps_step_state *state;
};

/* Elements begin .. end - 1 of a flat buffer. */
struct ps_range {
    int64_t begin, end;
};

/* AdamW (Loshchilov and Hutter 2019), one pass: t = state->step + 1, lr = learning_rates[state->step],
 * g = gradient / gradient_scale * min(1, clip_norm gradient_scale / sqrt(state->gradient_squares)) (clip_norm 0: without the min),
 * m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2 (in double),
 * parameter -= lr (m/(1 - beta1^t) / (sqrt(v/(1 - beta2^t)) + epsilon) + [i < decayed] weight_decay parameter); gradient = 0.
 * parameters, gradients, m [n] (type parameter); v [n] float64; learning_rates [steps] float64. copy [n] (type real), absent unless
 * bf16 or fp16: = the new parameters, rounded.
 * An element of the gradient that is not finite: state->nonfinite = t, in the same pass, so that this step's update is spoilt where
 * it is (m tells where), and no later one changes anything but gradient = 0. With skip it is state->gradient_squares that tells,
 * before the update: when it is not finite, nothing changes but gradient = 0 and state->skipped += 1.
 * With held > 0 elements outside of `trained` change in no step before `held`, but for gradient = 0; then their t counts from
 * there: t = state->step + 1 - held. At the end state->step += 1 and state->cursor += windows; not with `more`: then calls with
 * other parts of the buffers follow in the same step. */
struct ps_adamw {
    struct ps_tensor parameters, gradients, m, v, learning_rates, copy;
    int64_t decayed;
    double beta1, beta2, epsilon, weight_decay, clip_norm, gradient_scale;
    int skip;
    struct ps_step_state *state;
    uint64_t windows;
    uint64_t held; /* steps */
    struct ps_range trained[2];
    int more;
};

/* state->step += steps; state->cursor += windows. */
struct ps_advance {
    struct ps_step_state *state;
    uint64_t steps, windows;
};

/* ---- optional: NULL where a backend has none ---- */

/* c = a b + bias, + addend where there is one. a [m, k], b [k, n], any strides of which one is 1; c, addend [m, n], rows of stride
 * 1, as far apart; bias [n] (type parameter), contiguous. Where products have no such epilogue, or it is slower: NULL; CUDA's 16
 * bits refuse what their kernel does not serve. */
struct ps_gemm_bias {
    struct ps_tensor c, a, b, bias, addend;
};

/* bias_residual_add, and batchnorm_statistics of its y. */
struct ps_bias_residual_statistics {
    struct ps_tensor y, mean, var, running_mean, running_var, x, bias, residual;
    struct ps_dropout dropout;
    double momentum;
};

/* The gradients of y = x w + b: dw += x' dy, db += sum_R dy. x [R, m], dy [R, n]; dw [m, n], db [n] (type parameter); all
 * contiguous. db may be absent. waits: as later_sums says. */
struct ps_gemm_gradient {
    struct ps_tensor dw, db, x, dy;
    int waits;
};

/* How gemm_finish ends, t = a b:
 * SUM: c = t, + addend where there is one. With `means`, where c is the gradient of a batch's norm: what batchnorm_backward would
 *   sum of g = c as it is stored, with this x, mean and var: means [2, d] = mean_R(g), mean_R(g xhat); dgamma, dbeta +=. With
 *   `rstd`, where t is the gradient of a norm of rows: layernorm_backward with dy = t, its mean row_mean, c what it calls dx.
 * RESIDUAL: c = addend + drop(t + bias), or with `addend_scale` addend times that + addend_shift + the same, as batchnorm_fold has
 *   them. With `mean`, batchnorm_statistics of c as it is stored: mean, var =, the running ones. With `normed` layernorm of c as it
 *   is stored, its y, mean and rstd: normed, row_mean, rstd =.
 * ACTIVATION: c = drop(activation(t + bias)), and where there is `kept`, its slope: kept = drop(activation'(t + bias)).
 * SLOPE: c = kept t, of what ACTIVATION kept; neither bias nor draws are read. */
enum ps_finish { PS_FINISH_SUM, PS_FINISH_RESIDUAL, PS_FINISH_ACTIVATION, PS_FINISH_SLOPE };

/* A product and what follows it, in one. a [m, k], b [k, n], strides of which one is 1: CUDA takes b's last of RESIDUAL and
 * ACTIVATION, its first of the others. c, kept, addend, x [m, n], contiguous; bias, dgamma, dbeta, addend_scale, addend_shift [n]
 * (type parameter); mean, var, running_mean, running_var [n], means [2, n] (type statistics). normed, masked [m, n], contiguous;
 * row_mean, rstd [m] (type statistics); gamma, beta, dbias [n] (type parameter); without row_mean and beta, or dbeta, the norm is
 * RMSNorm. dropout is RESIDUAL's own, of SUM that of masked. c may be addend. No swiglu, and one norm at most. What is not served
 * is PS_UNSUPPORTED, and nothing is written: operations that follow one another do the same; CUDA's fp32 and tf32 serve no sums
 * over rows, no norms, no addend_scale, nor small weights, its 16 bits norms of up to 256 columns, of SUM 128, behind as many terms
 * as leave room. */
struct ps_gemm_finish {
    struct ps_tensor c, kept, means, dgamma, dbeta, mean, var, running_mean, running_var, a, b, bias, addend, x, addend_scale,
        addend_shift, normed, masked, dbias, row_mean, rstd, gamma, beta;
    enum ps_finish finish;
    enum ps_activation activation;
    struct ps_dropout dropout;
    double momentum, epsilon;
};

/* A BatchNorm in the weight that reads it, so that no pass writes what it gives: batchnorm(x) w + bias = x w_out + bias_out, with
 * scale = gamma rstd, shift = beta - mean scale, w_out = scale_i w_ij, rounded, and bias_out = bias + beta w - mean w_out, of w_out
 * as it is stored. w, w_out [d, n] (type real); bias, bias_out [n], scale, shift, gamma, beta [d] (type parameter); mean, var [d]
 * (type statistics). */
struct ps_batchnorm_fold {
    struct ps_tensor w_out, bias_out, scale, shift, w, bias, mean, var, gamma, beta;
    double epsilon;
};

/* The gradients of w and bias from g = x' dy and g_bias, the columns' sums of dy, by what batchnorm_fold found, of some layers: dw
 * += scale_i g_ij + shift_i g_bias_j, dbias += g_bias; then g and g_bias are 0. dw, g [layers, d, n], dbias, g_bias [layers, n],
 * scale, shift [layers, d] (all type parameter), any stride of layers but of g and g_bias, else contiguous. */
struct ps_batchnorm_unfold {
    struct ps_tensor dw, dbias, g, g_bias, scale, shift;
};

/* Weights around attention for heads of e columns that lie in more of them, e', the last ones zeros: y[l, u, i] = x[l, u, i] for i
 * < n, 0 for the rest up to n'. Of some layers: w_qkv [layers, 3 d h, e], w_o [layers, h, e d] (type real), b_qkv [layers, 3 h, e]
 * (type parameter), any stride of layers, else contiguous; each y with e' in place of e, contiguous. */
struct ps_pad_heads {
    struct ps_tensor w_qkv_out, w_o_out, b_qkv_out, w_qkv, w_o, b_qkv;
};

/* Out of the gradients of the wide ones those of the others: dx[l, u, i] += g[l, u, i] for i < n; then g is 0. d* as x, g* as y of
 * pad_heads (all type parameter). */
struct ps_unpad_heads {
    struct ps_tensor dw_qkv, dw_o, db_qkv, g_qkv, g_o, g_b;
};

/* mixed = softmax(scale q k') v for each sequence and head, the scores never in memory; logsum = log of each row's sum of exp(scale
 * q k'). mixed, q, k, v [S, h, N, e], any strides but the last, 1; logsum [S, h, N] (type statistics). Dao et al. 2022.
 * q and k may be [S, h, N, m, e] too, their heads' columns in m pieces: residual attention's, of m layers (docs/design.md, section
 * 3). */
struct ps_attention {
    struct ps_tensor mixed, logsum, q, k, v;
    double scale;
};

/* Its gradient, the scores computed again: with A = softmax(scale q k') and G = A * (d_mixed v' - delta): dq = scale G k, dk =
 * scale G' q, dv = A' d_mixed; delta = the sum over e of d_mixed mixed, which is that
 * over a row of A * (d_mixed v'), whichever is at hand: mixed and logsum are those of attention. mixed, q, k, v as in attention;
 * dq, dk, dv, d_mixed likewise; delta, logsum [S, h, N] (type statistics). dq and dk are in pieces where
 * q and k are; with `accumulate` they are +=. */
struct ps_attention_backward {
    struct ps_tensor dq, dk, dv, delta, d_mixed, mixed, logsum, q, k, v;
    double scale;
    int accumulate;
};

/* A layer's feed-forward, what is between its products never in memory: y = residual + drop_output(drop_hidden(activation(x w_1 +
 * b_1)) w_2 + b_2). y, residual [R, d], x [R, d]; w_1 [d, f], w_2 [f, d] (type real); b_1 [f], b_2 [d] (type parameter); of swiglu
 * w_1 [d, 2f] and b_1 [2f]. y may be residual. */
struct ps_feed_forward {
    struct ps_tensor y, x, w_1, b_1, w_2, b_2, residual;
    struct ps_dropout hidden_dropout, output_dropout;
    enum ps_activation activation;
};

/* Its gradient, the hidden columns computed again: dx = x's, + addend where there is one; dw_1, db_1, dw_2, db_2 +=. dx, dy, x,
 * addend [R, d]; the gradients (type parameter) as what they are of. dx may be dy or addend. */
struct ps_feed_forward_backward {
    struct ps_tensor dx, dw_1, db_1, dw_2, db_2, dy, x, w_1, b_1, w_2, addend;
    struct ps_dropout hidden_dropout, output_dropout;
    enum ps_activation activation;
};

enum ps_norm { PS_NORM_LAYER, PS_NORM_BATCH, PS_NORM_RMS };
enum ps_norm_place { PS_NORM_PRE, PS_NORM_POST };

/* Where an encoder's tensors lie in the flat buffers: offsets, in elements, of the first layer's (named as in model/parameters.h);
 * those of layer l lie l * matrix_stride (w_*) or l * vector_stride (the rest) further. BatchNorm's running statistics, norm 1's
 * mean and variance and norm 2's, lie in the parameters' buffer too, those of layer l l * running_stride further. */
struct ps_encoder_layout {
    int64_t w_qkv, w_o, w_1, w_2;
    int64_t ln1_gamma, ln1_beta, b_qkv, b_o, ln2_gamma, ln2_beta, b_1, b_2;
    int64_t matrix_stride, vector_stride;
    int64_t running[4], running_stride;
};

/* What both directions of a fused encoder share. All variants 0: LayerNorm, pre-norm, gelu's tanh form. */
struct ps_encoder_sizes {
    int64_t layers, n_heads, d_ff;
    struct ps_encoder_layout layout;
    double epsilon;
    /* After W_o, after the activation, after W_2: of the first layer, whose sites follow one another; 3 a layer. first: of d
     * columns, of d_ff, of d. */
    struct ps_dropout dropout, hidden_dropout, output_dropout;
    enum ps_norm norm;
    enum ps_norm_place norm_place;
    enum ps_activation activation;
    int residual_attention;
    int training; /* BatchNorm's statistics are the batch's, and the running ones move by `momentum`; else they are the running ones
                   */
    double momentum;
};

/* Every layer: stream[layers] of stream[0] (those between may be left as they are); what backward reads again, in `kept`.
 * stream [layers + 1, S, N, d]; weights flat (type real), the parameters rounded; parameters flat (type parameter), where
 * BatchNorm's running statistics are written. With `embed`, which encoder_prepare has to have granted, its outputs = first: u is
 * stream[0]. With `head`, granted too, besides, its outputs = last: z is stream[layers]; its partials have any number of rows from
 * min(S, PS_PARTIAL_BLOCKS) on, which are sums of some sequences each. */
struct ps_encoder_forward {
    struct ps_tensor stream, weights, parameters;
    struct ps_encoder_sizes sizes;
    void *kept;
    size_t kept_bytes; /* that encoder_prepare asked for, whatever the batch */
    const struct ps_embed_forward *embed;
    const struct ps_head_step *head;
};

/* What a head_step leaves to do: d_weight += z' dx; and what head_sums says, its sequences those of z. d_weight [K, H], d_bias [H]
 * (type parameter); the rest as there. */
struct ps_head_gradient {
    struct ps_tensor d_weight, d_bias, z, dx, partials;
    struct ps_step_state *state;
    int64_t batch;
};

/* Their backward: recomputes layers from what they left, so it follows the table's last encoder_forward. du = gradient of
 * stream[0]; gradients (flat, type parameter) +=; dy the gradient of stream[layers]. du may be dy. du, dy [S, N, d]. With `embed`
 * du is scratch, and the embedding's gradients += what it would give; its tensors are those of the forward that had `embed` too.
 * With `head`, besides `embed` and where encoder_prepare has granted it, the rest of the head of the forward that had `head`. With
 * `update`, besides both, adamw as it says, of all the parameters: its parameters, gradients and copy are these parameters,
 * gradients and weights, of which the embedding's and the head's are parts; clip_norm and skip 0. headed: the forward, the last one
 * with these, had `head`, and dy is its dz. */
struct ps_encoder_backward {
    struct ps_tensor du, gradients, dy, stream, weights, parameters;
    struct ps_encoder_sizes sizes;
    void *kept;
    size_t kept_bytes;
    const struct ps_embed_backward *embed;
    const struct ps_head_gradient *head;
    const struct ps_adamw *update;
    int headed;
};

/* What encoder_prepare is told .. */
struct ps_encoder_shape {
    int64_t sequences, patches, d_model;  /* S (the most), N, d */
    int64_t seq_len, patch_len, pred_len; /* L, P of the embedding, H of the head */
    int other_loss;                       /* than head_step's: nothing beyond the embedding will be asked for */
    int ends_apart;                       /* nothing beyond the layers will be: the ends are of another kind */
    int other_rate;                       /* of dropout the embedding has than W_o */
};

/* How much of a training step both calls can be asked for; each takes what stands before it. */
enum ps_encoder_span {
    PS_SPAN_LAYERS,
    PS_SPAN_EMBEDDING, /* the embedding too, both ways */
    PS_SPAN_LOSS,      /* and forward the head and the loss (head_step) */
    PS_SPAN_UPDATE     /* and backward what that leaves to do, and AdamW */
};

enum { PS_KERNELS_NAME = 128 };

/* .. and says. */
struct ps_encoder_needs {
    size_t kept_bytes; /* to keep between forward and backward */
    int slower;        /* than level gemm's operations, as far as measured */
    int fp16_rows;     /* in tf32: rows are fp16, which ends at 65,504 */
    enum ps_encoder_span span;
    char kernels[PS_KERNELS_NAME]; /* which: their name, the type, the sizes, the span */
    int room;                      /* small blocks of other kernels run beside its backward's, on the same multiprocessors */
};

/* The ends of the model. Their backends may refuse a shape (PS_UNSUPPORTED): the operations above then do the same. */

/* gather_patches, the product u = patches weight and bias_position_add in one. u [S*N, d]; weight [P, d] (type real), bias [d],
 * position [N, d] (type parameter); the rest as gather_patches and bias_position_add say. step: the windows by which the cursor is
 * expected to move on until the next call, of a batch that ranks share all of it; another number costs time alone. */
struct ps_embed_forward {
    struct ps_tensor u, patches, mean, std, inputs, indices, weight, bias, position;
    const struct ps_step_state *state;
    int64_t batch, stride, first, step;
    int revin, subtract_last, pad_end;
    double epsilon;
    struct ps_dropout dropout;
};

/* Its gradients, with g = drop'(du), the mask drawn again: d_weight += patches' g, d_bias += sum over rows of g, d_position[n] +=
 * sum over sequences of g. d_weight [P, d], d_bias [d], d_position [N, d] (type parameter), which may be absent; du [S*N, d],
 * patches [S*N, P]. */
struct ps_embed_backward {
    struct ps_tensor d_weight, d_bias, d_position, du, patches;
    struct ps_dropout dropout;
};

enum { PS_PARTIAL_ROWS = 16, PS_PARTIAL_BLOCKS = 256 };
/* What six norms of 128 columns behind products leave (later_sums), and small layers' weights. */
enum { PS_LATER_SUMS = 4 << 20 };

/* The head of a training step but for the weight's gradient, of a plain loss (ps_loss_is_plain): x = z weight, forecast and squared
 * error of the windows' targets, dx as forecast_loss, dz = dx weight'. partials[i, t] = sum of dx[s, t], partials[i, H] = sum of
 * the squared errors over the sequences s of group i, PS_PARTIAL_ROWS of them. dz, z [S, K]; dx [S, H]; partials float64 [groups, H
 * + 1]; weight [K, H] (type real), bias [H]; targets and indices as gather_targets. */
struct ps_head_step {
    struct ps_tensor dz, dx, partials, z, weight, bias, mean, std, targets, indices;
    const struct ps_step_state *state;
    int64_t batch;
    double gradient_scale;
};

/* The same without the two products: x [S, H] (type parameter) is given. */
struct ps_window_loss {
    struct ps_tensor dx, partials, x, bias, mean, std, targets, indices;
    const struct ps_step_state *state;
    int64_t batch;
    double gradient_scale;
};

/* d_bias += the partial sums of dx, whatever their rows; state->loss_sum += batch times the mean over `sequences` and H of the
 * squared errors, or as forecast_loss does when that is not finite. */
struct ps_head_sums {
    struct ps_tensor d_bias, partials;
    struct ps_step_state *state;
    int64_t batch, sequences;
};

static inline double ps_gradient_scale(double given)
{
    return given > 0 ? given : 1;
}

/* ---- the table ---- */

enum ps_beside { PS_BESIDE_BEGIN, PS_BESIDE_END, PS_BESIDE_JOIN };

struct ps_kernels {
    const char *backend; /* "reference", "cpu", "cuda" */
    enum ps_precision precision;
    enum ps_type real;       /* activations: PS_BF16 for bf16, PS_F16 for fp16, PS_F64 for fp64, else PS_F32 */
    enum ps_type parameter;  /* parameters, biases, gradients, m: PS_F64 for fp64, else PS_F32 */
    enum ps_type statistics; /* mean, rstd, std: PS_F64 for fp64, else PS_F32 */
    struct ps_device *device;
    /* The most patches, and columns of a head with all its pieces, of attention and its backward; 0: any. */
    int64_t attention_patches, attention_head;
    /* Whether attention and its backward are faster than the products and softmax that they stand for, as measured
     * (docs/experiments/attention.md), q and k in so many pieces of `head` columns. NULL: they are not, or not there. */
    int (*attention_faster)(const struct ps_kernels *k, int64_t patches, int64_t head, int64_t pieces);
    /* Whether feed_forward and its backward are faster than what they stand for. NULL: they are not, or not there. */
    int (*feed_forward_faster)(const struct ps_kernels *k, int64_t d_model, int64_t d_ff);
    /* Whether batchnorm_fold and its inverse, with an addend's scale in gemm_finish, serve a layer of so many rows and are faster
     * than passes of batchnorm. NULL: they are not, or not there. */
    int (*batchnorm_fold_faster)(const struct ps_kernels *k, int64_t rows, int64_t d_model, int64_t d_ff,
                                 enum ps_activation activation);
    /* Whether attention's products take heads where they lie in their rows, of `head` columns, faster than split and merged, as
     * measured (docs/experiments/products.md). NULL: they do not. */
    int (*strided_heads_faster)(const struct ps_kernels *k, int64_t patches, int64_t head);
    /* The columns that a head of `head` lies in where attention by tiles is faster so, those behind them zero, in pieces as
     * attention_faster has them; pad_heads makes the weights for them. NULL: as many. */
    int64_t (*attention_columns)(const struct ps_kernels *k, int64_t patches, int64_t head, int64_t pieces);
    void *context; /* the backend's own */
#define PS_X(name, kind, tensors, flops) enum ps_status (*name)(const struct ps_kernels *k, const struct ps_##name *arguments);
    PS_KERNEL_LIST(PS_X)
#undef PS_X
    /* Before the first encoder_forward: takes the workspace for up to shape->sequences. PS_UNSUPPORTED, with the sizes, when they
     * are not served. NULL where the entries are. */
    enum ps_status (*encoder_prepare)(const struct ps_kernels *k, const struct ps_encoder_sizes *sizes,
                                      const struct ps_encoder_shape *shape, struct ps_encoder_needs *needs);
    /* From now on the first use of a product that a library computes times the library's algorithms, on the product's own tensors
     * (its result may be added to several times), and keeps the fastest. Not while capturing. NULL where there is nothing to
     * choose. */
    enum ps_status (*tune)(const struct ps_kernels *k);
    /* *text, malloc'ed: what `tune` has found, one line a product, for ps_kernels_options.tuning. NULL where tune is. */
    enum ps_status (*tuning)(const struct ps_kernels *k, char **text);
    /* The name of the way that an operation would take with these arguments; nothing runs, and no tensor's memory is read. NULL: it
     * would refuse them, or has one way only. Products: warp, tiny, split, rows, long, gradient, gradient16, wgmma16, panel,
     * cublaslt; gemm_bias and gemm_gradient also apart, when their parts follow one another as operations of their own. Attention:
     * warp_float, tiled. docs/kernels.md says which takes what. NULL where no operation has several. */
    const char *(*way)(const struct ps_kernels *k, enum ps_op op, const void *arguments);
    /* What is enqueued between BEGIN and END runs beside what follows END, until JOIN: what follows that waits for both. One at a
     * time; a BEGIN before the JOIN goes on behind what the one before began. Each wants a JOIN before a capture ends. NULL where
     * nothing runs beside anything. */
    enum ps_status (*beside)(const struct ps_kernels *k, enum ps_beside what);
    /* gemm_gradient of each, in any order; none reads or adds to what another adds to. NULL where that is no faster than one by
     * one.
     */
    enum ps_status (*gemm_gradients)(const struct ps_kernels *k, const struct ps_gemm_gradient *each, int count);
    /* With memory: from now on what layernorm_backward, gemm_finish, embed_backward, channel_affine_backward, bias_grad with
     * masked, and gemm_gradient that waits, add to parameters' gradients may wait there; no such gradient is read or added to a
     * second time then. Without: all that waits is added. PS_LATER_SUMS elements (type parameter) are worth giving. NULL where
     * nothing waits. */
    enum ps_status (*later_sums)(const struct ps_kernels *k, void *memory, size_t bytes);
    /* Frees the table and its context. */
    void (*close)(struct ps_kernels *k);
};

struct ps_kernels_options {
    const char
        *tuning;   /* CUDA: a text of ps_kernels.tuning, PS_UNSUPPORTED unless of this device, precision and library; or NULL */
    int tiny_gemm; /* CUDA: own kernels for batched products of m, n, k <= 64; 0 sends them to cuBLAS */
};

/* backend: "reference", "cpu" (on a cpu device), "cuda" (on a cuda device). PS_UNSUPPORTED when the backend has no such precision.
 */
enum ps_status ps_kernels_open(const char *backend, struct ps_device *device, enum ps_precision precision,
                               const struct ps_kernels_options *options, struct ps_kernels **kernels);

/* What the choice between CUDA's ways asks of a GPU. */
struct ps_gpu {
    int compute_capability, multiprocessors; /* 90 for 9.0 */
    int shared_bytes;                        /* the most shared memory that a block can have */
};

/* CUDA's table for a GPU that need not be here: of its entries only `way`, `encoder_prepare`, which takes no memory, and `close`
 * may be called. PS_UNSUPPORTED when the build has no kernels for it. */
enum ps_status ps_kernels_choices(const struct ps_gpu *gpu, enum ps_precision precision, const struct ps_kernels_options *options,
                                  struct ps_kernels **kernels);

/* ---- a table around another (counting.c) ---- */

/* Called before (after = 0) and after (after = 1) every operation; of one that is refused, PS_UNSUPPORTED, only before. */
typedef void ps_hook(void *argument, enum ps_op op, const void *operation_arguments, int after);

/* A table that forwards every operation to `inner` (borrowed, must outlive it) and calls the hook around it; a device's error is
 * returned with operation and shapes. NULL entries stay NULL. */
enum ps_status ps_kernels_hooked(const struct ps_kernels *inner, ps_hook *hook, void *argument, struct ps_kernels **kernels);

/* A ready hook: argument is a struct ps_counts. */
struct ps_counts {
    int64_t calls[PS_OP_COUNT];
    double flops[PS_OP_COUNT], bytes[PS_OP_COUNT];
};
void ps_count_hook(void *counts, enum ps_op op, const void *operation_arguments, int after);
/* Calls of kind GEMM, and how many different operations of `kind` were called. */
int64_t ps_counts_calls(const struct ps_counts *counts, enum ps_kind kind);
int ps_counts_kinds(const struct ps_counts *counts, enum ps_kind kind);

#ifdef __cplusplus
}
#endif
#endif
