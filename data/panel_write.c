#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "data/hdf5_util.h"
#include "data/panel.h"

/* A list that lies in one piece: rows of any series are read without those around them. */
static enum ps_status write_list(const struct ps_hdf5_output *out, const char *name, hid_t type, int64_t count, const void *values,
                                 hid_t *dataset)
{
    hsize_t size = (hsize_t)count;
    hid_t space PS_HDF5_SCOPED = H5Screate_simple(1, &size, NULL), creation PS_HDF5_SCOPED = H5Pcreate(H5P_DATASET_CREATE);
    int ok = space >= 0 && creation >= 0 && H5Pset_obj_track_times(creation, 0) >= 0;
    *dataset = ok ? H5Dcreate2(out->file, name, type, space, H5P_DEFAULT, creation, H5P_DEFAULT) : H5I_INVALID_HID;
    if (*dataset < 0) {
        return ps_fail(PS_DATA, "%s: %s cannot be created: %s", out->path, name, ps_hdf5_reason().text);
    }
    return ps_hdf5_write_rows(out, name, *dataset, 0, size, values);
}

/* Texts of fixed length, the longest one's, which hold no zero byte of their own. */
static enum ps_status write_ids(const struct ps_hdf5_output *out, const struct ps_panel *panel)
{
    size_t longest = 1;
    for (int64_t i = 0; i < panel->series; i++) {
        size_t length = strlen(ps_panel_id(panel, i));
        longest = length > longest ? length : longest;
    }
    char *texts = calloc((size_t)panel->series, longest);
    if (texts == NULL) {
        return ps_fail(PS_DATA, "%s: no memory for /ids", out->path);
    }
    for (int64_t i = 0; i < panel->series; i++) {
        memcpy(texts + (size_t)i * longest, ps_panel_id(panel, i), strlen(ps_panel_id(panel, i)));
    }
    hid_t type PS_HDF5_SCOPED = H5Tcopy(H5T_C_S1), ids PS_HDF5_SCOPED = H5I_INVALID_HID;
    int ok = H5Tset_size(type, longest) >= 0 && H5Tset_strpad(type, H5T_STR_NULLPAD) >= 0 && H5Tset_cset(type, H5T_CSET_UTF8) >= 0;
    enum ps_status status = ok ? write_list(out, "/ids", type, panel->series, texts, &ids)
                               : ps_fail(PS_DATA, "%s: /ids cannot be created: %s", out->path, ps_hdf5_reason().text);
    free(texts);
    return status;
}

static enum ps_status write_contents(const struct ps_hdf5_output *out, const struct ps_panel *panel, const float *values,
                                     const char *source)
{
    hid_t rows PS_HDF5_SCOPED = H5I_INVALID_HID, offsets PS_HDF5_SCOPED = H5I_INVALID_HID, start PS_HDF5_SCOPED = H5I_INVALID_HID;
    PS_TRY(write_list(out, "/values", H5T_NATIVE_FLOAT, panel->offsets[panel->series], values, &rows));
    PS_TRY(ps_hdf5_write_text(out, rows, "frequency", panel->frequency));
    if (source != NULL) {
        PS_TRY(ps_hdf5_write_text(out, rows, "source", source));
    }
    PS_TRY(write_list(out, "/offsets", H5T_NATIVE_INT64, panel->series + 1, panel->offsets, &offsets));
    PS_TRY(write_list(out, "/start", H5T_NATIVE_INT64, panel->series, panel->start, &start));
    return write_ids(out, panel);
}

enum ps_status ps_panel_write_with(const char *path, const struct ps_panel *panel, const float *values, const char *source,
                                   const struct ps_panel_list *more)
{
    struct ps_hdf5_output out;
    PS_TRY(ps_hdf5_create(path, &out));
    enum ps_status status = write_contents(&out, panel, values, source);
    for (; more != NULL && more->name != NULL && status == PS_OK; more++) {
        hid_t list PS_HDF5_SCOPED = H5I_INVALID_HID;
        status = write_list(&out, more->name, H5T_NATIVE_FLOAT, panel->offsets[panel->series], more->values, &list);
    }
    return ps_hdf5_finish(&out, status);
}

enum ps_status ps_panel_write(const char *path, const struct ps_panel *panel, const float *values, const char *source)
{
    return ps_panel_write_with(path, panel, values, source, NULL);
}
