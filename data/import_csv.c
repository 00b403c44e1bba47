#include <ctype.h>
#include <inttypes.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/csv.h"
#include "data/dates.h"
#include "data/import.h"
#include "data/steps.h"
#include "data/text.h"

#define NO_COLUMN SIZE_MAX

#define A_PANEL                                                                                  \
    "this looks like a panel of series (many series in one file, a row for each time of each), " \
    "and what is read is one row for each time, with a column for each channel; --panel ID,TIME,VALUE reads the other"

enum { MOST_LOOKED_AHEAD = 1 << 20 }; /* rows */

/* How the column of times is written. */
enum time_form { AS_DATE, AS_FORMAT, AS_UNIX };

struct table {
    const struct ps_import_options *options;
    struct ps_csv csv;
    locale_t c; /* numbers have a point, whatever the program's locale */

    char **names; /* of the columns, from the header */
    size_t columns;
    size_t time_at; /* column of the times, or NO_COLUMN */
    enum time_form time_form;
    int rises; /* the first column is a channel, and each of its numbers so far reads as a later time than the one before */
    const char *rises_as; /* the format of these times; NULL: Unix time */

    float *values;               /* [rows, channels] */
    int64_t *time;               /* [rows] */
    struct ps_plain time_before; /* the last row's, as it is written */
    int64_t rows, rows_room, channels;

    /* Cells without a value, which are NaN in values. */
    unsigned char *lacks; /* [channels]: whether there are any */
    int64_t missing, missing_channels, missing_line;
    size_t missing_column;
    struct ps_plain missing_text; /* line, column and text: of the first one */
};

static enum ps_status out_of_memory(const struct table *t)
{
    return ps_fail(PS_DATA, "%s:%" PRId64 ": out of host memory", t->csv.path, t->csv.line_number);
}

static int read_number(const struct table *t, char *text, double *value)
{
    return ps_csv_number(text, t->options->decimal_comma, t->c, value);
}

/* Digits on both sides of one comma, a sign before them and an exponent behind them or none. */
static int has_decimal_comma(const char *text)
{
    static const char digits[] = "0123456789";
    text += *text == '-' || *text == '+';
    size_t before = strspn(text, digits);
    if (before == 0 || text[before] != ',') {
        return 0;
    }
    text += before + 1;
    size_t after = strspn(text, digits);
    return after > 0 && strspn(text + after, "eE+-0123456789") == strlen(text + after);
}

/* Why a field that holds no number does not; room: for the text of those that name the delimiter. */
static const char *no_number(const struct table *t, const char *text, char room[256])
{
    int64_t seconds;
    if (t->options->decimal_comma) {
        return "is not a number, written with a decimal comma as --decimal-comma says";
    }
    if (has_decimal_comma(text)) {
        snprintf(room, 256,
                 "is not a number, but may be one with a decimal comma, where fields are cut at %s: --decimal-comma reads it",
                 ps_csv_cut_at(&t->csv));
        return room;
    }
    if (t->time_at == NO_COLUMN && ps_date_read(text, &seconds)) {
        return "is not a number, but a date: --time-column takes its column as the times";
    }
    if (t->time_at == NO_COLUMN && ps_date_suspected(text)) {
        return "is not a number, nor a date such as " PS_DATE_FORMS
               ": --time-format (with --time-column, unless it is the first) reads other forms, such as %m/%d/%Y %H:%M";
    }
    if (strpbrk(text, ",;\t|") != NULL) {
        snprintf(room, 256, "is not a number: fields are cut at %s, and at others with --delimiter", ps_csv_cut_at(&t->csv));
        return room;
    }
    return "is not a number";
}

/* A header of numbers is data without a header, unless it counts 0, 1, 2, ... as tables without names are written. */
static int header_is_data(const struct table *t)
{
    int64_t seconds;
    double value;
    int counts = 1;
    for (size_t i = 0; i < t->csv.fields; i++) {
        if (ps_date_read(t->csv.field[i], &seconds)) {
            return 1;
        }
        if (!read_number(t, t->csv.field[i], &value)) {
            return 0;
        }
        counts &= value == (double)i;
    }
    return !counts;
}

static enum ps_status read_header(struct table *t)
{
    const char *time_column = t->options->time_column;
    int more;
    PS_TRY(ps_csv_read(&t->csv, &more));
    if (!more) {
        return ps_fail(PS_DATA, "%s: is empty: expected a header line and rows of numbers", t->csv.path);
    }
    if (header_is_data(t)) {
        return ps_fail(PS_DATA, "%s:%" PRId64 ": the first line must name the columns, and it holds values (\"%s\")", t->csv.path,
                       t->csv.line_number, ps_text_plain(t->csv.field[0]).text);
    }
    t->names = calloc(t->csv.fields, sizeof *t->names);
    if (t->names == NULL) {
        return out_of_memory(t);
    }
    t->columns = t->csv.fields;
    t->time_at = NO_COLUMN;
    for (size_t i = 0; i < t->columns; i++) {
        t->names[i] = strdup(t->csv.field[i]);
        if (t->names[i] == NULL) {
            return out_of_memory(t);
        }
        if (time_column != NULL && t->time_at == NO_COLUMN && strcmp(time_column, t->names[i]) == 0) {
            t->time_at = i;
        }
    }
    if (time_column != NULL && t->time_at == NO_COLUMN) {
        return ps_fail(PS_DATA, "%s:%" PRId64 ": no column is named \"%s\": the first is \"%s\", the last \"%s\"", t->csv.path,
                       t->csv.line_number, ps_text_plain(time_column).text, ps_text_plain(t->names[0]).text,
                       ps_text_plain(t->names[t->columns - 1]).text);
    }
    return PS_OK;
}

/* Unix time, unless its digits are as well those of a date. */
static int is_unix(const char *text)
{
    int64_t seconds;
    return ps_date_compact(text) == NULL && ps_date_read_unix(text, &seconds) != 0;
}

/* Known once the first row is there: which column holds times, how they are written, and how many channels there are. */
static enum ps_status settle_columns(struct table *t)
{
    int64_t seconds;
    int formatted = t->options->time_format != NULL;
    if (t->time_at == NO_COLUMN && (formatted || ps_date_read(t->csv.field[0], &seconds))) {
        t->time_at = 0;
    }
    if (t->time_at != NO_COLUMN) {
        t->time_form = formatted ? AS_FORMAT : is_unix(t->csv.field[t->time_at]) ? AS_UNIX : AS_DATE;
    }
    t->rises = t->time_at == NO_COLUMN;
    t->channels = (int64_t)t->columns - (t->time_at != NO_COLUMN);
    if (t->channels == 0) {
        return ps_fail(PS_DATA, "%s: has a time column and no channel", t->csv.path);
    }
    t->lacks = calloc((size_t)t->channels, 1);
    if (t->lacks == NULL) {
        return out_of_memory(t);
    }
    for (size_t i = 0; i < t->columns; i++) {
        if (i != t->time_at && t->names[i][0] == '\0') {
            return ps_fail(PS_DATA, "%s:1: column %zu has no name: name it in the header, or remove a column that only counts",
                           t->csv.path, i + 1);
        }
    }
    return PS_OK;
}

static enum ps_status grow_rows(struct table *t)
{
    if (t->rows < t->rows_room) {
        return PS_OK;
    }
    int64_t room = t->rows_room > 0 ? 2 * t->rows_room : 1024, count;
    if (__builtin_mul_overflow(room, t->channels, &count) || count > INT64_MAX / (int64_t)sizeof(float)) {
        return out_of_memory(t);
    }
    float *values = realloc(t->values, (size_t)count * sizeof *values);
    if (values != NULL) {
        t->values = values;
    }
    int64_t *time = realloc(t->time, (size_t)room * sizeof *time);
    if (time != NULL) {
        t->time = time;
    }
    if (values == NULL || time == NULL) {
        return out_of_memory(t);
    }
    t->rows_room = room;
    return PS_OK;
}

static int convert_time(const struct table *t, const char *text, int64_t *time)
{
    return t->time_form == AS_FORMAT ? ps_date_read_as(t->options->time_format, text, time)
           : t->time_form == AS_UNIX ? ps_date_read_unix(text, time) == 1
                                     : ps_date_read(text, time);
}

/* Whether the rows behind one whose time and whose value of column `id` are these go on as a panel does: values of that column come
 * again, and where they change the time is no later. It was `first` in the file's first row. The current line is lost. */
static int goes_on_as_panel(struct table *t, size_t time_at, size_t id, int64_t time, struct ps_plain value, struct ps_plain first)
{
    int again = 0, back = 0;
    for (int i = 0; i < MOST_LOOKED_AHEAD && !(again && back); i++) {
        int more;
        int64_t next;
        if (ps_csv_read(&t->csv, &more) != PS_OK || !more || t->csv.fields != t->columns ||
            !convert_time(t, t->csv.field[time_at], &next)) {
            return 0;
        }
        struct ps_plain now = ps_text_plain(t->csv.field[id]);
        int changed = strcmp(now.text, value.text) != 0;
        again |= !changed || strcmp(now.text, first.text) == 0;
        back |= changed && next <= time;
        value = now;
        time = next;
    }
    return again && back;
}

/* Text in the first row: does it name one series of a panel? The current line is lost. */
static int text_names_series(struct table *t, size_t id)
{
    size_t time_at = t->time_at;
    int64_t time;
    if (t->rows > 0 || ps_date_read(t->csv.field[id], &time)) {
        return 0;
    }
    for (size_t i = 0; time_at == NO_COLUMN && i < t->columns; i++) {
        time_at = ps_date_read(t->csv.field[i], &time) ? i : NO_COLUMN;
    }
    if (time_at == NO_COLUMN || !convert_time(t, t->csv.field[time_at], &time)) {
        return 0;
    }
    struct ps_plain first = ps_text_plain(t->csv.field[id]);
    return goes_on_as_panel(t, time_at, id, time, first, first);
}

/* A column of whole numbers that changes for the first time in the current row, whose time is not later than the one before: does
 * it name series of a panel? NO_COLUMN: there is none. The current line is lost. */
static size_t number_names_series(struct table *t)
{
    const int64_t last = t->rows - 1;
    for (size_t i = 0; i < t->columns; i++) {
        int64_t channel = (int64_t)i - (i > t->time_at), row = last;
        double number;
        float before = i != t->time_at ? t->values[last * t->channels + channel] : NAN;
        if (isnan(before) || before != floorf(before) || !read_number(t, t->csv.field[i], &number) || number != floor(number) ||
            number == before) {
            continue;
        }
        while (row > 0 && t->values[(row - 1) * t->channels + channel] == before) {
            row--;
        }
        if (row > 0) {
            continue;
        }
        if (last > 0) {
            return i;
        }
        struct ps_plain first;
        snprintf(first.text, sizeof first.text, "%.0f", before);
        int64_t time = t->time[t->rows];
        return time == t->time[last] && goes_on_as_panel(t, t->time_at, i, time, ps_text_plain(t->csv.field[i]), first) ? i
                                                                                                                        : NO_COLUMN;
    }
    return NO_COLUMN;
}

/* A cell's error, behind its place. */
static enum ps_status fail_at(const struct table *t, int64_t line_number, size_t column, struct ps_plain text, const char *wrong)
{
    return ps_fail(PS_DATA, "%s:%" PRId64 ": column %zu (%s): \"%s\" %s", t->csv.path, line_number, column + 1,
                   ps_text_plain(t->names[column]).text, text.text, wrong);
}

static void note_missing(struct table *t, size_t column, int64_t channel)
{
    if (t->missing++ == 0) {
        t->missing_line = t->csv.line_number;
        t->missing_column = column;
        t->missing_text = ps_text_plain(t->csv.field[column]);
    }
    t->missing_channels += !t->lacks[channel];
    t->lacks[channel] = 1;
}

/* What is wrong with a value that is no number, or none that is kept. */
static enum ps_status fail_value(struct table *t, size_t column, int is_number)
{
    struct ps_plain text = ps_text_plain(t->csv.field[column]);
    int64_t line_number = t->csv.line_number;
    char room[256];
    const char *wrong = is_number ? "is not finite in float32: fill or cut such rows" : no_number(t, t->csv.field[column], room);
    if (!is_number && text_names_series(t, column)) {
        wrong = "is not a number: " A_PANEL;
    }
    return fail_at(t, line_number, column, text, wrong);
}

static enum ps_status read_value(struct table *t, size_t column, int64_t channel)
{
    double number;
    int is_number = read_number(t, t->csv.field[column], &number);
    if (!is_number || !isfinite((float)number)) {
        if (!ps_missing_text(t->csv.field[column])) {
            return fail_value(t, column, is_number);
        }
        note_missing(t, column, channel);
        number = NAN;
    }
    t->values[t->rows * t->channels + channel] = (float)number;
    return PS_OK;
}

/* Whether the first column, which is a channel, still looks like times. */
static void watch_first_column(struct table *t, const char *text)
{
    int64_t *time = t->time + t->rows;
    t->rises_as = ps_date_compact(text);
    int read = t->rises_as != NULL ? ps_date_read_as(t->rises_as, text, time) : ps_date_read_unix(text, time);
    t->rises = read != 0 && (t->rows == 0 || time[0] > time[-1] || (read < 0 && time[0] == time[-1]));
}

/* What is wrong with a time that was not read as the first one is. */
static enum ps_status fail_time(const struct table *t, size_t column, const char *text)
{
    char wrong[512];
    const char *compact = ps_date_compact(text);
    int64_t seconds;
    if (t->time_form == AS_FORMAT) {
        snprintf(wrong, sizeof wrong, "is not a time of the form \"%s\" that --time-format says",
                 ps_text_plain(t->options->time_format).text);
    } else if (t->time_form == AS_UNIX && ps_date_read_unix(text, &seconds) < 0) {
        snprintf(wrong, sizeof wrong, "lies within a second: times are kept in whole seconds");
    } else if (t->time_form == AS_UNIX) {
        snprintf(wrong, sizeof wrong, "is not Unix time, as the first row's is");
    } else {
        snprintf(wrong, sizeof wrong,
                 "is not a date such as %s, with an offset such as Z or +01:00 if any, nor Unix time: "
                 "--time-format reads another form, such as %s",
                 PS_DATE_FORMS, compact != NULL ? compact : "%m/%d/%Y %H:%M");
    }
    return fail_at(t, t->csv.line_number, column, ps_text_plain(text), wrong);
}

static enum ps_status fail_order(struct table *t, size_t column)
{
    struct ps_plain time = ps_text_plain(t->csv.field[column]);
    int64_t line_number = t->csv.line_number;
    size_t series = number_names_series(t);
    char remedy[512] = ": sort the rows, oldest first, and keep each time once";
    if (series != NO_COLUMN) {
        snprintf(remedy, sizeof remedy, ", where column %zu (%s) changes: " A_PANEL, series + 1,
                 ps_text_plain(t->names[series]).text);
    }
    return ps_fail(PS_DATA, "%s:%" PRId64 ": column %zu (%s): \"%s\" is not later than \"%s\" on the line before%s", t->csv.path,
                   line_number, column + 1, ps_text_plain(t->names[column]).text, time.text, t->time_before.text, remedy);
}

/* Windows are cut by rows, so each row must follow the one before in time. */
static enum ps_status read_time(struct table *t, size_t column)
{
    const char *text = t->csv.field[column];
    int64_t *time = t->time + t->rows;
    if (!convert_time(t, text, time)) {
        return fail_time(t, column, text);
    }
    if (t->rows > 0 && time[0] <= time[-1]) {
        return fail_order(t, column);
    }
    t->time_before = ps_text_plain(text);
    return PS_OK;
}

static enum ps_status read_row(struct table *t)
{
    if (t->csv.fields != t->columns) {
        return ps_fail(
            PS_DATA,
            "%s:%" PRId64
            ": has %zu fields, and the header has %zu (from \"%s\" to \"%s\"): they are cut at %s, and at others with --delimiter",
            t->csv.path, t->csv.line_number, t->csv.fields, t->columns, ps_text_plain(t->names[0]).text,
            ps_text_plain(t->names[t->columns - 1]).text, ps_csv_cut_at(&t->csv));
    }
    if (t->rows == 0) {
        PS_TRY(settle_columns(t));
    }
    PS_TRY(grow_rows(t));
    int64_t channel = 0;
    for (size_t i = 0; i < t->columns; i++) {
        if (i != t->time_at) {
            PS_TRY(read_value(t, i, channel++));
        } else {
            PS_TRY(read_time(t, i));
        }
    }
    if (t->rises) {
        watch_first_column(t, t->csv.field[0]);
    }
    t->rows++;
    return PS_OK;
}

static enum ps_status read_csv(struct table *t, const char *path)
{
    if (t->options->time_format != NULL) {
        PS_TRY(ps_date_check_format(t->options->time_format));
    }
    PS_TRY(ps_csv_open(&t->csv, path, t->options->delimiter));
    t->c = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (t->c == (locale_t)0) {
        return out_of_memory(t);
    }
    PS_TRY(read_header(t));
    for (;;) {
        int more;
        PS_TRY(ps_csv_read(&t->csv, &more));
        if (!more) {
            break;
        }
        PS_TRY(read_row(t));
    }
    if (t->rows == 0) {
        return ps_fail(PS_DATA, "%s: has a header and no rows", t->csv.path);
    }
    return PS_OK;
}

static enum ps_status fail_step(const struct table *t, const struct ps_steps *steps)
{
    int64_t row = steps->irregular_at, before = t->time[row - 1], time = t->time[row];
    int64_t missing = ps_steps_missing(steps, before, time);
    char remedy[96] = "make the steps equal";
    if (missing > 0) {
        snprintf(remedy, sizeof remedy, "%" PRId64 " %s missing there: put %s in", missing, missing == 1 ? "row is" : "rows are",
                 missing == 1 ? "it" : "them");
    }
    /* The header is line 1, and each row a line. */
    return ps_fail(PS_DATA,
                   "%s:%" PRId64 ": column %zu (%s): %s is %s after %s on the line before, and %" PRId64 " of %" PRId64
                   " steps are %s: %s, or take the rows as they stand with --allow-gaps",
                   t->csv.path, row + 2, t->time_at + 1, ps_text_plain(t->names[t->time_at]).text, ps_date_text(time).text,
                   ps_seconds_text(time - before).text, ps_date_text(before).text, steps->count, t->rows - 1,
                   ps_steps_text(steps).text, remedy);
}

/* Windows are cut by rows, so each row must follow the one before by the same step, or whoever imports knows that some do not. */
static enum ps_status check_steps(const struct table *t, struct ps_imported *done)
{
    if (t->time_at == NO_COLUMN || t->rows < 2) {
        return PS_OK;
    }
    struct ps_steps steps;
    if (!ps_steps_find(t->time, t->rows, &steps)) {
        return out_of_memory(t);
    }
    if (steps.irregular_at > 0 && !t->options->allow_gaps) {
        return fail_step(t, &steps);
    }
    snprintf(done->period, sizeof done->period, "%s", ps_steps_text(&steps).text);
    done->gaps = t->rows - 1 - steps.count;
    return PS_OK;
}

static enum ps_status fill_missing(struct table *t)
{
    if (t->missing > 0 && t->options->fill == PS_FILL_NONE) {
        return ps_fail(PS_DATA,
                       "%s:%" PRId64 ": column %zu (%s): \"%s\" is a missing value, the first of %" PRId64 " in %" PRId64
                       " columns: fill them with --fill previous or --fill linear, or keep them as NaN with --fill nan",
                       t->csv.path, t->missing_line, t->missing_column + 1, ps_text_plain(t->names[t->missing_column]).text,
                       t->missing_text.text, t->missing, t->missing_channels);
    }
    if (t->missing == t->rows * t->channels) {
        return ps_fail(PS_DATA, "%s: holds no value: each of its %" PRId64 " is missing", t->csv.path, t->missing);
    }
    for (int64_t i = 0; i < t->channels && t->options->fill != PS_FILL_NAN; i++) {
        if (t->lacks[i] &&
            !ps_missing_fill(t->values, t->rows, t->channels, i, t->time_at != NO_COLUMN ? t->time : NULL, t->options->fill)) {
            size_t column = (size_t)i + (t->time_at != NO_COLUMN && (size_t)i >= t->time_at);
            return ps_fail(PS_DATA, "%s: column %zu (%s) holds no value in any row: remove it", t->csv.path, column + 1,
                           ps_text_plain(t->names[column]).text);
        }
    }
    return PS_OK;
}

/* Times that became a channel, in one line. */
static void warn_of_times(const struct table *t, char warning[512])
{
    if (t->rises && t->rows > 1) {
        const struct ps_plain name = ps_text_plain(t->names[0]);
        int n = snprintf(warning, 512, "%s: column 1 (%s) rises as times do and was taken as a channel: ", t->csv.path, name.text);
        if (n < 512 && t->rises_as != NULL) {
            snprintf(warning + n, 512 - (size_t)n, "--time-format %s reads it as the times", t->rises_as);
        } else if (n < 512) {
            snprintf(warning + n, 512 - (size_t)n, "--time-column %s reads it as Unix seconds, or milliseconds by its size",
                     name.text);
        }
    }
}

/* The names without the time column's. */
static void drop_time_name(struct table *t)
{
    if (t->time_at != NO_COLUMN) {
        free(t->names[t->time_at]);
        memmove(t->names + t->time_at, t->names + t->time_at + 1, (t->columns - t->time_at - 1) * sizeof *t->names);
        t->columns--;
    }
}

static void table_free(struct table *t)
{
    for (size_t i = 0; t->names != NULL && i < t->columns; i++) {
        free(t->names[i]);
    }
    free(t->names);
    free(t->values);
    free(t->time);
    free(t->lacks);
    if (t->c != (locale_t)0) {
        freelocale(t->c);
    }
    ps_csv_close(&t->csv);
}

/* What was read, checked and written. */
static enum ps_status write_series(struct table *t, const char *path, struct ps_imported *done)
{
    PS_TRY(check_steps(t, done));
    PS_TRY(fill_missing(t));
    warn_of_times(t, done->warning);
    drop_time_name(t);
    const char *slash = strrchr(t->csv.path, '/');
    return ps_series_write(path, t->values, t->rows, t->channels, t->names, t->time_at != NO_COLUMN ? t->time : NULL,
                           done->period[0] != '\0' && done->gaps == 0 ? done->period : NULL,
                           slash != NULL ? slash + 1 : t->csv.path);
}

enum ps_status ps_import_csv(const char *csv_path, const char *path, const struct ps_import_options *options,
                             struct ps_imported *imported)
{
    static const struct ps_import_options defaults;
    struct table table = {.options = options != NULL ? options : &defaults, .time_at = NO_COLUMN};
    enum ps_status status = read_csv(&table, csv_path);
    if (status == PS_OK) {
        struct ps_imported done = {.rows = table.rows,
                                   .channels = table.channels,
                                   .cut_at = ps_csv_cut_at(&table.csv),
                                   .filled = table.missing,
                                   .filled_channels = table.missing_channels};
        status = write_series(&table, path, &done);
        if (imported != NULL) {
            *imported = done;
        }
    }
    table_free(&table);
    return status;
}
