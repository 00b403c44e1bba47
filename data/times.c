#include "data/times.h"

#include <hdf5.h>
#include <inttypes.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "data/dates.h"
#include "data/hdf5_util.h"
#include "data/probe.h"
#include "data/storage.h"

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

static enum ps_status check_times(const char *path, const struct ps_times *times)
{
    for (int64_t i = 0; i < times->rows; i++) {
        if (!ps_date_in_range(times->time[i])) {
            return ps_fail(PS_DATA, "%s: /time of row %" PRId64 " is %" PRId64 ": expected seconds since 1970, UTC", path, i,
                           times->time[i]);
        }
        if (i > 0 && times->time[i] <= times->time[i - 1]) {
            return ps_fail(PS_DATA, "%s: /time of row %" PRId64 " (counted from 0) is %s, not after %s of the row before", path, i,
                           ps_date_text(times->time[i]).text, ps_date_text(times->time[i - 1]).text);
        }
    }
    return PS_OK;
}

enum ps_status ps_times_read(const char *path, int64_t rows, struct ps_times *times)
{
    *times = (struct ps_times){.rows = rows};
    struct stat st;
    if (rows < 2) {
        return PS_OK; /* no step leads on from one */
    }
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
    if (!ps_steps_find(times->time, rows, &times->steps)) {
        ps_times_free(times);
        return ps_fail(PS_DATA, "%s: no memory for the steps of %" PRId64 " rows", path, rows);
    }
    return PS_OK;
}

void ps_times_free(struct ps_times *times)
{
    free(times->time);
    times->time = NULL;
}
