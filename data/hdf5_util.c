#include "data/hdf5_util.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/files.h"

void ps_hdf5_drop(hid_t *id)
{
    if (*id >= 0) {
        H5Idec_ref(*id);
    }
}

void ps_hdf5_quiet(void)
{
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
}

static herr_t keep_innermost(unsigned n, const H5E_error2_t *error, void *reason)
{
    struct ps_hdf5_reason *r = reason;
    if (n == 0 && error->desc != NULL) {
        snprintf(r->text, sizeof r->text, "%s", error->desc);
    }
    return 0;
}

struct ps_hdf5_reason ps_hdf5_reason(void)
{
    struct ps_hdf5_reason reason = {"HDF5 gives no reason"};
    H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, keep_innermost, &reason);
    for (char *c = reason.text; *c != '\0'; c++) {
        if ((unsigned char)*c < 0x20) {
            *c = ' ';
        }
    }
    return reason;
}

enum ps_status ps_hdf5_create(const char *path, struct ps_hdf5_output *output)
{
    ps_hdf5_quiet();
    *output = (struct ps_hdf5_output){.path = path, .file = H5I_INVALID_HID};
    PS_TRY(ps_output_open(PS_DATA, path, &output->bytes));
    /* The format of HDF5 1.8: older ones hold no attribute above 64 KiB, which is about 4000 channel names. Its root group would
     * keep the time, and the same contents make the same bytes. */
    hid_t access PS_HDF5_SCOPED = H5Pcreate(H5P_FILE_ACCESS), creation PS_HDF5_SCOPED = H5Pcreate(H5P_FILE_CREATE);
    if (access >= 0 && creation >= 0 && H5Pset_libver_bounds(access, H5F_LIBVER_V18, H5F_LIBVER_LATEST) >= 0 &&
        H5Pset_obj_track_times(creation, 0) >= 0 && ps_hdf5_drive(access, output->bytes)) {
        output->file = H5Fcreate(path, H5F_ACC_TRUNC, creation, access);
    }
    if (output->file < 0) {
        return ps_hdf5_finish(output, ps_fail(PS_DATA, "%s: cannot be created: %s", output->path, ps_hdf5_reason().text));
    }
    return PS_OK;
}

enum ps_status ps_hdf5_finish(struct ps_hdf5_output *output, enum ps_status status)
{
    if (output->file >= 0 && H5Fclose(output->file) < 0 && status == PS_OK) {
        status = ps_fail(PS_DATA, "%s: cannot be written: %s", output->path, ps_hdf5_reason().text);
    }
    status = ps_output_finish(output->bytes, status);
    *output = (struct ps_hdf5_output){.file = H5I_INVALID_HID};
    return status;
}

enum ps_status ps_hdf5_create_rows(const struct ps_hdf5_output *output, const char *name, hid_t type, int rank, const hsize_t *size,
                                   hid_t *dataset)
{
    /* 1024 rows a chunk, fewer when they are wide: at most about 16 MiB. */
    hsize_t chunk[PS_HDF5_RANKS] = {0}, row_bytes = H5Tget_size(type);
    for (int i = 1; i < rank; i++) {
        chunk[i] = size[i];
        row_bytes *= size[i];
    }
    hsize_t most = ((hsize_t)16 << 20) / row_bytes;
    most = most > 1024 ? 1024 : most < 1 ? 1 : most;
    chunk[0] = size[0] < most ? size[0] : most;
    hid_t space PS_HDF5_SCOPED = H5Screate_simple(rank, size, NULL);
    hid_t creation PS_HDF5_SCOPED = H5Pcreate(H5P_DATASET_CREATE);
    int ok = space >= 0 && creation >= 0 && H5Pset_chunk(creation, rank, chunk) >= 0 && H5Pset_obj_track_times(creation, 0) >= 0;
    *dataset = ok ? H5Dcreate2(output->file, name, type, space, H5P_DEFAULT, creation, H5P_DEFAULT) : H5I_INVALID_HID;
    if (*dataset < 0) {
        return ps_fail(PS_DATA, "%s: %s cannot be created: %s", output->path, name, ps_hdf5_reason().text);
    }
    return PS_OK;
}

enum ps_status ps_hdf5_write_rows(const struct ps_hdf5_output *output, const char *name, hid_t dataset, hsize_t begin,
                                  hsize_t count, const void *values)
{
    hid_t type PS_HDF5_SCOPED = H5Dget_type(dataset);
    hid_t space PS_HDF5_SCOPED = H5Dget_space(dataset);
    hsize_t start[PS_HDF5_RANKS] = {begin}, size[PS_HDF5_RANKS];
    int rank = H5Sget_simple_extent_dims(space, size, NULL);
    size[0] = count;
    hid_t memory PS_HDF5_SCOPED = rank > 0 ? H5Screate_simple(rank, size, NULL) : H5I_INVALID_HID;
    if (memory < 0 || H5Sselect_hyperslab(space, H5S_SELECT_SET, start, NULL, size, NULL) < 0 ||
        H5Dwrite(dataset, type, memory, space, H5P_DEFAULT, values) < 0 || ps_output_failed(output->bytes)) {
        return ps_fail(PS_DATA, "%s: %s cannot be written: %s", output->path, name, ps_hdf5_reason().text);
    }
    return PS_OK;
}

/* Variable-length UTF-8, as h5py writes and reads text. */
static enum ps_status write_strings(const struct ps_hdf5_output *output, hid_t object, const char *name, hid_t space,
                                    const void *strings)
{
    hid_t type PS_HDF5_SCOPED = H5Tcopy(H5T_C_S1);
    int ok = type >= 0 && space >= 0 && H5Tset_size(type, H5T_VARIABLE) >= 0 && H5Tset_cset(type, H5T_CSET_UTF8) >= 0;
    hid_t attribute PS_HDF5_SCOPED = ok ? H5Acreate2(object, name, type, space, H5P_DEFAULT, H5P_DEFAULT) : H5I_INVALID_HID;
    if (attribute < 0 || H5Awrite(attribute, type, strings) < 0) {
        return ps_fail(PS_DATA, "%s: attribute %s cannot be written: %s", output->path, name, ps_hdf5_reason().text);
    }
    return PS_OK;
}

const char *ps_hdf5_text_at(const char *texts, int64_t i, size_t size, int variable)
{
    const char *text = texts + (size_t)i * size;
    if (variable) {
        memcpy((void *)&text, text, sizeof(char *));
    }
    return text != NULL ? text : "";
}

enum ps_status ps_hdf5_write_text(const struct ps_hdf5_output *output, hid_t object, const char *name, const char *text)
{
    hid_t space PS_HDF5_SCOPED = H5Screate(H5S_SCALAR);
    return write_strings(output, object, name, space, &text);
}

enum ps_status ps_hdf5_write_texts(const struct ps_hdf5_output *output, hid_t object, const char *name, char *const *texts,
                                   hsize_t n)
{
    hid_t space PS_HDF5_SCOPED = H5Screate_simple(1, &n, NULL);
    return write_strings(output, object, name, space, texts);
}

enum ps_status ps_hdf5_write_reals(const struct ps_hdf5_output *output, hid_t object, const char *name, const double *values,
                                   hsize_t n)
{
    hid_t space PS_HDF5_SCOPED = H5Screate_simple(1, &n, NULL);
    hid_t id PS_HDF5_SCOPED = H5Acreate2(object, name, H5T_IEEE_F64LE, space, H5P_DEFAULT, H5P_DEFAULT);
    if (id < 0 || H5Awrite(id, H5T_NATIVE_DOUBLE, values) < 0) {
        return ps_fail(PS_DATA, "%s: attribute %s cannot be written: %s", output->path, name, ps_hdf5_reason().text);
    }
    return PS_OK;
}
