/* A session whose steps several ranks share (src/ranks.h): what they settle between two steps. Alone every function does nothing
 * but what it says of one process. */
#ifndef PS_SRC_TOGETHER_H
#define PS_SRC_TOGETHER_H

#include "src/session.h"

/* The config, of a program of the same version, as rank 0 has both. */
enum ps_status ps_ranks_load_config(struct ps_ranks *ranks, const char *path, char *const *overrides, int n_overrides,
                                    struct ps_config *config);
/* The windows of a step from `first` on that are computed at once, train.batch_size of them or those that are left of `step`, and
 * of them this rank's: from *windows' first index on when the state's cursor is the step's. The model takes its place there. */
int64_t ps_session_part(struct ps_session *session, int64_t first, int64_t step, struct ps_windows *windows);
/* The signal that all stop for, as they last agreed; alone, *session->stop. 0: none. */
int ps_session_stopped(const struct ps_session *session);
/* Before a step: every rank's status, signals, and whether gradients are not finite (*nonfinite): all go on alike. */
enum ps_status ps_session_agree(struct ps_session *session, enum ps_status mine, uint64_t *nonfinite);
/* Every rank has the parameters, the moments, the best weights and the place in the run that rank 0 has. */
enum ps_status ps_session_spread(struct ps_session *session);
/* Before scoring: with model.batchnorm: local every rank has the running statistics of rank 0, which alone are kept. Training reads
 * none. */
enum ps_status ps_session_spread_statistics(struct ps_session *session);
/* session->states = each rank's state, behind the steps enqueued so far: before a checkpoint. */
enum ps_status ps_session_gather_states(struct ps_session *session);
/* The sum of what the ranks have lost and of their losses, of states that are each a rank's, into one. */
struct ps_step_state ps_states_joined(const struct ps_step_state *states, int ranks);
/* The same of session->now. */
enum ps_status ps_session_join_state(struct ps_session *session, struct ps_step_state *joined);
/* Whether rank 0 has the same data. */
enum ps_status ps_session_check_data(struct ps_session *session);
/* Whether rank 0 computes the same model by the same means; and all take as many steps at once. */
enum ps_status ps_session_check_same(struct ps_session *session);

#endif
