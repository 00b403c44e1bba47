/* CUDA's products beyond the cases of parity: of more than 2^31 elements, sums of many terms, and tables of the library's
 * algorithms that were chosen by timing. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/asked.h"
#include "tests/fused.h"
#include "tests/random_values.h"
#include "tests/real16.h"
#include "tests/suite.h"
#include "tests/tables.h"

/* A product of more than 2^31 elements, and the two sums over it that a weight's and a bias's gradient are: a [M, K] of zeros and
 * ones and b [K, N] of 0, 1, 2 make every element of c = a b exact, and all that is summed over its rows is known from a' a. */
START_TEST(test_far)
{
    enum { K = 8, N = 512 };
    const int64_t M = ((int64_t)1 << 22) + 5;
    struct table t = {
        .name = "cuda bf16", .backend = "cuda", .device_kind = "cuda", .precision = PS_PRECISION_BF16, .tiny_gemm = 1};
    ck_assert_msg(table_open(&t) == PS_OK, "%s", ps_error_message());
    struct ps_device *d = t.device;
    size_t free_bytes, total_bytes;
    ck_assert_int_eq(d->memory(d, &free_bytes, &total_bytes), PS_OK);
    if (free_bytes < (size_t)M * N * 2 + ((size_t)1 << 29)) {
        printf("skipped: a product of more than 2^31 elements needs 5 GiB, %.1f GiB are free\n", (double)free_bytes / 0x1p30);
        table_close(&t);
        return;
    }
    uint16_t *a = malloc((size_t)M * K * sizeof *a), b[K * N], row[N];
    float weight[K * N], bias[N];
    ck_assert_ptr_nonnull(a);
    uint64_t random = 77;
    double both[K][K] = {{0}}, alone[K] = {0};
    for (int64_t i = 0; i < M; i++) {
        uint64_t bits = random_bits(&random);
        for (int p = 0; p < K; p++) {
            a[i * K + p] = bf16_bits((double)(bits >> p & 1));
            alone[p] += (double)(bits >> p & 1);
            for (int q = 0; q < K; q++) {
                both[p][q] += (double)(bits >> p & bits >> q & 1);
            }
        }
    }
    for (int i = 0; i < K * N; i++) {
        b[i] = bf16_bits((double)(random_bits(&random) % 3));
    }
    void *da, *db, *dc, *dw, *dbias;
    ck_assert_int_eq(d->allocate(d, (size_t)M * K * 2, &da), PS_OK);
    ck_assert_int_eq(d->allocate(d, sizeof b, &db), PS_OK);
    ck_assert_int_eq(d->allocate(d, (size_t)M * N * 2, &dc), PS_OK);
    ck_assert_int_eq(d->allocate(d, sizeof weight, &dw), PS_OK);
    ck_assert_int_eq(d->allocate(d, sizeof bias, &dbias), PS_OK);
    ck_assert_int_eq(d->upload(d, PS_COMPUTE, da, a, (size_t)M * K * 2), PS_OK);
    ck_assert_int_eq(d->upload(d, PS_COMPUTE, db, b, sizeof b), PS_OK);
    struct ps_tensor ta = ps_tensor_2d(da, PS_BF16, M, K), tb = ps_tensor_2d(db, PS_BF16, K, N),
                     tc = ps_tensor_2d(dc, PS_BF16, M, N);
    const struct ps_kernels *k = t.kernels;
    ck_assert_msg(k->gemm(k, &(struct ps_gemm){tc, ta, tb, 1, 0}) == PS_OK, "%s", ps_error_message());
    ck_assert_msg(k->bias_grad(k, &(struct ps_bias_grad){.dbias = ps_tensor_1d(dbias, PS_F32, N), .dy = tc}) == PS_OK, "%s",
                  ps_error_message());
    ck_assert_msg(k->gemm(k, &(struct ps_gemm){ps_tensor_2d(dw, PS_F32, K, N), ps_tensor_transpose(ta, 0, 1), tc, 1, 0}) == PS_OK,
                  "%s", ps_error_message());
    static const int64_t back[] = {1, 2, 3000, (int64_t)1 << 20, (int64_t)1 << 21, ((int64_t)1 << 22) + 5};
    for (int s = 0; s < LENGTH(back); s++) {
        int64_t i = M - back[s];
        ck_assert_int_eq(d->download(d, PS_COMPUTE, row, (char *)dc + (size_t)i * sizeof row, sizeof row), PS_OK);
        for (int j = 0; j < N; j++) {
            double expected = 0;
            for (int p = 0; p < K; p++) {
                expected += bf16_value(a[i * K + p]) * bf16_value(b[p * N + j]);
            }
            ck_assert_msg(bf16_value(row[j]) == expected, "row %lld, column %d: %g instead of %g", (long long)i, j,
                          bf16_value(row[j]), expected);
        }
    }
    ck_assert_int_eq(d->download(d, PS_COMPUTE, bias, dbias, sizeof bias), PS_OK);
    ck_assert_int_eq(d->download(d, PS_COMPUTE, weight, dw, sizeof weight), PS_OK);
    for (int j = 0; j < N; j++) {
        double sum = 0;
        for (int p = 0; p < K; p++) {
            double product = 0;
            for (int q = 0; q < K; q++) {
                product += both[p][q] * bf16_value(b[q * N + j]);
            }
            sum += alone[p] * bf16_value(b[p * N + j]);
            ck_assert_double_eq_tol(weight[p * N + j], product, 1e-5 * product + 1e-3);
        }
        ck_assert_double_eq_tol(bias[j], sum, 1e-5 * sum + 1e-3);
    }
    d->release(d, da, (size_t)M * K * 2);
    d->release(d, db, sizeof b);
    d->release(d, dc, (size_t)M * N * 2);
    d->release(d, dw, sizeof weight);
    d->release(d, dbias, sizeof bias);
    free(a);
    table_close(&t);
}
END_TEST

static enum ps_status open_tuned(struct ps_device *d, enum ps_precision precision, const char *tuning, struct ps_kernels **k)
{
    return ps_kernels_open("cuda", d, precision, &(struct ps_kernels_options){.tiny_gemm = 1, .tuning = tuning}, k);
}

/* The shortest of 5 runs, in ms. */
static double product_ms(const struct ps_kernels *k, const struct ps_gemm *product)
{
    struct ps_device *d = k->device;
    struct ps_event *before, *after;
    double least = INFINITY, ms;
    ck_assert_int_eq(d->event_create(d, &before), PS_OK);
    ck_assert_int_eq(d->event_create(d, &after), PS_OK);
    for (int i = 0; i < 5; i++) {
        ck_assert_int_eq(d->event_record(d, PS_COMPUTE, before), PS_OK);
        ck_assert_msg(k->gemm(k, product) == PS_OK, "%s", ps_error_message());
        ck_assert_int_eq(d->event_record(d, PS_COMPUTE, after), PS_OK);
        ck_assert_int_eq(d->synchronize(d), PS_OK);
        ck_assert_int_eq(d->event_elapsed(d, before, after, &ms), PS_OK);
        least = ms < least ? ms : least;
    }
    d->event_destroy(d, before);
    d->event_destroy(d, after);
    return least;
}

/* ||c - a b|| / ||a b|| of 16 of c's columns, and the same for chains of fmaf. */
static void product_errors(const float *c, const float *a, int64_t a_row, int64_t a_column, const float *b, int m, int n, int k,
                           double *error, double *chain_error)
{
    double norm = 0, squares = 0, chain_squares = 0;
    for (int i = 0; i < m; i++) {
        for (int j = 0; j < n; j += n / 16) {
            double sum = 0;
            float chain = 0;
            for (int p = 0; p < k; p++) {
                const float x = a[i * a_row + p * a_column], y = b[(int64_t)p * n + j];
                sum += (double)x * y;
                chain = fmaf(x, y, chain);
            }
            norm += sum * sum;
            squares += (c[(int64_t)i * n + j] - sum) * (c[(int64_t)i * n + j] - sum);
            chain_squares += (chain - sum) * (chain - sum);
        }
    }
    *error = sqrt(squares / norm);
    *chain_error = sqrt(chain_squares / norm);
}

/* A float32 of -1 to 1 times a power of two. */
static float scaled(uint64_t *random, int exponent)
{
    return (float)ldexp((double)random_bits(random) * 0x1p-63 - 1, exponent);
}

/* Floats of the host's and, in `memory`, as many of the device's. */
static float *floats_open(struct ps_device *d, int64_t count, void **memory)
{
    float *const host = malloc((size_t)count * sizeof *host);
    ck_assert_ptr_nonnull(host);
    ck_assert_int_eq(d->allocate(d, (size_t)count * sizeof *host, memory), PS_OK);
    return host;
}

static void floats_close(struct ps_device *d, int64_t count, float *host, void *memory)
{
    d->release(d, memory, (size_t)count * sizeof *host);
    free(host);
}

static void floats_upload(struct ps_device *d, void *memory, const float *host, int64_t count)
{
    ck_assert_int_eq(d->upload(d, PS_COMPUTE, memory, host, (size_t)count * sizeof *host), PS_OK);
}

static void floats_download(struct ps_device *d, float *host, const void *memory, int64_t count)
{
    ck_assert_int_eq(d->download(d, PS_COMPUTE, host, memory, (size_t)count * sizeof *host), PS_OK);
}

/* Rows times a weight, and the weight's gradient: in fp32 no less exact than chains of fmaf, and the gradient, as many FLOPs, takes
 * no more than 4 times as long: it did when the library got too little workspace to split its sum. */
START_TEST(test_long_products)
{
    enum { R = 20000, K = 128, N = 256 };
    const enum ps_precision precision = _i ? PS_TF32 : PS_FP32;
    const int64_t counts[4] = {(int64_t)R * K, (int64_t)R * N, (int64_t)K * N, (int64_t)K * N}; /* x, y, w, dw */
    float *host[4];
    void *memory[4];
    struct ps_device *d;
    struct ps_kernels *k;
    uint64_t random = 9;
    ck_assert_int_eq(ps_device_open("cuda", 0, &d), PS_OK);
    ck_assert_int_eq(open_tuned(d, precision, NULL, &k), PS_OK);
    for (int i = 0; i < 4; i++) {
        host[i] = floats_open(d, counts[i], &memory[i]);
        for (int64_t j = 0; j < counts[i]; j++) {
            host[i][j] = scaled(&random, 0);
        }
        floats_upload(d, memory[i], host[i], counts[i]);
    }
    const struct ps_tensor x = ps_tensor_2d(memory[0], PS_F32, R, K), y = ps_tensor_2d(memory[1], PS_F32, R, N);
    const struct ps_gemm gradient = {ps_tensor_2d(memory[3], PS_F32, K, N), ps_tensor_transpose(x, 0, 1), y, 1, 0};
    const struct ps_gemm rows = {y, x, ps_tensor_2d(memory[2], PS_F32, K, N), 1, 0};
    double error, chain_error;
    const double gradient_ms = product_ms(k, &gradient);
    floats_download(d, host[3], memory[3], counts[3]);
    product_errors(host[3], host[0], 1, K, host[1], K / 8, N, R, &error, &chain_error);
    printf("%s: gradient's relative error %.2g, by chains of fmaf %.2g\n", ps_precision_name(precision), error, chain_error);
    ck_assert(error <= (precision == PS_FP32 ? chain_error : 2e-3));
    const double rows_ms = product_ms(k, &rows);
    floats_download(d, host[1], memory[1], counts[1]);
    product_errors(host[1], host[0], K, 1, host[2], R / 10, N, K, &error, &chain_error);
    printf("%s: rows' relative error %.2g, by chains of fmaf %.2g; %.3f ms, the gradient %.3f ms\n", ps_precision_name(precision),
           error, chain_error, rows_ms, gradient_ms);
    ck_assert(error <= (precision == PS_FP32 ? chain_error : 2e-3));
    ck_assert(gradient_ms < 4 * rows_ms);
    k->close(k);
    for (int i = 0; i < 4; i++) {
        floats_close(d, counts[i], host[i], memory[i]);
    }
    d->close(d);
}
END_TEST

/* Whether c is the sum of n products of a and b to 2^-20 of what their magnitudes add up to. */
static void compare_sum(const char *what, float c, const float *a, int64_t a_step, const float *b, int64_t b_step, int64_t n)
{
    double sum = 0, all = 0;
    for (int64_t p = 0; p < n; p++) {
        const double product = (double)a[p * a_step] * b[p * b_step];
        sum += product;
        all += fabs(product);
    }
    ck_assert_msg(fabs(c - sum) <= 0x1p-20 * all, "%s: %.9g instead of %.9g, of %.3g", what, c, sum, all);
}

/* fp32's products of rows, columns and terms whose sizes lie far apart: rows of few and of many terms times a weight, and a
 * weight's gradient, whose rows are as far apart in both operands the other way. What is not finite stays in its row. */
START_TEST(test_scales)
{
    enum { R = 8448, MOST = 640, N = 256, NAN_ROW = 5, INFINITE_ROW = 6, ZERO_ROW = 7 };
    const int64_t counts[5] = {(int64_t)R * MOST, (int64_t)MOST * N, (int64_t)R * N, (int64_t)R * N, (int64_t)MOST * N};
    float *host[5]; /* x, w, y, dy, dw */
    void *memory[5];
    struct ps_device *d;
    struct ps_kernels *k;
    uint64_t random = 19;
    ck_assert_int_eq(ps_device_open("cuda", 0, &d), PS_OK);
    ck_assert_int_eq(open_tuned(d, PS_FP32, NULL, &k), PS_OK);
    for (int i = 0; i < 5; i++) {
        host[i] = floats_open(d, counts[i], &memory[i]);
    }
    static const int terms[] = {96, MOST};
    for (int shape = 0; shape < 2; shape++) {
        const int K = terms[shape];
        float *const x = host[0], *const w = host[1], *const y = host[2], *const dy = host[3], *const dw = host[4];
        for (int64_t i = 0; i < R; i++) {
            const int exponent = i == ZERO_ROW ? -1000 : (int)(i * 37 % 121) - 60;
            for (int p = 0; p < K; p++) {
                x[i * K + p] = scaled(&random, exponent);
            }
            for (int j = 0; j < N; j++) {
                dy[i * N + j] = scaled(&random, (i == ZERO_ROW ? 0 : -exponent) + j % 4);
            }
        }
        for (int64_t i = 0; i < (int64_t)K * N; i++) {
            w[i] = scaled(&random, (int)(i % N * 29 % 81) - 40 - (int)(i / N / 128) * 2); /* later terms are smaller */
        }
        const struct ps_tensor tx = ps_tensor_2d(memory[0], PS_F32, R, K), tw = ps_tensor_2d(memory[1], PS_F32, K, N),
                               ty = ps_tensor_2d(memory[2], PS_F32, R, N), tdy = ps_tensor_2d(memory[3], PS_F32, R, N),
                               tdw = ps_tensor_2d(memory[4], PS_F32, K, N);
        floats_upload(d, memory[0], x, (int64_t)R * K);
        floats_upload(d, memory[1], w, (int64_t)K * N);
        floats_upload(d, memory[3], dy, (int64_t)R * N);
        ck_assert_msg(k->gemm(k, &(struct ps_gemm){ty, tx, tw, 1, 0}) == PS_OK, "%s", ps_error_message());
        ck_assert_msg(k->gemm(k, &(struct ps_gemm){tdw, ps_tensor_transpose(tx, 0, 1), tdy, 1, 0}) == PS_OK, "%s",
                      ps_error_message());
        floats_download(d, y, memory[2], (int64_t)R * N);
        floats_download(d, dw, memory[4], (int64_t)K * N);
        for (int64_t i = 0; i < R; i += i < 16 ? 1 : 61) {
            for (int j = 0; j < N; j++) {
                compare_sum("rows", y[i * N + j], x + i * K, 1, w + j, N, K);
            }
        }
        for (int p = 0; p < K; p += 7) {
            for (int j = 0; j < N; j += 3) {
                compare_sum("gradient", dw[p * N + j], x + p, K, dy + j, N, R);
            }
        }
        x[NAN_ROW * K + 3] = NAN;
        x[INFINITE_ROW * K + K - 1] = INFINITY;
        floats_upload(d, memory[0], x, (int64_t)R * K);
        ck_assert_msg(k->gemm(k, &(struct ps_gemm){ty, tx, tw, 1, 0}) == PS_OK, "%s", ps_error_message());
        floats_download(d, y, memory[2], (int64_t)R * N);
        for (int64_t i = 0; i < (int64_t)R * N; i++) {
            ck_assert_msg(isfinite(y[i]) == (i / N != NAN_ROW && i / N != INFINITE_ROW), "row %lld, column %lld of %d terms: %g",
                          (long long)(i / N), (long long)(i % N), K, y[i]);
        }
    }
    k->close(k);
    for (int i = 0; i < 5; i++) {
        floats_close(d, counts[i], host[i], memory[i]);
    }
    d->close(d);
}
END_TEST

/* A table of algorithms: made by one, used by another, and refused where it does not belong or is none. */
START_TEST(test_tuning)
{
    enum { M = 3000, K = 130, N = 256 }; /* a k that the library has to itself */
    struct ps_device *d;
    struct ps_kernels *k, *other;
    float *a = malloc(M * K * sizeof *a), *c = malloc(M * N * sizeof *c), *again = malloc(M * N * sizeof *again);
    void *memory[3];
    const size_t bytes[3] = {M * K * sizeof *a, K * N * sizeof *a, M * N * sizeof *c};
    uint64_t random = 5;
    for (int i = 0; i < M * K; i++) {
        a[i] = (float)random_between(&random, -8, 8);
    }
    ck_assert_int_eq(ps_device_open("cuda", 0, &d), PS_OK);
    for (int i = 0; i < 3; i++) {
        ck_assert_int_eq(d->allocate(d, bytes[i], &memory[i]), PS_OK);
        ck_assert_int_eq(i < 2 ? d->upload(d, PS_COMPUTE, memory[i], a, bytes[i]) : PS_OK, PS_OK);
    }
    const struct ps_gemm product = {ps_tensor_2d(memory[2], PS_F32, M, N), ps_tensor_2d(memory[0], PS_F32, M, K),
                                    ps_tensor_2d(memory[1], PS_F32, K, N), 1, 0};
    char *text, *longer;
    ck_assert_int_eq(open_tuned(d, PS_TF32, NULL, &k), PS_OK);
    ck_assert_int_eq(k->tune(k), PS_OK);
    ck_assert_msg(k->gemm(k, &product) == PS_OK, "%s", ps_error_message());
    ck_assert_int_eq(d->download(d, PS_COMPUTE, c, memory[2], bytes[2]), PS_OK);
    ck_assert_int_eq(k->tuning(k, &text), PS_OK);
    ck_assert_ptr_nonnull(strstr(text, "m 256 n 3000 k 130 batch 1: "));
    k->close(k);

    ck_assert_msg(open_tuned(d, PS_TF32, text, &k) == PS_OK, "%s", ps_error_message());
    ck_assert_int_eq(d->fill_zero(d, PS_COMPUTE, memory[2], bytes[2]), PS_OK);
    ck_assert_msg(k->gemm(k, &product) == PS_OK, "%s", ps_error_message());
    ck_assert_int_eq(d->download(d, PS_COMPUTE, again, memory[2], bytes[2]), PS_OK);
    ck_assert(memcmp(c, again, bytes[2]) == 0);
    for (int j = 0; j < N; j++) { /* whole numbers, exact in tf32 */
        double sum = 0;
        for (int p = 0; p < K; p++) {
            sum += (double)a[(M - 1) * K + p] * a[p * N + j];
        }
        ck_assert(c[(M - 1) * N + j] == (float)sum);
    }
    k->close(k);

    ck_assert_int_eq(open_tuned(d, PS_FP32, text, &other), PS_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(ps_error_message(), "tune again"));
    ck_assert_int_eq(open_tuned(d, PS_TF32, "", &other), PS_UNSUPPORTED);
    longer = malloc(strlen(text) + 16);
    sprintf(longer, "%s00 ff\n", text);
    ck_assert_int_eq(open_tuned(d, PS_TF32, longer, &other), PS_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(ps_error_message(), "line 3"));
    for (int i = 0; i < 3; i++) {
        d->release(d, memory[i], bytes[i]);
    }
    ck_assert_uint_eq(d->counters.bytes, 0);
    d->close(d);
    free(longer);
    free(text);
    free(a);
    free(c);
    free(again);
}
END_TEST

/* Gradients in one launch: more than it takes, of all its tiles, one that others compute and one without db; of whole numbers, so
 * that all sums are exact. */
START_TEST(test_gradients_together)
{
    static const struct {
        int64_t rows, m, n;
        int alone;
    } cases[] = {{256, 8, 8, 0},      {300, 64, 64, 0},    {1030, 72, 136, 0}, {5000, 136, 72, 1},
                 {2049, 16, 200, 0},  {4096, 128, 128, 0}, {777, 200, 16, 0},  {1500, 12, 40, 0},
                 {641, 264, 24, 0},   {20001, 16, 48, 0},  {256, 8, 16384, 0}, {300, 64, 64, 0},
                 {1030, 264, 648, 0}, {1030, 520, 392, 1}, {641, 72, 1032, 0}, {1030, 136, 72, 0}};
    enum { COUNT = sizeof cases / sizeof *cases };
    struct table t = {.name = "cuda", .backend = "cuda", .device_kind = "cuda", .precision = _i ? PS_FP16 : PS_PRECISION_BF16};
    const enum ps_type type = _i ? PS_F16 : PS_BF16;
    ck_assert_msg(table_open(&t) == PS_OK, "%s", ps_error_message());
    struct ps_device *d = t.device;
    struct ps_gemm_gradient each[COUNT];
    int8_t *values[COUNT][2]; /* of x and dy */
    uint64_t random = 31;
    for (int i = 0; i < COUNT; i++) {
        const int64_t rows = cases[i].rows, m = cases[i].m, n = cases[i].n, counts[4] = {m * n, n, rows * m, rows * n};
        void *memory[4];
        for (int j = 0; j < 4; j++) {
            const size_t bytes = (size_t)counts[j] * (j < 2 ? 4 : 2);
            void *host = malloc(bytes);
            ck_assert_int_eq(d->allocate(d, bytes, &memory[j]), PS_OK);
            if (j >= 2) {
                values[i][j - 2] = malloc((size_t)counts[j]);
            }
            for (int64_t at = 0; at < counts[j]; at++) {
                if (j < 2) {
                    ((float *)host)[at] = (float)(at % 7);
                } else {
                    const int8_t value = (int8_t)random_between(&random, -3, 3);
                    values[i][j - 2][at] = value;
                    ((uint16_t *)host)[at] = (uint16_t)(_i ? fp16_bits(value) : bf16_bits(value));
                }
            }
            ck_assert_int_eq(d->upload(d, PS_COMPUTE, memory[j], host, bytes), PS_OK);
            ck_assert_int_eq(d->synchronize(d), PS_OK);
            free(host);
        }
        each[i] = (struct ps_gemm_gradient){.dw = ps_tensor_2d(memory[0], PS_F32, m, n),
                                            .db = ps_tensor_1d(memory[1], PS_F32, n),
                                            .x = ps_tensor_2d(memory[2], type, rows, m),
                                            .dy = ps_tensor_2d(memory[3], type, rows, n)};
    }
    struct ps_gemm_gradient given[COUNT];
    memcpy(given, each, sizeof each);
    for (int i = 0; i < COUNT; i++) {
        given[i].db.data = cases[i].alone ? NULL : given[i].db.data;
    }
    ck_assert_msg(t.kernels->gemm_gradients(t.kernels, given, COUNT) == PS_OK, "%s", ps_error_message());
    for (int i = 0; i < COUNT; i++) {
        const int64_t rows = cases[i].rows, m = cases[i].m, n = cases[i].n;
        float *dw = malloc((size_t)(m * n) * sizeof *dw), *db = malloc((size_t)n * sizeof *db);
        ck_assert_int_eq(d->download(d, PS_COMPUTE, dw, each[i].dw.data, (size_t)(m * n) * sizeof *dw), PS_OK);
        ck_assert_int_eq(d->download(d, PS_COMPUTE, db, each[i].db.data, (size_t)n * sizeof *db), PS_OK);
        int *sums = calloc((size_t)((m + 1) * n), sizeof *sums); /* db's last */
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t p = 0; p <= m; p++) {
                const int factor = p < m ? values[i][0][r * m + p] : 1 - cases[i].alone;
                for (int64_t q = 0; q < n; q++) {
                    sums[p * n + q] += factor * values[i][1][r * n + q];
                }
            }
        }
        for (int64_t at = 0; at < (m + 1) * n; at++) {
            const float found = at < m * n ? dw[at] : db[at - m * n];
            const int right = sums[at] + (int)((at < m * n ? at : at - m * n) % 7);
            ck_assert_msg(found == (float)right, "gradient %d, m %lld n %lld R %lld: element %lld of %s is %g, not %d", i,
                          (long long)m, (long long)n, (long long)rows, (long long)(at < m * n ? at : at - m * n),
                          at < m * n ? "dw" : "db", found, right);
        }
        const struct ps_tensor *tensors[4] = {&each[i].dw, &each[i].db, &each[i].x, &each[i].dy};
        for (int j = 0; j < 4; j++) {
            d->release(d, tensors[j]->data, (size_t)ps_tensor_count(tensors[j]) * ps_type_bytes(tensors[j]->type));
        }
        free(values[i][0]);
        free(values[i][1]);
        free(sums);
        free(dw);
        free(db);
    }
    table_close(&t);
}
END_TEST

/* A layer's four, whose tiles fill the multiprocessors once with rests, several times, and several times with a part, and some of
 * which lie turned in their tiles: against one product and one sum of columns after another, of whole numbers, so that all sums are
 * exact. */
enum { GRADIENTS_LARGE = 7 };
START_TEST(test_gradients_large)
{
    static const int64_t cases[GRADIENTS_LARGE][3] = {
        {4000, 384, 1536}, {300, 1024, 4096}, {2500, 640, 2560}, {5001, 160, 640},
        {9000, 144, 576},  {777, 320, 1280},  {2049, 200, 808}}; /* rows, d_model, d_ff */
    const int64_t R = cases[_i][0], d = cases[_i][1], f = cases[_i][2], sizes[4][2] = {{d, 3 * d}, {d, d}, {d, f}, {f, d}};
    struct table t = {.name = "cuda", .backend = "cuda", .device_kind = "cuda", .precision = PS_PRECISION_BF16};
    ck_assert_msg(table_open(&t) == PS_OK, "%s", ps_error_message());
    struct ps_device *device = t.device;
    struct ps_gemm_gradient each[4];
    float *expected[4];
    uint64_t random = 41;
    for (int i = 0; i < 4; i++) {
        const int64_t m = sizes[i][0], n = sizes[i][1];
        void *memory[4]; /* dw and db, x, dy */
        for (int j = 0; j < 2; j++) {
            const size_t bytes = (size_t)((m + 1) * n) * sizeof(float);
            ck_assert_int_eq(device->allocate(device, bytes, &memory[j]), PS_OK);
            ck_assert_int_eq(device->fill_zero(device, PS_COMPUTE, memory[j], bytes), PS_OK);
        }
        for (int j = 2; j < 4; j++) {
            const size_t count = (size_t)(R * (j == 2 ? m : n));
            uint16_t *host = malloc(count * sizeof *host);
            for (size_t at = 0; at < count; at++) {
                host[at] = bf16_bits((double)(random_bits(&random) % 7) - 3);
            }
            ck_assert_int_eq(device->allocate(device, count * sizeof *host, &memory[j]), PS_OK);
            ck_assert_int_eq(device->upload(device, PS_COMPUTE, memory[j], host, count * sizeof *host), PS_OK);
            ck_assert_int_eq(device->synchronize(device), PS_OK);
            free(host);
        }
        each[i] = (struct ps_gemm_gradient){.dw = ps_tensor_2d(memory[0], PS_F32, m, n),
                                            .db = ps_tensor_1d((float *)memory[0] + m * n, PS_F32, n),
                                            .x = ps_tensor_2d(memory[2], PS_BF16, R, m),
                                            .dy = ps_tensor_2d(memory[3], PS_BF16, R, n)};
        const struct ps_kernels *k = t.kernels;
        ck_assert_msg(k->gemm(k, &(struct ps_gemm){.c = ps_tensor_2d(memory[1], PS_F32, m, n),
                                                   .a = ps_tensor_transpose(each[i].x, 0, 1),
                                                   .b = each[i].dy,
                                                   .alpha = 2}) == PS_OK,
                      "%s", ps_error_message());
        for (int twice = 0; twice < 2; twice++) {
            ck_assert_int_eq(k->bias_grad(k, &(struct ps_bias_grad){.dbias = ps_tensor_1d((float *)memory[1] + m * n, PS_F32, n),
                                                                    .dy = each[i].dy}),
                             PS_OK);
        }
        float *right = malloc((size_t)((m + 1) * n) * sizeof *right);
        ck_assert_int_eq(device->download(device, PS_COMPUTE, right, memory[1], (size_t)((m + 1) * n) * sizeof *right), PS_OK);
        ck_assert_int_eq(device->synchronize(device), PS_OK);
        device->release(device, memory[1], (size_t)((m + 1) * n) * sizeof *right);
        expected[i] = right;
    }
    for (int twice = 0; twice < 2; twice++) {
        ck_assert_msg(t.kernels->gemm_gradients(t.kernels, each, 4) == PS_OK, "%s", ps_error_message());
    }
    for (int i = 0; i < 4; i++) {
        const int64_t m = sizes[i][0], n = sizes[i][1];
        float *found = malloc((size_t)((m + 1) * n) * sizeof *found);
        ck_assert_int_eq(device->download(device, PS_COMPUTE, found, each[i].dw.data, (size_t)((m + 1) * n) * sizeof *found),
                         PS_OK);
        ck_assert_int_eq(device->synchronize(device), PS_OK);
        for (int64_t at = 0; at < (m + 1) * n; at++) {
            ck_assert_msg(found[at] == expected[i][at], "gradient %d: row %lld (of %lld), column %lld is %g, not %g", i,
                          (long long)(at / n), (long long)m, (long long)(at % n), found[at], expected[i][at]);
        }
        device->release(device, each[i].dw.data, (size_t)((m + 1) * n) * sizeof *found);
        device->release(device, each[i].x.data, (size_t)(R * m) * 2);
        device->release(device, each[i].dy.data, (size_t)(R * n) * 2);
        free(expected[i]);
        free(found);
    }
    table_close(&t);
}
END_TEST

/* A weight's gradient beside another stream's kernels, and by small blocks where it comes second there: a' b added to what is
 * there, of whole numbers and so exact. Of 256 rows and fewer tiles are larger. */
START_TEST(test_beside)
{
    enum { MOST = 1001 * 672 };
    static const int sizes[][3] = {{672, 96, 896}, {33, 7, 1001}, {65, 24, 250}, {130, 96, 16}, {1, 1, 225}, {64, 64, 113}};
    struct table t = {
        .name = "cuda bf16", .backend = "cuda", .device_kind = "cuda", .precision = PS_PRECISION_BF16, .tiny_gemm = 1};
    ck_assert_msg(table_open(&t) == PS_OK, "%s", ps_error_message());
    struct ps_device *d = t.device;
    const struct ps_kernels *k = t.kernels;
    uint16_t *a = malloc(MOST * sizeof *a), *b = malloc(MOST * sizeof *b);
    float *c = malloc(MOST * sizeof *c), *sum = malloc(MOST * sizeof *sum);
    void *da, *db, *dc;
    ck_assert(a && b && c && sum && k->beside);
    ck_assert_int_eq(d->allocate(d, MOST * sizeof *a, &da), PS_OK);
    ck_assert_int_eq(d->allocate(d, MOST * sizeof *b, &db), PS_OK);
    ck_assert_int_eq(d->allocate(d, MOST * sizeof *c, &dc), PS_OK);
    uint64_t random = 7;
    for (int s = 0; s < 2 * LENGTH(sizes); s++) {
        const int m = sizes[s / 2][0], n = sizes[s / 2][1], rows = sizes[s / 2][2];
        for (int i = 0; i < rows * m; i++) {
            a[i] = bf16_bits((double)(random_bits(&random) % 5) - 2);
        }
        for (int i = 0; i < rows * n; i++) {
            b[i] = bf16_bits((double)(random_bits(&random) % 7) - 3);
        }
        for (int i = 0; i < m * n; i++) {
            c[i] = sum[i] = (float)(random_bits(&random) % 100);
        }
        ck_assert_int_eq(d->upload(d, PS_COMPUTE, da, a, (size_t)(rows * m) * sizeof *a), PS_OK);
        ck_assert_int_eq(d->upload(d, PS_COMPUTE, db, b, (size_t)(rows * n) * sizeof *b), PS_OK);
        ck_assert_int_eq(d->upload(d, PS_COMPUTE, dc, c, (size_t)(m * n) * sizeof *c), PS_OK);
        struct ps_gemm product = {ps_tensor_2d(dc, PS_F32, m, n), ps_tensor_transpose(ps_tensor_2d(da, PS_BF16, rows, m), 0, 1),
                                  ps_tensor_2d(db, PS_BF16, rows, n), 1, 1};
        product.b.settled = s % 2;
        ck_assert_int_eq(k->beside(k, PS_BESIDE_BEGIN), PS_OK);
        ck_assert_msg(k->gemm(k, &product) == PS_OK, "%s", ps_error_message());
        ck_assert_int_eq(k->beside(k, PS_BESIDE_END), PS_OK);
        ck_assert_int_eq(k->beside(k, PS_BESIDE_JOIN), PS_OK);
        for (int row = 0; row < rows; row++) {
            for (int i = 0; i < m * n; i++) {
                sum[i] += (float)(bf16_value(a[row * m + i / n]) * bf16_value(b[row * n + i % n]));
            }
        }
        ck_assert_int_eq(d->download(d, PS_COMPUTE, c, dc, (size_t)(m * n) * sizeof *c), PS_OK);
        for (int i = 0; i < m * n; i++) {
            ck_assert_msg(c[i] == sum[i], "%d x %d of %d rows: %g instead of %g at %d, %d", m, n, rows, c[i], sum[i], i / n, i % n);
        }
    }
    d->release(d, da, MOST * sizeof *a);
    d->release(d, db, MOST * sizeof *b);
    d->release(d, dc, MOST * sizeof *c);
    free(a);
    free(b);
    free(c);
    free(sum);
    table_close(&t);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("products");
    TCase *products = tcase_create("products");
    tcase_set_timeout(products, 0);
    if (ps_cuda_device_count() == 0) {
        printf("skipped: products on CUDA: no CUDA device\n");
    } else if (asked("PS_TEST_SMALL")) {
        printf("skipped: products on CUDA: all of them are large, and PS_TEST_SMALL asks for small ones\n");
    } else {
        tcase_add_test(products, test_far);
        tcase_add_test(products, test_beside);
        tcase_add_test(products, test_tuning);
        tcase_add_loop_test(products, test_long_products, 0, 2);
        tcase_add_test(products, test_scales);
        if (fused_encoder()) { /* on sm_90 */
            tcase_add_loop_test(products, test_gradients_together, 0, 2);
            tcase_add_loop_test(products, test_gradients_large, 0, GRADIENTS_LARGE);
        }
    }
    suite_add_tcase(suite, products);

    return run_suite(suite, CK_NOFORK) != 0; /* CUDA and OpenMP do not survive a fork */
}
