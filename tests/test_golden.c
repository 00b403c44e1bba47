/* The engine against PyTorch (tests/fixtures/golden.h5, written by scripts/make_golden.py): forecasts, all gradients, and the
 * losses of 20 training steps, dropout 0. */
#include <hdf5.h>

#include "optim/optimizer.h"
#include "tests/model_fixture.h"
#include "tests/suite.h"

static hid_t file;

static double attribute(const char *name)
{
    double value;
    hid_t a = H5Aopen(file, name, H5P_DEFAULT);
    ck_assert_msg(a >= 0 && H5Aread(a, H5T_NATIVE_DOUBLE, &value) >= 0, "golden.h5: no attribute %s", name);
    H5Aclose(a);
    return value;
}

static double *dataset(const char *name, int64_t *count)
{
    hid_t d = H5Dopen2(file, name, H5P_DEFAULT), space = H5Dget_space(d);
    *count = (int64_t)H5Sget_simple_extent_npoints(space);
    double *values = malloc((size_t)*count * sizeof *values);
    ck_assert_msg(H5Dread(d, H5T_NATIVE_DOUBLE, H5S_ALL, H5S_ALL, H5P_DEFAULT, values) >= 0, "golden.h5: no dataset %s", name);
    H5Sclose(space);
    H5Dclose(d);
    return values;
}

/* A flat buffer of the group's tensors. */
static double *flat(const struct ps_parameters *layout, const char *group)
{
    double *values = calloc((size_t)layout->count, sizeof *values);
    for (int t = 0; t < layout->n; t++) {
        char name[80];
        int64_t count;
        snprintf(name, sizeof name, "%s/%s", group, layout->table[t].name);
        double *tensor = dataset(name, &count);
        ck_assert_int_eq(count, layout->table[t].size[0] * layout->table[t].size[1]);
        memcpy(values + layout->table[t].offset, tensor, (size_t)count * sizeof *tensor);
        free(tensor);
    }
    return values;
}

struct golden_case {
    const char *backend, *device;
    enum ps_precision precision;
    enum ps_level level;
};

/* How far off each may be. Measured, the largest of the cases: in fp64 2.9e-8 and 4.4e-8, which is the file's own rounding to
 * float, and 3.3e-15 (its losses are double); in fp32 1.5e-7, 3.4e-7 and 1.8e-7. */
static const struct {
    double forecasts, gradients, losses;
} bounds[] = {[PS_FP32] = {5e-7, 1e-6, 5e-7}, [PS_FP64] = {6e-8, 9e-8, 2e-14}};

static void compare(const struct golden_case *c)
{
    struct ps_model_shape shape = {.channels = (int64_t)attribute("channels"),
                                   .seq_len = (int64_t)attribute("seq_len"),
                                   .pred_len = (int64_t)attribute("pred_len"),
                                   .patch_len = (int64_t)attribute("patch_len"),
                                   .stride = (int64_t)attribute("stride"),
                                   .pad_end = (int)attribute("pad_end"),
                                   .d_model = (int64_t)attribute("d_model"),
                                   .n_heads = (int64_t)attribute("n_heads"),
                                   .d_ff = (int64_t)attribute("d_ff"),
                                   .n_layers = (int64_t)attribute("n_layers"),
                                   .revin = 1};
    int64_t batch = (int64_t)attribute("batch"), batches = (int64_t)attribute("batches"), steps = (int64_t)attribute("steps");
    struct fixture f = fixture_open(c->backend, c->device, c->precision, &shape, batch, c->level, 0);
    enum ps_type type = f.k->parameter;
    const char *level = ps_level_name(c->level);

    double *parameters = flat(f.model->layout, "parameters"), *expected = flat(f.model->layout, "gradients");
    set_device(f.device, type, f.model->parameters, parameters, f.count);
    OK(ps_model_refresh_weights(f.model));
    int64_t inputs, targets, forecasts, losses;
    double *x = dataset("inputs", &inputs), *y = dataset("targets", &targets), *forecast = dataset("forecasts", &forecasts);
    double *loss = dataset("losses", &losses);
    struct ps_windows windows = {
        .inputs = ps_tensor_3d(to_device(f.device, type, x, inputs), type, batch * batches, shape.channels, shape.seq_len),
        .targets = ps_tensor_3d(to_device(f.device, type, y, targets), type, batch * batches, shape.channels, shape.pred_len)};
    int32_t *order = malloc((size_t)(steps * batch) * sizeof *order);
    for (int64_t i = 0; i < steps * batch; i++) {
        order[i] = (int32_t)(i % (batch * batches));
    }
    size_t order_bytes = (size_t)(steps * batch) * sizeof *order;
    void *memory;
    OK(f.device->allocate(f.device, order_bytes, &memory));
    OK(f.device->upload(f.device, PS_COMPUTE, memory, order, order_bytes));
    OK(f.device->synchronize(f.device));
    windows.indices = ps_tensor_1d(memory, PS_I32, steps * batch);

    /* Forecasts and gradients of the first batch. */
    struct ps_tensor out = ps_tensor_2d(f.model->cache.shared.targets, type, batch * shape.channels, shape.pred_len);
    OK(ps_model_forward(f.model, &windows, f.state, batch, 1));
    OK(ps_model_forecast(f.model, batch, out));
    double *got = from_device(f.device, type, out.data, forecasts), delta = 0, norm = 0;
    for (int64_t i = 0; i < forecasts; i++) {
        delta += (got[i] - forecast[i]) * (got[i] - forecast[i]);
        norm += forecast[i] * forecast[i];
    }
    OK(ps_model_gradients(f.model, &windows, f.state, batch));
    double *gradients = from_device(f.device, type, f.model->gradients, f.count);
    int worst = 0;
    double gradient = gradient_error(f.model->layout, gradients, expected, &worst);

    /* The loss of each of the steps. */
    double *rates = malloc((size_t)steps * sizeof *rates), largest = 0, before = 0;
    for (int64_t i = 0; i < steps; i++) {
        rates[i] = attribute("lr");
    }
    struct ps_optimizer optimizer;
    OK(ps_optimizer_open(
        f.k, f.count, f.model->layout->decayed,
        &(struct ps_optimizer_options){.beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8, .weight_decay = attribute("weight_decay")},
        rates, steps, &optimizer));
    OK(f.device->fill_zero(f.device, PS_COMPUTE, f.model->gradients, (size_t)f.count * ps_type_bytes(type)));
    OK(f.device->fill_zero(f.device, PS_COMPUTE, f.state, sizeof *f.state));
    for (int64_t i = 0; i < steps; i++) {
        struct ps_step_state state;
        OK(ps_model_gradients(f.model, &windows, f.state, batch));
        OK(ps_optimizer_step(&optimizer, f.model->parameters, f.model->weights, f.model->gradients, f.state, batch));
        OK(f.device->download(f.device, PS_COMPUTE, &state, f.state, sizeof state));
        double error = fabs((state.loss_sum - before) / (double)batch - loss[i]) / loss[i];
        largest = !(error <= largest) ? error : largest;
        before = state.loss_sum;
    }
    printf("%s %s level %s: forecasts %.2g, gradients %.2g (%s), losses %.2g\n", c->backend, ps_precision_name(c->precision), level,
           sqrt(delta / norm), gradient, f.model->layout->table[worst].name, largest);
    ck_assert_double_le(sqrt(delta / norm), bounds[c->precision].forecasts);
    ck_assert_double_le(gradient, bounds[c->precision].gradients);
    ck_assert_double_le(largest, bounds[c->precision].losses);

    ps_optimizer_close(&optimizer);
    f.device->release(f.device, memory, order_bytes);
    f.device->release(f.device, windows.inputs.data, (size_t)inputs * ps_type_bytes(type));
    f.device->release(f.device, windows.targets.data, (size_t)targets * ps_type_bytes(type));
    fixture_close(&f);
    double *all[] = {parameters, expected, x, y, forecast, loss, got, gradients, rates};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        free(all[i]);
    }
    free(order);
}

static const struct golden_case cases[] = {
    {"reference", "cpu", PS_FP64, PS_LEVEL_NONE}, {"reference", "cpu", PS_FP64, PS_LEVEL_GEMM},
    {"reference", "cpu", PS_FP32, PS_LEVEL_GEMM}, {"cpu", "cpu", PS_FP32, PS_LEVEL_NONE},
    {"cpu", "cpu", PS_FP32, PS_LEVEL_GEMM},       {"cuda", "cuda", PS_FP32, PS_LEVEL_NONE},
    {"cuda", "cuda", PS_FP32, PS_LEVEL_GEMM},
};
enum { CPU_CASES = 5, CASES = sizeof cases / sizeof *cases };

START_TEST(golden)
{
    compare(&cases[_i]);
}
END_TEST

int main(void)
{
    char path[4096];
    const char *source = getenv("PS_SOURCE");
    snprintf(path, sizeof path, "%s/tests/fixtures/golden.h5", source ? source : ".");
    file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
    if (file < 0) {
        fprintf(stderr, "%s: cannot open: set PS_SOURCE to the project's root\n", path);
        return 1;
    }
    int gpu = ps_cuda_device_count() > 0;
    if (!gpu) {
        printf("skipped: PyTorch against CUDA: no CUDA device\n");
    }
    Suite *suite = suite_create("golden");
    TCase *tests = tcase_create("golden");
    tcase_set_timeout(tests, 120);
    tcase_add_loop_test(tests, golden, 0, gpu ? CASES : CPU_CASES);
    suite_add_tcase(suite, tests);
    int failed = run_suite(suite, CK_NOFORK);
    H5Fclose(file);
    return failed != 0;
}
