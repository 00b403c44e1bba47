/* A reader thread that gathers batches into two buffers ahead of the loop that uses them. The buffers are the caller's. */
#ifndef PS_DATA_PREFETCH_H
#define PS_DATA_PREFETCH_H

#include "data/series.h"

struct ps_prefetch;

/* buffers: two, each room for batch inputs [B, C, L] and targets [B, C, H]. The index array is given by start and borrowed. */
enum ps_status ps_prefetch_open(const struct ps_window_view *view, int64_t batch, float *const inputs[2], float *const targets[2],
                                struct ps_prefetch **prefetch);
/* Begins an epoch: windows index[begin..end) in batches, the last one possibly short. Any epoch before is abandoned, and its index
 * array is no longer read once this returns. A buffer still held stays the caller's until it is released. */
void ps_prefetch_start(struct ps_prefetch *prefetch, const int32_t *index, int64_t begin, int64_t end);
/* Waits for the next batch: *slot is 0 or 1, alternating and 0 first in each epoch, *n its windows (0: the epoch is over). The
 * buffer stays valid until ps_prefetch_release(slot). Seconds spent waiting are added to *waited. PS_UNSUPPORTED when the buffer
 * whose turn it is was never released (waiting would never end). */
enum ps_status ps_prefetch_next(struct ps_prefetch *prefetch, int *slot, int64_t *n, double *waited);
void ps_prefetch_release(struct ps_prefetch *prefetch, int slot);
void ps_prefetch_close(struct ps_prefetch *prefetch); /* NULL is fine; joins the thread */

#endif
