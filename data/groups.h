/* The windows of a file that stays open (ps_series_open_within), in groups of blocks: a block is a fixed number of windows that
 * follow one another, of which a pass takes those of its split; a group is as many blocks as half the memory holds. A reader thread
 * fills the next group while one is in use.
 *
 * A shuffled pass takes the blocks in a seeded order and shuffles the windows within each group, so that the order depends on the
 * seed, the epoch and the plan of blocks alone, and any place in it can be found again. */
#ifndef PS_DATA_GROUPS_H
#define PS_DATA_GROUPS_H

#include "data/order.h"

struct ps_groups;

/* Windows index[0..n) of the view, standardised, in the pass's order. n 0: the pass is over. */
struct ps_group {
    struct ps_window_view view;
    const int32_t *index;
    int64_t n;
    int slot;
};

/* series and scaler are borrowed. */
enum ps_status ps_groups_open(const struct ps_series *series, const struct ps_scaler *scaler, int64_t seq_len, int64_t pred_len,
                              struct ps_groups **groups);
void ps_groups_close(struct ps_groups *groups); /* NULL is fine */

/* Begins a pass at its window `begin`. Not while another is under way. */
void ps_groups_start(struct ps_groups *groups, const struct ps_order *order, int64_t begin);
/* Ends a pass, or abandons it; its groups are no longer valid. */
void ps_groups_stop(struct ps_groups *groups);
/* Waits for the next group, which stays valid until it is released; at most two at a time. PS_DATA when the file cannot be read or
 * is not what it was. */
enum ps_status ps_groups_next(struct ps_groups *groups, struct ps_group *group);
void ps_groups_release(struct ps_groups *groups, const struct ps_group *group);
/* Lets what is being read end at the next block, from any thread: who waits in ps_groups_next is told that the pass is over. */
void ps_groups_cancel(struct ps_groups *groups);

/* ps_naive_score of windows that are not in memory: a pass of its own. */
enum ps_status ps_groups_naive(struct ps_groups *groups, const struct ps_order *order, int64_t season, struct ps_naive *naive);

#endif
