/* Checkpoints come back bit for bit; one that is cut off, altered or foreign is refused; a save that fails loses nothing; of those
 * in a folder as many are kept as was asked, and the newest intact one is found. And the files beside them: metrics.jsonl,
 * test.json.
 *
 * PS_TEST_FULL=1: 3,000 random damages and every byte of HDF5's own structures, instead of 200 and a part. */
#include <dirent.h>
#include <hdf5.h>
#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/files.h"
#include "src/checkpoint.h"
#include "src/digest.h"
#include "src/kept.h"
#include "src/metrics.h"
#include "tests/seal.h"
#include "tests/suite.h"

static char folder[] = "/tmp/ps_checkpoint_XXXXXX";
static int full;

#define OK(expression) ck_assert_msg((expression) == PS_OK, "%s: %s", #expression, ps_error_message())

static char *in_folder(const char *name, char path[PATH_MAX])
{
    snprintf(path, PATH_MAX, "%s/%s", folder, name);
    return path;
}

static int exists(const char *path)
{
    return access(path, F_OK) == 0;
}

static int partial_exists(const char *path)
{
    char partial[PATH_MAX + 16];
    snprintf(partial, sizeof partial, "%s.partial", path);
    return exists(partial);
}

static void put_file(const char *path, const void *bytes, size_t size)
{
    FILE *out = fopen(path, "wb");
    ck_assert_ptr_nonnull(out);
    ck_assert_uint_eq(fwrite(bytes, 1, size, out), size);
    ck_assert_int_eq(fclose(out), 0);
}

static char *get_file(const char *path, size_t *size)
{
    char *bytes;
    ck_assert_msg(ps_file_read(PS_DATA, path, 0, &bytes, size) == PS_OK, "%s", ps_error_message());
    return bytes;
}

/* PS_CHECKPOINT, one line that names the file and says `cause`. */
static void must_refuse(const char *path, const char *cause)
{
    struct ps_checkpoint c;
    ck_assert_int_eq(ps_checkpoint_load(path, &c), PS_CHECKPOINT);
    ck_assert_msg(strstr(ps_error_message(), path) != NULL && strstr(ps_error_message(), cause) != NULL, "expected: %s\ngot: %s",
                  cause, ps_error_message());
    ck_assert_ptr_null(strchr(ps_error_message(), '\n'));
}

static const char config_text[] = "data:\n  path: a.h5\nmodel:\n  seq_len: 24\n  pred_len: 3\n  patch_len: 8\n  stride: 4\n"
                                  "  d_model: 6\n  n_heads: 2\n  d_ff: 10\n  n_layers: 2\n";

enum { CHANNELS = 3 };
static const char channel_names[] = "load\0\0\xc3\xb6l"; /* and the literal's own zero byte */

static uint32_t noise(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state;
}

/* A run's state with every bit pattern in it, NaN, infinities and -0 among them, but for BatchNorm's running statistics, which are
 * numbers; the gaps between tensors 0. */
static struct ps_checkpoint make_of(enum ps_norm norm, int with_moments)
{
    struct ps_checkpoint c = {.step = 12345678901234567u,
                              .epoch = 7,
                              .cursor = 1920,
                              .loss_sum = 0.1 + 0.2,
                              .lost = with_moments ? 12 : 0,
                              .skipped = with_moments ? 3 : 0,
                              .seed = UINT64_MAX,
                              .best_validation = HUGE_VAL,
                              .best_epoch = 5,
                              .epochs_since_best = 2,
                              .fingerprint = 0x8000000000000001u};
    struct ps_model_shape shape = {.channels = CHANNELS,
                                   .seq_len = 24,
                                   .pred_len = 3,
                                   .patch_len = 8,
                                   .stride = 4,
                                   .pad_end = 1,
                                   .d_model = 6,
                                   .n_heads = 2,
                                   .d_ff = 10,
                                   .n_layers = 2,
                                   .dropout = 0.2,
                                   .revin = 1,
                                   .norm = norm};
    ck_assert_int_eq(ps_parameters_layout(&shape, &c.layout), PS_OK);
    c.own_layout = 1;
    size_t count = (size_t)c.layout->count;
    c.parameters = calloc((size_t)c.layout->stored, sizeof(float));
    c.m = with_moments ? calloc(count, sizeof(float)) : NULL;
    c.v = with_moments ? calloc(count, sizeof(double)) : NULL;
    uint32_t state = 1;
    for (int t = 0; t < c.layout->n; t++) {
        const struct ps_parameter *p = &c.layout->table[t];
        for (int64_t i = p->offset; i < p->offset + p->size[0] * (p->rank == 2 ? p->size[1] : 1); i++) {
            uint32_t bits = noise(&state);
            memcpy(&c.parameters[i], &bits, sizeof bits);
            if (with_moments) {
                uint64_t wide = ((uint64_t)noise(&state) << 32) | noise(&state);
                bits = noise(&state);
                memcpy(&c.m[i], &bits, sizeof bits);
                memcpy(&c.v[i], &wide, sizeof wide);
            }
        }
    }
    for (int t = c.layout->n; t < c.layout->all; t++) {
        const struct ps_parameter *p = &c.layout->table[t];
        for (int64_t i = 0; i < ps_parameter_count(p); i++) {
            c.parameters[p->offset + i] = (float)(noise(&state) >> 8) * 0x1p-20f;
        }
    }
    ck_assert_int_eq(ps_scaler_identity(CHANNELS, &c.scaler), PS_OK);
    for (int i = 0; i < CHANNELS; i++) {
        c.scaler.mean[i] = 1.0 / (i + 3);
        c.scaler.std[i] = i + 0.1;
    }
    c.scaler.constant = 1;
    c.names_bytes = sizeof channel_names;
    c.names = malloc(sizeof channel_names);
    memcpy(c.names, channel_names, sizeof channel_names);
    char config[sizeof config_text + 16];
    snprintf(config, sizeof config, "%s%s", config_text, norm == PS_NORM_BATCH ? "  norm: batch\n" : "");
    c.config = strdup(config);
    c.level = strdup("gemm");
    c.algorithms = strdup("");
    c.versions = strdup("backend cpu; OpenBLAS \xc2\xb5");
    c.program_version = strdup("1.2.3");
    c.kernel_sources = strdup("0123456789abcdef");
    c.kernels = strdup("layer of two kernels");
    return c;
}

static struct ps_checkpoint make(int with_moments)
{
    return make_of(PS_NORM_LAYER, with_moments);
}

static void same(const struct ps_checkpoint *a, const struct ps_checkpoint *b)
{
    size_t count = (size_t)a->layout->count;
    ck_assert_int_eq(a->layout->count, b->layout->count);
    ck_assert_int_eq(a->layout->n, b->layout->n);
    ck_assert_int_eq(a->layout->stored, b->layout->stored);
    ck_assert_mem_eq(a->parameters, b->parameters, (size_t)a->layout->stored * sizeof(float));
    ck_assert_int_eq(a->m != NULL, b->m != NULL);
    ck_assert_int_eq(a->v != NULL, b->v != NULL);
    if (a->m) {
        ck_assert_mem_eq(a->m, b->m, count * sizeof(float));
        ck_assert_mem_eq(a->v, b->v, count * sizeof(double));
    }
    ck_assert_int_eq(a->scaler.channels, b->scaler.channels);
    ck_assert_int_eq(a->scaler.constant, b->scaler.constant);
    ck_assert_mem_eq(a->scaler.mean, b->scaler.mean, CHANNELS * sizeof(double));
    ck_assert_mem_eq(a->scaler.std, b->scaler.std, CHANNELS * sizeof(double));
    ck_assert_uint_eq(a->names_bytes, b->names_bytes);
    ck_assert(a->names_bytes > 0 ? memcmp(a->names, b->names, a->names_bytes) == 0 : b->names == NULL);
    ck_assert(a->step == b->step && a->epoch == b->epoch && a->cursor == b->cursor && a->seed == b->seed);
    ck_assert(a->lost == b->lost && a->skipped == b->skipped);
    ck_assert(a->loss_sum == b->loss_sum && a->best_validation == b->best_validation);
    ck_assert(a->best_epoch == b->best_epoch && a->epochs_since_best == b->epochs_since_best && a->fingerprint == b->fingerprint);
    ck_assert_str_eq(a->config, b->config);
    ck_assert_str_eq(a->level, b->level);
    ck_assert_str_eq(a->algorithms, b->algorithms);
    ck_assert_str_eq(a->versions, b->versions);
    ck_assert_pstr_eq(a->program_version, b->program_version);
    ck_assert_pstr_eq(a->kernel_sources, b->kernel_sources);
    ck_assert_pstr_eq(a->kernels, b->kernels);
}

static void save(const char *path, const struct ps_checkpoint *c)
{
    ck_assert_msg(ps_checkpoint_save(path, c) == PS_OK, "%s", ps_error_message());
    ck_assert(!partial_exists(path));
}

START_TEST(round_trip)
{
    char path[PATH_MAX];
    for (int i = 0; i < 4; i++) {
        struct ps_checkpoint a = make_of(i < 2 ? PS_NORM_LAYER : PS_NORM_BATCH, i % 2), b;
        save(in_folder("a.h5", path), &a);
        ck_assert_msg(ps_checkpoint_load(path, &b) == PS_OK, "%s", ps_error_message());
        same(&a, &b);
        ps_checkpoint_free(&a);
        ps_checkpoint_free(&b);
        ps_checkpoint_free(&b); /* twice is fine */
    }
}
END_TEST

/* Data without names, as in files of versions that did not keep them; and what are no names of CHANNELS channels. */
START_TEST(names)
{
    char path[PATH_MAX];
    struct ps_checkpoint a = make(1), b;
    const uint64_t all = a.names_bytes;
    a.names_bytes = all - 1; /* the last one without its end */
    save(in_folder("names.h5", path), &a);
    must_refuse(path, "/channel_names: not the names of 3 channels");
    a.names_bytes = 5; /* one name */
    save(path, &a);
    must_refuse(path, "/channel_names: not the names of 3 channels");
    a.names_bytes = 0;
    free(a.names);
    a.names = NULL;
    save(path, &a);
    hid_t file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
    ck_assert(H5Aexists(file, "channel_names_bytes") == 0 && H5Lexists(file, "channel_names", H5P_DEFAULT) == 0);
    H5Fclose(file);
    ck_assert_msg(ps_checkpoint_load(path, &b) == PS_OK, "%s", ps_error_message());
    same(&a, &b);
    ps_checkpoint_free(&a);
    ps_checkpoint_free(&b);
}
END_TEST

/* Who wrote it is unknown in files of versions that did not say, and can be read by anyone in the others. */
START_TEST(writer_unknown)
{
    static const char *const names[] = {"program_version", "kernel_sources", "kernels"};
    char path[PATH_MAX];
    for (int unknown = 0; unknown < 4; unknown++) { /* one left out, or none */
        struct ps_checkpoint a = make(1), b;
        char **const texts[] = {&a.program_version, &a.kernel_sources, &a.kernels};
        if (unknown < 3) {
            free(*texts[unknown]);
            *texts[unknown] = NULL;
        }
        save(in_folder("writer.h5", path), &a);
        hid_t file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
        for (int i = 0; i < 3; i++) {
            ck_assert_int_eq(H5Aexists(file, names[i]) > 0, i != unknown);
        }
        H5Fclose(file);
        ck_assert_msg(ps_checkpoint_load(path, &b) == PS_OK, "%s", ps_error_message());
        same(&a, &b);
        ps_checkpoint_free(&a);
        ps_checkpoint_free(&b);
    }
}
END_TEST

START_TEST(same_state_same_bytes)
{
    char a_path[PATH_MAX], b_path[PATH_MAX];
    struct ps_checkpoint a = make(1), b = make(1), c;
    save(in_folder("a.h5", a_path), &a);
    sleep(1); /* a time stamp would show */
    save(in_folder("b.h5", b_path), &b);
    size_t a_size, b_size;
    char *a_bytes = get_file(a_path, &a_size), *b_bytes = get_file(b_path, &b_size);
    ck_assert_uint_eq(a_size, b_size);
    ck_assert_mem_eq(a_bytes, b_bytes, a_size);
    free(b_bytes);
    /* And what was loaded is written as the same file again. */
    ck_assert_int_eq(ps_checkpoint_load(a_path, &c), PS_OK);
    save(b_path, &c);
    b_bytes = get_file(b_path, &b_size);
    ck_assert_uint_eq(a_size, b_size);
    ck_assert_mem_eq(a_bytes, b_bytes, a_size);
    /* One bit of one moment is another file. */
    uint64_t bits;
    memcpy(&bits, &c.v[0], sizeof bits);
    bits ^= 1;
    memcpy(&c.v[0], &bits, sizeof bits);
    save(b_path, &c);
    free(b_bytes);
    b_bytes = get_file(b_path, &b_size);
    ck_assert(a_size == b_size && memcmp(a_bytes, b_bytes, a_size) != 0);
    free(a_bytes);
    free(b_bytes);
    ps_checkpoint_free(&a);
    ps_checkpoint_free(&b);
    ps_checkpoint_free(&c);
}
END_TEST

START_TEST(plain_hdf5)
{
    char path[PATH_MAX];
    struct ps_checkpoint c = make(1);
    save(in_folder("a.h5", path), &c);
    hid_t file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
    ck_assert(file >= 0);
    for (int t = 0; t < c.layout->n; t++) {
        const struct ps_parameter *p = &c.layout->table[t];
        char name[96];
        snprintf(name, sizeof name, "/parameters/%s", p->name);
        hid_t id = H5Dopen2(file, name, H5P_DEFAULT), space = H5Dget_space(id);
        hsize_t size[2] = {0, 1};
        ck_assert_int_eq(H5Sget_simple_extent_ndims(space), p->rank);
        H5Sget_simple_extent_dims(space, size, NULL);
        ck_assert(size[0] == (hsize_t)p->size[0] && (p->rank == 1 || size[1] == (hsize_t)p->size[1]));
        float *values = malloc(size[0] * size[1] * sizeof *values);
        ck_assert(H5Dread(id, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, values) >= 0);
        ck_assert_mem_eq(values, c.parameters + p->offset, size[0] * size[1] * sizeof *values);
        free(values);
        H5Sclose(space);
        H5Dclose(id);
    }
    uint64_t step = 0;
    hid_t attribute = H5Aopen(file, "step", H5P_DEFAULT);
    ck_assert(H5Aread(attribute, H5T_NATIVE_UINT64, &step) >= 0 && step == c.step);
    H5Aclose(attribute);
    static const char *const names[] = {"/optimizer/m/layers.1.w_2", "/optimizer/v/w_h", "/scaler/mean", "/scaler/std"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        ck_assert_msg(H5Lexists(file, names[i], H5P_DEFAULT) > 0, "%s", names[i]);
    }
    H5Fclose(file);
    /* The first 512 bytes are text, and the digest is that of the rest. */
    size_t size;
    char *bytes = get_file(path, &size), head[512], digest[PS_DIGEST_HEX], expected[512];
    memcpy(head, bytes, sizeof head);
    ck_assert_int_eq(ps_digest(bytes + 512, size - 512, digest), 1);
    snprintf(expected, sizeof expected, "PatchStep checkpoint\nformat 1\nlength %zu\nsha256 %s\n", size, digest);
    ck_assert_str_eq(head, expected);
    free(bytes);
    ps_checkpoint_free(&c);
}
END_TEST

START_TEST(digest)
{
    char hex[PS_DIGEST_HEX]; /* FIPS 180-2, appendix B */
    ck_assert_int_eq(ps_digest("abc", 3, hex), 1);
    ck_assert_str_eq(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}
END_TEST

START_TEST(cut_off)
{
    char path[PATH_MAX];
    struct ps_checkpoint c = make(1);
    save(in_folder("a.h5", path), &c);
    ps_checkpoint_free(&c);
    size_t size;
    char *bytes = get_file(path, &size);
    for (size_t cut = 0; cut < size; cut += cut < 600 ? 1 : size / 97) {
        put_file(in_folder("cut.h5", path), bytes, cut);
        must_refuse(path, cut < 512 ? "cut off at its beginning" : "truncated");
    }
    put_file(path, bytes, size - 1);
    must_refuse(path, "truncated: has");
    char *longer = calloc(1, size + 1);
    memcpy(longer, bytes, size);
    put_file(path, longer, size + 1);
    must_refuse(path, "altered: has");
    put_file(path, bytes, size);
    ck_assert_int_eq(ps_checkpoint_load(path, &c), PS_OK);
    ps_checkpoint_free(&c);
    free(longer);
    free(bytes);
}
END_TEST

START_TEST(altered)
{
    char path[PATH_MAX];
    struct ps_checkpoint c = make(1);
    save(in_folder("a.h5", path), &c);
    ps_checkpoint_free(&c);
    size_t size;
    char *bytes = get_file(path, &size);
    in_folder("altered.h5", path);
    /* Every byte of the user block, one bit each; then all over the rest, the last byte too. */
    for (size_t i = 0; i < size; i += i < 512 ? 1 : size / 211) {
        bytes[i] ^= (char)(1 << i % 8);
        put_file(path, bytes, size);
        must_refuse(path, i < strlen("PatchStep checkpoint\n") ? "not a checkpoint of PatchStep" : "");
        bytes[i] ^= (char)(1 << i % 8);
    }
    bytes[size - 1] ^= 1;
    put_file(path, bytes, size);
    must_refuse(path, "altered: its SHA-256 is");
    bytes[size - 1] ^= 1;
    free(bytes);
}
END_TEST

/* ---- damage ---- */

static uint64_t randomness = 0x9e3779b97f4a7c15u;

/* xorshift64*: a number below n. */
static size_t below(size_t n)
{
    randomness ^= randomness >> 12;
    randomness ^= randomness << 25;
    randomness ^= randomness >> 27;
    return (size_t)(randomness * 0x2545f4914f6cdd1du >> 16) % n;
}

/* Which bytes of the file are tensors; the others are HDF5's structures and the user block. */
static char *raw_bytes(const char *path, size_t size)
{
    char *raw = calloc(size, 1);
    struct ps_checkpoint c = make(1);
    hid_t file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
    static const char *const folders[] = {"parameters", "optimizer/m", "optimizer/v"};
    for (int i = 0; i < 3 * c.layout->n; i++) {
        char name[96];
        snprintf(name, sizeof name, "%s/%s", folders[i / c.layout->n], c.layout->table[i % c.layout->n].name);
        hid_t id = H5Dopen2(file, name, H5P_DEFAULT);
        size_t first = (size_t)H5Dget_offset(id), bytes = (size_t)H5Dget_storage_size(id);
        ck_assert_msg(id >= 0 && first + bytes <= size, "%s", name);
        memset(raw + first, 1, bytes);
        H5Dclose(id);
    }
    H5Fclose(file);
    ps_checkpoint_free(&c);
    return raw;
}

/* Loading must say so, name the file, and say it before HDF5 has read any of it; or the bytes are as they were. */
static void must_notice(const char *path, const char *bytes, size_t size, const char *before, size_t size_before, const char *how)
{
    static const char *const said[] = {": not a checkpoint of PatchStep", ": altered", ": truncated", ": format "};
    struct ps_checkpoint c;
    remove(path); /* a new file: some file systems flush one that is written over */
    put_file(path, bytes, size);
    enum ps_status status = ps_checkpoint_load(path, &c);
    if (size == size_before && memcmp(bytes, before, size) == 0) {
        ck_assert_msg(status == PS_OK, "%s changed nothing: %s", how, ps_error_message());
        ps_checkpoint_free(&c);
        return;
    }
    ck_assert_msg(status == PS_CHECKPOINT, "%s: loaded", how);
    const char *message = ps_error_message();
    int known = 0;
    for (size_t i = 0; i < sizeof said / sizeof *said; i++) {
        size_t length = strlen(path);
        known |= strncmp(message, path, length) == 0 && strncmp(message + length, said[i], strlen(said[i])) == 0;
    }
    ck_assert_msg(known, "%s: %s", how, message);
}

/* Damage of one kind at a random place; the new size. */
static size_t damage(char *bytes, size_t size, int kind)
{
    size_t place = below(size), length = 1 + below(kind % 2 ? 4096 : 64);
    length = length < size - place ? length : size - place;
    switch (kind) {
    case 0: /* a bit */
        bytes[place] ^= (char)(1 << below(8));
        return size;
    case 1: /* a block of zeros, as a lost sector leaves it */
        memset(bytes + place, 0, length);
        return size;
    case 2: /* a run of anything */
        for (size_t i = 0; i < length; i++) {
            bytes[place + i] = (char)below(256);
        }
        return size;
    case 3: /* a block that stands where another should */
        memmove(bytes + place, bytes + below(size - length + 1), length);
        return size;
    case 4: /* cut off */
        return place;
    case 5: /* a part left out */
        memmove(bytes + place, bytes + place + length, size - place - length);
        return size - length;
    default: /* a part twice */
        memmove(bytes + place + length, bytes + place, size - place);
        return size + length;
    }
}

START_TEST(damaged)
{
    char path[PATH_MAX];
    struct ps_checkpoint c = make(1);
    save(in_folder("a.h5", path), &c);
    ps_checkpoint_free(&c);
    size_t size;
    char *before = get_file(path, &size), *raw = raw_bytes(path, size), *bytes = malloc(2 * size + 4096);
    in_folder("damaged.h5", path);
    int structures = 0, step = full ? 1 : 53;
    memcpy(bytes, before, size);
    for (size_t i = 0, seen = 0; i < size; i++) {
        if (!raw[i] && seen++ % (size_t)step == 0) {
            char how[64];
            bytes[i] ^= (char)(1 << below(8));
            snprintf(how, sizeof how, "a bit of byte %zu", i);
            must_notice(path, bytes, size, before, size, how);
            bytes[i] = before[i];
            structures++;
        }
    }
    int places = full ? 3000 : 200;
    for (int i = 0; i < places; i++) {
        char how[64];
        memcpy(bytes, before, size);
        snprintf(how, sizeof how, "random damage %d of kind %d", i, i % 7);
        must_notice(path, bytes, damage(bytes, size, i % 7), before, size, how);
    }
    printf("damaged: a bit in %d bytes of headers and structures, %d random places: each noticed, or nothing had changed\n",
           structures, places);
    free(before);
    free(raw);
    free(bytes);
}
END_TEST

/* ---- those that are kept ---- */

static struct ps_kept kept_in(const char *name, int keep_last, int keep_best)
{
    struct ps_kept kept = {.keep_last = keep_last, .keep_best = keep_best};
    char path[PATH_MAX];
    snprintf(kept.folder, sizeof kept.folder, "%s", in_folder(name, path));
    mkdir(kept.folder, 0777);
    return kept;
}

static char *kept_path(const struct ps_kept *kept, const char *name, char path[PATH_MAX])
{
    snprintf(path, PATH_MAX, "%.3000s/%s", kept->folder, name);
    return path;
}

/* A run of 10 steps an epoch writes its state of `step`; at an epoch's end its weights are the best so far, if best. */
static void keep(struct ps_kept *kept, uint64_t step, int best)
{
    static uint64_t best_epoch; /* of the run so far */
    struct ps_checkpoint c = make(1);
    c.step = step;
    c.epoch = step / 10;
    c.cursor = step % 10;
    best_epoch = best ? c.epoch : best_epoch > c.epoch ? 0 : best_epoch;
    c.best_epoch = best_epoch;
    c.parameters[0] = (float)step;
    if (best) {
        struct ps_checkpoint weights = c;
        weights.m = NULL;
        weights.v = NULL;
        OK(ps_kept_save(kept, &weights));
    }
    OK(ps_kept_save(kept, &c));
    ps_checkpoint_free(&c);
}

/* The folder holds these files and no other, in any order. */
static void expect_files(const struct ps_kept *kept, int n, const char *const *names)
{
    char path[PATH_MAX];
    for (int i = 0; i < n; i++) {
        ck_assert_msg(exists(kept_path(kept, names[i], path)), "%s is missing", names[i]);
    }
    DIR *dir = opendir(kept->folder);
    int found = 0;
    for (const struct dirent *entry; (entry = readdir(dir));) {
        found += entry->d_name[0] != '.';
    }
    closedir(dir);
    ck_assert_int_eq(found, n);
}
#define EXPECT_FILES(kept, ...) \
    expect_files(kept, (int)(sizeof((const char *[]){__VA_ARGS__}) / sizeof(char *)), (const char *[]){__VA_ARGS__})

static void flip(const struct ps_kept *kept, const char *name)
{
    char path[PATH_MAX];
    size_t size;
    char *bytes = get_file(kept_path(kept, name, path), &size);
    bytes[size / 2] ^= 1;
    remove(path); /* or the file's other name would be damaged too */
    put_file(path, bytes, size);
    free(bytes);
}

/* A resumption from the state of `step`, with the best weights of step `best`; passed: what is said of newer ones. */
static void expect_resumption(const struct ps_kept *kept, uint64_t step, uint64_t best, const char *passed)
{
    struct ps_kept again = {.keep_last = kept->keep_last, .keep_best = kept->keep_best};
    memcpy(again.folder, kept->folder, sizeof again.folder);
    struct ps_resumption r;
    ck_assert(ps_kept_any(&again));
    OK(ps_kept_load(&again, &r));
    ck_assert_msg(passed ? strstr(r.passed, passed) != NULL : !*r.passed, "passed over: %s", r.passed);
    ck_assert_uint_eq(r.last.step, step);
    ck_assert(r.last.parameters[0] == (float)step);
    ck_assert_int_eq(r.best.parameters != NULL, best != 0);
    ck_assert(best == 0 || r.best.parameters[0] == (float)best);
    ps_resumption_free(&r);
}

static void expect_none(struct ps_kept *kept, const char *cause)
{
    struct ps_resumption r;
    ck_assert_int_eq(ps_kept_load(kept, &r), PS_CHECKPOINT);
    ck_assert_msg(strstr(ps_error_message(), cause) != NULL, "%s", ps_error_message());
}

START_TEST(as_many_as_asked)
{
    struct ps_kept kept = kept_in("many", 3, 2);
    ck_assert(!ps_kept_any(&kept));
    expect_none(&kept, "last.h5: cannot be opened");
    for (uint64_t step = 1; step <= 50; step++) {
        keep(&kept, step, step == 10 || step == 20 || step == 40);
    }
    EXPECT_FILES(&kept, "last.h5", "last-49.h5", "last-48.h5", "best.h5", "best-2.h5");
    expect_resumption(&kept, 50, 40, NULL);
    /* Names that are not theirs are let alone. */
    char path[PATH_MAX];
    put_file(kept_path(&kept, "last-07.h5", path), "x", 1);
    put_file(kept_path(&kept, "last-best.h5", path), "x", 1);
    kept.keep_last = kept.keep_best = 1; /* fewer from now on */
    keep(&kept, 60, 1);
    EXPECT_FILES(&kept, "last.h5", "best.h5", "last-07.h5", "last-best.h5");
    expect_resumption(&kept, 60, 60, NULL);
    OK(ps_kept_discard(&kept));
    EXPECT_FILES(&kept, "last-07.h5", "last-best.h5");
    ck_assert(!ps_kept_any(&kept));
}
END_TEST

START_TEST(newest_intact)
{
    struct ps_kept kept = kept_in("newest", 3, 1);
    for (uint64_t step = 1; step <= 24; step++) {
        keep(&kept, step, step == 20);
    }
    EXPECT_FILES(&kept, "last.h5", "last-23.h5", "last-22.h5", "best.h5");
    flip(&kept, "last.h5");
    expect_resumption(&kept, 23, 20, "last.h5: altered: its SHA-256 is");
    flip(&kept, "last-23.h5");
    expect_resumption(&kept, 22, 20, "last.h5: altered");
    /* The run goes on from there: what is damaged goes once the successor is durable, what is intact stays. */
    struct ps_resumption r;
    OK(ps_kept_load(&kept, &r));
    ps_resumption_free(&r);
    keep(&kept, 23, 0);
    EXPECT_FILES(&kept, "last.h5", "last-22.h5", "best.h5");
    expect_resumption(&kept, 23, 20, NULL);
    /* A crash between two renamings, where a file cannot have two names. */
    char path[PATH_MAX];
    remove(kept_path(&kept, "last.h5", path));
    expect_resumption(&kept, 22, 20, NULL);
    flip(&kept, "last-22.h5");
    expect_none(&kept, "last-22.h5: altered");
}
END_TEST

START_TEST(best_weights_that_are_left)
{
    struct ps_kept kept = kept_in("weights", 3, 2);
    for (uint64_t step = 5; step <= 45; step += 5) {
        keep(&kept, step, step == 20 || step == 40);
    }
    EXPECT_FILES(&kept, "last.h5", "last-40.h5", "last-35.h5", "best.h5", "best-2.h5");
    /* best.h5 is damaged: the state of the end of that epoch has its weights. */
    flip(&kept, "best.h5");
    expect_resumption(&kept, 45, 40, NULL);
    /* That one is damaged too: back to the state whose best weights are there. */
    flip(&kept, "last-40.h5");
    expect_resumption(&kept, 35, 20, "best.h5: altered");
    char path[PATH_MAX];
    remove(kept_path(&kept, "best-2.h5", path));
    expect_none(&kept, "best.h5: altered");
    /* A last.h5 from before: its best weights are gone, and a later epoch's are what there is. */
    OK(ps_kept_discard(&kept));
    kept.keep_best = 1;
    keep(&kept, 10, 1);
    keep(&kept, 15, 0);
    size_t size;
    char *state = get_file(kept_path(&kept, "last.h5", path), &size);
    kept.keep_last = 1;
    keep(&kept, 20, 1);
    put_file(kept_path(&kept, "last.h5", path), state, size);
    expect_resumption(&kept, 15, 20, NULL);
    free(state);
}
END_TEST

/* Newer best weights do not drop the older ones before the state that speaks of them is there: a crash may come between. */
START_TEST(best_weights_until_the_state)
{
    struct ps_kept kept = kept_in("between", 1, 1);
    keep(&kept, 10, 1);
    keep(&kept, 15, 0);
    struct ps_checkpoint c = make(1);
    c.step = 20;
    c.epoch = c.best_epoch = 2;
    c.cursor = 0;
    c.parameters[0] = 20;
    struct ps_checkpoint weights = c;
    weights.m = NULL;
    weights.v = NULL;
    for (int i = 0; i < 2; i++) { /* once more, as a resumed run does */
        OK(ps_kept_save(&kept, &weights));
        EXPECT_FILES(&kept, "last.h5", "best.h5", "best-1.h5");
        expect_resumption(&kept, 15, 10, NULL);
    }
    OK(ps_kept_save(&kept, &c));
    EXPECT_FILES(&kept, "last.h5", "best.h5");
    expect_resumption(&kept, 20, 20, NULL);
    ps_checkpoint_free(&c);
}
END_TEST

/* A save that fails leaves what was there, and what it goes on from. */
START_TEST(failing_kept_save)
{
    struct ps_kept kept = kept_in("failing", 2, 1);
    keep(&kept, 10, 1);
    keep(&kept, 11, 0);
    char path[PATH_MAX];
    mkdir(kept_path(&kept, "last.h5.partial", path), 0777);
    struct ps_checkpoint c = make(1);
    c.step = 12;
    ck_assert_int_eq(ps_kept_save(&kept, &c), PS_CHECKPOINT);
    ck_assert_msg(strstr(ps_error_message(), "last.h5.partial: cannot be written: Is a directory") != NULL, "%s",
                  ps_error_message());
    expect_resumption(&kept, 11, 10, NULL);
    rmdir(path);
    OK(ps_kept_save(&kept, &c));
    EXPECT_FILES(&kept, "last.h5", "last-11.h5", "best.h5");
    ps_checkpoint_free(&c);
}
END_TEST

START_TEST(not_ours)
{
    char path[PATH_MAX];
    must_refuse(in_folder("missing.h5", path), "cannot be opened: No such file");
    must_refuse(folder, "is a folder");
    hid_t file = H5Fcreate(in_folder("other.h5", path), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    H5Fclose(file);
    must_refuse(path, "not a checkpoint of PatchStep");
    char block[1024] = "PatchStep checkpoint\nno more\n";
    put_file(path, block, sizeof block);
    must_refuse(path, "altered: its first 512 bytes");
    /* A whole and well-signed file that is no HDF5, and one of a later format. */
    char digest[PS_DIGEST_HEX];
    for (int format = 1; format <= 2; format++) {
        memset(block, 0, sizeof block);
        ps_digest(block + 512, 512, digest);
        snprintf(block, 512, "PatchStep checkpoint\nformat %d\nlength 1024\nsha256 %s\n", format, digest);
        put_file(path, block, sizeof block);
        must_refuse(path, format == 1 ? "HDF5 cannot open it" : "format 2; this program reads format 1");
    }
}
END_TEST

/* The tensors of one model under the config of another: every shape is checked. */
START_TEST(other_model)
{
    char path[PATH_MAX], text[sizeof config_text + 64];
    static const struct {
        const char *config, *cause;
    } cases[] = {
        {"model: {seq_len: 24, pred_len: 3, patch_len: 8, stride: 4, d_model: 8, n_heads: 2, d_ff: 10, n_layers: 2}",
         "dataset parameters/w_p: its shape is not [8, 8]"},
        {"model: {seq_len: 24, pred_len: 4, patch_len: 8, stride: 4, d_model: 6, n_heads: 2, d_ff: 10, n_layers: 2}",
         "dataset parameters/w_h: its shape is not [36, 4]"},
        {"model: {seq_len: 24, pred_len: 3, patch_len: 8, stride: 4, d_model: 6, n_heads: 2, d_ff: 10, n_layers: 3}",
         "parameters/layers.2.w_qkv is missing"},
        {"model: {d_model: 7}", "attribute config: config:2: model.n_heads: d_model 7 is not divisible"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct ps_checkpoint c = make(1);
        snprintf(text, sizeof text, "data: {path: a.h5}\n%s", cases[i].config);
        free(c.config);
        c.config = strdup(text);
        save(in_folder("other.h5", path), &c);
        must_refuse(path, cases[i].cause);
        ps_checkpoint_free(&c);
    }
    struct ps_checkpoint c = make(1);
    c.scaler.channels = 0;
    ck_assert_int_eq(ps_checkpoint_save(path, &c), PS_OK);
    c.scaler.channels = CHANNELS;
    must_refuse(path, "its model cannot be laid out: model.channels: 0");
    /* A text that no attribute can hold is refused when saving, and the file stays as it was. */
    char *long_text = malloc(70000);
    memset(long_text, 'x', 69999);
    long_text[69999] = 0;
    free(c.versions);
    c.versions = long_text;
    ck_assert_int_eq(ps_checkpoint_save(path, &c), PS_CHECKPOINT);
    ck_assert_ptr_nonnull(strstr(ps_error_message(), "attribute versions: its text is too long"));
    must_refuse(path, "its model cannot be laid out");
    ps_checkpoint_free(&c);
}
END_TEST

/* BatchNorm's running statistics are there, of the model's width, and numbers that can be normalised with. */
START_TEST(statistics)
{
    static const struct {
        const char *name;
        double value;
        const char *cause;
    } values[] = {
        {"layers.1.bn2_var", NAN, "statistics/layers.1.bn2_var: element 2 is nan: a running variance is finite and not"},
        {"layers.0.bn1_var", -1e-6, "statistics/layers.0.bn1_var: element 2 is -1e-06: a running variance is finite and not"},
        {"layers.0.bn2_var", INFINITY, "statistics/layers.0.bn2_var: element 2 is inf"},
        {"layers.1.bn1_mean", NAN, "statistics/layers.1.bn1_mean: element 2 is nan: a running mean is finite"}};
    char path[PATH_MAX], name[96];
    in_folder("statistics.h5", path);
    struct ps_checkpoint c = make_of(PS_NORM_BATCH, 1), loaded;
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        int t = c.layout->n;
        while (strcmp(c.layout->table[t].name, values[i].name) != 0) {
            ck_assert_int_lt(++t, c.layout->all);
        }
        float *value = &c.parameters[c.layout->table[t].offset + 2], was = *value;
        *value = (float)values[i].value;
        save(path, &c);
        must_refuse(path, values[i].cause);
        *value = 0; /* what a column of zeros leaves */
        save(path, &c);
        OK(ps_checkpoint_load(path, &loaded));
        same(&c, &loaded);
        ps_checkpoint_free(&loaded);
        *value = was;
    }
    /* Left out, all or one; of another width. */
    for (int i = 0; i < 3; i++) {
        save(path, &c);
        hid_t file = H5Fopen(path, H5F_ACC_RDWR, H5P_DEFAULT);
        snprintf(name, sizeof name, "statistics%s", i == 0 ? "" : "/layers.1.bn1_var");
        ck_assert_int_ge(H5Ldelete(file, name, H5P_DEFAULT), 0);
        if (i == 2) {
            const hsize_t width = 7;
            hid_t space = H5Screate_simple(1, &width, NULL),
                  set = H5Dcreate2(file, name, H5T_IEEE_F32LE, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
            const float ones[7] = {1, 1, 1, 1, 1, 1, 1};
            ck_assert_int_ge(H5Dwrite(set, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, ones), 0);
            H5Dclose(set);
            H5Sclose(space);
        }
        H5Fclose(file);
        seal(path);
        must_refuse(path, i == 0   ? ": statistics is missing"
                          : i == 1 ? "statistics/layers.1.bn1_var is missing"
                                   : "statistics/layers.1.bn1_var: its shape is not [6]");
    }
    ps_checkpoint_free(&c);
}
END_TEST

/* A right digest proves nothing. */
START_TEST(hostile)
{
    static const struct {
        const char *name, *cause;
    } cases[] = {{"parameters/w_p", "parameters/w_p is a soft link"},
                 {"optimizer/v/b_h", "optimizer/v/b_h is a link into another file"},
                 {"scaler", "scaler is a soft link"},
                 {"optimizer/m/w_h", "optimizer/m/w_h keeps its values in another file"},
                 {"scaler/std", "scaler/std holds 0 of its 1 chunks"},
                 {"scaler/mean", "scaler/mean does not lie in the file"}};
    char path[PATH_MAX];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct ps_checkpoint c = make(1);
        save(in_folder("hostile.h5", path), &c);
        ps_checkpoint_free(&c);
        hid_t file = H5Fopen(path, H5F_ACC_RDWR, H5P_DEFAULT), set = H5I_INVALID_HID;
        ck_assert_int_ge(H5Lmove(file, cases[i].name, file, "moved", H5P_DEFAULT, H5P_DEFAULT), 0);
        if (i < 3) {
            ck_assert_int_ge(i == 1 ? H5Lcreate_external(path, "/moved", file, cases[i].name, H5P_DEFAULT, H5P_DEFAULT)
                                    : H5Lcreate_soft("/moved", file, cases[i].name, H5P_DEFAULT, H5P_DEFAULT),
                             0);
        } else {
            hid_t old = H5Dopen2(file, "moved", H5P_DEFAULT), type = H5Dget_type(old), space = H5Dget_space(old);
            hid_t creation = H5Pcreate(H5P_DATASET_CREATE);
            hsize_t one = CHANNELS;
            if (i == 3) {
                H5Pset_external(creation, "/etc/passwd", 0, H5F_UNLIMITED);
            } else if (i == 4) {
                H5Pset_chunk(creation, 1, &one);
            }
            set = H5Dcreate2(file, cases[i].name, type, space, H5P_DEFAULT, creation, H5P_DEFAULT);
            ck_assert_int_ge(set, 0);
            H5Pclose(creation);
            H5Tclose(type);
            H5Sclose(space);
            H5Dclose(old);
            H5Dclose(set);
        }
        H5Fclose(file);
        must_refuse(path, "altered");
        seal(path);
        must_refuse(path, cases[i].cause);
    }
    /* Sizes that a few words ask for, and nothing is allocated. */
    static const struct {
        const char *config;
        int64_t channels;
        const char *cause;
    } sizes[] = {{"model: {d_model: 16777216, d_ff: 16777216, seq_len: 16777216, patch_len: 1, stride: 1, pred_len: 16777216}",
                  CHANNELS, "attribute config: config:2: model: has 4.7e+21 parameters"},
                 {"model: {d_model: 16384, d_ff: 65536, n_layers: 100}", CHANNELS, "its config and channels ask for at least"},
                 {"model: {}", (1 << 24) + 1, "its model cannot be laid out: model.channels: 16777217"},
                 {"model: {}", 1 << 24, "its config and channels ask for at least"}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        struct ps_checkpoint c = make(1);
        char text[256];
        snprintf(text, sizeof text, "data: {path: a.h5}\n%s", sizes[i].config);
        free(c.config);
        c.config = strdup(text);
        save(in_folder("sizes.h5", path), &c);
        ps_checkpoint_free(&c);
        hid_t file = H5Fopen(path, H5F_ACC_RDWR, H5P_DEFAULT), attribute = H5Aopen(file, "channels", H5P_DEFAULT);
        ck_assert_int_ge(H5Awrite(attribute, H5T_NATIVE_INT64, &sizes[i].channels), 0);
        H5Aclose(attribute);
        H5Fclose(file);
        seal(path);
        must_refuse(path, sizes[i].cause);
    }
    /* Names that say to be larger than the file, and that are larger than their dataset. */
    for (int i = 0; i < 2; i++) {
        struct ps_checkpoint c = make(1);
        uint64_t bytes = i == 0 ? UINT64_MAX : c.names_bytes + 1;
        save(in_folder("names.h5", path), &c);
        ps_checkpoint_free(&c);
        hid_t file = H5Fopen(path, H5F_ACC_RDWR, H5P_DEFAULT), attribute = H5Aopen(file, "channel_names_bytes", H5P_DEFAULT);
        ck_assert_int_ge(H5Awrite(attribute, H5T_NATIVE_UINT64, &bytes), 0);
        H5Aclose(attribute);
        H5Fclose(file);
        seal(path);
        must_refuse(path, i == 0 ? "its config and channels ask for at least" : "/channel_names: its shape is not [");
    }
}
END_TEST

START_TEST(failing_save)
{
    char path[PATH_MAX];
    struct ps_checkpoint c = make(1), old;
    ck_assert_int_eq(ps_checkpoint_save(in_folder("none/a.h5", path), &c), PS_CHECKPOINT);
    ck_assert_ptr_nonnull(strstr(ps_error_message(), "none/a.h5.partial: cannot be written: No such file or directory"));
    /* The renaming fails: a folder stands in the way. */
    mkdir(in_folder("taken.h5", path), 0777);
    ck_assert_int_eq(ps_checkpoint_save(path, &c), PS_CHECKPOINT);
    ck_assert_ptr_nonnull(strstr(ps_error_message(), "taken.h5: cannot be replaced: Is a directory"));
    ck_assert(!partial_exists(path));
    if (geteuid() == 0) {
        printf("skipped: a folder without write permission does not stop root\n");
    } else {
        mkdir(in_folder("readonly", path), 0555);
        ck_assert_int_eq(ps_checkpoint_save(in_folder("readonly/a.h5", path), &c), PS_CHECKPOINT);
        ck_assert_ptr_nonnull(strstr(ps_error_message(), "Permission denied"));
    }
    /* The disk is full after n bytes, for many n: the old checkpoint stays, nothing is left beside it. */
    save(in_folder("a.h5", path), &c);
    size_t size;
    free(get_file(path, &size));
    c.step++;
    struct rlimit limit, before;
    getrlimit(RLIMIT_FSIZE, &before);
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    for (size_t n = 0; n < size; n += size / 23) {
        limit = before;
        limit.rlim_cur = n;
        setrlimit(RLIMIT_FSIZE, &limit);
        enum ps_status status = ps_checkpoint_save(path, &c);
        setrlimit(RLIMIT_FSIZE, &before);
        ck_assert_int_eq(status, PS_CHECKPOINT);
        ck_assert_ptr_nonnull(strstr(ps_error_message(), "a.h5.partial: cannot be written: File too large"));
        ck_assert(!partial_exists(path));
        ck_assert_int_eq(ps_checkpoint_load(path, &old), PS_OK);
        ck_assert(old.step == c.step - 1);
        ps_checkpoint_free(&old);
    }
    signal(SIGXFSZ, handler);
    /* What a crash left beside it does not hinder the next. */
    char partial[PATH_MAX + 16];
    snprintf(partial, sizeof partial, "%s.partial", path);
    char *junk = calloc(1, 2 * size);
    put_file(partial, junk, 2 * size);
    free(junk);
    save(path, &c);
    ck_assert_int_eq(ps_checkpoint_load(path, &old), PS_OK);
    same(&c, &old);
    ps_checkpoint_free(&old);
    ps_checkpoint_free(&c);
}
END_TEST

static void append(const char *path, uint64_t epoch)
{
    struct ps_epoch_record r = {.epoch = epoch,
                                .step = 100 * epoch,
                                .train_loss = 1.0 / 3 + (double)epoch,
                                .val_mse = 0.1 + 0.2,
                                .val_mae = NAN,
                                .lr = 4.9406564584124654e-324,
                                .seconds = 1e300,
                                .windows_per_second = INFINITY,
                                .skipped = epoch};
    ck_assert_msg(ps_metrics_append(path, &r) == PS_OK, "%s", ps_error_message());
}

START_TEST(metrics)
{
    char path[PATH_MAX];
    in_folder("metrics.jsonl", path);
    ck_assert_int_eq(ps_metrics_truncate(path, 3), PS_OK);
    ck_assert(!exists(path));
    for (uint64_t epoch = 1; epoch <= 5; epoch++) {
        append(path, epoch);
    }
    size_t size, kept_size;
    char *all = get_file(path, &size), *line = all;
    for (int epoch = 1; epoch <= 5; epoch++) {
        char *end = strchr(line, '\n');
        json_t *o = json_loadb(line, (size_t)(end - line), 0, NULL);
        ck_assert_int_eq(json_integer_value(json_object_get(o, "epoch")), epoch);
        ck_assert_int_eq(json_integer_value(json_object_get(o, "step")), 100 * epoch);
        ck_assert(json_real_value(json_object_get(o, "train_loss")) == 1.0 / 3 + epoch);
        ck_assert(json_real_value(json_object_get(o, "val_mse")) == 0.1 + 0.2);
        ck_assert(json_is_null(json_object_get(o, "val_mae")) && json_is_null(json_object_get(o, "windows_per_second")));
        ck_assert(json_real_value(json_object_get(o, "lr")) == 4.9406564584124654e-324);
        ck_assert(json_real_value(json_object_get(o, "seconds")) == 1e300);
        ck_assert_int_eq(json_integer_value(json_object_get(o, "skipped")), epoch);
        json_decref(o);
        line = end + 1;
    }
    ck_assert_int_eq(*line, 0);
    /* Resumed after 3 epochs and run again: the same file; half a line at the end is dropped too. */
    FILE *out = fopen(path, "a");
    fputs("{\"epoch\": 2, \"st", out);
    fclose(out);
    ck_assert_int_eq(ps_metrics_truncate(path, 3), PS_OK);
    ck_assert(!partial_exists(path));
    char *kept = get_file(path, &kept_size);
    ck_assert_uint_lt(kept_size, size);
    ck_assert_mem_eq(kept, all, kept_size);
    ck_assert_int_eq(kept[kept_size - 1], '\n');
    free(kept);
    append(path, 4);
    append(path, 5);
    kept = get_file(path, &kept_size);
    ck_assert_uint_eq(kept_size, size);
    ck_assert_mem_eq(kept, all, size);
    ck_assert_int_eq(ps_metrics_truncate(path, 5), PS_OK);
    ck_assert_int_eq(ps_metrics_truncate(path, 0), PS_OK);
    free(kept);
    free(get_file(path, &kept_size));
    ck_assert_uint_eq(kept_size, 0);
    /* Not a file of metrics: named with its line, and left alone. */
    put_file(path, "{\"epoch\": 1}\nnotes\n", 19);
    ck_assert_int_eq(ps_metrics_truncate(path, 0), PS_USAGE);
    ck_assert_ptr_nonnull(strstr(ps_error_message(), "metrics.jsonl:2: not a line of metrics"));
    free(get_file(path, &kept_size));
    ck_assert_uint_eq(kept_size, 19);
    free(all);
    struct ps_score v;
    in_folder("validated.jsonl", path);
    ck_assert_int_eq(ps_metrics_validation(path, 1, &v), PS_OK); /* there is no such file */
    ck_assert(isnan(v.mse) && isnan(v.mae) && isnan(v.loss));
    for (uint64_t epoch = 1; epoch <= 2; epoch++) {
        struct ps_epoch_record e = {.epoch = epoch,
                                    .val_mse = epoch == 2 ? 0.1 + 0.2 : NAN,
                                    .val_mae = 1.0 / 3,
                                    .loss = epoch == 2 ? PS_LOSS_HUBER : PS_LOSS_MSE,
                                    .val_loss = 0.7 * 0.1};
        ck_assert_int_eq(ps_metrics_append(path, &e), PS_OK);
    }
    ck_assert_int_eq(ps_metrics_validation(path, 2, &v), PS_OK);
    ck_assert(v.mse == 0.1 + 0.2 && v.mae == 1.0 / 3 && v.loss == 0.7 * 0.1);
    ck_assert_int_eq(ps_metrics_validation(path, 1, &v), PS_OK);
    ck_assert(isnan(v.mse) && v.mae == 1.0 / 3 && isnan(v.loss));
    ck_assert_int_eq(ps_metrics_validation(path, 3, &v), PS_OK);
    ck_assert(isnan(v.mse) && isnan(v.mae) && isnan(v.loss));
    struct ps_epoch_record r = {0};
    ck_assert_int_eq(ps_metrics_append(in_folder("none/metrics.jsonl", path), &r), PS_USAGE);
    ck_assert_ptr_nonnull(strstr(ps_error_message(), "cannot be written: No such file"));
}
END_TEST

START_TEST(test_scores)
{
    char path[PATH_MAX];
    struct ps_test_record r = {.all = {0.1 + 0.2, 1.0 / 3, 2785},
                               .full_batches = {0.375, 0.3994, 2688},
                               .repeat_last = {1.3, 0.7, 2785},
                               .epoch = 78,
                               .step = 5000,
                               .val_mse = 2.0 / 3,
                               .val_mae = NAN};
    ck_assert_int_eq(ps_test_write(in_folder("test.json", path), &r), PS_OK);
    json_t *o = json_load_file(path, 0, NULL), *full = json_object_get(o, "full_batches"),
           *naive = json_object_get(o, "repeat_last");
    ck_assert(json_real_value(json_object_get(o, "mse")) == 0.1 + 0.2 && json_real_value(json_object_get(o, "mae")) == 1.0 / 3);
    ck_assert_int_eq(json_integer_value(json_object_get(o, "windows")), 2785);
    ck_assert(json_real_value(json_object_get(full, "mse")) == 0.375 && json_real_value(json_object_get(full, "mae")) == 0.3994);
    ck_assert_int_eq(json_integer_value(json_object_get(full, "windows")), 2688);
    ck_assert(json_real_value(json_object_get(naive, "mse")) == 1.3 && json_real_value(json_object_get(naive, "mae")) == 0.7);
    ck_assert(json_is_null(json_object_get(o, "seasonal_naive")));
    ck_assert_int_eq(json_integer_value(json_object_get(o, "epoch")), 78);
    ck_assert_int_eq(json_integer_value(json_object_get(o, "step")), 5000);
    ck_assert(json_real_value(json_object_get(o, "val_mse")) == 2.0 / 3 && json_is_null(json_object_get(o, "val_mae")));
    ck_assert(!json_object_get(o, "loss") && !json_object_get(o, "val_loss"));
    json_decref(o);
    char text[PS_LOSS_TEXT];
    r.loss = (struct ps_loss){.kind = PS_LOSS_QUANTILE, .quantiles = 3, .quantile = {0.1, 0.5, 0.9}};
    r.all.loss = 0.1 * 0.7;
    r.all.coverage = 0.8125;
    r.val_loss = 1.0 / 7;
    ps_loss_text(&r.loss, &r.all, text);
    ck_assert_str_eq(text, "pinball loss 0.0700, 0.8125 within quantiles 0.1 to 0.9");
    ck_assert_int_eq(ps_test_write(in_folder("test.json", path), &r), PS_OK);
    o = json_load_file(path, 0, NULL);
    const json_t *loss = json_object_get(o, "loss"), *levels = json_object_get(loss, "quantiles");
    ck_assert_str_eq(json_string_value(json_object_get(loss, "kind")), "quantile");
    ck_assert(json_real_value(json_object_get(loss, "value")) == 0.1 * 0.7 && json_array_size(levels) == 3);
    ck_assert(json_real_value(json_object_get(loss, "coverage")) == 0.8125 && json_real_value(json_array_get(levels, 2)) == 0.9);
    ck_assert(json_real_value(json_object_get(o, "val_loss")) == 1.0 / 7);
    json_decref(o);
    r.loss.quantiles = 1; /* nothing lies within one quantile */
    ps_loss_text(&r.loss, &r.all, text);
    ck_assert_str_eq(text, "pinball loss 0.0700");
    ck_assert_int_eq(ps_test_write(path, &r), PS_OK);
    o = json_load_file(path, 0, NULL);
    ck_assert(json_is_null(json_object_get(json_object_get(o, "loss"), "coverage")));
    json_decref(o);
    r.loss = (struct ps_loss){.kind = PS_LOSS_HUBER, .delta = 0.5};
    ps_loss_text(&r.loss, &r.all, text);
    ck_assert_str_eq(text, "huber loss 0.0700");
    ck_assert_int_eq(ps_test_write(path, &r), PS_OK);
    o = json_load_file(path, 0, NULL);
    ck_assert(json_real_value(json_object_get(json_object_get(o, "loss"), "delta")) == 0.5);
    json_decref(o);
    ck_assert_int_eq(ps_test_write(in_folder("none/test.json", path), &r), PS_USAGE);
}
END_TEST

int main(void)
{
    if (!mkdtemp(folder)) {
        perror(folder);
        return 1;
    }
    Suite *suite = suite_create("checkpoint");
    TCase *tests = tcase_create("checkpoint");
    const char *form = getenv("PS_TEST_FULL");
    full = form && strcmp(form, "1") == 0;
    tcase_set_timeout(tests, full ? 3000 : 120);
    tcase_add_test(tests, round_trip);
    tcase_add_test(tests, names);
    tcase_add_test(tests, writer_unknown);
    tcase_add_test(tests, same_state_same_bytes);
    tcase_add_test(tests, plain_hdf5);
    tcase_add_test(tests, digest);
    tcase_add_test(tests, cut_off);
    tcase_add_test(tests, altered);
    tcase_add_test(tests, damaged);
    tcase_add_test(tests, as_many_as_asked);
    tcase_add_test(tests, newest_intact);
    tcase_add_test(tests, best_weights_that_are_left);
    tcase_add_test(tests, best_weights_until_the_state);
    tcase_add_test(tests, failing_kept_save);
    tcase_add_test(tests, not_ours);
    tcase_add_test(tests, other_model);
    tcase_add_test(tests, statistics);
    tcase_add_test(tests, hostile);
    tcase_add_test(tests, failing_save);
    tcase_add_test(tests, metrics);
    tcase_add_test(tests, test_scores);
    suite_add_tcase(suite, tests);
    int failed = run_suite(suite, CK_NOFORK);
    char command[PATH_MAX];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command) != 0 || failed > 0;
}
