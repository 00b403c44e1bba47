/* The way in: presets, the file, overrides, then the checks. */
#include "src/config.h"

#include <errno.h>
#include <stdarg.h>
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
    int key = section && name ? ps_key_index(section, name) : -1, list = key >= 0 && ps_key_is_list(&ps_keys[key]);
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

/* Puts what is known of the model in the presets' place; then[i]: the text of known value i as it would be written. */
static enum ps_status put_known(struct ps_config_reader *reader, const struct ps_known *known, char **then)
{
    for (int i = 0; i < known->n; i++) {
        int key = ps_key_index("model", known->value[i].name);
        const char *text = known->value[i].text;
        if (!*text) {
            continue;
        }
        PS_TRY(ps_config_put(reader, &ps_keys[key], &text, 1, known->origin));
        snprintf(reader->where[key], sizeof *reader->where, "%.300s", known->origin);
        then[i] = ps_config_value_text(reader->config, &ps_keys[key]);
        if (!then[i]) {
            return ps_config_fail(known->origin, "model.%s: no memory", known->value[i].name);
        }
    }
    return PS_OK;
}

/* Fixed values are what they were, and what is not known was said. */
static enum ps_status check_known(const struct ps_config_reader *reader, const struct ps_known *known, char *const *then)
{
    for (int i = 0; i < known->n; i++) {
        int key = ps_key_index("model", known->value[i].name);
        if (!*known->value[i].text && !*reader->where[key]) {
            return ps_config_fail(known->origin, "model.%s: missing, and the weights do not tell it: give --set model.%s=..",
                                  known->value[i].name, known->value[i].name);
        }
        char *now = known->value[i].fixed && then[i] ? ps_config_value_text(reader->config, &ps_keys[key]) : NULL;
        int differs = now && strcmp(now, then[i]) != 0;
        if (differs) {
            ps_config_fail(reader->where[key], "model.%s: %.60s contradicts %.200s, which says %s", known->value[i].name, now,
                           known->origin, then[i]);
        }
        free(now);
        if (differs) {
            return PS_USAGE;
        }
    }
    return PS_OK;
}

/* What a config is made of, one after the other. */
struct sources {
    const struct ps_known *known; /* NULL: nothing is */
    const char *text;             /* YAML; NULL: none */
    char *const *overrides;
    int n_overrides, without_data;
};

static int preset_length(const struct ps_key *key)
{
    int n = 0;
    while (n < 3 && key->preset[n]) {
        n++;
    }
    return n;
}

static enum ps_status fill(struct ps_config_reader *reader, const struct sources *from, const char *origin, char **then)
{
    for (int i = 0; i < PS_KEYS; i++) {
        PS_TRY(ps_config_put(reader, &ps_keys[i], ps_keys[i].preset, preset_length(&ps_keys[i]), origin));
    }
    if (from->known) {
        PS_TRY(put_known(reader, from->known, then));
    }
    if (from->text) {
        PS_TRY(ps_config_read(reader, from->text, origin));
    }
    for (int i = 0; i < from->n_overrides; i++) {
        PS_TRY(read_override(reader, from->overrides[i]));
    }
    if (from->known) {
        PS_TRY(check_known(reader, from->known, then));
    }
    struct ps_config *c = reader->config;
    if (c->train.loss == PS_LOSS_QUANTILE && c->train.quantiles.n == 0) {
        c->train.quantiles = (struct ps_reals){3, {0.1, 0.5, 0.9}};
    }
    return ps_config_check(reader, origin);
}

static enum ps_status parse(const struct sources *from, const char *origin, struct ps_config *config)
{
    memset(config, 0, sizeof *config);
    char *then[PS_KNOWN] = {NULL};
    struct ps_config_reader *reader = calloc(1, sizeof *reader);
    if (!reader) {
        return ps_config_fail(origin, "no memory");
    }
    reader->config = config;
    reader->without_data = from->without_data;
    enum ps_status status = fill(reader, from, origin, then);
    for (int i = 0; i < PS_KNOWN; i++) {
        free(then[i]);
    }
    free(reader);
    if (status != PS_OK) {
        ps_config_free(config);
    }
    return status;
}

enum ps_status ps_config_parse(const char *text, const char *origin, char *const *overrides, int n_overrides,
                               struct ps_config *config)
{
    return parse(&(struct sources){.text = text, .overrides = overrides, .n_overrides = n_overrides}, origin, config);
}

enum ps_status ps_config_parse_saved(const char *text, const char *origin, struct ps_config *config)
{
    return parse(&(struct sources){.text = text, .without_data = 1}, origin, config);
}

void ps_known_add(struct ps_known *known, const char *name, int fixed, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(known->value[known->n].text, sizeof known->value->text, format, arguments);
    va_end(arguments);
    known->value[known->n].name = name;
    known->value[known->n++].fixed = fixed;
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

static enum ps_status read_text(const char *path, char **text)
{
    size_t size;
    PS_TRY(ps_file_read(PS_USAGE, path, LONGEST, text, &size));
    return strlen(*text) < size ? ps_config_fail(path, "not YAML: holds a zero byte") : PS_OK;
}

enum ps_status ps_config_load_known(const struct ps_known *known, const char *path, char *const *overrides, int n_overrides,
                                    struct ps_config *config)
{
    memset(config, 0, sizeof *config);
    char *text = NULL;
    const char *origin = path ? path : "--set"; /* seen from where the program runs */
    enum ps_status status = path ? read_text(path, &text) : PS_OK;
    if (status == PS_OK) {
        status = parse(&(struct sources){known, text, overrides, n_overrides, known != NULL}, origin, config);
    }
    free(text);
    if (status == PS_OK) {
        status = resolve(origin, "data.path", &config->data.path);
    }
    if (status == PS_OK) {
        status = resolve(origin, "runtime.tuning", &config->runtime.tuning);
    }
    /* The text of the resolved config is kept with the run, so it must read back: a folder's name may hold what YAML cannot. */
    if (status == PS_OK && (status = ps_config_text(config, &text)) == PS_OK) {
        if (ps_config_parses(text, origin) != PS_OK) {
            status = ps_config_fail(origin, "data.path: \"%.200s\" cannot be written as UTF-8 text; rename the folder",
                                    config->data.path);
        }
        free(text);
    }
    if (status != PS_OK) {
        ps_config_free(config);
    }
    return status;
}

enum ps_status ps_config_load(const char *path, char *const *overrides, int n_overrides, struct ps_config *config)
{
    return ps_config_load_known(NULL, path, overrides, n_overrides, config);
}

void ps_config_free(struct ps_config *config)
{
    for (int i = 0; i < PS_KEYS; i++) {
        if (ps_keys[i].type == PS_KEY_TEXT || ps_keys[i].type == PS_KEY_LIST) {
            char **text = (char **)((char *)config + ps_keys[i].offset);
            free(*text);
            *text = NULL;
        }
    }
}

struct ps_reading ps_config_reading(const struct ps_config *c, int64_t batch)
{
    struct ps_reading reading = {
        .memory = {.limit = c->data.memory_limit, .seq_len = c->model.seq_len, .pred_len = c->model.pred_len, .batch = batch},
        .masked = c->data.missing == PS_MISSING_MASK,
        .channels = c->data.channels};
    for (const char *name = c->data.channels; *name; name += strlen(name) + 1) {
        reading.channel_count++;
    }
    return reading;
}

struct ps_model_shape ps_config_shape(const struct ps_config *c, int64_t channels)
{
    struct ps_model_shape shape = {.channels = channels,
                                   .seq_len = c->model.seq_len,
                                   .pred_len = c->model.pred_len,
                                   .quantiles = c->train.quantiles.n,
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
                                   .patches_from_end = c->model.patches_from == PS_PATCHES_FROM_END,
                                   .mask_ratio = c->train.objective == PS_OBJECTIVE_MASKED ? c->model.mask_ratio : 0};
    for (int i = 0; i < PS_DROP_PLACES; i++) {
        shape.dropout_at[i].set = c->model.dropout_at[i] >= 0;
        shape.dropout_at[i].rate = c->model.dropout_at[i];
    }
    return shape;
}

struct ps_loss ps_config_loss(const struct ps_config *c)
{
    struct ps_loss loss = {.kind = c->train.loss, .quantiles = (int)c->train.quantiles.n};
    loss.delta = loss.kind == PS_LOSS_HUBER ? c->train.huber_delta : 0;
    memcpy(loss.quantile, c->train.quantiles.value, (size_t)c->train.quantiles.n * sizeof *loss.quantile);
    return loss;
}
