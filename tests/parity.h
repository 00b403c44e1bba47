/* Runs one call of an operation on a table of kernels and compares what it leaves with what the double reference left: its outputs
 * within a bound, and every element that no output owns with the bytes it had. */
#ifndef PS_TESTS_PARITY_H
#define PS_TESTS_PARITY_H

#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/kernel_call.h"
#include "tests/tables.h"

enum { ALIGNMENT = 256, TIMED_RUNS = 10 };

static inline enum ps_type role_type(const struct ps_kernels *k, enum role role)
{
    switch (role) {
    case REAL:
        return k->real;
    case PARAMETER:
        return k->parameter;
    case STATISTICS:
        return k->statistics;
    case DOUBLE:
        return PS_F64;
    case INDEX:
        break;
    }
    return PS_I32;
}

static inline double load(const char *from, enum ps_type type, int64_t i)
{
    switch (type) {
    case PS_F64:
        return ((const double *)(const void *)from)[i];
    case PS_F32:
        return ((const float *)(const void *)from)[i];
    case PS_I32:
        return ((const int32_t *)(const void *)from)[i];
    case PS_F16:
        return fp16_value(((const uint16_t *)(const void *)from)[i]);
    case PS_BF16:
        break;
    }
    return bf16_value(((const uint16_t *)(const void *)from)[i]);
}

static inline void store(char *to, enum ps_type type, int64_t i, double value)
{
    switch (type) {
    case PS_F64:
        ((double *)(void *)to)[i] = value;
        return;
    case PS_F32:
        ((float *)(void *)to)[i] = (float)value;
        return;
    case PS_I32:
        ((int32_t *)(void *)to)[i] = (int32_t)value;
        return;
    case PS_F16:
        ((uint16_t *)(void *)to)[i] = fp16_bits(value);
        return;
    case PS_BF16:
        break;
    }
    ((uint16_t *)(void *)to)[i] = bf16_bits(value);
}

/* A call's memory on one table: the state, then the buffers. */
struct image {
    size_t bytes, at[MAX_TENSORS];
    char *before, *after;
    struct ps_step_state state;
};

static inline void image_free(struct image *image)
{
    free(image->before);
    free(image->after);
    *image = (struct image){0};
}

static inline void image_make(struct image *image, const struct table *t, const struct call *c)
{
    image->bytes = ALIGNMENT;
    for (int i = 0; i < c->buffers; i++) {
        image->at[i] = image->bytes;
        size_t bytes = (size_t)c->buffer[i].count * ps_type_bytes(role_type(t->kernels, c->buffer[i].role));
        image->bytes += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }
    image->before = calloc(1, image->bytes);
    image->after = calloc(1, image->bytes);
    if (!image->before || !image->after) {
        abort();
    }
    memcpy(image->before, &c->state, sizeof c->state);
    for (int i = 0; i < c->buffers; i++) {
        enum ps_type type = role_type(t->kernels, c->buffer[i].role);
#pragma omp parallel for if (c->buffer[i].count >= MANY)
        for (int64_t j = 0; j < c->buffer[i].count; j++) {
            store(image->before + image->at[i], type, j, c->values[c->buffer[i].begin + j]);
        }
    }
}

static inline enum ps_status invoke(const struct ps_kernels *k, enum ps_op op, const union arguments *arguments)
{
    switch (op) {
#define PS_X(name, kind, n, flops) \
    case PS_OP_##name:             \
        return k->name ? k->name(k, &arguments->name) : ps_fail(PS_UNSUPPORTED, #name " has no entry");
        PS_KERNEL_LIST(PS_X)
#undef PS_X
    case PS_OP_COUNT:
        break;
    }
    return ps_fail(PS_UNSUPPORTED, "no operation %d", (int)op);
}

/* The call's argument struct with the table's pointers. */
static inline union arguments bind_arguments(const struct table *t, const struct call *c, const struct image *image)
{
    union arguments arguments = c->arguments;
    for (int i = 0; i < ps_op_tensors(c->op); i++) {
        const struct operand *o = &c->operands[i];
        arguments.tensors[i] = (struct ps_tensor){.type = role_type(t->kernels, o->role)};
        if (o->buffer < 0) {
            continue;
        }
        struct ps_tensor *tensor = &arguments.tensors[i];
        tensor->data = t->memory + image->at[o->buffer] + (size_t)o->offset * ps_type_bytes(tensor->type);
        tensor->rank = o->rank;
        memcpy(tensor->size, o->size, sizeof o->size);
        memcpy(tensor->stride, o->stride, sizeof o->stride);
    }
    for (int i = 0; i < c->states; i++) {
        memcpy((char *)&arguments + c->state_at[i], &t->memory, sizeof t->memory);
    }
    return arguments;
}

/* image->before to the device, growing its memory when it must. */
static inline enum ps_status image_upload(struct table *t, const struct image *image)
{
    struct ps_device *d = t->device;
    if (image->bytes > t->capacity) {
        PS_TRY(d->synchronize(d));
        if (t->memory) {
            d->release(d, t->memory, t->capacity);
        }
        void *memory = NULL;
        t->memory = NULL;
        t->capacity = 0;
        PS_TRY(d->allocate(d, 2 * image->bytes, &memory));
        t->memory = memory;
        t->capacity = 2 * image->bytes;
    }
    return d->upload(d, PS_COMPUTE, t->memory, image->before, image->bytes);
}

/* Uploads, calls, downloads into image->after. */
static inline enum ps_status run(struct table *t, const struct call *c, struct image *image)
{
    struct ps_device *d = t->device;
    PS_TRY(image_upload(t, image));
    union arguments arguments = bind_arguments(t, c, image);
    enum ps_status status = invoke(t->kernels, c->op, &arguments);
    PS_TRY(d->download(d, PS_COMPUTE, image->after, t->memory, image->bytes));
    PS_TRY(d->synchronize(d));
    memcpy(&image->state, image->after, sizeof image->state);
    return status;
}

/* ---- checks ---- */

struct outcome {
    /* Calls made; cases served of each operation and of each aliasing. */
    int64_t calls, covered[PS_OP_COUNT], aliased[MAX_TENSORS];
    int failures;
    double worst; /* share of its bound */
    double worst_error;
    char worst_label[200];
};

__attribute__((format(printf, 4, 5))) static inline void fault(struct outcome *o, const struct table *t, const struct call *c,
                                                               const char *format, ...)
{
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (o->failures++ < 40) {
        fprintf(stderr, "%s: %s %s: %s\n", t->name, ps_op_name(c->op), c->label, text);
    }
}

/* Bytes that no output owns are as they were. */
static inline void check_untouched(struct outcome *o, const struct table *t, const struct call *c, const struct image *image)
{
    for (int b = 0; b < c->buffers; b++) {
        size_t bytes = ps_type_bytes(role_type(t->kernels, c->buffer[b].role));
        int outputs = 0;
        for (int i = 0; i < ps_op_tensors(c->op); i++) {
            outputs += c->operands[i].buffer == b && c->operands[i].mode != IN;
        }
        if (!outputs &&
            memcmp(image->before + image->at[b], image->after + image->at[b], (size_t)c->buffer[b].count * bytes) == 0) {
            continue;
        }
        char *owned = calloc((size_t)c->buffer[b].count, 1);
        if (!owned) {
            abort();
        }
        for (int i = 0; i < ps_op_tensors(c->op); i++) {
            const struct operand *output = &c->operands[i];
            if (output->buffer == b && output->mode != IN) {
                int64_t count = operand_count(output);
                for (int64_t j = 0; j < count; j++) {
                    owned[operand_at(output, j)] = 1;
                }
            }
        }
        for (int64_t j = 0; j < c->buffer[b].count; j++) {
            size_t at = image->at[b] + (size_t)j * bytes;
            if (!owned[j] && memcmp(image->before + at, image->after + at, bytes) != 0) {
                fault(o, t, c, "element %lld of buffer %d belongs to no output and was written", (long long)(j - GUARD), b);
                break;
            }
        }
        free(owned);
    }
}

/* A field of the state: untouched where the reference leaves it, else within the bound. */
static inline void check_state_field(struct outcome *o, const struct table *t, const struct call *c, const char *name,
                                     double before, double reference, double result, double bound)
{
    double allowed = reference == before ? 0 : bound * fabs(reference);
    if (!(fabs(result - reference) <= allowed)) {
        fault(o, t, c, "state->%s is %.17g, not %.17g", name, result, reference);
    }
}

/* The largest ||difference|| / ||reference|| of outputs of 16 bits and of all others. */
struct bounds {
    double real16, others;
};

/* Outputs and state against the reference's. */
static inline void check_close(struct outcome *o, const struct table *t, const struct call *c, const struct image *image,
                               const struct call *reference_call, const struct image *reference, struct bounds bounds)
{
    for (int i = 0; i < ps_op_tensors(c->op); i++) {
        const struct operand *output = &c->operands[i], *expected = &reference_call->operands[i];
        if (output->buffer < 0 || output->mode == IN) {
            continue;
        }
        enum ps_type type = role_type(t->kernels, c->buffer[output->buffer].role);
        enum ps_type expected_type = expected->role == INDEX ? PS_I32 : PS_F64;
        int64_t count = operand_count(output);
        double difference = 0, norm = 0, bound = ps_type_bytes(type) == 2 ? bounds.real16 : bounds.others;
#pragma omp parallel for reduction(+ : difference, norm) if (count >= MANY)
        for (int64_t j = 0; j < count; j++) {
            double result = load(image->after + image->at[output->buffer], type, operand_at(output, j));
            double right = load(reference->after + reference->at[expected->buffer], expected_type, operand_at(expected, j));
            if (c->may_be_nan && isnan(right) && isnan(result)) {
                continue;
            }
            difference += (result - right) * (result - right);
            norm += right * right;
        }
        double error = sqrt(difference), scale = sqrt(norm);
        if (!(error <= bound * scale)) {
            fault(o, t, c, "tensor %d: ||difference|| %.3g, ||reference|| %.3g: relative %.3g above %.3g", i, error, scale,
                  error / scale, bound);
        } else if (scale > 0 && error / scale / bound > o->worst) {
            o->worst = error / scale / bound;
            o->worst_error = error / scale;
            snprintf(o->worst_label, sizeof o->worst_label, "%s %s", ps_op_name(c->op), c->label);
        }
        /* What dropout dropped is 0, and nothing else is; the tails of gelu may underflow on one side. */
        double tail = 1e-4 * scale / sqrt((double)count);
        for (int64_t j = 0; c->has_dropout && j < count; j++) {
            double result = load(image->after + image->at[output->buffer], type, operand_at(output, j));
            double right = load(reference->after + reference->at[expected->buffer], expected_type, operand_at(expected, j));
            if ((right == 0 && fabs(result) > tail) || (fabs(right) > tail && result == 0)) {
                fault(o, t, c, "tensor %d: element %lld is %g where the reference's mask gives %g", i, (long long)j, result, right);
                break;
            }
        }
    }
    if (image->state.step != reference->state.step || image->state.cursor != reference->state.cursor) {
        fault(o, t, c, "state is at step %llu, cursor %llu, not %llu, %llu", (unsigned long long)image->state.step,
              (unsigned long long)image->state.cursor, (unsigned long long)reference->state.step,
              (unsigned long long)reference->state.cursor);
    }
    check_state_field(o, t, c, "loss_sum", c->state.loss_sum, reference->state.loss_sum, image->state.loss_sum, bounds.others);
    if (image->state.lost != reference->state.lost || image->state.unobserved != reference->state.unobserved) {
        fault(o, t, c, "state has %llu windows lost and %llu targets unobserved, not %llu and %llu",
              (unsigned long long)image->state.lost, (unsigned long long)image->state.unobserved,
              (unsigned long long)reference->state.lost, (unsigned long long)reference->state.unobserved);
    }
    check_state_field(o, t, c, "gradient_squares", c->state.gradient_squares, reference->state.gradient_squares,
                      image->state.gradient_squares, bounds.others);
}

/* A second run gives the same bytes; not where small cases are asked for, since the tools see a kernel in one run. */
static inline void check_again(struct outcome *o, struct table *t, const struct call *c, const struct call *reference_call,
                               const struct image *reference, const struct image *first)
{
    if (asked("PS_TEST_SMALL")) {
        return;
    }
    const int again = t->precision != PS_FP64 || c != reference_call;
    struct image second = *first;
    second.after = again ? malloc(first->bytes) : reference->after;
    if (!second.after) {
        abort();
    }
    if ((again && run(t, c, &second) != PS_OK) || memcmp(first->after, second.after, first->bytes) != 0) {
        fault(o, t, c, "a second run gives other bytes");
    }
    if (again) {
        free(second.after);
    }
}

/* Runs the call twice on the table: outputs against the reference, the same bytes both times, nothing else touched. On the double
 * reference itself, whose run of the same call is there already, once. Returns 0 when the table refused the call. */
static inline int check_call(struct outcome *o, struct table *t, const struct call *c, const struct call *reference_call,
                             const struct image *reference, struct bounds bounds)
{
    struct image first = {0};
    image_make(&first, t, c);
    o->calls++;
    enum ps_status status = run(t, c, &first);
    int refused = status == PS_UNSUPPORTED && c->may_refuse;
    if (refused) {
        if (memcmp(first.before, first.after, first.bytes) != 0) {
            fault(o, t, c, "refused, but wrote");
        }
    } else if (status != PS_OK) {
        fault(o, t, c, "status %d: %s", (int)status, ps_error_message());
    } else {
        check_close(o, t, c, &first, reference_call, reference, bounds);
        check_untouched(o, t, c, &first);
        check_again(o, t, c, reference_call, reference, &first);
    }
    image_free(&first);
    return !refused;
}

static inline int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Prints the median time of a call and the rates that follow. */
static inline enum ps_status print_time(struct table *t, const struct call *c)
{
    struct ps_device *d = t->device;
    struct image image = {0};
    image_make(&image, t, c);
    struct ps_event *events[2] = {0};
    double ms[TIMED_RUNS];
    enum ps_status status = image_upload(t, &image);
    union arguments arguments = bind_arguments(t, c, &image);
    for (int i = 0; i < 2 && status == PS_OK; i++) {
        status = d->event_create(d, &events[i]);
    }
    for (int i = 0; i < TIMED_RUNS && status == PS_OK; i++) {
        if ((status = image_upload(t, &image)) == PS_OK && /* the same step and sums each time */
            (status = d->event_record(d, PS_COMPUTE, events[0])) == PS_OK &&
            (status = invoke(t->kernels, c->op, &arguments)) == PS_OK &&
            (status = d->event_record(d, PS_COMPUTE, events[1])) == PS_OK && (status = d->synchronize(d)) == PS_OK) {
            status = d->event_elapsed(d, events[0], events[1], &ms[i]);
        }
    }
    if (status == PS_OK) {
        qsort(ms, TIMED_RUNS, sizeof *ms, compare_doubles);
        double seconds = ms[TIMED_RUNS / 2] * 1e-3;
        printf("%-24s %-20s %-62s %9.4f ms %9.1f GB/s %9.1f GFLOP/s\n", t->name, ps_op_name(c->op), c->label, seconds * 1e3,
               ps_op_bytes(c->op, &arguments) / seconds * 1e-9, ps_op_flops(c->op, &arguments) / seconds * 1e-9);
    }
    for (int i = 0; i < 2; i++) {
        if (events[i]) {
            d->event_destroy(d, events[i]);
        }
    }
    image_free(&image);
    return status;
}

#endif
