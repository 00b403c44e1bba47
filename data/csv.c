#include "data/csv.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "data/text.h"

enum { LONGEST_LINE = 64 << 20, MOST_COLUMNS = 1 << 20 };

static enum ps_status out_of_memory(const struct ps_csv *csv)
{
    return ps_fail(PS_DATA, "%s:%" PRId64 ": out of host memory", csv->path, csv->line_number);
}

/* The next bytes up to a line's end or the file's into csv->line, as getline does, but no more than a line may have: what is read
 * need not be a text, nor end. *length: how many; 0 at the end of the file. */
static enum ps_status read_bytes(struct ps_csv *csv, size_t *length)
{
    int c = 0;
    for (*length = 0; c != '\n' && (c = getc_unlocked(csv->file)) != EOF;) {
        if (*length == LONGEST_LINE && c != '\n') {
            return ps_fail(PS_DATA, "%s:%" PRId64 ": a line of more than %d MiB: expected a text file", csv->path,
                           csv->line_number + 1, LONGEST_LINE >> 20);
        }
        if (*length + 2 > csv->line_room) {
            size_t room = csv->line_room > 0 ? 2 * csv->line_room : 4096;
            char *grown = realloc(csv->line, room);
            if (grown == NULL) {
                return out_of_memory(csv);
            }
            csv->line = grown;
            csv->line_room = room;
        }
        csv->line[(*length)++] = (char)c;
    }
    if (*length > 0) {
        csv->line[*length] = '\0';
    }
    return PS_OK;
}

/* The next line that is not empty, without its end, a byte-order mark or a carriage return. *more = 0 at the end of the file.
 * Empty lines may stand at the end alone. */
static enum ps_status read_line(struct ps_csv *csv, int *more)
{
    int64_t empty = 0;
    for (;;) {
        errno = 0;
        size_t length;
        PS_TRY(read_bytes(csv, &length));
        if (length == 0 || ferror(csv->file)) {
            *more = 0;
            return ferror(csv->file) ? ps_fail(PS_DATA, "%s: cannot be read: %s", csv->path, strerror(errno)) : PS_OK;
        }
        csv->line_number++;
        if (strlen(csv->line) != length) {
            return ps_fail(PS_DATA, "%s:%" PRId64 ": holds a zero byte: expected a text file", csv->path, csv->line_number);
        }
        while (length > 0 && strchr("\r\n", csv->line[length - 1]) != NULL) {
            csv->line[--length] = '\0';
        }
        if (csv->line_number == 1 && strncmp(csv->line, "\xef\xbb\xbf", 3) == 0) {
            memmove(csv->line, csv->line + 3, length - 2);
        }
        if (csv->line[0] == '\0') {
            empty = empty > 0 ? empty : csv->line_number;
            continue;
        }
        if (empty > 0) {
            return ps_fail(PS_DATA, "%s:%" PRId64 ": empty line inside the data: remove it, or fill the missing row", csv->path,
                           empty);
        }
        *more = 1;
        return PS_OK;
    }
}

static enum ps_status add_field(struct ps_csv *csv, char *text)
{
    if (csv->fields == MOST_COLUMNS) {
        return ps_fail(PS_DATA, "%s:%" PRId64 ": more than %d columns", csv->path, csv->line_number, MOST_COLUMNS);
    }
    if (csv->fields == csv->fields_room) {
        size_t room = csv->fields_room > 0 ? 2 * csv->fields_room : 64;
        char **grown = realloc(csv->field, room * sizeof *grown);
        if (grown == NULL) {
            return out_of_memory(csv);
        }
        csv->field = grown;
        csv->fields_room = room;
    }
    csv->field[csv->fields++] = text;
    return PS_OK;
}

static const struct {
    char character;
    const char *name, *plural;
} delimiters[] = {{',', "comma", "commas"}, {';', "semicolon", "semicolons"}, {'\t', "tab", "tabs"}, {'|', "bar", "bars"}};
enum { DELIMITERS = sizeof delimiters / sizeof *delimiters };

int ps_csv_read_delimiter(const char *text, char *delimiter)
{
    for (int i = 0; i < DELIMITERS; i++) {
        if (strcmp(text, delimiters[i].name) == 0 || (text[0] == delimiters[i].character && text[1] == '\0')) {
            *delimiter = delimiters[i].character;
            return 1;
        }
    }
    return 0;
}

const char *ps_csv_cut_at(const struct ps_csv *csv)
{
    int i = 0;
    while (i < DELIMITERS - 1 && delimiters[i].character != csv->delimiter) {
        i++;
    }
    return delimiters[i].plural;
}

/* The delimiter that stands most often in the header, outside quotes; the comma before others. */
static char find_delimiter(const char *header)
{
    int64_t count[DELIMITERS] = {0};
    int quoted = 0, best = 0;
    for (const char *at = header; *at != '\0'; at++) {
        quoted ^= *at == '"';
        for (int i = 0; i < DELIMITERS; i++) {
            count[i] += !quoted && *at == delimiters[i].character;
        }
    }
    for (int i = 1; i < DELIMITERS; i++) {
        best = count[i] > count[best] ? i : best;
    }
    return delimiters[best].character;
}

/* Cuts the line at its delimiters. A field in double quotes may hold them, and quotes written twice (RFC 4180); it ends on its
 * line. Spaces around a field are dropped, and tabs that are no delimiters. */
static enum ps_status split_line(struct ps_csv *csv)
{
    if (csv->delimiter == '\0') {
        csv->delimiter = find_delimiter(csv->line);
    }
    const char delimiter[] = {csv->delimiter, '\0'}, *const blanks = csv->delimiter == '\t' ? " " : " \t";
    csv->fields = 0;
    char *at = csv->line;
    for (;;) {
        at += strspn(at, blanks);
        char *text = at, *end = at;
        if (*at == '"') {
            text = end = ++at;
            while (*at != '\0' && (at[0] != '"' || at[1] == '"')) {
                at += *at == '"';
                *end++ = *at++;
            }
            if (*at == '\0') {
                return ps_fail(PS_DATA, "%s:%" PRId64 ": column %zu: the quote is not closed on this line", csv->path,
                               csv->line_number, csv->fields + 1);
            }
            at++;
            at += strspn(at, blanks);
            if (*at != csv->delimiter && *at != '\0') {
                return ps_fail(PS_DATA, "%s:%" PRId64 ": column %zu: text after the closing quote: \"%s\"", csv->path,
                               csv->line_number, csv->fields + 1, ps_text_plain(at).text);
            }
        } else {
            at += strcspn(at, delimiter);
            end = at;
            while (end > text && strchr(blanks, end[-1]) != NULL) {
                end--;
            }
        }
        char separator = *at++;
        *end = '\0';
        PS_TRY(add_field(csv, text));
        if (separator == '\0') {
            return PS_OK;
        }
    }
}

int ps_csv_number(char *text, int decimal_comma, locale_t c, double *value)
{
    char *end, *comma = NULL;
    if (decimal_comma) {
        if (strchr(text, '.') != NULL) {
            return 0;
        }
        comma = strchr(text, ',');
    }
    if (comma != NULL) {
        *comma = '.';
    }
    *value = strtod_l(text, &end, c);
    int whole = end != text && *end == '\0';
    if (comma != NULL) {
        *comma = ',';
    }
    return whole && strpbrk(text, "xX") == NULL;
}

enum ps_status ps_csv_open(struct ps_csv *csv, const char *path, char delimiter)
{
    *csv = (struct ps_csv){.path = path, .delimiter = delimiter, .file = fopen(path, "re")};
    return csv->file != NULL ? PS_OK : ps_fail(PS_DATA, "%s: cannot be opened: %s", path, strerror(errno));
}

enum ps_status ps_csv_read(struct ps_csv *csv, int *more)
{
    PS_TRY(read_line(csv, more));
    return *more ? split_line(csv) : PS_OK;
}

void ps_csv_close(struct ps_csv *csv)
{
    free(csv->field);
    free(csv->line);
    if (csv->file != NULL) {
        fclose(csv->file);
    }
    *csv = (struct ps_csv){0};
}
