/* How far the run is. On a terminal (stderr) one line that is drawn again: bar, epoch, step, loss, seconds an epoch, time left. On
 * stdout one plain line an epoch; where stderr is no terminal also one each 30 s inside a long epoch. */
#ifndef PS_SRC_PROGRESS_H
#define PS_SRC_PROGRESS_H

#include <stdint.h>

#include "src/metrics.h"

struct ps_progress; /* opaque */

/* NULL without memory; every call takes NULL and does nothing. */
struct ps_progress *ps_progress_open(int64_t epochs, int64_t steps_per_epoch);
/* `step` steps of epoch `epoch` (the first is 1) are done; loss: the epoch's mean so far, NaN when not known. Cheap: looks at the
 * clock and draws at most 10 times a second. */
void ps_progress_step(struct ps_progress *progress, int64_t epoch, int64_t step, double loss);
/* The epoch is over: its line on stdout. */
void ps_progress_epoch(struct ps_progress *progress, const struct ps_epoch_record *record);
/* Clears the drawn line and frees. */
void ps_progress_close(struct ps_progress *progress);

#endif
