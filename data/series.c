#include "data/series.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/hdf5_util.h"
#include "data/probe.h"
#include "data/storage.h"
#include "data/text.h"

const char *ps_split_name(enum ps_split split)
{
    static const char *const names[PS_SPLITS] = {"train", "val", "test"};
    return names[split];
}

/* A dataset that is open, with its sizes. */
struct dataset {
    hid_t id;
    const char *name; /* "/series" */
    int rank;
    int64_t size[3];
    int64_t count; /* product of the sizes */
};

static void dataset_drop(struct dataset *d)
{
    ps_hdf5_drop(&d->id);
}
#define DATASET_SCOPED __attribute__((cleanup(dataset_drop)))

/* Float32 and float64 pass, of either byte order: HDF5 knows other floats, and converts them bit by bit. Integers are refused: a
 * count or a code that was meant to be scaled first reads the same as a measured value. */
static enum ps_status check_type(const char *path, const struct dataset *d)
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

/* Opens /name of the given rank and checks sizes, type and storage; nothing is read. shape is what the message says the sizes
 * should be. */
static enum ps_status open_dataset(const struct ps_storage *storage, const char *name, int rank, const char *shape,
                                   struct dataset *d)
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
        if (__builtin_mul_overflow(d->count, d->size[i], &d->count) || d->count > INT64_MAX / (int64_t)sizeof(float)) {
            return ps_fail(PS_DATA, "%s: the sizes of %s overflow", path, name);
        }
    }
    PS_TRY(check_type(path, d));
    return ps_storage_check(storage, name, d->id);
}

static int64_t physical_memory(void)
{
    return (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
}

/* Reads the whole dataset as float32 into new memory. */
static enum ps_status read_dataset(const char *path, const struct dataset *d, float **values)
{
    int64_t bytes = d->count * (int64_t)sizeof(float), memory = physical_memory();
    /* Asked before allocating: a system that overcommits grants any size and fails when it is filled. */
    *values = bytes <= memory ? malloc((size_t)bytes) : NULL;
    if (*values == NULL) {
        return ps_fail(PS_DATA, "%s: %s needs %.1f GiB of host memory, and this machine has %.1f GiB", path, d->name,
                       (double)bytes * 0x1p-30, (double)memory * 0x1p-30);
    }
    if (H5Dread(d->id, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, *values) < 0) {
        return ps_fail(PS_DATA, "%s: %s cannot be read: %s", path, d->name, ps_hdf5_reason().text);
    }
    return PS_OK;
}

/* Names the first element that is NaN or infinite. */
static enum ps_status check_finite(const char *path, const struct dataset *d, const float *values, char *const *names)
{
    int64_t at = 0;
    while (at < d->count && isfinite(values[at])) {
        at++;
    }
    if (at == d->count) {
        return PS_OK;
    }
    const char *value = isnan(values[at]) ? "NaN" : values[at] > 0 ? "Inf" : "-Inf";
    int64_t channel = d->rank == 2 ? at % d->size[1] : at / d->size[2] % d->size[1];
    char label[96] = "";
    if (names != NULL) {
        snprintf(label, sizeof label, " (%s)", ps_text_plain(names[channel]).text);
    }
    if (d->rank == 2) {
        return ps_fail(PS_DATA,
                       "%s: %s holds %s in channel %" PRId64 "%s, row %" PRId64
                       " (counted from 0): fill or cut such rows; every value must be finite in float32",
                       path, d->name, value, channel, label, at / d->size[1]);
    }
    return ps_fail(PS_DATA,
                   "%s: %s holds %s in channel %" PRId64 "%s, window %" PRId64 ", row %" PRId64
                   " of it (counted from 0): fill or leave out such windows; every value must be finite in float32",
                   path, d->name, value, channel, label, at / (d->size[1] * d->size[2]), at % d->size[2]);
}

/* Takes in element bits two at a time. Each step is a bijection of h for a fixed word and of the word for a fixed h, and the shift
 * carries high bits down, so that changes of sign alone do not cancel (they would in plain FNV on words). The final mix is
 * MurmurHash3's fmix64 (Appleby 2011). */
static uint64_t hash_step(uint64_t h, uint64_t word)
{
    h = (h ^ word) * 0x9e3779b97f4a7c15u;
    return h ^ h >> 32;
}

static uint64_t hash_dataset(uint64_t h, const struct dataset *d, const float *values)
{
    h = hash_step(h, (uint64_t)d->rank);
    for (int i = 0; i < d->rank; i++) {
        h = hash_step(h, (uint64_t)d->size[i]);
    }
    for (int64_t i = 0; i < d->count; i += 2) {
        uint32_t low, high = 0;
        memcpy(&low, values + i, sizeof low);
        if (i + 1 < d->count) {
            memcpy(&high, values + i + 1, sizeof high);
        }
        h = hash_step(h, (uint64_t)high << 32 | low);
    }
    return h;
}

static uint64_t hash_finish(uint64_t h)
{
    h = (h ^ h >> 33) * 0xff51afd7ed558ccdu;
    h = (h ^ h >> 33) * 0xc4ceb9fe1a85ec53u;
    return h ^ h >> 33;
}

/* Attribute `channels` of the dataset: one text for each channel, of fixed or variable length. None: names stay NULL. */
static enum ps_status read_channel_names(const struct ps_storage *storage, const struct dataset *d, struct ps_series *series)
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
        const char *text = texts + (size_t)i * size;
        if (variable) {
            memcpy(&text, text, sizeof text);
        }
        series->channel_names[i] = strdup(text != NULL ? text : "");
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

static enum ps_status read_series(const struct ps_storage *storage, int looking, struct ps_series *series)
{
    struct dataset d DATASET_SCOPED = {.id = H5I_INVALID_HID};
    PS_TRY(open_dataset(storage, "/series", 2, "[rows, channels]", &d));
    series->layout = PS_LAYOUT_SERIES;
    series->rows = d.size[0];
    series->channels = d.size[1];
    PS_TRY(read_channel_names(storage, &d, series));
    if (looking) {
        return ps_storage_inflate(storage, "/series", d.id);
    }
    PS_TRY(read_dataset(series->path, &d, &series->values));
    PS_TRY(check_finite(series->path, &d, series->values, series->channel_names));
    series->fingerprint = hash_finish(hash_dataset(0, &d, series->values));
    return PS_OK;
}

static enum ps_status read_windows(const struct ps_storage *storage, int looking, struct ps_series *series)
{
    struct dataset inputs DATASET_SCOPED = {.id = H5I_INVALID_HID}, targets DATASET_SCOPED = {.id = H5I_INVALID_HID};
    PS_TRY(open_dataset(storage, "/inputs", 3, "[windows, channels, seq_len]", &inputs));
    PS_TRY(open_dataset(storage, "/targets", 3, "[windows, channels, pred_len]", &targets));
    for (int i = 0; i < 2; i++) {
        if (inputs.size[i] != targets.size[i]) {
            return ps_fail(PS_DATA, "%s: /inputs has %" PRId64 " %s and /targets has %" PRId64 ": they must be equal", series->path,
                           inputs.size[i], i == 0 ? "windows" : "channels", targets.size[i]);
        }
    }
    series->layout = PS_LAYOUT_WINDOWS;
    series->rows = inputs.size[0];
    series->channels = inputs.size[1];
    series->seq_len = inputs.size[2];
    series->pred_len = targets.size[2];
    PS_TRY(read_channel_names(storage, &inputs, series));
    if (looking) {
        PS_TRY(ps_storage_inflate(storage, "/inputs", inputs.id));
        return ps_storage_inflate(storage, "/targets", targets.id);
    }
    PS_TRY(read_dataset(series->path, &inputs, &series->inputs));
    PS_TRY(read_dataset(series->path, &targets, &series->targets));
    PS_TRY(check_finite(series->path, &inputs, series->inputs, series->channel_names));
    PS_TRY(check_finite(series->path, &targets, series->targets, series->channel_names));
    series->fingerprint = hash_finish(hash_dataset(hash_dataset(0, &inputs, series->inputs), &targets, series->targets));
    return PS_OK;
}

/* Looking: everything but the values, with more care. */
static enum ps_status read_file(int64_t bytes, int looking, struct ps_series *series)
{
    const char *path = series->path;
    if (H5Fis_hdf5(path) <= 0) {
        return ps_fail(PS_DATA, "%s: not an HDF5 file (import_csv makes one from a CSV)", path);
    }
    hid_t file PS_HDF5_SCOPED = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
    if (file < 0) {
        return ps_fail(PS_DATA, "%s: cannot be opened as HDF5: %s", path, ps_hdf5_reason().text);
    }
    const struct ps_storage storage = {.path = path, .failure = PS_DATA, .file = file, .bytes = bytes};
    int has_series = H5Lexists(file, "series", H5P_DEFAULT) > 0;
    int has_inputs = H5Lexists(file, "inputs", H5P_DEFAULT) > 0, has_targets = H5Lexists(file, "targets", H5P_DEFAULT) > 0;
    if (has_series && (has_inputs || has_targets)) {
        return ps_fail(PS_DATA, "%s: has both /series and %s: which is meant? keep one layout", path,
                       has_inputs ? "/inputs" : "/targets");
    }
    if (has_series) {
        return read_series(&storage, looking, series);
    }
    if (has_inputs && has_targets) {
        return read_windows(&storage, looking, series);
    }
    if (has_inputs || has_targets) {
        return ps_fail(PS_DATA, "%s: has %s without %s: ready-made windows need both", path, has_inputs ? "/inputs" : "/targets",
                       has_inputs ? "/targets" : "/inputs");
    }
    return ps_fail(PS_DATA, "%s: has neither /series nor /inputs and /targets", path);
}

static enum ps_status open_series(const char *path, int looking, struct ps_series **series)
{
    *series = NULL;
    ps_hdf5_quiet();
    struct stat st;
    if (stat(path, &st) != 0) {
        return ps_fail(PS_DATA, "%s: cannot be opened: %s", path, strerror(errno));
    }
    struct ps_series *s = calloc(1, sizeof *s);
    if (s != NULL) {
        s->path = strdup(path);
    }
    if (s == NULL || s->path == NULL) {
        free(s);
        return ps_fail(PS_DATA, "%s: out of host memory", path);
    }
    enum ps_status status = read_file(st.st_size, looking, s);
    if (status != PS_OK) {
        ps_series_close(s);
        return status;
    }
    *series = s;
    return PS_OK;
}

enum ps_status ps_series_look(const char *path)
{
    struct ps_series *series;
    enum ps_status status = open_series(path, 1, &series);
    ps_series_close(series);
    return status;
}

static enum ps_status look(const void *path)
{
    return ps_series_look(path);
}

enum ps_status ps_series_open(const char *path, struct ps_series **series)
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
    /* Inflating is what may take long: a second for each 8 MiB of the file, though a fourth of it would do. */
    PS_TRY(ps_probe(PS_DATA, path, 10 + (unsigned)(st.st_size >> 23), look, path));
    return open_series(path, 0, series);
}

void ps_series_close(struct ps_series *series)
{
    if (series == NULL) {
        return;
    }
    for (int64_t c = 0; series->channel_names != NULL && c < series->channels; c++) {
        free(series->channel_names[c]);
    }
    free(series->channel_names);
    free(series->values);
    free(series->inputs);
    free(series->targets);
    free(series->path);
    free(series);
}
