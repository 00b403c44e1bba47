/* The ranks that train one model together: processes that mpirun or srun started, one a GPU or a part of the CPU. Each computes its
 * share of every batch (kernels/share.h); this is what they tell each other outside of a step. docs/scaling.md says how it is done.
 *
 * Every function takes NULL, which is a process alone: it then does nothing, loads nothing and returns what it was given. All but
 * the first three and ps_ranks_threads are made by every rank in the same order. */
#ifndef PS_SRC_RANKS_H
#define PS_SRC_RANKS_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/device.h"
#include "kernels/exchange.h"

struct ps_ranks; /* opaque */

int ps_ranks_rank(const struct ps_ranks *ranks);  /* 0 alone */
int ps_ranks_size(const struct ps_ranks *ranks);  /* 1 alone */
int ps_ranks_local(const struct ps_ranks *ranks); /* the rank's number on its host */

/* *ranks stays NULL unless the environment says that there are several: OMPI_COMM_WORLD_SIZE, PMI_SIZE or SLURM_STEP_NUM_TASKS
 * above 1. Then libpatchstep_mpi and MPI are loaded, and the ranks watch one another (src/heartbeat.h). */
enum ps_status ps_ranks_open(struct ps_ranks **ranks);
/* Whether every rank has the last error; alone 1. */
int ps_ranks_known(const struct ps_ranks *ranks);
/* The last error's line on stderr: once where all know of it, else with the rank's name, or not at all where another rank's end or
 * error, which it may follow from, is told meanwhile. */
void ps_ranks_say(const struct ps_ranks *ranks, const char *program);
/* At a program's end, with its status: after an error that the others do not know of it ends them too. */
void ps_ranks_close(struct ps_ranks *ranks, enum ps_status status);

/* Ends every rank, after an error that cannot be told because the others may wait elsewhere. */
void ps_ranks_end(struct ps_ranks *ranks, enum ps_status status);

/* Whether it went well everywhere; else the lowest rank's that failed, status and message, with "rank R on HOST: " in front unless
 * all failed alike. */
enum ps_status ps_ranks_check(struct ps_ranks *ranks, enum ps_status mine);
/* What all are about to do is the same: `text`, named `what`, is rank 0's. Checked. */
enum ps_status ps_ranks_same(struct ps_ranks *ranks, const char *what, const char *text);
/* all [size][bytes]: what each rank gave. */
enum ps_status ps_ranks_gather(struct ps_ranks *ranks, const void *mine, size_t bytes, void *all);
/* Rank 0's bytes to all. */
enum ps_status ps_ranks_broadcast(struct ps_ranks *ranks, void *values, size_t bytes);
/* values [count] = the sum over ranks in their order: each rank has the same bits. */
enum ps_status ps_ranks_sum(struct ps_ranks *ranks, void *values, enum ps_type type, int64_t count);

/* Threads for the CPU when as many as there are processors are asked for: the ranks of a host that may run on the same processors
 * share them. 0 alone. */
int ps_ranks_threads(const struct ps_ranks *ranks);

/* What is exchanged inside a step, of host memory (src/exchange.h has the devices'); *exchange NULL alone. The exchange's seconds:
 * what it has waited and summed. */
enum ps_status ps_ranks_exchange(struct ps_ranks *ranks, struct ps_exchange **exchange);
double ps_ranks_seconds(const struct ps_ranks *ranks);

#endif
