/* A YAML document into the config, in three steps. libyaml walks the text once for syntax and for the line of every key. libcyaml
 * loads it against the schema, which is made from the table of keys: which sections and keys there are, each once, and their
 * nesting. Scalars stay text there and ps_config_put converts them strictly, because libcyaml 1.3 reads 1.5 as the whole number 1
 * and any word as true. */
#include "src/config_keys.h"

#include <cyaml/cyaml.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

enum { DEEPEST = 16 };

/* ---- libyaml: syntax and lines ---- */

struct place {
    char section[PS_KEY_NAME], key[PS_KEY_NAME]; /* key "": the section itself */
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
static void make_where(char where[PS_WHERE], const char *origin, int line)
{
    if (line && strncmp(origin, "--set ", 6) != 0) {
        snprintf(where, PS_WHERE, "%.300s:%d", origin, line);
    } else {
        snprintf(where, PS_WHERE, "%.310s", origin);
    }
}

static enum ps_status walk(const char *text, const char *origin, struct places *places)
{
    yaml_parser_t parser;
    if (!yaml_parser_initialize(&parser)) {
        return ps_config_fail(origin, "no memory for the YAML parser");
    }
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, strlen(text));
    /* Depth 1 is the mapping of sections, 2 a section's mapping of keys. */
    struct {
        int mapping, at_key;
    } level[3] = {{0, 0}};
    char section[PS_KEY_NAME] = "", where[PS_WHERE];
    int depth = 0, done = 0;
    enum ps_status status = PS_OK;
    while (!done && status == PS_OK) {
        yaml_event_t event;
        if (!yaml_parser_parse(&parser, &event)) {
            make_where(where, origin, (int)(parser.problem_mark.line ? parser.problem_mark.line : parser.mark.line) + 1);
            status = ps_config_fail(where, "not YAML: %s", parser.problem ? parser.problem : "cannot be parsed");
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
                status = ps_config_fail(where, "a second YAML document begins; a config is one document: remove the line ---");
            }
            break;
        case YAML_SCALAR_EVENT:
            if (depth >= 1 && depth <= 2 && level[depth].at_key) {
                const char *name = (const char *)event.data.scalar.value;
                if (depth == 1) {
                    snprintf(section, sizeof section, "%.*s", PS_KEY_NAME - 1, name);
                }
                if (!add_place(places, section, depth == 1 ? "" : name, line)) {
                    status = ps_config_fail(origin, "no memory for the list of keys");
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
                status = ps_config_fail(where, "nested more than %d deep; a config has sections, keys and values", DEEPEST);
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

enum ps_status ps_config_parses(const char *text, const char *origin)
{
    struct places places = {0};
    enum ps_status status = walk(text, origin, &places);
    free(places.place);
    return status;
}

/* ---- libcyaml: the schema ---- */

/* What libcyaml loads: every value as text, NULL where the key is absent. */
struct raw {
    struct slot {
        void *value; /* char *; of a list char *[n] */
        uint64_t n;
    } key[PS_KEYS];
};

struct schema {
    cyaml_schema_value_t text, top;
    cyaml_schema_field_t section[PS_SECTIONS + 1], key[PS_KEYS + PS_SECTIONS]; /* each list ends with a NULL key */
};

static void make_schema(struct schema *schema)
{
    memset(schema, 0, sizeof *schema);
    schema->text = (cyaml_schema_value_t){CYAML_VALUE_STRING(CYAML_FLAG_POINTER, char, 0, CYAML_UNLIMITED)};
    cyaml_schema_field_t *field = schema->key;
    int i = 0;
    for (int s = 0; s < PS_SECTIONS; s++) {
        int first = i;
        cyaml_schema_field_t *fields = field;
        for (; i < PS_KEYS && strcmp(ps_keys[i].section, ps_sections[s]) == 0; i++, field++) {
            const enum cyaml_flag flags = CYAML_FLAG_POINTER | CYAML_FLAG_OPTIONAL;
            field->key = ps_keys[i].name;
            field->data_offset = (uint32_t)((size_t)(i - first) * sizeof(struct slot) + offsetof(struct slot, value));
            field->count_offset = (uint32_t)((size_t)(i - first) * sizeof(struct slot) + offsetof(struct slot, n));
            field->count_size = sizeof(uint64_t);
            if (ps_keys[i].type == PS_KEY_SPLIT) {
                field->value = (cyaml_schema_value_t){CYAML_VALUE_SEQUENCE(flags, char *, &schema->text, 2, 3)};
            } else if (ps_keys[i].type == PS_KEY_LIST) {
                field->value = (cyaml_schema_value_t){CYAML_VALUE_SEQUENCE(flags, char *, &schema->text, 0, CYAML_UNLIMITED)};
            } else if (ps_keys[i].type == PS_KEY_REALS) {
                field->value = (cyaml_schema_value_t){CYAML_VALUE_SEQUENCE(flags, char *, &schema->text, 0, PS_MOST_QUANTILES)};
            } else {
                field->value = (cyaml_schema_value_t){CYAML_VALUE_STRING(flags, char, 0, CYAML_UNLIMITED)};
            }
        }
        field++; /* the end of this section's list */
        schema->section[s].key = ps_sections[s];
        schema->section[s].data_offset = (uint32_t)((size_t)first * sizeof(struct slot));
        schema->section[s].value = (cyaml_schema_value_t){.type = CYAML_MAPPING,
                                                          .flags = CYAML_FLAG_OPTIONAL,
                                                          .data_size = (uint32_t)((size_t)(i - first) * sizeof(struct slot)),
                                                          .mapping = {.fields = fields}};
    }
    schema->top = (cyaml_schema_value_t){CYAML_VALUE_MAPPING(CYAML_FLAG_POINTER, struct raw, schema->section)};
}

/* ---- libcyaml: what it refuses ---- */

static enum ps_status unknown_section(const char *where, const char *section)
{
    for (int i = 0; i < PS_KEYS; i++) {
        if (strcmp(section, ps_keys[i].name) == 0) {
            return ps_config_fail(where, "%s: belongs inside section %s", section, ps_keys[i].section);
        }
    }
    struct ps_names names = {0};
    for (int s = 0; s < PS_SECTIONS; s++) {
        ps_names_add(&names, section, ps_sections[s]);
    }
    if (names.nearest) {
        return ps_config_fail(where, "%s: unknown section; did you mean %s?", section, names.nearest);
    }
    return ps_config_fail(where, "%s: unknown section; the sections are %s", section, names.list);
}

static enum ps_status unknown_key(const char *where, const char *section, const char *name)
{
    for (int i = 0; i < PS_KEYS; i++) {
        if (strcmp(name, ps_keys[i].name) == 0) {
            return ps_config_fail(where, "%s.%s: unknown key; did you mean %s.%s?", section, name, ps_keys[i].section, name);
        }
    }
    struct ps_names names = {0};
    for (int i = 0; i < PS_KEYS; i++) {
        if (strcmp(section, ps_keys[i].section) == 0) {
            ps_names_add(&names, name, ps_keys[i].name);
        }
    }
    if (names.nearest) {
        return ps_config_fail(where, "%s.%s: unknown key; did you mean %s?", section, name, names.nearest);
    }
    return ps_config_fail(where, "%s.%s: unknown key; the keys of %s are %s", section, name, section, names.list);
}

static const char *form(const struct ps_key *key)
{
    switch (key->type) {
    case PS_KEY_WHOLE:
    case PS_KEY_SEED:
        return "a whole number";
    case PS_KEY_BYTES:
        return "a number of bytes, such as 512M";
    case PS_KEY_REAL:
    case PS_KEY_RATE:
        return "a number";
    case PS_KEY_SPLIT:
        return PS_SPLIT_FORM;
    case PS_KEY_LIST:
        return "a list of texts, such as [load, wind]";
    case PS_KEY_REALS:
        return "a list of at most 32 numbers, such as [0.1, 0.5, 0.9]";
    case PS_KEY_SWITCH:
        return "true or false";
    case PS_KEY_CHOICE:
        return "one word";
    default:
        return "a text";
    }
}

/* libcyaml says what is wrong in its log: a line naming the fault, then one line for each enclosing key, innermost first. */
struct log {
    char first[200];
    char unexpected[PS_KEY_NAME];
    char field[2][PS_KEY_NAME]; /* key, section; or section alone */
    int fields;
};

static void read_log(cyaml_log_t level, void *context, const char *format, va_list arguments)
{
    (void)level;
    struct log *log = context;
    char line[256], name[PS_KEY_NAME];
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
    char where[PS_WHERE], path[2 * PS_KEY_NAME];
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
        return ps_config_fail(where, "%s: given twice; remove one", path);
    }
    make_where(where, origin, find_place(places, section, name, 0));
    if (error == CYAML_ERR_ALIAS) {
        return ps_config_fail(where, "%s: anchors and aliases are not supported; write the value out", path);
    }
    int key = ps_key_index(section, name);
    if (key >= 0) {
        return ps_config_fail(where, "%s: needs %s", path, form(&ps_keys[key]));
    }
    if (log->fields == 1) {
        return ps_config_fail(where, "%s: needs its keys below it, indented, as \"key: value\"", path);
    }
    if (log->fields == 0 && error == CYAML_ERR_INVALID_VALUE) {
        return ps_config_fail(where, "not a mapping of sections: begin with \"data:\" and its keys below it, indented");
    }
    return ps_config_fail(where, "%s (%s)", log->first, cyaml_strerror(error));
}

enum ps_status ps_config_read(struct ps_config_reader *reader, const char *text, const char *origin)
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
        status = ps_config_fail(origin, "empty; begin with \"data:\" and, below it, \"  path: series.h5\"");
    }
    if (status == PS_OK) {
        cyaml_err_t error = cyaml_load_data((const uint8_t *)text, strlen(text), &cyaml, &schema.top, (cyaml_data_t **)&raw, NULL);
        if (error != CYAML_OK) {
            status = explain(error, &log, &places, origin);
        }
    }
    for (int i = 0; raw && i < PS_KEYS && status == PS_OK; i++) {
        const struct slot *slot = &raw->key[i];
        const int line = find_place(&places, ps_keys[i].section, ps_keys[i].name, 0), list = ps_key_is_list(&ps_keys[i]);
        if (slot->value || (list && line)) { /* a list of nothing is NULL too */
            make_where(reader->where[i], origin, line);
            const char *one = slot->value;
            status = ps_config_put(reader, &ps_keys[i], list ? (const char *const *)slot->value : &one, list ? (int)slot->n : 1,
                                   reader->where[i]);
        }
    }
    cyaml_free(&cyaml, &schema.top, raw, 0);
    free(places.place);
    return status;
}
