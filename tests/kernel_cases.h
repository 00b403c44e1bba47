/* Every operation's cases: the sizes, layouts and values that its calls are tested with, odd ones too. */
#ifndef PS_TESTS_KERNEL_CASES_H
#define PS_TESTS_KERNEL_CASES_H

#include "tests/kernel_call.h"

/* An operation with its cases. */
struct operation {
    enum ps_op op;
    int (*build)(struct call *c, int index); /* makes case number `index`; 0 when there are no more */
    unsigned free;                           /* a bit for each tensor whose last size nothing else fixes */
};

extern const struct operation ps_operations[];
extern const int ps_operation_count;

/* Attention of q, k, v and mixed [S, h, N, e]; by row, heads lie side by side: of mixed, of q, k and v. */
void ps_attention_call(struct call *c, const int64_t *size, int mixed_by_row, int by_row);

#endif
