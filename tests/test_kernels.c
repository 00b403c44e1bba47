/* Parity: every operation of every backend and precision that is present, in all its cases (kernel_cases.c), against the double
 * reference.
 *
 * PS_TEST_TIME=1 prints the time of every case; PS_TEST_FULL=1 adds the sizes of a training step and random ones; PS_TEST_SMALL=1
 * takes CUDA's tables and small cases alone, for compute-sanitizer (scripts/sanitize_gpu.sh). PS_TEST_SHARD=I/N shares the lines of
 * ps_operations out among N processes: with an N above their number it is line I alone, from 0 on. */
#include <limits.h>
#include <malloc.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/asked.h"
#include "tests/kernel_cases.h"
#include "tests/parity.h"
#include "tests/suite.h"

/* Outputs that may be an input, as kernels.h says. */
static const struct {
    enum ps_op op;
    int output, input;
} aliases[] = {{PS_OP_softmax, 0, 1},
               {PS_OP_mask_patches, 0, 2},
               {PS_OP_bias_residual_add, 0, 1},
               {PS_OP_bias_residual_add, 0, 3},
               {PS_OP_bias_activation, 0, 1},
               {PS_OP_activation_backward, 0, 1},
               {PS_OP_layernorm_backward, 0, 3},
               {PS_OP_layernorm_backward, 0, 8},
               {PS_OP_softmax_backward, 0, 1},
               {PS_OP_softmax_backward, 0, 3},
               {PS_OP_batchnorm, 0, 1},
               {PS_OP_batchnorm_backward, 0, 4},
               {PS_OP_batchnorm_backward, 0, 10},
               {PS_OP_gemm_finish, 0, 12},
               {PS_OP_feed_forward, 0, 6},
               {PS_OP_feed_forward_backward, 0, 5},
               {PS_OP_feed_forward_backward, 0, 10},
               {PS_OP_bias_residual_statistics, 0, 5},
               {PS_OP_bias_residual_statistics, 0, 7},
               {PS_OP_rope, 0, 1},
               {PS_OP_channel_affine, 0, 1},
               {PS_OP_channel_affine_backward, 0, 3},
               {PS_OP_bias_grad, 1, 2},
               {PS_OP_forecast, 0, 1},
               {PS_OP_add, 0, 1},
               {PS_OP_add, 0, 2},
               {PS_OP_affine, 0, 1},
               {PS_OP_unary, 0, 1},
               {PS_OP_binary, 0, 1},
               {PS_OP_binary, 0, 2},
               {PS_OP_drop, 0, 1},
               {PS_OP_bias_position_add, 0, 1}};

/* The call with operand `output` laid over `input`; 0 when they do not lie alike. */
static int lay_over(struct call *c, int output, int input)
{
    struct operand *o = &c->operands[output], *i = &c->operands[input];
    if (o->buffer < 0 || o->role != i->role || o->offset != i->offset || memcmp(o->size, i->size, sizeof o->size) != 0 ||
        memcmp(o->stride, i->stride, sizeof o->stride) != 0) {
        return 0;
    }
    o->buffer = i->buffer;
    return 1;
}

/* ---- what the ends of the model in one are made of, on the double reference; host memory serves ---- */

static enum ps_status compose_embed_forward(const struct ps_kernels *k, const struct ps_embed_forward *a)
{
    PS_TRY(k->gather_patches(k, &(struct ps_gather_patches){a->patches, a->mean, a->std, a->inputs, a->indices, a->state, a->batch,
                                                            a->stride, a->first, a->revin, a->subtract_last, a->pad_end, a->epsilon,
                                                            0}));
    PS_TRY(k->gemm(k, &(struct ps_gemm){a->u, a->patches, a->weight, 1, 0}));
    return k->bias_position_add(k, &(struct ps_bias_position_add){a->u, a->u, a->bias, a->position, a->dropout});
}

static enum ps_status compose_embed_backward(const struct ps_kernels *k, const struct ps_embed_backward *a)
{
    int64_t positions = ps_tensor_count(&a->d_position), rows = a->du.size[0], d = a->du.size[1];
    double *masked = malloc((size_t)(rows * d) * sizeof *masked);
    struct ps_tensor wide = ps_tensor_2d(masked, PS_F64, rows * d / positions, positions),
                     tall = ps_tensor_2d(masked, PS_F64, rows, d);
    struct ps_tensor du = ps_tensor_reshape(a->du, 2, wide.size), d_position = ps_tensor_reshape(a->d_position, 1, &positions);
    enum ps_status status = k->bias_grad(k, &(struct ps_bias_grad){d_position, wide, du, a->dropout});
    if (status == PS_OK) {
        status = k->bias_grad(k, &(struct ps_bias_grad){.dbias = a->d_bias, .dy = tall});
    }
    if (status == PS_OK) {
        status = k->gemm(k, &(struct ps_gemm){a->d_weight, ps_tensor_transpose(a->patches, 0, 1), tall, 1, 1});
    }
    free(masked);
    return status;
}

static enum ps_status compose_window_loss(const struct ps_kernels *k, const struct ps_window_loss *a)
{
    int64_t sequences = a->dx.size[0], horizon = a->dx.size[1];
    double *targets = malloc((size_t)(sequences * horizon) * sizeof *targets), *partials = a->partials.data;
    const double *dx = a->dx.data, *std = a->std.data;
    struct ps_tensor t = ps_tensor_2d(targets, PS_F64, sequences, horizon);
    struct ps_step_state state = *a->state;
    enum ps_status status = k->gather_targets(
        k, &(struct ps_gather_targets){.y = t, .targets = a->targets, .indices = a->indices, .state = a->state, .batch = a->batch});
    if (status == PS_OK) {
        status = k->forecast_loss(k, &(struct ps_forecast_loss){.dx = a->dx,
                                                                .x = a->x,
                                                                .bias = a->bias,
                                                                .mean = a->mean,
                                                                .std = a->std,
                                                                .targets = t,
                                                                .state = &state,
                                                                .batch = a->batch,
                                                                .gradient_scale = a->gradient_scale});
    }
    memset(partials, 0, (size_t)ps_tensor_count(&a->partials) * sizeof *partials);
    for (int64_t s = 0; s < sequences; s++) {
        double *sums = partials + s / PS_PARTIAL_ROWS * (horizon + 1);
        for (int64_t i = 0; i < horizon; i++) {
            double slope = dx[s * horizon + i],
                   error = slope / (2 * ps_gradient_scale(a->gradient_scale) / (double)(sequences * horizon) * std[s]);
            sums[i] += slope;
            sums[horizon] += error * error;
        }
    }
    free(targets);
    return status;
}

static enum ps_status compose_head_step(const struct ps_kernels *k, const struct ps_head_step *a)
{
    double *x = malloc((size_t)ps_tensor_count(&a->dx) * sizeof *x);
    struct ps_tensor product = ps_tensor_2d(x, PS_F64, a->dx.size[0], a->dx.size[1]);
    enum ps_status status = k->gemm(k, &(struct ps_gemm){product, a->z, a->weight, 1, 0});
    if (status == PS_OK) {
        status = compose_window_loss(k, &(struct ps_window_loss){a->dx, a->partials, product, a->bias, a->mean, a->std, a->targets,
                                                                 a->indices, a->state, a->batch, a->gradient_scale});
    }
    free(x);
    return status == PS_OK ? k->gemm(k, &(struct ps_gemm){a->dz, a->dx, ps_tensor_transpose(a->weight, 0, 1), 1, 0}) : status;
}

static enum ps_status compose_head_sums(const struct ps_kernels *k, const struct ps_head_sums *a)
{
    (void)k;
    int64_t groups = a->partials.size[0], horizon = a->d_bias.size[0];
    double *d_bias = a->d_bias.data;
    const double *partials = a->partials.data;
    for (int64_t i = 0; i < groups; i++) {
        for (int64_t t = 0; t < horizon; t++) {
            d_bias[t] += partials[i * (horizon + 1) + t];
        }
        a->state->loss_sum += (double)a->batch / (double)(a->sequences * horizon) * partials[i * (horizon + 1) + horizon];
    }
    return PS_OK;
}

/* ---- one case ---- */

/* The most terms behind which a norm of n columns is served in 16 bits; up to 96 columns more are. */
static int64_t most_terms(int64_t n, int forward)
{
    if (n <= 64) {
        return INT64_MAX;
    }
    if (n <= 128) {
        return 704;
    }
    return !forward || n > 256 ? 0 : n <= 192 ? 448 : 320;
}

/* Case `index` as tables of this kind take it; 0 when there is none. */
static int build_for(enum ps_type kind, struct call *c, int (*build)(struct call *c, int index), int index)
{
    if (!build(c, index)) {
        return 0;
    }
    if (kind != PS_F32) {
        call_round(c, kind);
        c->may_refuse |= c->op == PS_OP_gemm_bias;
        if (c->op == PS_OP_gemm_finish && c->operands[20].buffer >= 0) { /* a norm of rows: of so many columns and terms */
            const int64_t *b = c->operands[10].size;
            c->may_refuse = b[0] > most_terms(b[1], c->operands[16].buffer >= 0);
        }
        if (c->op == PS_OP_attention || c->op == PS_OP_attention_backward) { /* the columns of q, of all pieces */
            const struct operand *q = &c->operands[c->op == PS_OP_attention ? 2 : 7];
            c->may_refuse = q->size[3] * (q->rank == 5 ? q->size[4] : 1) > 128;
        }
    } else if (c->op == PS_OP_adamw) {
        c->operands[5].buffer = -1; /* no copy where the parameters are what products read */
    } else if (c->op == PS_OP_gemm_finish) {
        /* Of float32 the larger weights, without sums over rows, norms or an addend's scale. */
        const struct ps_gemm_finish *a = &c->arguments.gemm_finish;
        const int64_t *b = c->operands[10].size;
        const int counted = c->operands[5].buffer >= 0 || c->operands[14].buffer >= 0 || c->operands[20].buffer >= 0,
                  large = c->operands[0].size[0] >= 1024 && b[0] * b[1] >= 1 << 16;
        c->may_refuse = counted || !large || a->activation == PS_SWIGLU;
    }
    return 1;
}

/* As run, on the double reference, of what it has no entry for. */
static enum ps_status run_composed(struct table *t, const struct call *c, struct image *image)
{
    if (has_entry(t, c->op)) {
        return run(t, c, image);
    }
    PS_TRY(image_upload(t, image));
    union arguments a = bind_arguments(t, c, image);
    enum ps_status status = c->op == PS_OP_embed_forward    ? compose_embed_forward(t->kernels, &a.embed_forward)
                            : c->op == PS_OP_embed_backward ? compose_embed_backward(t->kernels, &a.embed_backward)
                            : c->op == PS_OP_head_step      ? compose_head_step(t->kernels, &a.head_step)
                            : c->op == PS_OP_window_loss    ? compose_window_loss(t->kernels, &a.window_loss)
                                                            : compose_head_sums(t->kernels, &a.head_sums);
    PS_TRY(t->device->download(t->device, PS_COMPUTE, image->after, t->memory, image->bytes));
    memcpy(&image->state, image->after, sizeof image->state);
    return status;
}

/* The largest ||result - reference|| / ||reference||. tf32 rounds the operands of products alone, bf16 and fp16 the activations,
 * from which all is computed as in fp32. */
static struct bounds bounds_of(enum ps_precision precision, enum ps_op op)
{
    static const double bounds[] = {
        [PS_FP64] = 1e-12, [PS_FP32] = 1e-5, [PS_TF32] = 2e-3, [PS_PRECISION_BF16] = 1e-2, [PS_FP16] = 2e-3};
    int products = op == PS_OP_gemm || op == PS_OP_gemm_bias || op == PS_OP_gemm_gradient || op == PS_OP_gemm_finish ||
                   op == PS_OP_attention || op == PS_OP_attention_backward || op == PS_OP_feed_forward ||
                   op == PS_OP_feed_forward_backward;
    enum ps_precision others = precision > PS_FP32 && !products ? PS_FP32 : precision;
    /* head_step's errors are differences of a product's forecasts, in which that product's rounding shows larger. */
    return (struct bounds){.real16 = bounds[precision], .others = op == PS_OP_head_step ? 1e-4 : bounds[others]};
}

/* One case on one table, alone and with each permitted aliasing. */
static void check_case(struct outcome *o, struct table *t, const struct call *c, const struct image *reference)
{
    struct bounds bounds = bounds_of(t->precision, c->op);
    bounds.others = c->sums_rounded && t->kernels->real != PS_F32 ? bounds.real16 : bounds.others;
    if (!has_entry(t, c->op) || !check_call(o, t, c, c, reference, bounds)) {
        return;
    }
    o->covered[c->op]++;
    if (asked("PS_TEST_TIME") && print_time(t, c) != PS_OK) {
        fault(o, t, c, "timing: %s", ps_error_message());
    }
    for (int j = 0; j < LENGTH(aliases); j++) {
        struct call over = *c;
        if (aliases[j].op == c->op && lay_over(&over, aliases[j].output, aliases[j].input)) {
            size_t used = strlen(over.label);
            snprintf(over.label + used, sizeof over.label - used, ", tensor %d over %d", aliases[j].output, aliases[j].input);
            o->aliased[j] += check_call(o, t, &over, c, reference, bounds);
        }
    }
}

/* ---- tests ---- */

/* Attention whose scores are all 96 higher or lower: softmax takes no notice, and the exponentials alone would be infinite or next
 * to nothing. The first coordinate of queries and keys makes it, of few bits, so that every precision holds it. */
START_TEST(test_shifted_attention)
{
    static const int64_t patches[] = {1, 5, 13, 16, 17, 42, 64, 65, 100};
    static struct call c;
    open_oracle();
    for (int i = 0; i < present(); i++) {
        struct table *t = &tables[i];
        struct outcome o = {0};
        ck_assert_msg(table_open(t) == PS_OK, "%s", ps_error_message());
        struct bounds bounds = bounds_of(t->precision, PS_OP_attention);
        bounds.others = fmax(bounds.others, t->precision == PS_FP64 ? 1e-12 : 3e-5); /* scores of 96: measured 8.8e-6 */
        for (int index = 0; has_entry(t, PS_OP_attention) && index < 2 * LENGTH(patches); index++) {
            const int64_t size[4] = {2, 3, patches[index / 2], 16};
            call_begin(&c, PS_OP_attention, (uint64_t)index);
            ps_attention_call(&c, size, 0, 0);
            for (int64_t r = 0; r < size[0] * size[1] * size[2]; r++) { /* scale 1/8 */
                set_value(&c, 2, r * size[3], 16);
                set_value(&c, 3, r * size[3], index % 2 ? -48 : 48);
            }
            if (kind_of(t) != PS_F32) {
                call_round(&c, kind_of(t));
            }
            struct image reference = {0};
            image_make(&reference, &oracle, &c);
            ck_assert_msg(run(&oracle, &c, &reference) == PS_OK, "%s", ps_error_message());
            check_call(&o, t, &c, &c, &reference, bounds);
            image_free(&reference);
        }
        printf("%s: shifted attention: nearest its bound: %.2g\n", t->name, o.worst_error);
        ck_assert_int_eq(o.failures, 0);
        table_close(t);
    }
    call_free(&c);
    close_oracle();
}
END_TEST

/* Windows without a hole: the same bits whether holes are looked for or not. */
START_TEST(test_masked_bits)
{
    struct table *t = &tables[_i];
    static struct call c;
    int compared = 0;
    ck_assert_msg(table_open(t) == PS_OK, "%s", ps_error_message());
    for (int i = 0; i < ps_operation_count; i++) {
        for (int index = 0; ps_operations[i].op == PS_OP_gather_patches; index++) {
            call_begin(&c, PS_OP_gather_patches, (uint64_t)index);
            if (!build_for(kind_of(t), &c, ps_operations[i].build, index)) {
                break;
            }
            if (c.arguments.gather_patches.masked) {
                continue;
            }
            struct image plain = {0}, masked = {0};
            image_make(&plain, t, &c);
            image_make(&masked, t, &c);
            ck_assert_msg(run(t, &c, &plain) == PS_OK, "%s", ps_error_message());
            c.arguments.gather_patches.masked = 1;
            ck_assert_msg(run(t, &c, &masked) == PS_OK, "%s", ps_error_message());
            ck_assert_msg(memcmp(plain.after, masked.after, plain.bytes) == 0, "%s: %s: other bits", t->name, c.label);
            image_free(&plain);
            image_free(&masked);
            compared++;
        }
    }
    ck_assert_int_gt(compared, 20);
    call_free(&c);
    table_close(t);
}
END_TEST

/* Values of an operation's largest case; 0: any. Large ones show nothing here: with PS_TEST_SMALL, so that a run a hundred times
 * slower ends in minutes; of operations that no GPU does here, since no kernel of the CPU's takes another way beyond 2^18 values;
 * and under AddressSanitizer, where the reference takes minutes for them, of all. */
static int64_t most_values(enum ps_op op)
{
    enum {
        MOST_VALUES = 1000000,
        MOST_SANITIZED = 150000,
        MOST_OF_PRODUCTS = 8000000, /* of which some kernels take turns only when there are many */
        MOST_OF_BIASED = 1500000,   /* of which wide tiles are taken when there are many rows */
        MOST_OF_HEADS = 2600000,    /* of which long attention has other kernels when there are many */
    };
    if (asked("PS_TEST_SMALL")) {
        return op == PS_OP_gemm_finish          ? MOST_OF_PRODUCTS
               : op == PS_OP_gemm_bias          ? MOST_OF_BIASED
               : op == PS_OP_attention_backward ? MOST_OF_HEADS
                                                : MOST_VALUES;
    }
    if (asked("PS_TEST_FULL")) {
        return 0;
    }
#ifdef __SANITIZE_ADDRESS__
    return MOST_SANITIZED;
#else
    for (int i = CPU_TABLES; i < present(); i++) {
        if (has_entry(&tables[i], op)) {
            return 0;
        }
    }
    return MOST_VALUES;
#endif
}

/* With PS_TEST_SHARD=I/N: whether an operation belongs to the others of N processes, among which I, from 0 on, is this one. */
static int elsewhere(int operation)
{
    int index = 0, count = 1;
    const char *text = getenv("PS_TEST_SHARD");
    ck_assert_msg(!text || (sscanf(text, "%d/%d", &index, &count) == 2 && index >= 0 && index < count), "PS_TEST_SHARD: %s", text);
    return operation % count != index;
}

/* Small: of two tables that differ in what batches of small products take the second has those alone. */
static int left_to_another(const struct table *t, enum ps_op op)
{
    return asked("PS_TEST_SMALL") && !t->tiny_gemm && op != PS_OP_gemm;
}

/* Whether the cases come once more with every tensor one element off its alignment: kernels for that are of their own. */
static int comes_unaligned(enum ps_op op)
{
    return op == PS_OP_softmax || op == PS_OP_softmax_backward || op == PS_OP_adamw;
}

START_TEST(test_parity)
{
    static struct call c;
    static struct outcome outcomes[LENGTH(tables)];
    open_oracle();
    const int first = asked("PS_TEST_SMALL") ? CPU_TABLES : 0;
    for (int i = first; i < present(); i++) {
        ck_assert_msg(table_open(&tables[i]) == PS_OK, "%s", ps_error_message());
    }
    static const enum ps_type kinds[] = {PS_F32, PS_BF16, PS_F16};
    for (int i = 0; i < LENGTH(kinds) * ps_operation_count; i++) {
        enum ps_type kind = kinds[i % LENGTH(kinds)];
        int operation = i / LENGTH(kinds), served = 0;
        for (int j = first; j < present(); j++) {
            served |= kind_of(&tables[j]) == kind && has_entry(&tables[j], ps_operations[operation].op);
        }
        if (!served || elsewhere(operation)) {
            continue;
        }
        const int64_t most = most_values(ps_operations[operation].op);
        for (int index = 0, shift = 0;; index++) {
            call_begin(&c, ps_operations[operation].op, (uint64_t)(1000 * operation + index));
            c.shift = shift;
            c.most = most;
            if (!build_for(kind, &c, ps_operations[operation].build, index)) {
                if (shift || !comes_unaligned(ps_operations[operation].op)) {
                    break;
                }
                shift = 1;
                index = -1;
                continue;
            }
            if (call_left_out(&c)) {
                continue;
            }
            struct image reference = {0};
            image_make(&reference, &oracle, &c);
            ck_assert_msg(run_composed(&oracle, &c, &reference) == PS_OK, "%s %s: %s", ps_op_name(c.op), c.label,
                          ps_error_message());
            for (int j = first; j < present(); j++) {
                if (kind_of(&tables[j]) == kind && has_entry(&tables[j], c.op) && !left_to_another(&tables[j], c.op)) {
                    check_case(&outcomes[j], &tables[j], &c, &reference);
                }
            }
            image_free(&reference);
        }
    }
    int failures = 0;
    for (int i = first; i < present(); i++) {
        struct outcome *o = &outcomes[i];
        struct table *t = &tables[i];
        printf("%s: %lld calls, %d failures; nearest its bound: %.2g (%s)\n", t->name, (long long)o->calls, o->failures,
               o->worst_error, o->worst_label);
        failures += o->failures;
        for (int op = 0; op < PS_OP_COUNT; op++) {
            const int other = op == PS_OP_encoder_forward || op == PS_OP_encoder_backward || /* in test_model */
                              left_to_another(t, (enum ps_op)op);
            ck_assert_msg(other || getenv("PS_TEST_SHARD") || o->covered[op] > 0 || !has_entry(t, (enum ps_op)op),
                          "%s has no case that %s serves", ps_op_name((enum ps_op)op), t->name);
        }
        for (int j = 0; j < LENGTH(aliases); j++) {
            ck_assert_msg(asked("PS_TEST_SMALL") || getenv("PS_TEST_SHARD") || o->aliased[j] > 0 || !has_entry(t, aliases[j].op),
                          "%s: no case that %s serves has tensor %d over %d", ps_op_name(aliases[j].op), t->name, aliases[j].output,
                          aliases[j].input);
        }
        table_close(t);
    }
    call_free(&c);
    close_oracle();
    ck_assert_int_eq(failures, 0);
}
END_TEST

/* Sizes that do not fit together are refused with a message, and nothing is written. */
START_TEST(test_misfits)
{
    struct table *t = &tables[_i];
    ck_assert_msg(table_open(t) == PS_OK, "%s", ps_error_message());
    struct outcome o = {0};
    static struct call c;
    for (int i = 0; i < ps_operation_count; i++) {
        const enum ps_op op = ps_operations[i].op;
        if (!has_entry(t, op)) {
            continue;
        }
        /* Of reduce not the first, whose y has rank 0; of none a large one: sixteen on the sizes, and what is asked for, are
         * others. */
        for (int index = op == PS_OP_reduce ? 20 : 2, large = 1; large; index += 16) {
            call_begin(&c, op, 5);
            ck_assert_int_eq(build_for(kind_of(t), &c, ps_operations[i].build, index), 1);
            large = c.used > 100000;
        }
        for (int slot = 0; slot < ps_op_tensors(op); slot++) {
            struct operand *operand = &c.operands[slot], fits = *operand;
            if (ps_operations[i].free >> slot & 1 || operand->buffer < 0) {
                continue;
            }
            operand->size[operand->rank - 1]++;
            int64_t stride = 1;
            for (int dim = operand->rank - 1; dim >= 0; dim--) {
                operand->stride[dim] = stride;
                stride *= operand->size[dim];
            }
            struct image image = {0};
            image_make(&image, t, &c);
            ps_fail(PS_OK, "%s", "");
            enum ps_status status = run(t, &c, &image);
            if (status != PS_UNSUPPORTED || !*ps_error_message()) {
                fault(&o, t, &c, "tensor %d one longer: status %d, message \"%s\"", slot, (int)status, ps_error_message());
            } else if (memcmp(image.before, image.after, image.bytes) != 0) {
                fault(&o, t, &c, "tensor %d one longer: refused, but wrote", slot);
            }
            image_free(&image);
            *operand = fits;
        }
    }
    call_free(&c);
    table_close(t);
    ck_assert_int_eq(o.failures, 0);
}
END_TEST

int main(void)
{
    /* Large buffers come and go: keep their pages. */
    mallopt(M_MMAP_THRESHOLD, 1 << 30);
    mallopt(M_TRIM_THRESHOLD, INT_MAX);
    Suite *suite = suite_create("kernels");
    if (present() == CPU_TABLES) {
        printf("skipped: no CUDA device\n");
    }
    /* For CK_RUN_CASE: what is shared out, and what is not. */
    TCase *parity = tcase_create("parity"), *calls = tcase_create("calls");
    tcase_set_timeout(parity, 0);
    tcase_set_timeout(calls, 0);
    tcase_add_test(parity, test_parity);
    tcase_add_test(calls, test_shifted_attention);
    tcase_add_loop_test(calls, test_misfits, 0, present());
    tcase_add_loop_test(calls, test_masked_bits, 0, present());
    suite_add_tcase(suite, parity);
    suite_add_tcase(suite, calls);

    return run_suite(suite, CK_NOFORK) != 0; /* CUDA and OpenMP do not survive a fork */
}
