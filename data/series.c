#include "data/series.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/panel.h"
#include "data/probe.h"
#include "data/series_file.h"
#include "data/storage.h"
#include "data/text.h"

/* What HDF5 may keep of a file's structure, and what it converts at a time. */
enum { METADATA_BYTES = 512 << 10, CONVERSION_BYTES = 64 << 10 };

const char *ps_split_name(enum ps_split split)
{
    static const char *const names[PS_SPLITS + 1] = {"train", "val", "test", "all"};
    return names[split];
}

/* Float32 and float64 pass, of either byte order: HDF5 knows other floats, and converts them bit by bit. Integers are refused: a
 * count or a code that was meant to be scaled first reads the same as a measured value. */
static enum ps_status check_type(const char *path, const struct ps_dataset *d)
{
    hid_t type PS_HDF5_SCOPED = H5Dget_type(d->id);
    H5T_class_t class = H5Tget_class(type);
    size_t bits = 8 * H5Tget_size(type);
    const hid_t passes[] = {H5T_IEEE_F32LE, H5T_IEEE_F64LE, H5T_IEEE_F32BE, H5T_IEEE_F64BE};
    for (size_t i = 0; i < sizeof passes / sizeof *passes; i++) {
        if (H5Tequal(type, passes[i]) > 0) {
            return PS_OK;
        }
    }
    const char *what = "neither an integer nor a float type";
    if (class == H5T_FLOAT || class == H5T_INTEGER) {
        int is_signed = class == H5T_INTEGER && H5Tget_sign(type) == H5T_SGN_2;
        const char *kind = class == H5T_FLOAT ? "float" : is_signed ? "int" : "uint";
        return ps_fail(PS_DATA, "%s: %s has type %s%zu%s: store it as float32 or float64", path, d->name, kind, bits,
                       class == H5T_FLOAT && (bits == 32 || bits == 64) ? ", not IEEE's" : "");
    }
    if (class == H5T_STRING) {
        what = "text";
    }
    return ps_fail(PS_DATA, "%s: %s has the wrong type (%s): store it as float32 or float64", path, d->name, what);
}

/* Values of a row (or window) in the file. */
static int64_t stored_row(const struct ps_dataset *d)
{
    return d->rank == 1 ? 1 : d->count / (d->size[0] * d->size[1]) * d->stored_channels;
}

/* How the dataset is stored, as far as it matters to who reads it in parts. */
static void look_at_chunks(struct ps_dataset *d, int64_t limit)
{
    hid_t creation PS_HDF5_SCOPED = H5Dget_create_plist(d->id);
    hsize_t chunk[3] = {1, 1, 1};
    d->chunk_rows = 1;
    d->chunk_bytes = 0;
    if (creation >= 0 && H5Pget_layout(creation) == H5D_CHUNKED && H5Pget_chunk(creation, d->rank, chunk) == d->rank) {
        hid_t type PS_HDF5_SCOPED = H5Dget_type(d->id);
        d->chunk_rows = (int64_t)chunk[0] < d->size[0] ? (int64_t)chunk[0] : d->size[0];
        if (H5Pget_nfilters(creation) > 0) {
            d->chunk_bytes = (int64_t)(chunk[0] * chunk[1] * chunk[2] * H5Tget_size(type)); /* HDF5 holds chunks below 4 GiB */
        }
    }
    int64_t row = stored_row(d) * (int64_t)sizeof(float), most = limit > 0 ? limit / 8 : 8 << 20;
    int64_t usual = most < 1 << 20 ? most : 1 << 20;
    d->piece_rows = usual > row ? usual / row : 1;
    if (d->piece_rows >= d->chunk_rows) {
        d->piece_rows -= d->piece_rows % d->chunk_rows;
    } else if (d->chunk_rows <= most / row) {
        d->piece_rows = d->chunk_rows;
    }
}

/* Opens /name of the given rank and checks sizes, type and storage; nothing is read. shape is what the message says the sizes
 * should be. */
static enum ps_status open_dataset(const struct ps_storage *storage, const char *name, int rank, const char *shape,
                                   struct ps_dataset *d)
{
    const char *path = storage->path;
    d->name = name;
    d->rank = rank;
    PS_TRY(ps_storage_open(storage, name, &d->id));
    hid_t space PS_HDF5_SCOPED = H5Dget_space(d->id);
    int found = H5Sget_simple_extent_ndims(space);
    if (found != rank) {
        return ps_fail(PS_DATA, "%s: %s has rank %d: expected rank %d, %s", path, name, found, rank, shape);
    }
    hsize_t size[3];
    H5Sget_simple_extent_dims(space, size, NULL);
    d->count = 1;
    for (int i = 0; i < rank; i++) {
        if (size[i] == 0 || size[i] > INT32_MAX) {
            return ps_fail(PS_DATA, "%s: size %d of %s is %" PRIuHSIZE ": expected 1 to %d, %s", path, i, name, size[i], INT32_MAX,
                           shape);
        }
        d->size[i] = (int64_t)size[i];
        if (__builtin_mul_overflow(d->count, d->size[i], &d->count) || d->count > INT64_MAX / 64) {
            return ps_fail(PS_DATA, "%s: the sizes of %s overflow", path, name);
        }
    }
    d->stored_channels = rank > 1 ? d->size[1] : 1;
    PS_TRY(check_type(path, d));
    return ps_storage_check(storage, name, d->id);
}

static int64_t physical_memory(void)
{
    return (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
}

/* The file must still be the one that was opened, as it was. HDF5 itself reads zeros behind the end of a file that shrank. */
static enum ps_status check_unchanged(const struct ps_series *series)
{
    const struct stat *seen = &series->file->seen;
    struct stat now;
    if (stat(series->path, &now) != 0) {
        return ps_fail(PS_DATA, "%s: went away while it was being read: %s", series->path, strerror(errno));
    }
    if (now.st_dev != seen->st_dev || now.st_ino != seen->st_ino) {
        return ps_fail(PS_DATA, "%s: was replaced by another file while it was being read", series->path);
    }
    if (now.st_size != seen->st_size) {
        return ps_fail(PS_DATA, "%s: changed while it was being read: it had %lld bytes and has %lld", series->path,
                       (long long)seen->st_size, (long long)now.st_size);
    }
    if (now.st_mtim.tv_sec != seen->st_mtim.tv_sec || now.st_mtim.tv_nsec != seen->st_mtim.tv_nsec) {
        return ps_fail(PS_DATA, "%s: was written to while it was being read", series->path);
    }
    return PS_OK;
}

/* Rows as the file has them, of all its channels. */
static enum ps_status read_stored(const struct ps_series *series, const struct ps_dataset *d, int64_t first, int64_t count,
                                  float *to)
{
    hsize_t start[3] = {(hsize_t)first}, size[3] = {(hsize_t)count, (hsize_t)d->stored_channels, (hsize_t)d->size[2]};
    hid_t space PS_HDF5_SCOPED = H5Dget_space(d->id), memory PS_HDF5_SCOPED = H5Screate_simple(d->rank, size, NULL);
    hid_t transfer PS_HDF5_SCOPED = H5Pcreate(H5P_DATASET_XFER);
    int failed = space < 0 || memory < 0 || transfer < 0 ||
                 H5Sselect_hyperslab(space, H5S_SELECT_SET, start, NULL, size, NULL) < 0 ||
                 H5Pset_buffer(transfer, CONVERSION_BYTES, NULL, NULL) < 0 ||
                 H5Dread(d->id, H5T_NATIVE_FLOAT, memory, space, transfer, to) < 0;
    struct ps_hdf5_reason reason = failed ? ps_hdf5_reason() : (struct ps_hdf5_reason){""};
    PS_TRY(check_unchanged(series)); /* why it failed, or what it read instead */
    return failed ? ps_fail(PS_DATA, "%s: %s cannot be read: %s", series->path, d->name, reason.text) : PS_OK;
}

enum ps_status ps_series_read(const struct ps_series *series, int dataset, int64_t first, int64_t count, float *to)
{
    const struct ps_dataset *d = &series->file->dataset[dataset];
    if (series->file->column == NULL) {
        return read_stored(series, d, first, count, to);
    }
    const int64_t row = d->count / d->size[0], most = d->piece_rows < count ? d->piece_rows : count;
    float *stored = malloc((size_t)(most * stored_row(d)) * sizeof *stored);
    if (stored == NULL) {
        return ps_fail(PS_DATA, "%s: no memory to read %" PRId64 " rows of %s", series->path, most, d->name);
    }
    enum ps_status status = PS_OK;
    for (int64_t at = first, n; at < first + count && status == PS_OK; at += n) {
        n = d->piece_rows - at % d->piece_rows; /* pieces end where chunks do */
        n = n < first + count - at ? n : first + count - at;
        status = read_stored(series, d, at, n, stored);
        if (status == PS_OK) {
            ps_rows_pick(series, d, n, stored, to + (at - first) * row);
        }
    }
    free(stored);
    return status;
}

enum ps_status ps_series_rows(const struct ps_series *series, int64_t first, int64_t count, float *to)
{
    if (series->file != NULL) {
        return ps_series_read(series, 0, first, count, to);
    }
    memcpy(to, series->values + first * series->channels, (size_t)(count * series->channels) * sizeof *to);
    return PS_OK;
}

enum ps_status ps_series_each(const struct ps_series *series, int dataset, int64_t rows, ps_rows_sink *sink, void *argument)
{
    if (series->file == NULL) {
        const float *values[2] = {series->layout == PS_LAYOUT_SERIES ? series->values : series->inputs, series->targets};
        return sink(argument, 0, rows, values[dataset]);
    }
    const struct ps_dataset *d = &series->file->dataset[dataset];
    int64_t row = d->count / d->size[0], n;
    float *piece = malloc((size_t)(d->piece_rows * row) * sizeof *piece);
    if (piece == NULL) {
        return ps_fail(PS_DATA, "%s: no memory to read %" PRId64 " rows of %s", series->path, d->piece_rows, d->name);
    }
    enum ps_status status = PS_OK;
    for (int64_t first = 0; first < rows && status == PS_OK; first += n) {
        n = rows - first < d->piece_rows ? rows - first : d->piece_rows;
        status = ps_series_read(series, dataset, first, n, piece);
        if (status == PS_OK) {
            status = sink(argument, first, n, piece);
        }
    }
    free(piece);
    return status;
}

/* Reads the whole dataset as float32 into new memory. */
static enum ps_status read_dataset(const struct ps_series *series, int dataset, float **values)
{
    const struct ps_dataset *d = &series->file->dataset[dataset];
    int64_t bytes = d->count * (int64_t)sizeof(float), memory = physical_memory();
    /* Asked before allocating: a system that overcommits grants any size and fails when it is filled. */
    *values = bytes <= memory ? malloc((size_t)bytes) : NULL;
    if (*values == NULL) {
        return ps_fail(PS_DATA, "%s: %s needs %.1f GiB of host memory, and this machine has %.1f GiB: set data.memory_limit",
                       series->path, d->name, (double)bytes * 0x1p-30, (double)memory * 0x1p-30);
    }
    return ps_series_read(series, dataset, 0, d->size[0], *values);
}

struct ps_place ps_series_place(const struct ps_series *series, int dataset, int64_t at)
{
    int is_series = series->layout == PS_LAYOUT_SERIES;
    int64_t C = series->channels, length = is_series ? 1 : dataset == 0 ? series->seq_len : series->pred_len;
    int64_t channel = at / length % C, row = at / (length * C);
    struct ps_place place;
    char label[96] = "";
    if (series->panel != NULL) {
        int64_t i = ps_panel_series(series->panel, at);
        snprintf(place.text, sizeof place.text, "series \"%s\", row %" PRId64 " of it (counted from 0)",
                 ps_text_plain(ps_panel_id(series->panel, i)).text, at - series->panel->offsets[i]);
        return place;
    }
    if (series->channel_names != NULL) {
        snprintf(label, sizeof label, " (%s)", ps_text_plain(series->channel_names[channel]).text);
    }
    if (is_series) {
        snprintf(place.text, sizeof place.text, "channel %" PRId64 "%s, row %" PRId64 " (counted from 0)", channel, label, row);
    } else {
        snprintf(place.text, sizeof place.text, "channel %" PRId64 "%s, window %" PRId64 ", row %" PRId64 " of it (counted from 0)",
                 channel, label, row, at % length);
    }
    return place;
}

/* Names the element `at` of a dataset, which is NaN or infinite. */
static enum ps_status not_finite(const struct ps_series *series, int dataset, const char *name, int64_t at, float x)
{
    return ps_fail(PS_DATA, "%s: %s holds %s in %s: fill or %s%s; every value must be finite in float32", series->path, name,
                   isnan(x) ? "NaN"
                   : x > 0  ? "Inf"
                            : "-Inf",
                   ps_series_place(series, dataset, at).text,
                   series->panel != NULL                ? "leave out such series"
                   : series->layout == PS_LAYOUT_SERIES ? "cut such rows"
                                                        : "leave out such windows",
                   isnan(x) ? ", or train with data.missing: mask" : "");
}

/* Takes in element bits two at a time. Each step is a bijection of h for a fixed word and of the word for a fixed h, and the shift
 * carries high bits down, so that changes of sign alone do not cancel (they would in plain FNV on words). The final mix is
 * MurmurHash3's fmix64 (Appleby 2011). */
static uint64_t hash_step(uint64_t h, uint64_t word)
{
    h = (h ^ word) * 0x9e3779b97f4a7c15u;
    return h ^ h >> 32;
}

/* One pass over a dataset: every element is checked and goes into the fingerprint. */
struct scan {
    const struct ps_series *series;
    const struct ps_dataset *dataset;
    int which, masked; /* dataset 0 or 1; NaN is taken */
    float largest;
    int64_t missing;
    uint64_t hash;
    uint32_t low; /* an element that waits for its pair */
    int waits;
};

static enum ps_status scan_rows(void *argument, int64_t first, int64_t rows, const float *values)
{
    struct scan *scan = argument;
    const struct ps_dataset *d = scan->dataset;
    int64_t row = d->count / d->size[0], n = rows * row, i = 0;
    for (; i < n && (isfinite(values[i]) || (scan->masked && isnan(values[i]))); i++) {
        scan->largest = fabsf(values[i]) > scan->largest ? fabsf(values[i]) : scan->largest;
        scan->missing += isnan(values[i]) != 0;
    }
    if (i < n) {
        return not_finite(scan->series, scan->which, d->name, first * row + i, values[i]);
    }
    i = 0;
    if (scan->waits) {
        uint32_t high;
        memcpy(&high, values, sizeof high);
        scan->hash = hash_step(scan->hash, (uint64_t)high << 32 | scan->low);
        i = 1;
    }
    for (; i + 1 < n; i += 2) {
        uint32_t low, high;
        memcpy(&low, values + i, sizeof low);
        memcpy(&high, values + i + 1, sizeof high);
        scan->hash = hash_step(scan->hash, (uint64_t)high << 32 | low);
    }
    scan->waits = i < n;
    if (scan->waits) {
        memcpy(&scan->low, values + i, sizeof scan->low);
    }
    return PS_OK;
}

static enum ps_status scan_dataset(struct ps_series *series, const struct ps_dataset *d, int which, int masked, uint64_t *hash)
{
    struct scan scan = {.series = series,
                        .dataset = d,
                        .which = which,
                        .masked = masked,
                        .largest = series->largest,
                        .missing = series->missing,
                        .hash = hash_step(*hash, (uint64_t)d->rank)};
    for (int i = 0; i < d->rank; i++) {
        scan.hash = hash_step(scan.hash, (uint64_t)d->size[i]);
    }
    PS_TRY(ps_series_each(series, which, d->size[0], scan_rows, &scan));
    *hash = scan.waits ? hash_step(scan.hash, scan.low) : scan.hash;
    series->largest = scan.largest;
    series->missing = scan.missing;
    return PS_OK;
}

static uint64_t hash_finish(uint64_t h)
{
    h = (h ^ h >> 33) * 0xff51afd7ed558ccdu;
    h = (h ^ h >> 33) * 0xc4ceb9fe1a85ec53u;
    return h ^ h >> 33;
}

/* Attribute `channels` of the dataset: one text for each channel, of fixed or variable length. None: names stay NULL. */
static enum ps_status read_channel_names(const struct ps_storage *storage, const struct ps_dataset *d, struct ps_series *series)
{
    const char *path = storage->path;
    htri_t exists = H5Aexists(d->id, "channels");
    if (exists <= 0) {
        return exists == 0 ? PS_OK
                           : ps_fail(PS_DATA, "%s: %s: its attributes cannot be read: %s", path, d->name, ps_hdf5_reason().text);
    }
    hid_t attribute PS_HDF5_SCOPED = H5Aopen(d->id, "channels", H5P_DEFAULT);
    hid_t type PS_HDF5_SCOPED = H5Aget_type(attribute);
    hid_t space PS_HDF5_SCOPED = H5Aget_space(attribute);
    hssize_t n = H5Sget_simple_extent_npoints(space);
    if (H5Tget_class(type) != H5T_STRING || n != series->channels) {
        return ps_fail(PS_DATA, "%s: attribute channels of %s must be %" PRId64 " texts, one for each channel: it has %lld %s",
                       path, d->name, series->channels, (long long)n,
                       H5Tget_class(type) == H5T_STRING ? "texts" : "values of another type");
    }
    /* Texts of fixed length lie in the file itself, and so do the places of those of variable length. */
    size_t stored = H5Tget_size(type), bytes;
    if (__builtin_mul_overflow(stored + 1, (size_t)n, &bytes) || bytes - (size_t)n > (size_t)storage->bytes) {
        return ps_fail(PS_DATA, "%s: attribute channels of %s says to be larger than the file that holds it", path, d->name);
    }
    series->channel_names = calloc((size_t)n, sizeof *series->channel_names);
    if (series->channel_names == NULL) {
        return ps_fail(PS_DATA, "%s: out of host memory", path);
    }
    /* HDF5 converts neither between fixed and variable length nor between character sets: both are taken as they are. */
    hid_t memory PS_HDF5_SCOPED = H5Tcopy(H5T_C_S1);
    H5Tset_cset(memory, H5Tget_cset(type));
    int variable = H5Tis_variable_str(type) > 0;
    size_t size = variable ? sizeof(char *) : stored + 1;
    H5Tset_size(memory, variable ? H5T_VARIABLE : size);
    char *texts = calloc((size_t)n, size);
    if (texts == NULL) {
        return ps_fail(PS_DATA, "%s: out of host memory", path);
    }
    enum ps_status status = PS_OK;
    int was_read = H5Aread(attribute, memory, texts) >= 0;
    if (!was_read) {
        status = ps_fail(PS_DATA, "%s: attribute channels of %s cannot be read: %s", path, d->name, ps_hdf5_reason().text);
    }
    for (hssize_t i = 0; i < n && status == PS_OK; i++) {
        series->channel_names[i] = strdup(ps_hdf5_text_at(texts, i, size, variable));
        if (series->channel_names[i] == NULL) {
            status = ps_fail(PS_DATA, "%s: out of host memory", path);
        }
    }
    if (variable && was_read) {
        H5Dvlen_reclaim(memory, space, H5P_DEFAULT, texts);
    }
    free(texts);
    return status;
}

/* Opens what the file holds and takes its sizes and names. trying: with more care, as the first look does. */
static enum ps_status open_layout(const struct ps_storage *storage, int trying, struct ps_series *series)
{
    const char *path = series->path;
    hid_t file = series->file->file;
    struct ps_dataset *d = series->file->dataset;
    int has_series = H5Lexists(file, "series", H5P_DEFAULT) > 0;
    int has_inputs = H5Lexists(file, "inputs", H5P_DEFAULT) > 0, has_targets = H5Lexists(file, "targets", H5P_DEFAULT) > 0;
    int has_values = H5Lexists(file, "values", H5P_DEFAULT) > 0 && H5Lexists(file, "offsets", H5P_DEFAULT) > 0;
    if ((has_series || has_values) && (has_inputs || has_targets)) {
        return ps_fail(PS_DATA, "%s: has both %s and %s: which is meant? keep one layout", path, has_series ? "/series" : "/values",
                       has_inputs ? "/inputs" : "/targets");
    }
    if (has_series && has_values) {
        return ps_fail(PS_DATA, "%s: has both /series and /values: which is meant? keep one layout", path);
    }
    if (has_values) {
        PS_TRY(open_dataset(storage, "/values", 1, "[rows]", &d[0]));
        series->layout = PS_LAYOUT_SERIES;
        series->rows = d[0].size[0];
        series->channels = 1;
        return ps_panel_open(storage, d[0].id, series->rows, trying, &series->panel);
    }
    if (has_inputs != has_targets) {
        return ps_fail(PS_DATA, "%s: has %s without %s: ready-made windows need both", path, has_inputs ? "/inputs" : "/targets",
                       has_inputs ? "/targets" : "/inputs");
    }
    if (!has_series && !has_inputs) {
        return ps_fail(PS_DATA, "%s: has neither /series nor /inputs and /targets, nor a panel's /values and /offsets", path);
    }
    if (has_series) {
        PS_TRY(open_dataset(storage, "/series", 2, "[rows, channels]", &d[0]));
        series->layout = PS_LAYOUT_SERIES;
    } else {
        PS_TRY(open_dataset(storage, "/inputs", 3, "[windows, channels, seq_len]", &d[0]));
        PS_TRY(open_dataset(storage, "/targets", 3, "[windows, channels, pred_len]", &d[1]));
        for (int i = 0; i < 2; i++) {
            if (d[0].size[i] != d[1].size[i]) {
                return ps_fail(PS_DATA, "%s: /inputs has %" PRId64 " %s and /targets has %" PRId64 ": they must be equal", path,
                               d[0].size[i], i == 0 ? "windows" : "channels", d[1].size[i]);
            }
        }
        series->layout = PS_LAYOUT_WINDOWS;
        series->seq_len = d[0].size[2];
        series->pred_len = d[1].size[2];
    }
    series->rows = d[0].size[0];
    series->channels = d[0].size[1];
    return read_channel_names(storage, &d[0], series);
}

static enum ps_status open_file(struct ps_series *series)
{
    const char *path = series->path;
    struct ps_series_file *f = series->file;
    if (H5Fis_hdf5(path) <= 0) {
        return ps_fail(PS_DATA, "%s: not an HDF5 file (import_csv makes one from a CSV)", path);
    }
    hid_t access PS_HDF5_SCOPED = H5Pcreate(H5P_FILE_ACCESS);
    H5AC_cache_config_t cache = {.version = H5AC__CURR_CACHE_CONFIG_VERSION};
    if (f->memory.limit > 0 && H5Pget_mdc_config(access, &cache) >= 0) {
        cache.set_initial_size = 1;
        cache.initial_size = cache.min_size = cache.max_size = METADATA_BYTES;
        H5Pset_mdc_config(access, &cache);
    }
    f->file = H5Fopen(path, H5F_ACC_RDONLY, access);
    if (f->file < 0) {
        return ps_fail(PS_DATA, "%s: cannot be opened as HDF5: %s", path, ps_hdf5_reason().text);
    }
    return PS_OK;
}

/* HDF5's own: metadata, conversion of types, what it keeps of a file; and for a filter, the stored chunk, the chunk, and what the
 * filters of it make on the way. */
static int64_t library_bytes(const struct ps_series_file *f)
{
    int64_t chunk = f->dataset[0].chunk_bytes > f->dataset[1].chunk_bytes ? f->dataset[0].chunk_bytes : f->dataset[1].chunk_bytes;
    return METADATA_BYTES + 2 * CONVERSION_BYTES + (256 << 10) + 4 * chunk;
}

/* Two batches of so many windows; INT64_MAX / 4 when that overflows. */
static int64_t batch_bytes(const struct ps_series *series, int64_t windows)
{
    const struct ps_memory *m = &series->file->memory;
    int64_t bytes;
    if (__builtin_mul_overflow(windows, series->channels, &bytes) ||
        __builtin_mul_overflow(bytes, m->seq_len + m->pred_len, &bytes) || bytes > INT64_MAX / 64) {
        return INT64_MAX / 4;
    }
    return 2 * bytes * (int64_t)sizeof(float);
}

/* What a panel takes beside its values. */
static int64_t panel_bytes(const struct ps_series *series)
{
    return series->panel != NULL ? ps_panel_bytes(series->panel) : 0;
}

/* Rows as the file has them, where not all of their channels are taken. */
static int64_t picking_bytes(const struct ps_series_file *f)
{
    int64_t most = 0;
    for (int i = 0; i < 2 && f->column != NULL && f->dataset[i].id >= 0; i++) {
        const int64_t bytes = f->dataset[i].piece_rows * stored_row(&f->dataset[i]) * (int64_t)sizeof(float);
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* Whether all of the values are held, beside `batches` bytes of batches. */
static int fits(const struct ps_series *series, int64_t batches)
{
    const struct ps_series_file *f = series->file;
    int64_t values = (f->dataset[0].count + f->dataset[1].count) * (int64_t)sizeof(float) + panel_bytes(series);
    int64_t order = 2 * series->rows * (int64_t)sizeof(int32_t); /* the windows', drawn on the host and used by the step */
    int64_t limit = f->memory.limit;
    return limit == 0 || (values <= limit && values + order + batches + library_bytes(f) + picking_bytes(f) <= limit);
}

/* Fills f->plan, with room for `batches` bytes of batches. *others: what all else takes at least; 0 when that is too much. */
static int plan_blocks(const struct ps_series *series, struct ps_series_file *f, int64_t batches, int64_t *others)
{
    enum { BLOCK_BYTES = 64 << 10, BLOCKS = 8 };
    const struct ps_memory *m = &f->memory;
    int is_series = series->layout == PS_LAYOUT_SERIES;
    int64_t rows = series->rows, C = series->channels, index = (int64_t)sizeof(int32_t), overlap = 0, row, chunk, staging = 0;
    if (is_series) {
        overlap = m->seq_len + m->pred_len - 1;
        row = C * (int64_t)sizeof(float);
        chunk = f->dataset[0].chunk_rows;
        staging = f->dataset[0].piece_rows * row;
    } else {
        row = C * (series->seq_len + series->pred_len) * (int64_t)sizeof(float);
        chunk = f->dataset[0].chunk_rows > f->dataset[1].chunk_rows ? f->dataset[0].chunk_rows : f->dataset[1].chunk_rows;
    }
    int64_t beside = rows * index + library_bytes(f) + panel_bytes(series) + staging + picking_bytes(f);
    /* Long enough that what is read twice, the overlap of blocks and chunks cut in two, is little; then shorter where that leaves
     * few of them to shuffle among, and shorter still where not even one would fit. */
    int64_t windows = BLOCK_BYTES / row > 4 * overlap ? BLOCK_BYTES / row : 4 * overlap, blocks = 0;
    windows = windows > chunk ? windows + (chunk - windows % chunk) % chunk : chunk;
    windows = windows < rows ? windows : rows;
    for (;; windows = (windows + 1) / 2) {
        int64_t block = (windows + overlap) * row + windows * index;
        int64_t room = m->limit - batches - beside - (rows / windows + 2) * index;
        blocks = room > 0 ? room / (2 * block) : 0;
        if (blocks >= BLOCKS || windows == 1 || (blocks > 0 && windows <= overlap / 2)) {
            break;
        }
    }
    *others = beside + 2 * ((1 + overlap) * row + index) + (rows + 2) * index;
    int64_t values = row / (int64_t)sizeof(float) * (windows + overlap); /* of a block; a window's place in a group is an int32 */
    f->plan = (struct ps_blocks){.windows = windows,
                                 .rows = windows + overlap,
                                 .blocks = blocks < INT32_MAX / values || values > INT32_MAX ? blocks : INT32_MAX / values};
    return blocks > 0;
}

/* *whole: all of the values are held; else how they stream is planned. PS_DATA when the limit is too small, saying the least that
 * would do and what it is for. */
static enum ps_status place_values(const struct ps_series *series, struct ps_series_file *f, int *whole)
{
    const struct ps_memory *m = &f->memory;
    const int64_t batches = batch_bytes(series, m->batch), parts = m->held ? batch_bytes(series, m->held) : batches;
    const int64_t half = m->limit / 2;
    int64_t others;
    *whole = fits(series, batches);
    if (*whole || plan_blocks(series, f, batches, &others)) {
        return PS_OK;
    }
    if (parts < batches && parts <= half) {
        *whole = fits(series, half);
        if (*whole || plan_blocks(series, f, half, &others)) {
            return PS_OK;
        }
    }
    const int64_t shared = 2 * (parts > others ? parts : others), least = shared < others + batches ? shared : others + batches;
    return ps_fail(PS_DATA,
                   "%s: data.memory_limit: %" PRId64 " bytes are too few: %" PRId64 " are needed at least, of them %" PRId64
                   " for two batches of %" PRId64 " windows and %" PRId64 " for HDF5 (for compressed data, 4 chunks)",
                   series->path, m->limit, parts < batches ? least : others + batches, parts, parts < batches ? m->held : m->batch,
                   library_bytes(f));
}

static void close_file(struct ps_series *series)
{
    for (int i = 0; i < 2; i++) {
        ps_hdf5_drop(&series->file->dataset[i].id);
    }
    ps_hdf5_drop(&series->file->file);
    free(series->file->column);
    free(series->file);
    series->file = NULL;
}

/* HDF5 is used by the reader's thread and by whoever writes checkpoints. */
static enum ps_status check_threads(const struct ps_series *series)
{
    hbool_t safe = 0;
    return H5is_library_threadsafe(&safe) >= 0 && safe
               ? PS_OK
               : ps_fail(PS_DATA, "%s: does not fit data.memory_limit, and this HDF5 library is not thread-safe: raise the limit",
                         series->path);
}

/* The values into memory, or where that would take too much, one look at each; with their fingerprint. */
static enum ps_status read_values(struct ps_series *series)
{
    int datasets = series->layout == PS_LAYOUT_SERIES ? 1 : 2;
    struct ps_series_file *f = series->file;
    for (int i = 0; i < datasets; i++) {
        look_at_chunks(&f->dataset[i], f->memory.limit);
    }
    const struct ps_dataset dataset[2] = {f->dataset[0], f->dataset[1]};
    const int masked = f->masked;
    int whole;
    PS_TRY(place_values(series, f, &whole));
    if (whole) {
        for (int i = 0; i < datasets; i++) {
            PS_TRY(read_dataset(series, i, datasets == 1 ? &series->values : i == 0 ? &series->inputs : &series->targets));
        }
        close_file(series);
    } else {
        PS_TRY(check_threads(series));
    }
    uint64_t hash = 0;
    for (int i = 0; i < datasets; i++) {
        PS_TRY(scan_dataset(series, &dataset[i], i, masked, &hash));
    }
    for (int64_t i = 0; series->panel != NULL && i <= series->panel->series; i++) {
        hash = hash_step(hash, (uint64_t)series->panel->offsets[i]);
    }
    series->fingerprint = hash_finish(hash);
    return PS_OK;
}

/* Looking: everything but the values, with more care. */
static enum ps_status read_file(const struct ps_reading *reading, int looking, struct ps_series *series)
{
    struct ps_series_file *f = series->file;
    PS_TRY(open_file(series));
    const struct ps_storage storage = {.path = series->path, .failure = PS_DATA, .file = f->file, .bytes = f->seen.st_size};
    PS_TRY(open_layout(&storage, looking, series));
    if (!looking) {
        if (reading->rows && series->layout != PS_LAYOUT_SERIES) {
            return ps_fail(PS_DATA, "%s: holds ready-made windows: rows come after a series alone, /series [rows, channels]",
                           series->path);
        }
        PS_TRY(ps_series_pick(reading, series));
        return read_values(series);
    }
    for (int i = 0; i < 2 && f->dataset[i].id >= 0; i++) {
        PS_TRY(ps_storage_try(&storage, f->dataset[i].name, f->dataset[i].id));
    }
    return PS_OK;
}

static enum ps_status open_series(const char *path, const struct ps_reading *reading, int looking, struct ps_series **series)
{
    *series = NULL;
    ps_hdf5_quiet();
    struct ps_series *s = calloc(1, sizeof *s);
    if (s != NULL) {
        s->path = strdup(path);
        s->file = calloc(1, sizeof *s->file);
    }
    if (s == NULL || s->path == NULL || s->file == NULL) {
        free(s != NULL ? s->path : NULL);
        free(s != NULL ? s->file : NULL);
        free(s);
        return ps_fail(PS_DATA, "%s: out of host memory", path);
    }
    *s->file = (struct ps_series_file){.file = H5I_INVALID_HID,
                                       .dataset = {{.id = H5I_INVALID_HID}, {.id = H5I_INVALID_HID}},
                                       .memory = reading->memory,
                                       .masked = reading->masked};
    enum ps_status status = stat(path, &s->file->seen) == 0 ? read_file(reading, looking, s)
                                                            : ps_fail(PS_DATA, "%s: cannot be opened: %s", path, strerror(errno));
    if (status != PS_OK) {
        ps_series_close(s);
        return status;
    }
    *series = s;
    return PS_OK;
}

enum ps_status ps_series_names(const struct ps_series *series, char **names, uint64_t *bytes)
{
    *names = NULL;
    *bytes = 0;
    if (series->channel_names == NULL) {
        return PS_OK;
    }
    for (int64_t c = 0; c < series->channels; c++) {
        *bytes += strlen(series->channel_names[c]) + 1;
    }
    char *end = *names = malloc(*bytes);
    if (end == NULL) {
        return ps_fail(PS_DATA, "%s: out of host memory", series->path);
    }
    for (int64_t c = 0; c < series->channels; c++) {
        end = stpcpy(end, series->channel_names[c]) + 1;
    }
    return PS_OK;
}

enum ps_status ps_series_check_names(const struct ps_series *series, const char *names)
{
    for (int64_t c = 0; names != NULL && series->channel_names != NULL && c < series->channels; c++, names += strlen(names) + 1) {
        if (strcmp(series->channel_names[c], names) != 0) {
            return ps_fail(PS_DATA,
                           "%s: channel %" PRId64
                           " is \"%s\", and \"%s\" in the data that the checkpoint was trained on: store the "
                           "channels in that order and by those names",
                           series->path, c, ps_text_plain(series->channel_names[c]).text, ps_text_plain(names).text);
        }
    }
    return PS_OK;
}

enum ps_status ps_series_look(const char *path)
{
    struct ps_series *series;
    enum ps_status status = open_series(path, &(struct ps_reading){.masked = 0}, 1, &series);
    ps_series_close(series);
    return status;
}

static enum ps_status look(const void *path)
{
    return ps_series_look(path);
}

enum ps_status ps_series_open_as(const char *path, const struct ps_reading *reading, struct ps_series **series)
{
    *series = NULL;
    struct stat st;
    if (stat(path, &st) != 0) {
        return ps_fail(PS_DATA, "%s: cannot be opened: %s", path, strerror(errno));
    }
    if (!S_ISREG(st.st_mode)) {
        return ps_fail(PS_DATA, "%s: not a regular file: an HDF5 file is needed", path);
    }
    if (access(path, R_OK) != 0) {
        return ps_fail(PS_DATA, "%s: cannot be opened: %s", path, strerror(errno));
    }
    PS_TRY(ps_probe(PS_DATA, path, ps_probe_seconds(st.st_size), look, path));
    return open_series(path, reading, 0, series);
}

enum ps_status ps_series_open_within(const char *path, const struct ps_memory *memory, struct ps_series **series)
{
    return ps_series_open_as(path, &(struct ps_reading){.memory = *memory}, series);
}

enum ps_status ps_series_open(const char *path, struct ps_series **series)
{
    return ps_series_open_within(path, &(struct ps_memory){0}, series);
}

void ps_series_close(struct ps_series *series)
{
    if (series == NULL) {
        return;
    }
    if (series->file != NULL) {
        close_file(series);
    }
    for (int64_t c = 0; series->channel_names != NULL && c < series->channels; c++) {
        free(series->channel_names[c]);
    }
    free(series->channel_names);
    ps_panel_close(series->panel);
    free(series->values);
    free(series->inputs);
    free(series->targets);
    free(series->path);
    free(series);
}
