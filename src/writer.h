/* Checkpoints written by a thread of their own, from copies that the device makes between two steps: the run loop only enqueues.
 * There are two copies; a third checkpoint waits until the first is on disk. */
#ifndef PS_SRC_WRITER_H
#define PS_SRC_WRITER_H

#include "src/kept.h"
#include "src/session.h"

struct ps_writer; /* opaque */

struct ps_writer_times {
    int64_t checkpoints;
    double stalled, longest_stall; /* seconds the run loop spent in ps_writer_submit: in all; in one call */
    double writing, longest_write; /* seconds from a copy's end to its files' being durable */
};

/* kept and session are borrowed; kept is the writer's until it is closed. */
enum ps_status ps_writer_open(struct ps_session *session, struct ps_kept *kept, struct ps_writer **writer);
/* Enqueues a copy of the present state, and of the best weights when with_best, to be written: best.h5 first, since last.h5 never
 * speaks of best weights that are not on disk. An error of an earlier write is returned here, and ends the writing. */
enum ps_status ps_writer_submit(struct ps_writer *writer, int with_best);
/* Waits until all that was submitted is durable. */
enum ps_status ps_writer_drain(struct ps_writer *writer);
/* After a drain. */
struct ps_writer_times ps_writer_times(const struct ps_writer *writer);
/* Waits likewise, then ends the thread; NULL is fine. */
void ps_writer_close(struct ps_writer *writer);

#endif
