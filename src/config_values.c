/* One value: a key's text into the config, converted strictly and inside its range or among its words. */
#include "src/config_keys.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "data/dates.h"

enum ps_status ps_config_fail(const char *where, const char *format, ...)
{
    char text[900];
    int used = snprintf(text, sizeof text, "%.*s: ", PS_WHERE, where);
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

/* Levenshtein's distance of two names of fewer than PS_KEY_NAME bytes. */
static int distance(const char *a, const char *b)
{
    int row[PS_KEY_NAME + 1], n = (int)strnlen(b, PS_KEY_NAME);
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

/* No name further than a third of the word (at least 2 edits) is near. */
void ps_names_add(struct ps_names *names, const char *word, const char *name)
{
    int length = (int)strlen(word), limit = length / 3 > 2 ? length / 3 : 2, edits = distance(word, name);
    if (edits <= limit && edits < length && (!names->nearest || edits < names->edits)) {
        names->edits = edits;
        names->nearest = name;
    }
    size_t used = strlen(names->list);
    snprintf(names->list + used, sizeof names->list - used, "%s%s", used ? ", " : "", name);
}

static const char *const switches[] = {"false", "true", "off", "on", "no", "yes", NULL};

/* What the value must be when it is outside the key's range, NULL when it is inside. */
static const char *outside(enum ps_key_range range, double value)
{
    switch (range) {
    case PS_RANGE_SIZE:
        return value >= 1 && value <= 1 << 24 ? NULL : "must be from 1 to 16777216";
    case PS_RANGE_LAYERS:
        return value >= 1 && value <= 1024 ? NULL : "must be from 1 to 1024";
    case PS_RANGE_COUNT:
        return value >= 1 && value <= INT32_MAX ? NULL : "must be from 1 to 2147483647";
    case PS_RANGE_LIMIT:
        return value >= 0 && value <= INT32_MAX ? NULL : "must be from 0 to 2147483647";
    case PS_RANGE_FRACTION:
        return value >= 0 && value < 1 ? NULL : "must be at least 0 and less than 1";
    case PS_RANGE_INSIDE:
        return value > 0 && value < 1 ? NULL : "must be more than 0 and less than 1";
    case PS_RANGE_POSITIVE:
        return value > 0 ? NULL : "must be more than 0";
    case PS_RANGE_NOT_NEGATIVE:
        return value >= 0 ? NULL : "must be at least 0";
    default:
        return NULL;
    }
}

static enum ps_status put_real(const struct ps_key *key, const char *text, const char *where, double *value)
{
    char *end;
    *value = strtod(text, &end);
    /* strtod also takes leading spaces, hexadecimal, inf and nan. */
    if (!*text || *end || strspn(text, "+-.0123456789eE") != strlen(text) || !isfinite(*value)) {
        return ps_config_fail(where, "%s.%s: \"%.60s\" is not a number", key->section, key->name, text);
    }
    const char *must = outside(key->range, *value);
    return must ? ps_config_fail(where, "%s.%s: %.60s %s", key->section, key->name, text, must) : PS_OK;
}

/* Digits, with a sign where `sign` allows one. */
static int is_whole(const char *text, int sign)
{
    text += sign && (*text == '-' || *text == '+');
    return *text && strspn(text, "0123456789") == strlen(text);
}

/* Bytes: a whole number, K, M, G or T after it for powers of 1024. */
static enum ps_status put_bytes(const struct ps_key *key, const char *text, const char *where, int64_t *value)
{
    static const char units[] = "KMGT";
    size_t length = strlen(text), digits = strspn(text, "0123456789");
    const char *unit = digits + 1 == length ? strchr(units, text[digits]) : NULL;
    int shift = unit ? 10 * (int)(unit - units + 1) : 0;
    errno = 0;
    unsigned long long number = strtoull(text, NULL, 10);
    if (digits == 0 || (digits < length && !unit)) {
        return ps_config_fail(where,
                              "%s.%s: \"%.60s\" is not a number of bytes, such as 536870912 or 512M (K, M, G, T: powers of 1024)",
                              key->section, key->name, text);
    }
    if (errno || number > (unsigned long long)INT64_MAX >> shift) {
        return ps_config_fail(where, "%s.%s: %.60s is more than there can be", key->section, key->name, text);
    }
    *value = (int64_t)(number << shift);
    return PS_OK;
}

/* *chosen: which of the key's words the text is. */
static enum ps_status choose(const struct ps_key *key, const char *text, const char *where, int *chosen)
{
    struct ps_names names = {0};
    for (int i = 0; key->choices[i]; i++) {
        if (strcmp(text, key->choices[i]) == 0) {
            *chosen = i;
            return PS_OK;
        }
        ps_names_add(&names, text, key->choices[i]);
    }
    return ps_config_fail(where, "%s.%s: \"%.60s\" is not one of %s%s%s%s", key->section, key->name, text, names.list,
                          names.nearest ? "; did you mean " : "", names.nearest ? names.nearest : "", names.nearest ? "?" : "");
}

static enum ps_status put_reals(const struct ps_key *key, const char *const *text, int n, const char *where, double *value)
{
    for (int i = 0; i < n; i++) {
        PS_TRY(put_real(key, text[i], where, &value[i]));
    }
    return PS_OK;
}

/* Three numbers, or two times. */
static enum ps_status put_split(struct ps_config *c, const struct ps_key *key, const char *const *text, int n, const char *where)
{
    int64_t from[3];
    int dates = 0;
    for (int i = 0; i < n; i++) {
        dates += ps_date_read(text[i], &from[i]);
    }
    c->data.split_dated = n == 2 && dates == 2;
    if (c->data.split_dated) {
        memcpy(c->data.split_from, from, sizeof c->data.split_from);
        return PS_OK;
    }
    if (n != 3 && dates > 0) {
        int i = ps_date_read(text[0], from) ? 1 : 0;
        return ps_config_fail(where, "data.split: \"%.60s\" is not a time, such as " PS_DATE_FORMS, text[i]);
    }
    if (n != 3 || dates > 0) {
        return ps_config_fail(where, "data.split: needs " PS_SPLIT_FORM);
    }
    return put_reals(key, text, n, where, c->data.split);
}

/* Texts, each of them once. */
static enum ps_status put_list(const struct ps_key *key, const char *const *texts, int n, const char *where, char **place)
{
    char *list = NULL;
    size_t size;
    FILE *out = open_memstream(&list, &size);
    enum ps_status status = out ? PS_OK : ps_config_fail(where, "%s.%s: no memory", key->section, key->name);
    for (int i = 0; i < n && status == PS_OK; i++) {
        if (!*texts[i]) {
            status = ps_config_fail(where, "%s.%s: an empty text is in the list", key->section, key->name);
        }
        for (int j = 0; j < i && status == PS_OK; j++) {
            if (strcmp(texts[i], texts[j]) == 0) {
                status = ps_config_fail(where, "%s.%s: \"%.60s\" is in the list twice", key->section, key->name, texts[i]);
            }
        }
        if (status == PS_OK) {
            fwrite(texts[i], 1, strlen(texts[i]) + 1, out);
        }
    }
    if (out) {
        fputc(0, out);
        if (fclose(out) != 0 && status == PS_OK) {
            status = ps_config_fail(where, "%s.%s: no memory", key->section, key->name);
        }
    }
    if (status != PS_OK) {
        free(list);
        return status;
    }
    free(*place);
    *place = list;
    return PS_OK;
}

enum ps_status ps_config_put(struct ps_config_reader *reader, const struct ps_key *key, const char *const *text, int n,
                             const char *where)
{
    void *place = (char *)reader->config + key->offset;
    const char *must;
    switch (key->type) {
    case PS_KEY_TEXT: {
        int chosen;
        if (key->choices) {
            PS_TRY(choose(key, *text, where, &chosen));
        }
        char *copy = strdup(*text);
        if (!copy) {
            return ps_config_fail(where, "%s.%s: no memory", key->section, key->name);
        }
        free(*(char **)place);
        *(char **)place = copy;
        return PS_OK;
    }
    case PS_KEY_WHOLE: {
        errno = 0;
        long long value = strtoll(*text, NULL, 10);
        if (!is_whole(*text, 1)) {
            return ps_config_fail(where, "%s.%s: \"%.60s\" is not a whole number", key->section, key->name, *text);
        }
        must = outside(key->range, errno ? INFINITY : (double)value);
        if (must) {
            return ps_config_fail(where, "%s.%s: %.60s %s", key->section, key->name, *text, must);
        }
        *(int64_t *)place = value;
        return PS_OK;
    }
    case PS_KEY_SEED: {
        errno = 0;
        unsigned long long value = strtoull(*text, NULL, 10);
        if (!is_whole(*text, 0) || errno) {
            return ps_config_fail(where, "%s.%s: \"%.60s\" is not a whole number from 0 to %" PRIu64, key->section, key->name,
                                  *text, UINT64_MAX);
        }
        *(uint64_t *)place = value;
        return PS_OK;
    }
    case PS_KEY_BYTES:
        return put_bytes(key, *text, where, place);
    case PS_KEY_REAL:
        return put_real(key, *text, where, place);
    case PS_KEY_RATE:
        if (strcmp(*text, "auto") == 0) {
            *(double *)place = -1;
            return PS_OK;
        }
        return put_real(key, *text, where, place);
    case PS_KEY_SPLIT:
        return put_split(reader->config, key, text, n, where);
    case PS_KEY_REALS: {
        struct ps_reals *reals = place;
        reals->n = n;
        return put_reals(key, text, n, where, reals->value);
    }
    case PS_KEY_SWITCH:
        for (int i = 0; switches[i]; i++) {
            if (strcmp(*text, switches[i]) == 0) {
                *(int *)place = i % 2;
                return PS_OK;
            }
        }
        return ps_config_fail(where, "%s.%s: \"%.60s\" is not true or false", key->section, key->name, *text);
    case PS_KEY_CHOICE:
        return choose(key, *text, where, place);
    case PS_KEY_LIST:
        return put_list(key, text, n, where, place);
    }
    return PS_OK;
}
