/* The HDF5 file is made and read in memory (HDF5's core driver): what was verified is what is parsed, and every byte that reaches
 * the disk is written by ps_file_replace, whose failures lose nothing. */
#include "src/checkpoint.h"

#include <hdf5.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/files.h"
#include "data/probe.h"
#include "data/storage.h"
#include "src/config.h"
#include "src/digest.h"

enum { BLOCK = 512, GROWTH = 1 << 20, RANKS = 3, LONGEST_TEXT = 32768 /* an HDF5 attribute holds less than 64 KiB */ };

static const char magic[] = "PatchStep checkpoint\n";
/* HDF5 wants a name for a file in memory, and that no file of that name exists. */
static const char in_memory[] = "/dev/null/checkpoint";

/* The user block: text for people and for `head -c 512`, zeros after it. The digest is that of `tail -c +513 FILE | sha256sum`. */
static void make_block(char block[BLOCK], int format, size_t length, const char *digest)
{
    memset(block, 0, BLOCK);
    snprintf(block, BLOCK, "%sformat %d\nlength %zu\nsha256 %s\n", magic, format, length, digest);
}

/* ---- the file's parts ---- */

/* One pass serves saving, loading and looking: each part is named once, here, and the kind says which way it goes. */
enum kind { SAVING, LOADING, LOOKING /* loading without the values of datasets */ };

struct pass {
    const char *path;
    hid_t file;
    size_t bytes; /* of the file that is loaded */
    enum kind kind;
    enum ps_status status; /* of the first part that failed; later parts do nothing */
};

static void fail(struct pass *pass, const char *what, const char *name, const char *cause)
{
    if (pass->status == PS_OK) {
        pass->status = ps_fail(PS_CHECKPOINT, "%s: %s %s: %s", pass->path, what, name, cause);
    }
}

static void attribute(struct pass *pass, const char *name, hid_t stored, hid_t native, void *value)
{
    if (pass->status != PS_OK) {
        return;
    }
    hid_t space = H5I_INVALID_HID, id;
    int done = 0;
    if (pass->kind == SAVING) {
        space = H5Screate(H5S_SCALAR);
        id = H5Acreate2(pass->file, name, stored, space, H5P_DEFAULT, H5P_DEFAULT);
        done = id >= 0 && H5Awrite(id, native, value) >= 0;
    } else {
        id = H5Aopen(pass->file, name, H5P_DEFAULT);
        hid_t type = id >= 0 ? H5Aget_type(id) : H5I_INVALID_HID;
        space = id >= 0 ? H5Aget_space(id) : H5I_INVALID_HID;
        done = type >= 0 && space >= 0 && H5Tequal(type, stored) > 0 && H5Sget_simple_extent_npoints(space) == 1 &&
               H5Aread(id, native, value) >= 0;
        if (type >= 0) {
            H5Tclose(type);
        }
    }
    if (!done) {
        fail(pass, "attribute", name, pass->kind == SAVING ? "cannot be written" : "missing, or of another type");
    }
    if (id >= 0) {
        H5Aclose(id);
    }
    if (space >= 0) {
        H5Sclose(space);
    }
}

static void attribute_u64(struct pass *pass, const char *name, uint64_t *value)
{
    attribute(pass, name, H5T_STD_U64LE, H5T_NATIVE_UINT64, value);
}

static void attribute_f64(struct pass *pass, const char *name, double *value)
{
    attribute(pass, name, H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, value);
}

/* Whether an attribute is to be written, or is there: files of versions that did not know it do not have it. */
static int present(const struct pass *pass, const char *name, int has_value)
{
    return pass->status == PS_OK && (pass->kind == SAVING ? has_value : H5Aexists(pass->file, name) > 0);
}

/* Absent when it is 0. */
static void attribute_u64_or_0(struct pass *pass, const char *name, uint64_t *value)
{
    if (present(pass, name, *value != 0)) {
        attribute_u64(pass, name, value);
    }
}

/* A text of fixed length, zero-terminated, UTF-8; loading allocates it. */
static void attribute_text(struct pass *pass, const char *name, char **text)
{
    if (pass->status != PS_OK) {
        return;
    }
    size_t size = 0;
    if (pass->kind == SAVING) {
        size = strlen(*text) + 1;
    } else {
        hid_t id = H5Aopen(pass->file, name, H5P_DEFAULT), type = id >= 0 ? H5Aget_type(id) : H5I_INVALID_HID;
        size = type >= 0 && H5Tget_class(type) == H5T_STRING ? H5Tget_size(type) : 0;
        if (type >= 0) {
            H5Tclose(type);
        }
        if (id >= 0) {
            H5Aclose(id);
        }
    }
    if (size == 0 || size > LONGEST_TEXT) {
        fail(pass, "attribute", name, size ? "its text is too long" : "missing, or not text");
        return;
    }
    if (pass->kind != SAVING && !(*text = calloc(size + 1, 1))) {
        fail(pass, "attribute", name, "no memory");
        return;
    }
    hid_t type = H5Tcopy(H5T_C_S1);
    H5Tset_size(type, size);
    H5Tset_cset(type, H5T_CSET_UTF8);
    attribute(pass, name, type, type, *text);
    H5Tclose(type);
}

/* Absent when it is NULL. */
static void attribute_text_or_null(struct pass *pass, const char *name, char **text)
{
    if (present(pass, name, *text != NULL)) {
        attribute_text(pass, name, text);
    }
}

static void group(struct pass *pass, const char *name)
{
    if (pass->kind != SAVING || pass->status != PS_OK) {
        return;
    }
    hid_t create = H5Pcreate(H5P_GROUP_CREATE);
    H5Pset_obj_track_times(create, 0);
    hid_t id = H5Gcreate2(pass->file, name, H5P_DEFAULT, create, H5P_DEFAULT);
    H5Pclose(create);
    if (id < 0) {
        fail(pass, "group", name, "cannot be written");
    } else {
        H5Gclose(id);
    }
}

static int same_shape(hid_t space, int rank, const hsize_t *size)
{
    hsize_t found[RANKS] = {0};
    if (H5Sget_simple_extent_ndims(space) != rank || H5Sget_simple_extent_dims(space, found, NULL) != rank) {
        return 0;
    }
    return memcmp(found, size, (size_t)rank * sizeof *size) == 0;
}

static void dataset(struct pass *pass, const char *folder, const char *name, hid_t stored, hid_t native, int rank,
                    const int64_t *size, void *values)
{
    if (pass->status != PS_OK) {
        return;
    }
    char place[96];
    snprintf(place, sizeof place, "%s/%s", folder, name);
    hsize_t extent[RANKS];
    for (int i = 0; i < rank; i++) {
        extent[i] = (hsize_t)size[i];
    }
    hid_t id, space;
    if (pass->kind == SAVING) {
        hid_t create = H5Pcreate(H5P_DATASET_CREATE);
        H5Pset_obj_track_times(create, 0);
        space = H5Screate_simple(rank, extent, NULL);
        id = H5Dcreate2(pass->file, place, stored, space, H5P_DEFAULT, create, H5P_DEFAULT);
        H5Pclose(create);
        if (id < 0 || H5Dwrite(id, native, H5S_ALL, H5S_ALL, H5P_DEFAULT, values) < 0) {
            fail(pass, "dataset", place, "cannot be written: no memory");
        }
    } else {
        const struct ps_storage storage = {pass->path, PS_CHECKPOINT, pass->file, (int64_t)pass->bytes};
        id = H5I_INVALID_HID;
        pass->status = ps_storage_open(&storage, place, &id);
        space = id >= 0 ? H5Dget_space(id) : H5I_INVALID_HID;
        hid_t type = id >= 0 ? H5Dget_type(id) : H5I_INVALID_HID;
        if (pass->status == PS_OK && H5Tequal(type, stored) <= 0) {
            fail(pass, "dataset", place, "of another type");
        } else if (pass->status == PS_OK && !same_shape(space, rank, extent)) {
            char cause[160] = "its shape is not [";
            for (int i = 0; i < rank; i++) {
                size_t used = strlen(cause);
                snprintf(cause + used, sizeof cause - used, "%s%" PRId64, i ? ", " : "", size[i]);
            }
            strncat(cause, "] as its config says", sizeof cause - strlen(cause) - 1);
            fail(pass, "dataset", place, cause);
        }
        if (pass->status == PS_OK) {
            pass->status = ps_storage_check(&storage, place, id);
        }
        if (pass->status == PS_OK && pass->kind == LOOKING) {
            pass->status = ps_storage_try(&storage, place, id);
        } else if (pass->status == PS_OK && H5Dread(id, native, H5S_ALL, H5S_ALL, H5P_DEFAULT, values) < 0) {
            fail(pass, "dataset", place, "cannot be read");
        }
        if (type >= 0) {
            H5Tclose(type);
        }
    }
    if (id >= 0) {
        H5Dclose(id);
    }
    if (space >= 0) {
        H5Sclose(space);
    }
}

/* Tensors first .. end - 1 of one flat buffer. */
static void tensors(struct pass *pass, const char *folder, const struct ps_parameters *layout, int first, int end, hid_t stored,
                    hid_t native, size_t element, void *flat)
{
    for (int t = first; t < end; t++) {
        const struct ps_parameter *p = &layout->table[t];
        void *values = pass->kind == LOOKING ? NULL : (char *)flat + (size_t)p->offset * element;
        dataset(pass, folder, p->name, stored, native, p->rank, p->size, values);
    }
}

static void attributes(struct pass *pass, struct ps_checkpoint *c, uint64_t *has_moments)
{
    uint64_t channels = (uint64_t)c->scaler.channels, constant = (uint64_t)c->scaler.constant;
    attribute_u64(pass, "channels", &channels);
    attribute_u64(pass, "constant_channels", &constant);
    attribute_u64_or_0(pass, "channel_names_bytes", &c->names_bytes);
    attribute_u64_or_0(pass, "scaled_by_series", &c->by_series);
    attribute_u64(pass, "has_moments", has_moments);
    attribute_u64(pass, "step", &c->step);
    attribute_u64(pass, "epoch", &c->epoch);
    attribute_u64(pass, "cursor", &c->cursor);
    attribute_f64(pass, "loss_sum", &c->loss_sum);
    attribute_u64_or_0(pass, "lost", &c->lost);
    attribute_u64_or_0(pass, "skipped", &c->skipped);
    attribute_u64_or_0(pass, "unobserved", &c->unobserved);
    attribute_u64_or_0(pass, "ranks", &c->ranks);
    attribute_u64(pass, "seed", &c->seed);
    attribute_f64(pass, "best_validation", &c->best_validation);
    attribute_u64(pass, "best_epoch", &c->best_epoch);
    attribute_u64(pass, "epochs_since_best", &c->epochs_since_best);
    attribute_u64(pass, "fingerprint", &c->fingerprint);
    attribute_text(pass, "config", &c->config);
    attribute_text(pass, "level", &c->level);
    attribute_text(pass, "algorithms", &c->algorithms);
    attribute_text(pass, "versions", &c->versions);
    attribute_text_or_null(pass, "program_version", &c->program_version);
    attribute_text_or_null(pass, "kernel_sources", &c->kernel_sources);
    attribute_text_or_null(pass, "kernels", &c->kernels);
    attribute_text_or_null(pass, "init_from", &c->init_from);
    c->scaler.channels = (int64_t)channels;
    c->scaler.constant = (int)constant;
}

static void datasets(struct pass *pass, struct ps_checkpoint *c, uint64_t has_moments)
{
    group(pass, "parameters");
    const int n = c->layout->n;
    tensors(pass, "parameters", c->layout, 0, n, H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, sizeof(float), c->parameters);
    if (c->layout->all > n) {
        group(pass, "statistics");
        tensors(pass, "statistics", c->layout, n, c->layout->all, H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, sizeof(float), c->parameters);
    }
    if (has_moments) {
        group(pass, "optimizer");
        group(pass, "optimizer/m");
        tensors(pass, "optimizer/m", c->layout, 0, n, H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, sizeof(float), c->m);
        group(pass, "optimizer/v");
        tensors(pass, "optimizer/v", c->layout, 0, n, H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, sizeof(double), c->v);
    }
    group(pass, "scaler");
    dataset(pass, "scaler", "mean", H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, 1, &c->scaler.channels, c->scaler.mean);
    dataset(pass, "scaler", "std", H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, 1, &c->scaler.channels, c->scaler.std);
    if (c->names_bytes) {
        const int64_t bytes = (int64_t)c->names_bytes;
        dataset(pass, "", "channel_names", H5T_STD_U8LE, H5T_NATIVE_UINT8, 1, &bytes, c->names);
    }
    if (c->ranks) {
        const int64_t ranks = (int64_t)c->ranks;
        group(pass, "ranks");
        dataset(pass, "ranks", "loss_sum", H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, 1, &ranks, c->rank_losses);
        dataset(pass, "ranks", "lost", H5T_STD_U64LE, H5T_NATIVE_UINT64, 1, &ranks, c->rank_lost);
        dataset(pass, "ranks", "unobserved", H5T_STD_U64LE, H5T_NATIVE_UINT64, 1, &ranks, c->rank_unobserved);
    }
}

/* ---- saving ---- */

/* A file that HDF5 makes in memory, which stays when HDF5 has closed it. */
struct made {
    char *bytes;
};

static void *made_larger(void *bytes, size_t size, H5FD_file_image_op_t operation, void *argument)
{
    (void)operation;
    struct made *made = argument;
    char *larger = realloc(bytes, size);
    made->bytes = larger ? larger : made->bytes;
    return larger;
}

static herr_t made_stays(void *bytes, H5FD_file_image_op_t operation, void *made)
{
    (void)bytes;
    (void)operation;
    (void)made;
    return 0;
}

/* The callbacks' argument is passed as it is. */
static void *same_argument(void *argument)
{
    return argument;
}

static herr_t argument_stays(void *argument)
{
    (void)argument;
    return 0;
}

/* The whole file as *size bytes, the user block not yet written. */
static enum ps_status make_image(const char *path, const struct ps_checkpoint *checkpoint, char **image, size_t *size)
{
    struct ps_checkpoint c = *checkpoint; /* the parts are passed as what may be loaded; saving only reads them */
    uint64_t has_moments = c.m != NULL;
    struct made made = {NULL};
    H5FD_file_image_callbacks_t keep = {.image_realloc = made_larger,
                                        .image_free = made_stays,
                                        .udata_copy = same_argument,
                                        .udata_free = argument_stays,
                                        .udata = &made};
    hid_t create = H5Pcreate(H5P_FILE_CREATE), access = H5Pcreate(H5P_FILE_ACCESS);
    H5Pset_userblock(create, BLOCK);
    H5Pset_obj_track_times(create, 0);
    H5Pset_fapl_core(access, GROWTH, 0);
    H5Pset_file_image_callbacks(access, &keep);
    struct pass pass = {.path = path, .kind = SAVING, .file = H5Fcreate(in_memory, H5F_ACC_TRUNC, create, access)};
    H5Pclose(create);
    H5Pclose(access);
    attributes(&pass, &c, &has_moments);
    datasets(&pass, &c, has_moments);
    /* What HDF5 calls the image is without the user block, and without the room that the driver took in advance. */
    ssize_t bytes = pass.status == PS_OK && H5Fflush(pass.file, H5F_SCOPE_GLOBAL) >= 0 ? H5Fget_file_image(pass.file, NULL, 0) : -1;
    int done = bytes > 0;
    done = pass.file >= 0 && H5Fclose(pass.file) >= 0 && done && made.bytes;
    if (pass.status == PS_OK && !done) {
        pass.status = ps_fail(PS_CHECKPOINT, "%s: no memory for the file's contents", path);
    }
    if (pass.status != PS_OK) {
        free(made.bytes);
        made.bytes = NULL;
    }
    *image = made.bytes;
    *size = pass.status == PS_OK ? BLOCK + (size_t)bytes : 0;
    return pass.status;
}

/* The digest is worked out while what it is of is on its way to the disk. */
enum ps_status ps_checkpoint_save(const char *path, const struct ps_checkpoint *checkpoint)
{
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    char *image = NULL, digest[PS_DIGEST_HEX];
    size_t size = 0;
    struct ps_output *output;
    enum ps_status status = make_image(path, checkpoint, &image, &size);
    if (status == PS_OK && (status = ps_output_open(PS_CHECKPOINT, path, &output)) == PS_OK) {
        ps_output_write(output, BLOCK, image + BLOCK, size - BLOCK);
        ps_output_start(output);
        if (ps_digest(image + BLOCK, size - BLOCK, digest)) {
            make_block(image, PS_CHECKPOINT_FORMAT, size, digest);
            ps_output_write(output, 0, image, BLOCK);
        } else {
            status = ps_fail(PS_CHECKPOINT, "%s: OpenSSL gives no SHA-256", path);
        }
        status = ps_output_finish(output, status);
    }
    free(image);
    return status;
}

/* ---- loading ---- */

/* digest: of what it says, which is right. */
static enum ps_status verify(const char *path, const char *bytes, size_t size, char digest[PS_DIGEST_HEX])
{
    if (size < BLOCK || memcmp(bytes, magic, sizeof magic - 1) != 0) {
        return ps_fail(PS_CHECKPOINT, "%s: not a checkpoint of PatchStep%s", path,
                       size < BLOCK ? ", or cut off at its beginning" : "");
    }
    int format = 0;
    size_t length = 0;
    char head[BLOCK + 1] = "", said[PS_DIGEST_HEX] = "", block[BLOCK];
    memcpy(head, bytes, BLOCK);
    if (sscanf(head + sizeof magic - 1, "format %d length %zu sha256 %64s", &format, &length, said) != 3) {
        return ps_fail(PS_CHECKPOINT, "%s: altered: its first 512 bytes do not say format, length and digest", path);
    }
    make_block(block, format, length, said);
    if (memcmp(block, bytes, BLOCK) != 0) {
        return ps_fail(PS_CHECKPOINT, "%s: altered: its first 512 bytes are not as they were written", path);
    }
    if (format != PS_CHECKPOINT_FORMAT) {
        return ps_fail(PS_CHECKPOINT, "%s: format %d; this program reads format %d: use the version that wrote it", path, format,
                       PS_CHECKPOINT_FORMAT);
    }
    if (length != size) {
        return ps_fail(PS_CHECKPOINT, "%s: %s: has %zu bytes of %zu", path, size < length ? "truncated" : "altered", size, length);
    }
    if (!ps_digest(bytes + BLOCK, size - BLOCK, digest)) {
        return ps_fail(PS_CHECKPOINT, "%s: OpenSSL gives no SHA-256", path);
    }
    if (strcmp(digest, said) != 0) {
        return ps_fail(PS_CHECKPOINT, "%s: altered: its SHA-256 is %.16s..., not %.16s... as it says", path, digest, said);
    }
    return PS_OK;
}

/* The layout that the stored config and channel count ask for. */
static enum ps_status make_layout(const char *path, struct ps_checkpoint *c)
{
    struct ps_config config;
    if (ps_config_parse_saved(c->config, "config", &config) != PS_OK) {
        return ps_fail(PS_CHECKPOINT, "%s: attribute config: %s", path, ps_error_message());
    }
    struct ps_model_shape shape = ps_config_shape(&config, c->scaler.channels);
    ps_config_free(&config);
    if (ps_parameters_layout(&shape, &c->layout) != PS_OK) {
        return ps_fail(PS_CHECKPOINT, "%s: its model cannot be laid out: %s", path, ps_error_message());
    }
    c->own_layout = 1;
    return PS_OK;
}

/* Whether the file is as large as the tensors that its config asks for. */
static enum ps_status check_size(const char *path, const struct ps_checkpoint *c, uint64_t has_moments, size_t size)
{
    size_t moments = has_moments ? sizeof *c->m + sizeof *c->v : 0, expected = 0;
    for (int t = 0; t < c->layout->all; t++) {
        expected += (size_t)ps_parameter_count(&c->layout->table[t]) * (sizeof *c->parameters + (t < c->layout->n ? moments : 0));
    }
    expected += (size_t)c->scaler.channels * (sizeof *c->scaler.mean + sizeof *c->scaler.std);
    return expected <= size && c->names_bytes <= size - expected && c->ranks <= size / (sizeof(double) + sizeof(uint64_t))
               ? PS_OK
               : ps_fail(PS_CHECKPOINT, "%s: has %zu bytes, and its config and channels ask for at least %zu", path, size,
                         expected);
}

static enum ps_status allocate(const char *path, struct ps_checkpoint *c, uint64_t has_moments)
{
    /* Zeroed: the gaps between tensors stay 0. */
    size_t count = (size_t)c->layout->count, channels = (size_t)c->scaler.channels;
    c->parameters = calloc((size_t)c->layout->stored, sizeof *c->parameters);
    c->m = has_moments ? calloc(count, sizeof *c->m) : NULL;
    c->v = has_moments ? calloc(count, sizeof *c->v) : NULL;
    c->scaler.mean = calloc(channels, sizeof *c->scaler.mean);
    c->scaler.std = calloc(channels, sizeof *c->scaler.std);
    c->names = c->names_bytes ? malloc(c->names_bytes) : NULL;
    PS_TRY(ps_checkpoint_room(c));
    if ((c->names_bytes && !c->names) || !c->parameters || !c->scaler.mean || !c->scaler.std || (has_moments && (!c->m || !c->v))) {
        return ps_fail(PS_CHECKPOINT, "%s: no memory for its %zu parameters", path, count);
    }
    return PS_OK;
}

/* As many names as channels, the last one with its end. */
static enum ps_status check_names(const char *path, const struct ps_checkpoint *c)
{
    uint64_t ends = 0;
    for (uint64_t i = 0; i < c->names_bytes; i++) {
        ends += c->names[i] == 0;
    }
    return !c->names || (ends == (uint64_t)c->scaler.channels && c->names[c->names_bytes - 1] == 0)
               ? PS_OK
               : ps_fail(PS_CHECKPOINT, "%s: dataset /channel_names: not the names of %" PRId64 " channels", path,
                         c->scaler.channels);
}

/* BatchNorm divides by the root of a variance, which is finite and not negative. */
static enum ps_status check_statistics(const char *path, const struct ps_checkpoint *c)
{
    for (int t = c->layout->n; t < c->layout->all; t++) {
        const struct ps_parameter *p = &c->layout->table[t];
        const int variance = strcmp(strrchr(p->name, '_'), "_var") == 0;
        for (int64_t i = 0; i < ps_parameter_count(p); i++) {
            const float value = c->parameters[p->offset + i];
            if (!isfinite(value) || (variance && value < 0)) {
                return ps_fail(PS_CHECKPOINT, "%s: dataset statistics/%s: element %" PRId64 " is %g: a running %s is finite%s",
                               path, p->name, i, (double)value, variance ? "variance" : "mean",
                               variance ? " and not negative" : "");
            }
        }
    }
    return PS_OK;
}

/* The bytes in memory as a file that HDF5 reads in place: the driver asks for a copy and gets the bytes themselves. */
static void *image_itself(size_t size, H5FD_file_image_op_t operation, void *bytes)
{
    (void)size;
    (void)operation;
    return bytes;
}

static void *image_copied(void *to, const void *from, size_t size, H5FD_file_image_op_t operation, void *bytes)
{
    (void)from;
    (void)size;
    (void)operation;
    (void)bytes;
    return to;
}

static herr_t image_kept(void *image, H5FD_file_image_op_t operation, void *bytes)
{
    (void)image;
    (void)operation;
    (void)bytes;
    return 0;
}

static hid_t open_image(char *bytes, size_t size)
{
    H5FD_file_image_callbacks_t in_place = {.image_malloc = image_itself,
                                            .image_memcpy = image_copied,
                                            .image_free = image_kept,
                                            .udata_copy = same_argument,
                                            .udata_free = argument_stays,
                                            .udata = bytes};
    hid_t access = H5Pcreate(H5P_FILE_ACCESS), file = H5I_INVALID_HID;
    if (H5Pset_fapl_core(access, GROWTH, 0) >= 0 && H5Pset_file_image_callbacks(access, &in_place) >= 0 &&
        H5Pset_file_image(access, bytes, size) >= 0) {
        file = H5Fopen(in_memory, H5F_ACC_RDONLY, access);
    }
    H5Pclose(access);
    return file;
}

static enum ps_status load(enum kind kind, const char *path, char *bytes, size_t size, struct ps_checkpoint *checkpoint)
{
    memset(checkpoint, 0, sizeof *checkpoint);
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    struct pass pass = {.path = path, .kind = kind, .bytes = size, .file = open_image(bytes, size)};
    if (pass.file < 0) {
        pass.status = ps_fail(PS_CHECKPOINT, "%s: HDF5 cannot open it", path);
    }
    uint64_t has_moments = 0;
    attributes(&pass, checkpoint, &has_moments);
    if (pass.status == PS_OK) {
        pass.status = make_layout(path, checkpoint);
    }
    if (pass.status == PS_OK) {
        pass.status = check_size(path, checkpoint, has_moments, size);
    }
    if (pass.status == PS_OK && kind == LOADING) {
        pass.status = allocate(path, checkpoint, has_moments);
    }
    if (pass.status == PS_OK) {
        datasets(&pass, checkpoint, has_moments);
    }
    if (pass.status == PS_OK && kind == LOADING) {
        pass.status = check_names(path, checkpoint);
    }
    if (pass.status == PS_OK && kind == LOADING) {
        pass.status = check_statistics(path, checkpoint);
    }
    if (pass.file >= 0) {
        H5Fclose(pass.file);
    }
    if (pass.status != PS_OK) {
        ps_checkpoint_free(checkpoint);
    }
    return pass.status;
}

enum ps_status ps_checkpoint_look(const char *path, char *bytes, size_t size)
{
    struct ps_checkpoint checkpoint;
    enum ps_status status = load(LOOKING, path, bytes, size, &checkpoint);
    ps_checkpoint_free(&checkpoint);
    return status;
}

struct image {
    const char *path;
    char *bytes;
    size_t size;
};

static enum ps_status look(const void *argument)
{
    const struct image *image = argument;
    return ps_checkpoint_look(image->path, image->bytes, image->size);
}

enum ps_status ps_checkpoint_load(const char *path, struct ps_checkpoint *checkpoint)
{
    memset(checkpoint, 0, sizeof *checkpoint);
    struct image image = {.path = path};
    PS_TRY(ps_file_read(PS_CHECKPOINT, path, 0, &image.bytes, &image.size));
    char digest[PS_DIGEST_HEX];
    enum ps_status status = verify(path, image.bytes, image.size, digest);
    if (status == PS_OK) {
        status = ps_probe(PS_CHECKPOINT, path, 10, look, &image);
    }
    if (status == PS_OK) {
        status = load(LOADING, path, image.bytes, image.size, checkpoint);
    }
    if (status == PS_OK) {
        memcpy(checkpoint->digest, digest, sizeof digest);
    }
    free(image.bytes);
    return status;
}

struct ps_reading ps_checkpoint_reading(const struct ps_checkpoint *checkpoint, const struct ps_config *config, int64_t batch)
{
    struct ps_reading reading = ps_config_reading(config, batch);
    if (checkpoint && checkpoint->names) {
        reading.channels = checkpoint->names;
        reading.channel_count = checkpoint->scaler.channels;
        reading.trained = 1;
    }
    return reading;
}

enum ps_status ps_checkpoint_room(struct ps_checkpoint *c)
{
    if (c->ranks) {
        c->rank_losses = calloc(c->ranks, sizeof *c->rank_losses);
        c->rank_lost = calloc(c->ranks, sizeof *c->rank_lost);
        c->rank_unobserved = calloc(c->ranks, sizeof *c->rank_unobserved);
    }
    return !c->ranks || (c->rank_losses && c->rank_lost && c->rank_unobserved)
               ? PS_OK
               : ps_fail(PS_CHECKPOINT, "no memory for the losses of %" PRIu64 " ranks", c->ranks);
}

void ps_checkpoint_free(struct ps_checkpoint *checkpoint)
{
    if (checkpoint->own_layout) {
        ps_parameters_free(checkpoint->layout);
    }
    free(checkpoint->parameters);
    free(checkpoint->m);
    free(checkpoint->v);
    ps_scaler_free(&checkpoint->scaler);
    free(checkpoint->rank_losses);
    free(checkpoint->rank_lost);
    free(checkpoint->rank_unobserved);
    free(checkpoint->names);
    free(checkpoint->config);
    free(checkpoint->level);
    free(checkpoint->algorithms);
    free(checkpoint->versions);
    free(checkpoint->program_version);
    free(checkpoint->kernel_sources);
    free(checkpoint->kernels);
    free(checkpoint->init_from);
    memset(checkpoint, 0, sizeof *checkpoint);
}
