/* The config as text, every key, which reads back as the same bits. */
#include "src/config_keys.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "data/dates.h"

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

/* Prints the escape of what YAML does not keep as it is between quotes, and returns how many bytes that is; 0: it begins with
 * nothing such. Beyond ASCII: control characters, U+2028 and U+2029, which end lines, and the byte order mark. */
static int print_escape(FILE *out, const char *text)
{
    const unsigned char *c = (const unsigned char *)text;
    if (*c == '"' || *c == '\\') {
        fprintf(out, "\\%c", *c);
        return 1;
    }
    if (*c < ' ' || *c == 0x7f) {
        fprintf(out, "\\x%02X", *c);
        return 1;
    }
    if (c[0] == 0xc2 && c[1] >= 0x80 && c[1] <= 0x9f) {
        fprintf(out, "\\x%02X", c[1]);
        return 2;
    }
    if (strncmp(text, "\xe2\x80\xa8", 3) == 0 || strncmp(text, "\xe2\x80\xa9", 3) == 0) {
        fprintf(out, "\\u20%02X", c[2] - 0x80);
        return 3;
    }
    if (strncmp(text, "\xef\xbb\xbf", 3) == 0) {
        fputs("\\uFEFF", out);
        return 3;
    }
    return 0;
}

void ps_config_print_text(FILE *out, const char *text)
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
    while (*text) {
        const int escaped = print_escape(out, text);
        if (escaped == 0) {
            fputc(*text, out);
        }
        text += escaped > 0 ? escaped : 1;
    }
    fputc('"', out);
}

static void print_reals(FILE *out, const double *value, int64_t n)
{
    fputc('[', out);
    for (int64_t i = 0; i < n; i++) {
        fputs(i ? ", " : "", out);
        print_real(out, value[i]);
    }
    fputc(']', out);
}

static void print_split(FILE *out, const struct ps_config *c)
{
    if (!c->data.split_dated) {
        print_reals(out, c->data.split, 3);
        return;
    }
    for (int i = 0; i < 2; i++) {
        fputs(i ? ", " : "[", out);
        ps_config_print_text(out, ps_date_text(c->data.split_from[i]).text);
    }
    fputc(']', out);
}

static void print_value(FILE *out, const struct ps_key *key, const struct ps_config *config)
{
    const void *place = (const char *)config + key->offset;
    switch (key->type) {
    case PS_KEY_TEXT:
        ps_config_print_text(out, *(char *const *)place);
        break;
    case PS_KEY_WHOLE:
    case PS_KEY_BYTES:
        fprintf(out, "%" PRId64, *(const int64_t *)place);
        break;
    case PS_KEY_SEED:
        fprintf(out, "%" PRIu64, *(const uint64_t *)place);
        break;
    case PS_KEY_REAL:
        print_real(out, *(const double *)place);
        break;
    case PS_KEY_RATE:
        if (*(const double *)place < 0) {
            fputs("auto", out);
        } else {
            print_real(out, *(const double *)place);
        }
        break;
    case PS_KEY_SPLIT:
        print_split(out, config);
        break;
    case PS_KEY_REALS:
        print_reals(out, ((const struct ps_reals *)place)->value, ((const struct ps_reals *)place)->n);
        break;
    case PS_KEY_LIST:
        fputc('[', out);
        for (const char *list = *(char *const *)place, *text = list; *text; text += strlen(text) + 1) {
            fputs(text > list ? ", " : "", out);
            ps_config_print_text(out, text);
        }
        fputc(']', out);
        break;
    case PS_KEY_SWITCH:
        fputs(*(const int *)place ? "true" : "false", out);
        break;
    case PS_KEY_CHOICE:
        fputs(key->choices[*(const int *)place], out);
        break;
    }
}

char *ps_config_value_text(const struct ps_config *config, const struct ps_key *key)
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
        for (int i = 0; i < PS_KEYS; i++) {
            if (i == 0 || strcmp(ps_keys[i].section, ps_keys[i - 1].section) != 0) {
                fprintf(out, "%s:\n", ps_keys[i].section);
            }
            fprintf(out, "  %s: ", ps_keys[i].name);
            print_value(out, &ps_keys[i], config);
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
