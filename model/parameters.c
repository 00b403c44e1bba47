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
    if (s->d_model % s->n_heads != 0) {
        return ps_fail(PS_USAGE, "model.n_heads: d_model %lld is not divisible by %lld heads", (long long)s->d_model,
                       (long long)s->n_heads);
    }
    if (s->patch_len > s->seq_len) {
        return ps_fail(PS_USAGE, "model.patch_len: %lld is longer than the window, seq_len %lld", (long long)s->patch_len,
                       (long long)s->seq_len);
    }
    if (!(s->dropout >= 0 && s->dropout < 1)) {
        return ps_fail(PS_USAGE, "model.dropout: %g is not in [0, 1)", s->dropout);
    }
    return PS_OK;
}

/* Appends a tensor of the given sizes (n1 0: rank 1) and returns its place. */
static int append(struct ps_parameters *p, const char *prefix, const char *name, int64_t n0, int64_t n1)
{
    struct ps_parameter *t = &p->table[p->n];
    snprintf(t->name, sizeof t->name, "%s%s", prefix, name);
    t->rank = n1 ? 2 : 1;
    t->size[0] = n0;
    t->size[1] = n1 ? n1 : 1;
    t->offset = p->count;
    int64_t elements = t->size[0] * t->size[1];
    p->count += (elements + PS_PARAMETER_ALIGN - 1) / PS_PARAMETER_ALIGN * PS_PARAMETER_ALIGN;
    return p->n++;
}

enum ps_status ps_parameters_layout(const struct ps_model_shape *s, struct ps_parameters **parameters)
{
    PS_TRY(ps_model_shape_check(s));
    int64_t d = s->d_model, f = s->d_ff, layers = s->n_layers, patches = ps_patches(s);
    struct ps_parameters *p = calloc(1, sizeof *p);
    if (p) {
        p->table = calloc((size_t)(5 + layers * PS_LAYER_PARAMETERS), sizeof *p->table);
        p->layer = calloc((size_t)layers, sizeof *p->layer);
    }
    if (!p || !p->table || !p->layer) {
        ps_parameters_free(p);
        return ps_fail(PS_USAGE, "model.n_layers: no memory for the table of %lld layers", (long long)layers);
    }
    char prefix[32];
    p->w_p = append(p, "", "w_p", s->patch_len, d);
    for (int64_t l = 0; l < layers; l++) {
        snprintf(prefix, sizeof prefix, "layers.%lld.", (long long)l);
        p->layer[l][PS_W_QKV] = append(p, prefix, "w_qkv", d, 3 * d);
        p->layer[l][PS_W_O] = append(p, prefix, "w_o", d, d);
        p->layer[l][PS_W_1] = append(p, prefix, "w_1", d, f);
        p->layer[l][PS_W_2] = append(p, prefix, "w_2", f, d);
    }
    p->w_h = append(p, "", "w_h", patches * d, s->pred_len);
    p->decayed = p->count;
    p->b_p = append(p, "", "b_p", d, 0);
    p->w_pos = append(p, "", "w_pos", patches, d);
    for (int64_t l = 0; l < layers; l++) {
        snprintf(prefix, sizeof prefix, "layers.%lld.", (long long)l);
        p->layer[l][PS_LN1_GAMMA] = append(p, prefix, "ln1_gamma", d, 0);
        p->layer[l][PS_LN1_BETA] = append(p, prefix, "ln1_beta", d, 0);
        p->layer[l][PS_B_QKV] = append(p, prefix, "b_qkv", 3 * d, 0);
        p->layer[l][PS_B_O] = append(p, prefix, "b_o", d, 0);
        p->layer[l][PS_LN2_GAMMA] = append(p, prefix, "ln2_gamma", d, 0);
        p->layer[l][PS_LN2_BETA] = append(p, prefix, "ln2_beta", d, 0);
        p->layer[l][PS_B_1] = append(p, prefix, "b_1", f, 0);
        p->layer[l][PS_B_2] = append(p, prefix, "b_2", d, 0);
    }
    p->b_h = append(p, "", "b_h", s->pred_len, 0);
    *parameters = p;
    return PS_OK;
}

void ps_parameters_free(struct ps_parameters *p)
{
    if (p) {
        free(p->table);
        free(p->layer);
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
    if (strstr(last, "gamma")) {
        *constant = 1;
        return 0;
    }
    if (strstr(last, "beta")) {
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
    return 1 / sqrt((double)p->table[weight].size[0]);
}

void ps_parameters_initialise(const struct ps_parameters *p, uint64_t seed, double *values)
{
    memset(values, 0, (size_t)p->count * sizeof *values);
    for (int t = 0; t < p->n; t++) {
        double constant, bound = bound_of(p, t, &constant);
        double *tensor = values + p->table[t].offset;
        int64_t count = p->table[t].size[0] * p->table[t].size[1];
        for (int64_t i = 0; i < count; i++) {
            /* Rounded to float, so that every precision starts from the same numbers. */
            tensor[i] = bound == 0
                            ? constant
                            : (double)(float)((2 * ps_uniform(seed, (uint64_t)i, PS_SITE_INIT + (uint32_t)t, 0) - 1) * bound);
        }
    }
}

struct ps_tensor ps_parameter_tensor(const struct ps_parameters *p, int t, void *flat, enum ps_type type)
{
    const struct ps_parameter *entry = &p->table[t];
    return ps_tensor_nd((char *)flat + (size_t)entry->offset * ps_type_bytes(type), type, entry->rank, entry->size);
}
