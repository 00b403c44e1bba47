/* What feeds a session's steps with windows: the order of a pass, and the batches where the device reads them. Either the whole
 * series lies on the device and steps gather windows from it by index, or batches stream through two slots of the device, filled by
 * a reader thread ahead of the steps. One pass at a time. */
#ifndef PS_SRC_FEED_H
#define PS_SRC_FEED_H

#include "data/groups.h"
#include "model/model.h"
#include "src/config.h"

struct ps_feed; /* opaque */

/* The part of a rank in a step, of which ranks share each at_once windows (kernels/share.h): at most `most` windows. One rank has
 * the whole step. */
struct ps_feed_share {
    int64_t at_once, granule, most;
    int rank, ranks;
};

/* All but *feed is borrowed. batch: windows of a step, of all ranks. groups: read the series, when it stays in its file; NULL: it
 * is in host memory. longest: windows of the longest pass. Batches that stream have the rank's part alone. Messages name config
 * keys.
 */
enum ps_status ps_feed_open(struct ps_device *device, const struct ps_config *config, const struct ps_series *series,
                            struct ps_groups *groups, int64_t batch, int64_t longest, const struct ps_feed_share *share,
                            struct ps_feed **feed);
void ps_feed_close(struct ps_feed *feed); /* NULL is fine; before the groups are closed */

/* Whether the whole series is on the device: then steps need nothing between them, and ps_feed_next and ps_feed_used do nothing. */
int ps_feed_resident(const struct ps_feed *feed);
/* As the device reads them; the same for every pass, so that a captured step may hold them. */
const struct ps_windows *ps_feed_windows(const struct ps_feed *feed);

/* Draws an order ahead: the pass after the present one will begin sooner, if it is of that order. */
void ps_feed_prepare(struct ps_feed *feed, const struct ps_order *order);
/* Draws the order and begins a pass over windows [begin, end) of it: uploads it, or starts the reader. */
enum ps_status ps_feed_start(struct ps_feed *feed, const struct ps_order *order, int64_t begin, int64_t end);
/* The next batch, on its way to the device; what is enqueued then waits for it. The host waits while it is not yet read. */
enum ps_status ps_feed_next(struct ps_feed *feed);
/* Behind the step that reads that batch: its slot is free again. */
enum ps_status ps_feed_used(struct ps_feed *feed);
/* Ends a pass, or abandons it, once the device is done with it. */
void ps_feed_stop(struct ps_feed *feed);

/* The present order, in host memory; NULL with groups, which draw the order of one group at a time. */
const int32_t *ps_feed_order(const struct ps_feed *feed);
/* The batch of the last ps_feed_next, in host memory until the next, of one rank: inputs [B, C, L] and targets [B, C, H]. */
void ps_feed_batch(const struct ps_feed *feed, const float **inputs, const float **targets);
/* Seconds, since it was opened, that the device had nothing to do because the host waited for data, at most. */
double ps_feed_waited(const struct ps_feed *feed);

#endif
