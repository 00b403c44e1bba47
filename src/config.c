/* Three steps. libyaml walks the text once for syntax and for the line of every key. libcyaml loads it against the schema, which is
 * made from the table of keys below: which sections and keys there are, each once, and their nesting. Scalars stay text until here
 * and are converted strictly, because libcyaml 1.3 reads 1.5 as the whole number 1 and any word as true. */
#include "src/config.h"

#include <cyaml/cyaml.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <yaml.h>

#include "data/files.h"

enum type { TEXT, WHOLE, SEED, BYTES, REAL, SWITCH, CHOICE, SPLIT };
enum range { ANY, SIZE, LAYERS, COUNT, LIMIT, FRACTION, INSIDE, POSITIVE, NOT_NEGATIVE };

static const char *const switches[] = {"false", "true", "off", "on", "no", "yes", NULL};
static const char *const paddings[] = {"none", "end", NULL};
static const char *const placements[] = {"auto", "device", "host", NULL};
static const char *const fusions[] = {"auto", "none", "gemm", "layer", NULL};
static const char *const attentions[] = {"auto", "gemm", "tiled", NULL};
static const char *const on_nonfinites[] = {"stop", "skip", NULL};
static const char *const schedules[] = {"constant", "cosine", "onecycle", "type3", NULL};
static const char *const precisions[] = {"fp64", "fp32", "tf32", "bf16", "fp16", NULL}; /* as enum ps_precision */
static const char *const backends[] = {"auto", "reference", "cpu", "cuda", NULL};

struct key {
    const char *section, *name;
    enum type type;
    size_t offset; /* in struct ps_config */
    const char *preset[3];
    enum range range;
    const char *const *choices; /* the word for 0, 1, ...; NULL-terminated */
    int free_on_resume;         /* cannot change the result */
};

#define KEY(in, key, kind, ...)                                                                                         \
    {                                                                                                                   \
        .section = #in, .name = #key, .type = kind, .offset = offsetof(struct ps_config, in.key), .preset = __VA_ARGS__ \
    }

/* In the order of struct ps_config, which is the order of the resolved text. */
static const struct key keys[] = {
    KEY(data, path, TEXT, {""}, .free_on_resume = 1),
    KEY(data, split, SPLIT, {"0.7", "0.1", "0.2"}, .range = NOT_NEGATIVE),
    KEY(data, standardize, SWITCH, {"true"}),
    KEY(data, drop_last, SWITCH, {"true"}),
    KEY(data, placement, CHOICE, {"auto"}, .choices = placements, .free_on_resume = 1),
    KEY(data, memory_limit, BYTES, {"0"}),
    KEY(data, season, WHOLE, {"24"}, .range = LIMIT, .free_on_resume = 1),
    KEY(model, seq_len, WHOLE, {"336"}, .range = SIZE),
    KEY(model, pred_len, WHOLE, {"96"}, .range = SIZE),
    KEY(model, patch_len, WHOLE, {"16"}, .range = SIZE),
    KEY(model, stride, WHOLE, {"8"}, .range = SIZE),
    KEY(model, padding, CHOICE, {"end"}, .choices = paddings),
    KEY(model, d_model, WHOLE, {"128"}, .range = SIZE),
    KEY(model, n_heads, WHOLE, {"16"}, .range = SIZE),
    KEY(model, d_ff, WHOLE, {"256"}, .range = SIZE),
    KEY(model, n_layers, WHOLE, {"3"}, .range = LAYERS),
    KEY(model, dropout, REAL, {"0.2"}, .range = FRACTION),
    KEY(model, revin, SWITCH, {"true"}),
    KEY(optim, lr, REAL, {"1e-4"}, .range = POSITIVE),
    KEY(optim, weight_decay, REAL, {"1e-2"}, .range = NOT_NEGATIVE),
    KEY(optim, beta1, REAL, {"0.9"}, .range = FRACTION),
    KEY(optim, beta2, REAL, {"0.999"}, .range = FRACTION),
    KEY(optim, eps, REAL, {"1e-8"}, .range = POSITIVE),
    KEY(optim, clip_norm, REAL, {"0"}, .range = NOT_NEGATIVE),
    KEY(optim, schedule, CHOICE, {"cosine"}, .choices = schedules),
    KEY(optim, warmup_steps, WHOLE, {"0"}, .range = LIMIT),
    KEY(optim, min_lr, REAL, {"0"}, .range = NOT_NEGATIVE),
    KEY(optim, pct_start, REAL, {"0.3"}, .range = INSIDE),
    KEY(train, epochs, WHOLE, {"100"}, .range = COUNT),
    KEY(train, batch_size, WHOLE, {"128"}, .range = COUNT),
    KEY(train, seed, SEED, {"1"}, .range = ANY),
    KEY(train, patience, WHOLE, {"0"}, .range = LIMIT, .free_on_resume = 1),
    KEY(train, checkpoint_every, WHOLE, {"0"}, .range = LIMIT, .free_on_resume = 1),
    KEY(train, keep_last, WHOLE, {"2"}, .range = COUNT, .free_on_resume = 1),
    KEY(train, keep_best, WHOLE, {"1"}, .range = COUNT, .free_on_resume = 1),
    KEY(train, on_nonfinite, CHOICE, {"stop"}, .choices = on_nonfinites, .free_on_resume = 1),
    KEY(runtime, device, TEXT, {"auto"}),
    KEY(runtime, precision, CHOICE, {"fp32"}, .choices = precisions),
    KEY(runtime, backend, TEXT, {"auto"}, .choices = backends),
    KEY(runtime, fusion, CHOICE, {"auto"}, .choices = fusions),
    KEY(runtime, attention, CHOICE, {"auto"}, .choices = attentions),
    KEY(runtime, merge_qkv, SWITCH, {"true"}),
    KEY(runtime, epilogue, SWITCH, {"true"}),
    KEY(runtime, tiny_gemm, SWITCH, {"true"}),
    KEY(runtime, tuning, TEXT, {""}, .free_on_resume = 1), /* the algorithms that are recorded say which */
    KEY(runtime, threads, WHOLE, {"0"}, .range = LIMIT),
};
enum { KEYS = sizeof keys / sizeof *keys, NAME = 64, WHERE = 320, LONGEST = 1 << 16, DEEPEST = 16 };

static const char *const sections[] = {"data", "model", "optim", "train", "runtime"};
enum { SECTIONS = sizeof sections / sizeof *sections };

/* Presets, then the file, then each override are put into `config`; where[i] says where key i's value came from, as the beginning
 * of a message ("configs/x.yaml:12"), "" while it is the preset. */
struct reader {
    struct ps_config *config;
    char where[KEYS][WHERE];
};

/* ---- messages ---- */

/* PS_USAGE "where: ..." in one line, whatever the quoted values hold. */
static enum ps_status fail(const char *where, const char *format, ...) __attribute__((format(printf, 2, 3)));
static enum ps_status fail(const char *where, const char *format, ...)
{
    char text[900];
    int used = snprintf(text, sizeof text, "%.*s: ", WHERE, where);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + used, sizeof text - (size_t)used, format, arguments);
    va_end(arguments);
    for (char *c = text; *c; c++) {
        if ((unsigned char)*c < ' ') {
            *c = ' ';
        }
    }
    return ps_fail(PS_USAGE, "%s", text);
}

/* Levenshtein's distance of two names of fewer than NAME bytes. */
static int distance(const char *a, const char *b)
{
    int row[NAME + 1], n = (int)strnlen(b, NAME);
    for (int j = 0; j <= n; j++) {
        row[j] = j;
    }
    for (int i = 1; a[i - 1]; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            int best = diagonal + (a[i - 1] != b[j - 1]);
            best = row[j] + 1 < best ? row[j] + 1 : best;
            best = row[j - 1] + 1 < best ? row[j - 1] + 1 : best;
            diagonal = row[j];
            row[j] = best;
        }
    }
    return row[n];
}

/* Keeps in *best the name nearest to `word` so far; no name further than a third of the word (at least 2 edits) counts. */
static void nearest(const char *word, const char *name, int *least, const char **best)
{
    int length = (int)strlen(word), limit = length / 3 > 2 ? length / 3 : 2, d = distance(word, name);
    if (d <= limit && d < length && d < *least) {
        *least = d;
        *best = name;
    }
}

static void append_name(char *list, size_t size, const char *name)
{
    size_t used = strlen(list);
    snprintf(list + used, size - used, "%s%s", used ? ", " : "", name);
}

static enum ps_status unknown_section(const char *where, const char *section)
{
    for (int i = 0; i < KEYS; i++) {
        if (strcmp(section, keys[i].name) == 0) {
            return fail(where, "%s: belongs inside section %s", section, keys[i].section);
        }
    }
    const char *best = NULL;
    int least = NAME;
    char list[128] = "";
    for (int s = 0; s < SECTIONS; s++) {
        nearest(section, sections[s], &least, &best);
        append_name(list, sizeof list, sections[s]);
    }
    if (best) {
        return fail(where, "%s: unknown section; did you mean %s?", section, best);
    }
    return fail(where, "%s: unknown section; the sections are %s", section, list);
}

static enum ps_status unknown_key(const char *where, const char *section, const char *name)
{
    for (int i = 0; i < KEYS; i++) {
        if (strcmp(name, keys[i].name) == 0) {
            return fail(where, "%s.%s: unknown key; did you mean %s.%s?", section, name, keys[i].section, name);
        }
    }
    const char *best = NULL;
    int least = NAME;
    char list[256] = "";
    for (int i = 0; i < KEYS; i++) {
        if (strcmp(section, keys[i].section) == 0) {
            nearest(name, keys[i].name, &least, &best);
            append_name(list, sizeof list, keys[i].name);
        }
    }
    if (best) {
        return fail(where, "%s.%s: unknown key; did you mean %s?", section, name, best);
    }
    return fail(where, "%s.%s: unknown key; the keys of %s are %s", section, name, section, list);
}

static const char *form(const struct key *key)
{
    switch (key->type) {
    case WHOLE:
    case SEED:
        return "a whole number";
    case BYTES:
        return "a number of bytes, such as 512M";
    case REAL:
        return "a number";
    case SPLIT:
        return "a list of three numbers [train, validation, test], such as [0.7, 0.1, 0.2]";
    case SWITCH:
        return "true or false";
    case CHOICE:
        return "one word";
    default:
        return "a text";
    }
}

/* ---- text to values ---- */

/* What the value must be when it is outside the key's range, NULL when it is inside. */
static const char *outside(enum range range, double value)
{
    switch (range) {
    case SIZE:
        return value >= 1 && value <= 1 << 24 ? NULL : "must be from 1 to 16777216";
    case LAYERS:
        return value >= 1 && value <= 1024 ? NULL : "must be from 1 to 1024";
    case COUNT:
        return value >= 1 && value <= INT32_MAX ? NULL : "must be from 1 to 2147483647";
    case LIMIT:
        return value >= 0 && value <= INT32_MAX ? NULL : "must be from 0 to 2147483647";
    case FRACTION:
        return value >= 0 && value < 1 ? NULL : "must be at least 0 and less than 1";
    case INSIDE:
        return value > 0 && value < 1 ? NULL : "must be more than 0 and less than 1";
    case POSITIVE:
        return value > 0 ? NULL : "must be more than 0";
    case NOT_NEGATIVE:
        return value >= 0 ? NULL : "must be at least 0";
    default:
        return NULL;
    }
}

static enum ps_status put_real(const struct key *key, const char *text, const char *where, double *value)
{
    char *end;
    *value = strtod(text, &end);
    /* strtod also takes leading spaces, hexadecimal, inf and nan. */
    if (!*text || *end || strspn(text, "+-.0123456789eE") != strlen(text) || !isfinite(*value)) {
        return fail(where, "%s.%s: \"%.60s\" is not a number", key->section, key->name, text);
    }
    const char *must = outside(key->range, *value);
    return must ? fail(where, "%s.%s: %.60s %s", key->section, key->name, text, must) : PS_OK;
}

/* Digits, with a sign where `sign` allows one. */
static int is_whole(const char *text, int sign)
{
    text += sign && (*text == '-' || *text == '+');
    return *text && strspn(text, "0123456789") == strlen(text);
}

/* Bytes: a whole number, K, M, G or T after it for powers of 1024. */
static enum ps_status put_bytes(const struct key *key, const char *text, const char *where, int64_t *value)
{
    static const char units[] = "KMGT";
    size_t length = strlen(text), digits = strspn(text, "0123456789");
    const char *unit = digits + 1 == length ? strchr(units, text[digits]) : NULL;
    int shift = unit ? 10 * (int)(unit - units + 1) : 0;
    errno = 0;
    unsigned long long number = strtoull(text, NULL, 10);
    if (digits == 0 || (digits < length && !unit)) {
        return fail(where, "%s.%s: \"%.60s\" is not a number of bytes, such as 536870912 or 512M (K, M, G, T: powers of 1024)",
                    key->section, key->name, text);
    }
    if (errno || number > (unsigned long long)INT64_MAX >> shift) {
        return fail(where, "%s.%s: %.60s is more than there can be", key->section, key->name, text);
    }
    *value = (int64_t)(number << shift);
    return PS_OK;
}

/* *chosen: which of the key's words the text is. */
static enum ps_status choose(const struct key *key, const char *text, const char *where, int *chosen)
{
    const char *best = NULL;
    int least = NAME;
    char list[128] = "";
    for (int i = 0; key->choices[i]; i++) {
        if (strcmp(text, key->choices[i]) == 0) {
            *chosen = i;
            return PS_OK;
        }
        nearest(text, key->choices[i], &least, &best);
        append_name(list, sizeof list, key->choices[i]);
    }
    return fail(where, "%s.%s: \"%.60s\" is not one of %s%s%s%s", key->section, key->name, text, list,
                best ? "; did you mean " : "", best ? best : "", best ? "?" : "");
}

/* Puts a key's text (three for SPLIT) into the config. */
static enum ps_status put(struct reader *reader, const struct key *key, const char *const *text, const char *where)
{
    void *place = (char *)reader->config + key->offset;
    const char *must;
    switch (key->type) {
    case TEXT: {
        int chosen;
        if (key->choices) {
            PS_TRY(choose(key, *text, where, &chosen));
        }
        char *copy = strdup(*text);
        if (!copy) {
            return fail(where, "%s.%s: no memory", key->section, key->name);
        }
        free(*(char **)place);
        *(char **)place = copy;
        return PS_OK;
    }
    case WHOLE: {
        errno = 0;
        long long value = strtoll(*text, NULL, 10);
        if (!is_whole(*text, 1)) {
            return fail(where, "%s.%s: \"%.60s\" is not a whole number", key->section, key->name, *text);
        }
        must = outside(key->range, errno ? INFINITY : (double)value);
        if (must) {
            return fail(where, "%s.%s: %.60s %s", key->section, key->name, *text, must);
        }
        *(int64_t *)place = value;
        return PS_OK;
    }
    case SEED: {
        errno = 0;
        unsigned long long value = strtoull(*text, NULL, 10);
        if (!is_whole(*text, 0) || errno) {
            return fail(where, "%s.%s: \"%.60s\" is not a whole number from 0 to %" PRIu64, key->section, key->name, *text,
                        UINT64_MAX);
        }
        *(uint64_t *)place = value;
        return PS_OK;
    }
    case BYTES:
        return put_bytes(key, *text, where, place);
    case REAL:
        return put_real(key, *text, where, place);
    case SPLIT:
        for (int i = 0; i < 3; i++) {
            PS_TRY(put_real(key, text[i], where, (double *)place + i));
        }
        return PS_OK;
    case SWITCH:
        for (int i = 0; switches[i]; i++) {
            if (strcmp(*text, switches[i]) == 0) {
                *(int *)place = i % 2;
                return PS_OK;
            }
        }
        return fail(where, "%s.%s: \"%.60s\" is not true or false", key->section, key->name, *text);
    case CHOICE:
        return choose(key, *text, where, place);
    }
    return PS_OK;
}

/* ---- libyaml: syntax and lines ---- */

struct place {
    char section[NAME], key[NAME]; /* key "": the section itself */
    int line;
};

struct places {
    struct place *place;
    int n, room;
    int documents;
};

static int add_place(struct places *places, const char *section, const char *key, int line)
{
    if (places->n == places->room) {
        int room = 2 * places->room + 64;
        struct place *grown = realloc(places->place, (size_t)room * sizeof *grown);
        if (!grown) {
            return 0;
        }
        places->place = grown;
        places->room = room;
    }
    struct place *p = &places->place[places->n++];
    snprintf(p->section, sizeof p->section, "%s", section);
    snprintf(p->key, sizeof p->key, "%s", key);
    p->line = line;
    return 1;
}

/* Line of the which-th (0, 1) such key; 0 when there is none. */
static int find_place(const struct places *places, const char *section, const char *key, int which)
{
    for (int i = 0; i < places->n; i++) {
        const struct place *p = &places->place[i];
        if (strcmp(p->section, section) == 0 && strcmp(p->key, key) == 0 && which-- == 0) {
            return p->line;
        }
    }
    return 0;
}

/* "origin:line", or the origin alone for an override (one line anyway) and for line 0. */
static void make_where(char where[WHERE], const char *origin, int line)
{
    if (line && strncmp(origin, "--set ", 6) != 0) {
        snprintf(where, WHERE, "%.300s:%d", origin, line);
    } else {
        snprintf(where, WHERE, "%.310s", origin);
    }
}

static enum ps_status walk(const char *text, const char *origin, struct places *places)
{
    yaml_parser_t parser;
    if (!yaml_parser_initialize(&parser)) {
        return fail(origin, "no memory for the YAML parser");
    }
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, strlen(text));
    /* Depth 1 is the mapping of sections, 2 a section's mapping of keys. */
    struct {
        int mapping, at_key;
    } level[3] = {{0, 0}};
    char section[NAME] = "", where[WHERE];
    int depth = 0, done = 0;
    enum ps_status status = PS_OK;
    while (!done && status == PS_OK) {
        yaml_event_t event;
        if (!yaml_parser_parse(&parser, &event)) {
            make_where(where, origin, (int)(parser.problem_mark.line ? parser.problem_mark.line : parser.mark.line) + 1);
            status = fail(where, "not YAML: %s", parser.problem ? parser.problem : "cannot be parsed");
            break;
        }
        int line = (int)event.start_mark.line + 1, node = 0;
        switch (event.type) {
        case YAML_STREAM_END_EVENT:
            done = 1;
            break;
        case YAML_DOCUMENT_START_EVENT:
            if (++places->documents == 2) {
                make_where(where, origin, line);
                status = fail(where, "a second YAML document begins; a config is one document: remove the line ---");
            }
            break;
        case YAML_SCALAR_EVENT:
            if (depth >= 1 && depth <= 2 && level[depth].at_key) {
                const char *name = (const char *)event.data.scalar.value;
                if (depth == 1) {
                    snprintf(section, sizeof section, "%.*s", NAME - 1, name);
                }
                if (!add_place(places, section, depth == 1 ? "" : name, line)) {
                    status = fail(origin, "no memory for the list of keys");
                }
            }
            node = 1;
            break;
        case YAML_ALIAS_EVENT:
            node = 1;
            break;
        case YAML_MAPPING_START_EVENT:
        case YAML_SEQUENCE_START_EVENT:
            if (++depth <= 2) {
                level[depth].mapping = level[depth].at_key = event.type == YAML_MAPPING_START_EVENT;
            } else if (depth > DEEPEST) { /* libyaml's time grows with the square of the depth */
                make_where(where, origin, line);
                status = fail(where, "nested more than %d deep; a config has sections, keys and values", DEEPEST);
            }
            break;
        case YAML_MAPPING_END_EVENT:
        case YAML_SEQUENCE_END_EVENT:
            depth--;
            node = 1;
            break;
        default:
            break;
        }
        if (node && depth >= 1 && depth <= 2 && level[depth].mapping) {
            level[depth].at_key = !level[depth].at_key;
        }
        yaml_event_delete(&event);
    }
    yaml_parser_delete(&parser);
    return status;
}

/* ---- libcyaml: the schema ---- */

/* What libcyaml loads: every value as text, NULL where the key is absent. */
struct raw {
    void *value[KEYS]; /* char *; SPLIT: char *[3] */
};

struct schema {
    cyaml_schema_value_t number, top;
    cyaml_schema_field_t section[SECTIONS + 1], key[KEYS + SECTIONS]; /* each list ends with a NULL key */
};

static void make_schema(struct schema *schema)
{
    memset(schema, 0, sizeof *schema);
    schema->number = (cyaml_schema_value_t){CYAML_VALUE_STRING(CYAML_FLAG_POINTER, char, 0, CYAML_UNLIMITED)};
    cyaml_schema_field_t *field = schema->key;
    int i = 0;
    for (int s = 0; s < SECTIONS; s++) {
        int first = i;
        cyaml_schema_field_t *fields = field;
        for (; i < KEYS && strcmp(keys[i].section, sections[s]) == 0; i++, field++) {
            const enum cyaml_flag flags = CYAML_FLAG_POINTER | CYAML_FLAG_OPTIONAL;
            field->key = keys[i].name;
            field->data_offset = (uint32_t)((size_t)(i - first) * sizeof(void *));
            if (keys[i].type == SPLIT) {
                field->value = (cyaml_schema_value_t){CYAML_VALUE_SEQUENCE_FIXED(flags, char *, &schema->number, 3)};
            } else {
                field->value = (cyaml_schema_value_t){CYAML_VALUE_STRING(flags, char, 0, CYAML_UNLIMITED)};
            }
        }
        field++; /* the end of this section's list */
        schema->section[s].key = sections[s];
        schema->section[s].data_offset = (uint32_t)((size_t)first * sizeof(void *));
        schema->section[s].value = (cyaml_schema_value_t){.type = CYAML_MAPPING,
                                                          .flags = CYAML_FLAG_OPTIONAL,
                                                          .data_size = (uint32_t)((size_t)(i - first) * sizeof(void *)),
                                                          .mapping = {.fields = fields}};
    }
    schema->top = (cyaml_schema_value_t){CYAML_VALUE_MAPPING(CYAML_FLAG_POINTER, struct raw, schema->section)};
}

/* libcyaml says what is wrong in its log: a line naming the fault, then one line for each enclosing key, innermost first. */
struct log {
    char first[200];
    char unexpected[NAME];
    char field[2][NAME]; /* key, section; or section alone */
    int fields;
};

static void read_log(cyaml_log_t level, void *context, const char *format, va_list arguments)
{
    (void)level;
    struct log *log = context;
    char line[256], name[NAME];
    vsnprintf(line, sizeof line, format, arguments);
    line[strcspn(line, "\n")] = 0;
    if (!log->first[0]) {
        snprintf(log->first, sizeof log->first, "%.*s", (int)sizeof log->first - 1, line);
    }
    if (sscanf(line, "Load: Unexpected key: %63[^\n]", name) == 1) {
        strcpy(log->unexpected, name);
    } else if (sscanf(line, " in mapping field '%63[^']'", name) == 1 && log->fields < 2) {
        strcpy(log->field[log->fields++], name);
    }
}

/* libcyaml's refusal as one line of ours. */
static enum ps_status explain(cyaml_err_t error, const struct log *log, const struct places *places, const char *origin)
{
    const char *section = log->fields ? log->field[log->fields - 1] : "", *name = log->fields == 2 ? log->field[0] : "";
    char where[WHERE], path[2 * NAME];
    snprintf(path, sizeof path, "%s%s%s", section, *name ? "." : "", name);
    if (error == CYAML_ERR_INVALID_KEY && log->fields == 0) {
        make_where(where, origin, find_place(places, log->unexpected, "", 0));
        return unknown_section(where, log->unexpected);
    }
    if (error == CYAML_ERR_INVALID_KEY && log->fields == 1) {
        make_where(where, origin, find_place(places, section, log->unexpected, 0));
        return unknown_key(where, section, log->unexpected);
    }
    int second = find_place(places, section, name, 1);
    if (error == CYAML_ERR_UNEXPECTED_EVENT && second) {
        make_where(where, origin, second);
        return fail(where, "%s: given twice; remove one", path);
    }
    make_where(where, origin, find_place(places, section, name, 0));
    if (error == CYAML_ERR_ALIAS) {
        return fail(where, "%s: anchors and aliases are not supported; write the value out", path);
    }
    for (int i = 0; i < KEYS; i++) {
        if (strcmp(section, keys[i].section) == 0 && strcmp(name, keys[i].name) == 0) {
            return fail(where, "%s: needs %s", path, form(&keys[i]));
        }
    }
    if (log->fields == 1) {
        return fail(where, "%s: needs its keys below it, indented, as \"key: value\"", path);
    }
    if (log->fields == 0 && error == CYAML_ERR_INVALID_VALUE) {
        return fail(where, "not a mapping of sections: begin with \"data:\" and its keys below it, indented");
    }
    return fail(where, "%s (%s)", log->first, cyaml_strerror(error));
}

/* Puts one document, the file or an override, into the config. */
static enum ps_status read_document(struct reader *reader, const char *text, const char *origin)
{
    struct schema schema;
    make_schema(&schema);
    struct places places = {0};
    struct log log = {0};
    struct raw *raw = NULL;
    const cyaml_config_t cyaml = {
        .log_fn = read_log, .log_ctx = &log, .mem_fn = cyaml_mem, .log_level = CYAML_LOG_ERROR, .flags = CYAML_CFG_NO_ALIAS};
    enum ps_status status = walk(text, origin, &places);
    if (status == PS_OK && places.documents == 0) {
        status = fail(origin, "empty; begin with \"data:\" and, below it, \"  path: series.h5\"");
    }
    if (status == PS_OK) {
        cyaml_err_t error = cyaml_load_data((const uint8_t *)text, strlen(text), &cyaml, &schema.top, (cyaml_data_t **)&raw, NULL);
        if (error != CYAML_OK) {
            status = explain(error, &log, &places, origin);
        }
    }
    for (int i = 0; raw && i < KEYS && status == PS_OK; i++) {
        if (raw->value[i]) {
            make_where(reader->where[i], origin, find_place(&places, keys[i].section, keys[i].name, 0));
            const char *one = raw->value[i];
            status = put(reader, &keys[i], keys[i].type == SPLIT ? (const char *const *)raw->value[i] : &one, reader->where[i]);
        }
    }
    cyaml_free(&cyaml, &schema.top, raw, 0);
    free(places.place);
    return status;
}

/* ---- values to text ---- */

/* The shortest text that reads back as the same double; whole numbers without an exponent. */
static void print_real(FILE *out, double value)
{
    char text[40];
    int digits = 1;
    if (value == floor(value) && fabs(value) < 1e15) {
        fprintf(out, "%.0f", value);
        return;
    }
    do {
        snprintf(text, sizeof text, "%.*g", digits, value);
    } while (strtod(text, NULL) != value && ++digits <= 17);
    fputs(text, out);
}

/* As a YAML scalar: plain where every YAML reader takes it as text, else double-quoted. */
static void print_text(FILE *out, const char *text)
{
    static const char *const reserved[] = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"};
    int plain = (*text >= 'a' && *text <= 'z') || (*text >= 'A' && *text <= 'Z') || *text == '/';
    for (size_t i = 0; i < sizeof reserved / sizeof *reserved; i++) {
        plain = plain && strcasecmp(text, reserved[i]) != 0;
    }
    plain = plain && strspn(text, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./:-") == strlen(text) &&
            text[strlen(text) - 1] != ':';
    if (plain) {
        fputs(text, out);
        return;
    }
    fputc('"', out);
    for (const char *c = text; *c; c++) {
        if (*c == '"' || *c == '\\') {
            fprintf(out, "\\%c", *c);
        } else if ((unsigned char)*c < ' ' || *c == 0x7f) {
            fprintf(out, "\\x%02X", *c);
        } else {
            fputc(*c, out);
        }
    }
    fputc('"', out);
}

static void print_value(FILE *out, const struct key *key, const struct ps_config *config)
{
    const void *place = (const char *)config + key->offset;
    switch (key->type) {
    case TEXT:
        print_text(out, *(char *const *)place);
        break;
    case WHOLE:
    case BYTES:
        fprintf(out, "%" PRId64, *(const int64_t *)place);
        break;
    case SEED:
        fprintf(out, "%" PRIu64, *(const uint64_t *)place);
        break;
    case REAL:
        print_real(out, *(const double *)place);
        break;
    case SPLIT:
        for (int i = 0; i < 3; i++) {
            fputs(i ? ", " : "[", out);
            print_real(out, ((const double *)place)[i]);
        }
        fputc(']', out);
        break;
    case SWITCH:
        fputs(switches[*(const int *)place], out);
        break;
    case CHOICE:
        fputs(key->choices[*(const int *)place], out);
        break;
    }
}

/* The text that print_value makes, malloc'ed; NULL without memory. */
static char *value_text(const struct key *key, const struct ps_config *config)
{
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    if (!out) {
        return NULL;
    }
    print_value(out, key, config);
    return fclose(out) == 0 ? text : NULL;
}

enum ps_status ps_config_text(const struct ps_config *config, char **text)
{
    *text = NULL;
    size_t size;
    FILE *out = open_memstream(text, &size);
    if (out) {
        for (int i = 0; i < KEYS; i++) {
            if (i == 0 || strcmp(keys[i].section, keys[i - 1].section) != 0) {
                fprintf(out, "%s:\n", keys[i].section);
            }
            fprintf(out, "  %s: ", keys[i].name);
            print_value(out, &keys[i], config);
            fputc('\n', out);
        }
    }
    if (!out || fclose(out) != 0) {
        free(*text);
        *text = NULL;
        return ps_fail(PS_USAGE, "config: no memory for its text");
    }
    return PS_OK;
}

/* ---- what one key alone cannot tell ---- */

static int index_of(const char *section, const char *name)
{
    int i = 0;
    while (strcmp(keys[i].section, section) != 0 || strcmp(keys[i].name, name) != 0) {
        i++;
    }
    return i;
}

/* Where the first of the keys that is not a preset came from: the one to blame. */
static const char *blame(const struct reader *reader, const char *origin, const char *section, const char *first,
                         const char *second)
{
    const char *where = reader->where[index_of(section, first)];
    if (!*where && second) {
        where = reader->where[index_of(section, second)];
    }
    return *where ? where : origin;
}

static enum ps_status check_split(const double split[3], const char *where)
{
    double sum = split[0] + split[1] + split[2];
    if (split[0] <= 1 && split[1] <= 1 && split[2] <= 1) {
        return sum <= 1 + 1e-9 ? PS_OK
                               : fail(where, "data.split: the fractions %g, %g and %g sum to %g; they must sum to at most 1",
                                      split[0], split[1], split[2], sum);
    }
    for (int i = 0; i < 3; i++) {
        if (split[i] != floor(split[i]) || split[i] > INT32_MAX) {
            return fail(where,
                        "data.split: %g is not a count of rows; give three whole numbers, or three fractions that sum to at most 1",
                        split[i]);
        }
    }
    return PS_OK;
}

/* Each size alone may be large; together they must not overflow where tensors are laid out. */
static enum ps_status check_parameters(const struct ps_config *c, const char *where)
{
    double d = (double)c->model.d_model, patches = (double)((c->model.seq_len - c->model.patch_len) / c->model.stride + 2);
    double count = d * (double)c->model.patch_len + patches * d * (1 + (double)c->model.pred_len) +
                   (double)c->model.n_layers * d * (4 * d + 2 * (double)c->model.d_ff);
    return count <= 0x1p40 ? PS_OK : fail(where, "model: has %.2g parameters; at most %.2g can be served", count, 0x1p40);
}

static int is_device(const char *device)
{
    if (strncmp(device, "cuda:", 5) == 0) {
        return is_whole(device + 5, 0) && strlen(device + 5) <= 4;
    }
    return strcmp(device, "auto") == 0 || strcmp(device, "cpu") == 0 || strcmp(device, "cuda") == 0;
}

static enum ps_status check(const struct reader *reader, const char *origin)
{
    const struct ps_config *c = reader->config;
    if (!*c->data.path) {
        return fail(blame(reader, origin, "data", "path", NULL), "data.path: missing; name the HDF5 file, as \"path: series.h5\"");
    }
    PS_TRY(check_split(c->data.split, blame(reader, origin, "data", "split", NULL)));
    if (c->model.d_model % c->model.n_heads != 0) {
        return fail(blame(reader, origin, "model", "n_heads", "d_model"),
                    "model.n_heads: d_model %" PRId64 " is not divisible by %" PRId64 " heads; change one of them",
                    c->model.d_model, c->model.n_heads);
    }
    if (c->model.patch_len > c->model.seq_len) {
        return fail(blame(reader, origin, "model", "patch_len", "seq_len"),
                    "model.patch_len: %" PRId64 " is longer than the window; it must be at most seq_len, %" PRId64,
                    c->model.patch_len, c->model.seq_len);
    }
    PS_TRY(check_parameters(c, blame(reader, origin, "model", "d_model", "seq_len")));
    if (c->optim.min_lr > c->optim.lr) {
        return fail(blame(reader, origin, "optim", "min_lr", "lr"), "optim.min_lr: %g is above lr; it must be at most %g",
                    c->optim.min_lr, c->optim.lr);
    }
    const char *device = c->runtime.device, *backend = c->runtime.backend, *precision = precisions[c->runtime.precision];
    if (!is_device(device)) {
        return fail(blame(reader, origin, "runtime", "device", NULL),
                    "runtime.device: \"%.60s\" is not one of auto, cpu, cuda, cuda:N", device);
    }
    int on_gpu = strncmp(device, "cuda", 4) == 0;
    if ((strcmp(backend, "cuda") == 0 && strcmp(device, "cpu") == 0) ||
        ((strcmp(backend, "cpu") == 0 || strcmp(backend, "reference") == 0) && on_gpu)) {
        return fail(blame(reader, origin, "runtime", "backend", "device"),
                    "runtime.backend: %s does not run on device %s; use backend auto, or device %s", backend, device,
                    on_gpu ? "cpu" : "cuda");
    }
    int reference = strcmp(backend, "reference") == 0;
    if (c->runtime.precision == PS_FP64 && !reference) {
        return fail(blame(reader, origin, "runtime", "precision", "backend"),
                    "runtime.precision: fp64 needs backend reference, not %s; set precision: fp32", backend);
    }
    if (reference && c->runtime.precision != PS_FP64 && c->runtime.precision != PS_FP32) {
        return fail(blame(reader, origin, "runtime", "precision", "backend"),
                    "runtime.precision: backend reference computes in fp32 or fp64, not %s", precision);
    }
    if (c->runtime.fusion == PS_FUSION_NONE && c->runtime.precision != PS_FP64 && c->runtime.precision != PS_FP32) {
        return fail(blame(reader, origin, "runtime", "fusion", "precision"),
                    "runtime.fusion: none computes in fp32 or fp64, not %s; set fusion: gemm, or precision: fp32", precision);
    }
    return PS_OK;
}

/* ---- the way in ---- */

/* "section.key=value" as a document of one key. */
static enum ps_status read_override(struct reader *reader, const char *override)
{
    char origin[WHERE];
    snprintf(origin, sizeof origin, "--set %.200s", override);
    const char *dot = strchr(override, '.'), *equals = strchr(override, '=');
    if (!dot || !equals || dot > equals || dot == override || equals == dot + 1) {
        return fail(origin, "not of the form section.key=value, such as model.d_model=64");
    }
    char *text = NULL, *section = strndup(override, (size_t)(dot - override)), *name = strndup(dot + 1, (size_t)(equals - dot - 1));
    int list = 0;
    for (int i = 0; i < KEYS && section && name; i++) {
        list |= keys[i].type == SPLIT && strcmp(keys[i].section, section) == 0 && strcmp(keys[i].name, name) == 0;
    }
    size_t size;
    FILE *out = open_memstream(&text, &size);
    if (out && section && name) {
        print_text(out, section);
        fputs(":\n  ", out);
        print_text(out, name);
        fputs(": ", out);
        if (list) {
            fputs(equals + 1, out);
        } else {
            print_text(out, equals + 1);
        }
        fputc('\n', out);
    }
    enum ps_status status = PS_OK;
    if (!out || fclose(out) != 0 || !section || !name) {
        status = fail(origin, "no memory");
    } else if (list && strpbrk(equals, "\r\n")) {
        status = fail(origin, "a list stands on one line");
    } else {
        status = read_document(reader, text, origin);
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
    struct reader *reader = calloc(1, sizeof *reader);
    if (!reader) {
        return fail(origin, "no memory");
    }
    reader->config = config;
    enum ps_status status = PS_OK;
    for (int i = 0; i < KEYS && status == PS_OK; i++) {
        status = put(reader, &keys[i], keys[i].preset, origin);
    }
    if (status == PS_OK) {
        status = read_document(reader, text, origin);
    }
    for (int i = 0; i < n_overrides && status == PS_OK; i++) {
        status = read_override(reader, overrides[i]);
    }
    if (status == PS_OK) {
        status = check(reader, origin);
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
        return fail(config_path, "%s: the config's folder cannot be resolved: %s", key, strerror(errno));
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
        return fail(config_path, "%s: no memory", key);
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
    enum ps_status status = strlen(text) < size ? fail(path, "not YAML: holds a zero byte")
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
        struct places places = {0};
        if (walk(text, path, &places) != PS_OK) {
            status = fail(path, "data.path: \"%.200s\" cannot be written as UTF-8 text; rename the folder", config->data.path);
        }
        free(places.place);
        free(text);
    }
    if (status != PS_OK) {
        ps_config_free(config);
    }
    return status;
}

void ps_config_free(struct ps_config *config)
{
    for (int i = 0; i < KEYS; i++) {
        if (keys[i].type == TEXT) {
            char **text = (char **)((char *)config + keys[i].offset);
            free(*text);
            *text = NULL;
        }
    }
}

enum ps_status ps_config_compatible(const struct ps_config *saved, const struct ps_config *now)
{
    enum ps_status status = PS_OK;
    for (int i = 0; i < KEYS && status == PS_OK; i++) {
        const struct key *key = &keys[i];
        if (key->free_on_resume) {
            continue;
        }
        char *then = value_text(key, saved), *text = value_text(key, now);
        if (!then || !text) {
            status = ps_fail(PS_CHECKPOINT, "%s.%s: no memory to compare", key->section, key->name);
        } else if (strcmp(key->name, "device") == 0) {
            if (strcspn(then, ":") != strcspn(text, ":") || strncmp(then, text, strcspn(then, ":")) != 0) {
                status = ps_fail(PS_CHECKPOINT,
                                 "runtime.device: the checkpoint was made with %.60s, this run has %.60s; resume with "
                                 "the same",
                                 then, text);
            }
        } else if (strcmp(key->name, "epochs") == 0 && now->train.epochs > saved->train.epochs &&
                   (saved->optim.schedule == PS_SCHEDULE_CONSTANT || saved->optim.schedule == PS_SCHEDULE_TYPE3)) {
            /* A longer run whose learning rates so far are the same. */
        } else if (strcmp(then, text) != 0) {
            status = ps_fail(PS_CHECKPOINT,
                             "%s.%s: the checkpoint was made with %.60s, this run has %.60s; resume with the same, or "
                             "begin a new run",
                             key->section, key->name, then, text);
        }
        free(then);
        free(text);
    }
    return status;
}
