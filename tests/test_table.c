/* What stands around the operations: opening a table, names, hooks and counts; tensors' descriptions; messages. */
#include <stdint.h>
#include <string.h>

#include "tests/reference.h"
#include "tests/suite.h"

START_TEST(test_tensor)
{
    float values[24];
    struct ps_tensor t = ps_tensor_3d(values, PS_F32, 2, 3, 4);
    ck_assert_int_eq(t.stride[0], 12);
    ck_assert_int_eq(t.stride[1], 4);
    ck_assert_int_eq(t.stride[2], 1);
    ck_assert_int_eq(ps_tensor_count(&t), 24);
    ck_assert_int_eq(ps_tensor_contiguous(&t), 1);
    struct ps_tensor turned = ps_tensor_transpose(t, 1, 2);
    ck_assert_int_eq(turned.size[1], 4);
    ck_assert_int_eq(turned.stride[1], 1);
    ck_assert_int_eq(turned.stride[2], 4);
    ck_assert_int_eq(ps_tensor_contiguous(&turned), 0);
    struct ps_tensor slice = ps_tensor_slice(t, 2, 1, 2);
    ck_assert_ptr_eq(slice.data, values + 1);
    ck_assert_int_eq(slice.size[2], 2);
    ck_assert_int_eq(ps_tensor_contiguous(&slice), 0);
    slice = ps_tensor_slice(t, 0, 1, 1);
    ck_assert_ptr_eq(slice.data, values + 12);
    ck_assert_int_eq(ps_tensor_contiguous(&slice), 1);
    struct ps_tensor flat = ps_tensor_reshape(t, 2, (int64_t[]){6, 4});
    ck_assert_int_eq(flat.rank, 2);
    ck_assert_int_eq(flat.stride[0], 4);
    /* A dimension of 1 may have any stride. */
    struct ps_tensor column = ps_tensor_2d(values, PS_F32, 5, 1);
    column.stride[1] = 99;
    ck_assert_int_eq(ps_tensor_contiguous(&column), 1);
    struct ps_tensor one = ps_tensor_nd(values, PS_F64, 0, NULL);
    ck_assert_int_eq(ps_tensor_count(&one), 1);
    ck_assert_uint_eq(ps_type_bytes(PS_F32), 4);
    ck_assert_uint_eq(ps_type_bytes(PS_F64), 8);
    ck_assert_uint_eq(ps_type_bytes(PS_BF16), 2);
    ck_assert_uint_eq(ps_type_bytes(PS_F16), 2);
    ck_assert_uint_eq(ps_type_bytes(PS_I32), 4);
    ck_assert_ptr_eq(ps_tensor_1d(values, PS_F32, 3).data, values);
}
END_TEST

static enum ps_status tried(enum ps_status status)
{
    PS_TRY(status);
    return PS_USAGE;
}

START_TEST(test_fail)
{
    ck_assert_int_eq(ps_fail(PS_DATA, "row %d of %s", 3, "x.h5"), PS_DATA);
    ck_assert_str_eq(ps_error_message(), "row 3 of x.h5");
    /* A message may quote the one it replaces. */
    ck_assert_int_eq(ps_fail(PS_DEVICE, "split: %s", ps_error_message()), PS_DEVICE);
    ck_assert_str_eq(ps_error_message(), "split: row 3 of x.h5");
    char longer[5000];
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    ck_assert_int_eq(ps_fail(PS_USAGE, "%s", longer), PS_USAGE);
    ck_assert_uint_ge(strlen(ps_error_message()), 500);
    ck_assert_int_eq(tried(PS_OK), PS_USAGE);
    ck_assert_int_eq(tried(PS_CHECKPOINT), PS_CHECKPOINT);
}
END_TEST

START_TEST(test_open)
{
    struct ps_kernels *k = NULL;
    ck_assert_str_eq(oracle.kernels->backend, "reference");
    ck_assert_int_eq(oracle.kernels->real, PS_F64);
    ck_assert_int_eq(oracle.kernels->parameter, PS_F64);
    ck_assert_int_eq(ps_kernels_open("refrence", oracle.device, PS_FP32, NULL, &k), PS_USAGE);
    ck_assert_ptr_nonnull(strstr(ps_error_message(), "refrence"));
    ck_assert_int_eq(ps_kernels_open("reference", oracle.device, PS_TF32, NULL, &k), PS_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(ps_error_message(), "tf32"));
    ck_assert_int_eq(ps_kernels_open("cpu", oracle.device, PS_FP64, NULL, &k), PS_UNSUPPORTED);
    ck_assert_int_eq(ps_kernels_open("cpu", oracle.device, PS_PRECISION_BF16, NULL, &k), PS_UNSUPPORTED);
    ck_assert_int_eq(ps_kernels_open("reference", oracle.device, PS_PRECISION_BF16, NULL, &k), PS_UNSUPPORTED);
    ck_assert_int_eq(ps_kernels_open("cpu", oracle.device, PS_FP16, NULL, &k), PS_UNSUPPORTED);
    ck_assert_int_eq(ps_kernels_open("cuda", oracle.device, PS_FP32, NULL, &k), PS_DEVICE);
    ck_assert_int_eq(ps_kernels_open("reference", oracle.device, PS_FP32, NULL, &k), PS_OK);
    ck_assert_int_eq(k->real, PS_F32);
    ck_assert_int_eq(k->parameter, PS_F32);
    ck_assert(k->encoder_forward == NULL);
    k->close(k);
    ck_assert_str_eq(ps_precision_name(PS_FP64), "fp64");
    ck_assert_str_eq(ps_precision_name(PS_FP32), "fp32");
    ck_assert_str_eq(ps_precision_name(PS_TF32), "tf32");
    ck_assert_str_eq(ps_precision_name(PS_PRECISION_BF16), "bf16");
    ck_assert_str_eq(ps_precision_name(PS_FP16), "fp16");
}
END_TEST

struct trace {
    enum ps_op op[8];
    int after[8], n;
    const void *arguments[8];
};

static void trace_hook(void *argument, enum ps_op op, const void *operation_arguments, int after)
{
    struct trace *trace = argument;
    ck_assert_int_lt(trace->n, 8);
    trace->op[trace->n] = op;
    trace->after[trace->n] = after;
    trace->arguments[trace->n++] = operation_arguments;
}

static const struct ps_kernels *called_with;

static enum ps_status failing_add(const struct ps_kernels *k, const struct ps_add *arguments)
{
    (void)arguments;
    called_with = k;
    return ps_fail(PS_DEVICE, "out of order");
}

START_TEST(test_hooked)
{
    ck_assert_str_eq(ps_op_name(PS_OP_gemm), "gemm");
    ck_assert_int_eq(ps_op_kind(PS_OP_softmax), PS_KIND_SUB);
    ck_assert_int_eq(ps_op_kind(PS_OP_encoder_backward), PS_KIND_FUSED);
    ck_assert_int_eq(ps_op_tensors(PS_OP_layernorm_backward), 11);
    ck_assert_int_eq(ps_op_tensors(PS_OP_advance), 0);

    struct trace trace = {0};
    struct ps_kernels inner = {.backend = "fake", .precision = PS_FP32, .add = failing_add}, *k = NULL;
    ck_assert_int_eq(ps_kernels_hooked(&inner, trace_hook, &trace, &k), PS_OK);
    ck_assert_str_eq(k->backend, "fake");
    ck_assert(k->gemm == NULL);
    ck_assert(k->encoder_forward == NULL);
    double any[12] = {0};
    struct ps_add arguments = {.y = ps_tensor_2d(any, PS_F64, 3, 4), .b = ps_tensor_1d(any, PS_F64, 12)};
    ck_assert_int_eq(k->add(k, &arguments), PS_DEVICE);
    ck_assert_str_eq(ps_error_message(), "add [3,4] [12]: out of order");
    ck_assert_ptr_eq(called_with, &inner);
    ck_assert_int_eq(trace.n, 2);
    for (int i = 0; i < 2; i++) {
        ck_assert_int_eq(trace.op[i], PS_OP_add);
        ck_assert_int_eq(trace.after[i], i);
        ck_assert_ptr_eq(trace.arguments[i], &arguments);
    }
    k->close(k);
}
END_TEST

static enum ps_status refusing_add(const struct ps_kernels *k, const struct ps_add *arguments)
{
    (void)k;
    (void)arguments;
    return ps_fail(PS_UNSUPPORTED, "not here");
}

/* What is refused has not been done: hooks see no end of it, and it does not count. */
START_TEST(test_hooked_refusal)
{
    struct trace trace = {0};
    struct ps_counts counts = {0};
    struct ps_kernels inner = {.backend = "fake", .precision = PS_FP32, .add = refusing_add}, *k = NULL;
    double any[12] = {0};
    struct ps_add arguments = {.y = ps_tensor_2d(any, PS_F64, 3, 4)};
    ck_assert_int_eq(ps_kernels_hooked(&inner, trace_hook, &trace, &k), PS_OK);
    ck_assert_int_eq(k->add(k, &arguments), PS_UNSUPPORTED);
    ck_assert_int_eq(trace.n, 1);
    ck_assert_int_eq(trace.after[0], 0);
    k->close(k);
    ck_assert_int_eq(ps_kernels_hooked(&inner, ps_count_hook, &counts, &k), PS_OK);
    ck_assert_int_eq(k->add(k, &arguments), PS_UNSUPPORTED);
    ck_assert_int_eq(counts.calls[PS_OP_add], 0);
    k->close(k);
}
END_TEST

static enum ps_status failing_gradients(const struct ps_kernels *k, const struct ps_gemm_gradient *each, int count)
{
    (void)each;
    called_with = k;
    ck_assert_int_eq(count, 3);
    return ps_fail(PS_DEVICE, "out of order");
}

static void *later_memory;

static enum ps_status failing_sums(const struct ps_kernels *k, void *memory, size_t bytes)
{
    called_with = k;
    later_memory = memory;
    ck_assert_uint_eq(bytes, 40);
    return ps_fail(PS_DEVICE, "no sums");
}

/* Sums that wait are no operation to the hook. */
START_TEST(test_hooked_later_sums)
{
    struct trace trace = {0};
    struct ps_kernels inner = {.backend = "fake", .precision = PS_FP32, .later_sums = failing_sums}, none = {0}, *k = NULL;
    ck_assert_int_eq(ps_kernels_hooked(&inner, trace_hook, &trace, &k), PS_OK);
    ck_assert_int_eq(k->later_sums(k, &trace, 40), PS_DEVICE);
    ck_assert_ptr_eq(called_with, &inner);
    ck_assert_ptr_eq(later_memory, &trace);
    ck_assert_int_eq(trace.n, 0);
    k->close(k);
    ck_assert_int_eq(ps_kernels_hooked(&none, trace_hook, &trace, &k), PS_OK);
    ck_assert(k->later_sums == NULL);
    k->close(k);
}
END_TEST

/* Several gradients at once are an operation each to the hook. */
START_TEST(test_hooked_gradients)
{
    struct trace trace = {0};
    struct ps_kernels inner = {.backend = "fake", .precision = PS_FP32, .gemm_gradients = failing_gradients}, none = {0}, *k = NULL;
    ck_assert_int_eq(ps_kernels_hooked(&inner, trace_hook, &trace, &k), PS_OK);
    double any[12] = {0};
    const struct ps_gemm_gradient each[3] = {{.dw = ps_tensor_2d(any, PS_F64, 3, 4), .db = ps_tensor_1d(any, PS_F64, 4)}};
    ck_assert_int_eq(k->gemm_gradients(k, each, 3), PS_DEVICE);
    ck_assert_str_eq(ps_error_message(), "gemm_gradient [3,4] [4]: out of order");
    ck_assert_ptr_eq(called_with, &inner);
    ck_assert_int_eq(trace.n, 6);
    for (int i = 0; i < 6; i++) {
        ck_assert_int_eq(trace.op[i], PS_OP_gemm_gradient);
        ck_assert_int_eq(trace.after[i], i % 2);
        ck_assert_ptr_eq(trace.arguments[i], &each[i / 2]);
    }
    k->close(k);
    ck_assert_int_eq(ps_kernels_hooked(&none, trace_hook, &trace, &k), PS_OK);
    ck_assert(k->gemm_gradients == NULL);
    k->close(k);
}
END_TEST

START_TEST(test_counts)
{
    enum { M = 6, N = 4, K = 5 };
    struct ps_counts counts = {0};
    struct ps_kernels *k = NULL;
    ck_assert_int_eq(ps_kernels_hooked(oracle.kernels, ps_count_hook, &counts, &k), PS_OK);
    double a[2 * M * K], b[2 * K * N], c[2 * M * N], bias[N] = {0}, y[M * N], statistics[2 * M], gamma[N] = {0};
    fill_normal(a, 2 * M * K, 1);
    fill_normal(b, 2 * K * N, 2);
    fill_normal(c, 2 * M * N, 3);
    struct ps_tensor b3 = ps_tensor_3d(b, PS_F64, 2, K, N);
    struct ps_gemm product = {ps_tensor_3d(c, PS_F64, 2, M, N), ps_tensor_3d(a, PS_F64, 2, M, K), b3, 1, 0};
    ck_assert_int_eq(k->gemm(k, &product), PS_OK);
    double bytes = 8 * 2 * (M * N + M * K + K * N);
    ck_assert(counts.flops[PS_OP_gemm] == 2 * 2 * M * N * K);
    ck_assert(counts.bytes[PS_OP_gemm] == bytes);
    product.beta = 1;        /* c is read too */
    product.b.stride[0] = 0; /* one b for both */
    ck_assert_int_eq(k->gemm(k, &product), PS_OK);
    ck_assert(counts.flops[PS_OP_gemm] == 2 * 2 * 2 * M * N * K);
    ck_assert(counts.bytes[PS_OP_gemm] == bytes + bytes + 8 * (2 * M * N - K * N));
    ck_assert_int_eq(k->layernorm(k, &(struct ps_layernorm){matrix(y, M, N), vector(statistics, M), vector(statistics + M, M),
                                                            matrix(c, M, N), vector(gamma, N), vector(bias, N), 1e-5}),
                     PS_OK);
    ck_assert_int_eq(k->bias_add(k, &(struct ps_bias_add){matrix(y, M, N), vector(bias, N)}), PS_OK);
    ck_assert_int_eq(k->bias_grad(k, &(struct ps_bias_grad){.dbias = vector(bias, N), .dy = matrix(y, M, N)}), PS_OK);
    ck_assert(counts.flops[PS_OP_layernorm] == 8 * M * N);
    ck_assert(counts.bytes[PS_OP_layernorm] == 8 * (2 * M * N + 2 * M + 2 * N));
    ck_assert(counts.bytes[PS_OP_bias_add] == 8 * (2 * M * N + N));
    ck_assert(counts.bytes[PS_OP_bias_grad] == 8 * (M * N + 2 * N));
    ck_assert_int_eq(ps_counts_calls(&counts, PS_KIND_GEMM), 2);
    ck_assert_int_eq(ps_counts_calls(&counts, PS_KIND_SUB), 3);
    ck_assert_int_eq(ps_counts_kinds(&counts, PS_KIND_GEMM), 1);
    ck_assert_int_eq(ps_counts_kinds(&counts, PS_KIND_SUB), 3);
    ck_assert_int_eq(ps_counts_kinds(&counts, PS_KIND_OPTIM), 0);
    k->close(k);

    /* Of a large series only the batch is read: B 2 of W 100, C 3, L 8, P 4, N 2. */
    float any[1];
    struct ps_gather_patches gather = {.patches = ps_tensor_2d(any, PS_F32, 2 * 3 * 2, 4),
                                       .mean = ps_tensor_1d(any, PS_F32, 6),
                                       .std = ps_tensor_1d(any, PS_F32, 6),
                                       .inputs = ps_tensor_3d(any, PS_F32, 100, 3, 8),
                                       .indices = ps_tensor_1d(any, PS_I32, 100),
                                       .batch = 2};
    expect_close(ps_op_bytes(PS_OP_gather_patches, &gather), 4 * (48 + 6 + 6 + 48 + 2), 1e-12);
    expect_close(ps_op_flops(PS_OP_gather_patches, &gather), 6 * 48, 1e-12);
    struct ps_adamw step = {.parameters = ps_tensor_1d(any, PS_F32, 10),
                            .gradients = ps_tensor_1d(any, PS_F32, 10),
                            .m = ps_tensor_1d(any, PS_F32, 10),
                            .v = ps_tensor_1d(any, PS_F64, 10),
                            .learning_rates = ps_tensor_1d(any, PS_F64, 5000)};
    ck_assert(ps_op_bytes(PS_OP_adamw, &step) == 10 * 2 * (4 + 4 + 4 + 8) + 8);
    ck_assert(ps_op_flops(PS_OP_adamw, &step) == 160);

    /* B 2 of W 100, C 3, P 4, N 2, d 8: 12 rows; a head of K 16, H 5. */
    struct ps_embed_forward embed = {.patches = ps_tensor_2d(any, PS_F32, 12, 4),
                                     .inputs = ps_tensor_3d(any, PS_F32, 100, 3, 8),
                                     .bias = ps_tensor_1d(any, PS_F32, 8),
                                     .batch = 2};
    ck_assert(ps_op_flops(PS_OP_embed_forward, &embed) == 2 * 12 * 4 * 8);
    expect_close(ps_op_bytes(PS_OP_embed_forward, &embed), 4 * (48 + 48 + 8), 1e-12);
    struct ps_embed_backward embed_back = {
        .d_weight = ps_tensor_2d(any, PS_F32, 4, 8), .d_bias = ps_tensor_1d(any, PS_F32, 8), .patches = embed.patches};
    ck_assert(ps_op_flops(PS_OP_embed_backward, &embed_back) == 2 * 12 * 4 * 8);
    ck_assert(ps_op_bytes(PS_OP_embed_backward, &embed_back) == 4 * (2 * (32 + 8) + 48));
    struct ps_head_step head = {.z = ps_tensor_2d(any, PS_F32, 6, 16),
                                .bias = ps_tensor_1d(any, PS_F32, 5),
                                .targets = ps_tensor_3d(any, PS_F32, 100, 3, 5),
                                .batch = 2};
    ck_assert(ps_op_flops(PS_OP_head_step, &head) == 4 * 6 * 16 * 5);
    expect_close(ps_op_bytes(PS_OP_head_step, &head), 4 * (96 + 5 + 30), 1e-12);

    /* A layer's products: S 2, N 3, d 4, f 8 has 6 rows. */
    const int64_t size[4] = {2, 2, 3, 4};
    struct ps_encoder_forward layer = {.stream = ps_tensor_nd(any, PS_F32, 4, size),
                                       .sizes = {.layers = 1, .n_heads = 2, .d_ff = 8}};
    struct ps_encoder_backward back = {.stream = layer.stream, .sizes = layer.sizes};
    double products = 2 * 6 * 4 * 12 + 2 * (2 * 2 * 3 * 3 * 4) + 2 * 6 * 4 * 4 + 2 * (2 * 6 * 4 * 8);
    ck_assert(ps_op_flops(PS_OP_encoder_forward, &layer) == products);
    ck_assert(ps_op_flops(PS_OP_encoder_backward, &back) == 3 * products);
    double alone = ps_op_bytes(PS_OP_encoder_forward, &layer), back_alone = ps_op_bytes(PS_OP_encoder_backward, &back);
    layer.embed = &embed;
    back.embed = &embed_back;
    ck_assert(ps_op_flops(PS_OP_encoder_forward, &layer) == products + 2 * 12 * 4 * 8);
    ck_assert(ps_op_flops(PS_OP_encoder_backward, &back) == 3 * products + 2 * 12 * 4 * 8);
    expect_close(ps_op_bytes(PS_OP_encoder_forward, &layer), alone + 4 * (48 + 48 + 8), 1e-12);
    expect_close(ps_op_bytes(PS_OP_encoder_backward, &back), back_alone + 4 * (2 * (32 + 8) + 48), 1e-12);
    /* The rest of the head, and AdamW of 50 parameters with a copy: besides what the encoder's own tensors count. */
    struct ps_head_gradient rest = {.d_weight = ps_tensor_2d(any, PS_F32, 16, 5),
                                    .d_bias = ps_tensor_1d(any, PS_F32, 5),
                                    .z = head.z,
                                    .dx = ps_tensor_2d(any, PS_F32, 6, 5),
                                    .partials = ps_tensor_2d(any, PS_F64, 3, 6)};
    struct ps_adamw update = {.parameters = ps_tensor_1d(any, PS_F32, 50),
                              .gradients = ps_tensor_1d(any, PS_F32, 50),
                              .m = ps_tensor_1d(any, PS_F32, 50),
                              .v = ps_tensor_1d(any, PS_F64, 50),
                              .learning_rates = ps_tensor_1d(any, PS_F64, 9),
                              .copy = ps_tensor_1d(any, PS_BF16, 50)};
    back.head = &rest;
    back.update = &update;
    ck_assert(ps_op_flops(PS_OP_encoder_backward, &back) ==
              3 * products + 2 * 12 * 4 * 8 + 2 * 6 * 16 * 5 + 18 + ps_op_flops(PS_OP_adamw, &update));
    expect_close(ps_op_bytes(PS_OP_encoder_backward, &back),
                 back_alone + 4 * (2 * (32 + 8) + 48) + 4 * (2 * 80 + 30 + 2 * 5) + 8 * 18 + 50 * (4 + 8 + 16 + 2) + 8, 1e-12);
    /* Attention of S 2, h 2, N 3, e 4. */
    struct ps_attention tiled = {.q = layer.stream};
    struct ps_attention_backward tiled_back = {.q = layer.stream};
    ck_assert(ps_op_flops(PS_OP_attention, &tiled) == 2 * (2.0 * 2 * 2 * 3 * 3 * 4));
    ck_assert(ps_op_flops(PS_OP_attention_backward, &tiled_back) == 5 * (2.0 * 2 * 2 * 3 * 3 * 4));
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("table");
    TCase *parts = tcase_create("parts");
    tcase_add_test(parts, test_tensor);
    tcase_add_test(parts, test_fail);
    tcase_add_test(parts, test_hooked);
    tcase_add_test(parts, test_hooked_refusal);
    tcase_add_test(parts, test_hooked_gradients);
    tcase_add_test(parts, test_hooked_later_sums);
    suite_add_tcase(suite, parts);
    TCase *opened = tcase_create("opened");
    tcase_add_checked_fixture(opened, open_oracle, close_oracle);
    tcase_add_test(opened, test_open);
    tcase_add_test(opened, test_counts);
    suite_add_tcase(suite, opened);

    return run_suite(suite, CK_NOFORK) != 0;
}
