#include "data/storage.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include "data/hdf5_util.h"

enum { RANK = 3, CHUNK_MOST = 64 << 20 /* bytes, of chunks larger than their dataset */, SUM = 4 /* bytes of a fletcher32 */ };

/* A chunked dataset's grid, and its filters. */
struct grid {
    int rank;
    hsize_t size[RANK], chunk[RANK];
    int64_t chunks, chunk_bytes;
    int filters, deflate, fletcher; /* how many; the place of gzip and of the checksum in their order, or -1 */
};

static enum ps_status refuse(const struct ps_storage *s, const char *name, const char *cause)
{
    return ps_fail(s->failure, "%s: %s %s", s->path, name, cause);
}

/* Every step of the path is a hard link: soft and user-defined ones may lead anywhere, external ones into other files. */
static enum ps_status check_links(const struct ps_storage *s, const char *name)
{
    char step[128];
    for (size_t end = 0; name[end] != '\0';) {
        end += strspn(name + end, "/");
        end += strcspn(name + end, "/");
        if (end >= sizeof step) {
            return refuse(s, name, "has too long a name");
        }
        memcpy(step, name, end);
        step[end] = '\0';
        H5L_info_t info;
        if (H5Lget_info(s->file, step, &info, H5P_DEFAULT) < 0) {
            return refuse(s, step, "is missing");
        }
        if (info.type != H5L_TYPE_HARD) {
            return refuse(s, step,
                          info.type == H5L_TYPE_SOFT       ? "is a soft link: the values must lie there themselves"
                          : info.type == H5L_TYPE_EXTERNAL ? "is a link into another file: the values must lie in this one"
                                                           : "is a link of an unknown kind: the values must lie there themselves");
        }
    }
    return PS_OK;
}

enum ps_status ps_storage_open(const struct ps_storage *s, const char *name, hid_t *dataset)
{
    PS_TRY(check_links(s, name));
    hid_t access PS_HDF5_SCOPED = H5Pcreate(H5P_DATASET_ACCESS);
    *dataset = H5Pset_chunk_cache(access, 0, 0, 0) >= 0 ? H5Dopen2(s->file, name, access) : H5I_INVALID_HID;
    if (*dataset < 0) {
        return ps_fail(s->failure, "%s: %s cannot be opened as a dataset: %s", s->path, name, ps_hdf5_reason().text);
    }
    return PS_OK;
}

static const char filters_read[] = "is filtered in a way that is not read: store it plain, or with shuffle, gzip and fletcher32, "
                                   "each once (h5repack does)";

/* Shuffle, gzip and fletcher32, each at most once, in any order. */
static enum ps_status read_filters(const struct ps_storage *s, const char *name, hid_t creation, struct grid *g)
{
    int shuffle = -1;
    g->filters = H5Pget_nfilters(creation);
    g->deflate = g->fletcher = -1;
    for (int i = 0; i < g->filters; i++) {
        unsigned flags, config;
        size_t no_values = 0;
        H5Z_filter_t filter = H5Pget_filter2(creation, (unsigned)i, &flags, &no_values, NULL, 0, NULL, &config);
        int *place = filter == H5Z_FILTER_SHUFFLE      ? &shuffle
                     : filter == H5Z_FILTER_DEFLATE    ? &g->deflate
                     : filter == H5Z_FILTER_FLETCHER32 ? &g->fletcher
                                                       : NULL;
        if (place == NULL || *place >= 0) {
            return refuse(s, name, filters_read);
        }
        *place = i;
    }
    unsigned options = 0;
    if (g->filters < 0 || H5Pget_chunk_opts(creation, &options) < 0 || options != 0) {
        return refuse(s, name, filters_read);
    }
    return PS_OK;
}

/* Of a value in the file: a text of variable length is its length, and the heap and the place there where it lies. */
static int64_t stored_bytes(hid_t type)
{
    return H5Tis_variable_str(type) > 0 ? 4 + 8 + 4 : (int64_t)H5Tget_size(type);
}

static enum ps_status read_grid(const struct ps_storage *s, const char *name, hid_t dataset, hid_t creation, struct grid *g)
{
    hid_t space PS_HDF5_SCOPED = H5Dget_space(dataset);
    hid_t type PS_HDF5_SCOPED = H5Dget_type(dataset);
    g->rank = H5Sget_simple_extent_ndims(space);
    if (g->rank < 1 || g->rank > RANK || H5Sget_simple_extent_dims(space, g->size, NULL) != g->rank ||
        H5Pget_chunk(creation, RANK, g->chunk) != g->rank) {
        return refuse(s, name, "has chunks of another rank than its own");
    }
    g->chunks = 1;
    g->chunk_bytes = stored_bytes(type);
    int64_t bytes = g->chunk_bytes;
    int overflow = 0;
    for (int i = 0; i < g->rank; i++) {
        hsize_t chunk = g->chunk[i] > 0 ? g->chunk[i] : 1;
        overflow |= __builtin_mul_overflow(g->chunk_bytes, chunk, &g->chunk_bytes) || g->size[i] > INT64_MAX - chunk ||
                    __builtin_mul_overflow(g->chunks, (g->size[i] + chunk - 1) / chunk, &g->chunks) ||
                    __builtin_mul_overflow(bytes, g->size[i], &bytes);
    }
    if (overflow || (g->chunk_bytes > bytes && g->chunk_bytes > CHUNK_MOST)) {
        return refuse(s, name, "has absurd chunks: store it with smaller ones (h5repack does)");
    }
    return read_filters(s, name, creation, g);
}

static enum ps_status check_chunks(const struct ps_storage *s, const char *name, hid_t dataset, hid_t creation)
{
    struct grid g;
    PS_TRY(read_grid(s, name, dataset, creation, &g));
    hid_t space PS_HDF5_SCOPED = H5Dget_space(dataset); /* HDF5 1.10 takes no H5S_ALL here */
    hsize_t written = 0;
    if (H5Dget_num_chunks(dataset, space, &written) < 0) {
        return ps_fail(s->failure, "%s: the chunks of %s cannot be counted: %s", s->path, name, ps_hdf5_reason().text);
    }
    if (written != (hsize_t)g.chunks) {
        return ps_fail(s->failure, "%s: %s holds %" PRIuHSIZE " of its %" PRId64 " chunks: the others were never written", s->path,
                       name, written, g.chunks);
    }
    /* With filters their sizes are checked one by one where they are inflated. */
    if (g.filters == 0 && g.chunk_bytes > s->bytes / g.chunks) {
        return refuse(s, name, "says to be larger than the file that holds it");
    }
    return PS_OK;
}

enum ps_status ps_storage_check(const struct ps_storage *s, const char *name, hid_t dataset)
{
    hid_t creation PS_HDF5_SCOPED = H5Dget_create_plist(dataset);
    hid_t space PS_HDF5_SCOPED = H5Dget_space(dataset);
    hid_t type PS_HDF5_SCOPED = H5Dget_type(dataset);
    H5D_layout_t layout = H5Pget_layout(creation);
    if (layout == H5D_CHUNKED) {
        return check_chunks(s, name, dataset, creation);
    }
    if (layout == H5D_VIRTUAL) {
        return refuse(s, name, "is a virtual dataset, made of parts of other files: store its values (h5repack does)");
    }
    if (layout != H5D_CONTIGUOUS && layout != H5D_COMPACT) {
        return refuse(s, name, "has a layout that is not read");
    }
    if (H5Pget_external_count(creation) != 0) {
        return refuse(s, name, "keeps its values in another file: store them in this one (h5repack does)");
    }
    hssize_t count = H5Sget_simple_extent_npoints(space);
    int64_t bytes;
    haddr_t begin = layout == H5D_CONTIGUOUS ? H5Dget_offset(dataset) : 0;
    if (count < 0 || __builtin_mul_overflow(count, stored_bytes(type), &bytes) || H5Dget_storage_size(dataset) != (hsize_t)bytes ||
        begin == HADDR_UNDEF || bytes > s->bytes || begin > (haddr_t)(s->bytes - bytes)) {
        return refuse(s, name,
                      "does not lie in the file as large as it says: its values were never written, or the file is damaged");
    }
    return PS_OK;
}

/* Whether `length` bytes inflate to `expected` and no more. */
static int inflates_to(const unsigned char *bytes, size_t length, int64_t expected)
{
    unsigned char scratch[1 << 15];
    z_stream z = {.next_in = (unsigned char *)bytes, .avail_in = (unsigned)length};
    if (inflateInit(&z) != Z_OK) {
        return 0;
    }
    int result = Z_OK;
    while (result == Z_OK && (int64_t)z.total_out <= expected) {
        z.next_out = scratch;
        z.avail_out = sizeof scratch;
        result = inflate(&z, Z_NO_FLUSH);
    }
    int64_t found = (int64_t)z.total_out;
    inflateEnd(&z);
    return result == Z_STREAM_END && found == expected;
}

/* One value, by the way that all are read. */
static enum ps_status read_one(const struct ps_storage *s, const char *name, hid_t dataset, const hsize_t *at)
{
    static const hsize_t one[RANK] = {1, 1, 1};
    hid_t space PS_HDF5_SCOPED = H5Dget_space(dataset);
    hid_t memory PS_HDF5_SCOPED = H5Screate(H5S_SCALAR);
    float value;
    if (H5Sselect_hyperslab(space, H5S_SELECT_SET, at, NULL, one, NULL) < 0 ||
        H5Dread(dataset, H5T_NATIVE_FLOAT, memory, space, H5P_DEFAULT, &value) < 0) {
        return ps_fail(s->failure, "%s: %s cannot be read: %s", s->path, name, ps_hdf5_reason().text);
    }
    return PS_OK;
}

/* The chunk at `offset`, as it is stored. */
static enum ps_status check_chunk(const struct ps_storage *s, const char *name, hid_t dataset, const struct grid *g,
                                  const hsize_t *offset)
{
    hsize_t stored;
    if (H5Dget_chunk_storage_size(dataset, offset, &stored) < 0 || stored > (hsize_t)s->bytes || stored > UINT32_MAX) {
        return refuse(s, name, "has a chunk that does not lie in the file");
    }
    if (g->filters == 0) {
        return PS_OK; /* its size is the dataset's to say */
    }
    unsigned char *bytes = malloc(stored + 1);
    if (bytes == NULL) {
        return refuse(s, name, "has a chunk that no memory is left for");
    }
    uint32_t skipped = 0;
    int whole = H5Dread_chunk(dataset, H5P_DEFAULT, offset, &skipped, bytes) >= 0;
    int deflated = g->deflate >= 0 && (skipped >> g->deflate & 1) == 0;
    int64_t sum = g->fletcher >= 0 && (skipped >> g->fletcher & 1) == 0 ? SUM : 0;
    if (whole && deflated) {
        /* The checksum is inside when it was taken first, else behind. */
        int64_t inside = g->fletcher < g->deflate ? sum : 0, length = (int64_t)stored - (sum - inside);
        whole = length > 0 && inflates_to(bytes, (size_t)length, g->chunk_bytes + inside);
    } else if (whole) {
        whole = (int64_t)stored == g->chunk_bytes + sum;
    }
    free(bytes);
    return whole ? PS_OK : refuse(s, name, "has a chunk that is damaged: it has not the size that the others have");
}

static enum ps_status check_each_chunk(const struct ps_storage *s, const char *name, hid_t dataset, hid_t creation)
{
    struct grid g;
    PS_TRY(read_grid(s, name, dataset, creation, &g));
    hsize_t at[RANK] = {0};
    for (;;) {
        PS_TRY(check_chunk(s, name, dataset, &g, at));
        int i = g.rank - 1;
        while (i >= 0 && (at[i] += g.chunk[i]) >= g.size[i]) {
            at[i--] = 0;
        }
        if (i < 0) {
            return PS_OK;
        }
    }
}

enum ps_status ps_storage_try(const struct ps_storage *s, const char *name, hid_t dataset)
{
    hid_t creation PS_HDF5_SCOPED = H5Dget_create_plist(dataset);
    hid_t space PS_HDF5_SCOPED = H5Dget_space(dataset);
    if (H5Pget_layout(creation) == H5D_CHUNKED) {
        PS_TRY(check_each_chunk(s, name, dataset, creation));
    }
    hid_t type PS_HDF5_SCOPED = H5Dget_type(dataset);
    if (H5Tget_class(type) == H5T_STRING) {
        return PS_OK; /* whoever looks reads all of them */
    }
    hsize_t at[RANK] = {0}, size[RANK];
    PS_TRY(read_one(s, name, dataset, at));
    int rank = H5Sget_simple_extent_dims(space, size, NULL);
    for (int i = 0; i < rank; i++) {
        at[i] = size[i] - 1;
    }
    return read_one(s, name, dataset, at);
}
