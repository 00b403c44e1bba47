/* A session: one config's data, device, table, model and optimiser, opened together, and the two loops over them: training steps
 * and scoring. train, evaluate and bench are each a few calls of it.
 *
 * The step (gather, forward, loss, backward, clip, AdamW, advance) is captured once per batch size and replayed, small models' in
 * graphs of several steps; within an epoch the host only enqueues: it keeps a few tens of milliseconds of work queued, watching
 * events without waiting on the device. */
#ifndef PS_SRC_SESSION_H
#define PS_SRC_SESSION_H

#include <signal.h>

#include "model/model.h"
#include "optim/optimizer.h"
#include "src/checkpoint.h"
#include "src/config.h"
#include "src/digest.h"
#include "src/feed.h"
#include "src/metrics.h"
#include "src/progress.h"
#include "src/ranks.h"

enum { PS_GROUPS = 3 }; /* of graphs, queued at any time */

/* Captured steps or scoring passes, `steps` of them, for one batch size. */
struct ps_replay {
    struct ps_session *session;
    struct ps_graph *graph;
    int64_t batch, steps;
    int training, frozen;
};

/* Which of them: several full batches, one, one that is shorter. */
enum ps_replay_kind { PS_REPLAY_SEVERAL, PS_REPLAY_FULL, PS_REPLAY_SHORT, PS_REPLAY_KINDS };

struct ps_session {
    const struct ps_config *config; /* borrowed */
    struct ps_series *series;
    struct ps_splits splits;
    struct ps_scaler scaler;
    struct ps_window_view view; /* the host's copy, standardised; of a series that stays in its file, the sizes alone */
    double *seasonal_mae;       /* [C], or of a panel [series], of ps_seasonal_mae in the data's own units; NULL: not asked for */
    struct ps_groups *groups;   /* reads that file; NULL: the data are in host memory */

    struct ps_device *device;
    struct ps_kernels *kernels;
    struct ps_model *model;
    struct ps_optimizer optimizer; /* zero in a session that only scores */
    enum ps_level level;
    char *algorithms, *versions;
    char tuning[PS_DIGEST_HEX]; /* of runtime.tuning's file; "": none, or not on CUDA */

    struct ps_feed *feed;        /* of windows to the device */
    struct ps_step_state *state; /* device: training's; scoring_state beside it */
    struct ps_step_state *scoring_state;
    struct ps_step_state now;   /* as last read from or written to the device */
    struct ps_step_state *seen; /* pinned [PS_GROUPS]: as it was at the events that the loop watches; first: behind a pass */
    double *errors;             /* device [slots, PS_ERRORS] */
    double *host_errors;        /* pinned */
    int64_t slots;
    void *best; /* device: the best-validation weights */

    struct ps_replay replays[2][PS_REPLAY_KINDS]; /* scoring, training */
    int64_t graph_steps;                          /* that PS_REPLAY_SEVERAL holds; 1: there is none */

    int64_t step_windows;                   /* of a full step, of all ranks: train.accumulate batches, or of scoring one */
    int64_t steps_per_epoch, train_windows; /* windows of an epoch, after drop_last */
    /* The run so far, as checkpoints record it. */
    char *init_from; /* what it began with, as checkpoints record it; NULL: the seed's weights */
    uint64_t epoch;
    double best_validation;
    uint64_t best_epoch, epochs_since_best;
    uint64_t best_holds;        /* the epoch whose weights `best` holds: best_epoch, or a later one when those are lost; 0: none */
    struct ps_step_state ended; /* the state in which the epoch ended that ended last */

    /* Several processes that share each step (src/together.h); NULL: one. */
    struct ps_ranks *ranks;
    struct ps_exchange *exchange;
    int64_t granule;               /* shares begin at multiples of so many windows */
    struct ps_step_state *states;  /* device [ranks]: each rank's, when a checkpoint was last taken */
    struct ps_step_state *resumed; /* [ranks]: their losses, of a checkpoint of as many ranks; NULL else */
    int stopping;                  /* the signal that all have agreed to stop for */

    const volatile sig_atomic_t *stop; /* the caller's; nonzero: a loop finishes what is queued and returns. NULL: never */
};

struct ps_session_options {
    const char *data_path; /* NULL: the config's */
    const char *device;    /* "auto", "cpu", "cuda", "cuda:N"; NULL: the config's */
    /* Its scaler is taken, and its channels are what the data must have; NULL: the scaler is fitted on the training rows. */
    const struct ps_checkpoint *checkpoint;
    struct ps_ranks *ranks; /* that train together; NULL: this process alone */
    int training;           /* 0: no optimiser */
    unsigned scored;        /* bits of the splits, of each of which a target must be observed */
    int seasonal;           /* MASE will be computed: takes one more pass over the training rows */
    int whole;              /* with a checkpoint: every window of the file is PS_ALL, and the parts have none */
    const char *otherwise;  /* what the caller offers where the data are too short for data.split: ends the message. May be NULL */
};

/* data.split's parts of a series; whole: every window of it as PS_ALL. */
enum ps_status ps_session_splits(const struct ps_config *config, const struct ps_series *series, int whole,
                                 struct ps_splits *splits);

/* Messages name config keys. A constant channel is allowed: *session's scaler counts them. */
enum ps_status ps_session_open(const struct ps_config *config, const struct ps_session_options *options,
                               struct ps_session **session);
void ps_session_close(struct ps_session *session); /* NULL is fine */

/* A line on stderr, once a process, when the CPU computes with fewer threads than were asked for. */
void ps_session_warn_threads(const struct ps_session *session, const char *program);

/* "BACKEND on DEVICE, PRECISION, level LEVEL", and the kernels that serve the model, where they have a name of their own. */
enum { PS_SESSION_TEXT = 512 };
void ps_session_describe(const struct ps_session *session, char text[PS_SESSION_TEXT]);

/* Initial parameters from the seed. */
enum ps_status ps_session_initialise(struct ps_session *session);
/* The checkpoint's weights and running statistics in their place, by name; with new_head all but the head's. PS_CHECKPOINT listing
 * every tensor that is missing, superfluous or of another shape. */
enum ps_status ps_session_initialise_from(struct ps_session *session, const struct ps_checkpoint *checkpoint, int new_head);

/* What an epoch's loop tells and asks while it runs; every member optional. */
struct ps_epoch_watch {
    struct ps_progress *progress;
    int64_t checkpoint_every;                                            /* steps; 0: never inside an epoch */
    enum ps_status (*begun)(struct ps_session *session, void *argument); /* the first steps are queued */
    enum ps_status (*checkpoint)(struct ps_session *session, void *argument);
    void *argument;
    int64_t max_steps; /* 0: the whole epoch */
};

/* Trains from the epoch's cursor to its end (or to stop). *finished: the epoch is complete, *loss its mean training loss, of the
 * windows whose loss is finite; then epoch, cursor and sums stand at the next epoch's start, and `ended` has the old ones. PS_USAGE
 * naming step and tensor when a loss or gradient was not finite and such steps are not skipped: then the state is spoilt. */
enum ps_status ps_session_train_epoch(struct ps_session *session, const struct ps_epoch_watch *watch, int *finished, double *loss);

/* Reads back how far the device has come, after a pass that an error ended: every step is done whole or not at all. */
enum ps_status ps_session_recall(struct ps_session *session);

/* Undoes the end of the epoch that ended last, for one whose validation was cut short: a checkpoint made now resumes with it. */
enum ps_status ps_session_reopen_epoch(struct ps_session *session);

/* The split's windows in the file's order. */
struct ps_order ps_session_order(const struct ps_session *session, enum ps_split split);

/* MSE and MAE of the present weights over every window of the split, and over full batches only, in standardised units. When `stop`
 * cut it short, both have 0 windows. */
struct ps_accuracy {
    struct ps_score all, full_batches;
};
enum ps_status ps_session_score(struct ps_session *session, enum ps_split split, struct ps_accuracy *accuracy);

/* Calls `sink` with each batch's windows and forecasts of the split, in order, in standardised units: inputs [n, C, L], targets and
 * forecasts [n, C, H], of a model of quantiles these are the one of ps_loss_point; quantiles [n, C, Q, H], rising, of any other
 * model the forecasts. */
typedef enum ps_status ps_forecast_sink(void *argument, int64_t first, int64_t n, const float *inputs, const float *targets,
                                        const float *forecasts, const float *quantiles);
enum ps_status ps_session_forecast(struct ps_session *session, enum ps_split split, ps_forecast_sink *sink, void *argument);

/* Both in one pass. */
enum ps_status ps_session_score_and_forecast(struct ps_session *session, enum ps_split split, ps_forecast_sink *sink,
                                             void *argument, struct ps_accuracy *accuracy);

/* Naive forecasts of the same windows, in the same units. */
enum ps_status ps_session_naive(struct ps_session *session, enum ps_split split, struct ps_naive *naive);

/* Present weights -> best, and back. */
enum ps_status ps_session_keep_best(struct ps_session *session);
enum ps_status ps_session_take_best(struct ps_session *session);

/* A whole run's state from a checkpoint; refuses one of another model, data, level, algorithms or versions, and with PS_DATA data
 * whose channels have other names. Of another number of ranks level, algorithms and versions may be others. */
enum ps_status ps_session_restore(struct ps_session *session, const struct ps_checkpoint *checkpoint);
/* Weights alone, into the model (evaluate) or into best. */
enum ps_status ps_session_load_weights(struct ps_session *session, const struct ps_checkpoint *checkpoint, int into_best);

/* Whether the present epoch trains the head alone (train.freeze). */
int ps_session_frozen(const struct ps_session *session);
/* Enqueues one training step of `batch` windows, operation by operation: what is captured, and what bench traces. */
enum ps_status ps_session_step(struct ps_session *session, int64_t batch);
/* The training step of a full batch, captured on the first call. Its windows are those at the state's cursor. */
enum ps_status ps_session_full_step(struct ps_session *session, struct ps_graph **graph);
/* Captures what an epoch and its validation replay, which is else captured when it is come to. */
enum ps_status ps_session_capture(struct ps_session *session);
/* Enqueues `steps` of them as an epoch does, in graphs of several where the data lies on the device. */
enum ps_status ps_session_full_steps(struct ps_session *session, int64_t steps);
/* Uploads the first epoch's windows and sets epoch, step and cursor to 0, keeping the weights: where a timing loop starts again. */
enum ps_status ps_session_rewind(struct ps_session *session);

#endif
