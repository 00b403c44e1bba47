/* The few things that reading and writing HDF5 share. */
#ifndef PS_DATA_HDF5_UTIL_H
#define PS_DATA_HDF5_UTIL_H

#include <hdf5.h>

#include "data/files.h"
#include "kernels/status.h"

/* A handle that closes itself when it leaves its scope: `hid_t space PS_HDF5_SCOPED = H5Dget_space(...)`. Negative: nothing. */
#define PS_HDF5_SCOPED __attribute__((cleanup(ps_hdf5_drop)))
void ps_hdf5_drop(hid_t *id);

/* HDF5 prints no error stacks of its own from here on. */
void ps_hdf5_quiet(void);

struct ps_hdf5_reason {
    char text[160];
};
/* What HDF5 says of its last failure on this thread, innermost, in one line. */
struct ps_hdf5_reason ps_hdf5_reason(void);

/* A file written beside `path` and renamed onto it, so that a crash leaves the old one or the new one. */
struct ps_hdf5_output {
    const char *path; /* borrowed */
    struct ps_output *bytes;
    hid_t file;
};
enum ps_status ps_hdf5_create(const char *path, struct ps_hdf5_output *output);
/* With status PS_OK: closes, flushes to the disk and renames. Otherwise closes and removes. Returns status, or why bytes could not
 * be written. */
enum ps_status ps_hdf5_finish(struct ps_hdf5_output *output, enum ps_status status);

/* A file access property list whose file is `output`: all that HDF5 writes goes there. output outlives the file. 1, or 0. */
int ps_hdf5_drive(hid_t access, struct ps_output *output);

enum { PS_HDF5_RANKS = 4 };
/* Creates a dataset of rank 1 to PS_HDF5_RANKS, chunked along its first dimension. The same contents make the same bytes (no times
 * kept). */
enum ps_status ps_hdf5_create_rows(const struct ps_hdf5_output *output, const char *name, hid_t type, int rank, const hsize_t *size,
                                   hid_t *dataset);
/* Writes rows [begin, begin + count) of such a dataset from dense values in its own type. */
enum ps_status ps_hdf5_write_rows(const struct ps_hdf5_output *output, const char *name, hid_t dataset, hsize_t begin,
                                  hsize_t count, const void *values);

/* The i-th of the texts that HDF5 has read to memory: each of size bytes, or of variable length behind a pointer. "" for NULL. */
const char *ps_hdf5_text_at(const char *texts, int64_t i, size_t size, int variable);

/* Text attributes of an object in the file: one text, and a list of n. */
enum ps_status ps_hdf5_write_text(const struct ps_hdf5_output *output, hid_t object, const char *name, const char *text);
enum ps_status ps_hdf5_write_texts(const struct ps_hdf5_output *output, hid_t object, const char *name, char *const *texts,
                                   hsize_t n);
/* A list of n numbers, float64. */
enum ps_status ps_hdf5_write_reals(const struct ps_hdf5_output *output, hid_t object, const char *name, const double *values,
                                   hsize_t n);

#endif
