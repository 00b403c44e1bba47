/* A reader thread that fills two buffers by turns, ahead of whoever uses them. What fills them is the caller's: batches of windows
 * (data/batches.h), groups of blocks from a file (data/groups.h). */
#ifndef PS_DATA_PREFETCH_H
#define PS_DATA_PREFETCH_H

#include <stdint.h>

#include "kernels/status.h"

struct ps_prefetch;

/* Fills buffer `slot` with what comes next in the pass, on the reader's thread. *n: how much it holds, more than 0; 0: the pass is
 * over. */
typedef enum ps_status ps_prefetch_fill(void *source, int slot, int64_t *n);

enum ps_status ps_prefetch_open(ps_prefetch_fill *fill, void *source, struct ps_prefetch **prefetch);
/* Begins a pass (the first one starts the thread, so that a process that only opens its data can be forked), whose first item goes
 * to `slot`, the next to the other one, and so on. Not before any pass before has been stopped or has ended. */
void ps_prefetch_start(struct ps_prefetch *prefetch, int slot);
/* Abandons the pass. Once this returns fill is not at work, and the source may be changed. A buffer still held stays the caller's
 * until it is released. */
void ps_prefetch_stop(struct ps_prefetch *prefetch);
/* Waits for the next item: *slot, and *n as fill said (0: the pass is over). The buffer stays valid until
 * ps_prefetch_release(slot). Seconds spent waiting are added to *waited. A failure of fill comes back here, with its message.
 * PS_UNSUPPORTED when the buffer whose turn it is was never released (waiting would never end). */
enum ps_status ps_prefetch_next(struct ps_prefetch *prefetch, int *slot, int64_t *n, double *waited);
void ps_prefetch_release(struct ps_prefetch *prefetch, int slot);
void ps_prefetch_close(struct ps_prefetch *prefetch); /* NULL is fine; joins the thread */

#endif
