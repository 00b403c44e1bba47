/* config.json of Hugging Face's PatchTSTForPrediction: what its keys and values are called here, in one table for both ways. */
#include "src/weights.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "data/files.h"
#include "data/text.h"
#include "src/config_keys.h"

enum { LONGEST = 1 << 20 };

/* What PatchTSTConfig takes for a key that config.json leaves out, as JSON. */
static const struct {
    const char *key, *json;
} presets[] = {{"num_input_channels", "1"},
               {"context_length", "32"},
               {"prediction_length", "24"},
               {"patch_length", "1"},
               {"patch_stride", "1"},
               {"d_model", "128"},
               {"num_attention_heads", "4"},
               {"ffn_dim", "512"},
               {"num_hidden_layers", "3"},
               {"norm_type", "\"batchnorm\""},
               {"pre_norm", "true"},
               {"activation_function", "\"gelu\""},
               {"positional_encoding_type", "\"sincos\""},
               {"share_projection", "true"},
               {"scaling", "\"std\""},
               {"model_type", "\"patchtst\""},
               {"use_cls_token", "false"},
               {"channel_attention", "false"},
               {"share_embedding", "true"},
               {"bias", "true"},
               {"pooling_type", "\"mean\""},
               {"loss", "\"mse\""}};

/* Whole numbers. */
static const struct {
    const char *theirs, *ours;
} sizes[] = {{"context_length", "seq_len"}, {"prediction_length", "pred_len"},
             {"patch_length", "patch_len"}, {"patch_stride", "stride"},
             {"d_model", "d_model"},        {"num_attention_heads", "n_heads"},
             {"ffn_dim", "d_ff"},           {"num_hidden_layers", "n_layers"}};

/* Rates of dropout, 0 where they are left out. path_dropout is that of both of a layer's branches. */
static const struct {
    const char *theirs, *ours;
    enum ps_dropout_place place;
} rates[] = {{"positional_dropout", "dropout_embedding", PS_DROP_EMBEDDING},
             {"attention_dropout", "dropout_attention_weights", PS_DROP_ATTENTION_WEIGHTS},
             {"path_dropout", "dropout_attention", PS_DROP_ATTENTION},
             {"path_dropout", "dropout_output", PS_DROP_OUTPUT},
             {"ff_dropout", "dropout_hidden", PS_DROP_HIDDEN},
             {"head_dropout", "dropout_head", PS_DROP_HEAD}};

/* Values that are one of a few, and what they are here; the first of each key and value of ours is what export writes. Without
 * ours: the only one that has a counterpart. */
static const struct {
    const char *theirs, *json, *ours, *value;
} choices[] = {{"norm_type", "\"batchnorm\"", "norm", "batch"},
               {"norm_type", "\"layernorm\"", "norm", "layer"},
               {"pre_norm", "true", "norm_place", "pre"},
               {"pre_norm", "false", "norm_place", "post"},
               {"activation_function", "\"gelu\"", "activation", "gelu"},
               {"activation_function", "\"relu\"", "activation", "relu"},
               {"activation_function", "\"gelu_pytorch_tanh\"", "activation", "gelu_tanh"},
               {"activation_function", "\"gelu_new\"", "activation", "gelu_tanh"},
               {"positional_encoding_type", "\"random\"", "positions", "learned"},
               {"positional_encoding_type", "\"sincos\"", "positions", "sincos"},
               {"share_projection", "true", "head", "shared"},
               {"share_projection", "false", "head", "individual"},
               {"scaling", "\"std\"", "revin", "true"},
               {"scaling", "null", "revin", "false"},
               {"scaling", "false", "revin", "false"},
               {"model_type", "\"patchtst\"", NULL, NULL},
               {"use_cls_token", "false", NULL, NULL},
               {"channel_attention", "false", NULL, NULL},
               {"share_embedding", "true", NULL, NULL},
               {"bias", "true", NULL, NULL},
               {"pooling_type", "null", NULL, NULL},
               {"loss", "\"mse\"", NULL, NULL}};

/* What PatchTSTForPrediction has nothing else for. */
static const struct {
    const char *ours, *value;
} fixed[] = {{"padding", "none"}, {"residual_attention", "false"}, {"revin_affine", "false"}, {"revin_subtract_last", "false"}};

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- theirs to ours ---- */

struct reading {
    const char *path;
    json_t *config;
    struct ps_known *known;
};

/* A key's value as compact JSON. */
struct json_text {
    char text[64];
};

static struct json_text text_of(json_t *value)
{
    struct json_text json = {""};
    char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
    snprintf(json.text, sizeof json.text, "%.*s", (int)sizeof json.text - 1, text ? text : "?");
    free(text);
    return json;
}

static struct json_text value_of(const struct reading *r, const char *key)
{
    json_t *value = json_object_get(r->config, key);
    struct json_text preset = {""};
    for (size_t i = 0; i < COUNT(presets) && !value; i++) {
        if (strcmp(presets[i].key, key) == 0) {
            snprintf(preset.text, sizeof preset.text, "%s", presets[i].json);
            return preset;
        }
    }
    return text_of(value);
}

static enum ps_status refuse(const struct reading *r, const char *key, const char *what)
{
    return ps_fail(PS_CHECKPOINT, "%s: %s: %s%s %s", r->path, key, ps_text_plain(value_of(r, key).text).text,
                   json_object_get(r->config, key) ? "" : ", PatchTSTConfig's own value,", what);
}

static enum ps_status read_whole(const struct reading *r, const char *key, int64_t *value)
{
    struct json_text json = value_of(r, key);
    size_t digits = strspn(json.text, "0123456789");
    *value = digits > 0 && digits < 16 && !json.text[digits] ? strtoll(json.text, NULL, 10) : 0;
    return *value > 0 ? PS_OK : refuse(r, key, "is not a size");
}

/* A number that has one value here. */
static enum ps_status require_real(const struct reading *r, const char *key, double expected)
{
    json_t *value = json_object_get(r->config, key);
    return !value || (json_is_number(value) && json_number_value(value) == expected) ? PS_OK
                                                                                     : refuse(r, key, "has no counterpart here");
}

static enum ps_status read_choice(const struct reading *r, const char *key)
{
    struct json_text json = value_of(r, key);
    for (size_t i = 0; i < COUNT(choices); i++) {
        if (strcmp(choices[i].theirs, key) == 0 && strcmp(choices[i].json, json.text) == 0) {
            if (choices[i].ours) {
                ps_known_add(r->known, choices[i].ours, 1, "%s", choices[i].value);
            }
            return PS_OK;
        }
    }
    return refuse(r, key, "has no counterpart here");
}

static enum ps_status read_rate(const struct reading *r, size_t i)
{
    json_t *value = json_object_get(r->config, rates[i].theirs);
    double rate = value ? json_number_value(value) : 0;
    if ((value && !json_is_number(value)) || !(rate >= 0 && rate < 1)) {
        return refuse(r, rates[i].theirs, "is not a rate in [0, 1)");
    }
    ps_known_add(r->known, rates[i].ours, 0, "%.17g", rate);
    return PS_OK;
}

static enum ps_status check_architecture(const struct reading *r)
{
    json_t *names = json_object_get(r->config, "architectures");
    const char *name = json_string_value(json_array_get(names, 0));
    return !names || json_is_null(names) || (name && strcmp(name, "PatchTSTForPrediction") == 0)
               ? PS_OK
               : refuse(r, "architectures", "is not PatchTSTForPrediction");
}

static enum ps_status read_config(const struct reading *r, int64_t *channels)
{
    PS_TRY(check_architecture(r));
    for (size_t i = 0; i < COUNT(choices); i++) {
        if (i == 0 || strcmp(choices[i].theirs, choices[i - 1].theirs) != 0) {
            PS_TRY(read_choice(r, choices[i].theirs));
        }
    }
    PS_TRY(require_real(r, "norm_eps", 1e-5));
    PS_TRY(require_real(r, "minimum_scale", 1e-5));
    PS_TRY(require_real(r, "scaling_dim", 1));
    int64_t value[COUNT(sizes)];
    for (size_t i = 0; i < COUNT(sizes); i++) {
        PS_TRY(read_whole(r, sizes[i].theirs, &value[i]));
        ps_known_add(r->known, sizes[i].ours, 1, "%" PRId64, value[i]);
    }
    PS_TRY(read_whole(r, "num_input_channels", channels));
    for (size_t i = 0; i < COUNT(rates); i++) {
        PS_TRY(read_rate(r, i));
    }
    for (size_t i = 0; i < COUNT(fixed); i++) {
        ps_known_add(r->known, fixed[i].ours, 1, "%s", fixed[i].value);
    }
    /* context, patch and stride: rows that fill no patch are left out at the beginning. */
    ps_known_add(r->known, "patches_from", 1, (value[0] - value[2]) % value[3] > 0 ? "end" : "start");
    return PS_OK;
}

enum ps_status ps_weights_hf_known(const char *path, struct ps_known *known, int64_t *channels)
{
    char *text;
    size_t size;
    json_error_t error;
    *known = (struct ps_known){.origin = path};
    PS_TRY(ps_file_read(PS_CHECKPOINT, path, LONGEST, &text, &size));
    struct reading r = {path, json_loadb(text, size, JSON_REJECT_DUPLICATES, &error), known};
    free(text);
    enum ps_status status = json_is_object(r.config)
                                ? read_config(&r, channels)
                                : ps_fail(PS_CHECKPOINT, "%s: not a JSON object%s%s", path, r.config ? "" : ": ",
                                          r.config ? "" : ps_text_plain(error.text).text);
    json_decref(r.config);
    return status;
}

/* Theirs is computed in float, where angles of up to N are off by up to N 2^-24. */
static int is_sincos(const float *table, const double *expected, int64_t count, int64_t patches)
{
    double bound = 1e-6 + 1e-8 * (double)patches;
    for (int64_t i = 0; i < count; i++) {
        if (!(fabs((double)table[i] - expected[i]) <= bound)) {
            return 0;
        }
    }
    return 1;
}

enum ps_status ps_weights_hf_positions(const struct ps_safetensors *file, struct ps_known *known)
{
    const struct ps_safetensor *t = ps_safetensors_find(file, PS_WEIGHTS_HF_POSITIONS);
    int at = 0;
    while (at < known->n && strcmp(known->value[at].name, "positions") != 0) {
        at++;
    }
    if (at == known->n || strcmp(known->value[at].text, "sincos") != 0 || !t || t->rank != 2 || t->count == 0) {
        return PS_OK;
    }
    struct ps_model_shape shape = {
        .seq_len = t->size[0], .patch_len = 1, .stride = 1, .d_model = t->size[1], .positions = PS_POSITIONS_SINCOS};
    float *table = malloc((size_t)t->count * sizeof *table);
    double *expected = malloc((size_t)t->count * sizeof *expected);
    enum ps_status status = table && expected ? ps_safetensors_values(file, t, table)
                                              : ps_fail(PS_CHECKPOINT, "%s: no memory for its positions", file->path);
    if (status == PS_OK) {
        ps_positions_fill(&shape, expected);
        if (!is_sincos(table, expected, t->count, t->size[0])) {
            snprintf(known->value[at].text, sizeof known->value[at].text, "learned");
        }
    }
    free(table);
    free(expected);
    return status;
}

/* ---- ours to theirs ---- */

/* What no value of a key of theirs says. */
static enum ps_status check_exportable(const struct ps_config *c)
{
    int64_t left = (c->model.seq_len - c->model.patch_len) % c->model.stride;
    const struct {
        int refused;
        const char *text;
    } refusals[] = {
        {c->train.loss == PS_LOSS_QUANTILE, "train.loss: quantile: PatchTSTForPrediction's head forecasts one value of each step"},
        {c->model.head == PS_HEAD_INDIVIDUAL,
         "model.head: individual: PatchTSTForPrediction has such heads, but fails to apply them"},
        {c->model.patches_from == PS_PATCHES_FROM_START && left > 0,
         "model.patches_from: start: PatchTSTForPrediction leaves out the rows that fill no patch at a window's beginning"},
        {c->model.patch_len >= c->model.seq_len,
         "model.patch_len: is model.seq_len, and PatchTSTForPrediction's windows are longer than a patch"},
        {c->model.positions == PS_POSITIONS_SINCOS && c->model.d_model % 2 != 0,
         "model.d_model: is odd, and PatchTSTForPrediction's table of sines and cosines has pairs of columns"},
    };
    for (size_t i = 0; i < COUNT(refusals); i++) {
        if (refusals[i].refused) {
            return ps_fail(PS_USAGE, "%s", refusals[i].text);
        }
    }
    return PS_OK;
}

/* The text of a key of section model. */
static enum ps_status text_of_key(const struct ps_config *c, const char *name, struct json_text *text)
{
    char *value = ps_config_value_text(c, &ps_keys[ps_key_index("model", name)]);
    if (!value) {
        return ps_fail(PS_USAGE, "model.%s: no memory", name);
    }
    snprintf(text->text, sizeof text->text, "%.*s", (int)sizeof text->text - 1, value);
    free(value);
    return PS_OK;
}

/* The value of theirs that means ours; keys of one value of theirs are written too. */
static enum ps_status write_choice(const struct ps_config *c, const char *key, json_t *config)
{
    const char *ours = NULL;
    struct json_text value = {""};
    for (size_t i = 0; i < COUNT(choices); i++) {
        if (strcmp(choices[i].theirs, key) != 0) {
            continue;
        }
        ours = choices[i].ours;
        if (ours) {
            PS_TRY(text_of_key(c, ours, &value));
        }
        if (!ours || strcmp(choices[i].value, value.text) == 0) {
            json_object_set_new(config, key, json_loads(choices[i].json, JSON_DECODE_ANY, NULL));
            return PS_OK;
        }
    }
    return ps_fail(PS_USAGE, "model.%s: %s: PatchTSTForPrediction has no counterpart", ours, value.text);
}

static enum ps_status write_config(const struct ps_config *c, int64_t channels, json_t *config)
{
    struct json_text text;
    for (size_t i = 0; i < COUNT(fixed); i++) {
        PS_TRY(text_of_key(c, fixed[i].ours, &text));
        if (strcmp(text.text, fixed[i].value) != 0) {
            return ps_fail(PS_USAGE, "model.%s: %s: PatchTSTForPrediction has no counterpart", fixed[i].ours, text.text);
        }
    }
    for (size_t i = 0; i < COUNT(choices); i++) {
        if (i == 0 || strcmp(choices[i].theirs, choices[i - 1].theirs) != 0) {
            PS_TRY(write_choice(c, choices[i].theirs, config));
        }
    }
    PS_TRY(check_exportable(c));
    for (size_t i = 0; i < COUNT(sizes); i++) {
        PS_TRY(text_of_key(c, sizes[i].ours, &text));
        json_object_set_new(config, sizes[i].theirs, json_integer(strtoll(text.text, NULL, 10)));
    }
    struct ps_model_shape shape = ps_config_shape(c, channels);
    for (size_t i = 0; i < COUNT(rates); i++) { /* of path_dropout's two the later: the branch behind the hidden columns */
        json_object_set_new(config, rates[i].theirs, json_real(ps_dropout_rate(&shape, rates[i].place)));
    }
    json_object_set_new(config, "num_input_channels", json_integer(channels));
    json_object_set_new(config, "norm_eps", json_real(1e-5));
    json_object_set_new(config, "architectures", json_pack("[s]", "PatchTSTForPrediction"));
    return PS_OK;
}

enum ps_status ps_weights_hf_config(const struct ps_config *c, int64_t channels, char **text)
{
    json_t *config = json_object();
    *text = NULL;
    enum ps_status status = config ? write_config(c, channels, config) : ps_fail(PS_USAGE, "no memory for config.json");
    if (status == PS_OK) {
        char *json = json_dumps(config, JSON_INDENT(2) | JSON_SORT_KEYS | JSON_REAL_PRECISION(16));
        if (!json || asprintf(text, "%s\n", json) < 0) {
            *text = NULL;
            status = ps_fail(PS_USAGE, "no memory for config.json");
        }
        free(json);
    }
    json_decref(config);
    return status;
}
