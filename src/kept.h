/* The checkpoints in a run's folder: how many are kept, under which names, and which one the run goes on from.
 *
 *   last.h5        the newest state            best.h5        the best weights
 *   last-STEP.h5   those before it             best-EPOCH.h5  those before them
 *
 * A newer file takes the plain name once it is durable; what stood there keeps its content under the numbered name, and the oldest
 * beyond the limit goes last: best weights once the state that follows them is durable too, since the one before it speaks of older
 * ones. So there is an intact checkpoint at every moment, and a damaged one has another behind it. */
#ifndef PS_SRC_KEPT_H
#define PS_SRC_KEPT_H

#include "src/checkpoint.h"

enum { PS_KEPT_PATH = 4224 };

struct ps_kept {
    char folder[PS_KEPT_PATH - 64];
    int64_t keep_last, keep_best; /* files of each kind, the plainly named one included; at least 1 */
    /* What the plainly named files hold, once they were written or found intact. */
    int last_known, best_known;
    uint64_t last_step, best_epoch;
    int best_pruned; /* best weights beyond the limit are gone */
};

/* The plainly named files' paths. */
void ps_kept_last(const struct ps_kept *kept, char path[PS_KEPT_PATH]);
void ps_kept_best(const struct ps_kept *kept, char path[PS_KEPT_PATH]);

/* The weights to take of the run in folder `run`: best.h5, else the highest best-EPOCH.h5, else last.h5 or the highest
 * last-STEP.h5. PS_CHECKPOINT where none of them is there. */
enum ps_status ps_kept_weights(const char *run, char path[PS_KEPT_PATH]);

/* What a user named: a checkpoint, or a run's folder, whose weights are taken. *name stays, or becomes path. */
enum ps_status ps_kept_named(const char **name, char path[PS_KEPT_PATH]);

/* Whether the folder holds a state to go on from, intact or not. */
int ps_kept_any(const struct ps_kept *kept);

/* A state, or with no moments the best weights. PS_CHECKPOINT with file and cause; then what was there is there still. */
enum ps_status ps_kept_save(struct ps_kept *kept, const struct ps_checkpoint *checkpoint);

/* What a run goes on from. */
struct ps_resumption {
    struct ps_checkpoint last, best; /* best: of last's best epoch, or of a later one where its weights are lost: best.epoch; empty
                                        before the first */
    char path[PS_KEPT_PATH];         /* of last */
    char passed[1024];               /* why newer ones were not taken: the newest's cause; "" when last is the newest */
    char best_passed[1024];          /* why best.h5 was not taken, when it cannot be read; else "" */
};

/* The newest state that is intact and whose best weights are: in a best*.h5 of that epoch, in a last*.h5 of that epoch's end, or,
 * when newer states were damaged, in a best.h5 of a later epoch, which the run will reach again unless it ends before.
 * PS_CHECKPOINT with the newest's cause when there is none. */
enum ps_status ps_kept_load(struct ps_kept *kept, struct ps_resumption *resumption);
void ps_resumption_free(struct ps_resumption *resumption);

/* Removes every checkpoint of the folder. */
enum ps_status ps_kept_discard(struct ps_kept *kept);

#endif
