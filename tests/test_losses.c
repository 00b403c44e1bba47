/* Other losses than MSE, from the config to what is written: which epoch is the best, the same bits after a resume and the same
 * figures by backends, quantiles in every output, and how many targets lie within them where the noise is known.
 *
 * PS_TEST_DEVICE: the --device to run on (default cpu). */
#include <math.h>

#include "data/import.h"
#include "data/series.h"
#include "include/patchstep.h"
#include "tests/programs.h"
#include "tests/random_values.h"
#include "tests/suite.h"

enum { ROWS = 2000, CHANNELS = 2, L = 48, H = 12, EPOCHS = 3, Q = 3, NOISY_ROWS = 20000 };

static const char config_text[] = "data: {path: data.h5}\n"
                                  "model: {seq_len: 48, pred_len: 12, patch_len: 8, stride: 4, d_model: 16, n_heads: 4, d_ff: 24,\n"
                                  "        n_layers: 1, dropout: 0.1, padding: none}\n"
                                  "optim: {lr: 2e-3, schedule: constant}\n"
                                  "train: {epochs: 3, batch_size: 16}\n"
                                  "runtime: {threads: 2}\n";

/* A sine a channel and Gaussian noise of deviation 1. */
static void write_noisy(const char *path, int rows, uint64_t random)
{
    float *values = malloc((size_t)rows * CHANNELS * sizeof *values);
    for (int i = 0; i < rows * CHANNELS; i++) {
        values[i] = (float)(3 * sin(i / CHANNELS * (M_PI / 12) + i % CHANNELS) + random_normal(&random));
    }
    OK(ps_series_write(path, values, rows, CHANNELS, NULL, NULL, NULL, NULL));
    free(values);
}

/* A run's folder: the one of that name that is there, or trained now. */
static struct path trained(const char *loss, char *const *more)
{
    struct path dir = new_dir(loss), set = path_of("train.loss=%.*s", (int)strcspn(loss, "_"), loss);
    if (!file_exists(dir.text)) {
        char *arguments[ARGUMENTS + 1] = {"--set", set.text};
        for (int i = 0; more[i]; i++) {
            arguments[i + 2] = more[i];
        }
        expect_done(train(dir.text, arguments));
    }
    return dir;
}

static const char *const losses[] = {"mse", "mae", "huber", "quantile"};

/* The epoch of the least figure of that name. */
static int best_epoch(const json_t *metrics, const char *key)
{
    size_t best = 0;
    for (size_t i = 1; i < json_array_size(metrics); i++) {
        best = number_in(json_array_get(metrics, i), key) < number_in(json_array_get(metrics, best), key) ? i : best;
    }
    return (int)best + 1;
}

static void expect_best(const char *dir, const char *key)
{
    json_t *metrics = read_metrics(dir), *test = read_test(dir);
    const int best = best_epoch(metrics, key);
    ck_assert_int_eq((int)json_array_size(metrics), EPOCHS);
    ck_assert_int_eq((int)number_in(test, "epoch"), best);
    struct ps_checkpoint c = load(dir, "last.h5");
    ck_assert_double_eq(c.best_validation, number_in(json_array_get(metrics, (size_t)best - 1), key));
    ck_assert_uint_eq(c.best_epoch, (uint64_t)best);
    ps_checkpoint_free(&c);
    json_decref(metrics);
    json_decref(test);
}

/* ---- training ---- */

/* Validation is by the loss that is trained, and its figures are those of evaluate. */
START_TEST(trains)
{
    struct path dir = trained(losses[_i], ARGS());
    json_t *metrics = read_metrics(dir.text), *test = read_test(dir.text), *loss = json_object_get(test, "loss");
    expect_best(dir.text, _i == 0 ? "val_mse" : "val_loss");
    ck_assert_double_lt(number_in(json_array_get(metrics, EPOCHS - 1), "train_loss"),
                        number_in(json_array_get(metrics, 0), "train_loss"));
    if (_i == 0) {
        ck_assert(!loss && !json_object_get(test, "val_loss") && !json_object_get(json_array_get(metrics, 0), "val_loss"));
    } else {
        const json_t *line = json_array_get(metrics, (size_t)number_in(test, "epoch") - 1);
        ck_assert_str_eq(json_string_value(json_object_get(loss, "kind")), losses[_i]);
        ck_assert_double_eq(number_in(test, "val_loss"), number_in(line, "val_loss"));
        json_t *again = evaluate_json(in_run(dir.text, "checkpoints/best.h5").text, ARGS("--json"));
        ck_assert(json_equal(loss, json_object_get(again, "loss")));
        ck_assert_double_eq(number_in(test, "mse"), number_in(again, "mse"));
        json_decref(again);
        again = evaluate_json(in_run(dir.text, "checkpoints/best.h5").text, ARGS("--json", "--split", "val"));
        ck_assert_double_eq(number_in(test, "val_loss"), number_in(json_object_get(again, "loss"), "value"));
        json_decref(again);
    }
    if (_i == 1) {
        ck_assert_double_eq_tol(number_in(loss, "value"), number_in(test, "mae"), 1e-7);
    }
    json_decref(metrics);
    json_decref(test);
}
END_TEST

START_TEST(monitors)
{
    struct path by_mae = trained("quantile_by_mae", ARGS("--set", "train.monitor=mae")),
                by_mse = trained("mae_by_mse", ARGS("--set", "train.monitor=mse"));
    expect_best(by_mae.text, "val_mae");
    expect_best(by_mse.text, "val_mse");
    json_t *a = read_metrics(by_mse.text), *b = read_metrics(trained("mae", ARGS()).text); /* the weights are the same */
    ck_assert_double_eq(number_in(json_array_get(a, EPOCHS - 1), "val_mse"), number_in(json_array_get(b, EPOCHS - 1), "val_mse"));
    json_decref(a);
    json_decref(b);
}
END_TEST

/* Patience counts epochs in which the monitored figure got no better. */
START_TEST(patience)
{
    struct path dir = new_dir("patience");
    expect_done(train(dir.text, ARGS("--set", "train.loss=quantile", "--set", "optim.lr=1e-30", "--set", "train.patience=1")));
    json_t *metrics = read_metrics(dir.text);
    ck_assert_int_eq((int)json_array_size(metrics), 2);
    json_decref(metrics);
}
END_TEST

START_TEST(resumes)
{
    struct path dir = path_of("%.400s/resumed_%s", folder.text, losses[_i]), set = path_of("train.loss=%s", losses[_i]);
    expect_done(train(dir.text, ARGS("--set", set.text, "--set", "train.epochs=1")));
    expect_refused(train(dir.text, ARGS("--resume")), 4, ARGS("train.loss: the checkpoint was made with", (char *)losses[_i]));
    expect_done(train(dir.text, ARGS("--set", set.text, "--resume")));
    expect_same_results(trained(losses[_i], ARGS()).text, dir.text);
}
END_TEST

/* Two epochs of two steps: the same figures by the reference and the device, and by either level; nearly in a GPU's fp16. */
START_TEST(same_by_backends)
{
    static char *const ways[][3] = {{"runtime.backend=reference", "runtime.precision=fp32", "runtime.fusion=none"},
                                    {"runtime.backend=reference", "runtime.precision=fp32", "runtime.fusion=gemm"},
                                    {"runtime.backend=auto", "runtime.precision=fp32", "runtime.fusion=none"},
                                    {"runtime.backend=auto", "runtime.precision=fp32", "runtime.fusion=auto"},
                                    {"runtime.backend=auto", "runtime.precision=fp16", "runtime.fusion=auto"}};
    struct path set = path_of("train.loss=%s", losses[_i]);
    double first[4] = {0};
    const int on_cpu = strcmp(device, "cpu") == 0;
    for (int w = on_cpu ? 0 : 2; w < (on_cpu ? 4 : 5); w++) {
        struct path dir = path_of("%.400s/way%d_%s", folder.text, w, losses[_i]);
        expect_done(train(dir.text, ARGS("--set", set.text, "--set", ways[w][0], "--set", ways[w][1], "--set", ways[w][2], "--set",
                                         "data.split=[91, 70, 70]", "--set", "train.epochs=2")));
        json_t *metrics = read_metrics(dir.text), *test = read_test(dir.text), *loss = json_object_get(test, "loss");
        const double now[4] = {number_in(json_array_get(metrics, 1), "train_loss"), number_in(test, "val_mse"),
                               number_in(test, "mae"), number_in(loss, "value")};
        for (int i = 0; i < 4; i++) {
            first[i] = first[i] == 0 ? now[i] : first[i];
            ck_assert_msg(fabs(now[i] - first[i]) <= (w < 4 ? 1e-4 : 4e-3) * first[i], "figure %d of way %d: %.9g, not %.9g", i, w,
                          now[i], first[i]);
        }
        json_decref(metrics);
        json_decref(test);
    }
}
END_TEST

/* The head of one loss is not that of another. */
START_TEST(other_heads)
{
    struct path from = in_run(trained("mse", ARGS()).text, "checkpoints/best.h5"), dir = new_dir("from_mse");
    expect_refused(train(dir.text, ARGS("--set", "train.loss=quantile", "--init-from", from.text)), 4,
                   ARGS("w_h is ", "--new-head starts the head anew"));
    expect_done(train(dir.text, ARGS("--set", "train.loss=quantile", "--init-from", from.text, "--new-head")));
    dir = new_dir("huber_from_mse");
    expect_done(train(dir.text, ARGS("--set", "train.loss=huber", "--init-from", from.text)));
}
END_TEST

/* ---- quantiles in what is written ---- */

static float *read_quantiles(const char *path, const hsize_t expected[4])
{
    hsize_t size[4] = {0};
    hid_t file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT), id = H5Dopen2(file, "/quantiles", H5P_DEFAULT),
          space = H5Dget_space(id), levels = H5Aopen(id, "levels", H5P_DEFAULT);
    ck_assert_int_eq(H5Sget_simple_extent_dims(space, size, NULL), 4);
    ck_assert_mem_eq(size, expected, sizeof size);
    float *values = malloc(size[0] * size[1] * size[2] * size[3] * sizeof *values);
    double level[Q];
    ck_assert_int_ge(H5Dread(id, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, values), 0);
    ck_assert_int_ge(H5Aread(levels, H5T_NATIVE_DOUBLE, level), 0);
    ck_assert(level[0] == 0.1 && level[1] == 0.5 && level[2] == 0.9);
    H5Aclose(levels);
    H5Sclose(space);
    H5Dclose(id);
    H5Fclose(file);
    return values;
}

/* evaluate, forecast to HDF5 and to CSV, and the library: of a window the same bits, rising, the median as the forecast. */
START_TEST(same_everywhere)
{
    struct path dir = trained("quantile", ARGS()), best = in_run(dir.text, "checkpoints/best.h5");
    struct path saved = new_dir("saved.h5"), out = new_dir("out.h5"), csv = new_dir("out.csv");
    const hsize_t windows = ROWS / 5 - H + 1;
    expect_done(run("forecast", ARGS(best.text, "--device", (char *)device, "--origin", "1987", "--out", out.text)));
    expect_done(run("forecast", ARGS(best.text, "--device", (char *)device, "--origin", "1987", "--out", csv.text)));
    struct result r =
        run("evaluate", ARGS(best.text, "--device", (char *)device, "--save-forecasts", saved.text, "--original-units"));
    ck_assert_msg(r.code == 0 && strstr(r.out, "pinball loss 0.") && strstr(r.out, " within quantiles 0.1 to 0.9\n"), "%s%s", r.out,
                  r.err);
    result_free(&r);
    float *ours = read_quantiles(out.text, (hsize_t[]){1, H, CHANNELS, Q}),
          *all = read_quantiles(saved.text, (hsize_t[]){windows, CHANNELS, Q, H});
    const float *last = all + (windows - 1) * CHANNELS * Q * H;
    struct array points = read_array(saved.text, "/forecasts"), point = read_array(out.text, "/forecasts"),
                 inputs = read_array(saved.text, "/inputs");
    char *text = file_read(csv.text, NULL), *row = strchr(text, '\n') + 1;
    ck_assert_msg(strncmp(text, "row,channel_0,channel_0_q10,channel_0_q50,channel_0_q90,channel_1,channel_1_q10,", 78) == 0, "%s",
                  text);
    for (int t = 0; t < H; t++) {
        row = strchr(row, ',');
        for (int c = 0; c < CHANNELS; c++) {
            ck_assert_float_eq(strtof(row + 1, &row), point.values[t * CHANNELS + c]);
            ck_assert(same_forecast(point.values[t * CHANNELS + c], last[(c * Q + 1) * H + t]));
            ck_assert_float_eq(points.values[((windows - 1) * CHANNELS + (hsize_t)c) * H + (hsize_t)t], last[(c * Q + 1) * H + t]);
            for (int q = 0; q < Q; q++) {
                ck_assert(same_forecast(ours[(t * CHANNELS + c) * Q + q], last[(c * Q + q) * H + t]));
                ck_assert_float_eq(strtof(row + 1, &row), ours[(t * CHANNELS + c) * Q + q]);
                ck_assert(q == 0 || last[(c * Q + q) * H + t] >= last[(c * Q + q - 1) * H + t]);
            }
        }
    }
    /* The library reads rows as the data have them; the saved inputs went through the scaler and back. */
    struct patchstep_model *model;
    float quantiles[2 * CHANNELS * Q * H], medians[2 * CHANNELS * H];
    ck_assert_msg(patchstep_open(best.text, device, NULL, &model) == PATCHSTEP_OK, "%s", patchstep_error());
    ck_assert(patchstep_quantiles(model) == Q && patchstep_quantile(model, 0) == 0.1 && patchstep_quantile(model, 2) == 0.9);
    ck_assert(isnan(patchstep_quantile(model, -1)) && isnan(patchstep_quantile(model, 3)));
    const float *two = inputs.values + (windows - 2) * CHANNELS * L;
    ck_assert_int_eq(patchstep_forecast_quantiles(model, two, 2, quantiles), PATCHSTEP_OK);
    ck_assert_int_eq(patchstep_forecast(model, two, 2, medians), PATCHSTEP_OK);
    for (int i = 0; i < CHANNELS * Q * H; i++) {
        ck_assert_float_eq_tol(quantiles[CHANNELS * Q * H + i], last[i], 1e-4);
    }
    for (int i = 0; i < 2 * CHANNELS * H; i++) {
        ck_assert_float_eq(medians[i], quantiles[(i / H * Q + 1) * H + i % H]);
    }
    ck_assert_int_eq(patchstep_forecast_quantiles(model, two, -1, quantiles), PATCHSTEP_ARGUMENT);
    patchstep_close(model);
    free(text);
    free(ours);
    free(all);
    free(points.values);
    free(point.values);
    free(inputs.values);
}
END_TEST

START_TEST(says_what_it_lacks)
{
    struct path quantile = in_run(trained("quantile", ARGS()).text, "checkpoints/best.h5"),
                huber = in_run(trained("huber", ARGS()).text, "checkpoints/best.h5");
    char *const place[] = {"--device", (char *)device, NULL};
    expect_refused(run("forecast", ARGS(quantile.text, place[0], place[1], "--interval", "0.8")), 2,
                   ARGS("--interval: the model forecasts quantiles of its own, 0.1 to 0.9"));
    expect_refused(run("evaluate", ARGS(quantile.text, place[0], place[1], "--interval", "0.8")), 2,
                   ARGS("--interval: the model forecasts quantiles of its own, 0.1 to 0.9"));
    struct result r = run("evaluate", ARGS(huber.text, place[0], place[1], "--interval", "0.8"));
    ck_assert_msg(r.code == 0 && strstr(r.out, "huber loss 0.") && strstr(r.out, "interval 0.8: 0."), "%s%s", r.out, r.err);
    result_free(&r);
    expect_refused(run("export_weights", ARGS(quantile.text, new_dir("exported").text)), 2, ARGS("train.loss: quantile"));
    r = run("forecast", ARGS(quantile.text, place[0], place[1], "--steps", "13"));
    ck_assert_msg(r.code == 0 && strstr(r.err, "beyond 12 take the forecasts fed back") && lines_of(r.err) == 1, "%s", r.err);
    result_free(&r);
    struct patchstep_model *model;
    float values[CHANNELS * L] = {0};
    ck_assert_int_eq(patchstep_open(huber.text, device, NULL, &model), PATCHSTEP_OK);
    ck_assert_int_eq(patchstep_quantiles(model), 0);
    ck_assert_int_eq(patchstep_forecast_quantiles(model, values, 1, values), PATCHSTEP_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(patchstep_error(), "not trained with train.loss: quantile"));
    patchstep_close(model);
}
END_TEST

/* Of Gaussian noise, quantiles 0.1 and 0.9 hold 0.8 of the targets and lie 2.563 deviations apart. */
START_TEST(coverage)
{
    struct path noisy = new_dir("noisy.h5"), saved = new_dir("noisy_saved.h5");
    write_noisy(noisy.text, NOISY_ROWS, 3);
    struct path dir =
        trained("quantile_noisy", ARGS("--set", "data.path=noisy.h5", "--set", "optim.schedule=cosine", "--set", "optim.lr=5e-4"));
    json_t *test = read_test(dir.text);
    const double within = number_in(json_object_get(test, "loss"), "coverage");
    struct result r =
        run("evaluate", ARGS(dir.text, "--device", (char *)device, "--save-forecasts", saved.text, "--original-units"));
    ck_assert_msg(r.code == 0, "%s", r.err);
    result_free(&r);
    const hsize_t windows = NOISY_ROWS / 5 - H + 1;
    float *q = read_quantiles(saved.text, (hsize_t[]){windows, CHANNELS, Q, H});
    struct array targets = read_array(saved.text, "/targets");
    double apart = 0, held = 0;
    const size_t count = windows * CHANNELS * H;
    for (size_t i = 0; i < count; i++) {
        const float *low = q + i / H * Q * H + i % H, *high = low + 2 * H;
        apart += (double)(*high - *low);
        held += *low <= targets.values[i] && targets.values[i] <= *high;
    }
    printf("quantiles 0.1 to 0.9 of known noise: %.4f of the targets within, %.3f deviations apart\n", within,
           apart / (double)count);
    fflush(stdout);
    ck_assert_double_eq_tol(within, 0.8, 0.02);
    ck_assert_double_eq_tol(held / (double)count, within, 1e-5);
    ck_assert_double_eq_tol(apart / (double)count, 2.563, 0.15);
    json_decref(test);
    free(q);
    free(targets.values);
}
END_TEST

static void make_folder(void)
{
    folder = folder_make();
    config = new_dir("config.yaml");
    file_write(config.text, config_text, strlen(config_text));
    write_noisy(new_dir("data.h5").text, ROWS, 5);
}

static void remove_folder(void)
{
    folder_remove(folder.text);
}

int main(void)
{
    const char *wanted = getenv("PS_TEST_DEVICE"), *of = getenv("PS_PROGRAMS");
    device = wanted ? wanted : "cpu";
    programs = of ? of : ".";
    Suite *suite = suite_create("losses");
    TCase *tests = tcase_create("losses");
    tcase_set_timeout(tests, 300);
    tcase_add_unchecked_fixture(tests, make_folder, remove_folder);
    tcase_add_loop_test(tests, trains, 0, 4);
    tcase_add_test(tests, monitors);
    tcase_add_test(tests, patience);
    tcase_add_loop_test(tests, resumes, 1, 4);
    tcase_add_loop_test(tests, same_by_backends, 1, 4);
    tcase_add_test(tests, other_heads);
    tcase_add_test(tests, same_everywhere);
    tcase_add_test(tests, says_what_it_lacks);
    tcase_add_test(tests, coverage);
    suite_add_tcase(suite, tests);
    return run_suite(suite, CK_FORK_GETENV) != 0;
}
