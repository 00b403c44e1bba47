/* An exchange of one rank with itself, on the CPU, which keeps what it was asked. What is summed beside others must stay as it was
 * when that began: it is compared when it ends. */
#ifndef PS_TESTS_RECORDER_H
#define PS_TESTS_RECORDER_H

#include <stdlib.h>
#include <string.h>

#include "kernels/exchange.h"
#include "tests/checks.h"

enum recorded_kind { RECORDED_SUM, RECORDED_BESIDE, RECORDED_JOIN, RECORDED_GATHER };

enum { MOST_RECORDED = 256 };

struct recorder {
    struct ps_exchange table; /* first */
    int n;
    struct recorded {
        enum recorded_kind kind;
        const char *values;
        size_t bytes;
        char *begun; /* of RECORDED_BESIDE, until the join: the values */
    } call[MOST_RECORDED];
};

static inline struct recorded *recorder_note(struct ps_exchange *e, enum recorded_kind kind, const void *values, size_t bytes)
{
    struct recorder *r = (struct recorder *)e;
    ck_assert_int_lt(r->n, MOST_RECORDED);
    r->call[r->n] = (struct recorded){kind, values, bytes, NULL};
    return &r->call[r->n++];
}

static inline enum ps_status recorder_sum(struct ps_exchange *e, void *values, enum ps_type type, int64_t count)
{
    recorder_note(e, RECORDED_SUM, values, (size_t)count * ps_type_bytes(type));
    return PS_OK;
}

static inline enum ps_status recorder_sum_beside(struct ps_exchange *e, void *values, enum ps_type type, int64_t count)
{
    struct recorded *call = recorder_note(e, RECORDED_BESIDE, values, (size_t)count * ps_type_bytes(type));
    call->begun = malloc(call->bytes);
    memcpy(call->begun, values, call->bytes);
    return PS_OK;
}

static inline enum ps_status recorder_join(struct ps_exchange *e)
{
    struct recorder *r = (struct recorder *)e;
    for (int i = 0; i < r->n; i++) {
        struct recorded *call = &r->call[i];
        ck_assert_msg(!call->begun || memcmp(call->values, call->begun, call->bytes) == 0, "call %d summed what was not final", i);
        free(call->begun);
        call->begun = NULL;
    }
    recorder_note(e, RECORDED_JOIN, NULL, 0);
    return PS_OK;
}

static inline enum ps_status recorder_gather(struct ps_exchange *e, void *all, const void *mine, size_t bytes)
{
    recorder_note(e, RECORDED_GATHER, mine, bytes);
    for (int r = 0; r < e->size; r++) {
        memcpy((char *)all + (size_t)r * bytes, mine, bytes);
    }
    return PS_OK;
}

static inline struct recorder recorder_of(int ranks, size_t part)
{
    return (struct recorder){.table = {.size = ranks,
                                       .sum = recorder_sum,
                                       .sum_beside = recorder_sum_beside,
                                       .join = recorder_join,
                                       .part = part,
                                       .gather = recorder_gather}};
}

/* The calls since the last reset sum each byte of a buffer once, after all that was begun beside has ended, and nothing else;
 * returns how many were begun beside. */
static inline int recorder_sums(struct recorder *r, const void *buffer, size_t bytes)
{
    char *seen = calloc(bytes, 1);
    int beside = 0, joined = 0;
    size_t sum = 0;
    for (int i = 0; i < r->n; i++) {
        const struct recorded *call = &r->call[i];
        if (call->kind == RECORDED_JOIN) {
            joined++;
            ck_assert_int_eq(i, r->n - 1);
            continue;
        }
        const size_t begin = (size_t)(call->values - (const char *)buffer);
        ck_assert(call->kind != RECORDED_GATHER && begin <= bytes && call->bytes <= bytes - begin);
        ck_assert_msg(!memchr(seen + begin, 1, call->bytes), "call %d sums what another has", i);
        memset(seen + begin, 1, call->bytes);
        sum += call->bytes;
        beside += call->kind == RECORDED_BESIDE;
    }
    ck_assert_msg(sum == bytes, "%zu of %zu bytes are summed", sum, bytes);
    ck_assert_int_eq(joined, beside > 0);
    free(seen);
    return beside;
}

#endif
