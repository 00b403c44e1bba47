/* One call of an operation, described without a table of kernels: its operands as views of buffers of doubles (exact in float, so
 * that every precision sees the same values), its plain values, its state. Everything that is not an operand's element is NaN:
 * guards before and after each buffer, gaps between the rows of a slice. So are "=" outputs. */
#ifndef PS_TESTS_KERNEL_CALL_H
#define PS_TESTS_KERNEL_CALL_H

#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#include "tests/random_values.h"
#include "tests/real16.h"

enum {
    MAX_TENSORS = 32,
    GUARD = 64,
    MANY = 1 << 16, /* values, from which on threads share a loop over them */
};

/* Which type a tensor has follows from the table. */
enum role { REAL, PARAMETER, STATISTICS, DOUBLE, INDEX };
enum mode { IN, OUT, ADD }; /* read; "=": poisoned first; "+=" or in place: preloaded */
enum fill { NORMAL, POSITIVE };

struct operand {
    enum role role;
    enum mode mode;
    int buffer; /* -1: absent */
    int rank;
    int dense;      /* row-major without gaps: element i lies i after the first */
    int64_t offset; /* of the first element, in the buffer */
    int64_t size[PS_MAX_RANK], stride[PS_MAX_RANK];
};

struct buffer {
    enum role role;
    int64_t begin, count; /* in call.values, guards included */
};

union arguments {
    struct ps_tensor tensors[MAX_TENSORS];
#define PS_X(name, kind, n, flops) struct ps_##name name;
    PS_KERNEL_LIST(PS_X)
#undef PS_X
};

struct call {
    enum ps_op op;
    char label[160];
    int may_refuse;   /* PS_UNSUPPORTED is an answer too */
    int may_be_nan;   /* NaN where the reference has it is right */
    int sums_rounded; /* sums are of what was rounded to 16 bits before */
    int has_dropout;
    struct operand operands[MAX_TENSORS];
    int buffers;
    struct buffer buffer[MAX_TENSORS];
    double *values;
    int64_t used, capacity;
    int64_t most;              /* a case of more values is left out, and what it has beyond is not drawn; 0: none is */
    union arguments arguments; /* plain values; tensors and state pointers are filled in for each table */
    struct ps_step_state state;
    int states;
    size_t state_at[4]; /* offsets of state pointers in the argument struct */
    uint64_t random;
    int64_t shift; /* elements by which dense tensors are moved off their alignment */
};

static inline int call_left_out(const struct call *c)
{
    return c->most > 0 && c->used > c->most;
}

static inline int64_t operand_count(const struct operand *o)
{
    int64_t count = 1;
    for (int i = 0; i < o->rank; i++) {
        count *= o->size[i];
    }
    return count;
}

/* Where element i (row-major) of the view lies in its buffer. */
static inline int64_t operand_at(const struct operand *o, int64_t i)
{
    int64_t at = o->offset;
    if (o->dense) {
        return at + i;
    }
    for (int dim = o->rank - 1; dim >= 0; dim--) {
        at += i % o->size[dim] * o->stride[dim];
        i /= o->size[dim];
    }
    return at;
}

/* Tensor `slot` of the call: a view of a new buffer, `lead` elements after its guard and reaching as far as it does. */
static inline void place_strided(struct call *c, int slot, enum role role, enum mode mode, enum fill fill, int64_t lead, int rank,
                                 const int64_t *size, const int64_t *stride)
{
    struct operand *o = &c->operands[slot];
    *o = (struct operand){.role = role, .mode = mode, .buffer = c->buffers, .rank = rank, .offset = GUARD + lead};
    int64_t reach = 1;
    for (int i = 0; i < rank; i++) {
        o->size[i] = size[i];
        o->stride[i] = stride[i];
        reach += (size[i] - 1) * stride[i];
    }
    struct ps_tensor view = {.rank = rank};
    memcpy(view.size, o->size, sizeof o->size);
    memcpy(view.stride, o->stride, sizeof o->stride);
    o->dense = ps_tensor_contiguous(&view);
    struct buffer *b = &c->buffer[c->buffers++];
    *b = (struct buffer){.role = role, .begin = c->used, .count = GUARD + lead + reach + GUARD};
    c->used += b->count;
    if (c->used > c->capacity) {
        c->capacity = 2 * c->used;
        c->values = realloc(c->values, (size_t)c->capacity * sizeof *c->values);
        if (!c->values) {
            abort();
        }
    }
    double *values = c->values + b->begin;
    for (int64_t i = 0; i < b->count; i++) {
        values[i] = role == INDEX ? -1 : NAN;
    }
    if (mode == OUT || call_left_out(c)) {
        return;
    }
    const int64_t count = operand_count(o);
    const uint64_t random = c->random;
#pragma omp parallel for if (o->dense && count >= MANY) /* else elements may share their place */
    for (int64_t i = 0; i < count; i++) {
        uint64_t own = random_behind(random, 2 * i);
        const double x = random_normal(&own);
        values[operand_at(o, i)] = fill == POSITIVE ? (float)(0.5 + fabs(x)) : x;
    }
    c->random = random_behind(random, 2 * count);
}

static inline void place_dense(struct call *c, int slot, enum role role, enum mode mode, enum fill fill, int rank,
                               const int64_t *size)
{
    struct ps_tensor t = ps_tensor_nd(NULL, PS_F64, rank, size);
    place_strided(c, slot, role, mode, fill, c->shift, rank, size, t.stride);
}

/* place(call, slot, role, mode, fill, sizes...) */
#define place(c, slot, role, mode, fill, ...) \
    place_dense(c, slot, role, mode, fill, (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (int64_t[]){__VA_ARGS__})

static inline void set_value(struct call *c, int slot, int64_t i, double value)
{
    const struct operand *o = &c->operands[slot];
    c->values[c->buffer[o->buffer].begin + operand_at(o, i)] = value;
}

static inline double get_value(const struct call *c, int slot, int64_t i)
{
    const struct operand *o = &c->operands[slot];
    return c->values[c->buffer[o->buffer].begin + operand_at(o, i)];
}

static inline void call_begin(struct call *c, enum ps_op op, uint64_t seed)
{
    double *values = c->values;
    int64_t capacity = c->capacity;
    memset(c, 0, sizeof *c);
    c->op = op;
    c->values = values;
    c->capacity = capacity;
    c->random = seed;
    for (int i = 0; i < MAX_TENSORS; i++) {
        c->operands[i].buffer = -1;
    }
    c->state = (struct ps_step_state){.step = 3, .cursor = 0, .loss_sum = 0.5, .gradient_squares = 2.5};
}

static inline void call_free(struct call *c)
{
    free(c->values);
    c->values = NULL;
    c->capacity = 0;
}

__attribute__((format(printf, 2, 3))) static inline void call_label(struct call *c, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(c->label, sizeof c->label, format, arguments);
    va_end(arguments);
}

/* Rounds the activations, so that a table whose type of 16 bits that is and the double reference read the same values. */
static inline void call_round(struct call *c, enum ps_type type)
{
    for (int i = 0; i < c->buffers; i++) {
        double *values = c->values + c->buffer[i].begin;
        const int64_t count = c->buffer[i].role == REAL ? c->buffer[i].count : 0;
#pragma omp parallel for if (count >= MANY)
        for (int64_t j = 0; j < count; j++) {
            values[j] = rounded_to(type, values[j]);
        }
    }
}

/* The call's struct has a pointer to the state at this offset. */
static inline void call_state(struct call *c, size_t offset)
{
    c->state_at[c->states++] = offset;
}

#endif
