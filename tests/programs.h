/* The programs run on a config and a run folder, and what a run leaves: compared, loaded, read. A suite sets the four variables. */
#ifndef PS_TESTS_PROGRAMS_H
#define PS_TESTS_PROGRAMS_H

#include <hdf5.h>
#include <jansson.h>

#include "src/checkpoint.h"
#include "tests/run.h"

static const char *programs, *device; /* the folder that holds the programs; --device */
static struct path folder, config;    /* the suite's own folder; what train is given */

/* ---- running ---- */

#define ARGS(...) ((char *const[]){__VA_ARGS__ __VA_OPT__(, ) NULL})

static inline struct process start(const char *program, char *const *arguments)
{
    return process_start(path_of("%s/%s", programs, program).text, arguments, 0);
}

static inline struct result run(const char *program, char *const *arguments)
{
    struct process p = start(program, arguments);
    return process_end(&p);
}

/* Whether a window's forecasts in two programs agree: the same bits on the CPU; on a GPU, whose products are chosen by the number
 * of rows that are computed at once, to rounding. */
static inline int same_forecast(float a, float b)
{
    return a == b || (strcmp(device, "cuda") == 0 && fabsf(a - b) <= 1e-5f * fmaxf(1, fabsf(b)));
}

/* train on the device into a run folder. */
static inline struct process start_train(const char *dir, char *const *more)
{
    char *arguments[ARGUMENTS + 1] = {config.text, "--device", (char *)device, "--run-dir", (char *)dir};
    int n = 5;
    for (int i = 0; more[i]; i++) {
        ck_assert_int_lt(n, ARGUMENTS);
        arguments[n++] = more[i];
    }
    return start("train", arguments);
}

static inline struct result train(const char *dir, char *const *more)
{
    struct process p = start_train(dir, more);
    return process_end(&p);
}

/* Exit code 0; nothing on stderr unless it is allowed. */
static inline void expect_done(struct result r)
{
    ck_assert_msg(r.code == 0 && !*r.err, "exit code %d; stdout: %s; stderr: %s", r.code, r.out, r.err);
    result_free(&r);
}

/* The exit code, and one line on stderr that holds every text of `says`. */
static inline void expect_refused(struct result r, int code, char *const *says)
{
    ck_assert_msg(r.code == code, "exit code %d, not %d; stdout: %s; stderr: %s", r.code, code, r.out, r.err);
    ck_assert_msg(lines_of(r.err) == 1, "not one line on stderr: %s", r.err);
    for (int i = 0; says[i]; i++) {
        ck_assert_msg(strstr(r.err, says[i]) != NULL, "\"%s\" is not in the message: %s", says[i], r.err);
    }
    result_free(&r);
}

/* ---- what a run leaves ---- */

static inline struct path in_run(const char *dir, const char *name)
{
    return path_of("%.400s/%s", dir, name);
}

static inline struct path new_dir(const char *name)
{
    return path_of("%.400s/%s", folder.text, name);
}

/* Every file under a folder: name, inode, time of change, contents. Equal texts: nothing was touched. */
static FILE *listing;

static inline int list_entry(const char *path, const struct stat *about, int type, struct FTW *place)
{
    (void)place;
    fprintf(listing, "%s %lld %lld.%09ld\n", path, (long long)about->st_ino, (long long)about->st_mtim.tv_sec,
            about->st_mtim.tv_nsec);
    if (type == FTW_F) {
        size_t size;
        char *bytes = file_read(path, &size);
        fwrite(bytes, 1, size, listing);
        free(bytes);
    }
    return 0;
}

struct listed {
    char *text;
    size_t size;
};

static inline struct listed list(const char *dir)
{
    struct listed l;
    listing = open_memstream(&l.text, &l.size);
    nftw(dir, list_entry, 16, FTW_PHYS);
    fclose(listing);
    return l;
}

static inline void expect_untouched(const char *dir, struct listed before, const char *by)
{
    struct listed now = list(dir);
    ck_assert_msg(now.size == before.size && memcmp(now.text, before.text, now.size) == 0, "%s was touched by: %s", dir, by);
    free(now.text);
}

/* The objects of metrics.jsonl; each line is one. */
static inline json_t *read_metrics(const char *dir)
{
    char *text = file_read(in_run(dir, "metrics.jsonl").text, NULL), *rest = text;
    json_t *all = json_array();
    for (char *line; (line = strsep(&rest, "\n")) != NULL && *line;) {
        json_t *object = json_loads(line, JSON_REJECT_DUPLICATES, NULL);
        ck_assert_msg(json_is_object(object), "not an object: %s", line);
        json_array_append_new(all, object);
    }
    ck_assert(rest == NULL || !*rest);
    free(text);
    return all;
}

static inline double number_in(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    ck_assert_msg(json_is_number(value), "%s is not a number", key);
    return json_number_value(value);
}

/* Epochs 1 .. epochs, each once, with the documented keys. A signal may stop a run between an epoch's last step and its validation:
 * that epoch has no speed; of such there are at most `stops`. */
static inline json_t *expect_stopped_metrics(const char *dir, int epochs, int steps_per_epoch, int stops)
{
    static const char *const keys[] = {"epoch", "step",    "train_loss",         "val_mse", "val_mae",
                                       "lr",    "seconds", "windows_per_second", "skipped"};
    json_t *all = read_metrics(dir);
    ck_assert_int_eq((int)json_array_size(all), epochs);
    for (int i = 0; i < epochs; i++) {
        const json_t *object = json_array_get(all, (size_t)i);
        ck_assert_uint_eq(json_object_size(object), sizeof keys / sizeof *keys);
        for (size_t k = 0; k < sizeof keys / sizeof *keys; k++) {
            if (strcmp(keys[k], "windows_per_second") == 0 && json_is_null(json_object_get(object, keys[k]))) {
                ck_assert_msg(stops > 0, "%s: epoch %d has no windows_per_second", dir, i + 1);
                stops--;
            } else {
                ck_assert_double_ge(number_in(object, keys[k]), 0);
            }
        }
        ck_assert_int_eq((int)number_in(object, "epoch"), i + 1);
        ck_assert_int_eq((int)number_in(object, "step"), (i + 1) * steps_per_epoch);
    }
    return all;
}

/* The same of a run that no signal stopped. */
static inline json_t *expect_metrics(const char *dir, int epochs, int steps_per_epoch)
{
    return expect_stopped_metrics(dir, epochs, steps_per_epoch, 0);
}

static inline json_t *read_json(const char *text)
{
    json_error_t error;
    json_t *object = json_loads(text, JSON_REJECT_DUPLICATES, &error);
    ck_assert_msg(json_is_object(object), "not JSON: %s: %s", error.text, text);
    return object;
}

static inline json_t *read_test(const char *dir)
{
    char *text = file_read(in_run(dir, "test.json").text, NULL);
    json_t *object = read_json(text);
    free(text);
    return object;
}

/* Compares the datasets of two files, as h5diff does, but bit for bit. */
struct compared {
    hid_t other;
    const char *name;
    int datasets;
};

static inline herr_t compare_dataset(hid_t file, const char *name, const H5O_info_t *info, void *argument)
{
    struct compared *c = argument;
    if (info->type != H5O_TYPE_DATASET) {
        return 0;
    }
    hid_t id[2] = {H5Dopen2(file, name, H5P_DEFAULT), H5Dopen2(c->other, name, H5P_DEFAULT)};
    ck_assert_msg(id[0] >= 0 && id[1] >= 0, "%s: /%s is missing", c->name, name);
    hid_t type[2] = {H5Dget_type(id[0]), H5Dget_type(id[1])}, space[2] = {H5Dget_space(id[0]), H5Dget_space(id[1])};
    ck_assert_msg(H5Tequal(type[0], type[1]) > 0 && H5Sextent_equal(space[0], space[1]) > 0, "%s: /%s has another shape", c->name,
                  name);
    size_t bytes = (size_t)H5Sget_simple_extent_npoints(space[0]) * H5Tget_size(type[0]);
    char *values[2] = {malloc(bytes), malloc(bytes)};
    for (int i = 0; i < 2; i++) {
        ck_assert_int_ge(H5Dread(id[i], type[i], H5S_ALL, H5S_ALL, H5P_DEFAULT, values[i]), 0);
    }
    ck_assert_msg(memcmp(values[0], values[1], bytes) == 0, "%s: /%s differs", c->name, name);
    for (int i = 0; i < 2; i++) {
        free(values[i]);
        H5Tclose(type[i]);
        H5Sclose(space[i]);
        H5Dclose(id[i]);
    }
    c->datasets++;
    return 0;
}

static inline void expect_equal_datasets(const char *a, const char *b)
{
    hid_t file[2] = {H5Fopen(a, H5F_ACC_RDONLY, H5P_DEFAULT), H5Fopen(b, H5F_ACC_RDONLY, H5P_DEFAULT)};
    ck_assert_msg(file[0] >= 0 && file[1] >= 0, "%s or %s is not an HDF5 file", a, b);
    struct compared forth = {.other = file[1], .name = a}, back = {.other = file[0], .name = b};
    H5Ovisit2(file[0], H5_INDEX_NAME, H5_ITER_NATIVE, compare_dataset, &forth, H5O_INFO_BASIC);
    H5Ovisit2(file[1], H5_INDEX_NAME, H5_ITER_NATIVE, compare_dataset, &back, H5O_INFO_BASIC);
    ck_assert_int_eq(forth.datasets, back.datasets);
    ck_assert_int_gt(forth.datasets, 10);
    H5Fclose(file[0]);
    H5Fclose(file[1]);
}

/* The same results: datasets of both checkpoints, metrics but for their times, test.json. */
static inline void expect_same_results(const char *a, const char *b)
{
    static const char *const files[] = {"checkpoints/last.h5", "checkpoints/best.h5"};
    for (int i = 0; i < 2; i++) {
        expect_equal_datasets(in_run(a, files[i]).text, in_run(b, files[i]).text);
    }
    ck_assert_msg(files_equal(in_run(a, "test.json").text, in_run(b, "test.json").text), "test.json of %s and %s differ", a, b);
    json_t *x = read_metrics(a), *y = read_metrics(b);
    for (size_t i = 0; i < json_array_size(x) && i < json_array_size(y); i++) {
        json_object_del(json_array_get(x, i), "seconds");
        json_object_del(json_array_get(y, i), "seconds");
        json_object_del(json_array_get(x, i), "windows_per_second");
        json_object_del(json_array_get(y, i), "windows_per_second");
    }
    ck_assert_msg(json_equal(x, y), "metrics.jsonl of %s and %s differ", a, b);
    json_decref(x);
    json_decref(y);
}

/* And the same files, byte for byte. */
static inline void expect_same_run(const char *a, const char *b)
{
    expect_same_results(a, b);
    static const char *const files[] = {"checkpoints/last.h5", "checkpoints/best.h5", "config.yaml"};
    for (int i = 0; i < 3; i++) {
        ck_assert_msg(files_equal(in_run(a, files[i]).text, in_run(b, files[i]).text), "%s of %s and %s differ", files[i], a, b);
    }
}

static inline struct ps_checkpoint load(const char *dir, const char *name)
{
    struct ps_checkpoint checkpoint;
    OK(ps_checkpoint_load(path_of("%.400s/checkpoints/%s", dir, name).text, &checkpoint));
    return checkpoint;
}

/* ---- evaluate ---- */

static inline struct result evaluate(const char *checkpoint, char *const *more)
{
    char *arguments[ARGUMENTS + 1] = {(char *)checkpoint, "--device", (char *)device};
    for (int i = 0; more[i]; i++) {
        arguments[i + 3] = more[i];
    }
    return run("evaluate", arguments);
}

static inline json_t *evaluate_json(const char *checkpoint, char *const *more)
{
    struct result r = evaluate(checkpoint, more);
    ck_assert_msg(r.code == 0 && !*r.err, "exit code %d: %s", r.code, r.err);
    json_t *object = read_json(r.out);
    result_free(&r);
    return object;
}

/* Whether evaluate --json, which says more, has the scores of test.json, which has those of validation besides. */
static inline int same_scores(const json_t *test, const json_t *evaluated)
{
    static const char *const more[] = {"split", "mase", "smape"};
    json_t *rest = json_deep_copy(evaluated);
    ck_assert_str_eq(json_string_value(json_object_get(rest, "split")), "test");
    for (int i = 0; i < 3; i++) {
        ck_assert_int_eq(json_object_del(rest, more[i]), 0);
        if (i >= 1) {
            ck_assert_int_eq(json_object_del(json_object_get(rest, "repeat_last"), more[i]), 0);
            json_t *seasonal = json_object_get(rest, "seasonal_naive");
            ck_assert(json_is_null(seasonal) || json_object_del(seasonal, more[i]) == 0);
        }
    }
    json_t *scores = json_deep_copy(test);
    ck_assert(json_object_del(scores, "val_mse") == 0 && json_object_del(scores, "val_mae") == 0);
    int same = json_equal(scores, rest);
    json_decref(scores);
    json_decref(rest);
    return same;
}

struct array {
    hsize_t size[3];
    float *values;
};

static inline struct array read_array(const char *path, const char *name)
{
    struct array a;
    hid_t file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT), id = H5Dopen2(file, name, H5P_DEFAULT), space = H5Dget_space(id);
    ck_assert_int_eq(H5Sget_simple_extent_dims(space, a.size, NULL), 3);
    a.values = malloc(a.size[0] * a.size[1] * a.size[2] * sizeof *a.values);
    ck_assert_int_ge(H5Dread(id, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, a.values), 0);
    H5Sclose(space);
    H5Dclose(id);
    H5Fclose(file);
    return a;
}

#endif
