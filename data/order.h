/* The windows of a pass over a split, and the order in which they are taken. */
#ifndef PS_DATA_ORDER_H
#define PS_DATA_ORDER_H

#include "data/series.h"

/* Which windows a pass takes, and in which order: the file's, or shuffled for one epoch. */
struct ps_order {
    int64_t first, count; /* windows first, first + 1, ... */
    int shuffled;
    uint64_t seed, epoch;
    const struct ps_runs *runs; /* they do not all follow one another, as a panel's; borrowed. NULL, or none: they do */
};

/* Windows begin .. begin + n - 1 of the pass in the file's order. */
void ps_order_windows(const struct ps_order *order, int64_t begin, int64_t n, int32_t *index);
int64_t ps_order_window(const struct ps_order *order, int64_t at);
/* How many of the pass's windows have a lower number. */
int64_t ps_order_before(const struct ps_order *order, int64_t window);

/* The whole pass as it is taken: [count]. */
void ps_order_draw(const struct ps_order *order, int32_t *index);

#endif
