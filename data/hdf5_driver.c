/* HDF5 writes its files through data/files.h: a file driver (HDF5's word for what lies between it and the system) over a
 * ps_output. HDF5 is told that every call succeeded: of a write that failed while a cache was emptied it may say nothing, and a
 * file that it could not close it writes again when the process exits. The output remembers what failed, and comes to nothing then.
 */
#include <H5FDpublic.h>
#include <stdlib.h>

#include "data/hdf5_util.h"

#if H5_VERSION_GE(1, 13, 2)
#include <H5FDdevelop.h>
#endif

struct driven {
    H5FD_t base; /* first: HDF5's own part */
    struct ps_output *output;
    haddr_t allocated, written; /* addresses behind the last byte that is allocated, and that is in the file */
};

/* What the file access property list carries to driven_open. */
struct driven_access {
    struct ps_output *output;
};

static H5FD_t *driven_open(const char *name, unsigned flags, hid_t access, haddr_t most)
{
    (void)name, (void)flags, (void)most;
    const struct driven_access *with = H5Pget_driver_info(access);
    struct driven *file = with ? calloc(1, sizeof *file) : NULL;
    if (!file) {
        return NULL;
    }
    file->output = with->output;
    return &file->base;
}

static herr_t driven_close(H5FD_t *base)
{
    free(base);
    return 0;
}

static herr_t driven_query(const H5FD_t *base, unsigned long *features)
{
    (void)base;
    *features = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_ACCUMULATE_METADATA | H5FD_FEAT_DATA_SIEVE | H5FD_FEAT_AGGREGATE_SMALLDATA;
    return 0;
}

static haddr_t driven_get_eoa(const H5FD_t *base, H5FD_mem_t type)
{
    (void)type;
    return ((const struct driven *)base)->allocated;
}

static herr_t driven_set_eoa(H5FD_t *base, H5FD_mem_t type, haddr_t address)
{
    (void)type;
    ((struct driven *)base)->allocated = address;
    return 0;
}

static haddr_t driven_get_eof(const H5FD_t *base, H5FD_mem_t type)
{
    (void)type;
    return ((const struct driven *)base)->written;
}

static herr_t driven_read(H5FD_t *base, H5FD_mem_t type, hid_t transfer, haddr_t address, size_t size, void *bytes)
{
    (void)type, (void)transfer;
    ps_output_read(((struct driven *)base)->output, address, bytes, size);
    return 0;
}

static herr_t driven_write(H5FD_t *base, H5FD_mem_t type, hid_t transfer, haddr_t address, size_t size, const void *bytes)
{
    (void)type, (void)transfer;
    struct driven *file = (struct driven *)base;
    ps_output_write(file->output, address, bytes, size);
    file->written = address + size > file->written ? address + size : file->written;
    return 0;
}

/* HDF5 wants the file as long as what is allocated of it. */
static herr_t driven_truncate(H5FD_t *base, hid_t transfer, hbool_t closing)
{
    (void)transfer, (void)closing;
    struct driven *file = (struct driven *)base;
    if (file->written != file->allocated) {
        ps_output_truncate(file->output, file->allocated);
        file->written = file->allocated;
    }
    return 0;
}

static const H5FD_class_t driver = {
#ifdef H5FD_CLASS_VERSION
    .version = H5FD_CLASS_VERSION,
    .value = 480, /* of those that HDF5 leaves for testing */
#endif
    .name = "patchstep_output",
    .maxaddr = INT64_MAX,
    .fc_degree = H5F_CLOSE_STRONG,
    .fapl_size = sizeof(struct driven_access),
    .open = driven_open,
    .close = driven_close,
    .query = driven_query,
    .get_eoa = driven_get_eoa,
    .set_eoa = driven_set_eoa,
    .get_eof = driven_get_eof,
    .read = driven_read,
    .write = driven_write,
    .truncate = driven_truncate,
    .fl_map = H5FD_FLMAP_DICHOTOMY,
};

int ps_hdf5_drive(hid_t access, struct ps_output *output)
{
    const struct driven_access with = {output};
    hid_t id = H5FDregister(&driver);
    int done = id >= 0 && H5Pset_driver(access, id, &with) >= 0;
    if (id >= 0) {
        H5FDunregister(id); /* the list holds on to it */
    }
    return done;
}
