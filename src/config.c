/* The way in: presets, the file, overrides, then the checks. */
#include "src/config.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "data/files.h"
#include "src/config_keys.h"

enum { LONGEST = 1 << 16 }; /* bytes of a config */

/* "section.key=value" as a document of one key. */
static enum ps_status read_override(struct ps_config_reader *reader, const char *override)
{
    char origin[PS_WHERE];
    snprintf(origin, sizeof origin, "--set %.200s", override);
    const char *dot = strchr(override, '.'), *equals = strchr(override, '=');
    if (!dot || !equals || dot > equals || dot == override || equals == dot + 1) {
        return ps_config_fail(origin, "not of the form section.key=value, such as model.d_model=64");
    }
    char *text = NULL, *section = strndup(override, (size_t)(dot - override)), *name = strndup(dot + 1, (size_t)(equals - dot - 1));
    int key = section && name ? ps_key_index(section, name) : -1, list = key >= 0 && ps_keys[key].type == PS_KEY_SPLIT;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    if (out && section && name) {
        ps_config_print_text(out, section);
        fputs(":\n  ", out);
        ps_config_print_text(out, name);
        fputs(": ", out);
        if (list) {
            fputs(equals + 1, out);
        } else {
            ps_config_print_text(out, equals + 1);
        }
        fputc('\n', out);
    }
    enum ps_status status = PS_OK;
    if (!out || fclose(out) != 0 || !section || !name) {
        status = ps_config_fail(origin, "no memory");
    } else if (list && strpbrk(equals, "\r\n")) {
        status = ps_config_fail(origin, "a list stands on one line");
    } else {
        status = ps_config_read(reader, text, origin);
    }
    free(section);
    free(name);
    free(text);
    return status;
}

enum ps_status ps_config_parse(const char *text, const char *origin, char *const *overrides, int n_overrides,
                               struct ps_config *config)
{
    memset(config, 0, sizeof *config);
    struct ps_config_reader *reader = calloc(1, sizeof *reader);
    if (!reader) {
        return ps_config_fail(origin, "no memory");
    }
    reader->config = config;
    enum ps_status status = PS_OK;
    for (int i = 0; i < PS_KEYS && status == PS_OK; i++) {
        status = ps_config_put(reader, &ps_keys[i], ps_keys[i].preset, origin);
    }
    if (status == PS_OK) {
        status = ps_config_read(reader, text, origin);
    }
    for (int i = 0; i < n_overrides && status == PS_OK; i++) {
        status = read_override(reader, overrides[i]);
    }
    if (status == PS_OK) {
        status = ps_config_check(reader, origin);
    }
    free(reader);
    if (status != PS_OK) {
        ps_config_free(config);
    }
    return status;
}

/* A relative *path, key's value, becomes absolute, seen from the config file's folder. */
static enum ps_status resolve(const char *config_path, const char *key, char **path)
{
    if (**path == '/' || !**path) {
        return PS_OK;
    }
    const char *slash = strrchr(config_path, '/');
    char *folder = slash ? strndup(config_path, (size_t)(slash - config_path) + 1) : strdup(".");
    char *real = folder ? realpath(folder, NULL) : NULL, *joined = NULL;
    free(folder);
    if (!real) {
        return ps_config_fail(config_path, "%s: the config's folder cannot be resolved: %s", key, strerror(errno));
    }
    const char *rest = *path;
    while (strncmp(rest, "./", 2) == 0 || strncmp(rest, "../", 3) == 0) {
        if (rest[1] == '.') {
            *strrchr(real, '/') = 0; /* real has no links, so its parent is one name less */
            if (!*real) {
                strcpy(real, "/");
            }
        }
        rest += rest[1] == '.' ? 3 : 2;
    }
    if (asprintf(&joined, "%s%s%s", real, strcmp(real, "/") == 0 ? "" : "/", rest) < 0) {
        joined = NULL;
    }
    free(real);
    if (!joined) {
        return ps_config_fail(config_path, "%s: no memory", key);
    }
    free(*path);
    *path = joined;
    return PS_OK;
}

enum ps_status ps_config_load(const char *path, char *const *overrides, int n_overrides, struct ps_config *config)
{
    memset(config, 0, sizeof *config);
    char *text = NULL;
    size_t size;
    PS_TRY(ps_file_read(PS_USAGE, path, LONGEST, &text, &size));
    enum ps_status status = strlen(text) < size ? ps_config_fail(path, "not YAML: holds a zero byte")
                                                : ps_config_parse(text, path, overrides, n_overrides, config);
    free(text);
    if (status == PS_OK) {
        status = resolve(path, "data.path", &config->data.path);
    }
    if (status == PS_OK) {
        status = resolve(path, "runtime.tuning", &config->runtime.tuning);
    }
    /* The text of the resolved config is kept with the run, so it must read back: a folder's name may hold what YAML cannot. */
    if (status == PS_OK && (status = ps_config_text(config, &text)) == PS_OK) {
        if (ps_config_parses(text, path) != PS_OK) {
            status =
                ps_config_fail(path, "data.path: \"%.200s\" cannot be written as UTF-8 text; rename the folder", config->data.path);
        }
        free(text);
    }
    if (status != PS_OK) {
        ps_config_free(config);
    }
    return status;
}

void ps_config_free(struct ps_config *config)
{
    for (int i = 0; i < PS_KEYS; i++) {
        if (ps_keys[i].type == PS_KEY_TEXT) {
            char **text = (char **)((char *)config + ps_keys[i].offset);
            free(*text);
            *text = NULL;
        }
    }
}

struct ps_model_shape ps_config_shape(const struct ps_config *c, int64_t channels)
{
    struct ps_model_shape shape = {.channels = channels,
                                   .seq_len = c->model.seq_len,
                                   .pred_len = c->model.pred_len,
                                   .patch_len = c->model.patch_len,
                                   .stride = c->model.stride,
                                   .pad_end = c->model.padding == PS_PADDING_END,
                                   .d_model = c->model.d_model,
                                   .n_heads = c->model.n_heads,
                                   .d_ff = c->model.d_ff,
                                   .n_layers = c->model.n_layers,
                                   .dropout = c->model.dropout,
                                   .revin = c->model.revin,
                                   .norm = c->model.norm,
                                   .norm_place = c->model.norm_place,
                                   .activation = c->model.activation,
                                   .positions = c->model.positions,
                                   .residual_attention = c->model.residual_attention,
                                   .individual_head = c->model.head == PS_HEAD_INDIVIDUAL,
                                   .revin_affine = c->model.revin_affine,
                                   .revin_subtract_last = c->model.revin_subtract_last,
                                   .patches_from_end = c->model.patches_from == PS_PATCHES_FROM_END};
    for (int i = 0; i < PS_DROP_PLACES; i++) {
        shape.dropout_at[i].set = c->model.dropout_at[i] >= 0;
        shape.dropout_at[i].rate = c->model.dropout_at[i];
    }
    return shape;
}
