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

/* Cuts the line at its commas. A field in double quotes may hold commas, and quotes written twice (RFC 4180); it ends on its line.
 * Spaces around a field are dropped. */
static enum ps_status split_line(struct ps_csv *csv)
{
    csv->fields = 0;
    char *at = csv->line;
    for (;;) {
        at += strspn(at, " \t");
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
            at += strspn(at, " \t");
            if (*at != ',' && *at != '\0') {
                return ps_fail(PS_DATA, "%s:%" PRId64 ": column %zu: text after the closing quote: \"%s\"", csv->path,
                               csv->line_number, csv->fields + 1, ps_text_plain(at).text);
            }
        } else {
            at += strcspn(at, ",");
            end = at;
            while (end > text && strchr(" \t", end[-1]) != NULL) {
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

enum ps_status ps_csv_open(struct ps_csv *csv, const char *path)
{
    *csv = (struct ps_csv){.path = path, .file = fopen(path, "re")};
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
}
