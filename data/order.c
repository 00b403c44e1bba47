#include "data/order.h"

#include <stddef.h>

static int is_one_run(const struct ps_order *order)
{
    return order->runs == NULL || order->runs->n == 0;
}

/* The last of n rising values that is `value` or less; the first where none is. */
static int64_t last_up_to(const int64_t *values, int64_t n, int64_t value)
{
    int64_t low = 0;
    for (int64_t high = n; high - low > 1;) {
        int64_t middle = low + (high - low) / 2;
        if (values[middle] <= value) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

void ps_order_windows(const struct ps_order *order, int64_t begin, int64_t n, int32_t *index)
{
    if (is_one_run(order)) {
        ps_sequence(order->first + begin, n, index);
        return;
    }
    const struct ps_runs *runs = order->runs;
    int64_t run = last_up_to(runs->before, runs->n, begin);
    for (int64_t done = 0, part; done < n; done += part, run++) {
        int64_t skipped = begin + done - runs->before[run], left = runs->before[run + 1] - begin - done;
        part = left < n - done ? left : n - done;
        ps_sequence(runs->first[run] + skipped, part, index + done);
    }
}

int64_t ps_order_window(const struct ps_order *order, int64_t at)
{
    int32_t window;
    ps_order_windows(order, at, 1, &window);
    return window;
}

int64_t ps_order_before(const struct ps_order *order, int64_t window)
{
    int64_t first = order->first, before = 0, count = order->count;
    if (!is_one_run(order)) {
        const struct ps_runs *runs = order->runs;
        int64_t run = last_up_to(runs->first, runs->n, window);
        first = runs->first[run];
        before = runs->before[run];
        count = runs->before[run + 1] - before;
    }
    int64_t passed = window < first ? 0 : window - first;
    return before + (passed < count ? passed : count);
}

void ps_order_draw(const struct ps_order *order, int32_t *index)
{
    ps_order_windows(order, 0, order->count, index);
    if (order->shuffled) {
        ps_shuffle_index(order->seed, order->epoch, order->count, index);
    }
}
