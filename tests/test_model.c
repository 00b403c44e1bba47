/* The model: its gradient against finite differences, its levels against each other, and what a layer is made of. */
#include "tests/asked.h"
#include "tests/forward.h"
#include "tests/fused.h"
#include "optim/optimizer.h"
#include "tests/model_fixture.h"
#include "tests/recorder.h"
#include "tests/suite.h"

static const struct ps_model_shape shapes[] = {
    {.channels = 3,
     .seq_len = 20,
     .pred_len = 5,
     .patch_len = 6,
     .stride = 3,
     .pad_end = 1,
     .d_model = 12,
     .n_heads = 3,
     .d_ff = 20,
     .n_layers = 2,
     .dropout = 0.3,
     .revin = 1},
    {.channels = 1,
     .seq_len = 17,
     .pred_len = 1,
     .patch_len = 5,
     .stride = 5,
     .pad_end = 0,
     .d_model = 15,
     .n_heads = 5,
     .d_ff = 7,
     .n_layers = 1,
     .dropout = 0,
     .revin = 0},
    {.channels = 2,
     .seq_len = 24,
     .pred_len = 3,
     .patch_len = 8,
     .stride = 4,
     .pad_end = 0,
     .d_model = 16,
     .n_heads = 1,
     .d_ff = 33,
     .n_layers = 3,
     .dropout = 0.1,
     .revin = 1},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

/* Variants: norms, their places and residual attention in all combinations, every value of the other keys among them. The window
 * has rows that fill no patch. */
#define SIZES \
    .channels = 3, .seq_len = 21, .pred_len = 5, .patch_len = 6, .stride = 4, .d_model = 12, .n_heads = 3, .d_ff = 10, .n_layers = 2
static const struct ps_model_shape variants[] = {
    {SIZES, .dropout = 0.3, .activation = PS_RELU, .positions = PS_POSITIONS_SINCOS, .individual_head = 1, .patches_from_end = 1,
     .dropout_at = {[PS_DROP_OUTPUT] = {1, 0}}},
    {SIZES, .revin = 1, .residual_attention = 1, .activation = PS_SWIGLU, .positions = PS_POSITIONS_ROPE, .revin_affine = 1,
     .patches_from_end = 1, .pad_end = 1, .dropout_at = {[PS_DROP_ATTENTION_WEIGHTS] = {1, 0.2}}},
    {SIZES, .revin = 1, .norm_place = PS_NORM_POST, .activation = PS_GELU, .positions = PS_POSITIONS_NONE, .revin_subtract_last = 1,
     .pad_end = 1},
    {SIZES, .revin = 1, .norm_place = PS_NORM_POST, .residual_attention = 1, .revin_affine = 1, .revin_subtract_last = 1,
     .dropout_at = {[PS_DROP_HEAD] = {1, 0.3}}},
    {SIZES, .revin = 1, .norm = PS_NORM_BATCH, .activation = PS_GELU, .positions = PS_POSITIONS_ROPE, .individual_head = 1,
     .revin_affine = 1, .dropout_at = {[PS_DROP_EMBEDDING] = {1, 0.4}}},
    {SIZES, .revin = 1, .dropout = 0.1, .norm = PS_NORM_BATCH, .residual_attention = 1, .activation = PS_RELU,
     .patches_from_end = 1, .pad_end = 1, .dropout_at = {[PS_DROP_HIDDEN] = {1, 0.25}}},
    {SIZES, .revin = 1, .norm = PS_NORM_BATCH, .norm_place = PS_NORM_POST, .activation = PS_SWIGLU,
     .positions = PS_POSITIONS_SINCOS, .revin_subtract_last = 1, .dropout_at = {[PS_DROP_ATTENTION] = {1, 0.51}}},
    {SIZES, /* the paper's */
     .revin = 1, .dropout = 0.3, .norm = PS_NORM_BATCH, .norm_place = PS_NORM_POST, .residual_attention = 1, .activation = PS_GELU,
     .pad_end = 1},
    {SIZES, .revin = 1, .norm = PS_NORM_RMS, .positions = PS_POSITIONS_NONE, .individual_head = 1, .revin_affine = 1,
     .revin_subtract_last = 1, .dropout_at = {[PS_DROP_OUTPUT] = {1, 0.1}}},
    {SIZES, .revin = 1, .dropout = 0.3, .norm = PS_NORM_RMS, .residual_attention = 1, .activation = PS_GELU,
     .positions = PS_POSITIONS_SINCOS, .dropout_at = {[PS_DROP_ATTENTION_WEIGHTS] = {1, 0.15}, [PS_DROP_HEAD] = {1, 0.2}}},
    {SIZES, .norm = PS_NORM_RMS, .norm_place = PS_NORM_POST, .activation = PS_RELU, .positions = PS_POSITIONS_ROPE,
     .patches_from_end = 1},
    {SIZES, .revin = 1, .norm = PS_NORM_RMS, .norm_place = PS_NORM_POST, .residual_attention = 1, .activation = PS_SWIGLU,
     .individual_head = 1, .dropout_at = {{1, 0.1}, {1, 0.2}, {1, 0.3}, {1, 0.4}, {1, 0.05}, {1, 0.15}}},
};
enum { VARIANTS = sizeof variants / sizeof *variants, SHAPES_AND_VARIANTS = SHAPES + VARIANTS };

static const struct ps_model_shape *shape_or_variant(int i)
{
    return i < SHAPES ? &shapes[i] : &variants[i - SHAPES];
}

/* With attention by tiles where they have what the model asks for. */
static struct ps_model_options served(struct ps_model_options options, const struct ps_model_shape *shape)
{
    if (shape->dropout_at[PS_DROP_ATTENTION_WEIGHTS].rate > 0) {
        options.tiled_attention = 0;
    }
    return options;
}

/* g.v against the 4th-order central stencil of the loss along v, in double, the masks of step 0 throughout. The worst relative
 * error of 20 directions. */
static double worst_difference(struct fixture *f)
{
    const double h = f->model->shape.activation == PS_RELU ? 1e-5 : 2e-3; /* so short that it bends nowhere on the way */
    double *theta = from_device(f->device, PS_F64, f->model->parameters, f->count);
    fixture_loss(f);
    double *gradient = from_device(f->device, PS_F64, f->model->gradients, f->count);
    double *v = malloc((size_t)f->count * sizeof *v), *moved = malloc((size_t)f->count * sizeof *moved);
    double worst = 0;
    for (uint32_t direction = 0; direction < 20; direction++) {
        double norm = 0, analytic = 0;
        for (int64_t i = 0; i < f->count; i++) {
            v[i] = normal(17, (uint64_t)i, 200 + direction);
            norm += v[i] * v[i];
        }
        for (int64_t i = 0; i < f->count; i++) {
            v[i] /= sqrt(norm);
            analytic += gradient[i] * v[i];
        }
        static const double at[4] = {-2, -1, 1, 2}, weight[4] = {1, -8, 8, -1};
        double numeric = 0;
        for (int j = 0; j < 4; j++) {
            for (int64_t i = 0; i < f->count; i++) {
                moved[i] = theta[i] + at[j] * h * v[i];
            }
            set_device(f->device, PS_F64, f->model->parameters, moved, f->count);
            numeric += weight[j] * fixture_loss(f) / (12 * h);
        }
        double error = fabs(numeric - analytic) / fabs(analytic);
        worst = !(error <= worst) ? error : worst;
    }
    set_device(f->device, PS_F64, f->model->parameters, theta, f->count);
    free(theta);
    free(gradient);
    free(v);
    free(moved);
    return worst;
}

START_TEST(finite_differences)
{
    const struct ps_model_shape *shape = shape_or_variant(_i % SHAPES_AND_VARIANTS);
    enum ps_level level = _i < SHAPES_AND_VARIANTS ? PS_LEVEL_GEMM : PS_LEVEL_NONE;
    struct fixture f = fixture_open("reference", "cpu", PS_FP64, shape, 4, level, _i % 2);
    const double worst = worst_difference(&f);
    printf("finite differences, shape %d, level %s: worst relative error of 20 directions %.2g\n", _i % SHAPES_AND_VARIANTS,
           ps_level_name(level), worst);
    ck_assert_msg(worst <= 1e-7, "relative error %.3g", worst);
    fixture_close(&f);
}
END_TEST

/* Windows of which a share is not observed, the same on every table; and one channel of one with nothing observed. */
static void make_holes(struct fixture *f, double share)
{
    struct ps_tensor *tensors[] = {&f->windows.inputs, &f->windows.targets};
    for (int part = 0; part < 2; part++) {
        struct ps_tensor *x = tensors[part];
        const int64_t n = ps_tensor_count(x), length = x->size[2];
        double *values = from_device(f->device, x->type, x->data, n);
        for (int64_t i = 0; i < n; i++) {
            const int gone = part == 0 && share > 0 && i / length == x->size[1];
            values[i] = gone || ps_uniform(21 + (uint64_t)part, (uint64_t)i, 97, 7) < share ? NAN : values[i];
        }
        set_device(f->device, x->type, x->data, values, n);
        free(values);
    }
    f->model->options.loss.missing = 1;
}

/* The same of windows with holes, and the CPU's loss and gradients against the double reference's. */
START_TEST(masked_differences)
{
    const struct ps_model_shape *shape = shape_or_variant(_i);
    struct fixture f = fixture_open("reference", "cpu", PS_FP64, shape, 4, PS_LEVEL_GEMM, _i % 2);
    struct fixture fast = fixture_open("cpu", "cpu", PS_FP32, shape, 4, PS_LEVEL_GEMM, _i % 2);
    for (int i = 0; i < 3; i++) {
        static const double shares[] = {0, 0.1, 0.5};
        make_holes(&f, shares[i]);
        make_holes(&fast, shares[i]);
        const double worst = worst_difference(&f);
        ck_assert_msg(worst <= 1e-7, "%g of the values: relative error %.3g", shares[i], worst);
        const double loss = fixture_loss(&f);
        ck_assert_double_le(fabs(fixture_loss(&fast) / loss - 1), 1e-5);
        double *expected = fixture_gradients(&f), *got = fixture_gradients(&fast);
        int tensor = 0;
        const double error = gradient_error(f.model->layout, got, expected, &tensor);
        ck_assert_msg(error <= 1e-4, "%g of the values: gradient of %s off by %.3g", shares[i], f.model->layout->table[tensor].name,
                      error);
        free(expected);
        free(got);
    }
    fixture_close(&f);
    fixture_close(&fast);
}
END_TEST

/* What the loss changes by from theta - h v to theta + h v. *expected: the gradient times the way between them, as it is once both
 * have been rounded to parameters. */
static double loss_change(struct fixture *f, const double *theta, const double *gradient, const double *v, double h,
                          double *expected)
{
    double *moved = malloc((size_t)f->count * sizeof *moved), change = 0;
    *expected = 0;
    for (int sign = -1; sign <= 1; sign += 2) {
        for (int64_t i = 0; i < f->count; i++) {
            moved[i] = (double)(float)(theta[i] + sign * h * v[i]);
            *expected += sign * gradient[i] * moved[i];
        }
        set_device(f->device, f->k->parameter, f->model->parameters, moved, f->count);
        OK(ps_model_refresh_weights(f->model));
        change += sign * fixture_loss(f);
    }
    free(moved);
    return change;
}

/* v, but for elements [begin, end) zero, of length 1. */
static void only(double *v, const double *from, int64_t count, int64_t begin, int64_t end)
{
    double squares = 0;
    for (int64_t i = 0; i < count; i++) {
        v[i] = i >= begin && i < end ? from[i] : 0;
        squares += v[i] * v[i];
    }
    for (int64_t i = 0; i < count; i++) {
        v[i] /= sqrt(squares);
    }
}

/* A table's gradient against differences of its own losses, in fp32: along the gradient of each tensor alone, along all of it, and
 * along random directions. Along a tensor's the loss, about 2, changes by 2e-3 and more. Of that its rounding, about 1e-7, and what
 * the third derivative adds are less than 5e-4 each, so that a gradient that is wrong by a hundredth is seen. */
static void differences_of(const char *backend, const char *device, int which)
{
    enum { RANDOM = 8 };
    const double h = 1e-2, bound = 5e-3;
    struct fixture f = fixture_open(backend, device, PS_FP32, &shapes[which], 4, PS_LEVEL_GEMM, which % 2);
    const struct ps_parameters *layout = f.model->layout;
    double *theta = from_device(f.device, PS_F32, f.model->parameters, f.count);
    fixture_loss(&f);
    double *gradient = fixture_gradients(&f), *v = malloc((size_t)f.count * sizeof *v),
           *random = malloc((size_t)f.count * sizeof *v);
    double expected, worst = 0, errors = 0, changes = 0;
    for (int t = 0; t <= layout->n; t++) {
        const struct ps_parameter *p = t < layout->n ? &layout->table[t] : NULL;
        only(v, gradient, f.count, p ? p->offset : 0, p ? p->offset + ps_parameter_count(p) : f.count);
        double change = loss_change(&f, theta, gradient, v, h, &expected), error = fabs(change / expected - 1);
        worst = !(error <= worst) ? error : worst;
        ck_assert_msg(error <= bound, "%s, shape %d: along the gradient of %s the loss changes by %.6g, not %.6g", backend, which,
                      p ? p->name : "all tensors", change, expected);
    }
    for (uint32_t direction = 0; direction < RANDOM; direction++) {
        for (int64_t i = 0; i < f.count; i++) {
            random[i] = normal(17, (uint64_t)i, 300 + direction);
        }
        only(v, random, f.count, 0, f.count);
        double change = loss_change(&f, theta, gradient, v, h, &expected);
        errors += (change - expected) * (change - expected);
        changes += expected * expected;
    }
    double error = sqrt(errors / changes);
    printf("%s fp32, differences of the loss, shape %d: relative error at most %.2g of %d tensors, %.2g of %d random directions\n",
           backend, which, worst, layout->n, error, RANDOM);
    ck_assert_double_le(error, bound);
    free(theta);
    free(gradient);
    free(v);
    free(random);
    fixture_close(&f);
}

START_TEST(differences_cpu)
{
    differences_of("reference", "cpu", _i);
    differences_of("cpu", "cpu", _i);
}
END_TEST

START_TEST(differences_cuda)
{
    differences_of("cuda", "cuda", _i);
}
END_TEST

/* ---- against a forward pass of the tests' own ---- */

static double relative_error(const double *a, const double *b, int64_t n)
{
    double delta = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        delta += (a[i] - b[i]) * (a[i] - b[i]);
        norm += b[i] * b[i];
    }
    return sqrt(delta / norm);
}

/* How one runs: forecasts, scored and trained with, within `bound` of tests/forward.h's. */
struct forward_case {
    const char *backend, *device;
    enum ps_precision precision;
    struct ps_model_options options;
    double bound;
};

/* Measured: fp64 1.2e-16 to 6.6e-16; fp32 on the CPU 1.2e-7 to 2.6e-7. On CUDA: the bounds of levels_cuda and level_layer, which
 * are of one layer; level layer in bf16 has up to 1.3e-2 after two. */
static const struct forward_case forward_cases[] = {
    {"reference", "cpu", PS_FP64, {.level = PS_LEVEL_NONE}, 5e-15},
    {"reference", "cpu", PS_FP64, {.level = PS_LEVEL_GEMM}, 5e-15},
    {"reference",
     "cpu",
     PS_FP64,
     {.level = PS_LEVEL_GEMM, .merge_qkv = 1, .epilogue = 1, .tiled_attention = 1, .feed_forward = 1},
     5e-15},
    {"cpu", "cpu", PS_FP32, {.level = PS_LEVEL_NONE}, 1e-6},
    {"cpu", "cpu", PS_FP32, {.level = PS_LEVEL_GEMM}, 1e-6},
    {"cpu", "cpu", PS_FP32, {.level = PS_LEVEL_GEMM, .merge_qkv = 1, .epilogue = 1, .tiled_attention = 1, .feed_forward = 1}, 1e-6},
    {"cuda", "cuda", PS_FP32, {.level = PS_LEVEL_NONE}, 1e-5},
    {"cuda", "cuda", PS_FP32, {.level = PS_LEVEL_GEMM}, 1e-5},
    {"cuda", "cuda", PS_TF32, {.level = PS_LEVEL_GEMM, .merge_qkv = 1, .epilogue = 1, .tiled_attention = 1}, 2e-3},
    {"cuda", "cuda", PS_FP16, {.level = PS_LEVEL_GEMM, .merge_qkv = 1, .epilogue = 1, .tiled_attention = 1}, 2e-3},
    {"cuda", "cuda", PS_PRECISION_BF16, {.level = PS_LEVEL_GEMM, .merge_qkv = 1, .epilogue = 1, .tiled_attention = 1}, 1e-2},
    {"cuda", "cuda", PS_TF32, {.level = PS_LEVEL_LAYER}, 2e-3},
    {"cuda", "cuda", PS_FP16, {.level = PS_LEVEL_LAYER}, 2e-3},
    {"cuda", "cuda", PS_PRECISION_BF16, {.level = PS_LEVEL_LAYER}, 2e-2}};
enum { FORWARD_CPU = 6, FORWARD_CUDA = 11, FORWARD_CASES = sizeof forward_cases / sizeof *forward_cases };

/* The windows in the order of the batch, [batch C, seq_len or pred_len]. */
static double *in_order(struct fixture *f, const struct ps_tensor *windows)
{
    const int64_t each = windows->size[1] * windows->size[2];
    double *values = from_device(f->device, windows->type, windows->data, ps_tensor_count(windows));
    double *ordered = malloc((size_t)(f->batch * each) * sizeof *ordered);
    for (int64_t b = 0; b < f->batch; b++) { /* the fixture's indices run backwards */
        memcpy(ordered + b * each, values + (f->batch - 1 - b) * each, (size_t)each * sizeof *ordered);
    }
    free(values);
    return ordered;
}

static void compare_forward(const struct forward_case *c, const struct ps_model_shape *shape)
{
    struct ps_model_options options = served(c->options, shape);
    options.seed = 0x123456789abcdef0;
    struct fixture f = fixture_open_with(c->backend, c->device, c->precision, shape, 4, &options);
    const int64_t S = f.batch * shape->channels, H = shape->pred_len;
    const struct ps_parameters *layout = f.model->layout;
    double *theta = from_device(f.device, f.k->parameter, f.model->parameters, layout->stored);
    double *moved = malloc((size_t)layout->stored * sizeof *moved);
    double *x = in_order(&f, &f.windows.inputs), *targets = in_order(&f, &f.windows.targets);
    void *out;
    OK(f.device->allocate(f.device, (size_t)(S * H) * ps_type_bytes(f.k->parameter), &out));
    for (int training = 0; training < 2; training++) {
        const struct ps_step_state state = {.step = 0x300000005};
        const struct forward_pass pass = {.training = training, .seed = options.seed, .step = state.step, .moved = moved};
        memcpy(moved, theta, (size_t)layout->stored * sizeof *moved);
        OK(f.device->upload(f.device, PS_COMPUTE, f.state, &state, sizeof state));
        OK(ps_model_forward(f.model, &f.windows, f.state, f.batch, training));
        OK(ps_model_forecast(f.model, f.batch, ps_tensor_2d(out, f.k->parameter, S, H)));
        double *got = from_device(f.device, f.k->parameter, out, S * H);
        double *expected = forward_forecasts(shape, layout, theta, x, S, pass);
        double error = relative_error(got, expected, S * H);
        printf("%s %s level %s%s, d %d, %s: forecasts %.2g\n", c->backend, ps_precision_name(c->precision),
               ps_level_name(options.level), options.tiled_attention ? ", tiled, epilogues" : "", (int)shape->d_model,
               training ? "training" : "scoring", error);
        ck_assert_msg(error <= c->bound, "%s: forecasts off by %.3g", training ? "training" : "scoring", error);
        free(got);
        if (layout->stored > layout->count) { /* scoring leaves the running statistics to the bit */
            double *after = from_device(f.device, f.k->parameter, f.model->parameters, layout->stored);
            double off = relative_error(after + layout->count, moved + layout->count, layout->stored - layout->count);
            ck_assert_msg(off <= (training ? c->bound : 0), "running statistics off by %.3g", off);
            free(after);
        }
        if (training) { /* a training pass takes its loss from the same forecasts */
            struct ps_step_state after;
            double loss = 0;
            OK(f.device->upload(f.device, PS_COMPUTE, f.state, &state, sizeof state));
            OK(ps_model_gradients(f.model, &f.windows, f.state, f.batch));
            OK(f.device->download(f.device, PS_COMPUTE, &after, f.state, sizeof after));
            for (int64_t i = 0; i < S * H; i++) {
                loss += (expected[i] - targets[i]) * (expected[i] - targets[i]) / (double)(S * H);
            }
            ck_assert_double_le(fabs(after.loss_sum / (double)f.batch - loss) / loss, c->bound);
        }
        free(expected);
    }
    f.device->release(f.device, out, (size_t)(S * H) * ps_type_bytes(f.k->parameter));
    free(theta);
    free(moved);
    free(x);
    free(targets);
    fixture_close(&f);
}

START_TEST(forward_plain)
{
    compare_forward(&forward_cases[_i / SHAPES_AND_VARIANTS], shape_or_variant(_i % SHAPES_AND_VARIANTS));
}
END_TEST

/* ---- a whole training pass of each variant, against the double reference at level gemm ---- */

struct step_case {
    const char *backend, *device;
    enum ps_precision precision;
    struct ps_model_options options;
    double loss, gradients, small; /* bounds; small: of tensors whose gradient is next to nothing */
};

/* Measured on the CPU: fp64 2.2e-16, 3.8e-15, small ones 5.4e-14; fp32 8.5e-8, 9.6e-7 and 6.4e-6. On an H200: tf32 3e-4, 2.4e-3 and
 * 7.3e-4, bf16 1.8e-3, 3.7e-2 and 0.1. fp16's are not measured; the reference, whose activations were rounded to fp16 as they were
 * stored, had 2.3e-4, 4.3e-3 and 1.5e-2, and to bf16 2e-3, 3.4e-2 and 0.1. */
static const struct step_case step_cases[] = {
    {"reference", "cpu", PS_FP64, {.level = PS_LEVEL_NONE}, 5e-15, 5e-14, 5e-13},
    {"reference",
     "cpu",
     PS_FP64,
     {.level = PS_LEVEL_GEMM, .merge_qkv = 1, .epilogue = 1, .tiled_attention = 1, .feed_forward = 1},
     1e-12,
     1e-11,
     1e-9},
    {"reference", "cpu", PS_FP64, {.level = PS_LEVEL_GEMM, .epilogue = 1}, 5e-15, 5e-14, 5e-13},
    {"reference", "cpu", PS_FP32, {.level = PS_LEVEL_NONE}, 1e-6, 5e-6, 5e-5},
    {"cpu", "cpu", PS_FP32, {.level = PS_LEVEL_NONE}, 1e-6, 5e-6, 5e-5},
    {"cpu", "cpu", PS_FP32, {.level = PS_LEVEL_GEMM}, 1e-6, 5e-6, 5e-5},
    {"cpu",
     "cpu",
     PS_FP32,
     {.level = PS_LEVEL_GEMM, .merge_qkv = 1, .epilogue = 1, .tiled_attention = 1, .feed_forward = 1},
     1e-6,
     5e-6,
     5e-5},
    {"cuda", "cuda", PS_FP32, {.level = PS_LEVEL_NONE}, 1e-5, 1e-4, 1e-3},
    {"cuda", "cuda", PS_FP32, {.level = PS_LEVEL_GEMM}, 1e-5, 1e-4, 1e-3},
    {"cuda", "cuda", PS_TF32, {.level = PS_LEVEL_GEMM, .merge_qkv = 1, .epilogue = 1, .tiled_attention = 1}, 2e-3, 5e-3, 1e-2},
    {"cuda", "cuda", PS_FP16, {.level = PS_LEVEL_GEMM}, 2e-3, 1.5e-2, 7e-2},
    {"cuda", "cuda", PS_FP16, {.level = PS_LEVEL_GEMM, .merge_qkv = 1, .epilogue = 1, .tiled_attention = 1}, 2e-3, 1.5e-2, 7e-2},
    {"cuda",
     "cuda",
     PS_PRECISION_BF16,
     {.level = PS_LEVEL_GEMM, .merge_qkv = 1, .epilogue = 1, .tiled_attention = 1},
     1e-2,
     1e-1,
     5e-1}};
enum { STEP_CASES_CPU = 7, STEP_CASES = sizeof step_cases / sizeof *step_cases };

/* Whether rounding may take a hidden value over relu's kink. */
static int has_kink(const struct ps_model_shape *shape, enum ps_precision precision)
{
    return shape->activation == PS_RELU && precision > PS_FP32;
}

/* Lifts every other hidden column by 6 and lowers the rest: no value is so near 0 that rounding takes it to the other side of
 * relu's kink, where the gradient jumps by more than any bound. */
static void leave_kink(struct fixture *f)
{
    const struct ps_parameters *layout = f->model->layout;
    double *parameters = from_device(f->device, f->k->parameter, f->model->parameters, layout->stored);
    for (int t = 0; t < layout->all; t++) {
        const struct ps_parameter *p = &layout->table[t];
        const size_t length = strlen(p->name);
        for (int64_t i = 0; length > 4 && strcmp(p->name + length - 4, ".b_1") == 0 && i < ps_parameter_count(p); i++) {
            parameters[p->offset + i] += i % 2 ? 6 : -6;
        }
    }
    set_device(f->device, f->k->parameter, f->model->parameters, parameters, layout->stored);
    OK(ps_model_refresh_weights(f->model));
    free(parameters);
}

/* Of a pass: its loss, the gradients, and the running statistics behind them. */
static double *pass_of(struct fixture *f, int smooth, double *loss)
{
    const struct ps_parameters *layout = f->model->layout;
    fixture_parameters(f, 0.1);
    if (smooth) {
        leave_kink(f);
    }
    *loss = fixture_loss(f);
    double *parameters = from_device(f->device, f->k->parameter, f->model->parameters, layout->stored);
    double *gradients = fixture_gradients(f);
    memcpy(parameters, gradients, (size_t)layout->count * sizeof *gradients);
    free(gradients);
    return parameters;
}

/* A training pass of that loss, and again, against the double reference's. */
static void compare_pass(const struct step_case *c, const struct ps_model_shape *shape, const struct ps_loss *minimised,
                         const char *what, int variant)
{
    struct ps_model_options options = served(c->options, shape);
    options.seed = 5;
    options.loss = *minimised;
    struct fixture oracle = fixture_open_with("reference", "cpu", PS_FP64, shape, 4,
                                              &(struct ps_model_options){.level = PS_LEVEL_GEMM, .seed = 5, .loss = *minimised});
    struct fixture f = fixture_open_with(c->backend, c->device, c->precision, shape, 4, &options);
    const struct ps_parameters *layout = f.model->layout;
    double expected_loss, loss, loss_again;
    const int smooth = has_kink(shape, c->precision);
    double *expected = pass_of(&oracle, smooth, &expected_loss), *got = pass_of(&f, smooth, &loss),
           *again = pass_of(&f, smooth, &loss_again);
    ck_assert(loss == loss_again);
    ck_assert_msg(memcmp(got, again, (size_t)layout->stored * sizeof *got) == 0, "a second pass gives other bits");
    const double statistics = layout->stored > layout->count
                                  ? relative_error(got + layout->count, expected + layout->count, layout->stored - layout->count)
                                  : 0;
    int worst = 0;
    const double small = take_small(layout, got, expected), error = gradient_error(layout, got, expected, &worst);
    printf("%s %s level %s, %s %d: loss %.2g, gradients %.2g (%s), small ones %.2g, statistics %.2g\n", c->backend,
           ps_precision_name(c->precision), ps_level_name(options.level), what, variant, fabs(loss / expected_loss - 1), error,
           layout->table[worst].name, small, statistics);
    ck_assert_double_le(fabs(loss / expected_loss - 1), c->loss);
    ck_assert_msg(error <= c->gradients, "gradient of %s off by %.3g", layout->table[worst].name, error);
    ck_assert_double_le(small, c->small);
    ck_assert_double_le(statistics, c->loss);
    free(expected);
    free(got);
    free(again);
    fixture_close(&f);
    fixture_close(&oracle);
}

START_TEST(variant_steps)
{
    compare_pass(&step_cases[_i / VARIANTS], &variants[_i % VARIANTS], &(struct ps_loss){0}, "variant", _i % VARIANTS);
}
END_TEST

static const struct {
    const char *name;
    struct ps_loss loss;
    int jumps; /* its slope where the error is 0, which rounding to fewer bits takes to the other side */
} losses[] = {{"mae, variant", {.kind = PS_LOSS_MAE}, 1},
              {"huber, variant", {.kind = PS_LOSS_HUBER, .delta = 0.8}, 0},
              {"quantile, variant", {.kind = PS_LOSS_QUANTILE, .quantiles = 3, .quantile = {0.1, 0.5, 0.9}}, 1}};
enum { LOSSES = sizeof losses / sizeof *losses };

START_TEST(loss_steps)
{
    const struct step_case *c = &step_cases[_i / (LOSSES * VARIANTS)];
    const int l = _i / VARIANTS % LOSSES;
    struct ps_model_shape shape = variants[_i % VARIANTS];
    shape.quantiles = losses[l].loss.quantiles;
    if (!losses[l].jumps || c->precision <= PS_FP32) {
        compare_pass(c, &shape, &losses[l].loss, losses[l].name, _i % VARIANTS);
    }
}
END_TEST

/* fp16's scale of the loss, of whole and of short steps: in double it is all that changes, and leaves the gradients to the bit. */
START_TEST(gradient_scales)
{
    const struct ps_model_shape *shape = shape_or_variant(_i);
    struct fixture plain = fixture_open("reference", "cpu", PS_FP64, shape, 4, PS_LEVEL_GEMM, 1);
    struct fixture f = fixture_open("reference", "cpu", PS_FP64, shape, 4, PS_LEVEL_GEMM, 1);
    struct ps_kernels in_name = *f.k;
    in_name.precision = PS_FP16;
    f.model->k = &in_name;
    for (int64_t windows = 4; windows > 0; windows -= 3) {
        const double outputs = (double)(windows * shape->channels * shape->pred_len);
        ps_model_place(f.model, &(struct ps_batch_place){.whole = windows});
        ck_assert(frexp(f.model->gradient_scale, &(int){0}) == 0.5);
        ck_assert(f.model->gradient_scale <= outputs && 2 * f.model->gradient_scale > outputs);
        plain.batch = f.batch = windows;
        const double loss = fixture_loss(&plain), scaled = fixture_loss(&f);
        double *expected = fixture_gradients(&plain), *got = fixture_gradients(&f);
        ck_assert(loss == scaled);
        ck_assert_mem_eq(got, expected, (size_t)f.count * sizeof *got);
        free(expected);
        free(got);
    }
    ck_assert(plain.model->gradient_scale == 1);
    f.model->k = f.k;
    fixture_close(&plain);
    fixture_close(&f);
}
END_TEST

/* ---- the paper's layer at level layer ---- */

#define HALVES .channels = 3, .d_model = 16, .n_heads = 4, .norm = PS_NORM_BATCH, .norm_place = PS_NORM_POST, .revin = 1
#define HALVES_ANY .d_model = 16, .norm = PS_NORM_BATCH, .norm_place = PS_NORM_POST, .revin = 1
#define HALVES_OF .d_model = 16, .n_heads = 4, .norm = PS_NORM_BATCH, .norm_place = PS_NORM_POST, .revin = 1, .n_layers = 2
/* N 42, as the paper has it; one tile of patches, two and four; more hidden columns and fewer; each activation; no residual
 * attention, and many layers of it; ends of other kinds; rates of each place's own; heads of all widths in memory. Two have so many
 * rows that blocks share tiles of rows with the sequences of others, and one more than 132 multiprocessors take at once. Then those
 * of fewer heads or more than 64 patches: 1, 2, 3 and 5 to 8 tiles, all the ends, one layer and four, and more sequences than 132
 * multiprocessors take at once. */
static const struct ps_model_shape halves_shapes[] = {
    {HALVES, .seq_len = 336, .pred_len = 96, .patch_len = 16, .stride = 8, .pad_end = 1, .d_ff = 128, .n_layers = 3, .dropout = 0.3,
     .dropout_at = {[PS_DROP_ATTENTION] = {1, 0.51}}, .residual_attention = 1, .activation = PS_GELU},
    {HALVES, .seq_len = 60, .pred_len = 8, .patch_len = 4, .stride = 4, .d_ff = 64, .n_layers = 2, .dropout = 0.1,
     .activation = PS_GELU_TANH},
    {HALVES, .seq_len = 128, .pred_len = 5, .patch_len = 4, .stride = 4, .d_ff = 256, .n_layers = 5, .residual_attention = 1,
     .activation = PS_RELU},
    {HALVES, .seq_len = 256, .pred_len = 5, .patch_len = 4, .stride = 4, .d_ff = 192, .n_layers = 1, .dropout = 0.2,
     .residual_attention = 1, .activation = PS_GELU, .positions = PS_POSITIONS_SINCOS, .individual_head = 1,
     .dropout_at = {[PS_DROP_HIDDEN] = {1, 0}, [PS_DROP_HEAD] = {1, 0.2}}},
    {HALVES, .seq_len = 90, .pred_len = 5, .patch_len = 6, .stride = 2, .d_ff = 128, .n_layers = 2, .activation = PS_GELU,
     .revin_affine = 1, .dropout_at = {[PS_DROP_OUTPUT] = {1, 0.25}}},
    {HALVES_OF, .channels = 63, .seq_len = 168, .pred_len = 64, .patch_len = 4, .stride = 4, .d_ff = 128, .dropout = 0.3,
     .residual_attention = 1, .activation = PS_GELU},
    {HALVES_OF, .channels = 267, .seq_len = 200, .pred_len = 24, .patch_len = 4, .stride = 4, .d_ff = 64, .dropout = 0.3,
     .residual_attention = 1, .activation = PS_GELU},
    {HALVES_OF, .channels = 5, .seq_len = 259, .pred_len = 96, .patch_len = 7, .stride = 4, .d_ff = 128, .dropout = 0.2,
     .residual_attention = 1, .activation = PS_GELU},
    {HALVES_OF, .channels = 7, .seq_len = 104, .pred_len = 16, .patch_len = 16, .stride = 8, .pad_end = 1, .d_ff = 128,
     .residual_attention = 1, .activation = PS_GELU, .dropout_at = {[PS_DROP_EMBEDDING] = {1, 0.3}}},
    {HALVES_OF, .channels = 7, .seq_len = 103, .pred_len = 5, .patch_len = 24, .stride = 9, .d_ff = 64, .dropout = 0.1,
     .activation = PS_GELU},
    {HALVES_ANY, .channels = 3, .n_heads = 1, .n_layers = 3, .seq_len = 180, .pred_len = 24, .patch_len = 4, .stride = 4,
     .d_ff = 64, .dropout = 0.2, .residual_attention = 1, .activation = PS_GELU},
    {HALVES_ANY, .channels = 5, .n_heads = 2, .n_layers = 2, .seq_len = 50, .pred_len = 5, .patch_len = 5, .stride = 4, .d_ff = 128,
     .activation = PS_GELU_TANH, .dropout_at = {[PS_DROP_EMBEDDING] = {1, 0.3}}},
    {HALVES_ANY, .channels = 2, .n_heads = 2, .n_layers = 1, .seq_len = 128, .pred_len = 8, .patch_len = 4, .stride = 4, .d_ff = 64,
     .dropout = 0.1, .activation = PS_RELU},
    {HALVES_ANY, .channels = 3, .n_heads = 2, .n_layers = 4, .seq_len = 384, .pred_len = 5, .patch_len = 4, .stride = 4, .d_ff = 64,
     .dropout = 0.1, .residual_attention = 1, .activation = PS_GELU},
    {HALVES_ANY, .channels = 67, .n_heads = 4, .n_layers = 2, .seq_len = 404, .pred_len = 24, .patch_len = 12, .stride = 4,
     .d_ff = 64, .dropout = 0.2, .residual_attention = 1, .activation = PS_GELU},
    {HALVES_ANY, .channels = 2, .n_heads = 4, .n_layers = 2, .seq_len = 260, .pred_len = 8, .patch_len = 4, .stride = 4, .d_ff = 64,
     .activation = PS_GELU},
    {HALVES_ANY, .channels = 2, .n_heads = 1, .n_layers = 3, .seq_len = 512, .pred_len = 24, .patch_len = 4, .stride = 4,
     .d_ff = 128, .dropout = 0.1, .residual_attention = 1, .activation = PS_GELU}};
enum { HALVES_SHAPES = sizeof halves_shapes / sizeof *halves_shapes };

static const struct step_case halves_cases[] = {{"cuda", "cuda", PS_PRECISION_BF16, {.level = PS_LEVEL_LAYER}, 1e-2, 1e-1, 5e-1},
                                                {"cuda", "cuda", PS_FP16, {.level = PS_LEVEL_LAYER}, 2e-3, 2e-2, 1e-1},
                                                {"cuda", "cuda", PS_TF32, {.level = PS_LEVEL_LAYER}, 2e-3, 3e-2, 1e-1}};
enum { HALVES_CASES = sizeof halves_cases / sizeof *halves_cases };

START_TEST(halves_steps)
{
    const int which = _i % HALVES_SHAPES;
    compare_pass(&halves_cases[_i / HALVES_SHAPES], &halves_shapes[which], &(struct ps_loss){0}, "the paper's layer", which);
}
END_TEST

START_TEST(halves_forward)
{
    static const double bounds[] = {2e-2, 2e-3, 2e-3};
    const int which = _i / HALVES_SHAPES;
    compare_forward(&(struct forward_case){.backend = "cuda",
                                           .device = "cuda",
                                           .precision = halves_cases[which].precision,
                                           .options = {.level = PS_LEVEL_LAYER},
                                           .bound = bounds[which]},
                    &halves_shapes[_i % HALVES_SHAPES]);
}
END_TEST

/* Each instance of the kernel that evaluates, of 14 to 62 patches. */
START_TEST(halves_evaluation)
{
    static const enum ps_activation activations[] = {PS_GELU_TANH, PS_GELU, PS_RELU};
    const struct ps_model_shape shape = {HALVES,
                                         .seq_len = _i % 4 * 64 + 56,
                                         .pred_len = 5,
                                         .patch_len = 4,
                                         .stride = 4,
                                         .d_ff = 64,
                                         .n_layers = 2,
                                         .residual_attention = 1,
                                         .activation = activations[_i / 4 % 3]};
    compare_forward(&(struct forward_case){.backend = "cuda",
                                           .device = "cuda",
                                           .precision = _i < 12 ? PS_PRECISION_BF16 : PS_FP16,
                                           .options = {.level = PS_LEVEL_LAYER},
                                           .bound = _i < 12 ? 2e-2 : 2e-3},
                    &shape);
}
END_TEST

/* Two of the fixture's windows from `cursor` on. */
static double *two_at(struct fixture *f, uint64_t step, uint64_t cursor)
{
    const struct ps_step_state state = {.step = step, .cursor = cursor};
    OK(f->device->upload(f->device, PS_COMPUTE, f->state, &state, sizeof state));
    OK(f->device->fill_zero(f->device, PS_COMPUTE, f->model->gradients, (size_t)f->count * ps_type_bytes(f->k->parameter)));
    OK(ps_model_gradients(f->model, &f->windows, f->state, 2));
    OK(f->device->synchronize(f->device));
    return fixture_gradients(f);
}

/* A step gives the same bits whether the forward before has expected it or not; and the ends, in operations of their own, add up in
 * another order alone, of which BatchNorm leaves little of b_p's. */
START_TEST(halves_ends)
{
    const struct step_case *c = &halves_cases[_i / HALVES_SHAPES];
    const struct ps_model_shape *shape = &halves_shapes[_i % HALVES_SHAPES];
    struct fixture f = fixture_open_with(c->backend, c->device, c->precision, shape, 4, &c->options);
    const struct ps_parameters *layout = f.model->layout;
    const int apart = shape->individual_head || shape->revin_affine || c->precision == PS_TF32;
    const enum ps_encoder_span span = f.model->encoder.span;
    int worst = 0;
    ck_assert_int_eq(span, apart                                                ? PS_SPAN_LAYERS
                           : ps_patches(shape) > 48 && shape->pred_len % 8 == 0 ? PS_SPAN_LOSS
                                                                                : PS_SPAN_EMBEDDING);
    free(two_at(&f, 6, 0));
    double *expected = two_at(&f, 7, 2), *again = two_at(&f, 7, 2);
    ck_assert_msg(memcmp(expected, again, (size_t)f.count * sizeof *again) == 0, "a step that was expected gives other bits");
    f.model->encoder.span = PS_SPAN_LAYERS;
    double *ends = two_at(&f, 7, 2);
    const double small = take_small(layout, ends, expected), error = gradient_error(layout, ends, expected, &worst);
    printf("the paper's layer %d, %s: the ends apart %.2g (%s), small ones %.2g\n", _i % HALVES_SHAPES,
           ps_precision_name(c->precision), error, layout->table[worst].name, small);
    ck_assert_msg(error <= (span >= PS_SPAN_LOSS ? c->loss : 1e-4), "gradient of %s changes by %.3g", layout->table[worst].name,
                  error);
    free(expected);
    free(again);
    free(ends);
    fixture_close(&f);
}
END_TEST

/* ---- weights so large, and rows so many, that products end with what follows in fp32 and tf32 too ---- */

#define WIDE .channels = 9, .seq_len = 60, .pred_len = 5, .patch_len = 4, .stride = 2, .n_heads = 8, .n_layers = 1, .revin = 1
static const struct ps_model_shape wide_shapes[] = {
    {WIDE, .d_model = 256, .d_ff = 264, .dropout = 0.2},
    {WIDE, .d_model = 264, .d_ff = 256, .dropout = 0.1, .norm_place = PS_NORM_POST, .activation = PS_GELU},
    {WIDE, .d_model = 128, .d_ff = 520, .norm = PS_NORM_BATCH, .norm_place = PS_NORM_POST, .activation = PS_GELU},
    /* In 16 bits its norms of 160 columns are ends of products. */
    {WIDE, .d_model = 160, .d_ff = 192, .dropout = 0.1, .norm = PS_NORM_RMS, .norm_place = PS_NORM_POST}};
enum { WIDE_SHAPES = sizeof wide_shapes / sizeof *wide_shapes };

#define FUSED_ENDS                                                                  \
    {                                                                               \
        .level = PS_LEVEL_GEMM, .merge_qkv = 1, .epilogue = 1, .tiled_attention = 1 \
    }
static const struct step_case wide_cases[] = {{"cuda", "cuda", PS_FP32, FUSED_ENDS, 1e-5, 1e-4, 1e-3},
                                              {"cuda", "cuda", PS_TF32, FUSED_ENDS, 2e-3, 5e-3, 1e-2},
                                              {"cuda", "cuda", PS_FP16, FUSED_ENDS, 2e-3, 1.5e-2, 7e-2},
                                              {"cuda", "cuda", PS_PRECISION_BF16, FUSED_ENDS, 1e-2, 1e-1, 5e-1}};
enum { WIDE_CASES = sizeof wide_cases / sizeof *wide_cases };

START_TEST(wide_steps)
{
    const int which = _i % WIDE_SHAPES;
    compare_pass(&wide_cases[_i / WIDE_SHAPES], &wide_shapes[which], &(struct ps_loss){0}, "wide", which);
}
END_TEST

/* ---- so many rows that BatchNorms are folded into the weights behind them ---- */

#define FOLDED                                                                                                           \
    .channels = 128, .seq_len = 67, .pred_len = 3, .patch_len = 4, .stride = 1, .n_heads = 8, .d_model = 64, .d_ff = 72, \
    .n_layers = 2, .norm = PS_NORM_BATCH, .norm_place = PS_NORM_POST, .activation = PS_GELU
static const struct ps_model_shape folded_shapes[] = {{FOLDED, .revin = 1, .dropout = 0.2, .residual_attention = 1},
                                                      {FOLDED, .dropout_at = {[PS_DROP_HIDDEN] = {1, 0.3}}}};
enum { FOLDED_SHAPES = sizeof folded_shapes / sizeof *folded_shapes };
static const struct step_case folded_cases[] = {{"cuda", "cuda", PS_FP16, FUSED_ENDS, 2e-3, 1.5e-2, 7e-2},
                                                {"cuda", "cuda", PS_PRECISION_BF16, FUSED_ENDS, 1e-2, 1e-1, 5e-1}};
enum { FOLDED_CASES = sizeof folded_cases / sizeof *folded_cases };

/* The reference's, which refuses one end. */
static struct {
    enum ps_status (*gemm_finish)(const struct ps_kernels *k, const struct ps_gemm_finish *a);
    enum ps_finish refused;
    int calls[PS_FINISH_SLOPE + 1];
} one_end;

static enum ps_status refuse_one(const struct ps_kernels *k, const struct ps_gemm_finish *a)
{
    one_end.calls[a->finish]++;
    return a->finish == one_end.refused ? PS_UNSUPPORTED : one_end.gemm_finish(k, a);
}

/* Where the end by an activation is refused, or the one by its slope alone, the gradients are those of a plain layer. */
START_TEST(activation_refused)
{
    static const int which[] = {0, 7}; /* one that is not folded, and the paper's, which is */
    const struct ps_model_shape *shape = &variants[which[_i]];
    static const enum ps_finish ends[] = {PS_FINISH_SUM, PS_FINISH_ACTIVATION, PS_FINISH_SLOPE};
    enum { ENDS = sizeof ends / sizeof *ends };
    double loss[ENDS], *got[ENDS];
    for (int i = 0; i < ENDS; i++) {
        const struct ps_model_options options = {.level = PS_LEVEL_GEMM, .epilogue = i > 0, .seed = 5};
        struct fixture f = fixture_open_with("reference", "cpu", PS_FP64, shape, 4, &options);
        struct ps_kernels table = *f.k;
        memset(&one_end, 0, sizeof one_end);
        one_end.gemm_finish = table.gemm_finish;
        one_end.refused = ends[i];
        table.gemm_finish = refuse_one;
        f.model->k = i ? &table : f.k;
        got[i] = pass_of(&f, 0, &loss[i]);
        f.model->k = f.k;
        if (i) {
            ck_assert_int_eq(one_end.calls[PS_FINISH_ACTIVATION], shape->n_layers);
            ck_assert_int_eq(one_end.calls[PS_FINISH_SLOPE], ends[i] == PS_FINISH_SLOPE ? shape->n_layers : 0);
            ck_assert_double_le(fabs(loss[i] / loss[0] - 1), 5e-15);
            ck_assert_double_le(relative_error(got[i], got[0], f.model->layout->stored), 5e-14);
        }
        fixture_close(&f);
    }
    for (int i = 0; i < ENDS; i++) {
        free(got[i]);
    }
}
END_TEST

static enum ps_status refuse_scaled(const struct ps_kernels *k, const struct ps_gemm_finish *a)
{
    (void)k;
    (void)a;
    return PS_UNSUPPORTED;
}

/* Where the end that takes a residual's scale is refused, the norm's pass comes back: the gradients are those of a plain layer. */
START_TEST(folded_refused)
{
    const struct ps_model_shape *shape = &variants[7]; /* the paper's */
    double loss[2], *got[2];
    for (int refused = 0; refused < 2; refused++) {
        const struct ps_model_options options = {.level = PS_LEVEL_GEMM, .epilogue = refused, .seed = 5};
        struct fixture f = fixture_open_with("reference", "cpu", PS_FP64, shape, 4, &options);
        ck_assert_int_eq(f.model->folded, refused);
        struct ps_kernels table = *f.k;
        table.gemm_finish = refuse_scaled;
        f.model->k = refused ? &table : f.k;
        got[refused] = pass_of(&f, 0, &loss[refused]);
        f.model->k = f.k;
        if (refused) {
            ck_assert_double_le(fabs(loss[1] / loss[0] - 1), 5e-15);
            ck_assert_double_le(relative_error(got[1], got[0], f.model->layout->stored), 5e-14);
        }
        fixture_close(&f);
    }
    free(got[0]);
    free(got[1]);
}
END_TEST

static const struct ps_kernels *whole_table;
static int norms_asked, norms_refused; /* of so many one after another the first is served */

static enum ps_status refuse_norms(const struct ps_kernels *k, const struct ps_gemm_finish *a)
{
    (void)k;
    return a->rstd.data && norms_asked++ % norms_refused != 0 ? PS_UNSUPPORTED : whole_table->gemm_finish(whole_table, a);
}

/* Where some products end with a norm of rows and others are refused that, nothing else changes: forward, in evaluation and
 * training, and backward. */
START_TEST(norms_in_part)
{
    static const int which[] = {0, 2, 8, 9, 10};
    struct ps_model_shape shape = variants[which[_i]];
    shape.n_layers = 3;
    const struct ps_model_options options = {.level = PS_LEVEL_GEMM, .epilogue = 1, .merge_qkv = _i % 2, .seed = 5};
    double loss[4], *got[4];
    for (int refused = 0; refused < 4; refused++) {
        struct fixture f = fixture_open_with("reference", "cpu", PS_FP64, &shape, 4, &options);
        struct ps_kernels table = *f.k;
        table.gemm_finish = refuse_norms;
        whole_table = f.k;
        norms_asked = 0;
        norms_refused = refused == 3 ? 1000 : refused + 1;
        f.model->k = refused ? &table : f.k;
        got[refused] = pass_of(&f, 0, &loss[refused]);
        f.model->k = f.k;
        ck_assert(!refused || norms_asked > 0);
        ck_assert_double_le(fabs(loss[refused] / loss[0] - 1), 5e-15);
        ck_assert_double_le(relative_error(got[refused], got[0], f.model->layout->stored), 5e-14);
        fixture_close(&f);
    }
    for (int refused = 0; refused < 4; refused++) {
        free(got[refused]);
    }
}
END_TEST

START_TEST(folded_steps)
{
    const int which = _i % FOLDED_SHAPES;
    compare_pass(&folded_cases[_i / FOLDED_SHAPES], &folded_shapes[which], &(struct ps_loss){0}, "folded", which);
}
END_TEST

/* ---- the head alone, over an encoder that is frozen ---- */

/* Its gradient is that of a whole pass where the encoder computes the same in both, and of nothing else there is any; the running
 * statistics stay. */
static void head_alone(const char *backend, const char *device, enum ps_precision precision, enum ps_level level, int which)
{
    const double bound = precision == PS_PRECISION_BF16 ? 2e-2 : precision == PS_FP16 ? 4e-3 : 1e-3; /* of gradients */
    struct ps_model_shape shape = *shape_or_variant(which);
    shape.dropout = 0;
    memset(shape.dropout_at, 0, sizeof shape.dropout_at);
    struct fixture f = fixture_open(backend, device, precision, &shape, 4, level, 1);
    const struct ps_parameters *layout = f.model->layout;
    const struct ps_step_state start = {0};
    struct ps_step_state state;
    const double loss = fixture_loss(&f);
    double *whole = fixture_gradients(&f);
    fixture_parameters(&f, 0.1); /* running statistics as they were */
    double *before = from_device(f.device, f.k->parameter, f.model->parameters, layout->stored);
    OK(f.device->upload(f.device, PS_COMPUTE, f.state, &start, sizeof start));
    OK(f.device->fill_zero(f.device, PS_COMPUTE, f.model->gradients, (size_t)f.count * ps_type_bytes(f.k->parameter)));
    OK(ps_model_head_gradients(f.model, &f.windows, f.state, f.batch));
    OK(f.device->download(f.device, PS_COMPUTE, &state, f.state, sizeof state));
    double *alone = fixture_gradients(&f), *after = from_device(f.device, f.k->parameter, f.model->parameters, layout->stored);
    ck_assert_mem_eq(before, after, (size_t)layout->stored * sizeof *before);
    for (int t = 0; t < layout->n; t++) {
        const struct ps_parameter *p = &layout->table[t];
        const int head = t == layout->w_h || t == layout->b_h;
        double off = 0, norm = 0;
        for (int64_t i = p->offset; i < p->offset + ps_parameter_count(p); i++) {
            const double expected = head ? whole[i] : 0;
            off += (alone[i] - expected) * (alone[i] - expected);
            norm += expected * expected;
        }
        ck_assert(!head || norm > 0);
        if (!head || shape.norm != PS_NORM_BATCH) { /* of whose batch the whole pass takes its statistics */
            ck_assert_msg(sqrt(off) <= bound * sqrt(norm), "%s level %s, shape %d: %s is off by %.3g of %.3g", backend,
                          ps_level_name(level), which, p->name, sqrt(off), sqrt(norm));
        }
    }
    if (shape.norm != PS_NORM_BATCH) {
        ck_assert_double_le(fabs(fixture_mean(&f, &state, NULL) / loss - 1), precision == PS_PRECISION_BF16 ? 1e-2 : 1e-3);
    }
    free(whole);
    free(before);
    free(alone);
    free(after);
    fixture_close(&f);
}

START_TEST(head_alone_cpu)
{
    head_alone("reference", "cpu", PS_FP64, PS_LEVEL_NONE, _i);
    head_alone("cpu", "cpu", PS_FP32, PS_LEVEL_GEMM, _i);
}
END_TEST

START_TEST(head_alone_cuda)
{
    head_alone("cuda", "cuda", PS_FP32, PS_LEVEL_GEMM, _i);
    head_alone("cuda", "cuda", PS_FP16, PS_LEVEL_GEMM, _i);
    head_alone("cuda", "cuda", PS_PRECISION_BF16, PS_LEVEL_GEMM, _i);
}
END_TEST

/* Attention by tiles refuses what it does not have on the CPU, by the key's name. */
START_TEST(tiled_refuses)
{
    static const struct {
        struct ps_model_shape shape;
        const char *key;
    } cases[] = {{{SIZES, .dropout_at = {[PS_DROP_ATTENTION_WEIGHTS] = {1, 0.1}}}, "model.dropout_attention_weights"}};
    struct ps_device *device;
    struct ps_kernels *k;
    struct ps_model *model;
    OK(ps_device_open("cpu", 2, &device));
    OK(ps_kernels_open("cpu", device, PS_FP32, NULL, &k));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct ps_model_options options = {.level = PS_LEVEL_GEMM, .tiled_attention = 1};
        ck_assert_int_eq(ps_model_open(k, &cases[i].shape, 4, &options, &model), PS_UNSUPPORTED);
        ck_assert_msg(strstr(ps_error_message(), cases[i].key) != NULL, "message: %s", ps_error_message());
    }
    k->close(k);
    device->close(device);
}
END_TEST

/* Residual attention by tiles, q and k in pieces, against products around softmax: forecasts and a training pass, of 3 layers, of
 * few patches and of more than a tile holds, of a whole batch and a shorter one. Measured on the CPU: fp64 7.5e-16, 8.6e-15; fp32
 * 1.1e-7, 4.2e-7. CUDA's are not measured. */
static const struct step_case tiles_cases[] = {{"reference", "cpu", PS_FP64, {.level = PS_LEVEL_GEMM}, 5e-15, 5e-14, 5e-13},
                                               {"reference", "cpu", PS_FP32, {.level = PS_LEVEL_GEMM}, 1e-6, 5e-6, 5e-5},
                                               {"cpu", "cpu", PS_FP32, {.level = PS_LEVEL_GEMM}, 1e-6, 5e-6, 5e-5},
                                               {"cuda", "cuda", PS_FP32, {.level = PS_LEVEL_GEMM}, 1e-5, 1e-4, 1e-3},
                                               {"cuda", "cuda", PS_TF32, {.level = PS_LEVEL_GEMM}, 2e-3, 2e-2, 1e-1},
                                               {"cuda", "cuda", PS_FP16, {.level = PS_LEVEL_GEMM}, 2e-3, 3e-2, 0.3},
                                               {"cuda", "cuda", PS_PRECISION_BF16, {.level = PS_LEVEL_GEMM}, 1e-2, 2e-1, 2}};
enum { TILES_CPU = 3, TILES_CASES = sizeof tiles_cases / sizeof *tiles_cases };

/* Forecasts of the batch, in scoring. */
static double *forecasts_of(struct fixture *f)
{
    const int64_t S = f->batch * f->model->shape.channels, H = f->model->shape.pred_len;
    const struct ps_step_state state = {0};
    void *out;
    OK(f->device->allocate(f->device, (size_t)(S * H) * ps_type_bytes(f->k->parameter), &out));
    OK(f->device->upload(f->device, PS_COMPUTE, f->state, &state, sizeof state));
    OK(ps_model_forward(f->model, &f->windows, f->state, f->batch, 0));
    OK(ps_model_forecast(f->model, f->batch, ps_tensor_2d(out, f->k->parameter, S, H)));
    double *forecasts = from_device(f->device, f->k->parameter, out, S * H);
    f->device->release(f->device, out, (size_t)(S * H) * ps_type_bytes(f->k->parameter));
    return forecasts;
}

/* f[1], by tiles, against f[0]. */
static void compare_tiles(const struct step_case *c, struct fixture f[2], int variant)
{
    const struct ps_parameters *layout = f[0].model->layout;
    const struct ps_model_shape *shape = &f[0].model->shape;
    const int64_t n = f[0].batch * shape->channels * shape->pred_len, running = layout->stored - layout->count;
    double loss[2], *forecasts[2] = {forecasts_of(&f[0]), forecasts_of(&f[1])};
    const int smooth = has_kink(shape, c->precision);
    double *passes[2] = {pass_of(&f[0], smooth, &loss[0]), pass_of(&f[1], smooth, &loss[1])};
    const double forecast = relative_error(forecasts[1], forecasts[0], n), off = fabs(loss[1] / loss[0] - 1);
    const double statistics = running ? relative_error(passes[1] + layout->count, passes[0] + layout->count, running) : 0;
    int worst = 0;
    const double small = take_small(layout, passes[1], passes[0]), error = gradient_error(layout, passes[1], passes[0], &worst);
    printf(
        "%s %s, residual attention by tiles, variant %d, %d patches, %d windows: forecasts %.2g, loss %.2g, gradients %.2g (%s), "
        "small ones %.2g, statistics %.2g\n",
        c->backend, ps_precision_name(c->precision), variant, (int)ps_patches(shape), (int)f[0].batch, forecast, off, error,
        layout->table[worst].name, small, statistics);
    ck_assert_double_le(forecast, c->loss);
    ck_assert_double_le(off, c->loss);
    ck_assert_msg(error <= c->gradients, "gradient of %s off by %.3g", layout->table[worst].name, error);
    ck_assert_double_le(small, c->small);
    ck_assert_double_le(statistics, c->loss);
    for (int tiled = 0; tiled < 2; tiled++) {
        free(forecasts[tiled]);
        free(passes[tiled]);
    }
}

START_TEST(residual_tiles)
{
    enum { BATCH = 4 };
    const struct step_case *c = &tiles_cases[_i / VARIANTS];
    struct ps_model_shape shape = variants[_i % VARIANTS];
    if (!shape.residual_attention) {
        return;
    }
    shape.n_layers = 3;
    shape.dropout_at[PS_DROP_ATTENTION_WEIGHTS].rate = 0;
    for (int longer = 0; longer < 2; longer++) {
        shape.seq_len = longer ? 285 : 21; /* 5 or 6 patches, 70 or 71 */
        struct fixture f[2];
        for (int tiled = 0; tiled < 2; tiled++) {
            struct ps_model_options options = c->options;
            options.tiled_attention = tiled;
            options.merge_qkv = 1;
            options.seed = 5;
            f[tiled] = fixture_open_with(c->backend, c->device, c->precision, &shape, BATCH, &options);
        }
        for (int64_t batch = BATCH; batch >= BATCH - 1; batch--) {
            f[0].batch = f[1].batch = batch;
            compare_tiles(c, f, _i % VARIANTS);
        }
        for (int tiled = 0; tiled < 2; tiled++) {
            f[tiled].batch = BATCH;
            fixture_close(&f[tiled]);
        }
    }
}
END_TEST

/* ---- what level layer has not ---- */

static enum ps_status never_forward(const struct ps_kernels *k, const struct ps_encoder_forward *a)
{
    (void)k, (void)a;
    return ps_fail(PS_DEVICE, "called");
}

static enum ps_status never_prepare(const struct ps_kernels *k, const struct ps_encoder_sizes *sizes,
                                    const struct ps_encoder_shape *shape, struct ps_encoder_needs *needs)
{
    (void)k, (void)sizes, (void)needs;
    return ps_fail(PS_UNSUPPORTED, "the kernels were asked, with %s ends%s", shape->ends_apart ? "other" : "their",
                   shape->other_rate ? " at another rate" : "");
}

/* What no encoder has been told of is refused by the key's name before kernels are asked, of all else they say themselves: a table
 * that says to have the level shows it without a GPU. */
START_TEST(variants_beyond_level_layer)
{
    static const char asked[] = "asked, with their ends", apart[] = "asked, with other ends", rate[] = "their ends at another rate";
    static const struct {
        struct ps_model_shape shape;
        const char *says;
    } cases[] = {{{SIZES, .revin = 1}, asked},
                 {{SIZES, .revin = 1, .dropout = 0.2}, asked},
                 {{SIZES, .norm = PS_NORM_BATCH}, asked},
                 {{SIZES, .norm = PS_NORM_RMS}, asked},
                 {{SIZES, .norm_place = PS_NORM_POST}, asked},
                 {{SIZES, .residual_attention = 1}, asked},
                 {{SIZES, .activation = PS_SWIGLU}, asked},
                 {{SIZES, .positions = PS_POSITIONS_SINCOS}, apart},
                 {{SIZES, .positions = PS_POSITIONS_ROPE}, "model.positions: rope"},
                 {{SIZES, .individual_head = 1}, apart},
                 {{SIZES, .revin = 1, .revin_affine = 1}, apart},
                 {{SIZES, .dropout_at = {[PS_DROP_HEAD] = {1, 0.1}}}, apart},
                 {{SIZES, .dropout = 0.1, .dropout_at = {[PS_DROP_EMBEDDING] = {1, 0}}}, rate},
                 {{SIZES, .dropout_at = {[PS_DROP_ATTENTION_WEIGHTS] = {1, 0.1}}}, "model.dropout_attention_weights"},
                 {{SIZES, .dropout_at = {[PS_DROP_OUTPUT] = {1, 0.1}}}, asked}};
    struct ps_device *device;
    struct ps_kernels *k;
    struct ps_model *model;
    OK(ps_device_open("cpu", 2, &device));
    OK(ps_kernels_open("cpu", device, PS_FP32, NULL, &k));
    struct ps_kernels fused = *k;
    fused.encoder_forward = never_forward;
    fused.encoder_prepare = never_prepare;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct ps_model_options options = {.level = PS_LEVEL_LAYER};
        ck_assert_int_eq(ps_model_open(&fused, &cases[i].shape, 4, &options, &model), PS_UNSUPPORTED);
        ck_assert_msg(strstr(ps_error_message(), "runtime.fusion: layer does not serve") &&
                          strstr(ps_error_message(), cases[i].says),
                      "not \"%s\": %s", cases[i].says, ps_error_message());
    }
    k->close(k);
    device->close(device);
}
END_TEST

/* One layer with unit-variance input and upstream gradient: output, du and weight gradients as doubles. */
struct layer_result {
    double *y, *du, *gradients;
    int64_t elements;
};

/* held: what input and upstream gradient are rounded to, so that a model of that type and its oracle see the same. They are
 * 2^input and 2^exponent of unit variance. */
static struct layer_result run_layer_scaled(struct fixture *f, enum ps_type held, uint64_t step, int input, int exponent)
{
    const struct ps_model_shape *s = &f->model->shape;
    int64_t R = f->batch * s->channels * ps_patches(s), n = R * s->d_model;
    double *values = malloc((size_t)(2 * n) * sizeof *values);
    for (int64_t i = 0; i < 2 * n; i++) {
        double value = normal(23, (uint64_t)i, 97);
        values[i] = rounded_to(held, value);
        values[i] = ldexp(values[i], i < n ? input : exponent);
    }
    enum ps_type real = f->k->real, parameter = f->k->parameter;
    struct ps_tensor u = ps_model_stream(f->model, 0, f->batch);
    set_device(f->device, real, u.data, values, n);
    set_device(f->device, real, f->model->cache.shared.gradient, values + n, n);
    free(values);
    struct ps_step_state state = {.step = step};
    OK(f->device->upload(f->device, PS_COMPUTE, f->state, &state, sizeof state));
    OK(f->device->synchronize(f->device));
    OK(f->device->fill_zero(f->device, PS_COMPUTE, f->model->gradients, (size_t)f->count * ps_type_bytes(parameter)));
    OK(ps_model_encode(f->model, f->state, f->batch, 1));
    OK(ps_model_encode_backward(f->model, f->state, f->batch, 1));
    return (struct layer_result){.y = from_device(f->device, real, ps_model_stream(f->model, s->n_layers, f->batch).data, n),
                                 .du = from_device(f->device, real, f->model->cache.shared.gradient, n),
                                 .gradients = from_device(f->device, parameter, f->model->gradients, f->count),
                                 .elements = n};
}

static struct layer_result run_layer_at(struct fixture *f, enum ps_type held, uint64_t step)
{
    return run_layer_scaled(f, held, step, 0, 0);
}

static struct layer_result run_layer(struct fixture *f, enum ps_type held)
{
    return run_layer_at(f, held, 3);
}

static void layer_result_free(struct layer_result *r)
{
    free(r->y);
    free(r->du);
    free(r->gradients);
}

static double largest_difference(const double *a, const double *b, int64_t n)
{
    double largest = 0;
    for (int64_t i = 0; i < n; i++) {
        largest = !(fabs(a[i] - b[i]) <= largest) ? fabs(a[i] - b[i]) : largest;
    }
    return largest;
}

static const struct ps_model_shape layer_shapes[] = {
    {.channels = 7,
     .seq_len = 336,
     .pred_len = 2,
     .patch_len = 16,
     .stride = 8,
     .pad_end = 1,
     .d_model = 16,
     .n_heads = 4,
     .d_ff = 128,
     .n_layers = 1,
     .dropout = 0.3,
     .revin = 1},
    {.channels = 5,
     .seq_len = 24,
     .pred_len = 1,
     .patch_len = 8,
     .stride = 4,
     .pad_end = 0,
     .d_model = 64,
     .n_heads = 4,
     .d_ff = 256,
     .n_layers = 1,
     .dropout = 0,
     .revin = 1},
    {.channels = 3,
     .seq_len = 29,
     .pred_len = 1,
     .patch_len = 5,
     .stride = 3,
     .pad_end = 0,
     .d_model = 21,
     .n_heads = 3,
     .d_ff = 37,
     .n_layers = 1,
     .dropout = 0.2,
     .revin = 1},
};
enum { LAYER_SHAPES = sizeof layer_shapes / sizeof *layer_shapes };

/* Both levels agree, and each, level gemm with tiled attention and epilogues too, with the double reference (fp32; the others
 * within their own bounds). */
static void compare_levels(const char *backend, const char *device, enum ps_precision precision, const struct ps_model_shape *shape)
{
    static const double bounds[] = {[PS_FP32] = 1e-5, [PS_TF32] = 2e-3, [PS_PRECISION_BF16] = 1e-2, [PS_FP16] = 2e-3};
    double bound = bounds[precision];
    struct fixture oracle = fixture_open("reference", "cpu", PS_FP64, shape, 3, PS_LEVEL_GEMM, 0);
    enum ps_type held = precision == PS_PRECISION_BF16 ? PS_BF16 : precision == PS_FP16 ? PS_F16 : PS_F32;
    static const char *const names[] = {"gemm", "gemm, tiled, epilogues", "none"};
    struct layer_result expected = run_layer(&oracle, held), levels[3];
    int both = precision == PS_FP32;
    for (int i = 0; i < 2 + both; i++) {
        const struct ps_model_options options = {.level = i == 2 ? PS_LEVEL_NONE : PS_LEVEL_GEMM,
                                                 .tiled_attention = i == 1,
                                                 .merge_qkv = i == 1,
                                                 .epilogue = i == 1,
                                                 .seed = 5};
        struct fixture f = fixture_open_with(backend, device, precision, shape, 3, &options);
        levels[i] = run_layer(&f, held);
        int worst = 0;
        double error = gradient_error(f.model->layout, levels[i].gradients, expected.gradients, &worst);
        double y = relative_error(levels[i].y, expected.y, expected.elements);
        double du = relative_error(levels[i].du, expected.du, expected.elements);
        printf("%s %s level %s, d %d: y %.2g, du %.2g, gradients %.2g (%s)\n", backend, ps_precision_name(precision), names[i],
               (int)shape->d_model, y, du, error, f.model->layout->table[worst].name);
        ck_assert_msg(error <= bound, "%s %s level %s: gradient of %s off by %.3g", backend, ps_precision_name(precision), names[i],
                      f.model->layout->table[worst].name, error);
        ck_assert_double_le(y, bound);
        ck_assert_double_le(du, bound);
        fixture_close(&f);
    }
    if (both) {
        int worst = 0;
        double forward = largest_difference(levels[0].y, levels[2].y, expected.elements);
        double backward = gradient_error(oracle.model->layout, levels[0].gradients, levels[2].gradients, &worst);
        printf("%s: gemm against none, d %d: forward max abs %.2g, gradients %.2g, du %.2g\n", backend, (int)shape->d_model,
               forward, backward, relative_error(levels[0].du, levels[2].du, expected.elements));
        ck_assert_double_le(forward, 1e-4);
        ck_assert_msg(backward <= 1e-5, "gradient of %s off by %.3g", oracle.model->layout->table[worst].name, backward);
        ck_assert_double_le(relative_error(levels[0].du, levels[2].du, expected.elements), 1e-5);
        layer_result_free(&levels[2]);
    }
    layer_result_free(&levels[0]);
    layer_result_free(&levels[1]);
    layer_result_free(&expected);
    fixture_close(&oracle);
}

START_TEST(levels_cpu)
{
    compare_levels("reference", "cpu", PS_FP32, &layer_shapes[_i]);
    compare_levels("cpu", "cpu", PS_FP32, &layer_shapes[_i]);
}
END_TEST

START_TEST(levels_cuda)
{
    compare_levels("cuda", "cuda", PS_FP32, &layer_shapes[_i]);
    compare_levels("cuda", "cuda", PS_TF32, &layer_shapes[_i]);
    compare_levels("cuda", "cuda", PS_FP16, &layer_shapes[_i]);
    compare_levels("cuda", "cuda", PS_PRECISION_BF16, &layer_shapes[_i]);
}
END_TEST

/* Level layer against the double reference, at sizes of both families of kernels and at their limits, and with heads that the
 * streamed one pads; the 8,700 sequences are more than the GPU's blocks take at once. */
static const struct ps_model_shape fused_shapes[] = {
    {.channels = 97,
     .seq_len = 37,
     .pred_len = 1,
     .patch_len = 2,
     .stride = 1,
     .pad_end = 1,
     .d_model = 16,
     .n_heads = 4,
     .d_ff = 128,
     .n_layers = 2,
     .dropout = 0.1,
     .revin = 0},
    {.channels = 7,
     .seq_len = 336,
     .pred_len = 2,
     .patch_len = 16,
     .stride = 8,
     .pad_end = 1,
     .d_model = 16,
     .n_heads = 4,
     .d_ff = 128,
     .n_layers = 1,
     .dropout = 0.3,
     .revin = 1},
    {.channels = 5,
     .seq_len = 24,
     .pred_len = 1,
     .patch_len = 8,
     .stride = 4,
     .pad_end = 0,
     .d_model = 64,
     .n_heads = 4,
     .d_ff = 256,
     .n_layers = 1,
     .dropout = 0,
     .revin = 1},
    {.channels = 3,
     .seq_len = 336,
     .pred_len = 1,
     .patch_len = 16,
     .stride = 8,
     .pad_end = 1,
     .d_model = 128,
     .n_heads = 16,
     .d_ff = 256,
     .n_layers = 1,
     .dropout = 0.2,
     .revin = 1},
    {.channels = 1,
     .seq_len = 128,
     .pred_len = 1,
     .patch_len = 2,
     .stride = 2,
     .pad_end = 0,
     .d_model = 32,
     .n_heads = 4,
     .d_ff = 96,
     .n_layers = 1,
     .dropout = 0.1,
     .revin = 0},
    {.channels = 3,
     .seq_len = 39,
     .pred_len = 1,
     .patch_len = 3,
     .stride = 1,
     .pad_end = 0,
     .d_model = 72,
     .n_heads = 9,
     .d_ff = 200,
     .n_layers = 1,
     .dropout = 0,
     .revin = 1},
    {.channels = 5,
     .seq_len = 24,
     .pred_len = 1,
     .patch_len = 8,
     .stride = 4,
     .pad_end = 0,
     .d_model = 64,
     .n_heads = 8,
     .d_ff = 192,
     .n_layers = 1,
     .dropout = 0.1,
     .revin = 1},
    {.channels = 9,
     .seq_len = 64,
     .pred_len = 1,
     .patch_len = 4,
     .stride = 4,
     .pad_end = 0,
     .d_model = 64,
     .n_heads = 4,
     .d_ff = 256,
     .n_layers = 2,
     .dropout = 0.3,
     .revin = 1},
    {.channels = 2900,
     .seq_len = 8,
     .pred_len = 1,
     .patch_len = 8,
     .stride = 4,
     .pad_end = 0,
     .d_model = 64,
     .n_heads = 4,
     .d_ff = 128,
     .n_layers = 1,
     .dropout = 0.2,
     .revin = 0},
    {.channels = 3,
     .seq_len = 336,
     .pred_len = 1,
     .patch_len = 16,
     .stride = 8,
     .pad_end = 1,
     .d_model = 96,
     .n_heads = 8,
     .d_ff = 192,
     .n_layers = 1,
     .dropout = 0.2,
     .revin = 1},
    {.channels = 3,
     .seq_len = 39,
     .pred_len = 1,
     .patch_len = 3,
     .stride = 1,
     .pad_end = 0,
     .d_model = 104,
     .n_heads = 4,
     .d_ff = 104,
     .n_layers = 1,
     .dropout = 0.1,
     .revin = 1},
    {.channels = 5,
     .seq_len = 64,
     .pred_len = 1,
     .patch_len = 4,
     .stride = 4,
     .pad_end = 0,
     .d_model = 48,
     .n_heads = 12,
     .d_ff = 64,
     .n_layers = 1,
     .dropout = 0,
     .revin = 1},
    {.channels = 4,
     .seq_len = 128,
     .pred_len = 1,
     .patch_len = 2,
     .stride = 2,
     .pad_end = 0,
     .d_model = 128,
     .n_heads = 8,
     .d_ff = 512,
     .n_layers = 1,
     .dropout = 0.3,
     .revin = 0},
};
enum { FUSED_SHAPES = sizeof fused_shapes / sizeof *fused_shapes };

/* What level layer computes in, and how far its gradients may be off. */
static const struct {
    enum ps_precision precision;
    enum ps_type real;
    double bound;
} fused[] = {{PS_TF32, PS_F32, 2e-3}, {PS_FP16, PS_F16, 2e-3}, {PS_PRECISION_BF16, PS_BF16, 1e-2}};
enum { FUSED = sizeof fused / sizeof *fused };

/* Level layer's forecasts, which inference and training make by different kernels. */
START_TEST(forward_plain_layer)
{
    const struct ps_model_shape *shape = &fused_shapes[_i % FUSED_SHAPES];
    const int which = _i / FUSED_SHAPES;
    ck_assert_int_eq(forward_cases[FORWARD_CUDA + which].precision, fused[which].precision);
    if (shape->channels < 100) {
        compare_forward(&forward_cases[FORWARD_CUDA + which], shape);
    }
}
END_TEST

START_TEST(level_layer)
{
    const struct ps_model_shape *shape = &fused_shapes[_i % FUSED_SHAPES];
    const int which = _i / (2 * FUSED_SHAPES), larger = _i / FUSED_SHAPES % 2;
    const char *name = ps_precision_name(fused[which].precision);
    double bound = fused[which].bound;
    struct fixture oracle = fixture_open("reference", "cpu", PS_FP64, shape, 3, PS_LEVEL_GEMM, 0);
    struct fixture f = fixture_open("cuda", "cuda", fused[which].precision, shape, 3, PS_LEVEL_LAYER, 0);
    /* Weights about as large as initialisation makes them, then larger ones. */
    double noise = larger ? 0.1 : 0.02;
    fixture_parameters(&oracle, noise);
    fixture_parameters(&f, noise);
    struct layer_result expected = run_layer(&oracle, fused[which].real), got = run_layer(&f, fused[which].real), again;
    /* Again after another step and the one before, which may have drawn its masks. */
    for (int i = 0; i < 3; i++) {
        again = run_layer_at(&f, fused[which].real, (uint64_t[]){5, 2, 3}[i]);
        if (i < 2) {
            layer_result_free(&again);
        }
    }
    int worst = 0;
    double error = gradient_error(f.model->layout, got.gradients, expected.gradients, &worst);
    double y = relative_error(got.y, expected.y, expected.elements), du = relative_error(got.du, expected.du, expected.elements);
    printf("cuda %s level layer, d %d, N %d: y %.2g, du %.2g, gradients %.2g (%s)\n", name, (int)shape->d_model,
           (int)ps_patches(shape), y, du, error, f.model->layout->table[worst].name);
    ck_assert_msg(error <= bound, "gradient of %s off by %.3g", f.model->layout->table[worst].name, error);
    ck_assert_double_le(y, bound);
    ck_assert_double_le(du, bound);
    ck_assert(memcmp(got.y, again.y, (size_t)got.elements * sizeof *got.y) == 0);
    ck_assert(memcmp(got.du, again.du, (size_t)got.elements * sizeof *got.du) == 0);
    ck_assert(memcmp(got.gradients, again.gradients, (size_t)f.count * sizeof *got.gradients) == 0);
    layer_result_free(&expected);
    layer_result_free(&got);
    layer_result_free(&again);
    fixture_close(&oracle);
    fixture_close(&f);
}
END_TEST

/* Many sequences of 21 patches. */
#define TWENTY_ONE(CHANNELS, D_MODEL, HEADS, D_FF, LAYERS)                                                                 \
    .channels = CHANNELS, .seq_len = 64, .pred_len = 1, .patch_len = 4, .stride = 3, .d_model = D_MODEL, .n_heads = HEADS, \
    .d_ff = D_FF, .n_layers = LAYERS, .revin = 1

/* More rows than one turn of tiles, or few, tiles of several sequences, sequences of more than a tile: against level gemm in fp32,
 * whose own errors are below 1e-6. And what inference leaves, with nothing kept. The first has so few rows that compute-sanitizer
 * can follow it, and so many that blocks of weights' gradients use a stage more than once. */
static const struct ps_model_shape many_shapes[] = {
    {.channels = 67,
     .seq_len = 336,
     .pred_len = 1,
     .patch_len = 16,
     .stride = 8,
     .pad_end = 1,
     .d_model = 128,
     .n_heads = 16,
     .d_ff = 256,
     .n_layers = 2,
     .dropout = 0.2,
     .revin = 1},
    {.channels = 265,
     .seq_len = 336,
     .pred_len = 1,
     .patch_len = 16,
     .stride = 8,
     .pad_end = 1,
     .d_model = 128,
     .n_heads = 16,
     .d_ff = 256,
     .n_layers = 2,
     .dropout = 0.2,
     .revin = 1},
    {TWENTY_ONE(300, 64, 8, 384, 3), .dropout = 0},
    {.channels = 70,
     .seq_len = 515,
     .pred_len = 1,
     .patch_len = 5,
     .stride = 5,
     .pad_end = 0,
     .d_model = 128,
     .n_heads = 2,
     .d_ff = 64,
     .n_layers = 2,
     .dropout = 0.1,
     .revin = 1},
    {.channels = 610,
     .seq_len = 24,
     .pred_len = 1,
     .patch_len = 8,
     .stride = 4,
     .pad_end = 0,
     .d_model = 64,
     .n_heads = 4,
     .d_ff = 128,
     .n_layers = 3,
     .dropout = 0.1,
     .revin = 1},
    {.channels = 5,
     .seq_len = 57,
     .pred_len = 1,
     .patch_len = 4,
     .stride = 3,
     .pad_end = 1,
     .d_model = 128,
     .n_heads = 8,
     .d_ff = 192,
     .n_layers = 3,
     .dropout = 0.2,
     .revin = 1},
    {TWENTY_ONE(530, 64, 8, 256, 2), .dropout = 0.2},
    /* Of the streamed family in 16 bits, on 132 multiprocessors: */
    {TWENTY_ONE(930, 40, 5, 72, 3), .dropout = 0.2},   /* launches of more than two tiles a block */
    {TWENTY_ONE(450, 40, 5, 40, 5), .dropout = 0.2},   /* counts used again: ten launches each way */
    {TWENTY_ONE(1000, 40, 5, 512, 3), .dropout = 0.2}, /* an odd number of chunks, counted */
    {TWENTY_ONE(400, 40, 5, 40, 1), .dropout = 0.2},   /* a pass of two launches */
    {TWENTY_ONE(400, 96, 4, 72, 3), .dropout = 0.2},   /* padded heads, of 24 columns */
    {TWENTY_ONE(130, 72, 8, 40, 2), .dropout = 0.2},   /* and of 9 */
};
enum { MANY_SHAPES = sizeof many_shapes / sizeof *many_shapes };

START_TEST(level_layer_many)
{
    const struct ps_model_shape *shape = &many_shapes[_i % MANY_SHAPES];
    const int which = _i / MANY_SHAPES;
    const enum ps_type real = fused[which].real;
    if (ps_patches(shape) > 64) {
        return;
    }
    struct fixture gemm = fixture_open("cuda", "cuda", PS_FP32, shape, 3, PS_LEVEL_GEMM, 0);
    struct fixture f = fixture_open("cuda", "cuda", fused[which].precision, shape, 3, PS_LEVEL_LAYER, 0);
    fixture_parameters(&gemm, 0.02);
    fixture_parameters(&f, 0.02);
    struct layer_result expected = run_layer(&gemm, PS_F32), got = run_layer(&f, real), again = run_layer(&f, real);
    int worst = 0;
    double error = gradient_error(f.model->layout, got.gradients, expected.gradients, &worst);
    double y = relative_error(got.y, expected.y, expected.elements), du = relative_error(got.du, expected.du, expected.elements);
    printf("cuda %s level layer, many rows, d %d, N %d: y %.2g, du %.2g, gradients %.2g (%s)\n",
           ps_precision_name(fused[which].precision), (int)shape->d_model, (int)ps_patches(shape), y, du, error,
           f.model->layout->table[worst].name);
    ck_assert_msg(error <= fused[which].bound, "gradient of %s off by %.3g", f.model->layout->table[worst].name, error);
    ck_assert_double_le(y, fused[which].bound);
    ck_assert_double_le(du, fused[which].bound);
    ck_assert(memcmp(got.gradients, again.gradients, (size_t)f.count * sizeof *got.gradients) == 0);
    double *inferred[2];
    for (int i = 0; i < 2; i++) {
        OK(ps_model_encode(f.model, f.state, f.batch, 0));
        inferred[i] = from_device(f.device, real, ps_model_stream(f.model, shape->n_layers, f.batch).data, got.elements);
    }
    ck_assert(memcmp(inferred[0], inferred[1], (size_t)got.elements * sizeof *inferred[0]) == 0);
    free(inferred[0]);
    free(inferred[1]);
    layer_result_free(&expected);
    layer_result_free(&got);
    layer_result_free(&again);
    fixture_close(&gemm);
    fixture_close(&f);
}
END_TEST

/* A weight that is the NaN of arithmetic, all ones but for the sign, is not rounded to a number; nor is one that fp16 does not
 * hold, as which tf32 is multiplied. */
START_TEST(level_layer_nan)
{
    const struct ps_model_shape *shape = &fused_shapes[_i % FUSED_SHAPES];
    const int which = _i / FUSED_SHAPES;
    static const char *const names[] = {"layers.0.w_qkv", "layers.0.w_o", "layers.0.w_1", "layers.0.w_2"};
    for (int i = 0; i < 8; i++) {
        struct fixture f = fixture_open("cuda", "cuda", fused[which].precision, shape, 3, PS_LEVEL_LAYER, 0);
        fixture_parameters(&f, 0.02);
        int t = 0;
        while (t < f.model->layout->n && strcmp(f.model->layout->table[t].name, names[i % 4]) != 0) {
            t++;
        }
        ck_assert_int_lt(t, f.model->layout->n);
        const uint32_t nan = 0x7fffffff;
        const float large = 7e4F;
        OK(f.device->upload(f.device, PS_COMPUTE, (char *)f.model->weights + f.model->layout->table[t].offset * 4,
                            i < 4 ? (const void *)&nan : &large, sizeof nan));
        struct layer_result got = run_layer(&f, PS_F32);
        int64_t finite = 0;
        for (int64_t j = 0; j < got.elements; j++) {
            finite += isfinite(got.y[j]);
        }
        ck_assert_msg(finite < got.elements, "%s: a %s in %s leaves no trace", ps_precision_name(fused[which].precision),
                      i < 4 ? "NaN" : "weight beyond fp16", names[i % 4]);
        layer_result_free(&got);
        fixture_close(&f);
    }
}
END_TEST

/* Gradients may be of any size, though some of the kernels multiply them as fp16: a power of two goes through to the last bit. */
START_TEST(level_layer_scaled)
{
    const struct ps_model_shape *shape = _i < FUSED_SHAPES ? &fused_shapes[_i] : &many_shapes[_i - FUSED_SHAPES];
    if (ps_patches(shape) > 64) {
        return;
    }
    struct fixture f = fixture_open("cuda", "cuda", PS_TF32, shape, 3, PS_LEVEL_LAYER, 0);
    fixture_parameters(&f, 0.02);
    struct layer_result plain = run_layer(&f, PS_F32);
    for (int exponent = -60; exponent <= 40; exponent += 100) {
        struct layer_result scaled = run_layer_scaled(&f, PS_F32, 3, 0, exponent);
        int64_t other = 0, zeros = 0;
        for (int64_t i = 0; i < plain.elements; i++) {
            other += scaled.du[i] != ldexp(plain.du[i], exponent);
        }
        for (int64_t i = 0; i < f.count; i++) {
            other += scaled.gradients[i] != ldexp(plain.gradients[i], exponent);
            zeros += plain.gradients[i] == 0;
        }
        ck_assert_msg(other == 0, "d %d, N %d: %lld elements are not 2^%d of what they were", (int)shape->d_model,
                      (int)ps_patches(shape), (long long)other, exponent);
        ck_assert_int_lt(zeros, f.count);
        layer_result_free(&scaled);
    }
    layer_result_free(&plain);
    fixture_close(&f);
}
END_TEST

/* Masks where seed and step need both of their words: a wrong one shows as a tenth and more. The encoders draw with code of their
 * own, some of them a step ahead. */
static const uint64_t long_seed = 0xfeedface12345678u, long_steps[2] = {0x2ffffffffu, 0x300000000u};

static struct fixture open_long(const char *backend, const char *device, enum ps_precision precision,
                                const struct ps_model_shape *shape, enum ps_level level)
{
    struct fixture f =
        fixture_open_with(backend, device, precision, shape, 3, &(struct ps_model_options){.level = level, .seed = long_seed});
    fixture_parameters(&f, 0.02);
    return f;
}

START_TEST(level_layer_draws)
{
    const struct ps_model_shape *shape = &fused_shapes[_i % FUSED_SHAPES];
    const int which = _i / FUSED_SHAPES;
    if (!(shape->dropout > 0)) {
        return;
    }
    struct fixture oracle = open_long("reference", "cpu", PS_FP64, shape, PS_LEVEL_GEMM);
    struct fixture f = open_long("cuda", "cuda", fused[which].precision, shape, PS_LEVEL_LAYER);
    for (int i = 0; i < 2; i++) {
        struct layer_result expected = run_layer_at(&oracle, fused[which].real, long_steps[i]);
        struct layer_result got = run_layer_at(&f, fused[which].real, long_steps[i]);
        ck_assert_double_le(relative_error(got.y, expected.y, expected.elements), 5 * fused[which].bound);
        ck_assert_double_le(relative_error(got.du, expected.du, expected.elements), 5 * fused[which].bound);
        layer_result_free(&expected);
        layer_result_free(&got);
    }
    fixture_close(&oracle);
    fixture_close(&f);
}
END_TEST

/* What the fused kernels do not serve is refused when the model is opened. */
START_TEST(level_layer_refuses)
{
    struct ps_device *device;
    struct ps_kernels *k;
    struct ps_model *model;
    const struct ps_model_options options = {.level = PS_LEVEL_LAYER};
    OK(ps_device_open("cuda", 0, &device));
    struct ps_model_shape longer = many_shapes[0]; /* more patches than a tile of 16 bits has rows */
    longer.stride = 2;
    static const enum ps_precision precisions[] = {PS_PRECISION_BF16, PS_FP16, PS_TF32};
    for (int i = 0; i < 3; i++) {
        OK(ps_kernels_open("cuda", device, precisions[i], NULL, &k));
        ck_assert_int_eq(ps_model_open(k, &layer_shapes[2], 3, &options, &model), PS_UNSUPPORTED); /* d 21 */
        ck_assert_int_eq(ps_model_open(k, &longer, 3, &options, &model), PS_UNSUPPORTED);
        k->close(k);
    }
    /* Served, but only when it must be: in 16 bits so few rows are faster at level gemm, in tf32 they may pass fp16's range. */
    const struct ps_model_options wanted = {.level = PS_LEVEL_LAYER, .if_faster = 1};
    for (int i = 0; i < 3; i++) {
        OK(ps_kernels_open("cuda", device, precisions[i], NULL, &k));
        int refused = 0, served = 0;
        for (int j = 0; j < FUSED_SHAPES; j++) {
            OK(ps_model_open(k, &fused_shapes[j], 3, &options, &model));
            const int safe = fused_shapes[j].revin || !model->encoder.fp16_rows;
            ps_model_close(model);
            const enum ps_status status = ps_model_open(k, &fused_shapes[j], 3, &wanted, &model);
            ck_assert(status == PS_OK || status == PS_UNSUPPORTED);
            ck_assert(precisions[i] != PS_TF32 || (status == PS_OK) == safe);
            refused += status == PS_UNSUPPORTED;
            served += status == PS_OK;
            if (status == PS_OK) {
                ps_model_close(model);
            }
        }
        ck_assert_int_gt(served, 0);
        ck_assert_int_gt(refused, 0);
        k->close(k);
    }
    OK(ps_kernels_open("cuda", device, PS_FP32, NULL, &k));
    ck_assert_int_eq(ps_model_open(k, &fused_shapes[0], 3, &options, &model), PS_UNSUPPORTED); /* which has no such kernels */
    k->close(k);
    ck_assert_uint_eq(device->counters.bytes, 0);
    device->close(device);
}
END_TEST

/* A whole step in 16 bits against the double reference: what stands around the layers, and the copy that products read. */
START_TEST(step_real16)
{
    const struct ps_model_shape *shape = &shapes[_i / 2];
    const enum ps_precision precision = _i % 2 ? PS_FP16 : PS_PRECISION_BF16;
    const double bound = _i % 2 ? 2e-3 : 1e-2;
    struct fixture oracle = fixture_open("reference", "cpu", PS_FP64, shape, 16, PS_LEVEL_GEMM, 0);
    struct fixture f = fixture_open("cuda", "cuda", precision, shape, 16, PS_LEVEL_GEMM, _i / 2 % 2);
    const enum ps_type real = f.k->real;
    double expected_loss = fixture_loss(&oracle), loss = fixture_loss(&f);
    double *expected = fixture_gradients(&oracle), *gradients = fixture_gradients(&f);
    int worst = 0;
    double error = gradient_error(f.model->layout, gradients, expected, &worst);
    printf("%s step, shape %d: loss %.2g, gradients %.2g (%s)\n", ps_precision_name(precision), _i / 2,
           fabs(loss / expected_loss - 1), error, f.model->layout->table[worst].name);
    ck_assert_double_le(fabs(loss / expected_loss - 1), bound);
    ck_assert_msg(error <= 5 * bound, "gradient of %s off by %.3g", f.model->layout->table[worst].name, error);
    double *parameters = from_device(f.device, PS_F32, f.model->parameters, f.count);
    double *weights = from_device(f.device, real, f.model->weights, f.count);
    for (int64_t i = 0; i < f.count; i++) {
        ck_assert_msg(weights[i] == rounded_to(real, parameters[i]), "weight %lld is %.9g, the parameter %.9g", (long long)i,
                      weights[i], parameters[i]);
    }
    free(expected);
    free(gradients);
    free(parameters);
    free(weights);
    fixture_close(&f);
    fixture_close(&oracle);
}
END_TEST

/* A whole step at level layer: both families, several sequences in a tile and several tiles in a sequence, more units than blocks
 * take at once, patches of odd lengths and of two steps, and one that is too long to be embedded inside the encoder. */
static const struct ps_model_shape step_shapes[] = {
    {.channels = 200,
     .seq_len = 336,
     .pred_len = 96,
     .patch_len = 16,
     .stride = 8,
     .pad_end = 1,
     .d_model = 16,
     .n_heads = 4,
     .d_ff = 128,
     .n_layers = 1,
     .dropout = 0,
     .revin = 1},
    {.channels = 7,
     .seq_len = 336,
     .pred_len = 8,
     .patch_len = 16,
     .stride = 8,
     .pad_end = 1,
     .d_model = 16,
     .n_heads = 4,
     .d_ff = 128,
     .n_layers = 2,
     .dropout = 0.3,
     .revin = 1},
    {.channels = 5,
     .seq_len = 24,
     .pred_len = 3,
     .patch_len = 8,
     .stride = 4,
     .pad_end = 0,
     .d_model = 64,
     .n_heads = 4,
     .d_ff = 256,
     .n_layers = 2,
     .dropout = 0,
     .revin = 1},
    {.channels = 9,
     .seq_len = 29,
     .pred_len = 3,
     .patch_len = 5,
     .stride = 3,
     .pad_end = 1,
     .d_model = 64,
     .n_heads = 4,
     .d_ff = 128,
     .n_layers = 2,
     .dropout = 0.2,
     .revin = 1},
    {.channels = 4,
     .seq_len = 20,
     .pred_len = 3,
     .patch_len = 6,
     .stride = 5,
     .pad_end = 1,
     .d_model = 16,
     .n_heads = 2,
     .d_ff = 48,
     .n_layers = 1,
     .dropout = 0.1,
     .revin = 1},
    {.channels = 3,
     .seq_len = 60,
     .pred_len = 2,
     .patch_len = 24,
     .stride = 2,
     .pad_end = 0,
     .d_model = 32,
     .n_heads = 4,
     .d_ff = 96,
     .n_layers = 1,
     .dropout = 0.3,
     .revin = 0},
    {.channels = 2900,
     .seq_len = 8,
     .pred_len = 1,
     .patch_len = 8,
     .stride = 4,
     .pad_end = 1,
     .d_model = 64,
     .n_heads = 4,
     .d_ff = 128,
     .n_layers = 1,
     .dropout = 0.2,
     .revin = 0},
    {.channels = 1400,
     .seq_len = 16,
     .pred_len = 1,
     .patch_len = 1,
     .stride = 1,
     .pad_end = 0,
     .d_model = 16,
     .n_heads = 4,
     .d_ff = 16,
     .n_layers = 1,
     .dropout = 0,
     .revin = 1},
    {.channels = 5,
     .seq_len = 24,
     .pred_len = 2,
     .patch_len = 8,
     .stride = 4,
     .pad_end = 0,
     .d_model = 64,
     .n_heads = 8,
     .d_ff = 256,
     .n_layers = 2,
     .dropout = 0.1,
     .revin = 1},
    {.channels = 3,
     .seq_len = 100,
     .pred_len = 2,
     .patch_len = 40,
     .stride = 10,
     .pad_end = 0,
     .d_model = 16,
     .n_heads = 4,
     .d_ff = 32,
     .n_layers = 1,
     .dropout = 0.1,
     .revin = 1},
};
enum { STEP_SHAPES = sizeof step_shapes / sizeof *step_shapes };

/* What the embedding leaves: patches, u, mean, std. */
static double *embedding_of(const struct fixture *f, int64_t *n)
{
    const struct ps_model_shape *s = &f->model->shape;
    const struct ps_shared_cache *c = &f->model->cache.shared;
    int64_t S = f->batch * s->channels, R = S * ps_patches(s), sizes[4] = {R * s->patch_len, R * s->d_model, S, S};
    const void *from[4] = {c->patches, c->stream, c->revin_mean, c->revin_std};
    double *all = malloc((size_t)(sizes[0] + sizes[1] + 2 * S) * sizeof *all);
    *n = 0;
    for (int i = 0; i < 4; i++) {
        double *part = from_device(f->device, i < 2 ? f->k->real : f->k->statistics, from[i], sizes[i]);
        memcpy(all + *n, part, (size_t)sizes[i] * sizeof *part);
        *n += sizes[i];
        free(part);
    }
    return all;
}

/* Against the double reference; and with the embedding in operations of its own, which may only add the gradients in another
 * order. */
START_TEST(step_layer)
{
    const struct ps_model_shape *shape = &step_shapes[_i % STEP_SHAPES];
    const int which = _i / STEP_SHAPES;
    const int same = fused[which].real != PS_F32; /* in tf32 roundings of the embedding's and the head's operands differ */
    struct fixture oracle = fixture_open("reference", "cpu", PS_FP64, shape, 3, PS_LEVEL_GEMM, 0);
    struct fixture f = fixture_open("cuda", "cuda", fused[which].precision, shape, 3, PS_LEVEL_LAYER, 0);
    ck_assert_int_eq(f.model->encoder.span >= PS_SPAN_EMBEDDING, _i % STEP_SHAPES < STEP_SHAPES - 1 && same);
    ck_assert_int_eq(f.model->encoder.span >= PS_SPAN_LOSS,
                     same && (shape->pred_len >= 8 || (shape->d_model == 64 && shape->pred_len == 3)));
    if (_i % 2) { /* a series: channels beside one another */
        oracle.windows.inputs.stride[1] = f.windows.inputs.stride[1] = 1;
        oracle.windows.inputs.stride[2] = f.windows.inputs.stride[2] = shape->channels;
    }
    double expected_loss = fixture_loss(&oracle), loss = fixture_loss(&f);
    double *expected = from_device(oracle.device, PS_F64, oracle.model->gradients, f.count);
    double *gradients = fixture_gradients(&f);
    int64_t n;
    double *embedding = embedding_of(&f, &n);
    ck_assert(fixture_loss(&f) == loss);
    double *again = fixture_gradients(&f);
    ck_assert(memcmp(gradients, again, (size_t)f.count * sizeof *gradients) == 0);
    free(again);
    const enum ps_encoder_span span = f.model->encoder.span;
    f.model->encoder.span = PS_SPAN_LAYERS;
    double loss_apart = fixture_loss(&f);
    ck_assert_double_le(fabs(loss_apart / loss - 1), same ? 1e-6 : fused[which].bound);
    double *apart = fixture_gradients(&f), *embedding_apart = embedding_of(&f, &n);
    if (same) {
        ck_assert(memcmp(embedding, embedding_apart, (size_t)n * sizeof *embedding) == 0);
    } else {
        ck_assert_double_le(relative_error(embedding, embedding_apart, n), fused[which].bound);
    }
    int worst = 0, worst_apart = 0;
    const struct ps_parameters *layout = f.model->layout;
    double error = gradient_error(layout, gradients, expected, &worst),
           order = gradient_error(layout, gradients, apart, &worst_apart);
    printf("%s step at level layer, d %d, N %d, P %d: loss %.2g, gradients %.2g (%s), the ends apart %.2g (%s)\n",
           ps_precision_name(fused[which].precision), (int)shape->d_model, (int)ps_patches(shape), (int)shape->patch_len,
           fabs(loss / expected_loss - 1), error, layout->table[worst].name, order, layout->table[worst_apart].name);
    ck_assert_double_le(fabs(loss / expected_loss - 1), fused[which].bound);
    ck_assert_msg(error <= 5 * fused[which].bound, "gradient of %s off by %.3g", layout->table[worst].name, error);
    /* The head's sums in another order may round to the next number. */
    ck_assert_msg(order <= (!same                  ? 5 * fused[which].bound
                            : span >= PS_SPAN_LOSS ? 1e-3
                                                   : 1e-5),
                  "gradient of %s changes by %.3g", layout->table[worst_apart].name, order);
    free(expected);
    free(gradients);
    free(apart);
    free(embedding);
    free(embedding_apart);
    fixture_close(&f);
    fixture_close(&oracle);
}
END_TEST

/* All gradients, with the masks of `step`. */
static double *gradients_at(struct fixture *f, uint64_t step)
{
    const struct ps_step_state state = {.step = step};
    OK(f->device->upload(f->device, PS_COMPUTE, f->state, &state, sizeof state));
    OK(f->device->fill_zero(f->device, PS_COMPUTE, f->model->gradients, (size_t)f->count * ps_type_bytes(f->k->parameter)));
    OK(ps_model_gradients(f->model, &f->windows, f->state, f->batch));
    OK(f->device->synchronize(f->device));
    return fixture_gradients(f);
}

/* As level_layer_draws, with the embedding's mask. */
START_TEST(step_layer_draws)
{
    const struct ps_model_shape *shape = &step_shapes[_i % STEP_SHAPES];
    const int which = _i / STEP_SHAPES;
    if (!(shape->dropout > 0)) {
        return;
    }
    struct fixture oracle = open_long("reference", "cpu", PS_FP64, shape, PS_LEVEL_GEMM);
    struct fixture f = open_long("cuda", "cuda", fused[which].precision, shape, PS_LEVEL_LAYER);
    for (int i = 0; i < 2; i++) {
        double *expected = gradients_at(&oracle, long_steps[i]), *got = gradients_at(&f, long_steps[i]);
        int worst = 0;
        double error = gradient_error(f.model->layout, got, expected, &worst);
        ck_assert_msg(error <= 5 * fused[which].bound, "step %llx: gradient of %s off by %.3g", (unsigned long long)long_steps[i],
                      f.model->layout->table[worst].name, error);
        free(expected);
        free(got);
    }
    fixture_close(&oracle);
    fixture_close(&f);
}
END_TEST

/* The same as gradients_at, of parts of the batch one after another, each at its place as ranks have them: one window at a time, or
 * one and then the others. */
static double *gradients_in_parts(struct fixture *f, uint64_t step, int one_by_one)
{
    const struct ps_step_state state = {.step = step};
    OK(f->device->upload(f->device, PS_COMPUTE, f->state, &state, sizeof state));
    OK(f->device->fill_zero(f->device, PS_COMPUTE, f->model->gradients, (size_t)f->count * ps_type_bytes(f->k->parameter)));
    for (int64_t first = 0, n; first < f->batch; first += n) {
        n = one_by_one || first == 0 ? 1 : f->batch - first;
        struct ps_windows part = f->windows;
        part.indices = ps_tensor_slice(part.indices, 0, first, f->batch - first);
        ps_model_place(f->model, &(struct ps_batch_place){.first = first, .whole = f->batch});
        OK(ps_model_gradients(f->model, &part, f->state, n));
    }
    ps_model_place(f->model, &(struct ps_batch_place){.first = 0});
    OK(f->device->synchronize(f->device));
    return fixture_gradients(f);
}

/* Parts of a batch draw what the whole one does. Level layer's kernels, which keep masks that they drew a step ahead, with the ends
 * inside and apart. */
static void compare_parts(const char *backend, enum ps_precision precision, const struct ps_model_shape *shape, enum ps_level level,
                          double bound)
{
    struct fixture oracle = open_long("reference", "cpu", PS_FP64, shape, PS_LEVEL_GEMM);
    struct fixture f = open_long(backend, backend, precision, shape, level);
    const enum ps_encoder_span span = f.model->encoder.span;
    for (int i = 0; i < 4; i++) {
        f.model->encoder.span = i < 2 ? span : PS_SPAN_LAYERS;
        double *expected = gradients_at(&oracle, long_steps[i % 2]), *got = gradients_in_parts(&f, long_steps[i % 2], i % 2 == 0);
        int worst = 0;
        double error = gradient_error(f.model->layout, got, expected, &worst);
        ck_assert_msg(error <= bound, "%s, %s, d %d, pass %d: gradient of %s off by %.3g", ps_precision_name(precision),
                      ps_level_name(level), (int)shape->d_model, i, f.model->layout->table[worst].name, error);
        free(expected);
        free(got);
    }
    fixture_close(&oracle);
    fixture_close(&f);
}

START_TEST(step_parts_cpu)
{
    if (step_shapes[_i].dropout > 0) {
        compare_parts("cpu", PS_FP32, &step_shapes[_i], PS_LEVEL_GEMM, 1e-5);
    }
}
END_TEST

START_TEST(step_parts_cuda)
{
    const int which = _i / STEP_SHAPES;
    const struct ps_model_shape *shape = &step_shapes[_i % STEP_SHAPES];
    if (shape->dropout > 0) { /* the last: fp32 */
        compare_parts("cuda", which < FUSED ? fused[which].precision : PS_FP32, shape, PS_LEVEL_GEMM,
                      5 * (which < FUSED ? fused[which].bound : 1e-5));
    }
}
END_TEST

START_TEST(step_parts_layer)
{
    const int which = _i / STEP_SHAPES;
    const struct ps_model_shape *shape = &step_shapes[_i % STEP_SHAPES];
    if (shape->dropout > 0) {
        compare_parts("cuda", fused[which].precision, shape, PS_LEVEL_LAYER, 5 * fused[which].bound);
    }
}
END_TEST

/* A rank without windows exchanges what those do that have some, in the same order; there the gradients' sums of many layers. */
START_TEST(attends)
{
    struct ps_model_shape shape = *shape_or_variant(_i);
    shape.n_layers = 5;
    const int level = shape.norm == PS_NORM_BATCH || _i % 2 ? PS_LEVEL_GEMM : PS_LEVEL_NONE;
    struct recorder with = recorder_of(2, 1), without = with;
    struct ps_model_options options = {.level = level, .exchange = &with.table};
    struct fixture f = fixture_open_with("cpu", "cpu", PS_FP32, &shape, 4, &options);
    struct ps_batch_place place = {.whole = 4, .shares = {.windows = 4, .granule = 4, .ranks = 2}, .sum = &with.table};
    ps_model_place(f.model, &place);
    OK(ps_model_gradients(f.model, &f.windows, f.state, 4));
    OK(ps_model_sum_gradients(f.model));
    f.model->options.exchange = place.sum = &without.table;
    ps_model_place(f.model, &place);
    OK(ps_model_attend(f.model));
    OK(ps_model_sum_gradients(f.model));
    ck_assert_int_eq(with.n, (shape.norm == PS_NORM_BATCH ? 4 * 5 : 0) + 5 + 3);
    ck_assert_int_eq(with.n, without.n);
    for (int i = 0; i < with.n; i++) {
        const struct recorded *a = &with.call[i], *b = &without.call[i];
        ck_assert_msg(a->kind == b->kind && a->bytes == b->bytes && (a->kind != RECORDED_BESIDE || a->values == b->values),
                      "exchange %d: kind %d of %zu bytes, and %d of %zu without windows", i, a->kind, a->bytes, b->kind, b->bytes);
    }
    fixture_close(&f);
}
END_TEST

enum { ONE_STEPS = 8, ONE_SHAPES = 2 };

/* What is left of steps: parameters, copy, m, v and gradients, one after another, and the state. */
struct stepped {
    double *all;
    int64_t n;
    struct ps_step_state state;
};

/* Calls of adamw outside of what runs beside, and inside; on the CPU that has its place in the order alone. */
static struct ps_kernels watched;
static int beside_now, updates[2];

static enum ps_status watch_beside(const struct ps_kernels *k, enum ps_beside what)
{
    beside_now = what == PS_BESIDE_BEGIN;
    return watched.beside ? watched.beside(k, what) : PS_OK;
}

static enum ps_status watch_adamw(const struct ps_kernels *k, const struct ps_adamw *a)
{
    updates[beside_now]++;
    return watched.adamw(k, a);
}

/* Parts of a step's update that run beside backward, at level gemm: of a large head, and of many weights of layers. */
static int parts_beside(const struct ps_model *m)
{
    const struct ps_parameter *table = m->layout->table;
    const int head = ps_parameter_count(&table[m->layout->w_h]) >= 1 << 21;
    const int64_t end = head ? table[m->layout->w_h].offset : m->layout->decayed;
    return head + (end - table[m->layout->layer[0][PS_W_QKV]].offset >= 3 << 18);
}

/* Steps of whole and short batches, the last ones of windows that are not there when `spoilt` is 2. Gradients are not zero at the
 * second, and not finite at the sixth when `spoilt` is 1. */
static struct stepped run_steps(const char *backend, enum ps_precision precision, const struct ps_model_shape *shape,
                                enum ps_level level, int in_one, int spoilt)
{
    struct fixture f = fixture_open_with(
        backend, backend, precision, shape, 3,
        &(struct ps_model_options){.level = level, .tiled_attention = 1, .merge_qkv = 1, .epilogue = 1, .seed = 5});
    struct ps_model *m = f.model;
    watched = *f.k;
    f.k->beside = in_one ? watch_beside : watched.beside; /* on the CPU none: the head's own gradients come with its others */
    f.k->adamw = watch_adamw;
    memset(updates, 0, sizeof updates);
    const struct ps_optimizer_options options = {
        .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8, .weight_decay = 0.01, .gradient_scale = m->gradient_scale};
    /* At ten times as much the losses of 1,280 hidden columns grow until fp16's gradients overflow. */
    const double rates[ONE_STEPS] = {1e-3, 1e-3, 2e-3, 1e-3, 1e-3, 1e-3, 5e-4, 1e-4};
    struct ps_optimizer optimizer;
    OK(ps_optimizer_open(f.k, f.count, m->layout->decayed, &options, rates, ONE_STEPS, &optimizer));
    for (int i = 0; i < ONE_STEPS; i++) {
        const int64_t batch = i < 4 || (spoilt == 2 && i > 5) ? 3 : 2, windows = i == 4;
        if (i == 1 || (spoilt == 1 && i == 5)) {
            double *more = calloc((size_t)f.count, sizeof *more);
            for (int t = 0; t < m->layout->n; t++) {
                const struct ps_parameter *p = &m->layout->table[t];
                const int64_t n = ps_parameter_count(p);
                for (int64_t j = 0; i == 1 && j < n; j++) {
                    more[p->offset + j] = normal(41, (uint64_t)(p->offset + j), 96);
                }
                more[p->offset + n / 2] = i == 1 ? 0 : t % 2 ? INFINITY : NAN;
            }
            set_device(f.device, PS_F32, m->gradients, more, f.count);
            free(more);
        }
        const struct ps_adamw update = ps_optimizer_adamw(&optimizer, m->parameters, m->weights, m->gradients, f.state, windows);
        if (in_one) {
            OK(ps_model_step(m, &f.windows, f.state, batch, &update));
        } else {
            OK(ps_model_gradients(m, &f.windows, f.state, batch));
            OK(ps_optimizer_step(&optimizer, m->parameters, m->weights, m->gradients, f.state, windows));
        }
    }
    if (in_one) { /* a part of the update is beside; what needs all gradients first is refused */
        const int parts = level == PS_LEVEL_GEMM ? parts_beside(m) : 0;
        ck_assert(level != PS_LEVEL_GEMM || parts > 0);
        ck_assert_int_eq(updates[1], parts * ONE_STEPS);
        ck_assert_int_eq(updates[0], ps_model_steps(m) ? 0 : (1 + (parts > 0)) * ONE_STEPS);
        struct ps_adamw update = ps_optimizer_adamw(&optimizer, m->parameters, m->weights, m->gradients, f.state, 3);
        update.clip_norm = 1;
        ck_assert_int_eq(ps_model_step(m, &f.windows, f.state, 2, &update), PS_UNSUPPORTED);
        update.clip_norm = 0;
        update.skip = 1;
        ck_assert_int_eq(ps_model_step(m, &f.windows, f.state, 2, &update), PS_UNSUPPORTED);
        update.skip = 0;
        update.held = 1;
        ck_assert_int_eq(ps_model_step(m, &f.windows, f.state, 2, &update), PS_UNSUPPORTED);
    }
    struct stepped s = {.all = malloc((size_t)(5 * f.count) * sizeof(double)), .n = 5 * f.count};
    const void *from[5] = {m->parameters, m->weights, optimizer.m, optimizer.v, m->gradients};
    const enum ps_type type[5] = {PS_F32, f.k->real, PS_F32, PS_F64, PS_F32};
    for (int i = 0; i < 5; i++) {
        double *part = from_device(f.device, type[i], from[i], f.count);
        memcpy(s.all + i * f.count, part, (size_t)f.count * sizeof *part);
        free(part);
    }
    for (int64_t i = 4 * f.count; i < s.n; i++) {
        ck_assert_msg(s.all[i] == 0, "gradient %lld is left at %g", (long long)(i - 4 * f.count), s.all[i]);
    }
    OK(f.device->download(f.device, PS_COMPUTE, &s.state, f.state, sizeof s.state));
    ps_optimizer_close(&optimizer);
    fixture_close(&f);
    return s;
}

static void expect_step_in_one(const char *backend, enum ps_precision precision, const struct ps_model_shape *shape,
                               enum ps_level level, int spoilt)
{
    struct stepped apart = run_steps(backend, precision, shape, level, 0, spoilt);
    struct stepped one = run_steps(backend, precision, shape, level, 1, spoilt);
    int64_t differ = 0, finite = 0;
    for (int64_t i = 0; i < one.n; i++) {
        differ += memcmp(&one.all[i], &apart.all[i], sizeof *one.all) != 0 && !(isnan(one.all[i]) && isnan(apart.all[i]));
        finite += isfinite(one.all[i]);
    }
    ck_assert_msg(differ == 0, "%lld of %lld numbers differ", (long long)differ, (long long)one.n);
    ck_assert_int_eq(finite == one.n, spoilt == 0);
    ck_assert(memcmp(&one.state, &apart.state, sizeof one.state) == 0);
    ck_assert_uint_eq(one.state.step, ONE_STEPS);
    ck_assert_uint_eq(one.state.cursor, 1);
    const uint64_t noted = spoilt == 0 ? 0 : spoilt == 1 ? 6 : 7;
    ck_assert_uint_eq(one.state.nonfinite, noted);
    ck_assert_uint_eq(one.state.lost, spoilt == 2 ? 3 : 0);
    free(apart.all);
    free(one.all);
}

/* AdamW inside the encoder's backward leaves the bits that it leaves behind it. */
START_TEST(step_in_one)
{
    const struct ps_model_shape *shape = &step_shapes[2 + _i % ONE_SHAPES];
    const int which = _i / ONE_SHAPES;
    for (int spoilt = asked("PS_TEST_SMALL") ? 2 : 0; spoilt < 3; spoilt++) {
        expect_step_in_one("cuda", fused[which].precision, shape, PS_LEVEL_LAYER, spoilt);
    }
}
END_TEST

/* A head of just as many elements as are updated beside the encoder's backward; layers of just as many, with the head's, as are
 * beside the embedding's; both; and layers whose heads lie in more columns than they have in 16 bits. */
static const struct early {
    int64_t channels, seq_len, pred_len, d_model, n_heads, d_ff;
    double dropout;
} early[] = {{1, 1024, 512, 32, 2, 40, 0.2},
             {2, 32, 16, 128, 8, 1264, 0.2},
             {1, 256, 512, 128, 8, 1280, 0},
             {2, 32, 16, 120, 12, 1400, 0.2}};
enum { EARLY = sizeof early / sizeof *early };

static void expect_updated_beside(const char *backend, enum ps_precision precision, const struct early *e)
{
    const struct ps_model_shape shape = {.channels = e->channels,
                                         .seq_len = e->seq_len,
                                         .pred_len = e->pred_len,
                                         .patch_len = 8,
                                         .stride = 8,
                                         .d_model = e->d_model,
                                         .n_heads = e->n_heads,
                                         .d_ff = e->d_ff,
                                         .n_layers = 2,
                                         .dropout = e->dropout,
                                         .revin = 1};
    expect_step_in_one(backend, precision, &shape, PS_LEVEL_GEMM, 1);
}

START_TEST(updated_beside)
{
    expect_updated_beside("cpu", PS_FP32, &early[_i]);
}
END_TEST

START_TEST(updated_beside_cuda)
{
    static const enum ps_precision precisions[] = {PS_TF32, PS_PRECISION_BF16, PS_FP16};
    expect_updated_beside("cuda", precisions[_i / EARLY], &early[_i % EARLY]);
}
END_TEST

/* A whole step at every size that kernels are compiled for: d_model, heads' widths, padded ones too, tiles of a sequence, with and
 * without dropout, patches and horizons of every kind; against level gemm in fp32. 0: no more; negative: left out with
 * PS_TEST_SMALL. */
static int instance_shape(int index, struct ps_model_shape *shape)
{
    static const struct {
        int d_model, head, d_ff; /* the last three: of kernels for these sizes alone, with dropout and without */
    } widths[] = {{16, 4, 48},   {16, 16, 128}, {32, 8, 96},    {32, 16, 64},  {64, 8, 192},  {64, 4, 64},    {64, 16, 192},
                  {64, 32, 256}, {96, 8, 200},  {96, 16, 96},   {96, 32, 136}, {128, 8, 256}, {128, 16, 128}, {128, 32, 384},
                  {48, 6, 96},   {80, 20, 64},  {112, 28, 136}, {64, 8, 256},  {16, 4, 128},  {64, 16, 128},  {64, 16, 256}};
    static const struct {
        int seq_len, patch_len, stride; /* 5, 23, 42 and 60 patches */
    } windows[] = {{24, 8, 4}, {205, 25, 8}, {336, 16, 8}, {60, 1, 1}};
    static const int horizons[] = {2, 40, 24, 96, 200};
    enum { WIDTHS = sizeof widths / sizeof *widths, WINDOWS = sizeof windows / sizeof *windows };
    const int drop = index % 2, width = index / 2 % WIDTHS, window = index / 2 / WIDTHS, small = asked("PS_TEST_SMALL");
    if (window == WINDOWS) {
        return 0;
    }
    *shape = (struct ps_model_shape){.channels = small ? 1 + index % 3 : 5 + index % 7,
                                     .seq_len = windows[window].seq_len,
                                     .pred_len = horizons[index % 5],
                                     .patch_len = windows[window].patch_len,
                                     .stride = windows[window].stride,
                                     .pad_end = window == 2,
                                     .d_model = widths[width].d_model,
                                     .n_heads = widths[width].d_model / widths[width].head,
                                     .d_ff = widths[width].d_ff,
                                     .n_layers = 1 + index % 3 / 2,
                                     .dropout = drop ? 0.2 : 0,
                                     .revin = index % 7 > 0};
    return !small || width >= WIDTHS - 3 || drop == (width + window) % 2 ? 1 : -1;
}

START_TEST(every_instance)
{
    const double bound = fused[_i].bound;
    /* Small: one window, and against the CPU, so that little else runs on the GPU. */
    const char *where = asked("PS_TEST_SMALL") ? "cpu" : "cuda";
    const int64_t batch = asked("PS_TEST_SMALL") ? 1 : 3;
    int served = 0, failed = 0;
    double worst = 0;
    struct ps_model_shape shape;
    for (int index = 0, taken; (taken = instance_shape(index, &shape)) != 0; index++) {
        if (taken < 0) {
            continue;
        }
        struct fixture other = fixture_open(where, where, PS_FP32, &shape, batch, PS_LEVEL_GEMM, 0);
        struct fixture f = fixture_open("cuda", "cuda", fused[_i].precision, &shape, batch, PS_LEVEL_LAYER, 0);
        fixture_parameters(&other, 0.02);
        fixture_parameters(&f, 0.02);
        double expected_loss = fixture_loss(&other), loss = fixture_loss(&f);
        double *expected = fixture_gradients(&other), *gradients = fixture_gradients(&f);
        int tensor = 0;
        double error = gradient_error(f.model->layout, gradients, expected, &tensor);
        if (!(fabs(loss / expected_loss - 1) <= bound && error <= 5 * bound)) {
            printf("%s, case %d: d %d, %d heads, d_ff %d, N %d, P %d, H %d: loss %.9g for %.9g, gradient of %s off by %.3g\n",
                   ps_precision_name(fused[_i].precision), index, (int)shape.d_model, (int)shape.n_heads, (int)shape.d_ff,
                   (int)ps_patches(&shape), (int)shape.patch_len, (int)shape.pred_len, loss, expected_loss,
                   f.model->layout->table[tensor].name, error);
            failed++;
        }
        worst = error > worst ? error : worst;
        served++;
        free(expected);
        free(gradients);
        fixture_close(&f);
        fixture_close(&other);
    }
    printf("%s, level layer, %d sizes: gradients %.2g\n", ps_precision_name(fused[_i].precision), served, worst);
    ck_assert_int_gt(served, 20);
    ck_assert_msg(failed == 0, "%d of %d sizes are off, as printed above", failed, served);
}
END_TEST

/* A batch shorter than the model was opened for is shared out among blocks otherwise, within the same memory: every length, against
 * level gemm in fp32. At 980 sequences, 20 a window, a block has 8 of them, at 660 five. */
START_TEST(shorter_batches)
{
    static const struct ps_model_shape shape = {.channels = 20,
                                                .seq_len = 173,
                                                .pred_len = 4,
                                                .patch_len = 12,
                                                .stride = 10,
                                                .d_model = 16,
                                                .n_heads = 1,
                                                .d_ff = 16,
                                                .n_layers = 3,
                                                .revin = 1};
    const int wide = _i % 2, which = _i / 2;
    struct ps_model_shape s = shape;
    if (wide) { /* several sequences a tile */
        s.seq_len = 60;
        s.d_model = 64;
        s.n_heads = 4;
        s.d_ff = 128;
        s.n_layers = 2;
    }
    struct fixture gemm = fixture_open("cuda", "cuda", PS_FP32, &s, 49, PS_LEVEL_GEMM, 0);
    struct fixture f = fixture_open("cuda", "cuda", fused[which].precision, &s, 49, PS_LEVEL_LAYER, 0);
    fixture_parameters(&gemm, 0.02);
    fixture_parameters(&f, 0.02);
    for (int64_t batch = 49; batch > 0; batch -= asked("PS_TEST_SMALL") ? 16 : 1) { /* 33 windows are 660 sequences */
        gemm.batch = f.batch = batch;
        double expected_loss = fixture_loss(&gemm), loss = fixture_loss(&f);
        double *expected = fixture_gradients(&gemm), *gradients = fixture_gradients(&f);
        int worst = 0;
        double error = gradient_error(f.model->layout, gradients, expected, &worst);
        ck_assert_msg(fabs(loss / expected_loss - 1) <= fused[which].bound && error <= 5 * fused[which].bound,
                      "%s, %d windows: loss %.9g, not %.9g, gradient of %s off by %.3g", ps_precision_name(fused[which].precision),
                      (int)batch, loss, expected_loss, f.model->layout->table[worst].name, error);
        free(expected);
        free(gradients);
    }
    gemm.batch = f.batch = 49;
    fixture_close(&gemm);
    fixture_close(&f);
}
END_TEST

/* Different operations of kind SUB called, head_split and head_merge counting as one when both were. */
static int sub_kernels(const struct ps_counts *counts, int backward)
{
    int kinds = ps_counts_kinds(counts, PS_KIND_SUB);
    return backward && counts->calls[PS_OP_head_split] && counts->calls[PS_OP_head_merge] ? kinds - 1 : kinds;
}

static int strides(const struct fixture *f)
{
    const struct ps_model_shape *shape = &f->model->shape;
    return f->k->strided_heads_faster && f->k->strided_heads_faster(f->k, ps_patches(shape), shape->d_model / shape->n_heads);
}

/* Both ways of all layers, counted. */
static void count_layers(struct fixture *f, struct ps_counts *forward, struct ps_counts *backward)
{
    struct ps_kernels *counting[2];
    OK(ps_kernels_hooked(f->k, ps_count_hook, forward, &counting[0]));
    OK(ps_kernels_hooked(f->k, ps_count_hook, backward, &counting[1]));
    f->model->k = counting[0];
    OK(ps_model_encode(f->model, f->state, f->batch, 1));
    f->model->k = counting[1];
    OK(ps_model_encode_backward(f->model, f->state, f->batch, 1));
    OK(f->device->synchronize(f->device));
    f->model->k = f->k;
    counting[0]->close(counting[0]);
    counting[1]->close(counting[1]);
}

/* 8 products and 7 kinds of sub-kernel forward, 14 and 6 backward; merge_qkv takes 2 products off each way, epilogues one kind of
 * sub-kernel each way, bias_add and add, and without dropout bias_residual_add, and with merge_qkv bias_grad too; gemm_finish the
 * activation each way, and bias_residual_add with dropout, and layernorm_backward. */
static void count_layer(const char *backend, const char *device, int merge_qkv, int epilogue, double dropout)
{
    struct ps_model_shape shape = layer_shapes[0];
    shape.dropout = dropout;
    const struct ps_model_options options = {.level = PS_LEVEL_GEMM, .merge_qkv = merge_qkv, .epilogue = epilogue, .seed = 5};
    struct fixture f = fixture_open_with(backend, device, PS_FP32, &shape, 2, &options);
    epilogue = epilogue && f.k->gemm_bias;
    struct ps_counts forward = {0}, backward = {0};
    count_layers(&f, &forward, &backward);
    ck_assert_int_eq(ps_counts_calls(&forward, PS_KIND_GEMM), merge_qkv ? 6 : 8);
    const int finish = epilogue && f.k->gemm_finish && strcmp(backend, "cuda") != 0; /* there of larger weights */
    const int by_row = strides(&f); /* heads are multiplied in their rows: neither split nor merged */
    ck_assert_int_eq(sub_kernels(&forward, 0), (finish ? 4 : !epilogue ? 7 : dropout > 0 ? 6 : 5) - 2 * by_row);
    ck_assert_int_eq(ps_counts_calls(&backward, PS_KIND_GEMM), merge_qkv ? 12 : 14);
    ck_assert_int_eq(sub_kernels(&backward, 1), (!epilogue                                          ? 6
                                                 : dropout > 0 || !merge_qkv || !f.k->gemm_gradient ? 5
                                                                                                    : 4) -
                                                    2 * finish - by_row);
    for (int op = 0; op < PS_OP_COUNT; op++) {
        enum ps_kind kind = ps_op_kind(op);
        if (kind != PS_KIND_GEMM && kind != PS_KIND_SUB) {
            ck_assert_msg(forward.calls[op] + backward.calls[op] == 0, "a layer called %s", ps_op_name(op));
        }
    }
    fixture_close(&f);
}

/* What the variants make of it, of 2 layers at level gemm without epilogues: the same products; kinds of sub-kernel forward and
 * backward; drops of softmax's weights. Of BatchNorm a branch's end sums the statistics in one operation where the table has it. */
static const struct layer_row {
    struct ps_model_shape variant;
    int forward, backward, drops, statistics; /* statistics: operations forward that read a whole batch for them */
} layer_rows[] = {
    {{.norm = PS_NORM_RMS}, 7, 6, 0, 0},
    {{.norm_place = PS_NORM_POST}, 7, 6, 0, 0},
    {{.norm = PS_NORM_RMS, .norm_place = PS_NORM_POST}, 7, 6, 0, 0},
    /* batchnorm_statistics of the stream, batchnorm, bias_residual_statistics and bias_residual_add of the branches' ends */
    {{.norm = PS_NORM_BATCH}, 9, 6, 0, 4},
    /* batchnorm and bias_residual_statistics in the place of layernorm and bias_residual_add */
    {{.norm = PS_NORM_BATCH, .norm_place = PS_NORM_POST}, 7, 6, 0, 4},
    {{.residual_attention = 1}, 7, 6, 0, 0},
    {{.activation = PS_GELU}, 7, 6, 0, 0},
    {{.activation = PS_RELU}, 7, 6, 0, 0},
    {{.activation = PS_SWIGLU}, 7, 6, 0, 0},
    {{.positions = PS_POSITIONS_ROPE}, 8, 7, 0, 0},
    {{.positions = PS_POSITIONS_SINCOS, .individual_head = 1, .revin_affine = 1, .patches_from_end = 1}, 7, 6, 0, 0},
    {{.dropout_at = {[PS_DROP_ATTENTION_WEIGHTS] = {1, 0.2}, [PS_DROP_HEAD] = {1, 0.1}}}, 7, 6, 6, 0},
    /* the paper's */
    {{.norm = PS_NORM_BATCH, .norm_place = PS_NORM_POST, .residual_attention = 1, .activation = PS_GELU}, 7, 6, 0, 4}};
enum { LAYER_ROWS = sizeof layer_rows / sizeof *layer_rows };

/* A variant of the sizes that layers are counted at. */
static struct ps_model_shape variant_sized(const struct ps_model_shape *variant, int64_t layers, double dropout)
{
    const struct ps_model_shape *sizes = &layer_shapes[0];
    struct ps_model_shape shape = *variant;
    shape.channels = sizes->channels, shape.seq_len = sizes->seq_len, shape.pred_len = sizes->pred_len;
    shape.patch_len = sizes->patch_len, shape.stride = sizes->stride, shape.pad_end = sizes->pad_end;
    shape.d_model = sizes->d_model, shape.n_heads = sizes->n_heads, shape.d_ff = sizes->d_ff;
    shape.revin = 1, shape.n_layers = layers, shape.dropout = dropout;
    return shape;
}

/* merge_qkv and epilogues take off what they take off the plain layer: of BatchNorm, bias_add, and bias_grad without dropout; not
 * add, since post-norm's last meeting has no norm behind it; gemm_finish does, and the branches' ends and activations, but swiglu,
 * and norms of rows behind a branch, and pre-norm's backward. Where a norm's backward masks the gradient, post-norm's before every
 * branch, bias_grad goes with dropout too. */
static void count_variant(const char *backend, const char *device, const struct layer_row *row, int together, double dropout)
{
    const struct ps_model_shape shape = variant_sized(&row->variant, 2, dropout);
    const struct ps_model_options options = {.level = PS_LEVEL_GEMM, .merge_qkv = together, .epilogue = together, .seed = 5};
    struct fixture f = fixture_open_with(backend, device, PS_FP32, &shape, 2, &options);
    struct ps_counts forward = {0}, backward = {0};
    count_layers(&f, &forward, &backward);
    const int epilogue = together && f.k->gemm_bias, batch = shape.norm == PS_NORM_BATCH, post = shape.norm_place == PS_NORM_POST;
    /* Ends without dropout are epilogues but where statistics follow: of BatchNorm's pre-norm, the second alone. */
    int kinds = row->forward - epilogue - (epilogue && dropout <= 0 && !(batch && post));
    if (batch && !f.k->bias_residual_statistics) { /* then batchnorm_statistics, and bias_residual_add */
        kinds += post ? 1 : epilogue && dropout <= 0 ? 0 : -1;
    }
    const int finish = epilogue && f.k->gemm_finish && strcmp(backend, "cuda") != 0; /* there of larger weights */
    const int activated = finish && shape.activation != PS_SWIGLU;
    const int folded = activated && batch && post; /* the norms, but the last, into the weights behind them */
    const int normed = finish && !batch, joined = normed && !post;
    if (finish) {
        kinds = row->forward - 1 - activated - (batch && !post ? 2 : 1) + folded - (normed && post);
    }
    ck_assert_int_eq(f.model->folded, folded);
    const int by_row = strides(&f);
    ck_assert_int_eq(sub_kernels(&forward, 0), kinds - 2 * by_row);
    const int added = !epilogue || (post && !finish);
    const int masks = post && (batch || !f.model->options.feed_forward); /* the norm before a branch */
    const int summed = !epilogue || !f.k->gemm_gradient || (dropout > 0 && !masks);
    ck_assert_int_eq(sub_kernels(&backward, 1), row->backward - !added - !summed - activated - by_row + folded - joined);
    ck_assert_int_eq(ps_counts_calls(&forward, PS_KIND_GEMM), 2 * (together ? 6 : 8));
    ck_assert_int_eq(ps_counts_calls(&backward, PS_KIND_GEMM), 2 * (together ? 12 : 14));
    ck_assert_int_eq(forward.calls[PS_OP_batchnorm_statistics] + forward.calls[PS_OP_bias_residual_statistics],
                     !finish ? row->statistics
                     : post  ? 0
                             : row->statistics / 2);
    ck_assert_int_eq(forward.calls[PS_OP_batchnorm] + forward.calls[PS_OP_layernorm], normed ? !post : folded ? 1 : 4);
    ck_assert_int_eq(forward.calls[PS_OP_batchnorm_fold], folded ? 3 : 0);
    ck_assert_int_eq(backward.calls[PS_OP_batchnorm_unfold], folded ? 2 : 0); /* W_1 and W_qkv, of all layers */
    ck_assert_int_eq(backward.calls[PS_OP_batchnorm_backward] + backward.calls[PS_OP_layernorm_backward], joined ? 0 : 4);
    ck_assert_int_eq(forward.calls[PS_OP_drop] + backward.calls[PS_OP_drop], row->drops);
    for (int op = 0; op < PS_OP_COUNT; op++) {
        enum ps_kind kind = ps_op_kind(op);
        if (kind != PS_KIND_GEMM && kind != PS_KIND_SUB && op != PS_OP_drop) {
            ck_assert_msg(forward.calls[op] + backward.calls[op] == 0, "a layer called %s", ps_op_name(op));
        }
    }
    fixture_close(&f);
}

START_TEST(variant_is_made_of)
{
    count_variant("reference", "cpu", &layer_rows[_i % LAYER_ROWS], _i / LAYER_ROWS & 1, _i / LAYER_ROWS & 2 ? 0 : 0.3);
    count_variant("cpu", "cpu", &layer_rows[_i % LAYER_ROWS], _i / LAYER_ROWS & 1, _i / LAYER_ROWS & 2 ? 0 : 0.3);
}
END_TEST

START_TEST(variant_is_made_of_cuda)
{
    count_variant("cuda", "cuda", &layer_rows[_i % LAYER_ROWS], _i / LAYER_ROWS & 1, _i / LAYER_ROWS & 2 ? 0 : 0.3);
}
END_TEST

static int asked_together, gradients_asked;

static enum ps_status one_by_one(const struct ps_kernels *k, const struct ps_gemm_gradient *each, int count)
{
    asked_together++;
    gradients_asked += count;
    for (int i = 0; i < count; i++) {
        PS_TRY(k->gemm_gradient(k, &each[i]));
    }
    return PS_OK;
}

/* Weights' gradients asked for together are to the last bit those asked for one by one: what they are products of is still there. A
 * layer asks twice where W_2's reads the stream's gradient and only W_o's is masked, else once. */
START_TEST(gradients_together)
{
    static const double dropouts[4][2] = {{0, 0}, {0.3, 0.2}, {0, 0.2}, {0.3, 0}}; /* after W_o, after W_2 */
    const int merge_qkv = _i & 1;
    const double *dropout = dropouts[_i / 2 % 4];
    struct ps_model_shape shape = variant_sized(&layer_rows[_i / 8].variant, 2, dropout[1]);
    shape.dropout_at[PS_DROP_ATTENTION].set = shape.dropout_at[PS_DROP_OUTPUT].set = 1;
    shape.dropout_at[PS_DROP_ATTENTION].rate = dropout[0], shape.dropout_at[PS_DROP_OUTPUT].rate = dropout[1];
    const struct ps_model_options options = {.level = PS_LEVEL_GEMM,
                                             .merge_qkv = merge_qkv,
                                             .epilogue = 1,
                                             .tiled_attention = ps_dropout_rate(&shape, PS_DROP_ATTENTION_WEIGHTS) <= 0,
                                             .seed = 5};
    double *gradients[2], loss[2];
    int64_t count = 0;
    for (int together = 0; together < 2; together++) {
        struct fixture f = fixture_open_with("reference", "cpu", PS_FP32, &shape, 2, &options);
        if (together) {
            ps_model_close(f.model);
            f.k->gemm_gradients = one_by_one;
            OK(ps_model_open(f.k, &shape, 2, &options, &f.model));
            fixture_parameters(&f, 0.1);
        }
        asked_together = gradients_asked = 0;
        loss[together] = fixture_loss(&f);
        gradients[together] = fixture_gradients(&f);
        count = f.count;
        ck_assert_int_eq(asked_together, !together ? 0 : shape.n_layers * (dropout[1] > 0 || dropout[0] <= 0 ? 1 : 2));
        ck_assert_int_eq(gradients_asked, !together ? 0 : shape.n_layers * (merge_qkv ? 4 : 3));
        fixture_close(&f);
    }
    ck_assert(loss[0] == loss[1]);
    for (int64_t i = 0; i < count; i++) {
        ck_assert_msg(gradients[0][i] == gradients[1][i], "variant %d, dropout %g and %g: element %lld is %.9g, not %.9g", _i / 8,
                      dropout[0], dropout[1], (long long)i, gradients[1][i], gradients[0][i]);
    }
    free(gradients[0]);
    free(gradients[1]);
}
END_TEST

static enum ps_status (*own_later_sums)(const struct ps_kernels *k, void *memory, size_t bytes);
static size_t later_room;
static int later_begun, later_ended;

static enum ps_status later_sums_in_less(const struct ps_kernels *k, void *memory, size_t bytes)
{
    memory ? later_begun++ : later_ended++;
    return own_later_sums(k, memory, bytes < later_room ? bytes : later_room);
}

/* Sums over rows that wait are to the last bit those added one by one, however many of them there is room for. */
START_TEST(sums_wait)
{
    static const size_t rooms[] = {0, 3000, 20000, 1 << 30};
    enum { ROOMS = sizeof rooms / sizeof *rooms };
    struct ps_model_shape shape = variant_sized(&layer_rows[_i / 3].variant, 3, _i % 3 ? 0.2 : 0);
    shape.d_model = 48, shape.n_heads = 4, shape.d_ff = 80; /* what norms inside products take */
    const struct ps_model_options options = {.level = PS_LEVEL_GEMM,
                                             .merge_qkv = 1,
                                             .epilogue = 1,
                                             .tiled_attention = ps_dropout_rate(&shape, PS_DROP_ATTENTION_WEIGHTS) <= 0,
                                             .seed = 5};
    double *gradients[ROOMS];
    int64_t count = 0;
    for (int room = 0; room < ROOMS; room++) {
        struct fixture f = fixture_open_with("cuda", "cuda", _i % 3 == 2 ? PS_TF32 : PS_PRECISION_BF16, &shape, 64, &options);
        own_later_sums = f.k->later_sums;
        f.k->later_sums = later_sums_in_less;
        later_room = rooms[room];
        later_begun = later_ended = 0;
        (void)fixture_loss(&f);
        gradients[room] = fixture_gradients(&f);
        ck_assert_int_eq(later_begun, 1);
        ck_assert_int_eq(later_ended, 1);
        count = f.count;
        fixture_close(&f);
    }
    for (int room = 1; room < ROOMS; room++) {
        for (int64_t i = 0; i < count; i++) {
            ck_assert_msg(gradients[room][i] == gradients[0][i], "%zu bytes: element %lld is %.9g, not %.9g", rooms[room],
                          (long long)i, gradients[room][i], gradients[0][i]);
        }
        free(gradients[room]);
    }
    free(gradients[0]);
}
END_TEST

static const struct ps_kernels *asked_table;
static int64_t asked_patches, asked_head;

/* A table around another is none that may be asked. */
static int always(const struct ps_kernels *k, int64_t patches, int64_t head)
{
    asked_patches = patches;
    asked_head = head;
    return k == asked_table;
}

/* Heads multiplied where they lie in their rows: to the last bit what comes of splitting and merging them. */
START_TEST(strided_heads)
{
    const struct ps_model_shape shape = variant_sized(&layer_rows[_i / 2].variant, 2, 0.2);
    const struct ps_model_options options = {.level = PS_LEVEL_GEMM, .merge_qkv = _i & 1, .epilogue = _i & 1, .seed = 5};
    double *gradients[2], loss[2];
    for (int strided = 0; strided < 2; strided++) {
        struct fixture f = fixture_open_with("reference", "cpu", PS_FP32, &shape, 2, &options);
        ps_model_close(f.model);
        asked_table = f.k;
        f.k->strided_heads_faster = strided ? always : NULL;
        OK(ps_model_open(f.k, &shape, 2, &options, &f.model));
        fixture_parameters(&f, 0.1);
        loss[strided] = fixture_loss(&f);
        gradients[strided] = fixture_gradients(&f);
        struct ps_counts forward = {0}, backward = {0};
        count_layers(&f, &forward, &backward);
        ck_assert_int_eq(forward.calls[PS_OP_head_split] + backward.calls[PS_OP_head_merge], strided ? 0 : 2 * shape.n_layers);
        ck_assert(loss[strided] == loss[0]);
        ck_assert_mem_eq(gradients[strided], gradients[0], (size_t)f.count * sizeof *gradients[0]);
        fixture_close(&f);
    }
    ck_assert_int_eq(asked_patches, ps_patches(&shape));
    ck_assert_int_eq(asked_head, shape.d_model / shape.n_heads);
    free(gradients[0]);
    free(gradients[1]);
}
END_TEST

/* Of heads of 4, 5, 6, 9, 12 and 20 columns, with rope, residual attention, norms, places and dropout of each kind. */
#define PADDED .channels = 2, .seq_len = 33, .pred_len = 4, .patch_len = 8, .stride = 5, .d_ff = 40, .revin = 1, .dropout = 0.2
static const struct ps_model_shape padded_shapes[] = {
    {PADDED, .n_layers = 2, .d_model = 24, .n_heads = 6},
    {PADDED, .n_layers = 3, .d_model = 15, .n_heads = 3, .norm = PS_NORM_BATCH, .residual_attention = 1},
    {PADDED, .n_layers = 3, .d_model = 24, .n_heads = 4, .positions = PS_POSITIONS_ROPE, .residual_attention = 1,
     .norm_place = PS_NORM_POST},
    {PADDED, .n_layers = 2, .d_model = 72, .n_heads = 8, .norm = PS_NORM_RMS, .activation = PS_SWIGLU},
    {PADDED, .n_layers = 3, .d_model = 48, .n_heads = 4, .norm = PS_NORM_BATCH, .norm_place = PS_NORM_POST, .residual_attention = 1,
     .activation = PS_GELU, .pad_end = 1}, /* the paper's */
    {PADDED, .n_layers = 2, .d_model = 40, .n_heads = 2, .norm = PS_NORM_BATCH, .positions = PS_POSITIONS_ROPE}};
enum { PADDED_SHAPES = sizeof padded_shapes / sizeof *padded_shapes };
#define TILED .level = PS_LEVEL_GEMM, .tiled_attention = 1
static const struct step_case padded_cases[] = {
    {"reference", "cpu", PS_FP64, {TILED}, 0, 0, 0},
    {"reference", "cpu", PS_FP32, {TILED, .merge_qkv = 1, .epilogue = 1}, 0, 0, 0},
    {"cpu", "cpu", PS_FP32, {TILED}, 1e-6, 5e-6, 5e-5},
    {"cpu", "cpu", PS_FP32, {TILED, .merge_qkv = 1, .epilogue = 1}, 1e-6, 5e-6, 5e-5},
    {"cuda", "cuda", PS_FP16, {TILED, .merge_qkv = 1, .epilogue = 1}, 2e-3, 1.5e-2, 7e-2},
    {"cuda", "cuda", PS_PRECISION_BF16, {TILED}, 1e-2, 1e-1, 5e-1},
    {"cuda", "cuda", PS_PRECISION_BF16, {TILED, .merge_qkv = 1, .epilogue = 1}, 1e-2, 1e-1, 5e-1}};
enum { PADDED_CPU = 4, PADDED_CASES = sizeof padded_cases / sizeof *padded_cases };

static int64_t padded_pieces;

static int64_t in_eights(const struct ps_kernels *k, int64_t patches, int64_t head, int64_t pieces)
{
    asked_patches = patches;
    padded_pieces = pieces;
    return k == asked_table ? (head + 7) / 8 * 8 : head;
}

/* What a model of padded heads or others makes: the gradients of a pass, of parts of the batch added up, and of a pass whose
 * layers' are summed beside; the parameters and the forecasts behind two steps. */
enum { PADDED_RESULTS = 5 };
struct padded_results {
    double loss, *each[PADDED_RESULTS];
    int64_t count, forecasts;
};

static struct padded_results padded_run(const struct step_case *c, const struct ps_model_shape *shape, int padded)
{
    enum { BATCH = 4, STEPS = 2 };
    struct ps_model_options options = c->options;
    options.seed = 5;
    struct fixture f = fixture_open_with(c->backend, c->device, c->precision, shape, BATCH, &options);
    const int cuda = strcmp(c->device, "cuda") == 0;
    ps_model_close(f.model);
    asked_table = f.k;
    f.k->attention_columns = !padded ? NULL : cuda ? f.k->attention_columns : in_eights;
    OK(ps_model_open(f.k, shape, BATCH, &options, &f.model));
    struct ps_model *const m = f.model;
    const int64_t head = shape->d_model / shape->n_heads;
    ck_assert_int_eq(m->head, padded && (!cuda || f.device->compute_capability >= 90) ? (head + 7) / 8 * 8 : head);
    fixture_parameters(&f, 0.1);
    struct padded_results r = {.count = f.count, .forecasts = BATCH * shape->channels * shape->pred_len};
    r.loss = fixture_loss(&f);
    r.each[0] = fixture_gradients(&f);
    r.each[1] = gradients_in_parts(&f, 3, 0);
    struct recorder sums = recorder_of(2, 1);
    ps_model_place(m, &(struct ps_batch_place){.sum = cuda ? NULL : &sums.table});
    fixture_loss(&f);
    OK(ps_model_sum_gradients(m));
    ck_assert(cuda || recorder_sums(&sums, m->gradients, (size_t)f.count * ps_type_bytes(f.k->parameter)) == shape->n_layers);
    r.each[2] = fixture_gradients(&f);
    ps_model_place(m, &(struct ps_batch_place){.first = 0});
    const struct ps_optimizer_options how = {
        .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-3, .clip_norm = 0.5, .gradient_scale = m->gradient_scale};
    const double rates[STEPS] = {1e-2, 2e-2};
    const struct ps_step_state state = {0};
    struct ps_optimizer optimizer;
    OK(ps_optimizer_open(f.k, f.count, m->layout->decayed, &how, rates, STEPS, &optimizer));
    OK(f.device->fill_zero(f.device, PS_COMPUTE, m->gradients, (size_t)f.count * ps_type_bytes(f.k->parameter)));
    OK(f.device->upload(f.device, PS_COMPUTE, f.state, &state, sizeof state));
    for (int i = 0; i < STEPS; i++) {
        OK(ps_model_gradients(m, &f.windows, f.state, BATCH));
        OK(ps_optimizer_step(&optimizer, m->parameters, m->weights, m->gradients, f.state, 0));
    }
    r.each[3] = forecasts_of(&f);
    r.each[4] = from_device(f.device, f.k->parameter, m->parameters, f.count);
    ps_optimizer_close(&optimizer);
    fixture_close(&f);
    return r;
}

/* Heads in more columns than they have, the rest zeros, change nothing but roundings; in the reference not a bit, but where sums of
 * several passes are added. On CUDA passes are compared with the double reference's too. */
START_TEST(padded_heads)
{
    const struct step_case *c = &padded_cases[_i / PADDED_SHAPES];
    const struct ps_model_shape *shape = &padded_shapes[_i % PADDED_SHAPES];
    const int exact = c->loss <= 0;
    const struct padded_results narrow = padded_run(c, shape, 0), wide = padded_run(c, shape, 1);
    const double added = c->precision == PS_FP64 ? 1e-13 : 1e-5;
    if (strcmp(c->device, "cpu") == 0) {
        ck_assert_int_eq(asked_patches, ps_patches(shape));
        ck_assert_int_eq(padded_pieces, shape->residual_attention ? shape->n_layers : 1);
    }
    ck_assert_double_le(fabs(wide.loss / narrow.loss - 1), c->loss);
    for (int i = 0; i < PADDED_RESULTS; i++) {
        const int64_t n = i == 3 ? narrow.forecasts : narrow.count;
        const double off = relative_error(wide.each[i], narrow.each[i], n), most = exact && i != 1 ? 0
                                                                                   : exact         ? added
                                                                                                   : c->gradients;
        ck_assert_msg(off <= most, "%s %s, shape %d, result %d: off by %.3g", c->backend, ps_precision_name(c->precision),
                      _i % PADDED_SHAPES, i, off);
        free(narrow.each[i]);
        free(wide.each[i]);
    }
    if (strcmp(c->device, "cuda") == 0) {
        compare_pass(c, shape, &(struct ps_loss){0}, "heads padded", _i % PADDED_SHAPES);
    }
}
END_TEST

START_TEST(layer_is_made_of)
{
    count_layer("reference", "cpu", _i & 1, _i & 2, _i & 4 ? 0 : 0.3);
    count_layer("cpu", "cpu", _i & 1, _i & 2, _i & 4 ? 0 : 0.3);
}
END_TEST

START_TEST(layer_is_made_of_cuda)
{
    count_layer("cuda", "cuda", _i & 1, _i & 2, _i & 4 ? 0 : 0.3);
}
END_TEST

/* What a layer adds to a training pass at level none: 55 operations forward, 69 back.
 *
 *   forward    LN1, LN2          20: 8 binary, 4 unary, 4 affine, 4 reduce
 *              q, k, v            9: 3 gemm, 3 binary (biases), 3 strided_copy (heads)
 *              attention          9: 2 gemm, 2 binary, 1 unary, 1 affine, 2 reduce, 1 strided_copy
 *              W_o, to r          4: 1 gemm, 2 binary, 1 drop
 *              W_1, gelu          9: 1 gemm, 3 binary, 2 unary, 2 affine, 1 drop
 *              W_2, to y          4: 1 gemm, 2 binary, 1 drop
 *   backward   W_2                4: 2 gemm, 1 reduce, 1 drop
 *              gelu, W_1         13: 2 gemm, 4 binary, 2 unary, 3 affine, 1 reduce, 1 drop
 *              W_o                5: 2 gemm, 1 reduce, 1 drop, 1 strided_copy
 *              attention          9: 4 gemm, 3 binary, 1 affine, 1 reduce
 *              q, k, v           10: 4 gemm, 3 reduce, 3 strided_copy
 *              LN1, LN2          26: 14 binary, 4 affine, 8 reduce
 *              residuals          2: 2 binary */
static void count_level_none(const char *backend, const char *device, enum ps_precision precision, double dropout)
{
    static const int64_t a_layer[PS_OP_COUNT] = {
        [PS_OP_gemm] = 22, [PS_OP_binary] = 43,      [PS_OP_reduce] = 21, [PS_OP_affine] = 15,
        [PS_OP_unary] = 9, [PS_OP_strided_copy] = 8, [PS_OP_drop] = 6};
    struct ps_counts counts[3] = {0};
    for (int layers = 1; layers <= 3; layers++) {
        struct ps_model_shape shape = layer_shapes[0];
        shape.n_layers = layers;
        shape.dropout = dropout;
        struct fixture f = fixture_open(backend, device, precision, &shape, 2, PS_LEVEL_NONE, 0);
        struct ps_kernels *counting;
        OK(ps_kernels_hooked(f.k, ps_count_hook, &counts[layers - 1], &counting));
        f.model->k = counting;
        OK(ps_model_gradients(f.model, &f.windows, f.state, f.batch));
        OK(f.device->synchronize(f.device));
        f.model->k = f.k;
        counting->close(counting);
        fixture_close(&f);
    }
    for (int layers = 2; layers <= 3; layers++) {
        int64_t more = 0;
        for (int op = 0; op < PS_OP_COUNT; op++) {
            int64_t calls = counts[layers - 1].calls[op] - counts[layers - 2].calls[op];
            ck_assert_msg(calls == a_layer[op], "layer %d calls %s %lld times, not %lld", layers, ps_op_name(op), (long long)calls,
                          (long long)a_layer[op]);
            more += calls;
        }
        ck_assert_int_eq(more, 124);
    }
}

START_TEST(level_none_is_made_of)
{
    count_level_none("reference", "cpu", PS_FP64, _i ? 0.3 : 0);
    count_level_none("reference", "cpu", PS_FP32, _i ? 0.3 : 0);
    count_level_none("cpu", "cpu", PS_FP32, _i ? 0.3 : 0);
}
END_TEST

START_TEST(level_none_is_made_of_cuda)
{
    count_level_none("cuda", "cuda", PS_FP32, _i ? 0.3 : 0);
}
END_TEST

static struct ps_encoder_needs stub_needs;

static enum ps_status stub_prepare(const struct ps_kernels *k, const struct ps_encoder_sizes *sizes,
                                   const struct ps_encoder_shape *shape, struct ps_encoder_needs *needs)
{
    (void)k, (void)sizes, (void)shape;
    *needs = stub_needs;
    return PS_OK;
}

static enum ps_status stub_forward(const struct ps_kernels *k, const struct ps_encoder_forward *a)
{
    (void)k;
    ck_assert_int_eq(a->embed != NULL, stub_needs.span >= PS_SPAN_EMBEDDING);
    ck_assert_int_eq(a->head != NULL, stub_needs.span >= PS_SPAN_LOSS);
    return PS_OK;
}

static enum ps_status stub_backward(const struct ps_kernels *k, const struct ps_encoder_backward *a)
{
    (void)k;
    ck_assert_int_eq(a->embed != NULL, stub_needs.span >= PS_SPAN_EMBEDDING);
    ck_assert_int_eq(a->head != NULL, stub_needs.span >= PS_SPAN_UPDATE);
    return PS_OK;
}

/* One call each way at level layer, whatever the encoder takes of the ends; all of them: nothing else. Of a table whose encoder
 * computes nothing. */
START_TEST(level_layer_calls)
{
    static const int64_t in_all[] = {14, 8, 2}; /* the embedding has 3 each way, the head 6 */
    struct fixture f = fixture_open("reference", "cpu", PS_FP32, &shapes[0], 4, PS_LEVEL_GEMM, 0);
    struct ps_kernels stub = *f.k, *counting;
    struct ps_counts counts = {0};
    struct ps_model *model;
    stub.encoder_prepare = stub_prepare;
    stub.encoder_forward = stub_forward;
    stub.encoder_backward = stub_backward;
    static const enum ps_encoder_span spans[] = {PS_SPAN_LAYERS, PS_SPAN_EMBEDDING, PS_SPAN_UPDATE};
    stub_needs = (struct ps_encoder_needs){.kept_bytes = 256, .span = spans[_i]};
    OK(ps_kernels_hooked(&stub, ps_count_hook, &counts, &counting));
    OK(ps_model_open(counting, &shapes[0], f.batch, &(struct ps_model_options){.level = PS_LEVEL_LAYER, .seed = 5}, &model));
    OK(ps_model_gradients(model, &f.windows, f.state, f.batch));
    expect_encoder_alone(&counts);
    int64_t calls = 0;
    for (int op = 0; op < PS_OP_COUNT; op++) {
        calls += counts.calls[op];
    }
    ck_assert_int_eq(calls, in_all[_i]);
    ps_model_close(model);
    counting->close(counting);
    fixture_close(&f);
}
END_TEST

/* ps_model_step_flops is what the products of a training pass cost, each as it is called. */
START_TEST(step_flops)
{
    const struct ps_model_shape *shape = shape_or_variant(_i);
    struct fixture f = fixture_open("cpu", "cpu", PS_FP32, shape, 3, PS_LEVEL_GEMM, _i % 2);
    struct ps_counts counts = {0};
    struct ps_kernels *counting;
    OK(ps_kernels_hooked(f.k, ps_count_hook, &counts, &counting));
    f.model->k = counting;
    fixture_loss(&f);
    f.model->k = f.k;
    counting->close(counting);
    double flops = ps_model_step_flops(shape, 3);
    ck_assert_double_eq_tol(counts.flops[PS_OP_gemm], flops, 1e-12 * flops);
    fixture_close(&f);
}
END_TEST

START_TEST(impossible_shapes)
{
    static const struct {
        struct ps_model_shape change;
        const char *says;
    } cases[] = {
        {{.d_model = 10, .n_heads = 4}, "divisible"},
        {{.patch_len = 21}, "longer than the window"},
        {{.dropout = 1}, "[0, 1)"},
        {{.d_ff = -3}, "d_ff"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct ps_model_shape s = shapes[0];
        const struct ps_model_shape *c = &cases[i].change;
        s.d_model = c->d_model ? c->d_model : s.d_model;
        s.n_heads = c->n_heads ? c->n_heads : s.n_heads;
        s.patch_len = c->patch_len ? c->patch_len : s.patch_len;
        s.d_ff = c->d_ff ? c->d_ff : s.d_ff;
        s.dropout = c->dropout > 0 ? c->dropout : s.dropout;
        ck_assert_int_eq(ps_model_shape_check(&s), PS_USAGE);
        ck_assert_msg(strstr(ps_error_message(), cases[i].says) != NULL, "message: %s", ps_error_message());
    }
}
END_TEST

/* Where each tensor's draws begin and end: element i of tensor t is number i of Philox site 0x40000000 + t, times the bound of its
 * kind; gamma is 1 and beta 0. */
START_TEST(initial_values)
{
    static const struct {
        const char *name;
        double bound; /* 0: 1 / sqrt(fan_in), which is... */
        int64_t fan_in;
    } kinds[] = {{"w_p", 0, 6},  {"b_p", 0, 6},  {"w_pos", 0.02, 0}, {"w_qkv", 0, 12}, {"b_qkv", 0, 12},
                 {"w_o", 0, 12}, {"b_o", 0, 12}, {"w_1", 0, 12},     {"b_1", 0, 12},   {"w_2", 0, 20},
                 {"b_2", 0, 20}, {"w_h", 0, 72}, {"b_h", 0, 72}};
    const uint64_t seed = 0xfedcba9876543210;
    struct ps_parameters *layout;
    OK(ps_parameters_layout(&shapes[0], &layout)); /* P 6, d 12, f 20, N 6 */
    double *values = malloc((size_t)layout->stored * sizeof *values);
    ps_parameters_initialise(layout, seed, values);
    int drawn = 0;
    for (int t = 0; t < layout->n; t++) {
        const struct ps_parameter *p = &layout->table[t];
        const char *last = strrchr(p->name, '.') ? strrchr(p->name, '.') + 1 : p->name;
        double bound = 0;
        for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
            if (strcmp(last, kinds[i].name) == 0) {
                bound = kinds[i].bound > 0 ? kinds[i].bound : 1 / sqrt((double)kinds[i].fan_in);
                drawn++;
            }
        }
        for (int64_t i = 0; i < ps_parameter_count(p); i++) {
            double expected = strstr(last, "gamma") ? 1 : 0;
            if (bound > 0) {
                expected = (double)(float)((2 * ps_uniform(seed, (uint64_t)i, 0x40000000 + (uint32_t)t, 0) - 1) * bound);
            }
            ck_assert_msg(values[p->offset + i] == expected, "%s[%lld] starts as %.9g, not %.9g", p->name, (long long)i,
                          values[p->offset + i], expected);
        }
    }
    ck_assert_int_eq(drawn, 5 + 8 * 2);
    free(values);
    ps_parameters_free(layout);
}
END_TEST

/* What ps_model_bytes says is what opening takes from the device. */
static void compare_bytes(const char *backend, const char *kind, enum ps_precision precision,
                          const struct ps_model_options *options)
{
    struct ps_device *device;
    struct ps_kernels *k;
    struct ps_model *model;
    OK(ps_device_open(kind, 2, &device));
    OK(ps_kernels_open(backend, device, precision, NULL, &k));
    const uint64_t before = device->counters.bytes;
    OK(ps_model_open(k, &layer_shapes[1], 3, options, &model));
    ck_assert_uint_eq(device->counters.bytes - before, ps_model_bytes(&layer_shapes[1], 3, options, k));
    ps_model_close(model);
    ck_assert_uint_eq(device->counters.bytes, before);
    k->close(k);
    device->close(device);
}

START_TEST(bytes)
{
    for (int i = 0; i < 3; i++) {
        const struct ps_model_options options = {.level = i == 2 ? PS_LEVEL_NONE : PS_LEVEL_GEMM, .tiled_attention = i == 1};
        compare_bytes("reference", "cpu", PS_FP64, &options);
        compare_bytes("cpu", "cpu", PS_FP32, &options);
        if (i < 2 && ps_cuda_device_count() > 0) {
            compare_bytes("cuda", "cuda", PS_FP16, &options);
            compare_bytes("cuda", "cuda", PS_PRECISION_BF16, &options);
        }
    }
}
END_TEST

/* Weights and biases within +-1/sqrt(fan_in) and of its variance; decayed tensors first; offsets aligned. */
START_TEST(initialisation)
{
    struct ps_parameters *layout;
    OK(ps_parameters_layout(&layer_shapes[1], &layout));
    double *values = malloc((size_t)layout->stored * sizeof *values);
    ps_parameters_initialise(layout, 1, values);
    for (int t = 0; t < layout->n; t++) {
        const struct ps_parameter *p = &layout->table[t];
        ck_assert_int_eq(p->offset % PS_PARAMETER_ALIGN, 0);
        const char *last = strrchr(p->name, '.') ? strrchr(p->name, '.') + 1 : p->name;
        ck_assert_int_eq(p->offset < layout->decayed, last[0] == 'w' && t != layout->w_pos);
    }
    const struct ps_parameter *w = &layout->table[layout->layer[0][PS_W_2]]; /* fan_in d_ff 256: bound 1/16 */
    double squares = 0, largest = 0;
    int64_t n = ps_parameter_count(w);
    for (int64_t i = 0; i < n; i++) {
        double x = values[w->offset + i];
        squares += x * x;
        largest = fabs(x) > largest ? fabs(x) : largest;
    }
    ck_assert_double_le(largest, 0.0625);
    ck_assert_double_ge(largest, 0.062);
    ck_assert_double_eq_tol(squares / (double)n, 0.0625 * 0.0625 / 3, 2e-5);
    ck_assert_double_le(fabs(values[layout->table[layout->layer[0][PS_B_2]].offset]), 0.0625);
    ck_assert_double_eq(values[layout->table[layout->layer[0][PS_NORM1_GAMMA]].offset], 1);
    free(values);
    ps_parameters_free(layout);
}
END_TEST

/* Parameters of fixture_parameters, but the first coordinate of each head is 8 in every query and 64 or -64 (by the head) in every
 * key: softmax takes no notice of that, and its exponentials alone would be infinite or zero. */
static void shifted_parameters(struct fixture *f)
{
    const struct ps_model_shape *s = &f->model->shape;
    const struct ps_parameters *layout = f->model->layout;
    const struct ps_parameter *w = &layout->table[layout->layer[0][PS_W_QKV]], *b = &layout->table[layout->layer[0][PS_B_QKV]];
    double *parameters = random_parameters(layout, 11, 0.02);
    for (int64_t i = 0; i < f->count; i++) {
        parameters[i] = (double)(float)parameters[i];
    }
    int64_t d = s->d_model, e = d / s->n_heads;
    for (int64_t head = 0; head < s->n_heads; head++) {
        for (int64_t part = 0; part < 2; part++) { /* q, k */
            int64_t column = part * d + head * e;
            for (int64_t row = 0; row < d; row++) {
                parameters[w->offset + row * 3 * d + column] = 0;
            }
            parameters[b->offset + column] = part == 0 ? 8 : head % 2 ? 64 : -64;
        }
    }
    set_device(f->device, f->k->parameter, f->model->parameters, parameters, f->count);
    OK(ps_model_refresh_weights(f->model));
    free(parameters);
}

START_TEST(level_layer_shifted)
{
    const struct ps_model_shape *shape = &fused_shapes[_i % FUSED_SHAPES];
    const int which = _i / FUSED_SHAPES;
    struct fixture oracle = fixture_open("reference", "cpu", PS_FP64, shape, 3, PS_LEVEL_GEMM, 0);
    struct fixture f = fixture_open("cuda", "cuda", fused[which].precision, shape, 3, PS_LEVEL_LAYER, 0);
    shifted_parameters(&oracle);
    shifted_parameters(&f);
    struct layer_result expected = run_layer(&oracle, fused[which].real), got = run_layer(&f, fused[which].real);
    double y = relative_error(got.y, expected.y, expected.elements);
    printf("cuda %s level layer, shifted scores, d %d, N %d: y %.2g\n", ps_precision_name(fused[which].precision),
           (int)shape->d_model, (int)ps_patches(shape), y);
    ck_assert_double_le(y, fused[which].bound);
    layer_result_free(&expected);
    layer_result_free(&got);
    fixture_close(&oracle);
    fixture_close(&f);
}
END_TEST

/* Rows whose variance, 1.5e-5, is next to LayerNorm's epsilon. */
START_TEST(level_layer_small_rows)
{
    const struct ps_model_shape *shape = &fused_shapes[_i % FUSED_SHAPES];
    const int which = _i / FUSED_SHAPES;
    struct fixture oracle = fixture_open("reference", "cpu", PS_FP64, shape, 3, PS_LEVEL_GEMM, 0);
    struct fixture f = fixture_open("cuda", "cuda", fused[which].precision, shape, 3, PS_LEVEL_LAYER, 0);
    struct layer_result expected = run_layer_scaled(&oracle, fused[which].real, 3, -8, 0);
    struct layer_result got = run_layer_scaled(&f, fused[which].real, 3, -8, 0);
    double y = relative_error(got.y, expected.y, expected.elements);
    printf("cuda %s level layer, small rows, d %d, N %d: y %.2g\n", ps_precision_name(fused[which].precision), (int)shape->d_model,
           (int)ps_patches(shape), y);
    ck_assert_double_le(y, fused[which].bound);
    layer_result_free(&expected);
    layer_result_free(&got);
    fixture_close(&oracle);
    fixture_close(&f);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("model");
    /* By precision, for CK_RUN_CASE. */
    static const char *const names[FUSED][3] = {{"layer tf32", "step tf32", "every tf32"},
                                                {"layer fp16", "step fp16", "every fp16"},
                                                {"layer bf16", "step bf16", "every bf16"}};
    TCase *tests = tcase_create("model"), *shifted = tcase_create("layer shifted"), *differences = tcase_create("differences"),
          *halves = tcase_create("layer halves"), *folded = tcase_create("folded"), *layers[FUSED], *steps[FUSED], *every[FUSED];
    for (int i = 0; i < FUSED; i++) {
        layers[i] = tcase_create(names[i][0]);
        steps[i] = tcase_create(names[i][1]);
        every[i] = tcase_create(names[i][2]);
        tcase_set_timeout(layers[i], 300);
        tcase_set_timeout(steps[i], 300);
        tcase_set_timeout(every[i], 600);
    }
    tcase_set_timeout(tests, 300);
    tcase_set_timeout(shifted, 300);
    tcase_set_timeout(halves, 300);
    tcase_set_timeout(folded, 300);
    tcase_set_timeout(differences, 300);
    tcase_add_loop_test(tests, finite_differences, 0, 2 * SHAPES_AND_VARIANTS);
    tcase_add_loop_test(tests, masked_differences, 0, SHAPES_AND_VARIANTS);
    tcase_add_loop_test(differences, differences_cpu, 0, SHAPES);
    tcase_add_loop_test(tests, forward_plain, 0, FORWARD_CPU * SHAPES_AND_VARIANTS);
    tcase_add_loop_test(tests, variant_steps, 0, STEP_CASES_CPU * VARIANTS);
    tcase_add_loop_test(tests, loss_steps, 0, STEP_CASES_CPU * LOSSES * VARIANTS);
    tcase_add_loop_test(tests, gradient_scales, 0, SHAPES_AND_VARIANTS);
    tcase_add_loop_test(tests, head_alone_cpu, 0, SHAPES_AND_VARIANTS);
    tcase_add_test(tests, tiled_refuses);
    tcase_add_loop_test(tests, residual_tiles, 0, TILES_CPU * VARIANTS);
    tcase_add_test(tests, variants_beyond_level_layer);
    tcase_add_loop_test(tests, levels_cpu, 0, LAYER_SHAPES);
    tcase_add_loop_test(tests, layer_is_made_of, 0, 8);
    tcase_add_loop_test(tests, gradients_together, 0, 8 * LAYER_ROWS);
    tcase_add_loop_test(tests, strided_heads, 0, 2 * LAYER_ROWS);
    tcase_add_loop_test(tests, padded_heads, 0, PADDED_CPU * PADDED_SHAPES);
    tcase_add_loop_test(tests, variant_is_made_of, 0, 4 * LAYER_ROWS);
    tcase_add_loop_test(tests, level_none_is_made_of, 0, 2);
    tcase_add_loop_test(tests, level_layer_calls, 0, 3);
    tcase_add_loop_test(tests, step_parts_cpu, 0, STEP_SHAPES);
    tcase_add_loop_test(tests, attends, 0, SHAPES_AND_VARIANTS);
    tcase_add_loop_test(tests, updated_beside, 0, EARLY);
    if (ps_cuda_device_count() > 0) {
        if (!asked("PS_TEST_SMALL")) {
            tcase_add_loop_test(differences, differences_cuda, 0, SHAPES);
        }
        tcase_add_loop_test(tests, forward_plain, FORWARD_CPU * SHAPES_AND_VARIANTS, FORWARD_CUDA * SHAPES_AND_VARIANTS);
        tcase_add_loop_test(tests, variant_steps, STEP_CASES_CPU * VARIANTS, STEP_CASES * VARIANTS);
        tcase_add_loop_test(tests, loss_steps, STEP_CASES_CPU * LOSSES * VARIANTS, STEP_CASES * LOSSES * VARIANTS);
        tcase_add_loop_test(tests, head_alone_cuda, 0, SHAPES_AND_VARIANTS);
        tcase_add_loop_test(tests, residual_tiles, TILES_CPU * VARIANTS, TILES_CASES * VARIANTS);
        tcase_add_loop_test(tests, padded_heads, PADDED_CPU * PADDED_SHAPES, PADDED_CASES * PADDED_SHAPES);
        tcase_add_loop_test(tests, levels_cuda, 0, LAYER_SHAPES);
        tcase_add_loop_test(tests, step_real16, 0, 2 * SHAPES);
        tcase_add_loop_test(tests, step_parts_cuda, 0, (FUSED + 1) * STEP_SHAPES);
        tcase_add_loop_test(tests, updated_beside_cuda, 0, 3 * EARLY);
        if (fused_encoder()) {
            const int small = asked("PS_TEST_SMALL");
            for (int i = 0; i < FUSED; i++) {
                const int from = 2 * i * FUSED_SHAPES; /* small: the same kernels with larger weights are left out */
                tcase_add_loop_test(layers[i], forward_plain_layer, i * FUSED_SHAPES, (i + 1) * FUSED_SHAPES);
                tcase_add_loop_test(layers[i], level_layer, from, from + (small ? 1 : 2) * FUSED_SHAPES);
                if (fused[i].real == PS_F32) {
                    tcase_add_loop_test(layers[i], level_layer_nan, i * FUSED_SHAPES, (i + 1) * FUSED_SHAPES);
                }
                tcase_add_loop_test(layers[i], level_layer_many, i * MANY_SHAPES, i * MANY_SHAPES + (small ? 1 : MANY_SHAPES));
                if (!small) {
                    tcase_add_loop_test(layers[i], level_layer_draws, i * FUSED_SHAPES, (i + 1) * FUSED_SHAPES);
                    tcase_add_loop_test(steps[i], step_layer_draws, i * STEP_SHAPES, (i + 1) * STEP_SHAPES);
                    tcase_add_loop_test(steps[i], step_parts_layer, i * STEP_SHAPES, (i + 1) * STEP_SHAPES);
                }
                tcase_add_loop_test(steps[i], step_layer, i * STEP_SHAPES, (i + 1) * STEP_SHAPES);
                tcase_add_loop_test(steps[i], step_in_one, i * ONE_SHAPES, (i + 1) * ONE_SHAPES);
                tcase_add_loop_test(every[i], every_instance, i, i + 1);
            }
            tcase_add_loop_test(folded, folded_steps, 0, FOLDED_CASES * FOLDED_SHAPES);
            tcase_add_loop_test(halves, halves_steps, 0, HALVES_CASES * HALVES_SHAPES);
            tcase_add_loop_test(halves, halves_forward, 0, HALVES_CASES * HALVES_SHAPES);
            tcase_add_loop_test(halves, halves_evaluation, 0, 24);
            tcase_add_loop_test(halves, halves_ends, 0, HALVES_CASES * HALVES_SHAPES);
            tcase_add_loop_test(shifted, level_layer_shifted, 0, FUSED * FUSED_SHAPES);
            tcase_add_loop_test(shifted, shorter_batches, 0, 2 * FUSED);
            tcase_add_loop_test(shifted, level_layer_small_rows, 0, FUSED * FUSED_SHAPES);
            tcase_add_loop_test(shifted, level_layer_scaled, 0, FUSED_SHAPES + (small ? 0 : MANY_SHAPES));
            tcase_add_test(shifted, level_layer_refuses);
        } else {
            printf("skipped: level layer: the device is not of compute capability 9.0, or the build has no sm_90\n");
        }
        if (!asked("PS_TEST_SMALL")) {
            tcase_add_loop_test(tests, wide_steps, 0, WIDE_CASES * WIDE_SHAPES);
        }
        tcase_add_loop_test(tests, layer_is_made_of_cuda, 0, 8);
        tcase_add_loop_test(tests, variant_is_made_of_cuda, 0, 4 * LAYER_ROWS);
        tcase_add_loop_test(tests, sums_wait, 0, 3 * LAYER_ROWS);
        tcase_add_loop_test(tests, level_none_is_made_of_cuda, 0, 2);
    } else {
        printf("skipped: forecasts, levels, steps in 16 bits, differences and counts on CUDA: no CUDA device\n");
    }
    tcase_add_test(tests, folded_refused);
    tcase_add_loop_test(tests, activation_refused, 0, 2);
    tcase_add_loop_test(tests, norms_in_part, 0, 5);
    tcase_add_loop_test(tests, step_flops, 0, SHAPES_AND_VARIANTS);
    tcase_add_test(tests, impossible_shapes);
    tcase_add_test(tests, initialisation);
    tcase_add_test(tests, initial_values);
    tcase_add_test(tests, bytes);
    suite_add_tcase(suite, tests);
    suite_add_tcase(suite, differences);
    suite_add_tcase(suite, shifted);
    suite_add_tcase(suite, halves);
    suite_add_tcase(suite, folded);
    for (int i = 0; i < FUSED; i++) {
        suite_add_tcase(suite, layers[i]);
        suite_add_tcase(suite, steps[i]);
        suite_add_tcase(suite, every[i]);
    }
    return run_suite(suite, CK_NOFORK) != 0; /* CUDA and OpenMP do not survive a fork */
}
