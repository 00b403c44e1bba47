/* The double reference, which all other tables are compared with, against the definitions of kernels.h: values computed here, and
 * slopes for what goes backward. */
#include <complex.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/philox.h"
#include "tests/reference.h"
#include "tests/suite.h"

/* Calls an entry of the double reference. */
#define CALL(name, ...) \
    ck_assert_msg(oracle.kernels->name(oracle.kernels, &(struct ps_##name){__VA_ARGS__}) == PS_OK, "%s", ps_error_message())

/* d/dh of f(x + h direction) at h = 0, five-point stencil (error h^4). */
static double slope(double (*f)(const double *x), const double *x, const double *direction, int n)
{
    static const double h = 1e-3, weight[] = {1, -8, 8, -1}, at[] = {-2, -1, 1, 2};
    double sum = 0, moved[256];
    ck_assert_int_le(n, 256);
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < n; j++) {
            moved[j] = x[j] + at[i] * h * direction[j];
        }
        sum += weight[i] * f(moved);
    }
    return sum / (12 * h);
}

static double dot(const double *a, const double *b, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++) {
        sum += a[i] * b[i];
    }
    return sum;
}

/* A scalar of the outputs, so that dy of each backward is `upstream`. */
enum { R = 4, D = 6 };
static double upstream[R * D];

/* x [R, D], gamma [D], beta [D] */
static double layernorm_scalar(const double *x)
{
    double y[R * D], mean[R], rstd[R];
    double *in = (double *)(uintptr_t)x;
    CALL(layernorm, matrix(y, R, D), vector(mean, R), vector(rstd, R), matrix(in, R, D), vector(in + R * D, D),
         vector(in + R * D + D, D), 1e-5);
    return dot(y, upstream, R * D);
}

START_TEST(test_layernorm_definition)
{
    double x[R * D + 2 * D], direction[R * D + 2 * D], gradient[R * D + 2 * D] = {0}, y[R * D], mean[R], rstd[R];
    double masked[R * D], bias[D];
    fill_normal(x, R * D + 2 * D, 1);
    fill_normal(direction, R * D + 2 * D, 2);
    fill_normal(upstream, R * D, 3);
    CALL(layernorm, matrix(y, R, D), vector(mean, R), vector(rstd, R), matrix(x, R, D), vector(x + R * D, D),
         vector(x + R * D + D, D), 1e-5);
    for (int r = 0; r < R; r++) {
        double sum = 0, squares = 0;
        for (int i = 0; i < D; i++) {
            sum += x[r * D + i] / D;
        }
        for (int i = 0; i < D; i++) {
            squares += pow(x[r * D + i] - sum, 2) / D;
        }
        expect_close(mean[r], sum, 1e-13);
        expect_close(rstd[r], 1 / sqrt(squares + 1e-5), 1e-13);
        for (int i = 0; i < D; i++) {
            expect_close(y[r * D + i], (x[r * D + i] - sum) / sqrt(squares + 1e-5) * x[R * D + i] + x[R * D + D + i], 1e-12);
        }
    }
    for (int i = 0; i < D; i++) {
        bias[i] = 3;
    }
    CALL(layernorm_backward, matrix(gradient, R, D), vector(gradient + R * D, D), vector(gradient + R * D + D, D),
         matrix(upstream, R, D), matrix(x, R, D), vector(mean, R), vector(rstd, R), vector(x + R * D, D), {0}, matrix(masked, R, D),
         vector(bias, D), {0});
    for (int i = 0; i < D; i++) {
        double sum = 3;
        for (int r = 0; r < R; r++) {
            ck_assert(masked[r * D + i] == gradient[r * D + i]);
            sum += masked[r * D + i];
        }
        expect_close(bias[i], sum, 1e-13);
    }
    expect_close(dot(gradient, direction, R * D + 2 * D), slope(layernorm_scalar, x, direction, R * D + 2 * D), 1e-8);
}
END_TEST

/* x [R, D], gamma [D] */
static double rmsnorm_scalar(const double *x)
{
    double y[R * D], rstd[R];
    double *in = (double *)(uintptr_t)x;
    CALL(layernorm, matrix(y, R, D), {0}, vector(rstd, R), matrix(in, R, D), vector(in + R * D, D), {0}, 1e-5);
    return dot(y, upstream, R * D);
}

START_TEST(test_rmsnorm_definition)
{
    double x[R * D + D], direction[R * D + D], gradient[R * D + D] = {0}, y[R * D], rstd[R], addend[R * D], sums[R * D];
    fill_normal(x, R * D + D, 20);
    fill_normal(direction, R * D + D, 21);
    fill_normal(upstream, R * D, 22);
    fill_normal(addend, R * D, 23);
    CALL(layernorm, matrix(y, R, D), {0}, vector(rstd, R), matrix(x, R, D), vector(x + R * D, D), {0}, 1e-5);
    for (int i = 0; i < R * D; i++) {
        double rms = sqrt(dot(x + i / D * D, x + i / D * D, D) / D + 1e-5);
        expect_close(rstd[i / D], 1 / rms, 1e-13);
        expect_close(y[i], x[i] / rms * x[R * D + i % D], 1e-13);
    }
    struct ps_tensor dgamma = vector(gradient + R * D, D), dy = matrix(upstream, R, D), in = matrix(x, R, D);
    CALL(layernorm_backward, matrix(gradient, R, D), dgamma, {0}, dy, in, {0}, vector(rstd, R), vector(x + R * D, D), {0}, {0}, {0},
         {0});
    expect_close(dot(gradient, direction, R * D + D), slope(rmsnorm_scalar, x, direction, R * D + D), 1e-8);
    CALL(layernorm_backward, matrix(sums, R, D), dgamma, {0}, dy, in, {0}, vector(rstd, R), vector(x + R * D, D),
         matrix(addend, R, D), {0}, {0}, {0});
    for (int i = 0; i < R * D; i++) {
        expect_close(sums[i], gradient[i] + addend[i], 1e-14);
    }
}
END_TEST

/* x [R, D], gamma [D], beta [D] */
static double batchnorm_scalar(const double *x)
{
    double y[R * D], mean[D], var[D], running[2 * D] = {0};
    double *in = (double *)(uintptr_t)x;
    CALL(batchnorm_statistics, vector(mean, D), vector(var, D), vector(running, D), vector(running + D, D), matrix(in, R, D), 0.1);
    CALL(batchnorm, matrix(y, R, D), matrix(in, R, D), vector(mean, D), vector(var, D), vector(in + R * D, D),
         vector(in + R * D + D, D), 1e-5);
    return dot(y, upstream, R * D);
}

/* Rows that two ranks share, and another that has none: their statistics joined, and their gradients by the means of all rows, are
 * those of the rows together. */
START_TEST(test_batchnorm_shared)
{
    enum { HERE = (R + 1) / 2, PARTS = 3 };
    const struct ps_shares shares = {R, HERE, PARTS};
    double x[R * D + D], mean[D], var[D], running[2 * D] = {0}, parts[PARTS * 2 * D], joined[2 * D], moved[2 * D] = {0};
    double gradient[R * D + 2 * D] = {0}, shared[R * D + 2 * D] = {0}, means[2 * D], sums[2 * D] = {0};
    fill_normal(x, R * D + D, 28);
    fill_normal(upstream, R * D, 29);
    struct ps_tensor gamma = vector(x + R * D, D), none = {0};
    CALL(batchnorm_statistics, vector(mean, D), vector(var, D), vector(running, D), vector(running + D, D), matrix(x, R, D), 0.1);
    CALL(batchnorm_backward, matrix(gradient, R, D), vector(gradient + R * D, D), vector(gradient + R * D + D, D), none,
         matrix(upstream, R, D), none, matrix(x, R, D), vector(mean, D), vector(var, D), gamma, .epsilon = 1e-5);
    for (int p = 0; p < PARTS; p++) {
        int64_t first = ps_share_begin(&shares, p), n = ps_share_count(&shares, p);
        for (int i = 0; i < 2 * D && n == 0; i++) {
            parts[p * 2 * D + i] = NAN;
        }
        if (n > 0) {
            double *part = parts + p * 2 * D;
            CALL(batchnorm_statistics, vector(part, D), vector(part + D, D), vector(moved, D), vector(moved + D, D),
                 matrix(x + first * D, n, D), 0);
            CALL(batchnorm_backward, none, vector(shared + R * D, D), vector(shared + R * D + D, D), none,
                 matrix(upstream + first * D, n, D), none, matrix(x + first * D, n, D), vector(mean, D), vector(var, D), gamma,
                 none, matrix(means, 2, D), .epsilon = 1e-5, .rows = R);
            for (int i = 0; i < 2 * D; i++) {
                sums[i] += means[i];
            }
        }
    }
    ck_assert(moved[0] == 0 && moved[D] == 0);
    CALL(batchnorm_join, vector(joined, D), vector(joined + D, D), vector(moved, D), vector(moved + D, D),
         ps_tensor_3d(parts, PS_F64, PARTS, 2, D), shares, 1, 0.1);
    for (int p = 0; p < PARTS; p++) {
        int64_t first = ps_share_begin(&shares, p), n = ps_share_count(&shares, p);
        if (n > 0) {
            CALL(batchnorm_backward, matrix(shared + first * D, n, D), vector(shared + R * D, D), vector(shared + R * D + D, D),
                 none, matrix(upstream + first * D, n, D), none, matrix(x + first * D, n, D), vector(mean, D), vector(var, D),
                 gamma, none, matrix(sums, 2, D), .epsilon = 1e-5);
        }
    }
    for (int i = 0; i < D; i++) {
        expect_close(joined[i], mean[i], 1e-14);
        expect_close(joined[D + i], var[i], 1e-14);
        expect_close(moved[i], running[i], 1e-14);
        expect_close(moved[D + i], running[D + i], 1e-14);
    }
    for (int i = 0; i < R * D + 2 * D; i++) {
        expect_close(shared[i], gradient[i], 1e-13);
    }
}
END_TEST

START_TEST(test_batchnorm_definition)
{
    double x[R * D + 2 * D], direction[R * D + 2 * D], y[R * D], mean[D], var[D], running[2 * D], before[2 * D];
    fill_normal(x, R * D + 2 * D, 24);
    fill_normal(direction, R * D + 2 * D, 25);
    fill_normal(upstream, R * D, 26);
    fill_normal(running, 2 * D, 27);
    memcpy(before, running, sizeof running);
    struct ps_tensor in = matrix(x, R, D), gamma = vector(x + R * D, D), beta = vector(x + R * D + D, D);
    CALL(batchnorm_statistics, vector(mean, D), vector(var, D), vector(running, D), vector(running + D, D), in, 0.1);
    CALL(batchnorm, matrix(y, R, D), in, vector(mean, D), vector(var, D), gamma, beta, 1e-5);
    for (int i = 0; i < D; i++) {
        double sum = 0, squares = 0;
        for (int r = 0; r < R; r++) {
            sum += x[r * D + i] / R;
            for (int other = 0; other < R; other++) { /* the variance is half the mean square of differences */
                squares += pow(x[r * D + i] - x[other * D + i], 2) / (2 * R * R);
            }
        }
        expect_close(mean[i], sum, 1e-14);
        expect_close(var[i], squares, 1e-14);
        expect_close(running[i], 0.9 * before[i] + 0.1 * sum, 1e-14);
        expect_close(running[D + i], 0.9 * before[D + i] + 0.1 * squares * R / (R - 1), 1e-14);
        for (int r = 0; r < R; r++) {
            expect_close(y[r * D + i], (x[r * D + i] - sum) / sqrt(squares + 1e-5) * x[R * D + i] + x[R * D + D + i], 1e-13);
        }
    }
    /* The gradient of y, whether it comes as one or as two; then with an addend. */
    double part[R * D], rest[R * D], plain[R * D];
    fill_normal(part, R * D, 28);
    for (int i = 0; i < R * D; i++) {
        rest[i] = upstream[i] - part[i];
    }
    for (int i = 0; i < 3; i++) {
        double gradient[R * D + 2 * D] = {0};
        CALL(batchnorm_backward, matrix(gradient, R, D), vector(gradient + R * D, D), vector(gradient + R * D + D, D),
             (struct ps_tensor){0}, matrix(i == 1 ? part : upstream, R, D), i == 1 ? matrix(rest, R, D) : (struct ps_tensor){0}, in,
             vector(mean, D), vector(var, D), gamma, i == 2 ? matrix(part, R, D) : (struct ps_tensor){0}, .epsilon = 1e-5);
        for (int j = 0; j < R * D; j++) {
            plain[j] = i == 0 ? gradient[j] : plain[j];
            expect_close(gradient[j], plain[j] + (i == 2 ? part[j] : 0), 1e-12);
            gradient[j] = plain[j];
        }
        expect_close(dot(gradient, direction, R * D + 2 * D), slope(batchnorm_scalar, x, direction, R * D + 2 * D), 1e-8);
    }
}
END_TEST

/* The two that it is made of. */
START_TEST(test_bias_residual_statistics_definition)
{
    double x[R * D + D], residual[R * D], y[2][R * D], mean[2][D], var[2][D], running[2][2 * D] = {{0}};
    struct ps_step_state state = {.step = 5};
    const struct ps_dropout dropout = ps_dropout_make(0.3, 9, 2, &state);
    fill_normal(x, R * D + D, 29);
    fill_normal(residual, R * D, 30);
    CALL(bias_residual_statistics, matrix(y[0], R, D), vector(mean[0], D), vector(var[0], D), vector(running[0], D),
         vector(running[0] + D, D), matrix(x, R, D), vector(x + R * D, D), matrix(residual, R, D), dropout, 0.1);
    CALL(bias_residual_add, matrix(y[1], R, D), matrix(x, R, D), vector(x + R * D, D), matrix(residual, R, D), dropout);
    CALL(batchnorm_statistics, vector(mean[1], D), vector(var[1], D), vector(running[1], D), vector(running[1] + D, D),
         matrix(y[1], R, D), 0.1);
    ck_assert_mem_eq(y[0], y[1], sizeof y[0]);
    ck_assert_mem_eq(mean[0], mean[1], sizeof mean[0]);
    ck_assert_mem_eq(var[0], var[1], sizeof var[0]);
    ck_assert_mem_eq(running[0], running[1], sizeof running[0]);
}
END_TEST

/* A column that is not finite leaves its running statistics as they were, and no others; the CPU's kernels too. One row is refused.
 */
START_TEST(test_running_statistics_finite)
{
    enum { ROWS = 300, COLUMNS = 20 };
    static float x[ROWS * COLUMNS], mean[COLUMNS], var[COLUMNS], running_mean[COLUMNS], running_var[COLUMNS];
    static const char *const backends[] = {"reference", "cpu"};
    for (int b = 0; b < LENGTH(backends); b++) {
        struct ps_device *device;
        struct ps_kernels *k;
        ck_assert_int_eq(ps_device_open("cpu", 1, &device), PS_OK);
        ck_assert_int_eq(ps_kernels_open(backends[b], device, PS_FP32, NULL, &k), PS_OK);
        for (int i = 0; i < ROWS * COLUMNS; i++) {
            x[i] = (float)(i / COLUMNS % 2);
        }
        x[200 * COLUMNS + 3] = INFINITY;
        x[17 * COLUMNS + 9] = NAN;
        for (int i = 0; i < COLUMNS; i++) {
            running_mean[i] = running_var[i] = 3;
        }
        struct ps_batchnorm_statistics a = {ps_tensor_1d(mean, PS_F32, COLUMNS),         ps_tensor_1d(var, PS_F32, COLUMNS),
                                            ps_tensor_1d(running_mean, PS_F32, COLUMNS), ps_tensor_1d(running_var, PS_F32, COLUMNS),
                                            ps_tensor_2d(x, PS_F32, ROWS, COLUMNS),      0.5};
        ck_assert_int_eq(k->batchnorm_statistics(k, &a), PS_OK);
        for (int i = 0; i < COLUMNS; i++) {
            int finite = i != 3 && i != 9;
            ck_assert_int_eq(isfinite(mean[i]) && isfinite(var[i]), finite);
            ck_assert_float_eq_tol(running_mean[i], finite ? 1.75f : 3, 1e-6f);
            ck_assert_float_eq_tol(running_var[i], finite ? 1.5f + 0.125f * ROWS / (ROWS - 1) : 3, 1e-6f);
        }
        a.x.size[0] = 1;
        ck_assert_int_eq(k->batchnorm_statistics(k, &a), PS_UNSUPPORTED);
        k->close(k);
        device->close(device);
    }
}
END_TEST

/* x [S, h, N, e] as heads of rows; each pair of columns a complex number, turned. */
START_TEST(test_rope_definition)
{
    enum { S = 2, H = 3, N = 4, E = 6, COUNT = S * H * N * E };
    double rows[COUNT], turned[COUNT], back[COUNT], angles[N * E], other[COUNT], again[COUNT];
    fill_normal(rows, COUNT, 31);
    for (int i = 0; i < N * E / 2; i++) {
        double angle = i / (E / 2) * pow(100, -2.0 * (i % (E / 2)) / E);
        angles[2 * i] = cos(angle);
        angles[2 * i + 1] = sin(angle);
    }
    struct ps_tensor x = {.data = rows, .type = PS_F64, .rank = 4, .size = {S, H, N, E}, .stride = {N * H * E, E, H * E, 1}};
    struct ps_tensor y = ps_tensor_nd(turned, PS_F64, 4, x.size), z = x;
    z.data = back;
    CALL(rope, y, x, matrix(angles, N, E), 0);
    for (int i = 0; i < COUNT / 2; i++) {
        int pair = i % (E / 2), n = i / (E / 2) % N, h = i / (E / 2) / N % H, s = i / (E / 2) / N / H;
        const double *from = rows + (s * N + n) * H * E + h * E + 2 * pair;
        double _Complex product = (from[0] + I * from[1]) * cexp(I * (n * pow(100, -2.0 * pair / E)));
        expect_close(turned[2 * i], creal(product), 1e-14);
        expect_close(turned[2 * i + 1], cimag(product), 1e-14);
    }
    CALL(rope, z, y, matrix(angles, N, E), 1);
    for (int i = 0; i < COUNT; i++) {
        expect_close(back[i], rows[i], 1e-14);
    }
    /* Its gradient is its transpose: <u, turn(x)> = <turn'(u), x>. */
    fill_normal(other, COUNT, 32);
    z.data = again;
    CALL(rope, z, ps_tensor_nd(other, PS_F64, 4, x.size), matrix(angles, N, E), 1);
    expect_close(dot(other, turned, COUNT), dot(again, rows, COUNT), 1e-13);
}
END_TEST

/* x [R, D], weight [C], bias [C]; R = 2 C sequences */
enum { C = R / 2 };
static int undone;
static double offsets[C * D];

static double channel_affine_scalar(const double *x)
{
    double y[R * D];
    double *in = (double *)(uintptr_t)x;
    CALL(channel_affine, matrix(y, R, D), matrix(in, R, D), matrix(offsets, C, D), vector(in + R * D, C), vector(in + R * D + C, C),
         C, undone);
    return dot(y, upstream, R * D);
}

START_TEST(test_channel_affine_definition)
{
    double x[R * D + 2 * C], direction[R * D + 2 * C], y[R * D], back[R * D], moved[R * D];
    fill_normal(x, R * D + 2 * C, 33);
    fill_normal(direction, R * D + 2 * C, 34);
    fill_normal(upstream, R * D, 35);
    fill_normal(offsets, C * D, 36);
    const double *weight = x + R * D, *bias = weight + C;
    struct ps_tensor in = matrix(x, R, D), w = vector(x + R * D, C), b = vector(x + R * D + C, C), none = {0};
    struct ps_tensor own = matrix(offsets, C, D), shared = vector(offsets, D);
    CALL(channel_affine, matrix(y, R, D), in, own, w, b, C, 0);
    CALL(channel_affine, matrix(back, R, D), in, shared, w, b, C, 1);
    for (int i = 0; i < R * D; i++) {
        int c = i / D % C;
        expect_close(y[i], (x[i] + offsets[c * D + i % D]) * weight[c] + bias[c], 1e-14);
        expect_close(back[i], (x[i] + offsets[i % D] - bias[c]) / (weight[c] + 1e-10), 1e-14);
        moved[i] = x[i] + offsets[c * D + i % D];
    }
    CALL(channel_affine, matrix(back, R, D), in, none, none, none, C, 1);
    ck_assert_mem_eq(back, x, sizeof back);
    CALL(channel_affine, matrix(back, R, D), in, own, none, none, C, 0);
    ck_assert_mem_eq(back, moved, sizeof back);
    for (undone = 0; undone < 2; undone++) {
        double gradient[R * D + 2 * C] = {0}, sums[2 * C] = {1, 1, 1, 1};
        CALL(channel_affine, matrix(y, R, D), in, own, w, b, C, undone);
        struct ps_tensor kept = matrix(undone ? y : moved, R, D), dy = matrix(upstream, R, D);
        CALL(channel_affine_backward, matrix(gradient, R, D), vector(gradient + R * D, C), vector(gradient + R * D + C, C), dy,
             kept, w, C, undone);
        expect_close(dot(gradient, direction, R * D + 2 * C), slope(channel_affine_scalar, x, direction, R * D + 2 * C), 1e-8);
        CALL(channel_affine_backward, none, vector(sums, C), vector(sums + C, C), dy, kept, w, C, undone);
        for (int i = 0; i < 2 * C; i++) {
            expect_close(sums[i], 1 + gradient[R * D + i], 1e-13);
        }
    }
    /* A weight of 0 is undone as 1e-10. */
    double zeros[2 * C] = {0};
    CALL(channel_affine, matrix(y, R, D), in, none, vector(zeros, C), vector(zeros + C, C), C, 1);
    expect_close(y[0], x[0] * 1e10, 1e-14);
}
END_TEST

/* x [R, D], bias [D]; dropout on, its mask fixed by the state. */
static struct ps_step_state fixed_state = {.step = 5};

static double gelu_scalar(const double *x)
{
    double y[R * D];
    double *in = (double *)(uintptr_t)x;
    CALL(bias_activation, matrix(y, R, D), matrix(in, R, D), vector(in + R * D, D), ps_dropout_make(0.3, 9, 2, &fixed_state),
         PS_GELU_TANH);
    return dot(y, upstream, R * D);
}

START_TEST(test_gelu_definition)
{
    double x[R * D + D], direction[R * D + D], dx[R * D], bias_gradient[D] = {0}, y[R * D];
    fill_normal(x, R * D + D, 4);
    fill_normal(direction, R * D + D, 5);
    fill_normal(upstream, R * D, 6);
    CALL(bias_activation, matrix(y, R, D), matrix(x, R, D), vector(x + R * D, D), {0}, PS_GELU_TANH);
    for (int i = 0; i < R * D; i++) {
        double t = x[i] + x[R * D + i % D];
        expect_close(y[i], 0.5 * t * (1 + tanh(sqrt(2 / M_PI) * (t + 0.044715 * t * t * t))), 1e-14);
    }
    CALL(activation_backward, matrix(dx, R, D), matrix(upstream, R, D), matrix(x, R, D), vector(x + R * D, D),
         ps_dropout_make(0.3, 9, 2, &fixed_state), PS_GELU_TANH);
    CALL(bias_grad, vector(bias_gradient, D), {0}, matrix(dx, R, D), {0});
    expect_close(dot(dx, direction, R * D) + dot(bias_gradient, direction + R * D, D), slope(gelu_scalar, x, direction, R * D + D),
                 1e-8);
}
END_TEST

static enum ps_activation activation;

/* x [R, width], bias [width], of swiglu twice as wide as y */
static double activation_scalar(const double *x)
{
    const int width = activation == PS_SWIGLU ? 2 * D : D;
    double y[R * D];
    double *in = (double *)(uintptr_t)x;
    CALL(bias_activation, matrix(y, R, D), matrix(in, R, width), vector(in + R * width, width),
         ps_dropout_make(0.3, 9, 2, &fixed_state), activation);
    return dot(y, upstream, R * D);
}

/* The integral of exp(-t^2) from 0 to x, by Simpson's rule, times 2/sqrt(pi). */
static double erf_integral(double x)
{
    enum { STEPS = 2000 };
    double sum = 0;
    for (int i = 0; i <= STEPS; i++) {
        double t = x * i / STEPS;
        sum += (i == 0 || i == STEPS ? 1 : i % 2 ? 4 : 2) * exp(-t * t);
    }
    return 2 / sqrt(M_PI) * sum * x / (3 * STEPS);
}

START_TEST(test_activation_definition)
{
    double x[R * 2 * D + 2 * D], direction[R * 2 * D + 2 * D], dx[R * 2 * D], y[R * D];
    fill_normal(x, R * 2 * D + 2 * D, 37);
    fill_normal(direction, R * 2 * D + 2 * D, 38);
    fill_normal(upstream, R * D, 39);
    for (activation = PS_GELU; activation <= PS_SWIGLU; activation++) {
        const int width = activation == PS_SWIGLU ? 2 * D : D, first = width - D;
        double *bias = x + R * width, bias_gradient[2 * D] = {0};
        struct ps_tensor in = matrix(x, R, width);
        CALL(bias_activation, matrix(y, R, D), in, vector(bias, width), {0}, activation);
        for (int i = 0; i < R * D; i++) {
            double t = x[i / D * width + first + i % D] + bias[first + i % D], g = x[i / D * width + i % D] + bias[i % D];
            double right = activation == PS_GELU   ? t * (0.5 + 0.5 * erf_integral(t / sqrt(2)))
                           : activation == PS_RELU ? fmax(t, 0)
                                                   : t * g * (0.5 + 0.5 * tanh(g / 2));
            expect_close(y[i], right, 1e-13);
        }
        CALL(activation_backward, matrix(dx, R, width), matrix(upstream, R, D), in, vector(bias, width),
             ps_dropout_make(0.3, 9, 2, &fixed_state), activation);
        CALL(bias_grad, vector(bias_gradient, width), {0}, matrix(dx, R, width), {0});
        expect_close(dot(dx, direction, R * width) + dot(bias_gradient, direction + R * width, width),
                     slope(activation_scalar, x, direction, R * width + width), 1e-8);
    }
}
END_TEST

START_TEST(test_unary_definition)
{
    double x[] = {-3, -0.5, -0.0, 0, 1e-9, 0.5, 2, NAN}, y[LENGTH(x)];
    CALL(unary, vector(y, LENGTH(x)), vector(x, LENGTH(x)), PS_ERF);
    for (int i = 0; i < LENGTH(x) - 1; i++) {
        expect_close(y[i], erf_integral(x[i]), 1e-13);
    }
    ck_assert(isnan(y[LENGTH(x) - 1]));
    CALL(unary, vector(y, LENGTH(x)), vector(x, LENGTH(x)), PS_MAX_0);
    for (int i = 0; i < LENGTH(x) - 1; i++) {
        ck_assert(y[i] == (i < 4 ? 0 : x[i]));
    }
    ck_assert(isnan(y[LENGTH(x) - 1]));
    CALL(unary, vector(y, LENGTH(x)), vector(x, LENGTH(x)), PS_STEP);
    for (int i = 0; i < LENGTH(x); i++) {
        ck_assert(y[i] == (i >= 4 && i < LENGTH(x) - 1));
    }
}
END_TEST

static double softmax_scalar(const double *x)
{
    double y[R * D];
    CALL(softmax, matrix(y, R, D), matrix((double *)(uintptr_t)x, R, D));
    return dot(y, upstream, R * D);
}

/* The CPU's softmax of rows of every length up to two vectors, all far below zero: a lane beyond the row must not count; and a NaN
 * in a row shows in all of it. */
START_TEST(test_softmax_far)
{
    struct ps_device *device;
    struct ps_kernels *k;
    ck_assert_int_eq(ps_device_open("cpu", 1, &device), PS_OK);
    ck_assert_int_eq(ps_kernels_open("cpu", device, PS_FP32, NULL, &k), PS_OK);
    for (int n = 1; n <= 33; n++) {
        float x[66], y[66];
        double sum = 0;
        for (int i = 0; i < n; i++) {
            x[i] = -200 - (float)(i % 5);
            x[n + i] = i == n / 2 ? NAN : 1;
            sum += exp(-(double)(i % 5));
        }
        const struct ps_softmax a = {.y = ps_tensor_2d(y, PS_F32, 2, n), .x = ps_tensor_2d(x, PS_F32, 2, n)};
        ck_assert_int_eq(k->softmax(k, &a), PS_OK);
        for (int i = 0; i < n; i++) {
            ck_assert_double_eq_tol(y[i], exp(-(double)(i % 5)) / sum, 1e-5);
            ck_assert_msg(isnan(y[n + i]), "of %d elements, one NaN, the softmax of number %d is %g", n, i, (double)y[n + i]);
        }
    }
    k->close(k);
    device->close(device);
}
END_TEST

START_TEST(test_softmax_definition)
{
    double x[R * D], direction[R * D], dx[R * D], y[R * D];
    fill_normal(x, R * D, 7);
    fill_normal(direction, R * D, 8);
    fill_normal(upstream, R * D, 9);
    CALL(softmax, matrix(y, R, D), matrix(x, R, D));
    for (int r = 0; r < R; r++) {
        double sum = 0;
        for (int i = 0; i < D; i++) {
            sum += exp(x[r * D + i]);
        }
        for (int i = 0; i < D; i++) {
            expect_close(y[r * D + i], exp(x[r * D + i]) / sum, 1e-14);
        }
    }
    CALL(softmax_backward, matrix(dx, R, D), matrix(upstream, R, D), matrix(y, R, D), {0});
    expect_close(dot(dx, direction, R * D), slope(softmax_scalar, x, direction, R * D), 1e-8);
    double sums[R * D];
    CALL(softmax_backward, matrix(sums, R, D), matrix(upstream, R, D), matrix(y, R, D), matrix(direction, R, D));
    for (int i = 0; i < R * D; i++) {
        expect_close(sums[i], dx[i] + direction[i], 1e-14);
    }
    /* No overflow: the maximum is subtracted. */
    double large[] = {1000, 1001}, share[2];
    CALL(softmax, matrix(share, 1, 2), matrix(large, 1, 2));
    expect_close(share[1], 1 / (1 + exp(-1)), 1e-14);
    for (int i = 0; i < 2; i++) { /* wherever it stands */
        double one[2] = {i ? 0 : 1001, i ? 1001 : 0};
        CALL(softmax, matrix(share, 1, 2), matrix(one, 1, 2));
        ck_assert(share[i] == 1 && share[1 - i] == 0);
    }
    /* The maximum by itself, as level none takes it: of negative numbers too. */
    double below[] = {-5, -3, -4}, largest;
    CALL(reduce, ps_tensor_1d(&largest, PS_F64, 1), matrix(below, 1, 3), PS_MAX, 0);
    ck_assert(largest == -3);
}
END_TEST

/* x [R, Q D], bias [Q D] */
enum { MOST_Q = 3 };
static double mean[R], deviation[R], targets[R * D];
static struct ps_loss loss;

static double loss_of(const double *x)
{
    const int width = (int)ps_loss_outputs(&loss) * D;
    double dx[R * D * MOST_Q];
    double *in = (double *)(uintptr_t)x;
    struct ps_step_state state = {0};
    CALL(forecast_loss, matrix(dx, R, width), matrix(in, R, width), vector(in + R * width, width), vector(mean, R),
         vector(deviation, R), matrix(targets, R, D), (struct ps_tensor){.data = NULL}, &state, 1, 0, loss);
    return state.loss_sum;
}

/* What a loss is of an error, written down by hand. */
static double loss_by_hand(double e, int q)
{
    switch (loss.kind) {
    case PS_LOSS_MAE:
        return fabs(e);
    case PS_LOSS_HUBER:
        return fabs(e) < loss.delta ? 0.5 * e * e : loss.delta * fabs(e) - 0.5 * loss.delta * loss.delta;
    case PS_LOSS_QUANTILE:
        return fmax(-loss.quantile[q] * e, (1 - loss.quantile[q]) * e);
    default:
        return e * e;
    }
}

/* Every loss without and with holes: its value, its sums over what is observed, and its gradient by finite differences. */
START_TEST(test_forecast_definition)
{
    static const struct ps_loss losses[] = {{PS_LOSS_MSE, 0, 0, 0, {0}},
                                            {PS_LOSS_MAE, 0, 0, 0, {0}},
                                            {PS_LOSS_HUBER, 0, 0, 0.8, {0}},
                                            {PS_LOSS_QUANTILE, 0, MOST_Q, 0, {0.1, 0.4, 0.95}}};
    enum { MOST = R * D * MOST_Q + D * MOST_Q };
    double x[MOST], direction[MOST], dx[R * D * MOST_Q], bias_gradient[D * MOST_Q] = {0}, y[R * D * MOST_Q];
    double errors[2][PS_ERRORS] = {{7, 7, 7, 7, 7}, {7, 7, 7, 7, 7}};
    loss = losses[_i / 2];
    loss.missing = _i % 2;
    const int Q = (int)ps_loss_outputs(&loss), width = Q * D, point = ps_loss_point(&loss);
    ck_assert_int_eq(point, Q == 1 ? 0 : 1);
    fill_normal(x, MOST, 10);
    fill_normal(direction, MOST, 11);
    fill_normal(mean, R, 12);
    fill_normal(deviation, R, 13);
    fill_normal(targets, R * D, 14);
    for (int i = 0; loss.missing && i < R * D; i += 3) {
        targets[i] = NAN;
    }
    struct ps_step_state state = {.cursor = 8, .loss_sum = 2, .unobserved = 1};
    CALL(forecast, matrix(y, R, width), matrix(x, R, width), vector(x + R * width, width), vector(mean, R), vector(deviation, R),
         Q);
    CALL(forecast_loss, matrix(dx, R, width), matrix(x, R, width), vector(x + R * width, width), vector(mean, R),
         vector(deviation, R), matrix(targets, R, D), (struct ps_tensor){.data = NULL}, &state, 2, 0, loss);
    CALL(forecast_error, matrix(errors[0], 2, PS_ERRORS), matrix(x, R, width), vector(x + R * width, width), vector(mean, R),
         vector(deviation, R), matrix(targets, R, D), &state, 8, loss);
    double sums[PS_ERRORS] = {0}, trained = 0;
    for (int i = 0; i < R * D; i++) {
        const int r = i / D, t = i % D;
        double sum = 0, ordered = 0;
        for (int q = 0; q < Q; q++) {
            const int at = r * width + q * D + t;
            const double forecast = (x[at] + x[R * width + q * D + t]) * deviation[r] + mean[r];
            int below = 0; /* the forecast's place in order */
            for (int p = 0; p < Q; p++) {
                below += (x[r * width + p * D + t] + x[R * width + p * D + t]) * deviation[r] + mean[r] < forecast;
            }
            expect_close(y[r * width + below * D + t], forecast, 1e-14);
            ck_assert(!isnan(targets[i]) || dx[at] == 0);
            sum += loss_by_hand(forecast - targets[i], q) / Q;
            ordered += loss_by_hand(y[at] - targets[i], q) / Q;
        }
        if (isnan(targets[i])) {
            continue;
        }
        const double e = y[r * width + point * D + t] - targets[i];
        trained += sum;
        sums[PS_ERROR_SQUARES] += e * e;
        sums[PS_ERROR_ABSOLUTES] += fabs(e);
        sums[PS_ERROR_OBSERVED] += 1;
        sums[PS_ERROR_LOSS] += ordered;
        sums[PS_ERROR_WITHIN] += Q > 1 && y[r * width + t] <= targets[i] && targets[i] <= y[r * width + (Q - 1) * D + t];
    }
    const int holes = loss.missing ? (R * D + 2) / 3 : 0;
    expect_close(state.loss_sum, 2 + 2 * trained / (R * D), 1e-13);
    ck_assert(state.unobserved == 1 + (uint64_t)holes && state.lost == 0);
    for (int j = 0; j < PS_ERRORS; j++) {
        expect_close(errors[1][j], sums[j], 1e-13);
        ck_assert(errors[0][j] == 7);
    }
    CALL(bias_grad, vector(bias_gradient, width), {0}, matrix(dx, R, width), {0});
    const double along = dot(dx, direction, R * width) + dot(bias_gradient, direction + R * width, width);
    expect_close(along * (R * D - holes) / (R * D), slope(loss_of, x, direction, R * width + width), 1e-8);
}
END_TEST

/* Where nothing is observed nothing is left; where a NaN is a mistake it shows. */
START_TEST(test_unobserved)
{
    double x[R * D + D], dx[R * D], errors[1][PS_ERRORS];
    fill_normal(x, R * D + D, 10);
    fill_normal(mean, R, 12);
    fill_normal(deviation, R, 13);
    for (int i = 0; i < R * D; i++) {
        targets[i] = NAN;
    }
    for (int missing = 1; missing >= 0; missing--) {
        struct ps_step_state state = {.loss_sum = 2};
        loss = (struct ps_loss){.missing = missing};
        CALL(forecast_loss, matrix(dx, R, D), matrix(x, R, D), vector(x + R * D, D), vector(mean, R), vector(deviation, R),
             matrix(targets, R, D), (struct ps_tensor){.data = NULL}, &state, 3, 0, loss);
        CALL(forecast_error, matrix(errors[0], 1, PS_ERRORS), matrix(x, R, D), vector(x + R * D, D), vector(mean, R),
             vector(deviation, R), matrix(targets, R, D), &state, 8, loss);
        ck_assert(state.loss_sum == 2 && state.unobserved == (missing ? R * D : 0) && state.lost == (missing ? 0 : 3));
        for (int i = 0; i < R * D; i++) {
            ck_assert(missing ? dx[i] == 0 : isnan(dx[i]));
        }
        for (int j = 0; j < PS_ERRORS && missing; j++) {
            ck_assert(errors[0][j] == 0);
        }
        ck_assert(missing || isnan(errors[0][PS_ERROR_SQUARES]));
    }
}
END_TEST

/* Parts of a step whose observed targets are counted first: the sums and the gradients of the step in one. */
START_TEST(test_parts_of_observed)
{
    enum { FIRST = 2, Q = 2 };
    double x[R * D * Q + D * Q], whole[R * D * Q], parts[R * D * Q], count = 0;
    const struct ps_tensor counted = ps_tensor_1d(&count, PS_F64, 1);
    struct ps_step_state state = {0}, of_parts = {0};
    loss = (struct ps_loss){PS_LOSS_QUANTILE, 1, Q, 0, {0.3, 0.8}};
    fill_normal(x, R * D * Q + D * Q, 10);
    fill_normal(mean, R, 12);
    fill_normal(deviation, R, 13);
    fill_normal(targets, R * D, 14);
    for (int i = 0; i < R * D; i++) {
        targets[i] = i < FIRST * D || i % 3 == 0 ? NAN : targets[i]; /* of the first part nothing */
    }
    const struct ps_tensor bias = vector(x + R * D * Q, D * Q);
    CALL(forecast_loss, matrix(whole, R, D * Q), matrix(x, R, D * Q), bias, vector(mean, R), vector(deviation, R),
         matrix(targets, R, D), (struct ps_tensor){.data = NULL}, &state, R, 0, loss);
    for (int pass = 0; pass < 2; pass++) {
        for (int r = 0; r < R; r += FIRST) {
            const int n = r + FIRST < R ? FIRST : R - r;
            if (pass == 0) {
                CALL(count_observed, counted, matrix(targets + r * D, n, D));
            } else {
                CALL(forecast_loss, matrix(parts + r * D * Q, n, D * Q), matrix(x + r * D * Q, n, D * Q), bias, vector(mean + r, n),
                     vector(deviation + r, n), matrix(targets + r * D, n, D), counted, &of_parts, n, 0, loss);
            }
        }
        ck_assert(count == (double)(R * D) - (double)state.unobserved);
    }
    ck_assert(of_parts.unobserved == state.unobserved && of_parts.lost == 0);
    expect_close(of_parts.loss_sum, state.loss_sum, 1e-14);
    for (int i = 0; i < R * D * Q; i++) {
        expect_close(parts[i], whole[i], 1e-15);
    }
}
END_TEST

/* The patches with the smallest words of Philox's stay, counted as they lie in the pass. */
START_TEST(test_mask_definition)
{
    enum { C = 2, N = 7, B = 3, P = 4, KEPT = 3, ROWS = B * C * N };
    static double x[ROWS * P], y[ROWS * P], masked[ROWS * P];
    const uint64_t seed = 77, cursor = UINT64_C(0x123456789);
    struct ps_step_state state = {.step = 5, .cursor = cursor - 2}; /* the third window behind it */
    fill_normal(x, ROWS * P, 15);
    CALL(mask_patches, matrix(y, ROWS, P), matrix(masked, ROWS, P), matrix(x, ROWS, P), &state, seed, C, N, KEPT, 2);
    for (int s = 0; s < B * C; s++) {
        uint32_t word[N];
        for (int n = 0; n < N; n++) {
            const uint64_t i = (cursor * C + (uint64_t)s) * N + (uint64_t)n;
            struct ps_block block = ps_philox(seed, (uint32_t)(i / 4), 0x70000000u + (uint32_t)(i / 4 >> 32), 5);
            word[n] = block.word[i % 4];
        }
        for (int n = 0; n < N; n++) {
            int smaller = 0;
            for (int other = 0; other < N; other++) {
                smaller += word[other] < word[n];
            }
            for (int i = (s * N + n) * P; i < (s * N + n + 1) * P; i++) {
                ck_assert(y[i] == (smaller < KEPT ? x[i] : 0));
                ck_assert(smaller < KEPT ? isnan(masked[i]) : masked[i] == x[i]);
            }
        }
    }
}
END_TEST

START_TEST(test_gemm_definition)
{
    enum { B = 3, M = 5, N = 7, K = 300 };
    static double a[B * M * K], b[B * N * K], c[B * M * N], before[B * M * N];
    fill_normal(a, B * M * K, 15);
    fill_normal(b, B * N * K, 16);
    fill_normal(c, B * M * N, 17);
    memcpy(before, c, sizeof c);
    struct ps_tensor bt = ps_tensor_transpose(ps_tensor_3d(b, PS_F64, B, N, K), 1, 2);
    CALL(gemm, ps_tensor_3d(c, PS_F64, B, M, N), ps_tensor_3d(a, PS_F64, B, M, K), bt, 0.5, -2);
    for (int i = 0; i < B * M * N; i++) {
        int batch = i / (M * N), row = i / N % M, column = i % N;
        double sum = dot(a + (batch * M + row) * K, b + (batch * N + column) * K, K);
        expect_close(c[i], 0.5 * sum - 2 * before[i], 1e-12);
    }
    /* beta 0 overwrites, NaN included. */
    double nan_output = NAN, one[] = {2, 3}, two[] = {5, 7};
    CALL(gemm, matrix(&nan_output, 1, 1), matrix(one, 1, 2), matrix(two, 2, 1), 1, 0);
    ck_assert(nan_output == 31);
}
END_TEST

START_TEST(test_heads_definition)
{
    enum { PARTS = 3, S = 2, H = 4, N = 5, E = 3, COUNT = PARTS * S * H * N * E };
    double rows[COUNT], heads[COUNT], back[COUNT];
    fill_normal(rows, COUNT, 18);
    struct ps_tensor split = ps_tensor_nd(heads, PS_F64, 5, (int64_t[]){PARTS, S, H, N, E});
    CALL(head_split, split, matrix(rows, S * N, PARTS * H * E));
    for (int i = 0; i < COUNT; i++) {
        int e = i % E, n = i / E % N, j = i / (E * N) % H, s = i / (E * N * H) % S, p = i / (E * N * H * S);
        ck_assert(heads[i] == rows[(s * N + n) * PARTS * H * E + (p * H + j) * E + e]);
    }
    CALL(head_merge, matrix(back, S * N, PARTS * H * E), split);
    ck_assert_mem_eq(back, rows, sizeof rows);
}
END_TEST

START_TEST(test_gather_definition)
{
    /* A series of 2 channels, x[t, c] = 10 t + c: windows of 5, patches of 2 every 2, padded. */
    enum { T = 12, C = 2, L = 5, P = 2, STRIDE = 2, N = (L - P) / STRIDE + 2 };
    double series[T * C], patches[C * N * P], means[C], stds[C], y[C * 3];
    for (int i = 0; i < T * C; i++) {
        series[i] = 10 * (i / C) + i % C;
    }
    int32_t indices[] = {0, 4, 9};
    struct ps_step_state state = {.cursor = 1};
    struct ps_tensor windows = {.data = series, .type = PS_F64, .rank = 3, .size = {T - L - 2, C, L}, .stride = {C, 1, C}};
    struct ps_tensor which = ps_tensor_1d(indices, PS_I32, 3);
    CALL(gather_patches, matrix(patches, C * N, P), vector(means, C), vector(stds, C), windows, which, &state, 1, STRIDE, 0, 0, 0,
         1, 1e-5, 0);
    for (int i = 0; i < C * N * P; i++) {
        static const int time[N * P] = {4, 5, 6, 7, 8, 8}; /* of window 4, whose last value is repeated */
        ck_assert(patches[i] == 10 * time[i % (N * P)] + i / (N * P));
    }
    ck_assert(means[0] == 0 && stds[0] == 1);
    CALL(gather_patches, matrix(patches, C * N, P), vector(means, C), vector(stds, C), windows, which, &state, 1, STRIDE, 0, 1, 0,
         1, 1e-5, 0);
    expect_close(means[1], 61, 1e-14);
    expect_close(stds[1], sqrt(200 + 1e-5), 1e-14);
    expect_close(patches[N * P], (41 - 61) / sqrt(200 + 1e-5), 1e-14);
    /* Less the last value, over the same deviation. */
    CALL(gather_patches, matrix(patches, C * N, P), vector(means, C), vector(stds, C), windows, which, &state, 1, STRIDE, 0, 1, 1,
         1, 1e-5, 0);
    expect_close(means[1], 81, 1e-14);
    expect_close(stds[1], sqrt(200 + 1e-5), 1e-14);
    expect_close(patches[N * P], (41 - 81) / sqrt(200 + 1e-5), 1e-14);
    /* Unpadded to the window's end: one patch fewer, from row 1 on. */
    CALL(gather_patches, matrix(patches, C * (N - 1), P), vector(means, C), vector(stds, C), windows, which, &state, 1, STRIDE, 1,
         0, 1, 0, 1e-5, 0);
    for (int i = 0; i < C * (N - 1) * P; i++) {
        ck_assert(patches[i] == 10 * (5 + i % ((N - 1) * P)) + i / ((N - 1) * P));
    }
    ck_assert(means[0] == 0 && stds[0] == 1);
    struct ps_tensor ahead = {.data = series + L * C, .type = PS_F64, .rank = 3, .size = {T - L - 2, C, 3}, .stride = {C, 1, C}};
    CALL(gather_targets, matrix(y, C, 3), ahead, which, (struct ps_tensor){.data = NULL}, &state, 1);
    for (int i = 0; i < C * 3; i++) {
        ck_assert(y[i] == 10 * (9 + i % 3) + i / 3);
    }
}
END_TEST

/* Two windows of two channels of 5: 1, unobserved, 4, 7, unobserved and nothing at all; everything and 3 alone. */
START_TEST(test_masked_gather_definition)
{
    enum { C = 2, L = 5, P = 2, N = 4, H = 3 };
    double values[2 * C * L] = {1, NAN, 4, 7, NAN, NAN, NAN, NAN, NAN, NAN, 1, 2, 3, 4, 5, NAN, NAN, 3, NAN, NAN},
                          ahead[2 * C * H] = {1, 2, NAN, 4, 5, 6, 7, 8, 9, 10, 11, 12}, patches[2 * C * (N + 1) * P], means[2 * C],
                          stds[2 * C], y[2 * C * H];
    int32_t indices[] = {0, 1};
    struct ps_step_state state = {0};
    struct ps_tensor windows = ps_tensor_3d(values, PS_F64, 2, C, L), targets = ps_tensor_3d(ahead, PS_F64, 2, C, H);
    struct ps_tensor which = ps_tensor_1d(indices, PS_I32, 2);
    const double mean[2 * C] = {4, 0, 3, 3}, deviation[2 * C] = {sqrt(6 + 1e-5), 1, sqrt(2 + 1e-5), sqrt(1e-5)},
                          last[2 * C] = {7, 0, 5, 3};
    for (int kind = 0; kind < 3; kind++) { /* RevIN, less the last value that is observed, none */
        CALL(gather_patches, matrix(patches, 2 * C * N, P), vector(means, 2 * C), vector(stds, 2 * C), windows, which, &state, 2, 1,
             0, kind < 2, kind == 1, 0, 1e-5, 1);
        for (int s = 0; s < 2 * C; s++) {
            const double m = kind == 0 ? mean[s] : kind == 1 ? last[s] : 0, d = kind < 2 ? deviation[s] : 1;
            expect_close(means[s], m, 1e-14);
            expect_close(stds[s], d, 1e-14);
            for (int i = 0; i < N * P; i++) {
                const double x = values[s * L + i / P + i % P], expected = isnan(x) ? 0 : (x - m) / d;
                ck_assert_msg(fabs(patches[s * N * P + i] - expected) <= 1e-14 * fabs(expected), "kind %d, %d: %g, not %g", kind, i,
                              patches[s * N * P + i], expected);
            }
        }
    }
    /* Padded, what is repeated is unobserved too. */
    CALL(gather_patches, matrix(patches, 2 * C * (N + 1), P), vector(means, 2 * C), vector(stds, 2 * C), windows, which, &state, 2,
         1, 0, 1, 0, 1, 1e-5, 1);
    ck_assert(patches[N * P] == 0 && patches[N * P + 1] == 0);
    for (int p = 0; p < P; p++) {
        expect_close(patches[(3 * (N + 1) - 1) * P + p], (5 - 3) / sqrt(2 + 1e-5), 1e-14);
    }
    /* A channel of a window with nothing observed has no targets. */
    CALL(gather_targets, matrix(y, 2 * C, H), targets, which, windows, &state, 2);
    for (int i = 0; i < 2 * C * H; i++) {
        ck_assert(isnan(y[i]) == (isnan(ahead[i]) || i / H == 1));
        ck_assert(isnan(y[i]) || y[i] == ahead[i]);
    }
}
END_TEST

/* Of two layers, of a flat buffer with gaps: element by element, by the names that a weight's rows and columns have. */
START_TEST(test_pad_heads_definition)
{
    enum { LAYERS = 2, D = 5, H = 3, E = 2, WIDE = 4, A = H * E, W = H * WIDE, GAP = 200 };
    double flat[LAYERS * GAP], w_qkv[LAYERS * D * 3 * W], w_o[LAYERS * W * D], b[LAYERS * 3 * W], gradients[LAYERS * GAP];
    fill_normal(flat, LAYERS * GAP, 41);
    memcpy(gradients, flat, sizeof flat);
    enum { AT_O = D * 3 * A, AT_B = AT_O + A * D };
    const struct ps_tensor parts[] = {
        {.data = flat, .type = PS_F64, .rank = 3, .size = {LAYERS, 3 * D * H, E}, .stride = {GAP, E, 1}},
        {.data = flat + AT_O, .type = PS_F64, .rank = 3, .size = {LAYERS, H, E * D}, .stride = {GAP, E * D, 1}},
        {.data = flat + AT_B, .type = PS_F64, .rank = 3, .size = {LAYERS, 3 * H, E}, .stride = {GAP, E, 1}}};
    const struct ps_tensor wide[] = {ps_tensor_3d(w_qkv, PS_F64, LAYERS, 3 * D * H, WIDE),
                                     ps_tensor_3d(w_o, PS_F64, LAYERS, H, WIDE * D), ps_tensor_3d(b, PS_F64, LAYERS, 3 * H, WIDE)};
    CALL(pad_heads, wide[0], wide[1], wide[2], parts[0], parts[1], parts[2]);
    for (int l = 0; l < LAYERS; l++) {
        const double *layer = flat + l * GAP;
        for (int c = 0; c < 3 * W; c++) { /* column c of q, k and v is column i of head j */
            const int j = c / WIDE, i = c % WIDE, narrow = j * E + i;
            for (int r = 0; r < D; r++) {
                ck_assert(w_qkv[(l * D + r) * 3 * W + c] == (i < E ? layer[r * 3 * A + narrow] : 0));
                ck_assert(c >= W || w_o[(l * W + c) * D + r] == (i < E ? layer[AT_O + narrow * D + r] : 0));
            }
            ck_assert(b[l * 3 * W + c] == (i < E ? layer[AT_B + narrow] : 0));
        }
    }
    /* Back: what was there and as much again; what lies behind a head is left out. */
    for (int c = 0; c < LAYERS * W; c += WIDE) {
        w_o[c * D + E * D] = NAN;
    }
    struct ps_tensor to[] = {parts[0], parts[1], parts[2]};
    for (int t = 0; t < 3; t++) {
        to[t].data = gradients + ((double *)parts[t].data - flat);
    }
    CALL(unpad_heads, to[0], to[1], to[2], wide[0], wide[1], wide[2]);
    for (int i = 0; i < LAYERS * GAP; i++) {
        ck_assert(gradients[i] == (i % GAP < AT_B + 3 * A ? 2 : 1) * flat[i]);
    }
    for (int i = 0; i < LAYERS * D * 3 * W; i++) {
        ck_assert(w_qkv[i] == 0 && w_o[i % (LAYERS * W * D)] == 0 && b[i % (LAYERS * 3 * W)] == 0);
    }
}
END_TEST

START_TEST(test_dropout_definition)
{
    enum { COUNT = 40000 };
    static double x[COUNT], y[COUNT];
    struct ps_step_state state = {.step = 0x300000002u};
    struct ps_dropout dropout = ps_dropout_make(0.2, 0xfeedface12345678u, 11, &state);
    ck_assert_uint_eq(dropout.threshold, 13107);
    ck_assert(dropout.scale == (float)(65536.0 / (65536 - 13107)));
    ck_assert_uint_eq(ps_dropout_make(0, 1, 2, NULL).threshold, 0);
    ck_assert(ps_dropout_make(0, 1, 2, NULL).scale == 1);
    ck_assert(isfinite(ps_dropout_make(0.999999, 1, 2, NULL).scale));
    int kept = 0;
    for (int i = 0; i < COUNT; i++) {
        x[i] = 1;
    }
    CALL(drop, vector(y, COUNT), vector(x, COUNT), dropout);
    for (int i = 0; i < COUNT; i++) {
        philox4x32_ctr_t counter = {{(uint32_t)i / 8, 11, 2, 3}};
        philox4x32_key_t key = {{0x12345678u, 0xfeedfaceu}};
        uint32_t word = philox4x32(counter, key).v[i % 8 / 2], draw = i % 2 ? word >> 16 : word & 0xffff;
        ck_assert(y[i] == (draw >= 13107 ? (double)dropout.scale : 0));
        kept += draw >= 13107;
    }
    ck_assert_msg(abs(kept - COUNT * 4 / 5) < 400, "%d kept", kept); /* 5 standard deviations */
    /* Wherever an operation drops, it drops the same elements. */
    static double zeros[COUNT], ones[COUNT / 100], result[COUNT];
    struct ps_tensor all = matrix(result, 100, COUNT / 100), bias = vector(zeros, COUNT / 100), in = matrix(x, 100, COUNT / 100);
    CALL(bias_residual_add, all, in, bias, matrix(zeros, 100, COUNT / 100), dropout);
    ck_assert_mem_eq(result, y, sizeof y);
    CALL(bias_position_add, all, in, bias, matrix(zeros, 10, COUNT / 100), dropout);
    ck_assert_mem_eq(result, y, sizeof y);
    CALL(bias_grad, vector(ones, COUNT / 100), all, in, dropout);
    ck_assert_mem_eq(result, y, sizeof y);
    CALL(bias_activation, all, in, bias, dropout, PS_GELU_TANH);
    for (int i = 0; i < COUNT; i++) {
        ck_assert((result[i] == 0) == (y[i] == 0));
    }
}
END_TEST

/* Of a step's calls the last moves the state on; what is not finite in one halts the next step, not the others. */
START_TEST(test_adamw_more)
{
    double p[] = {1, 2}, g[] = {NAN, 4}, m[] = {0, 0}, v[] = {0, 0}, rates[] = {0.01, 0.01};
    struct ps_step_state state = {.step = 0};
    for (int t = 0; t < 2; t++) {
        for (int i = 0; i < 2; i++) {
            CALL(adamw, vector(p + i, 1), vector(g + i, 1), vector(m + i, 1), vector(v + i, 1), vector(rates, 2), {0}, 0, 0.9, 0.99,
                 1e-8, 0, 0, 0, 0, &state, 32, 0, {{0, 0}}, i == 0);
            ck_assert(state.step == (uint64_t)(t + i) && state.cursor == 32 * (uint64_t)(t + i) && state.nonfinite == 1);
            ck_assert(g[i] == 0);
            g[i] = 1;
        }
        ck_assert(isnan(m[0]) && isnan(p[0]));
        expect_close(m[1], 0.4, 1e-15);
        expect_close(p[1], 1.99, 1e-9);
    }
}
END_TEST

START_TEST(test_adamw_definition)
{
    double p[] = {1, -2}, g[] = {3, 4}, m[] = {0.1, 0.2}, v[] = {0.3, 0.4}, rates[] = {9, 9, 0.01}, copy[2];
    struct ps_step_state state = {.step = 2};
    CALL(sum_squares, vector(g, 2), &state);
    ck_assert(state.gradient_squares == 25);
    CALL(adamw, vector(p, 2), vector(g, 2), vector(m, 2), vector(v, 2), vector(rates, 3), vector(copy, 2), 1, 0.9, 0.99, 1e-8, 0.1,
         2.5, 0, 0, &state, 32, 0, {{0, 0}}, 0);
    /* Clipped by half: g = 1.5, 2. */
    double m0 = 0.9 * 0.1 + 0.1 * 1.5, v0 = 0.99 * 0.3 + 0.01 * 2.25, m1 = 0.9 * 0.2 + 0.1 * 2, v1 = 0.99 * 0.4 + 0.01 * 4;
    double bias_m = 1 - pow(0.9, 3), bias_v = 1 - pow(0.99, 3);
    expect_close(m[0], m0, 1e-15);
    expect_close(v[1], v1, 1e-15);
    expect_close(p[0], 1 - 0.01 * (m0 / bias_m / (sqrt(v0 / bias_v) + 1e-8) + 0.1 * 1), 1e-15);
    expect_close(p[1], -2 - 0.01 * (m1 / bias_m / (sqrt(v1 / bias_v) + 1e-8)), 1e-15);
    ck_assert(g[0] == 0 && g[1] == 0);
    ck_assert_mem_eq(copy, p, sizeof p);
    CALL(advance, &state, 1, 64);
    ck_assert(state.step == 4 && state.cursor == 96);
}
END_TEST

/* Elements that are held wait: no decay, no moments; then they count steps from their own first one. */
START_TEST(test_adamw_held)
{
    for (int held = 2; held <= 3; held++) { /* at step 2: it has begun, or has not */
        double p[] = {1, 2, 3, 4}, g[] = {1, 2, 3, 4}, m[] = {0, 0.1, 0, 0.2}, v[] = {0, 0.3, 0, 0.4}, rates[] = {9, 9, 0.01};
        struct ps_step_state state = {.step = 2};
        CALL(adamw, vector(p, 4), vector(g, 4), vector(m, 4), vector(v, 4), vector(rates, 3), {0}, 3, 0.9, 0.99, 1e-8, 0.1, 0, 0, 0,
             &state, 32, (uint64_t)held, {{1, 2}, {3, 9}}, 0);
        const double before[] = {0, 0.1, 0, 0.2}, squares[] = {0, 0.3, 0, 0.4};
        for (int i = 0; i < 4; i++) {
            const int trained = i % 2, t = trained ? 3 : 3 - held;
            const double m_new = 0.9 * before[i] + 0.1 * (i + 1), v_new = 0.99 * squares[i] + 0.01 * (i + 1) * (i + 1);
            const double step = m_new / (1 - pow(0.9, t)) / (sqrt(v_new / (1 - pow(0.99, t))) + 1e-8) + (i < 3 ? 0.1 * (i + 1) : 0);
            const int waits = !trained && held == 3;
            expect_close(m[i], waits ? before[i] : m_new, 1e-15);
            expect_close(v[i], waits ? squares[i] : v_new, 1e-15);
            expect_close(p[i], i + 1 - (waits ? 0 : 0.01 * step), 1e-15);
            ck_assert(g[i] == 0);
        }
        ck_assert(state.step == 3 && state.cursor == 32);
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("definitions");
    TCase *definitions = tcase_create("definitions");
    tcase_add_checked_fixture(definitions, open_oracle, close_oracle);
    tcase_add_test(definitions, test_layernorm_definition);
    tcase_add_test(definitions, test_rmsnorm_definition);
    tcase_add_test(definitions, test_batchnorm_definition);
    tcase_add_test(definitions, test_batchnorm_shared);
    tcase_add_test(definitions, test_bias_residual_statistics_definition);
    tcase_add_test(definitions, test_running_statistics_finite);
    tcase_add_test(definitions, test_rope_definition);
    tcase_add_test(definitions, test_pad_heads_definition);
    tcase_add_test(definitions, test_channel_affine_definition);
    tcase_add_test(definitions, test_gelu_definition);
    tcase_add_test(definitions, test_activation_definition);
    tcase_add_test(definitions, test_unary_definition);
    tcase_add_test(definitions, test_softmax_definition);
    tcase_add_test(definitions, test_softmax_far);
    tcase_add_loop_test(definitions, test_forecast_definition, 0, 8);
    tcase_add_test(definitions, test_unobserved);
    tcase_add_test(definitions, test_parts_of_observed);
    tcase_add_test(definitions, test_mask_definition);
    tcase_add_test(definitions, test_gemm_definition);
    tcase_add_test(definitions, test_heads_definition);
    tcase_add_test(definitions, test_gather_definition);
    tcase_add_test(definitions, test_masked_gather_definition);
    tcase_add_test(definitions, test_dropout_definition);
    tcase_add_test(definitions, test_adamw_definition);
    tcase_add_test(definitions, test_adamw_more);
    tcase_add_test(definitions, test_adamw_held);
    suite_add_tcase(suite, definitions);

    return run_suite(suite, CK_NOFORK) != 0;
}
