/* Masked pre-training: which patches are masked, and a training pass of models that reconstruct them: gradients against finite
 * differences, every backend and level against the double reference. tests/test_golden.c compares with PyTorch,
 * tests/test_transfer.c runs the programs. */
#include "tests/model_fixture.h"
#include "tests/suite.h"

#define SIZES .channels = 3, .seq_len = 43, .pred_len = 4, .patch_len = 5, .d_model = 12, .n_heads = 3, .d_ff = 10, .n_layers = 2

/* Rows between patches and beyond the last; few and many masked; norms at both places; dropout everywhere. */
static const struct ps_model_shape shapes[] = {
    {SIZES, .stride = 5, .revin = 1, .mask_ratio = 0.4},
    {SIZES, .stride = 7, .mask_ratio = 0.8, .dropout = 0.3, .norm = PS_NORM_RMS, .positions = PS_POSITIONS_SINCOS},
    {SIZES, .stride = 5, .revin = 1, .mask_ratio = 0.13, .norm = PS_NORM_BATCH, .norm_place = PS_NORM_POST, .residual_attention = 1,
     .activation = PS_GELU, .patches_from_end = 1, .dropout_at = {[PS_DROP_HEAD] = {1, 0.3}}},
    {SIZES, .stride = 6, .revin = 1, .revin_subtract_last = 1, .mask_ratio = 0.5, .dropout = 0.1, .activation = PS_SWIGLU,
     .positions = PS_POSITIONS_ROPE, .norm_place = PS_NORM_POST},
};
enum { SHAPES = sizeof shapes / sizeof *shapes, BATCH = 4 };

/* ---- which patches ---- */

START_TEST(counts)
{
    static const struct {
        int64_t patches;
        double ratio;
        int64_t masked;
    } cases[] = {{42, 0.4, 17}, {28, 0.4, 12}, {5, 0.4, 2}, {10, 0.4, 4}, {10, 0.35, 4}, {2, 0.5, 1}, {100, 0.01, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct ps_model_shape shape = {
            .seq_len = cases[i].patches * 3, .patch_len = 3, .stride = 3, .mask_ratio = cases[i].ratio};
        ck_assert_int_eq(ps_masked_patches(&shape), cases[i].masked);
    }
}
END_TEST

/* Values that stand in a masked patch's place, or could tell them. */
START_TEST(refuses)
{
    static const struct {
        struct ps_model_shape shape;
        const char *says;
    } cases[] = {
        {{SIZES, .stride = 5, .mask_ratio = 1}, "model.mask_ratio: 1 is not between"},
        {{SIZES, .stride = 5, .mask_ratio = -0.5}, "model.mask_ratio: -0.5 is not between"},
        {{SIZES, .stride = 5, .mask_ratio = NAN}, "model.mask_ratio"},
        {{SIZES, .stride = 5, .mask_ratio = 0.99}, "masks 8 of 8 patches"},
        {{SIZES, .stride = 5, .mask_ratio = 1e-30}, "masks 0 of 8 patches"},
        {{SIZES, .stride = 4, .mask_ratio = 0.4}, "model.stride: 4 is less than patch_len, 5"},
        {{SIZES, .stride = 5, .pad_end = 1, .mask_ratio = 0.4}, "model.padding: end"},
        {{SIZES, .stride = 5, .quantiles = 3, .mask_ratio = 0.4}, "train.loss: quantile"},
        {{SIZES, .stride = 5, .individual_head = 1, .mask_ratio = 0.4}, "model.head: individual"},
        {{SIZES, .stride = 5, .revin = 1, .revin_affine = 1, .mask_ratio = 0.4}, "model.revin_affine"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ck_assert_int_eq(ps_model_shape_check(&cases[i].shape), PS_USAGE);
        ck_assert_msg(strstr(ps_error_message(), cases[i].says) != NULL, "%s: %s", cases[i].says, ps_error_message());
    }
}
END_TEST

/* The masks of `batch` windows at that state, [batch C N]: 1 where the forward pass leaves a target. */
static double *masks_of(struct fixture *f, uint64_t step, uint64_t cursor, int64_t batch)
{
    const struct ps_step_state state = {.step = step, .cursor = cursor};
    OK(f->device->upload(f->device, PS_COMPUTE, f->state, &state, sizeof state));
    OK(ps_model_forward(f->model, &f->windows, f->state, batch, 0));
    const int64_t rows = ps_head_rows(&f->model->shape, batch), P = f->model->shape.patch_len;
    double *targets = from_device(f->device, f->k->parameter, f->model->cache.shared.targets, rows * P);
    double *mask = malloc((size_t)rows * sizeof *mask);
    for (int64_t r = 0; r < rows; r++) {
        mask[r] = !isnan(targets[r * P]);
        for (int64_t p = 0; p < P; p++) {
            ck_assert(isnan(targets[r * P + p]) == isnan(targets[r * P]));
        }
    }
    free(targets);
    return mask;
}

/* As many of each sequence's patches as there should be, of each place about as often, in every epoch others, and for a window
 * those of its place in the pass, whatever the batch that it comes in. */
START_TEST(drawn_by_place)
{
    enum { STEPS = 400 };
    const struct ps_model_shape *shape = &shapes[0];
    struct fixture f = fixture_open("reference", "cpu", PS_FP64, shape, BATCH, PS_LEVEL_GEMM, 1);
    const int64_t N = ps_patches(shape), M = ps_masked_patches(shape), S = BATCH * shape->channels, W = shape->channels * N;
    double *often = calloc((size_t)N, sizeof *often);
    int64_t same = 0;
    double *before = NULL;
    for (uint64_t step = 0; step < STEPS; step++) {
        double *mask = masks_of(&f, step, 0, BATCH);
        for (int64_t s = 0; s < S; s++) {
            double sum = 0;
            for (int64_t n = 0; n < N; n++) {
                sum += mask[s * N + n];
                often[n] += mask[s * N + n];
            }
            ck_assert(sum == (double)M);
            same += before && memcmp(mask + s * N, before + s * N, (size_t)N * sizeof *mask) == 0;
            same += s > 0 && memcmp(mask + s * N, mask + (s - 1) * N, (size_t)N * sizeof *mask) == 0;
        }
        free(before);
        before = mask;
    }
    free(before);
    for (int64_t n = 0; n < N; n++) { /* five deviations of a binomial */
        const double p = (double)M / (double)N, draws = STEPS * (double)S;
        ck_assert_double_le(fabs(often[n] - p * draws), 5 * sqrt(draws * p * (1 - p)));
    }
    ck_assert_int_lt(same, STEPS * S / 10); /* one in 70 is by chance */
    double *all = masks_of(&f, 3, 0, BATCH);
    for (int64_t w = 0; w < BATCH; w++) {
        double *one = masks_of(&f, 3, (uint64_t)w, 1);
        ck_assert_mem_eq(one, all + w * W, (size_t)W * sizeof *one);
        free(one);
    }
    free(all);
    free(often);
    fixture_close(&f);
}
END_TEST

/* What the encoder reads is 0 where a patch is masked, and the patch elsewhere; no value of a masked patch reaches the outputs. */
START_TEST(nothing_leaks)
{
    const struct ps_model_shape *shape = &shapes[1]; /* without RevIN, whose statistics are the whole window's */
    struct fixture f = fixture_open("reference", "cpu", PS_FP64, shape, BATCH, PS_LEVEL_GEMM, 1);
    const int64_t N = ps_patches(shape), P = shape->patch_len, S = BATCH * shape->channels, L = shape->seq_len;
    double *mask = masks_of(&f, 0, 0, BATCH), *seen = from_device(f.device, PS_F64, f.model->cache.shared.patches, S * N * P);
    double *targets = from_device(f.device, PS_F64, f.model->cache.shared.targets, S * N * P);
    double *out = from_device(f.device, PS_F64, f.model->cache.shared.head_out, S * N * P);
    double *inputs = from_device(f.device, PS_F64, f.windows.inputs.data, S * L);
    for (int64_t i = 0; i < S * N * P; i++) {
        const int64_t s = i / (N * P), n = i / P % N, at = n * shape->stride + i % P;
        const int64_t from = (BATCH - 1 - s / shape->channels) * shape->channels + s % shape->channels; /* windows run backwards */
        double *input = &inputs[from * L + at];
        ck_assert(seen[i] == (mask[i / P] > 0 ? 0 : *input));
        ck_assert(mask[i / P] > 0 ? targets[i] == *input : isnan(targets[i]));
        *input += mask[i / P] > 0 ? 100 : 0;
    }
    set_device(f.device, PS_F64, f.windows.inputs.data, inputs, S * L);
    free(masks_of(&f, 0, 0, BATCH));
    double *again = from_device(f.device, PS_F64, f.model->cache.shared.head_out, S * N * P);
    ck_assert_mem_eq(out, again, (size_t)(S * N * P) * sizeof *out);
    free(mask);
    free(seen);
    free(targets);
    free(out);
    free(inputs);
    free(again);
    fixture_close(&f);
}
END_TEST

/* ---- a training pass ---- */

/* g.v against the 4th-order central stencil of the loss along v, in double. */
START_TEST(finite_differences)
{
    const struct ps_model_shape *shape = &shapes[_i % SHAPES];
    struct fixture f = fixture_open("reference", "cpu", PS_FP64, shape, BATCH, _i < SHAPES ? PS_LEVEL_GEMM : PS_LEVEL_NONE, _i % 2);
    double *theta = from_device(f.device, PS_F64, f.model->parameters, f.count);
    fixture_loss(&f);
    double *gradient = from_device(f.device, PS_F64, f.model->gradients, f.count);
    double *v = malloc((size_t)f.count * sizeof *v), *moved = malloc((size_t)f.count * sizeof *moved), worst = 0;
    for (uint32_t direction = 0; direction < 10; direction++) {
        static const double h = 2e-3, at[4] = {-2, -1, 1, 2}, weight[4] = {1, -8, 8, -1};
        double norm = 0, analytic = 0, numeric = 0;
        for (int64_t i = 0; i < f.count; i++) {
            v[i] = normal(17, (uint64_t)i, 200 + direction);
            norm += v[i] * v[i];
        }
        for (int64_t i = 0; i < f.count; i++) {
            v[i] /= sqrt(norm);
            analytic += gradient[i] * v[i];
        }
        for (int j = 0; j < 4; j++) {
            for (int64_t i = 0; i < f.count; i++) {
                moved[i] = theta[i] + at[j] * h * v[i];
            }
            set_device(f.device, PS_F64, f.model->parameters, moved, f.count);
            numeric += weight[j] * fixture_loss(&f) / (12 * h);
        }
        worst = fmax(worst, fabs(numeric - analytic) / fabs(analytic));
    }
    printf("finite differences, shape %d, level %s: worst relative error of 10 directions %.2g\n", _i % SHAPES,
           ps_level_name(f.model->options.level), worst);
    ck_assert_msg(worst <= 1e-7, "relative error %.3g", worst);
    free(theta);
    free(gradient);
    free(v);
    free(moved);
    fixture_close(&f);
}
END_TEST

struct masked_case {
    const char *backend, *device;
    enum ps_precision precision;
    struct ps_model_options options;
    double loss, gradients, small; /* bounds, as those of test_model's variants */
};

/* Measured on the CPU: fp64 2.2e-16, 2.4e-14, small ones 1.8e-13; fp32 6e-8, 6e-6 (b_p before BatchNorm, whose terms cancel) and
 * 3e-5. On an H200 that b_p has 6e-3 in tf32 and 0.11 in bf16; the reference, rounded to fp16 where it stores activations,
 * has 1.3e-2 and small ones of 8.3e-2. */
static const struct masked_case cases[] = {
    {"reference", "cpu", PS_FP64, {.level = PS_LEVEL_NONE}, 5e-15, 5e-14, 5e-13},
    {"reference", "cpu", PS_FP32, {.level = PS_LEVEL_NONE}, 1e-6, 2e-5, 1e-4},
    {"cpu", "cpu", PS_FP32, {.level = PS_LEVEL_NONE}, 1e-6, 2e-5, 1e-4},
    {"cpu", "cpu", PS_FP32, {.level = PS_LEVEL_GEMM}, 1e-6, 2e-5, 1e-4},
    {"cpu",
     "cpu",
     PS_FP32,
     {.level = PS_LEVEL_GEMM, .merge_qkv = 1, .epilogue = 1, .tiled_attention = 1, .feed_forward = 1},
     1e-6,
     2e-5,
     1e-4},
    {"cuda", "cuda", PS_FP32, {.level = PS_LEVEL_NONE}, 1e-5, 1e-4, 1e-3},
    {"cuda", "cuda", PS_FP32, {.level = PS_LEVEL_GEMM, .merge_qkv = 1, .epilogue = 1, .tiled_attention = 1}, 1e-5, 1e-4, 1e-3},
    {"cuda", "cuda", PS_TF32, {.level = PS_LEVEL_GEMM, .merge_qkv = 1, .epilogue = 1}, 2e-3, 1e-2, 2e-2},
    {"cuda", "cuda", PS_FP16, {.level = PS_LEVEL_GEMM, .merge_qkv = 1, .epilogue = 1, .tiled_attention = 1}, 2e-3, 3e-2, 0.15},
    {"cuda",
     "cuda",
     PS_PRECISION_BF16,
     {.level = PS_LEVEL_GEMM, .merge_qkv = 1, .epilogue = 1, .tiled_attention = 1},
     1e-2,
     2e-1,
     1}};
enum { CASES = sizeof cases / sizeof *cases, CPU_CASES = 5 };

/* A model that every family of level layer might serve. */
static const struct ps_model_shape layer_shapes[] = {{.channels = 7,
                                                      .seq_len = 128,
                                                      .pred_len = 96,
                                                      .patch_len = 8,
                                                      .stride = 8,
                                                      .d_model = 16,
                                                      .n_heads = 4,
                                                      .d_ff = 128,
                                                      .n_layers = 3,
                                                      .dropout = 0.3,
                                                      .revin = 1,
                                                      .mask_ratio = 0.4},
                                                     {.channels = 5,
                                                      .seq_len = 96,
                                                      .pred_len = 24,
                                                      .patch_len = 8,
                                                      .stride = 8,
                                                      .d_model = 64,
                                                      .n_heads = 4,
                                                      .d_ff = 128,
                                                      .n_layers = 2,
                                                      .dropout = 0.1,
                                                      .revin = 1,
                                                      .mask_ratio = 0.4},
                                                     {.channels = 3,
                                                      .seq_len = 336,
                                                      .pred_len = 96,
                                                      .patch_len = 12,
                                                      .stride = 12,
                                                      .d_model = 128,
                                                      .n_heads = 16,
                                                      .d_ff = 256,
                                                      .n_layers = 2,
                                                      .revin = 1,
                                                      .mask_ratio = 0.5}};
static const struct masked_case layer_cases[] = {{"cuda", "cuda", PS_TF32, {.level = PS_LEVEL_LAYER}, 2e-3, 5e-3, 1e-2},
                                                 {"cuda", "cuda", PS_FP16, {.level = PS_LEVEL_LAYER}, 2e-3, 1e-2, 2e-2},
                                                 {"cuda", "cuda", PS_PRECISION_BF16, {.level = PS_LEVEL_LAYER}, 2e-2, 1e-1, 5e-1}};
enum {
    LAYER_SHAPES = sizeof layer_shapes / sizeof *layer_shapes,
    LAYER_CASES = LAYER_SHAPES * (int)(sizeof layer_cases / sizeof *layer_cases)
};

/* The errors of the batch after a scoring pass, and after one training pass its loss and gradients. */
static double *pass_of(struct fixture *f, double errors[PS_ERRORS], double *loss)
{
    void *slot;
    const size_t bytes = PS_ERRORS * sizeof *errors;
    const struct ps_step_state start = {0};
    OK(f->device->allocate(f->device, bytes, &slot));
    OK(f->device->upload(f->device, PS_COMPUTE, f->state, &start, sizeof start));
    OK(ps_model_forward(f->model, &f->windows, f->state, f->batch, 0));
    OK(ps_model_errors(f->model, &f->windows, f->state, f->batch, ps_tensor_2d(slot, PS_F64, 1, PS_ERRORS), f->batch));
    OK(f->device->download(f->device, PS_COMPUTE, errors, slot, bytes));
    f->device->release(f->device, slot, bytes);
    *loss = fixture_loss(f);
    return fixture_gradients(f);
}

static void compare(const struct masked_case *c, const struct ps_model_shape *shape)
{
    struct ps_model_options options = c->options;
    options.seed = 5;
    options.tiled_attention &= !(shape->dropout_at[PS_DROP_ATTENTION_WEIGHTS].rate > 0);
    struct fixture oracle = fixture_open("reference", "cpu", PS_FP64, shape, BATCH, PS_LEVEL_GEMM, 0);
    struct fixture f = fixture_open_with(c->backend, c->device, c->precision, shape, BATCH, &options);
    double expected_loss, loss, expected_errors[PS_ERRORS], errors[PS_ERRORS];
    double *expected = pass_of(&oracle, expected_errors, &expected_loss), *got = pass_of(&f, errors, &loss);
    int worst = 0;
    const double small = take_small(f.model->layout, got, expected), error = gradient_error(f.model->layout, got, expected, &worst);
    const double off = fmax(fabs(errors[PS_ERROR_SQUARES] / expected_errors[PS_ERROR_SQUARES] - 1),
                            fabs(errors[PS_ERROR_ABSOLUTES] / expected_errors[PS_ERROR_ABSOLUTES] - 1));
    ck_assert(errors[PS_ERROR_OBSERVED] == (double)(BATCH * shape->channels * ps_masked_patches(shape) * shape->patch_len));
    printf("%s %s level %s, d %d: loss %.2g, errors %.2g, gradients %.2g (%s), small ones %.2g\n", c->backend,
           ps_precision_name(c->precision), ps_level_name(options.level), (int)shape->d_model, fabs(loss / expected_loss - 1), off,
           error, f.model->layout->table[worst].name, small);
    ck_assert_double_le(fabs(loss / expected_loss - 1), c->loss);
    ck_assert_double_le(off, c->loss);
    ck_assert_msg(error <= c->gradients, "gradient of %s off by %.3g", f.model->layout->table[worst].name, error);
    ck_assert_double_le(small, c->small);
    /* Without dropout and statistics of a batch both passes are the same: the loss is the mean of the scored values. */
    if (shape->dropout == 0 && shape->norm == PS_NORM_LAYER) {
        const double mean = errors[PS_ERROR_SQUARES] / errors[PS_ERROR_OBSERVED];
        ck_assert_double_le(fabs(mean / loss - 1), c->loss);
    }
    free(expected);
    free(got);
    fixture_close(&f);
    fixture_close(&oracle);
}

START_TEST(passes)
{
    compare(&cases[_i / SHAPES], &shapes[_i % SHAPES]);
}
END_TEST

START_TEST(passes_layer)
{
    compare(&layer_cases[_i / LAYER_SHAPES], &layer_shapes[_i % LAYER_SHAPES]);
}
END_TEST

int main(void)
{
    int gpu = ps_cuda_device_count() > 0;
    if (!gpu) {
        printf("skipped: masked passes on CUDA: no CUDA device\n");
    }
    Suite *suite = suite_create("masked");
    TCase *tests = tcase_create("masked");
    tcase_set_timeout(tests, 120);
    tcase_add_test(tests, counts);
    tcase_add_test(tests, refuses);
    tcase_add_test(tests, drawn_by_place);
    tcase_add_test(tests, nothing_leaks);
    tcase_add_loop_test(tests, finite_differences, 0, 2 * SHAPES);
    tcase_add_loop_test(tests, passes, 0, (gpu ? CASES : CPU_CASES) * SHAPES);
    if (gpu) {
        tcase_add_loop_test(tests, passes_layer, 0, LAYER_CASES);
    }
    suite_add_tcase(suite, tests);
    return run_suite(suite, CK_NOFORK) != 0;
}
