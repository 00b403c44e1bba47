/* The optimiser against a plain loop in double, and the schedules against values worked out by hand. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/philox.h"
#include "optim/optimizer.h"
#include "optim/schedule.h"
#include "tests/real16.h"
#include "tests/suite.h"

#define OK(expression) ck_assert_msg((expression) == PS_OK, "%s: %s", #expression, ps_error_message())

enum { COUNT = 333, DECAYED = 130, STEPS = 300, WINDOWS = 7 };

static const struct ps_optimizer_options options[] = {
    {.beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8, .weight_decay = 0.02, .clip_norm = 0},
    {.beta1 = 0.8, .beta2 = 0.97, .epsilon = 1e-6, .weight_decay = 0, .clip_norm = 1},
    {.beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8, .weight_decay = 0.1, .clip_norm = 3},
    {.beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8, .weight_decay = 0.1, .clip_norm = 3, .gradient_scale = 4096},
};
enum { OPTIONS = sizeof options / sizeof *options };

/* Gradient of element i at step t, exact in float. Its norm swings a hundredfold, so that clipping is on at some steps
 * and off at others; one element in eleven has none at all. */
static double gradient_at(int t, int i)
{
    double size = pow(10, sin(0.1 * t)) * (1 + i % 5) / 6;
    return i % 11 == 3 ? 0 : (double)(float)(size * (2 * ps_uniform(3, (uint64_t)i, 1, (uint64_t)t) - 0.8));
}

static double start_at(int i)
{
    return (double)(float)(2 * ps_uniform(4, (uint64_t)i, 2, 0) - 1);
}

static double rate_at(int t)
{
    return 2e-3 * (1 + cos(0.02 * t));
}

/* Loshchilov and Hutter 2019, algorithm 2, with the gradient's norm clipped first. *clipped: at how many steps it was. */
static void plain_adamw(const struct ps_optimizer_options *o, double *theta, int *clipped)
{
    static double m[COUNT], v[COUNT];
    memset(m, 0, sizeof m);
    memset(v, 0, sizeof v);
    *clipped = 0;
    for (int t = 1; t <= STEPS; t++) {
        double squares = 0, share = 1;
        for (int i = 0; i < COUNT; i++) {
            squares += gradient_at(t - 1, i) * gradient_at(t - 1, i);
        }
        if (o->clip_norm > 0 && sqrt(squares) > o->clip_norm) {
            share = o->clip_norm / sqrt(squares);
            ++*clipped;
        }
        for (int i = 0; i < COUNT; i++) {
            double g = gradient_at(t - 1, i) * share;
            m[i] = o->beta1 * m[i] + (1 - o->beta1) * g;
            v[i] = o->beta2 * v[i] + (1 - o->beta2) * g * g;
            double step = m[i] / (1 - pow(o->beta1, t)) / (sqrt(v[i] / (1 - pow(o->beta2, t))) + o->epsilon);
            theta[i] -= rate_at(t - 1) * (step + (i < DECAYED ? o->weight_decay * theta[i] : 0));
        }
    }
}

static double get(enum ps_type type, const void *values, int i)
{
    return type == PS_F64 ? ((const double *)values)[i] : (double)((const float *)values)[i];
}

static void put(enum ps_type type, void *values, int i, double value)
{
    if (type == PS_F64) {
        ((double *)values)[i] = value;
    } else {
        ((float *)values)[i] = (float)value;
    }
}

static void compare(const char *backend, const char *device_kind, enum ps_precision precision, double bound,
                    const struct ps_optimizer_options *o)
{
    struct ps_device *device;
    struct ps_kernels *k;
    OK(ps_device_open(device_kind, 2, &device));
    OK(ps_kernels_open(backend, device, precision, &(struct ps_kernels_options){.tiny_gemm = 1}, &k));
    size_t bytes = COUNT * ps_type_bytes(k->parameter), copy_bytes = COUNT * ps_type_bytes(k->real);
    void *theta, *weights, *gradients;
    struct ps_step_state *state;
    OK(device->allocate(device, bytes, &theta));
    OK(device->allocate(device, bytes, &gradients));
    weights = theta;
    if (k->real != k->parameter) {
        OK(device->allocate(device, copy_bytes, &weights));
    }
    OK(device->allocate(device, sizeof *state, (void **)&state));
    double rates[STEPS], host[COUNT], expected[COUNT];
    for (int t = 0; t < STEPS; t++) {
        rates[t] = rate_at(t);
    }
    struct ps_optimizer optimizer;
    OK(ps_optimizer_open(k, COUNT, DECAYED, o, rates, STEPS, &optimizer));
    memset(rates, 0, sizeof rates); /* the table is the device's by now */
    for (int i = 0; i < COUNT; i++) {
        expected[i] = start_at(i);
        put(k->parameter, host, i, expected[i]);
    }
    OK(device->upload(device, PS_COMPUTE, theta, host, bytes));
    for (int t = 0; t < STEPS; t++) {
        for (int i = 0; i < COUNT; i++) {
            put(k->parameter, host, i, gradient_at(t, i) * (o->gradient_scale > 0 ? o->gradient_scale : 1));
        }
        OK(device->upload(device, PS_COMPUTE, gradients, host, bytes));
        OK(ps_optimizer_step(&optimizer, theta, weights, gradients, state, WINDOWS));
    }
    int clipped;
    plain_adamw(o, expected, &clipped);
    ck_assert_msg(o->clip_norm == 0 || (clipped > STEPS / 10 && clipped < STEPS), "clipped at %d of %d steps", clipped, STEPS);
    OK(device->download(device, PS_COMPUTE, host, theta, bytes));
    double delta = 0, norm = 0;
    for (int i = 0; i < COUNT; i++) {
        double d = get(k->parameter, host, i) - expected[i];
        delta += d * d;
        norm += expected[i] * expected[i];
    }
    double error = sqrt(delta / norm);
    printf("adamw, %s %s, clip_norm %g: relative error after %d steps %.2g (clipped at %d)\n", backend,
           ps_precision_name(precision), o->clip_norm, STEPS, error, clipped);
    ck_assert_msg(error <= bound, "relative error %.3g", error);
    if (weights != theta) {
        uint16_t copy[COUNT];
        OK(device->download(device, PS_COMPUTE, copy, weights, copy_bytes));
        for (int i = 0; i < COUNT; i++) {
            double value = k->real == PS_F16 ? fp16_value(copy[i]) : bf16_value(copy[i]);
            ck_assert_msg(value == rounded_to(k->real, get(k->parameter, host, i)),
                          "the copy of parameter %d is %g, not %g rounded", i, value, get(k->parameter, host, i));
        }
        device->release(device, weights, copy_bytes);
    }
    OK(device->download(device, PS_COMPUTE, host, gradients, bytes));
    for (int i = 0; i < COUNT; i++) {
        ck_assert_msg(get(k->parameter, host, i) == 0, "gradient %d is left at %g", i, get(k->parameter, host, i));
    }
    struct ps_step_state end;
    OK(device->download(device, PS_COMPUTE, &end, state, sizeof end));
    ck_assert_uint_eq(end.step, STEPS);
    ck_assert_uint_eq(end.cursor, STEPS * WINDOWS);
    ps_optimizer_close(&optimizer);
    device->release(device, theta, bytes);
    device->release(device, gradients, bytes);
    device->release(device, state, sizeof *state);
    k->close(k); /* a table may hold a workspace */
    ck_assert_uint_eq(device->counters.bytes, 0);
    device->close(device);
}

START_TEST(adamw)
{
    compare("reference", "cpu", PS_FP64, 1e-13, &options[_i]);
    compare("reference", "cpu", PS_FP32, 1e-6, &options[_i]);
    compare("cpu", "cpu", PS_FP32, 1e-6, &options[_i]);
}
END_TEST

START_TEST(adamw_cuda)
{
    compare("cuda", "cuda", PS_FP32, 1e-6, &options[_i]);
    compare("cuda", "cuda", PS_TF32, 1e-6, &options[_i]);
    compare("cuda", "cuda", PS_PRECISION_BF16, 1e-6, &options[_i]);
    compare("cuda", "cuda", PS_FP16, 1e-6, &options[_i]);
}
END_TEST

/* ---- gradients that are not finite ---- */

enum { BAD = 3 }; /* the step of one */

/* What the optimiser holds. */
struct held {
    float theta[COUNT], m[COUNT];
    double v[COUNT];
    uint16_t copy[COUNT];
    struct ps_step_state state;
};

/* What is not finite at the step BAD. */
enum spoilt { NOTHING, NAN_ALONE, INFINITY_ALONE, BOTH };

static int is_spoilt(enum spoilt spoilt, int i)
{
    return (i == 5 && (spoilt & NAN_ALONE)) || (i == COUNT - 1 && (spoilt & INFINITY_ALONE));
}

/* The gradients of a step: those of compare, at the step BAD spoilt. */
static void spoil(float *gradients, int t, enum spoilt spoilt)
{
    for (int i = 0; i < COUNT; i++) {
        gradients[i] = t != BAD || !is_spoilt(spoilt, i) ? (float)gradient_at(t, i) : i == 5 ? NAN : -INFINITY;
    }
}

/* held[t]: after t steps of 6. */
static void run_spoilt(const char *backend, const char *device_kind, enum ps_precision precision,
                       const struct ps_optimizer_options *o, enum spoilt spoilt, struct held held[7])
{
    struct ps_device *device;
    struct ps_kernels *k;
    OK(ps_device_open(device_kind, 2, &device));
    OK(ps_kernels_open(backend, device, precision, &(struct ps_kernels_options){.tiny_gemm = 1}, &k));
    void *theta, *weights, *gradients;
    struct ps_step_state *state;
    size_t bytes = COUNT * sizeof(float);
    OK(device->allocate(device, bytes, &theta));
    OK(device->allocate(device, bytes, &gradients));
    OK(device->allocate(device, sizeof held->copy, &weights));
    OK(device->allocate(device, sizeof *state, (void **)&state));
    double rates[STEPS];
    float host[COUNT];
    for (int t = 0; t < STEPS; t++) {
        rates[t] = rate_at(t);
    }
    for (int i = 0; i < COUNT; i++) {
        host[i] = (float)start_at(i);
    }
    struct ps_optimizer optimizer;
    OK(ps_optimizer_open(k, COUNT, DECAYED, o, rates, STEPS, &optimizer));
    OK(device->upload(device, PS_COMPUTE, theta, host, bytes));
    memset(held, 0, 7 * sizeof *held);
    for (int t = 0; t <= 6; t++) {
        OK(device->download(device, PS_COMPUTE, held[t].theta, theta, bytes));
        OK(device->download(device, PS_COMPUTE, held[t].m, optimizer.m, bytes));
        OK(device->download(device, PS_COMPUTE, held[t].v, optimizer.v, sizeof held->v));
        OK(device->download(device, PS_COMPUTE, held[t].copy, weights, sizeof held->copy));
        OK(device->download(device, PS_COMPUTE, &held[t].state, state, sizeof *state));
        OK(device->download(device, PS_COMPUTE, host, gradients, bytes));
        for (int i = 0; i < COUNT; i++) {
            ck_assert_msg(host[i] == 0, "gradient %d is left at %g after %d steps", i, (double)host[i], t);
        }
        spoil(host, t, spoilt);
        OK(device->upload(device, PS_COMPUTE, gradients, host, bytes));
        OK(ps_optimizer_step(&optimizer, theta, k->real == k->parameter ? theta : weights, gradients, state, WINDOWS));
    }
    ps_optimizer_close(&optimizer);
    device->release(device, theta, bytes);
    device->release(device, gradients, bytes);
    device->release(device, weights, sizeof held->copy);
    device->release(device, state, sizeof *state);
    k->close(k);
    device->close(device);
}

static void expect_held(const struct held *a, const struct held *b, const char *what)
{
    ck_assert_msg(memcmp(a->theta, b->theta, sizeof a->theta) == 0, "%s: the parameters differ", what);
    ck_assert_msg(memcmp(a->m, b->m, sizeof a->m) == 0, "%s: m differs", what);
    ck_assert_msg(memcmp(a->v, b->v, sizeof a->v) == 0, "%s: v differs", what);
    ck_assert_msg(memcmp(a->copy, b->copy, sizeof a->copy) == 0, "%s: the copy differs", what);
}

static void nonfinite_by(const char *backend, const char *device_kind, enum ps_precision precision, struct ps_optimizer_options o,
                         enum spoilt by)
{
    static struct held plain[7], spoilt[7];
    run_spoilt(backend, device_kind, precision, &o, NOTHING, plain);
    run_spoilt(backend, device_kind, precision, &o, by, spoilt);
    expect_held(&plain[BAD], &spoilt[BAD], "before the step");
    ck_assert_uint_eq(spoilt[BAD].state.nonfinite, 0);
    /* The step that is spoilt says so, and m says where; then nothing changes but the counters. */
    for (int t = BAD + 1; t <= 6; t++) {
        ck_assert_uint_eq(spoilt[t].state.nonfinite, BAD + 1);
        ck_assert_uint_eq(spoilt[t].state.step, (uint64_t)t);
        ck_assert_uint_eq(spoilt[t].state.skipped, 0);
        expect_held(&spoilt[BAD + 1], &spoilt[t], "after the step");
    }
    for (int i = 0; i < COUNT; i++) {
        ck_assert_msg(is_spoilt(by, i) == !isfinite(spoilt[6].m[i]), "m[%d] is %g", i, (double)spoilt[6].m[i]);
    }
    /* Left out, it changes nothing, and the next ones go on. */
    o.skip_nonfinite = 1;
    run_spoilt(backend, device_kind, precision, &o, NOTHING, spoilt);
    expect_held(&plain[6], &spoilt[6], "with nothing to skip");
    ck_assert_uint_eq(spoilt[6].state.skipped, 0);
    run_spoilt(backend, device_kind, precision, &o, by, spoilt);
    expect_held(&plain[BAD], &spoilt[BAD + 1], "the step that is left out");
    ck_assert_uint_eq(spoilt[BAD].state.skipped, 0);
    for (int t = BAD + 1; t <= 6; t++) {
        ck_assert_uint_eq(spoilt[t].state.skipped, 1);
        ck_assert_uint_eq(spoilt[t].state.nonfinite, 0);
        ck_assert_uint_eq(spoilt[t].state.step, (uint64_t)t);
        ck_assert(t == BAD + 1 || memcmp(spoilt[t].theta, spoilt[t - 1].theta, sizeof spoilt->theta) != 0);
    }
    for (int i = 0; i < COUNT; i++) {
        ck_assert(isfinite(spoilt[6].theta[i]) && isfinite(spoilt[6].m[i]) && isfinite(spoilt[6].v[i]));
    }
}

static void nonfinite(const char *backend, const char *device_kind, enum ps_precision precision, struct ps_optimizer_options o)
{
    for (enum spoilt by = NAN_ALONE; by <= BOTH; by++) {
        nonfinite_by(backend, device_kind, precision, o, by);
    }
}

START_TEST(adamw_nonfinite)
{
    nonfinite("reference", "cpu", PS_FP32, options[_i]);
    nonfinite("cpu", "cpu", PS_FP32, options[_i]);
}
END_TEST

START_TEST(adamw_nonfinite_cuda)
{
    nonfinite("cuda", "cuda", PS_FP32, options[_i]);
    nonfinite("cuda", "cuda", PS_PRECISION_BF16, options[_i]);
    nonfinite("cuda", "cuda", PS_FP16, options[_i]);
}
END_TEST

/* ---- schedules ---- */

static void expect_rates(const struct ps_schedule *schedule, const double *expected, int n)
{
    double rates[64];
    ck_assert_int_eq(schedule->steps_per_epoch * schedule->epochs, n);
    ps_schedule_fill(schedule, rates);
    for (int i = 0; i < n; i++) {
        ck_assert_msg(fabs(rates[i] - expected[i]) <= 1e-11 * schedule->lr, "step %d: %.15g, not %.15g", i, rates[i], expected[i]);
    }
}

START_TEST(constant)
{
    const struct ps_schedule schedule = {.kind = PS_SCHEDULE_CONSTANT, .lr = 3e-4, .steps_per_epoch = 3, .epochs = 2};
    expect_rates(&schedule, (double[]){3e-4, 3e-4, 3e-4, 3e-4, 3e-4, 3e-4}, 6);
}
END_TEST

/* The authors' adjust_learning_rate, called with e after epoch e (from 1), sets lr 0.9^(e - 3) from e = 3 on for the epoch that
 * follows. */
START_TEST(type3)
{
    const struct ps_schedule schedule = {.kind = PS_SCHEDULE_TYPE3, .lr = 1e-3, .steps_per_epoch = 2, .epochs = 7};
    expect_rates(&schedule,
                 (double[]){1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 9e-4, 9e-4, 8.1e-4, 8.1e-4, 7.29e-4, 7.29e-4}, 14);
}
END_TEST

START_TEST(cosine)
{
    /* Warm-up 1/4, 2/4, 3/4, 1; then five rates of half a cosine from 1 to 0.2, both ends included. */
    const double s = sqrt(0.5);
    struct ps_schedule schedule = {
        .kind = PS_SCHEDULE_COSINE, .lr = 1, .warmup_steps = 4, .min_lr = 0.2, .steps_per_epoch = 3, .epochs = 3};
    expect_rates(&schedule, (double[]){0.25, 0.5, 0.75, 1, 1, 0.6 + 0.4 * s, 0.6, 0.6 - 0.4 * s, 0.2}, 9);
    schedule.warmup_steps = 0;
    schedule.epochs = 1;
    expect_rates(&schedule, (double[]){1, 0.6, 0.2}, 3);
    schedule.steps_per_epoch = 1;
    expect_rates(&schedule, (double[]){1}, 1);
    schedule.steps_per_epoch = 2;
    schedule.warmup_steps = 5; /* longer than the run */
    expect_rates(&schedule, (double[]){0.2, 0.4}, 2);
}
END_TEST

/* torch.optim.lr_scheduler.OneCycleLR(max_lr, total_steps, pct_start), its other arguments left alone. */
START_TEST(onecycle)
{
    const double ten[] = {4e-05,
                          0.00052,
                          0.001,
                          0.0009504846320135,
                          0.0008117456539498,
                          0.0006112620219363,
                          0.0003887419780637,
                          0.0001882583460502,
                          4.951936798653e-05,
                          4e-09};
    const double thirteen[] = {0.0008,
                               0.008732977494397,
                               0.01942104915954,
                               0.01970941933659,
                               0.01845190704783,
                               0.01632446845814,
                               0.01354607468623,
                               0.01040269779046,
                               0.007217876489534,
                               0.004319415255278,
                               0.002005644343676,
                               0.0005147135219862,
                               8e-08};
    const struct ps_schedule schedules[] = {
        {.kind = PS_SCHEDULE_ONECYCLE, .lr = 1e-3, .pct_start = 0.3, .steps_per_epoch = 5, .epochs = 2},
        {.kind = PS_SCHEDULE_ONECYCLE, .lr = 0.02, .pct_start = 0.25, .steps_per_epoch = 13, .epochs = 1},
    };
    expect_rates(&schedules[0], ten, 10);
    expect_rates(&schedules[1], thirteen, 13);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("optim");
    TCase *tests = tcase_create("optim");
    tcase_set_timeout(tests, 300);
    tcase_add_loop_test(tests, adamw, 0, OPTIONS);
    tcase_add_loop_test(tests, adamw_nonfinite, 0, OPTIONS);
    if (ps_cuda_device_count() > 0) {
        tcase_add_loop_test(tests, adamw_cuda, 0, OPTIONS);
        tcase_add_loop_test(tests, adamw_nonfinite_cuda, 0, OPTIONS);
    } else {
        printf("skipped: AdamW on CUDA: no CUDA device\n");
    }
    tcase_add_test(tests, constant);
    tcase_add_test(tests, type3);
    tcase_add_test(tests, cosine);
    tcase_add_test(tests, onecycle);
    suite_add_tcase(suite, tests);
    return run_suite(suite, CK_NOFORK) != 0; /* CUDA and OpenMP do not survive a fork */
}
