/* What a dataset in a file from outside may be. Values lie in the file itself, all of them: no links elsewhere, no external or
 * virtual storage, no chunk or part that was never written, no filter but shuffle, gzip and fletcher32. Private to data/ and to the
 * checkpoint. */
#ifndef PS_DATA_STORAGE_H
#define PS_DATA_STORAGE_H

#include <hdf5.h>
#include <stdint.h>

#include "kernels/status.h"

/* A file that is being looked at. */
struct ps_storage {
    const char *path;
    enum ps_status failure; /* what a refusal is: PS_DATA, PS_CHECKPOINT */
    hid_t file;
    int64_t bytes; /* its size */
};

/* Opens a dataset that hard links alone lead to. Without a chunk cache: HDF5 then reads an unfiltered chunk straight from the file,
 * by the size that the dataset says, and with one by the size that the chunk's index says, into as small a buffer. */
enum ps_status ps_storage_open(const struct ps_storage *storage, const char *name, hid_t *dataset);

/* Whether the file holds every value, from its metadata alone. */
enum ps_status ps_storage_check(const struct ps_storage *storage, const char *name, hid_t dataset);

/* Tries what reading will do, without reading all: looks each chunk up, reads the first value and the last, and inflates the chunks
 * of a filtered dataset, each of which must have its size: HDF5 does not check, and reads behind a smaller one. For filtered
 * datasets that takes as long as inflating the whole, else little. */
enum ps_status ps_storage_try(const struct ps_storage *storage, const char *name, hid_t dataset);

#endif
