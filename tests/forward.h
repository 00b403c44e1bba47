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

/* Dropout as a pass draws it. The sites are numbers here: a run must go on as it began after any change to the code. */
struct forward_dropout {
    double p; /* 0: scoring */
    uint64_t seed, step;
};

enum { SITE_EMBEDDING = 0, SITE_ATTENTION = 1, SITE_HIDDEN = 2, SITE_OUTPUT = 3, SITES_EACH_LAYER = 3 };

static inline void forward_drop(double *x, int64_t n, const struct forward_dropout *dropout, int64_t site)
{
    const double threshold = round(dropout->p * 65536);
    const float scale = (float)(65536 / (65536 - threshold));
    for (int64_t i = 0; threshold > 0 && i < n; i++) {
        struct ps_block block = ps_philox(dropout->seed, (uint32_t)(i / 8), (uint32_t)site, dropout->step);
        const uint32_t word = block.word[i % 8 / 2], draw = i % 2 ? word >> 16 : word & 0xffff;
        x[i] = draw < threshold ? 0 : x[i] * (double)scale;
    }
}

/* A tensor of theta by its name. */
static inline const double *forward_tensor(const struct ps_parameters *layout, const double *theta, int64_t layer, const char *name)
{
    char full[64];
    if (layer < 0) {
        snprintf(full, sizeof full, "%s", name);
    } else {
        snprintf(full, sizeof full, "layers.%lld.%s", (long long)layer, name);
    }
    for (int t = 0; t < layout->n; t++) {
        if (strcmp(layout->table[t].name, full) == 0) {
            return theta + layout->table[t].offset;
        }
    }
    abort();
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

/* mixed [S, N, d] = A v of each head; qkv [S, N, 3d] */
static inline void forward_attention(double *mixed, const double *qkv, int64_t S, int64_t N, int64_t d, int64_t heads)
{
    const int64_t e = d / heads;
    double *weight = malloc((size_t)N * sizeof *weight);
    for (int64_t row = 0; row < S * N; row++) {
        for (int64_t head = 0; head < heads; head++) {
            const double *q = qkv + row * 3 * d + head * e, *first = qkv + row / N * N * 3 * d + head * e;
            double highest = -INFINITY, sum = 0;
            for (int64_t j = 0; j < N; j++) {
                weight[j] = 0;
                for (int64_t i = 0; i < e; i++) {
                    weight[j] += q[i] * first[j * 3 * d + d + i] / sqrt((double)e);
                }
                highest = weight[j] > highest ? weight[j] : highest;
            }
            for (int64_t j = 0; j < N; j++) {
                weight[j] = exp(weight[j] - highest);
                sum += weight[j];
            }
            for (int64_t i = 0; i < e; i++) {
                double *to = mixed + row * d + head * e + i;
                *to = 0;
                for (int64_t j = 0; j < N; j++) {
                    *to += weight[j] / sum * first[j * 3 * d + 2 * d + i];
                }
            }
        }
    }
    free(weight);
}

/* Forecasts [S, H] of `S` windows of one channel, x [S, L]; theta as the layout says. */
static inline double *forward_forecasts(const struct ps_model_shape *s, const struct ps_parameters *layout, const double *theta,
                                        const double *x, int64_t S, struct forward_dropout dropout)
{
    const int64_t L = s->seq_len, P = s->patch_len, d = s->d_model, f = s->d_ff, H = s->pred_len;
    const int64_t N = (L - P) / s->stride + 1 + (s->pad_end ? 1 : 0), R = S * N;
    double *mean = calloc((size_t)S, sizeof *mean), *deviation = calloc((size_t)S, sizeof *deviation);
    double *patches = calloc((size_t)(R * P), sizeof *patches), *u = calloc((size_t)(R * d), sizeof *u);
    double *norm = calloc((size_t)(R * d), sizeof *norm), *mixed = calloc((size_t)(R * d), sizeof *mixed);
    double *branch = calloc((size_t)(R * d), sizeof *branch), *qkv = calloc((size_t)(R * 3 * d), sizeof *qkv);
    double *hidden = calloc((size_t)(R * f), sizeof *hidden), *forecast = calloc((size_t)(S * H), sizeof *forecast);
#define FORWARD_TENSOR(layer, name) forward_tensor(layout, theta, layer, name)

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
        for (int64_t n = 0; n < N; n++) {
            for (int64_t t = 0; t < P; t++) {
                const int64_t at = n * s->stride + t < L ? n * s->stride + t : L - 1;
                patches[(i * N + n) * P + t] = (window[at] - mean[i]) / deviation[i];
            }
        }
    }
    forward_linear(u, patches, FORWARD_TENSOR(-1, "w_p"), FORWARD_TENSOR(-1, "b_p"), R, P, d);
    for (int64_t i = 0; i < R * d; i++) {
        u[i] += FORWARD_TENSOR(-1, "w_pos")[i % (N * d)];
    }
    forward_drop(u, R * d, &dropout, SITE_EMBEDDING);
    for (int64_t l = 0; l < s->n_layers; l++) {
        forward_layernorm(norm, u, FORWARD_TENSOR(l, "ln1_gamma"), FORWARD_TENSOR(l, "ln1_beta"), R, d);
        forward_linear(qkv, norm, FORWARD_TENSOR(l, "w_qkv"), FORWARD_TENSOR(l, "b_qkv"), R, d, 3 * d);
        forward_attention(mixed, qkv, S, N, d, s->n_heads);
        forward_linear(branch, mixed, FORWARD_TENSOR(l, "w_o"), FORWARD_TENSOR(l, "b_o"), R, d, d);
        forward_drop(branch, R * d, &dropout, SITE_ATTENTION + SITES_EACH_LAYER * l);
        for (int64_t i = 0; i < R * d; i++) {
            u[i] += branch[i];
        }
        forward_layernorm(norm, u, FORWARD_TENSOR(l, "ln2_gamma"), FORWARD_TENSOR(l, "ln2_beta"), R, d);
        forward_linear(hidden, norm, FORWARD_TENSOR(l, "w_1"), FORWARD_TENSOR(l, "b_1"), R, d, f);
        for (int64_t i = 0; i < R * f; i++) {
            const double h = hidden[i];
            hidden[i] = 0.5 * h * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (h + 0.044715 * h * h * h)));
        }
        forward_drop(hidden, R * f, &dropout, SITE_HIDDEN + SITES_EACH_LAYER * l);
        forward_linear(branch, hidden, FORWARD_TENSOR(l, "w_2"), FORWARD_TENSOR(l, "b_2"), R, f, d);
        forward_drop(branch, R * d, &dropout, SITE_OUTPUT + SITES_EACH_LAYER * l);
        for (int64_t i = 0; i < R * d; i++) {
            u[i] += branch[i];
        }
    }
    forward_linear(forecast, u, FORWARD_TENSOR(-1, "w_h"), FORWARD_TENSOR(-1, "b_h"), S, N * d, H);
    for (int64_t i = 0; i < S * H; i++) {
        forecast[i] = forecast[i] * deviation[i / H] + mean[i / H];
    }
#undef FORWARD_TENSOR
    double *scratch[] = {mean, deviation, patches, u, norm, mixed, branch, qkv, hidden};
    for (size_t i = 0; i < sizeof scratch / sizeof *scratch; i++) {
        free(scratch[i]);
    }
    return forecast;
}

#endif
