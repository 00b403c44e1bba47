#include "data/times.h"

#include <hdf5.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "data/hdf5_util.h"
#include "data/probe.h"
#include "data/storage.h"

/* ---- the calendar ---- */

static struct tm broken_down(int64_t seconds)
{
    struct tm date = {0};
    time_t t = (time_t)seconds;
    gmtime_r(&t, &date);
    return date;
}

static int days_of_month(int year, int month)
{
    static const int days[12] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
    int leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
    return days[month] + (month == 1 && leap);
}

static int is_last_day(const struct tm *date)
{
    return date->tm_mday == days_of_month(date->tm_year + 1900, date->tm_mon);
}

static int64_t months_after(int64_t from, int64_t months)
{
    struct tm date = broken_down(from);
    const int last = is_last_day(&date);
    int64_t month = (int64_t)date.tm_year * 12 + date.tm_mon + months;
    date.tm_year = (int)(month / 12);
    date.tm_mon = (int)(month % 12);
    const int days = days_of_month(date.tm_year + 1900, date.tm_mon);
    date.tm_mday = last || date.tm_mday > days ? days : date.tm_mday;
    return (int64_t)timegm(&date);
}

int64_t ps_time_after(const struct ps_times *times, int64_t from, int64_t n)
{
    return times->months ? months_after(from, n * times->months) : from + n * times->seconds;
}

struct ps_time_text ps_time_text(int64_t seconds)
{
    struct ps_time_text text;
    struct tm date = broken_down(seconds);
    strftime(text.text, sizeof text.text, "%Y-%m-%d %H:%M:%S", &date);
    return text;
}

int ps_time_parse(const char *text, int64_t *seconds)
{
    struct tm date = {0};
    char between = ' ';
    int used = 0, fields;
    fields = sscanf(text, "%4d-%2d-%2d%n%c%2d:%2d%n:%2d%n", &date.tm_year, &date.tm_mon, &date.tm_mday, &used, &between,
                    &date.tm_hour, &date.tm_min, &used, &date.tm_sec, &used);
    if ((fields != 3 && fields != 6 && fields != 7) || text[used] || (between != ' ' && between != 'T') || date.tm_mon < 1 ||
        date.tm_mon > 12 || date.tm_mday < 1 || date.tm_mday > days_of_month(date.tm_year, date.tm_mon - 1) || date.tm_hour < 0 ||
        date.tm_hour > 23 || date.tm_min < 0 || date.tm_min > 59 || date.tm_sec < 0 || date.tm_sec > 60) {
        return 0;
    }
    date.tm_year -= 1900;
    date.tm_mon -= 1;
    *seconds = (int64_t)timegm(&date);
    return 1;
}

/* ---- reading ---- */

/* Opens /time and checks it, but for its values. *dataset stays invalid where the file has none. */
static enum ps_status open_times(const struct ps_storage *storage, int64_t rows, hid_t *dataset)
{
    if (H5Lexists(storage->file, "time", H5P_DEFAULT) <= 0) {
        return PS_OK;
    }
    PS_TRY(ps_storage_open(storage, "/time", dataset));
    hid_t space PS_HDF5_SCOPED = H5Dget_space(*dataset), type PS_HDF5_SCOPED = H5Dget_type(*dataset);
    hsize_t size = 0;
    if (H5Sget_simple_extent_ndims(space) != 1 || H5Sget_simple_extent_dims(space, &size, NULL) != 1 || (int64_t)size != rows) {
        return ps_fail(PS_DATA, "%s: /time must be [rows] with a time for each of the %" PRId64 " rows of /series", storage->path,
                       rows);
    }
    if (H5Tget_class(type) != H5T_INTEGER || H5Tget_size(type) > sizeof(int64_t)) {
        return ps_fail(PS_DATA, "%s: /time must be int64: seconds since 1970, UTC", storage->path);
    }
    return ps_storage_check(storage, "/time", *dataset);
}

struct request {
    const char *path;
    int64_t rows, bytes;
    int64_t *to; /* NULL: only looked at */
    int *found;
};

static enum ps_status with_file(const struct request *r)
{
    hid_t dataset PS_HDF5_SCOPED = H5I_INVALID_HID, file PS_HDF5_SCOPED = H5Fopen(r->path, H5F_ACC_RDONLY, H5P_DEFAULT);
    if (file < 0) {
        return ps_fail(PS_DATA, "%s: cannot be opened as HDF5: %s", r->path, ps_hdf5_reason().text);
    }
    const struct ps_storage storage = {.path = r->path, .failure = PS_DATA, .file = file, .bytes = r->bytes};
    PS_TRY(open_times(&storage, r->rows, &dataset));
    if (dataset < 0) {
        return PS_OK;
    }
    if (!r->to) {
        return ps_storage_try(&storage, "/time", dataset);
    }
    *r->found = 1;
    return H5Dread(dataset, H5T_NATIVE_INT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, r->to) >= 0
               ? PS_OK
               : ps_fail(PS_DATA, "%s: /time cannot be read: %s", r->path, ps_hdf5_reason().text);
}

static enum ps_status look(const void *request)
{
    return with_file(request);
}

/* Years 1 to 9999, which a date has room for. */
static const int64_t earliest = -62135596800, latest = 253402300799;

static enum ps_status check_times(const char *path, const struct ps_times *times)
{
    for (int64_t i = 0; i < times->rows; i++) {
        if (times->time[i] < earliest || times->time[i] > latest) {
            return ps_fail(PS_DATA, "%s: /time of row %" PRId64 " is %" PRId64 ": expected seconds since 1970, UTC", path, i,
                           times->time[i]);
        }
        if (i > 0 && times->time[i] <= times->time[i - 1]) {
            return ps_fail(PS_DATA, "%s: /time of row %" PRId64 " (counted from 0) is %s, not after %s of the row before", path, i,
                           ps_time_text(times->time[i]).text, ps_time_text(times->time[i - 1]).text);
        }
    }
    return PS_OK;
}

static int ascending(const void *a, const void *b)
{
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

enum { LAST_ROWS = 1000 }; /* that the step is taken from */

/* Whether the last rows follow one another by the same whole months, which have from 28 to 366 days; 0: they do not. */
static int64_t step_of_months(const int64_t *time, int64_t rows)
{
    struct tm first = broken_down(time[0]), second = broken_down(time[1]);
    int64_t months = (int64_t)(second.tm_year - first.tm_year) * 12 + second.tm_mon - first.tm_mon;
    for (int64_t i = 1; i < rows && months > 0; i++) {
        months = months_after(time[i - 1], months) == time[i] ? months : 0;
    }
    return months;
}

static void find_step(struct ps_times *times)
{
    int64_t rows = times->rows < LAST_ROWS ? times->rows : LAST_ROWS, differences[LAST_ROWS], most = 0;
    const int64_t *time = times->time + times->rows - rows;
    if (rows < 2) {
        return;
    }
    for (int64_t i = 1; i < rows; i++) {
        differences[i - 1] = time[i] - time[i - 1];
    }
    qsort(differences, (size_t)rows - 1, sizeof *differences, ascending);
    for (int64_t i = 0, run = 0; i < rows - 1; i++) {
        run = i > 0 && differences[i] == differences[i - 1] ? run + 1 : 1;
        if (run > most) {
            most = run;
            times->seconds = differences[i];
        }
    }
    if (most < rows - 1 && times->seconds >= 28 * 86400) {
        times->months = step_of_months(time, rows);
    }
}

enum ps_status ps_times_read(const char *path, int64_t rows, struct ps_times *times)
{
    *times = (struct ps_times){.rows = rows};
    struct stat st;
    if (stat(path, &st) != 0) {
        return ps_fail(PS_DATA, "%s: went away while it was being read", path);
    }
    int found = 0;
    struct request request = {.path = path, .rows = rows, .bytes = st.st_size, .found = &found};
    PS_TRY(ps_probe(PS_DATA, path, ps_probe_seconds(st.st_size), look, &request));
    times->time = malloc((size_t)rows * sizeof *times->time);
    if (!times->time) {
        return ps_fail(PS_DATA, "%s: no memory for the times of %" PRId64 " rows", path, rows);
    }
    request.to = times->time;
    enum ps_status status = with_file(&request);
    if (status == PS_OK && found) {
        status = check_times(path, times);
    }
    if (status != PS_OK || !found) {
        ps_times_free(times);
        return status;
    }
    find_step(times);
    return PS_OK;
}

void ps_times_free(struct ps_times *times)
{
    free(times->time);
    times->time = NULL;
}
