/* Weights in and out: safetensors and what is none, models of transformers and the authors against what they forecast
 * (tests/fixtures/weights, made by scripts/make_weights.py), what is refused, and training that begins with weights. */
#include <math.h>

#include "data/files.h"
#include "data/import.h"
#include "src/session.h"
#include "src/weights.h"
#include "tests/programs.h"
#include "tests/suite.h"

static const char *source; /* the project's root */
static struct ps_safetensors forecasts;

static struct path fixture(const char *name)
{
    return path_of("%.400s/tests/fixtures/weights/%s", source, name);
}

static void says(const char *text)
{
    const char *message = ps_error_message();
    ck_assert_msg(strstr(message, text) != NULL, "\"%s\" is not in the message: %s", text, message);
    ck_assert_msg(!strchr(message, '\n'), "more than one line: %s", message);
}

/* ---- the format ---- */

/* A file of this header and so many bytes of values. */
static char *safetensors_of(const char *header, size_t values, size_t *size)
{
    uint64_t length = strlen(header);
    *size = 8 + length + values;
    char *bytes = calloc(1, *size + 1);
    memcpy(bytes, &length, 8);
    memcpy(bytes + 8, header, length);
    return bytes;
}

#define ENTRY(dtype, shape, begin, end) "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" begin "," end "]}"

static const struct {
    const char *header;
    size_t values;
    const char *text;
} broken[] = {
    {"[1]", 0, "not a JSON object"},
    {"{\"a\":", 0, "not a JSON object"},
    {"{\"a\":" ENTRY("F32", "[1]", "0", "4") ",\"a\":" ENTRY("F32", "[1]", "0", "4") "}", 4, "duplicate"},
    {"{\"a\":1}", 0, "tensor a: its entry is not"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "its entry is not"},
    {"{\"a\":{\"dtype\":4,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "its entry is not"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":1,\"data_offsets\":[0,4]}}", 4, "its entry is not"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"b\":1}}", 4, "its entry is not"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]}}", 4, "its entry is not"},
    {"{\"a\":" ENTRY("F32", "[1]", "0.0", "4") "}", 4, "its entry is not"},
    {"{\"a\":" ENTRY("F32", "[1]", "0", "1e1") "}", 4, "its entry is not"},
    {"{\"a\":" ENTRY("F32", "[1]", "0", "99999999999999999999") "}", 4, "not a JSON object"},
    {"{\"a\":" ENTRY("F99", "[1]", "0", "4") "}", 4, "dtype F99 is not known"},
    {"{\"a\":" ENTRY("F32", "[1]", "-4", "0") "}", 4, "not within the 4 bytes"},
    {"{\"a\":" ENTRY("F32", "[1]", "4", "0") "}", 4, "not within the 4 bytes"},
    {"{\"a\":" ENTRY("F32", "[2]", "0", "8") "}", 4, "not within the 4 bytes"},
    {"{\"a\":" ENTRY("F32", "[9223372036854775807]", "0", "9223372036854775807") "}", 4, "not within the 4 bytes"},
    {"{\"a\":" ENTRY("F32", "[2]", "0", "4") "}", 4, "which are not those of F32 [2]"},
    {"{\"a\":" ENTRY("F64", "[4611686018427387904]", "0", "4") "}", 4, "which are not those of F64"},
    {"{\"a\":" ENTRY("F32", "[-1]", "0", "4") "}", 4, "its shape is not one"},
    {"{\"a\":" ENTRY("F32", "[1.5]", "0", "4") "}", 4, "its shape is not one"},
    {"{\"a\":" ENTRY("F32", "[4294967296,4294967296]", "0", "4") "}", 4, "its shape is not one"},
    {"{\"a\":" ENTRY("F32", "[1,1,1,1,1,1,1,1,1]", "0", "4") "}", 4, "has 9 dimensions"},
    {"{\"a\":" ENTRY("F32", "[1]", "0", "4") ",\"b\":" ENTRY("F32", "[2]", "0", "8") "}", 8, "tensor b: begins at byte 0"},
    {"{\"b\":" ENTRY("F32", "[1]", "8", "12") ",\"a\":" ENTRY("F32", "[1]", "0", "4") "}", 12, "tensor b: begins at byte 8"},
    {"{\"a\":" ENTRY("F32", "[1]", "4", "8") "}", 8, "tensor a: begins at byte 4"},
    {"{\"a\":" ENTRY("F32", "[1]", "0", "4") "}", 8, "8 bytes of values, and its tensors take 4"},
    {"{\"a\\nb\":" ENTRY("F32", "[1]", "4", "8") "}", 8, "tensor a?b: its name has control characters"},
};

START_TEST(broken_headers)
{
    size_t size;
    struct ps_safetensors file;
    char *bytes = safetensors_of(broken[_i].header, broken[_i].values, &size);
    ck_assert_int_eq(ps_safetensors_parse("x.safetensors", bytes, size, &file), PS_CHECKPOINT);
    says(broken[_i].text);
    says("x.safetensors: ");
}
END_TEST

/* The length before the header, and headers that are deep. */
START_TEST(broken_lengths)
{
    static const struct {
        uint64_t length;
        size_t size;
        const char *text;
    } cases[] = {
        {0, 0, "cut off: 0 bytes"},      {0, 7, "cut off: 7 bytes"}, {0, 8, "not a JSON object"},
        {1, 8, "cut off: 8 bytes"},      {3, 10, "cut off"},         {UINT64_MAX, 16, "cut off"},
        {UINT64_MAX - 7, 16, "cut off"}, {16, 16, "cut off"},        {1 << 24, (1 << 24) + 8, "a header of 16777216 bytes"}};
    struct ps_safetensors file;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *bytes = calloc(1, cases[i].size + 8);
        memcpy(bytes, &cases[i].length, 8);
        ck_assert_int_eq(ps_safetensors_parse("x", bytes, cases[i].size, &file), PS_CHECKPOINT);
        says(cases[i].text);
    }
    enum { DEEP = 100000 };
    char *header = malloc(2 * DEEP + 8);
    int at = sprintf(header, "{\"a\":");
    memset(header + at, '[', DEEP);
    header[at + DEEP] = 0;
    size_t size;
    char *bytes = safetensors_of(header, 0, &size);
    ck_assert_int_eq(ps_safetensors_parse("x", bytes, size, &file), PS_CHECKPOINT);
    says("depth");
    free(header);
}
END_TEST

START_TEST(types)
{
    static const char header[] = "{\"__metadata__\":{\"format\":\"pt\"},\"d\":" ENTRY("F64", "[2]", "0", "16") ",\"f\":" ENTRY(
        "F32", "[1,2]", "16",
        "24") ",\"h\":" ENTRY("F16", "[4]", "24",
                              "32") ",\"b\":" ENTRY("BF16", "[2]", "32",
                                                    "36") ",\"i\":" ENTRY("I64", "[]", "36",
                                                                          "44") ",\"e\":" ENTRY("F32", "[0,3]", "44", "44") "}   ";
    static const double d[2] = {1.5, -0.1};
    static const float f[2] = {3, -0.25f};
    static const uint16_t h[4] = {0x3c00, 0xc248, 0x0001, 0x7bff}, b[2] = {0x3f80, 0xc0a0};
    static const float expected[] = {1.5f, -0.1f, 3, -0.25f, 1, -3.140625f, 0x1p-24f, 65504, 1, -5};
    size_t size;
    char *bytes = safetensors_of(header, 44, &size), *values = bytes + size - 44;
    memcpy(values, d, 16);
    memcpy(values + 16, f, 8);
    memcpy(values + 24, h, 8);
    memcpy(values + 32, b, 4);
    struct ps_safetensors file;
    OK(ps_safetensors_parse("x", bytes, size, &file));
    ck_assert_int_eq(file.n, 6);
    ck_assert_ptr_null(ps_safetensors_find(&file, "__metadata__"));
    ck_assert_int_eq((int)ps_safetensors_find(&file, "e")->count, 0);
    float got[10];
    const char *const names[] = {"d", "f", "h", "b"};
    for (int i = 0, at = 0; i < 4; i++) {
        const struct ps_safetensor *t = ps_safetensors_find(&file, names[i]);
        OK(ps_safetensors_values(&file, t, got + at));
        at += (int)t->count;
    }
    for (int i = 0; i < 10; i++) {
        ck_assert_msg(got[i] == expected[i], "element %d is %g, not %g", i, (double)got[i], (double)expected[i]);
    }
    ck_assert_int_eq(ps_safetensors_values(&file, ps_safetensors_find(&file, "i"), got), PS_CHECKPOINT);
    says("tensor i: of dtype I64");
    ps_safetensors_free(&file);
}
END_TEST

START_TEST(not_finite)
{
    static const struct {
        const char *header;
        uint64_t bits;
        size_t bytes;
    } cases[] = {{"{\"a\":" ENTRY("F32", "[1]", "0", "4") "}", 0x7fc00000, 4},
                 {"{\"a\":" ENTRY("F32", "[1]", "0", "4") "}", 0xff800000, 4},
                 {"{\"a\":" ENTRY("F16", "[1]", "0", "2") "}", 0x7c00, 2},
                 {"{\"a\":" ENTRY("F16", "[1]", "0", "2") "}", 0xfe00, 2},
                 {"{\"a\":" ENTRY("BF16", "[1]", "0", "2") "}", 0x7f80, 2},
                 {"{\"a\":" ENTRY("F64", "[1]", "0", "8") "}", 0x7ff0000000000001, 8},
                 {"{\"a\":" ENTRY("F64", "[1]", "0", "8") "}", 0x7fe0000000000000, 8}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t size;
        char *bytes = safetensors_of(cases[i].header, cases[i].bytes, &size);
        memcpy(bytes + size - cases[i].bytes, &cases[i].bits, cases[i].bytes);
        struct ps_safetensors file;
        float value;
        OK(ps_safetensors_parse("x", bytes, size, &file));
        ck_assert_int_eq(ps_safetensors_values(&file, file.tensor, &value), PS_CHECKPOINT);
        says("tensor a: element 0 is not finite");
        ps_safetensors_free(&file);
    }
}
END_TEST

/* ---- what models forecast ---- */

#define MOST_SETS 8
static const struct model {
    const char *name;
    const char *sets[MOST_SETS]; /* what its weights do not tell */
    int exports;
} models[] = {
    {"hf_batchnorm", {NULL}, 1},
    {"hf_layernorm_post", {NULL}, 1},
    {"hf_gelu_tanh", {NULL}, 1},
    {"hf_individual", {NULL}, 0},
    {"hf_positions", {NULL}, 0}, /* in bf16: what is exported is not the same file */
    {"official_plain.safetensors", {"model.seq_len=26", "model.stride=4"}, 0},
    {"official_individual.safetensors",
     {"model.seq_len=26", "model.stride=4", "model.n_heads=2", "model.revin_subtract_last=true"},
     0},
    {"official_layernorm.safetensors",
     {"model.seq_len=26", "model.stride=4", "model.padding=none", "model.residual_attention=false", "model.activation=relu"},
     0},
};
enum { MODELS = sizeof models / sizeof *models, CHANNELS = 2 };

static enum ps_status import_with(const char *from, const char *const *sets, const char *more, const char *out)
{
    char *overrides[MOST_SETS + 1];
    int n = 0;
    for (; sets[n]; n++) {
        overrides[n] = (char *)sets[n];
    }
    if (more) {
        overrides[n++] = (char *)more;
    }
    struct ps_weights_import import = {.from = from, .out = out, .overrides = overrides, .n_overrides = n, .channels = CHANNELS};
    struct ps_weights_done done;
    return ps_weights_import(&import, &done);
}

/* Three times the windows x [B, L, C], so that each split has them. */
static void write_windows(const char *path, const float *x, int64_t B, int64_t L, int64_t H)
{
    hid_t file = H5Fcreate(path, H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    hsize_t inputs[3] = {(hsize_t)(3 * B), CHANNELS, (hsize_t)L}, targets[3] = {(hsize_t)(3 * B), CHANNELS, (hsize_t)H};
    float *values = calloc((size_t)(3 * B * CHANNELS * (L + H)), sizeof *values);
    for (int64_t i = 0; i < 3 * B * CHANNELS * L; i++) {
        int64_t b = i / (CHANNELS * L), c = i / L % CHANNELS, l = i % L;
        values[i] = x[(b % B * L + l) * CHANNELS + c];
    }
    const char *const names[] = {"/inputs", "/targets"};
    for (int i = 0; i < 2; i++) {
        hid_t space = H5Screate_simple(3, i == 0 ? inputs : targets, NULL);
        hid_t set = H5Dcreate2(file, names[i], H5T_IEEE_F32LE, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
        const float *from = i == 0 ? values : values + 3 * B * CHANNELS * L;
        ck_assert_int_ge(H5Dwrite(set, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, from), 0);
        H5Dclose(set);
        H5Sclose(space);
    }
    free(values);
    H5Fclose(file);
}

struct compared_forecasts {
    const float *y; /* [B, H, C] */
    int64_t H;
    double worst, largest;
};

static enum ps_status compare_forecasts(void *argument, int64_t first, int64_t n, const float *inputs, const float *targets,
                                        const float *got, const float *quantiles)
{
    (void)quantiles;
    struct compared_forecasts *c = argument;
    (void)inputs, (void)targets;
    for (int64_t i = 0; i < n * CHANNELS * c->H; i++) {
        int64_t b = first + i / (CHANNELS * c->H), channel = i / c->H % CHANNELS, h = i % c->H;
        double expected = (double)c->y[(b * c->H + h) * CHANNELS + channel], error = fabs((double)got[i] - expected);
        c->worst = !(error <= c->worst) ? error : c->worst;
        c->largest = fmax(c->largest, fabs(expected));
    }
    return PS_OK;
}

/* The largest error of the checkpoint's forecasts of NAME.x against NAME.y. */
static double forecast_error(const char *checkpoint_path, const char *name, double *largest)
{
    char text[80];
    int length = (int)strcspn(name, ".");
    snprintf(text, sizeof text, "%.*s.x", length, name);
    const struct ps_safetensor *x = ps_safetensors_find(&forecasts, text);
    snprintf(text, sizeof text, "%.*s.y", length, name);
    const struct ps_safetensor *y = ps_safetensors_find(&forecasts, text);
    ck_assert_msg(x && y, "no forecasts of %s", name);
    int64_t B = x->size[0], L = x->size[1], H = y->size[1];
    float *inputs = malloc((size_t)x->count * sizeof *inputs), *outputs = malloc((size_t)y->count * sizeof *outputs);
    OK(ps_safetensors_values(&forecasts, x, inputs));
    OK(ps_safetensors_values(&forecasts, y, outputs));
    struct path windows = path_of("%.400s/%.*s.windows.h5", folder.text, length, name);
    write_windows(windows.text, inputs, B, L, H);

    struct ps_checkpoint checkpoint;
    struct ps_config c;
    struct ps_session *s;
    OK(ps_checkpoint_load(checkpoint_path, &checkpoint));
    OK(ps_config_parse_saved(checkpoint.config, checkpoint_path, &c));
    for (int i = 0; i < 3; i++) {
        c.data.split[i] = (double)B;
    }
    OK(ps_session_open(&c, &(struct ps_session_options){.data_path = windows.text, .device = device, .checkpoint = &checkpoint},
                       &s));
    OK(ps_session_load_weights(s, &checkpoint, 0));
    struct compared_forecasts compared = {.y = outputs, .H = H};
    OK(ps_session_forecast(s, PS_TEST, compare_forecasts, &compared));
    ps_session_close(s);
    ps_config_free(&c);
    ps_checkpoint_free(&checkpoint);
    free(inputs);
    free(outputs);
    *largest = compared.largest;
    return compared.worst;
}

START_TEST(forecast)
{
    const struct model *m = &models[_i];
    struct path out = path_of("%.400s/%s.h5", folder.text, m->name);
    double largest;
    OK(import_with(fixture(m->name).text, m->sets, NULL, out.text));
    double error = forecast_error(out.text, m->name, &largest);
    printf("%s: forecasts up to %.2g are off by up to %.2g\n", m->name, largest, error);
    ck_assert_double_le(error, 2e-6 * largest);
}
END_TEST

/* ---- there and back ---- */

START_TEST(round_trip)
{
    const struct model *m = &models[_i];
    if (!m->exports) {
        return;
    }
    struct path first = path_of("%.400s/%s.first.h5", folder.text, m->name), out = path_of("%.400s/%s.out", folder.text, m->name),
                second = path_of("%.400s/%s.second.h5", folder.text, m->name);
    struct ps_weights_done done;
    double path_dropouts[2];
    OK(import_with(fixture(m->name).text, m->sets, NULL, first.text));
    OK(ps_weights_export(first.text, out.text, &done, path_dropouts));
    ck_assert_double_eq(path_dropouts[0], 0.2);
    ck_assert_double_eq(path_dropouts[1], 0.2);
    OK(import_with(out.text, (const char *const[]){NULL}, NULL, second.text));
    expect_equal_datasets(first.text, second.text);
    struct ps_checkpoint a, b;
    OK(ps_checkpoint_load(first.text, &a));
    OK(ps_checkpoint_load(second.text, &b));
    ck_assert_str_eq(a.config, b.config);
    ps_checkpoint_free(&a);
    ps_checkpoint_free(&b);
    /* The tensors are those that transformers wrote; of positions, what it computed in float. */
    struct ps_safetensors theirs, ours;
    OK(ps_safetensors_read(path_of("%.500s/model.safetensors", fixture(m->name).text).text, &theirs));
    OK(ps_safetensors_read(path_of("%.500s/model.safetensors", out.text).text, &ours));
    ck_assert_int_eq(theirs.n, ours.n);
    for (int i = 0; i < ours.n; i++) {
        const struct ps_safetensor *x = &theirs.tensor[i], *y = &ours.tensor[i];
        ck_assert_str_eq(x->name, y->name);
        ck_assert_str_eq(x->dtype, y->dtype);
        ck_assert_int_eq(x->rank, y->rank);
        ck_assert_int_eq(x->count, y->count);
        size_t bytes = (size_t)x->count * (strcmp(x->dtype, "I64") == 0 ? 8 : 4);
        if (strstr(x->name, "position_enc")) {
            for (int64_t j = 0; j < x->count; j++) {
                ck_assert_float_eq_tol(((const float *)x->bytes)[j], ((const float *)y->bytes)[j], 1e-6f);
            }
        } else {
            ck_assert_msg(memcmp(x->bytes, y->bytes, bytes) == 0, "%s differs", x->name);
        }
    }
    ps_safetensors_free(&theirs);
    ps_safetensors_free(&ours);
}
END_TEST

/* ---- what is refused ---- */

static json_t *config_of(const char *name)
{
    char *text = file_read(path_of("%.500s/config.json", fixture(name).text).text, NULL);
    json_t *object = read_json(text);
    free(text);
    return object;
}

/* A folder with this config.json and a fixture's tensors. */
static struct path folder_with(json_t *object, const char *name)
{
    struct path to = path_of("%.400s/hf", folder.text);
    size_t size;
    OK(ps_folder_make(PS_DATA, to.text));
    char *text = json_dumps(object, JSON_ENCODE_ANY), *bytes;
    file_write(path_of("%.500s/config.json", to.text).text, text, strlen(text));
    bytes = file_read(path_of("%.500s/model.safetensors", fixture(name).text).text, &size);
    file_write(path_of("%.500s/model.safetensors", to.text).text, bytes, size);
    free(text);
    free(bytes);
    return to;
}

static const struct {
    const char *key, *json, *text; /* json NULL: the key is left out */
} refused_keys[] = {
    {"pooling_type", NULL, "pooling_type: \"mean\", PatchTSTConfig's own value,"},
    {"pooling_type", "\"max\"", "pooling_type: \"max\" has no counterpart"},
    {"use_cls_token", "true", "use_cls_token: true"},
    {"channel_attention", "true", "channel_attention: true"},
    {"share_embedding", "false", "share_embedding: false"},
    {"bias", "false", "bias: false"},
    {"loss", "\"nll\"", "loss: \"nll\""},
    {"loss", "null", "loss: null"},
    {"scaling", "\"mean\"", "scaling: \"mean\""},
    {"scaling", "true", "scaling: true"},
    {"activation_function", "\"silu\"", "activation_function: \"silu\""},
    {"norm_type", "\"rms\"", "norm_type: \"rms\""},
    {"norm_eps", "1e-6", "norm_eps: "},
    {"minimum_scale", "1e-3", "minimum_scale: "},
    {"positional_encoding_type", "\"rope\"", "positional_encoding_type"},
    {"pre_norm", "1", "pre_norm: 1"},
    {"model_type", "\"patchtsmixer\"", "model_type: \"patchtsmixer\""},
    {"architectures", "[\"PatchTSTForPretraining\"]", "architectures: [\"PatchTSTForPretraining\"]"},
    {"d_model", "8.0", "d_model: 8.0 is not a size"},
    {"d_model", "-8", "d_model: -8 is not a size"},
    {"d_model", "\"8\"", "d_model: \"8\" is not a size"},
    {"num_hidden_layers", "1000000000000000000", "num_hidden_layers"},
    {"ff_dropout", "1", "ff_dropout: 1 is not a rate"},
    {"ff_dropout", "\"none\"", "ff_dropout: \"none\" is not a rate"},
    {"num_attention_heads", "3", "model.n_heads"},
    {"num_hidden_layers", "3", "has no tensor model.encoder.layers.2."},
    {"num_hidden_layers", "1", "the model has no place for it"},
    {"d_model", NULL, "its shape is"},
    {"ffn_dim", "16", "ff.0.weight: its shape is [12, 8], and the model's is [16, 8]"},
    {"norm_type", "\"layernorm\"", "has no tensor model.encoder.layers.0.norm_sublayer1.weight"},
    {"num_input_channels", "3", "--channels: 2 channels, and"},
};

START_TEST(refused_config)
{
    json_t *object = config_of("hf_batchnorm");
    if (refused_keys[_i].json) {
        json_object_set_new(object, refused_keys[_i].key, json_loads(refused_keys[_i].json, JSON_DECODE_ANY, NULL));
    } else {
        json_object_del(object, refused_keys[_i].key);
    }
    struct path from = folder_with(object, "hf_batchnorm"), out = path_of("%.400s/none.h5", folder.text);
    ck_assert_int_ne(import_with(from.text, (const char *const[]){NULL}, NULL, out.text), PS_OK);
    says(refused_keys[_i].text);
    ck_assert(!file_exists(out.text));
    json_decref(object);
}
END_TEST

/* PatchTSTConfig's own values stand for keys that are left out. */
START_TEST(left_out_keys)
{
    struct path with = path_of("%.400s/with.h5", folder.text), without = path_of("%.400s/without.h5", folder.text);
    json_t *object = config_of("hf_batchnorm");
    static const char *const same[] = {"norm_type",
                                       "pre_norm",
                                       "activation_function",
                                       "positional_encoding_type",
                                       "share_projection",
                                       "scaling",
                                       "use_cls_token",
                                       "channel_attention",
                                       "share_embedding",
                                       "bias",
                                       "loss",
                                       "norm_eps",
                                       "positional_dropout",
                                       "head_dropout",
                                       "architectures",
                                       "model_type"};
    OK(import_with(folder_with(object, "hf_batchnorm").text, (const char *const[]){NULL}, NULL, with.text));
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        ck_assert_int_eq(json_object_del(object, same[i]), 0);
    }
    OK(import_with(folder_with(object, "hf_batchnorm").text, (const char *const[]){NULL}, NULL, without.text));
    ck_assert(files_equal(with.text, without.text));
    json_decref(object);
}
END_TEST

/* ---- several files and their index ---- */

enum { SHARDS = 2 };
static const char *const shard_names[SHARDS] = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"};

/* A folder of a fixture's tensors dealt out over files, with their index, which the caller frees. */
static struct path sharded_folder(const char *name, json_t **index)
{
    struct path to = path_of("%.400s/sharded", folder.text);
    struct ps_safetensors file;
    OK(ps_folder_make(PS_DATA, to.text));
    OK(ps_safetensors_read(path_of("%.500s/model.safetensors", fixture(name).text).text, &file));
    struct ps_safetensor *part = calloc((size_t)file.n, sizeof *part);
    json_t *map = json_object();
    for (int k = 0; k < SHARDS; k++) {
        int n = 0;
        for (int i = k; i < file.n; i += SHARDS) {
            part[n++] = file.tensor[i];
            json_object_set_new(map, file.tensor[i].name, json_string(shard_names[k]));
        }
        char *bytes;
        size_t size;
        struct path path = path_of("%.400s/%s", to.text, shard_names[k]);
        OK(ps_safetensors_make(path.text, part, n, &bytes, &size));
        file_write(path.text, bytes, size);
        free(bytes);
    }
    free(part);
    ps_safetensors_free(&file);
    char *text = file_read(path_of("%.500s/config.json", fixture(name).text).text, NULL);
    file_write(path_of("%.500s/config.json", to.text).text, text, strlen(text));
    free(text);
    *index = json_pack("{s:{s:i}, s:o}", "metadata", "total_size", 1, "weight_map", map);
    return to;
}

static void write_index(const struct path *to, json_t *index)
{
    char *text = json_dumps(index, JSON_ENCODE_ANY);
    file_write(path_of("%.500s/model.safetensors.index.json", to->text).text, text, strlen(text));
    free(text);
}

START_TEST(several_files)
{
    json_t *index;
    struct path from = sharded_folder("hf_batchnorm", &index), out = path_of("%.400s/several.h5", folder.text),
                whole = path_of("%.400s/whole.h5", folder.text);
    write_index(&from, index);
    OK(import_with(from.text, (const char *const[]){NULL}, NULL, out.text));
    OK(import_with(fixture("hf_batchnorm").text, (const char *const[]){NULL}, NULL, whole.text));
    ck_assert(files_equal(out.text, whole.text));
    /* A whole file goes before an index. */
    struct path tensors = path_of("%.500s/model.safetensors", from.text);
    file_write(tensors.text, "x", 1);
    ck_assert_int_eq(import_with(from.text, (const char *const[]){NULL}, NULL, out.text), PS_CHECKPOINT);
    says("model.safetensors: not safetensors");
    ck_assert_int_eq(remove(tensors.text), 0);
    json_decref(index);
}
END_TEST

#define ONE_TENSOR "head.projection.bias"
static const struct {
    const char *tensor, *file, *text; /* the tensor's file in the index; NULL: it is left out there */
} indexes[] = {
    {ONE_TENSOR, NULL, "index.json: names 48 tensors, and its files hold 49"},
    {ONE_TENSOR, "model-00003-of-00003.safetensors", "model-00003-of-00003.safetensors: cannot be opened: No such file"},
    {ONE_TENSOR, "../model-00001-of-00002.safetensors", "../model-00001-of-00002.safetensors is not the name of a file beside it"},
    {ONE_TENSOR, "", "is not the name of a file beside it"},
    {ONE_TENSOR, "..", "/..: is a folder, not a file"},
    {ONE_TENSOR, "config.json", "config.json: not safetensors"},
    {ONE_TENSOR, "other", "tensor " ONE_TENSOR ": is not in"},
    {"head.extra", "model-00001-of-00002.safetensors", "tensor head.extra: is not in"},
    {"head\n", "model-00001-of-00002.safetensors", "its name has control characters"},
};

START_TEST(refused_index)
{
    json_t *index;
    struct path from = sharded_folder("hf_batchnorm", &index), out = path_of("%.400s/none.h5", folder.text);
    json_t *map = json_object_get(index, "weight_map");
    const char *file = indexes[_i].file;
    if (file && strcmp(file, "other") == 0) {
        int first = strcmp(json_string_value(json_object_get(map, indexes[_i].tensor)), shard_names[0]) == 0;
        file = shard_names[first];
    }
    if (file) {
        json_object_set_new(map, indexes[_i].tensor, json_string(file));
    } else {
        json_object_del(map, indexes[_i].tensor);
    }
    write_index(&from, index);
    ck_assert_int_eq(import_with(from.text, (const char *const[]){NULL}, NULL, out.text), PS_CHECKPOINT);
    says(indexes[_i].text);
    ck_assert(!file_exists(out.text));
    json_decref(index);
}
END_TEST

START_TEST(broken_index)
{
    static const struct {
        const char *json, *text;
    } cases[] = {{"[1]", "index.json: not a JSON object with a weight_map"},
                 {"{}", "not a JSON object with a weight_map"},
                 {"{\"weight_map\": 1}", "not a JSON object with a weight_map"},
                 {"{\"weight_map\": {", "not a JSON object with a weight_map: "},
                 {"{\"weight_map\": {\"a\": 1}}", "tensor a: its entry is not the name of a file beside it"},
                 {"{\"weight_map\": {\"a\": \"b\", \"a\": \"b\"}}", "duplicate"},
                 {"{\"weight_map\": {}}", "has no tensor model.encoder"}};
    json_t *index;
    struct path from = sharded_folder("hf_batchnorm", &index), out = path_of("%.400s/none.h5", folder.text);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        file_write(path_of("%.500s/model.safetensors.index.json", from.text).text, cases[i].json, strlen(cases[i].json));
        ck_assert_int_eq(import_with(from.text, (const char *const[]){NULL}, NULL, out.text), PS_CHECKPOINT);
        says(cases[i].text);
    }
    json_decref(index);
}
END_TEST

/* A file of the authors' with one tensor changed. */
enum change { MISSING, SUPERFLUOUS, SHAPE, INFINITE, NEGATIVE, INTEGER };
static const struct {
    const char *tensor;
    enum change change;
    const char *text;
} changes[] = {
    {"backbone.W_P.weight", MISSING, "has no tensor backbone.W_P.weight: not a state dict"},
    {"backbone.encoder.layers.1.self_attn.W_K.bias", MISSING, "has no tensor backbone.encoder.layers.1.self_attn.W_K.bias"},
    {"backbone.extra", SUPERFLUOUS, "tensor backbone.extra: the model has no place for it"},
    {"backbone.encoder.layers.1.ff.3.weight", SHAPE, "tensor backbone.encoder.layers.1.ff.3.weight: its shape is [96]"},
    {"head.linear.bias", INFINITE, "tensor head.linear.bias: element 0 is not finite"},
    {"backbone.encoder.layers.0.norm_ffn.1.running_var", NEGATIVE, "running_var: element 0 is -1, and a variance is not negative"},
    {"head.linear.bias", INTEGER, "tensor head.linear.bias"},
};

START_TEST(refused_tensors)
{
    struct ps_safetensors file;
    OK(ps_safetensors_read(fixture("official_plain.safetensors").text, &file));
    struct ps_safetensor *tensors = calloc((size_t)file.n + 1, sizeof *tensors);
    int n = 0;
    float changed[64];
    for (int i = 0; i < file.n; i++) {
        struct ps_safetensor t = file.tensor[i];
        int it = strcmp(t.name, changes[_i].tensor) == 0;
        if (it && changes[_i].change == SHAPE) {
            t.size[0] = t.count;
            t.rank = 1;
        } else if (it && changes[_i].change == INTEGER) {
            t.dtype = "I64";
            t.count = t.size[0] = 2;
        } else if (it && changes[_i].change != MISSING) {
            memcpy(changed, t.bytes, (size_t)t.count * sizeof *changed);
            changed[0] = changes[_i].change == INFINITE ? INFINITY : -1;
            t.bytes = changed;
        }
        if (!it || changes[_i].change != MISSING) {
            tensors[n++] = t;
        }
    }
    if (changes[_i].change == SUPERFLUOUS) {
        tensors[n] = tensors[0];
        tensors[n++].name = changes[_i].tensor;
    }
    struct path from = path_of("%.400s/changed.safetensors", folder.text), out = path_of("%.400s/none.h5", folder.text);
    char *bytes;
    size_t size;
    OK(ps_safetensors_make(from.text, tensors, n, &bytes, &size));
    file_write(from.text, bytes, size);
    ck_assert_int_eq(import_with(from.text, models[5].sets, NULL, out.text), PS_CHECKPOINT);
    says(changes[_i].text);
    ck_assert(!file_exists(out.text));
    free(bytes);
    free(tensors);
    ps_safetensors_free(&file);
}
END_TEST

/* What the weights tell may not be said otherwise, and what they do not tell must be said. */
static const struct {
    int model;
    const char *set, *text; /* set NULL: the last of the model's own is left out */
} said[] = {
    {5, "model.d_model=16", "--set model.d_model=16: model.d_model: 16 contradicts"},
    {5, "model.d_ff=256", "model.d_ff: 256 contradicts"},
    {5, "model.n_layers=3", "which says 2"},
    {5, "model.patch_len=16", "model.patch_len: 16 contradicts"},
    {5, "model.pred_len=96", "which says 5"},
    {5, "model.n_heads=4", "model.n_heads: 4 contradicts"},
    {5, "model.norm=layer", "which says batch"},
    {5, "model.head=individual", "which says shared"},
    {5, "model.revin_affine=true", "which says false"},
    {5, "model.padding=none", "its model has 6 patches, and model.seq_len 26, patch_len 8, stride 4 and padding none make 5"},
    {6, "model.head=shared", "which says individual"},
    {6, "model.n_heads=3", "model.n_heads"},
    {0, "model.stride=8", "model.stride: 8 contradicts"},
    {0, "model.residual_attention=true", "which says false"},
    {0, "model.norm_place=post", "which says pre"},
    {0, "model.patches_from=start", "which says end"},
    {4, "model.positions=sincos", "which says learned"},
};

START_TEST(contradictions)
{
    const struct model *m = &models[said[_i].model];
    struct path out = path_of("%.400s/none.h5", folder.text);
    ck_assert_int_eq(import_with(fixture(m->name).text, m->sets, said[_i].set, out.text), PS_USAGE);
    says(said[_i].text);
    ck_assert(!file_exists(out.text));
}
END_TEST

START_TEST(not_told)
{
    struct path out = path_of("%.400s/none.h5", folder.text);
    const char *const no_length[] = {"model.stride=4", NULL}, *const no_heads[] = {"model.seq_len=26", "model.stride=4", NULL};
    ck_assert_int_eq(import_with(fixture("official_plain.safetensors").text, no_length, NULL, out.text), PS_USAGE);
    says("model.seq_len: missing");
    ck_assert_int_eq(import_with(fixture("official_individual.safetensors").text, no_heads, NULL, out.text), PS_USAGE);
    says("model.n_heads: missing");
    struct ps_weights_import import = {.from = fixture("official_plain.safetensors").text,
                                       .out = out.text,
                                       .overrides = (char *[]){(char *)"model.seq_len=26", (char *)"model.stride=4"},
                                       .n_overrides = 2};
    struct ps_weights_done done;
    ck_assert_int_eq(ps_weights_import(&import, &done), PS_USAGE);
    says("--channels: missing");
    import.from = "/no/such/file";
    ck_assert_int_eq(ps_weights_import(&import, &done), PS_CHECKPOINT);
    says("/no/such/file: No such file");
    import.from = folder.text;
    ck_assert_int_eq(ps_weights_import(&import, &done), PS_CHECKPOINT);
    says("config.json: cannot be opened: No such file");
}
END_TEST

/* The authors drop out attention's output twice. */
START_TEST(dropout_rates)
{
    static const struct {
        const char *set;
        double attention;
    } cases[] = {{"model.dropout=0.3", 0.51}, {"model.dropout_attention=0.25", 0.25}};
    for (int i = 0; i < 2; i++) {
        struct path out = path_of("%.400s/dropout%d.h5", folder.text, i);
        struct ps_checkpoint c;
        struct ps_config saved;
        OK(import_with(fixture(models[5].name).text, models[5].sets, cases[i].set, out.text));
        OK(ps_checkpoint_load(out.text, &c));
        OK(ps_config_parse_saved(c.config, "config", &saved));
        struct ps_model_shape shape = ps_config_shape(&saved, 1);
        ck_assert_double_eq_tol(ps_dropout_rate(&shape, PS_DROP_ATTENTION), cases[i].attention, 1e-15);
        ck_assert_double_eq(ps_dropout_rate(&shape, PS_DROP_OUTPUT), i == 0 ? 0.3 : 0.2);
        ps_config_free(&saved);
        ps_checkpoint_free(&c);
    }
}
END_TEST

/* What transformers' class cannot be. */
static const struct {
    const char *set, *text;
} no_export[] = {{"model.padding=end", "model.padding: end"},
                 {"model.residual_attention=true", "model.residual_attention: true"},
                 {"model.activation=swiglu", "model.activation: swiglu"},
                 {"model.norm=rms", "model.norm: rms"},
                 {"model.positions=rope", "model.positions: rope"},
                 {"model.positions=none", "model.positions: none"},
                 {"model.revin_affine=true", "model.revin_affine: true"},
                 {"model.revin_subtract_last=true", "model.revin_subtract_last: true"},
                 {"model.head=individual", "model.head: individual"},
                 {"model.seq_len=99", "model.patches_from: start"},
                 {"model.patch_len=96", "model.patch_len: "}};

START_TEST(refused_export)
{
    char *overrides[] = {(char *)"model.padding=none", (char *)"model.seq_len=96", (char *)no_export[_i].set}, *text;
    struct ps_config c;
    OK(ps_config_parse("data: {path: x.h5}\n", "config", overrides, 3, &c));
    ck_assert_int_eq(ps_weights_hf_config(&c, 2, &text), PS_USAGE);
    says(no_export[_i].text);
    ck_assert_ptr_null(text);
    ps_config_free(&c);
}
END_TEST

/* ---- data and training ---- */

enum { ROWS = 240 };
static struct path series_file;

static void write_series(void)
{
    static float values[ROWS * CHANNELS];
    for (int i = 0; i < ROWS * CHANNELS; i++) {
        values[i] = (float)(i % CHANNELS ? 3 : 1) * sinf(0.37f * (float)(i / CHANNELS)) + (float)(i % CHANNELS) * 5 +
                    0.01f * (float)(i % 17);
    }
    OK(ps_series_write(series_file.text, values, ROWS, CHANNELS, (char *[]){(char *)"left", (char *)"right"}, NULL, NULL, NULL));
}

/* A config for a fixture's sizes. */
static void write_config(const char *model)
{
    char text[1024];
    snprintf(text, sizeof text,
             "data: {path: %.500s, split: [140, 50, 50]}\n"
             "model: {seq_len: 28, pred_len: 5, patch_len: 8, stride: 4, padding: none, d_model: 8, n_heads: 2, d_ff: 12, "
             "n_layers: 2%s}\n"
             "train: {epochs: 1, batch_size: 16, seed: 3}\noptim: {lr: 1e-3}\n",
             series_file.text, model);
    file_write(config.text, text, strlen(text));
}

/* The scaler, names and fingerprint are those that train would record. */
START_TEST(fitted_scaler)
{
    struct path out = path_of("%.400s/scaled.h5", folder.text);
    struct ps_weights_done done;
    struct ps_weights_import import = {.from = fixture("hf_gelu_tanh").text, .out = out.text, .config = config.text};
    struct ps_config c;
    struct ps_session *s;
    struct ps_checkpoint imported;
    OK(ps_weights_import(&import, &done));
    ck_assert(done.scaled);
    OK(ps_config_load(config.text, NULL, 0, &c));
    OK(ps_session_open(&c, &(struct ps_session_options){.device = device}, &s));
    OK(ps_checkpoint_load(out.text, &imported));
    ck_assert_mem_eq(imported.scaler.mean, s->scaler.mean, CHANNELS * sizeof(double));
    ck_assert_mem_eq(imported.scaler.std, s->scaler.std, CHANNELS * sizeof(double));
    ck_assert_uint_eq(imported.fingerprint, s->series->fingerprint);
    ck_assert_uint_eq(imported.names_bytes, 11);
    ck_assert_mem_eq(imported.names, "left\0right", 11);
    ps_checkpoint_free(&imported);
    ps_session_close(s);
    ps_config_free(&c);
    /* --data in the place of data.path, seen from where the program runs. */
    struct path other = path_of("%.400s/other.h5", folder.text);
    import = (struct ps_weights_import){.from = import.from, .out = other.text, .data = series_file.text};
    OK(ps_weights_import(&import, &done));
    OK(ps_checkpoint_load(other.text, &imported));
    ck_assert_ptr_nonnull(strstr(imported.config, series_file.text));
    ck_assert_double_ne(imported.scaler.std[1], 1);
    ps_checkpoint_free(&imported);
    import.data = "missing.h5";
    ck_assert_int_eq(ps_weights_import(&import, &done), PS_DATA);
    says("missing.h5: No such file");
    import.data = series_file.text;
    import.channels = 3;
    ck_assert_int_eq(ps_weights_import(&import, &done), PS_USAGE);
    says("--channels: 3 channels");
}
END_TEST

/* The session's tensors after it began with a checkpoint's. */
START_TEST(begins_with_weights)
{
    struct path out = path_of("%.400s/begin.h5", folder.text);
    OK(import_with(fixture("hf_gelu_tanh").text, (const char *const[]){NULL}, NULL, out.text));
    struct ps_checkpoint from;
    OK(ps_checkpoint_load(out.text, &from));
    for (int new_head = 0; new_head < 2; new_head++) {
        struct ps_config c;
        struct ps_session *s;
        char *overrides[] = {(char *)(new_head ? "model.pred_len=7" : "model.pred_len=5")};
        OK(ps_config_load(config.text, overrides, 1, &c));
        OK(ps_session_open(&c, &(struct ps_session_options){.device = device, .training = 1}, &s));
        if (new_head) {
            ck_assert_int_eq(ps_session_initialise_from(s, &from, 0), PS_CHECKPOINT);
            says("w_h is [48, 5] there and [48, 7] here; b_h is [5] there and [7] here; --new-head starts the head anew");
        }
        OK(ps_session_initialise(s));
        size_t bytes = (size_t)s->model->layout->stored * sizeof(float);
        float *first = malloc(bytes), *now = malloc(bytes);
        OK(s->device->download(s->device, PS_COMPUTE, first, s->model->parameters, bytes));
        OK(ps_session_initialise_from(s, &from, new_head));
        OK(s->device->download(s->device, PS_COMPUTE, now, s->model->parameters, bytes));
        for (int t = 0; t < s->model->layout->all; t++) {
            const struct ps_parameter *p = &s->model->layout->table[t];
            int head = t == s->model->layout->w_h || t == s->model->layout->b_h;
            const float *expected = new_head && head ? first + p->offset : from.parameters + from.layout->table[t].offset;
            ck_assert_msg(memcmp(now + p->offset, expected, (size_t)ps_parameter_count(p) * sizeof *now) == 0, "%s", p->name);
        }
        free(first);
        free(now);
        ps_session_close(s);
        ps_config_free(&c);
    }
    ps_checkpoint_free(&from);
}
END_TEST

/* All that does not fit in one message. */
START_TEST(listed_differences)
{
    struct path out = path_of("%.400s/listed.h5", folder.text);
    static const struct {
        const char *set;
        const char *texts[3];
    } cases[] = {
        {"model.d_ff=16", {"layers.0.w_1 is [8, 12] there and [8, 16] here", "layers.1.b_1 is [12] there and [16] here", ""}},
        {"model.positions=none", {"w_pos is there alone", "", ""}},
        {"model.n_layers=3", {"layers.2.w_qkv is here alone", "layers.2.b_2 is here alone", ""}},
        {"model.n_layers=40", {"layers.2.w_qkv is here alone", "; and 4", " more"}}};
    OK(import_with(fixture("hf_gelu_tanh").text, (const char *const[]){NULL}, NULL, out.text));
    struct ps_checkpoint from;
    OK(ps_checkpoint_load(out.text, &from));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct ps_config c;
        struct ps_session *s;
        char *overrides[] = {(char *)cases[i].set};
        OK(ps_config_load(config.text, overrides, 1, &c));
        OK(ps_session_open(&c, &(struct ps_session_options){.device = device, .training = 1}, &s));
        ck_assert_int_eq(ps_session_initialise_from(s, &from, 1), PS_CHECKPOINT);
        for (int t = 0; t < 3; t++) {
            says(cases[i].texts[t]);
        }
        ck_assert_ptr_null(strstr(ps_error_message(), "--new-head"));
        ps_session_close(s);
        ps_config_free(&c);
    }
    ps_checkpoint_free(&from);
}
END_TEST

/* ---- the programs ---- */

START_TEST(programs_end_to_end)
{
    struct path first = path_of("%.400s/first.h5", folder.text), dir = new_dir("run"), out = new_dir("exported");
    char *hf = strdup(fixture("hf_gelu_tanh").text);
    expect_done(run("import_weights", ARGS(hf, first.text, "--config", config.text)));
    expect_refused(run("import_weights", ARGS(hf, first.text)), 2, ARGS("exists", "--overwrite"));
    expect_done(run("import_weights", ARGS(hf, first.text, "--overwrite", "--data", series_file.text, "--config", config.text)));
    /* One epoch that changes nothing: the scores are the imported weights'. */
    struct result scores = run("evaluate", ARGS(first.text, "--json", "--device", (char *)device));
    ck_assert_int_eq(scores.code, 0);
    expect_done(train(dir.text, ARGS("--init-from", first.text, "--set", "optim.lr=1e-30", "--set",
                                     "model.dropout_attention_weights=0.1"))); /* or attention would be by tiles */
    json_t *before = read_json(scores.out), *after = read_test(dir.text);
    ck_assert_double_eq(json_number_value(json_object_get(before, "mse")), json_number_value(json_object_get(after, "mse")));
    json_decref(before);
    json_decref(after);
    result_free(&scores);
    struct path best = in_run(dir.text, "checkpoints/best.h5");
    expect_done(run("export_weights", ARGS(best.text, out.text)));
    expect_refused(run("export_weights", ARGS(best.text, out.text)), 2, ARGS("config.json exists"));
    expect_done(run("export_weights", ARGS(best.text, out.text, "--overwrite")));
    expect_refused(run("export_weights", ARGS("missing.h5", out.text, "--overwrite")), 4, ARGS("missing.h5", "No such file"));
    /* Other sizes; another reading of the same sizes is told. */
    dir = new_dir("other");
    expect_refused(train(dir.text, ARGS("--init-from", first.text, "--set", "model.pred_len=9")), 4,
                   ARGS(first.text, "w_h is", "b_h is", "--new-head"));
    expect_done(train(dir.text, ARGS("--init-from", first.text, "--set", "model.pred_len=9", "--new-head")));
    expect_refused(train(dir.text, ARGS("--resume", "--init-from", first.text)), 2, ARGS("exclude each other"));
    expect_refused(train(dir.text, ARGS("--overwrite", "--new-head")), 2, ARGS("--init-from"));
    struct result r = train(dir.text, ARGS("--overwrite", "--init-from", first.text, "--set", "model.n_heads=4"));
    ck_assert_int_eq(r.code, 0);
    ck_assert_msg(strstr(r.err, "warning") && strstr(r.err, "n_heads 2 and 4") && lines_of(r.err) == 1, "%s", r.err);
    result_free(&r);
    /* Without data there is nothing to evaluate on but what is given. */
    expect_done(run("import_weights", ARGS(hf, first.text, "--overwrite")));
    expect_refused(run("evaluate", ARGS(first.text, "--device", (char *)device)), 2, ARGS("data.path: missing"));
    expect_done(run("evaluate", ARGS(first.text, "--device", (char *)device, "--data", series_file.text)));
    free(hf);
}
END_TEST

static void set_up(void)
{
    folder = folder_make();
    config = path_of("%.400s/config.yaml", folder.text);
    series_file = path_of("%.400s/series.h5", folder.text);
    write_series();
    write_config("");
}

static void tear_down(void)
{
    folder_remove(folder.text);
}

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

int main(void)
{
    source = getenv("PS_SOURCE");
    source = source ? source : ".";
    programs = getenv("PS_PROGRAMS");
    device = "cpu";
    if (!programs || ps_safetensors_read(fixture("forecasts.safetensors").text, &forecasts) != PS_OK) {
        fprintf(stderr, "set PS_PROGRAMS to the folder that holds the programs, and PS_SOURCE to the project's root: %s\n",
                ps_error_message());
        return 1;
    }
    Suite *suite = suite_create("weights");
    TCase *tests = tcase_create("weights");
    tcase_set_timeout(tests, 200);
    tcase_add_unchecked_fixture(tests, set_up, tear_down);
    tcase_add_loop_test(tests, broken_headers, 0, COUNT(broken));
    tcase_add_test(tests, broken_lengths);
    tcase_add_test(tests, types);
    tcase_add_test(tests, not_finite);
    tcase_add_loop_test(tests, forecast, 0, MODELS);
    tcase_add_loop_test(tests, round_trip, 0, MODELS);
    tcase_add_loop_test(tests, refused_config, 0, COUNT(refused_keys));
    tcase_add_test(tests, left_out_keys);
    tcase_add_test(tests, several_files);
    tcase_add_loop_test(tests, refused_index, 0, COUNT(indexes));
    tcase_add_test(tests, broken_index);
    tcase_add_loop_test(tests, refused_tensors, 0, COUNT(changes));
    tcase_add_loop_test(tests, contradictions, 0, COUNT(said));
    tcase_add_test(tests, not_told);
    tcase_add_test(tests, dropout_rates);
    tcase_add_loop_test(tests, refused_export, 0, COUNT(no_export));
    tcase_add_test(tests, fitted_scaler);
    tcase_add_test(tests, begins_with_weights);
    tcase_add_test(tests, listed_differences);
    tcase_add_test(tests, programs_end_to_end);
    suite_add_tcase(suite, tests);
    int failed = run_suite(suite, CK_FORK_GETENV);
    ps_safetensors_free(&forecasts);
    return failed != 0;
}
