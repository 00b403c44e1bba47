/* data/: files, splits, windows, scaling, shuffling, prefetch, import and the two programs that make files. */
#include <float.h>
#include <ftw.h>
#include <hdf5.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "data/import.h"
#include "data/batches.h"
#include "data/series.h"
#include "tests/suite.h"

/* ---- a folder for each test ---- */

static char folder[256];

static void make_folder(void)
{
    const char *base = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/patchstep-data-XXXXXX", base != NULL ? base : "/tmp");
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

static const char *write_file(const char *name, const char *bytes, size_t size)
{
    const char *path = in_folder(name);
    FILE *file = fopen(path, "w");
    ck_assert_ptr_nonnull(file);
    ck_assert_uint_eq(fwrite(bytes, 1, size, file), size);
    ck_assert_int_eq(fclose(file), 0);
    return path;
}

static const char *write_text(const char *name, const char *text)
{
    return write_file(name, text, strlen(text));
}

/* The bytes of a file, malloc'ed. */
static char *read_bytes(const char *path, size_t *size)
{
    FILE *file = fopen(path, "r");
    ck_assert_msg(file != NULL, "%s", path);
    fseek(file, 0, SEEK_END);
    *size = (size_t)ftell(file);
    rewind(file);
    char *bytes = malloc(*size + 1);
    ck_assert_uint_eq(fread(bytes, 1, *size, file), *size);
    fclose(file);
    return bytes;
}

static int exists(const char *path)
{
    return access(path, F_OK) == 0;
}

/* The text is one line that holds every part ("|" between them). */
static void check_parts(const char *text, const char *parts)
{
    char copy[512], *rest = copy;
    snprintf(copy, sizeof copy, "%s", parts);
    ck_assert_msg(strchr(text, '\n') == NULL, "more than a line: %s", text);
    for (char *part; (part = strsep(&rest, "|")) != NULL;) {
        ck_assert_msg(strstr(text, part) != NULL, "\"%s\" is not in: %s", part, text);
    }
}

static void check_message(const char *parts)
{
    check_parts(ps_error_message(), parts);
}

/* ---- HDF5 files made directly ---- */

static hid_t create_h5(const char *name)
{
    hid_t file = H5Fcreate(in_folder(name), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    ck_assert_int_ge(file, 0);
    return file;
}

/* data NULL: nothing is written; such datasets are chunked and take no room. */
static void put(hid_t file, const char *name, hid_t stored, hid_t memory, int rank, const hsize_t *size, const hsize_t *chunk,
                const void *data)
{
    hid_t space = H5Screate_simple(rank, size, NULL), creation = H5Pcreate(H5P_DATASET_CREATE);
    if (chunk != NULL) {
        H5Pset_chunk(creation, rank, chunk);
    }
    hid_t set = H5Dcreate2(file, name, stored, space, H5P_DEFAULT, creation, H5P_DEFAULT);
    ck_assert_int_ge(set, 0);
    if (data != NULL) {
        ck_assert_int_ge(H5Dwrite(set, memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, data), 0);
    }
    H5Dclose(set);
    H5Pclose(creation);
    H5Sclose(space);
}

static void put_floats(hid_t file, const char *name, int rank, const hsize_t *size, const float *data)
{
    put(file, name, H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, rank, size, NULL, data);
}

/* Channel names as text of fixed length, as numpy writes them. */
static void put_fixed_names(hid_t file, const char *name, hsize_t n, size_t length, const char *texts)
{
    hid_t type = H5Tcopy(H5T_C_S1), space = H5Screate_simple(1, &n, NULL), set = H5Dopen2(file, name, H5P_DEFAULT);
    H5Tset_size(type, length);
    H5Tset_strpad(type, H5T_STR_NULLPAD);
    hid_t attribute = H5Acreate2(set, "channels", type, space, H5P_DEFAULT, H5P_DEFAULT);
    ck_assert_int_ge(H5Awrite(attribute, type, texts), 0);
    H5Aclose(attribute);
    H5Dclose(set);
    H5Sclose(space);
    H5Tclose(type);
}

static struct ps_series *open_series(const char *path)
{
    struct ps_series *series;
    ck_assert_msg(ps_series_open(path, &series) == PS_OK, "%s", ps_error_message());
    return series;
}

static void refuse(const char *path, const char *parts)
{
    struct ps_series *series;
    ck_assert_int_eq(ps_series_open(path, &series), PS_DATA);
    ck_assert_ptr_null(series);
    check_message(path);
    check_message(parts);
}

/* x[t, c] = 10 t + c. */
static void fill_counting(float *x, int rows, int channels)
{
    for (int i = 0; i < rows * channels; i++) {
        x[i] = (float)(10 * (i / channels) + i % channels);
    }
}

/* A series in memory; nothing in it is owned. */
static struct ps_series memory_series(float *values, int64_t rows, int64_t channels)
{
    return (struct ps_series){.path = "memory", .layout = PS_LAYOUT_SERIES, .rows = rows, .channels = channels, .values = values};
}

/* ---- opening ---- */

START_TEST(series_round_trip)
{
    enum { T = 2500, C = 3 };
    static float values[T * C];
    static int64_t time[T];
    for (int i = 0; i < T * C; i++) {
        values[i] = sinf((float)i);
    }
    for (int t = 0; t < T; t++) {
        time[t] = 1000 + 900 * (int64_t)t;
    }
    char *names[C] = {"first", "zwei \xc3\xa4", "3"};
    const char *path = in_folder("series.h5");
    ck_assert_msg(ps_series_write(path, values, T, C, names, time, "15min", "made") == PS_OK, "%s", ps_error_message());
    ck_assert(!exists(in_folder("series.h5.partial")));

    struct ps_series *s = open_series(path);
    ck_assert_int_eq(s->layout, PS_LAYOUT_SERIES);
    ck_assert_int_eq(s->rows, T);
    ck_assert_int_eq(s->channels, C);
    ck_assert_str_eq(s->path, path);
    ck_assert_mem_eq(s->values, values, sizeof values);
    for (int c = 0; c < C; c++) {
        ck_assert_str_eq(s->channel_names[c], names[c]);
    }
    ps_series_close(s);

    hid_t file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT), set = H5Dopen2(file, "/time", H5P_DEFAULT);
    static int64_t read_time[T];
    ck_assert_int_ge(H5Dread(set, H5T_NATIVE_INT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, read_time), 0);
    ck_assert_mem_eq(read_time, time, sizeof time);
    H5Dclose(set);
    set = H5Dopen2(file, "/series", H5P_DEFAULT);
    hid_t creation = H5Dget_create_plist(set);
    hsize_t chunk[2];
    ck_assert_int_eq(H5Pget_chunk(creation, 2, chunk), 2);
    ck_assert_int_eq(chunk[0], 1024);
    ck_assert_int_eq(chunk[1], C);
    hid_t attribute = H5Aopen(set, "frequency", H5P_DEFAULT), type = H5Aget_type(attribute);
    char *text;
    ck_assert_int_ge(H5Aread(attribute, type, &text), 0);
    ck_assert_str_eq(text, "15min");
    H5free_memory(text);
    H5Tclose(type);
    H5Aclose(attribute);
    H5Pclose(creation);
    H5Dclose(set);
    H5Fclose(file);

    /* Written over what was there, and without names and times. */
    ck_assert_int_eq(ps_series_write(path, values, 2, C, NULL, NULL, NULL, NULL), PS_OK);
    s = open_series(path);
    ck_assert_int_eq(s->rows, 2);
    ck_assert_ptr_null(s->channel_names);
    ps_series_close(s);

    ck_assert_int_eq(ps_series_write(in_folder("no/folder.h5"), values, 2, C, NULL, NULL, NULL, NULL), PS_DATA);
    check_message("no/folder.h5|No such file or directory");
    ck_assert_int_eq(ps_series_write(path, values, 0, C, NULL, NULL, NULL, NULL), PS_DATA);
    check_message("series.h5|0 rows");
    ck_assert_int_eq(ps_series_write(path, values, (int64_t)INT32_MAX + 1, 1, NULL, NULL, NULL, NULL), PS_DATA);
    check_message("series.h5|2147483648 rows|1 to 2147483647");
}
END_TEST

/* More names than an attribute of the oldest format holds. */
START_TEST(series_many_channels)
{
    enum { C = 6000 };
    static float values[2 * C];
    static char texts[C][16];
    static char *names[C];
    for (int c = 0; c < C; c++) {
        snprintf(texts[c], sizeof texts[c], "c%d", c);
        names[c] = texts[c];
    }
    ck_assert_msg(ps_series_write(in_folder("wide.h5"), values, 2, C, names, NULL, NULL, NULL) == PS_OK, "%s", ps_error_message());
    struct ps_series *s = open_series(in_folder("wide.h5"));
    ck_assert_str_eq(s->channel_names[C - 1], "c5999");
    ps_series_close(s);
}
END_TEST

static uint64_t fingerprint_of(const char *path)
{
    struct ps_series *s = open_series(path);
    uint64_t fingerprint = s->fingerprint;
    ps_series_close(s);
    return fingerprint;
}

START_TEST(fingerprint)
{
    float x[12];
    double wide[12];
    fill_counting(x, 6, 2);
    for (int i = 0; i < 12; i++) {
        x[i] += 0.1f;
        wide[i] = x[i];
    }
    hid_t file = create_h5("a.h5");
    put_floats(file, "series", 2, (hsize_t[]){6, 2}, x);
    H5Fclose(file);
    file = create_h5("chunked.h5");
    put(file, "series", H5T_IEEE_F32BE, H5T_NATIVE_FLOAT, 2, (hsize_t[]){6, 2}, (hsize_t[]){4, 1}, x);
    H5Fclose(file);
    file = create_h5("double.h5");
    put(file, "series", H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, 2, (hsize_t[]){6, 2}, NULL, wide);
    H5Fclose(file);
    file = create_h5("shape.h5");
    put_floats(file, "series", 2, (hsize_t[]){4, 3}, x);
    H5Fclose(file);
    /* An odd number of elements: the last one has no other beside it. */
    uint64_t odd[2];
    for (int i = 0; i < 2; i++) {
        float y[11];
        memcpy(y, x, sizeof y);
        y[10] += (float)i;
        file = create_h5("odd.h5");
        put_floats(file, "series", 2, (hsize_t[]){11, 1}, y);
        H5Fclose(file);
        odd[i] = fingerprint_of(in_folder("odd.h5"));
    }
    ck_assert_uint_ne(odd[0], odd[1]);
    uint64_t first = fingerprint_of(in_folder("a.h5"));
    ck_assert_uint_eq(fingerprint_of(in_folder("chunked.h5")), first);
    ck_assert_uint_eq(fingerprint_of(in_folder("double.h5")), first);
    ck_assert_uint_ne(fingerprint_of(in_folder("shape.h5")), first);

    /* Every change counts: any one value, any two signs, any two values exchanged. */
    for (int i = 0; i < 12; i++) {
        for (int j = 0; j <= i; j++) {
            float y[12], z[12];
            memcpy(y, x, sizeof y);
            memcpy(z, x, sizeof z);
            y[i] = -y[i];
            y[j] = i == j ? y[j] : -y[j];
            z[i] = x[j];
            z[j] = i == j ? nextafterf(x[j], 0) : x[i];
            file = create_h5("y.h5");
            put_floats(file, "series", 2, (hsize_t[]){6, 2}, y);
            H5Fclose(file);
            ck_assert_uint_ne(fingerprint_of(in_folder("y.h5")), first);
            file = create_h5("z.h5");
            put_floats(file, "series", 2, (hsize_t[]){6, 2}, z);
            H5Fclose(file);
            ck_assert_uint_ne(fingerprint_of(in_folder("z.h5")), first);
        }
    }
}
END_TEST

START_TEST(windows_file)
{
    float inputs[2 * 3 * 4], targets[2 * 3 * 1];
    fill_counting(inputs, 6, 4);
    fill_counting(targets, 6, 1);
    hid_t file = create_h5("w.h5");
    put_floats(file, "inputs", 3, (hsize_t[]){2, 3, 4}, inputs);
    put_floats(file, "targets", 3, (hsize_t[]){2, 3, 1}, targets);
    put_fixed_names(file, "inputs", 3, 2, "a\0bbc\0");
    H5Fclose(file);
    struct ps_series *s = open_series(in_folder("w.h5"));
    ck_assert_int_eq(s->layout, PS_LAYOUT_WINDOWS);
    ck_assert_int_eq(s->rows, 2);
    ck_assert_int_eq(s->channels, 3);
    ck_assert_int_eq(s->seq_len, 4);
    ck_assert_int_eq(s->pred_len, 1);
    ck_assert_mem_eq(s->inputs, inputs, sizeof inputs);
    ck_assert_mem_eq(s->targets, targets, sizeof targets);
    ck_assert_str_eq(s->channel_names[0], "a");
    ck_assert_str_eq(s->channel_names[1], "bb");
    ck_assert_str_eq(s->channel_names[2], "c");

    struct ps_splits splits;
    ck_assert_int_eq(ps_splits_make(s, (double[]){1, 1, 1}, 4, 2, &splits), PS_DATA);
    check_message("w.h5|seq_len 4 and pred_len 1|4 and 2");
    ps_series_close(s);
}
END_TEST

START_TEST(bad_files)
{
    float x[12], bad[12];
    fill_counting(x, 6, 2);
    refuse(in_folder("missing.h5"), "cannot be opened|No such file");
    refuse(folder, "not a regular file");
    refuse(write_text("text.h5", "date,a\n1,2\n"), "not an HDF5 file|import_csv");
    refuse(write_text("empty.h5", ""), "not an HDF5 file");

    ck_assert_int_eq(ps_series_write(in_folder("whole.h5"), x, 6, 2, NULL, NULL, NULL, NULL), PS_OK);
    size_t size;
    char *bytes = read_bytes(in_folder("whole.h5"), &size);
    refuse(write_file("half.h5", bytes, size / 2), "cannot be opened as HDF5|truncated");
    free(bytes);

    hid_t file = create_h5("neither.h5");
    put_floats(file, "values", 2, (hsize_t[]){6, 2}, x);
    H5Fclose(file);
    refuse(in_folder("neither.h5"), "neither /series nor /inputs and /targets");

    file = create_h5("both.h5");
    put_floats(file, "series", 2, (hsize_t[]){6, 2}, x);
    put_floats(file, "inputs", 3, (hsize_t[]){1, 2, 6}, x);
    H5Fclose(file);
    refuse(in_folder("both.h5"), "both /series and /inputs");

    file = create_h5("half_windows.h5");
    put_floats(file, "targets", 3, (hsize_t[]){1, 2, 6}, x);
    H5Fclose(file);
    refuse(in_folder("half_windows.h5"), "/targets without /inputs");

    file = create_h5("group.h5");
    H5Gclose(H5Gcreate2(file, "series", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
    H5Fclose(file);
    refuse(in_folder("group.h5"), "/series cannot be opened as a dataset");

    file = create_h5("rank.h5");
    put_floats(file, "series", 1, (hsize_t[]){12}, x);
    H5Fclose(file);
    refuse(in_folder("rank.h5"), "/series has rank 1|expected rank 2, [rows, channels]");

    file = create_h5("rank_windows.h5");
    put_floats(file, "inputs", 3, (hsize_t[]){2, 2, 3}, x);
    put_floats(file, "targets", 2, (hsize_t[]){2, 2}, x);
    H5Fclose(file);
    refuse(in_folder("rank_windows.h5"), "/targets has rank 2|[windows, channels, pred_len]");

    file = create_h5("empty_series.h5");
    put(file, "series", H5T_IEEE_F32LE, 0, 2, (hsize_t[]){0, 2}, (hsize_t[]){1, 2}, NULL);
    H5Fclose(file);
    refuse(in_folder("empty_series.h5"), "size 0 of /series is 0");

    int whole[12] = {0};
    file = create_h5("int.h5");
    put(file, "series", H5T_STD_I32LE, H5T_NATIVE_INT, 2, (hsize_t[]){6, 2}, NULL, whole);
    H5Fclose(file);
    refuse(in_folder("int.h5"), "/series has type int32|float32 or float64");

    file = create_h5("uint.h5");
    put(file, "series", H5T_STD_U16LE, H5T_NATIVE_INT, 2, (hsize_t[]){6, 2}, NULL, whole);
    H5Fclose(file);
    refuse(in_folder("uint.h5"), "/series has type uint16");

    file = create_h5("text_type.h5");
    put(file, "series", H5T_C_S1, H5T_C_S1, 2, (hsize_t[]){6, 2}, NULL, "abcdefghijkl");
    H5Fclose(file);
    refuse(in_folder("text_type.h5"), "wrong type (text)");

    for (int i = 0; i < 2; i++) {
        const char *name = i == 0 ? "w_differ.h5" : "c_differ.h5";
        file = create_h5(name);
        put_floats(file, "inputs", 3, (hsize_t[]){2, 2, 3}, x);
        put_floats(file, "targets", 3, i == 0 ? (hsize_t[]){3, 2, 1} : (hsize_t[]){2, 3, 1}, x);
        H5Fclose(file);
        refuse(in_folder(name), i == 0 ? "2 windows and /targets has 3" : "2 channels and /targets has 3");
    }

    memcpy(bad, x, sizeof bad);
    bad[7] = NAN; /* row 3, channel 1 */
    char *names[2] = {"load", "oil\ntemperature"};
    ck_assert_int_eq(ps_series_write(in_folder("nan.h5"), bad, 6, 2, names, NULL, NULL, NULL), PS_OK);
    refuse(in_folder("nan.h5"), "/series holds NaN in channel 1 (oil?temperature), row 3 (counted from 0)");
    bad[7] = -INFINITY;
    ck_assert_int_eq(ps_series_write(in_folder("inf.h5"), bad, 6, 2, NULL, NULL, NULL, NULL), PS_OK);
    refuse(in_folder("inf.h5"), "/series holds -Inf in channel 1, row 3");

    double wide[12] = {[4] = 1e39}; /* finite, but not in float32 */
    file = create_h5("wide.h5");
    put(file, "series", H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, 2, (hsize_t[]){6, 2}, NULL, wide);
    H5Fclose(file);
    refuse(in_folder("wide.h5"), "/series holds Inf in channel 0, row 2|finite in float32");

    file = create_h5("nan_targets.h5");
    put_floats(file, "inputs", 3, (hsize_t[]){2, 2, 3}, x);
    memcpy(bad, x, sizeof bad);
    bad[6] = NAN; /* [2, 2, 2]: window 1, channel 1, row 0 */
    put_floats(file, "targets", 3, (hsize_t[]){2, 2, 2}, bad);
    H5Fclose(file);
    refuse(in_folder("nan_targets.h5"), "/targets holds NaN in channel 1, window 1, row 0");

    file = create_h5("names.h5");
    put_floats(file, "series", 2, (hsize_t[]){6, 2}, x);
    put_fixed_names(file, "series", 3, 1, "abc");
    H5Fclose(file);
    refuse(in_folder("names.h5"), "attribute channels of /series must be 2 texts|it has 3");

    /* Nothing of these is written, and nothing is allocated for them. */
    file = create_h5("long.h5");
    put(file, "series", H5T_IEEE_F32LE, 0, 2, (hsize_t[]){3000000000u, 1}, (hsize_t[]){1024, 1}, NULL);
    H5Fclose(file);
    refuse(in_folder("long.h5"), "size 0 of /series is 3000000000|1 to 2147483647");
    file = create_h5("huge.h5");
    put(file, "series", H5T_IEEE_F32LE, 0, 2, (hsize_t[]){2147483647, 65536}, (hsize_t[]){1024, 1}, NULL);
    H5Fclose(file);
    refuse(in_folder("huge.h5"), "/series holds 0 of its 137438953472 chunks");
    file = create_h5("overflow.h5");
    hsize_t most[3] = {2147483647, 2147483647, 2147483647};
    put(file, "inputs", H5T_IEEE_F32LE, 0, 3, most, (hsize_t[]){1, 1, 1024}, NULL);
    put(file, "targets", H5T_IEEE_F32LE, 0, 3, most, (hsize_t[]){1, 1, 1024}, NULL);
    H5Fclose(file);
    refuse(in_folder("overflow.h5"), "sizes of /inputs overflow");
}
END_TEST

/* ---- splits, windows, scaling ---- */

static void check_splits(const struct ps_splits *s, const int64_t expected[7])
{
    for (int i = 0; i < PS_SPLITS; i++) {
        ck_assert_int_eq(s->first[i], expected[2 * i]);
        ck_assert_int_eq(s->count[i], expected[2 * i + 1]);
    }
    ck_assert_int_eq(s->train_rows, expected[6]);
}

START_TEST(splits_by_hand)
{
    struct ps_splits s;
    /* ETTh1 as the field splits it: 17420 rows, of which 14400 are used. */
    struct ps_series etth1 = memory_series(NULL, 17420, 7);
    ck_assert_int_eq(ps_splits_make(&etth1, (double[]){8640, 2880, 2880}, 336, 96, &s), PS_OK);
    check_splits(&s, (int64_t[]){0, 8209, 8304, 2785, 11184, 2785, 8640});

    struct ps_series tiny = memory_series(NULL, 10, 2);
    ck_assert_int_eq(ps_splits_make(&tiny, (double[]){6, 2, 2}, 3, 2, &s), PS_OK);
    check_splits(&s, (int64_t[]){0, 2, 3, 1, 5, 1, 6});
    ck_assert_int_eq(ps_splits_make(&tiny, (double[]){0.6, 0.2, 0.2}, 3, 2, &s), PS_OK);
    check_splits(&s, (int64_t[]){0, 2, 3, 1, 5, 1, 6});

    /* 11 rows: 7.7 -> 7, 1.1 -> 1, and all 3 left; fractions that leave rows over: 5.5 -> 5, 2.2 -> 2, 3.3 -> 3. */
    struct ps_series eleven = memory_series(NULL, 11, 1);
    ck_assert_int_eq(ps_splits_make(&eleven, (double[]){0.7, 0.1, 0.2}, 4, 1, &s), PS_OK);
    check_splits(&s, (int64_t[]){0, 3, 3, 1, 4, 3, 7});
    ck_assert_int_eq(ps_splits_make(&eleven, (double[]){0.5, 0.2, 0.3}, 4, 1, &s), PS_OK);
    check_splits(&s, (int64_t[]){0, 1, 1, 2, 3, 4, 5});
    ck_assert_int_eq(ps_splits_make(&eleven, (double[]){0.5, 0.2, 0.28}, 4, 1, &s), PS_OK);
    check_splits(&s, (int64_t[]){0, 1, 1, 2, 3, 3, 5});

    /* As doubles 0.7, 0.2 and 0.1 add up to less than 1. */
    ck_assert_int_eq(ps_splits_make(&eleven, (double[]){0.7, 0.2, 0.1}, 4, 1, &s), PS_OK);
    check_splits(&s, (int64_t[]){0, 3, 3, 2, 5, 2, 7});

    struct ps_series ready = {
        .path = "memory", .layout = PS_LAYOUT_WINDOWS, .rows = 10, .channels = 2, .seq_len = 3, .pred_len = 2};
    ck_assert_int_eq(ps_splits_make(&ready, (double[]){6, 3, 1}, 3, 2, &s), PS_OK);
    check_splits(&s, (int64_t[]){0, 6, 6, 3, 9, 1, 6});
}
END_TEST

START_TEST(splits_refused)
{
    struct ps_splits s;
    struct ps_series tiny = memory_series(NULL, 10, 2);
    ck_assert_int_eq(ps_splits_make(&tiny, (double[]){6, 3, 2}, 3, 2, &s), PS_DATA);
    check_message("memory|[6, 3, 2] needs 11 rows and the file has 10");
    ck_assert_int_eq(ps_splits_make(&tiny, (double[]){0.7, 0.3, 0.2}, 3, 2, &s), PS_DATA);
    check_message("needs 12 rows and the file has 10");
    ck_assert_int_eq(ps_splits_make(&tiny, (double[]){4, 3, 3}, 3, 2, &s), PS_DATA);
    check_message("the train part has no window|it has 4 rows and needs at least 5");
    ck_assert_int_eq(ps_splits_make(&tiny, (double[]){7, 1, 2}, 3, 2, &s), PS_DATA);
    check_message("the val part has no window|it has 1 rows and needs at least 2");
    ck_assert_int_eq(ps_splits_make(&tiny, (double[]){7, 2, 0}, 3, 2, &s), PS_DATA);
    check_message("the test part has no window|it has 0 rows");
    ck_assert_int_eq(ps_splits_make(&tiny, (double[]){6.5, 2, 1}, 3, 2, &s), PS_USAGE);
    check_message("train is 6.5");
    ck_assert_int_eq(ps_splits_make(&tiny, (double[]){6, -2, 1}, 3, 2, &s), PS_USAGE);
    check_message("val is -2");
    ck_assert_int_eq(ps_splits_make(&tiny, (double[]){6, 2, NAN}, 3, 2, &s), PS_USAGE);
    check_message("test is nan");
    ck_assert_int_eq(ps_splits_make(&tiny, (double[]){6, 2, 2}, 0, 2, &s), PS_USAGE);
    check_message("seq_len is 0");
}
END_TEST

START_TEST(windows_by_hand)
{
    float x[20];
    fill_counting(x, 10, 2);
    struct ps_series series = memory_series(x, 10, 2);
    struct ps_window_view view = ps_window_view_make(&series, 3, 2);
    ck_assert_int_eq(view.windows, 6);
    /* Of the split [6, 2, 2]: both training windows, the validation and the test window. */
    const int32_t index[4] = {0, 1, 3, 5};
    const float inputs[4][2][3] = {
        {{0, 10, 20}, {1, 11, 21}}, {{10, 20, 30}, {11, 21, 31}}, {{30, 40, 50}, {31, 41, 51}}, {{50, 60, 70}, {51, 61, 71}}};
    const float targets[4][2][2] = {{{30, 40}, {31, 41}}, {{40, 50}, {41, 51}}, {{60, 70}, {61, 71}}, {{80, 90}, {81, 91}}};
    float gathered_inputs[4][2][3], gathered_targets[4][2][2];
    ps_windows_gather(&view, index, 4, gathered_inputs[0][0], gathered_targets[0][0]);
    ck_assert_mem_eq(gathered_inputs, inputs, sizeof inputs);
    ck_assert_mem_eq(gathered_targets, targets, sizeof targets);

    ck_assert_int_eq(ps_window_view_make(&series, 9, 2).windows, 0);

    /* The same windows ready-made, gathered in another order. */
    struct ps_series ready = {.layout = PS_LAYOUT_WINDOWS,
                              .rows = 4,
                              .channels = 2,
                              .seq_len = 3,
                              .pred_len = 2,
                              .inputs = gathered_inputs[0][0],
                              .targets = gathered_targets[0][0]};
    view = ps_window_view_make(&ready, 3, 2);
    ck_assert_int_eq(view.windows, 4);
    float again_inputs[2][2][3], again_targets[2][2][2];
    ps_windows_gather(&view, (int32_t[]){3, 1}, 2, again_inputs[0][0], again_targets[0][0]);
    ck_assert_mem_eq(again_inputs[0], inputs[3], sizeof inputs[3]);
    ck_assert_mem_eq(again_inputs[1], inputs[1], sizeof inputs[1]);
    ck_assert_mem_eq(again_targets[0], targets[3], sizeof targets[3]);
    ck_assert_mem_eq(again_targets[1], targets[1], sizeof targets[1]);
}
END_TEST

/* More channels than one pass of the transpose takes, and not a multiple of it. */
START_TEST(gather_many_channels)
{
    enum { T = 30, C = 37, L = 11, H = 4 };
    static float x[T * C], inputs[C * L], targets[C * H];
    fill_counting(x, T, C);
    struct ps_series series = memory_series(x, T, C);
    struct ps_window_view view = ps_window_view_make(&series, L, H);
    for (int32_t w = 0; w < view.windows; w++) {
        ps_windows_gather(&view, &w, 1, inputs, targets);
        for (int c = 0; c < C; c++) {
            for (int l = 0; l < L; l++) {
                ck_assert(inputs[c * L + l] == x[(w + l) * C + c]);
            }
            for (int t = 0; t < H; t++) {
                ck_assert(targets[c * H + t] == x[(w + L + t) * C + c]);
            }
        }
    }
}
END_TEST

START_TEST(scaler_series)
{
    /* Channel 0: 1, 2, 3, 4, 5 over the training rows; channel 1 far from 0, where float sums would fail; channel 2 constant, of a
     * value that is no binary fraction. */
    float x[8 * 3];
    for (int t = 0; t < 8; t++) {
        x[3 * t] = (float)(t + 1);
        x[3 * t + 1] = 1e6f + (float)(t % 2);
        x[3 * t + 2] = t < 5 ? 0.1f : 7;
    }
    struct ps_series series = memory_series(x, 8, 3);
    struct ps_splits splits = {.train_rows = 5};
    struct ps_scaler scaler;
    ck_assert_int_eq(ps_scaler_fit(&series, &splits, &scaler), PS_OK);
    ck_assert_int_eq(scaler.channels, 3);
    ck_assert_double_eq_tol(scaler.mean[0], 3, 1e-15);
    ck_assert_double_eq_tol(scaler.std[0], sqrt(2), 1e-15);
    ck_assert_double_eq_tol(scaler.mean[1], 1e6 + 0.4, 1e-9);
    ck_assert_double_eq_tol(scaler.std[1], sqrt(0.24), 1e-9);
    ck_assert(scaler.mean[2] == (double)0.1f);
    ck_assert(scaler.std[2] == 1);
    ck_assert_int_eq(scaler.constant, 1);
    ck_assert_int_eq(ps_scaler_apply(&scaler, &series), PS_OK);
    ck_assert(x[0] == (float)((1 - scaler.mean[0]) / scaler.std[0]));
    ck_assert(x[3 * 7] == (float)((8 - scaler.mean[0]) / scaler.std[0]));
    ck_assert(x[1] == (float)((1e6 - scaler.mean[1]) / scaler.std[1]));
    ck_assert(x[2] == 0);
    ck_assert(x[3 * 7 + 2] == (float)(7 - (double)0.1f));
    ps_scaler_free(&scaler);
    ps_scaler_free(&scaler); /* as after a failed fit */

    float before[24];
    memcpy(before, x, sizeof before);
    ck_assert_int_eq(ps_scaler_identity(3, &scaler), PS_OK);
    ck_assert_int_eq(ps_scaler_apply(&scaler, &series), PS_OK);
    ck_assert_mem_eq(before, x, sizeof before);
    ps_scaler_free(&scaler);
}
END_TEST

/* Fitted on the training windows' inputs alone, applied to inputs and targets of all. */
START_TEST(scaler_windows)
{
    float inputs[3][2][2] = {{{1, 3}, {10, 10}}, {{5, 7}, {10, 30}}, {{100, 100}, {100, 100}}},
          targets[3][2][1] = {{{4}, {15}}, {{1000}, {1000}}, {{8}, {0}}};
    struct ps_series series = {.layout = PS_LAYOUT_WINDOWS,
                               .rows = 3,
                               .channels = 2,
                               .seq_len = 2,
                               .pred_len = 1,
                               .inputs = inputs[0][0],
                               .targets = targets[0][0]};
    struct ps_splits splits = {.train_rows = 2};
    struct ps_scaler scaler;
    ck_assert_int_eq(ps_scaler_fit(&series, &splits, &scaler), PS_OK);
    ck_assert_double_eq_tol(scaler.mean[0], 4, 1e-15);
    ck_assert_double_eq_tol(scaler.std[0], sqrt(5), 1e-15);
    ck_assert_double_eq_tol(scaler.mean[1], 15, 1e-15);
    ck_assert_double_eq_tol(scaler.std[1], sqrt(75), 1e-14);
    ck_assert_int_eq(scaler.constant, 0);
    ck_assert_int_eq(ps_scaler_apply(&scaler, &series), PS_OK);
    ck_assert(inputs[0][0][1] == (float)(-1 / scaler.std[0]));
    ck_assert(inputs[2][1][0] == (float)(85 / scaler.std[1]));
    ck_assert(targets[0][0][0] == 0 && targets[0][1][0] == 0);
    ck_assert(targets[2][0][0] == (float)(4 / scaler.std[0]));
    ck_assert(targets[2][1][0] == (float)(-15 / scaler.std[1]));
    ps_scaler_free(&scaler);
}
END_TEST

/* ---- order ---- */

/* What float32 holds until it is scaled is refused by name, and left as it was; the largest that it still holds passes. */
START_TEST(scaler_overflow)
{
    enum { T = 8, C = 2, LAST = 7 * C + 1 };
    float x[T * C], fits = FLT_MAX / 2;
    struct ps_splits splits = {.train_rows = 6};
    struct ps_scaler scaler;
    char *names[C] = {"oil", "load"};
    for (int side = -1; side <= 1; side += 2) {
        for (int beyond = 0; beyond < 2; beyond++) {
            for (int i = 0; i < T * C; i++) {
                x[i] = i / C % 2 ? 0.5f : -0.5f; /* mean 0, deviation 0.5 */
            }
            x[LAST] = (float)side * (beyond ? nextafterf(fits, INFINITY) : fits);
            ck_assert_int_eq(ps_series_write(in_folder("x.h5"), x, T, C, names, NULL, NULL, NULL), PS_OK);
            struct ps_series *s = open_series(in_folder("x.h5"));
            ck_assert(s->largest == fabsf(x[LAST]));
            ck_assert_int_eq(ps_scaler_fit(s, &splits, &scaler), PS_OK);
            ck_assert_int_eq(ps_scaler_apply(&scaler, s), beyond ? PS_DATA : PS_OK);
            if (beyond) {
                check_message(side > 0 ? "/series holds 1.70141183e+38|3.4e+38" : "/series holds -1.70141183e+38|-3.4e+38");
                check_message("x.h5|in channel 1 (load), row 7 (counted from 0)|mean 0 and deviation 0.5|ends at 3.4e+38|correct");
                ck_assert_mem_eq(s->values, x, sizeof x);
            } else {
                ck_assert(s->values[LAST] == (float)side * FLT_MAX);
            }
            ps_scaler_free(&scaler);
            ps_series_close(s);
        }
    }

    /* A deviation far below the later values, in the targets of ready-made windows. */
    float inputs[3 * C * 2], targets[3 * C * 3];
    for (int i = 0; i < 3 * C * 2; i++) {
        inputs[i] = 1e-30f * (float)(i % 2);
    }
    memset(targets, 0, sizeof targets);
    targets[(2 * C + 1) * 3 + 2] = 4e10f;
    hid_t file = create_h5("w.h5");
    put_floats(file, "inputs", 3, (hsize_t[]){3, C, 2}, inputs);
    put_floats(file, "targets", 3, (hsize_t[]){3, C, 3}, targets);
    H5Fclose(file);
    struct ps_series *s = open_series(in_folder("w.h5"));
    splits.train_rows = 1;
    ck_assert_int_eq(ps_scaler_fit(s, &splits, &scaler), PS_OK);
    ck_assert_int_eq(ps_scaler_apply(&scaler, s), PS_DATA);
    check_message("w.h5: /targets holds 4e+10 in channel 1, window 2, row 2 of it (counted from 0)|it is 8e+40");
    ps_scaler_free(&scaler);
    ps_series_close(s);
}
END_TEST

START_TEST(shuffle_is_a_permutation)
{
    enum { FIRST = 1000, N = 5000 };
    static int32_t a[N], b[N];
    static int seen[N];
    ps_shuffle(3, 0, FIRST, N, a);
    int moved = 0;
    for (int i = 0; i < N; i++) {
        ck_assert(a[i] >= FIRST && a[i] < FIRST + N);
        seen[a[i] - FIRST]++;
        moved += a[i] != FIRST + i;
    }
    for (int i = 0; i < N; i++) {
        ck_assert_int_eq(seen[i], 1);
    }
    ck_assert_int_gt(moved, N / 2);
    ps_shuffle(3, 0, FIRST, N, b);
    ck_assert_mem_eq(a, b, sizeof a);
    ps_shuffle(3, 1, FIRST, N, b);
    ck_assert_mem_ne(a, b, sizeof a);
    ps_shuffle(4, 0, FIRST, N, b);
    ck_assert_mem_ne(a, b, sizeof a);

    /* Worked out apart from this code, from Philox's definition: the order is part of a run's result. */
    const int32_t small[12] = {9, 6, 13, 12, 15, 5, 14, 10, 8, 11, 16, 7}, large[12] = {7, 4, 1, 3, 11, 2, 0, 5, 6, 10, 9, 8};
    ps_shuffle(1, 0, 5, 12, a);
    ck_assert_mem_eq(a, small, sizeof small);
    ps_shuffle(0x123456789, 7, 0, 12, a);
    ck_assert_mem_eq(a, large, sizeof large);

    const int32_t group[2][12] = {{8, 0, 1, 10, 2, 5, 7, 11, 6, 9, 3, 4}, {4, 5, 6, 2, 7, 1, 11, 10, 0, 8, 9, 3}};
    for (int i = 0; i < 2; i++) {
        ps_sequence(0, 12, a);
        ps_shuffle_group(i == 0 ? 1 : 0x123456789, i == 0 ? 0 : 7, i == 0 ? 0 : 3, 12, a);
        ck_assert_mem_eq(a, group[i], sizeof group[i]);
    }

    a[0] = -1;
    ps_shuffle(1, 0, 5, 0, a);
    ck_assert_int_eq(a[0], -1);
    ps_shuffle(1, 0, 5, 1, a);
    ck_assert_int_eq(a[0], 5);
    ps_sequence(7, 3, a);
    ck_assert(a[0] == 7 && a[1] == 8 && a[2] == 9);
}
END_TEST

/* Chi-squared with 23 degrees of freedom: 49.7 is exceeded once in a thousand seeds, and this seed is fixed. */
START_TEST(shuffle_is_unbiased)
{
    enum { EPOCHS = 24000 };
    int count[256] = {0};
    for (uint64_t epoch = 0; epoch < EPOCHS; epoch++) {
        int32_t a[4];
        ps_shuffle(5, epoch, 0, 4, a);
        count[a[0] << 6 | a[1] << 4 | a[2] << 2 | a[3]]++;
    }
    double chi = 0;
    int orders = 0;
    for (int i = 0; i < 256; i++) {
        orders += count[i] > 0;
        chi += count[i] > 0 ? (count[i] - 1000.0) * (count[i] - 1000.0) / 1000 : 0;
    }
    ck_assert_int_eq(orders, 24);
    ck_assert_double_lt(chi, 49.7);
}
END_TEST

/* ---- prefetch ---- */

enum { PT = 400, PC = 24, PL = 96, PH = 24, PB = 32 };

struct prefetch_fixture {
    float values[PT * PC];
    struct ps_window_view view;
    float input_room[2][PB * PC * PL], target_room[2][PB * PC * PH];
    struct ps_batches *batches;
};

static void prefetch_open(struct prefetch_fixture *f)
{
    fill_counting(f->values, PT, PC);
    struct ps_series series = memory_series(f->values, PT, PC);
    f->view = ps_window_view_make(&series, PL, PH);
    float *const inputs[2] = {f->input_room[0], f->input_room[1]}, *const targets[2] = {f->target_room[0], f->target_room[1]};
    ck_assert_int_eq(ps_batches_open(&f->view, NULL, PB, inputs, targets, &f->batches), PS_OK);
}

/* Takes up to `batches` batches of index[begin..end) and compares each with a direct gather; returns the windows taken. */
static int64_t check_epoch(struct prefetch_fixture *f, const int32_t *index, int64_t begin, int64_t end, int batches)
{
    static float inputs[PB * PC * PL], targets[PB * PC * PH];
    double waited = 0;
    int64_t taken = 0, n;
    int slot;
    for (int b = 0; b < batches; b++) {
        ck_assert_int_eq(ps_batches_next(f->batches, &slot, &n, &waited), PS_OK);
        int64_t left = end - begin - taken;
        ck_assert_int_eq(n, left < PB ? left : PB);
        if (n == 0) {
            break;
        }
        ck_assert_int_eq(slot, b % 2);
        ps_windows_gather(&f->view, index + begin + taken, n, inputs, targets);
        ck_assert_mem_eq(f->input_room[slot], inputs, (size_t)(n * PC * PL) * sizeof(float));
        ck_assert_mem_eq(f->target_room[slot], targets, (size_t)(n * PC * PH) * sizeof(float));
        ps_batches_release(f->batches, slot);
        taken += n;
    }
    ck_assert_double_ge(waited, 0);
    return taken;
}

static int threads_now(void)
{
    int threads = 0;
    char line[256];
    FILE *file = fopen("/proc/self/status", "re");
    while (file != NULL && fgets(line, sizeof line, file) != NULL && sscanf(line, "Threads: %d", &threads) != 1) {
    }
    fclose(file);
    return threads;
}

START_TEST(prefetch_epochs)
{
    static struct prefetch_fixture f;
    const int threads = threads_now();
    ck_assert_int_gt(threads, 0);
    prefetch_open(&f);
    ck_assert_int_eq(threads_now(), threads); /* a checkpoint is looked at by a fork, before anything is read */
    int64_t windows = f.view.windows, n;
    ck_assert_int_eq(windows, 281); /* eight batches of 32 and one of 25 */
    int slot;
    double waited = 0;
    ck_assert_int_eq(ps_batches_next(f.batches, &slot, &n, &waited), PS_OK);
    ck_assert_int_eq(n, 0); /* nothing was started */
    for (uint64_t epoch = 0; epoch < 200; epoch++) {
        int32_t *index = malloc((size_t)windows * sizeof *index);
        ps_shuffle(1, epoch, 0, windows, index);
        /* Whole epochs, ones begun in the middle or ended early, and ones that are left after 0 to 3 batches. */
        int64_t begin = epoch % 3 == 2 ? 11 : 0, end = epoch % 5 == 4 ? 256 : windows;
        int batches = epoch % 4 == 3 ? (int)(epoch / 4 % 4) : 100;
        ps_batches_start(f.batches, NULL, index, begin, end);
        int64_t taken = check_epoch(&f, index, begin, end, batches);
        if (batches == 100) {
            ck_assert_int_eq(taken, end - begin);
            ck_assert_int_eq(ps_batches_next(f.batches, &slot, &n, &waited), PS_OK);
            ck_assert_int_eq(n, 0);
        }
        /* Once the next epoch has begun, this array is nobody's. */
        ps_batches_stop(f.batches);
        free(index);
    }
    ps_batches_close(f.batches);
    ps_batches_close(NULL);
}
END_TEST

START_TEST(prefetch_holds_buffers)
{
    static struct prefetch_fixture f;
    prefetch_open(&f);
    int32_t index[281];
    ps_sequence(0, 281, index);
    ps_batches_start(f.batches, NULL, index, 0, 281);
    int slot;
    int64_t n;
    double waited = 0;
    for (int b = 0; b < 2; b++) {
        ck_assert_int_eq(ps_batches_next(f.batches, &slot, &n, &waited), PS_OK);
        ck_assert_int_eq(slot, b);
    }
    ck_assert_int_eq(ps_batches_next(f.batches, &slot, &n, &waited), PS_UNSUPPORTED);
    check_message("buffer 0 must be released");
    /* Held across the start of another epoch: slot 0 keeps its contents until it is released. */
    static float kept[PB * PC * PL];
    memcpy(kept, f.input_room[0], sizeof kept);
    ps_batches_release(f.batches, 1);
    ps_shuffle(1, 0, 0, 281, index);
    ps_batches_start(f.batches, NULL, index, 0, 281);
    usleep(10000);
    ck_assert_mem_eq(kept, f.input_room[0], sizeof kept);
    ps_batches_release(f.batches, 0);
    ck_assert_int_eq(check_epoch(&f, index, 0, 281, 100), 281);
    /* Closed in the middle of an epoch. */
    ps_batches_start(f.batches, NULL, index, 0, 281);
    ps_batches_close(f.batches);

    struct ps_batches *none;
    float *const rooms[2] = {kept, kept};
    ck_assert_int_eq(ps_batches_open(&f.view, NULL, 0, rooms, rooms, &none), PS_USAGE);
    check_message("batch is 0");
    ck_assert_ptr_null(none);
}
END_TEST

/* ---- naive forecasts ---- */

START_TEST(naive_by_hand)
{
    float inputs[2][1][4] = {{{1, 2, 3, 4}}, {{0, 0, 0, 0}}}, targets[2][1][3] = {{{7, 1, 5}}, {{1, 1, 1}}};
    struct ps_series series = {.layout = PS_LAYOUT_WINDOWS,
                               .rows = 2,
                               .channels = 1,
                               .seq_len = 4,
                               .pred_len = 3,
                               .inputs = inputs[0][0],
                               .targets = targets[0][0]};
    struct ps_window_view view = ps_window_view_make(&series, 4, 3);
    /* Repeat-last: 4 4 4, errors 3 -3 1. Season 2: 3 4 3, errors 4 -3 2. The second window: errors 1 1 1 for both. */
    struct ps_naive naive = ps_naive_score(&view, 0, 1, 2);
    ck_assert_double_eq_tol(naive.repeat_mse, 19.0 / 3, 1e-15);
    ck_assert_double_eq_tol(naive.repeat_mae, 7.0 / 3, 1e-15);
    ck_assert_double_eq_tol(naive.seasonal_mse, 29.0 / 3, 1e-15);
    ck_assert_double_eq_tol(naive.seasonal_mae, 3, 1e-15);
    naive = ps_naive_score(&view, 0, 2, 2);
    ck_assert_double_eq_tol(naive.repeat_mse, 22.0 / 6, 1e-15);
    ck_assert_double_eq_tol(naive.repeat_mae, 10.0 / 6, 1e-15);
    ck_assert_double_eq_tol(naive.seasonal_mse, 32.0 / 6, 1e-15);
    ck_assert_double_eq_tol(naive.seasonal_mae, 2, 1e-15);
    /* A season of 4 is longer than the horizon: 1 2 3, errors 6 -1 2. */
    naive = ps_naive_score(&view, 0, 1, 4);
    ck_assert_double_eq_tol(naive.seasonal_mse, 41.0 / 3, 1e-14);
    for (int season = 0; season <= 5; season += 5) {
        naive = ps_naive_score(&view, 1, 1, season);
        ck_assert_double_eq_tol(naive.repeat_mse, 1, 1e-15);
        ck_assert(isnan(naive.seasonal_mse) && isnan(naive.seasonal_mae));
    }
}
END_TEST

/* On a series, by the definition. */
START_TEST(naive_series)
{
    enum { T = 300, C = 3, L = 20, H = 9, FIRST = 13, N = 150, SEASON = 6 };
    static float x[T * C];
    for (int i = 0; i < T * C; i++) {
        x[i] = sinf((float)(i * i));
    }
    struct ps_series series = memory_series(x, T, C);
    struct ps_window_view view = ps_window_view_make(&series, L, H);
    double sums[4] = {0};
    for (int w = FIRST; w < FIRST + N; w++) {
        for (int t = 0; t < H; t++) {
            for (int c = 0; c < C; c++) {
                double truth = x[(w + L + t) * C + c];
                double repeat = truth - x[(w + L - 1) * C + c], seasonal = truth - x[(w + L - SEASON + t % SEASON) * C + c];
                sums[0] += repeat * repeat / (N * C * H);
                sums[1] += fabs(repeat) / (N * C * H);
                sums[2] += seasonal * seasonal / (N * C * H);
                sums[3] += fabs(seasonal) / (N * C * H);
            }
        }
    }
    struct ps_naive naive = ps_naive_score(&view, FIRST, N, SEASON);
    ck_assert_double_eq_tol(naive.repeat_mse, sums[0], 1e-12);
    ck_assert_double_eq_tol(naive.repeat_mae, sums[1], 1e-12);
    ck_assert_double_eq_tol(naive.seasonal_mse, sums[2], 1e-12);
    ck_assert_double_eq_tol(naive.seasonal_mae, sums[3], 1e-12);
}
END_TEST

/* ---- import ---- */

/* Imports text; the file then read back. */
static struct ps_series *import_with(const char *text, const struct ps_import_options *options, struct ps_imported *imported)
{
    const char *csv = write_text("in.csv", text), *path = in_folder("out.h5");
    ck_assert_msg(ps_import_csv(csv, path, options, imported) == PS_OK, "%s", ps_error_message());
    return open_series(path);
}

static struct ps_series *import_text(const char *text, const char *time_column, struct ps_imported *imported)
{
    return import_with(text, &(struct ps_import_options){.time_column = time_column}, imported);
}

/* Unix seconds of /time in out.h5, at most n of them. */
static int read_times(int64_t *time, int n)
{
    hid_t file = H5Fopen(in_folder("out.h5"), H5F_ACC_RDONLY, H5P_DEFAULT);
    int count = 0;
    if (H5Lexists(file, "time", H5P_DEFAULT) > 0) {
        hid_t set = H5Dopen2(file, "time", H5P_DEFAULT), space = H5Dget_space(set);
        count = (int)H5Sget_simple_extent_npoints(space);
        ck_assert_int_le(count, n);
        ck_assert_int_ge(H5Dread(set, H5T_NATIVE_INT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, time), 0);
        H5Sclose(space);
        H5Dclose(set);
    }
    H5Fclose(file);
    return count;
}

START_TEST(import_good)
{
    struct ps_imported done;
    int64_t time[8];
    struct ps_series *s = import_text("date,HUFL,OT\n2016-07-01 00:00:00,5.827,30.5\n2016-07-01 01:00:00,-1e-3,+.5\n", NULL, &done);
    ck_assert_int_eq(done.rows, 2);
    ck_assert_int_eq(done.channels, 2);
    ck_assert_str_eq(done.period, "1h");
    ck_assert_str_eq(s->channel_names[0], "HUFL");
    ck_assert_str_eq(s->channel_names[1], "OT");
    ck_assert_mem_eq(s->values, ((float[]){5.827f, 30.5f, -1e-3f, 0.5f}), 4 * sizeof(float));
    ck_assert_int_eq(read_times(time, 8), 2);
    ck_assert_int_eq(time[0], 1467331200);
    ck_assert_int_eq(time[1], 1467334800);
    ps_series_close(s);

    /* Byte-order mark, CRLF, quotes, spaces, empty lines at the end, no end to the last line's text. */
    s = import_text("\xef\xbb\xbf\"when\",\"a, \"\"b\"\"\" , c\r\n\"2020/2/28 23:45\",\"1\", 2 \r\n2020/2/29 0:00,3,\"4\"\r\n"
                    "2020/02/29T00:15Z,5,6\r\n\r\n\n",
                    NULL, &done);
    ck_assert_str_eq(done.period, "15min");
    ck_assert_str_eq(s->channel_names[0], "a, \"b\"");
    ck_assert_str_eq(s->channel_names[1], "c");
    ck_assert_mem_eq(s->values, ((float[]){1, 2, 3, 4, 5, 6}), 6 * sizeof(float));
    ck_assert_int_eq(read_times(time, 8), 3);
    ck_assert_int_eq(time[0], 1582933500);
    ck_assert_int_eq(time[2], 1582935300);
    ps_series_close(s);

    /* The time column in the middle, by name; days; a leap day and a year's end. */
    s = import_text("a,day,b\n1,2019-12-31,2\n3,2020-01-01,4\n5,2020-01-02,6", "day", &done);
    ck_assert_str_eq(done.period, "1d");
    ck_assert_str_eq(s->channel_names[0], "a");
    ck_assert_str_eq(s->channel_names[1], "b");
    ck_assert_mem_eq(s->values, ((float[]){1, 2, 3, 4, 5, 6}), 6 * sizeof(float));
    ck_assert_int_eq(read_times(time, 8), 3);
    ck_assert_int_eq(time[0], 1577750400);
    ps_series_close(s);

    /* Wherever the times stand, names and values stay together. */
    static const char *const headers[] = {"when,a,b,c", "a,when,b,c", "a,b,when,c", "a,b,c,when"};
    static const char *const rows[] = {"2020-01-01,1,2,3", "1,2020-01-01,2,3", "1,2,2020-01-01,3", "1,2,3,2020-01-01"};
    for (int i = 0; i < 4; i++) {
        char text[64];
        snprintf(text, sizeof text, "%s\n%s\n", headers[i], rows[i]);
        s = import_text(text, "when", &done);
        ck_assert_int_eq(done.channels, 3);
        for (int c = 0; c < 3; c++) {
            ck_assert_str_eq(s->channel_names[c], ((const char *[]){"a", "b", "c"})[c]);
            ck_assert(s->values[c] == (float)(c + 1));
        }
        ps_series_close(s);
    }

    /* Of the centuries those that 400 divides are leap years. */
    const struct ps_import_options gaps = {.allow_gaps = 1};
    s = import_with("date,a\n1900-02-28,1\n1900-03-01,2\n2000-02-29,3\n2000-03-01,4\n2100-02-28,5\n2100-03-01,6\n", &gaps, &done);
    ck_assert_int_eq(read_times(time, 8), 6);
    ck_assert_int_eq(time[1] - time[0], 86400);
    ck_assert_int_eq(time[3] - time[2], 86400);
    ck_assert_int_eq(time[5] - time[4], 86400);
    ck_assert_int_eq(time[0], -2203977600);
    ck_assert_int_eq(time[5], 4107542400);
    ps_series_close(s);

    /* No times; columns that are named by their number; unequal steps; before 1970. */
    s = import_text("0,1\n7,8\n", NULL, &done);
    ck_assert_int_eq(done.channels, 2);
    ck_assert_str_eq(done.period, "");
    ck_assert_str_eq(s->channel_names[1], "1");
    ck_assert_int_eq(read_times(time, 8), 0);
    ps_series_close(s);
    s = import_with("date,0\n1969-12-31 23:59:59,1\n1970-01-01 00:00:00,2\n1970-01-01 00:00:10,3\n", &gaps, &done);
    ck_assert_str_eq(done.period, "1s");
    ck_assert_int_eq(done.gaps, 1);
    ck_assert_int_eq(read_times(time, 8), 3);
    ck_assert_int_eq(time[0], -1);
    ck_assert_int_eq(time[2], 10);
    ps_series_close(s);
    s = import_text("date,0\n2020-01-01 00:00:00,1\n2020-01-01 00:00:10,2\n", NULL, NULL);
    ps_series_close(s);
}
END_TEST

/* More rows than the first room, and a line longer than a small buffer. */
START_TEST(import_long)
{
    enum { T = 3000, C = 300 };
    char *text, *at;
    ck_assert_ptr_nonnull(text = malloc((size_t)T * C * 8));
    at = text;
    for (int t = -1; t < T; t++) {
        for (int c = 0; c < C; c++) {
            at += sprintf(at, t < 0 ? "c%d%s" : "%d%s", t < 0 ? c : (t * C + c) % 10007, c == C - 1 ? "\n" : ",");
        }
    }
    struct ps_imported done;
    struct ps_series *s = import_text(text, NULL, &done);
    free(text);
    ck_assert_int_eq(done.rows, T);
    ck_assert_int_eq(done.channels, C);
    for (int i = 0; i < T * C; i++) {
        ck_assert(s->values[i] == (float)(i % 10007));
    }
    ps_series_close(s);
}
END_TEST

/* Every form of time, and what it is in Unix seconds. */
START_TEST(import_times)
{
    static const struct {
        const char *text, *format;
        int64_t seconds;
    } cases[] = {
        {"2022-01-31", NULL, 1643587200},
        {"01.02.2022 23:30", NULL, 1643758200},
        {"1.2.2022", NULL, 1643673600},
        {"31.12.1969 23:59:59", NULL, -1},
        {"2022-02-01T23:30:15.000", NULL, 1643758215},
        {"2022-02-01 23:30:15.0Z", NULL, 1643758215},
        {"2022-02-01T23:30+01:00", NULL, 1643754600},
        {"2022-02-01 23:30:15+0100", NULL, 1643754615},
        {"2022-02-01T23:30:15.000-05:30", NULL, 1643778015},
        {"2022-02-01 23:30:15+00", NULL, 1643758215},
        {"1643758215", NULL, 1643758215},
        {"1643758215.0", NULL, 1643758215},
        {"1643758215000", NULL, 1643758215},
        {"1643758215000000000", NULL, 1643758215},
        {"1/31/2022 11:05 PM", "%m/%d/%Y %I:%M %p", 1643670300},
        {"1/31/2022 12:05:09 am", "%m/%d/%Y %H:%M:%S %p", 1643587509},
        {"1/31/2022 12:05  PM", "%m/%d/%Y %H:%M %p", 1643630700},
        {"31/1/22", "%d/%m/%y", 1643587200},
        {"31/1/69", "%d/%m/%y", -28944000},
        {"1/1/68", "%d/%m/%y", 3092601600},
        {"20220131T2330", "%Y%m%dT%H%M", 1643671800},
        {"2022-01", "%Y-%m", 1640995200},
        {"2022", "%Y", 1640995200},
        {"31-JAN-2022 01:00 +01:00", "%d-%b-%Y %H:%M %z", 1643587200},
        {"May 1 2022", "%b %d %Y", 1651363200},
        {"September 1 2022", "%b %d %Y", 1661990400},
        {"100%2022", "100%%%Y", 1640995200},
        {"-1", "%s", -1},
        {"0001-01-01 01:00+01:00", NULL, -62135596800},
        {"31.12.9999 22:59:59-01:00", NULL, 253402300799},
        {"-62135596800", "%s", -62135596800},
        {"253402300799", "%s", 253402300799},
        {"2022013100", "%s", 2022013100},
        {"2022013123", "%Y%m%d%H", 1643670000},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[128];
        int64_t time = 0;
        snprintf(text, sizeof text, "a,t\n1,%s\n", cases[i].text);
        struct ps_import_options options = {.time_column = "t", .time_format = cases[i].format};
        ps_series_close(import_with(text, &options, NULL));
        ck_assert_int_eq(read_times(&time, 1), 1);
        ck_assert_msg(time == cases[i].seconds, "%s: %" PRId64 ", not %" PRId64, cases[i].text, time, cases[i].seconds);
    }
    /* With a format the first column is that of the times. */
    struct ps_imported done;
    ps_series_close(import_with("d,a\n1/31/2022,1\n2/1/2022,2\n", &(struct ps_import_options){.time_format = "%m/%d/%Y"}, &done));
    ck_assert_int_eq(done.channels, 1);
    ck_assert_str_eq(done.period, "1d");

    static const struct {
        const char *text, *format, *message;
    } wrong[] = {
        {"1/31/2022", NULL, "in.csv:2: column 2 (t): \"1/31/2022\" is not a date such as 2016-07-01 00:00:00|--time-format"},
        {"31/01/2022", NULL, "is not a date such as|01.07.2016 00:00 (day first)|--time-format reads another form"},
        {"20220131", NULL, "is not a date such as|--time-format reads another form, such as %Y%m%d"},
        {"2022013123", NULL, "is not a date such as|such as %Y%m%d%H"},
        {"99999999", NULL, "\"99999999\" is not a date such as|nor Unix time"},
        {"4200000001", NULL, "is not a date"},
        {"2022-01-31 10:00:00.5", NULL, "is not a date|whole seconds"},
        {"2022-01-31 10:00:00.", NULL, "is not a date"},
        {"2022-01-31 10:00+1", NULL, "is not a date"},
        {"2022-01-31 10:00+24:00", NULL, "is not a date"},
        {"2022-01-31 10:00+01:60", NULL, "is not a date"},
        {"2022-01-31 10:00+01:00Z", NULL, "is not a date"},
        {"2022-01-31 10:00+01:", NULL, "is not a date"},
        {"2022-01-31+01:00", NULL, "is not a date"},
        {"01.02.22", NULL, "is not a date"},
        {"01.13.2022", NULL, "is not a date"},
        {"2022.01.02", NULL, "is not a date"},
        {"01-02-2022", NULL, "is not a date"},
        {"0000-12-31", NULL, "is not a date"},
        {"0001-01-01 00:59:59+01:00", NULL, "is not a date"},
        {"31.12.9999 23:00-01:00", NULL, "is not a date"},
        {"1643758215500", NULL, "\"1643758215500\" lies within a second"},
        {"2022-01-31", "%m/%d/%Y", "\"2022-01-31\" is not a time of the form \"%m/%d/%Y\" that --time-format says"},
        {"1/31/2022 0:05 PM", "%m/%d/%Y %H:%M %p", "is not a time of the form"},
        {"1/31/2022 13:05 PM", "%m/%d/%Y %H:%M %p", "is not a time of the form"},
        {"1/31/2022 x", "%m/%d/%Y", "is not a time of the form"},
        {"2/29/2022", "%m/%d/%Y", "is not a time of the form"},
        {"1/31/22", "%m/%d/%Y", "is not a time of the form"},
        {"1/31/", "%m/%d/%y", "is not a time of the form"},
        {"31 Jen 2022", "%d %b %Y", "is not a time of the form"},
        {"31 Dec 0000", "%d %b %Y", "is not a time of the form"},
        {"-62135596801", "%s", "is not a time of the form"},
        {"253402300800", "%s", "is not a time of the form"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char text[128];
        snprintf(text, sizeof text, "a,t\n1,%s\n", wrong[i].text);
        struct ps_import_options options = {.time_column = "t", .time_format = wrong[i].format};
        enum ps_status status = ps_import_csv(write_text("in.csv", text), in_folder("wrong.h5"), &options, NULL);
        ck_assert_msg(status == PS_DATA, "%s was accepted", wrong[i].text);
        check_message(wrong[i].message);
    }
    static const char *const formats[][2] = {{"%m/%d", "--time-format is \"%m/%d\": it names no year"},
                                             {"%Y-%j", "--time-format is \"%Y-%j\": \"%j\" is unknown: expected %Y %y %m"},
                                             {"%Y%", "\"%\" is unknown"},
                                             {"%%Y", "names no year"}};
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        struct ps_import_options options = {.time_format = formats[i][0]};
        ck_assert_int_eq(ps_import_csv(write_text("in.csv", "a\n1\n"), in_folder("wrong.h5"), &options, NULL), PS_USAGE);
        check_message(formats[i][1]);
    }
}
END_TEST

/* Whether out.h5 says a frequency. */
static int has_frequency(void)
{
    hid_t file = H5Fopen(in_folder("out.h5"), H5F_ACC_RDONLY, H5P_DEFAULT);
    int found = H5Aexists_by_name(file, "series", "frequency", H5P_DEFAULT) > 0;
    H5Fclose(file);
    return found;
}

/* A CSV of these dates, with a comma between them. */
static const char *of_dates(const char *dates)
{
    static char text[1024];
    size_t n = (size_t)snprintf(text, sizeof text, "date,a\n");
    for (const char *at = dates; *at != '\0'; at += strspn(at, ",")) {
        size_t length = strcspn(at, ",");
        n += (size_t)snprintf(text + n, sizeof text - n, "%.*s,1\n", (int)length, at);
        at += length;
    }
    return text;
}

START_TEST(import_steps)
{
    static const struct {
        const char *dates, *period;
    } regular[] = {
        {"2020-01-01,2020-02-01", "1mo"},
        {"2020-01-31,2020-02-29,2020-03-31,2020-04-30", "1mo"},
        {"2019-12-15 06:00,2020-01-15 06:00,2020-02-15 06:00,2020-03-15 06:00", "1mo"},
        {"2020-01-30,2020-02-29,2020-03-30", "1mo"},
        {"2021-02-28,2021-03-28,2021-04-28", "1mo"},
        {"2019-10-01,2020-01-01,2020-04-01,2020-07-01", "3mo"},
        {"2019-09-30,2019-12-31,2020-03-31,2020-06-30", "3mo"},
        {"1899-01-01,1900-01-01,1901-01-01,1902-01-01,1903-01-01,1904-01-01,1905-01-01", "1y"},
        {"2020-02-29,2021-02-28,2022-02-28", "1y"},
        {"2000-01-01,2010-01-01", "10y"},
        {"2020-01-01,2020-01-29,2020-02-26", "28d"},
        {"2020-01-01,2020-01-31,2020-03-01,2020-03-31", "30d"},
        {"2020-01-06,2020-01-13,2020-01-20", "7d"},
        {"2020-01-01 00:00:00,2020-01-01 00:01:30", "90s"},
    };
    static const struct {
        const char *dates, *message, *period;
        int gaps;
    } irregular[] = {
        {"2020-01-01 00:00,2020-01-01 01:00,2020-01-01 02:00,2020-01-01 05:00,2020-01-01 06:00,2020-01-01 08:00",
         "in.csv:5: column 1 (date): 2020-01-01 05:00:00 is 3h after 2020-01-01 02:00:00 on the line before|3 of 5 steps are 1h|2 "
         "rows are "
         "missing there: put them in|--allow-gaps",
         "1h", 2},
        /* The first step is not the common one. */
        {"2020-01-01,2020-01-03,2020-01-04,2020-01-05",
         "in.csv:3:|2020-01-03 00:00:00 is 2d after|2 of 3 steps are 1d|1 row is missing", "1d", 1},
        {"2020-01-01,2020-01-02,2020-01-03,2020-01-04,2020-01-04 12:00,2020-01-05",
         "in.csv:6:|is 12h after|3 of 5 steps are 1d: make the steps equal", "1d", 2},
        {"2020-01-01,2020-02-01,2020-04-01,2020-05-01",
         "in.csv:4:|2020-04-01 00:00:00 is 60d after 2020-02-01|2 of 3 steps are 1mo: 1 row is missing", "1mo", 1},
        {"2020-01-01,2020-02-01,2020-03-02,2020-04-01,2020-05-01,2020-06-01", "in.csv:4:|3 of 5 steps are 1mo: make", "1mo", 2},
        {"2020-01-31,2020-02-28,2020-03-31,2020-04-30,2020-05-31", "in.csv:3:|2 of 4 steps are 1mo: make", "1mo", 2},
        {"2018-01-01,2019-01-01,2020-01-01,2022-01-01", "in.csv:5:|is 731d after|2 of 3 steps are 1y: 1 row is missing", "1y", 1},
        {"2020-01-01,2020-02-01 00:00:01,2020-03-01,2020-04-01", "in.csv:3:|1 of 3 steps are 1mo", "1mo", 2},
    };
    struct ps_imported done;
    int64_t time[16];
    for (size_t i = 0; i < sizeof regular / sizeof *regular; i++) {
        ps_series_close(import_text(of_dates(regular[i].dates), NULL, &done));
        ck_assert_msg(strcmp(done.period, regular[i].period) == 0, "%s: %s", regular[i].dates, done.period);
        ck_assert_int_eq(done.gaps, 0);
        ck_assert(has_frequency());
    }
    for (size_t i = 0; i < sizeof irregular / sizeof *irregular; i++) {
        const char *csv = write_text("in.csv", of_dates(irregular[i].dates));
        ck_assert_int_eq(ps_import_csv(csv, in_folder("wrong.h5"), NULL, NULL), PS_DATA);
        check_message(irregular[i].message);
        ck_assert(!exists(in_folder("wrong.h5")));
        ps_series_close(import_with(of_dates(irregular[i].dates), &(struct ps_import_options){.allow_gaps = 1}, &done));
        ck_assert_str_eq(done.period, irregular[i].period);
        ck_assert_int_eq(done.gaps, irregular[i].gaps);
        ck_assert_int_eq(read_times(time, 16), done.rows);
        ck_assert(!has_frequency());
    }
    /* Twice or back are no gaps. */
    for (int i = 0; i < 2; i++) {
        const char *csv = write_text("in.csv", of_dates(i == 0 ? "2020-01-01,2020-01-01" : "2020-01-02,2020-01-01"));
        struct ps_import_options options = {.allow_gaps = 1};
        ck_assert_int_eq(ps_import_csv(csv, in_folder("wrong.h5"), &options, NULL), PS_DATA);
        check_message("in.csv:3: column 1 (date): \"2020-01-01\" is not later than");
    }
}
END_TEST

START_TEST(import_missing)
{
    static const char text[] = "a,d,b,c\n"
                               "1,2020-01-01 00:00,,1\n"
                               "NA,2020-01-01 01:00,n/a,2\n"
                               "NaN,2020-01-01 02:00,4,3\n"
                               "5,2020-01-01 03:00,null,4\n"
                               "?,2020-01-01 07:00,6,5\n"
                               "nan,2020-01-01 08:00,None,6\n"
                               "8,2020-01-01 09:00,\"\",7\n";
    struct ps_import_options options = {.time_column = "d", .allow_gaps = 1, .fill = PS_FILL_PREVIOUS};
    struct ps_imported done;
    struct ps_series *s = import_with(text, &options, &done);
    ck_assert_mem_eq(s->values, ((float[]){1, 4, 1, 1, 4, 2, 1, 4, 3, 5, 4, 4, 5, 6, 5, 5, 6, 6, 8, 6, 7}), 21 * sizeof(float));
    ck_assert_int_eq(done.filled, 9);
    ck_assert_int_eq(done.filled_channels, 2);
    ps_series_close(s);
    options.fill = PS_FILL_LINEAR; /* by the times, not the rows */
    s = import_with(text, &options, &done);
    const float linear[] = {1, 4, 1, 1 + 4 / 3.f, 4, 2, 1 + 8 / 3.f, 4, 3, 5, 4.4f, 4, 7, 6, 5, 7.5f, 6, 6, 8, 6, 7};
    for (int i = 0; i < 21; i++) {
        ck_assert_msg(fabsf(s->values[i] - linear[i]) < 1e-6f, "%d: %g, not %g", i, s->values[i], linear[i]);
    }
    ck_assert_int_eq(done.filled, 9);
    ps_series_close(s);
    s = import_with("a\n1\n\"\"\n?\n7\n", &(struct ps_import_options){.fill = PS_FILL_LINEAR}, NULL);
    ck_assert_mem_eq(s->values, ((float[]){1, 3, 5, 7}), 4 * sizeof(float));
    ps_series_close(s);
    ck_assert_int_eq(
        ps_import_csv(write_text("in.csv", "a,d,b\n1,2020-01-01,\n2,2020-01-02,NA\n"), in_folder("wrong.h5"), &options, NULL),
        PS_DATA);
    check_message("in.csv: column 3 (b) holds no value in any row: remove it");
}
END_TEST

START_TEST(import_delimiters)
{
    static const struct {
        const char *text, *cut_at;
        char delimiter;
        int decimal_comma;
    } cases[] = {
        {"date;a;b, c\n2020-01-01;1.5;-2\n2020-01-02; ;4\n", "semicolons", 0, 0},
        {"date\ta\tb, c\n2020-01-01\t 1.5\t-2 \n2020-01-02\t\t4\n", "tabs", 0, 0},
        {"date|a|\"b, c\"\n2020-01-01|1.5|\"-2\"\n2020-01-02||4\n", "bars", 0, 0},
        {"date,a,\"b, c\"\n2020-01-01\t,1.5,-2\t\n2020-01-02,\t,4\n", "commas", 0, 0},
        {"date;a;b, c\n2020-01-01;1,5;-2\n2020-01-02;;4\n", "semicolons", 0, 1},
        {"date;a;b, c\n2020-01-01;\"1,5\";-2,0\n2020-01-02;;4e0\n", "semicolons", ';', 1},
        {"date,a,\"b, c\"\n2020-01-01,\"1,5\",\"-2,\"\n2020-01-02,,4\n", "commas", ',', 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct ps_import_options options = {
            .delimiter = cases[i].delimiter, .decimal_comma = cases[i].decimal_comma, .fill = PS_FILL_PREVIOUS};
        struct ps_imported done;
        struct ps_series *s = import_with(cases[i].text, &options, &done);
        ck_assert_str_eq(done.cut_at, cases[i].cut_at);
        ck_assert_int_eq(done.channels, 2);
        ck_assert_str_eq(s->channel_names[1], "b, c");
        ck_assert_mem_eq(s->values, ((float[]){1.5f, -2, 1.5f, 4}), 4 * sizeof(float));
        ps_series_close(s);
    }
    /* As many of one as of the other: the comma. What is asked for goes before what the header has. */
    struct ps_imported done;
    ps_series_close(import_text("a,b;c,\";;\"\n1,2,3\n", NULL, &done));
    ck_assert_str_eq(done.cut_at, "commas");
    struct ps_series *s = import_with("a;b|c;d\n1|2\n", &(struct ps_import_options){.delimiter = '|'}, &done);
    ck_assert_str_eq(s->channel_names[0], "a;b");
    ck_assert_int_eq(done.channels, 2);
    ps_series_close(s);
    static const char *const points[] = {"a;b\n1;2.5\n", "a;b\n1;1.000,5\n", "a;b\n1;1,000,5\n", "a;b\n1;x\n"};
    for (size_t i = 0; i < sizeof points / sizeof *points; i++) {
        struct ps_import_options options = {.decimal_comma = 1};
        ck_assert_int_eq(ps_import_csv(write_text("in.csv", points[i]), in_folder("wrong.h5"), &options, NULL), PS_DATA);
        check_message("in.csv:2: column 2 (b)|is not a number, written with a decimal comma as --decimal-comma says");
    }
}
END_TEST

/* Many series in one file are told from one whose rows are at fault. */
START_TEST(import_panel)
{
    static const struct {
        const char *text, *time_column, *message;
        int panel;
    } cases[] = {
        /* Series by series. */
        {"id,date,y\nA,2020-01-01,1\nA,2020-01-02,2\nB,2020-01-01,3\nB,2020-01-02,4\n", NULL,
         "in.csv:2: column 1 (id): \"A\" is not a number", 1},
        {"date,id,y\n2020-01-01,A,1\n2020-01-02,A,2\n2020-01-01,B,3\n2020-01-02,B,4\n", NULL,
         "in.csv:2: column 2 (id): \"A\" is not a number", 1},
        {"id,date,y\nA,2020-01-01,1\nA,2020-01-02,2\nB,2020-01-01,3\nB,2020-01-02,4\n", "date",
         "in.csv:2: column 1 (id): \"A\" is not a number", 1},
        {"id,t,y\nA,1643758200,1\nA,1643758260,2\nB,1643758200,3\n", "t", "in.csv:2: column 1 (id): \"A\"", 1},
        {"id;date;y\nA-1;2020-01-01;1,5\nA-1;2020-01-02;2\nB-1;2020-01-01;3\n", NULL, "in.csv:2: column 1 (id): \"A-1\"", 1},
        {"date,store,y\n2020-01-01,1,1\n2020-01-02,1,2\n2020-01-01,2,3\n2020-01-02,2,4\n", NULL,
         "in.csv:4: column 1 (date): \"2020-01-01\" is not later than \"2020-01-02\" on the line before, where column 2 (store) "
         "changes",
         1},
        {"store,y,item,date\n1,5,7,2020-01-01\n1,6,7,2020-01-02\n1,7,8,2020-01-01\n", "date",
         "in.csv:4: column 4 (date): \"2020-01-01\" is not later than|where column 3 (item) changes", 1},
        /* Time by time. */
        {"date,id,y\n2020-01-01,A,1\n2020-01-01,B,2\n2020-01-02,A,3\n2020-01-02,B,4\n", NULL,
         "in.csv:2: column 2 (id): \"A\" is not a number", 1},
        {"date,store,y\n2020-01-01,1,1.5\n2020-01-01,2,2.5\n2020-01-02,1,3\n2020-01-02,2,4\n", NULL,
         "in.csv:3: column 1 (date): \"2020-01-01\" is not later than \"2020-01-01\" on the line before, where column 2 (store) "
         "changes",
         1},
        /* Text whose times are in order, text that never comes again, times at fault beside numbers. */
        {"date,sky,y\n2020-01-01,sun,1\n2020-01-02,sun,2\n2020-01-03,rain,3\n", NULL,
         "in.csv:2: column 2 (sky): \"sun\" is not a number", 0},
        {"date,note,y\n2020-01-01,p,1\n2020-01-01,q,2\n2020-01-01,r,2\n", NULL, "in.csv:2: column 2 (note): \"p\" is not a number",
         0},
        {"date,a,y\n2020-01-01,1,1\n2020-01-02,A,2\n2020-01-01,B,3\n2020-01-02,B,4\n", NULL, "in.csv:3: column 2 (a): \"A\"", 0},
        {"id,a\nA,1\nA,2\nB,1\n", NULL, "in.csv:2: column 1 (id): \"A\" is not a number", 0},
        {"date,a\n2020-01-01,1.5\n2020-01-02,1.5\n2020-01-02,2.5\n", NULL,
         "in.csv:4: column 1 (date)|: sort the rows, oldest first", 0},
        {"date,a\n2020-01-01,1\n2020-01-02,2\n2020-01-01,3\n", NULL, "in.csv:4: column 1 (date)|: sort the rows, oldest first", 0},
        {"date,a\n2020-01-03,1\n2020-01-02,2\n2020-01-01,1\n", NULL, "in.csv:3: column 1 (date)|: sort the rows, oldest first", 0},
        {"date,a\n2020-01-01,1\n2020-01-01,2\n2020-01-02,3\n", NULL, "in.csv:3: column 1 (date)|: sort the rows, oldest first", 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct ps_import_options options = {.time_column = cases[i].time_column};
        ck_assert_int_eq(ps_import_csv(write_text("in.csv", cases[i].text), in_folder("wrong.h5"), &options, NULL), PS_DATA);
        check_message(cases[i].message);
        int told = strstr(ps_error_message(), ": this looks like a panel of series (many series in one file") != NULL;
        ck_assert_msg(told == cases[i].panel, "%s", ps_error_message());
    }
}
END_TEST

/* Times that became a channel are told. */
START_TEST(import_warns_of_times)
{
    static const char *const rising[][2] = {
        {"1643758200,1\n1643761800,1\n1643772600,1",
         "in.csv: column 1 (ts) rises as times do|--time-column ts reads it as Unix seconds"},
        {"1643758200500,1\n1643758200900,1\n", "--time-column ts reads it as Unix"},
        {"1643758200.0,1\n1643758260.0,1\n", "--time-column ts reads it as Unix"},
        {"20220131,1\n20220201,1\n", "column 1 (ts) rises|--time-format %Y%m%d reads it"},
    };
    static const char *const others[] = {"1643758200,1\n",
                                         "1643758200,1\n1643758200,1\n",
                                         "1643758260,1\n1643758200,1\n",
                                         "1643758200,1\n1643758260.5,1\n",
                                         "1,1643758200\n2,1643758260\n",
                                         "10000000,1\n10000001,1\n",
                                         "2022-01-01,1643758200\n2022-01-02,1643758260\n",
                                         "20221331,1\n20221332,1\n"};
    struct ps_imported done;
    char text[128];
    for (size_t i = 0; i < sizeof rising / sizeof *rising; i++) {
        snprintf(text, sizeof text, "ts,a\n%s", rising[i][0]);
        ps_series_close(import_text(text, NULL, &done));
        ck_assert_int_eq(done.channels, 2);
        ck_assert_int_eq(read_times(NULL, 0), 0);
        check_parts(done.warning, rising[i][1]);
    }
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        snprintf(text, sizeof text, "ts,a\n%s", others[i]);
        ps_series_close(import_text(text, NULL, &done));
        ck_assert_msg(done.warning[0] == '\0', "case %zu: %s", i, done.warning);
    }
    ps_series_close(import_text("ts,a\n1643758200,1\n1643761800,1\n", "ts", &done));
    ck_assert_int_eq(done.channels, 1);
    ck_assert_str_eq(done.period, "1h");
    ck_assert_str_eq(done.warning, "");
}
END_TEST

START_TEST(import_bad)
{
    static const struct {
        const char *text, *time_column, *message;
    } cases[] = {
        {"", NULL, "in.csv: is empty"},
        {"a,b\n", NULL, "in.csv: has a header and no rows"},
        {"date,a\n2020-01-01,1\n2020-01-02,x1\n", NULL, "in.csv:3: column 2 (a): \"x1\" is not a number"},
        {"a,b\n1,2\n3,4 5\n", NULL, "in.csv:3: column 2 (b): \"4 5\" is not a number"},
        {"a\n0x10\n", NULL, "in.csv:2: column 1 (a): \"0x10\" is not a number"},
        {"a\n1,5\n", NULL, "in.csv:2: has 2 fields, and the header has 1"},
        {"a\n1;5\n", NULL, "in.csv:2: column 1 (a): \"1;5\" is not a number: fields are cut at commas|--delimiter"},
        {"a;b\n1;5;6\n", NULL, "in.csv:2: has 3 fields, and the header has 2|cut at semicolons, and at others with --delimiter"},
        {"a,x;y;z\n1,5\n", NULL, "in.csv:2: has 1 fields, and the header has 3|cut at semicolons"},
        {"a;b\n1;-2,5\n", NULL, "in.csv:2: column 2 (b): \"-2,5\" is not a number|decimal comma|cut at semicolons|--decimal-comma"},
        {"a;b\n1;x,5\n", NULL, "in.csv:2: column 2 (b): \"x,5\" is not a number: fields are cut at semicolons"},
        {"a;b\n1;2,500,000\n", NULL, "in.csv:2: column 2 (b): \"2,500,000\" is not a number: fields are cut at semicolons"},
        {"a,b\n1,\n", NULL,
         "in.csv:2: column 2 (b): \"\" is a missing value, the first of 1 in 1 columns|--fill previous or --fill linear"},
        {"a,b\n1,2\n3\n", NULL, "in.csv:3: has 1 fields, and the header has 2 (from \"a\" to \"b\")"},
        {"a,b\n1,2\n3,4,5\n", NULL, "in.csv:3: has 3 fields, and the header has 2"},
        {"a,b\n1,2\nnan,4\n", NULL, "in.csv:3: column 1 (a): \"nan\" is a missing value"},
        {"a,b\n1,2\n-nan,4\n", NULL, "in.csv:3: column 1 (a): \"-nan\" is not finite"},
        {"date,a\n2020-01-01,1\nNA,2\n", NULL, "in.csv:3: column 1 (date): \"NA\" is not a date"},
        {"a,d,b\n1,2020-01-01,2\n3,2020-01-02,NA\n,2020-01-03,NULL\n4,2020-01-04,6\n", "d",
         "in.csv:3: column 3 (b): \"NA\" is a missing value, the first of 3 in 2 columns"},
        {"a,b\n1,-inf\n", NULL, "in.csv:2: column 2 (b): \"-inf\" is not finite"},
        {"a,b\n1,1e39\n", NULL, "in.csv:2: column 2 (b): \"1e39\" is not finite in float32"},
        {"a,b\n1,\"2\n", NULL, "in.csv:2: column 2: the quote is not closed on this line"},
        {"a,b\n1,\"2\"3\n", NULL, "in.csv:2: column 2: text after the closing quote"},
        {"a\n1\n\n2\n", NULL, "in.csv:3: empty line inside the data"},
        {"1.5,2.5\n3,4\n", NULL, "in.csv:1: the first line must name the columns|\"1.5\""},
        {"2020-01-01,2\n2020-01-02,4\n", NULL, "in.csv:1: the first line must name the columns"},
        {",a\n0,4\n", NULL, "in.csv:1: column 1 has no name"},
        {"date\n2020-01-01\n", NULL, "in.csv: has a time column and no channel"},
        {"date,a\n2020-01-01,1\n2020-13-01,2\n", NULL, "in.csv:3: column 1 (date): \"2020-13-01\" is not a date such as"},
        {"date,a\n2020-01-01,1\n2021-02-29,2\n", NULL, "in.csv:3: column 1 (date): \"2021-02-29\" is not a date"},
        {"date,a\n1900-02-28,0\n1900-02-29,1\n", NULL, "in.csv:3: column 1 (date): \"1900-02-29\" is not a date"},
        {"date,a\n2100-02-28,0\n2100-02-29,1\n", NULL, "in.csv:3: column 1 (date): \"2100-02-29\" is not a date"},
        {"date,a\n2020-01-01,1\n2020-01-02 24:00,2\n", NULL, "in.csv:3: column 1 (date)"},
        {"date,a\n2020-01-01,1\n2020-01/02,2\n", NULL, "in.csv:3: column 1 (date)"},
        {"date,a\n2020-01-01,1\n2020-01-02 10,2\n", NULL, "in.csv:3: column 1 (date)"},
        /* Out of order or twice, anywhere: first and last alone may well be in order. */
        {"date,a\n2020-01-02,1\n2020-01-01,2\n", NULL,
         "in.csv:3: column 1 (date): \"2020-01-01\" is not later than \"2020-01-02\" on the line before|oldest first"},
        {"date,a\n2020-01-01,1\n2020-01-03,2\n2020-01-02,3\n2020-01-04,4\n", NULL,
         "in.csv:4: column 1 (date): \"2020-01-02\" is not later than \"2020-01-03\" on the line before"},
        {"date,a\n2020-01-01,1\n2020-01-02,2\n2020-01-02,3\n2020-01-04,4\n", NULL,
         "in.csv:4: column 1 (date): \"2020-01-02\" is not later than \"2020-01-02\" on the line before|each time once"},
        {"date,a\n2020-01-01,1\n2020-01-01T00:00:00Z,2\n", NULL,
         "in.csv:3: column 1 (date): \"2020-01-01T00:00:00Z\" is not later than \"2020-01-01\""},
        {"a,when\n1,2020-01-01 00:00:10\n2,2020-01-01 00:00:09\n", "when",
         "in.csv:3: column 2 (when): \"2020-01-01 00:00:09\" is not later than \"2020-01-01 00:00:10\""},
        {"date,a\n1,2\n", "when", "in.csv:1: no column is named \"when\": the first is \"date\", the last \"a\""},
        {"date,a\n1,2\n", "date", "in.csv:2: column 1 (date): \"1\" is not a date"},
        {"date,a\n1/31/2022,2\n", NULL,
         "in.csv:2: column 1 (date): \"1/31/2022\" is not a number, nor a date such as 2016-07-01 00:00:00|--time-format"},
        {"date,a\n31-Jan-2022,2\n", NULL, "in.csv:2: column 1 (date): \"31-Jan-2022\" is not a number, nor a date|--time-format"},
        {"date,a\nJan-22,2\n", NULL, "in.csv:2: column 1 (date): \"Jan-22\" is not a number, nor a date|--time-format"},
        {"a,b\n1,H-1\n", NULL, "in.csv:2: column 2 (b): \"H-1\" is not a number"},
        {"a,when\n1,2022-01-31\n", NULL, "in.csv:2: column 2 (when): \"2022-01-31\" is not a number, but a date: --time-column"},
        {"date,a\n\x01\x02,2\n", NULL, "in.csv:2: column 1 (date): \"?\?\" is not a number"},
        {"a\n1234567890123456789012345678901234567890123456789012345678901234567890x\n", NULL,
         "in.csv:2: column 1 (a): \"123456789012345678901234567890123456789012345678901234567890...\" is not a number"},
    };
    char out[512];
    snprintf(out, sizeof out, "%s", write_text("out.h5", "kept"));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *csv = write_text("in.csv", cases[i].text);
        struct ps_import_options options = {.time_column = cases[i].time_column};
        ck_assert_msg(ps_import_csv(csv, out, &options, NULL) == PS_DATA, "case %zu was accepted", i);
        check_message(cases[i].message);
    }
    ck_assert_int_eq(ps_import_csv(write_file("in.csv", "a\n1\0\n2\n", 8), out, NULL, NULL), PS_DATA);
    check_message("in.csv:2: holds a zero byte");
    ck_assert_int_eq(ps_import_csv(in_folder("none.csv"), out, NULL, NULL), PS_DATA);
    check_message("none.csv: cannot be opened: No such file");
    char *commas = malloc(1 << 20);
    memset(commas, ',', 1 << 20);
    ck_assert_int_eq(ps_import_csv(write_file("wide.csv", commas, 1 << 20), out, NULL, NULL), PS_DATA);
    check_message("wide.csv:1: more than 1048576 columns");
    free(commas);
    /* A line of 64 MiB is the longest. */
    size_t longest = (size_t)64 << 20;
    char *spaces = malloc(longest + 4);
    memset(spaces, ' ', longest + 4);
    memcpy(spaces, "a\n", 2);
    memcpy(spaces + 2 + longest - 1, "1\n", 2);
    ck_assert_msg(ps_import_csv(write_file("long.csv", spaces, longest + 3), in_folder("long.h5"), NULL, NULL) == PS_OK, "%s",
                  ps_error_message());
    memcpy(spaces + 2 + longest - 1, " 1\n", 3);
    ck_assert_int_eq(ps_import_csv(write_file("long.csv", spaces, longest + 4), out, NULL, NULL), PS_DATA);
    check_message("long.csv:2: a line of more than 64 MiB");
    free(spaces);
    ck_assert_int_eq(ps_import_csv("/dev/zero", out, NULL, NULL), PS_DATA); /* without an end, or lines */
    check_message("/dev/zero:1: a line of more than 64 MiB");
    /* Nothing was written over and nothing is left beside. */
    size_t size;
    char *bytes = read_bytes(out, &size);
    ck_assert_uint_eq(size, 4);
    ck_assert_mem_eq(bytes, "kept", 4);
    free(bytes);
    ck_assert(!exists(in_folder("out.h5.partial")));
}
END_TEST

/* ---- generated series ---- */

START_TEST(sample_bits)
{
    /* The same bits on every machine, so these are known. */
    ck_assert_int_eq(ps_sample_series(in_folder("s.h5"), 3000, 7, 1), PS_OK);
    ck_assert_uint_eq(fingerprint_of(in_folder("s.h5")), 1790117536088922551u);
    ck_assert_int_eq(ps_sample_series(in_folder("t.h5"), 3000, 7, 2), PS_OK);
    ck_assert_uint_ne(fingerprint_of(in_folder("t.h5")), fingerprint_of(in_folder("s.h5")));

    /* A shorter one with fewer channels is a part of it, and windows are cut from it. */
    ck_assert_int_eq(ps_sample_windows(in_folder("w.h5"), 600, 3, 24, 5, 1), PS_OK);
    struct ps_series *s = open_series(in_folder("s.h5")), *w = open_series(in_folder("w.h5"));
    ck_assert_int_eq(w->rows, 600);
    ck_assert_int_eq(w->seq_len, 24);
    ck_assert_int_eq(w->pred_len, 5);
    ck_assert_str_eq(w->channel_names[2], "channel_3");
    for (int64_t i = 0; i < 600; i++) {
        for (int64_t c = 0; c < 3; c++) {
            for (int64_t l = 0; l < 29; l++) {
                float value = l < 24 ? w->inputs[(i * 3 + c) * 24 + l] : w->targets[(i * 3 + c) * 5 + l - 24];
                ck_assert(value == s->values[(i + l) * 7 + c]);
            }
        }
    }
    ps_series_close(s);
    ps_series_close(w);

    ck_assert_int_eq(ps_sample_series(in_folder("x.h5"), 0, 7, 1), PS_USAGE);
    check_message("hours is 0");
    ck_assert_int_eq(ps_sample_windows(in_folder("x.h5"), 1, 1, INT32_MAX, 1, 1), PS_USAGE);
    check_message("windows + seq_len + pred_len - 1 is 2147483648");
    ck_assert(!exists(in_folder("x.h5")));
}
END_TEST

/* A forecast that only knows the week is far better than the last value, on the test part of the default series, for three seeds.
 */
START_TEST(sample_can_be_learnt)
{
    for (uint64_t seed = 1; seed <= 3; seed++) {
        ck_assert_int_eq(ps_sample_series(in_folder("s.h5"), 8760, 7, seed), PS_OK);
        struct ps_series *s = open_series(in_folder("s.h5"));
        for (int64_t horizon = 24; horizon <= 96; horizon += 72) {
            struct ps_splits splits;
            struct ps_scaler scaler;
            ck_assert_int_eq(ps_splits_make(s, (double[]){0.7, 0.1, 0.2}, 168, horizon, &splits), PS_OK);
            ck_assert_int_eq(ps_scaler_fit(s, &splits, &scaler), PS_OK);
            ck_assert_int_eq(ps_scaler_apply(&scaler, s), PS_OK);
            struct ps_window_view view = ps_window_view_make(s, 168, horizon);
            struct ps_naive naive = ps_naive_score(&view, splits.first[PS_TEST], splits.count[PS_TEST], 168);
            ck_assert_double_lt(naive.seasonal_mse, 0.25 * naive.repeat_mse);
            ps_scaler_free(&scaler);
        }
        ps_series_close(s);
    }
}
END_TEST

/* ---- the programs ---- */

static const char *programs;

/* Runs a program with what it prints in output; returns its exit code. */
static int run(char output[1024], const char *format, ...) __attribute__((format(printf, 2, 3)));
static int run(char output[1024], const char *format, ...)
{
    char command[2048];
    int n = snprintf(command, sizeof command, "cd '%s' && %s/", folder, programs);
    va_list arguments;
    va_start(arguments, format);
    n += vsnprintf(command + n, sizeof command - (size_t)n, format, arguments);
    va_end(arguments);
    snprintf(command + n, sizeof command - (size_t)n, " 2>&1");
    FILE *pipe = popen(command, "r");
    ck_assert_ptr_nonnull(pipe);
    size_t size = fread(output, 1, 1023, pipe);
    output[size] = '\0';
    int status = pclose(pipe);
    ck_assert(WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* One line from the program that holds the part. */
static void check_line(const char *output, const char *part)
{
    ck_assert_msg(strstr(output, part) != NULL, "\"%s\" is not in: %s", part, output);
    ck_assert_msg(strchr(output, '\n') == output + strlen(output) - 1, "not one line: %s", output);
}

START_TEST(program_import_csv)
{
    char output[1024];
    write_text("in.csv", "a,when,b\n1,2020-01-01 00:00,2\n3,2020-01-01 00:30,4\n");
    write_text("bad.csv", "a\n1\nx\n");
    ck_assert_int_eq(run(output, "import_csv in.csv out.h5 --time-column when"), 0);
    check_line(output, "out.h5: 2 rows, 2 channels, period 30min");
    struct ps_series *s = open_series(in_folder("out.h5"));
    ck_assert_mem_eq(s->values, ((float[]){1, 2, 3, 4}), 4 * sizeof(float));
    ps_series_close(s);

    ck_assert_int_eq(run(output, "import_csv in.csv out.h5 --time-column when"), 2);
    check_line(output, "import_csv: out.h5 exists");
    ck_assert_int_eq(run(output, "import_csv in.csv out.h5 --time-column when --overwrite"), 0);
    ck_assert_int_eq(run(output, "import_csv in.csv in.csv --overwrite"), 2);
    check_line(output, "is the CSV itself");
    ck_assert_int_eq(run(output, "import_csv in.csv other.h5"), 3);
    check_line(output, "import_csv: in.csv:2: column 2 (when)");
    write_text("unix.csv", "ts,a\n1643758200,1\n1643761800,2\n");
    ck_assert_int_eq(run(output, "import_csv unix.csv out.h5 --overwrite "), 0);
    ck_assert_ptr_nonnull(strstr(output, "import_csv: warning: unix.csv: column 1 (ts) rises as times do"));
    ck_assert_ptr_nonnull(strstr(output, "\nout.h5: 2 rows, 2 channels, period unknown\n"));
    ck_assert_int_eq(run(output, "import_csv unix.csv out.h5 --overwrite --time-column ts"), 0);
    check_line(output, "out.h5: 2 rows, 1 channels, period 1h");
    ck_assert_int_eq(run(output, "import_csv unix.csv out.h5 --overwrite --time-format %%j"), 2);
    check_line(output, "import_csv: --time-format is \"%j\"");
    write_text("gaps.csv", "date,a\n2020-01-01,1\n2020-01-02,2\n2020-01-03,3\n2020-01-05,4\n2020-01-06,5\n");
    ck_assert_int_eq(run(output, "import_csv gaps.csv other.h5"), 3);
    check_line(output, "import_csv: gaps.csv:5: column 1 (date): 2020-01-05 00:00:00 is 2d after 2020-01-03 00:00:00");
    ck_assert(!exists(in_folder("other.h5")));
    ck_assert_int_eq(run(output, "import_csv gaps.csv out.h5 --overwrite --allow-gaps"), 0);
    check_line(output, "out.h5: 5 rows, 1 channels, period 1d, 1 gaps\n");
    write_text("holes.csv", "a,b\n1,2\nNA,\n3,4\n");
    ck_assert_int_eq(run(output, "import_csv holes.csv other.h5"), 3);
    check_line(output, "import_csv: holes.csv:3: column 1 (a): \"NA\" is a missing value, the first of 2 in 2 columns");
    ck_assert_int_eq(run(output, "import_csv holes.csv other.h5 --fill none"), 3);
    ck_assert_int_eq(run(output, "import_csv holes.csv other.h5 --fill mean"), 2);
    check_line(output, "--fill is \"mean\": expected previous, linear, nan or none");
    ck_assert_int_eq(run(output, "import_csv holes.csv out.h5 --overwrite --fill previous"), 0);
    check_line(output, "period unknown, 2 missing values in 2 channels filled (previous)\n");
    ck_assert_int_eq(run(output, "import_csv holes.csv out.h5 --overwrite --fill linear"), 0);
    check_line(output, "filled (linear)");
    s = open_series(in_folder("out.h5"));
    ck_assert_mem_eq(s->values, ((float[]){1, 2, 2, 3, 3, 4}), 6 * sizeof(float));
    ps_series_close(s);
    write_text("semicolons.csv", "a;b\n1,5;2\n");
    ck_assert_int_eq(run(output, "import_csv semicolons.csv other.h5"), 3);
    check_line(output, "import_csv: semicolons.csv:2: column 1 (a): \"1,5\" is not a number, but may be one with a decimal comma");
    ck_assert_int_eq(run(output, "import_csv semicolons.csv out.h5 --overwrite --decimal-comma"), 0);
    check_line(output, "out.h5: 1 rows, 2 channels, period unknown, cut at semicolons\n");
    ck_assert_int_eq(run(output, "import_csv semicolons.csv out.h5 --overwrite --decimal-comma --delimiter tab"), 3);
    check_line(output, "column 1 (a;b): \"1,5;2\" is not a number");
    ck_assert_int_eq(run(output, "import_csv semicolons.csv out.h5 --overwrite --decimal-comma --delimiter ';'"), 0);
    ck_assert_int_eq(run(output, "import_csv semicolons.csv other.h5 --delimiter :"), 2);
    check_line(output, "--delimiter is \":\": expected comma, semicolon, tab or bar");
    ck_assert_int_eq(run(output, "import_csv bad.csv other.h5"), 3);
    check_line(output, "import_csv: bad.csv:3: column 1 (a): \"x\" is not a number");
    ck_assert_int_eq(run(output, "import_csv none.csv other.h5"), 3);
    check_line(output, "none.csv: cannot be opened");
    ck_assert(!exists(in_folder("other.h5")));
    ck_assert_int_eq(run(output, "import_csv in.csv"), 2);
    check_line(output, "needs IN.csv and OUT.h5, and 1 given");
    ck_assert_int_eq(run(output, "import_csv in.csv other.h5 --time"), 2);
    check_line(output, "--time needs a value");
    ck_assert_int_eq(run(output, "import_csv in.csv other.h5 --fast"), 2);
    check_line(output, "unknown option --fast");
    ck_assert_int_eq(run(output, "import_csv --help"), 0);
    ck_assert_ptr_nonnull(strstr(output, "usage: import_csv"));
}
END_TEST

START_TEST(program_sample_series)
{
    char output[1024];
    ck_assert_int_eq(run(output, "sample_series a.h5"), 0);
    check_line(output, "a.h5: 8760 rows, 7 channels, period 1h");
    sleep(1); /* a file that kept its time would differ */
    ck_assert_int_eq(run(output, "sample_series b.h5 --hours 8760 --channels 7 --seed 1"), 0);
    size_t size_a, size_b;
    char *a = read_bytes(in_folder("a.h5"), &size_a), *b = read_bytes(in_folder("b.h5"), &size_b);
    ck_assert_uint_eq(size_a, size_b);
    ck_assert_msg(memcmp(a, b, size_a) == 0, "equal arguments made different files");
    free(a);
    free(b);
    ck_assert_int_eq(run(output, "sample_series w.h5 --windows 300 --seq-len 24 --pred-len 1 --channels 20"), 0);
    check_line(output, "w.h5: 300 windows, 20 channels, seq_len 24, pred_len 1");
    struct ps_series *w = open_series(in_folder("w.h5"));
    ck_assert_int_eq(w->rows, 300);
    ck_assert_int_eq(w->channels, 20);
    ps_series_close(w);

    ck_assert_int_eq(run(output, "sample_series a.h5"), 2);
    check_line(output, "sample_series: a.h5 exists");
    ck_assert_int_eq(run(output, "sample_series a.h5 --hours 100 --overwrite"), 0);
    struct ps_series *s = open_series(in_folder("a.h5"));
    ck_assert_int_eq(s->rows, 100);
    ps_series_close(s);
    static const struct {
        const char *arguments, *message;
    } wrong[] = {
        {"", "needs one OUT.h5, and 0 given"},
        {"x.h5 y.h5", "needs one OUT.h5, and 2 given"},
        {"x.h5 --hours 0", "--hours is \"0\": expected a whole number from 1"},
        {"x.h5 --hours 1e3", "--hours is \"1e3\""},
        {"x.h5 --seed -1", "--seed is \"-1\": expected a whole number from 0"},
        {"x.h5 --channels 99999999999", "--channels is \"99999999999\""},
        {"x.h5 --windows 5", "--windows, --seq-len and --pred-len go together"},
        {"x.h5 --hours 9 --windows 5 --seq-len 2 --pred-len 1", "--hours and --windows exclude each other"},
        {"x.h5 --colour", "unknown option --colour"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        ck_assert_int_eq(run(output, "sample_series %s", wrong[i].arguments), 2);
        check_line(output, wrong[i].message);
    }
    ck_assert_int_eq(run(output, "sample_series no/x.h5"), 3);
    check_line(output, "no/x.h5.partial: cannot be written: No such file");
    ck_assert(!exists(in_folder("x.h5")));
}
END_TEST

int main(void)
{
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    Suite *suite = suite_create("data");
    TCase *c = tcase_create("data");
    tcase_set_timeout(c, 120);
    tcase_add_checked_fixture(c, make_folder, remove_folder);
    tcase_add_test(c, series_round_trip);
    tcase_add_test(c, series_many_channels);
    tcase_add_test(c, fingerprint);
    tcase_add_test(c, windows_file);
    tcase_add_test(c, bad_files);
    tcase_add_test(c, splits_by_hand);
    tcase_add_test(c, splits_refused);
    tcase_add_test(c, windows_by_hand);
    tcase_add_test(c, gather_many_channels);
    tcase_add_test(c, scaler_series);
    tcase_add_test(c, scaler_windows);
    tcase_add_test(c, scaler_overflow);
    tcase_add_test(c, shuffle_is_a_permutation);
    tcase_add_test(c, shuffle_is_unbiased);
    tcase_add_test(c, prefetch_epochs);
    tcase_add_test(c, prefetch_holds_buffers);
    tcase_add_test(c, naive_by_hand);
    tcase_add_test(c, naive_series);
    tcase_add_test(c, import_good);
    tcase_add_test(c, import_long);
    tcase_add_test(c, import_times);
    tcase_add_test(c, import_steps);
    tcase_add_test(c, import_missing);
    tcase_add_test(c, import_delimiters);
    tcase_add_test(c, import_panel);
    tcase_add_test(c, import_warns_of_times);
    tcase_add_test(c, import_bad);
    tcase_add_test(c, sample_bits);
    tcase_add_test(c, sample_can_be_learnt);
    programs = getenv("PS_PROGRAMS");
    if (programs != NULL) {
        tcase_add_test(c, program_import_csv);
        tcase_add_test(c, program_sample_series);
    } else {
        printf("skipped: the programs, because PS_PROGRAMS is not set\n");
    }
    suite_add_tcase(suite, c);
    return run_suite(suite, CK_NOFORK) != 0; /* OpenMP is used */
}
