#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/import.h"
#include "data/text.h"

#define NO_COLUMN SIZE_MAX

enum { LONGEST_LINE = 64 << 20, MOST_COLUMNS = 1 << 20 };

struct csv {
    const char *path;
    FILE *file;
    locale_t c; /* numbers have a point, whatever the program's locale */
    int64_t line_number;
    char *line; /* the current one, cut into fields in place */
    size_t line_room;
    char **field;
    size_t fields, fields_room;

    char **names; /* of the columns, from the header */
    size_t columns;
    size_t time_at; /* column of the times, or NO_COLUMN */

    float *values;               /* [rows, channels] */
    int64_t *time;               /* [rows] */
    struct ps_plain time_before; /* the last row's, as it is written */
    int64_t rows, rows_room, channels;
};

static enum ps_status out_of_memory(const struct csv *csv)
{
    return ps_fail(PS_DATA, "%s:%" PRId64 ": out of host memory", csv->path, csv->line_number);
}

/* The next bytes up to a line's end or the file's into csv->line, as getline does, but no more than a line may have: what is read
 * need not be a text, nor end. *length: how many; 0 at the end of the file. */
static enum ps_status read_bytes(struct csv *csv, size_t *length)
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
static enum ps_status read_line(struct csv *csv, int *more)
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

static enum ps_status add_field(struct csv *csv, char *text)
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
static enum ps_status split_line(struct csv *csv)
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

/* Two digits at most, or exactly `digits` when that is 4; moves *text past them. -1: none there. */
static int read_digits(const char **text, int digits)
{
    int value = 0, n = 0;
    for (; n < digits && isdigit((unsigned char)(*text)[n]); n++) {
        value = 10 * value + ((*text)[n] - '0');
    }
    *text += n;
    return n == 0 || (digits == 4 && n != 4) ? -1 : value;
}

/* Days from 1970-01-01 in the proleptic Gregorian calendar (Hinnant, chrono-compatible low-level date algorithms). */
static int64_t days_from_civil(int year, int month, int day)
{
    int64_t y = month <= 2 ? year - 1 : year;
    int64_t era = (y >= 0 ? y : y - 399) / 400, year_of_era = y - era * 400;
    int64_t day_of_year = (153 * (month > 2 ? month - 3 : month + 9) + 2) / 5 + day - 1;
    return era * 146097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719468;
}

/* YEAR-MONTH-DAY or YEAR/MONTH/DAY, then nothing or (after T or a space) HOUR:MINUTE[:SECOND][Z], as Unix seconds, UTC. */
static int read_date(const char *text, int64_t *seconds)
{
    int part[6] = {0};
    part[0] = read_digits(&text, 4);
    char separator = *text;
    if (part[0] < 0 || (separator != '-' && separator != '/')) {
        return 0;
    }
    for (int i = 1; i < 3; i++) {
        if (*text++ != separator || (part[i] = read_digits(&text, 2)) < 0) {
            return 0;
        }
    }
    if (*text == 'T' || *text == ' ') {
        text++;
        for (int i = 3; i < 6; i++) {
            if (i > 3 && *text++ != ':') {
                return 0;
            }
            part[i] = read_digits(&text, 2);
            if (part[i] < 0) {
                return 0;
            }
            if (i == 4 && *text != ':') {
                break;
            }
        }
        text += *text == 'Z';
    }
    static const int days[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
    int leap = part[0] % 4 == 0 && (part[0] % 100 != 0 || part[0] % 400 == 0);
    if (*text != '\0' || part[1] < 1 || part[1] > 12 || part[2] < 1 || part[2] > days[part[1] - 1] + (leap && part[1] == 2) ||
        part[3] > 23 || part[4] > 59 || part[5] > 59) {
        return 0;
    }
    *seconds = days_from_civil(part[0], part[1], part[2]) * 86400 + part[3] * 3600 + part[4] * 60 + part[5];
    return 1;
}

/* A whole field as a decimal number: no hexadecimal, nothing after it. NaN and infinity are numbers here. */
static int read_number(const struct csv *csv, const char *text, double *value)
{
    char *end;
    *value = strtod_l(text, &end, csv->c);
    return end != text && *end == '\0' && strpbrk(text, "xX") == NULL;
}

/* A header of numbers is data without a header, unless it counts 0, 1, 2, ... as tables without names are written. */
static int header_is_data(const struct csv *csv)
{
    int64_t seconds;
    double value;
    int counts = 1;
    for (size_t i = 0; i < csv->fields; i++) {
        if (read_date(csv->field[i], &seconds)) {
            return 1;
        }
        if (!read_number(csv, csv->field[i], &value)) {
            return 0;
        }
        counts &= value == (double)i;
    }
    return !counts;
}

static enum ps_status read_header(struct csv *csv, const char *time_column)
{
    int more;
    PS_TRY(read_line(csv, &more));
    if (!more) {
        return ps_fail(PS_DATA, "%s: is empty: expected a header line and rows of numbers", csv->path);
    }
    PS_TRY(split_line(csv));
    if (header_is_data(csv)) {
        return ps_fail(PS_DATA, "%s:%" PRId64 ": the first line must name the columns, and it holds values (\"%s\")", csv->path,
                       csv->line_number, ps_text_plain(csv->field[0]).text);
    }
    csv->names = calloc(csv->fields, sizeof *csv->names);
    if (csv->names == NULL) {
        return out_of_memory(csv);
    }
    csv->columns = csv->fields;
    csv->time_at = NO_COLUMN;
    for (size_t i = 0; i < csv->columns; i++) {
        csv->names[i] = strdup(csv->field[i]);
        if (csv->names[i] == NULL) {
            return out_of_memory(csv);
        }
        if (time_column != NULL && csv->time_at == NO_COLUMN && strcmp(time_column, csv->names[i]) == 0) {
            csv->time_at = i;
        }
    }
    if (time_column != NULL && csv->time_at == NO_COLUMN) {
        return ps_fail(PS_DATA, "%s:%" PRId64 ": no column is named \"%s\": the first is \"%s\", the last \"%s\"", csv->path,
                       csv->line_number, ps_text_plain(time_column).text, ps_text_plain(csv->names[0]).text,
                       ps_text_plain(csv->names[csv->columns - 1]).text);
    }
    return PS_OK;
}

/* Known once the first row is there: whether the first column holds times, and so how many channels there are. */
static enum ps_status settle_columns(struct csv *csv)
{
    int64_t seconds;
    if (csv->time_at == NO_COLUMN && read_date(csv->field[0], &seconds)) {
        csv->time_at = 0;
    }
    csv->channels = (int64_t)csv->columns - (csv->time_at != NO_COLUMN);
    if (csv->channels == 0) {
        return ps_fail(PS_DATA, "%s: has a time column and no channel", csv->path);
    }
    for (size_t i = 0; i < csv->columns; i++) {
        if (i != csv->time_at && csv->names[i][0] == '\0') {
            return ps_fail(PS_DATA, "%s:1: column %zu has no name: name it in the header, or remove a column that only counts",
                           csv->path, i + 1);
        }
    }
    return PS_OK;
}

static enum ps_status grow_rows(struct csv *csv)
{
    if (csv->rows < csv->rows_room) {
        return PS_OK;
    }
    int64_t room = csv->rows_room > 0 ? 2 * csv->rows_room : 1024, count;
    if (__builtin_mul_overflow(room, csv->channels, &count) || count > INT64_MAX / (int64_t)sizeof(float)) {
        return out_of_memory(csv);
    }
    float *values = realloc(csv->values, (size_t)count * sizeof *values);
    if (values != NULL) {
        csv->values = values;
    }
    int64_t *time = realloc(csv->time, (size_t)room * sizeof *time);
    if (time != NULL) {
        csv->time = time;
    }
    if (values == NULL || time == NULL) {
        return out_of_memory(csv);
    }
    csv->rows_room = room;
    return PS_OK;
}

static enum ps_status read_value(const struct csv *csv, size_t column, float *value)
{
    const char *text = csv->field[column], *wrong = NULL;
    double number = 0;
    if (text[0] == '\0') {
        wrong = "the value is missing: fill it";
    } else if (!read_number(csv, text, &number)) {
        wrong = "is not a number";
    } else if (!isfinite((float)number)) {
        wrong = "is not finite in float32: fill or cut such rows";
    }
    if (wrong != NULL) {
        return ps_fail(PS_DATA, "%s:%" PRId64 ": column %zu (%s): \"%s\" %s", csv->path, csv->line_number, column + 1,
                       ps_text_plain(csv->names[column]).text, ps_text_plain(text).text, wrong);
    }
    *value = (float)number;
    return PS_OK;
}

/* Windows are cut by rows, so each row must follow the one before in time. */
static enum ps_status read_time(struct csv *csv, size_t column)
{
    const char *text = csv->field[column];
    int64_t *time = csv->time + csv->rows;
    if (!read_date(text, time)) {
        return ps_fail(PS_DATA,
                       "%s:%" PRId64 ": column %zu (%s): \"%s\" is not a date such as 2016-07-01 00:00:00, "
                       "2016-07-01T00:00 or 2016/07/01",
                       csv->path, csv->line_number, column + 1, ps_text_plain(csv->names[column]).text, ps_text_plain(text).text);
    }
    if (csv->rows > 0 && time[0] <= time[-1]) {
        return ps_fail(PS_DATA,
                       "%s:%" PRId64 ": column %zu (%s): \"%s\" is not later than \"%s\" on the line before: sort the rows, "
                       "oldest first, and keep each time once",
                       csv->path, csv->line_number, column + 1, ps_text_plain(csv->names[column]).text, ps_text_plain(text).text,
                       csv->time_before.text);
    }
    csv->time_before = ps_text_plain(text);
    return PS_OK;
}

static enum ps_status read_row(struct csv *csv)
{
    PS_TRY(split_line(csv));
    if (csv->fields != csv->columns) {
        return ps_fail(PS_DATA, "%s:%" PRId64 ": has %zu fields, and the header has %zu (from \"%s\" to \"%s\")", csv->path,
                       csv->line_number, csv->fields, csv->columns, ps_text_plain(csv->names[0]).text,
                       ps_text_plain(csv->names[csv->columns - 1]).text);
    }
    if (csv->rows == 0) {
        PS_TRY(settle_columns(csv));
    }
    PS_TRY(grow_rows(csv));
    float *row = csv->values + csv->rows * csv->channels;
    for (size_t i = 0; i < csv->columns; i++) {
        if (i != csv->time_at) {
            PS_TRY(read_value(csv, i, row++));
        } else {
            PS_TRY(read_time(csv, i));
        }
    }
    csv->rows++;
    return PS_OK;
}

static enum ps_status read_csv(struct csv *csv, const char *time_column)
{
    csv->file = fopen(csv->path, "re");
    if (csv->file == NULL) {
        return ps_fail(PS_DATA, "%s: cannot be opened: %s", csv->path, strerror(errno));
    }
    csv->c = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (csv->c == (locale_t)0) {
        return out_of_memory(csv);
    }
    PS_TRY(read_header(csv, time_column));
    for (;;) {
        int more;
        PS_TRY(read_line(csv, &more));
        if (!more) {
            break;
        }
        PS_TRY(read_row(csv));
    }
    if (csv->rows == 0) {
        return ps_fail(PS_DATA, "%s: has a header and no rows", csv->path);
    }
    return PS_OK;
}

/* "1h", "15min", "1d", "10s" when all steps are equal; otherwise "". */
static void deduce_period(const struct csv *csv, char text[32])
{
    text[0] = '\0';
    if (csv->time_at == NO_COLUMN || csv->rows < 2) {
        return;
    }
    int64_t step = csv->time[1] - csv->time[0];
    for (int64_t i = 1; i < csv->rows; i++) {
        if (csv->time[i] - csv->time[i - 1] != step) {
            return;
        }
    }
    static const struct {
        int64_t seconds;
        const char *name;
    } units[] = {{86400, "d"}, {3600, "h"}, {60, "min"}, {1, "s"}};
    int u = 0;
    while (step % units[u].seconds != 0) {
        u++;
    }
    snprintf(text, 32, "%" PRId64 "%s", step / units[u].seconds, units[u].name);
}

/* The names without the time column's. */
static void drop_time_name(struct csv *csv)
{
    if (csv->time_at != NO_COLUMN) {
        free(csv->names[csv->time_at]);
        memmove(csv->names + csv->time_at, csv->names + csv->time_at + 1, (csv->columns - csv->time_at - 1) * sizeof *csv->names);
        csv->columns--;
    }
}

static void csv_free(struct csv *csv)
{
    for (size_t i = 0; csv->names != NULL && i < csv->columns; i++) {
        free(csv->names[i]);
    }
    free(csv->names);
    free(csv->field);
    free(csv->line);
    free(csv->values);
    free(csv->time);
    if (csv->c != (locale_t)0) {
        freelocale(csv->c);
    }
    if (csv->file != NULL) {
        fclose(csv->file);
    }
}

enum ps_status ps_import_csv(const char *csv_path, const char *path, const char *time_column, struct ps_imported *imported)
{
    struct csv csv = {.path = csv_path, .time_at = NO_COLUMN};
    enum ps_status status = read_csv(&csv, time_column);
    if (status == PS_OK) {
        struct ps_imported done = {.rows = csv.rows, .channels = csv.channels};
        const char *slash = strrchr(csv_path, '/');
        deduce_period(&csv, done.period);
        drop_time_name(&csv);
        status = ps_series_write(path, csv.values, csv.rows, csv.channels, csv.names, csv.time_at != NO_COLUMN ? csv.time : NULL,
                                 done.period[0] != '\0' ? done.period : NULL, slash != NULL ? slash + 1 : csv_path);
        if (imported != NULL) {
            *imported = done;
        }
    }
    csv_free(&csv);
    return status;
}
