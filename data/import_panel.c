/* A CSV of many series, a row for each time of each, to a panel. It is read twice: the first time for how long each series is and
 * when it begins, the second time for the values, each to its place; so what is held is the values, 4 bytes each, and a few tens
 * of bytes a series. */
#include <inttypes.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/csv.h"
#include "data/dates.h"
#include "data/import.h"
#include "data/panel.h"
#include "data/text.h"

enum { ID, TIME, VALUE, COLUMNS };
enum {
    MOST_FILLED = 1 << 20 /* rows, of a few that lie far apart */,
    LONGEST_ID = 255,
    MOST_STEPS = 4096,
    DAY = 86400,
    SHORTEST_MONTH = 28 * DAY
};

/* One series, while the file is read. */
struct entry {
    int64_t first, last; /* times */
    int64_t before;      /* time of its row that was read last */
    int64_t rows;        /* in the file */
    int64_t id_at;
};

/* How often each distance between rows of a series came, in a table with places found by hashing; 0: a free place. */
struct counts {
    int64_t step[MOST_STEPS], count[MOST_STEPS];
    int64_t used;
    int64_t all, divisor; /* how many there were; of all of them, the greatest common one */
};

struct reader {
    const char *path;
    const struct ps_import_options *options;
    struct ps_csv csv;
    locale_t c;
    struct ps_plain name[COLUMNS];
    size_t at[COLUMNS], columns; /* in the file */
    int is_unix;                 /* times are Unix time, as the first row's is */

    struct entry *entry;
    int64_t series, series_room;
    char *ids;
    int64_t ids_bytes, ids_room;
    int32_t *place; /* by the name's hash: a series + 1; 0: free */
    int64_t places;
    int64_t now; /* the series of the current line */

    struct counts seconds, months;
    int64_t rows, missing; /* of the file; values that are missing */

    struct ps_panel panel; /* what is written */
    float *values;
    unsigned char *seen; /* a bit for each row */
};

static enum ps_status out_of_memory(const struct reader *r)
{
    return ps_fail(PS_DATA, "%s: out of host memory for %" PRId64 " series of %" PRId64 " rows in all", r->path, r->series,
                   r->panel.offsets != NULL ? r->panel.offsets[r->series] : r->rows);
}

/* A cell's error, behind its place. */
static enum ps_status fail_at(const struct reader *r, int column, const char *wrong)
{
    return ps_fail(PS_DATA, "%s:%" PRId64 ": column %zu (%s): \"%s\" %s", r->path, r->csv.line_number, r->at[column] + 1,
                   r->name[column].text, ps_text_plain(r->csv.field[r->at[column]]).text, wrong);
}

/* ---- columns ---- */

/* The three names of --panel among the header's. */
static enum ps_status find_columns(struct reader *r, const char *names)
{
    const char *at = names;
    for (int i = 0; i < COLUMNS; i++) {
        size_t length = strcspn(at, ",");
        char name[64];
        if (length == 0 || length >= sizeof name || (at[length] == ',') != (i < COLUMNS - 1)) {
            return ps_fail(PS_USAGE, "--panel is \"%s\": expected three columns' names, ID,TIME,VALUE", ps_text_plain(names).text);
        }
        snprintf(name, sizeof name, "%.*s", (int)length, at);
        r->name[i] = ps_text_plain(name);
        for (r->at[i] = 0; r->at[i] < r->columns && strcmp(r->csv.field[r->at[i]], name) != 0; r->at[i]++) {
        }
        if (r->at[i] == r->columns) {
            return ps_fail(PS_DATA, "%s:%" PRId64 ": no column is named \"%s\": the first is \"%s\", the last \"%s\"", r->path,
                           r->csv.line_number, r->name[i].text, ps_text_plain(r->csv.field[0]).text,
                           ps_text_plain(r->csv.field[r->columns - 1]).text);
        }
        at += length + 1;
    }
    if (r->at[ID] == r->at[TIME] || r->at[TIME] == r->at[VALUE] || r->at[ID] == r->at[VALUE]) {
        return ps_fail(PS_USAGE, "--panel is \"%s\": expected three different columns", ps_text_plain(names).text);
    }
    return PS_OK;
}

static enum ps_status open_csv(struct reader *r, const char *names)
{
    int more;
    ps_csv_close(&r->csv);
    PS_TRY(ps_csv_open(&r->csv, r->path, r->options->delimiter));
    PS_TRY(ps_csv_read(&r->csv, &more));
    if (!more) {
        return ps_fail(PS_DATA, "%s: is empty: expected a header line and rows", r->path);
    }
    r->columns = r->csv.fields;
    return find_columns(r, names);
}

/* ---- series by name ---- */

static uint64_t hash_of(const char *text)
{
    uint64_t h = 0xcbf29ce484222325u; /* FNV-1a */
    for (; *text != '\0'; text++) {
        h = (h ^ (unsigned char)*text) * 0x100000001b3u;
    }
    return h ^ h >> 29;
}

/* Where a name stands in the table, or would. */
static int64_t place_of(const struct reader *r, const char *id)
{
    int64_t p = (int64_t)(hash_of(id) & (uint64_t)(r->places - 1));
    while (r->place[p] != 0 && strcmp(r->ids + r->entry[r->place[p] - 1].id_at, id) != 0) {
        p = (p + 1) & (r->places - 1);
    }
    return p;
}

static int grow_table(struct reader *r)
{
    int64_t places = r->places > 0 ? 2 * r->places : 1 << 12;
    int32_t *place = calloc((size_t)places, sizeof *place);
    if (place == NULL) {
        return 0;
    }
    free(r->place);
    r->place = place;
    r->places = places;
    for (int64_t i = 0; i < r->series; i++) {
        r->place[place_of(r, r->ids + r->entry[i].id_at)] = (int32_t)(i + 1);
    }
    return 1;
}

/* The array, with room for `needed` elements; NULL: no memory, and it is as it was. */
static void *grown(void *array, int64_t *room, int64_t needed, size_t size)
{
    if (needed <= *room) {
        return array;
    }
    int64_t more = 2 * needed > 4096 ? 2 * needed : 4096;
    void *larger = realloc(array, (size_t)more * size);
    *room = larger != NULL ? more : *room;
    return larger;
}

static enum ps_status add_series(struct reader *r, const char *id)
{
    int64_t bytes = (int64_t)strlen(id) + 1;
    if (bytes == 1 || bytes > LONGEST_ID + 1) {
        return fail_at(r, ID, bytes == 1 ? "names no series" : "is longer than 255 bytes");
    }
    if (r->series == INT32_MAX - 1) {
        return fail_at(r, ID, "is one series too many");
    }
    void *entries = grown(r->entry, &r->series_room, r->series + 1, sizeof *r->entry);
    r->entry = entries != NULL ? entries : r->entry;
    void *ids = grown(r->ids, &r->ids_room, r->ids_bytes + bytes, 1);
    r->ids = ids != NULL ? ids : r->ids;
    if (entries == NULL || ids == NULL || (2 * (r->series + 1) > r->places && !grow_table(r))) {
        return out_of_memory(r);
    }
    memcpy(r->ids + r->ids_bytes, id, (size_t)bytes);
    r->entry[r->series] = (struct entry){.id_at = r->ids_bytes};
    r->ids_bytes += bytes;
    r->place[place_of(r, id)] = (int32_t)(r->series + 1);
    r->now = r->series++;
    return PS_OK;
}

/* r->now: the series of this line; -1: a new one. */
static void find_series(struct reader *r, const char *id)
{
    if (r->now >= 0 && strcmp(r->ids + r->entry[r->now].id_at, id) == 0) {
        return; /* as on the line before */
    }
    r->now = r->places > 0 ? r->place[place_of(r, id)] - 1 : -1;
}

/* ---- cells ---- */

static enum ps_status read_time(struct reader *r, int64_t *time)
{
    const char *text = r->csv.field[r->at[TIME]];
    const char *format = r->options->time_format;
    if (r->rows == 0) {
        r->is_unix = format == NULL && !ps_date_read(text, time);
    }
    int read = format != NULL ? ps_date_read_as(format, text, time)
               : r->is_unix   ? ps_date_read_unix(text, time)
                              : ps_date_read(text, time);
    return read == 1 ? PS_OK
                     : fail_at(r, TIME,
                               format != NULL              ? "is not a time of the form that --time-format says"
                               : r->rows > 0 && r->is_unix ? "is not Unix time in whole seconds, as the first row's is"
                                                           : "is not a date such as " PS_DATE_FORMS
                                                             ", nor Unix time in whole seconds: --time-format reads another form");
}

/* Whether the value is missing, without reading it where it begins as numbers do. */
static int is_missing(const char *text)
{
    return strchr("0123456789+-.", text[0] != '\0' ? text[0] : 'x') == NULL && ps_missing_text(text);
}

/* *value stays as it is where there is none. */
static enum ps_status read_value(const struct reader *r, float *value)
{
    char *text = r->csv.field[r->at[VALUE]];
    double number;
    if (is_missing(text)) {
        return PS_OK;
    }
    if (!ps_csv_number(text, r->options->decimal_comma, r->c, &number)) {
        return fail_at(r, VALUE, "is not a number");
    }
    *value = (float)number;
    return isfinite(*value) ? PS_OK : fail_at(r, VALUE, "is not finite in float32: fill or cut such rows");
}

static enum ps_status next_row(struct reader *r, int *more)
{
    PS_TRY(ps_csv_read(&r->csv, more));
    if (*more && r->csv.fields != r->columns) {
        return ps_fail(PS_DATA,
                       "%s:%" PRId64 ": has %zu fields, and the header has %zu: they are cut at %s, and at others with --delimiter",
                       r->path, r->csv.line_number, r->csv.fields, r->columns, ps_csv_cut_at(&r->csv));
    }
    return PS_OK;
}

/* ---- the first time: lengths, starts, the step ---- */

/* b may be 0. */
static int64_t common_divisor(int64_t a, int64_t b)
{
    while (b != 0) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static void count(struct counts *c, int64_t step)
{
    c->all++;
    if (c->divisor == 0 || step % c->divisor != 0) {
        c->divisor = common_divisor(step, c->divisor);
    }
    uint64_t p = (uint64_t)step * 0x9e3779b97f4a7c15u >> 52; /* of MOST_STEPS */
    while (c->step[p] != 0 && c->step[p] != step) {
        p = (p + 1) % MOST_STEPS;
    }
    if (c->step[p] == 0 && c->used < MOST_STEPS / 2) { /* what is common comes early */
        c->step[p] = step;
        c->used++;
    }
    c->count[p] += c->step[p] == step;
}

/* The most common, the shortest of several. */
static int64_t most_common(const struct counts *c, int64_t *times)
{
    int64_t best = 0;
    *times = 0;
    for (int i = 0; i < MOST_STEPS; i++) {
        if (c->count[i] > *times || (c->count[i] == *times && c->count[i] > 0 && c->step[i] < best)) {
            best = c->step[i];
            *times = c->count[i];
        }
    }
    return best;
}

/* Months of the calendar from one time to a later one; not whole ones, perhaps. */
static int64_t months_between(int64_t from, int64_t to)
{
    struct ps_civil a = ps_date_civil(from / DAY - (from % DAY < 0)), b = ps_date_civil(to / DAY - (to % DAY < 0));
    return 12 * (b.year - a.year) + b.month - a.month;
}

static void count_step(struct reader *r, int64_t a, int64_t b)
{
    int64_t from = a < b ? a : b, to = a < b ? b : a;
    count(&r->seconds, to - from);
    if (to - from >= SHORTEST_MONTH) {
        const struct ps_steps month = {.months = 1};
        int64_t months = months_between(from, to);
        if (months > 0 && ps_panel_after(&month, from, months) == to) {
            count(&r->months, months);
        }
    }
}

static enum ps_status fail_twice(const struct reader *r)
{
    char wrong[384];
    snprintf(wrong, sizeof wrong, "is there twice for series \"%s\": keep each time of a series once",
             ps_text_plain(r->csv.field[r->at[ID]]).text);
    return fail_at(r, TIME, wrong);
}

static enum ps_status measure_row(struct reader *r)
{
    const char *id = r->csv.field[r->at[ID]];
    int64_t time;
    PS_TRY(read_time(r, &time));
    find_series(r, id);
    if (r->now < 0) {
        PS_TRY(add_series(r, id));
    }
    struct entry *e = &r->entry[r->now];
    if (e->rows == 0) {
        e->first = e->last = time;
    } else if (time == e->before) {
        return fail_twice(r);
    } else {
        count_step(r, e->before, time);
        e->first = time < e->first ? time : e->first;
        e->last = time > e->last ? time : e->last;
    }
    e->before = time;
    e->rows++;
    r->rows++;
    r->missing += is_missing(r->csv.field[r->at[VALUE]]);
    return PS_OK;
}

static enum ps_status measure(struct reader *r)
{
    for (int more = 1; more;) {
        PS_TRY(next_row(r, &more));
        if (more) {
            PS_TRY(measure_row(r));
        }
    }
    return r->rows > 0 ? PS_OK : ps_fail(PS_DATA, "%s: has a header and no rows", r->path);
}

/* Rows of all series at that step; INT64_MAX: too many. */
static int64_t rows_at(const struct reader *r, int64_t seconds)
{
    int64_t rows = 0;
    for (int64_t i = 0; i < r->series && rows < INT64_MAX; i++) {
        rows = __builtin_add_overflow(rows, (r->entry[i].last - r->entry[i].first) / seconds + 1, &rows) ? INT64_MAX : rows;
    }
    return rows;
}

/* The step of all series: the most common distance between rows that follow each other in the file, where they are in order but
 * for a few. Where it does not divide all distances, as when rows come in no order, the greatest that does, unless half as many
 * rows as there are would be missing then: a few times are wrong, and are named later. */
static enum ps_status find_step(struct reader *r)
{
    int64_t times, month_times, seconds = most_common(&r->seconds, &times), months = most_common(&r->months, &month_times);
    struct ps_panel *p = &r->panel;
    if (seconds == 0) {
        return ps_fail(PS_DATA, "%s: no series has two rows: the step between times is not known", r->path);
    }
    if (seconds >= SHORTEST_MONTH && month_times >= times) {
        p->step = (struct ps_steps){.months = r->months.all == r->seconds.all ? r->months.divisor : months};
    } else {
        int wanted = r->seconds.divisor != seconds && rows_at(r, r->seconds.divisor) - r->rows < r->rows / 2;
        p->step = (struct ps_steps){.seconds = wanted ? r->seconds.divisor : seconds};
    }
    snprintf(p->frequency, sizeof p->frequency, "%s", ps_steps_text(&p->step).text);
    return ps_steps_read(p->frequency, &p->step)
               ? PS_OK
               : ps_fail(PS_DATA, "%s: the most common step between times of a series is %s: expected a million units at most",
                         r->path, p->frequency);
}

static enum ps_status lay_out(struct reader *r, int64_t *with_gaps)
{
    struct ps_panel *p = &r->panel;
    size_t n = (size_t)r->series;
    p->series = r->series;
    p->ids = r->ids;
    p->offsets = malloc((n + 1) * sizeof *p->offsets);
    p->start = malloc(n * sizeof *p->start);
    p->id_at = malloc(n * sizeof *p->id_at);
    if (p->offsets == NULL || p->start == NULL || p->id_at == NULL) {
        return out_of_memory(r);
    }
    *with_gaps = 0;
    p->offsets[0] = 0;
    for (int64_t i = 0; i < r->series; i++) {
        const struct entry *e = &r->entry[i];
        int64_t rows = ps_panel_steps(&p->step, e->first, e->last) + 1;
        p->start[i] = e->first;
        p->id_at[i] = e->id_at;
        p->offsets[i + 1] = p->offsets[i] + rows;
        *with_gaps += rows > e->rows;
        if (p->offsets[i + 1] > INT32_MAX) {
            return ps_fail(PS_DATA, "%s: at a step of %s its series have more than %d rows, series \"%s\" alone %" PRId64, r->path,
                           p->frequency, INT32_MAX, ps_text_plain(r->ids + e->id_at).text, rows);
        }
    }
    int64_t late = ps_panel_outside(p);
    return late < 0
               ? PS_OK
               : ps_fail(PS_DATA, "%s: at a step of %s the row behind the last of series \"%s\", %s, is after the year 9999",
                         r->path, p->frequency, ps_text_plain(ps_panel_id(p, late)).text, ps_date_text(r->entry[late].last).text);
}

/* ---- the second time: values ---- */

static enum ps_status place_row(struct reader *r)
{
    int64_t time;
    float value = NAN;
    PS_TRY(read_time(r, &time));
    PS_TRY(read_value(r, &value));
    find_series(r, r->csv.field[r->at[ID]]);
    const struct ps_panel *p = &r->panel;
    if (r->now < 0 || time < r->entry[r->now].first || time > r->entry[r->now].last) {
        return ps_fail(PS_DATA, "%s:%" PRId64 ": changed while it was being read", r->path, r->csv.line_number);
    }
    int64_t row = ps_panel_row(p, r->now, time);
    if (row < 0) {
        char wrong[384];
        snprintf(wrong, sizeof wrong, "is no whole number of steps of %s behind %s, the first time of series \"%s\"", p->frequency,
                 ps_date_text(r->entry[r->now].first).text, ps_text_plain(ps_panel_id(p, r->now)).text);
        return fail_at(r, TIME, wrong);
    }
    row += p->offsets[r->now];
    if (r->seen[row / 8] >> row % 8 & 1) {
        return fail_twice(r);
    }
    r->seen[row / 8] |= (unsigned char)(1 << row % 8);
    r->values[row] = value;
    return PS_OK;
}

static enum ps_status place_values(struct reader *r)
{
    int64_t rows = r->panel.offsets[r->series];
    r->values = malloc((size_t)rows * sizeof *r->values);
    r->seen = calloc((size_t)rows / 8 + 1, 1);
    if (r->values == NULL || r->seen == NULL) {
        return out_of_memory(r);
    }
    for (int64_t i = 0; i < rows; i++) {
        r->values[i] = NAN;
    }
    for (int more = 1; more;) {
        PS_TRY(next_row(r, &more));
        if (more) {
            PS_TRY(place_row(r));
        }
    }
    return PS_OK;
}

static enum ps_status fill_gaps(struct reader *r)
{
    for (int64_t i = 0; i < r->series && r->options->fill != PS_FILL_NAN; i++) {
        int64_t begin = r->panel.offsets[i], rows = r->panel.offsets[i + 1] - begin;
        if (!ps_missing_fill(r->values + begin, rows, 1, 0, NULL, r->options->fill)) {
            return ps_fail(PS_DATA, "%s: series \"%s\" holds no value in any row: leave it out", r->path,
                           ps_text_plain(ps_panel_id(&r->panel, i)).text);
        }
    }
    return PS_OK;
}

static enum ps_status import(struct reader *r, const char *path, const char *names, struct ps_panel_imported *done)
{
    if (r->options->time_format != NULL) {
        PS_TRY(ps_date_check_format(r->options->time_format));
    }
    r->c = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (r->c == (locale_t)0) {
        return out_of_memory(r);
    }
    PS_TRY(open_csv(r, names));
    PS_TRY(measure(r));
    PS_TRY(find_step(r));
    PS_TRY(lay_out(r, &done->with_gaps));
    done->series = r->series;
    done->rows = r->panel.offsets[r->series];
    done->gaps = done->rows > r->rows ? done->rows - r->rows : 0;
    done->missing = r->missing;
    if (done->gaps > MOST_FILLED && done->gaps / 100 > r->rows) {
        return ps_fail(PS_DATA,
                       "%s: %" PRId64 " rows are missing between others, at a step of %s, and %" PRId64
                       " are there: are times of a series wrong, or of another step?",
                       r->path, done->gaps, r->panel.frequency, r->rows);
    }
    snprintf(done->period, sizeof done->period, "%s", r->panel.frequency);
    if (done->gaps + done->missing > 0 && r->options->fill == PS_FILL_NONE) {
        return ps_fail(PS_DATA,
                       "%s: %" PRId64 " rows are missing between others in %" PRId64 " of %" PRId64
                       " series, at a step of %s, and %" PRId64 " values in %" PRId64
                       " rows: fill them with --fill previous or --fill linear, or keep them as NaN with --fill nan",
                       r->path, done->gaps, done->with_gaps, r->series, done->period, r->missing, r->rows);
    }
    if (r->missing == r->rows) {
        return ps_fail(PS_DATA, "%s: holds no value: each of its %" PRId64 " is missing", r->path, r->missing);
    }
    r->now = -1;
    PS_TRY(open_csv(r, names));
    PS_TRY(place_values(r));
    PS_TRY(fill_gaps(r));
    const char *slash = strrchr(r->path, '/');
    return ps_panel_write(path, &r->panel, r->values, slash != NULL ? slash + 1 : r->path);
}

enum ps_status ps_import_panel(const char *csv, const char *path, const char *columns, const struct ps_import_options *options,
                               struct ps_panel_imported *imported)
{
    struct reader *r = calloc(1, sizeof *r);
    *imported = (struct ps_panel_imported){0};
    if (r == NULL) {
        return ps_fail(PS_DATA, "%s: out of host memory", csv);
    }
    r->path = csv;
    r->options = options;
    r->now = -1;
    enum ps_status status = import(r, path, columns, imported);
    ps_csv_close(&r->csv);
    if (r->c != (locale_t)0) {
        freelocale(r->c);
    }
    free(r->entry);
    free(r->ids);
    free(r->place);
    free(r->panel.offsets);
    free(r->panel.start);
    free(r->panel.id_at);
    free(r->values);
    free(r->seen);
    free(r);
    return status;
}
