/* Files made to harm: what libhdf5 does with them stays in a child process, and what they say is checked before it is believed. */
#include <ftw.h>
#include <glob.h>
#include <hdf5.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include "data/probe.h"
#include "data/series.h"
#include "src/checkpoint.h"
#include "src/digest.h"
#include "tests/suite.h"

/* ---- a folder for each test ---- */

static char folder[256];

static void make_folder(void)
{
    const char *base = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/patchstep-hostile-XXXXXX", base != NULL ? base : "/tmp");
    ck_assert_ptr_nonnull(mkdtemp(folder));
}

static int remove_entry(const char *path, const struct stat *st, int kind, struct FTW *where)
{
    (void)st;
    (void)kind;
    (void)where;
    return remove(path);
}

static void remove_folder(void)
{
    nftw(folder, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
}

/* folder/name; four at a time may be in use. */
static const char *in_folder(const char *name)
{
    static char paths[4][512];
    static int next;
    next = (next + 1) % 4;
    snprintf(paths[next], sizeof paths[next], "%s/%s", folder, name);
    return paths[next];
}

/* One line that holds every part ("|" between them). */
static void check_message(const char *parts)
{
    char copy[512], *rest = copy;
    snprintf(copy, sizeof copy, "%s", parts);
    ck_assert_msg(strchr(ps_error_message(), '\n') == NULL, "more than a line: %s", ps_error_message());
    for (char *part; (part = strsep(&rest, "|")) != NULL;) {
        ck_assert_msg(strstr(ps_error_message(), part) != NULL, "\"%s\" is not in: %s", part, ps_error_message());
    }
}

static void refuse(const char *name, const char *parts)
{
    struct ps_series *series;
    ck_assert_msg(ps_series_open(in_folder(name), &series) == PS_DATA, "%s is accepted", name);
    ck_assert_ptr_null(series);
    check_message(in_folder(name));
    check_message(parts);
}

/* ---- the child ---- */

static enum ps_status crash(const void *number)
{
    /* What a sanitizer or Check hooked in must not be asked. */
    signal(*(const int *)number, SIG_DFL);
    raise(*(const int *)number);
    return PS_OK;
}

static enum ps_status leave(const void *unused)
{
    (void)unused;
    _exit(3);
}

static enum ps_status spin(const void *unused)
{
    (void)unused;
    for (volatile int go_on = 1; go_on;) {
    }
    return PS_OK;
}

static enum ps_status wait_long(const void *unused)
{
    (void)unused;
    for (volatile int go_on = 1; go_on;) {
        pause();
    }
    return PS_OK;
}

static enum ps_status be_hungry(const void *bytes)
{
    void *p = mmap(NULL, *(const size_t *)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? ps_fail(PS_DEVICE, "no memory") : PS_OK;
}

static int touched;

static enum ps_status touch(const void *unused)
{
    (void)unused;
    touched = 1;
    puts("nobody reads this");
    fputs("nor this\n", stderr);
    fflush(stdout);
    return PS_OK;
}

START_TEST(child)
{
    ck_assert_int_eq(ps_probe(PS_DATA, "a.h5", 5, touch, NULL), PS_OK);
    ck_assert_int_eq(touched, 0);
    const int signals[] = {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL, SIGKILL};
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
        ck_assert_int_eq(ps_probe(i % 2 ? PS_CHECKPOINT : PS_DATA, "a.h5", 5, crash, &signals[i]), i % 2 ? PS_CHECKPOINT : PS_DATA);
        check_message("a.h5: HDF5 crashed on it|damaged");
        check_message(strsignal(signals[i]));
    }
    ck_assert_int_eq(ps_probe(PS_DATA, "a.h5", 5, leave, NULL), PS_DATA);
    check_message("a.h5: HDF5 crashed on it");
    ck_assert_int_eq(ps_probe(PS_CHECKPOINT, "a.h5", 1, spin, NULL), PS_CHECKPOINT);
    check_message("a.h5: HDF5 did not come to an end with it in 1 s");
    size_t bytes = (size_t)128 << 20;
    ck_assert_int_eq(ps_probe(PS_DATA, "a.h5", 5, be_hungry, &bytes), PS_OK);
    bytes = (size_t)640 << 20;
    ck_assert_int_eq(ps_probe(PS_DATA, "a.h5", 5, be_hungry, &bytes), PS_DEVICE); /* the child's own status and message */
    check_message("no memory");
}
END_TEST

/* A child that neither computes nor ends, as on a file system that hangs. */
START_TEST(child_that_waits)
{
    ck_assert_int_eq(ps_probe(PS_DATA, "a.h5", 1, wait_long, NULL), PS_DATA);
    check_message("a.h5: HDF5 did not come to an end with it");
}
END_TEST

/* The limit grows with the file, and no size is too large for it: not its seconds, not the tenfold in milliseconds. */
START_TEST(time_limit)
{
    ck_assert_int_eq(ps_probe_seconds(0), 10);
    ck_assert_int_eq(ps_probe_seconds((int64_t)1 << 30), 10 + 128);
    ck_assert_int_eq(ps_probe_seconds((int64_t)3 << 40), 10 + 3 * 131072);
    ck_assert_int_eq(ps_probe_seconds(INT64_MAX), 10 + (INT64_MAX >> 23));
    ck_assert_int_eq(ps_probe_wait(0), 1);
    ck_assert_int_eq(ps_probe_wait(0.0205), 21);
    for (double seconds = 100; seconds < 1e14; seconds *= 1.5) { /* INT64_MAX's tenfold is 1.1e13 */
        int wait = ps_probe_wait(seconds);
        ck_assert_msg(wait > 0 && wait <= 1000 * seconds + 1 && wait >= 100000, "%d ms when %g s are left", wait, seconds);
    }
}
END_TEST

/* Without a handler for it, the end of a child is lost; its answer is not. */
START_TEST(child_of_an_orphanage)
{
    signal(SIGCHLD, SIG_IGN);
    ck_assert_int_eq(ps_probe(PS_DATA, "a.h5", 5, touch, NULL), PS_OK);
    ck_assert_int_eq(ps_probe(PS_DATA, "a.h5", 5, leave, NULL), PS_DATA);
    check_message("a.h5: HDF5 crashed on it");
}
END_TEST

/* ---- series ---- */

enum { ROWS = 64, CHANNELS = 2 };
static const hsize_t size[2] = {ROWS, CHANNELS};
static float values[ROWS * CHANNELS];

static hid_t create(const char *name)
{
    hid_t file = H5Fcreate(in_folder(name), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    ck_assert_int_ge(file, 0);
    return file;
}

/* A float32 dataset of the given properties, which it closes; written: with its values. */
static void put(hid_t file, const char *name, hid_t creation, const hsize_t *extent, int written)
{
    hid_t space = H5Screate_simple(2, extent, NULL);
    hid_t set = H5Dcreate2(file, name, H5T_IEEE_F32LE, space, H5P_DEFAULT, creation, H5P_DEFAULT);
    ck_assert_int_ge(set, 0);
    ck_assert(!written || H5Dwrite(set, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, values) >= 0);
    H5Dclose(set);
    H5Sclose(space);
    if (creation != H5P_DEFAULT) {
        H5Pclose(creation);
    }
}

static hid_t chunked(hsize_t rows)
{
    hid_t creation = H5Pcreate(H5P_DATASET_CREATE);
    ck_assert_int_ge(H5Pset_chunk(creation, 2, (hsize_t[]){rows, CHANNELS}), 0);
    return creation;
}

START_TEST(links)
{
    hid_t file = create("other.h5");
    put(file, "series", H5P_DEFAULT, size, 1);
    H5Fclose(file);

    file = create("soft.h5");
    put(file, "elsewhere", H5P_DEFAULT, size, 1);
    H5Lcreate_soft("/elsewhere", file, "series", H5P_DEFAULT, H5P_DEFAULT);
    H5Fclose(file);
    refuse("soft.h5", "/series is a soft link");

    file = create("loop.h5");
    H5Lcreate_soft("/series", file, "series", H5P_DEFAULT, H5P_DEFAULT);
    H5Fclose(file);
    refuse("loop.h5", "/series is a soft link");

    file = create("external.h5");
    H5Lcreate_external(in_folder("other.h5"), "/series", file, "series", H5P_DEFAULT, H5P_DEFAULT);
    H5Fclose(file);
    refuse("external.h5", "/series is a link into another file");

    file = create("windows.h5");
    put(file, "inputs", H5P_DEFAULT, size, 1);
    H5Lcreate_external(in_folder("other.h5"), "/series", file, "targets", H5P_DEFAULT, H5P_DEFAULT);
    H5Fclose(file);
    refuse("windows.h5", "/inputs has rank 2");
    /* A second hard link is as good as the first. */
    file = create("hard.h5");
    put(file, "elsewhere", H5P_DEFAULT, size, 1);
    H5Lcreate_hard(file, "elsewhere", file, "series", H5P_DEFAULT, H5P_DEFAULT);
    H5Fclose(file);
    struct ps_series *series;
    ck_assert_msg(ps_series_open(in_folder("hard.h5"), &series) == PS_OK, "%s", ps_error_message());
    ps_series_close(series);
}
END_TEST

START_TEST(storage)
{
    hid_t creation = H5Pcreate(H5P_DATASET_CREATE), file = create("external_storage.h5");
    FILE *secret = fopen(in_folder("secret"), "w");
    ck_assert_uint_eq(fwrite(values, sizeof values, 1, secret), 1);
    fclose(secret);
    H5Pset_external(creation, in_folder("secret"), 0, sizeof values);
    put(file, "series", creation, size, 0);
    H5Fclose(file);
    refuse("external_storage.h5", "/series keeps its values in another file");

    file = create("other.h5");
    put(file, "series", H5P_DEFAULT, size, 1);
    H5Fclose(file);
    hid_t space = H5Screate_simple(2, size, NULL);
    creation = H5Pcreate(H5P_DATASET_CREATE);
    ck_assert_int_ge(H5Pset_virtual(creation, space, in_folder("other.h5"), "/series", space), 0);
    H5Sclose(space);
    file = create("virtual.h5");
    put(file, "series", creation, size, 0);
    H5Fclose(file);
    refuse("virtual.h5", "/series is a virtual dataset");

    file = create("unwritten.h5");
    put(file, "series", H5P_DEFAULT, size, 0);
    H5Fclose(file);
    refuse("unwritten.h5", "/series does not lie in the file as large as it says");

    file = create("some_chunks.h5");
    space = H5Screate_simple(2, size, NULL);
    creation = chunked(16);
    hid_t set = H5Dcreate2(file, "series", H5T_IEEE_F32LE, space, H5P_DEFAULT, creation, H5P_DEFAULT);
    H5Sselect_hyperslab(space, H5S_SELECT_SET, (hsize_t[]){16, 0}, NULL, (hsize_t[]){32, CHANNELS}, NULL);
    ck_assert_int_ge(H5Dwrite(set, H5T_NATIVE_FLOAT, space, space, H5P_DEFAULT, values), 0);
    H5Dclose(set);
    H5Sclose(space);
    H5Pclose(creation);
    H5Fclose(file);
    refuse("some_chunks.h5", "/series holds 2 of its 4 chunks");

    /* A chunk of 4 GB less 16 KB for 512 bytes of values: HDF5 would allocate it whole. */
    hsize_t unlimited[2] = {H5S_UNLIMITED, CHANNELS};
    file = create("absurd_chunk.h5");
    space = H5Screate_simple(2, size, unlimited);
    creation = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_chunk(creation, 2, (hsize_t[]){536868864, CHANNELS});
    H5Pset_deflate(creation, 1);
    H5Dclose(H5Dcreate2(file, "series", H5T_IEEE_F32LE, space, H5P_DEFAULT, creation, H5P_DEFAULT));
    H5Pclose(creation);
    H5Sclose(space);
    H5Fclose(file);
    refuse("absurd_chunk.h5", "/series has absurd chunks");

    /* The memory is asked for before anything is allocated; the file is sparse. */
    hsize_t large[2] = {2147483647, 64};
    creation = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_alloc_time(creation, H5D_ALLOC_TIME_EARLY);
    H5Pset_fill_time(creation, H5D_FILL_TIME_NEVER);
    file = create("large.h5");
    put(file, "series", creation, large, 0);
    H5Fclose(file);
    refuse("large.h5", "/series needs 512.0 GiB of host memory");
}
END_TEST

START_TEST(types)
{
    hid_t type = H5Tcopy(H5T_IEEE_F32LE), space = H5Screate_simple(2, size, NULL), file = create("float.h5");
    ck_assert_int_ge(H5Tset_ebias(type, 3), 0);
    hid_t set = H5Dcreate2(file, "series", type, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    ck_assert_int_ge(H5Dwrite(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values), 0);
    H5Dclose(set);
    H5Sclose(space);
    H5Tclose(type);
    H5Fclose(file);
    refuse("float.h5", "/series has type float32, not IEEE's");
}
END_TEST

START_TEST(filters_read)
{
    for (int i = 0; i < ROWS * CHANNELS; i++) {
        values[i] = (float)(i * 7 % 11);
    }
    for (unsigned which = 1; which < 16; which++) {
        hid_t creation = chunked(24), file = create("filtered.h5");
        if (which & 8) {
            H5Pset_fletcher32(creation);
        }
        if (which & 1) {
            H5Pset_shuffle(creation);
        }
        if (which & 2) {
            H5Pset_deflate(creation, 9);
        }
        if ((which & 12) == 4) {
            H5Pset_fletcher32(creation);
        }
        put(file, "series", creation, size, 1);
        H5Fclose(file);
        struct ps_series *series;
        ck_assert_msg(ps_series_open(in_folder("filtered.h5"), &series) == PS_OK, "%u: %s", which, ps_error_message());
        ck_assert_mem_eq(series->values, values, sizeof values);
        ps_series_close(series);
    }
    hid_t creation = chunked(24), file = create("scaled.h5");
    H5Pset_scaleoffset(creation, H5Z_SO_FLOAT_DSCALE, 2);
    put(file, "series", creation, size, 1);
    H5Fclose(file);
    refuse("scaled.h5", "/series is filtered in a way that is not read");
    creation = chunked(24);
    file = create("twice.h5");
    H5Pset_deflate(creation, 1);
    H5Pset_deflate(creation, 1);
    put(file, "series", creation, size, 1);
    H5Fclose(file);
    refuse("twice.h5", "/series is filtered in a way that is not read");
}
END_TEST

/* A file whose chunks were written as they are given: `stored` of `length` bytes, once for each of two chunks, with the mask of
 * filters skipped. */
static void put_raw(const char *name, unsigned skipped, const void *stored, size_t length, int checksum)
{
    hid_t creation = chunked(ROWS / 2), file = create(name), space = H5Screate_simple(2, size, NULL);
    H5Pset_deflate(creation, 1);
    if (checksum) {
        H5Pset_fletcher32(creation);
    }
    hid_t set = H5Dcreate2(file, "series", H5T_IEEE_F32LE, space, H5P_DEFAULT, creation, H5P_DEFAULT);
    for (hsize_t row = 0; row < ROWS; row += ROWS / 2) {
        ck_assert_int_ge(H5Dwrite_chunk(set, H5P_DEFAULT, skipped, (hsize_t[]){row, 0}, length, stored), 0);
    }
    H5Dclose(set);
    H5Sclose(space);
    H5Pclose(creation);
    H5Fclose(file);
}

/* HDF5 takes a chunk as it inflates, and copies its full size out of it. */
START_TEST(chunks_of_wrong_size)
{
    static unsigned char bomb[1 << 16];
    static const unsigned char zeros[1 << 25];
    uLongf length = sizeof bomb;
    const uLong chunk = sizeof values / 2;
    ck_assert_int_eq(compress2(bomb, &length, zeros, chunk, 9), Z_OK);
    put_raw("right.h5", 0, bomb, length, 0);
    struct ps_series *series;
    ck_assert_msg(ps_series_open(in_folder("right.h5"), &series) == PS_OK, "%s", ps_error_message());
    ps_series_close(series);
    put_raw("cut.h5", 0, bomb, length - 5, 0);
    refuse("cut.h5", "/series has a chunk that is damaged");

    for (int longer = 0; longer < 3; longer++) {
        length = sizeof bomb;
        uLong inflated = longer == 2 ? sizeof zeros : longer == 1 ? chunk + 4 : chunk - 4;
        ck_assert_int_eq(compress2(bomb, &length, zeros, inflated, 9), Z_OK);
        put_raw("wrong.h5", 0, bomb, length, 0);
        refuse("wrong.h5", "/series has a chunk that is damaged");
    }
    put_raw("raw.h5", 1, zeros, chunk, 0);
    ck_assert_msg(ps_series_open(in_folder("raw.h5"), &series) == PS_OK, "%s", ps_error_message());
    ps_series_close(series);
    put_raw("short.h5", 1, zeros, chunk - 4, 0);
    refuse("short.h5", "/series has a chunk that is damaged");
    put_raw("no_sum.h5", 1, zeros, 3, 1);
    refuse("no_sum.h5", "/series has a chunk that is damaged");
}
END_TEST

/* A name that says to have 2 GiB, in a file of a few KB: not a series without names either. */
START_TEST(absurd_name)
{
    hid_t file = create("name.h5"), type = H5Tcopy(H5T_C_S1), space = H5Screate(H5S_SCALAR);
    put(file, "series", H5P_DEFAULT, (hsize_t[]){ROWS, 1}, 1);
    hid_t set = H5Dopen2(file, "series", H5P_DEFAULT);
    H5Tset_size(type, 1000);
    hid_t attribute = H5Acreate2(set, "channels", type, space, H5P_DEFAULT, H5P_DEFAULT);
    static const char name[1000] = "a";
    ck_assert_int_ge(H5Awrite(attribute, type, name), 0);
    H5Aclose(attribute);
    H5Dclose(set);
    H5Sclose(space);
    H5Tclose(type);
    H5Fclose(file);
    struct ps_series *series;
    ck_assert_msg(ps_series_open(in_folder("name.h5"), &series) == PS_OK, "%s", ps_error_message());
    ps_series_close(series);

    /* The datatype's message: version 1 and class string, no flags, its size. */
    static const unsigned char said[8] = {0x13, 0, 0, 0, 1000 & 255, 1000 >> 8},
                               absurd[8] = {0x13, 0, 0, 0, 0xff, 0xff, 0xff, 0x7f};
    static unsigned char bytes[1 << 16];
    FILE *out = fopen(in_folder("name.h5"), "r+");
    size_t length = fread(bytes, 1, sizeof bytes, out);
    int found = 0;
    for (unsigned char *at = bytes; (at = memmem(at, length - (size_t)(at - bytes), said, sizeof said)) != NULL; found++) {
        memcpy(at, absurd, sizeof absurd);
    }
    ck_assert_int_gt(found, 0);
    rewind(out);
    ck_assert_uint_eq(fwrite(bytes, 1, length, out), length);
    ck_assert_int_eq(fclose(out), 0);
    refuse("name.h5", "/series: its attributes cannot be read");
}
END_TEST

/* ---- inputs that the fuzz targets found: each crashes some libhdf5, loops in it, or makes it ask for memory without end ---- */

/* The file's bytes, with `before` zero bytes before them. */
static char *get_file(const char *path, size_t before, size_t *length)
{
    struct stat st;
    ck_assert_msg(stat(path, &st) == 0, "%s", path);
    *length = before + (size_t)st.st_size;
    char *bytes = calloc(1, *length + 1);
    FILE *file = fopen(path, "r");
    ck_assert_uint_eq(fread(bytes + before, 1, (size_t)st.st_size, file), (size_t)st.st_size);
    fclose(file);
    return bytes;
}

/* Calls `opens` for each file in tests/fuzz/contained/NAME; those that take long only in the long form. */
static void for_each_contained(const char *name, void (*opens)(const char *path))
{
    char pattern[512];
    snprintf(pattern, sizeof pattern, "%s/tests/fuzz/contained/%s/*", getenv("PS_SOURCE"), name);
    glob_t found;
    ck_assert_int_eq(glob(pattern, 0, NULL, &found), 0);
    ck_assert_uint_gt(found.gl_pathc, 0);
    for (size_t i = 0; i < found.gl_pathc; i++) {
        if (getenv("PS_TEST_FULL") != NULL || strstr(found.gl_pathv[i], "endless") == NULL) {
            opens(found.gl_pathv[i]);
        }
    }
    globfree(&found);
}

static void open_contained_series(const char *path)
{
    struct ps_series *series;
    ck_assert_msg(ps_series_open(path, &series) == PS_DATA, "%s is accepted", path);
    check_message(path);
}

START_TEST(contained_series)
{
    for_each_contained("series", open_contained_series);
}
END_TEST

/* The HDF5 part of a checkpoint, to which the right digest is put. */
static void open_contained_checkpoint(const char *path)
{
    enum { BLOCK = 512 };
    size_t length;
    char *bytes = get_file(path, BLOCK, &length), digest[PS_DIGEST_HEX];
    ck_assert(ps_digest(bytes + BLOCK, length - BLOCK, digest));
    snprintf(bytes, BLOCK, "PatchStep checkpoint\nformat 1\nlength %zu\nsha256 %s\n", length, digest);
    FILE *out = fopen(in_folder("checkpoint.h5"), "w");
    ck_assert_uint_eq(fwrite(bytes, 1, length, out), length);
    ck_assert_int_eq(fclose(out), 0);
    free(bytes);
    struct ps_checkpoint checkpoint;
    ck_assert_msg(ps_checkpoint_load(in_folder("checkpoint.h5"), &checkpoint) == PS_CHECKPOINT, "%s is accepted", path);
    check_message(in_folder("checkpoint.h5"));
}

START_TEST(contained_checkpoints)
{
    for_each_contained("checkpoint", open_contained_checkpoint);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("hostile");
    TCase *c = tcase_create("child");
    tcase_set_timeout(c, 60);
    tcase_add_test(c, child);
    tcase_add_test(c, time_limit);
    tcase_add_test(c, child_of_an_orphanage);
    tcase_add_test(c, child_that_waits); /* 10 s, asleep */
    suite_add_tcase(suite, c);
    c = tcase_create("series");
    tcase_set_timeout(c, 60);
    tcase_add_checked_fixture(c, make_folder, remove_folder);
    tcase_add_test(c, links);
    tcase_add_test(c, storage);
    tcase_add_test(c, types);
    tcase_add_test(c, filters_read);
    tcase_add_test(c, chunks_of_wrong_size);
    tcase_add_test(c, absurd_name);
    suite_add_tcase(suite, c);
    c = tcase_create("contained");
    tcase_set_timeout(c, 300);
    tcase_add_checked_fixture(c, make_folder, remove_folder);
    if (getenv("PS_SOURCE") != NULL) {
        tcase_add_test(c, contained_series);
        tcase_add_test(c, contained_checkpoints);
    } else {
        puts("skipped: the inputs that fuzzing found, because PS_SOURCE is not set");
    }
    suite_add_tcase(suite, c);
    return run_suite(suite, CK_FORK_GETENV) != 0;
}
