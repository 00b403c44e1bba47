#include <inttypes.h>

#include "data/hdf5_util.h"
#include "data/import.h"

static enum ps_status write_contents(struct ps_hdf5_output *out, const float *values, int64_t rows, int64_t channels,
                                     char *const *names, const int64_t *time, const char *frequency, const char *source)
{
    hid_t series PS_HDF5_SCOPED = H5I_INVALID_HID, times PS_HDF5_SCOPED = H5I_INVALID_HID;
    hsize_t size[2] = {(hsize_t)rows, (hsize_t)channels};
    PS_TRY(ps_hdf5_create_rows(out, "/series", H5T_NATIVE_FLOAT, 2, size, &series));
    PS_TRY(ps_hdf5_write_rows(out, "/series", series, 0, size[0], values));
    if (names != NULL) {
        PS_TRY(ps_hdf5_write_texts(out, series, "channels", names, size[1]));
    }
    if (frequency != NULL) {
        PS_TRY(ps_hdf5_write_text(out, series, "frequency", frequency));
    }
    if (source != NULL) {
        PS_TRY(ps_hdf5_write_text(out, series, "source", source));
    }
    if (time != NULL) {
        PS_TRY(ps_hdf5_create_rows(out, "/time", H5T_NATIVE_INT64, 1, size, &times));
        PS_TRY(ps_hdf5_write_rows(out, "/time", times, 0, size[0], time));
    }
    return PS_OK;
}

enum ps_status ps_series_write(const char *path, const float *values, int64_t rows, int64_t channels, char *const *names,
                               const int64_t *time, const char *frequency, const char *source)
{
    /* A row must fit a chunk, which HDF5 limits to 4 GiB. */
    if (rows < 1 || rows > INT32_MAX || channels < 1 || channels > 1 << 28) {
        return ps_fail(PS_DATA,
                       "%s: a series of %" PRId64 " rows and %" PRId64 " channels cannot be written: expected 1 to %d and 1 to %d",
                       path, rows, channels, INT32_MAX, 1 << 28);
    }
    struct ps_hdf5_output out;
    PS_TRY(ps_hdf5_create(path, &out));
    return ps_hdf5_finish(&out, write_contents(&out, values, rows, channels, names, time, frequency, source));
}
