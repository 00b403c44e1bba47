#include "data/panel.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/dates.h"
#include "data/hdf5_util.h"
#include "data/text.h"

static enum ps_status out_of_memory(const struct ps_storage *storage, const char *name)
{
    return ps_fail(storage->failure, "%s: no memory for %s", storage->path, name);
}

/* Opens /name, of rank 1. *count: its size. */
static enum ps_status open_list(const struct ps_storage *storage, const char *name, int trying, hid_t *dataset, int64_t *count)
{
    if (H5Lexists(storage->file, name + 1, H5P_DEFAULT) <= 0) {
        return ps_fail(storage->failure, "%s: has /values without %s: a panel needs /values, /offsets, /ids and /start",
                       storage->path, name);
    }
    PS_TRY(ps_storage_open(storage, name, dataset));
    hid_t space PS_HDF5_SCOPED = H5Dget_space(*dataset);
    hsize_t size = 0;
    if (H5Sget_simple_extent_ndims(space) != 1 || H5Sget_simple_extent_dims(space, &size, NULL) != 1 || size < 1 ||
        size > INT32_MAX) {
        return ps_fail(storage->failure, "%s: %s must be a list of 1 to %d", storage->path, name, INT32_MAX);
    }
    *count = (int64_t)size;
    PS_TRY(ps_storage_check(storage, name, *dataset));
    return trying ? ps_storage_try(storage, name, *dataset) : PS_OK;
}

/* *values is malloc'ed. */
static enum ps_status read_integers(const struct ps_storage *storage, const char *name, int trying, int64_t **values,
                                    int64_t *count)
{
    hid_t dataset PS_HDF5_SCOPED = H5I_INVALID_HID;
    PS_TRY(open_list(storage, name, trying, &dataset, count));
    hid_t type PS_HDF5_SCOPED = H5Dget_type(dataset);
    if (H5Tget_class(type) != H5T_INTEGER || H5Tget_size(type) > sizeof(int64_t)) {
        return ps_fail(storage->failure, "%s: %s must be int64", storage->path, name);
    }
    *values = malloc((size_t)*count * sizeof **values);
    if (*values == NULL) {
        return out_of_memory(storage, name);
    }
    return H5Dread(dataset, H5T_NATIVE_INT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, *values) >= 0
               ? PS_OK
               : ps_fail(storage->failure, "%s: %s cannot be read: %s", storage->path, name, ps_hdf5_reason().text);
}

/* Keeps n texts, of fixed size or each behind a pointer. */
static enum ps_status keep_ids(const struct ps_storage *storage, const char *texts, int64_t n, size_t size, int variable,
                               struct ps_panel *p)
{
    for (int pass = 0; pass < 2; pass++) {
        int64_t used = 0;
        for (int64_t i = 0; i < n; i++) {
            const char *text = ps_hdf5_text_at(texts, i, size, variable);
            size_t bytes = strlen(text) + 1;
            if (pass == 1) {
                memcpy(p->ids + used, text, bytes);
                p->id_at[i] = used;
            }
            used += (int64_t)bytes;
        }
        if (pass == 0) {
            p->ids_bytes = used;
            p->ids = malloc((size_t)used);
            p->id_at = malloc((size_t)n * sizeof *p->id_at);
            if (p->ids == NULL || p->id_at == NULL) {
                return out_of_memory(storage, "/ids");
            }
        }
    }
    return PS_OK;
}

/* HDF5 converts neither between fixed and variable length nor between character sets: both are taken as they are. */
static enum ps_status read_ids(const struct ps_storage *storage, int trying, struct ps_panel *p)
{
    hid_t dataset PS_HDF5_SCOPED = H5I_INVALID_HID;
    int64_t n = 0;
    PS_TRY(open_list(storage, "/ids", trying, &dataset, &n));
    hid_t type PS_HDF5_SCOPED = H5Dget_type(dataset), space PS_HDF5_SCOPED = H5Dget_space(dataset);
    if (n != p->series || H5Tget_class(type) != H5T_STRING) {
        return ps_fail(storage->failure, "%s: /ids must be %" PRId64 " texts, one for each series, as /offsets has them",
                       storage->path, p->series);
    }
    hid_t memory PS_HDF5_SCOPED = H5Tcopy(H5T_C_S1);
    int variable = H5Tis_variable_str(type) > 0;
    size_t size = variable ? sizeof(char *) : H5Tget_size(type) + 1, bytes;
    H5Tset_cset(memory, H5Tget_cset(type));
    H5Tset_size(memory, variable ? H5T_VARIABLE : size);
    char *texts = __builtin_mul_overflow((size_t)n, size, &bytes) || bytes > SIZE_MAX / 2 ? NULL : calloc((size_t)n, size);
    if (texts == NULL) {
        return out_of_memory(storage, "/ids");
    }
    enum ps_status status = PS_OK;
    int was_read = H5Dread(dataset, memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, texts) >= 0;
    if (was_read) {
        status = keep_ids(storage, texts, n, size, variable, p);
    } else {
        status = ps_fail(storage->failure, "%s: /ids cannot be read: %s", storage->path, ps_hdf5_reason().text);
    }
    if (variable && was_read) {
        H5Dvlen_reclaim(memory, space, H5P_DEFAULT, texts);
    }
    free(texts);
    return status;
}

static enum ps_status read_frequency(const struct ps_storage *storage, hid_t values, struct ps_panel *p)
{
    static const char expected[] = "expected one text, the time from a row to the next: \"15min\", \"1h\", \"1d\", \"1mo\"";
    if (H5Aexists(values, "frequency") <= 0) {
        return ps_fail(storage->failure, "%s: /values has no attribute frequency: %s", storage->path, expected);
    }
    hid_t attribute PS_HDF5_SCOPED = H5Aopen(values, "frequency", H5P_DEFAULT);
    hid_t type PS_HDF5_SCOPED = H5Aget_type(attribute), space PS_HDF5_SCOPED = H5Aget_space(attribute);
    hid_t memory PS_HDF5_SCOPED = H5Tcopy(H5T_C_S1);
    int variable = H5Tis_variable_str(type) > 0;
    char fixed[sizeof p->frequency + 1] = "", *text = NULL; /* a byte more than is read */
    H5Tset_cset(memory, H5Tget_cset(type));
    H5Tset_size(memory, variable ? H5T_VARIABLE : sizeof p->frequency);
    int was_read = H5Tget_class(type) == H5T_STRING && H5Sget_simple_extent_npoints(space) == 1 &&
                   H5Aread(attribute, memory, variable ? (void *)&text : fixed) >= 0;
    snprintf(p->frequency, sizeof p->frequency, "%s", text != NULL ? text : fixed);
    if (variable && was_read) {
        H5Dvlen_reclaim(memory, space, H5P_DEFAULT, &text);
    }
    if (!was_read || !ps_steps_read(p->frequency, &p->step)) {
        return ps_fail(storage->failure, "%s: attribute frequency of /values is \"%s\": %s", storage->path,
                       ps_text_plain(p->frequency).text, expected);
    }
    return PS_OK;
}

static enum ps_status check_offsets(const struct ps_storage *storage, const struct ps_panel *p, int64_t rows)
{
    if (p->offsets[0] != 0 || p->offsets[p->series] != rows) {
        return ps_fail(storage->failure,
                       "%s: /offsets go from %" PRId64 " to %" PRId64 ": expected 0 to %" PRId64 ", the rows of /values",
                       storage->path, p->offsets[0], p->offsets[p->series], rows);
    }
    for (int64_t i = 0; i < p->series; i++) {
        if (p->offsets[i + 1] <= p->offsets[i]) {
            return ps_fail(storage->failure,
                           "%s: /offsets of series %" PRId64 " (counted from 0) go from %" PRId64 " to %" PRId64
                           ": each series has one row at least",
                           storage->path, i, p->offsets[i], p->offsets[i + 1]);
        }
        if (p->offsets[i + 1] > rows) {
            return ps_fail(storage->failure,
                           "%s: /offsets of series %" PRId64 " (counted from 0) end at %" PRId64 ": /values has %" PRId64 " rows",
                           storage->path, i, p->offsets[i + 1], rows);
        }
    }
    return PS_OK;
}

int64_t ps_panel_outside(const struct ps_panel *p)
{
    for (int64_t i = 0; i < p->series; i++) {
        if (!ps_date_in_range(p->start[i]) ||
            p->offsets[i + 1] - p->offsets[i] > ps_panel_steps(&p->step, p->start[i], PS_TIME_LATEST)) {
            return i;
        }
    }
    return -1;
}

static enum ps_status check_starts(const struct ps_storage *storage, const struct ps_panel *p)
{
    int64_t i = ps_panel_outside(p);
    return i < 0 ? PS_OK
                 : ps_fail(storage->failure,
                           "%s: /start of series %" PRId64 " (counted from 0) is %" PRId64 ", and it has %" PRId64
                           " rows of %s: expected seconds since 1970, UTC, and an end before the year 10000",
                           storage->path, i, p->start[i], p->offsets[i + 1] - p->offsets[i], p->frequency);
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static enum ps_status check_ids(const struct ps_storage *storage, const struct ps_panel *p)
{
    const char **id = malloc((size_t)p->series * sizeof *id);
    if (id == NULL) {
        return out_of_memory(storage, "/ids");
    }
    for (int64_t i = 0; i < p->series; i++) {
        id[i] = ps_panel_id(p, i);
    }
    qsort(id, (size_t)p->series, sizeof *id, by_text);
    enum ps_status status = PS_OK;
    for (int64_t i = 1; i < p->series && status == PS_OK; i++) {
        if (strcmp(id[i - 1], id[i]) == 0) {
            status = ps_fail(storage->failure, "%s: /ids names two series \"%s\"", storage->path, ps_text_plain(id[i]).text);
        }
    }
    free(id);
    return status;
}

static enum ps_status read_panel(const struct ps_storage *storage, hid_t values, int64_t rows, int trying, struct ps_panel *p)
{
    int64_t n = 0;
    PS_TRY(read_frequency(storage, values, p));
    PS_TRY(read_integers(storage, "/offsets", trying, &p->offsets, &n));
    p->series = n - 1;
    if (p->series < 1) {
        return ps_fail(storage->failure, "%s: /offsets must be [series + 1], for one series at least", storage->path);
    }
    PS_TRY(check_offsets(storage, p, rows));
    PS_TRY(read_integers(storage, "/start", trying, &p->start, &n));
    if (n != p->series) {
        return ps_fail(storage->failure, "%s: /start has %" PRId64 " times, and /offsets %" PRId64 " series", storage->path, n,
                       p->series);
    }
    PS_TRY(check_starts(storage, p));
    PS_TRY(read_ids(storage, trying, p));
    return check_ids(storage, p);
}

enum ps_status ps_panel_open(const struct ps_storage *storage, hid_t values, int64_t rows, int trying, struct ps_panel **panel)
{
    struct ps_panel *p = calloc(1, sizeof *p);
    *panel = NULL;
    if (p == NULL) {
        return out_of_memory(storage, "/offsets");
    }
    enum ps_status status = read_panel(storage, values, rows, trying, p);
    if (status != PS_OK) {
        ps_panel_close(p);
        return status;
    }
    *panel = p;
    return PS_OK;
}

void ps_panel_close(struct ps_panel *p)
{
    if (p == NULL) {
        return;
    }
    free(p->offsets);
    free(p->start);
    free(p->id_at);
    free(p->ids);
    free(p);
}

int64_t ps_panel_bytes(const struct ps_panel *p)
{
    enum { NUMBERS = 3 + (PS_SPLITS + 1) * 2 + 2 + 2 }; /* here, of the runs, of the rows fitted on, of the scaler; 8 bytes each */
    return p->series * (NUMBERS * (int64_t)sizeof(int64_t) + 1) + p->ids_bytes;
}

const char *ps_panel_id(const struct ps_panel *p, int64_t series)
{
    return p->ids + p->id_at[series];
}

int64_t ps_panel_series(const struct ps_panel *p, int64_t row)
{
    int64_t low = 0;
    for (int64_t high = p->series; high - low > 1;) {
        int64_t middle = low + (high - low) / 2;
        if (p->offsets[middle] <= row) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

static struct ps_civil civil_of(int64_t time)
{
    enum { DAY = 86400 };
    return ps_date_civil(time / DAY - (time % DAY < 0));
}

int64_t ps_panel_after(const struct ps_steps *step, int64_t start, int64_t n)
{
    struct ps_steps from_start = *step;
    if (step->months > 0) {
        struct ps_civil civil = civil_of(start);
        from_start.day = civil.day == civil.days_of_month ? 31 : civil.day;
    }
    return ps_steps_after(&from_start, start, n);
}

int64_t ps_panel_steps(const struct ps_steps *step, int64_t start, int64_t time)
{
    if (step->months == 0) {
        const int64_t between = time - start;
        return between / step->seconds - (between % step->seconds < 0);
    }
    const struct ps_civil from = civil_of(start), to = civil_of(time);
    const int64_t months = 12 * (to.year - from.year) + to.month - from.month;
    const int64_t n = months / step->months - (months % step->months < 0);
    return n - (ps_panel_after(step, start, n) > time);
}

int64_t ps_panel_row(const struct ps_panel *p, int64_t series, int64_t time)
{
    const int64_t row = ps_panel_steps(&p->step, p->start[series], time);
    return row >= 0 && row < p->offsets[series + 1] - p->offsets[series] && ps_panel_time(p, series, row) == time ? row : -1;
}

int64_t ps_panel_time(const struct ps_panel *p, int64_t series, int64_t row)
{
    return ps_panel_after(&p->step, p->start[series], row);
}

struct ps_panel_names ps_panel_some(const struct ps_panel *p, const char *which)
{
    enum { FEW = 3 };
    struct ps_panel_names names = {""};
    int found = 0;
    for (int64_t i = 0; i < p->series && found <= FEW; i++) {
        if (which[i]) {
            size_t used = strlen(names.text);
            const char *between = found > 0 ? ", " : "";
            if (found++ == FEW) {
                snprintf(names.text + used, sizeof names.text - used, ", ...");
            } else {
                snprintf(names.text + used, sizeof names.text - used, "%s\"%s\"", between, ps_text_plain(ps_panel_id(p, i)).text);
            }
        }
    }
    return names;
}
