#include "model/parameters.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/philox.h"

int64_t ps_patches(const struct ps_model_shape *shape)
{
    return (shape->seq_len - shape->patch_len) / shape->stride + 1 + (shape->pad_end ? 1 : 0);
}

int64_t ps_masked_patches(const struct ps_model_shape *s)
{
    const int64_t patches = ps_patches(s);
    return s->mask_ratio > 0 ? patches - (int64_t)((double)patches * (1 - s->mask_ratio)) : 0;
}

int64_t ps_head_rows(const struct ps_model_shape *shape, int64_t batch)
{
    return batch * shape->channels * (shape->mask_ratio > 0 ? ps_patches(shape) : 1);
}

int64_t ps_head_columns(const struct ps_model_shape *shape)
{
    return shape->d_model * (shape->mask_ratio > 0 ? 1 : ps_patches(shape));
}

int64_t ps_head_width(const struct ps_model_shape *shape)
{
    return shape->mask_ratio > 0 ? shape->patch_len : shape->pred_len * (shape->quantiles > 0 ? shape->quantiles : 1);
}

double ps_dropout_rate(const struct ps_model_shape *s, enum ps_dropout_place place)
{
    if (s->dropout_at[place].set) {
        return s->dropout_at[place].rate;
    }
    return place == PS_DROP_ATTENTION_WEIGHTS || place == PS_DROP_HEAD ? 0 : s->dropout;
}

int64_t ps_parameter_count(const struct ps_parameter *p)
{
    return p->size[0] * p->size[1] * p->size[2];
}

/* Variants that have no meaning together. */
static enum ps_status check_variants(const struct ps_model_shape *s)
{
    static const char *const places[PS_DROP_PLACES] = {"embedding", "attention_weights", "attention", "hidden", "output", "head"};
    if (!(s->dropout >= 0 && s->dropout < 1)) {
        return ps_fail(PS_USAGE, "model.dropout: %g is not in [0, 1)", s->dropout);
    }
    for (int i = 0; i < PS_DROP_PLACES; i++) {
        double rate = ps_dropout_rate(s, (enum ps_dropout_place)i);
        if (!(rate >= 0 && rate < 1)) {
            return ps_fail(PS_USAGE, "model.dropout_%s: %g is not in [0, 1)", places[i], rate);
        }
    }
    if (s->positions == PS_POSITIONS_ROPE && s->d_model / s->n_heads % 2 != 0) {
        return ps_fail(PS_USAGE,
                       "model.positions: rope turns pairs of columns, and heads of d_model %lld / n_heads %lld have an odd %lld",
                       (long long)s->d_model, (long long)s->n_heads, (long long)(s->d_model / s->n_heads));
    }
    if ((s->revin_affine || s->revin_subtract_last) && !s->revin) {
        return ps_fail(PS_USAGE, "model.%s: is a part of RevIN, and model.revin is false",
                       s->revin_affine ? "revin_affine" : "revin_subtract_last");
    }
    return PS_OK;
}

/* Masked patches must not be told by what is left of the window. */
static enum ps_status check_masking(const struct ps_model_shape *s)
{
    if (s->mask_ratio == 0) {
        return PS_OK;
    }
    if (!(s->mask_ratio > 0 && s->mask_ratio < 1)) {
        return ps_fail(PS_USAGE, "model.mask_ratio: %g is not between 0 and 1", s->mask_ratio);
    }
    const int64_t patches = ps_patches(s), masked = ps_masked_patches(s);
    if (masked < 1 || masked >= patches) {
        return ps_fail(PS_USAGE, "model.mask_ratio: %g masks %lld of %lld patches: at least one must be masked, and one left",
                       s->mask_ratio, (long long)masked, (long long)patches);
    }
    if (s->stride < s->patch_len) {
        return ps_fail(PS_USAGE,
                       "model.stride: %lld is less than patch_len, %lld: a masked patch's values would stand in its neighbours: "
                       "set stride: %lld",
                       (long long)s->stride, (long long)s->patch_len, (long long)s->patch_len);
    }
    if (s->pad_end) {
        return ps_fail(PS_USAGE, "model.padding: end repeats the window's last value in a patch more, which tells it where its "
                                 "own patch is masked: set padding: none");
    }
    if (s->quantiles > 0) {
        return ps_fail(PS_USAGE, "train.loss: quantile is of forecasts: take mse, mae or huber");
    }
    if (s->individual_head) {
        return ps_fail(PS_USAGE, "model.head: individual is of forecasts: one head reconstructs all channels: set head: shared");
    }
    if (s->revin_affine) {
        return ps_fail(PS_USAGE, "model.revin_affine: scales what is to be reconstructed, and a scale of 0 would leave no error: "
                                 "set it to false");
    }
    return PS_OK;
}

enum ps_status ps_model_shape_check(const struct ps_model_shape *s)
{
    const struct {
        const char *name;
        int64_t value, most; /* far beyond any model, and products of two sizes do not overflow */
    } positive[] = {{"channels", s->channels, 1 << 24},   {"seq_len", s->seq_len, 1 << 24}, {"pred_len", s->pred_len, 1 << 24},
                    {"patch_len", s->patch_len, 1 << 24}, {"stride", s->stride, 1 << 24},   {"d_model", s->d_model, 1 << 24},
                    {"n_heads", s->n_heads, 1 << 24},     {"d_ff", s->d_ff, 1 << 24},       {"n_layers", s->n_layers, 1024}};
    for (size_t i = 0; i < sizeof positive / sizeof *positive; i++) {
        if (positive[i].value < 1 || positive[i].value > positive[i].most) {
            return ps_fail(PS_USAGE, "model.%s: %lld is not a size: it must be from 1 to %lld", positive[i].name,
                           (long long)positive[i].value, (long long)positive[i].most);
        }
    }
    if (s->quantiles < 0 || s->quantiles > PS_MOST_QUANTILES) {
        return ps_fail(PS_USAGE, "train.quantiles: there are %lld: at most %d are served", (long long)s->quantiles,
                       PS_MOST_QUANTILES);
    }
    if (s->d_model % s->n_heads != 0) {
        return ps_fail(PS_USAGE, "model.n_heads: d_model %lld is not divisible by %lld heads", (long long)s->d_model,
                       (long long)s->n_heads);
    }
    if (s->patch_len > s->seq_len) {
        return ps_fail(PS_USAGE, "model.patch_len: %lld is longer than the window, seq_len %lld", (long long)s->patch_len,
                       (long long)s->seq_len);
    }
    PS_TRY(check_variants(s));
    return check_masking(s);
}

/* Appends a tensor of the given sizes (0 beyond the rank) and returns its place. */
static int append3(struct ps_parameters *p, const char *prefix, const char *name, int64_t n0, int64_t n1, int64_t n2)
{
    struct ps_parameter *t = &p->table[p->all];
    snprintf(t->name, sizeof t->name, "%s%s", prefix, name);
    t->rank = n2 ? 3 : n1 ? 2 : 1;
    t->size[0] = n0;
    t->size[1] = n1 ? n1 : 1;
    t->size[2] = n2 ? n2 : 1;
    t->offset = p->stored;
    p->stored += (ps_parameter_count(t) + PS_PARAMETER_ALIGN - 1) / PS_PARAMETER_ALIGN * PS_PARAMETER_ALIGN;
    return p->all++;
}

static int append(struct ps_parameters *p, const char *prefix, const char *name, int64_t n0, int64_t n1)
{
    return append3(p, prefix, name, n0, n1, 0);
}

/* "layers.0.bn1_" and what follows. */
static int append_norm(struct ps_parameters *p, const struct ps_model_shape *s, const char *prefix, int norm, const char *name)
{
    static const char *const kinds[] = {[PS_NORM_LAYER] = "ln", [PS_NORM_BATCH] = "bn", [PS_NORM_RMS] = "rms"};
    char full[16];
    snprintf(full, sizeof full, "%s%d_%s", kinds[s->norm], norm, name);
    return append(p, prefix, full, s->d_model, 0);
}

enum ps_status ps_parameters_layout(const struct ps_model_shape *s, struct ps_parameters **parameters)
{
    PS_TRY(ps_model_shape_check(s));
    int64_t d = s->d_model, f = s->d_ff, layers = s->n_layers, patches = ps_patches(s);
    int64_t inner = s->activation == PS_SWIGLU ? 2 * f : f;
    struct ps_parameters *p = calloc(1, sizeof *p);
    if (p) {
        p->table = calloc((size_t)(7 + layers * (PS_LAYER_PARAMETERS + PS_LAYER_STATISTICS)), sizeof *p->table);
        p->layer = calloc((size_t)layers, sizeof *p->layer);
        p->statistics = calloc((size_t)layers, sizeof *p->statistics);
    }
    if (!p || !p->table || !p->layer || !p->statistics) {
        ps_parameters_free(p);
        return ps_fail(PS_USAGE, "model.n_layers: no memory for the table of %lld layers", (long long)layers);
    }
    char prefix[32];
    p->w_p = append(p, "", "w_p", s->patch_len, d);
    for (int64_t l = 0; l < layers; l++) {
        snprintf(prefix, sizeof prefix, "layers.%lld.", (long long)l);
        p->layer[l][PS_W_QKV] = append(p, prefix, "w_qkv", d, 3 * d);
        p->layer[l][PS_W_O] = append(p, prefix, "w_o", d, d);
        p->layer[l][PS_W_1] = append(p, prefix, "w_1", d, inner);
        p->layer[l][PS_W_2] = append(p, prefix, "w_2", f, d);
    }
    const int masked = s->mask_ratio > 0;
    p->w_h = s->individual_head ? append3(p, "", "w_h", s->channels, patches * d, ps_head_width(s))
                                : append(p, "", masked ? "w_r" : "w_h", ps_head_columns(s), ps_head_width(s));
    p->decayed = p->stored;
    p->b_p = append(p, "", "b_p", d, 0);
    p->w_pos = s->positions == PS_POSITIONS_LEARNED ? append(p, "", "w_pos", patches, d) : -1;
    for (int64_t l = 0; l < layers; l++) {
        const int beta = s->norm != PS_NORM_RMS;
        snprintf(prefix, sizeof prefix, "layers.%lld.", (long long)l);
        p->layer[l][PS_NORM1_GAMMA] = append_norm(p, s, prefix, 1, "gamma");
        p->layer[l][PS_NORM1_BETA] = beta ? append_norm(p, s, prefix, 1, "beta") : -1;
        p->layer[l][PS_B_QKV] = append(p, prefix, "b_qkv", 3 * d, 0);
        p->layer[l][PS_B_O] = append(p, prefix, "b_o", d, 0);
        p->layer[l][PS_NORM2_GAMMA] = append_norm(p, s, prefix, 2, "gamma");
        p->layer[l][PS_NORM2_BETA] = beta ? append_norm(p, s, prefix, 2, "beta") : -1;
        p->layer[l][PS_B_1] = append(p, prefix, "b_1", inner, 0);
        p->layer[l][PS_B_2] = append(p, prefix, "b_2", d, 0);
    }
    p->b_h = s->individual_head ? append(p, "", "b_h", s->channels, ps_head_width(s))
                                : append(p, "", masked ? "b_r" : "b_h", ps_head_width(s), 0);
    p->revin_weight = s->revin_affine ? append(p, "", "revin_weight", s->channels, 0) : -1;
    p->revin_bias = s->revin_affine ? append(p, "", "revin_bias", s->channels, 0) : -1;
    p->n = p->all;
    p->count = p->stored;
    for (int64_t l = 0; l < layers && s->norm == PS_NORM_BATCH; l++) {
        snprintf(prefix, sizeof prefix, "layers.%lld.", (long long)l);
        p->statistics[l][PS_RUNNING_MEAN_1] = append_norm(p, s, prefix, 1, "mean");
        p->statistics[l][PS_RUNNING_VAR_1] = append_norm(p, s, prefix, 1, "var");
        p->statistics[l][PS_RUNNING_MEAN_2] = append_norm(p, s, prefix, 2, "mean");
        p->statistics[l][PS_RUNNING_VAR_2] = append_norm(p, s, prefix, 2, "var");
    }
    *parameters = p;
    return PS_OK;
}

void ps_parameters_free(struct ps_parameters *p)
{
    if (p) {
        free(p->table);
        free(p->layer);
        free(p->statistics);
        free(p);
    }
}

/* What a tensor starts as, from the last part of its name. */
static double bound_of(const struct ps_parameters *p, int t, double *constant)
{
    const char *name = p->table[t].name;
    const char *dot = strrchr(name, '.');
    const char *last = dot ? dot + 1 : name;
    *constant = 0;
    if (t == p->revin_weight || strstr(last, "gamma") || strstr(last, "_var")) {
        *constant = 1;
        return 0;
    }
    if (t == p->revin_bias || strstr(last, "beta") || strstr(last, "_mean")) {
        return 0;
    }
    if (t == p->w_pos) {
        return 0.02;
    }
    /* A bias shares its weight's fan_in: b_x stands with w_x. */
    int weight = t;
    if (last[0] == 'b') {
        char sought[sizeof p->table[t].name];
        snprintf(sought, sizeof sought, "%.*sw%s", (int)(last - name), name, last + 1);
        for (weight = 0; strcmp(p->table[weight].name, sought) != 0; weight++) {
        }
    }
    return 1 / sqrt((double)p->table[weight].size[p->table[weight].rank - 2]);
}

void ps_parameters_initialise(const struct ps_parameters *p, uint64_t seed, double *values)
{
    memset(values, 0, (size_t)p->stored * sizeof *values);
    for (int t = 0; t < p->all; t++) {
        double constant, bound = bound_of(p, t, &constant);
        double *tensor = values + p->table[t].offset;
        int64_t count = ps_parameter_count(&p->table[t]);
        for (int64_t i = 0; i < count; i++) {
            /* Rounded to float, so that every precision starts from the same numbers. */
            tensor[i] = bound == 0
                            ? constant
                            : (double)(float)((2 * ps_uniform(seed, (uint64_t)i, PS_SITE_INIT + (uint32_t)t, 0) - 1) * bound);
        }
    }
}

void ps_positions_fill(const struct ps_model_shape *s, double *values)
{
    int64_t patches = ps_patches(s), d = s->d_model, count = patches * d;
    memset(values, 0, (size_t)count * sizeof *values);
    if (s->positions != PS_POSITIONS_SINCOS) {
        return;
    }
    double mean = 0, squares = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t n = i / d, j = i % d;
        double angle = (double)n * exp((double)(j - j % 2) * -(log(10000.0) / (double)d));
        values[i] = j % 2 ? cos(angle) : sin(angle);
        mean += values[i] / (double)count;
    }
    for (int64_t i = 0; i < count; i++) {
        values[i] -= mean;
        squares += values[i] * values[i];
    }
    double scale = count > 1 && squares > 0 ? 1 / (10 * sqrt(squares / (double)(count - 1))) : 0;
    for (int64_t i = 0; i < count; i++) {
        values[i] *= scale;
    }
}

void ps_rope_angles(const struct ps_model_shape *s, int64_t columns, double *values)
{
    int64_t patches = ps_patches(s), e = s->d_model / s->n_heads;
    for (int64_t n = 0; n < patches; n++) {
        for (int64_t i = 0; i + 1 < columns; i += 2) {
            double angle = i < e ? (double)n * pow(10000, -(double)i / (double)e) : 0;
            values[n * columns + i] = cos(angle);
            values[n * columns + i + 1] = sin(angle);
        }
    }
}

struct ps_tensor ps_parameter_tensor(const struct ps_parameters *p, int t, void *flat, enum ps_type type)
{
    const struct ps_parameter *entry = &p->table[t];
    return ps_tensor_nd((char *)flat + (size_t)entry->offset * ps_type_bytes(type), type, entry->rank, entry->size);
}
