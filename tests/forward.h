/* The forward pass of docs/design.md section 3 once more, in plain loops of double that call nothing of the model or the kernels
 * but Philox: what a forward pass, with and without dropout, is compared with. */
#ifndef PS_TESTS_FORWARD_H
#define PS_TESTS_FORWARD_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/philox.h"
#include "model/parameters.h"

/* One pass: scoring, or training with dropout as `seed` and `step` draw it. */
struct forward_pass {
    int training;
    uint64_t seed, step;
    double *moved; /* training: BatchNorm's running statistics after it, of the layout of theta; NULL: not wanted */
};

/* The sites are numbers here: a run must go on as it began after any change to the code. */
enum {
    SITE_EMBEDDING = 0,
    SITE_ATTENTION = 1,
    SITE_HIDDEN = 2,
    SITE_OUTPUT = 3,
    SITES_EACH_LAYER = 3,
    SITE_WEIGHTS = 4096,
    SITE_HEAD = 8192
};

static inline void forward_drop(double *x, int64_t n, const struct ps_model_shape *s, enum ps_dropout_place place,
                                const struct forward_pass *pass, int64_t site)
{
    const int others = place == PS_DROP_ATTENTION_WEIGHTS || place == PS_DROP_HEAD;
    const double rate = s->dropout_at[place].set ? s->dropout_at[place].rate : others ? 0 : s->dropout;
    const double threshold = pass->training ? round(rate * 65536) : 0;
    const float scale = (float)(65536 / (65536 - threshold));
    for (int64_t i = 0; threshold > 0 && i < n; i++) {
        struct ps_block block = ps_philox(pass->seed, (uint32_t)(i / 8), (uint32_t)site, pass->step);
        const uint32_t word = block.word[i % 8 / 2], draw = i % 2 ? word >> 16 : word & 0xffff;
        x[i] = draw < threshold ? 0 : x[i] * (double)scale;
    }
}

/* Where a tensor of the layout begins, running statistics too; -1: there is none of that name. */
static inline int64_t forward_offset(const struct ps_parameters *layout, int64_t layer, const char *name)
{
    char full[64];
    if (layer < 0) {
        snprintf(full, sizeof full, "%s", name);
    } else {
        snprintf(full, sizeof full, "layers.%lld.%s", (long long)layer, name);
    }
    for (int t = 0; t < layout->all; t++) {
        if (strcmp(layout->table[t].name, full) == 0) {
            return layout->table[t].offset;
        }
    }
    return -1;
}

/* A tensor of theta by its name. */
static inline const double *forward_tensor(const struct ps_parameters *layout, const double *theta, int64_t layer, const char *name)
{
    const int64_t offset = forward_offset(layout, layer, name);
    if (offset < 0) {
        abort();
    }
    return theta + offset;
}

/* y [rows, out] = x [rows, in] w [in, out] + b [out] */
static inline void forward_linear(double *y, const double *x, const double *w, const double *b, int64_t rows, int64_t in,
                                  int64_t out)
{
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t j = 0; j < out; j++) {
            double sum = b[j];
            for (int64_t i = 0; i < in; i++) {
                sum += x[r * in + i] * w[i * out + j];
            }
            y[r * out + j] = sum;
        }
    }
}

static inline void forward_layernorm(double *y, const double *x, const double *gamma, const double *beta, int64_t rows, int64_t d)
{
    for (int64_t r = 0; r < rows; r++) {
        double mean = 0, variance = 0;
        for (int64_t j = 0; j < d; j++) {
            mean += x[r * d + j] / (double)d;
        }
        for (int64_t j = 0; j < d; j++) {
            variance += (x[r * d + j] - mean) * (x[r * d + j] - mean) / (double)d;
        }
        for (int64_t j = 0; j < d; j++) {
            y[r * d + j] = (x[r * d + j] - mean) / sqrt(variance + 1e-5) * gamma[j] + beta[j];
        }
    }
}

static inline void forward_rmsnorm(double *y, const double *x, const double *gamma, int64_t rows, int64_t d)
{
    for (int64_t r = 0; r < rows; r++) {
        double squares = 0;
        for (int64_t j = 0; j < d; j++) {
            squares += x[r * d + j] * x[r * d + j];
        }
        for (int64_t j = 0; j < d; j++) {
            y[r * d + j] = x[r * d + j] / sqrt(squares / (double)d + 1e-5) * gamma[j];
        }
    }
}

/* running_mean, running_var: normalised with in scoring; in training moved by a tenth towards the batch's, the
 * variance's the unbiased one. */
static inline void forward_batchnorm(double *y, const double *x, const double *gamma, const double *beta,
                                     const double *running_mean, const double *running_var, int64_t rows, int64_t d, int training,
                                     double *moved_mean, double *moved_var)
{
    for (int64_t j = 0; j < d; j++) {
        double mean = 0, squares = 0, variance = running_var[j];
        for (int64_t r = 0; r < rows && training; r++) {
            mean += x[r * d + j] / (double)rows;
        }
        for (int64_t r = 0; r < rows && training; r++) {
            squares += (x[r * d + j] - mean) * (x[r * d + j] - mean);
        }
        if (training && moved_mean) {
            moved_mean[j] = 0.9 * running_mean[j] + 0.1 * mean;
            moved_var[j] = 0.9 * running_var[j] + 0.1 * squares / (double)(rows - 1);
        }
        variance = training ? squares / (double)rows : variance;
        mean = training ? mean : running_mean[j];
        for (int64_t r = 0; r < rows; r++) {
            y[r * d + j] = (x[r * d + j] - mean) / sqrt(variance + 1e-5) * gamma[j] + beta[j];
        }
    }
}

/* Norm 1 or 2 of a layer, y from x. */
static inline void forward_norm(const struct ps_model_shape *s, const struct ps_parameters *layout, const double *theta,
                                int64_t layer, int which, double *y, const double *x, int64_t rows, const struct forward_pass *pass)
{
    static const char *const kinds[] = {[PS_NORM_LAYER] = "ln", [PS_NORM_BATCH] = "bn", [PS_NORM_RMS] = "rms"};
    static const char *const parts[] = {"gamma", "beta", "mean", "var"};
    const double *tensor[4];
    int64_t offset[4];
    for (int i = 0; i < 4; i++) {
        char name[32];
        snprintf(name, sizeof name, "%s%d_%s", kinds[s->norm], which, parts[i]);
        offset[i] = forward_offset(layout, layer, name);
        tensor[i] = theta + offset[i];
    }
    if (s->norm == PS_NORM_LAYER) {
        forward_layernorm(y, x, tensor[0], tensor[1], rows, s->d_model);
    } else if (s->norm == PS_NORM_RMS) {
        forward_rmsnorm(y, x, tensor[0], rows, s->d_model);
    } else {
        forward_batchnorm(y, x, tensor[0], tensor[1], tensor[2], tensor[3], rows, s->d_model, pass->training,
                          pass->moved ? pass->moved + offset[2] : NULL, pass->moved ? pass->moved + offset[3] : NULL);
    }
}

/* Each pair of columns of q and k, of a head, turned by n 10000^(-2i/e). */
static inline void forward_rope(double *qkv, int64_t S, int64_t N, int64_t d, int64_t heads)
{
    const int64_t e = d / heads;
    for (int64_t row = 0; row < S * N; row++) {
        for (int64_t j = 0; j < 2 * d; j += 2) {
            const double angle = (double)(row % N) / pow(10000, (double)(j % e) / (double)e);
            double *pair = qkv + row * 3 * d + j, first = pair[0], second = pair[1];
            pair[0] = first * cos(angle) - second * sin(angle);
            pair[1] = first * sin(angle) + second * cos(angle);
        }
    }
}

/* mixed [S, N, d] = drop(A) v of each head; qkv [S, N, 3d]; scores [S, h, N, N]: those of the layers below, or NULL without
 * residual attention. */
static inline void forward_attention(double *mixed, const double *qkv, int64_t S, int64_t N, const struct ps_model_shape *s,
                                     double *scores, const struct forward_pass *pass, int64_t site)
{
    const int64_t d = s->d_model, heads = s->n_heads, e = d / heads;
    double *weights = malloc((size_t)(S * heads * N * N) * sizeof *weights);
    for (int64_t i = 0; i < S * heads * N; i++) {
        const int64_t sequence = i / N / heads, head = i / N % heads, n = i % N;
        const double *q = qkv + (sequence * N + n) * 3 * d + head * e, *first = qkv + sequence * N * 3 * d + head * e;
        double *weight = weights + i * N, highest = -INFINITY, sum = 0;
        for (int64_t j = 0; j < N; j++) {
            weight[j] = 0;
            for (int64_t c = 0; c < e; c++) {
                weight[j] += q[c] * first[j * 3 * d + d + c] / sqrt((double)e);
            }
            if (scores) {
                weight[j] = scores[i * N + j] += weight[j];
            }
            highest = weight[j] > highest ? weight[j] : highest;
        }
        for (int64_t j = 0; j < N; j++) {
            weight[j] = exp(weight[j] - highest);
            sum += weight[j];
        }
        for (int64_t j = 0; j < N; j++) {
            weight[j] /= sum;
        }
    }
    forward_drop(weights, S * heads * N * N, s, PS_DROP_ATTENTION_WEIGHTS, pass, site);
    for (int64_t i = 0; i < S * heads * N; i++) {
        const int64_t sequence = i / N / heads, head = i / N % heads, n = i % N;
        for (int64_t c = 0; c < e; c++) {
            double *to = mixed + (sequence * N + n) * d + head * e + c;
            *to = 0;
            for (int64_t j = 0; j < N; j++) {
                *to += weights[i * N + j] * qkv[(sequence * N + j) * 3 * d + 2 * d + head * e + c];
            }
        }
    }
    free(weights);
}

/* Fixed positions n, j of [N, d]: sine and cosine, less their mean and over ten times their standard deviation; 0 for the others.
 */
static inline double *forward_positions(enum ps_positions positions, int64_t N, int64_t d)
{
    double *all = calloc((size_t)(N * d), sizeof *all), mean = 0, squares = 0;
    for (int64_t i = 0; i < N * d && positions == PS_POSITIONS_SINCOS; i++) {
        const double angle = (double)(i / d) / pow(10000, (double)(i % d / 2 * 2) / (double)d);
        all[i] = i % d % 2 ? cos(angle) : sin(angle);
        mean += all[i] / (double)(N * d);
    }
    for (int64_t i = 0; i < N * d; i++) {
        squares += (all[i] - mean) * (all[i] - mean) / (double)(N * d - 1);
    }
    for (int64_t i = 0; i < N * d && positions == PS_POSITIONS_SINCOS; i++) {
        all[i] = (all[i] - mean) / (10 * sqrt(squares));
    }
    return all;
}

/* activation(inner) [R, f]; of swiglu inner [R, 2f], its gate first. */
static inline void forward_activation(double *hidden, const double *inner, int64_t R, int64_t f, enum ps_activation activation)
{
    for (int64_t i = 0; i < R * f; i++) {
        const double h = activation == PS_SWIGLU ? inner[i / f * 2 * f + i % f] : inner[i];
        switch (activation) {
        case PS_GELU_TANH:
            hidden[i] = 0.5 * h * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (h + 0.044715 * h * h * h)));
            break;
        case PS_GELU:
            hidden[i] = 0.5 * h * (1 + erf(h / sqrt(2)));
            break;
        case PS_RELU:
            hidden[i] = h > 0 ? h : 0;
            break;
        case PS_SWIGLU:
            hidden[i] = h / (1 + exp(-h)) * inner[i / f * 2 * f + f + i % f];
            break;
        }
    }
}

/* Forecasts [S, H] of `S` windows x [S, L], of which number i is of channel i % C; theta as the layout says. */
static inline double *forward_forecasts(const struct ps_model_shape *s, const struct ps_parameters *layout, const double *theta,
                                        const double *x, int64_t S, struct forward_pass pass)
{
    const int64_t L = s->seq_len, P = s->patch_len, d = s->d_model, f = s->d_ff, H = s->pred_len, C = s->channels;
    const int64_t N = (L - P) / s->stride + 1 + (s->pad_end ? 1 : 0), R = S * N, inner = s->activation == PS_SWIGLU ? 2 * f : f;
    const int64_t begin = s->patches_from_end ? (L - P) % s->stride : 0;
    double *mean = calloc((size_t)S, sizeof *mean), *deviation = calloc((size_t)S, sizeof *deviation);
    double *patches = calloc((size_t)(R * P), sizeof *patches), *u = calloc((size_t)(R * d), sizeof *u);
    double *norm = calloc((size_t)(R * d), sizeof *norm), *mixed = calloc((size_t)(R * d), sizeof *mixed);
    double *branch = calloc((size_t)(R * d), sizeof *branch), *qkv = calloc((size_t)(R * 3 * d), sizeof *qkv);
    double *in = calloc((size_t)(R * inner), sizeof *in), *hidden = calloc((size_t)(R * f), sizeof *hidden);
    double *forecast = calloc((size_t)(S * H), sizeof *forecast), *fixed = forward_positions(s->positions, N, d);
    double *scores = calloc((size_t)(S * s->n_heads * N * N), sizeof *scores);
#define FORWARD_TENSOR(layer, name) forward_tensor(layout, theta, layer, name)
    const double *weight = s->revin_affine ? FORWARD_TENSOR(-1, "revin_weight") : NULL;
    const double *bias = s->revin_affine ? FORWARD_TENSOR(-1, "revin_bias") : NULL;

    for (int64_t i = 0; i < S; i++) {
        const double *window = x + i * L;
        double variance = 0;
        for (int64_t t = 0; t < L; t++) {
            mean[i] += s->revin ? window[t] / (double)L : 0;
        }
        for (int64_t t = 0; t < L; t++) {
            variance += (window[t] - mean[i]) * (window[t] - mean[i]) / (double)L;
        }
        deviation[i] = s->revin ? sqrt(variance + 1e-5) : 1;
        mean[i] = s->revin_subtract_last ? window[L - 1] : mean[i];
        for (int64_t n = 0; n < N; n++) {
            for (int64_t t = 0; t < P; t++) {
                const int64_t row = begin + n * s->stride + t, at = row < L ? row : L - 1;
                const double z = (window[at] - mean[i]) / deviation[i];
                patches[(i * N + n) * P + t] = weight ? z * weight[i % C] + bias[i % C] : z;
            }
        }
    }
    forward_linear(u, patches, FORWARD_TENSOR(-1, "w_p"), FORWARD_TENSOR(-1, "b_p"), R, P, d);
    for (int64_t i = 0; i < R * d; i++) {
        u[i] += s->positions == PS_POSITIONS_LEARNED ? FORWARD_TENSOR(-1, "w_pos")[i % (N * d)] : fixed[i % (N * d)];
    }
    forward_drop(u, R * d, s, PS_DROP_EMBEDDING, &pass, SITE_EMBEDDING);
    for (int64_t l = 0; l < s->n_layers; l++) {
        const int pre = s->norm_place == PS_NORM_PRE;
        if (pre) {
            forward_norm(s, layout, theta, l, 1, norm, u, R, &pass);
        }
        forward_linear(qkv, pre ? norm : u, FORWARD_TENSOR(l, "w_qkv"), FORWARD_TENSOR(l, "b_qkv"), R, d, 3 * d);
        if (s->positions == PS_POSITIONS_ROPE) {
            forward_rope(qkv, S, N, d, s->n_heads);
        }
        forward_attention(mixed, qkv, S, N, s, s->residual_attention ? scores : NULL, &pass, SITE_WEIGHTS + l);
        forward_linear(branch, mixed, FORWARD_TENSOR(l, "w_o"), FORWARD_TENSOR(l, "b_o"), R, d, d);
        forward_drop(branch, R * d, s, PS_DROP_ATTENTION, &pass, SITE_ATTENTION + SITES_EACH_LAYER * l);
        for (int64_t i = 0; i < R * d; i++) {
            u[i] += branch[i];
        }
        forward_norm(s, layout, theta, l, pre ? 2 : 1, norm, u, R, &pass);
        if (!pre) {
            memcpy(u, norm, (size_t)(R * d) * sizeof *u);
        }
        forward_linear(in, norm, FORWARD_TENSOR(l, "w_1"), FORWARD_TENSOR(l, "b_1"), R, d, inner);
        forward_activation(hidden, in, R, f, s->activation);
        forward_drop(hidden, R * f, s, PS_DROP_HIDDEN, &pass, SITE_HIDDEN + SITES_EACH_LAYER * l);
        forward_linear(branch, hidden, FORWARD_TENSOR(l, "w_2"), FORWARD_TENSOR(l, "b_2"), R, f, d);
        forward_drop(branch, R * d, s, PS_DROP_OUTPUT, &pass, SITE_OUTPUT + SITES_EACH_LAYER * l);
        for (int64_t i = 0; i < R * d; i++) {
            u[i] += branch[i];
        }
        if (!pre) {
            forward_norm(s, layout, theta, l, 2, norm, u, R, &pass);
            memcpy(u, norm, (size_t)(R * d) * sizeof *u);
        }
    }
    forward_drop(u, R * d, s, PS_DROP_HEAD, &pass, SITE_HEAD);
    for (int64_t i = 0; i < S; i++) {
        const int64_t head = s->individual_head ? i % C : 0;
        forward_linear(forecast + i * H, u + i * N * d, FORWARD_TENSOR(-1, "w_h") + head * N * d * H,
                       FORWARD_TENSOR(-1, "b_h") + head * H, 1, N * d, H);
        for (int64_t j = i * H; j < (i + 1) * H; j++) {
            const double z = weight ? (forecast[j] - bias[i % C]) / (weight[i % C] + 1e-10) : forecast[j];
            forecast[j] = z * deviation[i] + mean[i];
        }
    }
#undef FORWARD_TENSOR
    double *scratch[] = {mean, deviation, patches, u, norm, mixed, branch, qkv, in, hidden, fixed, scores};
    for (size_t i = 0; i < sizeof scratch / sizeof *scratch; i++) {
        free(scratch[i]);
    }
    return forecast;
}

#endif
