/* What a checkpoint is written from: a copy in pinned host memory, which the device fills while the steps go on. */
#ifndef PS_SRC_SNAPSHOT_H
#define PS_SRC_SNAPSHOT_H

#include "src/session.h"

struct ps_snapshot {
    struct ps_session *session;
    struct ps_checkpoint checkpoint; /* its buffers are the snapshot's; whole once ps_snapshot_wait has returned */
    struct ps_step_state *state;     /* pinned [ranks]: training's state at that moment; behind it the checkpoint's buffers */
    struct ps_event *copied;
    int best_weights;
};

/* best_weights: the best weights and no moments, else everything. */
enum ps_status ps_snapshot_open(struct ps_session *session, int best_weights, struct ps_snapshot *snapshot);
/* Enqueues the copy behind the steps enqueued so far; the host does not wait for it. */
enum ps_status ps_snapshot_take(struct ps_snapshot *snapshot);
/* Waits for the copy; any thread may. */
enum ps_status ps_snapshot_wait(struct ps_snapshot *snapshot);
void ps_snapshot_close(struct ps_snapshot *snapshot); /* zeroed structs are fine */

#endif
