/* Batches of windows, gathered by a reader thread into two buffers ahead of the loop that uses them: from a view, or from groups,
 * whose own thread then reads the file. The buffers are the caller's. */
#ifndef PS_DATA_BATCHES_H
#define PS_DATA_BATCHES_H

#include "data/groups.h"

struct ps_batches;

/* buffers: two, each room for batch inputs [B, C, L] and targets [B, C, H]. groups: borrowed; NULL when the view has the data. */
enum ps_status ps_batches_open(const struct ps_window_view *view, struct ps_groups *groups, int64_t batch, float *const inputs[2],
                               float *const targets[2], struct ps_batches **batches);
/* Which windows of a batch of so many are gathered: the first at `from` or behind it, and in *n how many follow one another;
 * `windows` when there is none. */
struct ps_wanted {
    int64_t (*next)(const void *argument, int64_t windows, int64_t from, int64_t *n);
    const void *argument; /* borrowed */
};
/* Before the first pass: these alone are put into the buffers, one behind the other, which need no room for more. */
void ps_batches_want(struct ps_batches *batches, const struct ps_wanted *wanted);
/* Begins a pass: windows [begin, end) of the order, in batches, the last one possibly short. The batch of window w is put into
 * buffer w / batch % 2. index: the whole order, borrowed until the pass is stopped; of groups not read, as order is not of a
 * view. Any pass before is abandoned. A buffer still held stays the caller's until it is released. */
void ps_batches_start(struct ps_batches *batches, const struct ps_order *order, const int32_t *index, int64_t begin, int64_t end);
/* Ends a pass, or abandons it. */
void ps_batches_stop(struct ps_batches *batches);
/* ps_prefetch_next and ps_prefetch_release, *n in windows. */
enum ps_status ps_batches_next(struct ps_batches *batches, int *slot, int64_t *n, double *waited);
void ps_batches_release(struct ps_batches *batches, int slot);
void ps_batches_close(struct ps_batches *batches); /* NULL is fine; before the groups are closed */

#endif
