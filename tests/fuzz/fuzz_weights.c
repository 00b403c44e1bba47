/* What import_weights reads. Input: a config.json, or an index of several files, when it begins with "{"; else a safetensors file,
 * whose tensors are read, and converted where they are those of a model of the authors'. */
#include "src/weights.h"
#include "tests/fuzz/fuzz.h"

static void read_config(const uint8_t *data, size_t size)
{
    struct ps_known known;
    struct ps_config config;
    int64_t channels;
    const char *path = put_file(data, size);
    enum ps_status status = ps_weights_hf_known(path, &known, &channels);
    must_explain(status, PS_CHECKPOINT);
    if (status == PS_OK) {
        MUST(channels > 0);
        status = ps_config_load_known(&known, NULL, NULL, 0, &config);
        must_explain(status, PS_USAGE);
    }
    if (status == PS_OK) {
        char *text = NULL;
        status = ps_weights_hf_config(&config, channels, &text);
        must_explain(status, PS_USAGE);
        free(text);
        ps_config_free(&config);
    }
    struct ps_safetensors file;
    status = ps_safetensors_read_index(path, &file);
    must_explain(status, PS_CHECKPOINT);
    if (status == PS_OK) {
        ps_safetensors_free(&file);
    }
}

static void convert(const struct ps_safetensors *file, const struct ps_known *known, int64_t channels)
{
    char *overrides[] = {(char *)"model.seq_len=4", (char *)"model.stride=2", (char *)"model.n_heads=1"};
    struct ps_config config;
    struct ps_parameters *layout;
    float *values;
    /* A second time without the heads, which the file may tell. */
    if (ps_config_load_known(known, NULL, overrides, 3, &config) != PS_OK) {
        enum ps_status status = ps_config_load_known(known, NULL, overrides, 2, &config);
        must_explain(status, PS_USAGE);
        if (status != PS_OK) {
            return;
        }
    }
    struct ps_model_shape shape = ps_config_shape(&config, channels > 0 ? channels : 1);
    enum ps_status status = ps_parameters_layout(&shape, &layout);
    must_explain(status, PS_USAGE);
    if (status == PS_OK) {
        status = ps_weights_convert(PS_WEIGHTS_AUTHORS, &shape, layout, file, &values);
        must_explain(status, PS_CHECKPOINT);
        free(values);
        ps_parameters_free(layout);
    }
    ps_config_free(&config);
}

static void read_tensors(const uint8_t *data, size_t size)
{
    char *bytes = malloc(size + 1);
    memcpy(bytes, data, size);
    struct ps_safetensors file;
    enum ps_status status = ps_safetensors_parse("fuzz.safetensors", bytes, size, &file);
    must_explain(status, PS_CHECKPOINT);
    if (status != PS_OK) {
        return;
    }
    for (int i = 0; i < file.n; i++) {
        MUST(ps_safetensors_find(&file, file.tensor[i].name) == &file.tensor[i]);
        MUST(file.tensor[i].count <= (int64_t)size);
        float *values = malloc((size_t)file.tensor[i].count * sizeof *values + 1);
        must_explain(ps_safetensors_values(&file, &file.tensor[i], values), PS_CHECKPOINT);
        free(values);
    }
    struct ps_known known;
    int64_t channels;
    status = ps_weights_authors_known(&file, &known, &channels);
    must_explain(status, PS_CHECKPOINT);
    if (status == PS_OK) {
        convert(&file, &known, channels);
    }
    ps_safetensors_free(&file);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size > 0 && data[0] == '{') {
        read_config(data, size);
    } else {
        read_tensors(data, size);
    }
    return 0;
}
