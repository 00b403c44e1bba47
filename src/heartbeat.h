/* What notices that one of several ranks is gone, whatever the others wait for: MPI's calls, and a GPU's, wait for ever. Each rank
 * has a connection to rank 0 beside MPI, and a thread that says every half second over it that the process lives. A connection that
 * ends, or is silent for PS_SILENCE, ends every rank: one of them says who is gone, all exit with PS_DEVICE, and what was
 * written stays as it is. Of a killed process the kernel ends the connections; of a host that is down nobody does. */
#ifndef PS_SRC_HEARTBEAT_H
#define PS_SRC_HEARTBEAT_H

#include "kernels/status.h"
#include "src/mpi/transport.h"

#define PS_SILENCE 6.0 /* seconds */

struct ps_heartbeat; /* opaque */

/* Made by every rank. A rank that cannot reach rank 0 is not watched, which rank 0 warns of. */
enum ps_status ps_heartbeat_open(const struct ps_transport *transport, struct ps_heartbeat **heartbeat);
/* Before this process tells of an error that the end of another rank may have caused: so long it waits for that to be told instead,
 * and then does not return. NULL is fine. */
void ps_heartbeat_wait(const struct ps_heartbeat *heartbeat, double seconds);
/* Before this process ends of its own will: the others no longer watch it. ends_all: it ends them too, and has said why: none of
 * them says more. NULL is fine. */
void ps_heartbeat_close(struct ps_heartbeat *heartbeat, int ends_all);

#endif
